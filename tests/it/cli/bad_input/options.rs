//! Invalid options, and weights that a pass does not support.

use std::path::Path;

use serde_json::json;

use super::{Case, case, check};
use crate::cli::support::{METADATA, Tensor, f32s, file, floats, model, model_of, ok, tensor};

fn small(name: &'static str, args: &'static str, code: i32, message: &'static str, hint: &'static str) -> Case {
    case(name, |folder| model(&folder.join("in")), args, code, message, hint)
}

fn tensors(name: &'static str, tensors: Vec<Tensor>, args: &'static str, code: i32, message: &'static str, hint: &'static str) -> Case {
    case(name, move |folder| file(&folder.join("in"), METADATA, &tensors), args, code, message, hint)
}

#[test]
fn flags() {
    let amount = "is not a fraction from 0.0 to 1.0, a percentage like 50%, or a whole number";
    check([
        small("an amount above one", "prune-unstructured in -o out --amount 1.5", 2, "`1.5` is not a fraction from 0.0 to 1.0", ""),
        small("a negative amount", "prune-unstructured in -o out --amount -1", 2, amount, ""),
        small("an amount without a unit", "prune-unstructured in -o out --amount 50", 2, "amount): 50 needs a unit: write `0.5` or `50%`", ""),
        small("a rule without a unit", "prune-unstructured in -o out --rule *query.weight=30", 2, "rules): 30 needs a unit: write `0.3` or `30%`", ""),
        small("units of several kinds", "prune-structured in -o out --amount 25", 2, "amount): 25 needs a unit: write `0.25` or `25%`", ""),
        small("a cost in percent", "prune-structured in -o out --target macs=50", 2, "it is the remaining fraction; write `0.5` or `50%`", ""),
        small(
            "a limit in percent",
            "search-structure in -o out --limit layers=50 --calibration x.txt",
            2,
            "it is the remaining fraction; write `0.5` or `50%`",
            "",
        ),
        small("an unknown limit", "search-structure in -o out --limit macs=0.5 --calibration x.txt", 2, "is not layers=0.5, params=12000000 or bytes=50MB", ""),
        small("a width of zero", "search-structure in -o out --widths 0.5,0 --calibration x.txt", 2, "widths): 0 is not between 0 and 1", ""),
        small("a rate without steps", "search-structure in -o out --learning-rate 0.1 --calibration x.txt", 2, "has no effect without `steps`", ""),
        small("more than everything", "prune-unstructured in -o out --amount 150%", 2, "`150%` is not a fraction", ""),
        small("NaN as an amount", "prune-unstructured in -o out --amount nan", 2, amount, ""),
        small(
            "more than there is",
            "prune-unstructured in -o out --amount 257",
            2,
            "amount: 257 weights cannot be pruned from tensor `encoder.layer.0.attention.self.query.weight`, which has 256",
            "",
        ),
        small(
            "more than all have",
            "prune-unstructured in -o out --amount 2561 --scope global",
            2,
            "2561 weights cannot be pruned from the selected tensors, which has 2560",
            "",
        ),
        small("five of four", "prune-unstructured in -o out --pattern 5:4", 2, "pattern `5:4` is not N:M with N no larger than M", ""),
        small("no pattern", "prune-unstructured in -o out --pattern half", 2, "pattern `half` is not N:M", ""),
        small(
            "a pattern that does not divide",
            "prune-unstructured in -o out --pattern 2:5",
            1,
            "tensor `encoder.layer.0.attention.self.query.weight`: has 16 inputs (shape [16, 16]), which is not a multiple of the group size of 2:5",
            "add it to `ignore`, or choose another pattern",
        ),
        small(
            "a pattern for a vector",
            "prune-unstructured in -o out --pattern 2:4 --targets *query.bias",
            1,
            "query.bias`: has the shape [16], but 2:4 needs at least two dimensions",
            "add it to `ignore`",
        ),
        small(
            "a pattern and an amount",
            "prune-unstructured in -o out --pattern 2:4 --amount 0.5",
            2,
            "pass 1 (prune-unstructured): `pattern` and `amount` exclude each other",
            "",
        ),
        small("a pattern and a scope", "prune-unstructured in -o out --pattern 2:4 --scope global", 2, "`pattern` and `scope: global` exclude each other", ""),
        small("a pattern and a rule", "prune-unstructured in -o out --pattern 2:4 --rule *dense*=0.1", 2, "`pattern` and `rules` exclude each other", ""),
        small("a rule without an amount", "prune-unstructured in -o out --rule *dense*", 2, "rule `*dense*` is not PATTERN=AMOUNT", ""),
        small(
            "groups that do not divide",
            "quantize-dynamic in -o out --granularity group --group-size 24",
            1,
            "has 16 inputs per row, which is not a multiple of the group size 24",
            "choose another group_size, or add it to `ignore`",
        ),
        small(
            "groups of the default size",
            "quantize-dynamic in -o out --granularity group",
            1,
            "has 16 inputs per row, which is not a multiple of the group size 128",
            "choose another group_size",
        ),
        small("groups of no inputs", "quantize in -o out --group-size 0", 2, "`group_size` must be at least 1, or -1 for one scale per row", ""),
        small(
            "groups of a scheme that has its own",
            "quantize in -o out --scheme NVFP4A16 --group-size 32",
            2,
            "`group_size` is not supported for NVFP4A16",
            "",
        ),
        small(
            "groups of no weight",
            "quantize in -o out --scheme W4A16 --group-size 8 --rule *=W8A16",
            2,
            "group_size: has no effect, because `rules` assign a scheme to every selected weight",
            "",
        ),
        small("fourth powers of floats", "quantize in -o out --scheme FP8-DYNAMIC --observer l4", 2, "`observer: l4` requires an integer scheme", ""),
        small("a search over rows", "quantize in -o out --scheme FP8-BLOCK --observer mse", 2, "supports only `observer: minmax`", ""),
        small("an unknown scheme", "quantize in -o out --scheme W3A3", 2, "invalid value 'W3A3' for '--scheme <SCHEME>'", ""),
        small("groups of nothing", "quantize-dynamic in -o out --granularity group --group-size 0", 2, "`group_size` must be at least 1", ""),
        small(
            "a negative group",
            "quantize-dynamic in -o out --granularity group --group-size -4",
            2,
            "invalid value '-4' for '--group-size…: the number must not be negative",
            "",
        ),
        small(
            "a word for a number",
            "quantize-dynamic in -o out --granularity group --group-size many",
            2,
            "invalid value 'many' for '--group-size…: expected a whole number",
            "",
        ),
        small(
            "half a number",
            "quantize-dynamic in -o out --granularity group --group-size 1.5",
            2,
            "invalid value '1.5' for '--group-size…: expected a whole number",
            "",
        ),
        small(
            "a number past the end",
            "quantize-dynamic in -o out --granularity group --group-size 99999999999999999999999",
            2,
            "invalid value '99999999999999999999999' for '--group-size…: the number is too large",
            "",
        ),
        small(
            "a group size without groups",
            "quantize-dynamic in -o out --group-size 16",
            2,
            "pass 1 (quantize-dynamic): `group_size` needs `granularity: group`",
            "",
        ),
        small("an unknown scope", "prune-unstructured in -o out --scope layer", 2, "invalid value 'layer'…possible values: tensor, global", ""),
        small("an unknown float", "cast in -o out --to f8", 2, "invalid value 'f8'…possible values: f32, f16, bf16", ""),
        small("an unknown format", "cast in -o out --export tflite", 2, "unknown name `tflite`, expected", ""),
        small("a format twice", "cast in -o out --export safetensors --export safetensors", 2, "export: `safetensors` is listed twice", ""),
        small("no size", "cast in -o out --shard-size 5XB", 2, "`5XB` is not a size like 5GB, 500MB or 2GiB", ""),
        small("a size of nothing", "cast in -o out --shard-size 0", 2, "`0` is not a size", ""),
        small("no threads", "cast in -o out --threads 0", 2, "invalid value '0' for '--threads", ""),
        small("an unknown flag", "cast in -o out --too f16", 2, "unexpected argument '--too'…a similar argument exists: '--to'", ""),
        small("bits", "quantize in -o out --bits 4", 2, "unexpected argument '--bits'…tip: a scheme specifies the bits: `compress quantize", ""),
        small("a type", "cast in -o out --dtype=bf16", 2, "unexpected argument '--dtype'…tip: types are changed with `--to`", ""),
        small(
            "an option of the output",
            "chain in -o out -- cast --loads vllm",
            2,
            "'--loads'…tip: `--loads` applies to the output: write it before the first `--`",
            "",
        ),
        #[cfg(feature = "run")]
        small(
            "data of a recipe",
            "analyze recipe.yaml --calibration x.txt",
            2,
            "'--calibration'…tip: data sets are keys of the recipe: `--set 'data.calibration={ text: FILE }'`",
            "",
        ),
        #[cfg(feature = "run")]
        small(
            "evaluation data of a recipe",
            "plan recipe.yaml --eval x.txt",
            2,
            "'--eval'…tip: data sets are keys of the recipe: `--set 'data.evaluation={ text: FILE }'`",
            "",
        ),
        small("a signature of a pass", "chain in -o out -- cast --sign key.pem", 2, "'--sign'…tip: `--sign` applies to the output", ""),
        #[cfg(feature = "run")]
        small("data of the Hub", "quantize-static in -o out --calibration hf:org/name", 2, "`hf:org/name` is not a file: data sets are not downloaded", ""),
        #[cfg(feature = "run")]
        small("evaluation data", "eval in --eval x.txt", 2, "unexpected argument '--eval'…tip: the option is `--data`", ""),
        #[cfg(feature = "run")]
        small("data without an option", "eval in x.txt", 2, "unexpected argument 'x.txt'…tip: samples need an option: `--data FILE`", ""),
        #[cfg(feature = "run")]
        small("a prompt without an option", "generate in Once", 2, "unexpected argument 'Once'…tip: a prompt needs an option: `--prompt TEXT`", ""),
        small("an unknown command", "prune in -o out", 2, "unrecognized subcommand 'prune'…'prune-unstructured'", ""),
        small("another spelling of a command", "quantise in -o out", 2, "a similar subcommand exists: 'quantize'\n", ""),
        small("another spelling in a request for help", "help quantise", 2, "a similar subcommand exists: 'quantize'\n", ""),
        small("another spelling in a chain", "chain in -o out -- quantise", 2, "a similar subcommand exists: 'quantize'\n", ""),
        small("a command of another tool", "export in -o out", 2, "tip: `compress cast MODEL -o DIR --to f32 --export onnx` writes another format", ""),
        small("an option of another tool", "prune-unstructured in -o out --sparsity 0.5", 2, "'--sparsity'…tip: the option is `--amount`", ""),
        small("an option of another tool in a chain", "chain in -o out -- prune-unstructured --sparsity 0.5", 2, "tip: the option is `--amount`", ""),
        small("an option with an underscore", "quantize in -o out --group_size 32", 2, "tip: the option is `--group-size`", ""),
        #[cfg(feature = "run")]
        small("a corpus", "prune-vocabulary in -o out --corpus a.txt", 2, "tip: the option is `--keep`", ""),
        small("an output without an option", "quantize in out/x", 2, "unexpected argument 'out/x'…tip: the output is an option: `-o out/x`", ""),
        small("a scheme of another tool", "quantize in -o out --scheme int4", 2, "invalid value 'int4'…W4A16…tip: did you mean `W4A16`?", ""),
        small(
            "a type of GGUF files",
            "quantize in -o out --scheme iq3_s",
            2,
            "tip: IQ3_S is a type of GGUF files: `compress cast MODEL -o small.gguf --to f32 --export 'gguf: { type: IQ3_S }'`",
            "",
        ),
        #[cfg(feature = "run")]
        small("a negative learning rate", "finetune in -o out --learning-rate -1 --train a.txt", 2, "learning_rate", ""),
        small(
            "a file of another format",
            "densify in -o x.gguf",
            1,
            "x.gguf: is of the format gguf, but `densify` writes safetensors",
            "`compress cast MODEL -o x.gguf --to f32`",
        ),
        small(
            "a model of the Hub without its scheme",
            "inspect HuggingFaceTB/SmolLM2-135M-Instruct",
            1,
            "cannot open HuggingFaceTB/SmolLM2-135M-Instruct: the folder does not exist",
            "write `hf:HuggingFaceTB/SmolLM2-135M-Instruct`",
        ),
        small("a file that does not exist", "inspect models/m.gguf", 1, "cannot open models/m.gguf: No such file", "check the name"),
        small("no output", "cast in", 2, "required arguments were not provided…--output <DIR>", ""),
        small("no pass in a chain", "chain in -o out", 2, "chain: no pass: write a `--` before each pass", ""),
        small("an empty pass in a chain", "chain in -o out -- cast -- -- cast", 2, "chain: no pass: write a `--` before each pass", ""),
        small("an unknown pass in a chain", "chain in -o out -- cats", 2, "unrecognized subcommand 'cats'…'cast'", ""),
        small(
            "the second pass of a chain",
            "chain in -o out -- cast -- quantize-dynamic --group-size 16",
            2,
            "pass 2 (quantize-dynamic): `group_size` needs",
            "",
        ),
        small("an unknown shell", "completions tcsh", 2, "invalid value 'tcsh'…bash, elvish, fish, powershell, zsh", ""),
    ]);
}

#[cfg(feature = "run")]
#[test]
fn options_without_effect_on_training() {
    let reads = "has no effect, because no loss reads the teacher: remove it, or add `soft`";
    check([
        small("momentum of adamw", "finetune in -o out --momentum 0.5 --train a.txt", 2, "momentum): is that of `sgd` and `muon`: remove it", ""),
        small(
            "the end of a constant rate",
            "finetune in -o out --schedule constant,min_rate=0.5 --train a.txt",
            2,
            "schedule): `min_rate` needs `kind: cosine` or `linear`",
            "",
        ),
        small(
            "a teacher of a fine-tuning",
            "finetune in -o out --offload teacher --train a.txt",
            2,
            "offload): `teacher` has no effect, because only `distill` has a teacher: remove it",
            "",
        ),
        small("a teacher without a loss", "distill in -o out --teacher in --losses hard=1 --train a.txt", 2, reads, ""),
        small("an offloaded teacher without a loss", "distill in -o out --offload teacher --losses hard=1 --train a.txt", 2, reads, ""),
        small("cached logits without a loss", "distill in -o out --teacher-cache logits --losses hard=1 --train a.txt", 2, reads, ""),
        small(
            "an offloaded teacher with its logits",
            r#"distill in -o out --offload teacher --teacher-logits logits.jsonl --losses {"soft":{"temperature":1}} --train a.txt"#,
            2,
            "has no effect, because `teacher_logits` replace the teacher",
            "",
        ),
    ]);
}

#[test]
fn names_that_match_nothing() {
    let lists = "`compress inspect` lists all names";
    check([
        small(
            "targets of pruning",
            "prune-unstructured in -o out --targets encoder.layer.0.output.dens.weight",
            2,
            "`targets` pattern `encoder.layer.0.output.dens.weight` matches no tensor",
            "did you mean `encoder.layer.0.output.dense.weight`?",
        ),
        small(
            "targets of quantization",
            "quantize-dynamic in -o out --targets *output.desne*",
            2,
            "`targets` pattern `*output.desne*` matches no tensor",
            lists,
        ),
        small(
            "targets of a cast",
            "cast in -o out --targets embedding.word_embeddings",
            2,
            "`targets` pattern `embedding.word_embeddings` matches no tensor",
            "did you mean `embeddings.word_embeddings.weight`?",
        ),
        small("ignored", "prune-unstructured in -o out --ignore *pooler*", 2, "`ignore` pattern `*pooler*` matches no tensor", lists),
        small(
            "a rule after another",
            "prune-unstructured in -o out --rule *query*=0.1 --rule *query.weight=0.2",
            2,
            "rules before it apply to all weights",
            "",
        ),
        small("a rule", "prune-unstructured in -o out --rule *pooler*=0.1", 2, "`rules` pattern `*pooler*` matches no tensor", lists),
        small("the second pass", "chain in -o out -- cast -- prune-unstructured --ignore lm_head", 2, "`ignore` pattern `lm_head` matches no tensor", lists),
        small("a bad expression", "cast in -o out --targets re:(", 2, "pattern `re:(`: unclosed group", ""),
        small("an expression too large", "cast in -o out --targets re:(a{1000}){1000}", 2, "Compiled regex exceeds size limit", ""),
        small(
            "everything ignored",
            "prune-unstructured in -o out --ignore *",
            2,
            "prune-unstructured: no weight is selected…list weights in `targets`; `compress inspect` prints their names",
            "",
        ),
    ]);
}

#[test]
fn values_that_are_not_finite() {
    let nan = || vec![f32s("x.weight", &[2, 2], &[1.0, f32::NAN, 2.0, f32::NEG_INFINITY])];
    let scaled = vec![tensor("x.weight", "I8", &[1, 4], &[1, 2, 3, 4]), f32s("x.weight_scale", &[1], &[f32::INFINITY])];
    let said = "tensor `x.weight` holds 2 NaN or infinite values";
    let hint = "set `--allow-nonfinite`";
    check([
        tensors("pruning", nan(), "prune-unstructured in -o out", 1, said, hint),
        tensors("global pruning", nan(), "prune-unstructured in -o out --scope global", 1, said, hint),
        tensors("quantization", nan(), "quantize-dynamic in -o out", 1, said, hint),
        tensors("quantization by squared error", nan(), "quantize-dynamic in -o out --observer mse", 1, said, hint),
        tensors("a cast", nan(), "cast in -o out", 1, said, hint),
        tensors("a copy", nan(), "densify in -o out", 1, said, hint),
        tensors("the sparse layout", nan(), "prune-unstructured in -o out --layout sparse", 1, said, hint),
        tensors("a scale", scaled, "densify in -o out", 1, "tensor `x.weight` holds 1 NaN or infinite value", hint),
    ]);
}

#[test]
fn weights_that_a_pass_does_not_support() {
    let empty = || vec![tensor("x.weight", "F32", &[0, 4], &[]), floats("y.weight", &[4, 4])];
    let large = || vec![f32s("x.weight", &[2, 2], &[1.0, 70000.0, 2.0, 3.0])];
    let wide = vec![tensor("x.weight", "F64", &[1], &1e300f64.to_le_bytes())];
    let counts = || vec![tensor("x.weight", "I64", &[1, 1], &[0; 8])];
    let mixed = vec![tensor("x.weight", "F64", &[1, 1], &1f64.to_le_bytes()), floats("y.weight", &[4, 4])];
    let taken = vec![floats("x.weight", &[4, 4]), floats("x.weight_scale", &[1])];
    let left_over = vec![floats("x.weight", &[4, 4]), floats("x.input_scale", &[1])];
    let quantized = |folder: &Path| {
        model(&folder.join("float"));
        ok(folder, "quantize-dynamic float -o in");
    };
    let again = "quantize last, run `dequantize` before this pass, or add the tensor to `ignore`";
    check([
        tensors(
            "an empty tensor to prune",
            empty(),
            "prune-unstructured in -o out --targets x",
            1,
            "tensor `x.weight`: is empty (shape [0, 4])",
            "add it to `ignore`",
        ),
        tensors(
            "an empty tensor to quantize",
            empty(),
            "quantize-dynamic in -o out --targets *.weight",
            1,
            "tensor `x.weight`: is empty",
            "add it to `ignore`",
        ),
        tensors(
            "too large for f16",
            large(),
            "cast in -o out --to f16",
            1,
            "tensor `x.weight`: contains 7e4, but the largest value of float16 is 6.5504e4",
            "cast to bf16 (`to: bf16`), set overflow: saturate",
        ),
        tensors(
            "too small for f16",
            vec![f32s("x.weight", &[2, 2], &[1e-9, 0.0, -2e-9, 1e-30])],
            "cast in -o out --to f16",
            1,
            "tensor `x.weight`: contains only values that become zero in float16",
            "cast to bf16 (`to: bf16`), or add the tensor to `ignore`",
        ),
        tensors(
            "too large for f16, then int8",
            large(),
            "chain in -o out -- cast --to f16 -- quantize-dynamic",
            1,
            "tensor `x.weight`: contains 7e4",
            "cast to bf16",
        ),
        tensors(
            "too large for f32",
            wide,
            "cast in -o out --to f32",
            1,
            "tensor `x.weight`: contains a value above 3.4028235e38, but the largest value of float32 is 3.4028235e38",
            "set overflow: saturate",
        ),
        tensors(
            "integers to prune",
            counts(),
            "prune-unstructured in -o out --targets x",
            1,
            "tensor `x.weight`: has the dtype I64, but prune-unstructured needs F16, BF16, F32 or F64",
            "add it to `ignore`",
        ),
        small("floats to dequantize", "dequantize in -o out", 2, "dequantize: the model has no quantized weights…`compress cast` writes them as floats", ""),
        tensors("integers only", counts(), "quantize-dynamic in -o out", 2, "quantize-dynamic: no weight is selected", ""),
        tensors(
            "f64 ranked with f32",
            mixed,
            "prune-unstructured in -o out --scope global",
            1,
            "tensor `x.weight`: is F64 and cannot be ranked jointly with narrower floats",
            "use `scope: tensor`",
        ),
        tensors("a name that is taken", taken, "quantize-dynamic in -o out", 1, "tensor `x.weight_scale`: would be written twice", "rename it"),
        tensors(
            "a left-over parameter",
            left_over,
            "quantize-dynamic in -o out",
            1,
            "tensor `x.input_scale`: would be read as a parameter of `x.weight`, which is quantized now",
            "or add `x.weight` to `ignore`",
        ),
        small(
            "a vector to quantize",
            "quantize-dynamic in -o out --targets *query.bias",
            1,
            "has the shape [16], but quantize-dynamic supports only matrices",
            "add it to `ignore`",
        ),
        case("int8 to quantize", quantized, "quantize-dynamic in -o out", 1, "is already int8 channel, but quantize-dynamic needs floats", again),
        case("int8 to prune", quantized, "prune-unstructured in -o out", 1, "is already int8 channel, but prune-unstructured needs floats", again),
        case("int8 to cast", quantized, "cast in -o out --targets *dense*", 1, "is already int8 channel, but cast needs floats", again),
        small("quantized twice", "chain in -o out -- quantize-dynamic -- quantize-dynamic", 1, "is already int8 channel", again),
        small("pruned after quantization", "chain in -o out -- quantize-dynamic -- prune-unstructured", 1, "is already int8 channel", again),
    ]);
}

#[test]
fn layers_that_are_stored_transposed() {
    let gpt2 = |folder: &Path| model_of(&folder.join("in"), &json!({ "model_type": "gpt2" }), &[floats("h.0.attn.c_attn.weight", &[16, 48])]);
    check([
        case(
            "int8",
            gpt2,
            "quantize-dynamic in -o out",
            1,
            "tensor `h.0.attn.c_attn.weight`: is a quantized weight of a gpt2 model, which stores layers as [in, out]: compressed-tensors does not support this",
            "export with layout: sparse or layout: dense",
        ),
        case(
            "a pattern",
            gpt2,
            "prune-unstructured in -o out --pattern 2:4",
            1,
            "tensor `h.0.attn.c_attn.weight`: belongs to a gpt2 model, whose layers are stored as [in, out]",
            "use an amount instead of a pattern",
        ),
    ]);
}

#[test]
fn tables_of_one_family_with_different_values() {
    let shared = |folder: &Path| {
        let tensors = [floats("shared.weight", &[8, 4]), floats("encoder.embed_tokens.weight", &[8, 4])];
        model_of(&folder.join("in"), &json!({ "model_type": "t5", "architectures": ["T5EncoderModel"] }), &tensors);
    };
    let one = "tensor `encoder.embed_tokens.weight`: is always `shared.weight` in this family, but both are stored with different values";
    let hint = "the family shares one table: remove the wrong one from the checkpoint";
    check([case("one of both", shared, "prune-unstructured in -o out --targets shared.weight", 1, one, hint)]);
}

/// An option that a command lacks is not a value.
#[test]
fn unknown_options_are_not_suggested_as_values() {
    let folder = tempfile::tempdir().unwrap();
    let run = crate::cli::support::compress(folder.path(), "densify in -o out --loads vllm");
    assert!(run.code == 2 && run.stderr.contains("unexpected argument '--loads'") && !run.stderr.contains("as a value"), "{}", run.stderr);
}
