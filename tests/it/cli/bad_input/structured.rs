//! Invalid structured pruning.

use super::{Case, case, check};
use crate::cli::support::{METADATA, f32s, file, golden_model, model};

fn family(name: &'static str, golden: &'static str, args: &'static str, code: i32, message: &'static str, hint: &'static str) -> Case {
    case(name, move |folder| golden_model(folder, golden, &[("labelled.csv", "texts.csv")]), args, code, message, hint)
}

#[test]
fn amounts() {
    check([
        family(
            "everything",
            "bert",
            "prune-structured in -o out --amount 1.0",
            2,
            "1.0 of 2 heads of `encoder.layer.0.attention.self.query` would remove all of them; possible amounts: 0, 0.5",
            "",
        ),
        family(
            "all neurons",
            "bert",
            "prune-structured in -o out --amount mlp=1.0",
            2,
            "1.0 of 28 mlp of …would remove all of them; possible amounts: 0, 0.1429, 0.4286, 0.7143",
            "",
        ),
        family("more units than there are", "bert", "prune-structured in -o out --amount heads=3", 2, "3 of 2 heads of …would remove all of them", ""),
        family(
            "part of a head",
            "bert",
            "prune-structured in -o out --amount 0.3",
            2,
            "0.3 of 2 heads of …is 0.60 heads, but only whole heads can be removed; possible amounts: 0, 0.5",
            "",
        ),
        family(
            "part of a shared head",
            "llama-grouped-tied",
            "prune-structured in -o out --dims heads --amount 0.25",
            2,
            "0.25 of 2 heads of …only whole heads can be removed; possible amounts: 0, 0.5",
            "",
        ),
        family(
            "all layers",
            "bert",
            "prune-structured in -o out --dims layers --amount 1.0",
            2,
            "1.0 of 2 layers would remove all of them; possible amounts: 0.5",
            "",
        ),
        family("above one", "bert", "prune-structured in -o out --amount 1.5", 2, "`1.5` is not a fraction from 0.0 to 1.0", ""),
        family(
            "an amount for an unselected dimension",
            "bert",
            "prune-structured in -o out --dims heads --amount mlp=0.5",
            2,
            "amount): contains mlp, which is not listed in `dims`",
            "",
        ),
        family(
            "a dimension without an amount",
            "bert",
            "prune-structured in -o out --dims heads,mlp --amount heads=0.5",
            2,
            "amount): contains no amount for mlp, which `dims` lists: add `mlp=AMOUNT`",
            "",
        ),
    ]);
}

#[test]
fn targets() {
    check([
        family("all of it", "bert", "prune-structured in -o out --target macs=1.0", 2, "macs 1 is not between 0 and 1", ""),
        family("nothing of it", "bert", "prune-structured in -o out --target macs=0", 2, "macs 0 is not between 0 and 1", ""),
        family("out of reach", "bert", "prune-structured in -o out --target macs=0.01", 2, "macs 0.01 cannot be reached: 0.", ""),
        family("of an unknown kind", "bert", "prune-structured in -o out --target flops=0.5", 2, "target `flops=0.5` is not macs=F", ""),
        family("and an amount", "bert", "prune-structured in -o out --target macs=0.5 --amount 0.5", 2, "target): excludes `amount`", ""),
        family("and layers", "bert", "prune-structured in -o out --target macs=0.5 --dims layers", 2, "target): cannot be combined with layers", ""),
        family("round_to of zero", "bert", "prune-structured in -o out --round-to 0", 2, "round_to): must be at least 1", ""),
    ]);
}

#[test]
fn models() {
    let foreign = r#"{ "inputs": { "x": { "element": "float", "shape": ["batch", 4] } },
        "nodes": [{ "name": "y", "op": "Foo", "inputs": ["x", "w"] }], "outputs": { "logits": "y" } }"#;
    check([
        family(
            "channels of a transformer",
            "bert",
            "prune-structured in -o out --dims channels",
            2,
            "dims: the model has no channels to remove; it has heads, mlp, hidden",
            "",
        ),
        family(
            "heads of a network of convolutions",
            "resnet-basic",
            "prune-structured in -o out --dims heads",
            2,
            "the model has no heads to remove; it has channels; not prunable: ",
            "",
        ),
        family(
            "layers of a network of convolutions",
            "resnet-basic",
            "prune-structured in -o out --dims layers --amount 1",
            2,
            "the model has no repeated layers",
            "",
        ),
        family("an unknown part", "bert", "prune-structured in -o out --dims legs", 2, "legs", ""),
        family(
            "a pattern without a match",
            "bert",
            "prune-structured in -o out --ignore *decoder*",
            2,
            "`ignore` pattern `*decoder*` matches no tensor",
            "`compress inspect` lists all names",
        ),
        family("nothing left", "bert", "prune-structured in -o out --ignore *", 2, "no group is selected", ""),
        family(
            "no calibration data",
            "bert",
            "prune-structured in -o out --importance taylor",
            2,
            "prune-structured: needs samples to run the model on: add `data: { calibration: ... }`",
            "",
        ),
        family("no data for a repair", "bert", "prune-structured in -o out --repair least-squares", 2, "needs samples to run the model on", ""),
        case(
            "a model of no known family",
            |folder| file(&folder.join("in"), METADATA, &[f32s("w", &[2, 2], &[1.0; 4])]),
            "prune-structured in -o out",
            1,
            "running a model without graph.json and without a model_type",
            "add a config.json",
        ),
        case(
            "an unknown op",
            move |folder| {
                model(&folder.join("in"));
                std::fs::write(folder.join("in/graph.json"), foreign).unwrap();
            },
            "prune-structured in -o out",
            1,
            "unknown op `Foo`, expected one of Linear",
            "",
        ),
        case(
            "a quantized model",
            |folder| {
                golden_model(folder, "bert", &[]);
                crate::cli::support::ok(folder, "quantize-dynamic in -o int8");
            },
            "prune-structured int8 -o out --amount 0.5",
            1,
            "is already int8 channel, so that parts of it cannot be removed",
            "quantize last",
        ),
    ]);
}
