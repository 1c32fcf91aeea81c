//! `compress init`

use std::path::{Path, PathBuf};

use super::args::{Global, TextFile};
use super::output;
use crate::error::Result;
use crate::model::Model;
use crate::pipeline::starter;

#[derive(Debug, clap::Args)]
#[command(mut_arg("output", |arg| arg.help("Write the recipe to a file")), after_help = "Examples:
  compress init ./minilm                    a recipe to look at
  compress init ./minilm -o recipe.yaml     the same in a file; then: compress plan recipe.yaml

The model is looked at, not read: family, tensors, formats, tied weights, where the bytes are. Every line of the recipe says
why it is there; alternatives and data sets stand beside it as comments.")]
pub(in crate::cli) struct Args {
    /// Model folder or .safetensors file
    model: PathBuf,
    #[command(flatten)]
    file: TextFile,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let model = Model::open(&self.model)?;
        let file = self.file.output.as_deref().unwrap_or(Path::new("recipe.yaml"));
        // Paths in a recipe are relative to it.
        let beside = file.parent().is_none_or(|folder| folder.as_os_str().is_empty());
        let path = if beside { self.model.clone() } else { std::path::absolute(&self.model).unwrap_or_else(|_| self.model.clone()) };
        let text = starter(&model, &path.to_string_lossy(), &file.to_string_lossy());
        match &self.file.output {
            None => output::print(&text),
            Some(file) => {
                self.file.write(|| Ok(text))?;
                if global.quiet { Ok(()) } else { output::print(&format!("{}: next, compress plan {0}\n", file.display())) }
            }
        }
    }
}
