//! The residual stream of a decoder: the tensors that a change of its basis affects.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::head::shared_head;
use crate::ir::ops::Slice;
use crate::ir::{Graph, Kind, Node, Op, ValueId};

/// A linear layer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinearLayer {
    /// Name of the weight.
    pub weight: String,
    /// Whether the weight is `[in, out]` instead of `[out, in]`.
    pub input_major: bool,
    /// Name of the bias.
    pub bias: Option<String>,
}

/// The residual stream of a decoder, with the tensors that a change of its basis affects.
#[derive(Debug, Default)]
pub struct ResidualStream {
    /// Number of features.
    pub width: usize,
    /// Embedding tables whose rows are vectors of the stream.
    pub tables: BTreeSet<String>,
    /// Weights of the normalizations that read the stream, with the offset that is added to them.
    pub norms: BTreeMap<String, f64>,
    /// Layers that read the stream, with the normalization in between.
    pub readers: BTreeMap<LinearLayer, Option<String>>,
    /// Layers whose outputs are added to the stream.
    pub writers: BTreeSet<LinearLayer>,
}

/// The nodes that read each value.
pub(super) struct Readers<'g> {
    pub graph: &'g Graph,
    pub nodes: Vec<Vec<usize>>,
}

impl<'g> Readers<'g> {
    pub fn new(graph: &'g Graph) -> Readers<'g> {
        let mut nodes = vec![Vec::new(); graph.values().len()];
        for (index, node) in graph.nodes().iter().enumerate() {
            for input in node.inputs.iter().collect::<BTreeSet<_>>() {
                nodes[input.index()].push(index);
            }
        }
        Readers { graph, nodes }
    }

    /// The only node that reads a value, unless the value is an output of the graph.
    pub fn only(&self, value: ValueId) -> Option<&'g Node> {
        match self.nodes[value.index()].as_slice() {
            [index] if !self.graph.is_output(value) => self.graph.nodes().get(*index),
            _ => None,
        }
    }

    pub fn name(&self, value: ValueId) -> &'g str {
        &self.graph.value(value).name
    }

    /// A node and its op, for error messages.
    fn described(&self, node: &Node) -> String {
        format!("{} `{}`", node.op.name(), self.name(node.output))
    }

    /// The linear layer of a node. Fails if its weight or bias is not a tensor of the checkpoint.
    pub fn linear(&self, node: &Node) -> Result<LinearLayer, String> {
        let Op::Linear(op) = &node.op else { return Err(format!("{} is not a linear layer", self.described(node))) };
        let param = |at: usize| node.inputs.get(at).map(|id| (self.graph.value(*id).kind == Kind::Param).then(|| self.name(*id).to_owned()));
        match (param(1), param(2)) {
            (Some(Some(weight)), bias) if bias != Some(None) => Ok(LinearLayer { weight, input_major: op.input_major, bias: bias.flatten() }),
            _ => Err(format!(
                "the weight of {} is a part of a larger tensor, such as one of all experts, which is not supported: use `split-experts` first",
                self.described(node)
            )),
        }
    }

    /// The size of the last axis of a value.
    pub fn width(&self, value: ValueId) -> Option<usize> {
        self.graph.value(value).ty.shape.last()?.fixed()
    }

    /// The inputs of a node that are vectors of the same stream as its output, if the node commutes with a
    /// rotation of them.
    fn commuting(&self, node: &Node) -> Option<Vec<ValueId>> {
        let rank = |id: ValueId| self.graph.value(id).ty.shape.len();
        match (&node.op, node.inputs.as_slice()) {
            (Op::Scale(_) | Op::Select(_), [input]) | (Op::Dispatch(_), [input, _]) => Some(vec![*input]),
            (Op::Slice(op), [input]) => (!is_last(op, rank(*input))).then(|| vec![*input]),
            (Op::Mul(_), [a, b]) => match (self.width(*a), self.width(*b)) {
                (Some(1), Some(_)) => Some(vec![*b]),
                (Some(_), Some(1)) => Some(vec![*a]),
                _ => None,
            },
            _ => None,
        }
    }

    /// As [`commuting`](Readers::commuting), also for sums.
    fn added(&self, node: &Node) -> Option<Vec<ValueId>> {
        match &node.op {
            Op::Add(_) => Some(node.inputs.clone()),
            Op::Combine(_) => Some(node.inputs.iter().skip(1).copied().collect()),
            _ => self.commuting(node),
        }
    }
}

/// Whether a slice selects elements of the last axis.
pub(super) fn is_last(op: &Slice, rank: usize) -> bool {
    op.axis == -1 || usize::try_from(op.axis).is_ok_and(|axis| axis + 1 == rank)
}

/// A position in a residual stream: a value of the stream, or a normalized one.
#[derive(Debug, Clone, PartialEq)]
enum State {
    Stream,
    /// After the normalization with this weight.
    Normalized(String),
}

/// Finds the residual stream that the output head of a decoder reads. Fails with the reason if another
/// operator than linear layers, sums and RMS normalizations reads or writes it.
pub fn residual_stream(graph: &Graph) -> Result<ResidualStream, String> {
    let readers = Readers::new(graph);
    let head = shared_head(graph).ok_or("the model has no output head that computes logits from each token")?;
    let norm = final_norm(&readers, head)?;
    let mut stream = ResidualStream { width: readers.width(norm.output).ok_or("the width of the residual stream is not known")?, ..ResidualStream::default() };
    let mut walk = Walk { readers: &readers, states: BTreeMap::new(), queue: VecDeque::new(), uses: BTreeMap::new() };
    walk.push(norm.inputs[0], State::Stream)?;
    while let Some((value, state)) = walk.queue.pop_front() {
        if readers.width(value) != Some(stream.width) {
            return Err(format!("`{}` has another width than the residual stream, {}", readers.name(value), stream.width));
        }
        if state == State::Stream {
            // Hidden states that are the input of the head may be an output too, see `norm_of_head`.
            if graph.is_output(value) {
                return Err(format!("the hidden states `{}` are an output of the model", readers.name(value)));
            }
            walk.producer(value, &mut stream)?;
        }
        for node in &readers.nodes[value.index()] {
            walk.reader(*node, value, &state, &mut stream)?;
        }
    }
    walk.require_no_other_uses()?;
    Ok(stream)
}

/// The weight of the RMS normalization before the output head of a decoder, and the offset that is added to
/// it. The input of the head, which is the output `last_hidden_state`, depends on whether its factors are
/// folded into the head.
pub fn norm_of_head(graph: &Graph) -> Option<(String, f64)> {
    let readers = Readers::new(graph);
    let norm = final_norm(&readers, shared_head(graph)?).ok()?;
    let Op::RmsNorm(op) = &norm.op else { return None };
    Some((readers.name(norm.inputs[1]).to_owned(), op.offset))
}

/// The normalization before the output head.
fn final_norm<'g>(readers: &Readers<'g>, head: &Node) -> Result<&'g Node, String> {
    let mut value = head.inputs[0];
    loop {
        let node = readers.graph.producer(value).ok_or_else(|| format!("the output head {} reads an input of the model", readers.described(head)))?;
        match (&node.op, readers.commuting(node).as_deref()) {
            (Op::RmsNorm(_), _) => return Ok(node),
            (_, Some([input])) => value = *input,
            _ => return Err(refused(readers, node, "computes the input of the output head")),
        }
    }
}

/// The reason why a rotation is not possible because of a node.
fn refused(readers: &Readers, node: &Node, what: &str) -> String {
    let described = readers.described(node);
    match &node.op {
        Op::LayerNorm(_) => format!("{described} {what}, and subtracts the mean of all features, which a rotation does not preserve"),
        Op::RmsNorm(_) => format!("{described} {what}: the factors of a normalization after a layer cannot be folded into other weights"),
        _ => format!("{described} {what}, and does not commute with a rotation"),
    }
}

/// A search for all values and tensors of a stream.
struct Walk<'r, 'g> {
    readers: &'r Readers<'g>,
    states: BTreeMap<ValueId, State>,
    queue: VecDeque<(ValueId, State)>,
    /// Nodes that use a tensor in a way that is taken into account.
    uses: BTreeMap<ValueId, BTreeSet<ValueId>>,
}

impl Walk<'_, '_> {
    fn push(&mut self, value: ValueId, state: State) -> Result<(), String> {
        match self.states.get(&value) {
            None => {
                self.states.insert(value, state.clone());
                self.queue.push_back((value, state));
                Ok(())
            }
            Some(known) if *known == state => Ok(()),
            Some(_) => Err(format!("`{}` is added to the residual stream, but is a normalization of it", self.readers.name(value))),
        }
    }

    /// Records that a node uses the tensors among its inputs from the second one on.
    fn uses(&mut self, node: &Node) {
        for input in node.inputs.iter().skip(1).filter(|id| self.readers.graph.value(**id).kind == Kind::Param) {
            self.uses.entry(*input).or_default().insert(node.output);
        }
    }

    /// Processes the node that computes a value of the stream.
    fn producer(&mut self, value: ValueId, stream: &mut ResidualStream) -> Result<(), String> {
        let readers = self.readers;
        let Some(node) = readers.graph.producer(value) else {
            return Err(format!("`{}`, which no layer computes, is added to the residual stream", readers.name(value)));
        };
        match (&node.op, node.inputs.get(1)) {
            (Op::Embedding(_), Some(table)) if readers.graph.value(*table).kind == Kind::Param => {
                stream.tables.insert(readers.name(*table).to_owned());
                self.uses(node);
            }
            (Op::Linear(_), _) => {
                stream.writers.insert(readers.linear(node)?);
                self.uses(node);
            }
            _ => {
                let inputs = readers.added(node).ok_or_else(|| refused(readers, node, "writes to the residual stream"))?;
                inputs.into_iter().try_for_each(|input| self.push(input, State::Stream))?;
            }
        }
        Ok(())
    }

    /// Processes a node that reads a value.
    fn reader(&mut self, index: usize, value: ValueId, state: &State, stream: &mut ResidualStream) -> Result<(), String> {
        let (readers, node) = (self.readers, &self.readers.graph.nodes()[index]);
        let is_first = node.inputs.first() == Some(&value) && !node.inputs[1..].contains(&value);
        match (&node.op, state) {
            (Op::RmsNorm(op), State::Stream) if is_first => {
                let weight = readers.name(node.inputs[1]).to_owned();
                if readers.graph.value(node.inputs[1]).kind != Kind::Param {
                    return Err(format!("the factors of {} are computed", readers.described(node)));
                }
                stream.norms.insert(weight.clone(), op.offset);
                self.uses(node);
                self.push(node.output, State::Normalized(weight))
            }
            (Op::Linear(_), _) if is_first => {
                let norm = if let State::Normalized(norm) = state { Some(norm.clone()) } else { None };
                stream.readers.insert(readers.linear(node)?, norm);
                self.uses(node);
                Ok(())
            }
            _ => {
                let vectors = if *state == State::Stream { readers.added(node) } else { readers.commuting(node) };
                match vectors.filter(|vectors| vectors.contains(&value)) {
                    Some(_) => self.push(node.output, state.clone()),
                    None if *state == State::Stream => Err(refused(readers, node, "reads the residual stream")),
                    None => Err(refused(readers, node, "reads the normalized residual stream")),
                }
            }
        }
    }

    /// Fails if a node uses a tensor of the stream in another way.
    fn require_no_other_uses(&self) -> Result<(), String> {
        let readers = self.readers;
        for (param, known) in &self.uses {
            let other = readers.nodes[param.index()].iter().map(|index| &readers.graph.nodes()[*index]).find(|node| !known.contains(&node.output));
            if let Some(other) = other {
                return Err(format!("`{}` belongs to the residual stream, but {} uses it too", readers.name(*param), readers.described(other)));
            }
            if readers.graph.is_output(*param) {
                return Err(format!("`{}` is an output of the model", readers.name(*param)));
            }
            // A tied table is used by an embedding and by the head, each once.
            let [embeddings, layers] = [true, false].map(|is_embedding| {
                let nodes = known.iter().filter_map(|output| readers.graph.producer(*output));
                nodes.filter(|node| matches!(node.op, Op::Embedding(_)) == is_embedding).count()
            });
            if embeddings > 1 || layers > 1 {
                return Err(format!("`{}` is used by {} nodes", readers.name(*param), known.len()));
            }
        }
        Ok(())
    }
}
