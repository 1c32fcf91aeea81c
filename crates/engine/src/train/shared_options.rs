//! The options that all training passes share.

/// Calls the macro in brackets with `context` and the list of options: documentation, attributes of the keys
/// of recipes after `@`, name, type and default.
// Each crate imports the modules below it at its root, so the paths are valid in all of them.
#[allow(clippy::crate_in_macro_def)]
#[doc(hidden)]
#[macro_export]
macro_rules! training_options {
    ([$($callback:tt)+] $($context:tt)*) => {
        $($callback)+! {
            $($context)*
            [shared]
            /// Losses and their weights: soft, hard, hidden, attention, embedding, contrastive [default:
            /// depends on model and data]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "LOSS=WEIGHT,...", default_value = "", hide_default_value = true, value_parser = crate::train::losses_or_none))]
            #[serde(skip_serializing_if = "crate::train::losses::Losses::is_empty")]
            losses: crate::train::losses::Losses = crate::train::losses::Losses::default(),
            /// Optimizer
            @ #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().optimizer))]
            optimizer: crate::train::optimizer::Kind = crate::train::optimizer::Kind::default(),
            /// Peak learning rate of the schedule
            @ #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().learning_rate))]
            learning_rate: f64 = 1e-4,
            /// Weight decay; biases and norm weights are exempt
            @ #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().weight_decay))]
            weight_decay: f64 = 0.01,
            /// Momentum of sgd and muon
            @ #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().momentum))]
            momentum: f64 = 0.9,
            /// Decays of the moments of adamw, adamw8bit and muon [default: 0.9,0.999]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "BETA1,BETA2"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            betas: Option<crate::train::Betas> = None,
            /// Learning rate or weight decay of a part of the tensors: {targets: [PATTERN, ...],
            /// learning_rate: RATE, weight_decay: DECAY}
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "GROUP"))]
            #[serde(skip_serializing_if = "Vec::is_empty")]
            groups: Vec<crate::train::ParameterGroup> = Vec::new(),
            /// Learning rate schedule: { kind: cosine | linear | constant, warmup_steps: N, decay_steps: N }
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "SCHEDULE", default_value = "cosine"))]
            schedule: crate::train::schedule::Schedule = crate::train::schedule::Schedule::default(),
            /// Number of steps
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            max_steps: Option<u64> = None,
            /// Passes over the data, instead of a number of steps [default: 1]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            epochs: Option<u64> = None,
            /// Samples per batch: a number, or auto
            @ #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().batch_size))]
            #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::batch_size"))]
            batch_size: crate::train::BatchSize = crate::train::BatchSize::Auto,
            /// Batches per step (gradient accumulation)
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "N", default_value_t = Self::default().gradient_accumulation))]
            gradient_accumulation: usize = 1,
            /// Maximum global gradient norm; 0 disables clipping
            @ #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().clip_norm))]
            clip_norm: f64 = 1.0,
            /// Precision of activations and gradients; `f16` uses dynamic loss scaling
            @ #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().precision))]
            precision: crate::train::Precision = crate::train::Precision::default(),
            /// Recompute activations in the backward pass instead of storing them: none, blocks, or
            /// every=K layers
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "WHICH", default_value = "none"))]
            gradient_checkpointing: crate::train::Checkpointing = crate::train::Checkpointing::default(),
            /// Statistics of batch normalization
            @ #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().batch_norm))]
            batch_norm: crate::train::BatchNorm = crate::train::BatchNorm::default(),
            /// Scales of quantized weights and activations
            @ #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().scales))]
            scales: crate::train::QuantizerScales = crate::train::QuantizerScales::default(),
            /// Write an exponential moving average of the weights with this decay, such as 0.999
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "DECAY"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            average: Option<f64> = None,
            /// Tensors to keep in host memory while training on a GPU; `parameters` also works on the
            /// CPU and offloads to disk
            @ #[cfg_attr(feature = "cli", arg(long, value_enum, value_delimiter = ','))]
            #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<crate::train::Offload>"))]
            #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
            offload: Vec<crate::train::Offload> = Vec::new(),
            /// Tensors to shard across processes
            @ #[cfg_attr(feature = "cli", arg(long, value_enum))]
            #[serde(skip_serializing_if = "Option::is_none")]
            shard: Option<crate::train::Shard> = None,
            /// Shard the optimizer state across processes, same as shard: optimizer
            @ #[cfg_attr(feature = "cli", arg(long))]
            shard_optimizer: bool = false,
            /// Device memory limit, such as 8GB; batches that need more are split into micro-batches
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            memory_limit: Option<crate::store::ByteSize> = None,
            /// How often to save a checkpoint for --resume: steps=N or minutes=N [default: minutes=10]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "WHEN"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            checkpoint_every: Option<crate::train::Every> = None,
            /// Number of checkpoints to keep while training, to resume from an earlier one [default: 1]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            keep_checkpoints: Option<usize> = None,
            /// Folder for a checkpoint of the last step, or of the last one before the decay of
            /// `decay_steps`:
            /// --resume with a larger max_steps or epochs continues from it
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "FOLDER"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            final_checkpoint: Option<std::path::PathBuf> = None,
            /// Steps between evaluations on the evaluation data; the best weights are kept, which can be the
            /// initial ones
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "STEPS"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            evaluate_every: Option<u64> = None,
            /// Stop after this many evaluations without improvement
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            patience: Option<u64> = None,
            /// Logs of every step, in addition to the CSV table
            @ #[cfg_attr(feature = "cli", arg(long, value_enum, value_delimiter = ','))]
            #[cfg_attr(feature = "cli", schemars(schema_with = "crate::data::one_or_several::one_or_several_schema::<crate::train::LogFormat>"))]
            #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::train::one_or_several")]
            logs: Vec<crate::train::LogFormat> = Vec::new(),
            /// Tensors to train: names with `*`, or `re:` and a regular expression [default: all floats]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
            #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
            targets: Vec<crate::store::Pattern> = Vec::new(),
            /// Tensors to leave unchanged
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
            #[serde(skip_serializing_if = "Vec::is_empty")]
            ignore: Vec<crate::store::Pattern> = Vec::new(),
            /// Keep zeros in float weights that were pruned by another tool; zeros of prune-unstructured
            /// are always kept
            @ #[cfg_attr(feature = "cli", arg(long))]
            #[serde(skip_serializing_if = "std::ops::Not::not")]
            keep_zeros: bool = false,
            /// Change images randomly in each step: {flip: true, shift: PIXELS}
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "OPTIONS"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            augment: Option<crate::train::Augment> = None,
            /// Mask random tokens, which a masked language model predicts: the fraction of masked tokens,
            /// or {fraction: 0.15, mask_token: TOKEN}
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "FRACTION"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            masking: Option<crate::train::Masking> = None,
            /// Set hidden states to zero with this probability: embeddings, and the results of attention and
            /// feed-forward networks [default: none]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "RATE"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            dropout: Option<f64> = None,
            /// Set attention probabilities to zero with this probability [default: none]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "RATE"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            attention_dropout: Option<f64> = None,
            /// Train low-rank adapters of linear layers instead of the weights: their rank, or
            /// {rank: 16, alpha: 32, targets: [PATTERN, ...], merge: false} [default: none]
            @ #[cfg_attr(feature = "cli", arg(long, value_name = "RANK"))]
            #[serde(skip_serializing_if = "Option::is_none")]
            adapter: Option<crate::train::Adapter> = None,
        }
    };
}
