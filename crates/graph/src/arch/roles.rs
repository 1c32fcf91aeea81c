//! Roles of weights, by the table of families or, for other models, by names.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{SELECTION_BIAS, Tie, conventions, family};
use crate::store::{Role, Weight};

/// Sets the roles of the weights of a checkpoint that have none.
pub fn mark_roles(weights: &mut BTreeMap<String, Weight>, config: &Map<String, Value>) {
    let Some(family) = family(super::model_type(config)) else { return conventions::mark(weights, config) };
    for (name, weight) in weights.iter_mut().filter(|(_, weight)| weight.role.is_none()) {
        let Some(module) = name.strip_suffix(".weight") else { continue };
        weight.role = match weight.shape.len() {
            2 => Some(family.role(module).unwrap_or(Role::Matrix)),
            3 if family.is_stacked(module) => Some(Role::Experts),
            // Filters of short convolutions, with few elements for each channel.
            3 => family.role(module).filter(|role| *role == Role::Other),
            _ => None,
        };
    }
}

/// The role of a weight; without a recorded one, by its name. `None` for weights of linear layers.
pub fn role(name: &str, weight: &Weight) -> Option<Role> {
    weight.role.or_else(|| conventions::role(name))
}

/// Whether a matrix is an embedding table, by its name.
pub fn is_embedding_table(model_type: &str, name: &str) -> bool {
    let role = match (family(model_type), name.strip_suffix(".weight")) {
        (Some(family), Some(module)) => family.role(module),
        _ => conventions::role(name),
    };
    role == Some(Role::Table)
}

/// Weights that are tied unless `config.json` unties them.
pub fn tied(model_type: &str) -> &'static [Tie] {
    family(model_type).map_or(conventions::TIED, |family| family.tied)
}

/// Names of the same table, regardless of the configuration.
pub fn shared_tables(model_type: &str) -> &'static [Tie] {
    family(model_type).map_or(&[], |family| family.shared_tables)
}

/// Whether transformers keeps a tensor in float32 if the model has a 16-bit dtype.
pub fn stays_float32(model_type: &str, name: &str) -> bool {
    let dotted = format!(".{name}.");
    let parts = family(model_type).map_or(SELECTION_BIAS, |family| family.float32);
    parts.iter().any(|part| dotted.contains(&format!(".{part}.")))
}

/// Name of the layer that runtimes fuse a weight into; the unchanged name if the weight is not fused.
pub fn fused_layer(model_type: &str, name: &str) -> String {
    let groups = family(model_type).map_or(conventions::FUSED, |family| family.fused);
    let Some(module) = name.strip_suffix(".weight") else { return name.to_owned() };
    let parent = |part: &&str| module.strip_suffix(*part).filter(|parent| parent.ends_with('.'));
    let fused = groups.iter().find_map(|parts| Some(format!("{}{}", parts.iter().find_map(parent)?, parts.join("+"))));
    fused.unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::families;

    /// A family in the table leaves the same kinds of modules unchanged as a family that is not.
    #[test]
    fn every_family_exempts_the_modules_that_conventions_exempt() {
        for (name, role) in [
            ("model.visual.blocks.0.mlp.fc1", Role::Vision),
            ("vision_tower.layers.0.mlp.fc1", Role::Vision),
            ("model.multi_modal_projector.linear_1", Role::Vision),
            ("mtp.layers.0.mixer.q_proj", Role::TokenPrediction),
            ("model.layers.3.eh_proj", Role::TokenPrediction),
            ("model.layers.3.self_attn.indexer.weights_proj", Role::Other),
        ] {
            assert_eq!(conventions::role(&format!("{name}.weight")), Some(role), "{name}");
            for family in families() {
                assert_eq!(family.role(name), Some(role), "{}: {name}", family.model_type);
            }
        }
        let ernie = family("ernie4_5_moe").unwrap();
        assert_eq!(ernie.role("model.mtp_block.0.self_attn.q_proj"), Some(Role::TokenPrediction));
        assert_eq!(ernie.role("model.mtp_linear_proj.0"), Some(Role::TokenPrediction));
    }
}
