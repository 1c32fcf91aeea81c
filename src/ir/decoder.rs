//! Names of what decoders take and give that keep keys and values of earlier tokens: those of optimum and onnxruntime-genai.

/// The input of tokens, `[batch, sequence]`.
pub const TOKENS: &str = "input_ids";
/// The input that says which of all tokens are no padding, `[batch, past_sequence + sequence]`.
pub const MASK: &str = "attention_mask";
/// The input that says where the tokens stand, `[batch, sequence]`.
pub const POSITIONS: &str = "position_ids";
/// The output of scores for next tokens, `[batch, sequence, vocabulary]`.
pub const LOGITS: &str = "logits";

/// Names of the inputs that hold keys and values of earlier tokens, for an attention.
pub fn past(number: impl std::fmt::Display) -> [String; 2] {
    ["key", "value"].map(|part| format!("past_key_values.{number}.{part}"))
}

/// Names of the outputs that hold keys and values of all tokens, for an attention.
pub fn present(number: impl std::fmt::Display) -> [String; 2] {
    ["key", "value"].map(|part| format!("present.{number}.{part}"))
}

/// The output that holds what this input is to be for the tokens that come next; nothing for other inputs.
pub fn successor(input: &str) -> Option<String> {
    input.strip_prefix("past_key_values.").map(|rest| format!("present.{rest}"))
}
