//! A model file, opened: its messages in memory, its weights where they lie.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use prost::Message;

use super::check::{self, bodies};
use super::dequantized::Dequantized;
use super::elements::{self, Varints, belongs, dtype, in_memory, raw_bytes};
use super::external::{Beside, Place};
use super::lift::Pieces;
use super::proto::{DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use super::skeleton::{Run, Skeleton};
use super::uses::{self, Use};
use super::wire::data;
use crate::error::{Error, Result};
use crate::files::File;
use crate::store::checkpoint::DataFile;
use crate::store::{DType, Encoding, RawTensor, Transposed, Weight, Weights};

/// From this many elements on, a `Constant` of whole numbers is a weight; those of floats always are.
const LARGE_CONSTANT: u64 = 8;

/// A model file.
pub struct ModelFile {
    /// Where it was opened.
    pub path: PathBuf,
    /// Files beside it that hold tensors.
    pub data_files: Vec<PathBuf>,
    /// What it says, without the elements of large tensors.
    pub model: ModelProto,
    /// Its weights, as they were opened.
    pub weights: BTreeMap<String, Weight>,
    /// Inputs of the graph that are initializers too: they are weights.
    pub weights_as_inputs: BTreeSet<String>,
    /// What reads each weight.
    pub(super) uses: BTreeMap<String, Vec<Use>>,
    /// The bytes of `model`.
    pub(super) skeleton: Vec<u8>,
    /// Tensors by their number.
    pub(super) tensors: Vec<Held>,
    /// Values that nodes make of integers, and that are weights or lead to one.
    pub(super) made_floats: BTreeSet<String>,
    /// Open sizes that were told, by name.
    pub(super) told: OnceLock<BTreeMap<String, usize>>,
    /// Pieces without typed form, as far as they were asked for.
    pub(super) pieces: Mutex<Pieces>,
}

/// A tensor of the file.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Where its bytes are, if they are not in the message.
    pub away: Option<Away>,
    /// The weight that it is, if it is one.
    pub weight: Option<String>,
    /// Whether the weight has its axes the other way round: products of ONNX take matrices `[in, out]`.
    pub flipped: bool,
    /// What makes the weight of the tensor, where that holds integers.
    pub dequantized: Option<Dequantized>,
}

/// Bytes that are not in the message.
#[derive(Debug)]
pub(super) struct Away {
    /// The bytes.
    pub bytes: RawTensor,
    /// The field that they stand in, if they are in the same file.
    pub field: Option<u64>,
}

impl std::fmt::Debug for ModelFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ModelFile({}, {} weights)", self.path.display(), self.weights.len())
    }
}

/// A tensor that may be a weight, and its name.
struct Candidate<'m> {
    tensor: &'m TensorProto,
    name: Option<&'m str>,
    /// Whether it is an initializer of the graph itself: its name stands, whatever bodies call theirs. Those of bodies have a name where no other
    /// value has the same.
    top: bool,
}

impl ModelFile {
    /// Opens a file without reading its weights.
    ///
    /// # Errors
    /// It is no model, does not hold together, or a tensor's bytes are not where they should be.
    pub fn open(path: &Path) -> Result<ModelFile> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let skeleton = Skeleton::read(path, &file)?;
        let model = ModelProto::decode(skeleton.bytes.as_slice()).map_err(|e| Error::malformed(path, format!("not an ONNX model: {e}")))?;
        check::check(&model).map_err(|reason| Error::malformed(path, reason))?;
        let file = DataFile::of(path, file);
        let away = |run: Run| Away { bytes: RawTensor::within(&file, DType::U8, vec![run.bytes as usize], run.begin, run.bytes), field: Some(run.field) };
        let mut opened = ModelFile {
            path: path.to_owned(),
            data_files: Vec::new(),
            weights: BTreeMap::new(),
            uses: BTreeMap::new(),
            weights_as_inputs: weights_as_inputs(&model),
            tensors: skeleton.runs.into_iter().map(|run| Held { away: run.map(away), ..Held::default() }).collect(),
            skeleton: skeleton.bytes,
            made_floats: BTreeSet::new(),
            told: OnceLock::new(),
            pieces: Mutex::default(),
            model: ModelProto::default(),
        };
        opened.find_weights(&model)?;
        opened.model = model;
        Ok(opened)
    }

    /// The version of ONNX's own operators.
    pub fn opset(&self) -> i64 {
        check::opset(&self.model).unwrap_or(1)
    }

    /// The weights, with what the file says about itself.
    pub fn all_weights(&self) -> Weights {
        let metadata = self.model.metadata_props.iter().map(|entry| (entry.key().to_owned(), entry.value().to_owned())).collect();
        Weights { by_name: self.weights.clone(), metadata, ..Weights::default() }
    }

    /// What it takes and gives, each as a person would write it: `ids: int64[batch, 128]`.
    pub fn ports(&self) -> [Vec<String>; 2] {
        let graph = self.model.graph.clone().unwrap_or_default();
        let inputs = graph.input.iter().filter(|input| !self.weights_as_inputs.contains(input.name()));
        [inputs.map(port).collect(), graph.output.iter().map(port).collect()]
    }

    /// Whether weights are those of the file, every one of them.
    pub fn holds(&self, weights: &Weights) -> bool {
        let same = |(name, now): (&String, &Weight)| self.weights.get(name).is_some_and(|before| Arc::ptr_eq(&before.source(), &now.source()));
        weights.by_name.len() == self.weights.len() && weights.by_name.iter().all(same)
    }

    fn find_weights(&mut self, model: &ModelProto) -> Result<()> {
        let candidates = candidates(model);
        let mut times = BTreeMap::new();
        model.graph.iter().for_each(|graph| check::given_times(graph, &mut times));
        let (mut beside, uses) = (Beside::of(&self.path), uses::uses(model));
        for candidate in &candidates {
            let tensor = candidate.tensor;
            let named = candidate.name.filter(|name| !name.is_empty() && (candidate.top || times.get(name) == Some(&1)));
            let said = candidate.name.or(tensor.name.as_deref()).unwrap_or("");
            let wrong = |reason: String| Error::malformed(&self.path, format!("tensor `{said}`: {reason}"));
            let number = tensor.mark.and_then(|mark| usize::try_from(mark).ok());
            let Some(held) = number.and_then(|number| self.tensors.get_mut(number)) else { return Err(wrong("it has no number".into())) };
            let found = place(tensor, held, &mut beside).and_then(|()| weight(tensor, held, said)).map_err(wrong)?;
            if let (Some(name), Some(weight)) = (named, found) {
                held.weight = Some(name.to_owned());
                let uses = uses.get(name).map_or(&[][..], Vec::as_slice);
                let (role, flipped) = uses::role(uses, weight.shape.len());
                held.flipped = flipped && weight.is_float();
                let mut weight = if held.flipped { Transposed { upstream: weight }.weight() } else { weight };
                weight.stored_as = vec![name.to_owned()];
                weight.role = Some(role);
                weight.readers = uses.iter().filter_map(|reader| reader.name.clone()).collect();
                self.uses.insert(name.to_owned(), uses.to_vec());
                self.weights.insert(name.to_owned(), weight);
            }
        }
        self.data_files = beside.paths();
        model.graph.iter().for_each(|graph| self.find_dequantized(graph, &uses));
        Ok(())
    }
}

/// A value and its type as text.
pub(super) fn port(value: &ValueInfoProto) -> String {
    let Some(tensor) = value.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref()) else { return format!("{}: no tensor", value.name()) };
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

/// Inputs of the graph that are initializers too.
fn weights_as_inputs(model: &ModelProto) -> BTreeSet<String> {
    let Some(graph) = &model.graph else { return BTreeSet::new() };
    let initializers: BTreeSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
    graph.input.iter().map(|input| input.name()).filter(|name| initializers.contains(name)).map(str::to_owned).collect()
}

/// Finds bytes that are in another file.
fn place(tensor: &TensorProto, held: &mut Held, beside: &mut Beside) -> Result<(), String> {
    let Some(Place { location, offset, length }) = Place::of(tensor)? else { return Ok(()) };
    if held.away.is_some() || tensor.raw_data.is_some() {
        return Err("its elements are in the model and in another file".into());
    }
    let (ty, (_, count)) = (tensor.data_type(), elements::shape(tensor)?);
    let wanted = raw_bytes(ty, count).ok_or_else(|| format!("its elements are {ty:?}, which cannot be in another file"))?;
    let (file, size) = beside.open(location)?;
    let room = size.checked_sub(offset).ok_or_else(|| format!("it begins at byte {offset} of `{location}`, which has {size}"))?;
    if length.unwrap_or(room) != wanted || wanted > room {
        let length = length.map_or(String::new(), |length| format!("says {length} bytes, "));
        return Err(format!("{length}takes {wanted} by its shape {:?}, and `{location}` has {room} from byte {offset} on", tensor.dims));
    }
    held.away = Some(Away { bytes: RawTensor::within(&file, DType::U8, vec![wanted as usize], offset, wanted), field: None });
    Ok(())
}

/// A tensor as a weight; nothing where weights have no such elements.
fn weight(tensor: &TensorProto, held: &Held, name: &str) -> Result<Option<Weight>, String> {
    let number = tensor.data_type.unwrap_or(0);
    let ty = DataType::try_from(number).unwrap_or(DataType::Undefined);
    let (shape, count) = elements::shape(tensor)?;
    let bytes = |mut weight: Weight, bytes: u64| {
        weight.stored_bytes = bytes;
        Some(weight)
    };
    let dtype = dtype(ty);
    let Some(away) = &held.away else {
        let Some(dtype) = dtype else { return Ok(None) };
        let Some(inline) = elements::inline(tensor, ty, count)? else { return Err(format!("has no elements, its shape {shape:?} takes {count}")) };
        let size = inline.len() as u64;
        return Ok(bytes(Weight::new(dtype, shape, Encoding::Dense, in_memory(dtype, inline)), size));
    };
    let field = away.field.unwrap_or(data::RAW);
    if ty != DataType::Undefined && !belongs(field, ty) {
        return Err(format!("its elements are {ty:?}, and stand in a field of others"));
    }
    let size = away.bytes.bytes();
    if let Some(wanted) = raw_bytes(ty, count).filter(|wanted| !data::is_varints(field) && *wanted != size) {
        return Err(format!("has {size} bytes of elements, its shape {shape:?} takes {wanted}"));
    }
    let Some(dtype) = dtype else { return Ok(None) };
    let weight = if data::is_varints(field) {
        // Each number takes a byte at least.
        let count = usize::try_from(count).ok().filter(|count| *count as u64 <= size).ok_or_else(|| format!("has fewer elements than its shape {shape:?}"))?;
        let source = Varints { stored: away.bytes.clone(), dtype, count, name: name.to_owned() };
        Weight::new(dtype, shape, Encoding::Dense, Arc::new(source))
    } else {
        Weight::new(dtype, shape.clone(), Encoding::Dense, Arc::new(away.bytes.as_elements(dtype, shape)))
    };
    Ok(bytes(weight, size))
}

/// Every tensor of a model, in no order that means anything.
fn candidates(model: &ModelProto) -> Vec<Candidate<'_>> {
    let mut found = Vec::new();
    if let Some(graph) = &model.graph {
        of_graph(graph, true, &mut found);
    }
    let trained = model.training_info.iter().flat_map(|info| info.initialization.iter().chain(&info.algorithm));
    let first = found.len();
    trained.for_each(|graph| of_graph(graph, false, &mut found));
    model.functions.iter().for_each(|function| {
        function.node.iter().for_each(|node| of_node(node, &mut found));
        function.attribute_proto.iter().flat_map(|attribute| attribute.t.iter().chain(&attribute.tensors)).for_each(|tensor| found.push(unnamed(tensor)));
    });
    // What is trained, or made anew wherever it is called, is no weight of the model.
    found.iter_mut().skip(first).for_each(|candidate| candidate.name = None);
    found
}

fn unnamed(tensor: &TensorProto) -> Candidate<'_> {
    Candidate { tensor, name: None, top: false }
}

fn of_graph<'m>(graph: &'m GraphProto, top: bool, found: &mut Vec<Candidate<'m>>) {
    found.extend(graph.initializer.iter().map(|tensor| Candidate { tensor, name: tensor.name.as_deref(), top }));
    found.extend(graph.sparse_initializer.iter().flat_map(|sparse| sparse.values.iter().chain(&sparse.indices)).map(unnamed));
    graph.node.iter().for_each(|node| of_node(node, found));
}

fn of_node<'m>(node: &'m NodeProto, found: &mut Vec<Candidate<'m>>) {
    let constant = node.op_type() == "Constant" && check::is_own(node.domain());
    for attribute in &node.attribute {
        if let Some(tensor) = &attribute.t {
            let named = constant && attribute.name() == "value" && is_weight(tensor);
            found.push(Candidate { tensor, name: node.output.first().map(String::as_str).filter(|_| named), top: false });
        }
        let sparse = attribute.sparse_tensor.iter().chain(&attribute.sparse_tensors).flat_map(|sparse| sparse.values.iter().chain(&sparse.indices));
        found.extend(attribute.tensors.iter().chain(sparse).map(unnamed));
    }
    bodies(node).for_each(|body| of_graph(body, false, found));
}

/// Whether a constant is what a model has learned, as far as its type and size tell.
fn is_weight(tensor: &TensorProto) -> bool {
    let count = tensor.dims.iter().try_fold(1u64, |count, size| count.checked_mul(u64::try_from(*size).ok()?)).unwrap_or(u64::MAX);
    let float = matches!(tensor.data_type(), DataType::Float | DataType::Float16 | DataType::Bfloat16 | DataType::Double);
    count >= LARGE_CONSTANT || (float && count > 0)
}
