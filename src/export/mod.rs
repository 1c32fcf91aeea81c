//! Formats that a model is written in, one a file. Nothing counts as written before it was read back.

mod gguf;
#[cfg(feature = "run")]
mod onnx;
mod safetensors;

use std::fmt;

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

pub use self::gguf::{FileType, Gguf};
#[cfg(feature = "run")]
pub use self::onnx::Onnx;
pub use self::safetensors::{Layout, Safetensors};
pub use crate::store::ByteSize;

use crate::error::Result;
use crate::files::Destination;
use crate::model::{Config, Model};
use crate::run_state::{Dealt, RunState, Samples};
use crate::store::Weights;
use crate::store::writer::{Made, WeightMeasurement, Written};
use crate::work::Work;

/// What a format would write, known before any byte is read.
#[derive(Debug, Clone)]
pub struct SizeForecast {
    /// Names of the files.
    pub files: Vec<String>,
    /// Their size, or the most that it can be.
    pub bytes: u64,
    /// Whether the size is known exactly.
    pub exact: bool,
    /// Number of tensors.
    pub tensors: usize,
}

/// What a format has written.
#[derive(Debug)]
pub struct Exported {
    /// The files, in order.
    pub files: Vec<Written>,
    /// How they were verified, in plain words.
    pub how: String,
    /// Largest difference to what was meant, of the files or of what a runtime makes of them.
    pub max_abs_error: f64,
    /// What was seen of each weight.
    pub weights: Vec<(String, WeightMeasurement)>,
    /// Number of tensors in the files.
    pub tensors: usize,
    /// How each weight is stored, in the order of `weights`.
    pub encodings: Vec<String>,
    /// The weights as the files hold them, where the format rounds what passes have made: what is measured are these.
    pub held: Option<Weights>,
    /// The configuration that goes with the files; without one, the model's own is carried over.
    pub config: Option<Config>,
    /// Plain words for the report.
    pub notes: Vec<String>,
}

/// A way to write a model.
pub trait Format: fmt::Debug + Send + Sync {
    /// Name in recipes and on the command line.
    fn name(&self) -> &'static str;

    /// The options as they stand in a recipe, defaults written out.
    fn options(&self) -> Value;

    /// Decides what the options leave open by the data sets there are, so that recipes and reports say what was done.
    fn settle(&mut self, _sets: &[Samples]) {}

    /// The samples that the model is run on before it is written, so that [`RunState::importance`] is told.
    fn runs_on(&self) -> Option<Samples> {
        None
    }

    /// What would be written of a model that `run` has made.
    ///
    /// # Errors
    /// The format cannot express the model, by name.
    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast>;

    /// Writes into a folder, and reads back. Of a run of several parts, only what is this part's is written. A format that can takes what
    /// parts have `made` instead of making it again.
    ///
    /// # Errors
    /// Reading, making or writing tensors fails, or the files do not read back as meant.
    fn write(&self, model: &Model, run: &RunState, folder: &Destination, made: Option<&Made>, work: &Work) -> Result<Exported>;

    /// Whether files go to another machine as they are made, and need no room on this one.
    fn streams(&self) -> bool {
        false
    }

    /// The weights of each file, in the order of their names, where processes can write parts of a model that are joined, each with the rows
    /// that stay together; nothing where they cannot.
    ///
    /// # Errors
    /// The format cannot express the model, by name.
    fn weights_by_file(&self, _model: &Model, _run: &RunState) -> Result<Option<Vec<Vec<Dealt>>>> {
        Ok(None)
    }

    /// Bytes of the files that other processes have made whole, which are linked and not copied.
    ///
    /// # Errors
    /// As [`forecast`](Format::forecast).
    fn linked_bytes(&self, _model: &Model, _run: &RunState, _made: &Made) -> Result<u64> {
        Ok(0)
    }
}

/// Writes the table of formats.
macro_rules! formats {
    ($($name:literal => $format:ident,)+) => {
        /// One entry of a recipe's `export` list: a name, or a name with options.
        #[derive(Debug, Clone, PartialEq)]
        #[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
        #[cfg_attr(feature = "cli", schemars(transform = |schema: &mut schemars::Schema| crate::entry::name_alone(schema, FORMATS)))]
        pub enum Export {
            $(#[doc = concat!("The `", $name, "` format.")] #[cfg_attr(feature = "cli", schemars(rename = $name))] $format($format),)+
        }

        /// Names of all formats, in the order of the table.
        pub const FORMATS: &[&str] = &[$($name),+];

        impl Export {
            /// The format behind the entry.
            pub fn format(&self) -> &dyn Format {
                match self {
                    $(Export::$format(format) => format,)+
                }
            }
        }

        impl Export {
            /// The same, to be changed.
            pub(crate) fn format_mut(&mut self) -> &mut dyn Format {
                match self {
                    $(Export::$format(format) => format,)+
                }
            }
        }

        crate::entry::entry!(Export, "format", FORMATS, $($name => $format),+);

        $(impl From<$format> for Export {
            fn from(format: $format) -> Export {
                Export::$format(format)
            }
        })+
    };
}

crate::entry::gather! { formats []
    "safetensors" => Safetensors,
    "gguf" => Gguf,
    "onnx" => Onnx if runs,
}

impl Default for Export {
    fn default() -> Self {
        Export::Safetensors(Safetensors::default())
    }
}

impl Export {
    /// A format by its name, with all options at their defaults; nothing where this build has none of that name.
    pub fn of_name(name: &str) -> Option<Export> {
        serde_json::from_value(Value::String(name.to_owned())).ok()
    }
}

impl Serialize for Export {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry(self.format().name(), &self.format().options())?;
        map.end()
    }
}
