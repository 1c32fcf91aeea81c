//! Runs that are skipped if the output is up to date.

use std::fs;
use std::path::Path;

use super::{Pipeline, verify};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::report::{Report, Tool};
use crate::store::ContentKey;
use crate::work::Work;

/// Result of [`Pipeline::run_cached`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Cached {
    /// The report of the run that wrote the folder.
    pub report: Report,
    /// Whether the folder existed and was up to date.
    pub reused: bool,
}

impl Pipeline {
    /// Runs the pipeline unless `output` contains an undamaged result of the same run: the same passes,
    /// formats and seed, the same version of this crate, and the same contents of the
    /// [inputs](Pipeline::inputs). Another result in `output` is replaced.
    ///
    /// # Errors
    /// As [`run`](Pipeline::run).
    pub fn run_cached(&self, model: Model, output: impl AsRef<Path>) -> Result<Cached> {
        let output = output.as_ref();
        let (pipeline, _) = self.for_output(output)?;
        // Defaults that depend on the data determine whether data is read, and are part of the key.
        let key = pipeline.resolved(&model)?.0.key(&model)?;
        if let Some(report) = self.find_report(output, &key)? {
            return Ok(Cached { report, reused: true });
        }
        let mut pipeline = self.clone();
        pipeline.force = true;
        pipeline.start.attached.insert(Model::KEY.into(), key.into_bytes().into());
        let report = pipeline.run(model, output)?;
        Ok(Cached { report, reused: false })
    }

    /// The report of an undamaged output folder that was written under this key.
    fn find_report(&self, output: &Path, key: &str) -> Result<Option<Report>> {
        if !fs::read(output.join(Model::KEY)).is_ok_and(|found| found == key.as_bytes()) {
            return Ok(None);
        }
        match verify(output, &self.work().quiet()) {
            Ok(checks) if checks.iter().all(|check| check.ok) => Report::open(output).map(Some),
            Err(Error::Cancelled) => Err(Error::Cancelled),
            _ => Ok(None),
        }
    }

    /// Hash of everything that determines the output of a run.
    fn key(&self, model: &Model) -> Result<String> {
        let mut recipe = self.recipe(model);
        // The location of the model does not affect the output.
        recipe.model.clear();
        let mut key = self.input_key(model, &self.work())?;
        let mut read = self.steps.iter().flat_map(|step| step.pass().reads());
        read.try_for_each(|path| key.files([&path], path.parent().unwrap_or(&path)))?;
        self.running.add_data(&mut key, &self.work())?;
        key.line(&serde_json::to_string(&recipe).unwrap_or_default());
        Ok(format!("{}\n", key.name()))
    }

    /// The common prefix of all keys: the version of the tool and the contents of the model's files,
    /// independent of their location.
    pub(super) fn input_key<'w>(&self, model: &Model, work: &Work<'w>) -> Result<ContentKey<'w>> {
        let mut key = ContentKey::new(work);
        let tool = Tool::default();
        key.line(&format!("{} {:?}", tool.version, tool.commit));
        key.files(model.inputs(), &model.path)?;
        Ok(key)
    }
}
