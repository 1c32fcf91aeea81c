//! Linear layers that are changed one after another while calibration samples go through the model, block by block: what a layer reads
//! has gone through the changed layers before it. In memory are one block, what samples hold between blocks, and the sums of one place.

mod finished;
mod low_rank;
mod moments;
mod palettes;
mod rescale;
mod rounding;
mod solved;
mod sparse;

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Tensor};

use crate::analysis;
use crate::data::{Sides, TokenAxis};
use crate::error::{Error, Result};
use crate::evaluation::Subject;
use crate::exec::{Blockwise, BlockwiseOptions, MemoryNeed, Residence};
use crate::ir::{Graph, Kind, Op};
use crate::kernel::dense::transposed;
use crate::model::Model;
use crate::pass::{Context, calibrate, identity::identity};
use crate::run_state::RunState;
use crate::store::{ByteSize, Weight};
pub(in crate::pass) use finished::kept_bytes;
use finished::{Facts, Finished};
pub(in crate::pass) use low_rank::decompose;
use moments::{Moments, Wanted};
pub(in crate::pass) use palettes::palettize;
use rescale::{Rescale, Strength};
pub(in crate::pass) use rounding::quantize;
pub(in crate::pass) use sparse::{prune, require};

pub(in crate::pass) use super::cached_scales::find as find_cache_scales;
pub(in crate::pass) use super::stored_scales::find as find_input_scales;

/// A linear layer.
#[derive(Debug, Clone, PartialEq)]
struct Layer {
    /// Name of its weight.
    pub weight: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub size: usize,
    /// Whether the weight is stored as `[in, out]`.
    pub input_major: bool,
}

/// Bytes that samples hold between nodes in memory, at least and at most: a third of what the model takes as 32-bit floats. Beyond them, they
/// lie on disk between blocks, and are computed from the beginning of their block for each value that is looked at.
const HELD: [u64; 2] = [128 << 20, 1 << 30];

/// Layers that read one value.
#[derive(Debug, Clone, PartialEq)]
struct Site {
    value: String,
    tokens: TokenAxis,
    layers: Vec<Layer>,
}

/// What layers become.
trait Method {
    /// Refuses a layer that it cannot change, before any work.
    ///
    /// # Errors
    /// Why, by name.
    fn check(&self, layer: &Layer, weight: &Weight) -> Result<()>;

    /// Learns what the next layers read.
    ///
    /// # Errors
    /// What was seen cannot be computed with.
    fn read(&mut self, value: &str, moments: Moments) -> Result<()>;

    /// The new weights of a layer that reads what was seen last, by name; `values` are `[rows, size]`.
    ///
    /// # Errors
    /// The weight cannot be changed.
    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>>;

    /// Bytes that changing a layer takes beside sums of products, about.
    fn bytes(&self, layer: &Layer) -> usize {
        16 * layer.rows * layer.size
    }

    /// What the layer multiplies with from then on, in the shape that its weight has had, as stored; nothing where it is not changed.
    ///
    /// # Errors
    /// Reading fails.
    fn values(&self, layer: &Layer, changed: &BTreeMap<String, Weight>) -> Result<Option<Vec<f32>>> {
        changed.get(&layer.weight).map(|weight| weight.floats(&layer.weight)).transpose()
    }

    /// Plain words for the report.
    fn notes(&mut self) -> &mut Vec<String>;

    /// A figure for each weight so far, for the report.
    fn figures(&mut self) -> Option<&mut BTreeMap<String, f64>> {
        None
    }
}

/// A pass at work on some weights of a model.
struct Layerwise<'a> {
    /// The pass.
    pub name: &'static str,
    /// Its options, which decide whether unfinished work is this one's.
    pub options: &'a serde_json::Value,
    pub context: &'a Context<'a>,
    /// Weights to change.
    pub targets: &'a BTreeSet<&'a str>,
    /// What is to be seen of what layers read.
    pub wanted: Wanted,
    /// How range is moved between layers before they are changed.
    pub rescale: Option<Rescale>,
    /// Whether all layers of a block are seen before one of them is changed.
    pub together: bool,
}

/// What was done.
#[derive(Debug, Default)]
struct Done {
    /// Samples that were seen.
    pub samples: usize,
    /// Chains of layers that were rescaled.
    pub rescaled: usize,
    /// Weights that changed, targets and what was rescaled.
    pub changed: BTreeSet<String>,
}

/// What is said of experts of a block that saw fewer tokens than their layers have inputs.
fn little_seen(few: Vec<(usize, String)>) -> Option<String> {
    let count = few.len();
    let (tokens, value) = few.into_iter().min()?;
    Some(format!("{count} inputs of experts had fewer tokens than features, `{value}` {tokens} of them: more calibration samples would tell more"))
}

impl Layerwise<'_> {
    /// Changes the model.
    ///
    /// # Errors
    /// There is no calibration data or it does not fit, a weight belongs to no linear layer, the method fails, or the work is cancelled.
    pub fn run(&self, model: &mut Model, run: &RunState, method: &mut dyn Method) -> Result<Done> {
        let graph = model.graph()?;
        let sites = self.sites(&graph)?;
        sites.iter().flat_map(|site| &site.layers).try_for_each(|layer| method.check(layer, model.weights.get(&layer.weight)?))?;
        self.require_memory(&graph, model, &sites, method)?;
        let context = self.context;
        let data = context.data.calibration.as_ref().ok_or_else(|| Error::option(self.name, "needs calibration samples: `data: { calibration: ... }`"))?;
        let identity = identity((model, None), run, &graph, self.options, Some(data), (context.seed, &context.work))?;
        let subject = Subject::of(model.clone())?;
        let samples = context.data.open(data, subject.target())?;
        let layers: BTreeSet<String> = self.targets.iter().map(|name| (*name).to_owned()).collect();
        let chains = self.rescale.as_ref().map(|rescale| rescale.chains(&graph, &layers, model)).transpose()?;
        let values: BTreeSet<&str> = sites.iter().map(|site| site.value.as_str()).chain(chains.iter().flat_map(rescale::Chains::values)).collect();
        let finished = context.workplace.as_ref().map(|folder| Finished::open(folder, &identity, context.resume)).transpose()?;
        let [least, most] = HELD;
        let most = (model.weights.parameters().saturating_mul(4) / 3).clamp(least, most);
        let options = BlockwiseOptions {
            compute: DType::F32,
            residence: Residence::Stored,
            // The rest is for parameters, sums of products and what solves them.
            limit: context.memory.bytes.map_or(most, |bytes| (bytes / 4).min(most)) / self.runs(),
            spill: finished.as_ref().map(|finished| finished.folder().to_owned()),
            tracker: context.memory_tracker.clone(),
            ..BlockwiseOptions::on(&context.device)
        };
        let original = model.weights.clone();
        let start = |options| Blockwise::new(&graph, &original, |name| values.contains(name), options, &context.work);
        // The model as it was, beside it.
        let mut beside = self.wanted.original.then(|| start(options.clone()));
        let mut blocks = start(options);
        method.notes().extend(chains.as_ref().and_then(|chains| chains.note(blocks.blocks())));
        let mut done = Done::default();
        samples.for_each_batch("Reading samples", &context.work, |batch| {
            done.samples += batch.samples;
            beside.iter_mut().try_for_each(|beside| beside.push(batch.clone()))?;
            blocks.push(batch)
        })?;
        if done.samples == 0 {
            return Err(Error::option(self.name, "there is no calibration sample"));
        }
        let mut by_block: BTreeMap<usize, Vec<&Site>> = BTreeMap::new();
        for site in &sites {
            let block = Self::block_of(&blocks, site)?;
            by_block.entry(block).or_default().push(site);
        }
        let last = by_block.keys().next_back().copied().unwrap_or(0);
        for run in [Some(&mut blocks), beside.as_mut()].into_iter().flatten() {
            run.end_at(last);
        }
        let mut resumed = 0;
        for block in 0..=last {
            blocks.enter(block)?;
            if let Some(beside) = &mut beside {
                // Those of this block, and of the next one, which is being read for both.
                let near = blocks.blocks().iter().skip(block).take(2).flat_map(|block| &block.parameters);
                let same = near.map(String::as_str).filter(|name| !done.changed.contains(*name)).collect();
                beside.enter_beside(block, Some(&blocks), &same)?;
            }
            let sites = by_block.get(&block).map(Vec::as_slice).unwrap_or_default();
            let changed = match finished.as_ref().map(|finished| finished.take(block, model)).transpose()?.flatten() {
                Some((changed, facts)) => {
                    resumed += 1;
                    done.rescaled += facts.rescaled;
                    method.notes().extend(facts.notes);
                    method.figures().into_iter().for_each(|figures| figures.extend(facts.figures.clone()));
                    for (name, weight) in changed.iter().filter(|(name, _)| original.by_name.contains_key(*name)) {
                        let values = weight.floats(name)?;
                        blocks.replace(name, tensor(&values, &weight.shape, context)?);
                    }
                    for layer in sites.iter().flat_map(|site| &site.layers).filter(|layer| !changed.contains_key(&layer.weight)) {
                        if let Some(values) = method.values(layer, &changed)? {
                            blocks.replace(&layer.weight, tensor(&values, &original.get(&layer.weight)?.shape, context)?);
                        }
                    }
                    changed
                }
                None => {
                    let mut changed = BTreeMap::new();
                    let (mut facts, told) = (Facts::default(), method.notes().len());
                    if let (Some(rescale), Some(chains)) = (&self.rescale, &chains) {
                        facts.rescaled = rescale.block(chains, block, self, model, &mut blocks, &mut changed)?;
                    }
                    done.rescaled += facts.rescaled;
                    let (mut seen, mut few) = (Vec::new(), Vec::new());
                    for site in sites {
                        let mut moments = Moments::new(site.layers.first().map_or(0, |layer| layer.size), self.wanted);
                        self.observe(site, &mut moments, &mut blocks, beside.as_mut())?;
                        if moments.seen < moments.count.min(moments.size) {
                            few.push((moments.seen, site.value.clone()));
                        }
                        seen.push((*site, moments));
                        if !self.together {
                            self.change(&mut seen, model, &mut blocks, method, &mut changed)?;
                        }
                    }
                    self.change(&mut seen, model, &mut blocks, method, &mut changed)?;
                    method.notes().extend(little_seen(few));
                    facts.notes.extend_from_slice(method.notes().get(told..).unwrap_or_default());
                    facts.figures = method.figures().cloned().unwrap_or_default();
                    match &finished {
                        Some(finished) if !changed.is_empty() => finished.put(block, model, changed, facts, &context.work)?,
                        _ => changed,
                    }
                }
            };
            done.changed.extend(changed.keys().cloned());
            model.weights.by_name.extend(changed);
            if block < last {
                blocks.leave()?;
                beside.iter_mut().try_for_each(Blockwise::leave)?;
            }
        }
        if resumed > 0 {
            method.notes().push(format!("{resumed} blocks were finished by an interrupted run"));
        }
        Ok(done)
    }

    /// How many models run side by side.
    fn runs(&self) -> u64 {
        1 + u64::from(self.wanted.original)
    }

    /// Refuses what does not fit into memory that was asked for.
    fn require_memory(&self, graph: &Graph, model: &Model, sites: &[Site], method: &dyn Method) -> Result<()> {
        let Some(limit) = self.context.memory.bytes.filter(|_| self.context.memory.asked) else { return Ok(()) };
        let need = MemoryNeed::of(graph, &model.weights, DType::F32, Residence::Stored, &analysis::usual_sizes(graph));
        // Sums of products, and of those with the original's inputs, while the first are factored in f64; then a weight is changed by them.
        let layer = |layer: &Layer| {
            let square = if self.wanted.products { layer.size * layer.size } else { 0 };
            (16 * square).max(8 * square + method.bytes(layer))
        };
        let most = sites.iter().flat_map(|site| &site.layers).map(layer).max().unwrap_or(0) as u64;
        require_bytes(self.name, "the blocks of this model and what solves its largest layer take", need.blocks + self.runs() * need.activations + most, limit)
    }

    /// Changes layers by what they have been seen to read.
    fn change(
        &self,
        seen: &mut Vec<(&Site, Moments)>,
        model: &Model,
        blocks: &mut Blockwise,
        method: &mut dyn Method,
        changed: &mut BTreeMap<String, Weight>,
    ) -> Result<()> {
        for (site, moments) in seen.drain(..) {
            method.read(&site.value, moments)?;
            for layer in &site.layers {
                let weight = changed.get(&layer.weight).map_or_else(|| model.weights.get(&layer.weight), Ok)?.clone();
                let mut values = layer.rows_of(weight.floats(&layer.weight)?);
                require_finite(&layer.weight, &values)?;
                changed.extend(method.change(layer, &weight, &mut values)?);
                drop(values);
                // As it is stored, and as a resumed run would read it.
                if let Some(values) = method.values(layer, changed)? {
                    require_finite(&layer.weight, &values)?;
                    blocks.replace(&layer.weight, tensor(&values, &weight.shape, self.context)?);
                }
            }
        }
        Ok(())
    }

    /// Sees what layers read.
    fn observe(&self, Site { value, tokens, .. }: &Site, moments: &mut Moments, blocks: &mut Blockwise, mut beside: Option<&mut Blockwise>) -> Result<()> {
        let op = Op::Linear(crate::ir::ops::Linear::default());
        let mut index = 0;
        blocks.each(value, |batch, seen| {
            let rows = calibrate::rows(seen, &op, batch, *tokens)?;
            if let Some(beside) = &mut beside {
                moments.add_original(value, &calibrate::rows(&beside.value(index, value)?, &op, batch, *tokens)?, &rows)?;
                index += 1;
            }
            moments.add(value, &rows)
        })
    }

    /// Layers by the value that they read, in the order of the graph.
    fn sites(&self, graph: &Graph) -> Result<Vec<Site>> {
        let (mut sites, sides): (Vec<Site>, Sides) = (Vec::new(), Sides::of(graph));
        let mut found = BTreeSet::new();
        let unusable = |name: &str, reason: &str| {
            Err(Error::tensor(
                name,
                format!("{reason}; {} changes linear layers that are computed once, from what samples make", self.name),
                "add it to `ignore`",
            ))
        };
        for node in graph.nodes() {
            for (at, id) in node.inputs.iter().enumerate() {
                let value = graph.value(*id);
                if !self.targets.contains(value.name.as_str()) {
                    continue;
                }
                let (Op::Linear(op), 1) = (&node.op, at) else { return unusable(&value.name, "is read by another operator than a linear layer") };
                if !found.insert(value.name.clone()) {
                    return unusable(&value.name, "is read by several layers");
                }
                let sizes: Vec<usize> = value.ty.shape.iter().filter_map(|dim| dim.fixed()).collect();
                let [a, b] = sizes[..] else { return unusable(&value.name, "is not a matrix") };
                let (rows, size) = if op.input_major { (b, a) } else { (a, b) };
                let layer = Layer { weight: value.name.clone(), rows, size, input_major: op.input_major };
                let read = graph.value(node.inputs[0]);
                if read.kind == Kind::Param {
                    return unusable(&value.name, &format!("reads the weight `{}`, and nothing that comes from samples", read.name));
                }
                match sites.iter_mut().find(|site| site.value == read.name) {
                    Some(site) => site.layers.push(layer),
                    None => sites.push(Site { value: read.name.clone(), tokens: sides.token_axis(&read.name), layers: vec![layer] }),
                }
            }
        }
        match self.targets.iter().find(|name| !found.contains(**name)) {
            Some(name) => unusable(name, "is not used by the model"),
            None => Ok(sites),
        }
    }

    /// The block in which a site's layers are computed.
    fn block_of(blocks: &Blockwise, site: &Site) -> Result<usize> {
        let reads = |block: &crate::analysis::Block| site.layers.iter().all(|layer| block.parameters.contains(&layer.weight));
        let name = site.layers.first().map_or("", |layer| layer.weight.as_str());
        let reason = "is read in another part of the model than layers that read the same value, or not at all";
        blocks.blocks().iter().position(reads).ok_or_else(|| Error::tensor(name, reason, "add it to `ignore`"))
    }
}

impl Layer {
    /// Stored values as `[rows, size]`.
    fn rows_of(&self, values: Vec<f32>) -> Vec<f32> {
        if self.input_major { transposed(&values, self.rows) } else { values }
    }

    /// `[rows, size]` as they are stored.
    fn stored(&self, values: Vec<f32>) -> Vec<f32> {
        if self.input_major { transposed(&values, self.size) } else { values }
    }
}

/// Refuses what takes more memory than is given.
fn require_bytes(name: &str, what: &str, needed: u64, limit: u64) -> Result<()> {
    if needed <= limit {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{name}: {what} about {}, and {} are given", ByteSize(needed), ByteSize(limit)),
        hint: "give more with --memory, or add large layers to `ignore`".into(),
    })
}

/// Refuses numbers that no scale and no cost can be found for.
fn require_finite(name: &str, values: &[f32]) -> Result<()> {
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(Error::tensor(name, "holds numbers that are not finite", "start from a checkpoint without them, or add it to `ignore`")),
    }
}

fn tensor(values: &[f32], shape: &[usize], context: &Context) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &context.device).map_err(calibrate::computed)
}
