//! RT-DETR: a real-time object detector (Zhao et al., 2023), with the backbone `rt_detr_resnet` of
//! transformers, and RT-DETRv2, which differs in the scale of the sampling offsets.

use super::{EMPTY, Family, Keys, ModelKind};
use crate::store::Role;

pub(super) const RT_DETR: Family = Family {
    model_type: "rt_detr",
    kind: ModelKind::Detector,
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "_out_features",
            "_out_indices",
            "activation_dropout",
            "attention_dropout",
            "auxiliary_loss",
            "box_noise_scale",
            "disable_custom_kernels",
            "dropout",
            "eos_coefficient",
            "focal_loss_alpha",
            "focal_loss_gamma",
            "freeze_backbone_batch_norms",
            "initializer_bias_prior_prob",
            "is_encoder_decoder",
            "label_noise_ratio",
            "matcher_alpha",
            "matcher_bbox_cost",
            "matcher_class_cost",
            "matcher_gamma",
            "matcher_giou_cost",
            "num_denoising",
            "stage_names",
            "use_focal_loss",
            "use_pretrained_backbone",
            "weight_loss_bbox",
            "weight_loss_giou",
            "weight_loss_vfl",
            // Has no effect: boxes are refined in any case.
            "with_box_refine",
        ],
        neutral: &[
            ("backbone", "null"),
            ("backbone_kwargs", "null"),
            ("decoder_method", "\"default\""),
            ("eval_size", "null"),
            ("learn_initial_query", "false"),
            ("use_timm_backbone", "false"),
        ],
    },
    embeddings: &["denoising_class_embed"],
    heads: &["class_embed", "bbox_embed", "enc_score_head", "enc_bbox_head"],
    // Rounding errors of these layers exchange selected queries, or move sampled places.
    exempt: &[("enc_output", Role::Localization), ("sampling_offsets", Role::Localization), ("query_pos_head", Role::Localization)],
    renames: &[("out_proj", "o_proj"), ("fc1", "mlp.fc1"), ("fc2", "mlp.fc2"), ("encoder.encoder.", "encoder.aifi.")],
    ..EMPTY
};

pub(super) const RT_DETR_V2: Family = Family { model_type: "rt_detr_v2", ..RT_DETR };

#[cfg(feature = "run")]
mod running {
    use crate::arch::BOXES;
    use crate::arch::resnet::running::VariantD;
    use crate::arch::running::parts::{ConvNorm, activate, attend, layer_norm, linear};
    use crate::arch::running::{Settings, indivisible};
    use crate::error::{Error, Result};
    use crate::ir::ops::{
        Add, AnchorUse, Anchors, Attention, Binary, BinaryKind, Clip, Concat, Coordinates, DeformableAttention, Detach, Extent, GatherTokens, GridPositions,
        HardSigmoid, Interpolation, Log, NearestMode, Patchify, Reduce, ReduceKind, Relu, Reshape, Resize, Sigmoid, TargetSize, TopK, Transpose,
    };
    use crate::ir::{Builder, Dim, ValueId};

    /// Default sizes of transformers' `RTDetrConfig`.
    const SIZES: &[(&str, usize)] = &[
        ("d_model", 256),
        ("decoder_attention_heads", 8),
        ("decoder_ffn_dim", 1024),
        ("decoder_layers", 6),
        ("decoder_n_points", 4),
        ("encoder_attention_heads", 8),
        ("encoder_ffn_dim", 1024),
        ("encoder_hidden_dim", 256),
        ("num_feature_levels", 3),
        ("num_queries", 300),
    ];

    /// Height and width of images without a configured size, for which the published models were trained.
    const IMAGE: usize = 640;
    /// Default distances of places of the feature maps, in pixels.
    const STRIDES: &[usize] = &[8, 16, 32];
    /// Width and height of the anchors of the first feature map, relative to the image.
    const ANCHOR: f64 = 0.05;
    /// Least distance of box numbers from 0 and 1, of which the logit is taken.
    const MARGIN: f64 = 1e-5;
    /// Factor on the sampling offsets, which only the second version can configure.
    const OFFSET_SCALE: f64 = 0.5;
    /// RepVGG blocks of a fusion block.
    const FUSION_BLOCKS: usize = 3;

    /// A feature map, `[batch, channels, rows, columns]`.
    type Map = ValueId;

    /// Values of the configuration that several parts read.
    struct Detector<'c> {
        s: Settings<'c>,
        /// Activation of convolutions.
        act: &'c str,
        /// Epsilon of layer normalizations.
        epsilon: f64,
        /// Epsilon of batch normalizations.
        batch_epsilon: f64,
    }

    /// A transformer layer without its cross-attention.
    struct Layer<'a> {
        node: &'a str,
        module: &'a str,
        heads: (&'static str, &'static str),
        neurons: usize,
        act: &'a str,
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        if !matches!(s.class(), "" | "RTDetrForObjectDetection" | "RTDetrV2ForObjectDetection") {
            return Err(Error::Unsupported {
                what: format!("class `{}`", s.class()),
                hint: "supported: RTDetrForObjectDetection, RTDetrV2ForObjectDetection".into(),
            });
        }
        let s = s.with_sizes(SIZES);
        let detector = Detector {
            s,
            act: s.text_or("activation_function", "silu")?,
            epsilon: s.number_or("layer_norm_eps", 1e-5)?,
            batch_epsilon: s.number_or("batch_norm_eps", 1e-5)?,
        };
        let (key, image) = image_size(&s)?;
        let maps = VariantD { s: s.group_or_empty("backbone_config")?, node: "backbone", module: "model.backbone.model" }.build(b, image)?;
        if maps.iter().zip(maps.iter().skip(1)).any(|(map, next)| sides(b, *map) != sides(b, *next).map(|side| side.saturating_mul(2))) {
            let multiple = detector.s.sizes_or("feat_strides", STRIDES)?.into_iter().max().unwrap_or(1);
            let [height, width] = image;
            let reason = format!(
                "`{key}` specifies images of {height} x {width} pixels, whose feature maps the encoder cannot fuse: set a height and a width that are multiples of {multiple}"
            );
            return Err(Error::graph("config.json", reason));
        }
        let maps = detector.encoder(b, maps)?;
        let (memory, levels) = detector.memory(b, &maps, image)?;
        let (hidden, boxes) = detector.queries(b, memory, &levels)?;
        detector.decoder(b, memory, levels, hidden, boxes)
    }

    /// Height and width of images, and the key that specifies them: the size of the anchors, or `image_size`,
    /// or 640.
    fn image_size(s: &Settings) -> Result<(&'static str, [usize; 2])> {
        let key = if s.get("anchor_image_size").is_some() { "anchor_image_size" } else { "image_size" };
        let size = match s.get(key) {
            Some(size) if size.is_array() => {
                let sizes = s.sizes(key)?;
                sizes.try_into().map_err(|_| Error::graph("config.json", format!("`{key}` must be a height and a width")))?
            }
            _ => [s.size_or(key, IMAGE)?; 2],
        };
        Ok((key, size))
    }

    /// Rows and columns of a feature map.
    fn sides(b: &Builder, map: Map) -> [usize; 2] {
        [2, 3].map(|axis| b.ty(map).shape.get(axis).and_then(Dim::fixed).unwrap_or(0))
    }

    /// Layers with ReLU between them.
    fn perceptron(b: &mut Builder, (node, module): (&str, &str), mut x: ValueId, widths: &[usize]) -> Result<ValueId> {
        for (index, width) in widths.iter().enumerate() {
            let name = format!("{node}.layers.{index}");
            x = linear(b, &name, &format!("{module}.layers.{index}"), x, *width)?;
            if index.saturating_add(1) < widths.len() {
                x = b.node(&format!("{name}.activation"), Relu {}, &[x])?;
            }
        }
        Ok(x)
    }

    /// The logit of numbers from 0 to 1.
    fn inverse_sigmoid(b: &mut Builder, node: &str, x: ValueId) -> Result<ValueId> {
        let margin = Clip { min: MARGIN, max: 1.0 };
        let rest = b.node(&format!("{node}.rest"), HardSigmoid { alpha: -1.0, beta: 1.0 }, &[x])?;
        let rest = b.node(&format!("{node}.clipped_rest"), margin, &[rest])?;
        let x = b.node(&format!("{node}.clipped"), margin, &[x])?;
        let odds = b.node(&format!("{node}.odds"), Binary { kind: BinaryKind::Div }, &[x, rest])?;
        b.node(&format!("{node}.logits"), Log {}, &[odds])
    }

    impl Detector<'_> {
        /// A convolution with batch normalization and activation.
        fn conv(&self, b: &mut Builder, name: &str, x: Map, (out, kernel, stride): (usize, usize, usize)) -> Result<Map> {
            let x = self.linear_conv(b, name, x, (out, kernel, stride))?;
            activate(b, &format!("{name}.activation"), self.act, x)
        }

        /// A convolution with batch normalization.
        fn linear_conv(&self, b: &mut Builder, name: &str, x: Map, (out, kernel, stride): (usize, usize, usize)) -> Result<Map> {
            let [conv, norm] = ["conv", "norm"].map(|part| format!("model.{name}.{part}"));
            let nodes = ["conv", "norm"].map(|part| format!("{name}.{part}"));
            let nodes = Some([nodes[0].as_str(), nodes[1].as_str()]);
            ConvNorm { conv: &conv, norm: &norm, nodes, out, kernel, stride, epsilon: self.batch_epsilon, ..ConvNorm::default() }.add(b, x)
        }

        /// A projection to another number of channels, in two modules with numbers.
        fn project(b: &mut Builder, name: &str, x: Map, (out, kernel, stride): (usize, usize, usize), epsilon: f64) -> Result<Map> {
            let [conv, norm] = [0, 1].map(|part| format!("model.{name}.{part}"));
            let [conv_node, norm_node] = [0, 1].map(|part| format!("{name}.{part}"));
            let nodes = Some([conv_node.as_str(), norm_node.as_str()]);
            ConvNorm { conv: &conv, norm: &norm, nodes, out, kernel, stride, epsilon, ..ConvNorm::default() }.add(b, x)
        }

        /// The hybrid encoder: attention within feature maps, then fusion from the smallest to the largest
        /// feature map and back.
        fn encoder(&self, b: &mut Builder, maps: Vec<Map>) -> Result<Vec<Map>> {
            let s = &self.s;
            let width = s.size("encoder_hidden_dim")?;
            let channels = s.sizes_or("encoder_in_channels", &[512, 1024, 2048])?;
            let found: Vec<usize> = maps.iter().map(|map| b.ty(*map).shape.get(1).and_then(Dim::fixed).unwrap_or(0)).collect();
            if channels != found {
                return Err(Error::graph(
                    "config.json",
                    format!("`encoder_in_channels` is {channels:?}, but the backbone has feature maps of {found:?} channels"),
                ));
            }
            let mut projected = Vec::with_capacity(maps.len());
            for (level, map) in maps.into_iter().enumerate() {
                projected.push(Self::project(b, &format!("encoder_input_proj.{level}"), map, (width, 1, 1), 0.0)?);
            }
            let attended = numbers(s, "encode_proj_layers", &[2])?;
            let layers = if s.get("encoder_layers").and_then(serde_json::Value::as_u64) == Some(0) { 0 } else { s.size_or("encoder_layers", 1)? };
            for (index, level) in attended.into_iter().enumerate() {
                let Some(map) = projected.get_mut(level) else {
                    return Err(Error::graph("config.json", format!("`encode_proj_layers` lists feature map {level}, which does not exist")));
                };
                if layers > 0 {
                    *map = self.within_map(b, &format!("encoder.encoder.{index}"), *map, layers)?;
                }
            }
            self.fuse(b, &projected, width)
        }

        /// Transformer layers over the places of a feature map.
        fn within_map(&self, b: &mut Builder, name: &str, map: Map, layers: usize) -> Result<Map> {
            let s = &self.s;
            let [rows, columns] = sides(b, map);
            let positions = GridPositions { rows, columns, temperature: s.number_or("positional_encoding_temperature", 10_000.0)? };
            let before = s.flag_or("normalize_before", false)?;
            let mut x = b.node(&format!("{name}.places"), Patchify {}, &[map])?;
            for index in 0..layers {
                let (node, module) = (format!("{name}.layers.{index}"), format!("model.{name}.layers.{index}"));
                let layer = Layer {
                    node: &node,
                    module: &module,
                    heads: ("encoder_hidden_dim", "encoder_attention_heads"),
                    neurons: s.size("encoder_ffn_dim")?,
                    act: s.text_or("encoder_activation_function", "gelu")?,
                };
                let read = if before { self.norm(b, &layer, "self_attn_layer_norm", x)? } else { x };
                let placed = b.node(&format!("{node}.with_positions"), positions, &[read])?;
                let attended = self.attention(b, &layer, placed, read)?;
                let sum = b.node(&format!("{node}.attended"), Add {}, &[attended, x])?;
                // With `normalize_before`, the residual of the network is normalized too.
                let read = self.norm(b, &layer, if before { "final_layer_norm" } else { "self_attn_layer_norm" }, sum)?;
                x = self.network(b, &layer, read)?;
                if !before {
                    x = self.norm(b, &layer, "final_layer_norm", x)?;
                }
            }
            let channels_first = b.node(&format!("{name}.channels_first"), Transpose { perm: vec![0, 2, 1] }, &[x])?;
            let shape = vec![TargetSize::Copy(0), TargetSize::Copy(1), TargetSize::Number(rows), TargetSize::Number(columns)];
            b.node(&format!("{name}.map"), Reshape { shape }, &[channels_first])
        }

        fn norm(&self, b: &mut Builder, layer: &Layer, part: &str, x: ValueId) -> Result<ValueId> {
            layer_norm(b, &format!("{}.{part}", layer.node), &format!("{}.{part}", layer.module), x, self.epsilon)
        }

        /// Self-attention; queries and keys are computed from `placed`, values from `x`.
        fn attention(&self, b: &mut Builder, layer: &Layer, placed: ValueId, x: ValueId) -> Result<ValueId> {
            let (node, module) = (format!("{}.self_attn", layer.node), format!("{}.self_attn", layer.module));
            let (width, head_dim) = (b.width(x)?, self.s.head_dim(layer.heads.0, layer.heads.1)?);
            let mut qkv = [placed, placed, x];
            for (value, part) in qkv.iter_mut().zip(["q_proj", "k_proj", "v_proj"]) {
                *value = linear(b, &format!("{node}.{part}"), &format!("{module}.{part}"), *value, width)?;
            }
            let context = attend(b, &node, qkv, head_dim, Attention::default(), &[])?;
            linear(b, &format!("{node}.out_proj"), &format!("{module}.out_proj"), context, width)
        }

        /// The feed-forward network, added to its input.
        fn network(&self, b: &mut Builder, layer: &Layer, x: ValueId) -> Result<ValueId> {
            let (node, module, width) = (layer.node, layer.module, b.width(x)?);
            let y = linear(b, &format!("{node}.fc1"), &format!("{module}.fc1"), x, layer.neurons)?;
            let y = activate(b, &format!("{node}.activation"), layer.act, y)?;
            let y = linear(b, &format!("{node}.fc2"), &format!("{module}.fc2"), y, width)?;
            b.node(&format!("{node}.sum"), Add {}, &[y, x])
        }

        /// Fuses neighboring feature maps, from the smallest to the largest one and back.
        fn fuse(&self, b: &mut Builder, maps: &[Map], width: usize) -> Result<Vec<Map>> {
            let mut downward: Vec<Map> = Vec::with_capacity(maps.len());
            let Some((smallest, larger)) = maps.split_last() else { return Ok(Vec::new()) };
            let mut top = *smallest;
            for (index, map) in larger.iter().rev().enumerate() {
                top = self.conv(b, &format!("encoder.lateral_convs.{index}"), top, (width, 1, 1))?;
                downward.push(top);
                let resize = Resize {
                    sizes: [1.0, 1.0, 2.0, 2.0].map(Extent::Scale).to_vec(),
                    mode: Interpolation::Nearest,
                    coordinates: Coordinates::Asymmetric,
                    nearest: NearestMode::Floor,
                };
                let name = format!("encoder.fpn_blocks.{index}");
                let doubled = b.node(&format!("{name}.doubled"), resize, &[top])?;
                top = self.fusion_block(b, &name, [doubled, *map], width)?;
            }
            let mut fused = vec![top];
            for (index, map) in downward.into_iter().rev().enumerate() {
                let halved = self.conv(b, &format!("encoder.downsample_convs.{index}"), top, (width, 3, 2))?;
                top = self.fusion_block(b, &format!("encoder.pan_blocks.{index}"), [halved, map], width)?;
                fused.push(top);
            }
            Ok(fused)
        }

        /// A cross stage partial block of RepVGG blocks over two feature maps.
        fn fusion_block(&self, b: &mut Builder, name: &str, maps: [Map; 2], width: usize) -> Result<Map> {
            let hidden = (width as f64 * self.s.number_or("hidden_expansion", 1.0)?) as usize;
            let x = b.node(&format!("{name}.joined"), Concat { axis: 1 }, &maps)?;
            let mut y = self.conv(b, &format!("{name}.conv1"), x, (hidden, 1, 1))?;
            for index in 0..FUSION_BLOCKS {
                let block = format!("{name}.bottlenecks.{index}");
                let wide = self.linear_conv(b, &format!("{block}.conv1"), y, (hidden, 3, 1))?;
                let narrow = self.linear_conv(b, &format!("{block}.conv2"), y, (hidden, 1, 1))?;
                let sum = b.node(&format!("{block}.sum"), Add {}, &[wide, narrow])?;
                y = activate(b, &format!("{block}.activation"), self.act, sum)?;
            }
            let side = self.conv(b, &format!("{name}.conv2"), x, (hidden, 1, 1))?;
            let sum = b.node(&format!("{name}.sum"), Add {}, &[y, side])?;
            if hidden == width { Ok(sum) } else { self.conv(b, &format!("{name}.conv3"), sum, (width, 1, 1)) }
        }

        /// The places of all feature maps that the decoder attends to, `[batch, places, width]`, and the rows
        /// and columns of the feature maps.
        fn memory(&self, b: &mut Builder, maps: &[Map], image: [usize; 2]) -> Result<(ValueId, Vec<[usize; 2]>)> {
            let s = &self.s;
            let width = s.size("d_model")?;
            let channels = s.sizes_or("decoder_in_channels", &[256; 3])?;
            let encoded = s.size("encoder_hidden_dim")?;
            if channels.len() != maps.len() || channels.iter().any(|size| *size != encoded) {
                return Err(Error::graph(
                    "config.json",
                    format!("`decoder_in_channels` is {channels:?}, but the encoder has {} feature maps of {encoded} channels", maps.len()),
                ));
            }
            let count = s.size("num_feature_levels")?;
            if count < maps.len() || s.size_or("decoder_n_levels", count)? != count {
                return Err(Error::graph("config.json", format!("`num_feature_levels` is {count}, but the decoder has other feature maps")));
            }
            let Some(smallest) = maps.last() else { return Err(Error::graph("config.json", "the backbone has no feature maps")) };
            let (mut places, mut levels) = (Vec::new(), Vec::new());
            for level in 0..count {
                let name = format!("decoder_input_proj.{level}");
                let (map, shape) = maps.get(level).map_or((smallest, (width, 3, 2)), |map| (map, (width, 1, 1)));
                let map = Self::project(b, &name, *map, shape, self.batch_epsilon)?;
                levels.push(sides(b, map));
                places.push(b.node(&format!("{name}.places"), Patchify {}, &[map])?);
            }
            let strides = s.sizes_or("feat_strides", STRIDES)?;
            let of_anchors: Vec<[usize; 2]> = strides.iter().map(|stride| image.map(|side| side.checked_div(*stride).unwrap_or(0))).collect();
            if s.get("anchor_image_size").is_some() && of_anchors != levels {
                return Err(Error::graph(
                    "config.json",
                    format!("`anchor_image_size` and `feat_strides` result in {of_anchors:?} anchors, but the feature maps have {levels:?} places"),
                ));
            }
            Ok((b.node("memory", Concat { axis: 1 }, &places)?, levels))
        }

        /// Hidden states and boxes of the places with the highest scores.
        fn queries(&self, b: &mut Builder, memory: ValueId, levels: &[[usize; 2]]) -> Result<(ValueId, ValueId)> {
            let width = b.width(memory)?;
            let anchors = |apply| Anchors { levels: levels.to_vec(), size: ANCHOR, apply };
            let valid = b.node("memory.valid", anchors(AnchorUse::Mask), &[memory])?;
            let x = linear(b, "enc_output.0", "model.enc_output.0", valid, width)?;
            let x = layer_norm(b, "enc_output.1", "model.enc_output.1", x, self.epsilon)?;
            let scores = linear(b, "enc_score_head", "model.enc_score_head", x, self.s.labels()?)?;
            let best = b.node("enc_score_head.best", Reduce { kind: ReduceKind::Max, axes: vec![-1], keep_dims: false }, &[scores])?;
            let chosen = b.node("queries", TopK { count: self.s.size("num_queries")? }, &[best])?;
            let offsets = perceptron(b, ("enc_bbox_head", "model.enc_bbox_head"), x, &[width, width, 4])?;
            let boxes = b.node("enc_bbox_head.boxes", anchors(AnchorUse::Add), &[offsets])?;
            let selected = |b: &mut Builder, name: &str, x: ValueId| {
                let selected = b.node(&format!("queries.{name}"), GatherTokens {}, &[x, chosen])?;
                b.node(&format!("queries.{name}.detached"), Detach {}, &[selected])
            };
            let (hidden, logits) = (selected(b, "hidden", x)?, selected(b, "boxes", boxes)?);
            Ok((hidden, b.node("queries.reference", Sigmoid {}, &[logits])?))
        }

        /// The decoder, whose layers refine the boxes.
        fn decoder(&self, b: &mut Builder, memory: ValueId, levels: Vec<[usize; 2]>, mut hidden: ValueId, mut boxes: ValueId) -> Result<()> {
            let s = &self.s;
            let (width, layers) = (b.width(memory)?, s.size("decoder_layers")?);
            let heads = s.size("decoder_attention_heads")?;
            if !width.is_multiple_of(heads) {
                return Err(indivisible(("d_model", width), ("decoder_attention_heads", heads)));
            }
            let has_scale = s.text_or("model_type", "")? == "rt_detr_v2";
            let scale = if has_scale { s.number_or("decoder_offset_scale", OFFSET_SCALE)? } else { OFFSET_SCALE };
            let sampling = DeformableAttention { levels, points: s.size("decoder_n_points")?, scale };
            let scores = heads.saturating_mul(sampling.samples());
            for index in 0..layers {
                let node = format!("decoder.layers.{index}");
                let module = format!("model.{node}");
                let layer = Layer {
                    node: &node,
                    module: &module,
                    heads: ("d_model", "decoder_attention_heads"),
                    neurons: s.size("decoder_ffn_dim")?,
                    act: s.text_or("decoder_activation_function", "relu")?,
                };
                let positions = perceptron(b, (&format!("{node}.query_pos_head"), "model.decoder.query_pos_head"), boxes, &[width.saturating_mul(2), width])?;
                let placed = b.node(&format!("{node}.placed"), Add {}, &[hidden, positions])?;
                let attended = self.attention(b, &layer, placed, hidden)?;
                let sum = b.node(&format!("{node}.attended"), Add {}, &[attended, hidden])?;
                hidden = self.norm(b, &layer, "self_attn_layer_norm", sum)?;

                let placed = b.node(&format!("{node}.encoder_attn.placed"), Add {}, &[hidden, positions])?;
                let project = |b: &mut Builder, part: &str, x: ValueId, out: usize| {
                    linear(b, &format!("{node}.encoder_attn.{part}"), &format!("{module}.encoder_attn.{part}"), x, out)
                };
                let values = project(b, "value_proj", memory, width)?;
                let offsets = project(b, "sampling_offsets", placed, scores.saturating_mul(2))?;
                let weights = project(b, "attention_weights", placed, scores)?;
                let context = b.node(&format!("{node}.encoder_attn.context"), sampling.clone(), &[values, offsets, weights, boxes])?;
                let context = project(b, "output_proj", context, width)?;
                let sum = b.node(&format!("{node}.encoder_attn.sum"), Add {}, &[context, hidden])?;
                hidden = self.norm(b, &layer, "encoder_attn_layer_norm", sum)?;

                let sum = self.network(b, &layer, hidden)?;
                hidden = self.norm(b, &layer, "final_layer_norm", sum)?;
                let head = format!("bbox_embed.{index}");
                let moved = perceptron(b, (&format!("{node}.{head}"), &self.head(b, &head)), hidden, &[width, width, 4])?;
                let before = inverse_sigmoid(b, &format!("{node}.reference"), boxes)?;
                let refined = b.node(&format!("{node}.box_logits"), Add {}, &[moved, before])?;
                boxes = b.node(&format!("{node}.boxes"), Sigmoid {}, &[refined])?;
                if index.saturating_add(1) == layers {
                    let head = format!("class_embed.{index}");
                    let logits = linear(b, &head, &self.head(b, &head), hidden, s.labels()?)?;
                    b.output("logits", logits);
                    b.output(BOXES, boxes);
                } else {
                    boxes = b.node(&format!("{node}.boxes.detached"), Detach {}, &[boxes])?;
                }
            }
            Ok(())
        }

        /// The module of a head, which checkpoints store under one of two names.
        fn head(&self, b: &Builder, head: &str) -> String {
            let inner = format!("model.decoder.{head}");
            let is_stored = ["weight", "layers.0.weight"].iter().any(|part| b.has(&format!("{inner}.{part}")));
            if is_stored { inner } else { head.to_owned() }
        }
    }

    /// A list of integers from 0, or a default.
    fn numbers(s: &Settings, key: &str, default: &[usize]) -> Result<Vec<usize>> {
        if s.get(key).is_none() {
            return Ok(default.to_vec());
        }
        let whole = |number: f64| (number >= 0.0 && number.fract() == 0.0 && number < f64::from(u32::MAX)).then_some(number as usize);
        let list: Option<Vec<usize>> = s.numbers(key)?.into_iter().map(whole).collect();
        list.ok_or_else(|| Error::graph("config.json", format!("`{key}` must be a list of integers from 0")))
    }
}
