//! Runs a model over calibration samples and collects statistics of its graph values.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use super::device_stats;
use super::statistics::{Axis, Request, ValueStatistics};
use crate::data::{Batch, DataSet, Order, Padding, SequenceRoles, TokenAxis};
use crate::error::{Error, Result};
use crate::exec::transfer::Cause;
use crate::exec::{Blockwise, BlockwiseOptions, Executor, floats_on_host, read, state_bytes};
use crate::ir::Graph;
use crate::ir::ops::on_host;
use crate::store::Weights;
use crate::work::Work;

/// Runs the model over all samples and collects statistics of the requested graph values. Padding tokens
/// are excluded. Fails if a value is not finite or the data is empty.
pub fn calibrate(executor: &Executor, data: &DataSet, requests: &BTreeMap<String, Request>, work: &Work) -> Result<BTreeMap<String, ValueStatistics>> {
    let mut statistics = BTreeMap::new();
    let observation = executor.observation(|name| requests.contains_key(name));
    let sides = SequenceRoles::new(executor.graph());
    data.for_each_batch("Calibrating", work, |batch| {
        let padding = padding(&batch)?;
        let mut observe = |name: &str, value: &Tensor| match requests.get(name) {
            Some(request) => record(&mut statistics, name, value, request, (&padding, sides.token_axis(name)), batch.samples),
            _ => Ok(()),
        };
        for (name, value) in &batch.inputs {
            observe(name, value)?;
        }
        executor.run_observed(&observation, &batch.inputs, &mut observe)
    })?;
    Ok(statistics)
}

/// Like [`calibrate`], running the model block by block. `cache_bytes` limits the memory of the
/// activations cached between blocks.
pub fn calibrate_blockwise(
    model: (&Graph, &Weights),
    options: &BlockwiseOptions,
    cache_bytes: u64,
    data: &DataSet,
    requests: &BTreeMap<String, Request>,
    work: &Work,
) -> Result<BTreeMap<String, ValueStatistics>> {
    let mut statistics = BTreeMap::new();
    let sides = SequenceRoles::new(model.0);
    observe_blockwise(
        model,
        options,
        cache_bytes,
        data,
        |name| requests.contains_key(name),
        work,
        |batch, name, value| match requests.get(name) {
            Some(request) => record(&mut statistics, name, value, request, (&padding(batch)?, sides.token_axis(name)), batch.samples),
            None => Ok(()),
        },
    )?;
    Ok(statistics)
}

/// Runs the model block by block and passes the selected graph values of every batch to `observe`.
/// Batches are processed in groups whose cached activations fit into `cache_bytes`. Within a group,
/// `observe` receives all batches of one value, in order, before the next value. Fails if the data is empty.
pub fn observe_blockwise(
    (graph, weights): (&Graph, &Weights),
    options: &BlockwiseOptions,
    cache_bytes: u64,
    data: &DataSet,
    selected: impl Fn(&str) -> bool,
    work: &Work,
    mut observe: impl FnMut(&Batch, &str, &Tensor) -> Result<()>,
) -> Result<()> {
    let group_size = |batch: &Batch| usize::try_from(cache_bytes / state_bytes(graph, &batch.inputs).max(1)).unwrap_or(usize::MAX);
    data.for_each_group(
        (Order::default(), usize::MAX),
        work,
        &mut observe,
        |_, batch| group_size(batch),
        |observe, batches| {
            let mut run = Blockwise::new(graph, weights, &selected, options.clone(), work);
            for batch in batches {
                batch.inputs.iter().filter(|(name, _)| selected(name)).try_for_each(|(name, value)| observe(batch, name, value))?;
                run.push(batch.clone())?;
            }
            for block in 0..run.blocks().len() {
                run.enter(block)?;
                for name in run.values_of(block).into_iter().filter(|name| selected(name)) {
                    run.each(name, |batch, value| observe(batch, name, value))?;
                }
                run.leave()?;
            }
            Ok(())
        },
    )
}

fn padding(batch: &Batch) -> Result<Padding> {
    Padding::from_batch(batch).map_err(|e| Error::run("input `attention_mask`", e, ""))
}

/// Adds one value of a batch to its statistics.
fn record(
    statistics: &mut BTreeMap<String, ValueStatistics>,
    name: &str,
    value: &Tensor,
    request: &Request,
    (padding, tokens): (&Padding, TokenAxis),
    samples: usize,
) -> Result<()> {
    let shape = value.dims();
    let width = request.axis.channels(shape);
    if !statistics.contains_key(name) {
        statistics.insert(name.to_owned(), ValueStatistics::new(width, request));
    }
    let Some(statistics) = statistics.get_mut(name).filter(|_| value.elem_count() > 0) else { return Ok(()) };
    let mask = padding.token_rows(tokens, shape).filter(|_| request.axis == Axis::Last);
    let sizes = sample_sizes(value.elem_count() / width.max(1), samples, mask.as_deref());
    if !on_host(value.device()) {
        let rows = device_rows(value, width, request.axis, mask.as_deref()).map_err(|e| Error::run(format!("graph value `{name}`"), e, ""))?;
        return statistics.add_on_device(name, &rows, request.axis, &sizes);
    }
    // Convolutions store batches of images by channel.
    let by_channel = request.axis == Axis::Second && value.rank() > 2 && !value.is_contiguous();
    let mut add = |values: &[f32]| match &mask {
        Some(mask) => {
            let rows = values.chunks_exact(width.max(1)).zip(&**mask).filter(|(_, is_token)| **is_token);
            let tokens: Vec<f32> = rows.flat_map(|(row, _)| row.iter().copied()).collect();
            statistics.add(name, (&tokens, false), &[tokens.len() / width.max(1), width], request.axis, &sizes)
        }
        None => statistics.add(name, (values, by_channel), shape, request.axis, &sizes),
    };
    if by_channel { value.transpose(0, 1) } else { Ok(value.clone()) }
        .and_then(|value| floats_on_host(&value, Cause::Statistics))
        .and_then(|value| read(&value, |values| Ok(add(values))))
        .map_err(|e| Error::run(format!("graph value `{name}`"), e, ""))?
}

/// Number of rows of each sample of a batch, without padding. Rows that cannot be divided evenly, such as
/// those routed to an expert, count as one sample.
pub fn sample_sizes(rows: usize, samples: usize, mask: Option<&[bool]>) -> Vec<usize> {
    let samples = if samples > 0 && rows.is_multiple_of(samples) { samples } else { 1 };
    match mask {
        Some(mask) => mask.chunks((rows / samples).max(1)).map(|rows| rows.iter().filter(|is_token| **is_token).count()).collect(),
        None => vec![rows / samples; samples],
    }
}

/// A value on a device as `[rows, channels]`, without padding.
fn device_rows(value: &Tensor, width: usize, axis: Axis, mask: Option<&[bool]>) -> candle_core::Result<Tensor> {
    let value = value.to_dtype(DType::F32)?;
    let rows = match axis {
        Axis::Last => value.contiguous()?,
        Axis::Second if value.rank() > 2 => value.flatten_from(2)?.transpose(1, 2)?.contiguous()?,
        Axis::Second => value,
    };
    let rows = rows.reshape((rows.elem_count() / width.max(1), width))?;
    match mask {
        Some(mask) => device_stats::select_rows(&rows, (0u32..).zip(mask).filter(|(_, is_token)| **is_token).map(|(row, _)| row).collect()),
        None => Ok(rows),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::{Channels, RunningRange};
    use super::*;
    use crate::data::{References, SequenceRole};

    /// Statistics of the same batches, computed by the host path and by the device path.
    fn statistics(shapes: &[&[usize]], request: &Request, mask: Option<&Tensor>) -> [ValueStatistics; 2] {
        let width = shapes[0][if request.axis == Axis::Last { shapes[0].len() - 1 } else { 1 }];
        let inputs = mask.map(|mask| ("attention_mask".to_owned(), mask.clone())).into_iter().collect();
        let tokens = TokenAxis { role: SequenceRole::Input, axis: shapes[0].len().checked_sub(2) };
        let padding = Padding::from_batch(&Batch { inputs, references: References::None, samples: 1 }).unwrap();
        let mut statistics: [BTreeMap<String, ValueStatistics>; 2] = [BTreeMap::new(), BTreeMap::new()];
        for (index, shape) in shapes.iter().enumerate() {
            let number = |i: usize| (((i * 7919 + index * 31) % 1009) as f32 / 90.0 - 5.0) * 2f32.powi((index % 5) as i32);
            let value = Tensor::from_vec((0..shape.iter().product()).map(number).collect::<Vec<f32>>(), *shape, &Device::Cpu).unwrap();
            record(&mut statistics[0], "x", &value, request, (&padding, tokens), shape[0]).unwrap();
            let on_device = statistics[1].entry("x".to_owned()).or_insert_with(|| ValueStatistics::new(width, request));
            let kept = padding.token_rows(tokens, shape).filter(|_| request.axis == Axis::Last);
            let rows = device_rows(&value, width, request.axis, kept.as_deref()).unwrap();
            let sizes = sample_sizes(value.elem_count() / width, shape[0], kept.as_deref());
            on_device.add_on_device("x", &rows, request.axis, &sizes).unwrap();
        }
        statistics.map(|mut statistics| statistics.remove("x").unwrap())
    }

    /// Of images, a stored row has the channels of one pixel, also in batches of several samples.
    #[test]
    fn stored_rows_are_pixels() {
        let request = &Request { axis: Axis::Second, histograms: false, joint: false, weights: None };
        let padding = Padding::from_batch(&Batch { inputs: BTreeMap::new(), references: References::None, samples: 2 }).unwrap();
        let mut statistics = BTreeMap::new();
        let values: Vec<f32> = (0..24).map(|at| (at % 12 / 4 * 100 + at % 4) as f32).collect();
        let image = Tensor::from_vec(values, (2, 3, 2, 2), &Device::Cpu).unwrap();
        for _ in 0..20 {
            let tokens = TokenAxis { role: SequenceRole::Input, axis: None };
            record(&mut statistics, "x", &image, request, (&padding, tokens), 2).unwrap();
        }
        let rows = &statistics["x"].rows;
        assert!(rows.len() > 10 && rows.iter().any(|row| row[0] > 0.0));
        assert!(rows.iter().all(|row| row.len() == 3 && row[0] < 4.0 && row[1] == row[0] + 100.0 && row[2] == row[0] + 200.0), "{rows:?}");
    }

    #[test]
    fn host_and_device_statistics_are_equal() {
        let mask = Tensor::new(&[[1i64, 1, 0], [1, 0, 0]], &Device::Cpu).unwrap();
        let zeros = mask.zeros_like().unwrap();
        for empty in statistics(&[&[2, 3, 10]], &Request { axis: Axis::Last, histograms: true, joint: true, weights: None }, Some(&zeros)) {
            assert_eq!((empty.running_range, empty.samples), (RunningRange::default(), 0));
        }
        let tokens: &[&[usize]] = &[&[2, 3, 10], &[2, 3, 10], &[2, 3, 10]];
        let heads: &[&[usize]] = &[&[2, 4, 3, 10], &[2, 4, 3, 10]];
        let images: &[&[usize]] = &[&[3, 2, 4, 4], &[2, 2, 4, 4], &[1, 2, 4, 4]];
        let vectors: &[&[usize]] = &[&[7, 2500], &[4, 2500]];
        for (shapes, axis, mask) in [
            (tokens, Axis::Last, Some(&mask)),
            (heads, Axis::Last, Some(&mask)),
            (tokens, Axis::Last, None),
            (images, Axis::Second, None),
            (vectors, Axis::Last, None),
        ] {
            let weights = (axis == Axis::Second).then(|| [0.5, 2.0].into());
            for (histograms, joint, weights) in [(true, true, None), (true, false, weights), (false, true, None)] {
                let [host, device] = statistics(shapes, &Request { axis, histograms, joint, weights }, mask);
                assert_eq!(host.sample_ranges, device.sample_ranges);
                assert_eq!((host.histogram.clone(), host.rows.clone()), (device.histogram.clone(), device.rows.clone()));
                assert_eq!((host.running_range, host.batches, host.samples), (device.running_range, device.batches, device.samples));
                assert_eq!((host.histogram.map(|histogram| histogram.total() > 0), host.rows.is_empty()), (joint.then_some(true), false));
                for (host, device) in host.groups.iter().zip(&device.groups) {
                    assert_eq!((host.histogram(), host.largest(), host.count()), (device.histogram(), device.largest(), device.count()));
                    let moments = |channels: &Channels| channels.means().into_iter().chain(channels.mean_squares()).collect::<Vec<_>>();
                    assert!(moments(host).iter().zip(moments(device)).all(|(a, b)| (a - b).abs() < 1e-9), "{shapes:?}");
                }
            }
        }
        let mut wrong = ValueStatistics::new(2, &Request { axis: Axis::Last, histograms: true, joint: true, weights: None });
        let value = Tensor::new(&[[1f32, f32::NAN]], &Device::Cpu).unwrap();
        assert!(wrong.add_on_device("x", &value, Axis::Last, &[1]).unwrap_err().to_string().contains("is NaN for a calibration sample"));
    }

    /// Group statistics do not depend on how samples are batched and stored, with and without padding.
    #[test]
    fn group_statistics_do_not_depend_on_batches() {
        let number = |i: usize| ((i * 37) % 61) as f32 / 7.0 - 4.0;
        let mask = |row: usize| [1i64, 1, i64::from(row != 1)];
        let groups = |shape: &[usize], axis: Axis, (batch, by_channel): (usize, bool), padded: bool| {
            let row: usize = shape.iter().product();
            let width = if axis == Axis::Last { shape[shape.len() - 1] } else { shape[0] };
            let tokens = TokenAxis { role: SequenceRole::Input, axis: (shape.len() > 1).then_some(1) };
            let mut statistics = BTreeMap::new();
            for first in (0..11).step_by(batch) {
                let samples = batch.min(11 - first);
                let values: Vec<f32> = (first * row..(first + samples) * row).map(number).collect();
                let mut value = Tensor::from_vec(values, [&[samples], shape].concat(), &Device::Cpu).unwrap();
                if by_channel {
                    value = value.transpose(0, 1).and_then(|value| value.contiguous()?.transpose(0, 1)).unwrap();
                }
                let rows: Vec<i64> = (first..first + samples).flat_map(mask).collect();
                let mask = Tensor::from_vec(rows, (samples, 3), &Device::Cpu).unwrap();
                let inputs = padded.then(|| ("attention_mask".to_owned(), mask)).into_iter().collect();
                let padding = Padding::from_batch(&Batch { inputs, references: References::None, samples }).unwrap();
                let weights = (axis == Axis::Second).then(|| (0..width).map(|channel| channel as f64 + 1.0).collect());
                record(&mut statistics, "x", &value, &Request { axis, histograms: true, joint: true, weights }, (&padding, tokens), samples).unwrap();
            }
            let statistics = statistics.remove("x").unwrap();
            assert_eq!((statistics.groups[0].channels(), statistics.sample_ranges.is_some()), (width, axis == Axis::Second));
            (statistics.groups, statistics.sample_ranges, statistics.rows)
        };
        for (shape, axis, padded) in
            [(&[2, 3, 1][..], Axis::Second, false), (&[5][..], Axis::Last, false), (&[3, 5][..], Axis::Last, false), (&[3, 5][..], Axis::Last, true)]
        {
            let singly = groups(shape, axis, (1, false), padded);
            assert!(singly.0.iter().all(|group| group.count() > 0));
            for (batch, by_channel) in [2, 3, 11].into_iter().flat_map(|batch| [(batch, false), (batch, true)]) {
                let found = groups(shape, axis, (batch, by_channel), padded);
                assert_eq!((&found.0, &found.1), (&singly.0, &singly.1), "{shape:?} in batches of {batch}, by channel: {by_channel}");
                assert_eq!(found.2, groups(shape, axis, (batch, false), padded).2);
            }
        }
    }
}
