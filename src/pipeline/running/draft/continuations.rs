//! Continuations that a model samples, as training data for its draft.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::data::{Data, IGNORED};
use crate::error::{Error, Result};
use crate::generation::{Generate, LanguageModel, Sampling};
use crate::model::Model;
use crate::output::CONTINUATIONS;
use crate::report::Tool;
use crate::store::ContentKey;
use crate::work::{MemoryLimit, Work};

/// File of the continuations that are complete: a key, then one continuation per line, as tokens.
const SAMPLED: &str = "sampled.jsonl";

/// Continuations to sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples {
    /// Number of continuations. If it exceeds the number of prompts, prompts are continued several times.
    pub count: usize,
    /// Maximum length of a continuation in tokens.
    pub tokens: usize,
    /// Sampling temperature.
    pub temperature: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Sampled continuations in the work folder of a run.
pub struct Continuations<'a> {
    /// The model.
    pub model: (&'a Model, &'a LanguageModel),
    /// The prompts.
    pub prompts: &'a [Vec<i64>],
    /// Number and options of the continuations.
    pub samples: &'a Samples,
    /// The work folder.
    pub folder: &'a Path,
}

impl Samples {
    /// Validates the options.
    ///
    /// # Errors
    /// A number is 0, or the temperature is not positive.
    pub fn check(&self) -> Result<()> {
        if self.count == 0 {
            return Err(Error::option("--samples", "is 0, but must be at least 1"));
        }
        // Continuations are always sampled, but the error of `Sampling` recommends greedy decoding.
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            let reason = format!("is {}, but must be greater than 0; a low one, such as 0.1, is close to greedy decoding", self.temperature);
            return Err(Error::option("--temperature", reason));
        }
        self.options().check()
    }

    fn options(&self) -> Generate {
        let sampling = Sampling { temperature: self.temperature, seed: self.seed, ..Sampling::default() };
        Generate { tokens: self.tokens, sampling: Some(sampling) }
    }

    /// The prompts to continue, sorted by length, so that batches consist of prompts of the same length.
    fn prompts(&self, prompts: &[Vec<i64>]) -> Vec<Vec<i64>> {
        let mut all: Vec<Vec<i64>> = prompts.iter().cycle().take(self.count).cloned().collect();
        all.sort_by_key(Vec::len);
        all
    }
}

impl Continuations<'_> {
    /// Samples the continuations that the work folder does not contain yet, and returns them as training
    /// data, in which only the continuations are predicted.
    ///
    /// # Errors
    /// The folder contains continuations of another model, other prompts or other options, or sampling fails.
    /// Complete continuations are kept if it is interrupted.
    pub fn sample(&self, device: &Device, memory: MemoryLimit, work: &Work) -> Result<Data> {
        let prompts = self.samples.prompts(self.prompts);
        let key = self.key(&prompts, work)?;
        let mut found = self.read(&key)?;
        found.truncate(prompts.len());
        let path = self.folder.join(SAMPLED);
        let mut file = File::create(&path).map_err(Error::io("create", &path))?;
        let mut write = |text: &str| file.write_all(text.as_bytes()).and_then(|()| file.flush()).map_err(Error::io("write", &path));
        write(&format!("{key}\n{}", lines(&found)))?;
        let done = found.len();
        self.model.1.generate_batches((prompts.as_slice(), done), &self.samples.options(), device, memory, work, &mut |continuations| {
            // Continuations of corrupted weights would be kept for a resumed run.
            if found.len() == done {
                self.model.0.check_contents(work)?;
            }
            write(&lines(&continuations))?;
            found.extend(continuations);
            Ok(())
        })?;
        // Files do not depend on time, so that the checkpoints of a training fit them after a resume.
        let path = crate::files::absolute(&self.folder.join(CONTINUATIONS));
        write_arrays(&prompts, &found, &path)?;
        Ok(Data { arrays: Some(path), ..Data::default() })
    }

    /// A hash of everything that determines the continuations.
    fn key(&self, prompts: &[Vec<i64>], work: &Work) -> Result<String> {
        let mut key = ContentKey::new(work);
        key.line(&Tool::default().version);
        key.files(self.model.0.inputs(), &self.model.0.path)?;
        key.line(&format!("{:?}", self.samples));
        prompts.iter().for_each(|prompt| key.line(&format!("{prompt:?}")));
        Ok(key.name())
    }

    /// The complete continuations of an interrupted run.
    fn read(&self, key: &str) -> Result<Vec<Vec<i64>>> {
        let Ok(text) = fs::read_to_string(self.folder.join(SAMPLED)) else { return Ok(Vec::new()) };
        // The last line may be incomplete.
        let Some((text, _)) = text.rsplit_once('\n') else { return Ok(Vec::new()) };
        let mut lines = text.lines();
        if lines.next() != Some(key) {
            return Err(Error::Output {
                path: self.folder.to_owned(),
                reason: "contains continuations of another model, other prompts or other options".into(),
                hint: "resume with the model, prompts and options that it was started with, or start over with `force` and without `resume`".into(),
            });
        }
        Ok(lines.map_while(|line| serde_json::from_str(line).ok()).collect())
    }
}

/// One line per continuation.
fn lines(continuations: &[Vec<i64>]) -> String {
    continuations.iter().map(|tokens| format!("{}\n", serde_json::json!(tokens))).collect()
}

/// Values of a row from a prompt and its continuation.
type Row<'r> = &'r dyn Fn(&[i64], &[i64]) -> Vec<i64>;

/// Writes prompts with their continuations as arrays for training, padded to the longest.
fn write_arrays(prompts: &[Vec<i64>], continuations: &[Vec<i64>], path: &Path) -> Result<()> {
    let texts = || prompts.iter().zip(continuations);
    let width = texts().map(|(prompt, tokens)| prompt.len() + tokens.len()).max().unwrap_or(0);
    let array = |padding: i64, row: Row| {
        let mut values = Vec::with_capacity(width * continuations.len());
        for (index, (prompt, tokens)) in texts().enumerate() {
            values.extend(row(prompt, tokens));
            values.resize((index + 1) * width, padding);
        }
        Tensor::from_vec(values, (continuations.len(), width), &Device::Cpu).map_err(|e| Error::candle("the continuations", e))
    };
    let labels = |prompt: &[i64], tokens: &[i64]| -> Vec<i64> { std::iter::repeat_n(IGNORED, prompt.len()).chain(tokens.iter().copied()).collect() };
    let arrays = [
        ("input_ids", array(0, &|prompt, tokens| [prompt, tokens].concat())?),
        ("attention_mask", array(0, &|prompt, tokens| vec![1; prompt.len() + tokens.len()])?),
        ("labels", array(IGNORED, &labels)?),
    ];
    Tensor::write_npz(&arrays, path).map_err(|e| Error::candle(path.display().to_string(), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_continued_several_times_if_there_are_few() {
        let samples = |count: usize| Samples { count, tokens: 4, temperature: 1.0, seed: 0 };
        let prompts = [vec![5, 6, 7], vec![8], vec![9, 9]];
        assert_eq!(samples(5).prompts(&prompts), [vec![8], vec![8], vec![9, 9], vec![5, 6, 7], vec![5, 6, 7]]);
        assert_eq!(samples(2).prompts(&prompts), [vec![8], vec![5, 6, 7]]);
        assert!(samples(0).check().unwrap_err().to_string().contains("--samples"));
        assert!(Samples { tokens: 0, ..samples(1) }.check().is_err());
        for temperature in [0.0, -1.0, f64::INFINITY, f64::NAN] {
            let error = Samples { temperature, ..samples(1) }.check().unwrap_err().to_string();
            assert!(error.contains("such as 0.1") && !error.contains("omit"), "{error}");
        }
    }
}
