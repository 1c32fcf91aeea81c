//! Everything that a training goes on from, in memory and on disk.
//!
//! One file holds it. Where the optimizer's state is shared out, or all weights are, every other process has a file for its share, whose
//! name says of which step it is; the one file, which is replaced last, makes them count.

use std::path::{Path, PathBuf};

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::average::Average;
use super::batches::Cursor;
use super::checkpoint::{self, Saved, Tensors, prefixed};
use super::optimizer::Optimizer;
use super::run::{Evaluation, Row};
use super::{Team, Weights};
use crate::error::{Error, Result};
use crate::exec::Home;
use crate::exec::transfer::{self, Cause};
use crate::ir::Graph;

const FILE: &str = "checkpoint.safetensors";

/// How far a training is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// What is trained, on what, and how: a hash.
    pub identity: String,
    /// A hash of the evaluation data of the first process.
    pub evaluation: Option<String>,
    /// Processes that train together.
    pub processes: usize,
    /// Start of every random choice; with the place in the data it is all that chance depends on.
    pub seed: u64,
    /// Steps that are done.
    pub step: u64,
    /// Where the next step begins.
    pub data: Cursor,
    /// Samples that fit into memory at a time, where that has been found out.
    pub part: Option<usize>,
    /// The factor on the loss, for 16-bit floats, and steps since it changed.
    pub scale: (f64, u64),
    /// Steps among them that changed nothing, since gradients overflowed 16-bit floats: neither the schedule nor the optimizer counts them.
    #[serde(default)]
    pub skipped: u64,
    /// Steps among them in whose samples nothing counted: all labels were -100.
    #[serde(default)]
    pub empty: u64,
    /// Evaluations since the best one.
    pub waited: u64,
    /// Loss and figures of some steps.
    pub curve: Vec<Row>,
    /// Scores on the way.
    pub evaluations: Vec<Evaluation>,
}

impl Position {
    /// Counts a step that was skipped, or in which nothing counted.
    pub fn count_idle(&mut self, skipped: bool, empty: bool) {
        self.skipped += u64::from(skipped);
        self.empty += u64::from(empty);
    }

    /// Notes on steps that changed nothing.
    ///
    /// # Errors
    /// None changed anything.
    pub fn idle_steps(&self) -> Result<Vec<String>> {
        let (steps, skipped, empty) = (self.step, self.skipped, self.empty);
        if steps > 0 && skipped == steps {
            let reason = format!("gradients overflowed 16-bit floats in all {steps} steps, so that no weight changed: use `precision: bf16` or `f32`");
            return Err(Error::Diverged { step: steps, reason });
        }
        if steps > 0 && empty == steps {
            return Err(Error::option("data: train", "no sample has a label that counts: all of them are -100 or padding"));
        }
        let skipped = (skipped > 0).then(|| format!("{skipped} of {steps} steps were skipped, since gradients overflowed 16-bit floats"));
        let empty = (empty > 0).then(|| format!("{empty} of {steps} steps had no label that counts: all were -100 or padding"));
        Ok(skipped.into_iter().chain(empty).collect())
    }
}

/// Whose share of the optimizer's state a file holds, and of when.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Share {
    identity: String,
    processes: usize,
    step: u64,
    rank: usize,
}

/// A training between two steps.
pub struct TrainState<'w> {
    /// How far it is.
    pub position: Position,
    /// What it has made of the weights.
    pub weights: &'w mut Weights,
    /// What the optimizer remembers; of its own parameters, where that is shared out.
    pub optimizer: Box<dyn Optimizer>,
    /// The average of the weights, where one is wanted.
    pub average: Option<Average>,
    /// The best weights so far, on the host or in a file, once some were evaluated.
    pub best: Option<Tensors>,
}

/// The file of a training in its folder.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(FILE)
}

fn share_path(folder: &Path, step: u64, rank: usize) -> PathBuf {
    folder.join(format!("checkpoint-{step}-{rank}.safetensors"))
}

fn foreign(path: PathBuf, reason: String) -> Error {
    Error::Output { path, reason, hint: "restore what began it, or start over without --resume (add --force)".into() }
}

impl TrainState<'_> {
    /// Weights that count: the average where there is one.
    pub fn current(&self, graph: &Graph) -> Tensors {
        let mut current = self.weights.state(graph);
        if let Some(average) = &self.average {
            current.extend(average.parameters().iter().map(|(name, kept)| (name.clone(), kept.clone())));
        }
        current
    }

    fn share(&self, rank: usize) -> Share {
        let Position { identity, processes, step, .. } = &self.position;
        Share { identity: identity.clone(), processes: *processes, step: *step, rank }
    }

    /// Writes all of it, with the other processes.
    ///
    /// # Errors
    /// The disk is full, memory runs out, or another process is gone.
    pub fn save(&self, folder: &Path, graph: &Graph, team: &Team) -> Result<()> {
        let (rank, step, shares) = (team.rank(), self.position.step, self.shares(team));
        let mut tensors: Tensors = prefixed(self.optimizer.state(), "optimizer/").collect();
        if rank == 0 || self.weights.home().is_shared() {
            tensors.extend(prefixed(self.weights.state(graph), "weight/"));
            if let Some(average) = &self.average {
                tensors.extend(prefixed(average.state()?, "average/"));
            }
            if let Some(best) = &self.best {
                tensors.extend(prefixed(best.clone(), "best/"));
            }
        }
        tensors.retain(|_, kept| kept.is_here());
        if rank > 0 && shares {
            checkpoint::save(&share_path(folder, step, rank), &self.share(rank), &tensors)?;
            team.wait()?;
        } else if rank == 0 {
            if shares {
                team.wait()?;
            }
            checkpoint::save(&path(folder), &self.position, &tensors)?;
        }
        team.wait()?;
        if rank > 0 && shares {
            remove_older(folder, step, rank);
        }
        Ok(())
    }

    /// Whether other processes have files of their own.
    fn shares(&self, team: &Team) -> bool {
        team.shares_out() || self.weights.home().is_shared()
    }

    /// Goes on from what lies in a folder; from nothing, where nothing does.
    ///
    /// # Errors
    /// The training is another one, or of another number of processes; a file is damaged, missing, or not of this training and step.
    pub fn restore(&mut self, folder: &Path, graph: &Graph, team: &Team) -> Result<()> {
        let path = path(folder);
        let Some((position, saved)) = checkpoint::open::<Position>(&path)? else { return Ok(()) };
        if position.identity != self.position.identity {
            return Err(foreign(path, "is of a training with other options, data or weights".into()));
        }
        if position.processes != self.position.processes {
            let (then, now) = (position.processes, self.position.processes);
            return Err(foreign(path, format!("is of a training in {then} processes, this one has {now}: its data and optimizer are shared out otherwise")));
        }
        if team.rank() == 0 && position.evaluation != self.position.evaluation {
            return Err(foreign(path, "is of a training with other evaluation data".into()));
        }
        self.position = position;
        let has_best = !saved.names("best/").is_empty();
        let share = if team.rank() > 0 && self.shares(team) { Some(self.share_of(folder, team.rank())?) } else { None };
        let share = share.as_ref().unwrap_or(&saved);
        let of_weights = if self.weights.home().is_shared() { share } else { &saved };
        let kept = self.weights.state(graph);
        for prefix in ["weight/", "best/"] {
            let held = of_weights.names(prefix);
            let mut here = kept.iter().filter(|(_, kept)| kept.is_here());
            if let Some((name, _)) = here.find(|(name, _)| !held.contains(name.as_str())).filter(|_| prefix == "weight/" || has_best) {
                return Err(Error::malformed(&path, format!("lacks the tensor `{prefix}{name}`")));
            }
        }
        self.weights.restore(&mut of_weights.under("weight/"))?;
        self.optimizer.restore(&mut share.under("optimizer/"))?;
        if let Some(average) = &mut self.average {
            average.restore(&mut of_weights.under("average/"))?;
        }
        if has_best {
            let home = self.home_of_best()?;
            let mut best: Tensors = kept.iter().filter(|(_, kept)| !kept.is_here()).map(|(name, kept)| (name.clone(), kept.clone())).collect();
            for tensor in of_weights.under("best/") {
                let (name, tensor) = tensor?;
                let kept = kept.get(&name).map_or_else(|| home.keep(&tensor), |kept| home.keep_with(&tensor, kept))?;
                best.insert(name, kept);
            }
            self.best = Some(best);
        }
        Ok(())
    }

    /// Best weights wait on the host, in a file of their own, or where weights are shared out, beside them.
    fn home_of_best(&self) -> Result<Home> {
        match self.weights.home() {
            Home::Memory(_) => Ok(Home::Memory(Device::Cpu)),
            Home::Shared(shares) => Ok(Home::Shared(shares.clone())),
            home => home.another(),
        }
    }

    /// The file of another process's share.
    fn share_of(&self, folder: &Path, rank: usize) -> Result<Saved> {
        let (path, expected) = (share_path(folder, self.position.step, rank), self.share(rank));
        match checkpoint::open::<Share>(&path)? {
            Some((share, saved)) if share == expected => Ok(saved),
            Some((share, _)) => {
                Err(foreign(path, format!("is of process {} of {} at step {} of some training, not of this one", share.rank, share.processes, share.step)))
            }
            None => Err(foreign(path, format!("is missing, and holds what the optimizer of process {rank} remembers"))),
        }
    }

    /// A hash of the step and of all weights that every process has, the same in all processes that are in step.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn hash(&self, graph: &Graph) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.position.step.to_le_bytes());
        for (name, kept) in self.weights.state(graph) {
            hasher.update(name.as_bytes());
            if self.weights.home().is_shared() {
                continue;
            }
            let values = transfer::values::<f32>(&kept.open()?, Cause::State).map_err(|e| Error::computed(format!("tensor `{name}`"), e))?;
            for value in values {
                hasher.update(&value.to_le_bytes());
            }
        }
        Ok(hasher.finalize().to_string())
    }

    /// Keeps weights as the best ones.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn keep_best(&mut self, weights: Tensors) -> Result<()> {
        self.best = None;
        let home = self.home_of_best()?;
        let copies = weights.into_iter().map(|(name, kept)| Ok((name, kept.copied_to(&home)?)));
        self.best = Some(copies.collect::<Result<_>>()?);
        Ok(())
    }
}

/// Removes the shares of a process that are of other steps; what is left of them does no harm.
fn remove_older(folder: &Path, step: u64, rank: usize) {
    let (own, end) = (share_path(folder, step, rank), format!("-{rank}.safetensors"));
    for path in std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let is_share = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("checkpoint-") && name.ends_with(&end));
        if is_share && path != own {
            let _ = std::fs::remove_file(path);
        }
    }
}
