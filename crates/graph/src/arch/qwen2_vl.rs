//! The vision tower of Qwen2-VL: a vision transformer with rotary position embeddings of rows and columns,
//! whose neighboring patches are merged for the language model (Wang et al., 2024).
//!
//! Images have the fixed size `image_size`, which transformers does not read: it computes the grid of patches
//! from each image. Patches are in the order of transformers, in which those to be merged are adjacent.

use super::{Family, Keys, VISION_TRANSFORMER};

pub(super) const QWEN2_VL_VISION: Family = Family {
    model_type: "qwen2_vl_vision",
    graph: graph!(running::build),
    keys: Keys {
        // Keys of published files that transformers does not read.
        harmless: &["in_chans", "spatial_patch_size"],
        neutral: &[("head_dim", "null"), ("num_attention_heads", "null"), ("num_hidden_layers", "null")],
    },
    fused: &[],
    embeddings: &["patch_embed"],
    ..VISION_TRANSFORMER
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{attend_heads, image_input, layer_norm, linear_with, slices, split_heads};
    use crate::arch::running::rope::parameters;
    use crate::error::{Error, Result};
    use crate::ir::ops::{Attention, Concat, Conv, Gelu, GridRotary, Reshape, TargetSize, Transpose};
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
    const EPSILON: f64 = 1e-6;
    /// Maximum number of frames of a patch.
    const MAX_FRAMES: usize = 64;
    /// The batch size.
    const BATCH: TargetSize = TargetSize::Copy(0);
    const SIZES: [(&str, usize); 3] = [("embed_dim", 1280), ("num_heads", 16), ("depth", 32)];

    /// The patches of an image.
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
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let s = &s.with_sizes(&SIZES);
        let width = s.size("embed_dim")?;
        let (patches, pixels) = Patches::new(s, b)?;
        let mut x = patches.embed(b, pixels, width)?;
        let block = Block {
            names: &NAMES,
            norms: NormPosition::Before,
            epsilon: EPSILON,
            head_dim: s.head_dim("embed_dim", "num_heads")?,
            attention: Attention::default(),
            extras: &[],
            qkv_bias: Some(true),
            cross: None,
            neurons: (width as f64 * s.number_or("mlp_ratio", 4.0)?) as usize,
            activation: Some(s.text_or("hidden_act", "quick_gelu")?),
        };
        let rotary = GridRotary { theta: theta(s)?, grid: patches.grid, block: patches.merge };
        for index in 0..s.size("depth")? {
            let name = format!("blocks.{index}");
            x = block.with_attention(b, (&name, &name), x, |b, x| attend(b, &block, &name, rotary, x))?;
        }
        let merged = patches.merged(b, x, s.size_or("hidden_size", 3584)?)?;
        b.output("image_embeds", merged);
        Ok(())
    }

    /// Base of the rotary frequencies.
    fn theta(s: &Settings) -> Result<f64> {
        let parameters = parameters(s)?;
        let kind = parameters.map_or(Ok("axial"), |p| p.text_or("rope_type", p.text_or("type", "axial")?))?;
        if !["axial", "default"].contains(&kind) {
            return Err(Error::Unsupported { what: format!("rope type `{kind}` in a vision tower of Qwen2-VL"), hint: "supported: axial".into() });
        }
        parameters.filter(|p| p.get("rope_theta").is_some()).unwrap_or(*s).number_or("rope_theta", 10_000.0)
    }

    fn attend(b: &mut Builder, block: &Block, layer: &str, rotary: GridRotary, x: ValueId) -> Result<ValueId> {
        let (width, node) = (b.width(x)?, format!("{layer}.attn"));
        let all = linear_with(b, &format!("{node}.qkv"), &format!("{node}.qkv"), x, width.saturating_mul(3), true)?;
        let qkv = slices(b, ["query", "key", "value"].map(|part| format!("{node}.{part}")), all, [width; 3])?;
        let [q, k, v] = split_heads(b, &node, qkv, block.head_dim)?;
        let q = b.node(&format!("{node}.query_rotary"), rotary, &[q])?;
        let k = b.node(&format!("{node}.key_rotary"), rotary, &[k])?;
        let context = attend_heads(b, &node, [q, k, v], block.head_dim, block.attention, block.extras)?;
        block.out(b, (layer, layer), context)
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
        fn new(s: &Settings, b: &mut Builder) -> Result<(Patches, ValueId)> {
            let (side, merge) = (s.size_or("patch_size", 14)?, s.size_or("spatial_merge_size", 2)?);
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
            let [height, width] = size.map(Dim::Fixed);
            let pixels = image_input(b, s.size_or("in_channels", 3)?, height, width)?;
            Ok((Patches { side, frames, grid, merge }, pixels))
        }

        /// Rows and columns of merged patches.
        fn merged_grid(&self) -> [usize; 2] {
            self.grid.map(|patches| patches.checked_div(self.merge).unwrap_or(0))
        }

        /// Patch embeddings `[batch, patches, width]`, with adjacent patches that are merged.
        fn embed(&self, b: &mut Builder, pixels: ValueId, width: usize) -> Result<ValueId> {
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
            let x = b.node(&format!("{NODE}.proj"), Conv { stride: self.side.into(), ..Conv::default() }, &[frames, weight])?;
            let ([rows, columns], merge) = (self.merged_grid().map(TargetSize::Number), TargetSize::Number(self.merge));
            let x = b.node(&format!("{NODE}.squares"), Reshape { shape: vec![BATCH, copied(1), rows, merge, columns, merge] }, &[x])?;
            let x = b.node(&format!("{NODE}.turned"), Transpose { perm: vec![0, 2, 4, 3, 5, 1] }, &[x])?;
            b.node(NODE, Reshape { shape: vec![BATCH, TargetSize::Number(self.count()), copied(5)] }, &[x])
        }

        /// Number of patches.
        fn count(&self) -> usize {
            let [rows, columns] = self.grid;
            rows.saturating_mul(columns)
        }

        /// Features of merged patches for the language model, `[batch, merged patches, out]`.
        fn merged(&self, b: &mut Builder, x: ValueId, out: usize) -> Result<ValueId> {
            const NODE: &str = "merger";
            let x = layer_norm(b, &format!("{NODE}.ln_q"), &format!("{NODE}.ln_q"), x, EPSILON)?;
            let [rows, columns] = self.merged_grid();
            let (squares, patches) = (TargetSize::Number(rows.saturating_mul(columns)), TargetSize::Number(self.merge.saturating_mul(self.merge)));
            let x = b.node(&format!("{NODE}.squares"), Reshape { shape: vec![BATCH, squares, patches, TargetSize::Copy(2)] }, &[x])?;
            let x = b.node(&format!("{NODE}.adjacent"), Reshape { shape: vec![BATCH, TargetSize::Copy(1), TargetSize::Rest] }, &[x])?;
            let width = b.width(x)?;
            let x = linear_with(b, &format!("{NODE}.mlp.0"), &format!("{NODE}.mlp.0"), x, width, true)?;
            let x = b.node(&format!("{NODE}.mlp.1"), Gelu { tanh: false }, &[x])?;
            linear_with(b, &format!("{NODE}.mlp.2"), &format!("{NODE}.mlp.2"), x, out, true)
        }
    }
}
