//! Files that compute with 16-bit floats. They are lifted to graphs of 32-bit floats, which compute
//! statistics and quantization parameters more precisely than a runtime would.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use super::initializer_roles::UsageKind;
use super::model_file::ModelFile;
use super::proto::{DataType, GraphProto, ValueInfoProto};
use super::style::Precision;
use super::widened::is_half;
use crate::store::{DType, Encoding, Weight};

impl ModelFile {
    /// Whether the file has inputs or weights of 16-bit floats that it does not convert to 32 bits.
    pub(super) fn finds_half(&self, graph: &GraphProto) -> bool {
        let is_input = |input: &&ValueInfoProto| !self.weights_as_inputs.contains(input.name());
        let is_half_weight = |(name, weight): (&String, &Weight)| weight.dtype == DType::F16 && !self.dequantized_values.contains(name);
        graph.input.iter().filter(is_input).any(is_half) || self.weights.iter().any(is_half_weight)
    }

    /// Whether the file computes with 16-bit floats, at least in parts. Its graph computes with 32 bits.
    pub fn is_half(&self) -> bool {
        self.is_half
    }

    /// The precision in which a changed graph is written: 16 bits unless the file has layers of 32-bit
    /// floats.
    pub fn precision(&self) -> Precision {
        let is_layer = |name: &String| {
            let usages = self.usages.get(name).map_or(&[][..], Vec::as_slice);
            usages.iter().any(|usage| matches!(usage.kind, UsageKind::Columns | UsageKind::Rows | UsageKind::Kernel | UsageKind::Table))
        };
        let mut layers = self.weights.iter().filter(|(name, weight)| weight.encoding == Encoding::Dense && is_layer(name));
        if self.is_half && layers.all(|(_, weight)| weight.dtype != DType::F32) { Precision::Float16 } else { Precision::Float32 }
    }

    /// The types of inputs of 16-bit floats, whose values in the graph have 32 bits.
    pub fn input_types(&self) -> BTreeMap<String, DataType> {
        half_ports(self.model.graph.iter().filter(|_| self.is_half).flat_map(|graph| &graph.input))
    }

    /// The types of outputs that are not 32-bit floats although their values in the graph are.
    pub fn output_types(&self) -> BTreeMap<String, DataType> {
        let mut types = self.converted_outputs();
        types.extend(half_ports(self.model.graph.iter().filter(|_| self.is_half).flat_map(|graph| &graph.output)));
        types
    }
}

fn half_ports<'p>(ports: impl Iterator<Item = &'p ValueInfoProto>) -> BTreeMap<String, DataType> {
    ports.filter(|port| is_half(port)).map(|port| (port.name().to_owned(), DataType::Float16)).collect()
}
