//! CSV log with one row per step.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use super::Log;
use crate::error::{Error, Result};
use crate::train::records::StepRecord;

/// Columns before those of the losses.
const FIRST_COLUMNS: [&str; 3] = ["step", "epoch", "loss"];
/// Columns after those of the losses.
const LAST_COLUMNS: [&str; 4] = ["learning_rate", "gradient_norm", "samples_per_second", "waited"];

/// An open CSV log.
pub(super) struct Table {
    path: PathBuf,
    file: File,
    losses: Vec<String>,
}

impl Table {
    /// Creates the file; after a resume at `step` > 0, keeps its rows up to that step.
    pub fn open(path: PathBuf, losses: &[String], step: u64) -> Result<Table> {
        let columns: Vec<&str> = FIRST_COLUMNS.into_iter().chain(losses.iter().map(String::as_str)).chain(LAST_COLUMNS).collect();
        let mut lines = vec![columns.join(",")];
        if step > 0 {
            lines.extend(rows_until(&path, &columns, step));
        }
        let mut file = File::create(&path).map_err(Error::io("write", &path))?;
        lines.iter().try_for_each(|line| writeln!(file, "{line}")).map_err(Error::io("write", &path))?;
        Ok(Table { path, file, losses: losses.to_vec() })
    }
}

/// Reads the rows up to a step and reorders their columns; empty if the file does not exist.
fn rows_until(path: &Path, columns: &[&str], step: u64) -> Vec<String> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    let mut lines = BufReader::new(file).lines().map_while(std::io::Result::ok);
    let Some(header) = lines.next() else { return Vec::new() };
    let header: Vec<&str> = header.split(',').collect();
    let reorder = |line: String| {
        let cells: BTreeMap<&str, &str> = header.iter().copied().zip(line.split(',')).collect();
        // The last line may be incomplete if the process was killed.
        let is_valid = cells.len() == header.len() && cells.get("step").and_then(|number| number.parse::<u64>().ok()).is_some_and(|number| number <= step);
        is_valid.then(|| columns.iter().map(|column| cells.get(column).copied().unwrap_or("")).collect::<Vec<_>>().join(","))
    };
    lines.filter_map(reorder).collect()
}

impl Log for Table {
    fn add(&mut self, row: &StepRecord) -> Result<()> {
        let StepRecord { step, epoch, loss, learning_rate, samples_per_second, waited, .. } = row;
        let or_empty = |value: Option<&f64>| value.map_or(String::new(), f64::to_string);
        let losses: String = self.losses.iter().map(|name| or_empty(row.losses.get(name)) + ",").collect();
        let gradient_norm = or_empty(row.gradient_norm.as_ref());
        let line = format!("{step},{epoch},{loss},{losses}{learning_rate},{gradient_norm},{samples_per_second:.2},{waited:.4}");
        writeln!(self.file, "{line}").map_err(Error::io("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn each_loss_has_a_column_and_each_step_one_row() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("training.csv");
        let losses = ["soft".to_owned(), "hidden".to_owned()];
        let open = |step| Table::open(path.clone(), &losses, step).unwrap();
        let mut table = open(0);
        table.add(&row(1, &[("soft", 0.5), ("hidden", 2.0)])).unwrap();
        table.add(&row(2, &[("soft", 0.5)])).unwrap();
        table.add(&row(3, &[("soft", 0.5)])).unwrap();
        drop(table);
        let header = "step,epoch,loss,soft,hidden,learning_rate,gradient_norm,samples_per_second,waited\n";
        let two = format!("{header}1,0,1.5,0.5,2,0.25,3,8.00,0.1250\n2,0,1.5,0.5,,0.25,,8.00,0.1250\n");
        let mut table = open(2);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), two);
        table.add(&row(3, &[("hidden", 1.0)])).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{two}3,0,1.5,,1,0.25,3,8.00,0.1250\n"));
        // A truncated line, and columns in a different order.
        std::fs::write(&path, "hidden,step,loss\n2,1,0.5\n,2").unwrap();
        drop(open(5));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{header}1,,0.5,,2,,,,\n"));
        drop(open(1));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{header}1,,0.5,,2,,,,\n"));
        drop(open(0));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), header);
    }
}
