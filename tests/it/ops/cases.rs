//! Ops with inputs, for all properties.

use candle_core::{DType, Device, Tensor};
use compress_graph::ir::Op;
use compress_graph::ir::ops::TargetSize::Number;
use compress_graph::ir::ops::*;
use compress_kernels::cache::CacheFormat;

/// An op and the shapes of its inputs; integer inputs are marked.
pub struct Case {
    pub op: Op,
    pub inputs: Vec<(Vec<usize>, bool)>,
}

fn case(op: impl Into<Op>, shapes: &[&[usize]]) -> Case {
    Case { op: op.into(), inputs: shapes.iter().map(|s| (s.to_vec(), false)).collect() }
}

fn with_ints(mut case: Case, at: &[usize]) -> Case {
    for &i in at {
        case.inputs[i].1 = true;
    }
    case
}

fn recurrent(kind: RecurrentKind, direction: Direction) -> Recurrent {
    Recurrent { kind, direction, ..Recurrent::default() }
}

fn delta(scale: f64, additive: bool) -> GatedDelta {
    GatedDelta { scale, additive }
}

fn image_rotary(sections: [usize; 3], interleaved: bool, width: Option<usize>) -> ImageRotary {
    ImageRotary { rotary: Rotary { theta: 10.0, width, ..Rotary::default() }, sections, interleaved, token: 1, grid: [1, 2] }
}

/// Image resizing in both directions.
fn scales(places: &[f64]) -> Vec<Extent> {
    [1.0, 1.0].iter().chain(places).map(|scale| Extent::Scale(*scale)).collect()
}

/// All ops in all variants.
pub fn cases() -> Vec<Case> {
    let conv = |groups, stride: usize, padding: usize| Conv { groups, stride: stride.into(), padding: padding.into(), dilation: 1.into() };
    vec![
        case(Linear { input_major: false }, &[&[2, 3, 6], &[4, 6], &[4]]),
        case(Linear { input_major: true }, &[&[2, 6], &[6, 4]]),
        case(conv(1, 1, 1), &[&[2, 4, 5, 6], &[6, 4, 3, 3], &[6]]),
        case(conv(2, 2, 0), &[&[2, 4, 7, 6], &[6, 2, 3, 3], &[6]]),
        case(conv(4, 1, 1), &[&[2, 4, 5, 5], &[4, 1, 3, 3]]),
        case(conv(4, 2, 1), &[&[2, 4, 5, 5], &[8, 1, 3, 3], &[8]]),
        // Size one on the axis with the larger stride.
        case(Conv { stride: PerAxis([2, 5]), ..Conv::default() }, &[&[2, 3, 9, 7], &[4, 3, 3, 3], &[4]]),
        case(Conv { stride: PerAxis([1, 30]), dilation: PerAxis([2, 1]), ..Conv::default() }, &[&[2, 3, 9, 7], &[4, 3, 3, 3]]),
        case(Conv { stride: PerAxis([2, 1]), padding: Padding([1, 0, 0, 2]), ..Conv::default() }, &[&[2, 4, 5, 6], &[6, 4, 3, 2], &[6]]),
        case(Conv { dilation: PerAxis([1, 2]), groups: 2, ..Conv::default() }, &[&[2, 4, 5, 6], &[6, 2, 3, 2]]),
        case(Conv { stride: PerAxis([1, 2]), padding: 1.into(), groups: 4, ..Conv::default() }, &[&[2, 4, 5, 5], &[4, 1, 3, 3], &[4]]),
        case(Conv { stride: 2.into(), padding: 1.into(), ..Conv::default() }, &[&[2, 4, 7], &[6, 4, 3], &[6]]),
        case(Conv { padding: Padding([0, 2, 0, 0]), dilation: 2.into(), groups: 2, ..Conv::default() }, &[&[2, 4, 7], &[6, 2, 2]]),
        case(CausalConv {}, &[&[2, 6, 5], &[5, 1, 3]]),
        case(CausalConv {}, &[&[2, 3, 4], &[4, 1, 1], &[4]]),
        with_ints(case(CausalConv {}, &[&[2, 3, 4], &[4, 1, 5], &[2, 3]]), &[2]),
        with_ints(case(CausalConv {}, &[&[2, 7, 4], &[4, 1, 4], &[2, 7], &[4]]), &[2]),
        case(BatchNorm::default(), &[&[2, 4, 3, 3], &[4], &[4], &[4], &[4]]),
        case(BatchNorm { batch: true, ..BatchNorm::default() }, &[&[2, 4, 3, 3], &[4], &[4], &[4], &[4]]),
        case(LayerNorm::default(), &[&[2, 3, 6], &[6], &[6]]),
        case(LayerNorm::default(), &[&[2, 3, 6], &[6]]),
        case(RmsNorm::default(), &[&[2, 3, 6], &[6]]),
        case(RmsNorm { offset: 1.0, ..RmsNorm::default() }, &[&[2, 3, 6], &[6]]),
        case(Relu {}, &[&[2, 5]]),
        case(Gelu { tanh: false }, &[&[2, 5]]),
        case(Gelu { tanh: true }, &[&[2, 5]]),
        case(Silu {}, &[&[2, 5]]),
        case(Sigmoid {}, &[&[2, 5]]),
        case(Tanh {}, &[&[2, 5]]),
        case(Clip { min: -0.5, max: 0.5 }, &[&[2, 5]]),
        case(Clip { min: f64::NEG_INFINITY, max: 0.5 }, &[&[2, 5]]),
        case(Clip { min: 0.25, max: f64::INFINITY }, &[&[2, 5]]),
        case(FakeQuantize { scale: 0.01, zero_point: -60 }, &[&[2, 5]]),
        case(LearnedFakeQuantize { scale: 0.01, zero_point: -60 }, &[&[2, 5], &[1]]),
        case(CacheQuantize { format: CacheFormat::Int8 }, &[&[2, 2, 3, 5], &[1]]),
        case(Softmax::default(), &[&[2, 3, 5]]),
        case(Softmax { axis: 1 }, &[&[2, 3, 5]]),
        case(Add {}, &[&[2, 3, 5], &[2, 3, 5]]),
        case(Mul {}, &[&[2, 3, 5], &[2, 3, 5]]),
        with_ints(case(Embedding {}, &[&[2, 3], &[9, 5]]), &[0]),
        with_ints(case(Positions::default(), &[&[2, 3]]), &[0]),
        with_ints(case(Positions { padding: Some(1), offset: 0 }, &[&[2, 3]]), &[0]),
        with_ints(case(Positions { padding: Some(0), offset: 1 }, &[&[2, 3]]), &[0]),
        with_ints(case(Positions { padding: None, offset: 2 }, &[&[2, 3]]), &[0]),
        case(Rotary::default(), &[&[2, 3, 4, 6]]),
        case(PositionScale { interval: 2, factor: 0.7, offset: 1 }, &[&[2, 3, 5, 4]]),
        case(PositionScale { interval: 3, factor: 0.4, offset: 0 }, &[&[2, 3, 5, 4]]),
        case(Rotary { width: Some(4), ..Rotary::default() }, &[&[2, 3, 4, 7]]),
        case(GridRotary { theta: 100.0, grid: [4, 6], block: 2 }, &[&[2, 3, 24, 8]]),
        case(GridRotary { grid: [2, 1], ..GridRotary::default() }, &[&[1, 2, 2, 4]]),
        with_ints(case(image_rotary([1, 2, 0], false, None), &[&[2, 2, 9, 6], &[2, 9]]), &[1]),
        with_ints(case(image_rotary([1, 1, 1], true, Some(6)), &[&[2, 1, 7, 8], &[2, 7]]), &[1]),
        with_ints(case(InsertImages { token: 1, add: false }, &[&[1, 6, 3], &[1, 6], &[1, 5, 3]]), &[1]),
        with_ints(case(InsertImages { token: 0, add: true }, &[&[1, 6, 3], &[1, 6], &[1, 1, 3]]), &[1]),
        case(SplitHeads { head_dim: 3 }, &[&[2, 4, 6]]),
        case(MergeHeads {}, &[&[2, 2, 4, 3]]),
        case(Attention { scale: 0.5, ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 2, 5, 3], &[2, 2, 5, 6]]),
        with_ints(
            case(Attention { scale: 0.5, causal: true, window: Some(2), ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 5]]),
            &[3],
        ),
        case(Attention { scale: 2.0, causal: true, soft_cap: Some(0.8), ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 2, 5, 3], &[2, 2, 5, 3]]),
        with_ints(
            case(Attention { scale: 0.5, causal: false, window: Some(2), ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 2, 5, 3], &[2, 2, 5, 3], &[2, 5]]),
            &[3],
        ),
        case(Attention { scale: 0.5, ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 2, 5, 3], &[2, 2, 5, 6], &[4, 5, 5]]),
        case(Attention { scale: 0.5, causal: true, ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 2, 5, 3], &[2, 2, 5, 6], &[1, 5, 5]]),
        case(Attention { scale: 0.5, ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 2, 6, 3], &[2, 2, 6, 5], &[2, 1, 1, 6]]),
        case(Attention { zero_where_hidden: true, ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 4, 6, 3], &[2, 4, 6, 5], &[1, 4, 5, 6]]),
        case(Attention { scale: 0.5, causal: true, ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 2, 5, 3], &[2, 2, 5, 6], &[4]]),
        with_ints(case(Attention { window: Some(3), ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 5], &[4, 5, 5], &[4]]), &[3]),
        with_ints(case(Attention { window: Some(3), ..Attention::default() }, &[&[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 5], &[4, 5, 5]]), &[3]),
        case(Decay::default(), &[&[2, 5, 3], &[3], &[3]]),
        case(Decay { min: 0.5, max: Some(0.9) }, &[&[2, 5, 3], &[3], &[3]]),
        case(Decay { min: 0.6, max: None }, &[&[2, 5, 3], &[3], &[3]]),
        case(delta(0.5, false), &[&[2, 2, 4, 3], &[2, 2, 4, 3], &[2, 2, 4, 4], &[2, 4, 2], &[2, 4, 2]]),
        with_ints(case(delta(0.3, false), &[&[2, 1, 5, 3], &[2, 1, 5, 3], &[2, 2, 5, 4], &[2, 5, 2], &[2, 5, 2], &[2, 5]]), &[5]),
        case(delta(1.0, true), &[&[2, 1, 4, 3], &[2, 1, 4, 3], &[2, 3, 4, 2], &[2, 4, 3], &[2, 4, 3]]),
        with_ints(case(delta(0.2, true), &[&[2, 2, 5, 3], &[2, 2, 5, 3], &[2, 4, 5, 3], &[2, 5, 4], &[2, 5, 4], &[2, 5]]), &[5]),
        case(delta(0.1, false), &[&[2, 2, 5, 2], &[2, 2, 5, 2], &[2, 6, 5, 3], &[2, 5, 6], &[2, 5, 6]]),
        case(MaxPool { kernel: 3.into(), padding: 1.into(), ..MaxPool::default() }, &[&[2, 4, 7, 8]]),
        case(MaxPool { kernel: PerAxis([2, 3]), stride: PerAxis([2, 1]), padding: Padding([0, 1, 1, 0]), ceil: true, ..MaxPool::default() }, &[&[2, 3, 6, 5]]),
        case(MaxPool { dilation: 2.into(), ..MaxPool::default() }, &[&[2, 3, 6, 5]]),
        case(MaxPool { padding: Padding([0, 1, 0, 1]), kernel: 3.into(), ceil: true, ..MaxPool::default() }, &[&[2, 3, 8]]),
        case(AveragePool::default(), &[&[2, 4, 6, 7]]),
        case(AveragePool { kernel: PerAxis([3, 2]), padding: Padding([1, 0, 0, 1]), ceil: true, ..AveragePool::default() }, &[&[2, 3, 6, 6]]),
        case(AveragePool { kernel: 3.into(), padding: 1.into(), count_padding: true, ..AveragePool::default() }, &[&[2, 3, 7]]),
        case(MaxPool::default(), &[&[2, 4, 6, 6]]),
        case(GlobalAveragePool::default(), &[&[2, 4, 5, 3]]),
        case(GlobalAveragePool { keep_dims: true }, &[&[2, 4, 5, 3]]),
        case(GlobalAveragePool::default(), &[&[2, 4, 5]]),
        case(Flatten { channels_last: false }, &[&[2, 4, 3, 2]]),
        case(Flatten { channels_last: true }, &[&[2, 4, 3, 2]]),
        case(Patchify {}, &[&[2, 4, 3, 2]]),
        case(Prepend {}, &[&[1, 1, 4], &[2, 3, 4]]),
        case(Select { index: 1 }, &[&[2, 3, 4]]),
        case(Slice::last_axis(2, 3), &[&[2, 3, 6]]),
        case(Slice { start: 1, axis: 1, length: Some(2), ..Slice::default() }, &[&[2, 4, 3]]),
        case(Slice { start: -4, length: None, rest: 1, ..Slice::default() }, &[&[2, 3, 6]]),
        case(Slice { start: 1, step: 2, length: Some(2), axis: 0, ..Slice::default() }, &[&[5, 3]]),
        case(Slice { start: -1, step: -2, length: Some(3), ..Slice::default() }, &[&[2, 6]]),
        with_ints(case(Slice { start: 1, axis: 0, length: Some(1), ..Slice::default() }, &[&[2, 6]]), &[0]),
        with_ints(case(ToFloat {}, &[&[2, 1, 1, 3]]), &[0]),
        with_ints(case(MaskedMean {}, &[&[2, 3, 4], &[2, 3]]), &[1]),
        with_ints(case(TokenPool { choice: TokenChoice::Max }, &[&[2, 3, 4], &[2, 3]]), &[1]),
        with_ints(case(TokenPool { choice: TokenChoice::RootMean }, &[&[2, 3, 4], &[2, 3]]), &[1]),
        with_ints(case(TokenPool { choice: TokenChoice::WeightedMean }, &[&[2, 3, 4], &[2, 3]]), &[1]),
        with_ints(case(TokenPool { choice: TokenChoice::Last }, &[&[2, 3, 4], &[2, 3]]), &[1]),
        with_ints(case(TokenPool { choice: TokenChoice::Largest }, &[&[2, 3, 4], &[2, 3]]), &[1]),
        with_ints(case(TokenPool { choice: TokenChoice::Named(1) }, &[&[2, 3, 4], &[2, 3]]), &[1]),
        with_ints(case(RelativeBias { buckets: 8, max_distance: 6, both_ways: true }, &[&[2, 9], &[8, 3]]), &[0]),
        with_ints(case(RelativeBias { buckets: 4, max_distance: 5, both_ways: false }, &[&[2, 7], &[5, 2]]), &[0]),
        case(RelativeProducts { scale: 0.5, span: 4, max_distance: Some(6), of_keys: false }, &[&[2, 2, 9, 3], &[8, 6]]),
        case(RelativeProducts { scale: 1.0, span: 3, max_distance: None, of_keys: true }, &[&[2, 3, 7, 2], &[7, 6]]),
        case(RelativeProducts { span: 2, ..RelativeProducts::default() }, &[&[3, 1, 1, 4], &[4, 4]]),
        with_ints(case(ChunkBias { size: 3 }, &[&[2, 7]]), &[0]),
        case(WindowBias { window: 3, windows: [2, 3], shift: 1 }, &[&[25, 4]]),
        case(WindowBias { window: 2, windows: [1, 2], shift: 0 }, &[&[9, 2]]),
        case(Normalize::default(), &[&[2, 3, 4]]),
        case(Normalize { epsilon: 0.3 }, &[&[2, 3, 4]]),
        case(Reshape { shape: vec![TargetSize::Copy(0), Number(3), Number(2), TargetSize::Rest] }, &[&[2, 6, 4]]),
        case(Reshape { shape: vec![TargetSize::Copy(0), Number(24)] }, &[&[2, 3, 2, 4]]),
        case(Reshape { shape: vec![TargetSize::Copy(1), TargetSize::Rest] }, &[&[2, 3, 4]]),
        case(Reshape { shape: vec![Number(1), TargetSize::Copy(0), Number(1), TargetSize::Copy(1)] }, &[&[4, 3]]),
        with_ints(case(Reshape::default(), &[&[2, 3]]), &[0]),
        case(Transpose::default(), &[&[2, 3, 4]]),
        case(Transpose { perm: vec![0, 2, 3, 1] }, &[&[2, 3, 4, 5]]),
        case(Concat::default(), &[&[2, 3], &[2, 1], &[2, 4]]),
        case(Concat { axis: 1 }, &[&[2, 3, 2, 2], &[2, 2, 2, 2]]),
        case(Route { top: 2, normalised: true, ..Route::default() }, &[&[2, 3, 5]]),
        case(Route { top: 3, scale: 1.7, ..Route::default() }, &[&[4, 5]]),
        case(Route { top: 2, normalised: true, scale: 0.6, groups: Some(ExpertGroups { count: 3, top: 2, pairs: false }), ..Route::default() }, &[&[2, 3, 6]]),
        case(Route { top: 3, groups: Some(ExpertGroups { count: 2, top: 1, pairs: false }), ..Route::default() }, &[&[4, 4]]),
        case(Route { top: 2, normalised: true, scale: 0.6, sigmoid: true, ..Route::default() }, &[&[2, 3, 5]]),
        case(Route { top: 3, sigmoid: true, groups: Some(ExpertGroups { count: 3, top: 2, pairs: true }), ..Route::default() }, &[&[2, 3, 9], &[9]]),
        case(Route { top: 2, normalised: true, ..Route::default() }, &[&[2, 3, 5], &[5]]),
        case(Dispatch { expert: 1, ..Dispatch::default() }, &[&[2, 3, 4], &[2, 3, 5]]),
        case(Dispatch { expert: 1, weighted: true }, &[&[2, 3, 4], &[2, 3, 5]]),
        case(Combine::default(), &[&[2, 3, 3], &[2, 3, 4], &[2, 3, 4], &[2, 3, 4]]),
        case(Combine { plain: true }, &[&[2, 3, 3], &[2, 3, 4], &[2, 3, 4], &[2, 3, 4]]),
        case(MatMul {}, &[&[2, 3, 4, 5], &[2, 3, 5, 6]]),
        case(MatMul {}, &[&[4, 5], &[2, 3, 5, 6]]),
        case(MatMul {}, &[&[5], &[2, 5, 6]]),
        case(MatMul {}, &[&[2, 4, 5], &[5]]),
        case(MatMul {}, &[&[5], &[5]]),
        case(Binary { kind: BinaryKind::Sub }, &[&[2, 3, 5], &[3, 5]]),
        case(Binary { kind: BinaryKind::Div }, &[&[2, 3, 5], &[5]]),
        case(Binary { kind: BinaryKind::Pow }, &[&[2, 3, 5], &[2, 3, 5]]),
        case(Binary { kind: BinaryKind::Max }, &[&[2, 3, 5], &[2, 1, 5]]),
        case(Binary { kind: BinaryKind::Min }, &[&[3, 5], &[2, 3, 5]]),
        case(Reduce::default(), &[&[2, 3, 5]]),
        case(Reduce { kind: ReduceKind::Mean, axes: vec![2, 3], keep_dims: true }, &[&[2, 3, 4, 5]]),
        case(Reduce { kind: ReduceKind::Sum, axes: vec![1], keep_dims: false }, &[&[2, 3, 5]]),
        case(Reduce { kind: ReduceKind::Sum, axes: vec![], keep_dims: false }, &[&[2, 3, 5]]),
        case(Reduce { kind: ReduceKind::Max, axes: vec![0, -1], keep_dims: false }, &[&[2, 3, 5]]),
        case(Reduce { kind: ReduceKind::Min, axes: vec![1], keep_dims: true }, &[&[2, 3, 5]]),
        case(Reduce { kind: ReduceKind::L1, axes: vec![-2], keep_dims: true }, &[&[2, 3, 5]]),
        case(Reduce { kind: ReduceKind::L2, axes: vec![1], keep_dims: false }, &[&[2, 3, 5]]),
        case(Reduce { kind: ReduceKind::SumOfSquares, axes: vec![0], keep_dims: true }, &[&[2, 3, 5]]),
        case(CumSum::default(), &[&[2, 3, 5]]),
        case(CumSum { axis: 1, exclusive: true, reverse: false }, &[&[2, 5, 3]]),
        case(CumSum { axis: 0, exclusive: false, reverse: true }, &[&[4, 3]]),
        case(CumSum { exclusive: true, reverse: true, ..CumSum::default() }, &[&[2, 1]]),
        with_ints(case(CumSum { axis: 1, ..CumSum::default() }, &[&[2, 7]]), &[0]),
        case(ConvTranspose::default(), &[&[2, 3, 4, 5], &[3, 2, 3, 3], &[2]]),
        case(ConvTranspose { stride: PerAxis([2, 5]), output_padding: PerAxis([0, 4]), ..ConvTranspose::default() }, &[&[2, 3, 4, 1], &[3, 2, 3, 3]]),
        case(ConvTranspose { stride: PerAxis([3, 2]), output_padding: 1.into(), ..ConvTranspose::default() }, &[&[2, 3, 3, 4], &[3, 2, 3, 3]]),
        case(ConvTranspose { stride: 2.into(), padding: Padding([0, 1, 1, 0]), groups: 2, ..ConvTranspose::default() }, &[&[2, 4, 3, 4], &[4, 3, 2, 3], &[6]]),
        case(ConvTranspose { dilation: PerAxis([1, 2]), stride: 2.into(), ..ConvTranspose::default() }, &[&[1, 2, 3, 3], &[2, 2, 2, 2]]),
        case(ConvTranspose { stride: 2.into(), padding: 1.into(), ..ConvTranspose::default() }, &[&[2, 3, 5], &[3, 2, 4], &[2]]),
        case(Pad { pads: vec![0, 1, 0, 2, 0, 0], value: 0.5, ..Pad::default() }, &[&[2, 3, 4]]),
        case(Pad { pads: vec![0, 0, -1, 0, 2, -1], ..Pad::default() }, &[&[2, 3, 4]]),
        case(Pad { pads: vec![0, 2, 2, 0, 1, -1], mode: PadMode::Reflect, value: 0.0 }, &[&[2, 3, 4]]),
        case(Pad { pads: vec![0, 2, 0, 1], mode: PadMode::Edge, value: 0.0 }, &[&[2, 3]]),
        case(Pad { pads: vec![0, 2, 0, 1], mode: PadMode::Wrap, value: 0.0 }, &[&[2, 3]]),
        case(Resize { sizes: scales(&[2.0, 3.0]), ..Resize::default() }, &[&[2, 3, 3, 2]]),
        case(Resize { sizes: scales(&[0.6, 0.5]), coordinates: Coordinates::Asymmetric, nearest: NearestMode::Floor, ..Resize::default() }, &[&[2, 3, 5, 4]]),
        case(Resize { sizes: scales(&[2.0, 1.5]), mode: Interpolation::Linear, ..Resize::default() }, &[&[2, 3, 3, 4]]),
        case(Resize { sizes: scales(&[2.5, 1.0]), mode: Interpolation::Linear, ..Resize::default() }, &[&[2, 3, 3, 4]]),
        case(Resize { sizes: scales(&[1.0, 1.7]), nearest: NearestMode::Ceil, ..Resize::default() }, &[&[2, 3, 3, 4]]),
        case(
            Resize {
                sizes: vec![Extent::Scale(1.0), Extent::Scale(1.0), Extent::Size(5), Extent::Size(2)],
                mode: Interpolation::Linear,
                coordinates: Coordinates::AlignCorners,
                nearest: NearestMode::default(),
            },
            &[&[2, 3, 3, 4]],
        ),
        case(
            Resize {
                sizes: vec![Extent::Size(2), Extent::Size(3), Extent::Size(1), Extent::Size(7)],
                mode: Interpolation::Linear,
                coordinates: Coordinates::PytorchHalfPixel,
                nearest: NearestMode::default(),
            },
            &[&[2, 3, 3, 4]],
        ),
        case(DeformableAttention { levels: vec![[3, 4], [2, 1]], points: 3, scale: 0.5 }, &[&[2, 14, 6], &[2, 5, 24], &[2, 5, 12], &[2, 5, 4]]),
        case(DeformableAttention { scale: 3.0, levels: vec![[5, 2]], points: 1 }, &[&[1, 10, 6], &[1, 4, 6], &[1, 4, 3], &[1, 4, 4]]),
        case(GridPositions { rows: 2, columns: 3, temperature: 50.0 }, &[&[2, 6, 8]]),
        case(Anchors { levels: vec![[2, 3], [1, 1]], ..Anchors::default() }, &[&[2, 7, 4]]),
        // The centers of the first and the last column are invalid.
        case(Anchors { levels: vec![[1, 64], [1, 1]], apply: AnchorUse::Mask, ..Anchors::default() }, &[&[2, 65, 2]]),
        case(TopK { count: 3 }, &[&[2, 7]]),
        with_ints(case(GatherTokens {}, &[&[2, 5, 3], &[2, 4]]), &[1]),
        case(Detach {}, &[&[2, 5]]),
        case(recurrent(RecurrentKind::Lstm, Direction::Forward), &[&[4, 2, 3], &[1, 20, 3], &[1, 20, 5]]),
        case(recurrent(RecurrentKind::Lstm, Direction::Both), &[&[3, 2, 4], &[2, 12, 4], &[2, 12, 3], &[2, 24], &[2, 2, 3], &[2, 2, 3]]),
        case(
            Recurrent { result: RecurrentResult::Last, ..recurrent(RecurrentKind::Lstm, Direction::Reverse) },
            &[&[3, 2, 4], &[1, 12, 4], &[1, 12, 3], &[1, 24]],
        ),
        case(Recurrent { result: RecurrentResult::Cell, ..recurrent(RecurrentKind::Lstm, Direction::Both) }, &[&[3, 2, 4], &[2, 12, 4], &[2, 12, 3]]),
        case(recurrent(RecurrentKind::Gru, Direction::Both), &[&[4, 2, 3], &[2, 15, 3], &[2, 15, 5], &[2, 30], &[2, 2, 5]]),
        case(Recurrent { reset_after: true, ..recurrent(RecurrentKind::Gru, Direction::Forward) }, &[&[3, 2, 4], &[1, 9, 4], &[1, 9, 3], &[1, 18]]),
        case(Recurrent { result: RecurrentResult::Last, ..recurrent(RecurrentKind::Gru, Direction::Reverse) }, &[&[3, 2, 4], &[1, 9, 4], &[1, 9, 3]]),
        case(HardSigmoid { alpha: 0.7, beta: 0.4 }, &[&[2, 5]]),
        case(HardSwish {}, &[&[2, 5]]),
        case(LeakyRelu { alpha: 0.1 }, &[&[2, 5]]),
        case(Elu { alpha: 1.5 }, &[&[2, 5]]),
        case(Softplus {}, &[&[2, 5]]),
        case(Mish {}, &[&[2, 5]]),
        case(Power { exponent: 2.0 }, &[&[2, 5]]),
        case(Power { exponent: 3.0 }, &[&[2, 5]]),
        case(Sqrt {}, &[&[2, 5]]),
        case(Exp {}, &[&[2, 5]]),
        case(Log {}, &[&[2, 5]]),
        case(Erf {}, &[&[2, 5]]),
        case(Sin {}, &[&[2, 5]]),
        case(Cos {}, &[&[2, 5]]),
        case(Neg {}, &[&[2, 5]]),
        case(Scale { factor: -2.5 }, &[&[2, 5]]),
        case(Abs {}, &[&[2, 5]]),
        case(Reciprocal {}, &[&[2, 5]]),
        case(CacheQuantize { format: CacheFormat::Int8 }, &[&[2, 2, 3, 5], &[2, 1, 1]]),
    ]
}

/// Sizes for which kernels use other code paths: many threads, several blocks, broadcast axes, strides
/// that leave a remainder.
pub fn larger_cases() -> Vec<Case> {
    let conv = |groups, stride: usize, padding: usize| Conv { groups, stride: stride.into(), padding: padding.into(), dilation: 1.into() };
    let attention = |causal, window| Attention { scale: 0.3, causal, window, ..Attention::default() };
    vec![
        case(Linear { input_major: false }, &[&[9, 130, 70], &[50, 70], &[50]]),
        case(Linear { input_major: true }, &[&[1200, 40], &[40, 64], &[64]]),
        case(Linear { input_major: false }, &[&[3, 300, 260], &[260, 260], &[260]]),
        case(conv(1, 1, 1), &[&[16, 16, 14, 14], &[20, 16, 3, 3], &[20]]),
        case(conv(1, 2, 1), &[&[4, 5, 14, 15], &[8, 5, 3, 3], &[8]]),
        case(conv(1, 2, 1), &[&[4, 5, 15, 15], &[8, 5, 3, 3]]),
        case(conv(1, 2, 0), &[&[4, 40, 9, 9], &[16, 40, 1, 1]]),
        case(conv(1, 1, 0), &[&[4, 16, 9, 9], &[40, 16, 1, 1], &[40]]),
        case(conv(6, 2, 1), &[&[4, 6, 16, 33], &[6, 1, 3, 3], &[6]]),
        case(conv(6, 1, 1), &[&[4, 6, 33, 17], &[6, 1, 3, 3], &[6]]),
        case(conv(2, 2, 1), &[&[3, 8, 13, 13], &[12, 4, 3, 3], &[12]]),
        case(conv(1, 4, 0), &[&[2, 3, 16, 16], &[24, 3, 4, 4], &[24]]),
        case(Conv { groups: 2, padding: 2.into(), dilation: 2.into(), ..Conv::default() }, &[&[2, 8, 13, 13], &[4, 4, 3, 3]]),
        with_ints(case(CausalConv {}, &[&[2, 150, 130], &[130, 1, 4], &[2, 150], &[130]]), &[2]),
        case(BatchNorm::default(), &[&[32, 9, 14, 14], &[9], &[9], &[9], &[9]]),
        case(BatchNorm { batch: true, ..BatchNorm::default() }, &[&[32, 9, 14, 14], &[9], &[9], &[9], &[9]]),
        case(BatchNorm { batch: true, ..BatchNorm::default() }, &[&[32, 9], &[9], &[9], &[9], &[9]]),
        case(LayerNorm::default(), &[&[2, 300, 190], &[190], &[190]]),
        case(RmsNorm::default(), &[&[2, 300, 190], &[190]]),
        case(RmsNorm { offset: 1.0, ..RmsNorm::default() }, &[&[2, 300, 190], &[190]]),
        case(Gelu { tanh: false }, &[&[3, 200, 190]]),
        case(Relu {}, &[&[3, 200, 190]]),
        case(LearnedFakeQuantize { scale: 0.01, zero_point: -60 }, &[&[3, 200, 190], &[1]]),
        case(Softmax::default(), &[&[3, 200, 77]]),
        case(Add {}, &[&[7, 60, 90], &[90]]),
        case(Add {}, &[&[1, 60, 90], &[7, 60, 90]]),
        case(Add {}, &[&[2, 3, 4], &[2, 1, 4]]),
        case(Mul {}, &[&[7, 60, 90], &[60, 1]]),
        case(Mul {}, &[&[90], &[7, 60, 90]]),
        with_ints(case(Embedding {}, &[&[30, 40], &[50, 36]]), &[0]),
        case(attention(false, None), &[&[2, 4, 110, 32], &[2, 2, 110, 32], &[2, 2, 110, 40]]),
        case(attention(true, None), &[&[1, 4, 110, 32], &[1, 4, 110, 32], &[1, 4, 110, 32]]),
        case(Attention { soft_cap: Some(0.5), ..attention(true, Some(60)) }, &[&[1, 4, 110, 32], &[1, 2, 110, 32], &[1, 2, 110, 32]]),
        case(delta(0.2, false), &[&[2, 2, 17, 2], &[2, 2, 17, 2], &[2, 4, 17, 24], &[2, 17, 4], &[2, 17, 4]]),
        with_ints(case(delta(0.2, true), &[&[2, 2, 17, 2], &[2, 2, 17, 2], &[2, 4, 17, 24], &[2, 17, 4], &[2, 17, 4], &[2, 17]]), &[5]),
        case(Rotary { width: Some(20), ..Rotary::default() }, &[&[2, 5, 70, 32]]),
        case(GridRotary { grid: [8, 10], block: 2, ..GridRotary::default() }, &[&[2, 5, 80, 32]]),
        with_ints(case(attention(false, Some(40)), &[&[2, 4, 110, 20], &[2, 2, 110, 20], &[2, 2, 110, 20], &[2, 110]]), &[3]),
        with_ints(case(attention(false, None), &[&[2, 4, 110, 20], &[2, 2, 110, 20], &[2, 2, 110, 20], &[2, 110], &[4, 110, 110]]), &[3]),
        with_ints(case(attention(true, Some(7)), &[&[2, 4, 110, 20], &[2, 1, 110, 20], &[2, 1, 110, 20], &[2, 110]]), &[3]),
        case(MaxPool { kernel: 3.into(), padding: 1.into(), ..MaxPool::default() }, &[&[4, 6, 15, 16]]),
        case(Conv { stride: PerAxis([2, 1]), padding: 1.into(), ..Conv::default() }, &[&[3, 8, 13, 11], &[12, 8, 3, 3], &[12]]),
        case(Conv { padding: Padding([0, 0, 1, 2]), stride: 2.into(), groups: 6, ..Conv::default() }, &[&[2, 6, 16, 15], &[6, 1, 3, 3]]),
        case(MatMul {}, &[&[4, 2, 60, 33], &[4, 2, 33, 50]]),
        case(HardSwish {}, &[&[3, 200, 190]]),
        case(Dispatch { expert: 0, ..Dispatch::default() }, &[&[3, 50, 40], &[3, 50, 2]]),
        case(Combine::default(), &[&[3, 50, 2], &[3, 50, 40], &[3, 50, 40]]),
        case(GlobalAveragePool { keep_dims: true }, &[&[16, 20, 7, 7]]),
        case(GlobalAveragePool::default(), &[&[16, 20, 7, 7]]),
    ]
}

/// Deterministic values: between 0.1 and 1.1 for floats, zeros and ones for integers.
pub fn tensors(case: &Case) -> Vec<Tensor> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut make = |(shape, whole): &(Vec<usize>, bool)| {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| if *whole { f32::from(next() > 0.3) } else { next() + 0.1 }).collect();
        let tensor = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap();
        if *whole { tensor.to_dtype(DType::I64).unwrap() } else { tensor }
    };
    case.inputs.iter().map(&mut make).collect()
}
