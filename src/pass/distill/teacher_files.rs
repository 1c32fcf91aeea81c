//! Logits of a teacher from files, instead of a teacher.

use std::cell::RefCell;
use std::path::PathBuf;

use super::Distill;
use super::inputs::Inputs;
use super::masking;
use crate::error::{Error, Result, counted};
use crate::pass::Context;
use crate::store::ContentKey;
use crate::train::cache::Cache;
use crate::train::{TeacherFiles, Team};

const OPTION: &str = "distill: teacher_logits";

/// Name of the folder of the converted logits, next to the checkpoints.
const FOLDER: &str = "teacher-logits";

/// Rejects options that files of logits exclude.
pub(super) fn check(pass: &Distill) -> Result<()> {
    let losses = &pass.training.losses;
    let soft = losses.soft.as_ref();
    let others = losses.hidden.is_some() || losses.attention.is_some() || losses.embedding.is_some();
    let reason = if pass.teacher.is_some() {
        "cannot be combined with `teacher`, whose logits the files contain: remove one of them"
    } else if others || soft.is_none() {
        "needs `losses` with `soft`, and with `hard` at most: the files contain only logits"
    } else if soft.is_some_and(|soft| soft.temperature != 1.0) {
        "needs `soft: { temperature: 1 }`, because the probability of tokens that the files do not list is known only at this temperature"
    } else if pass.on_policy.is_some() {
        "cannot be combined with `on_policy`, which changes the texts in each step"
    } else if pass.training.augment.is_some() || pass.training.masking.is_some() {
        "cannot be combined with `augment` and `masking`, which change the samples in each step"
    } else {
        return Ok(());
    };
    Err(Error::option(OPTION, reason))
}

/// A cache with the logits of all samples from files, and a note. Of several ranks, the first one converts
/// the files, and the others only what they do not find on their disk.
pub(super) fn cache(
    files: &[PathBuf],
    (folder, top): (Option<PathBuf>, usize),
    inputs: &Inputs,
    (context, team): (&Context, &Team),
) -> Result<(RefCell<Cache>, String)> {
    if inputs.data.is_packed() {
        return Err(Error::option(OPTION, "cannot be combined with `packing`: a sample must be one text"));
    }
    if !masking::is_causal(&inputs.graph) {
        return Err(Error::option(OPTION, "needs a model that predicts the next token, because the files contain its probabilities"));
    }
    let Some(logits) = inputs.objective.over_logits() else { return Err(Error::option(OPTION, "needs a loss over logits")) };
    let mut key = ContentKey::new(&context.work);
    files.iter().try_for_each(|path| key.files([path], path.parent().unwrap_or(path)))?;
    key.line(&format!("{} files", env!("CARGO_PKG_VERSION")));
    let folder = folder.or_else(|| Some(context.checkpoints.as_ref()?.folder.join(FOLDER)));
    let folder = folder.ok_or_else(|| Error::option(OPTION, "needs a folder for the converted logits: set `teacher_cache`"))?;
    let key = key.name();
    let converted = || {
        let mut cache = inputs.objective.open_cache(&folder, &key, top)?;
        let added = TeacherFiles::fill(files, &mut cache, logits, &inputs.samples, &context.work)?;
        Ok((cache, added))
    };
    let in_turn = || {
        let mut own = None;
        let added = team.broadcast(|| {
            let (cache, added) = converted()?;
            own = Some(cache);
            Ok(added)
        })?;
        let cache = own.map_or_else(|| converted().map(|(cache, _)| cache), Ok)?;
        team.wait().map(|()| (cache, added))
    };
    let (cache, added) = in_turn().inspect_err(|error| team.stop(error))?;
    let note = format!("the logits of {} were read from files, {added} of them in this run", counted(inputs.samples.count()?, "sample"));
    Ok((RefCell::new(cache), note))
}
