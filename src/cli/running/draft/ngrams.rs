//! `compress draft --method ngrams`

use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use super::{Args, draft_note, first_set, interrupted};
use crate::cli::args::Global;
use crate::cli::output;
use crate::data::Data;
use crate::error::{Error, Result, counted};
use crate::generation::{LanguageModel, Ngrams};
use crate::model::Model;
use crate::output::ResumeFolder;
use crate::pipeline::draft::Prompts;
use crate::pipeline::memory_limit;

/// Checks that the file can be written, before the long part.
pub(super) fn check_output(path: &Path, force: bool) -> Result<()> {
    if path.extension().is_none_or(|end| end != "npz") || path.is_dir() {
        return Err(Error::option("--output", "must be a file FILE.npz with `--method ngrams`: the draft is a file with the continuations"));
    }
    crate::output::require_local(path, "unfinished work is stored next to the output")?;
    if path.symlink_metadata().is_ok() && !force {
        return Err(Error::Output { path: path.to_owned(), reason: "exists".into(), hint: "set `force` to replace it, or choose another name".into() });
    }
    crate::output::check_file_writable(path)
}

impl Args {
    /// Rejects options of the training and of written models.
    pub(super) fn require_no_training(&self) -> Result<()> {
        let writing = &self.writing;
        let options =
            [(!writing.exports().is_empty(), "--export"), (!writing.runtimes.loads.is_empty(), "--loads"), (writing.allow_nonfinite, "--allow-nonfinite")];
        let of_output = || first_set(options).or_else(|| writing.records.specified());
        match self.training_option().or_else(of_output) {
            Some(name) => Err(Error::option(name, "has no effect with `--method ngrams`, which neither trains nor writes a model: remove it")),
            None => Ok(()),
        }
    }

    /// Moves the continuations to the output, and measures them as a draft.
    pub(super) fn finish_ngrams(&self, model: &Model, (data, folder): (&Data, ResumeFolder), prompts: &Prompts, global: &Global) -> Result<()> {
        let path = data.arrays.clone().unwrap_or_default();
        let language = || LanguageModel::new(model.clone());
        let ngrams = Arc::new(Ngrams::open(&path, &language()?.vocabulary()?)?);
        let test = self.test(prompts);
        let measured = (!self.writing.no_measure).then(|| {
            let device = global.models.device.open()?;
            let memory = memory_limit(global.models.memory, &device);
            let open = |tokens: Option<usize>| tokens.map_or_else(language, |tokens| language()?.with_ngrams(ngrams.clone(), tokens));
            global.work(|work| test.measure(open, (&device, memory), work))
        });
        let measured = measured.transpose().map_err(|error| if let Error::Cancelled = error { interrupted(folder.path()) } else { error })?;
        fs::rename(&path, &self.output).map_err(Error::io("create", &self.output))?;
        folder.remove()?;
        let (quality, notes) = measured.unzip();
        let mut notes = notes.unwrap_or_default();
        notes.splice(0..0, [draft_note(self, prompts)].into_iter().chain(self.not_continued(prompts)));
        let tokens = ngrams.tokens();
        if global.json {
            return output::json(&json!({ "output": self.output.to_string_lossy(), "tokens": tokens, "draft": quality, "notes": notes }));
        }
        let table = quality.map_or(String::new(), |quality| quality.text());
        let notes: String = notes.iter().map(|note| format!(" note: {note}\n")).collect();
        let continuations = counted(self.samples().count, "continuation");
        output::print(&format!("{}: {continuations}, {} with the ends of their prompts\n{table}{notes}", self.output.display(), counted(tokens, "token")))
    }
}
