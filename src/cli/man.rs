//! `compress man`

use std::fs;
use std::path::PathBuf;

use clap_mangen::Man;

use super::output;
use crate::error::{Error, Result};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress man | man -l -
  compress man -o ~/.local/share/man/man1")]
pub(super) struct Args {
    /// Folder for the pages of all commands [default: print the page of `compress`]
    #[arg(long, short, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

impl Args {
    pub(super) fn run(self) -> Result<()> {
        let mut main = super::command().disable_help_subcommand(true);
        main.build();
        let page = |command: &clap::Command| Man::new(command.clone()).source(concat!("compress ", env!("CARGO_PKG_VERSION")));
        let Some(folder) = self.output else {
            let mut text = Vec::new();
            page(&main).render(&mut text).map_err(Error::io("print", "compress.1".as_ref()))?;
            return output::print(&String::from_utf8_lossy(&text));
        };
        fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        for command in std::iter::once(&main).chain(main.get_subcommands()) {
            let page = page(command);
            page.generate_to(&folder).map_err(Error::io("write", &folder.join(page.get_filename())))?;
        }
        Ok(())
    }
}
