//! Divergences of soft targets, as tensor operations for devices without kernels.

use candle_core::{D, DType, Result, Tensor};

use super::options::{SoftDivergence, SoftLoss};
pub use crate::kernel::divergence::Divergence;

/// Weight, temperature and divergence of soft targets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Soft {
    /// Factor on the loss.
    pub weight: f64,
    /// Temperature that the logits are divided by.
    pub temperature: f64,
    /// Divergence of the student from the teacher.
    pub divergence: Divergence,
}

impl From<&SoftLoss> for Soft {
    fn from(options: &SoftLoss) -> Self {
        let divergence = match options.divergence {
            SoftDivergence::Forward => Divergence::Forward,
            SoftDivergence::Reverse => Divergence::Reverse,
            SoftDivergence::JensenShannon => Divergence::JensenShannon(options.mix.unwrap_or(SoftLoss::MIX) as f32),
            SoftDivergence::TotalVariation => Divergence::TotalVariation,
            SoftDivergence::Acceptance => Divergence::Acceptance,
        };
        Self { weight: options.weight, temperature: options.temperature, divergence }
    }
}

/// The sum of the divergences of rows, and its gradient with respect to the student's logits. Both
/// arguments are logarithms of probabilities `[rows, classes]` in f32.
pub(super) fn with_gradient(divergence: Divergence, student: &Tensor, teacher: &Tensor) -> Result<(Tensor, Tensor)> {
    let (p, q) = (student.exp()?, teacher.exp()?);
    let (losses, slopes) = match divergence {
        Divergence::Forward => forward(student, teacher, &q)?,
        Divergence::Reverse => {
            let losses = (&p * (student - teacher)?)?;
            (losses.clone(), losses)
        }
        Divergence::JensenShannon(beta) => {
            let beta = f64::from(beta);
            let mean = ((&q * beta)? + (&p * (1.0 - beta))?)?.maximum(f32::MIN_POSITIVE)?.log()?;
            let slopes = ((&p * (student - &mean)?)? * (1.0 - beta))?;
            (((&q * (teacher - mean)?)? * beta)?.add(&slopes)?, slopes)
        }
        Divergence::TotalVariation => variation(&p, &q)?,
        Divergence::Acceptance => {
            let weight = (p.minimum(&q)?.sum_keepdim(D::Minus1)? * -3.0)?.exp()?;
            let rest = (weight.ones_like()? - &weight)?;
            let ((kl, kl_slopes), (variation, slopes)) = (forward(student, teacher, &q)?, variation(&p, &q)?);
            let mixed = |a: &Tensor, b: &Tensor| a.broadcast_mul(&weight)? + b.broadcast_mul(&rest)?;
            (mixed(&kl, &variation)?, mixed(&kl_slopes, &slopes)?)
        }
    };
    let gradient = (&slopes - p.broadcast_mul(&slopes.sum_keepdim(D::Minus1)?)?)?;
    Ok((losses.sum_all()?, gradient))
}

/// Terms of the forward KL divergence, and `p ∂/∂p` of them.
fn forward(student: &Tensor, teacher: &Tensor, q: &Tensor) -> Result<(Tensor, Tensor)> {
    Ok(((q * (teacher - student)?)?, q.neg()?))
}

/// Terms of the total variation, and `p ∂/∂p` of them.
fn variation(p: &Tensor, q: &Tensor) -> Result<(Tensor, Tensor)> {
    let half = (p.gt(q)?.to_dtype(DType::F32)? - 0.5)?;
    Ok(((&half * (p - q)?)?, (half * p)?))
}
