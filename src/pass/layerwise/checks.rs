//! Checks of memory and of weights.

use super::parallel::are_finite;
use crate::data::DataSet;
use crate::error::{Error, Result};
use crate::store::ByteSize;

/// Returns an error if more memory is needed than the limit, in bytes.
pub(super) fn require_bytes(name: &str, what: &str, needed: u64, limit: u64) -> Result<()> {
    if needed <= limit {
        return Ok(());
    }
    // Rounded up, so that the number is a limit that suffices.
    let unit = 10u64.pow(needed.max(1000).ilog10() - 2);
    let needed = ByteSize(needed.div_ceil(unit).saturating_mul(unit));
    let reason = format!("{what} about {needed}, but the memory limit is {}", ByteSize(limit));
    Err(Error::run(name, reason, format!("set the limit `memory` to {needed} or more, or add large layers to `ignore`")))
}

/// Returns an error if a weight contains infinite or NaN values.
pub(super) fn require_finite(name: &str, values: &[f32]) -> Result<()> {
    match are_finite(values) {
        true => Ok(()),
        false => Err(Error::tensor(name, "contains infinite or NaN values", "use a checkpoint without such values, or add it to `ignore`")),
    }
}

/// Number of samples above which more of them rarely improve the weights.
const MANY_SAMPLES: usize = 512;

/// A note if all samples of a large data set were used without `samples`.
pub(super) fn many_samples_note(data: &DataSet, samples: usize) -> Option<String> {
    many_samples(data.is_limited(), samples)
}

fn many_samples(is_limited: bool, samples: usize) -> Option<String> {
    let times = samples / (MANY_SAMPLES / 4);
    let note = || format!("all {samples} calibration samples were used; the time grows with their number: `samples: 128` needs about {times} times less");
    (samples > MANY_SAMPLES && !is_limited).then(note)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_samples_are_noted_unless_they_are_limited() {
        assert_eq!([many_samples(false, 512), many_samples(true, 1280)], [None, None]);
        assert!(many_samples(false, 1280).is_some_and(|note| note.contains("all 1280") && note.contains("`samples: 128` needs about 10 times less")));
    }

    #[test]
    fn the_limit_itself_can_be_used() {
        let needs = |needed: u64| require_bytes("prune", "the blocks need", needed, 1000);
        needs(1000).unwrap();
        assert!(needs(1001).unwrap_err().to_string().starts_with("prune: the blocks need about"));
    }
}
