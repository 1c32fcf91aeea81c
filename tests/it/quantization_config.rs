//! The `quantization_config` of folders: which modules loaders select by it, and notes about unsupported
//! schemes.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use compress::pass::{Cast, Quantize};
use compress_core::store::Pattern;
use serde_json::{Value, json};

use crate::common::{DType, Desk, Tensor, pipeline, read};

type Shapes<'a> = &'a [(&'a str, &'a [usize])];

/// A folder with weights of these shapes, without the suffix `.weight` for tensors of rank 2.
fn folder(desk: &Desk, config: &Value, shapes: Shapes) -> PathBuf {
    let name = |name: &str, rank: usize| if rank == 2 { format!("{name}.weight") } else { name.to_owned() };
    let tensors = shapes.iter().enumerate().map(|(seed, (module, shape))| (name(module, shape.len()), Tensor::random(DType::F32, shape, seed as u64)));
    let input = desk.weights(&tensors.collect());
    std::fs::write(input.join("config.json"), config.to_string()).unwrap();
    input
}

/// The written `quantization_config`, and the notes of the run.
fn quantized(desk: &Desk, input: &Path, options: Value) -> (Value, Vec<String>) {
    let pass: Quantize = serde_json::from_value(options).unwrap();
    let out = desk.run(input, pipeline().pass(pass)).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(out.path.join("config.json")).unwrap()).unwrap();
    (config["quantization_config"].clone(), out.report.notes)
}

/// Whether a list of targets selects a module by its name.
fn matching(entries: &Value, module: &str) -> bool {
    let entry = |entry: &str| entry == module || entry.starts_with("re:") && entry.parse::<Pattern>().unwrap().matches(module);
    entries.as_array().unwrap().iter().any(|value| entry(value.as_str().unwrap()))
}

/// The group sizes of the groups that select a module by its name.
fn group_sizes(config: &Value, module: &str) -> Vec<Value> {
    let groups = config["config_groups"].as_object().unwrap().values();
    groups.filter(|group| matching(&group["targets"], module)).map(|group| group["weights"]["group_size"].clone()).collect()
}

/// Loaders drop or change the first component of names, and transformers 5 renames modules of vision
/// transformers.
#[test]
fn targets_of_two_schemes_and_ignored_modules_match_by_every_name_that_loaders_use() {
    let desk = Desk::new();
    let config = |name: &str, options: Value| quantized(&desk, &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name), options).0;
    let bert = ["bert.encoder.layer.1.output.dense", "encoder.layer.1.output.dense"];
    let vit = ["vit.encoder.layer.1.output.dense", "vit.layers.1.mlp.fc2", "layers.1.mlp.fc2"];
    let short_rows = ["bert.encoder.layer.1.attention.self.key", "encoder.layer.1.attention.self.key", "bert.pooler.dense", "pooler.dense"];
    let short_rows_of_vit = ["vit.encoder.layer.0.attention.attention.key", "vit.layers.0.attention.k_proj", "layers.0.attention.k_proj", "layers.1.mlp.fc1"];
    for (name, long, short) in [("bert-sequence-classification", &bert[..], short_rows), ("vit-image-classification", &vit, short_rows_of_vit)] {
        let config = config(name, json!({ "scheme": "W4A16", "group_size": 16 }));
        long.iter().for_each(|module| assert_eq!(group_sizes(&config, module), [Value::Null], "{module}: {config}"));
        short.iter().for_each(|module| assert_eq!(group_sizes(&config, module), [json!(16)], "{module}: {config}"));
    }
    let ignore = config("vit-image-classification", json!({ "scheme": "W8A8", "ignore": ["*layer.0.attention*"] }))["ignore"].clone();
    for (module, is_ignored) in [(short_rows_of_vit[0], true), (short_rows_of_vit[1], true), (short_rows_of_vit[2], true), ("layers.1.attention.k_proj", false)]
    {
        assert_eq!(matching(&ignore, module), is_ignored, "{module}: {ignore}");
    }
}

/// Checkpoints and vLLM call the layers of LLaVA and Gemma 3 `language_model.model.layers`, transformers 5
/// `model.language_model.layers`. Checkpoints of Qwen3-VL have the names of transformers, vLLM uses the
/// others.
#[test]
fn language_models_of_multimodal_models_match_by_the_names_of_all_libraries() {
    let desk = Desk::new();
    let both = ["language_model.model", "model.language_model"];
    for (stored, names) in [(both[0], both), (both[1], both), ("text_model.model", ["text_model.model", "model.text_model"])] {
        let module = |name: &str, layer: usize, module: &str| format!("{name}.layers.{layer}.{module}");
        let vision = "vision_tower.encoder.layers.0.self_attn.q_proj";
        let [q, down, q1, down1] =
            [(0, "self_attn.q_proj"), (0, "mlp.down_proj"), (1, "self_attn.q_proj"), (1, "mlp.down_proj")].map(|(at, name)| module(stored, at, name));
        let shapes: [(&str, &[usize]); 5] = [(&q, &[128, 128]), (&down, &[128, 160]), (&q1, &[128, 128]), (&down1, &[128, 160]), (vision, &[128, 128])];
        let input = folder(&desk, &json!({ "model_type": "llava", "text_config": {}, "vision_config": {} }), &shapes);
        let (config, _) = quantized(&desk, &input, json!({ "scheme": "W4A16" }));
        let (ignoring, _) = quantized(&desk, &input, json!({ "scheme": "W8A8", "ignore": ["*layers.0.mlp*"] }));
        for name in names {
            for layer in 0..2 {
                assert_eq!(group_sizes(&config, &module(name, layer, "self_attn.q_proj")), [json!(128)], "{stored} {name}: {config}");
                assert_eq!(group_sizes(&config, &module(name, layer, "mlp.down_proj")), [json!(32)], "{stored} {name}: {config}");
                assert!(!matching(&ignoring["ignore"], &module(name, layer, "self_attn.q_proj")), "{stored} {name}: {ignoring}");
                assert_eq!(matching(&ignoring["ignore"], &module(name, layer, "mlp.down_proj")), layer == 0, "{stored} {name}: {ignoring}");
            }
        }
        for config in [config, ignoring] {
            assert!(group_sizes(&config, vision).is_empty() && matching(&config["ignore"], &format!("model.{vision}")), "{config}");
        }
    }
}

/// transformers adds heads that are tied to an embedding and have no tensor. A quantized head is not ignored.
#[test]
fn heads_without_a_tensor_are_ignored() {
    let desk = Desk::new();
    let body: [(&str, &[usize]); 2] = [("model.embed_tokens", &[48, 32]), ("model.layers.0.fc1", &[32, 32])];
    for (model_type, head) in [
        ("esm", "lm_head.decoder"),
        ("longformer", "lm_head.decoder"),
        ("biogpt", "output_projection"),
        ("convbert", "generator_lm_head"),
        ("trocr", "output_projection"),
        ("llama", "lm_head"),
        ("unheard-of", "language_model.lm_head"),
        ("bert", "cls.predictions.decoder"),
    ] {
        let config = |shapes: Shapes, targets: &[&str]| {
            let input = folder(&desk, &json!({ "model_type": model_type }), shapes);
            quantized(&desk, &input, json!({ "scheme": "FP8-DYNAMIC", "targets": targets })).0
        };
        let tied = config(&body, &["*fc1*"]);
        assert!(matching(&tied["ignore"], head), "{model_type}: {tied}");
        assert!(!matching(&tied["ignore"], "model.layers.0.fc1"), "{model_type}: {tied}");
        let stored = config(&[body[0], body[1], (head, &[48, 32])], &["*fc1*", &format!("{head}*")]);
        assert!(!matching(&stored["ignore"], head), "{model_type}: {stored}");
    }
}

/// A head that is tied to a quantized embedding shares its codes, and has copies of its scales and zero
/// points.
#[test]
fn tied_heads_have_the_scales_of_the_embedding() {
    let desk = Desk::new();
    // More elements than a block has, and an incomplete block of rows.
    let shapes: Shapes = &[("model.embed_tokens", &[1100, 128]), ("model.layers.0.self_attn.q_proj", &[128, 128])];
    let input = folder(&desk, &json!({ "model_type": "llama", "tie_word_embeddings": true }), shapes);
    for (scheme, shape) in [("W8A8", [1100, 1]), ("W4A16-ASYM", [1100, 1]), ("FP8-BLOCK", [9, 1]), ("MXFP8A16", [1100, 4])] {
        let pass: Quantize = serde_json::from_value(json!({ "scheme": scheme, "observer": "minmax", "targets": ["*"] })).unwrap();
        let out = desk.run(&input, pipeline().pass(pass)).unwrap();
        let tensors = read(&out.path);
        let part = |module: &str, part: &str| tensors.get(&format!("{module}.{part}"));
        for name in ["weight_scale", "weight_zero_point"] {
            assert_eq!(part("lm_head", name), part("model.embed_tokens", name), "{scheme}: {name}");
        }
        assert_eq!(part("lm_head", "weight_scale").unwrap().shape, shape, "{scheme}");
        compress::Model::open(&out.path).unwrap();
    }
}

/// Linear layers with names like those of embedding tables. Some of them are in families of the table.
#[test]
fn every_matrix_that_is_not_quantized_is_ignored() {
    let desk = Desk::new();
    for (model_type, module) in [
        ("rembert", "rembert.encoder.embedding_hidden_mapping_in"),
        ("fnet", "fnet.embeddings.projection"),
        ("convbert", "convbert.embeddings_project"),
        ("electra", "electra.embeddings_project"),
        ("siglip2", "vision_model.embeddings.patch_embedding"),
        ("prophetnet", "prophetnet.decoder.layers.0.self_attn.relative_pos_embeddings"),
        ("bert", "bert.embeddings.word_embeddings"),
    ] {
        let input = folder(&desk, &json!({ "model_type": model_type }), &[(module, &[32, 32]), ("encoder.layer.0.dense", &[32, 32])]);
        let ignore = quantized(&desk, &input, json!({ "scheme": "FP8-DYNAMIC" })).0["ignore"].clone();
        let in_base_model = module.split_once('.').unwrap().1;
        assert!(matching(&ignore, module) && matching(&ignore, in_base_model), "{model_type}: {ignore}");
        assert!(!matching(&ignore, "encoder.layer.0.dense"), "{model_type}: {ignore}");
    }
}

#[test]
fn routers_that_transformers_renames_are_ignored() {
    let desk = Desk::new();
    let expert = "model.layers.0.block_sparse_moe.experts.0.w1";
    let shapes: [(&str, &[usize]); 2] = [("model.layers.0.block_sparse_moe.gate", &[4, 32]), (expert, &[32, 32])];
    let input = folder(&desk, &json!({ "model_type": "phimoe" }), &shapes);
    let ignore = quantized(&desk, &input, json!({ "scheme": "FP8-DYNAMIC" })).0["ignore"].clone();
    let is_ignored = ["model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router", expert].map(|module| matching(&ignore, module));
    assert_eq!(is_ignored, [true, true, false], "{ignore}");
}

/// transformers 5 gives other names to the heads of GPT-NeoX and Mistral 3, and adds the pooler of BERT.
#[test]
fn heads_and_poolers_match_by_the_names_of_transformers() {
    let desk = Desk::new();
    let config = |name: &str, options: Value| quantized(&desk, &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name), options).0;
    let head = config("gpt-neox", json!({ "scheme": "W8A16", "group_size": 8, "targets": ["*embed_out*"] }));
    assert_eq!(["embed_out", "lm_head"].map(|name| matching(&head["ignore"], name)), [false, false], "{head}");
    let layers = config("gpt-neox", json!({ "scheme": "W8A16", "group_size": 8 }));
    assert_eq!(["embed_out", "lm_head"].map(|name| matching(&layers["ignore"], name)), [true, true], "{layers}");
    let tied = config("mistral3", json!({ "scheme": "W8A16", "group_size": 8, "targets": ["*embed_tokens*"] }));
    for name in ["lm_head", "language_model.lm_head", "model.lm_head"] {
        assert!(matching(&tied["config_groups"]["group_0"]["targets"], name), "{name}: {tied}");
    }
    for (name, is_ignored) in [("bert-no-pooler", true), ("vit-no-pooler", true), ("bert", false)] {
        let config = config(name, json!({ "scheme": "W8A8" }));
        assert_eq!(matching(&config["ignore"], "pooler.dense"), is_ignored, "{name}: {config}");
    }
}

/// Notes about the folder of a quantized model: each case lists weights, options, and a part of the expected
/// note.
#[test]
fn notes_name_libraries_that_do_not_load_a_folder() {
    let desk = Desk::new();
    let dense: Shapes = &[("model.layers.0.self_attn.q_proj", &[32, 32])];
    let separate: Shapes = &[("model.layers.0.self_attn.q_proj", &[32, 32]), ("model.layers.0.mlp.experts.0.down_proj", &[32, 32])];
    let stacked: Shapes = &[("model.layers.0.self_attn.q_proj", &[32, 32]), ("model.layers.0.feed_forward.experts.down_proj", &[2, 32, 32])];
    let attention: Shapes =
        &[("model.layers.0.self_attn.q_proj", &[128, 128]), ("model.layers.0.self_attn.k_proj", &[64, 128]), ("model.layers.0.self_attn.v_proj", &[64, 128])];
    let feed_forward: Shapes =
        &[("model.layers.0.mlp.gate_proj", &[128, 128]), ("model.layers.0.mlp.up_proj", &[100, 128]), ("model.layers.0.mlp.down_proj", &[128, 100])];
    let multiples: Shapes =
        &[("model.layers.0.mlp.gate_proj", &[192, 128]), ("model.layers.0.mlp.up_proj", &[192, 128]), ("model.layers.0.mlp.down_proj", &[128, 192])];
    let tied: Shapes = &[("model.embed_tokens", &[48, 32]), dense[0]];
    let pair: Shapes = &[separate[0], separate[1], ("model.layers.0.mlp.experts.1.down_proj", &[32, 32])];
    let router: Shapes = &[separate[0], separate[1], ("model.layers.0.mlp.gate", &[4, 32])];
    let options = |scheme: &str| json!({ "scheme": scheme });
    let all = |scheme: &str| json!({ "scheme": scheme, "targets": ["*"] });
    let without = |scheme: &str, ignore: &str| json!({ "scheme": scheme, "ignore": [ignore] });
    for (model_type, shapes, options, note, is_expected) in [
        ("olmoe", separate, without("W4A16", "*experts*"), "float experts in separate tensors", true),
        ("olmoe", separate, without("W8A8", "*experts*"), "float experts in separate tensors", true),
        ("olmoe", separate, without("FP8-DYNAMIC", "*experts*"), "float experts in separate tensors", false),
        ("olmoe", separate, options("W8A8"), "which fails for these weights", true),
        ("olmoe", separate, options("FP8-DYNAMIC"), "computes them with float activations", true),
        ("olmoe", separate, options("W4A16"), "quantized experts", false),
        ("olmoe", dense, options("W4A16"), "experts", false),
        ("olmoe", pair, without("FP8-DYNAMIC", "*experts.1.*"), "experts of a layer with different schemes", true),
        ("olmoe", pair, without("FP8-DYNAMIC", "*q_proj*"), "experts of a layer with different schemes", false),
        ("olmoe", router, all("FP8-DYNAMIC"), "quantized routers, as `model.layers.0.mlp.gate`", true),
        ("olmoe", router, options("FP8-DYNAMIC"), "quantized routers", false),
        ("unheard-of", router, all("FP8-DYNAMIC"), "quantized routers", false),
        ("t5", dense, options("W4A16"), "packed weights, as of", true),
        ("t5", dense, options("W8A8"), "packed weights, as of", false),
        ("opt", &[("model.decoder.embed_positions", &[48, 32]), dense[0]], all("W4A16"), "transformers fails for those of positions", true),
        ("llama4_text", stacked, options("W8A16"), "leaves these uninitialized", true),
        ("gpt_oss", stacked, options("W8A16"), "leaves these uninitialized", false),
        ("fnet", &[("fnet.embeddings.projection", &[32, 32]), ("encoder.layer.0.dense", &[32, 32])], options("W8A8"), "not in the table of families", true),
        ("fnet", dense, options("W8A8"), "not in the table of families", false),
        ("llama", &[("model.embed_tokens", &[32, 32]), dense[0]], options("W8A8"), "not in the table of families", false),
        (
            "llama",
            attention,
            without("W8A8", "*v_proj*"),
            "fuses `model.layers.0.self_attn.q_proj+k_proj+v_proj`, and these layers have different schemes",
            true,
        ),
        ("unheard-of", attention, without("W4A16", "*q_proj*"), "different schemes", true),
        ("llama", attention, options("W8A8"), "vLLM rejects", false),
        ("llama", feed_forward, without("W8A8", "*down_proj*"), "vLLM rejects", false),
        ("llama", attention, options("FP8-BLOCK"), "fuses `model.layers.0.self_attn.q_proj+k_proj+v_proj`, and the outputs", true),
        // Only the last of the fused layers may have any number of outputs.
        ("llama", feed_forward, options("FP8-BLOCK"), "vLLM rejects", false),
        ("llama", dense, options("W2A16-ASYM"), "packed zero points: vLLM does not support them with 2 bits", true),
        ("llama", dense, options("W3A16-ASYM"), "packed zero points: vLLM does not support them with 3 bits", true),
        ("llama", dense, options("W4A16-ASYM"), "packed zero points: vLLM loads them", true),
        ("llama", dense, options("W4A16-ASYM"), "more than one group size", false),
        ("llama", feed_forward, options("W4A16-ASYM"), "transformers does not load them in more than one group size or scheme", true),
        // vLLM loads the scheme with four bits in groups of several sizes.
        ("llama", multiples, options("W4A16-ASYM"), "more than one group size", true),
        ("llama", multiples, options("W3A16-ASYM"), "transformers loads them only with `CompressedTensorsConfig(dequantize=True)`", true),
        ("llama", multiples, options("W2A16-ASYM"), "more than one group size", false),
        ("llama", multiples, json!({ "scheme": "W2A16-ASYM", "group_size": 128 }), "more than one group size", true),
        ("llama", feed_forward, options("W3A16-ASYM"), "more than one group size", true),
        ("llama", tied, all("W4A16-ASYM"), "transformers cannot load the folder, because the embeddings are quantized too: add them to `ignore`", true),
        ("llama", tied, all("W4A16-ASYM"), "transformers 5 loads them", false),
        ("llama", tied, options("W4A16-ASYM"), "transformers cannot load the folder", false),
        ("llama", tied, all("W4A16"), "quantized embeddings: transformers 5 loads them", true),
        ("llama", dense, options("W2A16"), "weights of 2 bits: only recent versions of vLLM", true),
        ("llama", dense, options("W8A16"), "recent versions of vLLM", false),
    ] {
        let input = folder(&desk, &json!({ "model_type": model_type }), shapes);
        let (_, notes) = quantized(&desk, &input, options.clone());
        assert_eq!(notes.iter().any(|found| found.contains(note)), is_expected, "{model_type} {options}: {notes:?}");
    }
}

/// Weights that are dequantized to bfloat16 require a model with this dtype, also if `cast` has set it after
/// `quantize`.
#[test]
fn the_note_about_bfloat16_depends_on_the_written_dtype() {
    let desk = Desk::new();
    let config = json!({ "model_type": "llama", "dtype": "float32" });
    let input = folder(&desk, &config, &[("model.layers.0.self_attn.q_proj", &[32, 32]), ("model.embed_tokens", &[48, 32])]);
    let quantize = || -> Quantize { serde_json::from_value(json!({ "scheme": "MXFP4A16" })).unwrap() };
    let cast: Cast = serde_json::from_value(json!({ "to": "bf16" })).unwrap();
    for (builder, is_expected) in [(pipeline().pass(quantize()), true), (pipeline().pass(quantize()).pass(cast), false)] {
        let notes = desk.run(&input, builder).unwrap().report.notes;
        assert_eq!(notes.iter().any(|note| note.contains("in a model that is not bfloat16")), is_expected, "{notes:?}");
    }
}

/// `quantization_config` of a mixture of an unknown family: heads, routers and experts in tensors of
/// rank 3 stay dense, and `ignore` lists them in the forms that vLLM and transformers look up.
#[test]
fn a_quantization_config_ignores_every_dense_module() {
    let desk = Desk::new();
    let shapes: [(&str, &[usize]); 11] = [
        ("model.embed_tokens", &[48, 32]),
        ("model.layers.0.self_attn.q_proj", &[32, 32]),
        ("model.layers.0.mixer.gate", &[2, 32]),
        ("model.layers.0.mixer.experts.gate_up_proj", &[2, 16, 32]),
        ("model.layers.0.mixer.experts.down_proj", &[2, 32, 8]),
        ("model.layers.1.mixer.down_proj", &[32, 64]),
        // As in Step-3: only the router next to them says that they are experts.
        ("model.layers.2.moe.gate", &[2, 32]),
        ("model.layers.2.moe.up_proj.weight", &[2, 16, 32]),
        ("model.layers.2.moe.down_proj.weight", &[2, 32, 16]),
        ("model.norm.weight", &[32]),
        ("output", &[48, 32]),
    ];
    let input = folder(&desk, &json!({ "model_type": "unheard-of" }), &shapes);
    let options = json!({ "scheme": "FP8-DYNAMIC" });
    let pass: Quantize = serde_json::from_value(options.clone()).unwrap();
    let plan = pipeline().pass(pass).build().unwrap().plan(&compress::Model::open(&input).unwrap()).unwrap();
    let (mut described, _) = quantized(&desk, &input, options);
    let unchanged =
        |note: &String| note.contains("quantize leaves unchanged: the output head `output.weight`, 2 routers (the first: `model.layers.0.mixer.gate.weight`)");
    assert!(plan.notes.iter().any(unchanged), "{:?}", plan.notes);
    assert!(described["producer"].as_str().unwrap().starts_with("compress "));
    described["producer"] = Value::Null;
    let arguments = |strategy: &str, dynamic: bool| json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy, "dynamic": dynamic });
    let expected = json!({
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": { "group_0": {
            "targets": ["Linear"], "weights": arguments("channel", false), "input_activations": arguments("token", true), "output_activations": null,
            "format": "float-quantized",
        } },
        "ignore": [
            "model.embed_tokens", r"re:(.*\.)?embed_tokens$",
            "model.layers.0.mixer.gate", r"re:(.*\.)?layers\.0\.mixer\.gate$", "model.layers.2.moe.gate", r"re:(.*\.)?layers\.2\.moe\.gate$", "output",
            r"re:(.*\.)?layers\.0\.mixer\.experts(\..*)?$", r"re:(.*\.)?layers\.2\.moe\.experts(\..*)?$",
            r"re:(.*\.)?(lm_head|cls\.predictions\.decoder|predictions\.decoder|classifier|score|qa_outputs|ctc_head|decoder|embed_out|generator_lm_head|head|lm_head\.decoder|lm_head\.out_proj|lm_loss|output|output_projection|pred_layer\.proj|proj_out|unembedding_projection|vocab_projector|pooler\.dense)$",
        ],
        "kv_cache_scheme": null,
        "global_compression_ratio": null,
        "version": "0.13.0",
        "producer": null,
    });
    assert_eq!(described, expected, "{described:#}");
}
