//! How close a model's answers are to another's.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use super::embedding::{EMBEDDINGS, cosine_of};
use super::{Fidelity, Outputs, by_parts, computed};
use crate::data::{Batch, Padding, Side};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{floats_on_host, read};
use crate::ir::ops::on_host;

/// Sums of what two models say.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sums {
    output: String,
    logits: bool,
    rows: u64,
    cosines: f64,
    least: Option<f64>,
    signal: f64,
    noise: f64,
    divergence: f64,
    agreements: u64,
    error: f64,
    largest: f64,
}

impl Sums {
    pub fn add(&mut self, batch: &Batch, before: &Outputs, after: &Outputs) -> Result<()> {
        let shared = || before.iter().filter(|(name, tensor)| tensor.dtype().is_float() && after.contains_key(*name)).map(|(name, _)| name);
        let usual = ["logits"].into_iter().chain(EMBEDDINGS);
        let name = usual.filter(|name| before.contains_key(*name) && after.contains_key(*name)).map(str::to_owned).next().or_else(|| shared().next().cloned());
        let Some(name) = name else {
            let names = |outputs: &Outputs| outputs.keys().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
            return Err(Error::option("evaluation", format!("the models share no output: one gives {}, the other {}", names(before), names(after))));
        };
        let (a, b) = (&before[&name], &after[&name]);
        if a.dims() != b.dims() {
            return Err(Error::option("evaluation", format!("output `{name}` is {:?} of one model and {:?} of the other", a.dims(), b.dims())));
        }
        // What exported files tell of an encoder beside the decoder's answers.
        let side = if name.starts_with("encoder_") { Side::Read } else { batch.answered() };
        self.logits = name == "logits";
        self.output = name;
        let width = if a.rank() < 2 { 1 } else { a.dims()[a.rank() - 1] };
        let padding = Padding::of(batch).map_err(computed)?;
        let kept = padding.kept(side, a.dims());
        let rows = rows(a, b, width.max(1), self.logits).map_err(computed)?;
        // Rows are looked at by several threads and added up in their order.
        for (index, row) in rows.iter().enumerate() {
            if kept.is_none_or(|kept| kept.get(index) != Some(&false)) {
                self.add_row(row);
            }
        }
        Ok(())
    }

    fn add_row(&mut self, row: &Row) {
        self.rows += 1;
        self.cosines += row.cosine;
        self.least = Some(self.least.map_or(row.cosine, |least| if row.cosine < least || row.cosine.is_nan() { row.cosine } else { least }));
        self.signal += row.signal;
        self.noise += row.noise;
        if row.error > self.error || row.error.is_nan() {
            self.error = row.error;
        }
        self.largest = self.largest.max(row.largest);
        self.divergence += row.divergence;
        self.agreements += u64::from(row.agrees);
    }

    pub fn finish(self) -> Fidelity {
        let rows = self.rows.max(1) as f64;
        Fidelity {
            output: self.output,
            cosine: self.cosines / rows,
            cosine_min: self.least.unwrap_or(1.0),
            sqnr_db: Some(10.0 * (self.signal / self.noise).log10()).filter(|db| db.is_finite()),
            kl: self.logits.then_some(self.divergence / rows),
            top1_agreement: self.logits.then_some(self.agreements as f64 / rows),
            max_abs_error: self.error,
            largest: self.largest,
        }
    }
}

/// What two models say to one sample, or to one token of it.
#[derive(Default)]
struct Row {
    cosine: f64,
    signal: f64,
    noise: f64,
    error: f64,
    largest: f64,
    divergence: f64,
    agrees: bool,
}

impl Row {
    fn of(a: &[f32], b: &[f32], logits: bool) -> Row {
        let mut row = Row::default();
        let (mut both, mut other) = (0f64, 0f64);
        for (x, y) in a.iter().zip(b) {
            let (x, y) = (f64::from(*x), f64::from(*y));
            both += x * y;
            other += y * y;
            row.signal += x * x;
            row.noise += (x - y) * (x - y);
            let error = (x - y).abs();
            if error > row.error || error.is_nan() {
                row.error = error;
            }
            row.largest = row.largest.max(x.abs());
        }
        row.cosine = cosine_of(both, row.signal, other);
        if logits {
            row.divergence = divergence(a, b);
            row.agrees = likeliest(a) == likeliest(b);
        }
        row
    }
}

/// What two models say, row by row; of values on a device, these numbers alone come back.
fn rows(a: &Tensor, b: &Tensor, width: usize, logits: bool) -> candle_core::Result<Vec<Row>> {
    if on_host(a.device()) || !a.device().same_device(b.device()) {
        let (a, b) = (floats_on_host(a, Cause::Answers)?, floats_on_host(b, Cause::Answers)?);
        let all = |a: &[f32], b: &[f32]| a.par_chunks_exact(width).zip(b.par_chunks_exact(width)).map(|(a, b)| Row::of(a, b, logits)).collect();
        return read(&a, |a| read(&b, |b| Ok(all(a, b))));
    }
    let flat = |tensor: &Tensor| tensor.reshape((tensor.elem_count() / width, width));
    let (a, b) = (flat(a)?, flat(b)?);
    by_parts(a.dim(0)?, width, |rows| {
        let part = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len())?.to_dtype(DType::F64);
        rows_there(&part(&a)?, &part(&b)?, logits)
    })
}

/// [`Row::of`] for rows `[rows, width]`, computed where they are.
fn rows_there(a: &Tensor, b: &Tensor, logits: bool) -> candle_core::Result<Vec<Row>> {
    let difference = (a - b)?;
    let sum = |products: Tensor| products.sum(D::Minus1);
    let mut figures =
        vec![sum((a * b)?)?, sum(a.sqr()?)?, sum(b.sqr()?)?, sum(difference.sqr()?)?, difference.abs()?.max(D::Minus1)?, a.abs()?.max(D::Minus1)?];
    if logits {
        let logarithms = |logits: &Tensor| logits.broadcast_sub(&logits.log_sum_exp(D::Minus1)?.unsqueeze(1)?);
        let (p, q) = (logarithms(a)?, logarithms(b)?);
        let (likely, terms) = (p.exp()?, (&p - q)?);
        figures.push(sum(likely.eq(0f64)?.where_cond(&likely, &(&likely * terms)?)?)?);
        figures.push(a.argmax(D::Minus1)?.eq(&b.argmax(D::Minus1)?)?.to_dtype(DType::F64)?);
    }
    let values: Vec<f64> = transfer::values(&Tensor::stack(&figures, 1)?, Cause::Answers)?;
    let row = |values: &[f64]| {
        let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
        let error = if at(3).is_nan() { f64::NAN } else { at(4) };
        let cosine = cosine_of(at(0), at(1), at(2));
        Row { cosine, signal: at(1), noise: at(3), error, largest: at(5), divergence: not_below_zero(at(6)), agrees: at(7) > 0.0 }
    };
    Ok(values.chunks_exact(figures.len()).map(row).collect())
}

fn likeliest(logits: &[f32]) -> Option<usize> {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0))).map(|(index, _)| index)
}

/// `sum p (ln p - ln q)` of two softmax distributions.
fn divergence(a: &[f32], b: &[f32]) -> f64 {
    let total = |logits: &[f32]| {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(highest) + logits.iter().map(|l| f64::from(l - highest).exp()).sum::<f64>().ln()
    };
    let (all_a, all_b) = (total(a), total(b));
    let term = |(x, y): (&f32, &f32)| {
        let (p, q) = (f64::from(*x) - all_a, f64::from(*y) - all_b);
        let likely = p.exp();
        // What one model rules out counts for nothing, also where the other does.
        if likely == 0.0 { 0.0 } else { likely * (p - q) }
    };
    not_below_zero(a.iter().zip(b).map(term).sum())
}

/// A sum that rounding alone makes negative; what is no number stays so.
fn not_below_zero(sum: f64) -> f64 {
    if sum < 0.0 { 0.0 } else { sum }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::data::References;

    fn compare(name: &str, a: &[[f32; 3]; 2], b: &[[f32; 3]; 2], mask: Option<[i64; 2]>) -> Fidelity {
        let tensor = |rows: &[[f32; 3]; 2]| {
            let tensor = Tensor::new(rows, &Device::Cpu).unwrap();
            if mask.is_some() { tensor.unsqueeze(0).unwrap() } else { tensor }
        };
        let inputs = mask.map(|mask| ("attention_mask".to_owned(), Tensor::new(&[mask], &Device::Cpu).unwrap()));
        let batch = Batch { inputs: inputs.into_iter().collect(), references: References::None, samples: 2 };
        let mut sums = Sums::default();
        sums.add(&batch, &[(name.to_owned(), tensor(a))].into(), &[(name.to_owned(), tensor(b))].into()).unwrap();
        sums.finish()
    }

    #[test]
    fn the_same_is_the_same() {
        let rows = [[1.0, 2.0, 3.0], [0.0, -1.0, 5.0]];
        let fidelity = compare("logits", &rows, &rows, None);
        assert!((fidelity.cosine - 1.0).abs() < 1e-12 && fidelity.sqnr_db.is_none());
        assert_eq!((fidelity.kl, fidelity.top1_agreement, fidelity.max_abs_error), (Some(0.0), Some(1.0), 0.0));
    }

    #[test]
    fn figures_are_those_of_the_definitions() {
        let fidelity = compare("logits", &[[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]], &[[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]], None);
        assert_eq!((fidelity.cosine, fidelity.cosine_min, fidelity.top1_agreement), (0.5, 0.0, Some(0.5)));
        // scipy.stats.entropy of the softmax of both second rows, over two rows.
        assert!((fidelity.kl.unwrap() - 3.787_466_5 / 2.0).abs() < 1e-3, "{:?}", fidelity.kl);
        assert!((fidelity.sqnr_db.unwrap() - 10.0 * (30f64 / 32.0).log10()).abs() < 1e-9);
        assert_eq!(compare("x", &[[1.0; 3]; 2], &[[1.0; 3]; 2], None).kl, None);
    }

    #[test]
    fn rows_are_the_same_where_they_are_computed() {
        let numbers = |seed: u32| (0..4 * 33).map(move |i: u32| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 977) >> 16) as f32 / 8192.0) - 4.0);
        let (mut a, mut b): (Vec<f32>, Vec<f32>) = (numbers(1).collect(), numbers(2).collect());
        (a[7], b[7], b[33]) = (f32::NEG_INFINITY, f32::NEG_INFINITY, a[33]);
        (66..99).for_each(|i| b[i] = a[i]);
        (a[100], b[131]) = (f32::NAN, f32::INFINITY);
        let tensor = |values: &[f32]| Tensor::from_slice(values, (4, 33), &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        for logits in [true, false] {
            let there = rows_there(&tensor(&a), &tensor(&b), logits).unwrap();
            for (index, (there, (a, b))) in there.iter().zip(a.chunks(33).zip(b.chunks(33))).enumerate() {
                let here = Row::of(a, b, logits);
                let figures = |row: &Row| [row.cosine, row.signal, row.noise, row.error, row.divergence, f64::from(u8::from(row.agrees))];
                for (here, there) in figures(&here).into_iter().zip(figures(there)) {
                    assert!((here - there).abs() < 1e-9 || here == there || here.is_nan() && there.is_nan(), "{index}: {here} and {there}");
                }
            }
            assert_eq!(there.len(), 4);
        }
        // A token that both rule out is no difference.
        assert!(Row::of(&a[..33], &b[..33], true).divergence > 0.0);
    }

    #[test]
    fn padding_does_not_count() {
        let fidelity = compare("logits", &[[1.0; 3], [1.0; 3]], &[[1.0; 3], [-9.0; 3]], Some([1, 0]));
        assert_eq!((fidelity.cosine_min, fidelity.max_abs_error), (1.0, 0.0));
    }
}
