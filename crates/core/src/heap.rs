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
    /// The allocator keeps free blocks below others that are still in use. Runs itself in a new process,
    /// because other tests of a process allocate memory at the same time.
    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn freed_memory_is_returned() {
        use crate::work::resident;
        const CHILD: &str = "COMPRESS_TEST_HEAP";
        if std::env::var_os(CHILD).is_none() {
            let mut test = std::process::Command::new(std::env::current_exe().unwrap());
            let output = test.args(["--exact", "heap::tests::freed_memory_is_returned"]).env(CHILD, "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let blocks: Vec<Vec<u8>> = (0..1024).map(|_| vec![1; 1 << 16]).collect();
        let used: Vec<Vec<u8>> = blocks.into_iter().skip(63).step_by(64).collect();
        let before = resident().unwrap();
        super::release_freed();
        let after = resident().unwrap();
        assert!(after + (32 << 20) < before, "{before} and {after} bytes, with {} blocks in use", used.len());
    }
}
