//! `compress doctor`

use serde_json::json;

use super::args::Global;
use super::output;
use crate::error::Result;
use crate::report::format::bytes;
use crate::report::terminal::facts;
use crate::report::{Environment, Tool};

pub(super) fn run(global: &Global) -> Result<()> {
    let (tool, machine) = (Tool::default(), Environment::detect());
    if global.json {
        return output::json(
            &json!({ "tool": tool, "environment": machine, "threads": global.threads(), "onnxruntime": runtime().unwrap_or_else(|reason| reason) }),
        );
    }
    let unknown = || "unknown".to_owned();
    let (library, complaint) = match runtime() {
        Ok(place) => (place, None),
        Err(reason) => ("cannot be used".into(), Some(reason)),
    };
    let rows = [
        ("compress", format!("{} ({})", tool.version, tool.commit.unwrap_or_else(unknown))),
        ("processor", machine.cpu.unwrap_or_else(unknown)),
        ("cores", machine.cores.to_string()),
        ("memory", machine.memory_bytes.map_or_else(unknown, bytes)),
        ("kernels", machine.simd),
        ("int8 products", if machine.int8 == "none" { "none: 16-bit sums, which saturate".into() } else { machine.int8 }),
        ("ONNX Runtime", library),
    ];
    output::print(&format!("{}\n", facts(rows)))?;
    complaint.map_or(Ok(()), |reason| output::print(&format!("\n {reason}\n")))
}

/// Where ONNX Runtime is, or why it cannot be used.
#[cfg(feature = "run")]
fn runtime() -> std::result::Result<String, String> {
    crate::runtime::library().map(|path| path.display().to_string()).map_err(|e| e.to_string())
}

#[cfg(not(feature = "run"))]
#[allow(clippy::unnecessary_wraps)]
fn runtime() -> std::result::Result<String, String> {
    Ok("not part of this build".into())
}
