//! Random inputs for properties: tensors of every float dtype and shape, including edge-case values.

use std::ops::RangeInclusive;

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed};

use crate::common::{DType, Tensor, Tensors, float_bits, float_value};

pub const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// Configuration with this number of cases and a fixed seed, unless the environment overrides them.
pub fn config(cases: u32) -> Config {
    let told = |name| std::env::var_os(name).is_some();
    let mut config = Config { failure_persistence: None, max_shrink_iters: 4096, ..Config::default() };
    if !told("PROPTEST_CASES") {
        config.cases = cases;
    }
    if !told("PROPTEST_RNG_SEED") {
        config.rng_seed = RngSeed::Fixed(0);
    }
    config
}

/// Number of bits of the exponent and of the fraction.
fn fields(dtype: DType) -> (u32, u32) {
    match dtype {
        DType::F16 => (5, 10),
        DType::BF16 => (8, 7),
        DType::F32 => (8, 23),
        _ => (11, 52),
    }
}

/// The bits of infinity; larger values are NaN.
pub fn infinity(dtype: DType) -> u64 {
    let (exponent, fraction) = fields(dtype);
    ((1 << exponent) - 1) << fraction
}

/// The sign bit.
pub fn sign(dtype: DType) -> u64 {
    let (exponent, fraction) = fields(dtype);
    1 << (exponent + fraction)
}

/// A key that orders magnitudes of different float dtypes by value, with NaN last.
pub fn rank(dtype: DType, bits: u64) -> u64 {
    let magnitude = bits & (sign(dtype) - 1);
    match magnitude.checked_sub(infinity(dtype)) {
        Some(payload) => f64::INFINITY.to_bits() + (payload << (52 - fields(dtype).1)),
        None => float_value(dtype, magnitude).to_bits(),
    }
}

/// Kind of values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values {
    /// All finite values of the format; doubles only in the range of f32.
    Finite,
    /// Including NaN and infinities.
    Any,
}

fn signed(dtype: DType, magnitude: impl Strategy<Value = u64> + 'static) -> BoxedStrategy<u64> {
    (magnitude, any::<bool>()).prop_map(move |(m, minus)| if minus { m | sign(dtype) } else { m }).boxed()
}

fn elements(dtype: DType, count: usize, values: Values) -> BoxedStrategy<Vec<u64>> {
    let ordinary = (-4.0..4.0f64).prop_map(move |v| float_bits(dtype, v)).boxed();
    let tied = select(vec![0.0, -0.0, 0.5, -0.5, 1.0, -1.0]).prop_map(move |v| float_bits(dtype, v)).boxed();
    let subnormal = signed(dtype, 1..1u64 << fields(dtype).1);
    let end = if (dtype, values) == (DType::F64, Values::Finite) { f64::from(f32::MAX).to_bits() + 1 } else { infinity(dtype) };
    let finite = prop_oneof![signed(dtype, 0..end), signed(dtype, end - (1 << fields(dtype).1)..end)].boxed();
    let wild = match values {
        Values::Finite => finite,
        Values::Any => prop_oneof![finite, signed(dtype, infinity(dtype)..sign(dtype)), signed(dtype, Just(infinity(dtype)))].boxed(),
    };
    let mixed = prop_oneof![8 => ordinary.clone(), 4 => tied.clone(), 1 => subnormal.clone(), 1 => wild];
    prop_oneof![3 => vec(mixed, count), 2 => vec(ordinary, count), 1 => vec(tied, count), 1 => vec(subnormal, count)].boxed()
}

/// A tensor of this shape, sometimes with a row of zeros or with only zeros.
pub fn tensor(dtype: DType, shape: Vec<usize>, values: Values) -> BoxedStrategy<Tensor> {
    let count: usize = shape.iter().product();
    let rows = shape.first().copied().unwrap_or(1).max(1);
    (elements(dtype, count, values), weighted(0.2, 0..rows))
        .prop_map(move |(mut bits, blank)| {
            if let Some(row) = blank {
                let row_length = count / rows;
                bits[row * row_length..(row + 1) * row_length].fill(0);
            }
            Tensor::from_bits(dtype, &shape, &bits)
        })
        .boxed()
}

/// Shapes with this number of dimensions of sizes up to `largest`.
pub fn shape(rank: RangeInclusive<usize>, largest: usize) -> BoxedStrategy<Vec<usize>> {
    vec(1..=largest, rank).boxed()
}

/// Tensors `t0.weight`, `t1.weight`, …, each of one of these dtypes.
pub fn model(dtypes: &'static [DType], shapes: BoxedStrategy<Vec<usize>>, values: Values, count: RangeInclusive<usize>) -> BoxedStrategy<Tensors> {
    let one = (select(dtypes), shapes).prop_flat_map(move |(dtype, shape)| tensor(dtype, shape, values));
    vec(one, count).prop_map(named).boxed()
}

fn named(tensors: Vec<Tensor>) -> Tensors {
    tensors.into_iter().enumerate().map(|(i, t)| (format!("t{i}.weight"), t)).collect()
}

/// A model of one tensor that is larger than a block, with rows of odd length and many equal values.
pub fn long(dtype: DType, shape: &[usize], seed: u64) -> Tensors {
    let mut tensor = Tensor::random(dtype, shape, seed);
    let steps: Vec<f64> = tensor.values().iter().enumerate().map(|(i, v)| if i % 3 == 0 { (v * 8.0).round() / 8.0 } else { *v }).collect();
    tensor = Tensor::floats(dtype, shape, &steps);
    named(vec![tensor])
}
