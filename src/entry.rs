//! Entries of a recipe's lists: a bare name, or one name with options. Used by passes and formats.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use crate::error::Result;
use crate::registry::Registry;

/// Constructs an entry from its options, which are null if there are none.
pub(crate) type Make<T> = Box<dyn FnOnce(Value) -> Result<T>>;

/// Constructs entries that the program has registered.
pub(crate) type Constructor<T> = Arc<dyn Fn(Value) -> Result<T> + Send + Sync>;

/// Constructor of the registered entry with this name.
pub(crate) fn registered<T: 'static>(registry: &Registry<Constructor<T>>, name: &str) -> Option<Make<T>> {
    let make = registry.get(name)?;
    Some(Box::new(move |options| make(options)))
}

/// A named entry of a list.
pub(crate) trait Entry: Sized {
    /// Kind of the entry: `pass`, `format`.
    const WHAT: &'static str;
    /// All valid names.
    const NAMES: &'static [&'static str];

    /// The entry with this name and default options.
    fn with_defaults(name: &str) -> Option<Self>;

    /// Constructor of the entry with this name that the program has registered.
    fn registered(_name: &str) -> Option<Make<Self>> {
        None
    }

    /// The entry with this name and the options that the map yields next.
    fn with_options<'de, A: MapAccess<'de>>(name: &str, map: &mut A) -> Option<Result<Self, A::Error>>;
}

/// Implements [`Entry`] and `Deserialize` for an enum whose variants have the names of their option
/// types.
macro_rules! entry {
    ($entry:ident, $what:literal, $names:ident, $(registered in $registry:path,)? $($name:literal => $variant:ident),+) => {
        impl $crate::entry::Entry for $entry {
            const WHAT: &'static str = $what;
            const NAMES: &'static [&'static str] = $names;

            $(fn registered(name: &str) -> Option<$crate::entry::Make<Self>> {
                $crate::entry::registered(&$registry, name)
            })?

            fn with_defaults(name: &str) -> Option<Self> {
                match name {
                    $($name => Some($entry::$variant($variant::default())),)+
                    _ => None,
                }
            }

            fn with_options<'de, A: serde::de::MapAccess<'de>>(name: &str, map: &mut A) -> Option<Result<Self, A::Error>> {
                match name {
                    $($name => Some(map.next_value::<Option<$variant>>().map(|options| $entry::$variant(options.unwrap_or_default()))),)+
                    _ => None,
                }
            }
        }

        impl<'de> serde::Deserialize<'de> for $entry {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::entry::deserialize(deserializer)
            }
        }
    };
}
pub(crate) use entry;

/// Passes the rows of a table to the macro that expands it. Rows with `if runs` are dropped without the
/// feature `run`.
macro_rules! gather {
    ($table:ident [$($done:tt)*]) => { $table! { $($done)* } };
    ($table:ident [$($done:tt)*] $(#[$doc:meta])* $name:literal => $entry:ident, $($rest:tt)*) => {
        $crate::entry::gather! { $table [$($done)* $(#[$doc])* $name => $entry,] $($rest)* }
    };
    ($table:ident [$($done:tt)*] $(#[$doc:meta])* $name:literal => $entry:ident if runs, $($rest:tt)*) => {
        $crate::entry::gather_where_runs! { { $(#[$doc])* $name => $entry, } $table [$($done)*] $($rest)* }
    };
}
pub(crate) use gather;

#[cfg(feature = "run")]
macro_rules! gather_where_runs {
    ({ $($row:tt)* } $table:ident [$($done:tt)*] $($rest:tt)*) => { $crate::entry::gather! { $table [$($done)* $($row)*] $($rest)* } };
}
#[cfg(not(feature = "run"))]
macro_rules! gather_where_runs {
    ({ $($row:tt)* } $table:ident [$($done:tt)*] $($rest:tt)*) => { $crate::entry::gather! { $table [$($done)*] $($rest)* } };
}
pub(crate) use gather_where_runs;

/// Deserializes an entry in either form.
pub(crate) fn deserialize<'de, T: Entry, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct Form<T>(PhantomData<T>);
    impl<'de, T: Entry> Visitor<'de> for Form<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "a {} ({}), or one with options", T::WHAT, T::NAMES.join(", "))
        }

        fn visit_str<E: de::Error>(self, name: &str) -> Result<T, E> {
            if let Some(entry) = T::with_defaults(name) {
                return Ok(entry);
            }
            let make = T::registered(name).ok_or_else(|| E::unknown_variant(name, T::NAMES))?;
            make(Value::Null).map_err(E::custom)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
            let name: String = map.next_key()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
            let entry = match T::with_options(&name, &mut map) {
                Some(entry) => entry?,
                None => {
                    let make = T::registered(&name).ok_or_else(|| de::Error::unknown_variant(&name, T::NAMES))?;
                    make(map.next_value()?).map_err(de::Error::custom)?
                }
            };
            match map.next_key::<String>()? {
                None => Ok(entry),
                Some(second) => Err(de::Error::custom(format!("`{second}` is a second {} in one entry; start a new entry with `-`", T::WHAT))),
            }
        }
    }
    deserializer.deserialize_any(Form(PhantomData))
}

/// Extends the schema of an entry: a bare name is valid too.
#[cfg(feature = "cli")]
pub(crate) fn allow_bare_name(schema: &mut schemars::Schema, names: &[&str]) {
    // An untagged variant, although it is not part of the schema, changes `oneOf` to `anyOf`.
    if let Some(serde_json::Value::Array(mut forms)) = schema.remove("oneOf").or_else(|| schema.remove("anyOf")) {
        forms.push(serde_json::json!({ "description": "Name with default options", "enum": names }));
        schema.insert("oneOf".into(), forms.into());
    }
}
