//! Checks of memory and of weights.

use crate::error::{Error, Result};
use crate::store::ByteSize;

/// Returns an error if more memory is needed than the limit, in bytes.
pub(super) fn require_bytes(name: &str, what: &str, needed: u64, limit: u64) -> Result<()> {
    if needed <= limit {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{name}: {what} about {}, but the memory limit is {}", ByteSize(needed), ByteSize(limit)),
        hint: "increase the limit `memory`, or add large layers to `ignore`".into(),
    })
}

/// Returns an error if a weight contains infinite or NaN values.
pub(super) fn require_finite(name: &str, values: &[f32]) -> Result<()> {
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(Error::tensor(name, "contains infinite or NaN values", "use a checkpoint without such values, or add it to `ignore`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_itself_can_be_used() {
        let needs = |needed: u64| require_bytes("prune", "the blocks need", needed, 1000);
        needs(1000).unwrap();
        assert!(needs(1001).unwrap_err().to_string().starts_with("prune: the blocks need about"));
    }
}
