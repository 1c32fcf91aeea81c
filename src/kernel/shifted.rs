//! Convolutions without a matrix of windows: what a tap sees at neighbouring positions lies side by side in the padded
//! image, so a tile of the result is summed straight from there, shifted tap by tap.
//!
//! An image with a stride is split into as many planes as the stride has phases, within which neighbours are adjacent.

use rayon::prelude::*;

use super::convolution::Window;
use super::epilogue::Epilogue;
use super::matmul::Left;
use super::scratch::Scratch;
use super::tile::{self, BLOCK, PANEL, Panel};

/// How a padded image lies while it is convolved.
struct PaddedImage {
    window: Window,
    /// Width of a row of a phase.
    step: usize,
    /// Elements of a phase.
    phase: usize,
    /// Elements of a channel.
    channel: usize,
    /// Rows and columns of the result, as one row where nothing lies between rows.
    shape: [usize; 2],
}

impl PaddedImage {
    fn new(window: Window) -> PaddedImage {
        let long = |size: usize| (size + 2 * window.padding).div_ceil(window.stride);
        let step = long(window.width);
        let phase = long(window.height) * step;
        let [rows, columns] = window.positions();
        let shape = if step == columns { [1, rows * columns] } else { [rows, columns] };
        PaddedImage { window, step, phase, channel: phase * window.stride * window.stride, shape }
    }

    /// Where the taps of some channels begin.
    fn offsets(&self, channels: usize) -> Vec<usize> {
        let Window { kernel: [height, width], stride, dilation, .. } = self.window;
        let tap = |channel: usize, row: usize, column: usize| {
            let (row, column) = (row * dilation, column * dilation);
            channel * self.channel + (row % stride * stride + column % stride) * self.phase + row / stride * self.step + column / stride
        };
        (0..channels).flat_map(|channel| (0..height * width).map(move |at| tap(channel, at / width, at % width))).collect()
    }

    /// Lays a plane out.
    fn fill(&self, plane: &[f32], out: &mut [f32]) {
        let Window { padding, stride, width, .. } = self.window;
        if padding > 0 || stride > 1 {
            out.fill(0.0);
        }
        for (row, values) in plane.chunks_exact(width.max(1)).enumerate() {
            let row = row + padding;
            for column in 0..stride.min(width) {
                // The first pixel of this phase, and where it goes.
                let at = column + padding;
                let out = &mut out[(row % stride * stride + at % stride) * self.phase + row / stride * self.step + at / stride..];
                if stride == 1 {
                    out[..width].copy_from_slice(values);
                } else {
                    values[column..].iter().step_by(stride).zip(out).for_each(|(x, out)| *out = *x);
                }
            }
        }
    }
}

/// A convolution: `left` is the weight, a row for each channel of the result with a column for each channel and tap; `planes`
/// lie as in [`convolution`](super::convolution), and `output` gets such planes too.
pub fn convolve(planes: &[&[f32]], images: usize, left: &Left, window: Window, epilogue: Epilogue, output: &mut [f32]) {
    let layout = PaddedImage::new(window);
    let channels = planes.len() / images.max(1);
    let offsets = layout.offsets(channels);
    let size: usize = window.positions().iter().product();
    let mut by_image: Vec<Vec<&mut [f32]>> = (0..images).map(|_| Vec::with_capacity(left.rows())).collect();
    for (index, plane) in output.chunks_exact_mut(size.max(1)).enumerate() {
        by_image[index % images].push(plane);
    }
    by_image.into_par_iter().enumerate().for_each(|(image, mut out)| {
        let mut padded = Scratch::new(channels * layout.channel + PANEL);
        for (channel, padded) in padded.chunks_exact_mut(layout.channel.max(1)).take(channels).enumerate() {
            layout.fill(planes[channel * images + image], padded);
        }
        one_image(left, &padded, &offsets, &layout, epilogue, [image * size, images * size], &mut out);
    });
}

simd! {
    /// All tiles of one image; its results begin at column `place[0]` of rows `place[1]` wide.
    fn one_image(left: &Left, padded: &[f32], offsets: &[usize], layout: &PaddedImage, epilogue: Epilogue, place: [usize; 2], out: &mut [&mut [f32]]) {
        let [rows, columns] = layout.shape;
        let span = (rows * layout.step).saturating_sub(layout.step - columns.min(layout.step)).max(if rows == 1 { columns } else { 0 });
        let mut sums = [[0f32; PANEL]; BLOCK];
        for index in 0..left.rows().div_ceil(BLOCK) {
            let first = index * BLOCK;
            let count = BLOCK.min(left.rows() - first);
            for start in (0..span).step_by(PANEL) {
                let width = PANEL.min(span - start);
                tile::multiply(left.block(index), Panel::Shifted { values: &padded[start..], offsets }, [count, width], &mut sums);
                let mut at = start;
                while at < start + width {
                    let (row, column) = if rows == 1 { (0, at) } else { (at / layout.step, at % layout.step) };
                    if column >= columns {
                        at += layout.step - column;
                        continue;
                    }
                    let run = (columns - column).min(start + width - at);
                    let position = row * columns + column;
                    for (lane, sums) in sums[..count].iter_mut().enumerate() {
                        let values = &mut sums[at - start..][..run];
                        epilogue.store(values, [first + lane, place[0] + position, place[1]], &mut out[first + lane][position..][..run]);
                    }
                    at += run;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::epilogue::Fused;
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 20) as f32 - 2048.0) / 2048.0).collect()
    }

    /// As it is defined.
    fn plain(x: &[f32], images: usize, weight: &[f32], outputs: usize, window: Window) -> Vec<f64> {
        let [rows, columns] = window.positions();
        let taps = window.kernel[0] * window.kernel[1];
        let inputs = weight.len() / (outputs * taps);
        let value = |at: usize| {
            let (out, image, row, column) = (at / (images * rows * columns), at / (rows * columns) % images, at / columns % rows, at % columns);
            let term = |step: usize| {
                let (channel, tap) = (step / taps, step % taps);
                let y = (row * window.stride + tap / window.kernel[1] * window.dilation).wrapping_sub(window.padding);
                let x_at = (column * window.stride + tap % window.kernel[1] * window.dilation).wrapping_sub(window.padding);
                let inside = y < window.height && x_at < window.width;
                let pixel = || x[((channel * images + image) * window.height + y) * window.width + x_at];
                if inside { f64::from(pixel()) * f64::from(weight[out * inputs * taps + step]) } else { 0.0 }
            };
            (0..inputs * taps).map(term).sum()
        };
        (0..outputs * images * rows * columns).map(value).collect()
    }

    #[test]
    fn convolutions_are_as_defined_and_the_same_with_any_number_of_threads() {
        let square = |size| Window { height: size, width: size, kernel: [3, 3], stride: 1, padding: 1, dilation: 1 };
        for (images, inputs, outputs, window) in [
            (3, 5, 7, square(6)),
            (2, 3, 30, square(40)),
            (2, 5, 17, Window { stride: 2, ..square(7) }),
            (2, 5, 4, Window { stride: 2, width: 9, padding: 0, ..square(8) }),
            (2, 2, 3, Window { stride: 3, dilation: 2, padding: 4, ..square(11) }),
            (2, 20, 14, Window { kernel: [1, 1], padding: 0, ..square(7) }),
            (2, 3, 8, Window { kernel: [4, 4], padding: 0, stride: 4, ..square(12) }),
            (2, 3, 8, Window { kernel: [2, 5], padding: 3, ..square(12) }),
            (1, 1, 1, Window { kernel: [1, 1], padding: 2, stride: 3, ..square(4) }),
            (1, 2, 3, Window { height: 5, width: 1, ..square(1) }),
        ] {
            let taps = inputs * window.kernel[0] * window.kernel[1];
            let size = images * window.positions().iter().product::<usize>();
            let (x, weight) = (numbers(inputs * images * window.height * window.width, 1), numbers(outputs * taps, 2));
            let (bias, sum) = (numbers(outputs, 3), numbers(outputs * size, 4));
            let planes: Vec<&[f32]> = x.chunks_exact(window.height * window.width).collect();
            let left = Left::pack(&weight, outputs, taps, taps);
            let steps = [Fused::AddToRows(&bias[..]), Fused::Add(&sum[..])];
            let compute = |threads| {
                let mut ours = vec![f32::NAN; outputs * size];
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| convolve(&planes, images, &left, window, Epilogue::of(&steps), &mut ours));
                ours
            };
            let ours = compute(1);
            assert_eq!(ours, compute(2), "{window:?}");
            for (at, (have, want)) in ours.iter().zip(plain(&x, images, &weight, outputs, window)).enumerate() {
                let want = want + f64::from(bias[at / size]) + f64::from(sum[at]);
                assert!((f64::from(*have) - want).abs() < 1e-4 * (1.0 + want.abs()), "{at} of {window:?}: {have} for {want}");
            }
        }
    }
}
