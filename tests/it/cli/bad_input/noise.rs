//! Randomly damaged files with a fixed seed: they are read or rejected, without a panic.

use std::fs;
use std::path::Path;

use crate::cli::support::{compress, model, names, ok};

const ROUNDS: usize = 120;
/// Replacements for numbers and words of a header.
const TOKENS: [&str; 12] = ["0", "1", "-1", "4294967296", "18446744073709551615", "1e5", "[]", "[0, 99999999999]", "null", "\"I8\"", "\"F4\"", "\"I64\""];

struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Changes any byte, or a value of the header.
fn damage(bytes: &[u8], dice: &mut Dice) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    if dice.below(4) == 0 {
        let mut bytes = bytes.to_vec();
        let place = dice.below(bytes.len());
        bytes[place] = dice.below(256) as u8;
        return bytes;
    }
    let starts: Vec<usize> = header.match_indices([':', ',', '[']).map(|(i, _)| i + 1).collect();
    let start = starts[dice.below(starts.len())];
    let end = header[start..].find([',', ']', '}', ':']).map_or(header.len(), |i| start + i);
    let header = format!("{}{}{}", &header[..start], TOKENS[dice.below(TOKENS.len())], &header[end..]);
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat()
}

/// Damages the weights in `name` repeatedly.
fn check(folder: &Path, name: &str) {
    let (mut dice, path) = (Dice(7), folder.join(name).join("model.safetensors"));
    let whole = fs::read(&path).unwrap();
    let mut refused = 0;
    for round in 0..ROUNDS {
        fs::write(&path, damage(&whole, &mut dice)).unwrap();
        let run = compress(folder, &format!("densify {name} -o out --allow-nonfinite"));
        assert!([0, 1].contains(&run.code) && !run.stderr.contains("panicked"), "{name}, round {round}\n{}", run.stderr);
        if run.code == 0 {
            ok(folder, "verify out");
            fs::remove_dir_all(folder.join("out")).unwrap();
        }
        refused += usize::from(run.code == 1);
        assert_eq!(names(folder), ["dense", "packed", "sparse"], "{name}, round {round}");
    }
    assert!((ROUNDS / 4..ROUNDS).contains(&refused), "{refused} of {ROUNDS} were refused");
}

#[test]
fn damage_is_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("dense"));
    ok(folder.path(), "quantize-dynamic dense -o packed --activations none");
    ok(folder.path(), "chain dense -o sparse --layout sparse -- prune-unstructured --amount 0.8 -- quantize-dynamic --symmetric false");
    for name in ["dense", "packed", "sparse"] {
        check(folder.path(), name);
    }
}
