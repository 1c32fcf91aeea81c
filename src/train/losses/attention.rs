//! Attention of the student against the teacher's: who looks where (Jiao et al., *TinyBERT*, 2020), or how queries, keys
//! and values of one layer relate to each other (Wang et al., *MiniLMv2*, 2021), which takes no equal numbers of heads.

use candle_core::{D, Result, Tensor};

use super::logits::log_softmax;
use super::{AttentionTarget, Loss, Sum, mask};
use crate::data::{Batch, Side};
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
    /// How many keys a query sees at most, its own included, when causal.
    pub window: Option<usize>,
    /// Whose tokens look at each other, if they are tokens.
    pub tokens: Option<Side>,
}

/// As far as order goes, where queries look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    Everywhere,
    /// At so many keys at most, up to their own place.
    Back(usize),
}

impl Heads {
    fn sight(&self) -> Sight {
        if self.causal { Sight::Back(self.window.unwrap_or(usize::MAX)) } else { Sight::Everywhere }
    }

    /// Where both look: only there can they be compared.
    fn common_sight(&self, other: &Heads) -> Sight {
        match (self.sight(), other.sight()) {
            (Sight::Back(a), Sight::Back(b)) => Sight::Back(a.min(b)),
            (Sight::Everywhere, sight) | (sight, Sight::Everywhere) => sight,
        }
    }
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
    fn products(a: &Tensor, b: &Tensor, scale: f64, sight: Sight, mask: Option<&Tensor>) -> Result<Tensor> {
        let sequence = a.dim(2)?;
        let mut products = (a.contiguous()?.matmul(&Self::spread(b, a.dim(1)?)?.transpose(2, 3)?.contiguous()?)? * scale)?;
        if let Some(mask) = mask {
            let hidden = ((1.0 - mask)? * HIDDEN)?.reshape((mask.dim(0)?, 1, 1, mask.dim(1)?))?;
            products = products.broadcast_add(&hidden)?;
        }
        if let Sight::Back(window) = sight {
            let unseen = constant(format!("unseen {window} {sequence}"), products.device(), |device| {
                let hidden = |query: usize, key: usize| key > query || query - key >= window;
                let bias = |i: usize| if hidden(i / sequence, i % sequence) { HIDDEN as f32 } else { 0.0 };
                Tensor::from_vec((0..sequence * sequence).map(bias).collect::<Vec<f32>>(), (1, 1, sequence, sequence), device)
            })?;
            products = products.broadcast_add(&unseen)?;
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

    /// Kullback-Leibler divergence of rows, averaged over heads, summed over queries with what each counts; and its gradient with respect
    /// to the student's products.
    fn divergence(student: &Tensor, teacher: &Tensor, batch: &Batch, tokens: Option<Side>) -> Result<(Tensor, Tensor)> {
        let (theirs, ours) = (log_softmax(teacher)?, log_softmax(student)?);
        let target = theirs.exp()?;
        let rows = (&target * (theirs - &ours)?)?.sum(D::Minus1)?.mean(1)?;
        let along = ((ours.exp()? - target)? / student.dim(1)? as f64)?;
        let weights = mask::weights(&rows, batch, tokens)?;
        Ok(((rows * &weights)?.sum_all()?, along.broadcast_mul(&weights.unsqueeze(1)?.unsqueeze(3)?)?))
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
        let counts = self.pairs.iter().map(|(student, _)| mask::count(batch, student.tokens)).sum::<Result<f64>>();
        counts.map_err(|e| error::Error::computed("loss `attention`", e))
    }

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], _projections: &[Tensor], batch: &Batch) -> Result<Sum> {
        let (mut values, mut gradients) = (Vec::new(), Vec::new());
        for (((ours, theirs), student), teacher) in self.pairs.iter().zip(student.chunks(self.read())).zip(teacher.chunks(self.read())) {
            let (sight, tokens) = (ours.common_sight(theirs), ours.tokens);
            let mask = mask::of(batch, tokens, student[0].device())?;
            match self.target {
                AttentionTarget::Maps => {
                    let products = |heads: &Heads, values: &[Tensor]| Self::products(&values[0], &values[1], heads.scale, sight, mask.as_ref());
                    let (value, along) = Self::divergence(&products(ours, student)?, &products(theirs, teacher)?, batch, tokens)?;
                    values.push(value);
                    gradients.extend(Self::products_back(&student[0], &student[1], ours.scale, &along)?);
                }
                AttentionTarget::Relations => {
                    for (student, teacher) in student.iter().zip(teacher) {
                        let scale = |split: &Tensor| Ok::<_, candle_core::Error>(1.0 / (split.dim(3)? as f64).sqrt());
                        let relation = |split: &Tensor| Self::products(split, split, scale(split)?, sight, mask.as_ref());
                        let (split, other) = (self.split(student)?, self.split(teacher)?);
                        let (value, along) = Self::divergence(&relation(&split)?, &relation(&other)?, batch, tokens)?;
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

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::data::References;

    const SEQUENCE: usize = 6;

    fn value(seed: usize) -> Tensor {
        let values: Vec<f32> = (0..2 * SEQUENCE * 4).map(|i| ((i * 7919 + seed * 104_729) % 97) as f32 / 40.0 - 1.0).collect();
        Tensor::from_vec(values, (1, 2, SEQUENCE, 4), &Device::Cpu).unwrap()
    }

    fn heads(causal: bool, window: Option<usize>) -> Heads {
        Heads { values: ["q".into(), "k".into(), "v".into()], scale: 0.5, causal, window, tokens: Some(Side::Read) }
    }

    fn mean(student: Heads, teacher: Heads, input: &str) -> f64 {
        let loss = Attention { target: AttentionTarget::Maps, pairs: vec![(student, teacher)], relation_heads: 1 };
        let ids = Tensor::ones((1, SEQUENCE), candle_core::DType::I64, &Device::Cpu).unwrap();
        let batch = Batch { inputs: [(input.to_owned(), ids)].into(), references: References::None, samples: 1 };
        let sum = loss.sum(&[value(1), value(2)], &[value(3), value(4)], &[], &batch).unwrap();
        f64::from(sum.value.to_scalar::<f32>().unwrap()) / loss.items(&batch).unwrap()
    }

    /// The same in plain loops: only keys that `sees` allows are looked at.
    fn expected(sees: impl Fn(usize, usize) -> bool) -> f64 {
        let [q, k, p, l] = [1, 2, 3, 4].map(|seed| value(seed).squeeze(0).unwrap().to_vec3::<f32>().unwrap());
        let mut sum = 0.0;
        for head in 0..2 {
            for query in 0..SEQUENCE {
                let looks = |q: &[Vec<Vec<f32>>], k: &[Vec<Vec<f32>>]| {
                    let score = |key: usize| q[head][query].iter().zip(&k[head][key]).map(|(a, b)| f64::from(a * b)).sum::<f64>() * 0.5;
                    let scores: Vec<f64> = (0..SEQUENCE).filter(|key| sees(query, *key)).map(|key| score(key).exp()).collect();
                    let all: f64 = scores.iter().sum();
                    scores.into_iter().map(|score| score / all).collect::<Vec<_>>()
                };
                sum += looks(&p, &l).iter().zip(looks(&q, &k)).map(|(theirs, ours)| theirs * (theirs / ours).ln()).sum::<f64>() / 2.0;
            }
        }
        sum / SEQUENCE as f64
    }

    #[test]
    fn only_keys_that_both_see_are_compared() {
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-5, "{found} instead of {expected}");
        near(mean(heads(false, None), heads(false, None), "input_ids"), expected(|_, _| true));
        near(mean(heads(true, None), heads(true, None), "input_ids"), expected(|query, key| key <= query));
        for (ours, theirs) in [(Some(2), Some(2)), (Some(2), None), (Some(4), Some(2))] {
            near(mean(heads(true, ours), heads(true, theirs), "input_ids"), expected(|query, key| key <= query && query - key < 2));
        }
        near(mean(heads(false, None), heads(true, Some(3)), "input_ids"), expected(|query, key| key <= query && query - key < 3));
    }

    /// Central differences in the value of a loss.
    #[test]
    fn gradients_are_differences_of_values() {
        let ids = Tensor::ones((1, SEQUENCE), candle_core::DType::I64, &Device::Cpu).unwrap();
        let batch = Batch { inputs: [("input_ids".to_owned(), ids)].into(), references: References::None, samples: 1 };
        for (target, relation_heads) in [(AttentionTarget::Maps, 2), (AttentionTarget::Relations, 2), (AttentionTarget::Relations, 4)] {
            let loss = Attention { target, pairs: vec![(heads(true, None), heads(true, None))], relation_heads };
            let count = loss.student().len();
            let all = |from: usize| (from..from + count).map(value).collect::<Vec<_>>();
            let (student, teacher) = (all(1), all(7));
            let gradients = loss.sum(&student, &teacher, &[], &batch).unwrap().student;
            assert_eq!(gradients.len(), count);
            for (at, gradient) in gradients.iter().enumerate() {
                let gradient = gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let moved = |element: usize, by: f32| {
                    let mut values = student.clone();
                    let mut changed = values[at].flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    changed[element] += by;
                    values[at] = Tensor::from_vec(changed, values[at].dims(), &Device::Cpu).unwrap();
                    f64::from(loss.sum(&values, &teacher, &[], &batch).unwrap().value.to_scalar::<f32>().unwrap())
                };
                for element in (0..gradient.len()).step_by(3) {
                    let difference = (moved(element, 0.01) - moved(element, -0.01)) / 0.02;
                    let found = f64::from(gradient[element]);
                    assert!((difference - found).abs() < 1e-3, "{target:?}, value {at}, element {element}: {found} instead of {difference}");
                }
            }
            assert!(gradients.iter().all(|gradient| gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap() > 1e-2));
        }
    }

    #[test]
    fn images_count_as_much_as_texts() {
        let pair = |tokens| [(); 2].map(|()| Heads { tokens, ..heads(false, None) });
        let [[a, b], [c, d]] = [Some(Side::Read), None].map(pair);
        let (text, image) = (mean(a, b, "input_ids"), mean(c, d, "pixel_values"));
        assert!((text - image).abs() < 1e-6, "{image} of an image, {text} of a text");
    }
}
