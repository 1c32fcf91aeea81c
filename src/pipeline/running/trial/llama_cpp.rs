//! Trials in llama.cpp, by its program `llama-perplexity`.
//!
//! The program tokenizes a text, and stores the tokens and the log-probabilities of the second half of each
//! window: `_logits_`, the window, the vocabulary and the number of windows, all tokens, and for each
//! predicted token a step, the least log-probability, and the number of steps of each token of the
//! vocabulary.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::Path;

use candle_core::{Device, Tensor};

use super::log_probabilities::{LogProbability, relative_error};
use super::reference::{Arithmetic, outputs};
use super::scratch::Scratch;
use super::{Scope, Status, Trial, gguf_twin};
use crate::contract;
use crate::data::{Batch, References};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::program;
use crate::store::gguf::{Outline, Value};
use crate::work::{Event, Work};

/// The program.
const PROGRAM: &str = "llama-perplexity";
/// Tokens of a window.
const WINDOW: usize = 32;
/// Number of windows that are run; the program requires at least two.
const WINDOWS: usize = 2;
/// Pieces of the text, which are merged to fewer tokens.
const PIECES: usize = 8 * WINDOW * WINDOWS;
/// Start of a stored file, and size of its header.
const MAGIC: &[u8; 8] = b"_logits_";
const HEADER: usize = 20;
/// 16-bit numbers before those of the tokens: step and least value, each a 32-bit float.
const LIMITS: usize = 4;
/// Log-probabilities that are less than the largest one minus this range are stored as the limit.
const RANGE: f64 = 16.0;
/// Markers of a space at the beginning of a token.
const SPACES: [char; 2] = ['\u{120}', '\u{2581}'];

/// Largest relative error of files that agree. llama.cpp rounds activations to 8 bits in products with
/// quantized weights, and to 16 bits in products with such floats.
fn tolerance(arithmetic: Arithmetic) -> f64 {
    match arithmetic {
        Arithmetic { is_quantized: true, .. } => 0.1,
        // With BF16, inputs of products have eight bits: up to 1.4e-2 were measured for small models.
        Arithmetic { is_half: true, .. } => 3e-2,
        _ => 1e-3,
    }
}

/// Loads and runs a GGUF file, or its twin.
pub(super) fn run(path: &Path, scope: Scope, work: &Work) -> Result<Trial> {
    let Some(file) = contract::llama_cpp::find(path)? else { return Ok(Trial::not_run("the output has no .gguf file")) };
    if let Err(e) = program::finish(OsStr::new(PROGRAM), ["--version"]) {
        let reason = match e.kind() {
            ErrorKind::NotFound => format!("`{PROGRAM}` is not on the PATH"),
            _ => format!("`{PROGRAM}` cannot be started: {e}"),
        };
        return Ok(Trial::new(Status::NotInstalled, reason));
    }
    let scratch = Scratch::new()?;
    let candidate = match gguf_twin::candidate(&file, scope, &scratch, work)? {
        Ok(candidate) => candidate,
        Err(trial) => return Ok(trial),
    };
    let outline = Outline::open(&candidate.path)?;
    let Some(text) = text(&outline) else { return Ok(Trial::not_run("the vocabulary has no words of letters")) };
    let trial = match stored(&candidate.path, &text, &scratch, work)? {
        Err(error) => Trial::new(Status::Failed, error),
        Ok(bytes) => match Windows::parse(&bytes, &outline) {
            None => Trial::new(Status::Failed, format!("`{PROGRAM}` has stored its results in an unknown form")),
            Some(windows) => compare(&candidate.path, &windows, work)?,
        },
    };
    Ok(trial.with_scope(&candidate.scope))
}

/// A text of words of the vocabulary; `None` if there are none.
fn text(outline: &Outline) -> Option<String> {
    let Some(Value::Texts(tokens)) = outline.values.get("tokenizer.ggml.tokens") else { return None };
    let has_spaces = tokens.iter().any(|token| token.starts_with(SPACES));
    let words = tokens.iter().map(|token| token.trim_start_matches(SPACES));
    let words: Vec<&str> = words.filter(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphabetic())).collect();
    // A stride without a common factor with most sizes, so that all parts of the vocabulary occur.
    let word = |at: usize| words.get(at.saturating_mul(7919).checked_rem(words.len())?).copied();
    let chosen: Vec<&str> = (0..PIECES).filter_map(word).collect();
    (!chosen.is_empty()).then(|| chosen.join(if has_spaces { " " } else { "" }))
}

/// The file that the program stores for a text. The error is its message.
fn stored(model: &Path, text: &str, scratch: &Scratch, work: &Work) -> Result<std::result::Result<Vec<u8>, String>> {
    let [input, output] = ["text", "log-probabilities"].map(|name| scratch.path().join(name));
    std::fs::write(&input, text).map_err(Error::io("write", &input))?;
    work.progress.on(Event::Message("running the output in llama.cpp"));
    let [window, windows, threads] = [WINDOW, WINDOWS, work.threads].map(|number| number.to_string());
    let options =
        ["-c", window.as_str(), "-b", &window, "--chunks", &windows, "-t", &threads, "-ctk", "f32", "-ctv", "f32", "-ngl", "0", "-fa", "off", "--no-repack"]
            .map(OsString::from);
    let files: [OsString; 6] = ["-m".into(), model.into(), "-f".into(), input.into(), "--kl-divergence-base".into(), output.clone().into()];
    let finished = program::finish(OsStr::new(PROGRAM), files.into_iter().chain(options)).map_err(Error::io("start", Path::new(PROGRAM)))?;
    work.cancel.check()?;
    match std::fs::read(&output) {
        Ok(bytes) if finished.succeeded => Ok(Ok(bytes)),
        _ => {
            let lines = || finished.lines.iter().map(|line| line.trim()).filter(|line| !line.is_empty());
            let message = lines().find(|line| line.contains("error")).or_else(|| lines().next_back());
            Ok(Err(message.unwrap_or("it ended without a message").to_owned()))
        }
    }
}

/// Tokens, and log-probabilities in the second half of each window.
struct Windows {
    tokens: Vec<i64>,
    found: Vec<LogProbability>,
}

impl Windows {
    /// `None` if the bytes are not a file of this form.
    fn parse(bytes: &[u8], outline: &Outline) -> Option<Windows> {
        let number = |at: usize| -> Option<usize> {
            let bytes = bytes.get(at..at.checked_add(4)?)?;
            usize::try_from(i32::from_le_bytes(bytes.try_into().ok()?)).ok()
        };
        let (window, vocabulary, count) = (number(8)?, number(12)?, number(16)?);
        if !bytes.starts_with(MAGIC) || window != WINDOW || vocabulary == 0 || !(1..=WINDOWS).contains(&count) {
            return None;
        }
        let all = count.checked_mul(WINDOW)?;
        let ids = bytes.get(HEADER..HEADER.checked_add(all.checked_mul(4)?)?)?;
        let mut tokens: Vec<i64> = ids.chunks_exact(4).filter_map(|id| Some(i64::from(i32::from_le_bytes(id.try_into().ok()?)))).collect();
        // A begin-of-text token before the text replaces the first token of every window.
        if let Some(Value::Unsigned(begin)) = outline.values.get("tokenizer.ggml.bos_token_id")
            && tokens.first() == i64::try_from(*begin).ok().as_ref()
        {
            let begin = tokens.first().copied()?;
            tokens.iter_mut().step_by(WINDOW).for_each(|token| *token = begin);
        }
        let first = WINDOW / 2;
        let predicted = WINDOW.checked_sub(1)?.checked_sub(first)?;
        let row_bytes = LIMITS.checked_add(vocabulary.checked_next_multiple_of(2)?)?.checked_mul(2)?;
        let rows = bytes.get(HEADER.checked_add(all.checked_mul(4)?)?..)?;
        let mut found = Vec::new();
        for index in 0..count.checked_mul(predicted)? {
            let row = rows.get(index.checked_mul(row_bytes)?..index.checked_add(1)?.checked_mul(row_bytes)?)?;
            let (limits, steps) = row.split_at_checked(LIMITS.checked_mul(2)?)?;
            let (step, least) = limits.split_at_checked(4)?;
            let [step, least] = [step, least].map(|bytes| bytes.try_into().ok().map(f32::from_le_bytes).map(f64::from));
            let (step, least) = (step?, least?);
            let (sample, offset) = (index.checked_div(predicted)?, index.checked_rem(predicted)?);
            let at = sample.checked_mul(WINDOW)?.checked_add(first)?.checked_add(offset)?;
            for (token, value) in steps.chunks_exact(2).take(vocabulary).enumerate() {
                let value = f64::from(u16::from_le_bytes(value.try_into().ok()?)) * step + least;
                found.push(LogProbability { row: at, token, value });
            }
        }
        Some(Windows { tokens, found })
    }
}

/// Compares the stored log-probabilities with those of the built-in executor.
fn compare(path: &Path, windows: &Windows, work: &Work) -> Result<Trial> {
    let computed = || -> Result<(f64, Arithmetic)> {
        let failed = |e: candle_core::Error| Error::run("tokens", e, "");
        let samples = windows.tokens.len() / WINDOW;
        let ids = Tensor::from_vec(windows.tokens.clone(), (samples, WINDOW), &Device::Cpu).map_err(failed)?;
        let inputs = [("attention_mask".to_owned(), ids.ones_like().map_err(failed)?), ("input_ids".to_owned(), ids)].into();
        let model = Model::open(path)?;
        let arithmetic = Arithmetic::from_model(&model)?;
        let outputs = outputs(model, &Batch { inputs, references: References::None, samples }, work)?;
        let logits = outputs.get("logits").ok_or_else(|| Error::run("the model", "has no logits", ""))?;
        Ok((relative_error(logits, &windows.found, Some(RANGE))?, arithmetic))
    };
    match computed() {
        Err(Error::Cancelled) => Err(Error::Cancelled),
        Err(reason) => Ok(Trial::new(Status::Runs, format!("not compared with the built-in executor: {reason}"))),
        Ok((error, arithmetic)) => Ok(Trial::compared(error, tolerance(arithmetic))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of two windows and three tokens, as the program writes it.
    #[test]
    fn stored_log_probabilities_are_parsed() {
        let (vocabulary, count, predicted) = (3, 2, WINDOW / 2 - 1);
        let mut bytes = MAGIC.to_vec();
        for number in [WINDOW, vocabulary, count] {
            bytes.extend((number as i32).to_le_bytes());
        }
        (0..count * WINDOW).for_each(|at| bytes.extend((at as i32 % 3).to_le_bytes()));
        for row in 0..count * predicted {
            bytes.extend(0.5f32.to_le_bytes());
            bytes.extend((-(row as f32)).to_le_bytes());
            (0..vocabulary as u16 + 1).for_each(|steps| bytes.extend(steps.to_le_bytes()));
        }
        let outline = |begin: u64| Outline { values: [("tokenizer.ggml.bos_token_id".to_owned(), Value::Unsigned(begin))].into(), ..Outline::default() };
        let windows = Windows::parse(&bytes, &outline(2)).unwrap();
        assert_eq!((windows.tokens.len(), windows.found.len()), (2 * WINDOW, 2 * predicted * vocabulary));
        assert_eq!(windows.tokens[WINDOW], WINDOW as i64 % 3);
        let second = &windows.found[predicted * vocabulary + 2];
        assert_eq!((second.row, second.token, second.value), (WINDOW + WINDOW / 2, 2, 1.0 - predicted as f64));
        // The text starts with the begin-of-text token.
        assert_eq!(Windows::parse(&bytes, &outline(0)).unwrap().tokens[WINDOW], 0);
        assert!(Windows::parse(&bytes[..bytes.len() - 1], &outline(0)).is_none());
        assert!(Windows::parse(b"_logits_", &outline(0)).is_none());
        // A vocabulary without tokens.
        bytes[12..16].fill(0);
        assert!(Windows::parse(&bytes, &outline(0)).is_none());
    }

    #[test]
    fn texts_consist_of_words_of_the_vocabulary() {
        let outline = |tokens: &[&str]| {
            let tokens = tokens.iter().map(|token| (*token).to_owned()).collect();
            Outline { values: [("tokenizer.ggml.tokens".to_owned(), Value::Texts(tokens))].into(), ..Outline::default() }
        };
        let words = text(&outline(&["<s>", "\u{2581}one", "two", "3"])).unwrap();
        assert!(words.split(' ').all(|word| ["one", "two"].contains(&word)) && words.contains("one two"), "{words}");
        assert!(!text(&outline(&["a", "b"])).unwrap().contains(' '));
        assert_eq!(text(&outline(&["<s>", "1"])), None);
    }
}
