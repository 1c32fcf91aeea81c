//! Types of the matrices of a GGUF file.

use std::collections::BTreeMap;

use super::formats::{Formats, Unit, Writing, Written, retain};
use super::matrices::{Matrix, matrices};
use crate::error::{Error, Result};
use crate::export::{Export, FileType, Gguf, TensorType};
use crate::model::{Model, is_linear};
use crate::pass::{self, Context, Method, Quantize, SchemeRule, Score, Scores, Step, WeightFormat};
use crate::run_state::InputImportance;
use crate::store::Pattern;
use crate::store::gguf::{ALIGNMENT, BlockScales, Kind};

/// Types in ascending order of bits, with llama.cpp's file type of files in which most matrices have the
/// type. Q4_0 is left out: IQ4_NL has the same size and a lower error.
const TYPES: [(TensorType, FileType); 12] = [
    (TensorType::Q2_K, FileType::Q2_K),
    (TensorType::Q3_K, FileType::Q3_K_S),
    (TensorType::IQ4_XS, FileType::IQ4_XS),
    (TensorType::IQ4_NL, FileType::IQ4_NL),
    (TensorType::Q4_K, FileType::Q4_K_S),
    (TensorType::Q4_1, FileType::Q4_1),
    (TensorType::Q5_0, FileType::Q5_0),
    (TensorType::Q5_K, FileType::Q5_K_S),
    (TensorType::Q5_1, FileType::Q5_1),
    (TensorType::Q6_K, FileType::Q6_K),
    (TensorType::Q8_0, FileType::Q8_0),
    (TensorType::F16, FileType::F16),
];
/// Mixtures of llama.cpp, for comparison.
const REFERENCES: [FileType; 8] = {
    use FileType::{IQ4_XS, Q2_K, Q3_K_M, Q4_K_M, Q4_K_S, Q5_K_M, Q6_K, Q8_0};
    [Q2_K, Q3_K_M, IQ4_XS, Q4_K_S, Q4_K_M, Q5_K_M, Q6_K, Q8_0]
};

/// The embedding, and the head if it is stored separately. The backward pass has no scores for them, nor for
/// experts that are fused in one weight.
const TABLES: [&str; 2] = ["token_embd.weight", "output.weight"];

/// The matrices of a model.
pub(super) struct Blocks {
    model: Model,
    /// The types; the last one is floats.
    types: Vec<(TensorType, FileType)>,
    formats: Vec<WeightFormat>,
    matrices: Vec<Matrix>,
    /// Size of the file with matrices in F16.
    bytes: u64,
}

impl Blocks {
    /// The matrices of a model.
    ///
    /// # Errors
    /// If GGUF files cannot represent the model.
    pub fn new(model: &Model) -> Result<Blocks> {
        let (matrices, bytes) = matrices(&Gguf { file_type: FileType::F16, ..Gguf::default() }, model)?;
        Ok(Blocks { model: model.clone(), types: TYPES.to_vec(), formats: TYPES.iter().filter_map(block_format).collect(), matrices, bytes })
    }

    /// The type in the file of an option.
    fn kind(&self, option: usize) -> Kind {
        self.types[option.min(self.floats())].0.kind()
    }

    /// The option of weights that are not quantized.
    fn floats(&self) -> usize {
        self.types.len() - 1
    }

    /// The matrices of a unit.
    fn matrices_of<'s>(&'s self, unit: &'s Unit) -> impl Iterator<Item = &'s Matrix> {
        self.matrices.iter().filter(|matrix| matrix.weights.first().is_some_and(|name| unit.weights.contains(name)))
    }

    /// The weights that are not floats, with their options and units. Tied names are included.
    fn by_weight<'s>(&self, units: &'s [Unit], options: &[usize]) -> Vec<(&'s str, usize, &'s Unit)> {
        let tied = self.model.tied_names();
        let mut found = Vec::new();
        for (unit, option) in units.iter().zip(options).filter(|(_, option)| **option != self.floats()) {
            for name in &unit.weights {
                let aliases = tied.iter().filter(|(_, original)| original == name).map(|(alias, _)| *alias);
                found.extend(aliases.chain([name.as_str()]).map(|name| (name, *option, unit)));
            }
        }
        found
    }

    /// The pass that quantizes the matrices with scores to their types by a method; `None` if there are none.
    fn pass(&self, units: &[Unit], options: &[usize], method: Method) -> Result<Option<Quantize>> {
        let mut targets: Vec<Vec<Pattern>> = vec![Vec::new(); self.types.len()];
        let mut ignore: Vec<Pattern> = Vec::new();
        for (unit, option) in units.iter().zip(options) {
            let is_quantized = *option != self.floats() && !unit.measured;
            for name in &unit.weights {
                let pattern = name.parse().map_err(|e| Error::option("auto", e))?;
                let patterns = if is_quantized { &mut targets[*option] } else { &mut ignore };
                patterns.push(pattern);
            }
        }
        let mut rules = Vec::new();
        for (targets, (tensor_type, _)) in targets.into_iter().zip(&self.types).filter(|(targets, _)| !targets.is_empty()) {
            let scheme = format!("{tensor_type:?}").parse().map_err(|e| Error::option("auto", e))?;
            rules.push(SchemeRule { targets, scheme, group_size: None });
        }
        // Patterns of tables that are not linear weights would be errors.
        ignore.retain(|pattern| self.model.weights.by_name.iter().any(|(name, weight)| pattern.matches(name) && is_linear(name, weight)));
        let Some(scheme) = rules.first().map(|rule| rule.scheme) else { return Ok(None) };
        Ok(Some(Quantize { scheme, rules, method, ignore, ..Quantize::default() }))
    }

    /// The types of all units of a file in one of llama.cpp's mixtures; `None` if one is not in the table.
    fn mixture(&self, file_type: FileType, units: &[Unit]) -> Result<Option<Vec<usize>>> {
        let importance = if file_type == FileType::Q8_0 { InputImportance::None } else { InputImportance::Activation };
        let (all, _) = matrices(&Gguf { file_type, importance, ..Gguf::default() }, &self.model)?;
        let kinds: BTreeMap<&str, Kind> = all.iter().map(|matrix| (matrix.tensor.as_str(), matrix.kind)).collect();
        let option = |unit: &Unit| {
            let mut own = self.matrices_of(unit).map(|matrix| kinds.get(matrix.tensor.as_str()));
            let kind = own.next().flatten()?;
            own.all(|other| other == Some(kind)).then(|| self.types.iter().position(|(tensor_type, _)| tensor_type.kind() == *kind))?
        };
        Ok(units.iter().map(option).collect())
    }
}

/// Name of the unit of a matrix without scores: the name of its tensor in all blocks. The tensors of a fused
/// projection of all experts come from one weight.
fn unit_of(tensor: &str) -> String {
    let mut parts: Vec<&str> = tensor.split('.').collect();
    if let ["blk", layer, ..] = parts.as_mut_slice() {
        *layer = "*";
    }
    parts.join(".").replace("ffn_gate_exps", "ffn_up_exps")
}

/// The format of a type with blocks.
fn block_format((tensor_type, _): &(TensorType, FileType)) -> Option<WeightFormat> {
    if let Kind::Blocks(kind) = tensor_type.kind() { Some(WeightFormat::Blocks(kind)) } else { None }
}

impl Matrix {
    /// Bytes in a file with padding; `None` if the rows are not a multiple of the block size.
    fn bytes(&self, kind: Kind) -> Option<u64> {
        kind.byte_count(&self.shape).map(|bytes| bytes.next_multiple_of(ALIGNMENT))
    }
}

impl Formats for Blocks {
    fn names(&self) -> Vec<String> {
        self.types.iter().map(|(tensor_type, _)| format!("{tensor_type:?}")).collect()
    }

    fn retain(&mut self, kept: &[bool]) {
        retain(&mut self.types, kept);
        self.formats = self.types.iter().filter_map(block_format).collect();
    }

    fn scores(&self, context: &Context) -> Result<Scores> {
        pass::scores(&self.formats, &self.model, context)
    }

    fn sizes(&self) -> Result<Option<Scores>> {
        pass::sizes(&self.formats, &self.model).map(Some)
    }

    fn units(&self, scores: &Scores) -> Vec<Unit> {
        let floats = Some(Score { loss: 0.0, bytes: 0 });
        let mut units: Vec<Unit> = Vec::new();
        for matrix in &self.matrices {
            let scored = matrix.weights.iter().all(|name| scores.by_weight.contains_key(name));
            let name = if scored || TABLES.contains(&matrix.tensor.as_str()) { matrix.tensor.clone() } else { unit_of(&matrix.tensor) };
            let at = units.iter().position(|unit| unit.name == name).unwrap_or(units.len());
            if at == units.len() {
                units.push(Unit { measured: !scored, ..Unit::new(name, self.types.len()) });
            }
            let unit = &mut units[at];
            for name in matrix.weights.iter().filter(|name| !unit.weights.contains(name)).collect::<Vec<_>>() {
                let Some(weight) = self.model.weights.by_name.get(name) else { continue };
                match scores.by_weight.get(name).filter(|_| scored) {
                    Some(scores) => unit.add(name, weight, scores.iter().chain([&floats]).copied()),
                    None => unit.add(name, weight, std::iter::repeat(floats)),
                }
            }
        }
        for unit in &mut units {
            // Experts of one tensor have no padding in between.
            let stored = |option: usize| self.matrices_of(unit).map(|matrix| matrix.bytes(self.kind(option))).sum::<Option<u64>>();
            let bytes: Vec<Option<u64>> = (0..unit.options.len()).map(stored).collect();
            let with_bytes = |(score, bytes): (&mut Option<Score>, Option<u64>)| *score = score.zip(bytes).map(|(score, bytes)| Score { bytes, ..score });
            unit.options.iter_mut().zip(bytes).for_each(with_bytes);
        }
        units
    }

    fn other_bytes(&self, units: &[Unit]) -> u64 {
        let floats: u64 = units.iter().filter_map(|unit| unit.options.last().copied().flatten()).map(|score| score.bytes).sum();
        self.bytes - floats
    }

    fn references(&self, units: &[Unit]) -> Result<Vec<(String, Vec<usize>)>> {
        let mut found = Vec::new();
        for file_type in REFERENCES {
            found.extend(self.mixture(file_type, units)?.map(|options| (format!("{file_type:?}"), options)));
        }
        Ok(found)
    }

    fn rounded(&self, units: &[Unit], options: &[usize], scores: &Scores, _context: &Context) -> Result<Option<Written>> {
        if options.iter().all(|option| *option == self.floats()) {
            return Ok(None);
        }
        let mut model = self.model.clone();
        for (name, option, unit) in self.by_weight(units, options) {
            let Some(weight) = model.weights.by_name.get_mut(name) else { continue };
            let importance = scores.importance.get(name).filter(|_| !unit.measured).cloned();
            let scales = importance.map_or(BlockScales::Plain, BlockScales::Weighted);
            *weight = weight.dense(name).in_gguf(self.kind(option), name, scales).0;
        }
        Ok(Some(Written { model, bytes: None }))
    }

    fn float_exports(&self) -> Vec<Export> {
        vec![Gguf { file_type: FileType::F16, ..Gguf::default() }.into()]
    }

    /// The matrices that no pass has quantized, such as the embedding table, are measured without importance.
    fn stored(&self, mut model: Model, units: &[Unit], options: &[usize]) -> Model {
        for (name, option, _) in self.by_weight(units, options) {
            if let Some(weight) = model.weights.by_name.get_mut(name).filter(|weight| weight.exact_blocks().is_none()) {
                *weight = weight.dense(name).in_gguf(self.kind(option), name, BlockScales::Plain).0;
            }
        }
        model
    }

    /// All matrices are listed, so that the mixture of the file type affects none of them. Scales are
    /// searched by the importance of the columns, or by a pass with the method.
    fn writing(&self, units: &[Unit], options: &[usize], method: Option<Method>) -> Result<Option<Writing>> {
        if options.iter().all(|option| *option == self.floats()) {
            return Ok(None);
        }
        let option = |matrix: &Matrix| {
            let at = units.iter().position(|unit| matrix.weights.first().is_some_and(|name| unit.weights.contains(name)));
            at.and_then(|at| options.get(at)).copied().unwrap_or(self.floats())
        };
        let mut types = Vec::new();
        let mut parameters = vec![0usize; self.types.len()];
        for matrix in &self.matrices {
            let option = option(matrix);
            parameters[option] += matrix.shape.iter().product::<usize>();
            let pattern = matrix.tensor.parse().map_err(|e| Error::option("auto", e))?;
            types.push((pattern, self.types[option].0));
        }
        let most = (0..self.types.len()).max_by_key(|option| parameters[*option]).unwrap_or(self.floats());
        let file_type = self.types[most].1;
        // Rounding to nearest is that of the export.
        let method = method.filter(|method| *method != Method::Rtn);
        let passes = method.map(|method| self.pass(units, options, method)).transpose()?.flatten();
        let passes = passes.into_iter().map(Step::from).collect();
        Ok(Some(Writing { passes, exports: vec![Gguf { file_type, types, ..Gguf::default() }.into()] }))
    }
}
