//! Size of files after general-purpose compression, a measure of their remaining redundancy.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::files::File;
use crate::work::Work;

/// Size after compression with zstd, level 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compressed {
    /// Bytes; extrapolated if only a sample was compressed.
    pub bytes: u64,
    /// Whether only a sample of evenly spaced blocks was compressed.
    pub sampled: bool,
}

const LEVEL: i32 = 3;
const SAMPLE: u64 = 256 << 10;
/// Files with at most this total size are compressed completely.
pub const EXACT: u64 = 8 << 20;

/// Compresses files, or 32 evenly spaced blocks if they are large.
pub fn compressed_size(paths: &[PathBuf], work: &Work) -> Result<Compressed> {
    let mut files = Vec::new();
    for path in paths {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let length = file.length();
        files.push((path, file, length));
    }
    let total: u64 = files.iter().map(|(_, _, length)| length).sum();
    let sampled = total > EXACT;
    let starts: Vec<u64> = if sampled {
        (0..EXACT / SAMPLE).map(|i| (total - SAMPLE) / (EXACT / SAMPLE - 1) * i).collect()
    } else {
        (0..total.div_ceil(SAMPLE)).map(|i| i * SAMPLE).collect()
    };
    let blocks: Vec<(u64, u64)> = starts.into_iter().map(|start| (start, SAMPLE.min(total - start))).collect();
    let sizes = work.run(
        "Compressing",
        &blocks,
        |(_, length)| *length,
        |&(start, length)| {
            let mut block = vec![0; length as usize];
            let (mut at, mut filled) = (start, 0usize);
            for (path, file, size) in &files {
                if at < *size && filled < block.len() {
                    let count = (block.len() - filled).min((size - at) as usize);
                    let run = &mut block[filled..filled + count];
                    let read = if sampled { file.sample_exact_at(run, at) } else { file.read_exact_at(run, at) };
                    read.map_err(Error::io("read", path))?;
                    filled += count;
                    at = 0;
                } else {
                    at = at.saturating_sub(*size);
                }
            }
            work.advance(length)?;
            zstd::bulk::compress(&block, LEVEL).map(|c| c.len() as u64).map_err(|source| Error::Io {
                action: "compress",
                path: paths.first().cloned().unwrap_or_default(),
                source,
            })
        },
    )?;
    let (compressed, sampled_bytes) = (sizes.iter().sum::<u64>(), blocks.iter().map(|(_, length)| length).sum::<u64>());
    let bytes = if sampled_bytes == 0 { 0 } else { (u128::from(compressed) * u128::from(total) / u128::from(sampled_bytes)) as u64 };
    Ok(Compressed { bytes, sampled })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Cancel, Silent};

    #[test]
    fn zeros_compress_and_noise_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = 7u64;
        let noise: Vec<u8> = (0..1_000_000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let paths = [write("a", &vec![0; 1_000_000]), write("b", &noise)];
        let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
        let small = compressed_size(&paths, &work).unwrap();
        assert!(!small.sampled && (1_000_000..1_010_000).contains(&small.bytes), "{small:?}");
        let large = write("c", &vec![0; EXACT as usize]);
        let sampled = compressed_size(&[large, paths[1].clone()], &work).unwrap();
        assert!(sampled.sampled && (500_000..2_000_000).contains(&sampled.bytes), "{sampled:?}");
        assert_eq!(compressed_size(&[], &work).unwrap().bytes, 0);
    }
}
