//! Weights of a model as tensors of a file.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::model::gguf::Family;
use crate::run_state::ColumnImportance;
use crate::store::Weight;
use crate::store::gguf::{Kind, rows_of_each};

/// A tensor of a file, or one of those that lie behind each other in one.
pub(super) struct Planned {
    /// Name in the model.
    pub name: String,
    /// Name in the file; of an expert, with its number.
    pub there: String,
    pub weight: Weight,
    /// The type that it should have, and the one that it has.
    pub wanted: Kind,
    pub kind: Kind,
    /// Whether its values lie elsewhere than in the model, or are not all of them.
    pub moved: bool,
    /// Which expert it is of.
    pub expert: Option<usize>,
    /// What errors in its columns count for.
    pub importance: Option<Arc<Vec<f32>>>,
}

/// The tensors that a weight becomes, by their names in the file: two where all experts' gates and what they gate lie in one.
///
/// # Errors
/// The family has no name for it, or it does not hold as many experts as there are.
pub(super) fn parts(family: &Family, name: &str, weight: Weight, experts: usize) -> Result<Vec<(String, Weight)>> {
    let Some(places) = family.fused(name) else {
        let nameless = || Error::tensor(name, format!("has no name in GGUF files of `{}`", family.architecture), "");
        return Ok(vec![(family.to_file(name).ok_or_else(nameless)?, weight)]);
    };
    let rows = match weight.shape[..] {
        [count, rows, _] if count == experts && rows.is_multiple_of(places.len()) => rows / places.len(),
        _ => {
            let reason = format!("has the shape {:?}, where there are {experts} experts", weight.shape);
            return Err(Error::tensor(name, reason, "the checkpoint is not what config.json says"));
        }
    };
    if places.len() == 1 {
        return Ok(places.into_iter().map(|there| (there, weight.clone())).collect());
    }
    Ok(places.into_iter().enumerate().map(|(part, there)| (there, rows_of_each(&weight, part * rows, rows, name))).collect())
}

/// The tensors of a file, in the order that `all` is brought into: experts lie behind each other in those that hold all of them.
pub(super) fn tensors(all: &mut [Planned], experts: usize) -> Result<Vec<(String, Kind, Vec<usize>)>> {
    let of_all = |there: &str| Family::of_all(there).map_or_else(|| there.to_owned(), |(of_all, _)| of_all);
    if experts > 0 {
        all.sort_by_cached_key(|planned| (of_all(&planned.there), planned.expert));
    }
    let mut tensors: Vec<(String, Kind, Vec<usize>)> = Vec::new();
    let mut last: Option<&Planned> = None;
    for planned in &*all {
        let Planned { name, there, weight, kind, .. } = planned;
        let Some(expert) = planned.expert else {
            tensors.push((there.clone(), *kind, weight.shape.clone()));
            last = None;
            continue;
        };
        let before = last.filter(|other| of_all(&other.there) == of_all(there));
        let next = before.and_then(|other| other.expert).map_or(0, |expert| expert.saturating_add(1));
        let alike = before.is_none_or(|other| other.weight.shape == weight.shape && other.kind == *kind);
        if expert != next || expert >= experts || !alike || weight.shape.len() != 2 {
            return Err(Error::tensor(name, format!("is not one of {experts} experts of one shape"), "the checkpoint is not what config.json says"));
        }
        if expert.saturating_add(1) == experts {
            tensors.push((of_all(there), *kind, [&[experts], weight.shape.as_slice()].concat()));
        }
        last = Some(planned);
    }
    let mut names = BTreeSet::new();
    if let Some((name, ..)) = tensors.iter().find(|(name, ..)| !names.insert(name)) {
        let two: Vec<&str> = all.iter().filter(|planned| of_all(&planned.there) == *name).map(|planned| planned.name.as_str()).collect();
        let reason = format!("and `{}` are both `{name}` in GGUF files", two.last().copied().unwrap_or_default());
        return Err(Error::tensor(two.first().copied().unwrap_or_default(), reason, "leave one of them out of the checkpoint"));
    }
    // A last one that is missing leaves a tensor open.
    let open = all.iter().filter(|planned| planned.expert.is_some()).map(|planned| of_all(&planned.there));
    match open.into_iter().find(|name| !tensors.iter().any(|(held, ..)| held == name)) {
        None => Ok(tensors),
        Some(name) => Err(Error::tensor(&name, format!("has fewer than {experts} experts"), "the checkpoint is not what config.json says")),
    }
}

pub(super) fn kind_name(kind: Kind) -> String {
    match kind {
        Kind::Plain(dtype) => dtype.to_string(),
        Kind::Blocks(kind) => kind.name().to_owned(),
    }
}

/// Matrices whose rows are no whole blocks of the type that they should have.
pub(super) fn fallbacks(all: &[Planned], file: &str) -> Option<String> {
    let mut found: BTreeMap<(String, String, usize), usize> = BTreeMap::new();
    for Planned { weight, wanted, kind, .. } in all.iter().filter(|planned| planned.wanted != planned.kind) {
        *found.entry((kind_name(*wanted), kind_name(*kind), width(weight))).or_default() += 1;
    }
    let (mut bits, mut elements) = (0u64, 0u64);
    for Planned { weight, kind, .. } in all {
        bits += kind.byte_count(&weight.shape).unwrap_or(0) * 8;
        elements += weight.elements() as u64;
    }
    let told = |((wanted, kind, row), count): (&(String, String, usize), &usize)| format!("{count} of {wanted} with rows of {row} are {kind}");
    let all = found.iter().map(told).collect::<Vec<_>>().join(", ");
    (!found.is_empty())
        .then(|| format!("{file}: rows that are no whole blocks take larger types: {all}; {:.2} bits per weight in all", bits as f64 / elements.max(1) as f64))
}

/// What the report says of matrices with and without importance.
pub(super) fn weighed(all: &[Planned], importance: &ColumnImportance, file: &str) -> Vec<String> {
    let (with, without): (Vec<&Planned>, Vec<&Planned>) =
        all.iter().filter(|planned| matches!(planned.kind, Kind::Blocks(_))).partition(|planned| planned.importance.is_some());
    let mut notes = vec![format!(
        "{file}: in {} matrices, errors count by the mean square of what columns were multiplied with on {} calibration samples",
        with.len(),
        importance.samples
    )];
    if let Some(first) = without.first() {
        notes.push(format!(
            "{file}: {} matrices are written as without samples: the head, what no layer alone reads, and types that are not searched for (the first: `{}`)",
            without.len(),
            first.name
        ));
    }
    if let Some(first) = importance.unseen.first() {
        notes.push(format!("{file}: no sample came to {} matrices of experts, whose columns count the same (the first: `{first}`)", importance.unseen.len()));
    }
    notes
}

/// Elements of a row of a file's tensor.
pub(super) fn width(weight: &Weight) -> usize {
    weight.shape.last().copied().unwrap_or(1)
}
