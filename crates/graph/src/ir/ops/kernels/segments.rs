//! Attention in rows of several segments, each of which is computed separately.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::super::{Attention, Backward, Saved};
use super::host::integers;
use super::{Gradients, Kernel};

/// The segments of each row of a mask; `None` if it is not in host memory.
fn segments(mask: &Tensor) -> Result<Option<Vec<Vec<Range<usize>>>>> {
    let (_, keys) = mask.dims2()?;
    let ranges = |row: &[i64]| {
        let mut end = 0;
        let range = |run: &[i64]| {
            let start = end;
            end += run.len();
            start..end
        };
        row.chunk_by(|a, b| a == b).map(range).collect()
    };
    Ok(integers(mask)?.map(|numbers| numbers.chunks(keys.max(1)).map(ranges).collect()))
}

/// The positions of a segment, in a tensor `[batch, heads, positions, width]`.
fn segment_of(tensor: &Tensor, row: usize, segment: &Range<usize>) -> Result<Tensor> {
    tensor.narrow(0, row, 1)?.narrow(2, segment.start, segment.len())
}

/// Joins tensors of the segments of each row.
fn joined(rows: &[Vec<Tensor>]) -> Result<Tensor> {
    Tensor::cat(&rows.iter().map(|segments| Tensor::cat(segments, 2)).collect::<Result<Vec<_>>>()?, 0)
}

impl Attention {
    /// The output with segments, each of which is computed separately.
    pub(super) fn forward_segments(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let ([q, k, v, mask], op) = (inputs, Attention { segments: false, ..*self }) else { return Ok(None) };
        let Some(rows) = segments(mask)? else { return Ok(None) };
        let mut outputs = Vec::with_capacity(rows.len());
        for (row, segments) in rows.iter().enumerate() {
            let mut parts = Vec::with_capacity(segments.len());
            for segment in segments {
                let part = |tensor: &Tensor| segment_of(tensor, row, segment);
                let Some(output) = Kernel::forward(&op, &[part(q)?, part(k)?, part(v)?])? else { return Ok(None) };
                parts.push(output);
            }
            outputs.push(parts);
        }
        joined(&outputs).map(Some)
    }

    /// The gradients with segments, each of which is computed separately.
    pub(super) fn backward_segments(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let ([q, k, v, mask], op) = (backward.inputs, Attention { segments: false, ..*self }) else { return Ok(None) };
        let Some(rows) = segments(mask.tensor()?)? else { return Ok(None) };
        let mut gradients = [const { Vec::new() }; 3];
        for (row, segments) in rows.iter().enumerate() {
            let mut parts = [const { Vec::new() }; 3];
            for segment in segments {
                let part = |saved: &Saved| segment_of(saved.tensor()?, row, segment).map(Saved::full);
                let (inputs, gradient) = ([part(q)?, part(k)?, part(v)?], segment_of(backward.gradient, row, segment)?);
                let of_segment =
                    Backward { inputs: &inputs, output: &Saved::shape(gradient.dims()), gradient: &gradient, needs_gradient: backward.needs_gradient };
                let Some(found) = Kernel::backward(&op, &of_segment)? else { return Ok(None) };
                parts.iter_mut().zip(found).for_each(|(parts, gradient)| parts.extend(gradient));
            }
            gradients.iter_mut().zip(parts).for_each(|(rows, parts)| rows.push(parts));
        }
        let mut found = vec![None; backward.inputs.len()];
        for (input, rows) in gradients.iter().enumerate() {
            found[input] = backward.gradient_of(input, || joined(rows))?;
        }
        Ok(Some(found))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::ir::ops::{Op, OpSpec, PreparedOp};
    use crate::ir::{Dim, Element, TensorType};

    /// A row of segments has the outputs and gradients of the segments in separate rows. Zeros are padding.
    #[test]
    fn segments_equal_separate_rows() {
        let (device, heads, width) = (Device::Cpu, 4, 8);
        let numbers = [[1i64; 70].as_slice(), &[2; 5], &[3; 60], &[0; 15]].concat();
        let (sequence, rows) = (numbers.len(), [0..70, 70..75, 75..135]);
        let mask = Tensor::from_vec([numbers.clone(), vec![1; sequence]].concat(), (2, sequence), &device).unwrap();
        let random = |heads: usize| Tensor::randn(0f32, 1f32, (2, heads, sequence, width), &device).unwrap();
        let (qkv, gradient) = ([random(heads), random(2), random(2)], random(heads));
        let distance = |a: &Tensor, b: &Tensor| (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        // The output, and the gradients of queries, keys and values.
        type Compute<'c> = dyn Fn(&[Tensor], &Tensor) -> Vec<Tensor> + 'c;
        for (window, soft_cap) in [(None, None), (Some(7), None), (None, Some(0.7))] {
            let op = Attention { scale: 0.4, causal: true, window, soft_cap, segments: true, ..Attention::default() };
            let kernel = PreparedOp::new(&Op::Attention(op), &device, DType::F32);
            let plain = Attention { segments: false, ..op };
            let all = |op: &dyn OpSpec, inputs: &[Tensor], gradient: &Tensor| {
                let saved: Vec<Saved> = inputs.iter().cloned().map(Saved::full).collect();
                let output = op.eval(inputs).unwrap();
                let backward = Backward { inputs: &saved, output: &Saved::full(output.clone()), gradient, needs_gradient: &[true, true, true, false] };
                std::iter::once(output).chain(op.backward(&backward).unwrap().into_iter().flatten()).collect::<Vec<_>>()
            };
            let by_definition: &Compute = &|inputs, gradient| all(&op, inputs, gradient);
            let by_kernel: &Compute = &|inputs, gradient| {
                let saved: Vec<Saved> = inputs.iter().cloned().map(Saved::full).collect();
                let output = kernel.forward(inputs).unwrap();
                let backward = Backward { inputs: &saved, output: &Saved::full(output.clone()), gradient, needs_gradient: &[true, true, true, false] };
                std::iter::once(output).chain(kernel.backward(&backward).unwrap().into_iter().flatten()).collect()
            };
            let inputs = [qkv.as_slice(), std::slice::from_ref(&mask)].concat();
            for compute in [by_definition, by_kernel] {
                let found = compute(&inputs, &gradient);
                assert_eq!(found.len(), 4);
                for (row, rows) in rows.iter().cloned().map(|rows| (0, rows)).chain([(1, 0..sequence)]) {
                    let part = |t: &Tensor| t.narrow(0, row, 1).unwrap().narrow(2, rows.start, rows.len()).unwrap().contiguous().unwrap();
                    let expected = all(&plain, &qkv.each_ref().map(part), &part(&gradient));
                    for (found, expected) in found.iter().zip(&expected) {
                        assert!(distance(&part(found), expected) < 2e-5, "{op:?}, row {row}, {rows:?}");
                    }
                }
            }
        }
        let float = TensorType { element: Element::Float, shape: [1, 2, 6, 4].map(Dim::from).to_vec() };
        let segments = Attention { segments: true, causal: true, ..Attention::default() };
        assert!(segments.infer(&[&float, &float, &float]).unwrap_err().contains("segments require causal attention with a mask"));
    }
}
