//! Hidden states of models whose last normalization is folded into the output head.

use crate::analysis;
use crate::ir::Graph;
use crate::store::Weights;

/// Name of the output that contains the input of the output head.
const HIDDEN_STATES: &str = "last_hidden_state";

/// The graph of a model to be compared with another one. Without the output of hidden states if the factors
/// of the last normalization are folded into the output head, as after a rotation: these states have another
/// basis than those of the original model, and only the logits are comparable.
pub fn without_folded_states(mut graph: Graph, weights: &Weights) -> Graph {
    let factors = analysis::norm_of_head(&graph).and_then(|(name, offset)| Some((weights.by_name.get(&name)?.floats(&name).ok()?, offset)));
    if factors.is_some_and(|(factors, offset)| factors.iter().all(|factor| f64::from(*factor) + offset == 1.0)) {
        graph.remove_output(HIDDEN_STATES);
    }
    graph
}
