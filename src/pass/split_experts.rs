//! Stores the projections of experts, which are one tensor for all experts of a layer, as separate linear
//! layers.
//!
//! ```yaml
//! passes:
//!   - split-experts
//!   - quantize: { scheme: W4A16 }
//! ```

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::arch::{self, ExpertLayout};
use crate::error::{Error, Result, counted};
use crate::model::{Model, stacked_experts};
use crate::pass::{Pass, Plan, options_of};
use crate::run_state::{Applied, RunState};
use crate::store::{Block, BlockSink, Encoding, View, Weight, WeightSource, block_elements};
use crate::work::Meter;

/// Store the experts of each layer, which are one tensor, as separate linear layers, which passes and
/// runtimes can quantize.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct SplitExperts {}

const NAME: &str = "split-experts";

/// Names of the tensors that contain gate and up, and down projections of all experts.
const GATE_UP: &str = "gate_up_proj";
const DOWN: &str = "down_proj";

impl Pass for SplitExperts {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn plan(&self, model: &Model, _state: &RunState) -> Result<Plan<'static>> {
        let names: Vec<&String> = model.weights.by_name.iter().filter(|(name, weight)| stacked_experts(name, weight).is_some()).map(|(name, _)| name).collect();
        if names.is_empty() {
            return Err(Error::option(NAME, "the model has no experts in one tensor: passes already process each expert as linear layers"));
        }
        let model_type = model.config.model_type();
        let family = arch::family(model_type);
        let layout = family.and_then(|family| family.experts).filter(|layout| layout.parts.is_some());
        let layout = layout.ok_or_else(|| {
            let writes = family.and_then(|family| family.gguf).is_some_and(|gguf| gguf.experts.is_some());
            let hint =
                if writes { "; files for llama.cpp have them in one tensor, in the types of `gguf`: write `-o model.gguf` without this pass" } else { "" };
            let reason = format!("`{}` cannot be split: the names of separate experts of model_type {model_type:?} are not known{hint}", names[0]);
            Error::option(NAME, reason)
        })?;
        if !model.has_derived_graph() {
            return Err(Error::option(
                NAME,
                "the model has a graph of its own, which reads the experts from one tensor: use this pass before passes that change the graph",
            ));
        }
        let hidden = arch::text_values(model.config.values()).get("hidden_size").and_then(Value::as_u64).and_then(|width| usize::try_from(width).ok());
        let hidden = hidden.ok_or_else(|| Error::option(NAME, "`hidden_size` in config.json is missing, which determines the axes of experts"))?;
        let mut planned = model.clone();
        let (mut applied, mut layers) = (Applied::new(NAME, self.options()), 0usize);
        let other_names = model.weights.by_name.keys().map(|name| (name, separate_name(name, layout)));
        for (name, separate) in other_names.filter(|(name, separate)| *name != separate) {
            if let Some(weight) = planned.weights.by_name.remove(name)
                && planned.weights.by_name.insert(separate.clone(), weight).is_some()
            {
                return Err(Error::tensor(name, format!("cannot be renamed: `{separate}` already exists"), "remove one of them"));
            }
        }
        for name in &names {
            let weight = model.weights.get(name)?;
            let is_input_major = is_input_major(model, (name, weight), hidden)?;
            for (part, one) in parts((name, weight), layout, is_input_major, &applied.meter)? {
                let part = separate_name(&part, layout);
                if planned.weights.by_name.insert(part.clone(), one).is_some() {
                    return Err(Error::tensor(name, format!("cannot be split: `{part}` already exists"), "remove one of them"));
                }
                applied.tensors.insert(part);
                layers += 1;
            }
            planned.weights.by_name.remove(&separate_name(name, layout));
            let bytes = weight.elements().saturating_mul(weight.dtype.bitsize()) / 8 / weight.shape[0].max(1);
            applied.memory_by_thread = applied.memory_by_thread.max(3 * bytes as u64);
        }
        applied.rule = "all experts in one tensor".into();
        applied.details = json!({ "split": names.len(), "layers": layers });
        applied.notes = vec![format!("the experts of {} are stored as {}", counted(names.len(), "tensor"), counted(layers, "linear layer"))];
        let renaming = |(from, to)| format!("tensors of `{from}` are named `{to}`, as in files with separate experts");
        applied.notes.extend(layout.renamed.map(renaming));
        Ok(Plan::new(planned, applied))
    }

    fn remedy(&self) -> &'static str {
        ""
    }
}

/// Whether a tensor of all experts has the axes `[experts, in, out]` instead of `[experts, out, in]`. Files
/// of a family may have either order. `hidden` is the width of the residual stream: that of the inputs of
/// gate and up, and of the outputs of down projections. If both axes have this width, the other tensor of
/// the layer determines the order.
fn is_input_major(model: &Model, (name, weight): (&str, &Weight), hidden: usize) -> Result<bool> {
    let order = |name: &str, weight: &Weight| match weight.shape[..] {
        [_, rows, columns] if (rows == hidden) != (columns == hidden) => Some((rows == hidden) != name.contains(DOWN)),
        _ => None,
    };
    let other = if name.contains(DOWN) { name.replace(DOWN, GATE_UP) } else { name.replace(GATE_UP, DOWN) };
    let of_other = || model.weights.by_name.get(&other).filter(|_| weight.shape[1..] == [hidden, hidden]).and_then(|weight| order(&other, weight));
    let unknown = || Error::tensor(name, format!("has the shape {:?}, but `hidden_size` is {hidden}", weight.shape), "check config.json");
    order(name, weight).or_else(of_other).ok_or_else(unknown)
}

/// The name of a tensor in files with separate experts.
fn separate_name(name: &str, layout: ExpertLayout) -> String {
    layout.renamed.map_or_else(|| name.to_owned(), |(from, to)| name.replace(&format!(".{from}."), &format!(".{to}.")))
}

/// The linear layers of a tensor of all experts, by name.
fn parts((name, weight): (&str, &Weight), layout: ExpertLayout, is_input_major: bool, meter: &Arc<Meter>) -> Result<Vec<(String, Weight)>> {
    let [gate, up, down] = layout.parts.unwrap_or_default();
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let (experts, names): (&str, &[&str]) = match (module.strip_suffix(GATE_UP), module.strip_suffix(DOWN)) {
        (Some(experts), _) => (experts, &[gate, up]),
        (_, Some(experts)) => (experts, &[down]),
        _ => {
            return Err(Error::tensor(
                name,
                format!("belongs to experts in one tensor, but is neither `{GATE_UP}` nor `{DOWN}`"),
                "remove the pass `split-experts`",
            ));
        }
    };
    let [count, rows, columns] = weight.shape[..] else {
        return Err(Error::tensor(name, format!("has the shape {:?}, expected three axes", weight.shape), ""));
    };
    let (out, width) = if is_input_major { (columns, rows) } else { (rows, columns) };
    if !out.is_multiple_of(names.len()) {
        return Err(Error::tensor(name, format!("has {out} outputs per expert, expected an even number for gates and values"), "check the checkpoint"));
    }
    let own = out / names.len();
    let mut found = Vec::with_capacity(count * names.len());
    for expert in 0..count {
        // Experts of a file are read without the others.
        let all = match weight.rows(&(expert..expert + 1), 1) {
            Some((mut one, _)) => {
                one.rows_of = None;
                one
            }
            None => weight.index_select(name, 0, &[expert], meter.clone())?,
        };
        for (at, part) in names.iter().enumerate() {
            let outputs = at * own..(at + 1) * own;
            let source = ExpertLayer { all: all.clone(), size: [out, width], outputs, is_input_major, meter: meter.clone() };
            let mut one = all.then(weight.dtype, Encoding::Dense, Arc::new(source));
            (one.shape, one.role, one.stored_bytes) = (vec![own, width], None, all.stored_bytes / names.len() as u64);
            found.push((format!("{experts}{expert}.{part}.weight"), one));
        }
    }
    Ok(found)
}

/// A linear layer of an expert.
struct ExpertLayer {
    /// The projections of the expert.
    all: Weight,
    /// Number of outputs and of inputs of these projections.
    size: [usize; 2],
    /// The outputs of this layer.
    outputs: Range<usize>,
    is_input_major: bool,
    meter: Arc<Meter>,
}

impl ExpertLayer {
    /// The values of this layer, `[out, in]`, of all values of the expert.
    fn select(&self, all: &[u8], bytes: usize) -> Vec<u8> {
        let ([out, width], Range { start, end }) = (self.size, self.outputs.clone());
        if !self.is_input_major {
            return all[start * width * bytes..end * width * bytes].to_vec();
        }
        let element = |row: usize, column: usize| &all[(column * out + row) * bytes..][..bytes];
        (start..end).flat_map(|row| (0..width).flat_map(move |column| element(row, column))).copied().collect()
    }
}

impl WeightSource for ExpertLayer {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (dtype, bytes) = (self.all.dtype, self.all.dtype.bitsize() / 8);
        let (mut now, mut before) = (Vec::new(), None::<Vec<u8>>);
        self.all.visit(1, &mut |block: Block| {
            let is_comparable = block.before.affine.is_none() && block.before.dtype == dtype;
            if is_comparable && !block.now.is(&block.before) && before.is_none() {
                before = Some(now.clone());
            }
            now.extend_from_slice(block.now.values);
            if let Some(before) = &mut before {
                before.extend_from_slice(if is_comparable { block.before.values } else { block.now.values });
            }
            Ok(())
        })?;
        let (now, before) = self.meter.time(|| (self.select(&now, bytes), before.map(|before| self.select(&before, bytes))));
        let length = block_elements(unit) * bytes;
        for (at, values) in now.chunks(length).enumerate() {
            let now = View::dense(dtype, values);
            match &before {
                Some(before) => sink(Block { now, before: View::dense(dtype, &before[at * length..][..values.len()]) })?,
                None => sink(Block::untouched(now))?,
            }
        }
        Ok(())
    }
}
