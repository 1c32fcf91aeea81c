//! Depthwise convolutions and pooling.
//!
//! Planes are ordered by channel: all images of the first channel, then all images of the second one.

use rayon::prelude::*;

use super::activation::copied;
use super::scratch::Scratch;

/// Size of the planes `[height, width]` and geometry of a sliding window. In pairs, the first number is
/// the vertical one.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Height of the image.
    pub height: usize,
    /// Width of the image.
    pub width: usize,
    /// Height and width of the kernel.
    pub kernel: [usize; 2],
    /// Vertical and horizontal stride.
    pub stride: [usize; 2],
    /// Padding at the top, left, bottom and right.
    pub padding: [usize; 4],
    /// Vertical and horizontal dilation.
    pub dilation: [usize; 2],
}

impl Window {
    /// Height and width of the output. The window must fit into the padded image.
    pub fn positions(&self) -> [usize; 2] {
        let padded = self.padded();
        [0, 1].map(|axis| (padded[axis] - self.dilation[axis] * (self.kernel[axis] - 1) - 1) / self.stride[axis] + 1)
    }

    /// Height and width of the padded image.
    pub fn padded(&self) -> [usize; 2] {
        let [above, left, below, right] = self.padding;
        [above + self.height + below, left + self.width + right]
    }

    /// The planes, padded with `value`.
    fn pad(&self, planes: &[&[f32]], value: f32) -> Scratch {
        let [height, width] = self.padded();
        let [above, left, ..] = self.padding;
        let mut padded = Scratch::new(planes.len() * height * width);
        padded.par_chunks_mut((height * width).max(1)).zip(planes).for_each(|(padded, plane)| {
            padded.fill(value);
            let rows = padded.chunks_exact_mut(width.max(1)).skip(above);
            for (row, values) in rows.zip(plane.chunks_exact(self.width.max(1))) {
                row[left..][..self.width].copy_from_slice(values);
            }
        });
        padded
    }
}

simd! {
    /// Adds the weighted sums over the windows of a padded plane.
    fn slide(padded: &[f32], weight: &[f32], window: Window, out: &mut [f32]) {
        let ([_, width], [down, along]) = (window.padded(), window.stride);
        let [_, columns] = window.positions();
        for (y, out) in out.chunks_exact_mut(columns).enumerate() {
            for (row, weights) in weight.chunks_exact(window.kernel[1]).enumerate() {
                for (column, weight) in weights.iter().enumerate() {
                    let start = (y * down + row * window.dilation[0]) * width + column * window.dilation[1];
                    let values = &padded[start..];
                    if along == 1 {
                        out.iter_mut().zip(values).for_each(|(out, x)| *out += weight * x);
                    } else {
                        out.iter_mut().zip(values.iter().step_by(along)).for_each(|(out, x)| *out += weight * x);
                    }
                }
            }
        }
    }
}

/// Adds a depthwise convolution to `output`.
pub fn depthwise(planes: &[&[f32]], images: usize, weight: &[f32], window: Window, output: &mut [f32]) {
    let taps = window.kernel[0] * window.kernel[1];
    let size: usize = window.positions().iter().product();
    output.par_chunks_mut(size.max(1)).zip(planes).enumerate().for_each(|(index, (out, plane))| {
        slide(&window.pad(&[plane], 0.0), &weight[index / images * taps..][..taps], window, out);
    });
}

simd! {
    fn largest(padded: &[f32], window: Window, out: &mut [f32]) {
        let ([_, width], [down, along]) = (window.padded(), window.stride);
        let [_, columns] = window.positions();
        let larger = |best: f32, x: f32| if x > best || x.is_nan() { x } else { copied(best) };
        // Vertically first, for complete rows at once, then horizontally.
        let mut tall = vec![0f32; width];
        for (y, out) in out.chunks_exact_mut(columns).enumerate() {
            let rows = &padded[y * down * width..];
            tall.copy_from_slice(&rows[..width]);
            for row in 1..window.kernel[0] {
                tall.iter_mut().zip(&rows[row * width..][..width]).for_each(|(best, x)| *best = larger(*best, *x));
            }
            out.fill(f32::NEG_INFINITY);
            for column in 0..window.kernel[1] {
                out.iter_mut().zip(tall[column..].iter().step_by(along)).for_each(|(best, x)| *best = larger(*best, *x));
            }
        }
    }
}

/// Max pooling of each plane.
pub fn max_pool(planes: &[&[f32]], window: Window, output: &mut [f32]) {
    let size: usize = window.positions().iter().product();
    output.par_chunks_mut(size.max(1)).zip(planes).for_each(|(out, plane)| largest(&window.pad(&[plane], f32::NEG_INFINITY), window, out));
}
