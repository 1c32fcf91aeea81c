//! Pruning of small elements.

use super::Float;

simd! {
    /// Copies elements whose magnitude exceeds `threshold`. The others become positive zero.
    pub fn keep_above[F: Float](input: &[u8], output: &mut [u8], threshold: F::Magnitude) {
        for (&e, out) in F::split(input).iter().zip(F::split_mut(output)) {
            *out = if F::magnitude(e) > threshold { e } else { F::ZERO };
        }
    }
}

simd! {
    /// Copies elements whose magnitude is at least `threshold`. The others become positive zero.
    pub fn keep_from[F: Float](input: &[u8], output: &mut [u8], threshold: F::Magnitude) {
        for (&e, out) in F::split(input).iter().zip(F::split_mut(output)) {
            *out = if F::magnitude(e) >= threshold { e } else { F::ZERO };
        }
    }
}

/// As [`keep_from`], but also removes the first `ties` elements of exactly that magnitude.
pub fn keep_from_but_first<F: Float>(input: &[u8], output: &mut [u8], threshold: F::Magnitude, mut ties: u64) {
    for (&e, out) in F::split(input).iter().zip(F::split_mut(output)) {
        let magnitude = F::magnitude(e);
        let tie = magnitude == threshold && ties > 0;
        ties -= u64::from(tie);
        *out = if magnitude >= threshold && !tie { e } else { F::ZERO };
    }
}

/// Retains the `n` largest of every `m` elements at a distance of `stride`. Of equal elements, the later
/// ones are retained, as with a threshold. The length of `input` must be a multiple of `m * stride`
/// elements.
pub fn keep_n_of_m<F: Float>(input: &[u8], output: &mut [u8], n: usize, m: usize, stride: usize) {
    output.copy_from_slice(input);
    let input = F::split(input);
    let output = F::split_mut(output);
    if (n, m, stride) == (2, 4, 1) {
        keep_2_of_4::<F>(input, output);
        return;
    }
    let mut order: Vec<usize> = Vec::with_capacity(m);
    for run in (0..input.len()).step_by(m * stride) {
        for lane in run..run + stride {
            order.clear();
            order.extend((0..m).map(|i| lane + i * stride));
            order.sort_by_key(|&i| F::magnitude(input[i]));
            for &i in &order[..m - n] {
                output[i] = F::ZERO;
            }
        }
    }
}

fn keep_2_of_4<F: Float>(input: &[F::Bytes], output: &mut [F::Bytes]) {
    for (quad, out) in input.as_chunks::<4>().0.iter().zip(output.as_chunks_mut::<4>().0) {
        let m = quad.map(F::magnitude);
        let beats = |a: usize, b: usize| u8::from(m[a] > m[b]);
        // Rank of an element: the number of smaller elements, where the earlier one of equals counts as
        // smaller.
        let rank = [
            beats(0, 1) + beats(0, 2) + beats(0, 3),
            1 - beats(0, 1) + beats(1, 2) + beats(1, 3),
            2 - beats(0, 2) - beats(1, 2) + beats(2, 3),
            3 - beats(0, 3) - beats(1, 3) - beats(2, 3),
        ];
        for (out, rank) in out.iter_mut().zip(rank) {
            if rank < 2 {
                *out = F::ZERO;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::F32;
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn ties_are_broken_by_position() {
        let input = bytes(&[1.0, -2.0, 2.0, 3.0, 2.0]);
        let mut output = vec![0; input.len()];
        let two = F32::magnitude(2f32.to_le_bytes());
        keep_from_but_first::<F32>(&input, &mut output, two, 2);
        assert_eq!(output, bytes(&[0.0, 0.0, 0.0, 3.0, 2.0]));
        keep_above::<F32>(&input, &mut output, two);
        assert_eq!(output, bytes(&[0.0, 0.0, 0.0, 3.0, 0.0]));
        keep_from::<F32>(&input, &mut output, two);
        assert_eq!(output, bytes(&[0.0, -2.0, 2.0, 3.0, 2.0]));
    }

    #[test]
    fn two_of_four_equals_the_general_case_for_every_order() {
        let levels = [0.0f32, 1.0, 2.0, 3.0];
        for code in 0..256usize {
            let quad: Vec<f32> = (0..4).map(|i| levels[(code >> (2 * i)) & 3]).collect();
            let input = bytes(&quad);
            let mut fast = vec![0; 16];
            keep_n_of_m::<F32>(&input, &mut fast, 2, 4, 1);
            // The same four numbers twice, interleaved, use the general code path.
            let doubled = bytes(&quad.iter().flat_map(|v| [*v, *v]).collect::<Vec<_>>());
            let mut general = vec![0; 32];
            keep_n_of_m::<F32>(&doubled, &mut general, 2, 4, 2);
            let lane: Vec<u8> = general.chunks_exact(8).flat_map(|pair| pair[..4].to_vec()).collect();
            assert_eq!(fast, lane, "{quad:?}");
        }
    }
}
