//! `rules` of `quantize`: several schemes in one pass.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;

use compress::pass::{Quantize, Step};
use compress::recipe::Recipe;
use compress::{Model, Pipeline, Report};
use serde_json::json;

use crate::low_bits::{llama, quantize, samples};

/// Runs the passes. Returns the tensors, and the report.
fn run(folder: &Path, name: &str, passes: Vec<Quantize>) -> compress::Result<(BTreeMap<String, Vec<u8>>, Report)> {
    let out = folder.join(name);
    let builder = Pipeline::builder().passes(passes.into_iter().map(Step::from)).calibration(samples(folder)).threads(2).measure(false);
    let report = builder.build()?.run(Model::open(folder.join("llama"))?, &out)?;
    Ok((tensors(&out), report))
}

fn tensors(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

#[test]
fn rules_are_the_same_as_separate_passes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    llama(folder);
    let rules = json!([{"targets": ["*down_proj*"], "scheme": "W8A16", "group_size": 32}, {"targets": ["*mlp*"], "scheme": "FP8-DYNAMIC"}]);
    let (mixed, report) = run(folder, "mixed", vec![quantize(json!({"scheme": "W4A16", "method": "rtn", "group_size": 32, "rules": rules}))]).unwrap();
    let separate = [
        json!({"scheme": "W8A16", "group_size": 32, "targets": ["*down_proj*"]}),
        json!({"scheme": "FP8-DYNAMIC", "targets": ["*gate_proj*", "*up_proj*"]}),
        json!({"scheme": "W4A16", "method": "rtn", "group_size": 32, "ignore": ["*mlp*"]}),
    ];
    let (passes, _) = run(folder, "separate", separate.map(quantize).to_vec()).unwrap();
    assert!(mixed == passes, "{:?} {:?}", mixed.keys(), passes.keys());
    let config = |name: &str| std::fs::read_to_string(folder.join(name).join("config.json")).unwrap();
    assert_eq!(config("mixed"), config("separate"));
    let encodings: BTreeMap<&str, &str> = report.layers.iter().map(|layer| (layer.name.as_str(), layer.encoding.as_str())).collect();
    assert_ne!(encodings["model.layers.1.mlp.down_proj.weight"], encodings["model.layers.1.mlp.up_proj.weight"]);
    assert_ne!(encodings["model.layers.1.self_attn.q_proj.weight"], encodings["model.layers.1.mlp.down_proj.weight"]);
    // The recipe in the output states the options, and computes the same again.
    let recipe = Recipe::open(&folder.join("mixed/recipe.yaml"), &[]).unwrap();
    let again = folder.join("again");
    Pipeline::builder().recipe(&recipe).measure(false).build().unwrap().run(Model::open(&recipe.model).unwrap(), &again).unwrap();
    assert!(tensors(&again) == mixed);
}

/// GPTQ quantizes every layer in its scheme, on inputs that contain the errors of the layers before it.
#[test]
fn compensated_layers_have_the_scheme_of_their_rule() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    llama(folder);
    let gptq = |scheme: &str, rules: serde_json::Value| {
        let options = json!({"scheme": scheme, "group_size": 32, "method": "gptq", "propagation": 0.0, "damping": 0.01, "rules": rules});
        run(folder, "out", vec![quantize(options)]).map(|(tensors, _)| tensors)
    };
    let none = || json!([]);
    let rule = json!([{"targets": ["*self_attn*"], "scheme": "W8A16", "group_size": 32}]);
    let [four, eight, mixed] = [("W4A16", none()), ("W8A16", none()), ("W4A16", rule)].map(|(scheme, rules)| {
        let tensors = gptq(scheme, rules).unwrap();
        std::fs::remove_dir_all(folder.join("out")).unwrap();
        tensors
    });
    let first = |name: &str| format!("model.layers.0.{name}.weight_packed");
    let part = |name: &str| if mixed.contains_key(&first(name)) { first(name) } else { format!("model.layers.0.{name}.weight") };
    // The inputs of the first layers are those of the original model, the others follow from them.
    assert!(mixed[&part("self_attn.q_proj")] == eight[&part("self_attn.q_proj")]);
    assert!(mixed[&part("self_attn.o_proj")] == eight[&part("self_attn.o_proj")]);
    assert_eq!(mixed[&first("mlp.up_proj")].len(), four[&first("mlp.up_proj")].len());
    assert!(mixed[&first("mlp.up_proj")] != four[&first("mlp.up_proj")]);
}

#[test]
fn only_layers_with_static_scales_have_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    llama(folder);
    let rules = json!([{"targets": ["*down_proj*"], "scheme": "FP8"}]);
    let (mixed, _) = run(folder, "mixed", vec![quantize(json!({"scheme": "W4A16", "group_size": 32, "rules": rules}))]).unwrap();
    let scales: Vec<&String> = mixed.keys().filter(|name| name.ends_with("input_scale")).collect();
    assert_eq!(scales, ["model.layers.0.mlp.down_proj.input_scale", "model.layers.1.mlp.down_proj.input_scale"]);
    // They are found in the original model.
    let (whole, _) = run(folder, "whole", vec![quantize(json!({"scheme": "FP8"}))]).unwrap();
    assert!(scales.iter().all(|name| mixed[*name] == whole[*name]));
}

#[test]
fn rules_that_cannot_apply_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    llama(folder);
    let rule = |targets: &str, scheme: &str| json!([{"targets": [targets], "scheme": scheme}]);
    for (options, part) in [
        (json!({"rules": rule("*absent*", "W8A16")}), "*absent*"),
        (json!({"rules": rule("*embed_tokens*", "W8A16")}), "the rule of `*embed_tokens*` has no effect: no selected weight matches it"),
        (json!({"rules": [rule("*mlp*", "W8A16")[0], rule("*up_proj*", "W4A16")[0]]}), "the rule of `*up_proj*` has no effect: rules before it"),
        (json!({"rules": [{"targets": [], "scheme": "W8A16"}]}), "a rule has no `targets`"),
        (json!({"method": "gptq", "rules": rule("*mlp*", "FP8-BLOCK")}), "FP8-BLOCK supports only `method: rtn`"),
        (json!({"method": "awq", "rules": rule("*mlp*", "W8A8")}), "W4A16 and W8A8 differ"),
        (json!({"observer": "l4", "rules": rule("*mlp*", "NVFP4A16")}), "NVFP4A16 supports minmax and mse"),
        (json!({"rules": [{"targets": ["*mlp*"], "scheme": "FP8-DYNAMIC", "group_size": 32}]}), "`group_size` is not supported for FP8-DYNAMIC"),
        (json!({"rules": [{"targets": ["*mlp*"], "scheme": "W8A16", "group_size": 0}]}), "at least 1"),
    ] {
        let error = run(folder, "out", vec![quantize(options.clone())]).map(drop).unwrap_err();
        let text = format!("{error} {}", error.hint().unwrap_or_default());
        assert!(text.contains(part), "{options}: {text}");
    }
}
