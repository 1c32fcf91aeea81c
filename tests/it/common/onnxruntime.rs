//! Whether ONNX Runtime is installed.

/// Whether the comparisons with ONNX Runtime can run. Without it they are skipped, except where
/// `COMPRESS_TEST_REQUIRE_ONNXRUNTIME` is set, as in the gate: there every test that would skip one
/// fails.
pub fn has_onnx_runtime() -> bool {
    let found = compress_onnx::runtime::library();
    let required = std::env::var_os("COMPRESS_TEST_REQUIRE_ONNXRUNTIME").is_some();
    assert!(found.is_ok() || !required, "ONNX Runtime is required: {}", found.err().map(|e| e.to_string()).unwrap_or_default());
    found.is_ok()
}
