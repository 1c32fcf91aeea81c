//! A folder with a file of arrays for each run of the model: everything that its inputs take, whole.

use std::path::{Path, PathBuf};

use super::arrays::{LABELS, chosen, require_one_shape, tensor, transposition_hint, untaken_mask};
use super::options::{Column, Data, Task};
use super::rows::{self, Rows, require_all_read};
use super::side::DECODED_MASK;
use super::{Batch, Order, PendingBatches, Port, References, SampleSource, Target, in_batches};
use crate::error::{Error, Result};

pub(super) struct Runs {
    files: Vec<PathBuf>,
    ports: Vec<Port>,
    options: Data,
}

impl Runs {
    /// Whether a folder is one of runs: no file in it is called as an input, or as the array that an input takes.
    ///
    /// # Errors
    /// Some are, and some are called as nothing that is read.
    pub fn are_in(options: &Data, path: &Path, target: &Target) -> Result<bool> {
        if !path.is_dir() {
            return Ok(false);
        }
        let input = |name: &str| target.inputs.iter().any(|port| port.name == name) || options.inputs.iter().any(|(_, array)| array == name);
        let files = rows::files(path)?;
        let Some(array) = files.iter().find(|file| rows::ending(file) == "npy" && input(&rows::stem(file))) else { return Ok(true) };
        let labels = |name: &str| LABELS.contains(&name) || name == DECODED_MASK || matches!(&options.label_column, Some(Column::Name(label)) if label == name);
        if let Some(other) = files.iter().find(|file| !input(&rows::stem(file)) && !labels(&rows::stem(file))) {
            let [array, other] = [array, other].map(|file| file.file_name().unwrap_or_default().to_string_lossy());
            let reason = format!(
                "{} holds {array}, which is called as what an input takes, and {other}, which is not: \
                 for an array for each input, take {other} away or name it in `inputs`; for a file for each run, call {array} otherwise",
                path.display()
            );
            return Err(Error::option("data", reason));
        }
        Ok(false)
    }

    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Runs> {
        let mut files = rows::files(path)?;
        let refused = |reason: &str| Error::option("data", format!("{} holds a file for each run of the model, {reason}", path.display()));
        if files.is_empty() {
            return Err(Error::malformed(path, "holds no arrays: .npz, .npy or .safetensors, one for each run, or one .npy for each input of the model"));
        }
        if task != Task::Fidelity {
            return Err(refused("and no labels: give arrays with a row for each sample in one file, or say `task: fidelity`"));
        }
        if options.batch_size.is_some_and(|size| size > 1) {
            return Err(refused("and runs are not put together: leave `batch_size` out"));
        }
        if let Some((name, _)) =
            [("rescale", options.rescale.is_some()), ("mean", !options.mean.is_empty()), ("std", !options.std.is_empty())].iter().find(|(_, given)| *given)
        {
            return Err(refused(&format!("as it takes its inputs: leave `{name}` out")));
        }
        files.truncate(options.samples.unwrap_or(usize::MAX));
        let runs = Runs { files, ports: target.inputs.to_vec(), options: options.clone() };
        runs.files.first().map(|file| runs.batch(file)).transpose()?;
        Ok(runs)
    }

    fn batch(&self, file: &Path) -> Result<Batch> {
        let mut arrays = rows::open(file)?;
        let (mut inputs, mut used) = (std::collections::BTreeMap::new(), Vec::new());
        for port in self.ports.iter().chain(&untaken_mask(&self.ports, arrays.iter())) {
            let Some(name) = chosen(&self.options, port, &self.ports, &arrays.iter().collect::<Vec<_>>(), file)?.map(|rows| rows.name.clone()) else {
                continue;
            };
            let Some(rows) = arrays.iter_mut().find(|rows| rows.name == name) else { continue };
            fits(port, rows, file)?;
            let (bytes, dtype, shape) = (rows.whole()?, rows.dtype, rows.shape.clone());
            used.push((port.clone(), name, shape.clone()));
            inputs.insert(port.name.clone(), tensor(port, &bytes, dtype, shape, &mut |_| Ok(()))?);
        }
        require_one_shape(file, &used)?;
        require_all_read(file, &self.options, &self.ports, used.iter().map(|(_, name, _)| name))?;
        Ok(Batch { inputs, references: References::None, samples: 1 })
    }
}

/// Holds an array to the input that it goes to.
fn fits(port: &Port, rows: &Rows, file: &Path) -> Result<()> {
    let sizes = || port.shape.iter().zip(&rows.shape).all(|(want, have)| want.is_none_or(|want| want == *have));
    if port.shape.len() == rows.shape.len() && sizes() {
        return Ok(());
    }
    let reason = format!("array `{}` is {:?}, the model's input `{}` is {}", rows.name, rows.shape, port.name, port.sizes());
    Err(Error::malformed(file, format!("{reason}{}", transposition_hint(&rows.shape, &port.shape))))
}

impl SampleSource for Runs {
    fn works(&self, order: Order) -> Result<PendingBatches<'_>> {
        if order.batch.is_some_and(|batch| batch > 1) {
            return Err(Error::option("batch_size", "files of a run each are not put together: say `batch_size: 1`"));
        }
        Ok(in_batches(self.files.iter().map(Ok), 1, size_of::<PathBuf>(), order, |files| {
            let first = files.first().ok_or_else(|| Error::option("data", "a batch has no file"))?;
            self.batch(first)
        }))
    }

    fn count(&self) -> Result<usize> {
        Ok(self.files.len())
    }

    fn runs_alone(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::side::{DECODED, Side};
    use super::*;
    use crate::ir::Element;

    #[test]
    fn the_mask_of_what_a_decoder_says_is_read_also_where_models_do_not_take_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, mask: &[i64]| {
            let tensor = |values: &[i64]| Tensor::from_slice(values, (1, values.len()), &Device::Cpu).unwrap();
            let path = folder.path().join(name);
            let arrays: std::collections::HashMap<_, _> = [(DECODED.to_owned(), tensor(&[5, 6, 7])), (DECODED_MASK.to_owned(), tensor(mask))].into();
            candle_core::safetensors::save(&arrays, &path).unwrap();
            path
        };
        let port = Port { name: DECODED.to_owned(), element: Element::Int, shape: vec![None, None], number: None };
        let runs = Runs { files: Vec::new(), ports: vec![port], options: Data::default() };
        let batch = runs.batch(&file("a.safetensors", &[1, 1, 0])).unwrap();
        assert_eq!(batch.mask(Side::Said).unwrap().to_vec2::<i64>().unwrap(), [[1, 1, 0]]);
        let refused = runs.batch(&file("b.safetensors", &[1, 1])).unwrap_err().to_string();
        assert!(refused.contains("b.safetensors") && refused.contains("`decoder_attention_mask` is [1, 2]"), "{refused}");
    }
}
