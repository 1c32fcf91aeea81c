//! Images made larger or smaller.

use rayon::prelude::*;

use super::scratch::Scratch;

/// Rows that a thread takes at least.
const ROWS: usize = 16;

/// What each element of an axis is made of: one of another axis, or two beside its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Places {
    /// The first, or the only one.
    pub first: Vec<u32>,
    /// The second, and how near the element is to it.
    pub second: Option<(Vec<u32>, Vec<f32>)>,
}

/// Rows and columns of an image; those without places stay as they are.
#[derive(Debug, Clone, PartialEq)]
pub struct ImagePlaces {
    /// Of rows.
    pub rows: Option<Places>,
    /// Of columns.
    pub columns: Option<Places>,
    /// How many rows and columns there are in the end.
    pub size: [usize; 2],
}

/// Rows and columns of each plane, which has rows of `width` elements.
///
/// # Panics
/// Places lie beyond the planes, or there are not as many as the output has rows and columns.
pub fn resize(planes: &[&[f32]], width: usize, places: &ImagePlaces, output: &mut [f32]) {
    let ([height_after, width_after], rows) = (places.size, places.rows.as_ref());
    let lines = output.par_chunks_mut(width_after.max(1)).with_min_len(ROWS).enumerate();
    lines.for_each(|(line, out)| {
        let (plane, at) = (planes[line / height_after], line % height_after);
        let row = |at: u32| &plane[at as usize * width..][..width];
        let Some(columns) = &places.columns else {
            return match rows {
                None => out.copy_from_slice(row(at as u32)),
                Some(Places { first, second: None }) => out.copy_from_slice(row(first[at])),
                Some(Places { first, second: Some((second, share)) }) => between(row(first[at]), row(second[at]), share[at], out),
            };
        };
        match rows {
            None => picked(row(at as u32), columns, out),
            Some(Places { first, second: None }) => picked(row(first[at]), columns, out),
            Some(Places { first, second: Some((second, share)) }) => {
                let mut mixed = Scratch::new(width);
                between(row(first[at]), row(second[at]), share[at], &mut mixed);
                picked(&mixed, columns, out);
            }
        }
    });
}

simd! {
    fn between(a: &[f32], b: &[f32], share: f32, out: &mut [f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a + (b - a) * share;
        }
    }
}

fn picked(row: &[f32], columns: &Places, out: &mut [f32]) {
    match &columns.second {
        None => out.iter_mut().zip(&columns.first).for_each(|(out, at)| *out = row[*at as usize]),
        Some((second, share)) => {
            for (((out, a), b), share) in out.iter_mut().zip(&columns.first).zip(second).zip(share) {
                let (a, b) = (row[*a as usize], row[*b as usize]);
                *out = a + (b - a) * share;
            }
        }
    }
}
