//! Types that a recipe selects for single matrices of a GGUF file.

use std::collections::BTreeSet;
use std::str::FromStr;

use serde::de::IntoDeserializer;
use serde::de::value::{Error as InvalidName, StrDeserializer};
use serde::{Deserialize, Serialize};

use super::HEAD;
use crate::error::{Error, ParseError, Result};
use crate::kernel::ggml::BlockType;
use crate::store::gguf::Kind;
use crate::store::{DType, Pattern, select};

/// Defines [`TensorType`] from the table of block types.
macro_rules! define {
    ($($name:ident $codec:ident $id:literal $elements:ident $bytes:literal $importance:ident $description:literal;)+) => {
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
            $(#[doc = $description] $name,)+
        }

        impl TensorType {
            /// All types, the largest first.
            pub(crate) const ALL: [TensorType; 3 + BlockType::ALL.len()] = [TensorType::F32, TensorType::F16, TensorType::BF16, $(TensorType::$name),+];

            /// The type in the file.
            pub(crate) fn kind(self) -> Kind {
                match self {
                    TensorType::F32 => Kind::Plain(DType::F32),
                    TensorType::F16 => Kind::Plain(DType::F16),
                    TensorType::BF16 => Kind::Plain(DType::BF16),
                    $(TensorType::$name => Kind::Blocks(BlockType::$name),)+
                }
            }
        }
    };
}

crate::kernel::block_types!(define);

impl TensorType {
    /// Whether rows of this length are complete blocks of the type.
    pub(crate) fn fits(self, row: usize) -> bool {
        row.is_multiple_of(self.kind().block_size())
    }

    /// Whether the importance of columns affects the quantization.
    pub(super) fn uses_importance(self) -> bool {
        self.kind().uses_importance()
    }
}

impl FromStr for TensorType {
    type Err = ParseError;

    fn from_str(name: &str) -> Result<Self, ParseError> {
        let deserializer: StrDeserializer<'_, InvalidName> = name.into_deserializer();
        TensorType::deserialize(deserializer).map_err(|e| e.to_string().into())
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
    let fitting: Vec<String> = TensorType::ALL.into_iter().filter(|kind| kind.fits(row)).map(|kind| kind.kind().to_string()).collect();
    let (size, kind) = (kind.kind().block_size(), kind.kind());
    let reason = format!("has rows of {row} elements, which is not a multiple of {size}, the block size of {kind}");
    let source = format!("the `types` pattern `{pattern}` matches it as `{gguf_name}`");
    Err(Error::tensor(name, format!("{reason} ({source})"), format!("choose a type that fits its rows: {}", fitting.join(", "))))
}

/// An error about experts of one tensor for which the option `types` selects different types.
pub(super) fn mixed_experts(stacked: &str, one: (&str, Kind), other: (&str, Kind)) -> Error {
    let [one, other] = [one, other].map(|(name, kind)| format!("`{name}` would be {kind}"));
    Error::option(OPTION, format!("{one} and {other}, but all experts of `{stacked}` have the same type: use a pattern that matches all of them"))
}

#[cfg(test)]
mod tests {
    use super::super::Gguf;
    use super::*;

    #[test]
    fn all_block_types_can_be_selected() {
        let kinds = TensorType::ALL.map(TensorType::kind);
        for kind in BlockType::ALL {
            assert!(kinds.contains(&Kind::Blocks(kind)), "{}", kind.name());
        }
        for kind in TensorType::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.kind().to_string());
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
    fn entries_are_added_in_order() {
        let added = Gguf::default().with_type("z*", "Q6_K").and_then(|gguf| gguf.with_type("re:a[b]+", "F16")).unwrap();
        assert_eq!(added.types, entries(r#"{"z*":"Q6_K","re:a[b]+":"F16"}"#).unwrap());
        for (pattern, name, words) in [("a", "Q7_K", "unknown variant `Q7_K`, expected one of `F32`"), ("", "Q6_K", "a pattern cannot be empty")] {
            let error = Gguf::default().with_type(pattern, name).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_first_entry_that_matches_applies() {
        let types = entries(r#"{"blk.0.*":"Q8_0","model.layers.*":"Q6_K"}"#).unwrap();
        let mut requested = RequestedTypes::new(&types);
        let mut find = |gguf_name: &str, name: &str, is_matrix| requested.find(gguf_name, name, is_matrix, 256).unwrap();
        assert_eq!(find("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", true), Some(Kind::Blocks(BlockType::Q8_0)));
        assert_eq!(find("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", true), Some(Kind::Blocks(BlockType::Q6_K)));
        assert_eq!(find("blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight", false), None);
        assert_eq!(find("token_embd.weight", "model.embed_tokens.weight", true), None);
        assert!(requested.check(false).is_ok());
    }
}
