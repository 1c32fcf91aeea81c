//! Extents of tensors in the data section, as llama.cpp requires them.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeSet;

use super::Outline;
use super::header::alignment;

impl Outline {
    /// Why llama.cpp does not read the data of a tensor, with the tensor's name. Tensors have different
    /// names, follow each other in their order, and end within the file (`ggml/src/gguf.cpp`,
    /// `src/llama-model-loader.h: llama_tensor_weight`). Tensors after one of unknown size are not checked.
    pub fn misplaced(&self) -> Option<(&str, String)> {
        let alignment = alignment(&self.values).ok()?;
        let (mut names, mut expected) = (BTreeSet::new(), 0u64);
        for tensor in &self.tensors {
            if !names.insert(&tensor.name) {
                return Some((&tensor.name, "occurs twice".into()));
            }
            if tensor.begin != expected {
                return Some((&tensor.name, format!("starts at byte {} of the data, not at byte {expected}, where the previous tensor ends", tensor.begin)));
            }
            let end = tensor.begin.saturating_add(tensor.byte_count()?);
            if let Some(available) = self.data_bytes.filter(|available| end > *available) {
                return Some((&tensor.name, format!("ends at byte {end} of the data, but the file has {available} (is it truncated?)")));
            }
            expected = end.checked_next_multiple_of(alignment)?;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::DType;
    use crate::store::gguf::Kind;

    #[test]
    fn tensors_follow_each_other_within_the_file() {
        let tensor = |name: &str| (name.to_owned(), Kind::Plain(DType::F32), vec![3, 3]);
        let planned = Outline::planned(Vec::new(), vec![tensor("a"), tensor("b"), tensor("c")]).unwrap();
        let file = |bytes: u64| Outline { data_bytes: Some(bytes), ..planned.clone() };
        assert_eq!(planned.misplaced(), None);
        // 36 bytes each, padded to 64. The last one may lack its padding.
        assert_eq!(file(64 + 64 + 36).misplaced(), None);
        let (name, reason) = file(64 + 64 + 35).misplaced().map(|(name, reason)| (name.to_owned(), reason)).unwrap();
        assert_eq!((name.as_str(), reason.as_str()), ("c", "ends at byte 164 of the data, but the file has 163 (is it truncated?)"));
        let mut moved = file(1000);
        moved.tensors[1].begin += 32;
        assert_eq!(moved.misplaced().unwrap().0, "b");
        // The same with a type whose size is unknown before it.
        moved.tensors[0].type_id = 4;
        assert_eq!(moved.misplaced(), None);
        let mut twice = file(1000);
        twice.tensors[2].name = "a".into();
        assert_eq!(twice.misplaced(), Some(("a", "occurs twice".into())));
    }
}
