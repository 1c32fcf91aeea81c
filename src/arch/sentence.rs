//! sentence-transformers: `modules.json` says how token vectors become one.

use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};
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

impl Pooling {
    /// Reads `modules.json` and what it names; none when there is no such file.
    ///
    /// # Errors
    /// The files cannot be read, or name something that is not supported.
    pub fn open(folder: &Path) -> Result<Vec<Pooling>> {
        let path = folder.join("modules.json");
        if !path.is_file() {
            return Ok(Vec::new());
        }
        let modules = read(&path)?;
        let mut found = Vec::new();
        for module in modules.as_array().into_iter().flatten() {
            let kind = module.get("type").and_then(Value::as_str).unwrap_or("");
            match kind.rsplit('.').next().unwrap_or("") {
                "Transformer" => {}
                "Normalize" => found.push(Pooling::Normalize),
                "Pooling" => found.push(pooling(folder, module, &path)?),
                other => {
                    return Err(Error::Unsupported {
                        what: format!("{}: module `{other}`", path.display()),
                        hint: "known: Transformer, Pooling, Normalize".into(),
                    });
                }
            }
        }
        Ok(found)
    }
}

fn read(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    serde_json::from_str(&text).map_err(|e| Error::malformed(path, e))
}

fn pooling(folder: &Path, module: &Value, path: &Path) -> Result<Pooling> {
    let inside = module.get("path").and_then(Value::as_str).unwrap_or("");
    if !Path::new(inside).components().all(|part| matches!(part, std::path::Component::Normal(_))) {
        return Err(Error::malformed(path, format!("names a folder outside the model: `{inside}`")));
    }
    let path = folder.join(inside).join("config.json");
    let config = read(&path)?;
    // Files of newer versions name the mode, older ones set a switch for each.
    let named = config.get("pooling_mode").and_then(Value::as_str);
    let chosen = |name: &str, key: &str| named.map_or_else(|| config.get(key) == Some(&Value::Bool(true)), |mode| mode == name);
    match (chosen("mean", "pooling_mode_mean_tokens"), chosen("cls", "pooling_mode_cls_token")) {
        (true, false) => Ok(Pooling::Mean),
        (false, true) => Ok(Pooling::First),
        _ => Err(Error::Unsupported { what: format!("{}: this pooling", path.display()), hint: "known: mean of tokens, first token; one of them".into() }),
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
