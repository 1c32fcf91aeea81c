//! Output to stdout and stderr.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use serde::Serialize;
use serde_json::json;

use super::args::{Global, LogFormat};
use super::progress::write_event;
use super::running::{follow, record_times};
use crate::error::{Error, Result, counted, redact};
use crate::model::Model;
use crate::pipeline::{ModelMemory, PartOutcome, Pipeline, Plan, StageWork, parts_folder, sum_of};
use crate::report::Report;
use crate::report::escape::{self, display, display_line};
use crate::report::format::{bytes, count, natural, seconds};
use crate::report::terminal::{note_line, table};
use crate::run_state::PartIndex;

/// Writes data to stdout. A broken pipe (`| head`) is not an error.
pub(super) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(display(text).as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::Output { path: "stdout".into(), reason: e.to_string(), hint: String::new() }),
        _ => Ok(()),
    }
}

/// Writes data to stdout as JSON.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    let text = escape::json(value).map_err(|e| Error::option("--json", e))?;
    print(&(text + "\n"))
}

/// Options that are flags of commands. Hints name them as the library and recipes do.
const FLAGS: [(&str, &str); 10] = [
    ("allow_nonfinite", "--allow-nonfinite"),
    ("export", "--export"),
    ("force", "--force"),
    ("loads", "--loads"),
    ("memory", "--memory"),
    ("part", "--part"),
    ("resume", "--resume"),
    ("sbom", "--sbom"),
    ("sign", "--sign"),
    ("sizes", "--size"),
];

/// A hint with flags in place of options.
fn in_flags(hint: String) -> String {
    FLAGS.iter().fold(hint, |hint, (name, flag)| hint.replace(&format!("`{name}`"), &format!("`{flag}`")))
}

/// Writes an error to stderr, with its hint.
pub(super) fn error(error: &Error, global: &Global) {
    if global.log_format == LogFormat::Json {
        write_event(&json!({ "event": "error", "message": redact(&error.to_string()), "hint": error.hint().map(in_flags) }));
        return;
    }
    let (red, cyan, off) = if has_color() { ("\x1b[1;31m", "\x1b[1;36m", "\x1b[0m") } else { ("", "", "") };
    let mut text = format!("{red}error:{off} {}\n", display(&redact(&error.to_string())));
    if let Some(hint) = error.hint() {
        text += &format!("{cyan}hint:{off} {}\n", display(&in_flags(hint)));
    }
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

fn has_color() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// Reports on stderr that a run of a sweep begins.
pub(super) fn begin_run(name: &str, global: &Global) {
    match global.log_format {
        _ if global.quiet => {}
        LogFormat::Text => drop(writeln!(io::stderr().lock(), "{}", display(name))),
        LogFormat::Json => write_event(&json!({ "event": "run", "name": name })),
    }
}

/// Runs a pipeline, or a part of it, and shows its report. If several processes run a pass together, only
/// rank 0 writes an output.
pub(super) fn run(pipeline: &Pipeline, model: &Model, folder: &Path, part: Option<PartIndex>, global: &Global) -> Result<()> {
    if let Some(index) = part {
        return show_part(pipeline.run_part(model.clone(), folder, index)?, index, folder, global);
    }
    if pipeline.is_leader()? {
        return report(&pipeline.run(model.clone(), folder)?, folder, global);
    }
    follow(pipeline, model, folder)?;
    match global.log_format {
        _ if global.quiet => {}
        LogFormat::Text => drop(writeln!(io::stderr().lock(), "rank 0 writes {}", display(&folder.to_string_lossy()))),
        LogFormat::Json => write_event(&json!({ "event": "followed", "output": folder })),
    }
    Ok(())
}

/// Reports the outcome of a part, and the next step.
fn show_part(outcome: PartOutcome, index: PartIndex, folder: &Path, global: &Global) -> Result<()> {
    if global.json {
        return json(&json!({ "part": index.number, "parts": index.count, "outcome": outcome, "folder": parts_folder(folder).join(index.name()) }));
    }
    let next = format!("when all parts are written, merge them: compress merge {}", folder.display());
    print(&match outcome {
        PartOutcome::Written => format!("{index} is written and verified; {next}\n"),
        PartOutcome::Found => format!("{index} had already been written; {next}\n"),
        PartOutcome::Counted => {
            format!(
                "{index} has stored its counts for the threshold over all weights, but is not written yet: run it again when all parts have stored their counts\n"
            )
        }
    })
}

/// Shows the report of a run.
pub(super) fn report(report: &Report, folder: &Path, global: &Global) -> Result<()> {
    record_times(report, global);
    if global.json {
        return json(report);
    }
    let outcome = if report.is_verified() { "written and verified" } else { "written, but not verified end to end" };
    print(&format!("{}\n {outcome}: {}\n", report.to_terminal(), folder.display()))
}

/// Maximum number of weight names listed for a pass.
const LISTED: usize = 8;

/// Shows the plan of a recipe, or those of all runs of a sweep.
pub(super) fn plans(plans: &[(String, Plan)], global: &Global) -> Result<()> {
    match plans {
        [(name, plan)] if name.is_empty() => {
            if global.json {
                json(plan)
            } else {
                print(&plan_text(plan))
            }
        }
        _ if global.json => json(&plans.iter().map(|(name, plan)| (name, plan)).collect::<BTreeMap<_, _>>()),
        _ => plans.iter().try_for_each(|(name, plan)| print(&format!("== {name}\n{}\n", plan_text(plan)))),
    }
}

fn plan_text(plan: &Plan) -> String {
    let mut out = format!("{}: {} parameters, {}\n", plan.model, count(plan.parameters), bytes(plan.input_bytes));
    for (index, pass) in plan.passes.iter().enumerate() {
        out += &format!(
            "\n{}. {} {}\n   selects {}: {} weights, {} parameters\n",
            index + 1,
            pass.name,
            pass.options,
            pass.rule,
            pass.selected.len(),
            count(pass.parameters)
        );
        out += &names("     ", &pass.selected);
        if !pass.unselected.is_empty() {
            out += &format!("   does not change {} other float tensors of two or more dimensions:\n", pass.unselected.len());
            out += &names("     ", &pass.unselected);
        }
    }
    let samples = plan.samples.iter().map(|(key, samples)| (*key, counted(*samples, "sample")));
    let runs = plan.model_memory.as_ref().map(|memory| ("running the model", model_memory(memory)));
    let size = match (plan.output_exact, plan.output_estimated) {
        (true, _) => "",
        (_, true) => "about ",
        _ => "at most ",
    };
    let before = (plan.prepare_bytes > 0).then(|| ("read before writing", bytes(plan.prepare_bytes)));
    let rows = [
        ("files", plan.files.join(", ")),
        ("size", format!("{size}{}", bytes(plan.output_bytes))),
        ("peak memory", format!("about {}", bytes(plan.peak_rss_bytes))),
        ("device memory", plan.peak_vram_bytes.map_or("not known in advance".into(), bytes)),
    ];
    let checked: Vec<String> =
        plan.loads.iter().map(|checked| format!("{} of {} {}", counted(checked.rules.len(), "rule"), checked.runtime, checked.version)).collect();
    let loads = (!checked.is_empty()).then(|| ("complies with", format!("{}; all rules are checked again on the written files", checked.join(", "))));
    out += &format!(
        "\n{}\n",
        table(&["would write", ""], samples.chain(rows).chain(before).chain(runs).chain(loads).map(|(name, value)| vec![name.to_owned(), value]))
    );
    out += &format!("\n{}", work(&plan.work));
    for note in &plan.notes {
        out += &note_line(note);
    }
    out
}

/// The counted work of stages, with estimated times and their sum.
pub(super) fn work(stages: &[StageWork]) -> String {
    let row = |stage: &StageWork| {
        let work = [
            stage.macs.filter(|macs| *macs > 0).map(|macs| format!("{} multiply-accumulates", count(macs))),
            Some(stage.read_bytes).filter(|read| *read > 0).map(|read| format!("{} read", bytes(read))),
            Some(stage.written_bytes).filter(|written| *written > 0).map(|written| format!("{} written", bytes(written))),
        ];
        let work = if stage.macs.is_none() { "not known in advance".to_owned() } else { work.into_iter().flatten().collect::<Vec<_>>().join(", ") };
        let time = stage.estimated_seconds.map_or("-".to_owned(), seconds);
        let bound = if stage.at_most && stage.macs.is_some() { "at most " } else { "" };
        vec![stage.name.clone(), format!("{bound}{work}"), format!("{bound}{time}")]
    };
    let mut text = format!("{}\n", table(&["stage", "work", "estimated time"], stages.iter().map(row)));
    if let Some(total) = sum_of(stages) {
        let unknown = stages.iter().any(|stage| stage.estimated_seconds.is_none());
        let without = if unknown { ", without the stages whose work is not known in advance" } else { "" };
        text += &format!(" estimated time of the run: {}{without}\n", seconds(total));
    }
    text
}

/// Memory needed to run a model, and whether it runs block by block.
fn model_memory(memory: &ModelMemory) -> String {
    let blockwise = memory.blockwise_bytes.map_or("cannot be split into blocks".to_owned(), |size| format!("{} block by block", bytes(size)));
    let runs = if memory.blockwise { "so it runs block by block" } else { "so it runs as a whole" };
    let limit = memory.limit_bytes.map_or(String::new(), |limit| format!("; {} are available, {runs}", bytes(limit)));
    format!("about {} as a whole, {blockwise}{limit}", bytes(memory.whole_bytes))
}

/// A list of weight names, shortened.
fn names(indent: &str, names: &[String]) -> String {
    let mut sorted: Vec<&String> = names.iter().collect();
    sorted.sort_by(|a, b| natural(a, b));
    let mut out: String = sorted.iter().take(LISTED).map(|name| format!("{indent}{}\n", display_line(name))).collect();
    if names.len() > LISTED {
        out += &format!("{indent}... and {} more (--json lists all)\n", names.len() - LISTED);
    }
    out
}
