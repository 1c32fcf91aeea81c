//! Checkpoints larger than memory: each run has an address space of 300 MB for a checkpoint of 420 MB.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;

use crate::cli::support::{Run, read_json};

const LIMIT_KILOBYTES: u64 = 300_000;
const TENSORS: usize = 10;
const SHAPE: [usize; 2] = [1024, 10240];

/// Ten F32 tensors of 42 MB each.
fn large(path: &Path) {
    let each = 4 * SHAPE[0] * SHAPE[1];
    let entry = |i: usize| format!("\"layers.{i}.weight\":{{\"dtype\":\"F32\",\"shape\":{SHAPE:?},\"data_offsets\":[{},{}]}}", i * each, (i + 1) * each);
    let header = format!("{{\"__metadata__\":{{\"format\":\"pt\"}},{}}}", (0..TENSORS).map(entry).collect::<Vec<_>>().join(","));
    let row: Vec<u8> = (0..SHAPE[1] as u32).flat_map(|i| ((i.wrapping_mul(2_654_435_761) as f32 + 0.5) / 4e10).to_le_bytes()).collect();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = BufWriter::new(File::create(path).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    for _ in 0..TENSORS * SHAPE[0] {
        file.write_all(&row).unwrap();
    }
    file.flush().unwrap();
}

/// Runs a command that must succeed under the limit.
fn check(folder: &Path, args: &str) -> Run {
    let script = format!("ulimit -v {LIMIT_KILOBYTES} && exec \"$0\" \"$@\"");
    let mut limited = Command::new("sh");
    // The allocator reserves 64 MB of address space per thread, even for threads that need no memory.
    limited.env("MALLOC_ARENA_MAX", "1");
    limited.args(["-c", &script, env!("CARGO_BIN_EXE_compress"), "--threads", "2"]).args(args.split(' ')).current_dir(folder);
    let run = Run::from(limited.output().unwrap());
    assert_eq!(run.code, 0, "compress {args}\n{}", run.stderr);
    run
}

/// A table of the weights takes less than a kilobyte for each.
#[test]
fn many_tensors_can_be_listed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let entries: Vec<String> = (0..100_000).map(|i| format!("\"t{i}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}")).collect();
    let header = format!("{{{}}}", entries.join(","));
    fs::write(folder.path().join("many.safetensors"), [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let rows = check(folder.path(), "inspect many.safetensors").stdout;
    assert_eq!(rows.lines().filter(|line| line.starts_with(" t") && line.contains("f32 ")).count(), 100_001, "tensors and their total");
    check(folder.path(), "inspect many.safetensors --json");
}

#[test]
fn every_pass_and_layout_streams() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    large(&folder.join("in/model.safetensors"));
    assert!(fs::metadata(folder.join("in/model.safetensors")).unwrap().len() > LIMIT_KILOBYTES * 1000);
    let written = |args: &str| {
        check(folder, args);
        let report = read_json(&folder.join("out/report.json"));
        let peak = report["totals"]["peak_rss_bytes"].as_u64().unwrap();
        assert!(peak < LIMIT_KILOBYTES * 1000 / 3, "compress {args} took {peak} bytes");
    };
    written("prune-unstructured in -o out");
    written("prune-unstructured in -o out --force --scope global --layout sparse --amount 0.9");
    check(folder, "densify out -o dense");
    check(folder, "inspect out");
    check(folder, "diff out dense");
    fs::remove_dir_all(folder.join("dense")).unwrap();
    written("cast in -o out --force --to f16 --shard-size 100MB");
    written("chain in -o out --force -- prune-unstructured --scope global -- cast -- quantize-dynamic --granularity tensor --observer mse");
    written("quantize-dynamic in -o out --force --granularity group --group-size 128 --symmetric false");
    check(folder, "verify out");
    check(folder, "densify out -o dense");
}
