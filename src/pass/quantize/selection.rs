//! Selection of the weights to quantize, and of their encodings.

use std::collections::{BTreeMap, BTreeSet};

use super::rules::{SchemeLayout, USUAL_GROUPS};
use super::{NAME, Quantize};
use crate::error::{Error, Result, counted};
use crate::model::{self, Model};
use crate::pass::layerwise;
use crate::pass::targets::{self, SelectedWeights, is_expert};
use crate::run_state::WARNING;
use crate::store::{ActivationScheme, Codes, FloatFormat, Granularity, QuantizationSpec, Weight, Weights};

/// Maximum number of row lengths in an error message.
const MOST_LENGTHS: usize = 4;

/// Selected weights and their encodings.
pub(in crate::pass) struct Layers {
    /// Encoding of each selected weight.
    pub encodings: BTreeMap<String, QuantizationSpec>,
    /// Description of the selection for reports.
    pub rule: String,
    /// Notes on deviations from the scheme.
    pub notes: Vec<String>,
}

impl Quantize {
    /// Like [`layers`](Quantize::layers), without layers that the method does not support.
    pub(super) fn supported_layers(&self, model: &Model) -> Result<Layers> {
        let mut layers = self.layers(&model.weights)?;
        if let (true, Some(scheme)) = (model.onnx.is_some(), self.schemes().find(|scheme| scheme.stores_scales())) {
            let reason =
                format!("{} has static activation scales, which an .onnx file cannot store: use FP8-DYNAMIC or W8A8, or `quantize-static`", scheme.name());
            return Err(Error::option(format!("{NAME}: scheme"), reason));
        }
        if self.method.reads_samples() {
            let selected: Vec<String> = layers.encodings.keys().cloned().collect();
            let mut names: BTreeSet<&str> = selected.iter().map(String::as_str).collect();
            layers.notes.extend(layerwise::retain_supported(NAME, model, &mut names, &self.targets)?);
            layers.encodings.retain(|name, _| names.contains(name.as_str()));
        }
        layers.notes.extend(targets::requantized(NAME, &model.weights, layers.encodings.keys().map(String::as_str)));
        let rules = self.rules.iter().map(|rule| rule.targets.as_slice());
        layers.notes.extend(targets::unused_rules(NAME, rules, layers.encodings.keys().map(String::as_str)));
        Ok(layers)
    }

    /// The weights that `targets` and `ignore` select.
    pub(super) fn selected<'w>(&self, weights: &'w Weights) -> Result<SelectedWeights<'w>> {
        targets::select_weights(NAME, weights, &self.targets, &self.ignore, model::LINEAR_RULE, model::is_linear)
    }

    /// Selects weights and chooses their encodings. All experts have the same group size, because
    /// runtimes require it within a layer.
    pub(in crate::pass) fn layers(&self, weights: &Weights) -> Result<Layers> {
        let SelectedWeights { names, rule, notes } = self.selected(weights)?;
        targets::check_rules(NAME, self.rules.iter().map(|rule| rule.targets.as_slice()), weights, &names)?;
        let notes = targets::unquantized_convolutions(NAME, weights, &self.targets).into_iter().chain(notes).collect();
        let mut layers = Layers { encodings: BTreeMap::new(), rule, notes };
        let mut chosen: Vec<(&str, &Weight, SchemeLayout)> = Vec::with_capacity(names.len());
        for name in names {
            let weight = weights.get(name)?;
            targets::require_matrix(NAME, name, weight)?;
            chosen.push((name, weight, self.layout_of(name)));
        }
        let of_experts = |layout: SchemeLayout| {
            let experts = chosen.iter().filter(|(name, _, other)| *other == layout && is_expert(name));
            (layout, layout.granularity(&experts.map(|(_, weight, _)| weight.row()).collect::<Vec<_>>()))
        };
        let of_experts: Vec<(SchemeLayout, Option<Granularity>)> = self.layouts().map(of_experts).collect();
        // By scheme: weights that it cannot encode, and those with another group size.
        let (mut unsupported, mut narrow) = (BTreeMap::<&str, Vec<&str>>::new(), BTreeMap::<&str, Vec<&str>>::new());
        let mut other: BTreeMap<(usize, Granularity), Vec<&str>> = BTreeMap::new();
        for (name, weight, layout) in &chosen {
            let (name, layout) = (*name, *layout);
            let granularity = match is_expert(name) {
                true => of_experts.iter().find(|(other, _)| *other == layout).and_then(|(_, granularity)| *granularity),
                false => layout.granularity(&[weight.row()]),
            };
            let Some(granularity) = granularity else {
                unsupported.entry(layout.scheme.name()).or_default().push(name);
                continue;
            };
            if layout.scheme.is_fallback(granularity) {
                narrow.entry(layout.scheme.name()).or_default().push(name);
            } else if let Some(size) = layout.group().filter(|size| granularity != Granularity::Group(*size)) {
                other.entry((size, granularity)).or_default().push(name);
            }
            let mut affine = layout.scheme.affine(weight, granularity);
            if model::is_embedding(name, weight) {
                if let Some(row) = affine.codes.float().map(FloatFormat::row).filter(|row| !row.embeddings) {
                    let reason = format!(
                        "`{name}` is an embedding table, and runtimes do not support {} embeddings: add it to `ignore`, or use an integer scheme",
                        row.label
                    );
                    return Err(Error::option(format!("{NAME}: targets"), reason));
                }
                // The inputs of an embedding are indices.
                affine.activations = ActivationScheme::None;
            }
            layers.encodings.insert(name.to_owned(), affine);
        }
        let rows: BTreeSet<usize> = chosen.iter().filter(|(.., layout)| *layout == self.layout()).map(|(_, weight, _)| weight.row()).collect();
        self.require_used_group_size(&rows, &layers.encodings)?;
        layers.notes.extend(other.into_iter().map(|((size, granularity), names)| {
            let by = if let Granularity::Group(size) = granularity { format!("groups of {size}") } else { "one scale per row".into() };
            // Rows that are shorter than a group have one scale anyway.
            let has_groups = |name: &&str| weights.by_name.get(*name).is_some_and(|weight| weight.row() > size);
            let is_coarse = granularity == Granularity::Channel && names.iter().any(has_groups);
            let warning = if is_coarse { WARNING } else { "" };
            format!(
                "{warning}quantize: the rows of {} are not multiples of the group size {size}; they have {by} (the first: `{}`)",
                counted(names.len(), "weight"),
                names[0]
            )
        }));
        for (by_scheme, what) in [(unsupported, "the group size of the scheme; they are left unchanged"), (narrow, "128; they have one scale per row")] {
            layers.notes.extend(by_scheme.into_iter().map(|(scheme, names)| {
                format!("quantize {scheme}: the rows of {} are not multiples of {what} (the first: `{}`)", counted(names.len(), "weight"), names[0])
            }));
        }
        if layers.encodings.is_empty() {
            return Err(Error::option(NAME, format!("{} cannot encode any of the selected weights ({})", self.scheme.name(), layers.rule)));
        }
        Ok(layers)
    }

    /// The largest usual group size that divides all rows, if the default one divides only some of them and
    /// only transformers loads the weights, which must then have groups of one size.
    pub(super) fn common_group_size(&self, model: &Model) -> Option<i64> {
        // Selecting the weights would be in vain for most schemes.
        if !self.rules.is_empty() || !matches!(self.scheme.codes(), Codes::Integer(2 | 3)) {
            return None;
        }
        let encodings = self.layers(&model.weights).ok()?.encodings;
        let granularities: BTreeSet<Granularity> = encodings.values().map(|spec| spec.granularity).collect();
        if granularities.len() < 2 || encodings.values().any(|spec| spec.symmetric) {
            return None;
        }
        let rows = || encodings.keys().filter_map(|name| model.weights.by_name.get(name)).map(Weight::row);
        USUAL_GROUPS.into_iter().find(|size| rows().all(|row| row.is_multiple_of(*size))).map(|size| size as i64)
    }

    /// Checks that a weight has the requested group size, unless it is one of the usual ones, of which the
    /// largest that fits is chosen. `rows`: lengths of the rows to which it applies.
    fn require_used_group_size(&self, rows: &BTreeSet<usize>, encodings: &BTreeMap<String, QuantizationSpec>) -> Result<()> {
        // Reports also record the default size of the scheme.
        let default = self.scheme.group().map(|size| size as i64);
        if rows.is_empty() && self.group_size.is_some_and(|size| Some(size) != default) {
            let reason = "has no effect, because `rules` assign a scheme to every selected weight: \
                          remove it, or set the group size in the rules, as in `PATTERN=W4A16:32`";
            return Err(Error::option(format!("{NAME}: group_size"), reason));
        }
        let Some(size) = self.layout().group().filter(|size| !USUAL_GROUPS.contains(size)) else { return Ok(()) };
        if rows.is_empty() || encodings.values().any(|affine| affine.granularity == Granularity::Group(size)) {
            return Ok(());
        }
        let lengths: Vec<String> = rows.iter().take(MOST_LENGTHS).map(usize::to_string).collect();
        let more = if rows.len() > MOST_LENGTHS { ", …" } else { "" };
        let reason = format!(
            "the group size {size} divides no row: the rows have lengths of {}{more}; use a divisor of these, 32, 64 or 128, or -1 for one scale per row",
            lengths.join(", ")
        );
        Err(Error::option(format!("{NAME}: group_size"), reason))
    }
}
