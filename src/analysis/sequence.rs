//! Where tokens lie in the values of a graph that can go on with a sequence without computing it again.

use crate::error::{Error, Result};
use crate::ir::{Axes, Axis, Dim, Graph, Hold, Kind, Node, ValueId};

/// The inputs that may hold the tokens which others follow: of a decoder beside an encoder, and of a decoder alone.
const TOKENS: [&str; 2] = ["decoder_input_ids", "input_ids"];

/// For each value of a graph, the axis that tokens lie along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceAxes {
    /// By value.
    axes: Vec<Option<usize>>,
    /// By value: whether it follows from tokens.
    follows: Vec<bool>,
    /// By node: whether it must know of earlier tokens.
    goes_on: Vec<bool>,
}

/// What an axis of a tensor is called.
#[derive(PartialEq)]
enum Name<'a> {
    /// Among the leading axes, counted from the last of them.
    Leading(usize),
    Letter(&'a str),
}

impl SequenceAxes {
    /// The axes of a graph each node of which is computed token by token, or knows how to go on.
    ///
    /// # Errors
    /// It does not work on tokens, or a node looks at tokens that come later, or at several in a way that does not go on.
    pub fn of(graph: &Graph) -> Result<SequenceAxes> {
        let tokens = TOKENS.iter().find_map(|name| graph.inputs().find(|(_, value)| value.name == *name));
        let name = match tokens.map(|(_, value)| (&value.name, value.ty.shape.get(1))) {
            Some((_, Some(Dim::Named(name)))) => name,
            Some((input, Some(size))) => {
                return Err(Error::graph(format!("input `{input}`"), format!("takes {size} tokens and no other number, so that no text can be continued")));
            }
            _ => return Err(Error::graph("this model", "takes no `input_ids`: it does not continue texts")),
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
                    (true, None) => return unfit("has an axis that is made of tokens and more"),
                    (true, Some(_)) if is_pairs(graph, id) && !graph.is_output(id) => {}
                    (true, Some(_)) => return unfit("has two axes of tokens"),
                }
            }
            Ok(found)
        };
        let axes: Vec<Option<usize>> = graph.ids().map(axis).collect::<Result<_>>()?;
        let mut follows: Vec<bool> = axes.iter().map(Option::is_some).collect();
        for node in graph.nodes() {
            follows[node.output.index()] |= node.inputs.iter().any(|id| follows[id.index()]);
        }
        let goes_on = |node: &Node| {
            let along = |input: usize| node.inputs.get(input).is_some_and(|id| axes[id.index()].is_some());
            follows[node.output.index()] && node.op.spec().sequential().is_some_and(|op| !op.is_by_token(&along))
        };
        let goes_on = graph.nodes().iter().map(goes_on).collect();
        let axes = SequenceAxes { axes, follows, goes_on };
        (0..graph.nodes().len()).try_for_each(|node| axes.check(graph, node))?;
        Ok(axes)
    }

    /// Whether a value follows from tokens; all others are the same for every token.
    pub fn follows(&self, id: ValueId) -> bool {
        self.follows[id.index()]
    }

    /// Whether the node of this position must know of earlier tokens.
    pub fn goes_on(&self, node: usize) -> bool {
        self.goes_on[node]
    }

    /// The axis of a value, if it has one.
    pub fn axis(&self, id: ValueId) -> Option<usize> {
        self.axes[id.index()]
    }

    fn check(&self, graph: &Graph, at: usize) -> Result<()> {
        let node = &graph.nodes()[at];
        let refuse = |reason: &str| {
            Err(Error::graph(format!("graph node `{}`", graph.value(node.output).name), format!("{reason}: such a model does not continue texts")))
        };
        if !self.follows(node.output) {
            return Ok(());
        }
        if let Some(op) = node.op.spec().sequential() {
            let fits = |(input, id): (usize, &ValueId)| {
                let by_token = input > 0 && !self.goes_on(at);
                by_token || self.axis(*id) == op.axis(input) && (op.reads_pairs(input) || !is_pairs(graph, *id))
            };
            return match op.looks_ahead() {
                Some(reason) if self.goes_on(at) => refuse(reason),
                _ if !node.inputs.iter().enumerate().all(fits) => refuse(&format!("{} is not over tokens", node.op.name())),
                _ => Ok(()),
            };
        }
        let rank = |id: ValueId| graph.value(id).ty.shape.len();
        let text = node.op.spec().axes(&graph.input_types(node));
        for (input, id) in node.inputs.iter().enumerate() {
            let Some(axis) = self.axis(*id) else { continue };
            let axes = Axes::parse(&text).ok();
            let given = axes.as_ref().and_then(|axes| name(axes.inputs.get(input)?, rank(*id), axis));
            let gives = axes.as_ref().and_then(|axes| name(&axes.output, rank(node.output), self.axis(node.output)?));
            if given.is_none() || given != gives || is_pairs(graph, *id) {
                return refuse(&format!("{} looks at several tokens at once", node.op.name()));
            }
        }
        Ok(())
    }
}

/// Whether a value has a row and a column for each token.
fn is_pairs(graph: &Graph, id: ValueId) -> bool {
    match graph.value(id).kind {
        Kind::Node(at) => graph.nodes()[at].op.spec().sequential().is_some_and(|op| op.makes_pairs()),
        _ => false,
    }
}

/// What an axis of a tensor of this rank is called, if what is done along it is done to each of its elements alone.
fn name<'a>(axes: &'a [Axis], rank: usize, axis: usize) -> Option<Name<'a>> {
    let leading = axes.iter().position(|axis| *axis == Axis::Leading);
    let several = rank.checked_sub(axes.len() - usize::from(leading.is_some()))?;
    let at = match leading {
        Some(first) if (first..first + several).contains(&axis) => return Some(Name::Leading(first + several - axis)),
        Some(first) if axis >= first => axis + 1 - several,
        _ => axis,
    };
    match axes.get(at)? {
        Axis::Letter { name, hold: Hold::Free, .. } => Some(Name::Letter(name)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: &str = "input input_ids: int[batch, sequence]\ninput attention_mask: int[batch, sequence]\nparam t: float[9, 8]\nparam w: float[8, 8]\nx = Embedding(input_ids, t) -> float[batch, sequence, 8]\n";

    fn refused(nodes: &str) -> Option<String> {
        let graph: Graph = format!("{START}{nodes}").parse().unwrap();
        SequenceAxes::of(&graph).err().map(|e| e.to_string())
    }

    #[test]
    fn what_looks_at_other_tokens_is_refused_by_name() {
        let heads = "h = SplitHeads{\"head_dim\":4}(x) -> float[batch, 2, sequence, 4]\n";
        let attention = |causal: bool| {
            format!(
                "{heads}a = Attention{{\"scale\":1.0,\"causal\":{causal},\"window\":null}}(h, h, h, attention_mask) -> float[batch, 2, sequence, 4]\noutput logits = a\n"
            )
        };
        assert_eq!(refused(&attention(true)), None);
        let looks_ahead = refused(&attention(false)).unwrap();
        assert!(looks_ahead.contains("graph node `a`") && looks_ahead.contains("behind them"), "{looks_ahead}");
        assert_eq!(refused("y = Linear(x, w) -> float[batch, sequence, 8]\nz = Add(x, y) -> float[batch, sequence, 8]\noutput logits = z\n"), None);
        assert_eq!(refused("y = Transpose{\"perm\":[0,2,1]}(x) -> float[batch, 8, sequence]\noutput logits = y\n"), None);
        for (op, line) in [
            ("Select", "y = Select{\"index\":0}(x) -> float[batch, 8]\n"),
            ("MaskedMean", "y = MaskedMean(x, attention_mask) -> float[batch, 8]\n"),
            ("Softmax", "y = Softmax{\"axis\":1}(x) -> float[batch, sequence, 8]\n"),
        ] {
            let found = refused(&format!("{line}output logits = y\n")).unwrap();
            assert!(found.contains(&format!("`y`: {op} looks at several tokens")), "{found}");
        }
        let fixed: Graph =
            "input input_ids: int[1, 5]\nparam t: float[9, 8]\nx = Embedding(input_ids, t) -> float[1, 5, 8]\noutput logits = x\n".parse().unwrap();
        assert!(SequenceAxes::of(&fixed).unwrap_err().to_string().contains("takes 5 tokens and no other number"));
    }
}
