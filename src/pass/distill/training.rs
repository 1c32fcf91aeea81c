//! What `distill` and `finetune` do: they put a model, its data and its losses together and train.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use serde_json::{Value, json};

use super::vocabulary;
use crate::analysis;
use crate::data::Task;
use crate::error::{Error, Result};
use crate::evaluation::{self, Candle, Runner, Score, Subject};
use crate::exec::transfer;
use crate::exec::{Executor, Home, Kept, MemoryCategory, MemoryTracker, Shares, sizes_of};
use crate::ir::ops::BatchNorm as Norm;
use crate::ir::{Bindings, Element, Graph, Op, part};
use crate::model::{Config, Model};
use crate::output::REPORT_FILES;
use crate::pass::Context;
use crate::pass::identity::identity;
use crate::run_state::{Applied, RunState};
use crate::store::{ActivationScheme, ContentKey, Encoding, Weight, ZeroOrigin};
use crate::train::cache::Cache;
use crate::train::communicator::Place;
use crate::train::{
    BatchNorm, BatchSize, LogFormat, Objective, Offload, QuantizerScales, Quantizers, Surroundings, Teacher, Team, Trainer, Training, Weights, Zeros, forecast,
};
use crate::work::{Cancel, Work};

/// What helps where a training has ruined its model.
pub(in crate::pass) const REMEDY: &str = "more steps or more data, a lower learning rate, or a student that begins with more of its teacher";

/// Trains; without a context the model as it will be, as far as that can be told.
///
/// # Errors
/// Losses that the models do not allow; with a context, whatever goes wrong in training.
pub(in crate::pass) fn train(
    name: &'static str,
    model: Model,
    run: &mut RunState,
    options: Value,
    training: &Training,
    teacher: (Option<&Model>, Option<(&Path, usize)>),
    context: Option<&Context>,
) -> Result<Model> {
    match context {
        None => planned(name, model, run, options, training, teacher.0),
        Some(context) => trained(name, model, run, options, training, teacher, context),
    }
}

/// The model as it will be, as far as that can be told without training.
///
/// # Errors
/// Losses that the models do not allow.
fn planned(name: &'static str, model: Model, run: &mut RunState, options: Value, training: &Training, teacher: Option<&Model>) -> Result<Model> {
    let graph = model.graph()?;
    let their_graph = teacher.map(Model::graph).transpose()?;
    if let Some(teacher) = teacher {
        vocabulary::require_same(&model, teacher)?;
    }
    let objective =
        Objective::new(&training.losses, &graph, their_graph.as_ref(), if answers_by_token(&graph) { Task::LanguageModelling } else { Task::Classification })?;
    let small = smaller(&graph, &objective, training)?;
    let sizes = bindings(&small, batch(&graph, training), None);
    let processes = Place::from_environment()?.map_or(1, |place| place.size);
    let forecast = forecast((&small, &graph), training, their_graph.as_ref().zip(teacher), &objective, (&sizes, processes))?;
    let mut applied = Applied::new(name, options);
    applied.tensors = graph.params().map(|(_, value)| value.name.clone()).collect();
    applied.rule = "all floats that losses depend on".to_owned();
    applied.notes =
        vec![format!("training takes about {} MB for {} samples at a time: {}", forecast.total() >> 20, batch(&graph, training), forecast.describe())];
    run.history.push(applied);
    run.memory = run.memory.max(forecast.total());
    Ok(model)
}

/// Whether the folder of a model states that weights of it were pruned: a report of an earlier run does, or `config.json`.
fn states_pruning(model: &Model) -> bool {
    // Another tool's file of this name states nothing.
    let report = Config::open(&model.path.join(REPORT_FILES[0])).unwrap_or_default();
    let is_pruned = |pass: &Value| pass["name"] == "prune-unstructured" || pass["details"]["training"]["zeros_kept"].as_u64().is_some_and(|kept| kept > 0);
    let sparsity = model.config.carried_quantization().get("sparsity_config").and_then(Value::as_object);
    report.get("passes").and_then(Value::as_array).is_some_and(|passes| passes.iter().any(is_pruned)) || sparsity.is_some_and(|keys| !keys.is_empty())
}

/// The part of a graph that losses depend on, as it trains.
fn smaller(graph: &Graph, objective: &Objective, training: &Training) -> Result<Graph> {
    let of_batch = training.batch_norm == BatchNorm::Batch;
    part(graph, &objective.student_values(), &|op| match op {
        Op::BatchNorm(norm) => Norm { batch: of_batch, ..*norm }.into(),
        other => other.clone(),
    })
}

/// Whether a model gives logits for every token.
fn answers_by_token(graph: &Graph) -> bool {
    graph.outputs().iter().any(|(name, id)| name == "logits" && graph.value(*id).ty.shape.len() == 3)
}

/// Samples that are read together.
fn batch(graph: &Graph, training: &Training) -> usize {
    let images = graph.inputs().any(|(_, value)| value.ty.element == Element::Float);
    match training.batch_size {
        BatchSize::Samples(count) => count,
        BatchSize::Auto if answers_by_token(graph) => 8,
        BatchSize::Auto if images => 128,
        BatchSize::Auto => 32,
    }
}

/// Named sizes: of real samples, or of those that figures are told for.
fn bindings(graph: &Graph, batch: usize, real: Option<&BTreeMap<String, candle_core::Tensor>>) -> Bindings {
    let mut sizes = analysis::usual_sizes(graph);
    if let Some(inputs) = real {
        sizes.extend(sizes_of(graph, inputs));
    }
    sizes.insert("batch".to_owned(), batch);
    sizes
}

/// The key of a teacher's answers: its weights, its graph, the precision and the device, and whether hard labels keep their logits.
fn answers_key(teacher: &Model, graph: &Graph, training: &Training, compute: DType, device: &Device, work: &Work) -> Result<String> {
    let mut key = ContentKey::new(work);
    // Ranks on equal GPUs share answers.
    let (name, gpu) = crate::exec::name(device);
    let (device, simd) = (gpu.unwrap_or(name), crate::kernel::instruction_set());
    key.line(&format!("{} {} {compute:?} {device} {simd} {graph}", env!("CARGO_PKG_VERSION"), training.losses.hard.is_some()));
    key.files(&teacher.weight_files, &teacher.path)?;
    Ok(key.name())
}

/// The model after it has learned.
///
/// # Errors
/// Samples or losses do not fit, numbers leave what floats can hold, memory is too small, or the work is interrupted.
fn trained(
    name: &'static str,
    mut model: Model,
    run: &mut RunState,
    options: Value,
    training: &Training,
    (teacher, cached): (Option<&Model>, Option<(&Path, usize)>),
    context: &Context,
) -> Result<Model> {
    let mut applied = Applied::new(name, options.clone());
    let meter = applied.meter.clone();
    let their_model = teacher;
    let done: Result<()> = meter.time(|| {
        let mut graph = model.graph()?;
        let their_graph = teacher.map(Model::graph).transpose()?;
        if let Some(teacher) = teacher {
            vocabulary::require_same(&model, teacher)?;
        }
        let data = context.data.train.as_ref().ok_or_else(|| Error::option(name, "needs samples to learn from: `data: { train: ... }`"))?;
        let subject = Subject::of(model.clone())?;
        let samples = context.data.open(data, subject.target())?;
        if samples.task() == Task::Embedding {
            return Err(Error::option("data: train", "holds pairs with scores, which no loss learns from: name one text column, and `task: fidelity`"));
        }
        let objective = Objective::new(&training.losses, &graph, their_graph.as_ref(), samples.task())?;
        let device = &context.device;
        let team = Team::from_environment(device)?;
        let asked = context.memory.bytes.filter(|_| context.memory.asked);
        if training.shards_parameters() && asked.is_some() {
            return Err(Error::option("memory", "excludes `shard: parameters`: all processes must do the same parts of a batch; lower `batch_size`"));
        }
        let memory_limit = training.memory_limit.map(|size| size.0).into_iter().chain(asked).min();
        let memory_tracker = MemoryTracker::with_budget(memory_limit).recorded();
        let compute = training.precision.dtype();
        let folder = context.workplace.clone().unwrap_or_else(std::env::temp_dir);
        let home = if training.offloads_parameters() {
            Home::away_from(device, &folder)?
        } else if training.shards_parameters() && team.size() > 1 {
            Home::Shared(Arc::new(Shares::new(team.pool(), device, &folder)?))
        } else {
            Home::Memory(device.clone())
        };
        let is_pruned = states_pruning(&model);
        let zeros = |weight: &Weight| match weight.zero_origin {
            Some(ZeroOrigin::Pruning) => Zeros::Pruned,
            Some(ZeroOrigin::Rounding) => Zeros::Codes,
            // An integer code of zero is a small weight.
            None if weight.encoding != Encoding::Dense => Zeros::Codes,
            None if training.keep_zeros => Zeros::Pruned,
            None if is_pruned => Zeros::OfPrunedModel,
            None => Zeros::Unexplained,
        };
        let which = (training.targets.as_slice(), training.ignore.as_slice(), &zeros as &dyn Fn(&Weight) -> Zeros);
        let mut weights = Weights::load(&graph, &model, which, (home, device, compute), &memory_tracker, &context.work)?;
        let quantizers = match training.scales {
            QuantizerScales::Learnable => Some(Quantizers::new(&graph, &|name| weights.trains(name))?),
            QuantizerScales::Fixed => None,
        };
        if let Some(quantizers) = &quantizers {
            weights.learn_scales(quantizers)?;
            graph = quantizers.graph.clone();
        }
        let small = smaller(&graph, &objective, training)?;
        for (name, matrix) in objective.projections(context.seed)? {
            weights.add(&name, &matrix)?;
        }
        let is_dynamic = |weight: &Weight| matches!(&weight.encoding, Encoding::Affine(affine) if affine.activations == ActivationScheme::DynamicToken);
        let dynamic = model.weights.by_name.iter().filter(|(name, weight)| weights.trains(name) && is_dynamic(weight)).count();
        // Training computes such activations in floats, and holds weights in 32 bits.
        let is_narrow = model.weights.by_name.iter().any(|(name, weight)| weights.trains(name) && weight.dtype != crate::store::DType::F32);
        let is_rounded_when_written = dynamic > 0 || is_narrow || compute != DType::F32;
        let their_values = objective.teacher_values();
        let on = if training.offload.contains(&Offload::Teacher) { &Device::Cpu } else { device };
        let theirs = if on.is_cpu() { DType::F32 } else { compute };
        let teacher = match (teacher, &their_graph) {
            (Some(teacher), Some(graph)) if !their_values.is_empty() => {
                let place = (on, theirs, training.offloads_parameters());
                Some(Teacher::load(teacher, graph, (&their_values, &objective.heads().1), place, &memory_tracker, &context.work)?)
            }
            _ => None,
        };
        let cache = match (cached, &their_graph, their_model) {
            (Some((folder, top)), Some(graph), Some(teacher)) => {
                if !objective.reads_logits_alone() {
                    return Err(Error::option(format!("{name}: teacher_cache"), "keeps logits alone: leave out losses that read other values of the teacher"));
                }
                Some(RefCell::new(Cache::open(folder, &answers_key(teacher, graph, training, theirs, on, &context.work)?, top)?))
            }
            _ => None,
        };
        let batch = batch(&graph, training);
        let first = samples.first()?;
        let sizes = bindings(&small, batch, Some(&first.inputs));
        let forecast = forecast((&small, &graph), training, their_graph.as_ref().zip(their_model), &objective, (&sizes, team.size()))?;
        let evaluation = context.data.evaluation.as_ref().map(|data| context.data.open(data, subject.target())).transpose()?;
        // Of several processes, the first one evaluates; the others need no such data.
        let is_scored = evaluation.as_ref().is_some_and(|data| data.task() != Task::Fidelity) || team.rank() > 0;
        if training.evaluate_every.is_some() && !is_scored {
            let missing = if evaluation.is_some() { "labels, or `task: language-modelling`, in" } else { "samples with labels, or text for a language model:" };
            return Err(Error::option(format!("{name}: evaluate_every"), format!("has no score to compare weights by: it needs {missing} `data: {{ evaluation: ... }}`")));
        }
        let score = |weights: &Weights, state: &BTreeMap<String, Kept>| -> Result<Option<Score>> {
            let Some(evaluation) = &evaluation else { return Ok(None) };
            // Whoever stops the training during an evaluation still gets a checkpoint behind it.
            let work = Work { cancel: &Cancel::default(), ..context.work.quiet() };
            let mut written = None;
            let mut runners: Vec<Box<dyn Runner>> = if is_rounded_when_written {
                // Scored as it will be written.
                let mut model = model.clone();
                weights.put(state, &mut model)?;
                quantizers.as_ref().map_or(Ok(()), |quantizers| quantizers.put(state, &mut model))?;
                evaluation::load([written.insert(Subject::of(model)?)], Some(&first.inputs), device, context.memory, &work)?
            } else {
                vec![Box::new(Candle::of(Executor::new(&graph, weights.parameters_of(state)?, device.clone())))]
            };
            let outcomes = evaluation::evaluate(evaluation, &mut runners, &[], &work)?;
            Ok(outcomes.models.into_iter().next().and_then(|outcome| outcome.score))
        };
        let around = Surroundings {
            name,
            work: context.work,
            seed: context.seed,
            folder: context.workplace.clone(),
            resume: context.resume,
            identity: identity(
                (&model, their_model),
                run,
                &graph,
                &options,
                Some(data),
                (context.seed, &context.work),
            )?,
            evaluation: context.data.evaluation.as_ref().filter(|_| team.rank() == 0).map(|data| data.content(&context.work)).transpose()?,
            evaluate: Some(&score),
        };
        let (zeros, masked, rounded, unexplained) = weights.constraint_counts();
        let trainer = Trainer {
            options: training,
            graph: &small,
            teacher: teacher.as_ref(),
            cache: cache.as_ref(),
            objective: &objective,
            data: &samples,
            batch,
            device,
            memory_tracker: &memory_tracker,
            team: &team,
            around,
        };
        let before = transfer::copies();
        let trained = trainer.run(&mut weights)?;
        let copied = transfer::copies().into_iter().map(|(key, count)| (key, count - before.get(&key).copied().unwrap_or(0))).filter(|(_, count)| *count > 0);
        let per_step = |count: u64| count as f64 / trained.steps_of_this_run.max(1) as f64;
        let copies: Vec<Value> =
            copied.map(|((direction, cause), count)| json!({ "direction": direction, "cause": cause, "per_step": per_step(count) })).collect();
        applied.tensors = weights.put(&trained.state, &mut model)?;
        if let Some(quantizers) = &quantizers {
            quantizers.put(&trained.state, &mut model)?;
        }
        applied.rule = "all floats that losses depend on".to_owned();
        applied.notes = trained.notes;
        if masked > 0 {
            applied.notes.push(format!("{zeros} weights of {masked} tensors were zero and stayed zero"));
        }
        if unexplained > 0 {
            applied.notes.push(format!(
                "{unexplained} tensors hold zeros that no pass has made, and nothing states that they were pruned: they were trained like other weights; \
                 `keep_zeros: true` keeps them zero"
            ));
        }
        if rounded > 0 {
            applied.notes.push(format!("{rounded} weights were trained as the integers that they are written as"));
        }
        if dynamic > 0 {
            applied.notes.push(format!(
                "losses were computed with float activations in {dynamic} layers whose activations the written model rounds to int8 at run time; \
                 scores of `evaluate_every` include that rounding"
            ));
        }
        if let Some(quantizers) = &quantizers {
            applied.notes.push(format!("scales of {rounded} weights and of {} values were learned with them", quantizers.count()));
        }
        let peaks = memory_tracker.peaks();
        let phases: Vec<Value> = peaks
            .0
            .iter()
            .map(|(category, bytes)| json!({ "name": category.name(), "predicted_bytes": forecast.of(*category), "measured_bytes": bytes }))
            .collect();
        let earlier = run.history.iter().filter(|applied| applied.name == name).count();
        let stem = if earlier == 0 { name.to_owned() } else { format!("{name}-{}", earlier + 1) };
        for format in LogFormat::with_table(&training.logs) {
            if let Some(content) = context.workplace.as_ref().and_then(|folder| std::fs::read(folder.join(format.file())).ok()) {
                run.attached.insert(format!("{stem}.{}", format.extension()), Arc::new(content));
            }
        }
        let trace = memory_tracker.trace().unwrap_or_default();
        applied.notes.push(trace.peak().explain(&small));
        context.memory_tracker.iter().for_each(|memory| memory.adopt(&memory_tracker));
        let details = json!({
            "training": { "steps": trained.steps, "skipped_steps": trained.skipped_steps, "zeros_kept": zeros, "losses": objective.losses, "curve": trained.curve, "evaluations": trained.evaluations, "copies": copies },
            "memory": { "peak_bytes": peaks.1, "predicted_bytes": forecast.total(), "phases": phases, "timeline": trained.timeline.points, "peak_step": trace.picture() },
        });
        applied.details = Arc::new(move || details.clone());
        memory_tracker.give(MemoryCategory::Weights, u64::MAX);
        Ok(())
    });
    done?;
    run.history.push(applied);
    Ok(model)
}
