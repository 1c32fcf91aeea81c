//! Layerwise runs of several processes: each rank runs the model on some of the batches and modifies some of
//! the layers. Statistics are summed in the order of ranks, so that all ranks continue with the same ones.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;
use std::rc::Rc;
use std::{fs, mem};

use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::block_checkpoints::{BlockCheckpoints, BlockReport, StoredBlock, identity, name};
use super::{Layer, MethodReport, Site};
use crate::data::{DataSet, Order};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::calibrate::tensor_error;
use crate::pass::{Checkpoints, Context};
use crate::store::Weight;
use crate::train::Team;
use crate::train::communicator::{SingleProcess, assign_owners};
use crate::work::Work;

/// Values of one message of a sum.
const CHUNK: usize = 4 << 20;
/// Maximum bytes of sums of products that a rank holds until it modifies their layers, unless those of one
/// value are larger.
const GROUP_BYTES: usize = 512 << 20;
/// Beginning of the keys of the weights that a rank has changed and the others read.
const EXCHANGED: &str = "exchanged-";

/// The calibration samples of a rank.
#[derive(Debug, Default)]
pub(super) struct Share {
    /// Index of its first batch.
    pub first_batch: usize,
    /// Index of its first sample.
    pub first_sample: usize,
    /// Number of batches of all ranks.
    pub batches: usize,
    /// Number of samples of all ranks.
    pub samples: usize,
}

/// The processes of a run, as seen by this one.
pub(super) struct Ranks<'t> {
    team: &'t Rc<Team>,
    checkpoints: Option<BlockCheckpoints>,
    pub share: Share,
}

/// Connects to the other processes if they run this pass too.
pub(super) fn connect(context: &Context) -> Result<Rc<Team>> {
    let team = match &context.checkpoints {
        Some(Checkpoints { is_shared: true, .. }) => Team::from_environment(&context.device)?,
        _ => Team::new(Box::new(SingleProcess))?,
    };
    Ok(Rc::new(team))
}

impl<'t> Ranks<'t> {
    /// Opens the checkpoints. Returns an error if the ranks have other options, samples, devices or
    /// instruction sets, or no folder in common.
    pub fn open(team: &'t Rc<Team>, context: &Context) -> Result<Ranks<'t>> {
        let mut ranks = Ranks { team, checkpoints: None, share: Share::default() };
        if let Some(found) = &context.checkpoints {
            let identity = identity(found, &context.device, ranks.count());
            team.agree("options, weights, samples, devices or instruction sets", &identity)?;
            let own = ranks.is_first().then(|| BlockCheckpoints::open(found, &identity)).transpose()?;
            team.wait()?;
            ranks.checkpoints = Some(own.map_or_else(|| BlockCheckpoints::attach(&found.folder, &identity), Ok)?);
        }
        Ok(ranks)
    }

    /// Number of processes.
    pub fn count(&self) -> usize {
        self.team.size()
    }

    /// The processes, if there are several.
    pub fn team(&self) -> Option<&'t Rc<Team>> {
        (self.count() > 1).then_some(self.team)
    }

    /// Whether this is rank 0, which alone writes files for all.
    pub fn is_first(&self) -> bool {
        self.team.rank() == 0
    }

    /// The checkpoints.
    pub fn checkpoints(&self) -> Option<&BlockCheckpoints> {
        self.checkpoints.as_ref()
    }

    /// A folder for temporary files of this process.
    pub fn scratch(&self) -> Result<Option<PathBuf>> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(None) };
        if self.is_first() {
            return Ok(Some(checkpoints.folder().to_owned()));
        }
        let folder = checkpoints.folder().join(format!("rank-{}", self.team.rank()));
        fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        Ok(Some(folder))
    }

    /// Indices of the batches of this rank. Those of consecutive ranks are consecutive.
    pub fn batches(&self, data: &DataSet) -> Result<Range<usize>> {
        if self.count() == 1 {
            return Ok(0..usize::MAX);
        }
        let (rank, count) = (self.team.rank(), self.count());
        let own = part(data.batches(Order::default())?, rank, count);
        Ok(if rank + 1 == count { own.start..usize::MAX } else { own })
    }

    /// The value that rank 0 computes.
    pub fn first<T: Serialize + DeserializeOwned>(&self, compute: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.count() == 1 { compute() } else { self.team.broadcast(compute) }
    }

    /// The numbers of each rank.
    pub fn gather<const BYTES: usize, T: Copy>(&self, numbers: &[T], bytes: fn(T) -> [u8; BYTES], number: fn([u8; BYTES]) -> T) -> Result<Vec<Vec<T>>> {
        let own: Vec<u8> = numbers.iter().flat_map(|number| bytes(*number)).collect();
        let all = self.team.gather(&own)?;
        Ok(all.iter().map(|bytes| bytes.as_chunks::<BYTES>().0.iter().map(|bytes| number(*bytes)).collect()).collect())
    }

    /// Replaces values by their sums over all ranks.
    pub fn sum(&self, values: &mut [f32]) -> Result<()> {
        for chunk in values.chunks_mut(CHUNK) {
            let own = Tensor::from_slice(chunk, chunk.len(), &Device::Cpu).map_err(tensor_error)?;
            chunk.copy_from_slice(&transfer::values::<f32>(&self.sum_of(&own)?, Cause::Statistics).map_err(tensor_error)?);
        }
        Ok(())
    }

    /// The sum of the tensors of all ranks, on their device.
    pub fn sum_of(&self, tensor: &Tensor) -> Result<Tensor> {
        self.team.pool().sum(tensor)
    }

    /// Groups the sites of a block: those of a group are observed before their layers are modified, because
    /// none depends on another. One process modifies the layers of each value before it observes the next
    /// one.
    pub fn groups<'s>(&self, sites: &[&'s Site], levels: &BTreeMap<String, usize>, is_whole: bool) -> Vec<Vec<&'s Site>> {
        if is_whole {
            return vec![sites.to_vec()];
        }
        if self.count() == 1 {
            return sites.iter().map(|site| vec![*site]).collect();
        }
        let mut by_level: BTreeMap<usize, Vec<&Site>> = BTreeMap::new();
        for site in sites.iter().copied() {
            by_level.entry(levels.get(&site.value).copied().unwrap_or(0)).or_default().push(site);
        }
        let mut groups = Vec::new();
        for sites in by_level.into_values() {
            let size = sites.iter().flat_map(|site| &site.layers).map(|layer| layer.size).max().unwrap_or(0);
            let held = (GROUP_BYTES / (8 * size * size).max(1)).max(1);
            groups.extend(sites.chunks(held * self.count()).map(<[&Site]>::to_vec));
        }
        groups
    }

    /// Names of the weights of a group that this rank changes: all if rows are divided, otherwise some layers
    /// of one value, or all layers of some of the values.
    pub fn own_layers(&self, group: &[&Site], divides_rows: bool) -> BTreeSet<String> {
        if divides_rows {
            return group.iter().flat_map(|site| &site.layers).map(|layer| layer.weight.clone()).collect();
        }
        let cost = |layer: &Layer| (layer.rows * layer.size) as u64;
        let names = |site: &Site| site.layers.iter().map(|layer| layer.weight.clone()).collect::<Vec<_>>();
        let tasks: Vec<(Vec<String>, u64)> = match group {
            [site] => site.layers.iter().map(|layer| (vec![layer.weight.clone()], cost(layer))).collect(),
            _ => group.iter().map(|site| (names(site), site.layers.iter().map(cost).sum())).collect(),
        };
        let costs = tasks.iter().filter_map(|(names, cost)| Some((names.first()?.clone(), *cost))).collect();
        let owners = assign_owners(&costs, self.count());
        let is_own = |names: &[String]| names.first().and_then(|name| owners.get(name)) == Some(&self.team.rank());
        tasks.into_iter().filter(|(names, _)| is_own(names)).flat_map(|(names, _)| names).collect()
    }

    /// Takes the report of a method on the values of a group that this rank has read. If all ranks read the
    /// only value, that of rank 0 counts.
    pub fn take_report(&self, group: &[&Site], report: &mut MethodReport) -> MethodReport {
        let taken = mem::take(report);
        if self.is_first() || group.len() > 1 { taken } else { MethodReport::default() }
    }

    /// Adds the weights that other ranks have changed in a group of a block, and merges the reports.
    pub fn exchange(
        &self,
        [block, group]: [usize; 2],
        model: &Model,
        (changed, report): (BTreeMap<String, Weight>, MethodReport),
        work: &Work,
    ) -> Result<(BTreeMap<String, Weight>, MethodReport)> {
        let Some(checkpoints) = self.checkpoints.as_ref().filter(|_| self.count() > 1) else { return Ok((changed, report)) };
        let key = |rank: usize| format!("{EXCHANGED}{block:04}-{group:04}-{rank:04}");
        let (own, is_stored) = (self.team.rank(), !changed.is_empty());
        let mut all = match is_stored {
            true => checkpoints.put(&key(own), model, changed, BlockReport::default(), work)?.0,
            false => changed,
        };
        let failed = |e: serde_json::Error| Error::run("the report of a rank", e, "");
        let message = serde_json::to_vec(&(is_stored, report)).map_err(failed)?;
        let mut merged = MethodReport::default();
        for (rank, message) in self.team.gather(&message)?.iter().enumerate() {
            let (is_stored, report): (bool, MethodReport) = serde_json::from_slice(message).map_err(failed)?;
            merged.extend(report);
            if is_stored && rank != own {
                all.extend(checkpoints.read(&key(rank), model)?.0);
            }
        }
        Ok((all, merged))
    }

    /// Loads the weights and the report of a block; `None` if rank 0 finds no checkpoint, or a damaged one.
    pub fn load(&self, block: usize, model: &Model, work: &Work) -> Result<Option<StoredBlock>> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(None) };
        let mut own = if self.is_first() { checkpoints.load(block, model, work)? } else { None };
        let is_stored = self.first(|| Ok(own.is_some()))?;
        if is_stored && own.is_none() {
            own = Some(checkpoints.read(&name(block), model)?);
        }
        Ok(own)
    }

    /// Rank 0 stores a checkpoint of a block. Returns it as read back from the files.
    pub fn store(&self, block: usize, model: &Model, changed: BTreeMap<String, Weight>, report: BlockReport, work: &Work) -> Result<StoredBlock> {
        let Some(checkpoints) = self.checkpoints.as_ref().filter(|_| !changed.is_empty()) else { return Ok((changed, report)) };
        if self.count() == 1 {
            return checkpoints.store(block, model, changed, report, work);
        }
        // Rank 0 removes the exchanged files below. NFS cannot remove folders with open files.
        let own = if self.is_first() {
            Some(checkpoints.store(block, model, changed, report, work)?)
        } else {
            drop((changed, report));
            None
        };
        self.team.wait()?;
        let stored = own.map_or_else(|| checkpoints.read(&name(block), model), Ok)?;
        self.team.wait()?;
        if self.is_first() {
            checkpoints.clear(EXCHANGED)?;
        }
        Ok(stored)
    }
}

/// The part of a range of `count` indices that belongs to a rank. Rank 0 has the first index if there is one.
pub(super) fn part(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let begin = |rank: usize| (count * rank).div_ceil(ranks.max(1));
    begin(rank)..begin(rank + 1)
}

/// The largest number of modified layers on a path to each value that sites read, by the name of the value.
/// Values with equal numbers do not depend on the layers that read each other.
pub(super) fn levels(graph: &Graph, sites: &[Site]) -> BTreeMap<String, usize> {
    let modified: BTreeSet<&str> = sites.iter().flat_map(|site| &site.layers).map(|layer| layer.weight.as_str()).collect();
    let mut levels: BTreeMap<&str, usize> = BTreeMap::new();
    for node in graph.nodes() {
        let names = || node.inputs.iter().map(|id| graph.value(*id).name.as_str());
        let level = names().filter_map(|name| levels.get(name)).max().copied().unwrap_or(0);
        let output = graph.value(node.output).name.as_str();
        levels.insert(output, level + usize::from(names().any(|name| modified.contains(name))));
    }
    sites.iter().map(|site| (site.value.clone(), levels.get(site.value.as_str()).copied().unwrap_or(0))).collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;
    use std::time::Duration;

    use super::super::divided_rows::DividedRows;
    use super::super::row_scales::RowScales;
    use super::super::{Moments, MomentsRequest};
    use super::*;
    use crate::kernel::grid::QuantizationParams;
    use crate::train::communicator::{RankConfig, Sockets};

    /// Runs `work` on ranks in threads of this process. Returns their results in rank order.
    fn run_ranks<T: Send>(size: usize, work: impl Fn(&Ranks) -> T + Sync) -> Vec<T> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let run = |rank: usize| {
            let config = RankConfig { rank, size, local_rank: 0, address: "127.0.0.1".into(), ports: vec![port], run: 7 };
            let minute = Duration::from_secs(60);
            let sockets = if rank == 0 { Sockets::host(&listener, &config, minute) } else { Sockets::join(&config, minute) };
            let team = Rc::new(Team::new(Box::new(sockets.unwrap())).unwrap());
            work(&Ranks { team: &team, checkpoints: None, share: Share::default() })
        };
        thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn divided_rows_are_rounded_once() {
        let steps = |values: &[f32]| {
            let params = values.chunks(3).map(|row| QuantizationParams { scale: row[0] + 10.0, zero: -row[2] });
            RowScales { steps: params.collect(), blocks: Vec::new() }
        };
        let blocks = |values: &[f32]| RowScales { steps: Vec::new(), blocks: values.chunks(3).flat_map(|row| [row[0] as u8, 7]).collect() };
        for (rows, scales) in [(2, steps as fn(&[f32]) -> RowScales), (3, steps), (8, steps), (8, blocks)] {
            let values: Vec<f32> = (0..3 * rows).map(|i| i as f32 / 4.0 - 1.1).collect();
            let layer = Layer { weight: "w".into(), rows, size: 3, input_major: false };
            let all = run_ranks(3, |ranks| {
                let mut rounded = values.clone();
                let found = DividedRows::new(ranks.team).round(&layer, &mut rounded, |layer, values| {
                    assert_eq!(values.len(), 3 * layer.rows);
                    values.iter_mut().for_each(|value| *value = value.round());
                    Ok(scales(values))
                });
                (rounded, found.unwrap())
            });
            let rounded: Vec<f32> = values.iter().map(|value| value.round()).collect();
            assert!(all.iter().all(|found| *found == (rounded.clone(), scales(&rounded))), "{rows}: {all:?}");
        }
    }

    /// The second of three ranks has no samples, and only the third one has inputs that differ from those of
    /// the original model.
    #[test]
    fn reduced_statistics_are_those_of_all_samples() {
        let rows = |part: usize, offset: f32| {
            let values: Vec<f32> = (0..12).map(|i| ((i + 12 * part) * 7 % 31) as f32 / 8.0 - 1.9 + offset).collect();
            Tensor::from_vec(values, (4, 3), &Device::Cpu).unwrap()
        };
        let moments = |parts: Range<usize>| {
            let request = MomentsRequest { products: true, original: true, held_out: true, rows: 2, ..MomentsRequest::default() };
            let mut moments = Moments::new(3, request);
            moments.batches = parts.start;
            for part in parts {
                let original = rows(part, if part < 2 { 0.0 } else { 0.25 });
                moments.add("x", &rows(part, 0.0)).unwrap();
                moments.add_original("x", &original, (0..4).collect(), &rows(part, 0.0)).unwrap();
                moments.hold_out("x", part % 2, &rows(part + 4, 0.0), Some(&rows(part + 4, 0.5))).unwrap();
            }
            moments
        };
        let reduced = run_ranks(3, |ranks| {
            let mut own = moments([0..2, 2..2, 2..4][ranks.team.rank()].clone());
            own.reduce(ranks, &Device::Cpu).unwrap();
            (ranks.first(|| Ok(ranks.team.rank())).unwrap(), own)
        });
        let all = moments(0..4);
        assert!(!all.differences.is_empty() && all.folds.len() == 2);
        for (first, found) in &reduced {
            assert_eq!((*first, found.count, found.nonzero, found.tokens()), (0, all.count, all.nonzero, all.tokens()));
            assert_eq!((&found.rows, &found.largest), (&all.rows, &all.largest));
            for (found, all) in found.folds.iter().zip(&all.folds) {
                assert_eq!((&found.rows, &found.original), (&all.rows, &all.original));
            }
            let is_near = |found: &[f32], all: &[f32]| found.len() == all.len() && found.iter().zip(all).all(|(a, b)| (a - b).abs() < 1e-4);
            assert!(found.folds.len() == 2 && is_near(&found.products, &all.products) && is_near(&found.differences, &all.differences));
            let sums = |moments: &Moments| [&moments.squares[..], &moments.magnitudes].concat();
            assert!(sums(found).iter().zip(sums(&all)).all(|(a, b)| (a - b).abs() < 1e-9));
            // All ranks have the same bits.
            assert_eq!((&found.products, sums(found)), (&reduced[0].1.products, sums(&reduced[0].1)));
        }
    }

    #[test]
    fn every_batch_belongs_to_one_rank() {
        for (count, ranks) in [(0, 2), (1, 3), (2, 3), (3, 3), (7, 3), (8, 2), (5, 1)] {
            let parts: Vec<Range<usize>> = (0..ranks).map(|rank| part(count, rank, ranks)).collect();
            assert_eq!(parts.iter().cloned().flatten().collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
            assert!(parts.iter().all(|part| (count / ranks..=count.div_ceil(ranks)).contains(&part.len())), "{parts:?}");
            assert!(count == 0 || parts[0].contains(&0));
        }
    }

    #[test]
    fn values_that_do_not_depend_on_each_other_are_modified_together() {
        let text = "input x: float[batch, 4]\nparam a: float[4, 4]\nparam b: float[4, 4]\nparam c: float[4, 4]\nparam d: float[4, 4]\nparam e: float[4, 4]\n\
            h = Linear(x, a) -> float[batch, 4]\np = Tanh(h) -> float[batch, 4]\nq = Sigmoid(h) -> float[batch, 4]\n\
            s = Linear(p, b) -> float[batch, 4]\nt = Linear(s, c) -> float[batch, 4]\nu = Linear(q, d) -> float[batch, 4]\n\
            y = Add(t, u) -> float[batch, 4]\nz = Linear(y, e) -> float[batch, 4]\noutput z = z\n";
        let graph: Graph = text.parse().unwrap();
        let sites = super::super::sites("quantize", &graph, &["a", "b", "c", "d", "e"].into(), false).unwrap();
        let levels = levels(&graph, &sites);
        let found: Vec<(&str, usize)> = levels.iter().map(|(name, level)| (name.as_str(), *level)).collect();
        assert_eq!(found, [("p", 1), ("q", 1), ("s", 2), ("x", 0), ("y", 3)]);
    }
}
