//! Reduces embedding tables to the rows that a few samples use. The vocabulary dominates the size of
//! small models, and a few samples use a small part of it. A head that is tied to the table keeps all
//! rows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::exec::transfer;
use crate::ir::{Element, Graph, Kind, Op, rebuild};
use crate::store::{Encoding, Weights};
use crate::work::Meter;

/// Graph and weights of a model.
pub(super) type ModelRef<'m> = (&'m Graph, &'m Weights);

/// The rows that samples use, in ascending order, by the names of the input and of the table.
#[derive(Default)]
pub(super) struct EmbeddingRows(BTreeMap<(String, String), Vec<usize>>);

/// Embedding tables indexed by an input.
#[derive(PartialEq)]
struct Tables {
    names: BTreeSet<String>,
    /// Number of rows, the same in each table.
    rows: usize,
    /// Tokens below this bound are not renumbered, because positions are computed from the padding token.
    fixed: usize,
}

impl Tables {
    /// The tables that an input indexes, if its tokens can be renumbered.
    fn from_input((graph, weights): ModelRef, input: &str) -> Option<Tables> {
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

impl EmbeddingRows {
    /// Finds the rows that the samples use, if that saves at least half of a table, and replaces the
    /// tokens in the samples by indices into these rows. Tables must be indexed in the same way in both
    /// models.
    pub fn from_samples(models: [ModelRef; 2], samples: &mut [Batch]) -> Result<EmbeddingRows> {
        let mut found = EmbeddingRows::default();
        let inputs: BTreeSet<&str> = models[0].0.inputs().map(|(_, value)| value.name.as_str()).collect();
        for input in inputs {
            let [Some(tables), Some(others)] = models.map(|model| Tables::from_input(model, input)) else { continue };
            let tokens: Vec<Vec<i64>> =
                samples.iter().filter_map(|sample| sample.inputs.get(input)).map(transfer::read).collect::<candle_core::Result<_>>().map_err(shaped)?;
            // Missing inputs of a sample are filled with zeros.
            let zero = (tokens.len() < samples.len()).then_some(0);
            let used: BTreeSet<i64> = (0..tables.fixed as i64).chain(zero).chain(tokens.iter().flatten().copied()).collect();
            let is_valid = |token: &i64| usize::try_from(*token).is_ok_and(|token| token < tables.rows);
            if tables != others || used.len() > tables.rows / 2 || !used.iter().all(is_valid) {
                continue;
            }
            let used: Vec<i64> = used.into_iter().collect();
            let tensors = samples.iter_mut().filter_map(|sample| sample.inputs.get_mut(input));
            for (tensor, tokens) in tensors.zip(tokens) {
                let indices: Vec<i64> = tokens.iter().map(|token| used.partition_point(|other| other < token) as i64).collect();
                *tensor = Tensor::from_vec(indices, tensor.dims(), &Device::Cpu).map_err(shaped)?;
            }
            let rows: Vec<usize> = used.iter().map(|token| *token as usize).collect();
            found.0.extend(tables.names.into_iter().map(|name| ((input.to_owned(), name), rows.clone())));
        }
        Ok(found)
    }

    /// The model with its tables reduced to these rows.
    pub fn reduce(&self, (graph, weights): ModelRef) -> Result<(Graph, Weights)> {
        if self.0.is_empty() {
            return Ok((graph.clone(), weights.clone()));
        }
        let mut reduced = weights.clone();
        for ((input, name), rows) in &self.0 {
            let table = reduced.get(name)?.index_select(name, 0, rows, Arc::new(Meter::default()))?;
            reduced.by_name.insert(rows_name(input, name), table);
        }
        let graph = rebuild(graph, &reduced, &mut |mut step| {
            let [input, table] = step.node.inputs.as_slice() else { return step.copy() };
            let (input, table) = (&graph.value(*input).name, &graph.value(*table).name);
            if let (Op::Embedding(_), Some(rows)) = (&step.node.op, self.0.get(&(input.clone(), table.clone()))) {
                let width = reduced.get(table)?.row();
                step.inputs[1] = step.builder.param(&rows_name(input, table), &[rows.len(), width])?;
            }
            step.copy()
        })?;
        Ok((graph, reduced))
    }
}

/// Name of the reduced table of an input.
fn rows_name(input: &str, table: &str) -> String {
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
    use crate::data::{References, synthetic_with_sizes};
    use crate::exec::{Executor, Parameters, Residence};
    use crate::model::Model;
    use crate::work::{Cancel, Silent, Work};

    fn run((graph, weights): ModelRef, sample: &Batch) -> BTreeMap<String, Vec<f32>> {
        let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
        let parameters = Parameters::load(graph, weights, &Device::Cpu, DType::F32, Residence::Stored, &work).unwrap();
        let outputs = Executor::new(graph, parameters, Device::Cpu).run(&sample.inputs).unwrap();
        outputs.into_iter().map(|(name, tensor)| (name, transfer::read(&tensor).unwrap())).collect()
    }

    /// The golden models compute the same outputs with reduced tables. Heads that are tied to a table
    /// keep all rows.
    #[test]
    fn reduced_tables_do_not_change_outputs() {
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
            let sample = synthetic_with_sizes(&graph, 3, &sizes).unwrap();
            let side = (&graph, &model.weights);
            let mut samples = [sample.clone()];
            let rows = EmbeddingRows::from_samples([side, side], &mut samples).unwrap();
            let (reduced_graph, weights) = rows.reduce(side).unwrap();
            assert_eq!(run((&reduced_graph, &weights), &samples[0]), run(side, &sample), "{}", model.path.display());
            let mut lacking = sample.clone();
            if lacking.inputs.remove("token_type_ids").is_some() {
                let mut samples = [lacking.clone()];
                let (reduced_graph, weights) = EmbeddingRows::from_samples([side, side], &mut samples).unwrap().reduce(side).unwrap();
                assert_eq!(run((&reduced_graph, &weights), &samples[0]), run(side, &lacking), "{}", model.path.display());
            }
            for ((input, name), rows) in &rows.0 {
                let read = reduced_graph.params().find(|(_, value)| value.name == rows_name(input, name)).unwrap().1;
                assert!(rows.len() * 2 <= model.weights.by_name[name].shape[0] && weights.by_name[&read.name].shape[0] == rows.len(), "{name}");
                smaller += 1;
                tied += usize::from(reduced_graph.params().any(|(_, value)| value.name == *name));
                padded += usize::from(graph.nodes().iter().any(|node| matches!(&node.op, Op::Positions(op) if op.padding.is_some())));
            }
        }
        assert!(
            smaller > 5 && tied > 0 && padded > 0,
            "{smaller} tables were reduced, {tied} of them are tied to a head, {padded} are of models whose positions depend on padding"
        );
    }

    #[test]
    fn tables_are_reduced_if_only_tables_read_the_input() {
        let rows = |more: &str, tokens: [i64; 2]| {
            let text = format!("input ids: int[batch, sequence]\nparam t: float[50, 4]\nx = Embedding(ids, t) -> float[batch, sequence, 4]\n{more}");
            let graph: Graph = text.parse().unwrap();
            let mut weights = Weights::default();
            let table = crate::store::Computed { values: || Ok(vec![0.0; 200]) }.weight(vec![50, 4]);
            weights.by_name.insert("t".into(), table);
            let inputs = BTreeMap::from([("ids".to_owned(), Tensor::new(&[tokens], &Device::Cpu).unwrap())]);
            let mut samples = [Batch { inputs, references: References::None, samples: 1 }];
            let rows = EmbeddingRows::from_samples([(&graph, &weights); 2], &mut samples).unwrap();
            (rows.0.into_values().next(), transfer::read::<i64>(&samples[0].inputs["ids"]).unwrap())
        };
        assert_eq!(rows("output x = x\n", [40, 7]), (Some(vec![7, 40]), vec![1, 0]));
        assert_eq!(rows("output x = x\n", [40, 50]), (None, vec![40, 50]), "an invalid token is left for the executor to report");
        let tied = "logits = Linear(x, t) -> float[batch, sequence, 50]\noutput logits = logits\n";
        assert_eq!(rows(tied, [40, 7]), (Some(vec![7, 40]), vec![1, 0]));
        assert_eq!(rows("output x = x\noutput ids = ids\n", [40, 7]), (None, vec![40, 7]));
    }
}
