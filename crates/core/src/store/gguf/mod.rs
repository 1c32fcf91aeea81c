//! GGUF files: key-value metadata, and tensors, many of which are stored as blocks of small integers
//! with scales.
//!
//! The format is specified in `docs/gguf.md` of the ggml project; versions 2 and 3, little endian. The
//! meaning of keys and names is defined in `model::gguf`.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod block_quantized;
mod concatenated_rows;
mod data_section;
mod fused_experts;
mod header;
mod importance_file;
mod input_major_experts;
mod joined;
mod latent_heads;
mod row_permutation;
mod split;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use self::block_quantized::{BlockQuantized, BlockScales};
pub use self::concatenated_rows::concatenated_rows;
pub use self::fused_experts::expert_rows;
pub use self::header::{ALIGNMENT, Kind, Outline, TensorDescription, Value, block_type};
pub use self::importance_file::{ImportanceFile, InputSums, model_files};
pub use self::input_major_experts::{Outputs, expert_outputs, joined_experts};
pub use self::latent_heads::{joined_latent, latent_parts};
pub use self::row_permutation::RowPermutation;
pub use self::split::{all_parts, is_continuation};
pub use self::write::header;
use super::raw_tensor::DataFile;
use super::{Block, BlockSink, DType, Encoding, RawTensor, View, Weight, WeightSource, block_elements, least_common_multiple};
use crate::error::{Error, Result};
use crate::files::{self, File};
use crate::kernel::ggml::BlockType;

/// File extension.
pub const EXTENSION: &str = "gguf";
/// Magic number.
pub const MARK: &[u8; 4] = b"GGUF";

/// An open file.
pub struct GgufFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Metadata by key.
    pub values: BTreeMap<String, Value>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, Weight>,
    stored: BTreeMap<String, Stored>,
}

/// Location and type of a tensor's bytes.
struct Stored {
    file: Arc<DataFile>,
    kind: Kind,
    begin: u64,
    bytes: u64,
}

impl Stored {
    /// A range of the bytes as a weight. `from` is relative to the tensor.
    fn weight(&self, name: &str, shape: Vec<usize>, from: u64, bytes: u64) -> Result<Weight> {
        let begin = self.begin.saturating_add(from);
        let source: Arc<dyn WeightSource> = match self.kind {
            Kind::Plain(dtype) => Arc::new(RawTensor::within(&self.file, dtype, shape.clone(), begin, bytes)),
            Kind::Blocks(kind) => {
                let stored = usize::try_from(bytes).map_err(|_| Error::tensor(name, "is too large", ""))?;
                Arc::new(Blocked { stored: RawTensor::within(&self.file, DType::U8, vec![stored], begin, bytes), kind })
            }
        };
        let mut weight = Weight::new(self.kind.dtype(), shape, Encoding::Dense, source);
        weight.stored_bytes = bytes;
        weight.stored_as = vec![name.to_owned()];
        weight.stored_type = if let Kind::Blocks(kind) = self.kind { Some(kind.name()) } else { None };
        Ok(weight)
    }
}

/// Whether a file is a GGUF file, by its extension or its magic number.
pub fn is_gguf(path: &Path) -> bool {
    let mut start = [0; 4];
    // Opening a pipe without a writer would block.
    let mut begins = || files::is_file(path) && File::open(path).and_then(|file| file.read_exact_at(&mut start, 0)).is_ok() && start == *MARK;
    path.extension().is_some_and(|e| e == EXTENSION) || begins()
}

impl GgufFile {
    /// Opens a file without reading its tensors.
    pub fn open(path: &Path) -> Result<GgufFile> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let header = self::header::Header::read(&file).map_err(|reason| Error::malformed(path, reason))?;
        let file = DataFile::from_file(path, file);
        let (mut tensors, mut stored_by_name) = (BTreeMap::new(), BTreeMap::new());
        for tensor in header.tensors {
            let stored = Stored { file: file.clone(), kind: tensor.kind, begin: tensor.begin, bytes: tensor.bytes };
            tensors.insert(tensor.name.clone(), stored.weight(&tensor.name, tensor.shape, 0, tensor.bytes)?);
            stored_by_name.insert(tensor.name, stored);
        }
        Ok(GgufFile { path: path.to_owned(), values: header.values, tensors, stored: stored_by_name })
    }

    /// The tensors as stored, by name: type, shape, and bytes.
    pub fn stored(&self) -> impl Iterator<Item = (&str, Kind, &[usize], RawTensor)> {
        self.stored.iter().filter_map(|(name, stored)| {
            let count = usize::try_from(stored.bytes).ok()?;
            let bytes = RawTensor::within(&stored.file, DType::U8, vec![count], stored.begin, stored.bytes);
            Some((name.as_str(), stored.kind, self.tensors.get(name)?.shape.as_slice(), bytes))
        })
    }

    /// Splits a tensor along its first dimension into one weight per index. `None` if it has fewer than
    /// two dimensions or no elements. Fails if a slice is too large.
    pub fn slices(&self, name: &str) -> Result<Option<Vec<Weight>>> {
        let (Some(tensor), Some(stored)) = (self.tensors.get(name), self.stored.get(name)) else { return Ok(None) };
        let Some((count, shape)) = tensor.shape.split_first().filter(|(count, shape)| **count > 0 && !shape.is_empty() && stored.bytes > 0) else {
            return Ok(None);
        };
        // Rows consist of complete blocks, so slices do too.
        let bytes = stored.bytes.checked_div(*count as u64).unwrap_or(0);
        (0..*count as u64).map(|index| stored.weight(name, shape.to_vec(), index.saturating_mul(bytes), bytes)).collect::<Result<_>>().map(Some)
    }
}

/// Dequantizes the blocks of a file.
struct Blocked {
    stored: RawTensor,
    kind: BlockType,
}

impl WeightSource for Blocked {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (size, width) = (self.kind.bytes(), self.kind.elements());
        let count = usize::try_from(self.stored.bytes()).unwrap_or(usize::MAX).checked_div(size).unwrap_or(0);
        // Complete units and complete blocks.
        let step = block_elements(least_common_multiple(unit, width)).checked_div(width).unwrap_or(1).max(1).min(count.max(1));
        let mut blocks = vec![0; step.saturating_mul(size)];
        let mut values = vec![0f32; step.saturating_mul(width)];
        let mut bytes = vec![0; values.len().saturating_mul(4)];
        for start in (0..count).step_by(step) {
            let here = step.min(count.saturating_sub(start));
            blocks.truncate(here.saturating_mul(size));
            values.truncate(here.saturating_mul(width));
            bytes.truncate(here.saturating_mul(width).saturating_mul(4));
            self.stored.read_at((start as u64).saturating_mul(size as u64), &mut blocks)?;
            self.kind.decode(&blocks, &mut values);
            crate::kernel::convert::f32_bytes(&values, &mut bytes);
            sink(Block::untouched(View::dense(DType::F32, &bytes)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Checkpoint, Weights};

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf").join(name)
    }

    fn opened(bytes: &[u8]) -> Result<GgufFile, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        GgufFile::open(file.path()).map_err(|e| e.to_string())
    }

    #[test]
    fn blocks_dequantize_like_the_reference() {
        let expected = Weights::from_checkpoint(Checkpoint::open(&golden("blocks.safetensors")).unwrap()).unwrap();
        let found = GgufFile::open(&golden("blocks.gguf")).unwrap();
        assert!(found.tensors.keys().eq(expected.by_name.keys()));
        for (name, weight) in &found.tensors {
            let values = weight.floats(name).unwrap();
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            let expected = expected.get(name).unwrap().floats(name).unwrap();
            assert!(values.len() == expected.len() && values.iter().zip(&expected).all(same), "{name}");
            for unit in [1, 96, 1000] {
                let (mut bytes, mut ragged) = (0, false);
                weight
                    .visit(unit, &mut |block| {
                        assert!(!ragged, "{name}: a block other than the last is not a multiple of {unit} elements");
                        ragged = !block.now.elements().is_multiple_of(unit);
                        bytes += block.now.values.len();
                        Ok(())
                    })
                    .unwrap();
                assert_eq!(bytes, weight.elements() * weight.dtype.bitsize() / 8);
            }
        }
        let stored: Vec<_> = found.tensors.values().map(|weight| weight.describe_stored()).collect();
        assert_eq!(stored[..3], ["bf16", "f16", "f32"]);
        assert!(found.tensors.values().all(|weight| weight.stored_type.is_none() || weight.describe_stored() == weight.stored_as[0]));
    }

    #[test]
    fn row_permutations_are_inverted() {
        assert_eq!(*RowPermutation::deinterleave(6), [0, 2, 4, 1, 3, 5]);
        assert_eq!(*RowPermutation::interleave(6), [0, 3, 1, 4, 2, 5]);
        let found = GgufFile::open(&golden("blocks.gguf")).unwrap();
        let rows = |weight: &Weight| weight.floats("a").unwrap().chunks(3 * weight.row() / 3).map(<[f32]>::to_vec).collect::<Vec<_>>();
        let weight = &found.tensors["Q4_1"];
        let permuted = RowPermutation { upstream: weight.clone(), order: Some(Arc::new(vec![2, 0, 1])), added: 1.5, name: "a".into() }.weight().unwrap();
        let (before, now) = (rows(weight), rows(&permuted));
        for (row, from) in now.iter().zip([2, 0, 1]) {
            assert!(row.iter().zip(&before[from]).all(|(now, before)| *now == *before + 1.5 || before.is_nan()));
        }
        let incomplete = RowPermutation { upstream: weight.clone(), order: Some(Arc::new(vec![0, 1])), added: 0.0, name: "a".into() };
        assert!(incomplete.weight().unwrap_err().to_string().contains("not a multiple"));
    }

    /// A file with these keys and tensors, followed by `data` bytes.
    fn file(version: u32, keys: &[(&str, u32, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)], data: usize) -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let mut bytes = [&MARK[..], &version.to_le_bytes(), &(tensors.len() as u64).to_le_bytes(), &(keys.len() as u64).to_le_bytes()].concat();
        for (key, kind, value) in keys {
            bytes.extend([text(key), kind.to_le_bytes().to_vec(), value.clone()].concat());
        }
        for (name, sizes, kind, begin) in tensors {
            bytes.extend([text(name), (sizes.len() as u32).to_le_bytes().to_vec()].concat());
            sizes.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
            bytes.extend([&kind.to_le_bytes()[..], &begin.to_le_bytes()].concat());
        }
        bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
        bytes
    }

    #[test]
    fn headers_are_validated_against_the_file() {
        let number = |number: u32| number.to_le_bytes().to_vec();
        let whole = |keys: &[(&str, u32, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)]| file(3, keys, tensors, 64);
        let says = |bytes: &[u8], words: &str| {
            let message = opened(bytes).err().unwrap_or_default();
            assert!(message.contains(words), "`{message}` does not contain `{words}`");
        };
        assert_eq!(opened(&whole(&[], &[("a", &[8, 2], 0, 0)])).unwrap().tensors["a"].shape, [2, 8]);
        assert_eq!(opened(&file(2, &[], &[("a", &[32], 8, 0)], 34)).unwrap().tensors["a"].shape, [32]);
        says(b"", "the magic number: 4 elements");
        says(b"version https://git-lfs", "it does not start with `GGUF`");
        says(&file(3 << 24, &[], &[], 0), "big-endian files are not supported");
        says(&file(1, &[], &[], 0), "unsupported version 1");
        says(&[&MARK[..], &3u32.to_le_bytes(), &(1u64 << 63).to_le_bytes(), &0u64.to_le_bytes()].concat(), "tensors: 9223372036854775808 elements");
        says(&[&MARK[..], &3u32.to_le_bytes(), &0u64.to_le_bytes(), &(1u64 << 60).to_le_bytes()].concat(), "keys: 1152921504606846976 elements");
        says(&whole(&[("a", 8, (1u64 << 63).to_le_bytes().to_vec())], &[]), "key `a`: a string of 9223372036854775808 bytes");
        says(&whole(&[("a", 8, [&1u64.to_le_bytes()[..], b"\xff"].concat())], &[]), "not UTF-8");
        says(&whole(&[("a", 9, [&number(4)[..], &(1u64 << 62).to_le_bytes()].concat())], &[]), "key `a`: 4611686018427387904 elements of at least 4");
        says(&whole(&[("a", 9, [&number(9)[..], &1u64.to_le_bytes()].concat())], &[]), "key `a` is a list of lists");
        says(&whole(&[("a", 9, [&number(0)[..], &(9u64 << 20).to_le_bytes(), &vec![0; 9 << 20]].concat())], &[]), "key `a` is a list of 9437184 values");
        says(&whole(&[("a", 13, Vec::new())], &[]), "key `a` has a value of the unknown type 13");
        says(&whole(&[("a", 7, vec![2])], &[]), "key `a`: a boolean has the value 2");
        says(&whole(&[("a", 4, number(1)), ("a", 4, number(1))], &[]), "key `a` occurs twice");
        for (kind, value) in [(4, number(0)), (4, number(48)), (4, number(1 << 31)), (5, number(32)), (8, vec![0; 8])] {
            says(&whole(&[("general.alignment", kind, value)], &[]), "`general.alignment` is");
        }
        says(&whole(&[], &[("a", &[1], 0, 0), ("a", &[1], 0, 32)]), "tensor `a` occurs twice");
        says(&whole(&[], &[("a", &[8, 2], 0, 0), ("b", &[1], 0, 32)]), "tensors `a` and `b` overlap");
        says(&whole(&[], &[("a", &[1], 0, 4)]), "tensor `a` starts at 4");
        says(&whole(&[], &[("a", &[17], 0, 0)]), "tensor `a` of 68 bytes at offset 0 exceeds the file");
        says(&whole(&[], &[("a", &[1], 0, u64::MAX - 31)]), "exceeds the file");
        says(&whole(&[], &[("a", &[1 << 62, 1 << 62], 0, 0)]), "or is too large");
        says(&whole(&[], &[("a", &[33], 2, 0)]), "rows that are not a multiple of 32");
        says(&whole(&[], &[("a", &[1; 5], 0, 0)]), "tensor `a` has 5 axes");
        says(&whole(&[], &[("a", &[64], 40, 0)]), "tensor `a` has the unsupported type NVFP4");
        says(&whole(&[], &[("a", &[1], 777, 0)]), "tensor `a` has the unsupported type with id 777");
        let empty = opened(&whole(&[], &[("a", &[0, 3], 0, 0), ("b", &[1], 0, 0)])).unwrap();
        assert!(empty.tensors["a"].visit(3, &mut |_| Ok(())).is_ok());
    }

    /// Every prefix of a file, and every byte changed: an error or readable tensors, and no panic.
    #[test]
    fn damaged_files_are_errors_or_are_read() {
        let whole = std::fs::read(golden("blocks.gguf")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("damaged.gguf");
        let cut = (0..900).step_by(3).map(|length| whole[..length].to_vec());
        let changed = (0..900).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            bytes
        });
        let mut errors = 0;
        for bytes in cut.chain(changed) {
            std::fs::write(&path, bytes).unwrap();
            match GgufFile::open(&path) {
                Ok(file) => file.tensors.values().filter(|weight| weight.elements() < 1 << 20).for_each(|weight| weight.visit(5, &mut |_| Ok(())).unwrap()),
                Err(_) => errors += 1,
            }
        }
        assert!(errors > 400, "{errors}");
    }
}
