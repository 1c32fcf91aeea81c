//! Writes safetensors files: the header, then the tensors in parallel, each block by block at its own
//! offset.
//!
//! The intended contents are hashed while they are computed. Every segment of a file is read back after
//! it was written and compared.

use std::collections::BTreeMap;
use std::path::Path;

use super::header::Header;
pub use super::item::Item;
use super::item::PlannedFile;
use super::measure::{Measure, hash_values};
pub use super::measure::{RowRange, WeightMeasurement};
use super::part_writer::PartWriter;
pub use super::prebuilt::{Prebuilt, PrebuiltFile};
use super::storage_format::Emitter;
use super::verified_file::VerifiedFile;
use super::weights::in_folder;
use super::{Block, StorageFormat, StoredTensor, Weight, checkpoint, raw_tensor};
use crate::error::{Error, Result};
use crate::files::Destination;
use crate::work::Work;

/// A written file.
#[derive(Debug, Clone)]
pub struct Written {
    /// Name inside the folder.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// Hash of the file, computed while it was read back.
    pub blake3: blake3::Hash,
}

/// Assignment of tensors to files and offsets.
#[derive(Debug)]
pub struct FileLayout {
    files: Vec<PlannedFile>,
    index: Option<String>,
    parts: Vec<Vec<StoredTensor>>,
}

impl FileLayout {
    /// Distributes the items over files of at most `shard_bytes` in the given order, and names them as
    /// the Hub does. A larger tensor gets a separate file. Parts of a weight are not split. Weights of
    /// `folders` are written to one file in each folder.
    pub fn new(items: &[Item], metadata: &BTreeMap<String, String>, folders: &[String], shard_bytes: u64) -> Result<FileLayout> {
        let parts: Vec<Vec<StoredTensor>> = items.iter().map(|item| item.storage_format.parts(&item.name, &item.weight)).collect();
        let mut shards: Vec<(u64, Vec<&StoredTensor>)> = vec![(0, Vec::new())];
        let mut total = 0u64;
        let mut inside: BTreeMap<&str, Vec<(&str, &StoredTensor)>> = BTreeMap::new();
        for (item, parts) in items.iter().zip(&parts) {
            if in_folder(folders, &item.name).is_some() {
                for part in parts {
                    let (folder, name) = in_folder(folders, &part.name).unwrap_or_default();
                    inside.entry(folder).or_default().push((name, part));
                }
                continue;
            }
            let bytes = sum_bytes(parts).ok_or_else(|| Error::tensor(&item.name, "its size overflows", ""))?;
            if let Some((filled, parts)) = shards.last()
                && !parts.is_empty()
                && filled + bytes > shard_bytes
            {
                shards.push((0, Vec::new()));
            }
            if let Some((filled, shard)) = shards.last_mut() {
                *filled += bytes;
                shard.extend(parts);
            }
            total += bytes;
        }
        shards.retain(|(_, parts)| !parts.is_empty() || inside.is_empty());
        let count = shards.len();
        let mut files = Vec::with_capacity(count);
        let mut weight_map = BTreeMap::new();
        let mut lay = |name: String, parts: Vec<(&str, &StoredTensor)>| -> Result<()> {
            let header = Header::layout(parts.into_iter().map(|(name, part)| (name.to_owned(), part.dtype, part.shape.clone())), metadata.clone())
                .map_err(|name| Error::tensor(&name, "its size overflows", ""))?;
            files.push(PlannedFile { name, header });
            Ok(())
        };
        for (i, (_, parts)) in shards.into_iter().enumerate() {
            let name = if count == 1 { checkpoint::SINGLE.to_owned() } else { format!("model-{:05}-of-{count:05}.safetensors", i + 1) };
            weight_map.extend(parts.iter().map(|part| (part.name.clone(), name.clone())));
            lay(name, parts.into_iter().map(|part| (part.name.as_str(), part)).collect())?;
        }
        for (folder, parts) in inside {
            let is_adapter = parts.iter().all(|(name, _)| name.starts_with(checkpoint::ADAPTER_PREFIX));
            lay(format!("{folder}/{}", if is_adapter { checkpoint::ADAPTER } else { checkpoint::SINGLE }), parts)?;
        }
        let index = (count > 1).then(|| format!("{:#}\n", serde_json::json!({ "metadata": { "total_size": total }, "weight_map": weight_map })));
        Ok(FileLayout { files, index, parts })
    }

    /// Indices of the items in each file.
    pub fn items_by_file(&self) -> Vec<Vec<usize>> {
        let file_of = self.files.iter().zip(0..).flat_map(|(file, at)| file.header.tensors.iter().map(move |tensor| (file.full_name(&tensor.name), at)));
        let file_of: BTreeMap<String, usize> = file_of.collect();
        let mut found = vec![Vec::new(); self.files.len()];
        for (item, parts) in self.parts.iter().enumerate() {
            let file = parts.first().and_then(|part| found.get_mut(*file_of.get(&part.name)?));
            file.into_iter().for_each(|items| items.push(item));
        }
        found
    }

    /// Total size of prebuilt files that are linked and need no additional space, in bytes.
    pub fn linked_bytes(&self, prebuilt: &Prebuilt) -> u64 {
        self.files.iter().filter(|file| prebuilt.file(file).is_some()).map(|file| file.header.data_bytes()).sum()
    }

    /// Total size of all files in bytes, including headers.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.header.data_bytes() + file.header.to_bytes().len() as u64).sum()
    }

    /// Names of the files, starting with the index if there is one.
    pub fn names(&self) -> Vec<String> {
        self.index.iter().map(|_| checkpoint::INDEX.to_owned()).chain(self.files.iter().map(|file| file.name.clone())).collect()
    }

    /// Number of tensors in all files.
    pub fn tensors(&self) -> usize {
        self.files.iter().map(|file| file.header.tensors.len()).sum()
    }
}

fn sum_bytes(parts: &[StoredTensor]) -> Option<u64> {
    parts.iter().try_fold(0u64, |sum, p| sum.checked_add(super::header::byte_count(p.dtype, &p.shape)?))
}

/// A contiguous section of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Literal bytes.
    Bytes(Vec<u8>),
    /// A part of an item.
    Item {
        /// Number of the item.
        index: usize,
        /// Index of the part in the item's storage format.
        part: usize,
        /// Length in bytes.
        bytes: u64,
    },
}

impl Piece {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Piece::Bytes(bytes) => bytes.len() as u64,
            Piece::Item { bytes, .. } => *bytes,
        }
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Target location of one part of an item.
struct PartTarget<'a> {
    name: &'a str,
    part: usize,
    file: usize,
    offset: u64,
    length: u64,
}

/// Writes literal bytes.
fn write_bytes(file: &VerifiedFile, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut writer = PartWriter::new(file, offset, bytes.len() as u64);
    writer.write(bytes)?;
    writer.finish(name)
}

/// Computes every item, or copies prebuilt data, and writes its parts to their targets.
fn write_items(
    folder: &Destination,
    files: &[VerifiedFile],
    items: &[Item],
    targets: &[Vec<PartTarget>],
    prebuilt: Option<&Prebuilt>,
    work: &Work,
) -> Result<Vec<WeightMeasurement>> {
    let jobs: Vec<(&Item, &[PartTarget])> = items.iter().zip(targets).map(|(item, targets)| (item, targets.as_slice())).collect();
    let size = |(item, _): &(&Item, &[PartTarget])| item.weight.stored_bytes.max(1);
    let write = |(item, targets): &(&Item, &[PartTarget])| {
        let mut writers: Vec<PartWriter> = targets.iter().map(|target| PartWriter::new(&files[target.file], target.offset, target.length)).collect();
        let measurement = match prebuilt {
            None => write_item(item, &mut writers, work)?,
            Some(prebuilt) => {
                let names: Vec<&str> = targets.iter().map(|target| target.name).collect();
                prebuilt.copy(item, &names, &mut writers, work)?
            }
        };
        for (writer, target) in writers.into_iter().zip(*targets) {
            writer.finish(target.name)?;
        }
        Ok(measurement)
    };
    // Uploads buffer incomplete parts in memory, so adjacent items are written at about the same time.
    if folder.is_streamed() {
        return work.run_in_order("Writing", &jobs, size, write);
    }
    // SHA-256 verification needs the input in file order. Ranges read in another order are downloaded
    // twice.
    if items.iter().any(|item| item.weight.remote_position.is_some()) {
        return work.run_by("Writing", &jobs, |(item, _)| item.weight.remote_position, size, write);
    }
    work.run("Writing", &jobs, size, write)
}

/// Writes files of any format from sections that cover them completely, with each part of an item once,
/// and reads everything back. Errors as [`write()`].
pub fn write_pieces(folder: &Destination, files: &[(String, Vec<Piece>)], items: &[Item], work: &Work) -> Result<(Vec<Written>, Vec<WeightMeasurement>)> {
    let mut targets = Vec::with_capacity(files.len());
    let mut part_targets: Vec<Vec<PartTarget>> = items.iter().map(|_| Vec::new()).collect();
    for (file, (name, pieces)) in files.iter().enumerate() {
        let target = VerifiedFile::create(folder, name, pieces.iter().map(Piece::len).sum())?;
        let mut offset = 0;
        for piece in pieces {
            match piece {
                Piece::Bytes(bytes) => write_bytes(&target, name, offset, bytes)?,
                Piece::Item { index, part, bytes } => {
                    part_targets[*index].push(PartTarget { name: &items[*index].name, part: *part, file, offset, length: *bytes });
                }
            }
            offset += piece.len();
        }
        targets.push(target);
    }
    for (item, parts_of_item) in items.iter().zip(&mut part_targets) {
        parts_of_item.sort_by_key(|target| target.part);
        let parts = item.storage_format.parts(&item.name, &item.weight);
        let fits = |(target, part): (&PartTarget, &StoredTensor)| super::header::byte_count(part.dtype, &part.shape) == Some(target.length);
        if parts.len() != parts_of_item.len() || !parts_of_item.iter().zip(&parts).all(fits) {
            return Err(Error::tensor(&item.name, "does not fit the planned file layout", "this is a bug in compress, please report it"));
        }
    }
    let measurements = write_items(folder, &targets, items, &part_targets, None, work)?;
    let mut written = Vec::with_capacity(files.len());
    for (target, (name, _)) in targets.into_iter().zip(files) {
        written.push(Written { name: name.clone(), bytes: target.length(), blake3: target.finish(work)? });
    }
    Ok((written, measurements))
}

/// Writes the items into a folder and reads everything back. Prebuilt parts are copied or linked. Fails if a
/// file reads back differently.
pub fn write(
    folder: &Destination,
    items: &[Item],
    layout: &FileLayout,
    prebuilt: Option<&Prebuilt>,
    work: &Work,
) -> Result<(Vec<Written>, Vec<WeightMeasurement>)> {
    let mut targets: Vec<VerifiedFile> = Vec::with_capacity(layout.files.len());
    let (mut by_name, mut linked) = (BTreeMap::new(), BTreeMap::new());
    for file in &layout.files {
        let PlannedFile { name, header } = file;
        let bytes = header.to_bytes();
        if let Some(parent) = Path::new(name).parent().filter(|parent| !parent.as_os_str().is_empty()) {
            let parent = folder.path().join(parent);
            std::fs::create_dir_all(&parent).map_err(Error::io("create", &parent))?;
        }
        if let Some(hash) = prebuilt.and_then(|prebuilt| prebuilt.link(file, &folder.path().join(name))) {
            linked.insert(name, hash);
            by_name.extend(header.tensors.iter().map(|t| (file.full_name(&t.name), None)));
            continue;
        }
        let target = VerifiedFile::create(folder, name, bytes.len() as u64 + header.data_bytes())?;
        write_bytes(&target, name, 0, &bytes)?;
        by_name.extend(header.tensors.iter().map(|t| (file.full_name(&t.name), Some((targets.len(), bytes.len() as u64 + t.begin, t.end - t.begin)))));
        targets.push(target);
    }
    let mut part_targets = Vec::with_capacity(items.len());
    for parts in &layout.parts {
        let mut item_targets = Vec::with_capacity(parts.len());
        for part in parts {
            let location = by_name.get(&part.name).ok_or_else(|| Error::tensor(&part.name, "is missing from the planned file layout", ""))?;
            if let Some((file, offset, length)) = *location {
                item_targets.push(PartTarget { name: &part.name, part: item_targets.len(), file, offset, length });
            }
        }
        part_targets.push(item_targets);
    }
    let measurements = write_items(folder, &targets, items, &part_targets, prebuilt, work)?;
    let mut files = Vec::new();
    if let Some(index) = &layout.index {
        let path = folder.path().join(checkpoint::INDEX);
        std::fs::write(&path, index).map_err(Error::io("write", &path))?;
        let back = std::fs::read(&path).map_err(Error::io("read", &path))?;
        if back != index.as_bytes() {
            return Err(Error::Verification { path, reason: "the index reads back differently".into() });
        }
        files.push(Written { name: checkpoint::INDEX.into(), bytes: back.len() as u64, blake3: blake3::hash(&back) });
    }
    let mut targets = targets.into_iter().peekable();
    for PlannedFile { name, header } in &layout.files {
        let bytes = header.to_bytes().len() as u64 + header.data_bytes();
        let (path, blake3) = match (linked.get(name), targets.next_if(|_| !linked.contains_key(name))) {
            (Some(blake3), _) => (folder.path().join(name), *blake3),
            (None, Some(target)) => (target.path().to_owned(), target.finish(work)?),
            (None, None) => return Err(Error::Verification { path: folder.path().join(name), reason: "was not written".into() }),
        };
        files.push(Written { name: name.clone(), bytes, blake3 });
        let (_, back) = raw_tensor::DataFile::open(&path)?;
        if back != *header {
            return Err(Error::Verification { path, reason: "the header reads back differently".into() });
        }
    }
    Ok((files, measurements))
}

/// Hash of the input values of a weight.
pub fn input_hash(weight: &Weight) -> Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    weight.visit(1, &mut |block: Block| {
        hash_values(&mut hasher, &block.before);
        Ok(())
    })?;
    Ok(hasher.finalize())
}

fn write_item(item: &Item, writers: &mut [PartWriter], work: &Work) -> Result<WeightMeasurement> {
    let mut emitter = Emitter::new(&item.name, item.storage_format, &item.weight);
    let total = item.weight.stored_bytes;
    let mut reported = 0;
    let mut measurement = measured(&item.weight, &mut |block| {
        emitter.emit(&block.now, &mut |part, bytes| writers[part].write(bytes))?;
        let bytes = (block.before.values.len() as u64).min(total - reported);
        reported += bytes;
        work.advance(bytes)
    })?;
    emitter.finish(&mut |part, bytes| writers[part].write(bytes))?;
    work.advance(total - reported)?;
    measurement.bytes = writers.iter().map(|w| w.length).sum();
    measurement.nonzeros = if let StorageFormat::Sparse { nonzeros } = item.storage_format { Some(nonzeros) } else { None };
    Ok(measurement)
}

/// Measurements of a weight that is copied without being processed.
pub fn measure(weight: &Weight) -> Result<WeightMeasurement> {
    Ok(WeightMeasurement { bytes: weight.stored_bytes, ..measured(weight, &mut |_| Ok(()))? })
}

/// Measures a weight block by block, and calls `each` for each block.
fn measured(weight: &Weight, each: &mut dyn FnMut(&Block) -> Result<()>) -> Result<WeightMeasurement> {
    let mut measurement = WeightMeasurement::default();
    let mut measure = Measure::new(weight);
    weight.visit(1, &mut |block: Block| {
        measure.add(&block, &mut measurement);
        each(&block)
    })?;
    measure.finish(&mut measurement);
    Ok(measurement)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::super::{BlockSink, Checkpoint, DType, Encoding, WeightSource, Weights};
    use super::*;
    use crate::work::{Cancel, Silent};

    fn written(folder: &Path) -> Vec<Written> {
        let source = folder.join("in.safetensors");
        let header = Header::layout([("a".into(), DType::F32, vec![3, 5]), ("b".into(), DType::I64, vec![])], BTreeMap::new()).unwrap();
        std::fs::write(&source, [header.to_bytes(), (0..68).collect()].concat()).unwrap();
        let weights = Weights::from_checkpoint(Checkpoint::open(&source).unwrap()).unwrap();
        let items: Vec<Item> = weights.by_name.iter().map(|(n, w)| Item { name: n.clone(), weight: w.clone(), storage_format: StorageFormat::Plain }).collect();
        let layout = FileLayout::new(&items, &BTreeMap::new(), &[], u64::MAX).unwrap();
        let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
        write(&Destination::local(folder), &items, &layout, None, &work).unwrap().0
    }

    /// Records that it is read.
    struct Noted(usize, Arc<Mutex<Vec<usize>>>);

    impl WeightSource for Noted {
        fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
            self.1.lock().unwrap().push(self.0);
            sink(Block::untouched(super::super::View::dense(DType::F32, &vec![0; 4 * self.0])))
        }
    }

    #[test]
    fn remote_weights_are_read_in_file_order() {
        for (is_remote, wanted) in [(true, [2, 5, 3, 4]), (false, [5, 4, 3, 2])] {
            let (folder, read) = (tempfile::tempdir().unwrap(), Arc::<Mutex<Vec<usize>>>::default());
            let item = |(count, position): (usize, (usize, u64))| {
                let mut weight = Weight::new(DType::F32, vec![count], Encoding::Dense, Arc::new(Noted(count, Arc::clone(&read))));
                weight.stored_bytes = 4 * count as u64;
                weight.remote_position = is_remote.then_some(position);
                Item { name: format!("w{count}"), weight, storage_format: StorageFormat::Plain }
            };
            let items: Vec<Item> = [(3, (1, 8)), (2, (0, 0)), (4, (1, 20)), (5, (0, 8))].into_iter().map(item).collect();
            let layout = FileLayout::new(&items, &BTreeMap::new(), &[], u64::MAX).unwrap();
            let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
            write(&Destination::local(folder.path()), &items, &layout, None, &work).unwrap();
            assert_eq!(*read.lock().unwrap(), wanted);
        }
    }

    #[test]
    fn copies_are_reproducible() {
        let folder = tempfile::tempdir().unwrap();
        let files = written(folder.path());
        let bytes = std::fs::read(folder.path().join("model.safetensors")).unwrap();
        assert_eq!(bytes, std::fs::read(folder.path().join("in.safetensors")).unwrap());
        assert_eq!(files[0].blake3, blake3::hash(&bytes));
    }
}
