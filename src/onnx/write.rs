//! A graph as ONNX, without the bytes of its weights.

use std::collections::{BTreeMap, BTreeSet};

use super::proto::{
    DataType, Dimension, DimensionProto, GraphProto, ModelProto, OperatorSetIdProto, StringStringEntryProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use super::spell::spell;
use super::speller::Speller;
use crate::error::{Error, Result};
use crate::ir::{Dim, Element, Graph, Kind, Op, TensorType};

/// The sets of operators that can be written.
pub const OPSETS: std::ops::RangeInclusive<u32> = 17..=21;

/// A weight's place in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Name in the ONNX graph.
    pub name: String,
    /// Name in the checkpoint.
    pub weight: String,
    /// Whether the matrix is stored `[in, out]` where the checkpoint has `[out, in]`.
    pub transposed: bool,
}

/// A model file without the weights, which are written at its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Everything else; its initializers are constants.
    pub model: ModelProto,
    /// The weights, in the order of the graph.
    pub weights: Vec<Slot>,
}

/// Spells a graph in the operators of an opset.
///
/// # Errors
/// The opset is not one of [`OPSETS`], or a size that must be known is not.
pub fn draft(graph: &Graph, opset: u32, metadata: &BTreeMap<String, String>) -> Result<Draft> {
    if !OPSETS.contains(&opset) {
        return Err(Error::option("onnx opset", format!("{opset} is not one of {} to {}", OPSETS.start(), OPSETS.end())));
    }
    let (names, aliases) = names(graph)?;
    let mut speller = Speller::new(graph, opset, names, transposed(graph));
    for node in graph.nodes() {
        speller.enter(node);
        spell(&node.op, &mut speller)?;
    }
    for (public, value) in aliases {
        let name = speller.names[value].clone();
        speller.alias(&name, &public);
    }
    // With the types in between, runtimes see that sizes with a name agree, and fuse more.
    let public: BTreeSet<&str> = graph.outputs().iter().map(|(name, _)| name.as_str()).collect();
    let between = graph.nodes().iter().map(|node| (&speller.names[node.output.index()], &graph.value(node.output).ty));
    let between = between.filter(|(name, _)| !public.contains(name.as_str())).map(|(name, ty)| info(name, ty)).collect();
    let Speller { names, transposed, nodes, constants, .. } = speller;
    let weights =
        graph.params().map(|(id, value)| Slot { name: names[id.index()].clone(), weight: value.name.clone(), transposed: transposed.contains(&id.index()) });
    let weights = weights.collect();
    let body = GraphProto {
        node: nodes,
        name: Some("model".into()),
        initializer: constants,
        input: graph.inputs().map(|(_, value)| info(&value.name, &value.ty)).collect(),
        output: graph.outputs().iter().map(|(name, id)| info(name, &graph.value(*id).ty)).collect(),
        value_info: between,
    };
    let model = ModelProto {
        ir_version: Some(match opset {
            ..=18 => 8,
            19 | 20 => 9,
            _ => 10,
        }),
        producer_name: Some(env!("CARGO_PKG_NAME").into()),
        producer_version: Some(env!("CARGO_PKG_VERSION").into()),
        doc_string: None,
        graph: Some(body),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(i64::from(opset)) }],
        metadata_props: metadata.iter().map(|(key, value)| StringStringEntryProto::new(key, value)).collect(),
    };
    Ok(Draft { model, weights })
}

/// Outputs that need a copy of a value, by the value's position.
type Aliases = Vec<(String, usize)>;

/// Names of values: each is called as the first output that it is.
fn names(graph: &Graph) -> Result<(Vec<String>, Aliases)> {
    let public: BTreeSet<&str> = graph.outputs().iter().map(|(name, _)| name.as_str()).collect();
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
    for (name, id) in graph.outputs() {
        let at = id.index();
        if matches!(graph.value(*id).kind, Kind::Node(_)) && renamed.insert(at) {
            names[at].clone_from(name);
        } else {
            aliases.push((name.clone(), at));
        }
    }
    Ok((names, aliases))
}

/// Matrices that are only ever multiplied from the right: stored as `MatMul` wants them.
fn transposed(graph: &Graph) -> BTreeSet<usize> {
    let (mut right, mut other) = (BTreeSet::new(), BTreeSet::new());
    for node in graph.nodes() {
        for (index, id) in node.inputs.iter().enumerate() {
            let tensors = node.inputs.first().is_some_and(|x| graph.value(*x).ty.shape.len() != 2);
            let swapped = matches!(&node.op, Op::Linear(op) if !op.input_major && index == 1 && tensors) && matches!(graph.value(*id).kind, Kind::Param);
            if swapped {
                right.insert(id.index())
            } else {
                other.insert(id.index())
            };
        }
    }
    let named: BTreeSet<usize> = graph.outputs().iter().map(|(_, id)| id.index()).collect();
    right.retain(|id| !other.contains(id) && !named.contains(id));
    right
}

fn info(name: &str, ty: &TensorType) -> ValueInfoProto {
    let element = if ty.element == Element::Float { DataType::Float } else { DataType::Int64 };
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => Dimension::DimValue(*size as i64),
        other => Dimension::DimParam(formula(other)),
    };
    let dim = ty.shape.iter().map(|dim| DimensionProto { value: Some(size(dim)) }).collect();
    let tensor = TensorTypeProto { elem_type: Some(element as i32), shape: Some(TensorShapeProto { dim }) };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(TypeProto { tensor_type: Some(tensor) }) }
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
