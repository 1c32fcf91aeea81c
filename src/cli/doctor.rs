//! `compress doctor`

use serde_json::json;

use super::args::Global;
use super::output;
use super::running::{Fetch, Runtimes};
use crate::error::Result;
use crate::files;
use crate::report::format::bytes;
use crate::report::terminal::facts;
use crate::report::{Environment, Tool};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    fetch: Fetch,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let fetched = self.fetch.fetch()?;
        let runtimes = Runtimes::find();
        let (tool, machine) = (Tool::default(), global.models.environment()?);
        if global.json {
            let (library, hint) = match &runtimes.onnxruntime {
                Ok((_, path)) => (path.clone(), None),
                Err(reason) => (reason.to_string(), reason.hint()),
            };
            return output::json(&json!({
                "tool": tool, "environment": machine, "threads": global.threads(),
                "onnxruntime": library, "hint": hint, "cache": runtimes.cache, "remote": files::describe(),
            }));
        }
        show(&tool, machine, &runtimes)?;
        match (fetched, runtimes.onnxruntime) {
            // If ONNX Runtime was installed on request but cannot be loaded, the command fails.
            (Some(_), Err(reason)) => Err(reason),
            (None, Err(reason)) => output::print(&format!("\n {reason}\n{}", reason.hint().map_or(String::new(), |hint| format!(" hint: {hint}\n")))),
            _ => Ok(()),
        }
    }
}

fn show(tool: &Tool, machine: Environment, runtimes: &Runtimes) -> Result<()> {
    let unknown = || "unknown".to_owned();
    let rows = [
        ("compress", format!("{} ({})", tool.version, tool.commit.clone().unwrap_or_else(unknown))),
        ("processor", machine.cpu.unwrap_or_else(unknown)),
        ("cores", machine.cores.to_string()),
        ("memory", machine.memory_bytes.map_or_else(unknown, bytes)),
        ("kernels", machine.simd),
        ("int8 products", if machine.int8 == "none" { "none: ONNX Runtime accumulates them in 16 bits, which can saturate".into() } else { machine.int8 }),
        ("GPU", machine.gpu.unwrap_or_else(|| "none found".into())),
        ("models run on", format!("{}{}", machine.device.unwrap_or_else(unknown), runtimes.remark)),
        (
            "ONNX Runtime",
            runtimes
                .onnxruntime
                .as_ref()
                .map_or_else(|_| "none: .onnx files are written and read back, but not run".into(), |(version, path)| format!("{version}, {path}")),
        ),
        ("remote files", files::describe()),
        ("cache", runtimes.cache.clone().unwrap_or_else(|| "none: set COMPRESS_CACHE or HOME".into())),
    ];
    output::print(&format!("{}\n", facts(rows)))
}
