//! Property: quantization rounds to the nearest of 256 levels.

use proptest::prelude::*;
use proptest::sample::select;

use super::given::{FLOATS, Values, config, long, model};
use crate::common::{DType, Desk, Tensor, Tensors, all};
use compress::pass::{GranularityKind, QuantizeDynamic, WeightObserver};

/// A written quantized weight with its original values.
struct Quantized {
    before: Vec<f64>,
    levels: Vec<f64>,
    scales: Vec<f64>,
    zeros: Vec<f64>,
    scale_type: DType,
}

impl Quantized {
    /// Values with a common scale.
    fn run(&self) -> usize {
        self.levels.len() / self.scales.len()
    }

    /// The dequantized values.
    fn after(&self) -> Vec<f64> {
        let run = self.run();
        self.levels.iter().enumerate().map(|(i, q)| (q - self.zeros[i / run]) * self.scales[i / run]).collect()
    }

    fn errors(&self, power: i32) -> Vec<f64> {
        let powers: Vec<f64> = self.before.iter().zip(self.after()).map(|(x, y)| (x - y).powi(power)).collect();
        powers.chunks(self.run()).map(|run| run.iter().sum()).collect()
    }
}

fn quantized(before: &Tensors, pass: &QuantizeDynamic) -> Vec<Quantized> {
    let after = Desk::new().apply(before, pass.clone()).unwrap();
    let one = |(name, tensor): (&String, &Tensor)| {
        let (q, scale, zero) = (&after[name], &after[&format!("{name}_scale")], after.get(&format!("{name}_zero_point")));
        assert_eq!((q.dtype, &q.shape), (DType::I8, &tensor.shape));
        assert_eq!(zero.is_none(), pass.symmetric, "symmetric means no zero points in the file");
        if let Some(zero) = zero {
            assert_eq!((zero.dtype, &zero.shape), (DType::I8, &scale.shape));
        }
        let zeros = zero.map_or(vec![0.0; scale.bits().len()], Tensor::values);
        Quantized { before: tensor.values(), levels: q.values(), scales: scale.values(), zeros, scale_type: scale.dtype }
    };
    before.iter().map(one).collect()
}

/// Checks every weight against its scales.
fn check(before: &Tensors, pass: &QuantizeDynamic) {
    for weight in quantized(before, pass) {
        let run = weight.run();
        for (i, (x, q)) in weight.before.iter().zip(&weight.levels).enumerate() {
            let (scale, zero) = (weight.scales[i / run], weight.zeros[i / run]);
            assert!(scale.is_finite() && scale > 0.0, "scale {scale}: {pass:?}");
            let exact = x / scale + zero;
            // Divisions and sums are computed in f32.
            let slack = 0.5 + 1e-4;
            if exact < -128.0 {
                assert_eq!(*q, -128.0, "{x} with scale {scale} and zero point {zero}");
            } else if exact > 127.0 {
                assert_eq!(*q, 127.0, "{x} with scale {scale} and zero point {zero}");
            } else {
                assert!((q - exact).abs() <= slack, "{x} with scale {scale} and zero point {zero} became {q}: {pass:?}");
            }
            assert!(*x != 0.0 || q == &zero, "zero does not stay zero: {pass:?}");
        }
    }
}

/// Matrices of whole groups.
fn matrices(values: Values) -> impl Strategy<Value = (usize, Tensors)> {
    (1..=5usize, 1..=3usize).prop_flat_map(move |(size, groups)| {
        let shapes = (1..=6usize).prop_map(move |rows| vec![rows, size * groups]).boxed();
        (Just(size), model(&FLOATS, shapes, values, 1..=3))
    })
}

fn pass(granularity: GranularityKind, size: usize, symmetric: bool, observer: WeightObserver) -> QuantizeDynamic {
    let group_size = (granularity == GranularityKind::Group).then_some(size);
    QuantizeDynamic { granularity, group_size, symmetric, observer, targets: all(), ..Default::default() }
}

const KINDS: [GranularityKind; 3] = [GranularityKind::Tensor, GranularityKind::Channel, GranularityKind::Group];

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn values_go_to_the_nearest_level((size, before) in matrices(Values::Finite), kind in select(&KINDS[..]), symmetric in any::<bool>(), mse in any::<bool>()) {
        check(&before, &pass(kind, size, symmetric, if mse { WeightObserver::Mse } else { WeightObserver::Minmax }));
    }

    #[test]
    fn scales_cover_the_range_and_finer_ones_are_not_larger((size, before) in matrices(Values::Finite), symmetric in any::<bool>()) {
        let [tensor, channel, group] = KINDS.map(|kind| quantized(&before, &pass(kind, size, symmetric, WeightObserver::Minmax)));
        for ((tensor, channel), group) in tensor.iter().zip(&channel).zip(&group) {
            for weight in [tensor, channel, group] {
                for (values, scale) in weight.before.chunks(weight.run()).zip(&weight.scales) {
                    let (low, high) = values.iter().map(|v| f64::from(*v as f32)).fold((0f64, 0f64), |(low, high), v| (low.min(v), high.max(v)));
                    let exact = if symmetric { high.max(-low) / 127.5 } else { (high - low) / 255.0 };
                    let expected = Tensor::floats(weight.scale_type, &[1], &[exact]).values()[0];
                    // The scale of only zeros is arbitrary.
                    let expected = if exact > 0.0 { expected } else { f64::from(f32::EPSILON) };
                    prop_assert!(scale * 1.01 >= exact, "{} cuts off what {} would reach", scale, exact);
                    prop_assert!((scale / expected - 1.0).abs() <= 1.0 / 128.0 || (scale - expected).abs() <= 6e-8, "{} is not {}", scale, expected);
                }
            }
            // The scale of a row of zeros is arbitrary.
            let real = |weight: &Quantized, i: usize| weight.before[i * weight.run()..(i + 1) * weight.run()].iter().any(|v| v.abs() > 1e-4);
            let groups = group.scales.len() / channel.scales.len();
            for (i, scale) in group.scales.iter().enumerate().filter(|(i, _)| real(group, *i)) {
                prop_assert!(*scale <= channel.scales[i / groups]);
                prop_assert!(channel.scales[i / groups] <= tensor.scales[0]);
            }
        }
    }

    #[test]
    fn non_finite_values_do_not_affect_others((size, before) in matrices(Values::Any), kind in select(&KINDS[..]), symmetric in any::<bool>(), mse in any::<bool>()) {
        let pass = pass(kind, size, symmetric, if mse { WeightObserver::Mse } else { WeightObserver::Minmax });
        let narrow: Tensors = before.into_iter().filter(|(_, tensor)| tensor.dtype != DType::F64).collect();
        prop_assume!(!narrow.is_empty());
        let without = narrow.iter().map(|(name, t)| (name.clone(), Tensor::floats(t.dtype, &t.shape, &t.values().iter().map(|v| if v.is_finite() { *v } else { 0.0 }).collect::<Vec<_>>()))).collect();
        for (with, without) in quantized(&narrow, &pass).iter().zip(quantized(&without, &pass)) {
            prop_assert_eq!((&with.scales, &with.zeros), (&without.scales, &without.zeros));
            for ((value, level), plain) in with.before.iter().zip(&with.levels).zip(&without.levels) {
                let end = if *value > 0.0 { 127.0 } else { -128.0 };
                prop_assert_eq!(*level, if value.is_infinite() { end } else { *plain }, "{}", value);
            }
        }
    }

    #[test]
    fn the_search_by_error_never_increases_it((size, before) in matrices(Values::Finite), kind in select(&KINDS[..]), symmetric in any::<bool>()) {
        let all = [WeightObserver::Minmax, WeightObserver::Mse, WeightObserver::L4].map(|observer| quantized(&before, &pass(kind, size, symmetric, observer)));
        let [plain, squares, fourth] = &all;
        for (searched, power) in [(squares, 2), (fourth, 4)] {
            for (plain, searched) in plain.iter().zip(searched) {
                for (plain, searched) in plain.errors(power).into_iter().zip(searched.errors(power)) {
                    prop_assert!(searched <= plain * (1.0 + 1e-4), "{} is more than {}", searched, plain);
                }
            }
        }
    }
}

#[test]
fn doubles_outside_the_range_of_scales_are_rejected() {
    let before = Tensors::from([("t.weight".to_owned(), Tensor::floats(DType::F64, &[1, 2], &[1.0, -1e300]))]);
    for kind in KINDS {
        let error = Desk::new().apply(&before, pass(kind, 1, true, WeightObserver::Minmax)).unwrap_err().to_string();
        assert!(error.contains("`t.weight`"), "{error}");
    }
}

#[test]
fn long_tensors_are_quantized_like_short_ones() {
    for (seed, dtype) in FLOATS.into_iter().enumerate() {
        for shape in [[1301, 211], [3, 70_007]] {
            let before = long(dtype, &shape, seed as u64);
            for (kind, size) in [(GranularityKind::Tensor, 0), (GranularityKind::Channel, 0), (GranularityKind::Group, if shape[0] == 3 { 73 } else { 211 })] {
                check(&before, &pass(kind, size, seed % 2 == 0, WeightObserver::Mse));
            }
        }
    }
}
