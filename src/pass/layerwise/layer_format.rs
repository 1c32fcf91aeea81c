//! Formats in which the weights of layers are rounded: schemes of compressed-tensors, and blocks of GGUF
//! files.

use rayon::prelude::*;

use super::Layer;
use super::parallel::are_finite;
use super::row_scales::RowScales;
use crate::error::{Error, Result};
use crate::kernel::column_solver::{Grid, Range};
use crate::kernel::ggml::BlockType;
use crate::kernel::grid::{IntegerGrid, Levels, QuantizationParams};
use crate::pass::input_importance::importance_of;
use crate::pass::weight_quantizer::stored_scale;
use crate::store::{Codes, ExactBlocks, Granularity, QuantizationSpec, ScaleFormat, Scales, Weight};

/// Format of a layer's weight.
#[derive(Debug, Clone)]
pub(super) struct LayerFormat {
    layer: Layer,
    storage: Storage,
    /// The numbers that the codes represent.
    pub levels: Levels,
    /// Number of consecutive columns with the same scale.
    pub group: usize,
}

#[derive(Debug, Clone)]
enum Storage {
    /// A scheme, the global scale of the weight, and how scales are chosen.
    Scheme(QuantizationSpec, f32, Range),
    Blocks(ExactBlocks),
}

/// Error weights of columns, proportional to their mean squares plus a small constant.
pub(super) fn costs(squares: &[f64]) -> Vec<f32> {
    let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
    let least = if mean > 0.0 { 1e-3 } else { 1.0 };
    squares.iter().map(|square| (square / mean.max(f64::MIN_POSITIVE) + least) as f32).collect()
}

impl LayerFormat {
    /// A scheme. Scales are relative to `global_scale`, which is 1 for most schemes.
    pub fn from_scheme(layer: &Layer, spec: &QuantizationSpec, global_scale: f32, range: Range) -> Result<LayerFormat> {
        let group = match spec.granularity {
            Granularity::Channel => Some(layer.size),
            Granularity::Group(size) => Some(size),
            Granularity::Tensor | Granularity::Block(_) => None,
        };
        let levels = match spec.codes {
            Codes::Integer(bits) => Some(Levels::Integers(IntegerGrid { bits: bits.into(), symmetric: spec.symmetric })),
            Codes::Float(format) => Some(Levels::Floats(format.codec())),
            Codes::Palette(_) => None,
        };
        let what = format!("{} of {:?}", spec.codes, spec.granularity);
        LayerFormat::new(layer, Storage::Scheme(spec.clone(), global_scale, range), levels.zip(group), &what)
    }

    /// Blocks, which consist of elements of a row.
    pub fn from_blocks(layer: &Layer, exact: ExactBlocks) -> Result<LayerFormat> {
        LayerFormat::new(layer, Storage::Blocks(exact), exact.kind.levels(), &format!("blocks of {}", exact.kind.name()))
    }

    fn new(layer: &Layer, storage: Storage, levels: Option<(Levels, usize)>, what: &str) -> Result<LayerFormat> {
        match levels {
            Some((levels, group)) if !layer.input_major => Ok(LayerFormat { layer: layer.clone(), storage, levels, group }),
            _ => {
                let reason = format!("cannot be quantized with calibration samples to {what} in shape {:?}", layer.shape());
                Err(Error::tensor(&layer.weight, reason, "use `method: rtn`, or add it to `ignore`"))
            }
        }
    }

    /// Whether weights of another layer can be rounded as weights of this one.
    pub fn can_stack(&self, other: &LayerFormat) -> bool {
        match (&self.storage, &other.storage) {
            (Storage::Scheme(one, scale, _), Storage::Scheme(other, other_scale, _)) => one.scheme() == other.scheme() && scale == other_scale,
            (Storage::Blocks(one), Storage::Blocks(other)) => one.kind == other.kind,
            _ => false,
        }
    }

    /// Number of columns.
    fn size(&self) -> usize {
        self.layer.size.max(1)
    }

    /// Columns in the order in which they are stored.
    fn columns(&self) -> Vec<usize> {
        (0..self.layer.size).collect()
    }

    /// Bytes of the blocks of a row.
    fn row_bytes(&self, kind: BlockType) -> usize {
        (self.size() / kind.elements() * kind.bytes()).max(1)
    }

    /// Whether each group of columns can represent zero. Groups with a minimum and uneven levels may not.
    pub fn has_zero(&self) -> bool {
        match self.storage {
            Storage::Scheme(..) => true,
            Storage::Blocks(_) => matches!(self.levels, Levels::Integers(integers) if integers.symmetric),
        }
    }

    /// Whether scales keep their values while codes are trained: scales of one byte, because the next one
    /// changes all weights of its group by several percent, and the scales of blocks of GGUF files.
    pub fn has_fixed_scales(&self) -> bool {
        match &self.storage {
            Storage::Scheme(spec, ..) => spec.scale_format() != ScaleFormat::Float,
            Storage::Blocks(_) => true,
        }
    }

    /// Rounds exact scales to their storage dtype; `None` if the scales are those of blocks.
    pub fn store(&self) -> Option<impl Fn(f64) -> f32 + Copy + Sync + use<>> {
        match &self.storage {
            Storage::Scheme(spec, global_scale, _) => Some(stored_scale(spec, *global_scale)),
            Storage::Blocks(_) => None,
        }
    }

    /// Scales for a weight `[rows, size]`, with these error weights of the columns.
    pub fn fit(&self, values: &[f32], costs: &[f32]) -> RowScales {
        match &self.storage {
            Storage::Scheme(_, _, range) => {
                let order = self.columns();
                let mut grid = self.grid(&RowScales::default(), &order);
                grid.fit(values, costs, *range);
                RowScales { steps: grid.steps, blocks: Vec::new() }
            }
            Storage::Blocks(ExactBlocks { kind, .. }) => {
                let (size, row) = (self.size(), self.row_bytes(*kind));
                let mut blocks = vec![0; values.len() / size * row];
                blocks.par_chunks_mut(row).zip(values.par_chunks(size)).for_each(|(blocks, values)| kind.encode_row(values, costs, blocks));
                RowScales { steps: Vec::new(), blocks }
            }
        }
    }

    /// Quantization parameters of the groups of all rows.
    pub fn steps(&self, scales: &RowScales) -> Vec<QuantizationParams> {
        match &self.storage {
            Storage::Scheme(..) => scales.steps.clone(),
            Storage::Blocks(ExactBlocks { kind, .. }) => scales.blocks.par_chunks(self.row_bytes(*kind)).flat_map_iter(|row| kind.params(row)).collect(),
        }
    }

    /// The quantization grid with these scales, whose columns are processed in an order.
    pub fn grid<'o>(&self, scales: &RowScales, order: &'o [usize]) -> Grid<'o, impl Fn(f64) -> f32 + Copy + Sync + use<'o>> {
        Grid { levels: self.levels, group: self.group, steps: self.steps(scales), order, store: self.store() }
    }

    /// Rounds a weight `[rows, size]` without compensation: to nearest, or by the encoder of the type of
    /// blocks. Errors are weighted by the sums of squares of the columns.
    pub fn nearest(&self, values: &mut [f32], squares: &[f64]) -> Result<RowScales> {
        match &self.storage {
            Storage::Scheme(..) => {
                let (scales, order) = (self.fit(values, &costs(squares)), self.columns());
                self.grid(&scales, &order).round(values);
                Ok(scales)
            }
            Storage::Blocks(_) => {
                let scales = self.fit(values, &importance_of(squares).unwrap_or_default());
                self.decode(&scales, values)?;
                Ok(scales)
            }
        }
    }

    /// Stores the codes of a weight `[rows, size]` of grid values. In blocks, the weight becomes the stored
    /// values, which differ from them by the rounding of floats.
    pub fn finish<S: Fn(f64) -> f32 + Send + Sync>(&self, values: &mut [f32], grid: Grid<'_, S>, mut scales: RowScales) -> Result<RowScales> {
        if let Storage::Blocks(ExactBlocks { kind, .. }) = &self.storage {
            let codes = grid.codes_of(values);
            let rows = scales.blocks.par_chunks_mut(self.row_bytes(*kind)).zip(codes.par_chunks(self.size()));
            rows.for_each(|(blocks, codes)| kind.put_codes(codes, blocks));
            self.decode(&scales, values)?;
        } else {
            scales.steps = grid.steps;
        }
        Ok(scales)
    }

    /// Replaces a weight by the values of its blocks.
    fn decode(&self, RowScales { blocks, .. }: &RowScales, values: &mut [f32]) -> Result<()> {
        let Storage::Blocks(ExactBlocks { kind, .. }) = &self.storage else { return Ok(()) };
        values.par_chunks_mut(self.size()).zip(blocks.par_chunks(self.row_bytes(*kind))).for_each(|(values, blocks)| kind.decode(blocks, values));
        if are_finite(values) {
            return Ok(());
        }
        let reason = format!("contains values beyond the range of {} scales", kind.name());
        Err(Error::tensor(&self.layer.weight, reason, "add it to `ignore`"))
    }

    /// The quantized weight, from its values `[rows, size]` and their scales.
    pub fn weight(&self, weight: &Weight, values: &[f32], scales: RowScales) -> Result<Weight> {
        let name = &self.layer.weight;
        match &self.storage {
            Storage::Scheme(spec, global_scale, _) => {
                let order = self.columns();
                let codes = self.grid(&scales, &order).codes_of(values);
                let (stored, zero_points) = scales.steps.iter().map(|step| (step.scale * global_scale, step.zero)).unzip();
                let scales = Scales { run: self.group, scales: stored, zero_points, global_scale: *global_scale };
                weight.quantized(name, spec.clone(), codes, &scales)
            }
            Storage::Blocks(exact) => Ok(weight.with_blocks(*exact, name, scales.blocks)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{ActivationScheme, DType};

    #[test]
    fn only_layers_with_the_same_format_are_solved_together() {
        let layer = Layer { weight: "w".into(), rows: 3, size: 32, input_major: false };
        let scheme = |group: usize, global_scale: f32| {
            let (codes, granularity, activations) = (Codes::Integer(4), Granularity::Group(group), ActivationScheme::None);
            let spec = QuantizationSpec { codes, granularity, symmetric: true, scale_dtype: DType::F32, activations };
            LayerFormat::from_scheme(&layer, &spec, global_scale, Range::MinMax).unwrap()
        };
        let blocks = |kind: BlockType, file_type: Option<u64>| LayerFormat::from_blocks(&layer, ExactBlocks { kind, file_type }).unwrap();
        let (one, other) = (scheme(8, 1.0), blocks(BlockType::Q4_0, None));
        assert_eq!([scheme(8, 1.0), scheme(16, 1.0), scheme(8, 2.0), other.clone()].map(|format| one.can_stack(&format)), [true, false, false, false]);
        let found = [blocks(BlockType::Q4_0, Some(2)), blocks(BlockType::Q5_0, None), blocks(BlockType::Q4_1, None), one];
        assert_eq!(found.map(|format| other.can_stack(&format)), [true, false, false, false]);
    }

    #[test]
    fn costs_are_relative_to_the_mean() {
        assert_eq!(costs(&[1.0, 3.0, 8.0, 0.0]), [1.0 / 3.0 + 1e-3, 1.0 + 1e-3, 8.0 / 3.0 + 1e-3, 1e-3].map(|cost: f64| cost as f32));
        assert_eq!(costs(&[0.0; 2]), [1.0; 2], "without samples, all columns are equal");
    }
}
