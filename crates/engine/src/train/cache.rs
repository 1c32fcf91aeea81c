//! On-disk cache of the teacher's top-k logits, so that the teacher runs once per sample, across epochs
//! and runs.
//!
//! Every process writes new records to its own file and reads the files of all processes. A file starts
//! with a line that identifies the teacher, followed by records: a 128-bit key (hash of the sample and
//! of the requested rows), the number of rows, a checksum of the entries, and for each row the column
//! indices (u32) and values (f16) of its `top` largest logits, relative to the largest one, which f16
//! represents most precisely, and the logarithm of the probability of all other columns, relative to that
//! of the largest logit (f16). Records are never modified; an incomplete record at the end of a file is
//! ignored.
//!
//! The other columns count as one: within them, the teacher's probabilities are proportional to those of
//! the student, so that all divergences and their gradients are those of distributions over the `top`
//! columns and the rest.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use half::f16;
use rayon::prelude::*;
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::data::{Batch, SequenceRole};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};

/// Version of the file format.
const FORMAT: u32 = 5;
/// Logarithm of a probability of 0.
pub(super) const ZERO_PROBABILITY: f16 = f16::from_f32_const(-1e4);
/// Largest sum of the listed probabilities of a token, which have been rounded.
const LARGEST_SUM: f64 = 1.01;
/// Bytes of a column index and its value.
const ENTRY_BYTES: usize = 6;
/// Bytes of the probability of the other columns of a row.
const REST_BYTES: usize = 2;
/// Bytes of a record before its entries.
const HEADER_BYTES: usize = 28;

/// Location of a record's entries: file index, byte offset, number of rows, and checksum.
#[derive(Clone, Copy)]
struct Record {
    file: usize,
    offset: u64,
    rows: usize,
    hash: u64,
}

/// Cached logits by sample.
pub struct Cache {
    folder: PathBuf,
    /// Prefix of the file names.
    stem: String,
    /// First line of every file.
    title: String,
    files: Vec<(PathBuf, File)>,
    /// Index of the file that this process writes, and its length in bytes.
    own: Option<(usize, u64)>,
    /// Cached logits per row.
    pub(super) top: usize,
    /// Temperature of the probabilities.
    pub(super) temperature: f64,
    records: HashMap<u128, Record>,
}

/// The largest logits of rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Entries {
    /// Column index of each logit, and its difference from the largest one, row by row.
    pub logits: Vec<(u32, f16)>,
    /// The logarithm of the probability of all other columns, relative to that of the largest logit, for
    /// each row.
    pub rest: Vec<f16>,
}

impl Entries {
    /// Appends the rows of others.
    pub fn append(&mut self, other: Entries) {
        self.logits.extend(other.logits);
        self.rest.extend(other.rest);
    }
}

impl Cache {
    /// Opens the cache of the teacher with this hash in a folder, which is created if necessary, for
    /// probabilities at a temperature.
    pub fn open(folder: &Path, teacher: &str, top: usize, temperature: f64) -> Result<Cache> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let stem = format!("{}-{top}-", &teacher[..teacher.len().min(16)]);
        let title = format!("compress teacher {teacher} top {top} temperature {temperature} format {FORMAT}\n");
        let mut cache = Cache { folder: folder.to_owned(), stem, title, files: Vec::new(), own: None, top, temperature, records: HashMap::new() };
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(Error::io("read", folder))? {
            paths.push(entry.map_err(Error::io("read", folder))?.path());
        }
        // If two files hold the same sample, every run uses the same one.
        paths.sort();
        for path in paths {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            if name.starts_with(&cache.stem) && name.ends_with(".logits") {
                cache.index(path)?;
            }
        }
        Ok(cache)
    }

    /// Indexes the records of a file.
    fn index(&mut self, path: PathBuf) -> Result<()> {
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        let failed = || Error::io("read", &path);
        let length = file.metadata().map_err(failed())?.len();
        let mut reader = BufReader::new(file.try_clone().map_err(failed())?);
        let mut title = vec![0; self.title.len()];
        if reader.read_exact(&mut title).is_err() || title != self.title.as_bytes() {
            return Ok(());
        }
        let mut offset = title.len() as u64;
        let mut header = [0; HEADER_BYTES];
        while reader.read_exact(&mut header).is_ok() {
            let (key, rows, hash) = parse_header(&header);
            offset += HEADER_BYTES as u64;
            let size = self.size(rows) as u64;
            if offset.saturating_add(size) > length || reader.seek_relative(size as i64).is_err() {
                break;
            }
            self.records.entry(key).or_insert(Record { file: self.files.len(), offset, rows, hash });
            offset += size;
        }
        self.files.push((path, file));
        Ok(())
    }

    /// Size of the entries of `rows` rows, in bytes.
    fn size(&self, rows: usize) -> usize {
        rows.saturating_mul(self.row_size())
    }

    /// Size of the entries of a row, in bytes.
    fn row_size(&self) -> usize {
        self.top.saturating_mul(ENTRY_BYTES).saturating_add(REST_BYTES)
    }

    /// Number of cached samples.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether no sample is cached.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Whether the sample with this key is cached.
    pub fn contains(&self, key: u128) -> bool {
        self.records.contains_key(&key)
    }

    /// Returns the entries of the given samples, concatenated. Fails if a checksum does not match or a sample
    /// is not cached.
    pub fn get(&self, keys: &[u128]) -> Result<Entries> {
        let mut entries = Entries::default();
        for key in keys {
            let record = self.records.get(key).ok_or_else(|| Error::run("teacher_cache", "the teacher's logits of a sample are not cached", ""))?;
            let (path, file) = &self.files[record.file];
            let mut bytes = vec![0; self.size(record.rows)];
            file.read_exact_at(&mut bytes, record.offset).map_err(Error::io("read", path))?;
            if XxHash3_64::oneshot(&bytes) != record.hash {
                return Err(Error::malformed(path, format!("the cached logits at byte {} are damaged: remove the file", record.offset)));
            }
            let entry = |b: &[u8; ENTRY_BYTES]| (u32::from_le_bytes([b[0], b[1], b[2], b[3]]), f16::from_le_bytes([b[4], b[5]]));
            for row in bytes.chunks_exact(self.row_size()) {
                let (logits, rest) = row.split_at(row.len() - REST_BYTES);
                entries.logits.extend(logits.as_chunks::<ENTRY_BYTES>().0.iter().map(entry));
                entries.rest.extend(rest.as_chunks::<REST_BYTES>().0.iter().map(|rest| f16::from_le_bytes(*rest)));
            }
        }
        Ok(entries)
    }

    /// Adds samples to the cache: `rows` is the number of rows of each, `entries` the top logits of all
    /// rows. Samples that are already cached are skipped.
    pub fn put(&mut self, keys: &[u128], rows: &[usize], entries: &Entries) -> Result<()> {
        let mut entries = entries.logits.chunks(self.top.max(1)).zip(&entries.rest);
        for (key, rows) in keys.iter().zip(rows.iter().copied()) {
            let mut bytes = vec![0; HEADER_BYTES];
            for (logits, rest) in entries.by_ref().take(rows) {
                for (column, value) in logits {
                    bytes.extend(column.to_le_bytes());
                    bytes.extend(value.to_le_bytes());
                }
                bytes.extend(rest.to_le_bytes());
            }
            if self.records.contains_key(key) {
                continue;
            }
            let hash = XxHash3_64::oneshot(&bytes[HEADER_BYTES..]);
            bytes[..16].copy_from_slice(&key.to_le_bytes());
            bytes[16..20].copy_from_slice(&(rows as u32).to_le_bytes());
            bytes[20..HEADER_BYTES].copy_from_slice(&hash.to_le_bytes());
            let (number, end) = self.own.map_or_else(|| self.create_own_file(), Ok)?;
            let (path, file) = &self.files[number];
            file.write_all_at(&bytes, end).map_err(Error::io("write", path))?;
            self.own = Some((number, end + bytes.len() as u64));
            self.records.insert(*key, Record { file: number, offset: end + HEADER_BYTES as u64, rows, hash });
        }
        Ok(())
    }

    /// Creates the file of this process, with the lowest number that is not in use.
    fn create_own_file(&mut self) -> Result<(usize, u64)> {
        let mut number = 0;
        loop {
            let path = self.folder.join(format!("{}{number}.logits", self.stem));
            match File::options().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => {
                    file.write_all_at(self.title.as_bytes(), 0).map_err(Error::io("write", &path))?;
                    self.files.push((path, file));
                    return Ok((self.files.len() - 1, self.title.len() as u64));
                }
                Err(e) if e.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(Error::io("create", &path)(e)),
            }
        }
    }

    /// Selects the `top` largest of the logits `[rows, columns]`, row by row.
    pub fn top_logits(&self, logits: &Tensor) -> Result<Entries> {
        let values = transfer::values::<f32>(logits, Cause::Answers).map_err(|e| Error::candle("the teacher's logits", e))?;
        let rows: Vec<&[f32]> = values.chunks(logits.dims().last().copied().unwrap_or(0).max(1)).collect();
        let rows: Vec<(Vec<(u32, f16)>, f16)> = rows.into_par_iter().map(|row| top_of_row(row, self.top, self.temperature)).collect();
        let (logits, rest): (Vec<Vec<(u32, f16)>>, Vec<f16>) = rows.into_iter().unzip();
        Ok(Entries { logits: logits.concat(), rest })
    }

    /// Appends a row of log-probabilities at temperature 1, of which the largest are cached. Returns a reason
    /// if they are not a distribution.
    pub fn add_row(&self, entries: &mut Entries, row: &[(u32, f32)]) -> std::result::Result<(), String> {
        let mut row = row.to_vec();
        row.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let sum = |row: &[(u32, f32)]| row.iter().map(|(_, value)| f64::from(*value).exp()).sum::<f64>();
        let total = sum(&row);
        let Some((_, highest)) = row.first().copied().filter(|(_, highest)| highest.is_finite() && total <= LARGEST_SUM) else {
            return Err(format!("sum to {total:.2}"));
        };
        let mut columns = BTreeSet::new();
        if let Some((column, _)) = row.iter().find(|(column, _)| !columns.insert(*column)) {
            return Err(format!("have the token {column} twice"));
        }
        row.truncate(self.top);
        let rest = (1.0 - sum(&row)).max(0.0).ln() - f64::from(highest);
        let (logits, rest) = stored_row(row, self.top, highest, rest);
        entries.logits.extend(logits);
        entries.rest.push(rest);
        Ok(())
    }
}

/// Key, number of rows and checksum of a record.
fn parse_header(header: &[u8; HEADER_BYTES]) -> (u128, usize, u64) {
    let part = |from: usize| std::array::from_fn(|at| header[from + at]);
    (
        u128::from_le_bytes(std::array::from_fn(|at| header[at])),
        u32::from_le_bytes(std::array::from_fn(|at| header[16 + at])) as usize,
        u64::from_le_bytes(part(20)),
    )
}

/// A row of the cache: logits, ordered by column, minus the largest one, and the logarithm of the probability
/// of the other columns, relative to that of the largest logit. Rows of fewer than `top` logits are padded by
/// repeating their first column.
fn stored_row(mut logits: Vec<(u32, f32)>, top: usize, highest: f32, rest: f64) -> (Vec<(u32, f16)>, f16) {
    logits.sort_unstable_by_key(|(column, _)| *column);
    let first = logits.first().copied().unwrap_or_default();
    logits.resize(top, first);
    let stored = |value: f32| f16::from_f32((value - highest).clamp(f16::MIN.to_f32(), f16::MAX.to_f32()));
    (logits.into_iter().map(|(column, value)| (column, stored(value))).collect(), f16::from_f64(rest).max(ZERO_PROBABILITY))
}

/// The row of the cache for logits, of which the `top` largest are stored, at a temperature.
fn top_of_row(row: &[f32], top: usize, temperature: f64) -> (Vec<(u32, f16)>, f16) {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    let by_value = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
    let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let offset = if highest.is_finite() { highest } else { 0.0 };
    let mut rest = 0.0;
    if top < order.len() {
        order.select_nth_unstable_by(top, by_value);
        let mut others = order.split_off(top);
        // The order of the sum must not depend on the selection.
        others.sort_unstable();
        rest = others.into_iter().map(|column| (f64::from(row[column as usize] - offset) / temperature).exp()).sum::<f64>();
    }
    let logits = order.into_iter().map(|column| (column, row[column as usize])).collect();
    stored_row(logits, top, offset, rest.ln())
}

/// Cache key of each sample of a batch: a hash of the model inputs without padding, of the positions of
/// tokens and of requested logits, and of the number of columns.
pub fn keys(batch: &Batch, positions: &[Vec<u32>], columns: usize) -> Result<Vec<u128>> {
    let mut hashers = vec![XxHash3_128::new(); batch.samples];
    let read = |tensor: &Tensor| {
        let bits: Vec<u64> = match tensor.dtype().is_float() {
            true => transfer::read::<f32>(tensor)?.into_iter().map(|v| v.to_bits().into()).collect(),
            false => transfer::read::<i64>(tensor)?.into_iter().map(|v| v as u64).collect(),
        };
        let width = (tensor.elem_count() / batch.samples.max(1)).max(1);
        Ok::<_, candle_core::Error>(bits.chunks(width).map(<[u64]>::to_vec).collect::<Vec<_>>())
    };
    let failed = |e| Error::candle("samples", e);
    for (name, tensor) in &batch.inputs {
        let mask = batch.mask(SequenceRole::from_input(name)).filter(|mask| mask.dims() == tensor.dims()).map(&read).transpose().map_err(failed)?;
        for (number, (row, hasher)) in read(tensor).map_err(failed)?.iter().zip(&mut hashers).enumerate() {
            hasher.write(name.as_bytes());
            for (at, value) in row.iter().enumerate() {
                if mask.as_ref().is_none_or(|mask| mask[number].get(at) != Some(&0)) {
                    hasher.write(&(at as u64).to_le_bytes());
                    hasher.write(&value.to_le_bytes());
                }
            }
        }
    }
    for (hasher, positions) in hashers.iter_mut().zip(positions) {
        hasher.write(format!("{columns} {positions:?}").as_bytes());
    }
    Ok(hashers.iter().map(XxHash3_128::finish_128).collect())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::data::References;

    /// Rows of `top` logits from a number on.
    fn entries(rows: usize, top: usize, from: usize) -> Entries {
        let logits = (from * top..(from + rows) * top).map(|i| ((i * 7919 % 101) as u32, f16::from_f32(i as f32 / 8.0))).collect();
        Entries { logits, rest: (from..from + rows).map(|i| f16::from_f32(-(i as f32))).collect() }
    }

    fn joined(parts: impl IntoIterator<Item = Entries>) -> Entries {
        parts.into_iter().fold(Entries::default(), |mut all, part| {
            all.append(part);
            all
        })
    }

    #[test]
    fn records_survive_truncation_and_damage_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let open = |teacher: &str| Cache::open(folder.path(), teacher, 5, 2.0).unwrap();
        let mut cache = open("abc");
        cache.put(&[1, 2], &[2, 3], &entries(5, 5, 0)).unwrap();
        let stored = cache.get(&[2, 1]).unwrap();
        assert_eq!(stored, joined([entries(3, 5, 2), entries(2, 5, 0)]));
        let again = open("abc");
        assert_eq!((again.len(), again.get(&[2, 1]).unwrap()), (2, stored));
        assert!(again.contains(1) && !again.contains(3) && again.get(&[1, 3]).is_err());
        assert!(open("abd").is_empty() && Cache::open(folder.path(), "abc", 5, 1.0).unwrap().is_empty());
        // The last record is truncated, then a bit of the first is flipped.
        let path = folder.path().join("abc-5-0.logits");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(open("abc").len(), 1);
        let damaged: Vec<u8> = bytes.iter().enumerate().map(|(at, byte)| if at == bytes.len() / 3 { byte ^ 1 } else { *byte }).collect();
        std::fs::write(&path, damaged).unwrap();
        assert!(open("abc").get(&[1]).unwrap_err().to_string().contains("damaged"));
        std::fs::write(&path, b"something else").unwrap();
        assert!(open("abc").is_empty());
    }

    #[test]
    fn cached_samples_are_kept_and_every_process_writes_its_own_file() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Cache::open(folder.path(), "abc", 2, 1.0).unwrap();
        let (mut first, mut second) = (open(), open());
        first.put(&[1, 2], &[1, 1], &entries(2, 2, 0)).unwrap();
        // A cached sample, a new one, and the same one again.
        first.put(&[2, 3, 3], &[1, 1, 1], &entries(3, 2, 25)).unwrap();
        assert_eq!(first.get(&[1, 2, 3]).unwrap(), joined([entries(2, 2, 0), entries(1, 2, 26)]));
        second.put(&[4, 1], &[1, 1], &entries(2, 2, 45)).unwrap();
        assert_eq!(second.get(&[4, 1]).unwrap(), entries(2, 2, 45));
        assert_eq!(open().get(&[1, 2, 3, 4]).unwrap(), joined([entries(2, 2, 0), entries(1, 2, 26), entries(1, 2, 45)]));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn positions_and_columns_are_part_of_the_key() {
        let ids = Tensor::new(&[[5i64, 6, 7], [5, 6, 0]], &Device::Cpu).unwrap();
        let mask = Tensor::new(&[[1i64, 1, 1], [1, 1, 0]], &Device::Cpu).unwrap();
        let batch = |width| Batch {
            inputs: [("input_ids".to_owned(), ids.narrow(1, 0, width).unwrap()), ("attention_mask".to_owned(), mask.narrow(1, 0, width).unwrap())].into(),
            references: References::None,
            samples: 2,
        };
        let hash = |width, positions: &[u32], columns| keys(&batch(width), &[positions.to_vec(), positions.to_vec()], columns).unwrap();
        let whole = hash(3, &[0, 1], 9);
        assert_ne!(whole[0], whole[1]);
        // Decoder tokens of an encoder-decoder model have their own padding mask.
        let both = |tokens: &[i64], mask: &[i64]| {
            let mut batch = batch(3);
            for (name, row) in [("decoder_input_ids", tokens), ("decoder_attention_mask", mask)] {
                batch.inputs.insert(name.to_owned(), Tensor::from_vec(row.repeat(2), (2, row.len()), &Device::Cpu).unwrap());
            }
            keys(&batch, &[vec![0], vec![0]], 9).unwrap()
        };
        let unmasked = both(&[8, 9, 1], &[1, 1, 1]);
        assert!(unmasked[0] != unmasked[1] && unmasked[1] != both(&[8, 9, 2], &[1, 1, 1])[1]);
        assert_eq!(both(&[8, 9, 1], &[1, 1, 0]), both(&[8, 9, 3], &[1, 1, 0]));
        assert_eq!(both(&[8, 9, 1], &[1, 1, 0]), both(&[8, 9], &[1, 1]));
        // Padding at the start moves the tokens, which can change the logits.
        assert_ne!(both(&[8, 9, 1], &[1, 1, 0]), both(&[1, 8, 9], &[0, 1, 1]));
        // Padding at the end does not change the key; rows and columns do.
        assert_eq!(whole[1], hash(2, &[0, 1], 9)[0]);
        assert!(whole[0] != hash(3, &[0], 9)[0] && whole[0] != hash(3, &[1, 2], 9)[0] && whole[0] != hash(3, &[0, 1], 8)[0]);
    }

    /// The other columns have their probability together, distributed like that of the student.
    #[test]
    fn the_largest_logits_are_cached() {
        let folder = tempfile::tempdir().unwrap();
        for temperature in [1.0, 2.0] {
            let mut cache = Cache::open(folder.path(), "abc", 4, temperature).unwrap();
            let row = [1f32, 5.0, -2.0, 7.5, 0.25, 3.0];
            let kept = cache.top_logits(&Tensor::new(&[row], &Device::Cpu).unwrap()).unwrap();
            cache.put(&[9], &[1], &kept).unwrap();
            let student = Tensor::new(&[[0.5f32, -1.0, 2.0, 0.0, 0.5, 4.0]], &Device::Cpu).unwrap();
            let stored = cache.get(&[9]).unwrap();
            let logits = cache.logits(&stored, 0..1, &student).unwrap().to_vec2::<f32>().unwrap().remove(0);
            assert_eq!([0, 1, 3, 5].map(|at| logits[at]), [-6.5, -2.5, 0.0, -4.5]);
            let probability = |logit: f32| (f64::from(logit) / temperature).exp();
            let (found, expected) = (probability(logits[2]) + probability(logits[4]), probability(row[2] - 7.5) + probability(row[4] - 7.5));
            assert!((found / expected - 1.0).abs() < 3e-3 && (logits[2] - logits[4] - 1.5).abs() < 1e-4, "{logits:?}");
            assert!(cache.logits(&kept, 0..1, &student.narrow(1, 0, 3).unwrap()).is_err() && cache.logits(&kept, 0..2, &student).is_err());
        }
        let (short, rest) = top_of_row(&[2.0, 1.0], 4, 1.0);
        assert_eq!((short.len(), rest), (4, ZERO_PROBABILITY));
        // Without other columns, the logits are those of the teacher.
        let cache = Cache::open(folder.path(), "abd", 2, 1.0).unwrap();
        let all = cache.top_logits(&Tensor::new(&[[2f32, 1.0]], &Device::Cpu).unwrap()).unwrap();
        assert_eq!(cache.logits(&all, 0..1, &Tensor::new(&[[9f32, 3.0]], &Device::Cpu).unwrap()).unwrap().to_vec2::<f32>().unwrap(), [[0.0, -1.0]]);
    }

    /// The softmax of cached logits does not depend on a constant that is added to all of them.
    #[test]
    fn an_offset_of_logits_costs_no_precision() {
        let row = [1f32, 5.25, -2.0, 7.5];
        for offset in [0.0, 3000.0, -20000.0, 100_000.0] {
            assert_eq!(top_of_row(&row.map(|logit| logit + offset), 2, 1.0), top_of_row(&row, 2, 1.0), "{offset}");
        }
    }

    /// Files of another format are not read.
    #[test]
    fn files_of_another_format_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Cache::open(folder.path(), "abc", 2, 1.0).unwrap();
        let mut cache = open();
        cache.put(&[1], &[1], &entries(1, 2, 0)).unwrap();
        let path = folder.path().join("abc-2-0.logits");
        let bytes = std::fs::read(&path).unwrap();
        let title = b"compress teacher abc top 2\n";
        std::fs::write(&path, [title, &bytes[cache.title.len()..]].concat()).unwrap();
        assert!(open().is_empty());
    }
}
