//! Freed memory of the heap.

/// Returns the memory of freed allocations to the system. glibc retains it for later allocations: between
/// two stages of a run that is as much as the peak of the first stage, which would add to the peak of the
/// second. Other allocators return memory without a request.
pub fn release_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: the declaration of malloc.h. It may be called at any time, from any thread.
        #[allow(unsafe_code)]
        unsafe extern "C" {
            safe fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    /// The allocator keeps free blocks below others that are still in use.
    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn freed_memory_is_returned() {
        use crate::work::resident;
        let blocks: Vec<Vec<u8>> = (0..1024).map(|_| vec![1; 1 << 16]).collect();
        let used: Vec<Vec<u8>> = blocks.into_iter().skip(63).step_by(64).collect();
        // Other tests of the process allocate memory at the same time, so that some measurements differ.
        let before = resident().unwrap();
        super::release_freed();
        let after = (0..20).map(|_| resident().unwrap()).min().unwrap();
        assert!(after + (32 << 20) < before, "{before} and {after} bytes, with {} blocks in use", used.len());
    }
}
