//! Progress: bars on a terminal, plain lines elsewhere, JSON lines for scripts.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::report::escape::{display, json_line};
use crate::report::format::{bytes, seconds};
use crate::work::{Event, Progress, ProgressUnit, lock};

/// Minimum duration of a stage for which a summary line is printed.
const MIN_SUMMARY: Duration = Duration::from_secs(1);
const SAMPLES: &str = "{msg:<15} [{bar:32}] {pos:>10} of {len:<10} {per_sec:>12}  {eta:>4} left";
const STEPS: &str = "{msg:<15} [{bar:32}] {pos:>6} of {len:<6} {prefix}  {eta:>4} left";
const UNCOUNTED: &str = "{msg:<15} {spinner} {pos:>10} {per_sec:>12}";
const BYTES: &str = "{msg:<15} [{bar:32}] {bytes:>10} of {total_bytes:<10} {bytes_per_sec:>12}  {eta:>4} left";

/// Progress bars on a terminal, plain lines elsewhere.
#[derive(Default)]
pub(super) struct Bars(Mutex<Option<Stage>>);

struct Stage {
    name: String,
    unit: ProgressUnit,
    done: u64,
    /// The part of it that earlier runs did.
    resumed: u64,
    start: Instant,
    reported: Instant,
    total: u64,
    bar: Option<ProgressBar>,
}

/// Minimum time between two lines of a stage if stderr is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(30);

impl Progress for Bars {
    fn on(&self, event: Event) {
        let mut stage = lock(&self.0);
        match event {
            Event::Begin { stage: name, total, done, unit } => {
                let name = display(name).into_owned();
                let template = match (unit, total) {
                    (_, 0) => UNCOUNTED,
                    (ProgressUnit::Bytes, _) => BYTES,
                    (ProgressUnit::Steps, _) => STEPS,
                    _ => SAMPLES,
                };
                let bar = io::stderr().is_terminal().then(|| {
                    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ");
                    ProgressBar::with_draw_target(Some(total).filter(|t| *t > 0), ProgressDrawTarget::stderr_with_hz(10))
                        .with_style(style)
                        .with_message(name.clone())
                        .with_position(done)
                });
                if let Some(bar) = &bar {
                    bar.reset_eta();
                }
                *stage = Some(Stage { name, unit, done, resumed: done, start: Instant::now(), reported: Instant::now(), total, bar });
            }
            Event::Advance(bytes) => {
                let Some(stage) = stage.as_mut() else { return };
                stage.done += bytes;
                if let Some(bar) = &stage.bar {
                    bar.inc(bytes);
                }
            }
            Event::Message(text) => {
                let text = display(text);
                let Some(stage) = stage.as_mut() else {
                    let _ = writeln!(io::stderr().lock(), "{text}");
                    return;
                };
                match &stage.bar {
                    Some(bar) => bar.set_prefix(text.into_owned()),
                    None if stage.reported.elapsed() >= LINE_INTERVAL => {
                        stage.reported = Instant::now();
                        let done = stage.done.saturating_sub(stage.resumed).max(1);
                        let left = stage.start.elapsed().as_secs_f64() / done as f64 * stage.total.saturating_sub(stage.done) as f64;
                        let line = format!("{}: {} of {}, {text}, {} left", stage.name, stage.done, stage.total, seconds(left));
                        let _ = writeln!(io::stderr().lock(), "{line}");
                    }
                    None => {}
                }
            }
            Event::End => {
                let Some(Stage { name, unit, done, resumed, start, bar, .. }) = stage.take() else { return };
                let done = done.saturating_sub(resumed);
                if let Some(bar) = bar {
                    bar.finish_and_clear();
                }
                let elapsed = start.elapsed();
                if elapsed >= MIN_SUMMARY {
                    let rate = done as f64 / elapsed.as_secs_f64();
                    let (amount, rate) = match unit {
                        ProgressUnit::Bytes => (bytes(done), bytes(rate as u64)),
                        ProgressUnit::Steps => (format!("{done} steps"), format!("{rate:.2}")),
                        _ => (format!("{done} samples"), format!("{rate:.1}")),
                    };
                    let _ = writeln!(io::stderr().lock(), "{name}: {amount} in {}, {rate}/s", seconds(elapsed.as_secs_f64()));
                }
            }
            _ => {}
        }
    }
}

/// Progress as JSON lines.
#[derive(Default)]
pub(super) struct JsonLines(Mutex<Option<Counter>>);

struct Counter {
    done: u64,
    total: u64,
    unit: &'static str,
    reported: Instant,
}

/// Minimum time between two progress events.
const EVENT_INTERVAL: Duration = Duration::from_millis(500);

impl Progress for JsonLines {
    fn on(&self, event: Event) {
        let mut state = lock(&self.0);
        let line = match event {
            Event::Begin { stage, total, done, unit } => {
                let unit = match unit {
                    ProgressUnit::Bytes => "bytes",
                    ProgressUnit::Steps => "steps",
                    _ => "samples",
                };
                *state = Some(Counter { done, total, unit, reported: Instant::now() });
                json!({ "event": "begin", "stage": stage, "done": done, unit: total })
            }
            Event::Advance(amount) => {
                let Some(counter) = state.as_mut() else { return };
                counter.done += amount;
                if counter.reported.elapsed() < EVENT_INTERVAL {
                    return;
                }
                counter.reported = Instant::now();
                json!({ "event": "progress", "done": counter.done, counter.unit: counter.total })
            }
            Event::Message(text) => {
                if state.as_ref().is_some_and(|counter| counter.reported.elapsed() < EVENT_INTERVAL) {
                    return;
                }
                json!({ "event": "message", "text": text })
            }
            Event::End => {
                *state = None;
                json!({ "event": "end" })
            }
            _ => return,
        };
        write_event(&line);
    }
}

/// Writes a line of JSON to stderr.
pub(super) fn write_event(event: &serde_json::Value) {
    let _ = writeln!(io::stderr().lock(), "{}", json_line(event).unwrap_or_default());
}
