//! Buffers that are used again: fresh memory costs a page fault for every 4 KiB, which is as much as multiplying it.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

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

#[cfg(test)]
mod tests {
    use super::*;

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
