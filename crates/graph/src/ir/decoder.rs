//! Input and output names of decoders with a KV cache, as in optimum and onnxruntime-genai.

/// Input: token ids, `[batch, sequence]`.
pub const TOKENS: &str = "input_ids";
/// Input: attention mask, zero for padding, `[batch, past_sequence + sequence]`.
pub const MASK: &str = "attention_mask";
/// Input: token positions, `[batch, sequence]`.
pub const POSITIONS: &str = "position_ids";
/// Output: logits of the next token, `[batch, sequence, vocabulary]`.
pub const LOGITS: &str = "logits";

/// Names of the inputs with the cached keys and values of an attention.
pub fn past(number: impl std::fmt::Display) -> [String; 2] {
    ["key", "value"].map(|part| format!("past_key_values.{number}.{part}"))
}

/// Names of the outputs with the keys and values of an attention for all tokens, cached and new.
pub fn present(number: impl std::fmt::Display) -> [String; 2] {
    ["key", "value"].map(|part| format!("present.{number}.{part}"))
}

/// The output that becomes this input in the next step of incremental decoding; `None` for inputs outside
/// of the KV cache.
pub fn successor(input: &str) -> Option<String> {
    input.strip_prefix("past_key_values.").map(|rest| format!("present.{rest}"))
}
