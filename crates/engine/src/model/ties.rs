//! Tied weights: found, stored once, and made consistent after passes.

use std::sync::Arc;

use super::{Config, Model};
use crate::arch;
use crate::error::{Error, Result};
use crate::store::{Checkpoint, Weight};

#[doc(hidden)]
impl Model {
    /// Pairs (alias, original) of tied weights; the alias need not be stored.
    pub fn tied_names(&self) -> Vec<(&'static str, &'static str)> {
        self.config.tied_names(|name| self.weights.by_name.contains_key(name))
    }

    /// Makes tied weights consistent after a pass has changed one of them. A stored head that differs
    /// from the embedding is untied in the configuration, as transformers 5 loads it. An equal head that
    /// the pass did not change is removed, so that loaders tie it again. Returns notes on both. Fails if a
    /// pass changes only an alias that equals its original, or one of two different tables of a family that
    /// always shares them. An extracted language model has other names than the input.
    pub fn settle_ties(&mut self, input: &Model) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        let is_extracted = arch::has_tower(input.config.model_type()) && !arch::has_tower(self.config.model_type());
        for tie in input.tied_names() {
            let names = [tie.0, tie.1].map(|name| if is_extracted { arch::name_in_text_model(name) } else { name.to_owned() });
            let changed = |name: &str, renamed: &str| match (self.weights.by_name.get(renamed), input.weights.by_name.get(name)) {
                (Some(now), Some(before)) => Some(!Arc::ptr_eq(&now.source(), &before.source())),
                _ => None,
            };
            let [alias, original] = names.each_ref().map(String::as_str);
            let (Some(a), Some(b)) = (changed(tie.0, alias), changed(tie.1, original)) else { continue };
            let always = input.config.shares_table();
            if (always && a == b) || !(a || b) {
                continue;
            }
            match (input.same_bytes(tie.0, tie.1)?, always) {
                (false, false) => notes.push(self.untie(alias, original)),
                (false, true) => {
                    return Err(Error::tensor(
                        alias,
                        format!("is always `{original}` in this family, but both are stored with different values, and a pass changes only one of them"),
                        "the family shares one table: remove the wrong one from the checkpoint",
                    ));
                }
                (true, _) if a == b => {}
                (true, _) if a => {
                    return Err(Error::tensor(
                        alias,
                        format!("is tied to `{original}` by config.json, but a pass changes only this one"),
                        if always {
                            "add both to `targets`: the family shares one table"
                        } else {
                            "add both to `targets`, or set \"tie_word_embeddings\": false in config.json to untie them"
                        },
                    ));
                }
                (true, _) => {
                    self.weights.by_name.remove(alias);
                    notes.push(format!("`{alias}` is tied to `{original}` and has the same values: only one is stored"));
                }
            }
        }
        Ok(notes)
    }

    /// Unties a head in the configuration. Its bias is then stored under two names: transformers 5 reads
    /// one of them, transformers 4 the other.
    fn untie(&mut self, alias: &str, original: &str) -> String {
        self.config.untie();
        let weights = &mut self.weights.by_name;
        if let Some(module) = alias.strip_suffix("decoder.weight") {
            let [own, shared] = [format!("{module}decoder.bias"), format!("{module}bias")];
            if let Some(shared_bias) = weights.get(&shared).cloned() {
                let bias = weights.entry(own).or_insert(shared_bias).clone();
                weights.insert(shared, bias);
            }
        }
        format!("`{alias}` differs from `{original}`, to which config.json ties it: it is stored separately, and \"tie_word_embeddings\" is set to false")
    }

    /// Whether two weights have the same values in the same format.
    pub fn same_bytes(&self, a: &str, b: &str) -> Result<bool> {
        let [first, second] = [self.weights.get(a)?.dense(a), self.weights.get(b)?.dense(b)];
        if (first.dtype, &first.shape) != (second.dtype, &second.shape) {
            return Ok(false);
        }
        let hash = |weight: &Weight| -> Result<_> {
            let mut hasher = blake3::Hasher::new();
            weight.visit(1, &mut |block| {
                hasher.update(block.now.values);
                Ok(())
            })?;
            Ok(hasher.finalize())
        };
        Ok(hash(&first)? == hash(&second)?)
    }
}

/// Renames tied tensors that are stored only under the name of an alias, such as a head without its embedding
/// table, as transformers loads them. Adds notes.
pub(super) fn name_tied_originals(config: &Config, checkpoint: &mut Checkpoint) {
    if config.shares_table() {
        return;
    }
    let ties = config.tied_names(|_| true);
    for (alias, original) in ties.iter().copied() {
        // Base models have the table without a prefix.
        let table = original.rsplit('.').nth(1).map(|module| format!("{module}.weight")).unwrap_or_default();
        let is_ambiguous = ties.iter().filter(|(other, _)| *other == alias).count() > 1;
        // Codes would be separated from their scales.
        let module = alias.strip_suffix("weight").unwrap_or(alias);
        let is_quantized = checkpoint.tensors.keys().any(|name| name.strip_prefix(module).is_some_and(|part| !matches!(part, "weight" | "bias")));
        if is_ambiguous || is_quantized || checkpoint.tensors.keys().any(|name| name.ends_with(&table)) {
            continue;
        }
        if let Some(tensor) = checkpoint.tensors.remove(alias) {
            checkpoint.tensors.insert(original.to_owned(), tensor);
            checkpoint.notes.push(format!("`{alias}` is stored in the input instead of `{original}`, to which config.json ties it: it is renamed"));
        }
    }
}

/// Removes aliases of tied tensors that share storage, since loaders tie them again. Adds notes on other
/// tensors that share storage.
pub(super) fn store_tied_once(config: &Config, checkpoint: &mut Checkpoint) {
    let sharing = |checkpoint: &Checkpoint| {
        let mut storages: Vec<_> = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.bytes() > 0).map(|(name, tensor)| (tensor.location(), name)).collect();
        storages.sort();
        let pairs = storages
            .windows(2)
            .filter_map(|pair| if let [(a, first), (b, second)] = pair { (a == b).then(|| [first, second].map(|name| (*name).clone())) } else { None });
        pairs.collect::<Vec<_>>()
    };
    for [first, second] in sharing(checkpoint) {
        for (alias, original) in [(&first, &second), (&second, &first)] {
            let ties = config.tied_names(|name| name != alias && checkpoint.tensors.contains_key(name));
            if ties.contains(&(alias.as_str(), original.as_str())) {
                checkpoint.tensors.remove(alias);
            }
        }
    }
    let shared = sharing(checkpoint);
    checkpoint.notes.extend(shared.iter().map(|[first, second]| format!("`{first}` and `{second}` share storage in the input; they are stored separately")));
}
