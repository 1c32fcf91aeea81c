//! The teacher's largest logits on disk, so that it answers every sample once: over epochs, and over runs.
//!
//! The file holds a line that says whose answers these are, then records: a hash of the sample, the number of its rows, and
//! for each row the columns and values of its largest logits, as 16-bit floats. A record that was not finished is cut off.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use half::f16;
use twox_hash::XxHash3_128;

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};

/// What stands for logits that were not kept: no probability.
const GONE: f32 = -1e4;
/// Bytes of a column and its value.
const ENTRY: usize = 6;

/// Answers by sample.
pub struct Cache {
    path: PathBuf,
    file: File,
    end: u64,
    /// Logits that are kept of a row.
    top: usize,
    known: HashMap<u128, (u64, usize)>,
}

/// The largest logits of the rows of a sample, row by row.
pub type Entries = Vec<(u32, f16)>;

impl Cache {
    /// Opens the answers of a teacher, named by a hash, in a folder.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn open(folder: &Path, teacher: &str, top: usize) -> Result<Cache> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let header = format!("compress teacher {teacher} top {top}\n");
        let path = folder.join(format!("{}-{top}.logits", &teacher[..teacher.len().min(16)]));
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(Error::io("open", &path))?;
        let failed = || Error::io("read", &path);
        let mut start = vec![0; header.len()];
        let held = file.metadata().map_err(failed())?.len();
        if held < header.len() as u64 || file.read_exact(&mut start).is_err() || start != header.as_bytes() {
            file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).and_then(|_| file.write_all(header.as_bytes())).map_err(Error::io("write", &path))?;
        }
        let mut cache = Cache { end: header.len() as u64, top, known: HashMap::new(), path: path.clone(), file: file.try_clone().map_err(failed())? };
        let held = cache.file.metadata().map_err(failed())?.len();
        file.seek(SeekFrom::Start(cache.end)).map_err(failed())?;
        let mut reader = BufReader::new(file);
        let mut head = [0; 20];
        while reader.read_exact(&mut head).is_ok() {
            let ([key @ .., _, _, _, _], [.., a, b, c, d]) = (&head, &head);
            let rows = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
            let size = (rows as u64).saturating_mul((top * ENTRY) as u64);
            let next = cache.end.saturating_add(20).saturating_add(size);
            if next > held || reader.seek_relative(size as i64).is_err() {
                break;
            }
            cache.known.insert(u128::from_le_bytes(*key), (cache.end + 20, rows));
            cache.end = next;
        }
        cache.file.set_len(cache.end).map_err(Error::io("write", &path))?;
        Ok(cache)
    }

    /// How many samples are known.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The answers to all samples, one after the other; nothing where one is not known.
    ///
    /// # Errors
    /// Reading fails.
    pub fn get(&self, keys: &[u128]) -> Result<Option<Entries>> {
        let Some(places) = keys.iter().map(|key| self.known.get(key)).collect::<Option<Vec<_>>>() else { return Ok(None) };
        let mut entries = Vec::new();
        for (offset, rows) in places {
            let mut bytes = vec![0; rows * self.top * ENTRY];
            self.file.read_exact_at(&mut bytes, *offset).map_err(Error::io("read", &self.path))?;
            let entry = |b: &[u8; ENTRY]| (u32::from_le_bytes([b[0], b[1], b[2], b[3]]), f16::from_le_bytes([b[4], b[5]]));
            entries.extend(bytes.as_chunks::<ENTRY>().0.iter().map(entry));
        }
        Ok(Some(entries))
    }

    /// Keeps the answers to samples: `rows` of each, logits `[rows, columns]` of all.
    ///
    /// # Errors
    /// The disk is full, or memory runs out.
    pub fn put(&mut self, keys: &[u128], rows: &[usize], logits: &[Tensor]) -> Result<()> {
        let mut entries = Entries::new();
        for part in logits {
            let values = transfer::values::<f32>(part, Cause::Answers).map_err(|e| Error::computed("the teacher's logits", e))?;
            for row in values.chunks(part.dims().last().copied().unwrap_or(0).max(1)) {
                entries.extend(largest(row, self.top));
            }
        }
        let mut at = 0;
        for (key, rows) in keys.iter().zip(rows) {
            let count = rows * self.top;
            let mut bytes = Vec::with_capacity(20 + count * ENTRY);
            bytes.extend(key.to_le_bytes());
            bytes.extend((*rows as u32).to_le_bytes());
            entries[at..at + count].iter().for_each(|(column, value)| {
                bytes.extend(column.to_le_bytes());
                bytes.extend(value.to_le_bytes());
            });
            at += count;
            if self.known.insert(*key, (self.end + 20, *rows)).is_none() {
                self.file.write_all_at(&bytes, self.end).map_err(Error::io("write", &self.path))?;
                self.end += bytes.len() as u64;
            }
        }
        Ok(())
    }

    /// Logits `[rows, columns]` out of entries of some rows.
    ///
    /// # Errors
    /// A column is out of range, or memory runs out.
    pub fn logits(&self, entries: &[(u32, f16)], columns: usize, device: &Device) -> candle_core::Result<Tensor> {
        let rows = entries.len() / self.top.max(1);
        let mut values = vec![GONE; rows * columns];
        for (row, entries) in values.chunks_mut(columns.max(1)).zip(entries.chunks(self.top.max(1))) {
            for (column, value) in entries {
                match row.get_mut(*column as usize) {
                    Some(place) => *place = value.to_f32(),
                    None => candle_core::bail!("the cached answers are of a teacher with more than {columns} columns"),
                }
            }
        }
        transfer::to_device(&Tensor::from_vec(values, (rows, columns), &Device::Cpu)?, device, Cause::Answers)
    }

    /// Logits that are kept of a row.
    pub fn top(&self) -> usize {
        self.top
    }
}

/// The largest of a row, by column; shorter rows are filled up with their first column.
fn largest(row: &[f32], top: usize) -> Entries {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    let by_value = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
    if top < order.len() {
        order.select_nth_unstable_by(top, by_value);
        order.truncate(top);
    }
    order.sort_unstable();
    order.resize(top, order.first().copied().unwrap_or(0));
    order.into_iter().map(|column| (column, f16::from_f32(row[column as usize].clamp(-65504.0, 65504.0)))).collect()
}

/// A hash of each sample of a batch: of what the model reads, padding left out.
///
/// # Errors
/// Memory runs out.
pub fn keys(batch: &Batch) -> Result<Vec<u128>> {
    let mut hashers = vec![XxHash3_128::new(); batch.samples];
    let read = |tensor: &Tensor| {
        let bits: Vec<u64> = match tensor.dtype().is_float() {
            true => transfer::read::<f32>(tensor)?.into_iter().map(|v| v.to_bits().into()).collect(),
            false => transfer::read::<i64>(tensor)?.into_iter().map(|v| v as u64).collect(),
        };
        let width = (tensor.elem_count() / batch.samples.max(1)).max(1);
        Ok::<_, candle_core::Error>(bits.chunks(width).map(<[u64]>::to_vec).collect::<Vec<_>>())
    };
    let failed = |e| Error::computed("samples", e);
    let mask = batch.inputs.get("attention_mask").map(&read).transpose().map_err(failed)?;
    for (name, tensor) in &batch.inputs {
        for (number, (row, hasher)) in read(tensor).map_err(failed)?.iter().zip(&mut hashers).enumerate() {
            hasher.write(name.as_bytes());
            for (at, value) in row.iter().enumerate() {
                if mask.as_ref().is_none_or(|mask| mask[number].get(at) != Some(&0)) {
                    hasher.write(&value.to_le_bytes());
                }
            }
        }
    }
    Ok(hashers.iter().map(XxHash3_128::finish_128).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: usize, from: usize) -> Tensor {
        let values: Vec<f32> = (0..count * 50).map(|i| (((i + from) * 7919) % 101) as f32 / 8.0).collect();
        Tensor::from_vec(values, (count, 50), &Device::Cpu).unwrap()
    }

    #[test]
    fn answers_come_back_after_a_kill() {
        let folder = tempfile::tempdir().unwrap();
        let mut cache = Cache::open(folder.path(), "abc", 5).unwrap();
        cache.put(&[1, 2], &[2, 3], &[rows(4, 0), rows(1, 200)]).unwrap();
        let known = cache.get(&[2, 1]).unwrap().unwrap();
        assert_eq!(known.len(), 25);
        let again = Cache::open(folder.path(), "abc", 5).unwrap();
        assert_eq!((again.len(), again.get(&[2, 1]).unwrap().unwrap()), (2, known));
        assert!(again.get(&[1, 3]).unwrap().is_none());
        // The last record loses its end.
        let path = again.path.clone();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(Cache::open(folder.path(), "abc", 5).unwrap().len(), 1);
        // Another teacher begins anew.
        assert!(Cache::open(folder.path(), "abd", 5).unwrap().is_empty());
        std::fs::write(&path, b"something else").unwrap();
        assert!(Cache::open(folder.path(), "abc", 5).unwrap().is_empty());
    }

    #[test]
    fn the_largest_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let mut cache = Cache::open(folder.path(), "abc", 4).unwrap();
        let row = Tensor::new(&[[1f32, 5.0, -2.0, 7.5, 0.25, 3.0]], &Device::Cpu).unwrap();
        cache.put(&[9], &[1], &[row]).unwrap();
        let logits = cache.logits(&cache.get(&[9]).unwrap().unwrap(), 6, &Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(logits, [[1.0, 5.0, GONE, 7.5, GONE, 3.0]]);
        assert!(cache.logits(&cache.get(&[9]).unwrap().unwrap(), 3, &Device::Cpu).is_err());
        assert_eq!(largest(&[2.0, 1.0], 4).len(), 4);
    }
}
