//! Pairs of student and teacher layers for distillation losses.

use std::ops::Range;

use super::losses;
use crate::analysis::{self, Layer};
use crate::data::{DECODER_INPUT_IDS, SequenceRole, SequenceRoles};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, Op, ValueId};

/// Pairs each student layer with a teacher layer, evenly spread, the last with the last.
fn spread(student: usize, teacher: usize) -> Vec<(usize, usize)> {
    (0..student).map(|layer| (layer, ((layer + 1) * teacher).div_ceil(student) - 1)).collect()
}

/// The repeated layers of a graph, numbered consecutively; those of an encoder precede those of its decoder.
pub(super) struct LayerIndex {
    pub layers: Vec<Layer>,
    /// Token role (encoder or decoder) of each stack, and the numbers of its layers.
    stacks: Vec<(SequenceRole, Range<usize>)>,
    is_encoder_decoder: bool,
}

impl LayerIndex {
    pub fn new(graph: &Graph) -> LayerIndex {
        let sides = SequenceRoles::new(graph);
        let mut index =
            LayerIndex { layers: Vec::new(), stacks: Vec::new(), is_encoder_decoder: graph.inputs().any(|(_, value)| value.name == DECODER_INPUT_IDS) };
        for stack in analysis::stacks(graph) {
            let first = index.layers.len();
            index.layers.extend(stack.layers);
            if let Some(last) = index.layers.get(first..).and_then(<[Layer]>::last) {
                index.stacks.push((sides.role(&last.output), first..index.layers.len()));
            }
        }
        index
    }

    /// Layer numbers of each stack of the encoder or of the decoder.
    fn stacks_of(&self, side: SequenceRole) -> impl Iterator<Item = &Range<usize>> {
        self.stacks.iter().filter(move |(other, _)| *other == side).map(|(_, layers)| layers)
    }

    /// The part of the model (encoder, decoder, or model) in which no repeated layers were found.
    pub fn missing_stack(&self) -> Option<&'static str> {
        let has = |side: SequenceRole| self.stacks_of(side).next().is_some();
        match (self.is_encoder_decoder, has(SequenceRole::Input), has(SequenceRole::Decoder)) {
            (true, false, _) => Some("encoder"),
            (true, _, false) => Some("decoder"),
            (false, ..) if self.stacks.is_empty() => Some("model"),
            _ => None,
        }
    }
}

/// Pairs the encoder stacks of student and teacher, and their decoder stacks.
fn stack_pairs<'c>(student: &'c LayerIndex, teacher: &'c LayerIndex) -> impl Iterator<Item = (&'c Range<usize>, &'c Range<usize>)> {
    [SequenceRole::Input, SequenceRole::Decoder].into_iter().flat_map(|side| student.stacks_of(side).zip(teacher.stacks_of(side)))
}

/// The layers of both models. Fails if a stack of the student has no counterpart in the teacher.
pub(super) fn layer_indices(loss: &str, student: &Graph, teacher: &Graph) -> Result<(LayerIndex, LayerIndex)> {
    let (ours, theirs) = (LayerIndex::new(student), LayerIndex::new(teacher));
    let missing = |model: &str, part: &str| {
        let what = if part == "model" { format!("the {model}") } else { format!("the {part} of the {model}") };
        Err(Error::option(format!("losses: {loss}"), format!("no repeated layers were found in {what}: specify pairs of `values`")))
    };
    match (ours.missing_stack(), theirs.missing_stack()) {
        (Some(part), _) => return missing("student", part),
        (_, Some(part)) => return missing("teacher", part),
        _ => {}
    }
    let fewer = |side: &SequenceRole| theirs.stacks_of(*side).count() < ours.stacks_of(*side).count();
    if let Some(side) = [SequenceRole::Input, SequenceRole::Decoder].iter().find(|side| fewer(side)) {
        let what = if *side == SequenceRole::Decoder { "decoder" } else { "encoder" };
        let reason = format!("the teacher has no layers to pair with those of the student's {what}: specify pairs of `values`");
        return Err(Error::option(format!("losses: {loss}"), reason));
    }
    Ok((ours, theirs))
}

/// Pairs of the last layers of each stack.
pub(super) fn last_layers(student: &LayerIndex, teacher: &LayerIndex) -> Vec<(usize, usize)> {
    stack_pairs(student, teacher).filter_map(|(ours, theirs)| Some((ours.clone().last()?, theirs.clone().last()?))).collect()
}

/// The specified pairs of layers; without any, evenly spread pairs of each stack.
pub(super) fn layer_pairs(loss: &str, named: &[(usize, usize)], student: &LayerIndex, teacher: &LayerIndex) -> Result<Vec<(usize, usize)>> {
    if named.is_empty() {
        let pairs = |(ours, theirs): (&Range<usize>, &Range<usize>)| {
            let first = (ours.start, theirs.start);
            spread(ours.len(), theirs.len()).into_iter().map(move |(a, b)| (first.0 + a, first.1 + b))
        };
        return Ok(stack_pairs(student, teacher).flat_map(pairs).collect());
    }
    let (ours, theirs) = (student.layers.len(), teacher.layers.len());
    match named.iter().find(|(a, b)| *a >= ours || *b >= theirs) {
        Some((a, b)) => {
            let reason = format!("layers [{a}, {b}]: the student has {ours} layers, the teacher {theirs}, numbered from 0");
            Err(Error::option(format!("losses: {loss}"), reason))
        }
        None => Ok(named.to_vec()),
    }
}

/// The operands of the self-attention of a layer, and its number of heads.
pub(super) fn attention_heads(graph: &Graph, found: &Layer, layer: usize) -> Result<(losses::Heads, usize)> {
    let name = |id: &ValueId| graph.value(*id).name.clone();
    let sides = SequenceRoles::new(graph);
    for node in graph.nodes().iter().filter(|node| found.nodes.contains(&name(&node.output))) {
        if let (Op::Attention(op), [q, k, v, ..]) = (&node.op, node.inputs.as_slice()) {
            let tokens = sides.head_tokens(&name(q));
            // Skips cross-attention.
            if tokens != sides.head_tokens(&name(k)) {
                continue;
            }
            if op.soft_cap.is_some() {
                return Err(Error::option("losses: attention", format!("layer {layer} soft-caps the attention scores: use the loss `hidden` instead")));
            }
            let biased = node.inputs.iter().skip(3).any(|id| graph.value(*id).ty.shape.len() > 2);
            if biased || (op.window.is_some() && !op.causal) {
                let what = if biased { "adds a bias to the attention scores" } else { "uses bidirectional sliding-window attention" };
                return Err(Error::option("losses: attention", format!("layer {layer} {what}: use the loss `hidden` instead")));
            }
            let count = graph.value(*q).ty.shape.get(1).and_then(Dim::fixed).unwrap_or(1);
            return Ok((losses::Heads { values: [name(q), name(k), name(v)], scale: op.scale, causal: op.causal, window: op.window, tokens }, count));
        }
    }
    Err(Error::option("losses: attention", format!("layer {layer} has no attention")))
}

#[cfg(test)]
mod tests {
    use super::{LayerIndex, SequenceRoles, last_layers, layer_indices, layer_pairs, spread};
    use crate::data::{SequenceRole, Task};
    use crate::model::Model;
    use crate::train::Objective;

    fn graph(name: &str) -> crate::ir::Graph {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
        Model::open(folder).unwrap().graph().unwrap()
    }

    #[test]
    fn layers_have_the_tokens_of_their_stack() {
        let read = Some(SequenceRole::Input);
        for (name, expected) in [
            ("bert", vec![read; 2]),
            ("llama", vec![read; 2]),
            ("vit-image-classification", vec![None; 2]),
            ("t5", [vec![read; 2], vec![Some(SequenceRole::Decoder); 3]].concat()),
            ("mt5", vec![read, Some(SequenceRole::Decoder)]),
            ("whisper", vec![None, None, Some(SequenceRole::Decoder), Some(SequenceRole::Decoder)]),
        ] {
            let graph = graph(name);
            let (sides, layers) = (SequenceRoles::new(&graph), LayerIndex::new(&graph).layers);
            assert_eq!(layers.iter().map(|layer| sides.tokens(&layer.output)).collect::<Vec<_>>(), expected, "{name}");
        }
    }

    #[test]
    fn encoder_and_decoder_layers_are_numbered_consecutively() {
        let (teacher, student) = (graph("t5"), graph("mt5"));
        let (ours, theirs) = layer_indices("hidden", &student, &teacher).unwrap();
        assert_eq!(layer_pairs("hidden", &[], &ours, &theirs).unwrap(), [(0, 1), (1, 4)]);
        assert_eq!(last_layers(&ours, &theirs), [(0, 1), (1, 4)]);
        let refused = |text: &str| Objective::new(&text.parse().unwrap(), &student, Some(&teacher), Task::Fidelity).err().unwrap().to_string();
        assert!(refused("{ hidden: { layers: [[0, 3]] } }").contains("has encoder tokens (`input_ids`)"));
        assert!(refused("{ hidden: { layers: [[0, 5]] } }").contains("the teacher 5"));
        assert!(refused("attention=1").contains("adds a bias"));
        let whisper = graph("whisper");
        assert!(Objective::new(&"attention=1,hidden=1".parse().unwrap(), &whisper, Some(&whisper), Task::Fidelity).is_ok());
    }

    #[test]
    fn missing_stacks_are_named() {
        let whole = graph("t5");
        for (layer, expected) in [("encoder.block.1.", "the encoder of the student"), ("decoder.block.2.", "the decoder of the student")] {
            // Layer numbers with a gap are not recognized as repeated layers.
            let other: crate::ir::Graph = whole.to_string().replace(layer, &layer.replace(['1', '2'], "7")).parse().unwrap();
            let refused = layer_indices("hidden", &other, &whole).err().unwrap().to_string();
            assert!(refused.contains(expected) && refused.contains("pairs of `values`"), "{refused}");
            let refused = layer_indices("hidden", &whole, &other).err().unwrap().to_string();
            assert!(refused.contains(&expected.replace("student", "teacher")), "{refused}");
            assert!(LayerIndex::new(&other).missing_stack().is_some() && LayerIndex::new(&whole).missing_stack().is_none());
        }
    }

    #[test]
    fn layers_are_spread_last_to_last() {
        assert_eq!(spread(3, 6), [(0, 1), (1, 3), (2, 5)]);
        assert_eq!(spread(2, 2), [(0, 0), (1, 1)]);
        assert_eq!(spread(4, 6), [(0, 1), (1, 2), (2, 4), (3, 5)]);
        assert_eq!(spread(1, 12), [(0, 11)]);
    }
}
