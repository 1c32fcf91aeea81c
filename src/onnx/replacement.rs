//! Weights of other types than a graph takes: what is stored, and the operators that make of it what the graph takes.
//!
//! Products of whole numbers have the form that runtimes recognise, as in `lower/integer.rs`. Everything else becomes floats when a runtime
//! loads the file, in operators that every opset has.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::elements::data_type;
use super::proto::{AttributeProto, DataType, ModelProto, NodeProto, TensorProto};
use super::uses::{How, Use, float, int};
use crate::error::{Error, Result};
use crate::store::writer::Item;
use crate::store::{ActivationScheme, Affine, Codes, DType, Decoded, Encoding, Granularity, Rescaled, StorageFormat, Weight};

/// What stands for a weight.
pub(super) struct Replaced {
    pub item: Item,
    /// Tensors for the parts of the item, in their order.
    pub tensors: Vec<TensorProto>,
    /// What makes the weight of them, where anything still reads it.
    pub nodes: Vec<NodeProto>,
    /// Nodes of the graph, by position, that become others.
    pub readers: BTreeMap<usize, Vec<NodeProto>>,
    /// What is not as the encoding asks for.
    pub remark: Option<&'static str>,
}

/// The weights of a file on their way to other types.
pub(super) struct Replacing<'m> {
    model: &'m ModelProto,
    opset: i64,
    taken: BTreeSet<String>,
    /// Dynamic quantization of activations, by the name of the activation.
    quantizers: BTreeMap<String, Quantizer>,
    /// How many products read the input of the last one before it.
    sibling: usize,
}

/// A `DynamicQuantizeLinear` that products share.
struct Quantizer {
    node: NodeProto,
    /// Products that read it, after the first.
    siblings: usize,
    /// Position of the first node that reads it.
    position: usize,
}

const NO_PRODUCT: &str = "integers with activations left as floats, because what reads them has no form of integers in this file's opset";
const FLOATS: &str = "written as the floats that they stand for: ONNX Runtime has no form of them here";

impl<'m> Replacing<'m> {
    pub fn new(model: &'m ModelProto, opset: i64) -> Self {
        let mut taken = BTreeSet::new();
        model.graph.iter().for_each(|graph| super::check::names(graph, &mut taken));
        Self { model, opset, taken, quantizers: BTreeMap::new(), sibling: 0 }
    }

    /// The nodes that quantize activations, with the position of the node that each has to precede.
    pub fn quantizers(&mut self) -> impl Iterator<Item = (usize, NodeProto)> {
        std::mem::take(&mut self.quantizers).into_values().map(|quantizer| (quantizer.position, quantizer.node))
    }

    fn fresh(&mut self, wanted: &str) -> String {
        super::fresh(&mut self.taken, wanted.to_owned())
    }

    /// Plans what stands for a weight that is `now` something else than it was; `flipped` says that the graph takes it `[in, out]`.
    pub fn replace(&mut self, name: &str, before: &Weight, now: &Weight, uses: &[Use], flipped: bool) -> Result<Replaced> {
        let wanted = data_type(before.dtype).filter(|_| before.is_float() && now.is_float());
        let wanted =
            wanted.ok_or_else(|| Error::tensor(name, format!("is {} now, the graph takes {}", now.describe(), before.describe()), "add it to `ignore`"))?;
        if let Encoding::Affine(Affine { activations: ActivationScheme::Static(_) | ActivationScheme::Float8Static(_) | ActivationScheme::Nvfp4(_), .. }) =
            &now.encoding
        {
            return Err(Error::tensor(
                name,
                "has activations of fixed scales, which the graph of the file does not say",
                "this is a bug in compress, please report it",
            ));
        }
        match &now.encoding {
            Encoding::Dense => self.cast(name, now, wanted, flipped),
            Encoding::Affine(affine) if matches!(affine.codes, Codes::Integer(_)) && !matches!(affine.granularity, Granularity::Block(_)) => {
                self.integers(name, before, now, affine, uses, wanted, flipped)
            }
            Encoding::Affine(_) => {
                let source = Decoded { upstream: now.source(), dtype: before.dtype, name: name.to_owned() };
                let floats = now.then(before.dtype, Encoding::Dense, Arc::new(source));
                let tensor = head(name.to_owned(), wanted, file_order(&now.shape, flipped));
                let item = Item { name: name.to_owned(), weight: floats, storage_format: format(flipped) };
                Ok(Replaced { item, tensors: vec![tensor], nodes: Vec::new(), readers: BTreeMap::new(), remark: Some(FLOATS) })
            }
        }
    }

    /// Floats of another width.
    fn cast(&mut self, name: &str, now: &Weight, wanted: DataType, flipped: bool) -> Result<Replaced> {
        let stored = data_type(now.dtype).ok_or_else(|| Error::tensor(name, format!("is {}, which ONNX does not have", now.dtype), "add it to `ignore`"))?;
        if stored == DataType::Bfloat16 && self.opset < AXIS {
            let reason = format!("is bf16 now, which ONNX has from opset {AXIS} on; the file is of opset {}", self.opset);
            return Err(Error::tensor(name, reason, "cast to f16"));
        }
        if stored == wanted {
            // What made the same floats of integers is gone.
            let item = Item { name: name.to_owned(), weight: now.clone(), storage_format: format(flipped) };
            let tensors = vec![head(name.to_owned(), stored, file_order(&now.shape, flipped))];
            return Ok(Replaced { item, tensors, nodes: Vec::new(), readers: BTreeMap::new(), remark: None });
        }
        let part = self.fresh(&format!("{name}/stored"));
        let nodes = vec![node("Cast", &[&part], name, vec![AttributeProto::int("to", wanted as i64)])];
        let item = Item { name: name.to_owned(), weight: now.clone(), storage_format: format(flipped) };
        let tensors = vec![head(part, stored, file_order(&now.shape, flipped))];
        Ok(Replaced { item, tensors, nodes, readers: BTreeMap::new(), remark: None })
    }

    #[allow(clippy::too_many_arguments, reason = "what a weight is, was, and is for")]
    fn integers(&mut self, name: &str, before: &Weight, now: &Weight, affine: &Affine, uses: &[Use], wanted: DataType, flipped: bool) -> Result<Replaced> {
        let affine = Affine { scale_dtype: DType::F32, ..affine.clone() };
        let source = Rescaled { upstream: now.source(), affine: affine.clone(), name: name.to_owned() };
        let weight = now.then(DType::F32, Encoding::Affine(affine.clone()), Arc::new(source));
        let parts = ["quantized", "scale", "zero_point"].map(|part| self.fresh(&format!("{name}/{part}")));
        let readers = self.readers(before, &affine, uses, &parts, flipped);
        let dynamic = affine.activations == ActivationScheme::DynamicToken;
        let left = uses.iter().any(|u| u.node.is_none_or(|node| !readers.contains_key(&node)));
        // Where products of integers read it, it lies as they take it.
        let product = uses.iter().any(|u| matches!(u.how, How::Columns | How::Rows) && u.node.is_some_and(|node| readers.contains_key(&node)));
        let turned = flipped || product;
        let [values, scales, zero_points] = parts;
        let shape = file_order(&now.shape, turned);
        let table = !readers.is_empty() && !product;
        let shared = uses.len() > 1;
        let dims = self.scale_dims(&affine, &now.shape, turned, shared, table, left, &readers);
        let mut tensors = vec![head(values.clone(), DataType::Int8, shape.clone()), head(scales.clone(), DataType::Float, dims.clone())];
        if !affine.symmetric {
            tensors.push(head(zero_points.clone(), DataType::Int8, dims.clone()));
        }
        let zero_points = (!affine.symmetric).then_some(zero_points);
        let mut nodes = Vec::new();
        if left || uses.is_empty() {
            let mut floats = self.floats(name, &values, &scales, zero_points.as_deref(), &affine, &shape, &dims, turned, shared, &mut nodes);
            if turned != flipped {
                floats = self.then(&mut nodes, name, "turned", "Transpose", &[&floats], vec![AttributeProto::ints("perm", [1, 0])]);
            }
            let to = vec![AttributeProto::int("to", wanted as i64)];
            match nodes.last_mut().filter(|_| wanted == DataType::Float) {
                Some(last) => last.output = vec![name.to_owned()],
                None => nodes.push(node("Cast", &[&floats], name, to)),
            }
        }
        let item = Item { name: name.to_owned(), weight, storage_format: format(turned) };
        let remark = (dynamic && left).then_some(NO_PRODUCT);
        Ok(Replaced { item, tensors, nodes, readers, remark })
    }

    /// Sizes of scales, so that they meet the elements as they are stored: how many numbers there are follows from the encoding alone.
    #[allow(clippy::too_many_arguments, reason = "how a weight is stored and read")]
    fn scale_dims(
        &self,
        affine: &Affine,
        shape: &[usize],
        turned: bool,
        shared: bool,
        table: bool,
        left: bool,
        readers: &BTreeMap<usize, Vec<NodeProto>>,
    ) -> Vec<i64> {
        let size = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        let (rows, rank) = (shape.first().copied().map_or(1, size), shape.len());
        match affine.granularity {
            // Equal scales of products that share an input would be merged, and neither be recognised any more: rank 0 and 1 keep two apart.
            Granularity::Tensor if !left && !readers.is_empty() => vec![1; self.sibling & 1],
            Granularity::Tensor => Vec::new(),
            Granularity::Channel if table => vec![rows, 1],
            Granularity::Channel if turned || (self.opset >= AXIS && !shared) => vec![rows],
            Granularity::Channel => std::iter::once(rows).chain(std::iter::repeat_n(1, rank.saturating_sub(1))).collect(),
            _ => {
                let groups = affine.scale_shape(shape).get(1).copied().map_or(1, size);
                match (self.opset >= BLOCKS && rank == 2 && !shared, turned) {
                    (true, true) => vec![groups, rows],
                    (true, false) => vec![rows, groups],
                    (false, true) => vec![groups, 1, rows],
                    (false, false) => vec![rows, groups, 1],
                }
            }
        }
    }

    /// Dequantizes integers, and returns the name of the result. For several readers (`shared`) it avoids `DequantizeLinear`: ONNX Runtime
    /// duplicates it for each reader, rewrites the integers of each copy under one name with `session.x64quantprecision`, and refuses the file.
    #[allow(clippy::too_many_arguments, reason = "a weight in parts")]
    fn floats(
        &mut self,
        name: &str,
        values: &str,
        scales: &str,
        zero_points: Option<&str>,
        affine: &Affine,
        shape: &[i64],
        dims: &[i64],
        turned: bool,
        shared: bool,
        nodes: &mut Vec<NodeProto>,
    ) -> String {
        let grouped = matches!(affine.granularity, Granularity::Group(_));
        let least = if affine.granularity == Granularity::Tensor { 10 } else { AXIS };
        if if grouped { dims.len() == 2 } else { !shared && self.opset >= least && dims.len() < 2 } {
            let mut attributes = Vec::new();
            if let Granularity::Group(size) = affine.granularity {
                attributes.push(AttributeProto::int("axis", i64::from(!turned)));
                attributes.push(AttributeProto::int("block_size", i64::try_from(size).unwrap_or(i64::MAX)));
            } else if affine.granularity == Granularity::Channel {
                attributes.push(AttributeProto::int("axis", i64::from(turned)));
            }
            let zeros = self.zeros(name, zero_points, affine, dims, nodes);
            let inputs: Vec<&str> = [values, scales].into_iter().chain(zero_points.or(zeros.as_deref())).collect();
            return self.then(nodes, name, "floats", "DequantizeLinear", &inputs, attributes);
        }
        let cast = || vec![AttributeProto::int("to", DataType::Float as i64)];
        let mut floats = self.then(nodes, name, "numbers", "Cast", &[values], cast());
        let reshaped = |this: &mut Self, nodes: &mut Vec<NodeProto>, part: &str, x: &str, to: &[i64]| {
            let wanted = this.then(nodes, name, &format!("{part}_shape"), "Constant", &[], vec![ints(to)]);
            this.then(nodes, name, part, "Reshape", &[x, &wanted], Vec::new())
        };
        if grouped {
            let blocks: Vec<i64> = match (dims, turned) {
                ([groups, _, rows], true) => vec![*groups, -1, *rows],
                ([rows, groups, _], _) => vec![*rows, *groups, -1],
                _ => vec![-1],
            };
            floats = reshaped(self, nodes, "blocks", &floats, &blocks);
        }
        if let Some(zero_points) = zero_points {
            let zero_points = self.then(nodes, name, "zero_point_numbers", "Cast", &[zero_points], cast());
            floats = self.then(nodes, name, "centred", "Sub", &[&floats, &zero_points], Vec::new());
        }
        floats = self.then(nodes, name, "scaled", "Mul", &[&floats, scales], Vec::new());
        if grouped { reshaped(self, nodes, "whole", &floats, shape) } else { floats }
    }

    /// Zero points where all are zero: where ONNX Runtime looks for exact sums on x86 without VNNI, it takes none for one that all channels
    /// share, and then refuses it.
    fn zeros(&mut self, name: &str, zero_points: Option<&str>, affine: &Affine, dims: &[i64], nodes: &mut Vec<NodeProto>) -> Option<String> {
        if zero_points.is_some() || affine.granularity == Granularity::Tensor {
            return None;
        }
        let count = dims.iter().try_fold(1usize, |count, size| count.checked_mul(usize::try_from(*size).ok()?)).unwrap_or(0);
        let zeros = TensorProto { raw_data: Some(vec![0; count]), ..head(String::new(), DataType::Int8, dims.to_vec()) };
        Some(self.then(nodes, name, "zero_points", "Constant", &[], vec![attribute(zeros)]))
    }

    /// Adds a node whose value only this weight needs.
    fn then(&mut self, nodes: &mut Vec<NodeProto>, name: &str, part: &str, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let output = self.fresh(&format!("{name}/{part}"));
        nodes.push(node(op, inputs, &output, attributes));
        output
    }

    /// Nodes that can read the integers themselves: one product whose activations are quantized too, or lookups. Of several products of one
    /// weight only the first does: ONNX Runtime gives the kernels of both the same name, and refuses the second. All others read floats.
    fn readers(&mut self, before: &Weight, affine: &Affine, uses: &[Use], parts: &[String; 3], flipped: bool) -> BTreeMap<usize, Vec<NodeProto>> {
        let model = self.model;
        let nodes = model.graph.as_ref().map_or(&[][..], |graph| &graph.node);
        let whole = !matches!(affine.granularity, Granularity::Group(_)) && before.dtype == DType::F32 && before.shape.len() == 2;
        let dynamic = affine.activations == ActivationScheme::DynamicToken && self.opset >= DYNAMIC;
        let mut readers = BTreeMap::new();
        // Rows of the weight have to be outputs of the product: only then do its scales belong to columns of the result.
        let fits = |how: How| if flipped { how == How::Columns } else { how == How::Rows };
        let candidates = || uses.iter().filter_map(|u| Some((u.node?, u.how))).filter(|_| whole);
        let once = |position: usize| candidates().filter(|(other, _)| *other == position).count() == 1;
        for (position, _) in candidates().filter(|(position, how)| dynamic && fits(*how) && once(*position)) {
            if let Some(made) = nodes.get(position).and_then(|old| self.product(old, position, affine, parts)) {
                readers.insert(position, made);
                return readers;
            }
        }
        let table = affine.granularity == Granularity::Channel && !flipped;
        for (position, _) in candidates().filter(|(position, how)| table && *how == How::Table && once(*position)) {
            if let Some(made) = nodes.get(position).and_then(|old| self.lookup(old, affine, parts)) {
                readers.insert(position, made);
            }
        }
        readers
    }

    /// A product of integers; nothing for forms that have none.
    fn product(&mut self, old: &NodeProto, position: usize, affine: &Affine, [values, scales, zero_points]: &[String; 3]) -> Option<Vec<NodeProto>> {
        let ([x, _, ..], [output]) = (old.input.as_slice(), old.output.as_slice()) else { return None };
        let gemm = old.op_type() == "Gemm";
        let plain = !gemm || (int(old, "transA", 0) == 0 && float(old, "alpha", 1.0) == 1.0 && float(old, "beta", 1.0) == 1.0);
        if !plain || self.model.graph.as_ref().is_some_and(|graph| graph.initializer.iter().any(|tensor| tensor.name() == x)) {
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
        // In this order of operands: only so is the form recognised.
        let scale = self.then(&mut nodes, output, "scale", "Mul", &[&scale, scales], Vec::new());
        let mut inputs = vec![integers.as_str(), values, &zero_point];
        inputs.extend((!affine.symmetric).then_some(zero_points.as_str()));
        let sums = self.then(&mut nodes, output, "sums", "MatMulInteger", &inputs, Vec::new());
        let sums = self.then(&mut nodes, output, "sums_float", "Cast", &[&sums], vec![AttributeProto::int("to", DataType::Float as i64)]);
        match old.input.get(2).filter(|bias| gemm && !bias.is_empty()) {
            Some(bias) => {
                let product = self.then(&mut nodes, output, "product", "Mul", &[&sums, &scale], Vec::new());
                nodes.push(node("Add", &[&product, bias], output, Vec::new()));
            }
            None => nodes.push(node("Mul", &[&sums, &scale], output, Vec::new())),
        }
        named_as(old, &mut nodes);
        Some(nodes)
    }

    /// Rows of integers that are looked up, so that only they become floats.
    fn lookup(&mut self, old: &NodeProto, affine: &Affine, [values, scales, zero_points]: &[String; 3]) -> Option<Vec<NodeProto>> {
        let ([_, index], [output]) = (old.input.as_slice(), old.output.as_slice()) else { return None };
        let mut nodes = Vec::new();
        let cast = || vec![AttributeProto::int("to", DataType::Float as i64)];
        let rows = self.then(&mut nodes, output, "rows", "Gather", &[values, index], Vec::new());
        let mut rows = self.then(&mut nodes, output, "numbers", "Cast", &[&rows], cast());
        if !affine.symmetric {
            let points = self.then(&mut nodes, output, "row_zero_points", "Gather", &[zero_points, index], Vec::new());
            let points = self.then(&mut nodes, output, "zero_point_numbers", "Cast", &[&points], cast());
            rows = self.then(&mut nodes, output, "centred", "Sub", &[&rows, &points], Vec::new());
        }
        let scales = self.then(&mut nodes, output, "row_scales", "Gather", &[scales, index], Vec::new());
        nodes.push(node("Mul", &[&rows, &scales], output, Vec::new()));
        named_as(old, &mut nodes);
        Some(nodes)
    }
}

/// The opsets from which on whole numbers become floats with a scale for each channel, for each block, and activations as they come.
const AXIS: i64 = 13;
const BLOCKS: i64 = 21;
const DYNAMIC: i64 = 11;

/// Gives the last node, which computes what the old one did, its name and what is said about it.
fn named_as(old: &NodeProto, nodes: &mut [NodeProto]) {
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

/// Whole numbers as the value of a constant.
fn ints(values: &[i64]) -> AttributeProto {
    let tensor = TensorProto {
        raw_data: Some(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        ..head(String::new(), DataType::Int64, vec![i64::try_from(values.len()).unwrap_or(i64::MAX)])
    };
    attribute(tensor)
}

fn attribute(tensor: TensorProto) -> AttributeProto {
    AttributeProto { t: Some(tensor), i: None, r#type: Some(super::proto::AttributeType::Tensor as i32), ..AttributeProto::int("value", 0) }
}

/// A tensor without elements.
fn head(name: String, ty: DataType, dims: Vec<i64>) -> TensorProto {
    TensorProto { dims, data_type: Some(ty as i32), name: Some(name).filter(|name| !name.is_empty()), ..TensorProto::default() }
}

/// Sizes as they are stored.
fn file_order(shape: &[usize], turned: bool) -> Vec<i64> {
    let mut sizes: Vec<i64> = shape.iter().map(|size| i64::try_from(*size).unwrap_or(i64::MAX)).collect();
    if turned {
        sizes.reverse();
    }
    sizes
}

fn format(turned: bool) -> StorageFormat {
    if turned { StorageFormat::Transposed } else { StorageFormat::Plain }
}
