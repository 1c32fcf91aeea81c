//! Files of PyTorch: what `torch.save` writes, zip archives (1.6 and later) and the format before. Nothing of a file is executed: its pickle is
//! read as data (`pickle.rs`), and of the functions that it names, those that put a tensor together are understood and no others
//! (`torch/_utils.py`, `torch/serialization.py` of PyTorch 2.15). Tensors are not read.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod formats;
mod pickle;
mod strided;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use self::formats::{Storage, legacy, storage, zipped};
use self::pickle::{Id, Pickle, Value};
use self::strided::Strided;
use super::checkpoint::DataFile;
use super::header::{MOST_AXES, element_count};
use super::{DType, RawTensor, Weight};
use crate::error::{Error, Result};
use crate::files::{self, File};

/// The only file of a folder of PyTorch, and the index of one of several.
pub const SINGLE: &str = "pytorch_model.bin";
/// The index of a checkpoint of several files.
pub const INDEX: &str = "pytorch_model.bin.index.json";
/// How files end that may be PyTorch's.
pub const EXTENSIONS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// Where training programs keep the weights among other things.
const WRAPPERS: [&str; 5] = ["state_dict", "model_state_dict", "model", "module", "net"];
/// Deepest dictionaries in each other.
const DEEPEST: usize = 16;
/// Longest name of a tensor.
const LONGEST_NAME: usize = 4096;
/// What `torch.nn.DataParallel` puts before every name.
const PARALLEL: &str = "module.";
/// Entries that are told by name.
const TOLD: usize = 5;

/// The tensors of a file.
#[derive(Default)]
pub(super) struct Tensors {
    pub plain: BTreeMap<String, RawTensor>,
    /// Those whose elements lie in another order than that of their axes.
    pub strided: BTreeMap<String, Weight>,
    /// What the file holds beside tensors, in plain words.
    pub notes: Vec<String>,
}

/// A tensor as the pickle says it.
struct Said {
    key: String,
    dtype: DType,
    offset: u64,
    shape: Vec<usize>,
    strides: Vec<u64>,
}

/// Whether a file says by its first bytes that it is PyTorch's: a zip archive, or a pickle of protocol 2 or later.
pub(super) fn begins(path: &Path) -> bool {
    let mut start = Vec::new();
    // A pipe without a writer would wait forever.
    let read = files::is_file(path) && File::open(path).and_then(|file| file.reader().take(9).read_to_end(&mut start)).is_ok();
    read && match start.as_slice() {
        // The length of a safetensors header may begin with these bytes as well; its JSON begins behind eight.
        [_, _, _, _, 0, 0, 0, 0, b'{', ..] => false,
        [b'P', b'K', 3, 4, ..] | [0x80, 2..=5, ..] => true,
        _ => false,
    }
}

/// Opens a file without reading its tensors.
///
/// # Errors
/// It is no file of PyTorch, or holds something that is not understood, by name.
pub(super) fn open(path: &Path) -> Result<Tensors> {
    let wrong = |reason: String| Error::malformed(path, reason);
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut start = [0; 2];
    file.read_exact_at(&mut start, 0).map_err(|_| wrong("not a file of PyTorch".into()))?;
    let (pickle, storages) = if start == *b"PK" { zipped(path, &file)? } else { legacy(path, &file)? };
    let file = DataFile::of(path, file);
    let mut found = Found { pickle: &pickle, tensors: BTreeMap::new(), others: Vec::new(), wrapper: None, alternatives: Vec::new(), open: BTreeSet::new() };
    found.root().map_err(wrong)?;
    let mut all = Tensors { notes: found.notes(path), ..Tensors::default() };
    let parallel = found.tensors.keys().all(|name| name.starts_with(PARALLEL));
    if parallel {
        all.notes.push(format!("{}: every name begins with `{PARALLEL}`, as torch.nn.DataParallel writes them; the names here do not", path.display()));
    }
    for (name, id) in &found.tensors {
        let name = if parallel { name.strip_prefix(PARALLEL).unwrap_or(name) } else { name };
        let in_tensor = |reason: String| wrong(format!("tensor `{name}` {reason}"));
        let said = said(&pickle, *id).map_err(in_tensor)?;
        let storage = storages(&said.key).map_err(in_tensor)?;
        place(name, &said, storage, &file, &mut all).map_err(in_tensor)?;
    }
    Ok(all)
}

/// The tensors of a pickle by name, and what else there is.
struct Found<'p> {
    pickle: &'p Pickle,
    tensors: BTreeMap<String, Id>,
    /// Entries that are neither tensors nor dictionaries of them.
    others: Vec<String>,
    /// The entry whose tensors are read, if these are not at the top.
    wrapper: Option<&'static str>,
    /// Entries that hold tensors by name too, and how many.
    alternatives: Vec<(String, usize)>,
    /// Dictionaries that have been gone through.
    open: BTreeSet<Id>,
}

impl Found<'_> {
    fn root(&mut self) -> Result<(), String> {
        let root = self.pickle.root;
        let advice = "save the weights by name: torch.save(model.state_dict(), \"weights.pt\")";
        let Value::Dict(pairs) = self.pickle.get(root) else {
            let what =
                self.pickle.call(root).map_or("something else".to_owned(), |(function, _)| format!("a whole object of `{}`", function.replace(' ', ".")));
            return Err(format!("it holds {what}, not tensors by name, and no program is run to read it; {advice}"));
        };
        let within = |key: &str| pairs.iter().find(|(name, value)| self.pickle.text(*name) == Some(key) && self.holds(*value)).map(|pair| pair.1);
        let wrapped = if self.holds(root) { None } else { WRAPPERS.iter().find_map(|key| Some((*key, within(key)?))) };
        match wrapped {
            Some((key, state)) => {
                for (name, value) in pairs {
                    let Some(name) = self.pickle.text(*name).filter(|name| *name != key) else { continue };
                    match self.count(*value) {
                        0 => self.others.push(name.to_owned()),
                        count => self.alternatives.push((name.to_owned(), count)),
                    }
                }
                self.wrapper = Some(key);
                self.collect(state, "", 0)?;
            }
            None => self.collect(root, "", 0)?,
        }
        if self.tensors.is_empty() { Err(format!("it holds no tensor by name; {advice}")) } else { Ok(()) }
    }

    /// Whether a dictionary has tensors of its own.
    fn holds(&self, id: Id) -> bool {
        self.count(id) > 0
    }

    /// How many tensors of its own a dictionary has.
    fn count(&self, id: Id) -> usize {
        let Value::Dict(pairs) = self.pickle.get(id) else { return 0 };
        pairs.iter().filter(|(_, value)| tensor(self.pickle, *value).is_some()).count()
    }

    fn collect(&mut self, id: Id, prefix: &str, depth: usize) -> Result<(), String> {
        let Value::Dict(pairs) = self.pickle.get(id) else { return Ok(()) };
        if depth > DEEPEST || !self.open.insert(id) {
            return Err(format!("`{prefix}` is a dictionary in itself, in the file twice, or more than {DEEPEST} deep"));
        }
        for (key, value) in pairs {
            let key = match self.pickle.get(*key) {
                Value::Text(text) if text.len() <= LONGEST_NAME => text.clone(),
                Value::Int(number) => number.to_string(),
                _ => return Err(format!("`{prefix}` has a key that is no text, or longer than {LONGEST_NAME} bytes")),
            };
            if prefix.len().saturating_add(key.len()) > LONGEST_NAME {
                return Err(format!("a name has more than {LONGEST_NAME} bytes"));
            }
            let name = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
            match self.pickle.get(*value) {
                Value::Dict(_) => self.collect(*value, &name, depth.saturating_add(1))?,
                _ if tensor(self.pickle, *value).is_some() => {
                    if self.tensors.insert(name.clone(), *value).is_some() {
                        return Err(format!("tensor `{name}` is in the file twice"));
                    }
                }
                _ => self.others.push(name),
            }
        }
        Ok(())
    }

    fn notes(&self, path: &Path) -> Vec<String> {
        let path = path.display();
        let read = self.wrapper.map_or("the tensors by name".to_owned(), |wrapper| format!("the tensors of `{wrapper}`"));
        let more = self.others.len().saturating_sub(TOLD);
        let shown: Vec<String> = self.others.iter().take(TOLD).map(|name| format!("`{name}`")).collect();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let others = (!shown.is_empty()).then(|| format!("not carried over from {path}: {}{more} (only {read} are read)", shown.join(", ")));
        let alternatives = self.alternatives.iter().take(TOLD).map(|(name, count)| {
            format!("not carried over from {path}: `{name}`, another set of {count} tensors; only {read} are read: to compress `{name}`, save it to a file of its own")
        });
        others.into_iter().chain(alternatives).collect()
    }
}

/// The function that makes a tensor and its arguments, of whatever kind it is.
fn tensor(pickle: &Pickle, id: Id) -> Option<(&str, &[Id])> {
    let (mut function, mut arguments) = pickle.call(id)?;
    // A parameter is a tensor, and no parameter of a parameter.
    if let "torch._utils _rebuild_parameter" | "torch._utils _rebuild_parameter_with_state" = function {
        (function, arguments) = pickle.call(*arguments.first()?)?;
    }
    match function.strip_prefix("torch._utils _rebuild_").or(function.strip_prefix("torch._tensor _rebuild_"))? {
        // A subclass of tensors: (function, class, arguments, state).
        "from_type_v2" => match (pickle.global(*arguments.get(1)?)?, pickle.global(*arguments.first()?)?, pickle.list(*arguments.get(2)?)?) {
            ("torch.nn.parameter Parameter" | "torch.nn.parameter Buffer" | "torch Tensor", function, arguments) => {
                Some((function.strip_prefix("torch._utils _rebuild_")?, arguments))
            }
            _ => Some(("from_type_v2", arguments)),
        },
        kind => Some((kind, arguments)),
    }
}

fn of_dtype(name: &str) -> Option<DType> {
    Some(match name.strip_prefix("torch ")? {
        "float8_e4m3fn" => DType::F8_E4M3,
        "float8_e5m2" => DType::F8_E5M2,
        "float8_e8m0fnu" => DType::F8_E8M0,
        "uint16" => DType::U16,
        "uint32" => DType::U32,
        "uint64" => DType::U64,
        "float32" => DType::F32,
        "float16" => DType::F16,
        "bfloat16" => DType::BF16,
        _ => return None,
    })
}

/// What is said of a tensor.
fn said(pickle: &Pickle, id: Id) -> Result<Said, String> {
    let (kind, arguments) = tensor(pickle, id).ok_or("is no tensor")?;
    let unknown = || format!("is made by PyTorch's `_rebuild_{kind}`, which is not read: save it as a dense tensor (`.to_dense()`, `.dequantize()`, `.cpu()`)");
    let (storage_id, offset, shape, strides, dtype, extra) = match (kind, arguments) {
        ("tensor", [storage, offset, shape, strides]) => (storage, offset, shape, strides, None, None),
        ("tensor_v2", [storage, offset, shape, strides, _, _, rest @ ..]) => (storage, offset, shape, strides, None, rest.first()),
        ("tensor_v3", [storage, offset, shape, strides, _, _, dtype, rest @ ..]) => (storage, offset, shape, strides, Some(dtype), rest.first()),
        _ => return Err(unknown()),
    };
    if extra.is_some_and(|extra| !matches!(pickle.get(*extra), Value::None) && !matches!(pickle.get(*extra), Value::Dict(pairs) if pairs.is_empty())) {
        return Err("is a view that negates or conjugates, which is not read: save a copy (`.resolve_neg().resolve_conj()`)".into());
    }
    let outside = match pickle.get(*storage_id) {
        Value::Outside(id) => *id,
        _ => return Err("has no storage".into()),
    };
    let class = || pickle.list(outside).and_then(|said| pickle.global(*said.get(1)?)).unwrap_or("nothing").replace(' ', ".");
    let (key, typed, _) = storage(pickle, outside).ok_or_else(|| format!("lies in `{}`, which is not read", class()))?;
    let named = dtype.and_then(|dtype| pickle.global(*dtype));
    let dtype = match named {
        Some(name) => of_dtype(name).ok_or_else(|| format!("has elements of `{}`, which are not read", name.replace(' ', ".")))?,
        None => typed.ok_or("has elements without a type")?,
    };
    let sizes = |id: &Id| pickle.list(*id).and_then(|sizes| sizes.iter().map(|size| pickle.size(*size)).collect::<Option<Vec<_>>>());
    let (Some(offset), Some(shape), Some(strides)) = (pickle.size(*offset), sizes(shape), sizes(strides)) else {
        return Err("has sizes that are no numbers, or negative".into());
    };
    let shape = shape.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>().map_err(|_| "is larger than any memory")?;
    if shape.len() > MOST_AXES {
        return Err(format!("has {} axes", shape.len()));
    }
    if shape.len() != strides.len() { Err("has another number of sizes than of strides".into()) } else { Ok(Said { key, dtype, offset, shape, strides }) }
}

/// Finds where the elements of a tensor are.
fn place(name: &str, said: &Said, storage: Storage, file: &Arc<DataFile>, all: &mut Tensors) -> Result<(), String> {
    let width = said.dtype.bitsize() as u64 / 8;
    let elements = element_count(&said.shape).ok_or("is larger than any memory")?;
    let last =
        said.shape.iter().zip(&said.strides).try_fold(0u64, |last, (size, stride)| last.checked_add((*size as u64).saturating_sub(1).checked_mul(*stride)?));
    let end = last.and_then(|last| last.checked_add(said.offset)?.checked_add(1)?.checked_mul(width)).filter(|_| elements > 0);
    match end {
        Some(end) if end <= storage.bytes => {}
        None if elements == 0 => {}
        _ => return Err(format!("of shape {:?} reaches past the end of its storage, which has {} bytes", said.shape, storage.bytes)),
    }
    let stays = said.shape.iter().zip(&said.strides).any(|(size, stride)| *size > 1 && *stride == 0);
    if stays || elements.checked_mul(width).is_none_or(|bytes| bytes > storage.bytes) {
        return Err(format!("of shape {:?} repeats elements of its storage, which has {} bytes: save a copy (`.contiguous()`)", said.shape, storage.bytes));
    }
    let begin = storage.begin.saturating_add(said.offset.saturating_mul(width));
    if is_contiguous(said) {
        all.plain.insert(name.to_owned(), RawTensor::within(file, said.dtype, said.shape.clone(), begin, elements.saturating_mul(width)));
    } else {
        let source = Strided { file: file.clone(), begin, dtype: said.dtype, shape: said.shape.clone(), strides: said.strides.clone() };
        all.strided.insert(name.to_owned(), source.weight());
    }
    Ok(())
}

fn is_contiguous(said: &Said) -> bool {
    let mut expected = 1u64;
    said.shape.contains(&0)
        || said.shape.iter().zip(&said.strides).rev().all(|(size, stride)| {
            let fits = *size == 1 || *stride == expected;
            expected = expected.saturating_mul(*size as u64);
            fits
        })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use zip::CompressionMethod;

    use super::*;
    use crate::store::{Checkpoint, Weights};

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pytorch").join(name)
    }

    fn weights(path: &Path) -> Result<Weights> {
        Weights::from_checkpoint(Checkpoint::open(path)?)
    }

    /// Elements as they would be written, in blocks of so many at least.
    fn bytes(weight: &Weight, unit: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let step = unit * weight.dtype.bitsize() / 8;
        let mut ragged = false;
        let visited = weight.visit(unit, &mut |block| {
            assert!(!ragged, "a block that is no multiple of {unit} elements, and not the last");
            ragged = !block.now.values.len().is_multiple_of(step);
            bytes.extend_from_slice(block.now.values);
            Ok(())
        });
        visited.map(|()| bytes).unwrap()
    }

    fn refused(path: &Path, expected: &str) {
        let message = weights(path).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(message.contains(expected), "{}: `{message}` does not say `{expected}`", path.display());
    }

    #[test]
    fn tensors_are_those_that_pytorch_saved() {
        let expected = weights(&golden("tensors.safetensors")).unwrap();
        for name in ["archive.pt", "legacy.pt", "protocol.pt", "parallel.pt", "training.pt"] {
            let found = weights(&golden(name)).unwrap();
            assert!(found.by_name.keys().eq(expected.by_name.keys()), "{name}");
            for (tensor, weight) in &expected.by_name {
                let other = found.get(tensor).unwrap();
                assert_eq!((other.dtype, &other.shape, other.stored_bytes), (weight.dtype, &weight.shape, weight.stored_bytes), "{name}: {tensor}");
                for unit in [1, 3, 7] {
                    assert!(bytes(other, unit) == bytes(weight, unit), "{name}: {tensor}");
                }
            }
        }
        let notes = |name: &str| Checkpoint::open(&golden(name)).unwrap().notes.join("; ");
        assert_eq!(notes("archive.pt"), "");
        assert!(notes("parallel.pt").contains("torch.nn.DataParallel"));
        assert!(notes("training.pt").contains("`epoch`, `optimizer`, `arguments`"), "{}", notes("training.pt"));
    }

    #[test]
    fn headers_of_safetensors_are_no_pickles() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (size, pickle) in [(640u64, false), (0x0002_0380, false), (641, false), (0x4b50, false), (0x0403_4b50, false)] {
            std::fs::write(file.path(), [&size.to_le_bytes()[..], b"{\"a\":"].concat()).unwrap();
            assert_eq!(begins(file.path()), pickle, "{size}");
        }
        for start in [b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9".as_slice(), b"\x80\x02}", b"PK\x03\x04"] {
            std::fs::write(file.path(), start).unwrap();
            assert!(begins(file.path()));
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        refused(&golden("object.pt"), "a whole object of `torch.nn.modules.linear.Linear`");
        refused(&golden("sparse.pt"), "tensor `weight` is made by PyTorch's `_rebuild_sparse_tensor`");
        refused(&golden("repeated.pt"), "repeats elements of its storage");
    }

    /// Instructions for a dictionary of one tensor named `w`, with these sizes and strides.
    fn dictionary(sizes: &[u8]) -> Vec<u8> {
        let start = b"}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ";
        [start, sizes, b"\x89NtRs"].concat()
    }

    /// An archive of such a dictionary and a storage of so many bytes.
    fn archive(sizes: &[u8], stored: usize) -> tempfile::NamedTempFile {
        packed(&[b"\x80\x02", dictionary(sizes).as_slice(), b"."].concat(), stored)
    }

    fn packed(pickle: &[u8], stored: usize) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut zip = zip::ZipWriter::new(file.reopen().unwrap());
        let options = zip::write::SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        for (name, bytes) in [("a/data.pkl", pickle), ("a/data/0", &vec![0; stored])] {
            zip.start_file(name, options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap();
        file
    }

    #[test]
    fn notes_name_other_sets_of_weights_as_such() {
        let tensors = dictionary(b"K\x00K\x02K\x02\x86K\x02K\x01\x86");
        let entry = |name: &str, value: &[u8]| [b"X", &(name.len() as u32).to_le_bytes()[..], name.as_bytes(), value, b"s"].concat();
        let entries = [entry("state_dict", &tensors), entry("ema_state_dict", &tensors), entry("epoch", b"K\x03")].concat();
        let file = packed(&[b"\x80\x02}", entries.as_slice(), b"."].concat(), 16);
        let notes = Checkpoint::open(file.path()).unwrap().notes;
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].ends_with(": `epoch` (only the tensors of `state_dict` are read)"), "{notes:?}");
        assert!(notes[1].contains("`ema_state_dict`, another set of 1 tensors"), "{notes:?}");
    }

    #[test]
    fn sizes_are_held_to_what_is_stored() {
        assert_eq!(weights(archive(b"K\x00K\x02K\x02\x86K\x02K\x01\x86", 16).path()).unwrap().get("w").unwrap().shape, [2, 2]);
        refused(archive(b"K\x00K\x02K\x03\x86K\x03K\x01\x86", 16).path(), "`w` of shape [2, 3] reaches past the end");
        refused(archive(b"K\x01K\x02K\x02\x86K\x02K\x01\x86", 16).path(), "reaches past the end");
        refused(archive(b"K\x00K\x02K\x02\x86J\xff\xff\xff\xffK\x01\x86", 16).path(), "negative");
        refused(archive(b"K\x00K\x02K\x02\x86K\x02\x85", 16).path(), "another number of sizes");
        refused(archive(b"K\x00\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86K\x00K\x00\x86", 16).path(), "larger than any memory");
        refused(archive(b"K\x00J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86K\x00K\x00\x86", 16).path(), "repeats elements");
        refused(archive(b"K\x00K\x02K\x02\x86K\x01K\x00\x86", 64).path(), "repeats elements");
        refused(archive(&[b"K\x00(".as_slice(), &b"K\x01".repeat(65), b"t(", &b"K\x01".repeat(65), b"t"].concat(), 16).path(), "has 65 axes");
        // Elements that lie far from each other.
        let apart = archive(b"K\x00K\x02\x85M\xe8\x03\x85", 4004);
        assert_eq!(bytes(weights(apart.path()).unwrap().get("w").unwrap(), 1), [0; 8]);
    }

    #[test]
    fn a_parameter_of_itself_is_no_tensor() {
        let pickle = b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_parameter\n]q\x00Rq\x01h\x00h\x01a0s.";
        refused(packed(pickle, 0).path(), "`_rebuild_parameter`");
    }

    /// Every beginning of the files, and every byte changed: an error or tensors that can be read, and no panic.
    #[test]
    fn damaged_files_are_errors_or_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("damaged.pt");
        let mut errors = 0;
        for name in ["archive.pt", "legacy.pt", "training.pt"] {
            let whole = std::fs::read(golden(name)).unwrap();
            let cut = (0..whole.len()).step_by(97).map(|length| whole[..length].to_vec());
            let changed = (0..whole.len()).step_by(13).map(|at| {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << (at % 8);
                bytes
            });
            for bytes in cut.chain(changed) {
                std::fs::write(&path, bytes).unwrap();
                match weights(&path) {
                    Ok(weights) => weights.by_name.values().for_each(|weight| drop(weight.visit(5, &mut |_| Ok(())))),
                    Err(_) => errors += 1,
                }
            }
        }
        assert!(errors > 100, "{errors}");
    }
}
