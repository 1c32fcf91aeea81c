//! The two file formats of `torch.save`: location of the pickle and of the storages that it refers to.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::io::{BufReader, Read};
use std::path::Path;

use zip::{CompressionMethod, ZipArchive};

use super::pickle::{Id, Pickle, Value};
use crate::error::{Error, Result};
use crate::files::{self, File};
use crate::store::DType;

/// The magic number of files before PyTorch 1.6, as encoded in the pickle.
const MARK: &[u8] = b"l\xfc\x9cF\xf9 j\xa8P\x19";
/// Maximum size of a pickle in bytes. 60,000 tensors take 15 MB.
const MAX_PICKLE: u64 = 16 << 20;
/// Start of a file that `torch.save` wrote in the legacy format with pickle protocol 0 or 1: its magic
/// number.
pub(super) const OLD_PROTOCOL: &[u8] = b"L119547037146038801333356L";

/// A storage: a contiguous buffer that contains tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Storage {
    /// Offset of the first byte in the file.
    pub begin: u64,
    pub bytes: u64,
}

/// Why a file with an extension of PyTorch is not supported, if [`is_pytorch`](super::is_pytorch) returns
/// false.
pub(in crate::store) fn unrecognized(path: &Path) -> &'static str {
    let (mut start, length) = (Vec::new(), OLD_PROTOCOL.len() as u64);
    let read = files::is_file(path) && File::open(path).and_then(|file| file.reader().take(length).read_to_end(&mut start)).is_ok();
    if read && start == OLD_PROTOCOL {
        "a PyTorch file with pickle protocol 0 or 1, but only protocols 2 to 5 are supported: save it with the default protocol of `torch.save`"
    } else {
        "not a PyTorch file: it is neither a zip archive nor a pickle (if it is a Git LFS pointer, download the file)"
    }
}

/// Looks up a storage by key.
pub(super) type Storages = Box<dyn Fn(&str) -> Result<Storage, String>>;

/// Reads the pickle of a zip archive and locates its storages.
pub(super) fn zipped(path: &Path, file: &File) -> Result<(Pickle, Storages)> {
    let wrong = |reason: String| Error::malformed(path, reason);
    let zip = |e: zip::result::ZipError| wrong(format!("not a valid PyTorch archive: {e}"));
    let mut archive = ZipArchive::new(BufReader::new(file.reader())).map_err(zip)?;
    let names: Vec<String> = archive.file_names().map(|name| name.map(|name| name.into_owned()).map_err(zip)).collect::<Result<_>>()?;
    let root =
        names.iter().find_map(|name| name.strip_suffix("data.pkl").filter(|root| root.is_empty() || (root.ends_with('/') && root.matches('/').count() == 1)));
    let Some(root) = root else { return Err(wrong("the archive has no `data.pkl`, so it was not written by torch.save".into())) };
    if names.iter().any(|name| *name == format!("{root}constants.pkl")) {
        return Err(Error::Unsupported {
            what: format!("{}, a TorchScript program,", path.display()),
            hint: "save the weights of the model: torch.save(model.state_dict(), \"weights.pt\")".into(),
        });
    }
    let mut text = |name: &str, limit: u64| -> Result<Option<Vec<u8>>> {
        let Some(index) = archive.index_for_name(&format!("{root}{name}")) else { return Ok(None) };
        let entry = archive.by_index(index).map_err(zip)?;
        require_stored(path, &entry.name().map_err(zip)?, entry.compression())?;
        let mut bytes = Vec::new();
        if entry.size() > limit || entry.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(Error::io("read", path))? as u64 > limit {
            return Err(wrong(format!("`{name}` of the archive has more than {limit} bytes")));
        }
        Ok(Some(bytes))
    };
    if let Some(order) = text("byteorder", 16)?.filter(|order| order != b"little") {
        return Err(wrong(format!("its byte order `{}` is not supported (expected `little`)", String::from_utf8_lossy(&order))));
    }
    let pickle = Pickle::read(&text("data.pkl", MAX_PICKLE)?.unwrap_or_default()).map_err(|reason| wrong(format!("invalid pickle: {reason}")))?;
    let length = file.length();
    let mut storages = BTreeMap::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(zip)?;
        let name = entry.name().map_err(zip)?.into_owned();
        let Some(key) = name.strip_prefix(&format!("{root}data/")) else { continue };
        require_stored(path, &name, entry.compression())?;
        let begin = entry.data_start().ok_or_else(|| wrong(format!("`{name}` of the archive has no valid offset")))?;
        if begin.checked_add(entry.size()).is_none_or(|end| end > length) || entry.compressed_size() != entry.size() {
            return Err(wrong(format!("`{name}` of the archive exceeds the file with {} bytes (is the file truncated?)", entry.size())));
        }
        if storages.insert(key.to_owned(), Storage { begin, bytes: entry.size() }).is_some() {
            return Err(wrong(format!("`{name}` occurs twice in the archive")));
        }
    }
    let find = move |key: &str| storages.get(key).copied().ok_or_else(|| format!("refers to storage `{key}`, which is not in the archive"));
    Ok((pickle, Box::new(find)))
}

/// Rejects compressed entries, so that a small file cannot expand to a large one.
fn require_stored(path: &Path, name: &str, compression: CompressionMethod) -> Result<()> {
    if compression == CompressionMethod::Stored {
        return Ok(());
    }
    Err(Error::malformed(path, format!("`{name}` of the archive is compressed, which is not supported; load the file with torch.load and save it again")))
}

/// Reads the format before PyTorch 1.6: five pickles (magic number, version, system information, values,
/// storage keys), followed by the storages, each preceded by its number of elements.
pub(super) fn legacy(path: &Path, file: &File) -> Result<(Pickle, Storages)> {
    let wrong = |reason: String| Error::malformed(path, reason);
    let mut bytes = Vec::new();
    BufReader::new(file.reader()).take(MAX_PICKLE).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    let mut at = 0usize;
    let mut next = || {
        let pickle = Pickle::read(bytes.get(at..).unwrap_or_default()).map_err(|reason| wrong(format!("not a valid file of torch.save: {reason}")))?;
        at = at.saturating_add(pickle.length);
        Ok::<_, Error>(pickle)
    };
    let [mark, version, system, pickle, keys] = [next()?, next()?, next()?, next()?, next()?];
    let marked = bytes.get(..mark.length).is_some_and(|start| start.windows(MARK.len()).any(|window| window == MARK));
    if !marked || version.size(version.root) != Some(1001) {
        return Err(wrong("not a file of torch.save: its magic number or version is wrong".into()));
    }
    if let Value::Dict(pairs) = system.get(system.root)
        && pairs.iter().any(|(key, value)| system.text(*key) == Some("little_endian") && *system.get(*value) == Value::Bool(false))
    {
        return Err(wrong("big-endian files are not supported".into()));
    }
    // The element types of the storages are defined by the tensors.
    let mut widths = BTreeMap::new();
    for value in pickle.all() {
        if let Value::Persistent(id) = pickle.get(value)
            && let Some((key, dtype, _)) = storage(&pickle, *id)
        {
            widths.insert(key, dtype.map_or(1, |dtype| dtype.bitsize() as u64 / 8));
        }
    }
    let keys = keys.list(keys.root).map(|list| list.iter().map(|key| keys.text(*key).map(str::to_owned)).collect::<Option<Vec<_>>>());
    let keys = keys.flatten().ok_or_else(|| wrong("not a valid file of torch.save: the list of storages is missing".into()))?;
    let (mut storages, mut offset) = (BTreeMap::new(), at as u64);
    for key in keys {
        let mut count = [0; 8];
        file.read_exact_at(&mut count, offset).map_err(|e| Error::malformed(path, format!("storage `{key}` cannot be read ({e}); is the file truncated?")))?;
        let width = widths.get(&key).copied().unwrap_or(1);
        let begin = offset.saturating_add(8);
        let bytes = u64::from_le_bytes(count).saturating_mul(width);
        offset = begin.saturating_add(bytes);
        storages.insert(key, Storage { begin, bytes });
    }
    if file.length() < offset {
        return Err(wrong("it ends before its last storage (is the file truncated?)".into()));
    }
    let find = move |key: &str| storages.get(key).copied().ok_or_else(|| format!("refers to storage `{key}`, which is not in the file"));
    Ok((pickle, Box::new(find)))
}

/// Key, element type (if any) and number of elements of a storage.
pub(super) fn storage(pickle: &Pickle, id: Id) -> Option<(String, Option<DType>, u64)> {
    let [kind, class, key, _, count, view @ ..] = pickle.list(id)? else { return None };
    if view.iter().any(|view| *pickle.get(*view) != Value::None) {
        return None;
    }
    let class = pickle.global(*class)?.rsplit(' ').next()?;
    let dtype = match class {
        "UntypedStorage" => None,
        class => Some(storage_dtype(class)?),
    };
    (pickle.text(*kind) == Some("storage")).then_some((pickle.text(*key)?.to_owned(), dtype, pickle.size(*count)?))
}

fn storage_dtype(class: &str) -> Option<DType> {
    Some(match class {
        "FloatStorage" => DType::F32,
        "HalfStorage" => DType::F16,
        "BFloat16Storage" => DType::BF16,
        "DoubleStorage" => DType::F64,
        "LongStorage" => DType::I64,
        "IntStorage" => DType::I32,
        "ShortStorage" => DType::I16,
        "CharStorage" => DType::I8,
        "ByteStorage" => DType::U8,
        "BoolStorage" => DType::BOOL,
        _ => return None,
    })
}
