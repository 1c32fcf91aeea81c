//! What a student is to become like: losses over values of its graph and the teacher's.
//!
//! Each loss is a sum over items (samples, tokens, pairs of layers) that is divided by the number of items of the whole
//! step, so that a step in parts is the same step.

mod attention;
mod embedding;
mod hidden;
mod logits;
mod mask;
mod options;

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};

pub use attention::{Attention, Heads};
pub use embedding::Embedding;
pub use hidden::Hidden;
pub use logits::{Answers, Head, Logits, LogitsSource};
pub use options::{AttentionLoss, AttentionTarget, Distance, EmbeddingLoss, HardLoss, HiddenLoss, Losses, SoftLoss};

use crate::data::Batch;
use crate::error::{Error, Result};

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
    /// The sum over all items: values of the student, of the teacher, projections, in the order in which they were named.
    ///
    /// # Errors
    /// Memory runs out.
    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], batch: &Batch) -> candle_core::Result<Tensor>;
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
    /// Each loss's share of its mean over the step, by name.
    pub losses: BTreeMap<&'static str, f64>,
    /// Gradients of values of the student, by name.
    pub values: BTreeMap<String, Tensor>,
    /// Gradients of projections and of the head's weights, by name.
    pub parameters: Vec<(String, Tensor)>,
}

impl Said {
    fn add_value(&mut self, name: &str, gradient: Tensor) -> candle_core::Result<()> {
        let sum = match self.values.remove(name) {
            Some(other) => (other + gradient)?,
            None => gradient,
        };
        self.values.insert(name.to_owned(), sum);
        Ok(())
    }
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
            let variable = |tensor: &Tensor| Var::from_tensor(&tensor.to_dtype(DType::F32)?);
            let inputs: Vec<Var> = values.iter().map(variable).collect::<candle_core::Result<_>>()?;
            let weights: Vec<Var> = projections.iter().map(variable).collect::<candle_core::Result<_>>()?;
            let tensors = |variables: &[Var]| variables.iter().map(|v| v.as_tensor().clone()).collect::<Vec<_>>();
            let teacher = teacher.iter().map(|t| t.to_dtype(DType::F32)).collect::<candle_core::Result<Vec<_>>>()?;
            let sum = self.loss.sum(&tensors(&inputs), &teacher, &tensors(&weights), batch)?;
            let factor = self.weight / items.max(1.0);
            *said.losses.entry(name).or_default() += f64::from(sum.to_scalar::<f32>()?) / items.max(1.0);
            let gradients = (sum * (factor * scale))?.backward()?;
            for (name, (variable, value)) in names.iter().zip(inputs.iter().zip(&values)) {
                if let Some(gradient) = gradients.get(variable) {
                    said.add_value(name, gradient.to_dtype(value.dtype())?)?;
                }
            }
            for (name, variable) in learned.iter().zip(&weights) {
                said.parameters.extend(gradients.get(variable).map(|gradient| (name.clone(), gradient.clone())));
            }
            Ok(())
        };
        compute().map_err(|e: candle_core::Error| Error::computed(format!("loss `{name}`"), e))
    }
}
