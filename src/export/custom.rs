//! Output formats that the program registers.

use std::fmt;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::{Export, Exported, FORMATS, Format, SizeForecast};
use crate::entry::Constructor;
use crate::error::{Error, Result};
use crate::files::Destination;
use crate::model::Model;
use crate::registry::Registry;
use crate::run_state::RunState;
use crate::store::writer::{Prebuilt, Written, measure};
use crate::store::{Weight, hash};
use crate::work::Work;

/// A weight to be written. Its values are computed when they are visited.
pub struct WeightValues<'a> {
    name: &'a str,
    weight: Weight,
}

impl WeightValues<'_> {
    /// The name in the model.
    pub fn name(&self) -> &str {
        self.name
    }

    /// Sizes of the axes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.weight.shape
    }

    /// Number of values.
    pub fn elements(&self) -> usize {
        self.weight.elements()
    }

    /// Calls `consume` with all values in row-major order, a block at a time. Quantized values are
    /// dequantized.
    ///
    /// # Errors
    /// The values cannot be computed, or `consume` fails.
    pub fn visit(&self, consume: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let mut values = Vec::new();
        self.weight.visit(self.weight.row(), &mut |block| {
            values.resize(block.now.elements(), 0.0);
            if !block.now.decode(0, &mut values) {
                return Err(Error::tensor(self.name, format!("is of type {}", self.weight.describe()), "only floats can be written in this format"));
            }
            consume(&values)
        })
    }
}

impl fmt::Debug for WeightValues<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightValues").field("name", &self.name).field("shape", &self.shape()).finish_non_exhaustive()
    }
}

/// An output format of one file, which stores every value exactly.
pub trait CustomFormat: fmt::Debug + Send + Sync {
    /// Returns the name of the file.
    fn file(&self) -> String;

    /// Returns the exact size of the file in bytes.
    ///
    /// # Errors
    /// The format cannot represent a weight.
    fn size(&self, weights: &[WeightValues]) -> Result<u64>;

    /// Writes the file.
    ///
    /// # Errors
    /// Computing or writing fails.
    fn write(&self, weights: &[WeightValues], file: &mut dyn Write) -> Result<()>;

    /// Reads values of a weight of the written file, beginning with the value number `start` in row-major
    /// order. They are compared with the computed ones.
    ///
    /// # Errors
    /// Reading fails, or the file does not contain the values.
    fn read(&self, file: &Path, name: &str, start: usize, values: &mut [f32]) -> Result<()>;
}

pub(super) static REGISTERED: Registry<Constructor<Export>> = Registry::new();

/// Registers a format for the lifetime of the process, so that recipes and
/// [`Export::from_name`](super::Export::from_name) know it. `make` receives the options, or null.
///
/// # Errors
/// The name is taken.
pub fn register_format<F: CustomFormat + 'static>(name: &'static str, make: impl Fn(&Value) -> Result<F> + Send + Sync + 'static) -> Result<()> {
    let export = move |options: Value| make(&options).map(|format| Export::Custom(Custom { name, options, format: Arc::new(format) }));
    let is_added = REGISTERED.add(name, FORMATS.contains(&name), Arc::new(export));
    if is_added { Ok(()) } else { Err(Error::option("export", format!("the format `{name}` already exists"))) }
}

/// An output format that the program has registered.
#[derive(Debug, Clone)]
pub struct Custom {
    name: &'static str,
    options: Value,
    format: Arc<dyn CustomFormat>,
}

impl PartialEq for Custom {
    fn eq(&self, other: &Custom) -> bool {
        (self.name, &self.options) == (other.name, &other.options)
    }
}

impl Custom {
    fn weights<'m>(&self, model: &'m Model) -> Vec<WeightValues<'m>> {
        model.weights.by_name.iter().map(|(name, weight)| WeightValues { name, weight: weight.dense(name) }).collect()
    }

    /// Compares the values of a weight in the file with the computed ones, bit for bit.
    fn verify(&self, path: &Path, weight: &WeightValues) -> Result<()> {
        let (mut start, mut stored) = (0usize, Vec::new());
        weight.visit(&mut |computed| {
            stored.resize(computed.len(), 0.0);
            self.format.read(path, weight.name, start, &mut stored)?;
            if let Some(at) = computed.iter().zip(&stored).position(|(a, b)| a.to_bits() != b.to_bits()) {
                let reason = format!("value {} of `{}` is {} instead of {}", start + at, weight.name, stored[at], computed[at]);
                return Err(Error::Verification { path: path.to_owned(), reason });
            }
            start += computed.len();
            Ok(())
        })
    }
}

impl Format for Custom {
    fn name(&self) -> &'static str {
        self.name
    }

    fn options(&self) -> Value {
        self.options.clone()
    }

    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast> {
        let weights = self.weights(model);
        if let Some(WeightValues { name, weight }) = weights.iter().find(|values| !values.weight.is_float()) {
            return Err(Error::tensor(name, format!("is of type {}", weight.describe()), format!("`{}` stores only floats", self.name)));
        }
        Ok(SizeForecast { files: vec![self.format.file()], bytes: self.format.size(&weights)?, exact: !run.is_estimated(), tensors: weights.len() })
    }

    fn write(&self, model: &Model, _run: &RunState, folder: &Destination, _prebuilt: Option<&Prebuilt>, work: &Work) -> Result<Exported> {
        let (weights, name) = (self.weights(model), self.format.file());
        let path = folder.path().join(&name);
        let mut file = BufWriter::new(fs::File::options().write(true).create_new(true).open(&path).map_err(Error::io("create", &path))?);
        self.format.write(&weights, &mut file)?;
        file.into_inner().map_err(|e| Error::io("write", &path)(e.into_error()))?.sync_all().map_err(Error::io("write", &path))?;
        let bytes = fs::metadata(&path).map_err(Error::io("open", &path))?.len();
        let expected = self.format.size(&weights)?;
        if bytes != expected {
            return Err(Error::Verification { path, reason: format!("has {bytes} bytes instead of {expected}") });
        }
        work.run("Verifying", &weights, |values| values.weight.value_bytes(), |values| self.verify(&path, values))?;
        let measured = work.run("Measuring", &weights, |values| values.weight.value_bytes(), |values| measure(&values.weight))?;
        Ok(Exported {
            files: vec![Written { name, bytes, blake3: hash::hash_file(&path, work)? }],
            how: "read back: every value is equal to the computed one".into(),
            max_abs_error: 0.0,
            tensors: weights.len(),
            encodings: weights.iter().map(|values| values.weight.describe()).collect(),
            weights: weights.iter().map(|values| values.name.to_owned()).zip(measured).collect(),
            stored_weights: None,
            config: None,
            notes: Vec::new(),
        })
    }
}
