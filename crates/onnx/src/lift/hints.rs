//! Next steps if a file cannot be converted to a graph.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::check::{bodies, label};
use super::super::functions::refusal;
use super::super::proto::{DataType, GraphProto, NodeProto, ValueInfoProto};
use super::Lift;
use crate::runtime;

impl Lift<'_> {
    /// The next steps for a file that cannot be converted.
    pub(super) fn hint(&self) -> String {
        let mut steps = Vec::new();
        if runtime::library().is_err() {
            steps.push("ONNX Runtime is required for unsupported nodes (`compress doctor --fetch`)".to_owned());
        }
        if let Some(graph) = &self.file.model.graph {
            steps.extend(self.function_calls());
            steps.extend(float_inputs(graph));
            steps.extend(non_tensor_outputs(graph));
            steps.extend(small_floats(graph));
        }
        steps.push("passes that only change weights can process it".to_owned());
        let open = self.file.open_sizes();
        if !open.is_empty() {
            steps.push(format!("if nodes support only some sizes, specify them as `sizes`, such as NAME=1x512: open dimensions are in {}", open.join(", ")));
        }
        steps.join("; ")
    }

    /// A call that has not been replaced.
    fn function_calls(&self) -> Option<String> {
        let functions = &self.file.model.functions;
        let called = |node: &NodeProto| functions.iter().find(|function| function.name() == node.op_type() && function.domain() == node.domain());
        let mut open: Vec<&NodeProto> = self.file.expanded().ok()?.nodes.iter().rev().collect();
        while let Some(node) = open.pop() {
            if let Some(function) = called(node) {
                let (call, opset) = (label(node), self.file.opset());
                let reason = refusal(function, opset).map_or(String::new(), |reason| format!(" ({reason})"));
                let hint = "export the file with one opset, or inline its functions first, with `onnx.inliner.inline_local_functions` in Python";
                return Some(format!("{call} calls a function of the file{reason}: {hint}"));
            }
            open.extend(bodies(node).flat_map(|body| &body.node));
        }
        None
    }
}

fn float_inputs(graph: &GraphProto) -> Option<String> {
    let is_wrong = |ty: &DataType| matches!(ty, DataType::Bfloat16 | DataType::Double);
    let element = |input: &ValueInfoProto| Some(input.r#type.as_ref()?.tensor_type.as_ref()?.elem_type());
    let (input, ty) = graph.input.iter().find_map(|input| Some((input.name(), element(input).filter(is_wrong)?)))?;
    Some(format!("the input `{input}` is {ty:?}: export the model in float32, which passes that run the model require"))
}

fn non_tensor_outputs(graph: &GraphProto) -> Option<String> {
    let is_other =
        |output: &&ValueInfoProto| output.r#type.as_ref().is_some_and(|ty| ty.sequence_type.is_some() || ty.map_type.is_some() || ty.optional_type.is_some());
    let output = graph.output.iter().find(is_other)?.name();
    Some(format!("the output `{output}` is not a tensor: remove the node that computes it, for classifiers of skl2onnx with the option `zipmap: False`"))
}

fn small_floats(graph: &GraphProto) -> Option<String> {
    let is_small = |ty: DataType| {
        matches!(
            ty,
            DataType::Float8E4m3 | DataType::Float8E4m3Fnuz | DataType::Float8E5m2 | DataType::Float8E5m2Fnuz | DataType::Float8E8m0 | DataType::Float4E2m1
        )
    };
    let tensor = graph.initializer.iter().find(|tensor| is_small(tensor.data_type()))?;
    Some(format!("`{}` has elements of type {:?}: start from a file with float32 or int8 weights", tensor.name(), tensor.data_type()))
}
