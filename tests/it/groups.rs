//! Pruning groups of every family: compared with manually reviewed texts, and by the property that
//! removing units equals zeroing them.
//!
//! `COMPRESS_ACCEPT=1 cargo test --test it groups::` updates the texts.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress_core::store::{self, Block, BlockSink, Encoding, View, Weight, WeightSource, Weights};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::data::synthetic;
use compress_engine::exec::{Executor, Inputs, Parameters, Residence};
use compress_graph::analysis::{Group, GroupUnit, Groups, groups};
use compress_graph::ir::ops::*;
use compress_graph::ir::{Builder, Dim, Graph, Op, TensorType, ValueId};

fn models() -> Vec<(String, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let mut found: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    found.sort();
    found.into_iter().map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path)).collect()
}

#[test]
fn groups_are_those_that_were_checked_by_hand() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/groups");
    let mut failures = Vec::new();
    for (name, path) in models() {
        let text = groups(&Model::open(&path).unwrap().graph().unwrap()).unwrap().to_string();
        let golden = folder.join(format!("{name}.txt"));
        if std::env::var_os("COMPRESS_ACCEPT").is_some() {
            std::fs::write(&golden, &text).unwrap();
        }
        if std::fs::read_to_string(&golden).ok().as_deref() != Some(&text) {
            failures.push(format!("{name}:\n{text}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Floats in memory.
struct Floats(Vec<u8>);

impl WeightSource for Floats {
    fn visit(&self, _unit: usize, sink: BlockSink) -> compress::Result<()> {
        sink(Block::untouched(View::dense(store::DType::F32, &self.0)))
    }
}

fn weights(tensors: &BTreeMap<String, Tensor>) -> Weights {
    let weight = |tensor: &Tensor| {
        let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Weight::new(store::DType::F32, tensor.dims().to_vec(), Encoding::Dense, Arc::new(Floats(bytes)))
    };
    Weights { by_name: tensors.iter().map(|(name, tensor)| (name.clone(), weight(tensor))).collect(), ..Weights::default() }
}

fn run(graph: &Graph, tensors: &BTreeMap<String, Tensor>, inputs: &Inputs) -> BTreeMap<String, Tensor> {
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let parameters = Parameters::load(graph, &weights(tensors), &Device::Cpu, DType::F32, Residence::Computed, &work).unwrap();
    Executor::new(graph, parameters, Device::Cpu).run(inputs).unwrap()
}

/// The tensors with some units of a group removed, and with the same units set to zero.
fn cut(tensors: &BTreeMap<String, Tensor>, group: &Group, gone: &[usize]) -> [BTreeMap<String, Tensor>; 2] {
    let [mut without, mut zeroed] = [tensors.clone(), tensors.clone()];
    let mut axes: BTreeMap<(&str, usize), Vec<bool>> = BTreeMap::new();
    for member in &group.members {
        let size = tensors[&member.param].dims()[member.axis];
        let keep = axes.entry((member.param.as_str(), member.axis)).or_insert_with(|| vec![true; size]);
        gone.iter().for_each(|unit| member.layout.blocks(*unit, &mut |at| keep[at..at + member.layout.block].fill(false)));
    }
    for ((param, axis), keep) in axes {
        let kept: Vec<u32> = (0..keep.len() as u32).filter(|i| keep[*i as usize]).collect();
        let index = Tensor::from_vec(kept.clone(), kept.len(), &Device::Cpu).unwrap();
        let tensor = without.get_mut(param).unwrap();
        *tensor = tensor.index_select(&index, axis).unwrap();
        let tensor = zeroed.get_mut(param).unwrap();
        let mut shape = vec![1; tensor.rank()];
        shape[axis] = keep.len();
        let mask: Vec<f32> = keep.iter().map(|keep| f32::from(u8::from(*keep))).collect();
        *tensor = tensor.broadcast_mul(&Tensor::from_vec(mask, shape, &Device::Cpu).unwrap()).unwrap();
    }
    [without, zeroed]
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

fn law(graph: &Graph, tensors: &BTreeMap<String, Tensor>, found: &Groups, group: &Group, inputs: &Inputs) -> f32 {
    let gone: Vec<usize> = if group.size > 2 { vec![0, group.size - 1] } else { vec![0] };
    let [without, zeroed] = cut(tensors, group, &gone);
    let kept = |other: &Group| other.size - if other == group { gone.len() } else { 0 };
    let smaller = found.rebuild(graph, &weights(&without), &kept).unwrap();
    let shapes = found.shapes(graph, &kept);
    assert!(without.iter().all(|(name, tensor)| shapes.get(name).is_none_or(|shape| shape == tensor.dims())), "{}", group.name);
    let (ours, expected) = (run(&smaller, &without, inputs), run(graph, &zeroed, inputs));
    // Outputs of hidden features may have become narrower.
    let same: Vec<f32> =
        expected.iter().filter(|(name, tensor)| ours[*name].dims() == tensor.dims()).map(|(name, tensor)| distance(&ours[name], tensor)).collect();
    assert!(!same.is_empty(), "{}", group.name);
    same.into_iter().fold(0.0, f32::max)
}

#[test]
fn taking_units_out_equals_making_them_zero() {
    let mut held: BTreeMap<GroupUnit, usize> = BTreeMap::new();
    for (name, path) in models() {
        let model = Model::open(&path).unwrap();
        let graph = model.graph().unwrap();
        let tensor = |(name, weight): (&String, &Weight)| {
            let values = weight.floats(name).unwrap();
            (name.clone(), Tensor::from_vec(values, weight.shape.as_slice(), &Device::Cpu).unwrap())
        };
        let floats = |weight: &Weight| matches!(weight.dtype, store::DType::F32 | store::DType::F16 | store::DType::BF16);
        let tensors: BTreeMap<String, Tensor> = model.weights.by_name.iter().filter(|(_, weight)| floats(weight)).map(tensor).collect();
        let inputs = synthetic(&graph, 7).unwrap().inputs;
        let found = groups(&graph).unwrap();
        // Removing a unit from the input of a normalization changes its statistics, and outputs of
        // hidden features become narrower.
        for group in found.groups.iter().filter(|group| !group.normalised && group.output.is_none()) {
            let worst = law(&graph, &tensors, &found, group, &inputs);
            assert!(worst < 1e-5, "{name}: {group}: {worst:e}");
            *held.entry(group.unit).or_default() += 1;
        }
    }
    for (unit, least) in [(GroupUnit::Heads, 50), (GroupUnit::Mlp, 50), (GroupUnit::Channels, 50)] {
        assert!(held[&unit] >= least, "{held:?}");
    }
}

/// Builder of graphs in the ops of ONNX models.
struct Plain<'b> {
    builder: Builder<'b>,
    count: usize,
}

impl Plain<'_> {
    fn new() -> Self {
        Plain { builder: Builder::unchecked(), count: 0 }
    }

    fn input(&mut self, sizes: &[usize]) -> ValueId {
        let shape = [Dim::named("batch")].into_iter().chain(sizes.iter().map(|size| if *size == 0 { Dim::named("sequence") } else { Dim::Fixed(*size) }));
        self.builder.input("x", TensorType::float(shape)).unwrap()
    }

    /// A node over values and parameters of these shapes.
    fn node(&mut self, op: impl Into<Op>, values: &[ValueId], params: &[&[usize]]) -> ValueId {
        let name = format!("node{}", self.count);
        self.count += 1;
        let params = params.iter().enumerate().map(|(at, shape)| self.builder.param(&format!("{name}.{at}"), shape).unwrap());
        let inputs: Vec<ValueId> = values.iter().copied().chain(params.collect::<Vec<_>>()).collect();
        self.builder.node(&name, op, &inputs).unwrap()
    }

    fn finish(mut self, logits: ValueId) -> (Graph, BTreeMap<String, Tensor>) {
        self.builder.output("logits", logits);
        let graph = self.builder.finish().unwrap();
        let mut seed = 0f32;
        let mut numbers = |count: usize| {
            let next = |_| {
                seed += 1.0;
                (seed * 1.37).sin() * 0.5 + 0.6
            };
            (0..count).map(next).collect::<Vec<f32>>()
        };
        let sizes = |shape: &[Dim]| shape.iter().map(|size| size.fixed().unwrap()).collect::<Vec<_>>();
        let tensors = graph.params().map(|(_, value)| {
            let shape = sizes(&value.ty.shape);
            (value.name.clone(), Tensor::from_vec(numbers(shape.iter().product()), shape, &Device::Cpu).unwrap())
        });
        let tensors = tensors.collect();
        (graph, tensors)
    }
}

/// Attention and an image network as written by exporters.
fn plain_graphs() -> Vec<(Graph, BTreeMap<String, Tensor>)> {
    let mut g = Plain::new();
    let x = g.input(&[0, 8]);
    let [copy, next] = [TargetSize::Copy(0), TargetSize::Copy(1)];
    let heads = |g: &mut Plain, perm: [usize; 4]| {
        let wide = g.node(Linear::default(), &[x], &[&[8, 8], &[8]]);
        let split = g.node(Reshape { shape: vec![copy, next, TargetSize::Number(2), TargetSize::Number(4)] }, &[wide], &[]);
        g.node(Transpose { perm: perm.to_vec() }, &[split], &[])
    };
    let (queries, keys, values) = (heads(&mut g, [0, 2, 1, 3]), heads(&mut g, [0, 2, 3, 1]), heads(&mut g, [0, 2, 1, 3]));
    let products = g.node(MatMul {}, &[queries, keys], &[]);
    let scaled = g.node(Binary { kind: BinaryKind::Div }, &[products], &[&[1]]);
    let shares = g.node(Softmax::default(), &[scaled], &[]);
    let mixed = g.node(MatMul {}, &[shares, values], &[]);
    let mixed = g.node(Transpose { perm: vec![0, 2, 1, 3] }, &[mixed], &[]);
    let merged = g.node(Reshape { shape: vec![copy, next, TargetSize::Number(8)] }, &[mixed], &[]);
    let out = g.node(Linear::default(), &[merged], &[&[6, 8], &[6]]);
    let pooled = g.node(Reduce { kind: ReduceKind::Max, axes: vec![1], keep_dims: false }, &[out], &[]);
    let logits = g.node(Linear::default(), &[pooled], &[&[3, 6]]);
    let attention = g.finish(logits);

    let mut g = Plain::new();
    let x = g.input(&[3, 8, 8]);
    let first = g.node(Conv { padding: Padding([0, 1, 2, 1]), ..Conv::default() }, &[x], &[&[6, 3, 3, 3]]);
    let first = g.node(BatchNorm::default(), &[first], &[&[6], &[6], &[6], &[6]]);
    let first = g.node(HardSwish {}, &[first], &[]);
    let half = g.node(AveragePool::default(), &[first], &[]);
    let half = g.node(Conv { stride: PerAxis([2, 1]), ..Conv::default() }, &[half], &[&[5, 6, 1, 1], &[5]]);
    let whole = g.node(ConvTranspose { stride: PerAxis([4, 2]), ..ConvTranspose::default() }, &[half], &[&[5, 4, 4, 2]]);
    let both = g.node(Concat { axis: 1 }, &[first, whole], &[]);
    let around = g.node(Pad { pads: vec![0, 0, 1, 1, 0, 0, 1, 1], mode: PadMode::Reflect, value: 0.0 }, &[both], &[]);
    let last = g.node(Conv::default(), &[around], &[&[4, 10, 3, 3]]);
    let sizes = vec![Extent::Scale(1.0), Extent::Scale(1.0), Extent::Scale(2.0), Extent::Scale(0.5)];
    let last = g.node(Resize { sizes, mode: Interpolation::Linear, ..Resize::default() }, &[last], &[]);
    let mean = g.node(GlobalAveragePool { keep_dims: true }, &[last], &[]);
    let flat = g.node(Reshape { shape: vec![copy, TargetSize::Number(4)] }, &[mean], &[]);
    let logits = g.node(Linear::default(), &[flat], &[&[3, 4]]);
    vec![attention, g.finish(logits)]
}

#[test]
fn groups_of_plain_ops_keep_the_law() {
    let mut sizes = Vec::new();
    for (graph, tensors) in plain_graphs() {
        let inputs = synthetic(&graph, 7).unwrap().inputs;
        let found = groups(&graph).unwrap();
        for group in &found.groups {
            let worst = law(&graph, &tensors, &found, group, &inputs);
            assert!(worst < 1e-5, "{group}: {worst:e}");
        }
        let mut of_graph: Vec<(usize, usize)> = found.groups.iter().map(|group| (group.size, group.members.len())).collect();
        of_graph.sort_unstable();
        sizes.push(of_graph);
    }
    // Heads; head sizes of values and of queries and keys; features of the output. Channels of four layers.
    assert_eq!(sizes, [vec![(2, 7), (4, 3), (4, 4), (6, 3)], vec![(4, 2), (4, 2), (5, 3), (6, 7)]]);
}
