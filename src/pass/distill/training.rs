//! Implementation of `distill` and `finetune`: sets up the model, the data and the losses, and trains.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use serde_json::{Value, json};

use super::adapters::Adapters;
use super::{masking, on_policy, packing, vocabulary};
use crate::analysis;
use crate::data::{DataSet, LargestInputs, Task, fixed_batch};
use crate::error::{Error, Result, counted};
use crate::evaluation::{self, Candle, Fidelity, Runner, Score, Subject};
use crate::exec::{Executor, ManagedTensor, MemoryCategory, MemoryTracker, Placement, Sharding, axis_sizes, rounding_scheme};
use crate::ir::ops::BatchNorm as Norm;
use crate::ir::{Bindings, Element, Graph, Op, Port, subgraph};
use crate::model::{Config, Model};
use crate::output::REPORT_FILES;
use crate::pass::{Context, Plan};
use crate::run_state::{Applied, RunState};
use crate::store::{ActivationScheme, ContentKey, Encoding, Selection, Weight, ZeroOrigin};
use crate::train::cache::Cache;
use crate::train::communicator::RankConfig;
use crate::train::{
    BatchNorm, BatchSize, LogFormat, Objective, Offload, OnPolicy, QuantizerScales, Quantizers, Teacher, Team, Trainer, Training, TrainingContext, Weights,
    ZeroKind, forecast, largest_inputs, require_trainable,
};
use crate::work::{Cancel, Work};

/// Advice if the outputs of a trained model are severely degraded.
pub(in crate::pass) const REMEDY: &str = "more steps or more data, a lower learning rate, or a student initialized with more layers of its teacher";

/// Description of the trained tensors in reports.
const RULE: &str = "all floats that losses depend on";

/// A training pass with its models.
pub(in crate::pass) struct Job<'a> {
    /// The record of the pass so far.
    pub applied: Applied,
    /// The model to train.
    pub student: Model,
    pub teacher: Option<Model>,
    /// The folder of cached logits of the teacher, and their number per row.
    pub cache: Option<(&'a Path, usize)>,
    /// Continuations of the student, if it writes samples.
    pub on_policy: Option<OnPolicy>,
    pub training: Training,
    /// The state of the run before the pass.
    pub state: &'a RunState,
    /// Names in the input of tensors that the pass has renamed, by their new names.
    pub renamed: BTreeMap<String, String>,
}

impl<'a> Job<'a> {
    /// Validates the losses and predicts the memory.
    pub fn plan(mut self) -> Result<Plan<'a>> {
        let adapters = self.attach_adapters()?;
        let (model, training, teacher) = (&self.student, &self.training, self.teacher.as_ref());
        let graph = model.graph()?;
        let teacher_graph = teacher.map(Model::graph).transpose()?;
        if let Some(teacher) = teacher {
            vocabulary::require_same(model, teacher)?;
        }
        let task = if has_token_logits(&graph) { Task::LanguageModelling } else { Task::Classification };
        let objective = Objective::new(&training.losses, &graph, teacher_graph.as_ref(), task)?;
        require_trainable(&graph, model, training)?;
        on_policy::sampler(self.on_policy, (model, &graph), &objective, None)?;
        masking::masker(training.masking.as_ref(), (model, &graph), &objective)?;
        let small = training_graph(&graph, &objective, training)?;
        let sizes = bindings(&small, batch(&graph, training), None);
        let processes = RankConfig::from_environment()?.map_or(1, |config| config.size);
        let forecast = forecast((&small, &graph, model), training, teacher_graph.as_ref().zip(teacher), &objective, (&sizes, processes))?;
        let names: Vec<String> = graph.params().map(|(_, value)| value.name.clone()).collect();
        let selection = Selection { targets: &training.targets, ignore: &training.ignore };
        let selected = selection.resolve(names.iter().map(|name| (name, &[] as &[String])), |_| true)?;
        let mut applied = self.applied.clone();
        applied.tensors = self.names_in_input(adapters.as_ref().map_or_else(|| selected.into_iter().map(str::to_owned).collect(), Adapters::changed));
        applied.rule = adapters.as_ref().map_or_else(|| RULE.to_owned(), Adapters::rule);
        applied.notes.push(format!(
            "training needs about {} MB for a batch of {}: {}",
            forecast.total() >> 20,
            counted(batch(&graph, training), "sample"),
            forecast.describe()
        ));
        (applied.memory, applied.checkpoint_bytes) = (forecast.total(), Some(0));
        let planned = finished(adapters.as_ref(), model.clone())?;
        Ok(Plan::new(planned, applied).with_execution(move |context| self.train(context, adapters.as_ref())))
    }

    /// Attaches adapters to the model, if requested; then only they are trained.
    fn attach_adapters(&mut self) -> Result<Option<Adapters>> {
        let Some(options) = &self.training.adapter else { return Ok(None) };
        let (adapters, student) = Adapters::attach(self.applied.name, options, &self.training, &self.student, self.state.seed)?;
        (self.training.targets, self.student) = (adapters.patterns()?, student);
        Ok(Some(adapters))
    }

    /// Reports name the tensors of the input.
    fn names_in_input(&self, names: impl IntoIterator<Item = String>) -> BTreeSet<String> {
        names.into_iter().map(|name| self.renamed.get(&name).cloned().unwrap_or(name)).collect()
    }

    /// Trains the model, or its adapters.
    fn train(&self, context: &Context, adapters: Option<&Adapters>) -> Result<(Model, Applied)> {
        let (mut applied, mut model, training) = (self.applied.clone(), self.student.clone(), &self.training);
        let (name, teacher, checkpoints) = (applied.name, self.teacher.as_ref(), context.checkpoints.as_ref());
        let teacher_model = teacher;
        // Detect damaged models before writing checkpoints and cached logits, which later runs would
        // reuse.
        teacher.into_iter().chain([&model]).try_for_each(|model| model.check_contents(&context.work))?;
        let mut graph = model.graph()?;
        let teacher_graph = teacher.map(Model::graph).transpose()?;
        if let Some(teacher) = teacher {
            vocabulary::require_same(&model, teacher)?;
        }
        let data = context.data.train.as_ref().ok_or_else(|| Error::option(name, "needs training samples: add `data: { train: ... }`"))?;
        let subject = Subject::from_model(model.clone())?;
        let samples = context.data.open(data, subject.target())?;
        if let Some(teacher) = teacher.filter(|teacher| teacher.path != model.path) {
            require_same_preprocessing(&samples, &*context.data.open(data, Subject::from_model(teacher.clone())?.target())?)?;
        }
        if samples.task() == Task::Embedding {
            return Err(Error::option("data: train", "has pairs with scores, which no loss supports: specify one text column, and `task: fidelity`"));
        }
        let task = masking::task(training.masking.as_ref(), samples.task());
        let objective = Objective::new(&training.losses, &graph, teacher_graph.as_ref(), task)?;
        packing::require_separate_texts(&objective.losses, data)?;
        let device = &context.device;
        let team = Team::from_environment(device)?;
        let requested = context.memory.bytes.filter(|_| context.memory.explicit);
        if training.shards_parameters() && requested.is_some() {
            return Err(Error::option("memory", "excludes `shard: parameters`, because all ranks must use the same micro-batches; lower `batch_size` instead"));
        }
        let memory_limit = training.memory_limit.map(|size| size.0).into_iter().chain(requested).min();
        let memory_tracker = Arc::new(MemoryTracker::with_budget(memory_limit).recorded());
        let compute = training.precision.dtype();
        let folder = checkpoints.map_or_else(std::env::temp_dir, |checkpoints| checkpoints.folder.clone());
        let placement = if training.offloads_parameters() {
            Placement::offloaded_from(device, &folder)?
        } else if training.shards_parameters() && team.size() > 1 {
            Placement::Sharded(Arc::new(Sharding::new(team.pool(), device, &folder)?))
        } else {
            Placement::Memory(device.clone())
        };
        let is_pruned = states_pruning(&model);
        let zeros = |weight: &Weight| match weight.zero_origin {
            Some(ZeroOrigin::Pruning) => ZeroKind::Pruned,
            Some(ZeroOrigin::Rounding) => ZeroKind::Codes,
            // A code of zero represents a small weight, not a pruned one.
            None if weight.encoding != Encoding::Dense => ZeroKind::Codes,
            None if training.keep_zeros => ZeroKind::Pruned,
            None if is_pruned => ZeroKind::OfPrunedModel,
            None => ZeroKind::Unexplained,
        };
        adapters.map_or(Ok(()), |adapters| adapters.require_unpruned(&zeros))?;
        let filled = adapters.map_or(Ok(0), |adapters| adapters.unexplained(&zeros))?;
        // The factors of adapters have no pruned elements.
        let of_trained = |weight: &Weight| if adapters.is_some() { ZeroKind::Codes } else { zeros(weight) };
        let mut weights = Weights::load(&graph, &model, (training, &of_trained), (placement, device, compute), &memory_tracker, &context.work)?;
        weights.set_norms(adapters.map(Adapters::norms).unwrap_or_default(), &memory_tracker)?;
        let quantizers = match training.scales {
            QuantizerScales::Learnable | QuantizerScales::Only => Some(Quantizers::new(&graph, &|name| weights.trains(name))?),
            QuantizerScales::Fixed => None,
        };
        if let Some(quantizers) = &quantizers {
            weights.learn_scales(quantizers)?;
            graph = quantizers.graph.clone();
        }
        let small = packing::for_samples(training_graph(&graph, &objective, training)?, data)?;
        for (name, matrix) in objective.projections(context.seed)? {
            weights.add(&name, &matrix)?;
        }
        let is_trained = |name: &str| weights.trains(name) || adapters.is_some_and(|adapters| adapters.adapts(name));
        let dynamic = model.weights.by_name.iter().filter(|(name, weight)| is_trained(name) && rounding_scheme(weight).is_some()).count();
        let is_static = |weight: &Weight| matches!(&weight.encoding, Encoding::Quantized(spec) if matches!(spec.activations, ActivationScheme::Float(..)) && spec.activations.parameters().is_some());
        let calibrated = model.weights.by_name.iter().filter(|(name, weight)| weights.trains(name) && is_static(weight)).count();
        // Training uses 32-bit weights.
        let is_narrow = model.weights.by_name.iter().any(|(name, weight)| weights.trains(name) && weight.dtype != crate::store::DType::F32);
        let is_rounded_when_written = adapters.is_some() || is_narrow || compute != DType::F32;
        let teacher_values = objective.teacher_values();
        let teacher_device = if training.offload.contains(&Offload::Teacher) { &Device::Cpu } else { device };
        let teacher_dtype = if teacher_device.is_cpu() { DType::F32 } else { compute };
        let teacher = match (teacher, &teacher_graph) {
            (Some(teacher), Some(graph)) if !teacher_values.is_empty() => {
                let placement = (teacher_device, teacher_dtype, training.offloads_parameters());
                let graph = packing::for_samples(subgraph(graph, &teacher_values, &Op::clone)?, data)?;
                Some(Teacher::load(teacher, &graph, (&teacher_values, &objective.heads().1), placement, &memory_tracker, &context.work)?)
            }
            _ => None,
        };
        let cache = match (self.cache, &teacher_graph, teacher_model) {
            (Some((folder, top)), Some(graph), Some(teacher)) => {
                if !objective.reads_only_logits() {
                    return Err(Error::option(format!("{name}: teacher_cache"), "stores only logits: remove losses that read other values of the teacher"));
                }
                let key = teacher_cache_key(teacher, graph, training, teacher_dtype, teacher_device, &context.work)?;
                let temperature = objective.over_logits().and_then(|logits| logits.soft).map_or(1.0, |soft| soft.temperature);
                Some(RefCell::new(Cache::open(folder, &key, top, temperature)?))
            }
            _ => None,
        };
        let batch = batch(&graph, training);
        let first = samples.first()?;
        let largest = largest_inputs(&samples, batch, training, (context.seed, team.size()), &context.work)?;
        let sizes = bindings(&small, batch, Some(&largest));
        let forecast = forecast((&small, &graph, &model), training, teacher_graph.as_ref().zip(teacher_model), &objective, (&sizes, team.size()))?;
        let evaluation = context.data.evaluation.as_ref().map(|data| context.data.open(data, subject.target())).transpose()?;
        // Without labels, the score is the fidelity to the teacher. Only rank 0 evaluates; other ranks do not
        // need evaluation data.
        let measures_fidelity = evaluation.as_ref().is_some_and(|data| data.task() == Task::Fidelity);
        let reference = teacher_model.filter(|_| measures_fidelity);
        let is_scored = evaluation.is_some() && (!measures_fidelity || reference.is_some()) || team.rank() > 0;
        if training.evaluate_every.is_some() && !is_scored {
            let missing = if evaluation.is_some() {
                "labels, a teacher, or `task: language-modelling`, in"
            } else {
                "samples with labels, or text for a language model:"
            };
            return Err(Error::option(
                format!("{name}: evaluate_every"),
                format!("needs a score to compare checkpoints: add {missing} `data: {{ evaluation: ... }}`"),
            ));
        }
        let score = |weights: &Weights, state: &BTreeMap<String, ManagedTensor>| -> Result<Option<Score>> {
            let Some(evaluation) = &evaluation else { return Ok(None) };
            // Evaluation ignores cancellation, so that a checkpoint is written afterwards.
            let work = Work { cancel: &Cancel::default(), ..context.work.quiet() };
            let (mut written, mut original) = (None, None);
            let mut runners: Vec<Box<dyn Runner>> = if is_rounded_when_written {
                // Evaluate the model that would be written.
                let mut model = model.clone();
                weights.write_to(state, &mut model)?;
                quantizers.as_ref().map_or(Ok(()), |quantizers| quantizers.write_to(state, &mut model))?;
                let model = finished(adapters, model)?;
                evaluation::load([written.insert(Subject::from_model(model)?)], Some(&first.inputs), device, context.memory, &work)?
            } else {
                vec![Box::new(Candle::new(Executor::new(&graph, weights.parameters_of(state)?, device.clone())))]
            };
            let pairs: &[(usize, usize)] = if reference.is_some() { &[(1, 0)] } else { &[] };
            if let Some(reference) = reference {
                runners.extend(evaluation::load(
                    [original.insert(Subject::from_model(reference.clone())?)],
                    Some(&first.inputs),
                    device,
                    context.memory,
                    &work,
                )?);
            }
            let outcomes = evaluation::evaluate(evaluation, &mut runners, pairs, &work)?;
            let fidelity = outcomes.pairs.first().map(Fidelity::score);
            Ok(fidelity.or_else(|| outcomes.models.into_iter().next().and_then(|outcome| outcome.score)))
        };
        let training_context = TrainingContext {
            name,
            work: context.work,
            seed: context.seed,
            folder: checkpoints.map(|checkpoints| checkpoints.folder.clone()),
            resume: checkpoints.is_some_and(|checkpoints| checkpoints.resume),
            identity: checkpoints.map(|checkpoints| checkpoints.key.clone()).unwrap_or_default(),
            evaluation: context.data.evaluation.as_ref().filter(|_| team.rank() == 0).map(|data| data.content(&context.work)).transpose()?,
            evaluate: Some(&score),
        };
        let (zeros, masked, rounded, unexplained) = weights.constraint_counts();
        let sampler = on_policy::sampler(self.on_policy, (&model, &graph), &objective, Some(data))?;
        let masker = masking::masker(training.masking.as_ref(), (&model, &graph), &objective)?;
        let trainer = Trainer {
            options: training,
            graph: &small,
            teacher: teacher.as_ref(),
            cache: cache.as_ref(),
            objective: &objective,
            data: &samples,
            sampler: sampler.as_ref(),
            masker: masker.as_ref(),
            batch,
            device,
            memory_tracker: &memory_tracker,
            team: &team,
            context: training_context,
        };
        let trained = trainer.run(&mut weights)?;
        let per_step = |count: u64| count as f64 / trained.steps_of_this_run.max(1) as f64;
        let copies: Vec<Value> =
            trained.copies.iter().map(|((direction, cause), count)| json!({ "direction": direction, "cause": cause, "per_step": per_step(*count) })).collect();
        let written = weights.write_to(&trained.state, &mut model)?;
        let written = adapters.map_or(written, Adapters::changed);
        applied.tensors = if trained.unchanged { BTreeSet::new() } else { self.names_in_input(written) };
        if let Some(quantizers) = &quantizers {
            quantizers.write_to(&trained.state, &mut model)?;
        }
        applied.rule = adapters.map_or_else(|| RULE.to_owned(), Adapters::rule);
        let model = finished(adapters, model)?;
        applied.notes.extend(trained.notes);
        applied.notes.extend(adapters.map(|adapters| adapters.note(name)));
        if masked > 0 {
            applied.notes.push(format!("{} of {} were kept at zero", counted(zeros as usize, "zero weight"), counted(masked, "tensor")));
        }
        if filled > 0 {
            applied.notes.push(format!(
                "zeros of unknown origin in {} were replaced by the merged adapters, because neither a pass, a report nor config.json states that they were pruned; with `merge: false` in `adapter`, the base keeps them",
                counted(filled, "tensor")
            ));
        }
        if unexplained > 0 {
            applied.notes.push(format!(
                "zeros of unknown origin in {} were trained like other weights, because neither a pass, a report nor config.json states that they were pruned; \
                 `keep_zeros: true` keeps them zero",
                counted(unexplained, "tensor")
            ));
        }
        if rounded > 0 {
            applied.notes.push(match training.scales {
                QuantizerScales::Only => format!("the codes of {} did not change", counted(rounded, "quantized weight")),
                _ => format!("trained with fake quantization to the codes that are written: {}", counted(rounded, "weight")),
            });
        }
        if dynamic > 0 {
            applied.notes.push(format!("the inputs of {} were quantized in training as at run time", counted(dynamic, "layer")));
        }
        if let Some(quantizers) = quantizers.as_ref().filter(|_| !trained.unchanged) {
            applied.notes.push(format!("the scales of {} and of {} were trained", counted(rounded, "weight"), counted(quantizers.count(), "activation")));
            if calibrated > 0 {
                applied.notes.push(format!(
                    "the calibrated scales of the low-bit float inputs of {} were not trained, because `scales` trains only those of integers",
                    counted(calibrated, "layer")
                ));
            }
        }
        let peaks = memory_tracker.peaks();
        let phases: Vec<Value> = peaks
            .0
            .iter()
            .map(|(category, bytes)| json!({ "name": category.name(), "predicted_bytes": forecast.of(*category), "measured_bytes": bytes }))
            .collect();
        let earlier = self.state.history.iter().filter(|applied| applied.name == name).count();
        let stem = if earlier == 0 { name.to_owned() } else { format!("{name}-{}", earlier + 1) };
        for format in LogFormat::with_table(&training.logs) {
            if let Some(content) = checkpoints.and_then(|checkpoints| std::fs::read(checkpoints.folder.join(format.file())).ok()) {
                applied.attached.insert(format!("{stem}.{}", format.extension()), Arc::new(content));
            }
        }
        let trace = memory_tracker.trace().unwrap_or_default();
        applied.notes.push(trace.peak().explain(&small));
        context.memory_tracker.iter().for_each(|memory| memory.adopt(&memory_tracker));
        applied.details = json!({
            "training": { "steps": trained.steps, "skipped_steps": trained.skipped_steps, "zeros_kept": zeros, "losses": objective.losses, "curve": trained.curve, "evaluations": trained.evaluations, "copies": copies },
            "memory": { "peak_bytes": peaks.1, "predicted_bytes": forecast.total(), "phases": phases, "timeline": trained.timeline.points, "peak_step": trace.timeline() },
        });
        if let Some(adapters) = adapters {
            applied.details["adapter"] = adapters.details();
        }
        memory_tracker.release(MemoryCategory::Weights, u64::MAX);
        Ok((model, applied))
    }
}

/// The model to write, from the trained one.
fn finished(adapters: Option<&Adapters>, trained: Model) -> Result<Model> {
    match adapters {
        Some(adapters) => adapters.finish(&trained),
        None => Ok(trained),
    }
}

/// Returns an error if the training images of student and teacher are preprocessed differently: both run
/// on the same samples.
fn require_same_preprocessing(student: &DataSet, teacher: &DataSet) -> Result<()> {
    let (Some(ours), Some(theirs)) = (student.preprocessing(), teacher.preprocessing()) else { return Ok(()) };
    if ours == theirs {
        return Ok(());
    }
    let reason = format!(
        "preprocesses images differently from the student (teacher: {theirs}; student: {ours}): set the same `resize`, `crop`, `mean` and `std` for both in `data: {{ train: ... }}`"
    );
    Err(Error::option("distill: teacher", reason))
}

/// Whether a report of an earlier run, or `config.json`, states that weights of the model were pruned.
fn states_pruning(model: &Model) -> bool {
    // Ignore files of this name from other tools.
    let report = Config::open(&model.path.join(REPORT_FILES[0])).unwrap_or_default();
    let is_pruned = |pass: &Value| pass["name"] == "prune-unstructured" || pass["details"]["training"]["zeros_kept"].as_u64().is_some_and(|kept| kept > 0);
    let sparsity = model.config.carried_quantization().get("sparsity_config").and_then(Value::as_object);
    report.get("passes").and_then(Value::as_array).is_some_and(|passes| passes.iter().any(is_pruned)) || sparsity.is_some_and(|keys| !keys.is_empty())
}

/// The subgraph that losses depend on, in training mode.
fn training_graph(graph: &Graph, objective: &Objective, training: &Training) -> Result<Graph> {
    let of_batch = training.batch_norm == BatchNorm::Batch;
    subgraph(graph, &objective.student_values(), &|op| match op {
        Op::BatchNorm(norm) => Norm { batch: of_batch, ..*norm }.into(),
        other => other.clone(),
    })
}

/// Whether a model has logits for every token.
fn has_token_logits(graph: &Graph) -> bool {
    graph.outputs().iter().any(|(name, id)| name == "logits" && graph.value(*id).ty.shape.len() == 3)
}

/// Batch size.
fn batch(graph: &Graph, training: &Training) -> usize {
    let (inputs, _) = Port::from_graph(graph);
    let images = inputs.iter().any(|input| input.element == Element::Float);
    match (training.batch_size, fixed_batch(&inputs)) {
        (BatchSize::Samples(count), _) => count,
        (BatchSize::Auto, Some(fixed)) => fixed,
        (BatchSize::Auto, None) if has_token_logits(graph) => 8,
        (BatchSize::Auto, None) if images => 128,
        (BatchSize::Auto, None) => 32,
    }
}

/// Sizes of dynamic dimensions: default sizes, or those of the largest inputs.
fn bindings(graph: &Graph, batch: usize, largest: Option<&LargestInputs>) -> Bindings {
    let mut sizes = analysis::usual_sizes(graph);
    sizes.insert("batch".to_owned(), batch);
    if let Some(inputs) = largest {
        sizes.extend(axis_sizes(graph, |name| inputs.shapes.get(name).map(Vec::as_slice)));
    }
    sizes
}

/// Cache key of a teacher's logits: its weights, its graph, the precision, the device, and whether the
/// logits of hard labels are cached.
fn teacher_cache_key(teacher: &Model, graph: &Graph, training: &Training, compute: DType, device: &Device, work: &Work) -> Result<String> {
    let mut key = ContentKey::new(work);
    // Ranks on equal GPUs share the cache.
    key.line(&format!("{} {} {compute:?} {} {graph}", env!("CARGO_PKG_VERSION"), training.losses.hard.is_some(), crate::exec::hardware(device)));
    key.files(&teacher.weight_files, &teacher.path)?;
    Ok(key.name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pass::testing;

    #[test]
    fn the_batch_size_is_that_of_the_inputs_if_it_is_fixed() {
        let automatic = |inputs: &str| {
            let graph: Graph = format!("{inputs}output y = x\n").parse().unwrap();
            batch(&graph, &Training::default())
        };
        assert_eq!(automatic("input x: float[batch, 2]\n"), 128);
        assert_eq!(automatic("input x: float[1, 2]\n"), 1);
        assert_eq!(automatic("input x: float[3, 2]\ninput k: int[3]\n"), 3);
        let graph: Graph = "input x: float[3, 2]\noutput y = x\n".parse().unwrap();
        assert_eq!(batch(&graph, &Training { batch_size: BatchSize::Samples(6), ..Training::default() }), 6);
    }

    /// A training that preserved no zeros does not state that the model was pruned.
    #[test]
    fn reports_state_whether_weights_were_pruned() {
        let (folder, model) =
            testing::model("input x: float[batch, 2]\nparam w: float[2]\ny = Mul(x, w) -> float[batch, 2]\noutput y = y\n", |_, shape| testing::numbers(shape))
                .unwrap();
        let stated = |pass: Value| {
            std::fs::write(folder.path().join(REPORT_FILES[0]), json!({ "passes": [{ "name": "cast" }, pass] }).to_string()).unwrap();
            states_pruning(&model)
        };
        let trained = |zeros: u64| json!({ "name": "finetune", "details": { "training": { "zeros_kept": zeros } } });
        assert!(stated(json!({ "name": "prune-unstructured" })) && stated(trained(1)));
        assert!(!stated(trained(0)) && !stated(json!({ "name": "finetune" })));
    }
}
