//! Token axes of the values of a graph, for incremental decoding.

use crate::error::{Error, Result};
use crate::ir::{Axes, Axis, Dim, Graph, Node, Slicing, ValueId, decoder};

/// Inputs with the token ids to continue: of encoder-decoder models, and of decoders.
const TOKENS: [&str; 2] = [decoder::DECODER_TOKENS, decoder::TOKENS];

/// The token axis of each value of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceAxes {
    /// The token axis of each value.
    axes: Vec<Option<usize>>,
    /// For each value, whether it depends on tokens.
    depends_on_tokens: Vec<bool>,
    /// For each node, whether it needs state of earlier tokens.
    needs_state: Vec<bool>,
}

/// Name of an axis in the notation.
#[derive(PartialEq)]
enum Name<'a> {
    /// One of the leading axes, counted from the last of them.
    Leading(usize),
    Letter(&'a str),
}

impl SequenceAxes {
    /// Finds the token axes of a graph whose nodes process each token separately or support incremental
    /// decoding. Fails if the model does not read tokens, or a node attends to later tokens or combines
    /// several tokens without support for incremental decoding.
    pub fn from_graph(graph: &Graph) -> Result<SequenceAxes> {
        let tokens = TOKENS.iter().find_map(|name| graph.inputs().find(|(_, value)| value.name == *name));
        let name = match tokens.map(|(_, value)| (&value.name, value.ty.shape.get(1))) {
            Some((_, Some(Dim::Named(name)))) => name,
            Some((input, Some(size))) => {
                return Err(Error::graph(format!("input `{input}`"), format!("has a fixed length of {size} tokens, so that text cannot be generated")));
            }
            _ => return Err(Error::graph("this model", "has no input `input_ids`: it cannot generate text")),
        };
        let axis = |id: ValueId| {
            let value = graph.value(id);
            let unfit = |reason: &str| Err(Error::graph(format!("graph value `{}`", value.name), format!("{reason}: {}", value.ty)));
            let mut found = None;
            for (axis, dim) in value.ty.shape.iter().enumerate() {
                let mut names = Vec::new();
                dim.names(&mut names);
                match (names.contains(&name.as_str()), found) {
                    (false, _) => {}
                    (true, None) if matches!(dim, Dim::Named(_)) => found = Some(axis),
                    (true, None) => return unfit("has an axis that combines tokens with another axis"),
                    (true, Some(_)) if is_pairs(graph, id) && !graph.is_output(id) => {}
                    (true, Some(_)) => return unfit("has two token axes"),
                }
            }
            Ok(found)
        };
        let axes: Vec<Option<usize>> = graph.ids().map(axis).collect::<Result<_>>()?;
        let mut depends_on_tokens: Vec<bool> = axes.iter().map(Option::is_some).collect();
        for node in graph.nodes() {
            depends_on_tokens[node.output.index()] |= node.inputs.iter().any(|id| depends_on_tokens[id.index()]);
        }
        let needs_state = |node: &Node| {
            let along = |input: usize| node.inputs.get(input).is_some_and(|id| axes[id.index()].is_some());
            depends_on_tokens[node.output.index()] && node.op.spec().incremental().is_some_and(|op| !op.is_tokenwise(&along))
        };
        let needs_state = graph.nodes().iter().map(needs_state).collect();
        let axes = SequenceAxes { axes, depends_on_tokens, needs_state };
        (0..graph.nodes().len()).try_for_each(|node| axes.check(graph, node))?;
        Ok(axes)
    }

    /// Whether a value depends on tokens; all others are the same for every token.
    pub fn depends_on_tokens(&self, id: ValueId) -> bool {
        self.depends_on_tokens[id.index()]
    }

    /// Whether the node with this index needs state of earlier tokens.
    pub fn needs_state(&self, node: usize) -> bool {
        self.needs_state[node]
    }

    /// The token axis of a value, if it has one.
    pub fn axis(&self, id: ValueId) -> Option<usize> {
        self.axes[id.index()]
    }

    fn check(&self, graph: &Graph, at: usize) -> Result<()> {
        let node = &graph.nodes()[at];
        let refuse =
            |reason: &str| Err(Error::graph(format!("graph node `{}`", graph.value(node.output).name), format!("{reason}: this model cannot generate text")));
        if !self.depends_on_tokens(node.output) {
            return Ok(());
        }
        let rank = |id: ValueId| graph.value(id).ty.shape.len();
        if let Some(op) = node.op.spec().incremental() {
            let fits = |(input, id): (usize, &ValueId)| {
                let by_token = input > 0 && !self.needs_state(at);
                // Vectors of parameters, such as attention sinks, have no tokens.
                let is_vector = rank(*id) == 1 && !self.depends_on_tokens(*id);
                by_token || is_vector || self.axis(*id) == op.token_axis(input) && (op.reads_pairs(input) || !is_pairs(graph, *id))
            };
            return match op.looks_ahead() {
                Some(reason) if self.needs_state(at) => refuse(reason),
                _ if !node.inputs.iter().enumerate().all(fits) => refuse(&format!("{} does not process token axes", node.op.name())),
                _ => Ok(()),
            };
        }
        let text = node.op.spec().axes(&graph.input_types(node));
        for (input, id) in node.inputs.iter().enumerate() {
            let Some(axis) = self.axis(*id) else { continue };
            let axes = Axes::parse(&text).ok();
            let read = axes.as_ref().and_then(|axes| name(axes.inputs.get(input)?, rank(*id), axis));
            let written = axes.as_ref().and_then(|axes| name(&axes.output, rank(node.output), self.axis(node.output)?));
            if read.is_none() || read != written || is_pairs(graph, *id) {
                return refuse(&format!("{} combines several tokens", node.op.name()));
            }
        }
        Ok(())
    }
}

/// Whether a value has a row and a column for each token.
fn is_pairs(graph: &Graph, id: ValueId) -> bool {
    graph.producer(id).is_some_and(|node| node.op.spec().incremental().is_some_and(|op| op.returns_pairs()))
}

/// The name of an axis of a tensor of this rank, if the op processes the elements along it independently.
fn name<'a>(axes: &'a [Axis], rank: usize, axis: usize) -> Option<Name<'a>> {
    let leading = axes.iter().position(|axis| *axis == Axis::Leading);
    let several = rank.checked_sub(axes.len() - usize::from(leading.is_some()))?;
    let at = match leading {
        Some(first) if (first..first + several).contains(&axis) => return Some(Name::Leading(first + several - axis)),
        Some(first) if axis >= first => axis + 1 - several,
        _ => axis,
    };
    match axes.get(at)? {
        Axis::Letter { name, slicing: Slicing::Free, .. } => Some(Name::Letter(name)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: &str = "input input_ids: int[batch, sequence]\ninput attention_mask: int[batch, sequence]\nparam t: float[9, 8]\nparam w: float[8, 8]\nx = Embedding(input_ids, t) -> float[batch, sequence, 8]\n";

    fn refused(nodes: &str) -> Option<String> {
        let graph: Graph = format!("{START}{nodes}").parse().unwrap();
        SequenceAxes::from_graph(&graph).err().map(|e| e.to_string())
    }

    #[test]
    fn ops_that_combine_tokens_are_refused_by_name() {
        let heads = "h = SplitHeads{\"head_dim\":4}(x) -> float[batch, 2, sequence, 4]\n";
        let attention = |causal: bool| {
            format!(
                "{heads}a = Attention{{\"scale\":1.0,\"causal\":{causal},\"window\":null}}(h, h, h, attention_mask) -> float[batch, 2, sequence, 4]\noutput logits = a\n"
            )
        };
        assert_eq!(refused(&attention(true)), None);
        let looks_ahead = refused(&attention(false)).unwrap();
        assert!(looks_ahead.contains("graph node `a`") && looks_ahead.contains("attend to later tokens"), "{looks_ahead}");
        assert_eq!(refused("y = Linear(x, w) -> float[batch, sequence, 8]\nz = Add(x, y) -> float[batch, sequence, 8]\noutput logits = z\n"), None);
        assert_eq!(refused("y = Transpose{\"perm\":[0,2,1]}(x) -> float[batch, 8, sequence]\noutput logits = y\n"), None);
        for (op, line) in [
            ("Select", "y = Select{\"index\":0}(x) -> float[batch, 8]\n"),
            ("MaskedMean", "y = MaskedMean(x, attention_mask) -> float[batch, 8]\n"),
            ("Softmax", "y = Softmax{\"axis\":1}(x) -> float[batch, sequence, 8]\n"),
        ] {
            let found = refused(&format!("{line}output logits = y\n")).unwrap();
            assert!(found.contains(&format!("`y`: {op} combines several tokens")), "{found}");
        }
        let fixed: Graph =
            "input input_ids: int[1, 5]\nparam t: float[9, 8]\nx = Embedding(input_ids, t) -> float[1, 5, 8]\noutput logits = x\n".parse().unwrap();
        assert!(SequenceAxes::from_graph(&fixed).unwrap_err().to_string().contains("has a fixed length of 5 tokens"));
    }
}
