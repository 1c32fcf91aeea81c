//! Option structs of the training passes: their own keys, followed by the shared ones.

/// Defines the option struct of a training pass: its own keys, then those of [`Training`].
macro_rules! training_pass {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
            /// Losses and their weights: soft, hard, hidden, attention, embedding [default: depends on
            /// model and data]
            #[cfg_attr(feature = "cli", arg(long, value_name = "LOSS=WEIGHT,...", default_value = "", hide_default_value = true, value_parser = $crate::train::losses_or_none))]
            #[serde(skip_serializing_if = "Losses::is_empty")]
            pub losses: Losses,
            /// Optimizer
            #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().optimizer))]
            pub optimizer: Kind,
            /// Peak learning rate of the schedule
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().learning_rate))]
            pub learning_rate: f64,
            /// Weight decay; biases and norm weights are exempt
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().weight_decay))]
            pub weight_decay: f64,
            /// Momentum of sgd and muon
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().momentum))]
            pub momentum: f64,
            /// Decays of the moments of adamw, adamw8bit and muon [default: 0.9,0.999]
            #[cfg_attr(feature = "cli", arg(long, value_name = "BETA1,BETA2"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub betas: Option<$crate::train::Betas>,
            /// Learning rate or weight decay of a part of the tensors: {targets: [PATTERN, ...],
            /// learning_rate: RATE, weight_decay: DECAY}
            #[cfg_attr(feature = "cli", arg(long, value_name = "GROUP"))]
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub groups: Vec<$crate::train::ParameterGroup>,
            /// Learning rate schedule: { kind: cosine | linear | constant, warmup_steps: N, decay_steps: N }
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
            /// Batches per step (gradient accumulation)
            #[cfg_attr(feature = "cli", arg(long, value_name = "N", default_value_t = Self::default().gradient_accumulation))]
            pub gradient_accumulation: usize,
            /// Maximum global gradient norm; 0 disables clipping
            #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().clip_norm))]
            pub clip_norm: f64,
            /// Precision of activations and gradients; `f16` uses dynamic loss scaling
            #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().precision))]
            pub precision: Precision,
            /// Recompute activations in the backward pass instead of storing them: none, blocks, or
            /// every=K layers
            #[cfg_attr(feature = "cli", arg(long, value_name = "WHICH", default_value = "none"))]
            pub gradient_checkpointing: Checkpointing,
            /// Statistics of batch normalization
            #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().batch_norm))]
            pub batch_norm: BatchNorm,
            /// Scales of quantized weights and activations
            #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().scales))]
            pub scales: QuantizerScales,
            /// Write an exponential moving average of the weights with this decay, such as 0.999
            #[cfg_attr(feature = "cli", arg(long, value_name = "DECAY"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub average: Option<f64>,
            /// Tensors to keep in host memory while training on a GPU; `parameters` also works on the
            /// CPU and offloads to disk
            #[cfg_attr(feature = "cli", arg(long, value_enum, value_delimiter = ','))]
            #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<Offload>"))]
            #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
            pub offload: Vec<Offload>,
            /// Tensors to shard across processes
            #[cfg_attr(feature = "cli", arg(long, value_enum))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub shard: Option<$crate::train::Shard>,
            /// Shard the optimizer state across processes, same as shard: optimizer
            #[cfg_attr(feature = "cli", arg(long))]
            pub shard_optimizer: bool,
            /// Device memory limit, such as 8GB; batches that need more are split into micro-batches
            #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub memory_limit: Option<ByteSize>,
            /// How often to save a checkpoint for --resume: steps=N or minutes=N [default: minutes=10]
            #[cfg_attr(feature = "cli", arg(long, value_name = "WHEN"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub checkpoint_every: Option<Every>,
            /// Number of checkpoints to keep while training, to resume from an earlier one [default: 1]
            #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub keep_checkpoints: Option<usize>,
            /// Steps between evaluations on the evaluation data; the best weights are kept, which can be the
            /// initial ones
            #[cfg_attr(feature = "cli", arg(long, value_name = "STEPS"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub evaluate_every: Option<u64>,
            /// Stop after this many evaluations without improvement
            #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub patience: Option<u64>,
            /// Logs of every step, in addition to the CSV table
            #[cfg_attr(feature = "cli", arg(long, value_enum, value_delimiter = ','))]
            #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<crate::train::LogFormat>"))]
            #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
            pub logs: Vec<$crate::train::LogFormat>,
            /// Tensors to train: names with `*`, or `re:` and a regular expression [default: all floats]
            #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub targets: Vec<Pattern>,
            /// Tensors to leave unchanged
            #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub ignore: Vec<Pattern>,
            /// Keep zeros in float weights that were pruned by another tool; zeros of prune-unstructured
            /// are always kept
            #[cfg_attr(feature = "cli", arg(long))]
            #[serde(skip_serializing_if = "std::ops::Not::not")]
            pub keep_zeros: bool,
            /// Change images randomly in each step: {flip: true, shift: PIXELS}
            #[cfg_attr(feature = "cli", arg(long, value_name = "OPTIONS"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub augment: Option<$crate::train::Augment>,
            /// Mask random tokens, which a masked language model predicts: the fraction of masked tokens,
            /// or {fraction: 0.15, mask_token: TOKEN}
            #[cfg_attr(feature = "cli", arg(long, value_name = "FRACTION"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub masking: Option<$crate::train::Masking>,
            /// Train low-rank adapters of linear layers instead of the weights: their rank, or
            /// {rank: 16, alpha: 32, targets: [PATTERN, ...], merge: false} [default: none]
            #[cfg_attr(feature = "cli", arg(long, value_name = "RANK"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub adapter: Option<$crate::train::Adapter>,
        }

        impl Default for $name {
            fn default() -> Self {
                let training = $crate::train::Training::default();
                $crate::pass::training_options::training_fields!($name, training; $($field: <$type>::default(),)*)
            }
        }

        impl $name {
            /// The shared training options.
            pub(crate) fn training(&self) -> $crate::train::Training {
                $crate::pass::training_options::training_fields!(Training, self;)
            }
        }
    };
}

/// Copies the shared keys between a pass and [`Training`], in addition to the pass's own keys.
macro_rules! training_fields {
    ($to:ident, $from:expr; $($own:tt)*) => {
        $to {
            $($own)*
            losses: $from.losses.clone(),
            optimizer: $from.optimizer,
            learning_rate: $from.learning_rate,
            weight_decay: $from.weight_decay,
            momentum: $from.momentum,
            betas: $from.betas,
            groups: $from.groups.clone(),
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
            shard: $from.shard,
            shard_optimizer: $from.shard_optimizer,
            memory_limit: $from.memory_limit,
            checkpoint_every: $from.checkpoint_every,
            keep_checkpoints: $from.keep_checkpoints,
            evaluate_every: $from.evaluate_every,
            patience: $from.patience,
            logs: $from.logs.clone(),
            targets: $from.targets.clone(),
            ignore: $from.ignore.clone(),
            keep_zeros: $from.keep_zeros,
            augment: $from.augment,
            masking: $from.masking.clone(),
            adapter: $from.adapter.clone(),
        }
    };
}

pub(super) use {training_fields, training_pass};
