//! Layers of student and teacher beside each other.

use std::ops::Range;

use super::losses;
use crate::analysis::{self, Layer};
use crate::data::{DECODED, Side, Sides};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, Op, ValueId};

/// The student's layers beside the teacher's: evenly spread, last to last.
fn spread(student: usize, teacher: usize) -> Vec<(usize, usize)> {
    (0..student).map(|layer| (layer, ((layer + 1) * teacher).div_ceil(student) - 1)).collect()
}

/// The layers of a graph, counted through: of a decoder behind an encoder, those of the encoder come first.
pub(super) struct Counted {
    pub layers: Vec<Layer>,
    /// The side of each stack, and which layers it has.
    stacks: Vec<(Side, Range<usize>)>,
    /// Whether there is a decoder behind an encoder.
    decodes: bool,
}

impl Counted {
    pub fn of(graph: &Graph) -> Counted {
        let sides = Sides::of(graph);
        let mut counted = Counted { layers: Vec::new(), stacks: Vec::new(), decodes: graph.inputs().any(|(_, value)| value.name == DECODED) };
        for stack in analysis::stacks(graph) {
            let first = counted.layers.len();
            counted.layers.extend(stack.layers);
            if let Some(last) = counted.layers.get(first..).and_then(<[Layer]>::last) {
                counted.stacks.push((sides.side(&last.output), first..counted.layers.len()));
            }
        }
        counted
    }

    /// Layers of each stack of a side.
    fn of_side(&self, side: Side) -> impl Iterator<Item = &Range<usize>> {
        self.stacks.iter().filter(move |(other, _)| *other == side).map(|(_, layers)| layers)
    }

    /// What has no layers that repeat, where something should.
    pub fn lacking(&self) -> Option<&'static str> {
        let of = |side: Side| self.of_side(side).next().is_some();
        match (self.decodes, of(Side::Read), of(Side::Said)) {
            (true, false, _) => Some("encoder"),
            (true, _, false) => Some("decoder"),
            (false, ..) if self.stacks.is_empty() => Some("model"),
            _ => None,
        }
    }
}

/// Stacks of the student beside those of the teacher that are of the same side.
fn beside<'c>(student: &'c Counted, teacher: &'c Counted) -> impl Iterator<Item = (&'c Range<usize>, &'c Range<usize>)> {
    [Side::Read, Side::Said].into_iter().flat_map(|side| student.of_side(side).zip(teacher.of_side(side)))
}

pub(super) fn both_layers(loss: &str, student: &Graph, teacher: &Graph) -> Result<(Counted, Counted)> {
    let (ours, theirs) = (Counted::of(student), Counted::of(teacher));
    let lacking = |whose: &str, what: &str| {
        let whose = if what == "model" { format!("the {whose}") } else { format!("the {what} of the {whose}") };
        Err(Error::option(format!("losses: {loss}"), format!("{whose} has no layers that repeat: name pairs of `values`")))
    };
    match (ours.lacking(), theirs.lacking()) {
        (Some(what), _) => return lacking("student", what),
        (_, Some(what)) => return lacking("teacher", what),
        _ => {}
    }
    let fewer = |side: &Side| theirs.of_side(*side).count() < ours.of_side(*side).count();
    if let Some(side) = [Side::Read, Side::Said].iter().find(|side| fewer(side)) {
        let what = if *side == Side::Said { "decoder" } else { "encoder" };
        let reason = format!("the teacher has no layers for those of the student's {what}: name pairs of `values`");
        return Err(Error::option(format!("losses: {loss}"), reason));
    }
    Ok((ours, theirs))
}

/// The last layers of stacks of the same side.
pub(super) fn last(student: &Counted, teacher: &Counted) -> Vec<(usize, usize)> {
    beside(student, teacher).filter_map(|(ours, theirs)| Some((ours.clone().last()?, theirs.clone().last()?))).collect()
}

/// Pairs of layers that are named, or of each stack those that lie evenly.
pub(super) fn chosen(loss: &str, named: &[(usize, usize)], student: &Counted, teacher: &Counted) -> Result<Vec<(usize, usize)>> {
    if named.is_empty() {
        let pairs = |(ours, theirs): (&Range<usize>, &Range<usize>)| {
            let first = (ours.start, theirs.start);
            spread(ours.len(), theirs.len()).into_iter().map(move |(a, b)| (first.0 + a, first.1 + b))
        };
        return Ok(beside(student, teacher).flat_map(pairs).collect());
    }
    let (ours, theirs) = (student.layers.len(), teacher.layers.len());
    match named.iter().find(|(a, b)| *a >= ours || *b >= theirs) {
        Some((a, b)) => {
            let reason = format!("layers [{a}, {b}]: the student has {ours} layers, the teacher {theirs}, the first is 0");
            Err(Error::option(format!("losses: {loss}"), reason))
        }
        None => Ok(named.to_vec()),
    }
}

/// What the attention of a layer reads, and how many heads it has.
pub(super) fn heads(graph: &Graph, found: &Layer, layer: usize) -> Result<(losses::Heads, usize)> {
    let name = |id: &ValueId| graph.value(*id).name.clone();
    let sides = Sides::of(graph);
    for node in graph.nodes().iter().filter(|node| found.nodes.contains(&name(&node.output))) {
        if let (Op::Attention(op), [q, k, v, ..]) = (&node.op, node.inputs.as_slice()) {
            let tokens = sides.head_tokens(&name(q));
            // A decoder also looks at what the encoder says.
            if tokens != sides.head_tokens(&name(k)) {
                continue;
            }
            if op.soft_cap.is_some() {
                return Err(Error::option("losses: attention", format!("layer {layer} caps the products of queries and keys: compare hidden states instead")));
            }
            let biased = node.inputs.iter().skip(3).any(|id| graph.value(*id).ty.shape.len() > 2);
            if biased || (op.window.is_some() && !op.causal) {
                let what = if biased { "adds a bias to the products of queries and keys" } else { "looks at the tokens around each alone" };
                return Err(Error::option("losses: attention", format!("layer {layer} {what}: compare hidden states instead")));
            }
            let count = graph.value(*q).ty.shape.get(1).and_then(Dim::fixed).unwrap_or(1);
            return Ok((losses::Heads { values: [name(q), name(k), name(v)], scale: op.scale, causal: op.causal, window: op.window, tokens }, count));
        }
    }
    Err(Error::option("losses: attention", format!("layer {layer} has no attention")))
}

#[cfg(test)]
mod tests {
    use super::{Counted, Sides, both_layers, chosen, last, spread};
    use crate::data::{Side, Task};
    use crate::model::Model;
    use crate::train::Objective;

    fn graph(name: &str) -> crate::ir::Graph {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
        Model::open(folder).unwrap().graph().unwrap()
    }

    #[test]
    fn tokens_are_told_from_patches_and_both_sides_from_each_other() {
        let read = Some(Side::Read);
        for (name, wanted) in [
            ("bert", vec![read; 2]),
            ("llama", vec![read; 2]),
            ("vit-image-classification", vec![None; 2]),
            ("t5", [vec![read; 2], vec![Some(Side::Said); 3]].concat()),
            ("mt5", vec![read, Some(Side::Said)]),
            ("whisper", vec![None, None, Some(Side::Said), Some(Side::Said)]),
        ] {
            let graph = graph(name);
            let (sides, layers) = (Sides::of(&graph), Counted::of(&graph).layers);
            assert_eq!(layers.iter().map(|layer| sides.tokens(&layer.output)).collect::<Vec<_>>(), wanted, "{name}");
        }
    }

    #[test]
    fn layers_of_both_sides_are_counted_through() {
        let (teacher, student) = (graph("t5"), graph("mt5"));
        let (ours, theirs) = both_layers("hidden", &student, &teacher).unwrap();
        assert_eq!(chosen("hidden", &[], &ours, &theirs).unwrap(), [(0, 1), (1, 4)]);
        assert_eq!(last(&ours, &theirs), [(0, 1), (1, 4)]);
        let refused = |text: &str| Objective::new(&text.parse().unwrap(), &student, Some(&teacher), Task::Fidelity).err().unwrap().to_string();
        assert!(refused("{ hidden: { layers: [[0, 3]] } }").contains("has tokens of the encoder (`input_ids`)"));
        assert!(refused("{ hidden: { layers: [[0, 5]] } }").contains("the teacher 5"));
        assert!(refused("attention=1").contains("adds a bias"));
        let whisper = graph("whisper");
        assert!(Objective::new(&"attention=1,hidden=1".parse().unwrap(), &whisper, Some(&whisper), Task::Fidelity).is_ok());
    }

    #[test]
    fn a_side_whose_layers_are_not_found_is_named() {
        let whole = graph("t5");
        for (layer, wanted) in [("encoder.block.1.", "the encoder of the student"), ("decoder.block.2.", "the decoder of the student")] {
            // Numbers with a gap are no layers that repeat.
            let other: crate::ir::Graph = whole.to_string().replace(layer, &layer.replace(['1', '2'], "7")).parse().unwrap();
            let refused = both_layers("hidden", &other, &whole).err().unwrap().to_string();
            assert!(refused.contains(wanted) && refused.contains("pairs of `values`"), "{refused}");
            let refused = both_layers("hidden", &whole, &other).err().unwrap().to_string();
            assert!(refused.contains(&wanted.replace("student", "teacher")), "{refused}");
            assert!(Counted::of(&other).lacking().is_some() && Counted::of(&whole).lacking().is_none());
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
