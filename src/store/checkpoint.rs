//! Opening a checkpoint: one file, a folder with one file, or shards with an index, of safetensors or of PyTorch. Only headers are read.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::header::{Entry, Header, MAX_HEADER};
use super::{Block, BlockSink, DType, Rows, View, Weight, WeightSource, WordsLabel, block_elements, pytorch};
use crate::error::{Error, Result};
use crate::files::{self, File, Kind};

/// The only file of an unsharded checkpoint.
pub const SINGLE: &str = "model.safetensors";
/// The index of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";

/// An open file and where its data starts.
#[derive(Debug)]
pub struct DataFile {
    path: PathBuf,
    file: File,
    data: u64,
}

impl DataFile {
    /// Opens a safetensors file and reads its header.
    ///
    /// # Errors
    /// The file cannot be read, or its header is not valid.
    pub fn open(path: &Path) -> Result<(Arc<DataFile>, Header)> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let bytes = file.length();
        let rest = bytes.checked_sub(8).ok_or_else(|| Error::malformed(path, format!("{bytes} bytes are too few for a safetensors file")))?;
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(Error::io("read", path))?;
        let length = u64::from_le_bytes(length);
        let mut next = [0];
        // Headers begin with a brace; the length of other files is a few of their characters.
        let is_header = rest > 0 && file.read_exact_at(&mut next, 8).is_ok() && next == *b"{";
        let after = rest.checked_sub(length).filter(|_| (1..=MAX_HEADER).contains(&length)).ok_or_else(|| {
            Error::malformed(
                path,
                if length.to_le_bytes() == *b"version " {
                    "is a pointer of Git LFS, not the file itself: run `git lfs pull`, or download the file".to_owned()
                } else if is_header || path.extension().is_some_and(|extension| extension == "safetensors") {
                    format!("the header claims {length} bytes in a file of {bytes} (at most {MAX_HEADER} are allowed): not a safetensors file, or truncated")
                } else {
                    "is not a model: name a folder that holds one, or a file of weights such as model.safetensors".to_owned()
                },
            )
        })?;
        let mut json = vec![0; length as usize];
        file.read_exact_at(&mut json, 8).map_err(Error::io("read", path))?;
        let header = Header::parse(&json, after).map_err(|reason| Error::malformed(path, reason))?;
        Ok((Arc::new(DataFile { path: path.to_owned(), file, data: length.saturating_add(8) }), header))
    }

    /// A file of another format, of which any part may be a tensor.
    pub fn of(path: &Path, file: File) -> Arc<DataFile> {
        Arc::new(DataFile { path: path.to_owned(), file, data: 0 })
    }

    /// Reads bytes of the data section.
    ///
    /// # Errors
    /// The file cannot be read, or has become shorter.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, self.data.saturating_add(offset)).map_err(Error::io("read", &self.path))
    }
}

/// A stored tensor: what the header says, and where the bytes are.
#[derive(Debug, Clone)]
pub struct RawTensor {
    /// Format of an element.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    file: Arc<DataFile>,
    begin: u64,
    bytes: u64,
}

impl RawTensor {
    /// A tensor that begins at this byte of a file's data and takes so many bytes, which its shape must need.
    pub fn within(file: &Arc<DataFile>, dtype: DType, shape: Vec<usize>, begin: u64, bytes: u64) -> RawTensor {
        RawTensor { dtype, shape, file: file.clone(), begin, bytes }
    }

    /// The same bytes as other elements.
    #[must_use]
    pub fn as_elements(&self, dtype: DType, shape: Vec<usize>) -> RawTensor {
        RawTensor { dtype, shape, ..self.clone() }
    }

    /// Size in the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Reads part of the tensor, from a byte offset of its own.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read(self.begin.saturating_add(offset), buffer)
    }

    /// Reads a small tensor whole.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read_all(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes as usize];
        self.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// The file, and the first byte and the number of bytes within its data.
    pub fn place(&self) -> (&Path, u64, u64) {
        (self.path(), self.begin, self.bytes)
    }

    /// File that holds it.
    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

impl WeightSource for RawTensor {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let bits = self.dtype.bitsize();
        // Elements of less than a byte go by whole bytes.
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

/// All tensors of a checkpoint, by the names in its files.
#[derive(Default)]
pub struct Checkpoint {
    /// By name.
    pub tensors: BTreeMap<String, RawTensor>,
    /// Tensors whose elements lie in another order than that of their axes.
    pub strided: BTreeMap<String, Weight>,
    /// Metadata of all files; where shards disagree, the first says it.
    pub metadata: BTreeMap<String, String>,
    /// The files, in order.
    pub files: Vec<PathBuf>,
    /// What the files hold beside tensors, in plain words.
    pub notes: Vec<String>,
    /// What the configuration beside them says of words of GPTQ and AWQ.
    pub words: WordsLabel,
    /// Folders inside that of the checkpoint which have files of their own: names of what is in them begin with one of these and a slash.
    pub folders: Vec<String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a `.safetensors` file or one of PyTorch, or a folder with `model.safetensors`, with an index and shards, with
    /// `pytorch_model.bin` or its index and shards, or with exactly one file of another name.
    ///
    /// # Errors
    /// Nothing to open, a malformed file, or an index that does not agree with its shards.
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

    /// Adds what the only file of a folder inside that of the checkpoint holds, if there is one.
    ///
    /// # Errors
    /// The file is malformed, or the checkpoint has a tensor of such a name.
    pub fn add_folder(&mut self, path: &Path, folder: &str) -> Result<()> {
        let mut there = [SINGLE, pytorch::SINGLE].map(|name| path.join(folder).join(name)).into_iter().filter(|file| files::is_file(file));
        let Some(file) = there.next() else { return Ok(()) };
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
            return Err(Error::tensor(
                &name,
                format!("is what a tensor of {} is called here, and another file has one of this name", file.display()),
                "rename it",
            ));
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
        shards.keys().for_each(|shard| files::prepare(&folder.join(shard)));
        for (shard, tensors) in &shards {
            let path = folder.join(shard);
            if !files::is_file(&path) {
                return Err(Error::malformed(index, format!("names the shard `{shard}`, which is not there (download it again?)")));
            }
            self.add(&path, Some((index, tensors)))?;
        }
        Ok(())
    }

    fn add(&mut self, path: &Path, expected: Option<(&Path, &BTreeSet<&str>)>) -> Result<()> {
        let (tensors, strided) = if pytorch::begins(path) {
            let found = pytorch::open(path)?;
            self.notes.extend(found.notes);
            (found.plain, found.strided)
        } else if ends(path, &pytorch::EXTENSIONS) {
            let what = "not a file of PyTorch: it begins neither as an archive nor as a pickle (if it is a pointer of Git LFS, download the file)";
            return Err(Error::malformed(path, what));
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
            let held: BTreeSet<&str> = tensors.keys().chain(strided.keys()).map(String::as_str).collect();
            if let Some(name) = names.difference(&held).next() {
                return Err(Error::malformed(index, format!("tensor `{name}` is not in its shard {}", path.display())));
            }
            if let Some(name) = held.difference(names).next() {
                return Err(Error::malformed(path, format!("tensor `{name}` is not listed for this shard in {}", index.display())));
            }
        }
        self.tensors.extend(tensors);
        self.strided.extend(strided);
        self.files.push(path.to_owned());
        Ok(())
    }
}

fn ends(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|e| extensions.iter().any(|extension| e == *extension))
}

/// What training programs write beside weights, in PyTorch's format.
const NO_WEIGHTS: [&str; 4] = ["optimizer", "rng_state", "scheduler", "training_args"];

fn only_file(folder: &Path) -> Result<PathBuf> {
    let all = files::files(folder).map_err(Error::io("list", folder))?;
    let state = |path: &Path| path.file_name().is_some_and(|name| NO_WEIGHTS.iter().any(|start| name.to_string_lossy().starts_with(start)));
    let of_pytorch = |path: &&PathBuf| ends(path, &pytorch::EXTENSIONS) && !state(path) && pytorch::begins(path);
    let safetensors: Vec<&PathBuf> = all.iter().filter(|path| ends(path, &["safetensors"])).collect();
    let (found, kind) = if safetensors.is_empty() { (all.iter().filter(of_pytorch).collect(), "PyTorch") } else { (safetensors, ".safetensors") };
    match found.as_slice() {
        [path] => Ok((*path).clone()),
        [] => Err(Error::malformed(
            folder,
            format!("no {SINGLE}, no {INDEX} and no other .safetensors file or weights of PyTorch in this folder: name the one that holds the weights"),
        )),
        _ => Err(Error::malformed(folder, format!("several {kind} files and no {INDEX}; name the file to open"))),
    }
}
