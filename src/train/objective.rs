//! Losses of a recipe, wired to the values of two graphs.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Device, Tensor};

use super::layers::{both_layers, chosen, heads, last};
use super::losses::{self, AttentionTarget, Head, Logits, Losses, Said, Term};
use crate::analysis;
use crate::data::{Batch, Side, Sides, Task};
use crate::error::{Error, Result};
use crate::ir::{Dim, Element, Graph, Op, ValueId};

/// What training makes small.
pub struct Objective {
    terms: Vec<Term>,
    logits: Option<Logits>,
    /// Plain words for the report.
    pub notes: Vec<String>,
    /// The losses with their defaults filled in.
    pub losses: Losses,
}

/// Items that each loss counts in some samples.
pub type Items = BTreeMap<&'static str, f64>;

pub use super::losses::{Answers as Theirs, ModelValues};

/// A value of a graph with its width.
fn width(graph: &Graph, name: &str) -> Result<usize> {
    let value = graph.values().iter().find(|value| value.name == name);
    let value = value.ok_or_else(|| Error::option("losses", format!("there is no value `{name}`; `compress inspect --graph` lists all")))?;
    let axis = if value.ty.shape.len() == 4 { 1 } else { value.ty.shape.len().saturating_sub(1) };
    value.ty.shape.get(axis).and_then(Dim::fixed).ok_or_else(|| Error::option("losses", format!("the width of `{name}` is not known")))
}

/// Whose tokens a value has, for messages.
fn told(tokens: Option<Side>) -> &'static str {
    match tokens {
        Some(Side::Read) => "tokens of the encoder (`input_ids`)",
        Some(Side::Said) => "tokens of the decoder (`decoder_input_ids`)",
        None => "no tokens",
    }
}

impl Objective {
    /// Wires losses.
    ///
    /// # Errors
    /// A loss that the graphs or the data do not allow, by name.
    pub fn new(losses: &Losses, student: &Graph, teacher: Option<&Graph>, task: Task) -> Result<Objective> {
        let losses = if losses.is_empty() { usual(student, teacher, task)? } else { losses.clone() };
        let mut objective = Objective { terms: Vec::new(), logits: None, notes: Vec::new(), losses: losses.clone() };
        let needs = |name: &str| teacher.ok_or_else(|| Error::option(format!("losses: {name}"), "needs a teacher: use `distill`, with `teacher`"));
        if losses.soft.is_some() || losses.hard.is_some() {
            let teacher = if losses.soft.is_some() { Some(needs("soft")?) } else { None };
            objective.add_logits(&losses, student, teacher, task)?;
        }
        if let Some(options) = &losses.hidden {
            let teacher = needs("hidden")?;
            let mut values = options.values.clone();
            if values.is_empty() {
                let (ours, theirs) = both_layers("hidden", student, teacher)?;
                for (a, b) in chosen("hidden", &options.layers, &ours, &theirs)? {
                    values.push((ours.layers[a].output.clone(), theirs.layers[b].output.clone()));
                }
            }
            let sides = [Sides::of(student), Sides::of(teacher)];
            let mut pairs = Vec::new();
            for (a, b) in values {
                let widths = (width(student, &a)?, width(teacher, &b)?);
                let (tokens, theirs) = (sides[0].tokens(&a), sides[1].tokens(&b));
                if tokens != theirs {
                    let reason = format!("`{a}` of the student has {}, `{b}` of the teacher {}: name values of the same", told(tokens), told(theirs));
                    return Err(Error::option("losses: hidden", reason));
                }
                pairs.push(losses::Pair { student: a, teacher: b, widths, tokens });
            }
            objective.push(options.weight, losses::Hidden { distance: options.distance, pairs });
        }
        if let Some(options) = &losses.attention {
            let teacher = needs("attention")?;
            let (ours, theirs) = both_layers("attention", student, teacher)?;
            let last = last(&ours, &theirs);
            let named = if options.target == AttentionTarget::Relations && options.layers.is_empty() { &last } else { &options.layers };
            let mut pairs = Vec::new();
            for (a, b) in chosen("attention", named, &ours, &theirs)? {
                let pair = (heads(student, &ours.layers[a], a)?, heads(teacher, &theirs.layers[b], b)?);
                if options.target == AttentionTarget::Maps && pair.0.1 != pair.1.1 {
                    let reason = format!("the student's layer {a} has {} heads, the teacher's {b} has {}: use `target: relations`", pair.0.1, pair.1.1);
                    return Err(Error::option("losses: attention", reason));
                }
                let (tokens, theirs) = (pair.0.0.tokens, pair.1.0.tokens);
                if tokens != theirs {
                    let reason = format!("layers [{a}, {b}]: the student's has {}, the teacher's {}: name layers of the same", told(tokens), told(theirs));
                    return Err(Error::option("losses: attention", reason));
                }
                pairs.push((pair.0, pair.1));
            }
            let relation_heads = options.relation_heads.or_else(|| pairs.first().map(|(_, (_, count))| *count)).unwrap_or(1);
            let pairs = pairs.into_iter().map(|((ours, _), (theirs, _))| (ours, theirs)).collect();
            objective.push(options.weight, losses::Attention { target: options.target, pairs, relation_heads });
        }
        if let Some(options) = &losses.embedding {
            let teacher = needs("embedding")?;
            let of = |graph: &Graph| {
                let name = embedding(graph, options.output.as_deref())?;
                let width = width(graph, &name)?;
                Ok::<_, Error>((name, width))
            };
            objective.push(options.weight, losses::Embedding { distance: options.distance, student: of(student)?, teacher: of(teacher)? });
        }
        if objective.terms.is_empty() && objective.logits.is_none() {
            return Err(Error::option("losses", "there is none: name at least one of soft, hard, hidden, attention, embedding"));
        }
        Ok(objective)
    }

    fn push(&mut self, weight: f64, loss: impl losses::Loss + 'static) {
        self.terms.push(Term { weight, loss: Box::new(loss) });
    }

    fn add_logits(&mut self, losses: &Losses, student: &Graph, teacher: Option<&Graph>, task: Task) -> Result<()> {
        let (source, classes, tokens) = logits(student)?;
        let by_token = tokens.is_some();
        let mut known = classes;
        let teacher = match teacher {
            Some(teacher) => {
                let (source, theirs, other) = logits(teacher)?;
                if other != tokens {
                    return Err(Error::option("losses: soft", "student and teacher answer to something else: to other tokens, or one of them to samples"));
                }
                known = classes.min(theirs);
                if classes != theirs {
                    if !by_token {
                        return Err(Error::option("losses: soft", format!("the student has {classes} classes, the teacher {theirs}")));
                    }
                    self.notes.push(format!(
                        "the student's vocabulary has {classes} rows, the teacher's {theirs}: losses look at the first {known}, the rest is padding"
                    ));
                }
                Some(source)
            }
            None => None,
        };
        if losses.hard.is_some() && !by_token && task != Task::Classification {
            return Err(Error::option("losses: hard", format!("needs classes, the data is of the task {task}: name `label_column` or `labels`")));
        }
        if losses.hard.is_some() && by_token && task != Task::LanguageModelling {
            return Err(Error::option("losses: hard", format!("needs `task: language-modelling`, the data is of the task {task}")));
        }
        self.logits = Some(Logits {
            soft: losses.soft.as_ref().map(|soft| (soft.weight, soft.temperature)),
            hard: losses.hard.as_ref().map(|hard| (hard.weight, hard.label_smoothing)),
            student: source,
            teacher,
            classes: known,
            tokens,
        });
        Ok(())
    }

    /// Values of the student's graph that are read.
    pub fn student_values(&self) -> Vec<String> {
        let logits = self.logits.iter().map(|logits| logits.student.value().clone());
        unique(logits.chain(self.terms.iter().flat_map(|term| term.loss.student())))
    }

    /// Values of the teacher's graph that are read.
    pub fn teacher_values(&self) -> Vec<String> {
        let logits = self.logits.iter().filter_map(|logits| logits.teacher.as_ref()).map(|source| source.value().clone());
        unique(logits.chain(self.terms.iter().flat_map(|term| term.loss.teacher())))
    }

    /// Whether nothing of the teacher is read but its logits.
    pub fn reads_logits_alone(&self) -> bool {
        self.terms.iter().all(|term| term.loss.teacher().is_empty()) && self.logits.as_ref().is_some_and(|logits| logits.teacher.is_some())
    }

    /// The losses over logits, where there are any.
    pub fn over_logits(&self) -> Option<&Logits> {
        self.logits.as_ref()
    }

    /// Parameters that are read beside the graph's: those of heads, of the student and of the teacher.
    pub fn heads(&self) -> (Vec<String>, Vec<String>) {
        let of = |source: Option<&losses::LogitsSource>| match source {
            Some(losses::LogitsSource::Head(head)) => head.parameters.clone(),
            _ => Vec::new(),
        };
        self.logits.as_ref().map(|logits| (of(Some(&logits.student)), of(logits.teacher.as_ref()))).unwrap_or_default()
    }

    /// Names of the matrices that are learned beside the student.
    pub fn projection_names(&self) -> Vec<String> {
        self.terms.iter().flat_map(|term| term.loss.projections()).map(|(name, ..)| name).collect()
    }

    /// Matrices that are learned beside the student, and left out when it is written.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn projections(&self, seed: u64) -> Result<BTreeMap<String, Tensor>> {
        let mut found = BTreeMap::new();
        for (name, rows, columns) in self.terms.iter().flat_map(|term| term.loss.projections()) {
            let mut random = fastrand::Rng::with_seed(seed ^ found.len() as u64);
            let bound = (6.0 / (rows + columns) as f64).sqrt();
            let values: Vec<f32> = (0..rows * columns).map(|_| (bound * (2.0 * random.f64() - 1.0)) as f32).collect();
            let tensor = Tensor::from_vec(values, (rows, columns), &Device::Cpu).map_err(|e| Error::computed(&name, e))?;
            found.insert(name, tensor);
        }
        Ok(found)
    }

    /// How many items each loss counts in some samples.
    ///
    /// # Errors
    /// The samples lack what a loss needs.
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

    /// What the losses say to some samples of a step that holds `items`; gradients are multiplied by `scale`.
    ///
    /// # Errors
    /// Memory runs out, or labels do not fit.
    pub fn say(
        &self,
        student: ModelValues,
        teacher: Theirs,
        projections: &BTreeMap<String, Tensor>,
        batch: &Batch,
        trained: &dyn Fn(&str) -> bool,
        (items, scale): (&Items, f64),
    ) -> Result<Said> {
        let (mut said, nothing) = (Said::default(), BTreeMap::new());
        let theirs = match &teacher {
            Theirs::Values(values, ..) => values,
            _ => &nothing,
        };
        let of = |name: &str| items.get(name).copied().unwrap_or(0.0);
        if let Some(logits) = &self.logits {
            logits.add(&mut said, student, teacher, batch, trained, (of("logits"), scale))?;
        }
        for term in &self.terms {
            term.add(&mut said, student.0, theirs, projections, batch, (of(term.loss.name()), scale))?;
        }
        Ok(said)
    }

    /// The weighted sum of losses.
    pub fn total(&self, losses: &BTreeMap<&'static str, f64>) -> f64 {
        let weight = |name: &str| match (name, &self.logits) {
            ("soft", Some(logits)) => logits.soft.map_or(0.0, |(weight, _)| weight),
            ("hard", Some(logits)) => logits.hard.map_or(0.0, |(weight, _)| weight),
            _ => self.terms.iter().find(|term| term.loss.name() == name).map_or(0.0, |term| term.weight),
        };
        losses.iter().map(|(name, value)| weight(name) * value).sum()
    }
}

fn unique(names: impl Iterator<Item = String>) -> Vec<String> {
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Losses when none is named.
fn usual(student: &Graph, teacher: Option<&Graph>, task: Task) -> Result<Losses> {
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
    losses.embedding = embedding(student, None).and(embedding(teacher, None)).ok().map(|_| 1.0.into());
    losses.hidden = both_layers("hidden", student, teacher).ok().map(|_| 1.0.into());
    Ok(losses)
}

/// The logits of a graph, how many columns they have, and whose tokens have some each.
fn logits(graph: &Graph) -> Result<(losses::LogitsSource, usize, Option<Side>)> {
    let Some((_, id)) = graph.outputs().iter().find(|(name, _)| name == "logits") else {
        let names = graph.outputs().iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        return Err(Error::option("losses", format!("soft and hard need an output `logits`; the model gives {names}")));
    };
    let value = graph.value(*id);
    let columns = value.ty.shape.last().and_then(Dim::fixed).ok_or_else(|| Error::option("losses", "the number of classes is not known"))?;
    let by_token = value.ty.shape.len() == 3;
    let read = graph.nodes().iter().any(|node| node.inputs.contains(id));
    let head = analysis::head(graph, *id).filter(|node| node.output == *id && !read);
    let source = match head.map(|node| (&node.op, node.inputs.as_slice())) {
        Some((Op::Linear(op), [input, parameters @ ..])) => losses::LogitsSource::Head(Head {
            input: graph.value(*input).name.clone(),
            parameters: parameters.iter().map(|id| graph.value(*id).name.clone()).collect(),
            op: *op,
        }),
        _ => losses::LogitsSource::Value(value.name.clone()),
    };
    Ok((source, columns, by_token.then(|| Sides::of(graph).side(&value.name))))
}

/// The value behind an output that is a vector for each sample.
fn embedding(graph: &Graph, wanted: Option<&str>) -> Result<String> {
    let vector = |id: &ValueId| graph.value(*id).ty.shape.len() == 2 && graph.value(*id).ty.element == Element::Float;
    let vectors: Vec<&(String, ValueId)> = graph.outputs().iter().filter(|(name, id)| vector(id) && name != "logits").collect();
    let names = || vectors.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let usual = ["sentence_embedding", "pooler_output"];
    let found = match wanted {
        Some(wanted) => vectors.iter().find(|(name, _)| name == wanted),
        None if vectors.len() == 1 => vectors.first(),
        None => usual.iter().find_map(|usual| vectors.iter().find(|(name, _)| name == usual)),
    };
    let reason = || match (wanted, vectors.is_empty()) {
        (_, true) => "no output of the model is a vector for each sample".to_owned(),
        (Some(wanted), _) => format!("there is no output `{wanted}`, the vectors are {}", names()),
        (None, _) => format!("name one of {} as `output`", names()),
    };
    found.map(|(_, id)| graph.value(*id).name.clone()).ok_or_else(|| Error::option("losses: embedding", reason()))
}
