//! The vocabulary file of Kimi K2, in the format of tiktoken, as a `tokenizer.json`.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{SETTINGS, Target};
use crate::error::{Error, Result};
use crate::model::{auxiliary_path, open_auxiliary_config, read_auxiliary_text};

/// A token in Base64 and its rank on each line.
const FILE: &str = "tiktoken.model";
/// The code that splits texts.
const CODE: &str = "tokenization_kimi.py";
/// The alternatives of the regular expression in that code.
const PATTERN: [&str; 8] = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];
/// Number of special tokens, which follow the others; some versions of the code have two more.
const SPECIAL: [(&str, u32); 2] = [("num_reserved_special_tokens + 2", 258), ("num_reserved_special_tokens", 256)];
/// Maximum length of a token in bytes.
const MAX_TOKEN: usize = 1 << 10;

/// The `tokenizer.json` of a folder with a vocabulary of tiktoken; `None` without one.
///
/// # Errors The vocabulary is malformed, or the folder is without the code of Kimi K2, which defines how
/// texts are split.
pub(super) fn tokenizer_json(target: &Target) -> Result<Option<String>> {
    let Some(text) = read_auxiliary_text(target.folder, target.synthesized, FILE)? else { return Ok(None) };
    let code = read_auxiliary_text(target.folder, target.synthesized, CODE)?.unwrap_or_default();
    let special = SPECIAL.iter().find(|(name, _)| code.contains(name)).map(|(_, count)| *count);
    let special = special.filter(|_| PATTERN.iter().all(|part| code.contains(&format!("r\"\"\"{part}\"\"\""))));
    let Some(special) = special else {
        return Err(Error::Unsupported {
            what: format!("{}: the vocabulary `{FILE}` without the `{CODE}` of Kimi K2, which defines how texts are split", target.folder.display()),
            hint: "download this file of the model, or add a tokenizer.json to the folder".into(),
        });
    };
    let wrong = |reason: String| Error::malformed(&auxiliary_path(target.folder, FILE), reason);
    let ranks = ranks(&text).map_err(wrong)?;
    let mut tokens: Vec<&[u8]> = vec![&[]; ranks.len()];
    for (token, rank) in &ranks {
        *tokens.get_mut(*rank as usize).ok_or_else(|| wrong(format!("has {} tokens, but one with the rank {rank}", ranks.len())))? = token;
    }
    if let Some(rank) = tokens.iter().position(|token| token.is_empty()) {
        return Err(wrong(format!("has no token with the rank {rank}")));
    }
    let letters = letters();
    let spelled = |token: &[u8]| token.iter().filter_map(|byte| letters.get(usize::from(*byte))).collect::<String>();
    let vocabulary: Map<String, Value> = tokens.iter().zip(0u32..).map(|(token, rank)| (spelled(token), rank.into())).collect();
    let halves = tokens.iter().zip(0u32..).filter_map(|(token, rank)| halves(token, rank, &ranks));
    let merges: Vec<[String; 2]> = halves.map(|parts| parts.map(spelled)).collect();
    let settings = open_auxiliary_config(target.folder, target.synthesized, SETTINGS)?;
    let named = settings.values().get("added_tokens_decoder");
    let added = |at: u32| {
        let id = u32::try_from(ranks.len()).unwrap_or(u32::MAX).saturating_add(at);
        let content = named.and_then(|named| named.get(id.to_string())?.get("content")?.as_str());
        let content = content.map_or_else(|| format!("<|reserved_token_{id}|>"), str::to_owned);
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
    };
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let split = json!({ "type": "Split", "pattern": { "Regex": PATTERN.join("|") }, "behavior": "Isolated", "invert": false });
    let file = json!({
        "version": "1.0",
        "added_tokens": (0..special).map(added).collect::<Vec<_>>(),
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [split, bytes] },
        "decoder": bytes,
        "model": { "type": "BPE", "ignore_merges": true, "vocab": vocabulary, "merges": merges },
    });
    Ok(Some(file.to_string()))
}

/// The rank of each token.
fn ranks(text: &str) -> Result<HashMap<Vec<u8>, u32>, String> {
    let mut found = HashMap::new();
    for (number, line) in (1usize..).zip(text.lines()).filter(|(_, line)| !line.is_empty()) {
        let token = line.split_once(' ').and_then(|(token, rank)| Some((decoded(token)?, rank.trim().parse().ok()?)));
        let (token, rank) =
            token.filter(|(token, _)| (1..=MAX_TOKEN).contains(&token.len())).ok_or_else(|| format!("line {number} is not a token and its rank"))?;
        if found.insert(token, rank).is_some() {
            return Err(format!("the token of line {number} occurs twice"));
        }
    }
    match (0..=u8::MAX).find(|byte| !found.contains_key([*byte].as_slice())) {
        Some(byte) => Err(format!("has no token for the byte {byte}")),
        None => Ok(found),
    }
}

/// The bytes of Base64 with padding.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len().saturating_sub(digits.len()) > 2 {
        return None;
    }
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0u32, 0u32);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit.saturating_sub(b'A'),
            b'a'..=b'z' => digit.saturating_sub(b'a').saturating_add(26),
            b'0'..=b'9' => digit.saturating_sub(b'0').saturating_add(52),
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count = count.saturating_add(6);
        if let Some(rest) = count.checked_sub(8) {
            bytes.push((bits.checked_shr(rest).unwrap_or(0) & 0xff) as u8);
            count = rest;
        }
    }
    Some(bytes)
}

/// The characters that represent bytes in vocabularies of byte-level BPE.
fn letters() -> Vec<char> {
    let mut others = 256u32..;
    let is_printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    (0..256u32).filter_map(|byte| if is_printable(byte) { char::from_u32(byte) } else { char::from_u32(others.next()?) }).collect()
}

/// The two tokens that are merged last to this one; `None` for tokens that merges do not form.
fn halves<'t>(token: &'t [u8], rank: u32, ranks: &HashMap<Vec<u8>, u32>) -> Option<[&'t [u8]; 2]> {
    let mut ends: Vec<usize> = (0..=token.len()).collect();
    loop {
        let pairs = ends.windows(3).enumerate().filter_map(|(at, ends)| {
            let [first, _, last] = ends else { return None };
            let merged = *ranks.get(token.get(*first..*last)?)?;
            (merged < rank).then_some((merged, at))
        });
        let Some((_, at)) = pairs.min() else { break };
        ends.remove(at.saturating_add(1));
    }
    let [_, middle, _] = ends[..] else { return None };
    token.split_at_checked(middle).map(|(first, second)| [first, second])
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::super::Tokenizer;
    use super::*;
    use crate::model::SynthesizedFiles;

    fn golden() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiktoken")
    }

    fn open(folder: &Path) -> Result<Tokenizer> {
        let (synthesized, config) = (SynthesizedFiles::new(), Map::new());
        let target = Target::new(folder, &synthesized, &config);
        Tokenizer::open(&target, None)
    }

    #[test]
    fn tokens_equal_those_of_tiktoken() {
        let tokenizer = open(&golden()).unwrap();
        let cases: Vec<(String, Vec<i64>)> = serde_json::from_str(&std::fs::read_to_string(golden().join("tokens.json")).unwrap()).unwrap();
        assert!(cases.len() > 8);
        for (text, ids) in cases {
            assert_eq!(tokenizer.encode(&text, None).unwrap().ids, ids, "{text:?}");
        }
    }

    #[test]
    fn incomplete_folders_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |change: &dyn Fn(&Path)| {
            for name in [FILE, CODE, SETTINGS] {
                std::fs::copy(golden().join(name), folder.path().join(name)).unwrap();
            }
            change(folder.path());
            open(folder.path()).err().unwrap().to_string()
        };
        let vocabulary = std::fs::read_to_string(golden().join(FILE)).unwrap();
        let without_code = refused(&|folder| std::fs::remove_file(folder.join(CODE)).unwrap());
        assert!(without_code.contains("without the `tokenization_kimi.py`"), "{without_code}");
        let other = refused(&|folder| std::fs::write(folder.join(CODE), "num_reserved_special_tokens = 256").unwrap());
        assert!(other.contains("without the `tokenization_kimi.py`"), "{other}");
        let changed = |text: String| refused(&move |folder| std::fs::write(folder.join(FILE), &text).unwrap());
        assert!(changed(format!("{vocabulary}IQ== 0\n")).contains("occurs twice"));
        assert!(changed(format!("{vocabulary}IQ=\n")).contains("is not a token and its rank"));
        assert!(changed(vocabulary.lines().skip(1).collect::<Vec<_>>().join("\n")).contains("has no token for the byte 0"));
        assert!(changed(vocabulary.replacen(" 300\n", " 100000\n", 1)).contains("the rank 100000"));
        assert!(open(&golden().join("missing")).err().unwrap().to_string().contains("without tokenizer.json"));
    }
}
