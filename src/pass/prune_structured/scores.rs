//! Importance of units by the magnitude of their weights. Weights are read once, block by block.

use std::collections::BTreeMap;

use super::Importance;
use crate::analysis::{Group, Member, Role};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::store::Weight;
use crate::work::Work;

/// Importance of each unit of each group.
pub(super) type Scores = Vec<Vec<f64>>;

/// Computes the importance of units by the magnitudes of weights.
pub(super) fn by_weights(groups: &[&Group], model: &Model, importance: Importance, work: &Work) -> Result<Scores> {
    let counts = |member: &&Member| member.role != Role::Follows;
    let mut axes: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for member in groups.iter().flat_map(|group| &group.members).filter(counts) {
        let axes = axes.entry(member.param.as_str()).or_default();
        if !axes.contains(&member.axis) {
            axes.push(member.axis);
        }
    }
    let jobs: Vec<(&str, &Weight, Vec<usize>)> =
        axes.into_iter().map(|(name, axes)| model.weights.get(name).map(|weight| (name, weight, axes))).collect::<Result<_>>()?;
    let square = importance == Importance::L2;
    let sums = work.run("Ranking", &jobs, |(_, weight, _)| weight.stored_bytes, |(name, weight, axes)| sums(name, weight, axes, square, work))?;
    let mut by_axis: BTreeMap<(&str, usize), Vec<f64>> = BTreeMap::new();
    for ((name, _, axes), sums) in jobs.iter().zip(sums) {
        by_axis.extend(axes.iter().map(|axis| (*name, *axis)).zip(sums));
    }
    let member_sums =
        |member: &Member, size: usize| by_unit(member, size, by_axis.get(&(member.param.as_str(), member.axis)).map(Vec::as_slice).unwrap_or_default());
    let total = |group: &&Group| {
        let mut total = vec![0.0; group.size];
        for member in group.members.iter().filter(counts) {
            total.iter_mut().zip(member_sums(member, group.size)).for_each(|(sum, unit)| *sum += unit);
        }
        total
    };
    Ok(groups.iter().map(total).collect())
}

/// Sums a vector over the elements of each unit of a member.
pub(in crate::pass) fn by_unit(member: &Member, size: usize, elements: &[f64]) -> Vec<f64> {
    let mut units = vec![0.0; size];
    for (unit, sum) in units.iter_mut().enumerate() {
        member.layout.blocks(unit, &mut |at| *sum += elements.iter().skip(at).take(member.layout.block).sum::<f64>());
    }
    units
}

/// Sums the scores of several members, each normalized by its mean.
pub(super) fn average(members: impl Iterator<Item = Vec<f64>>, size: usize) -> Vec<f64> {
    let mut total = vec![0.0; size];
    for units in members {
        let mean = units.iter().sum::<f64>() / size.max(1) as f64;
        if mean > 0.0 {
            total.iter_mut().zip(&units).for_each(|(sum, unit)| *sum += unit / mean);
        }
    }
    total
}

/// Sums of magnitudes or squares over all but one axis, for each of several axes.
fn sums(name: &str, weight: &Weight, axes: &[usize], square: bool, work: &Work) -> Result<Vec<Vec<f64>>> {
    let mut by_axis: Vec<Vec<f64>> = axes.iter().map(|axis| vec![0.0; weight.shape[*axis]]).collect();
    let shapes: Vec<(usize, usize)> = axes.iter().map(|axis| (weight.shape[*axis], weight.shape[axis + 1..].iter().product())).collect();
    let mut floats = Vec::new();
    let mut at = 0;
    weight.visit(1, &mut |block| {
        floats.resize(block.now.elements(), 0.0);
        if !block.now.decode(0, &mut floats) {
            return Err(Error::tensor(name, format!("has the dtype {}, but pruning ranks only floats", weight.dtype), "add it to `ignore`"));
        }
        floats.iter_mut().for_each(|x| *x = if square { *x * *x } else { x.abs() });
        for (sums, (size, inner)) in by_axis.iter_mut().zip(&shapes) {
            add(sums, *size, *inner, at, &floats);
        }
        at += floats.len();
        work.advance(block.before.values.len() as u64)
    })?;
    Ok(by_axis)
}

/// Adds the elements `from..` of a tensor to the sums of an axis.
fn add(sums: &mut [f64], size: usize, inner: usize, from: usize, values: &[f32]) {
    let mut at = 0;
    while at < values.len() {
        let (index, inside) = ((from + at) / inner % size, (from + at) % inner);
        if inner == 1 {
            let count = (size - index).min(values.len() - at);
            sums[index..index + count].iter_mut().zip(&values[at..at + count]).for_each(|(sum, value)| *sum += f64::from(*value));
            at += count;
        } else {
            let count = (inner - inside).min(values.len() - at);
            sums[index] += lane_sum(&values[at..at + count]);
            at += count;
        }
    }
}

/// Sum over a fixed number of lanes, so that the result does not depend on the instruction set.
fn lane_sum(values: &[f32]) -> f64 {
    let mut lanes = [0f32; 16];
    let (chunks, tail) = values.as_chunks::<16>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter().chain(tail).map(|value| f64::from(*value)).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::{Bytes, DType, Encoding};
    use crate::work::{Cancel, Silent};

    /// Otherwise, groups could not be compared with each other.
    #[test]
    fn scores_are_proportional_to_the_weights() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/bert");
        let model = Model::open(folder).unwrap();
        let groups = crate::analysis::groups(&model.graph().unwrap()).unwrap().groups;
        let chosen: Vec<&Group> = groups.iter().filter(|group| group.members.iter().any(|member| member.role != Role::Follows)).collect();
        let mut doubled = model.clone();
        for (name, weight) in &model.weights.by_name {
            let bytes = weight.floats(name).unwrap().iter().flat_map(|value| (2.0 * value).to_le_bytes()).collect();
            let source = Arc::new(Bytes { dtype: DType::F32, bytes });
            doubled.weights.by_name.insert(name.clone(), Weight::new(DType::F32, weight.shape.clone(), Encoding::Dense, source));
        }
        let cancel = Cancel::default();
        let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
        for (importance, factor) in [(Importance::L1, 2.0), (Importance::L2, 4.0)] {
            let [before, after] = [&model, &doubled].map(|model| by_weights(&chosen, model, importance, &work).unwrap());
            assert!(before.iter().flatten().count() > 20 && before.iter().flatten().all(|score| *score > 0.0));
            assert!(before.iter().flatten().zip(after.iter().flatten()).all(|(before, after)| factor * before == *after), "{importance:?}");
        }
    }

    #[test]
    fn sums_do_not_depend_on_where_blocks_end() {
        let values: Vec<f32> = (0..24).map(|n| n as f32).collect();
        for (axis, expected) in [(0, vec![66.0, 210.0]), (1, vec![60.0, 92.0, 124.0]), (2, vec![60.0, 66.0, 72.0, 78.0])] {
            let shape = [2usize, 3, 4];
            let inner = shape[axis + 1..].iter().product();
            for chunk in [1, 5, 24] {
                let mut sums = vec![0.0; shape[axis]];
                values.chunks(chunk).enumerate().for_each(|(index, part)| add(&mut sums, shape[axis], inner, index * chunk, part));
                assert_eq!(sums, expected);
            }
        }
    }
}
