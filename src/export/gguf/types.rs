//! Types that a recipe selects for single matrices of a GGUF file.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::HEAD;
use super::mixture::{block_size, kind_name, uses_importance};
use crate::error::{Error, Result};
use crate::kernel::ggml::BlockType;
use crate::store::gguf::Kind;
use crate::store::{DType, Pattern, select};

/// Type of a tensor in a GGUF file, by its name in llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[allow(non_camel_case_types)]
#[non_exhaustive]
pub enum TensorType {
    /// 32-bit floats
    F32,
    /// 16-bit floats
    F16,
    /// bfloat16
    BF16,
    /// 8.5 bits per weight: one scale per 32 weights
    Q8_0,
    /// 6.56 bits per weight: blocks of 256 with quantized scales
    Q6_K,
    /// 6 bits per weight: a scale and a minimum per 32 weights
    Q5_1,
    /// 5.5 bits per weight: one scale per 32 weights
    Q5_0,
    /// 5.5 bits per weight: blocks of 256 with quantized scales and minima
    Q5_K,
    /// 5 bits per weight: a scale and a minimum per 32 weights
    Q4_1,
    /// 4.5 bits per weight: one scale per 32 weights
    Q4_0,
    /// 4.5 bits per weight: blocks of 256 with quantized scales and minima
    Q4_K,
    /// 4.5 bits per weight: indices into a codebook of 16 values, one scale per 32 weights
    IQ4_NL,
    /// 4.25 bits per weight: the codebook of IQ4_NL in blocks of 256 with quantized scales
    IQ4_XS,
    /// 3.44 bits per weight: blocks of 256 with quantized scales
    Q3_K,
    /// 2.63 bits per weight: blocks of 256 with quantized scales and minima
    Q2_K,
}

impl TensorType {
    /// All types, the largest first.
    pub(crate) const ALL: [TensorType; 15] = {
        use TensorType::{BF16, F16, F32, IQ4_NL, IQ4_XS, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
        [F32, F16, BF16, Q8_0, Q6_K, Q5_1, Q5_0, Q5_K, Q4_1, Q4_0, Q4_K, IQ4_NL, IQ4_XS, Q3_K, Q2_K]
    };

    /// The type in the file.
    pub(crate) fn kind(self) -> Kind {
        match self {
            TensorType::F32 => Kind::Plain(DType::F32),
            TensorType::F16 => Kind::Plain(DType::F16),
            TensorType::BF16 => Kind::Plain(DType::BF16),
            TensorType::Q8_0 => Kind::Blocks(BlockType::Q8_0),
            TensorType::Q6_K => Kind::Blocks(BlockType::Q6K),
            TensorType::Q5_1 => Kind::Blocks(BlockType::Q5_1),
            TensorType::Q5_0 => Kind::Blocks(BlockType::Q5_0),
            TensorType::Q5_K => Kind::Blocks(BlockType::Q5K),
            TensorType::Q4_1 => Kind::Blocks(BlockType::Q4_1),
            TensorType::Q4_0 => Kind::Blocks(BlockType::Q4_0),
            TensorType::Q4_K => Kind::Blocks(BlockType::Q4K),
            TensorType::IQ4_NL => Kind::Blocks(BlockType::Iq4Nl),
            TensorType::IQ4_XS => Kind::Blocks(BlockType::Iq4Xs),
            TensorType::Q3_K => Kind::Blocks(BlockType::Q3K),
            TensorType::Q2_K => Kind::Blocks(BlockType::Q2K),
        }
    }

    /// Whether rows of this length are complete blocks of the type.
    pub(crate) fn fits(self, row: usize) -> bool {
        row.is_multiple_of(block_size(self.kind()))
    }

    /// Whether the importance of columns affects the quantization.
    pub(super) fn uses_importance(self) -> bool {
        uses_importance(self.kind())
    }
}

/// Reads and writes patterns with types as a map, in the order of the map.
pub(super) mod ordered_map {
    use std::fmt;

    use serde::de::{self, Deserializer, MapAccess, Visitor};
    use serde::ser::Serializer;

    use super::{Pattern, TensorType};

    pub fn serialize<S: Serializer>(types: &[(Pattern, TensorType)], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(types.iter().map(|(pattern, kind)| (pattern, kind)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(Pattern, TensorType)>, D::Error> {
        deserializer.deserialize_map(Entries)
    }

    struct Entries;

    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<(Pattern, TensorType)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map from patterns to types, like { \"blk.*.ffn_down\": Q6_K }")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut types: Self::Value = Vec::new();
            while let Some((pattern, kind)) = map.next_entry::<Pattern, TensorType>()? {
                if types.iter().any(|(other, _)| *other == pattern) {
                    return Err(de::Error::custom(format!("the pattern `{pattern}` occurs twice")));
                }
                types.push((pattern, kind));
            }
            Ok(types)
        }
    }
}

/// The option, for errors.
const OPTION: &str = "gguf: types";

/// Effect of an entry; a later variant replaces an earlier one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Usage {
    /// It matches no tensor.
    Unmatched,
    /// It matches only tensors that are always 32-bit floats.
    Floats,
    /// All matrices that it matches have the type of an earlier entry.
    Shadowed,
    /// It determines the type of a matrix.
    Applied,
}

/// The entries of the option `types`, and their effect on a model.
pub(super) struct RequestedTypes<'a> {
    entries: Vec<(&'a Pattern, TensorType, Usage)>,
    /// Names of the matrices, for suggestions.
    names: BTreeSet<String>,
}

impl<'a> RequestedTypes<'a> {
    pub fn new(types: &'a [(Pattern, TensorType)]) -> RequestedTypes<'a> {
        let entries = types.iter().map(|(pattern, kind)| (pattern, *kind, Usage::Unmatched)).collect();
        RequestedTypes { entries, names: BTreeSet::new() }
    }

    /// The type of a matrix with these names in the file and in the model, and rows of this length: that
    /// of the first entry that matches, or `None` if no entry matches. Other tensors have no type.
    ///
    /// # Errors
    /// The rows are not complete blocks of the type.
    pub fn find(&mut self, gguf_name: &str, name: &str, is_matrix: bool, row: usize) -> Result<Option<Kind>> {
        let mut found = None;
        for (pattern, kind, usage) in &mut self.entries {
            if !matches(pattern, gguf_name)? && !matches(pattern, name)? {
                continue;
            }
            let effect = match (is_matrix, found) {
                (false, _) => Usage::Floats,
                (true, Some(_)) => Usage::Shadowed,
                (true, None) => Usage::Applied,
            };
            *usage = effect.max(*usage);
            if effect == Usage::Applied {
                check_row(pattern, *kind, gguf_name, name, row)?;
                found = Some(kind.kind());
            }
        }
        if is_matrix && !self.entries.is_empty() {
            self.names.extend([gguf_name.to_owned(), name.to_owned()]);
        }
        Ok(found)
    }

    /// Checks that every entry determined the type of a matrix, after [`find`](Self::find) was called for
    /// all tensors.
    pub fn check(&self, is_head_stored: bool) -> Result<()> {
        for (pattern, _, usage) in &self.entries {
            let reason = match usage {
                Usage::Applied => continue,
                Usage::Shadowed => "has no effect, because earlier patterns match the same matrices: move it before them",
                Usage::Floats => "matches only vectors, norms and routers, which are always F32: name a matrix",
                Usage::Unmatched if !is_head_stored && ["output.weight", HEAD].into_iter().any(|name| pattern.matches(name)) => {
                    "matches no tensor, because the head is tied to the embedding table: use `token_embd`"
                }
                Usage::Unmatched => {
                    let nearest = select::nearest(pattern.as_str(), self.names.iter().map(String::as_str));
                    return Err(Error::NoMatch { field: "types", pattern: pattern.to_string(), nearest });
                }
            };
            return Err(Error::option(OPTION, format!("`{pattern}` {reason}")));
        }
        Ok(())
    }
}

fn matches(pattern: &Pattern, name: &str) -> Result<bool> {
    pattern.try_matches(name).map_err(|reason| Error::option(OPTION, reason))
}

/// Checks that the rows of a matrix are complete blocks of the type of an entry.
fn check_row(pattern: &Pattern, kind: TensorType, gguf_name: &str, name: &str, row: usize) -> Result<()> {
    if kind.fits(row) {
        return Ok(());
    }
    let fitting: Vec<String> = TensorType::ALL.into_iter().filter(|kind| kind.fits(row)).map(|kind| kind_name(kind.kind())).collect();
    let (size, kind) = (block_size(kind.kind()), kind_name(kind.kind()));
    let reason = format!("has rows of {row} elements, which is not a multiple of {size}, the block size of {kind}");
    let source = format!("the `types` pattern `{pattern}` matches it as `{gguf_name}`");
    Err(Error::tensor(name, format!("{reason} ({source})"), format!("choose a type that fits its rows: {}", fitting.join(", "))))
}

/// An error about experts of one tensor for which the option `types` selects different types.
pub(super) fn mixed_experts(stacked: &str, one: (&str, Kind), other: (&str, Kind)) -> Error {
    let [one, other] = [one, other].map(|(name, kind)| format!("`{name}` would be {}", kind_name(kind)));
    Error::option(OPTION, format!("{one} and {other}, but all experts of `{stacked}` have the same type: use a pattern that matches all of them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_block_types_can_be_selected() {
        let kinds = TensorType::ALL.map(TensorType::kind);
        for kind in BlockType::ALL {
            assert!(kinds.contains(&Kind::Blocks(kind)), "{}", kind.name());
        }
        for kind in TensorType::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind_name(kind.kind()));
        }
    }

    fn entries(text: &str) -> serde_json::Result<Vec<(Pattern, TensorType)>> {
        ordered_map::deserialize(&mut serde_json::Deserializer::from_str(text))
    }

    #[test]
    fn entries_keep_their_order() {
        let text = r#"{"z*":"Q6_K","a*":"F16","m":"IQ4_XS"}"#;
        let types = entries(text).unwrap();
        let mut written = Vec::new();
        ordered_map::serialize(&types, &mut serde_json::Serializer::new(&mut written)).unwrap();
        assert_eq!(String::from_utf8(written).unwrap(), text);
        for (text, words) in [
            (r#"{"a":"Q6_K","a":"F16"}"#, "the pattern `a` occurs twice"),
            (r#"{"a":"Q7_K"}"#, "unknown variant `Q7_K`"),
            (r#"{"":"Q6_K"}"#, "a pattern cannot be empty"),
            (r#"["a"]"#, "a map from patterns to types"),
        ] {
            let error = entries(text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_first_entry_that_matches_applies() {
        let types = entries(r#"{"blk.0.*":"Q8_0","model.layers.*":"Q6_K"}"#).unwrap();
        let mut requested = RequestedTypes::new(&types);
        let mut find = |gguf_name: &str, name: &str, is_matrix| requested.find(gguf_name, name, is_matrix, 256).unwrap();
        assert_eq!(find("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", true), Some(Kind::Blocks(BlockType::Q8_0)));
        assert_eq!(find("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", true), Some(Kind::Blocks(BlockType::Q6K)));
        assert_eq!(find("blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight", false), None);
        assert_eq!(find("token_embd.weight", "model.embed_tokens.weight", true), None);
        assert!(requested.check(false).is_ok());
    }
}
