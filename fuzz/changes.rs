// Random mutations of files and responses, for tests and fuzzers.

/// Deterministic random number generator; the field is the seed.
pub struct Random(pub u64);

/// Boundary values of lengths and offsets.
const NUMBERS: [u64; 10] = [0, 1, 2, 31, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 63, u64::MAX];

/// Number of leading bytes, which usually contain headers and are mutated more often.
const HEAD: usize = 700;

impl Random {
    /// A random number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit.max(1)
    }

    /// Mutates bytes at one to four offsets: flips bits, replaces bytes, removes or duplicates runs,
    /// truncates, or inserts one of `words` (or a boundary value, if `words` is empty).
    pub fn change(&mut self, bytes: &mut Vec<u8>, words: &[&str]) {
        for _ in 0..1 + self.below(4) {
            let within = if self.below(2) == 0 { HEAD.min(bytes.len()) } else { bytes.len() };
            let at = self.below(within);
            let end = (at + 1 + self.below(16)).min(bytes.len());
            if at >= end {
                return bytes.push(self.below(256) as u8);
            }
            match self.below(8) {
                0 => bytes[at] = self.below(256) as u8,
                1 => bytes[at] ^= 1 << self.below(8),
                2 => drop(bytes.drain(at..end)),
                3 | 4 => {
                    let run = bytes[at..end].to_vec();
                    let to = if self.below(2) == 0 { at } else { self.below(bytes.len()) };
                    drop(bytes.splice(to..to, run));
                }
                5 => bytes.truncate(bytes.len() - self.below(40).min(bytes.len())),
                kind => match words.get(self.below(words.len())) {
                    Some(word) => drop(bytes.splice(at..if kind == 6 { at } else { end }, word.bytes())),
                    None => {
                        let (number, width) = (NUMBERS[self.below(NUMBERS.len())].to_le_bytes(), if kind == 6 { 4 } else { 8 });
                        let end = (at + width).min(bytes.len());
                        bytes[at..end].copy_from_slice(&number[..end - at]);
                    }
                },
            }
        }
    }

    /// Returns a mutated copy.
    pub fn changed(&mut self, bytes: &[u8], words: &[&str]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        self.change(&mut bytes, words);
        bytes
    }
}
