//! Storage of each weight in a model file, which depends on how the graph uses it.

use std::collections::{BTreeMap, BTreeSet};

use super::proto::DataType;
use super::style::{OPSETS, Precision, Style, TiedHead, WeightOnly};
use crate::error::{Error, Result};
use crate::ir::{Graph, Kind, Op, Value, ValueId};
use crate::store::{ActivationScheme, Blocks, Codes, Granularity, QuantizationSpec, StorageFormat};

/// The first opset with group scales and 4-bit integers in `DequantizeLinear`.
const BLOCKED_OPSET: u32 = 21;

/// Name, type and shape of a tensor in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the ONNX graph.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Shape.
    pub dims: Vec<usize>,
}

/// Storage of one weight in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct InitializerLayout {
    /// Name in the checkpoint.
    pub weight: String,
    /// Storage format of the elements and scales.
    pub storage_format: StorageFormat,
    /// Quantization, if the elements are stored as integers.
    pub integers: Option<QuantizationSpec>,
    /// Palette encoding, if the elements are stored as palette indices.
    pub palette: Option<QuantizationSpec>,
    /// The tensors: elements, followed by scales and optional zero points of integers, or by palettes of
    /// indices.
    pub tensors: Vec<TensorSpec>,
    /// Whether the elements are 16-bit floats that the graph converts to 32 bits.
    pub widened: bool,
    /// How the file deviates from the encoding of the weight, as a phrase for a note.
    pub remark: Option<&'static str>,
    /// For a bias that is stored as 32-bit integers: the layer that adds it.
    pub integer_bias: Option<IntegerBias>,
}

impl InitializerLayout {
    /// Whether the matrix is stored as `[in, out]` and is `[out, in]` in the checkpoint.
    pub fn transposed(&self) -> bool {
        matches!(self.storage_format, StorageFormat::Transposed | StorageFormat::Halves { transposed: true })
    }
}

/// An integer layer that adds a bias to its accumulators.
#[derive(Debug, Clone, PartialEq)]
pub struct IntegerBias {
    /// Name of its weight in the checkpoint.
    pub weight: String,
    /// Scale of its input.
    pub input_scale: f32,
    /// Whether the tensor contains the scales of the accumulators instead of the bias.
    pub scales: bool,
}

/// Determines the storage of all parameters, by position of the value. The first layout of a parameter
/// contains its elements.
pub(super) fn layouts(graph: &Graph, style: &Style, names: &[String], used_names: &mut BTreeSet<String>) -> Result<BTreeMap<usize, Vec<InitializerLayout>>> {
    let usages = usages(graph);
    let usages = |at: usize| usages.get(&at).map_or(&[][..], Vec::as_slice);
    // Weights that other ops read too are floats, and so are the biases of their layers.
    let is_usable = |id: ValueId, name: &str| {
        let usages = usages(id.index());
        let is_integer = |usage: &Usage| usage.layer().is_some() || usage.is_table() || usage.is_convolution() || usage.is_body_layer(name);
        !usages.is_empty() && usages.iter().all(is_integer)
    };
    let usable: BTreeSet<&str> = graph.params().filter(|(id, value)| is_usable(*id, &value.name)).map(|(_, value)| value.name.as_str()).collect();
    let integers = style.integers.iter().filter(|(name, _)| usable.contains(name.as_str()));
    let quantized_weights = &style.integers;
    let style = &Style { integers: integers.map(|(name, spec)| (name.clone(), spec.clone())).collect(), ..style.clone() };
    let mut layouts = BTreeMap::new();
    for (id, value) in graph.params() {
        let at = id.index();
        let usages = usages(at);
        let name = names[at].clone();
        let stored = match (style.integers.get(&value.name), usages) {
            _ if style.palettes.contains_key(&value.name) => vec![palette(style, value, &name, &style.palettes[&value.name], usages, used_names)],
            (Some(affine), _) => vec![quantized(style, value, name, affine, usages, used_names)?],
            (None, [only]) if only.added_to(graph, style).is_some() => bias(only.added_to(graph, style), value, name, used_names),
            (None, _) => vec![floats(style, value, name, usages, quantized_weights.contains_key(&value.name), used_names)],
        };
        layouts.insert(at, stored);
    }
    Ok(layouts)
}

/// The first opset that can express the weights of a graph: a later one if a layer has a scale per group.
pub fn first_opset(graph: &Graph, style: &Style) -> u32 {
    let usages = usages(graph);
    let needs_groups = |(id, value): (ValueId, &Value)| match (style.integers.get(&value.name), usages.get(&id.index())) {
        (Some(affine), Some(usages)) if matches!(affine.granularity, Granularity::Group(_)) => {
            let is_layer = usages.iter().any(|usage| usage.layer().is_some());
            is_layer && !matches!(storage_format(style, affine, &sizes(value), usages, true), StorageFormat::Blocks(_))
        }
        _ => false,
    };
    if graph.params().any(needs_groups) { BLOCKED_OPSET } else { *OPSETS.start() }
}

/// Stores a bias as 32-bit integers with the scales of the accumulators to which it is added.
fn bias(integer_bias: Option<IntegerBias>, value: &Value, name: String, used_names: &mut BTreeSet<String>) -> Vec<InitializerLayout> {
    let mut scale = format!("{name}_scale");
    while !used_names.insert(scale.clone()) {
        scale.push('_');
    }
    let layout = |name: &str, data_type, scales| InitializerLayout {
        weight: value.name.clone(),
        storage_format: StorageFormat::Plain,
        integers: None,
        palette: None,
        tensors: vec![TensorSpec { name: name.to_owned(), data_type, dims: sizes(value) }],
        widened: false,
        remark: None,
        integer_bias: integer_bias.clone().map(|integer_bias| IntegerBias { scales, ..integer_bias }),
    };
    vec![layout(&name, DataType::Int32, false), layout(&scale, DataType::Float, true)]
}

fn floats(style: &Style, value: &Value, name: String, usages: &[Usage], quantized: bool, used_names: &mut BTreeSet<String>) -> InitializerLayout {
    let matrices = !usages.is_empty() && usages.iter().all(|usage| usage.layer() == Some(false) && usage.rank != 2);
    let wide = is_wide(style, usages);
    let mut dims = sizes(value);
    if matrices {
        dims.reverse();
    }
    let widened = wide && style.halves.contains(&value.name);
    let name = if widened { super::fresh(used_names, format!("{name}_float16")) } else { name };
    InitializerLayout {
        weight: value.name.clone(),
        storage_format: if matrices { StorageFormat::Transposed } else { StorageFormat::Plain },
        integers: None,
        palette: None,
        tensors: vec![TensorSpec { name, data_type: if wide && !widened { DataType::Float } else { DataType::Float16 }, dims }],
        widened,
        integer_bias: None,
        remark: quantized.then_some("written as dequantized floats, because the graph uses them outside of linear layers and embeddings"),
    }
}

/// Stores palette indices, which are expanded to floats at the beginning of the graph.
fn palette(style: &Style, value: &Value, name: &str, affine: &QuantizationSpec, usages: &[Usage], used_names: &mut BTreeSet<String>) -> InitializerLayout {
    let mut side = |what: &str, data_type, dims: Vec<usize>| {
        let mut wanted = format!("{name}_{what}");
        while !used_names.insert(wanted.clone()) {
            wanted.push('_');
        }
        TensorSpec { name: wanted, data_type, dims }
    };
    let shape = sizes(value);
    let halves = style.opset >= BLOCKED_OPSET && affine.codes.bits() <= 4;
    let palettes = affine.scale_shape(&shape).iter().product();
    let [indices, values] = [
        side("places", if halves { DataType::Uint4 } else { DataType::Uint8 }, shape),
        side("palette", if is_wide(style, usages) { DataType::Float } else { DataType::Float16 }, vec![palettes]),
    ];
    InitializerLayout {
        weight: value.name.clone(),
        storage_format: if halves { StorageFormat::Halves { transposed: false } } else { StorageFormat::Plain },
        integers: None,
        palette: Some(affine.clone()),
        tensors: vec![indices, values],
        widened: false,
        remark: None,
        integer_bias: None,
    }
}

fn is_wide(style: &Style, usages: &[Usage]) -> bool {
    style.precision == Precision::Float32 || (!usages.is_empty() && usages.iter().all(|usage| usage.needs_f32(style)))
}

fn quantized(
    style: &Style,
    value: &Value,
    name: String,
    affine: &QuantizationSpec,
    usages: &[Usage],
    used_names: &mut BTreeSet<String>,
) -> Result<InitializerLayout> {
    let (shape, layer) = (sizes(value), usages.iter().find_map(|usage| usage.layer().map(|_| usage)));
    let grouped = matches!(affine.granularity, Granularity::Group(_));
    let weight_only_layer = affine.activations == ActivationScheme::None || grouped;
    let storage_format = storage_format(style, affine, &shape, usages, weight_only_layer);
    let blocks = if let StorageFormat::Blocks(blocks) = storage_format { Some(blocks) } else { None };
    if let (Granularity::Group(size), Some(_), None) = (affine.granularity, layer, blocks)
        && style.opset < BLOCKED_OPSET
    {
        return Err(Error::tensor(
            &value.name,
            format!("has a scale per group of {size} inputs, which requires opset {BLOCKED_OPSET}, but the file has opset {}", style.opset),
            format!(
                "omit `opset` or set `opset: {BLOCKED_OPSET}`, or `weight_only: matmul-nbits` for group sizes that are multiples of 16, or quantize with one scale per output channel (`granularity: channel`, or `group_size: -1`)"
            ),
        ));
    }
    let transposed = usages.iter().all(|usage| usage.layer() == Some(false));
    let mut scales = match affine.granularity {
        // ONNX Runtime merges equal scales of layers that share an input, and then fuses none of them.
        // Alternating rank 0 and 1 keeps two distinct. A third rank is not possible: with `[1, 1]`, the
        // fused kernel reads a scale per column, out of bounds.
        Granularity::Tensor if affine.activations == ActivationScheme::DynamicToken => vec![1; layer.map_or(0, |usage| usage.sibling % 2)],
        Granularity::Tensor => vec![],
        Granularity::Channel => vec![shape[0]],
        Granularity::Group(_) | Granularity::Block(_) => affine.scale_shape(&shape),
    };
    let mut zero_points = scales.clone();
    let mut dims = shape;
    if let Some(blocks) = blocks {
        let (rows, row) = (dims[0], dims[1]);
        dims = vec![rows, blocks.count(row), blocks.bytes()];
        scales = vec![rows, blocks.count(row)];
        zero_points = vec![rows, blocks.zero_point_bytes(row)];
    } else if transposed {
        dims.reverse();
        scales.reverse();
        zero_points.reverse();
    }
    let mut side = |what: &str, data_type, dims: &[usize]| {
        let mut wanted = format!("{name}_{what}");
        while !used_names.insert(wanted.clone()) {
            wanted.push('_');
        }
        TensorSpec { name: wanted, data_type, dims: dims.to_vec() }
    };
    let data_type = match storage_format {
        StorageFormat::Blocks(_) => DataType::Uint8,
        StorageFormat::Halves { .. } => DataType::Int4,
        _ => DataType::Int8,
    };
    let mut auxiliary = vec![side("scale", DataType::Float, &scales)];
    if !affine.symmetric {
        let one = affine.granularity == Granularity::Tensor;
        auxiliary.push(side("zero_point", data_type, if one { &[] } else { &zero_points }));
    }
    let mut tensors = vec![TensorSpec { name, data_type, dims }];
    tensors.append(&mut auxiliary);
    let remark = match layer {
        Some(_) if weight_only_layer && usages.iter().any(Usage::is_table) && (grouped || style.tied_head == TiedHead::Float32) => {
            Some("stored as int8; the output head that shares them with an embedding dequantizes them when the file is loaded")
        }
        Some(_) if grouped && affine.activations == ActivationScheme::DynamicToken => Some(
            "stored as integers but applied to float activations, because ONNX has no integer matrix product with group scales; use `granularity: channel` or `group_size: -1` for one",
        ),
        Some(_) if weight_only_layer && style.weight_only == WeightOnly::MatmulNbits && blocks.is_none() => Some(
            "dequantized by DequantizeLinear, because MatMulNBits requires matrices that are stored as [out, in] with a scale per output channel or per group of a multiple of 16 inputs",
        ),
        _ if data_type == DataType::Int8 && affine.codes != Codes::INT8 => {
            Some("stored as int8, because integers of fewer bits are packed only for layers with float activations from opset 21 on")
        }
        _ => None,
    };
    Ok(InitializerLayout {
        weight: value.name.clone(),
        storage_format,
        integers: Some(affine.clone()),
        palette: None,
        tensors,
        widened: false,
        remark,
        integer_bias: None,
    })
}

/// Storage format of integers. Only weights that are dequantized and used by linear layers alone can
/// have another format than bytes.
fn storage_format(style: &Style, affine: &QuantizationSpec, shape: &[usize], usages: &[Usage], weight_only_layer: bool) -> StorageFormat {
    let transposed = usages.iter().all(|usage| usage.layer() == Some(false));
    let bytes = if transposed { StorageFormat::Transposed } else { StorageFormat::Plain };
    let [_, row] = shape else { return bytes };
    if !weight_only_layer || usages.iter().any(|usage| usage.layer() != Some(!transposed)) {
        return bytes;
    }
    let blocks = Blocks::new(affine.codes.bits(), affine.granularity, *row).filter(|_| transposed && style.weight_only == WeightOnly::MatmulNbits);
    match blocks {
        Some(blocks) => StorageFormat::Blocks(blocks),
        None if affine.codes.bits() <= 4 && style.opset >= BLOCKED_OPSET => StorageFormat::Halves { transposed },
        None => bytes,
    }
}

fn sizes(value: &Value) -> Vec<usize> {
    value.ty.shape.iter().map(|dim| dim.fixed().unwrap_or(0)).collect()
}

/// A use of a parameter by a node.
struct Usage<'g> {
    op: &'g Op,
    /// Position of the parameter among the inputs.
    input: usize,
    /// First input of the node.
    first: Option<ValueId>,
    /// Rank of the first input.
    rank: usize,
    /// Number of earlier layers with the same first input.
    sibling: usize,
    /// Name of the second input of the node.
    weight: &'g str,
    /// Whether the parameter is also an output of the graph.
    result: bool,
}

impl Usage<'_> {
    /// For the weight of a linear layer: whether it is `[in, out]`.
    fn layer(&self) -> Option<bool> {
        match self.op {
            Op::Linear(op) if self.input == 1 && !self.result => Some(op.input_major),
            _ => None,
        }
    }

    fn is_convolution(&self) -> bool {
        matches!(self.op, Op::Conv(_)) && self.input == 1 && !self.result
    }

    /// The integer layer that adds the parameter as its bias, if there is one. Accumulators that are not
    /// matrices are converted to floats before ONNX Runtime adds a bias.
    fn added_to(&self, graph: &Graph, style: &Style) -> Option<IntegerBias> {
        let affine = style.integers.get(self.weight).filter(|affine| affine.symmetric && !matches!(affine.granularity, Granularity::Group(_)))?;
        let layer = matches!(self.op, Op::Linear(op) if !op.input_major && self.rank == 2) || matches!(self.op, Op::Conv(_));
        let Kind::Node(producer) = self.first.map(|id| graph.value(id).kind)? else { return None };
        match &graph.nodes()[producer].op {
            Op::FakeQuantize(op) if layer && self.input == 2 && !self.result && affine.activations != ActivationScheme::DynamicToken => {
                Some(IntegerBias { weight: self.weight.to_owned(), input_scale: op.scale, scales: false })
            }
            _ => None,
        }
    }

    /// Whether the use is by a quantized layer in a body of a subgraph.
    fn is_body_layer(&self, weight: &str) -> bool {
        matches!(self.op, Op::Opaque(op) if op.quantizers.contains_key(weight)) && !self.result
    }

    fn is_table(&self) -> bool {
        matches!(self.op, Op::Embedding(_)) && self.input == 1 && !self.result
    }

    /// Whether the use requires 32 bits: statistics of normalizations and biases of integer layers.
    fn needs_f32(&self, style: &Style) -> bool {
        match self.op {
            Op::BatchNorm(_) => self.input >= 3,
            Op::CacheQuantize(_) => self.input == 1,
            Op::Linear(_) => self.input == 2 && style.integers.contains_key(self.weight),
            _ => false,
        }
    }
}

/// The uses of each parameter, by its position.
fn usages(graph: &Graph) -> BTreeMap<usize, Vec<Usage<'_>>> {
    let results: BTreeSet<usize> = graph.outputs().iter().map(|(_, id)| id.index()).collect();
    let (mut usages, mut readers) = (BTreeMap::<usize, Vec<Usage>>::new(), BTreeMap::new());
    for node in graph.nodes() {
        let rank = node.inputs.first().map_or(0, |x| graph.value(*x).ty.shape.len());
        let weight = node.inputs.get(1).map_or("", |id| graph.value(*id).name.as_str());
        let mut sibling = 0;
        if let (Op::Linear(_), Some(x)) = (&node.op, node.inputs.first()) {
            let before = readers.entry(x.index()).or_insert(0usize);
            sibling = *before;
            *before += 1;
        }
        for (input, id) in node.inputs.iter().enumerate().filter(|(_, id)| graph.value(**id).kind == Kind::Param) {
            let at = id.index();
            usages.entry(at).or_default().push(Usage {
                op: &node.op,
                input,
                first: node.inputs.first().copied(),
                rank,
                sibling,
                weight,
                result: results.contains(&at),
            });
        }
    }
    usages
}
