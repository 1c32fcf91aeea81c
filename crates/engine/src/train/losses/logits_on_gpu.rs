//! Losses over logits on a GPU, by one kernel.

use candle_core::{DType, Tensor};

use super::LossOutput;
use super::divergence::Divergence;
use super::head::LogitsSource;
use super::logits::{Logits, index_tensor};
use crate::gpu::{self, LogitLosses};

impl Logits {
    /// As [`gradient`](Logits::gradient), by one kernel; `None` if it does not support these losses and
    /// tensors.
    pub(super) fn gradient_on_gpu(
        &self,
        output: &mut LossOutput,
        logits: &Tensor,
        teacher: Option<&Tensor>,
        targets: &[u32],
        (items, scale): (f64, f64),
    ) -> candle_core::Result<Option<Tensor>> {
        let soft = self.soft.zip(teacher);
        if !logits.device().is_cuda() || soft.is_some_and(|(soft, _)| soft.divergence != Divergence::Forward) {
            return Ok(None);
        }
        // Logits of a head are a temporary that the kernel can overwrite.
        let is_temporary = matches!(self.student, LogitsSource::Head(_)) && teacher.is_none_or(|teacher| teacher.dtype() == logits.dtype());
        let logits = if is_temporary { logits.contiguous()? } else { logits.to_dtype(DType::F32)?.force_contiguous()? };
        let teacher = teacher.map(|teacher| teacher.to_dtype(logits.dtype())?.contiguous()).transpose()?;
        let targets = self.hard.map(|_| index_tensor(targets, logits.device())).transpose()?;
        let soft = self.soft.zip(teacher.as_ref()).map(|(soft, teacher)| (teacher, soft.temperature, soft.weight * soft.temperature / items * scale));
        let hard = self.hard.zip(targets.as_ref()).map(|((weight, smoothing), targets)| (targets, smoothing, weight / items * scale));
        let Some(rows) = gpu::logit_losses(&logits, LogitLosses { teacher: soft, targets: hard, classes: self.classes })? else { return Ok(None) };
        let sums = rows.to_dtype(DType::F64)?.sum(0)?;
        if let Some((_, temperature, _)) = soft {
            output.add_loss("soft", &sums.get(0)?, temperature * temperature / items)?;
        }
        if hard.is_some() {
            output.add_loss("hard", &sums.get(1)?, 1.0 / items)?;
        }
        Ok(Some(logits))
    }
}
