//! How each weight stands in the file, which follows from what the graph does with it.

use std::collections::{BTreeMap, BTreeSet};

use super::proto::DataType;
use super::style::{Precision, Style, TiedHead, WeightOnly};
use crate::error::{Error, Result};
use crate::ir::{Graph, Kind, Op, Value, ValueId};
use crate::store::{ActivationScheme, Affine, Blocks, Codes, Granularity, StorageFormat};

/// The first opset whose `DequantizeLinear` takes scales of groups, and integers of four bits.
const NARROW: u32 = 21;

/// A tensor of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Name in the ONNX graph.
    pub name: String,
    /// What elements are.
    pub data_type: DataType,
    /// Sizes, outermost first.
    pub dims: Vec<usize>,
}

/// A weight's place in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Slot {
    /// Name in the checkpoint.
    pub weight: String,
    /// How the elements are stored, and scales with them.
    pub storage_format: StorageFormat,
    /// How the elements are quantized, if they are integers in the file.
    pub integers: Option<Affine>,
    /// How the elements are places in palettes, if they are.
    pub palette: Option<Affine>,
    /// The elements; of integers, also scales, and zero points if there are any; of places, also palettes.
    pub tensors: Vec<Tensor>,
    /// What is not as the encoding of the weight asks for, in plain words.
    pub remark: Option<&'static str>,
    /// For a bias that is added to sums of integers: the layer whose sums they are.
    pub sums: Option<Sums>,
}

impl Slot {
    /// Whether the matrix is stored `[in, out]` where the checkpoint has `[out, in]`.
    pub fn transposed(&self) -> bool {
        matches!(self.storage_format, StorageFormat::Transposed | StorageFormat::Halves { transposed: true })
    }
}

/// A layer that multiplies integers.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// Its weight, by the name in the checkpoint.
    pub weight: String,
    /// The scale of its input.
    pub input_scale: f32,
    /// Whether these are the scales of the sums, and not the bias.
    pub scales: bool,
}

/// The weights of a graph: their places, by position of the value; the first holds the elements.
pub(super) fn places(graph: &Graph, style: &Style, names: &[String], taken: &mut BTreeSet<String>) -> Result<BTreeMap<usize, Vec<Slot>>> {
    let uses = uses(graph);
    let mut places = BTreeMap::new();
    for (id, value) in graph.params() {
        let at = id.index();
        let uses = uses.get(&at).map_or(&[][..], Vec::as_slice);
        let integers = style.integers.get(&value.name);
        let usable = integers.filter(|_| !uses.is_empty() && uses.iter().all(|u| u.layer().is_some() || u.is_table() || u.is_convolution()));
        let name = names[at].clone();
        let slots = match (usable, uses) {
            _ if style.palettes.contains_key(&value.name) => vec![palette(style, value, &name, &style.palettes[&value.name], uses, taken)],
            (Some(affine), _) => vec![quantized(style, value, name, affine, uses, taken)?],
            (None, [only]) if only.added_to(graph, style).is_some() => bias(only.added_to(graph, style), value, name, taken),
            (None, _) => vec![floats(style, value, name, uses, integers.is_some())],
        };
        places.insert(at, slots);
    }
    Ok(places)
}

/// A bias as 32-bit integers, and their scales: those of the products that it is added to.
fn bias(sums: Option<Sums>, value: &Value, name: String, taken: &mut BTreeSet<String>) -> Vec<Slot> {
    let mut scale = format!("{name}_scale");
    while !taken.insert(scale.clone()) {
        scale.push('_');
    }
    let slot = |name: &str, data_type, scales| Slot {
        weight: value.name.clone(),
        storage_format: StorageFormat::Plain,
        integers: None,
        palette: None,
        tensors: vec![Tensor { name: name.to_owned(), data_type, dims: sizes(value) }],
        remark: None,
        sums: sums.clone().map(|sums| Sums { scales, ..sums }),
    };
    vec![slot(&name, DataType::Int32, false), slot(&scale, DataType::Float, true)]
}

fn floats(style: &Style, value: &Value, name: String, uses: &[Use], quantized: bool) -> Slot {
    let matrices = !uses.is_empty() && uses.iter().all(|u| u.layer() == Some(false) && u.rank != 2);
    let wide = is_wide(style, uses);
    let mut dims = sizes(value);
    if matrices {
        dims.reverse();
    }
    Slot {
        weight: value.name.clone(),
        storage_format: if matrices { StorageFormat::Transposed } else { StorageFormat::Plain },
        integers: None,
        palette: None,
        tensors: vec![Tensor { name, data_type: if wide { DataType::Float } else { DataType::Float16 }, dims }],
        sums: None,
        remark: quantized.then_some("written as the floats that they stand for, because the graph uses them elsewhere than in a linear layer or an embedding"),
    }
}

/// Places in palettes, which become floats at the beginning of the graph.
fn palette(style: &Style, value: &Value, name: &str, affine: &Affine, uses: &[Use], taken: &mut BTreeSet<String>) -> Slot {
    let mut side = |what: &str, data_type, dims: Vec<usize>| {
        let mut wanted = format!("{name}_{what}");
        while !taken.insert(wanted.clone()) {
            wanted.push('_');
        }
        Tensor { name: wanted, data_type, dims }
    };
    let shape = sizes(value);
    let halves = style.opset >= NARROW && affine.codes.bits() <= 4;
    let palettes = affine.scale_shape(&shape).iter().product();
    let [places, values] = [
        side("places", if halves { DataType::Uint4 } else { DataType::Uint8 }, shape),
        side("palette", if is_wide(style, uses) { DataType::Float } else { DataType::Float16 }, vec![palettes]),
    ];
    Slot {
        weight: value.name.clone(),
        storage_format: if halves { StorageFormat::Halves { transposed: false } } else { StorageFormat::Plain },
        integers: None,
        palette: Some(affine.clone()),
        tensors: vec![places, values],
        remark: None,
        sums: None,
    }
}

fn is_wide(style: &Style, uses: &[Use]) -> bool {
    style.precision == Precision::Float32 || (!uses.is_empty() && uses.iter().all(|u| u.wants_range(style)))
}

fn quantized(style: &Style, value: &Value, name: String, affine: &Affine, uses: &[Use], taken: &mut BTreeSet<String>) -> Result<Slot> {
    let (shape, layer) = (sizes(value), uses.iter().find_map(|u| u.layer().map(|_| u)));
    let grouped = matches!(affine.granularity, Granularity::Group(_));
    let alone = affine.activations == ActivationScheme::None || grouped;
    let storage_format = storage_format(style, affine, &shape, uses, alone);
    let blocks = if let StorageFormat::Blocks(blocks) = storage_format { Some(blocks) } else { None };
    if let (Granularity::Group(size), Some(_), None) = (affine.granularity, layer, blocks)
        && style.opset < NARROW
    {
        return Err(Error::tensor(
            &value.name,
            format!("has a scale for each {size} inputs, which ONNX can express from opset {NARROW} on; this is opset {}", style.opset),
            format!(
                "set `opset: {NARROW}`, or `weight_only: matmul-nbits` for groups of a multiple of 16, or quantize with one scale for each output (`granularity: channel`, or `group_size: -1`)"
            ),
        ));
    }
    let transposed = uses.iter().all(|u| u.layer() == Some(false));
    let mut scales = match affine.granularity {
        // ONNX Runtime would merge equal scales of layers that share an input and then fuse none of them: rank 0 and 1 keep two
        // apart. A third rank is none: of `[1, 1]` the fused kernel reads a scale for each column, past the end.
        Granularity::Tensor if affine.activations == ActivationScheme::DynamicToken => vec![1; layer.map_or(0, |u| u.sibling % 2)],
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
        while !taken.insert(wanted.clone()) {
            wanted.push('_');
        }
        Tensor { name: wanted, data_type, dims: dims.to_vec() }
    };
    let data_type = match storage_format {
        StorageFormat::Blocks(_) => DataType::Uint8,
        StorageFormat::Halves { .. } => DataType::Int4,
        _ => DataType::Int8,
    };
    let mut beside = vec![side("scale", DataType::Float, &scales)];
    if !affine.symmetric {
        let one = affine.granularity == Granularity::Tensor;
        beside.push(side("zero_point", data_type, if one { &[] } else { &zero_points }));
    }
    let mut tensors = vec![Tensor { name, data_type, dims }];
    tensors.append(&mut beside);
    let remark = match layer {
        Some(_) if alone && uses.iter().any(Use::is_table) && (grouped || style.tied_head == TiedHead::Float32) => {
            Some("int8 in the file, where an output head that shares them with an embedding computes in floats, made when the file is loaded")
        }
        Some(_) if grouped && affine.activations == ActivationScheme::DynamicToken => Some(
            "integers with activations left as floats, because ONNX has no product of integers with scales for groups of inputs; use granularity: channel for it",
        ),
        Some(_) if alone && style.weight_only == WeightOnly::MatmulNbits && blocks.is_none() => {
            Some("read by DequantizeLinear: MatMulNBits takes matrices that are stored [out, in], with a scale for each output or for a multiple of 16 inputs")
        }
        _ if data_type == DataType::Int8 && affine.codes != Codes::INT8 => {
            Some("int8 in the file: integers of fewer bits take a byte each, but for the weights of layers with float activations from opset 21 on")
        }
        _ => None,
    };
    Ok(Slot { weight: value.name.clone(), storage_format, integers: Some(affine.clone()), palette: None, tensors, remark, sums: None })
}

/// How integers are stored. Only those that floats are made of, in layers alone, may be anything but bytes.
fn storage_format(style: &Style, affine: &Affine, shape: &[usize], uses: &[Use], alone: bool) -> StorageFormat {
    let transposed = uses.iter().all(|u| u.layer() == Some(false));
    let bytes = if transposed { StorageFormat::Transposed } else { StorageFormat::Plain };
    let [_, row] = shape else { return bytes };
    if !alone || uses.iter().any(|u| u.layer() != Some(!transposed)) {
        return bytes;
    }
    let blocks = Blocks::of(affine.codes.bits(), affine.granularity, *row).filter(|_| transposed && style.weight_only == WeightOnly::MatmulNbits);
    match blocks {
        Some(blocks) => StorageFormat::Blocks(blocks),
        None if affine.codes.bits() <= 4 && style.opset >= NARROW => StorageFormat::Halves { transposed },
        None => bytes,
    }
}

fn sizes(value: &Value) -> Vec<usize> {
    value.ty.shape.iter().map(|dim| dim.fixed().unwrap_or(0)).collect()
}

/// One node that reads a parameter.
struct Use<'g> {
    op: &'g Op,
    /// Which of its inputs the parameter is.
    input: usize,
    /// Its first input.
    first: Option<ValueId>,
    /// Rank of its first input.
    rank: usize,
    /// How many layers before it read the same first input.
    sibling: usize,
    /// The weight that it reads, by name.
    weight: &'g str,
    /// Whether the parameter is also a result of the graph.
    result: bool,
}

impl Use<'_> {
    /// Whether the weight of a linear layer is `[in, out]`, if this is one.
    fn layer(&self) -> Option<bool> {
        match self.op {
            Op::Linear(op) if self.input == 1 && !self.result => Some(op.input_major),
            _ => None,
        }
    }

    fn is_convolution(&self) -> bool {
        matches!(self.op, Op::Conv(_)) && self.input == 1 && !self.result
    }

    /// The layer that multiplies integers and adds the parameter as its bias, if there is one. Sums of integers that are no matrix become
    /// floats before ONNX Runtime adds to them.
    fn added_to(&self, graph: &Graph, style: &Style) -> Option<Sums> {
        let affine = style.integers.get(self.weight).filter(|affine| affine.symmetric && !matches!(affine.granularity, Granularity::Group(_)))?;
        let layer = matches!(self.op, Op::Linear(op) if !op.input_major && self.rank == 2) || matches!(self.op, Op::Conv(_));
        let Kind::Node(producer) = self.first.map(|id| graph.value(id).kind)? else { return None };
        match &graph.nodes()[producer].op {
            Op::FakeQuantize(op) if layer && self.input == 2 && !self.result && affine.activations != ActivationScheme::DynamicToken => {
                Some(Sums { weight: self.weight.to_owned(), input_scale: op.scale, scales: false })
            }
            _ => None,
        }
    }

    fn is_table(&self) -> bool {
        matches!(self.op, Op::Embedding(_)) && self.input == 1 && !self.result
    }

    /// Whether it is read by arithmetic that stays 32 bits wide: statistics of a normalisation, biases of integer layers.
    fn wants_range(&self, style: &Style) -> bool {
        match self.op {
            Op::BatchNorm(_) => self.input >= 3,
            Op::CacheQuantize(_) => self.input == 1,
            Op::Linear(_) => self.input == 2 && style.integers.contains_key(self.weight),
            _ => false,
        }
    }
}

/// The nodes that read each parameter, by its position.
fn uses(graph: &Graph) -> BTreeMap<usize, Vec<Use<'_>>> {
    let results: BTreeSet<usize> = graph.outputs().iter().map(|(_, id)| id.index()).collect();
    let (mut uses, mut readers) = (BTreeMap::<usize, Vec<Use>>::new(), BTreeMap::new());
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
            uses.entry(at).or_default().push(Use {
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
    uses
}
