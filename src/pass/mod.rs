//! Passes: one algorithm a file. A pass is its own configuration: the same struct is the YAML step, the
//! command's flags and the value that a program makes.
//!
//! A pass takes a model and gives back another one; it prints nothing and writes no output. Passes over weights read nothing either: the
//! new weights are made when the model is written. Passes that [run the model](Pass::runs_on) read the data sets of the recipe, and some
//! of them other models, like a teacher ([`Pass::reads`]); they keep unfinished work in [`Context::workplace`].

pub(crate) mod amount;
mod cast;
mod integers;
mod palettize;
pub mod prune_unstructured;
mod quantize;
mod quantize_dynamic;
mod targets;
mod threshold;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

pub use amount::{Amount, Fraction, NOfM};
pub use cast::{Cast, FloatFormat, Overflow};
pub use integers::WeightObserver;
pub use palettize::Palettize;
pub use prune_unstructured::{PruneUnstructured, Rule, Scope};
pub use quantize::{Method, Quantize, Scheme};
pub use quantize_dynamic::{ActivationRounding, GranularityKind, QuantizeDynamic};

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! Passes that run the model.

    mod cached_scales;
    pub(in crate::pass) mod calibrate;
    pub(in crate::pass) mod chains;
    pub(in crate::pass) mod decompose;
    mod dequantize;
    mod distill;
    mod finetune;
    pub(in crate::pass) mod identity;
    mod input_importance;
    pub(in crate::pass) mod layerwise;
    pub mod prune_structured;
    mod quantize_static;
    mod stored_scales;
    pub(in crate::pass) mod walk;

    pub use decompose::Decompose;
    pub use dequantize::Dequantize;
    pub use distill::{Distill, Student};
    pub use finetune::Finetune;
    pub(crate) use input_importance::input_importance;
    pub use prune_structured::PruneStructured;
    pub use quantize_static::{ActivationTarget, Damage, Goal, QuantizeStatic, Smooth, worth_keeping};

    use crate::pass::{Amount, Context, GranularityKind, InputImportance, Pass, Samples, Scope, WeightObserver, options_of};
}

#[cfg(feature = "run")]
pub use running::*;

#[cfg(not(feature = "run"))]
#[path = "no_layerwise.rs"]
mod layerwise;

use crate::error::Result;
use crate::model::Model;
use crate::run_state::RunState;
pub use crate::run_state::{InputImportance, Samples};
use crate::store::Weights;
use crate::work::Work;

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

    /// Decides what the options leave open, by the model that the pass will meet and by the data sets there are, so that recipes and
    /// reports say what was done.
    fn settle(&mut self, _model: &Model, _sets: &[Samples]) {}

    /// Files and folders that the pass reads beside the model and the data sets.
    fn reads(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// The samples that the pass runs the model on, or [`Samples::None`] where it computes on weights before they are written; nothing
    /// where all of its work is done while they are written.
    fn runs_on(&self) -> Option<Samples> {
        None
    }

    /// Number of samples below which the result is likely to overfit them.
    fn least_samples(&self) -> usize {
        1
    }

    /// Whether the pass keeps unfinished work in [`Context::workplace`], so that an interrupted run can go on with it.
    fn keeps_work(&self) -> bool {
        false
    }

    /// Bytes on disk that such work takes for the weights that the pass changes; `after` are those behind the pass.
    fn kept_bytes(&self, _changed: &BTreeSet<String>, _after: &Weights) -> u64 {
        0
    }

    /// The model after the pass. Without a context that is quick, and no tensor is read: what a pass does that runs the model is told as
    /// far as it can be told beforehand, names, shapes and encodings. With one, all of its work is done but for what is left to writing. What was done is told to
    /// `run`.
    ///
    /// # Errors
    /// A pattern without a match, or a weight that the pass cannot take; with a context also: samples do not fit the model, memory runs
    /// out, or the work is cancelled.
    fn apply(&self, model: Model, run: &mut RunState, context: Option<&Context>) -> Result<Model>;

    /// What helps where the model's answers are ruined by the pass.
    fn remedy(&self) -> &'static str {
        "a smaller change"
    }
}

/// What a pass works with.
pub struct Context<'a> {
    /// Threads, progress, and the wish to stop.
    pub work: Work<'a>,
    /// Start of every random choice.
    pub seed: u64,
    /// The data sets of the recipe.
    #[cfg(feature = "run")]
    pub data: &'a crate::data::DataSets,
    /// Where models run.
    #[cfg(feature = "run")]
    pub device: candle_core::Device,
    /// The memory that models may take.
    pub memory: crate::work::MemoryLimit,
    /// Accounts of memory, where a record of them is wanted.
    #[cfg(feature = "run")]
    pub memory_tracker: Option<std::sync::Arc<crate::exec::MemoryTracker>>,
    /// Where unfinished work is kept, so that it can go on.
    pub workplace: Option<PathBuf>,
    /// Whether to go on with unfinished work.
    pub resume: bool,
}

/// Writes the table of passes: one enum that is the step of a recipe and the command of the binary.
macro_rules! passes {
    ($($(#[$doc:meta])* $name:literal => $pass:ident,)+) => {
        /// One step of a recipe: a pass with its options, or its name alone.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[cfg_attr(feature = "cli", derive(clap::Subcommand, schemars::JsonSchema))]
        #[cfg_attr(feature = "cli", schemars(transform = |schema: &mut schemars::Schema| crate::entry::name_alone(schema, PASSES)))]
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

            /// The same, to be changed.
            pub(crate) fn pass_mut(&mut self) -> &mut dyn Pass {
                match self {
                    $(Step::$pass(pass) => pass,)+
                }
            }
        }

        crate::entry::entry!(Step, "pass", PASSES, $($name => $pass),+);

        $(impl From<$pass> for Step {
            fn from(pass: $pass) -> Step {
                Step::$pass(pass)
            }
        })+
    };
}

crate::entry::gather! { passes []
    /// Zero the weights that are smallest in absolute value
    "prune-unstructured" => PruneUnstructured,
    /// Remove heads, neurons, channels, width, layers or experts from a model: smaller tensors, less to compute
    "prune-structured" => PruneStructured if runs,
    /// Put two thin layers in the place of one: fewer parameters, less to compute
    "decompose" => Decompose if runs,
    /// Store linear weights in a scheme that consumers know by name: W4A16, W8A8 …
    "quantize" => Quantize,
    /// Store linear weights as int8; activations are quantized while the model runs, or not at all
    "quantize-dynamic" => QuantizeDynamic,
    /// Store weights as int8 and quantize activations by scales found on calibration samples
    "quantize-static" => QuantizeStatic if runs,
    /// Store weights as places in small palettes of values, found by k-means
    "palettize" => Palettize,
    /// Train a student on a teacher's outputs
    "distill" => Distill if runs,
    /// Train the model on labels or the next token: recovers accuracy after pruning, trains through quantizers
    "finetune" => Finetune if runs,
    /// Convert floats to another float format
    "cast" => Cast,
    /// Make floats of quantized weights, so that other passes take them
    "dequantize" => Dequantize if runs,
}

fn options_of(pass: &impl Serialize) -> Value {
    serde_json::to_value(pass).unwrap_or(Value::Null)
}
