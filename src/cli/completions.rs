//! `compress completions`

use clap_complete::Shell;

use super::output;
use crate::error::Result;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Args {
    pub(super) fn run(self) -> Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut super::command(), "compress", &mut script);
        output::print(&String::from_utf8_lossy(&script))
    }
}
