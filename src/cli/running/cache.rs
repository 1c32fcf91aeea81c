//! `compress cache`

use serde_json::json;

use super::args::Global;
use super::output;
use crate::error::{Error, Result};
use crate::pipeline::ResultCache;
use crate::report::format::{bytes, seconds};
use crate::report::terminal::table;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress cache
  compress cache --clear 3f0c
  compress cache --clear

`compress run` caches the result of every pass that runs the model and takes ten seconds or more. The key is a hash of the bytes
of model and data, the passes so far, the recipe's settings, the device, the CPU and the version. `--resume` and the runs of a
sweep continue after the last pass with a cached result. The cache is limited to 20 GiB; the least recently used results are
removed first.")]
pub(in crate::cli) struct Args {
    /// Remove the results whose keys start with KEY, or all
    #[arg(long, value_name = "KEY", num_args = 0..=1, default_missing_value = "")]
    clear: Option<String>,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let cache = ResultCache::in_user_cache().ok_or_else(|| Error::option("cache", "no folder is available: set COMPRESS_CACHE or HOME"))?;
        if let Some(prefix) = &self.clear {
            let freed = cache.clear(prefix)?;
            return if global.json { output::json(&json!({ "freed": freed })) } else { output::print(&format!("{} freed\n", bytes(freed))) };
        }
        let entries = cache.entries()?;
        if global.json {
            return output::json(&json!({ "folder": cache.folder(), "entries": entries }));
        }
        if entries.is_empty() {
            return output::print(&format!("nothing is cached in {}\n", cache.folder().display()));
        }
        let rows = entries.iter().map(|entry| {
            let key = entry.key.chars().take(8).collect();
            vec![
                key,
                entry.pass.clone(),
                entry.model.display().to_string(),
                seconds(entry.seconds),
                bytes(entry.bytes),
                format!("{} ago", seconds(entry.age as f64)),
            ]
        });
        let all = entries.iter().map(|entry| entry.bytes).sum();
        let text = format!("{}\n\n{} in {}\n", table(&["key", "up to", "model", "took", "size", "used"], rows), bytes(all), cache.folder().display());
        output::print(&text)
    }
}
