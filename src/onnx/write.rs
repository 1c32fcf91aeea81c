//! A graph as ONNX, without the bytes of its weights.

use std::collections::{BTreeMap, BTreeSet};

use super::cached::{self, Kept};
use super::check::is_own;
use super::lower::{lower, palette};
use super::lowering::Lowering;
use super::place::{Slot, places};
use super::proto::{
    DataType, Dimension, DimensionProto, GraphProto, ModelProto, OperatorSetIdProto, StringStringEntryProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use super::style::{OPSETS, Precision, Style};
use crate::error::{Error, Result};
use crate::ir::decoder::LOGITS;
use crate::ir::{Dim, Element, Graph, Kind, TensorType, ValueId};

/// A model file without the weights, which are written at its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Everything else; its initializers are constants.
    pub model: ModelProto,
    /// The weights, in the order of the graph's parameters.
    pub weights: Vec<Slot>,
    /// What is kept of earlier tokens, by attention; nothing in a file without a cache.
    pub kept: Vec<Kept>,
    /// Output heads that share an int8 table and multiply integers, where that was asked for.
    pub(crate) integer_heads: Option<usize>,
}

impl Draft {
    /// Number of tensors that the weights become.
    pub fn tensors(&self) -> usize {
        self.weights.iter().map(|slot| slot.tensors.len()).sum()
    }

    /// Says of itself, its inputs and its outputs what another model does that takes and gives the same.
    pub fn described_as(&mut self, other: &ModelProto) {
        let (Some(graph), Some(theirs)) = (&mut self.model.graph, &other.graph) else { return };
        for (ports, known) in [(&mut graph.input, &theirs.input), (&mut graph.output, &theirs.output)] {
            for port in ports {
                if let Some(known) = known.iter().find(|known| known.name == port.name && is_like(known, port)) {
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

/// Whether sizes that both know are the same; what one leaves open, it may.
fn is_like(one: &ValueInfoProto, other: &ValueInfoProto) -> bool {
    let shape = |value: &ValueInfoProto| Some(value.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref()?.dim.clone());
    let (Some(one), Some(other)) = (shape(one), shape(other)) else { return true };
    let differ = |(one, other): (&DimensionProto, &DimensionProto)| match (&one.value, &other.value) {
        (Some(Dimension::DimValue(one)), Some(Dimension::DimValue(other))) => *one > 0 && one != other,
        _ => false,
    };
    one.len() == other.len() && !one.iter().zip(&other).any(differ)
}

/// Spells a graph in the operators of an opset.
///
/// # Errors
/// The opset is not one of [`OPSETS`] or cannot express a weight, or a size that must be known is not.
pub fn draft(graph: &Graph, style: &Style, metadata: &BTreeMap<String, String>) -> Result<Draft> {
    let opset = style.opset;
    if !OPSETS.contains(&opset) {
        return Err(Error::option("onnx opset", format!("{opset} is not one of {} to {}", OPSETS.start(), OPSETS.end())));
    }
    let half = style.precision == Precision::Float16;
    if style.cache {
        cached::check(graph)?;
    }
    // Decoders with a cache give scores of next tokens, as other exporters write them.
    let results: Vec<(String, ValueId)> = graph.outputs().iter().filter(|(name, _)| !style.cache || name == LOGITS).cloned().collect();
    let (names, aliases) = names(graph, &results, half)?;
    let mut taken = names.iter().cloned().chain(results.iter().map(|(name, _)| name.clone())).collect();
    let places = places(graph, style, &names, &mut taken)?;
    let mut lowering = Lowering::new(graph, style, names, taken, places);
    for (id, value) in graph.inputs().filter(|(_, value)| half && value.ty.element == Element::Float) {
        lowering.narrow_input(id.index(), &value.name);
    }
    for (id, _) in graph.params() {
        palette::floats(id.index(), &mut lowering);
    }
    for node in graph.nodes() {
        lowering.enter(node);
        lower(&node.op, &mut lowering)?;
    }
    for (public, value) in aliases {
        lowering.alias(value, &public);
    }
    let Lowering { places, nodes, constants, imports, cache, integer_heads, .. } = lowering;
    let all = nodes.iter().filter_map(|node| node.domain.clone()).chain(imports.keys().cloned());
    let domains: BTreeSet<String> = all.filter(|domain| !is_own(domain)).collect();
    let own = OperatorSetIdProto { domain: Some(String::new()), version: Some(i64::from(opset)) };
    let others = domains.into_iter().map(|domain| {
        let version = Some(imports.get(&domain).copied().unwrap_or(1));
        OperatorSetIdProto { domain: Some(domain), version }
    });
    let weights = places.into_values().flatten().collect();
    let body = GraphProto {
        node: nodes,
        name: Some("model".into()),
        initializer: constants,
        input: cache
            .as_ref()
            .map_or_else(|| graph.inputs().map(|(_, value)| info(&value.name, &value.ty)).collect(), |cache| cached::inputs(graph, cache, half)),
        output: results
            .iter()
            .map(|(name, id)| info(name, &graph.value(*id).ty))
            .chain(cache.iter().flat_map(|cache| cached::outputs(graph, cache, half)))
            .collect(),
        // Types in between can be inferred. With them, ONNX Runtime fuses residual sums into a slower kernel, and transposes slower.
        value_info: Vec::new(),
        ..GraphProto::default()
    };
    let model = ModelProto {
        ir_version: Some(match opset {
            ..=18 => 8,
            19 | 20 => 9,
            _ => 10,
        }),
        producer_name: Some(env!("CARGO_PKG_NAME").into()),
        producer_version: Some(env!("CARGO_PKG_VERSION").into()),
        graph: Some(body),
        opset_import: std::iter::once(own).chain(others).collect(),
        metadata_props: metadata.iter().map(|(key, value)| StringStringEntryProto::new(key, value)).collect(),
        ..ModelProto::default()
    };
    Ok(Draft { model, weights, kept: cache.map(|cache| cache.kept).unwrap_or_default(), integer_heads })
}

/// Outputs that need a copy of a value, by the value's position.
type Aliases = Vec<(String, usize)>;

/// Names of values: each is called as the first output that it is.
fn names(graph: &Graph, results: &[(String, ValueId)], half: bool) -> Result<(Vec<String>, Aliases)> {
    let public: BTreeSet<&str> = results.iter().map(|(name, _)| name.as_str()).collect();
    let mut names = Vec::with_capacity(graph.values().len());
    for value in graph.values() {
        let claimed = public.contains(value.name.as_str());
        if claimed && value.kind == Kind::Input {
            return Err(Error::option(
                format!("graph output `{}`", value.name),
                "has the name of an input; ONNX needs names of their own, so rename the output",
            ));
        }
        names.push(if claimed { format!("{}.value", value.name) } else { value.name.clone() });
    }
    let (mut renamed, mut aliases) = (BTreeSet::new(), Vec::new());
    for (name, id) in results {
        let at = id.index();
        let value = graph.value(*id);
        let narrow = half && value.ty.element == Element::Float;
        if matches!(value.kind, Kind::Node(_)) && !narrow && renamed.insert(at) {
            names[at].clone_from(name);
        } else {
            aliases.push((name.clone(), at));
        }
    }
    Ok((names, aliases))
}

pub(super) fn info(name: &str, ty: &TensorType) -> ValueInfoProto {
    let element = if ty.element == Element::Float { DataType::Float } else { DataType::Int64 };
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => Dimension::DimValue(*size as i64),
        other => Dimension::DimParam(formula(other)),
    };
    let dim = ty.shape.iter().map(|dim| DimensionProto { value: Some(size(dim)), denotation: None }).collect();
    let tensor = TensorTypeProto { elem_type: Some(element as i32), shape: Some(TensorShapeProto { dim }) };
    let ty = TypeProto { tensor_type: Some(tensor), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// A size that is known when the model runs, as a person would write it.
fn formula(dim: &Dim) -> String {
    match dim {
        Dim::Window { of, offset, stride } => {
            let of = formula(of);
            let sign = if *offset < 0 { '-' } else { '+' };
            format!("floor(({of} {sign} {})/{stride}) + 1", offset.unsigned_abs())
        }
        other => other.to_string(),
    }
}
