//! Weights that are stored in 16 bits and that a `Cast` converts to the type of the graph, as `cast` writes
//! them. The weight has the name of the result, and its stored dtype.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check::is_own;
use super::initializer_roles::{self, Usage, UsageKind, int};
use super::model_file::{ModelFile, TensorEntry};
use super::proto::{DataType, GraphProto, NodeProto};
use crate::error::counted;
use crate::store::{DType, Encoding, Transposed, Weight};

/// The input, the output and the target type of a cast to floats.
fn float_cast(node: &NodeProto) -> Option<(&str, &str, DataType)> {
    let to = DataType::try_from(i32::try_from(int(node, "to", 0)).ok()?).ok()?;
    let is_float = matches!(to, DataType::Float | DataType::Float16 | DataType::Bfloat16 | DataType::Double);
    match (node.input.as_slice(), node.output.as_slice()) {
        ([input], [output]) if is_float && node.op_type() == "Cast" && is_own(node.domain()) => Some((input, output, to)),
        _ => None,
    }
}

impl ModelFile {
    /// Replaces 16-bit weights that are only read by a cast to 32 bits by the result of the cast.
    pub(super) fn find_converted(&mut self, graph: &GraphProto, usages: &BTreeMap<&str, Vec<Usage>>) {
        let outputs: BTreeSet<&str> = graph.output.iter().map(|output| output.name()).collect();
        for (position, node) in graph.node.iter().enumerate() {
            let Some((input, output, DataType::Float)) = float_cast(node) else { continue };
            let uses = usages.get(output).map_or(&[][..], Vec::as_slice);
            let is_alone = usages.get(input).is_some_and(|usages| matches!(usages.as_slice(), [Usage { node: Some(_), .. }]));
            if !is_alone || uses.is_empty() || outputs.contains(output) || initializer_roles::is_only_quantization_parameter(uses) {
                continue;
            }
            let is_half = |weight: &Weight| matches!(weight.dtype, DType::F16 | DType::BF16) && weight.encoding == Encoding::Dense;
            let Some(weight) = self.weights.get(input).filter(|weight| is_half(weight)).cloned() else { continue };
            let is_stored = |entry: &&mut TensorEntry| entry.weight.as_deref() == Some(input) && !entry.flipped;
            let Some(entry) = self.tensors.iter_mut().find(is_stored) else { continue };
            let (role, flipped) = initializer_roles::role(uses, &weight.shape);
            let mut weight = if flipped { Transposed { upstream: weight }.weight() } else { weight };
            weight.stored_as = vec![input.to_owned()];
            weight.role = Some(role);
            weight.readers = uses.iter().filter_map(|reader| reader.name.clone()).collect();
            entry.weight = Some(output.to_owned());
            entry.flipped = flipped;
            entry.converted = Some(position);
            self.dequantized_values.insert(output.to_owned());
            self.weights.remove(input);
            self.usages.remove(input);
            self.usages.insert(output.to_owned(), uses.to_vec());
            self.weights.insert(output.to_owned(), weight);
        }
    }

    /// A note about layers that read their weights through other casts, if there are any.
    pub(super) fn unsupported_casts(&self) -> Option<String> {
        let graph = self.model.graph.as_ref()?;
        let usages = initializer_roles::usages(&self.model);
        let layer = [UsageKind::Columns, UsageKind::Rows, UsageKind::Kernel, UsageKind::Table];
        let is_read_by_layers = |name: &str| usages.get(name).is_some_and(|uses| uses.iter().any(|usage| layer.contains(&usage.kind)));
        let unsupported: BTreeSet<&str> = graph
            .node
            .iter()
            .filter_map(float_cast)
            .filter(|(input, output, _)| self.weights.contains_key(*input) && !self.dequantized_values.contains(*output) && is_read_by_layers(output))
            .map(|(input, ..)| input)
            .collect();
        let first = unsupported.first()?;
        Some(format!(
            "{} not treated as weights of layers: layers read them through a Cast that is not one from 16 to 32 bits, or several nodes read them (the first: `{first}`)",
            counted(unsupported.len(), "tensor")
        ))
    }
}
