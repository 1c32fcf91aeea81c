//! Reshaping of tensors.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, shape_error};
use crate::ir::{Dim, TensorType};

/// Maximum number of axes of a tensor.
const MAX_RANK: usize = 32;

/// A size in the target shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TargetSize {
    /// The size of this input axis.
    Copy(usize),
    /// Inferred from the number of elements; at most one axis.
    Rest,
    /// A fixed size.
    #[serde(untagged)]
    Number(usize),
}

/// Reshapes a float or integer tensor; the order of elements is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reshape {
    /// Target shape, outermost axis first.
    pub shape: Vec<TargetSize>,
}

impl Default for Reshape {
    fn default() -> Self {
        Self { shape: vec![TargetSize::Rest] }
    }
}

/// Input axes and output axes that cover the same elements.
type AxisRun = (Range<usize>, Range<usize>);

impl Reshape {
    /// The shape of the output.
    fn sizes(&self, from: &[Dim]) -> Result<Vec<Dim>, String> {
        if self.shape.len() > MAX_RANK {
            return Err(format!("{} axes exceed the maximum of {MAX_RANK}", self.shape.len()));
        }
        let large = || "the number of elements overflows".to_owned();
        let all = Dim::all(from).ok_or_else(large)?;
        let copied = |axis: usize| from.get(axis).cloned().ok_or_else(|| format!("axis {axis} to copy is out of range for {} axes", from.len()));
        let mut sizes = Vec::with_capacity(self.shape.len());
        for size in &self.shape {
            sizes.push(match size {
                TargetSize::Number(size) => Some(Dim::Fixed(*size)),
                TargetSize::Copy(axis) => Some(copied(*axis)?),
                TargetSize::Rest => None,
            });
        }
        let known = Dim::all(sizes.iter().flatten()).ok_or_else(large)?;
        let shape_error =
            || format!("{all} elements cannot be reshaped to {}", self.shape.iter().map(|size| format!("{size:?}")).collect::<Vec<_>>().join(" x "));
        let rest = match sizes.iter().filter(|size| size.is_none()).count() {
            0 if known == all => Dim::Fixed(1),
            1 => all.divided(&known).ok_or_else(shape_error)?,
            0 => return Err(shape_error()),
            _ => return Err("more than one size is to be inferred".into()),
        };
        Ok(sizes.into_iter().map(|size| size.unwrap_or_else(|| rest.clone())).collect())
    }

    /// The shortest runs of axes that cover the same elements.
    fn runs(from: &[Dim], to: &[Dim]) -> Option<Vec<AxisRun>> {
        let (mut runs, mut at, mut out) = (Vec::new(), 0, 0);
        while at < from.len() || out < to.len() {
            let (left, right) = (from.len() - at, to.len() - out);
            let counts = (1..=left + right).flat_map(|both| (0..=both).map(move |few| (few, both - few)));
            let fits = |(few, other): &(usize, usize)| {
                *few <= left && *other <= right && Dim::all(&from[at..at + few]).is_some_and(|size| Dim::all(&to[out..out + other]) == Some(size))
            };
            // Prefers matching axes one to one, also for axes of size 1.
            let (few, other) = [(1, 1)].into_iter().chain(counts).find(fits)?;
            runs.push((at..at + few, out..out + other));
            (at, out) = (at + few, out + other);
        }
        Some(runs)
    }
}

impl OpSpec for Reshape {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        Ok(TensorType { element: inputs[0].element, shape: self.sizes(&inputs[0].shape)? })
    }

    /// A letter contains the number of the output axis that it belongs to, for
    /// [`resize`](OpSpec::resize).
    fn axes(&self, inputs: &[&TensorType]) -> String {
        let from = &inputs[0].shape;
        let Ok(to) = self.sizes(from) else { return String::new() };
        let (mut before, mut after) = (vec!["_".to_owned(); from.len()], vec!["_".to_owned(); to.len()]);
        for (few, other) in Self::runs(from, &to).unwrap_or_default() {
            match (few.len(), other.len()) {
                (1, 1) => {
                    before[few.start] = format!("o{}", other.start);
                    after[other.start].clone_from(&before[few.start]);
                }
                (1, 2..) => {
                    other.clone().for_each(|axis| after[axis] = format!("o{axis}"));
                    before[few.start] = format!("({})", after[other].join(" "));
                }
                (2.., 1) => {
                    few.clone().enumerate().for_each(|(place, axis)| before[axis] = format!("o{}x{place}", other.start));
                    after[other.start] = format!("({})", before[few].join(" "));
                }
                _ => {}
            }
        }
        format!("{} -> {}", before.join(" "), after.join(" "))
    }

    fn resize(&mut self, size: &dyn Fn(&str) -> usize) {
        for (axis, target) in self.shape.iter_mut().enumerate() {
            let parts = (0..).map(|place| size(&format!("o{axis}x{place}"))).take_while(|size| *size > 0);
            let found = match size(&format!("o{axis}")) {
                0 => parts.reduce(|all, part| all.saturating_mul(part)),
                size => Some(size),
            };
            if let (TargetSize::Number(number), Some(size)) = (target, found) {
                *number = size;
            }
        }
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let sizes = self.sizes(&inputs[0].dims().iter().map(|size| Dim::Fixed(*size)).collect::<Vec<_>>()).map_err(shape_error)?;
        inputs[0].reshape(sizes.iter().filter_map(Dim::fixed).collect::<Vec<_>>())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.gradient_of(0, || backward.gradient.reshape(backward.inputs[0].dims()))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
