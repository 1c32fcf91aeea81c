//! What lies around the weights of a model folder: all of it goes over to the output, or is said to stay behind.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Config, Model};
use crate::error::{Error, Result};
use crate::files::{self, Kind};
use crate::store::checkpoint::{INDEX, SINGLE};
use crate::store::pytorch;

/// Texts that belong beside the weights and that their file holds, by the names of files.
pub type Made = BTreeMap<PathBuf, Arc<String>>;

/// A file of a model's folder, or one that the file of weights holds; nothing where there is neither.
///
/// # Errors
/// It is there but cannot be read.
pub fn text_beside(folder: &Path, made: &Made, name: &str) -> Result<Option<String>> {
    let path = folder.join(name);
    if let Some(text) = made.get(Path::new(name)) {
        return Ok(Some(text.to_string()));
    }
    if !files::is_file(&path) {
        return Ok(None);
    }
    files::read_to_string(&path).map(Some).map_err(Error::io("read", &path))
}

/// A file of settings, as [`text_beside`]; without settings where there is none.
///
/// # Errors
/// It cannot be read, or is no JSON object.
pub fn config_beside(folder: &Path, made: &Made, name: &str) -> Result<Config> {
    text_beside(folder, made, name)?.map_or_else(|| Ok(Config::default()), |text| Config::parse(&folder.join(name), text))
}

/// Folder of the files that specify how samples of an ONNX file are prepared: its own, or, in the layout of the Hub (`onnx/model.onnx`), the one
/// above, where it has a tokenizer or preprocessor and the folder of the file has none.
pub fn preprocessing_folder(file: &Path) -> PathBuf {
    let own = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let named = files::absolute(own);
    let above = named.parent().filter(|_| named.ends_with("onnx"));
    let folders = || std::iter::once(own).chain(above);
    let holding = |names: &[&str]| folders().find(|folder| names.iter().any(|name| files::is_file(&folder.join(name))));
    holding(&["tokenizer.json", "preprocessor_config.json"]).or_else(|| holding(&["config.json"])).unwrap_or(own).to_owned()
}

/// What a folder holds beside the weights that were opened, relative to the folder, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Beside {
    /// Files that go over to the output unchanged, weights of modules that are not known among them.
    pub files: Vec<PathBuf>,
    /// Files that would be carried over to a folder, and are not, since the output is a single file.
    pub not_carried: Vec<PathBuf>,
    /// Files that go over and that the file of weights holds in another form.
    pub made: Made,
    /// Empty folders, which go over too.
    pub empty: Vec<PathBuf>,
    /// What stays behind, and why.
    pub left: Vec<(PathBuf, Reason)>,
    /// What the files of weights hold that is no weight, in plain words.
    pub in_weight_files: Vec<String>,
}

/// Why something of a folder stays behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The weights as they were, in another format or as a copy: loaders could take them for those of the result.
    OldWeights,
    /// They say how the input's weights were packed.
    Described,
    /// They describe an ONNX file that is not the one of the output.
    Runtime,
    /// Written by an earlier run about its own output.
    Replaced,
    /// A hidden file or folder, such as that of a version control system.
    Hidden,
    /// A file whose name is usual for keys and credentials.
    Secret,
    /// A link to a folder, or to nothing.
    Link,
    /// A device, a socket, a pipe.
    Special,
}

impl Reason {
    fn text(self) -> &'static str {
        match self {
            Reason::OldWeights => "they hold the weights as they were, which would contradict the new ones",
            Reason::Described => "they describe the weights as they were",
            Reason::Runtime => "they describe an ONNX file as it was",
            Reason::Replaced => "they tell of an earlier run",
            Reason::Hidden => "hidden files and folders are not part of a model",
            Reason::Secret => "they may hold keys or credentials",
            Reason::Link => "links to folders are not followed",
            Reason::Special => "they are neither files nor folders",
        }
    }
}

/// Formats that hold a whole model and nothing else.
const WHOLE_MODELS: [&str; 9] = ["safetensors", "h5", "msgpack", "onnx", "onnx_data", "gguf", "ot", "tflite", "mlmodel"];
/// Formats that hold anything: they are a model's weights under these names alone.
const PICKLES: [&str; 4] = ["bin", "pt", "pth", "ckpt"];
const NAMES_OF_WEIGHTS: [&str; 6] = ["model", "pytorch_model", "diffusion_pytorch_model", "consolidated", "weights", "optimizer"];
/// Folders at the top that hold the model once more.
const OTHER_FOLDERS: [&str; 4] = ["original", "onnx", "openvino", "coreml"];
/// Descriptions of quantized weights beside `config.json`.
pub(super) const DESCRIPTIONS: [&str; 2] = ["quantize_config.json", "quant_config.json"];
/// Files that determine the samples of a model that is a single ONNX file.
pub(super) const PREPROCESSING: [&str; 7] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
];
/// The description of an ONNX file, which goes over where that file keeps its operators and its name.
const RUNTIME: &str = "genai_config.json";
/// The name of an ONNX file in a folder that is written.
const ONNX: &str = "model.onnx";
/// The hidden file that repositories on the Hub consist of.
const ATTRIBUTES: &str = ".gitattributes";
/// Names of files that hold keys or credentials, and their extensions.
const SECRETS: [&str; 9] = ["id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "credentials", "credentials.json", "service_account.json", "secrets", "token"];
const SECRET_EXTENSIONS: [&str; 8] = ["pem", "key", "ppk", "p12", "pfx", "jks", "kdbx", "keystore"];
/// Files that every run writes anew, and those that say which run it was.
const OWN: [&str; 5] = ["recipe.yaml", "report.json", "report.md", "report.html", Model::KEY];

impl Beside {
    /// Looks through a folder whose weights are in these files of it. Links to files are followed, links to folders are not.
    ///
    /// # Errors
    /// A folder cannot be listed.
    pub fn of(folder: &Path, weights: &[PathBuf]) -> Result<Beside> {
        let mut beside = Beside::default();
        let pairs = [(SINGLE, INDEX), (pytorch::SINGLE, pytorch::INDEX)].map(|(single, index)| (folder.join(single), folder.join(index)));
        // The index that named these files, if one did: the first that there is.
        let there = pairs.iter().find(|(single, index)| files::is_file(single) || files::is_file(index));
        let index = there.filter(|(single, _)| !files::is_file(single)).map(|(_, index)| index);
        beside.collect(folder, Path::new(""), weights, index)?;
        beside.files.sort();
        beside.empty.sort();
        beside.left.sort();
        Ok(beside)
    }

    fn collect(&mut self, root: &Path, inside: &Path, weights: &[PathBuf], index: Option<&PathBuf>) -> Result<()> {
        let (folder, top) = (root.join(inside), inside.as_os_str().is_empty());
        let holds_weights = top || weights.iter().any(|file| file.parent() == Some(&folder));
        let mut none = true;
        for files::Entry { path, kind } in files::list(&folder).map_err(Error::io("list", &folder))? {
            let name = path.file_name().unwrap_or_default();
            let (relative, name) = (inside.join(name), name.to_string_lossy().into_owned());
            none = false;
            let left = match () {
                () if name.starts_with('.') && name != ATTRIBUTES => Reason::Hidden,
                () if kind == Kind::Folder && top && holds_the_model_again(&name) => Reason::OldWeights,
                () if kind == Kind::Folder => {
                    self.collect(root, &relative, weights, index)?;
                    continue;
                }
                () if kind == Kind::Link => Reason::Link,
                () if kind == Kind::Special => Reason::Special,
                () if is_secret(&name) => Reason::Secret,
                () if (top && name == "config.json") || weights.contains(&path) || index == Some(&path) => continue,
                () if top && OWN.contains(&name.as_str()) => Reason::Replaced,
                () if top && DESCRIPTIONS.contains(&name.as_str()) => Reason::Described,
                () if top && name == RUNTIME && !weights.contains(&root.join(ONNX)) => Reason::Runtime,
                () if holds_weights && is_weights(&name) => Reason::OldWeights,
                () => {
                    self.files.push(relative);
                    continue;
                }
            };
            self.left.push((relative, left));
        }
        if none && !top {
            self.empty.push(inside.to_owned());
        }
        Ok(())
    }

    /// Files that a run may read, whether they are carried over or not.
    pub(crate) fn read(&self) -> impl Iterator<Item = &PathBuf> {
        let described = self.left.iter().filter(|(_, reason)| *reason == Reason::Described).map(|(path, _)| path);
        self.files.iter().chain(&self.not_carried).chain(described)
    }

    /// Leaves the description of an ONNX file behind: the output has another one.
    pub(crate) fn leave_runtime(&mut self) {
        let before = self.files.len();
        self.files.retain(|file| file != Path::new(RUNTIME));
        if self.files.len() < before {
            self.left.push((RUNTIME.into(), Reason::Runtime));
        }
    }

    /// What stays behind, in plain words: one note for each reason.
    pub fn notes(&self, folder: &Path) -> Vec<String> {
        let mut reasons: Vec<Reason> = self.left.iter().map(|(_, reason)| *reason).collect();
        reasons.sort_unstable();
        reasons.dedup();
        let name = |path: &Path| format!("{}{}", path.display(), if files::is_dir(&folder.join(path)) { "/" } else { "" });
        let names = |reason: Reason| self.left.iter().filter(move |(_, other)| *other == reason).map(|(path, _)| name(path)).collect::<Vec<_>>().join(", ");
        let left = reasons.into_iter().map(|reason| format!("not carried over from the input: {} ({})", names(reason), reason.text()));
        left.chain(self.in_weight_files.iter().cloned()).collect()
    }
}

fn holds_the_model_again(name: &str) -> bool {
    OTHER_FOLDERS.contains(&name) || name.strip_prefix("checkpoint-").is_some_and(|step| !step.is_empty() && step.bytes().all(|b| b.is_ascii_digit()))
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let stem = name.rsplit_once('.').map_or("", |(stem, _)| stem);
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    SECRETS.contains(&name.as_str()) || SECRET_EXTENSIONS.contains(&extension) || stem == "secrets" || stem.starts_with("id_rsa")
}

fn is_weights(name: &str) -> bool {
    let name = name.strip_suffix(".index.json").unwrap_or(name);
    let Some((stem, extension)) = name.rsplit_once('.') else { return false };
    let named = |stem: &str| NAMES_OF_WEIGHTS.iter().any(|known| stem.strip_prefix(known).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric)));
    WHOLE_MODELS.contains(&extension)
        || name.ends_with(".onnx.data")
        || name.contains(".ckpt.")
        || name.starts_with("openvino_model.")
        || (PICKLES.contains(&extension) && named(stem))
}

impl Model {
    /// Refuses links that lead out of the folder: what they lead to would be copied into the output, and published with it. Those of
    /// the caches that keep files by their hash, in a folder `blobs` above the model, are followed.
    ///
    /// # Errors
    /// There is such a link, or a file cannot be found.
    pub(crate) fn require_own_files(&self) -> Result<()> {
        // What other machines list are no links.
        if files::is_remote(&self.path) {
            return Ok(());
        }
        let real = |path: &Path| fs::canonicalize(path).map_err(Error::io("open", path));
        let root = real(&self.path)?;
        let places: Vec<PathBuf> = root.ancestors().skip(1).take(2).map(|above| above.join("blobs")).chain([root.clone()]).collect();
        for path in self.beside.files.iter().map(|file| self.path.join(file)) {
            let target = real(&path)?;
            if !places.iter().any(|place| target.starts_with(place)) {
                return Err(Error::Unsupported {
                    what: format!("{}, a link out of the model's folder to {},", path.display(), target.display()),
                    hint: "its content would be copied into the output: put a copy in the place of the link, or remove it".into(),
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
    fn everything_goes_over_or_is_named() {
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
            "training_args.bin",
            "vocab.txt",
        ];
        let old = [
            "checkpoint-500/model.safetensors",
            "consolidated.00.pth",
            "flax_model.msgpack",
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
        let secret = ["deploy/server.KEY", "cert.pem", "id_ed25519", "id_rsa.old", "secrets.yaml", "token"];
        let other = [".git/config", ".env", "1_Pooling/.netrc", "report.json", "inputs.blake3"];
        for name in carried.iter().chain(&old).chain(&read).chain(&secret).chain(&other) {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        fs::create_dir(folder.path().join("3_Normalize")).unwrap();
        for (to, name) in [("vocab.txt", "link.txt"), ("", "loop"), ("nothing", "broken")] {
            std::os::unix::fs::symlink(folder.path().join(to), folder.path().join(name)).unwrap();
        }
        let beside = Beside::of(folder.path(), &[folder.path().join("model.safetensors")]).unwrap();
        let mut expected: Vec<PathBuf> = carried.iter().chain(&["link.txt"]).map(PathBuf::from).collect();
        expected.sort();
        assert_eq!((beside.files.clone(), beside.empty.clone()), (expected, vec![PathBuf::from("3_Normalize")]));
        let notes = beside.notes(folder.path());
        assert_eq!(notes.len(), 5, "{notes:?}");
        assert!(notes[0].contains("checkpoint-500/, consolidated.00.pth, ") && notes[0].contains("the weights as they were"), "{notes:?}");
        assert!(notes[2].contains(".env, .git/, 1_Pooling/.netrc (hidden") && notes[4].contains("broken, loop/ (links"), "{notes:?}");
        assert!(notes[3].contains("cert.pem, deploy/server.KEY, id_ed25519, id_rsa.old, secrets.yaml, token (they may hold keys"), "{notes:?}");
        let kept = |name: &str| beside.left.iter().any(|(path, _)| Path::new(name).starts_with(path));
        assert!(old.iter().all(|name| kept(name)), "{:?}", beside.left);
    }

    #[test]
    fn what_files_of_pytorch_hold_beside_weights_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pytorch");
        fs::copy(golden.join("training.pt"), folder.path().join(pytorch::SINGLE)).unwrap();
        fs::copy(golden.join("object.pt"), folder.path().join("training_args.bin")).unwrap();
        let beside = Model::open(folder.path()).unwrap().beside;
        assert_eq!(beside.files, [Path::new("training_args.bin")]);
        let notes = beside.notes(folder.path());
        assert!(notes.len() == 2 && notes[0].contains("`epoch`, `optimizer`, `arguments`"), "{notes:?}");
        assert!(notes[1].contains("`tied.first` and `tied.second` share their elements"), "{notes:?}");
        // Of several files, the index says which holds what; it is not carried over.
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
        assert_eq!((model.weights.by_name.len(), model.beside.files), (names.len(), vec![PathBuf::from("training_args.bin")]));
        assert!(model.beside.left.is_empty(), "{:?}", model.beside.left);
    }
}
