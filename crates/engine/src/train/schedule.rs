//! Learning rate schedules.

use serde::{Deserialize, Serialize};

use crate::error::counted;

/// Decay of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Curve {
    /// Half a cosine period
    #[default]
    Cosine,
    /// Linear
    Linear,
    /// No decay
    Constant,
}

/// Linear warm-up followed by a decay, as in transformers' `get_cosine_schedule_with_warmup`,
/// `get_linear_schedule_with_warmup`, `get_constant_schedule_with_warmup` and, with `decay_steps`,
/// `get_wsd_schedule`. The warm-up always begins at 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// Decay of the rate after the warm-up
    pub kind: Curve,
    /// Number of warm-up steps
    pub warmup_steps: u64,
    /// Number of steps at the end in which the rate decays, after a constant rate [default: all steps after
    /// the warm-up]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Final rate, as a fraction of the peak rate
    #[serde(deserialize_with = "crate::ratio::ratio")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::ratio"))]
    pub min_rate: f64,
}

impl Schedule {
    /// Why the schedule is invalid for a training of `steps` steps, if they are known.
    pub(super) fn check(&self, steps: Option<u64>) -> Option<String> {
        if self.decay_steps == Some(0) {
            return Some("`decay_steps` must be at least 1".to_owned());
        }
        if self.decay_steps.is_some() && self.kind == Curve::Constant {
            return Some("`decay_steps` needs `kind: cosine` or `linear`, because a constant rate does not decay".to_owned());
        }
        if !(0.0..=1.0).contains(&self.min_rate) {
            return Some(format!("`min_rate` {} is not between 0 and 1: it is a fraction of `learning_rate`", self.min_rate));
        }
        if self.min_rate > 0.0 && self.kind == Curve::Constant {
            return Some("`min_rate` needs `kind: cosine` or `linear`, because a constant rate does not decay".to_owned());
        }
        let (steps, warmup, decay) = (steps?, self.warmup_steps, self.decay_steps?);
        (warmup.saturating_add(decay) > steps)
            .then(|| format!("`warmup_steps` {warmup} and `decay_steps` {decay} are more than the {steps} steps of the training: lower one of them"))
    }

    /// A note if a training of `steps` steps ends during the warm-up.
    pub fn unfinished_warmup(&self, steps: u64) -> Option<String> {
        let warmup = self.warmup_steps;
        (warmup > 0 && warmup >= steps).then(|| {
            let steps = counted(steps as usize, "step");
            format!("the training of {steps} ends during the warm-up of {warmup}, so that the learning rate does not reach its peak: lower `warmup_steps`, or train longer")
        })
    }

    /// The learning rate of step `step`, counted from 0, of `total` steps. With a warm-up, the rate of
    /// the first step is 0.
    pub fn rate(&self, step: u64, total: u64, base: f64) -> f64 {
        if step < self.warmup_steps {
            return base * step as f64 / self.warmup_steps as f64;
        }
        let (start, falling) = self.decay(total);
        if step < start {
            return base;
        }
        let progress = ((step - start) as f64 / falling.max(1) as f64).min(1.0);
        let left = match self.kind {
            Curve::Constant => return base,
            Curve::Linear => 1.0 - progress,
            Curve::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        base * (left * (1.0 - self.min_rate) + self.min_rate)
    }

    /// The step in which the decay begins, of `total` steps, and its number of steps.
    fn decay(&self, total: u64) -> (u64, u64) {
        let after = total.saturating_sub(self.warmup_steps);
        let falling = self.decay_steps.map_or(after, |steps| steps.min(after));
        (total.saturating_sub(falling).max(self.warmup_steps), falling)
    }

    /// The number of steps with a constant rate before the decay of `decay_steps`; `None` without any.
    pub fn stable_steps(&self, total: u64) -> Option<u64> {
        self.decay_steps.map(|_| self.decay(total).0).filter(|start| *start > self.warmup_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_the_schedule() {
        let rates = |kind, min_rate| -> Vec<f64> {
            let schedule = Schedule { kind, warmup_steps: 2, decay_steps: None, min_rate };
            [0, 1, 2, 4, 6, 9].into_iter().map(|step| schedule.rate(step, 6, 2.0)).collect()
        };
        assert_eq!(rates(Curve::Constant, 0.5), [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
        assert_eq!(rates(Curve::Linear, 0.0), [0.0, 1.0, 2.0, 1.0, 0.0, 0.0]);
        assert_eq!(rates(Curve::Linear, 0.5), [0.0, 1.0, 2.0, 1.5, 1.0, 1.0]);
        let cosine = rates(Curve::Cosine, 0.0);
        assert!(cosine.iter().zip([0.0, 1.0, 2.0, 1.0, 0.0, 0.0]).all(|(ours, expected)| (ours - expected).abs() < 1e-12), "{cosine:?}");
    }

    /// Without a minimum, the rates of transformers' `get_wsd_schedule` with the remaining steps between
    /// warm-up and decay. With a minimum, its warm-up begins there.
    #[test]
    fn the_decay_can_follow_a_constant_rate() {
        let rates = |kind, decay_steps, min_rate| -> Vec<f64> {
            let schedule = Schedule { kind, warmup_steps: 2, decay_steps: Some(decay_steps), min_rate };
            [0, 1, 2, 5, 6, 7, 8, 10].into_iter().map(|step| schedule.rate(step, 10, 2.0)).collect()
        };
        assert_eq!(rates(Curve::Linear, 4, 0.0), [0.0, 1.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.0]);
        assert_eq!(rates(Curve::Linear, 4, 0.5), [0.0, 1.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.0]);
        let stable = |decay_steps| Schedule { warmup_steps: 2, decay_steps, ..Schedule::default() }.stable_steps(10);
        assert_eq!([stable(Some(4)), stable(Some(8)), stable(None)], [Some(6), None, None]);
        // A decay that is longer than the run after the warm-up.
        assert_eq!(rates(Curve::Linear, 99, 0.0), [0.0, 1.0, 2.0, 1.25, 1.0, 0.75, 0.5, 0.0]);
        let cosine = rates(Curve::Cosine, 4, 0.0);
        let expected = [0.0, 1.0, 2.0, 2.0, 2.0, 1.0 + 0.5f64.sqrt(), 1.0, 0.0];
        assert!(cosine.iter().zip(expected).all(|(ours, expected)| (ours - expected).abs() < 1e-12), "{cosine:?}");
    }

    #[test]
    fn a_run_shorter_than_the_warm_up() {
        let schedule = Schedule { warmup_steps: 10, ..Schedule::default() };
        assert_eq!((schedule.rate(5, 5, 1.0), schedule.rate(10, 5, 1.0), schedule.rate(11, 5, 1.0)), (0.5, 1.0, 0.0));
        assert_eq!(Schedule::default().rate(0, 0, 1.0), 1.0);
    }

    #[test]
    fn steps_and_schedule_must_fit() {
        let schedule = |warmup_steps, decay_steps| Schedule { warmup_steps, decay_steps, ..Schedule::default() };
        for (schedule, steps) in [(schedule(0, None), Some(1)), (schedule(50, None), Some(20)), (schedule(9, Some(1)), Some(10)), (schedule(99, None), None)] {
            assert_eq!(schedule.check(steps), None, "{schedule:?}");
        }
        for (schedule, steps, parts) in [
            (schedule(5, Some(16)), Some(20), ["`warmup_steps` 5 and `decay_steps` 16", "more than the 20 steps"]),
            (schedule(5, Some(0)), None, ["`decay_steps`", "at least 1"]),
            (Schedule { kind: Curve::Constant, ..schedule(5, Some(1)) }, None, ["`decay_steps` needs", "constant"]),
            (Schedule { kind: Curve::Constant, min_rate: 0.5, ..schedule(0, None) }, None, ["`min_rate` needs", "constant"]),
            (Schedule { min_rate: 1.5, ..schedule(0, None) }, None, ["`min_rate` 1.5", "fraction of `learning_rate`"]),
        ] {
            let reason = schedule.check(steps).unwrap();
            assert!(parts.iter().all(|part| reason.contains(part)), "{reason}");
        }
    }

    /// A note states exactly whether the rate of a step is the peak.
    #[test]
    fn warm_ups_without_a_peak_are_noted() {
        for (warmup_steps, steps) in [(0, 1), (1, 1), (9, 10), (10, 10), (50, 20), (1, 0)] {
            let schedule = Schedule { kind: Curve::Constant, warmup_steps, ..Schedule::default() };
            let has_peak = steps == 0 && warmup_steps == 0 || (0..steps).any(|step| schedule.rate(step, steps, 1.0) >= 1.0);
            assert_eq!(schedule.unfinished_warmup(steps).is_none(), has_peak, "{warmup_steps} of {steps}");
        }
        let note = Schedule { warmup_steps: 50, ..Schedule::default() }.unfinished_warmup(1).unwrap();
        assert!(note.starts_with("the training of 1 step ends during the warm-up of 50"), "{note}");
    }

    #[test]
    fn schedules_are_parsed() {
        let schedule: Schedule = serde_json::from_str(r#"{"kind": "linear", "warmup_steps": 3}"#).unwrap();
        assert_eq!(schedule, Schedule { kind: Curve::Linear, warmup_steps: 3, decay_steps: None, min_rate: 0.0 });
        assert!(serde_json::from_str::<Schedule>(r#"{"warmup": 3}"#).is_err());
    }
}
