//! Selection of elements by indices.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use candle_core::{Device, Tensor};

use super::super::initializer_roles::int;
use super::{Call, axis_of, from_floats, from_ints, text};

/// An index into an axis of this size; negative ones count from the end.
fn index(at: i64, size: usize) -> Result<i64, String> {
    let wide = i64::try_from(size).unwrap_or(i64::MAX);
    let from_start = if at < 0 { at.saturating_add(wide) } else { at };
    if (0..wide).contains(&from_start) { Ok(from_start) } else { Err(format!("index {at} is out of range for {size} elements")) }
}

fn product(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |count, size| count.saturating_mul(*size))
}

/// Elements of an axis, in the shape of the result.
fn select(x: &Tensor, at: Vec<i64>, axis: usize, shape: &[usize]) -> Result<Tensor, String> {
    if product(shape) == 0 {
        return Tensor::zeros(shape, x.dtype(), &Device::Cpu).map_err(text);
    }
    let count = at.len();
    let at = from_ints(at, &[count])?;
    x.contiguous().and_then(|x| x.index_select(&at, axis)?.reshape(shape)).map_err(text)
}

pub(super) fn gather(call: &Call) -> Result<Tensor, String> {
    let (x, indices) = (call.input(0)?, call.input(1)?);
    let axis = call.axis(0, x.dims().len())?;
    let (before, rest) = x.dims().split_at_checked(axis).ok_or("its axis does not exist")?;
    let (size, after) = rest.split_first().ok_or("its axis does not exist")?;
    let at = call.ints(1)?.into_iter().map(|at| index(at, *size)).collect::<Result<Vec<_>, _>>()?;
    let shape = [before, indices.dims(), after].concat();
    call.check_size(&shape)?;
    select(&x.tensor, at, axis, &shape)
}

pub(super) fn gather_elements(call: &Call) -> Result<Tensor, String> {
    let (x, indices) = (call.input(0)?, call.input(1)?);
    let axis = call.axis(0, x.dims().len())?;
    let size = x.dims().get(axis).copied().unwrap_or(0);
    let at = call.ints(1)?.into_iter().map(|at| index(at, size)).collect::<Result<Vec<_>, _>>()?;
    if at.is_empty() {
        return Tensor::zeros(indices.dims(), x.tensor.dtype(), &Device::Cpu).map_err(text);
    }
    let mut within = x.tensor.clone();
    for (place, size) in indices.dims().iter().enumerate().filter(|(place, _)| *place != axis) {
        within = within.narrow(place, 0, *size).map_err(text)?;
    }
    let at = from_ints(at, indices.dims())?;
    within.contiguous().and_then(|within| within.gather(&at, axis)).map_err(text)
}

/// For index tuples into the axes of a tensor after `batches` ones: the numbers of the blocks to which they
/// refer, and the shape of a block.
fn blocks(call: &Call, dims: &[usize], indices: &[usize], batches: usize) -> Result<(Vec<i64>, Vec<usize>), String> {
    let (depth, outer) = indices.split_last().ok_or("its indices are a scalar")?;
    let inner = dims.get(batches..).ok_or("it has too few axes")?;
    let (indexed, block) = inner.split_at_checked(*depth).ok_or("its index tuples are too long")?;
    if outer.get(..batches) != dims.get(..batches) {
        return Err(format!("its indices have the shape {indices:?}, and its data {dims:?}"));
    }
    let per_batch = product(outer.get(batches..).ok_or("its indices have too few axes")?).max(1);
    // Tuples without indices need memory too.
    call.check_size(&[outer, block].concat())?;
    let tuples = call.ints(1)?;
    let tuples: Vec<&[i64]> = if *depth == 0 { vec![&[][..]; product(outer)] } else { tuples.chunks_exact(*depth).collect() };
    let offset = |(number, tuple): (usize, &&[i64])| {
        let batch = i64::try_from(number.checked_div(per_batch).unwrap_or(0)).unwrap_or(i64::MAX);
        tuple.iter().zip(indexed).try_fold(batch, |offset, (at, size)| {
            let wide = i64::try_from(*size).unwrap_or(i64::MAX);
            Ok::<i64, String>(offset.saturating_mul(wide).saturating_add(index(*at, *size)?))
        })
    };
    Ok((tuples.iter().enumerate().map(offset).collect::<Result<_, _>>()?, block.to_vec()))
}

pub(super) fn gather_nd(call: &Call) -> Result<Tensor, String> {
    let (x, indices) = (call.input(0)?, call.input(1)?);
    let batches = usize::try_from(int(call.node, "batch_dims", 0)).map_err(|e| e.to_string())?;
    let (at, block) = blocks(call, x.dims(), indices.dims(), batches)?;
    let (_, outer) = indices.dims().split_last().ok_or("its indices are a scalar")?;
    let shape = [outer, &block].concat();
    let size = product(&block).max(1);
    let rows = x.tensor.elem_count().checked_div(size).unwrap_or(0);
    let x = x.tensor.contiguous().and_then(|x| x.reshape((rows, size))).map_err(text)?;
    select(&x, at, 0, &shape)
}

pub(super) fn scatter_nd(call: &Call) -> Result<Tensor, String> {
    let (x, indices, updates) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let (at, block) = blocks(call, x.dims(), indices.dims(), 0)?;
    let size = product(&block).max(1);
    if updates.tensor.elem_count() != at.len().saturating_mul(size) {
        return Err(format!("its updates have the shape {:?}", updates.dims()));
    }
    fn write<T: Copy>(mut values: Vec<T>, updates: Vec<T>, at: &[i64], size: usize) -> Vec<T> {
        for (block, new) in at.iter().zip(updates.chunks_exact(size)) {
            let start = usize::try_from(*block).unwrap_or(usize::MAX).saturating_mul(size);
            if let Some(old) = values.get_mut(start..start.saturating_add(size)) {
                old.copy_from_slice(new);
            }
        }
        values
    }
    if x.is_float() {
        return from_floats(write(x.floats(x.dims())?, updates.floats(updates.dims())?, &at, size), x.dims());
    }
    from_ints(write(x.ints(x.dims())?, updates.ints(updates.dims())?, &at, size), x.dims())
}

pub(super) fn slice(call: &Call) -> Result<Tensor, String> {
    let starts = call.attribute_or_input("starts", 1)?.ok_or("its `starts` are missing")?;
    let ends = call.attribute_or_input("ends", 2)?.ok_or("its `ends` are missing")?;
    let axes = call.attribute_or_input("axes", 3)?.unwrap_or_else(|| (0i64..).take(starts.len()).collect());
    let steps = if call.optional(4).is_some() { call.ints(4)? } else { vec![1; starts.len()] };
    let mut x = call.input(0)?.tensor.clone();
    for (((start, end), axis), step) in starts.into_iter().zip(ends).zip(axes).zip(steps) {
        let axis = axis_of(axis, x.rank())?;
        let mut shape = x.dims().to_vec();
        let size = shape.get(axis).and_then(|size| i64::try_from(*size).ok()).unwrap_or(0);
        let from_start = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
        let range = match step {
            1.. => from_start(start).clamp(0, size)..from_start(end).clamp(0, size),
            ..0 => {
                let (start, end) = (from_start(start).min(size.saturating_sub(1)).max(0), from_start(end).max(-1));
                end.saturating_add(1)..start.saturating_add(1).min(size)
            }
            0 => return Err("its step is zero".into()),
        };
        let by = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
        let count = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(0).div_ceil(by);
        shape.get_mut(axis).into_iter().for_each(|size| *size = count);
        call.check_size(&shape)?;
        let at: Vec<i64> = if step > 0 { range.step_by(by).collect() } else { range.rev().step_by(by).collect() };
        x = select(&x, at, axis, &shape)?;
    }
    Ok(x)
}

pub(super) fn split(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let axis = call.axis(0, x.dims().len())?;
    let size = x.dims().get(axis).copied().unwrap_or(0);
    let count = call.node.output.len().max(1);
    let lengths: Vec<usize> = match call.attribute_or_input("split", 1)? {
        Some(lengths) => lengths.into_iter().map(|length| usize::try_from(length).map_err(|e| e.to_string())).collect::<Result<_, _>>()?,
        None => {
            let each = size.div_ceil(count);
            (0..count).map(|part| each.min(size.saturating_sub(part.saturating_mul(each)))).collect()
        }
    };
    let start = lengths.iter().take(call.output).fold(0usize, |sum, length| sum.saturating_add(*length));
    let length = lengths.get(call.output).copied().ok_or("it has more outputs than parts")?;
    x.tensor.narrow(axis, start, length).and_then(|part| part.contiguous()).map_err(text)
}
