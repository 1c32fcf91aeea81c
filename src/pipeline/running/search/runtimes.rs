//! The runtimes that load the result, and their formats.

use std::fmt;

use super::blocks::Blocks;
use super::formats::Formats;
use super::onnx_layers::{Arithmetics, OnnxLayers};
use super::pruned::Pruned;
use super::schemes::Schemes;
use super::uniform::UniformWidths;
use crate::arch::{self, ModelKind, Settings};
use crate::contract::Runtime;
use crate::contract::facts::initializes_from_weight;
use crate::error::{Error, Result};
use crate::model::{self, Model};
use crate::pass::Scheme;
use crate::store::{Encoding, Weight};

/// The runtime that loads the result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[non_exhaustive]
pub enum LoadedBy {
    /// vLLM: int4 and int8 weights in groups, which its kernels multiply by float activations
    #[default]
    Vllm,
    /// transformers with compressed-tensors: int2 to int8 in groups
    Transformers,
    /// llama.cpp: a GGUF file with a type for each matrix, including the embedding and the head
    #[cfg_attr(feature = "cli", value(name = "llama.cpp", alias = "llama-cpp"))]
    LlamaCpp,
    /// ONNX Runtime: an ONNX file with int8, int4, float16 and float layers, for encoders and vision models
    /// too
    #[cfg_attr(feature = "cli", value(name = "onnxruntime"))]
    OnnxRuntime,
}

/// The formats of layers of ONNX files, for a limit of the time or of another quantity.
fn arithmetics(by_time: bool) -> Arithmetics {
    if by_time { Arithmetics::Timed } else { Arithmetics::Fast }
}

/// Checks that transformers does not initialize all linear layers of a model by their `weight`, which packed
/// layers lack.
fn require_packable(model: &Model) -> Result<()> {
    let is_unpackable = |name: &String| initializes_from_weight(model.config.model_type(), name.strip_suffix(".weight").unwrap_or(name));
    let linear = || model.weights.by_name.iter().filter(|(name, weight)| model::is_linear(name, weight)).map(|(name, _)| name);
    match linear().next().filter(|_| linear().all(is_unpackable)) {
        None => Ok(()),
        Some(name) => {
            let reason = "cannot be packed, as in all formats of `auto` for transformers, which initializes the layers of this family by their `weight`";
            Err(Error::tensor(name, reason, "use `compress quantize --scheme W8A8` or `FP8-DYNAMIC`, or `--for onnxruntime`"))
        }
    }
}

impl fmt::Display for LoadedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(crate::report::format::runtime_name(self.runtime().name()))
    }
}

impl LoadedBy {
    /// The formats that the runtime loads, for the weights of a model: those with these names, or all if
    /// there are none. Formats of ONNX Runtime that may be slower than floats are options of layers if they
    /// are named, or if times are measured (`by_time`); 16-bit floats, which are as fast as others, are
    /// options otherwise. `fractions`: fractions of units that may remain after structured pruning, for each
    /// layer of an ONNX file, and for all layers alike of other models, whose config.json has one width.
    ///
    /// # Errors
    /// If the runtime does not load the model, or not a format, or if no layer can have a fraction.
    pub(super) fn formats(self, model: &Model, only: &[String], by_time: bool, fractions: &[f64]) -> Result<Box<dyn Formats>> {
        if !fractions.is_empty() {
            if self != LoadedBy::OnnxRuntime {
                let loaded = move |model: &Model, only: &[String]| self.formats(model, only, false, &[]);
                return Ok(Box::new(UniformWidths::new(model, Box::new(loaded), only, fractions)?));
            }
            let mut layers = OnnxLayers::new(model, arithmetics(by_time))?;
            self.select(&mut layers, only)?;
            return Ok(Box::new(Pruned::new(model, layers, fractions)?));
        }
        let mut all = self.all_formats(model, by_time)?;
        self.select(&mut *all, only)?;
        Ok(all)
    }

    /// Removes the formats without these names, if there are any.
    fn select(self, all: &mut dyn Formats, only: &[String]) -> Result<()> {
        let names = all.names();
        let (floats, named) = names.split_last().map_or((None, &[][..]), |(floats, named)| (Some(floats), named));
        if let Some(unknown) = only.iter().find(|name| !named.contains(name) && floats != Some(name)) {
            return Err(Error::option("--formats", format!("`{unknown}` is not a format for {self}; its formats are {}", named.join(", "))));
        }
        if !only.is_empty() {
            let kept: Vec<bool> = named.iter().map(|name| only.contains(name)).collect();
            if !kept.contains(&true) {
                return Err(Error::option("--formats", format!("names no format besides floats; formats for {self} are {}", named.join(", "))));
            }
            all.retain(&kept);
        }
        Ok(())
    }

    /// Checks that the runtime loads models of this kind, and that formats can be chosen for the weights.
    ///
    /// # Errors
    /// The model is an ONNX file or a vision model, which other runtimes load, or is already quantized.
    pub fn require_loads(self, model: &Model) -> Result<()> {
        let is_quantized = |(name, weight): &(&String, &Weight)| weight.encoding != Encoding::Dense && model::is_prunable(name, weight);
        if let Some((name, weight)) = model.weights.by_name.iter().find(is_quantized) {
            let (path, format) = (model.path.display(), weight.describe());
            let how = "start from the original checkpoint, or run `compress dequantize` and search for formats of its output";
            return Err(Error::option(
                "auto",
                format!("the input {path} is already quantized: `{name}` is {format}, but formats are chosen for floats: {how}"),
            ));
        }
        if self == LoadedBy::OnnxRuntime {
            return Ok(());
        }
        let splits_experts = arch::splits_experts(model.config.model_type());
        let stacked = model.weights.by_name.iter().find(|(name, weight)| splits_experts && model::stacked_experts(name, weight).is_some());
        if let Some((name, _)) = stacked.filter(|_| self == LoadedBy::Transformers) {
            let reason = "contains all experts of a layer, which transformers reads as separate layers in quantized folders";
            return Err(Error::tensor(name, reason, "use `compress split-experts` first, and search on its output"));
        }
        let kind = arch::family(model.config.model_type()).map(|family| family.kind_of(&Settings::new(model.config.values())));
        let weights = || model.weights.by_name.iter();
        let bytes: u64 = weights().map(|(_, weight)| weight.stored_bytes).sum();
        let convolutions: u64 = weights().filter(|(name, weight)| model::is_convolution(name, weight)).map(|(_, weight)| weight.stored_bytes).sum();
        let is_convolutional = kind.map_or(2 * convolutions > bytes, |kind| kind == ModelKind::Convolutional);
        let reason = match (self, kind) {
            _ if model.onnx.is_some() => "does not load ONNX files",
            (LoadedBy::Transformers, _) if is_convolutional => "loads convolutions only as floats",
            _ if is_convolutional => "does not load convolutional networks",
            (LoadedBy::Vllm | LoadedBy::LlamaCpp, Some(ModelKind::VisionTransformer)) => "does not load vision transformers",
            (LoadedBy::Vllm | LoadedBy::LlamaCpp, Some(ModelKind::Detector)) => "does not load detectors",
            (LoadedBy::Transformers, _) => return require_packable(model),
            _ => return Ok(()),
        };
        Err(Error::option("--for", format!("{}: {self} {reason}: use `--for onnxruntime`", model.path.display())))
    }

    fn all_formats(self, model: &Model, by_time: bool) -> Result<Box<dyn Formats>> {
        Ok(match self {
            // https://docs.vllm.ai/en/latest/features/quantization: WNA16 of compressed-tensors has 4 and 8
            // bits, with 4 bits also zero points.
            LoadedBy::Vllm => Box::new(Schemes::new(
                model,
                &[
                    (Scheme::W4A16, 128),
                    (Scheme::W4A16Asym, 128),
                    (Scheme::W4A16, 64),
                    (Scheme::W4A16Asym, 64),
                    (Scheme::W4A16, 32),
                    (Scheme::W4A16Asym, 32),
                    (Scheme::W8A16, 128),
                    (Scheme::W8A16, 32),
                ],
            )),
            // transformers unpacks the weights when it loads them, so that all widths are supported.
            LoadedBy::Transformers => Box::new(Schemes::new(
                model,
                &[
                    (Scheme::W2A16, 32),
                    (Scheme::W3A16, 64),
                    (Scheme::W4A16, 128),
                    (Scheme::W4A16, 32),
                    (Scheme::W5A16, 64),
                    (Scheme::W6A16, 64),
                    (Scheme::W8A16, 64),
                ],
            )),
            LoadedBy::LlamaCpp => Box::new(Blocks::new(model)?),
            LoadedBy::OnnxRuntime => Box::new(OnnxLayers::new(model, arithmetics(by_time))?),
        })
    }

    /// The runtime whose rules the result must comply with.
    pub fn runtime(self) -> Runtime {
        match self {
            LoadedBy::Vllm => Runtime::Vllm,
            LoadedBy::Transformers => Runtime::Transformers,
            LoadedBy::LlamaCpp => Runtime::LlamaCpp,
            LoadedBy::OnnxRuntime => Runtime::OnnxRuntime,
        }
    }

    /// Whether the result is a single file.
    pub fn is_file(self) -> bool {
        matches!(self, LoadedBy::LlamaCpp | LoadedBy::OnnxRuntime)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn families_without_packed_layers_are_refused_before_the_search() {
        let model = |name: &str| Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)).unwrap();
        for name in ["t5", "modernbert"] {
            let error = LoadedBy::Transformers.require_loads(&model(name)).unwrap_err();
            assert!(error.to_string().contains("cannot be packed"), "{error}");
            assert!(error.hint().is_some_and(|hint| hint.contains("quantize --scheme W8A8")), "{error}");
            LoadedBy::OnnxRuntime.require_loads(&model(name)).unwrap();
        }
        LoadedBy::Transformers.require_loads(&model("llama")).unwrap();
    }
}
