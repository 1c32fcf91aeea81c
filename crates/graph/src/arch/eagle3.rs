//! EAGLE-3 heads for speculative decoding, in the format of the package `speculators` (Li et al., *EAGLE-3:
//! Scaling up Inference Acceleration of Large Language Models via Training-Time Test*, 2025,
//! <https://arxiv.org/abs/2503.01840>).
//!
//! A head reads hidden states of several layers of a model, the target, and the token after each of them. Its
//! only layer predicts the token after that. Its own hidden states are the input of further predictions.

use super::{DECODER, Family, Keys, ModelKind};

pub(super) const EAGLE3: Family = Family {
    model_type: "eagle3",
    kind: ModelKind::DraftHead,
    graph: graph!(super::running::draft_head::build),
    keys: Keys {
        harmless: &[
            "attention_dropout",
            "auto_map",
            "draft_vocab_size",
            "embed_requires_grad",
            "layer_types",
            "max_position_embeddings",
            "max_window_layers",
            "pretraining_tp",
            "sliding_window",
            "speculators_config",
            "speculators_model_type",
            "speculators_version",
            "use_sliding_window",
        ],
        neutral: &[("partial_rotary_factor", "1.0")],
    },
    sizes: None,
    tied: &[],
    ..DECODER
};
