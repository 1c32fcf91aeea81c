//! What a model computes, in short, for `compress inspect`.

use serde::Serialize;

use crate::data;
use crate::error::Result;
use crate::ir::Graph;
use crate::model::Model;

/// What a model takes and gives, as far as that is known.
#[derive(Default)]
pub(in crate::cli) struct Computation {
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    /// Why it cannot be run.
    pub cannot_run: Option<String>,
    /// What of the folder nothing is computed by; nothing where it says nothing of what is computed.
    pub unused: Option<Unused>,
}

/// What of a folder nothing is computed by.
#[derive(Serialize)]
pub(in crate::cli) struct Unused {
    /// Keys of its files, each behind the file's name.
    pub keys: Vec<String>,
    pub weights: Vec<String>,
}

impl Computation {
    pub fn of(model: &Model) -> Computation {
        if let (Some(file), None) = (&model.onnx, &model.changed_graph) {
            let [inputs, outputs] = file.ports();
            return Computation { inputs, outputs, ..Computation::default() };
        }
        let refused = |reason: crate::error::Error| Some(reason.to_string());
        let (graph, keys) = match model.graph_and_unknown_keys() {
            Ok(found) => found,
            Err(reason) => return Computation { cannot_run: refused(reason), ..Computation::default() },
        };
        let (unused, cannot_run) = match unused(model, &graph, keys) {
            Ok(unused) => (Some(unused), None),
            Err(reason) => (None, refused(reason)),
        };
        let inputs = graph.inputs().map(|(_, value)| format!("{}: {}", value.name, value.ty)).collect();
        let outputs = graph.outputs().iter().map(|(name, id)| format!("{name}: {}", graph.value(*id).ty)).collect();
        Computation { inputs, outputs, cannot_run, unused }
    }
}

fn unused(model: &Model, graph: &Graph, mut keys: Vec<String>) -> Result<Unused> {
    keys.extend(data::unknown_keys(&model.path)?);
    Ok(Unused { keys, weights: model.unused(graph) })
}
