//! Keys of the results and the checkpoints of passes: hashes of everything that determines them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use super::cached_results::ResultCache;
use crate::data::Data;
use crate::error::Result;
use crate::model::Model;
use crate::pass::{Pass, Step};
use crate::pipeline::Pipeline;
use crate::recipe::Recipe;
use crate::report::Environment;
use crate::run_state::RunState;
use crate::store::ContentKey;
use crate::work::Work;

/// Name of the data set that only rank 0 of several processes reads.
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
        for path in pass.reads() {
            self.key.files([&path], path.parent().unwrap_or(&path))?;
        }
        for (name, data) in self.pipeline.running.read_by(pass) {
            match name {
                EVALUATION => self.evaluation = Some(data),
                _ => self.add_data(name, data)?,
            }
        }
        let mut key = self.key.clone();
        key.line(&format!("{} {}", pass.name(), pass.fixed_options()));
        // The results of later passes depend on all options.
        self.key.line(&format!("{} {}", pass.name(), pass.options()));
        Ok(key.name())
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
        let hash = match self.data.entry(name) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(data.content(&self.work)?),
        };
        self.key.line(&format!("{name} {hash}"));
        Ok(())
    }
}

/// The cache of a run: the keys of its passes and the result from which it continues.
pub(super) struct RunCache<'p> {
    cache: &'p ResultCache,
    keys: Vec<String>,
    input: Model,
    /// Index of the last pass whose result was cached, and the model and the state of the run after it.
    pub found: Option<(usize, Model, RunState)>,
}

impl RunCache<'_> {
    /// Stores the result of a pass. A failure is reported as a note and does not end the run.
    pub fn put(&self, number: usize, took: Duration, after: &Model, run: &mut RunState, work: &Work) {
        if let Err(e) = self.cache.put(&self.keys[number], took, (&self.input, after), run, work) {
            let pass = run.history.last().map_or("a pass", |applied| applied.name);
            run.notes.push(format!("the result of {pass} could not be cached: {e}"));
        }
    }
}

impl Pipeline {
    /// Opens the cache, if one is configured. Distributed training does not use it, because processes
    /// could find different results.
    pub(super) fn result_cache(&self, model: &Model, work: &Work) -> Result<Option<RunCache<'_>>> {
        let Some((cache, reuse)) = &self.running.cache else { return Ok(None) };
        if self.rank()?.is_some_and(|rank| rank.size > 1) {
            return Ok(None);
        }
        let keys = self.result_keys(model, work)?;
        let mut found = None;
        if self.resume || *reuse {
            let runs = self.steps.iter().enumerate().rev().filter(|(_, step)| step.pass().runs_on().is_some());
            for (number, _) in runs {
                found = cache.get(&keys[number], model, work)?.map(|(after, run)| (number, after, run));
                if found.is_some() {
                    break;
                }
            }
        }
        if let Some((number, _, run)) = &mut found {
            (run.input, run.seed) = (Some(model.path.clone()), self.seed);
            let pass = self.steps[*number].pass().name();
            run.notes.push(format!("the result of {pass} was reused from an earlier run with the same input and passes: see `compress cache`"));
        }
        Ok(Some(RunCache { cache, keys, input: model.clone(), found }))
    }

    /// The keys of the model after each pass. They cover the whole recipe: a field that is added to one
    /// of the structs destructured here does not compile until this function hashes it or names it as
    /// irrelevant.
    fn result_keys(&self, model: &Model, work: &Work) -> Result<Vec<String>> {
        // Evaluation, export, model card, bill of materials and the runtimes to check do not affect the
        // passes. The keys of the passes contain everything else.
        let Recipe {
            model: _,
            seed: _,
            allow_nonfinite,
            sizes: _,
            measure: _,
            data: _,
            memory,
            passes,
            evaluate,
            export: _,
            card: _,
            sbom: _,
            loads: _,
            output: _,
            sweep: _,
        } = self.recipe(model);
        if model.onnx.is_some() {
            // Loads ONNX Runtime, which runs parts of such a model, so that its version is known below.
            let _ = crate::runtime::library();
        }
        let Environment { cpu, cores: _, memory_bytes: _, gpu, device, onnxruntime, onnxruntime_path: _, simd, int8 } = self.environment(false)?;
        let gpu = gpu.filter(|_| device.as_deref() != Some("cpu"));
        let settings = serde_json::to_string(&(allow_nonfinite, memory, evaluate)).unwrap_or_default();
        let hardware = format!("{device:?} {gpu:?} {cpu:?} {simd} {int8} {:?}", onnxruntime.filter(|_| model.onnx.is_some()));
        let mut keys = self.pass_keys(model, work)?;
        let key = |step: &Step| {
            keys.checkpoint(step.pass())?;
            let mut key = ContentKey::new(work);
            [&keys.result()?, &settings, &hardware].into_iter().for_each(|line| key.line(line));
            Ok(key.name())
        };
        passes.iter().map(key).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::pass::{Method, Quantize, Step};
    use crate::work::{Cancel, Silent};

    /// Resuming after one of these files has changed would combine blocks that were calibrated on
    /// different tokens.
    #[test]
    fn every_file_that_determines_the_tokens_is_part_of_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let (from, model) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama"), folder.path().join("model"));
        fs::create_dir_all(folder.path().join("images/class")).unwrap();
        fs::create_dir(&model).unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(from.join(name), model.join(name)).unwrap();
        }
        let files = [
            "model/tokenizer.json",
            "model/tokenizer_config.json",
            "model/special_tokens_map.json",
            "model/chat_template.jinja",
            "model/generation_config.json",
            "samples.txt",
            "images/class/0.png",
        ];
        files.iter().for_each(|name| fs::write(folder.path().join(name), "{}").unwrap());
        let cancel = Cancel::default();
        let data = Data { text: Some(folder.path().join("samples.txt")), images: Some(folder.path().join("images")), ..Data::default() };
        let quantize = |damping| Step::from(Quantize { method: Method::Gptq, damping, ..Quantize::default() });
        let key = |seed: u64, steps: &[Step]| {
            let (model, work) = (Model::open(&model).unwrap(), Work { threads: 1, progress: &Silent, cancel: &cancel });
            let pipeline = Pipeline::builder().calibration(data.clone()).passes(steps.to_vec()).seed(seed).build().unwrap();
            let mut keys = pipeline.pass_keys(&model, &work).unwrap();
            let found: Vec<String> = steps.iter().map(|step| keys.checkpoint(step.pass()).unwrap()).collect();
            found.last().unwrap().clone()
        };
        let now = || key(0, &[quantize(None)]);
        let before = now();
        assert_eq!(before, now());
        for name in files {
            // Other bytes of the same length and with the same modification time.
            let path = folder.path().join(name);
            let time = fs::metadata(&path).unwrap().modified().unwrap();
            fs::write(&path, "[]").unwrap();
            fs::File::options().append(true).open(&path).unwrap().set_modified(time).unwrap();
            assert_ne!(before, now(), "{name}");
            fs::write(&path, "{}").unwrap();
            assert_eq!(before, now(), "{name}");
        }
        assert_ne!(before, key(1, &[quantize(None)]), "another seed");
        assert_ne!(before, key(0, &[quantize(Some(0.1))]), "other options");
        assert_ne!(before, key(0, &[crate::pass::Cast::default().into(), quantize(None)]), "an additional pass");
    }

    /// Only rank 0 of a training reads the evaluation data. Later passes depend on them.
    #[test]
    fn evaluation_data_are_part_of_the_result_but_not_of_checkpoints() {
        let (folder, cancel) = (tempfile::tempdir().unwrap(), Cancel::default());
        let model = Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap();
        let data = |name: &str| Data { text: Some(folder.path().join(name)), ..Data::default() };
        let keys = |text: &str| {
            ["a.txt", "b.txt"].into_iter().zip(["a", text]).for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
            let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
            let step = Step::from(crate::pass::Finetune::default());
            let pipeline = Pipeline::builder().train(data("a.txt")).evaluation(data("b.txt")).pass(step.clone()).build().unwrap();
            let mut keys = pipeline.pass_keys(&model, &work).unwrap();
            [keys.checkpoint(step.pass()).unwrap(), keys.result().unwrap(), keys.checkpoint(step.pass()).unwrap()]
        };
        let (one, other) = (keys("1"), keys("2"));
        assert_eq!(one[0], other[0]);
        assert!(one[1] != other[1] && one[2] != other[2]);
    }
}
