//! Memory forecast of a training, computed from the graph.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device};

use super::{AdapterKind, Objective, QuantizerScales, Training, cuts, frozen, norm_names, optimizer, output_norm, selection};
use crate::analysis;
use crate::error::{Error, Result};
use crate::exec::{MemoryCategory, Pages, Placement, Residence, Tape};
use crate::ir::{Bindings, Element, Graph, TensorType, Value};
use crate::model::Model;
use crate::store::{Encoding, ExactBlocks, Weight};

/// Predicted peak memory of a training step, in bytes by category.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryForecast {
    bytes: [u64; 6],
    total: u64,
}

impl MemoryForecast {
    /// Predicted peak bytes of one category.
    pub fn of(&self, category: MemoryCategory) -> u64 {
        self.bytes[category as usize]
    }

    /// Predicted peak of the total. It is less than the sum of the categories, because most activations
    /// are freed before the last gradients are allocated.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The forecast by category in megabytes, as text.
    pub fn describe(&self) -> String {
        MemoryCategory::ALL
            .iter()
            .filter(|p| self.of(**p) > 0)
            .map(|p| format!("{} {} MB", p.name(), self.of(*p).div_ceil(1 << 20)))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn elements(ty: &TensorType, sizes: &Bindings) -> u64 {
    ty.shape.iter().map(|dim| dim.evaluate(sizes).unwrap_or(0) as u64).product()
}

/// Predicts the memory of a training step in each of `processes` processes, for inputs of these sizes.
/// `graph` is the part of the `whole` graph of `model` that the losses depend on. Fails if parameters are
/// offloaded or sharded, but the graph cannot be cut into blocks. `teachers` run in each step.
pub fn forecast(
    (graph, whole, model): (&Graph, &Graph, &Model),
    options: &Training,
    teachers: &[(Graph, &Model)],
    objective: &Objective,
    (sizes, processes): (&Bindings, usize),
) -> Result<MemoryForecast> {
    let width = options.precision.dtype().size_in_bytes() as u64;
    let sharded = options.shards_parameters() && processes > 1;
    let paged = options.offloads_parameters() || sharded;
    let selected = selection::selected((whole, model), &options.targets, &options.ignore);
    let elements = |ty: &TensorType| elements(ty, sizes);
    let sum = |bytes: &dyn Fn(&Value) -> u64| whole.params().map(|(_, value)| bytes(value)).sum::<u64>();
    let max = |bytes: &dyn Fn(&Value) -> u64| whole.params().map(|(_, value)| bytes(value)).max().unwrap_or(0);
    // With fixed codes, the trained elements of a quantized weight are its scales; with an adapter that its
    // codes absorb, the factors.
    let codes = |value: &Value| {
        let weight = model.weights.by_name.get(&value.name).filter(|_| selected(&value.name))?;
        if let Some(adapter) = options.adapter.as_ref().filter(|adapter| adapter.absorb) {
            return Some((adapter.rank * weight.shape.iter().sum::<usize>()) as u64);
        }
        match (&weight.encoding, options.scales, weight.exact_blocks()) {
            (Encoding::Quantized(spec), QuantizerScales::Only, _) => Some(spec.scale_shape(&weight.shape).iter().product::<usize>() as u64),
            (_, QuantizerScales::Only, Some(ExactBlocks { kind, .. })) => Some((weight.elements() / kind.elements() * kind.factors_per_block()) as u64),
            _ => None,
        }
    };
    // BF16 codes, blocks, or the floats that absorb an adapter.
    let code_bytes = |value: &Value| match model.weights.by_name.get(&value.name).and_then(Weight::exact_blocks) {
        _ if options.adapter.is_some() => 4 * elements(&value.ty),
        Some(ExactBlocks { kind, .. }) => elements(&value.ty) / kind.elements() as u64 * kind.bytes() as u64,
        None => 2 * elements(&value.ty),
    };
    let trained = |value: &Value| if selected(&value.name) { codes(value).unwrap_or_else(|| elements(&value.ty)) } else { 0 };
    let names: Vec<&String> = whole.params().map(|(_, value)| &value.name).filter(|name| selected(name)).collect();
    let settings = options.optimizer_settings(selection::hidden_layers(whole, model), names.iter().copied())?;
    let optimizer = optimizer::build(options.optimizer, &settings, &Placement::Memory(Device::Cpu))?;
    let dims = |value: &Value| {
        let dims: Vec<usize> = value.ty.shape.iter().map(|dim| dim.evaluate(sizes).unwrap_or(0)).collect();
        codes(value).map_or(dims, |scales| vec![scales as usize])
    };
    let workspace = |value: &Value| if selected(&value.name) { optimizer.workspace_bytes(&value.name, &dims(value)) } else { 0 };
    let state = |value: &Value| {
        let average = if options.average.is_some() { 4 * trained(value) } else { 0 };
        if selected(&value.name) { optimizer.state_bytes(&value.name, &dims(value)) + average } else { 0 }
    };
    // All processes have the average, and some elements of the other states.
    let shards_state = options.shards_optimizer() && !paged && processes > 1;
    let largest_state = || {
        let named: Vec<(&str, Vec<usize>)> =
            whole.params().filter(|(_, value)| selected(&value.name)).map(|(_, value)| (value.name.as_str(), dims(value))).collect();
        let (_, loads) = optimizer::shard(&*optimizer, named.iter().map(|(name, dims)| (*name, dims.as_slice())), processes);
        let averages = if options.average.is_some() { sum(&|value| 4 * trained(value)) } else { 0 };
        loads.into_iter().max().unwrap_or(0) + averages
    };
    let is_rounded = |value: &Value| {
        let weight = model.weights.by_name.get(&value.name);
        weight.is_some_and(|weight| matches!(&weight.encoding, Encoding::Quantized(_)))
    };
    let stored = |value: &Value| model.weights.by_name.get(&value.name).filter(|_| options.adapter.is_some() && !selected(&value.name));
    let frozen = |value: &Value| stored(value).map_or([width * elements(&value.ty), 0], |weight| frozen::bytes(weight, options.precision.dtype()));
    // With DoRA, the weight of each norm that is computed in a step.
    let adapter = options.adapter.as_ref().filter(|adapter| adapter.kind == AdapterKind::Dora);
    let norms: BTreeMap<String, &Value> = whole.params().filter(|_| adapter.is_some()).map(|(_, value)| (norm_names(&value.name)[1].clone(), value)).collect();
    let computed_norm = |value: &Value| if norms.contains_key(&value.name) { width * elements(&value.ty) } else { 0 };
    let norm_workspace = |value: &Value| {
        let Some((adapter, weight)) = adapter.zip(norms.get(&value.name)) else { return 0 };
        let [kept, used] = frozen(weight);
        let copied = if paged || kept == 0 { kept.max(used) } else { 0 };
        copied + output_norm::workspace(elements(&weight.ty) as usize, elements(&value.ty) as usize, adapter.rank)
    };
    // Trained weights need f32 master weights, and a copy if the forward pass rounds or converts them.
    let weight_bytes = |value: &Value| match trained(value) {
        // The codes, and the dequantized weight.
        count if codes(value).is_some() => 4 * count + code_bytes(value) + width * elements(&value.ty),
        0 => frozen(value)[0] + computed_norm(value),
        count if width == 4 && !is_rounded(value) => 4 * count,
        count => (4 + width) * count,
    };
    let taps: BTreeSet<_> = graph.outputs().iter().map(|(_, id)| *id).collect();
    let cuts = cuts::cuts(graph, options);
    let tape = Tape::new(graph, Device::Cpu, taps, &selected, &cuts);
    let (value, gradient, page) = (
        |ty: &TensorType| width * elements(ty),
        |value: &Value| if codes(value).is_some() { [width * elements(&value.ty), 4 * trained(value)] } else { [4 * trained(value); 2] },
        |ty: &TensorType| width * elements(ty),
    );
    let heads = objective.heads().0;
    let head_bytes = |bytes: &dyn Fn(&Value) -> u64| whole.params().filter(|(_, v)| heads.contains(&v.name)).map(|(_, v)| bytes(v)).sum::<u64>();
    let pages: Option<Pages> =
        paged.then(|| (&page as &dyn Fn(&TensorType) -> u64, (head_bytes(&|value| page(&value.ty)), head_bytes(&|value| 4 * trained(value)))));
    let walk = tape.forecast(&value, &gradient, pages);
    let mut found = MemoryForecast::default();
    let mut set = |category: MemoryCategory, bytes: u64| found.bytes[category as usize] = bytes;
    set(MemoryCategory::Activations, walk.activations);
    let element = |ty: &TensorType| if ty.element == Element::Int { 8 } else { width };
    let batch: u64 = graph.inputs().map(|(_, value)| element(&value.ty) * elements(&value.ty)).sum();
    set(MemoryCategory::Data, batch * options.gradient_accumulation.max(1) as u64);
    let of_teacher = |(graph, model): &(Graph, &Model)| {
        let weights = graph.params().filter_map(|(_, value)| model.weights.by_name.get(&value.name));
        let bytes = weights.map(|weight| Residence::Stored.bytes(weight, DType::F32));
        if options.offloads_parameters() { bytes.max().unwrap_or(0) } else { bytes.sum() }
    };
    let bytes = teachers.iter().filter(|_| !objective.teacher_values().is_empty()).map(of_teacher);
    let teacher_bytes = if options.offloads_parameters() { bytes.max().unwrap_or(0) } else { bytes.sum() };
    set(MemoryCategory::Teacher, teacher_bytes);
    let student_bytes = if paged {
        if cuts.is_empty() {
            let option = if sharded { "shard: parameters" } else { "offload: parameters" };
            return Err(Error::option(option, format!("the model cannot be cut into blocks: {}", analysis::single_block_reason(graph).unwrap_or_default())));
        }
        // During the update of a parameter, its gradient and optimizer state are in memory.
        let update = |value: &Value| if selected(&value.name) { 8 * trained(value) + state(value) + workspace(value) } else { 0 };
        // With sharding, each process also holds its shard, which is at least what the optimizer updates
        // together.
        let unit = |value: &Value, bytes: u64| {
            let (unit, all) =
                if selected(&value.name) { (optimizer.unit(&value.name, &dims(value)) as u64, elements(&value.ty)) } else { (1, elements(&value.ty)) };
            (bytes * unit.min(all)).div_ceil(all.max(1))
        };
        let shard = |bytes: &dyn Fn(&Value) -> u64| {
            if sharded { sum(bytes).div_ceil(processes as u64).max(max(&|value| unit(value, bytes(value)))) } else { 0 }
        };
        let masters = |value: &Value| if selected(&value.name) && codes(value).is_none() { 4 * elements(&value.ty) } else { width * elements(&value.ty) };
        let (weights, gradients, states) = (shard(&masters), shard(&|value| 4 * trained(value)), shard(&state));
        let workspace_of_norms = max(&norm_workspace);
        set(MemoryCategory::Weights, weights + (walk.parameters + workspace_of_norms).max(max(&|value| 4 * trained(value))));
        // While the gradient of a parameter is summed, the other processes' part of it is in memory, too.
        let foreign = |value: &Value| {
            let bytes = 4 * trained(value);
            let has_part = sharded && options.gradient_accumulation <= 1 && unit(value, bytes) < bytes;
            if has_part { bytes - bytes / processes as u64 } else { bytes }
        };
        set(MemoryCategory::Gradients, gradients + max(&foreign));
        let largest = max(&|value| workspace(value) + if sharded { 0 } else { state(value) });
        set(MemoryCategory::Optimizer, states + largest);
        weights + gradients + states + (walk.total + workspace_of_norms).max(max(&update))
    } else {
        let gradients = sum(&|value| 4 * trained(value));
        set(MemoryCategory::Weights, sum(&weight_bytes) + max(&|value| frozen(value)[1].max(norm_workspace(value))));
        set(MemoryCategory::Gradients, gradients);
        let (states, workspace) = (if shards_state { largest_state() } else { sum(&state) }, max(&workspace));
        set(MemoryCategory::Optimizer, states + workspace);
        // Accumulated gradients are in memory together with the activations of the next micro-batch.
        let peak = if options.gradient_accumulation > 1 { walk.activations + gradients } else { walk.total };
        peak.max(gradients + workspace) + found.of(MemoryCategory::Weights) + states
    };
    found.total = student_bytes + teacher_bytes + found.of(MemoryCategory::Data);
    Ok(found)
}
