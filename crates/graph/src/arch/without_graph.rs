//! Families without a graph, whose weights can be compressed.

use super::ModelKind::{Encoder, EncoderDecoder};
use super::family::{DECODER, EMPTY, ENCODER, ExpertLayout, Family, SELECTION_BIAS, VISION_TRANSFORMER};
use super::{dinov2, vit};
use crate::store::Role;

/// Queries, keys and values, and gate and up projections with the names of Mixtral.
const NUMBERED: &[&[&str]] = &[&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"], &["w1", "w3"]];
/// Latent attention of DeepSeek.
const LATENT: &[&[&str]] = &[&["q_a_proj", "kv_a_proj_with_mqa"], &["gate_proj", "up_proj"]];
/// Filters of state-space layers, with few elements for each channel.
const MAMBA_FILTERS: &[(&str, Role)] = &[("mamba.conv1d", Role::Other)];

/// Decoders with experts, with the names of DeepSeek.
const MIXTURE: Family = Family {
    heads: &["lm_head", "score", "shared_head.head"],
    routers: &["mlp.gate"],
    experts: Some(ExpertLayout { keys: &["n_routed_experts", "num_experts"], ..ExpertLayout::SEPARATE }),
    sizes: None,
    ..DECODER
};
/// Decoders with experts, with the names of Mixtral; routers also with those of transformers 5.
const SPARSE: Family = Family { fused: NUMBERED, routers: &["block_sparse_moe.gate", "mlp.gate", "mlp.router"], experts: LOCAL, ..MIXTURE };
const LOCAL: Option<ExpertLayout> = Some(ExpertLayout { keys: &["num_local_experts"], parts: None, ..ExpertLayout::SEPARATE });
const STEP3: Family = Family {
    routers: &["moe.gate"],
    exempt: &[("vision_model", Role::Vision), ("vit_downsampler", Role::Vision), ("vit_large_projector", Role::Vision)],
    experts: Some(ExpertLayout {
        keys: &["moe_num_experts"],
        stacked: &["moe.gate_proj", "moe.up_proj", "moe.down_proj"],
        parts: None,
        ..ExpertLayout::SEPARATE
    }),
    ..MIXTURE
};
/// Decoders with the names of GPT-2.
const GPT: Family = Family { tied: &[("lm_head.weight", "transformer.wte.weight")], fused: &[], embeddings: &["wte", "wpe"], sizes: None, ..DECODER };
/// Decoders with the names of BLOOM.
const BLOOM: Family =
    Family { tied: &[("lm_head.weight", "transformer.word_embeddings.weight")], fused: &[], embeddings: &["word_embeddings"], sizes: None, ..DECODER };
/// State-space models.
const MAMBA: Family =
    Family { tied: &[("lm_head.weight", "backbone.embeddings.weight")], fused: &[], embeddings: &["embeddings", "embedding"], sizes: None, ..DECODER };
/// Encoder-decoder models with the names of BART.
const BART: Family = Family {
    kind: EncoderDecoder,
    tied: &[("lm_head.weight", "model.shared.weight"), ("lm_head.weight", "model.decoder.embed_tokens.weight")],
    fused: &[&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], &["encoder_attn.k_proj", "encoder_attn.v_proj"]],
    embeddings: &["shared", "embed_tokens", "embed_positions"],
    heads: &["lm_head"],
    ..EMPTY
};
/// XLM. Layers of the decoder read the encoder in `encoder_attn`.
const XLM: Family = Family {
    kind: Encoder,
    tied: &[("pred_layer.proj.weight", "transformer.embeddings.weight")],
    fused: &[&["q_lin", "k_lin", "v_lin"]],
    embeddings: &["embeddings", "position_embeddings", "lang_embeddings"],
    heads: &["pred_layer"],
    ..EMPTY
};

/// A decoder with the names of Llama.
const fn decoder(model_type: &'static str) -> Family {
    Family { model_type, sizes: None, ..DECODER }
}

/// A family with the names of another one.
const fn like(model_type: &'static str, family: Family) -> Family {
    Family { model_type, ..family }
}

/// New names of the modules of Segformer, which has four stages, in transformers 5.
const SEGFORMER_RENAMES: &[(&str, &str)] = &[
    ("encoder.block.0.", "stages.0.blocks."),
    ("encoder.block.1.", "stages.1.blocks."),
    ("encoder.block.2.", "stages.2.blocks."),
    ("encoder.block.3.", "stages.3.blocks."),
    ("attention.self.query", "attention.q_proj"),
    ("attention.self.key", "attention.k_proj"),
    ("attention.self.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("mlp.dense1", "mlp.fc1"),
    ("mlp.dense2", "mlp.fc2"),
];

/// Vision transformers with the names of ViT.
const VISION: Family = Family { renames: vit::RENAMES, ..VISION_TRANSFORMER };

/// The families.
pub(super) const FAMILIES: &[Family] = &[
    Family { fused: LATENT, float32: SELECTION_BIAS, ..like("deepseek_v32", MIXTURE) },
    like("kimi_linear", SPARSE),
    Family { float32: SELECTION_BIAS, ..like("dots1", MIXTURE) },
    like("olmoe", MIXTURE),
    Family {
        exempt: &[("mtp_block", Role::TokenPrediction), ("mtp_linear_proj", Role::TokenPrediction)],
        float32: &["gate.weight", "moe_statics"],
        ..like("ernie4_5_moe", MIXTURE)
    },
    like("hunyuan_v1_moe", MIXTURE),
    Family {
        routers: &["router"],
        experts: Some(ExpertLayout { keys: &["num_local_experts"], stacked: &["input_linear", "output_linear"], parts: None, ..ExpertLayout::SEPARATE }),
        ..like("jetmoe", MIXTURE)
    },
    Family { exempt: MAMBA_FILTERS, ..decoder("falcon_h1") },
    Family { exempt: MAMBA_FILTERS, ..decoder("bamba") },
    Family {
        routers: &["feed_forward.router"],
        exempt: MAMBA_FILTERS,
        experts: Some(ExpertLayout { keys: &["num_experts", "num_local_experts"], ..ExpertLayout::SEPARATE }),
        ..decoder("jamba")
    },
    Family {
        fused: &[&["q_proj", "k_proj", "v_proj"], &["w1", "w3"]],
        routers: &["feed_forward.gate"],
        exempt: &[("conv.conv", Role::Other)],
        experts: Some(ExpertLayout { parts: Some(["w1", "w3", "w2"]), ..ExpertLayout::SEPARATE }),
        ..decoder("lfm2_moe")
    },
    like("step3_text", STEP3),
    like("step3_vl", STEP3),
    // The router is a linear layer in transformers.
    Family { renames: &[("block_sparse_moe.gate", "mlp.router"), ("block_sparse_moe.", "mlp.")], ..like("phimoe", SPARSE) },
    like("minimax", SPARSE),
    Family { routers: &["ffn.router"], ..like("dbrx", GPT) },
    Family { tied: &[], fused: &[], embeddings: &["embedding"], heads: &["output_layer", "score"], ..decoder("chatglm") },
    Family { fused: &[&["w1", "w2"]], ..like("qwen", GPT) },
    Family { fused: &[&["q_proj", "k_proj", "v_proj"], &["c_fc_0", "c_fc_1"]], ..like("exaone", GPT) },
    Family { fused: &[&["q_proj", "k_proj", "v_proj"]], ..like("gptj", GPT) },
    like("gpt_bigcode", GPT),
    like("codegen", GPT),
    like("mpt", GPT),
    Family {
        tied: &[("lm_head.weight", "transformer.tokens_embed.weight")],
        embeddings: &["tokens_embed", "positions_embed"],
        is_input_major: true,
        ..like("openai-gpt", GPT)
    },
    Family { is_input_major: true, ..like("imagegpt", GPT) },
    Family {
        tied: &[],
        embeddings: &["wte", "wpe", "embed_timestep"],
        exempt: &[("embed_return", Role::Other), ("embed_state", Role::Other), ("embed_action", Role::Other)],
        is_input_major: true,
        ..like("decision_transformer", GPT)
    },
    like("bloom", BLOOM),
    like("falcon", BLOOM),
    Family {
        tied: &[("output.weight", "model.tok_embeddings.weight")],
        fused: &[&["w1", "w3"]],
        embeddings: &["tok_embeddings"],
        heads: &["output", "score"],
        ..decoder("internlm2")
    },
    // Keys and values read different mixtures of tokens.
    Family { tied: &[("head.weight", "rwkv.embeddings.weight")], fused: &[], embeddings: &["embeddings"], heads: &["head"], ..decoder("rwkv") },
    like("mamba", MAMBA),
    like("falcon_mamba", MAMBA),
    Family { tied: &[("lm_head.weight", "transformer.w.weight")], fused: &[&["Wq", "Wk", "Wv"]], embeddings: &["transformer.w"], ..decoder("ctrl") },
    Family {
        tied: &[("lm_loss.weight", "transformer.word_embedding.weight")],
        fused: &[],
        embeddings: &["word_embedding"],
        heads: &["lm_loss"],
        ..decoder("xlnet")
    },
    like("xlm", XLM),
    like("flaubert", XLM),
    Family {
        tied: &[("predictions.decoder.weight", "albert.embeddings.word_embeddings.weight")],
        fused: &[&["query", "key", "value"]],
        heads: &["predictions"],
        exempt: &[("embedding_hidden_mapping_in", Role::Other)],
        ..like("albert", ENCODER)
    },
    Family {
        tied: &[("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight")],
        fused: &[&["query", "key", "value"]],
        heads: &["generator_predictions", "generator_lm_head", "discriminator_predictions"],
        exempt: &[("embeddings_project", Role::Other)],
        ..like("electra", ENCODER)
    },
    like("bart", BART),
    like("mbart", BART),
    like("m2m_100", BART),
    like("marian", BART),
    like("pegasus", BART),
    decoder("internlm"),
    decoder("olmo"),
    like("audio-spectrogram-transformer", VISION),
    like("beit", VISION),
    like("deit", VISION),
    like("ijepa", VISION),
    like("vit_mae", VISION),
    like("vit_msn", VISION),
    like("vivit", VISION),
    Family { renames: dinov2::RENAMES, ..like("dinov2_with_registers", VISION) },
    Family { renames: SEGFORMER_RENAMES, ..like("segformer", VISION) },
];
