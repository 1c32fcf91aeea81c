//! Mutated ONNX files: mutations of a corpus, for a limited time, on all threads.
//!
//! The first file of each kind of result is added to the corpus, so that later checks are reached.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use compress::Model;
use prost::Message;

use crate::onnx_in::broken::again_in;
use crate::onnx_in::layers::layers;
use crate::onnx_in::model;
use crate::onnx_in::quantized::{rounded, weights_alone};

/// Maximum size of a file in bytes.
const LONGEST: usize = 8192;
/// Boundary values of lengths and sizes.
const NUMBERS: [&[u8]; 8] =
    [&[0], &[1], &[0x7f], &[0x80, 1], &[0xff, 0xff, 3], &[0xff, 0xff, 0xff, 0xff, 0xf], &[0xff; 9], b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"];

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit.max(1)
    }

    fn part(&mut self, of: usize) -> std::ops::Range<usize> {
        let start = self.below(of + 1);
        start..(start + 1 + self.below(32)).min(of)
    }
}

/// The initial corpus: seeds of the fuzzer, its stored corpus, and the files of these tests.
fn corpus() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    let mut seeds: Vec<PathBuf> = std::fs::read_dir(folder.join("opening")).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.sort();
    let mut files: Vec<Vec<u8>> = seeds.iter().map(|path| std::fs::read(path).unwrap()).collect();
    if let Ok(kept) = std::fs::File::open(folder.join("opening.tar.gz")) {
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(kept));
        for entry in archive.entries().unwrap() {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut entry.unwrap(), &mut bytes).unwrap();
            files.push(bytes);
        }
    }
    files.extend([model(), layers(13), layers(10), rounded(), weights_alone()].iter().map(Message::encode_to_vec));
    files.retain(|file| file.len() <= LONGEST);
    files
}

fn mutated(files: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = files[random.below(files.len())].clone();
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len() + 1);
        match random.below(8) {
            0 if at < bytes.len() => bytes[at] = random.below(256) as u8,
            1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 => drop(bytes.drain(random.part(bytes.len()))),
            3 => bytes.insert(at, random.below(256) as u8),
            4 => {
                let other = &files[random.below(files.len())];
                let part = other[random.part(other.len())].to_vec();
                drop(bytes.splice(at..at, part));
            }
            5 => {
                let part = bytes[random.part(bytes.len())].to_vec();
                drop(bytes.splice(at..at, part));
            }
            6 => {
                let number = NUMBERS[random.below(NUMBERS.len())];
                drop(bytes.splice(at..(at + 1).min(bytes.len()), number.iter().copied()));
            }
            _ => {
                let part = random.part(bytes.len());
                let value = random.below(256) as u8;
                bytes[part].fill(value);
            }
        }
    }
    bytes.truncate(LONGEST);
    bytes
}

/// An error message without names and numbers.
fn kind(said: &str) -> String {
    said.split('`').step_by(2).flat_map(str::chars).filter(|c| c.is_ascii_alphabetic()).collect()
}

/// Checks a file. Returns the kind of result, and whether it opens.
fn answer(bytes: &[u8], folder: &Path) -> (String, bool) {
    let path = folder.join("in.onnx");
    std::fs::write(&path, bytes).unwrap();
    match Model::open(&path) {
        Err(e) => (kind(&e.to_string().replace(&path.display().to_string(), "")), false),
        Ok(opened) => {
            let said = opened.graph().map_or_else(|e| kind(&e.to_string()), |graph| graph.nodes().iter().map(|node| node.op.name()).collect());
            let first = again_in(bytes, folder);
            if let Some(first) = &first {
                assert_eq!(again_in(first, folder).as_ref(), Some(first), "what was written is written otherwise the second time");
            }
            (format!("{said}{}", opened.auxiliary.in_weight_files.iter().map(|note| kind(note)).collect::<String>()), true)
        }
    }
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

#[test]
#[ignore = "an hour, or the configured time: `scripts/fuzz --plain opening`"]
fn random_files_are_rejected_or_preserved() {
    let (wanted, seconds) = (number("COMPRESS_FUZZ_INPUTS", 10_000_000), number("COMPRESS_FUZZ_SECONDS", 3600));
    let (begun, until) = (Instant::now(), Duration::from_secs(seconds));
    let keep = std::env::var_os("COMPRESS_FUZZ_KEEP").map(PathBuf::from);
    let (done, opened, kinds) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(BTreeSet::new()));
    let started = corpus();
    let files = Mutex::new(started.clone());
    let job = |seed: u64| {
        let folder = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" }).unwrap();
        let (mut random, mut own) = (Random((seed << 32) | 0x5eed), started.clone());
        while begun.elapsed() < until && done.fetch_add(1, Ordering::Relaxed) < wanted {
            let bytes = mutated(&own, &mut random);
            let Ok((said, opens)) = catch_unwind(AssertUnwindSafe(|| answer(&bytes, folder.path()))) else {
                let path = keep.clone().unwrap_or_else(std::env::temp_dir).join("crash.onnx");
                std::fs::write(&path, &bytes).unwrap();
                panic!("{} bytes that are not refused: {}", bytes.len(), path.display());
            };
            opened.fetch_add(u64::from(opens), Ordering::Relaxed);
            if kinds.lock().unwrap().insert(said) {
                if let Some(keep) = &keep {
                    let mut hasher = DefaultHasher::new();
                    bytes.hash(&mut hasher);
                    std::fs::write(keep.join(format!("{:016x}", hasher.finish())), &bytes).unwrap();
                }
                let mut all = files.lock().unwrap();
                all.push(bytes);
                own.clone_from(&all);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|seed| drop(scope.spawn(move || job(seed as u64 + number("COMPRESS_FUZZ_SEED", 1))))));
    let (done, opened) = (done.into_inner().min(wanted), opened.into_inner());
    println!("{done} inputs in {:.0} s, {opened} open, {} kinds of answers", begun.elapsed().as_secs_f64(), kinds.into_inner().unwrap().len());
    assert!(opened > 0 && opened < done);
}
