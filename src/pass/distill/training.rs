//! Implementation of `distill` and `finetune`: sets up the model, the data and the losses, and trains.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device};
use serde_json::Value;

use super::adapters::{self, Adapters};
use super::draft_head::{self, AttachedHead};
use super::inputs::{Inputs, require_same_preprocessing, teacher_cache_key};
use super::record::{self, Counts};
use super::scoring::{ScoreData, Scoring};
use super::{MoreTeacher, masking, more_teachers, on_policy, packing, teacher_files, vocabulary};
use crate::analysis;
use crate::data::{LargestInputs, Task, fixed_batch};
use crate::error::{Error, Result, counted};
use crate::evaluation::Subject;
use crate::exec::{ManagedTensor, MemoryCategory, MemoryTracker, Placement, Sharding, axis_sizes, rounding_scheme};
use crate::ir::ops::BatchNorm as Norm;
use crate::ir::{Bindings, Element, Graph, Op, Port, subgraph};
use crate::model::{Config, Model};
use crate::output::REPORT_FILES;
use crate::pass::{Context, Plan};
use crate::run_state::{Applied, RunState};
use crate::store::{ActivationScheme, Encoding, Selection, Weight, ZeroOrigin};
use crate::train::cache::Cache;
use crate::train::communicator::RankConfig;
use crate::train::{
    BatchNorm, BatchSize, Objective, Offload, OnPolicy, QuantizerScales, Quantizers, Teacher, Team, Trainer, Training, TrainingContext, Weights, ZeroKind,
    dropout, forecast, largest_inputs, literals, require_trainable,
};

/// Advice if the outputs of a trained model are severely degraded.
pub(in crate::pass) const REMEDY: &str = "more steps or more data, a lower learning rate, or a student initialized with more layers of its teacher";

/// Description of the trained tensors in reports.
const RULE: &str = "all floats that losses depend on";

/// The weights to train, and the graphs that read them.
struct Student {
    /// The graph of the model, with trained quantizers.
    graph: Graph,
    /// The part that losses depend on.
    small: Graph,
    weights: Weights,
    quantizers: Option<Quantizers>,
    counts: Counts,
    /// Whether the written weights differ from those in training.
    is_rounded_when_written: bool,
}

/// A training pass with its models.
pub(in crate::pass) struct Job<'a> {
    /// The record of the pass so far.
    pub applied: Applied,
    /// The model to train.
    pub student: Model,
    pub teacher: Option<Model>,
    /// The folder of cached logits of the teacher.
    pub cache: Option<&'a Path>,
    /// Number of cached logits per row.
    pub top: usize,
    /// Files with the logits of the teacher, which does not run then.
    pub logits: Option<&'a [PathBuf]>,
    /// Further teachers, and their options.
    pub more_teachers: Vec<(Model, MoreTeacher)>,
    /// Continuations of the student, if it writes samples.
    pub on_policy: Option<OnPolicy>,
    pub training: Training,
    /// The state of the run before the pass.
    pub state: &'a RunState,
    /// Names in the input of tensors that the pass has renamed, by their new names.
    pub renamed: BTreeMap<String, String>,
    /// The draft head that `student` contains, if one is trained.
    pub head: Option<AttachedHead>,
}

impl<'a> Job<'a> {
    /// A training without a teacher.
    pub fn new(applied: Applied, student: Model, training: Training, state: &'a RunState) -> Job<'a> {
        let (more_teachers, renamed) = (Vec::new(), BTreeMap::new());
        Job { applied, student, teacher: None, cache: None, top: 1, logits: None, more_teachers, on_policy: None, training, state, renamed, head: None }
    }

    /// Validates the losses and predicts the memory.
    pub fn plan(mut self) -> Result<Plan<'a>> {
        let adapters = self.attach_adapters()?;
        let (model, training, teacher) = (&self.student, &self.training, self.teacher.as_ref());
        let graph = model.graph()?;
        let teacher_graph = teacher.map(Model::graph).transpose()?;
        self.require_same_outputs()?;
        let task = if has_token_logits(&graph) { Task::LanguageModelling } else { Task::Classification };
        let objective = self.objective(&graph, teacher_graph.as_ref(), task)?;
        require_trainable(&graph, model, training)?;
        more_teachers::require_same_logits(&self.more_teachers, &objective)?;
        on_policy::sampler(self.on_policy, (model, &graph), &objective, None)?;
        masking::masker(training.masking.as_ref(), (model, &graph), &objective)?;
        let small = training_graph(&graph, &objective, training)?;
        dropout(&small, training)?;
        // A sample of a contrastive loss has at least two texts.
        let rows = batch(&graph, training).saturating_mul(if training.losses.contrastive.is_some() { 2 } else { 1 });
        let sizes = bindings(&small, rows, None);
        let teachers = self.teachers(teacher_graph.as_ref())?;
        let processes = RankConfig::from_environment()?.map_or(1, |config| config.size);
        let forecast = forecast((&small, &graph, model), training, &teachers, &objective, (&sizes, processes))?;
        let fixed = if training.targets.is_empty() { literals(&graph, model) } else { BTreeSet::new() };
        let names: Vec<String> = graph.params().map(|(_, value)| value.name.clone()).filter(|name| !fixed.contains(name.as_str())).collect();
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
        applied.notes.extend(training.max_steps.and_then(|steps| training.schedule.unfinished_warmup(steps)));
        let mut notes = record::unused_options(training, &small, processes);
        notes.extend(record::router_loss(model.config.values()).filter(|_| objective.losses.hard.is_some()));
        notes.extend(record::possible_literals((&small, model), training));
        applied.notes.extend(notes.iter().cloned());
        (applied.memory, applied.checkpoint_bytes) = (forecast.total(), Some(0));
        applied.model_runs = self.model_runs((&small, &teachers), &objective, batch(&graph, training));
        let planned = self.finished(adapters.as_ref(), model.clone())?;
        self.applied.notes.extend(notes);
        Ok(Plan::new(planned, applied).with_execution(move |context| self.train(context, adapters.as_ref())))
    }

    /// The losses, bound to the graphs.
    fn objective(&self, graph: &Graph, teacher: Option<&Graph>, task: Task) -> Result<Objective> {
        if let Some(head) = &self.head {
            return Objective::for_draft_head(&self.training.losses, head.steps.clone());
        }
        let objective = Objective::new(&self.training.losses, graph, teacher, task)?;
        if objective.over_logits().is_some() {
            let how = match teacher {
                Some(_) => "specify a loss of other values, such as `hidden: 1`",
                None => "train it with `distill` and a loss of other values, such as `hidden: 1`",
            };
            self.student.require_distribution(graph, "losses", how)?;
        }
        Ok(objective)
    }

    /// The model to write: with merged adapters, or only the draft head.
    fn finished(&self, adapters: Option<&Adapters>, trained: Model) -> Result<Model> {
        let trained = adapters::finished(adapters, trained)?;
        Ok(self.head.as_ref().map_or_else(|| trained.clone(), |head| head.finished(&trained)))
    }

    /// The teacher, unless its logits are in files.
    pub(super) fn running_teacher(&self) -> Option<&Model> {
        self.teacher.as_ref().filter(|_| self.logits.is_none())
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
        let (name, training, device) = (self.applied.name, &self.training, &context.device);
        let inputs = self.open(context)?;
        let team = Team::from_environment(device)?;
        let memory_tracker = self.memory_tracker(context)?;
        let placement = self.placement(context, &team)?;
        let Student { graph, small, mut weights, quantizers, counts, is_rounded_when_written } =
            self.load_student(&inputs, adapters, (context, placement), &memory_tracker)?;
        let teacher = self.load_teacher(&inputs, context, &memory_tracker)?;
        let (cache, cache_note) = match self.logits {
            Some(files) => {
                let folder = self.cache.map(Path::to_owned);
                teacher_files::cache(files, (folder, self.top), &inputs, (context, &team)).map(|(cache, note)| (Some(cache), Some(note)))?
            }
            None => (self.open_cache(&inputs, context)?, None),
        };
        let further_teachers =
            more_teachers::load(&self.more_teachers, &inputs, (context, training, self.teacher_device(context), self.top), teacher.as_ref(), &memory_tracker)?;
        let batch = batch(&graph, training);
        let first = inputs.samples.first()?;
        let largest = largest_inputs(&inputs.samples, batch, training, (context.seed, team.size()), &context.work)?;
        let sizes = bindings(&small, batch, Some(&largest));
        let teachers = self.teachers(inputs.teacher_graph.as_ref())?;
        let forecast = forecast((&small, &graph, &self.student), training, &teachers, &inputs.objective, (&sizes, team.size()))?;
        let data = ScoreData::open((name, training), &inputs.subject, self.running_teacher(), (context, team.rank()))?;
        let quantizers = quantizers.as_ref();
        let scoring = Scoring { data, model: &self.student, graph: &graph, adapters, quantizers, is_rounded_when_written, first: &first, context };
        let score = |weights: &Weights, state: &BTreeMap<String, ManagedTensor>| scoring.score(weights, state);
        let checkpoints = context.checkpoints.as_ref();
        let sampler = on_policy::sampler(self.on_policy, (&self.student, &graph), &inputs.objective, Some(inputs.data))?;
        let masker = masking::masker(training.masking.as_ref(), (&self.student, &graph), &inputs.objective)?;
        let trainer = Trainer {
            options: training,
            graph: &small,
            teacher: teacher.as_ref(),
            cache: cache.as_ref(),
            further_teachers: &further_teachers,
            objective: &inputs.objective,
            data: &inputs.samples,
            sampler: sampler.as_ref(),
            masker: masker.as_ref(),
            batch,
            device,
            memory_tracker: &memory_tracker,
            team: &team,
            context: TrainingContext {
                name,
                work: context.work,
                seed: context.seed,
                folder: checkpoints.map(|checkpoints| checkpoints.folder.clone()),
                resume: checkpoints.is_some_and(|checkpoints| checkpoints.resume),
                identity: checkpoints.map(|checkpoints| checkpoints.key.clone()).unwrap_or_default(),
                evaluation: context.data.evaluation.as_ref().filter(|_| team.rank() == 0).map(|data| data.content(&context.work)).transpose()?,
                evaluate: Some(&score),
            },
        };
        let mut trained = trainer.run(&mut weights)?;
        let (mut model, mut applied) = (self.student.clone(), self.applied.clone());
        let written = weights.write_to(&trained.state, &mut model)?;
        let written = adapters.map_or(written, Adapters::changed);
        if let Some(quantizers) = quantizers {
            quantizers.write_to(&trained.state, &mut model)?;
        }
        let model = self.finished(adapters, model)?;
        applied.tensors = if trained.unchanged { BTreeSet::new() } else { self.names_in_input(written) };
        applied.rule = adapters.map_or_else(|| RULE.to_owned(), Adapters::rule);
        applied.notes.append(&mut trained.notes);
        applied.notes.extend(cache_note);
        applied.notes.extend(counts.notes(name, training, adapters, quantizers.filter(|_| !trained.unchanged)));
        let earlier = self.state.history.iter().filter(|applied| applied.name == name).count();
        applied.attached.extend(record::logs(name, earlier, training, checkpoints));
        let trace = memory_tracker.trace().unwrap_or_default();
        applied.notes.push(trace.peak().explain(&small));
        applied.details = record::details(&trained, &inputs.objective.losses, &counts, (&memory_tracker, &trace), &forecast);
        if trained.extended {
            applied.details["training"]["extended"] = true.into();
        }
        if let Some(adapters) = adapters {
            applied.details["adapter"] = adapters.details();
        }
        context.memory_tracker.iter().for_each(|memory| memory.adopt(&memory_tracker));
        memory_tracker.release(MemoryCategory::Weights, u64::MAX);
        Ok((model, applied))
    }

    /// Checks that student and teacher have the same vocabulary, and logits of the same classes and tokens if
    /// a loss compares them.
    fn require_same_outputs(&self) -> Result<()> {
        let Some(teacher) = &self.teacher else { return Ok(()) };
        vocabulary::require_same(&self.student, teacher)?;
        if self.training.losses.soft.is_none() {
            return Ok(());
        }
        vocabulary::require_same_classes(&self.student, teacher)?;
        masking::require_same_positions(&self.student, teacher)
    }

    /// Opens the training data, and constructs the losses.
    fn open<'c>(&self, context: &'c Context) -> Result<Inputs<'c>> {
        let (name, model, teacher) = (self.applied.name, &self.student, self.teacher.as_ref());
        // Detect damaged models before writing checkpoints and cached logits, which later runs would
        // reuse.
        teacher.into_iter().chain([model]).try_for_each(|model| model.check_contents(&context.work))?;
        let graph = model.graph()?;
        let teacher_graph = teacher.map(Model::graph).transpose()?;
        self.require_same_outputs()?;
        let data = context.data.train.as_ref().ok_or_else(|| Error::option(name, "needs training samples: add `data: { train: ... }`"))?;
        if self.head.is_some() {
            draft_head::check_data(context.data)?;
        }
        let subject = Subject::from_model(model.clone())?;
        let samples = context.data.open(data, subject.target())?;
        if let Some(teacher) = teacher.filter(|teacher| teacher.path != model.path) {
            require_same_preprocessing(&samples, &*context.data.open(data, Subject::from_model(teacher.clone())?.target())?)?;
        }
        if samples.task() == Task::Embedding {
            return Err(Error::option("data: train", "has pairs with scores, which no loss supports: specify one text column, and `task: fidelity`"));
        }
        if self.training.losses.contrastive.is_some() && samples.task() != Task::Contrastive {
            let reason = format!("needs pairs of matching texts, but the task of the data is {}: set `task: contrastive` and `pair_column`", samples.task());
            return Err(Error::option("losses: contrastive", reason));
        }
        let task = masking::task(self.training.masking.as_ref(), samples.task());
        let objective = self.objective(&graph, teacher_graph.as_ref(), task)?;
        packing::require_separate_texts(&objective.losses, data)?;
        if samples.task() == Task::Contrastive && objective.over_logits().is_some() {
            let reason = "`soft` and `hard` cannot be combined with `task: contrastive`, whose samples have several texts: remove them";
            return Err(Error::option("losses", reason));
        }
        Ok(Inputs { graph, teacher_graph, data, subject, samples, objective })
    }

    /// The tracker of device memory, with the limit of the options.
    fn memory_tracker(&self, context: &Context) -> Result<Arc<MemoryTracker>> {
        let requested = context.memory.bytes.filter(|_| context.memory.explicit);
        if self.training.shards_parameters() && requested.is_some() {
            return Err(Error::option("memory", "excludes `shard: parameters`, because all ranks must use the same micro-batches; lower `batch_size` instead"));
        }
        let memory_limit = self.training.memory_limit.map(|size| size.0).into_iter().chain(requested).min();
        let tracker = MemoryTracker::with_budget(memory_limit).recorded();
        Ok(Arc::new(if context.memory_tracker.is_some() { tracker.counting() } else { tracker }))
    }

    /// Placement of the trained parameters.
    fn placement(&self, context: &Context, team: &Team) -> Result<Placement> {
        let (training, device) = (&self.training, &context.device);
        let folder = context.checkpoints.as_ref().map_or_else(std::env::temp_dir, |checkpoints| checkpoints.folder.clone());
        if training.offloads_parameters() {
            Placement::offloaded_from(device, &folder)
        } else if training.shards_parameters() && team.size() > 1 {
            Ok(Placement::Sharded(Arc::new(Sharding::new(team.pool(), device, &folder)?)))
        } else {
            Ok(Placement::Memory(device.clone()))
        }
    }

    /// Loads the weights to train.
    fn load_student(
        &self,
        inputs: &Inputs,
        adapters: Option<&Adapters>,
        (context, placement): (&Context, Placement),
        memory_tracker: &Arc<MemoryTracker>,
    ) -> Result<Student> {
        let (model, training, compute) = (&self.student, &self.training, self.training.precision.dtype());
        let is_pruned = states_pruning(model);
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
        let placement = (placement, &context.device, compute);
        let mut weights = Weights::load(&inputs.graph, model, (training, &of_trained), placement, memory_tracker, &context.work)?;
        if let Some(adapters) = adapters {
            weights.absorb(adapters.absorbed(self.state.seed)?, training.optimizer, memory_tracker)?;
        }
        weights.set_norms(adapters.map(Adapters::norms).unwrap_or_default(), memory_tracker)?;
        let quantizers = match training.scales {
            QuantizerScales::Learnable | QuantizerScales::Only => Some(Quantizers::new(&inputs.graph, &|name| weights.trains(name))?),
            QuantizerScales::Fixed => None,
        };
        if let Some(quantizers) = &quantizers {
            weights.learn_scales(quantizers)?;
        }
        let graph = quantizers.as_ref().map_or(&inputs.graph, |quantizers| &quantizers.graph).clone();
        let small = packing::for_samples(training_graph(&graph, &inputs.objective, training)?, inputs.data)?;
        for (name, matrix) in inputs.objective.projections(context.seed)? {
            weights.add(&name, &matrix)?;
        }
        let count = |matches: &dyn Fn(&str, &Weight) -> bool| model.weights.by_name.iter().filter(|(name, weight)| matches(name, weight)).count();
        let is_trained = |name: &str| weights.trains(name) || adapters.is_some_and(|adapters| adapters.adapts(name));
        let is_static = |weight: &Weight| matches!(&weight.encoding, Encoding::Quantized(spec) if matches!(spec.activations, ActivationScheme::Float(..)) && spec.activations.parameters().is_some());
        // Training uses 32-bit weights.
        let narrow = count(&|name, weight| weights.trains(name) && weight.dtype != crate::store::DType::F32);
        let (zeros, masked, rounded, unexplained) = weights.constraint_counts();
        let counts = Counts {
            zeros,
            masked,
            rounded,
            unexplained,
            filled,
            dynamic: count(&|name, weight| is_trained(name) && rounding_scheme(weight).is_some()),
            calibrated: count(&|name, weight| weights.trains(name) && is_static(weight)),
        };
        Ok(Student { graph, small, weights, quantizers, counts, is_rounded_when_written: adapters.is_some() || narrow > 0 || compute != DType::F32 })
    }

    /// Device and dtype in which the teacher runs.
    fn teacher_device<'c>(&self, context: &'c Context) -> (&'c Device, DType) {
        let device = if self.training.offload.contains(&Offload::Teacher) { &Device::Cpu } else { &context.device };
        (device, if device.is_cpu() { DType::F32 } else { self.training.precision.dtype() })
    }

    /// Loads the teacher, if losses read its values.
    fn load_teacher(&self, inputs: &Inputs, context: &Context, memory_tracker: &MemoryTracker) -> Result<Option<Teacher>> {
        let values = inputs.objective.teacher_values();
        let (Some(teacher), Some(graph), false) = (self.running_teacher(), &inputs.teacher_graph, values.is_empty()) else { return Ok(None) };
        let (device, dtype) = self.teacher_device(context);
        let graph = packing::for_samples(subgraph(graph, &values, &Op::clone)?, inputs.data)?;
        let placement = (device, dtype, self.training.offloads_parameters());
        Teacher::load(teacher, &graph, (&values, &inputs.objective.heads().1), placement, memory_tracker, &context.work).map(Some)
    }

    /// Opens the cache of the teacher's logits, if one is requested.
    fn open_cache(&self, inputs: &Inputs, context: &Context) -> Result<Option<RefCell<Cache>>> {
        let (Some(folder), Some(graph), Some(teacher)) = (self.cache, &inputs.teacher_graph, &self.teacher) else { return Ok(None) };
        if !inputs.objective.reads_only_logits() {
            let reason = "stores only logits: remove losses that read other values of the teacher";
            return Err(Error::option(format!("{}: teacher_cache", self.applied.name), reason));
        }
        let (device, dtype) = self.teacher_device(context);
        let key = teacher_cache_key(teacher, graph, &self.training, dtype, device, &context.work)?;
        Ok(Some(RefCell::new(inputs.objective.open_cache(folder, &key, self.top)?)))
    }
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

#[cfg(test)]
mod tests {
    use serde_json::json;

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
