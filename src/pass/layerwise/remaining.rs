//! The remaining time of work whose parts are separate stages: blocks of a layerwise run, mixtures of a
//! search. Their progress ends with each part.

use std::time::{Duration, Instant};

use crate::work::{Event, Work};

/// Minimum time between two messages.
const INTERVAL: Duration = Duration::from_secs(30);

/// Reports the remaining time from the time of the finished parts.
#[derive(Debug)]
pub struct Remaining {
    /// Plural of a part.
    noun: &'static str,
    parts: usize,
    /// The first part that was not loaded from a checkpoint, and when it began.
    first: usize,
    start: Instant,
    reported: Instant,
}

impl Remaining {
    /// The first of all parts begins.
    pub fn new(noun: &'static str, parts: usize) -> Remaining {
        let now = Instant::now();
        Remaining { noun, parts, first: 0, start: now, reported: now }
    }

    /// A part is finished, or was loaded from a checkpoint, which takes little time.
    pub fn finish(&mut self, part: usize, is_stored: bool, work: &Work) {
        if is_stored {
            (self.first, self.start) = (part + 1, Instant::now());
        } else if self.reported.elapsed() >= INTERVAL
            && let Some(message) = message(self.noun, part + 1, self.parts, self.first, self.start.elapsed())
        {
            self.reported = Instant::now();
            work.progress.on(Event::Message(&message));
        }
    }
}

/// The message after `done` of all parts, of which those from `first` on took `elapsed`; `None` after the
/// last one.
fn message(noun: &str, done: usize, parts: usize, first: usize, elapsed: Duration) -> Option<String> {
    let left = parts.checked_sub(done).filter(|left| *left > 0)?;
    let seconds = elapsed.as_secs_f64() / done.saturating_sub(first).max(1) as f64 * left as f64;
    Some(format!("{done} of {parts} {noun} are done, about {} left", rounded(seconds)))
}

/// A time in seconds, minutes or hours.
fn rounded(seconds: f64) -> String {
    match seconds {
        ..90.0 => format!("{seconds:.0} s"),
        ..5400.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_follows_from_the_finished_parts() {
        let after = |done, first, seconds| message("blocks", done, 24, first, Duration::from_secs(seconds));
        assert_eq!(after(6, 0, 60).unwrap(), "6 of 24 blocks are done, about 3 min left");
        assert_eq!(message("mixtures", 2, 11, 0, Duration::from_secs(40)).unwrap(), "2 of 11 mixtures are done, about 3 min left");
        // Four blocks were loaded from checkpoints.
        assert_eq!(after(6, 4, 60).unwrap(), "6 of 24 blocks are done, about 9 min left");
        assert_eq!(after(23, 0, 460).unwrap(), "23 of 24 blocks are done, about 20 s left");
        assert_eq!(after(1, 0, 3600).unwrap(), "1 of 24 blocks are done, about 23.0 h left");
        assert_eq!(after(24, 0, 480), None);
    }
}
