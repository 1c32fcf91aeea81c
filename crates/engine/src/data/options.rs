//! Data options of a recipe.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::Target;
use crate::arch::Settings;
use crate::error::{Error, Result};

/// Task that a data set is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// Single-label classification: accuracy, F1
    Classification,
    /// Next-token prediction: perplexity
    #[serde(alias = "language-modeling")]
    #[cfg_attr(feature = "cli", value(alias = "language-modeling"))]
    LanguageModelling,
    /// Semantic textual similarity: Spearman correlation of the cosine similarity with a score
    Embedding,
    /// Pairs of matching texts, for the contrastive loss of a training
    Contrastive,
    /// No labels: outputs are compared only with those of another model
    Fidelity,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Task::Classification => "classification",
            Task::LanguageModelling => "language-modelling",
            Task::Embedding => "embedding",
            Task::Contrastive => "contrastive",
            Task::Fidelity => "fidelity",
        })
    }
}

/// A column, by name or by number from 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "a number from 0, or a name; names like \"y\" and \"no\" need quotes")]
pub enum Column {
    /// By number, from 0.
    Index(usize),
    /// By name.
    Name(String),
}

impl FromStr for Column {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        Ok(text.parse().map_or_else(|_| Column::Name(text.to_owned()), Column::Index))
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Column::Index(index) => write!(f, "{index}"),
            Column::Name(name) => f.write_str(name),
        }
    }
}

/// Which windows of a text are taken if `samples` limits them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WindowSampling {
    /// The first ones
    First,
    /// Windows that start at lines spread evenly over a file of plain text
    Spread,
}

/// Tokens of chats that losses and perplexity predict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LossOn {
    /// All tokens
    All,
    /// The text of the assistant: the generation blocks of the chat template, or else the text that its
    /// messages add
    Assistant,
}

/// How labels identify classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LabelKind {
    /// By index, from 0
    Index,
    /// By name, from id2label or label2id of config.json
    Name,
}

/// Samples: one of `text`, `images`, `arrays`, `source` and `mix`, and options for reading them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// Text: .txt or .raw (one sample per line), .csv, .tsv or .jsonl
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<PathBuf>,
    /// Images: a folder with one subfolder per class, or an IDX file (MNIST format, optionally .gz)
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATH", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<PathBuf>,
    /// Arrays with one row per sample: .safetensors, .npz, or a folder with one .npy per input; or a
    /// folder with one such file per run
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATH", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrays: Option<PathBuf>,
    /// Texts to mix, each with its own options and `weight`; other options apply to all of them
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<Data>,
    /// Probability of a sample of this text in `mix`, relative to the sum of all weights [default: 1]
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Name of a data source that the program has registered
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Name of a metric that the program has registered [default: the metric of the task]
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
    /// Task [default: chosen from the data and the model's outputs]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
    /// Column of the text [default: text, sentence, or messages (chats, in .jsonl), or the only one with
    /// `header: true`]
    #[cfg_attr(feature = "cli", arg(long, value_name = "COLUMN", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_column: Option<Column>,
    /// Column of the second text of a pair; for encoder-decoder models, the target text
    #[cfg_attr(feature = "cli", arg(long, value_name = "COLUMN", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pair_column: Option<Column>,
    /// Column of a text that does not match the first one (a hard negative), for `task: contrastive`
    #[cfg_attr(feature = "cli", arg(long, value_name = "COLUMN", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub negative_column: Option<Column>,
    /// Column or array of the label: a class index or name, a score, or the decoder's target tokens
    #[cfg_attr(feature = "cli", arg(long, value_name = "COLUMN", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_column: Option<Column>,
    /// How labels identify classes [default: numbers by index; text by name, or by index if no class has
    /// this name]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_kind: Option<LabelKind>,
    /// Labels of an IDX file of images
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<PathBuf>,
    /// Whether the first line of .csv and .tsv contains the column names [default: true]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<bool>,
    /// Character between columns [default: a comma, in .tsv a tab]
    #[cfg_attr(feature = "cli", arg(long, value_name = "CHARACTER", value_parser = values::delimiter, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delimiter: Option<char>,
    /// Whether values may be quoted with `"` [default: true, in .tsv false]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quoting: Option<bool>,
    /// Mapping of model inputs to arrays
    #[cfg_attr(feature = "cli", arg(long = "input", value_name = "INPUT=ARRAY", value_parser = values::pair, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Vec::is_empty", with = "pairs")]
    #[cfg_attr(feature = "cli", schemars(with = "std::collections::BTreeMap<String, String>"))]
    pub inputs: Vec<(String, String)>,
    /// Maximum sequence length in tokens; longer texts are truncated [default: the model's maximum; 1024
    /// for perplexity]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// Stride of the windows in tokens, for perplexity [default: windows do not overlap]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// Maximum number of samples (windows, for perplexity) [default: all]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,
    /// Which windows of a text to take, for perplexity [default: first]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling: Option<WindowSampling>,
    /// Tokens of chats that losses and perplexity predict [default: all]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_on: Option<LossOn>,
    /// Whether to append the end-of-text token to every text that is split into windows [default: false]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub append_eos: Option<bool>,
    /// Whether to pack several short texts into a window, as one sample of a training [default: false]
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packing: Option<bool>,
    /// Samples per batch [default: 32, or 4 windows of a text; fewer if that exceeds 2048 tokens]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// Height and width to resize images to, or the length of the shorter side [default: from
    /// preprocessor_config.json]
    #[cfg_attr(feature = "cli", arg(long, num_args = 1..=2, value_names = ["HEIGHT", "WIDTH"], help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "sides")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Sides>"))]
    pub resize: Option<Vec<usize>>,
    /// Height and width of a center crop after resizing, or the side of a square
    #[cfg_attr(feature = "cli", arg(long, num_args = 1..=2, value_names = ["HEIGHT", "WIDTH"], help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "sides")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Sides>"))]
    pub crop: Option<Vec<usize>>,
    /// Axis order of the model's image input [default: from the shape of the input]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<ImageLayout>,
    /// Channel order of the model's image input [default: rgb]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channels: Option<ChannelOrder>,
    /// Factor on pixels [default: from preprocessor_config.json, otherwise 1 for arrays and integer
    /// inputs, 1/255 for images]
    #[cfg_attr(feature = "cli", arg(long, alias = "scale", value_name = "FACTOR", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none", alias = "scale")]
    pub rescale: Option<f64>,
    /// Mean to subtract from each channel after applying the factor, in the model's channel order
    #[cfg_attr(feature = "cli", arg(long, value_delimiter = ',', value_name = "NUMBERS", help_heading = "Data"))]
    #[cfg_attr(feature = "cli", schemars(schema_with = "super::one_or_several::one_or_several_schema::<f64>"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "super::one_or_several::one_or_several")]
    pub mean: Vec<f64>,
    /// Standard deviation to divide each channel by
    #[cfg_attr(feature = "cli", arg(long, value_delimiter = ',', value_name = "NUMBERS", help_heading = "Data"))]
    #[cfg_attr(feature = "cli", schemars(schema_with = "super::one_or_several::one_or_several_schema::<f64>"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "super::one_or_several::one_or_several")]
    pub std: Vec<f64>,
}

/// Axis order of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ImageLayout {
    /// Batch, channels, height, width (PyTorch)
    Nchw,
    /// Batch, height, width, channels (TensorFlow)
    Nhwc,
}

/// Channel order of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ChannelOrder {
    /// Red first
    Rgb,
    /// Blue first (Caffe, OpenCV)
    Bgr,
}

/// Height and width of an image, or one number.
#[derive(Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "a number, or a height and a width")]
enum Sides {
    /// One number
    One(usize),
    /// Height and width
    Both(Vec<usize>),
}

fn sides<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<Vec<usize>>, D::Error> {
    let sides = |sides| match sides {
        Sides::One(side) => vec![side],
        Sides::Both(sides) => sides,
    };
    Ok(Option::<Sides>::deserialize(deserializer)?.map(sides))
}

/// Serializes pairs as a map.
mod pairs {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(pairs: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
        pairs.iter().cloned().collect::<BTreeMap<_, _>>().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, String)>, D::Error> {
        Ok(BTreeMap::<String, String>::deserialize(deserializer)?.into_iter().collect())
    }
}

/// Default batch size.
const DEFAULT_BATCH: usize = 32;
/// Default batch size of windows for perplexity.
const DEFAULT_WINDOWS: usize = 4;
/// Maximum number of tokens in a default batch: larger batches need more memory without being faster.
const MAX_BATCH_TOKENS: usize = 2048;

/// Parsers of command-line values.
#[cfg(feature = "cli")]
mod values {
    /// Parses `INPUT=ARRAY`.
    pub fn pair(text: &str) -> Result<(String, String), String> {
        text.split_once('=').map(|(input, array)| (input.to_owned(), array.to_owned())).ok_or_else(|| format!("`{text}` is not INPUT=ARRAY"))
    }

    /// Parses one character; a tab may be written as `\\t`.
    pub fn delimiter(text: &str) -> Result<char, String> {
        match (text, text.chars().next()) {
            ("\\t", _) => Ok('\t'),
            (_, Some(first)) if text.chars().count() == 1 => Ok(first),
            _ => Err(format!("`{text}` is not one character, or \\t for a tab")),
        }
    }
}

#[doc(hidden)]
impl Data {
    /// Whether windows are spread over a text.
    pub(super) fn is_spread(&self) -> bool {
        self.sampling == Some(WindowSampling::Spread)
    }

    /// Whether losses and perplexity predict only the text of the assistant in chats.
    pub(super) fn predicts_answers(&self) -> bool {
        self.loss_on == Some(LossOn::Assistant)
    }

    /// Returns these options, overridden by all options that are set in `others`.
    pub fn overridden_by(&self, others: &Data) -> Result<Data> {
        let merge = || {
            let mut all = serde_json::to_value(self)?;
            if let (Value::Object(all), Value::Object(given)) = (&mut all, serde_json::to_value(others)?) {
                all.extend(given);
            }
            serde_json::from_value(all)
        };
        merge().map_err(|e| Error::option("data", e.to_string()))
    }

    /// Resolves relative paths against a folder.
    pub fn resolve(&mut self, folder: &Path) {
        for path in [&mut self.text, &mut self.images, &mut self.arrays, &mut self.labels].into_iter().flatten() {
            *path = crate::files::resolve(folder, path);
        }
        self.mix.iter_mut().for_each(|part| part.resolve(folder));
    }

    /// Files and folders of the data.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        let own = [&self.text, &self.images, &self.arrays, &self.labels].into_iter().flatten();
        own.chain(self.mix.iter().filter_map(|part| part.text.as_ref()))
    }

    /// Names of the files and folders, for messages.
    pub fn names(&self) -> Option<String> {
        let names: Vec<String> = self.paths().map(|path| path.display().to_string()).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// Whether the samples are texts.
    pub fn has_texts(&self) -> bool {
        self.text.is_some() || !self.mix.is_empty()
    }

    /// Whether samples contain several texts, which do not attend to each other.
    pub fn is_packed(&self) -> bool {
        self.packing == Some(true) || self.mix.iter().any(Data::is_packed)
    }

    /// Rejects packed samples of an option: only graphs of a training separate their texts.
    pub fn require_unpacked(&self, option: impl std::fmt::Display) -> Result<()> {
        if self.is_packed() { Err(Error::option(option, "`packing` applies only to training data: remove it")) } else { Ok(()) }
    }

    /// The same data with one text per sample.
    pub fn unpacked(&self) -> Data {
        Data { packing: None, mix: self.mix.iter().map(Data::unpacked).collect(), ..self.clone() }
    }

    /// The texts of `mix` with all their options, and their weights.
    pub(super) fn parts(&self) -> Result<Vec<(Data, f64)>> {
        let common = Data { mix: Vec::new(), samples: None, batch_size: None, metric: None, ..self.clone() };
        let part = |part: &Data| Ok((Data { weight: None, ..common.overridden_by(part)? }, part.weight.unwrap_or(1.0)));
        self.mix.iter().map(part).collect()
    }

    /// Samples per batch, for samples with the given number of tokens if it is known.
    pub(super) fn batch(&self, task: Task, tokens: Option<usize>) -> usize {
        let limit = if task == Task::LanguageModelling { DEFAULT_WINDOWS } else { DEFAULT_BATCH };
        let default = tokens.and_then(|tokens| MAX_BATCH_TOKENS.checked_div(tokens)).unwrap_or(limit).clamp(1, limit);
        self.batch_size.unwrap_or(default)
    }
}

/// Whether the model is a masked language model.
pub(super) fn is_masked(target: &Target) -> bool {
    is_of_class(target, "ForMaskedLM")
}

/// Whether the name of the model class in `architectures` ends with this suffix.
pub(super) fn is_of_class(target: &Target, ending: &str) -> bool {
    Settings::new(target.config).class().ends_with(ending)
}

/// Rejects masked language models for next-token prediction.
pub(super) fn require_next_tokens(target: &Target) -> Result<()> {
    let hint = "compare it with another model using `task: fidelity`, or use arrays with `labels`, -100 for tokens that are not masked".into();
    let what = "perplexity of a masked language model on text".into();
    if is_masked(target) { Err(Error::Unsupported { what, hint }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specified_options_override_others() {
        let parse = |text: &str| serde_saphyr::from_str::<Data>(text).unwrap();
        let data = parse("{ images: a, crop: 224, samples: 3, mean: [0.5] }");
        let given = Data { samples: Some(7), std: vec![0.25], ..Data::default() };
        assert_eq!(data.overridden_by(&given).unwrap(), parse("{ images: a, crop: 224, samples: 7, mean: [0.5], std: [0.25] }"));
        assert_eq!(data.overridden_by(&Data::default()).unwrap(), data);
    }

    #[test]
    fn packing_of_a_mixture_is_found_and_removed() {
        let parse = |text: &str| serde_saphyr::from_str::<Data>(text).unwrap();
        for packed in ["{ text: a.jsonl, packing: true }", "{ mix: [{ text: a.jsonl, packing: true }, { text: b.txt }] }"].map(parse) {
            assert!(packed.is_packed() && !packed.unpacked().is_packed());
        }
        assert!(!parse("{ text: a.jsonl, packing: false }").is_packed());
    }

    #[test]
    fn columns_are_names_or_numbers() {
        let error = serde_saphyr::from_str::<Data>("{ text: a.csv, label_column: y }").unwrap_err().to_string();
        assert!(error.contains("need quotes"), "{error}");
        let data: Data = serde_saphyr::from_str("{ text: a.csv, text_column: 5, label_column: score, inputs: { x: images } }").unwrap();
        assert_eq!((data.text_column, data.label_column), (Some(Column::Index(5)), Some(Column::Name("score".into()))));
        assert_eq!(data.inputs, [("x".to_owned(), "images".to_owned())]);
        assert_eq!("7".parse(), Ok(Column::Index(7)));
    }
}
