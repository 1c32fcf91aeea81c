//! Identity of checkpoints: they are resumed only by a run that would have written the same ones.

use serde_json::Value;

use crate::data::Data;
use crate::error::Result;
use crate::ir::Graph;
use crate::model::Model;
use crate::run_state::RunState;
use crate::store::ContentKey;
use crate::work::Work;

/// Returns a hash of everything that determines the result of a pass: the contents of all files of the
/// model and its teacher (including the tokenizer, its settings and the chat template), of the samples,
/// and of the files that earlier passes read, the previous passes, the options and the seed.
pub(super) fn identity(
    (model, teacher): (&Model, Option<&Model>),
    run: &RunState,
    graph: &Graph,
    options: &Value,
    data: Option<&Data>,
    (seed, work): (u64, &Work),
) -> Result<String> {
    let mut key = ContentKey::new(work);
    let history: Vec<_> = run.history.iter().map(|applied| (applied.name, &applied.options)).collect();
    key.line(&format!("{} {seed} {options} {data:?} {history:?}\n{graph}", env!("CARGO_PKG_VERSION")));
    for model in [Some(model), teacher].into_iter().flatten() {
        key.files(model.inputs(), &model.path)?;
    }
    for (reader, paths) in &run.files_read {
        key.line(reader);
        paths.iter().try_for_each(|path| key.files([path], path.parent().unwrap_or(path)))?;
    }
    data.into_iter().flat_map(Data::paths).try_for_each(|path| key.files([path], path.parent().unwrap_or(path)))?;
    Ok(key.name())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::work::{Cancel, Silent};

    /// Resuming after one of these files has changed would combine blocks that were calibrated on
    /// different tokens.
    #[test]
    fn every_file_that_determines_the_tokens_is_part_of_the_identity() {
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
        let found = || {
            let data = Data { text: Some(folder.path().join("samples.txt")), images: Some(folder.path().join("images")), ..Data::default() };
            let (model, work) = (Model::open(&model).unwrap(), Work { threads: 1, progress: &Silent, cancel: &cancel });
            let graph = model.graph().unwrap();
            identity((&model, None), &RunState::default(), &graph, &Value::Null, Some(&data), (0, &work)).unwrap()
        };
        let before = found();
        assert_eq!(before, found());
        for name in files {
            // Other bytes of the same length and with the same modification time.
            let path = folder.path().join(name);
            let time = fs::metadata(&path).unwrap().modified().unwrap();
            fs::write(&path, "[]").unwrap();
            fs::File::options().append(true).open(&path).unwrap().set_modified(time).unwrap();
            assert_ne!(before, found(), "{name}");
            fs::write(&path, "{}").unwrap();
            assert_eq!(before, found(), "{name}");
        }
    }
}
