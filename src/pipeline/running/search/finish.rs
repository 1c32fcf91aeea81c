//! Better methods for the chosen point, within a limit of time.
//!
//! The point is quantized by several methods, from the fastest to the slowest, and each result is measured on
//! the held-out samples. For int8 layers of ONNX files, the methods are options of the passes, each of which
//! is added to the best ones before it. Writing repeats the best method, so that a method may take at most
//! half of the time that is left, and must leave the time of the best one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::formats::{Formats, Writing, applied};
use super::measure::Measurement;
use super::{Budget, Found, Point, Search};
use crate::calibration::ActivationObserver;
use crate::error::{Error, Result};
use crate::export::Export;
use crate::pass::{Context, Guide, Method, Quantize, Smooth, Step, WeightObserver};
use crate::report::search::SearchMethod;
use crate::work::{Cancel, Work};

/// Methods from the fastest to the slowest: their names, guides, and numbers of steps per block.
const METHODS: [(&str, Method, Guide, Option<usize>); 5] = [
    ("gptq", Method::Gptq, Guide::None, None),
    ("gptq, guide: loss", Method::Gptq, Guide::Loss, None),
    ("autoround", Method::Autoround, Guide::None, None),
    ("autoround, guide: loss", Method::Autoround, Guide::Loss, None),
    ("autoround, guide: loss, iterations: 1000", Method::Autoround, Guide::Loss, Some(1000)),
];

/// Changes an option of a pass; `false` if the pass does not have it.
type Change = fn(&mut Step) -> bool;

/// Options of int8 layers.
const OPTIONS: [(&str, Change); 6] = [
    ("weights: mse", |step| match step {
        Step::QuantizeStatic(pass) => replace(&mut pass.weight_observer, WeightObserver::Mse),
        Step::QuantizeDynamic(pass) => replace(&mut pass.observer, WeightObserver::Mse),
        _ => false,
    }),
    ("observer: percentile", |step| if let Step::QuantizeStatic(pass) = step { replace(&mut pass.observer, ActivationObserver::Percentile) } else { false }),
    ("observer: entropy", |step| if let Step::QuantizeStatic(pass) = step { replace(&mut pass.observer, ActivationObserver::Entropy) } else { false }),
    ("observer: minmax", |step| if let Step::QuantizeStatic(pass) = step { replace(&mut pass.observer, ActivationObserver::Minmax) } else { false }),
    ("smooth: 0.5", |step| if let Step::QuantizeStatic(pass) = step { replace(&mut pass.smooth, Smooth::Strength(0.5)) } else { false }),
    ("headroom: true", |step| if let Step::QuantizeStatic(pass) = step { replace(&mut pass.headroom, true) } else { false }),
];

/// Sets an option. Returns whether it had another value.
fn replace<T: PartialEq>(option: &mut T, value: T) -> bool {
    std::mem::replace(option, value) != *option
}

/// A method of quantization: the names of its options, and the passes.
#[derive(Debug, Clone)]
struct Candidate {
    options: Vec<&'static str>,
    passes: Vec<Step>,
}

impl Candidate {
    /// The candidate with this number, given the passes of the point and the best candidate. The inner option
    /// is empty if the options have no effect on the passes, and the outer one after the last candidate.
    fn nth(number: usize, passes: &[Step], best: Option<&Candidate>) -> Option<Option<Candidate>> {
        if let [before @ .., Step::Quantize(base)] = passes
            && before.iter().all(|step| matches!(step, Step::PruneStructured(_)))
        {
            let (name, method, guide, iterations) = *METHODS.get(number)?;
            let pass = Quantize { method, guide, iterations, ..base.clone() };
            return Some(Some(Candidate { options: vec![name], passes: [before, &[Step::from(pass)]].concat() }));
        }
        let mut candidate = best.cloned().unwrap_or_else(|| Candidate { options: Vec::new(), passes: passes.to_vec() });
        let Some(option) = number.checked_sub(1) else { return Some(Some(candidate)) };
        let (name, change) = *OPTIONS.get(option)?;
        // Every pass is changed.
        let changes: Vec<bool> = candidate.passes.iter_mut().map(change).collect();
        // Another value of the same option is replaced.
        let option_of = |text: &'static str| text.split(':').next();
        candidate.options.retain(|other| option_of(other) != option_of(name));
        candidate.options.push(name);
        Some(changes.contains(&true).then_some(candidate))
    }

    fn name(&self) -> String {
        if self.options.is_empty() { "default options".to_owned() } else { self.options.join(", ") }
    }
}

/// Time between two looks at the clock.
const PAUSE: Duration = Duration::from_millis(20);

impl Search<'_> {
    /// Quantizes the chosen point by several methods within this time, and returns the passes of the one
    /// with the least loss on the held-out samples that meets a limit of the score. All are added to
    /// `found`.
    ///
    /// # Errors
    /// If the point leaves all weights as floats, or if a method fails.
    pub fn finish(&self, found: &mut Found, time: Duration) -> Result<Writing> {
        let start = Instant::now();
        let point = found.chosen.clone().unwrap_or_default();
        let plain = self.writing(found, &point, None)?;
        // The export of GGUF files searches scales by importance, and the passes choose codes.
        let is_rounded = plain.passes.is_empty();
        let writing = if is_rounded { self.writing(found, &point, Some(Method::Gptq))? } else { plain.clone() };
        if writing.passes.is_empty() {
            return Ok(plain);
        }
        let reference = point.measured.filter(|_| is_rounded);
        if is_rounded {
            found.methods.push(SearchMethod { method: "importance".into(), measured: reference, chosen: true, ..SearchMethod::default() });
        }
        let formats = self.formats()?;
        let mut measurement = Measurement::new(self.model, self.context, &*formats)?;
        let limit = self.budget.filter(|budget| budget.is_size() || matches!(budget, Budget::Drop(_)));
        if let Some(Budget::Drop(_)) = limit {
            measurement = measurement.with_metric(self.labelled)?;
        }
        let mut best: Option<(Candidate, f64, Duration)> = None;
        for number in 0.. {
            let Some(candidate) = Candidate::nth(number, &writing.passes, best.as_ref().map(|(candidate, _, _)| candidate)) else { break };
            let Some(candidate) = candidate else { continue };
            let left = time.saturating_sub(start.elapsed());
            let repeated = best.as_ref().map_or(Duration::ZERO, |(_, _, time)| *time);
            let most = (left / 2).min(left.saturating_sub(repeated));
            let begun = Instant::now();
            let judged = if most.is_zero() {
                Ok(None)
            } else {
                within(most, self.context.work.cancel, |cancel| self.judged(&candidate, &writing.exports, (&*found, &point), (&measurement, &*formats), cancel))
            };
            let taken = begun.elapsed();
            // A method that needs too much memory does not discard the results of others.
            let (judged, failed) = match judged {
                Err(error) if !matches!(error, Error::Cancelled) && (best.is_some() || is_rounded) => (None, Some(error.to_string())),
                judged => (judged?, None),
            };
            let has_failed = failed.is_some();
            let measured = judged.as_ref().and_then(|judged| judged.measured);
            found.methods.push(SearchMethod { method: candidate.name(), measured, failed, seconds: taken.as_secs_f64(), ..SearchMethod::default() });
            if has_failed {
                continue;
            }
            // Slower methods do not end in time either.
            let Some((judged, measured)) = judged.zip(measured) else { break };
            let is_within = limit.is_none_or(|limit| limit.allows(&judged, self.model.stored_bytes()));
            let least = best.as_ref().map(|(_, least, _)| *least).or(reference);
            if is_within && least.is_none_or(|least| measured < least) {
                if let Some(chosen) = &mut found.chosen {
                    chosen.bytes = judged.bytes;
                }
                best = Some((candidate, measured, taken));
                let last = found.methods.len() - 1;
                found.methods.iter_mut().enumerate().for_each(|(at, method)| method.chosen = at == last);
            }
        }
        Ok(Writing { passes: best.map_or(plain.passes, |(candidate, _, _)| candidate.passes), exports: plain.exports })
    }

    /// The point with the size, the loss and the score of the model that a candidate produces.
    fn judged(
        &self,
        candidate: &Candidate,
        exports: &[Export],
        (found, point): (&Found, &Point),
        (measurement, formats): (&Measurement, &dyn Formats),
        cancel: &Cancel,
    ) -> Result<Point> {
        let Context { work, seed, data, device, memory, .. } = self.context;
        let context =
            Context { work: Work { cancel, ..*work }, seed: *seed, data, device: device.clone(), memory: *memory, memory_tracker: None, checkpoints: None };
        let (model, run) = applied(self.model, &candidate.passes, |plan| plan.execute(&context))?;
        let mut judged = point.clone();
        if let [export] = exports {
            judged.bytes = export.format().forecast(&model, &run)?.bytes;
        }
        let model = formats.stored(model, &found.units, &point.options);
        measurement.judge(model, &mut judged)?;
        Ok(judged)
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
    use crate::pass::{QuantizeDynamic, QuantizeStatic};

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

    /// The options of int8 layers are tried one after another, in addition to the best ones. An option that
    /// changes nothing is left out.
    #[test]
    fn options_of_int8_layers_are_added_to_the_best_ones() {
        let dynamic: Vec<Step> = vec![QuantizeDynamic::default().into()];
        let names = |passes: &[Step]| (0..).map_while(|number| Candidate::nth(number, passes, None)).flatten().map(|found| found.name()).collect::<Vec<_>>();
        assert_eq!(names(&dynamic), ["default options", "weights: mse"]);
        let both = [dynamic, vec![QuantizeStatic::default().into()]].concat();
        assert_eq!(
            names(&both),
            ["default options", "weights: mse", "observer: percentile", "observer: entropy", "observer: minmax", "smooth: 0.5", "headroom: true"]
        );
        let best = Candidate::nth(1, &both, None).unwrap().unwrap();
        let [Step::QuantizeDynamic(first), Step::QuantizeStatic(second)] = best.passes.as_slice() else { panic!("{best:?}") };
        assert_eq!((first.observer, second.weight_observer), (WeightObserver::Mse, WeightObserver::Mse));
        let next = Candidate::nth(2, &both, Some(&best)).unwrap().unwrap();
        let [_, Step::QuantizeStatic(second)] = next.passes.as_slice() else { panic!("{next:?}") };
        assert_eq!((next.name().as_str(), second.weight_observer), ("weights: mse, observer: percentile", WeightObserver::Mse));
        // The best one has the option.
        assert!(Candidate::nth(1, &both, Some(&best)).unwrap().is_none());
        let single: Vec<Step> = vec![Quantize::default().into()];
        assert_eq!(names(&single).len(), METHODS.len());
    }
}
