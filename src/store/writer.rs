//! Writing safetensors: header first, then tensors in parallel, each at its own place, block by block.
//!
//! What is meant to be in the file is hashed as it is made; every segment of the file is read again once it is written, and held to it.

use std::collections::BTreeMap;
use std::path::Path;

use super::header::Header;
pub use super::made::{Made, MadeFile};
pub use super::measure::SeenRows;
use super::measure::{Measure, ValueHistogram};
use super::part_writer::PartWriter;
use super::storage_format::Emitter;
use super::verified_file::VerifiedFile;
use super::weight::in_folder;
use super::{Block, StorageFormat, StoredTensor, View, Weight, checkpoint};
use crate::error::{Error, Result};
use crate::files::Destination;
use crate::kernel::compare::Difference;
use crate::work::Work;

/// A weight to be written.
#[derive(Debug, Clone)]
pub struct Item {
    /// Name of the logical tensor.
    pub name: String,
    /// The weight.
    pub weight: Weight,
    /// How to store it.
    pub storage_format: StorageFormat,
}

/// What was seen of a weight while it was written.
#[derive(Debug, Clone, Default)]
pub struct WeightMeasurement {
    /// Against the input.
    pub difference: Difference,
    /// Whether any element changed.
    pub changed: bool,
    /// NaN and infinite values of the input.
    pub nonfinite: u64,
    /// Hash of the values as they were read.
    pub input_hash: Option<blake3::Hash>,
    /// Bytes that the weight takes in the output.
    pub bytes: u64,
    /// How many elements are stored, where it is stored sparse.
    pub kept: Option<u64>,
    /// How its values lie, when they changed.
    pub histogram: Option<ValueHistogram>,
    /// Of some rows of a weight, what all of it takes; hash and histogram are told by this alone.
    pub rows: Option<Box<SeenRows>>,
}

/// A written file.
#[derive(Debug, Clone)]
pub struct Written {
    /// Name inside the folder.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// Hash of the file as it was read back.
    pub blake3: blake3::Hash,
}

/// A file, whose tensors have names without the folder that it is in.
#[derive(Debug)]
pub(super) struct LaidOut {
    pub name: String,
    pub header: Header,
}

impl LaidOut {
    /// The whole name of a tensor, by that in the file.
    fn whole(&self, tensor: &str) -> String {
        self.name.rsplit_once('/').map_or_else(|| tensor.to_owned(), |(folder, _)| format!("{folder}/{tensor}"))
    }
}

/// Which file each tensor goes to, and where in it.
#[derive(Debug)]
pub struct FileLayout {
    files: Vec<LaidOut>,
    index: Option<String>,
    parts: Vec<Vec<StoredTensor>>,
}

impl FileLayout {
    /// Distributes items over files of at most `shard_bytes` (a larger tensor gets a file of its own),
    /// in the order given, and names them as the Hub does. Parts of a weight stay together. Weights of `folders` go to a file in each.
    ///
    /// # Errors
    /// A tensor's size overflows.
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
            if let Some((filled, held)) = shards.last()
                && !held.is_empty()
                && filled + bytes > shard_bytes
            {
                shards.push((0, Vec::new()));
            }
            if let Some((filled, held)) = shards.last_mut() {
                *filled += bytes;
                held.extend(parts);
            }
            total += bytes;
        }
        shards.retain(|(_, held)| !held.is_empty() || inside.is_empty());
        let count = shards.len();
        let mut files = Vec::with_capacity(count);
        let mut weight_map = BTreeMap::new();
        let mut lay = |name: String, held: Vec<(&str, &StoredTensor)>| -> Result<()> {
            let header = Header::layout(held.into_iter().map(|(name, part)| (name.to_owned(), part.dtype, part.shape.clone())), metadata.clone())
                .map_err(|name| Error::tensor(&name, "its size overflows", ""))?;
            files.push(LaidOut { name, header });
            Ok(())
        };
        for (i, (_, held)) in shards.into_iter().enumerate() {
            let name = if count == 1 { checkpoint::SINGLE.to_owned() } else { format!("model-{:05}-of-{count:05}.safetensors", i + 1) };
            weight_map.extend(held.iter().map(|part| (part.name.clone(), name.clone())));
            lay(name, held.into_iter().map(|part| (part.name.as_str(), part)).collect())?;
        }
        for (folder, held) in inside {
            lay(format!("{folder}/{}", checkpoint::SINGLE), held)?;
        }
        let index = (count > 1).then(|| format!("{:#}\n", serde_json::json!({ "metadata": { "total_size": total }, "weight_map": weight_map })));
        Ok(FileLayout { files, index, parts })
    }

    /// The items in each file, by their places in the list.
    pub fn items_by_file(&self) -> Vec<Vec<usize>> {
        let places = self.files.iter().zip(0..).flat_map(|(file, at)| file.header.tensors.iter().map(move |tensor| (file.whole(&tensor.name), at)));
        let places: BTreeMap<String, usize> = places.collect();
        let mut found = vec![Vec::new(); self.files.len()];
        for (item, parts) in self.parts.iter().enumerate() {
            let file = parts.first().and_then(|part| found.get_mut(*places.get(&part.name)?));
            file.into_iter().for_each(|items| items.push(item));
        }
        found
    }

    /// Bytes of the files that were made whole, and need no room of their own.
    pub fn linked_bytes(&self, made: &Made) -> u64 {
        self.files.iter().filter(|file| made.file(file).is_some()).map(|file| file.header.data_bytes()).sum()
    }

    /// Bytes of all files, headers included.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.header.data_bytes() + file.header.to_bytes().len() as u64).sum()
    }

    /// Names of the files, the index first if there is one.
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

/// A run of a file that is laid out already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Known bytes.
    Bytes(Vec<u8>),
    /// A part of an item.
    Item {
        /// Number of the item.
        index: usize,
        /// Number of the part, as its storage format counts them.
        part: usize,
        /// How many bytes it is.
        bytes: u64,
    },
}

impl Piece {
    /// Number of bytes.
    pub fn len(&self) -> u64 {
        match self {
            Piece::Bytes(bytes) => bytes.len() as u64,
            Piece::Item { bytes, .. } => *bytes,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where one part of an item goes.
struct Place<'a> {
    name: &'a str,
    part: usize,
    file: usize,
    offset: u64,
    length: u64,
}

/// Writes bytes that are known already.
fn write_known(file: &VerifiedFile, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut writer = PartWriter::new(file, offset, bytes.len() as u64);
    writer.write(bytes)?;
    writer.finish(name)
}

/// Makes every item, or takes what was made of it, and writes its parts to their places.
fn write_items(
    folder: &Destination,
    files: &[VerifiedFile],
    items: &[Item],
    places: &[Vec<Place>],
    made: Option<&Made>,
    work: &Work,
) -> Result<Vec<WeightMeasurement>> {
    let jobs: Vec<(&Item, &[Place])> = items.iter().zip(places).map(|(item, places)| (item, places.as_slice())).collect();
    let size = |(item, _): &(&Item, &[Place])| item.weight.stored_bytes.max(1);
    let write = |(item, places): &(&Item, &[Place])| {
        let mut writers: Vec<PartWriter> = places.iter().map(|place| PartWriter::new(&files[place.file], place.offset, place.length)).collect();
        let seen = match made {
            None => write_item(item, &mut writers, work)?,
            Some(made) => {
                let names: Vec<&str> = places.iter().map(|place| place.name).collect();
                made.copy(item, &names, &mut writers, work)?
            }
        };
        for (writer, place) in writers.into_iter().zip(*places) {
            writer.finish(place.name)?;
        }
        Ok(seen)
    };
    // What goes to another machine is in memory until its neighbours are there.
    if folder.is_away() {
        return work.run_in_order("Writing", &jobs, size, write);
    }
    // SHA-256 needs the bytes in the order of the file: ranges that come in another order are downloaded twice.
    if items.iter().any(|item| item.weight.remote_position.is_some()) {
        return work.run_by("Writing", &jobs, |(item, _)| item.weight.remote_position, size, write);
    }
    work.run("Writing", &jobs, size, write)
}

/// Writes files of any format that are laid out piece by piece, each part of an item once, and reads everything back.
///
/// # Errors
/// As [`write()`].
pub fn write_pieces(folder: &Destination, files: &[(String, Vec<Piece>)], items: &[Item], work: &Work) -> Result<(Vec<Written>, Vec<WeightMeasurement>)> {
    let mut targets = Vec::with_capacity(files.len());
    let mut places: Vec<Vec<Place>> = items.iter().map(|_| Vec::new()).collect();
    for (file, (name, pieces)) in files.iter().enumerate() {
        let target = VerifiedFile::create(folder, name, pieces.iter().map(Piece::len).sum())?;
        let mut offset = 0;
        for piece in pieces {
            match piece {
                Piece::Bytes(bytes) => write_known(&target, name, offset, bytes)?,
                Piece::Item { index, part, bytes } => {
                    places[*index].push(Place { name: &items[*index].name, part: *part, file, offset, length: *bytes });
                }
            }
            offset += piece.len();
        }
        targets.push(target);
    }
    for (item, places) in items.iter().zip(&mut places) {
        places.sort_by_key(|place| place.part);
        let parts = item.storage_format.parts(&item.name, &item.weight);
        let fits = |(place, part): (&Place, &StoredTensor)| super::header::byte_count(part.dtype, &part.shape) == Some(place.length);
        if parts.len() != places.len() || !places.iter().zip(&parts).all(fits) {
            return Err(Error::tensor(&item.name, "has not the places in the file that its parts need", "this is a bug in compress, please report it"));
        }
    }
    let seen = write_items(folder, &targets, items, &places, None, work)?;
    let mut written = Vec::with_capacity(files.len());
    for (target, (name, _)) in targets.into_iter().zip(files) {
        written.push(Written { name: name.clone(), bytes: target.length(), blake3: target.finish(work)? });
    }
    Ok((written, seen))
}

/// Writes the items into a folder and reads everything back. What was made of them before is copied.
///
/// # Errors
/// Reading the input, making a tensor, or writing fails; the disk is full; a file does not read back as written.
pub fn write(folder: &Destination, items: &[Item], layout: &FileLayout, made: Option<&Made>, work: &Work) -> Result<(Vec<Written>, Vec<WeightMeasurement>)> {
    let mut targets: Vec<VerifiedFile> = Vec::with_capacity(layout.files.len());
    let (mut by_name, mut linked) = (BTreeMap::new(), BTreeMap::new());
    for file in &layout.files {
        let LaidOut { name, header } = file;
        let bytes = header.to_bytes();
        if let Some(parent) = Path::new(name).parent().filter(|parent| !parent.as_os_str().is_empty()) {
            let parent = folder.path().join(parent);
            std::fs::create_dir_all(&parent).map_err(Error::io("create", &parent))?;
        }
        if let Some(hash) = made.and_then(|made| made.link(file, &folder.path().join(name))) {
            linked.insert(name, hash);
            by_name.extend(header.tensors.iter().map(|t| (file.whole(&t.name), None)));
            continue;
        }
        let target = VerifiedFile::create(folder, name, bytes.len() as u64 + header.data_bytes())?;
        write_known(&target, name, 0, &bytes)?;
        by_name.extend(header.tensors.iter().map(|t| (file.whole(&t.name), Some((targets.len(), bytes.len() as u64 + t.begin, t.end - t.begin)))));
        targets.push(target);
    }
    let mut places = Vec::with_capacity(items.len());
    for parts in &layout.parts {
        let mut placed = Vec::with_capacity(parts.len());
        for part in parts {
            let place = by_name.get(&part.name).ok_or_else(|| Error::tensor(&part.name, "has no place in the file", ""))?;
            if let Some((file, offset, length)) = *place {
                placed.push(Place { name: &part.name, part: placed.len(), file, offset, length });
            }
        }
        places.push(placed);
    }
    let seen = write_items(folder, &targets, items, &places, made, work)?;
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
    for LaidOut { name, header } in &layout.files {
        let bytes = header.to_bytes().len() as u64 + header.data_bytes();
        let (path, blake3) = match (linked.get(name), targets.next_if(|_| !linked.contains_key(name))) {
            (Some(blake3), _) => (folder.path().join(name), *blake3),
            (None, Some(target)) => (target.path().to_owned(), target.finish(work)?),
            (None, None) => return Err(Error::Verification { path: folder.path().join(name), reason: "was not written".into() }),
        };
        files.push(Written { name: name.clone(), bytes, blake3 });
        let (_, back) = checkpoint::DataFile::open(&path)?;
        if back != *header {
            return Err(Error::Verification { path, reason: "the header reads back differently".into() });
        }
    }
    Ok((files, seen))
}

/// The hash of a weight as it was read.
///
/// # Errors
/// Reading fails.
pub fn input_hash(weight: &Weight) -> Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    weight.visit(1, &mut |block: Block| {
        hash_values(&mut hasher, &block.before);
        Ok(())
    })?;
    Ok(hasher.finalize())
}

pub(super) fn hash_values(hasher: &mut blake3::Hasher, before: &View) {
    hasher.update(before.values);
    if before.affine.is_some() {
        hasher.update(before.scales);
        hasher.update(before.zero_points);
    }
}

fn write_item(item: &Item, writers: &mut [PartWriter], work: &Work) -> Result<WeightMeasurement> {
    let mut emitter = Emitter::new(&item.name, item.storage_format, &item.weight);
    let total = item.weight.stored_bytes;
    let mut told = 0;
    let mut seen = measured(&item.weight, &mut |block| {
        emitter.emit(&block.now, &mut |part, bytes| writers[part].write(bytes))?;
        let bytes = (block.before.values.len() as u64).min(total - told);
        told += bytes;
        work.advance(bytes)
    })?;
    emitter.finish(&mut |part, bytes| writers[part].write(bytes))?;
    work.advance(total - told)?;
    seen.bytes = writers.iter().map(|w| w.length).sum();
    seen.kept = if let StorageFormat::Sparse { kept } = item.storage_format { Some(kept) } else { None };
    Ok(seen)
}

/// What there is to see of a weight whose bytes are written without going through it.
///
/// # Errors
/// Reading fails.
pub fn measure(weight: &Weight) -> Result<WeightMeasurement> {
    Ok(WeightMeasurement { bytes: weight.stored_bytes, ..measured(weight, &mut |_| Ok(()))? })
}

/// What there is to see of a weight, block by block; `each` does more with them.
fn measured(weight: &Weight, each: &mut dyn FnMut(&Block) -> Result<()>) -> Result<WeightMeasurement> {
    let mut seen = WeightMeasurement::default();
    let mut measure = Measure::new(weight);
    weight.visit(1, &mut |block: Block| {
        measure.add(&block, &mut seen);
        each(&block)
    })?;
    measure.finish(&mut seen);
    Ok(seen)
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
        write(&Destination::here(folder), &items, &layout, None, &work).unwrap().0
    }

    /// Notes that it is read.
    struct Noted(usize, Arc<Mutex<Vec<usize>>>);

    impl WeightSource for Noted {
        fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
            self.1.lock().unwrap().push(self.0);
            sink(Block::untouched(View::dense(DType::F32, &vec![0; 4 * self.0])))
        }
    }

    #[test]
    fn weights_of_another_machine_are_read_in_the_order_of_their_files() {
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
            write(&Destination::here(folder.path()), &items, &layout, None, &work).unwrap();
            assert_eq!(*read.lock().unwrap(), wanted);
        }
    }

    #[test]
    fn a_copy_is_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let files = written(folder.path());
        let bytes = std::fs::read(folder.path().join("model.safetensors")).unwrap();
        assert_eq!(bytes, std::fs::read(folder.path().join("in.safetensors")).unwrap());
        assert_eq!(files[0].blake3, blake3::hash(&bytes));
    }
}
