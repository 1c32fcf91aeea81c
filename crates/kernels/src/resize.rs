//! Resizing of images.

use rayon::prelude::*;

use super::scratch::Scratch;

/// Minimum number of rows per thread.
const ROWS: usize = 16;

/// Source indices of an axis: one source element per target element, or two that are interpolated.
#[derive(Debug, Clone, PartialEq)]
pub struct AxisSources {
    /// The first or only source index.
    pub first: Vec<u32>,
    /// The second source index and its interpolation weight.
    pub second: Option<(Vec<u32>, Vec<f32>)>,
}

/// Source indices of an image. Axes without them are copied.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSources {
    /// Sources of the rows.
    pub rows: Option<AxisSources>,
    /// Sources of the columns.
    pub columns: Option<AxisSources>,
    /// Height and width of the result.
    pub size: [usize; 2],
}

/// Resizes each plane, which has rows of `width` elements.
///
/// # Panics
/// A source index is out of range, or the number of indices does not match the output.
pub fn resize(planes: &[&[f32]], width: usize, sources: &ImageSources, output: &mut [f32]) {
    let ([height_after, width_after], rows) = (sources.size, sources.rows.as_ref());
    let lines = output.par_chunks_mut(width_after.max(1)).with_min_len(ROWS).enumerate();
    lines.for_each(|(line, out)| {
        let (plane, at) = (planes[line / height_after], line % height_after);
        let row = |at: u32| &plane[at as usize * width..][..width];
        let Some(columns) = &sources.columns else {
            return match rows {
                None => out.copy_from_slice(row(at as u32)),
                Some(AxisSources { first, second: None }) => out.copy_from_slice(row(first[at])),
                Some(AxisSources { first, second: Some((second, weight)) }) => interpolate(row(first[at]), row(second[at]), weight[at], out),
            };
        };
        match rows {
            None => select(row(at as u32), columns, out),
            Some(AxisSources { first, second: None }) => select(row(first[at]), columns, out),
            Some(AxisSources { first, second: Some((second, weight)) }) => {
                let mut mixed = Scratch::new(width);
                interpolate(row(first[at]), row(second[at]), weight[at], &mut mixed);
                select(&mixed, columns, out);
            }
        }
    });
}

simd! {
    fn interpolate(a: &[f32], b: &[f32], weight: f32, out: &mut [f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a + (b - a) * weight;
        }
    }
}

fn select(row: &[f32], columns: &AxisSources, out: &mut [f32]) {
    match &columns.second {
        None => out.iter_mut().zip(&columns.first).for_each(|(out, at)| *out = row[*at as usize]),
        Some((second, weight)) => {
            for (((out, a), b), weight) in out.iter_mut().zip(&columns.first).zip(second).zip(weight) {
                let (a, b) = (row[*a as usize], row[*b as usize]);
                *out = a + (b - a) * weight;
            }
        }
    }
}
