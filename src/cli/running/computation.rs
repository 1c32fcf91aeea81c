//! Inputs and outputs of a model, for `compress inspect`.

use serde::Serialize;

use crate::arch;
use crate::data;
use crate::error::Result;
use crate::ir::Graph;
use crate::model::Model;

/// Names of the tensors that map token ids between a head and its model.
const TOKEN_MAPS: [&str; 2] = ["d2t", "t2d"];

/// Inputs and outputs of a model, if known.
#[derive(Default)]
pub(in crate::cli) struct Computation {
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    /// Reason why the model cannot be run.
    pub cannot_run: Option<String>,
    /// Unused keys and weights; `None` if the model has no graph.
    pub unused: Option<Unused>,
}

/// Configuration keys and weights that the graph does not use.
#[derive(Serialize)]
pub(in crate::cli) struct Unused {
    /// Keys of configuration files, each after the name of its file.
    pub keys: Vec<String>,
    pub weights: Vec<String>,
    /// Weights of a vision tower, which passes copy.
    pub tower: Vec<String>,
    /// Maps between the token ids of a head for speculative decoding and those of its model.
    pub token_maps: Vec<String>,
}

impl Computation {
    pub fn from_model(model: &Model) -> Computation {
        if let (Some(file), None) = (&model.onnx, &model.changed_graph) {
            let [inputs, outputs] = file.ports();
            return Computation { inputs, outputs, ..Computation::default() };
        }
        let message = |reason: crate::error::Error| Some(reason.to_string());
        let (graph, keys) = match model.graph_and_unknown_keys() {
            Ok(found) => found,
            Err(reason) => return Computation { cannot_run: message(reason), ..Computation::default() },
        };
        let (unused, cannot_run) = match unused(model, &graph, keys) {
            Ok(unused) => (Some(unused), None),
            Err(reason) => (None, message(reason)),
        };
        let inputs = graph.inputs().map(|(_, value)| format!("{}: {}", value.name, value.ty)).collect();
        let outputs = graph.outputs().iter().map(|(name, id)| format!("{name}: {}", graph.value(*id).ty)).collect();
        Computation { inputs, outputs, cannot_run, unused }
    }
}

fn unused(model: &Model, graph: &Graph, mut keys: Vec<String>) -> Result<Unused> {
    keys.extend(data::unknown_keys(&model.path)?);
    let has_tower = arch::has_tower(model.config.model_type());
    let is_head = arch::is_draft_head(model.config.model_type());
    let (tower, weights) = model.unused(graph).into_iter().partition::<Vec<String>, _>(|name| has_tower && arch::is_of_tower(name));
    let (token_maps, weights) = weights.into_iter().partition(|name| is_head && TOKEN_MAPS.contains(&name.as_str()));
    Ok(Unused { keys, weights, tower, token_maps })
}
