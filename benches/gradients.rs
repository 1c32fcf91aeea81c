//! Forward and backward passes of ops, at the sizes of a small transformer and a small image model.
//!
//! `cargo bench --bench gradients -- Linear` runs the benchmarks whose names contain `Linear`.
#![allow(clippy::unwrap_used)]
#![allow(missing_docs)]

use std::hint::black_box;

use candle_core::{DType, Device, Tensor};
use compress_graph::ir::Op;
use compress_graph::ir::ops::*;
use criterion::{Criterion, criterion_group, criterion_main};

/// Numbers between -1 and 1.
fn numbers(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Images in channels-first layout.
fn images(shape: [usize; 4]) -> Tensor {
    numbers(&[shape[1], shape[0], shape[2], shape[3]]).transpose(0, 1).unwrap()
}

fn bench(criterion: &mut Criterion, name: &str, op: impl Into<Op>, inputs: &[Tensor]) {
    let op: Op = op.into();
    let prepared = PreparedOp::new(&op, &Device::Cpu, DType::F32);
    let output = prepared.forward(inputs).unwrap();
    let gradient = if output.rank() == 4 && !output.is_contiguous() { images(output.dims4().unwrap().into()) } else { numbers(output.dims()) };
    let saved: Vec<Saved> = inputs.iter().cloned().map(Saved::full).collect();
    let wanted = vec![true; inputs.len()];
    let output = Saved::full(output);
    criterion.bench_function(&format!("{name} forward"), |b| b.iter(|| prepared.forward(black_box(inputs)).unwrap()));
    criterion.bench_function(&format!("{name} backward"), |b| {
        b.iter(|| prepared.backward(&Backward { inputs: black_box(&saved), output: &output, gradient: &gradient, needs_gradient: &wanted }).unwrap());
    });
}

fn transformer(criterion: &mut Criterion) {
    bench(criterion, "Linear 2048x384x1536", Linear::default(), &[numbers(&[2048, 384]), numbers(&[1536, 384]), numbers(&[1536])]);
    bench(criterion, "Linear 2048x1536x384", Linear::default(), &[numbers(&[2048, 1536]), numbers(&[384, 1536]), numbers(&[384])]);
    let hidden = numbers(&[32, 64, 384]);
    bench(criterion, "LayerNorm 32x64x384", LayerNorm::default(), &[hidden.clone(), numbers(&[384]), numbers(&[384])]);
    bench(criterion, "RmsNorm 32x64x384", RmsNorm::default(), &[hidden.clone(), numbers(&[384])]);
    bench(criterion, "Gelu 32x64x1536", Gelu::default(), &[numbers(&[32, 64, 1536])]);
    bench(criterion, "Softmax 32x64x384", Softmax::default(), std::slice::from_ref(&hidden));
    bench(criterion, "Add 32x64x384", Add {}, &[hidden.clone(), numbers(&[1, 64, 384])]);
    let heads = numbers(&[32, 64, 12, 32]).transpose(1, 2).unwrap();
    let attention = Attention { scale: 32f64.powf(-0.5), ..Attention::default() };
    bench(criterion, "Attention 32x64x384", attention, &[heads.clone(), heads.clone(), heads.clone()]);
    bench(criterion, "Attention 32x64x384 causal", Attention { causal: true, ..attention }, &[heads.clone(), heads.clone(), heads]);
    let tokens = Tensor::from_vec((0..2048i64).map(|i| i * 7919 % 30_522).collect::<Vec<_>>(), (32, 64), &Device::Cpu).unwrap();
    bench(criterion, "Embedding 30522x384", Embedding {}, &[tokens, numbers(&[30_522, 384])]);
}

fn image_model(criterion: &mut Criterion) {
    for (channels, size) in [(16, 28), (32, 14), (64, 7)] {
        let conv = |stride: usize, groups, padding: usize| Conv { stride: stride.into(), groups, padding: padding.into(), ..Conv::default() };
        let x = images([128, channels, size, size]);
        let name = |what: &str| format!("{what} 128x{channels}x{size}x{size}");
        bench(criterion, &name("Conv 3x3"), conv(1, 1, 1), &[x.clone(), numbers(&[channels, channels, 3, 3])]);
        bench(criterion, &name("Conv 3x3 stride 2"), conv(2, 1, 1), &[x.clone(), numbers(&[2 * channels, channels, 3, 3])]);
        bench(criterion, &name("Conv 1x1"), conv(1, 1, 0), &[x.clone(), numbers(&[channels, channels, 1, 1])]);
        bench(criterion, &name("Conv depthwise"), conv(1, channels, 1), &[x.clone(), numbers(&[channels, 1, 3, 3])]);
        let vector = numbers(&[channels]);
        let norm = [x.clone(), vector.clone(), vector.clone(), vector.clone(), vector.sqr().unwrap()];
        bench(criterion, &name("BatchNorm of the batch"), BatchNorm { batch: true, ..BatchNorm::default() }, &norm);
        bench(criterion, &name("BatchNorm"), BatchNorm::default(), &norm);
        bench(criterion, &name("Relu"), Relu {}, std::slice::from_ref(&x));
        bench(criterion, &name("MaxPool"), MaxPool::default(), &[x]);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(1)).warm_up_time(std::time::Duration::from_millis(300));
    targets = transformer, image_model
}
criterion_main!(benches);
