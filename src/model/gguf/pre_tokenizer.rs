//! How texts are cut into words before byte-level BPE: by the names that GGUF files have for it, and as `tokenizer.json` says it.
//!
//! Names and patterns are those of `llama-vocab.cpp` in llama.cpp; names that cut in the same way share a row.

use serde_json::{Value, json};

use super::vocabulary::at;

/// A way to cut.
pub(super) struct Words {
    /// The names; the first is written.
    pub names: &'static [&'static str],
    /// Whether each digit is a word, before GPT-2's pattern.
    digits: bool,
    /// The pattern; without one, that of GPT-2.
    pattern: Option<&'static str>,
    /// Whether texts are normalized to NFC first.
    pub composed: bool,
    /// Whether words that are tokens are not cut further.
    pub ignore_merges: bool,
    /// Whether the first token is put before every text where a file does not say so.
    pub first: bool,
}

const WORDS: [Words; 5] = [
    Words { names: &["gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "gigachat", "mellum"], ..GPT2 },
    Words { names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], digits: true, ..GPT2 },
    Words {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        pattern: Some(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        ignore_merges: true,
        first: true,
        ..GPT2
    },
    Words {
        names: &["qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "kormo"],
        pattern: Some(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        composed: true,
        ..GPT2
    },
    Words {
        names: &["tekken"],
        pattern: Some(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: true,
        first: true,
        ..GPT2
    },
];

const GPT2: Words = Words { names: &[], digits: false, pattern: None, composed: false, ignore_merges: false, first: false };

impl Words {
    /// The way of a name.
    pub fn named(name: &str) -> Option<&'static Words> {
        WORDS.iter().find(|words| words.names.contains(&name))
    }

    /// All names.
    pub fn names() -> String {
        WORDS.iter().flat_map(|words| words.names).copied().collect::<Vec<_>>().join(", ")
    }

    /// The way that a `tokenizer.json` says, if it is known.
    pub fn cutting(said: &Value) -> Option<&'static Words> {
        let steps: Vec<&Value> = match at(said, "/pretokenizers").as_array() {
            Some(steps) => steps.iter().collect(),
            None => vec![said],
        };
        let plain = |step: &Value, pattern: bool| {
            at(step, "/type") == "ByteLevel" && at(step, "/add_prefix_space") != true && at(step, "/use_regex").as_bool().unwrap_or(true) == pattern
        };
        WORDS.iter().find(|words| match (steps.as_slice(), words.pattern) {
            ([bytes], None) => !words.digits && plain(bytes, true),
            ([digits, bytes], None) => words.digits && at(digits, "/type") == "Digits" && at(digits, "/individual_digits") == true && plain(bytes, true),
            ([split, bytes], Some(pattern)) => {
                let isolated = at(split, "/type") == "Split" && at(split, "/behavior") == "Isolated" && at(split, "/invert") != true;
                isolated && at(split, "/pattern/Regex") == pattern && plain(bytes, false)
            }
            _ => false,
        })
    }

    /// As `tokenizer.json` says it.
    pub fn pre_tokenizer(&self) -> Value {
        let bytes = |pattern: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": pattern });
        let first = match self.pattern {
            Some(pattern) => json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false }),
            None if self.digits => json!({ "type": "Digits", "individual_digits": true }),
            None => return bytes(true),
        };
        json!({ "type": "Sequence", "pretokenizers": [first, bytes(self.pattern.is_none())] })
    }
}
