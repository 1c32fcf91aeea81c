//! Pre-tokenizers of byte-level BPE: names in GGUF files, and their form in `tokenizer.json`.
//!
//! Names and patterns are those of `llama-vocab.cpp` in llama.cpp; equivalent names share an entry.

use serde_json::{Value, json};

/// A pre-tokenizer of llama.cpp.
pub(super) struct PreTokenizer {
    /// Equivalent names in GGUF files; the first is written.
    pub names: &'static [&'static str],
    /// Whether digits are split individually, before GPT-2's pattern.
    digits: bool,
    /// The patterns by which texts are split one after the other; none for that of GPT-2.
    patterns: &'static [&'static str],
    /// Whether texts are normalized to NFC first.
    pub is_nfc: bool,
    /// Whether words in the vocabulary become one token regardless of merges.
    pub ignore_merges: bool,
    /// Whether the BOS token is added by default.
    pub adds_first: bool,
}

const PRE_TOKENIZERS: [PreTokenizer; 8] = [
    PreTokenizer { names: &["gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "gigachat", "mellum"], ..GPT2 },
    PreTokenizer { names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], digits: true, ..GPT2 },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        patterns: &[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
        ignore_merges: true,
        adds_first: true,
        ..GPT2
    },
    PreTokenizer {
        names: &["qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "kormo"],
        patterns: &[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
        is_nfc: true,
        ..GPT2
    },
    PreTokenizer {
        names: &["qwen35"],
        patterns: &[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
        is_nfc: true,
        ..GPT2
    },
    PreTokenizer {
        names: &["tekken"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        adds_first: true,
        ..GPT2
    },
    PreTokenizer {
        names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ..GPT2
    },
    PreTokenizer {
        names: &["deepseek-v3"],
        patterns: &[
            r"\p{N}{1,3}",
            "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        ],
        ..GPT2
    },
];

const GPT2: PreTokenizer = PreTokenizer { names: &[], digits: false, patterns: &[], is_nfc: false, ignore_merges: false, adds_first: false };

impl PreTokenizer {
    /// The pre-tokenizer with this name.
    pub fn from_name(name: &str) -> Option<&'static PreTokenizer> {
        PRE_TOKENIZERS.iter().find(|entry| entry.names.contains(&name))
    }

    /// All supported names, for messages.
    pub fn names() -> String {
        PRE_TOKENIZERS.iter().flat_map(|entry| entry.names).copied().collect::<Vec<_>>().join(", ")
    }

    /// The pre-tokenizer of a `tokenizer.json`, if it is supported.
    pub fn from_json(value: &Value) -> Option<&'static PreTokenizer> {
        let steps: Vec<&Value> = match at(value, "/pretokenizers").as_array() {
            Some(steps) => steps.iter().collect(),
            None => vec![value],
        };
        let is_byte_level = |step: &Value, pattern: bool| {
            at(step, "/type") == "ByteLevel" && at(step, "/add_prefix_space") != true && at(step, "/use_regex").as_bool().unwrap_or(true) == pattern
        };
        let is_split = |step: &Value, pattern: &str| {
            let isolated = at(step, "/type") == "Split" && at(step, "/behavior") == "Isolated" && at(step, "/invert") != true;
            isolated && at(step, "/pattern/Regex") == pattern
        };
        let (bytes, before) = steps.split_last()?;
        PRE_TOKENIZERS.iter().find(|entry| match (before, entry.patterns) {
            ([], []) => !entry.digits && is_byte_level(bytes, true),
            ([digits], []) => entry.digits && at(digits, "/type") == "Digits" && at(digits, "/individual_digits") == true && is_byte_level(bytes, true),
            (splits, patterns) => {
                let is_same = splits.len() == patterns.len() && splits.iter().zip(patterns).all(|(split, pattern)| is_split(split, pattern));
                !patterns.is_empty() && is_same && is_byte_level(bytes, false)
            }
        })
    }

    /// The pre-tokenizer as in `tokenizer.json`.
    pub fn to_json(&self) -> Value {
        let bytes = |pattern: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": pattern });
        if self.patterns.is_empty() && !self.digits {
            return bytes(true);
        }
        let split = |pattern: &&str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        let digits = json!({ "type": "Digits", "individual_digits": true });
        let steps = self.patterns.iter().map(split).chain(self.digits.then_some(digits)).chain([bytes(self.patterns.is_empty())]);
        json!({ "type": "Sequence", "pretokenizers": steps.collect::<Vec<Value>>() })
    }
}

/// The value at a JSON pointer; null if it does not exist.
pub(super) fn at<'j>(value: &'j Value, pointer: &str) -> &'j Value {
    value.pointer(pointer).unwrap_or(&Value::Null)
}
