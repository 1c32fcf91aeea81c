//! Files of PyTorch and GGUF with changes at random places: they are refused, or what opens is read whole and written so that it opens again.
//!
//! `scripts/fuzz --plain` runs the long tests, which `MUTATIONS` tells how many changes to make.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Cursor, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

use compress::export::{FileType, Gguf};
use compress::store::gguf::GgufFile;
use compress::{Model, Pipeline};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Elements of a weight at most that is gone through.
const MOST: usize = 1 << 16;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit.max(1)
    }

    /// Changes bytes at one to four places: bits, bytes, runs that are cut, doubled or moved, and numbers that lengths and places may be.
    fn change(&mut self, bytes: &mut Vec<u8>) {
        const NUMBERS: [u64; 10] = [0, 1, 2, 31, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 63, u64::MAX];
        for _ in 0..1 + self.below(4) {
            // What stands at the beginning says what the rest is.
            let within = if self.below(2) == 0 { 700.min(bytes.len()) } else { bytes.len() };
            let at = self.below(within);
            let end = (at + 1 + self.below(16)).min(bytes.len());
            if at >= end {
                return bytes.push(self.below(256) as u8);
            }
            match self.below(8) {
                0 => bytes[at] = self.below(256) as u8,
                1 => bytes[at] ^= 1 << self.below(8),
                2 => drop(bytes.drain(at..end)),
                3 => {
                    let run = bytes[at..end].to_vec();
                    drop(bytes.splice(at..at, run));
                }
                4 => {
                    let run = bytes[at..end].to_vec();
                    let to = self.below(bytes.len());
                    drop(bytes.splice(to..to, run));
                }
                5 => bytes.truncate(bytes.len() - self.below(40).min(bytes.len())),
                width => {
                    let (number, width) = (NUMBERS[self.below(NUMBERS.len())].to_le_bytes(), if width == 6 { 4 } else { 8 });
                    let end = (at + width).min(bytes.len());
                    bytes[at..end].copy_from_slice(&number[..end - at]);
                }
            }
        }
    }
}

/// Files of a folder whose names begin or end so.
fn seeds(folder: &str, chosen: impl Fn(&str) -> bool) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| chosen(&path.file_name().unwrap().to_string_lossy()));
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).filter(|bytes| bytes.len() < 64 << 10).collect()
}

/// Runs a check on files that were changed; gives how many were opened.
fn changed(seeds: &[Vec<u8>], rounds: usize, seed: u64, change: fn(&mut Random, &[u8]) -> Vec<u8>, opens: impl Fn(&[u8]) -> bool) -> usize {
    assert!(seeds.len() > 3);
    let (mut random, mut opened) = (Random(seed), 0);
    for round in 0..rounds {
        let bytes = change(&mut random, &seeds[round % seeds.len()]);
        match catch_unwind(AssertUnwindSafe(|| opens(&bytes))) {
            Ok(open) => opened += usize::from(open),
            Err(_) => {
                let path = std::env::temp_dir().join(format!("mutated-{seed}-{round}"));
                std::fs::write(&path, bytes).unwrap();
                panic!("round {round}: see {}", path.display());
            }
        }
    }
    opened
}

fn plainly(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    random.change(&mut bytes);
    bytes
}

/// Changes one file in an archive, whose sums then fit; or, now and then, the archive itself.
fn inside(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let changed = |random: &mut Random| -> Option<Vec<u8>> {
        let mut archive = ZipArchive::new(Cursor::new(bytes)).ok()?;
        let (count, mut out) = (archive.len(), ZipWriter::new(Cursor::new(Vec::new())));
        let pickle = (0..count).find(|at| archive.by_index(*at).is_ok_and(|file| file.name().is_ok_and(|name| name.ends_with(".pkl"))))?;
        let chosen = if random.below(8) > 0 { pickle } else { random.below(count) };
        for at in 0..count {
            let mut file = archive.by_index(at).ok()?;
            let (name, mut contents) = (file.name().ok()?.into_owned(), Vec::new());
            file.read_to_end(&mut contents).ok()?;
            if at == chosen {
                random.change(&mut contents);
            }
            out.start_file(name, SimpleFileOptions::default().compression_method(CompressionMethod::Stored)).ok()?;
            out.write_all(&contents).ok()?;
        }
        Some(out.finish().ok()?.into_inner())
    };
    let whole = if random.below(8) > 0 { changed(random) } else { None };
    whole.unwrap_or_else(|| plainly(random, bytes))
}

/// A folder in memory where there is one.
fn place() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

fn pytorch(rounds: usize, seed: u64) -> usize {
    let seeds = seeds("fuzz/corpus/pytorch", |name| name.starts_with("seed-"));
    let place = place();
    let path = place.path().join("in.pt");
    changed(&seeds, rounds, seed, inside, |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let Ok(model) = Model::open(&path) else { return false };
        for (name, weight) in model.weights.by_name.iter().filter(|(_, weight)| weight.elements() <= MOST) {
            let mut size = 0;
            let read = weight.visit(1, &mut |block| {
                size += block.now.values.len() as u64;
                Ok(())
            });
            assert!(read.is_err() || size == weight.value_bytes(), "{name}: {weight:?} has {size} bytes");
        }
        true
    })
}

fn gguf(rounds: usize, seed: u64) -> usize {
    let mut seeds = seeds("fuzz/corpus/gguf", |name| name.starts_with("seed-"));
    seeds.extend(self::seeds("tests/golden/gguf", |name| name.ends_with(".gguf")));
    let place = place();
    let (path, out) = (place.path().join("in.gguf"), place.path().join("out"));
    changed(&seeds, rounds, seed, plainly, |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let Ok(file) = GgufFile::open(&path) else { return false };
        if file.tensors.values().any(|weight| weight.elements() > MOST) {
            return true;
        }
        file.tensors.values().for_each(|weight| weight.visit(3, &mut |_| Ok(())).expect("what opens is read"));
        let Ok(model) = Model::open(&path) else { return true };
        // Writing takes longer than all the rest.
        if bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)) < 4 {
            let pipeline = Pipeline::builder().export(Gguf { file_type: FileType::F32 }).measure(false).force(true).threads(1).build().unwrap();
            if pipeline.run(model, &out).is_ok() {
                GgufFile::open(&out.join("model.gguf")).expect("what was written opens");
            }
        }
        true
    })
}

/// As many as are asked for, and how long they took.
fn many(what: &str, check: fn(usize, u64) -> usize) {
    let rounds = std::env::var("MUTATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(300_000);
    let start = Instant::now();
    let opened = check(rounds, 11);
    println!("{what}: {opened} of {rounds} open, {:.0} s", start.elapsed().as_secs_f64());
}

#[test]
fn changed_files_are_refused_or_read() {
    let (files, models) = (gguf(600, 7), pytorch(600, 7));
    assert!((20..580).contains(&files) && (20..580).contains(&models), "{files} of GGUF and {models} of PyTorch open");
}

#[test]
#[ignore = "minutes: `scripts/fuzz --plain pytorch`"]
fn changed_files_of_pytorch_many_times() {
    many("pytorch", pytorch);
}

#[test]
#[ignore = "minutes: `scripts/fuzz --plain gguf`"]
fn changed_files_of_gguf_many_times() {
    many("gguf", gguf);
}
