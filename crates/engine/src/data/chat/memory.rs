//! Memory of a rendering, which is limited because templates are untrusted.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Maximum number of bytes of all values that a rendering creates.
const CREATED: usize = 1 << 29;
/// Maximum size of a value with the values in it.
const NESTED: usize = 1 << 28;
/// Maximum number of lists and mappings around a value.
const DEPTH: usize = 200;
/// Size of a value without its text.
const VALUE: usize = size_of::<Value>();

/// Counts the bytes of the values that a rendering creates.
#[derive(Clone, Default)]
pub(super) struct Memory(Arc<AtomicUsize>);

impl Memory {
    /// Counts the bytes of a value before it is created. Fails beyond the limit.
    pub(super) fn reserve(&self, bytes: usize) -> Result<(), Error> {
        let used = self.0.load(Relaxed).saturating_add(bytes);
        self.0.store(used, Relaxed);
        if used > CREATED { Err(too_large()) } else { Ok(()) }
    }

    /// Counts a new value, but not those in it. Fails if it is too large or nested too deeply.
    pub(super) fn count(&self, value: Value) -> Result<Value, Error> {
        require_small([&value])?;
        self.reserve(value.as_str().map_or_else(|| value.len().unwrap_or(0).saturating_mul(VALUE), str::len))?;
        Ok(value)
    }
}

/// Fails if values contain more than a filter may convert to a text.
pub(super) fn require_small<'v>(values: impl IntoIterator<Item = &'v Value>) -> Result<(), Error> {
    let mut left = NESTED;
    values.into_iter().try_for_each(|value| take_size(value, 0, &mut left))
}

fn take_size(value: &Value, depth: usize, left: &mut usize) -> Result<(), Error> {
    let inner = require_depth(depth)?;
    *left = left.checked_sub(value.as_str().map_or(0, str::len).saturating_add(VALUE)).ok_or_else(too_large)?;
    let is_mapping = value.kind() == ValueKind::Map;
    if is_mapping || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        for item in value.try_iter()? {
            if is_mapping {
                take_size(&value.get_item(&item)?, inner, left)?;
            }
            take_size(&item, inner, left)?;
        }
    }
    Ok(())
}

/// The depth of the values in a value.
pub(super) fn require_depth(depth: usize) -> Result<usize, Error> {
    if depth < DEPTH { Ok(depth.saturating_add(1)) } else { Err(too_large()) }
}

fn too_large() -> Error {
    Error::new(ErrorKind::InvalidOperation, "a value is too large, or too much memory is used")
}

/// A text that is written in parts.
pub(super) struct Text<'m> {
    memory: &'m Memory,
    pub(super) text: String,
}

impl Text<'_> {
    pub(super) fn new(memory: &Memory) -> Text<'_> {
        Text { memory, text: String::new() }
    }

    pub(super) fn push(&mut self, part: &str) -> Result<(), Error> {
        self.memory.reserve(part.len())?;
        self.text.push_str(part);
        Ok(())
    }
}
