//! Losses without samples: the relative squared errors of the weights, whose sum over the layers is about
//! proportional to the increase of the loss (Malinovskii et al. 2024, the linearity theorem of HIGGS,
//! <https://arxiv.org/abs/2411.17525>).

use super::Found;
use super::formats::{Formats, Unit, Written};
use crate::error::{Error, Result};
use crate::kernel::compare::{self, Difference};
use crate::model::Model;
use crate::pass::{Context, Score, Scores};
use crate::report::search::SearchLoss;
use crate::store::Weight;

/// Values that are compared at a time.
const RUN: usize = 4096;

impl Found {
    /// Sets the loss of each format of each unit to the error of its weights.
    ///
    /// # Errors
    /// If a weight cannot be rounded.
    pub(super) fn score_by_weights(&mut self, model: &Model, formats: &dyn Formats, context: &Context) -> Result<()> {
        let floats = self.formats.len() - 1;
        let rounded = (0..floats).map(|format| {
            let options: Vec<usize> = self.units.iter().map(|unit| if unit.options[format].is_some() { format } else { floats }).collect();
            formats.rounded(&self.units, &options, &Scores::default(), context)
        });
        let rounded = rounded.collect::<Result<Vec<Option<Written>>>>()?;
        let work = |unit: &Unit| {
            let loss = |(option, written): (&Option<Score>, &Option<Written>)| match (option, written) {
                (Some(_), Some(written)) => {
                    unit_error(&unit.weights, |name| weight_error(name, model.weights.get(name)?, written.model.weights.get(name)?)).map(Some)
                }
                _ => Ok(None),
            };
            let losses = unit.options.iter().zip(&rounded).map(loss).collect::<Result<Vec<Option<f64>>>>()?;
            context.work.advance(unit.parameters)?;
            Ok(losses)
        };
        let losses = context.work.run("Comparing formats", &self.units, |unit| unit.parameters, work)?;
        for (unit, losses) in self.units.iter_mut().zip(losses) {
            unit.measured = false;
            for (option, loss) in unit.options.iter_mut().zip(losses) {
                *option = option.map(|score| Score { loss: loss.unwrap_or(score.loss), ..score }).filter(|score| score.loss.is_finite());
            }
        }
        self.loss = SearchLoss::WeightError;
        Ok(())
    }
}

/// The sum of the errors of the weights of a unit. Experts of a layer share the weight of one, because a
/// token passes few of them.
fn unit_error(weights: &[String], error: impl Fn(&str) -> Result<f64>) -> Result<f64> {
    let projection = |name: &String| {
        let (layer, expert) = name.split_once(".experts.")?;
        Some((layer.to_owned(), expert.trim_start_matches(char::is_numeric).to_owned()))
    };
    let projections: Vec<Option<(String, String)>> = weights.iter().map(projection).collect();
    let mut sum = 0.0;
    for (name, own) in weights.iter().zip(&projections) {
        let experts = if own.is_some() { projections.iter().filter(|other| *other == own).count() } else { 1 };
        sum += error(name)? / experts as f64;
    }
    Ok(sum)
}

/// The squared error of a weight relative to the squares of its values. A few blocks of rows are in memory at
/// a time, unless the rows of the blocks cannot be read separately: then the original weight is in memory.
fn weight_error(name: &str, before: &Weight, after: &Weight) -> Result<f64> {
    let row = before.row().max(1);
    let (mut at, mut all, mut buffers, mut whole) = (0, Difference::default(), [Vec::new(), Vec::new()], Vec::new());
    after.visit(row, &mut |block| {
        let (from, count) = (at, block.now.elements());
        at += count;
        buffers.iter_mut().for_each(|buffer| buffer.resize(count, 0f32));
        let [original, rounded] = &mut buffers;
        if !block.now.decode(0, rounded) {
            return Err(Error::tensor(name, format!("is {}, expected F16, BF16 or F32", after.dtype), ""));
        }
        match before.rows(&(from / row..at.div_ceil(row)), 1) {
            Some((rows, _)) if rows.elements() == count => rows.floats_into(name, original)?,
            _ => {
                if whole.is_empty() {
                    whole = before.floats(name)?;
                }
                original.copy_from_slice(whole.get(from..at).ok_or_else(|| Error::tensor(name, "has another shape after rounding", "report this error"))?);
            }
        }
        original.chunks(RUN).zip(rounded.chunks(RUN)).for_each(|(before, after)| all.add(&compare::floats(before, after)));
        Ok(())
    })?;
    Ok(if all.signal > 0.0 { all.noise / all.signal } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::store::{BlockSink, Encoding, Rows, WeightSource};
    use crate::store::{DType, block_elements};

    /// Rows of a matrix, whose values follow from their position, and the largest number of values that were
    /// read at once.
    #[derive(Clone)]
    struct Matrix {
        rows: std::ops::Range<usize>,
        row: usize,
        scale: f32,
        divisible: bool,
        most: Arc<AtomicUsize>,
    }

    fn value(at: usize) -> f32 {
        ((at * 7919) % 1013) as f32 / 1013.0 - 0.4
    }

    impl WeightSource for Matrix {
        fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
            let range = self.rows.start * self.row..self.rows.end * self.row;
            for start in range.clone().step_by(block_elements(unit)) {
                let end = range.end.min(start + block_elements(unit));
                let bytes: Vec<u8> = (start..end).flat_map(|at| (self.scale * value(at)).to_le_bytes()).collect();
                self.most.fetch_max(self.rows.len() * self.row, Ordering::Relaxed);
                sink(crate::store::Block::untouched(crate::store::View::dense(DType::F32, &bytes)))?;
            }
            Ok(())
        }

        fn rows(&self, rows: &std::ops::Range<usize>, unit: usize) -> Option<Rows> {
            let source = Arc::new(Matrix { rows: rows.clone(), ..self.clone() });
            self.divisible.then(|| Rows { source, block: block_elements(unit) })
        }
    }

    /// The error is that of all values at once, but of a weight with separate rows, only blocks are read.
    #[test]
    fn weights_are_compared_by_blocks_of_rows() {
        let (rows, row) = (997, 401);
        for divisible in [true, false] {
            let most = Arc::new(AtomicUsize::new(0));
            let weight = |scale: f32, most: &Arc<AtomicUsize>| {
                let source = Matrix { rows: 0..rows, row, scale, divisible, most: most.clone() };
                Weight::new(DType::F32, vec![rows, row], Encoding::Dense, Arc::new(source))
            };
            let (before, after) = (weight(1.0, &most), weight(1.25, &Arc::default()));
            let found = weight_error("w", &before, &after).unwrap();
            assert!((found - 0.0625).abs() < 1e-6, "{found}");
            let read = most.load(Ordering::Relaxed);
            assert_eq!(read == rows * row, !divisible, "{read}");
            assert!(read >= block_elements(row));
        }
    }

    #[test]
    fn experts_of_a_layer_count_as_one() {
        let error = |weights: &[&str]| {
            let names: Vec<String> = weights.iter().map(|name| (*name).to_owned()).collect();
            unit_error(&names, |name| Ok(if name.contains("w2") { 4.0 } else { 1.0 })).unwrap()
        };
        assert_eq!(error(&["q.weight", "k.weight"]), 2.0);
        assert_eq!(error(&["a.experts.0.w1", "a.experts.1.w1"]), 1.0);
        assert_eq!(error(&["a.experts.0.w1", "a.experts.10.w1", "a.experts.0.w2", "a.experts.10.w2", "router.weight"]), 6.0);
    }
}
