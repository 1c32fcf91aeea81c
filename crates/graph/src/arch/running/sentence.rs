//! sentence-transformers models: `modules.json` specifies the pooling of token embeddings and further
//! layers.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::parts::{layer_norm, linear_with};
use super::{Keys, ReadKeys, Settings};
use crate::error::{Error, Result};
use crate::files;
use crate::ir::ops::{
    Add, Clip, Concat, Elu, Gelu, HardSigmoid, HardSwish, LeakyRelu, MaskedMean, Mish, Normalize, Relu, Select, Sigmoid, Silu, Softplus, Tanh, TokenChoice,
    TokenPool,
};
use crate::ir::{Builder, Op, ValueId};
use crate::store::Module;

/// A module after the transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct SentenceModule {
    kind: Kind,
    /// Names of its input and output, as modules refer to them.
    input: String,
    output: String,
}

/// The computation of a module.
#[derive(Debug, Clone, PartialEq)]
enum Kind {
    /// Pooling of token embeddings.
    Pooling(Pooling),
    /// L2 normalization.
    Normalize,
    /// A linear layer with the folder of its weights, an optional activation and an optional residual
    /// connection.
    Dense { folder: String, out: usize, bias: bool, function: Option<Op>, residual: bool },
    /// Layer normalization, with the folder of its weights.
    LayerNorm { folder: String },
}

/// A pooling method.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Pooling {
    /// The mean over tokens that are not padding.
    Mean,
    /// The first token.
    First,
    /// Another method, with its name.
    By(&'static str, TokenChoice),
    /// Concatenation of several methods.
    Several(Vec<Pooling>),
}

/// Pooling modes: names in newer files, keys in older files, and methods, in order of concatenation.
const MODES: [(&str, &str, Pooling); 6] = [
    ("cls", "pooling_mode_cls_token", Pooling::First),
    ("max", "pooling_mode_max_tokens", Pooling::By("max", TokenChoice::Max)),
    ("mean", "pooling_mode_mean_tokens", Pooling::Mean),
    ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens", Pooling::By("root_mean", TokenChoice::RootMean)),
    ("weightedmean", "pooling_mode_weightedmean_tokens", Pooling::By("weighted_mean", TokenChoice::WeightedMean)),
    ("lasttoken", "pooling_mode_lasttoken", Pooling::By("last", TokenChoice::Last)),
];

/// Keys that are accepted without being read. Prompts only matter where one is set (see `data`).
const POOLING_KEYS: Keys = Keys { harmless: &["embedding_dimension", "include_prompt", "word_embedding_dimension"], neutral: &[] };
/// Sizes are those of the weights.
const WIDTH_KEYS: Keys = Keys { harmless: &["dimension", "in_features"], neutral: &[] };

/// Name of the token embeddings.
const TOKENS: &str = "token_embeddings";
/// Name of the sentence embedding.
const SENTENCE: &str = "sentence_embedding";
/// Epsilon of layer normalization, which no file specifies.
const EPSILON: f64 = 1e-5;

/// The `config.json` of a module.
struct File {
    /// Path inside the model's folder.
    name: String,
    values: Map<String, Value>,
}

impl SentenceModule {
    /// Reads `modules.json` and the files of its modules; empty if it does not exist.
    pub fn open(folder: &Path) -> Result<Vec<SentenceModule>> {
        SentenceModule::described(folder).map(|(modules, _)| modules)
    }

    /// Whether another module has the same computation, possibly with a different width.
    pub fn is_like(&self, other: &SentenceModule) -> bool {
        let mut alike = other.clone();
        if let (Kind::Dense { out, .. }, Kind::Dense { out: other_out, .. }) = (&self.kind, &mut alike.kind) {
            *other_out = *out;
        }
        *self == alike
    }

    /// The kind of the module, with the folder of its weights.
    pub fn name(&self) -> String {
        match &self.kind {
            Kind::Pooling(_) => "Pooling".to_owned(),
            Kind::Normalize => "Normalize".to_owned(),
            Kind::Dense { folder, .. } => format!("Dense in `{folder}`"),
            Kind::LayerNorm { folder } => format!("LayerNorm in `{folder}`"),
        }
    }

    /// As [`open`](SentenceModule::open), and also returns the unknown keys of the modules' files.
    pub fn described(folder: &Path) -> Result<(Vec<SentenceModule>, Vec<String>)> {
        let (mut found, mut unknown) = (Vec::new(), Vec::new());
        for (index, Module { kind, folder: inside }) in Module::list(folder)?.into_iter().enumerate() {
            let refused = |what: String, hint: &str| Error::Unsupported { what: format!("{}: {what}", folder.join(Module::LIST).display()), hint: hint.into() };
            if kind == "Transformer" {
                if index > 0 || !inside.is_empty() {
                    return Err(refused(
                        format!("a transformer in `{inside}` as module {index}"),
                        "a transformer must be the first module, in the model's root folder",
                    ));
                }
                continue;
            }
            let file = File::open(folder, &inside, ["Dropout", "Normalize"].contains(&kind.as_str()))?;
            let read = ReadKeys::default();
            let settings = Settings::for_file(&file.values, &file.name).recording(&read);
            let (kind, from, keys) = match kind.as_str() {
                "Dropout" => continue,
                "Pooling" => (Kind::Pooling(file.pooling(&settings)?), TOKENS, POOLING_KEYS),
                "Normalize" => (Kind::Normalize, SENTENCE, WIDTH_KEYS),
                "LayerNorm" => (Kind::LayerNorm { folder: inside }, SENTENCE, WIDTH_KEYS),
                "Dense" => (file.dense(&settings, inside)?, SENTENCE, WIDTH_KEYS),
                other => {
                    let hint = "supported: Transformer, Pooling, Dense, LayerNorm, Normalize and Dropout of sentence-transformers";
                    return Err(refused(format!("module `{other}`"), hint));
                }
            };
            let (mut input, mut output) = (from, SENTENCE);
            if matches!(kind, Kind::Dense { .. } | Kind::Normalize) {
                input = settings.text_or("module_input_name", from)?;
                output = settings.text_or("module_output_name", input)?;
            }
            let (input, output) = (input.to_owned(), output.to_owned());
            unknown.extend(keys.check(&settings, &file.name)?.into_iter().map(|key| format!("{}: {key}", file.name)));
            found.push(SentenceModule { kind, input, output });
        }
        Ok((found, unknown))
    }
}

impl File {
    /// Reads the file of a module; an empty file if it does not exist and is optional.
    fn open(folder: &Path, inside: &str, is_optional: bool) -> Result<File> {
        Module::require_inside(folder, inside)?;
        let (name, path) = (format!("{inside}/config.json"), folder.join(inside).join("config.json"));
        if is_optional && (inside.is_empty() || !files::is_file(&path)) {
            return Ok(File { name, values: Map::new() });
        }
        let text = files::read_to_string(&path).map_err(Error::io("read", &path))?;
        let values = serde_json::from_str(&text).map_err(|e| Error::malformed(&path, e))?;
        Ok(File { name, values })
    }

    fn refused(&self, what: &str, hint: &str) -> Error {
        Error::Unsupported { what: format!("{}: {what}", self.name), hint: hint.into() }
    }

    fn dense(&self, settings: &Settings, folder: String) -> Result<Kind> {
        let class = settings.text_or("activation_function", "torch.nn.modules.activation.Tanh")?;
        // The defaults of PyTorch's classes.
        let function = match class.rsplit('.').next().filter(|_| class.starts_with("torch.")) {
            Some("Identity") => None,
            Some("Tanh") => Some(Tanh {}.into()),
            Some("ReLU") => Some(Relu {}.into()),
            Some("ReLU6") => Some(Clip { min: 0.0, max: 6.0 }.into()),
            Some("GELU") => Some(Gelu { tanh: false }.into()),
            Some("SiLU") => Some(Silu {}.into()),
            Some("Sigmoid") => Some(Sigmoid {}.into()),
            Some("LeakyReLU") => Some(LeakyRelu { alpha: 0.01 }.into()),
            Some("ELU") => Some(Elu { alpha: 1.0 }.into()),
            Some("Hardswish") => Some(HardSwish {}.into()),
            Some("Hardsigmoid") => Some(HardSigmoid { alpha: 1.0 / 6.0, beta: 0.5 }.into()),
            Some("Softplus") => Some(Softplus {}.into()),
            Some("Mish") => Some(Mish {}.into()),
            _ => {
                let hint =
                    "supported classes of torch.nn: Identity, Tanh, ReLU, ReLU6, GELU, SiLU, Sigmoid, LeakyReLU, ELU, Hardswish, Hardsigmoid, Softplus, Mish";
                return Err(self.refused(&format!("`activation_function` of \"{class}\""), hint));
            }
        };
        let (bias, residual) = (settings.flag_or("bias", true)?, settings.flag_or("use_residual", false)?);
        Ok(Kind::Dense { folder, out: settings.size("out_features")?, bias, function, residual })
    }

    fn pooling(&self, settings: &Settings) -> Result<Pooling> {
        let refused = |what: String| {
            let known = MODES.map(|(name, ..)| name).join(", ");
            self.refused(&what, &format!("supported: {known}; several modes are concatenated"))
        };
        let mut switched = Vec::new();
        for (_, key, pooling) in MODES {
            match settings.get(key) {
                None | Some(Value::Bool(false)) => {}
                Some(Value::Bool(true)) => switched.push(pooling),
                Some(value) => return Err(refused(format!("`{key}` is {value}, expected true or false"))),
            }
        }
        // Newer files name the modes, older files have a boolean for each.
        let named = |mode: &Value| {
            let found = MODES.into_iter().find(|(name, ..)| mode.as_str() == Some(name)).map(|(.., pooling)| pooling);
            found.ok_or_else(|| refused(format!("`pooling_mode` of {mode}")))
        };
        let mut modes = match settings.get("pooling_mode") {
            // The default of sentence-transformers 6.2.
            None if switched.is_empty() => vec![Pooling::Mean],
            None => switched,
            Some(Value::Array(modes)) => modes.iter().map(named).collect::<Result<_>>()?,
            Some(mode) => vec![named(mode)?],
        };
        match (modes.len(), modes.pop()) {
            (1, Some(mode)) => Ok(mode),
            (_, Some(last)) => {
                modes.push(last);
                Ok(Pooling::Several(modes))
            }
            (_, None) => Err(refused("pooling without a mode".to_owned())),
        }
    }
}

/// Adds the modules after `last_hidden_state`.
pub fn add(modules: &[SentenceModule], b: &mut Builder) -> Result<()> {
    if modules.is_empty() {
        return Ok(());
    }
    let tokens = b.found_output("last_hidden_state").ok_or_else(|| lacks("last_hidden_state"))?;
    let mut found = BTreeMap::from([(TOKENS, tokens)]);
    for (index, module) in modules.iter().enumerate() {
        let input = found.get(module.input.as_str()).copied();
        let input = input.ok_or_else(|| {
            Error::graph(Module::LIST, format!("module {} reads `{}`, which no earlier module computes", index.saturating_add(1), module.input))
        })?;
        found.insert(&module.output, module.kind.add(b, &node_of(index), input)?);
    }
    let sentence = found.get(SENTENCE).ok_or_else(|| Error::graph(Module::LIST, format!("no module computes `{SENTENCE}`")))?;
    b.output(SENTENCE, *sentence);
    Ok(())
}

/// Prefix of the names of a module's nodes.
fn node_of(index: usize) -> String {
    format!("sentence.{index}")
}

/// Whether a node belongs to the module with this index.
pub fn is_of_module(index: usize, node: &str) -> bool {
    node.strip_prefix(&node_of(index)).is_some_and(|rest| rest.starts_with('.'))
}

fn lacks(what: &str) -> Error {
    Error::graph(Module::LIST, format!("cannot pool a model without {what}"))
}

impl Kind {
    fn add(&self, b: &mut Builder, node: &str, x: ValueId) -> Result<ValueId> {
        match self {
            Kind::Pooling(pooling) => pooling.add(b, node, x),
            Kind::Normalize => b.node(&format!("{node}.normalize"), Normalize::default(), &[x]),
            Kind::LayerNorm { folder } => layer_norm(b, &format!("{node}.norm"), &format!("{folder}/norm"), x, EPSILON),
            Kind::Dense { folder, out, bias, function, residual } => {
                let module = format!("{folder}/linear");
                // Passes may have reduced the width.
                let out = b.stored_shape(&format!("{module}.weight")).and_then(|shape| shape.first().copied()).unwrap_or(*out);
                let mut y = linear_with(b, &format!("{node}.dense"), &module, x, out, *bias)?;
                if let Some(function) = function {
                    y = b.node(&format!("{node}.function"), function.clone(), &[y])?;
                }
                if !residual {
                    return Ok(y);
                }
                let around = if b.width(x)? == out { x } else { linear_with(b, &format!("{node}.residual"), &format!("{folder}/residual"), x, out, false)? };
                b.node(&format!("{node}.sum"), Add {}, &[y, around])
            }
        }
    }
}

impl Pooling {
    fn add(&self, b: &mut Builder, node: &str, x: ValueId) -> Result<ValueId> {
        let mask = |b: &Builder| b.find("attention_mask").ok_or_else(|| lacks("attention_mask"));
        match self {
            Pooling::Mean => {
                let mask = mask(b)?;
                b.node(&format!("{node}.mean"), MaskedMean {}, &[x, mask])
            }
            Pooling::First => b.node(&format!("{node}.first"), Select { index: 0 }, &[x]),
            Pooling::By(name, choice) => {
                let mask = mask(b)?;
                b.node(&format!("{node}.{name}"), TokenPool { choice: *choice }, &[x, mask])
            }
            Pooling::Several(modes) => {
                let parts = modes.iter().map(|mode| mode.add(b, node, x)).collect::<Result<Vec<_>>>()?;
                b.node(&format!("{node}.several"), Concat::default(), &parts)
            }
        }
    }
}
