//! Every step as a line of a table that other programs read.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use super::run::Row;
use crate::error::{Error, Result};

/// Name of the file.
pub const FILE: &str = "training.csv";
const HEADER: &str = "step,epoch,loss,learning_rate,gradient_norm,samples_per_second,waited,losses";

/// The table.
pub struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Begins a table in a folder, or goes on behind a step.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn open(folder: &Path, step: u64) -> Result<Log> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let path = folder.join(FILE);
        let mut lines = vec![HEADER.to_owned()];
        if step > 0
            && let Ok(file) = File::open(&path)
        {
            let done = |line: &String| line.split(',').next().and_then(|number| number.parse::<u64>().ok()).is_some_and(|number| number <= step);
            lines.extend(BufReader::new(file).lines().map_while(std::io::Result::ok).filter(done));
        }
        let mut file = File::create(&path).map_err(Error::io("write", &path))?;
        lines.iter().try_for_each(|line| writeln!(file, "{line}")).map_err(Error::io("write", &path))?;
        Ok(Log { path, file })
    }

    /// Adds a step.
    ///
    /// # Errors
    /// The disk is full.
    pub fn add(&mut self, row: &Row) -> Result<()> {
        let losses = row.losses.iter().map(|(name, loss)| format!("{name}={loss}")).collect::<Vec<_>>().join(" ");
        let Row { step, epoch, loss, learning_rate, gradient_norm, samples_per_second, waited, .. } = row;
        let gradient_norm = gradient_norm.map_or(String::new(), |norm| norm.to_string());
        let line = format!("{step},{epoch},{loss},{learning_rate},{gradient_norm},{samples_per_second:.2},{waited:.4},{losses}");
        writeln!(self.file, "{line}").map_err(Error::io("write", &self.path))
    }
}
