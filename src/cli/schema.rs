//! `compress schema`

use super::output;
use crate::error::Result;
use crate::recipe::Recipe;

pub(super) fn run() -> Result<()> {
    output::json(&schemars::schema_for!(Recipe))
}
