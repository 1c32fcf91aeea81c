//! Opens checkpoints of safetensors or PyTorch: one file, a folder with one file, or shards with an
//! index. Only headers are read.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::header::{Entry, Header, MAX_HEADER};
use super::{Block, BlockSink, DType, GptqConfig, Rows, View, Weight, WeightSource, block_elements, pytorch, shard_name};
use crate::error::{Error, Result};
use crate::files::{self, File, Kind};

/// File name of an unsharded checkpoint.
pub const SINGLE: &str = "model.safetensors";
/// File name of the index of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";

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
                    return Error::run(path.display(), "is not a model", "specify the folder of a model, or a weight file such as model.safetensors");
                },
            )
        })?;
        let mut json = vec![0; length as usize];
        file.read_exact_at(&mut json, 8).map_err(Error::io("read", path))?;
        let header = Header::parse(&json, after).map_err(|reason| Error::malformed(path, reason))?;
        Ok((Arc::new(DataFile { path: path.to_owned(), file, data: length.saturating_add(8) }), header))
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

    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let bits = self.dtype.bitsize();
        let row = (super::affine::row(&self.shape).checked_mul(bits)? / 8) as u64;
        let mut shape = self.shape.clone();
        *shape.first_mut().filter(|_| bits >= 8)? = rows.len();
        let begin = self.begin.checked_add(row.checked_mul(rows.start as u64)?)?;
        let source = Arc::new(RawTensor { shape, begin, bytes: row.checked_mul(rows.len() as u64)?, ..self.clone() });
        Some(Rows { source, block: block_elements(unit) })
    }
}

/// All tensors of a checkpoint, by name.
#[derive(Default)]
pub struct Checkpoint {
    /// By name.
    pub tensors: BTreeMap<String, RawTensor>,
    /// Tensors that are not contiguous in row-major order.
    pub strided: BTreeMap<String, Weight>,
    /// Metadata of all files. If shards disagree, the first value is used.
    pub metadata: BTreeMap<String, String>,
    /// The files, in order.
    pub files: Vec<PathBuf>,
    /// Notes on contents other than tensors.
    pub notes: Vec<String>,
    /// GPTQ and AWQ settings of the configuration.
    pub gptq: GptqConfig,
    /// Subfolders with separate weight files. The names of their tensors start with the folder and a
    /// slash.
    pub folders: Vec<String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a `.safetensors` or PyTorch file, or a folder with `model.safetensors`, with an index and
    /// shards, with `pytorch_model.bin` or its index and shards, or with exactly one file of another
    /// name. Fails if no weights were found or the index does not match its shards.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        if files::kind(path).map_err(Error::io("open", path))? != Kind::Folder {
            checkpoint.add(path, None)?;
            return Ok(checkpoint);
        }
        for (single, index) in [(SINGLE, INDEX), (pytorch::SINGLE, pytorch::INDEX)].map(|(single, index)| (path.join(single), path.join(index))) {
            if files::is_file(&single) {
                checkpoint.add(&single, None)?;
            } else if files::is_file(&index) {
                checkpoint.add_shards(path, &index)?;
            } else {
                continue;
            }
            return Ok(checkpoint);
        }
        checkpoint.add(&only_file(path)?, None)?;
        Ok(checkpoint)
    }

    /// Adds the tensors of a subfolder's weight file, if there is one. Fails if a tensor name is not unique.
    pub fn add_folder(&mut self, path: &Path, folder: &str) -> Result<()> {
        let mut candidates = [SINGLE, pytorch::SINGLE].map(|name| path.join(folder).join(name)).into_iter().filter(|file| files::is_file(file));
        let Some(file) = candidates.next() else { return Ok(()) };
        let mut inside = Checkpoint::default();
        inside.add(&file, None)?;
        let name = |name: String| format!("{folder}/{name}");
        for (tensor, stored) in inside.tensors {
            self.tensors.insert(self.unused(name(tensor), &file)?, stored);
        }
        for (tensor, stored) in inside.strided {
            self.strided.insert(self.unused(name(tensor), &file)?, stored);
        }
        for (key, value) in inside.metadata {
            self.metadata.entry(key).or_insert(value);
        }
        self.files.append(&mut inside.files);
        self.notes.append(&mut inside.notes);
        self.folders.push(folder.to_owned());
        Ok(())
    }

    fn unused(&self, name: String, file: &Path) -> Result<String> {
        if self.tensors.contains_key(&name) || self.strided.contains_key(&name) {
            return Err(Error::tensor(&name, format!("is also the name of a tensor in {}", file.display()), "rename one of the two"));
        }
        Ok(name)
    }

    fn add_shards(&mut self, folder: &Path, index: &Path) -> Result<()> {
        let text = files::read_to_string(index).map_err(Error::io("read", index))?;
        let map: Index = serde_json::from_str(&text).map_err(|e| Error::malformed(index, format!("not an index of shards: {e}")))?;
        let mut shards: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, shard) in &map.weight_map {
            let plain = Path::new(shard).file_name().is_some_and(|name| name == shard.as_str());
            if !plain || shard.contains(['/', '\\']) {
                return Err(Error::malformed(index, format!("tensor `{tensor}` points outside the folder: `{shard}`")));
            }
            shards.entry(shard).or_default().insert(tensor);
        }
        shards.keys().for_each(|shard| files::prefetch(&folder.join(shard)));
        for (shard, tensors) in &shards {
            let path = folder.join(shard);
            if !files::is_file(&path) {
                return Err(Error::malformed(index, format!("lists the shard `{shard}`, which does not exist; download the model again")));
            }
            self.add(&path, Some((index, tensors)))?;
        }
        Ok(())
    }

    fn add(&mut self, path: &Path, expected: Option<(&Path, &BTreeSet<&str>)>) -> Result<()> {
        let (tensors, strided) = if pytorch::is_pytorch(path) {
            let found = pytorch::open(path)?;
            self.notes.extend(found.notes);
            (found.plain, found.strided)
        } else if has_extension(path, &pytorch::EXTENSIONS) {
            return Err(Error::malformed(path, pytorch::unrecognized(path)));
        } else {
            let (file, header) = DataFile::open(path)?;
            for (key, value) in header.metadata {
                self.metadata.entry(key).or_insert(value);
            }
            let tensor =
                |Entry { name, dtype, shape, begin, end }| (name, RawTensor { dtype, shape, file: file.clone(), begin, bytes: end.saturating_sub(begin) });
            (header.tensors.into_iter().map(tensor).collect(), BTreeMap::new())
        };
        if let Some((index, names)) = expected {
            let found: BTreeSet<&str> = tensors.keys().chain(strided.keys()).map(String::as_str).collect();
            if let Some(name) = names.difference(&found).next() {
                return Err(Error::malformed(index, format!("tensor `{name}` is not in its shard {}", path.display())));
            }
            if let Some(name) = found.difference(names).next() {
                return Err(Error::malformed(path, format!("tensor `{name}` is not listed for this shard in {}", index.display())));
            }
        }
        self.tensors.extend(tensors);
        self.strided.extend(strided);
        self.files.push(path.to_owned());
        Ok(())
    }
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|e| extensions.iter().any(|extension| e == *extension))
}

/// Prefixes of PyTorch files that training programs write in addition to weights.
const NO_WEIGHTS: [&str; 4] = ["optimizer", "rng_state", "scheduler", "training_args"];

fn only_file(folder: &Path) -> Result<PathBuf> {
    let all = files::files(folder).map_err(Error::io("list", folder))?;
    let state = |path: &Path| path.file_name().is_some_and(|name| NO_WEIGHTS.iter().any(|start| name.to_string_lossy().starts_with(start)));
    let of_pytorch = |path: &&PathBuf| has_extension(path, &pytorch::EXTENSIONS) && !state(path) && pytorch::is_pytorch(path);
    let safetensors: Vec<&PathBuf> = all.iter().filter(|path| has_extension(path, &["safetensors"])).collect();
    let (found, kind) = if safetensors.is_empty() { (all.iter().filter(of_pytorch).collect(), "PyTorch") } else { (safetensors, ".safetensors") };
    match found.as_slice() {
        [path]
            if let Some((_, number, count)) = ["safetensors", "bin"].iter().find_map(|end| shard_name::parse(path, end)).filter(|(.., count)| *count > 1) =>
        {
            let index = if kind == "PyTorch" { pytorch::INDEX } else { INDEX };
            Err(Error::malformed(folder, format!("has file {number} of the {count} of a model, but neither the others nor {index}; complete the download")))
        }
        [path] => Ok((*path).clone()),
        [] => Err(Error::malformed(
            folder,
            format!("no {SINGLE}, no {INDEX} and no other .safetensors or PyTorch weight file in this folder; specify the folder with the weights"),
        )),
        _ => Err(Error::malformed(folder, format!("several {kind} files and no {INDEX}; specify the file to open"))),
    }
}
