//! Random numbers of a step.

/// A step of a training in one of its processes, which determines the random numbers that change its samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Draw {
    /// Seed of the run.
    pub seed: u64,
    /// Number of completed steps.
    pub step: u64,
    /// Rank of the process.
    pub rank: usize,
}

impl Draw {
    /// The random numbers of the step.
    pub fn random(self) -> fastrand::Rng {
        let mut hasher = blake3::Hasher::new();
        for number in [self.seed, self.step, self.rank as u64] {
            hasher.update(&number.to_le_bytes());
        }
        let hash = hasher.finalize();
        let (bytes, _) = hash.as_bytes().split_at(8);
        fastrand::Rng::with_seed(bytes.iter().fold(0, |seed, byte| seed << 8 | u64::from(*byte)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn random_numbers_depend_on_seed_step_and_process() {
        let number = |seed: u64, step: u64, rank: usize| Draw { seed, step, rank }.random().u64(..);
        assert_eq!(number(1, 2, 0), number(1, 2, 0));
        let all = BTreeSet::from([number(1, 2, 0), number(2, 1, 0), number(1, 2, 1), number(1, 0, 2), number(0, 0, 0)]);
        assert_eq!(all.len(), 5);
    }
}
