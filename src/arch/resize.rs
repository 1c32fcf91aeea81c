//! What `config.json` says of widths, after they have changed: read off the shapes of tensors.

use serde_json::{Map, Value, json};

use super::{Settings, family};

/// Looks up the shape of a tensor.
pub type Shapes<'s> = &'s dyn Fn(&str) -> Option<Vec<usize>>;

fn sizes(model_type: &str) -> Option<&'static Sizes> {
    family(model_type)?.sizes
}

/// Whether `config.json` of a family can only say one width for all layers.
pub fn one_width(model_type: &str) -> bool {
    sizes(model_type).is_some()
}

/// Whether heads of a family are as wide as the residual stream divided by their number.
pub fn heads_fill_the_stream(model_type: &str) -> bool {
    sizes(model_type).is_some_and(|sizes| sizes.head_dim.is_none())
}

/// The key of a family that says how many layers there are.
pub fn layers_key(model_type: &str) -> Option<&'static str> {
    sizes(model_type).map(|sizes| sizes.layers)
}

/// An axis of a tensor, by its number.
pub type Axis = (String, usize);

/// The tensor that tells the width of the residual stream, and those that the graph does not read and that are as wide.
pub fn beside_the_stream(model_type: &str, shapes: Shapes) -> Option<(Axis, Vec<Axis>)> {
    let sizes = sizes(model_type)?;
    let of = |(name, axis): (&str, usize)| {
        let (name, shape) = sizes.stored(name, shapes)?;
        Some((*shape.get(axis)?, (name, axis)))
    };
    let (width, stream) = of((sizes.hidden.1, sizes.hidden.2))?;
    Some((stream, sizes.beside.iter().filter_map(|axis| of(*axis)).filter(|(size, _)| *size == width).map(|(_, axis)| axis).collect()))
}

/// Why transformers does not open a configuration of these heads, if so.
pub fn refused_heads(config: &Map<String, Value>) -> Option<String> {
    let settings = Settings::new(config);
    let sizes = sizes(settings.text("model_type").ok()?).filter(|sizes| sizes.heads_divide)?;
    let (width, heads) = (settings.size(sizes.hidden.0).ok()?, settings.size(sizes.heads.0).ok()?);
    (!width.is_multiple_of(heads)).then(|| {
        format!("transformers refuses `{}` {heads}, which does not divide `{}` {width}: choose an amount that leaves a divisor", sizes.heads.0, sizes.hidden.0)
    })
}

/// Names of keys, and of the tensors and their axes that tell their values.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// What may stand before the names of tensors.
    pub(super) prefixes: &'static [&'static str],
    /// Width of the residual stream.
    pub(super) hidden: (&'static str, &'static str, usize),
    /// Heads; the axis holds the widths of all of them.
    pub(super) heads: (&'static str, &'static str, usize),
    /// Heads that another key says, of a decoder behind an encoder.
    pub(super) more_heads: Option<(&'static str, &'static str, usize)>,
    /// Key heads, of a matrix that holds them alone, or behind the query heads twice: keys and values.
    pub(super) groups: Option<(&'static str, &'static str, Groups)>,
    /// Width of a head, where it need not be that of the stream divided by their number.
    pub(super) head_dim: Option<&'static str>,
    /// Whether it is another one where nothing is said.
    pub(super) own_head_dim: bool,
    /// Whether transformers takes only a number of heads that divides the stream, however wide heads are.
    pub(super) heads_divide: bool,
    /// Neurons of a layer, and other widths.
    pub(super) others: &'static [(&'static str, &'static str, usize)],
    /// How many layers there are.
    pub(super) layers: &'static str,
    /// Tensors that the graph does not read, each with the axis that is as wide as the residual stream.
    pub(super) beside: &'static [(&'static str, usize)],
}

/// What a matrix holds beside keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Groups {
    /// Nothing.
    Alone,
    /// Queries and values.
    Fused,
}

/// Values of `config.json` that describe tensors of these shapes, as far as that can be said; `head_dim` is the width of a head.
pub fn resized(config: &Map<String, Value>, head_dim: Option<usize>, shapes: Shapes) -> Vec<(&'static str, Value)> {
    let settings = Settings::new(config);
    let model_type = settings.text_or("model_type", "").unwrap_or("");
    if let Some(sizes) = sizes(model_type) {
        return sizes.resized(&settings, head_dim, shapes);
    }
    match model_type {
        "resnet" => resnet(&settings, shapes),
        _ => Vec::new(),
    }
}

impl Sizes {
    /// A tensor's name in the checkpoint, and its shape.
    fn stored(&self, name: &str, shapes: Shapes) -> Option<(String, Vec<usize>)> {
        self.prefixes.iter().map(|prefix| format!("{prefix}{name}")).find_map(|name| shapes(&name).map(|shape| (name, shape)))
    }

    fn resized(&self, settings: &Settings, head_dim: Option<usize>, shapes: Shapes) -> Vec<(&'static str, Value)> {
        let shape = |name: &str| self.stored(name, shapes).map(|(_, shape)| shape);
        // Not every layer has every part.
        let layers = settings.size(self.layers).unwrap_or(1);
        let first = |name: &str| shape(name).or_else(|| (1..layers).find_map(|layer| shape(&name.replacen("layers.0.", &format!("layers.{layer}."), 1))));
        let size = |name: &str, axis: usize| first(name)?.get(axis).copied();
        let mut found = Vec::new();
        let mut say = |key: &'static str, value: Option<usize>| {
            if let Some(value) = value
                && settings.get(key).and_then(Value::as_u64) != Some(value as u64)
            {
                found.push((key, json!(value)));
            }
        };
        say(self.hidden.0, size(self.hidden.1, self.hidden.2));
        for (key, name, axis) in self.others {
            say(key, size(name, *axis));
        }
        if let Some(width) = head_dim.filter(|width| *width > 0) {
            let heads = size(self.heads.1, self.heads.2).and_then(|wide| wide.checked_div(width));
            let groups = self.groups.and_then(|(key, name, held)| {
                let all = size(name, 0)?.checked_div(width)?;
                Some((key, if held == Groups::Fused { all.checked_sub(heads?)?.checked_div(2)? } else { all }))
            });
            say(self.heads.0, heads);
            if let Some((key, name, axis)) = self.more_heads {
                say(key, size(name, axis).and_then(|wide| wide.checked_div(width)));
            }
            // By default there are as many as heads.
            if let Some((key, count)) = groups.filter(|(key, count)| settings.get(key).is_some() || Some(*count) != heads) {
                say(key, Some(count));
            }
            let follows = size(self.hidden.1, self.hidden.2).zip(heads).is_some_and(|(hidden, heads)| heads.checked_mul(width) == Some(hidden));
            if let Some(key) = self.head_dim.filter(|key| settings.get(key).is_some() || !follows || self.own_head_dim) {
                say(key, Some(width));
            }
        }
        found
    }
}

fn resnet(settings: &Settings, shapes: Shapes) -> Vec<(&'static str, Value)> {
    let rows =
        |module: &str| ["resnet.", ""].iter().find_map(|prefix| shapes(&format!("{prefix}{module}.convolution.weight"))).and_then(|s| s.first().copied());
    let last = if settings.text_or("layer_type", "bottleneck").is_ok_and(|kind| kind == "basic") { 1 } else { 2 };
    let stages = settings.sizes("depths").map_or(0, |depths| depths.len());
    let hidden: Option<Vec<usize>> = (0..stages).map(|stage| rows(&format!("encoder.stages.{stage}.layers.0.layer.{last}"))).collect();
    let mut found = Vec::new();
    if let Some(width) = rows("embedder.embedder") {
        found.push(("embedding_size", json!(width)));
    }
    if let Some(hidden) = hidden {
        found.push(("hidden_sizes", json!(hidden)));
    }
    found.retain(|(key, value)| settings.get(key) != Some(value));
    found
}
