//! Schemes of blocks of GGUF files: a file type, whose mixture selects the type of each matrix, or a type.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::{Formats, NAME, Quantize, Scheme};
use crate::error::{Error, Result, counted};
use crate::export::{FileType, TensorType, gguf_kind, gguf_kinds};
use crate::model::Model;
use crate::pass::plan::Plan;
use crate::pass::targets::{self, SelectedWeights};
use crate::pass::{Pass, layerwise};
use crate::run_state::Applied;
use crate::store::ExactBlocks;
use crate::store::gguf::{BlockScales, Kind};

/// A file type that stores all matrices with rows of 32 elements in blocks.
const ANY: FileType = FileType::Q8_0;

/// The selected weights.
struct BlockLayers {
    /// The blocks of each of them.
    blocks: BTreeMap<String, ExactBlocks>,
    rule: String,
    notes: Vec<String>,
}

impl Scheme {
    /// The file type with this name.
    fn file_type(self) -> Option<FileType> {
        serde_json::from_value(self.name().into()).ok()
    }

    /// The type with this name.
    fn tensor_type(self) -> Option<TensorType> {
        self.name().parse().ok()
    }
}

impl Quantize {
    /// Whether the schemes are those of blocks of GGUF files.
    pub(super) fn has_blocks(&self) -> bool {
        self.schemes().any(Scheme::is_blocks)
    }

    /// Checks the options of schemes of blocks.
    pub(super) fn check_blocks(&self) -> Result<()> {
        let Some(scheme) = self.schemes().find(|scheme| scheme.is_blocks()).map(Scheme::name) else { return Ok(()) };
        if let Some(other) = self.schemes().find(|other| !other.is_blocks()) {
            let reason = format!("{scheme} is a type of GGUF files, and {} a scheme of compressed-tensors, which no file contains together", other.name());
            return Err(Error::option(format!("{NAME}: rules"), reason));
        }
        if self.method.rescales() {
            let reason = format!("{scheme} is a type of GGUF files, which support `rtn`, `gptq` and `autoround`");
            return Err(Error::option(format!("{NAME}: method"), reason));
        }
        let unsupported = [
            ("group_size", self.layouts().any(|layout| layout.group_size.is_some())),
            ("observer", self.observer.is_some()),
            ("correct", self.correct.is_some()),
            ("kv_cache", self.kv_cache.is_some()),
        ];
        match unsupported.into_iter().find(|(_, is_set)| *is_set) {
            Some((option, _)) => Err(Error::option(format!("{NAME}: {option}"), format!("is not supported for {scheme}, a type of GGUF files"))),
            None => Ok(()),
        }
    }

    /// Selects weights that a GGUF file contains row by row, and chooses their types.
    fn block_layers(&self, model: &Model) -> Result<BlockLayers> {
        let SelectedWeights { mut names, rule, mut notes } = self.selected(&model.weights)?;
        targets::check_rules(NAME, self.rules.iter().map(|rule| rule.targets.as_slice()), &model.weights, &names)?;
        names.iter().try_for_each(|name| targets::require_matrix(NAME, name, model.weights.get(name)?))?;
        let calibrates = self.method.reads_samples();
        if calibrates {
            notes.extend(layerwise::retain_supported(NAME, model, &mut names, &self.targets)?);
        }
        let mut mixtures: BTreeMap<&str, BTreeMap<String, Kind>> = BTreeMap::new();
        let (mut blocks, mut left, mut replaced) = (BTreeMap::new(), Vec::new(), Vec::new());
        for name in names {
            let has_rule = self.rules.iter().any(|rule| rule.targets.iter().any(|pattern| pattern.matches(name)));
            let scheme = self.layout_of(name).scheme;
            // Rules select the types of matrices, also if a file type has the same name.
            let (file_type, tensor_type) = match (scheme.file_type(), scheme.tensor_type()) {
                (Some(file_type), None) => (file_type, None),
                (Some(file_type), Some(_)) if !has_rule => (file_type, None),
                (_, tensor_type) => (ANY, tensor_type),
            };
            let mixture = match mixtures.entry(scheme.name()) {
                Entry::Occupied(found) => found.into_mut(),
                Entry::Vacant(entry) => entry.insert(gguf_kinds(model, file_type, calibrates)?),
            };
            let row = model.weights.get(name)?.row();
            // Other tensors of the file are floats with any type.
            let kind = mixture.get(name).filter(|kind| matches!(kind, Kind::Blocks(_)));
            let kind = kind.map(|kind| tensor_type.map_or(*kind, |tensor_type| gguf_kind(tensor_type, row)));
            let Some(Kind::Blocks(kind)) = kind else {
                left.push(name);
                continue;
            };
            if let Some(requested) = tensor_type.map(TensorType::kind).filter(|requested| *requested != Kind::Blocks(kind)) {
                replaced.push(format!("`{name}`: {}, not {requested}", kind.name()));
            }
            blocks.insert(name.to_owned(), ExactBlocks { kind, file_type: (tensor_type.is_none() && !has_rule).then(|| file_type.id()) });
        }
        if let Some(first) = replaced.first() {
            notes.push(format!(
                "{NAME}: {} with rows that are not a multiple of the block size have blocks of a larger type (the first: {first})",
                counted(replaced.len(), "weight")
            ));
        }
        if let Some(first) = left.first() {
            notes.push(format!(
                "{NAME}: {} left to the export, because the file splits them or stores them as floats (the first: `{first}`)",
                counted(left.len(), "weight")
            ));
        }
        if blocks.is_empty() {
            return Err(Error::option(NAME, format!("{} has blocks for none of the selected weights ({rule})", self.scheme.name())));
        }
        notes.extend(targets::requantized(NAME, &model.weights, blocks.keys().map(String::as_str)));
        let rules = self.rules.iter().map(|rule| rule.targets.as_slice());
        notes.extend(targets::unused_rules(NAME, rules, blocks.keys().map(String::as_str)));
        notes.extend(targets::naming_note(NAME, model, &self.targets));
        Ok(BlockLayers { blocks, rule, notes })
    }

    /// Plans the quantization to blocks.
    pub(super) fn plan_blocks<'a>(&'a self, model: &'a Model) -> Result<Plan<'a>> {
        let BlockLayers { blocks, rule, notes } = self.block_layers(model)?;
        let tensors: BTreeSet<String> = Formats::Blocks(&blocks).names().into_iter().map(str::to_owned).collect();
        let mut applied = Applied { tensors, rule, notes, ..Applied::new(NAME, self.options()) };
        let mut planned = model.clone();
        let (mut parameters, mut types) = (0, BTreeMap::<&str, usize>::new());
        for (name, exact) in &blocks {
            let weight = model.weights.get(name)?;
            parameters += weight.elements() as u64;
            *types.entry(exact.kind.name()).or_default() += 1;
            planned.weights.by_name.insert(name.clone(), weight.in_blocks(*exact, name, BlockScales::Plain));
        }
        applied.details = json!({ "quantized": blocks.len(), "parameters": parameters, "of": model.weights.parameters(), "types": types });
        if !self.method.reads_samples() {
            return Ok(Plan::new(planned, applied));
        }
        applied.checkpoint_bytes = Some(layerwise::checkpoint_bytes(&applied.tensors, &planned.weights));
        applied.model_runs = layerwise::model_runs(self, &applied.tensors, model)?;
        let mut executed = applied.clone();
        Ok(Plan::new(planned, applied).with_execution(move |context| {
            let mut after = model.clone();
            let more = layerwise::quantize(self, (Formats::Blocks(&blocks), None), &mut after, context, &mut executed)?;
            executed.details.as_object_mut().into_iter().for_each(|details| details.extend(more.clone()));
            Ok((after, executed))
        }))
    }
}
