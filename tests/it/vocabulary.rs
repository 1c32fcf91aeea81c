//! `prune-vocabulary`: logits of the remaining tokens, tokenization of the corpus, and every file with token
//! ids.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use compress::export::{Export, Gguf, Safetensors};
use compress::pass::{Distill, PruneVocabulary, QuantizeDynamic, Step, Training};
use compress::{Error, Model, Pipeline, Report};
use compress_engine::data::{Column, Data, Target, Task, Tokenizer, synthetic_with_sizes};
use compress_engine::evaluation::Runtime;
use compress_engine::exec::Inputs;
use compress_engine::model::SynthesizedFiles;
use serde_json::{Map, Value, json};

use crate::common::contents;
use crate::properties::draws::{families, golden, outputs};

/// A copy of a golden model with a tokenizer, and a corpus.
struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new(name: &str, tokenizer: &Value, texts: &str) -> Case {
        let case = Case { folder: tempfile::tempdir().unwrap() };
        for (file, bytes) in contents(&golden(name)) {
            if file.starts_with("golden") {
                continue;
            }
            let path = case.input().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        case.write("tokenizer.json", tokenizer);
        fs::write(case.corpus(), texts).unwrap();
        case
    }

    fn input(&self) -> PathBuf {
        self.folder.path().join("in")
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn corpus(&self) -> PathBuf {
        self.folder.path().join("corpus.txt")
    }

    fn write(&self, file: &str, value: &Value) {
        fs::write(self.input().join(file), value.to_string()).unwrap();
    }

    fn pass(&self) -> PruneVocabulary {
        PruneVocabulary { keep: vec![self.corpus()], ..PruneVocabulary::default() }
    }

    fn run(&self, steps: Vec<Step>) -> Result<Report, Error> {
        self.run_with(steps, |builder| builder.measure(false))
    }

    fn run_with(&self, steps: Vec<Step>, with: impl FnOnce(compress::pipeline::Builder) -> compress::pipeline::Builder) -> Result<Report, Error> {
        with(Pipeline::builder().passes(steps).force(true)).build()?.run(Model::open(self.input())?, self.output())
    }

    fn error(&self, steps: Vec<Step>) -> String {
        self.run(steps).map(drop).unwrap_err().to_string()
    }

    /// The old id of each new one.
    fn remaining(&self) -> Vec<usize> {
        let [before, after] = [self.input(), self.output()].map(|folder| ids(&read(&folder.join("tokenizer.json"))));
        let mut old = vec![usize::MAX; after.len()];
        after.into_iter().for_each(|(token, id)| old[id] = before[&token]);
        old
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Ids by token.
fn ids(tokenizer: &Value) -> BTreeMap<String, usize> {
    match &tokenizer["model"]["vocab"] {
        Value::Array(tokens) => tokens.iter().enumerate().map(|(id, token)| (token[0].as_str().unwrap().to_owned(), id)).collect(),
        tokens => tokens.as_object().unwrap().iter().map(|(token, id)| (token.clone(), id.as_u64().unwrap() as usize)).collect(),
    }
}

/// Tokens of the lines of a text.
fn tokens(folder: &Path, texts: &str) -> Vec<Vec<String>> {
    let (synthesized, config) = (SynthesizedFiles::new(), Map::new());
    let target = Target::new(folder, &synthesized, &config);
    let tokenizer = Tokenizer::open(&target, None).unwrap();
    let names = |text: &str| tokenizer.untruncated(text, true).unwrap().into_iter().map(|id| tokenizer.token(id).unwrap()).collect();
    texts.lines().map(names).collect()
}

const SPECIAL: [&str; 5] = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"];
const LETTERS: &str = "abcdehnort";
const TEXTS: &str = "the cat and the red hat\nan error or a bad core\nhere on the bench\non core on bench on\n";
/// Size of each vocabulary, which is that of the golden models.
const ROWS: usize = 48;

/// A template that adds `<s>` and `</s>`.
fn template() -> Value {
    let special = |token: &str| json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let ids = |token: &str| json!({ "id": token, "ids": [SPECIAL.iter().position(|other| *other == token)], "tokens": [token] });
    json!({ "type": "TemplateProcessing", "single": [special("<s>"), text, special("</s>")], "pair": [special("<s>"), text, special("</s>"), text],
        "special_tokens": { "<s>": ids("<s>"), "</s>": ids("</s>") } })
}

fn added() -> Value {
    let token = |(id, text): (usize, &&str)| json!({ "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true });
    SPECIAL.iter().enumerate().map(token).collect()
}

/// A tokenizer with 48 tokens.
fn tokenizer(kind: &str) -> Value {
    let mut tokens: Vec<String> = SPECIAL.iter().map(|token| (*token).to_owned()).collect();
    let letters = LETTERS.chars().map(String::from);
    let space = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
    let (model, splitting) = match kind {
        "BPE" => {
            tokens.extend(["▁".to_owned()].into_iter().chain(letters));
            // `hat` is merged from `h at`; `re` and `an` are parts of longer tokens.
            let merges: Vec<String> = "a t,h at,c at,h e,t he,▁ the,a n,an d,▁ and,r e,re d,▁ red,o r,e r,er r,▁ b,o n,n t,▁ hat,▁ cat,b e,o re,c ore,d e,▁ an,h er,her e,e n,t e,t o,a d,b ad"
                .split(',')
                .map(str::to_owned)
                .collect();
            tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
            (json!({ "type": "BPE", "merges": merges, "unk_token": "<unk>", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false }), space)
        }
        "Unigram" => {
            tokens.extend(["▁".to_owned()].into_iter().chain(letters));
            tokens.extend(
                "▁the ▁cat ▁and ▁red ▁hat ▁a ▁o re er or on an en he at ▁to ▁ten ▁her here bad ben ch ▁core ▁co error ▁or ▁on ▁net ▁tan ▁rat ▁dot ▁bed"
                    .split(' ')
                    .map(str::to_owned),
            );
            (json!({ "type": "Unigram", "unk_id": 1, "byte_fallback": false }), space)
        }
        "WordPiece" => {
            let pieces: Vec<String> = LETTERS.chars().map(|letter| format!("##{letter}")).collect();
            tokens.extend(letters.chain(pieces));
            tokens.extend("the cat and red hat an error or bad core here on bench ##re ##nch ten tan ##ed ##or ##at rat dot bed".split(' ').map(str::to_owned));
            let model = json!({ "type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100 });
            (model, json!({ "type": "WhitespaceSplit" }))
        }
        _ => {
            tokens.extend((SPECIAL.len()..ROWS).map(|id| format!("t{id}")));
            (json!({ "type": "WordLevel", "unk_token": "<unk>" }), json!({ "type": "WhitespaceSplit" }))
        }
    };
    assert_eq!(tokens.len(), ROWS, "{kind}");
    let mut model = model;
    model["vocab"] = match kind {
        "Unigram" => tokens
            .iter()
            .enumerate()
            .map(|(id, token)| json!([token, if id < SPECIAL.len() { 0.0 } else { -4.0 - id as f64 / 7.0 + 2.0 * token.chars().count() as f64 }]))
            .collect(),
        _ => tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect::<Map<_, _>>().into(),
    };
    json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": added(), "normalizer": null, "pre_tokenizer": splitting,
        "post_processor": template(), "decoder": null, "model": model })
}

/// Checks that the output computes the values of the input: the same outputs, and the same logits of the
/// remaining tokens.
fn require_same_outputs(case: &Case, what: &str) {
    let remaining = case.remaining();
    let graph = Model::open(case.output()).unwrap().graph().unwrap();
    let sizes = graph.bind(|name| match name {
        "batch" => 2,
        "height" | "width" => 32,
        _ => 7,
    });
    let inputs = synthetic_with_sizes(&graph, 3, &sizes).unwrap().inputs;
    let original: Inputs = inputs
        .iter()
        .map(|(name, tensor)| {
            if !name.ends_with("input_ids") {
                return (name.clone(), tensor.clone());
            }
            let ids: Vec<i64> = tensor.flatten_all().unwrap().to_vec1::<i64>().unwrap().into_iter().map(|id| remaining[id as usize] as i64).collect();
            (name.clone(), Tensor::from_vec(ids, tensor.dims(), &Device::Cpu).unwrap())
        })
        .collect();
    let (before, after) = (outputs(&case.input(), &original), outputs(&case.output(), &inputs));
    assert!(before.keys().eq(after.keys()), "{what}");
    let rows = Tensor::from_vec(remaining.iter().map(|id| *id as u32).collect::<Vec<_>>(), remaining.len(), &Device::Cpu).unwrap();
    for (name, expected) in before {
        let found = &after[&name];
        let expected = if found.dims() == expected.dims() { expected } else { expected.index_select(&rows, expected.rank() - 1).unwrap() };
        let values = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(found.dims(), expected.dims(), "{what}: {name}");
        assert_eq!(values(found), values(&expected), "{what}: {name}");
    }
}

/// All golden families whose inputs are tokens.
#[test]
fn logits_of_remaining_tokens_are_those_of_the_input() {
    let mut done = Vec::new();
    for name in families() {
        let texts: String = (SPECIAL.len()..ROWS).filter(|id| id % 5 != 1).map(|id| format!("t{id} ")).collect();
        let case = Case::new(&name, &tokenizer("WordLevel"), &format!("{texts}\n"));
        let reads_tokens = Model::open(case.input()).unwrap().graph().unwrap().inputs().any(|(_, input)| input.name.ends_with("input_ids"));
        if !reads_tokens {
            assert!(case.error(vec![case.pass().into()]).contains("has no embedding of `input_ids`"), "{name}");
            continue;
        }
        let report = case.run(vec![case.pass().into()]).unwrap_or_else(|e| panic!("{name}: {e}"));
        let details = &report.passes[0].details;
        assert!(details["removed"].as_u64().unwrap() >= 6, "{name}: {details}");
        assert!(!case.output().join("graph.json").exists(), "{name}");
        require_same_outputs(&case, &name);
        done.push(name);
    }
    assert!(done.len() > 60, "{done:?}");
}

#[test]
fn texts_of_a_corpus_keep_their_tokens() {
    for (kind, name, removed) in [("BPE", "llama", "nt"), ("Unigram", "t5", "▁net"), ("WordPiece", "bert-masked-lm", "dot")] {
        let case = Case::new(name, &tokenizer(kind), TEXTS);
        let report = case.run(vec![case.pass().into()]).unwrap_or_else(|e| panic!("{kind}: {e}"));
        assert_eq!(report.passes[0].details["tokenizer"], kind);
        assert_eq!(report.passes[0].details["removed_occurrences"], 0);
        let [before, after] = [case.input(), case.output()].map(|folder| tokens(&folder, TEXTS));
        assert_eq!(before, after, "{kind}");
        let remaining = case.remaining();
        assert!(remaining.len() < ROWS && remaining.is_sorted(), "{kind}: {remaining:?}");
        let (all, now) = (ids(&tokenizer(kind)), ids(&read(&case.output().join("tokenizer.json"))));
        assert!(all.contains_key(removed) && !now.contains_key(removed), "{kind}: {now:?}");
        // Intermediate tokens remain, although no text contains them.
        assert!(kind != "BPE" || now.contains_key("he"), "{now:?}");
        assert!(SPECIAL.iter().all(|token| now.contains_key(*token)), "{now:?}");
        require_same_outputs(&case, kind);
    }
}

#[test]
fn sizes_are_limited_and_rounded() {
    for kind in ["BPE", "Unigram", "WordPiece"] {
        let case = Case::new("llama", &tokenizer(kind), TEXTS);
        let rows = |pass: PruneVocabulary| {
            case.run(vec![pass.into()]).unwrap();
            require_same_outputs(&case, kind);
            case.remaining()
        };
        let least = rows(PruneVocabulary { min_count: 100, ..case.pass() });
        let frequent = rows(PruneVocabulary { vocab_size: Some(least.len() + 4), ..case.pass() });
        assert!(frequent.len() > least.len() && frequent.len() <= least.len() + 4, "{kind}");
        // The first tokens by rank, score or id.
        let first = rows(PruneVocabulary { vocab_size: Some(least.len() + 4), ..PruneVocabulary::default() });
        assert!((least.len() + 1..=least.len() + 4).contains(&first.len()) && first != frequent, "{kind}: {first:?}");
        assert_eq!(rows(PruneVocabulary { multiple_of: 8, ..case.pass() }).len() % 8, 0, "{kind}");
        let error = case.error(vec![PruneVocabulary { vocab_size: Some(least.len() - 1), ..case.pass() }.into()]);
        assert!(error.contains(&format!("less than the {} tokens that always remain", least.len())), "{error}");
        // A maximum is rounded down.
        assert_eq!(rows(PruneVocabulary { vocab_size: Some(46), multiple_of: 9, ..PruneVocabulary::default() }).len(), 45, "{kind}");
        let (vocab_size, multiple_of) = (Some(least.len() + 1), least.len() - 1);
        let error = case.error(vec![PruneVocabulary { vocab_size, multiple_of, ..PruneVocabulary::default() }.into()]);
        assert!(error.contains(&format!("{multiple_of}, rounded down to a multiple of {multiple_of}, is less than the {}", least.len())), "{error}");
    }
}

/// `▁cat` occurs once, in a line that is also part of the whole text.
#[test]
fn a_token_of_a_plain_text_is_counted_once() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    let lines: usize = tokens(&case.input(), TEXTS).iter().map(Vec::len).sum();
    let table = case.folder.path().join("corpus.csv");
    fs::write(&table, format!("text\n{TEXTS}")).unwrap();
    let tokens_at_least = |keep: &Path, min_count| {
        let report = case.run(vec![PruneVocabulary { keep: vec![keep.into()], min_count, ..PruneVocabulary::default() }.into()]).unwrap();
        (ids(&read(&case.output().join("tokenizer.json"))), report.passes[0].details["occurrences"].as_u64().unwrap() as usize)
    };
    let (twice, occurrences) = tokens_at_least(&case.corpus(), 2);
    assert!(!twice.contains_key("▁cat") && tokens_at_least(&case.corpus(), 1).0.contains_key("▁cat"), "{twice:?}");
    // Only line breaks, and the tokens around them, are counted in addition.
    assert!((lines..lines * 3 / 2).contains(&occurrences), "{occurrences} of {lines}");
    assert_eq!(tokens_at_least(&table, 2).0, twice);
}

#[test]
fn every_file_with_token_ids_is_rewritten() {
    let json = tokenizer("BPE");
    let case = Case::new("llama", &json, TEXTS);
    let all = ids(&json);
    let merges: Vec<&str> = json["model"]["merges"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    fs::write(case.input().join("merges.txt"), format!("#version: 0.2\n{}\n", merges.join("\n"))).unwrap();
    fs::write(case.input().join("spiece.model"), "binary").unwrap();
    case.write("vocab.json", &json["model"]["vocab"]);
    case.write("added_tokens.json", &json!({ "<mask>": 4 }));
    case.write("special_tokens_map.json", &json!({ "mask_token": "<mask>" }));
    case.write(
        "generation_config.json",
        &json!({ "eos_token_id": [3, all["to"]], "suppress_tokens": [all["nt"], all["he"]], "bad_words_ids": [[all["nt"]], [all["he"], all["a"]]] }),
    );
    case.write("tokenizer_config.json", &json!({ "added_tokens_decoder": { "4": { "content": "<mask>" } }, "chat_template": "{{ messages }}" }));
    let report = case.run(vec![case.pass().into()]).unwrap();
    let out = |file: &str| read(&case.output().join(file));
    let now = ids(&out("tokenizer.json"));
    assert_eq!(out("vocab.json"), out("tokenizer.json")["model"]["vocab"]);
    assert_eq!(out("added_tokens.json"), json!({ "<mask>": now["<mask>"] }));
    assert_eq!(out("config.json")["vocab_size"], now.len());
    // A token that a configuration names remains.
    let generation = out("generation_config.json");
    assert_eq!(generation["eos_token_id"], json!([now["</s>"], now["to"]]));
    assert_eq!((&generation["suppress_tokens"], &generation["bad_words_ids"]), (&json!([now["he"]]), &json!([[now["he"], now["a"]]])));
    assert_eq!(out("tokenizer_config.json")["added_tokens_decoder"], json!({ now["<mask>"].to_string(): { "content": "<mask>" } }));
    let written = fs::read_to_string(case.output().join("merges.txt")).unwrap();
    let expected: Vec<Value> = written.lines().skip(1).map(Value::from).collect();
    assert_eq!(Value::from(expected), out("tokenizer.json")["model"]["merges"]);
    assert!(!case.output().join("spiece.model").exists());
    assert!(report.notes.iter().any(|note| note.contains("spiece.model (they contain the original vocabulary")), "{:?}", report.notes);
    assert!(report.carried.iter().any(|file| file.path == "tokenizer.json"));
}

/// Python writes and reads infinity as a number, and transformers defines no other form for this file.
#[test]
fn infinity_in_generation_settings_is_kept() {
    let json = tokenizer("BPE");
    let case = Case::new("llama", &json, TEXTS);
    let text = format!("{{\"eos_token_id\": [3, {}], \"top_h\": Infinity}}", ids(&json)["to"]);
    fs::write(case.input().join("generation_config.json"), text).unwrap();
    let report = case.run(vec![case.pass().into()]).unwrap();
    let written = fs::read_to_string(case.output().join("generation_config.json")).unwrap();
    assert!(written.contains("\"top_h\": Infinity") && !written.contains("__float__"), "{written}");
    assert!(!report.notes.iter().any(|note| note.contains("not valid JSON")), "{:?}", report.notes);
}

#[test]
fn vocabularies_in_other_formats_are_not_copied() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    let excluded = ["tokenizer.bin", "tokenizer.vocab", "tokens.txt", "source_vocab.json", "target_vocab.json"];
    let others = ["my_vocab.dat", "TOKENS.md"];
    for file in excluded.iter().chain(&others).chain(&["tokenization_llama.py", "notes.txt"]) {
        fs::write(case.input().join(file), "{}").unwrap();
    }
    case.write("special_tokens_map.json", &json!({ "mask_token": "<mask>" }));
    let report = case.run(vec![case.pass().into()]).unwrap();
    for file in excluded {
        assert!(!case.output().join(file).exists(), "{file}");
        assert!(report.notes.iter().any(|note| note.contains(file)), "{file}: {:?}", report.notes);
    }
    let note = report.notes.iter().find(|note| note.contains("copied unchanged")).unwrap();
    assert!(others.iter().all(|file| case.output().join(file).exists() && note.contains(file)), "{note}");
    for file in ["tokenization_llama.py", "notes.txt", "special_tokens_map.json", "tokenizer.json"] {
        assert!(case.output().join(file).exists() && !note.contains(file), "{note}");
    }
}

/// `extra_ids` is a number of sentinel tokens. A token that only the settings of the tokenizer name remains.
#[test]
fn settings_of_t5_are_supported() {
    for extra_ids in [0, 1, 100] {
        let case = Case::new("t5", &tokenizer("Unigram"), TEXTS);
        let settings = json!({ "additional_special_tokens": ["<mask>", "▁net"], "eos_token": "</s>", "extra_ids": extra_ids, "sp_model_kwargs": {} });
        case.write("tokenizer_config.json", &settings);
        case.run(vec![case.pass().into()]).unwrap_or_else(|e| panic!("{extra_ids}: {e}"));
        assert_eq!(read(&case.output().join("tokenizer_config.json")), settings);
        assert!(ids(&read(&case.output().join("tokenizer.json"))).contains_key("▁net"));
    }
}

/// The same ids are other tokens, so that the input is compared with its remaining rows, and scored with its
/// own tokenizer.
#[test]
fn the_output_is_compared_on_the_same_tokens() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    let synthetic = case.run_with(vec![case.pass().into()], |builder| builder).unwrap();
    let fidelity = &synthetic.fidelity.as_ref().unwrap().fidelity;
    assert_eq!(fidelity.max_abs_error, 0.0, "{:?}", synthetic.notes);
    let text = || Data { text: Some(case.corpus()), ..Data::default() };
    let held_out = case.run_with(vec![case.pass().into()], |builder| builder.calibration(text())).unwrap();
    assert_eq!(held_out.fidelity.as_ref().unwrap().fidelity.max_abs_error, 0.0, "{:?}", held_out.notes);
    let compared = case.run_with(vec![case.pass().into()], |builder| builder.evaluation(Data { task: Some(Task::Fidelity), ..text() })).unwrap();
    assert_eq!(compared.fidelity.as_ref().unwrap().fidelity.max_abs_error, 0.0, "{:?}", compared.notes);
    let scored = case.run_with(vec![case.pass().into()], |builder| builder.evaluation(text())).unwrap();
    assert!(scored.fidelity.is_none() && scored.notes.iter().any(|note| note.starts_with("the output has other tokens than the input")), "{:?}", scored.notes);
    assert!(scored.latency.is_some() && scored.notes.iter().any(|note| note.starts_with("latency of each model")), "{:?}", scored.notes);
    // Without the removed tokens, the others are more probable.
    let is_stated = |report: &Report| report.notes.iter().any(|note| note.starts_with("perplexities of input and output are not comparable"));
    assert!(is_stated(&scored) && !is_stated(&compared), "{:?}", scored.notes);
    let accuracy = scored.accuracy.unwrap();
    assert!(accuracy.after[&Runtime::Candle] < accuracy.before[&Runtime::Candle], "{accuracy:?}");
}

#[test]
fn later_passes_use_the_new_vocabulary_or_are_refused() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    case.run(vec![case.pass().into(), QuantizeDynamic { embeddings: true, ..QuantizeDynamic::default() }.into()]).unwrap();
    assert_eq!(Model::open(case.output()).unwrap().weights.get("model.embed_tokens.weight").unwrap().shape[0], case.remaining().len());
    let quantized = case.error(vec![QuantizeDynamic { embeddings: true, ..QuantizeDynamic::default() }.into(), case.pass().into()]);
    assert!(quantized.contains("is quantized, so that its rows cannot be selected"), "{quantized}");
    let text = Data { text: Some(case.corpus()), ..Data::default() };
    let distill = Distill { training: Training { max_steps: Some(1), ..Training::default() }, ..Distill::default() };
    let error = case.run_with(vec![case.pass().into(), distill.into()], |builder| builder.measure(false).train(text)).map(drop).unwrap_err().to_string();
    assert!(error.contains("distill: teacher: has a different tokenizer"), "{error}");
    assert!(error.contains("the teacher is the input before `prune-vocabulary`: set `teacher`"), "{error}");
    let arrays = Data { arrays: Some(golden("llama").join("golden.safetensors")), ..Data::default() };
    let error = case.run_with(vec![case.pass().into()], |builder| builder.evaluation(arrays)).map(drop).unwrap_err().to_string();
    assert!(error.contains("data: evaluation: contains token ids, but `prune-vocabulary` renumbers"), "{error}");
    fs::remove_file(case.input().join("tokenizer.json")).unwrap();
    assert!(case.error(vec![case.pass().into()]).contains("without a tokenizer.json"));
}

#[test]
fn two_passes_keep_the_ids_of_the_input() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    let first = PruneVocabulary { vocab_size: Some(40), ..PruneVocabulary::default() };
    let second = PruneVocabulary { min_count: 2, ..case.pass() };
    let report = case.run_with(vec![first.into(), second.into()], |builder| builder).unwrap();
    assert_eq!(report.fidelity.as_ref().unwrap().fidelity.max_abs_error, 0.0, "{:?}", report.notes);
    require_same_outputs(&case, "two passes");
}

#[test]
fn vocabularies_of_gguf_files_are_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("corpus.txt");
    let texts = "Hello world\n  12 times\n";
    fs::write(&corpus, texts).unwrap();
    for name in ["smollm", "pieces"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/gguf/tokenizer-{name}.gguf"));
        let pass = PruneVocabulary { keep: vec![corpus.clone()], ..PruneVocabulary::default() };
        let exports = [Export::from(Gguf::default()), Export::from(Safetensors::default())];
        let mut builder = Pipeline::builder().pass(pass).measure(false);
        for export in exports {
            builder = builder.export(export);
        }
        let out = folder.path().join(name);
        builder.build().unwrap().run(Model::open(&path).unwrap(), &out).unwrap_or_else(|e| panic!("{name}: {e}"));
        let tokens = |model: &Model| {
            let target = Target::new(&model.path, &model.auxiliary.synthesized, model.config.values());
            let tokenizer = Tokenizer::open(&target, None).unwrap();
            let names = |text: &str| tokenizer.untruncated(text, true).unwrap().into_iter().map(|id| tokenizer.token(id).unwrap()).collect::<Vec<_>>();
            texts.lines().map(names).collect::<Vec<_>>()
        };
        let (before, file) = (Model::open(&path).unwrap(), Model::open(out.join("model.gguf")).unwrap());
        assert_eq!(tokens(&before), tokens(&file), "{name}");
        assert_eq!(tokens(&before), tokens(&Model::open(&out).unwrap()), "{name}");
        let rows = |model: &Model| model.weights.get("model.embed_tokens.weight").unwrap().shape[0];
        assert!(rows(&file) < rows(&before), "{name}");
    }
}

#[test]
fn the_report_states_whether_tokens_were_removed() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    let notes = |pass: PruneVocabulary| case.run(vec![pass.into()]).unwrap().notes.join("\n");
    let all = notes(PruneVocabulary { vocab_size: Some(ROWS), ..PruneVocabulary::default() });
    assert!(all.contains("no token was removed: all 48 tokens") && !all.contains("ids of tokens are new"), "{all}");
    // All ids are those of the input, so that outputs are compared.
    let text = Data { text: Some(case.corpus()), ..Data::default() };
    let pass = PruneVocabulary { vocab_size: Some(ROWS), ..PruneVocabulary::default() };
    let evaluated = case.run_with(vec![pass.into()], |builder| builder.evaluation(text)).unwrap();
    assert_eq!(evaluated.fidelity.as_ref().unwrap().fidelity.max_abs_error, 0.0, "{:?}", evaluated.notes);
    let some = notes(case.pass());
    assert!(some.contains("of 48 removed: ids of tokens are new"), "{some}");
    // A row without a token in the middle.
    let mut words = tokenizer("WordLevel");
    words["model"]["vocab"].as_object_mut().unwrap().remove("t20");
    let pass = PruneVocabulary { vocab_size: Some(ROWS - 1), ..PruneVocabulary::default() };
    let gap = Case::new("llama", &words, TEXTS).run(vec![pass.into()]).unwrap().notes.join("\n");
    assert!(gap.contains("no token was removed: all 47 tokens") && gap.contains("so that ids are new"), "{gap}");
}

#[test]
fn files_without_tokens_are_refused() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    let empty = case.folder.path().join("empty.txt");
    for text in ["", "\n\n"] {
        fs::write(&empty, text).unwrap();
        let error = case.error(vec![PruneVocabulary { keep: vec![case.corpus(), empty.clone()], ..PruneVocabulary::default() }.into()]);
        assert!(error.contains("empty.txt contains no tokens"), "{error}");
    }
}

/// The rows of such a head would have the ids of the input.
#[test]
fn heads_of_tokens_outside_of_the_graph_are_refused() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    let path = case.input().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).unwrap();
    tensors.insert("medusa_head.0.weight".to_owned(), tensors["lm_head.weight"].clone());
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let error = case.error(vec![case.pass().into()]);
    assert!(error.contains("medusa_head.0.weight") && error.contains("has 48 rows, the number of tokens"), "{error}");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let case = Case::new("llama", &tokenizer("BPE"), TEXTS);
    for (pass, reason) in [
        (PruneVocabulary::default(), "keep): is missing"),
        (PruneVocabulary { vocab_size: Some(0), ..PruneVocabulary::default() }, "vocab_size): must be at least 1"),
        (PruneVocabulary { vocab_size: Some(40), min_count: 2, ..PruneVocabulary::default() }, "min_count): counts tokens"),
        (PruneVocabulary { languages: vec!["en".into(), "xx".into()], ..case.pass() }, "`xx` is not one of the languages"),
        (PruneVocabulary { multiple_of: 0, ..case.pass() }, "multiple_of): must be at least 1"),
        (PruneVocabulary { text_column: Some(Column::Name("text".into())), ..case.pass() }, "applies only to texts in columns"),
        (PruneVocabulary { multiple_of: 49, ..case.pass() }, "the embedding has only 48 rows"),
    ] {
        let error = case.error(vec![pass.into()]);
        assert!(error.contains(reason), "{error}");
    }
}
