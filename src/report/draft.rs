//! The section about a draft model for speculative decoding.

use serde::{Deserialize, Serialize};

use super::format::rate;
use crate::error::counted;

/// Measurements of a draft with the model that verifies its proposals, as by `compress draft`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
pub struct DraftQuality {
    /// Number of held-out prompts.
    pub(crate) prompts: usize,
    /// File of the prompts.
    pub(crate) prompts_from: String,
    /// Maximum number of generated tokens per prompt.
    pub(crate) tokens: usize,
    /// Generated tokens per second of the model without the draft, after the first token.
    pub(crate) tokens_per_second: Option<f64>,
    /// Measurements with each number of draft tokens.
    pub(crate) runs: Vec<DraftRun>,
    /// The number of draft tokens with the most tokens per second.
    pub(crate) recommended: Option<usize>,
}

/// Greedy decoding with a number of draft tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
pub struct DraftRun {
    /// Maximum number of tokens that the draft proposes per step.
    pub draft_tokens: usize,
    /// Mean number of tokens per forward pass of the model.
    pub tokens_per_step: Option<f64>,
    /// Share of the proposals that the model accepted.
    pub acceptance_rate: Option<f64>,
    /// The same by the position of a proposal in its step.
    pub acceptance_by_position: Vec<f64>,
    /// Generated tokens per second, after the first token.
    pub tokens_per_second: Option<f64>,
    /// Number of prompts with the same text as without the draft.
    pub same_texts: usize,
}

impl DraftQuality {
    /// Titles of the columns of [`rows`](DraftQuality::rows).
    pub(crate) const TITLES: [&str; 6] = ["draft tokens", "tokens per step", "accepted", "by position", "tokens per second", "speed-up"];

    /// A row without the draft, and one for each number of draft tokens.
    pub(crate) fn rows(&self) -> Vec<[String; 6]> {
        let number = |value: Option<f64>, digits: usize| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"));
        let share = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), rate);
        let none = || "-".to_owned();
        let without = ["none".to_owned(), none(), none(), none(), number(self.tokens_per_second, 1), none()];
        let row = |run: &DraftRun| {
            let positions: Vec<String> = run.acceptance_by_position.iter().copied().map(rate).collect();
            [
                run.draft_tokens.to_string(),
                number(run.tokens_per_step, 2),
                share(run.acceptance_rate),
                if positions.is_empty() { none() } else { positions.join(", ") },
                number(run.tokens_per_second, 1),
                number(self.speed_up(run), 2),
            ]
        };
        [without].into_iter().chain(self.runs.iter().map(row)).collect()
    }

    /// The tokens per second of a run, relative to those without the draft.
    pub(crate) fn speed_up(&self, run: &DraftRun) -> Option<f64> {
        Some(run.tokens_per_second? / self.tokens_per_second.filter(|speed| *speed > 0.0)?)
    }

    /// The recommended run.
    pub(crate) fn best(&self) -> Option<&DraftRun> {
        self.runs.iter().find(|run| Some(run.draft_tokens) == self.recommended)
    }

    /// The data on which the draft was measured.
    pub(crate) fn measured_on(&self) -> String {
        let (prompts, tokens) = (counted(self.prompts, "held-out prompt"), counted(self.tokens, "token"));
        format!("{prompts} from {}, greedy decoding of up to {tokens}", self.prompts_from)
    }

    /// The recommendation as a sentence.
    pub(crate) fn recommendation(&self) -> Option<String> {
        let best = self.best()?;
        let tokens = counted(best.draft_tokens, "draft token");
        Some(match self.speed_up(best)? {
            speed_up if speed_up > 1.0 => format!("Recommended: {tokens}, {speed_up:.2} times as fast as the model alone on this machine."),
            speed_up => format!("With {tokens}, texts take least time of these, but {speed_up:.2} times as fast as the model alone on this machine."),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_recommendation_state_the_speed_up() {
        let run = |draft_tokens: usize, speed: f64| DraftRun {
            draft_tokens,
            tokens_per_step: Some(2.25),
            acceptance_rate: Some(0.625),
            acceptance_by_position: vec![0.75, 0.5],
            tokens_per_second: Some(speed),
            same_texts: 3,
        };
        let mut draft = DraftQuality {
            prompts: 3,
            prompts_from: "book.txt".into(),
            tokens: 64,
            tokens_per_second: Some(20.0),
            runs: vec![run(1, 22.0), run(2, 30.0)],
            recommended: Some(2),
        };
        assert_eq!(draft.rows()[0], ["none", "-", "-", "-", "20.0", "-"]);
        assert_eq!(draft.rows()[2], ["2", "2.25", "62 %", "75 %, 50 %", "30.0", "1.50"]);
        assert_eq!(draft.measured_on(), "3 held-out prompts from book.txt, greedy decoding of up to 64 tokens");
        assert!(draft.recommendation().unwrap().starts_with("Recommended: 2 draft tokens, 1.50 times as fast"));
        draft.runs[1].tokens_per_second = Some(10.0);
        assert!(draft.recommendation().unwrap().contains("0.50 times as fast as the model alone"));
        assert!(DraftQuality::default().recommendation().is_none());
    }
}
