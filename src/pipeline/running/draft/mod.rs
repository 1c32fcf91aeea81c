//! A draft for speculative decoding: some layers of a model, or an EAGLE-3 head, distilled on continuations
//! that the model samples, and measured with the model.

mod continuations;
mod measure;
mod options;
mod prompts;
mod steps;
mod vocabulary;

use crate::analysis;
use crate::error::{Error, Result, counted};
use crate::model::Model;
use crate::pass::{Distill, Student, Training};
use crate::pipeline::Builder;
use crate::train::losses::{Losses, SoftDivergence, SoftLoss};

pub use continuations::{Continuations, Samples};
pub use options::DraftTest;
pub use prompts::{PromptSource, Prompts};
pub use steps::Steps;
pub use vocabulary::write_vocabulary;

/// Default fraction of the layers of a model that its draft has, as a divisor.
const LAYER_DIVISOR: usize = 5;

/// The layers of a draft, evenly spread, with the first and the last one. The default number is a fifth of
/// the model's.
///
/// # Errors
/// The model has fewer than two layers, or not more layers than the draft.
pub fn layers(model: &Model, requested: Option<usize>) -> Result<Vec<usize>> {
    let count = analysis::layers(&model.graph()?).map_or(0, |layers| layers.layers.len());
    if count < 2 {
        let reason = format!("{} has {}: a draft omits layers, so that the model must have at least 2", model.path.display(), counted(count, "layer"));
        return Err(Error::option("draft", reason));
    }
    let kept = requested.unwrap_or_else(|| ((count + LAYER_DIVISOR / 2) / LAYER_DIVISOR).max(1));
    match kept {
        0 => Err(Error::option("--layers", "is 0, but must be at least 1")),
        kept if kept >= count => Err(Error::option("--layers", format!("is {kept}, but the model has {}: a draft must have fewer", counted(count, "layer")))),
        kept => Ok(evenly_spread(kept, count)),
    }
}

/// This many indices below `count`, from the first to the last one; only the first one if there is one.
fn evenly_spread(kept: usize, count: usize) -> Vec<usize> {
    let gaps = kept.saturating_sub(1).max(1);
    (0..kept).map(|at| (at * (count - 1) + gaps / 2) / gaps).collect()
}

/// The pass that trains a draft: `training` with this student and the loss for the acceptance of proposals.
pub fn distillation(student: Student, training: Training) -> Distill {
    let soft = SoftLoss { temperature: 1.0, divergence: SoftDivergence::Acceptance, ..SoftLoss::default() };
    let losses = Losses { soft: Some(soft), ..Losses::default() };
    Distill { student: Some(student), training: Training { losses, ..training }, ..Distill::default() }
}

impl Builder {
    /// Measures the output as a draft of the input.
    #[doc(hidden)]
    pub fn draft_test(mut self, test: DraftTest) -> Self {
        self.0.running.draft_test = Some(std::sync::Arc::new(test));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_evenly_spread() {
        assert_eq!(evenly_spread(1, 30), [0]);
        assert_eq!(evenly_spread(2, 30), [0, 29]);
        assert_eq!(evenly_spread(4, 30), [0, 10, 19, 29]);
        assert_eq!(evenly_spread(6, 30), [0, 6, 12, 17, 23, 29]);
        for (kept, count) in (2..20).flat_map(|count| (1..count).map(move |kept| (kept, count))) {
            let spread = evenly_spread(kept, count);
            assert!(spread.windows(2).all(|pair| pair[0] < pair[1]) && spread.len() == kept, "{spread:?}");
            assert!(spread[0] == 0 && (kept == 1 || spread[kept - 1] == count - 1), "{spread:?}");
        }
    }

    #[test]
    fn a_draft_has_fewer_layers_than_the_model() {
        let model = Model::open(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap();
        assert_eq!(layers(&model, None).unwrap(), [0]);
        for (requested, part) in [(0, "is 0"), (2, "is 2, but the model has 2 layers"), (9, "is 9")] {
            let error = layers(&model, Some(requested)).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
