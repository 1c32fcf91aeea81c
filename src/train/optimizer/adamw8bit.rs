//! AdamW with moments of 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").
//!
//! Moments are kept as codes with a dynamic exponent and one f32 scale for each 256 of them; parameters of fewer than 4096
//! elements keep theirs in f32. A step decodes a block, steps in f32, and encodes it again. A second moment that is not zero never
//! becomes zero: a first moment that is still there would be divided by nothing.

use candle_core::{D, DType, Device, Result, Tensor};
use rayon::prelude::*;

use super::super::floats::{self, CHUNK};
use super::adamw::AdamW;
use super::{Algorithm, Now, Settings, StateTensor};
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::constant;
use crate::kernel::codes::{self, BLOCK, Range};
use crate::kernel::update;

/// Parameters with fewer elements keep their moments in f32.
const SMALLEST: usize = 4096;

/// Keeps both moments in 8 bits.
pub(super) struct AdamW8bit(AdamW);

impl AdamW8bit {
    pub(super) fn new(settings: &Settings) -> AdamW8bit {
        AdamW8bit(AdamW::new(settings))
    }
}

fn is_small(dims: &[usize]) -> bool {
    dims.iter().product::<usize>() < SMALLEST
}

/// The moments of some blocks.
struct Moments<'a> {
    mean: &'a mut [u8],
    mean_scales: &'a mut [f32],
    square: &'a mut [u8],
    square_scales: &'a mut [f32],
}

fn step_blocks(step: &update::AdamW, parameter: &mut [f32], gradient: &[f32], moments: Moments) {
    let (mut mean, mut square) = ([0f32; BLOCK], [0f32; BLOCK]);
    let codes = moments.mean.chunks_mut(BLOCK).zip(moments.square.chunks_mut(BLOCK));
    let scales = moments.mean_scales.iter_mut().zip(moments.square_scales);
    let elements = parameter.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
    for (((x, g), (m, v)), (m_scale, v_scale)) in elements.zip(codes).zip(scales) {
        let (mean, square) = (&mut mean[..x.len()], &mut square[..x.len()]);
        codes::decode(Range::Signed, m, *m_scale, mean);
        codes::decode(Range::Unsigned, v, *v_scale, square);
        update::adamw(step, x, g, mean, square);
        *m_scale = codes::encode(Range::Signed, mean, m);
        *v_scale = codes::encode(Range::Unsigned, square, v);
    }
}

/// Rows of the lookup tables of a code on a device.
#[derive(Clone, Copy)]
enum Table {
    /// The number of each code.
    Values,
    /// The magnitude above which the next code is nearer, by code.
    Borders,
    /// How many codes a band has.
    Counts,
    /// The reciprocal of the upper end of a band.
    Reciprocals,
    /// The first code of a band.
    Firsts,
}

/// One lookup table of a code. All tables are uploaded once per device.
fn table(range: Range, table: Table, device: &Device) -> Result<Tensor> {
    let tables = constant(format!("8-bit codes {range:?}"), device, |device| {
        let bands = range.bands();
        let by_band = |value: fn((f64, usize, usize)) -> f64| std::array::from_fn(|i| bands.get(i).map_or(0.0, |band| value(*band) as f32));
        let rows: [[f32; 256]; 5] =
            [*range.values(), *range.borders(), by_band(|band| band.1 as f64), by_band(|band| 1.0 / band.0), by_band(|band| band.2 as f64)];
        transfer::to_device(&Tensor::new(&rows, &Device::Cpu)?, device, Cause::State)
    })?;
    tables.get(table as usize)
}

/// `[blocks, 256]` numbers from codes of this shape and scales `[blocks]`.
fn decode(range: Range, codes: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let values = table(range, Table::Values, codes.device())?;
    // Of u8 indices, candle takes 255 for none.
    let numbers = values.index_select(&codes.flatten_all()?.to_dtype(DType::U32)?, 0)?;
    numbers.reshape(codes.dims())?.broadcast_mul(&scales.unsqueeze(1)?)
}

/// Codes and scales of `[blocks, 256]` numbers. The band of a number is found by its logarithm, its place in the band by
/// rounding down; the nearest code is that one or one beside it.
fn encode(range: Range, numbers: &Tensor) -> Result<(Tensor, Tensor)> {
    let device = numbers.device();
    let chosen = |row: Table, by: &Tensor| table(range, row, device)?.index_select(&by.to_dtype(DType::U32)?.flatten_all()?, 0)?.reshape(by.dims());
    let magnitudes = numbers.abs()?;
    let scales = magnitudes.max_keepdim(D::Minus1)?;
    let magnitudes = magnitudes.broadcast_div(&(&scales + scales.eq(0f64)?.to_dtype(DType::F32)?)?)?;
    let last = (range.bands().len() - 1) as f64;
    let logarithm = magnitudes.maximum(1e-9)?.log()?.affine(1.0 / std::f64::consts::LN_10, last + 1.0)?;
    let band = logarithm.floor()?.clamp(0.0, last)?;
    let count = chosen(Table::Counts, &band)?;
    let place = (magnitudes.mul(&chosen(Table::Reciprocals, &band)?)?.affine(1.0 / 0.9, -0.1 / 0.9)? * &count)?;
    let place = place.floor()?.maximum(0.0)?.minimum(&count.affine(1.0, -1.0)?)?;
    let code = (place + chosen(Table::Firsts, &band)?)?;
    let above = chosen(Table::Borders, &code)?;
    let below = chosen(Table::Borders, &code.affine(1.0, -1.0)?)?;
    let code = ((&code + magnitudes.gt(&above)?.to_dtype(DType::F32)?)? - magnitudes.le(&below)?.to_dtype(DType::F32)?)?;
    let code = match range {
        Range::Unsigned => code,
        Range::Signed => {
            let negative = (numbers.lt(0f64)? * code.gt(0f64)?)?;
            negative.where_cond(&code.minimum(127.0)?.affine(1.0, 128.0)?, &code)?
        }
    };
    Ok((code.to_dtype(DType::U8)?, scales.squeeze(D::Minus1)?))
}

/// Elements as `[blocks, 256]`, zeros behind the last.
fn in_blocks(tensor: &Tensor) -> Result<Tensor> {
    let elements = tensor.flatten_all()?;
    let count = elements.elem_count();
    elements.pad_with_zeros(0, 0, count.div_ceil(BLOCK) * BLOCK - count)?.reshape(((), BLOCK))
}

impl Algorithm for AdamW8bit {
    const PARTS: &'static [&'static str] = &["mean", "mean_scale", "square", "square_scale"];

    fn parts(&self, dims: &[usize]) -> Vec<StateTensor> {
        if is_small(dims) {
            return self.0.parts(dims);
        }
        let blocks = dims.iter().product::<usize>().div_ceil(BLOCK);
        let part = |part: &'static str| if part.ends_with("scale") { (part, vec![blocks], DType::F32) } else { (part, vec![blocks, BLOCK], DType::U8) };
        Self::PARTS.iter().copied().map(part).collect()
    }

    fn on_host(&self, now: Now, dims: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> Result<()> {
        let [mean, mean_scales, square, square_scales] = state else { return self.0.on_host(now, dims, parameter, gradient, state) };
        let step = self.0.coefficients(now);
        floats::change(mean, |mean: &mut [u8]| {
            floats::change(mean_scales, |mean_scales: &mut [f32]| {
                floats::change(square, |square: &mut [u8]| {
                    floats::change(square_scales, |square_scales: &mut [f32]| {
                        let elements = parameter.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
                        let means = mean.par_chunks_mut(CHUNK).zip(mean_scales.par_chunks_mut(CHUNK / BLOCK));
                        let squares = square.par_chunks_mut(CHUNK).zip(square_scales.par_chunks_mut(CHUNK / BLOCK));
                        elements.zip(means.zip(squares)).for_each(|((x, g), ((mean, mean_scales), (square, square_scales)))| {
                            step_blocks(&step, x, g, Moments { mean, mean_scales, square, square_scales });
                        });
                        Ok(())
                    })
                })
            })
        })
    }

    fn by_operations(&self, now: Now, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> Result<Tensor> {
        let [mean_codes, mean_scales, square_codes, square_scales] = state else { return self.0.by_operations(now, parameter, gradient, state) };
        let mean = decode(Range::Signed, mean_codes, mean_scales)?;
        let square = decode(Range::Unsigned, square_codes, square_scales)?;
        let [new, mean, square] = self.0.stepped(now, &in_blocks(parameter)?, &in_blocks(gradient)?, &mean, &square)?;
        for (range, numbers, old_codes, old_scales) in [(Range::Signed, mean, mean_codes, mean_scales), (Range::Unsigned, square, square_codes, square_scales)]
        {
            let (codes, scales) = encode(range, &numbers)?;
            floats::assign(old_codes, &codes)?;
            floats::assign(old_scales, &scales)?;
        }
        new.flatten_all()?.narrow(0, 0, parameter.elem_count())?.reshape(parameter.dims())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::numbers;
    use super::super::{Kind, build};
    use super::*;

    fn tensor(dims: &[usize], seed: u64) -> Tensor {
        Tensor::from_vec(numbers(dims.iter().product(), seed), dims, &Device::Cpu).unwrap()
    }

    /// Mean squared error of a regression with noisy answers after some steps, and the bytes of the state.
    fn regression(kind: Kind, steps: u64) -> (f64, u64) {
        let (x, goal) = (tensor(&[256, 64], 1), tensor(&[64, 80], 2));
        let y = (x.matmul(&goal).unwrap() + tensor(&[256, 80], 3)).unwrap();
        let weight = Tensor::zeros((64, 80), DType::F32, &Device::Cpu).unwrap();
        let mut optimizer = build(kind, &Settings::default(), &crate::exec::Home::Memory(Device::Cpu)).unwrap();
        let error = |weight: &Tensor| (x.matmul(weight).unwrap() - &y).unwrap();
        for step in 1..=steps {
            let gradient = x.t().unwrap().matmul(&error(&weight)).unwrap().affine(1.0 / 256.0, 0.0).unwrap();
            optimizer.update("x", &weight, &gradient, 0.02, step).unwrap();
        }
        (error(&weight).sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap().into(), optimizer.bytes())
    }

    #[test]
    fn as_good_as_in_f32_and_a_quarter_as_large() {
        for steps in [10, 50, 300] {
            let ((exact, bytes), (ours, few)) = (regression(Kind::AdamW, steps), regression(Kind::AdamW8bit, steps));
            assert!((ours / exact - 1.0).abs() < 0.02, "{steps}: {ours} instead of {exact}");
            assert!(few * 10 <= bytes * 3, "{few} of {bytes} bytes");
        }
    }

    #[test]
    fn codes_by_operations_are_as_near_as_those_of_the_host() {
        let mut values = numbers(16 * BLOCK, 5);
        values.iter_mut().enumerate().for_each(|(i, x)| *x *= 10f32.powi(-(i as i32 % 9)));
        values[3 * BLOCK..4 * BLOCK].fill(0.0);
        for range in [Range::Signed, Range::Unsigned] {
            let input: Vec<f32> = values.iter().map(|x| if range == Range::Signed { *x } else { x.abs() }).collect();
            let (codes, scales) = encode(range, &Tensor::from_slice(&input, (16, BLOCK), &Device::Cpu).unwrap()).unwrap();
            let back = decode(range, &codes, &scales).unwrap().to_vec2::<f32>().unwrap();
            for (block, back) in input.chunks(BLOCK).zip(back) {
                let (mut codes, mut ours) = ([0; BLOCK], [0.0; BLOCK]);
                let scale = codes::encode(range, block, &mut codes);
                codes::decode(range, &codes, scale, &mut ours);
                for ((x, ours), theirs) in block.iter().zip(ours).zip(back) {
                    let (near, far) = ((x - ours).abs(), (x - theirs).abs());
                    assert!(far <= near * 1.000_1 + 1e-6 * x.abs(), "{range:?} {x}: {ours} and {theirs}");
                    assert!(theirs == 0.0 || *x != 0.0, "{range:?}: zero became {theirs}");
                    assert!(theirs != 0.0 || *x == 0.0 || range == Range::Signed, "{x} became zero");
                }
            }
        }
    }

    /// A gradient that was there once and is gone: the step that follows must not grow.
    #[test]
    fn small_elements_of_a_block_do_not_leap() {
        let x = Tensor::zeros(SMALLEST, DType::F32, &Device::Cpu).unwrap();
        let mut gradient = vec![1e-4f32; SMALLEST];
        gradient[0] = 1.0;
        let gradient = Tensor::from_vec(gradient, SMALLEST, &Device::Cpu).unwrap();
        let mut optimizer = build(Kind::AdamW8bit, &Settings::default(), &crate::exec::Home::Memory(Device::Cpu)).unwrap();
        optimizer.update("x", &x, &gradient, 0.01, 1).unwrap();
        for step in 2..=10 {
            optimizer.update("x", &x, &gradient.zeros_like().unwrap(), 0.01, step).unwrap();
        }
        let most = x.abs().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        assert!(most < 0.1, "{most}");
    }
}
