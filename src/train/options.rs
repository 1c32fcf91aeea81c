//! How training goes, as it stands in a recipe.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::log::LogFormat;
use super::losses::Losses;
use super::optimizer::Kind;
use super::schedule::Schedule;
use crate::error::{Error, Result};
use crate::store::{ByteSize, Pattern};

/// Precision of values and gradients; weights and the optimizer are always kept in f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32 bits
    #[default]
    F32,
    /// bfloat16
    Bf16,
    /// 16-bit floats, with automatic loss scaling
    F16,
}

impl Precision {
    /// Type of elements.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

/// What to keep out of the memory of the device while the model trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// The optimizer's state
    Optimizer,
    /// The teacher, which then runs on the CPU
    Teacher,
    /// Weights, gradients and the optimizer's state, but for the block at work: on the host beside a GPU, on disk beside the CPU. The
    /// teacher's weights are read from its files, and activations recomputed
    Parameters,
}

/// Statistics that batch normalisation uses while it trains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum BatchNorm {
    /// Use those of the batch, and update the stored ones
    #[default]
    Batch,
    /// The stored ones
    Fixed,
}

/// What training does to the scales of quantized weights and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum QuantizerScales {
    /// Not trained
    #[default]
    Fixed,
    /// Trained with the weights
    Learnable,
}

/// Which values are computed twice instead of kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Checkpointing {
    /// None: all are kept
    #[default]
    None,
    /// Those within the layers that repeat
    Blocks,
    /// Those within stretches of so many layers
    Every(usize),
}

/// How often training is saved.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Every {
    /// After so many steps
    Steps(u64),
    /// After so many minutes
    Minutes(f64),
}

/// Losses as an option of the command line: nothing stands for the usual ones.
#[cfg(feature = "cli")]
pub(crate) fn losses_or_none(text: &str) -> std::result::Result<Losses, String> {
    if text.is_empty() { Ok(Losses::default()) } else { text.parse() }
}

/// A number of samples, or `auto`.
#[cfg(feature = "cli")]
pub(crate) fn batch_size_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "anyOf": [{ "type": "integer", "minimum": 1 }, { "const": "auto" }] })
}

macro_rules! from_yaml {
    ($($type:ty),+) => {
        $(impl FromStr for $type {
            type Err = String;

            /// As in a recipe, or `name=value`.
            fn from_str(text: &str) -> std::result::Result<Self, String> {
                let yaml = match text.split_once('=') {
                    Some((name, value)) if !text.contains('{') => format!("{{ {name}: {value} }}"),
                    _ => text.to_owned(),
                };
                serde_saphyr::from_str(&yaml).map_err(|e| e.to_string())
            }
        })+
    };
}

from_yaml!(Checkpointing, Every);

impl FromStr for Schedule {
    type Err = String;

    /// As in a recipe, or `linear,warmup_steps=100`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let yaml = if text.contains('{') { text.to_owned() } else { format!("{{ kind: {} }}", text.replace('=', ": ")) };
        serde_saphyr::from_str(&yaml).map_err(|e| e.to_string())
    }
}

/// Samples of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BatchSize {
    /// What the kind of model suggests, in parts that fit into memory.
    #[default]
    Auto,
    /// So many.
    Samples(usize),
}

impl fmt::Display for BatchSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BatchSize::Auto => f.write_str("auto"),
            BatchSize::Samples(count) => write!(f, "{count}"),
        }
    }
}

impl FromStr for BatchSize {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(BatchSize::Auto),
            (_, Ok(count)) if count > 0 => Ok(BatchSize::Samples(count)),
            _ => Err(format!("`{text}` is neither `auto` nor a number of samples from 1 on")),
        }
    }
}

impl Serialize for BatchSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            BatchSize::Auto => serializer.serialize_str("auto"),
            BatchSize::Samples(count) => serializer.serialize_u64(*count as u64),
        }
    }
}

impl<'de> Deserialize<'de> for BatchSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Form;
        impl Visitor<'_> for Form {
            type Value = BatchSize;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("`auto` or a number of samples")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<BatchSize, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, count: u64) -> std::result::Result<BatchSize, E> {
                count.to_string().parse().map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, count: i64) -> std::result::Result<BatchSize, E> {
                count.to_string().parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// How training goes: the keys that `distill` and `finetune` share.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Training {
    pub losses: Losses,
    pub optimizer: Kind,
    pub learning_rate: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub schedule: Schedule,
    pub max_steps: Option<u64>,
    pub epochs: Option<u64>,
    pub batch_size: BatchSize,
    pub gradient_accumulation: usize,
    pub clip_norm: f64,
    pub precision: Precision,
    pub gradient_checkpointing: Checkpointing,
    pub batch_norm: BatchNorm,
    pub scales: QuantizerScales,
    pub average: Option<f64>,
    pub offload: Vec<Offload>,
    pub shard_optimizer: bool,
    pub memory_limit: Option<ByteSize>,
    pub checkpoint_every: Option<Every>,
    pub evaluate_every: Option<u64>,
    pub patience: Option<u64>,
    pub logs: Vec<LogFormat>,
    pub targets: Vec<Pattern>,
    pub ignore: Vec<Pattern>,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            losses: Losses::default(),
            optimizer: Kind::default(),
            learning_rate: 1e-4,
            weight_decay: 0.01,
            momentum: 0.9,
            schedule: Schedule::default(),
            max_steps: None,
            epochs: None,
            batch_size: BatchSize::Auto,
            gradient_accumulation: 1,
            clip_norm: 1.0,
            precision: Precision::default(),
            gradient_checkpointing: Checkpointing::default(),
            batch_norm: BatchNorm::default(),
            scales: QuantizerScales::default(),
            average: None,
            offload: Vec::new(),
            shard_optimizer: false,
            memory_limit: None,
            checkpoint_every: None,
            evaluate_every: None,
            patience: None,
            logs: Vec::new(),
            targets: Vec::new(),
            ignore: Vec::new(),
        }
    }
}

impl Training {
    /// Whether parameters are in memory only while they are used.
    pub fn offloads_parameters(&self) -> bool {
        self.offload.contains(&Offload::Parameters)
    }

    /// Holds the values to what they may be.
    ///
    /// # Errors
    /// The first that cannot be, by name.
    pub fn check(&self, pass: &str) -> Result<()> {
        let wrong = |what: &str, reason: String| Err(Error::option(format!("{pass}: {what}"), reason));
        self.losses.check()?;
        if !(self.learning_rate.is_finite() && self.learning_rate > 0.0) {
            return wrong("learning_rate", format!("{} is not a number above 0", self.learning_rate));
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return wrong("weight_decay", format!("{} is not a number from 0 on", self.weight_decay));
        }
        if !(0.0..1.0).contains(&self.momentum) {
            return wrong("momentum", format!("{} is not from 0 to 1, 1 left out", self.momentum));
        }
        if !(self.clip_norm.is_finite() && self.clip_norm >= 0.0) {
            return wrong("clip_norm", format!("{} is not a number from 0 on; 0 clips nothing", self.clip_norm));
        }
        if self.average.is_some_and(|decay| !(decay > 0.0 && decay < 1.0)) {
            return wrong("average", "must be between 0 and 1".into());
        }
        if self.gradient_accumulation == 0 {
            return wrong("gradient_accumulation", "must be at least 1".into());
        }
        if self.max_steps.is_some() && self.epochs.is_some() {
            return wrong("max_steps", "excludes `epochs`".into());
        }
        for (what, value) in [("max_steps", self.max_steps), ("epochs", self.epochs), ("evaluate_every", self.evaluate_every), ("patience", self.patience)] {
            if value == Some(0) {
                return wrong(what, "must be at least 1".into());
            }
        }
        if self.patience.is_some() && self.evaluate_every.is_none() {
            return wrong("patience", "needs `evaluate_every`: it counts evaluations without a better score".into());
        }
        if self.offloads_parameters() && self.shard_optimizer {
            return wrong("shard_optimizer", "excludes `offload: parameters`, which puts the optimizer's state on the host or on disk".into());
        }
        match self.checkpoint_every {
            Some(Every::Steps(0)) => return wrong("checkpoint_every", "must be at least 1 step".into()),
            Some(Every::Minutes(minutes)) if !(minutes.is_finite() && minutes > 0.0) => return wrong("checkpoint_every", "must be more than 0 minutes".into()),
            _ => {}
        }
        if self.gradient_checkpointing == Checkpointing::Every(0) {
            return wrong("gradient_checkpointing", "`every` must be at least 1 layer".into());
        }
        if !(0.0..=1.0).contains(&self.schedule.min_rate) {
            return wrong("schedule", format!("`min_rate` {} is not between 0 and 1", self.schedule.min_rate));
        }
        Ok(())
    }
}

/// Writes a pass that trains: its own keys, then those of [`Training`].
macro_rules! training_pass {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
            /// Losses and their weights: soft, hard, hidden, attention, embedding [default: those that model and data allow]
            #[cfg_attr(feature = "cli", arg(long, value_name = "LOSS=WEIGHT,...", default_value = "", hide_default_value = true, value_parser = $crate::train::losses_or_none))]
            #[serde(skip_serializing_if = "Losses::is_empty")]
            pub losses: Losses,
            /// Optimizer
            #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().optimizer))]
            pub optimizer: Kind,
            /// Largest learning rate of the schedule
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().learning_rate))]
            pub learning_rate: f64,
            /// Weight decay, on matrices
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().weight_decay))]
            pub weight_decay: f64,
            /// Momentum of sgd
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().momentum))]
            pub momentum: f64,
            /// How the learning rate changes: { kind: cosine | linear | constant, warmup_steps: N }
            #[cfg_attr(feature = "cli", arg(long, value_name = "SCHEDULE", default_value = "cosine"))]
            pub schedule: Schedule,
            /// Number of steps
            #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub max_steps: Option<u64>,
            /// Passes over the data, instead of a number of steps [default: 1]
            #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub epochs: Option<u64>,
            /// Samples per batch: a number, or auto
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().batch_size))]
            #[cfg_attr(feature = "cli", schemars(schema_with = "crate::train::batch_size_schema"))]
            pub batch_size: BatchSize,
            /// Batches per step
            #[cfg_attr(feature = "cli", arg(long, value_name = "N", default_value_t = Self::default().gradient_accumulation))]
            pub gradient_accumulation: usize,
            /// Largest norm of all gradients together; 0 disables clipping
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().clip_norm))]
            pub clip_norm: f64,
            /// Precision of values and gradients
            #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().precision))]
            pub precision: Precision,
            /// Recompute activations in the backward pass instead of storing them: none, blocks, or every=K layers
            #[cfg_attr(feature = "cli", arg(long, value_name = "WHICH", default_value = "none"))]
            pub gradient_checkpointing: Checkpointing,
            /// Statistics of batch normalisation
            #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().batch_norm))]
            pub batch_norm: BatchNorm,
            /// Scales of quantized weights and values
            #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().scales))]
            pub scales: QuantizerScales,
            /// Write an exponential moving average of the weights with this decay, such as 0.999
            #[cfg_attr(feature = "cli", arg(long, value_name = "DECAY"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub average: Option<f64>,
            /// What to keep in host memory while the model trains on a GPU; parameters, on the CPU too, where they go to disk
            #[cfg_attr(feature = "cli", arg(long, value_enum, value_delimiter = ','))]
            #[cfg_attr(feature = "cli", schemars(schema_with = "crate::train::one_or_several_schema::<Offload>"))]
            #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
            pub offload: Vec<Offload>,
            /// With several processes, distribute the optimizer's state over them
            #[cfg_attr(feature = "cli", arg(long))]
            pub shard_optimizer: bool,
            /// Memory limit of training on the device, like 8GB; a batch that needs more is computed in parts
            #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub memory_limit: Option<ByteSize>,
            /// How often to save a checkpoint for --resume: steps=N or minutes=N [default: minutes=10]
            #[cfg_attr(feature = "cli", arg(long, value_name = "WHEN"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub checkpoint_every: Option<Every>,
            /// Steps between evaluations on the evaluation data; the best weights are kept
            #[cfg_attr(feature = "cli", arg(long, value_name = "STEPS"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub evaluate_every: Option<u64>,
            /// Stop after so many evaluations without a better score
            #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub patience: Option<u64>,
            /// Logs of every step beside the CSV table
            #[cfg_attr(feature = "cli", arg(long, value_enum, value_delimiter = ','))]
            #[cfg_attr(feature = "cli", schemars(schema_with = "crate::train::one_or_several_schema::<crate::train::LogFormat>"))]
            #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
            pub logs: Vec<$crate::train::LogFormat>,
            /// Tensors to train: names with `*`, or `re:` and a regular expression [default: all floats]
            #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub targets: Vec<Pattern>,
            /// Tensors to leave as they are
            #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub ignore: Vec<Pattern>,
        }

        impl Default for $name {
            fn default() -> Self {
                let training = $crate::train::Training::default();
                $crate::train::training_fields!($name, training; $($field: <$type>::default(),)*)
            }
        }

        impl $name {
            /// The keys that all training shares.
            pub fn training(&self) -> $crate::train::Training {
                $crate::train::training_fields!(Training, self;)
            }
        }
    };
}

/// The shared keys out of a pass, or defaults into it beside keys of its own.
macro_rules! training_fields {
    ($to:ident, $from:expr; $($own:tt)*) => {
        $to {
            $($own)*
            losses: $from.losses.clone(),
            optimizer: $from.optimizer,
            learning_rate: $from.learning_rate,
            weight_decay: $from.weight_decay,
            momentum: $from.momentum,
            schedule: $from.schedule.clone(),
            max_steps: $from.max_steps,
            epochs: $from.epochs,
            batch_size: $from.batch_size,
            gradient_accumulation: $from.gradient_accumulation,
            clip_norm: $from.clip_norm,
            precision: $from.precision,
            gradient_checkpointing: $from.gradient_checkpointing,
            batch_norm: $from.batch_norm,
            scales: $from.scales,
            average: $from.average,
            offload: $from.offload.clone(),
            shard_optimizer: $from.shard_optimizer,
            memory_limit: $from.memory_limit,
            checkpoint_every: $from.checkpoint_every,
            evaluate_every: $from.evaluate_every,
            patience: $from.patience,
            logs: $from.logs.clone(),
            targets: $from.targets.clone(),
            ignore: $from.ignore.clone(),
        }
    };
}

pub(crate) use {training_fields, training_pass};
