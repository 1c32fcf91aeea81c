//! The planned folder as runtimes read it.

use super::{Layout, Safetensors};
use crate::contract::{Defects, Planned};
use crate::error::Result;
use crate::model::Model;
use crate::run_state::RunState;
use crate::store::writer::Item;

/// The planned folder; `None` in the sparse layout, where the zeros determine which tensors become sparse.
pub(super) fn folder(format: &Safetensors, model: &Model, run: &RunState) -> Result<Option<Planned>> {
    if format.layout == Layout::Sparse {
        return Ok(None);
    }
    let items = format.items(model, run, |_, weight| Ok(weight.elements() as u64))?;
    let config = format.config(model, run, &items).render();
    let parts = |item: &Item| {
        let (format, weight) = (item.storage_format, &item.weight);
        let parts = format.parts(&item.name, weight).into_iter().enumerate();
        parts.map(|(index, part)| (part, format.shape_part(index, weight))).collect::<Vec<_>>()
    };
    // Weights of modules are in subfolders.
    let tensors = items.iter().filter(|item| model.weights.folder(&item.name).is_none()).flat_map(parts).collect();
    let files = model.auxiliary.files.iter().chain(model.auxiliary.synthesized.keys());
    let files = files.filter_map(|file| file.to_str()).map(str::to_owned).collect();
    Planned::folder(config.as_deref(), tensors, files, Defects::of_plan(model)?, model.adapter_config().as_deref()).map(Some)
}
