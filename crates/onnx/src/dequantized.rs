//! Quantized weights: integers that nodes of the file dequantize, as weights with scales.
//!
//! Two patterns are supported: `DequantizeLinear` of a tensor, and the product of cast integers and
//! scales, which files of older opsets have.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::check::is_own;
use super::initializer_roles::{self, Usage, int};
use super::model_file::{DequantizationParts, ModelFile, TensorEntry};
use super::opaque_subgraph::OpaqueSubgraph;
use super::proto::{DataType, GraphProto, NodeProto, TensorProto};
use super::{elements, wire::data as fields};
use crate::error::{Error, Result, counted};
use crate::ir::{Graph, Op};
use crate::store::{
    ActivationScheme, Block, BlockSink, Codes, DType, Encoding, Granularity, QuantizationSpec, Transposed, View, Weight, WeightSource, least_common_multiple,
};

/// Operators with integer arithmetic, in addition to those with the prefix `QLinear`.
const INTEGER_OPS: [&str; 9] = [
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

/// Maximum number of scales of a weight.
const MAX_SCALES: u64 = 1 << 24;

/// A match of a dequantization pattern: names of its inputs and output, and the axis of the scales.
struct Pattern<'m> {
    integers: &'m str,
    scales: &'m str,
    zero_points: Option<&'m str>,
    axis: Option<i64>,
    /// Positions of the nodes. The last one computes the output.
    nodes: Vec<usize>,
    output: &'m str,
}

/// Lookup tables for the search.
struct Finder<'m> {
    nodes: &'m [NodeProto],
    tensors: BTreeMap<&'m str, &'m TensorProto>,
    producers: BTreeMap<&'m str, usize>,
    usages: &'m BTreeMap<&'m str, Vec<Usage>>,
}

impl ModelFile {
    /// Replaces integer weights by the dequantized weights that they represent.
    pub(super) fn find_dequantized(&mut self, graph: &GraphProto, usages: &BTreeMap<&str, Vec<Usage>>) {
        let constant = |node: &'_ NodeProto| node.op_type() == "Constant" && is_own(node.domain());
        let constants = graph.node.iter().filter(|node| constant(node)).filter_map(|node| {
            let value = node.attribute.iter().find(|attribute| attribute.name() == "value")?;
            Some((node.output.first()?.as_str(), value.t.as_ref()?))
        });
        let outputs = graph.node.iter().enumerate().filter_map(|(position, node)| Some((node.output.first()?.as_str(), position)));
        let finder = Finder {
            nodes: &graph.node,
            tensors: graph.initializer.iter().map(|tensor| (tensor.name(), tensor)).chain(constants).collect(),
            producers: outputs.collect(),
            usages,
        };
        let mut found: Vec<(Pattern, Weight, bool)> = Vec::new();
        for position in 0..graph.node.len() {
            if let Some(pattern) = finder.find_pattern(position)
                && let Some((weight, flipped)) = self.dequantized_weight(&finder, &pattern)
            {
                found.push((pattern, weight, flipped));
            }
        }
        // Weights may share scales. Scales with other uses remain weights of their own.
        let mut readers: BTreeMap<&str, usize> = BTreeMap::new();
        for name in found.iter().flat_map(|(pattern, ..)| std::iter::once(pattern.scales).chain(pattern.zero_points)).collect::<Vec<_>>() {
            let count = readers.entry(name).or_default();
            *count = count.saturating_add(1);
        }
        let own: BTreeSet<&str> =
            readers.iter().filter(|(name, count)| usages.get(**name).is_some_and(|all| all.len() == **count)).map(|(name, _)| *name).collect();
        for (pattern, weight, flipped) in found {
            let alone = |name: &&str| own.contains(name) && readers.get(name) == Some(&1);
            let parts = std::iter::once(pattern.scales).chain(pattern.zero_points).filter(alone).filter_map(|name| finder.number(name)).collect();
            self.dequantized_values.extend(pattern.nodes.iter().filter_map(|node| graph.node.get(*node)?.output.first().cloned()));
            if let Some(entry) = finder.number(pattern.integers).and_then(|number| self.tensors.get_mut(number)) {
                entry.weight = Some(pattern.output.to_owned());
                entry.flipped = flipped;
                entry.dequantized = Some(DequantizationParts { nodes: pattern.nodes, parts });
            }
            self.weights.remove(pattern.integers);
            self.usages.remove(pattern.integers);
            self.usages.insert(pattern.output.to_owned(), usages.get(pattern.output).cloned().unwrap_or_default());
            self.weights.insert(pattern.output.to_owned(), weight);
        }
        // Scales and zero points are not weights themselves.
        let is_parameter = |name: &str| usages.get(name).is_some_and(|usages| initializer_roles::is_only_quantization_parameter(usages));
        let gone: Vec<String> = self.weights.keys().filter(|name| own.contains(name.as_str()) || is_parameter(name)).cloned().collect();
        for name in gone {
            self.weights.remove(&name);
            self.usages.remove(&name);
            if let Some(entry) = finder.number(&name).and_then(|number| self.tensors.get_mut(number)) {
                entry.weight = None;
                entry.flipped = false;
            }
        }
    }

    /// The dequantized weight of a pattern, and whether it is stored as `[in, out]`.
    fn dequantized_weight(&self, finder: &Finder, pattern: &Pattern) -> Option<(Weight, bool)> {
        let integers = self.weights.get(pattern.integers).filter(|weight| weight.elements() > 0 && weight.encoding == Encoding::Dense)?;
        let (_, scale_shape, scales) = self.small_constant(finder, pattern.scales, &[DataType::Float])?;
        let scales: Vec<f32> = scales.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if scale_shape.len() > integers.shape.len() {
            return None;
        }
        let own_uses = finder.usages.get(pattern.output).map_or(&[][..], Vec::as_slice);
        let (role, flipped) = initializer_roles::role(own_uses, &integers.shape);
        let granularity = match scales.len() {
            1 => Granularity::Tensor,
            count => {
                let axis = axis_of(pattern, &scale_shape, &integers.shape)?;
                // Scales must be per output channel.
                (axis == usize::from(flipped) && integers.shape.get(axis) == Some(&count)).then_some(Granularity::Channel)?
            }
        };
        let zero_points = match pattern.zero_points {
            None => vec![0; scales.len()],
            Some(name) => {
                let (ty, _, zero_points) = self.small_constant(finder, name, &[DataType::Int8, DataType::Uint8, DataType::Int32])?;
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
            Weight::new(DType::F32, shape, Encoding::Dense, Arc::new(Int32Source { upstream, scales }))
        } else {
            let unsigned = integers.dtype == DType::U8;
            let zero_points: Vec<u8> = zero_points.into_iter().map(|byte| if unsigned { byte ^ SIGN } else { byte }).collect();
            let zero_points = if pattern.zero_points.is_none() && unsigned { vec![SIGN; scales.len()] } else { zero_points };
            let symmetric = zero_points.iter().all(|byte| *byte == 0);
            let affine = QuantizationSpec { codes: Codes::INT8, granularity, symmetric, scale_dtype: DType::F32, activations: ActivationScheme::None };
            let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            let source = Int8Source { upstream, affine: affine.clone(), scales, zero_points, unsigned };
            Weight::new(DType::F32, shape, Encoding::Quantized(affine), Arc::new(source))
        };
        weight.stored_type = (integers.dtype == DType::I32).then_some(Weight::INTEGERS);
        weight.stored_as = [pattern.integers, pattern.scales].into_iter().chain(pattern.zero_points).map(str::to_owned).collect();
        weight.stored_bytes = integers.stored_bytes.saturating_add((scale_shape.iter().product::<usize>() as u64).saturating_mul(4));
        weight.role = Some(role);
        weight.readers = own_uses.iter().filter_map(|reader| reader.name.clone()).collect();
        Some((weight, flipped))
    }

    /// Type, shape and elements of a small constant.
    fn small_constant(&self, finder: &Finder, name: &str, types: &[DataType]) -> Option<(DataType, Vec<usize>, Vec<u8>)> {
        let tensor = finder.tensors.get(name)?;
        let ty = tensor.data_type();
        let (shape, count) = elements::shape(tensor).ok().filter(|(_, count)| (1..=MAX_SCALES).contains(count) && types.contains(&ty))?;
        let bytes = match self.out_of_line_elements(tensor) {
            Some(bytes) => bytes.ok()?,
            None => elements::inline(tensor, ty, count).ok()??,
        };
        Some((ty, shape, bytes))
    }

    /// Type and element of a constant whose elements are all equal.
    pub(super) fn repeated(&self, name: &str) -> Option<(DataType, Vec<u8>)> {
        let graph = self.model.graph.as_ref()?;
        let tensor = graph.initializer.iter().find(|tensor| tensor.name() == name).or_else(|| {
            let made = graph.node.iter().find(|node| node.op_type() == "Constant" && node.output.first().is_some_and(|output| output == name))?;
            made.attribute.iter().find(|attribute| attribute.name() == "value")?.t.as_ref()
        })?;
        let (_, count) = elements::shape(tensor).ok().filter(|(_, count)| (1..=MAX_SCALES).contains(count))?;
        let bytes = match self.out_of_line_elements(tensor) {
            Some(bytes) => bytes.ok()?,
            None => elements::inline(tensor, tensor.data_type(), count).ok()??,
        };
        let width = bytes.len().checked_div(usize::try_from(count).ok()?).filter(|width| *width > 0)?;
        let mut elements = bytes.chunks(width);
        let first = elements.next()?;
        elements.all(|element| element == first).then(|| (tensor.data_type(), first.to_vec()))
    }

    /// Whether the graph quantizes activations.
    pub fn quantizes_activations(&self) -> bool {
        self.model.graph.as_ref().is_some_and(|graph| graph.node.iter().any(|node| node.op_type() == "QuantizeLinear"))
    }

    /// The number of `QuantizeLinear` nodes inside of the opaque subgraphs of a graph.
    pub fn opaque_quantizers(graph: &Graph) -> usize {
        let subgraphs = graph.nodes().iter().filter_map(|node| if let Op::Opaque(opaque) = &node.op { opaque.function.as_ref() } else { None });
        let nodes = subgraphs.filter_map(|function| function.as_any().downcast_ref::<OpaqueSubgraph>()).flat_map(|subgraph| &subgraph.parts().nodes);
        nodes.filter(|node| node.op_type() == "QuantizeLinear").filter_map(|node| node.output.first()).collect::<BTreeSet<_>>().len()
    }

    /// A note about quantized weights in unsupported patterns, if there are any.
    pub fn unsupported_integers(&self) -> Option<String> {
        let (mut unknown, mut open) = (Vec::new(), self.model.graph.iter().collect::<Vec<_>>());
        while let Some(graph) = open.pop() {
            let given = graph.node.iter().filter(|node| node.op_type() == "Constant").filter_map(constant_type);
            let constants: BTreeMap<&str, DataType> = graph.initializer.iter().map(|tensor| (tensor.name(), tensor.data_type())).chain(given).collect();
            open.extend(graph.node.iter().flat_map(super::check::bodies));
            let known = |name: &String| self.dequantized_values.contains(name);
            let of_known = graph.node.iter().filter(|node| node.output.first().is_some_and(known));
            let read_by_known: BTreeSet<&str> = of_known.flat_map(|node| &node.input).map(String::as_str).collect();
            // Weights are scaled, and may be shifted first. Other casts of bytes, such as masks, are not
            // quantized weights.
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
                    // Here the scaled result of the cast is the weight.
                    "Cast" if bytes => moved.contains(output.as_str()) && !read_by_known.contains(output.as_str()),
                    _ => false,
                }
            });
            unknown.extend(left.filter_map(|node| node.input.first()));
        }
        let first = unknown.first()?;
        Some(format!(
            "{} left unchanged: dequantized (by DequantizeLinear or Cast) in an unsupported pattern, which passes cannot process (the first: `{first}`)",
            counted(unknown.len(), "integer tensor")
        ))
    }

    /// Notes about weights and nodes that are already quantized.
    pub fn quantization_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let mut weights = self.weights.iter().filter(|(_, weight)| weight.encoding != Encoding::Dense).map(|(name, _)| name);
        if let Some(first) = weights.next() {
            notes.push(format!(
                "{} already quantized (the first: `{first}`): passes that require floats process them only after `dequantize`",
                counted(weights.count().saturating_add(1), "weight")
            ));
        }
        if let (count @ 1.., bytes) = self.unnamed {
            notes.push(format!(
                "{} with {:.1} kB not processed or counted: in functions, sparse initializers, training graphs, or several bodies with equal names",
                counted(count, "float tensor"),
                bytes as f64 / 1e3
            ));
        }
        notes.extend(self.unsupported_integers());
        notes.extend(self.unsupported_casts());
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let mut open: Vec<&GraphProto> = self.model.graph.iter().collect();
        while let Some(graph) = open.pop() {
            for node in &graph.node {
                open.extend(super::check::bodies(node));
                if node.op_type().starts_with("QLinear") || INTEGER_OPS.contains(&node.op_type()) {
                    let count = counts.entry(node.op_type()).or_default();
                    *count = count.saturating_add(1);
                }
            }
        }
        if !counts.is_empty() {
            let counts: Vec<String> = counts.into_iter().map(|(op, count)| format!("{count} {op}")).collect();
            notes.push(format!("nodes with integer arithmetic are left unchanged: {}", counts.join(", ")));
        }
        notes
    }

    /// Elements of a tensor that are stored outside of its message; `None` if there are none.
    pub(super) fn out_of_line_elements(&self, tensor: &TensorProto) -> Option<Result<Vec<u8>, String>> {
        let entry: &TensorEntry = self.tensors.get(usize::try_from(tensor.mark?).ok()?)?;
        let data = entry.out_of_line.as_ref()?;
        let read = || {
            if data.field.is_some_and(fields::is_varints) {
                return elements::decode_varints(&data.bytes, tensor.data_type(), elements::shape(tensor)?.1);
            }
            let mut bytes = vec![0; usize::try_from(data.bytes.bytes()).map_err(|e| e.to_string())?];
            data.bytes.read_at(0, &mut bytes).map_err(|e| e.to_string())?;
            Ok(bytes)
        };
        Some(read())
    }
}

/// Name and type of the value of a `Constant`.
fn constant_type(node: &NodeProto) -> Option<(&str, DataType)> {
    let value = node.attribute.iter().find(|attribute| attribute.name() == "value")?;
    Some((node.output.first()?, value.t.as_ref()?.data_type()))
}

/// The axis of per-channel scales, in the axis order of the file.
fn axis_of(pattern: &Pattern, scale_shape: &[usize], shape: &[usize]) -> Option<usize> {
    if let Some(axis) = pattern.axis {
        let rank = i64::try_from(shape.len()).ok()?;
        return (scale_shape.len() == 1).then(|| usize::try_from(if axis < 0 { axis.saturating_add(rank) } else { axis }).ok()).flatten();
    }
    // For a product, the only axis with more than one element.
    let first = shape.len().checked_sub(scale_shape.len())?;
    let mut wide = scale_shape.iter().enumerate().filter(|(_, size)| **size != 1);
    let (at, _) = wide.next().filter(|_| wide.clone().next().is_none())?;
    at.checked_add(first)
}

/// The bit that converts between uint8 and int8 with an offset of 128.
const SIGN: u8 = 0x80;

impl<'m> Finder<'m> {
    /// The number of the tensor of a constant.
    fn number(&self, name: &str) -> Option<usize> {
        usize::try_from(self.tensors.get(name)?.mark?).ok()
    }

    fn find_pattern(&self, position: usize) -> Option<Pattern<'m>> {
        let node = self.nodes.get(position).filter(|node| is_own(node.domain()))?;
        let (output, name) = (node.output.first()?.as_str(), |at: usize| node.input.get(at).map(String::as_str).filter(|name| !name.is_empty()));
        let of = |integers: &str, types: &[DataType]| self.is_integers(integers, types);
        match node.op_type() {
            "DequantizeLinear" if int(node, "block_size", 0) == 0 && int(node, "output_dtype", 1) <= 1 => {
                let types = [DataType::Int8, DataType::Uint8, DataType::Int32];
                let integers = name(0).filter(|name| of(name, &types))?;
                Some(Pattern { integers, scales: name(1)?, zero_points: name(2), axis: Some(int(node, "axis", 1)), nodes: vec![position], output })
            }
            "Mul" => {
                let cast = |at: usize| {
                    let (made, producer) = (name(at)?, self.producers.get(name(at)?)?);
                    let cast = self.nodes.get(*producer).filter(|cast| cast.op_type() == "Cast" && is_own(cast.domain()))?;
                    let integers = cast.input.first().map(String::as_str).filter(|name| of(name, &[DataType::Int8, DataType::Uint8]))?;
                    let alone = self.usages.get(made).is_some_and(|usages| usages.len() == 1) && int(cast, "to", 0) == DataType::Float as i64;
                    alone.then_some((integers, *producer))
                };
                let ((integers, producer), scales) = cast(0).zip(name(1)).or_else(|| cast(1).zip(name(0)))?;
                Some(Pattern { integers, scales, zero_points: None, axis: None, nodes: vec![producer, position], output })
            }
            _ => None,
        }
    }

    /// Whether a name is a constant of one of these types with a single use, by a node of the graph
    /// itself.
    fn is_integers(&self, name: &str, types: &[DataType]) -> bool {
        let alone = self.usages.get(name).is_some_and(|usages| matches!(usages.as_slice(), [Usage { node: Some(_), .. }]));
        alone && self.tensors.get(name).is_some_and(|tensor| types.contains(&tensor.data_type()) && tensor.mark.is_some())
    }
}

/// 8-bit integers with scales and zero points.
struct Int8Source {
    /// The integers, dense, in the axis order of the weight.
    upstream: Weight,
    affine: QuantizationSpec,
    /// One per tensor, or one per row.
    scales: Vec<u8>,
    zero_points: Vec<u8>,
    unsigned: bool,
}

impl WeightSource for Int8Source {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let row = self.upstream.row().max(1);
        let (mut first, mut codes) = (0usize, Vec::new());
        self.upstream.visit(least_common_multiple(unit, row), &mut |block| {
            codes.clear();
            codes.extend(block.now.values.iter().map(|byte| if self.unsigned { byte ^ SIGN } else { *byte }));
            let rows = codes.len().checked_div(row).unwrap_or(0);
            let (from, count) = if self.affine.granularity == Granularity::Tensor { (0, 1) } else { (first, rows) };
            first = first.saturating_add(rows);
            let part = |bytes: &'_ [u8], width: usize| -> Option<std::ops::Range<usize>> {
                let range = from.checked_mul(width)?..from.checked_add(count)?.checked_mul(width)?;
                bytes.get(range.clone()).map(|_| range)
            };
            let short = || Error::tensor("weight", "has fewer scales than rows", "the file is damaged: export it again");
            let scales = part(&self.scales, 4).and_then(|range| self.scales.get(range)).ok_or_else(short)?;
            let zero_points = part(&self.zero_points, 1).and_then(|range| self.zero_points.get(range)).ok_or_else(short)?;
            let zero_points = if self.affine.symmetric { &[][..] } else { zero_points };
            let affine = Some((&self.affine, row));
            sink(Block::untouched(View { dtype: DType::F32, values: &codes, affine, scales, zero_points, global_scale: 1.0, blocks: &[] }))
        })
    }
}

/// Dequantized 32-bit integers with scales, which biases have.
struct Int32Source {
    upstream: Weight,
    scales: Vec<f32>,
}

impl WeightSource for Int32Source {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::block_elements;

    /// Integers in blocks like those of a file.
    struct Integers(Vec<u8>);

    impl WeightSource for Integers {
        fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
            self.0.chunks(block_elements(unit)).try_for_each(|part| sink(Block::untouched(View::dense(DType::I8, part))))
        }
    }

    #[test]
    fn blocks_are_multiples_of_the_unit() {
        let (rows, row) = (400usize, 768usize);
        for granularity in [Granularity::Tensor, Granularity::Channel] {
            let count = if granularity == Granularity::Tensor { 1 } else { rows };
            let integers = Integers((0..rows * row).map(|at| (at * 31 % 251) as u8).collect());
            let source = Int8Source {
                upstream: Weight::new(DType::I8, vec![rows, row], Encoding::Dense, Arc::new(integers)),
                affine: QuantizationSpec { codes: Codes::INT8, granularity, symmetric: false, scale_dtype: DType::F32, activations: ActivationScheme::None },
                scales: (0..count).flat_map(|at| (0.5 + at as f32).to_le_bytes()).collect(),
                zero_points: (0..count).map(|at| (at % 7) as u8).collect(),
                unsigned: false,
            };
            let read = |unit: usize| {
                let (mut values, mut sizes) = (Vec::new(), Vec::new());
                source
                    .visit(unit, &mut |block| {
                        let (at, size) = (values.len(), block.now.elements());
                        values.resize(at + size, 0f32);
                        assert!(block.now.decode(0, &mut values[at..]));
                        sizes.push(size);
                        Ok(())
                    })
                    .unwrap();
                (values, sizes)
            };
            let (expected, _) = read(1);
            assert_eq!(expected.len(), rows * row);
            for unit in [96, row, 3 * row, 80 * row, 128 * row, 2 * rows * row] {
                let (values, sizes) = read(unit);
                assert!(values == expected, "{granularity:?} by {unit}");
                assert!(sizes[..sizes.len() - 1].iter().all(|size| size.is_multiple_of(unit)), "{granularity:?} by {unit}: {sizes:?}");
            }
        }
    }
}
