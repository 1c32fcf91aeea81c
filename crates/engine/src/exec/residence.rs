//! The form in which parameters are in memory.

use std::collections::BTreeSet;

use candle_core::{DType, Device};

use super::coded::layout;
use crate::ir::Graph;
use crate::ir::ops::on_host;
use crate::kernel::coded::CodedMatrix;
use crate::store::{Codes, DType as Stored, QuantizationSpec, Weight};

/// Storage precision of parameters in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residence {
    /// The precision of the computation.
    Computed,
    /// 16-bit floats where the checkpoint has them, converted on each use; else the precision of the
    /// computation.
    Stored,
    /// As `Stored`, and integers of quantized weights that kernels multiply.
    Coded,
}

impl Residence {
    /// The most compact one for models that only run forward.
    pub fn most_compact(device: &Device, compute: DType) -> Residence {
        if compute == DType::F32 && on_host(device) { Residence::Coded } else { Residence::Stored }
    }

    /// Bytes of a weight in memory that does not consist of integers.
    pub fn bytes(self, weight: &Weight, compute: DType) -> u64 {
        (weight.elements() * self.dtype(weight, compute).size_in_bytes()) as u64
    }

    /// Type of a weight's elements in memory.
    pub fn dtype(self, weight: &Weight, compute: DType) -> DType {
        match (self, weight.dtype) {
            (Residence::Stored | Residence::Coded, Stored::BF16) => DType::BF16,
            (Residence::Stored | Residence::Coded, Stored::F16) => DType::F16,
            _ => compute,
        }
    }
}

/// The parameters of a graph that all their nodes accept as integers; none with another residence or in 16
/// bits.
pub(super) fn coded_parameters(graph: &Graph, residence: Residence, compute: DType) -> BTreeSet<String> {
    if residence != Residence::Coded || compute != DType::F32 {
        return BTreeSet::new();
    }
    let params = || graph.params().filter(|(id, _)| !graph.is_output(*id));
    let uses = || graph.nodes().iter().flat_map(|node| node.inputs.iter().enumerate().map(move |(index, id)| (*id, node.op.spec().accepts_codes(index))));
    let others: BTreeSet<_> = uses().filter(|(_, accepts)| !accepts).map(|(id, _)| id).collect();
    params().filter(|(id, _)| !others.contains(id)).map(|(_, value)| value.name.clone()).collect()
}

/// Maximum number of different integers.
fn integers(spec: &QuantizationSpec) -> usize {
    match spec.codes {
        Codes::Integer(bits) if spec.symmetric => 1 << bits,
        Codes::Float(format) => 1 << format.bits(),
        // Differences of codes and zero points.
        Codes::Integer(_) | Codes::Palette(_) => 256,
    }
}

/// Bytes of a weight in memory, at most. Those of the [`coded_parameters`] that have integers have scales of
/// 32 bits.
pub(super) fn bytes(name: &String, weight: &Weight, coded: &BTreeSet<String>, residence: Residence, compute: DType) -> u64 {
    match layout(weight).filter(|_| coded.contains(name)) {
        Some((spec, group, _)) => CodedMatrix::bytes_of(weight.elements(), [weight.row(), group], integers(spec)) as u64,
        None => residence.bytes(weight, compute),
    }
}
