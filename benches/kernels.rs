//! Throughput of every kernel on blocks of 1 MiB, for bfloat16 and float32.
//!
//! `cargo bench --bench kernels -- quantize` runs the benchmarks whose names contain `quantize`.

#![allow(missing_docs)]

use std::hint::black_box;

use compress_kernels::compare::{self, Difference};
use compress_kernels::histogram::{MagnitudeHistogram, Window};
use compress_kernels::{Bf16, F32, Float, bitmask, convert, mask, quantize, scan};
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime};
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use rand_distr::{Distribution, StandardNormal};

const BYTES: usize = 1 << 20;
/// Number of elements that are compared or converted at once, as in the writer.
const RUN: usize = 4096;

/// Normal values with a deviation of 0.02.
fn values<F: Float>() -> (Vec<f32>, Vec<u8>) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(0);
    let floats: Vec<f32> = (0..BYTES / F::SIZE).map(|_| 0.02 * <StandardNormal as Distribution<f32>>::sample(&StandardNormal, &mut random)).collect();
    let mut bytes = vec![0; BYTES];
    assert!(convert::from_f32(F::DTYPE, &floats, &mut bytes));
    (floats, bytes)
}

/// Median of the magnitudes.
fn median<F: Float>(bytes: &[u8]) -> F::Magnitude {
    let mut all: Vec<_> = F::split(bytes).iter().map(|e| F::magnitude(*e)).collect();
    all.sort();
    all[all.len() / 2]
}

fn kernels<F: Float>(criterion: &mut Criterion) {
    let (floats, bytes) = values::<F>();
    let threshold = median::<F>(&bytes);
    let mut group = criterion.benchmark_group(F::DTYPE.to_string().to_lowercase());
    group.throughput(Throughput::Bytes(BYTES as u64));
    pruning::<F>(&mut group, &bytes, threshold);
    quantizing::<F>(&mut group, &bytes);
    converting::<F>(&mut group, &floats, &bytes);
    group.bench_function("scan nonfinite", |b| b.iter(|| scan::nonfinite::<F>(black_box(&bytes))));
    group.bench_function("scan zeros", |b| b.iter(|| scan::zeros::<F>(black_box(&bytes))));
    let mut pruned = vec![0; BYTES];
    mask::keep_from::<F>(&bytes, &mut pruned, threshold);
    packing::<F>(&mut group, &pruned);
    group.finish();
}

fn pruning<F: Float>(group: &mut BenchmarkGroup<WallTime>, bytes: &[u8], threshold: F::Magnitude) {
    let mut output = vec![0; BYTES];
    let first = Window::leading(F::BITS);
    let mut histogram = MagnitudeHistogram::new(first);
    group.bench_function("histogram", |b| b.iter(|| histogram.add::<F>(black_box(bytes))));
    if let Some(second) = first.inside(threshold.into() >> first.shift) {
        let mut histogram = MagnitudeHistogram::new(second);
        group.bench_function("histogram, second reading", |b| b.iter(|| histogram.add::<F>(black_box(bytes))));
    }
    group.bench_function("mask", |b| b.iter(|| mask::keep_from::<F>(black_box(bytes), &mut output, threshold)));
    group.bench_function("mask with ties", |b| b.iter(|| mask::keep_from_but_first::<F>(black_box(bytes), &mut output, threshold, 1)));
    group.bench_function("mask 2:4", |b| b.iter(|| mask::keep_n_of_m::<F>(black_box(bytes), &mut output, 2, 4, 1)));
}

fn quantizing<F: Float>(group: &mut BenchmarkGroup<WallTime>, bytes: &[u8]) {
    let mut integers = vec![0; BYTES / F::SIZE];
    let scale = 0.001;
    group.bench_function("range", |b| b.iter(|| quantize::range::<F>(black_box(bytes))));
    group.bench_function("quantize", |b| b.iter(|| quantize::quantize::<F>(black_box(bytes), &mut integers, scale, 0.0, quantize::FULL)));
    group.bench_function("squared error", |b| b.iter(|| quantize::error::<F, quantize::Squares>(black_box(bytes), scale, 0.0, quantize::FULL)));
}

fn converting<F: Float>(group: &mut BenchmarkGroup<WallTime>, floats: &[f32], bytes: &[u8]) {
    let (mut run, mut output) = (vec![0f32; RUN], vec![0; BYTES]);
    group.bench_function("convert to f32", |b| {
        b.iter(|| black_box(bytes).chunks(RUN * F::SIZE).for_each(|bytes| convert::to_f32::<F>(bytes, &mut run)));
    });
    group.bench_function("convert from f32", |b| b.iter(|| convert::from_f32(F::DTYPE, black_box(floats), &mut output)));
    let mut difference = Difference::default();
    group.bench_function("compare", |b| {
        b.iter(|| black_box(floats).chunks(RUN).for_each(|run| difference.add(&compare::floats(run, run))));
    });
    group.bench_function("compare elements", |b| {
        b.iter(|| black_box(bytes).chunks(RUN * F::SIZE).for_each(|run| difference.add(&compare::elements::<F>(run, run))));
    });
}

fn packing<F: Float>(group: &mut BenchmarkGroup<WallTime>, pruned: &[u8]) {
    let (mut bits, mut kept) = (Vec::new(), Vec::new());
    bitmask::pack(pruned, F::SIZE, &mut bits, &mut kept);
    group.bench_function("bitmask count", |b| b.iter(|| bitmask::count(black_box(pruned), F::SIZE)));
    group.bench_function("bitmask pack", |b| {
        b.iter(|| {
            bits.clear();
            kept.clear();
            bitmask::pack(black_box(pruned), F::SIZE, &mut bits, &mut kept);
        });
    });
    let mut output = vec![0; BYTES];
    group.bench_function("bitmask unpack", |b| {
        b.iter(|| {
            output.fill(0);
            bitmask::unpack(black_box(&bits), &kept, F::SIZE, &mut output);
        });
    });
}

/// Dequantization of int8; it is the same for both formats.
fn integers(criterion: &mut Criterion) {
    let integers: Vec<u8> = (0..BYTES).map(|i| (i * 31 % 251) as u8).collect();
    let mut floats = vec![0f32; RUN];
    let mut group = criterion.benchmark_group("int8");
    group.throughput(Throughput::Bytes(BYTES as u64));
    group.bench_function("dequantize", |b| {
        b.iter(|| black_box(&integers).chunks(RUN).for_each(|run| quantize::dequantize(run, &mut floats, 0.001, 0.0)));
    });
    group.finish();
}

criterion_group!(benches, kernels::<Bf16>, kernels::<F32>, integers);
criterion_main!(benches);
