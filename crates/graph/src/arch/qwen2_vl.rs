//! Vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: vision transformers with rotary position embeddings of
//! rows and columns, whose neighboring patches are merged for the language model (Wang et al., 2024; Bai et
//! al., 2025). Qwen3-VL adds learned positions, and merges the patches after some layers too (Meng et al.,
//! 2024, DeepStack).
//!
//! Images have the fixed size `image_size`, which transformers does not read: it computes the grid of patches
//! from each image. Patches are in the order of transformers, in which those to be merged are adjacent.

use super::{Family, Keys, VISION_TRANSFORMER};

const NEUTRAL: &[(&str, &str)] = &[("head_dim", "null"), ("is_causal", "null"), ("num_attention_heads", "null"), ("num_hidden_layers", "null")];

pub(super) const QWEN2_VL_VISION: Family = Family {
    model_type: "qwen2_vl_vision",
    graph: graph!(running::build_2),
    // The harmless keys are those of published files that transformers does not read.
    keys: Keys { harmless: &["in_chans", "spatial_patch_size"], neutral: NEUTRAL },
    fused: &[],
    embeddings: &["patch_embed"],
    ..VISION_TRANSFORMER
};

pub(super) const QWEN2_5_VL_VISION: Family = Family {
    model_type: "qwen2_5_vl_vision",
    graph: graph!(running::build_2_5),
    keys: Keys { harmless: &["in_chans", "spatial_patch_size", "tokens_per_second"], neutral: NEUTRAL },
    fused: &[&["gate_proj", "up_proj"]],
    ..QWEN2_VL_VISION
};

pub(super) const QWEN3_VL_VISION: Family = Family {
    model_type: "qwen3_vl_vision",
    graph: graph!(running::build_3),
    keys: Keys { harmless: &[], neutral: NEUTRAL },
    embeddings: &["patch_embed", "pos_embed"],
    ..QWEN2_VL_VISION
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{activate, image_input, layer_norm, linear_with, rms_norm, slices, split_heads};
    use crate::arch::running::rope::parameters;
    use crate::error::{Error, Result};
    use crate::ir::ops::{
        Add, Attention, Concat, Conv, Coordinates, Extent, Gelu, GridRotary, Interpolation, MergeHeads, Mul, Reshape, Resize, RmsNorm, TargetSize, Transpose,
    };
    use crate::ir::{Builder, Dim, ValueId};

    const NAMES: Names = Names {
        attention: "attn",
        // One projection.
        qkv: ["", "", ""],
        out: "attn.proj",
        attended: "attended",
        norms: ["norm1", "norm2"],
        network: ["mlp.fc1", "mlp.act", "mlp.fc2"],
        sum: "",
        scales: None,
    };
    const NAMES_3: Names = Names { network: ["mlp.linear_fc1", "mlp.act_fn", "mlp.linear_fc2"], ..NAMES };
    /// Parts of the network that merges patches.
    const MERGER: [&str; 3] = ["mlp.0", "mlp.1", "mlp.2"];
    const MERGER_3: [&str; 3] = ["linear_fc1", "act_fn", "linear_fc2"];
    const EPSILON: f64 = 1e-6;
    /// Key of the layers after which patches are merged too.
    const DEEP: &str = "deepstack_visual_indexes";
    /// Maximum number of frames of a patch.
    const MAX_FRAMES: usize = 64;
    /// The batch size.
    const BATCH: TargetSize = TargetSize::Copy(0);

    /// The patches of an image, and attention over them.
    #[derive(Clone, Copy)]
    struct Patches {
        /// Side length of a patch in pixels.
        side: usize,
        /// Number of frames; a still image is repeated.
        frames: usize,
        /// Rows and columns.
        grid: [usize; 2],
        /// Side length of the square of patches that are merged.
        merge: usize,
        /// Width of a head.
        head_dim: usize,
        rotary: GridRotary,
    }

    pub fn build_2(s: &Settings, b: &mut Builder) -> Result<()> {
        let s = &s.with_sizes(&[("embed_dim", 1280), ("num_heads", 16), ("depth", 32), ("patch_size", 14)]);
        let width = s.size("embed_dim")?;
        let (patches, pixels) = Patches::new(s, b, "embed_dim")?;
        let mut x = patches.embed(b, pixels, width, None)?;
        let block = Block {
            names: &NAMES,
            norms: NormPosition::Before,
            epsilon: EPSILON,
            head_dim: patches.head_dim,
            attention: Attention::default(),
            extras: &[],
            qkv_bias: Some(true),
            cross: None,
            neurons: (width as f64 * s.number_or("mlp_ratio", 4.0)?) as usize,
            activation: Some(s.text_or("hidden_act", "quick_gelu")?),
        };
        for index in 0..s.size("depth")? {
            let name = format!("blocks.{index}");
            x = block.with_attention(b, (&name, &name), x, |b, x| patches.attend(b, &name, None, x))?;
        }
        let x = layer_norm(b, "merger.ln_q", "merger.ln_q", x, EPSILON)?;
        patches.output(b, MERGER, x, s.size_or("hidden_size", 3584)?)
    }

    pub fn build_2_5(s: &Settings, b: &mut Builder) -> Result<()> {
        let s = &s.with_sizes(&[("hidden_size", 3584), ("num_heads", 16), ("depth", 32), ("intermediate_size", 3420), ("patch_size", 14)]);
        let (patches, pixels) = Patches::new(s, b, "hidden_size")?;
        let mut x = patches.embed(b, pixels, s.size("hidden_size")?, None)?;
        let whole = if s.get("fullatt_block_indexes").is_some() { s.numbers("fullatt_block_indexes")? } else { vec![7.0, 15.0, 23.0, 31.0] };
        let window = s.size_or("window_size", 112)?;
        for index in 0..s.size("depth")? {
            let window = if whole.contains(&(index as f64)) { None } else { Some(patches.window(window)?) };
            x = patches.gated_layer(s, b, &format!("blocks.{index}"), window, x)?;
        }
        let x = norm(b, "merger.ln_q", x)?;
        patches.output(b, MERGER, x, s.size_or("out_hidden_size", 3584)?)
    }

    pub fn build_3(s: &Settings, b: &mut Builder) -> Result<()> {
        let s = &s.with_sizes(&[("hidden_size", 1152), ("num_heads", 16), ("depth", 27), ("intermediate_size", 4304), ("patch_size", 16)]);
        let (width, out) = (s.size("hidden_size")?, s.size_or("out_hidden_size", 3584)?);
        let (patches, pixels) = Patches::new(s, b, "hidden_size")?;
        let mut x = patches.embed(b, pixels, width, Some(s.size_or("num_position_embeddings", 2304)?))?;
        let block = Block {
            names: &NAMES_3,
            norms: NormPosition::Before,
            epsilon: EPSILON,
            head_dim: patches.head_dim,
            attention: Attention::default(),
            extras: &[],
            qkv_bias: Some(true),
            cross: None,
            neurons: s.size("intermediate_size")?,
            activation: Some(s.text_or("hidden_act", "gelu_pytorch_tanh")?),
        };
        let (deep, depth) = (if s.get(DEEP).is_some() { s.numbers(DEEP)? } else { vec![8.0, 16.0, 24.0] }, s.size("depth")?);
        if let Some(layer) = deep.iter().find(|layer| layer.fract() != 0.0 || !(0.0..depth as f64).contains(*layer)) {
            return Err(Error::graph("config.json", format!("`{DEEP}` lists layer {layer}, which is not one of the {depth} layers")));
        }
        let mut features = Vec::new();
        for index in 0..depth {
            let name = format!("blocks.{index}");
            x = block.with_attention(b, (&name, &name), x, |b, x| patches.attend(b, &name, None, x))?;
            if let Some(at) = deep.iter().position(|layer| *layer == index as f64) {
                let module = format!("deepstack_merger_list.{at}");
                let adjacent = patches.adjacent(b, &module, x)?;
                let normed = layer_norm(b, &format!("{module}.norm"), &format!("{module}.norm"), adjacent, EPSILON)?;
                features.push(merged(b, &module, MERGER_3, normed, out)?);
            }
        }
        let x = layer_norm(b, "merger.norm", "merger.norm", x, EPSILON)?;
        patches.output(b, MERGER_3, x, out)?;
        // In the order of the layers, as in transformers.
        features.into_iter().enumerate().for_each(|(number, feature)| b.output(&format!("deepstack_features_{number}"), feature));
        Ok(())
    }

    /// Features of merged patches for the language model, `[batch, merged patches, out]`.
    fn merged(b: &mut Builder, module: &str, [first, activation, second]: [&str; 3], x: ValueId, out: usize) -> Result<ValueId> {
        let width = b.width(x)?;
        let x = linear(b, &format!("{module}.{first}"), x, width)?;
        let x = b.node(&format!("{module}.{activation}"), Gelu { tanh: false }, &[x])?;
        linear(b, &format!("{module}.{second}"), x, out)
    }

    fn norm(b: &mut Builder, name: &str, x: ValueId) -> Result<ValueId> {
        rms_norm(b, name, name, x, RmsNorm { epsilon: EPSILON, ..RmsNorm::default() })
    }

    fn linear(b: &mut Builder, name: &str, x: ValueId, out: usize) -> Result<ValueId> {
        linear_with(b, name, name, x, out, true)
    }

    /// Base of the rotary frequencies.
    fn theta(s: &Settings) -> Result<f64> {
        let parameters = parameters(s)?;
        let kind = parameters.map_or(Ok("axial"), |p| p.text_or("rope_type", p.text_or("type", "axial")?))?;
        if !["axial", "default"].contains(&kind) {
            return Err(Error::Unsupported { what: format!("rope type `{kind}` in a vision tower of Qwen-VL"), hint: "supported: axial".into() });
        }
        parameters.filter(|p| p.get("rope_theta").is_some()).unwrap_or(*s).number_or("rope_theta", 10_000.0)
    }

    /// Height and width of images.
    fn image_size(s: &Settings) -> Result<[usize; 2]> {
        const KEY: &str = "image_size";
        if !s.get(KEY).is_some_and(Value::is_array) {
            return Ok([s.size_or(KEY, 224)?; 2]);
        }
        let sides = s.sizes(KEY)?;
        sides.as_slice().try_into().map_err(|_| Error::graph("config.json", format!("`{KEY}` has {} numbers, expected a height and a width", sides.len())))
    }

    impl Patches {
        /// The patches of images, and the input of images.
        fn new(s: &Settings, b: &mut Builder, width: &str) -> Result<(Patches, ValueId)> {
            let (side, merge) = (s.size("patch_size")?, s.size_or("spatial_merge_size", 2)?);
            let frames = s.size_or("temporal_patch_size", 2)?;
            if frames > MAX_FRAMES {
                return Err(Error::graph("config.json", format!("`temporal_patch_size` is {frames}, expected at most {MAX_FRAMES}")));
            }
            let (size, merged) = (image_size(s)?, side.saturating_mul(merge));
            if let Some(pixels) = size.into_iter().find(|pixels| !pixels.is_multiple_of(merged)) {
                let reason = format!("`image_size` {pixels} is not a multiple of {merged}, which is `patch_size` times `spatial_merge_size`");
                return Err(Error::graph("config.json", reason));
            }
            let grid = size.map(|pixels| pixels.checked_div(side).unwrap_or(0));
            let [rows, columns] = size.map(Dim::Fixed);
            let pixels = image_input(b, s.size_or("in_channels", 3)?, rows, columns)?;
            let head_dim = s.head_dim(width, "num_heads")?;
            if !head_dim.is_multiple_of(4) {
                return Err(Error::graph("config.json", format!("`num_heads` gives heads of width {head_dim}, which must be a multiple of 4")));
            }
            let rotary = GridRotary { theta: theta(s)?, grid, block: merge };
            Ok((Patches { side, frames, grid, merge, head_dim, rotary }, pixels))
        }

        /// Rows and columns of merged patches.
        fn merged_grid(&self) -> [usize; 2] {
            self.grid.map(|patches| patches.checked_div(self.merge).unwrap_or(0))
        }

        /// Patch embeddings `[batch, patches, width]`, with adjacent patches that are merged; with a bias and
        /// this number of learned positions, if there are any.
        fn embed(&self, b: &mut Builder, pixels: ValueId, width: usize, positions: Option<usize>) -> Result<ValueId> {
            const NODE: &str = "patch_embed";
            let channels = b.ty(pixels).shape.get(1).and_then(Dim::fixed).unwrap_or(0);
            let copied = TargetSize::Copy;
            let weight = b.param(&format!("{NODE}.proj.weight"), &[width, channels, self.frames, self.side, self.side])?;
            // A convolution over the frames of each channel.
            let shape = vec![copied(0), TargetSize::Rest, TargetSize::Number(self.side), TargetSize::Number(self.side)];
            let weight = b.node(&format!("{NODE}.kernel"), Reshape { shape }, &[weight])?;
            let frame = b.node(&format!("{NODE}.frame"), Reshape { shape: vec![BATCH, copied(1), TargetSize::Number(1), copied(2), copied(3)] }, &[pixels])?;
            let frames = b.node(&format!("{NODE}.frames"), Concat { axis: 2 }, &vec![frame; self.frames])?;
            let frames = b.node(&format!("{NODE}.channels"), Reshape { shape: vec![BATCH, TargetSize::Rest, copied(3), copied(4)] }, &[frames])?;
            let mut inputs = vec![frames, weight];
            if positions.is_some() {
                inputs.push(b.param(&format!("{NODE}.proj.bias"), &[width])?);
            }
            let mut x = b.node(&format!("{NODE}.proj"), Conv { stride: self.side.into(), ..Conv::default() }, &inputs)?;
            if let Some(count) = positions {
                let positions = self.positions(b, count, width)?;
                x = b.node(&format!("{NODE}.with_positions"), Add {}, &[x, positions])?;
            }
            let ([rows, columns], merge) = (self.merged_grid().map(TargetSize::Number), TargetSize::Number(self.merge));
            let x = b.node(&format!("{NODE}.squares"), Reshape { shape: vec![BATCH, copied(1), rows, merge, columns, merge] }, &[x])?;
            let x = b.node(&format!("{NODE}.turned"), Transpose { perm: vec![0, 2, 4, 3, 5, 1] }, &[x])?;
            b.node(NODE, Reshape { shape: vec![BATCH, TargetSize::Number(self.count()), copied(5)] }, &[x])
        }

        /// Learned positions of a square grid, resized to the grid of patches: `[1, width, rows, columns]`.
        fn positions(&self, b: &mut Builder, count: usize, width: usize) -> Result<ValueId> {
            let side = count.isqrt();
            if side.checked_mul(side) != Some(count) {
                return Err(Error::graph("config.json", format!("`num_position_embeddings` is {count}, expected the square of an integer")));
            }
            let table = b.param("pos_embed.weight", &[count, width])?;
            let shape = vec![TargetSize::Number(1), TargetSize::Number(side), TargetSize::Number(side), TargetSize::Copy(1)];
            let square = b.node("pos_embed.square", Reshape { shape }, &[table])?;
            let square = b.node("pos_embed.channels_first", Transpose { perm: vec![0, 3, 1, 2] }, &[square])?;
            let [rows, columns] = self.grid.map(Extent::Size);
            let sizes = vec![Extent::Scale(1.0), Extent::Scale(1.0), rows, columns];
            let resize = Resize { sizes, mode: Interpolation::Linear, coordinates: Coordinates::AlignCorners, ..Resize::default() };
            b.node("pos_embed", resize, &[square])
        }

        /// Number of patches.
        fn count(&self) -> usize {
            let [rows, columns] = self.grid;
            rows.saturating_mul(columns)
        }

        /// Rows and columns of windows, and the side length of a window, in merged patches.
        fn window(&self, size: usize) -> Result<([usize; 2], usize)> {
            let unit = self.side.saturating_mul(self.merge);
            let window = size.checked_div(unit).filter(|window| *window > 0);
            let window = window.ok_or_else(|| Error::graph("config.json", format!("`window_size` {size} is smaller than {unit} pixels of merged patches")))?;
            let grid = self.merged_grid();
            if grid.iter().any(|patches| !patches.is_multiple_of(window)) {
                let reason = format!(
                    "`image_size` is not a multiple of {} pixels, the side of a window of `window_size`: use another `image_size`",
                    window.saturating_mul(unit)
                );
                return Err(Error::graph("config.json", reason));
            }
            Ok((grid.map(|patches| patches.checked_div(window).unwrap_or(0)), window))
        }

        /// Attention of all patches, or within windows.
        fn attend(&self, b: &mut Builder, layer: &str, windows: Option<([usize; 2], usize)>, x: ValueId) -> Result<ValueId> {
            let (width, node) = (b.width(x)?, format!("{layer}.attn"));
            let all = linear(b, &format!("{node}.qkv"), x, width.saturating_mul(3))?;
            let qkv = slices(b, ["query", "key", "value"].map(|part| format!("{node}.{part}")), all, [width; 3])?;
            let mut heads = split_heads(b, &node, qkv, self.head_dim)?;
            for (part, value) in ["query", "key", "value"].into_iter().zip(&mut heads) {
                if part != "value" {
                    *value = b.node(&format!("{node}.{part}_rotary"), self.rotary, &[*value])?;
                }
                if let Some(windows) = windows {
                    *value = self.swapped(b, &format!("{node}.{part}_windows"), windows, false, *value)?;
                }
            }
            let attention = Attention { scale: 1.0 / (self.head_dim as f64).sqrt(), ..Attention::default() };
            let mut context = b.node(&format!("{node}.context_heads"), attention, &heads)?;
            if let Some(windows) = windows {
                context = self.swapped(b, &format!("{node}.context_windows"), windows, true, context)?;
            }
            let context = b.node(&format!("{node}.context"), MergeHeads {}, &[context])?;
            linear(b, &format!("{node}.proj"), context, width)
        }

        /// Heads `[batch, heads, patches, d]` to `[batch, heads · windows, patches of a window, d]`, or back.
        fn swapped(&self, b: &mut Builder, node: &str, ([rows, columns], side): ([usize; 2], usize), back: bool, x: ValueId) -> Result<ValueId> {
            // The patches in a row of merged patches of a window are adjacent.
            let run = side.saturating_mul(self.merge).saturating_mul(self.merge);
            let [rows, columns, high, wide] = [rows, columns, side, run].map(TargetSize::Number);
            let (middle, heads) = if back { ([rows, columns, high, wide], TargetSize::Rest) } else { ([rows, high, columns, wide], TargetSize::Copy(1)) };
            let shape = [BATCH, heads].into_iter().chain(middle).chain([TargetSize::Copy(3)]).collect();
            let x = b.node(&format!("{node}.split"), Reshape { shape }, &[x])?;
            let x = b.node(&format!("{node}.turned"), Transpose { perm: vec![0, 1, 2, 4, 3, 5, 6] }, &[x])?;
            let inside = TargetSize::Number(side.saturating_mul(run));
            let [heads, patches] = if back { [TargetSize::Copy(1), TargetSize::Number(self.count())] } else { [TargetSize::Rest, inside] };
            b.node(node, Reshape { shape: vec![BATCH, heads, patches, TargetSize::Copy(6)] }, &[x])
        }

        /// A layer with RMS normalization and a gated network.
        fn gated_layer(&self, s: &Settings, b: &mut Builder, layer: &str, windows: Option<([usize; 2], usize)>, x: ValueId) -> Result<ValueId> {
            let (width, neurons, node) = (b.width(x)?, s.size("intermediate_size")?, |part: &str| format!("{layer}.{part}"));
            let normed = norm(b, &node("norm1"), x)?;
            let attended = self.attend(b, layer, windows, normed)?;
            let x = b.node(&node("attended"), Add {}, &[attended, x])?;
            let normed = norm(b, &node("norm2"), x)?;
            let gate = linear(b, &node("mlp.gate_proj"), normed, neurons)?;
            let gate = activate(b, &node("mlp.act"), s.text_or("hidden_act", "silu")?, gate)?;
            let up = linear(b, &node("mlp.up_proj"), normed, neurons)?;
            let active = b.node(&node("mlp.gated"), Mul {}, &[gate, up])?;
            let out = linear(b, &node("mlp.down_proj"), active, width)?;
            b.node(layer, Add {}, &[out, x])
        }

        /// Adds the output: features of merged patches.
        fn output(&self, b: &mut Builder, parts: [&str; 3], x: ValueId, out: usize) -> Result<()> {
            let x = self.adjacent(b, "merger", x)?;
            let x = merged(b, "merger", parts, x, out)?;
            b.output("image_embeds", x);
            Ok(())
        }

        /// The values of patches that are merged, next to each other: `[batch, merged patches, width]`.
        fn adjacent(&self, b: &mut Builder, module: &str, x: ValueId) -> Result<ValueId> {
            let [rows, columns] = self.merged_grid();
            let (squares, patches) = (TargetSize::Number(rows.saturating_mul(columns)), TargetSize::Number(self.merge.saturating_mul(self.merge)));
            let x = b.node(&format!("{module}.squares"), Reshape { shape: vec![BATCH, squares, patches, TargetSize::Copy(2)] }, &[x])?;
            b.node(&format!("{module}.adjacent"), Reshape { shape: vec![BATCH, TargetSize::Copy(1), TargetSize::Rest] }, &[x])
        }
    }
}
