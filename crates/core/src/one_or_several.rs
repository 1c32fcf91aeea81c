//! Deserialization of options that are lists, or a single value instead of a list.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor, value};

struct Form<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Form<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value, or a list of values")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<T>, E> {
        Ok(vec![T::deserialize(value::StrDeserializer::new(text))?])
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Vec<T>, E> {
        Ok(vec![T::deserialize(value::U64Deserializer::new(number))?])
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Vec<T>, E> {
        Ok(vec![T::deserialize(value::I64Deserializer::new(number))?])
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Vec<T>, E> {
        Ok(vec![T::deserialize(value::F64Deserializer::new(number))?])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Vec<T>, A::Error> {
        Deserialize::deserialize(value::SeqAccessDeserializer::new(list))
    }
}

/// Deserializes a single value or a list to a vector.
pub fn one_or_several<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_any(Form(PhantomData))
}

/// The list is empty.
pub const EMPTY: &str = "expected at least one value";

/// Deserializes a list that is not empty, for options whose default selects everything, as an empty list in
/// memory does.
pub fn non_empty<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let list = Vec::deserialize(deserializer)?;
    if list.is_empty() { Err(de::Error::custom(EMPTY)) } else { Ok(list) }
}

/// JSON schema of an option that is a single value or a list.
#[cfg(feature = "cli")]
pub fn one_or_several_schema<T: schemars::JsonSchema>(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let one = generator.subschema_for::<T>();
    schemars::json_schema!({ "anyOf": [one, { "type": "array", "items": one }] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explicit_lists_are_not_empty() {
        let parse = |text: &str| non_empty::<u32, _>(&mut serde_json::Deserializer::from_str(text));
        assert_eq!(parse("[1, 2]").unwrap(), [1, 2]);
        assert!(parse("[]").unwrap_err().to_string().starts_with(EMPTY));
    }
}
