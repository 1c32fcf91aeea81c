//! Knowledge distillation: trains a student on the outputs of a teacher (Hinton et al., *Distilling the
//! Knowledge in a Neural Network*, 2015, <https://arxiv.org/abs/1503.02531>).
//!
//! ```yaml
//! data:
//!   train: { text: sentences.txt, max_length: 64 }
//! passes:
//!   - distill:
//!       student: { layers: [0, 2, 4] }
//!       losses: { embedding: 1.0, hidden: 1.0 }
//!       max_steps: 2000
//! ```

mod adapters;
mod draft_head;
mod forecast;
mod inputs;
mod masking;
mod more_teachers;
mod on_policy;
mod packing;
mod record;
mod renamed;
mod scoring;
mod student;
mod teacher_files;
mod training;
mod vocabulary;

use std::path::PathBuf;

use serde_json::Value;

pub use draft_head::DraftHead;
pub use more_teachers::MoreTeacher;
pub(super) use renamed::with_previous_names;
pub use student::Student;
pub(super) use training::{Job, REMEDY};

use super::{Pass, Plan, Samples, options_of};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::pass::training_options::training_pass;
use crate::run_state::{Applied, RunState};
use crate::train::{Offload, QuantizerScales, Training};

training_pass! {
    /// Train a student on a teacher's outputs.
    Distill {
        /// The teacher model [default: the input model, before all passes]
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "MODEL"))]
        #[serde(skip_serializing_if = "Option::is_none")]
        teacher: Option<PathBuf>,
        /// The model to train: layers=0,2,4, every=2, model=FOLDER, config=FILE (random weights), or
        /// eagle3=FILE (a head for speculative decoding, with the ids of its tokens) [default: the result of
        /// the previous passes]
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "STUDENT"))]
        #[serde(skip_serializing_if = "Option::is_none")]
        student: Option<Student>,
        /// A folder that caches the largest logits of the teacher, so that each sample is computed once
        /// over all epochs and runs
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "FOLDER"))]
        #[serde(skip_serializing_if = "Option::is_none")]
        teacher_cache: Option<PathBuf>,
        /// Number of logits per row to cache [default: 64]
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
        #[serde(skip_serializing_if = "Option::is_none")]
        teacher_top: Option<usize>,
        /// Files with the logits of a teacher, instead of the teacher: .safetensors, or .jsonl with the
        /// responses of vLLM
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "FILE"))]
        #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<PathBuf>"))]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
        teacher_logits: Vec<PathBuf>,
        /// Further teachers, whose probabilities are averaged with those of the teacher: a folder, or {model:
        /// FOLDER, weight: 1, cache: FOLDER}
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "MODEL"))]
        #[serde(skip_serializing_if = "Vec::is_empty")]
        more_teachers: Vec<MoreTeacher>,
        /// Let the student continue a fraction of the texts itself, and compare it with the teacher on its
        /// continuations: the fraction, or {fraction: 0.5, prompt_tokens: 32, tokens: 64, temperature: 1}
        /// [default: only texts of the data]
        @ #[cfg_attr(feature = "cli", arg(long, value_name = "FRACTION"))]
        #[serde(skip_serializing_if = "Option::is_none")]
        on_policy: Option<crate::train::OnPolicy>,
    }
}

const NAME: &str = "distill";

/// Default number of cached logits per row.
const TOP: usize = 64;

impl Distill {
    fn teacher(&self, model: &Model, run: &RunState) -> Result<Model> {
        // An earlier pass may have replaced the model by a student from another folder.
        let path = self.teacher.as_ref().or(run.input.as_ref()).unwrap_or(&model.path);
        model.open_like(path).map_err(|e| match e {
            Error::Io { .. } => Error::option(format!("{NAME}: teacher"), e),
            other => other,
        })
    }

    /// Rejects options of a teacher that does not run.
    fn check_teacher(&self) -> Result<()> {
        let wrong = |what: &str, reason: &str| Err(Error::option(format!("{NAME}: {what}"), reason));
        let offloads = self.training.offload.contains(&Offload::Teacher);
        let set = [("teacher", self.teacher.is_some()), ("teacher_cache", self.teacher_cache.is_some()), ("offload: teacher", offloads)];
        match set.into_iter().find(|(_, is_set)| *is_set) {
            Some((what, _)) if !self.training.losses.reads_teacher() => {
                wrong(what, "has no effect, because no loss reads the teacher: remove it, or add `soft`, `hidden`, `attention` or `embedding` to `losses`")
            }
            _ if offloads && !self.teacher_logits.is_empty() => {
                wrong("offload: teacher", "has no effect, because `teacher_logits` replace the teacher: remove it")
            }
            _ => Ok(()),
        }
    }

    /// Rejects options that do not apply to a draft head, whose teacher is the model that it belongs to.
    fn check_head(&self, head: &DraftHead) -> Result<()> {
        let training = &self.training;
        let set = [
            ("teacher", self.teacher.is_some()),
            ("teacher_cache", self.teacher_cache.is_some()),
            ("teacher_logits", !self.teacher_logits.is_empty()),
            ("more_teachers", !self.more_teachers.is_empty()),
            ("on_policy", self.on_policy.is_some()),
            ("adapter", training.adapter.is_some()),
            ("masking", training.masking.is_some()),
            ("dropout", training.dropout.is_some()),
            ("attention_dropout", training.attention_dropout.is_some()),
            ("evaluate_every", training.evaluate_every.is_some()),
            ("scales", training.scales != QuantizerScales::Fixed),
            ("offload: teacher", training.offload.contains(&Offload::Teacher)),
            ("targets", !training.targets.is_empty()),
            ("ignore", !training.ignore.is_empty()),
        ];
        match set.iter().find(|(_, is_set)| *is_set) {
            Some((name, _)) => Err(Error::option(format!("{NAME}: {name}"), "cannot be combined with `student: eagle3`: remove it")),
            None => head.check(),
        }
    }
}

impl Pass for Distill {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn fixed_options(&self) -> Value {
        self.fixed()
    }

    fn check(&self) -> Result<()> {
        let has_cache = self.teacher_cache.is_some() || !self.teacher_logits.is_empty() || !self.more_teachers.is_empty();
        if self.teacher_top == Some(0) || (self.teacher_top.is_some() && !has_cache) {
            return Err(Error::option(format!("{NAME}: teacher_top"), "must be at least 1, and requires `teacher_cache` or `teacher_logits`"));
        }
        if !self.teacher_logits.is_empty() {
            teacher_files::check(self)?;
        }
        if !self.more_teachers.is_empty() {
            more_teachers::check(self)?;
        }
        let training = &self.training;
        let is_cached = self.teacher_cache.is_some() || self.more_teachers.iter().any(|teacher| teacher.cache.is_some());
        let changing = [("augment", training.augment.is_some()), ("masking", training.masking.is_some())];
        if let Some((what, _)) = changing.iter().find(|(_, is_set)| *is_set && is_cached) {
            return Err(Error::option(format!("{NAME}: {what}"), "cannot be combined with `teacher_cache`: samples are different in each step"));
        }
        if let Some(Student::Eagle3(head)) = &self.student {
            self.check_head(head)?;
        }
        self.check_teacher()?;
        self.on_policy.as_ref().map_or(Ok(()), |options| on_policy::check(NAME, options, training, self.teacher_cache.is_some()))?;
        training.check(NAME)
    }

    fn resolve(&mut self, folder: &std::path::Path) {
        let paths = self
            .teacher
            .iter_mut()
            .chain(self.teacher_cache.iter_mut())
            .chain(self.teacher_logits.iter_mut())
            .chain(self.more_teachers.iter_mut().flat_map(|teacher| [Some(&mut teacher.model), teacher.cache.as_mut()].into_iter().flatten()))
            .chain(self.training.final_checkpoint.iter_mut())
            .chain(self.student.as_mut().and_then(Student::path));
        paths.for_each(|path| *path = crate::files::resolve(folder, path));
    }

    fn reads(&self) -> Vec<std::path::PathBuf> {
        let mut student = self.student.clone();
        let further = self.more_teachers.iter().map(|teacher| &teacher.model);
        self.teacher.iter().chain(&self.teacher_logits).chain(further).cloned().chain(student.as_mut().and_then(Student::path).cloned()).collect()
    }

    fn reads_models(&self) -> Vec<std::path::PathBuf> {
        let student = self.student.iter().filter_map(|student| if let Student::Model(path) = student { Some(path) } else { None });
        student.chain(&self.teacher).chain(self.more_teachers.iter().map(|teacher| &teacher.model)).cloned().collect()
    }

    fn runs_on(&self) -> Option<Samples> {
        Some(Samples::Train)
    }

    fn trains_codes(&self, weight: &str) -> bool {
        let has_own_weights = matches!(self.student, Some(Student::Model(_) | Student::Config(_) | Student::Eagle3(_)));
        !has_own_weights && self.training.trains_codes(weight)
    }

    fn plan<'a>(&'a self, model: &'a Model, state: &'a RunState) -> Result<Plan<'a>> {
        let mut applied = Applied::new(NAME, self.options());
        if let Some(Student::Eagle3(options)) = &self.student {
            let head = options.attach(model, &self.training.losses, state.seed)?;
            let mut training = Training { targets: vec![head.pattern()?], ..self.training.clone() };
            let (student, renamed) = (head.model.clone(), head.names());
            let names: Vec<&str> = renamed.keys().map(String::as_str).collect();
            for group in &mut training.groups {
                group.targets = with_previous_names(std::mem::take(&mut group.targets), &names, &renamed);
            }
            return Job { renamed, head: Some(head), ..Job::new(applied, student, training, state) }.plan();
        }
        let teacher = Some(self.teacher(model, state)?);
        let student = match &self.student {
            Some(student) => student.create(model, state, &mut applied.notes)?,
            None => model.clone(),
        };
        let logits = (!self.teacher_logits.is_empty()).then_some(self.teacher_logits.as_slice());
        let more_teachers = more_teachers::open(&self.more_teachers, &student)?;
        let (cache, top) = (self.teacher_cache.as_deref(), self.teacher_top.unwrap_or(TOP));
        let job = Job { teacher, cache, top, logits, more_teachers, on_policy: self.on_policy, ..Job::new(applied, student, self.training.clone(), state) };
        job.plan()
    }

    fn remedy(&self) -> &'static str {
        REMEDY
    }
}
