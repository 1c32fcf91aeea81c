//! EAGLE-3 heads: logits, steps and gradients are those of the package `speculators`, greedy texts are those
//! of the model, and `compress draft --method eagle3` trains, resumes and reproduces a head.
#![cfg(all(feature = "cli", feature = "run"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use compress::pass::{Distill, DraftHead, Student, Training};
use compress::{Error, Model, Pipeline};
use compress_core::work::MemoryLimit;
use compress_engine::data::{Batch, Data, References};
use compress_engine::exec::{Executor, Inputs, MemoryTracker, Parameters, Residence, Tape};
use compress_engine::generation::{Continuation, Generate, LanguageModel, Ngrams, Sampling, Speculation};
use compress_engine::train::losses::{DraftSteps, Loss, Soft, SoftLoss};
use compress_engine::train::optimizer::Kind;
use compress_engine::train::{BatchSize, Every, ParameterGroup};
use compress_graph::arch::Settings;
use compress_graph::arch::draft_head::{PREFIX, step_logits, unrolled};
use compress_graph::ir::{Op, subgraph};
use serde_json::json;
use tempfile::TempDir;

use crate::cli::support::{command, compress, data, golden_model, names, ok, read_json};
use crate::common::{Tensors, device, read, work};
use crate::train::{Run, cancelled_after, with_training};

const STEPS: usize = 3;
const TOLERANCE: f32 = 1e-4;
/// A short run.
const SHORT: &str = "draft in --method eagle3 --prompts prompts.txt --samples 12 --tokens 8 --steps 3 --batch-size 4 --draft-tokens 1,3 --quiet";

fn head() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/draft-head")
}

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")
}

fn outputs() -> HashMap<String, Tensor> {
    candle_core::safetensors::load(head().join("outputs.safetensors"), &Device::Cpu).unwrap()
}

/// The offsets of a head's tokens to their ids in the model.
fn offsets(tensors: &Tensors) -> Vec<i64> {
    tensors["d2t"].bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

fn parameters(model: &Model, graph: &compress_graph::ir::Graph) -> Parameters {
    work(|work| Parameters::load(graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, work)).unwrap()
}

#[test]
fn logits_of_a_head_are_those_of_the_package() {
    let (model, found) = (Model::open(head()).unwrap(), outputs());
    let graph = model.graph().unwrap();
    let count = found["input_ids"].dim(1).unwrap() - 1;
    let inputs: Inputs = [
        // A row has a hidden state and the token after it.
        ("input_ids".to_owned(), found["input_ids"].narrow(1, 1, count).unwrap().contiguous().unwrap()),
        ("attention_mask".to_owned(), Tensor::ones((1, count), DType::I64, &Device::Cpu).unwrap()),
        ("hidden_states".to_owned(), found["hidden_states"].narrow(1, 0, count).unwrap().contiguous().unwrap()),
    ]
    .into();
    let outputs = Executor::new(&graph, parameters(&model, &graph), Device::Cpu).run(&inputs).unwrap();
    assert!(distance(&outputs["logits"], &found["logits.0"]) < TOLERANCE);
}

#[test]
fn steps_and_gradients_are_those_of_the_package() {
    let (head, mut model, found) = (Model::open(head()).unwrap(), Model::open(target()).unwrap(), outputs());
    let graph = model.graph().unwrap();
    let layers = compress_graph::analysis::layers(&graph).unwrap();
    let states: Vec<String> = (0..3).map(|layer| layers.state(layer).unwrap().clone()).collect();
    let graph = unrolled(&Settings::new(head.config.values()), graph, &states, STEPS).unwrap();
    model.weights.by_name.extend(head.weights.by_name.iter().map(|(name, weight)| (format!("{PREFIX}{name}"), weight.clone())));
    let parameters = parameters(&model, &graph);
    let offsets = offsets(&read(&self::head().join("model.safetensors")));
    let target = graph.outputs().iter().find(|(name, _)| name == "logits").map(|(_, id)| graph.value(*id).name.clone()).unwrap();
    let loss = DraftSteps {
        soft: Soft::from(&SoftLoss { temperature: 1.0, ..SoftLoss::default() }),
        decay: 1.0,
        steps: (0..STEPS).map(step_logits).collect(),
        target,
        tokens: offsets.iter().enumerate().map(|(own, offset)| (own as i64 + offset) as u32).collect(),
    };
    let named = |name: &str| graph.ids().find(|id| graph.value(*id).name == name).unwrap();
    let values: Vec<_> = loss.student().iter().map(|name| named(name)).collect();
    let tape = Tape::new(&graph, Device::Cpu, values.iter().copied().collect(), &|name| name.starts_with(PREFIX), &[]);
    let tracker = MemoryTracker::default();
    let inputs: Inputs = ["input_ids", "attention_mask"].map(|name| (name.to_owned(), found[name].clone())).into();
    let forward = tape.forward(&parameters, &inputs, &tracker, None).unwrap();
    let values: Vec<_> = values.iter().map(|id| (*id, forward.taps()[id].clone())).collect();
    // The last rows read tokens after the end of the text.
    for (step, (_, logits)) in values.iter().take(STEPS).enumerate() {
        let rows = logits.dim(1).unwrap() - 1 - step;
        let expected = found[&format!("logits.{step}")].narrow(1, 0, rows).unwrap();
        assert!(distance(&logits.narrow(1, 0, rows).unwrap(), &expected) < TOLERANCE, "step {step}");
    }
    let labels = found["labels"].to_vec2::<i64>().unwrap();
    let next = labels.iter().map(|row| row.iter().skip(1).chain([&-100]).map(|label| (*label != -100).then_some(*label)).collect()).collect();
    let batch = Batch { inputs, references: References::Tokens(next), samples: 1 };
    let tensors: Vec<Tensor> = values.iter().map(|(_, tensor)| tensor.clone()).collect();
    let sum = loss.sum(&tensors, &[], &[], &batch).unwrap();
    let items = loss.items(&batch).unwrap();
    let value = f64::from(sum.value.to_scalar::<f32>().unwrap()) / items;
    assert!((value - f64::from(found["loss"].to_vec1::<f32>().unwrap()[0])).abs() < 1e-4, "{value}");
    let seeds = values.iter().map(|(id, _)| *id).zip(sum.student.iter().map(|gradient| (gradient / items).unwrap()));
    let mut gradients: BTreeMap<String, Tensor> = BTreeMap::new();
    tape.backward(forward, seeds.collect(), &parameters, &tracker, &mut |name, gradient| {
        let sum = gradients.get(name).map_or_else(|| gradient.clone(), |other| (other + &gradient).unwrap());
        gradients.insert(name.to_owned(), sum);
        Ok(())
    })
    .unwrap();
    let expected: Vec<&str> = found.keys().filter_map(|name| name.strip_prefix("gradient.")).collect();
    assert!(expected.len() == 13 && gradients.len() == expected.len(), "{:?}", gradients.keys());
    for name in expected {
        let gradient = &found[&format!("gradient.{name}")];
        let difference = distance(&gradients[&format!("{PREFIX}{name}")], gradient);
        assert!(difference < TOLERANCE, "{name}: {difference}");
    }
}

/// Position numbers above 256 are not exact in bf16.
#[test]
fn later_steps_see_the_same_keys_in_16_bits() {
    let graph = Model::open(target()).unwrap().graph().unwrap();
    let states = vec![compress_graph::analysis::layers(&graph).unwrap().state(0).unwrap().clone(); 3];
    let graph = unrolled(&Settings::new(Model::open(head()).unwrap().config.values()), graph, &states, 2).unwrap();
    let name = format!("{PREFIX}step1.bias");
    let graph = subgraph(&graph, std::slice::from_ref(&name), &Op::clone).unwrap();
    let count = 300;
    let ids = Tensor::ones((1, count), DType::I64, &Device::Cpu).unwrap();
    let inputs: Inputs = ["input_ids", "attention_mask"].map(|name| (name.to_owned(), ids.clone())).into();
    let weights = Model::open(target()).unwrap().weights;
    let parameters = work(|work| Parameters::load(&graph, &weights, &Device::Cpu, DType::BF16, Residence::Computed, work)).unwrap();
    let bias = Executor::new(&graph, parameters, Device::Cpu).run(&inputs).unwrap().remove(&name).unwrap();
    let rows = bias.squeeze(0).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!((rows.len(), rows[0].len()), (count, 2 * count));
    for (query, row) in rows.iter().enumerate() {
        for (key, bias) in row.iter().enumerate() {
            let is_visible = if key < count { key <= query } else { key - count == query };
            assert!(if is_visible { *bias == 0.0 } else { *bias < -9e3 }, "{query} {key}: {bias}");
        }
    }
}

/// Texts of the golden Llama, alone or with a head.
fn texts(head: Option<(&Path, usize)>, prompts: &[Vec<i64>], options: &Generate) -> Vec<Continuation> {
    let open = |path: &Path| LanguageModel::new(Model::open(path).unwrap()).unwrap();
    let model = head.map_or_else(|| open(&target()), |(head, tokens)| open(&target()).with_draft(open(head), tokens).unwrap());
    work(|work| model.generate(prompts, options, &device(), MemoryLimit::default(), work)).unwrap()
}

#[test]
fn greedy_texts_are_those_of_the_model() {
    let options = Generate { tokens: 16, sampling: None };
    let prompts = [vec![3, 9, 20], vec![41], vec![7, 7, 12, 30, 5]];
    let (expected, head) = (texts(None, &prompts, &options), head());
    for tokens in [1, 3, 5] {
        let found = texts(Some((head.as_path(), tokens)), &prompts, &options);
        assert!(Speculation::of_all(&found).proposed.iter().sum::<usize>() > 0);
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((&found.tokens, found.end), (&expected.tokens, expected.end), "{tokens} draft tokens");
        }
    }
    // A head that is sure of several tokens proposes them as branches.
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = read(&head.join("model.safetensors"));
    let output = tensors.get_mut("lm_head.weight").unwrap();
    let sure: Vec<f64> = output.values().iter().map(|value| value * 2.0).collect();
    *output = crate::common::Tensor::floats(output.dtype, &output.shape, &sure);
    crate::common::write(&folder.path().join("model.safetensors"), &tensors);
    fs::copy(head.join("config.json"), folder.path().join("config.json")).unwrap();
    let found = texts(Some((folder.path(), 5)), &prompts, &options);
    let speculation = Speculation::of_all(&found);
    assert!(speculation.proposed[0] > speculation.steps && speculation.proposed.len() > 1, "{speculation:?}");
    assert!(found.iter().zip(&expected).all(|(found, expected)| found.tokens == expected.tokens));
    // Samples are drawn from the vocabulary of the model, which is larger than that of the head.
    let sampling = Some(Sampling { temperature: 1.0, seed: 3, ..Sampling::default() });
    let sampled = texts(Some((head.as_path(), 3)), &prompts, &Generate { tokens: 16, sampling });
    assert!(sampled.iter().flat_map(|text| &text.tokens).all(|token| (0..48).contains(token)));
}

/// The frequencies of texts are interpolated with the probabilities of a head, in any order of the calls.
#[test]
fn a_head_is_combined_with_texts() {
    let options = Generate { tokens: 16, sampling: None };
    let prompts = [vec![3, 9, 20], vec![41], vec![7, 7, 12, 30, 5]];
    let (expected, head) = (texts(None, &prompts, &options), head());
    let alone = Speculation::of_all(&texts(Some((head.as_path(), 5)), &prompts, &options));
    let own: Vec<Vec<i64>> = prompts.iter().zip(&expected).map(|(prompt, found)| [prompt.clone(), found.tokens.clone()].concat()).collect();
    let open = |path: &Path| LanguageModel::new(Model::open(path).unwrap()).unwrap();
    let ngrams = |texts: &[Vec<i64>]| Arc::new(Ngrams::new(texts.iter().map(Vec::as_slice)).unwrap());
    let generate = |model: LanguageModel, options: &Generate| {
        let found = work(|work| model.generate(&prompts, options, &device(), MemoryLimit::default(), work)).unwrap();
        let tokens: Vec<Vec<i64>> = found.iter().map(|text| text.tokens.clone()).collect();
        (tokens, Speculation::of_all(&found))
    };
    let combined = |texts: &[Vec<i64>]| open(&target()).with_draft(open(&head), 2).and_then(|model| model.with_ngrams(ngrams(texts), 5)).unwrap();
    for texts in [own.as_slice(), &[]] {
        let (tokens, found) = generate(combined(texts), &options);
        assert!(tokens.iter().zip(&expected).all(|(tokens, expected)| *tokens == expected.tokens));
        let other = open(&target()).with_ngrams(ngrams(texts), 2).and_then(|model| model.with_draft(open(&head), 5)).unwrap();
        assert_eq!(generate(other, &options), (tokens, found.clone()));
        assert!(texts.is_empty() || found.tokens_per_step().unwrap() > alone.tokens_per_step().unwrap() + 1.0, "{found:?} {alone:?}");
    }
    // Samples have a single continuation.
    let sampling = Generate { tokens: 16, sampling: Some(Sampling { temperature: 0.1, seed: 3, ..Sampling::default() }) };
    let (tokens, found) = generate(combined(&own), &sampling);
    assert!(found.accepted[0] > 0 && found.proposed[0] <= found.steps && tokens.iter().flatten().all(|token| (0..48).contains(token)), "{found:?}");
    // Probabilities of another model are not interpolated.
    let refused = |model: compress::Result<LanguageModel>| model.map(drop).unwrap_err().to_string();
    for error in [
        refused(open(&target()).with_draft(open(&target()), 2).and_then(|model| model.with_ngrams(ngrams(&own), 2))),
        refused(open(&target()).with_ngrams(ngrams(&own), 2).and_then(|model| model.with_draft(open(&target()), 2))),
    ] {
        assert!(error.contains("cannot be combined"), "{error}");
    }
}

#[test]
fn heads_of_other_models_are_refused() {
    let open = |path: &Path| LanguageModel::new(Model::open(path).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let changed = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut config = read_json(&head().join("config.json"));
        change(&mut config);
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        fs::copy(head().join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        open(folder.path()).and_then(|head| open(&target()).unwrap().with_draft(head, 2)).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(changed(&|_| ()), Ok(()));
    let refused = |change: &dyn Fn(&mut serde_json::Value)| changed(change).unwrap_err();
    assert!(refused(&|config| config["eagle_aux_hidden_state_layer_ids"] = json!([0, 1, 7])).contains("reads layers [0, 1, 7], but the model has 2"));
    assert!(refused(&|config| config["eagle_aux_hidden_state_layer_ids"] = json!(null)).contains("eagle_aux_hidden_state_layer_ids"));
    assert!(refused(&|config| config["transformer_layer_config"]["num_hidden_layers"] = json!(2)).contains("num_hidden_layers"));
    assert!(refused(&|config| config["transformer_layer_config"]["model_type"] = json!("gpt2")).contains("gpt2"));
    assert!(refused(&|config| config["draft_vocab_size"] = json!(21)).contains("lm_head"));
    let other = open(&target().with_file_name("t5")).unwrap().with_draft(open(&head()).unwrap(), 2).map(drop).unwrap_err().to_string();
    assert!(other.contains("is a head of a model that takes prompts"), "{other}");
    let alone = work(|work| open(&head()).unwrap().generate(&[vec![3]], &Generate::default(), &device(), MemoryLimit::default(), work));
    let alone = alone.unwrap_err();
    assert!(alone.to_string().contains("only proposes tokens") && alone.hint().unwrap().contains("--draft HEAD"), "{alone}");
}

/// A Llama as the folder `in`, and prompts.
fn prepared() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "llama", &[("characters.json", "tokenizer.json")]);
    fs::write(folder.path().join("prompts.txt"), "the cat\na red hat\nrain, rain\nour old barn\nmy big wet hat\nsmall drops\nno mat\nwe sat\n").unwrap();
    folder
}

#[test]
fn a_head_is_trained_and_its_recipe_reproduces_it() {
    let folder = prepared();
    let folder = folder.path();
    let report = data(folder, &format!("{SHORT} -o out --vocabulary 20 --json"));
    let out = folder.join("out");
    for file in ["config.json", "tokenizer.json", "model.safetensors", "recipe.yaml", "continuations.npz", "draft_vocabulary.txt"] {
        assert!(out.join(file).is_file(), "{file}");
    }
    assert!(!names(folder).contains(&"out.unfinished".to_owned()));
    let (config, expected) = (read_json(&out.join("config.json")), read_json(&head().join("config.json")));
    // The package has additional keys with defaults.
    for (key, value) in config.as_object().unwrap() {
        assert!(expected.get(key).is_some(), "{key}");
        if ["architectures", "speculators_model_type", "draft_vocab_size", "speculators_version"].contains(&key.as_str()) {
            assert_eq!(value, &expected[key], "{key}");
        }
    }
    assert_eq!(config["eagle_aux_hidden_state_layer_ids"], json!([0, 1]));
    let [found, package] = [&out, &head()].map(|folder| read(&folder.join("model.safetensors")));
    let types = |tensors: &Tensors| tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dtype)).collect::<Vec<_>>();
    assert_eq!(types(&found), types(&package));
    let ids: Vec<i64> = fs::read_to_string(out.join("draft_vocabulary.txt")).unwrap().lines().map(|id| id.parse().unwrap()).collect();
    let expected: Vec<i64> = ids.iter().enumerate().map(|(own, id)| id - own as i64).collect();
    assert_eq!((ids.len(), offsets(&found)), (20, expected));
    let known: Vec<u8> = (0..48).map(|id| ids.contains(&id).into()).collect();
    assert_eq!(found["t2d"].bytes, known);
    for run in report["draft"]["runs"].as_array().unwrap() {
        assert_eq!(run["same_texts"], 1, "{run}");
    }
    let pass = &report["recipe"]["passes"][0]["distill"];
    assert_eq!(pass["student"], json!({ "eagle3": { "vocabulary": "draft_vocabulary.txt", "steps": 3, "decay": 1.0 } }));
    ok(folder, "verify out");
    let generated = data(folder, "generate in --draft out --against in --json --prompt abc --prompt the --tokens 12");
    assert!(generated["prompts"].as_array().unwrap().iter().all(|prompt| prompt["first_difference"].is_null()), "{generated}");
    assert!(generated["draft"]["proposed"].as_u64().unwrap() > 0, "{generated}");
    let alone = compress(folder, "generate out --prompt abc");
    assert!(alone.code != 0 && alone.stderr.contains("--draft HEAD"), "{}", alone.stderr);
    ok(folder, "run out/recipe.yaml -o again --quiet");
    let weights = |name: &str| fs::read(folder.join(name).join("model.safetensors")).unwrap();
    assert!(weights("out") == weights("again"));
    // Other commands do not carry over the vocabulary.
    ok(folder, "cast out -o cast --to f16 --quiet");
    assert!(!folder.join("cast/draft_vocabulary.txt").exists());
}

/// Eight texts of ten tokens, with labels.
fn token_samples(run: &Run) -> Data {
    let path = run.folder.path().join("samples.safetensors");
    let ids = Tensor::from_vec((0..80).map(|i: i64| 3 + (i * i + 7 * i) % 40).collect(), (8, 10), &Device::Cpu).unwrap();
    let arrays = [("input_ids", ids.clone()), ("attention_mask", ids.ones_like().unwrap()), ("labels", ids)];
    candle_core::safetensors::save(&HashMap::from(arrays), &path).unwrap();
    Data { arrays: Some(path), ..Data::default() }
}

#[test]
fn an_interrupted_training_yields_the_same_head() {
    let (whole, parts) = (Run::new(), Run::new());
    let data = token_samples(&whole);
    let training = Distill {
        training: Training { max_steps: Some(6), batch_size: BatchSize::Samples(2), learning_rate: 1e-2, ..Training::default() },
        ..Distill::default()
    };
    let pass = Distill { student: Some(Student::Eagle3(DraftHead::default())), ..with_training!(training, checkpoint_every: Some(Every::Steps(2))) };
    let builder = || Pipeline::builder().pass(pass.clone()).train(data.clone()).seed(3).measure(false);
    let model = || Model::open(target()).unwrap();
    builder().build().unwrap().run(model(), whole.out()).unwrap();
    let (cancel, watch) = cancelled_after(Some(2));
    let error = builder().resume(true).progress(watch).cancel(cancel).build().unwrap().run(model(), parts.out()).unwrap_err();
    assert!(matches!(error, Error::Paused { .. }), "{error}");
    builder().resume(true).build().unwrap().run(model(), parts.out()).unwrap();
    let weights = |run: &Run| fs::read(run.out().join("model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&parts));
}

/// Groups name the tensors of a head as its file does, or with the prefix that they have in training.
#[test]
fn groups_select_tensors_of_a_head() {
    let run = Run::new();
    let data = token_samples(&run);
    let trained = |groups: Vec<ParameterGroup>| {
        let training = Distill {
            training: Training { max_steps: Some(2), batch_size: BatchSize::Samples(4), learning_rate: 1e-2, groups, ..Training::default() },
            ..Distill::default()
        };
        let pass = Distill { student: Some(Student::Eagle3(DraftHead::default())), ..training };
        let pipeline = Pipeline::builder().pass(pass).train(data.clone()).seed(3).measure(false).force(true).build().unwrap();
        pipeline.run(Model::open(target()).unwrap(), run.out()).map(|_| read(&run.out().join("model.safetensors"))).map_err(|e| e.to_string())
    };
    let frozen = |name: &str| trained(vec![format!("{{ targets: [{name}], learning_rate: 0 }}").parse().unwrap()]);
    let (all, short, long) = (trained(Vec::new()).unwrap(), frozen("fc.weight").unwrap(), frozen("draft.fc.weight").unwrap());
    assert!(short["fc.weight"].bytes != all["fc.weight"].bytes);
    for (name, tensor) in &short {
        assert!(tensor.bytes == long[name].bytes, "{name}");
    }
    let error = frozen("embed_tokens.weight").err().unwrap();
    assert!(error.contains("groups") && error.contains("embed_tokens.weight"), "{error}");
}

/// A small step of gradient descent lowers the loss by the squared norm of the gradient times the rate.
#[test]
fn a_step_lowers_the_loss_as_the_gradient_predicts() {
    let run = Run::new();
    let data = token_samples(&run);
    let curve = |learning_rate: f64| {
        let plain = Distill {
            training: Training { optimizer: Kind::Sgd, momentum: 0.0, weight_decay: 0.0, clip_norm: 0.0, ..Training::default() },
            ..Distill::default()
        };
        let steps = with_training!(plain, max_steps: Some(2), batch_size: BatchSize::Samples(8), schedule: "constant".parse().unwrap(), learning_rate);
        let pass = Distill { student: Some(Student::Eagle3(DraftHead::default())), ..steps };
        let pipeline = Pipeline::builder().pass(pass).train(data.clone()).seed(3).measure(false).force(true).build().unwrap();
        let report = pipeline.run(Model::open(target()).unwrap(), run.out()).unwrap();
        report.passes[0].details["training"]["curve"].as_array().unwrap().clone()
    };
    let number = |row: &serde_json::Value, key: &str| row[key].as_f64().unwrap();
    let first = curve(1e-9).remove(0);
    let (loss, slope) = (number(&first, "loss"), number(&first, "gradient_norm").powi(2));
    // A rate with which the loss is expected to fall by a thousandth.
    let curve = curve(1e-3 * loss / slope);
    assert_eq!(number(&curve[0], "loss"), loss);
    let lowered = (loss - number(&curve[1], "loss")) / (1e-3 * loss);
    assert!((lowered - 1.0).abs() < 2e-3, "the loss of {loss} fell by {lowered} of the expected amount");
}

/// A head has no score of its own, and its maps of token ids are not superfluous weights.
#[test]
fn commands_recognize_a_head() {
    let folder = prepared();
    let folder = folder.path();
    let head = head();
    let head = head.to_str().unwrap();
    let unused = &data(folder, &format!("inspect {head} --json"))["unused"];
    assert_eq!((&unused["weights"], &unused["token_maps"]), (&json!([]), &json!(["d2t", "t2d"])), "{unused}");
    let text = ok(folder, &format!("inspect {head} --header-only")).stdout;
    assert!(text.contains("\n token maps: d2t, t2d, between the token ids of the head") && !text.contains("unused weights"), "{text}");
    for models in [head.to_owned(), format!("in --against {head}")] {
        let result = compress(folder, &format!("eval {models} --data prompts.txt"));
        assert!(result.code == 1 && result.stderr.contains("an EAGLE-3 head reads hidden states of another model"), "{}", result.stderr);
        assert!(result.stderr.contains("`compress generate MODEL --draft HEAD --prompt TEXT`"), "{}", result.stderr);
    }
}

#[test]
fn options_of_other_drafts_are_refused() {
    let folder = prepared();
    let folder = folder.path();
    let refused = |arguments: &str, part: &str| {
        let result = compress(folder, arguments);
        assert!(result.code == 2 && result.stderr.contains(part), "{arguments}: {}", result.stderr);
    };
    refused(&format!("{SHORT} -o out --layers 1"), "--layers");
    refused(&format!("{SHORT} -o out --vocabulary 0"), "from 1 to 48");
    refused(&format!("{SHORT} -o out --vocabulary 49"), "from 1 to 48");
    refused("draft in -o out --prompts prompts.txt --vocabulary 20", "--method eagle3");
    fs::write(folder.join("tokens.txt"), "1\n2\n").unwrap();
    let distilled = |more: &[&str], tokens: &str| {
        let student = format!("eagle3={tokens}");
        let arguments = ["distill", "in", "-o", "out", "--train", "{text: prompts.txt, max_length: 8}", "--max-steps", "1", "--student", &student];
        let output = command(folder).args(arguments).args(more).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let errors = [
        (distilled(&["--losses", "hidden=1"], "tokens.txt"), "only `soft`"),
        (distilled(&["--teacher", "in"], "tokens.txt"), "student: eagle3"),
        (distilled(&[], "none.txt"), "none.txt"),
        (distilled(&[], "prompts.txt"), "ascending token ids below 48"),
    ];
    for ((code, error), part) in errors {
        // A file that cannot be read is not misuse.
        let expected = if part == "none.txt" { 1 } else { 2 };
        assert!(code == Some(expected) && error.contains(part), "{code:?}: {error}");
    }
}
