//! sentence-transformers: `modules.json` says how token vectors become one.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Keys, ReadKeys, Settings};
use crate::error::{Error, Result};
use crate::files;
use crate::ir::ops::{Concat, MaskedMean, Normalize, Select, TokenChoice, TokenPool};
use crate::ir::{Builder, ValueId};

/// A module behind the transformer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over tokens that are no padding.
    Mean,
    /// The first token.
    First,
    /// The largest number of each column, of tokens that are no padding.
    Max,
    /// The sum of tokens that are no padding, divided by the root of how many there are.
    RootMean,
    /// The mean over tokens that are no padding, in which later ones count more.
    WeightedMean,
    /// The last token that is no padding.
    Last,
    /// Several of these, one behind the other.
    Several(Vec<Pooling>),
    /// Vectors of length one.
    Normalize,
}

/// Modes of pooling by the names of newer versions, with the switches of older ones, in the order in which those put them together.
const MODES: [(&str, &str, Pooling); 6] = [
    ("cls", "pooling_mode_cls_token", Pooling::First),
    ("max", "pooling_mode_max_tokens", Pooling::Max),
    ("mean", "pooling_mode_mean_tokens", Pooling::Mean),
    ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens", Pooling::RootMean),
    ("weightedmean", "pooling_mode_weightedmean_tokens", Pooling::WeightedMean),
    ("lasttoken", "pooling_mode_lasttoken", Pooling::Last),
];

/// Keys of a pooling's `config.json` beside the modes. A prompt counts only where one is set (see `data`).
const KEYS: Keys = Keys { harmless: &["embedding_dimension", "include_prompt", "word_embedding_dimension"], neutral: &[] };

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
    let refused = |what: String| {
        let known = MODES.map(|(name, ..)| name).join(", ");
        Error::Unsupported { what: format!("{}: {what}", path.display()), hint: format!("known: {known}; several are put one behind the other") }
    };
    let mut switched = Vec::new();
    for (_, key, pooling) in MODES {
        match settings.get(key) {
            None | Some(Value::Bool(false)) => {}
            Some(Value::Bool(true)) => switched.push(pooling),
            Some(value) => return Err(refused(format!("`{key}` is {value}, expected true or false"))),
        }
    }
    // Files of newer versions name the modes, older ones set a switch for each.
    let named = |mode: &Value| {
        let found = MODES.into_iter().find(|(name, ..)| mode.as_str() == Some(name)).map(|(.., pooling)| pooling);
        found.ok_or_else(|| refused(format!("`pooling_mode` of {mode}")))
    };
    let mut modes = match settings.get("pooling_mode") {
        // As in sentence-transformers 6.2.
        None if switched.is_empty() => vec![Pooling::Mean],
        None => switched,
        Some(Value::Array(modes)) => modes.iter().map(named).collect::<Result<_>>()?,
        Some(mode) => vec![named(mode)?],
    };
    unknown.extend(KEYS.sort(&settings, &file)?.into_iter().map(|key| format!("{file}: {key}")));
    match (modes.len(), modes.pop()) {
        (1, Some(mode)) => Ok(mode),
        (_, Some(last)) => {
            modes.push(last);
            Ok(Pooling::Several(modes))
        }
        (_, None) => Err(refused("a pooling without a mode".to_owned())),
    }
}

/// Adds the modules behind `last_hidden_state`.
pub(super) fn add(modules: &[Pooling], b: &mut Builder) -> Result<()> {
    if modules.is_empty() {
        return Ok(());
    }
    let mut x = b.found_output("last_hidden_state").ok_or_else(|| lacks("last_hidden_state"))?;
    for (index, module) in modules.iter().enumerate() {
        x = module.add(b, &format!("sentence.{index}"), x)?;
    }
    b.output("sentence_embedding", x);
    Ok(())
}

fn lacks(what: &str) -> Error {
    Error::graph("modules.json", format!("pools a model that has no {what}"))
}

impl Pooling {
    fn add(&self, b: &mut Builder, node: &str, x: ValueId) -> Result<ValueId> {
        let mask = |b: &Builder| b.find("attention_mask").ok_or_else(|| lacks("attention_mask"));
        let pool = |b: &mut Builder, name: &str, choice| {
            let mask = mask(b)?;
            b.node(&format!("{node}.{name}"), TokenPool { choice }, &[x, mask])
        };
        match self {
            Pooling::Mean => {
                let mask = mask(b)?;
                b.node(&format!("{node}.mean"), MaskedMean {}, &[x, mask])
            }
            Pooling::First => b.node(&format!("{node}.first"), Select { index: 0 }, &[x]),
            Pooling::Max => pool(b, "max", TokenChoice::Max),
            Pooling::RootMean => pool(b, "root_mean", TokenChoice::RootMean),
            Pooling::WeightedMean => pool(b, "weighted_mean", TokenChoice::WeightedMean),
            Pooling::Last => pool(b, "last", TokenChoice::Last),
            Pooling::Several(modes) => {
                let parts = modes.iter().map(|mode| mode.add(b, node, x)).collect::<Result<Vec<_>>>()?;
                b.node(&format!("{node}.several"), Concat::default(), &parts)
            }
            Pooling::Normalize => b.node(&format!("{node}.normalize"), Normalize {}, &[x]),
        }
    }
}
