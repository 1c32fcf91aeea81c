//! Layers of student and teacher beside each other.

use super::losses;
use crate::analysis::{self, Layer};
use crate::data::Sides;
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, Op, ValueId};

/// The student's layers beside the teacher's: evenly spread, last to last.
fn spread(student: usize, teacher: usize) -> Vec<(usize, usize)> {
    (0..student).map(|layer| (layer, ((layer + 1) * teacher).div_ceil(student) - 1)).collect()
}

/// The layers of a graph, counted through: of a decoder behind an encoder, those of the encoder come first.
pub(super) struct Counted {
    pub layers: Vec<Layer>,
    /// How many each stack has.
    stacks: Vec<usize>,
}

impl Counted {
    pub fn of(graph: &Graph) -> Counted {
        let stacks = analysis::stacks(graph);
        Counted { stacks: stacks.iter().map(|stack| stack.layers.len()).collect(), layers: stacks.into_iter().flat_map(|stack| stack.layers).collect() }
    }

    /// Numbers of the last layer of each stack.
    pub fn last(&self) -> Vec<usize> {
        self.stacks
            .iter()
            .scan(0, |end, count| {
                *end += count;
                Some(*end - 1)
            })
            .collect()
    }
}

pub(super) fn both_layers(loss: &str, student: &Graph, teacher: &Graph) -> Result<(Counted, Counted)> {
    let lacking = |whose: &str| Error::option(format!("losses: {loss}"), format!("the {whose} has no layers that repeat: name pairs of `values`"));
    let (ours, theirs) = (Counted::of(student), Counted::of(teacher));
    match (ours.stacks.len(), theirs.stacks.len()) {
        (0, _) => Err(lacking("student")),
        (ours, theirs) if theirs < ours => Err(lacking("teacher")),
        _ => Ok((ours, theirs)),
    }
}

/// Pairs of layers that are named, or of each stack those that lie evenly.
pub(super) fn chosen(loss: &str, named: &[(usize, usize)], student: &Counted, teacher: &Counted) -> Result<Vec<(usize, usize)>> {
    let (ours, theirs) = (student.layers.len(), teacher.layers.len());
    if named.is_empty() {
        let (mut found, mut before) = (Vec::new(), (0, 0));
        for (ours, theirs) in student.stacks.iter().zip(&teacher.stacks) {
            found.extend(spread(*ours, *theirs).into_iter().map(|(a, b)| (before.0 + a, before.1 + b)));
            before = (before.0 + ours, before.1 + theirs);
        }
        return Ok(found);
    }
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
            let tokens = sides.tokens(&name(q));
            // A decoder also looks at what the encoder says.
            if tokens != sides.tokens(&name(k)) {
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
    use super::{Counted, Sides, both_layers, chosen, spread};
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
        assert_eq!((ours.last(), theirs.last()), (vec![0, 1], vec![1, 4]));
        let refused = |text: &str| Objective::new(&text.parse().unwrap(), &student, Some(&teacher), Task::Fidelity).err().unwrap().to_string();
        assert!(refused("{ hidden: { layers: [[0, 3]] } }").contains("one is of the encoder"));
        assert!(refused("{ hidden: { layers: [[0, 5]] } }").contains("the teacher 5"));
        assert!(refused("attention=1").contains("adds a bias"));
        let whisper = graph("whisper");
        assert!(Objective::new(&"attention=1,hidden=1".parse().unwrap(), &whisper, Some(&whisper), Task::Fidelity).is_ok());
    }

    #[test]
    fn layers_are_spread_last_to_last() {
        assert_eq!(spread(3, 6), [(0, 1), (1, 3), (2, 5)]);
        assert_eq!(spread(2, 2), [(0, 0), (1, 1)]);
        assert_eq!(spread(4, 6), [(0, 1), (1, 2), (2, 4), (3, 5)]);
        assert_eq!(spread(1, 12), [(0, 11)]);
    }
}
