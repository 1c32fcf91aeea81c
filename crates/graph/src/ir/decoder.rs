//! Input and output names of decoders with a KV cache, as in optimum and onnxruntime-genai.

/// Input: token ids, `[batch, sequence]`.
pub const TOKENS: &str = "input_ids";
/// Input: attention mask, zero for padding, `[batch, past_sequence + sequence]`.
pub const MASK: &str = "attention_mask";
/// Input: token positions, `[batch, sequence]`.
pub const POSITIONS: &str = "position_ids";
/// Output: logits of the next token, `[batch, sequence, vocabulary]`.
pub const LOGITS: &str = "logits";

/// Input of an encoder-decoder model: token ids of the decoder, `[batch, decoder_sequence]`.
pub const DECODER_TOKENS: &str = "decoder_input_ids";
/// Output of a separate encoder, `[batch, sequence, width]`.
pub const ENCODED: &str = "last_hidden_state";
/// Input of the separate decoder of an encoder-decoder model: the output of the encoder.
pub const ENCODER_STATES: &str = "encoder_hidden_states";
/// Input of the separate decoder of an encoder-decoder model: the attention mask of the encoder.
pub const ENCODER_MASK: &str = "encoder_attention_mask";
/// Suffixes of the numbers of attentions in [`past`] and [`present`] names of encoder-decoder models: over
/// decoder tokens, and over the output of the encoder.
pub const SIDES: [&str; 2] = ["decoder", "encoder"];

/// Names of the inputs with the cached keys and values of an attention.
pub fn past(number: impl std::fmt::Display) -> [String; 2] {
    ["key", "value"].map(|part| format!("past_key_values.{number}.{part}"))
}

/// Names of the outputs with the keys and values of an attention for all tokens, cached and new.
pub fn present(number: impl std::fmt::Display) -> [String; 2] {
    ["key", "value"].map(|part| format!("present.{number}.{part}"))
}

/// The input that an output becomes in the next step of incremental decoding; `None` for outputs outside of
/// the KV cache.
pub fn predecessor(output: &str) -> Option<String> {
    output.strip_prefix("present.").map(|rest| format!("past_key_values.{rest}"))
}

/// The output that becomes this input in the next step of incremental decoding; `None` for inputs outside
/// of the KV cache.
pub fn successor(input: &str) -> Option<String> {
    input.strip_prefix("past_key_values.").map(|rest| format!("present.{rest}"))
}
