//! Integers of a file that its nodes make floats of, as the weights that they stand for.
//!
//! Two forms are known: `DequantizeLinear` of a tensor, and the product of its elements, cast, with scales, which files of older opsets have.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::check::is_own;
use super::model_file::{Held, ModelFile};
use super::piece::Piece;
use super::proto::{DataType, GraphProto, NodeProto, TensorProto};
use super::uses::{self, Use, int};
use super::{elements, wire::data};
use crate::error::{Error, Result};
use crate::ir::{Graph, Op};
use crate::store::{ActivationScheme, Affine, Block, BlockSink, Codes, DType, Encoding, Granularity, Transposed, View, Weight, WeightSource};

/// Operators that compute with integers, beside those whose names begin with `QLinear`.
const INTEGER: [&str; 9] = [
    "ConvInteger",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "QAttention",
    "QGemm",
    "QEmbedLayerNormalization",
];

/// Scales of a weight at most.
const MOST: u64 = 1 << 24;

/// What of a file belongs to a weight beside its integers.
#[derive(Debug, Clone, Default)]
pub(super) struct Dequantized {
    /// Nodes that make floats of the integers, by position.
    pub nodes: Vec<usize>,
    /// Tensors of scales and zero points that nothing else reads, by number.
    pub parts: Vec<usize>,
}

/// A node that makes floats of integers: names of what it reads, and the axis of the scales.
struct Form<'m> {
    integers: &'m str,
    scales: &'m str,
    zero_points: Option<&'m str>,
    axis: Option<i64>,
    /// Positions of the nodes, that with the floats last.
    nodes: Vec<usize>,
    output: &'m str,
}

/// The file while its weights are found.
struct Finding<'m> {
    nodes: &'m [NodeProto],
    tensors: BTreeMap<&'m str, &'m TensorProto>,
    makers: BTreeMap<&'m str, usize>,
    uses: &'m BTreeMap<&'m str, Vec<Use>>,
}

impl ModelFile {
    /// Puts the floats that integers stand for in the place of the integers, wherever one weight is meant by one tensor.
    pub(super) fn find_dequantized(&mut self, graph: &GraphProto, uses: &BTreeMap<&str, Vec<Use>>) {
        let constant = |node: &'_ NodeProto| node.op_type() == "Constant" && is_own(node.domain());
        let constants = graph.node.iter().filter(|node| constant(node)).filter_map(|node| {
            let value = node.attribute.iter().find(|attribute| attribute.name() == "value")?;
            Some((node.output.first()?.as_str(), value.t.as_ref()?))
        });
        let outputs = graph.node.iter().enumerate().filter_map(|(position, node)| Some((node.output.first()?.as_str(), position)));
        let finding = Finding {
            nodes: &graph.node,
            tensors: graph.initializer.iter().map(|tensor| (tensor.name(), tensor)).chain(constants).collect(),
            makers: outputs.collect(),
            uses,
        };
        let mut found: Vec<(Form, Weight, bool)> = Vec::new();
        for position in 0..graph.node.len() {
            if let Some(form) = finding.form(position)
                && let Some((weight, flipped)) = self.stands_for(&finding, &form)
            {
                found.push((form, weight, flipped));
            }
        }
        // Scales may be shared by weights; what something else reads too stays a weight of its own.
        let mut readers: BTreeMap<&str, usize> = BTreeMap::new();
        for name in found.iter().flat_map(|(form, ..)| std::iter::once(form.scales).chain(form.zero_points)).collect::<Vec<_>>() {
            let count = readers.entry(name).or_default();
            *count = count.saturating_add(1);
        }
        let own: BTreeSet<&str> =
            readers.iter().filter(|(name, count)| uses.get(**name).is_some_and(|all| all.len() == **count)).map(|(name, _)| *name).collect();
        for (form, weight, flipped) in found {
            let alone = |name: &&str| own.contains(name) && readers.get(name) == Some(&1);
            let parts = std::iter::once(form.scales).chain(form.zero_points).filter(alone).filter_map(|name| finding.number(name)).collect();
            self.made_floats.extend(form.nodes.iter().filter_map(|node| graph.node.get(*node)?.output.first().cloned()));
            if let Some(held) = finding.number(form.integers).and_then(|number| self.tensors.get_mut(number)) {
                held.weight = Some(form.output.to_owned());
                held.flipped = flipped;
                held.dequantized = Some(Dequantized { nodes: form.nodes, parts });
            }
            self.weights.remove(form.integers);
            self.uses.remove(form.integers);
            self.uses.insert(form.output.to_owned(), uses.get(form.output).cloned().unwrap_or_default());
            self.weights.insert(form.output.to_owned(), weight);
        }
        // Scales are said by the weights that they belong to, and by quantizers of activations.
        let of_quantizers = |name: &str| {
            let reads = |node: &NodeProto| node.input.iter().skip(1).any(|input| input == name) && node.input.first().is_none_or(|input| input != name);
            let quantizer = |node: &NodeProto| matches!(node.op_type(), "QuantizeLinear" | "DequantizeLinear") && is_own(node.domain()) && reads(node);
            let quantizer = |reader: &Use| reader.node.and_then(|node| graph.node.get(node)).is_some_and(quantizer);
            uses.get(name).is_some_and(|all| !all.is_empty() && all.iter().all(quantizer))
        };
        let gone: Vec<String> = self.weights.keys().filter(|name| own.contains(name.as_str()) || of_quantizers(name)).cloned().collect();
        for name in gone {
            self.weights.remove(&name);
            self.uses.remove(&name);
            if let Some(held) = finding.number(&name).and_then(|number| self.tensors.get_mut(number)) {
                held.weight = None;
                held.flipped = false;
            }
        }
    }

    /// The weight that integers stand for, and whether it lies the other way round.
    fn stands_for(&self, finding: &Finding, form: &Form) -> Option<(Weight, bool)> {
        let integers = self.weights.get(form.integers).filter(|weight| weight.elements() > 0 && weight.encoding == Encoding::Dense)?;
        let (_, scale_shape, scales) = self.small(finding, form.scales, &[DataType::Float])?;
        let scales: Vec<f32> = scales.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if scale_shape.len() > integers.shape.len() {
            return None;
        }
        let own_uses = finding.uses.get(form.output).map_or(&[][..], Vec::as_slice);
        let (role, flipped) = uses::role(own_uses, integers.shape.len());
        let granularity = match scales.len() {
            1 => Granularity::Tensor,
            count => {
                let axis = axis_of(form, &scale_shape, &integers.shape)?;
                // Rows of a weight are its outputs.
                (axis == usize::from(flipped) && integers.shape.get(axis) == Some(&count)).then_some(Granularity::Channel)?
            }
        };
        let zero_points = match form.zero_points {
            None => vec![0; scales.len()],
            Some(name) => {
                let (ty, _, zero_points) = self.small(finding, name, &[DataType::Int8, DataType::Uint8, DataType::Int32])?;
                let width = usize::try_from(ty.bits().div_ceil(8)).ok()?;
                let same = elements::dtype(ty) == Some(integers.dtype) && zero_points.len() == scales.len().checked_mul(width)?;
                same.then_some(zero_points)?
            }
        };
        if scales.iter().any(|scale| !scale.is_finite()) {
            return None;
        }
        let upstream = if flipped { Transposed { upstream: integers.clone() }.weight() } else { integers.clone() };
        let shape = upstream.shape.clone();
        let mut weight = if integers.dtype == DType::I32 {
            zero_points.iter().all(|byte| *byte == 0).then_some(())?;
            Weight::new(DType::F32, shape, Encoding::Dense, Arc::new(Sums { upstream, scales }))
        } else {
            let unsigned = integers.dtype == DType::U8;
            let zero_points: Vec<u8> = zero_points.into_iter().map(|byte| if unsigned { byte ^ SIGN } else { byte }).collect();
            let zero_points = if form.zero_points.is_none() && unsigned { vec![SIGN; scales.len()] } else { zero_points };
            let symmetric = zero_points.iter().all(|byte| *byte == 0);
            let affine = Affine { codes: Codes::INT8, granularity, symmetric, scale_dtype: DType::F32, activations: ActivationScheme::None };
            let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            let source = Integers { upstream, affine: affine.clone(), scales, zero_points, unsigned };
            Weight::new(DType::F32, shape, Encoding::Affine(affine), Arc::new(source))
        };
        weight.stored_as = [form.integers, form.scales].into_iter().chain(form.zero_points).map(str::to_owned).collect();
        weight.stored_bytes = integers.stored_bytes.saturating_add((scale_shape.iter().product::<usize>() as u64).saturating_mul(4));
        weight.role = Some(role);
        weight.readers = own_uses.iter().filter_map(|reader| reader.name.clone()).collect();
        Some((weight, flipped))
    }

    /// Type, sizes and elements of a constant that is read at once.
    fn small(&self, finding: &Finding, name: &str, types: &[DataType]) -> Option<(DataType, Vec<usize>, Vec<u8>)> {
        let tensor = finding.tensors.get(name)?;
        let ty = tensor.data_type();
        let (shape, count) = elements::shape(tensor).ok().filter(|(_, count)| (1..=MOST).contains(count) && types.contains(&ty))?;
        let bytes = match self.elements_away(tensor) {
            Some(bytes) => bytes.ok()?,
            None => elements::inline(tensor, ty, count).ok()??,
        };
        Some((ty, shape, bytes))
    }

    /// Type and elements of a constant of the graph that has few of them.
    pub(super) fn constant(&self, name: &str) -> Option<(DataType, Vec<u8>)> {
        let graph = self.model.graph.as_ref()?;
        let tensor = graph.initializer.iter().find(|tensor| tensor.name() == name).or_else(|| {
            let made = graph.node.iter().find(|node| node.op_type() == "Constant" && node.output.first().is_some_and(|output| output == name))?;
            made.attribute.iter().find(|attribute| attribute.name() == "value")?.t.as_ref()
        })?;
        let (_, count) = elements::shape(tensor).ok().filter(|(_, count)| *count == 1)?;
        let bytes = match self.elements_away(tensor) {
            Some(bytes) => bytes.ok()?,
            None => elements::inline(tensor, tensor.data_type(), count).ok()??,
        };
        Some((tensor.data_type(), bytes))
    }

    /// Whether activations are rounded by operators of the graph.
    pub fn quantizes_activations(&self) -> bool {
        self.model.graph.as_ref().is_some_and(|graph| graph.node.iter().any(|node| node.op_type() == "QuantizeLinear"))
    }

    /// How many nodes of a graph's pieces round values by themselves, as they stand in the file.
    pub(crate) fn roundings_in_pieces(graph: &Graph) -> usize {
        let pieces = graph.nodes().iter().filter_map(|node| if let Op::Opaque(opaque) = &node.op { opaque.function.as_ref() } else { None });
        let nodes = pieces.filter_map(|function| function.as_any().downcast_ref::<Piece>()).flat_map(|piece| &piece.parts().nodes);
        nodes.filter(|node| node.op_type() == "QuantizeLinear").filter_map(|node| node.output.first()).collect::<BTreeSet<_>>().len()
    }

    /// A note of quantized weights in forms that are not known, if there are any.
    pub(crate) fn unknown_integers(&self) -> Option<String> {
        let (mut unknown, mut open) = (Vec::new(), self.model.graph.iter().collect::<Vec<_>>());
        while let Some(graph) = open.pop() {
            let given = graph.node.iter().filter(|node| node.op_type() == "Constant").filter_map(constant_type);
            let constants: BTreeMap<&str, DataType> = graph.initializer.iter().map(|tensor| (tensor.name(), tensor.data_type())).chain(given).collect();
            open.extend(graph.node.iter().flat_map(super::check::bodies));
            let known = |name: &String| self.made_floats.contains(name);
            let of_known = graph.node.iter().filter(|node| node.output.first().is_some_and(known));
            let read_by_known: BTreeSet<&str> = of_known.flat_map(|node| &node.input).map(String::as_str).collect();
            // Weights are scaled, or moved before they are: what else is made of bytes, a mask, is none.
            let casts = graph.node.iter().filter(|node| node.op_type() == "Cast" && node.input.first().is_some_and(|x| constants.contains_key(x.as_str())));
            let fixed: BTreeSet<&str> = constants.keys().copied().chain(casts.filter_map(|node| node.output.first()).map(String::as_str)).collect();
            let scaled = |node: &'_ NodeProto| match (node.op_type(), node.input.as_slice()) {
                ("Mul", [a, b]) if fixed.contains(a.as_str()) && fixed.contains(b.as_str()) => true,
                ("Sub", [_, b]) => fixed.contains(b.as_str()),
                _ => false,
            };
            let of_scaled = graph.node.iter().filter(|node| scaled(node));
            let moved: BTreeSet<&str> =
                of_scaled.flat_map(|node| node.input.iter().take(if node.op_type() == "Sub" { 1 } else { 2 })).map(String::as_str).collect();
            let left = graph.node.iter().filter(|node| {
                let (Some(ty), Some(output)) = (node.input.first().and_then(|x| constants.get(x.as_str())), node.output.first()) else { return false };
                let bytes = matches!(ty, DataType::Int8 | DataType::Uint8) && int(node, "to", 0) == DataType::Float as i64;
                match node.op_type() {
                    "DequantizeLinear" => !known(output),
                    // Of bytes that are made floats, what scales them is the weight.
                    "Cast" if bytes => moved.contains(output.as_str()) && !read_by_known.contains(output.as_str()),
                    _ => false,
                }
            });
            unknown.extend(left.filter_map(|node| node.input.first()));
        }
        let first = unknown.first()?;
        let count = unknown.len();
        Some(format!(
            "{count} tensors of integers are made floats of (by DequantizeLinear or Cast) in a form that is not known, and stay as they are: no pass takes them (the first: `{first}`)"
        ))
    }

    /// What of the file is quantized already, in plain words.
    pub fn quantized_already(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let mut weights = self.weights.iter().filter(|(_, weight)| weight.encoding != Encoding::Dense).map(|(name, _)| name);
        if let Some(first) = weights.next() {
            notes.push(format!(
                "{} weights are integers with scales already: passes over floats refuse them by name, and `dequantize` before them makes floats of them (the first: `{first}`)",
                weights.count().saturating_add(1)
            ));
        }
        notes.extend(self.unknown_integers());
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let mut open: Vec<&GraphProto> = self.model.graph.iter().collect();
        while let Some(graph) = open.pop() {
            for node in &graph.node {
                open.extend(super::check::bodies(node));
                if node.op_type().starts_with("QLinear") || INTEGER.contains(&node.op_type()) {
                    let count = counts.entry(node.op_type()).or_default();
                    *count = count.saturating_add(1);
                }
            }
        }
        if !counts.is_empty() {
            let counts: Vec<String> = counts.into_iter().map(|(op, count)| format!("{count} {op}")).collect();
            notes.push(format!("nodes that compute with integers already stay as they are: {}", counts.join(", ")));
        }
        notes
    }

    /// Elements of a tensor that are not in its message, if they are not.
    pub(super) fn elements_away(&self, tensor: &TensorProto) -> Option<Result<Vec<u8>, String>> {
        let held: &Held = self.tensors.get(usize::try_from(tensor.mark?).ok()?)?;
        let away = held.away.as_ref()?;
        let read = || {
            if away.field.is_some_and(data::is_varints) {
                return elements::numbers(&away.bytes, tensor.data_type(), elements::shape(tensor)?.1);
            }
            let mut bytes = vec![0; usize::try_from(away.bytes.bytes()).map_err(|e| e.to_string())?];
            away.bytes.read_at(0, &mut bytes).map_err(|e| e.to_string())?;
            Ok(bytes)
        };
        Some(read())
    }
}

/// Name and type of what a `Constant` holds.
fn constant_type(node: &NodeProto) -> Option<(&str, DataType)> {
    let value = node.attribute.iter().find(|attribute| attribute.name() == "value")?;
    Some((node.output.first()?, value.t.as_ref()?.data_type()))
}

/// The axis that scales are of, as the file has its axes.
fn axis_of(form: &Form, scale_shape: &[usize], shape: &[usize]) -> Option<usize> {
    if let Some(axis) = form.axis {
        let rank = i64::try_from(shape.len()).ok()?;
        return (scale_shape.len() == 1).then(|| usize::try_from(if axis < 0 { axis.saturating_add(rank) } else { axis }).ok()).flatten();
    }
    // Of a product, the one axis along which there is more than one.
    let first = shape.len().checked_sub(scale_shape.len())?;
    let mut wide = scale_shape.iter().enumerate().filter(|(_, size)| **size != 1);
    let (at, _) = wide.next().filter(|_| wide.clone().next().is_none())?;
    at.checked_add(first)
}

/// The bit in which bytes with and without a sign differ, counted from 128 below.
const SIGN: u8 = 0x80;

impl<'m> Finding<'m> {
    /// The number of a constant's tensor.
    fn number(&self, name: &str) -> Option<usize> {
        usize::try_from(self.tensors.get(name)?.mark?).ok()
    }

    fn form(&self, position: usize) -> Option<Form<'m>> {
        let node = self.nodes.get(position).filter(|node| is_own(node.domain()))?;
        let (output, name) = (node.output.first()?.as_str(), |at: usize| node.input.get(at).map(String::as_str).filter(|name| !name.is_empty()));
        let of = |integers: &str, types: &[DataType]| self.is_integers(integers, types);
        match node.op_type() {
            "DequantizeLinear" if int(node, "block_size", 0) == 0 && int(node, "output_dtype", 1) <= 1 => {
                let types = [DataType::Int8, DataType::Uint8, DataType::Int32];
                let integers = name(0).filter(|name| of(name, &types))?;
                Some(Form { integers, scales: name(1)?, zero_points: name(2), axis: Some(int(node, "axis", 1)), nodes: vec![position], output })
            }
            "Mul" => {
                let cast = |at: usize| {
                    let (made, maker) = (name(at)?, self.makers.get(name(at)?)?);
                    let cast = self.nodes.get(*maker).filter(|cast| cast.op_type() == "Cast" && is_own(cast.domain()))?;
                    let integers = cast.input.first().map(String::as_str).filter(|name| of(name, &[DataType::Int8, DataType::Uint8]))?;
                    let alone = self.uses.get(made).is_some_and(|uses| uses.len() == 1) && int(cast, "to", 0) == DataType::Float as i64;
                    alone.then_some((integers, *maker))
                };
                let ((integers, maker), scales) = cast(0).zip(name(1)).or_else(|| cast(1).zip(name(0)))?;
                Some(Form { integers, scales, zero_points: None, axis: None, nodes: vec![maker, position], output })
            }
            _ => None,
        }
    }

    /// Whether a name is that of a constant of such a type, which one node of the graph alone reads.
    fn is_integers(&self, name: &str, types: &[DataType]) -> bool {
        let alone = self.uses.get(name).is_some_and(|uses| matches!(uses.as_slice(), [Use { node: Some(_), .. }]));
        alone && self.tensors.get(name).is_some_and(|tensor| types.contains(&tensor.data_type()) && tensor.mark.is_some())
    }
}

/// Bytes with scales.
struct Integers {
    /// The bytes, dense, in the order of axes of the weight.
    upstream: Weight,
    affine: Affine,
    /// One for all, or one for each row.
    scales: Vec<u8>,
    zero_points: Vec<u8>,
    unsigned: bool,
}

impl WeightSource for Integers {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        let row = self.upstream.row().max(1);
        let (mut first, mut codes) = (0usize, Vec::new());
        self.upstream.visit(row, &mut |block| {
            codes.clear();
            codes.extend(block.now.values.iter().map(|byte| if self.unsigned { byte ^ SIGN } else { *byte }));
            let rows = codes.len().checked_div(row).unwrap_or(0);
            let (from, count) = if self.affine.granularity == Granularity::Tensor { (0, 1) } else { (first, rows) };
            first = first.saturating_add(rows);
            let part = |bytes: &'_ [u8], width: usize| -> Option<std::ops::Range<usize>> {
                let range = from.checked_mul(width)?..from.checked_add(count)?.checked_mul(width)?;
                bytes.get(range.clone()).map(|_| range)
            };
            let short = || Error::tensor("weight", "has fewer scales than rows", "the file is damaged: write it again");
            let scales = part(&self.scales, 4).and_then(|range| self.scales.get(range)).ok_or_else(short)?;
            let zero_points = part(&self.zero_points, 1).and_then(|range| self.zero_points.get(range)).ok_or_else(short)?;
            let zero_points = if self.affine.symmetric { &[][..] } else { zero_points };
            let affine = Some((&self.affine, row));
            sink(Block::untouched(View { dtype: DType::F32, values: &codes, affine, scales, zero_points, global_scale: 1.0, blocks: &[] }))
        })
    }
}

/// Integers of 32 bits with scales, as the floats that they stand for: biases.
struct Sums {
    upstream: Weight,
    scales: Vec<f32>,
}

impl WeightSource for Sums {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let row = if self.scales.len() > 1 { self.upstream.row().max(1) } else { usize::MAX };
        let mut at = 0usize;
        self.upstream.visit(unit, &mut |block| {
            let scale = |at: usize| at.checked_div(row).and_then(|row| self.scales.get(row)).copied().unwrap_or(0.0);
            let float = |(number, bytes): (usize, &[u8; 4])| (i32::from_le_bytes(*bytes) as f32 * scale(at.saturating_add(number))).to_le_bytes();
            let floats: Vec<u8> = block.now.values.as_chunks::<4>().0.iter().enumerate().flat_map(float).collect();
            at = at.saturating_add(block.now.values.len().checked_div(4).unwrap_or(0));
            sink(Block::untouched(View::dense(DType::F32, &floats)))
        })
    }
}
