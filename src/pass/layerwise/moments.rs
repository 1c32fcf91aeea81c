//! Statistics of the inputs of layers.

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::held_out::{HeldOut, Split};
use super::parallel::are_finite;
use super::ranks::Ranks;
use crate::calibration::select_rows;
use crate::error::Result;
use crate::exec::transfer::{self, Cause};
use crate::exec::{floats_on_host, read};
use crate::gpu;
use crate::kernel::{columns, gram};
use crate::pass::calibrate::{nonzero_rows, not_finite, tensor_error};

/// Statistics to collect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MomentsRequest {
    /// Whether to sum products of all pairs of features.
    pub products: bool,
    /// Number of raw rows of each batch to store.
    pub rows: usize,
    /// Whether to compare with the inputs of the same layers in the original model.
    pub original: bool,
    /// Whether to hold out rows.
    pub held_out: bool,
    /// Whether sums of products on a GPU stay there. Otherwise they are copied to the host.
    pub on_device: bool,
}

/// Sums of products on a device.
#[derive(Debug, Clone)]
pub(super) struct DeviceSums {
    /// `XᵀX` `[size, size]`.
    pub products: Tensor,
    /// `(X₀ - X)ᵀX` `[size, size]`; `None` if the rows are equal.
    pub differences: Option<Tensor>,
}

/// Sums over the input rows of layers.
#[derive(Clone)]
pub(super) struct Moments {
    /// Number of features.
    pub size: usize,
    /// Number of rows.
    pub count: usize,
    /// Number of rows that are not all zeros. Tokens that are not routed to an expert have zero rows.
    pub nonzero: usize,
    /// The upper triangle of `XᵀX`; empty if it is not requested.
    pub products: Vec<f32>,
    /// `(X₀ - X)ᵀX` with the rows `X₀` of the original model; empty if they are equal or not requested.
    pub differences: Vec<f32>,
    /// Sum of squares of each feature.
    pub squares: Vec<f64>,
    /// Sum of magnitudes of each feature.
    pub magnitudes: Vec<f64>,
    /// Largest magnitude of each feature.
    pub largest: Vec<f32>,
    /// Raw rows, spread over the samples.
    pub rows: Vec<f32>,
    /// Folds of rows that are not part of the other statistics until they are
    /// [merged](Moments::merge).
    pub folds: Vec<HeldOut>,
    /// Rows to hold out; by default, those of some of the samples.
    pub split: Option<Split>,
    pub request: MomentsRequest,
    /// Index of the next batch.
    pub batches: usize,
    /// Products and differences of rows on a GPU, which are not part of the fields above until they are
    /// [downloaded](Moments::download).
    on_device: [Option<Tensor>; 2],
    /// The device on which they stay, if any.
    device: Option<Device>,
}

/// Whether statistics are computed with tensors: on a GPU, and in tests also on the CPU.
fn uses_tensors(device: &Device) -> bool {
    !device.is_cpu() || transfer::is_strict()
}

impl Moments {
    /// Creates empty statistics.
    pub fn new(size: usize, request: MomentsRequest) -> Moments {
        Moments {
            size,
            count: 0,
            nonzero: 0,
            products: if request.products { vec![0.0; size * size] } else { Vec::new() },
            differences: Vec::new(),
            squares: vec![0.0; size],
            magnitudes: vec![0.0; size],
            largest: vec![0.0; size],
            rows: Vec::new(),
            folds: Vec::new(),
            split: None,
            request,
            batches: 0,
            on_device: [None, None],
            device: None,
        }
    }

    /// Adds rows `[n, size]`. Returns an error if a row is not finite.
    pub fn add(&mut self, name: &str, rows: &Tensor) -> Result<()> {
        let host = !uses_tensors(rows.device());
        self.choose_device(rows.device());
        if self.request.products && !host {
            accumulate(&mut self.on_device[0], rows, rows).map_err(tensor_error)?;
        }
        if self.device.is_some() && self.request.rows == 0 {
            return if self.add_column_statistics(rows).map_err(tensor_error)? { Ok(()) } else { Err(not_finite(name)) };
        }
        let added = floats_on_host(rows, Cause::Statistics).and_then(|rows| read(&rows, |values| Ok(self.add_rows(values, host)))).map_err(tensor_error)?;
        added.ok_or_else(|| not_finite(name))
    }

    /// Sums stay on the device of the rows if that is requested.
    fn choose_device(&mut self, device: &Device) {
        if self.device.is_none() && self.request.on_device && self.request.products && uses_tensors(device) {
            self.device = Some(device.clone());
            self.products = Vec::new();
        }
    }

    /// Adds rows on a device to all statistics except products. Returns whether all are finite.
    fn add_column_statistics(&mut self, rows: &Tensor) -> candle_core::Result<bool> {
        let count = rows.dim(0)?;
        self.batches += 1;
        if count == 0 {
            return Ok(true);
        }
        let magnitudes = rows.abs()?;
        let parts = [column_sums(&magnitudes)?, column_sums(&rows.sqr()?)?, magnitudes.max(0)?, magnitudes.sum(1)?];
        let values = transfer::values::<f32>(&Tensor::cat(&parts, 0)?, Cause::Statistics)?;
        let (columns, rows) = values.split_at(3 * self.size);
        for (at, sum) in columns.iter().take(self.size).enumerate() {
            self.magnitudes[at] += f64::from(*sum);
            self.squares[at] += f64::from(columns[self.size + at]);
            self.largest[at] = self.largest[at].max(columns[2 * self.size + at]);
        }
        self.count += count;
        self.nonzero += rows.iter().filter(|sum| **sum != 0.0).count();
        Ok(self.magnitudes.iter().all(|sum| sum.is_finite()))
    }

    /// Adds some rows of `original` `[m, size]`, the inputs in the original model, by index. They correspond
    /// to the rows `[n, size]` passed to [`add`](Moments::add). Returns an error if a row is not finite.
    pub fn add_original(&mut self, name: &str, original: &Tensor, selected: Vec<u32>, rows: &Tensor) -> Result<()> {
        // A row of zeros is a token that the original model does not route to this expert, so that there
        // is no target output.
        self.choose_device(rows.device());
        if !uses_tensors(rows.device()) {
            let (original, rows) = (floats_on_host(original, Cause::Statistics), floats_on_host(rows, Cause::Statistics));
            let mut add = |original: &[f32], rows: &[f32]| Ok(self.add_differences(&differences(original, &selected, rows, self.size), rows));
            let finite = original.and_then(|original| rows.and_then(|rows| read(&original, |original| read(&rows, |rows| add(original, rows)))));
            return if finite.map_err(tensor_error)? { Ok(()) } else { Err(not_finite(name)) };
        }
        let original = select_rows(original, selected).map_err(tensor_error)?;
        let differences = (&original - rows).and_then(|differences| differences.broadcast_mul(&nonzero_rows(&original)?)).map_err(tensor_error)?;
        accumulate(&mut self.on_device[1], &differences, rows).map_err(tensor_error)
    }

    /// Adds the statistics of the other ranks in the order of ranks, so that all of them have the same ones.
    /// `device` is that of the rows.
    pub fn reduce(&mut self, ranks: &Ranks, device: &Device) -> Result<()> {
        if ranks.count() == 1 {
            return Ok(());
        }
        self.choose_device(device);
        let has = |is_present: bool| u64::from(is_present);
        let own = [self.count as u64, self.nonzero as u64, self.folds.len() as u64, has(self.on_device[0].is_some())];
        let own = [&own[..], &[has(self.on_device[1].is_some() || !self.differences.is_empty())]].concat();
        let counts = ranks.gather(&own, u64::to_le_bytes, u64::from_le_bytes)?;
        let column = |at: usize| counts.iter().filter_map(move |counts| counts.get(at).map(|count| *count as usize));
        (self.count, self.nonzero) = (column(0).sum(), column(1).sum());
        let own = [&self.magnitudes[..], &self.squares].concat();
        let (mut sums, size) = (vec![0.0; own.len()], self.size);
        for columns in ranks.gather(&own, f64::to_le_bytes, f64::from_le_bytes)? {
            sums.iter_mut().zip(columns).for_each(|(sum, column)| *sum += column);
        }
        self.squares = sums.split_off(size);
        self.magnitudes = sums;
        for columns in ranks.gather(&self.largest, f32::to_le_bytes, f32::from_le_bytes)? {
            self.largest.iter_mut().zip(columns).for_each(|(largest, column)| *largest = largest.max(column));
        }
        if self.request.rows > 0 {
            self.rows = ranks.gather(&self.rows, f32::to_le_bytes, f32::from_le_bytes)?.concat();
        }
        self.reduce_products(ranks, device, [3, 4].map(|at| column(at).any(|present| present > 0)))?;
        let folds = std::mem::take(&mut self.folds);
        for fold in 0..column(2).max().unwrap_or(0) {
            let own = folds.get(fold);
            let all = |rows: &[f32]| ranks.gather(rows, f32::to_le_bytes, f32::from_le_bytes);
            let rows = all(own.map_or(&[][..], |own| own.rows.as_slice()))?;
            let original = if self.request.original { all(own.map_or(&[][..], |own| own.original.as_slice()))? } else { Vec::new() };
            let mut merged = HeldOut::default();
            for (rank, rows) in rows.iter().enumerate() {
                merged.add(size, rows, original.get(rank).map(Vec::as_slice));
            }
            self.folds.push(merged);
        }
        Ok(())
    }

    /// Sums the products and the differences over all ranks, if at least one rank has them.
    fn reduce_products(&mut self, ranks: &Ranks, device: &Device, [products, differences]: [bool; 2]) -> Result<()> {
        if uses_tensors(device) {
            let zeros = || Tensor::zeros((self.size, self.size), DType::F32, device);
            for (sums, is_present) in self.on_device.iter_mut().zip([products, differences]) {
                if is_present {
                    let own = sums.take().map_or_else(zeros, Ok).map_err(tensor_error)?;
                    *sums = Some(ranks.sum_of(&own)?);
                }
            }
            return Ok(());
        }
        ranks.sum(&mut self.products)?;
        if differences {
            self.differences.resize(self.size * self.size, 0.0);
            ranks.sum(&mut self.differences)?;
        }
        Ok(())
    }

    /// Completes the statistics after all rows were added: sums that do not stay on their device are added to
    /// those on the host, and held-out rows are copied to the device. Returns an error if a sum is not
    /// finite.
    pub fn finish(&mut self, name: &str) -> Result<()> {
        let Some(device) = &self.device else { return self.download(name) };
        for sums in &mut self.on_device {
            let Some(tensor) = sums else { continue };
            let magnitudes = tensor.abs().and_then(|magnitudes| transfer::values::<f32>(&magnitudes.sum(1)?, Cause::Statistics)).map_err(tensor_error)?;
            if !magnitudes.iter().all(|sum| sum.is_finite()) {
                return Err(not_finite(name));
            }
            if magnitudes.iter().all(|sum| *sum == 0.0) {
                *sums = None;
            }
        }
        self.folds.iter_mut().try_for_each(|fold| fold.upload(self.size, device)).map_err(tensor_error)
    }

    /// Whether the sums stay on a device.
    pub fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// The sums on their device; `None` if they are on the host.
    pub fn device_sums(&self) -> Result<Option<DeviceSums>> {
        let Some(device) = &self.device else { return Ok(None) };
        let [products, differences] = self.on_device.clone();
        let zeros = || Tensor::zeros((self.size, self.size), DType::F32, device);
        Ok(Some(DeviceSums { products: products.map_or_else(zeros, Ok).map_err(tensor_error)?, differences }))
    }

    /// Discards the differences between the inputs of the original model and these.
    pub fn drop_differences(&mut self) {
        self.differences = Vec::new();
        self.on_device[1] = None;
    }

    /// Adds the sums on a GPU to those on the host. Returns an error if a sum is not finite.
    pub fn download(&mut self, name: &str) -> Result<()> {
        let [products, differences] = std::mem::take(&mut self.on_device);
        if self.device.take().is_some() {
            self.products.resize(self.size * self.size, 0.0);
        }
        for (sums, added) in [(&mut self.products, products), (&mut self.differences, differences)] {
            let Some(added) = added else { continue };
            let added = transfer::values::<f32>(&added, Cause::Statistics).map_err(tensor_error)?;
            if !are_finite(&added) {
                return Err(not_finite(name));
            }
            sums.resize(added.len(), 0.0);
            sums.iter_mut().zip(added).for_each(|(sum, added)| *sum += added);
        }
        Ok(())
    }

    /// Adds rows on the host. Returns `None` if a row is not finite.
    fn add_rows(&mut self, values: &[f32], products: bool) -> Option<()> {
        let count = values.len() / self.size.max(1);
        columns::magnitudes(values, self.size, &mut self.magnitudes, &mut self.squares, &mut self.largest);
        if !self.magnitudes.iter().all(|sum| sum.is_finite()) {
            return None;
        }
        if self.request.products && products {
            gram::add(values, self.size, &mut self.products);
        }
        // A row of zeros is padding, or a token that is not routed to an expert.
        let nonzero: Vec<&[f32]> = values.chunks_exact(self.size.max(1)).filter(|row| row.iter().any(|value| *value != 0.0)).collect();
        let stored = self.request.rows.min(nonzero.len());
        for part in 0..stored {
            // Select different rows of each batch.
            self.rows.extend_from_slice(nonzero[(part * nonzero.len() / stored + self.batches * 7919) % nonzero.len()]);
        }
        self.count += count;
        self.nonzero += nonzero.len();
        self.batches += 1;
        Some(())
    }

    /// Holds out rows `[n, size]`, with those of the original model if they are requested.
    pub fn hold_out(&mut self, name: &str, fold: usize, rows: &Tensor, original: Option<&Tensor>) -> Result<()> {
        self.choose_device(rows.device());
        let host = |tensor: &Tensor| floats_on_host(tensor, Cause::Statistics);
        let (rows, original) = (host(rows).map_err(tensor_error)?, original.map(host).transpose().map_err(tensor_error)?);
        self.folds.resize_with(self.folds.len().max(fold + 1), HeldOut::default);
        let mut add = |rows: &[f32], original: Option<&[f32]>| {
            let finite = are_finite(rows) && original.is_none_or(are_finite);
            if finite {
                self.folds[fold].add(self.size, rows, original);
            }
            Ok(finite)
        };
        let finite = read(&rows, |rows| match &original {
            Some(original) => read(original, |original| add(rows, Some(original))),
            None => add(rows, None),
        });
        if finite.map_err(tensor_error)? { Ok(()) } else { Err(not_finite(name)) }
    }

    /// Number of rows that are not all zeros, including held-out rows.
    pub fn tokens(&self) -> usize {
        self.nonzero + self.held_out().iter().sum::<usize>()
    }

    /// Number of held-out rows in each fold.
    fn held_out(&self) -> [usize; 2] {
        [0, 1].map(|fold| self.folds.get(fold).map_or(0, |fold| fold.rows.len() / self.size.max(1)))
    }

    /// Discards the statistics if too few rows were held out, to collect them again with another split.
    /// Returns whether it did.
    pub fn hold_out_more(&mut self) -> bool {
        let split = self.split.and_then(|split| split.with_more(self.held_out(), self.tokens()));
        if split.is_some() {
            *self = Moments { split, ..Moments::new(self.size, self.request) };
        }
        split.is_some()
    }

    /// The statistics of the rows outside of one of several folds. `None` with only one fold, whose rows are
    /// not included anyway.
    pub fn without(&self, fold: usize) -> Result<Option<Moments>> {
        if self.folds.len() < 2 {
            return Ok(None);
        }
        let mut moments = self.clone();
        moments.folds.clear();
        self.folds.iter().enumerate().filter(|(index, _)| *index != fold).try_for_each(|(_, rows)| moments.add_fold(rows)).map_err(tensor_error)?;
        Ok(Some(moments))
    }

    /// Adds the held-out rows to the other statistics.
    pub fn merge(&mut self) -> Result<()> {
        std::mem::take(&mut self.folds).iter().try_for_each(|fold| self.add_fold(fold)).map_err(tensor_error)
    }

    fn add_fold(&mut self, fold: &HeldOut) -> candle_core::Result<()> {
        // The rows were checked when they were added.
        let _finite = self.add_rows(&fold.rows, self.device.is_none());
        if let Some([rows, original]) = &fold.on_device {
            add_product(&mut self.on_device[0], rows, rows)?;
            if fold.is_changed() {
                add_product(&mut self.on_device[1], &(original - rows)?, rows)?;
            }
        } else {
            let differences: Vec<f32> = fold.original.iter().zip(&fold.rows).map(|(original, row)| original - row).collect();
            let _finite = self.add_differences(&differences, &fold.rows);
        }
        Ok(())
    }

    /// Adds differences `[n, size]` between rows of the original model and these rows. Returns whether all
    /// are finite.
    fn add_differences(&mut self, differences: &[f32], rows: &[f32]) -> bool {
        if differences.iter().any(|x| *x != 0.0) {
            self.differences.resize(self.size * self.size, 0.0);
            gram::add_cross(differences, rows, self.size, &mut self.differences);
        }
        differences.iter().all(|x| x.is_finite())
    }

    /// Mean magnitude of each feature.
    pub fn mean_magnitudes(&self) -> Vec<f64> {
        self.magnitudes.iter().map(|sum| sum / self.count.max(1) as f64).collect()
    }
}

/// Sums of the columns of a matrix in f32.
pub(super) fn column_sums(rows: &Tensor) -> candle_core::Result<Tensor> {
    match gpu::column_sums(rows, rows.dim(1)?)? {
        Some(sums) => Ok(sums),
        None => rows.sum(0),
    }
}

/// Adds `leftᵀ right` to a sum on their device, in place on a GPU. No other statistics share the sum yet.
fn accumulate(sum: &mut Option<Tensor>, left: &Tensor, right: &Tensor) -> candle_core::Result<()> {
    match sum {
        Some(sum) if gpu::add_product(sum, &left.t()?, right, 1.0)?.is_some() => Ok(()),
        _ => add_product(sum, left, right),
    }
}

/// Adds `leftᵀ right` to a sum on their device.
fn add_product(sum: &mut Option<Tensor>, left: &Tensor, right: &Tensor) -> candle_core::Result<()> {
    let product = left.t()?.contiguous()?.matmul(right)?;
    *sum = Some(match sum.take() {
        Some(sum) => (sum + product)?,
        None => product,
    });
    Ok(())
}

/// Differences `[n, size]` between selected rows of the original model and other rows; zero where the
/// original row consists of zeros.
fn differences(original: &[f32], selected: &[u32], rows: &[f32], size: usize) -> Vec<f32> {
    let mut differences = vec![0f32; rows.len()];
    let lines = differences.par_chunks_exact_mut(size.max(1)).zip(rows.par_chunks_exact(size.max(1)));
    lines.zip(selected).for_each(|((differences, row), index)| {
        let original = &original[*index as usize * size..][..size];
        if original.iter().any(|x| *x != 0.0) {
            differences.iter_mut().zip(original).zip(row).for_each(|((out, original), x)| *out = original - x);
        }
    });
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens that the original model does not route to an expert have no target, and other values that are
    /// not finite are found.
    #[test]
    fn rows_of_zeros_in_the_original_model_do_not_count() {
        let tensor = |values: &[f32]| Tensor::from_slice(values, (values.len() / 2, 2), &Device::Cpu).unwrap();
        let original = tensor(&[9.0, 9.0, 1.0, 2.0, 0.0, 0.0, 4.0, f32::NAN]);
        let add = |selected: &[u32]| {
            let mut moments = Moments::new(2, MomentsRequest { products: true, original: true, ..MomentsRequest::default() });
            moments.add_original("x", &original, selected.to_vec(), &tensor(&[0.5, 1.0, 3.0, 5.0])).map(|()| moments.differences)
        };
        assert_eq!(add(&[1, 2]).unwrap(), [0.25, 0.5, 0.5, 1.0]);
        assert!(add(&[2, 3]).unwrap_err().to_string().contains("is not finite"));
    }

    #[test]
    fn merged_rows_count_like_all_others() {
        let request = MomentsRequest { products: true, original: true, held_out: true, ..MomentsRequest::default() };
        let tensor = |offset: f32| {
            let values: Vec<f32> = (0..24).map(|i| (i * 7 % 11) as f32 / 4.0 - 1.2 + offset).collect();
            Tensor::from_vec(values, (8, 3), &Device::Cpu).unwrap()
        };
        let (rows, original) = (tensor(0.0), tensor(0.3));
        let part = |tensor: &Tensor, first: usize| tensor.narrow(0, first, 2).unwrap();
        let moments = |added: &[usize], held_out: &[usize]| {
            let mut moments = Moments::new(3, request);
            for first in added {
                moments.add("x", &part(&rows, *first)).unwrap();
                moments.add_original("x", &original, vec![*first as u32, *first as u32 + 1], &part(&rows, *first)).unwrap();
            }
            for (fold, first) in held_out.iter().enumerate() {
                moments.hold_out("x", fold, &part(&rows, *first), Some(&part(&original, *first))).unwrap();
            }
            moments
        };
        let equal = |found: &Moments, expected: &Moments| {
            assert_eq!((found.count, found.nonzero, found.tokens()), (expected.count, expected.nonzero, expected.tokens()));
            assert!(!expected.differences.is_empty() && found.differences.len() == expected.differences.len());
            let floats = |moments: &Moments| [&moments.products[..], &moments.differences, &moments.largest].concat();
            let sums = |moments: &Moments| [&moments.squares[..], &moments.magnitudes].concat();
            let all = floats(found).into_iter().zip(floats(expected)).map(|(a, b)| f64::from((a - b).abs()));
            assert!(all.chain(sums(found).into_iter().zip(sums(expected)).map(|(a, b)| (a - b).abs())).all(|error| error < 1e-4));
        };
        let mut found = moments(&[0, 2], &[4, 6]);
        equal(&found.without(0).unwrap().unwrap(), &moments(&[0, 2, 6], &[]));
        equal(&found.without(1).unwrap().unwrap(), &moments(&[0, 2, 4], &[]));
        found.merge().unwrap();
        equal(&found, &moments(&[0, 2, 4, 6], &[]));
        let products = found.products.clone();
        found.drop_differences();
        found.download("x").unwrap();
        assert!(found.differences.is_empty() && found.products == products);
    }
}
