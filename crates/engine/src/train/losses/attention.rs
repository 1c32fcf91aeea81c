//! Attention distillation: attention maps (Jiao et al., *TinyBERT*, 2020), or self-attention relations
//! of queries, keys and values (Wang et al., *MiniLMv2*, 2021), which do not require equal numbers of
//! heads.

use candle_core::{D, Result, Tensor};

use super::logits::log_softmax;
use super::{AttentionTarget, Loss, LossSum, mask};
use crate::data::{Batch, SequenceRole};
use crate::error;
use crate::ir::ops::constant;

/// Operands and masking of one attention node.
#[derive(Debug, Clone)]
pub struct Heads {
    /// Names of queries, keys and values, each `[batch, heads, sequence, width]`.
    pub values: [String; 3],
    /// Factor on the attention scores.
    pub scale: f64,
    /// Whether attention is causal.
    pub causal: bool,
    /// Sliding-window size of causal attention, including the query's own position.
    pub window: Option<usize>,
    /// Role of the tokens; `None` if the sequence does not consist of tokens.
    pub tokens: Option<SequenceRole>,
}

/// Keys that queries attend to, apart from padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Span {
    All,
    /// Causal: at most this many keys, up to the query's own position.
    Causal(usize),
}

impl Heads {
    fn span(&self) -> Span {
        if self.causal { Span::Causal(self.window.unwrap_or(usize::MAX)) } else { Span::All }
    }

    /// Keys that both attend to; only these are compared.
    fn common_span(&self, other: &Heads) -> Span {
        match (self.span(), other.span()) {
            (Span::Causal(a), Span::Causal(b)) => Span::Causal(a.min(b)),
            (Span::All, span) | (span, Span::All) => span,
        }
    }
}

/// Attention loss over pairs of attention nodes.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Quantity that is compared.
    pub target: AttentionTarget,
    /// The student's node and the teacher's.
    pub pairs: Vec<(Heads, Heads)>,
    /// Number of relation heads.
    pub relation_heads: usize,
}

/// Added to masked attention scores.
const MASKED: f64 = -1e9;

impl Attention {
    /// Number of operands that are compared: queries and keys, or also values.
    fn operands(&self) -> usize {
        if self.target == AttentionTarget::Maps { 2 } else { 3 }
    }

    /// Repeats grouped keys for every query head, contiguous.
    fn repeat_groups(b: &Tensor, heads: usize) -> Result<Tensor> {
        let (batch, groups, keys, width) = b.dims4()?;
        if groups == heads {
            return b.contiguous();
        }
        b.unsqueeze(2)?.broadcast_as((batch, groups, heads / groups, keys, width))?.contiguous()?.reshape((batch, heads, keys, width))
    }

    /// Masked attention scores of two values `[batch, heads, sequence, width]`.
    fn scores(a: &Tensor, b: &Tensor, scale: f64, span: Span, mask: Option<&Tensor>) -> Result<Tensor> {
        let sequence = a.dim(2)?;
        let mut scores = (a.contiguous()?.matmul(&Self::repeat_groups(b, a.dim(1)?)?.transpose(2, 3)?.contiguous()?)? * scale)?;
        if let Some(mask) = mask {
            let bias = ((1.0 - mask)? * MASKED)?.reshape((mask.dim(0)?, 1, 1, mask.dim(1)?))?;
            scores = scores.broadcast_add(&bias)?;
        }
        if let Span::Causal(window) = span {
            let bias = constant(format!("attention mask {window} {sequence}"), scores.device(), |device| {
                let is_masked = |query: usize, key: usize| key > query || query - key >= window;
                let bias = |i: usize| if is_masked(i / sequence, i % sequence) { MASKED as f32 } else { 0.0 };
                Tensor::from_vec((0..sequence * sequence).map(bias).collect::<Vec<f32>>(), (1, 1, sequence, sequence), device)
            })?;
            scores = scores.broadcast_add(&bias)?;
        }
        Ok(scores)
    }

    /// Gradients with respect to both operands, from that of their scores.
    fn scores_backward(a: &Tensor, b: &Tensor, scale: f64, gradient: &Tensor) -> Result<[Tensor; 2]> {
        let (batch, groups, keys, width) = b.dims4()?;
        let heads = a.dim(1)?;
        let of_a = (gradient.matmul(&Self::repeat_groups(b, heads)?)? * scale)?;
        let of_b = (gradient.transpose(2, 3)?.contiguous()?.matmul(&a.contiguous()?)? * scale)?;
        Ok([of_a, of_b.reshape((batch, groups, heads / groups, keys, width))?.sum(2)?])
    }

    /// Splits the columns of a value into relation heads.
    fn split(&self, value: &Tensor) -> Result<Tensor> {
        let (batch, heads, sequence, width) = value.dims4()?;
        let columns = heads * width;
        if !columns.is_multiple_of(self.relation_heads) {
            candle_core::bail!("{columns} columns cannot be split into {} heads", self.relation_heads);
        }
        value.transpose(1, 2)?.contiguous()?.reshape((batch, sequence, self.relation_heads, columns / self.relation_heads))?.transpose(1, 2)?.contiguous()
    }

    /// Kullback-Leibler divergence of the attention distributions, averaged over heads and summed over
    /// queries with their weights, and its gradient with respect to the student's scores.
    fn divergence(student: &Tensor, teacher: &Tensor, batch: &Batch, tokens: Option<SequenceRole>) -> Result<(Tensor, Tensor)> {
        let (theirs, ours) = (log_softmax(teacher)?, log_softmax(student)?);
        let target = theirs.exp()?;
        let rows = (&target * (theirs - &ours)?)?.sum(D::Minus1)?.mean(1)?;
        let gradient = ((ours.exp()? - target)? / student.dim(1)? as f64)?;
        let weights = mask::weights(&rows, batch, tokens)?;
        Ok(((rows * &weights)?.sum_all()?, gradient.broadcast_mul(&weights.unsqueeze(1)?.unsqueeze(3)?)?))
    }
}

impl Loss for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn student(&self) -> Vec<String> {
        self.pairs.iter().flat_map(|(student, _)| student.values[..self.operands()].to_vec()).collect()
    }

    fn teacher(&self) -> Vec<String> {
        self.pairs.iter().flat_map(|(_, teacher)| teacher.values[..self.operands()].to_vec()).collect()
    }

    fn items(&self, batch: &Batch) -> error::Result<f64> {
        let counts = self.pairs.iter().map(|(student, _)| mask::count(batch, student.tokens)).sum::<Result<f64>>();
        counts.map_err(|e| error::Error::candle("loss `attention`", e))
    }

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], _projections: &[Tensor], batch: &Batch) -> Result<LossSum> {
        let (mut values, mut gradients) = (Vec::new(), Vec::new());
        for (((ours, theirs), student), teacher) in self.pairs.iter().zip(student.chunks(self.operands())).zip(teacher.chunks(self.operands())) {
            let (span, tokens) = (ours.common_span(theirs), ours.tokens);
            let mask = mask::token_mask(batch, tokens, student[0].device())?;
            match self.target {
                AttentionTarget::Maps => {
                    let scores = |heads: &Heads, values: &[Tensor]| Self::scores(&values[0], &values[1], heads.scale, span, mask.as_ref());
                    let (value, gradient) = Self::divergence(&scores(ours, student)?, &scores(theirs, teacher)?, batch, tokens)?;
                    values.push(value);
                    gradients.extend(Self::scores_backward(&student[0], &student[1], ours.scale, &gradient)?);
                }
                AttentionTarget::Relations => {
                    for (student, teacher) in student.iter().zip(teacher) {
                        let scale = |split: &Tensor| Ok::<_, candle_core::Error>(1.0 / (split.dim(3)? as f64).sqrt());
                        let relation = |split: &Tensor| Self::scores(split, split, scale(split)?, span, mask.as_ref());
                        let (split, other) = (self.split(student)?, self.split(teacher)?);
                        let (value, gradient) = Self::divergence(&relation(&split)?, &relation(&other)?, batch, tokens)?;
                        let [left, right] = Self::scores_backward(&split, &split, scale(&split)?, &gradient)?;
                        values.push((value / 3.0)?);
                        let (batch, heads, sequence, width) = student.dims4()?;
                        let merged = ((left + right)? / 3.0)?.transpose(1, 2)?.contiguous()?.reshape((batch, sequence, heads, width))?;
                        gradients.push(merged.transpose(1, 2)?.contiguous()?);
                    }
                }
            }
        }
        Ok(LossSum { value: Tensor::stack(&values, 0)?.sum_all()?, student: gradients, projections: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::tests::{require_loss_gradients, tensor};
    use super::*;
    use crate::data::References;

    const SEQUENCE: usize = 6;

    fn value(seed: usize) -> Tensor {
        tensor(seed, &[1, 2, SEQUENCE, 4])
    }

    fn heads(causal: bool, window: Option<usize>) -> Heads {
        Heads { values: ["q".into(), "k".into(), "v".into()], scale: 0.5, causal, window, tokens: Some(SequenceRole::Input) }
    }

    fn mean(student: Heads, teacher: Heads, input: &str) -> f64 {
        let loss = Attention { target: AttentionTarget::Maps, pairs: vec![(student, teacher)], relation_heads: 1 };
        let ids = Tensor::ones((1, SEQUENCE), candle_core::DType::I64, &Device::Cpu).unwrap();
        let batch = Batch { inputs: [(input.to_owned(), ids)].into(), references: References::None, samples: 1 };
        let sum = loss.sum(&[value(1), value(2)], &[value(3), value(4)], &[], &batch).unwrap();
        f64::from(sum.value.to_scalar::<f32>().unwrap()) / loss.items(&batch).unwrap()
    }

    /// Reference implementation in plain loops; `attends` is the attention mask.
    fn expected(attends: impl Fn(usize, usize) -> bool) -> f64 {
        let [q, k, p, l] = [1, 2, 3, 4].map(|seed| value(seed).squeeze(0).unwrap().to_vec3::<f32>().unwrap());
        let mut sum = 0.0;
        for head in 0..2 {
            for query in 0..SEQUENCE {
                let attention = |q: &[Vec<Vec<f32>>], k: &[Vec<Vec<f32>>]| {
                    let score = |key: usize| q[head][query].iter().zip(&k[head][key]).map(|(a, b)| f64::from(a * b)).sum::<f64>() * 0.5;
                    let scores: Vec<f64> = (0..SEQUENCE).filter(|key| attends(query, *key)).map(|key| score(key).exp()).collect();
                    let all: f64 = scores.iter().sum();
                    scores.into_iter().map(|score| score / all).collect::<Vec<_>>()
                };
                sum += attention(&p, &l).iter().zip(attention(&q, &k)).map(|(theirs, ours)| theirs * (theirs / ours).ln()).sum::<f64>() / 2.0;
            }
        }
        sum / SEQUENCE as f64
    }

    #[test]
    fn only_common_keys_are_compared() {
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-5, "{found} instead of {expected}");
        near(mean(heads(false, None), heads(false, None), "input_ids"), expected(|_, _| true));
        near(mean(heads(true, None), heads(true, None), "input_ids"), expected(|query, key| key <= query));
        for (ours, theirs) in [(Some(2), Some(2)), (Some(2), None), (Some(4), Some(2))] {
            near(mean(heads(true, ours), heads(true, theirs), "input_ids"), expected(|query, key| key <= query && query - key < 2));
        }
        near(mean(heads(false, None), heads(true, Some(3)), "input_ids"), expected(|query, key| key <= query && query - key < 3));
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let ids = Tensor::ones((1, SEQUENCE), candle_core::DType::I64, &Device::Cpu).unwrap();
        let batch = Batch { inputs: [("input_ids".to_owned(), ids)].into(), references: References::None, samples: 1 };
        for (target, relation_heads) in [(AttentionTarget::Maps, 2), (AttentionTarget::Relations, 2), (AttentionTarget::Relations, 4)] {
            let loss = Attention { target, pairs: vec![(heads(true, None), heads(true, None))], relation_heads };
            let all = |from: usize| (from..from + loss.student().len()).map(value).collect::<Vec<_>>();
            require_loss_gradients(&format!("{target:?}"), &loss, &all(1), &all(7), &batch);
        }
    }

    #[test]
    fn images_and_texts_have_equal_weight() {
        let pair = |tokens| [(); 2].map(|()| Heads { tokens, ..heads(false, None) });
        let [[a, b], [c, d]] = [Some(SequenceRole::Input), None].map(pair);
        let (text, image) = (mean(a, b, "input_ids"), mean(c, d, "pixel_values"));
        assert!((text - image).abs() < 1e-6, "{image} for an image, {text} for a text");
    }
}
