//! Keys of the results and the checkpoints of passes: hashes of everything that determines them.

use std::collections::BTreeMap;

use crate::data::Data;
use crate::error::Result;
use crate::model::Model;
use crate::pass::Pass;
use crate::pipeline::Pipeline;
use crate::recipe::Recipe;
use crate::store::ContentKey;
use crate::work::Work;

/// Name of the data set that only rank 0 of a distributed training reads.
const EVALUATION: &str = "evaluation";

/// The keys of the passes of a run, in order.
pub(super) struct PassKeys<'p, 'w> {
    pipeline: &'p Pipeline,
    work: Work<'w>,
    key: ContentKey<'w>,
    /// Hashes of the data sets that were read, by name.
    data: BTreeMap<&'static str, String>,
    /// The evaluation data if the last pass reads them and its key does not contain them yet.
    evaluation: Option<&'p Data>,
}

impl Pipeline {
    /// The keys of all passes on a model. They contain the version of the program, and the model by the
    /// contents of its files, including tokenizer and chat template.
    pub(super) fn pass_keys<'w>(&self, model: &Model, work: &Work<'w>) -> Result<PassKeys<'_, 'w>> {
        let mut key = self.input_key(model, work)?;
        let Recipe { seed, sizes, .. } = self.recipe(model);
        key.line(&serde_json::to_string(&(seed, sizes)).unwrap_or_default());
        Ok(PassKeys { pipeline: self, work: work.quiet(), key, data: BTreeMap::new(), evaluation: None })
    }
}

impl PassKeys<'_, '_> {
    /// Adds the next pass: its options, the files that it reads, and its samples. Returns the key of its
    /// checkpoints, which does not contain the evaluation data, because not all processes of a training
    /// read them, nor the device, because a training can be resumed on another one.
    pub fn checkpoint(&mut self, pass: &dyn Pass) -> Result<String> {
        self.add_evaluation()?;
        self.key.line(&format!("{} {}", pass.name(), pass.options()));
        for path in pass.reads() {
            self.key.files([&path], path.parent().unwrap_or(&path))?;
        }
        for (name, data) in self.pipeline.running.read_by(pass) {
            match name {
                EVALUATION => self.evaluation = Some(data),
                _ => self.add_data(name, data)?,
            }
        }
        Ok(self.key.name())
    }

    /// The key of the model after the last pass.
    pub fn result(&mut self) -> Result<String> {
        self.add_evaluation()?;
        Ok(self.key.name())
    }

    fn add_evaluation(&mut self) -> Result<()> {
        self.evaluation.take().map_or(Ok(()), |data| self.add_data(EVALUATION, data))
    }

    fn add_data(&mut self, name: &'static str, data: &Data) -> Result<()> {
        if !self.data.contains_key(name) {
            self.data.insert(name, data.content(&self.work)?);
        }
        self.key.line(&format!("{name} {}", self.data[name]));
        Ok(())
    }
}
