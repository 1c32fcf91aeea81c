//! How close a model's answers are to another's.

use rayon::prelude::*;

use super::embedding::{EMBEDDINGS, cosine};
use super::{Fidelity, Outputs, computed};
use crate::data::{Batch, Padding};
use crate::error::{Error, Result};
use crate::exec::transfer::Cause;
use crate::exec::{floats_on_host, read};

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
        self.logits = name == "logits";
        self.output = name;
        let width = if a.rank() < 2 { 1 } else { a.dims()[a.rank() - 1] };
        let padding = Padding::of(batch).map_err(computed)?;
        let kept = padding.kept(a.dims());
        let width = width.max(1);
        let rows = |a: &[f32], b: &[f32]| {
            let rows = a.par_chunks_exact(width).zip(b.par_chunks_exact(width)).enumerate();
            let rows = rows.filter(|(index, _)| kept.is_none_or(|kept| kept.get(*index) != Some(&false)));
            rows.map(|(_, (a, b))| Row::of(a, b, self.logits)).collect::<Vec<_>>()
        };
        let (a, b) = (floats_on_host(a, Cause::Answers).map_err(computed)?, floats_on_host(b, Cause::Answers).map_err(computed)?);
        // Rows are looked at by several threads and added up in their order.
        for row in read(&a, |a| read(&b, |b| Ok(rows(a, b)))).map_err(computed)? {
            self.add_row(&row);
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
        let mut row = Row { cosine: cosine(a, b), ..Row::default() };
        for (x, y) in a.iter().zip(b) {
            let (x, y) = (f64::from(*x), f64::from(*y));
            row.signal += x * x;
            row.noise += (x - y) * (x - y);
            let error = (x - y).abs();
            if error > row.error || error.is_nan() {
                row.error = error;
            }
            row.largest = row.largest.max(x.abs());
        }
        if logits {
            row.divergence = divergence(a, b);
            row.agrees = likeliest(a) == likeliest(b);
        }
        row
    }
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
        p.exp() * (p - q)
    };
    a.iter().zip(b).map(term).sum::<f64>().max(0.0)
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
    fn padding_does_not_count() {
        let fidelity = compare("logits", &[[1.0; 3], [1.0; 3]], &[[1.0; 3], [-9.0; 3]], Some([1, 0]));
        assert_eq!((fidelity.cosine_min, fidelity.max_abs_error), (1.0, 0.0));
    }
}
