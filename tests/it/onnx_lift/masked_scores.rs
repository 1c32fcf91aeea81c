//! Attention scores that `Where` replaces by a minimum.

use compress::pass::{PruneStructured, Step};
use compress::{Model, Pipeline};
use compress_onnx::proto::{DataType, TensorProto};
use prost::Message;

use super::attention::{HEADS, TOKENS, WIDTH, between_layers, changed, forms, guard, one, opened, ops};
use crate::common::nodes::{close, executed, given, in_runtime, sample};

/// Scores that `Where` replaces by a minimum, also if all keys of a query are masked, and before a second
/// mask.
#[test]
fn scores_that_are_replaced_where_masked_are_attention_with_a_bias() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let inputs = sample(&[0, TOKENS, HEADS * WIDTH]);
    // The last query sees no key in `none`.
    let causal = |at: i64| at % TOKENS <= at / TOKENS;
    let none = |at: i64| causal(at) && at / TOKENS < TOKENS - 1;
    let booleans = |name: &str, is_true: &dyn Fn(i64) -> bool| TensorProto {
        data_type: Some(DataType::Bool as i32),
        raw_data: Some((0..TOKENS * TOKENS).map(|at| u8::from(is_true(at))).collect()),
        ..given(name, &[1, 1, TOKENS, TOKENS], &[])
    };
    let form = forms().swap_remove(1).1;
    let replaced = |mask: &str, kept: bool, output: &str| {
        let inputs = if kept { [mask, "d", "lowest"] } else { [mask, "lowest", "d"] };
        one("Where", &inputs, output)
    };
    let alone = |mask: &str, kept: bool| changed(&form, "s", |node| *node = replaced(mask, kept, "s"));
    let mut summed = changed(&form, "s", |node| node.input = vec!["w".into(), "mask".into()]);
    summed.insert(6, replaced("causal", true, "w"));
    assert_eq!(summed[7].output, ["s"]);
    let guarded = [changed(&alone("none", true), "c", |node| node.input[0] = "g".into()), guard()].concat();
    for (what, nodes, lowest, is_fused) in [
        ("a causal mask", alone("causal", true), f32::MIN, true),
        ("a mask of hidden keys", alone("hidden", false), f32::MIN, true),
        ("infinity", alone("causal", true), f32::NEG_INFINITY, true),
        ("a query without keys", alone("none", true), f32::MIN, true),
        ("a query without keys, and infinity", alone("none", true), f32::NEG_INFINITY, true),
        ("a query without keys that is zero", guarded, f32::NEG_INFINITY, true),
        ("a second mask", summed, f32::MIN, true),
        // Adding a score changes these numbers, so that a query without keys would attend differently.
        ("a larger minimum", alone("none", true), -1e4, false),
        ("a large number", alone("causal", true), 1e35, false),
        ("scores in both places", changed(&form, "s", |node| *node = one("Where", &["causal", "d", "d"], "s")), f32::MIN, false),
    ] {
        let mut file = between_layers(nodes);
        let graph = file.graph.as_mut().unwrap();
        let read = |name: &str| graph.node.iter().any(|node| node.input.iter().any(|input| input == name));
        let constants = [
            booleans("causal", &causal),
            booleans("hidden", &|at| !causal(at)),
            booleans("none", &none),
            TensorProto { dims: vec![], ..given("lowest", &[], &[lowest]) },
        ];
        let constants: Vec<TensorProto> = constants.into_iter().filter(|constant| read(constant.name())).collect();
        graph.initializer.extend(constants);
        let (folder, model) = opened(&file);
        assert_eq!(ops(&model).contains(&"Attention".to_owned()), is_fused, "{what}: {}", model.graph().unwrap());
        let (_, ours) = executed(model.clone(), &inputs).unwrap();
        let (_, theirs) = in_runtime(&folder.path().join("model.onnx"), &inputs);
        assert!(ours.iter().zip(&theirs).all(|(a, b)| (a.is_nan() && b.is_nan()) || (a - b).abs() < 1e-5), "{what}: {ours:?} for {theirs:?}");
        // Unchanged parts are preserved, and the fused op is written with its bias.
        let again = folder.path().join("again.onnx");
        Pipeline::builder().measure(false).build().unwrap().run(model.clone(), &again).unwrap();
        assert!(std::fs::read(&again).unwrap() == file.encode_to_vec(), "{what}");
        if what == "a causal mask" {
            let step: Step = serde_json::from_str::<PruneStructured>(r#"{ "amount": 0.5, "dims": ["heads"] }"#).unwrap().into();
            let out = folder.path().join("out.onnx");
            Pipeline::builder().pass(step).threads(2).build().unwrap().run(model, &out).unwrap();
            close("pruned", &executed(Model::open(&out).unwrap(), &inputs).unwrap(), &in_runtime(&out, &inputs));
        }
    }
}
