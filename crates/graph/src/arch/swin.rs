//! Swin: attention in windows that are shifted in every other layer, with patch merging between stages
//! (Liu et al., 2021).

use super::{Family, Keys, VISION_TRANSFORMER, classifier};

pub(super) const SWIN: Family = Family {
    model_type: "swin",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "_out_features",
            "_out_indices",
            "attention_probs_dropout_prob",
            "drop_path_rate",
            "encoder_stride",
            "hidden_dropout_prob",
            // The sizes of the last stage, derived from other keys.
            "hidden_size",
            "num_layers",
            "out_features",
            "out_indices",
            "path_norm",
            "stage_names",
        ],
        neutral: &[("num_attention_heads", "null"), ("num_hidden_layers", "null")],
    },
    classifier: classifier("SwinForImageClassification", "swin.", &["classifier"]),
    renames: &[
        ("attention.self.query", "attention.q_proj"),
        ("attention.self.key", "attention.k_proj"),
        ("attention.self.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
    ],
    ..VISION_TRANSFORMER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{image_input, layer_norm, linear, linear_with, split_heads};
    use crate::arch::vit::running::{self as vit, PATCH_NODES, patch_embeddings, patches};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, Attention, Concat, MergeHeads, Pad, Reduce, ReduceKind, Reshape, Slice, TargetSize, Transpose, WindowBias};
    use crate::ir::{Builder, Dim, ValueId};

    const NAMES: Names = Names { attention: "attention.self", ..vit::NAMES };

    /// Default epsilon of normalizations.
    const EPSILON: f64 = 1e-5;

    /// The batch size.
    const BATCH: TargetSize = TargetSize::Copy(0);

    /// Attention in windows.
    #[derive(Clone, Copy)]
    struct Windows {
        /// Rows and columns of patches.
        grid: [usize; 2],
        /// The same, rounded up to complete windows.
        padded: [usize; 2],
        /// Side length of a window in patches.
        window: usize,
        /// Cyclic shift in patches.
        shift: usize,
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("swin.embeddings.norm.weight") { "swin." } else { "" };
        let mut width = s.size_or("embed_dim", 96)?;
        let (image, patch, side) = patches(s, (224, 4))?;
        if !image.is_multiple_of(patch) {
            let reason = format!("`image_size` {image} would be padded to a multiple of `patch_size` {patch}, which is not supported");
            return Err(Error::graph("config.json", reason));
        }
        let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::Fixed(image), Dim::Fixed(image))?;
        let patches = patch_embeddings(b, PATCH_NODES, &format!("{prefix}embeddings.patch_embeddings.projection"), (width, patch), true, pixels)?;
        let mut x = layer_norm(b, "embeddings.norm", &format!("{prefix}embeddings.norm"), patches, EPSILON)?;
        if s.flag_or("use_absolute_embeddings", false)? {
            let positions = b.param(&format!("{prefix}embeddings.position_embeddings"), &[1, side.saturating_mul(side), width])?;
            x = b.node("embeddings", Add {}, &[x, positions])?;
        }
        let (depths, heads) = (s.sizes_or("depths", &[2, 2, 6, 2])?, s.sizes_or("num_heads", &[3, 6, 12, 24])?);
        if heads.len() < depths.len() {
            return Err(Error::graph("config.json", format!("`num_heads` has {} stages, but `depths` has {}", heads.len(), depths.len())));
        }
        let (epsilon, mut grid) = (s.number_or("layer_norm_eps", EPSILON)?, [side; 2]);
        for (stage, (depth, heads)) in depths.iter().zip(heads).enumerate() {
            let name = format!("encoder.layers.{stage}");
            let head_dim = width.checked_div(heads).filter(|_| width.is_multiple_of(heads));
            let head_dim =
                head_dim.ok_or_else(|| Error::graph("config.json", format!("`num_heads`: {heads} do not divide the width {width} of stage {stage}")))?;
            let block = Block {
                names: &NAMES,
                norms: NormPosition::Before,
                epsilon,
                head_dim,
                attention: Attention::default(),
                extras: &[],
                qkv_bias: Some(s.flag_or("qkv_bias", true)?),
                cross: None,
                neurons: (s.number_or("mlp_ratio", 4.0)? * width as f64) as usize,
                activation: Some(s.text_or("hidden_act", "gelu")?),
            };
            for index in 0..*depth {
                let windows = Windows::new(s.size_or("window_size", 7)?, grid, !index.is_multiple_of(2))?;
                x = windows.layer(b, &block, prefix, &format!("{name}.blocks.{index}"), x)?;
            }
            if stage.saturating_add(1) < depths.len() {
                (x, grid) = merge(b, prefix, &format!("{name}.downsample"), (x, grid))?;
                width = width.saturating_mul(2);
            }
        }
        let x = layer_norm(b, "layernorm", &format!("{prefix}layernorm"), x, epsilon)?;
        b.output("last_hidden_state", x);
        let pooled = b.node("pooler", Reduce { kind: ReduceKind::Mean, axes: vec![1], keep_dims: false }, &[x])?;
        if s.class() == "SwinForImageClassification" {
            let logits = linear(b, "classifier", "classifier", pooled, s.labels()?)?;
            b.output("logits", logits);
        } else {
            b.output("pooler_output", pooled);
        }
        Ok(())
    }

    /// Reshapes patches `[batch, patches, width]` to rows and columns, padded with zeros at the end.
    fn image_grid(b: &mut Builder, node: &str, x: ValueId, grid: [usize; 2], padded: [usize; 2]) -> Result<ValueId> {
        let shape = [BATCH].into_iter().chain(grid.map(TargetSize::Number)).chain([TargetSize::Copy(2)]);
        let x = b.node(&format!("{node}.picture"), Reshape { shape: shape.collect() }, &[x])?;
        if padded == grid {
            return Ok(x);
        }
        let [below, right] = [0, 1].map(|axis| end_padding(grid, padded, axis));
        b.node(&format!("{node}.padded"), Pad { pads: vec![0, 0, 0, 0, 0, below, right, 0], ..Pad::default() }, &[x])
    }

    /// Padding of an axis of the grid.
    fn end_padding(grid: [usize; 2], padded: [usize; 2], axis: usize) -> i64 {
        let size = |of: [usize; 2]| of.get(axis).and_then(|size| i64::try_from(*size).ok()).unwrap_or(0);
        size(padded).saturating_sub(size(grid))
    }

    /// Patch merging: concatenates the features of 2 x 2 patches in column-major order and projects them to
    /// twice the original width.
    fn merge(b: &mut Builder, prefix: &str, node: &str, (x, grid): (ValueId, [usize; 2])) -> Result<(ValueId, [usize; 2])> {
        let width = b.width(x)?;
        let halves = grid.map(|size| size.div_ceil(2));
        let x = image_grid(b, node, x, grid, halves.map(|half| half.saturating_mul(2)))?;
        let [rows, columns] = halves.map(TargetSize::Number);
        let two = TargetSize::Number(2);
        let x = b.node(&format!("{node}.halves"), Reshape { shape: vec![BATCH, rows, two, columns, two, TargetSize::Copy(3)] }, &[x])?;
        let x = b.node(&format!("{node}.beside"), Transpose { perm: vec![0, 1, 3, 4, 2, 5] }, &[x])?;
        let [rows, columns] = halves;
        let shape = vec![BATCH, TargetSize::Number(rows.saturating_mul(columns)), TargetSize::Rest];
        let x = b.node(&format!("{node}.merged"), Reshape { shape }, &[x])?;
        let x = layer_norm(b, &format!("{node}.norm"), &format!("{prefix}{node}.norm"), x, EPSILON)?;
        let x = linear_with(b, &format!("{node}.reduction"), &format!("{prefix}{node}.reduction"), x, width.saturating_mul(2), false)?;
        Ok((x, halves))
    }

    impl Windows {
        /// The windows of a layer. If `moved`, they are shifted by half their side, unless a window covers an
        /// entire side of the image.
        fn new(window: usize, grid: [usize; 2], moved: bool) -> Result<Windows> {
            let least = grid.into_iter().min().unwrap_or(0);
            if least < window {
                return Err(Error::graph("config.json", format!("`window_size` {window} is larger than a stage with a side of {least} patches")));
            }
            let padded = grid.map(|size| size.checked_next_multiple_of(window).unwrap_or(size));
            Ok(Windows { grid, padded, window, shift: if moved && least > window { window / 2 } else { 0 } })
        }

        fn layer(&self, b: &mut Builder, block: &Block, prefix: &str, node: &str, x: ValueId) -> Result<ValueId> {
            let module = format!("{prefix}{node}");
            block.with_attention(b, (node, &module), x, |b, x| {
                let x = self.cut(b, node, x)?;
                let qkv = block.qkv(b, (node, &module), [x; 3])?;
                let context = self.attend(b, block, (node, &module), qkv)?;
                let x = block.out(b, (node, &module), context)?;
                self.join(b, node, x)
            })
        }

        /// Rows and columns of windows.
        fn counts(&self) -> [usize; 2] {
            self.padded.map(|size| size.checked_div(self.window).unwrap_or(0))
        }

        /// Splits the patches of an image into windows, `[batch, patches, width]`.
        fn cut(&self, b: &mut Builder, node: &str, x: ValueId) -> Result<ValueId> {
            let node = format!("{node}.windows");
            let x = image_grid(b, &node, x, self.grid, self.padded)?;
            let x = self.rolled(b, &node, x, false)?;
            let ([rows, columns], side) = (self.counts().map(TargetSize::Number), TargetSize::Number(self.window));
            let x = b.node(&format!("{node}.split"), Reshape { shape: vec![BATCH, rows, side, columns, side, TargetSize::Copy(3)] }, &[x])?;
            self.swap_windows(b, &node, x, vec![BATCH, self.places(), TargetSize::Copy(5)])
        }

        /// The inverse of [`cut`](Self::cut).
        fn join(&self, b: &mut Builder, node: &str, x: ValueId) -> Result<ValueId> {
            let node = format!("{node}.joined");
            let ([rows, columns], side) = (self.counts().map(TargetSize::Number), TargetSize::Number(self.window));
            let x = b.node(&format!("{node}.split"), Reshape { shape: vec![BATCH, rows, columns, side, side, TargetSize::Copy(2)] }, &[x])?;
            let [height, wide] = self.padded.map(TargetSize::Number);
            let x = self.swap_windows(b, &node, x, vec![BATCH, height, wide, TargetSize::Copy(5)])?;
            let mut x = self.rolled(b, &node, x, true)?;
            if self.padded != self.grid {
                let [below, right] = [0, 1].map(|axis| end_padding(self.grid, self.padded, axis).saturating_neg());
                x = b.node(&format!("{node}.inside"), Pad { pads: vec![0, 0, 0, 0, 0, below, right, 0], ..Pad::default() }, &[x])?;
            }
            let [height, wide] = self.grid;
            let places = TargetSize::Number(height.saturating_mul(wide));
            b.node(&format!("{node}.places"), Reshape { shape: vec![BATCH, places, TargetSize::Copy(3)] }, &[x])
        }

        /// Converts between the row-major order of patches and the order of windows.
        fn swap_windows(&self, b: &mut Builder, node: &str, x: ValueId, shape: Vec<TargetSize>) -> Result<ValueId> {
            let x = b.node(&format!("{node}.turned"), Transpose { perm: vec![0, 1, 3, 2, 4, 5] }, &[x])?;
            b.node(&format!("{node}.whole"), Reshape { shape }, &[x])
        }

        fn places(&self) -> TargetSize {
            let [height, wide] = self.padded;
            TargetSize::Number(height.saturating_mul(wide))
        }

        /// Cyclically shifts rows and columns, or shifts them back.
        fn rolled(&self, b: &mut Builder, node: &str, mut x: ValueId, back: bool) -> Result<ValueId> {
            if self.shift == 0 {
                return Ok(x);
            }
            for (axis, (size, name)) in (1i64..).zip(self.padded.into_iter().zip(["rows", "columns"])) {
                let first = if back { size.saturating_sub(self.shift) } else { self.shift };
                let start = i64::try_from(first).unwrap_or(i64::MAX);
                let parts = [
                    ("last", Slice { start, length: Some(size.saturating_sub(first)), axis, ..Slice::default() }),
                    ("first", Slice { length: Some(first), axis, ..Slice::default() }),
                ];
                let mut halves = Vec::with_capacity(2);
                for (part, slice) in parts {
                    halves.push(b.node(&format!("{node}.{part}_{name}"), slice, &[x])?);
                }
                x = b.node(&format!("{node}.{name}"), Concat { axis }, &halves)?;
            }
            Ok(x)
        }

        /// Attention in which each window of each head is a separate head.
        fn attend(&self, b: &mut Builder, block: &Block, (node, module): (&str, &str), qkv: [ValueId; 3]) -> Result<ValueId> {
            let (width, node) = (b.width(qkv[0])?, format!("{node}.{}", NAMES.attention));
            let [rows, columns] = self.counts();
            let (windows, places) = (rows.saturating_mul(columns), self.window.saturating_mul(self.window));
            let heads = width.checked_div(block.head_dim).unwrap_or(0);
            let [windowed, inside] = [windows, places].map(TargetSize::Number);
            let apart = vec![BATCH, TargetSize::Copy(1), windowed, inside, TargetSize::Copy(3)];
            let mut inputs = Vec::with_capacity(4);
            for (part, x) in ["query", "key", "value"].into_iter().zip(split_heads(b, &node, qkv, block.head_dim)?) {
                let x = b.node(&format!("{node}.{part}_windows"), Reshape { shape: apart.clone() }, &[x])?;
                let shape = vec![BATCH, TargetSize::Rest, inside, TargetSize::Copy(4)];
                inputs.push(b.node(&format!("{node}.{part}_all"), Reshape { shape }, &[x])?);
            }
            let side = self.window.saturating_mul(2).saturating_sub(1);
            let table = b.param(&format!("{module}.{}.relative_position_bias_table", NAMES.attention), &[side.saturating_mul(side), heads])?;
            let bias = WindowBias { window: self.window, windows: [rows, columns], shift: self.shift };
            inputs.push(b.node(&format!("{node}.bias"), bias, &[table])?);
            let x = b.node(&format!("{node}.context_all"), Attention { scale: 1.0 / (block.head_dim as f64).sqrt(), ..Attention::default() }, &inputs)?;
            let shape = vec![BATCH, TargetSize::Rest, windowed, inside, TargetSize::Copy(3)];
            let x = b.node(&format!("{node}.context_windows"), Reshape { shape }, &[x])?;
            let x = b.node(&format!("{node}.context_heads"), Reshape { shape: vec![BATCH, TargetSize::Copy(1), self.places(), TargetSize::Copy(4)] }, &[x])?;
            b.node(&format!("{node}.context"), MergeHeads {}, &[x])
        }
    }
}
