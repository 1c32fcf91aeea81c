//! Pattern of rotary position embeddings. The tables of the file are evaluated, whatever their
//! expression, and compared with those of the op.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::super::super::opaque_subgraph::OpaqueSubgraph;
use super::{Match, Matcher};
use crate::ir::ops::{BinaryKind, Concat, Positions, Rotary};
use crate::ir::{Bindings, Dim, Element, Kind, Node, Op, ValueId};
use crate::runtime;

/// Sequence lengths for which tables are evaluated.
const LENGTHS: [usize; 4] = [2, 33, 512, FAR];
/// A length beyond the training length of models whose tables change there. Not every table can be
/// evaluated for it.
const FAR: usize = 9001;
/// Limits on evaluated elements and nodes per table.
const ELEMENTS: usize = 1 << 26;
const NODES: usize = 256;
/// Absolute tolerance for table entries.
const CLOSE: f32 = 1e-4;
/// Additional tolerance per position at the far length: angles are 32-bit floats, so errors grow with
/// the position.
const CLOSE_PER_POSITION: f32 = 2e-6;
/// Relative tolerance for rounding a base.
const BASE_TOLERANCE: f64 = 2e-6;

/// `x · cos + rotate_half(x) · sin`, where `rotate_half` negates the second half of a head and moves it
/// to the front.
pub(super) fn rotary(matcher: &Matcher, node: &Node) -> Match {
    let [a, b] = node.inputs.as_slice() else { return None };
    let factors = |id: ValueId| match matcher.producer(id).map(|producer| (&producer.op, producer.inputs.as_slice())) {
        Some((Op::Mul(_), [a, b])) => vec![(*a, *b), (*b, *a)],
        _ => Vec::new(),
    };
    let sides = [(*a, *b), (*b, *a)].into_iter().filter(|_| matches!(node.op, Op::Add(_)));
    sides.into_iter().find_map(|(straight, crossed)| {
        let (rotated, sin) = factors(crossed).into_iter().find(|(rotated, _)| matcher.rotated(*rotated).is_some())?;
        let x = matcher.rotated(rotated)?;
        let (_, cos) = factors(straight).into_iter().find(|(value, _)| *value == x)?;
        let theta = matcher.theta(x, cos, sin)?;
        Some((Rotary { theta, ..Rotary::default() }.into(), vec![x.into()]))
    })
}

/// A rotary embedding of the leading elements of each head, concatenated with the others.
pub(super) fn partial(matcher: &Matcher, node: &Node) -> Match {
    let (Op::Concat(Concat { axis: -1 | 3 }), [turned, rest]) = (&node.op, node.inputs.as_slice()) else { return None };
    let (Op::Rotary(rotary), operands) = rotary(matcher, matcher.producer(*turned)?)? else { return None };
    let [operand] = operands.as_slice() else { return None };
    let (x, start, width) = matcher.part_of_heads(operand.value)?;
    let (of_x, first, others) = matcher.part_of_heads(*rest)?;
    let size = matcher.graph.value(x).ty.shape.get(3)?.fixed()?;
    let covers = x == of_x && (start, first) == (0, width) && width.checked_add(others) == Some(size);
    covers.then(|| (Rotary { width: Some(width), ..rotary }.into(), vec![x.into()]))
}

impl Matcher<'_> {
    /// For consecutive elements of each head of `[batch, heads, sequence, width]`: the heads, the first
    /// element, and the number of elements.
    fn part_of_heads(&self, id: ValueId) -> Option<(ValueId, usize, usize)> {
        let producer = self.producer(id)?;
        let (Op::Slice(slice), [x]) = (&producer.op, producer.inputs.as_slice()) else { return None };
        let size = self.graph.value(*x).ty.shape.get(3)?.fixed().filter(|_| slice.step == 1 && matches!(slice.axis, -1 | 3))?;
        let (start, length) = slice.bounds(size)?;
        Some((*x, start, length))
    }

    /// The input of `rotate_half`.
    fn rotated(&self, id: ValueId) -> Option<ValueId> {
        let node = self.producer(id)?;
        let (Op::Concat(Concat { axis: -1 | 3 }), [second, first]) = (&node.op, node.inputs.as_slice()) else { return None };
        let second = match self.producer(*second).map(|producer| (&producer.op, producer.inputs.as_slice())) {
            Some((Op::Neg(_), [x])) => *x,
            Some((Op::Binary(binary), [zero, x])) if binary.kind == BinaryKind::Sub && self.number(*zero) == Some(0.0) => *x,
            _ => return None,
        };
        let (x, start, half) = self.part_of_heads(*first)?;
        let whole = self.graph.value(x).ty.shape.get(3)?.fixed()?;
        (start == 0 && half.checked_mul(2)? == whole && self.part_of_heads(second)? == (x, half, half)).then_some(x)
    }

    /// The base of the frequencies of cosine and sine tables for consecutive positions from zero.
    fn theta(&self, x: ValueId, cos: ValueId, sin: ValueId) -> Option<f64> {
        let key = (cos, sin, self.graph.value(x).ty.shape.iter().skip(2).map(ToString::to_string).collect());
        if let Some(known) = self.bases.borrow().get(&key) {
            return *known;
        }
        let found = self.base(x, cos, sin);
        self.bases.borrow_mut().insert(key, found);
        found
    }

    fn base(&self, x: ValueId, cos: ValueId, sin: ValueId) -> Option<f64> {
        let [_, _, sequence, width] = self.graph.value(x).ty.shape.as_slice() else { return None };
        let width = width.fixed().filter(|width| *width > 2)?;
        let mut names = Vec::new();
        sequence.names(&mut names);
        // The table must depend on the sequence length only, or the length must be fixed.
        let (length, lengths) = match (sequence.fixed(), names.as_slice()) {
            (Some(only), _) => (None, vec![only, only]),
            (None, [length]) => (Some(*length), LENGTHS.to_vec()),
            _ => return None,
        };
        let mut theta = None;
        for (at, wanted) in lengths.into_iter().enumerate() {
            // Other sizes vary, so that a table that depends on them does not match.
            let other = if at.is_multiple_of(2) { 3 } else { 2 };
            let sizes = self.graph.bind(|name| if length == Some(name) { wanted } else { other });
            if sequence.evaluate(&sizes)? != wanted {
                return None;
            }
            let far = length.is_some() && wanted == FAR;
            let (cos, sin) = match (self.table(cos, &sizes, [wanted, width]), self.table(sin, &sizes, [wanted, width])) {
                (Some(cos), Some(sin)) => (cos, sin),
                _ if far => continue,
                _ => return None,
            };
            let base = match theta {
                Some(base) => base,
                // The angle of the last pair at position 1 determines the base most precisely.
                None => {
                    let last = width.checked_add(width.checked_div(2)?)?.checked_sub(1)?;
                    let of = |table: &[f32]| table.get(last).copied().map(f64::from);
                    let base: f64 = of(&sin)?.atan2(of(&cos)?).powf(-(width as f64) / (width as f64 - 2.0));
                    theta = roundest(base).filter(|whole| *whole > 1.0);
                    theta?
                }
            };
            let (own_cos, own_sin) = Rotary { theta: base, ..Rotary::default() }.tables(width, 0..wanted, &Device::Cpu).ok()?;
            let same = |table: &[f32], own: Tensor| {
                let own = runtime::floats(&Tensor::cat(&[&own, &own], 1).ok()?).ok()?;
                let within = |at: usize| if far { CLOSE.max(at.checked_div(width).unwrap_or(0) as f32 * CLOSE_PER_POSITION) } else { CLOSE };
                let like = |part: &[f32]| part.iter().zip(&own).enumerate().all(|(at, (a, b))| (a - b).abs() <= within(at));
                table.chunks(own.len().max(1)).all(like).then_some(())
            };
            same(&cos, own_cos)?;
            same(&sin, own_sin)?;
        }
        theta
    }

    /// Evaluates a table that depends only on sizes, in row-major order. Its last two axes must be
    /// `rows`.
    fn table(&self, id: ValueId, sizes: &Bindings, rows: [usize; 2]) -> Option<Vec<f32>> {
        let mut evaluation = TableEvaluation { sizes, values: BTreeMap::new(), nodes: NODES, elements: ELEMENTS };
        let table = self.evaluate(id, &mut evaluation)?;
        let dims = table.dims();
        let whole = dims.len() >= 2 && dims.iter().rev().take(2).rev().eq(rows.iter());
        if whole { runtime::floats(&table).ok() } else { None }
    }

    fn evaluate(&self, id: ValueId, evaluation: &mut TableEvaluation) -> Option<Tensor> {
        if let Some(tensor) = evaluation.values.get(&id) {
            return Some(tensor.clone());
        }
        let value = self.graph.value(id);
        let (shape, elements) = evaluation.reserve(&value.ty.shape)?;
        let tensor = match (value.kind, self.producer(id)) {
            (Kind::Param, _) => {
                let values = self.weights.by_name.get(&value.name)?.floats(&value.name).ok().filter(|values| values.len() == elements)?;
                Tensor::from_vec(values, shape, &Device::Cpu).ok()?
            }
            (Kind::Node(_), Some(node)) => {
                // Counted before the inputs, which also limits the recursion depth.
                evaluation.nodes = evaluation.nodes.checked_sub(1)?;
                let inputs = (0..node.inputs.len()).map(|at| self.evaluate_input(node, at, evaluation)).collect::<Option<Vec<_>>>()?;
                if opaque_subgraph(node).is_some_and(OpaqueSubgraph::is_random) {
                    return None;
                }
                node.op.spec().eval(&inputs).ok().filter(|tensor| tensor.dims() == shape)?
            }
            _ => return None,
        };
        evaluation.values.insert(id, tensor.clone());
        Some(tensor)
    }

    /// Evaluates an input of a node. If the node reads only its shape, the values are zeros.
    fn evaluate_input(&self, node: &Node, at: usize, evaluation: &mut TableEvaluation) -> Option<Tensor> {
        let id = *node.inputs.get(at)?;
        let of_subgraph = |subgraph: &OpaqueSubgraph| subgraph.parts().inputs.get(at).is_some_and(|(name, _)| subgraph.reads_only_sizes(name));
        if matches!(node.op, Op::Positions(Positions { padding: None, .. })) || opaque_subgraph(node).is_some_and(of_subgraph) {
            let ty = &self.graph.value(id).ty;
            let (shape, _) = evaluation.reserve(&ty.shape)?;
            return Tensor::zeros(shape, if ty.element == Element::Float { DType::F32 } else { DType::I64 }, &Device::Cpu).ok();
        }
        self.evaluate(id, evaluation)
    }
}

/// State of the evaluation of a table.
struct TableEvaluation<'s> {
    sizes: &'s Bindings,
    values: BTreeMap<ValueId, Tensor>,
    /// Remaining budget of nodes and elements.
    nodes: usize,
    elements: usize,
}

impl TableEvaluation<'_> {
    /// Shape and element count of a value; `None` if the budget is exhausted.
    fn reserve(&mut self, shape: &[Dim]) -> Option<(Vec<usize>, usize)> {
        let shape: Vec<usize> = shape.iter().map(|size| size.evaluate(self.sizes)).collect::<Option<_>>()?;
        let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size))?;
        self.elements = self.elements.checked_sub(elements)?;
        Some((shape, elements))
    }
}

/// The opaque subgraph of a node.
fn opaque_subgraph(node: &Node) -> Option<&OpaqueSubgraph> {
    if let Op::Opaque(opaque) = &node.op { opaque.function.as_ref()?.as_any().downcast_ref() } else { None }
}

/// The number with the fewest significant digits within the tolerance.
fn roundest(base: f64) -> Option<f64> {
    let near = |power: i32| Some(10f64.powi(power)).map(|unit| (base / unit).round() * unit).filter(|whole| (base - whole).abs() <= base * BASE_TOLERANCE);
    (0..=12).rev().find_map(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_are_derived_from_the_last_angle() {
        for (width, wanted) in [(4, 10_000.0), (64, 10_000.0), (64, 500_000.0), (64, 1e6), (128, 5e5), (128, 1e7), (64, 12_345.0)] {
            let angle = 1.0 / (wanted as f32).powf((width - 2) as f32 / width as f32);
            let base = f64::from(angle.sin()).atan2(f64::from(angle.cos())).powf(-f64::from(width) / f64::from(width - 2));
            assert_eq!(roundest(base), Some(wanted), "{width}: {base}");
        }
        assert_eq!([10_000_009.0, 500_000.4, 0.999_999].map(roundest), [Some(1e7), Some(5e5), Some(1.0)]);
        assert_eq!([10_000.5, f64::NAN, f64::INFINITY].map(roundest), [None; 3]);
    }
}
