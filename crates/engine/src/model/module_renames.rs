//! Module names that transformers 5 changes when it loads a checkpoint.
//!
//! Source: `conversion_mapping.py` of transformers 5.

/// For each model type: replacements within module names, applied in order.
const RENAMES: [(&str, &[(&str, &str)]); 3] = [
    (
        "vit",
        &[
            ("encoder.layer.", "layers."),
            ("attention.query", "q_proj"),
            ("attention.key", "k_proj"),
            ("attention.value", "v_proj"),
            ("attention.output.dense", "attention.o_proj"),
            ("intermediate.dense", "mlp.fc1"),
            ("output.dense", "mlp.fc2"),
        ],
    ),
    (
        "swin",
        &[
            ("attention.self.query", "attention.q_proj"),
            ("attention.self.key", "attention.k_proj"),
            ("attention.self.value", "attention.v_proj"),
            ("attention.output.dense", "attention.o_proj"),
            ("intermediate.dense", "mlp.fc1"),
            ("output.dense", "mlp.fc2"),
        ],
    ),
    (
        "dinov2",
        &[
            ("attention.attention.query", "attention.q_proj"),
            ("attention.attention.key", "attention.k_proj"),
            ("attention.attention.value", "attention.v_proj"),
            ("attention.output.dense", "attention.o_proj"),
            ("mlp.weights_out", "mlp.down_proj"),
        ],
    ),
];

/// The name of a module in transformers 5, given its name in the checkpoint.
pub fn module_name(model_type: &str, name: &str) -> String {
    let renames = RENAMES.iter().find(|(known, _)| *known == model_type).map_or(&[][..], |(_, renames)| renames);
    renames.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}
