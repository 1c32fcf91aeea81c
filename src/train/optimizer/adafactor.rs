//! Adafactor (Shazeer & Stern 2018, "Adaptive Learning Rates with Sublinear Memory Cost") with a given learning rate and no first
//! moment, as `Adafactor(scale_parameter=False, relative_step=False)` of transformers.
//!
//! Of a matrix only the means of its rows and columns are kept. A parameter of more axes is taken as the matrix of its first axis
//! by all others, of a convolution's kernel as much as its outputs by what each of them sees; transformers would factor the last two
//! axes, which saves next to nothing there.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::super::floats::{self, CHUNK};
use super::{Algorithm, Now, Settings, StateTensor};
use crate::kernel::update;

/// Columns that are summed by one job.
const STRIP: usize = 64;

/// Keeps second moments: two vectors of a matrix, else one of every element.
pub(super) struct Adafactor {
    decay_power: f64,
    clip_threshold: f64,
    epsilon: f64,
}

/// Rows and columns of a parameter of two axes or more.
fn matrix(dims: &[usize]) -> Option<(usize, usize)> {
    (dims.len() > 1).then(|| (dims[0], dims[1..].iter().product()))
}

/// Whole rows of a matrix as one job.
fn job(columns: usize) -> usize {
    (CHUNK / columns.max(1)).max(1) * columns.max(1)
}

impl Adafactor {
    pub(super) fn new(settings: &Settings) -> Adafactor {
        Adafactor { decay_power: settings.decay_power, clip_threshold: settings.clip_threshold, epsilon: settings.square_epsilon }
    }

    /// What is left of the moments in this step.
    fn left(&self, now: Now) -> f64 {
        1.0 - (now.step as f64).powf(-self.decay_power)
    }

    /// The rate, less where the update would be larger than the threshold.
    fn size(&self, now: Now, squares: f64, count: usize) -> f32 {
        let root_mean_square = (squares / count.max(1) as f64).sqrt();
        (now.rate / (root_mean_square / self.clip_threshold).max(1.0)) as f32
    }

    fn vector(&self, now: Now, parameter: &mut [f32], gradient: &[f32], square: &mut [f32]) {
        let (left, epsilon) = (self.left(now), self.epsilon as f32);
        square.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).for_each(|(v, g)| {
            update::approach_squares(v, left as f32, (1.0 - left) as f32, g, epsilon);
        });
        let factors: Vec<f32> = square.par_iter().map(|v| 1.0 / v.sqrt()).collect();
        let sums: Vec<f64> = gradient.par_chunks(CHUNK).zip(factors.par_chunks(CHUNK)).map(|(g, f)| update::squared_products(g, f)).collect();
        let (size, shrink) = (self.size(now, sums.iter().sum(), gradient.len()), (1.0 - now.rate * now.weight_decay) as f32);
        parameter.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).zip(factors.par_chunks(CHUNK)).for_each(|((x, g), f)| {
            update::descend(x, shrink, size, g, f);
        });
    }

    fn matrix(&self, now: Now, columns: usize, parameter: &mut [f32], gradient: &[f32], row: &mut [f32], column: &mut [f32]) {
        if gradient.is_empty() {
            return;
        }
        let (left, rows) = (self.left(now), row.len());
        let approach =
            |mean: &mut f32, squares: f64, count: usize| *mean = (f64::from(*mean) * left + (1.0 - left) * (squares / count as f64 + self.epsilon)) as f32;
        row.par_iter_mut().with_min_len(job(columns) / columns).zip(gradient.par_chunks(columns)).for_each(|(mean, g)| {
            approach(mean, update::squares(g), columns);
        });
        column.par_chunks_mut(STRIP).enumerate().for_each(|(strip, means)| {
            let mut sums = [0f64; STRIP];
            let from = strip * STRIP;
            gradient.chunks(columns).for_each(|g| update::add_squares(&mut sums, &g[from..from + means.len()]));
            means.iter_mut().zip(sums).for_each(|(mean, squares)| approach(mean, squares, rows));
        });
        let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / rows as f64;
        let by_row: Vec<f32> = row.iter().map(|v| (mean / f64::from(*v)).sqrt() as f32).collect();
        let by_column: Vec<f32> = column.iter().map(|v| 1.0 / v.sqrt()).collect();
        let jobs = gradient.par_chunks(columns).with_min_len(job(columns) / columns).zip(&by_row);
        let sums: Vec<f64> = jobs.map(|(g, factor)| f64::from(*factor).powi(2) * update::squared_products(g, &by_column)).collect();
        let (size, shrink) = (self.size(now, sums.iter().sum(), gradient.len()), (1.0 - now.rate * now.weight_decay) as f32);
        let jobs = parameter.par_chunks_mut(columns).with_min_len(job(columns) / columns).zip(gradient.par_chunks(columns));
        jobs.zip(&by_row).for_each(|((x, g), factor)| update::descend(x, shrink, size * factor, g, &by_column));
    }
}

impl Algorithm for Adafactor {
    const PARTS: &'static [&'static str] = &["row", "column", "square"];

    fn parts(&self, dims: &[usize]) -> Vec<StateTensor> {
        match matrix(dims) {
            Some((rows, columns)) => vec![("row", vec![rows], DType::F32), ("column", vec![columns], DType::F32)],
            None => vec![("square", dims.to_vec(), DType::F32)],
        }
    }

    fn on_host(&self, now: Now, dims: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> Result<()> {
        floats::change(&state[0], |first: &mut [f32]| match matrix(dims) {
            None => {
                self.vector(now, parameter, gradient, first);
                Ok(())
            }
            Some((_, columns)) => floats::change(&state[1], |second: &mut [f32]| {
                self.matrix(now, columns, parameter, gradient, first, second);
                Ok(())
            }),
        })
    }

    fn by_operations(&self, now: Now, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> Result<Tensor> {
        let left = self.left(now);
        let kept = |kept: &Tensor, seen: Tensor| {
            let new = (kept.affine(left, 0.0)? + seen.affine(1.0 - left, 0.0)?)?;
            floats::assign(kept, &new)?;
            Ok::<_, candle_core::Error>(new)
        };
        let squared = gradient.sqr()?.affine(1.0, self.epsilon)?;
        let update = match matrix(parameter.dims()) {
            None => gradient.div(&kept(&state[0], squared)?.sqrt()?)?,
            Some(shape) => {
                let squared = squared.reshape(shape)?;
                let row = kept(&state[0], squared.mean(1)?)?;
                let column = kept(&state[1], squared.mean(0)?)?;
                let by_row = row.mean_all()?.broadcast_div(&row)?.sqrt()?.unsqueeze(1)?;
                gradient.reshape(shape)?.broadcast_mul(&by_row)?.broadcast_div(&column.sqrt()?)?
            }
        };
        let root_mean_square = update.sqr()?.mean_all()?.sqrt()?;
        let divisor = root_mean_square.affine(1.0 / self.clip_threshold, 0.0)?.maximum(1.0)?;
        let update = update.broadcast_div(&divisor)?.reshape(parameter.dims())?;
        parameter.affine(1.0 - now.rate * now.weight_decay, 0.0)? - update.affine(now.rate, 0.0)?
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, build};
    use super::*;
    use candle_core::Device;

    #[test]
    fn a_matrix_costs_its_edges() {
        let mut optimizer = build(Kind::Adafactor, &Settings::default(), &crate::exec::Home::Memory(Device::Cpu)).unwrap();
        for (name, dims) in [("matrix", &[30, 50][..]), ("kernel", &[8, 4, 3, 3]), ("vector", &[9]), ("empty", &[0, 3])] {
            let parameter = Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
            optimizer.update(name, &parameter, &parameter.copy().unwrap(), 0.1, 1).unwrap();
        }
        assert_eq!(optimizer.bytes(), 4 * (80 + 8 + 36 + 9 + 3));
    }

    /// One large element among small ones: the update is cut to the threshold as a whole.
    #[test]
    fn updates_are_clipped() {
        let mut optimizer = build(Kind::Adafactor, &Settings { weight_decay: 0.0, ..Settings::default() }, &crate::exec::Home::Memory(Device::Cpu)).unwrap();
        let parameter = Tensor::zeros(100, DType::F32, &Device::Cpu).unwrap();
        let small = parameter.affine(0.0, 1e-3).unwrap();
        (1..=50).for_each(|step| optimizer.update("b", &parameter, &small, 0.0, step).unwrap());
        optimizer.update("b", &parameter, &small.affine(1e3, 0.0).unwrap(), 0.1, 51).unwrap();
        let moved = parameter.sqr().unwrap().mean_all().unwrap().sqrt().unwrap().to_scalar::<f32>().unwrap();
        assert!((moved - 0.1).abs() < 1e-6, "{moved}");
    }
}
