//! Compression passes, one algorithm per file. The struct of a pass is its configuration: the same type
//! is the step of a recipe, the arguments of a command, and the value that callers of the library
//! construct.
//!
//! A pass converts a model to another one; it does not print or write output. It first returns a
//! [`Plan`], which contains the model with its final names, shapes and encodings, and reads no tensor. The
//! plan of a weight pass is already complete: the new weights are computed when the model is written.
//! Passes that [run the model](Pass::runs_on) add work to their plan, which reads the data sets of the
//! recipe, and sometimes other models, such as a teacher ([`Pass::reads`]). It stores checkpoints in
//! [`Context::checkpoints`].

pub(crate) mod amount;
mod cast;
pub(crate) mod custom;
mod palettize;
mod peft;
mod plan;
mod prune_unstructured;
mod quantize;
mod quantize_dynamic;
mod targets;
mod threshold;
mod weight_quantizer;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

pub use amount::{Amount, NOfM};
pub use cast::{Cast, FloatFormat, Overflow};
#[doc(hidden)]
pub use custom::Custom;
pub use palettize::Palettize;
#[doc(hidden)]
pub use plan::Plan;
pub use prune_unstructured::{Importance as WeightImportance, PruneUnstructured, Rule, Scope};
pub use quantize::{Correction, Guide, KvCache, Method, Quantize, Scheme, SchemeRule};
pub use quantize_dynamic::{ActivationRounding, GranularityKind, QuantizeDynamic};
pub use weight_quantizer::WeightObserver;

#[cfg(feature = "run")]
#[path = "."]
mod running {
    //! Passes that run the model.

    pub(crate) mod assignment;
    pub(in crate::pass) mod calibrate;
    pub(in crate::pass) mod channel_equalization;
    pub(in crate::pass) mod consumers;
    pub(in crate::pass) mod decompose;
    mod dequantize;
    mod distill;
    mod extract_language_model;
    mod finetune;
    pub(in crate::pass) mod fresh_weights;
    pub(in crate::pass) mod input_importance;
    pub(in crate::pass) mod input_scales;
    mod kv_cache_scales;
    pub(in crate::pass) mod layerwise;
    mod new_head;
    pub(in crate::pass) mod prune_structured;
    pub(crate) mod prune_vocabulary;
    mod quantize_static;
    mod rotate;
    mod search_structure;
    mod split_experts;
    pub(in crate::pass) mod testing;
    pub(in crate::pass) mod tower;
    pub(in crate::pass) mod training_options;

    pub use decompose::Decompose;
    pub use dequantize::Dequantize;
    pub use distill::{Distill, DraftHead, MoreTeacher, Student};
    pub use extract_language_model::ExtractLanguageModel;
    pub use finetune::Finetune;
    pub(crate) use input_importance::input_importance;
    #[doc(hidden)]
    pub use layerwise::{Remaining, Score, Scores, WeightFormat, scores, sizes};
    pub use prune_structured::{Amounts, Importance as UnitImportance, PruneStructured, PrunedPart, Repair, Target as PruningTarget};
    pub use prune_vocabulary::PruneVocabulary;
    pub use quantize_static::{ActivationTarget, Goal, QuantizeStatic, Smooth};
    #[doc(hidden)]
    pub use quantize_static::{Damage, recommend_floats};
    pub use rotate::{Rotate, RotatedPart};
    pub use search_structure::{Limit as StructureLimit, SearchStructure};
    pub use split_experts::SplitExperts;

    pub use crate::train::Training;

    use crate::evaluation::Resources;
    use crate::exec::Rounding;
    use crate::pass::{Amount, Context, GranularityKind, InputImportance, Pass, Plan, Samples, Scope, WeightObserver, options_of};

    impl Context<'_> {
        /// Device, memory and threads on which models run.
        pub(crate) fn resources(&self, rounding: Rounding) -> Resources<'_> {
            Resources { device: &self.device, memory: self.memory, work: self.work, rounding, tracker: self.memory_tracker.as_ref() }
        }
    }
}

#[cfg(feature = "run")]
pub use running::*;

#[cfg(not(feature = "run"))]
#[path = "no_layerwise.rs"]
mod layerwise;

use crate::error::Result;
use crate::model::Model;
pub use crate::run_state::InputImportance;
use crate::run_state::RunState;
#[doc(hidden)]
pub use crate::run_state::Samples;
use crate::work::Work;

/// A step of a pipeline.
#[doc(hidden)]
pub trait Pass: fmt::Debug + Send + Sync {
    /// Name in recipes and on the command line.
    fn name(&self) -> &'static str;

    /// The options as in a recipe, including defaults.
    fn options(&self) -> Value;

    /// The options that must be equal when a run is resumed.
    fn fixed_options(&self) -> Value {
        self.options()
    }

    /// Validates the options. Called before the model is opened.
    ///
    /// # Errors
    /// If options are invalid or contradict each other; the error names them.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Resolves relative paths in the options against a folder.
    fn resolve(&mut self, _folder: &Path) {}

    /// Replaces automatic options by concrete values, which depend on the input model of the pass and the
    /// available data sets, so that recipes and reports state what was done.
    fn resolve_defaults(&mut self, _model: &Model, _sets: &[Samples]) {}

    /// As [`resolve_defaults`](Pass::resolve_defaults), for defaults that depend on the passes after it.
    /// Returns a note about results that these passes replace.
    fn resolve_before(&mut self, model: &Model, sets: &[Samples], _later: &[Step]) -> Option<String> {
        self.resolve_defaults(model, sets);
        None
    }

    /// Whether the pass trains the codes of a quantized weight, from its values before quantization.
    fn trains_codes(&self, _weight: &str) -> bool {
        false
    }

    /// Files and folders that the pass reads in addition to the model and the data sets.
    fn reads(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Models among [`reads`](Pass::reads), from which the output is derived, such as a teacher.
    fn reads_models(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// The samples that the pass runs the model on, or [`Samples::None`] if it computes on weights before
    /// they are written. `None` if all of its work is done while the model is written.
    fn runs_on(&self) -> Option<Samples> {
        None
    }

    /// Whether the processes of a launcher share the calibration samples and the layers of the pass.
    fn shares_samples(&self) -> bool {
        false
    }

    /// Whether the pass reads the labels of calibration data.
    fn reads_labels(&self) -> bool {
        false
    }

    /// Number of samples below which the result is likely to overfit them.
    fn min_samples(&self) -> usize {
        1
    }

    /// Plans the pass: predicts names, shapes and encodings, and describes the work. This is fast and
    /// reads no tensor. `state` is the state of the run before the pass.
    ///
    /// # Errors
    /// If a pattern does not match, or if the pass does not support a weight.
    fn plan<'a>(&'a self, model: &'a Model, state: &'a RunState) -> Result<Plan<'a>>;

    /// Advice to the user if the outputs of the model are severely degraded by the pass; empty if the pass
    /// preserves them.
    fn remedy(&self) -> &'static str {
        "a smaller change"
    }
}

/// Environment of a pass.
#[doc(hidden)]
pub struct Context<'a> {
    /// Threads, progress and cancellation.
    pub work: Work<'a>,
    /// Seed of all random number generators.
    pub seed: u64,
    /// The data sets of the recipe.
    #[cfg(feature = "run")]
    pub data: &'a crate::data::DataSets,
    /// Device on which models run.
    #[cfg(feature = "run")]
    pub device: candle_core::Device,
    /// Memory limit of running models.
    pub memory: crate::work::MemoryLimit,
    /// Tracker of memory usage, if it is recorded.
    #[cfg(feature = "run")]
    pub memory_tracker: Option<std::sync::Arc<crate::exec::MemoryTracker>>,
    /// Store of checkpoints; `None` if none are written.
    pub checkpoints: Option<Checkpoints>,
}

/// Location of the checkpoints of a pass.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub struct Checkpoints {
    /// Folder for the checkpoints of this pass only.
    pub folder: PathBuf,
    /// Key of everything that determines what the pass computes, except for the device and for evaluation
    /// data.
    pub key: String,
    /// Whether to resume from a checkpoint.
    pub resume: bool,
    /// Whether all processes of the launcher run the pass, and share its samples and layers.
    pub is_shared: bool,
}

/// Generates the enum of passes, which is both the step of a recipe and the subcommand of the binary.
macro_rules! passes {
    ($($(#[$doc:meta])* $name:literal => $pass:ident,)+) => {
        /// One step of a recipe: a pass with its options, or only its name.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[cfg_attr(feature = "cli", derive(clap::Subcommand, schemars::JsonSchema))]
        #[cfg_attr(feature = "cli", schemars(transform = |schema: &mut schemars::Schema| crate::entry::allow_bare_name(schema, PASSES)))]
        #[non_exhaustive]
        pub enum Step {
            $($(#[$doc])* #[serde(rename = $name)] $pass($pass),)+
            /// A pass that the program has registered
            #[doc(hidden)]
            #[serde(untagged)]
            #[cfg_attr(feature = "cli", command(skip), schemars(skip))]
            Custom(Custom),
        }

        /// Names of all passes, in the order of the table.
        pub const PASSES: &[&str] = &[$($name),+];

        impl Step {
            /// The pass of the step.
            #[doc(hidden)]
            pub fn pass(&self) -> &dyn Pass {
                match self {
                    $(Step::$pass(pass) => pass,)+
                    Step::Custom(pass) => pass,
                }
            }

            /// The pass of the step, mutable.
            pub(crate) fn pass_mut(&mut self) -> &mut dyn Pass {
                match self {
                    $(Step::$pass(pass) => pass,)+
                    Step::Custom(pass) => pass,
                }
            }
        }

        crate::entry::entry!(Step, "pass", PASSES, registered in custom::REGISTERED, $($name => $pass),+);

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
    /// Remove heads, neurons, channels, width, layers or experts from a model: smaller tensors, less to
    /// compute
    "prune-structured" => PruneStructured if runs,
    /// Choose the width of each layer, and the parts to remove, for a number of parameters: scores of each
    /// option on held-out samples, and the best choice
    "search-structure" => SearchStructure if runs,
    /// Remove tokens that a corpus does not need: smaller embeddings and output heads
    "prune-vocabulary" => PruneVocabulary if runs,
    /// Replace layers by two low-rank layers: fewer parameters, less to compute
    "decompose" => Decompose if runs,
    /// Quantize linear weights in a named scheme: W4A16, W8A8, Q4_K_M …
    "quantize" => Quantize,
    /// Quantize linear weights to int8; activations are quantized dynamically at run time, or not at all
    "quantize-dynamic" => QuantizeDynamic,
    /// Quantize weights to int8, and activations with scales found on calibration samples
    "quantize-static" => QuantizeStatic if runs,
    /// Store weights as indices into small codebooks (palettes), found by k-means
    "palettize" => Palettize,
    /// Train a student on a teacher's outputs
    "distill" => Distill if runs,
    /// Train the model on labels or the next token: recovers accuracy after pruning, trains through
    /// quantizers
    "finetune" => Finetune if runs,
    /// Convert floats to another float format
    "cast" => Cast,
    /// Dequantize weights, so that later passes can process them
    "dequantize" => Dequantize if runs,
    /// Store the experts of each layer, which are one tensor, as separate linear layers, which passes and
    /// runtimes can quantize
    "split-experts" => SplitExperts if runs,
    /// Keep only the language model of a model with a vision tower, with the configuration and the names of a
    /// text model
    "extract-language-model" => ExtractLanguageModel if runs,
    /// Rotate the residual stream and the values of attention heads by orthogonal matrices, which distribute
    /// outliers of activations and weights over all features
    "rotate" => Rotate if runs,
}

impl Step {
    /// The pass with this name and default options; `None` if this program has no such pass.
    pub fn from_name(name: &str) -> Option<Step> {
        serde_json::from_value(Value::String(name.to_owned())).ok()
    }
}

fn options_of(pass: &impl Serialize) -> Value {
    serde_json::to_value(pass).unwrap_or(Value::Null)
}
