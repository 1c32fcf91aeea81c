//! What a recipe says about data.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::{OpenedSets, Target};
use crate::error::{Error, Result};
use crate::store::ContentKey;
use crate::work::Work;

/// What is asked of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// One of several classes: accuracy, F1
    Classification,
    /// The next token: perplexity
    #[serde(alias = "language-modeling")]
    #[cfg_attr(feature = "cli", value(alias = "language-modeling"))]
    LanguageModelling,
    /// Similarity of pairs of texts: Spearman's correlation of the cosine with a score
    Embedding,
    /// No labels: outputs are only compared with another model's
    Fidelity,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Task::Classification => "classification",
            Task::LanguageModelling => "language-modelling",
            Task::Embedding => "embedding",
            Task::Fidelity => "fidelity",
        })
    }
}

/// A column, by name or by number from 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Column {
    /// By number, the first is 0.
    Index(usize),
    /// By name.
    Name(String),
}

impl FromStr for Column {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
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

/// How labels tell classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LabelKind {
    /// By number, the first class is 0
    Index,
    /// By a name of config.json's id2label or label2id
    Name,
}

/// Samples: one of `text`, `images` and `arrays`, and how they are to be read.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// Text: .txt or .raw (one sample per line), .csv, .tsv or .jsonl
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<PathBuf>,
    /// Images: a folder with one folder for each class, or an IDX file (as of MNIST; .gz too)
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATH", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<PathBuf>,
    /// Arrays with one row per sample: .safetensors, .npz, or a folder with one .npy for each input; or a folder with one of these for each run
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATH", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrays: Option<PathBuf>,
    /// Task [default: chosen from the data and the model's outputs]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
    /// Column of the text [default: text, sentence, or messages (chats, in .jsonl), or the only one]
    #[cfg_attr(feature = "cli", arg(long, value_name = "COLUMN", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_column: Option<Column>,
    /// Column of the second text of a pair; of a model that makes texts of texts, the one that it is to say
    #[cfg_attr(feature = "cli", arg(long, value_name = "COLUMN", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pair_column: Option<Column>,
    /// Column, or array, of the label: a class by number or by name, a score, or the tokens that a decoder is to say
    #[cfg_attr(feature = "cli", arg(long, value_name = "COLUMN", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_column: Option<Column>,
    /// How labels tell classes [default: numbers by index; text by name, or by index where no class has this name]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_kind: Option<LabelKind>,
    /// Labels of an IDX file of images
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<PathBuf>,
    /// Whether the first line of .csv and .tsv names the columns [default: true]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<bool>,
    /// Character between columns [default: a comma, in .tsv a tab]
    #[cfg_attr(feature = "cli", arg(long, value_name = "CHARACTER", value_parser = values::delimiter, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delimiter: Option<char>,
    /// Whether `"` surrounds columns that hold the delimiter [default: true, in .tsv false]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quoting: Option<bool>,
    /// Which array goes to which input of the model
    #[cfg_attr(feature = "cli", arg(long = "input", value_name = "INPUT=ARRAY", value_parser = values::pair, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Vec::is_empty", with = "pairs")]
    #[cfg_attr(feature = "cli", schemars(with = "std::collections::BTreeMap<String, String>"))]
    pub inputs: Vec<(String, String)>,
    /// Longest sequence, in tokens; longer texts are cut [default: what the model takes; 1024 for perplexity]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// Tokens from the start of a window to that of the next, for perplexity [default: windows do not overlap]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// How many samples (windows, for perplexity) to take at most [default: all]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,
    /// Samples that run together [default: 32, or 4 windows of a text; fewer where they have more than 2048 tokens]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// Height and width that images are resized to, or the length of their shorter side [default: as preprocessor_config.json says]
    #[cfg_attr(feature = "cli", arg(long, num_args = 1..=2, value_names = ["HEIGHT", "WIDTH"], help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "sides")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Sides>"))]
    pub resize: Option<Vec<usize>>,
    /// Height and width of the middle that is kept of images, once they are resized, or the side of a square
    #[cfg_attr(feature = "cli", arg(long, num_args = 1..=2, value_names = ["HEIGHT", "WIDTH"], help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "sides")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Sides>"))]
    pub crop: Option<Vec<usize>>,
    /// Order of axes in which the model takes images [default: as the sizes of its input say]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<ImageLayout>,
    /// Order of channels in which the model takes images [default: rgb]
    #[cfg_attr(feature = "cli", arg(long, value_enum, help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channels: Option<ChannelOrder>,
    /// Factor on pixels [default: as preprocessor_config.json says, else 1 for arrays and where the model takes whole numbers, 1/255 for images]
    #[cfg_attr(feature = "cli", arg(long, alias = "scale", value_name = "FACTOR", help_heading = "Data"))]
    #[serde(skip_serializing_if = "Option::is_none", alias = "scale")]
    pub rescale: Option<f64>,
    /// Mean to subtract from each channel, in the model's order of channels, after the factor
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

/// Order of axes of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ImageLayout {
    /// Samples, channels, height, width, as of PyTorch
    Nchw,
    /// Samples, height, width, channels, as of TensorFlow
    Nhwc,
}

/// Order of channels of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ChannelOrder {
    /// Red first
    Rgb,
    /// Blue first, as of Caffe and OpenCV
    Bgr,
}

/// Sides of an image.
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

/// Pairs as a map.
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

/// Samples that run together when nothing is said.
const BATCH: usize = 32;
/// Windows that run together when nothing is said, at most.
const WINDOWS: usize = 4;
/// Tokens that they have together then: more are no faster, and take more memory.
const TOKENS: usize = 2048;

/// Values of the command line.
#[cfg(feature = "cli")]
mod values {
    /// Reads `INPUT=ARRAY`.
    pub fn pair(text: &str) -> Result<(String, String), String> {
        text.split_once('=').map(|(input, array)| (input.to_owned(), array.to_owned())).ok_or_else(|| format!("`{text}` is not INPUT=ARRAY"))
    }

    /// One character; a tab may be written as `\\t`.
    pub fn delimiter(text: &str) -> Result<char, String> {
        match (text, text.chars().next()) {
            ("\\t", _) => Ok('\t'),
            (_, Some(first)) if text.chars().count() == 1 => Ok(first),
            _ => Err(format!("`{text}` is not one character, or \\t for a tab")),
        }
    }
}

impl Data {
    /// The data behind a path, its kind told by its name.
    pub fn at(path: &Path) -> Data {
        let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("").to_ascii_lowercase();
        let path = Some(path.to_owned());
        match ending.as_str() {
            "txt" | "raw" | "csv" | "tsv" | "jsonl" => Data { text: path, ..Data::default() },
            "safetensors" | "npz" | "npy" => Data { arrays: path, ..Data::default() },
            _ if super::arrays::are_in(path.as_deref().unwrap_or(Path::new(""))) => Data { arrays: path, ..Data::default() },
            _ => Data { images: path, ..Data::default() },
        }
    }

    /// These options, with every option that is given in `others` replaced.
    ///
    /// # Errors
    /// The options have no JSON form.
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

    /// Makes paths relative to a folder.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        for path in [&mut self.text, &mut self.images, &mut self.arrays, &mut self.labels].into_iter().flatten() {
            *path = crate::files::resolve(folder, path);
        }
    }

    /// Files and folders that it names.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.text, &self.images, &self.arrays, &self.labels].into_iter().flatten()
    }

    /// A hash of how the data is read, and of all bytes that are.
    ///
    /// # Errors
    /// A file cannot be read, or the work is cancelled.
    pub(crate) fn content(&self, work: &Work) -> Result<String> {
        let mut key = ContentKey::new(work);
        key.line(&serde_json::to_string(self).unwrap_or_default());
        self.paths().try_for_each(|path| key.files([path], path.parent().unwrap_or(path)))?;
        Ok(key.name())
    }

    /// Samples that run together, of so many tokens each where that is known.
    pub(super) fn batch(&self, task: Task, tokens: Option<usize>) -> usize {
        let most = if task == Task::LanguageModelling { WINDOWS } else { BATCH };
        let together = tokens.and_then(|tokens| TOKENS.checked_div(tokens)).unwrap_or(most).clamp(1, most);
        self.batch_size.unwrap_or(together)
    }

    /// What is asked, said or suggested.
    pub(super) fn task(&self, target: &Target) -> Result<Task> {
        if let Some(task) = self.task {
            return Ok(task);
        }
        let classifies = target.outputs.iter().any(|port| port.name == "logits" && port.shape.len() == 2);
        if target.decodes() && !classifies {
            let asked = self.pair_column.is_some() || self.label_column.is_some() || self.arrays.as_deref().map_or(Ok(false), super::arrays::has_labels)?;
            return Ok(if asked && gives_logits_by_token(target) { Task::LanguageModelling } else { Task::Fidelity });
        }
        if let Some(arrays) = self.arrays.as_ref().filter(|_| predicts_tokens(target)) {
            return Ok(if self.label_column.is_some() || super::arrays::has_labels(arrays)? { Task::LanguageModelling } else { Task::Fidelity });
        }
        if self.label_column.is_some() {
            return Ok(if self.pair_column.is_some() && !gives_logits(target) { Task::Embedding } else { Task::Classification });
        }
        if let Some(images) = &self.images {
            let labelled = self.labels.is_some() || super::images::has_classes(images)?;
            return Ok(if labelled { Task::Classification } else { Task::Fidelity });
        }
        if let Some(arrays) = &self.arrays {
            return Ok(if super::arrays::has_labels(arrays)? { Task::Classification } else { Task::Fidelity });
        }
        let next = predicts_tokens(target) && !is_masked(target);
        Ok(if next { Task::LanguageModelling } else { Task::Fidelity })
    }
}

fn gives_logits(target: &Target) -> bool {
    target.outputs.iter().any(|port| port.name == "logits")
}

fn gives_logits_by_token(target: &Target) -> bool {
    target.outputs.iter().any(|port| port.name == "logits" && port.shape.len() == 3)
}

/// Whether the logits of each token are those of tokens, and not of classes.
fn predicts_tokens(target: &Target) -> bool {
    gives_logits_by_token(target) && !is_of_class(target, "ForTokenClassification")
}

/// Whether the model fills in masked tokens, so that there is no next one.
pub(super) fn is_masked(target: &Target) -> bool {
    is_of_class(target, "ForMaskedLM")
}

/// Whether the name of the model's class has this ending.
fn is_of_class(target: &Target, ending: &str) -> bool {
    let class = target.config.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str);
    class.is_some_and(|class| class.ends_with(ending))
}

/// Refuses a model that fills in masked tokens, where each token is to predict the next one.
pub(super) fn require_next_tokens(target: &Target) -> Result<()> {
    let hint = "compare it with another model, `task: fidelity`, or give arrays with `labels`, -100 for tokens that are not masked".into();
    let what = "perplexity of a model that fills in masked tokens".into();
    if is_masked(target) { Err(Error::Unsupported { what, hint }) } else { Ok(()) }
}

/// The data sets of a recipe.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DataSets {
    /// What accuracy is measured on
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<Data>,
    /// What passes that need to see activations run the model on; labels are not looked at
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Data>,
    /// What passes that train learn from
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<Data>,
    /// Those that a run has opened
    #[serde(skip)]
    pub opened: OpenedSets,
}

impl DataSets {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == DataSets::default()
    }

    /// Makes paths relative to a folder.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        for data in [&mut self.evaluation, &mut self.calibration, &mut self.train].into_iter().flatten() {
            data.resolve(folder);
        }
    }

    /// Labels of what passes calibrate on are not looked at: folders of images may be called anything.
    pub(crate) fn ignore_labels(&mut self) {
        for data in self.calibration.iter_mut().filter(|data| data.images.is_some()) {
            data.task.get_or_insert(Task::Fidelity);
        }
    }

    /// The same with paths that hold wherever the recipe is.
    pub(crate) fn absolute(&self) -> DataSets {
        let mut sets = self.clone();
        sets.resolve(&std::env::current_dir().unwrap_or_default());
        sets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_options_replace_those_of_a_mapping() {
        let parse = |text: &str| serde_saphyr::from_str::<Data>(text).unwrap();
        let data = parse("{ images: a, crop: 224, samples: 3, mean: [0.5] }");
        let given = Data { samples: Some(7), std: vec![0.25], ..Data::default() };
        assert_eq!(data.overridden_by(&given).unwrap(), parse("{ images: a, crop: 224, samples: 7, mean: [0.5], std: [0.25] }"));
        assert_eq!(data.overridden_by(&Data::default()).unwrap(), data);
    }

    #[test]
    fn columns_are_names_or_numbers() {
        let data: Data = serde_saphyr::from_str("{ text: a.csv, text_column: 5, label_column: score, inputs: { x: images } }").unwrap();
        assert_eq!((data.text_column, data.label_column), (Some(Column::Index(5)), Some(Column::Name("score".into()))));
        assert_eq!(data.inputs, [("x".to_owned(), "images".to_owned())]);
        assert_eq!("7".parse(), Ok(Column::Index(7)));
        assert_eq!(Data::at(Path::new("a/b.CSV")).text.as_deref(), Some(Path::new("a/b.CSV")));
        assert!(Data::at(Path::new("a/b")).images.is_some() && Data::at(Path::new("b.npz")).arrays.is_some());
    }
}
