//! `compress init`

use std::path::{Path, PathBuf};

use super::args::{Global, TextFile};
use super::output;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::pipeline::{has_placeholder, starter};

#[derive(Debug, clap::Args)]
#[command(mut_arg("output", |arg| arg.help("Write the recipe to a file")), after_help = "Examples:
  compress init ./minilm                    print a recipe
  compress init ./minilm -o recipe.yaml     write it to a file; then: compress plan recipe.yaml

Only headers are read: family, tensors, dtypes, tied weights, size by part. Comments explain every line of the recipe, and
suggest alternatives and data sets.")]
pub(in crate::cli) struct Args {
    /// Model folder or .safetensors file
    model: PathBuf,
    #[command(flatten)]
    file: TextFile,
}

/// Extensions of recipes.
pub(super) const RECIPE: [&str; 2] = ["yaml", "yml"];

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        global.models.require_no_sizes()?;
        let model = Model::open(&self.model)?;
        let file = self.file.output.as_deref().unwrap_or(Path::new("recipe.yaml"));
        // Paths in a recipe are relative to it.
        let is_in_working_directory = file.parent().is_none_or(|folder| folder.as_os_str().is_empty());
        let path = if is_in_working_directory { self.model.clone() } else { std::path::absolute(&self.model).unwrap_or_else(|_| self.model.clone()) };
        let text = starter(&model, &path.to_string_lossy(), &file.to_string_lossy());
        match &self.file.output {
            None if global.json => output::json(&serde_json::json!({ "recipe": text })),
            None => output::print(&text),
            Some(file) => {
                require_outside(&self.model, file)?;
                self.file.check(&RECIPE)?;
                let missing = if has_placeholder(&text) { "next, replace the path of the calibration samples, then" } else { "next," };
                self.file.write(&RECIPE, || Ok(text))?;
                if global.json {
                    return output::json(&serde_json::json!({ "written": file }));
                }
                if global.quiet { Ok(()) } else { output::print(&format!("{}: {missing} compress plan {0}\n", file.display())) }
            }
        }
    }
}

/// Refuses a recipe in the folder of its model: the output of a recipe is relative to it, and outputs inside
/// the model's folder are refused.
fn require_outside(model: &Path, file: &Path) -> Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Remote models have no local folder.
    let (Ok(model), Ok(folder)) = (std::fs::canonicalize(model), std::fs::canonicalize(folder)) else { return Ok(()) };
    if !model.is_dir() || !folder.starts_with(&model) {
        return Ok(());
    }
    let outside = model.with_file_name(file.file_name().unwrap_or_default());
    Err(Error::Output {
        path: file.to_owned(),
        reason: "lies inside the folder of the model, which must not contain the output of the recipe".to_owned(),
        hint: format!("write it outside: -o {}", outside.display()),
    })
}
