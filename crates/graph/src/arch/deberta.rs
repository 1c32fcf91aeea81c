//! DeBERTa v2 and v3: disentangled attention, which adds products of queries and keys with relative
//! position embeddings (He et al., 2021).

use super::{ENCODER, Family, Keys, Sizes, bert, classifier};

pub(super) const DEBERTA: Family = Family {
    model_type: "deberta-v2",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "attention_probs_dropout_prob",
            "cls_dropout",
            "conv_act",
            "conv_groups",
            "hidden_dropout_prob",
            "legacy",
            "max_position_embeddings",
            "max_relative_positions",
            "norm_rel_ebd",
            "pooler_dropout",
            "pooler_hidden_act",
            "pooler_hidden_size",
            "position_buckets",
            "share_att_key",
        ],
        neutral: &[("conv_kernel_size", "0")],
    },
    sizes: Some(&Sizes {
        prefixes: &["deberta.", ""],
        hidden: ("hidden_size", "embeddings.LayerNorm.weight", 0),
        heads: ("num_attention_heads", "encoder.layer.0.attention.self.query_proj.weight", 0),
        other_sizes: &[
            ("intermediate_size", "encoder.layer.0.intermediate.dense.weight", 0),
            ("pooler_hidden_size", "embeddings.LayerNorm.weight", 0),
            ("embedding_size", "embeddings.word_embeddings.weight", 1),
        ],
        ..bert::SIZES
    }),
    classifier: classifier("DebertaV2ForSequenceClassification", "deberta.", &["pooler.dense", "classifier"]),
    tied: &[("cls.predictions.decoder.weight", "deberta.embeddings.word_embeddings.weight")],
    embeddings: &["embeddings", "rel_embeddings"],
    heads: &["cls.predictions", "lm_predictions"],
    ..ENCODER
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::bert::running::{self as bert, tied_head};
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{activate, attend_heads, has_head, layer_norm, linear_with, split_heads, text_inputs};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, Attention, Embedding, Linear, Positions, RelativeProducts, Select};
    use crate::ir::{Builder, Dim, TensorType, ValueId};

    const NAMES: Names = Names { qkv: ["query_proj", "key_proj", "value_proj"], ..bert::NAMES };

    /// Properties shared by all layers.
    struct Encoder<'b> {
        prefix: &'static str,
        block: Block<'b>,
        distances: Option<Distances>,
    }

    /// Relative position embeddings.
    struct Distances {
        /// The embedding table, one row per relative position.
        table: ValueId,
        /// Whether rows are normalized.
        normed: bool,
        /// Whether the projections of content are shared.
        shared: bool,
        /// Whether queries (c2p) and keys (p2c) are multiplied with them.
        enabled_products: [bool; 2],
        products: RelativeProducts,
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("deberta.embeddings.word_embeddings.weight") { "deberta." } else { "" };
        let (hidden, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", 1e-7)?);
        let (tokens, mask) = text_inputs(b)?;
        let words = format!("{prefix}embeddings.word_embeddings.weight");
        let x = embeddings(s, b, (prefix, &words), tokens)?;
        let mut x = layer_norm(b, "embeddings.LayerNorm", &format!("{prefix}embeddings.LayerNorm"), x, epsilon)?;
        let head_dim = s.head_dim("hidden_size", "num_attention_heads")?;
        if s.size_or("attention_head_size", head_dim)? != head_dim {
            return Err(Error::graph("config.json", "`attention_head_size` is not `hidden_size` divided by `num_attention_heads`"));
        }
        let (enabled_products, distances) = distances(s, b, prefix)?;
        // Each enabled product contributes to the scale, even without relative position embeddings.
        let scale = 1.0 / (1.0 + enabled_products.map(f64::from).iter().sum::<f64>()).sqrt();
        let block = Block {
            names: &NAMES,
            norms: NormPosition::After,
            epsilon,
            head_dim,
            attention: Attention { scale, ..Attention::default() },
            extras: &[mask],
            qkv_bias: Some(true),
            cross: None,
            neurons: s.size("intermediate_size")?,
            activation: Some(s.text_or("hidden_act", "gelu")?),
        };
        let encoder = Encoder { prefix, block, distances };
        for index in 0..s.size("num_hidden_layers")? {
            x = encoder.layer(b, &format!("encoder.layer.{index}"), x)?;
        }
        b.output("last_hidden_state", x);
        match s.class() {
            "DebertaV2ForSequenceClassification" => {
                let first = b.node("pooler.first", Select { index: 0 }, &[x])?;
                if s.size_or("pooler_hidden_size", hidden)? != hidden {
                    return Err(Error::graph("config.json", "`pooler_hidden_size` must equal `hidden_size`, because the pooler reads hidden states"));
                }
                let dense = linear_with(b, "pooler.dense", "pooler.dense", first, hidden, true)?;
                let pooled = activate(b, "pooler", s.text_or("pooler_hidden_act", "gelu")?, dense)?;
                let logits = linear_with(b, "classifier", "classifier", pooled, s.labels()?, true)?;
                b.output("logits", logits);
            }
            "DebertaV2ForMaskedLM" => masked(s, b, (prefix, &words), x)?,
            _ => {}
        }
        Ok(())
    }

    /// The sum of word, position and type embeddings, projected to the width of the stream.
    fn embeddings(s: &Settings, b: &mut Builder, (prefix, words): (&str, &str), tokens: ValueId) -> Result<ValueId> {
        let hidden = s.size("hidden_size")?;
        let width = s.size_or("embedding_size", hidden)?;
        let table = b.param(words, &[s.size("vocab_size")?, width])?;
        let mut x = b.node("embeddings.word_embeddings", Embedding {}, &[tokens, table])?;
        if s.flag_or("position_biased_input", true)? {
            let positions = b.node("embeddings.positions", Positions::default(), &[tokens])?;
            let table = b.param(&format!("{prefix}embeddings.position_embeddings.weight"), &[s.size_or("max_position_embeddings", 512)?, width])?;
            let positions = b.node("embeddings.position_embeddings", Embedding {}, &[positions, table])?;
            x = b.node("embeddings.with_positions", Add {}, &[x, positions])?;
        }
        if s.token_or("type_vocab_size", 0)? > 0 {
            let types = b.input("token_type_ids", TensorType::int([Dim::named("batch"), Dim::named("sequence")]))?;
            let table = b.param(&format!("{prefix}embeddings.token_type_embeddings.weight"), &[s.size("type_vocab_size")?, width])?;
            let types = b.node("embeddings.token_type_embeddings", Embedding {}, &[types, table])?;
            x = b.node("embeddings.with_types", Add {}, &[x, types])?;
        }
        if width == hidden {
            return Ok(x);
        }
        linear_with(b, "embeddings.embed_proj", &format!("{prefix}embeddings.embed_proj"), x, hidden, false)
    }

    /// The enabled products with relative positions, and the relative position embeddings, if there are any.
    fn distances(s: &Settings, b: &mut Builder, prefix: &str) -> Result<([bool; 2], Option<Distances>)> {
        let enabled = match s.get("pos_att_type") {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            Some(_) => parts_of(s.text("pos_att_type")?),
            None => Vec::new(),
        };
        let enabled_products = ["c2p", "p2c"].map(|kind| enabled.iter().any(|name| name == kind));
        if !s.flag_or("relative_attention", false)? {
            return Ok((enabled_products, None));
        }
        let size = |key: &str| s.token_or(key, -1).map(|size| usize::try_from(size).ok().filter(|size| *size > 0));
        let far = size("max_relative_positions")?.map_or_else(|| s.size_or("max_position_embeddings", 512), Ok)?;
        let rows = size("position_buckets")?;
        let (span, max_distance) = rows.map_or((far, None), |rows| (rows, Some(far.saturating_sub(1))));
        let table = b.param(&format!("{prefix}encoder.rel_embeddings.weight"), &[span.saturating_mul(2), s.size("hidden_size")?])?;
        Ok((
            enabled_products,
            Some(Distances {
                table,
                normed: parts_of(s.text_or("norm_rel_ebd", "none")?).iter().any(|part| part == "layer_norm"),
                shared: s.flag_or("share_att_key", false)?,
                enabled_products,
                products: RelativeProducts { span, max_distance, ..RelativeProducts::default() },
            }),
        ))
    }

    fn parts_of(text: &str) -> Vec<String> {
        text.to_lowercase().split('|').map(|part| part.trim().to_owned()).collect()
    }

    impl Encoder<'_> {
        fn layer(&self, b: &mut Builder, node: &str, x: ValueId) -> Result<ValueId> {
            let (module, block, attention) = (format!("{}{node}", self.prefix), &self.block, format!("{node}.{}", NAMES.attention));
            block.with_attention(b, (node, &module), x, |b, x| {
                let qkv = block.qkv(b, (node, &module), [x; 3])?;
                let heads = split_heads(b, &attention, qkv, block.head_dim)?;
                let bias = self.distances.as_ref().map(|distances| self.bias(b, distances, node, heads)).transpose()?.flatten();
                let extras: Vec<ValueId> = block.extras.iter().copied().chain(bias).collect();
                let context = attend_heads(b, &attention, heads, block.head_dim, block.attention, &extras)?;
                block.out(b, (node, &module), context)
            })
        }

        /// The attention bias of relative positions, if any product is enabled. Each layer recomputes it from
        /// the table, so that the residual stream is the only activation passed between layers.
        fn bias(&self, b: &mut Builder, distances: &Distances, node: &str, [q, k, _]: [ValueId; 3]) -> Result<Option<ValueId>> {
            let attention = format!("{node}.{}", NAMES.attention);
            let (mut table, width) = (distances.table, b.width(distances.table)?);
            if distances.normed && distances.enabled_products.contains(&true) {
                table = layer_norm(b, &format!("{attention}.rel_embeddings"), &format!("{}encoder.LayerNorm", self.prefix), table, self.block.epsilon)?;
            }
            let scale = self.block.attention.scale / (self.block.head_dim as f64).sqrt();
            let [keys, queries] = [["key_proj", "pos_key_proj"], ["query_proj", "pos_query_proj"]];
            let mut sum = None;
            for (is_enabled, kind, heads, [shared, own], of_keys) in
                [(distances.enabled_products[0], "c2p", q, keys, false), (distances.enabled_products[1], "p2c", k, queries, true)]
            {
                if !is_enabled {
                    continue;
                }
                let module = format!("{}{attention}.{}", self.prefix, if distances.shared { shared } else { own });
                let vectors = linear_with(b, &format!("{attention}.{own}"), &module, table, width, true)?;
                let products = b.node(&format!("{attention}.{kind}"), RelativeProducts { scale, of_keys, ..distances.products }, &[heads, vectors])?;
                sum = Some(match sum {
                    Some(sum) => b.node(&format!("{attention}.distances"), Add {}, &[sum, products])?,
                    None => products,
                });
            }
            Ok(sum)
        }
    }

    /// The head of a masked language model: that of the first releases of transformers (legacy), or that of
    /// the original checkpoints.
    fn masked(s: &Settings, b: &mut Builder, (prefix, words): (&str, &str), x: ValueId) -> Result<()> {
        let legacy = s.flag_or("legacy", true)?;
        let [dense, norm] = if legacy {
            ["cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"]
        } else {
            ["lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm"]
        };
        if !has_head(b, prefix, dense) {
            return Ok(());
        }
        let width = b.width(x)?;
        let y = linear_with(b, dense, dense, x, if legacy { s.size_or("embedding_size", width)? } else { width }, true)?;
        let y = activate(b, &format!("{dense}.act"), s.text_or("hidden_act", "gelu")?, y)?;
        let y = layer_norm(b, norm, norm, y, s.number_or("layer_norm_eps", 1e-7)?)?;
        let logits = if legacy {
            tied_head(s, b, "cls.predictions.decoder", words, "cls.predictions.bias", y)?
        } else {
            let shape = [s.size("vocab_size")?, width];
            let inputs = [y, b.param(words, &shape)?, b.param("lm_predictions.lm_head.bias", &shape[..1])?];
            b.node("lm_predictions.lm_head", Linear { input_major: false }, &inputs)?
        };
        b.output("logits", logits);
        Ok(())
    }
}
