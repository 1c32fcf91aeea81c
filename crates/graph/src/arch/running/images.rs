//! Images in the texts of a language model: its graph, with the vision tower in front.

use serde_json::{Map, Value, json};

use super::rope::parameters;
use super::{ReadKeys, Settings, family};
use crate::arch::{Tower, model_type, text_values, tower};
use crate::error::{Error, Result};
use crate::ir::ops::{ImageRotary, InsertImages, Op};
use crate::ir::{Builder, Catalog, Dim, Graph, Rewrite, ValueId, rebuild};

/// Prefixes of the names of the tower's weights, in files of transformers 5 and in published ones.
const PREFIXES: [&str; 2] = ["model.visual.", "visual."];
const TOKENS: &str = "input_ids";
const CONFIG: &str = "config.json";

/// The language model with its vision tower, and unknown keys of the tower's configuration. It also reads
/// `pixel_values`: for each text, one image of this height and width. Fails if the tower cannot be run.
pub fn with_images(graph: &Graph, config: &Map<String, Value>, size: [usize; 2], catalog: &dyn Catalog) -> Result<(Graph, Vec<String>)> {
    let Some((tower, vision)) = tower(config) else {
        return Err(Error::Unsupported {
            what: format!("`{}` with images", model_type(config)),
            hint: "leave out `sizes`: the language model runs on texts".into(),
        });
    };
    let mut values = vision.clone();
    values.insert("image_size".to_owned(), json!(size));
    for (key, value) in tower.values {
        values.insert((*key).to_owned(), serde_json::from_str(value).unwrap_or_default());
    }
    let read = ReadKeys::default();
    let vision = Settings::new(&values).recording(&read);
    vision.mark("model_type");
    let text = Settings::new(text_values(config));
    let mut images = Images { tower, vision, text, outer: Settings::new(config), size, catalog, found: None };
    let built = rebuild(graph, catalog, &mut |step| images.edit(step))?;
    if images.found.is_none() {
        return Err(Error::graph(CONFIG, "describes a language model without token embeddings, which images need"));
    }
    let keys = family(tower.model_type).map_or(Ok(Vec::new()), |family| family.keys.check_model(&vision))?;
    Ok((built, keys.into_iter().map(|key| format!("vision_config.{key}")).collect()))
}

struct Images<'c> {
    tower: Tower,
    vision: Settings<'c>,
    text: Settings<'c>,
    outer: Settings<'c>,
    size: [usize; 2],
    catalog: &'c dyn Catalog,
    found: Option<Features>,
}

/// Values of the new graph.
struct Features {
    tokens: ValueId,
    token: i64,
    /// Rows and columns of patches.
    grid: [usize; 2],
    /// Added to the first layers.
    of_layers: Vec<ValueId>,
}

impl Images<'_> {
    fn edit(&mut self, step: Rewrite) -> Result<ValueId> {
        let (Rewrite { builder, node, name, inputs }, found) = (step, self.found.as_ref());
        match (&node.op, found) {
            (Op::Embedding(_), None) if builder.find(TOKENS) == inputs.first().copied() => {
                let embeddings = builder.node(name, node.op.clone(), &inputs)?;
                let (found, image) = self.features(builder, inputs.first().copied().unwrap_or(embeddings))?;
                let insert = InsertImages { token: found.token, add: false };
                let with_images = builder.node(&format!("{name}.with_images"), insert, &[embeddings, found.tokens, image]);
                self.found = Some(found);
                with_images
            }
            (Op::Rotary(rotary), Some(found)) => {
                let parameters = parameters(&self.text)?;
                let key = "mrope_section";
                let sections = match parameters.filter(|p| p.get(key).is_some()) {
                    None => self.tower.sections,
                    Some(p) => sections(&p.numbers(key)?)?,
                };
                let (token, grid, interleaved) = (found.token, found.grid, self.tower.interleaved);
                let op = ImageRotary { rotary: rotary.clone(), sections, interleaved, token, grid };
                builder.node(name, op, &[inputs.as_slice(), &[found.tokens]].concat())
            }
            (op, _) => {
                let value = builder.node(name, op.clone(), &inputs)?;
                let layer = name.strip_prefix("layers.").and_then(|layer| layer.parse::<usize>().ok());
                match found.zip(layer).and_then(|(found, layer)| Some((found, found.of_layers.get(layer)?))) {
                    Some((found, features)) => {
                        let insert = InsertImages { token: found.token, add: true };
                        builder.node(&format!("{name}.with_images"), insert, &[value, found.tokens, *features])
                    }
                    None => Ok(value),
                }
            }
        }
    }

    /// Adds the tower, and returns its features.
    fn features(&self, b: &mut Builder, tokens: ValueId) -> Result<(Features, ValueId)> {
        let stored = |prefix: &&str| self.catalog.shape(&format!("{prefix}patch_embed.proj.weight")).is_some();
        let prefix = PREFIXES.into_iter().find(stored).unwrap_or(PREFIXES[0]);
        let Some(graph) = family(self.tower.model_type).and_then(|family| family.graph) else {
            return Err(Error::graph(CONFIG, format!("the vision tower `{}` has no graph", self.tower.model_type)));
        };
        b.within(prefix, |b| graph(&self.vision, b))?;
        let mut features = b.take_outputs().into_iter().map(|(_, id)| id);
        let Some(image) = features.next() else { return Err(Error::graph(CONFIG, "the vision tower has no output")) };
        let patches = b.ty(image).shape.get(1).and_then(Dim::fixed).unwrap_or(0);
        // Patches are squares.
        let [height, width] = self.size;
        let side = height.saturating_mul(width).checked_div(patches).unwrap_or(0).isqrt();
        let grid = self.size.map(|pixels| pixels.checked_div(side).unwrap_or(0));
        let token = self.outer.token_or("image_token_id", self.tower.image_token)?;
        Ok((Features { tokens, token, grid, of_layers: features.collect() }, image))
    }
}

fn sections(values: &[f64]) -> Result<[usize; 3]> {
    let mut sizes = [0; 3];
    let is_valid = |value: &f64| value.fract() == 0.0 && (0.0..1e6).contains(value);
    if values.len() > sizes.len() || !values.iter().all(is_valid) {
        return Err(Error::graph(CONFIG, format!("`mrope_section` is {values:?}, expected up to three sizes")));
    }
    sizes.iter_mut().zip(values).for_each(|(size, value)| *size = *value as usize);
    Ok(sizes)
}
