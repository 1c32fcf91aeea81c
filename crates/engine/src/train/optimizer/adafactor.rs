//! Adafactor (Shazeer & Stern 2018, "Adaptive Learning Rates with Sublinear Memory Cost") with an
//! explicit learning rate and without a first moment, like
//! `Adafactor(scale_parameter=False, relative_step=False)` of transformers.
//!
//! The second moment of a matrix is factored into row and column means. A parameter with more axes is
//! treated as a matrix of its first axis by all others, which for a convolution is output channels by
//! receptive field. transformers factors the last two axes instead, which saves little memory for
//! convolutions.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::super::floats::{self, CHUNK};
use super::{Algorithm, Settings, StateTensor, StepContext};
use crate::ir::ops::ScalarOps;
use crate::kernel::update;

/// Columns that one job sums.
const STRIP: usize = 64;

/// State: row and column means of the second moment for matrices, the full second moment otherwise.
pub(super) struct Adafactor {
    decay_power: f64,
    clip_threshold: f64,
    epsilon: f64,
}

/// Rows and columns of a parameter with at least two axes.
fn matrix(dims: &[usize]) -> Option<(usize, usize)> {
    (dims.len() > 1).then(|| (dims[0], dims[1..].iter().product()))
}

/// Elements of one job: a whole number of rows.
fn job(columns: usize) -> usize {
    (CHUNK / columns.max(1)).max(1) * columns.max(1)
}

impl Adafactor {
    pub(super) fn new(settings: &Settings) -> Adafactor {
        Adafactor { decay_power: settings.decay_power, clip_threshold: settings.clip_threshold, epsilon: settings.square_epsilon }
    }

    /// Decay of the second moment in this step.
    fn decay(&self, context: StepContext) -> f64 {
        1.0 - (context.step as f64).powf(-self.decay_power)
    }

    /// The learning rate, reduced if the root mean square of the update exceeds the threshold.
    fn step_size(&self, context: StepContext, squares: f64, count: usize) -> f32 {
        let root_mean_square = (squares / count.max(1) as f64).sqrt();
        (context.rate / (root_mean_square / self.clip_threshold).max(1.0)) as f32
    }

    fn vector(&self, context: StepContext, parameter: &mut [f32], gradient: &[f32], square: &mut [f32]) {
        let (decay, epsilon) = (self.decay(context), self.epsilon as f32);
        square.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).for_each(|(v, g)| {
            update::approach_squares(v, decay as f32, (1.0 - decay) as f32, g, epsilon);
        });
        let factors: Vec<f32> = square.par_iter().map(|v| 1.0 / v.sqrt()).collect();
        let sums: Vec<f64> = gradient.par_chunks(CHUNK).zip(factors.par_chunks(CHUNK)).map(|(g, f)| update::squared_products(g, f)).collect();
        let (step_size, shrink) = (self.step_size(context, sums.iter().sum(), gradient.len()), (1.0 - context.rate * context.weight_decay) as f32);
        parameter.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).zip(factors.par_chunks(CHUNK)).for_each(|((x, g), f)| {
            update::descend(x, shrink, step_size, g, f);
        });
    }

    fn matrix(&self, context: StepContext, columns: usize, parameter: &mut [f32], gradient: &[f32], row: &mut [f32], column: &mut [f32]) {
        if gradient.is_empty() {
            return;
        }
        let (decay, rows) = (self.decay(context), row.len());
        let approach =
            |mean: &mut f32, squares: f64, count: usize| *mean = (f64::from(*mean) * decay + (1.0 - decay) * (squares / count as f64 + self.epsilon)) as f32;
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
        let (step_size, shrink) = (self.step_size(context, sums.iter().sum(), gradient.len()), (1.0 - context.rate * context.weight_decay) as f32);
        let jobs = parameter.par_chunks_mut(columns).with_min_len(job(columns) / columns).zip(gradient.par_chunks(columns));
        jobs.zip(&by_row).for_each(|((x, g), factor)| update::descend(x, shrink, step_size * factor, g, &by_column));
    }
}

impl Algorithm for Adafactor {
    const PARTS: &'static [&'static str] = &["row", "column", "square"];

    fn parts(&self, _: &str, dims: &[usize], _: &[usize]) -> Vec<StateTensor> {
        match matrix(dims) {
            Some((rows, columns)) => vec![("row", vec![rows], DType::F32), ("column", vec![columns], DType::F32)],
            None => vec![("square", dims.to_vec(), DType::F32)],
        }
    }

    /// An update is clipped by its root mean square.
    fn unit(&self, _: &str, dims: &[usize]) -> usize {
        dims.iter().product()
    }

    fn on_host(&self, context: StepContext, dims: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> Result<()> {
        floats::change(&state[0], |first: &mut [f32]| match matrix(dims) {
            None => {
                self.vector(context, parameter, gradient, first);
                Ok(())
            }
            Some((_, columns)) => floats::change(&state[1], |second: &mut [f32]| {
                self.matrix(context, columns, parameter, gradient, first, second);
                Ok(())
            }),
        })
    }

    fn by_operations(&self, context: StepContext, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> Result<Tensor> {
        let decay = self.decay(context);
        let decayed = |moment: &Tensor, value: Tensor| {
            let new = (moment.affine(decay, 0.0)? + value.affine(1.0 - decay, 0.0)?)?;
            floats::assign(moment, &new)?;
            Ok::<_, candle_core::Error>(new)
        };
        let squared = gradient.sqr()?.affine(1.0, self.epsilon)?;
        let update = match matrix(parameter.dims()) {
            None => gradient.div(&decayed(&state[0], squared)?.sqrt()?)?,
            Some(shape) => {
                let squared = squared.reshape(shape)?;
                let row = decayed(&state[0], squared.mean(1)?)?;
                let column = decayed(&state[1], squared.mean(0)?)?;
                let by_row = row.mean_all()?.broadcast_div(&row)?.sqrt()?.unsqueeze(1)?;
                gradient.reshape(shape)?.broadcast_mul(&by_row)?.broadcast_div(&column.sqrt()?)?
            }
        };
        let root_mean_square = update.sqr()?.mean_all()?.sqrt()?;
        let divisor = root_mean_square.affine(1.0 / self.clip_threshold, 0.0)?.maximum_scalar(1.0)?;
        let update = update.broadcast_div(&divisor)?.reshape(parameter.dims())?;
        parameter.affine(1.0 - context.rate * context.weight_decay, 0.0)? - update.affine(context.rate, 0.0)?
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, build};
    use super::*;
    use candle_core::Device;

    #[test]
    fn state_of_a_matrix_is_its_row_and_column_means() {
        let mut optimizer = build(Kind::Adafactor, &Settings::default(), &crate::exec::Placement::Memory(Device::Cpu)).unwrap();
        for (name, dims) in [("matrix", &[30, 50][..]), ("kernel", &[8, 4, 3, 3]), ("vector", &[9]), ("empty", &[0, 3])] {
            let parameter = Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
            optimizer.update(name, &parameter, &parameter.copy().unwrap(), 0.1, 1).unwrap();
        }
        assert_eq!(optimizer.bytes(), 4 * (80 + 8 + 36 + 9 + 3));
    }

    /// A gradient spike is clipped to the threshold of the root mean square.
    #[test]
    fn updates_are_clipped() {
        let mut optimizer =
            build(Kind::Adafactor, &Settings { weight_decay: 0.0, ..Settings::default() }, &crate::exec::Placement::Memory(Device::Cpu)).unwrap();
        let parameter = Tensor::zeros(100, DType::F32, &Device::Cpu).unwrap();
        let small = parameter.affine(0.0, 1e-3).unwrap();
        (1..=50).for_each(|step| optimizer.update("b", &parameter, &small, 0.0, step).unwrap());
        optimizer.update("b", &parameter, &small.affine(1e3, 0.0).unwrap(), 0.1, 51).unwrap();
        let moved = parameter.sqr().unwrap().mean_all().unwrap().sqrt().unwrap().to_scalar::<f32>().unwrap();
        assert!((moved - 0.1).abs() < 1e-6, "{moved}");
    }
}
