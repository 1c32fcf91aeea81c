//! Exchange of gradients between processes in the background, while the backward pass continues.
//!
//! Parameters are divided into buckets in the order in which the backward pass completes their gradients. The
//! exchange of a bucket starts when its gradients and those of all earlier buckets are complete. The order
//! depends only on the graph, so that all processes exchange the same buckets, and sums do not depend on
//! timing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use super::communicator::buckets;
use super::{Team, Weights, scales};
use crate::error::{Error, Result};
use crate::exec::{ManagedTensor, Pending};
use crate::ir::{Graph, Kind};

/// Parameters whose gradients are exchanged together.
#[derive(Debug, PartialEq, Eq)]
struct Bucket {
    names: Vec<String>,
    /// Their gradients are complete when the backward pass has reached an earlier node than this one.
    first_reader: usize,
}

/// The buckets of a training.
#[derive(Debug)]
pub(super) struct Buckets {
    buckets: Vec<Bucket>,
    /// Nodes that read parameters with a single reader.
    nodes: BTreeMap<String, usize>,
}

impl Buckets {
    /// Divides trained parameters. Gradients of parameters in `before` come only from losses, before the
    /// backward pass.
    pub fn new(graph: &Graph, trained: &BTreeMap<String, ManagedTensor>, before: &BTreeSet<String>) -> Buckets {
        let mut readers: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for (at, node) in graph.nodes().iter().enumerate() {
            for value in node.inputs.iter().map(|id| graph.value(*id)).filter(|value| value.kind == Kind::Param) {
                readers.entry(&value.name).or_insert((at, 0)).1 += 1;
            }
        }
        // The gradient of a learned scale is computed from that of its weight.
        let mut groups: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
        trained.keys().for_each(|name| groups.entry(scales::parameter_name(name)).or_default().push(name));
        let first_reader = |name: &str| {
            let read = |name: &str| readers.get(name).map(|(first, _)| *first);
            read(name).or_else(|| read(&scales::logarithm_name(name))).unwrap_or(if before.contains(name) { usize::MAX } else { 0 })
        };
        let mut order: Vec<(usize, Vec<&String>)> = groups.into_iter().map(|(name, names)| (first_reader(name), names)).collect();
        order.sort_by_key(|(first, _)| Reverse(*first));
        let size = |names: &[&String]| names.iter().filter_map(|name| trained.get(*name)).map(|kept| kept.dims().iter().product::<usize>()).sum::<usize>();
        let lengths = buckets(&order.iter().map(|(_, names)| size(names)).collect::<Vec<_>>());
        let mut rest = order.into_iter();
        let mut bucket = |length| {
            let (firsts, names): (Vec<usize>, Vec<Vec<&String>>) = rest.by_ref().take(length).unzip();
            Bucket { names: names.into_iter().flatten().cloned().collect(), first_reader: firsts.last().copied().unwrap_or(0) }
        };
        let buckets = lengths.into_iter().map(&mut bucket).collect();
        let nodes = readers.into_iter().filter(|(_, (_, count))| *count == 1).map(|(name, (at, _))| (name.to_owned(), at)).collect();
        Buckets { buckets, nodes }
    }
}

/// Names and shapes of gradients.
type Shapes = Vec<(String, Vec<usize>)>;

/// The exchange of the gradients of one step.
pub(super) struct Exchange<'t> {
    buckets: &'t Buckets,
    team: &'t Team,
    /// Buckets in progress, with their gradients.
    started: Vec<(Shapes, Option<Pending<Tensor>>)>,
    names: BTreeSet<&'t str>,
}

impl<'t> Exchange<'t> {
    /// Has not started yet.
    pub fn new(buckets: &'t Buckets, team: &'t Team) -> Exchange<'t> {
        Exchange { buckets, team, started: Vec::new(), names: BTreeSet::new() }
    }

    /// Whether the exchange of a parameter's gradient has started. It is not repeated if the step is, after
    /// memory was insufficient: other processes have used the gradient.
    pub fn has_started(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Starts the buckets that are complete when the backward pass has computed a gradient of a parameter.
    pub fn advance(&mut self, name: &str, weights: &Weights, gradients: &mut BTreeMap<String, ManagedTensor>) -> Result<()> {
        let Some(node) = self.buckets.nodes.get(name) else { return Ok(()) };
        while let Some(bucket) = self.buckets.buckets.get(self.started.len()).filter(|bucket| bucket.first_reader > *node) {
            self.start(bucket, weights, gradients)?;
        }
        Ok(())
    }

    /// Starts all remaining buckets.
    pub fn start_rest(&mut self, weights: &Weights, gradients: &mut BTreeMap<String, ManagedTensor>) -> Result<()> {
        let rest = self.buckets.buckets.get(self.started.len()..).unwrap_or_default();
        rest.iter().try_for_each(|bucket| self.start(bucket, weights, gradients))
    }

    fn start(&mut self, bucket: &'t Bucket, weights: &Weights, gradients: &mut BTreeMap<String, ManagedTensor>) -> Result<()> {
        let own = bucket.names.iter().filter_map(|name| Some((name, gradients.remove(name)?)));
        let mut own = own.map(|(name, kept)| Ok((name.clone(), kept.open()?))).collect::<Result<BTreeMap<String, Tensor>>>()?;
        weights.add_scale_gradients(&mut own)?;
        weights.mask(&mut own)?;
        let shapes: Shapes = own.iter().map(|(name, gradient)| (name.clone(), gradient.dims().to_vec())).collect();
        let pending = if own.is_empty() { None } else { Some(self.team.start_sum(&own)?) };
        // If memory was insufficient before, the repeated step computes these gradients again.
        self.names.extend(bucket.names.iter().map(String::as_str));
        self.started.push((shapes, pending));
        Ok(())
    }

    /// Waits for all buckets. Returns the mean gradients: whole tensors or, if the optimizer state is
    /// sharded, the elements that this process updates.
    pub fn finish(self) -> Result<BTreeMap<String, Tensor>> {
        let factor = 1.0 / self.team.size() as f64;
        let mut means = BTreeMap::new();
        for (shapes, pending) in self.started {
            let Some(sum) = pending.map(Pending::wait).transpose()? else { continue };
            let mut start = 0;
            for (name, dims) in shapes {
                let whole = dims.iter().product::<usize>();
                let count = self.team.own_part(&name).map_or(whole, |part| part.len());
                let flat = [count];
                let own = || sum.narrow(0, start, count)?.affine(factor, 0.0)?.reshape(if count == whole { &dims } else { &flat[..] });
                if count > 0 {
                    means.insert(name.clone(), own().map_err(|e| Error::candle(format!("gradient of `{name}`"), e))?);
                }
                start += count;
            }
        }
        Ok(means)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Parameters of later nodes come first, and a bucket waits for the earliest reader of its parameters.
    #[test]
    fn buckets_follow_the_backward_pass() {
        let text = "input x: float[batch, 4]\nparam tied: float[4, 4]\nparam b: float[4, 4]\nparam c: float[4, 4]\n\
            h = Linear(x, tied) -> float[batch, 4]\ni = Linear(h, b) -> float[batch, 4]\n\
            j = Linear(i, c) -> float[batch, 4]\ny = Linear(j, tied) -> float[batch, 4]\noutput y = y\n";
        let graph: Graph = text.parse().unwrap();
        let tensor = |name: &str| (name.to_owned(), ManagedTensor::from(Tensor::zeros((4, 4), candle_core::DType::F32, &Device::Cpu).unwrap()));
        let trained = ["b", "b/logarithm", "c", "projection", "tied", "unread"].map(tensor).into();
        let found = Buckets::new(&graph, &trained, &BTreeSet::from(["projection".to_owned()]));
        let bucket = |names: &[&str], first_reader| Bucket { names: names.iter().map(|name| (*name).to_owned()).collect(), first_reader };
        let expected = [bucket(&["projection"], usize::MAX), bucket(&["c"], 2), bucket(&["b", "b/logarithm"], 1), bucket(&["tied"], 0), bucket(&["unread"], 0)];
        assert_eq!(found.buckets, expected);
        // Gradients of other readers do not show how far the backward pass is.
        assert_eq!(found.nodes, BTreeMap::from([("b".to_owned(), 1), ("c".to_owned(), 2)]));
    }
}
