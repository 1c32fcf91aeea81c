//! Passes: one algorithm a file. A pass is its own configuration: the same struct is the YAML step, the
//! command's flags and the value that a program makes.
//!
//! A pass never reads or prints. It takes a model and gives back one whose weights will be different when
//! they are written.

mod amount;
mod cast;
#[cfg(feature = "run")]
mod distill;
#[cfg(feature = "run")]
mod finetune;
mod integers;
#[cfg(feature = "run")]
pub mod prune_structured;
pub mod prune_unstructured;
mod quantize_dynamic;
#[cfg(feature = "run")]
mod quantize_static;
mod targets;
mod threshold;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

pub use amount::{Amount, Fraction, NOfM};
pub use cast::{Cast, FloatFormat, Overflow};
#[cfg(feature = "run")]
pub use distill::{Distill, Student};
#[cfg(feature = "run")]
pub use finetune::Finetune;
pub use integers::WeightObserver;
#[cfg(feature = "run")]
pub use prune_structured::PruneStructured;
pub use prune_unstructured::{PruneUnstructured, Rule, Scope};
pub use quantize_dynamic::{ActivationRounding, GranularityKind, QuantizeDynamic};
#[cfg(feature = "run")]
pub use quantize_static::{ActivationTarget, Damage, Goal, QuantizeStatic, Smooth, worth_keeping};

use crate::error::Result;
use crate::model::Model;
use crate::store::Sweep;

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

    /// Makes paths among the options relative to a folder.
    fn resolve(&mut self, _folder: &Path) {}

    /// Files and folders that the pass reads beside the model and the data sets.
    fn reads(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// The model after the pass. Quick: bytes are made when the model is written. Of a pass that runs the model, only as far as
    /// that can be told without running it: names, shapes, encodings.
    ///
    /// # Errors
    /// A pattern without a match, or a weight that the pass cannot take.
    fn apply(&self, model: Model) -> Result<Model>;

    /// The samples that the pass runs the model on; it has work to [`perform`](Pass::perform) then.
    fn runs_on(&self) -> Option<Samples> {
        None
    }

    /// The model after the pass, with all that takes running it.
    ///
    /// # Errors
    /// As [`apply`](Pass::apply); samples do not fit the model, memory runs out, or the work is cancelled.
    fn perform(&self, model: Model, _context: &Context) -> Result<Model> {
        self.apply(model)
    }
}

/// A data set of a recipe, by what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Samples {
    /// `calibration`.
    Calibration,
    /// `train`.
    Train,
    /// None: the pass computes on weights alone.
    None,
}

/// What a pass works with.
pub struct Context<'a> {
    /// Threads, progress, and the wish to stop.
    pub sweep: Sweep<'a>,
    /// Start of every random choice.
    pub seed: u64,
    /// The data sets of the recipe.
    #[cfg(feature = "run")]
    pub data: &'a crate::data::DataSets,
    /// Where models run.
    #[cfg(feature = "run")]
    pub device: candle_core::Device,
    /// Where unfinished work is kept, so that it can go on.
    pub workplace: Option<PathBuf>,
    /// Whether to go on with unfinished work.
    pub resume: bool,
}

/// Writes the table of passes: one enum that is the step of a recipe and the command of the binary.
macro_rules! passes {
    ($($(#[$doc:meta])* $name:literal => $pass:ident $(if $feature:literal)?),+ $(,)?) => {
        /// One step of a recipe: a pass with its options, or its name alone.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[cfg_attr(feature = "cli", derive(clap::Subcommand, schemars::JsonSchema))]
        #[cfg_attr(feature = "cli", schemars(transform = |schema: &mut schemars::Schema| crate::entry::name_alone(schema, PASSES)))]
        pub enum Step {
            $($(#[$doc])* $(#[cfg(feature = $feature)])? #[serde(rename = $name)] $pass($pass),)+
        }

        /// Names of all passes, in the order of the table.
        pub const PASSES: &[&str] = &[$($(#[cfg(feature = $feature)])? $name),+];

        impl Step {
            /// The pass behind the step.
            pub fn pass(&self) -> &dyn Pass {
                match self {
                    $($(#[cfg(feature = $feature)])? Step::$pass(pass) => pass,)+
                }
            }
        }

        impl Step {
            /// Makes paths among the options relative to a folder.
            pub(crate) fn resolve(&mut self, folder: &Path) {
                match self {
                    $($(#[cfg(feature = $feature)])? Step::$pass(pass) => pass.resolve(folder),)+
                }
            }
        }

        crate::entry::entry!(Step, "pass", PASSES, $($(#[cfg(feature = $feature)])? $name => $pass),+);

        $($(#[cfg(feature = $feature)])? impl From<$pass> for Step {
            fn from(pass: $pass) -> Step {
                Step::$pass(pass)
            }
        })+
    };
}

passes! {
    /// Zero the weights that are smallest in absolute value
    "prune-unstructured" => PruneUnstructured,
    /// Take heads, neurons, channels, width or layers out of a model: smaller tensors, less to compute
    "prune-structured" => PruneStructured if "run",
    /// Store linear weights as int8; activations are quantized while the model runs, or not at all
    "quantize-dynamic" => QuantizeDynamic,
    /// Store weights as int8 and quantize activations by scales found on calibration samples
    "quantize-static" => QuantizeStatic if "run",
    /// Train a student to answer as a teacher does
    "distill" => Distill if "run",
    /// Train the model on labels or the next token: recovers accuracy after pruning, trains through quantizers
    "finetune" => Finetune if "run",
    /// Convert floats to another float format
    "cast" => Cast,
}

fn options_of(pass: &impl Serialize) -> Value {
    serde_json::to_value(pass).unwrap_or(Value::Null)
}
