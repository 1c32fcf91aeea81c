//! Rotary embeddings, however an exporter spells their tables: what the tables hold is computed, and held to what the op has.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::super::super::piece::Piece;
use super::{Found, Seen};
use crate::ir::ops::{BinaryKind, Concat, Rotary, Slice};
use crate::ir::{Bindings, Element, Kind, Node, Op, ValueId};
use crate::runtime;

/// Lengths of sequences for which tables are computed.
const LENGTHS: [usize; 3] = [2, 33, 512];
/// Elements and nodes of a table at most.
const ELEMENTS: usize = 1 << 20;
const NODES: usize = 256;
/// How far tables may be from those of the op: angles are floats of 32 bits, and grow with the position.
const CLOSE: f32 = 1e-4;

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
        let [_, _, sequence, width] = self.graph.value(x).ty.shape.as_slice() else { return None };
        let width = width.fixed().filter(|width| *width > 2)?;
        let mut names = Vec::new();
        sequence.names(&mut names);
        // A table must follow the length, whatever it is, or be that of the only one.
        let (length, lengths) = match (sequence.fixed(), names.as_slice()) {
            (Some(only), _) => (None, vec![only]),
            (None, [length]) => (Some(*length), LENGTHS.to_vec()),
            _ => return None,
        };
        let mut theta = None;
        for wanted in lengths {
            let sizes = self.graph.bind(|name| if length == Some(name) { wanted } else { 1 });
            if sequence.evaluate(&sizes)? != wanted {
                return None;
            }
            let [cos, sin] = [self.table(cos, &sizes, [wanted, width])?, self.table(sin, &sizes, [wanted, width])?];
            let base = match theta {
                Some(base) => base,
                // By the angle that the second pair turns by one position.
                None => {
                    let of = |table: &[f32]| table.get(width.checked_add(1)?).copied().map(f64::from);
                    let base: f64 = of(&sin)?.atan2(of(&cos)?).powf(-(width as f64) / 2.0);
                    let whole = base.round();
                    theta = Some(whole).filter(|_| (base - whole).abs() <= base * 2e-5 && whole > 1.0);
                    theta?
                }
            };
            let (own_cos, own_sin) = Rotary { theta: base, ..Rotary::default() }.tables(width, 0..wanted, &Device::Cpu).ok()?;
            let same = |table: &[f32], own: Tensor| {
                let own = runtime::floats(&Tensor::cat(&[&own, &own], 1).ok()?).ok()?;
                table.chunks(own.len().max(1)).all(|part| part.iter().zip(&own).all(|(a, b)| (a - b).abs() <= CLOSE)).then_some(())
            };
            same(&cos, own_cos)?;
            same(&sin, own_sin)?;
        }
        theta
    }

    /// What a value holds that follows from sizes alone, as rows of such a table, one after the other.
    fn table(&self, id: ValueId, sizes: &Bindings, rows: [usize; 2]) -> Option<Vec<f32>> {
        let mut computed = BTreeMap::new();
        let table = self.computed(id, sizes, &mut computed)?;
        let dims = table.dims();
        let whole = dims.len() >= 2 && dims.iter().rev().take(2).rev().eq(rows.iter());
        if whole { runtime::floats(&table).ok() } else { None }
    }

    fn computed(&self, id: ValueId, sizes: &Bindings, made: &mut BTreeMap<ValueId, Tensor>) -> Option<Tensor> {
        if let Some(tensor) = made.get(&id) {
            return Some(tensor.clone());
        }
        let value = self.graph.value(id);
        let shape: Vec<usize> = value.ty.shape.iter().map(|size| size.evaluate(sizes)).collect::<Option<_>>()?;
        let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size)).filter(|elements| *elements <= ELEMENTS)?;
        let tensor = match (value.kind, self.maker(id)) {
            (Kind::Param, _) => {
                let values = self.weights.by_name.get(&value.name)?.floats(&value.name).ok().filter(|values| values.len() == elements)?;
                Tensor::from_vec(values, shape, &Device::Cpu).ok()?
            }
            (Kind::Node(_), Some(node)) if made.len() < NODES => {
                let inputs = (0..node.inputs.len()).map(|at| self.given(node, at, sizes, made)).collect::<Option<Vec<_>>>()?;
                node.op.spec().eval(&inputs).ok().filter(|tensor| tensor.dims() == shape)?
            }
            _ => return None,
        };
        made.insert(id, tensor.clone());
        Some(tensor)
    }

    /// What a node reads: anything of the right sizes where it reads nothing else.
    fn given(&self, node: &Node, at: usize, sizes: &Bindings, made: &mut BTreeMap<ValueId, Tensor>) -> Option<Tensor> {
        let id = *node.inputs.get(at)?;
        let piece = if let Op::Opaque(opaque) = &node.op { opaque.function.as_ref()?.as_any().downcast_ref::<Piece>() } else { None };
        if let Some(piece) = piece
            && let Some((name, _)) = piece.parts.inputs.get(at)
            && piece.reads_sizes_alone(name)
        {
            let ty = &self.graph.value(id).ty;
            let shape: Vec<usize> = ty.shape.iter().map(|size| size.evaluate(sizes)).collect::<Option<_>>()?;
            shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size)).filter(|elements| *elements <= ELEMENTS)?;
            return Tensor::zeros(shape, if ty.element == Element::Float { DType::F32 } else { DType::I64 }, &Device::Cpu).ok();
        }
        self.computed(id, sizes, made)
    }
}
