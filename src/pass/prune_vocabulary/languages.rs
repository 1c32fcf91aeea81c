//! Selection by language: tokens in its Unicode scripts remain.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use regex::Regex;
use serde_json::Value;

use super::NAME;
use super::tokenizer::TokenizerFile;
use crate::error::{Error, Result};

/// Codes of languages (ISO 639), by the scripts in which they are written.
const LANGUAGES: &[(&[&str], &str)] = &[
    (
        &["Latin"],
        "af az bs ca cs cy da de en eo es et eu fi fil fr fy ga gd gl ha hr hu id ig is it jv la lb lt lv mi ms mt nb nl nn no oc pl pt ro sk sl so sq su sv sw tl tr uz vi xh yo zu",
    ),
    (&["Cyrillic"], "be bg kk ky mk mn ru tg tt uk"),
    (&["Cyrillic", "Latin"], "sr"),
    (&["Greek"], "el"),
    (&["Armenian"], "hy"),
    (&["Georgian"], "ka"),
    (&["Hebrew"], "he yi"),
    (&["Arabic"], "ar fa ps sd ug ur"),
    (&["Devanagari"], "hi mr ne sa"),
    (&["Bengali"], "as bn"),
    (&["Gurmukhi"], "pa"),
    (&["Gujarati"], "gu"),
    (&["Oriya"], "or"),
    (&["Tamil"], "ta"),
    (&["Telugu"], "te"),
    (&["Kannada"], "kn"),
    (&["Malayalam"], "ml"),
    (&["Sinhala"], "si"),
    (&["Thai"], "th"),
    (&["Lao"], "lo"),
    (&["Myanmar"], "my"),
    (&["Khmer"], "km"),
    (&["Tibetan"], "bo dz"),
    (&["Ethiopic"], "am ti"),
    (&["Han"], "yue zh"),
    (&["Han", "Hiragana", "Katakana"], "ja"),
    (&["Hangul", "Han"], "ko"),
];

/// The scripts of languages.
pub(super) struct Scripts(Regex);

impl Scripts {
    /// The scripts of languages by their codes. Fails if one is unknown.
    pub fn of_languages(codes: &[String]) -> Result<Scripts> {
        let mut classes = r"\p{Common}\p{Inherited}".to_owned();
        for code in codes {
            let found = LANGUAGES.iter().find(|(_, languages)| languages.split(' ').any(|language| language == code));
            let Some((scripts, _)) = found else {
                let mut all: Vec<&str> = LANGUAGES.iter().flat_map(|(_, languages)| languages.split(' ')).collect();
                all.sort_unstable();
                return Err(Error::option(format!("{NAME}: languages"), format!("`{code}` is not one of the languages {}", all.join(", "))));
            };
            classes.extend(scripts.iter().map(|script| format!(r"\p{{{script}}}")));
        }
        let expression = Regex::new(&format!("^[{classes}]*$"));
        expression.map(Scripts).map_err(|e| Error::option(format!("{NAME}: languages"), e))
    }

    /// Whether all characters of a token belong to the scripts, or to none in particular: digits,
    /// punctuation, symbols and spaces. A token of incomplete characters does not.
    pub fn contain(&self, tokenizer: &TokenizerFile, id: usize) -> bool {
        tokenizer.text(id).is_some_and(|text| self.0.is_match(&text))
    }
}

/// The byte that a character represents in byte-level BPE: its code if that is printable, otherwise the byte
/// of its rank among the other bytes, from U+0100 on.
fn byte(character: char) -> Option<u8> {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => Some(byte).filter(is_printable),
        Err(_) => (0..=u8::MAX).filter(|byte| !is_printable(byte)).nth(usize::try_from(code.checked_sub(256)?).ok()?),
    }
}

/// Whether a step of a tokenizer, or one of its parts, maps bytes to characters.
fn is_byte_level(step: &Value) -> bool {
    let parts = ["pretokenizers", "decoders"].into_iter().filter_map(|name| step.get(name)?.as_array()).flatten();
    step.get("type").is_some_and(|name| name == "ByteLevel") || parts.into_iter().any(is_byte_level)
}

impl TokenizerFile {
    /// The text of a token; `None` if the token is a part of a character.
    fn text(&self, id: usize) -> Option<String> {
        let token = self.token(id)?;
        if ["/pre_tokenizer", "/decoder"].into_iter().any(|step| is_byte_level(self.at(step))) {
            return String::from_utf8(token.chars().map(byte).collect::<Option<Vec<u8>>>()?).ok();
        }
        let [prefix, suffix] = self.affixes();
        let body = token.strip_prefix(prefix).unwrap_or(token);
        Some(body.strip_suffix(suffix).unwrap_or(body).to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::super::PruneVocabulary;
    use super::*;

    fn scripts(codes: &[&str]) -> Result<Scripts> {
        Scripts::of_languages(&codes.iter().map(|code| (*code).to_owned()).collect::<Vec<_>>())
    }

    fn parse(json: &Value) -> TokenizerFile {
        TokenizerFile::parse(Path::new("tokenizer.json"), &json.to_string()).unwrap()
    }

    #[test]
    fn tokens_of_other_scripts_are_removed() {
        let words = ["[UNK]", "the", "##ß", "ça", "дом", "##ом", "του", "12", "!?", "a日", "日本", "かな", "한국", "na\u{301}"];
        let vocab: serde_json::Map<String, Value> = words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
        let file = parse(&json!({ "model": { "type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##" } }));
        let kept = |codes: &[&str]| {
            let scripts = scripts(codes).unwrap();
            (0..words.len()).filter(|id| scripts.contain(&file, *id)).map(|id| words[id]).collect::<Vec<_>>()
        };
        assert_eq!(kept(&["en"]), ["[UNK]", "the", "##ß", "ça", "12", "!?", "na\u{301}"]);
        assert_eq!(kept(&["de", "fr"]), kept(&["en"]));
        assert_eq!(kept(&["ru"]), ["дом", "##ом", "12", "!?"]);
        assert_eq!(kept(&["ja"]), ["12", "!?", "日本", "かな"]);
        assert_eq!(kept(&["ja", "en"]), ["[UNK]", "the", "##ß", "ça", "12", "!?", "a日", "日本", "かな", "na\u{301}"]);
        let error = scripts(&["en", "xx"]).map(drop).unwrap_err().to_string();
        assert!(error.contains("languages: `xx` is not one of the languages af, am, ar,"), "{error}");
    }

    #[test]
    fn bytes_are_decoded() {
        let all: Vec<u8> = ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ').chain((256..324).filter_map(char::from_u32)).filter_map(byte).collect();
        assert!(all.len() == 256 && (0..=255).all(|byte| all.contains(&byte)));
        assert_eq!(
            ["Ġ", "a", "Ċ", "°", "Ń", "ń"].map(|text| byte(text.chars().next().unwrap())),
            [Some(b' '), Some(b'a'), Some(b'\n'), Some(0xB0), Some(0xAD), None]
        );
        // `Ð´` is the Cyrillic letter д, and `Ð` its first byte.
        let vocab = json!({ "Ġ": 0, "a": 1, "Ð": 2, "´": 3, "Ġa": 4, "Ð´": 5, "ĠÐ": 6, "ĠÐ´": 7 });
        let merges = json!(["Ġ a", "Ġ Ð", "ĠÐ ´", "Ð ´"]);
        let file = parse(&json!({ "model": { "type": "BPE", "vocab": vocab, "merges": merges }, "pre_tokenizer": { "type": "Sequence",
            "pretokenizers": [{ "type": "ByteLevel" }] } }));
        assert_eq!([4, 5, 6, 7].map(|id| file.text(id)), [Some(" a".into()), Some("д".into()), None, Some(" д".into())]);
        let remaining = |codes: &[&str], counts: Option<&[u64]>| {
            let pass = PruneVocabulary { languages: codes.iter().map(|code| (*code).to_owned()).collect(), ..PruneVocabulary::default() };
            pass.remaining(&file, 8, file.required().into_iter().collect(), counts).unwrap()
        };
        assert_eq!(remaining(&["en"], None), [0, 1, 2, 3, 4]);
        // Parts of tokens remain with them.
        assert_eq!(remaining(&["ru"], None), [0, 1, 2, 3, 5, 6, 7]);
        // Tokens of the texts and those of the languages.
        assert_eq!(remaining(&["en"], Some(&[0, 0, 0, 0, 0, 1, 0, 0])), [0, 1, 2, 3, 4, 5]);
    }
}
