//! What a student is to become like: losses over values of its graph and the teacher's.
//!
//! Each loss is a sum over items (samples, tokens, pairs of layers) that is divided by the number of items of the whole
//! step, so that a step in parts is the same step.

mod attention;
mod embedding;
mod hidden;
mod host;
mod logits;
mod mask;
mod options;

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

pub use attention::{Attention, Heads};
pub use embedding::Embedding;
pub use hidden::{Hidden, Pair};
pub use logits::{Answers, Head, Logits, LogitsSource, ModelValues};
pub use options::{AttentionLoss, AttentionTarget, Distance, EmbeddingLoss, HardLoss, HiddenLoss, Losses, SoftLoss};

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};

/// A loss over values of the two graphs.
pub trait Loss: Send {
    /// Its name in recipes.
    fn name(&self) -> &'static str;
    /// Values of the student's graph that it reads.
    fn student(&self) -> Vec<String>;
    /// Values of the teacher's graph that it reads.
    fn teacher(&self) -> Vec<String>;
    /// Projections of its own that are learned: name, columns in, columns out.
    fn projections(&self) -> Vec<(String, usize, usize)> {
        Vec::new()
    }
    /// How many items the samples hold.
    ///
    /// # Errors
    /// The samples lack what it is computed from.
    fn items(&self, batch: &Batch) -> Result<f64>;
    /// The sum over all items and its gradients: of values of the student, of the teacher, projections, in the order in which they
    /// were named, all in f32.
    ///
    /// # Errors
    /// Memory runs out.
    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], batch: &Batch) -> candle_core::Result<Sum>;
}

/// What a loss says of some samples.
pub struct Sum {
    /// The sum over all items, a number.
    pub value: Tensor,
    /// Its gradients with respect to values of the student.
    pub student: Vec<Tensor>,
    /// With respect to projections.
    pub projections: Vec<Tensor>,
}

/// A loss and its weight.
pub struct Term {
    /// What the loss is multiplied with.
    pub weight: f64,
    /// The loss.
    pub loss: Box<dyn Loss>,
}

/// What the losses say to a part of a step.
#[derive(Debug, Default)]
pub struct Said {
    /// Each loss's share of its mean over the step, by name: numbers in f64, where the values are.
    pub losses: BTreeMap<&'static str, Tensor>,
    /// Gradients of values of the student, by name.
    pub values: BTreeMap<String, Tensor>,
    /// Gradients of projections and of the head's weights, by name.
    pub parameters: Vec<(String, Tensor)>,
}

impl Said {
    fn add_loss(&mut self, name: &'static str, sum: &Tensor, factor: f64) -> candle_core::Result<()> {
        let share = sum.to_dtype(DType::F64)?.affine(factor, 0.0)?;
        let sum = match self.losses.remove(name) {
            Some(other) => (other + share)?,
            None => share,
        };
        self.losses.insert(name, sum);
        Ok(())
    }

    fn add_value(&mut self, name: &str, gradient: Tensor) -> candle_core::Result<()> {
        let sum = match self.values.remove(name) {
            Some(other) => (other + gradient)?,
            None => gradient,
        };
        self.values.insert(name.to_owned(), sum);
        Ok(())
    }
}

/// The divisor of sums over so many items: means over processes may be fractions, and a step without items has sums of zero.
fn divisor(items: f64) -> f64 {
    if items > 0.0 { items } else { 1.0 }
}

impl Term {
    /// Adds what the loss says; `items` are those of the whole step, `scale` multiplies gradients only.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn add(
        &self,
        said: &mut Said,
        student: &BTreeMap<String, Tensor>,
        teacher: &BTreeMap<String, Tensor>,
        projections: &BTreeMap<String, Tensor>,
        batch: &Batch,
        (items, scale): (f64, f64),
    ) -> Result<()> {
        let name = self.loss.name();
        let missing = |name: &str| Error::graph(format!("graph value `{name}`"), "is not among the outputs");
        let pick = |from: &BTreeMap<String, Tensor>, name: &String| from.get(name).cloned().ok_or_else(|| missing(name));
        let names = self.loss.student();
        let values: Vec<Tensor> = names.iter().map(|name| pick(student, name)).collect::<Result<_>>()?;
        let teacher: Vec<Tensor> = self.loss.teacher().iter().map(|name| pick(teacher, name)).collect::<Result<_>>()?;
        let learned: Vec<String> = self.loss.projections().into_iter().map(|(name, ..)| name).collect();
        let projections: Vec<Tensor> = learned.iter().map(|name| pick(projections, name)).collect::<Result<_>>()?;
        let mut compute = || {
            let Some(device) = values.first().map(Tensor::device) else { candle_core::bail!("a loss over no values") };
            let floats = |tensors: &[Tensor]| {
                let float = |tensor: &Tensor| transfer::beside(tensor, device, Cause::Offload)?.to_dtype(DType::F32);
                tensors.iter().map(float).collect::<candle_core::Result<Vec<_>>>()
            };
            let sum = self.loss.sum(&floats(&values)?, &floats(&teacher)?, &floats(&projections)?, batch)?;
            let items = divisor(items);
            let factor = self.weight / items * scale;
            said.add_loss(name, &sum.value, 1.0 / items)?;
            for (name, (gradient, value)) in names.iter().zip(sum.student.iter().zip(&values)) {
                said.add_value(name, (gradient * factor)?.to_dtype(value.dtype())?)?;
            }
            for (name, gradient) in learned.iter().zip(&sum.projections) {
                said.parameters.push((name.clone(), (gradient * factor)?));
            }
            Ok(())
        };
        compute().map_err(|e: candle_core::Error| Error::computed(format!("loss `{name}`"), e))
    }
}
