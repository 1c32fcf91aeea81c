//! Weights with a row for each token.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;

use super::retained::Retained;
use super::tokenizer::TokenizerFile;
use super::{NAME, files};
use crate::arch::{is_draft_head, is_of_tower, role};
use crate::data::DECODER_INPUT_IDS;
use crate::error::{Error, Result};
use crate::ir::ops::{TokenChoice, TokenPool};
use crate::ir::{Dim, Graph, Kind, Node, Op, ValueId, rebuild};
use crate::model::{Model, ModelPart, part};
use crate::store::{Encoding, Role};
use crate::work::Meter;

/// Inputs of tokens.
const INPUTS: [&str; 2] = ["input_ids", DECODER_INPUT_IDS];

/// The weights of a model with a row for each token.
pub(super) struct TokenTables {
    graph: Graph,
    /// Number of rows.
    pub rows: usize,
    /// The axis of the tokens, by name of the weight.
    axes: BTreeMap<String, usize>,
    /// Number of first tokens whose ids must not change, because positions depend on one of them.
    pub fixed: usize,
    /// The token at which a sequence is pooled.
    pooled: Option<i64>,
}

/// A model with fewer tokens.
pub(super) struct Reduced {
    pub model: Model,
    /// Weights with fewer rows.
    pub weights: BTreeSet<String>,
    pub notes: Vec<String>,
}

impl TokenTables {
    /// Finds the embeddings and heads of a model.
    ///
    /// # Errors
    /// The model cannot run, has no embedding of tokens, or embeddings of different sizes.
    pub fn find(model: &Model) -> Result<TokenTables> {
        let unsupported = |reason: &str| {
            let hint = "supported are language models and encoders in folders and GGUF files; export to ONNX after this pass";
            Error::run(format!("{NAME}: {}", model.path.display()), reason, hint)
        };
        if model.onnx.is_some() {
            return Err(unsupported("an .onnx model fixes the size of its vocabulary in its operators"));
        }
        if is_draft_head(model.config.model_type()) {
            return Err(unsupported("a draft head has the token ids of its model: prune the vocabulary of the model, and train a head for the result"));
        }
        let graph = model.graph()?;
        let mut tables = TokenTables { graph: Graph::default(), rows: 0, axes: BTreeMap::new(), fixed: 0, pooled: None };
        let inputs: Vec<ValueId> = graph.inputs().filter(|(_, value)| INPUTS.contains(&value.name.as_str())).map(|(id, _)| id).collect();
        for node in graph.nodes() {
            let reads = node.inputs.iter().any(|input| inputs.contains(input));
            match (&node.op, node.inputs.as_slice()) {
                _ if !reads => {}
                (Op::Embedding(_), [_, table]) => tables.add(&graph, model, *table, 0)?,
                (Op::Positions(op), _) => {
                    let fixed = op.padding.and_then(|token| usize::try_from(token).ok()).map_or(0, |token| token.saturating_add(1));
                    tables.fixed = tables.fixed.max(fixed);
                }
                (Op::TokenPool(TokenPool { choice: TokenChoice::Named(token) }), _) => tables.pooled = Some(*token),
                // The configuration of these models names token 2.
                (Op::TokenPool(TokenPool { choice: TokenChoice::Largest }), _) => tables.fixed = tables.fixed.max(3),
                // Reads only the number of tokens.
                (Op::RelativeBias(_), _) => {}
                (op, _) => return Err(unsupported(&format!("`{}` reads token ids", op.name()))),
            }
        }
        if tables.axes.is_empty() {
            return Err(unsupported("the model has no embedding of `input_ids`"));
        }
        for (_, output) in graph.outputs() {
            tables.add_head(&graph, model, *output)?;
        }
        let read: BTreeSet<&str> = graph.params().map(|(_, value)| value.name.as_str()).collect();
        let tied = model.tied_names();
        for (name, weight) in &model.weights.by_name {
            let is_alias = tied.iter().any(|(alias, original)| alias == name && tables.axes.contains_key(*original));
            // Copies of the bias of a head, and heads that the class of the model does not use.
            let is_table = matches!(role(name, weight), Some(Role::Table | Role::Head));
            let is_bias = weight.shape.len() == 1 && name.ends_with("bias") && part(name, &weight.shape) == ModelPart::Heads;
            let is_unread = !read.contains(name.as_str()) && (is_table || is_bias);
            let (is_row, axis) = (name.ends_with("final_logits_bias"), usize::from(weight.shape.first() == Some(&1)));
            if !tables.axes.contains_key(name) && (is_alias || is_unread || is_row) && weight.shape.get(axis) == Some(&tables.rows) {
                tables.axes.insert(name.clone(), axis);
            }
            let is_other = weight.is_float() && !read.contains(name.as_str()) && !tables.axes.contains_key(name) && !is_of_tower(name);
            if is_other && matches!(weight.shape[..], [rows, columns] if rows == tables.rows && columns != rows) {
                let reason = format!("is not part of the graph, and has {} rows, the number of tokens", tables.rows);
                return Err(Error::tensor(name, reason, "remove it from the checkpoint, such as an additional head that predicts further tokens"));
            }
        }
        tables.graph = graph;
        Ok(tables)
    }

    fn add(&mut self, graph: &Graph, model: &Model, id: ValueId, axis: usize) -> Result<()> {
        let value = graph.value(id);
        let after_quantization = || {
            let hint = "run `prune-vocabulary` before quantization, or `dequantize` first";
            Error::tensor(&value.name, "is quantized, so that its rows cannot be selected", hint)
        };
        let weight = match value.kind {
            Kind::Param => model.weights.get(&value.name)?,
            _ => return Err(after_quantization()),
        };
        if weight.encoding != Encoding::Dense || weight.dtype.bitsize() < 8 {
            return Err(after_quantization());
        }
        let rows = weight.shape.get(axis).copied().unwrap_or(0);
        if self.rows != 0 && self.rows != rows {
            let reason = format!("has {rows} rows, but another table of the model has {}", self.rows);
            return Err(Error::tensor(&value.name, reason, "only models with one vocabulary are supported"));
        }
        self.rows = rows;
        self.axes.insert(value.name.clone(), axis);
        Ok(())
    }

    /// Adds the weight and the biases of a layer that computes a logit of each token.
    fn add_head(&mut self, graph: &Graph, model: &Model, output: ValueId) -> Result<()> {
        let mut id = output;
        let is_logits = |id: ValueId| graph.value(id).ty.shape.len() == 3 && graph.value(id).ty.shape.last().and_then(Dim::fixed) == Some(self.rows);
        if !is_logits(id) || classifies_tokens(model) {
            return Ok(());
        }
        let mut biases = Vec::new();
        while let Some(node) = graph.producer(id) {
            let (parameters, values): (Vec<ValueId>, Vec<ValueId>) = node.inputs.iter().partition(|id| graph.value(**id).kind == Kind::Param);
            match (&node.op, values.as_slice()) {
                (Op::Linear(op), [_]) => {
                    let axis = usize::from(op.input_major);
                    for (position, parameter) in parameters.into_iter().enumerate() {
                        self.add(graph, model, parameter, if position == 0 { axis } else { 0 })?;
                    }
                    return biases.into_iter().try_for_each(|bias| self.add(graph, model, bias, 0));
                }
                // Activations of the head are quantized, or its logits are scaled.
                (Op::Scale(_) | Op::Tanh(_) | Op::Clip(_) | Op::Add(_) | Op::Mul(_) | Op::FakeQuantize(_), [input]) => {
                    let size = |id: &ValueId| graph.value(*id).ty.shape.last().and_then(Dim::fixed);
                    biases.extend(parameters.into_iter().filter(|id| size(id) == Some(self.rows)));
                    id = *input;
                }
                _ => return Err(unknown_head(node)),
            }
        }
        Ok(())
    }

    /// The model with only these tokens.
    ///
    /// # Errors
    /// A file or key with token ids is not supported, or `config.json` cannot describe the result.
    pub fn reduce(&self, model: &Model, tokenizer: &TokenizerFile, ids: &[usize], meter: &Arc<Meter>) -> Result<Reduced> {
        let (retained, mut model) = (Retained(ids), model.clone());
        self.name_pooled_token(&mut model);
        let (was_described, had_changed_graph) = (model.is_described(), model.changed_graph.is_some());
        let notes = files::rewrite(&mut model, tokenizer, &retained, self.rows)?;
        for (name, axis) in &self.axes {
            let weight = model.weights.get(name)?.index_select(name, *axis, ids, meter.clone())?;
            model.weights.by_name.insert(name.clone(), weight);
        }
        let new_id = |token: i64| usize::try_from(token).ok().and_then(|token| retained.new_id(token)).and_then(|id| i64::try_from(id).ok());
        let smaller = rebuild(&self.graph, &model.weights, &mut |step| match &step.node.op {
            Op::TokenPool(TokenPool { choice: TokenChoice::Named(token) }) => {
                let choice = TokenChoice::Named(new_id(*token).unwrap_or(*token));
                step.builder.node(step.name, TokenPool { choice }, &step.inputs)
            }
            _ => step.copy(),
        })?;
        model.changed_graph = Some(Arc::new(smaller));
        if was_described && model.graph_file()?.is_some() {
            let hint = "specify all token ids and the size of the vocabulary in config.json instead of relying on defaults";
            return Err(Error::run(format!("{NAME}: {}", model.path.display()), "config.json does not describe the model with the new ids", hint));
        }
        if was_described && !had_changed_graph {
            model.changed_graph = None;
        }
        if ids.len() < self.rows {
            let original = |id: &usize| model.retained_tokens.as_ref().map_or(Some(*id), |before| before.get(*id).copied());
            model.retained_tokens = Some(Arc::new(ids.iter().filter_map(original).collect()));
        }
        Ok(Reduced { model, weights: self.axes.keys().cloned().collect(), notes })
    }

    /// Specifies the token at which a sequence is pooled, if `config.json` relies on its default.
    fn name_pooled_token(&self, model: &mut Model) {
        const KEY: &str = "eos_token_id";
        let Some(token) = self.pooled else { return };
        match model.config.get("text_config").cloned() {
            Some(Value::Object(mut text)) if !text.contains_key(KEY) => {
                text.insert(KEY.into(), token.into());
                model.config.set("text_config", text.into());
            }
            None if model.config.get(KEY).is_none() => model.config.set(KEY, token.into()),
            _ => {}
        }
    }
}

/// Whether the last axis of the outputs is classes of tokens instead of the vocabulary.
fn classifies_tokens(model: &Model) -> bool {
    ["Classification", "QuestionAnswering"].iter().any(|end| model.config.class().ends_with(end))
}

fn unknown_head(node: &Node) -> Error {
    Error::Unsupported {
        what: format!("removing tokens if the logits are computed by `{}`", node.op.name()),
        hint: "supported are linear heads, also with a bias, a scale or a soft cap".into(),
    }
}
