//! Encoder and decoder of an encoder-decoder model as separate graphs, with the names that optimum uses.

use super::SequenceAxes;
use crate::error::{Error, Result};
use crate::ir::decoder::{DECODER_TOKENS, ENCODED, ENCODER_MASK, ENCODER_STATES, LOGITS, MASK, SIDES, TOKENS, past, present};
use crate::ir::{Graph, Op, ValueId, part};

/// Named values of a graph.
type Named = Vec<(String, ValueId)>;

/// The graphs of an encoder-decoder model. Keys and values of cross-attention are computed once, by the first
/// step of the decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderDecoder {
    /// The encoder, whose output is [`ENCODED`].
    pub encoder: Graph,
    /// The decoder of the first tokens. Keys and values of all attentions are outputs in addition to the
    /// logits.
    pub first: Graph,
    /// The decoder of later tokens. Keys and values of cross-attention are inputs, those of earlier tokens
    /// are not in the graph.
    pub next: Graph,
}

impl EncoderDecoder {
    /// Whether a graph has the inputs of an encoder-decoder model.
    pub fn is_in(graph: &Graph) -> bool {
        graph.inputs().any(|(_, value)| value.name == DECODER_TOKENS)
    }

    /// Separates the graph of an encoder-decoder model. Fails if it has no logits of each token, no
    /// cross-attention, or no value from which all keys and values of cross-attention are computed.
    pub fn from_graph(graph: &Graph) -> Result<EncoderDecoder> {
        let axes = SequenceAxes::from_graph(graph)?;
        let input = |name: &str| graph.inputs().find(|(_, value)| value.name == name).map(|(id, _)| id);
        let Some((_, logits)) = graph.outputs().iter().find(|(name, id)| name == LOGITS && graph.value(*id).ty.shape.len() == 3) else {
            return Err(Error::graph("this model", "has no output `logits` per token, which a decoder with a cache computes"));
        };
        let tokens = input(DECODER_TOKENS).ok_or_else(|| Error::graph("this model", format!("has no input `{DECODER_TOKENS}`")))?;
        let encoded = encoder_output(graph, &axes)?;
        let (mut outputs, mut crossing) = (vec![(LOGITS.to_owned(), *logits)], Named::new());
        let mut numbers = [0, 0];
        for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Attention(_)) && axes.depends_on_tokens(node.output)) {
            let crosses = !axes.depends_on_tokens(node.inputs[1]);
            let number = format!("{}.{}", numbers[usize::from(crosses)], SIDES[usize::from(crosses)]);
            numbers[usize::from(crosses)] += 1;
            // Later steps quantize the keys and values of cross-attention again.
            let read = [1, 2].map(|at| if crosses { unquantized(graph, node.inputs[at]) } else { node.inputs[at] });
            outputs.extend(present(&number).into_iter().zip(read));
            crossing.extend(past(&number).into_iter().zip(read).filter(|_| crosses));
        }
        if numbers[0] != numbers[1] {
            let [own, crossing] = numbers;
            return Err(Error::graph(
                "this model",
                format!("has {own} attentions of the decoder and {crossing} of its encoder, but files with a cache have pairs"),
            ));
        }
        let sources: Named = graph.inputs().filter(|(id, _)| *id != tokens).map(|(id, value)| (value.name.clone(), id)).collect();
        let of_decoder: Named =
            [Some((TOKENS.to_owned(), tokens)), Some((ENCODER_STATES.to_owned(), encoded)), input(MASK).map(|mask| (ENCODER_MASK.to_owned(), mask))]
                .into_iter()
                .flatten()
                .collect();
        let later: Named = of_decoder.iter().filter(|(name, _)| name != ENCODER_STATES).cloned().chain(crossing).collect();
        Ok(EncoderDecoder {
            encoder: part(graph, &sources, &[(ENCODED.to_owned(), encoded)])?,
            first: part(graph, &of_decoder, &outputs)?,
            next: part(graph, &later, &outputs[..1])?,
        })
    }
}

/// The last value from which, apart from the attention mask, all inputs of the decoder are computed that do
/// not depend on its tokens.
fn encoder_output(graph: &Graph, axes: &SequenceAxes) -> Result<ValueId> {
    let of_decoder = graph.nodes().iter().filter(|node| axes.depends_on_tokens(node.output));
    let read: Vec<ValueId> = of_decoder.flat_map(|node| &node.inputs).copied().filter(|id| !axes.depends_on_tokens(*id)).collect();
    let separates = |id: &ValueId| {
        let needed = graph.dependencies_after(read.iter().copied(), &[*id]);
        needed[id.index()] && graph.inputs().all(|(input, value)| !needed[input.index()] || value.name == MASK)
    };
    let computed = graph.nodes().iter().rev().map(|node| node.output).filter(|id| !axes.depends_on_tokens(*id));
    let found = computed.into_iter().find(separates);
    found.map(|id| unquantized(graph, id)).ok_or_else(|| Error::graph("this model", "has no value that separates its encoder from its decoder"))
}

/// The value before its quantization.
fn unquantized(graph: &Graph, mut id: ValueId) -> ValueId {
    while let Some(node) = graph.producer(id).filter(|node| matches!(node.op, Op::FakeQuantize(_) | Op::LearnedFakeQuantize(_))) {
        id = node.inputs[0];
    }
    id
}
