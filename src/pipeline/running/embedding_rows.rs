//! Embedding tables with those rows alone that samples look up: most of a small model is its vocabulary, and a few samples need
//! little of it. A head that is the same weight stays whole.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::exec::transfer;
use crate::ir::{Element, Graph, Kind, Op, rebuild};
use crate::store::{Encoding, Weights};
use crate::work::Meter;

/// A model that samples go through.
pub(super) type Side<'m> = (&'m Graph, &'m Weights);

/// The rows that an input looks up in a table, by both names, in rising order.
#[derive(Default)]
pub(super) struct Rows(BTreeMap<(String, String), Vec<usize>>);

/// Tables that an input looks up.
#[derive(PartialEq)]
struct Tables {
    names: BTreeSet<String>,
    /// Rows of each.
    rows: usize,
    /// Tokens below this keep their numbers: positions are counted from the token that pads.
    fixed: usize,
}

impl Tables {
    /// The tables of an input, if its tokens may have other numbers.
    fn of((graph, weights): Side, input: &str) -> Option<Tables> {
        let (id, _) = graph.inputs().find(|(_, value)| value.name == input && value.ty.element == Element::Int)?;
        if graph.is_output(id) {
            return None;
        }
        let mut tables = Tables { names: BTreeSet::new(), rows: 0, fixed: 0 };
        for node in graph.nodes().iter().filter(|node| node.inputs.contains(&id)) {
            match (&node.op, node.inputs.as_slice()) {
                (Op::Embedding(_), [_, table]) => {
                    let name = &graph.value(*table).name;
                    let weight = weights.by_name.get(name).filter(|weight| weight.encoding == Encoding::Dense && weight.dtype.bitsize() >= 8)?;
                    let rows = *weight.shape.first()?;
                    if graph.value(*table).kind != Kind::Param || ![0, rows].contains(&tables.rows) {
                        return None;
                    }
                    tables.rows = rows;
                    tables.names.insert(name.clone());
                }
                (Op::Positions(op), _) => {
                    tables.fixed = tables.fixed.max(op.padding.map_or(0, |token| usize::try_from(token).map_or(0, |token| token.saturating_add(1))))
                }
                _ => return None,
            }
        }
        (!tables.names.is_empty() && tables.fixed <= tables.rows).then_some(tables)
    }
}

impl Rows {
    /// The rows that the samples look up in both models, where that saves at least half of a table. Tokens of the samples are then the
    /// positions of their rows among these.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn looked_up(models: [Side; 2], samples: &mut [Batch]) -> Result<Rows> {
        let mut found = Rows::default();
        let inputs: BTreeSet<&str> = models[0].0.inputs().map(|(_, value)| value.name.as_str()).collect();
        for input in inputs {
            let [Some(tables), Some(others)] = models.map(|model| Tables::of(model, input)) else { continue };
            let tokens: Vec<Vec<i64>> =
                samples.iter().filter_map(|sample| sample.inputs.get(input)).map(transfer::read).collect::<candle_core::Result<_>>().map_err(shaped)?;
            // Inputs that a sample lacks are zeros.
            let zero = (tokens.len() < samples.len()).then_some(0);
            let named: BTreeSet<i64> = (0..tables.fixed as i64).chain(zero).chain(tokens.iter().flatten().copied()).collect();
            let known = |token: &i64| usize::try_from(*token).is_ok_and(|token| token < tables.rows);
            if tables != others || named.len() > tables.rows / 2 || !named.iter().all(known) {
                continue;
            }
            let named: Vec<i64> = named.into_iter().collect();
            let tensors = samples.iter_mut().filter_map(|sample| sample.inputs.get_mut(input));
            for (tensor, tokens) in tensors.zip(tokens) {
                let places: Vec<i64> = tokens.iter().map(|token| named.partition_point(|other| other < token) as i64).collect();
                *tensor = Tensor::from_vec(places, tensor.dims(), &Device::Cpu).map_err(shaped)?;
            }
            let rows: Vec<usize> = named.iter().map(|token| *token as usize).collect();
            found.0.extend(tables.names.into_iter().map(|name| ((input.to_owned(), name), rows.clone())));
        }
        Ok(found)
    }

    /// A model with these rows alone.
    ///
    /// # Errors
    /// The model has no such rows.
    pub fn of(&self, (graph, weights): Side) -> Result<(Graph, Weights)> {
        if self.0.is_empty() {
            return Ok((graph.clone(), weights.clone()));
        }
        let mut less = weights.clone();
        for ((input, name), rows) in &self.0 {
            let table = less.get(name)?.pick(name, 0, rows, Arc::new(Meter::default()))?;
            less.by_name.insert(looked_up(input, name), table);
        }
        let graph = rebuild(graph, &less, &mut |mut step| {
            let [input, table] = step.node.inputs.as_slice() else { return step.keep() };
            let (input, table) = (&graph.value(*input).name, &graph.value(*table).name);
            if let (Op::Embedding(_), Some(rows)) = (&step.node.op, self.0.get(&(input.clone(), table.clone()))) {
                let width = less.get(table)?.row();
                step.inputs[1] = step.builder.param(&looked_up(input, table), &[rows.len(), width])?;
            }
            step.keep()
        })?;
        Ok((graph, less))
    }
}

/// The name of the rows that an input looks up in a table.
fn looked_up(input: &str, table: &str) -> String {
    format!("{table}, rows of {input}")
}

fn shaped(e: candle_core::Error) -> Error {
    Error::option("data", e)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use candle_core::DType;

    use super::*;
    use crate::data::{References, synthetic_of};
    use crate::exec::{Executor, Parameters, Residence};
    use crate::model::Model;
    use crate::work::{Cancel, Silent, Work};

    fn run((graph, weights): Side, sample: &Batch) -> BTreeMap<String, Vec<f32>> {
        let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
        let parameters = Parameters::load(graph, weights, &Device::Cpu, DType::F32, Residence::Stored, &work).unwrap();
        let outputs = Executor::new(graph, parameters, Device::Cpu).run(&sample.inputs).unwrap();
        outputs.into_iter().map(|(name, tensor)| (name, transfer::read(&tensor).unwrap())).collect()
    }

    /// The models of the golden tests answer the same with a few rows of their tables; those whose head is the table read all of it there.
    #[test]
    fn answers_need_only_the_rows_that_are_looked_up() {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
        let (mut smaller, mut tied, mut padded) = (0, 0, 0);
        for entry in std::fs::read_dir(golden).unwrap() {
            let model = Model::open(entry.unwrap().path()).unwrap();
            let graph = model.graph().unwrap();
            let sizes = graph.bind(|name| {
                if name == "sequence" || name == "decoder_sequence" {
                    6
                } else if name == "batch" {
                    1
                } else {
                    32
                }
            });
            let sample = synthetic_of(&graph, 3, &sizes).unwrap();
            let side = (&graph, &model.weights);
            let mut samples = [sample.clone()];
            let rows = Rows::looked_up([side, side], &mut samples).unwrap();
            let (graph_of_rows, weights) = rows.of(side).unwrap();
            assert_eq!(run((&graph_of_rows, &weights), &samples[0]), run(side, &sample), "{}", model.path.display());
            let mut lacking = sample.clone();
            if lacking.inputs.remove("token_type_ids").is_some() {
                let mut samples = [lacking.clone()];
                let (graph_of_rows, weights) = Rows::looked_up([side, side], &mut samples).unwrap().of(side).unwrap();
                assert_eq!(run((&graph_of_rows, &weights), &samples[0]), run(side, &lacking), "{}", model.path.display());
            }
            for ((input, name), rows) in &rows.0 {
                let read = graph_of_rows.params().find(|(_, value)| value.name == looked_up(input, name)).unwrap().1;
                assert!(rows.len() * 2 <= model.weights.by_name[name].shape[0] && weights.by_name[&read.name].shape[0] == rows.len(), "{name}");
                smaller += 1;
                tied += usize::from(graph_of_rows.params().any(|(_, value)| value.name == *name));
                padded += usize::from(graph.nodes().iter().any(|node| matches!(&node.op, Op::Positions(op) if op.padding.is_some())));
            }
        }
        assert!(
            smaller > 5 && tied > 0 && padded > 0,
            "{smaller} tables were made smaller, {tied} of them are heads too, {padded} of models whose positions depend on padding"
        );
    }

    #[test]
    fn rows_of_a_table_are_taken_where_only_tables_read_the_input() {
        let rows = |more: &str, tokens: [i64; 2]| {
            let text = format!("input ids: int[batch, sequence]\nparam t: float[50, 4]\nx = Embedding(ids, t) -> float[batch, sequence, 4]\n{more}");
            let graph: Graph = text.parse().unwrap();
            let mut weights = Weights::default();
            let table = crate::store::Computed { values: || Ok(vec![0.0; 200]) }.weight(vec![50, 4]);
            weights.by_name.insert("t".into(), table);
            let inputs = BTreeMap::from([("ids".to_owned(), Tensor::new(&[tokens], &Device::Cpu).unwrap())]);
            let mut samples = [Batch { inputs, references: References::None, samples: 1 }];
            let rows = Rows::looked_up([(&graph, &weights); 2], &mut samples).unwrap();
            (rows.0.into_values().next(), transfer::read::<i64>(&samples[0].inputs["ids"]).unwrap())
        };
        assert_eq!(rows("output x = x\n", [40, 7]), (Some(vec![7, 40]), vec![1, 0]));
        assert_eq!(rows("output x = x\n", [40, 50]), (None, vec![40, 50]), "no such row: the executor says so");
        let tied = "logits = Linear(x, t) -> float[batch, sequence, 50]\noutput logits = logits\n";
        assert_eq!(rows(tied, [40, 7]), (Some(vec![7, 40]), vec![1, 0]));
        assert_eq!(rows("output x = x\noutput ids = ids\n", [40, 7]), (None, vec![40, 7]));
    }
}
