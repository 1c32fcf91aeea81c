//! Progress: bars on a terminal, plain lines elsewhere, JSON lines for scripts.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::report::format::{bytes, seconds};
use crate::store::{Event, Progress, lock};

/// Stages shorter than this leave no line behind.
const WORTH_A_LINE: Duration = Duration::from_secs(1);
const STYLE: &str = "{msg:<15} [{bar:32}] {bytes:>10} of {total_bytes:<10} {bytes_per_sec:>12}  {eta:>4} left";

/// For people.
#[derive(Default)]
pub(super) struct Bars(Mutex<Option<Stage>>);

struct Stage {
    name: String,
    done: u64,
    start: Instant,
    bar: Option<ProgressBar>,
}

impl Progress for Bars {
    fn on(&self, event: Event) {
        let mut stage = lock(&self.0);
        match event {
            Event::Begin { stage: name, bytes } => {
                let bar = io::stderr().is_terminal().then(|| {
                    let style = ProgressStyle::with_template(STYLE).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ");
                    ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr_with_hz(10)).with_style(style).with_message(name.to_owned())
                });
                *stage = Some(Stage { name: name.to_owned(), done: 0, start: Instant::now(), bar });
            }
            Event::Advance(bytes) => {
                let Some(stage) = stage.as_mut() else { return };
                stage.done += bytes;
                if let Some(bar) = &stage.bar {
                    bar.inc(bytes);
                }
            }
            Event::End => {
                let Some(Stage { name, done, start, bar }) = stage.take() else { return };
                if let Some(bar) = bar {
                    bar.finish_and_clear();
                }
                let elapsed = start.elapsed();
                if elapsed >= WORTH_A_LINE {
                    let rate = (done as f64 / elapsed.as_secs_f64()) as u64;
                    let _ = writeln!(io::stderr().lock(), "{name}: {} in {}, {}/s", bytes(done), seconds(elapsed.as_secs_f64()), bytes(rate));
                }
            }
        }
    }
}

/// For scripts.
#[derive(Default)]
pub(super) struct JsonLines(Mutex<(u64, u64, Option<Instant>)>);

/// Time between two lines of one stage.
const EVERY: Duration = Duration::from_millis(500);

impl Progress for JsonLines {
    fn on(&self, event: Event) {
        let mut state = lock(&self.0);
        let line = match event {
            Event::Begin { stage, bytes } => {
                *state = (0, bytes, Some(Instant::now()));
                json!({ "event": "begin", "stage": stage, "bytes": bytes })
            }
            Event::Advance(bytes) => {
                state.0 += bytes;
                if state.2.is_some_and(|last| last.elapsed() < EVERY) {
                    return;
                }
                state.2 = Some(Instant::now());
                json!({ "event": "progress", "done": state.0, "bytes": state.1 })
            }
            Event::End => json!({ "event": "end" }),
        };
        let _ = writeln!(io::stderr().lock(), "{line}");
    }
}
