//! Folders with one array file per run of the model, which contains all inputs with their batch axis.

use std::path::{Path, PathBuf};

use super::array_shape::transposition_hint;
use super::arrays::{array_for, extra_decoder_mask, require_matching_mask, tensor};
use super::largest::BatchSizes;
use super::options::{Column, Data, Task};
use super::rows::{self, LABELS, Rows, require_all_used};
use super::sequence_role::DECODER_ATTENTION_MASK;
use super::{Batch, Order, PendingBatches, Port, References, SampleSource, Target, in_batches};
use crate::error::{Error, Result};

pub(super) struct Runs {
    files: Vec<PathBuf>,
    ports: Vec<Port>,
    options: Data,
}

impl Runs {
    /// Whether a folder contains one file per run, not one file per input: no `.npy` file has the name
    /// of an input or of an array that is mapped to one. Fails if only some files have such names.
    pub fn is_run_folder(options: &Data, path: &Path, target: &Target) -> Result<bool> {
        if !path.is_dir() {
            return Ok(false);
        }
        let is_input = |name: &str| target.inputs.iter().any(|port| port.name == name) || options.inputs.iter().any(|(_, array)| array == name);
        let files = rows::files(path)?;
        let Some(array) = files.iter().find(|file| rows::extension(file) == "npy" && is_input(&rows::stem(file))) else { return Ok(true) };
        let is_label = |name: &str| {
            LABELS.contains(&name) || name == DECODER_ATTENTION_MASK || matches!(&options.label_column, Some(Column::Name(label)) if label == name)
        };
        if let Some(other) = files.iter().find(|file| !is_input(&rows::stem(file)) && !is_label(&rows::stem(file))) {
            let [array, other] = [array, other].map(|file| file.file_name().unwrap_or_default().to_string_lossy());
            let reason = format!(
                "{} contains {array}, which has the name of an input, and {other}, which does not: \
                 for one array per input, remove {other} or map it with `inputs`; for one file per run, rename {array}",
                path.display()
            );
            return Err(Error::option("data", reason));
        }
        Ok(false)
    }

    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Runs> {
        let mut files = rows::files(path)?;
        let refused = |reason: &str| Error::option("data", format!("{} contains one file per run of the model, {reason}", path.display()));
        if files.is_empty() {
            return Err(Error::malformed(path, "contains no arrays: expected one .npz, .npy or .safetensors file per run, or one .npy per input of the model"));
        }
        if task != Task::Fidelity {
            return Err(refused("which does not support labels: use one file of arrays with one row per sample, or set `task: fidelity`"));
        }
        if options.batch_size.is_some_and(|size| size > 1) {
            return Err(refused("and runs cannot be batched: remove `batch_size`"));
        }
        if let Some((name, _)) =
            [("rescale", options.rescale.is_some()), ("mean", !options.mean.is_empty()), ("std", !options.std.is_empty())].iter().find(|(_, given)| *given)
        {
            return Err(refused(&format!("and its inputs are not preprocessed: remove `{name}`")));
        }
        files.truncate(options.samples.unwrap_or(usize::MAX));
        let runs = Runs { files, ports: target.inputs.to_vec(), options: options.clone() };
        runs.files.first().map(|file| runs.batch(file)).transpose()?;
        Ok(runs)
    }

    fn batch(&self, file: &Path) -> Result<Batch> {
        let mut arrays = rows::open(file)?;
        let (mut inputs, mut used) = (std::collections::BTreeMap::new(), Vec::new());
        for port in self.ports.iter().chain(&extra_decoder_mask(&self.ports, arrays.iter())) {
            let Some(name) = array_for(&self.options, port, &self.ports, &arrays.iter().collect::<Vec<_>>(), file)?.map(|rows| rows.name.clone()) else {
                continue;
            };
            let Some(rows) = arrays.iter_mut().find(|rows| rows.name == name) else { continue };
            require_shape(port, rows, file)?;
            let (bytes, dtype, shape) = (rows.read_all()?, rows.dtype, rows.shape.clone());
            inputs.insert(port.name.clone(), tensor((file, &name), port, (dtype, &bytes), shape.clone(), &mut |_| Ok(()))?);
            used.push((port.clone(), name, shape));
        }
        require_matching_mask(file, &used)?;
        require_all_used(file, &self.options, &self.ports, used.iter().map(|(_, name, _)| name))?;
        let is_unread = |rows: &&Rows| LABELS.contains(&rows.name.as_str()) && !used.iter().any(|(_, name, _)| *name == rows.name);
        if let Some(labels) = arrays.iter().find(is_unread).filter(|_| self.options.task.is_none()) {
            let reason = format!("{}: labels of a file for each run are not read: remove `{}`, or set `task: fidelity`", file.display(), labels.name);
            return Err(Error::option("data", reason));
        }
        Ok(Batch { inputs, references: References::None, samples: 1 })
    }
}

/// Checks the shape of an array against its input.
fn require_shape(port: &Port, rows: &Rows, file: &Path) -> Result<()> {
    let sizes = || port.shape.iter().zip(&rows.shape).all(|(want, have)| want.is_none_or(|want| want == *have));
    if port.shape.len() == rows.shape.len() && sizes() {
        return Ok(());
    }
    let reason = format!("array `{}` has the shape {:?}, but the model's input `{}` is {}", rows.name, rows.shape, port.name, port.sizes());
    Err(Error::malformed(file, format!("{reason}{}", transposition_hint(&rows.shape, &port.shape))))
}

impl SampleSource for Runs {
    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        if order.batch.is_some_and(|batch| batch > 1) {
            return Err(Error::option("batch_size", "files of single runs cannot be batched: set `batch_size: 1`"));
        }
        Ok(in_batches(self.files.iter().map(Ok), 1, size_of::<PathBuf>(), order, |files| {
            let first = files.first().ok_or_else(|| Error::option("data", "the batch has no file"))?;
            self.batch(first)
        }))
    }

    fn count(&self) -> Result<usize> {
        Ok(self.files.len())
    }

    fn is_unbatched(&self) -> bool {
        true
    }

    fn batch_sizes(&self) -> BatchSizes {
        BatchSizes::Varying { tokens: None }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::sequence_role::{DECODER_INPUT_IDS, SequenceRole};
    use super::*;
    use crate::ir::Element;

    #[test]
    fn labels_are_refused_unless_outputs_alone_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let tensor = |values: &[f32]| Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap();
        let port = Port { name: "x".to_owned(), element: Element::Float, shape: vec![Some(2)], number: None };
        for label in LABELS {
            candle_core::safetensors::save(&[("x".to_owned(), tensor(&[1.0, 2.0])), (label.to_owned(), tensor(&[1.0]))].into(), &path).unwrap();
            let runs = |options: Data| Runs { files: Vec::new(), ports: vec![port.clone()], options }.batch(&path);
            let refused = runs(Data::default()).unwrap_err().to_string();
            assert!(refused.contains(&format!("remove `{label}`, or set `task: fidelity`")), "{refused}");
            assert_eq!(runs(Data { task: Some(Task::Fidelity), ..Data::default() }).unwrap().samples, 1);
        }
    }

    #[test]
    fn decoder_masks_are_read_even_if_the_model_does_not_take_them() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, mask: &[i64]| {
            let tensor = |values: &[i64]| Tensor::from_slice(values, (1, values.len()), &Device::Cpu).unwrap();
            let path = folder.path().join(name);
            let arrays: std::collections::HashMap<_, _> =
                [(DECODER_INPUT_IDS.to_owned(), tensor(&[5, 6, 7])), (DECODER_ATTENTION_MASK.to_owned(), tensor(mask))].into();
            candle_core::safetensors::save(&arrays, &path).unwrap();
            path
        };
        let port = Port { name: DECODER_INPUT_IDS.to_owned(), element: Element::Int, shape: vec![None, None], number: None };
        let runs = Runs { files: Vec::new(), ports: vec![port], options: Data::default() };
        let batch = runs.batch(&file("a.safetensors", &[1, 1, 0])).unwrap();
        assert_eq!(batch.mask(SequenceRole::Decoder).unwrap().to_vec2::<i64>().unwrap(), [[1, 1, 0]]);
        let refused = runs.batch(&file("b.safetensors", &[1, 1])).unwrap_err().to_string();
        assert!(refused.contains("b.safetensors") && refused.contains("`decoder_attention_mask` is [1, 2]"), "{refused}");
    }
}
