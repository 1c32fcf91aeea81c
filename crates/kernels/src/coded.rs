//! Matrices of integers with a scale per group, whose products need no copy of their values.
//!
//! A value is its integer times the scale, rounded to f32, so that products are bitwise equal to those of
//! the dequantized matrix.

use std::ops::Range;

use super::dots::{self, NIBBLES, Stored};
use super::epilogue::Epilogue;
use super::few_rows;
use super::interleaved::{Interleaved, LANES, MAX_ROWS, PREFETCHED, padded, total};
use super::linear::LinearWeight;
use super::one_row::{by_columns, by_rows, of_decoded};
use super::operands::{Columns, Right};
use super::scratch::Scratch;
use super::tile::PANEL;
use crate::simd::prefetch;

/// A matrix `[rows, inner]`: the weight of a linear layer or an embedding table.
#[derive(Debug)]
pub struct CodedMatrix {
    inner: usize,
    /// Number of consecutive elements of a row that share a scale.
    group: usize,
    codes: Codes,
    scales: Vec<f32>,
}

#[derive(Debug)]
enum Codes {
    /// Int8 values.
    Bytes(Vec<u8>),
    /// Runs of 4-bit codes ([`NIBBLES`]), and the integer that each code selects.
    Nibbles(Vec<u8>, [f32; 16]),
}

impl Codes {
    /// 4-bit codes for integers of at most 16 different values. `None` for others.
    fn nibbles(codes: &[u8]) -> Option<Codes> {
        let mut is_used = [false; 256];
        for codes in codes.chunks(1 << 12) {
            codes.iter().for_each(|code| is_used[usize::from(*code)] = true);
            // Other weights have more values in their first elements.
            if is_used.iter().filter(|is_used| **is_used).count() > 16 {
                return None;
            }
        }
        let values: Vec<u8> = (0..=u8::MAX).filter(|code| is_used[usize::from(*code)]).collect();
        let (mut table, mut selections) = ([0f32; 16], [0u8; 256]);
        for (index, value) in values.iter().enumerate() {
            *table.get_mut(index)? = f32::from(*value as i8);
            selections[usize::from(*value)] = index as u8;
        }
        let pack = |run: &[u8; LANES]| -> [u8; NIBBLES] {
            std::array::from_fn(|lane| selections[usize::from(run[lane])] | selections[usize::from(run[lane + NIBBLES])] << 4)
        };
        Some(Codes::Nibbles(codes.as_chunks::<LANES>().0.iter().flat_map(pack).collect(), table))
    }
}

/// Whether products support 4-bit codes in groups of this size, on this processor.
fn can_be_packed(inner: usize, group: usize) -> bool {
    dots::are_available() && dots::are_supported(group, inner) && inner.is_multiple_of(LANES)
}

impl CodedMatrix {
    /// A matrix of int8 values, with rows of `inner` elements and a scale for each `group` of them. `None` if
    /// the groups do not divide the rows, or the numbers of codes and scales do not match.
    pub fn new(inner: usize, group: usize, codes: Vec<u8>, scales: Vec<f32>) -> Option<CodedMatrix> {
        let is_whole = group > 0 && inner.is_multiple_of(group) && codes.len().is_multiple_of(inner.max(1));
        if !is_whole || inner == 0 || codes.len() / group != scales.len() {
            return None;
        }
        let nibbles = can_be_packed(inner, group).then(|| Codes::nibbles(&codes)).flatten();
        Some(CodedMatrix { inner, group, codes: nibbles.unwrap_or(Codes::Bytes(codes)), scales })
    }

    /// Number of rows and elements per row.
    pub fn shape(&self) -> [usize; 2] {
        [self.scales.len() * self.group / self.inner, self.inner]
    }

    /// Size in bytes of a matrix with rows of `inner` elements, groups of `group` and this number of
    /// different integers.
    pub fn bytes_of(elements: usize, [inner, group]: [usize; 2], integers: usize) -> usize {
        let codes = if integers <= 16 && can_be_packed(inner, group) { elements / 2 } else { elements };
        codes + 4 * (elements / group)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        let (Codes::Bytes(codes) | Codes::Nibbles(codes, _)) = &self.codes;
        codes.len() + 4 * self.scales.len()
    }

    /// Writes the values of some rows.
    pub fn decode(&self, rows: Range<usize>, values: &mut [f32]) {
        rows.zip(values.chunks_exact_mut(self.inner)).for_each(|(row, values)| self.decode_part(row, 0, values));
    }

    /// Writes the values of some columns of a row: of whole groups, or whole runs of a group that is a row.
    fn decode_part(&self, row: usize, column: usize, values: &mut [f32]) {
        let start = row * self.inner + column;
        let (scales, group) = (&self.scales[start / self.group..], self.group.min(values.len()));
        match &self.codes {
            Codes::Bytes(codes) => decode(&codes[start..], scales, group, values),
            Codes::Nibbles(codes, table) => dots::decode_nibbles(&codes[start / 2..], table, scales, group, values),
        }
    }

    /// Dot products of a few rows with rows of the matrix, those of each row one after another.
    fn dots(&self, x: &Interleaved, first: usize, out: &mut [f32]) {
        let (start, scales) = (first * self.inner, &self.scales[first * (self.inner / self.group)..]);
        let is_done = match &self.codes {
            Codes::Nibbles(codes, table) => {
                let stored = Stored { values: &codes[start / 2..], stride: self.inner / 2, group: self.group / 2, scales };
                dots::of_nibbles(x, stored, table, out)
            }
            Codes::Bytes(codes) => {
                let stored = Stored { values: &codes[start..], stride: self.inner, group: self.group, scales };
                dots::are_supported(self.group, self.inner) && dots::of_codes(x, stored, out) || self.dots_of_row(x, stored, out)
            }
        };
        if !is_done {
            of_decoded(x, out, |row, values| self.decode_part(first + row, 0, values));
        }
    }

    /// As `dots`, for a single row. False if there are several, or the loops do not support the groups.
    fn dots_of_row(&self, x: &Interleaved, stored: Stored<u8>, out: &mut [f32]) -> bool {
        let is_supported = self.group == self.inner || self.group.is_multiple_of(LANES);
        x.only().filter(|_| is_supported).map(|x| dots_of_row(x, stored, out)).is_some()
    }

    fn decoded(&self, rows: Range<usize>) -> Scratch {
        let mut values = Scratch::new(rows.len() * self.inner);
        self.decode(rows, &mut values);
        values
    }
}

impl Right for CodedMatrix {
    fn pack(&self, first: usize, from: usize, panel: &mut [f32]) {
        let count = PANEL.min(self.shape()[0] - first);
        let end = from + panel.len() / PANEL;
        // A group that is a row can be divided.
        let unit = match (&self.codes, self.group == self.inner) {
            (Codes::Bytes(_), true) => 1,
            (Codes::Bytes(_), false) => self.group,
            (Codes::Nibbles(..), true) => LANES,
            (Codes::Nibbles(..), false) => self.group.max(LANES),
        };
        let columns = from / unit * unit..end.next_multiple_of(unit);
        let mut values = Scratch::new(count * columns.len());
        for (row, values) in (first..).zip(values.chunks_exact_mut(columns.len().max(1))) {
            self.decode_part(row, columns.start, values);
        }
        Columns { values: &values, count, stride: columns.len() }.pack(0, from - columns.start, panel);
    }
}

impl LinearWeight for CodedMatrix {
    fn one_row(&self, x: &[f32], epilogue: Epilogue, out: &mut [f32]) {
        let x = Interleaved::new(x, 1);
        by_columns(self.inner, 1, epilogue, out, |first, sums| self.dots(&x, first, sums));
    }

    fn few_rows(&self, x: &[f32], rows: usize, epilogue: Epilogue, out: &mut [f32]) {
        let [width, inner] = self.shape();
        if rows <= MAX_ROWS {
            return by_rows(x, [rows, width], epilogue, out, |x, first, out| self.dots(x, first, out));
        }
        few_rows::product_by_columns::<f32>(x, rows, [inner, width], epilogue, out, |first, count, multiply| {
            multiply(&Columns { values: &self.decoded(first..first + count)[..], count, stride: inner });
        });
    }
}

simd! {
    fn decode(codes: &[u8], scales: &[f32], group: usize, values: &mut [f32]) {
        prefetch(&codes[..values.len()], PREFETCHED);
        for ((values, codes), scale) in values.chunks_exact_mut(group).zip(codes.chunks_exact(group)).zip(scales) {
            // Most groups are whole runs, whose fixed length the compiler knows.
            let ((runs, rest), (codes, last)) = (values.as_chunks_mut::<LANES>(), codes.as_chunks::<LANES>());
            for (values, codes) in runs.iter_mut().zip(codes) {
                for lane in 0..LANES {
                    values[lane] = f32::from(codes[lane] as i8) * scale;
                }
            }
            for (value, code) in rest.iter_mut().zip(last) {
                *value = f32::from(*code as i8) * scale;
            }
        }
    }
}

#[inline(always)]
fn add(sums: &mut [f32; LANES], codes: &[u8; LANES], scale: f32, x: &[f32; LANES]) {
    for lane in 0..LANES {
        sums[lane] += f32::from(codes[lane] as i8) * scale * x[lane];
    }
}

simd! {
    /// Dot products of a row with consecutive rows of codes. Groups are rows or multiples of the number of
    /// lanes.
    fn dots_of_row(x: &[f32], stored: Stored<u8>, out: &mut [f32]) {
        let Stored { values, stride, group, scales } = stored;
        let rows = values.chunks_exact(stride).zip(scales.chunks_exact(stride / group));
        for (out, (codes, scales)) in out.iter_mut().zip(rows) {
            prefetch(codes, PREFETCHED);
            let mut sums = [0f32; LANES];
            for ((codes, x), scale) in codes.chunks_exact(group).zip(x.chunks_exact(group)).zip(scales) {
                for (codes, x) in codes.as_chunks::<LANES>().0.iter().zip(x.as_chunks::<LANES>().0) {
                    add(&mut sums, codes, *scale, x);
                }
            }
            // Only a group that is a row can have a remainder.
            let (last, rest) = (codes.as_chunks::<LANES>().1, x.as_chunks::<LANES>().1);
            if !last.is_empty() {
                add(&mut sums, &padded(last), scales[0], &padded(rest));
            }
            *out = total(&sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::activation::ActivationFunction;
    use super::super::epilogue::Fused;
    use super::super::linear::product;
    use super::*;

    #[test]
    fn products_are_bitwise_equal_to_those_of_the_values() {
        let numbers = |count: usize, seed: usize| (0..count).map(|i| (((i + seed) * 7919 % 4093) as f32 - 2046.0) / 1021.0).collect::<Vec<f32>>();
        let shapes = [
            (1, 1, 1),
            (576, 576, 70),
            (70, 70, 33),
            (96, 32, 5),
            (64, 16, 40),
            (80, 16, 7),
            (16, 16, 5),
            (130, 65, 9),
            (128, 128, 3000),
            (2112, 96, 40),
            (1100, 1100, 9),
        ];
        for ((inner, group, width), different) in shapes.into_iter().flat_map(|shape| [251, 16, 9].map(|different| (shape, different))) {
            let codes: Vec<u8> = (0..inner * width).map(|i| (i * 7919 % different * 15 % 256) as u8).collect();
            let scales = numbers(inner / group * width, 5);
            let coded = CodedMatrix::new(inner, group, codes.clone(), scales.clone()).unwrap();
            let is_packed = dots::are_available() && different <= 16 && inner % LANES == 0;
            assert_eq!((coded.shape(), coded.bytes()), ([width, inner], (codes.len() >> usize::from(is_packed)) + 4 * scales.len()));
            let is_large = codes.len() >= 256;
            assert!(!is_large || coded.bytes() == CodedMatrix::bytes_of(codes.len(), [inner, group], different), "{inner} {group} {different}");
            let values: Vec<f32> = codes.iter().enumerate().map(|(i, code)| f32::from(*code as i8) * scales[i / group]).collect();
            let plain = Columns { values: &values[..], count: width, stride: inner };
            for rows in [1, 2, 5, 17, 33, 100] {
                let (x, c) = (numbers(rows * inner, 1), numbers(rows * width, 3));
                let steps = [Fused::AddToColumns(&c[..width]), Fused::Activate(ActivationFunction::Silu), Fused::Add(&c)];
                for accumulate in [false, true] {
                    let epilogue = Epilogue { steps: &steps, accumulate };
                    let (mut want, mut have) = (c.clone(), c.clone());
                    product(&x, rows, inner, &plain, width, epilogue, &mut want);
                    product(&x, rows, inner, &coded, width, epilogue, &mut have);
                    assert_eq!(have, want, "{rows} {inner} {group} {width}");
                }
            }
        }
    }

    #[test]
    fn sizes_must_match() {
        assert!(CodedMatrix::new(4, 3, vec![0; 8], vec![1.0; 2]).is_none());
        assert!(CodedMatrix::new(4, 4, vec![0; 9], vec![1.0; 2]).is_none());
        assert!(CodedMatrix::new(4, 2, vec![0; 8], vec![1.0; 3]).is_none());
        assert!(CodedMatrix::new(0, 0, Vec::new(), Vec::new()).is_none());
    }
}
