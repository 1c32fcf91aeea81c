//! Attention of the student against the teacher's: who looks where (Jiao et al., *TinyBERT*, 2020), or how queries, keys
//! and values of one layer relate to each other (Wang et al., *MiniLMv2*, 2021), which takes no equal numbers of heads.

use candle_core::{D, Result, Tensor};

use super::logits::log_softmax;
use super::{AttentionTarget, Loss, Sum, mask};
use crate::data::Batch;
use crate::error;
use crate::ir::ops::constant;

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

    /// Keys for every query head, in one piece.
    fn spread(b: &Tensor, heads: usize) -> Result<Tensor> {
        let (batch, groups, keys, width) = b.dims4()?;
        if groups == heads {
            return b.contiguous();
        }
        b.unsqueeze(2)?.broadcast_as((batch, groups, heads / groups, keys, width))?.contiguous()?.reshape((batch, heads, keys, width))
    }

    /// The products of two values `[batch, heads, sequence, width]`, hidden where nobody looks.
    fn products(a: &Tensor, b: &Tensor, scale: f64, causal: bool, mask: Option<&Tensor>) -> Result<Tensor> {
        let sequence = a.dim(2)?;
        let mut products = (a.contiguous()?.matmul(&Self::spread(b, a.dim(1)?)?.transpose(2, 3)?.contiguous()?)? * scale)?;
        if let Some(mask) = mask {
            let hidden = ((1.0 - mask)? * HIDDEN)?.reshape((mask.dim(0)?, 1, 1, mask.dim(1)?))?;
            products = products.broadcast_add(&hidden)?;
        }
        if causal {
            let later = constant(format!("later {sequence}"), products.device(), |device| {
                let later: Vec<f32> = (0..sequence * sequence).map(|i| if i % sequence > i / sequence { HIDDEN as f32 } else { 0.0 }).collect();
                Tensor::from_vec(later, (1, 1, sequence, sequence), device)
            })?;
            products = products.broadcast_add(&later)?;
        }
        Ok(products)
    }

    /// Gradients of two values, of that of their products.
    fn products_back(a: &Tensor, b: &Tensor, scale: f64, gradient: &Tensor) -> Result<[Tensor; 2]> {
        let (batch, groups, keys, width) = b.dims4()?;
        let heads = a.dim(1)?;
        let of_a = (gradient.matmul(&Self::spread(b, heads)?)? * scale)?;
        let of_b = (gradient.transpose(2, 3)?.contiguous()?.matmul(&a.contiguous()?)? * scale)?;
        Ok([of_a, of_b.reshape((batch, groups, heads / groups, keys, width))?.sum(2)?])
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

    /// Kullback-Leibler divergence of rows, averaged over heads, summed over queries that are no padding; and its gradient with respect
    /// to the student's products.
    fn divergence(student: &Tensor, teacher: &Tensor, mask: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let (theirs, ours) = (log_softmax(teacher)?, log_softmax(student)?);
        let target = theirs.exp()?;
        let rows = (&target * (theirs - &ours)?)?.sum(D::Minus1)?.mean(1)?;
        let along = ((ours.exp()? - target)? / student.dim(1)? as f64)?;
        match mask {
            Some(mask) => Ok(((rows * mask)?.sum_all()?, along.broadcast_mul(&mask.unsqueeze(1)?.unsqueeze(3)?)?)),
            None => Ok((rows.sum_all()?, along)),
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

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], _projections: &[Tensor], batch: &Batch) -> Result<Sum> {
        let mask = mask::of(batch, student[0].device())?;
        let (mut values, mut gradients) = (Vec::new(), Vec::new());
        for (((ours, theirs), student), teacher) in self.pairs.iter().zip(student.chunks(self.read())).zip(teacher.chunks(self.read())) {
            match self.target {
                AttentionTarget::Maps => {
                    let products = |heads: &Heads, values: &[Tensor]| Self::products(&values[0], &values[1], heads.scale, heads.causal, mask.as_ref());
                    let (value, along) = Self::divergence(&products(ours, student)?, &products(theirs, teacher)?, mask.as_ref())?;
                    values.push(value);
                    gradients.extend(Self::products_back(&student[0], &student[1], ours.scale, &along)?);
                }
                AttentionTarget::Relations => {
                    for (student, teacher) in student.iter().zip(teacher) {
                        let scale = |split: &Tensor| Ok::<_, candle_core::Error>(1.0 / (split.dim(3)? as f64).sqrt());
                        let relation = |heads: &Heads, split: &Tensor| Self::products(split, split, scale(split)?, heads.causal, mask.as_ref());
                        let (split, other) = (self.split(student)?, self.split(teacher)?);
                        let (value, along) = Self::divergence(&relation(ours, &split)?, &relation(theirs, &other)?, mask.as_ref())?;
                        let [left, right] = Self::products_back(&split, &split, scale(&split)?, &along)?;
                        values.push((value / 3.0)?);
                        let (batch, heads, sequence, width) = student.dims4()?;
                        let whole = ((left + right)? / 3.0)?.transpose(1, 2)?.contiguous()?.reshape((batch, sequence, heads, width))?;
                        gradients.push(whole.transpose(1, 2)?.contiguous()?);
                    }
                }
            }
        }
        Ok(Sum { value: Tensor::stack(&values, 0)?.sum_all()?, student: gradients, projections: Vec::new() })
    }
}
