//! Layers that compute or read the values of attention heads.

use std::ops::Range;

use super::residual_stream::{LinearLayer, Readers, is_last};
use crate::ir::{Graph, Node, Op};

/// The values of an attention layer, which one linear layer computes and another one reads.
#[derive(Debug, PartialEq, Eq)]
pub struct HeadValues {
    /// Number of features of a head.
    pub width: usize,
    /// The layer that computes the values.
    pub producer: LinearLayer,
    /// The first output of this layer that is a value, and the number of heads.
    pub first: usize,
    /// Number of heads of the values.
    pub heads: usize,
    /// The layer that reads the mixed values of all heads.
    pub reader: LinearLayer,
    /// Number of heads of the queries, whose mixed values the layer reads.
    pub query_heads: usize,
}

/// The attention layers of a graph, by whether their values can be rotated.
#[derive(Debug, Default)]
pub struct AttentionValues {
    /// Layers whose values can be rotated.
    pub layers: Vec<HeadValues>,
    /// Names of the nodes of the remaining layers.
    pub remaining: Vec<String>,
}

/// Finds the attention layers whose values pass from a linear layer through attention to another linear
/// layer without other operators.
pub fn attention_values(graph: &Graph) -> AttentionValues {
    let readers = Readers::new(graph);
    let mut found = AttentionValues::default();
    for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Attention(_))) {
        match values(&readers, node) {
            Some(layer) => found.layers.push(layer),
            None => found.remaining.push(readers.name(node.output).to_owned()),
        }
    }
    found
}

fn values(readers: &Readers, attention: &Node) -> Option<HeadValues> {
    let graph = readers.graph;
    let is_attention = |node: &Node| node.output == attention.output && node.inputs.iter().filter(|id| **id == attention.inputs[2]).count() == 1;
    readers.only(attention.inputs[2]).filter(|node| is_attention(node))?;
    let split = graph.producer(attention.inputs[2])?;
    let Op::SplitHeads(heads) = &split.op else { return None };
    readers.only(split.inputs[0])?;
    let all = readers.width(split.inputs[0])?;
    let before = graph.producer(split.inputs[0])?;
    let (producer, first) = match &before.op {
        Op::Linear(_) => (before, 0),
        Op::Slice(_) => {
            let own = range(readers, before)?;
            let is_disjoint = |index: &usize| {
                let node = &graph.nodes()[*index];
                node.output == before.output || range(readers, node).is_some_and(|other| other.end <= own.start || own.end <= other.start)
            };
            let is_only = readers.nodes[before.inputs[0].index()].iter().all(is_disjoint) && !graph.is_output(before.inputs[0]);
            (graph.producer(before.inputs[0]).filter(|_| is_only)?, own.start)
        }
        _ => return None,
    };
    let merge = readers.only(attention.output).filter(|node| matches!(node.op, Op::MergeHeads(_)))?;
    let reader = readers.only(merge.output).filter(|node| node.inputs.first() == Some(&merge.output))?;
    let is_own = |node: &Node| node.inputs.iter().skip(1).all(|id| readers.only(*id).is_some());
    let (width, mixed) = (heads.head_dim, readers.width(merge.output)?);
    let fits = width > 0 && all.is_multiple_of(width) && mixed.is_multiple_of(width) && is_own(producer) && is_own(reader);
    fits.then_some(())?;
    let (producer, reader) = (readers.linear(producer).ok()?, readers.linear(reader).ok()?);
    Some(HeadValues { width, producer, first, heads: all / width, reader, query_heads: mixed / width })
}

/// The range of the last axis that a node selects, if it is a contiguous slice.
fn range(readers: &Readers, node: &Node) -> Option<Range<usize>> {
    let (Op::Slice(op), [input]) = (&node.op, node.inputs.as_slice()) else { return None };
    let is_contiguous = op.step == 1 && is_last(op, readers.graph.value(*input).ty.shape.len());
    let (first, length) = op.bounds(readers.width(*input)?).filter(|_| is_contiguous)?;
    Some(first..first + length)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet, HashMap};
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use candle_core::{DType, Device, Tensor};
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::analysis::residual_stream;
    use crate::arch::{self, Settings};
    use crate::ir::Builder;
    use crate::kernel::rotation::Rotation;

    type Tensors = HashMap<String, Tensor>;

    fn folder(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name)
    }

    /// The graph of a reference model and its tensors, unless other files describe the model. A tied head is
    /// stored separately.
    fn golden(name: &str) -> Option<(Graph, Tensors)> {
        let mut config: Map<String, Value> = serde_json::from_slice(&std::fs::read(folder(name).join("config.json")).ok()?).unwrap();
        let mut tensors = candle_core::safetensors::load(folder(name).join("model.safetensors"), &Device::Cpu).unwrap();
        config.insert("tie_word_embeddings".into(), json!(false));
        for (alias, original) in arch::tied(config["model_type"].as_str()?) {
            if let Some(table) = tensors.get(*original).cloned() {
                tensors.entry((*alias).to_owned()).or_insert(table);
            }
        }
        let shapes: BTreeMap<String, Vec<usize>> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec())).collect();
        Some((arch::build(&Settings::new(&config), &[], Builder::new(&shapes)).ok()?, tensors))
    }

    /// The logits of a reference model for its inputs, by the definition of every op.
    fn logits(name: &str, graph: &Graph, tensors: &Tensors) -> Tensor {
        let inputs = candle_core::safetensors::load(folder(name).join("golden.safetensors"), &Device::Cpu).unwrap();
        let mut values: Vec<Option<Tensor>> = vec![None; graph.values().len()];
        for (id, value) in graph.inputs() {
            values[id.index()] = inputs.get(&format!("in/{}", value.name)).cloned();
        }
        for (id, value) in graph.params() {
            values[id.index()] = Some(tensors[&value.name].to_dtype(DType::F32).unwrap());
        }
        for node in graph.nodes() {
            let inputs: Vec<Tensor> =
                node.inputs.iter().map(|id| values[id.index()].clone().unwrap_or_else(|| panic!("{name}: {:?}", graph.value(*id)))).collect();
            let result = node.op.spec().eval(&inputs).unwrap_or_else(|error| panic!("{name}: {}: {error}", graph.value(node.output).name));
            values[node.output.index()] = Some(result);
        }
        let (_, output) = graph.outputs().iter().find(|(name, _)| name == "logits").unwrap();
        values[output.index()].clone().unwrap()
    }

    fn rotation(size: usize, seed: u64) -> Arc<Rotation> {
        let mut state = seed;
        let uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        Arc::new(Rotation::random(size, uniform).unwrap())
    }

    /// Changes the elements of a tensor, whose rows have the given number of columns.
    fn change(tensors: &mut Tensors, name: &str, change: impl FnOnce(&mut [f32], usize)) {
        let tensor = &tensors[name];
        let mut values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let columns = tensor.dims()[1..].iter().product();
        change(&mut values, columns);
        tensors.insert(name.to_owned(), Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap());
    }

    fn outputs(tensors: &mut Tensors, layer: &LinearLayer, rotation: &Rotation, first: usize, count: usize) {
        assert!(!layer.input_major);
        let rows = |values: &mut [f32], columns: usize| rotation.rotate_rows(values, columns, first, count);
        change(tensors, &layer.weight, rows);
        layer.bias.iter().for_each(|bias| change(tensors, bias, rows));
    }

    /// Rotates all tensors of a model.
    fn rotated(graph: &Graph, tensors: &Tensors) -> Result<Tensors, String> {
        let (stream, mut tensors) = (residual_stream(graph)?, tensors.clone());
        let rotation_of_stream = rotation(stream.width, 5);
        for (layer, norm) in &stream.readers {
            let factors = norm.as_ref().map(|norm| (tensors[norm].to_vec1::<f32>().unwrap(), stream.norms[norm] as f32));
            change(&mut tensors, &layer.weight, |values, columns| {
                if let Some((factors, offset)) = factors {
                    let rows = values.chunks_exact_mut(columns);
                    rows.for_each(|row| row.iter_mut().zip(&factors).for_each(|(value, factor)| *value *= factor + offset));
                }
                rotation_of_stream.rotate_columns(values, columns, 0, 1);
            });
        }
        for (norm, offset) in &stream.norms {
            change(&mut tensors, norm, |values, _| values.fill((1.0 - offset) as f32));
        }
        stream.writers.iter().for_each(|layer| outputs(&mut tensors, layer, &rotation_of_stream, 0, 1));
        for table in &stream.tables {
            change(&mut tensors, table, |values, columns| rotation_of_stream.rotate_columns(values, columns, 0, 1));
        }
        for (layer, values) in attention_values(graph).layers.iter().enumerate() {
            let rotation = rotation(values.width, 11 + layer as u64);
            outputs(&mut tensors, &values.producer, &rotation, values.first, values.heads);
            change(&mut tensors, &values.reader.weight, |elements, columns| rotation.rotate_columns(elements, columns, 0, values.query_heads));
        }
        Ok(tensors)
    }

    /// Rotating all tensors that the analysis finds does not change the logits of any reference model.
    #[test]
    fn rotated_models_compute_the_same_logits() {
        let mut names: Vec<String> = std::fs::read_dir(folder("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let mut found = BTreeSet::new();
        for name in names {
            let Some((graph, tensors)) = golden(&name) else { continue };
            let Ok(after) = rotated(&graph, &tensors) else { continue };
            let [before, after] = [&tensors, &after].map(|tensors| logits(&name, &graph, tensors));
            let largest = |tensor: &Tensor| tensor.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
            let worst = largest(&(&before - after).unwrap());
            assert!(worst < 1e-4 * largest(&before).max(1.0), "{name}: {worst}");
            found.insert(name);
        }
        for name in [
            "deepseek-v3",
            "gemma",
            "granite",
            "lfm2",
            "llama",
            "llama-biases",
            "llama-grouped-tied",
            "mamba2-tied",
            "mistral",
            "nemotron-h",
            "phi3",
            "qwen2",
            "qwen2-moe",
            "qwen3",
        ] {
            assert!(found.contains(name), "{name} is not rotated: {:?}", residual_stream(&golden(name).unwrap().0).err());
        }
    }

    #[test]
    fn heads_of_fused_and_grouped_projections_are_found() {
        let values = |name: &str| attention_values(&golden(name).unwrap().0);
        let found = values("phi3");
        assert!(
            found.remaining.is_empty() && found.layers.iter().all(|layer| layer.first > 0 && layer.producer.weight.ends_with("qkv_proj.weight")),
            "{found:?}"
        );
        let found = values("llama-grouped-tied");
        assert!(found.layers.len() == 2 && found.layers.iter().all(|layer| (layer.width, layer.heads, layer.query_heads) == (4, 2, 4)), "{found:?}");
        assert!(values("deepseek-v3").layers.is_empty());
    }

    #[test]
    fn streams_that_do_not_commute_with_rotations_are_refused() {
        for (name, reason) in [
            ("olmo2", "the factors of a normalization after a layer"),
            ("gemma2", "the factors of a normalization after a layer"),
            ("gpt2", "subtracts the mean"),
            ("phi", "subtracts the mean"),
            ("mixtral-fused", "is a part of a larger tensor"),
            ("bert", "no output head"),
        ] {
            let error = residual_stream(&golden(name).unwrap().0).unwrap_err();
            assert!(error.contains(reason), "{name}: {error}");
        }
    }
}
