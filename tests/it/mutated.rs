//! Randomly mutated PyTorch and GGUF files: each is rejected, or it opens, all its weights can be read,
//! and a file written from it opens.
//!
//! `scripts/fuzz --plain` runs the long tests; `MUTATIONS` sets the number of mutated files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Cursor, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::changes::Random;
use crate::checks::{self, GgufResult, Scratch};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Contents of the files of a folder whose names are selected.
fn seeds(folder: &str, chosen: impl Fn(&str) -> bool) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| chosen(&path.file_name().unwrap().to_string_lossy()));
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).filter(|bytes| bytes.len() < 64 << 10).collect()
}

/// Runs a check on mutated files; `change` mutates a seed.
fn check_mutations<S>(seeds: &[S], rounds: usize, seed: u64, change: fn(&mut Random, &S) -> Vec<u8>, mut check: impl FnMut(&[u8])) {
    assert!(seeds.len() > 3);
    let mut random = Random(seed);
    for round in 0..rounds {
        let bytes = change(&mut random, &seeds[round % seeds.len()]);
        if catch_unwind(AssertUnwindSafe(|| check(&bytes))).is_err() {
            let path = std::env::temp_dir().join(format!("mutated-{seed}-{round}"));
            std::fs::write(&path, bytes).unwrap();
            panic!("round {round}: see {}", path.display());
        }
    }
}

/// A PyTorch file, and the entries of its archive if it is one.
struct Archive {
    bytes: Vec<u8>,
    files: Vec<(String, Vec<u8>)>,
}

impl Archive {
    fn new(bytes: Vec<u8>) -> Archive {
        let mut files = Vec::new();
        if let Ok(mut archive) = ZipArchive::new(Cursor::new(&bytes)) {
            for at in 0..archive.len() {
                let (mut file, mut contents) = (archive.by_index(at).unwrap(), Vec::new());
                file.read_to_end(&mut contents).unwrap();
                files.push((file.name().unwrap().into_owned(), contents));
            }
        }
        Archive { bytes, files }
    }

    /// Mutates one of the entries, with a valid checksum, or sometimes the archive itself.
    fn mutated(random: &mut Random, archive: &Archive) -> Vec<u8> {
        let pickle = archive.files.iter().position(|(name, _)| name.ends_with(".pkl"));
        let Some(pickle) = pickle.filter(|_| random.below(8) > 0) else { return random.changed(&archive.bytes, &[]) };
        let chosen = if random.below(8) > 0 { pickle } else { random.below(archive.files.len()) };
        let mut out = ZipWriter::new(Cursor::new(Vec::with_capacity(2 * archive.bytes.len())));
        for (at, (name, contents)) in archive.files.iter().enumerate() {
            out.start_file(name.as_str(), SimpleFileOptions::default().compression_method(CompressionMethod::Stored)).unwrap();
            if at == chosen { out.write_all(&random.changed(contents, &[])) } else { out.write_all(contents) }.unwrap();
        }
        out.finish().unwrap().into_inner()
    }
}

/// Number of mutated PyTorch files that open.
fn pytorch(rounds: usize, seed: u64) -> usize {
    let seeds: Vec<Archive> = seeds("fuzz/corpus/pytorch", |name| name.starts_with("seed-")).into_iter().map(Archive::new).collect();
    let (scratch, mut opened) = (Scratch::new("mutated-pytorch"), 0);
    check_mutations(&seeds, rounds, seed, Archive::mutated, |bytes| opened += usize::from(checks::pytorch(&scratch, bytes)));
    opened
}

/// Numbers of mutated GGUF files that open and that are written again. One in `every` of the files with
/// a model is written.
fn gguf(rounds: usize, seed: u64, every: u8) -> [usize; 2] {
    let mut seeds = seeds("fuzz/corpus/gguf", |name| name.starts_with("seed-"));
    seeds.extend(self::seeds("tests/golden/gguf", |name| name.ends_with(".gguf")));
    let (scratch, mut counts) = (Scratch::new("mutated-gguf"), [0; 2]);
    check_mutations(
        &seeds,
        rounds,
        seed,
        |random, bytes: &Vec<u8>| random.changed(bytes, &[]),
        |bytes| {
            let write = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).is_multiple_of(every);
            let result = checks::gguf(&scratch, bytes, write);
            counts[0] += usize::from(result != GgufResult::Rejected);
            counts[1] += usize::from(result == GgufResult::Written);
        },
    );
    counts
}

/// Runs the requested number of mutations and prints the time.
pub fn run_many(what: &str, check: impl Fn(usize, u64) -> String) {
    let rounds: usize = std::env::var("MUTATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(300_000);
    let start = Instant::now();
    let found = check(rounds, 11);
    let seconds = start.elapsed().as_secs_f64();
    println!("{what}: {found} of {rounds}, {seconds:.0} s, {:.0} per second", rounds as f64 / seconds.max(1e-9));
}

#[test]
fn changed_files_are_refused_or_read() {
    let ([files, written], models) = (gguf(600, 7, 4), pytorch(600, 7));
    assert!((20..580).contains(&files) && (20..580).contains(&models), "{files} of GGUF and {models} of PyTorch open");
    assert!(written > 10, "{written} of GGUF are written again");
}

#[test]
#[ignore = "minutes: `scripts/fuzz --plain pytorch`"]
fn changed_files_of_pytorch_many_times() {
    run_many("pytorch", |rounds, seed| format!("{} open", pytorch(rounds, seed)));
}

#[test]
#[ignore = "minutes: `scripts/fuzz --plain gguf`"]
fn changed_files_of_gguf_many_times() {
    run_many("gguf", |rounds, seed| {
        let [opened, written] = gguf(rounds, seed, 16);
        format!("{opened} open and {written} are written again")
    });
}
