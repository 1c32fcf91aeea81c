//! Matrices and kernels of ONNX files that no layer of the graph reads, because their nodes have no typed
//! form.

use std::collections::BTreeSet;

use crate::error::{Error, counted};
use crate::model::Model;
use crate::store::{DType, Role, Weight};

/// Hint for nodes of other floats.
const FLOATS_HINT: &str = "export the model in float32 or float16, or use `quantize-dynamic`, which changes only weights";
/// Hint for nodes in bodies.
const BODY_HINT: &str = "use `quantize-dynamic`, which also quantizes weights in bodies; a condition that never changes can be removed from the file first";

/// Hint for nodes that also scale or transpose.
const GEMM_HINT: &str = "use `quantize-dynamic`, which stores the weight as integers";

/// Why a weight is not that of a layer of the graph.
enum Cause {
    /// Its node computes in this dtype.
    Floats(DType),
    /// Its node is in a body of a control flow operator.
    Body,
    /// Its node is a Gemm that also scales or transposes.
    Gemm,
}

impl Cause {
    fn of(model: &Model, weight: &Weight, name: &str) -> Option<Cause> {
        let file = model.onnx.as_ref().filter(|_| matches!(weight.role, Some(Role::Matrix | Role::Kernel)))?;
        match weight.dtype {
            DType::BF16 | DType::F64 => Some(Cause::Floats(weight.dtype)),
            _ if file.is_layer_in_body(name) => Some(Cause::Body),
            _ => file.is_of_scaled_gemm(name).then_some(Cause::Gemm),
        }
    }

    fn text(&self) -> String {
        match self {
            Cause::Floats(dtype) => format!("computes with {dtype}, but static quantization requires float32 or float16"),
            Cause::Body => "is in a body of a control flow operator, in which only products and convolutions with a weight of their own are quantized".into(),
            Cause::Gemm => "is a Gemm with `alpha`, `beta` or `transA`, which static quantization does not support".into(),
        }
    }

    fn hint(&self) -> &'static str {
        match self {
            Cause::Floats(_) => FLOATS_HINT,
            Cause::Body => BODY_HINT,
            Cause::Gemm => GEMM_HINT,
        }
    }
}

/// The first node that reads a weight, or the weight if the node has no name.
fn node(name: &str, weight: &Weight) -> String {
    weight.readers.first().map_or_else(|| format!("the node that reads `{name}`"), |node| format!("node `{node}`"))
}

/// The error for a weight that cannot be quantized although it is one of a layer.
pub(super) fn error(model: &Model, name: &str) -> Option<Error> {
    let weight = model.weights.by_name.get(name)?;
    let cause = Cause::of(model, weight, name)?;
    Some(Error::tensor(name, format!("cannot be quantized: {} {}", node(name, weight), cause.text()), cause.hint()))
}

/// The error for the first of these weights, if the graph has no layer at all.
pub(super) fn first_error(model: &Model) -> Option<Error> {
    model.weights.by_name.keys().find_map(|name| error(model, name))
}

/// Notes on weights that stay floats for these reasons; `candidates` are those of layers of the graph.
pub(super) fn notes(model: &Model, candidates: &BTreeSet<&str>) -> Vec<String> {
    let others = model.weights.by_name.iter().filter(|(name, _)| !candidates.contains(name.as_str()));
    let causes: Vec<_> = others.filter_map(|(name, weight)| Some((name, weight, Cause::of(model, weight, name)?))).collect();
    let Some((name, weight, cause)) = causes.first() else { return Vec::new() };
    let count = counted(causes.len(), "layer weight");
    vec![format!("{count} left in floats, the first: `{name}`, because {} {}: {}", node(name, weight), cause.text(), cause.hint())]
}
