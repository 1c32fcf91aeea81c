//! Whether ONNX Runtime is installed.

/// Whether the comparisons with ONNX Runtime can run. Without it they are skipped, or fail if nothing may be
/// skipped.
pub fn has_onnx_runtime() -> bool {
    compress_testing::available("ONNX Runtime", compress_onnx::runtime::library())
}
