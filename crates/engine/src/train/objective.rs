//! The training objective: the losses of a recipe, bound to values of the student's and the teacher's graph.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{Device, Tensor};

use super::cache::Cache;
use super::layer_pairs::{attention_heads, last_layers, layer_indices, layer_pairs};
use super::losses::{self, AttentionTarget, Head, Logits, LossOutput, Losses, Soft, Term};
use crate::analysis;
use crate::data::{Batch, SequenceRole, SequenceRoles, Task};
use crate::error::{Error, Result};
use crate::ir::{Dim, Element, Graph, Op, ValueId};

/// The weighted sum of losses that training minimizes.
pub struct Objective {
    terms: Vec<Term>,
    logits: Option<Logits>,
    /// Notes for the report.
    pub notes: Vec<String>,
    /// The losses, with defaults filled in.
    pub losses: Losses,
}

/// Number of items of each loss in a batch.
pub type Items = BTreeMap<&'static str, f64>;

pub use super::losses::{ModelValues, TeacherOutputs};

/// The shape of a graph value.
fn shape<'g>(graph: &'g Graph, name: &str) -> Result<&'g [Dim]> {
    let value = graph.values().iter().find(|value| value.name == name);
    let missing = || Error::option("losses", format!("the graph has no value `{name}`; `compress inspect --graph` lists all"));
    value.map(|value| value.ty.shape.as_slice()).ok_or_else(missing)
}

/// The width of a graph value.
fn width(graph: &Graph, name: &str) -> Result<usize> {
    let shape = shape(graph, name)?;
    let axis = if shape.len() == 4 { 1 } else { shape.len().saturating_sub(1) };
    shape.get(axis).and_then(Dim::fixed).ok_or_else(|| Error::option("losses", format!("the width of `{name}` is not a constant")))
}

/// The number of columns of queries, keys or values `[batch, heads, sequence, width]` in all heads.
fn columns(graph: &Graph, name: &str) -> Result<usize> {
    let [_, heads, _, width] = shape(graph, name)? else { return Err(Error::option("losses: attention", format!("`{name}` has no heads"))) };
    let count = heads.fixed().zip(width.fixed()).map(|(heads, width)| heads * width);
    count.ok_or_else(|| Error::option("losses: attention", format!("the width of `{name}` is not a constant")))
}

/// Describes the token role of a value, for messages.
fn describe_tokens(tokens: Option<SequenceRole>) -> &'static str {
    match tokens {
        Some(SequenceRole::Input) => "encoder tokens (`input_ids`)",
        Some(SequenceRole::Decoder) => "decoder tokens (`decoder_input_ids`)",
        None => "no tokens",
    }
}

impl Objective {
    /// Binds losses to the graphs. If `losses` is empty, chooses defaults from the models and the task.
    pub fn new(losses: &Losses, student: &Graph, teacher: Option<&Graph>, task: Task) -> Result<Objective> {
        let losses = if losses.is_empty() { default_losses(student, teacher, task)? } else { losses.clone() };
        let mut objective = Objective { terms: Vec::new(), logits: None, notes: Vec::new(), losses: losses.clone() };
        let needs = |name: &str| teacher.ok_or_else(|| Error::option(format!("losses: {name}"), "requires a teacher: use `distill` with `teacher`"));
        if losses.soft.is_some() || losses.hard.is_some() {
            let teacher = if losses.soft.is_some() { Some(needs("soft")?) } else { None };
            objective.add_logits(&losses, student, teacher, task)?;
        }
        if let Some(options) = &losses.hidden {
            let teacher = needs("hidden")?;
            let mut values = options.values.clone();
            if values.is_empty() {
                let (ours, theirs) = layer_indices("hidden", student, teacher)?;
                for (a, b) in layer_pairs("hidden", &options.layers, &ours, &theirs)? {
                    values.push((ours.layers[a].output.clone(), theirs.layers[b].output.clone()));
                }
            }
            let sides = [SequenceRoles::new(student), SequenceRoles::new(teacher)];
            let mut pairs = Vec::new();
            for (a, b) in values {
                let widths = (width(student, &a)?, width(teacher, &b)?);
                let (tokens, theirs) = (sides[0].tokens(&a), sides[1].tokens(&b));
                if tokens != theirs {
                    let reason = format!(
                        "`{a}` of the student has {}, `{b}` of the teacher {}: specify values with the same tokens",
                        describe_tokens(tokens),
                        describe_tokens(theirs)
                    );
                    return Err(Error::option("losses: hidden", reason));
                }
                pairs.push(losses::Pair { student: a, teacher: b, widths, tokens });
            }
            objective.push(options.weight, losses::Hidden { distance: options.distance, pairs });
        }
        if let Some(options) = &losses.attention {
            let teacher = needs("attention")?;
            let (ours, theirs) = layer_indices("attention", student, teacher)?;
            let last = last_layers(&ours, &theirs);
            let named = if options.target == AttentionTarget::Relations && options.layers.is_empty() { &last } else { &options.layers };
            let mut pairs = Vec::new();
            for (a, b) in layer_pairs("attention", named, &ours, &theirs)? {
                let pair = (attention_heads(student, &ours.layers[a], a)?, attention_heads(teacher, &theirs.layers[b], b)?);
                if options.target == AttentionTarget::Maps && pair.0.1 != pair.1.1 {
                    let reason = format!("the student's layer {a} has {} heads, the teacher's {b} has {}: use `target: relations`", pair.0.1, pair.1.1);
                    return Err(Error::option("losses: attention", reason));
                }
                let (tokens, theirs) = (pair.0.0.tokens, pair.1.0.tokens);
                if tokens != theirs {
                    let reason = format!(
                        "layers [{a}, {b}]: the student's has {}, the teacher's {}: specify layers with the same tokens",
                        describe_tokens(tokens),
                        describe_tokens(theirs)
                    );
                    return Err(Error::option("losses: attention", reason));
                }
                pairs.push((pair.0, pair.1));
            }
            let mut relation_heads = options.relation_heads.unwrap_or(1);
            if options.target == AttentionTarget::Relations {
                let sides = pairs.iter().flat_map(|((ours, _), (theirs, _))| [(student, ours), (teacher, theirs)]);
                let columns = sides.flat_map(|(graph, heads)| heads.values.iter().map(|name| columns(graph, name))).collect::<Result<BTreeSet<usize>>>()?;
                let divides = |count: &usize| columns.iter().all(|columns| columns.is_multiple_of(*count));
                let most = pairs.first().map_or(1, |(_, (_, count))| *count);
                relation_heads = options.relation_heads.or_else(|| (1..=most).rev().find(divides)).unwrap_or(1);
                if !divides(&relation_heads) {
                    let reason = format!("`relation_heads: {relation_heads}` does not divide the columns of queries, keys and values: {columns:?}");
                    return Err(Error::option("losses: attention", reason));
                }
            }
            let pairs = pairs.into_iter().map(|((ours, _), (theirs, _))| (ours, theirs)).collect();
            objective.push(options.weight, losses::Attention { target: options.target, pairs, relation_heads });
        }
        if let Some(options) = &losses.embedding {
            let teacher = needs("embedding")?;
            let output = |graph: &Graph| {
                let name = embedding(graph, "embedding", options.output.as_deref())?;
                let width = width(graph, &name)?;
                Ok::<_, Error>((name, width))
            };
            objective.push(options.weight, losses::Embedding { distance: options.distance, student: output(student)?, teacher: output(teacher)? });
        }
        if let Some(options) = &losses.contrastive {
            let value = embedding(student, "contrastive", options.output.as_deref())?;
            objective.push(options.weight, losses::Contrastive { value, temperature: options.temperature, symmetric: options.symmetric });
        }
        if objective.terms.is_empty() && objective.logits.is_none() {
            return Err(Error::option(
                "losses",
                "no loss applies to these models and this data: specify at least one of soft, hard, hidden, attention, embedding, contrastive",
            ));
        }
        Ok(objective)
    }

    /// The divergence of the steps of a draft head from its target. `losses` may only contain soft targets.
    pub fn for_draft_head(losses: &Losses, steps: losses::DraftSteps) -> Result<Objective> {
        let soft = losses.soft.clone().unwrap_or_default();
        let only_soft = Losses { soft: Some(soft), ..Losses::default() };
        if *losses != only_soft && !losses.is_empty() {
            return Err(Error::option("losses", "only `soft` is supported for a draft head, which is compared with its target in each step"));
        }
        let mut objective = Objective { terms: Vec::new(), logits: None, notes: Vec::new(), losses: only_soft };
        objective.push(steps.soft.weight, steps);
        Ok(objective)
    }

    fn push(&mut self, weight: f64, loss: impl losses::Loss + 'static) {
        self.terms.push(Term { weight, loss: Box::new(loss) });
    }

    fn add_logits(&mut self, losses: &Losses, student: &Graph, teacher: Option<&Graph>, task: Task) -> Result<()> {
        let (source, classes, tokens) = logits(student)?;
        let by_token = tokens.is_some();
        let mut common = classes;
        let teacher = match teacher {
            Some(teacher) => {
                let (source, theirs, other) = logits(teacher)?;
                if other != tokens {
                    return Err(Error::option(
                        "losses: soft",
                        "the logits of student and teacher belong to different tokens, or only one of them has logits per token",
                    ));
                }
                common = classes.min(theirs);
                if classes != theirs {
                    if !by_token {
                        return Err(Error::option("losses: soft", format!("the student has {classes} classes, the teacher {theirs}")));
                    }
                    self.notes.push(format!(
                        "the student's vocabulary has {classes} rows, the teacher's {theirs}: losses use the first {common}, the rest is treated as padding"
                    ));
                }
                Some(source)
            }
            None => None,
        };
        if losses.hard.is_some() && !by_token && task != Task::Classification {
            return Err(Error::option("losses: hard", format!("requires classes, but the task of the data is {task}: specify `label_column` or `labels`")));
        }
        if losses.hard.is_some() && by_token && task != Task::LanguageModelling {
            return Err(Error::option("losses: hard", format!("requires `task: language-modelling`, but the task of the data is {task}")));
        }
        self.logits = Some(Logits {
            soft: losses.soft.as_ref().map(Soft::from),
            hard: losses.hard.as_ref().map(|hard| (hard.weight, hard.label_smoothing)),
            student: source,
            teacher,
            classes: common,
            tokens,
        });
        Ok(())
    }

    /// Names of the student's values that the losses read.
    pub fn student_values(&self) -> Vec<String> {
        let logits = self.logits.iter().map(|logits| logits.student.value().clone());
        unique(logits.chain(self.terms.iter().flat_map(|term| term.loss.student())))
    }

    /// Names of the teacher's values that the losses read.
    pub fn teacher_values(&self) -> Vec<String> {
        let logits = self.logits.iter().filter_map(|logits| logits.teacher.as_ref()).map(|source| source.value().clone());
        unique(logits.chain(self.terms.iter().flat_map(|term| term.loss.teacher())))
    }

    /// Whether the losses read only the teacher's logits.
    pub fn reads_only_logits(&self) -> bool {
        self.terms.iter().all(|term| term.loss.teacher().is_empty()) && self.logits.as_ref().is_some_and(|logits| logits.teacher.is_some())
    }

    /// The losses over logits, if there are any.
    pub fn over_logits(&self) -> Option<&Logits> {
        self.logits.as_ref()
    }

    /// Opens the cache of the logits of the teacher with this hash, `top` per row at most.
    pub fn open_cache(&self, folder: &Path, teacher: &str, top: usize) -> Result<Cache> {
        let temperature = self.over_logits().and_then(|logits| logits.soft).map_or(1.0, |soft| soft.temperature);
        let classes = self.over_logits().map_or(top, |logits| logits.classes);
        Cache::open(folder, teacher, top.min(classes), temperature)
    }

    /// The source of the logits of a further teacher, and the parameters of its head. Fails if its logits
    /// have other tokens or fewer columns than those of the first one.
    pub fn further_source(&self, teacher: &Graph) -> Result<(losses::LogitsSource, Vec<String>)> {
        let (source, columns, tokens) = logits(teacher)?;
        let ours = self.logits.as_ref().map_or((0, None), |logits| (logits.classes, logits.tokens));
        if tokens != ours.1 || columns < ours.0 || tokens.is_none() && columns != ours.0 {
            let reason = format!("its logits have {columns} columns, those of the first teacher {}, or they belong to other tokens", ours.0);
            return Err(Error::option("distill: more_teachers", reason));
        }
        let head = if let losses::LogitsSource::Head(head) = &source { head.parameters.clone() } else { Vec::new() };
        Ok((source, head))
    }

    /// Names of the head parameters that the losses read, in addition to the graph: those of the
    /// student, and of the teacher.
    pub fn heads(&self) -> (Vec<String>, Vec<String>) {
        let parameters = |source: Option<&losses::LogitsSource>| match source {
            Some(losses::LogitsSource::Head(head)) => head.parameters.clone(),
            _ => Vec::new(),
        };
        self.logits.as_ref().map(|logits| (parameters(Some(&logits.student)), parameters(logits.teacher.as_ref()))).unwrap_or_default()
    }

    /// Names of the learned projections.
    pub fn projection_names(&self) -> Vec<String> {
        self.terms.iter().flat_map(|term| term.loss.projections()).map(|(name, ..)| name).collect()
    }

    /// Initial values of the learned projections, which are not part of the written model.
    pub fn projections(&self, seed: u64) -> Result<BTreeMap<String, Tensor>> {
        let mut found = BTreeMap::new();
        for (name, rows, columns) in self.terms.iter().flat_map(|term| term.loss.projections()) {
            let mut random = fastrand::Rng::with_seed(seed ^ found.len() as u64);
            let bound = (6.0 / (rows + columns) as f64).sqrt();
            let values: Vec<f32> = (0..rows * columns).map(|_| (bound * (2.0 * random.f64() - 1.0)) as f32).collect();
            let tensor = Tensor::from_vec(values, (rows, columns), &Device::Cpu).map_err(|e| Error::candle(&name, e))?;
            found.insert(name, tensor);
        }
        Ok(found)
    }

    /// Number of items of each loss in a batch.
    pub fn items(&self, batch: &Batch) -> Result<Items> {
        let mut items = Items::new();
        if let Some(logits) = &self.logits {
            items.insert("logits", logits.items(batch)?);
        }
        for term in &self.terms {
            items.insert(term.loss.name(), term.loss.items(batch)?);
        }
        Ok(items)
    }

    /// Computes losses and gradients of a micro-batch of a step with `items` items. Gradients are
    /// multiplied by `scale`.
    pub fn evaluate(
        &self,
        student: ModelValues,
        teacher: TeacherOutputs,
        projections: &BTreeMap<String, Tensor>,
        batch: &Batch,
        trained: &dyn Fn(&str) -> bool,
        (items, scale): (&Items, f64),
    ) -> Result<LossOutput> {
        let (mut output, empty) = (LossOutput::default(), BTreeMap::new());
        let theirs = match &teacher {
            TeacherOutputs::Values(values, ..) => values,
            _ => &empty,
        };
        let count = |name: &str| items.get(name).copied().unwrap_or(0.0);
        if let Some(logits) = &self.logits {
            logits.add(&mut output, student, teacher, batch, trained, (count("logits"), scale))?;
        }
        for term in &self.terms {
            term.add(&mut output, student.0, theirs, projections, batch, (count(term.loss.name()), scale))?;
        }
        Ok(output)
    }

    /// The weighted sum of losses.
    pub fn total(&self, losses: &BTreeMap<&'static str, f64>) -> f64 {
        let weight = |name: &str| match (name, &self.logits) {
            ("soft", Some(logits)) => logits.soft.map_or(0.0, |soft| soft.weight),
            ("hard", Some(logits)) => logits.hard.map_or(0.0, |(weight, _)| weight),
            _ => self.terms.iter().find(|term| term.loss.name() == name).map_or(0.0, |term| term.weight),
        };
        losses.iter().map(|(name, value)| weight(name) * value).sum()
    }
}

fn unique(names: impl Iterator<Item = String>) -> Vec<String> {
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Losses that are used if the recipe specifies none.
fn default_losses(student: &Graph, teacher: Option<&Graph>, task: Task) -> Result<Losses> {
    let mut losses = Losses::default();
    let labelled = matches!(task, Task::Classification | Task::LanguageModelling);
    let Some(teacher) = teacher else {
        losses.hard = Some(1.0.into());
        return Ok(losses);
    };
    if logits(student).is_ok() && logits(teacher).is_ok() {
        losses.soft = Some(if labelled { 0.5 } else { 1.0 }.into());
        losses.hard = labelled.then(|| 0.5.into());
        return Ok(losses);
    }
    losses.embedding = embedding(student, "embedding", None).and(embedding(teacher, "embedding", None)).ok().map(|_| 1.0.into());
    losses.hidden = layer_indices("hidden", student, teacher).ok().map(|_| 1.0.into());
    Ok(losses)
}

/// The source of a graph's logits, their number of columns, and the role of their tokens if there are
/// logits per token.
fn logits(graph: &Graph) -> Result<(losses::LogitsSource, usize, Option<SequenceRole>)> {
    let Some((_, id)) = graph.outputs().iter().find(|(name, _)| name == "logits") else {
        let names = graph.outputs().iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let reason = format!("soft and hard require an output `logits`; the outputs of the model are {names}");
        let how = "`finetune` adds a classification head to an encoder or a CNN with `classes`, such as `[ham, spam]`; `losses: contrastive=1` trains embeddings on pairs of texts; in an .onnx file or graph.json, rename the output with the logits to `logits`";
        return Err(Error::option("losses", format!("{reason}; {how}")));
    };
    let value = graph.value(*id);
    let columns = value.ty.shape.last().and_then(Dim::fixed).ok_or_else(|| Error::option("losses", "the number of classes is not a constant"))?;
    let by_token = value.ty.shape.len() == 3;
    let has_consumers = graph.nodes().iter().any(|node| node.inputs.contains(id));
    let head = analysis::head(graph, *id).filter(|node| node.output == *id && !has_consumers);
    let source = match head.map(|node| (&node.op, node.inputs.as_slice())) {
        Some((Op::Linear(op), [input, parameters @ ..])) => losses::LogitsSource::Head(Head {
            input: graph.value(*input).name.clone(),
            parameters: parameters.iter().map(|id| graph.value(*id).name.clone()).collect(),
            op: *op,
        }),
        _ => losses::LogitsSource::Value(value.name.clone()),
    };
    Ok((source, columns, by_token.then(|| SequenceRoles::new(graph).role(&value.name))))
}

/// The value of an output with one vector per sample.
fn embedding(graph: &Graph, loss: &str, requested: Option<&str>) -> Result<String> {
    let vector = |id: &ValueId| graph.value(*id).ty.shape.len() == 2 && graph.value(*id).ty.element == Element::Float;
    let vectors: Vec<&(String, ValueId)> = graph.outputs().iter().filter(|(name, id)| vector(id) && name != "logits").collect();
    let names = || vectors.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let preferred = ["sentence_embedding", "pooler_output"];
    let found = match requested {
        Some(requested) => vectors.iter().find(|(name, _)| name == requested),
        None if vectors.len() == 1 => vectors.first(),
        None => preferred.iter().find_map(|preferred| vectors.iter().find(|(name, _)| name == preferred)),
    };
    let reason = || match (requested, vectors.is_empty()) {
        (_, true) => "the model has no output with one vector per sample".to_owned(),
        (Some(requested), _) => format!("`{requested}` is not an output with one vector per sample; these are {}", names()),
        (None, _) => format!("specify one of {} as `output`", names()),
    };
    found.map(|(_, id)| graph.value(*id).name.clone()).ok_or_else(|| Error::option(format!("losses: {loss}"), reason()))
}
