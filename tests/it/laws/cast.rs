//! Property: casting rounds to nearest, half to even.

use proptest::prelude::*;
use proptest::sample::select;

use super::given::{FLOATS, Values, config, infinity, long, model, shape, sign};
use crate::common::{DType, Desk, Tensor, Tensors, all, float_bits, float_value, read};
use compress::pass::{Cast, FloatFormat, Overflow};

const FORMATS: [(FloatFormat, DType); 3] = [(FloatFormat::F16, DType::F16), (FloatFormat::Bf16, DType::BF16), (FloatFormat::F32, DType::F32)];

fn cast(to: FloatFormat, overflow: Overflow) -> Cast {
    Cast { to, overflow, targets: all(), ignore: Vec::new() }
}

/// The magnitude in `to` nearest to a finite magnitude, determined from its two neighbors; infinity on
/// overflow.
fn nearest(to: DType, value: f64) -> u64 {
    let (mut low, mut high) = (0, infinity(to));
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if float_value(to, middle) <= value { low = middle } else { high = middle }
    }
    let below = float_value(to, low);
    // Beyond the largest value, the step size continues as if the format had more exponents.
    let above = if high == infinity(to) { 2.0 * below - float_value(to, low - 1) } else { float_value(to, high) };
    match value.total_cmp(&(below + (above - below) / 2.0)) {
        std::cmp::Ordering::Less => low,
        std::cmp::Ordering::Greater => high,
        std::cmp::Ordering::Equal => low + low % 2,
    }
}

/// The cast value, and whether a finite value overflowed.
fn rounded(from: DType, to: DType, bits: u64) -> (u64, bool) {
    let value = float_value(from, bits);
    let minus = if value.is_sign_negative() { sign(to) } else { 0 };
    let magnitude = if value.is_infinite() { infinity(to) } else { nearest(to, value.abs()) };
    (magnitude | minus, value.is_finite() && magnitude == infinity(to))
}

/// Compares the cast of a tensor with the definition, including overflowing values.
fn check(before: &Tensor, after: Result<&Tensor, String>, to: DType, overflow: Overflow) {
    let expected: Vec<(u64, bool)> = before.bits().into_iter().map(|bits| rounded(before.dtype, to, bits)).collect();
    let becomes_zero = |(value, (bits, _)): (f64, &(u64, bool))| !value.is_nan() && bits & (sign(to) - 1) == 0;
    let underflows = before.values().iter().any(|value| *value != 0.0) && before.values().into_iter().zip(&expected).all(becomes_zero);
    let after = match after {
        Ok(after) => after,
        Err(error) => {
            assert!(underflows || overflow == Overflow::Error && expected.iter().any(|(_, past)| *past), "{error}");
            return assert!(error.contains("`t0.weight`"), "{error}");
        }
    };
    assert!(!underflows, "all values became zero silently");
    assert_eq!((after.dtype, &after.shape), (to, &before.shape));
    for ((before, after), (expected, past)) in before.values().into_iter().zip(after.bits()).zip(expected) {
        assert!(!past || overflow == Overflow::Saturate, "{before} overflowed {to} silently");
        let expected = if past { expected - 1 } else { expected };
        let both_nan = before.is_nan() && float_value(to, after).is_nan();
        assert!(after == expected || both_nan, "{before:e} became {after:#x} in {to}, not {expected:#x}");
    }
}

proptest! {
    #![proptest_config(config(128))]

    #[test]
    fn casts_round_to_nearest(before in model(&FLOATS, shape(1..=4, 5), Values::Any, 1..=1), to in select(&FORMATS[..]), saturate in any::<bool>()) {
        let overflow = if saturate { Overflow::Saturate } else { Overflow::Error };
        let after = Desk::new().apply(&before, cast(to.0, overflow));
        check(&before["t0.weight"], after.as_ref().map(|t| &t["t0.weight"]).map_err(ToString::to_string), to.1, overflow);
    }

    #[test]
    fn casts_to_the_same_or_a_wider_format_are_exact(before in model(&[DType::F16, DType::BF16, DType::F32], shape(1..=4, 5), Values::Finite, 1..=3)) {
        let desk = Desk::new();
        let wide = desk.apply(&before, cast(FloatFormat::F32, Overflow::Error)).unwrap();
        for (format, dtype) in FORMATS {
            let same: Tensors = before.iter().filter(|(_, t)| t.dtype == dtype).map(|(n, t)| (n.clone(), t.clone())).collect();
            if same.is_empty() {
                continue;
            }
            prop_assert_eq!(&desk.apply(&same, cast(format, Overflow::Error)).unwrap(), &same);
            let there: Tensors = same.keys().map(|name| (name.clone(), wide[name].clone())).collect();
            prop_assert_eq!(desk.apply(&there, cast(format, Overflow::Error)).unwrap(), same);
        }
    }
}

#[test]
fn long_tensors_are_cast_like_short_ones() {
    let before = long(DType::F64, &[3, 70_007], 7);
    for (format, dtype) in FORMATS {
        let desk = Desk::new();
        let after = desk.apply(&before, cast(format, Overflow::Error)).unwrap();
        check(&before["t0.weight"], Ok(&after["t0.weight"]), dtype, Overflow::Error);
    }
}

#[test]
fn empty_tensors_are_cast() {
    let values = Tensor::random(DType::F32, &[2, 4], 3);
    let before = Tensors::from([("t.weight".to_owned(), Tensor::new(DType::F32, &[0, 4], Vec::new())), ("u.weight".to_owned(), values)]);
    for targets in [Vec::new(), all()] {
        let after = Desk::new().apply(&before, Cast { targets, ..cast(FloatFormat::Bf16, Overflow::Error) }).unwrap();
        assert_eq!((after["t.weight"].dtype, &after["t.weight"].shape[..]), (DType::BF16, &[0, 4][..]));
    }
}

#[test]
fn tensors_that_become_almost_zero_are_noted() {
    let values: Vec<u64> = (0..100u32).map(|at| float_bits(DType::F32, if at < 97 { 1e-9 } else { 1.0 })).collect();
    let before = Tensors::from([("t.weight".to_owned(), Tensor::from_bits(DType::F32, &[10, 10], &values))]);
    let desk = Desk::new();
    let output = desk.run(&desk.weights(&before), crate::common::pipeline().pass(cast(FloatFormat::F16, Overflow::Error))).unwrap();
    let notes = output.report.notes.join("\n");
    assert!(notes.contains("became entirely or almost entirely zero (`t.weight`: 97.0 %)") && !notes.contains("pruned"), "{notes}");
}

#[test]
fn narrow_floats_are_noted() {
    let values = |dtype, bytes: usize| Tensor::new(dtype, &[2, 4], vec![0; bytes]);
    let before = Tensors::from([("t.weight".to_owned(), values(DType::F8_E4M3, 8)), ("u.weight".to_owned(), values(DType::F32, 32))]);
    let desk = Desk::new();
    let pass = Cast { to: FloatFormat::Bf16, ..Cast::default() };
    let output = desk.run(&desk.weights(&before), crate::common::pipeline().pass(pass)).unwrap();
    let note = "cast leaves unchanged: 1 weight without scales in F8_E4M3 (the first: `t.weight`)";
    assert!(output.report.notes.iter().any(|found| found == note), "{:?}", output.report.notes);
}

#[test]
fn every_16_bit_pattern_survives_a_round_trip_through_f32() {
    for dtype in [DType::F16, DType::BF16] {
        let bits: Vec<u64> = (0..1 << 16).filter(|bits| bits & (sign(dtype) - 1) <= infinity(dtype)).collect();
        let before = Tensors::from([("t.weight".to_owned(), Tensor::from_bits(dtype, &[bits.len()], &bits))]);
        let desk = Desk::new();
        let there = desk.apply(&before, cast(FloatFormat::F32, Overflow::Error)).unwrap();
        let (back, _) = FORMATS.into_iter().find(|(_, d)| *d == dtype).unwrap();
        assert_eq!(desk.apply(&there, cast(back, Overflow::Error)).unwrap(), before);
    }
}

#[test]
fn the_configuration_names_the_new_format() {
    let desk = Desk::new();
    let model = |path: &std::path::Path| -> serde_json::Value { serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap() };
    let whole = Cast { to: FloatFormat::F16, ..Default::default() };
    let part = Cast { ignore: vec!["*norm*".parse().unwrap()], ..whole.clone() };
    for (pass, name) in [(whole, "float16"), (part, "float32")] {
        let output = desk.run(&desk.pico(DType::F32, 1), crate::common::pipeline().pass(pass)).unwrap();
        assert_eq!(model(&output.path)["torch_dtype"], name);
        assert_eq!(read(&output.path)["lm_head.weight"].dtype, DType::F16);
    }
}
