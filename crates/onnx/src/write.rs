//! Lowering of a graph to an ONNX model without weight data.

use std::collections::{BTreeMap, BTreeSet};

use super::check::is_own;
use super::float_layers;
use super::initializer_layout::{InitializerLayout, layouts};
use super::kv_cache::{self, CachedAttention};
use super::lower::{lower, palette};
use super::lowering::Lowering;
use super::proto::{DataType, Dimension, DimensionProto, GraphProto, ModelProto, OperatorSetIdProto, StringStringEntryProto, ValueInfoProto};
use super::style::{Cache, OPSETS, Precision, Style};
use super::value_info::value_info_proto_as;
use crate::error::{Error, Result};
use crate::ir::decoder::LOGITS;
use crate::ir::{Element, Graph, Kind, TensorType, ValueId};

/// A model file without its weights, which follow the messages.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// The model. Its initializers are constants.
    pub model: ModelProto,
    /// The weights, in the order of the graph's parameters.
    pub weights: Vec<InitializerLayout>,
    /// Shapes of the KV cache, by attention; empty in a file without a cache.
    pub cached_attentions: Vec<CachedAttention>,
    /// The number of output heads that share an int8 embedding table and multiply integers, if this is
    /// requested.
    pub integer_heads: Option<usize>,
}

impl Draft {
    /// Number of tensors that represent the weights.
    pub fn tensors(&self) -> usize {
        self.weights.iter().map(|weight| weight.tensors.len()).sum()
    }

    /// Copies the descriptions of the model and of equal inputs and outputs from another model.
    pub fn copy_descriptions(&mut self, other: &ModelProto) {
        let (Some(graph), Some(theirs)) = (&mut self.model.graph, &other.graph) else { return };
        for (ports, known) in [(&mut graph.input, &theirs.input), (&mut graph.output, &theirs.output)] {
            for port in ports {
                if let Some(known) = known.iter().find(|known| known.name == port.name && has_compatible_shape(known, port)) {
                    port.clone_from(known);
                }
            }
        }
        graph.name.clone_from(&theirs.name);
        graph.doc_string.clone_from(&theirs.doc_string);
        self.model.doc_string.clone_from(&other.doc_string);
        self.model.domain.clone_from(&other.domain);
        self.model.model_version = other.model_version;
    }
}

/// Whether the shapes agree where both are known.
fn has_compatible_shape(one: &ValueInfoProto, other: &ValueInfoProto) -> bool {
    let shape = |value: &ValueInfoProto| Some(value.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref()?.dim.clone());
    let (Some(one), Some(other)) = (shape(one), shape(other)) else { return true };
    let differ = |(one, other): (&DimensionProto, &DimensionProto)| match (&one.value, &other.value) {
        (Some(Dimension::DimValue(one)), Some(Dimension::DimValue(other))) => *one > 0 && one != other,
        _ => false,
    };
    one.len() == other.len() && !one.iter().zip(&other).any(differ)
}

/// Lowers a graph to the operators of an opset. Fails if the opset is not one of [`OPSETS`] or cannot express
/// a weight, or a required size is unknown.
pub fn draft(graph: &Graph, style: &Style, metadata: &BTreeMap<String, String>) -> Result<Draft> {
    let opset = style.opset;
    if !OPSETS.contains(&opset) {
        return Err(Error::option("onnx opset", format!("{opset} is not one of {} to {}", OPSETS.start(), OPSETS.end())));
    }
    let half = style.precision == Precision::Float16;
    match style.cache {
        Cache::None => {}
        Cache::Decoder => kv_cache::check(graph)?,
        Cache::AfterEncoder => kv_cache::check_after_encoder(graph)?,
    }
    // Decoders with a KV cache output only logits and the cache, as in other exporters.
    let results: Vec<(String, ValueId)> = graph.outputs().iter().filter(|(name, _)| style.cache == Cache::None || name == LOGITS).cloned().collect();
    let (names, aliases) = names(graph, &results, style)?;
    let mut taken = names.iter().cloned().chain(results.iter().map(|(name, _)| name.clone())).collect();
    let layouts = layouts(graph, style, &names, &mut taken)?;
    let mut lowering = Lowering::new(graph, style, names, taken, layouts);
    let own = if half { DataType::Float16 } else { DataType::Float };
    for (id, value) in graph.inputs().filter(|(_, value)| value.ty.element == Element::Float) {
        let declared = style.input_types.get(&value.name).copied().unwrap_or(DataType::Float);
        if declared != own {
            lowering.convert_input(id.index(), &value.name, declared);
        }
    }
    for (id, _) in graph.params() {
        palette::floats(id.index(), &mut lowering);
    }
    for node in graph.nodes() {
        lowering.enter(node);
        lower(&node.op, &mut lowering)?;
    }
    for (public, value) in aliases {
        lowering.alias(value, &public, style.output_types.get(&public).copied());
    }
    lowering.remove_unread_casts(&results.iter().map(|(name, _)| name.as_str()).collect());
    float_layers::repeat_input_scales(&mut lowering);
    let Lowering { layouts, nodes, constants, imports, cache, integer_heads, .. } = lowering;
    let all = nodes.iter().filter_map(|node| node.domain.clone()).chain(imports.keys().cloned());
    let domains: BTreeSet<String> = all.filter(|domain| !is_own(domain)).collect();
    let own = OperatorSetIdProto { domain: Some(String::new()), version: Some(i64::from(opset)) };
    let others = domains.into_iter().map(|domain| {
        let version = Some(imports.get(&domain).copied().unwrap_or(1));
        OperatorSetIdProto { domain: Some(domain), version }
    });
    let weights = layouts.into_values().flatten().collect();
    let port = |name: &str, ty: &TensorType, types: &BTreeMap<String, DataType>| value_info_proto_as(name, ty, types.get(name).copied());
    let body = GraphProto {
        node: nodes,
        name: Some("model".into()),
        initializer: constants,
        input: cache.as_ref().map_or_else(
            || graph.inputs().map(|(_, value)| port(&value.name, &value.ty, &style.input_types)).collect(),
            |cache| kv_cache::inputs(graph, cache, half),
        ),
        output: results
            .iter()
            .map(|(name, id)| port(name, &graph.value(*id).ty, &style.output_types))
            .chain(cache.iter().flat_map(|cache| kv_cache::outputs(graph, cache, half)))
            .collect(),
        // The types of intermediate values can be inferred. With them, ONNX Runtime fuses residual
        // additions into a slower kernel, and transposes more slowly.
        value_info: Vec::new(),
        ..GraphProto::default()
    };
    let model = ModelProto {
        ir_version: Some(match opset {
            ..=18 => 8,
            19 | 20 => 9,
            21 | 22 => 10,
            23 => 11,
            _ => 12,
        }),
        producer_name: Some(compress_core::NAME.into()),
        producer_version: Some(env!("CARGO_PKG_VERSION").into()),
        graph: Some(body),
        opset_import: std::iter::once(own).chain(others).collect(),
        metadata_props: metadata.iter().map(|(key, value)| StringStringEntryProto::new(key, value)).collect(),
        ..ModelProto::default()
    };
    Ok(Draft { model, weights, cached_attentions: cache.map(|cache| cache.attentions).unwrap_or_default(), integer_heads })
}

/// Outputs that copy a value, with the position of the value.
type Aliases = Vec<(String, usize)>;

/// Names of the values. The first output of a value determines its name.
fn names(graph: &Graph, results: &[(String, ValueId)], style: &Style) -> Result<(Vec<String>, Aliases)> {
    let half = style.precision == Precision::Float16;
    // An output may be the input of the same name.
    let is_input = |name: &str, id: ValueId| graph.value(id).kind == Kind::Input && graph.value(id).name == name && !half;
    let others: Vec<&(String, ValueId)> = results.iter().filter(|(name, id)| !is_input(name, *id)).collect();
    let public: BTreeSet<&str> = others.iter().map(|(name, _)| name.as_str()).collect();
    let mut names = Vec::with_capacity(graph.values().len());
    for value in graph.values() {
        let claimed = public.contains(value.name.as_str());
        if claimed && value.kind == Kind::Input {
            return Err(Error::option(
                format!("graph output `{}`", value.name),
                "has the name of an input, but names must be unique in ONNX: rename the output",
            ));
        }
        names.push(if claimed { format!("{}.value", value.name) } else { value.name.clone() });
    }
    let (mut renamed, mut aliases) = (BTreeSet::new(), Vec::new());
    for (name, id) in others {
        let at = id.index();
        let value = graph.value(*id);
        let converted = style.output_types.contains_key(name) || half;
        if matches!(value.kind, Kind::Node(_)) && !(converted && value.ty.element == Element::Float) && renamed.insert(at) {
            names[at].clone_from(name);
        } else {
            aliases.push((name.clone(), at));
        }
    }
    Ok((names, aliases))
}
