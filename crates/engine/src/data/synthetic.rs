//! Synthetic samples, to check that a model runs and that two runtimes agree.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};

use super::{Batch, References, shaped};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Element, Graph, Kind, Op, Port};
use crate::store::header::element_count;

/// Samples per batch.
const SAMPLES: usize = 2;
/// Tokens of the longer sample.
const LONG: usize = 8;
/// Tokens of the shorter sample, which is padded.
const SHORT: usize = 5;
/// Height and width of an image with symbolic dimensions.
const IMAGE: usize = 64;
/// Other symbolic dimensions.
const OTHER: usize = 16;
/// Maximum number of elements of an input.
const MAX_ELEMENTS: u64 = 1 << 28;

/// Generates a batch for any graph: tokens, masks and floats, determined by the seed. Fails if a dimension of
/// an input cannot be evaluated, or an input is too large.
pub fn synthetic(graph: &Graph, seed: u64) -> Result<Batch> {
    let size = |name: &str| match name {
        "batch" => SAMPLES,
        "sequence" => LONG.saturating_add(graph.image_patches().map_or(0, |(_, patches)| patches)),
        "decoder_sequence" => SHORT,
        "height" | "width" => IMAGE,
        _ => OTHER,
    };
    synthetic_with_sizes(graph, seed, &graph.bind(size))
}

/// Like [`synthetic`], with the given values of symbolic dimensions.
pub fn synthetic_with_sizes(graph: &Graph, seed: u64, sizes: &Bindings) -> Result<Batch> {
    let (mut next, patches) = (random(seed), graph.image_patches());
    let short = SHORT.saturating_add(patches.map_or(0, |(_, patches)| patches));
    let mut inputs = BTreeMap::new();
    for (id, value) in graph.inputs() {
        let size = |dim: &crate::ir::Dim| {
            dim.evaluate(sizes).ok_or_else(|| Error::graph(format!("graph input `{}`", value.name), format!("has the unresolved dimension `{dim}`")))
        };
        let shape = value.ty.shape.iter().map(size).collect::<Result<Vec<usize>>>()?;
        let count = element_count(&shape).filter(|count| *count <= MAX_ELEMENTS).map(|count| count as usize);
        let count =
            count.ok_or_else(|| Error::graph(format!("graph input `{}`", value.name), format!("takes {shape:?}, which is too large for synthetic data")))?;
        let tensor = match value.ty.element {
            Element::Float => floats(count, shape, &mut next),
            Element::Int if value.name.contains("mask") => {
                let length = sizes.get("sequence").copied().unwrap_or(LONG);
                let real = |place: usize| i64::from(place < length || place.checked_rem(length).is_none_or(|place| place < short));
                Tensor::from_vec((0..count).map(real).collect::<Vec<_>>(), shape, &Device::Cpu)
            }
            Element::Int => {
                let rows = u32::try_from(rows(graph, id)).unwrap_or(u32::MAX);
                let length = shape.last().copied().unwrap_or(1);
                let number = |(place, random): (usize, u32)| match patches {
                    Some((token, patches)) if place.checked_rem(length).is_some_and(|place| place < patches) => token,
                    // Not the token of a patch.
                    Some((token, _)) if i64::from(random) == token => i64::from(token == 0),
                    _ => i64::from(random),
                };
                let numbers: Vec<i64> = (0..count).map(|place| number((place, next().checked_rem(rows).unwrap_or(0)))).collect();
                Tensor::from_vec(numbers, shape, &Device::Cpu)
            }
        };
        inputs.insert(value.name.clone(), tensor.map_err(shaped)?);
    }
    Ok(Batch { inputs, references: References::None, samples: sizes.get("batch").copied().unwrap_or(SAMPLES) })
}

/// Number of kinds of samples of [`synthetic_for_ports`].
pub const KINDS: usize = TRIED.len();
/// Kinds of samples: exclusive maximum of integers, image size, and size of other axes.
const TRIED: [(u32, usize, usize); 5] = [(100, 224, 32), (2, 64, 16), (100, 32, 1), (2, 320, 512), (1, 48, 1)];

/// Generates a sample for a model of which only the inputs are known. `kind`, below [`KINDS`], selects a
/// guess for symbolic dimensions and for the range of integers.
pub fn synthetic_for_ports(inputs: &[Port], seed: u64, kind: usize) -> Result<Batch> {
    let (largest, image, other) = TRIED.get(kind).copied().unwrap_or((1, 1, 1));
    let mut next = random(seed);
    let mut generated = BTreeMap::new();
    for input in inputs {
        let rank = input.shape.len();
        let open = |axis: usize| match (axis, rank) {
            (0, 2..) => 1,
            (1, 4) => 3,
            (2 | 3, 4) => image,
            _ => other,
        };
        let shape: Vec<usize> = input.shape.iter().enumerate().map(|(axis, size)| size.unwrap_or_else(|| open(axis))).collect();
        let count = element_count(&shape).filter(|count| *count <= MAX_ELEMENTS).map(|count| count as usize);
        let count =
            count.ok_or_else(|| Error::run(format!("input `{}`", input.name), format!("takes {shape:?}, which is too large for synthetic data"), ""))?;
        let tensor = if input.element == Element::Float {
            floats(count, shape, &mut next)
        } else {
            let number = |random: u32| match (input.name.as_str(), input.number) {
                (_, Some(number)) => number,
                (name, _) if name.contains("mask") => 1,
                // There are few token types, and type 0 always exists.
                (name, _) if name.contains("token_type") || name.contains("segment") => 0,
                _ => i64::from(random.checked_rem(largest).unwrap_or(0)),
            };
            Tensor::from_vec((0..count).map(|_| number(next())).collect::<Vec<_>>(), shape, &Device::Cpu)
        };
        generated.insert(input.name.clone(), tensor.map_err(shaped)?);
    }
    Ok(Batch { inputs: generated, references: References::None, samples: 1 })
}

/// Pseudorandom numbers, determined by the seed.
fn random(seed: u64) -> impl FnMut() -> u32 {
    let mut bits = blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof();
    move || {
        let mut bytes = [0; 4];
        bits.fill(&mut bytes);
        u32::from_le_bytes(bytes)
    }
}

/// Random floats from 0 to 1.
fn floats(count: usize, shape: Vec<usize>, next: &mut impl FnMut() -> u32) -> candle_core::Result<Tensor> {
    Tensor::from_vec((0..count).map(|_| (f64::from(next()) / f64::from(u32::MAX)) as f32).collect::<Vec<_>>(), shape, &Device::Cpu)
}

/// Maximum sequence length that the position embeddings of a graph support; `None` if there is no limit.
pub fn max_positions(graph: &Graph) -> Option<usize> {
    let positions = |id: &crate::ir::ValueId| {
        if let Op::Positions(op) = &graph.producer(*id)?.op { Some(op.first()) } else { None }
    };
    let room = |node: &crate::ir::Node| {
        let first = node.inputs.first().filter(|_| matches!(node.op, Op::Embedding(_))).and_then(positions)?;
        Some(graph.value(*node.inputs.get(1)?).ty.shape.first()?.fixed()?.saturating_sub(first))
    };
    graph.nodes().iter().filter_map(room).min()
}

/// Number of rows of the smallest embedding table that an input indexes.
fn rows(graph: &Graph, input: crate::ir::ValueId) -> usize {
    let tables = graph.nodes().iter().filter(|node| matches!(node.op, Op::Embedding(_)) && node.inputs.first() == Some(&input));
    let table = |node: &crate::ir::Node| {
        let value = graph.value(*node.inputs.get(1)?);
        value.ty.shape.first()?.fixed().filter(|_| value.kind == Kind::Param)
    };
    tables.filter_map(table).min().unwrap_or(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(lines: &str) -> Graph {
        lines.parse().unwrap()
    }

    #[test]
    fn specified_numbers_are_used() {
        let port = |name: &str, number| Port { name: name.into(), element: Element::Int, shape: Vec::new(), number };
        let inputs = synthetic_for_ports(&[port("sr", Some(16_000)), port("mask", Some(0)), port("other", None)], 0, 0).unwrap().inputs;
        let number = |name: &str| inputs[name].to_scalar::<i64>().unwrap();
        assert_eq!((number("sr"), number("mask")), (16_000, 0));
        assert!(number("other") < 100);
    }

    #[test]
    fn oversized_inputs_are_rejected() {
        for size in [1usize << 20, 1 << 40] {
            let graph = graph(&format!("input x: float[batch, 3, {size}, {size}]\ny = GlobalAveragePool(x) -> float[batch, 3]\noutput y = y\n"));
            let error = synthetic(&graph, 0).unwrap_err().to_string();
            assert!(error.starts_with("graph input `x`: takes ["), "{error}");
        }
    }

    #[test]
    fn tokens_are_within_embedding_tables_of_any_height() {
        for rows in [0, 1, 7, u32::MAX as usize, 1 << 32] {
            let lines = format!("input x: int[batch, sequence]\nparam t: float[{rows}, 0]\ny = Embedding(x, t) -> float[batch, sequence, 0]\noutput y = y\n");
            let batch = synthetic(&graph(&lines), 0).unwrap();
            let tokens = batch.inputs["x"].flatten_all().unwrap().to_vec1::<i64>().unwrap();
            assert!(tokens.iter().all(|token| (0..rows.max(1) as i64).contains(token)), "{rows}: {tokens:?}");
        }
    }

    #[test]
    fn masks_do_not_require_a_sequence_length() {
        let graph = graph("input mask: float[n, 4]\noutput y = mask\n".replace("float", "int").as_str());
        assert!(synthetic_with_sizes(&graph, 0, &[("n".to_owned(), 2), ("sequence".to_owned(), 0)].into()).is_ok());
    }
}
