//! State of a training, in memory and as a checkpoint.
//!
//! A checkpoint is one file. If the optimizer state or the weights are sharded, every rank other than 0
//! writes its shard to a separate file with the step in its name. The main file is replaced last, which
//! makes the new shards valid.

use std::path::{Path, PathBuf};

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::average::Average;
use super::batches::Cursor;
use super::checkpoint::{self, Saved, Tensors, prefixed};
use super::kept_checkpoints;
use super::optimizer::Optimizer;
use super::records::{Evaluation, StepRecord};
use super::{Team, Weights};
use crate::error::{Error, Result, counted};
use crate::exec::Placement;
use crate::exec::transfer::{self, Cause};
use crate::ir::Graph;

const FILE: &str = "checkpoint.safetensors";

/// Progress of a training, as stored in a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Hash of the model, the data and the options.
    pub identity: String,
    /// Hash of the evaluation data of rank 0.
    pub evaluation: Option<String>,
    /// Number of processes.
    pub processes: usize,
    /// Seed. All randomness depends only on it and on the position in the data.
    pub seed: u64,
    /// Completed steps.
    pub step: u64,
    /// Number of steps of the whole training.
    pub total: u64,
    /// Evaluations without improvement after which the training ends.
    #[serde(default)]
    pub patience: Option<u64>,
    /// Position in the data at which the next step begins.
    pub data: Cursor,
    /// Micro-batch size that fits into memory, if a whole batch does not.
    pub part: Option<usize>,
    /// Loss scale for `f16`, and steps since it changed.
    pub scale: (f64, u64),
    /// Steps whose gradients overflowed 16-bit floats. They change nothing, and neither the schedule nor
    /// the optimizer counts them.
    #[serde(default)]
    pub skipped: u64,
    /// Steps without a label that counts. They are left out in the same way.
    #[serde(default)]
    pub empty: u64,
    /// Evaluations without improvement.
    pub waited: u64,
    /// Metrics of some steps.
    pub curve: Vec<StepRecord>,
    /// Scores so far.
    pub evaluations: Vec<Evaluation>,
}

impl Position {
    /// Counts a step that was skipped, or that had no item of a loss.
    pub fn count_idle(&mut self, skipped: bool, empty: bool) {
        self.skipped += u64::from(skipped && !empty);
        self.empty += u64::from(empty);
    }

    /// Number of steps that changed no weight.
    pub fn idle(&self) -> u64 {
        self.skipped + self.empty
    }

    /// Notes on steps that changed no weight. Fails if no step changed a weight. `is_masked` is whether
    /// `masking` selects the labels.
    pub fn idle_steps(&self, is_masked: bool) -> Result<Vec<String>> {
        let (steps, skipped, empty) = (self.step, self.skipped, self.empty);
        if steps > 0 && empty == steps {
            let steps = counted(steps as usize, "step");
            return Err(match is_masked {
                true => Error::option("masking", format!("selected no token in {steps}: increase `fraction`, or train for more steps")),
                false => Error::option("data: train", format!("no sample of {steps} has a usable label: all their labels are -100 or padding")),
            });
        }
        if steps > 0 && self.idle() == steps {
            let counts = if empty == 0 { "in".to_owned() } else { format!("in {skipped} and there was no usable label in {empty} of") };
            let reason = format!("gradients overflowed 16-bit floats {counts} all {steps} steps, so that no weight changed: use `precision: bf16` or `f32`");
            return Err(Error::Diverged { step: steps, reason });
        }
        let skipped = (skipped > 0).then(|| format!("{skipped} of {steps} steps were skipped because gradients overflowed 16-bit floats"));
        let why = if is_masked { "`masking` selected no token" } else { "they had no usable labels: all were -100 or padding" };
        let empty = (empty > 0).then(|| format!("{empty} of {steps} steps were skipped because {why}"));
        Ok(skipped.into_iter().chain(empty).collect())
    }
}

/// Metadata of a shard file.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ShardInfo {
    identity: String,
    processes: usize,
    step: u64,
    rank: usize,
}

/// State of a training between two steps.
pub struct TrainState<'w> {
    /// Progress.
    pub position: Position,
    /// The trained weights.
    pub weights: &'w mut Weights,
    /// The optimizer; if its state is sharded, that of the parameters of this rank.
    pub optimizer: Box<dyn Optimizer>,
    /// Moving average of the weights, if requested.
    pub average: Option<Average>,
    /// The best weights so far, after the first evaluation; on the host or in a file.
    pub best: Option<Tensors>,
}

/// Path of the main checkpoint file in a folder.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(FILE)
}

/// Whether a folder has a checkpoint.
pub fn has_checkpoint(folder: &Path) -> bool {
    kept_checkpoints::latest(folder, path(folder)).exists()
}

fn shard_path(folder: &Path, step: u64, rank: usize) -> PathBuf {
    folder.join(format!("checkpoint-{step}-{rank}.safetensors"))
}

/// Advice to start a training anew, without this checkpoint. That of `final_checkpoint` is never replaced.
pub(super) fn start_over(path: &Path, is_final: bool) -> String {
    match is_final {
        true => format!("start over after removing {}, or with another folder as `final_checkpoint`", path.display()),
        false => "start over with `force` and without `resume`".into(),
    }
}

fn mismatch(path: PathBuf, reason: String, is_final: bool) -> Error {
    let hint = format!(
        "resume with the model, data, options (except `max_steps`, `epochs` and a larger `patience`) and processes that it was started with, or {}",
        start_over(&path, is_final)
    );
    Error::Output { path, reason, hint }
}

impl TrainState<'_> {
    /// The weights to evaluate and to write: the moving average if there is one.
    pub fn current(&self, graph: &Graph) -> Tensors {
        let mut current = self.weights.state(graph);
        if let Some(average) = &self.average {
            current.extend(average.parameters().iter().map(|(name, kept)| (name.clone(), kept.clone())));
        }
        current
    }

    fn shard_info(&self, rank: usize) -> ShardInfo {
        let Position { identity, processes, step, .. } = &self.position;
        ShardInfo { identity: identity.clone(), processes: *processes, step: *step, rank }
    }

    /// Writes a checkpoint, and keeps this one and earlier ones, `kept` in all; all processes call it.
    pub fn save(&self, folder: &Path, graph: &Graph, team: &Team, kept: usize) -> Result<()> {
        let (rank, step, is_sharded) = (team.rank(), self.position.step, self.is_sharded(team));
        let mut tensors: Tensors = prefixed(self.optimizer.state(), "optimizer/").collect();
        if rank == 0 || self.weights.home().is_sharded() {
            tensors.extend(prefixed(self.weights.state(graph), "weight/"));
            if let Some(average) = &self.average {
                tensors.extend(prefixed(average.state()?, "average/"));
            }
            if let Some(best) = &self.best {
                tensors.extend(prefixed(best.clone(), "best/"));
            }
        }
        tensors.retain(|_, kept| kept.is_local());
        if rank > 0 && is_sharded {
            checkpoint::save(&shard_path(folder, step, rank), &self.shard_info(rank), &tensors)?;
            team.wait()?;
        } else if rank == 0 {
            if is_sharded {
                team.wait()?;
            }
            checkpoint::save(&path(folder), &self.position, &tensors)?;
            kept_checkpoints::retain(folder, &path(folder), step, kept)?;
        }
        team.wait()?;
        if rank > 0 && is_sharded {
            remove_other_steps(folder, step, rank);
        }
        Ok(())
    }

    /// Whether every rank has its own checkpoint file.
    fn is_sharded(&self, team: &Team) -> bool {
        team.is_optimizer_sharded() || self.weights.home().is_sharded()
    }

    /// Restores the checkpoint of a folder, if there is one. Fails if the checkpoint belongs to another
    /// training or number of processes. `is_final` is whether the folder is that of `final_checkpoint`.
    pub fn restore(&mut self, (folder, is_final): (&Path, bool), graph: &Graph, team: &Team) -> Result<()> {
        let Some((path, position, saved)) = kept_checkpoints::open_latest::<Position>(folder, path(folder))? else { return Ok(()) };
        if position.identity != self.position.identity {
            return Err(mismatch(path, "belongs to a training with different options, data or weights".into(), is_final));
        }
        if position.processes != self.position.processes {
            let (then, now) = (position.processes, self.position.processes);
            return Err(mismatch(
                path,
                format!("belongs to a training with {then} processes, but this one has {now}: data and optimizer state are sharded differently"),
                is_final,
            ));
        }
        if team.rank() == 0 && position.evaluation != self.position.evaluation {
            return Err(mismatch(path, "belongs to a training with different evaluation data".into(), is_final));
        }
        self.position = position;
        let has_best = !saved.names("best/").is_empty();
        let shard = if team.rank() > 0 && self.is_sharded(team) { Some(self.open_shard((folder, is_final), team.rank())?) } else { None };
        let shard = shard.as_ref().unwrap_or(&saved);
        let weight_file = if self.weights.home().is_sharded() { shard } else { &saved };
        let kept = self.weights.state(graph);
        for prefix in ["weight/", "best/"] {
            let saved_names = weight_file.names(prefix);
            let mut local = kept.iter().filter(|(_, kept)| kept.is_local());
            if let Some((name, _)) = local.find(|(name, _)| !saved_names.contains(name.as_str())).filter(|_| prefix == "weight/" || has_best) {
                return Err(Error::malformed(&path, format!("lacks the tensor `{prefix}{name}`")));
            }
        }
        self.weights.restore(&mut weight_file.under("weight/"))?;
        self.optimizer.restore(&mut shard.under("optimizer/"))?;
        if let Some(average) = &mut self.average {
            average.restore(&mut weight_file.under("average/"))?;
        }
        if has_best {
            let home = self.home_of_best()?;
            let mut best: Tensors = kept.iter().filter(|(_, kept)| !kept.is_local()).map(|(name, kept)| (name.clone(), kept.clone())).collect();
            for tensor in weight_file.under("best/") {
                let (name, tensor) = tensor?;
                let kept = kept.get(&name).map_or_else(|| home.store(&tensor), |kept| home.store_with(&tensor, kept))?;
                best.insert(name, kept);
            }
            self.best = Some(best);
        }
        Ok(())
    }

    /// Placement of the best weights: on the host, in a separate file, or sharded like the weights.
    fn home_of_best(&self) -> Result<Placement> {
        match self.weights.home() {
            Placement::Memory(_) => Ok(Placement::Memory(Device::Cpu)),
            Placement::Sharded(shares) => Ok(Placement::Sharded(shares.clone())),
            home => home.sibling(),
        }
    }

    /// Opens the shard of a rank, and checks that it belongs to this step.
    fn open_shard(&self, (folder, is_final): (&Path, bool), rank: usize) -> Result<Saved> {
        let (path, expected) = (shard_path(folder, self.position.step, rank), self.shard_info(rank));
        match checkpoint::open::<ShardInfo>(&path)? {
            Some((shard, saved)) if shard == expected => Ok(saved),
            Some((shard, _)) => {
                Err(mismatch(path, format!("belongs to rank {} of {} at step {} of another training", shard.rank, shard.processes, shard.step), is_final))
            }
            None => Err(mismatch(path, format!("is missing; it contains the shard of rank {rank}"), is_final)),
        }
    }

    /// Hash of the step and of all replicated weights, which must be equal on all ranks.
    pub fn hash(&self, graph: &Graph) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.position.step.to_le_bytes());
        for (name, kept) in self.weights.state(graph) {
            hasher.update(name.as_bytes());
            if self.weights.home().is_sharded() {
                continue;
            }
            let values = transfer::values::<f32>(&kept.open()?, Cause::State).map_err(|e| Error::candle(format!("tensor `{name}`"), e))?;
            for value in values {
                hasher.update(&value.to_le_bytes());
            }
        }
        Ok(hasher.finalize().to_string())
    }

    /// Stores a copy of the weights as the best ones.
    pub fn keep_best(&mut self, weights: Tensors) -> Result<()> {
        self.best = None;
        let home = self.home_of_best()?;
        let copies = weights.into_iter().map(|(name, kept)| Ok((name, kept.copied_to(&home)?)));
        self.best = Some(copies.collect::<Result<_>>()?);
        Ok(())
    }
}

/// Removes the shard files of a rank from other steps, except those of kept checkpoints. Errors are ignored:
/// leftover files are not read.
fn remove_other_steps(folder: &Path, step: u64, rank: usize) {
    let end = format!("-{rank}.safetensors");
    let own: Vec<PathBuf> = kept_checkpoints::steps(folder).into_iter().chain([step]).map(|step| shard_path(folder, step, rank)).collect();
    for path in std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let is_shard = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("checkpoint-") && name.ends_with(&end));
        if is_shard && !own.contains(&path) {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Position;

    #[test]
    fn each_idle_step_is_counted_once() {
        let position = |steps: &[(bool, bool)]| {
            let mut position = Position { step: steps.len() as u64, ..Position::default() };
            steps.iter().for_each(|(skipped, empty)| position.count_idle(*skipped, *empty));
            position
        };
        let (change, overflow, empty, both) = ((false, false), (true, false), (false, true), (true, true));
        assert!(position(&[change, change]).idle_steps(false).unwrap().is_empty());
        let some = position(&[overflow, change, both, overflow, change]);
        assert_eq!((some.skipped, some.empty, some.idle()), (2, 1, 3));
        let [skipped, unlabelled] = &some.idle_steps(false).unwrap()[..] else { panic!("two notes") };
        assert!(skipped.starts_with("2 of 5 steps were skipped because gradients overflowed"), "{skipped}");
        assert!(unlabelled.starts_with("1 of 5 steps were skipped because they had no usable labels"), "{unlabelled}");
        assert_eq!(position(&[change, empty]).idle_steps(true).unwrap(), ["1 of 2 steps were skipped because `masking` selected no token"]);
        let unmasked = position(&[empty]).idle_steps(true).unwrap_err().to_string();
        assert!(unmasked.starts_with("masking: selected no token in 1 step"), "{unmasked}");
        let refused = |steps: &[(bool, bool)]| position(steps).idle_steps(false).unwrap_err().to_string();
        assert!(refused(&[empty, both]).contains("no sample of 2 steps has a usable label"));
        assert!(refused(&[overflow]).contains("in all 1 steps") && refused(&[empty]).contains("no sample of 1 step has a usable label"));
        assert!(refused(&[overflow, overflow]).contains("in all 2 steps"));
        assert!(refused(&[overflow, empty]).contains("in 1 and there was no usable label in 1 of all 2 steps"));
    }
}
