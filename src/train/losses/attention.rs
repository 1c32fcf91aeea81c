//! Attention of the student against the teacher's: who looks where (Jiao et al., *TinyBERT*, 2020), or how queries, keys
//! and values of one layer relate to each other (Wang et al., *MiniLMv2*, 2021), which takes no equal numbers of heads.

use candle_core::{D, DType, Result, Tensor};
use candle_nn::ops::{log_softmax, softmax};

use super::{AttentionTarget, Loss, mask};
use crate::data::Batch;
use crate::error;

/// What one attention node reads.
#[derive(Debug, Clone)]
pub struct Heads {
    /// Values of queries, keys and values, each `[batch, heads, sequence, width]`.
    pub values: [String; 3],
    /// Factor on products.
    pub scale: f64,
    /// Whether a query sees only what is before it.
    pub causal: bool,
}

/// Pairs of attention nodes.
#[derive(Debug, Clone)]
pub struct Attention {
    /// What is compared.
    pub target: AttentionTarget,
    /// The student's node and the teacher's.
    pub pairs: Vec<(Heads, Heads)>,
    /// Heads that relations are split into.
    pub relation_heads: usize,
}

/// Added where nobody may look.
const HIDDEN: f64 = -1e9;

impl Attention {
    fn read(&self) -> usize {
        if self.target == AttentionTarget::Maps { 2 } else { 3 }
    }

    /// The products of two values `[batch, heads, sequence, width]`, hidden where nobody looks.
    fn products(a: &Tensor, b: &Tensor, scale: f64, causal: bool, mask: Option<&Tensor>) -> Result<Tensor> {
        let (batch, heads, sequence, width) = a.dims4()?;
        let groups = b.dim(1)?;
        let b = if groups == heads {
            b.contiguous()?
        } else {
            let keys = b.dim(2)?;
            b.unsqueeze(2)?.broadcast_as((batch, groups, heads / groups, keys, width))?.contiguous()?.reshape((batch, heads, keys, width))?
        };
        let mut products = (a.contiguous()?.matmul(&b.transpose(2, 3)?.contiguous()?)? * scale)?;
        if let Some(mask) = mask {
            let hidden = ((1.0 - mask)? * HIDDEN)?.reshape((batch, 1, 1, mask.dim(1)?))?;
            products = products.broadcast_add(&hidden)?;
        }
        if causal {
            let later: Vec<f32> = (0..sequence * sequence).map(|i| if i % sequence > i / sequence { HIDDEN as f32 } else { 0.0 }).collect();
            products = products.broadcast_add(&Tensor::from_vec(later, (1, 1, sequence, sequence), products.device())?)?;
        }
        Ok(products)
    }

    /// Heads of another number over the same columns.
    fn split(&self, value: &Tensor) -> Result<Tensor> {
        let (batch, heads, sequence, width) = value.dims4()?;
        let columns = heads * width;
        if !columns.is_multiple_of(self.relation_heads) {
            candle_core::bail!("{columns} columns cannot be split into {} heads", self.relation_heads);
        }
        value.transpose(1, 2)?.contiguous()?.reshape((batch, sequence, self.relation_heads, columns / self.relation_heads))?.transpose(1, 2)?.contiguous()
    }

    /// Kullback-Leibler divergence of rows, averaged over heads, summed over queries that are no padding.
    fn divergence(student: &Tensor, teacher: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let target = softmax(teacher, D::Minus1)?;
        // log_softmax of candle_nn is made of primitives that have gradients.
        let difference = (log_softmax(teacher, D::Minus1)? - log_softmax(student, D::Minus1)?)?;
        let rows = (target * difference)?.sum(D::Minus1)?.mean(1)?;
        match mask {
            Some(mask) => (rows * mask)?.sum_all(),
            None => rows.sum_all(),
        }
    }
}

impl Loss for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn student(&self) -> Vec<String> {
        self.pairs.iter().flat_map(|(student, _)| student.values[..self.read()].to_vec()).collect()
    }

    fn teacher(&self) -> Vec<String> {
        self.pairs.iter().flat_map(|(_, teacher)| teacher.values[..self.read()].to_vec()).collect()
    }

    fn items(&self, batch: &Batch) -> error::Result<f64> {
        let tokens = mask::tokens(batch).map_err(|e| error::Error::computed("loss `attention`", e))?;
        Ok(tokens * self.pairs.len() as f64)
    }

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], _projections: &[Tensor], batch: &Batch) -> Result<Tensor> {
        let device = student[0].device();
        let mask = mask::of(batch, device)?;
        let mut sums = Vec::new();
        for (((ours, theirs), student), teacher) in self.pairs.iter().zip(student.chunks(self.read())).zip(teacher.chunks(self.read())) {
            match self.target {
                AttentionTarget::Maps => {
                    let products = |heads: &Heads, values: &[Tensor]| Self::products(&values[0], &values[1], heads.scale, heads.causal, mask.as_ref());
                    sums.push(Self::divergence(&products(ours, student)?, &products(theirs, teacher)?, mask.as_ref())?);
                }
                AttentionTarget::Relations => {
                    for (student, teacher) in student.iter().zip(teacher) {
                        let relation = |heads: &Heads, value: &Tensor| {
                            let value = self.split(value)?;
                            let scale = 1.0 / (value.dim(3)? as f64).sqrt();
                            Self::products(&value, &value, scale, heads.causal, mask.as_ref())
                        };
                        sums.push((Self::divergence(&relation(ours, student)?, &relation(theirs, teacher)?, mask.as_ref())? / 3.0)?);
                    }
                }
            }
        }
        Tensor::stack(&sums, 0)?.to_dtype(DType::F32)?.sum_all()
    }
}
