//! Values of options that are likely mistakes: percentages without a sign, and structured values.

use std::fs;

use super::{prepared, refused};
use crate::cli::support::{command, compress, data, names, ok};

#[test]
fn ratios_are_fractions_or_percentages() {
    let folder = prepared();
    let path = folder.path();
    for (args, message) in [
        ("auto in -o out --max-size 40", "`40` needs a unit: write `0.4` or `40%` of the input, `40bits`, or `40MB`"),
        ("auto in -o out --max-loss 5 --calibration ids.safetensors", "write `0.05` or `5%`"),
        ("prune-unstructured in -o out --amount 40", "40 needs a unit: write `0.4` or `40%`"),
        ("prune-structured in -o out --target params=40", "write `0.4` or `40%`"),
        ("search-structure in -o out --widths 25,50 --calibration ids.safetensors", "`25` is not a fraction: write `0.25` or `25%`"),
        ("quantize in -o out --propagation 50 --calibration ids.safetensors", "`50` is not a fraction: write `0.5` or `50%`"),
        ("generate in --prompt a --top-p 90", "`90` is not a fraction: write `0.9` or `90%`"),
        ("finetune in -o out --train ids.safetensors --masking 15", "`15` is not a fraction: write `0.15` or `15%`"),
    ] {
        refused(path, args, message);
    }
    let recipe = |pass: &str| fs::write(path.join("recipe.yaml"), format!("model: in\npasses: [{pass}]\noutput: out\n")).unwrap();
    for (pass, message) in [
        ("prune-structured: { target: { params: 40 } }", "`40` is not a fraction: write `0.4` or `40%`"),
        ("quantize: { propagation: 50 }", "`50` is not a fraction: write `0.5` or `50%`"),
        ("prune-unstructured: { amount: 40 }", "40 needs a unit: write `0.4` or `40%`"),
        ("search-structure: { limit: { layers: 40 } }", "`40` is not a fraction: write `0.4` or `40%`"),
    ] {
        recipe(pass);
        refused(path, "plan recipe.yaml", message);
    }
    // A percentage is the same option as its fraction.
    let options = |pass: &str| {
        recipe(pass);
        data(path, "plan recipe.yaml --json")["passes"][0]["options"].clone()
    };
    let percentage = options("prune-unstructured: { amount: 40% }");
    assert!(percentage.to_string().contains("0.4") && percentage == options("prune-unstructured: { amount: 0.4 }"), "{percentage}");
    assert_eq!(names(path), ["in", "recipe.yaml"]);
}

/// A wrong value of a structured option leads to an example, on the command line and in a recipe.
#[test]
fn structured_options_have_examples() {
    let folder = prepared();
    let path = folder.path();
    for (option, value, message) in [
        (
            "--schedule",
            "{ kind: cosine, warmup: 3 }",
            "unknown key `warmup`, did you mean `warmup_steps`?…example: --schedule \"{ kind: cosine, warmup_steps: 100 }\"",
        ),
        ("--losses", "{ soft: hot }", "example: --losses \"{ soft: 1.0, hidden: 0.5 }\""),
        ("--adapter", "{ r: 16 }", "unknown key `r`…example: --adapter \"{ rank: 16, alpha: 32 }\""),
        ("--augment", "flip", "example: --augment \"{ flip: true, shift: 4 }\""),
        ("--groups", "{ target: a }", "did you mean `targets`?…example: --groups \"{ targets: ['*.bias'], learning_rate: 0.001 }\""),
        ("--checkpoint-every", "10", "example: --checkpoint-every \"{ minutes: 10 }\""),
    ] {
        let run = command(path).args(["finetune", "in", "-o", "out", "--train", "ids.safetensors", option, value]).output().unwrap();
        let text = String::from_utf8_lossy(&run.stderr).into_owned();
        let mut rest = text.as_str();
        for part in message.split('…') {
            rest = rest.split_once(part).unwrap_or_else(|| panic!("{option} {value}: {part}\n{text}")).1;
        }
        assert_eq!(run.status.code(), Some(2), "{text}");
    }
    for (options, example) in [
        ("schedule: { warmup: 3 }", "Example: `schedule: { kind: cosine, warmup_steps: 100 }`"),
        ("schedule:\n        kind: cosin", "Example: `schedule: { kind: cosine, warmup_steps: 100 }`"),
        ("adapter: { rank: many }", "Example: `adapter: { rank: 16, alpha: 32 }`"),
        ("groups: { targets: [a] }", "Example: `groups: [{ targets: ['*.bias'], learning_rate: 0.001 }]`"),
        ("optimizer: adamx", "Example: `optimizer: adamw`"),
    ] {
        fs::write(path.join("recipe.yaml"), format!("model: in\npasses:\n  - finetune:\n      {options}\noutput: out\n")).unwrap();
        refused(path, "plan recipe.yaml", example);
    }
    // Other options have no example.
    fs::write(path.join("recipe.yaml"), "model: in\npasses:\n  - finetune: { epochs: many }\n").unwrap();
    assert!(!compress(path, "plan recipe.yaml").stderr.contains("Example"));
    fs::write(path.join("recipe.yaml"), "model: in\npasses:\n  - finetune: {}\n").unwrap();
    refused(path, "run recipe.yaml -o out --set finetune.schedule=fast", "example: `schedule: { kind: cosine, warmup_steps: 100 }`");
}

#[test]
fn arguments_of_other_tools_lead_to_ours() {
    let folder = prepared();
    for (args, tip) in [
        ("quantize in -o out --iters 200", "tip: the option is `--iterations`, with `--method autoround`"),
        ("quantize in -o out --seqlen 512", "tip: the length is an option of the data"),
        ("quantize in -o out --damp-percent 0.01", "tip: the option is `--damping`"),
        ("cast in -o x.gguf --to f32 --leave-output-tensor", "tip: types of tensors are options of the format"),
        ("cast in -o out.onnx --opset 21", "--export 'onnx: { opset: 21 }'"),
        ("finetune in -o out --warmup_steps 10", "`--schedule cosine,warmup_steps=100`"),
        ("finetune in -o out --num_train_epochs 3", "tip: the option is `--epochs`"),
        ("distill in -o out --resume_from_checkpoint x", "tip: the option is `--resume`"),
        ("llama-quantize in", "tip: `compress cast MODEL -o small.gguf --to f32"),
        ("upload in", "tip: an output can be a repository"),
        ("serve in", "`compress check DIR --loads vllm`"),
    ] {
        refused(folder.path(), args, tip);
    }
}

#[test]
fn swapped_and_misplaced_arguments_are_explained() {
    let folder = prepared();
    let path = folder.path();
    for args in ["cast out -o in --to f16", "quantize out -o in", "densify out -o in", "auto out -o in --max-size 25%"] {
        refused(
            path,
            args,
            "cannot open out: it does not exist, but the output in is a model\nhint: the model comes first, and `-o` names the output: in -o out",
        );
    }
    refused(path, "cast out -o new --to f16", "cannot open out: No such file or directory");
    fs::write(path.join("recipe.yaml"), "model: in\npasses: [cast]\n").unwrap();
    refused(path, "quantize recipe.yaml -o out", "recipes have a command: `compress run recipe.yaml`");
    refused(path, "quantize in/config.json -o out", "this file is in the folder `in`");
    refused(path, "inspect .", "its folders have weights: specify one of them, such as ./in");
    fs::write(path.join("recipe.yaml"), "model: in\npasses: [cast]\noutput: in/out\n").unwrap();
    refused(path, "plan recipe.yaml", "in/out: lies inside the input folder");
    refused(path, "eval in --data in", "`in` is the folder of a model, not data: specify a file of texts");
    refused(path, "eval in --data in/model.safetensors --against in", " and 9 more: is it a file of weights?");
    refused(path, "run in/config.json -o out", "in/config.json: describes a model; a recipe is a YAML file");
    fs::create_dir(path.join("folder")).unwrap();
    refused(path, "init in -o folder", "output folder: is a folder\nhint: name a file, such as folder/file.yaml");
    fs::remove_dir(path.join("folder")).unwrap();
    refused(path, "quantize in -o out --scheme int3", "tip: did you mean `W3A16`?");
    assert_eq!(names(path), ["in", "recipe.yaml"]);
    refused(path, "quantize https://huggingface.co/org/name -o out", "is a page of the Hugging Face Hub, not a file\nhint: write `hf:org/name`");
    for args in ["cast in -o ~/out --to f16", "cast ~/in -o out --to f16", "auto in -o ~/out --max-size 60%"] {
        refused(path, args, "the shell has not expanded `~`");
    }
    // Flags of the program may precede a chain.
    ok(path, "--memory 8GB chain in -o out -- cast --to f16");
}

#[test]
fn several_files_and_options_without_braces_are_explained() {
    let folder = prepared();
    let path = folder.path();
    for name in ["a.txt", "b.txt"] {
        fs::write(path.join(name), "a\n").unwrap();
    }
    refused(path, "eval in --data a.txt,b.txt", "several files are mixed: '{ mix: [{ text: a.txt }, { text: b.txt }] }'");
    refused(path, "eval in --data text=a.txt,samples=4", "options need braces: write '{ text: a.txt, samples: 4 }'");
    refused(path, "quantize in -o out --samples 4", "tip: the number of samples is an option of the data");
}

#[test]
fn mistakes_of_the_indentation_are_explained() {
    let folder = prepared();
    for (text, message) in [
        ("model: in\npasses:\n\t- cast: {}\n", "tabs disallowed within this context (block indentation): indent with spaces"),
        ("model: in\npasses: - cast\n", "begin a list on a new line, with a dash before each entry"),
        ("model: in: out\n", "quote texts that contain a colon"),
        ("model: in\npasses:\n  - quantize\n    scheme: W4A16\n", "unknown name `quantize scheme`: write `quantize:`, with a colon before its options"),
        ("model: in\npasses:\n  - quantize:\n      scheme: W4A16\n     group_size: 4\n", "did not find expected key: indent the keys of a map equally"),
    ] {
        fs::write(folder.path().join("recipe.yaml"), text).unwrap();
        refused(folder.path(), "plan recipe.yaml", message);
    }
}
