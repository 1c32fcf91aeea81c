//! What PyTorch and compressed-tensors compute for small inputs (`scripts/goldens passes`), and what we make
//! of them.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use crate::common::{DType, Desk, Tensor, Tensors, all, pipeline, read};
use compress::export::{Layout, Safetensors};
use compress::pass::{Amount, Cast, FloatFormat, NOfM, Overflow, PruneUnstructured, Quantize, QuantizeDynamic, Scope};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

struct Case {
    values: Value,
    name: String,
    tensors: Tensors,
}

impl Case {
    fn get<T: DeserializeOwned>(&self, key: &str) -> T {
        serde_json::from_value(self.values[key].clone()).unwrap_or_else(|e| panic!("{}: {key}: {e}", self.name))
    }

    fn tensor(&self, part: &str) -> &Tensor {
        &self.tensors[&format!("{}/{part}", self.name)]
    }

    /// The tensors of one part, as the weights of a model.
    fn model(&self, part: &str) -> Tensors {
        let names: Vec<String> = self.get("tensors");
        (0..names.len()).map(|i| (format!("t{i}.weight"), self.tensor(&format!("{part}/{i}")).clone())).collect()
    }
}

/// Runs over every case of a file; fails when there are none.
fn check(file: &str, test: impl Fn(&Case)) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let text = std::fs::read_to_string(folder.join(format!("{file}.json"))).unwrap();
    let values: Value = serde_json::from_str(&text).unwrap();
    let mut tensors = read(&folder.join(format!("{file}.safetensors")));
    let cases = values["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for values in cases {
        let name = values["name"].as_str().unwrap().to_owned();
        let prefix = format!("{name}/");
        let held = tensors.iter().filter(|(key, _)| key.starts_with(&prefix)).map(|(key, tensor)| (key.clone(), tensor.clone())).collect();
        tensors.retain(|key, _| !key.starts_with(&prefix));
        test(&Case { values: values.clone(), name, tensors: held });
    }
    assert!(tensors.is_empty(), "tensors of no case: {:?}", tensors.keys());
}

fn one(tensor: &Tensor) -> Tensors {
    Tensors::from([("a.weight".into(), tensor.clone())])
}

#[test]
fn prune() {
    check("prune", |case| {
        let mut pass = PruneUnstructured { targets: all(), ..Default::default() };
        match case.get::<String>("kind").as_str() {
            "n_m" => pass.pattern = Some(NOfM { n: case.get("n"), m: case.get("m") }),
            kind => {
                pass.amount = Some(match case.get("amount") {
                    // PyTorch's whole numbers are counts, which need a unit here where they could be
                    // percentages.
                    Amount::Number(count) => Amount::Count(count),
                    amount => amount,
                });
                pass.scope = if kind == "global" { Scope::Global } else { Scope::Tensor };
            }
        }
        let (ours, theirs) = (Desk::new().apply(&case.model("in"), pass).unwrap(), case.model("out"));
        if case.values["ties"] == true {
            // Which of equals go is PyTorch's chance; how many, and what is left, is not.
            let kept = |tensors: &Tensors| {
                let mut magnitudes: Vec<u64> = tensors["t0.weight"].values().into_iter().map(|v| v.abs().to_bits()).collect();
                magnitudes.sort_unstable();
                magnitudes
            };
            assert_eq!(kept(&ours), kept(&theirs), "{}", case.name);
        } else {
            assert_eq!(ours, theirs, "{}", case.name);
        }
    });
}

/// Sums of squared errors, one for each scale.
fn errors(weight: &Tensor, q: &Tensor, scale: &Tensor, zero_point: Option<&Tensor>) -> Vec<f64> {
    let scales = scale.values();
    let zeros = zero_point.map_or(vec![0.0; scales.len()], Tensor::values);
    let run = weight.values().len() / scales.len();
    let mut sums = vec![0.0; scales.len()];
    for (i, (x, q)) in weight.values().into_iter().zip(q.values()).enumerate() {
        let back = (q - zeros[i / run]) as f32 * scales[i / run] as f32;
        sums[i / run] += (x - f64::from(back)).powi(2);
    }
    sums
}

#[test]
fn quantize() {
    check("quantize", |case| {
        let mut options = json!({ "granularity": case.get::<String>("strategy"), "symmetric": case.get::<bool>("symmetric"), "observer": case.get::<String>("observer"), "targets": ["*"] });
        if let Some(size) = case.values.get("group_size") {
            options["group_size"] = size.clone();
        }
        let pass: QuantizeDynamic = serde_json::from_value(options).unwrap();
        let symmetric = pass.symmetric;
        let (desk, weight) = (Desk::new(), case.tensor("weight"));
        let input = desk.weights(&one(weight));
        let ours = read(&desk.run(&input, pipeline().pass(pass.clone())).unwrap().path);
        let (q, scale, zero_point) = (&ours["a.weight"], &ours["a.weight_scale"], ours.get("a.weight_zero_point"));
        assert_eq!(zero_point.is_none(), symmetric, "{}", case.name);
        if case.get::<String>("observer") == "mse" {
            let theirs = case.tensor("error").values();
            for (ours, theirs) in errors(weight, q, scale, zero_point).into_iter().zip(theirs) {
                assert!(ours <= theirs * (1.0 + 1e-6), "{}: {ours} is more than {theirs}", case.name);
            }
            return;
        }
        if case.name.starts_with("tiny-") {
            // The reference gives such rows the least scale that it knows, and so makes zeros of them.
            let zero_points = (!symmetric).then(|| case.tensor("zero_point"));
            let theirs = errors(weight, case.tensor("q"), case.tensor("scale"), zero_points);
            for (ours, theirs) in errors(weight, q, scale, zero_point).into_iter().zip(theirs) {
                assert!(ours <= theirs * (1.0 + 1e-6), "{}: {ours} is more than {theirs}", case.name);
            }
            return;
        }
        assert_eq!(scale, case.tensor("scale"), "{}: scale", case.name);
        assert_eq!(q, case.tensor("q"), "{}: q", case.name);
        if !symmetric {
            assert_eq!(zero_point, Some(case.tensor("zero_point")), "{}: zero point", case.name);
        }
        let dense = desk.run(&input, pipeline().pass(pass).export(Safetensors::with_layout(Layout::Dense))).unwrap();
        let expected = Tensor::floats(weight.dtype, &weight.shape, &case.tensor("dequantized").values());
        assert_eq!(read(&dense.path)["a.weight"], expected, "{}: dequantized", case.name);
    });
}

#[test]
fn cast() {
    check("cast", |case| {
        let to: FloatFormat = serde_json::from_value(json!(case.get::<String>("to").to_lowercase())).unwrap();
        let cast = |tensor: &Tensor, overflow| Desk::new().apply(&one(tensor), Cast { to, overflow, targets: all(), ignore: Vec::new() });
        let (input, output) = (case.tensor("in"), case.tensor("out"));
        if case.get("overflow") {
            for bits in input.bits() {
                let alone = Tensor::from_bits(input.dtype, &[1], &[bits]);
                let error = cast(&alone, Overflow::Error).unwrap_err().to_string();
                assert!(error.contains("`a.weight`"), "{}: {alone:?}: {error}", case.name);
            }
            let largest = if to == FloatFormat::F16 { 0x7BFF } else { 0x7F7F };
            let saturated: Vec<u64> = output.bits().into_iter().map(|bits| bits & 0x8000 | largest).collect();
            assert_eq!(cast(input, Overflow::Saturate).unwrap()["a.weight"].bits(), saturated, "{}", case.name);
        } else {
            assert_eq!(cast(input, Overflow::Error).unwrap()["a.weight"], *output, "{}", case.name);
        }
    });
}

/// The bytes that compressed-tensors 0.20 writes for this matrix.
#[test]
fn words_of_a_scheme() {
    let weight = Tensor::floats(DType::F32, &[2, 8], &[-4.0, -3.5, -0.5, 0.0, 0.5, 1.0, 3.0, 3.5, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]);
    let desk = Desk::new();
    let input = desk.weights(&one(&weight));
    let written = |options: Value| {
        let pass: Quantize = serde_json::from_value(options).unwrap();
        read(&desk.run(&input, pipeline().pass(pass)).unwrap().path)
    };
    let words = |rows: usize, words: &[u32]| Tensor::from_bits(DType::I32, &[rows, words.len() / rows], &words.iter().map(|w| (*w).into()).collect::<Vec<_>>());
    let scales = |columns: usize, values: &[f64]| Tensor::floats(DType::F32, &[2, columns], values);

    let four = written(json!({ "scheme": "w4a16_asym", "group_size": 4, "observer": "minmax", "targets": ["*"] }));
    assert_eq!(four["a.weight_packed"], words(2, &[0xFD42_FD20, 0x05AF_9BDF]));
    assert_eq!(four["a.weight_zero_point"], words(1, &[0xF, 0]));
    assert_eq!(four["a.weight_scale"], scales(2, &[4.0, 3.5, 0.7, 0.3].map(|range: f32| (range / 15.0).into())));
    assert_eq!(four["a.weight_shape"].bits(), [2, 8]);

    let eight = written(json!({ "scheme": "W8A16", "group_size": -1, "targets": ["*"] }));
    assert_eq!(eight["a.weight_packed"], words(2, &[0x8070_1001, 0xF0E0_A090, 0xC9DB_EDFF, 0x8092_A4B7]));
    assert_eq!(eight["a.weight_scale"], scales(1, &[4.0, 0.7].map(|range: f32| (range / 127.5).into())));
    assert!(!eight.contains_key("a.weight_zero_point"));
}

/// The bytes that compressed-tensors 0.20 writes for FP8 and FP4, and what they stand for.
#[test]
fn narrow_floats_of_a_scheme() {
    let desk = Desk::new();
    let written = |weight: &Tensor, scheme: &str| {
        let pass: Quantize = serde_json::from_value(json!({ "scheme": scheme, "targets": ["*"] })).unwrap();
        read(&desk.run(&desk.weights(&one(weight)), pipeline().pass(pass)).unwrap().path)
    };
    let weight = Tensor::floats(DType::F32, &[2, 8], &[-4.0, -3.5, -0.5, 0.0, 0.5, 1.0, 3.0, 3.5, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]);
    let eight = written(&weight, "fp8_dynamic");
    let bytes = [0xFE, 0xFC, 0xE6, 0, 0x66, 0x6E, 0x7A, 0x7C, 0x7E, 0x7C, 0x7A, 0x78, 0x74, 0x70, 0x68, 0];
    assert_eq!(eight["a.weight"], Tensor::new(DType::F8_E4M3, &[2, 8], bytes.to_vec()));
    assert_eq!(eight["a.weight_scale"], Tensor::floats(DType::F32, &[2, 1], &[4.0, 0.7].map(|largest: f32| (largest / 448.0).into())));

    let values = [
        0.5, -1.0, 6.0, 0.0, -6.0, 3.0, 1.5, -0.5, 2.0, 4.0, -2.0, -3.0, -4.0, 1.0, 0.25, 0.3, // the second group
        0.1, 0.2, -0.3, 0.4, -0.5, 0.6, 0.7, 0.75, 0.05, -0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65,
    ];
    let row = Tensor::floats(DType::F32, &[1, 32], &values);
    let half = |bytes: [u8; 16]| Tensor::new(DType::U8, &[1, 16], bytes.to_vec());
    let first = [0xA1, 0x07, 0x5F, 0x93, 0x64, 0xDC, 0x2E, 0x10];
    let second = |bytes: [u8; 8]| half([first, bytes].concat().try_into().unwrap());
    let nv = written(&row, "NVFP4A16");
    assert_eq!(nv["a.weight_packed"], second([0x32, 0x5C, 0x6E, 0x77, 0x91, 0x42, 0x65, 0x76]));
    assert_eq!(nv["a.weight_scale"], Tensor::new(DType::F8_E4M3, &[1, 2], vec![0x7E, 0x66]));
    assert_eq!(nv["a.weight_global_scale"], Tensor::floats(DType::F32, &[1], &[448.0]));
    let mx = written(&row, "mxfp4a16");
    assert_eq!(mx["a.weight_packed"], second([0x00, 0x19, 0x19, 0x21, 0x80, 0x00, 0x11, 0x11]));
    assert_eq!(mx["a.weight_scale"], Tensor::new(DType::U8, &[1, 1], vec![0x7F]));
}

/// Widths that do not divide a word, MXFP6 and MXFP8, as compressed-tensors 0.20 writes them.
#[test]
fn schemes() {
    check("schemes", |case| {
        let (desk, integer) = (Desk::new(), case.values.get("group_size").is_some());
        let (format, bits) = (case.get::<String>("format"), case.get::<u8>("bits"));
        let theirs: Tensors = case
            .tensors
            .iter()
            .filter_map(|(name, tensor)| Some((name.split_once("/out/")?.1, tensor)))
            .map(|(part, tensor)| (format!("a.{part}"), tensor.clone()))
            .collect();
        // The schemes of more than three bits are symmetric.
        if !(integer && case.get("asymmetric") && bits > 3) {
            let mut options = json!({ "scheme": case.get::<String>("scheme"), "observer": "minmax", "targets": ["*"] });
            case.values.get("group_size").iter().for_each(|size| options["group_size"] = (*size).clone());
            let pass: Quantize = serde_json::from_value(options).unwrap();
            let written = desk.run(&desk.weights(&one(case.tensor("in"))), pipeline().pass(pass)).unwrap();
            assert_eq!(read(&written.path), theirs, "{}", case.name);
        }
        let weights = if integer {
            let size = case.get::<i64>("group_size");
            let strategy = if size > 0 { "group" } else { "channel" };
            json!({ "num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": !case.get::<bool>("asymmetric") })
        } else {
            json!({ "num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8" })
        };
        let input = desk.weights(&theirs);
        let group = json!({ "targets": ["Linear"], "weights": weights, "input_activations": null, "format": format });
        let config =
            json!({ "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "config_groups": { "group_0": group } });
        std::fs::write(input.join("config.json"), json!({ "model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": config }).to_string())
            .unwrap();
        assert_eq!(read(&desk.run(&input, pipeline()).unwrap().path), theirs, "{}: copied", case.name);
        let dense = desk.run(&input, pipeline().export(Safetensors::with_layout(Layout::Dense))).unwrap();
        assert_eq!(read(&dense.path)["a.weight"], *case.tensor("dequantized"), "{}: dequantized", case.name);
    });
}

/// Words as AutoGPTQ and AutoAWQ write them: 8 x 8 codes (3 · input + 5 · output) mod 16 in one group.
#[test]
fn words_of_gptq_and_awq() {
    const ZEROS: [f64; 8] = [8.0, 7.0, 9.0, 8.0, 6.0, 8.0, 10.0, 8.0];
    let desk = Desk::new();
    let words = |shape: [usize; 2], words: &[u32]| Tensor::from_bits(DType::I32, &shape, &words.iter().map(|w| (*w).into()).collect::<Vec<_>>());
    let scales: Vec<f64> = (1..=8).map(|i| f64::from(i) / 16.0).collect();
    let gptq = [0x52FC_9630, 0xA741_EB85, 0xFC96_30DA, 0x41EB_852F, 0x9630_DA74, 0xEB85_2FC9, 0x30DA_741E, 0x852F_C963];
    let awq = [0x39F5_E4A0, 0x6C28_17D3, 0x9F5B_4A06, 0xC28E_7D39, 0xF5B1_A06C, 0x28E4_D39F, 0x5B17_06C2, 0x8E4A_39F5];
    let folder = |values: Tensor, zeros: Tensor, order: Option<[u64; 8]>, config: Value| {
        let scales = Tensor::floats(DType::F16, &[1, 8], &scales);
        let mut tensors = Tensors::from([("a.qweight".into(), values), ("a.qzeros".into(), zeros), ("a.scales".into(), scales)]);
        tensors.extend(order.map(|order| ("a.g_idx".into(), Tensor::from_bits(DType::I32, &[8], &order))));
        let input = desk.weights(&tensors);
        std::fs::write(input.join("config.json"), json!({ "model_type": "llama", "quantization_config": config }).to_string()).unwrap();
        input
    };
    let written = |input: &Path, layout| read(&desk.run(input, pipeline().export(Safetensors::with_layout(layout))).unwrap().path);
    let expected = |zeros: &[f64; 8]| {
        (0..64).map(|at| (f64::from((3 * (at % 8) + 5 * (at / 8)) % 16) - zeros[at as usize / 8]) * scales[at as usize / 8]).collect::<Vec<_>>()
    };
    for (values, zeros, config) in [
        (words([1, 8], &gptq), 0x7975_7867, json!({ "quant_method": "gptq", "bits": 4, "sym": false })),
        (words([1, 8], &gptq), 0x8A86_8978, json!({ "quant_method": "gptq", "bits": 4, "sym": false, "checkpoint_format": "gptq_v2" })),
        (words([8, 1], &awq), 0x8887_A698, json!({ "quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": true })),
    ] {
        let input = folder(values, words([1, 1], &[zeros]), Some([0; 8]).filter(|_| config["quant_method"] == "gptq"), config.clone());
        assert_eq!(written(&input, Layout::Dense)["a.weight"].values(), expected(&ZEROS), "{config}");
        // The words of compressed-tensors are those of GPTQ, its zero points those of version 2.
        let packed = written(&input, Layout::Auto);
        assert_eq!((&packed["a.weight_packed"], &packed["a.weight_zero_point"]), (&words([8, 1], &gptq), &words([1, 1], &[0x8A86_8978])), "{config}");
    }
    // GPTQModel subtracts from complete words, so that a zero point of 0 borrows from the next one.
    let borrowed = words([1, 1], &[0x8A86_8970 - 0x1111_1111]);
    let input = folder(words([1, 8], &gptq), borrowed, None, json!({ "quant_method": "gptq", "bits": 4, "sym": false }));
    assert_eq!(written(&input, Layout::Dense)["a.weight"].values(), expected(&[0.0, 7.0, 9.0, 8.0, 6.0, 8.0, 10.0, 8.0]));
    // In a symmetric file, the packed zero points identify the version, whatever the label specifies. A file
    // whose zero points differ is not symmetric.
    for (zeros, format) in [(0x7777_7777, "gptq_v2"), (0x8888_8888, "gptq")] {
        let config = json!({ "quant_method": "gptq", "bits": 4, "sym": true, "checkpoint_format": format });
        let packed = written(&folder(words([1, 8], &gptq), words([1, 1], &[zeros]), None, config), Layout::Auto);
        assert!(packed["a.weight_packed"] == words([8, 1], &gptq) && !packed.contains_key("a.weight_zero_point"), "{format}");
    }
    // Inputs in groups of another order than their own: floats, exact as the tool computes them.
    let mut two = read(&folder(words([1, 8], &gptq), words([1, 1], &[0x7777_7777]), Some([0, 1, 0, 1, 0, 1, 1, 0]), Value::Null).join("model.safetensors"));
    two.insert("a.qzeros".into(), words([2, 1], &[0x7777_7777, 0x6666_6666]));
    two.insert("a.scales".into(), Tensor::floats(DType::F16, &[2, 8], &[[0.5; 8], [0.25; 8]].concat()));
    let dense = &written(&desk.weights(&two), Layout::Auto)["a.weight"];
    let group = |input: usize| [0, 1, 0, 1, 0, 1, 1, 0][input];
    let value = |at: usize| (((3 * (at % 8) + 5 * (at / 8)) % 16) as f64 - [8.0, 7.0][group(at % 8)]) * [0.5, 0.25][group(at % 8)];
    assert_eq!((dense.dtype, dense.values()), (DType::F16, (0..64).map(value).collect()));
}

/// A folder of int8 weights without quantized activations, as another tool would write it.
fn weight_only(desk: &Desk, tensors: &Tensors, format: &str, row: usize) -> std::path::PathBuf {
    let input = desk.weights(tensors);
    let symmetric = !tensors.contains_key("a.weight_zero_point");
    let weights = match tensors["a.weight_scale"].shape[1] {
        1 => json!({ "num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel" }),
        groups => json!({ "num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": row / groups }),
    };
    let group = json!({ "targets": ["Linear"], "weights": weights, "input_activations": null, "format": format });
    let quantization =
        json!({ "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "config_groups": { "group_0": group } });
    std::fs::write(input.join("config.json"), json!({ "model_type": "llama", "quantization_config": quantization }).to_string()).unwrap();
    input
}

#[test]
fn packed() {
    check("packed", |case| {
        let (q, words, shape) = (case.tensor("q"), case.tensor("weight_packed"), case.tensor("weight_shape"));
        let ones = Tensor::floats(DType::F32, &[q.shape[0], 1], &vec![1.0; q.shape[0]]);
        let plain = Tensors::from([("a.weight".into(), q.clone()), ("a.weight_scale".into(), ones.clone())]);
        let packed = Tensors::from([("a.weight_packed".into(), words.clone()), ("a.weight_shape".into(), shape.clone()), ("a.weight_scale".into(), ones)]);
        let desk = Desk::new();
        let written = desk.run(&weight_only(&desk, &plain, "int-quantized", q.shape[1]), pipeline()).unwrap();
        assert_eq!(read(&written.path), packed, "{}", case.name);
        let dense = desk.run(&weight_only(&desk, &packed, "pack-quantized", q.shape[1]), pipeline().export(Safetensors::with_layout(Layout::Dense))).unwrap();
        assert_eq!(read(&dense.path)["a.weight"].values(), q.values(), "{}", case.name);
        // Packed zero points are read. For eight bits, each is written as one byte, as transformers expects.
        let (mut asymmetric, zero_point) = (packed, case.tensor("zero_point"));
        let ones = Tensor::floats(DType::F32, &zero_point.shape, &vec![1.0; zero_point.bytes.len()]);
        asymmetric.extend([("a.weight_scale".into(), ones.clone()), ("a.weight_zero_point".into(), case.tensor("weight_zero_point").clone())]);
        let plain = Tensors::from([("a.weight".into(), q.clone()), ("a.weight_scale".into(), ones), ("a.weight_zero_point".into(), zero_point.clone())]);
        let written = desk.run(&weight_only(&desk, &asymmetric, "pack-quantized", q.shape[1]), pipeline()).unwrap();
        assert_eq!(read(&written.path), plain, "{}", case.name);
    });
}
