//! Multiversioning of loops: compiled for several instruction sets and dispatched at run time.

use std::sync::LazyLock;

/// Declares a function whose body is compiled for AVX-512, AVX2 and the baseline, and dispatched by the
/// features of the processor. Type parameters are written in square brackets, and after a semicolon the name
/// of an integer parameter.
macro_rules! simd {
    ($(#[$meta:meta])* $visible:vis fn $name:ident $([$($generic:ident : $bound:path),* $(; $count:ident)?])? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code)]
        $visible fn $name $(<$($generic: $bound,)* $(const $count: usize)?>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($generic: $bound,)* $(const $count: usize)?>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi2,popcnt")]
                fn avx512 $(<$($generic: $bound,)* $(const $count: usize)?>)? ($($arg: $ty),*) $(-> $ret)? { body $(::<$($generic,)* $($count)?>)? ($($arg),*) }
                #[target_feature(enable = "avx2,fma,bmi2,popcnt")]
                fn avx2 $(<$($generic: $bound,)* $(const $count: usize)?>)? ($($arg: $ty),*) $(-> $ret)? { body $(::<$($generic,)* $($count)?>)? ($($arg),*) }
                match $crate::simd::level() {
                    // SAFETY: `supported` checked all features of the callee, and `level` is not higher.
                    $crate::simd::Level::Avx512 | $crate::simd::Level::Amx => return unsafe { avx512 $(::<$($generic,)* $($count)?>)? ($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Level::Avx2 => return unsafe { avx2 $(::<$($generic,)* $($count)?>)? ($($arg),*) },
                    $crate::simd::Level::Baseline => {}
                }
            }
            body $(::<$($generic,)* $($count)?>)? ($($arg),*)
        }
    };
}

/// Declares a function that uses the intrinsics of AVX-512. It returns false, without effect, if the
/// processor lacks them.
#[allow(unused_macros, reason = "only kernels for model execution use intrinsics")]
macro_rules! avx512 {
    ($(#[$meta:meta])* $visible:vis fn $name:ident ($($arg:ident : $ty:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code)]
        $visible fn $name($($arg: $ty),*) -> bool {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi2,popcnt")]
                fn body($($arg: $ty),*) $body
                if $crate::simd::level() >= $crate::simd::Level::Avx512 {
                    // SAFETY: `supported` checked all features of the callee, and `level` is not higher.
                    unsafe { body($($arg),*) };
                    return true;
                }
            }
            #[cfg(not(all(target_arch = "x86_64", not(miri))))]
            let _ = ($($arg),*);
            false
        }
    };
}

/// Instruction set level of the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub enum Level {
    /// The target's default: SSE2 on x86-64.
    Baseline,
    /// AVX2, FMA, BMI2 and POPCNT.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// In addition, the tile registers of AMX for bf16.
    Amx,
}

/// Selects a lower level than the processor supports, to reproduce results of another machine or to test
/// its loops.
pub const VARIABLE: &str = "COMPRESS_SIMD";

/// The level used by all loops: the processor's, or a lower one selected with [`VARIABLE`].
pub fn level() -> Level {
    static LEVEL: LazyLock<Level> = LazyLock::new(|| requested().ok().flatten().map_or_else(supported, |level| level.min(supported())));
    *LEVEL
}

/// The level requested in the environment. Unknown names are errors.
pub fn requested() -> std::result::Result<Option<Level>, String> {
    match std::env::var(VARIABLE).as_deref() {
        Err(_) => Ok(None),
        Ok("amx") => Ok(Some(Level::Amx)),
        Ok("avx512") => Ok(Some(Level::Avx512)),
        Ok("avx2") => Ok(Some(Level::Avx2)),
        Ok("baseline") => Ok(Some(Level::Baseline)),
        Ok(other) => Err(format!("`{other}` is not one of amx, avx512, avx2 and baseline")),
    }
}

#[cfg(target_arch = "x86_64")]
fn supported() -> Level {
    use std::arch::is_x86_feature_detected as has;
    if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") && has!("bmi2") && has!("popcnt") {
        if has_tiles() { Level::Amx } else { Level::Avx512 }
    } else if has!("avx2") && has!("fma") && has!("bmi2") && has!("popcnt") {
        Level::Avx2
    } else {
        Level::Baseline
    }
}

/// Whether the processor has the tile registers of AMX and their products of bf16 numbers, and the system
/// permits this process to use them.
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
#[allow(unsafe_code)]
pub(crate) fn has_tiles() -> bool {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    static AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
        const TILES: u32 = 1 << 24;
        const BF16: u32 = 1 << 22;
        // Linux 5.16 permits the registers to all threads of a process that requests them.
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: u32 = 0x1023;
        const XFEATURE_XTILEDATA: u32 = 18;
        if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & (TILES | BF16) != TILES | BF16 {
            return false;
        }
        let mut result = ARCH_PRCTL;
        // SAFETY: the system call accesses no memory of the process.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") result,
                in("rdi") u64::from(ARCH_REQ_XCOMP_PERM),
                in("rsi") u64::from(XFEATURE_XTILEDATA),
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    });
    *AVAILABLE
}

#[cfg(all(target_arch = "x86_64", not(all(target_os = "linux", not(miri)))))]
pub(crate) fn has_tiles() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn supported() -> Level {
    Level::Baseline
}

/// Starts to fetch the memory that begins `ahead` bytes after these values into the second-level cache. The
/// automatic prefetchers of processors are too late if there is much to compute per value, and the first
/// level has too few pending fills for the distance.
#[inline(always)]
#[allow(unsafe_code)]
pub fn prefetch<T>(values: &[T], ahead: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in (0..size_of_val(values)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: prefetching has no effect on memory, and is allowed at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(values.as_ptr().cast::<i8>().wrapping_add(ahead + line)) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (values, ahead);
}

/// Name of the instruction set used by the loops, for reports.
pub fn instruction_set() -> &'static str {
    match level() {
        Level::Amx => "amx",
        Level::Avx512 => "avx512",
        Level::Avx2 => "avx2",
        Level::Baseline if cfg!(target_arch = "aarch64") => "neon",
        Level::Baseline => "baseline",
    }
}
