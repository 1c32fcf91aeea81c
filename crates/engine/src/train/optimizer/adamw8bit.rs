//! AdamW with 8-bit moments (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").
//!
//! Moments are stored as 8-bit codes with a dynamic exponent and one f32 scale per block of 256;
//! parameters with fewer than 4096 elements use f32 moments. A step decodes a block, updates it in f32,
//! and encodes it again. Encoding never rounds a nonzero second moment to zero: the first moment, if
//! still nonzero, would be divided by epsilon.

use candle_core::{D, DType, Device, Result, Tensor};
use rayon::prelude::*;

use super::super::floats::{self, CHUNK};
use super::adamw::AdamW;
use super::{Algorithm, Settings, StateTensor, StepContext};
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::ScalarOps;
use crate::kernel::dynamic_8bit::{self, BLOCK, Range};
use crate::kernel::update;

/// Parameters with fewer elements use f32 moments.
const MIN_ELEMENTS: usize = 4096;

/// State: both moments in 8 bits, with scales.
pub(super) struct AdamW8bit {
    exact: AdamW,
    signed: Tables,
    unsigned: Tables,
}

impl AdamW8bit {
    /// Uploads the lookup tables, so that steps copy nothing to the device.
    pub(super) fn new(settings: &Settings, device: &Device) -> Result<AdamW8bit> {
        let [signed, unsigned] = [Range::Signed, Range::Unsigned].map(|range| Tables::upload(range, device));
        Ok(AdamW8bit { exact: AdamW::new(settings), signed: signed?, unsigned: unsigned? })
    }
}

fn is_small(dims: &[usize]) -> bool {
    dims.iter().product::<usize>() < MIN_ELEMENTS
}

/// Codes and scales of the moments of consecutive blocks.
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
        dynamic_8bit::decode(Range::Signed, m, *m_scale, mean);
        dynamic_8bit::decode(Range::Unsigned, v, *v_scale, square);
        update::adamw(step, x, g, mean, square);
        *m_scale = dynamic_8bit::encode(Range::Signed, mean, m);
        *v_scale = dynamic_8bit::encode(Range::Unsigned, square, v);
    }
}

/// Rows of the lookup tables of a code.
#[derive(Clone, Copy)]
enum Table {
    /// The value of each code.
    Values,
    /// Magnitude above which the next code is nearer, by code.
    Borders,
    /// The number of codes of a band.
    Counts,
    /// Reciprocal of the upper end of each band.
    Reciprocals,
    /// First code of each band.
    Firsts,
}

/// The lookup tables of a code on a device, `[5, 256]`.
struct Tables {
    range: Range,
    rows: Tensor,
}

impl Tables {
    fn upload(range: Range, device: &Device) -> Result<Tables> {
        let bands = range.bands();
        let by_band = |value: fn((f64, usize, usize)) -> f64| std::array::from_fn(|i| bands.get(i).map_or(0.0, |band| value(*band) as f32));
        let rows: [[f32; 256]; 5] =
            [*range.values(), *range.borders(), by_band(|band| band.1 as f64), by_band(|band| 1.0 / band.0), by_band(|band| band.2 as f64)];
        Ok(Tables { range, rows: transfer::to_device(&Tensor::new(&rows, &Device::Cpu)?, device, Cause::State)? })
    }

    /// The entries of a table at these indices, which are whole numbers.
    fn look_up(&self, table: Table, indices: &Tensor) -> Result<Tensor> {
        // Candle treats the index 255 of u8 as missing.
        self.rows.get(table as usize)?.index_select(&indices.to_dtype(DType::U32)?.flatten_all()?, 0)?.reshape(indices.dims())
    }

    /// Decodes `[blocks, 256]` codes with scales `[blocks]`.
    fn decode(&self, codes: &Tensor, scales: &Tensor) -> Result<Tensor> {
        self.look_up(Table::Values, codes)?.broadcast_mul(&scales.unsqueeze(1)?)
    }

    /// Encodes `[blocks, 256]` numbers to codes and scales. The logarithm of a number gives its band,
    /// and rounding down its code in the band; the nearest code differs from that by at most one.
    fn encode(&self, numbers: &Tensor) -> Result<(Tensor, Tensor)> {
        let magnitudes = numbers.abs()?;
        let scales = magnitudes.max_keepdim(D::Minus1)?;
        let magnitudes = magnitudes.broadcast_div(&(&scales + scales.eq_scalar(0.0)?.to_dtype(DType::F32)?)?)?;
        let last = (self.range.bands().len() - 1) as f64;
        let logarithm = magnitudes.maximum_scalar(1e-9)?.log()?.affine(1.0 / std::f64::consts::LN_10, last + 1.0)?;
        let band = logarithm.floor()?.clamp_scalar(0.0, last)?;
        let count = self.look_up(Table::Counts, &band)?;
        let offset = (magnitudes.mul(&self.look_up(Table::Reciprocals, &band)?)?.affine(1.0 / 0.9, -0.1 / 0.9)? * &count)?;
        let offset = offset.floor()?.maximum_scalar(0.0)?.minimum(&count.affine(1.0, -1.0)?)?;
        let code = (offset + self.look_up(Table::Firsts, &band)?)?;
        let above = self.look_up(Table::Borders, &code)?;
        let below = self.look_up(Table::Borders, &code.affine(1.0, -1.0)?)?;
        let code = ((&code + magnitudes.gt(&above)?.to_dtype(DType::F32)?)? - magnitudes.le(&below)?.to_dtype(DType::F32)?)?;
        let code = match self.range {
            Range::Unsigned => code,
            Range::Signed => {
                let negative = (numbers.lt_scalar(0.0)? * code.gt_scalar(0.0)?)?;
                negative.where_cond(&code.minimum_scalar(127.0)?.affine(1.0, 128.0)?, &code)?
            }
        };
        Ok((code.to_dtype(DType::U8)?, scales.squeeze(D::Minus1)?))
    }
}

/// Reshapes to `[blocks, 256]`, padded with zeros.
fn in_blocks(tensor: &Tensor) -> Result<Tensor> {
    let elements = tensor.flatten_all()?;
    let count = elements.elem_count();
    elements.pad_with_zeros(0, 0, count.div_ceil(BLOCK) * BLOCK - count)?.reshape(((), BLOCK))
}

impl Algorithm for AdamW8bit {
    const PARTS: &'static [&'static str] = &["mean", "mean_scale", "square", "square_scale"];

    fn parts(&self, name: &str, dims: &[usize], own: &[usize]) -> Vec<StateTensor> {
        if is_small(dims) {
            return self.exact.parts(name, dims, own);
        }
        let blocks = own.iter().product::<usize>().div_ceil(BLOCK);
        let part = |part: &'static str| if part.ends_with("scale") { (part, vec![blocks], DType::F32) } else { (part, vec![blocks, BLOCK], DType::U8) };
        Self::PARTS.iter().copied().map(part).collect()
    }

    fn unit(&self, _: &str, dims: &[usize]) -> usize {
        if is_small(dims) { 1 } else { BLOCK }
    }

    fn on_host(&self, context: StepContext, dims: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> Result<()> {
        let [mean, mean_scales, square, square_scales] = state else { return self.exact.on_host(context, dims, parameter, gradient, state) };
        let step = self.exact.coefficients(context);
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

    fn by_operations(&self, context: StepContext, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> Result<Tensor> {
        let [mean_codes, mean_scales, square_codes, square_scales] = state else { return self.exact.by_operations(context, parameter, gradient, state) };
        let mean = self.signed.decode(mean_codes, mean_scales)?;
        let square = self.unsigned.decode(square_codes, square_scales)?;
        let [new, mean, square] = self.exact.stepped(context, &in_blocks(parameter)?, &in_blocks(gradient)?, &mean, &square)?;
        for (tables, numbers, old_codes, old_scales) in [(&self.signed, mean, mean_codes, mean_scales), (&self.unsigned, square, square_codes, square_scales)] {
            let (codes, scales) = tables.encode(&numbers)?;
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

    /// Mean squared error of a regression with noisy targets after some steps, and the bytes of the state.
    fn regression(kind: Kind, steps: u64) -> (f64, u64) {
        let (x, goal) = (tensor(&[256, 64], 1), tensor(&[64, 80], 2));
        let y = (x.matmul(&goal).unwrap() + tensor(&[256, 80], 3)).unwrap();
        let weight = Tensor::zeros((64, 80), DType::F32, &Device::Cpu).unwrap();
        let mut optimizer = build(kind, &Settings::default(), &crate::exec::Placement::Memory(Device::Cpu)).unwrap();
        let error = |weight: &Tensor| (x.matmul(weight).unwrap() - &y).unwrap();
        for step in 1..=steps {
            let gradient = x.t().unwrap().matmul(&error(&weight)).unwrap().affine(1.0 / 256.0, 0.0).unwrap();
            optimizer.update("x", &weight, &gradient, 0.02, step).unwrap();
        }
        (error(&weight).sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap().into(), optimizer.bytes())
    }

    #[test]
    fn converges_like_f32_with_a_quarter_of_the_memory() {
        for steps in [10, 50, 300] {
            let ((exact, bytes), (ours, few)) = (regression(Kind::AdamW, steps), regression(Kind::AdamW8bit, steps));
            assert!((ours / exact - 1.0).abs() < 0.02, "{steps}: {ours} instead of {exact}");
            assert!(few * 10 <= bytes * 3, "{few} of {bytes} bytes");
        }
    }

    #[test]
    fn codes_by_tensor_operations_are_as_near_as_on_the_host() {
        let mut values = numbers(16 * BLOCK, 5);
        values.iter_mut().enumerate().for_each(|(i, x)| *x *= 10f32.powi(-(i as i32 % 9)));
        values[3 * BLOCK..4 * BLOCK].fill(0.0);
        for range in [Range::Signed, Range::Unsigned] {
            let input: Vec<f32> = values.iter().map(|x| if range == Range::Signed { *x } else { x.abs() }).collect();
            let tables = Tables::upload(range, &Device::Cpu).unwrap();
            let (codes, scales) = tables.encode(&Tensor::from_slice(&input, (16, BLOCK), &Device::Cpu).unwrap()).unwrap();
            let back = tables.decode(&codes, &scales).unwrap().to_vec2::<f32>().unwrap();
            for (block, back) in input.chunks(BLOCK).zip(back) {
                let (mut codes, mut ours) = ([0; BLOCK], [0.0; BLOCK]);
                let scale = dynamic_8bit::encode(range, block, &mut codes);
                dynamic_8bit::decode(range, &codes, scale, &mut ours);
                for ((x, ours), theirs) in block.iter().zip(ours).zip(back) {
                    let (near, far) = ((x - ours).abs(), (x - theirs).abs());
                    assert!(far <= near * 1.000_1 + 1e-6 * x.abs(), "{range:?} {x}: {ours} and {theirs}");
                    assert!(theirs == 0.0 || *x != 0.0, "{range:?}: zero became {theirs}");
                    assert!(theirs != 0.0 || *x == 0.0 || range == Range::Signed, "{x} became zero");
                }
            }
        }
    }

    /// Zero gradients after a single nonzero one must not cause large steps.
    #[test]
    fn small_elements_of_a_block_do_not_diverge() {
        let x = Tensor::zeros(MIN_ELEMENTS, DType::F32, &Device::Cpu).unwrap();
        let mut gradient = vec![1e-4f32; MIN_ELEMENTS];
        gradient[0] = 1.0;
        let gradient = Tensor::from_vec(gradient, MIN_ELEMENTS, &Device::Cpu).unwrap();
        let mut optimizer = build(Kind::AdamW8bit, &Settings::default(), &crate::exec::Placement::Memory(Device::Cpu)).unwrap();
        optimizer.update("x", &x, &gradient, 0.01, 1).unwrap();
        for step in 2..=10 {
            optimizer.update("x", &x, &gradient.zeros_like().unwrap(), 0.01, step).unwrap();
        }
        let max = x.abs().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        assert!(max < 0.1, "{max}");
    }
}
