//! Better methods for the chosen point, within a limit of time.
//!
//! The point is quantized by several methods, from the fastest to the slowest, and each result is measured
//! on the held-out samples. Writing repeats the best method, so that a method may take at most half of the
//! time that is left, and must leave the time of the best one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::formats::Writing;
use super::measure::Measurement;
use super::{Found, Search};
use crate::error::{Error, Result};
use crate::pass::{Context, Guide, Method, Pass, Quantize, Step};
use crate::report::search::SearchMethod;
use crate::run_state::RunState;
use crate::work::{Cancel, Work};

/// Methods from the fastest to the slowest: their names, weights of tokens, and numbers of steps per block.
const METHODS: [(&str, Method, Guide, Option<usize>); 5] = [
    ("gptq", Method::Gptq, Guide::None, None),
    ("gptq, guide: loss", Method::Gptq, Guide::Loss, None),
    ("autoround", Method::Autoround, Guide::None, None),
    ("autoround, guide: loss", Method::Autoround, Guide::Loss, None),
    ("autoround, guide: loss, iterations: 1000", Method::Autoround, Guide::Loss, Some(1000)),
];

/// Time between two looks at the clock.
const PAUSE: Duration = Duration::from_millis(20);

impl Search<'_> {
    /// Quantizes the chosen point by several methods within this time, and returns the passes of the one
    /// with the least divergence on the held-out samples. All are added to `found`.
    ///
    /// # Errors
    /// If the point leaves all weights as floats, or if a method fails.
    pub fn finish(&self, found: &mut Found, time: Duration) -> Result<Writing> {
        let start = Instant::now();
        let point = found.chosen.clone().unwrap_or_default();
        let writing = self.writing(found, &point, None)?;
        let [Step::Quantize(base)] = writing.passes.as_slice() else { return Ok(writing) };
        let formats = self.formats()?;
        let measurement = Measurement::new(self.model, self.context, &*formats)?;
        let mut best: Option<(Quantize, f64, Duration)> = None;
        for (name, method, guide, iterations) in METHODS {
            let left = time.saturating_sub(start.elapsed());
            let repeated = best.as_ref().map_or(Duration::ZERO, |(_, _, time)| *time);
            let most = (left / 2).min(left.saturating_sub(repeated));
            let pass = Quantize { method, guide, iterations, ..base.clone() };
            let begun = Instant::now();
            let measured = if most.is_zero() { None } else { within(most, self.context.work.cancel, |cancel| self.divergence(&pass, &measurement, cancel))? };
            let taken = begun.elapsed();
            found.methods.push(SearchMethod { method: name.to_owned(), measured, seconds: taken.as_secs_f64(), ..SearchMethod::default() });
            // Slower methods do not end in time either.
            let Some(measured) = measured else { break };
            if best.as_ref().is_none_or(|(_, least, _)| measured < *least) {
                best = Some((pass, measured, taken));
                let last = found.methods.len() - 1;
                found.methods.iter_mut().enumerate().for_each(|(at, method)| method.chosen = at == last);
            }
        }
        let pass = best.map_or_else(|| base.clone(), |(pass, _, _)| pass);
        Ok(Writing { passes: vec![pass.into()], ..writing })
    }

    /// The divergence of the model that a pass produces.
    fn divergence(&self, pass: &Quantize, measurement: &Measurement, cancel: &Cancel) -> Result<f64> {
        let Context { work, seed, data, device, memory, .. } = self.context;
        let context =
            Context { work: Work { cancel, ..*work }, seed: *seed, data, device: device.clone(), memory: *memory, memory_tracker: None, checkpoints: None };
        let (model, _) = pass.plan(self.model, &RunState::default())?.execute(&context)?;
        measurement.distance(&model)
    }
}

/// Sets a flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs a job that stops after this time, or when `cancel` is cancelled. Returns `None` if the time was too
/// short.
fn within<T>(time: Duration, cancel: &Cancel, job: impl FnOnce(&Cancel) -> Result<T>) -> Result<Option<T>> {
    let (own, is_done, start) = (Cancel::default(), AtomicBool::new(false), Instant::now());
    let result = thread::scope(|scope| {
        let watch = || {
            while !is_done.load(Ordering::Relaxed) {
                if start.elapsed() >= time || cancel.check().is_err() {
                    own.cancel();
                }
                thread::park_timeout(PAUSE);
            }
        };
        let watcher = scope.spawn(watch);
        let result = {
            let _done = SetOnDrop(&is_done);
            job(&own)
        };
        watcher.thread().unpark();
        result
    });
    match result {
        Err(Error::Cancelled) => cancel.check().map(|()| None),
        result => result.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endless(cancel: &Cancel) -> Result<u8> {
        loop {
            cancel.check()?;
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn jobs_stop_after_their_time_or_when_they_are_cancelled() {
        let cancel = Cancel::default();
        let (long, short) = (Duration::from_secs(600), Duration::from_millis(30));
        assert_eq!(within(long, &cancel, |_| Ok(7)).unwrap(), Some(7));
        assert_eq!(within(short, &cancel, endless).unwrap(), None);
        let failed = within(long, &cancel, |_| Err::<u8, _>(Error::option("test", "failed")));
        assert!(failed.unwrap_err().to_string().contains("failed"));
        cancel.cancel();
        assert!(matches!(within(long, &cancel, endless), Err(Error::Cancelled)));
    }
}
