//! The tokens that a draft head proposes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::npy::NpzTensors;

use crate::data::Data;
use crate::error::{Error, Result};
use crate::exec::transfer;
use crate::generation::LanguageModel;
use crate::output::DRAFT_VOCABULARY;

/// Writes the ids of the `count` most frequent tokens in continuations into a file of the work folder,
/// including end-of-text tokens.
///
/// # Errors
/// The model does not have so many tokens, or the continuations cannot be read.
pub fn write_vocabulary(count: usize, data: &Data, model: &LanguageModel, folder: &Path) -> Result<PathBuf> {
    let arrays = data.arrays.clone().unwrap_or_default();
    let failed = |e| Error::candle(arrays.display().to_string(), e);
    let labels = NpzTensors::new(&arrays).and_then(|arrays| arrays.get("labels")).map_err(failed)?;
    let labels = labels.map_or_else(|| Ok(Vec::new()), |labels| transfer::read::<i64>(&labels)).map_err(failed)?;
    let ends: BTreeSet<usize> = model.ends().filter_map(|token| usize::try_from(token).ok()).collect();
    let ids = most_frequent(&labels, (count, model.tokens()?), &ends);
    let path = crate::files::absolute(&folder.join(DRAFT_VOCABULARY));
    let text: String = ids.iter().map(|id| format!("{id}\n")).collect();
    fs::write(&path, text).map_err(Error::io("write", &path))?;
    Ok(path)
}

/// The ids of the `count` most frequent of `total` tokens, ascending; `ends` first, and small ids before
/// others that are equally frequent.
fn most_frequent(labels: &[i64], (count, total): (usize, usize), ends: &BTreeSet<usize>) -> Vec<usize> {
    let mut counts = vec![0usize; total];
    for label in labels {
        usize::try_from(*label).ok().and_then(|label| counts.get_mut(label)).into_iter().for_each(|count| *count += 1);
    }
    let mut ids: Vec<usize> = (0..total).collect();
    ids.sort_by_key(|id| (!ends.contains(id), std::cmp::Reverse(counts[*id])));
    ids.truncate(count);
    ids.sort_unstable();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_tokens_and_ends_are_selected() {
        let labels = [-100, 5, 5, 3, 3, 3, 1, 2, -100, 99];
        let select = |count| most_frequent(&labels, (count, 8), &[7].into());
        assert_eq!((select(1), select(3), select(5)), (vec![7], vec![3, 5, 7], vec![1, 2, 3, 5, 7]));
        assert_eq!(select(7), [0, 1, 2, 3, 4, 5, 7]);
    }
}
