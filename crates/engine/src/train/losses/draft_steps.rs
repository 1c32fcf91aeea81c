//! Training-time test: the divergence of each step of a draft head from its target (Li et al., *EAGLE-3:
//! Scaling up Inference Acceleration of Large Language Models via Training-Time Test*, 2025).

use candle_core::{DType, Result, Tensor};

use super::divergence::{Soft, with_gradient};
use super::logits::{flat, index_tensor, log_softmax};
use super::{Loss, LossSum};
use crate::data::{Batch, SequenceRole};
use crate::error::{self, Error};
use crate::exec::transfer;

/// Logits of the steps of a head, `[batch, sequence, tokens]`, and those of its target. Row `i` of step `k`
/// and row `i + k + 1` of the target predict the same token.
#[derive(Debug, Clone)]
pub struct DraftSteps {
    /// Weight, temperature and divergence of the head from the target, which is restricted to the vocabulary
    /// of the head.
    pub soft: Soft,
    /// Factor on the loss of a step, relative to that of the step before.
    pub decay: f64,
    /// Names of the head's logits, by step.
    pub steps: Vec<String>,
    /// Name of the target's logits.
    pub target: String,
    /// The vocabulary of the head, as ids of the target.
    pub tokens: Vec<u32>,
}

/// Rows of a step: those of the head, and those of the target.
type Rows = (Vec<u32>, Vec<u32>);

impl DraftSteps {
    /// Rows of a step that contribute to the loss, for sequences of this length.
    fn rows(&self, batch: &Batch, sequence: usize, step: usize) -> error::Result<Rows> {
        let texts = batch.next_tokens()?;
        let texts = texts.ok_or_else(|| Error::option("distill: student", "a draft head needs texts with `task: language-modelling`"))?;
        let read = |mask: &Tensor| Ok((mask.dim(1)?, transfer::read::<i64>(mask)?));
        let mask: Result<Option<(usize, Vec<i64>)>> = batch.mask(SequenceRole::Input).map(read).transpose();
        let mask = mask.map_err(|e| Error::candle("the attention mask", e))?;
        // Texts may begin with padding, which has no hidden states.
        let is_padding = |sample: usize, at: usize| mask.as_ref().is_some_and(|(width, mask)| mask.get(sample * width + at) == Some(&0));
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for (sample, text) in texts.iter().enumerate() {
            for (at, _) in text {
                let Some(own) = at.checked_sub(step + 1).filter(|own| !is_padding(sample, *own)) else { continue };
                ours.push((sample * sequence + own) as u32);
                theirs.push((sample * sequence + at) as u32);
            }
        }
        Ok((ours, theirs))
    }

    /// The sum of the divergences of some rows, and the gradient of their logits. `target` has the columns of
    /// the head's vocabulary.
    fn divergence(&self, logits: &Tensor, target: &Tensor, (ours, theirs): &Rows) -> Result<(Tensor, Tensor)> {
        let device = logits.device();
        let select = |values: &Tensor, rows: &[u32]| values.index_select(&index_tensor(rows, device)?, 0);
        let temperature = self.soft.temperature;
        let [student, teacher] = [(logits, ours), (target, theirs)].map(|(values, rows)| log_softmax(&(select(values, rows)? / temperature)?));
        let (student, teacher) = (student?, teacher?);
        let (value, gradient) = with_gradient(self.soft.divergence, &student, &teacher)?;
        let gradient = transfer::place_rows(&(gradient * temperature)?, ours, logits.dim(0)?)?;
        Ok(((value * (temperature * temperature))?, gradient))
    }
}

impl Loss for DraftSteps {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn student(&self) -> Vec<String> {
        // The target is frozen: its logits, the last value, have no gradient.
        self.steps.iter().chain([&self.target]).cloned().collect()
    }

    fn teacher(&self) -> Vec<String> {
        Vec::new()
    }

    /// The number of rows of the first step.
    fn items(&self, batch: &Batch) -> error::Result<f64> {
        Ok(self.rows(batch, 0, 0)?.0.len() as f64)
    }

    fn sum(&self, student: &[Tensor], _teacher: &[Tensor], _projections: &[Tensor], batch: &Batch) -> Result<LossSum> {
        let Some((target, steps)) = student.split_last() else { candle_core::bail!("the loss has no values") };
        // The vocabulary of the target is many times as large.
        let (sequence, target) = (target.dim(1)?, flat(target)?.index_select(&index_tensor(&self.tokens, target.device())?, 1)?);
        let mut sum = LossSum { value: Tensor::zeros((), DType::F32, target.device())?, student: Vec::new(), projections: Vec::new() };
        for (step, logits) in steps.iter().enumerate() {
            let rows = self.rows(batch, sequence, step).map_err(candle_core::Error::wrap)?;
            if rows.0.is_empty() {
                sum.student.push(logits.zeros_like()?);
                continue;
            }
            let factor = self.decay.powi(step as i32);
            let (value, gradient) = self.divergence(&flat(logits)?, &target, &rows)?;
            sum.value = (sum.value + (value * factor)?)?;
            sum.student.push((gradient * factor)?.reshape(logits.dims())?);
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::tests::{require_gradients, tensor};
    use super::super::{SoftDivergence, SoftLoss};
    use super::*;
    use crate::data::References;

    /// The first sample predicts tokens 1 to 4 of 5, the second one token 3.
    fn batch() -> Batch {
        let ids = Tensor::ones((2, 5), DType::I64, &Device::Cpu).unwrap();
        let second = vec![None, None, Some(1), None, None];
        let targets = vec![vec![Some(1), Some(1), Some(1), Some(1), None], second];
        Batch { inputs: [("input_ids".to_owned(), ids)].into(), references: References::Tokens(targets), samples: 2 }
    }

    fn loss(divergence: SoftDivergence) -> DraftSteps {
        let soft = Soft::from(&SoftLoss { temperature: 1.0, divergence, ..SoftLoss::default() });
        DraftSteps { soft, decay: 0.5, steps: vec!["a".into(), "b".into()], target: "logits".into(), tokens: vec![0, 2, 5] }
    }

    #[test]
    fn rows_predict_the_same_token() {
        let loss = loss(SoftDivergence::Forward);
        assert_eq!(loss.rows(&batch(), 5, 0).unwrap(), (vec![0, 1, 2, 6], vec![1, 2, 3, 7]));
        assert_eq!(loss.rows(&batch(), 5, 1).unwrap(), (vec![0, 1, 5], vec![2, 3, 7]));
        assert_eq!(loss.items(&batch()).unwrap(), 4.0);
        let mut padded = batch();
        let mask = Tensor::new(&[[0i64, 1, 1, 1, 1], [1; 5]], &Device::Cpu).unwrap();
        padded.inputs.insert("attention_mask".to_owned(), mask);
        assert_eq!(loss.rows(&padded, 5, 0).unwrap(), (vec![1, 2, 6], vec![2, 3, 7]));
    }

    #[test]
    fn gradients_match_central_differences() {
        for divergence in [SoftDivergence::Forward, SoftDivergence::TotalVariation] {
            let loss = loss(divergence);
            let (steps, target) = ([tensor(1, &[2, 5, 3]), tensor(2, &[2, 5, 3])], tensor(3, &[2, 5, 7]));
            let sum = |steps: &[Tensor]| loss.sum(&[steps, std::slice::from_ref(&target)].concat(), &[], &[], &batch()).unwrap();
            require_gradients("draft steps", &steps, &sum(&steps).student, |steps| sum(steps).value.to_scalar::<f32>().unwrap().into());
        }
    }
}
