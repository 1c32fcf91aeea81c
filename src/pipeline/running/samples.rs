//! The samples of a run: how many there are, how they are preprocessed, and which are held out to
//! measure on.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::data::{Data, DataSet};
use crate::error::{Error, Result, counted};
use crate::evaluation::{Precision, Runtime, Subject};
use crate::files;
use crate::model::Model;
use crate::pass::Samples;
use crate::pipeline::Pipeline;
use crate::report::WARNING;

impl Pipeline {
    /// Opens the data, so that unusable data is reported before any work is done. If the passes would
    /// use all calibration samples, some are reserved to measure on. They are reserved even if nothing
    /// is measured, so that the output does not depend on it.
    pub(in crate::pipeline) fn open_samples(&mut self, model: &Model) -> Result<Vec<String>> {
        let evaluate = self.running.evaluate.as_ref().filter(|evaluate| evaluate.precision != Precision::F32);
        if evaluate.is_some_and(|evaluate| model.onnx.is_some() || !evaluate.runtime.is_empty() && !evaluate.runtime.contains(&Runtime::Candle)) {
            return Err(Error::option("evaluate", "`precision` applies only to the built-in executor, but this model runs in ONNX Runtime"));
        }
        self.require_unused_files()?;
        self.require_texts(model)?;
        self.require_no_training_batch()?;
        if self.used_data().is_empty() {
            return Ok(self.unused_sample_notes());
        }
        let subject = Subject::from_model(model.clone())?;
        let mut notes = self.sample_notes(&self.open_data(subject.target())?)?;
        notes.extend(self.unused_sample_notes());
        let calibrates = self.model_runs().any(|(_, samples)| samples == Samples::Calibration);
        let Some(set) = self.running.data.calibration.as_ref().filter(|_| calibrates) else { return Ok(notes) };
        let reduced = self.running.data.reserve_held_out(set, subject.target())?;
        notes.extend(reduced.samples.filter(|_| reduced.samples != set.samples).map(|used| {
            format!("passes use the first {used} calibration samples; the others are held out to measure on (also with `--no-measure`, so that the output does not depend on it); to change this, set `samples` in `data: {{ calibration: ... }}`")
        }));
        self.running.data.calibration = Some(reduced);
        Ok(notes)
    }

    /// Notes that the passes make no use of the calibration data or of the training data.
    fn unused_sample_notes(&self) -> Vec<String> {
        let data = &self.running.data;
        let is_read = |kind: Samples| self.model_runs().any(|(_, samples)| samples == kind);
        let (calibrates, trains) = (is_read(Samples::Calibration), is_read(Samples::Train));
        // Without calibration data, passes calibrate on a part of the training data.
        let paths = |data: &Option<Data>| data.iter().flat_map(Data::paths).cloned().collect::<Vec<_>>();
        let is_shared = calibrates && paths(&data.calibration) == paths(&data.train);
        let unused = [("calibration", data.calibration.is_some() && !calibrates), ("training", data.train.is_some() && !trains && !is_shared)];
        // Codes that a later pass trains replace those of any method.
        let of_quantize = self.steps.iter().any(|step| step.pass().name() == "quantize");
        let methods = if of_quantize && !trains { "; `quantize` uses them with `method: gptq`" } else { "" };
        let note = |name: &str| {
            let methods = if name == "calibration" { methods } else { "" };
            format!("no pass uses the {name} samples, which serve at most to measure the output{methods}")
        };
        unused.into_iter().filter(|(_, is_unused)| *is_unused && !self.steps.is_empty()).map(|(name, _)| note(name)).collect()
    }

    /// The number of samples of each data set that is used, and notes about them.
    pub(in crate::pipeline) fn count_samples(&self, model: &Model) -> Result<(BTreeMap<&'static str, usize>, Vec<String>)> {
        self.require_unused_files()?;
        self.require_texts(model)?;
        self.require_no_training_batch()?;
        if self.used_data().is_empty() {
            return Ok((BTreeMap::new(), Vec::new()));
        }
        let sets = self.open_data(Subject::from_model(model.clone())?.target())?;
        let notes = self.sample_notes(&sets)?;
        Ok((sets.into_iter().map(|(key, data)| Ok((key, data.count()?))).collect::<Result<_>>()?, notes))
    }

    /// Checks that the files of data sets that nothing reads exist: the name of a missing one is a mistake.
    fn require_unused_files(&self) -> Result<()> {
        let used = self.used_data();
        let unused = self.running.sets().filter(|set| !used.values().any(|used| std::ptr::eq(*used, *set)));
        unused.flat_map(Data::paths).try_for_each(|path| files::kind(path).map(drop).map_err(Error::io("open", path)))
    }

    /// Rejects arrays if a pass renumbers tokens: their ids are other tokens after it.
    fn require_texts(&self, model: &Model) -> Result<()> {
        let used = self.used_data().into_iter().find(|(_, set)| !set.has_texts()).filter(|_| model.retained_tokens.is_some());
        used.map_or(Ok(()), |(key, _)| {
            let reason = "contains token ids, but `prune-vocabulary` renumbers the tokens: use texts, or a separate run on the result";
            Err(Error::option(format!("data: {key}"), reason))
        })
    }

    /// Rejects the batch size of training data, because training passes have their own.
    fn require_no_training_batch(&self) -> Result<()> {
        let trains = self.steps.iter().map(|step| step.pass()).find(|pass| pass.runs_on() == Some(Samples::Train));
        match (trains, self.running.data.train.as_ref().and_then(|data| data.batch_size)) {
            (Some(pass), Some(size)) => {
                let reason = format!("has no effect on training: remove it, and set `batch_size: {size}` in the options of `{}`", pass.name());
                Err(Error::option("data: train: batch_size", reason))
            }
            _ => Ok(()),
        }
    }

    /// Notes about assumptions, files that are not read, and the preprocessing of images, with warnings if
    /// data sets are preprocessed differently or a pass has few calibration samples.
    fn sample_notes(&self, sets: &BTreeMap<&'static str, Arc<DataSet>>) -> Result<Vec<String>> {
        let (mut notes, mut descriptions) = (Vec::new(), Vec::new());
        for (key, data) in sets {
            notes.extend(data.dropped_note()?.map(|note| format!("{WARNING}{key}: {note}")));
            notes.extend(data.notes().into_iter().map(|note| format!("{key}: {note}")));
            let Some(description) = data.preprocessing() else { continue };
            let number = |value: &f64| format!("{value:.3}");
            let ranges: Vec<String> = data.channel_ranges()?.iter().map(|range| range.each_ref().map(number).join(" ")).collect();
            notes.push(format!("{key} images: {description}; min, mean and max of each channel in the first batch: {}", ranges.join(", ")));
            descriptions.push((*key, description));
        }
        if let Some((first, rest)) = descriptions.split_first()
            && let Some(other) = rest.iter().find(|(_, description)| *description != first.1)
        {
            let reason = format!("{}: {}; {}: {}", first.0, first.1, other.0, other.1);
            notes.push(format!("{WARNING}images of the data sets are preprocessed differently ({reason}): set the same preprocessing options for both"));
        }
        let count = sets.get("calibration").and_then(|data| data.samples());
        for pass in self.steps.iter().map(|step| step.pass()).filter(|pass| pass.runs_on() == Some(Samples::Calibration)) {
            if let Some(count) = count.filter(|count| *count < pass.min_samples()) {
                notes.push(format!(
                    "{WARNING}{} has {}: values outside the observed ranges are clipped; use at least {}",
                    pass.name(),
                    counted(count, "calibration sample"),
                    pass.min_samples()
                ));
            }
        }
        Ok(notes)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::Device;

    use super::*;

    /// Plans state how images are preprocessed, and warn about few samples and about data sets that are
    /// preprocessed differently.
    #[test]
    fn plans_state_the_preprocessing_of_images() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let model = Model::open(golden.join("models/torchvision-resnet18")).unwrap();
        let notes = |samples: usize, mean: &[f64]| {
            let data =
                Data { images: Some(golden.join("evaluation/images")), task: Some(crate::data::Task::Fidelity), crop: Some(vec![32]), ..Data::default() };
            let calibration = Data { samples: Some(samples), ..data.clone() };
            let pipeline = Pipeline::builder().pass(crate::pass::QuantizeStatic::default()).calibration(calibration);
            pipeline.evaluation(Data { mean: mean.to_vec(), ..data }).build().unwrap().plan(&model).unwrap().notes
        };
        let is_warning = |note: &&String| note.starts_with(WARNING);
        let same = notes(8, &[]);
        assert_eq!(same.iter().find(is_warning), None);
        let stated = "calibration images: resized to a shorter side of 256, center crop of 32 x 32, pixels divided by 255, mean [0.485, 0.456, 0.406]";
        assert!(same.iter().any(|note| note.starts_with(stated) && note.contains("min, mean and max of each channel in the first batch: -")), "{same:?}");
        let warnings: Vec<String> = notes(1, &[0.5]).into_iter().filter(|note| is_warning(&note)).collect();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].contains("preprocessed differently") && warnings[1].contains("quantize-static has 1 calibration sample:"), "{warnings:?}");
    }

    /// The order of classes and files that are not read are noted for every data set that is used.
    #[test]
    fn notes_name_the_order_of_classes_and_skipped_files() {
        use crate::pass::{Finetune, QuantizeStatic, Step, Training};
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let model = Model::open(golden.join("models/torchvision-resnet18")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for class in ["a", "b", "c", "d", "e"] {
            let class = folder.path().join(class);
            std::fs::create_dir(&class).unwrap();
            std::fs::copy(golden.join("evaluation/images/LABEL_0/0.png"), class.join("0.png")).unwrap();
        }
        std::fs::write(folder.path().join("b/animated.gif"), "").unwrap();
        let images = || Data { images: Some(folder.path().to_owned()), crop: Some(vec![32]), ..Data::default() };
        let notes = |pass: Step| {
            let pipeline = Pipeline::builder().pass(pass).train(images()).calibration(images()).evaluation(images()).build().unwrap();
            pipeline.plan(&model).unwrap().notes
        };
        let options = Training { max_steps: Some(1), ..Training::default() };
        let training = notes(Finetune { training: options, ..Finetune::default() }.into());
        let calibrated = notes(QuantizeStatic::default().into());
        // Calibration does not use labels.
        for (notes, key, has_order) in [(&training, "train", true), (&calibrated, "calibration", false), (&calibrated, "evaluation", true)] {
            let order = format!("{key}: no class folder has the name of a label of config.json");
            assert_eq!(notes.iter().any(|note| note.starts_with(&order)), has_order, "{key}: {notes:?}");
            let skipped = format!("{key}: 1 image of an unsupported format is not read, such as ");
            assert!(notes.iter().any(|note| note.starts_with(&skipped) && note.contains("animated.gif")), "{key}: {notes:?}");
        }
    }

    /// A copy of a small image classifier that normalizes images by this mean.
    fn classifier(folder: &Path, mean: f64) -> std::path::PathBuf {
        let to = folder.join(mean.to_string());
        std::fs::create_dir_all(&to).unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/torchvision-resnet18");
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden.join(file), to.join(file)).unwrap();
        }
        let size = serde_json::json!({ "height": 32, "width": 32 });
        let preprocessor = serde_json::json!({ "image_mean": [mean, mean, mean], "image_std": [0.5, 0.5, 0.5], "size": size, "do_normalize": true });
        std::fs::write(to.join("preprocessor_config.json"), preprocessor.to_string()).unwrap();
        to
    }

    /// Student and teacher run on the same samples, which the notes describe.
    #[test]
    fn students_and_teachers_that_preprocess_images_differently_are_refused() {
        use crate::pass::{Distill, Student, Training};
        let folder = tempfile::tempdir().unwrap();
        let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/images");
        let [student, same, other] = [0.5, 0.50001, 0.9].map(|mean| classifier(folder.path(), mean));
        std::fs::copy(student.join("preprocessor_config.json"), same.join("preprocessor_config.json")).unwrap();
        let run = |input: &Path, teacher: Option<&Path>, mean: &[f64]| {
            let losses = crate::train::losses_or_none("soft=1").unwrap();
            let pass = Distill {
                student: Some(Student::Model(student.clone())),
                teacher: teacher.map(Path::to_owned),
                training: Training { losses, max_steps: Some(1), ..Training::default() },
                ..Distill::default()
            };
            let data = Data { images: Some(images.clone()), task: Some(crate::data::Task::Fidelity), mean: mean.to_vec(), ..Data::default() };
            let out = folder.path().join(format!("{}-{}-{}", input == other, teacher.is_some(), mean.len()));
            Pipeline::builder().pass(pass).train(data).measure(false).build().unwrap().run(Model::open(input).unwrap(), out)
        };
        for (input, teacher) in [(&other, None), (&same, Some(other.as_path()))] {
            let error = run(input, teacher, &[]).unwrap_err().to_string();
            assert!(error.contains("distill: teacher: preprocesses images differently") && error.contains("0.9"), "{error}");
        }
        // The preprocessing of the input is irrelevant if another model is the teacher.
        let notes = run(&other, Some(&same), &[]).unwrap().notes;
        assert!(notes.iter().any(|note| note.starts_with("train images: ") && note.contains("mean [0.5")), "{notes:?}");
        run(&other, None, &[0.4]).unwrap();
    }

    /// The size that a plan states is the size that is written or an upper bound of it, unless it is
    /// stated to be an estimate.
    #[test]
    fn planned_sizes_hold() {
        use crate::export::{Export, Gguf, Layout, Onnx, Safetensors};
        use crate::pass::{Cast, PruneUnstructured, QuantizeDynamic, QuantizeStatic, Step};
        let scratch = tempfile::tempdir().unwrap();
        let (mut exact, mut estimated) = (0, 0);
        for name in ["llama", "bert", "resnet-basic", "torchvision-mobilenet-v2"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
            let model = Model::open(&folder).unwrap();
            let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
            let inputs = golden.into_iter().filter_map(|(name, tensor)| Some((name.strip_prefix("in/")?.to_owned(), tensor))).collect();
            let samples = scratch.path().join(format!("{name}.safetensors"));
            candle_core::safetensors::save(&inputs, &samples).unwrap();
            let passes: [Step; 4] =
                [Cast::default().into(), PruneUnstructured::default().into(), QuantizeDynamic::default().into(), QuantizeStatic::default().into()];
            let mut exports: Vec<Export> =
                vec![Safetensors::default().into(), Safetensors { layout: Layout::Sparse, ..Safetensors::default() }.into(), Onnx::default().into()];
            exports.extend((name == "llama").then(|| Gguf::default().into()));
            for (pass, export) in passes.iter().flat_map(|pass| exports.iter().map(move |export| (pass, export))) {
                let data = Data { arrays: Some(samples.clone()), task: Some(crate::data::Task::Fidelity), ..Data::default() };
                let builder = Pipeline::builder().pass(pass.clone()).export(export.clone()).calibration(data).measure(false);
                let pipeline = builder.build().unwrap();
                let what = format!("{name}, {}, {:?}", pass.pass().name(), export);
                // Not every format holds every kind of weight.
                let Ok(plan) = pipeline.plan(&model) else { continue };
                let report = pipeline.run(model.clone(), scratch.path().join(format!("{exact}-{estimated}-{name}"))).unwrap_or_else(|e| panic!("{what}: {e}"));
                let written: u64 = report.outputs.iter().map(|output| output.bytes).sum();
                match (plan.output_exact, plan.output_estimated) {
                    (true, _) => assert_eq!(plan.output_bytes, written, "{what}"),
                    (false, true) => estimated += 1,
                    (false, false) => assert!(plan.output_bytes >= written, "{what}: {} {written}", plan.output_bytes),
                }
                exact += usize::from(!plan.output_estimated);
            }
        }
        assert!(exact > 20 && estimated > 0, "{exact} {estimated}");
    }
}
