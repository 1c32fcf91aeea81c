//! How closely two runtimes must agree, and when they need not.

use crate::evaluation::Fidelity;

/// Tolerance relative to the largest output, or to 1 if that is smaller.
const TOLERANCE: f64 = 1e-3;
/// Minimum mean cosine similarity of models that multiply integers or 16-bit floats, in which values
/// halfway between two integers may round either way.
const MIN_COSINE: f64 = 0.99;

/// Whether two runtimes agree, and by how much they differ. `coarse`: the model multiplies integers or
/// 16-bit floats.
pub(super) fn judge(fidelity: &Fidelity, coarse: bool) -> (bool, String) {
    let ok = if coarse { fidelity.cosine >= MIN_COSINE } else { fidelity.max_abs_error <= TOLERANCE * fidelity.largest.max(1.0) };
    let difference = format!("largest difference {:.1e} for values up to {:.1}, mean cosine {:.6}", fidelity.max_abs_error, fidelity.largest, fidelity.cosine);
    (ok, difference)
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
    use super::*;

    /// A difference is an error unless rounding to eight bits explains it.
    #[test]
    fn static_int8_files_may_differ_at_the_outputs() {
        assert!(explanation(true, true).unwrap().contains("is correct"));
        assert!(explanation(false, true).unwrap().contains("cannot be compared"));
        assert_eq!(explanation(false, false), None);
    }
}
