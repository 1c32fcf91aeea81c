//! Passes: one algorithm a file. A pass is its own configuration: the same struct is the YAML step, the
//! command's flags and the value that a program makes.
//!
//! A pass never reads or prints. It takes a model and gives back one whose weights will be different when
//! they are written.

mod amount;
mod cast;
pub mod prune_unstructured;
mod quantize_dynamic;
mod targets;
mod threshold;

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::Serialize;
use serde_json::Value;

pub use amount::{Amount, Fraction, NOfM};
pub use cast::{Cast, FloatFormat, Overflow};
pub use prune_unstructured::{PruneUnstructured, Rule, Scope};
pub use quantize_dynamic::{ActivationScheme, GranularityKind, Observer, QuantizeDynamic};

use crate::error::Result;
use crate::model::Model;

/// A step of a pipeline.
pub trait Pass: fmt::Debug + Send + Sync {
    /// Name in recipes and on the command line.
    fn name(&self) -> &'static str;

    /// The options as they stand in a recipe, defaults written out.
    fn options(&self) -> Value;

    /// Options that contradict each other; called before anything is opened.
    ///
    /// # Errors
    /// What is wrong, by name.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The model after the pass. Quick: bytes are made when the model is written.
    ///
    /// # Errors
    /// A pattern without a match, or a weight that the pass cannot take.
    fn apply(&self, model: Model) -> Result<Model>;
}

/// Writes the table of passes: one enum that is the step of a recipe and the command of the binary.
macro_rules! passes {
    ($($(#[$doc:meta])* $name:literal => $pass:ident),+ $(,)?) => {
        /// One step of a recipe: a pass with its options, or its name alone.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[cfg_attr(feature = "cli", derive(clap::Subcommand, schemars::JsonSchema))]
        #[cfg_attr(feature = "cli", schemars(transform = |schema: &mut schemars::Schema| name_alone(schema, PASSES)))]
        pub enum Step {
            $($(#[$doc])* #[serde(rename = $name)] $pass($pass),)+
        }

        /// Names of all passes, in the order of the table.
        pub const PASSES: &[&str] = &[$($name),+];

        impl Step {
            /// The pass behind the step.
            pub fn pass(&self) -> &dyn Pass {
                match self {
                    $(Step::$pass(pass) => pass,)+
                }
            }

            fn by_name<E: de::Error>(name: &str) -> std::result::Result<Step, E> {
                match name {
                    $($name => Ok(Step::$pass($pass::default())),)+
                    _ => Err(E::unknown_variant(name, PASSES)),
                }
            }

            fn with_options<'de, A: MapAccess<'de>>(name: &str, map: &mut A) -> std::result::Result<Step, A::Error> {
                match name {
                    $($name => map.next_value::<Option<$pass>>().map(|pass| Step::$pass(pass.unwrap_or_default())),)+
                    _ => Err(de::Error::unknown_variant(name, PASSES)),
                }
            }
        }

        $(impl From<$pass> for Step {
            fn from(pass: $pass) -> Step {
                Step::$pass(pass)
            }
        })+
    };
}

passes! {
    /// Zero the weights that are smallest in absolute value
    "prune-unstructured" => PruneUnstructured,
    /// Store linear weights as int8; activations are quantized while the model runs, or not at all
    "quantize-dynamic" => QuantizeDynamic,
    /// Convert floats to another float format
    "cast" => Cast,
}

impl<'de> Deserialize<'de> for Step {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entry;
        impl<'de> Visitor<'de> for Entry {
            type Value = Step;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a pass ({}), or one with options", PASSES.join(", "))
            }

            fn visit_str<E: de::Error>(self, name: &str) -> std::result::Result<Step, E> {
                Step::by_name(name)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Step, A::Error> {
                let name: String = map.next_key()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
                let step = Step::with_options(&name, &mut map)?;
                match map.next_key::<String>()? {
                    None => Ok(step),
                    Some(second) => Err(de::Error::custom(format!("`{second}` is a second pass in one entry; begin a new one with `-`"))),
                }
            }
        }
        deserializer.deserialize_any(Entry)
    }
}

/// Adds to the schema of an entry with options that its name alone is one too.
#[cfg(feature = "cli")]
pub(crate) fn name_alone(schema: &mut schemars::Schema, names: &[&str]) {
    if let Some(Value::Array(forms)) = schema.get_mut("oneOf") {
        forms.push(serde_json::json!({ "description": "By name, everything by default", "enum": names }));
    }
}

fn options_of(pass: &impl Serialize) -> Value {
    serde_json::to_value(pass).unwrap_or(Value::Null)
}
