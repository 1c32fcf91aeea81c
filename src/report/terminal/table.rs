//! Tables for a terminal.

use std::fmt;

use unicode_width::UnicodeWidthStr;

/// A table without rules. The first column is left-aligned, the others are right-aligned. Cells are stored
/// as one text, because a table can have a row for each of many tensors.
#[derive(Debug)]
pub struct Table {
    text: String,
    /// Length of the text after each cell, row by row.
    ends: Vec<usize>,
    columns: Vec<Column>,
}

#[derive(Debug)]
struct Column {
    width: usize,
    is_left_aligned: bool,
}

impl Table {
    /// A table with a header row.
    pub fn new<T: AsRef<str>>(head: impl IntoIterator<Item = T>) -> Table {
        let mut table = Table { text: String::new(), ends: Vec::new(), columns: Vec::new() };
        for (index, cell) in head.into_iter().enumerate() {
            table.columns.push(Column { width: 0, is_left_aligned: index == 0 });
            table.push(index, cell.as_ref());
        }
        table
    }

    /// Adds a row with a cell for each column.
    pub fn add_row<T: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = T>) {
        let mut cells = cells.into_iter();
        for index in 0..self.columns.len() {
            self.push(index, cells.next().as_ref().map_or("", T::as_ref));
        }
    }

    /// Left-aligns a column.
    pub fn align_left(&mut self, index: usize) {
        self.columns.iter_mut().skip(index).take(1).for_each(|column| column.is_left_aligned = true);
    }

    fn push(&mut self, index: usize, cell: &str) {
        self.text.push_str(cell);
        self.ends.push(self.text.len());
        self.columns.iter_mut().skip(index).take(1).for_each(|column| column.width = column.width.max(cell.width()));
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut begin = 0;
        for (row, ends) in self.ends.chunks(self.columns.len().max(1)).enumerate() {
            f.write_str(if row > 0 { "\n" } else { "" })?;
            for (column, &end) in self.columns.iter().zip(ends) {
                let cell = self.text.get(begin..end).unwrap_or_default();
                let padding = column.width.saturating_sub(cell.width());
                let (before, after) = if column.is_left_aligned { (0, padding) } else { (padding, 0) };
                write!(f, " {:before$}{cell}{:after$} ", "", "")?;
                begin = end;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_have_the_width_of_their_widest_cell_on_the_terminal() {
        let mut table = Table::new(["name", "n", "bar"]);
        table.align_left(2);
        table.add_row(["層", "10", "#"]);
        table.add_row(vec!["é", "200"]);
        let lines = [" name    n  bar ", " 層     10  #   ", " é     200      "];
        assert_eq!(table.to_string(), lines.join("\n"));
        assert!(Table::new([""; 0]).to_string().is_empty());
    }
}
