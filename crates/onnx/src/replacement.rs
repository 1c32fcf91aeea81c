//! Replacement of weights by quantized weights or floats with another dtype: stored tensors, and nodes
//! that compute the expected type from them.
//!
//! Matrix products of integers have the pattern that runtimes fuse, as in `lower/integer.rs`. Other
//! weights are dequantized at load time, with operators that all opsets have.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::check;
use super::elements::data_type;
use super::initializer_roles::{Usage, UsageKind, float, int};
use super::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, TensorProto};
use crate::error::{Error, Result};
use crate::store::writer::Item;
use crate::store::{ActivationScheme, DType, Decoded, Encoding, Granularity, QuantizationSpec, Rescaled, StorageFormat, Weight};

/// The replacement for a weight.
pub(super) struct Replacement {
    pub item: Item,
    /// Tensors for the parts of the item, in the same order.
    pub tensors: Vec<TensorProto>,
    /// Nodes that compute the weight from the tensors, if any node still reads it.
    pub nodes: Vec<NodeProto>,
    /// Replaced nodes of the graph, by position.
    pub readers: BTreeMap<usize, Vec<NodeProto>>,
    /// How the file deviates from the encoding, if it does.
    pub remark: Option<&'static str>,
}

/// Plans the replacements for the weights of a file.
pub(super) struct Replacer<'m> {
    model: &'m ModelProto,
    opset: i64,
    used_names: BTreeSet<String>,
    /// Values that do not depend on inputs of the graph.
    constants: BTreeSet<&'m str>,
    /// The quantizer of each dynamically quantized activation.
    quantizers: BTreeMap<String, Quantizer>,
    /// How many earlier products share the input of the current one.
    sibling: usize,
}

/// A `DynamicQuantizeLinear` that several products share.
struct Quantizer {
    node: NodeProto,
    /// Number of products that read it, after the first one.
    siblings: usize,
    /// Position of the first node that reads it.
    position: usize,
}

/// The initializers of a graph, and the values that nodes compute from them.
fn constants(graph: &GraphProto) -> BTreeSet<&str> {
    let mut constants: BTreeSet<&str> = graph.initializer.iter().map(TensorProto::name).collect();
    for node in check::order(&graph.node).into_iter().filter_map(|number| graph.node.get(number)) {
        if check::reads(node).iter().all(|name| constants.contains(name)) {
            constants.extend(node.output.iter().map(String::as_str));
        }
    }
    constants
}

const DEQUANTIZED: &str = "written as dequantized floats, which are not smaller, because the nodes of the file read floats";

impl<'m> Replacer<'m> {
    pub fn new(model: &'m ModelProto, opset: i64) -> Self {
        let mut used_names = BTreeSet::new();
        model.graph.iter().for_each(|graph| check::names(graph, &mut used_names));
        let constants = model.graph.as_ref().map_or_else(BTreeSet::new, constants);
        Self { model, opset, used_names, constants, quantizers: BTreeMap::new(), sibling: 0 }
    }

    /// The nodes that quantize activations, each with the position of the node that it must precede.
    pub fn quantizers(&mut self) -> impl Iterator<Item = (usize, NodeProto)> {
        std::mem::take(&mut self.quantizers).into_values().map(|quantizer| (quantizer.position, quantizer.node))
    }

    fn fresh(&mut self, expected: &str) -> String {
        super::fresh(&mut self.used_names, expected.to_owned())
    }

    /// Plans the replacement of a weight. `flipped`: the graph expects the matrix as `[in, out]`.
    pub fn replace(&mut self, name: &str, before: &Weight, now: &Weight, usages: &[Usage], flipped: bool) -> Result<Replacement> {
        let expected = data_type(before.dtype).filter(|_| before.is_float() && now.is_float());
        let expected = expected.ok_or_else(|| {
            Error::tensor(name, format!("has been changed to {}, but the graph requires {}", now.describe(), before.describe()), "add it to `ignore`")
        })?;
        if matches!(&now.encoding, Encoding::Quantized(spec) if spec.activations.parameters().is_some()) {
            return Err(Error::tensor(
                name,
                "has static activation scales, but the graph of the file has no quantizers for them",
                "this is a bug in compress, please report it",
            ));
        }
        match &now.encoding {
            Encoding::Dense => self.cast(name, now, expected, flipped),
            Encoding::Quantized(affine) if affine.codes.is_integer() && !matches!(affine.granularity, Granularity::Block(_)) => {
                self.integers(name, before, now, affine, usages, expected, flipped)
            }
            Encoding::Quantized(_) => {
                let source = Decoded { upstream: now.source(), dtype: before.dtype, name: name.to_owned() };
                let floats = now.then(before.dtype, Encoding::Dense, Arc::new(source));
                let tensor = tensor_header(name.to_owned(), expected, file_order(&now.shape, flipped));
                let item = Item { name: name.to_owned(), weight: floats, storage_format: storage_format(flipped) };
                Ok(Replacement { item, tensors: vec![tensor], nodes: Vec::new(), readers: BTreeMap::new(), remark: Some(DEQUANTIZED) })
            }
        }
    }

    /// Stores a float weight with another dtype, with a cast if necessary.
    fn cast(&mut self, name: &str, now: &Weight, expected: DataType, flipped: bool) -> Result<Replacement> {
        let stored = data_type(now.dtype).ok_or_else(|| Error::tensor(name, format!("is {}, which ONNX does not support", now.dtype), "add it to `ignore`"))?;
        if stored == DataType::Bfloat16 && self.opset < PER_CHANNEL_OPSET {
            let reason = format!("has been changed to bf16, which requires opset {PER_CHANNEL_OPSET}, but the file has opset {}", self.opset);
            return Err(Error::tensor(name, reason, "cast to f16"));
        }
        if stored == expected {
            // The nodes that dequantized the weight are removed.
            let item = Item { name: name.to_owned(), weight: now.clone(), storage_format: storage_format(flipped) };
            let tensors = vec![tensor_header(name.to_owned(), stored, file_order(&now.shape, flipped))];
            return Ok(Replacement { item, tensors, nodes: Vec::new(), readers: BTreeMap::new(), remark: None });
        }
        let part = self.fresh(&format!("{name}/stored"));
        let nodes = vec![node("Cast", &[&part], name, vec![AttributeProto::int("to", expected as i64)])];
        let item = Item { name: name.to_owned(), weight: now.clone(), storage_format: storage_format(flipped) };
        let tensors = vec![tensor_header(part, stored, file_order(&now.shape, flipped))];
        Ok(Replacement { item, tensors, nodes, readers: BTreeMap::new(), remark: None })
    }

    #[allow(clippy::too_many_arguments, reason = "describes both versions of a weight and its uses")]
    fn integers(
        &mut self,
        name: &str,
        before: &Weight,
        now: &Weight,
        affine: &QuantizationSpec,
        usages: &[Usage],
        expected: DataType,
        flipped: bool,
    ) -> Result<Replacement> {
        let affine = QuantizationSpec { scale_dtype: DType::F32, ..affine.clone() };
        let source = Rescaled { upstream: now.source(), affine: affine.clone(), name: name.to_owned() };
        let weight = now.then(DType::F32, Encoding::Quantized(affine.clone()), Arc::new(source));
        let parts = ["quantized", "scale", "zero_point"].map(|part| self.fresh(&format!("{name}/{part}")));
        let (copies, usages): (Vec<Usage>, Vec<Usage>) = usages.iter().cloned().partition(|usage| usage.kind == UsageKind::Identity);
        let usages = usages.as_slice();
        let mut readers = self.readers(before, &affine, usages, &parts, flipped);
        let dynamic = affine.activations == ActivationScheme::DynamicToken;
        let left = usages.iter().any(|usage| usage.node.is_none_or(|node| !readers.contains_key(&node)));
        // An integer product determines the order of axes.
        let product =
            usages.iter().any(|usage| matches!(usage.kind, UsageKind::Columns | UsageKind::Rows) && usage.node.is_some_and(|node| readers.contains_key(&node)));
        let transposed = flipped || product;
        let [values, scales, zero_points] = parts;
        let shape = file_order(&now.shape, transposed);
        let table = !readers.is_empty() && !product;
        let shared = usages.len() > 1;
        let dims = self.scale_dims(&affine, &now.shape, transposed, shared, table, left, &readers);
        let mut tensors = vec![tensor_header(values.clone(), DataType::Int8, shape.clone()), tensor_header(scales.clone(), DataType::Float, dims.clone())];
        if !affine.symmetric {
            tensors.push(tensor_header(zero_points.clone(), DataType::Int8, dims.clone()));
        }
        let zero_points = (!affine.symmetric).then_some(zero_points);
        let mut nodes = Vec::new();
        if left || usages.is_empty() {
            let mut floats = self.dequantize(name, &values, &scales, zero_points.as_deref(), &affine, &shape, &dims, transposed, shared, &mut nodes);
            if transposed != flipped {
                floats = self.add_node(&mut nodes, name, "turned", "Transpose", &[&floats], vec![AttributeProto::ints("perm", [1, 0])]);
            }
            let to = vec![AttributeProto::int("to", expected as i64)];
            match nodes.last_mut().filter(|_| expected == DataType::Float) {
                Some(last) => last.output = vec![name.to_owned()],
                None => nodes.push(node("Cast", &[&floats], name, to)),
            }
        }
        // Without the floats, there is nothing to copy.
        let is_gone = nodes.is_empty();
        readers.extend(copies.iter().filter_map(|copy| Some((copy.node?, Vec::new()))).filter(|_| is_gone));
        let item = Item { name: name.to_owned(), weight, storage_format: storage_format(transposed) };
        let remark = (dynamic && left).then(|| self.float_remark(before, &affine, usages, product));
        Ok(Replacement { item, tensors, nodes, readers, remark })
    }

    /// Shape of the scales, which must broadcast to the stored elements. Their number follows from the
    /// encoding.
    #[allow(clippy::too_many_arguments, reason = "describes storage and uses of a weight")]
    fn scale_dims(
        &self,
        affine: &QuantizationSpec,
        shape: &[usize],
        transposed: bool,
        shared: bool,
        table: bool,
        left: bool,
        readers: &BTreeMap<usize, Vec<NodeProto>>,
    ) -> Vec<i64> {
        let size = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        let (rows, rank) = (shape.first().copied().map_or(1, size), shape.len());
        match affine.granularity {
            // ONNX Runtime merges equal scales of products that share an input, and then fuses neither.
            // Alternating rank 0 and 1 keeps them distinct.
            Granularity::Tensor if !left && !readers.is_empty() => vec![1; self.sibling & 1],
            Granularity::Tensor => Vec::new(),
            Granularity::Channel if table => vec![rows, 1],
            Granularity::Channel if transposed || (self.opset >= PER_CHANNEL_OPSET && !shared) => vec![rows],
            Granularity::Channel => std::iter::once(rows).chain(std::iter::repeat_n(1, rank.saturating_sub(1))).collect(),
            _ => {
                let groups = affine.scale_shape(shape).get(1).copied().map_or(1, size);
                match (self.opset >= BLOCKED_OPSET && rank == 2 && !shared, transposed) {
                    (true, true) => vec![groups, rows],
                    (true, false) => vec![rows, groups],
                    (false, true) => vec![groups, 1, rows],
                    (false, false) => vec![rows, groups, 1],
                }
            }
        }
    }

    /// Dequantizes integers, and returns the name of the result. For several readers (`shared`) it
    /// avoids `DequantizeLinear`: ONNX Runtime duplicates it for each reader, rewrites the integers of
    /// each copy under one name with `session.x64quantprecision`, and refuses the file.
    #[allow(clippy::too_many_arguments, reason = "describes the tensors of a weight")]
    fn dequantize(
        &mut self,
        name: &str,
        values: &str,
        scales: &str,
        zero_points: Option<&str>,
        affine: &QuantizationSpec,
        shape: &[i64],
        dims: &[i64],
        transposed: bool,
        shared: bool,
        nodes: &mut Vec<NodeProto>,
    ) -> String {
        let grouped = matches!(affine.granularity, Granularity::Group(_));
        let least = if affine.granularity == Granularity::Tensor { 10 } else { PER_CHANNEL_OPSET };
        if if grouped { dims.len() == 2 } else { !shared && self.opset >= least && dims.len() < 2 } {
            let mut attributes = Vec::new();
            if let Granularity::Group(size) = affine.granularity {
                attributes.push(AttributeProto::int("axis", i64::from(!transposed)));
                attributes.push(AttributeProto::int("block_size", i64::try_from(size).unwrap_or(i64::MAX)));
            } else if affine.granularity == Granularity::Channel {
                attributes.push(AttributeProto::int("axis", i64::from(transposed)));
            }
            let zeros = self.zeros(name, zero_points, affine, dims, nodes);
            let inputs: Vec<&str> = [values, scales].into_iter().chain(zero_points.or(zeros.as_deref())).collect();
            return self.add_node(nodes, name, "floats", "DequantizeLinear", &inputs, attributes);
        }
        let cast = || vec![AttributeProto::int("to", DataType::Float as i64)];
        let mut floats = self.add_node(nodes, name, "numbers", "Cast", &[values], cast());
        let reshaped = |this: &mut Self, nodes: &mut Vec<NodeProto>, part: &str, x: &str, to: &[i64]| {
            let expected = this.add_node(nodes, name, &format!("{part}_shape"), "Constant", &[], vec![ints(to)]);
            this.add_node(nodes, name, part, "Reshape", &[x, &expected], Vec::new())
        };
        if grouped {
            let blocks: Vec<i64> = match (dims, transposed) {
                ([groups, _, rows], true) => vec![*groups, -1, *rows],
                ([rows, groups, _], _) => vec![*rows, *groups, -1],
                _ => vec![-1],
            };
            floats = reshaped(self, nodes, "blocks", &floats, &blocks);
        }
        if let Some(zero_points) = zero_points {
            let zero_points = self.add_node(nodes, name, "zero_point_numbers", "Cast", &[zero_points], cast());
            floats = self.add_node(nodes, name, "centred", "Sub", &[&floats, &zero_points], Vec::new());
        }
        floats = self.add_node(nodes, name, "scaled", "Mul", &[&floats, scales], Vec::new());
        if grouped { reshaped(self, nodes, "whole", &floats, shape) } else { floats }
    }

    /// Explicit zero points for symmetric per-channel weights: with exact accumulation on x86 without
    /// VNNI, ONNX Runtime replaces missing ones by a scalar, and then refuses the file.
    fn zeros(&mut self, name: &str, zero_points: Option<&str>, affine: &QuantizationSpec, dims: &[i64], nodes: &mut Vec<NodeProto>) -> Option<String> {
        if zero_points.is_some() || affine.granularity == Granularity::Tensor {
            return None;
        }
        let count = dims.iter().try_fold(1usize, |count, size| count.checked_mul(usize::try_from(*size).ok()?)).unwrap_or(0);
        let zeros = TensorProto { raw_data: Some(vec![0; count]), ..tensor_header(String::new(), DataType::Int8, dims.to_vec()) };
        Some(self.add_node(nodes, name, "zero_points", "Constant", &[], vec![attribute(zeros)]))
    }

    /// Adds a node, and returns the name of its output.
    fn add_node(&mut self, nodes: &mut Vec<NodeProto>, name: &str, part: &str, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let output = self.fresh(&format!("{name}/{part}"));
        nodes.push(node(op, inputs, &output, attributes));
        output
    }

    /// Nodes that can read the integers directly: one product with dynamically quantized activations, or
    /// lookups. If several products share a weight, only the first one does: ONNX Runtime uses the same
    /// kernel name for both, and refuses the second one. All others read dequantized weights.
    fn readers(&mut self, before: &Weight, affine: &QuantizationSpec, usages: &[Usage], parts: &[String; 3], flipped: bool) -> BTreeMap<usize, Vec<NodeProto>> {
        let model = self.model;
        let nodes = model.graph.as_ref().map_or(&[][..], |graph| &graph.node);
        let whole = !matches!(affine.granularity, Granularity::Group(_)) && before.dtype == DType::F32 && before.shape.len() == 2;
        let dynamic = affine.activations == ActivationScheme::DynamicToken && self.opset >= DYNAMIC_OPSET;
        let mut readers = BTreeMap::new();
        // Rows of the weight must be output channels: only then do its scales apply to columns of the
        // result.
        let fits = |kind: UsageKind| if flipped { kind == UsageKind::Columns } else { kind == UsageKind::Rows };
        let candidates = || usages.iter().filter_map(|usage| Some((usage.node?, usage.kind))).filter(|_| whole);
        let once = |position: usize| candidates().filter(|(other, _)| *other == position).count() == 1;
        for (position, _) in candidates().filter(|(position, kind)| dynamic && fits(*kind) && once(*position)) {
            if let Some(made) = nodes.get(position).and_then(|old| self.product(old, position, affine, parts)) {
                readers.insert(position, made);
                return readers;
            }
        }
        let table = affine.granularity == Granularity::Channel && !flipped;
        for (position, _) in candidates().filter(|(position, kind)| table && *kind == UsageKind::Table && once(*position)) {
            if let Some(made) = nodes.get(position).and_then(|old| self.lookup(old, affine, parts)) {
                readers.insert(position, made);
            }
        }
        readers
    }

    /// Why some nodes read a weight with dynamically quantized activations as floats. `product`: whether
    /// another one is an integer product.
    fn float_remark(&self, before: &Weight, affine: &QuantizationSpec, usages: &[Usage], product: bool) -> &'static str {
        let nodes = self.model.graph.as_ref().map_or(&[][..], |graph| &graph.node);
        let is_scaled = |usage: &Usage| usage.node.and_then(|node| nodes.get(node)).is_some_and(|node| !is_plain(node));
        if product {
            "stored as integers but applied to float activations except in one product, because runtimes support only one integer product of each weight"
        } else if self.opset < DYNAMIC_OPSET {
            "stored as integers but applied to float activations, because the opset of this file has no dynamic quantization; convert the file to opset 11 or later"
        } else if before.dtype != DType::F32 {
            "stored as integers but applied to float activations, because integer products return float32, and the file computes with another type"
        } else if matches!(affine.granularity, Granularity::Group(_)) {
            "stored as integers but applied to float activations, because integer products have no scales for groups of columns"
        } else if usages.iter().any(is_scaled) {
            "stored as integers but applied to float activations, because `alpha`, `beta` or `transA` of a Gemm have no equivalent in integer products"
        } else {
            "stored as integers but applied to float activations, because the consumers have no integer equivalent"
        }
    }

    /// An integer matrix product; `None` if the node has no integer equivalent.
    fn product(&mut self, old: &NodeProto, position: usize, affine: &QuantizationSpec, [values, scales, zero_points]: &[String; 3]) -> Option<Vec<NodeProto>> {
        let ([x, _, ..], [output]) = (old.input.as_slice(), old.output.as_slice()) else { return None };
        let gemm = old.op_type() == "Gemm";
        // Products of constants are computed at load time, without exact accumulation on x86 without VNNI.
        if !is_plain(old) || self.constants.contains(x.as_str()) {
            return None;
        }
        let mut nodes = Vec::new();
        if let Some(quantizer) = self.quantizers.get_mut(x) {
            quantizer.siblings = quantizer.siblings.saturating_add(1);
            quantizer.position = quantizer.position.min(position);
        } else {
            let names = ["quantized", "scale", "zero_point"].map(|part| self.fresh(&format!("{x}/{part}")));
            let node = NodeProto { output: names.to_vec(), ..node("DynamicQuantizeLinear", &[x], &format!("{x}/quantized"), Vec::new()) };
            self.quantizers.insert(x.clone(), Quantizer { node, siblings: 0, position });
        }
        let quantizer = self.quantizers.get(x)?;
        self.sibling = quantizer.siblings;
        let [integers, scale, zero_point] = quantizer.node.output.as_slice() else { return None };
        let [integers, scale, zero_point] = [integers, scale, zero_point].map(String::clone);
        // Runtimes match the pattern only with operands in this order.
        let scale = self.add_node(&mut nodes, output, "scale", "Mul", &[&scale, scales], Vec::new());
        let mut inputs = vec![integers.as_str(), values, &zero_point];
        inputs.extend((!affine.symmetric).then_some(zero_points.as_str()));
        let sums = self.add_node(&mut nodes, output, "sums", "MatMulInteger", &inputs, Vec::new());
        let sums = self.add_node(&mut nodes, output, "sums_float", "Cast", &[&sums], vec![AttributeProto::int("to", DataType::Float as i64)]);
        match old.input.get(2).filter(|bias| gemm && !bias.is_empty()) {
            Some(bias) => {
                let product = self.add_node(&mut nodes, output, "product", "Mul", &[&sums, &scale], Vec::new());
                nodes.push(node("Add", &[&product, bias], output, Vec::new()));
            }
            None => nodes.push(node("Mul", &[&sums, &scale], output, Vec::new())),
        }
        copy_metadata(old, &mut nodes);
        Some(nodes)
    }

    /// Looks up rows as integers, and dequantizes only these.
    fn lookup(&mut self, old: &NodeProto, affine: &QuantizationSpec, [values, scales, zero_points]: &[String; 3]) -> Option<Vec<NodeProto>> {
        let ([_, index], [output]) = (old.input.as_slice(), old.output.as_slice()) else { return None };
        let mut nodes = Vec::new();
        let cast = || vec![AttributeProto::int("to", DataType::Float as i64)];
        let rows = self.add_node(&mut nodes, output, "rows", "Gather", &[values, index], Vec::new());
        let mut rows = self.add_node(&mut nodes, output, "numbers", "Cast", &[&rows], cast());
        if !affine.symmetric {
            let points = self.add_node(&mut nodes, output, "row_zero_points", "Gather", &[zero_points, index], Vec::new());
            let points = self.add_node(&mut nodes, output, "zero_point_numbers", "Cast", &[&points], cast());
            rows = self.add_node(&mut nodes, output, "centred", "Sub", &[&rows, &points], Vec::new());
        }
        let scales = self.add_node(&mut nodes, output, "row_scales", "Gather", &[scales, index], Vec::new());
        nodes.push(node("Mul", &[&rows, &scales], output, Vec::new()));
        copy_metadata(old, &mut nodes);
        Some(nodes)
    }
}

/// The first opsets with per-channel scales, with blocked scales, and with dynamic quantization.
const PER_CHANNEL_OPSET: i64 = 13;
const BLOCKED_OPSET: i64 = 21;
const DYNAMIC_OPSET: i64 = 11;

/// Whether a node is not a Gemm that scales a factor or the bias, or transposes the activations.
pub(super) fn is_plain(node: &NodeProto) -> bool {
    node.op_type() != "Gemm" || (int(node, "transA", 0) == 0 && float(node, "alpha", 1.0) == 1.0 && float(node, "beta", 1.0) == 1.0)
}

/// Copies name and documentation of the old node to the last new one, which has the same output.
fn copy_metadata(old: &NodeProto, nodes: &mut [NodeProto]) {
    if let Some(last) = nodes.last_mut() {
        last.name.clone_from(&old.name);
        last.doc_string.clone_from(&old.doc_string);
        last.metadata_props.clone_from(&old.metadata_props);
    }
}

fn node(op: &str, inputs: &[&str], output: &str, attributes: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.to_owned()],
        name: Some(output.to_owned()),
        op_type: Some(op.to_owned()),
        attribute: attributes,
        ..NodeProto::default()
    }
}

/// Integers as the `value` of a `Constant`.
fn ints(values: &[i64]) -> AttributeProto {
    let tensor = TensorProto {
        raw_data: Some(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        ..tensor_header(String::new(), DataType::Int64, vec![i64::try_from(values.len()).unwrap_or(i64::MAX)])
    };
    attribute(tensor)
}

fn attribute(tensor: TensorProto) -> AttributeProto {
    AttributeProto { t: Some(tensor), i: None, r#type: Some(super::proto::AttributeType::Tensor as i32), ..AttributeProto::int("value", 0) }
}

/// A tensor without elements.
fn tensor_header(name: String, ty: DataType, dims: Vec<i64>) -> TensorProto {
    TensorProto { dims, data_type: Some(ty as i32), name: Some(name).filter(|name| !name.is_empty()), ..TensorProto::default() }
}

/// The shape in file order.
fn file_order(shape: &[usize], transposed: bool) -> Vec<i64> {
    let mut sizes: Vec<i64> = shape.iter().map(|size| i64::try_from(*size).unwrap_or(i64::MAX)).collect();
    if transposed {
        sizes.reverse();
    }
    sizes
}

fn storage_format(transposed: bool) -> StorageFormat {
    if transposed { StorageFormat::Transposed } else { StorageFormat::Plain }
}
