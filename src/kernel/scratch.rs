//! Buffers that are used again: fresh memory costs a page fault for every 4 KiB, which is as much as multiplying it.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};

use rayon::prelude::*;

/// Floats that a thread keeps for the next time.
const KEPT: usize = 1 << 24;

thread_local! {
    static POOL: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of floats of any value, returned to its thread's pool in the end.
pub struct Scratch(Vec<f32>);

impl Scratch {
    /// A buffer of this length.
    pub fn new(length: usize) -> Scratch {
        let mut buffer = POOL.with_borrow_mut(|pool| {
            // The smallest that is large enough, else the largest.
            let fit = (0..pool.len()).min_by_key(|i| if pool[*i].capacity() >= length { pool[*i].capacity() } else { usize::MAX - pool[*i].capacity() });
            fit.map(|i| pool.swap_remove(i)).unwrap_or_default()
        });
        buffer.resize(length, 0.0);
        Scratch(buffer)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
        // A thread that ends has no pool any more.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.iter().map(Vec::capacity).sum::<usize>() + buffer.capacity() <= KEPT {
                pool.push(buffer);
            }
        });
    }
}

impl Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

/// Floats that are cleared together.
const PIECE: usize = 1 << 10;
/// Of how many floats the allocator has memory at hand that was used before. What is larger comes from the system, which clears it.
const USED: Range<usize> = 1 << 17..1 << 23;

/// Zeros. Clearing memory that was used before takes long enough that all threads do it, and none waits for one.
pub fn cleared(count: usize) -> Vec<f32> {
    if !USED.contains(&count) {
        return vec![0.0; count];
    }
    let pieces: Vec<[f32; PIECE]> = rayon::iter::repeat_n([0.0; PIECE], count.div_ceil(PIECE)).with_min_len(16).collect();
    let mut zeros = pieces.into_flattened();
    zeros.truncate(count);
    zeros
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_as_many_as_are_asked_for() {
        for count in [0, 7, USED.start, USED.start + 1, USED.start + PIECE + 3] {
            assert_eq!(cleared(count), vec![0.0; count]);
        }
    }

    #[test]
    fn buffers_come_back() {
        let mut first = Scratch::new(100);
        first[7] = 1.0;
        drop(first);
        let again = Scratch::new(50);
        assert_eq!((again.len(), again[7]), (50, 1.0));
        assert_eq!(Scratch::new(200).len(), 200);
    }
}
