//! Windows over images: convolutions of each channel by itself, and pooling.
//!
//! Planes come channel by channel: all images of the first channel, then all of the second.

use rayon::prelude::*;

use super::scratch::Scratch;

/// Planes `[height, width]` of an image, and how a window moves over them.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Height of the image.
    pub height: usize,
    /// Width of the image.
    pub width: usize,
    /// Height and width of the window.
    pub kernel: [usize; 2],
    /// Step in both directions.
    pub stride: usize,
    /// Places around the image.
    pub padding: usize,
    /// Distance of the window's taps.
    pub dilation: usize,
}

impl Window {
    /// Height and width of the result; the window fits the image.
    pub fn positions(&self) -> [usize; 2] {
        let count = |size: usize, kernel: usize| (size + 2 * self.padding - self.dilation * (kernel - 1) - 1) / self.stride + 1;
        [count(self.height, self.kernel[0]), count(self.width, self.kernel[1])]
    }

    fn padded_width(&self) -> usize {
        self.width + 2 * self.padding
    }

    fn padded_plane(&self) -> usize {
        (self.height + 2 * self.padding) * self.padded_width()
    }

    /// The planes with `value` around them.
    fn pad(&self, planes: &[&[f32]], value: f32) -> Scratch {
        let mut padded = Scratch::new(planes.len() * self.padded_plane());
        padded.par_chunks_mut(self.padded_plane().max(1)).zip(planes).for_each(|(padded, plane)| {
            padded.fill(value);
            let rows = padded.chunks_exact_mut(self.padded_width()).skip(self.padding);
            for (row, values) in rows.zip(plane.chunks_exact(self.width)) {
                row[self.padding..][..self.width].copy_from_slice(values);
            }
        });
        padded
    }
}

simd! {
    /// The windows' sums over one padded plane with one weight for each tap.
    fn slide(padded: &[f32], weight: &[f32], window: Window, out: &mut [f32]) {
        let (width, stride) = (window.padded_width(), window.stride);
        let [_, columns] = window.positions();
        for (y, out) in out.chunks_exact_mut(columns).enumerate() {
            for (row, weights) in weight.chunks_exact(window.kernel[1]).enumerate() {
                for (column, weight) in weights.iter().enumerate() {
                    let start = (y * stride + row * window.dilation) * width + column * window.dilation;
                    let values = &padded[start..];
                    if stride == 1 {
                        out.iter_mut().zip(values).for_each(|(out, x)| *out += weight * x);
                    } else {
                        out.iter_mut().zip(values.iter().step_by(stride)).for_each(|(out, x)| *out += weight * x);
                    }
                }
            }
        }
    }
}

/// A convolution of each channel with a window of its own, added to `output`.
pub fn depthwise(planes: &[&[f32]], images: usize, weight: &[f32], window: Window, output: &mut [f32]) {
    let taps = window.kernel[0] * window.kernel[1];
    let size: usize = window.positions().iter().product();
    output.par_chunks_mut(size.max(1)).zip(planes).enumerate().for_each(|(index, (out, plane))| {
        slide(&window.pad(&[plane], 0.0), &weight[index / images * taps..][..taps], window, out);
    });
}

simd! {
    fn largest(padded: &[f32], window: Window, out: &mut [f32]) {
        let (width, stride) = (window.padded_width(), window.stride);
        let [_, columns] = window.positions();
        let larger = |best: f32, x: f32| if x > best || x.is_nan() { x } else { best };
        // Down the window first, for whole rows at once; then along it.
        let mut tall = vec![0f32; width];
        for (y, out) in out.chunks_exact_mut(columns).enumerate() {
            let rows = &padded[y * stride * width..];
            tall.copy_from_slice(&rows[..width]);
            for row in 1..window.kernel[0] {
                tall.iter_mut().zip(&rows[row * width..][..width]).for_each(|(best, x)| *best = larger(*best, *x));
            }
            out.fill(f32::MIN);
            for column in 0..window.kernel[1] {
                out.iter_mut().zip(tall[column..].iter().step_by(stride)).for_each(|(best, x)| *best = larger(*best, *x));
            }
        }
    }
}

/// The largest value of each window of each plane.
pub fn max_pool(planes: &[&[f32]], window: Window, output: &mut [f32]) {
    let size: usize = window.positions().iter().product();
    output.par_chunks_mut(size.max(1)).zip(planes).for_each(|(out, plane)| largest(&window.pad(&[plane], f32::MIN), window, out));
}
