//! `compress doctor`

use serde_json::json;

use super::args::Global;
use super::output;
use crate::error::Result;
use crate::report::format::bytes;
use crate::report::terminal::table;
use crate::report::{Environment, Tool};

pub(super) fn run(global: &Global) -> Result<()> {
    let (tool, machine) = (Tool::default(), Environment::detect());
    if global.json {
        return output::json(&json!({ "tool": tool, "environment": machine, "threads": global.threads(), "onnxruntime": onnxruntime() }));
    }
    let unknown = || "unknown".to_owned();
    let rows = [
        ("compress", format!("{} ({})", tool.version, tool.commit.unwrap_or_else(unknown))),
        ("processor", machine.cpu.unwrap_or_else(unknown)),
        ("cores", machine.cores.to_string()),
        ("memory", machine.memory_bytes.map_or_else(unknown, bytes)),
        ("kernels", machine.simd),
        ("int8 products", if machine.int8 == "none" { "none: 16-bit sums, which saturate".into() } else { machine.int8 }),
        ("ONNX Runtime", onnxruntime()),
    ];
    output::print(&format!("{}\n", table(&["", ""], rows.map(|(name, value)| vec![name.to_owned(), value]))))
}

/// Where ONNX Runtime is, or why it cannot be used.
#[cfg(feature = "run")]
fn onnxruntime() -> String {
    crate::runtime::library().map_or_else(|e| e.to_string(), |path| path.display().to_string())
}

#[cfg(not(feature = "run"))]
fn onnxruntime() -> String {
    "not part of this build".into()
}
