//! Deserialization of a data set: the name of a file, or options.

use std::fmt;
use std::path::Path;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor, value};

use super::kind::{NOT_LOCAL, unknown_extension};
use super::options::Data;

struct Form;

impl<'de> Visitor<'de> for Form {
    type Value = Option<Data>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("the name of a file, or options like { text: file.txt }")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Option<Data>, E> {
        Ok(None)
    }

    fn visit_none<E: de::Error>(self) -> Result<Option<Data>, E> {
        Ok(None)
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Option<Data>, E> {
        if crate::files::is_remote(Path::new(name)) && Data::in_file(Path::new(name)).is_none() {
            return Err(E::custom(format!("`{name}` {NOT_LOCAL}")));
        }
        // Folders are not searched, because the path is not resolved yet.
        Data::in_file(Path::new(name)).map(Some).ok_or_else(|| E::custom(unknown_extension(name)))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Option<Data>, A::Error> {
        Data::deserialize(value::MapAccessDeserializer::new(map)).map(Some)
    }
}

/// Deserializes a file name or options.
pub(super) fn name_or_options<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Data>, D::Error> {
    deserializer.deserialize_any(Form)
}

/// JSON schema of a data set.
#[cfg(feature = "cli")]
pub(super) fn name_or_options_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let options = generator.subschema_for::<Data>();
    schemars::json_schema!({ "anyOf": [{ "type": "string" }, options, { "type": "null" }] })
}
