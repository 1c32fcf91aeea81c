//! Direct convolution without an im2col matrix: the pixels under a kernel element at adjacent output
//! positions are adjacent in the padded image, so a tile of the result is accumulated from shifted runs
//! of the image. Only a slab of the image, the rows under the kernel at several rows of the result, is padded
//! at a time, so that it stays in the cache.
//!
//! For a strided convolution, the slab is split into one plane per phase of the stride, within which these
//! pixels are adjacent.

use rayon::prelude::*;

use super::convolution::Window;
use super::epilogue::Epilogue;
use super::operands::Left;
use super::scratch::Scratch;
use super::tile::{self, BLOCK, PANEL, Panel};

/// Number of values that fit into the L1 cache while blocks are multiplied by them.
const NEAR: usize = 8 << 10;

/// Number of values of a slab for each thread that shares it: 384 KiB, which fit into the second-level cache.
/// A slab has more values if there are more weights, or if the kernel covers many rows.
const SLAB: usize = 96 << 10;

/// Layout of a slab: the padded rows of an image under the kernel at several rows of the output.
struct Slab {
    window: Window,
    channels: usize,
    /// Number of rows of the output that are computed from a slab.
    rows: usize,
    /// Row width of a phase.
    step: usize,
    /// Number of elements per phase.
    phase: usize,
    /// Number of elements per channel.
    channel: usize,
}

impl Slab {
    /// A layout for slabs that several threads share. The weights of all `outputs` are read once per slab,
    /// which therefore has at least as many values.
    fn new(window: Window, channels: usize, outputs: usize, sharers: usize) -> Slab {
        let values = (SLAB * sharers).max(outputs * channels * window.kernel[0] * window.kernel[1]);
        let (padded, [down, along]) = (window.padded(), window.stride);
        let step = padded[1].div_ceil(along);
        let taller = window.dilation[0] * (window.kernel[0] - 1);
        // At least as many rows as the next slab copies again.
        let rows = (values / (channels * step * along).max(1)).saturating_sub(taller) / down;
        let rows = rows.max(taller / down).clamp(1, window.positions()[0].max(1));
        let phase = ((rows - 1) * down + taller + 1).div_ceil(down) * step;
        Slab { window, channels, rows, step, phase, channel: phase * down * along }
    }

    /// Offsets of the kernel elements of all channels.
    fn offsets(&self) -> Vec<usize> {
        let Window { kernel: [height, width], stride: [down, along], dilation, .. } = self.window;
        let tap = |channel: usize, row: usize, column: usize| {
            let (row, column) = (row * dilation[0], column * dilation[1]);
            channel * self.channel + (row % down * along + column % along) * self.phase + row / down * self.step + column / along
        };
        (0..self.channels).flat_map(|channel| (0..height * width).map(move |at| tap(channel, at / width, at % width))).collect()
    }

    /// Copies the rows of a plane for the rows of the output from `first` on.
    fn fill(&self, plane: &[f32], first: usize, out: &mut [f32]) {
        let Window { padding: [above, left, ..], stride: [down, along], width, .. } = self.window;
        for (index, out) in out.chunks_exact_mut(self.step.max(1)).enumerate() {
            // Rows of the slab are ordered by phases, down and along.
            let (phase, row) = (index * self.step / self.phase, index * self.step % self.phase / self.step * down);
            let (row, column) = ((first * down + row + phase / along).wrapping_sub(above), phase % along);
            let Some(values) = plane.chunks_exact(width.max(1)).nth(row) else {
                out.fill(0.0);
                continue;
            };
            // The first pixel of this phase, and its position.
            let from = if column >= left { column - left } else { (along - (left - column) % along) % along };
            let at = (from + left) / along;
            let count = width.saturating_sub(from).div_ceil(along);
            out[..at].fill(0.0);
            out[at + count..].fill(0.0);
            if along == 1 {
                out[at..][..count].copy_from_slice(&values[from..]);
            } else {
                values[from.min(width)..].iter().step_by(along).zip(&mut out[at..]).for_each(|(x, out)| *out = *x);
            }
        }
    }
}

/// Computes a convolution. `left` is the weight, with a row per output channel and a column per input
/// channel and kernel element. `planes` and `output` have the layout of
/// [`convolution`](super::convolution).
pub fn convolve(planes: &[&[f32]], images: usize, left: &Left, window: Window, epilogue: Epilogue, output: &mut [f32]) {
    let [rows, columns] = window.positions();
    let size = rows * columns;
    // If there are more threads than images, several threads share each slab, by bands of rows.
    let sharers = rayon::current_num_threads().div_ceil(images.max(1));
    let layout = Slab::new(window, planes.len() / images.max(1), left.rows(), sharers);
    let offsets = layout.offsets();
    let mut by_image: Vec<Vec<&mut [f32]>> = (0..images).map(|_| Vec::with_capacity(left.rows())).collect();
    for (index, plane) in output.chunks_exact_mut(size.max(1)).enumerate() {
        by_image[index % images].push(plane);
    }
    by_image.into_par_iter().enumerate().for_each(|(image, mut out)| {
        let mut padded = Scratch::new(layout.channels * layout.channel + PANEL);
        for start in (0..rows).step_by(layout.rows) {
            let end = rows.min(start + layout.rows);
            let fill = |(channel, padded): (usize, &mut [f32])| layout.fill(planes[channel * images + image], start, padded);
            if sharers > 1 {
                padded.par_chunks_exact_mut(layout.channel.max(1)).take(layout.channels).enumerate().for_each(fill);
            } else {
                // With parallelism here, a waiting thread could start another image and hold both in memory.
                padded.chunks_exact_mut(layout.channel.max(1)).take(layout.channels).enumerate().for_each(fill);
            }
            let band = (end - start).div_ceil(sharers);
            let mut bands: Vec<Vec<&mut [f32]>> = (start..end).step_by(band).map(|_| Vec::with_capacity(out.len())).collect();
            for plane in &mut out {
                let rows = plane[start * columns..end * columns].chunks_mut((band * columns).max(1));
                bands.iter_mut().zip(rows).for_each(|(band, rows)| band.push(rows));
            }
            bands.into_par_iter().enumerate().for_each(|(index, mut out)| {
                let (above, first) = (index * band * layout.step, (start + index * band) * columns);
                one_band(left, &padded[above..], &offsets, &layout, epilogue, [image * size + first, images * size], &mut out);
            });
        }
    });
}

simd! {
    /// Computes all tiles of a band of rows of a slab. Its results start at column `position[0]` of
    /// rows with `position[1]` columns.
    fn one_band(left: &Left, padded: &[f32], offsets: &[usize], layout: &Slab, epilogue: Epilogue, position: [usize; 2], out: &mut [&mut [f32]]) {
        let [_, columns] = layout.window.positions();
        let all = out.first().map_or(0, |plane| plane.len());
        // Treats the band as a single row if rows have no gaps.
        let [rows, columns] = if layout.step == columns { [1, all] } else { [all / columns.max(1), columns] };
        let span = (rows * layout.step).saturating_sub(layout.step - columns.min(layout.step)).max(if rows == 1 { columns } else { 0 });
        let mut sums = [[0f32; PANEL]; BLOCK];
        let (blocks, panels) = (left.rows().div_ceil(BLOCK), span.div_ceil(PANEL));
        // The larger one of weight and slab is read once. For the slab, in groups of panels that fit
        // into the cache.
        let near = NEAR / (layout.channels * layout.window.kernel[0] * PANEL).max(1);
        let chunk = if span * layout.channels > left.rows() * offsets.len() { near } else { panels }.max(1);
        let groups = (0..panels).step_by(chunk).map(|first| first..panels.min(first + chunk));
        for (index, panel) in groups.flat_map(|group| (0..blocks).flat_map(move |index| group.clone().map(move |panel| (index, panel)))) {
            let (first, start) = (index * BLOCK, panel * PANEL);
            let (count, width) = (BLOCK.min(left.rows() - first), PANEL.min(span - start));
            tile::multiply(left.block(index), Panel::Shifted { values: &padded[start..], offsets }, [count, width], &mut sums);
            let mut at = start;
            while at < start + width {
                let (row, column) = if rows == 1 { (0, at) } else { (at / layout.step, at % layout.step) };
                if column >= columns {
                    at += layout.step - column;
                    continue;
                }
                let run = (columns - column).min(start + width - at);
                let index = row * columns + column;
                for (lane, sums) in sums[..count].iter_mut().enumerate() {
                    let values = &mut sums[at - start..][..run];
                    epilogue.store(values, [first + lane, position[0] + index, position[1]], &mut out[first + lane][index..][..run]);
                }
                at += run;
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

    /// Reference implementation.
    fn plain(x: &[f32], images: usize, weight: &[f32], outputs: usize, window: Window) -> Vec<f64> {
        let [rows, columns] = window.positions();
        let taps = window.kernel[0] * window.kernel[1];
        let inputs = weight.len() / (outputs * taps);
        let value = |at: usize| {
            let (out, image, row, column) = (at / (images * rows * columns), at / (rows * columns) % images, at / columns % rows, at % columns);
            let term = |step: usize| {
                let (channel, tap) = (step / taps, step % taps);
                let y = (row * window.stride[0] + tap / window.kernel[1] * window.dilation[0]).wrapping_sub(window.padding[0]);
                let x_at = (column * window.stride[1] + tap % window.kernel[1] * window.dilation[1]).wrapping_sub(window.padding[1]);
                let inside = y < window.height && x_at < window.width;
                let pixel = || x[((channel * images + image) * window.height + y) * window.width + x_at];
                if inside { f64::from(pixel()) * f64::from(weight[out * inputs * taps + step]) } else { 0.0 }
            };
            (0..inputs * taps).map(term).sum()
        };
        (0..outputs * images * rows * columns).map(value).collect()
    }

    #[test]
    fn convolutions_are_correct_and_independent_of_threads() {
        let square = |size| Window { height: size, width: size, kernel: [3, 3], stride: [1; 2], padding: [1; 4], dilation: [1; 2] };
        let mut divided = 0;
        for (images, inputs, outputs, window) in [
            (3, 5, 7, square(6)),
            (2, 3, 30, square(40)),
            (2, 5, 17, Window { stride: [2; 2], ..square(7) }),
            (2, 5, 17, Window { stride: [2, 1], padding: [1, 0, 0, 2], ..square(8) }),
            (2, 5, 17, Window { stride: [1, 3], dilation: [2, 1], padding: [0, 2, 3, 1], width: 9, ..square(8) }),
            (2, 5, 4, Window { stride: [2; 2], width: 9, padding: [0; 4], ..square(8) }),
            (2, 2, 3, Window { stride: [3; 2], dilation: [2; 2], padding: [4; 4], ..square(11) }),
            (2, 20, 14, Window { kernel: [1, 1], padding: [0; 4], ..square(7) }),
            (2, 3, 8, Window { kernel: [4, 4], padding: [0; 4], stride: [4; 2], ..square(12) }),
            (2, 3, 8, Window { kernel: [2, 5], padding: [3; 4], ..square(12) }),
            (1, 1, 1, Window { kernel: [1, 1], padding: [2; 4], stride: [3; 2], ..square(4) }),
            (1, 2, 3, Window { height: 5, width: 1, ..square(1) }),
            (1, 12, 2, square(150)),
            (1, 12, 2, Window { stride: [2; 2], dilation: [3, 2], padding: [5, 1, 2, 4], width: 149, ..square(201) }),
            (2, 12, 1, Window { kernel: [5, 2], stride: [3, 1], dilation: [4, 1], padding: [0, 3, 7, 0], ..square(170) }),
        ] {
            let is_divided = |sharers| Slab::new(window, inputs, outputs, sharers).rows < window.positions()[0];
            divided += usize::from(is_divided(1) && (images > 1 || is_divided(2)));
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
                pool.install(|| convolve(&planes, images, &left, window, Epilogue::new(&steps), &mut ours));
                ours
            };
            let ours = compute(1);
            assert_eq!(ours, compute(2), "{window:?}");
            for (at, (have, want)) in ours.iter().zip(plain(&x, images, &weight, outputs, window)).enumerate() {
                let want = want + f64::from(bias[at / size]) + f64::from(sum[at]);
                assert!((f64::from(*have) - want).abs() < 1e-4 * (1.0 + want.abs()), "{at} of {window:?}: {have} for {want}");
            }
        }
        assert!(divided >= 3, "{divided} images have several slabs");
    }
}
