//! Names that libraries give to the modules of a checkpoint.

use super::family;

/// Names of output heads and poolers that may have no tensor in the checkpoint: those of all families, as
/// loaders add layers that depend on their model class (`_tied_weights_keys` in transformers).
pub const UNSTORED_HEADS: [&str; 21] = [
    "lm_head",
    "cls.predictions.decoder",
    "predictions.decoder",
    "classifier",
    "score",
    "qa_outputs",
    "ctc_head",
    "decoder",
    "embed_out",
    "generator_lm_head",
    "head",
    "lm_head.decoder",
    "lm_head.out_proj",
    "lm_loss",
    "output",
    "output_projection",
    "pred_layer.proj",
    "proj_out",
    "unembedding_projection",
    "vocab_projector",
    "pooler.dense",
];

/// Prefixes of a language model within a multimodal model: in published checkpoints and vLLM, and in
/// transformers 5.
const LANGUAGE_MODELS: [(&str, &str); 2] = [("language_model.model.", "model.language_model."), ("text_model.model.", "model.text_model.")];

/// The name of a module in the checkpoint, followed by other names that libraries give it, except for a
/// missing or different first component.
pub fn module_spellings(model_type: &str, module: &str) -> Vec<String> {
    let renames = family(model_type).map_or(&[][..], |family| family.renames);
    let renamed = renames.iter().fold(module.to_owned(), |name, (from, to)| name.replace(from, to));
    let mut spellings = vec![module.to_owned()];
    for name in [module, &renamed] {
        let moved =
            LANGUAGE_MODELS.iter().flat_map(|(from, to)| [(from, to), (to, from)]).filter_map(|(from, to)| Some(format!("{to}{}", name.strip_prefix(from)?)));
        for spelling in moved.chain([name.to_owned()]) {
            if !spellings.contains(&spelling) {
                spellings.push(spelling);
            }
        }
    }
    spellings
}

#[cfg(test)]
mod tests {
    use super::module_spellings;

    #[test]
    fn modules_have_their_new_names() {
        for (model_type, stored, new) in [
            ("deit", "deit.encoder.layer.3.attention.attention.query", "deit.layers.3.attention.q_proj"),
            ("beit", "encoder.layer.3.output.dense", "layers.3.mlp.fc2"),
            ("dinov2_with_registers", "encoder.layer.0.attention.output.dense", "encoder.layer.0.attention.o_proj"),
            ("segformer", "encoder.block.2.1.attention.self.key", "stages.2.blocks.1.attention.k_proj"),
        ] {
            assert_eq!(module_spellings(model_type, stored), [stored, new]);
        }
    }
}
