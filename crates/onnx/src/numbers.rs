//! Symbolic evaluation of integers from which a file computes shapes.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::elements;
use super::initializer_roles::int;
use super::proto::{DataType, NodeProto, TensorProto};
use crate::ir::Dim;

/// Maximum number of tracked integers per value.
pub(super) const MAX_TRACKED: usize = 64;

/// An integer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Number {
    /// LiftedValue statically.
    Constant(i64),
    /// The size of an open dimension.
    Size(Dim),
    /// Unknown.
    Unknown,
}

impl Number {
    pub fn constant(&self) -> Option<i64> {
        if let Number::Constant(value) = self { Some(*value) } else { None }
    }
}

impl From<i64> for Number {
    fn from(value: i64) -> Self {
        Number::Constant(value)
    }
}

/// An integer scalar or vector whose elements may be unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Numbers {
    values: Vec<Number>,
    /// Whether it is a vector instead of a scalar.
    vector: bool,
}

impl Numbers {
    /// LiftedValue integers; `None` for more than [`MAX_TRACKED`].
    pub fn new(values: &[i64], vector: bool) -> Option<Self> {
        (values.len() <= MAX_TRACKED).then(|| Numbers { values: values.iter().copied().map(Number::Constant).collect(), vector })
    }

    /// The integers, if all are known, and whether they are a vector.
    pub fn constants(&self) -> Option<(Vec<i64>, bool)> {
        Some((self.all()?, self.vector))
    }

    /// All elements.
    pub fn each(&self) -> Vec<Number> {
        self.values.clone()
    }

    /// The element at an index; a single number is broadcast.
    fn element(&self, at: usize) -> Number {
        let values = &self.values;
        values.get(if values.len() == 1 { 0 } else { at }).cloned().unwrap_or(Number::Unknown)
    }

    /// The shape of the value.
    pub fn shape(&self) -> Vec<Dim> {
        self.vector.then_some(Dim::Fixed(self.values.len())).into_iter().collect()
    }

    /// The integers, if all are known.
    pub fn all(&self) -> Option<Vec<i64>> {
        self.values.iter().map(Number::constant).collect()
    }
}

/// Static knowledge about the values of a graph.
pub(super) trait KnownValues {
    /// The integers of a value: tracked, or a constant.
    fn numbers(&self, name: &str) -> Option<Numbers>;

    /// Shape of a value whose size a file may compute.
    fn shape(&self, name: &str) -> Option<Vec<Dim>>;

    /// Shape of a value, if it is fixed.
    fn sizes(&self, name: &str) -> Option<Vec<u64>>;

    /// Constant floats, at most one per axis.
    fn scales(&self, name: &str) -> Option<Vec<f32>>;
}

/// The integers of a small constant.
pub(super) fn constant(tensor: &TensorProto) -> Option<Numbers> {
    let ty = tensor.data_type();
    let (shape, count) = elements::shape(tensor).ok()?;
    if count > MAX_TRACKED as u64 || shape.len() > 1 || !matches!(ty, DataType::Int64 | DataType::Int32) {
        return None;
    }
    let bytes = elements::inline(tensor, ty, count).ok()??;
    let values = if ty == DataType::Int64 {
        bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes).into()).collect()
    } else {
        bytes.as_chunks::<4>().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes)).into()).collect()
    };
    Some(Numbers { values, vector: !shape.is_empty() })
}

/// Evaluates a node; `None` if its output is not tracked.
pub(super) fn evaluate(known: &impl KnownValues, node: &NodeProto) -> Option<Numbers> {
    let input = |position: usize| node.input.get(position).and_then(|name| known.numbers(name));
    let vector = |values: Vec<Number>| (values.len() <= MAX_TRACKED).then_some(Numbers { values, vector: true });
    match node.op_type() {
        "Constant" => {
            let attribute = node.attribute.first()?;
            match attribute.name() {
                "value" => constant(attribute.t.as_ref()?),
                "value_int" => Some(Numbers { values: vec![attribute.i?.into()], vector: false }),
                "value_ints" => vector(attribute.ints.iter().copied().map(Number::Constant).collect()),
                _ => None,
            }
        }
        "Shape" => {
            let size = |dim: &Dim| dim.fixed().and_then(|size| i64::try_from(size).ok()).map_or_else(|| Number::Size(dim.clone()), Number::Constant);
            let shape = known.shape(node.input.first()?)?;
            let rank = i64::try_from(shape.len()).ok()?;
            let place = |at: i64| usize::try_from(if at < 0 { at.saturating_add(rank) } else { at }.clamp(0, rank)).ok();
            let (from, to) = (place(int(node, "start", 0))?, place(int(node, "end", i64::MAX))?);
            vector(shape.get(from..to.max(from))?.iter().map(size).collect())
        }
        "Cast" if [DataType::Int64 as i64, DataType::Int32 as i64].contains(&int(node, "to", 0)) => input(0),
        "Unsqueeze" => input(0).filter(|numbers| !numbers.vector).map(|numbers| Numbers { vector: true, ..numbers }),
        "Squeeze" => input(0).filter(|numbers| numbers.values.len() == 1).map(|numbers| Numbers { vector: false, ..numbers }),
        "Gather" if int(node, "axis", 0) == 0 => {
            let (from, at) = (input(0)?, input(1)?);
            let length = i64::try_from(from.values.len()).ok()?;
            let pick = |at: i64| from.values.get(usize::try_from(if at < 0 { at.checked_add(length)? } else { at }).ok()?).cloned();
            let values = at.all()?.into_iter().map(pick).collect::<Option<Vec<_>>>()?;
            Some(Numbers { values, vector: at.vector })
        }
        "Concat" => {
            let parts: Option<Vec<Numbers>> = (0..node.input.len()).map(input).collect();
            vector(parts?.into_iter().flat_map(|part| part.values).collect())
        }
        "Slice" => {
            let from = input(0)?;
            let [start, end] = [1, 2].map(|position| input(position).and_then(|numbers| numbers.all()).and_then(|numbers| numbers.first().copied()));
            let steps = if node.input.len() > 4 { input(4)?.all()? } else { vec![1] };
            let length = i64::try_from(from.values.len()).ok()?;
            let place = |at: i64| usize::try_from(if at < 0 { at.saturating_add(length) } else { at }.clamp(0, length)).ok();
            let (start, end) = (place(start?)?, place(end?)?);
            if steps != [1] {
                return None;
            }
            vector(from.values.get(start..end.max(start))?.to_vec())
        }
        "ConstantOfShape" => {
            let [count] = <[i64; 1]>::try_from(input(0)?.all()?).ok()?;
            let [value] = <[Number; 1]>::try_from(constant(node.attribute.first()?.t.as_ref()?)?.values).ok()?;
            let count = usize::try_from(count).ok().filter(|count| *count <= MAX_TRACKED)?;
            vector(vec![value; count])
        }
        // Booleans are 0 and 1.
        "Equal" => {
            let (a, b) = (input(0)?, input(1)?);
            let equal = |at: usize| match (a.element(at), b.element(at)) {
                (Number::Constant(a), Number::Constant(b)) => Number::Constant(i64::from(a == b)),
                (Number::Size(_), Number::Constant(..0)) | (Number::Constant(..0), Number::Size(_)) => Number::Constant(0),
                (Number::Size(a), Number::Size(b)) if a == b => Number::Constant(1),
                _ => Number::Unknown,
            };
            Some(Numbers { values: (0..a.values.len().max(b.values.len())).map(equal).collect(), vector: a.vector || b.vector })
        }
        "Where" => {
            let (condition, a, b) = (input(0)?, input(1)?, input(2)?);
            let chosen = |at: usize| match (condition.element(at), a.element(at), b.element(at)) {
                (Number::Constant(0), _, b) => b,
                (Number::Constant(_), a, _) => a,
                (_, a, b) => {
                    if a == b {
                        a
                    } else {
                        Number::Unknown
                    }
                }
            };
            let count = condition.values.len().max(a.values.len()).max(b.values.len());
            Some(Numbers { values: (0..count).map(chosen).collect(), vector: condition.vector || a.vector || b.vector })
        }
        "Add" | "Sub" | "Mul" | "Div" => {
            let (a, b) = (input(0)?, input(1)?);
            let count = a.values.len().max(b.values.len());
            let compute = |at: usize| {
                let (a, b) = (a.element(at).constant()?, b.element(at).constant()?);
                match node.op_type() {
                    "Add" => a.checked_add(b),
                    "Sub" => a.checked_sub(b),
                    "Mul" => a.checked_mul(b),
                    _ => a.checked_div(b),
                }
            };
            Some(Numbers { values: (0..count).map(|at| compute(at).map_or(Number::Unknown, Number::Constant)).collect(), vector: a.vector || b.vector })
        }
        _ => None,
    }
}
