//! Sparse runs: a bitmask and the nonzero elements.
//!
//! Bit `i` of the mask is bit `i % 8` of byte `i / 8`. "Zero" means that all bits are zero, so that -0.0
//! is preserved.

/// Appends the mask and the nonzero elements of a run. The length of every run except the last must be a
/// multiple of eight.
pub fn pack(elements: &[u8], size: usize, mask: &mut Vec<u8>, values: &mut Vec<u8>) {
    match size {
        1 => pack_sized::<1>(elements, mask, values),
        2 => pack_sized::<2>(elements, mask, values),
        4 => pack_sized::<4>(elements, mask, values),
        _ => pack_sized::<8>(elements, mask, values),
    }
}

fn pack_sized<const N: usize>(elements: &[u8], mask: &mut Vec<u8>, values: &mut Vec<u8>) {
    let elements = elements.as_chunks::<N>().0;
    let start = values.len();
    values.resize(start + elements.len() * N, 0);
    let out = values[start..].as_chunks_mut::<N>().0;
    let mut nonzeros = 0;
    for eight in elements.chunks(8) {
        let mut byte = 0u8;
        for (bit, element) in eight.iter().enumerate() {
            let nonzero = *element != [0; N];
            // Every element is stored; a zero is overwritten by the next element.
            out[nonzeros] = *element;
            nonzeros += usize::from(nonzero);
            byte |= u8::from(nonzero) << bit;
        }
        mask.push(byte);
    }
    values.truncate(start + nonzeros * N);
}

/// Number of elements with at least one set bit.
pub fn count(elements: &[u8], size: usize) -> u64 {
    let zeros = match size {
        1 => super::scan::count_bytes(elements, 0),
        2 => elements.as_chunks::<2>().0.iter().filter(|e| **e == [0; 2]).count() as u64,
        4 => elements.as_chunks::<4>().0.iter().filter(|e| **e == [0; 4]).count() as u64,
        _ => elements.as_chunks::<8>().0.iter().filter(|e| **e == [0; 8]).count() as u64,
    };
    (elements.len() / size.max(1)) as u64 - zeros
}

/// Number of set bits among the first `elements` bits.
pub fn ones(mask: &[u8], elements: usize) -> usize {
    let full_bytes = elements / 8;
    let mut sum: usize = mask[..full_bytes].iter().map(|b| b.count_ones() as usize).sum();
    if !elements.is_multiple_of(8) {
        sum += (mask[full_bytes] & ((1 << (elements % 8)) - 1)).count_ones() as usize;
    }
    sum
}

/// Scatters the nonzero values into `output`, which must be filled with zeros. `values` must contain
/// exactly [`ones`] elements.
pub fn unpack(mask: &[u8], values: &[u8], size: usize, output: &mut [u8]) {
    let mut values = values.chunks_exact(size);
    for (i, out) in output.chunks_exact_mut(size).enumerate() {
        if mask[i / 8] >> (i % 8) & 1 == 1
            && let Some(value) = values.next()
        {
            out.copy_from_slice(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpack_inverts_pack() {
        for size in [1usize, 2, 4, 8] {
            let elements: Vec<u8> = (0..13 * size).map(|i| if (i / size) % 3 == 0 { 0 } else { i as u8 }).collect();
            let (mut mask, mut values) = (Vec::new(), Vec::new());
            pack(&elements, size, &mut mask, &mut values);
            assert_eq!(mask.len(), 2);
            assert_eq!(ones(&mask, 13) * size, values.len());
            assert_eq!(count(&elements, size) as usize * size, values.len());
            let mut back = vec![0; elements.len()];
            unpack(&mask, &values, size, &mut back);
            assert_eq!(back, elements);
        }
    }

    #[test]
    fn negative_zero_is_a_value() {
        let (mut mask, mut values) = (Vec::new(), Vec::new());
        pack(&(-0.0f32).to_le_bytes(), 4, &mut mask, &mut values);
        assert_eq!((mask, values), (vec![1], (-0.0f32).to_le_bytes().to_vec()));
    }
}
