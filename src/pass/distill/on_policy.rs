//! Training on continuations of the student.

use crate::data::Data;
use crate::error::{Error, Result};
use crate::ir::Graph;
use crate::model::Model;
use crate::train::{Objective, OnPolicy, OnPolicySampler, Training};

/// Rejects options that cannot be combined with continuations of the student.
pub(super) fn check(pass: &str, options: &OnPolicy, training: &Training, has_cache: bool) -> Result<()> {
    options.check(pass)?;
    let reason = if has_cache {
        "cannot be combined with `teacher_cache`: the student writes different texts in each step"
    } else if training.losses.soft.is_none() || training.losses.hard.is_some() {
        "needs `losses` with `soft` and without `hard`: a continuation of the student has no labels, only the outputs of the teacher"
    } else if training.pages_parameters() {
        "cannot be combined with `offload: parameters` and `shard: parameters`: every generated token reads all weights"
    } else {
        return Ok(());
    };
    Err(Error::option(format!("{pass}: on_policy"), reason))
}

/// The sampler of a student with the graph of its training. Fails if it does not continue texts.
pub(super) fn sampler(
    options: Option<OnPolicy>,
    (student, graph): (&Model, &Graph),
    objective: &Objective,
    data: Option<&Data>,
) -> Result<Option<OnPolicySampler>> {
    let Some(options) = options else { return Ok(None) };
    let refused = |reason: String| Error::option("distill: on_policy", reason);
    if data.is_some_and(Data::is_packed) {
        return Err(refused("cannot be combined with `packing`: a sample must have one prompt".to_owned()));
    }
    // The teacher may have fewer rows in its embedding.
    let tokens = objective.over_logits().map_or(usize::MAX, |logits| logits.classes);
    let sampler = OnPolicySampler::new(options, student.clone(), graph.clone(), tokens);
    sampler.map(Some).map_err(|e| refused(format!("needs a student that continues texts: {e}")))
}
