//! The same loop compiled for several instruction sets, chosen when it runs.

use std::sync::LazyLock;

/// Declares a function whose body is compiled once for AVX-512, once for AVX2 and once for the
/// baseline, and dispatched on what the processor has. Type parameters go in square brackets.
macro_rules! simd {
    ($(#[$meta:meta])* $visible:vis fn $name:ident $([$($generic:ident : $bound:path),+])? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code)]
        $visible fn $name $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi2,popcnt")]
                fn avx512 $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? { body $(::<$($generic),+>)? ($($arg),*) }
                #[target_feature(enable = "avx2,fma,bmi2,popcnt")]
                fn avx2 $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? { body $(::<$($generic),+>)? ($($arg),*) }
                match $crate::kernel::simd::level() {
                    // SAFETY: `offered` has seen every feature that the callee enables, and `level` is no higher.
                    $crate::kernel::simd::Level::Avx512 => return unsafe { avx512 $(::<$($generic),+>)? ($($arg),*) },
                    // SAFETY: as above.
                    $crate::kernel::simd::Level::Avx2 => return unsafe { avx2 $(::<$($generic),+>)? ($($arg),*) },
                    $crate::kernel::simd::Level::Baseline => {}
                }
            }
            body $(::<$($generic),+>)? ($($arg),*)
        }
    };
}

/// What the processor offers, in the steps that are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) enum Level {
    Baseline,
    Avx2,
    Avx512,
}

/// Names a lower level than the processor's: to get the results of another machine, or to test its loops.
pub(crate) const VARIABLE: &str = "COMPRESS_SIMD";

/// The level that loops run on: the processor's, or a lower one that is asked for.
pub(crate) fn level() -> Level {
    static LEVEL: LazyLock<Level> = LazyLock::new(|| asked().ok().flatten().map_or_else(offered, |level| level.min(offered())));
    *LEVEL
}

/// The level that the environment asks for.
///
/// # Errors
/// It is none that there is.
pub(crate) fn asked() -> std::result::Result<Option<Level>, String> {
    match std::env::var(VARIABLE).as_deref() {
        Err(_) => Ok(None),
        Ok("avx512") => Ok(Some(Level::Avx512)),
        Ok("avx2") => Ok(Some(Level::Avx2)),
        Ok("baseline") => Ok(Some(Level::Baseline)),
        Ok(other) => Err(format!("`{other}` is none of avx512, avx2 and baseline")),
    }
}

#[cfg(target_arch = "x86_64")]
fn offered() -> Level {
    use std::arch::is_x86_feature_detected as has;
    if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") && has!("bmi2") && has!("popcnt") {
        Level::Avx512
    } else if has!("avx2") && has!("fma") && has!("bmi2") && has!("popcnt") {
        Level::Avx2
    } else {
        Level::Baseline
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn offered() -> Level {
    Level::Baseline
}

/// Name of the instruction set that the loops run on, for reports.
pub fn instruction_set() -> &'static str {
    match level() {
        Level::Avx512 => "avx512",
        Level::Avx2 => "avx2",
        Level::Baseline if cfg!(target_arch = "aarch64") => "neon",
        Level::Baseline => "baseline",
    }
}
