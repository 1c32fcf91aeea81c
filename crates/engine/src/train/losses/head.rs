//! The linear layer that computes logits.

use candle_core::{DType, Tensor};

use super::host::{add_to, is_host_slice};
use crate::exec::{Parameters, Rounding};
use crate::ir::ops::{Backward, Linear, PreparedOp, Saved};
use crate::store::ActivationScheme;

/// The linear layer that computes the logits.
#[derive(Debug, Clone)]
pub struct Head {
    /// Name of its input, `[batch, sequence, width]`.
    pub input: String,
    /// Names of its weight and bias.
    pub parameters: Vec<String>,
    /// The op, with the layout of the weight.
    pub op: Linear,
}

/// Source of the logits.
#[derive(Debug, Clone)]
pub enum LogitsSource {
    /// A value of the graph.
    Value(String),
    /// A layer that is computed in chunks of rows.
    Head(Head),
}

impl LogitsSource {
    /// Name of the graph value that is read.
    pub fn value(&self) -> &String {
        match self {
            LogitsSource::Value(name) => name,
            LogitsSource::Head(head) => &head.input,
        }
    }

    /// Computes the logits of rows.
    pub(super) fn logits(&self, rows: &Tensor, parameters: &Parameters) -> candle_core::Result<Tensor> {
        match self {
            LogitsSource::Value(_) => Ok(rows.clone()),
            LogitsSource::Head(head) => {
                // Values of a teacher are f32 in every precision.
                let rows = rows.to_dtype(parameters.compute())?;
                head.prepared(&rows).forward(&head.operands(&rows, parameters)?)
            }
        }
    }
}

impl Head {
    fn prepared(&self, rows: &Tensor) -> PreparedOp {
        PreparedOp::new(&self.op.into(), rows.device(), rows.dtype())
    }

    fn operands(&self, rows: &Tensor, parameters: &Parameters) -> candle_core::Result<Vec<Tensor>> {
        let input = self.input_scheme(parameters).map_or_else(|| Ok(rows.clone()), |scheme| Rounding::Token.round_input(scheme, rows));
        std::iter::once(input).chain(self.parameters.iter().map(|name| parameters.get(name))).collect()
    }

    /// The scheme in which the executor rounds the rows, if the weight is quantized.
    fn input_scheme(&self, parameters: &Parameters) -> Option<ActivationScheme> {
        self.parameters.first().and_then(|weight| parameters.input_scheme(weight))
    }
}

impl Head {
    /// Returns the gradient with respect to the input rows, and adds those of the trained parameters to
    /// `sums`.
    pub(super) fn backward(
        &self,
        rows: &Tensor,
        gradient: &Tensor,
        parameters: &Parameters,
        trained: &dyn Fn(&str) -> bool,
        sums: &mut Vec<(String, Tensor)>,
    ) -> candle_core::Result<Tensor> {
        let inputs: Vec<Saved> = self.operands(rows, parameters)?.into_iter().map(Saved::full).collect();
        let wanted: Vec<bool> = std::iter::once(true).chain(self.parameters.iter().map(|name| trained(name))).collect();
        let output = Saved::shape(gradient.dims());
        let mut found = self.prepared(rows).backward(&Backward { inputs: &inputs, output: &output, gradient, needs_gradient: &wanted })?.into_iter();
        let input_gradient = found.next().flatten();
        for (name, gradient) in self.parameters.iter().zip(found) {
            let Some(gradient) = gradient else { continue };
            // 16-bit floats are too imprecise to accumulate over many chunks.
            let gradient = gradient.to_dtype(DType::F32)?;
            match sums.iter_mut().find(|(other, _)| other == name) {
                Some((_, sum)) if [&*sum, &gradient].into_iter().all(is_host_slice) => add_to(sum, &gradient)?,
                Some((_, sum)) => *sum = (&*sum + gradient)?,
                None => sums.push((name.clone(), gradient)),
            }
        }
        match input_gradient {
            Some(gradient) => self.input_scheme(parameters).map_or(Ok(gradient.clone()), |scheme| Rounding::Token.input_gradient(scheme, rows, gradient)),
            None => candle_core::bail!("the linear layer returned no gradient of its input"),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::exec::transfer::{self, Cause};

    /// A thousand gradients, each too small compared to their sum for 16-bit floats.
    #[test]
    fn gradients_accumulate_in_f32() {
        let tensor = |value: f64, dims: (usize, usize)| (Tensor::ones(dims, DType::BF16, &Device::Cpu).unwrap() * value).unwrap();
        let head = Head { input: "x".into(), parameters: vec!["w".into()], op: Linear::default() };
        let parameters = Parameters::from_tensors([("w".to_owned(), tensor(1.0, (4, 2)))].into(), DType::BF16);
        let mut sums = Vec::new();
        for _ in 0..1000 {
            head.backward(&tensor(1.0, (1, 2)), &tensor(1.0, (1, 4)), &parameters, &|_| true, &mut sums).unwrap();
        }
        assert_eq!(transfer::values::<f32>(&sums[0].1, Cause::Step).unwrap(), [1000.0; 8]);
    }
}
