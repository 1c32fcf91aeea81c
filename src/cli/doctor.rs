//! `compress doctor`

use serde_json::json;

use super::args::Global;
use super::output;
#[cfg(not(feature = "run"))]
use crate::error::Error;
use crate::error::Result;
use crate::report::format::bytes;
use crate::report::terminal::facts;
use crate::report::{Environment, Tool};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Bring ONNX Runtime, which runs .onnx files: pip downloads its wheel, the library in it goes to the cache
    #[cfg(feature = "run")]
    #[arg(long)]
    fetch: bool,
}

/// What runs models on this machine.
struct Runtimes {
    /// What is to be said of the device.
    remark: &'static str,
    /// Version and place of ONNX Runtime, or why it cannot be used.
    onnxruntime: Result<(String, String)>,
    cache: Option<String>,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        #[cfg(feature = "run")]
        let fetched = self.fetch.then(crate::runtime::fetch).transpose()?;
        #[cfg(not(feature = "run"))]
        let fetched: Option<std::path::PathBuf> = None;
        let runtimes = runtimes();
        let (tool, machine) = (Tool::default(), Environment::detect());
        #[cfg(feature = "run")]
        let machine = machine.on(crate::exec::name(&global.device.open()?));
        if global.json {
            let (library, complaint) = match &runtimes.onnxruntime {
                Ok((_, place)) => (place.clone(), None),
                Err(reason) => (reason.to_string(), reason.hint()),
            };
            return output::json(&json!({
                "tool": tool, "environment": machine, "threads": global.threads(),
                "onnxruntime": library, "hint": complaint, "cache": runtimes.cache,
            }));
        }
        show(&tool, machine, &runtimes)?;
        match (fetched, runtimes.onnxruntime) {
            // Somebody who has asked for it wants to know that it is of use.
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
        ("int8 products", if machine.int8 == "none" { "none: ONNX Runtime adds them in 16 bits, which saturate".into() } else { machine.int8 }),
        ("GPU", machine.gpu.unwrap_or_else(|| "none found".into())),
        ("models run on", format!("{}{}", machine.device.unwrap_or_else(unknown), runtimes.remark)),
        (
            "ONNX Runtime",
            runtimes
                .onnxruntime
                .as_ref()
                .map_or_else(|_| "none: .onnx files are written and read back, but not run".into(), |(version, place)| format!("{version}, {place}")),
        ),
        ("cache", runtimes.cache.clone().unwrap_or_else(|| "none: set COMPRESS_CACHE or HOME".into())),
    ];
    output::print(&format!("{}\n", facts(rows)))
}

#[cfg(feature = "run")]
fn runtimes() -> Runtimes {
    use crate::{cache, runtime};
    let remark = if candle_core::utils::cuda_is_available() { "" } else { " (this program was built without CUDA)" };
    let version = || runtime::in_use().and_then(|library| library.version.clone()).unwrap_or_else(|| "of unknown version".into());
    let onnxruntime = runtime::library().map(|path| (version(), path.display().to_string()));
    Runtimes { remark, onnxruntime, cache: cache::folder(cache::variable).map(|folder| folder.display().to_string()) }
}

#[cfg(not(feature = "run"))]
fn runtimes() -> Runtimes {
    let without = |what: &str| Error::run(what.to_owned(), "is not part of this program", "build with the feature `run`");
    Runtimes { remark: " (this program only changes weights)", onnxruntime: Err(without("ONNX Runtime")), cache: None }
}
