//! Tensors in host memory as slices, for CPU kernels.
//!
//! Functions return `None` for tensors that are on another device, are not f32, or have an unsupported
//! layout.

use candle_core::{CpuStorage, D, DType, Device, Result, Storage, StorageRef, Tensor};
use rayon::prelude::*;

use super::super::Backward;
use super::Fused;
use crate::kernel::activation::{ActivationFunction, activate};
use crate::kernel::attention::Heads;
use crate::kernel::matmul_gradient::sum_parts;
use crate::kernel::rows_gradient;
use crate::kernel::scratch::cleared;

/// Number of elements per job of an elementwise loop.
const CHUNK: usize = 1 << 14;

/// A tensor locked for reading.
pub(super) struct Host<'t> {
    storage: StorageRef<'t>,
    start: usize,
    strides: &'t [usize],
}

impl<'t> Host<'t> {
    /// Locks a tensor on the CPU.
    pub(super) fn new(tensor: &'t Tensor) -> Option<Self> {
        if !matches!(tensor.device(), Device::Cpu) {
            return None;
        }
        let (storage, layout) = tensor.storage_and_layout();
        Some(Self { storage, start: layout.start_offset(), strides: layout.stride() })
    }

    /// The storage, of any dtype, and the offset of the first element.
    pub(super) fn storage(&self) -> Option<(&CpuStorage, usize)> {
        match &*self.storage {
            Storage::Cpu(storage) => Some((storage, self.start)),
            _ => None,
        }
    }

    /// The storage from the first element on, if it is f32.
    pub(super) fn floats(&self) -> Option<&[f32]> {
        match self.storage()? {
            (CpuStorage::F32(values), start) => values.get(start..),
            _ => None,
        }
    }

    /// Strides of the axes.
    pub(super) fn strides(&self) -> &[usize] {
        self.strides
    }
}

/// The elements of an integer tensor in host memory.
pub(super) fn integers(tensor: &Tensor) -> Result<Option<Vec<i64>>> {
    let flat = tensor.to_dtype(DType::I64)?.contiguous()?;
    let Some(host) = Host::new(&flat) else { return Ok(None) };
    Ok(match host.storage() {
        Some((CpuStorage::I64(values), start)) => values.get(start..start + flat.elem_count()).map(<[i64]>::to_vec),
        _ => None,
    })
}

/// Whether all tensors are f32 in host memory.
pub(super) fn readable<const N: usize>(tensors: [&Tensor; N]) -> bool {
    tensors.iter().all(|tensor| matches!(tensor.device(), Device::Cpu) && tensor.dtype() == DType::F32)
}

/// The axes from outermost to innermost in memory order, if the elements are stored without gaps.
fn order(tensor: &Tensor) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..tensor.rank()).collect();
    let (dims, strides) = (tensor.dims(), tensor.stride());
    order.sort_by_key(|&axis| std::cmp::Reverse(if dims[axis] == 1 { usize::MAX } else { strides[axis] }));
    let mut expected = 1;
    for &axis in order.iter().rev() {
        if dims[axis] != 1 && strides[axis] != expected {
            return None;
        }
        expected *= dims[axis];
    }
    Some(order)
}

/// A tensor from elements that are stored in this order of axes.
fn in_order(values: Vec<f32>, dims: &[usize], order: &[usize]) -> Result<Tensor> {
    let lying: Vec<usize> = order.iter().map(|&axis| dims[axis]).collect();
    Tensor::from_vec(values, lying, &Device::Cpu)?.permute(inverse(order))
}

/// The inverse of a permutation of axes.
fn inverse(order: &[usize]) -> Vec<usize> {
    let mut places = vec![0; order.len()];
    for (place, &axis) in order.iter().enumerate() {
        places[axis] = place;
    }
    places
}

/// Copies a tensor to the memory layout of another tensor of the same shape.
pub(super) fn with_layout_of(tensor: &Tensor, like: &Tensor) -> Result<Tensor> {
    match order(like) {
        Some(order) if !same_layout(tensor, like) => contiguous(&tensor.permute(order.as_slice())?)?.permute(inverse(&order)),
        _ => Ok(tensor.clone()),
    }
}

/// Minimum number of consecutive elements for which [`contiguous`] copies runs; candle copies shorter
/// ones.
const RUN: usize = 16;

/// The tensor in contiguous row-major layout.
pub fn contiguous(x: &Tensor) -> Result<Tensor> {
    let (dims, strides) = (x.dims(), x.stride());
    let (mut axes, mut run) = (dims.len(), 1);
    while axes > 0 && (dims[axes - 1] == 1 || strides[axes - 1] == run) {
        axes -= 1;
        run *= dims[axes];
    }
    if axes == 0 || run < RUN || !readable([x]) {
        return x.contiguous();
    }
    let host = Host::new(x);
    let Some(values) = host.as_ref().and_then(Host::floats) else { return x.contiguous() };
    let mut copied = cleared(x.elem_count());
    copied.par_chunks_mut(run).with_min_len(CHUNK.div_ceil(run)).enumerate().for_each(|(mut index, out)| {
        let mut start = 0;
        for axis in (0..axes).rev() {
            start += index % dims[axis] * strides[axis];
            index /= dims[axis];
        }
        out.copy_from_slice(&values[start..start + run]);
    });
    Tensor::from_vec(copied, dims, x.device())
}

/// Images with the elements of each channel stored contiguously, over all images.
pub(super) fn by_channel(x: &Tensor) -> Result<Tensor> {
    contiguous(&x.transpose(0, 1)?)?.transpose(0, 1)
}

/// The channels of images in [`by_channel`] layout.
pub(super) fn channels<'h>(x: &Tensor, host: &'h Host) -> Option<Vec<&'h [f32]>> {
    let count = x.elem_count();
    Some(host.floats()?.get(..count)?.chunks_exact((count / x.dim(1).ok()?.max(1)).max(1)).collect())
}

/// Whether the rows of each plane are contiguous in memory.
fn has_planes(dims: &[usize], strides: &[usize]) -> bool {
    matches!((dims, strides), (&[_, _, height, width], &[_, _, row, column]) if (column == 1 || width == 1) && (row == width || height == 1))
}

/// Images in a layout that [`planes`] can read.
pub(super) fn with_planes(x: &Tensor) -> Result<Tensor> {
    if has_planes(x.dims(), x.stride()) { Ok(x.clone()) } else { by_channel(x) }
}

/// Whether two tensors have the same shape and memory layout.
fn same_layout(a: &Tensor, b: &Tensor) -> bool {
    a.dims() == b.dims() && a.dims().iter().zip(a.stride().iter().zip(b.stride())).all(|(size, (a, b))| *size == 1 || a == b)
}

/// Applies an elementwise function; the result has the memory layout of `x`.
pub(super) fn activated(x: &Tensor, function: ActivationFunction) -> Option<Result<Tensor>> {
    let order = order(x)?;
    let host = Host::new(x)?;
    let input = &host.floats()?[..x.elem_count()];
    let mut output = cleared(input.len());
    output.par_chunks_mut(CHUNK).zip(input.par_chunks(CHUNK)).for_each(|(out, x)| {
        out.copy_from_slice(x);
        activate(function, out);
    });
    Some(in_order(output, x.dims(), &order))
}

/// Applies an elementwise function of two tensors with the same memory layout.
pub(super) fn combined(a: &Tensor, b: &Tensor, function: impl Fn(&[f32], &[f32], &mut [f32]) + Sync) -> Option<Result<Tensor>> {
    combined_rows(a, b, 1, function)
}

/// As [`combined`], but each call processes complete rows of `width` elements in memory order.
pub(super) fn combined_rows(a: &Tensor, b: &Tensor, width: usize, function: impl Fn(&[f32], &[f32], &mut [f32]) + Sync) -> Option<Result<Tensor>> {
    let order = order(a).filter(|_| same_layout(a, b))?;
    let (first, second) = (Host::new(a)?, Host::new(b)?);
    let (first, second) = (&first.floats()?[..a.elem_count()], &second.floats()?[..a.elem_count()]);
    let mut output = cleared(first.len());
    let chunk = CHUNK.next_multiple_of(width.max(1));
    output.par_chunks_mut(chunk).zip(first.par_chunks(chunk)).zip(second.par_chunks(chunk)).for_each(|((out, a), b)| function(a, b, out));
    Some(in_order(output, a.dims(), &order))
}

/// Applies a function to complete rows, several per call; `vectors` are passed to every call.
pub(super) fn by_rows<const N: usize>(x: &Tensor, vectors: [&Tensor; N], function: impl Fn(&[f32], &mut [f32], [&[f32]; N]) + Sync) -> Result<Option<Tensor>> {
    let x = x.contiguous()?;
    let width = x.dim(D::Minus1)?.max(1);
    let (host, others) = (Host::new(&x), vectors.map(Host::new));
    let Some(input) = host.as_ref().and_then(Host::floats) else { return Ok(None) };
    let mut slices = [&[][..]; N];
    for ((slice, host), tensor) in slices.iter_mut().zip(&others).zip(vectors) {
        match host.as_ref().and_then(Host::floats) {
            Some(values) if tensor.is_contiguous() => *slice = &values[..tensor.elem_count()],
            _ => return Ok(None),
        }
    }
    let mut output = cleared(x.elem_count());
    let chunk = CHUNK.div_ceil(width) * width;
    output.par_chunks_mut(chunk).zip(input.par_chunks(chunk)).for_each(|(out, x)| function(&x[..out.len()], out, slices));
    Tensor::from_vec(output, x.dims(), x.device()).map(Some)
}

/// Gradients of a normalization over rows: of its input, its weight and its bias, if it has one. The
/// kernel writes the input gradients of some rows and accumulates the gradients of the vectors, one after
/// the other.
pub(super) fn norm_back(backward: &Backward, kernel: impl Fn(&[f32], &[f32], &[f32], &mut [f32], &mut [f32]) + Sync) -> Result<Option<Vec<Option<Tensor>>>> {
    let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
    if !readable([x, weight, backward.gradient]) {
        return Ok(None);
    }
    let (x, weight, gradient) = (x.contiguous()?, weight.contiguous()?, backward.gradient.contiguous()?);
    let (width, vectors) = (weight.elem_count(), backward.inputs.len() - 1);
    let width_of_sums = if (1..=vectors).any(|input| backward.needs_gradient(input)) { vectors * width } else { 0 };
    let compute = || {
        let hosts = [Host::new(&x)?, Host::new(&gradient)?, Host::new(&weight)?];
        let [input, gradient, weight] = [&hosts[0].floats()?[..x.elem_count()], &hosts[1].floats()?[..x.elem_count()], &hosts[2].floats()?[..width]];
        let mut output = cleared(if backward.needs_gradient(0) { input.len() } else { 0 });
        let chunk = rows_gradient::rows_of_job(width) * width.max(1);
        let jobs = input.len().div_ceil(chunk);
        let mut parts = vec![0f32; jobs * width_of_sums];
        // Pieces are empty for jobs without input gradients.
        let mut pieces: Vec<&mut [f32]> = output.chunks_mut(chunk).collect();
        pieces.resize_with(jobs, Default::default);
        let mut sums: Vec<&mut [f32]> = parts.chunks_mut(width_of_sums.max(1)).collect();
        sums.resize_with(jobs, Default::default);
        let rows = input.par_chunks(chunk).zip(gradient.par_chunks(chunk));
        rows.zip(pieces.into_par_iter().zip(sums)).for_each(|((x, g), (out, sums))| kernel(x, g, weight, out, sums));
        let mut total = cleared(width_of_sums);
        sum_parts(&parts.chunks(width_of_sums.max(1)).collect::<Vec<_>>(), &mut total);
        Some((output, total))
    };
    let Some((output, total)) = compute() else { return Ok(None) };
    let mut gradients = vec![backward.gradient_of(0, || Tensor::from_vec(output, x.dims(), x.device()))?];
    for input in 1..=vectors {
        gradients.push(backward.gradient_of(input, || Tensor::from_slice(&total[(input - 1) * width..input * width], width, x.device()))?);
    }
    Ok(Some(gradients))
}

/// The sum of each column of a matrix.
pub(super) fn column_sums(x: &Tensor) -> Result<Option<Tensor>> {
    let x = x.contiguous()?;
    let mut sums = cleared(x.dim(D::Minus1)?);
    let Some(host) = Host::new(&x) else { return Ok(None) };
    let Some(values) = host.floats() else { return Ok(None) };
    rows_gradient::column_sums(&values[..x.elem_count()], &mut sums);
    Tensor::from_vec(sums, x.dim(D::Minus1)?, x.device()).map(Some)
}

/// The planes of `[batch, channels, height, width]`, ordered by channel, then by image.
pub(super) fn planes<'h>(x: &Tensor, host: &'h Host) -> Option<Vec<&'h [f32]>> {
    let (images, channels, height, width) = x.dims4().ok()?;
    let values = host.floats()?;
    let &[image, channel, ..] = host.strides() else { return None };
    if !has_planes(x.dims(), host.strides()) {
        return None;
    }
    (0..channels * images).map(|i| values.get(i / images * channel + i % images * image..)?.get(..height * width)).collect()
}

/// Locks the tensors of an epilogue for reading. `fits` checks whether tensors shaped like the result
/// also have its layout.
pub(super) fn steps<'t>(steps: impl Iterator<Item = &'t Fused<Tensor>>, fits: impl Fn(&Tensor) -> bool) -> Option<Vec<Fused<Host<'t>>>> {
    let of = |step: &'t Fused<Tensor>| {
        let like = matches!(step, Fused::Add(_) | Fused::Multiply(_));
        step.map(|tensor| if like { fits(tensor) } else { tensor.is_contiguous() }.then(|| Host::new(tensor)).flatten())
    };
    steps.map(of).collect()
}

/// Heads `[batch, heads, rows, width]` for the attention kernels.
pub(super) fn heads<'h>(host: &'h Host) -> Option<Heads<'h>> {
    let &[batch, head, row, 1] = host.strides() else { return None };
    Some(Heads { values: host.floats()?, strides: [batch, head, row] })
}

/// A tensor `[batch, channels, …]` from elements stored channel by channel.
pub(super) fn channels_first(values: Vec<f32>, [images, channels, height, width]: [usize; 4]) -> Result<Tensor> {
    Tensor::from_vec(values, (channels, images, height, width), &Device::Cpu)?.transpose(0, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_matches_candle() {
        let x = Tensor::arange(0f32, 2.0 * 3.0 * 5.0 * 20.0, &Device::Cpu).unwrap().reshape((2, 3, 5, 20)).unwrap();
        let turned = x.transpose(0, 1).unwrap();
        let broadcast = x.narrow(1, 0, 1).unwrap().broadcast_as((2, 3, 5, 20)).unwrap();
        let views =
            [turned.clone(), turned.transpose(1, 2).unwrap(), x.narrow(1, 1, 2).unwrap(), x.narrow(3, 2, 17).unwrap(), x.transpose(2, 3).unwrap(), broadcast];
        for view in views.into_iter().chain([x.narrow(0, 0, 0).unwrap(), turned.narrow(1, 1, 1).unwrap()]) {
            let values = |x: Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let copy = contiguous(&view).unwrap();
            assert!(copy.is_contiguous() && copy.dims() == view.dims());
            assert_eq!(values(copy), values(view.contiguous().unwrap()), "{:?}", view.layout());
        }
    }
}
