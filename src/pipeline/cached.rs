//! Runs that are not repeated as long as nothing has changed.

use std::fs;
use std::path::Path;

use super::{Pipeline, verify};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::report::{Report, Tool};
use crate::store::ContentKey;
use crate::work::Work;

/// What [`Pipeline::run_cached`] found or made.
#[derive(Debug, Clone, PartialEq)]
pub struct Cached {
    /// The report of the run that wrote the folder.
    pub report: Report,
    /// Whether the folder was there already.
    pub reused: bool,
}

impl Pipeline {
    /// Runs everything unless `output` holds the result of the same run: the same passes, formats and seed of the same
    /// version of this crate, over the same contents of the [inputs](Model::inputs), and files that are as they were written.
    /// What `output` holds otherwise is replaced.
    ///
    /// # Errors
    /// Anything that goes wrong, or a pass or a measurement that looks at other files than the model's.
    pub fn run_cached(&self, model: Model, output: impl AsRef<Path>) -> Result<Cached> {
        let output = output.as_ref();
        let (pipeline, _) = self.writing(output)?;
        // What options leave to the data decides what is read.
        pipeline.settled(&model)?.0.require_model_alone()?;
        let key = self.key(&model)?;
        if let Some(report) = self.found(output, &key)? {
            return Ok(Cached { report, reused: true });
        }
        let mut pipeline = self.clone();
        pipeline.force = true;
        pipeline.start.attached.insert(Model::KEY.into(), key.into_bytes().into());
        let report = pipeline.run(model, output)?;
        Ok(Cached { report, reused: false })
    }

    /// The report of a whole folder that was made under this key.
    fn found(&self, output: &Path, key: &str) -> Result<Option<Report>> {
        if !fs::read(output.join(Model::KEY)).is_ok_and(|found| found == key.as_bytes()) {
            return Ok(None);
        }
        match verify(output, &self.work().quiet()) {
            Ok(checks) if checks.iter().all(|check| check.ok) => Report::open(output).map(Some),
            Err(Error::Cancelled) => Err(Error::Cancelled),
            _ => Ok(None),
        }
    }

    /// Names everything that decides what a run writes.
    fn key(&self, model: &Model) -> Result<String> {
        let mut recipe = self.recipe(model);
        // Where the model lies changes nothing.
        recipe.model.clear();
        let mut key = self.input_key(model, &self.work())?;
        key.line(&serde_json::to_string(&recipe).unwrap_or_default());
        Ok(format!("{}\n", key.name()))
    }

    /// The common part of all keys: this version of the tool, and the contents of the model's files, wherever they are.
    pub(super) fn input_key<'w>(&self, model: &Model, work: &Work<'w>) -> Result<ContentKey<'w>> {
        let mut key = ContentKey::new(work);
        let tool = Tool::default();
        key.line(&format!("{} {:?}", tool.version, tool.commit));
        key.files(model.inputs(), &model.path)?;
        Ok(key)
    }

    fn require_model_alone(&self) -> Result<()> {
        let running = self.runs().next().map(|(name, _)| name);
        let running = running.or(self.running.evaluates().then_some("evaluation"));
        match running {
            None => Ok(()),
            Some(name) => Err(Error::option(name, "reads data besides the model, and a cached run would not notice when that changes")),
        }
    }
}
