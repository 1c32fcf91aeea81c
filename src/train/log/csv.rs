//! A table with a column for each figure.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use super::Log;
use crate::error::{Error, Result};
use crate::train::run::Row;

/// Columns before those of the losses.
const BEFORE: [&str; 3] = ["step", "epoch", "loss"];
/// Columns behind them.
const BEHIND: [&str; 4] = ["learning_rate", "gradient_norm", "samples_per_second", "waited"];

/// The table.
pub(super) struct Table {
    path: PathBuf,
    file: File,
    losses: Vec<String>,
}

impl Table {
    /// Begins a table, or goes on behind a step.
    pub fn open(path: PathBuf, losses: &[String], step: u64) -> Result<Table> {
        let columns: Vec<&str> = BEFORE.into_iter().chain(losses.iter().map(String::as_str)).chain(BEHIND).collect();
        let mut lines = vec![columns.join(",")];
        if step > 0 {
            lines.extend(done(&path, &columns, step));
        }
        let mut file = File::create(&path).map_err(Error::io("write", &path))?;
        lines.iter().try_for_each(|line| writeln!(file, "{line}")).map_err(Error::io("write", &path))?;
        Ok(Table { path, file, losses: losses.to_vec() })
    }
}

/// Lines of a table up to a step, in these columns; none where there is no table.
fn done(path: &Path, columns: &[&str], step: u64) -> Vec<String> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    let mut lines = BufReader::new(file).lines().map_while(std::io::Result::ok);
    let Some(header) = lines.next() else { return Vec::new() };
    let header: Vec<&str> = header.split(',').collect();
    let kept = |line: String| {
        let cells: BTreeMap<&str, &str> = header.iter().copied().zip(line.split(',')).collect();
        // The last line of a process that was killed may lack its end.
        let whole = cells.len() == header.len() && cells.get("step").and_then(|number| number.parse::<u64>().ok()).is_some_and(|number| number <= step);
        whole.then(|| columns.iter().map(|column| cells.get(column).copied().unwrap_or("")).collect::<Vec<_>>().join(","))
    };
    lines.filter_map(kept).collect()
}

impl Log for Table {
    fn add(&mut self, row: &Row) -> Result<()> {
        let Row { step, epoch, loss, learning_rate, samples_per_second, waited, .. } = row;
        let or_empty = |figure: Option<&f64>| figure.map_or(String::new(), f64::to_string);
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
    fn each_loss_has_a_column_and_steps_are_there_once() {
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
        // A line that was cut off, and columns in another order.
        std::fs::write(&path, "hidden,step,loss\n2,1,0.5\n,2").unwrap();
        drop(open(5));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{header}1,,0.5,,2,,,,\n"));
        drop(open(0));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), header);
    }
}
