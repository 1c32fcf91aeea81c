//! Backward pass of convolutions and pooling. Planes have the layout of
//! [`convolution`](super::convolution).

use std::ops::Range;

use rayon::prelude::*;

use super::convolution::{Window, depthwise};
use super::epilogue::Epilogue;
use super::matmul::product_serial;
use super::matmul_gradient::{in_parts, is_large, split_inner, sum_parts};
use super::operands::{Left, Rows};
use super::scratch::Scratch;
use super::shifted::convolve;
use super::tile::{self, BLOCK, PANEL, Panel};

/// Sizes of a convolution.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Batch size.
    pub images: usize,
    /// Input channels.
    pub inputs: usize,
    /// Output channels.
    pub outputs: usize,
    /// Groups of channels.
    pub groups: usize,
    /// Input size, kernel, stride, dilation and padding.
    pub window: Window,
}

impl Sizes {
    fn is_depthwise(&self) -> bool {
        self.inputs == self.groups && self.outputs == self.groups
    }

    /// Input channels and output channels per group, and kernel elements per channel.
    fn group(&self) -> [usize; 3] {
        [self.inputs / self.groups, self.outputs / self.groups, self.window.kernel[0] * self.window.kernel[1]]
    }

    fn positions(&self) -> usize {
        self.window.positions().iter().product()
    }

    /// The convolution that computes the input gradient from the output gradient and the flipped weight.
    /// `None` unless the stride is 1 and the padding is smaller than the dilated kernel.
    fn transposed(&self) -> Option<Window> {
        let [height, width] = self.window.positions();
        let Window { kernel, stride, dilation, padding, .. } = self.window;
        let remaining = |side: usize| (dilation[side % 2] * (kernel[side % 2] - 1)).checked_sub(padding[side]);
        let padding = [remaining(0)?, remaining(1)?, remaining(2)?, remaining(3)?];
        (stride == [1, 1]).then_some(Window { height, width, padding, ..self.window })
    }
}

/// Computes the gradient of the input, channel by channel, from the contiguous gradient of the output.
pub fn input_gradient(sizes: Sizes, weight: &[f32], gradient: &[f32], output: &mut [f32]) {
    let [inner, group, taps] = sizes.group();
    let (positions, plane) = (sizes.positions(), sizes.window.height * sizes.window.width);
    let planes: Vec<&[f32]> = gradient.chunks_exact(positions.max(1)).collect();
    if sizes.is_depthwise() {
        match sizes.transposed() {
            Some(transposed) => {
                let flipped: Vec<f32> = weight.chunks_exact(taps).flat_map(|w| w.iter().rev().copied()).collect();
                output.fill(0.0);
                depthwise(&planes, sizes.images, &flipped, transposed, output);
            }
            None => output.par_chunks_mut(plane.max(1)).zip(&planes).enumerate().for_each(|(index, (out, gradient))| {
                out.fill(0.0);
                for (tap, weight) in weight[index / sizes.images * taps..][..taps].iter().enumerate() {
                    spread(gradient, *weight, tap, sizes.window, out);
                }
            }),
        }
        return;
    }
    let images = sizes.images;
    let outputs = output.chunks_exact_mut((inner * images * plane).max(1));
    for (index, output) in outputs.enumerate() {
        let weight = &weight[index * group * inner * taps..][..group * inner * taps];
        let planes = &planes[index * group * images..][..group * images];
        if let Some(transposed) = sizes.transposed() {
            let mut flipped = Scratch::new(inner * group * taps);
            for (at, flipped) in flipped.iter_mut().enumerate() {
                let (channel, out, tap) = (at / (group * taps), at / taps % group, at % taps);
                *flipped = weight[(out * inner + channel) * taps + taps - 1 - tap];
            }
            let left = Left::pack(&flipped, inner, group * taps, group * taps);
            convolve(planes, images, &left, transposed, Epilogue::NONE, output);
            continue;
        }
        let left = Left::pack_transposed(weight, inner * taps, group, inner * taps);
        let gradient = &gradient[index * group * images * positions..][..group * images * positions];
        let mut by_image: Vec<Vec<&mut [f32]>> = (0..images).map(|_| Vec::with_capacity(inner)).collect();
        for (plane, out) in output.chunks_exact_mut(plane.max(1)).enumerate() {
            by_image[plane % images].push(out);
        }
        by_image.into_par_iter().enumerate().for_each(|(image, planes)| {
            let mut columns = Scratch::new(inner * taps * positions);
            let right = Rows { values: &gradient[image * positions..], count: positions, stride: images * positions };
            product_serial(&left, &right, positions, Epilogue::NONE, &mut columns, positions);
            for (out, columns) in planes.into_iter().zip(columns.chunks_exact((taps * positions).max(1))) {
                out.fill(0.0);
                columns.chunks_exact(positions.max(1)).enumerate().for_each(|(tap, values)| spread(values, 1.0, tap, sizes.window, out));
            }
        });
    }
}

/// Output positions at which a kernel element lies inside the image, as ranges of rows and columns.
fn inside([down, along]: [usize; 2], window: Window) -> [Range<usize>; 2] {
    let range = |axis: usize, size: usize, offset: usize| {
        let (before, stride) = (window.padding[axis], window.stride[axis]);
        let end = (size + before).saturating_sub(offset).div_ceil(stride).min(window.positions()[axis]);
        before.saturating_sub(offset).div_ceil(stride).min(end)..end
    };
    [range(0, window.height, down), range(1, window.width, along)]
}

/// Index of the input pixel under a kernel element at an output position, which must be inside the
/// image.
fn pixel([row, column]: [usize; 2], [down, along]: [usize; 2], window: Window) -> usize {
    let (stride, padding) = (window.stride, window.padding);
    (row * stride[0] + down - padding[0]) * window.width + column * stride[1] + along - padding[1]
}

simd! {
    /// Adds the values at all output positions, multiplied by `factor`, to the input pixels under one
    /// kernel element.
    fn spread(values: &[f32], factor: f32, tap: usize, window: Window, out: &mut [f32]) {
        let [_, columns] = window.positions();
        let offset = [tap / window.kernel[1] * window.dilation[0], tap % window.kernel[1] * window.dilation[1]];
        let [inside_rows, inside_columns] = inside(offset, window);
        if inside_columns.is_empty() {
            return;
        }
        for row in inside_rows {
            let start = pixel([row, inside_columns.start], offset, window);
            let values = &values[row * columns..][inside_columns.clone()];
            let out = &mut out[start..];
            if window.stride[1] == 1 {
                out.iter_mut().zip(values).for_each(|(out, x)| *out += factor * x);
            } else {
                out.iter_mut().step_by(window.stride[1]).zip(values).for_each(|(out, x)| *out += factor * x);
            }
        }
    }
}

/// Computes the gradient of the weight, `[out, in / groups, height, width]`, from the contiguous
/// gradient of the output.
pub fn weight_gradient(sizes: Sizes, planes: &[&[f32]], gradient: &[f32], output: &mut [f32]) {
    let [inner, group, taps] = sizes.group();
    let (images, positions) = (sizes.images, sizes.positions());
    if sizes.is_depthwise() {
        let mut parts = vec![0f32; planes.len() * taps];
        parts.par_chunks_mut(taps.max(1)).zip(planes).zip(gradient.par_chunks(positions.max(1))).for_each(|((sums, plane), gradient)| {
            (0..taps).for_each(|tap| sums[tap] = correlate(plane, gradient, tap, sizes.window));
        });
        for (out, parts) in output.chunks_exact_mut(taps.max(1)).zip(parts.chunks_exact((images * taps).max(1))) {
            sum_parts(&parts.chunks_exact(taps.max(1)).collect::<Vec<_>>(), out);
        }
        return;
    }
    let mut sums = Scratch::new(group * inner * taps);
    for (index, output) in output.chunks_exact_mut((group * inner * taps).max(1)).enumerate() {
        let windows = WindowRows::new(&planes[index * inner * images..][..inner * images], images, sizes.window);
        let (inner_size, width) = (images * positions, inner * taps);
        let gradient = &gradient[index * group * inner_size..][..group * inner_size];
        let add = |first: usize, range: Range<usize>, sums: &mut [f32]| {
            let rows = sums.len() / width.max(1);
            let left = Left::pack(&gradient[first * inner_size + range.start..], rows, range.len(), inner_size);
            windows.add_products(&left, range, sums, width);
        };
        if is_large(group * width) {
            sums.fill(0.0);
            sums.par_chunks_mut((4 * BLOCK * width).max(1)).enumerate().for_each(|(job, sums)| {
                split_inner(0..inner_size).for_each(|range| add(4 * BLOCK * job, range, sums));
            });
        } else {
            in_parts(inner_size, |range, sums| add(0, range, sums), &mut sums);
        }
        // In the rows of windows, channels vary fastest.
        for (at, out) in output.iter_mut().enumerate() {
            let (row, channel, tap) = (at / (inner * taps), at / taps % inner, at % taps);
            *out = sums[(row * taps + tap) * inner + channel];
        }
    }
}

simd! {
    /// The sum over output positions of the gradient times the input pixel under one kernel element.
    fn correlate(plane: &[f32], gradient: &[f32], tap: usize, window: Window) -> f32 {
        const LANES: usize = 16;
        let [_, columns] = window.positions();
        let offset = [tap / window.kernel[1] * window.dilation[0], tap % window.kernel[1] * window.dilation[1]];
        let [inside_rows, inside_columns] = inside(offset, window);
        let mut lanes = [0f32; LANES];
        if inside_columns.is_empty() {
            return 0.0;
        }
        for row in inside_rows {
            let start = pixel([row, inside_columns.start], offset, window);
            let gradient = &gradient[row * columns..][inside_columns.clone()];
            if window.stride[1] == 1 {
                let (pixels, pixels_tail) = plane[start..][..gradient.len()].as_chunks::<LANES>();
                let (gradients, gradient_tail) = gradient.as_chunks::<LANES>();
                for (x, g) in pixels.iter().zip(gradients) {
                    for lane in 0..LANES {
                        lanes[lane] += x[lane] * g[lane];
                    }
                }
                for (lane, (x, g)) in lanes.iter_mut().zip(pixels_tail.iter().zip(gradient_tail)) {
                    *lane += x * g;
                }
            } else {
                for (at, (x, g)) in plane[start..].iter().step_by(window.stride[1]).zip(gradient).enumerate() {
                    lanes[at % LANES] += x * g;
                }
            }
        }
        lanes.iter().sum()
    }
}

/// The windows of a batch as a matrix with one row per image and output position, and one column per
/// kernel element and channel. Channels vary fastest, so that each kernel row is contiguous in memory.
struct WindowRows {
    padded: Scratch,
    channels: usize,
    window: Window,
}

impl WindowRows {
    fn new(planes: &[&[f32]], images: usize, window: Window) -> WindowRows {
        let channels = planes.len() / images.max(1);
        let ([height, width], [above, left, ..]) = (window.padded(), window.padding);
        // An extra panel of zeros, so that complete panels can be read at the end.
        let mut padded = Scratch::new(images * height * width * channels + PANEL);
        let end = padded.len() - PANEL;
        padded[end..].fill(0.0);
        padded[..end].par_chunks_mut((height * width * channels).max(1)).enumerate().for_each(|(image, padded)| {
            if window.padding != [0; 4] {
                padded.fill(0.0);
            }
            for row in 0..window.height {
                let out = &mut padded[((row + above) * width + left) * channels..][..window.width * channels];
                for (channel, plane) in planes.iter().skip(image).step_by(images).enumerate() {
                    let values = &plane[row * window.width..][..window.width];
                    out[channel..].iter_mut().step_by(channels).zip(values).for_each(|(out, x)| *out = *x);
                }
            }
        });
        WindowRows { padded, channels, window }
    }

    /// Offsets of the windows at these positions.
    fn starts(&self, positions: Range<usize>) -> Vec<usize> {
        let [height, width] = self.window.positions();
        let ([padded_height, padded_width], [down, along]) = (self.window.padded(), self.window.stride);
        let start = |position: usize| {
            let (image, row, column) = (position / (height * width), position / width % height, position % width);
            ((image * padded_height + row * down) * padded_width + column * along) * self.channels
        };
        positions.map(start).collect()
    }

    /// Contiguous runs of columns: first column, offset within a window, and length.
    fn runs(&self) -> Vec<(usize, usize, usize)> {
        let ([_, padded_width], [height, width], [down, along]) = (self.window.padded(), self.window.kernel, self.window.dilation);
        let (count, taps) = if along == 1 { (1, width) } else { (width, 1) };
        let mut runs = Vec::new();
        for row in 0..height {
            for run in 0..count {
                let (column, length) = ((row * width + run) * self.channels, taps * self.channels);
                let offset = (down * row * padded_width + along * run) * self.channels;
                runs.extend((0..length).step_by(PANEL).map(|at| (column + at, offset + at, PANEL.min(length - at))));
            }
        }
        runs
    }

    /// Adds the product of rows of the left matrix and the windows at these positions to `sums`.
    fn add_products(&self, left: &Left, positions: Range<usize>, sums: &mut [f32], width: usize) {
        let starts = self.starts(positions);
        let runs = self.runs();
        let mut products = [[0f32; PANEL]; BLOCK];
        for index in 0..left.rows().div_ceil(BLOCK) {
            let first = index * BLOCK;
            let count = BLOCK.min(left.rows() - first);
            for (column, offset, length) in &runs {
                tile::multiply(left.block(index), Panel::Shifted { values: &self.padded[*offset..], offsets: &starts }, [count, *length], &mut products);
                for (lane, products) in products[..count].iter().enumerate() {
                    let sums = &mut sums[(first + lane) * width + column..][..*length];
                    sums.iter_mut().zip(products).for_each(|(sum, x)| *sum += x);
                }
            }
        }
    }
}

/// Adds the gradient of each window to the first pixel with the largest value.
pub fn max_pool_gradient(planes: &[&[f32]], gradient: &[f32], window: Window, output: &mut [f32]) {
    let size: usize = window.positions().iter().product();
    let plane = window.height * window.width;
    output.par_chunks_mut(plane.max(1)).zip(planes).zip(gradient.par_chunks(size.max(1))).for_each(|((out, plane), gradient)| {
        out.fill(0.0);
        let [_, columns] = window.positions();
        for (at, g) in gradient.iter().enumerate() {
            let first = [at / columns * window.stride[0], at % columns * window.stride[1]];
            let span = |axis: usize, size: usize| {
                let end = (first[axis] + window.kernel[axis]).saturating_sub(window.padding[axis]);
                first[axis].saturating_sub(window.padding[axis])..end.min(size)
            };
            let mut best = (f32::NEG_INFINITY, None);
            for y in span(0, window.height) {
                for x in span(1, window.width) {
                    let value = plane[y * window.width + x];
                    if value > best.0 || value.is_nan() || best.1.is_none() {
                        best = (value, Some(y * window.width + x));
                    }
                }
            }
            if let Some(at) = best.1 {
                out[at] += g;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 20) as f32 - 2048.0) / 2048.0).collect()
    }

    /// Reference implementation of both gradients.
    fn plain(sizes: Sizes, x: &[f32], weight: &[f32], gradient: &[f32]) -> [Vec<f64>; 2] {
        let ([inner, group, taps], window) = (sizes.group(), sizes.window);
        let [rows, columns] = window.positions();
        let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; weight.len()]);
        for (at, along) in gradient.iter().enumerate() {
            let (out, image, row, column) = (at / (sizes.images * rows * columns), at / (rows * columns) % sizes.images, at / columns % rows, at % columns);
            for step in 0..inner * taps {
                let (channel, tap) = (step / taps, step % taps);
                let y = (row * window.stride[0] + tap / window.kernel[1] * window.dilation[0]).wrapping_sub(window.padding[0]);
                let x_at = (column * window.stride[1] + tap % window.kernel[1] * window.dilation[1]).wrapping_sub(window.padding[1]);
                if y < window.height && x_at < window.width {
                    let pixel = (((out / group * inner + channel) * sizes.images + image) * window.height + y) * window.width + x_at;
                    dx[pixel] += f64::from(weight[out * inner * taps + step]) * f64::from(*along);
                    dw[out * inner * taps + step] += f64::from(x[pixel]) * f64::from(*along);
                }
            }
        }
        [dx, dw]
    }

    #[test]
    fn gradients_are_correct_and_independent_of_threads() {
        let square = |size| Window { height: size, width: size, kernel: [3, 3], stride: [1; 2], padding: [1; 4], dilation: [1; 2] };
        let shapes = [
            (3, 5, 7, 1, square(6)),
            (40, 16, 20, 1, square(9)),
            (2, 5, 7, 1, Window { stride: [2; 2], ..square(7) }),
            (2, 5, 7, 1, Window { padding: [2, 0, 1, 1], ..square(8) }),
            (2, 5, 7, 1, Window { padding: [2, 0, 1, 1], dilation: [2, 1], ..square(8) }),
            (2, 6, 6, 6, Window { padding: [2, 0, 1, 1], ..square(8) }),
            (2, 6, 6, 6, Window { padding: [2, 0, 1, 1], dilation: [1, 2], ..square(8) }),
            (2, 6, 6, 6, Window { stride: [1, 2], padding: [0, 1, 2, 0], ..square(9) }),
            (2, 5, 7, 1, Window { stride: [2, 1], padding: [1, 0, 0, 2], ..square(8) }),
            (2, 5, 7, 1, Window { stride: [1, 3], dilation: [2, 1], padding: [0, 2, 3, 1], width: 9, ..square(8) }),
            (2, 5, 7, 1, Window { stride: [2; 2], width: 9, ..square(8) }),
            (2, 6, 4, 2, Window { stride: [2; 2], padding: [0; 4], ..square(8) }),
            (2, 6, 4, 2, Window { dilation: [2; 2], padding: [2; 4], ..square(8) }),
            (2, 6, 6, 6, square(8)),
            (2, 6, 6, 6, Window { stride: [2; 2], width: 33, ..square(8) }),
            (2, 6, 6, 6, Window { stride: [2; 2], dilation: [2; 2], ..square(9) }),
            (2, 40, 4, 1, Window { kernel: [1, 1], padding: [0; 4], stride: [2; 2], ..square(7) }),
            (2, 4, 40, 1, Window { kernel: [1, 1], padding: [0; 4], ..square(7) }),
            (2, 3, 8, 1, Window { kernel: [4, 4], padding: [0; 4], stride: [4; 2], ..square(12) }),
            (2, 3, 8, 1, Window { kernel: [1, 5], padding: [3; 4], ..square(12) }),
            (1, 1, 1, 1, Window { kernel: [1, 1], padding: [2; 4], stride: [3; 2], ..square(4) }),
        ];
        for (images, inputs, outputs, groups, window) in shapes {
            let sizes = Sizes { images, inputs, outputs, groups, window };
            let [inner, _, taps] = sizes.group();
            let (x, weight) = (numbers(inputs * images * window.height * window.width, 1), numbers(outputs * inner * taps, 2));
            let gradient = numbers(outputs * images * sizes.positions(), 3);
            let planes: Vec<&[f32]> = x.chunks_exact(window.height * window.width).collect();
            let compute = |threads| {
                let (mut dx, mut dw) = (vec![f32::NAN; x.len()], vec![f32::NAN; weight.len()]);
                rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                    input_gradient(sizes, &weight, &gradient, &mut dx);
                    weight_gradient(sizes, &planes, &gradient, &mut dw);
                });
                [dx, dw]
            };
            let ours = compute(1);
            assert_eq!(ours, compute(2), "{sizes:?}");
            for (which, (ours, wanted)) in ours.iter().zip(plain(sizes, &x, &weight, &gradient)).enumerate() {
                for (ours, wanted) in ours.iter().zip(wanted) {
                    assert!((f64::from(*ours) - wanted).abs() < 2e-4 * (1.0 + wanted.abs()), "{which} of {sizes:?}: {ours} for {wanted}");
                }
            }
        }
    }

    #[test]
    fn the_first_maximum_receives_the_gradient() {
        let mut output = [0.0; 9];
        let window = Window { height: 3, width: 3, kernel: [2, 2], stride: [1; 2], padding: [0; 4], dilation: [1; 2] };
        max_pool_gradient(&[&[1.0, 5.0, 2.0, 0.0, 5.0, 2.0, 7.0, 0.0, 0.0]], &[1.0, 2.0, 3.0, 4.0], window, &mut output);
        assert_eq!(output, [0.0, 3.0, 0.0, 0.0, 4.0, 0.0, 3.0, 0.0, 0.0]);
    }
}
