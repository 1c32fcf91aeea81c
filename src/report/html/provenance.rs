//! Provenance of the run: recipe, machine, files and hashes.

use maud::{Markup, html};

use super::{section as section_of, table};
use crate::report::Report;
use crate::report::format::{bytes, seconds};

pub(super) fn recipe(report: &Report) -> Markup {
    let text = serde_saphyr::to_string(&report.recipe).unwrap_or_else(|_| report.recipe.to_string());
    let content = html! { details open { summary { "recipe.yaml" } pre { code { (text.trim_end()) } } } };
    section_of("recipe", "Recipe", "The recipe of the run, including defaults.", &content)
}

pub(super) fn section(report: &Report) -> Markup {
    let files: Vec<Vec<Markup>> = report
        .outputs
        .iter()
        .map(|file| {
            let verified = if file.verified.ok {
                html! { "yes" }
            } else {
                html! { strong.bad { "no" } }
            };
            vec![html! { (file.path) }, html! { (bytes(file.bytes)) }, verified, html! { code.hash { (file.blake3) } }]
        })
        .collect();
    let mut how: Vec<(&str, &str)> = report.outputs.iter().map(|file| (file.format.as_str(), file.verified.how.as_str())).collect();
    how.dedup();
    let environment = &report.environment;
    let commit = report.tool.commit.as_deref().map_or(String::new(), |commit| format!(", commit {commit}"));
    let facts = [
        ("model", report.model.source.to_string_lossy().into_owned()),
        ("BLAKE3 of the tensors", report.model.blake3.clone()),
        ("seed", report.seed.to_string()),
        ("written by", format!("{} {}{commit}", report.tool.name, report.tool.version)),
        ("processor", format!("{}, {} cores, {}", environment.cpu.as_deref().unwrap_or("unknown"), environment.cores, environment.simd)),
        ("int8 instructions", environment.int8.clone()),
        ("memory", environment.memory_bytes.map_or(String::new(), bytes)),
        ("GPU", environment.gpu.clone().unwrap_or_default()),
        ("device", environment.device.clone().unwrap_or_default()),
        ("ONNX Runtime", environment.onnxruntime.clone().unwrap_or_default()),
        ("complies with", report.checked_rules()),
        ("duration", seconds(report.totals.seconds)),
        ("peak memory", report.totals.peak_rss_bytes.map_or(String::new(), bytes)),
        ("peak GPU memory", report.totals.peak_vram_bytes.map_or(String::new(), bytes)),
    ];
    let content = html! {
        (table(&["file", "size", "verified", "BLAKE3"], &files))
        ul.notes { @for (format, how) in how { li { strong { (format) } ": " (how) } } }
        dl.facts.wide {
            @for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) { div { dt { (name) } dd { (value) } } }
        }
    };
    section_of("files", "Files and provenance", "Every file was read back and verified; the hashes are of the files that were read back.", &content)
}
