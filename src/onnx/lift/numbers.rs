//! Whole numbers that a file computes shapes with, followed as numbers.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::elements;
use super::super::proto::{DataType, NodeProto, TensorProto};
use super::super::uses::int;
use super::{Known, Lift};
use crate::ir::Dim;

/// Numbers at most that are followed.
pub(super) const MOST: usize = 64;

/// A whole number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Number {
    /// Known beforehand.
    Known(i64),
    /// That of a size that is open.
    Size(Dim),
    /// Anything.
    Open,
}

impl Number {
    pub fn known(&self) -> Option<i64> {
        if let Number::Known(value) = self { Some(*value) } else { None }
    }
}

impl From<i64> for Number {
    fn from(value: i64) -> Self {
        Number::Known(value)
    }
}

/// A vector of whole numbers, or one, of which some are not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Numbers {
    values: Vec<Number>,
    /// Whether it is a vector, and not one number.
    vector: bool,
}

impl Numbers {
    /// Numbers that are known; nothing for more than are followed.
    pub fn new(values: &[i64], vector: bool) -> Option<Self> {
        (values.len() <= MOST).then(|| Numbers { values: values.iter().copied().map(Number::Known).collect(), vector })
    }

    /// All of them, where all are known, and whether they are a vector.
    pub fn known(&self) -> Option<(Vec<i64>, bool)> {
        Some((self.all()?, self.vector))
    }

    /// Each of them.
    pub fn each(&self) -> Vec<Number> {
        self.values.clone()
    }

    /// The element at an index; a single number is broadcast.
    fn element(&self, at: usize) -> Number {
        let values = &self.values;
        values.get(if values.len() == 1 { 0 } else { at }).cloned().unwrap_or(Number::Open)
    }

    /// All of them, where all are known.
    pub fn all(&self) -> Option<Vec<i64>> {
        self.values.iter().map(Number::known).collect()
    }
}

/// Numbers behind a name: computed before, or a constant.
pub(super) fn known(lift: &Lift, name: &str) -> Option<Numbers> {
    match lift.known.get(name) {
        Some(Known::Numbers(numbers)) => return Some(numbers.clone()),
        Some(_) => return None,
        None => {}
    }
    constant(lift.initializers.get(name)?)
}

/// What a tensor in the messages holds, if these are a few whole numbers.
fn constant(tensor: &TensorProto) -> Option<Numbers> {
    let ty = tensor.data_type();
    let (shape, count) = elements::shape(tensor).ok()?;
    if count > MOST as u64 || shape.len() > 1 || !matches!(ty, DataType::Int64 | DataType::Int32) {
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

/// What a node makes of numbers, if it makes numbers.
pub(super) fn of(lift: &Lift, node: &NodeProto) -> Option<Numbers> {
    let input = |position: usize| node.input.get(position).and_then(|name| known(lift, name));
    let vector = |values: Vec<Number>| (values.len() <= MOST).then_some(Numbers { values, vector: true });
    match node.op_type() {
        "Constant" => {
            let attribute = node.attribute.first()?;
            match attribute.name() {
                "value" => constant(attribute.t.as_ref()?),
                "value_int" => Some(Numbers { values: vec![attribute.i?.into()], vector: false }),
                "value_ints" => vector(attribute.ints.iter().copied().map(Number::Known).collect()),
                _ => None,
            }
        }
        "Shape" => {
            let size = |dim: &Dim| dim.fixed().and_then(|size| i64::try_from(size).ok()).map_or_else(|| Number::Size(dim.clone()), Number::Known);
            let shape = match lift.known.get(node.input.first()?.as_str())? {
                Known::Value(id) => lift.builder.ty(*id).shape.clone(),
                Known::Numbers(numbers) => numbers.vector.then_some(Dim::Fixed(numbers.values.len())).into_iter().collect(),
                _ => return None,
            };
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
            let count = usize::try_from(count).ok().filter(|count| *count <= MOST)?;
            vector(vec![value; count])
        }
        // Truth values are 0 and 1 here.
        "Equal" => {
            let (a, b) = (input(0)?, input(1)?);
            let equal = |at: usize| match (a.element(at), b.element(at)) {
                (Number::Known(a), Number::Known(b)) => Number::Known(i64::from(a == b)),
                (Number::Size(_), Number::Known(..0)) | (Number::Known(..0), Number::Size(_)) => Number::Known(0),
                (Number::Size(a), Number::Size(b)) if a == b => Number::Known(1),
                _ => Number::Open,
            };
            Some(Numbers { values: (0..a.values.len().max(b.values.len())).map(equal).collect(), vector: a.vector || b.vector })
        }
        "Where" => {
            let (condition, a, b) = (input(0)?, input(1)?, input(2)?);
            let chosen = |at: usize| match (condition.element(at), a.element(at), b.element(at)) {
                (Number::Known(0), _, b) => b,
                (Number::Known(_), a, _) => a,
                (_, a, b) => {
                    if a == b {
                        a
                    } else {
                        Number::Open
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
                let (a, b) = (a.element(at).known()?, b.element(at).known()?);
                match node.op_type() {
                    "Add" => a.checked_add(b),
                    "Sub" => a.checked_sub(b),
                    "Mul" => a.checked_mul(b),
                    _ => a.checked_div(b),
                }
            };
            Some(Numbers { values: (0..count).map(|at| compute(at).map_or(Number::Open, Number::Known)).collect(), vector: a.vector || b.vector })
        }
        _ => None,
    }
}
