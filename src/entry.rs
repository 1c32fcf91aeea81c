//! Entries of a recipe's lists: a name alone, or one name with options. Passes and formats share the form.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserializer, MapAccess, Visitor};

/// Something that is named in a list.
pub(crate) trait Entry: Sized {
    /// What it is called: `pass`, `format`.
    const WHAT: &'static str;
    /// The names there are.
    const NAMES: &'static [&'static str];

    /// The entry of this name, options at their defaults.
    fn alone(name: &str) -> Option<Self>;

    /// The entry of this name with the options that come next.
    fn with_options<'de, A: MapAccess<'de>>(name: &str, map: &mut A) -> Option<Result<Self, A::Error>>;
}

/// Implements [`Entry`] and `Deserialize` for an enum of variants that are named like their options.
macro_rules! entry {
    ($entry:ident, $what:literal, $names:ident, $($name:literal => $variant:ident),+) => {
        impl $crate::entry::Entry for $entry {
            const WHAT: &'static str = $what;
            const NAMES: &'static [&'static str] = $names;

            fn alone(name: &str) -> Option<Self> {
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

/// Hands the rows of a table to the macro that writes it; rows with `if runs` only where the build runs models.
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

/// Reads an entry in either form.
pub(crate) fn deserialize<'de, T: Entry, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct Form<T>(PhantomData<T>);
    impl<'de, T: Entry> Visitor<'de> for Form<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "a {} ({}), or one with options", T::WHAT, T::NAMES.join(", "))
        }

        fn visit_str<E: de::Error>(self, name: &str) -> Result<T, E> {
            T::alone(name).ok_or_else(|| E::unknown_variant(name, T::NAMES))
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
            let name: String = map.next_key()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
            let entry = T::with_options(&name, &mut map).unwrap_or_else(|| Err(de::Error::unknown_variant(&name, T::NAMES)))?;
            match map.next_key::<String>()? {
                None => Ok(entry),
                Some(second) => Err(de::Error::custom(format!("`{second}` is a second {} in one entry; begin a new one with `-`", T::WHAT))),
            }
        }
    }
    deserializer.deserialize_any(Form(PhantomData))
}

/// Adds to the schema of an entry with options that its name alone is one too.
#[cfg(feature = "cli")]
pub(crate) fn name_alone(schema: &mut schemars::Schema, names: &[&str]) {
    if let Some(serde_json::Value::Array(forms)) = schema.get_mut("oneOf") {
        forms.push(serde_json::json!({ "description": "By name, everything by default", "enum": names }));
    }
}
