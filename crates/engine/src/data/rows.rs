//! Row-by-row readers of array files: safetensors, and NumPy's .npz and .npy.

use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use flate2::read::DeflateDecoder;

use super::npy::Header;
use super::options::{Column, Data};
use super::{MAX_SAMPLE_BYTES, Port};
use crate::error::{Error, Result};
use crate::files::{self, File};
use crate::store::header::byte_count;
use crate::store::{Checkpoint, DType, RawTensor};

/// Default names of the array of labels.
pub(super) const LABELS: [&str; 3] = ["labels", "label", "y"];

/// An open array that is read row by row, or completely.
pub(super) struct Rows {
    pub name: String,
    path: PathBuf,
    pub dtype: DType,
    pub shape: Vec<usize>,
    source: Source,
}

enum Source {
    Tensor { tensor: RawTensor, at: u64 },
    Stream(Box<dyn Read + Send>),
}

impl Rows {
    /// Shape of a row.
    pub fn sizes(&self) -> &[usize] {
        self.shape.get(1..).unwrap_or(&[])
    }

    /// Size of a row, in bytes.
    pub fn row_bytes(&self) -> Result<u64> {
        let bytes = byte_count(self.dtype, self.sizes()).filter(|bytes| (1..=MAX_SAMPLE_BYTES).contains(bytes));
        bytes.ok_or_else(|| self.wrong(format!("has rows of shape {:?}, which are empty or too large", self.sizes())))
    }

    fn wrong(&self, reason: impl std::fmt::Display) -> Error {
        Error::malformed(&self.path, format!("array `{}` {reason}", self.name))
    }

    /// Reads the next row.
    pub fn next(&mut self) -> Result<Vec<u8>> {
        let bytes = self.row_bytes()?;
        self.read(bytes)
    }

    /// Reads all rows.
    pub fn read_all(&mut self) -> Result<Vec<u8>> {
        let bytes = byte_count(self.dtype, &self.shape).filter(|bytes| *bytes <= MAX_SAMPLE_BYTES);
        let bytes = bytes.ok_or_else(|| self.wrong(format!("has the shape {:?}, which is too large", self.shape)))?;
        self.read(bytes)
    }

    fn read(&mut self, count: u64) -> Result<Vec<u8>> {
        match &mut self.source {
            Source::Tensor { tensor, at } => {
                let mut bytes = vec![0; count as usize];
                tensor.read_at(*at, &mut bytes)?;
                *at = at.saturating_add(count);
                Ok(bytes)
            }
            Source::Stream(rest) => {
                // Not preallocated: the header is untrusted.
                let mut bytes = Vec::new();
                let read = rest.take(count).read_to_end(&mut bytes);
                read.map_err(|e| self.wrong(format!("cannot be read: {e}")))?;
                if bytes.len() as u64 == count { Ok(bytes) } else { Err(self.wrong(format!("is truncated: it should have {} rows", self.count()))) }
            }
        }
    }

    pub fn count(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }
}

/// Opens the arrays of a file, or of a folder of `.npy` files.
pub(super) fn open(path: &Path) -> Result<Vec<Rows>> {
    match extension(path) {
        _ if path.is_dir() => files(path)?.iter().filter(|file| extension(file) == "npy").map(|file| array(file)).collect(),
        "npz" => archive(path),
        "npy" => Ok(vec![array(path)?]),
        _ => tensors(path),
    }
}

/// Array files in a folder, sorted by name.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = files::files(folder).map_err(Error::io("open", folder))?;
    files.retain(|file| ["npy", "npz", "safetensors"].contains(&extension(file)));
    files.sort();
    Ok(files)
}

pub(super) fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or("")
}

/// The file name without its extension.
pub(super) fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The names of arrays, for messages.
pub(super) fn names<'r>(arrays: impl IntoIterator<Item = &'r Rows>) -> String {
    arrays.into_iter().map(|rows| format!("`{}`", rows.name)).collect::<Vec<_>>().join(", ")
}

/// Rejects arrays that are neither in `used` nor labels.
pub(super) fn require_all_used<'n>(path: &Path, options: &Data, ports: &[Port], used: impl Iterator<Item = &'n String>) -> Result<()> {
    let used: Vec<&String> = used.collect();
    let unused = |rows: &Rows| {
        let is_label = LABELS.contains(&rows.name.as_str()) && options.label_column.is_none() && !used.iter().any(|name| LABELS.contains(&name.as_str()));
        let is_named = matches!(&options.label_column, Some(Column::Name(name)) if *name == rows.name);
        !used.contains(&&rows.name) && !is_label && !is_named
    };
    let unused: Vec<Rows> = open(path)?.into_iter().filter(unused).collect();
    if unused.is_empty() {
        return Ok(());
    }
    let ports = ports.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ");
    let reason = format!("{} is not used; the model's inputs are {ports}: remove it, or map it to an input with `inputs`", names(&unused));
    Err(Error::option("data", format!("{}: {reason}", path.display())))
}

fn tensors(path: &Path) -> Result<Vec<Rows>> {
    let rows = |(name, tensor): (String, RawTensor)| Rows {
        name,
        path: path.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        source: Source::Tensor { tensor, at: 0 },
    };
    Ok(Checkpoint::open(path)?.tensors.into_iter().map(rows).collect())
}

fn archive(path: &Path) -> Result<Vec<Rows>> {
    let wrong = |e: &dyn std::fmt::Display| Error::malformed(path, format!("cannot be read as .npz: {e}"));
    let open = || File::open(path).map(|file| file.reader()).map_err(Error::io("open", path));
    let mut archive = zip::ZipArchive::new(BufReader::new(open()?)).map_err(|e| wrong(&e))?;
    let mut arrays = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(|e| wrong(&e))?;
        let Some(name) = entry.name().map_err(|e| wrong(&e))?.strip_suffix(".npy").map(str::to_owned) else { continue };
        let start = entry.data_start().ok_or_else(|| wrong(&"an array has no data offset"))?;
        // Arrays are read concurrently, so that each needs its own file handle.
        let mut file = open()?;
        file.seek(SeekFrom::Start(start)).map_err(Error::io("read", path))?;
        let stored = BufReader::new(file).take(entry.compressed_size());
        let rest: Box<dyn Read + Send> = match entry.compression() {
            zip::CompressionMethod::Stored => Box::new(stored),
            zip::CompressionMethod::Deflated => Box::new(BufReader::new(DeflateDecoder::new(stored))),
            other => return Err(wrong(&format!("array `{name}` uses the unsupported compression {other}"))),
        };
        arrays.push(numpy(name, path, rest).map_err(|e| wrong(&e))?);
    }
    Ok(arrays)
}

fn array(path: &Path) -> Result<Rows> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    numpy(stem(path), path, Box::new(BufReader::new(file.reader()))).map_err(|e| Error::malformed(path, format!("cannot be read as .npy: {e}")))
}

/// Opens an array in NumPy's format.
fn numpy(name: String, path: &Path, mut rest: Box<dyn Read + Send>) -> Result<Rows, String> {
    let header = Header::read(&mut rest).map_err(|e| format!("array `{name}`: {e}"))?;
    if header.fortran_order {
        return Err(format!("array `{name}` is in Fortran order; convert it with numpy.ascontiguousarray"));
    }
    let dtype = header.dtype().ok_or_else(|| format!("array `{name}` has the unsupported dtype {}", header.descr))?;
    let shape = header.shape;
    byte_count(dtype, &shape).ok_or_else(|| format!("array `{name}` is too large"))?;
    Ok(Rows { name, path: path.to_owned(), dtype, shape, source: Source::Stream(rest) })
}
