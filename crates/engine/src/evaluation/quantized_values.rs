//! Node-by-node verification of a static int8 ONNX file.
//!
//! Rounding to eight bits amplifies differences: two correct implementations that differ by one
//! quantization step in an early layer can have different outputs after fifty layers. Each quantized
//! value is therefore compared in isolation: the built-in executor computes it from the quantized values
//! that ONNX Runtime computed, and both must agree to within one step. Layers with dynamic quantization in
//! between round values that are not replaced, so that single values can differ by more.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use prost::Message;
use rayon::prelude::*;

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::evaluation::{Fidelity, FidelityAccumulator, without_common_nonfinite};
use crate::exec::{Executor, Parameters, Residence, Rounding, rounding_scheme};
use crate::ir::Graph;
use crate::ir::ops::Op;
use crate::kernel::codes::{self, CodeDifferences};
use crate::model::Model;
use crate::onnx::proto::{DataType, GraphProto, ModelProto, NodeProto, TensorTypeProto, TypeProto, ValueInfoProto};
use crate::runtime::{self, Session};
use crate::work::Work;

/// Tolerance in quantization steps: a sum halfway between two steps may be rounded either way.
const STEPS: f64 = 1.0;

/// Minimum cosine similarity of values of models that multiply dynamically quantized integers or 16-bit
/// floats, in which values halfway between two steps may round either way.
pub const MIN_COSINE: f64 = 0.99;

/// Number of values that are compared in one job.
const CHUNK: usize = 1 << 16;

/// The result of a comparison.
#[derive(Debug)]
pub struct Agreement {
    /// Number of quantized values of the graph.
    pub values: usize,
    /// The value that exceeds the tolerance by the largest difference, with this difference in steps.
    pub wrong: Option<(String, i64)>,
    /// Fidelity of the outputs that the built-in executor computes from the file's quantized values to
    /// the outputs of the file.
    pub outputs: Fidelity,
}

/// A quantized value: the size of a step, and the code of zero in the file.
struct Quantized {
    scale: f32,
    zero: i16,
}

/// Whether differences are larger than two correct implementations can have. `is_dynamic`: layers with
/// dynamic quantization compute the value.
fn exceed_tolerance(found: &CodeDifferences, is_dynamic: bool) -> bool {
    let similar = found.products >= MIN_COSINE * (found.squares[0] * found.squares[1]).sqrt();
    found.largest > STEPS && !(is_dynamic && similar)
}

impl Quantized {
    /// Compares a fake-quantized tensor with the codes in the file, and returns the values of these codes.
    fn replace(&self, computed: &Tensor, codes: &[i16], differences: &mut CodeDifferences) -> candle_core::Result<Tensor> {
        let mut values = computed.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let chunks = values.par_chunks_mut(CHUNK).zip(codes.par_chunks(CHUNK));
        let chunks = chunks.map(|(values, codes)| codes::replace(values, codes, self.scale, self.zero));
        // In order, so that sums do not depend on the number of threads.
        chunks.collect::<Vec<_>>().iter().for_each(|found| differences.merge(found));
        Tensor::from_vec(values, computed.dims(), computed.device())?.to_dtype(computed.dtype())
    }
}

/// Whether a graph quantizes activations statically.
pub fn is_static(graph: &Graph) -> bool {
    graph.nodes().iter().any(|node| matches!(node.op, Op::FakeQuantize(_)))
}

/// Compares all quantized values of a file with the values that the built-in executor computes from the
/// same inputs. Returns `None` if the shape of a value differs in the file, as it does for the rows
/// routed to an expert.
pub fn compare(model: &Model, file: &Path, samples: &[Batch], work: &Work) -> Result<Option<Agreement>> {
    let graph = model.graph()?;
    let bytes = std::fs::read(file).map_err(Error::io("read", file))?;
    let mut proto = ModelProto::decode(bytes.as_slice()).map_err(|e| Error::malformed(file, e))?;
    let Some(quantized) = expose(&graph, &mut proto)? else { return Ok(None) };
    let mut session = Session::from_model(&proto, file, runtime::Options { threads: work.threads, narrow: true, ..runtime::Options::default() })?;
    let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Stored, work)?;
    let executor = Executor::new(&graph, parameters, Device::Cpu).with_rounding(Rounding::Tensor);
    let mut differences: BTreeMap<String, CodeDifferences> = BTreeMap::new();
    let mut other_shape = false;
    let mut fidelity = FidelityAccumulator::default();
    for sample in samples {
        work.cancel.check()?;
        let onnx_outputs = session.run(&sample.inputs)?;
        let mut replace = |name: &str, computed: Tensor| {
            let failed = |e| Error::run(format!("graph value `{name}`"), e, "");
            let (Some(quantized), Some(codes)) = (quantized.get(name), onnx_outputs.get(&codes_of(name))) else { return Ok(computed) };
            if codes.dims() != computed.dims() {
                other_shape = true;
                return Ok(computed);
            }
            let codes = codes.flatten_all().and_then(|codes| codes.to_vec1::<i16>()).map_err(failed)?;
            quantized.replace(&computed, &codes, differences.entry(name.to_owned()).or_default()).map_err(failed)
        };
        let outputs = executor.run_replacing(|name| quantized.contains_key(name), &sample.inputs, &mut replace)?;
        if other_shape {
            return Ok(None);
        }
        let [outputs, onnx_outputs] = without_common_nonfinite(&outputs, &onnx_outputs)?;
        fidelity.add(sample, &outputs, &onnx_outputs)?;
    }
    let dynamic = from_dynamic_layers(&graph, |name| model.weights.by_name.get(name).is_some_and(|weight| rounding_scheme(weight).is_some()));
    let wrong = differences.into_iter().filter(|(name, found)| exceed_tolerance(found, dynamic.contains(name.as_str())));
    let wrong = wrong.map(|(name, found)| (name, found.largest as i64)).max_by_key(|(_, steps)| *steps);
    Ok(Some(Agreement { values: quantized.len(), wrong, outputs: fidelity.finish() }))
}

/// Quantized values that are computed by layers with dynamic quantization from other quantized values.
fn from_dynamic_layers(graph: &Graph, is_dynamic: impl Fn(&str) -> bool) -> BTreeSet<&str> {
    let (mut reached, mut found) = (BTreeSet::new(), BTreeSet::new());
    for node in graph.nodes() {
        let is_reached = node.inputs.iter().any(|input| reached.contains(input) || is_dynamic(&graph.value(*input).name));
        match &node.op {
            _ if !is_reached => {}
            Op::FakeQuantize(_) => _ = found.insert(graph.value(node.output).name.as_str()),
            _ => _ = reached.insert(node.output),
        }
    }
    found
}

/// Suffix of the names of quantized codes in a file.
const CODES: &str = "/integers";

/// Name of the codes of a quantized value in a file.
fn codes_of(value: &str) -> String {
    format!("{value}{CODES}")
}

/// Adds the codes of all quantized values to the outputs of a file. Kernels stay fused, because these
/// codes are their outputs. Returns `None` if the file quantizes activations that the graph does not,
/// such as those of the dense layers of sentence-transformers.
fn expose(graph: &Graph, proto: &mut ModelProto) -> Result<Option<BTreeMap<String, Quantized>>> {
    let file = proto.graph.get_or_insert_default();
    let mut found = BTreeMap::new();
    for node in graph.nodes() {
        let Op::FakeQuantize(quantizer) = &node.op else { continue };
        let name = &graph.value(node.output).name;
        let codes = codes_of(name);
        let written = file.node.iter().find(|node| node.op_type() == "QuantizeLinear" && node.output.first() == Some(&codes));
        let kind = written
            .and_then(|written| zero_point_type(file, written))
            .ok_or_else(|| Error::graph(format!("graph value `{name}`"), "has no `QuantizeLinear` with a zero point in the ONNX file"))?;
        let zero = quantizer.zero_point;
        let outside = || Error::graph(format!("graph value `{name}`"), format!("has the zero point {zero}, which is not an 8-bit integer"));
        let zero = i16::from(i8::try_from(zero).map_err(|_| outside())?) + if kind == DataType::Uint8 { 128 } else { 0 };
        found.insert(name.clone(), Quantized { scale: quantizer.scale, zero });
        let tensor = TensorTypeProto { elem_type: Some(kind as i32), shape: None };
        let ty = TypeProto { tensor_type: Some(tensor), ..TypeProto::default() };
        file.output.push(ValueInfoProto { name: Some(codes), r#type: Some(ty), ..ValueInfoProto::default() });
    }
    let initializers: BTreeSet<&str> = file.initializer.iter().map(|tensor| tensor.name()).collect();
    let is_known = |node: &NodeProto| node.output.first().and_then(|name| name.strip_suffix(CODES)).is_some_and(|value| found.contains_key(value));
    let is_activation = |node: &&NodeProto| node.op_type() == "QuantizeLinear" && node.input.first().is_some_and(|name| !initializers.contains(&**name));
    Ok(file.node.iter().filter(is_activation).all(is_known).then_some(found))
}

/// Type of the codes that a `QuantizeLinear` node returns.
fn zero_point_type(file: &GraphProto, node: &NodeProto) -> Option<DataType> {
    let name = node.input.get(2)?;
    let zero_point = file.initializer.iter().find(|tensor| tensor.name.as_ref() == Some(name))?;
    [DataType::Uint8, DataType::Int8].into_iter().find(|kind| zero_point.data_type == Some(*kind as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_dynamic_layers_are_found() {
        let quantizer = "FakeQuantize{\"scale\":0.01,\"zero_point\":0}";
        let text = format!(
            "input x: float[batch, 4]\nparam a: float[4, 4]\nparam b: float[4, 4]\nparam c: float[4, 4]\n\
            q0 = {quantizer}(x) -> float[batch, 4]\nh0 = Linear(q0, a) -> float[batch, 4]\nq1 = {quantizer}(h0) -> float[batch, 4]\n\
            h1 = Linear(q1, b) -> float[batch, 4]\nr1 = Relu(h1) -> float[batch, 4]\nq2 = {quantizer}(r1) -> float[batch, 4]\n\
            h2 = Linear(q2, c) -> float[batch, 4]\nq3 = {quantizer}(h2) -> float[batch, 4]\noutput y = q3\n"
        );
        let graph: Graph = text.parse().unwrap();
        assert_eq!(from_dynamic_layers(&graph, |name| name == "b"), BTreeSet::from(["q2"]));
        assert_eq!(from_dynamic_layers(&graph, |name| name == "a" || name == "c"), BTreeSet::from(["q1", "q3"]));
    }

    #[test]
    fn similar_values_are_accepted_after_dynamic_layers() {
        let exceeds = |differ: usize, steps: i16| {
            let mut found = CodeDifferences::default();
            let quantized = Quantized { scale: 0.25, zero: 128 };
            for start in [0, 500] {
                let exact: Vec<i16> = (start..start + 500).map(|at| 128 + at as i16 % 41 - 20).collect();
                let codes: Vec<i16> = (start..).zip(&exact).map(|(at, code)| if at < differ { code + steps } else { *code }).collect();
                let computed: Vec<f32> = exact.iter().map(|code| f32::from(code - 128) / 4.0).collect();
                let replaced = quantized.replace(&Tensor::new(computed, &Device::Cpu).unwrap(), &codes, &mut found).unwrap();
                assert_eq!(replaced.to_vec1::<f32>().unwrap(), codes.iter().map(|code| f32::from(code - 128) / 4.0).collect::<Vec<_>>());
            }
            [false, true].map(|is_dynamic| exceed_tolerance(&found, is_dynamic))
        };
        assert_eq!(exceeds(1000, 1), [false, false]);
        assert_eq!(exceeds(20, 5), [true, false]);
        assert_eq!(exceeds(1000, 4), [true, true]);
    }
}
