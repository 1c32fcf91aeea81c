//! The repeated layers of a model, by the names of its tensors.

use std::collections::{BTreeMap, BTreeSet};

/// Minimum number of layers of a twin.
const LEAST: usize = 2;
/// Most layers of a model, so that an invalid count is not expanded.
const MOST: usize = 1 << 16;

/// The layers of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layers {
    /// Names of their tensors start with this prefix, which ends with a dot, and the number of the layer.
    prefix: String,
    /// Number of layers.
    pub count: usize,
}

impl Layers {
    /// The layers with this prefix.
    pub(super) fn new(prefix: &str, count: usize) -> Layers {
        Layers { prefix: prefix.to_owned(), count }
    }

    /// Finds the outermost modules with the numbers of all layers. The error is the reason why there are no
    /// such layers.
    pub(super) fn find<'n>(names: impl Iterator<Item = &'n str>, count: usize) -> Result<Layers, String> {
        if count == 0 || count > MOST {
            return Err(format!("config.json specifies {count} layers"));
        }
        let mut numbers: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for name in names {
            let mut begin = 0usize;
            for part in name.split('.') {
                if let (Ok(number), Some(prefix)) = (part.parse::<usize>(), name.get(..begin)) {
                    numbers.entry(prefix).or_default().insert(number);
                }
                begin = begin.saturating_add(part.len()).saturating_add(1);
            }
        }
        let has_all = |found: &BTreeSet<usize>| (0..count).all(|number| found.contains(&number));
        let depth = |prefix: &str| prefix.matches('.').count();
        let complete: Vec<&str> = numbers.iter().filter(|(_, found)| has_all(found)).map(|(prefix, _)| *prefix).collect();
        let least = complete.iter().map(|prefix| depth(prefix)).min();
        match complete.iter().filter(|prefix| Some(depth(prefix)) == least).collect::<Vec<_>>().as_slice() {
            [prefix] => Ok(Layers::new(prefix, count)),
            [] => Err(format!("it has no tensors of {count} numbered layers")),
            [first, second, ..] => Err(format!("it has several stacks of layers: `{first}` and `{second}`")),
        }
    }

    /// The number of the layer of a tensor, and the rest of the name.
    pub(super) fn split<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let (number, rest) = name.strip_prefix(&self.prefix)?.split_once('.')?;
        Some((number.parse().ok()?, rest))
    }

    /// Whether a tensor is part of a model of the first layers only.
    pub(super) fn is_kept(&self, name: &str, first: usize) -> bool {
        self.split(name).is_none_or(|(number, _)| number < first)
    }

    /// The least number of first layers, at least two, that includes all properties of layers. Each property
    /// is that of a layer with this number.
    pub(super) fn first(&self, properties: impl Iterator<Item = (usize, String)>) -> usize {
        let mut layers: BTreeMap<String, usize> = BTreeMap::new();
        for (number, property) in properties.filter(|(number, _)| *number < self.count) {
            layers.entry(property).and_modify(|first| *first = number.min(*first)).or_insert(number);
        }
        layers.into_values().max().map_or(0, |last| last.saturating_add(1)).max(LEAST).min(self.count)
    }

    /// Description of a twin.
    pub(super) fn describe(&self, first: usize) -> String {
        format!("the first {first} of {} layers", self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outermost_numbered_modules_are_layers() {
        let names = |layers: usize| (0..layers).flat_map(|layer| (0..3).map(move |expert| format!("model.layers.{layer}.mlp.experts.{expert}.w1.weight")));
        let find = |names: Vec<String>, count| Layers::find(names.iter().map(String::as_str), count);
        assert_eq!(find(names(3).collect(), 3), Ok(Layers::new("model.layers.", 3)));
        // A layer that predicts further tokens follows the others.
        assert_eq!(find(names(4).collect(), 3), Ok(Layers::new("model.layers.", 3)));
        assert!(find(names(2).collect(), 3).is_err());
        assert!(find(names(4).collect(), 5).is_err_and(|reason| reason.contains("no tensors of 5")));
        let both = ["encoder.block.0.a", "encoder.block.1.a", "decoder.block.0.a", "decoder.block.1.a"].map(str::to_owned).to_vec();
        assert!(find(both, 2).is_err_and(|reason| reason.contains("several stacks")));
        assert!(find(Vec::new(), usize::MAX).is_err());
    }

    #[test]
    fn a_twin_has_a_layer_of_each_kind() {
        let layers = Layers::new("h.", 12);
        let kind = |number: usize| (number, if number >= 3 { "sparse" } else { "dense" }.to_owned());
        assert_eq!(layers.first((0..12).map(kind)), 4);
        assert_eq!(layers.first((0..12).map(|number| (number, String::new()))), 2);
        // Layers after the last one do not count.
        assert_eq!(layers.first([(12, "other".to_owned())].into_iter()), 2);
        assert_eq!(Layers::new("h.", 1).first(std::iter::empty()), 1);
        assert_eq!(layers.split("h.11.mlp.weight"), Some((11, "mlp.weight")));
        assert!(layers.is_kept("head.weight", 2) && layers.is_kept("h.1.a", 2) && !layers.is_kept("h.2.a", 2) && !layers.is_kept("h.12.a", 2));
    }
}
