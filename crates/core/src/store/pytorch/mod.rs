//! PyTorch checkpoints written by `torch.save`: zip archives (1.6 and later) and the legacy format. No
//! code of a file is executed: its pickle is parsed as data (`pickle.rs`), and only the functions that
//! rebuild tensors are interpreted (`torch/_utils.py`, `torch/serialization.py` of PyTorch 2.15).
//! Opening a file does not read its tensors.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod formats;
mod pickle;
mod strided;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

pub(super) use self::formats::unrecognized;
use self::formats::{Storage, legacy, storage, zipped};
use self::pickle::{Id, Pickle, Value};
use self::strided::Strided;
use super::header::{MOST_AXES, element_count};
use super::raw_tensor::DataFile;
use super::{DType, RawTensor, Weight};
use crate::error::{Error, Result, counted};
use crate::files::{self, File};

/// File name of an unsharded PyTorch checkpoint.
pub const SINGLE: &str = "pytorch_model.bin";
/// File name of the index of a sharded checkpoint.
pub const INDEX: &str = "pytorch_model.bin.index.json";
/// File extensions of PyTorch checkpoints.
pub const EXTENSIONS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// Keys under which training programs store the weights.
const WRAPPERS: [&str; 5] = ["state_dict", "model_state_dict", "model", "module", "net"];
/// Maximum depth of nested dictionaries.
const DEEPEST: usize = 16;
/// Maximum length of a tensor name.
const LONGEST_NAME: usize = 4096;
/// Prefix that `torch.nn.DataParallel` adds to every name.
const PARALLEL: &str = "module.";
/// Maximum number of entries listed in a note.
const LISTED: usize = 5;

/// The tensors of a file.
#[derive(Default)]
pub(super) struct Tensors {
    pub plain: BTreeMap<String, RawTensor>,
    /// Tensors that are not contiguous in row-major order.
    pub strided: BTreeMap<String, Weight>,
    /// Notes on contents other than tensors.
    pub notes: Vec<String>,
}

/// Metadata of a tensor in the pickle.
struct TensorInfo {
    key: String,
    dtype: DType,
    offset: u64,
    shape: Vec<usize>,
    strides: Vec<u64>,
}

/// Whether the first bytes of a file identify it as PyTorch's: a zip archive, or a pickle of protocol 2
/// or later.
pub(super) fn is_pytorch(path: &Path) -> bool {
    let mut start = Vec::new();
    // Opening a pipe without a writer would block.
    let read = files::is_file(path) && File::open(path).and_then(|file| file.reader().take(9).read_to_end(&mut start)).is_ok();
    read && match start.as_slice() {
        // The length field of a safetensors header may start with these bytes too, but is followed by
        // JSON at byte 8.
        [_, _, _, _, 0, 0, 0, 0, b'{', ..] => false,
        [b'P', b'K', 3, 4, ..] | [0x80, 2..=5, ..] => true,
        _ => false,
    }
}

/// Opens a file without reading its tensors. Unsupported contents are errors that name them.
pub(super) fn open(path: &Path) -> Result<Tensors> {
    let wrong = |reason: String| Error::malformed(path, reason);
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut start = [0; 2];
    file.read_exact_at(&mut start, 0).map_err(|_| wrong("not a file of PyTorch".into()))?;
    let (pickle, storages) = if start == *b"PK" { zipped(path, &file)? } else { legacy(path, &file)? };
    let file = DataFile::from_file(path, file);
    let mut found = Found { pickle: &pickle, tensors: BTreeMap::new(), ignored: Vec::new(), wrapper: None, alternatives: Vec::new(), visited: BTreeSet::new() };
    found.root().map_err(wrong)?;
    let mut all = Tensors { notes: found.notes(path), ..Tensors::default() };
    let parallel = found.tensors.keys().all(|name| name.starts_with(PARALLEL));
    if parallel {
        all.notes.push(format!("{}: the prefix `{PARALLEL}` of torch.nn.DataParallel was removed from all names", path.display()));
    }
    for (name, id) in &found.tensors {
        let name = if parallel { name.strip_prefix(PARALLEL).unwrap_or(name) } else { name };
        let in_tensor = |reason: String| wrong(format!("tensor `{name}` {reason}"));
        let info = tensor_info(&pickle, *id).map_err(in_tensor)?;
        let storage = storages(&info.key).map_err(in_tensor)?;
        add_tensor(name, &info, storage, &file, &mut all).map_err(in_tensor)?;
    }
    Ok(all)
}

/// Tensors of a pickle by name, and its other contents.
struct Found<'p> {
    pickle: &'p Pickle,
    tensors: BTreeMap<String, Id>,
    /// Entries that are neither tensors nor dictionaries of tensors.
    ignored: Vec<String>,
    /// The key of the dictionary that contains the tensors, unless the root does.
    wrapper: Option<&'static str>,
    /// Other dictionaries with tensors, and their number of tensors.
    alternatives: Vec<(String, usize)>,
    /// Dictionaries that were visited.
    visited: BTreeSet<Id>,
}

impl Found<'_> {
    fn root(&mut self) -> Result<(), String> {
        let root = self.pickle.root;
        let advice = "save the weights by name: torch.save(model.state_dict(), \"weights.pt\")";
        let Value::Dict(pairs) = self.pickle.get(root) else {
            let what =
                self.pickle.call(root).map_or("another value".to_owned(), |(function, _)| format!("an object of class `{}`", function.replace(' ', ".")));
            return Err(format!("it contains {what}, not a dictionary of tensors, and reading it would execute code; {advice}"));
        };
        let within = |key: &str| pairs.iter().find(|(name, value)| self.pickle.text(*name) == Some(key) && self.contains_tensors(*value)).map(|pair| pair.1);
        let wrapped = if self.contains_tensors(root) { None } else { WRAPPERS.iter().find_map(|key| Some((*key, within(key)?))) };
        match wrapped {
            Some((key, state)) => {
                for (name, value) in pairs {
                    let Some(name) = self.pickle.text(*name).filter(|name| *name != key) else { continue };
                    match self.count(*value) {
                        0 => self.ignored.push(name.to_owned()),
                        count => self.alternatives.push((name.to_owned(), count)),
                    }
                }
                self.wrapper = Some(key);
                self.collect(state, "", 0)?;
            }
            None => self.collect(root, "", 0)?,
        }
        if self.tensors.is_empty() { Err(format!("it contains no named tensors; {advice}")) } else { Ok(()) }
    }

    /// Whether a dictionary directly contains tensors.
    fn contains_tensors(&self, id: Id) -> bool {
        self.count(id) > 0
    }

    /// Number of tensors that a dictionary directly contains.
    fn count(&self, id: Id) -> usize {
        let Value::Dict(pairs) = self.pickle.get(id) else { return 0 };
        pairs.iter().filter(|(_, value)| tensor(self.pickle, *value).is_some()).count()
    }

    fn collect(&mut self, id: Id, prefix: &str, depth: usize) -> Result<(), String> {
        let Value::Dict(pairs) = self.pickle.get(id) else { return Ok(()) };
        if depth > DEEPEST || !self.visited.insert(id) {
            return Err(format!("`{prefix}` is a dictionary that contains itself, occurs twice, or is nested more than {DEEPEST} levels deep"));
        }
        for (key, value) in pairs {
            let key = match self.pickle.get(*key) {
                Value::Text(text) if text.len() <= LONGEST_NAME => text.clone(),
                Value::Int(number) => number.to_string(),
                _ => return Err(format!("`{prefix}` has a key that is not a string, or is longer than {LONGEST_NAME} bytes")),
            };
            if prefix.len().saturating_add(key.len()) > LONGEST_NAME {
                return Err(format!("a name has more than {LONGEST_NAME} bytes"));
            }
            let name = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
            match self.pickle.get(*value) {
                Value::Dict(_) => self.collect(*value, &name, depth.saturating_add(1))?,
                _ if tensor(self.pickle, *value).is_some() => {
                    if self.tensors.insert(name.clone(), *value).is_some() {
                        return Err(format!("tensor `{name}` occurs twice"));
                    }
                }
                _ => self.ignored.push(name),
            }
        }
        Ok(())
    }

    fn notes(&self, path: &Path) -> Vec<String> {
        let path = path.display();
        let read = self.wrapper.map_or("the tensors by name".to_owned(), |wrapper| format!("the tensors of `{wrapper}`"));
        let more = self.ignored.len().saturating_sub(LISTED);
        let shown: Vec<String> = self.ignored.iter().take(LISTED).map(|name| format!("`{name}`")).collect();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let ignored = (!shown.is_empty()).then(|| format!("not copied from {path}: {}{more} (only {read} are read)", shown.join(", ")));
        let alternatives = self.alternatives.iter().take(LISTED).map(|(name, count)| {
            format!(
                "not copied from {path}: `{name}`, another set of {} (only {read} are read); to compress `{name}`, save it to a separate file",
                counted(*count, "tensor")
            )
        });
        ignored.into_iter().chain(alternatives).collect()
    }
}

/// The function that rebuilds a tensor, without its prefix, and its arguments.
fn tensor(pickle: &Pickle, id: Id) -> Option<(&str, &[Id])> {
    let (mut function, mut arguments) = pickle.call(id)?;
    // Unwraps a parameter, but not a parameter of a parameter.
    if let "torch._utils _rebuild_parameter" | "torch._utils _rebuild_parameter_with_state" = function {
        (function, arguments) = pickle.call(*arguments.first()?)?;
    }
    match function.strip_prefix("torch._utils _rebuild_").or(function.strip_prefix("torch._tensor _rebuild_"))? {
        // Tensor subclasses: (function, class, arguments, state).
        "from_type_v2" => match (pickle.global(*arguments.get(1)?)?, pickle.global(*arguments.first()?)?, pickle.list(*arguments.get(2)?)?) {
            ("torch.nn.parameter Parameter" | "torch.nn.parameter Buffer" | "torch Tensor", function, arguments) => {
                Some((function.strip_prefix("torch._utils _rebuild_")?, arguments))
            }
            _ => Some(("from_type_v2", arguments)),
        },
        kind => Some((kind, arguments)),
    }
}

fn parse_dtype(name: &str) -> Option<DType> {
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

/// The metadata of a tensor.
fn tensor_info(pickle: &Pickle, id: Id) -> Result<TensorInfo, String> {
    let (kind, arguments) = tensor(pickle, id).ok_or("is not a tensor")?;
    let unknown =
        || format!("is rebuilt by PyTorch's `_rebuild_{kind}`, which is not supported; save it as a dense tensor (`.to_dense()`, `.dequantize()`, `.cpu()`)");
    let (storage_id, offset, shape, strides, dtype, extra) = match (kind, arguments) {
        ("tensor", [storage, offset, shape, strides]) => (storage, offset, shape, strides, None, None),
        ("tensor_v2", [storage, offset, shape, strides, _, _, rest @ ..]) => (storage, offset, shape, strides, None, rest.first()),
        ("tensor_v3", [storage, offset, shape, strides, _, _, dtype, rest @ ..]) => (storage, offset, shape, strides, Some(dtype), rest.first()),
        _ => return Err(unknown()),
    };
    if extra.is_some_and(|extra| !matches!(pickle.get(*extra), Value::None) && !matches!(pickle.get(*extra), Value::Dict(pairs) if pairs.is_empty())) {
        return Err("is a negated or conjugated view, which is not supported; save a copy (`.resolve_neg().resolve_conj()`)".into());
    }
    let outside = match pickle.get(*storage_id) {
        Value::Persistent(id) => *id,
        _ => return Err("has no storage".into()),
    };
    let class = || pickle.list(outside).and_then(|storage| pickle.global(*storage.get(1)?)).unwrap_or("nothing").replace(' ', ".");
    let (key, typed, _) = storage(pickle, outside).ok_or_else(|| format!("is stored in `{}`, which is not supported", class()))?;
    let dtype_name = dtype.and_then(|dtype| pickle.global(*dtype));
    let dtype = match dtype_name {
        Some(name) => parse_dtype(name).ok_or_else(|| format!("has elements of `{}`, which are not supported", name.replace(' ', ".")))?,
        None => typed.ok_or("has elements without a type")?,
    };
    let sizes = |id: &Id| pickle.list(*id).and_then(|sizes| sizes.iter().map(|size| pickle.size(*size)).collect::<Option<Vec<_>>>());
    let (Some(offset), Some(shape), Some(strides)) = (pickle.size(*offset), sizes(shape), sizes(strides)) else {
        return Err("has sizes that are negative or not integers".into());
    };
    let shape = shape.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>().map_err(|_| "is too large")?;
    if shape.len() > MOST_AXES {
        return Err(format!("has {} axes", shape.len()));
    }
    if shape.len() != strides.len() {
        Err("has a shape and strides of different lengths".into())
    } else {
        Ok(TensorInfo { key, dtype, offset, shape, strides })
    }
}

/// Validates the extent of a tensor against its storage, and adds the tensor to `all`.
fn add_tensor(name: &str, info: &TensorInfo, storage: Storage, file: &Arc<DataFile>, all: &mut Tensors) -> Result<(), String> {
    let width = info.dtype.bitsize() as u64 / 8;
    let elements = element_count(&info.shape).ok_or("is too large")?;
    let last =
        info.shape.iter().zip(&info.strides).try_fold(0u64, |last, (size, stride)| last.checked_add((*size as u64).saturating_sub(1).checked_mul(*stride)?));
    let end = last.and_then(|last| last.checked_add(info.offset)?.checked_add(1)?.checked_mul(width)).filter(|_| elements > 0);
    match end {
        Some(end) if end <= storage.bytes => {}
        None if elements == 0 => {}
        _ => return Err(format!("of shape {:?} extends beyond its storage of {} bytes", info.shape, storage.bytes)),
    }
    // PyTorch gives empty tensors in channels-last order strides of 0.
    let repeats = elements > 0 && info.shape.iter().zip(&info.strides).any(|(size, stride)| *size > 1 && *stride == 0);
    if repeats || elements.checked_mul(width).is_none_or(|bytes| bytes > storage.bytes) {
        return Err(format!("of shape {:?} repeats elements of its storage of {} bytes; save a copy (`.contiguous()`)", info.shape, storage.bytes));
    }
    let begin = storage.begin.saturating_add(info.offset.saturating_mul(width));
    if is_contiguous(info) {
        all.plain.insert(name.to_owned(), RawTensor::within(file, info.dtype, info.shape.clone(), begin, elements.saturating_mul(width)));
    } else {
        let source = Strided { file: file.clone(), begin, dtype: info.dtype, shape: info.shape.clone(), strides: info.strides.clone() };
        all.strided.insert(name.to_owned(), source.weight());
    }
    Ok(())
}

fn is_contiguous(info: &TensorInfo) -> bool {
    let mut expected = 1u64;
    info.shape.contains(&0)
        || info.shape.iter().zip(&info.strides).rev().all(|(size, stride)| {
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
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/pytorch").join(name)
    }

    fn weights(path: &Path) -> Result<Weights> {
        Weights::from_checkpoint(Checkpoint::open(path)?)
    }

    /// The elements as they would be written, visited in multiples of `unit`.
    fn bytes(weight: &Weight, unit: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let step = unit * weight.dtype.bitsize() / 8;
        let mut ragged = false;
        let visited = weight.visit(unit, &mut |block| {
            assert!(!ragged, "a block other than the last is not a multiple of {unit} elements");
            ragged = !block.now.values.len().is_multiple_of(step);
            bytes.extend_from_slice(block.now.values);
            Ok(())
        });
        visited.map(|()| bytes).unwrap()
    }

    fn refused(path: &Path, expected: &str) {
        let message = weights(path).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(message.contains(expected), "{}: `{message}` does not contain `{expected}`", path.display());
    }

    #[test]
    fn tensors_equal_those_saved_by_pytorch() {
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
    fn safetensors_headers_are_not_pickles() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (size, pickle) in [(640u64, false), (0x0002_0380, false), (641, false), (0x4b50, false), (0x0403_4b50, false)] {
            std::fs::write(file.path(), [&size.to_le_bytes()[..], b"{\"a\":"].concat()).unwrap();
            assert_eq!(is_pytorch(file.path()), pickle, "{size}");
        }
        for start in [b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9".as_slice(), b"\x80\x02}", b"PK\x03\x04"] {
            std::fs::write(file.path(), start).unwrap();
            assert!(is_pytorch(file.path()));
        }
    }

    #[test]
    fn unsupported_contents_are_rejected_by_name() {
        refused(&golden("object.pt"), "an object of class `torch.nn.modules.linear.Linear`");
        refused(&golden("sparse.pt"), "tensor `weight` is rebuilt by PyTorch's `_rebuild_sparse_tensor`");
        refused(&golden("repeated.pt"), "repeats elements of its storage");
    }

    #[test]
    fn old_pickle_protocols_are_rejected_by_name() {
        let file = tempfile::Builder::new().suffix(".pth").tempfile().unwrap();
        std::fs::write(file.path(), [formats::OLD_PROTOCOL, b"\n.I1001\n."].concat()).unwrap();
        refused(file.path(), "pickle protocol 0 or 1");
        std::fs::write(file.path(), "version https://git-lfs.github.com/spec/v1").unwrap();
        refused(file.path(), "neither a zip archive nor a pickle");
    }

    #[test]
    fn empty_tensors_have_any_strides() {
        let path = golden("repeated.pt");
        let file = DataFile::from_file(&path, File::open(&path).unwrap());
        let info = TensorInfo { key: "0".into(), dtype: DType::F32, offset: 0, shape: vec![2, 0, 3, 3], strides: vec![0, 1, 0, 0] };
        let mut all = Tensors::default();
        add_tensor("w", &info, Storage { begin: 0, bytes: 0 }, &file, &mut all).unwrap();
        assert_eq!(all.plain["w"].bytes(), 0);
    }

    /// Pickle instructions for a dictionary with one tensor `w` with these sizes and strides.
    fn dictionary(sizes: &[u8]) -> Vec<u8> {
        let start = b"}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ";
        [start, sizes, b"\x89NtRs"].concat()
    }

    /// An archive of such a dictionary and a storage of `stored` bytes.
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
        assert!(notes[1].contains("`ema_state_dict`, another set of 1 tensor ("), "{notes:?}");
    }

    #[test]
    fn sizes_are_checked_against_the_storage() {
        assert_eq!(weights(archive(b"K\x00K\x02K\x02\x86K\x02K\x01\x86", 16).path()).unwrap().get("w").unwrap().shape, [2, 2]);
        refused(archive(b"K\x00K\x02K\x03\x86K\x03K\x01\x86", 16).path(), "`w` of shape [2, 3] extends beyond its storage");
        refused(archive(b"K\x01K\x02K\x02\x86K\x02K\x01\x86", 16).path(), "extends beyond its storage");
        refused(archive(b"K\x00K\x02K\x02\x86J\xff\xff\xff\xffK\x01\x86", 16).path(), "negative");
        refused(archive(b"K\x00K\x02K\x02\x86K\x02\x85", 16).path(), "of different lengths");
        refused(archive(b"K\x00\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86K\x00K\x00\x86", 16).path(), "too large");
        refused(archive(b"K\x00J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86K\x00K\x00\x86", 16).path(), "repeats elements");
        refused(archive(b"K\x00K\x02K\x02\x86K\x01K\x00\x86", 64).path(), "repeats elements");
        refused(archive(&[b"K\x00(".as_slice(), &b"K\x01".repeat(65), b"t(", &b"K\x01".repeat(65), b"t"].concat(), 16).path(), "has 65 axes");
        // A tensor with large strides.
        let apart = archive(b"K\x00K\x02\x85M\xe8\x03\x85", 4004);
        assert_eq!(bytes(weights(apart.path()).unwrap().get("w").unwrap(), 1), [0; 8]);
    }

    #[test]
    fn a_parameter_that_contains_itself_is_not_a_tensor() {
        let pickle = b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_parameter\n]q\x00Rq\x01h\x00h\x01a0s.";
        refused(packed(pickle, 0).path(), "`_rebuild_parameter`");
    }

    /// Every prefix of the files, and every byte changed: an error or readable tensors, and no panic.
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
