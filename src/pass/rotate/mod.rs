//! Offline rotations: multiplies the residual stream and the values of attention heads by orthogonal
//! matrices, which distribute outliers over all features (QuaRot, Ashkboos et al. 2024,
//! <https://arxiv.org/abs/2404.00456>; R1 and R2 of SpinQuant, Liu et al. 2024,
//! <https://arxiv.org/abs/2405.16406>). The rotations are merged into the weights, and the outputs of the
//! model stay equal.
//!
//! ```yaml
//! passes:
//!   - rotate: { untie: true }
//!   - quantize: { scheme: W4A8 }
//! ```

mod source;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::source::{Change, Factors, Turn};
use crate::analysis::{self, AttentionValues, HeadValues, LinearLayer, ResidualStream};
use crate::error::{Error, Result, counted};
use crate::ir::{Graph, Op, rebuild};
use crate::kernel::rotation::Rotation;
use crate::model::Model;
use crate::pass::{Pass, Plan, options_of, targets, tower};
use crate::run_state::{Applied, RunState, WARNING};
use crate::store::{DType, Origin, Role, Weight, ZeroOrigin};

/// Features that are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RotatedPart {
    /// The residual stream (R1)
    Residual,
    /// The values of each attention head (R2)
    Heads,
}

/// Rotate the residual stream and the values of attention heads by orthogonal matrices, which distribute
/// outliers of activations and weights over all features.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Rotate {
    /// Features to rotate [default: both]
    #[cfg_attr(feature = "cli", arg(long, value_enum, value_delimiter = ','))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub parts: Vec<RotatedPart>,
    /// Store the output head separately if it is tied to the embedding table, which `residual` requires,
    /// because the factors of the last normalization are folded into the head
    #[cfg_attr(feature = "cli", arg(long))]
    pub untie: bool,
}

const NAME: &str = "rotate";

impl Rotate {
    fn rotates(&self, part: RotatedPart) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }
}

impl Pass for Rotate {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn check(&self) -> Result<()> {
        if self.untie && !self.rotates(RotatedPart::Residual) {
            return Err(Error::option(format!("{NAME}: untie"), "has no effect without the rotation of the residual stream: add `residual` to `parts`"));
        }
        Ok(())
    }

    fn plan(&self, model: &Model, state: &RunState) -> Result<Plan<'static>> {
        if model.onnx.is_some() {
            return Err(Error::option(NAME, "supports model folders and GGUF files, not ONNX files: rotate the model before it is exported"));
        }
        let graph = model.graph()?;
        let mut rotated = Rotated { model, seed: state.seed, changes: BTreeMap::new(), applied: Applied::new(NAME, self.options()) };
        let mut planned = model.clone();
        let mut details = serde_json::Map::new();
        if self.rotates(RotatedPart::Residual) {
            tower::require_none(model, "a rotation of the residual stream")?;
            let stream = analysis::residual_stream(&graph).map_err(|reason| Error::option(NAME, format!("cannot rotate the residual stream: {reason}")))?;
            rotated.require_complete_graph(&graph)?;
            let rotation = rotated.residual(&stream)?;
            details.insert("residual".into(), json!({ "width": stream.width, "matrix": rotation.describe(), "folded_norms": stream.norms.len() }));
            rotated.untie(self.untie, (&graph, &stream), &mut planned)?;
        }
        if self.rotates(RotatedPart::Heads) {
            let values = analysis::attention_values(&graph);
            details.insert("heads".into(), rotated.heads(&values, self.parts.contains(&RotatedPart::Heads))?);
        }
        let Rotated { changes, mut applied, .. } = rotated;
        let mut pruned = 0usize;
        for (name, change) in changes {
            // A separate head is planned already.
            let weight = planned.weights.get(&name)?.clone();
            require_floats(&name, &weight)?;
            pruned += usize::from(weight.zero_origin == Some(ZeroOrigin::Pruning));
            if change.mixes_rows() {
                applied.memory_by_thread = applied.memory_by_thread.max(4 * weight.elements() as u64);
            }
            let changed = change.apply(&name, &weight, &applied.meter);
            planned.weights.by_name.insert(name.clone(), changed);
            applied.tensors.insert(name);
        }
        if pruned > 0 {
            applied
                .notes
                .push(format!("{WARNING}{} are no longer sparse: rotations replace their pruned zeros; prune after `{NAME}`", counted(pruned, "weight")));
        }
        applied.details = details.into();
        Ok(Plan::new(planned, applied))
    }

    fn remedy(&self) -> &'static str {
        ""
    }
}

/// Requires a matrix or a vector with a float dtype of at most 32 bits.
fn require_floats(name: &str, weight: &Weight) -> Result<()> {
    if weight.dtype == DType::F64 {
        return Err(Error::tensor(name, format!("has the dtype F64, but {NAME} supports at most 32 bits"), "use `cast: { to: f32 }` before this pass"));
    }
    targets::require_float(NAME, name, weight)?;
    match weight.shape.len() {
        1 | 2 => Ok(()),
        _ => Err(Error::tensor(name, format!("has the shape {:?}, but {NAME} supports only matrices and vectors", weight.shape), "")),
    }
}

/// The changes of weights while the pass is planned.
struct Rotated<'m> {
    model: &'m Model,
    seed: u64,
    changes: BTreeMap<String, Change>,
    applied: Applied,
}

impl Rotated<'_> {
    /// A rotation of this size. `number` distinguishes rotations of the same run.
    fn rotation(&mut self, size: usize, number: u64) -> Result<Arc<Rotation>> {
        let mut random = fastrand::Rng::with_seed(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number));
        let rotation = Rotation::random(size, || random.f64());
        let rotation =
            rotation.ok_or_else(|| Error::option(NAME, format!("{size} features have no known Hadamard matrix and are too many for a dense matrix")))?;
        self.applied.memory = self.applied.memory.saturating_add(rotation.bytes() as u64);
        Ok(Arc::new(rotation))
    }

    fn turn(&mut self, weight: &str, turn: Turn) {
        self.changes.entry(weight.to_owned()).or_default().turns.push(turn);
    }

    /// Rotates outputs of a layer, and its bias.
    fn turn_outputs(&mut self, layer: &LinearLayer, turn: &Turn) {
        self.turn(&layer.weight, Turn { axis: usize::from(layer.input_major), ..turn.clone() });
        if let Some(bias) = &layer.bias {
            self.turn(bias, Turn { axis: 0, ..turn.clone() });
        }
    }

    /// Rotates inputs of a layer.
    fn turn_inputs(&mut self, layer: &LinearLayer, turn: &Turn) {
        self.turn(&layer.weight, Turn { axis: usize::from(!layer.input_major), ..turn.clone() });
    }

    /// Fails if the model has matrices that are not part of the graph, because they may belong to the
    /// residual stream.
    fn require_complete_graph(&self, graph: &Graph) -> Result<()> {
        let known: std::collections::BTreeSet<&str> = graph.params().map(|(_, value)| value.name.as_str()).collect();
        let other = self.model.weights.by_name.iter().find(|(name, weight)| weight.shape.len() > 1 && weight.is_float() && !known.contains(name.as_str()));
        match other {
            Some((name, _)) => Err(Error::tensor(
                name,
                format!("is not part of the graph, so {NAME} does not know whether it reads the residual stream"),
                "remove it from the checkpoint, such as a module for multi-token prediction, or use `parts: [heads]`",
            )),
            None => Ok(()),
        }
    }

    /// Rotates the residual stream, and folds the factors of normalizations into the layers that read it.
    fn residual(&mut self, stream: &ResidualStream) -> Result<Arc<Rotation>> {
        let rotation = self.rotation(stream.width, 0)?;
        let turn = Turn { rotation: rotation.clone(), axis: 1, first: 0, count: 1 };
        for (name, offset) in &stream.norms {
            self.changes.entry(name.clone()).or_default().constant = Some((1.0 - offset) as f32);
        }
        for (layer, norm) in &stream.readers {
            if let Some((norm, offset)) = norm.as_ref().and_then(|norm| stream.norms.get_key_value(norm)) {
                let factors =
                    Factors { name: norm.clone(), weight: self.model.weights.get(norm)?.clone(), offset: *offset, axis: usize::from(!layer.input_major) };
                require_floats(norm, &factors.weight)?;
                self.changes.entry(layer.weight.clone()).or_default().factors = Some(factors);
            }
            self.turn_inputs(layer, &turn);
        }
        stream.writers.iter().for_each(|layer| self.turn_outputs(layer, &turn));
        // The changes of a tied table are those of the head, which is separated from it later.
        for table in stream.tables.iter().filter(|table| !stream.readers.keys().any(|layer| layer.weight == **table)) {
            self.turn(table, turn.clone());
        }
        self.applied.notes.push(format!(
            "{NAME}: the residual stream of {} features is rotated ({}); the factors of {} are folded into the layers that read it; the hidden states (`last_hidden_state`) have another basis, so train draft heads on this model",
            stream.width,
            rotation.describe(),
            counted(stream.norms.len(), "normalization")
        ));
        Ok(rotation)
    }

    /// Stores the head of a tied model separately from the embedding table.
    fn untie(&mut self, allowed: bool, (graph, stream): (&Graph, &ResidualStream), planned: &mut Model) -> Result<()> {
        let shared = stream.tables.iter().find(|table| stream.readers.keys().any(|layer| layer.weight == **table));
        let ties = self.model.tied_names();
        let tie = ties.iter().find(|(_, original)| stream.tables.contains(*original));
        let Some(table) = shared.cloned() else {
            match tie {
                // The head is stored, and takes precedence in transformers 5 and in the graph.
                Some((alias, _)) => {
                    planned.config.untie();
                    self.applied.notes.push(format!(
                        "{NAME}: the stored output head `{alias}` differs from the embedding table after the rotation: \"tie_word_embeddings\" is set to false"
                    ));
                }
                None if allowed => {
                    return Err(Error::option(format!("{NAME}: untie"), "the output head is not tied to the embedding table: remove the option"));
                }
                None => {}
            }
            return Ok(());
        };
        let weight = self.model.weights.get(&table)?;
        let megabytes = weight.value_bytes() as f64 / 1e6;
        if !allowed {
            return Err(Error::option(
                format!("{NAME}: untie"),
                format!(
                    "the output head is tied to `{table}`, but reads rotated features with the factors of the last normalization: set `untie: true`, which stores it separately ({megabytes:.1} MB more), or use `parts: [heads]`"
                ),
            ));
        }
        let Some((alias, _)) = tie.filter(|(_, original)| **original == table) else {
            return Err(Error::option(format!("{NAME}: untie"), format!("the name of a head that is separate from `{table}` is not known for this model")));
        };
        if self.model.config.get("text_config").is_some() {
            return Err(Error::option(format!("{NAME}: untie"), "is not supported for a config.json with a `text_config`"));
        }
        require_floats(&table, weight)?;
        let head = self.changes.remove(&table).unwrap_or_default();
        self.changes.insert(table.clone(), Change { turns: head.turns.clone(), ..Change::default() });
        self.changes.insert((*alias).to_owned(), head);
        let mut separate = weight.clone().with_origin(Origin::Rescaled);
        (separate.role, separate.stored_bytes, separate.stored_as) = (Some(Role::Head), 0, Vec::new());
        planned.weights.by_name.insert((*alias).to_owned(), separate);
        planned.config.untie();
        if !self.model.has_derived_graph() {
            let shape = weight.shape.clone();
            planned.changed_graph = Some(Arc::new(rebuild(graph, &planned.weights, &mut |mut step| {
                if matches!(step.node.op, Op::Linear(_)) && step.node.inputs.get(1).is_some_and(|id| graph.value(*id).name == table) {
                    step.inputs[1] = step.builder.param(alias, &shape)?;
                }
                step.copy()
            })?));
        }
        self.applied.notes.push(format!(
            "{NAME}: the output head `{alias}` is no longer tied to `{table}`, and \"tie_word_embeddings\" is set to false: {:.1} million parameters ({megabytes:.1} MB) more",
            weight.elements() as f64 / 1e6
        ));
        Ok(())
    }

    /// Rotates the values of attention heads. Fails if no values can be rotated although the user requires
    /// it.
    fn heads(&mut self, values: &AttentionValues, is_required: bool) -> Result<Value> {
        let mut described = None;
        for (layer, HeadValues { width, producer, first, heads, reader, query_heads }) in values.layers.iter().enumerate() {
            let rotation = self.rotation(*width, 1 + layer as u64)?;
            described.get_or_insert_with(|| rotation.describe());
            let turn = Turn { rotation, axis: 0, first: *first, count: *heads };
            self.turn_outputs(producer, &turn);
            self.turn_inputs(reader, &Turn { first: 0, count: *query_heads, ..turn });
        }
        let other = values.remaining.first();
        if let (Some(other), true, true) = (other, is_required, values.layers.is_empty()) {
            return Err(Error::option(
                format!("{NAME}: parts"),
                format!("the values of no attention layer can be rotated: another operator reads or computes those of `{other}`"),
            ));
        }
        if let Some(described) = &described {
            self.applied.notes.push(format!("{NAME}: the values of {} are rotated ({described})", counted(values.layers.len(), "attention layer")));
        }
        if let Some(other) = other {
            self.applied.notes.push(format!(
                "{NAME}: the values of {} are not rotated, because other operators than linear layers read or compute them (the first: `{other}`)",
                counted(values.remaining.len(), "attention layer")
            ));
        }
        Ok(json!({ "layers": values.layers.len(), "not_rotated": values.remaining.len(), "matrix": described }))
    }
}
