//! An opened model file: messages in memory, weights on disk.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use super::branching::depends_on_values;
use super::check::{self, bodies};
use super::elements::{self, Varints, dtype, in_memory, is_valid_field, raw_bytes};
use super::external::{DataFiles, ExternalData};
use super::functions;
use super::initializer_roles::{self, Usage, UsageKind};
use super::masked_scores;
use super::opaque_subgraph::SubgraphCache;
use super::proto::{DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use super::replacement::is_plain;
use super::skeleton::{Run, Skeleton};
use super::widened::{widen_node, widen_tensor};
use super::wire::data;
use crate::error::{Error, Result};
use crate::files::File;
use crate::store::{DType, DataFile, Encoding, RawTensor, Role, Transposed, Weight, Weights};

/// Minimum number of elements for an integer `Constant` to be a weight. Float constants always are.
const LARGE_CONSTANT: u64 = 8;

/// Minimum size in bytes of a tensor without a unique name that a note counts.
const MIN_UNNAMED: u64 = 1024;

/// A model file.
pub struct ModelFile {
    /// Path of the file.
    pub path: PathBuf,
    /// External data files.
    pub data_files: Vec<PathBuf>,
    /// The decoded model, without the elements of large tensors.
    pub model: ModelProto,
    /// The weights of the file, before any pass.
    pub weights: BTreeMap<String, Weight>,
    /// Graph inputs that are also initializers. They are treated as weights.
    pub weights_as_inputs: BTreeSet<String>,
    /// The uses of each weight.
    pub(super) usages: BTreeMap<String, Vec<Usage>>,
    /// The encoded messages without elements, see [`Skeleton`].
    pub(super) skeleton: Vec<u8>,
    /// All tensors, by number.
    pub(super) tensors: Vec<TensorEntry>,
    /// Weights that `Constant` nodes contain, unless layers of the file are stored in such nodes, too.
    pub(super) literals: BTreeSet<String>,
    /// Values that nodes compute to dequantize or convert a weight.
    pub(super) dequantized_values: BTreeSet<String>,
    /// User-specified values of open dimensions, by name.
    pub(super) fixed_sizes: OnceLock<BTreeMap<String, usize>>,
    /// The contents that are lifted.
    pub(super) expanded: OnceLock<Result<Expanded, String>>,
    /// Whether it computes with 16-bit floats, see [`is_half`](Self::is_half).
    pub(super) is_half: bool,
    /// Number of larger float tensors that are not weights, because they have no unique name, and their
    /// bytes.
    pub(super) unnamed: (usize, u64),
    /// Loaded subgraphs without a typed form.
    pub(super) subgraphs: Mutex<SubgraphCache>,
}

/// The graph of a file with calls of functions replaced, and with dense initializers for sparse ones.
pub(super) struct Expanded {
    pub nodes: Vec<NodeProto>,
    pub initializers: Vec<TensorProto>,
}

/// A tensor of the file.
#[derive(Debug, Default)]
pub(super) struct TensorEntry {
    /// The bytes of its elements, if they are not in the message.
    pub out_of_line: Option<OutOfLineData>,
    /// Name of the weight, if it is one.
    pub weight: Option<String>,
    /// Whether the axes of the weight are swapped: ONNX stores matrices as `[in, out]`.
    pub flipped: bool,
    /// Nodes and tensors that dequantize it, if it is a quantized weight.
    pub dequantized: Option<DequantizationParts>,
    /// Position of the node that converts it to 32 bits, if it is a weight that is stored in 16 bits.
    pub converted: Option<usize>,
}

/// Nodes and tensors that a quantized weight has in addition to its integers.
#[derive(Debug, Clone, Default)]
pub(super) struct DequantizationParts {
    /// Positions of the nodes that dequantize the integers.
    pub nodes: Vec<usize>,
    /// Numbers of the scale and zero point tensors that have no other use.
    pub parts: Vec<usize>,
}

/// Elements that are not in the message.
#[derive(Debug)]
pub(super) struct OutOfLineData {
    /// The bytes.
    pub bytes: RawTensor,
    /// The field of the tensor message, if they are in the model file.
    pub field: Option<u64>,
}

impl std::fmt::Debug for ModelFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ModelFile({}, {} weights)", self.path.display(), self.weights.len())
    }
}

/// A tensor that may be a weight.
struct Candidate<'m> {
    tensor: &'m TensorProto,
    name: Option<&'m str>,
    /// Whether it is an initializer of the main graph, whose name is always used. Tensors of bodies have
    /// a name only if it is unique in the file.
    top: bool,
    /// Whether a `Constant` node contains it.
    literal: bool,
}

/// The messages of a file, encoded and decoded.
fn decode(path: &Path, file: &File) -> Result<(Skeleton, ModelProto)> {
    let skeleton = Skeleton::read(path, file)?;
    let model = skeleton.decode(path)?;
    Ok((skeleton, model))
}

impl ModelFile {
    /// Decodes the messages of a file, without the elements of large tensors. Neither validates the model nor
    /// opens external data.
    pub fn messages(path: &Path) -> Result<ModelProto> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        Ok(decode(path, &file)?.1)
    }

    /// Why ONNX Runtime does not load the graph of a model.
    pub fn structural_defect(model: &ModelProto) -> Option<String> {
        check::structure(model).err()
    }

    /// Opens a file without reading its weights.
    pub fn open(path: &Path) -> Result<ModelFile> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let (skeleton, model) = decode(path, &file)?;
        check::check(&model).map_err(|reason| Error::malformed(path, reason))?;
        let file = DataFile::from_file(path, file);
        let out_of_line =
            |run: Run| OutOfLineData { bytes: RawTensor::within(&file, DType::U8, vec![run.bytes as usize], run.begin, run.bytes), field: Some(run.field) };
        let mut opened = ModelFile {
            path: path.to_owned(),
            data_files: Vec::new(),
            weights: BTreeMap::new(),
            usages: BTreeMap::new(),
            weights_as_inputs: weights_as_inputs(&model),
            tensors: skeleton.runs.into_iter().map(|run| TensorEntry { out_of_line: run.map(out_of_line), ..TensorEntry::default() }).collect(),
            skeleton: skeleton.bytes,
            dequantized_values: BTreeSet::new(),
            fixed_sizes: OnceLock::new(),
            expanded: OnceLock::new(),
            is_half: false,
            unnamed: (0, 0),
            literals: BTreeSet::new(),
            subgraphs: Mutex::default(),
            model: ModelProto::default(),
        };
        opened.find_weights(&model)?;
        opened.model = model;
        Ok(opened)
    }

    /// Size of the file and of its external data.
    pub fn bytes(&self) -> u64 {
        std::iter::once(&self.path).chain(&self.data_files).filter_map(|path| crate::files::length(path).ok()).fold(0, u64::saturating_add)
    }

    /// Whether values of the inputs decide which parts of the model run, for a batch as a whole.
    pub fn branches(&self) -> bool {
        depends_on_values(&self.model)
    }

    /// Version of the standard operator set.
    pub fn opset(&self) -> i64 {
        check::opset(&self.model).unwrap_or(1)
    }

    /// The weights, with the metadata of the file.
    pub fn all_weights(&self) -> Weights {
        let metadata = self.model.metadata_props.iter().map(|entry| (entry.key().to_owned(), entry.value().to_owned())).collect();
        Weights { by_name: self.weights.clone(), metadata, ..Weights::default() }
    }

    /// Inputs and outputs as text: `ids: int64[batch, 128]`.
    pub fn ports(&self) -> [Vec<String>; 2] {
        let graph = self.model.graph.clone().unwrap_or_default();
        let inputs = graph.input.iter().filter(|input| !self.weights_as_inputs.contains(input.name()));
        [inputs.map(describe_value).collect(), graph.output.iter().map(describe_value).collect()]
    }

    /// Outputs that the last node casts to a float type other than 32 bits, with their types. A graph
    /// computes them in 32 bits.
    pub fn converted_outputs(&self) -> BTreeMap<String, DataType> {
        let Some(graph) = &self.model.graph else { return BTreeMap::new() };
        let ty = |node: &NodeProto| {
            let ty = DataType::try_from(i32::try_from(initializer_roles::int(node, "to", 0)).ok()?).ok()?;
            let is_cast = node.op_type() == "Cast" && check::is_own(node.domain());
            (is_cast && matches!(ty, DataType::Float16 | DataType::Bfloat16 | DataType::Double)).then_some(ty)
        };
        let is_output = |name: &&String| graph.output.iter().any(|output| output.name() == name.as_str());
        graph.node.iter().filter_map(|node| Some((node.output.first().filter(is_output)?.clone(), ty(node)?))).collect()
    }

    /// Largest relative differences of outputs of 16 bits from those of a graph, which does not round them.
    pub fn output_rounding(&self) -> BTreeMap<String, f64> {
        let rounding = |ty| match ty {
            DataType::Float16 => Some(1.0 / 2048.0),
            DataType::Bfloat16 => Some(1.0 / 256.0),
            _ => None,
        };
        self.converted_outputs().into_iter().filter_map(|(name, ty)| Some((name, rounding(ty)?))).collect()
    }

    /// The contents of the graph for lifting.
    pub(super) fn expanded(&self) -> Result<&Expanded> {
        let expand = || {
            let (mut nodes, mut initializers) = (functions::inlined(&self.model)?, self.dense_initializers()?);
            if self.is_half {
                nodes.iter_mut().try_for_each(widen_node)?;
                initializers.iter_mut().try_for_each(widen_tensor)?;
            }
            if let Some(graph) = &self.model.graph {
                let is_float = |dtype: DType| dtype == DType::F32 || (self.is_half && matches!(dtype, DType::F16 | DType::BF16));
                let one = |name: &str| self.weights.get(name).filter(|weight| is_float(weight.dtype) && weight.elements() == 1);
                let weight = |name: &str| one(name)?.floats(name).ok()?.first().copied();
                initializers.extend(masked_scores::with_biases(graph, &mut nodes, weight));
            }
            Ok(Expanded { nodes, initializers })
        };
        self.expanded.get_or_init(expand).as_ref().map_err(|reason| Error::malformed(&self.path, reason.clone()))
    }

    /// Whether the weight has another axis order than in the file.
    pub(super) fn is_flipped(&self, weight: &str) -> bool {
        self.tensors.iter().any(|entry| entry.flipped && entry.weight.as_deref() == Some(weight))
    }

    /// Whether a weight is a number in the code of the model, like the epsilon of a norm, as far as the file
    /// shows: a scalar, or a `Constant` node in a file with its layers in initializers.
    pub fn is_literal(&self, weight: &str) -> bool {
        self.literals.contains(weight) || self.weights.get(weight).is_some_and(|weight| weight.shape.is_empty())
    }

    /// Whether a product or a convolution in a body of a control flow operator reads the weight.
    pub fn is_layer_in_body(&self, weight: &str) -> bool {
        let usages = self.usages.get(weight).map_or(&[][..], Vec::as_slice);
        usages.iter().any(|usage| usage.node.is_none() && matches!(usage.kind, UsageKind::Columns | UsageKind::Rows | UsageKind::Kernel))
    }

    /// Whether a Gemm reads the weight that also scales a factor or the bias, or transposes the activations.
    pub fn is_of_scaled_gemm(&self, weight: &str) -> bool {
        let mut nodes = self.model.graph.iter().flat_map(|graph| &graph.node);
        nodes.any(|node| !is_plain(node) && node.input.get(1).is_some_and(|name| name == weight))
    }

    /// Whether these are exactly the weights of the file.
    pub fn has_unchanged_weights(&self, weights: &Weights) -> bool {
        let same = |(name, now): (&String, &Weight)| self.weights.get(name).is_some_and(|before| Arc::ptr_eq(&before.source(), &now.source()));
        weights.by_name.len() == self.weights.len() && weights.by_name.iter().all(same)
    }

    fn find_weights(&mut self, model: &ModelProto) -> Result<()> {
        let candidates = candidates(model);
        let mut counts = BTreeMap::new();
        model.graph.iter().for_each(|graph| check::definition_counts(graph, &mut counts));
        let (mut files, usages) = (DataFiles::new(&self.path), initializer_roles::usages(model));
        for candidate in &candidates {
            let tensor = candidate.tensor;
            let named = candidate.name.filter(|name| !name.is_empty() && (candidate.top || counts.get(name) == Some(&1)));
            let label = candidate.name.or(tensor.name.as_deref()).unwrap_or("");
            let wrong = |reason: String| Error::malformed(&self.path, format!("tensor `{label}`: {reason}"));
            let number = tensor.mark.and_then(|mark| usize::try_from(mark).ok());
            let Some(entry) = number.and_then(|number| self.tensors.get_mut(number)) else { return Err(wrong("its mark is missing".into())) };
            let found = resolve_external_data(tensor, entry, &mut files).and_then(|()| weight(tensor, entry, label)).map_err(wrong)?;
            let (count, bytes) = self.unnamed;
            if let Some(weight) = found.as_ref().filter(|weight| named.is_none() && weight.is_float() && weight.value_bytes() >= MIN_UNNAMED) {
                self.unnamed = (count.saturating_add(1), bytes.saturating_add(weight.value_bytes()));
            }
            if let (Some(name), Some(weight)) = (named, found) {
                entry.weight = Some(name.to_owned());
                let usages = usages.get(name).map_or(&[][..], Vec::as_slice);
                let (role, flipped) = initializer_roles::role(usages, &weight.shape);
                if candidate.literal {
                    self.literals.insert(name.to_owned());
                }
                entry.flipped = flipped && weight.is_float();
                let mut weight = if entry.flipped { Transposed { upstream: weight }.weight() } else { weight };
                weight.stored_as = vec![name.to_owned()];
                weight.role = Some(role);
                weight.readers = usages.iter().filter_map(|reader| reader.name.clone()).collect();
                self.usages.insert(name.to_owned(), usages.to_vec());
                self.weights.insert(name.to_owned(), weight);
            }
        }
        self.data_files = files.paths();
        // Some exporters write all weights as nodes.
        let is_layer = |name: &String| matches!(self.weights.get(name).and_then(|weight| weight.role), Some(Role::Matrix | Role::Kernel | Role::Table));
        if self.literals.iter().any(is_layer) {
            self.literals.clear();
        }
        if let Some(graph) = &model.graph {
            self.find_dequantized(graph, &usages);
            self.find_converted(graph, &usages);
            self.is_half = self.finds_half(graph);
        }
        Ok(())
    }
}

/// Name and type of a value as text.
pub(super) fn describe_value(value: &ValueInfoProto) -> String {
    let Some(tensor) = value.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref()) else { return format!("{}: not a tensor", value.name()) };
    let size = |dim: &DimensionProto| match &dim.value {
        Some(Dimension::DimValue(size)) if *size >= 0 => size.to_string(),
        Some(Dimension::DimParam(name)) if !name.is_empty() => name.clone(),
        _ => "any".to_owned(),
    };
    let element = format!("{:?}", tensor.elem_type()).to_lowercase();
    match &tensor.shape {
        Some(shape) => format!("{}: {element}[{}]", value.name(), shape.dim.iter().map(size).collect::<Vec<_>>().join(", ")),
        None => format!("{}: {element}", value.name()),
    }
}

/// Graph inputs that are also initializers.
fn weights_as_inputs(model: &ModelProto) -> BTreeSet<String> {
    let Some(graph) = &model.graph else { return BTreeSet::new() };
    let initializers: BTreeSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
    graph.input.iter().map(|input| input.name()).filter(|name| initializers.contains(name)).map(str::to_owned).collect()
}

/// Locates the bytes of a tensor with external data.
fn resolve_external_data(tensor: &TensorProto, entry: &mut TensorEntry, files: &mut DataFiles) -> Result<(), String> {
    let Some(ExternalData { location, offset, length }) = ExternalData::parse(tensor)? else { return Ok(()) };
    if entry.out_of_line.is_some() || tensor.raw_data.is_some() {
        return Err("its elements are both in the model and in an external file".into());
    }
    let (ty, (_, count)) = (tensor.data_type(), elements::shape(tensor)?);
    let wanted = raw_bytes(ty, count).ok_or_else(|| format!("its elements are {ty:?}, which cannot be external data"))?;
    let (file, size) = files.open(location)?;
    let room = size.checked_sub(offset).ok_or_else(|| format!("it begins at byte {offset} of `{location}`, which has {size} bytes"))?;
    if length.is_some_and(|length| length != wanted) || wanted > room {
        let length = length.map_or(String::new(), |length| format!("specifies {length} bytes, but "));
        return Err(format!("{length}requires {wanted} bytes for its shape {:?}, and `{location}` has {room} from byte {offset} on", tensor.dims));
    }
    entry.out_of_line = Some(OutOfLineData { bytes: RawTensor::within(&file, DType::U8, vec![wanted as usize], offset, wanted), field: None });
    Ok(())
}

/// A tensor as a weight; `None` for element types that weights do not support.
fn weight(tensor: &TensorProto, entry: &TensorEntry, name: &str) -> Result<Option<Weight>, String> {
    let number = tensor.data_type.unwrap_or(0);
    let ty = DataType::try_from(number).unwrap_or(DataType::Undefined);
    let (shape, count) = elements::shape(tensor)?;
    let bytes = |mut weight: Weight, bytes: u64| {
        weight.stored_bytes = bytes;
        Some(weight)
    };
    let dtype = dtype(ty);
    let Some(stored) = &entry.out_of_line else {
        let Some(dtype) = dtype else { return Ok(None) };
        let Some(inline) = elements::inline(tensor, ty, count)? else { return Err(format!("has no elements, but its shape {shape:?} requires {count}")) };
        let size = inline.len() as u64;
        return Ok(bytes(Weight::new(dtype, shape, Encoding::Dense, in_memory(dtype, inline)), size));
    };
    let field = stored.field.unwrap_or(data::RAW);
    if ty != DataType::Undefined && !is_valid_field(field, ty) {
        return Err(format!("its elements are {ty:?}, but are stored in the field of another type"));
    }
    let size = stored.bytes.bytes();
    if let Some(wanted) = raw_bytes(ty, count).filter(|wanted| !data::is_varints(field) && *wanted != size) {
        return Err(format!("has {size} bytes of elements, but its shape {shape:?} requires {wanted}"));
    }
    let Some(dtype) = dtype else { return Ok(None) };
    let weight = if data::is_varints(field) {
        // A varint has at least one byte.
        let count = usize::try_from(count).ok().filter(|count| *count as u64 <= size).ok_or_else(|| format!("has fewer elements than its shape {shape:?}"))?;
        let source = Varints { stored: stored.bytes.clone(), dtype, count, name: name.to_owned() };
        Weight::new(dtype, shape, Encoding::Dense, Arc::new(source))
    } else {
        Weight::new(dtype, shape.clone(), Encoding::Dense, Arc::new(stored.bytes.as_elements(dtype, shape)))
    };
    Ok(bytes(weight, size))
}

/// All tensors of a model, in no particular order.
fn candidates(model: &ModelProto) -> Vec<Candidate<'_>> {
    let mut found = Vec::new();
    if let Some(graph) = &model.graph {
        collect_graph(graph, true, &mut found);
    }
    let training = model.training_info.iter().flat_map(|info| info.initialization.iter().chain(&info.algorithm));
    let first = found.len();
    training.for_each(|graph| collect_graph(graph, false, &mut found));
    model.functions.iter().for_each(|function| {
        function.node.iter().for_each(|node| collect_node(node, &mut found));
        function.attribute_proto.iter().flat_map(|attribute| attribute.t.iter().chain(&attribute.tensors)).for_each(|tensor| found.push(unnamed(tensor)));
    });
    // Tensors of training graphs and of functions are not weights of the model.
    found.iter_mut().skip(first).for_each(|candidate| candidate.name = None);
    found
}

fn unnamed(tensor: &TensorProto) -> Candidate<'_> {
    Candidate { tensor, name: None, top: false, literal: false }
}

fn collect_graph<'m>(graph: &'m GraphProto, top: bool, found: &mut Vec<Candidate<'m>>) {
    found.extend(graph.initializer.iter().map(|tensor| Candidate { tensor, name: tensor.name.as_deref(), top, literal: false }));
    found.extend(graph.sparse_initializer.iter().flat_map(|sparse| sparse.values.iter().chain(&sparse.indices)).map(unnamed));
    graph.node.iter().for_each(|node| collect_node(node, found));
}

fn collect_node<'m>(node: &'m NodeProto, found: &mut Vec<Candidate<'m>>) {
    let constant = node.op_type() == "Constant" && check::is_own(node.domain());
    for attribute in &node.attribute {
        if let Some(tensor) = &attribute.t {
            let named = constant && attribute.name() == "value" && is_weight(tensor);
            found.push(Candidate { tensor, name: node.output.first().map(String::as_str).filter(|_| named), top: false, literal: true });
        }
        let sparse = attribute.sparse_tensor.iter().chain(&attribute.sparse_tensors).flat_map(|sparse| sparse.values.iter().chain(&sparse.indices));
        found.extend(attribute.tensors.iter().chain(sparse).map(unnamed));
    }
    bodies(node).for_each(|body| collect_graph(body, false, found));
}

/// Whether a constant is a trained weight, judged by type and size.
fn is_weight(tensor: &TensorProto) -> bool {
    let count = tensor.dims.iter().try_fold(1u64, |count, size| count.checked_mul(u64::try_from(*size).ok()?)).unwrap_or(u64::MAX);
    let float = matches!(tensor.data_type(), DataType::Float | DataType::Float16 | DataType::Bfloat16 | DataType::Double);
    count >= LARGE_CONSTANT || (float && count > 0)
}
