//! What training will take of memory, told from the graph.

use std::collections::BTreeSet;

use candle_core::{DType, Device};

use super::{Objective, Training, cuts, optimizer, weights};
use crate::analysis;
use crate::error::{Error, Result};
use crate::exec::{Home, MemoryCategory, Pages, Residence, Tape};
use crate::ir::{Bindings, Element, Graph, TensorType, Value, ValueId};
use crate::model::Model;

/// Bytes by category.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryForecast {
    bytes: [u64; 6],
    total: u64,
}

impl MemoryForecast {
    /// Of one category.
    pub fn of(&self, category: MemoryCategory) -> u64 {
        self.bytes[category as usize]
    }

    /// The most of all at one time: of gradients the last come when most activations have gone.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// In plain words.
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

/// What a step over samples of these sizes takes in each of so many processes, of the part of a model's graph that losses depend on.
///
/// # Errors
/// Parameters are to come and go, and the graph has no place to cut it at.
pub fn forecast(
    (graph, whole): (&Graph, &Graph),
    options: &Training,
    teacher: Option<(&Graph, &Model)>,
    objective: &Objective,
    (sizes, processes): (&Bindings, usize),
) -> Result<MemoryForecast> {
    let width = options.precision.dtype().size_in_bytes() as u64;
    let selected = weights::selected(whole, &options.targets, &options.ignore);
    let elements = |ty: &TensorType| elements(ty, sizes);
    let sum = |bytes: &dyn Fn(&Value) -> u64| whole.params().map(|(_, value)| bytes(value)).sum::<u64>();
    let most = |bytes: &dyn Fn(&Value) -> u64| whole.params().map(|(_, value)| bytes(value)).max().unwrap_or(0);
    let trained = |value: &Value| if selected(&value.name) { elements(&value.ty) } else { 0 };
    let optimizer = optimizer::build(options.optimizer, &optimizer::Settings::default(), &Home::Memory(Device::Cpu))?;
    let state = |value: &Value| {
        let dims: Vec<usize> = value.ty.shape.iter().map(|dim| dim.evaluate(sizes).unwrap_or(0)).collect();
        let average = if options.average.is_some() { 4 * elements(&value.ty) } else { 0 };
        if selected(&value.name) { optimizer.needs(&dims) + average } else { 0 }
    };
    // Weights that train are kept in f32, and in the precision of the computation where that is another one.
    let kept = |value: &Value| match (trained(value), width) {
        (0, _) => width * elements(&value.ty),
        (_, 4) => 4 * elements(&value.ty),
        (count, _) => (4 + width) * count,
    };
    let taps: BTreeSet<_> = graph.outputs().iter().map(|(_, id)| *id).collect();
    let cuts = cuts::cuts(graph, options);
    let tape = Tape::new(graph, Device::Cpu, taps, &selected, &cuts);
    let (value, gradient, page) = (|ty: &TensorType| width * elements(ty), |ty: &TensorType| 4 * elements(ty), |ty: &TensorType| width * elements(ty));
    let heads = objective.heads().0;
    let of_heads = |bytes: &dyn Fn(&Value) -> u64| whole.params().filter(|(_, value)| heads.contains(&value.name)).map(|(_, value)| bytes(value)).sum::<u64>();
    let shared = options.shards_parameters() && processes > 1;
    let paged = options.offloads_parameters() || shared;
    let pages: Option<Pages> =
        paged.then(|| (&page as &dyn Fn(&TensorType) -> u64, (of_heads(&|value| page(&value.ty)), of_heads(&|value| 4 * trained(value)))));
    let walk = tape.forecast(&value, &gradient, pages);
    let mut found = MemoryForecast::default();
    let mut set = |category: MemoryCategory, bytes: u64| found.bytes[category as usize] = bytes;
    set(MemoryCategory::Activations, walk.activations);
    let element = |ty: &TensorType| if ty.element == Element::Int { 8 } else { width };
    set(MemoryCategory::Data, graph.inputs().map(|(_, value)| element(&value.ty) * elements(&value.ty)).sum());
    let of_teacher = teacher.filter(|_| !objective.teacher_values().is_empty()).map_or(0, |(graph, model)| {
        let bytes = |(_, value): (ValueId, &Value)| model.weights.by_name.get(&value.name).map(|weight| Residence::Stored.bytes(weight, DType::F32));
        let all = graph.params().filter_map(bytes);
        if options.offloads_parameters() { all.max().unwrap_or(0) } else { all.sum() }
    });
    set(MemoryCategory::Teacher, of_teacher);
    let together = if paged {
        if cuts.is_empty() {
            let option = if shared { "shard: parameters" } else { "offload: parameters" };
            return Err(Error::option(option, format!("the model cannot be cut into blocks: {}", analysis::uncut(graph).unwrap_or_default())));
        }
        // While one parameter is changed, its gradient and state are there.
        let change = |value: &Value| if selected(&value.name) { 8 * elements(&value.ty) + state(value) } else { 0 };
        // A process keeps its share of all beside that, or the largest tensor alone.
        let share = |bytes: &dyn Fn(&Value) -> u64| if shared { (sum(bytes) / processes as u64).max(most(bytes)) } else { 0 };
        let masters = |value: &Value| if selected(&value.name) { 4 * elements(&value.ty) } else { width * elements(&value.ty) };
        let (weights, gradients, states) = (share(&masters), share(&|value| 4 * trained(value)), share(&state));
        set(MemoryCategory::Weights, weights + walk.parameters.max(most(&|value| 4 * trained(value))));
        set(MemoryCategory::Gradients, gradients + most(&|value| 4 * trained(value)));
        set(MemoryCategory::Optimizer, states + if shared { 0 } else { most(&state) });
        weights + gradients + states + walk.together.max(most(&change))
    } else {
        let gradients = sum(&|value| 4 * trained(value));
        set(MemoryCategory::Weights, sum(&kept));
        set(MemoryCategory::Gradients, gradients);
        set(MemoryCategory::Optimizer, sum(&state));
        // Gradients of a batch before lie beside the activations of the next.
        let together = if options.gradient_accumulation > 1 { walk.activations + gradients } else { walk.together };
        together + found.of(MemoryCategory::Weights) + found.of(MemoryCategory::Optimizer)
    };
    found.total = together + of_teacher + found.of(MemoryCategory::Data);
    Ok(found)
}
