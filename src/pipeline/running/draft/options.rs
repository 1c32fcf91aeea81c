//! How a draft is measured.

/// Prompts on which a draft is measured, and the numbers of draft tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftTest {
    /// Held-out prompts.
    pub prompts: Vec<Vec<i64>>,
    /// File of the prompts.
    pub prompts_from: String,
    /// Maximum number of generated tokens per prompt.
    pub tokens: usize,
    /// Numbers of tokens that the draft proposes per step.
    pub draft_tokens: Vec<usize>,
}
