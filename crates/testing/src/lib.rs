//! Tests that need programs and libraries which a machine may lack.

use std::fmt::Display;

/// Fails tests that [`available`] would skip.
const VARIABLE: &str = "COMPRESS_TEST_REQUIRE_ALL";

/// Whether a program or library was found. Without it a test skips what needs it, after a message.
///
/// # Panics
///
/// If it was not found and `COMPRESS_TEST_REQUIRE_ALL` is set, as in the gate.
pub fn available<T>(name: &str, found: Result<T, impl Display>) -> bool {
    let Err(reason) = found else { return true };
    assert!(std::env::var_os(VARIABLE).is_none(), "{name} is required: {reason}");
    eprintln!("not tested: {name} is not available: {reason}");
    false
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::Command;

    use super::*;

    /// Runs itself in new processes, because the variable applies to a whole process.
    #[test]
    fn skipped_tests_fail_where_everything_is_required() {
        const MISSING: &str = "COMPRESS_TEST_MISSING";
        if std::env::var_os(MISSING).is_some() {
            assert!(!available("a library", Err::<(), _>("not found")));
        } else {
            assert!(available("a library", Ok::<_, String>(())));
            let test = || {
                let mut test = Command::new(std::env::current_exe().unwrap());
                test.env(MISSING, "1").env_remove(VARIABLE);
                test
            };
            assert!(test().output().unwrap().status.success());
            assert!(!test().env(VARIABLE, "1").output().unwrap().status.success());
        }
    }
}
