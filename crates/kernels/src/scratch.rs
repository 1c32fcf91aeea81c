//! Reusable buffers. New memory costs a page fault per 4 KiB, which is as expensive as multiplying it.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};

use rayon::prelude::*;

/// Maximum number of floats that a thread retains for reuse.
const RETAINED: usize = 1 << 22;

thread_local! {
    static POOL: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of floats with undefined contents, returned to its thread's pool on drop.
pub struct Scratch {
    /// At least `length` elements: a buffer that is used with different lengths is not cleared again.
    buffer: Vec<f32>,
    length: usize,
}

impl Scratch {
    /// A buffer with this length.
    pub fn new(length: usize) -> Scratch {
        let found = POOL.with_borrow_mut(|pool| {
            // The smallest buffer that is large enough, otherwise the largest one.
            let fit = (0..pool.len()).min_by_key(|i| if pool[*i].capacity() >= length { pool[*i].capacity() } else { usize::MAX - pool[*i].capacity() });
            fit.map(|i| pool.swap_remove(i))
        });
        // A buffer that is too small is dropped: growing it would copy its contents, and double its capacity.
        match found.filter(|buffer| buffer.capacity() >= length) {
            Some(mut buffer) => {
                buffer.resize(buffer.len().max(length), 0.0);
                Scratch { buffer, length }
            }
            None => Scratch { buffer: vec![0.0; length], length },
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        // The pool is not available while the thread ends.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.iter().map(Vec::capacity).sum::<usize>() + buffer.capacity() <= RETAINED {
                pool.push(buffer);
            }
        });
    }
}

impl Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.buffer[..self.length]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[..self.length]
    }
}

/// Number of floats that are cleared at once.
const PIECE: usize = 1 << 10;
/// Range of sizes for which the allocator reuses memory. Larger allocations come from the system, which
/// clears them.
const REUSED: Range<usize> = 1 << 17..1 << 23;

/// A vector of zeros. Clearing reused memory takes long enough that it is parallelized.
pub fn cleared(count: usize) -> Vec<f32> {
    if !REUSED.contains(&count) {
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
    fn zeros_have_the_requested_length() {
        for count in [0, 7, REUSED.start, REUSED.start + 1, REUSED.start + PIECE + 3] {
            assert_eq!(cleared(count), vec![0.0; count]);
        }
    }

    #[test]
    fn buffers_are_reused() {
        let mut first = Scratch::new(100);
        first[7] = 1.0;
        drop(first);
        let again = Scratch::new(50);
        assert_eq!((again.len(), again[7]), (50, 1.0));
        drop(again);
        // A larger buffer replaces it, with exactly the requested capacity.
        let larger = Scratch::new(101);
        assert_eq!((larger.len(), larger.buffer.capacity()), (101, 101));
        drop(larger);
        assert_eq!(POOL.with_borrow(|pool| pool.iter().map(Vec::capacity).collect::<Vec<_>>()), [101]);
    }
}
