//! The packages of the workspace: what a program that depends on them has to build.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

fn cargo(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO")).args(args).args(["--offline", "--locked"]).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The number of crates that a dependency with these features builds.
fn crates(features: &str) -> usize {
    let tree = cargo(&["tree", "-p", "compress-models", "-e", "normal", "--prefix", "none", "-f", "{p}", "--no-default-features", "--features", features]);
    tree.lines().map(|line| line.trim_end_matches(" (*)")).collect::<BTreeSet<_>>().len()
}

#[test]
fn a_library_has_only_the_requested_dependencies() {
    for (features, limit) in [("", 69), ("zstd", 72), ("provenance", 72), ("remote", 159), ("run", 186)] {
        let count = crates(features);
        assert!(count <= limit, "{features}: {count} crates instead of at most {limit}");
    }
    let light = cargo(&["tree", "-p", "compress-models", "-e", "normal", "--prefix", "none", "--no-default-features"]);
    for name in ["candle", "rayon", "tokio", "ureq", "clap", "ort", "indicatif", "ring"] {
        assert!(!light.lines().any(|line| line.starts_with(name)), "{name}");
    }
}

/// candle uses AVX-512 only if its version of `gemm` is the one for which the root package enables the
/// feature.
#[test]
fn candle_multiplies_with_avx_512() {
    let with_features = ["-e", "normal", "--no-default-features", "--features", "run", "--prefix", "none", "-f", "{p} {f}"];
    // Fails if there are two versions.
    let users = cargo(&[&["tree", "-p", "compress-models", "-i", "gemm"], &with_features[..]].concat());
    assert!(users.lines().next().unwrap().contains("x86-v4") && users.contains("\ncandle-core "), "{users}");
}

/// `rust-version` is true only if the dependencies accept it too.
#[test]
fn dependencies_support_the_minimum_rust_version() {
    let host = Command::new("rustc").arg("-vV").output().unwrap();
    let host = String::from_utf8(host.stdout).unwrap();
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let metadata: Value = serde_json::from_str(&cargo(&["metadata", "--format-version", "1", "--filter-platform", host])).unwrap();
    let version = |package: &Value| {
        let numbers = package["rust_version"].as_str()?.split('.').map(|number| number.parse::<u32>().unwrap());
        Some(numbers.take(2).collect::<Vec<_>>())
    };
    let packages = metadata["packages"].as_array().unwrap();
    let own = packages.iter().find(|package| package["name"] == "compress-models").and_then(version).unwrap();
    let newer: Vec<_> = packages.iter().filter(|package| version(package).is_some_and(|needed| needed > own)).map(|package| &package["name"]).collect();
    assert!(packages.len() > 200 && newer.is_empty(), "{newer:?} need a newer version than {own:?}");
}

/// Files that the crate includes at compile time are in its package.
#[test]
fn packages_are_complete() {
    for name in ["compress-models", "compress-core", "compress-engine", "compress-graph", "compress-kernels", "compress-onnx"] {
        let listed = cargo(&["package", "--list", "--allow-dirty", "-p", name]);
        let files: BTreeSet<&str> = listed.lines().collect();
        assert!(files.contains("src/lib.rs") && files.contains("Cargo.toml"), "{name}: {listed}");
        if name == "compress-models" {
            let needed = ["README.md", "LICENSE", "build.rs", "src/report/html/page.css", "docs/README.md", "configs/bf16.yaml"];
            assert!(needed.iter().all(|file| files.contains(file)), "{listed}");
        }
    }
}

/// The listing by `scripts/public-api`, whose lines users of the library have to learn.
#[test]
fn the_public_api_is_small() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/public-api");
    let lines = |name: &str| std::fs::read_to_string(format!("{folder}/{name}.txt")).unwrap().lines().count();
    let found = lines("light") + lines("run");
    assert!(found <= 900, "{found} lines");
}
