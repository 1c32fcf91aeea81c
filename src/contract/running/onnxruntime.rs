//! Rules of ONNX Runtime.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::contract::{Checked, Finding, Needs, Planned, ReadByRuntime, Rule, Target, apply};
use crate::error::{Error, Result};
use crate::files;
use crate::onnx::ModelFile;
use crate::onnx::file::{MODEL, encoder_decoder};
use crate::onnx::proto::{DataLocation, DataType, GraphProto, ModelProto, NodeProto, TensorProto};

/// Newest opset and format version of each version.
const NEWEST: [(&str, i64, i64); 7] =
    [("1.16", 19, 9), ("1.17", 20, 9), ("1.18", 21, 10), ("1.19", 21, 10), ("1.20", 21, 10), ("1.23", 23, 11), ("1.31", 26, 13)];
/// Opset of the first operators on 4-bit integers.
const INT4_OPSET: i64 = 21;
/// Domains of operators that are part of ONNX Runtime, or that it replaces.
const DOMAINS: [&str; 13] = [
    "",
    "ai.onnx",
    "ai.onnx.ml",
    "ai.onnx.preview",
    "ai.onnx.preview.training",
    "ai.onnx.training",
    "com.microsoft",
    "com.microsoft.dml",
    "com.microsoft.experimental",
    "com.microsoft.nchwc",
    "com.ms.internal.nhwc",
    "com.microsoft.extensions",
    "org.pytorch.aten",
];

const RULES: &[Rule<Contents>] = &[
    Rule {
        name: "graph",
        sentence: "The file has a graph whose values are defined once, without cycles, and tensors with as many elements as their shapes require.",
        source: "onnxruntime/core/graph/model.cc, onnxruntime/core/graph/graph.cc, onnx/docs/IR.md",
        versions: &[],
        needs: Needs::Files,
        check: graph,
    },
    Rule {
        name: "ir-version",
        sentence: "The format version (`ir_version`) is not newer than the runtime's.",
        source: "onnxruntime/core/graph/model.cc, docs/reference/compatibility.md",
        versions: &[],
        needs: Needs::Configuration,
        check: ir_version,
    },
    Rule {
        name: "opset",
        sentence: "The opset is not newer than the runtime's.",
        source: "onnxruntime/core/graph/model_load_utils.h: ValidateOpsetForDomain, docs/reference/compatibility.md",
        versions: &[],
        needs: Needs::Configuration,
        check: opset,
    },
    Rule {
        name: "int4",
        sentence: "Standard operators read 4-bit integers from opset 21 on.",
        source: "onnx/docs/Changelog.md: DequantizeLinear-21",
        versions: &[],
        needs: Needs::Tensors,
        check: int4,
    },
    Rule {
        name: "external-data",
        sentence: "Files of external data are in the folder of the model, and contain all elements.",
        source: "onnx/docs/ExternalData.md",
        versions: &[],
        needs: Needs::Files,
        check: external_data,
    },
    Rule {
        name: "domains",
        sentence: "Operators are standard operators, operators of ONNX Runtime, or functions of the model.",
        source: "docs/OperatorKernels.md, docs/ContribOperators.md",
        versions: &[],
        needs: Needs::Weights,
        check: domains,
    },
];

/// The messages of an ONNX file.
struct Contents {
    folder: PathBuf,
    model: ModelProto,
    /// Why the graph or a tensor of the file is invalid.
    defect: Option<String>,
}

/// Checks the ONNX file at a path, or `model.onnx`, the files of an encoder-decoder model, or the only ONNX
/// file in a folder.
pub(in crate::contract) fn check(path: &Path, target: Target) -> Result<Checked> {
    let split = encoder_decoder(path).filter(|_| files::is_dir(path) && !files::is_file(&path.join(MODEL)));
    let found = split.map_or_else(|| Ok(find(path)?.into_iter().collect()), |files| Ok::<_, Error>(files.to_vec()))?;
    if found.is_empty() {
        return Ok(Checked::without_file(target, path));
    }
    let contents = |file: &PathBuf| {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
        let model = ModelFile::messages(file)?;
        let defect = ModelFile::structural_defect(&model).or_else(|| invalid_tensor(file, &model));
        Ok(Contents { folder, model, defect })
    };
    found.iter().map(contents).collect::<Result<Vec<_>>>()?.check(target, Needs::Files)
}

/// The files of a model, each of which must comply with the rules.
impl ReadByRuntime for Vec<Contents> {
    fn check(&self, target: Target, determined: Needs) -> Result<Checked> {
        let mut all = Checked::new(target);
        for contents in self {
            all.add(apply(RULES, contents, target, determined)?);
        }
        Ok(all)
    }
}

impl Checked {
    /// Adds the result for another file of the same output.
    fn add(&mut self, other: Checked) {
        for rule in other.rules {
            match self.rules.iter_mut().find(|known| known.name == rule.name) {
                Some(known) => known.is_met &= rule.is_met,
                None => self.rules.push(rule),
            }
        }
        self.violations.extend(other.violations);
    }
}

impl Planned {
    /// ONNX files with these messages. `has_final_types`: whether the initializers have the types of the
    /// output.
    pub(crate) fn onnx(models: Vec<ModelProto>, has_final_types: bool) -> Planned {
        let determined = if has_final_types { Needs::Tensors } else { Needs::Weights };
        let contents = |model| Contents { folder: PathBuf::new(), model, defect: None };
        Planned { files: Box::new(models.into_iter().map(contents).collect::<Vec<_>>()), determined }
    }
}

/// The ONNX file at a path, or `model.onnx` or the only ONNX file in a folder.
pub(crate) fn find(path: &Path) -> Result<Option<PathBuf>> {
    let is_onnx = |file: &Path| file.extension().is_some_and(|extension| extension == "onnx");
    if !files::is_dir(path) {
        return Ok(is_onnx(path).then(|| path.to_owned()));
    }
    let mut found: Vec<PathBuf> = files::files(path).map_err(Error::io("list", path))?.into_iter().filter(|file| is_onnx(file)).collect();
    if let Some(model) = found.iter().position(|file| file.ends_with(MODEL)) {
        return Ok(Some(found.swap_remove(model)));
    }
    match found.as_slice() {
        [] => Ok(None),
        [file] => Ok(Some(file.clone())),
        [first, ..] => Err(Error::malformed(path, format!("has {} .onnx files: specify one, for example {}", found.len(), first.display()))),
    }
}

fn is_external(tensor: &TensorProto) -> bool {
    tensor.data_location == Some(DataLocation::External as i32)
}

/// Why a tensor in a file is invalid. External data have their own rule.
fn invalid_tensor(file: &Path, model: &ModelProto) -> Option<String> {
    if tensors(model).into_iter().any(is_external) {
        return None;
    }
    match ModelFile::open(file).err()? {
        // Other reasons do not apply to ONNX Runtime.
        Error::Malformed { reason, .. } if reason.starts_with("tensor `") => Some(reason),
        _ => None,
    }
}

fn graph(contents: &Contents, _: Target) -> Result<Vec<Finding>> {
    let finding = |reason: &String| Finding::new("graph", format!("is invalid: {reason}"), "download or export the model again");
    Ok(contents.defect.iter().map(finding).collect())
}

/// The newest opset and format version of a version of the runtime.
fn newest(target: Target) -> Option<(i64, i64)> {
    NEWEST.iter().find(|(version, ..)| *version == target.version()).map(|(_, opset, format)| (*opset, *format))
}

/// Version of the standard operators.
fn standard_opset(model: &ModelProto) -> Option<i64> {
    model.opset_import.iter().find(|import| matches!(import.domain(), "" | "ai.onnx")).and_then(|import| import.version)
}

fn ir_version(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    let Some((version, (_, newest))) = contents.model.ir_version.zip(newest(target)).filter(|(version, (_, newest))| version > newest) else {
        return Ok(Vec::new());
    };
    let reason = format!("is {version}, but {target} reads versions up to {newest}");
    Ok(vec![Finding::new("ir_version", reason, "save the model with an older version of the `onnx` package, or use a newer ONNX Runtime")])
}

fn opset(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    let Some((opset, (newest, _))) = standard_opset(&contents.model).zip(newest(target)).filter(|(opset, (newest, _))| opset > newest) else {
        return Ok(Vec::new());
    };
    let reason = format!("imports opset {opset}, but {target} supports opsets up to {newest}");
    Ok(vec![Finding::new("opset_import", reason, "export with an older `opset`, or use a newer ONNX Runtime")])
}

/// All graphs of a model, with the bodies of nodes.
fn graphs(model: &ModelProto) -> Vec<&GraphProto> {
    fn bodies<'m>(nodes: &'m [NodeProto], found: &mut Vec<&'m GraphProto>) {
        for body in nodes.iter().flat_map(|node| &node.attribute).flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs)) {
            found.push(body);
            bodies(&body.node, found);
        }
    }
    let mut found: Vec<&GraphProto> = model.graph.iter().collect();
    model.graph.iter().for_each(|graph| bodies(&graph.node, &mut found));
    model.functions.iter().for_each(|function| bodies(&function.node, &mut found));
    found
}

/// All nodes of a model, with those of bodies and functions.
fn nodes(model: &ModelProto) -> Vec<&NodeProto> {
    let of_graphs = graphs(model).into_iter().flat_map(|graph| &graph.node);
    of_graphs.chain(model.functions.iter().flat_map(|function| &function.node)).collect()
}

/// All tensors of a model: initializers and values of attributes.
fn tensors(model: &ModelProto) -> Vec<&TensorProto> {
    let initializers = graphs(model).into_iter().flat_map(|graph| &graph.initializer);
    let attributes = nodes(model).into_iter().flat_map(|node| &node.attribute);
    initializers.chain(attributes.flat_map(|attribute| attribute.t.iter().chain(&attribute.tensors))).collect()
}

fn int4(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    let Some(opset) = standard_opset(&contents.model).filter(|opset| *opset < INT4_OPSET) else { return Ok(Vec::new()) };
    let is_int4 = |tensor: &&TensorProto| tensor.data_type == Some(DataType::Int4 as i32) || tensor.data_type == Some(DataType::Uint4 as i32);
    let names: BTreeSet<&str> = tensors(&contents.model).into_iter().filter(is_int4).map(|tensor| tensor.name()).collect();
    let standard = nodes(&contents.model).into_iter().filter(|node| matches!(node.domain(), "" | "ai.onnx"));
    let read: BTreeSet<&str> = standard.flat_map(|node| &node.input).map(String::as_str).filter(|name| names.contains(name)).collect();
    let reason = format!("has 4-bit integers, which standard operators of opset {opset} do not read in {target}");
    let hint = format!("export with `opset: {INT4_OPSET}`, or use `MatMulNBits` of ONNX Runtime");
    Ok(read.into_iter().map(|name| Finding::new(name, reason.clone(), hint.clone())).collect())
}

/// Why the external data of a tensor cannot be read.
fn missing(folder: &Path, tensor: &TensorProto) -> Option<String> {
    if !is_external(tensor) {
        return None;
    }
    let value = |wanted: &str| tensor.external_data.iter().find(|entry| entry.key() == wanted).map(|entry| entry.value());
    let Some(location) = value("location") else { return Some("has external data without a `location`".into()) };
    let is_inside = Path::new(location).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if !is_inside {
        return Some(format!("has its elements in `{location}`, which is outside of the folder"));
    }
    let file = folder.join(location);
    if !files::is_file(&file) {
        return Some(format!("has its elements in `{location}`, which is missing"));
    }
    let (mut offset, mut specified) = (0, 0);
    for (key, number) in [("offset", &mut offset), ("length", &mut specified)] {
        let Some(text) = value(key) else { continue };
        let Ok(bytes) = text.parse::<u64>() else { return Some(format!("has external data with `{key}` of `{text}`, which is not a number of bytes")) };
        *number = bytes;
    }
    let count = tensor.dims.iter().try_fold(1u64, |count, size| count.checked_mul(u64::try_from(*size).ok()?));
    let bits = DataType::try_from(tensor.data_type.unwrap_or(0)).map_or(0, DataType::bits);
    let required = count.and_then(|count| Some(count.checked_mul(bits)?.div_ceil(8))).filter(|_| bits > 0);
    // Without a length, or with 0, the shape determines it.
    let bytes = required.filter(|_| specified == 0).unwrap_or(specified);
    if let Some(required) = required.filter(|required| *required != bytes) {
        return Some(format!("has {bytes} bytes in `{location}`, but its shape requires {required}"));
    }
    let (end, length) = (offset.saturating_add(bytes), files::length(&file).unwrap_or(0));
    (end > length).then(|| format!("has its elements in `{location}` up to byte {end}, but the file has {length} bytes"))
}

fn external_data(contents: &Contents, _: Target) -> Result<Vec<Finding>> {
    let hint = "copy the data file that was written together with the model into its folder";
    let finding = |tensor: &TensorProto| Some(Finding::new(tensor.name(), missing(&contents.folder, tensor)?, hint));
    Ok(tensors(&contents.model).into_iter().filter_map(finding).collect())
}

fn domains(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    let functions: BTreeSet<&str> = contents.model.functions.iter().map(|function| function.domain()).collect();
    let is_unknown = |node: &&NodeProto| !DOMAINS.contains(&node.domain()) && !functions.contains(node.domain());
    let mut seen = BTreeSet::new();
    let unknown = nodes(&contents.model).into_iter().filter(is_unknown).filter(|node| seen.insert((node.domain(), node.op_type())));
    let finding = |node: &NodeProto| {
        let reason = format!("is an operator of the domain `{}`, which is not part of {target}", node.domain());
        Finding::new(node.op_type(), reason, "register the library with this operator in the session, or export the model without it")
    };
    Ok(unknown.map(finding).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Runtime;

    #[test]
    fn every_version_has_a_newest_opset() {
        assert!(NEWEST.iter().map(|(version, ..)| version).eq(Runtime::OnnxRuntime.versions()));
    }
}
