//! Log files of training steps, written during training for other programs to read.

mod csv;
mod tensorboard;

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::losses::Losses;
use super::records::{Evaluation, StepRecord};
use crate::error::{Error, Result};

/// Format of a log file of training steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// CSV table, which is always written
    Csv,
    /// TensorBoard event file
    Tensorboard,
}

impl LogFormat {
    /// File extension.
    pub fn extension(self) -> &'static str {
        match self {
            LogFormat::Csv => "csv",
            LogFormat::Tensorboard => "tfevents",
        }
    }

    /// File name during training.
    pub fn file(self) -> String {
        format!("training.{}", self.extension())
    }

    /// The formats to write: CSV, and the requested ones.
    pub fn with_table(requested: &[LogFormat]) -> Vec<LogFormat> {
        let others = requested.iter().copied().filter(|format| *format != LogFormat::Csv);
        let mut formats: Vec<LogFormat> = [LogFormat::Csv].into_iter().chain(others).collect();
        formats.dedup();
        formats
    }
}

/// Writer of a log file.
trait Log {
    /// Adds a step.
    fn add(&mut self, row: &StepRecord) -> Result<()>;

    /// Adds the score of an evaluation.
    fn score(&mut self, _: &Evaluation) -> Result<()> {
        Ok(())
    }
}

/// The log files of one training.
pub struct Logs(Vec<Box<dyn Log>>);

impl Logs {
    /// Creates the log files in a folder; after a resume at `step` > 0, keeps their entries up to that
    /// step. `pass` is the prefix of the TensorBoard tags.
    pub fn open(folder: &Path, requested: &[LogFormat], pass: &str, losses: &Losses, step: u64) -> Result<Logs> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let open = |format: LogFormat| -> Result<Box<dyn Log>> {
            let path = folder.join(format.file());
            Ok(match format {
                LogFormat::Csv => Box::new(csv::Table::open(path, &names(losses), step)?),
                LogFormat::Tensorboard => Box::new(tensorboard::Events::open(path, pass, step)?),
            })
        };
        LogFormat::with_table(requested).into_iter().map(open).collect::<Result<_>>().map(Logs)
    }

    /// Adds a step.
    pub fn add(&mut self, row: &StepRecord) -> Result<()> {
        self.0.iter_mut().try_for_each(|log| log.add(row))
    }

    /// Adds the score of an evaluation.
    pub fn score(&mut self, evaluation: &Evaluation) -> Result<()> {
        self.0.iter_mut().try_for_each(|log| log.score(evaluation))
    }
}

/// The names of the losses in the recipe, in its order.
fn names(losses: &Losses) -> Vec<String> {
    let named = serde_json::to_value(losses).ok().and_then(|losses| losses.as_object().map(|losses| losses.keys().cloned().collect()));
    named.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    pub(super) fn row(step: u64, losses: &[(&str, f64)]) -> StepRecord {
        StepRecord {
            step,
            epoch: 0,
            loss: 1.5,
            losses: losses.iter().map(|(name, loss)| ((*name).to_owned(), *loss)).collect::<BTreeMap<_, _>>(),
            learning_rate: 0.25,
            gradient_norm: (step != 2).then_some(3.0),
            samples_per_second: 8.0,
            waited: 0.125,
        }
    }

    #[test]
    fn a_name_and_a_list_are_accepted() {
        #[derive(Deserialize)]
        struct Options {
            #[serde(deserialize_with = "crate::train::one_or_several")]
            logs: Vec<LogFormat>,
        }
        let read = |text: &str| serde_saphyr::from_str::<Options>(text).map(|options| LogFormat::with_table(&options.logs)).map_err(|e| e.to_string());
        assert_eq!(read("logs: csv").unwrap(), [LogFormat::Csv]);
        for both in ["logs: tensorboard", "logs: [csv, tensorboard]", "logs: [tensorboard, tensorboard]"] {
            assert_eq!(read(both).unwrap(), [LogFormat::Csv, LogFormat::Tensorboard], "{both}");
        }
        assert!(read("logs: wandb").unwrap_err().contains("tensorboard"), "{:?}", read("logs: wandb"));
    }
}
