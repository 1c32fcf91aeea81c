//! File types, and types of single tensors.

use std::collections::BTreeMap;
use std::path::Path;

use compress::export::{Export, FileType, Gguf, TensorType};
use compress::pass::{Cast, FloatFormat};
use compress::recipe::Recipe;
use compress::{Model, Pipeline, Report};
use compress_core::store::gguf::{GgufFile, Value};
use compress_core::store::{Pattern, Weight};

use super::importance::{Networks, run_export, tiny};
use super::written;

/// Row length of complete blocks of all types.
const LARGE: usize = 256;
/// Row length of complete blocks of 32, which are not complete blocks of 256.
const SMALL: usize = 64;

fn types(entries: &[(&str, TensorType)]) -> Vec<(Pattern, TensorType)> {
    entries.iter().map(|(pattern, kind)| (pattern.parse().unwrap(), *kind)).collect()
}

fn write(model: &Model, folder: &Path, file_type: FileType, entries: &[(&str, TensorType)]) -> compress::Result<Report> {
    let export = Gguf { file_type, types: types(entries), ..Gguf::default() };
    Pipeline::builder().export(export).measure(false).force(true).build()?.run(model.clone(), folder.join("out"))
}

/// Types of the tensors in the written file.
fn stored_types(folder: &Path) -> BTreeMap<String, String> {
    let file = GgufFile::open(&folder.join("out/model.gguf")).unwrap();
    let of = |weight: &Weight| weight.stored_type.map_or_else(|| weight.dtype.to_string(), str::to_owned);
    file.tensors.iter().map(|(name, weight)| (name.clone(), of(weight))).collect()
}

/// Sum of the squared errors of the layers.
fn squared_error(found: &Model, expected: &Model) -> f64 {
    let of = |(name, weight): (&String, &Weight)| {
        let (now, before) = (found.weights.by_name[name].floats(name).unwrap(), weight.floats(name).unwrap());
        now.iter().zip(&before).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
    };
    expected.weights.by_name.iter().filter(|(name, _)| name.contains("layers")).map(of).sum()
}

#[test]
fn file_types_are_written_and_read() {
    let source = tempfile::tempdir().unwrap();
    let model = tiny(source.path(), Networks::Plain, LARGE);
    // Checks the types of the file and returns its error.
    let error = |file_type: FileType, id: u64, kind: &str| {
        let (folder, found, _) = written(model.clone(), file_type);
        let file = GgufFile::open(&folder.path().join("out/model.gguf")).unwrap();
        assert_eq!(file.values["general.file_type"], Value::Unsigned(id), "{file_type:?}");
        let stored = stored_types(folder.path());
        assert_eq!((stored["blk.0.attn_q.weight"].as_str(), stored["blk.0.attn_norm.weight"].as_str()), (kind, "F32"), "{file_type:?}");
        squared_error(&found, &model)
    };
    let errors = [
        error(FileType::Q2_K, 10, "Q2_K"),
        error(FileType::Q3_K_S, 11, "Q3_K"),
        error(FileType::Q3_K_M, 12, "Q3_K"),
        error(FileType::Q3_K_L, 13, "Q3_K"),
        error(FileType::Q4_K_S, 14, "Q4_K"),
        error(FileType::Q4_K_M, 15, "Q4_K"),
        error(FileType::Q5_K_S, 16, "Q5_K"),
        error(FileType::Q5_K_M, 17, "Q5_K"),
        error(FileType::Q6_K, 18, "Q6_K"),
        error(FileType::Q8_0, 7, "Q8_0"),
        error(FileType::F16, 1, "F16"),
    ];
    assert!(errors.is_sorted_by(|a, b| a > b), "{errors:?}");
    let four =
        [error(FileType::Q4_0, 2, "Q4_0"), error(FileType::Q4_1, 3, "Q4_1"), error(FileType::IQ4_NL, 25, "IQ4_NL"), error(FileType::IQ4_XS, 30, "IQ4_XS")];
    let five = [error(FileType::Q5_0, 8, "Q5_0"), error(FileType::Q5_1, 9, "Q5_1")];
    assert!(four.iter().all(|error| (errors[6]..errors[1]).contains(error)), "{four:?} {errors:?}");
    assert!(five.iter().all(|error| four.iter().all(|larger| error < larger) && *error > errors[9]), "{five:?} {four:?} {errors:?}");
}

#[test]
fn files_have_the_format_of_cast() {
    let source = tempfile::tempdir().unwrap();
    let model = tiny(source.path(), Networks::Plain, SMALL);
    let stored = |to: Option<FloatFormat>, targets: Vec<Pattern>| {
        let folder = tempfile::tempdir().unwrap();
        let cast = to.map(|to| Cast { to, targets, ..Cast::default() });
        let builder = Pipeline::builder().export(Gguf::default()).measure(false);
        let builder = cast.into_iter().fold(builder, |builder, cast| builder.pass(cast));
        builder.build().unwrap().run(model.clone(), folder.path().join("out")).unwrap();
        stored_types(folder.path())["blk.0.attn_q.weight"].clone()
    };
    let found = [None, Some(FloatFormat::F32), Some(FloatFormat::Bf16), Some(FloatFormat::F16)].map(|to| stored(to, Vec::new()));
    assert_eq!(found, ["F16", "F32", "BF16", "F16"]);
    assert_eq!(stored(Some(FloatFormat::F32), vec!["*q_proj*".parse().unwrap()]), "F16", "a conversion of some tensors does not choose the type of the file");
}

#[test]
fn single_tensors_have_the_requested_types() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, LARGE);
    let entries = [
        ("blk.0.ffn_up", TensorType::Q8_0),
        ("model.layers.*.mlp.*", TensorType::Q5_K),
        ("token_embd.weight", TensorType::F16),
        (r"re:.*\.attn_[qk]$", TensorType::Q2_K),
        ("model.layers.0.self_attn.o_proj", TensorType::BF16),
    ];
    let report = write(&model, folder.path(), FileType::Q4_K_M, &entries).unwrap();
    let stored = stored_types(folder.path());
    for (name, kind) in [
        ("token_embd", "F16"),
        ("blk.0.attn_norm", "F32"),
        ("blk.0.attn_q", "Q2_K"),
        ("blk.0.attn_k", "Q2_K"),
        ("blk.0.attn_v", "Q6_K"),
        ("blk.0.attn_output", "BF16"),
        ("blk.0.ffn_gate", "Q5_K"),
        ("blk.0.ffn_up", "Q8_0"),
        ("blk.0.ffn_down", "Q5_K"),
    ] {
        assert_eq!(stored[&format!("{name}.weight")], kind, "{name}");
    }
    assert!(report.layers.iter().any(|layer| layer.name == "model.layers.0.mlp.up_proj.weight" && layer.encoding == "q8_0"));
    assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
    let file = GgufFile::open(&folder.path().join("out/model.gguf")).unwrap();
    assert_eq!(file.values["general.file_type"], Value::Unsigned(15));
}

#[test]
fn experts_of_a_tensor_have_the_same_type() {
    for (networks, entry) in [(Networks::Apart, "blk.*.ffn_gate_exps"), (Networks::Together, "blk.*.ffn_gate_exps"), (Networks::Apart, "*.experts.*.w1")] {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny(folder.path(), networks, SMALL);
        write(&model, folder.path(), FileType::F16, &[(entry, TensorType::Q8_0)]).unwrap();
        let stored = stored_types(folder.path());
        let found = ["blk.0.ffn_gate_exps", "blk.1.ffn_gate_exps", "blk.1.ffn_up_exps"].map(|name| stored[&format!("{name}.weight")].clone());
        assert_eq!(found, ["Q8_0", "Q8_0", "F16"], "{entry}");
    }
    // One tensor of the model that becomes two in the file.
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Together, SMALL);
    write(&model, folder.path(), FileType::F16, &[("model.layers.0.mlp.experts.gate_up_proj", TensorType::Q4_1)]).unwrap();
    let stored = stored_types(folder.path());
    let found = ["blk.0.ffn_gate_exps", "blk.0.ffn_up_exps", "blk.0.ffn_down_exps"].map(|name| stored[&format!("{name}.weight")].clone());
    assert_eq!(found, ["Q4_1", "Q4_1", "F16"]);
}

#[test]
fn entries_without_an_effect_are_rejected() {
    let large = tempfile::tempdir().unwrap();
    let small = tempfile::tempdir().unwrap();
    let experts = tempfile::tempdir().unwrap();
    let plain = (tiny(large.path(), Networks::Plain, LARGE), large.path());
    let narrow = (tiny(small.path(), Networks::Plain, SMALL), small.path());
    let mixture = (tiny(experts.path(), Networks::Apart, SMALL), experts.path());
    let rejected = |(model, folder): &(Model, &Path), entries: &[(&str, TensorType)], words: &str| {
        let error = write(model, folder, FileType::F16, entries).map(|_| ()).unwrap_err();
        let text = format!("{error}; {}", error.hint().unwrap_or_default());
        assert!(text.contains(words), "`{text}` does not contain `{words}`");
    };
    rejected(&plain, &[("blk.*.ffn_donw", TensorType::Q6_K)], "`types` pattern `blk.*.ffn_donw` matches no tensor");
    rejected(&plain, &[("blk.0.ffn_dwn", TensorType::Q6_K)], "did you mean `blk.0.ffn_down");
    rejected(&plain, &[("output", TensorType::Q6_K)], "`output` matches no tensor, because the head is tied to the embedding table: use `token_embd`");
    rejected(&plain, &[("*norm*", TensorType::Q8_0)], "`*norm*` matches only vectors, norms and routers");
    rejected(&plain, &[("*", TensorType::Q8_0), ("blk.0.*", TensorType::Q6_K)], "`blk.0.*` has no effect, because earlier patterns match");
    rejected(&mixture, &[("*.ffn_gate_inp", TensorType::Q8_0)], "matches only vectors, norms and routers");
    rejected(&mixture, &[("*.experts.0.w1", TensorType::Q8_0)], "all experts of `blk.0.ffn_gate_exps.weight` have the same type");
    let unfit = &[("blk.*.ffn_down", TensorType::Q6_K)];
    rejected(&narrow, unfit, "tensor `model.layers.0.mlp.down_proj.weight`: has rows of 64 elements, which is not a multiple of 256");
    rejected(&narrow, unfit, "choose a type that fits its rows: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0, IQ4_NL");
}

#[test]
fn importance_applies_to_the_types_of_single_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, SMALL);
    let export = Gguf { file_type: FileType::Q8_0, types: types(&[("blk.*.attn_q", TensorType::Q4_0)]), ..Gguf::default() };
    let report = run_export(&model, folder.path(), export).unwrap();
    let options = &report.recipe["export"][0]["gguf"];
    assert_eq!((&options["importance"], &options["types"]["blk.*.attn_q"]), (&"activation".into(), &"Q4_0".into()));
    let weighted: Vec<&str> = report.layers.iter().filter(|layer| layer.encoding == "q4_0 by importance").map(|layer| layer.name.as_str()).collect();
    assert_eq!(weighted, ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"]);
    assert_eq!(report.layers.iter().filter(|layer| layer.encoding.contains("importance")).count(), 2);
}

#[test]
fn recipes_keep_the_order_of_types() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recipe.yaml");
    let text = |types: &str| format!("model: m\nexport:\n  - gguf: {{ type: Q4_K_M, types: {{ {types} }} }}\n");
    let parsed = |text: &str| Recipe::parse(text, &path);
    let valid = text(r#""blk.1.*": Q6_K, "*": Q8_0, "re:a[b]+": F16, output: IQ4_XS"#);
    let recipe = parsed(&valid).unwrap();
    let expected = types(&[("blk.1.*", TensorType::Q6_K), ("*", TensorType::Q8_0), ("re:a[b]+", TensorType::F16), ("output", TensorType::IQ4_XS)]);
    let held = |recipe: &Recipe| if let Export::Gguf(gguf) = &recipe.export[0] { gguf.types.clone() } else { Vec::new() };
    assert_eq!(held(&recipe), expected);
    assert_eq!(parsed(&recipe.to_yaml()).unwrap(), recipe);
    assert_eq!(serde_json::from_value::<Recipe>(serde_json::to_value(&recipe).unwrap()).unwrap(), recipe);
    std::fs::write(&path, &valid).unwrap();
    let changed = Recipe::open(&path, &[("gguf.type".into(), "Q8_0".into())]).unwrap();
    assert!(held(&changed) == expected && matches!(&changed.export[0], Export::Gguf(gguf) if gguf.file_type == FileType::Q8_0));
    let error = |types: &str| parsed(&text(types)).unwrap_err().to_string();
    let unknown = error("output: Q7_K");
    assert!(unknown.contains("Q7_K") && unknown.contains("`Q6_K`") && unknown.contains("`IQ4_XS`"), "{unknown}");
    assert!(error("output: Q6_K, output: Q8_0").contains("occurs twice"));
}
