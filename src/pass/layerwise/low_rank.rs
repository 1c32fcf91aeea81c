//! Layers that become two: one after another while calibration samples go through the model, or each by itself.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::{Facts, Finished, Layer, Layerwise, Method, Moments, Wanted, require_bytes, require_finite, transposed};
use crate::error::{Error, Result};
use crate::kernel::dense::product;
use crate::kernel::low_rank::LowRank;
use crate::model::Model;
use crate::pass::decompose::{Decompose, Split};
use crate::pass::identity::identity;
use crate::pass::{Context, InputImportance, Pass};
use crate::run_state::{Applied, RunState};
use crate::store::{Origin, Weight};

/// Adds the weights that take the place of others, which stay; gives what the report tells of them.
///
/// # Errors
/// A number is not finite; with samples, as [`Layerwise::run`].
pub(in crate::pass) fn decompose(
    pass: &Decompose,
    splits: &[Split],
    model: &mut Model,
    run: &RunState,
    context: &Context,
    applied: &mut Applied,
) -> Result<Map<String, Value>> {
    let options = pass.options();
    let by_weight: BTreeMap<&str, &Split> = splits.iter().map(|split| (split.weight.as_str(), split)).collect();
    let mut work = Factors { by_weight: &by_weight, value: String::new(), products: Vec::new(), lost: BTreeMap::new(), notes: Vec::new() };
    let mut details = Map::new();
    let aware = pass.importance == InputImportance::Activation;
    let (seen, alone): (Vec<&Split>, Vec<&Split>) = splits.iter().partition(|split| aware && !split.convolution);
    if !seen.is_empty() {
        let targets: BTreeSet<&str> = seen.iter().map(|split| split.weight.as_str()).collect();
        let wanted = Wanted { products: true, ..Wanted::default() };
        let done = Layerwise { name: pass.name(), options: &options, context, targets: &targets, wanted, rescale: None, together: false }
            .run(model, run, &mut work)?;
        details.insert("samples".into(), json!(done.samples));
    }
    if let (true, Some(first)) = (aware, alone.first()) {
        let what = "convolutions are decomposed by their weights alone, without samples";
        applied.notes.push(format!("decompose: {} {what} (the first: `{}`)", alone.len(), first.weight));
    }
    let resumed = work.alone(&alone, (pass, &options), model, run, context)?;
    if resumed > 0 {
        applied.notes.push(format!("{resumed} blocks were finished by an interrupted run"));
    }
    applied.notes.append(&mut work.notes);
    details.insert("lost".into(), json!(work.lost));
    Ok(details)
}

/// Layers that are written at once where they are decomposed by themselves.
const TOGETHER: usize = 8;

struct Factors<'a> {
    by_weight: &'a BTreeMap<&'a str, &'a Split>,
    /// What the next layers read, and the upper triangle of its sums of products.
    value: String,
    products: Vec<f32>,
    /// Of each weight, squared error by squared length.
    lost: BTreeMap<String, f64>,
    notes: Vec<String>,
}

impl Factors<'_> {
    fn of(&self, layer: &str) -> Result<&Split> {
        self.by_weight.get(layer).copied().ok_or_else(|| Error::tensor(layer, "is not to be decomposed", "add it to `ignore`"))
    }

    /// The weights of the two layers that take the place of a matrix `[rows, size]`.
    fn factors(&mut self, weight: &str, values: &[f32], products: Option<&[f32]>) -> Result<Vec<(String, Weight)>> {
        let split = self.of(weight)?.clone();
        let [_, size, rank] = split.sizes;
        let not_finite = || Error::tensor(weight, "or what its layer reads holds numbers too large to be decomposed", "add it to `ignore`");
        let found = LowRank::new(values, size, rank, products).ok_or_else(not_finite)?;
        if found.damping > 0.0 {
            self.notes.push(format!("what layers read from `{}` is dependent: damping {:.0e} for `{weight}`", self.value, found.damping));
        }
        self.lost.insert(weight.to_owned(), found.lost);
        let parts = [(found.inner, size), (found.outer, rank)];
        let mut made = Vec::new();
        for ((name, shape), (values, columns)) in split.parts.iter().zip(&split.shapes).zip(parts) {
            let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
            let values = if split.input_major { transposed(&values, columns) } else { values };
            let made_of = Weight::computed(weight, split.dtype, shape.clone(), &values)?;
            made.push((name.clone(), made_of.of_origin(Origin::Rescaled)));
        }
        Ok(made)
    }

    /// Layers that are decomposed by their weights alone; gives how many an interrupted run had finished.
    fn alone(&mut self, splits: &[&Split], (pass, options): (&Decompose, &Value), model: &mut Model, run: &RunState, context: &Context) -> Result<usize> {
        if splits.is_empty() {
            return Ok(0);
        }
        if let Some(limit) = context.memory.bytes.filter(|_| context.memory.asked) {
            require_bytes(pass.name(), "what decomposes the largest layer takes", splits.iter().map(|split| split.bytes()).max().unwrap_or(0) as u64, limit)?;
        }
        let identity = identity((model, None), run, &model.graph()?, options, None, (context.seed, &context.work))?;
        let folder = context.workplace.as_ref().map(|folder| folder.join(pass.name()));
        let finished = folder.map(|folder| Finished::open(&folder, &identity, context.resume)).transpose()?;
        let mut resumed = 0;
        for (number, splits) in splits.chunks(TOGETHER).enumerate() {
            let changed = match finished.as_ref().map(|finished| finished.take(number, model)).transpose()?.flatten() {
                Some((changed, facts)) => {
                    resumed += 1;
                    self.notes.extend(facts.notes);
                    self.lost.extend(facts.figures);
                    changed
                }
                None => {
                    let mut changed = BTreeMap::new();
                    for split in splits {
                        context.work.cancel.check()?;
                        let values = model.weights.get(&split.weight)?.floats(&split.weight)?;
                        require_finite(&split.weight, &values)?;
                        let values = if split.input_major { transposed(&values, split.sizes[0]) } else { values };
                        changed.extend(self.factors(&split.weight, &values, None)?);
                    }
                    match &finished {
                        Some(finished) => finished.put(
                            number,
                            model,
                            changed,
                            Facts { figures: self.lost.clone(), notes: self.notes.clone(), ..Facts::default() },
                            &context.work,
                        )?,
                        None => changed,
                    }
                }
            };
            model.weights.by_name.extend(changed);
        }
        Ok(resumed)
    }
}

impl Method for Factors<'_> {
    fn check(&self, layer: &Layer, _weight: &Weight) -> Result<()> {
        self.of(&layer.weight).map(|_| ())
    }

    fn bytes(&self, layer: &Layer) -> usize {
        self.of(&layer.weight).map_or(0, Split::bytes)
    }

    fn read(&mut self, value: &str, moments: Moments) -> Result<()> {
        value.clone_into(&mut self.value);
        if moments.count < moments.size {
            self.notes.push(format!(
                "what layers read from `{value}` was seen {} times, which is less than its {} features: use more samples",
                moments.count, moments.size
            ));
        }
        self.products = moments.products;
        Ok(())
    }

    fn change(&mut self, layer: &Layer, _weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let products = std::mem::take(&mut self.products);
        let made = self.factors(&layer.weight, values, Some(&products));
        self.products = products;
        made
    }

    fn values(&self, layer: &Layer, changed: &BTreeMap<String, Weight>) -> Result<Option<Vec<f32>>> {
        let split = self.of(&layer.weight)?;
        let [Some(inner), Some(outer)] = [0, 1].map(|part| changed.get(&split.parts[part])) else { return Ok(None) };
        let wide = |weight: &Weight, name: &str| Ok::<Vec<f64>, Error>(weight.floats(name)?.into_iter().map(f64::from).collect());
        let (inner, outer) = (wide(inner, &split.parts[0])?, wide(outer, &split.parts[1])?);
        let [rows, size, rank] = split.sizes;
        // Stored the other way round, the one that is applied first stands on the left.
        let whole = if split.input_major { product(&inner, &outer, rank, rows) } else { product(&outer, &inner, rank, size) };
        Ok(Some(whole.into_iter().map(|x| x as f32).collect()))
    }
    fn notes(&mut self) -> &mut Vec<String> {
        &mut self.notes
    }

    fn figures(&mut self) -> Option<&mut BTreeMap<String, f64>> {
        Some(&mut self.lost)
    }
}
