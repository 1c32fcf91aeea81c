//! A model folder as runtimes read it: `config.json`, headers of the weight files, and file names.
//!
//! `Model::open` rejects folders that contradict themselves, or have formats that this program does not
//! support and other runtimes may load.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::scheme::{Arguments, Group, Quantization};
use super::{Defects, Needs, Planned, Target};
use crate::arch;
use crate::error::{Error, Result};
use crate::files;
use crate::model::{adapter, class, parse_config};
use crate::store::{Bytes, Checkpoint, DType, Encoding, RawTensor, Role, StoredTensor, Weight};

/// Prefix of the `model_type` of folders that only this program reads.
pub(super) const OWN_TYPE: &str = "compress-";

/// A matrix of the checkpoint.
pub(super) struct Module {
    /// Outputs and inputs before packing; no inputs if the file does not specify them.
    pub shape: [usize; 2],
    /// Whether the matrix is stored as codes with scales.
    pub is_quantized: bool,
    pub dtype: DType,
    pub role: Option<Role>,
    /// Class in PyTorch: `Linear` or `Embedding`.
    pub class: &'static str,
    /// Names in the checkpoint and in libraries.
    pub names: Vec<String>,
}

impl Module {
    /// Whether runtimes quantize such a matrix if the configuration selects it.
    pub(super) fn is_linear(&self) -> bool {
        self.class == "Linear" && matches!(self.role, None | Some(Role::Matrix))
    }
}

/// A tensor of a folder.
pub(super) struct Tensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    values: Values,
}

enum Values {
    Stored(RawTensor),
    /// Bytes that the plan of a run determines.
    Known(Vec<u8>),
    /// The run computes them.
    Unknown,
}

impl Tensor {
    /// The bytes of a tensor, if they are known and have this length.
    pub(super) fn read(&self, length: u64) -> Result<Option<Vec<u8>>> {
        match &self.values {
            Values::Stored(raw) if raw.bytes() == length => raw.read_all().map(Some),
            Values::Known(bytes) if bytes.len() as u64 == length => Ok(Some(bytes.clone())),
            Values::Stored(_) | Values::Known(_) | Values::Unknown => Ok(None),
        }
    }
}

/// A LoRA adapter of PEFT.
pub(super) struct Adapter {
    /// Name of its configuration.
    pub file: String,
    pub values: Map<String, Value>,
}

impl Adapter {
    fn parse(file: &str, path: &Path, text: &str) -> Result<Adapter> {
        let values = parse_config(text).map_err(|e| Error::malformed(path, format!("not a JSON object: {e}")))?;
        Ok(Adapter { file: file.to_owned(), values })
    }

    /// The adapter that `config.json` names. Without a `config.json`, the folder itself is an adapter if it
    /// has the configuration of one.
    fn of(path: &Path, config: Option<&Map<String, Value>>, files: &BTreeSet<String>) -> Result<Option<Adapter>> {
        let file = match config {
            None if files.contains(adapter::CONFIG) => adapter::CONFIG.to_owned(),
            Some(config) if config.contains_key(adapter::KEY) => format!("{}/{}", adapter::FOLDER, adapter::CONFIG),
            _ => return Ok(None),
        };
        let path = path.join(&file);
        Adapter::parse(&file, &path, &files::read_to_string(&path).map_err(Error::io("read", &path))?).map(Some)
    }
}

/// A model folder.
pub(super) struct Folder {
    /// Values of `config.json`; `None` if the file is missing.
    pub config: Option<Map<String, Value>>,
    pub tensors: BTreeMap<String, Tensor>,
    /// Names of the files.
    pub files: BTreeSet<String>,
    pub quantization: Option<Quantization>,
    pub modules: BTreeMap<String, Module>,
    pub defects: Defects,
    pub adapter: Option<Adapter>,
}

impl Folder {
    pub(super) fn open(path: &Path, target: Target) -> Result<Folder> {
        if !files::is_dir(path) {
            return Err(Error::Unsupported {
                what: format!("{}: checking a single file for {}", path.display(), target.runtime().name()),
                hint: "specify the folder with config.json, the weights and the tokenizer".into(),
            });
        }
        let stored = |(name, raw): (String, RawTensor)| (name, Tensor { dtype: raw.dtype, shape: raw.shape.clone(), values: Values::Stored(raw) });
        let tensors = Checkpoint::open(path)?.tensors.into_iter().map(stored).collect();
        let listed = files::files(path).map_err(Error::io("list", path))?;
        let name = |file: &Path| file.file_name().map(|name| name.to_string_lossy().into_owned());
        let names: BTreeSet<String> = listed.iter().filter_map(|file| name(file)).collect();
        let file = path.join("config.json");
        let has_config = names.contains("config.json");
        let config = has_config.then(|| files::read_to_string(&file).map_err(Error::io("read", &file))).transpose()?;
        let defects = Defects::of_output(path, names.iter().map(PathBuf::from))?;
        let mut folder = Folder::new(&file, config.as_deref(), tensors, names, defects)?;
        folder.adapter = Adapter::of(path, folder.config.as_ref(), &folder.files)?;
        Ok(folder)
    }

    /// `config` is the text of `file`, if there is one.
    fn new(file: &Path, config: Option<&str>, tensors: BTreeMap<String, Tensor>, files: BTreeSet<String>, defects: Defects) -> Result<Folder> {
        let parse = |text: &str| parse_config(text).map_err(|e| Error::malformed(file, format!("not a JSON object: {e}")));
        let config = config.map(parse).transpose()?;
        let described = config.as_ref().and_then(|config| config.get("quantization_config")).and_then(Value::as_object);
        let quantization = described.map(Quantization::parse).transpose().map_err(|reason| Error::malformed(file, reason))?;
        let mut folder = Folder { config, tensors, files, quantization, modules: BTreeMap::new(), defects, adapter: None };
        folder.modules = folder.find_modules()?;
        Ok(folder)
    }

    /// A value of `config.json`.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.config.as_ref()?.get(key)
    }

    /// `model_type` in `config.json`, or an empty string.
    pub(super) fn model_type(&self) -> &str {
        let name = self.get("model_type").and_then(Value::as_str).unwrap_or("");
        name.strip_prefix(OWN_TYPE).unwrap_or(name)
    }

    /// The dtype of the model in `config.json`, or an empty string.
    pub(super) fn dtype(&self) -> &str {
        self.get("dtype").or_else(|| self.get("torch_dtype")).and_then(Value::as_str).unwrap_or("")
    }

    /// The description of weights in the format of compressed-tensors.
    pub(super) fn compressed_tensors(&self) -> Option<&Quantization> {
        self.quantization.as_ref().filter(|quantization| quantization.is_compressed_tensors())
    }

    /// The group of a module.
    pub(super) fn group(&self, module: &Module) -> Option<&Group> {
        self.compressed_tensors()?.group(&module.names, module.class)
    }

    /// The entry of `ignore` that excludes a module.
    pub(super) fn ignored(&self, module: &Module) -> Option<&str> {
        self.compressed_tensors()?.ignored(&module.names, module.class)
    }

    /// The quantized modules that belong to a group, in order.
    pub(super) fn quantized(&self) -> impl Iterator<Item = (&String, &Module, &Group)> {
        let quantized = self.modules.iter().filter(|(_, module)| module.is_quantized);
        quantized.filter_map(|(name, module)| Some((name, module, self.group(module)?)))
    }

    /// The groups of quantized linear layers with the arguments of their weights.
    pub(super) fn linear_groups(&self) -> Vec<(&Group, &Arguments)> {
        let mut found: Vec<(&Group, &Arguments)> = Vec::new();
        for (_, _, group) in self.quantized().filter(|(_, module, _)| module.class == "Linear") {
            if let Some(weights) = group.weights.as_ref().filter(|_| !found.iter().any(|(other, _)| other.name == group.name)) {
                found.push((group, weights));
            }
        }
        found
    }

    fn find_modules(&self) -> Result<BTreeMap<String, Module>> {
        let mut found = BTreeMap::new();
        let mut weights = BTreeMap::new();
        for (name, tensor) in &self.tensors {
            let packed = name.strip_suffix(".weight_packed");
            let Some(module) = packed.or_else(|| name.strip_suffix(".weight")) else { continue };
            let shape = if packed.is_some() { self.unpacked_shape(module, tensor)? } else { tensor.shape.clone() };
            // Roles depend on names and shapes only.
            let weight = Weight::new(DType::F32, shape, Encoding::Dense, Arc::new(Bytes { dtype: tensor.dtype, bytes: Vec::new() }));
            let is_quantized = packed.is_some() || self.tensors.contains_key(&format!("{module}.weight_scale"));
            found.insert(module, (is_quantized, tensor.dtype));
            weights.insert(format!("{module}.weight"), weight);
        }
        let mut config = self.config.clone().unwrap_or_default();
        config.insert("model_type".to_owned(), self.model_type().into());
        arch::mark_roles(&mut weights, &config);
        let module = |(name, (is_quantized, dtype)): (&str, (bool, DType))| {
            let tensor = format!("{name}.weight");
            let weight = weights.get(&tensor)?;
            let shape: [usize; 2] = weight.shape.clone().try_into().ok()?;
            let (role, class) = (arch::role(&tensor, weight), class(&tensor, weight));
            Some((name.to_owned(), Module { shape, is_quantized, dtype, role, class, names: arch::module_spellings(self.model_type(), name) }))
        };
        Ok(found.into_iter().filter_map(module).collect())
    }

    /// Shape of a packed matrix before packing, from `weight_shape` or for two codes in a byte.
    fn unpacked_shape(&self, module: &str, packed: &Tensor) -> Result<Vec<usize>> {
        let [rows, columns] = packed.shape.as_slice() else { return Ok(packed.shape.clone()) };
        if packed.dtype == DType::U8 {
            return Ok(vec![*rows, columns.saturating_mul(2)]);
        }
        let shape = self.tensors.get(&format!("{module}.weight_shape")).filter(|shape| shape.dtype == DType::I64);
        let Some(bytes) = shape.map(|shape| shape.read(16)).transpose()?.flatten() else { return Ok(vec![*rows, 0]) };
        let sizes = bytes.chunks_exact(8).filter_map(|size| <[u8; 8]>::try_from(size).ok().map(u64::from_le_bytes));
        Ok(sizes.map(|size| usize::try_from(size).unwrap_or(usize::MAX)).collect())
    }
}

impl Planned {
    /// A folder with this text of `config.json`, these tensors, with the bytes that the plan determines,
    /// these files, defects, and this configuration of its adapter.
    pub(crate) fn folder(
        config: Option<&str>,
        tensors: Vec<(StoredTensor, Option<Vec<u8>>)>,
        files: BTreeSet<String>,
        defects: Defects,
        adapter: Option<&str>,
    ) -> Result<Planned> {
        let planned = |(StoredTensor { name, dtype, shape }, bytes): (StoredTensor, Option<Vec<u8>>)| {
            (name, Tensor { dtype, shape, values: bytes.map_or(Values::Unknown, Values::Known) })
        };
        let mut folder = Folder::new(Path::new("config.json"), config, tensors.into_iter().map(planned).collect(), files, defects)?;
        folder.adapter = adapter.map(|text| Adapter::parse(adapter::CONFIG, Path::new(adapter::CONFIG), text)).transpose()?;
        Ok(Planned { files: Box::new(folder), determined: Needs::Weights })
    }
}
