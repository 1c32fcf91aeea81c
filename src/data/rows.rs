//! Files of arrays: safetensors, and NumPy's .npz and .npy.

use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use flate2::read::DeflateDecoder;
use npyz::{Endianness, NpyHeader, TypeChar};

use super::arrays::{LABELS, names};
use super::options::{Column, Data};
use super::{LARGEST, Port};
use crate::error::{Error, Result};
use crate::files::{self, File};
use crate::store::header::byte_count;
use crate::store::{Checkpoint, DType, RawTensor};

/// Bytes of a header at most; NumPy takes no longer ones either.
const HEADER: u32 = 10_000;

/// An array that is read row by row, or whole.
pub(super) struct Rows {
    pub name: String,
    path: PathBuf,
    pub dtype: DType,
    pub shape: Vec<usize>,
    from: From,
}

enum From {
    Tensor { tensor: RawTensor, at: u64 },
    Stream(Box<dyn Read + Send>),
}

impl Rows {
    /// Sizes of a row.
    pub fn sizes(&self) -> &[usize] {
        self.shape.get(1..).unwrap_or(&[])
    }

    /// Bytes of a row.
    pub fn row(&self) -> Result<u64> {
        let bytes = byte_count(self.dtype, self.sizes()).filter(|bytes| (1..=LARGEST).contains(bytes));
        bytes.ok_or_else(|| self.wrong(format!("has rows of {:?}, which are empty or larger than memory", self.sizes())))
    }

    fn wrong(&self, reason: impl std::fmt::Display) -> Error {
        Error::malformed(&self.path, format!("array `{}` {reason}", self.name))
    }

    /// The bytes of the next row.
    pub fn next(&mut self) -> Result<Vec<u8>> {
        let row = self.row()?;
        self.take(row)
    }

    /// All of its bytes.
    pub fn whole(&mut self) -> Result<Vec<u8>> {
        let bytes = byte_count(self.dtype, &self.shape).filter(|bytes| *bytes <= LARGEST);
        let bytes = bytes.ok_or_else(|| self.wrong(format!("has sizes {:?}, which are larger than memory", self.shape)))?;
        self.take(bytes)
    }

    fn take(&mut self, wanted: u64) -> Result<Vec<u8>> {
        match &mut self.from {
            From::Tensor { tensor, at } => {
                let mut bytes = vec![0; wanted as usize];
                tensor.read_at(*at, &mut bytes)?;
                *at = at.saturating_add(wanted);
                Ok(bytes)
            }
            From::Stream(rest) => {
                // The header may claim more than there is.
                let mut bytes = Vec::new();
                let read = rest.take(wanted).read_to_end(&mut bytes);
                read.map_err(|e| self.wrong(format!("cannot be read: {e}")))?;
                if bytes.len() as u64 == wanted { Ok(bytes) } else { Err(self.wrong(format!("ends before its {} rows do", self.count()))) }
            }
        }
    }

    pub fn count(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }
}

/// The arrays of a file, or of a folder of `.npy` files, at their beginnings.
pub(super) fn open(path: &Path) -> Result<Vec<Rows>> {
    match ending(path) {
        _ if path.is_dir() => files(path)?.iter().filter(|file| ending(file) == "npy").map(|file| array(file)).collect(),
        "npz" => archive(path),
        "npy" => Ok(vec![array(path)?]),
        _ => tensors(path),
    }
}

/// Files of arrays in a folder, by name.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = files::files(folder).map_err(Error::io("open", folder))?;
    files.retain(|file| ["npy", "npz", "safetensors"].contains(&ending(file)));
    files.sort();
    Ok(files)
}

pub(super) fn ending(path: &Path) -> &str {
    path.extension().and_then(|ending| ending.to_str()).unwrap_or("")
}

/// A file's name without its ending.
pub(super) fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Refuses arrays that nothing reads; `read` are the names of the others. Labels may be there where the task has no use for them.
pub(super) fn require_all_read<'n>(path: &Path, options: &Data, ports: &[Port], read: impl Iterator<Item = &'n String>) -> Result<()> {
    let read: Vec<&String> = read.collect();
    let unused = |rows: &Rows| {
        let is_label = LABELS.contains(&rows.name.as_str()) && options.label_column.is_none() && !read.iter().any(|name| LABELS.contains(&name.as_str()));
        let is_named = matches!(&options.label_column, Some(Column::Name(name)) if *name == rows.name);
        !read.contains(&&rows.name) && !is_label && !is_named
    };
    let unused: Vec<Rows> = open(path)?.into_iter().filter(unused).collect();
    if unused.is_empty() {
        return Ok(());
    }
    let ports = ports.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ");
    let reason = format!("nothing reads {}; the model takes {ports}: remove it, or map it to an input with `inputs`", names(&unused));
    Err(Error::option("data", format!("{}: {reason}", path.display())))
}

fn tensors(path: &Path) -> Result<Vec<Rows>> {
    let rows = |(name, tensor): (String, RawTensor)| Rows {
        name,
        path: path.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        from: From::Tensor { tensor, at: 0 },
    };
    Ok(Checkpoint::open(path)?.tensors.into_iter().map(rows).collect())
}

fn archive(path: &Path) -> Result<Vec<Rows>> {
    let wrong = |e: &dyn std::fmt::Display| Error::malformed(path, format!("not an .npz file: {e}"));
    let open = || File::open(path).map(|file| file.reader()).map_err(Error::io("open", path));
    let mut archive = zip::ZipArchive::new(BufReader::new(open()?)).map_err(|e| wrong(&e))?;
    let mut arrays = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(|e| wrong(&e))?;
        let Some(name) = entry.name().map_err(|e| wrong(&e))?.strip_suffix(".npy").map(str::to_owned) else { continue };
        let start = entry.data_start().ok_or_else(|| wrong(&"an array has no place"))?;
        // A handle of its own, since arrays are read side by side.
        let mut file = open()?;
        file.seek(SeekFrom::Start(start)).map_err(Error::io("read", path))?;
        let stored = BufReader::new(file).take(entry.compressed_size());
        let rest: Box<dyn Read + Send> = match entry.compression() {
            zip::CompressionMethod::Stored => Box::new(stored),
            zip::CompressionMethod::Deflated => Box::new(BufReader::new(DeflateDecoder::new(stored))),
            other => return Err(wrong(&format!("array `{name}` is packed by {other}"))),
        };
        arrays.push(numpy(name, path, rest).map_err(|e| wrong(&e))?);
    }
    Ok(arrays)
}

fn array(path: &Path) -> Result<Rows> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    numpy(stem(path), path, Box::new(BufReader::new(file.reader()))).map_err(|e| Error::malformed(path, format!("not an .npy file: {e}")))
}

/// An array of NumPy at its beginning.
fn numpy(name: String, path: &Path, mut rest: Box<dyn Read + Send>) -> Result<Rows, String> {
    let header = header(&mut rest).map_err(|e| format!("array `{name}`: {e}"))?;
    if header.order() != npyz::Order::C {
        return Err(format!("array `{name}` is stored column by column; save it with numpy.ascontiguousarray"));
    }
    let dtype = dtype(&header).ok_or_else(|| format!("array `{name}` has elements {}, which are not read", header.dtype().descr()))?;
    let shape: Vec<usize> = header.shape().iter().map(|n| *n as usize).collect();
    byte_count(dtype, &shape).ok_or_else(|| format!("array `{name}` is larger than any memory"))?;
    Ok(Rows { name, path: path.to_owned(), dtype, shape, from: From::Stream(rest) })
}

fn header(rest: &mut dyn Read) -> std::io::Result<NpyHeader> {
    let mut start = [0; 12];
    rest.read_exact(&mut start)?;
    let [.., version, _, a, b, c, d] = start;
    let bytes = if version == 1 { u16::from_le_bytes([a, b]).into() } else { u32::from_le_bytes([a, b, c, d]) };
    if bytes > HEADER {
        return Err(std::io::Error::other(format!("a header of {bytes} bytes")));
    }
    NpyHeader::from_reader(start.as_slice().chain(rest))
}

fn dtype(header: &NpyHeader) -> Option<DType> {
    let npyz::DType::Plain(kind) = header.dtype() else { return None };
    if kind.endianness() == Endianness::Big {
        return None;
    }
    Some(match (kind.type_char(), kind.size_field()) {
        (TypeChar::Bool, _) | (TypeChar::Uint, 1) => DType::U8,
        (TypeChar::Int, 1) => DType::I8,
        (TypeChar::Int, 2) => DType::I16,
        (TypeChar::Int, 4) => DType::I32,
        (TypeChar::Int, 8) => DType::I64,
        (TypeChar::Uint, 2) => DType::U16,
        (TypeChar::Uint, 4) => DType::U32,
        (TypeChar::Float, 2) => DType::F16,
        (TypeChar::Float, 4) => DType::F32,
        (TypeChar::Float, 8) => DType::F64,
        _ => return None,
    })
}
