//! How closely two runtimes must agree, and when they need not.

use std::collections::BTreeMap;

use crate::evaluation::quantized_values::MIN_COSINE;
use crate::evaluation::{Fidelity, OutputFidelity};

/// Tolerance relative to the largest output, or to 1 if that is smaller.
const TOLERANCE: f64 = 1e-3;

/// Whether two runtimes agree, and by how much they differ. `coarse`: the model multiplies integers or
/// 16-bit floats. `rounding`: relative differences by which only one runtime rounds outputs; `None` if both
/// write them with 32 bits.
///
/// Integers are compared only if no output consists of floats.
pub(super) fn judge(fidelity: &Fidelity, coarse: bool, rounding: Option<&BTreeMap<String, f64>>) -> (bool, String) {
    if fidelity.outputs.is_empty() {
        let equal = fidelity.equal.values().copied().fold(1.0, f64::min);
        return (equal == 1.0, format!("{:.1} % of the integers are equal", 100.0 * equal));
    }
    let tolerance = |name: &String| TOLERANCE + rounding.and_then(|rounding| rounding.get(name)).copied().unwrap_or_default();
    let agrees = |(name, output): &(&String, &OutputFidelity)| output.max_abs_error <= tolerance(name) * output.largest.max(1.0);
    let wrong = fidelity.outputs.iter().find(|output| !coarse && !agrees(output)).map(|(_, output)| output);
    let (error, largest) = wrong.map_or((fidelity.max_abs_error, fidelity.largest), |output| (output.max_abs_error, output.largest));
    let difference = format!("largest difference {error:.1e} for values up to {largest:.1}, mean cosine {:.6}", fidelity.cosine);
    (if coarse { fidelity.cosine >= MIN_COSINE } else { wrong.is_none() }, difference)
}

/// Why the outputs of a file may differ between runtimes although it may be correct; `None` for files
/// whose outputs may not. `compared` is true if all quantized values were compared and agree.
pub(super) fn explanation(compared: bool, is_static: bool) -> Option<&'static str> {
    match (compared, is_static) {
        (true, _) => Some("The file is correct: each layer agrees, and rounding to eight bits amplifies differences of one step from layer to layer"),
        (false, true) => Some(
            "Rounding to eight bits amplifies differences of one step from layer to layer, and the values of a decoder with a KV cache or of experts cannot be compared one by one: evaluate the file on your own data",
        ),
        (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::data::{Batch, References};
    use crate::evaluation::{FidelityAccumulator, Outputs};

    /// Rounding of one output does not excuse a difference of another.
    #[test]
    fn only_outputs_that_are_rounded_may_differ_by_a_rounding() {
        let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 2 };
        let outputs = |half: f32, float: f32| {
            let output = |name: &str, value: f32| (name.to_owned(), Tensor::new(&[value, -value], &Device::Cpu).unwrap());
            Outputs::from([output("half", half), output("float", float)])
        };
        let agree = |half: f32, float: f32, rounding: f64| {
            let mut accumulator = FidelityAccumulator::default();
            accumulator.add(&batch, &outputs(10.0, 10.0), &outputs(half, float)).unwrap();
            judge(&accumulator.finish(), false, Some(&BTreeMap::from([("half".to_owned(), rounding)])))
        };
        let (bfloat16, float16) = (1.0 / 256.0, 1.0 / 2048.0);
        for (half, float, rounding, ok) in [
            (10.03, 10.0, bfloat16, true),
            (10.03, 10.0, float16, false),
            (10.06, 10.0, bfloat16, false),
            (10.014, 10.0, float16, true),
            (10.014, 10.0, 0.0, false),
            (10.03, 10.02, bfloat16, false),
            (10.0, 10.03, bfloat16, false),
            (f32::NAN, 10.0, bfloat16, false),
            (10.0, 10.0, 0.0, true),
        ] {
            let (found, difference) = agree(half, float, rounding);
            assert_eq!(found, ok, "{half} {float} {rounding}: {difference}");
        }
        // The message states the difference that is too large.
        assert!(agree(10.03, 10.02, bfloat16).1.starts_with("largest difference 2.0e-2"));
    }

    #[test]
    fn integers_are_equal() {
        let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 2 };
        let outputs = |last: i64| Outputs::from([("class".to_owned(), Tensor::new(&[3, last], &Device::Cpu).unwrap())]);
        for (last, expected) in [(4, (true, "100.0 % of the integers are equal")), (5, (false, "50.0 % of the integers are equal"))] {
            let mut accumulator = FidelityAccumulator::accepting_integers();
            accumulator.add(&batch, &outputs(4), &outputs(last)).unwrap();
            let (ok, difference) = judge(&accumulator.finish(), false, None);
            assert_eq!((ok, difference.as_str()), expected);
        }
        assert!(FidelityAccumulator::default().add(&batch, &outputs(4), &outputs(4)).is_err());
    }

    /// A difference is an error unless rounding to eight bits explains it.
    #[test]
    fn static_int8_files_may_differ_at_the_outputs() {
        assert!(explanation(true, true).unwrap().contains("is correct"));
        assert!(explanation(false, true).unwrap().contains("cannot be compared"));
        assert_eq!(explanation(false, false), None);
    }
}
