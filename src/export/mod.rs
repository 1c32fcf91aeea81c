//! Output formats, one per file. Every format verifies its files by reading them back.

pub(crate) mod custom;
mod gguf;
#[cfg(feature = "run")]
mod onnx;
mod safetensors;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

#[doc(hidden)]
pub use self::custom::Custom;
#[doc(hidden)]
pub use self::gguf::TensorType;
pub use self::gguf::{FileType, Gguf};
pub(crate) use self::gguf::{gguf_kind, gguf_kinds};
#[cfg(feature = "run")]
pub use self::onnx::Onnx;
pub use self::safetensors::{Layout, Safetensors};
pub use crate::store::ByteSize;

use crate::contract::Planned;
use crate::error::{Result, counted};
use crate::files::Destination;
use crate::model::{Config, Model};
use crate::run_state::{Assignment, RunState, Samples};
use crate::store::Weights;
use crate::store::writer::{Prebuilt, WeightMeasurement, Written};
use crate::work::Work;

/// Files and size of an output, predicted without reading a tensor.
#[derive(Debug, Clone)]
#[doc(hidden)]
pub struct SizeForecast {
    /// Names of the files.
    pub files: Vec<String>,
    /// Their total size, or an upper bound of it.
    pub bytes: u64,
    /// Whether the size is known exactly.
    pub exact: bool,
    /// Number of tensors.
    pub tensors: usize,
}

/// Result of writing a format.
#[derive(Debug)]
#[doc(hidden)]
pub struct Exported {
    /// The files, in order.
    pub files: Vec<Written>,
    /// Description of how they were verified.
    pub how: String,
    /// Largest absolute difference to the expected values, of the files or of the outputs of a runtime.
    pub max_abs_error: f64,
    /// Measurements of each weight.
    pub weights: Vec<(String, WeightMeasurement)>,
    /// Number of tensors in the files.
    pub tensors: usize,
    /// How each weight is stored, in the order of `weights`.
    pub encodings: Vec<String>,
    /// The weights as stored in the files, if the format rounds them. Fidelity is measured with these.
    pub stored_weights: Option<Weights>,
    /// The configuration to write; `None` to write the model's own.
    pub config: Option<Config>,
    /// Notes for the report.
    pub notes: Vec<String>,
}

/// The result of a pass that the files of a format do not have.
#[derive(Debug)]
#[doc(hidden)]
pub struct LostResult {
    /// Name of the pass.
    pub pass: &'static str,
    /// The difference between the files and the result, as a part of a sentence.
    pub reason: String,
    /// How the files keep the result.
    pub remedy: String,
}

/// The loss of blocks of GGUF files, whose values other formats store as floats.
fn lost_blocks(model: &Model) -> Option<LostResult> {
    let count = model.weights.by_name.values().filter(|weight| weight.exact_blocks().is_some()).count();
    (count > 0).then(|| LostResult {
        pass: "quantize",
        reason: format!("stores the values of {} in blocks of a GGUF file as 32-bit floats, which are not smaller", counted(count, "weight")),
        remedy: "write a GGUF file, as in `-o small.gguf` or `export: [{ gguf: { type: Q4_K_M } }]`, or use a scheme of compressed-tensors".into(),
    })
}

/// An output format.
#[doc(hidden)]
pub trait Format: fmt::Debug + Send + Sync {
    /// Name in recipes and on the command line.
    fn name(&self) -> &'static str;

    /// The options as in a recipe, including defaults.
    fn options(&self) -> Value;

    /// Resolves defaults that depend on the planned model and on which data sets are configured, so that
    /// recipes and reports contain the effective options.
    fn resolve_defaults(&mut self, _model: &Model, _sets: &[Samples]) {}

    /// The data set on which the model is run before writing to compute [`RunState::importance`]; `None`
    /// if the format does not need it.
    fn runs_on(&self) -> Option<Samples> {
        None
    }

    /// Resolves relative paths in the options against a folder.
    fn resolve(&mut self, _folder: &Path) {}

    /// Files that the format reads in addition to the model.
    fn reads(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Small files for the output folder, by name, from the state before writing.
    ///
    /// # Errors
    /// As [`forecast`](Format::forecast).
    fn attached(&self, _model: &Model, _run: &RunState) -> Result<BTreeMap<String, Vec<u8>>> {
        Ok(BTreeMap::new())
    }

    /// The result of a pass that the files do not have with these options; `None` if they keep all results.
    fn lost_result(&self, _model: &Model, _run: &RunState) -> Option<LostResult> {
        None
    }

    /// Predicts the files for a model after the passes of `run`.
    ///
    /// # Errors
    /// The format cannot represent the model. The error names the unsupported tensor or property.
    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast>;

    /// The planned files as runtimes read them, without reading a tensor; `None` if the files depend on the
    /// values of the weights, or if no runtime with known rules loads the format.
    ///
    /// # Errors
    /// As [`forecast`](Format::forecast).
    fn planned(&self, _model: &Model, _run: &RunState) -> Result<Option<Planned>> {
        Ok(None)
    }

    /// Writes the model to a folder and verifies the files. In a run in parts, only the weights of this
    /// part are written. Formats that support parts take `prebuilt` weights instead of computing them
    /// again.
    ///
    /// # Errors
    /// Reading, computing or writing tensors fails, or the verification fails.
    fn write(&self, model: &Model, run: &RunState, folder: &Destination, prebuilt: Option<&Prebuilt>, work: &Work) -> Result<Exported>;

    /// Whether files are uploaded to remote destinations while they are written, without a local copy.
    fn streams(&self) -> bool {
        false
    }

    /// The weights of each file in the order of their names, for assigning them to parts; `None` if the
    /// format cannot be written in parts.
    ///
    /// # Errors
    /// As [`forecast`](Format::forecast).
    fn weights_by_file(&self, _model: &Model, _run: &RunState) -> Result<Option<Vec<Vec<Assignment>>>> {
        Ok(None)
    }

    /// Bytes of complete prebuilt files, which are linked instead of copied.
    ///
    /// # Errors
    /// As [`forecast`](Format::forecast).
    fn linked_bytes(&self, _model: &Model, _run: &RunState, _prebuilt: &Prebuilt) -> Result<u64> {
        Ok(0)
    }
}

/// Defines [`Export`] from the table of formats.
macro_rules! formats {
    ($($name:literal => $format:ident,)+) => {
        /// One entry of a recipe's `export` list: a name, or a name with options.
        #[derive(Debug, Clone, PartialEq)]
        #[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
        #[cfg_attr(feature = "cli", schemars(transform = |schema: &mut schemars::Schema| crate::entry::allow_bare_name(schema, FORMATS)))]
        #[non_exhaustive]
        pub enum Export {
            $(#[doc = concat!("The `", $name, "` format.")] #[cfg_attr(feature = "cli", schemars(rename = $name))] $format($format),)+
            /// A format that the program has registered.
            #[doc(hidden)]
            #[cfg_attr(feature = "cli", schemars(skip))]
            Custom(Custom),
        }

        /// Names of all formats, in the order of the table.
        pub const FORMATS: &[&str] = &[$($name),+];

        impl Export {
            /// The format of the entry.
            #[doc(hidden)]
            pub fn format(&self) -> &dyn Format {
                match self {
                    $(Export::$format(format) => format,)+
                    Export::Custom(format) => format,
                }
            }
        }

        impl Export {
            /// The format of the entry, mutable.
            pub(crate) fn format_mut(&mut self) -> &mut dyn Format {
                match self {
                    $(Export::$format(format) => format,)+
                    Export::Custom(format) => format,
                }
            }
        }

        crate::entry::entry!(Export, "format", FORMATS, registered in custom::REGISTERED, $($name => $format),+);

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
    /// The format with this name and default options; `None` if this build has no such format.
    pub fn from_name(name: &str) -> Option<Export> {
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
