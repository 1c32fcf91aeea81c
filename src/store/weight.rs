//! Logical tensors: a dtype, a shape and an encoding now, bytes when they are asked for.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::affine::row;
use super::convert::Decoded;
use super::{Affine, BlockSink, Checkpoint, DType, RowsOf, StatedEncoding, WeightSource, assemble};
use crate::error::{Error, Result};
use crate::files;

/// How elements are represented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Encoding {
    /// As they are.
    Dense,
    /// As codes with scales or palettes.
    Affine(Affine),
}

/// What values of a weight are to those of the file that it was opened from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// They stand for the same, as closely as they are stored.
    #[default]
    File,
    /// They were learned from them: how far they are tells how much was learned.
    Learned,
    /// They stand for something else: scaled, folded, transposed. How far they are tells nothing.
    Rescaled,
}

/// Why elements of a weight are zero, if a pass has recorded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ZeroOrigin {
    /// A pass has pruned them.
    Pruning,
    /// They are small, and were rounded to integers.
    Rounding,
}

/// What a weight is for, where the file that it was opened from tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The matrix of a product, outputs first.
    Matrix,
    /// The kernel of a convolution, outputs first.
    Kernel,
    /// A table whose rows are looked up.
    Table,
    /// The matrix that scores the experts of a mixture.
    Router,
    /// Something else.
    Other,
}

/// A logical tensor. Cloning copies no data.
#[derive(Clone)]
pub struct Weight {
    /// Format of the values; for quantized weights, of the values that the integers stand for.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// How elements are represented.
    pub encoding: Encoding,
    /// Bytes that the weight takes in the files it was opened from.
    pub stored_bytes: u64,
    /// The tensors of the file that it was opened from.
    pub stored_as: Vec<String>,
    /// The type of the blocks that the file holds it in, where values are dense and the file is smaller than they are.
    pub stored_type: Option<&'static str>,
    /// What its values are to those of the file.
    pub origin: Origin,
    /// Why elements are zero, if a pass of this run has recorded it.
    pub zero_origin: Option<ZeroOrigin>,
    /// What it is for; names say where this does not.
    pub role: Option<Role>,
    /// Names of what reads it, where the file tells: patterns match them too.
    pub readers: Vec<String>,
    /// Of some rows of a weight, where they lie in it.
    pub rows_of: Option<RowsOf>,
    /// Number of the file and first byte in a checkpoint on another machine, which is downloaded once if weights are read in this order.
    pub remote_position: Option<(usize, u64)>,
    source: Arc<dyn WeightSource>,
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weight({} {:?} {:?})", self.dtype, self.shape, self.encoding)
    }
}

impl Weight {
    /// A weight with a source; meant for readers of formats and for tests.
    pub fn new(dtype: DType, shape: Vec<usize>, encoding: Encoding, source: Arc<dyn WeightSource>) -> Weight {
        Weight {
            dtype,
            shape,
            encoding,
            stored_bytes: 0,
            stored_as: Vec::new(),
            stored_type: None,
            origin: Origin::File,
            zero_origin: None,
            role: None,
            readers: Vec::new(),
            rows_of: None,
            remote_position: None,
            source,
        }
    }

    /// The same weight after a stage that changes what its bytes are; where it came from is kept.
    pub fn then(&self, dtype: DType, encoding: Encoding, source: Arc<dyn WeightSource>) -> Weight {
        Weight { dtype, encoding, source, stored_type: None, ..self.clone() }
    }

    /// The same weight, of another origin.
    #[must_use]
    pub fn of_origin(self, origin: Origin) -> Weight {
        Weight { origin, ..self }
    }

    /// The values as floats: the weight itself when it is dense already.
    pub fn dense(&self, name: &str) -> Weight {
        if self.encoding == Encoding::Dense {
            return self.clone();
        }
        let source = Decoded { upstream: self.source.clone(), dtype: self.dtype, name: name.to_owned() };
        self.then(self.dtype, Encoding::Dense, Arc::new(source))
    }

    /// Where the bytes come from.
    pub fn source(&self) -> Arc<dyn WeightSource> {
        self.source.clone()
    }

    /// Produces the bytes; see [`WeightSource::visit`].
    ///
    /// # Errors
    /// Reading fails, or a stage cannot represent a value.
    pub fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.source.visit(unit, sink)
    }

    /// All values, quantized ones as those that they stand for.
    ///
    /// # Errors
    /// Reading fails, or they are no floats.
    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        let mut values = vec![0f32; self.elements()];
        self.floats_into(name, &mut values).map(|()| values)
    }

    /// The same, written into memory for as many as there are.
    ///
    /// # Errors
    /// As [`floats`](Weight::floats).
    pub fn floats_into(&self, name: &str, values: &mut [f32]) -> Result<()> {
        let (mut at, mut floats) = (0, true);
        self.visit(1, &mut |block| {
            let count = block.now.elements();
            floats &= block.now.decode(0, &mut values[at..at + count]);
            at += count;
            Ok(())
        })?;
        if floats { Ok(()) } else { Err(Error::tensor(name, format!("is {}, where floats are needed", self.dtype), "")) }
    }

    /// How many elements are zero.
    ///
    /// # Errors
    /// Reading fails.
    pub fn zeros(&self) -> Result<u64> {
        let mut zeros = 0;
        self.visit(1, &mut |block| {
            zeros += block.now.zeros();
            Ok(())
        })?;
        Ok(zeros)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Rows, or none where they hold nothing: rows without columns take no bytes, so that a small file can say as many as it likes.
    pub fn filled_rows(&self) -> usize {
        self.shape.first().copied().filter(|_| self.elements() > 0).unwrap_or(0)
    }

    /// Elements of one output row.
    pub fn row(&self) -> usize {
        row(&self.shape)
    }

    /// Whether the values are floats of 16 bits or more.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// Bytes of the elements alone, scales left out.
    pub fn value_bytes(&self) -> u64 {
        let bits = if self.encoding == Encoding::Dense { self.dtype.bitsize() as u64 } else { self.code_bits().into() };
        (self.elements() as u64 * bits).div_ceil(8)
    }

    /// Bits of a code of a quantized weight; 8 for others.
    pub(super) fn code_bits(&self) -> u8 {
        match &self.encoding {
            Encoding::Dense => 8,
            Encoding::Affine(affine) => affine.codes.bits(),
        }
    }

    /// The encoding in the file in a few words, where it has not changed since.
    pub fn describe_stored(&self) -> String {
        self.stored_type.map_or_else(|| self.describe(), str::to_owned)
    }

    /// The encoding in a few words: `bf16`, `int8 channel`, `int4 group 128 asymmetric`.
    pub fn describe(&self) -> String {
        let Encoding::Affine(affine) = &self.encoding else { return self.dtype.to_string().to_lowercase() };
        let by = match affine.granularity {
            super::Granularity::Block([rows, _]) if affine.codes.is_palette() => format!("of {rows} rows"),
            super::Granularity::Tensor => "tensor".to_owned(),
            super::Granularity::Channel => "channel".to_owned(),
            super::Granularity::Group(size) => format!("group {size}"),
            super::Granularity::Block([high, wide]) => format!("block {high}x{wide}"),
        };
        format!("{} {by}{}", affine.codes, if affine.symmetric { "" } else { " asymmetric" })
    }
}

/// The weights of a model, by name.
#[derive(Debug, Clone, Default)]
pub struct Weights {
    /// By name, in alphabetical order.
    pub by_name: BTreeMap<String, Weight>,
    /// Metadata of the files that they came from.
    pub metadata: BTreeMap<String, String>,
    /// Folders whose weights are in files of their own: names begin with one of these and a slash.
    pub folders: Vec<String>,
}

impl Weights {
    /// Understands the tensors of a checkpoint as logical weights: integers together with their scales,
    /// sparse weights together with their masks, everything else as it is.
    ///
    /// # Errors
    /// Tensors that belong together do not fit each other.
    pub fn from_checkpoint(checkpoint: Checkpoint) -> Result<Weights> {
        Self::from_checkpoint_with(checkpoint, &|_| StatedEncoding::default())
    }

    /// The same, where `stated` returns the encoding that a configuration states for a weight.
    ///
    /// # Errors
    /// As [`from_checkpoint`](Weights::from_checkpoint).
    pub fn from_checkpoint_with(checkpoint: Checkpoint, stated: &dyn Fn(&str) -> StatedEncoding) -> Result<Weights> {
        let mut positions = BTreeMap::new();
        for (name, tensor) in &checkpoint.tensors {
            let (path, begin, _) = tensor.place();
            let file = checkpoint.files.iter().position(|file| file == path).filter(|_| files::is_remote(path));
            positions.extend(file.map(|file| (name.clone(), (file, begin))));
        }
        let mut weights = assemble::assemble(checkpoint, stated)?;
        for weight in weights.by_name.values_mut() {
            weight.remote_position = weight.stored_as.iter().filter_map(|name| positions.get(name).copied()).min();
        }
        Ok(weights)
    }

    /// The weight of this name.
    ///
    /// # Errors
    /// There is none; the error names the closest one.
    pub fn get(&self, name: &str) -> Result<&Weight> {
        self.by_name.get(name).ok_or_else(|| Error::NoMatch {
            field: "name",
            pattern: name.to_owned(),
            nearest: super::select::nearest(name, self.by_name.keys().map(String::as_str)),
        })
    }

    /// States why elements of weights are zero. Zeros of pruned weights stay what they are.
    pub fn set_zero_origin<'n>(&mut self, names: impl IntoIterator<Item = &'n str>, origin: ZeroOrigin) {
        for name in names {
            if let Some(weight) = self.by_name.get_mut(name).filter(|weight| weight.zero_origin != Some(ZeroOrigin::Pruning)) {
                weight.zero_origin = Some(origin);
            }
        }
    }

    /// The folder of a weight that is in a file of its own, if it is.
    pub fn folder(&self, name: &str) -> Option<&str> {
        in_folder(&self.folders, name).map(|(folder, _)| folder)
    }

    /// Number of elements of all weights.
    pub fn parameters(&self) -> u64 {
        self.by_name.values().map(|w| w.elements() as u64).sum()
    }
}

/// The folder that a name begins with, and what follows it.
pub(super) fn in_folder<'f, 'n>(folders: &'f [String], name: &'n str) -> Option<(&'f str, &'n str)> {
    let held = folders.iter().filter_map(|folder| Some((folder.as_str(), name.strip_prefix(folder.as_str())?.strip_prefix('/')?)));
    held.max_by_key(|(folder, _)| folder.len())
}
