//! Token types and keys of GGUF vocabularies, shared by reading and writing.

/// Replacement of spaces in SentencePiece vocabularies.
pub(super) const SPACE: &str = "\u{2581}";

/// Key of the chat template.
pub(super) const TEMPLATE: &str = "tokenizer.chat_template";
/// Key of the names of further chat templates.
pub(super) const TEMPLATES: &str = "tokenizer.chat_templates";

/// Token types of GGUF.
pub(super) const NORMAL: i64 = 1;
pub(super) const UNKNOWN: i64 = 2;
pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const UNUSED: i64 = 5;
pub(super) const BYTE: i64 = 6;
