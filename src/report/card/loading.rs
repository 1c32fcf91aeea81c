//! How runtimes load an output.

use std::fmt::{Result, Write};

use super::Card;
use crate::contract::Runtime;
use crate::contract::facts::{has_tokenizer, vllm_max_lora_rank};
use crate::model::adapter::{self, FOLDER};
use crate::report::format::runtime_name;

/// Stands for the location of the output.
const PATH: &str = "path/to/model";
/// The only file of tokenizers that split texts into bytes.
const SETTINGS: &str = "tokenizer_config.json";
/// The class of transformers that can load packed weights as floats.
const DENSE: &str = "CompressedTensorsConfig";

/// Writes a section for each runtime whose rules the output complies with.
pub(super) fn write(card: &Card, out: &mut String) -> Result {
    let Some(targets) = card.loaded_by else {
        return writeln!(out, "`compress check {PATH} --loads vllm,sglang,transformers` checks which runtimes load the model.\n");
    };
    let versions = |runtime: Runtime| targets.iter().filter(|target| target.runtime() == runtime).map(|target| target.version()).collect::<Vec<_>>();
    let loading = Runtime::ALL.into_iter().map(|runtime| (runtime, versions(runtime))).filter(|(_, versions)| !versions.is_empty());
    let sections: Vec<(Runtime, Vec<&str>, [String; 2])> =
        loading.filter_map(|(runtime, versions)| Some((runtime, versions, example(card, runtime)?))).collect();
    if sections.is_empty() {
        writeln!(out, "None of the runtimes whose rules `compress check --loads` knows loads the model directly.\n")?;
        writeln!(out, "```sh\ncompress densify {PATH} -o dense\n```\n\nThis converts all weights to floats in safetensors.\n")?;
        return Ok(());
    }
    for (runtime, versions, [language, code]) in sections {
        let (noun, versions) = (if versions.len() > 1 { "versions" } else { "version" }, versions.join(", "));
        writeln!(out, "### {}\n\nComplies with the rules of {noun} {versions} (a static check).\n", runtime_name(runtime.name()))?;
        writeln!(out, "```{language}\n{code}\n```\n")?;
    }
    Ok(())
}

/// Code that loads the output, with its language. `None` if the runtime has no use for such a model.
fn example(card: &Card, runtime: Runtime) -> Option<[String; 2]> {
    let shell = |command: String| Some(["sh".to_owned(), command]);
    let has_tokenizer = has_tokenizer(card.files);
    match runtime {
        Runtime::Vllm | Runtime::Sglang if !has_tokenizer || card.is_sentence_encoder() => None,
        // Without the adapter, the model is not that of the figures.
        Runtime::Sglang if is_corrected(card) => None,
        Runtime::Vllm if is_corrected(card) => {
            let rank =
                card.report.passes.iter().rev().find_map(|pass| pass.details.get("correction").or_else(|| pass.details.get("adapter"))?.get("rank")?.as_u64());
            let limit = rank.and_then(vllm_max_lora_rank).map_or(String::new(), |limit| format!(" --max-lora-rank {limit}"));
            shell(format!("vllm serve {PATH} --enable-lora{limit} --lora-modules corrected={PATH}/{FOLDER}  # requests name the model `corrected`"))
        }
        // PEFT needs dequantized layers, and transformers dequantizes all of them by the first scheme.
        Runtime::Transformers if is_corrected(card) && groups(card) > 1 => {
            shell(format!("# PEFT does not load the adapter {PATH}/{FOLDER} in transformers, as layers have different schemes"))
        }
        Runtime::Vllm => shell(format!("vllm serve {PATH}")),
        Runtime::Sglang => shell(format!("python -m sglang.launch_server --model-path {PATH}")),
        Runtime::Transformers => Some(["python".to_owned(), in_python(card, has_tokenizer || card.files.contains(SETTINGS))]),
        Runtime::LlamaCpp => shell(format!("llama-server -m {}", inside(card.file("gguf")?))),
        Runtime::OnnxRuntime => {
            let code = format!("import onnxruntime\n\nsession = onnxruntime.InferenceSession(\"{}\")", inside(card.file("onnx")?));
            Some(["python".to_owned(), code])
        }
    }
}

/// Whether a LoRA adapter with corrections of the weights belongs to the model.
fn is_corrected(card: &Card) -> bool {
    card.config.contains_key(adapter::KEY)
}

/// The number of groups of layers with the same scheme.
fn groups(card: &Card) -> usize {
    card.config.get("quantization_config").and_then(|found| found.get("config_groups")?.as_object()).map_or(0, |groups| groups.len())
}

fn inside(file: &str) -> String {
    format!("{PATH}/{}", file.escape_default())
}

/// Ends of the names of classes of the vision towers of multimodal models.
const VISION_TOWERS: [&str; 2] = ["VisionTransformerPretrainedModel", "VLVisionModel"];
/// Classes that `AutoModel` of transformers 5.23 does not load, with their modules.
const NOT_AUTOMATIC: [(&str, &str); 1] = [("Qwen2VisionTransformerPretrainedModel", "qwen2_vl.modeling_qwen2_vl")];

fn in_python(card: &Card, has_tokenizer: bool) -> String {
    if card.is_sentence_encoder() {
        return format!("from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer(\"{PATH}\")");
    }
    let architecture = card.architecture().unwrap_or_default();
    let has_processor = ["preprocessor_config.json", "processor_config.json"].iter().any(|file| card.files.contains(*file));
    let class = card.task().map_or("AutoModel", |task| task.auto_class);
    let preprocessor = match () {
        // The processor of the whole model, which the file names, needs a tokenizer.
        () if has_processor && VISION_TOWERS.iter().any(|end| architecture.ends_with(end)) => Some(("AutoImageProcessor", "processor")),
        () if has_tokenizer && has_processor && class == "AutoModelForImageTextToText" => Some(("AutoProcessor", "processor")),
        () if has_tokenizer => Some(("AutoTokenizer", "tokenizer")),
        () if has_processor => Some(("AutoProcessor", "processor")),
        () => None,
    };
    if let Some((class, module)) = NOT_AUTOMATIC.iter().find(|(class, _)| *class == architecture) {
        let (import, line) = preprocessor.map_or_else(Default::default, |(class, name)| {
            (format!("from transformers import {class}\n"), format!("\n{name} = {class}.from_pretrained(\"{PATH}\")"))
        });
        return format!("{import}from transformers.models.{module} import {class}\n\nmodel = {class}.from_pretrained(\"{PATH}\"){line}");
    }
    // PEFT adapts layers by their weights, which those with packed weights lack.
    let corrected = is_corrected(card);
    let packed = corrected && card.config.contains_key("quantization_config");
    let imports = [Some(class), preprocessor.map(|(class, _)| class), packed.then_some(DENSE)].into_iter().flatten().collect::<Vec<_>>().join(", ");
    let dense = if packed { format!(", quantization_config={DENSE}(run_compressed=False)") } else { String::new() };
    let lines = [Some((class, "model", dense.as_str())), preprocessor.map(|(class, name)| (class, name, ""))].into_iter().flatten();
    let lines = lines.map(|(class, name, options)| format!("\n{name} = {class}.from_pretrained(\"{PATH}\"{options})"));
    let import = if corrected { "from peft import PeftModel\n" } else { "" };
    // `load_adapter` of transformers 5 ignores the norms of DoRA.
    let corrections = if corrected { format!("\nmodel = PeftModel.from_pretrained(model, \"{PATH}/{FOLDER}\")") } else { String::new() };
    format!("{import}from transformers import {imports}\n{}{corrections}", lines.collect::<String>())
}
