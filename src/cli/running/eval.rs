//! `compress eval`

use std::path::{Path, PathBuf};

use serde_json::json;

use super::args::Global;
use super::output;
use super::samples::parse_data;
use crate::arch;
use crate::data::{Data, DataSet, Task, has_renumbered_tokens};
use crate::error::{Error, Result, counted, redact_path};
use crate::evaluation::{self, Fidelity, Outcomes, Precision, Runs, Runtime, Score, Subject};
use crate::model::Model;
use crate::pipeline::memory_limit;
use crate::report::format::{decibels, figure, runtime_name, seconds};
use crate::report::terminal::{Table, table};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress eval ./minilm --data pairs.tsv --text-column first --pair-column second --label-column score
  compress eval ./llama --data book.txt --max-length 512
  compress eval out/minilm-int8/model.onnx --data sentences.txt --against ./minilm
  compress eval ./cnn --images test-images-idx3-ubyte --labels test-labels-idx1-ubyte")]
pub(in crate::cli) struct Args {
    /// Model folder, or a file: .safetensors, .onnx, .gguf, or .bin, .pt or .pth of PyTorch; also
    /// hf:org/name, s3://bucket/name
    model: PathBuf,
    /// Data, by file name: .txt, .raw, .csv, .tsv, .jsonl; .safetensors, .npz; a folder of images or an IDX
    /// file; or `{text: pairs.tsv, pair_column: b, ...}` as in a recipe
    #[arg(long, value_name = "DATA", value_parser = parse_data, conflicts_with_all = ["text", "images", "arrays"], help_heading = "Data")]
    data: Option<Data>,
    #[command(flatten)]
    options: Data,
    /// Compare outputs with those of another model, usually the original
    #[arg(long, value_name = "MODEL")]
    against: Option<PathBuf>,
    /// Runtime of the model [default: the built-in executor for folders, ONNX Runtime for .onnx files]
    #[arg(long, value_enum)]
    runtime: Option<Runtime>,
    /// Floating-point precision of the built-in executor
    #[arg(long, value_enum, default_value_t)]
    precision: Precision,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let options = match &self.data {
            Some(data) => data.overridden_by(&self.options)?,
            None => self.options.clone(),
        };
        if !options.has_texts() && options.images.is_none() && options.arrays.is_none() {
            return Err(Error::option("eval", "no data: specify samples with --data"));
        }
        options.require_unpacked("eval")?;
        let path = self.subject()?;
        let uses_onnx_runtime = self.against.iter().any(|other| is_file(other)) || is_file(&path) && self.runtime != Some(Runtime::Candle);
        if uses_onnx_runtime && self.precision != Precision::F32 {
            return Err(Error::option("eval", "`--precision` applies only to the built-in executor, but ONNX Runtime runs one of these models"));
        }
        let mut subjects = vec![self.open_subject(&path, global)?];
        if let Some(other) = &self.against {
            subjects.insert(0, Args::open_with_sizes(other, global)?);
        }
        let mut subjects: Vec<Subject> = subjects.into_iter().map(|subject| subject.with_precision(self.precision)).collect();
        let last = &subjects[subjects.len() - 1];
        if subjects.iter().any(|subject| arch::is_draft_head(arch::model_type(subject.target().config))) {
            let hint = "measure it with its model: `compress generate MODEL --draft HEAD --prompt TEXT` prints how many of its proposals the model accepts";
            return Err(Error::run("eval", "an EAGLE-3 head reads hidden states of another model, so that it has no score of its own", hint));
        }
        let runtime = last.runtime();
        let data = DataSet::open(&options, last.target())?;
        let (options, data) = match evaluation::smaller_batch(&options, &data, &subjects)? {
            Some(size) => {
                let options = Data { batch_size: Some(size), ..options };
                let data = DataSet::open(&options, last.target())?;
                (options, data)
            }
            None => (options, data),
        };
        if data.task() == Task::Fidelity && self.against.is_none() {
            return Err(Error::option(
                "eval",
                "no labels are selected: specify `--task`, for which texts have the column `label`, or a model to compare with by `--against`",
            ));
        }
        let mut notes: Vec<String> = data.notes().into_iter().chain(data.dropped_note()?).collect();
        let other = match &self.against {
            Some(other) => {
                let same_ids = options.images.is_some() || !has_renumbered_tokens([last.target(), subjects[0].target()])?;
                if !same_ids && options.arrays.is_some() {
                    let reason = format!("contains token ids, which are other tokens in {}: use texts", redact_path(other).display());
                    return Err(Error::option("--arrays", reason));
                }
                own_samples((&data, same_ids), DataSet::open(&options, subjects[0].target()), [&path, other], &mut notes)?
            }
            None => None,
        };
        let device = global.models.device.open()?;
        let outcomes = global.work(|work| {
            if let Some(reason) = global.models.device.reason() {
                work.progress.on(crate::work::Event::Message(&reason));
            }
            let memory = memory_limit(global.models.memory, &device);
            let mut runners = evaluation::load(&mut subjects, (&data.first()?.inputs, &device), memory, Runs::Once, work)?;
            let outcomes = match (&other, runners.split_at_mut(1)) {
                (Some(other), (against, evaluated)) => {
                    let before = evaluation::evaluate(other, against, &[], work)?;
                    evaluation::evaluate(&data, evaluated, &[], work)?.after(before)
                }
                (None, (_, [])) => evaluation::evaluate(&data, &mut runners, &[], work)?,
                (None, _) => evaluation::evaluate(&data, &mut runners, &[(0, 1)], work)?,
            };
            self.against.iter().chain([&path]).try_for_each(|path| Model::check_remote(path, work)).map(|()| outcomes)
        })?;
        self.show((&path, runtime), (&data, &notes), &outcomes, global)
    }

    /// Opens the model to evaluate; an ONNX file in the built-in executor if requested.
    fn open_subject(&self, path: &Path, global: &Global) -> Result<Subject> {
        if self.runtime != Some(Runtime::Candle) {
            return Args::open_with_sizes(path, global);
        }
        let model = Model::open(path)?;
        global.models.configure_model(&model)?;
        model.graph()?;
        Subject::from_model(model)
    }

    /// Opens a model with the requested sizes of dynamic axes; an ONNX file in ONNX Runtime.
    fn open_with_sizes(path: &Path, global: &Global) -> Result<Subject> {
        if global.models.sizes()?.is_empty() {
            return Subject::open(path, global.threads());
        }
        let model = Model::open(path)?;
        global.models.configure_model(&model)?;
        if is_file(path) { Subject::open_original_file(&model, global.threads()) } else { Subject::from_model(model) }
    }

    /// The file or folder to run.
    fn subject(&self) -> Result<PathBuf> {
        match (self.runtime, is_file(&self.model)) {
            (Some(Runtime::OnnxRuntime), false) => Ok(crate::onnx::file::entry(&self.model)),
            _ => Ok(self.model.clone()),
        }
    }

    fn show(&self, (path, runtime): (&Path, Runtime), (data, notes): (&DataSet, &[String]), outcomes: &Outcomes, global: &Global) -> Result<()> {
        let scores: Vec<&Score> = outcomes.models.iter().filter_map(|m| m.score.as_ref()).collect();
        let fidelity = outcomes.pairs.first();
        let time = outcomes.models.iter().map(|m| m.time.as_secs_f64()).next_back().unwrap_or(0.0);
        if global.json {
            let against = if scores.len() > 1 { scores.first() } else { None };
            return output::json(&json!({
                "model": path.to_string_lossy(), "data": data.description(), "task": outcomes.task, "runtime": runtime, "samples": outcomes.samples,
                "seconds": time, "score": scores.last(), "against": against, "fidelity": fidelity, "notes": notes,
            }));
        }
        let mut out = format!(
            "{} on {}: {}, {}, {}, {}\n",
            path.display(),
            data.description(),
            outcomes.task,
            counted(outcomes.samples, "sample"),
            runtime_name(&runtime.to_string()),
            seconds(time)
        );
        for note in notes {
            out += &format!("note: {note}\n");
        }
        if let Some(score) = scores.last() {
            let before = scores.first().filter(|_| scores.len() > 1);
            out += &format!("\n{}\n", score_table(score, before.copied()));
        }
        if let (Some(fidelity), Some(against)) = (fidelity, &self.against) {
            out += &format!("\n{}\n", fidelity_table(fidelity, against));
        }
        output::print(&out)
    }
}

/// The samples of the model to compare with, if it preprocesses them differently from the evaluated
/// model, and notes on the samples that both models ran on. `same_ids`: tokens have the same ids in both.
fn own_samples((data, same_ids): (&DataSet, bool), other: Result<DataSet>, [path, other_path]: [&Path; 2], notes: &mut Vec<String>) -> Result<Option<DataSet>> {
    let (path, other_path) = (redact_path(path), redact_path(other_path));
    let other = match other {
        Ok(other) => other,
        Err(e) => {
            notes.push(format!("{} ran on samples that were preprocessed for {}: {e}", other_path.display(), path.display()));
            return Ok(None);
        }
    };
    let reason = match data.difference_from(&other)? {
        None if same_ids => return Ok(None),
        None => "their tokens have different ids".to_owned(),
        Some(difference) => difference,
    };
    let reason = format!("{} and {} differ in preprocessing or labels ({reason})", path.display(), other_path.display());
    if data.task() == Task::Fidelity {
        return Err(Error::option(
            "eval: against",
            format!("{reason}, so that their outputs cannot be compared: specify the preprocessing of both by options of `--data`"),
        ));
    }
    notes.push(format!("{reason}: each model was scored with its own samples, and their outputs were not compared"));
    if !same_ids && data.task() == Task::LanguageModelling {
        notes.push("perplexities are not comparable: they are means over different tokens".to_owned());
    }
    Ok(Some(other))
}

/// Whether a path has the extension of an ONNX file.
fn is_file(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "onnx")
}

fn score_table(score: &Score, before: Option<&Score>) -> Table {
    let interval = score.ci95.map_or("-".into(), |[low, high]| format!("{low:.4} .. {high:.4}"));
    let mut head = vec!["", "value", "95 % interval"];
    let mut rows = vec![vec![score.metric.clone(), format!("{:.4}", score.value), interval]];
    rows.extend(score.more.iter().map(|(name, value)| vec![name.replace('_', " "), figure(*value), "-".into()]));
    if let Some(before) = before {
        head.push("original");
        let values =
            std::iter::once(format!("{:.4}", before.value)).chain(score.more.keys().map(|name| before.more.get(name).map_or("-".into(), |v| figure(*v))));
        for (row, value) in rows.iter_mut().zip(values) {
            row.push(value);
        }
    }
    table(&head, rows)
}

fn fidelity_table(fidelity: &Fidelity, against: &Path) -> Table {
    let optional = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |v| format!("{v:.digits$}"));
    let divergence = match (fidelity.kl, fidelity.label_kl) {
        (None, Some(kl)) => ("Kullback-Leibler divergence per label", Some(kl)),
        (kl, _) => ("Kullback-Leibler divergence", kl),
    };
    let rows = [
        ("cosine, mean", format!("{:.6}", fidelity.cosine)),
        ("cosine, minimum", format!("{:.6}", fidelity.cosine_min)),
        ("SQNR", decibels(fidelity.sqnr_db)),
        (divergence.0, optional(divergence.1, 6)),
        ("same top class", optional(fidelity.top1_agreement, 4)),
        ("largest difference", format!("{:.3e}", fidelity.max_abs_error)),
    ];
    let output = if fidelity.outputs.len() > 1 { format!("worst of {} outputs", fidelity.outputs.len()) } else { format!("`{}`", fidelity.output) };
    let rows = rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]);
    let outputs = crate::report::measured::output_rows(fidelity).into_iter().map(Vec::from);
    table(&[&format!("{output}, against {}", against.display()), ""], rows.chain(outputs))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Models that preprocess images differently are scored separately, and not compared.
    #[test]
    fn models_are_compared_only_on_the_same_samples() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let folder = tempfile::tempdir().unwrap();
        let subject = |mean: f64| {
            let to = folder.path().join(mean.to_string());
            std::fs::create_dir(&to).unwrap();
            for file in ["config.json", "model.safetensors"] {
                std::fs::copy(golden.join("models/torchvision-resnet18").join(file), to.join(file)).unwrap();
            }
            let preprocessor = json!({ "image_mean": [mean, mean, mean], "image_std": [0.5, 0.5, 0.5], "size": { "height": 32, "width": 32 } });
            std::fs::write(to.join("preprocessor_config.json"), preprocessor.to_string()).unwrap();
            Subject::from_model(Model::open(&to).unwrap()).unwrap()
        };
        let [a, b] = [0.1, 0.9].map(subject);
        let own = |task: Task, mean: &[f64]| {
            let options = Data { images: Some(golden.join("evaluation/images")), task: Some(task), mean: mean.to_vec(), ..Data::default() };
            let mut notes = Vec::new();
            let other =
                own_samples((&DataSet::open(&options, a.target())?, true), DataSet::open(&options, b.target()), [Path::new("a"), Path::new("b")], &mut notes)?;
            Ok::<_, Error>((other.is_some(), notes))
        };
        let error = own(Task::Fidelity, &[]).unwrap_err().to_string();
        assert!(error.contains("a and b differ in preprocessing or labels") && error.contains("0.9"), "{error}");
        assert_eq!(own(Task::Fidelity, &[0.5]).unwrap(), (false, Vec::new()));
        let (is_separate, notes) = own(Task::Classification, &[]).unwrap();
        assert!(is_separate && notes[0].contains("their outputs were not compared"), "{notes:?}");
    }
}
