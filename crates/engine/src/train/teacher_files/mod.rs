//! Logits of a teacher from files that other programs have written: token ids of texts, and the largest
//! log-probabilities of each token. They are copied into the cache of teacher logits before the first step.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod arrays;
mod json_lines;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_128;

use super::cache::{self, Cache, Entries};
use super::losses::Logits;
use crate::data::{Batch, DataSet, References, SequenceRole};
use crate::error::{Error, Result};
use crate::exec::transfer;
use crate::work::Work;

/// Number of records that are compared with a sample for an error message.
const COMPARED: usize = 10_000;
/// Number of token ids in an error message.
const SHOWN: usize = 8;

/// Tokens and their log-probabilities.
type Distribution = Vec<(u32, f32)>;

/// A text and the distributions of its tokens.
#[derive(Debug, Clone, Default, PartialEq)]
struct Record {
    tokens: Vec<i64>,
    /// For each token, the distribution from which it follows the previous ones; `None` if it is not stored.
    rows: Vec<Option<Distribution>>,
}

/// A file with records.
trait Source {
    /// Calls `each` with the location and the token ids of each record.
    fn for_each(&self, each: &mut dyn FnMut(u64, &[i64]) -> Result<()>) -> Result<()>;
    /// Reads a record.
    fn read(&self, location: u64) -> Result<Record>;
    /// Names a record in messages.
    fn describe(&self, location: u64) -> String;
}

/// Files of records, indexed by their tokens.
pub struct TeacherFiles {
    files: Vec<Box<dyn Source>>,
    /// File and location of the record with these tokens.
    records: HashMap<u128, (usize, u64)>,
}

fn hash(tokens: &[i64]) -> u128 {
    let mut hasher = XxHash3_128::new();
    tokens.iter().for_each(|token| hasher.write(&token.to_le_bytes()));
    hasher.finish_128()
}

fn wrong(reason: String) -> Error {
    Error::option("distill: teacher_logits", reason)
}

impl TeacherFiles {
    /// Opens files and reads the token ids of all records.
    fn open(paths: &[PathBuf]) -> Result<TeacherFiles> {
        let (mut files, mut records): (Vec<Box<dyn Source>>, _) = (Vec::new(), HashMap::new());
        for path in paths {
            let source = open(path)?;
            source.for_each(&mut |location, tokens| {
                records.entry(hash(tokens)).or_insert((files.len(), location));
                Ok(())
            })?;
            files.push(source);
        }
        Ok(TeacherFiles { files, records })
    }

    fn read(&self, (file, location): (usize, u64)) -> Result<Option<(Record, String)>> {
        let Some(source) = self.files.get(file) else { return Ok(None) };
        Ok(Some((source.read(location)?, source.describe(location))))
    }

    /// Adds the logits of all samples from files to a cache. Returns the number of samples that it did not
    /// contain; without any, the files are not opened.
    ///
    /// # Errors
    /// A sample has no record, or its record lacks the distribution of a token; the error names the sample
    /// and the position.
    pub fn fill(paths: &[PathBuf], cache: &mut Cache, losses: &Logits, data: &DataSet, work: &Work) -> Result<usize> {
        let (mut number, mut added, mut opened) = (0usize, 0usize, None);
        data.for_each_batch("Reading logits", work, |batch| {
            let positions = losses.positions(&batch)?;
            let keys = cache::keys(&batch, &positions, losses.classes)?;
            for ((key, positions), (tokens, real)) in keys.iter().zip(&positions).zip(texts(&batch)?) {
                number = number.saturating_add(1);
                if cache.contains(*key) {
                    continue;
                }
                let files = match &opened {
                    Some(files) => files,
                    None => &*opened.insert(TeacherFiles::open(paths)?),
                };
                let Some(place) = files.records.get(&hash(&tokens)) else { return Err(files.mismatch(number, &tokens)?) };
                let Some((record, name)) = files.read(*place)?.filter(|(record, _)| record.tokens == tokens) else {
                    return Err(files.mismatch(number, &tokens)?);
                };
                let mut entries = Entries::default();
                for position in positions {
                    let next = real.binary_search(position).ok().map(|at| at.saturating_add(1));
                    let row = next.and_then(|next| record.rows.get(next)?.as_ref());
                    let at = next.unwrap_or_default();
                    let missing = || wrong(format!("{name}: has no probabilities of the token at position {at} of sample {number}"));
                    let invalid = |reason: String| wrong(format!("{name}: the probabilities of the token at position {at} of sample {number} {reason}"));
                    let row = row.ok_or_else(missing)?;
                    if let Some((id, _)) = row.iter().find(|(id, _)| usize::try_from(*id).is_ok_and(|id| id >= losses.classes)) {
                        return Err(invalid(format!("have the token {id}, but there are logits of {} tokens", losses.classes)));
                    }
                    cache.add_row(&mut entries, row).map_err(invalid)?;
                }
                cache.put(&[*key], &[positions.len()], &entries)?;
                added = added.saturating_add(1);
            }
            Ok(())
        })?;
        Ok(added)
    }

    /// An error that names the first difference of a sample from the record that is most like it.
    fn mismatch(&self, number: usize, tokens: &[i64]) -> Result<Error> {
        let mut places: Vec<(usize, u64)> = self.records.values().copied().collect();
        places.sort_unstable();
        let mut best: Option<((usize, bool), Record, String)> = None;
        for place in places.into_iter().take(COMPARED) {
            let Some((record, name)) = self.read(place)? else { continue };
            let common = tokens.iter().zip(&record.tokens).take_while(|(a, b)| a == b).count();
            let likeness = (common, record.tokens.len() == tokens.len());
            if best.as_ref().is_none_or(|(most, ..)| likeness > *most) {
                best = Some((likeness, record, name));
            }
        }
        let shown: Vec<String> = tokens.iter().take(SHOWN).map(i64::to_string).collect();
        let sample = format!("sample {number} (tokens {}{})", shown.join(" "), if tokens.len() > SHOWN { " …" } else { "" });
        let describe = |token: Option<&i64>| token.map_or("the end".to_owned(), |token| format!("the token {token}"));
        Ok(wrong(match best {
            Some(((at, _), record, name)) => format!(
                "no record has the token ids of {sample}: the most similar one, {name}, has {} at position {at}, the sample {}; the files must contain all samples, with the same tokenizer and `max_length`",
                describe(record.tokens.get(at)),
                describe(tokens.get(at))
            ),
            None => format!("the files contain no records, but {sample} needs one"),
        }))
    }
}

fn open(path: &Path) -> Result<Box<dyn Source>> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => Ok(Box::new(arrays::Arrays::open(path)?)),
        Some("jsonl") => Ok(Box::new(json_lines::JsonLines::open(path)?)),
        _ => Err(wrong(format!("{}: must be a .safetensors or .jsonl file", path.display()))),
    }
}

/// The token ids of each sample without padding, and their positions. Fails if the samples are not texts of
/// which each token is predicted from the previous ones.
fn texts(batch: &Batch) -> Result<Vec<(Vec<i64>, Vec<u32>)>> {
    if !matches!(batch.references, References::Next(_) | References::Tokens(_)) || batch.output_role() != SequenceRole::Input {
        return Err(wrong("needs texts for a model that predicts the next token, with `task: language-modelling`".into()));
    }
    let failed = |e| Error::candle("token ids", e);
    let Some(ids) = batch.tokens(SequenceRole::Input) else { return Err(wrong("needs samples with `input_ids`".into())) };
    let width = ids.dims().last().copied().unwrap_or(0).max(1);
    let mask = batch.mask(SequenceRole::Input).map(transfer::read::<i64>).transpose().map_err(failed)?;
    let ids = transfer::read::<i64>(ids).map_err(failed)?;
    let mask = mask.unwrap_or_else(|| vec![1; ids.len()]);
    let rows = ids.chunks(width).zip(mask.chunks(width));
    let real = |(ids, mask): (&[i64], &[i64])| ids.iter().zip(mask).zip(0u32..).filter(|((_, real), _)| **real != 0).map(|((id, _), at)| (*id, at)).unzip();
    Ok(rows.map(real).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::data::{Data, Target};
    use crate::ir::{Element, Port};
    use crate::train::losses::{Divergence, LogitsSource, Soft};
    use crate::work::{Cancel, Silent};

    const LINES: &str = r#"{"prompt_token_ids": [5, 6, 7], "prompt_logprobs": [null, {"6": {"logprob": -0.5}, "9": {"logprob": -1.5}}, {"7": -0.25}]}
{"prompt_token_ids": [5, 8], "prompt_logprobs": [null, {"8": -2.0, "1": -0.5, "2": -3.0}]}
"#;

    /// Fills a cache for two texts, of which the first has three tokens and the second two.
    fn fill(folder: &Path, file: &str) -> Result<Entries> {
        let cpu = candle_core::Device::Cpu;
        let tensor = |rows: [[i64; 3]; 2]| candle_core::Tensor::new(&rows, &cpu).unwrap();
        let arrays = [("input_ids", tensor([[5, 6, 7], [5, 8, 0]])), ("attention_mask", tensor([[1, 1, 1], [1, 1, 0]]))];
        let path = folder.join("texts.safetensors");
        candle_core::safetensors::save(&arrays.map(|(name, tensor)| (name.to_owned(), tensor)).into(), &path).unwrap();
        let port = |name: &str| Port { name: name.into(), element: Element::Int, shape: vec![None, None], number: None };
        let logits = Port { name: "logits".into(), element: Element::Float, shape: vec![None, None, Some(12)], number: None };
        let (inputs, outputs) = ([port("input_ids"), port("attention_mask")], [logits]);
        let (synthesized, config) = (crate::model::SynthesizedFiles::new(), serde_json::Map::new());
        let target = Target { inputs: &inputs, outputs: &outputs, ..Target::new(folder, &synthesized, &config) };
        let options = Data { arrays: Some(path), task: Some(crate::data::Task::LanguageModelling), ..Data::default() };
        let data = DataSet::open(&options, target)?;
        let soft = Some(Soft { weight: 1.0, temperature: 1.0, divergence: Divergence::Forward });
        let source = LogitsSource::Value("logits".into());
        let losses = Logits { soft, hard: None, student: source.clone(), teacher: Some(source), classes: 12, tokens: Some(SequenceRole::Input) };
        let cancel = Cancel::default();
        let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
        let mut cache = Cache::open(&folder.join("cache"), "abc", 2, 1.0)?;
        assert_eq!(TeacherFiles::fill(&[folder.join(file)], &mut cache, &losses, &data, &work)?, 2);
        // A full cache needs no files.
        assert_eq!(TeacherFiles::fill(&[folder.join("missing.jsonl")], &mut cache, &losses, &data, &work)?, 0);
        let batch = data.first()?;
        cache.get(&cache::keys(&batch, &losses.positions(&batch)?, 12)?)
    }

    /// Differences from the largest log-probability, and the logarithm of the rest relative to it.
    fn require(entries: &Entries) {
        let logits: Vec<(u32, f32)> = entries.logits.iter().map(|(column, value)| (*column, value.to_f32())).collect();
        assert_eq!(logits, [(6, 0.0), (9, -1.0), (7, 0.0), (7, 0.0), (1, 0.0), (8, -1.5)]);
        let rest = |listed: &[f64], highest: f64| (1.0 - listed.iter().map(|p: &f64| p.exp()).sum::<f64>()).ln() - highest;
        let expected = [rest(&[-0.5, -1.5], -0.5), rest(&[-0.25], -0.25), rest(&[-0.5, -2.0], -0.5)];
        for (found, expected) in entries.rest.iter().zip(expected) {
            assert!((f64::from(found.to_f32()) - expected).abs() < 5e-3, "{found} {expected}");
        }
    }

    #[test]
    fn lines_and_arrays_have_the_same_logits() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.jsonl"), LINES).unwrap();
        require(&fill(folder.path(), "a.jsonl").unwrap());
        fs::remove_dir_all(folder.path().join("cache")).unwrap();
        let cpu = candle_core::Device::Cpu;
        let tensor = |values: &[i64]| candle_core::Tensor::new(values, &cpu).unwrap();
        let top = [[-1i64, -1, -1], [6, 9, -1], [7, -1, -1], [-1, -1, -1], [8, 1, 2]];
        let values = [[0f32; 3], [-0.5, -1.5, 0.0], [-0.25, 0.0, 0.0], [0.0; 3], [-2.0, -0.5, -3.0]];
        let arrays = [
            ("lengths".to_owned(), tensor(&[3, 2])),
            ("tokens".to_owned(), tensor(&[5, 6, 7, 5, 8])),
            ("top_tokens".to_owned(), candle_core::Tensor::new(&top, &cpu).unwrap()),
            ("top_logprobs".to_owned(), candle_core::Tensor::new(&values, &cpu).unwrap()),
        ];
        candle_core::safetensors::save(&arrays.into(), folder.path().join("a.safetensors")).unwrap();
        require(&fill(folder.path(), "a.safetensors").unwrap());
    }

    #[test]
    fn other_texts_are_refused_by_sample_and_position() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |text: &str| {
            fs::write(folder.path().join("a.jsonl"), text).unwrap();
            let _ = fs::remove_dir_all(folder.path().join("cache"));
            fill(folder.path(), "a.jsonl").map(drop).unwrap_err().to_string()
        };
        let error = refused(&LINES.replace("[5, 8]", "[5, 9]"));
        assert!(error.contains("sample 2 (tokens 5 8)") && error.contains("line 2, has the token 9 at position 1, the sample the token 8"), "{error}");
        let error = refused(&LINES.replace(r#"{"7": -0.25}"#, "null"));
        assert!(error.contains("line 1: has no probabilities of the token at position 2 of sample 1"), "{error}");
        let error = refused(&LINES.replace("-0.25", "-0.25, \"3\": -0.1"));
        assert!(error.contains("position 2 of sample 1 sum to 1.68"), "{error}");
        let error = refused(&LINES.replace("\"9\"", "\"12\""));
        assert!(error.contains("position 1 of sample 1 have the token 12, but there are logits of 12 tokens"), "{error}");
        assert!(refused("").contains("the files contain no records"));
    }
}
