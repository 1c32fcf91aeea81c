//! Histograms with bins of equal width, and statistics of activations.

use crate::quantize::ROUND;

simd! {
    /// The smallest and largest value, and whether all values are finite.
    pub fn extremes(values: &[f32]) -> (f32, f32, bool) {
        const LANES: usize = 32;
        let (mut low, mut high, mut odd) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES], [0u32; LANES]);
        let (blocks, tail) = values.as_chunks::<LANES>();
        for block in blocks {
            for lane in 0..LANES {
                let x = block[lane];
                low[lane] = if x < low[lane] { x } else { low[lane] };
                high[lane] = if x > high[lane] { x } else { high[lane] };
                odd[lane] |= u32::from(x.abs() > f32::MAX) | u32::from(x.is_nan());
            }
        }
        let least = |a: f32, b: f32| if b < a { b } else { a };
        let most = |a: f32, b: f32| if b > a { b } else { a };
        let low = low.into_iter().chain(tail.iter().copied()).fold(f32::INFINITY, least);
        let high = high.into_iter().chain(tail.iter().copied()).fold(f32::NEG_INFINITY, most);
        (low, high, odd.iter().all(|odd| *odd == 0) && tail.iter().all(|x| x.is_finite()))
    }
}

/// The bin of a value given in units of bins. NaN is counted in the lowest bin. `as i32` saturates,
/// which would prevent vectorization.
#[inline(always)]
fn bin(at: f32, half: i32) -> i32 {
    let (lowest, highest) = (-(half as f32), half as f32 - 1.0);
    let at = at.floor();
    let at = if at > lowest { at } else { lowest };
    let at = if at < highest { at } else { highest };
    ((at + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(half)
}

simd! {
    /// The sum of the values and the sum of their squares.
    pub fn sums(values: &[f32]) -> (f64, f64) {
        // Fixed, so that results do not depend on the instruction set.
        const LANES: usize = 16;
        let (mut sums, mut squares) = ([0f64; LANES], [0f64; LANES]);
        let (blocks, tail) = values.as_chunks::<LANES>();
        // Separate loops: in a single loop, compilers would pair a sum with its square instead of with
        // the adjacent sum.
        for blocks in blocks.chunks(64) {
            for block in blocks {
                for lane in 0..LANES {
                    sums[lane] += f64::from(block[lane]);
                }
            }
            for block in blocks {
                for lane in 0..LANES {
                    squares[lane] += f64::from(block[lane]) * f64::from(block[lane]);
                }
            }
        }
        let rest = |sum: f64, term: fn(f64) -> f64| tail.iter().fold(sum, |sum, x| sum + term(f64::from(*x)));
        (rest(sums.iter().sum(), |x| x), rest(squares.iter().sum(), |x| x * x))
    }
}

simd! {
    /// Computes bin numbers for `2 · half` bins of width `1 / inverse` around zero.
    fn number(values: &[f32], inverse: f32, half: i32, out: &mut [i32]) {
        for (value, number) in values.iter().zip(out) {
            *number = bin(value * inverse, half);
        }
    }
}

/// Number of tables used in rotation: consecutive values often have the same bin, and an increment must
/// wait for the previous one of the same counter.
const TABLES: usize = 4;

/// Number of values per turn, so that 16-bit counters cannot overflow.
const TURN: usize = 1 << 17;

/// A bin counter. 32-bit counters saturate.
pub trait Counter: Copy + Into<u64> {
    /// Increases the counter.
    fn increase(&mut self, by: u64);

    /// The sum of two counters.
    fn plus(self, other: Self) -> Self;
}

impl Counter for u64 {
    fn increase(&mut self, by: u64) {
        *self += by;
    }

    fn plus(self, other: u64) -> u64 {
        self + other
    }
}

impl Counter for u32 {
    fn increase(&mut self, by: u64) {
        *self = self.saturating_add(u32::try_from(by).unwrap_or(u32::MAX));
    }

    fn plus(self, other: u32) -> u32 {
        self.saturating_add(other)
    }
}

/// Calls `visit` with the number and the count of each bin that is not empty.
#[inline]
pub fn for_each_occupied<C: Counter>(counts: &[C], mut visit: impl FnMut(usize, C)) {
    // Most values of a channel are in few bins: whole runs are empty.
    const RUN: usize = 16;
    for (index, run) in counts.chunks(RUN).enumerate() {
        if run.iter().fold(0, |all, count| all | (*count).into()) > 0 {
            let bins = (index * RUN..).zip(run).filter(|(_, count)| (**count).into() > 0);
            bins.for_each(|(bin, count)| visit(bin, *count));
        }
    }
}

/// Counts values in bins of width `1 / inverse` around zero.
pub fn count<C: Counter, const BINS: usize>(values: &[f32], inverse: f32, counts: &mut [C; BINS]) {
    let numbered = |values: &[f32], sink: &mut dyn FnMut(&[i32])| {
        let mut numbers = [0; 256];
        for run in values.chunks(256) {
            number(run, inverse, BINS as i32 / 2, &mut numbers);
            sink(&numbers[..run.len()]);
        }
    };
    if values.len() < TABLES * BINS {
        return numbered(values, &mut |numbers| numbers.iter().for_each(|bin| counts[*bin as usize % BINS].increase(1)));
    }
    for turn in values.chunks(TURN) {
        let mut tables = [[0u16; BINS]; TABLES];
        numbered(turn, &mut |numbers| {
            let (groups, rest) = numbers.as_chunks::<TABLES>();
            for bins in groups {
                for lane in 0..TABLES {
                    tables[lane][bins[lane] as usize % BINS] += 1;
                }
            }
            rest.iter().for_each(|bin| tables[0][*bin as usize % BINS] += 1);
        });
        tables.iter().for_each(|table| counts.iter_mut().zip(table).for_each(|(count, found)| count.increase(u64::from(*found))));
    }
}

simd! {
    /// Adds a row, with one value per channel, to the statistics of the channels.
    pub fn add_row(row: &[f32], low: &mut [f32], high: &mut [f32], sums: &mut [f64], squares: &mut [f64]) {
        for ((((x, low), high), sum), square) in row.iter().zip(low).zip(high).zip(sums).zip(squares) {
            *low = low.min(*x);
            *high = high.max(*x);
            let x = f64::from(*x);
            *sum += x;
            *square += x * x;
        }
    }
}

simd! {
    /// Computes the bin numbers of a row's values, with a different bin width for each channel.
    pub fn number_row(row: &[f32], inverses: &[f32], half: i32, out: &mut [i32]) {
        for ((x, inverse), number) in row.iter().zip(inverses).zip(out) {
            *number = bin(x * inverse, half);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted<const BINS: usize>(values: &[f32], inverse: f32) {
        let (mut have, mut want) = (vec![0u64; BINS], vec![0u64; BINS]);
        for _ in 0..2 {
            have.as_chunks_mut::<BINS>().0.iter_mut().for_each(|have| count(values, inverse, have));
            values.iter().for_each(|x| want[((x * inverse).floor().clamp(-(BINS as f32) / 2.0, BINS as f32 / 2.0 - 1.0) + BINS as f32 / 2.0) as usize] += 1);
        }
        assert_eq!(have, want);
    }

    /// More than a turn with a remainder, and all values in one bin, the extreme case for a table.
    #[test]
    fn many_values_are_counted() {
        let count = 3 * TURN + 5;
        let mixed: Vec<f32> = (0..count).map(|i| ((i * 7919) % 10_007) as f32 / 700.0 - 7.0).collect();
        for values in [vec![0.5; count], mixed.clone(), mixed[..TABLES * 256 + 3].to_vec(), mixed[..99].to_vec()] {
            counted::<256>(&values, 20.0);
            counted::<8192>(&values, 500.0);
        }
    }
}
