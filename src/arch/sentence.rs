//! sentence-transformers: `modules.json` says how token vectors become one.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Keys, ReadKeys, Settings};
use crate::error::{Error, Result};
use crate::files;
use crate::ir::Builder;
use crate::ir::ops::{MaskedMean, Normalize, Select};

/// A module behind the transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over tokens that are no padding.
    Mean,
    /// The first token.
    First,
    /// Vectors of length one.
    Normalize,
}

/// Keys of a pooling's `config.json` beside the modes that are known. A prompt counts only where one is set (see `data`).
const KEYS: Keys = Keys {
    harmless: &["embedding_dimension", "include_prompt", "word_embedding_dimension"],
    neutral: &[
        ("pooling_mode_lasttoken", "false"),
        ("pooling_mode_max_tokens", "false"),
        ("pooling_mode_mean_sqrt_len_tokens", "false"),
        ("pooling_mode_weightedmean_tokens", "false"),
    ],
};

impl Pooling {
    /// Reads `modules.json` and what it names; none when there is no such file.
    ///
    /// # Errors
    /// The files cannot be read, or name something that is not supported.
    pub fn open(folder: &Path) -> Result<Vec<Pooling>> {
        Pooling::described(folder).map(|(modules, _)| modules)
    }

    /// The same, with the keys of the modules' files that are not known.
    ///
    /// # Errors
    /// As [`open`](Pooling::open).
    pub fn described(folder: &Path) -> Result<(Vec<Pooling>, Vec<String>)> {
        let path = folder.join("modules.json");
        let (mut found, mut unknown) = (Vec::new(), Vec::new());
        if !files::is_file(&path) {
            return Ok((found, unknown));
        }
        let modules: Value = read(&path)?;
        for module in modules.as_array().into_iter().flatten() {
            let kind = module.get("type").and_then(Value::as_str).unwrap_or("");
            match kind.rsplit('.').next().unwrap_or("") {
                "Transformer" => {}
                "Normalize" => found.push(Pooling::Normalize),
                "Pooling" => found.push(pooling(folder, module, &path, &mut unknown)?),
                other => {
                    return Err(Error::Unsupported {
                        what: format!("{}: module `{other}`", path.display()),
                        hint: "known: Transformer, Pooling, Normalize".into(),
                    });
                }
            }
        }
        Ok((found, unknown))
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let text = files::read_to_string(path).map_err(Error::io("read", path))?;
    serde_json::from_str(&text).map_err(|e| Error::malformed(path, e))
}

fn pooling(folder: &Path, module: &Value, path: &Path, unknown: &mut Vec<String>) -> Result<Pooling> {
    let inside = module.get("path").and_then(Value::as_str).unwrap_or("");
    if !Path::new(inside).components().all(|part| matches!(part, std::path::Component::Normal(_))) {
        return Err(Error::malformed(path, format!("names a folder outside the model: `{inside}`")));
    }
    let (file, path) = (format!("{inside}/config.json"), folder.join(inside).join("config.json"));
    let (values, read): (Map<String, Value>, _) = (read(&path)?, ReadKeys::default());
    let settings = Settings::new(&values).noting(&read);
    // Files of newer versions name the mode, older ones set a switch for each.
    let named = settings.get("pooling_mode").map(|mode| mode.as_str().unwrap_or(""));
    let chosen = |name: &str, key: &str| {
        let on = settings.flag_or(key, false)?;
        Ok::<_, Error>(named.map_or(on, |mode| mode == name))
    };
    let modes = (chosen("mean", "pooling_mode_mean_tokens")?, chosen("cls", "pooling_mode_cls_token")?);
    unknown.extend(KEYS.sort(&settings, &file)?.into_iter().map(|key| format!("{file}: {key}")));
    let refused =
        |what: &str| Err(Error::Unsupported { what: format!("{}: {what}", path.display()), hint: "known: mean of tokens, first token; one of them".into() });
    match modes {
        (true, false) => Ok(Pooling::Mean),
        (false, true) => Ok(Pooling::First),
        (true, true) => refused("`pooling_mode_mean_tokens` and `pooling_mode_cls_token` at once"),
        (false, false) => refused(&named.map_or("a pooling without a mode".to_owned(), |mode| format!("`pooling_mode` of \"{mode}\""))),
    }
}

/// Adds the modules behind `last_hidden_state`.
pub(super) fn add(modules: &[Pooling], b: &mut Builder) -> Result<()> {
    if modules.is_empty() {
        return Ok(());
    }
    let lacks = |what: &str| Error::graph("modules.json", format!("pools a model that has no {what}"));
    let mut x = b.found_output("last_hidden_state").ok_or_else(|| lacks("last_hidden_state"))?;
    for (index, module) in modules.iter().enumerate() {
        x = match module {
            Pooling::Mean => {
                let mask = b.find("attention_mask").ok_or_else(|| lacks("attention_mask"))?;
                b.node(&format!("sentence.{index}.mean"), MaskedMean {}, &[x, mask])?
            }
            Pooling::First => b.node(&format!("sentence.{index}.first"), Select { index: 0 }, &[x])?,
            Pooling::Normalize => b.node(&format!("sentence.{index}.normalize"), Normalize {}, &[x])?,
        };
    }
    b.output("sentence_embedding", x);
    Ok(())
}
