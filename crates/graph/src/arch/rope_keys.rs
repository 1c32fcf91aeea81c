//! Keys of the parameters of rotary embeddings in `config.json`: of transformers 5 and 4.

use serde_json::Value;

use crate::error::{Error, Result};

/// Fails if both keys have values, and they differ: transformers 5 uses the older key, transformers 4 and
/// other programs may use either.
pub fn check_rope_keys<'v>(get: impl Fn(&'static str) -> Option<&'v Value>) -> Result<()> {
    let (new, old) = (get("rope_parameters"), get("rope_scaling").filter(|old| old.as_object().is_some_and(|old| !old.is_empty())));
    if new.is_none() || old.is_none() || new == old {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: "config.json: `rope_parameters` and `rope_scaling` with different values".into(),
        hint: "keep the correct one and remove the other".into(),
    })
}
