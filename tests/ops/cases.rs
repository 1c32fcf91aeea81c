//! Ops with inputs, for all laws.

use candle_core::{DType, Device, Tensor};
use compress::ir::Op;
use compress::ir::ops::*;
use compress::kernel::cache::CacheFormat;

/// An op and the sizes of its inputs; inputs of whole numbers are marked.
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

/// Every op, in the forms it has.
pub fn cases() -> Vec<Case> {
    let conv = |groups, stride, padding| Conv { groups, stride, padding, dilation: 1 };
    vec![
        case(Linear { input_major: false }, &[&[2, 3, 6], &[4, 6], &[4]]),
        case(Linear { input_major: true }, &[&[2, 6], &[6, 4]]),
        case(conv(1, 1, 1), &[&[2, 4, 5, 6], &[6, 4, 3, 3], &[6]]),
        case(conv(2, 2, 0), &[&[2, 4, 7, 6], &[6, 2, 3, 3], &[6]]),
        case(conv(4, 1, 1), &[&[2, 4, 5, 5], &[4, 1, 3, 3]]),
        case(conv(4, 2, 1), &[&[2, 4, 5, 5], &[8, 1, 3, 3], &[8]]),
        case(BatchNorm::default(), &[&[2, 4, 3, 3], &[4], &[4], &[4], &[4]]),
        case(BatchNorm { batch: true, ..BatchNorm::default() }, &[&[2, 4, 3, 3], &[4], &[4], &[4], &[4]]),
        case(LayerNorm::default(), &[&[2, 3, 6], &[6], &[6]]),
        case(RmsNorm::default(), &[&[2, 3, 6], &[6]]),
        case(Relu {}, &[&[2, 5]]),
        case(Gelu { tanh: false }, &[&[2, 5]]),
        case(Gelu { tanh: true }, &[&[2, 5]]),
        case(Silu {}, &[&[2, 5]]),
        case(Sigmoid {}, &[&[2, 5]]),
        case(Tanh {}, &[&[2, 5]]),
        case(Clip { min: -0.5, max: 0.5 }, &[&[2, 5]]),
        case(FakeQuantize { scale: 0.01, zero_point: -60 }, &[&[2, 5]]),
        case(LearnedFakeQuantize { scale: 0.01, zero_point: -60 }, &[&[2, 5], &[1]]),
        case(CacheQuantize { format: CacheFormat::Int8 }, &[&[2, 2, 3, 5], &[1]]),
        case(Softmax {}, &[&[2, 3, 5]]),
        case(Add {}, &[&[2, 3, 5], &[2, 3, 5]]),
        case(Mul {}, &[&[2, 3, 5], &[2, 3, 5]]),
        with_ints(case(Embedding {}, &[&[2, 3], &[9, 5]]), &[0]),
        with_ints(case(Positions { padding: None }, &[&[2, 3]]), &[0]),
        with_ints(case(Positions { padding: Some(1) }, &[&[2, 3]]), &[0]),
        case(Rotary::default(), &[&[2, 3, 4, 6]]),
        case(SplitHeads { head_dim: 3 }, &[&[2, 4, 6]]),
        case(MergeHeads {}, &[&[2, 2, 4, 3]]),
        case(Attention { scale: 0.5, causal: false, window: None }, &[&[2, 4, 5, 3], &[2, 2, 5, 3], &[2, 2, 5, 6]]),
        with_ints(case(Attention { scale: 0.5, causal: true, window: Some(2) }, &[&[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 5]]), &[3]),
        case(MaxPool { kernel: 3, stride: 2, padding: 1 }, &[&[2, 4, 7, 8]]),
        case(MaxPool::default(), &[&[2, 4, 6, 6]]),
        case(GlobalAveragePool {}, &[&[2, 4, 5, 3]]),
        case(Flatten { channels_last: false }, &[&[2, 4, 3, 2]]),
        case(Flatten { channels_last: true }, &[&[2, 4, 3, 2]]),
        case(Patchify {}, &[&[2, 4, 3, 2]]),
        case(Prepend {}, &[&[1, 1, 4], &[2, 3, 4]]),
        case(Select { index: 1 }, &[&[2, 3, 4]]),
        case(Slice { start: 2, length: 3 }, &[&[2, 3, 6]]),
        with_ints(case(MaskedMean {}, &[&[2, 3, 4], &[2, 3]]), &[1]),
        case(Normalize {}, &[&[2, 3, 4]]),
    ]
}

/// Sizes at which kernels take other ways: many threads, several blocks, spread axes, steps that leave pixels over.
pub fn larger_cases() -> Vec<Case> {
    let conv = |groups, stride, padding| Conv { groups, stride, padding, dilation: 1 };
    let attention = |causal, window| Attention { scale: 0.3, causal, window };
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
        case(Conv { groups: 2, stride: 1, padding: 2, dilation: 2 }, &[&[2, 8, 13, 13], &[4, 4, 3, 3]]),
        case(BatchNorm::default(), &[&[32, 9, 14, 14], &[9], &[9], &[9], &[9]]),
        case(BatchNorm { batch: true, ..BatchNorm::default() }, &[&[32, 9, 14, 14], &[9], &[9], &[9], &[9]]),
        case(BatchNorm { batch: true, ..BatchNorm::default() }, &[&[32, 9], &[9], &[9], &[9], &[9]]),
        case(LayerNorm::default(), &[&[2, 300, 190], &[190], &[190]]),
        case(RmsNorm::default(), &[&[2, 300, 190], &[190]]),
        case(Gelu { tanh: false }, &[&[3, 200, 190]]),
        case(Relu {}, &[&[3, 200, 190]]),
        case(LearnedFakeQuantize { scale: 0.01, zero_point: -60 }, &[&[3, 200, 190], &[1]]),
        case(Softmax {}, &[&[3, 200, 77]]),
        case(Add {}, &[&[7, 60, 90], &[90]]),
        case(Add {}, &[&[1, 60, 90], &[7, 60, 90]]),
        case(Add {}, &[&[2, 3, 4], &[2, 1, 4]]),
        case(Mul {}, &[&[7, 60, 90], &[60, 1]]),
        case(Mul {}, &[&[90], &[7, 60, 90]]),
        with_ints(case(Embedding {}, &[&[30, 40], &[50, 36]]), &[0]),
        case(attention(false, None), &[&[2, 4, 110, 32], &[2, 2, 110, 32], &[2, 2, 110, 40]]),
        case(attention(true, None), &[&[1, 4, 110, 32], &[1, 4, 110, 32], &[1, 4, 110, 32]]),
        with_ints(case(attention(true, Some(7)), &[&[2, 4, 110, 20], &[2, 1, 110, 20], &[2, 1, 110, 20], &[2, 110]]), &[3]),
        case(MaxPool { kernel: 3, stride: 2, padding: 1 }, &[&[4, 6, 15, 16]]),
        case(GlobalAveragePool {}, &[&[16, 20, 7, 7]]),
    ]
}

/// Numbers between 0.1 and 1.1, and for whole numbers zeros and ones; always the same.
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
