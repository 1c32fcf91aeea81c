//! Dot products of a few rows with stored numbers that are converted in the registers of AVX-512, because the
//! compiler does not vectorize conversions whose results are used for several rows, and keeps the sums of
//! eight rows in memory. Sums are bitwise equal to those of the portable loops (`one_row`).

#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::interleaved::by_number;
use super::interleaved::{Interleaved, LANES};
use crate::simd::{self, Level};

/// Columns of stored numbers.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a, E> {
    pub values: &'a [E],
    /// Distance between columns, in elements of the slice.
    pub stride: usize,
    /// Number of elements of the slice that share a scale: a column, whole runs, or half of one.
    pub group: usize,
    /// The scale of each group.
    pub scales: &'a [f32],
}

impl<'a, E> Stored<'a, E> {
    /// Columns without scales.
    pub fn floats(values: &'a [E], stride: usize) -> Stored<'a, E> {
        Stored { values, stride, group: usize::MAX, scales: &[] }
    }
}

/// Number of bytes of a run of 4-bit codes. The lower bits are the codes of the first half of the run, the
/// upper ones those of the second half.
pub(super) const NIBBLES: usize = LANES / 2;

/// Declares functions that multiply a few rows with columns.
macro_rules! products {
    ($($(#[$meta:meta])* fn $name:ident($stored:ident: Stored<$element:ty> $(, $table:ident)?) |$run:ident, $scales:ident| $load:expr;)+) => {
        $(avx512! {
            $(#[$meta])*
            pub(super) fn $name(x: &Interleaved, $stored: Stored<$element>, $($table: &[f32; 16],)? out: &mut [f32]) {
                $(let $table = bytemuck::cast(*$table);)?
                let inner = x.inner;
                x.by_groups(out, |x, rows, out| {
                    by_number!(rows, N => registers::columns::<_, _, N>(x, inner, $stored, |$run, $scales| $load, out));
                });
            }
        })+
    };
}

products! {
    /// Products with f32 numbers.
    fn of_f32(stored: Stored<f32>) |run, _scales| registers::of_f32(run);
    /// Products with the bits of bf16 numbers.
    fn of_bf16(stored: Stored<u16>) |run, _scales| registers::of_bf16(run);
    /// Products with the bits of f16 numbers.
    fn of_f16(stored: Stored<u16>) |run, _scales| registers::of_f16(run);
    /// Products with int8 codes.
    fn of_codes(stored: Stored<u8>) |run, scales| registers::of_codes(run, scales);
    /// Products with 4-bit codes, which select the values of a table.
    fn of_nibbles(stored: Stored<u8>, table) |run, scales| registers::of_nibbles(run, table, scales);
}

/// Whether the products support groups of this number of elements in rows of `inner` elements.
pub(super) fn are_supported(group: usize, inner: usize) -> bool {
    group == inner || group.is_multiple_of(LANES) || group == LANES / 2 && inner.is_multiple_of(LANES)
}

/// The values of whole runs of 4-bit codes, of which `group` consecutive ones share a scale.
pub(super) fn decode_nibbles(codes: &[u8], table: &[f32; 16], scales: &[f32], group: usize, values: &mut [f32]) {
    if select(codes, table, scales, group, values) {
        return;
    }
    for (at, run) in values.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        for (lane, value) in run.iter_mut().enumerate() {
            let code = codes[at * NIBBLES + lane % NIBBLES] >> (lane / NIBBLES * 4) & 15;
            *value = table[usize::from(code)] * scales[(at * LANES + lane) / group];
        }
    }
}

avx512! {
    fn select(codes: &[u8], table: &[f32; 16], scales: &[f32], group: usize, values: &mut [f32]) {
        let table = bytemuck::cast(*table);
        let splat = |at: usize| bytemuck::cast([scales[at / group]; 16]);
        for (index, (codes, values)) in codes.as_chunks::<NIBBLES>().0.iter().zip(values.as_chunks_mut::<LANES>().0).enumerate() {
            let at = index * LANES;
            *values = bytemuck::cast(registers::of_nibbles(codes, table, [splat(at), splat(at + LANES / 2)]));
        }
    }
}

/// Whether the processor has the instructions.
pub(super) fn are_available() -> bool {
    cfg!(all(target_arch = "x86_64", not(miri))) && simd::level() >= Level::Avx512
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod registers {
    use std::arch::x86_64::{
        __m128i, __m256i, __m512, __m512i, _mm512_add_ps, _mm512_castsi512_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32,
        _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set1_ps as splat, _mm512_setzero_ps, _mm512_slli_epi32,
        _mm512_srli_epi32,
    };

    use super::super::interleaved::{LANES, PREFETCHED, padded, total};
    use super::{NIBBLES, Stored};
    use crate::simd::prefetch;

    /// [`LANES`] numbers.
    type Run = [__m512; 2];

    #[target_feature(enable = "avx512f")]
    pub fn of_f32(run: &[f32; LANES]) -> Run {
        bytemuck::cast(*run)
    }

    #[target_feature(enable = "avx512f")]
    pub fn of_bf16(run: &[u16; LANES]) -> Run {
        let halves: [__m256i; 2] = bytemuck::cast(*run);
        halves.map(|half| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half))))
    }

    #[target_feature(enable = "avx512f")]
    pub fn of_f16(run: &[u16; LANES]) -> Run {
        let halves: [__m256i; 2] = bytemuck::cast(*run);
        halves.map(|half| _mm512_cvtph_ps(half))
    }

    #[target_feature(enable = "avx512f")]
    pub fn of_codes(run: &[u8; LANES], scales: Run) -> Run {
        let halves: [__m128i; 2] = bytemuck::cast(*run);
        scaled(halves.map(|half| _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(half))), scales)
    }

    #[target_feature(enable = "avx512f")]
    pub fn of_nibbles(run: &[u8; NIBBLES], table: __m512, scales: Run) -> Run {
        let codes = _mm512_cvtepu8_epi32(bytemuck::cast::<_, __m128i>(*run));
        // The selection ignores bits above the lowest four.
        scaled([codes, _mm512_srli_epi32::<4>(codes)].map(|codes: __m512i| _mm512_permutexvar_ps(codes, table)), scales)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn scaled([first, second]: Run, scales: Run) -> Run {
        [_mm512_mul_ps(first, scales[0]), _mm512_mul_ps(second, scales[1])]
    }

    /// The products of `N` rows with all columns, those of each row one after another. `load` converts a run
    /// and multiplies its halves by their scales.
    #[target_feature(enable = "avx512f")]
    pub fn columns<E: Copy + Default, const W: usize, const N: usize>(
        x: &[f32],
        inner: usize,
        stored: Stored<E>,
        load: impl Fn(&[E; W], Run) -> Run,
        out: &mut [f32],
    ) {
        let count = out.len() / N;
        let (width, group) = (inner * W / LANES, stored.group.max(1));
        let groups = width.div_ceil(group);
        let runs = x.as_chunks::<LANES>().0.as_chunks::<N>().0;
        for column in 0..count {
            let mut sums = [[_mm512_setzero_ps(); 2]; N];
            let values = &stored.values[column * stored.stride..][..width];
            // Small groups are frequent, and the general loops take longer for them than the products.
            if group == W {
                for ((run, x), scale) in values.as_chunks::<W>().0.iter().zip(runs).zip(&stored.scales[column * groups..]) {
                    prefetch(run, PREFETCHED);
                    add(&mut sums, load(run, [splat(*scale); 2]), x);
                }
            } else if group == W / 2 && width.is_multiple_of(W) {
                for ((run, x), [first, second]) in values.as_chunks::<W>().0.iter().zip(runs).zip(stored.scales[column * groups..].as_chunks().0) {
                    prefetch(run, PREFETCHED);
                    add(&mut sums, load(run, [splat(*first), splat(*second)]), x);
                }
            } else {
                let mut x = runs.iter();
                for (index, group) in values.chunks(group).enumerate() {
                    let scales = [splat(stored.scales.get(column * groups + index).copied().unwrap_or(1.0)); 2];
                    let (whole, last) = group.as_chunks::<W>();
                    for (run, x) in whole.iter().zip(x.by_ref()) {
                        prefetch(run, PREFETCHED);
                        add(&mut sums, load(run, scales), x);
                    }
                    if let (false, Some(x)) = (last.is_empty(), x.as_slice().first()) {
                        add(&mut sums, load(&padded(last), scales), x);
                    }
                }
            }
            for row in 0..N {
                out[row * count + column] = total(&bytemuck::cast(sums[row]));
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn add<const N: usize>(sums: &mut [Run; N], weights: Run, x: &[[f32; LANES]; N]) {
        for (sums, x) in sums.iter_mut().zip(x) {
            let x: Run = bytemuck::cast(*x);
            for half in 0..2 {
                sums[half] = _mm512_add_ps(sums[half], _mm512_mul_ps(weights[half], x[half]));
            }
        }
    }
}
