//! Tensors in host memory as slices, for the kernels of the CPU.
//!
//! A function here answers `None` where a tensor is on another device, is not f32, or lies in memory as no kernel reads it.

use candle_core::{CpuStorage, D, DType, Device, Result, Storage, StorageRef, Tensor};
use rayon::prelude::*;

use super::super::Backward;
use super::Fused;
use crate::kernel::activation::{ActivationFunction, activate};
use crate::kernel::attention::Heads;
use crate::kernel::matmul_gradient::add_up;
use crate::kernel::rows_gradient;
use crate::kernel::scratch::cleared;

/// Elements of one job of a loop over single elements.
const CHUNK: usize = 1 << 14;

/// A tensor that is read.
pub(super) struct Host<'t> {
    storage: StorageRef<'t>,
    start: usize,
    strides: &'t [usize],
}

impl<'t> Host<'t> {
    /// The elements of a tensor on the CPU.
    pub(super) fn of(tensor: &'t Tensor) -> Option<Self> {
        if !matches!(tensor.device(), Device::Cpu) {
            return None;
        }
        let (storage, layout) = tensor.storage_and_layout();
        Some(Self { storage, start: layout.start_offset(), strides: layout.stride() })
    }

    /// What is stored, of any type, and where the first element is.
    pub(super) fn storage(&self) -> Option<(&CpuStorage, usize)> {
        match &*self.storage {
            Storage::Cpu(storage) => Some((storage, self.start)),
            _ => None,
        }
    }

    /// Floats from the first element on.
    pub(super) fn floats(&self) -> Option<&[f32]> {
        match self.storage()? {
            (CpuStorage::F32(values), start) => values.get(start..),
            _ => None,
        }
    }

    /// Steps along the axes.
    pub(super) fn strides(&self) -> &[usize] {
        self.strides
    }
}

/// Whole numbers in host memory, one after the other.
pub(super) fn integers(tensor: &Tensor) -> Result<Option<Vec<i64>>> {
    let flat = tensor.to_dtype(DType::I64)?.contiguous()?;
    let Some(host) = Host::of(&flat) else { return Ok(None) };
    Ok(match host.storage() {
        Some((CpuStorage::I64(values), start)) => values.get(start..start + flat.elem_count()).map(<[i64]>::to_vec),
        _ => None,
    })
}

/// Whether kernels can read all of these.
pub(super) fn readable<const N: usize>(tensors: [&Tensor; N]) -> bool {
    tensors.iter().all(|tensor| matches!(tensor.device(), Device::Cpu) && tensor.dtype() == DType::F32)
}

/// The axes from the outermost to the innermost as elements lie in memory, if they lie there without gaps.
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

/// A tensor whose elements lie in this order of axes.
fn in_order(values: Vec<f32>, dims: &[usize], order: &[usize]) -> Result<Tensor> {
    let lying: Vec<usize> = order.iter().map(|&axis| dims[axis]).collect();
    Tensor::from_vec(values, lying, &Device::Cpu)?.permute(inverse(order))
}

/// Where each axis stands in an order.
fn inverse(order: &[usize]) -> Vec<usize> {
    let mut places = vec![0; order.len()];
    for (place, &axis) in order.iter().enumerate() {
        places[axis] = place;
    }
    places
}

/// A tensor of the same sizes, its elements lying as those of another do.
pub(super) fn laid_like(tensor: &Tensor, like: &Tensor) -> Result<Tensor> {
    match order(like) {
        Some(order) if !alike(tensor, like) => contiguous(&tensor.permute(order.as_slice())?)?.permute(inverse(&order)),
        _ => Ok(tensor.clone()),
    }
}

/// Elements that lie side by side and are copied together; fewer are left to candle.
const RUN: usize = 16;

/// The tensor without gaps, in the order of its axes.
///
/// # Errors
/// It cannot be copied.
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
    let host = Host::of(x);
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

/// Images, channel by channel and without gaps.
pub(super) fn by_channel(x: &Tensor) -> Result<Tensor> {
    contiguous(&x.transpose(0, 1)?)?.transpose(0, 1)
}

/// The channels of images that lie [`by_channel`].
pub(super) fn channels<'h>(x: &Tensor, host: &'h Host) -> Option<Vec<&'h [f32]>> {
    let count = x.elem_count();
    Some(host.floats()?.get(..count)?.chunks_exact((count / x.dim(1).ok()?.max(1)).max(1)).collect())
}

/// Whether the rows of images lie side by side.
fn has_planes(dims: &[usize], strides: &[usize]) -> bool {
    matches!((dims, strides), (&[_, _, height, width], &[_, _, row, column]) if (column == 1 || width == 1) && (row == width || height == 1))
}

/// Images that [`planes`] can read.
pub(super) fn with_planes(x: &Tensor) -> Result<Tensor> {
    if has_planes(x.dims(), x.stride()) { Ok(x.clone()) } else { by_channel(x) }
}

/// Whether two tensors have the same sizes and lie in memory the same way.
fn alike(a: &Tensor, b: &Tensor) -> bool {
    a.dims() == b.dims() && a.dims().iter().zip(a.stride().iter().zip(b.stride())).all(|(size, (a, b))| *size == 1 || a == b)
}

/// A function of single elements; elements stay where they lie.
pub(super) fn activated(x: &Tensor, function: ActivationFunction) -> Option<Result<Tensor>> {
    let order = order(x)?;
    let host = Host::of(x)?;
    let input = &host.floats()?[..x.elem_count()];
    let mut output = cleared(input.len());
    output.par_chunks_mut(CHUNK).zip(input.par_chunks(CHUNK)).for_each(|(out, x)| {
        out.copy_from_slice(x);
        activate(function, out);
    });
    Some(in_order(output, x.dims(), &order))
}

/// A function of two tensors that lie the same way, element by element.
pub(super) fn combined(a: &Tensor, b: &Tensor, function: impl Fn(&[f32], &[f32], &mut [f32]) + Sync) -> Option<Result<Tensor>> {
    combined_rows(a, b, 1, function)
}

/// [`combined`], whole rows of `width` elements as they lie in memory in a call.
pub(super) fn combined_rows(a: &Tensor, b: &Tensor, width: usize, function: impl Fn(&[f32], &[f32], &mut [f32]) + Sync) -> Option<Result<Tensor>> {
    let order = order(a).filter(|_| alike(a, b))?;
    let (first, second) = (Host::of(a)?, Host::of(b)?);
    let (first, second) = (&first.floats()?[..a.elem_count()], &second.floats()?[..a.elem_count()]);
    let mut output = cleared(first.len());
    let chunk = CHUNK.next_multiple_of(width.max(1));
    output.par_chunks_mut(chunk).zip(first.par_chunks(chunk)).zip(second.par_chunks(chunk)).for_each(|((out, a), b)| function(a, b, out));
    Some(in_order(output, a.dims(), &order))
}

/// A function of whole rows, several rows in a call; more tensors are vectors that every call sees.
pub(super) fn by_rows<const N: usize>(x: &Tensor, vectors: [&Tensor; N], function: impl Fn(&[f32], &mut [f32], [&[f32]; N]) + Sync) -> Result<Option<Tensor>> {
    let x = x.contiguous()?;
    let width = x.dim(D::Minus1)?.max(1);
    let (host, others) = (Host::of(&x), vectors.map(Host::of));
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

/// Gradients of a normalisation over rows: of its input, its weight, and a bias if there is one. The kernel writes those of
/// some rows' inputs, and adds those of vectors, one behind the other.
pub(super) fn norm_back(backward: &Backward, kernel: impl Fn(&[f32], &[f32], &[f32], &mut [f32], &mut [f32]) + Sync) -> Result<Option<Vec<Option<Tensor>>>> {
    let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
    if !readable([x, weight, backward.gradient]) {
        return Ok(None);
    }
    let (x, weight, gradient) = (x.contiguous()?, weight.contiguous()?, backward.gradient.contiguous()?);
    let (width, vectors) = (weight.elem_count(), backward.inputs.len() - 1);
    let width_of_sums = if (1..=vectors).any(|input| backward.wants(input)) { vectors * width } else { 0 };
    let compute = || {
        let hosts = [Host::of(&x)?, Host::of(&gradient)?, Host::of(&weight)?];
        let [input, gradient, weight] = [&hosts[0].floats()?[..x.elem_count()], &hosts[1].floats()?[..x.elem_count()], &hosts[2].floats()?[..width]];
        let mut output = cleared(if backward.wants(0) { input.len() } else { 0 });
        let chunk = rows_gradient::rows_of_job(width) * width.max(1);
        let jobs = input.len().div_ceil(chunk);
        let mut parts = vec![0f32; jobs * width_of_sums];
        // Jobs without anything to write have empty pieces.
        let mut pieces: Vec<&mut [f32]> = output.chunks_mut(chunk).collect();
        pieces.resize_with(jobs, Default::default);
        let mut sums: Vec<&mut [f32]> = parts.chunks_mut(width_of_sums.max(1)).collect();
        sums.resize_with(jobs, Default::default);
        let rows = input.par_chunks(chunk).zip(gradient.par_chunks(chunk));
        rows.zip(pieces.into_par_iter().zip(sums)).for_each(|((x, g), (out, sums))| kernel(x, g, weight, out, sums));
        let mut total = cleared(width_of_sums);
        add_up(&parts.chunks(width_of_sums.max(1)).collect::<Vec<_>>(), &mut total);
        Some((output, total))
    };
    let Some((output, total)) = compute() else { return Ok(None) };
    let mut gradients = vec![backward.of(0, || Tensor::from_vec(output, x.dims(), x.device()))?];
    for input in 1..=vectors {
        gradients.push(backward.of(input, || Tensor::from_slice(&total[(input - 1) * width..input * width], width, x.device()))?);
    }
    Ok(Some(gradients))
}

/// The sum of each column of a matrix.
pub(super) fn column_sums(x: &Tensor) -> Result<Option<Tensor>> {
    let x = x.contiguous()?;
    let mut sums = cleared(x.dim(D::Minus1)?);
    let Some(host) = Host::of(&x) else { return Ok(None) };
    let Some(values) = host.floats() else { return Ok(None) };
    rows_gradient::column_sums(&values[..x.elem_count()], &mut sums);
    Tensor::from_vec(sums, x.dim(D::Minus1)?, x.device()).map(Some)
}

/// The planes of `[batch, channels, height, width]`, all images of the first channel first; and their floats.
pub(super) fn planes<'h>(x: &Tensor, host: &'h Host) -> Option<Vec<&'h [f32]>> {
    let (images, channels, height, width) = x.dims4().ok()?;
    let values = host.floats()?;
    let &[image, channel, ..] = host.strides() else { return None };
    if !has_planes(x.dims(), host.strides()) {
        return None;
    }
    (0..channels * images).map(|i| values.get(i / images * channel + i % images * image..)?.get(..height * width)).collect()
}

/// The tensors of steps, held while they are read. Those like the result must lie as it will, which `fits` says.
pub(super) fn steps<'t>(steps: impl Iterator<Item = &'t Fused<Tensor>>, fits: impl Fn(&Tensor) -> bool) -> Option<Vec<Fused<Host<'t>>>> {
    let of = |step: &'t Fused<Tensor>| {
        let like = matches!(step, Fused::Add(_) | Fused::Multiply(_));
        step.map(|tensor| if like { fits(tensor) } else { tensor.is_contiguous() }.then(|| Host::of(tensor)).flatten())
    };
    steps.map(of).collect()
}

/// Heads `[batch, heads, rows, width]` for the kernels of attention.
pub(super) fn heads<'h>(host: &'h Host) -> Option<Heads<'h>> {
    let &[batch, head, row, 1] = host.strides() else { return None };
    Some(Heads { values: host.floats()?, strides: [batch, head, row] })
}

/// A tensor `[batch, channels, …]` out of elements that lie channel by channel.
pub(super) fn channels_first(values: Vec<f32>, [images, channels, height, width]: [usize; 4]) -> Result<Tensor> {
    Tensor::from_vec(values, (channels, images, height, width), &Device::Cpu)?.transpose(0, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_without_gaps_is_that_of_candle() {
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
