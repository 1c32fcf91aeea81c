//! Auxiliary files of a model folder. Each is carried over to the output, or reported as excluded.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::{Config, ExclusionReason, Model, adapter, quantization};
use crate::error::{Error, Result};
use crate::files::{self, Kind};
use crate::output::{CONTINUATIONS, DRAFT_VOCABULARY, SBOM, SIGNATURE};
use crate::store::checkpoint::{INDEX, SINGLE};
use crate::store::{OriginalFormat, pytorch};

/// Auxiliary files that were synthesized from a weight file, such as a tokenizer from GGUF, by file name.
pub type SynthesizedFiles = BTreeMap<PathBuf, Arc<String>>;

/// Reads a synthesized file, or a file of the model's folder; `None` if neither exists.
pub fn read_auxiliary_text(folder: &Path, synthesized: &SynthesizedFiles, name: &str) -> Result<Option<String>> {
    let path = auxiliary_path(folder, name);
    if let Some(text) = synthesized.get(Path::new(name)) {
        return Ok(Some(text.to_string()));
    }
    if !files::is_file(&path) {
        return Ok(None);
    }
    files::read_to_string(&path).map(Some).map_err(Error::io("read", &path))
}

/// Opens a JSON file like [`read_auxiliary_text`]; returns an empty configuration if it does not exist.
pub fn open_auxiliary_config(folder: &Path, synthesized: &SynthesizedFiles, name: &str) -> Result<Config> {
    read_auxiliary_text(folder, synthesized, name)?.map_or_else(|| Ok(Config::default()), |text| Config::parse(&auxiliary_path(folder, name), text))
}

/// The folder of an ONNX file, which contains its preprocessing files; see [`auxiliary_path`].
pub fn preprocessing_folder(file: &Path) -> PathBuf {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

/// Path of an auxiliary file in a folder. In the layout of the Hub (`onnx/model.onnx`), each file that the
/// folder lacks is that of the parent folder.
pub fn auxiliary_path(folder: &Path, name: &str) -> PathBuf {
    let own = folder.join(name);
    let named = files::absolute(folder);
    let above = named.parent().filter(|_| named.ends_with("onnx")).map(|parent| parent.join(name));
    above.filter(|above| !files::is_file(&own) && files::is_file(above)).unwrap_or(own)
}

/// Files of a folder other than the opened weights: sorted paths relative to the folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuxiliaryFiles {
    /// Files that are carried over to the output unchanged, including weights of unknown modules.
    pub files: Vec<PathBuf>,
    /// Files that are not carried over only because the output is a single file.
    pub not_carried: Vec<PathBuf>,
    /// Files that were synthesized from the weight file, which are also carried over.
    pub synthesized: SynthesizedFiles,
    /// Empty folders, which are also carried over.
    pub empty: Vec<PathBuf>,
    /// Excluded files and folders, with the reason.
    pub left: Vec<(PathBuf, ExclusionReason)>,
    /// Notes on contents of the weight files that are not weights.
    pub in_weight_files: Vec<String>,
}

/// File extensions of formats that contain only models.
const MODEL_EXTENSIONS: [&str; 11] = ["safetensors", "h5", "msgpack", "onnx", "onnx_data", "gguf", "ot", "tflite", "mlmodel", "mlpackage", "mnn"];
/// File extensions of generic formats, which contain weights only under [`WEIGHT_NAMES`].
const GENERIC_EXTENSIONS: [&str; 5] = ["bin", "pt", "pth", "ckpt", "npz"];
const WEIGHT_NAMES: [&str; 8] = ["model", "pytorch_model", "diffusion_pytorch_model", "consolidated", "weights", "optimizer", "ggml-model", "mnn"];
/// Extensions that are appended to the names of backup copies.
const BACKUP_EXTENSIONS: [&str; 5] = ["bak", "backup", "old", "orig", "tmp"];
/// States of training of other tools: pickles that contain paths and host names.
const TRAINING_STATES: [&str; 4] = ["training_args.bin", "scheduler.pt", "scaler.pt", "rng_state.pth"];
/// Passes whose logs are copied to the output, followed by a number if a run contains several.
const LOGGED_PASSES: [&str; 2] = ["finetune", "distill"];
/// Top-level folders with the model in another format.
const OTHER_FORMATS: [&str; 4] = ["original", "onnx", "openvino", "coreml"];
/// Preprocessing files of a single ONNX file.
pub(super) const PREPROCESSING: [&str; 9] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
];
/// Description of an ONNX file, which is carried over if that file keeps its operators and its name.
const RUNTIME: &str = "genai_config.json";
/// Name of the ONNX file in output folders.
const ONNX: &str = "model.onnx";
/// Names and extensions of files and folders with keys or credentials.
const SECRETS: [&str; 11] = [
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "authorized_keys",
    "credentials",
    "credentials.json",
    "kubeconfig",
    "service_account.json",
    "secrets",
    "token",
];
const SECRET_EXTENSIONS: [&str; 9] = ["env", "pem", "key", "ppk", "p12", "pfx", "jks", "kdbx", "keystore"];
/// Names of the files of a LoRA adapter, without extensions.
const ADAPTER: [&str; 2] = ["adapter_config", "adapter_model"];
/// Files about other files, which runs write.
const OWN: [&str; 9] = ["recipe.yaml", "report.json", "report.md", "report.html", Model::KEY, SBOM, SIGNATURE, CONTINUATIONS, DRAFT_VOCABULARY];

impl AuxiliaryFiles {
    /// Lists a folder with these weight files. Links to files are followed, links to folders are not.
    pub fn scan(folder: &Path, weights: &[PathBuf]) -> Result<AuxiliaryFiles> {
        let mut found = AuxiliaryFiles::default();
        let pairs = [(SINGLE, INDEX), (pytorch::SINGLE, pytorch::INDEX)].map(|(single, index)| (folder.join(single), folder.join(index)));
        // The index that lists these files, if there is one.
        let format = pairs.iter().find(|(single, index)| files::is_file(single) || files::is_file(index));
        let index = format.filter(|(single, _)| !files::is_file(single)).map(|(_, index)| index);
        found.collect(folder, Path::new(""), weights, index)?;
        found.files.sort();
        found.empty.sort();
        found.left.sort();
        Ok(found)
    }

    fn collect(&mut self, root: &Path, inside: &Path, weights: &[PathBuf], index: Option<&PathBuf>) -> Result<()> {
        let (folder, top) = (root.join(inside), inside.as_os_str().is_empty());
        let has_weights = top || weights.iter().any(|file| file.parent() == Some(&folder));
        let mut is_empty = true;
        for files::Entry { path, kind } in files::list(&folder).map_err(Error::io("list", &folder))? {
            let name = path.file_name().unwrap_or_default();
            let (relative, name) = (inside.join(name), name.to_string_lossy().into_owned());
            is_empty = false;
            let reason = match () {
                () if name.starts_with('.') && name != files::GIT_ATTRIBUTES => ExclusionReason::Hidden,
                () if kind == Kind::Folder && top && (has_other_format(&name) || is_weights(&name)) => ExclusionReason::OldWeights,
                () if kind == Kind::Folder && is_secret(&name) => ExclusionReason::Secret,
                () if kind == Kind::Folder => {
                    self.collect(root, &relative, weights, index)?;
                    continue;
                }
                () if kind == Kind::Link && files::kind(&path).is_err() => ExclusionReason::BrokenLink,
                () if kind == Kind::Link => ExclusionReason::Link,
                () if kind == Kind::Special => ExclusionReason::Special,
                () if is_secret(&name) => ExclusionReason::Secret,
                () if (top && name == "config.json") || weights.contains(&path) || index == Some(&path) => continue,
                () if top && (OWN.contains(&name.as_str()) || is_training_log(&name)) => ExclusionReason::Replaced,
                // The adapter of the model, whose configuration is written with its weights.
                () if !top && name == adapter::CONFIG && has_weights => continue,
                () if has_weights && is_training_state(&name) => ExclusionReason::Training,
                () if top && quantization::DESCRIPTIONS.contains(&name.as_str()) => ExclusionReason::Described,
                () if top && name == RUNTIME && !weights.contains(&root.join(ONNX)) => ExclusionReason::Runtime,
                // A folder may contain only an adapter, which is then the model.
                () if top && is_adapter(&path) && !weights.iter().any(|file| is_adapter(file)) => ExclusionReason::Adapter,
                () if has_weights && is_weights(&name) => ExclusionReason::OldWeights,
                () => {
                    self.files.push(relative);
                    continue;
                }
            };
            self.left.push((relative, reason));
        }
        if is_empty && !top {
            self.empty.push(inside.to_owned());
        }
        Ok(())
    }

    /// Files that a run may read, whether they are carried over or not.
    pub fn read(&self) -> impl Iterator<Item = &PathBuf> {
        let described = self.left.iter().filter(|(_, reason)| *reason == ExclusionReason::Described).map(|(path, _)| path);
        self.files.iter().chain(&self.not_carried).chain(described)
    }

    /// Excludes the description of the weights by ModelOpt, unless the configuration of the output still
    /// contains one.
    pub fn exclude_stale_description(&mut self, written: &Config) {
        let method = written.get("quantization_config").and_then(|described| described.get("quant_method")).and_then(Value::as_str);
        if method != Some(OriginalFormat::MODELOPT) {
            self.exclude(ExclusionReason::Described, |file| file == Path::new(quantization::MODELOPT));
        }
    }

    /// Excludes the description of an ONNX file, because the output has a different one.
    pub fn exclude_runtime_config(&mut self) {
        self.exclude(ExclusionReason::Runtime, |file| file == Path::new(RUNTIME));
    }

    /// Excludes the files that match, if they would be carried over.
    pub fn exclude(&mut self, reason: ExclusionReason, is_excluded: impl Fn(&Path) -> bool) {
        let (excluded, rest): (Vec<PathBuf>, Vec<PathBuf>) = std::mem::take(&mut self.files).into_iter().partition(|file| is_excluded(file));
        self.files = rest;
        self.left.extend(excluded.into_iter().map(|file| (file, reason)));
    }

    /// Notes on excluded files, one for each reason, and on the contents of weight files.
    pub fn notes(&self, folder: &Path) -> Vec<String> {
        let mut reasons: Vec<ExclusionReason> = self.left.iter().map(|(_, reason)| *reason).collect();
        reasons.sort_unstable();
        reasons.dedup();
        let name = |path: &Path| format!("{}{}", path.display(), if files::is_dir(&folder.join(path)) { "/" } else { "" });
        let names =
            |reason: ExclusionReason| self.left.iter().filter(move |(_, other)| *other == reason).map(|(path, _)| name(path)).collect::<Vec<_>>().join(", ");
        let left = reasons.into_iter().map(|reason| format!("not carried over from the input: {} ({})", names(reason), reason.text()));
        left.chain(self.in_weight_files.iter().cloned()).collect()
    }
}

fn has_other_format(name: &str) -> bool {
    OTHER_FORMATS.contains(&name) || name.strip_prefix("checkpoint-").is_some_and(|step| !step.is_empty() && step.bytes().all(|b| b.is_ascii_digit()))
}

/// Whether this is a training log of an earlier run, such as `finetune.csv` or `distill-2.html`.
fn is_training_log(name: &str) -> bool {
    let Some((stem, extension)) = name.rsplit_once('.') else { return false };
    let is_numbered = |rest: &str| rest.is_empty() || rest.strip_prefix('-').is_some_and(|number| number.parse::<u32>().is_ok());
    let is_pass = LOGGED_PASSES.iter().any(|pass| stem.strip_prefix(pass).is_some_and(is_numbered));
    is_pass && ["csv", "tfevents"].contains(&extension)
}

fn is_adapter(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default();
    let is_known = ["json", "safetensors", "bin"].iter().any(|known| extension == *known);
    is_known && path.file_stem().is_some_and(|stem| ADAPTER.iter().any(|name| stem == *name))
}

fn is_training_state(name: &str) -> bool {
    TRAINING_STATES.contains(&name) || name.strip_prefix("rng_state_").is_some_and(|rest| rest.ends_with(".pth"))
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('-', "_");
    let stem = name.rsplit_once('.').map_or("", |(stem, _)| stem);
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    let is_named = SECRETS.contains(&name.as_str()) || name.starts_with("client_secret") || name.ends_with("_token") || name.ends_with("_credentials");
    is_named || SECRET_EXTENSIONS.contains(&extension) || stem == "secrets" || stem.starts_with("id_rsa")
}

fn is_weights(name: &str) -> bool {
    let name = name.strip_suffix(".index.json").unwrap_or(name);
    if let Some((original, extension)) = name.rsplit_once('.')
        && BACKUP_EXTENSIONS.contains(&extension)
        && is_weights(original)
    {
        return true;
    }
    let Some((stem, extension)) = name.rsplit_once('.') else { return false };
    let named = |stem: &str| WEIGHT_NAMES.iter().any(|name| stem.strip_prefix(name).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric)));
    MODEL_EXTENSIONS.contains(&extension)
        || name.ends_with(".onnx.data")
        || name.contains(".ckpt.")
        || name.starts_with("openvino_model.")
        || (GENERIC_EXTENSIONS.contains(&extension) && named(stem))
}

#[doc(hidden)]
impl Model {
    /// Rejects links to files outside of the folder, whose contents would be copied into the output and
    /// published. Links to a content-addressed cache, in a folder `blobs` above the model, are allowed.
    pub fn require_own_files(&self) -> Result<()> {
        // Remote listings contain no links.
        if files::is_remote(&self.path) {
            return Ok(());
        }
        let real = |path: &Path| fs::canonicalize(path).map_err(Error::io("open", path));
        for path in self.auxiliary.files.iter().map(|file| self.path_of(file)) {
            // The ONNX file itself may be a link.
            let folder = if self.has_adjacent_files() { preprocessing_folder(&path) } else { self.path.clone() };
            let (root, target) = (real(&folder)?, real(&path)?);
            let allowed: Vec<PathBuf> = root.ancestors().skip(1).take(2).map(|above| above.join("blobs")).chain([root.clone()]).collect();
            if !allowed.iter().any(|folder| target.starts_with(folder)) {
                return Err(Error::Unsupported {
                    what: format!("{}, a link out of the model's folder to {},", path.display(), target.display()),
                    hint: "its content would be copied into the output: replace the link by a copy, or remove it".into(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_carried_over_or_reported() {
        let folder = tempfile::tempdir().unwrap();
        let carried = [
            ".gitattributes",
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin",
            "README.md",
            "graph.json",
            "head.pt",
            "modeling.py",
            "onnxruntime.txt",
            "tokenizer.json",
            "vocab.txt",
        ];
        let old = [
            "checkpoint-500/model.safetensors",
            "consolidated.00.pth",
            "flax_model.msgpack",
            "ggml-model-q4_0.bin",
            "mnn.bin",
            "model.mlpackage/Manifest.json",
            "model.safetensors.bak",
            "weights.npz",
            "model.ckpt.index",
            "model.onnx",
            "model.onnx.data",
            "model.safetensors.index.json",
            "onnx/model.json",
            "openvino_model.xml",
            "optimizer.pt",
            "other.safetensors",
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model.bin.index.json",
        ];
        let read = ["model.safetensors", "config.json"];
        let secret = [
            "authorized_keys",
            "aws_credentials",
            "cert.pem",
            "client-secret-1.json",
            "deploy/server.KEY",
            "hf-token",
            "id_ed25519",
            "id_rsa.old",
            "kubeconfig",
            "prod.env",
            "secrets/hf",
            "secrets.yaml",
            "service-account.json",
            "token",
        ];
        let other = [
            ".git/config",
            ".env",
            "1_Pooling/.netrc",
            "report.json",
            "bom.cdx.json",
            "model.sig",
            "inputs.blake3",
            "continuations.npz",
            "finetune.csv",
            "distill-2.csv",
            "training_args.bin",
            "rng_state_0.pth",
        ];
        for name in carried.iter().chain(&old).chain(&read).chain(&secret).chain(&other) {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        fs::create_dir(folder.path().join("3_Normalize")).unwrap();
        for (to, name) in [("vocab.txt", "link.txt"), ("", "loop"), ("nothing", "broken")] {
            std::os::unix::fs::symlink(folder.path().join(to), folder.path().join(name)).unwrap();
        }
        let auxiliary = AuxiliaryFiles::scan(folder.path(), &[folder.path().join("model.safetensors")]).unwrap();
        let mut expected: Vec<PathBuf> = carried.iter().chain(&["link.txt"]).map(PathBuf::from).collect();
        expected.sort();
        assert_eq!((auxiliary.files.clone(), auxiliary.empty.clone()), (expected, vec![PathBuf::from("3_Normalize")]));
        let notes = auxiliary.notes(folder.path());
        assert_eq!(notes.len(), 7, "{notes:?}");
        assert!(
            notes[1].contains("bom.cdx.json, continuations.npz, distill-2.csv, finetune.csv, inputs.blake3, model.sig, report.json (they describe"),
            "{notes:?}"
        );
        assert!(notes[2].contains("rng_state_0.pth, training_args.bin (they are the state"), "{notes:?}");
        assert!(notes[0].contains("checkpoint-500/, consolidated.00.pth, ") && notes[0].contains("the original weights"), "{notes:?}");
        assert!(notes[3].contains(".env, .git/, 1_Pooling/.netrc (hidden") && notes[5].contains(": loop/ (links"), "{notes:?}");
        assert!(notes[6].contains(": broken (they are links to files that do not exist)"), "{notes:?}");
        let listed = format!("{} (they may contain keys", secret.map(|name| name.strip_suffix("hf").unwrap_or(name)).join(", "));
        assert!(notes[4].contains(&listed), "{notes:?}");
        let is_excluded = |name: &str| auxiliary.left.iter().any(|(path, _)| Path::new(name).starts_with(path));
        assert!(old.iter().all(|name| is_excluded(name)), "{:?}", auxiliary.left);
    }

    /// transformers applies an adapter to the weights of its folder. A folder may also contain only an
    /// adapter.
    #[test]
    fn adapters_of_other_weights_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["model.safetensors", "adapter_model.safetensors", "adapter_config.json", "tokenizer.json"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let of = |weights: &str| AuxiliaryFiles::scan(folder.path(), &[folder.path().join(weights)]).unwrap();
        let base = of("model.safetensors");
        assert_eq!(base.files, [PathBuf::from("tokenizer.json")]);
        let notes = base.notes(folder.path());
        assert!(notes.len() == 1 && notes[0].contains("adapter_config.json, adapter_model.safetensors (they are a LoRA adapter"), "{notes:?}");
        assert!(of("adapter_model.safetensors").files.contains(&PathBuf::from("adapter_config.json")));
    }

    /// In the layout of the Hub, each file is looked up in the folder of the ONNX file, and then in its
    /// parent.
    #[test]
    fn auxiliary_files_of_onnx_files_are_found_one_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let (above, own) = (folder.path(), folder.path().join("onnx"));
        fs::create_dir(&own).unwrap();
        fs::write(own.join("config.json"), r#"{ "id2label": { "0": "own" } }"#).unwrap();
        for name in ["tokenizer.json", "config.json", "preprocessor_config.json"] {
            fs::write(above.join(name), "{}").unwrap();
        }
        fs::write(own.join("preprocessor_config.json"), "{}").unwrap();
        let found = |name| auxiliary_path(&own, name);
        assert_eq!(found("tokenizer.json"), above.join("tokenizer.json"));
        assert_eq!(found("config.json"), own.join("config.json"));
        assert_eq!(found("preprocessor_config.json"), own.join("preprocessor_config.json"));
        assert_eq!(found("special_tokens_map.json"), own.join("special_tokens_map.json"));
        assert_eq!(read_auxiliary_text(&own, &SynthesizedFiles::new(), "tokenizer.json").unwrap().as_deref(), Some("{}"));
        // Other folders are complete.
        let other = above.join("other");
        fs::create_dir(&other).unwrap();
        assert_eq!(auxiliary_path(&other, "tokenizer.json"), other.join("tokenizer.json"));
    }

    #[test]
    fn other_contents_of_pytorch_files_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/pytorch");
        fs::copy(golden.join("training.pt"), folder.path().join(pytorch::SINGLE)).unwrap();
        fs::copy(golden.join("object.pt"), folder.path().join("training_args.bin")).unwrap();
        let auxiliary = Model::open(folder.path()).unwrap().auxiliary;
        assert!(auxiliary.files.is_empty(), "{:?}", auxiliary.files);
        let notes = auxiliary.notes(folder.path());
        assert!(notes.len() == 3 && notes[0].contains("training_args.bin") && notes[1].contains("`epoch`, `optimizer`, `arguments`"), "{notes:?}");
        assert!(notes[2].contains("`tied.first` and `tied.second` share storage"), "{notes:?}");
        // The index of split files is not carried over.
        fs::rename(folder.path().join(pytorch::SINGLE), folder.path().join("pytorch_model-00001-of-00001.bin")).unwrap();
        let names: serde_json::Map<_, _> = Model::open(golden.join("training.pt"))
            .unwrap()
            .weights
            .by_name
            .keys()
            .map(|name| (name.clone(), "pytorch_model-00001-of-00001.bin".into()))
            .collect();
        fs::write(folder.path().join(pytorch::INDEX), serde_json::json!({ "weight_map": names }).to_string()).unwrap();
        let model = Model::open(folder.path()).unwrap();
        assert_eq!((model.weights.by_name.len(), model.auxiliary.files), (names.len(), Vec::new()));
        assert_eq!(model.auxiliary.left, [(PathBuf::from("training_args.bin"), ExclusionReason::Training)]);
    }
}
