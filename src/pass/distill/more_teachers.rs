//! Teachers in addition to `teacher`, whose probabilities are averaged.

use std::cell::RefCell;
use std::path::PathBuf;
use std::str::FromStr;

use candle_core::{DType, Device};
use serde::{Deserialize, Serialize};

use super::inputs::{Inputs, require_same_preprocessing, teacher_cache_key};
use super::{Distill, masking, packing, vocabulary};
use crate::error::{Error, ParseError, Result};
use crate::evaluation::Subject;
use crate::exec::{MemoryCategory, MemoryTracker};
use crate::ir::{Graph, Op, subgraph};
use crate::model::Model;
use crate::pass::Context;
use crate::train::{FurtherTeacher, Objective, Teacher, Training};

const OPTION: &str = "distill: more_teachers";

/// A further teacher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MoreTeacher {
    /// Folder of the model
    pub model: PathBuf,
    /// Weight of its probabilities; that of `teacher` is 1
    #[serde(default = "one")]
    pub weight: f64,
    /// Folder that caches its largest logits, like `teacher_cache`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<PathBuf>,
}

fn one() -> f64 {
    1.0
}

impl FromStr for MoreTeacher {
    type Err = ParseError;

    /// Parses the recipe syntax, or a folder.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        if text.contains('{') {
            return serde_saphyr::from_str(text).map_err(|e| ParseError::from(e.to_string()));
        }
        Ok(MoreTeacher { model: text.into(), weight: one(), cache: None })
    }
}

/// Rejects options that several teachers exclude.
pub(super) fn check(pass: &Distill) -> Result<()> {
    let losses = &pass.training.losses;
    let has_others = losses.hidden.is_some() || losses.attention.is_some() || losses.embedding.is_some();
    let reason = if pass.more_teachers.iter().any(|teacher| !(teacher.weight.is_finite() && teacher.weight > 0.0)) {
        "`weight` must be a finite number greater than 0"
    } else if losses.soft.is_none() || has_others {
        "needs `losses` with `soft`, and no `hidden`, `attention` and `embedding` loss: only probabilities are averaged"
    } else if !pass.teacher_logits.is_empty() {
        "cannot be combined with `teacher_logits`"
    } else if pass.teacher_top.is_some() && pass.teacher_cache.is_none() && pass.more_teachers.iter().all(|teacher| teacher.cache.is_none()) {
        "has no `cache`, which `teacher_top` requires"
    } else if pass.on_policy.is_some() && pass.more_teachers.iter().any(|teacher| teacher.cache.is_some()) {
        "`cache` cannot be combined with `on_policy`: the student writes different texts in each step"
    } else {
        return Ok(());
    };
    Err(Error::option(OPTION, reason))
}

/// Opens the models, and checks that their vocabularies and logits are those of the student.
pub(super) fn open(teachers: &[MoreTeacher], student: &Model) -> Result<Vec<(Model, MoreTeacher)>> {
    let open = |teacher: &MoreTeacher| {
        let model = student.open_like(&teacher.model).map_err(|e| if matches!(e, Error::Io { .. }) { Error::option(OPTION, e) } else { e })?;
        vocabulary::require_same(student, &model)?;
        vocabulary::require_same_classes(student, &model)?;
        masking::require_same_positions(student, &model)?;
        Ok((model, teacher.clone()))
    };
    teachers.iter().map(open).collect()
}

/// Checks the logits of further teachers against those of the objective.
pub(super) fn require_same_logits(teachers: &[(Model, MoreTeacher)], objective: &Objective) -> Result<()> {
    teachers.iter().try_for_each(|(model, _)| objective.further_source(&model.graph()?).map(drop))
}

/// Loads further teachers, with their caches. The tracker has the bytes of all teachers then.
pub(super) fn load(
    teachers: &[(Model, MoreTeacher)],
    inputs: &Inputs,
    (context, training, (device, dtype), top): (&Context, &Training, (&Device, DType), usize),
    first: Option<&Teacher>,
    tracker: &MemoryTracker,
) -> Result<Vec<FurtherTeacher>> {
    let mut loaded = Vec::new();
    for (model, options) in teachers {
        model.check_contents(&context.work)?;
        require_same_preprocessing(&inputs.samples, &*context.data.open(inputs.data, Subject::from_model(model.clone())?.target())?)?;
        let whole: Graph = model.graph()?;
        let (source, head) = inputs.objective.further_source(&whole)?;
        let values = [source.value().clone()];
        let graph = packing::for_samples(subgraph(&whole, &values, &Op::clone)?, inputs.data)?;
        let placement = (device, dtype, training.offloads_parameters());
        let teacher = Teacher::load(model, &graph, (&values, &head), placement, tracker, &context.work)?;
        let cache = match &options.cache {
            Some(folder) => {
                let key = teacher_cache_key(model, &whole, training, dtype, device, &context.work)?;
                Some(RefCell::new(inputs.objective.open_cache(folder, &key, top)?))
            }
            None => None,
        };
        loaded.push(FurtherTeacher { weight: options.weight, source, head, teacher, cache });
    }
    if !loaded.is_empty() && !training.offloads_parameters() {
        let bytes = loaded.iter().map(|further| &further.teacher).chain(first).map(|teacher| teacher.parameters().bytes()).sum();
        tracker.set(MemoryCategory::Teacher, bytes)?;
    }
    Ok(loaded)
}
