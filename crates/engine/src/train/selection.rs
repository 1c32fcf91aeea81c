//! Parameters that a training selects.

use std::collections::BTreeSet;

use super::{QuantizerScales, Training, fixed_codes, weight_rounding};
use crate::error::Result;
use crate::ir::{Graph, Node, Op};
use crate::model::Model;
use crate::store::{Encoding, Pattern};

/// Names of the parameters that are running statistics, not weights.
pub(super) fn statistics(graph: &Graph) -> BTreeSet<&str> {
    let first = |node: &'_ Node| match node.op {
        Op::BatchNorm(_) => 3,
        Op::CacheQuantize(_) => 1,
        _ => usize::MAX,
    };
    let inputs = graph.nodes().iter().flat_map(|node| node.inputs.get(first(node)..).unwrap_or(&[]));
    inputs.map(|id| graph.value(*id).name.as_str()).collect()
}

/// Rejects trained weights whose codes, scales or values cannot be trained and written.
pub fn require_trainable(graph: &Graph, model: &Model, options: &Training) -> Result<()> {
    let selected = selected(graph, &options.targets, &options.ignore);
    let mut names = graph.params().map(|(_, value)| &value.name).filter(|name| selected(name));
    names.try_for_each(|name| {
        let Some(weight) = model.weights.by_name.get(name) else { return Ok(()) };
        if weight.encoding == Encoding::Dense && weight.is_float() {
            weight.require_computable(name)?;
        }
        weight_rounding::require_trainable(name, weight)?;
        fixed_codes::require_trainable(name, weight, options.scales)
    })
}

/// Returns a predicate for the parameters that are trained: by default, all except those of the vision tower
/// of a language model.
pub(super) fn selected<'a>(graph: &'a Graph, targets: &'a [Pattern], ignore: &'a [Pattern]) -> impl Fn(&str) -> bool + 'a {
    let (statistics, of_images) = (statistics(graph), graph.of_images());
    let tower = graph.params().filter(|(id, _)| of_images.get(id.index()) == Some(&true) && targets.is_empty());
    let tower: BTreeSet<&str> = tower.map(|(_, value)| value.name.as_str()).collect();
    move |name| !statistics.contains(name) && !tower.contains(name) && selects(targets, ignore, name)
}

fn selects(targets: &[Pattern], ignore: &[Pattern], name: &str) -> bool {
    let any = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
    (targets.is_empty() || any(targets)) && !any(ignore)
}

impl Training {
    /// Whether the codes of a quantized weight with this name are trained, from its values before
    /// quantization.
    #[doc(hidden)]
    pub fn trains_codes(&self, name: &str) -> bool {
        let is_trained = match &self.adapter {
            Some(adapter) => adapter.absorb && selects(&adapter.targets, &[], name),
            None => selects(&self.targets, &self.ignore, name),
        };
        is_trained && self.scales != QuantizerScales::Only
    }
}
