//! Training options of a recipe.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::groups;
use super::losses::Losses;
use super::optimizer::{Kind, Settings};
use super::schedule::Schedule;
use crate::error::{Error, ParseError, Result};
use crate::yaml_text::parse_option;

/// Tensors that are kept out of device memory during training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// The optimizer state
    Optimizer,
    /// The teacher, which then runs on the CPU
    Teacher,
    /// Weights, gradients and optimizer state, except those of the current block: to host memory from a
    /// GPU, to disk from the CPU. The teacher's weights are streamed from its files, and activations are
    /// recomputed
    Parameters,
}

/// Tensors that are sharded across processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// The optimizer state
    Optimizer,
    /// Weights, gradients and optimizer state: each tensor is owned by one process, and is broadcast
    /// when its block is computed. Activations are recomputed
    Parameters,
}

/// Statistics that batch normalization uses during training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum BatchNorm {
    /// Those of the batch; the running statistics are updated
    #[default]
    Batch,
    /// The running statistics, which do not change
    Fixed,
}

/// Whether the scales of quantized weights and activations are trained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum QuantizerScales {
    /// Not trained
    #[default]
    Fixed,
    /// Trained with the weights
    Learnable,
    /// Trained instead of the codes of quantized weights, which do not change
    Only,
}

/// Activations that are recomputed in the backward pass instead of stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Checkpointing {
    /// None: all are stored
    #[default]
    None,
    /// Those inside each repeated layer
    Blocks,
    /// Those inside segments of this many layers
    Every(usize),
}

/// Interval between checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "cli", schemars(rename = "CheckpointInterval"))]
#[serde(rename_all = "lowercase")]
pub enum Every {
    /// Number of steps
    Steps(u64),
    /// Number of minutes
    Minutes(f64),
}

/// Parses losses on the command line; an empty text selects the default losses.
pub fn losses_or_none(text: &str) -> std::result::Result<Losses, ParseError> {
    if text.is_empty() { Ok(Losses::default()) } else { text.parse() }
}

macro_rules! from_yaml {
    ($($type:ty: $key:literal),+) => {
        $(impl FromStr for $type {
            type Err = ParseError;

            /// Parses the recipe syntax, or `name=value`.
            fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
                let yaml = match text.split_once('=') {
                    Some((name, value)) if !text.contains('{') => format!("{{ {name}: {value} }}"),
                    _ => text.to_owned(),
                };
                parse_option($key, &yaml)
            }
        })+
    };
}

from_yaml!(Checkpointing: "gradient_checkpointing", Every: "checkpoint_every");

impl FromStr for Schedule {
    type Err = ParseError;

    /// Parses the recipe syntax, or `linear,warmup_steps=100`.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        let yaml = if text.contains('{') { text.to_owned() } else { format!("{{ kind: {} }}", text.replace('=', ": ")) };
        parse_option("schedule", &yaml)
    }
}

/// Number of samples per batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BatchSize {
    /// A default for the kind of model, split into micro-batches that fit into memory.
    #[default]
    Auto,
    /// This number of samples.
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
    type Err = ParseError;

    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        match (text, text.parse()) {
            ("auto", _) => Ok(BatchSize::Auto),
            (_, Ok(count)) if count > 0 => Ok(BatchSize::Samples(count)),
            _ => Err(format!("`{text}` is neither `auto` nor a number of samples of at least 1").into()),
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

/// Defines the struct of the shared options.
macro_rules! define_training {
    ([shared] $($(#[$doc:meta])* @ $(#[$attribute:meta])* $field:ident: $type:ty = $default:expr,)*) => {
        /// Options of training that all passes which train have. In recipes they are keys of the pass.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Training {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl Default for Training {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

training_options! { [define_training] }

#[doc(hidden)]
impl Training {
    /// Whether parameters are offloaded, and in memory only while they are used.
    pub fn offloads_parameters(&self) -> bool {
        self.offload.contains(&Offload::Parameters)
    }

    /// Whether parameters are sharded across processes.
    pub fn shards_parameters(&self) -> bool {
        self.shard == Some(Shard::Parameters)
    }

    /// The hyperparameters of the optimizer for these linear layers and other parameters, of which `names`
    /// are all. Fails if a pattern of a group matches none of them.
    pub fn optimizer_settings<'n>(&self, linear_weights: BTreeSet<String>, names: impl Iterator<Item = &'n String> + Clone) -> Result<Settings> {
        let settings = Settings::default();
        let [beta1, beta2] = self.betas.map_or([settings.beta1, settings.beta2], |betas| betas.0);
        let groups = groups::rates(&self.groups, self.learning_rate, names)?;
        Ok(Settings { beta1, beta2, weight_decay: self.weight_decay, momentum: self.momentum, linear_weights, groups, ..settings })
    }

    /// Whether the optimizer state is sharded across processes.
    pub fn shards_optimizer(&self) -> bool {
        self.shard.is_some() || self.shard_optimizer
    }

    /// Whether parameters are loaded block by block.
    pub fn pages_parameters(&self) -> bool {
        self.offloads_parameters() || self.shards_parameters()
    }

    /// Validates the options; `pass` is the prefix of error messages.
    pub fn check(&self, pass: &str) -> Result<()> {
        let wrong = |what: &str, reason: String| Err(Error::option(format!("{pass}: {what}"), reason));
        self.losses.check()?;
        if !(self.learning_rate.is_finite() && self.learning_rate > 0.0) {
            return wrong("learning_rate", format!("{} is not a finite number greater than 0", self.learning_rate));
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return wrong("weight_decay", format!("{} is not a finite number of at least 0", self.weight_decay));
        }
        if !(0.0..1.0).contains(&self.momentum) {
            return wrong("momentum", format!("{} is not at least 0 and less than 1", self.momentum));
        }
        if self.momentum != Self::default().momentum && !matches!(self.optimizer, Kind::Sgd | Kind::Muon) {
            return wrong("momentum", "is that of `sgd` and `muon`: remove it, or choose one of these optimizers".into());
        }
        if !(self.clip_norm.is_finite() && self.clip_norm >= 0.0) {
            return wrong("clip_norm", format!("{} is not a finite number of at least 0; 0 disables clipping", self.clip_norm));
        }
        if self.average.is_some_and(|decay| !(decay > 0.0 && decay < 1.0)) {
            return wrong("average", "must be greater than 0 and less than 1".into());
        }
        for (what, rate) in [("dropout", self.dropout), ("attention_dropout", self.attention_dropout)] {
            if rate.is_some_and(|rate| !(rate > 0.0 && rate < 1.0)) {
                return wrong(what, "must be greater than 0 and less than 1".into());
            }
        }
        if self.dropout.is_some() && self.adapter.is_some() {
            return wrong("dropout", "cannot be combined with `adapter`".into());
        }
        if self.gradient_accumulation == 0 {
            return wrong("gradient_accumulation", "must be at least 1".into());
        }
        if self.max_steps.is_some() && self.epochs.is_some() {
            return wrong("max_steps", "cannot be combined with `epochs`".into());
        }
        for (what, value) in [("max_steps", self.max_steps), ("epochs", self.epochs), ("evaluate_every", self.evaluate_every), ("patience", self.patience)] {
            if value == Some(0) {
                return wrong(what, "must be at least 1".into());
            }
        }
        if self.keep_checkpoints == Some(0) {
            return wrong("keep_checkpoints", "must be at least 1".into());
        }
        if self.patience.is_some() && self.evaluate_every.is_none() {
            return wrong("patience", "requires `evaluate_every`: it counts evaluations without improvement".into());
        }
        if self.offloads_parameters() && self.shards_optimizer() {
            let what = if self.shard.is_some() { "shard" } else { "shard_optimizer" };
            return wrong(what, "cannot be combined with `offload: parameters`, which already moves the optimizer state to the host or to disk".into());
        }
        if self.shards_parameters() && self.memory_limit.is_some() {
            return wrong(
                "memory_limit",
                "cannot be combined with `shard: parameters`: all processes must split a batch in the same way; lower `batch_size` instead".into(),
            );
        }
        if self.shards_parameters() && self.scales != QuantizerScales::Fixed {
            return wrong("scales", "`learnable` and `only` cannot be combined with `shard: parameters`".into());
        }
        match self.checkpoint_every {
            Some(Every::Steps(0)) => return wrong("checkpoint_every", "must be at least 1 step".into()),
            Some(Every::Minutes(minutes)) if !(minutes.is_finite() && minutes > 0.0) => {
                return wrong("checkpoint_every", "must be greater than 0 minutes".into());
            }
            _ => {}
        }
        if self.gradient_checkpointing == Checkpointing::Every(0) {
            return wrong("gradient_checkpointing", "`every` must be at least 1 layer".into());
        }
        self.betas.map_or(Ok(()), |betas| betas.check(pass, self.optimizer))?;
        self.groups.iter().try_for_each(|group| group.check(pass))?;
        self.augment.map_or(Ok(()), |augment| augment.check(pass))?;
        self.masking.as_ref().map_or(Ok(()), |masking| masking.check(pass))?;
        self.schedule.check(self.max_steps).map_or(Ok(()), |reason| wrong("schedule", reason))?;
        if let Some(adapter) = &self.adapter {
            adapter.check(pass)?;
            if adapter.absorb && self.shards_parameters() {
                return wrong("adapter", "`absorb` cannot be combined with `shard: parameters`: use `shard: optimizer`".into());
            }
            if !(self.targets.is_empty() && self.ignore.is_empty()) {
                return wrong("targets", "`targets` and `ignore` cannot be combined with `adapter`, which selects its layers by its own `targets`".into());
            }
            if self.scales != QuantizerScales::Fixed {
                return wrong(
                    "scales",
                    "`learnable` and `only` cannot be combined with `adapter`, which does not change the scales of quantized weights".into(),
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{Adapter, Augment, Betas, Masking, OnPolicy, ParameterGroup};
    use crate::yaml_text::{argument_of, example_of};

    /// Each example is a valid value in a recipe and on the command line.
    #[test]
    fn examples_of_options_are_valid() {
        fn check<Listed: de::DeserializeOwned, Value: FromStr<Err = ParseError>>(key: &str) {
            let (example, argument) = (example_of(key).unwrap(), argument_of(key).unwrap());
            let (_, value) = example.split_once(": ").unwrap();
            serde_saphyr::from_str::<Listed>(value).map_err(|e| e.to_string()).unwrap();
            let (option, value) = argument.split_once(' ').unwrap();
            value.trim_matches('"').parse::<Value>().map_err(|e| e.to_string()).unwrap();
            assert_eq!(option, format!("--{}", key.replace('_', "-")));
        }
        check::<Losses, Losses>("losses");
        check::<Betas, Betas>("betas");
        check::<Vec<ParameterGroup>, ParameterGroup>("groups");
        check::<Schedule, Schedule>("schedule");
        check::<Checkpointing, Checkpointing>("gradient_checkpointing");
        check::<Every, Every>("checkpoint_every");
        check::<Augment, Augment>("augment");
        check::<Masking, Masking>("masking");
        check::<Adapter, Adapter>("adapter");
        check::<OnPolicy, OnPolicy>("on_policy");
        assert_eq!(
            example_of("optimizer").unwrap(),
            format!("optimizer: {}", serde_json::to_value(crate::train::optimizer::Kind::AdamW).unwrap().as_str().unwrap())
        );
    }

    #[test]
    fn errors_of_options_have_an_example() {
        let error = "{ kind: cosine, warmup: 3 }".parse::<Schedule>().unwrap_err().to_string();
        assert!(error.contains("unknown key `warmup`, did you mean `warmup_steps`?"), "{error}");
        assert!(error.ends_with("; example: --schedule \"{ kind: cosine, warmup_steps: 100 }\""), "{error}");
        let error = "hours=1".parse::<Every>().unwrap_err().to_string();
        assert!(error.contains("`hours`") && error.ends_with("; example: --checkpoint-every \"{ minutes: 10 }\""), "{error}");
        let error = "{ rank: many }".parse::<Adapter>().unwrap_err().to_string();
        assert!(error.contains("expected a whole number") && error.contains("example: --adapter"), "{error}");
    }
}
