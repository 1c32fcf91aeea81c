//! The graph and the pruning groups of a model, for `compress inspect`.

use serde_json::json;

use super::args::Global;
use super::output;
use crate::error::Result;
use crate::model::Model;
use crate::report::terminal::wrapped;

// As for `Samples`.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(in crate::cli) struct Graph {
    /// Show the graph: one line for each input, tensor, node and output
    #[arg(long)]
    graph: bool,
    /// Show the groups for structured pruning: heads, neurons, channels, the width of a residual stream; and
    /// axes that cannot be pruned
    #[arg(long, conflicts_with = "graph")]
    groups: bool,
}

impl Graph {
    /// Shows the graph or the groups, if requested. Returns whether it printed something.
    pub fn show(&self, model: &Model, global: &Global) -> Result<bool> {
        global.models.configure_model(model)?;
        match (self.graph, self.groups) {
            (true, _) => show_graph(model, global)?,
            (_, true) => show_groups(model, global)?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn show_graph(model: &Model, global: &Global) -> Result<()> {
    let graph = model.graph()?;
    if global.json {
        return output::json(&crate::ir::GraphFile::from(&graph));
    }
    output::print(&graph.to_string())?;
    let unused = model.unused(&graph);
    if !unused.is_empty() {
        output::print(&format!("# unused: {}\n", unused.join(", ")))?;
    }
    Ok(())
}

fn show_groups(model: &Model, global: &Global) -> Result<()> {
    let found = crate::analysis::groups(&model.graph()?)?;
    if global.json {
        return output::json(&json!({ "groups": found.groups, "held": found.frozen }));
    }
    let Some(columns) = super::columns() else { return output::print(&found.to_string()) };
    let groups = found.groups.iter().map(|group| [group.unit.to_string(), group.size.to_string(), group.name.clone(), group.carriers()]);
    let frozen = found.frozen.iter().map(|axis| ["held".to_owned(), axis.size.to_string(), format!("{}[{}]", axis.param, axis.axis), axis.reason.to_string()]);
    output::print(&format!("{}\n", wrapped(&["unit", "size", "first", "carried by, or held by"], groups.chain(frozen), columns)))
}
