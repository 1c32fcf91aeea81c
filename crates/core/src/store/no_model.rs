//! Advice for paths that are mistaken for models.

use std::path::Path;

use crate::files::{self, Kind};

/// Extensions of weights of other frameworks.
const OTHER_FRAMEWORKS: [&str; 9] = ["h5", "keras", "pb", "msgpack", "ot", "tflite", "mlmodel", "mlpackage", "engine"];
const CONVERT: &str = "weights of TensorFlow, Flax, Core ML and TensorRT are not read: save the model as safetensors, or export it to ONNX";
/// File with the weights of a model of diffusers.
const DIFFUSERS: &str = "diffusion_pytorch_model.safetensors";
/// Largest number of folders in a message.
const LISTED: usize = 4;

/// The next step for a file that is not a model.
pub(super) fn advice(file: &Path) -> String {
    let extension = file.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let more = match extension.as_str() {
        "yaml" | "yml" => format!("; recipes have a command: `compress run {}`", file.display()),
        "json" => format!("; this file is in the folder `{}`", file.parent().filter(|folder| *folder != "").unwrap_or(Path::new(".")).display()),
        "txt" | "csv" | "tsv" | "jsonl" => "; data have an option, such as `--calibration` or `--data`, and texts of drafts are .npz or .txt files".to_owned(),
        other if OTHER_FRAMEWORKS.contains(&other) => format!("; {CONVERT}"),
        _ => String::new(),
    };
    format!("specify the folder of a model, or a weight file such as model.safetensors{more}")
}

/// The next step for a folder without weights. `names`: names of files with weights.
pub(super) fn folder_advice(folder: &Path, names: &[&str]) -> String {
    let entries = files::list(folder).unwrap_or_default();
    let named = |name: &str| entries.iter().any(|entry| entry.path.file_name().is_some_and(|found| found == name));
    let inside = |folder: &Path| {
        let entries = files::list(folder).unwrap_or_default().into_iter();
        let mut folders: Vec<String> = entries.filter(|entry| entry.kind == Kind::Folder).map(|entry| entry.path.display().to_string()).collect();
        folders.sort();
        folders
    };
    if named("snapshots")
        && let Some(snapshot) = inside(&folder.join("snapshots")).last()
    {
        return format!("it is the cache of a repository of the Hub: specify its snapshot, {snapshot}, or hf:org/name");
    }
    let mut with_weights = inside(folder);
    with_weights.retain(|folder| names.iter().chain(&[DIFFUSERS]).any(|file| files::is_file(&Path::new(folder).join(file))));
    with_weights.truncate(LISTED);
    if !with_weights.is_empty() {
        return format!("its folders have weights: specify one of them, such as {}", with_weights.join(", "));
    }
    let has_extension = |path: &Path| path.extension().is_some_and(|found| OTHER_FRAMEWORKS.iter().any(|extension| found == *extension));
    if entries.iter().any(|entry| has_extension(&entry.path)) {
        return CONVERT.to_owned();
    }
    "specify the folder with the weights".to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_lead_to_the_command_or_the_option() {
        for (file, part) in [
            ("a/recipe.yaml", "`compress run a/recipe.yaml`"),
            ("a/config.json", "in the folder `a`"),
            ("config.json", "in the folder `.`"),
            ("book.txt", "`--calibration`"),
            ("tf_model.h5", "save the model as safetensors"),
            ("notes", "such as model.safetensors"),
        ] {
            assert!(advice(Path::new(file)).contains(part), "{file}: {}", advice(Path::new(file)));
        }
    }

    #[test]
    fn folders_lead_to_the_one_with_the_weights() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert_eq!(folder_advice(root, &["model.safetensors"]), "specify the folder with the weights");
        fs::write(root.join("tf_model.h5"), "").unwrap();
        assert_eq!(folder_advice(root, &["model.safetensors"]), CONVERT);
        for name in ["text_encoder", "unet", "logs"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        fs::write(root.join("unet/diffusion_pytorch_model.safetensors"), "").unwrap();
        fs::write(root.join("text_encoder/model.safetensors"), "").unwrap();
        let advice = folder_advice(root, &["model.safetensors"]);
        let folders = ["text_encoder", "unet"].map(|name| root.join(name).display().to_string()).join(", ");
        assert!(advice.ends_with(&folders), "{advice}");
        fs::create_dir_all(root.join("snapshots/0a1b")).unwrap();
        assert!(folder_advice(root, &["model.safetensors"]).contains(&format!("specify its snapshot, {}", root.join("snapshots/0a1b").display())));
    }
}
