//! Tensors in files of any format.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::header::{Header, MAX_HEADER};
use super::quantization_spec::row;
use super::{Block, BlockSink, DType, Rows, View, WeightSource, block_elements, no_model};
use crate::error::{Error, Result};
use crate::files::File;

/// An open file and the offset of its data.
#[derive(Debug)]
pub struct DataFile {
    path: PathBuf,
    file: File,
    data: u64,
}

impl DataFile {
    /// Opens a safetensors file and reads its header.
    pub fn open(path: &Path) -> Result<(Arc<DataFile>, Header)> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let bytes = file.length();
        let rest = bytes.checked_sub(8).ok_or_else(|| Error::malformed(path, format!("{bytes} bytes are too few for a safetensors file")))?;
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(Error::io("read", path))?;
        let length = u64::from_le_bytes(length);
        let mut next = [0];
        // Headers start with `{`. For other file types, the length field consists of arbitrary
        // characters.
        let is_header = rest > 0 && file.read_exact_at(&mut next, 8).is_ok() && next == *b"{";
        let after = rest.checked_sub(length).filter(|_| (1..=MAX_HEADER).contains(&length)).ok_or_else(|| {
            Error::malformed(
                path,
                if length.to_le_bytes() == *b"version " {
                    "is a Git LFS pointer, not the file itself; run `git lfs pull`, or download the file".to_owned()
                } else if is_header || path.extension().is_some_and(|extension| extension == "safetensors") {
                    format!("the header claims {length} bytes in a file of {bytes} (at most {MAX_HEADER} are allowed): not a safetensors file, or truncated")
                } else {
                    return Error::run(path.display(), "is not a model", no_model::advice(path));
                },
            )
        })?;
        let mut json = vec![0; length as usize];
        file.read_exact_at(&mut json, 8).map_err(Error::io("read", path))?;
        let header = Header::parse(&json, after).map_err(|reason| Error::malformed(path, reason))?;
        Ok((Arc::new(DataFile { path: path.to_owned(), file, data: length.saturating_add(8) }), header))
    }

    /// Size of the file in bytes.
    pub(super) fn length(&self) -> u64 {
        self.file.length()
    }

    /// A file of another format, whose data section is the complete file.
    pub fn from_file(path: &Path, file: File) -> Arc<DataFile> {
        Arc::new(DataFile { path: path.to_owned(), file, data: 0 })
    }

    /// Reads bytes of the data section.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, self.data.saturating_add(offset)).map_err(Error::io("read", &self.path))
    }
}

/// A tensor in a file: type, shape and location.
#[derive(Debug, Clone)]
pub struct RawTensor {
    /// Element type.
    pub dtype: DType,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    file: Arc<DataFile>,
    begin: u64,
    bytes: u64,
}

impl RawTensor {
    /// A tensor at the offset `begin` of the file's data section. `bytes` must match dtype and shape.
    pub fn within(file: &Arc<DataFile>, dtype: DType, shape: Vec<usize>, begin: u64, bytes: u64) -> RawTensor {
        RawTensor { dtype, shape, file: file.clone(), begin, bytes }
    }

    /// Reinterprets the bytes as another type and shape.
    #[must_use]
    pub fn as_elements(&self, dtype: DType, shape: Vec<usize>) -> RawTensor {
        RawTensor { dtype, shape, ..self.clone() }
    }

    /// Size in the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Reads part of the tensor, starting at a byte offset within it.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read(self.begin.saturating_add(offset), buffer)
    }

    /// Reads a small tensor completely.
    pub fn read_all(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes as usize];
        self.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// The path of the file, the offset within its data section, and the size in bytes.
    pub fn location(&self) -> (&Path, u64, u64) {
        (self.path(), self.begin, self.bytes)
    }

    /// The file that contains the tensor.
    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

impl WeightSource for RawTensor {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let bits = self.dtype.bitsize();
        // Elements narrower than a byte are visited as bytes.
        let (elements, size, unit) = if bits < 8 { (self.bytes as usize, 1, 1) } else { (self.elements(), bits / 8, unit) };
        let step = block_elements(unit);
        let (step, bytes) = (step.min(elements).saturating_mul(size), elements.saturating_mul(size));
        let mut buffer = vec![0; step];
        for start in (0..bytes).step_by(step.max(1)) {
            buffer.truncate(bytes.saturating_sub(start));
            self.read_at(start as u64, &mut buffer)?;
            sink(Block::untouched(View::dense(self.dtype, &buffer)))?;
        }
        Ok(())
    }

    fn read_into(&self, bytes: &mut [u8]) -> Result<()> {
        debug_assert_eq!(bytes.len() as u64, self.bytes, "the bytes of the tensor");
        if bytes.is_empty() { Ok(()) } else { self.read_at(0, bytes) }
    }

    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let bits = self.dtype.bitsize();
        let row = (row(&self.shape).checked_mul(bits)? / 8) as u64;
        let mut shape = self.shape.clone();
        *shape.first_mut().filter(|_| bits >= 8)? = rows.len();
        let begin = self.begin.checked_add(row.checked_mul(rows.start as u64)?)?;
        let source = Arc::new(RawTensor { shape, begin, bytes: row.checked_mul(rows.len() as u64)?, ..self.clone() });
        Some(Rows { source, block: block_elements(unit) })
    }
}
