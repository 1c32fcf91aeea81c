//! Counting the values of a running model.

simd! {
    /// The smallest and the largest value, and whether all are finite.
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

simd! {
    /// Numbers of the bins of values, for `2 · half` bins of width `1 / inverse` around zero.
    pub fn number(values: &[f32], inverse: f32, half: i32, out: &mut [i32]) {
        for (value, bin) in values.iter().zip(out) {
            let at = (value * inverse).floor() as i32 + half;
            *bin = at.clamp(0, 2 * half - 1);
        }
    }
}

simd! {
    /// Adds a row, one value for each channel, to what is known of the channels.
    pub fn add_row(row: &[f32], low: &mut [f32], high: &mut [f32], sums: &mut [f64], squares: &mut [f64]) {
        for ((((x, low), high), sum), square) in row.iter().zip(low).zip(high).zip(sums).zip(squares) {
            *low = if *x < *low { *x } else { *low };
            *high = if *x > *high { *x } else { *high };
            let x = f64::from(*x);
            *sum += x;
            *square += x * x;
        }
    }
}

simd! {
    /// Numbers of the bins of a row's values, for bins of a width of its own for each channel.
    pub fn number_row(row: &[f32], inverses: &[f32], half: i32, out: &mut [i32]) {
        for ((x, inverse), bin) in row.iter().zip(inverses).zip(out) {
            *bin = ((x * inverse).floor() as i32 + half).clamp(0, 2 * half - 1);
        }
    }
}
