//! Rotary embeddings, however an exporter spells their tables: what the tables hold is computed, and held to what the op has.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::super::super::piece::Piece;
use super::{Found, Seen};
use crate::ir::ops::{BinaryKind, Concat, Rotary, Slice};
use crate::ir::{Bindings, Dim, Element, Kind, Node, Op, ValueId};
use crate::runtime;

/// Lengths of sequences for which tables are computed.
const LENGTHS: [usize; 4] = [2, 33, 512, FAR];
/// One beyond the lengths of training of models whose tables change there: not every table can be computed for it.
const FAR: usize = 9001;
/// Elements and nodes of what tables are computed with, at most.
const ELEMENTS: usize = 1 << 26;
const NODES: usize = 256;
/// How far tables may be from those of the op.
const CLOSE: f32 = 1e-4;
/// How far, for each position, at the far length: angles are floats of 32 bits, and grow with the position.
const CLOSE_PER_POSITION: f32 = 2e-6;
/// How far the base of a table of such floats may be from a whole number, relative to it.
const WHOLE: f64 = 2e-6;

/// `x · cos + turned(x) · sin`, in which the second half of a head, negated, stands before the first half.
pub(super) fn rotary(seen: &Seen, node: &Node) -> Found {
    let [a, b] = node.inputs.as_slice() else { return None };
    let factors = |id: ValueId| match seen.maker(id).map(|maker| (&maker.op, maker.inputs.as_slice())) {
        Some((Op::Mul(_), [a, b])) => vec![(*a, *b), (*b, *a)],
        _ => Vec::new(),
    };
    let sides = [(*a, *b), (*b, *a)].into_iter().filter(|_| matches!(node.op, Op::Add(_)));
    sides.into_iter().find_map(|(straight, crossed)| {
        let (turned, sin) = factors(crossed).into_iter().find(|(turned, _)| seen.turned(*turned).is_some())?;
        let x = seen.turned(turned)?;
        let (_, cos) = factors(straight).into_iter().find(|(value, _)| *value == x)?;
        let theta = seen.theta(x, cos, sin)?;
        Some((Rotary { theta, ..Rotary::default() }.into(), vec![x.into()]))
    })
}

impl Seen<'_> {
    /// What a value is that has its second half, negated, before its first one.
    fn turned(&self, id: ValueId) -> Option<ValueId> {
        let node = self.maker(id)?;
        let (Op::Concat(Concat { axis: -1 | 3 }), [second, first]) = (&node.op, node.inputs.as_slice()) else { return None };
        let second = match self.maker(*second).map(|maker| (&maker.op, maker.inputs.as_slice())) {
            Some((Op::Neg(_), [x])) => *x,
            Some((Op::Binary(binary), [zero, x])) if binary.kind == BinaryKind::Sub && self.number(*zero) == Some(0.0) => *x,
            _ => return None,
        };
        let part = |id: ValueId, wanted: usize| {
            let maker = self.maker(id)?;
            let (Op::Slice(Slice { start, length: Some(length), step: 1, axis: -1 | 3, .. }), [x]) = (&maker.op, maker.inputs.as_slice()) else { return None };
            let width = self.graph.value(*x).ty.shape.get(3)?.fixed()?;
            let start = if *start < 0 { start.checked_add(i64::try_from(width).ok()?)? } else { *start };
            (usize::try_from(start).ok()? == wanted && length.checked_mul(2)? == width).then_some((*x, *length))
        };
        let (x, half) = part(*first, 0)?;
        (part(second, half)? == (x, half)).then_some(x)
    }

    /// The base of the frequencies of tables of cosines and sines, if they are those of positions from zero on.
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
        // A table must follow the length, whatever it is, or be that of the only one.
        let (length, lengths) = match (sequence.fixed(), names.as_slice()) {
            (Some(only), _) => (None, vec![only, only]),
            (None, [length]) => (Some(*length), LENGTHS.to_vec()),
            _ => return None,
        };
        let mut theta = None;
        for (at, wanted) in lengths.into_iter().enumerate() {
            // What follows from another size than the length differs from one of these to the other, or from one sample to the other.
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
                // By the angle that the last pair turns by one position: the smallest one says most of the base.
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

    /// What a value holds that follows from sizes alone, as rows of such a table, one after the other.
    fn table(&self, id: ValueId, sizes: &Bindings, rows: [usize; 2]) -> Option<Vec<f32>> {
        let mut computing = Computing { sizes, made: BTreeMap::new(), nodes: NODES, elements: ELEMENTS };
        let table = self.computed(id, &mut computing)?;
        let dims = table.dims();
        let whole = dims.len() >= 2 && dims.iter().rev().take(2).rev().eq(rows.iter());
        if whole { runtime::floats(&table).ok() } else { None }
    }

    fn computed(&self, id: ValueId, computing: &mut Computing) -> Option<Tensor> {
        if let Some(tensor) = computing.made.get(&id) {
            return Some(tensor.clone());
        }
        let value = self.graph.value(id);
        let (shape, elements) = computing.room(&value.ty.shape)?;
        let tensor = match (value.kind, self.maker(id)) {
            (Kind::Param, _) => {
                let values = self.weights.by_name.get(&value.name)?.floats(&value.name).ok().filter(|values| values.len() == elements)?;
                Tensor::from_vec(values, shape, &Device::Cpu).ok()?
            }
            (Kind::Node(_), Some(node)) => {
                // Counted before its inputs are: so many stand behind each other at most.
                computing.nodes = computing.nodes.checked_sub(1)?;
                let inputs = (0..node.inputs.len()).map(|at| self.given(node, at, computing)).collect::<Option<Vec<_>>>()?;
                if piece(node).is_some_and(Piece::is_random) {
                    return None;
                }
                node.op.spec().eval(&inputs).ok().filter(|tensor| tensor.dims() == shape)?
            }
            _ => return None,
        };
        computing.made.insert(id, tensor.clone());
        Some(tensor)
    }

    /// What a node reads: anything of the right sizes where it reads nothing else.
    fn given(&self, node: &Node, at: usize, computing: &mut Computing) -> Option<Tensor> {
        let id = *node.inputs.get(at)?;
        if let Some(piece) = piece(node)
            && let Some((name, _)) = piece.parts().inputs.get(at)
            && piece.reads_sizes_alone(name)
        {
            let ty = &self.graph.value(id).ty;
            let (shape, _) = computing.room(&ty.shape)?;
            return Tensor::zeros(shape, if ty.element == Element::Float { DType::F32 } else { DType::I64 }, &Device::Cpu).ok();
        }
        self.computed(id, computing)
    }
}

/// What is computed of a table.
struct Computing<'s> {
    sizes: &'s Bindings,
    made: BTreeMap<ValueId, Tensor>,
    /// Nodes and elements that may still be computed.
    nodes: usize,
    elements: usize,
}

impl Computing<'_> {
    /// Sizes and elements of a value, if there is room for it.
    fn room(&mut self, shape: &[Dim]) -> Option<(Vec<usize>, usize)> {
        let shape: Vec<usize> = shape.iter().map(|size| size.evaluate(self.sizes)).collect::<Option<_>>()?;
        let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size))?;
        self.elements = self.elements.checked_sub(elements)?;
        Some((shape, elements))
    }
}

/// The piece that a node is.
fn piece(node: &Node) -> Option<&Piece> {
    if let Op::Opaque(opaque) = &node.op { opaque.function.as_ref()?.as_any().downcast_ref() } else { None }
}

/// The number with the fewest digits that a base may be.
fn roundest(base: f64) -> Option<f64> {
    let near = |power: i32| Some(10f64.powi(power)).map(|unit| (base / unit).round() * unit).filter(|whole| (base - whole).abs() <= base * WHOLE);
    (0..=12).rev().find_map(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_are_known_by_the_last_pair_of_floats() {
        for (width, wanted) in [(4, 10_000.0), (64, 10_000.0), (64, 500_000.0), (64, 1e6), (128, 5e5), (128, 1e7), (64, 12_345.0)] {
            let angle = 1.0 / (wanted as f32).powf((width - 2) as f32 / width as f32);
            let base = f64::from(angle.sin()).atan2(f64::from(angle.cos())).powf(-f64::from(width) / f64::from(width - 2));
            assert_eq!(roundest(base), Some(wanted), "{width}: {base}");
        }
        assert_eq!([10_000.5, f64::NAN, f64::INFINITY].map(roundest), [None; 3]);
    }
}
