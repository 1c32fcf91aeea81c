//! Assembles the tensors of files into logical weights. The inverse of
//! [`StorageFormat`](super::StorageFormat).

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::sync::Arc;

use super::bits_and_bytes;
use super::block::greatest_common_divisor;
use super::fp8;
use super::gptq;
use super::nvfp4;
use super::packed_experts;
use super::quantization_spec::row;
use super::quantized_reader::positive;
use super::sparse::{self, IntegerValues, SparseFile};
use super::{
    ActivationScheme, Checkpoint, Codes, DType, Encoding, FloatFormat, Granularity, QuantizationSpec, RawTensor, ScaleFormat, Static, Weight, WeightSource,
    Weights,
};
use crate::error::{Error, Result};
use crate::files;
use crate::kernel::packing;

/// The encoding of a quantized weight as specified in a configuration. The stored tensors alone can be
/// ambiguous.
#[derive(Debug, Clone, Copy, Default)]
pub struct StatedEncoding {
    /// Width of the integers: an int8 tensor can contain narrower integers, and packed words of short
    /// rows fit several widths.
    pub bits: Option<u8>,
    /// Granularity of the scales: block and group sizes that do not divide the matrix cannot be derived
    /// from the number of scales.
    pub granularity: Option<Granularity>,
    /// Dtype of the dequantized values, if that of the scales does not determine it; by default the most
    /// common one of the checkpoint.
    pub floats: Option<DType>,
}

impl Weights {
    /// Assembles the tensors of a checkpoint into logical weights: codes with their scales, sparse
    /// values with their masks, and all others unchanged.
    pub fn from_checkpoint(checkpoint: Checkpoint) -> Result<Weights> {
        Self::from_checkpoint_with(checkpoint, &|_| StatedEncoding::default())
    }

    /// As [`from_checkpoint`](Weights::from_checkpoint), with the encodings that a configuration
    /// specifies.
    pub fn from_checkpoint_with(checkpoint: Checkpoint, stated: &dyn Fn(&str) -> StatedEncoding) -> Result<Weights> {
        let mut positions = BTreeMap::new();
        for (name, tensor) in &checkpoint.tensors {
            let (path, begin, _) = tensor.location();
            let file = checkpoint.files.iter().position(|file| file == path).filter(|_| files::is_remote(path));
            positions.extend(file.map(|file| (name.clone(), (file, begin))));
        }
        let mut weights = assemble(checkpoint, stated)?;
        for weight in weights.by_name.values_mut() {
            weight.remote_position = weight.stored_as.iter().filter_map(|name| positions.get(name).copied()).min();
        }
        Ok(weights)
    }
}

/// Assembles the tensors of a checkpoint into logical weights. `stated` returns the configured encoding
/// of a weight.
pub(super) fn assemble(mut checkpoint: Checkpoint, stated: &dyn Fn(&str) -> StatedEncoding) -> Result<Weights> {
    let mut weights = Weights::default();
    let masked = |name: &str| !checkpoint.metadata.contains_key(sparse::MARK) && checkpoint.tensors.contains_key(&format!("{name}.bitmask"));
    if let Some(name) = checkpoint.tensors.keys().find_map(|name| name.strip_suffix(".compressed").filter(|name| masked(name))) {
        return Err(Error::tensor(
            name,
            "uses the sparse bitmask format of compressed-tensors, which is not supported",
            "start from the original checkpoint, or decompress this one with compressed-tensors 0.14 or older (ModelCompressor.decompress_model)",
        ));
    }
    let floats = most_common_float(&checkpoint);
    let mut sparse_values = Vec::new();
    if let Some(version) = checkpoint.metadata.remove(sparse::MARK) {
        if version != sparse::VERSION {
            let file = checkpoint.files.first().map_or(String::new(), |path| format!("{}: ", path.display()));
            return Err(Error::Unsupported {
                what: format!("{file}sparse layout version {version}"),
                hint: format!("this version of compress reads layout {}", sparse::VERSION),
            });
        }
        let names: Vec<String> = checkpoint.tensors.keys().filter_map(|name| name.strip_suffix(".bitmask")).map(str::to_owned).collect();
        for name in names {
            let values = SparseFile::take(&mut checkpoint, &name)?;
            sparse_values.push((name, values));
        }
    }
    for (name, values) in sparse_values {
        let bytes = values.bytes();
        let names = [".values", ".shape", ".bitmask"].map(|suffix| format!("{name}{suffix}")).to_vec();
        let codes = Codes::from_stored(values.dtype(), false, stated(&name).bits);
        let weight = if let Some(codes) = codes.filter(|_| checkpoint.tensors.contains_key(&format!("{name}_scale"))) {
            let shape = values.shape.clone();
            integer(&mut checkpoint, &name, shape, (codes, stated(&name)), IntegerValues::Sparse(values), floats)?
        } else {
            Weight::new(values.dtype(), values.shape.clone(), Encoding::Dense, Arc::new(values))
        };
        insert(&mut weights, name, weight, bytes, names)?;
    }
    let of_other_tools = [
        gptq::take(&mut checkpoint)?,
        packed_experts::take(&mut checkpoint)?,
        bits_and_bytes::take(&mut checkpoint, floats)?,
        // Their scales have the type of FP8 codes.
        nvfp4::take(&mut checkpoint, floats)?,
        fp8::take(&mut checkpoint, floats)?,
    ];
    for (name, weight) in of_other_tools.into_iter().flatten() {
        insert(&mut weights, name, weight, 0, Vec::new())?;
    }
    let palettized: Vec<String> = checkpoint.tensors.keys().filter_map(|name| name.strip_suffix(PALETTE)).map(str::to_owned).collect();
    for name in palettized.into_iter().filter(|name| checkpoint.tensors.contains_key(&format!("{name}_packed"))).collect::<Vec<_>>() {
        let (weight, names, bytes) = palettized_weight(&mut checkpoint, &name)?;
        insert(&mut weights, name, weight, bytes, names)?;
    }
    let quantized: Vec<String> = checkpoint.tensors.keys().filter_map(|name| name.strip_suffix("_scale")).map(str::to_owned).collect();
    for name in quantized {
        let (packed, plain) = (format!("{name}_packed"), name.clone());
        // Quantized weights without elements, and their scales, are read as plain tensors.
        let full = |t: &&RawTensor| t.elements() > 0;
        let bits = |t: &RawTensor, packed: bool| if packed { float_bits(&checkpoint, &name, t) } else { stated(&name).bits };
        let codes = |t: RawTensor, packed| Some((Codes::from_stored(t.dtype, packed, bits(&t, packed))?, t));
        let coded = |name: &str, packed| checkpoint.tensors.get(name).filter(full).cloned().and_then(|t| codes(t, packed));
        if let Some(words) = checkpoint.tensors.get(&packed).filter(full).filter(|t| t.dtype == DType::I32).cloned() {
            let shape_name = format!("{name}_shape");
            let (shape, width) = packed_shape(&checkpoint, &name, &words, stated(&name).bits)?;
            checkpoint.tensors.remove(&packed);
            checkpoint.tensors.remove(&shape_name);
            let bytes = words.bytes().saturating_add(16);
            let (codes, values) = (Codes::Integer(width), IntegerValues::Plain { values: words, packed: true, shape: shape.clone() });
            let weight = integer(&mut checkpoint, &name, shape, (codes, stated(&name)), values, floats)?;
            insert(&mut weights, name, weight, bytes, vec![packed, shape_name])?;
        } else if let Some((codes, values)) = coded(&packed, true) {
            checkpoint.tensors.remove(&packed);
            let (bytes, mut shape) = (values.bytes(), values.shape.clone());
            if let [_, columns] = &mut shape[..] {
                *columns = columns.saturating_mul(8).checked_div(codes.bits().into()).unwrap_or(0);
            }
            let values = IntegerValues::Plain { values, packed: true, shape: shape.clone() };
            let weight = integer(&mut checkpoint, &name, shape, (codes, stated(&name)), values, floats)?;
            insert(&mut weights, name, weight, bytes, vec![packed])?;
        } else if let Some((codes, values)) = coded(&plain, false) {
            checkpoint.tensors.remove(&plain);
            let (bytes, shape) = (values.bytes(), values.shape.clone());
            let values = IntegerValues::Plain { values, packed: false, shape: shape.clone() };
            let weight = integer(&mut checkpoint, &name, shape, (codes, stated(&name)), values, floats)?;
            insert(&mut weights, name, weight, bytes, vec![plain])?;
        }
    }
    require_assembled(&checkpoint)?;
    for (name, tensor) in std::mem::take(&mut checkpoint.tensors) {
        let bytes = tensor.bytes();
        let weight = Weight::new(tensor.dtype, tensor.shape.clone(), Encoding::Dense, Arc::new(tensor));
        insert(&mut weights, name.clone(), weight, bytes, vec![name])?;
    }
    for (name, weight) in checkpoint.strided {
        let bytes = (weight.elements() as u64).saturating_mul(weight.dtype.bitsize() as u64 / 8);
        insert(&mut weights, name.clone(), weight, bytes, vec![name])?;
    }
    weights.metadata = checkpoint.metadata;
    weights.folders = checkpoint.folders;
    Ok(weights)
}

fn insert(weights: &mut Weights, name: String, mut weight: Weight, bytes: u64, mut stored_as: Vec<String>) -> Result<()> {
    weight.stored_bytes = weight.stored_bytes.saturating_add(bytes);
    weight.stored_as.append(&mut stored_as);
    if let Some(other) = weights.by_name.get(&name) {
        let parts = |w: &Weight| w.stored_as.join("`, `");
        return Err(Error::tensor(
            &name,
            format!("is stored twice, as `{}` and as `{}`", parts(other), parts(&weight)),
            "write the file again with only one of the two",
        ));
    }
    weights.by_name.insert(name, weight);
    Ok(())
}

/// Rejects the remaining parts of quantized weights: as dense tensors, their values would be wrong.
fn require_assembled(checkpoint: &Checkpoint) -> Result<()> {
    let hint = "the checkpoint is incomplete, or has a format that is not supported; save it again, or start from the original checkpoint";
    let contains = |name: &str| checkpoint.tensors.contains_key(name);
    for (name, tensor) in checkpoint.tensors.iter().filter(|(_, tensor)| tensor.elements() > 0) {
        let missing = |part: String| Err(Error::tensor(&part, format!("is missing, but `{name}` contains the codes of a quantized weight"), hint));
        if let Some(weight) = name.strip_suffix("_packed").filter(|weight| weight.ends_with(".weight")) {
            if !contains(&format!("{weight}_scale")) {
                return missing(format!("{weight}_scale"));
            }
            return Err(Error::tensor(name, format!("contains codes of type {}, which is not supported", tensor.dtype), hint));
        }
        if let Some(module) = name.strip_suffix(".qweight") {
            let part = ["scales", "qzeros"].map(|part| format!("{module}.{part}")).into_iter().find(|part| !contains(part));
            return missing(part.unwrap_or_else(|| format!("{module}.scales")));
        }
        if let Some(weight) = name.strip_suffix(PALETTE).filter(|weight| weight.ends_with(".weight")) {
            return missing(format!("{weight}_packed"));
        }
        let is_float = matches!(tensor.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
        if let Some(scale) = ["_scale", "_scale_inv"].map(|suffix| format!("{name}{suffix}")).into_iter().find(|scale| !is_float && contains(scale)) {
            return Err(Error::tensor(name, format!("is of type {} with scales in `{scale}`, which is not supported", tensor.dtype), hint));
        }
    }
    Ok(())
}

/// Suffix of palette (codebook) tensors.
const PALETTE: &str = "_palette";

/// A palettized weight, with the names and the total size of its tensors.
fn palettized_weight(checkpoint: &mut Checkpoint, name: &str) -> Result<(Weight, Vec<String>, u64)> {
    let broken = |reason: String| Error::tensor(name, reason, "write the file again; `compress verify` shows whether it was damaged");
    let names = ["_packed", "_shape", PALETTE].map(|suffix| format!("{name}{suffix}"));
    let [words, shape, palettes] = names.clone().map(|name| checkpoint.tensors.get(&name).cloned());
    let (Some(words), Some(sizes), Some(palettes)) = (words, shape, palettes) else { return Err(broken("palette indices without `weight_shape`".into())) };
    let stored = if sizes.dtype == DType::I64 && sizes.bytes() <= 64 { sizes.read_all()? } else { Vec::new() };
    let shape: Option<Vec<usize>> = stored.as_chunks::<8>().0.iter().map(|d| usize::try_from(i64::from_le_bytes(*d)).ok()).collect();
    let shape = shape.filter(|shape| shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size)).is_some_and(|count| count > 0));
    let (Some(shape), [groups, values]) = (shape, &palettes.shape[..]) else {
        return Err(broken(format!("palettes of shape {:?}, expected two dimensions and a valid `weight_shape`", palettes.shape)));
    };
    let (rows, width) = (shape.first().copied().unwrap_or(1), row(&shape));
    let Some(bits) = (2..=8u8).find(|bits| Codes::Palette(*bits).entries() == *values) else {
        return Err(broken(format!("palettes of {values} values, expected 4 to 256 (2 to 8 bits)")));
    };
    let affine = QuantizationSpec::palettes(bits, rows.div_ceil((*groups).max(1)), &shape, palettes.dtype);
    let floats = matches!(palettes.dtype, DType::F16 | DType::BF16 | DType::F32);
    if !floats || affine.scale_shape(&shape) != palettes.shape || words.dtype != DType::I32 || words.shape != [rows, packing::words(width, bits)] {
        return Err(broken(format!(
            "indices {} {:?} and palettes {} {:?} do not fit a weight of shape {shape:?}",
            words.dtype, words.shape, palettes.dtype, palettes.shape
        )));
    }
    let bytes = [&words, &sizes, &palettes].iter().fold(0u64, |sum, tensor| sum.saturating_add(tensor.bytes()));
    names.iter().for_each(|name| drop(checkpoint.tensors.remove(name)));
    let dtype = palettes.dtype;
    let values = IntegerValues::Plain { values: words, packed: true, shape: shape.clone() };
    let source = sparse::integer_source(values, (palettes, None, width), 1.0, affine.clone(), dtype);
    Ok((Weight::new(dtype, shape, Encoding::Quantized(affine), source), names.to_vec(), bytes))
}

/// Shape and bit width of packed integers. If several widths fit, the configured one is used, otherwise
/// the most common one.
fn packed_shape(checkpoint: &Checkpoint, name: &str, words: &RawTensor, stated: Option<u8>) -> Result<(Vec<usize>, u8)> {
    let broken = |reason: String| Error::tensor(name, reason, "write the file again with compressed-tensors 0.18 or newer");
    let shape = checkpoint.tensors.get(&format!("{name}_shape")).ok_or_else(|| broken("packed weight without `weight_shape`".into()))?;
    let bytes = if shape.bytes() <= 64 { shape.read_all()? } else { Vec::new() };
    let sizes: Option<Vec<usize>> = match shape.dtype {
        DType::I64 => bytes.as_chunks::<8>().0.iter().map(|d| usize::try_from(i64::from_le_bytes(*d)).ok()).collect(),
        DType::I32 => bytes.as_chunks::<4>().0.iter().map(|d| usize::try_from(i32::from_le_bytes(*d)).ok()).collect(),
        _ => None,
    };
    let fits = |row: usize, bits: u8| words.shape.get(1) == Some(&packing::words(row, bits));
    match sizes.as_deref() {
        Some([rows, row]) if words.shape.len() == 2 && words.shape.first() == Some(rows) => {
            let width = stated.into_iter().chain([8, 4, 2, 3, 5, 6, 7]).find(|bits| fits(*row, *bits));
            if let (Some(bits), true) = (width, stated.is_none_or(|bits| fits(*row, bits))) {
                return Ok((vec![*rows, *row], bits));
            }
        }
        _ => {}
    }
    let of = stated.map_or("integers of 2 to 8 bits".into(), |bits| format!("{bits}-bit integers"));
    Err(broken(format!("packed words of shape {:?} do not hold {of} of the stated shape {:?}", words.shape, sizes.unwrap_or_default())))
}

/// Width of packed floats, from the number of scales, whose groups have a fixed size.
fn float_bits(checkpoint: &Checkpoint, name: &str, packed: &RawTensor) -> Option<u8> {
    let scales = checkpoint.tensors.get(&format!("{name}_scale"))?;
    let row = scales.shape.get(1)?.checked_mul(ScaleFormat::from_dtype(scales.dtype)?.group()?)?;
    let has_width = |bits: &u8| packed.shape.get(1) == Some(&packing::stream_bytes(row, *bits));
    FloatFormat::ALL.iter().map(|format| format.bits()).find(has_width)
}

/// Ends of the names of scales.
const SCALES: [&str; 6] = ["scale", "scale_inv", "scale_2", ".SCB", "absmax", "quant_map"];

/// The most common float type of a checkpoint, except for scales. BF16 without any float.
fn most_common_float(checkpoint: &Checkpoint) -> DType {
    let floats = || checkpoint.tensors.iter().filter(|(name, _)| !SCALES.iter().any(|end| name.ends_with(end))).map(|(_, tensor)| tensor.dtype);
    [DType::BF16, DType::F16, DType::F32].into_iter().rev().max_by_key(|of| floats().filter(|dtype| dtype == of).count()).unwrap_or(DType::BF16)
}

/// A quantized weight from its codes, and its scales in the checkpoint. `floats` is the dequantized type
/// if neither the type of the scales nor `stated` determines it.
fn integer(
    checkpoint: &mut Checkpoint,
    name: &str,
    shape: Vec<usize>,
    (codes, stated): (Codes, StatedEncoding),
    values: IntegerValues,
    floats: DType,
) -> Result<Weight> {
    let broken = |reason: String| Error::tensor(name, reason, "write the file again with a tool that follows compressed-tensors");
    let (scale_name, zero_name) = (format!("{name}_scale"), format!("{name}_zero_point"));
    let scales = checkpoint.tensors.remove(&scale_name).ok_or_else(|| broken("no scales".into()))?;
    let zero_points = checkpoint.tensors.remove(&zero_name);
    let (Some(&rows), row) = (shape.first().filter(|_| shape.len() > 1), row(&shape)) else {
        return Err(broken(format!("{codes} codes of shape {shape:?}, not a matrix")));
    };
    let granularity = granularity(name, codes, [rows, row], &scales.shape, stated.granularity)?;
    let columns = match (granularity, stated.granularity) {
        (Granularity::Block(_), Some(Granularity::Block([_, wide]))) => wide.min(row),
        _ => granularity.run(row, row),
    };
    let Some(scale_format) = ScaleFormat::from_dtype(scales.dtype).filter(|format| codes.scale_formats().any(|known| known == *format)) else {
        return Err(broken(format!("scales of type {} for {codes}", scales.dtype)));
    };
    let scale_dtype = scale_format.dtype(scales.dtype);
    if !codes.is_integer() && zero_points.is_some() {
        return Err(broken(format!("zero points for {codes}")));
    }
    if let Some(zero) = &zero_points {
        let groups = scales.elements().checked_div(rows).unwrap_or(0);
        let fits = match zero.dtype {
            DType::I8 => zero.elements() == scales.elements(),
            DType::I32 => granularity != Granularity::Tensor && zero.shape == [packing::words(rows, codes.bits()), groups],
            _ => false,
        };
        if !fits {
            return Err(broken(format!("zero points {} {:?} do not fit scales {:?}", zero.dtype, zero.shape, scales.shape)));
        }
    }
    require_contiguous_groups(checkpoint, name, row, granularity)?;
    let affine = QuantizationSpec { codes, granularity, symmetric: zero_points.is_none(), scale_dtype, activations: ActivationScheme::None };
    let mut stored_as = vec![scale_name];
    stored_as.extend(zero_points.is_some().then_some(zero_name));
    let mut bytes = scales.bytes().saturating_add(zero_points.as_ref().map_or(0, RawTensor::bytes));
    let mut affine = affine;
    let mut global_scale = 1.0;
    if affine.has_global_scale() {
        let global_name = format!("{name}_global_scale");
        let Some(global) = checkpoint.tensors.remove(&global_name) else { return Err(broken(format!("the global scale of {} is missing", codes.label()))) };
        bytes = bytes.saturating_add(global.bytes());
        global_scale = positive(&global_name, &global)?;
        stored_as.push(global_name);
    }
    let activations = codes.static_activations(Static::new(1.0, None));
    if let Some((by, mut names, size)) = input(checkpoint, name, activations.scale_name())? {
        affine.activations = activations.with_parameters(by);
        stored_as.append(&mut names);
        bytes = bytes.saturating_add(size);
    }
    let dtype = affine.value_dtype(stated.floats.unwrap_or(floats));
    let source: Arc<dyn WeightSource> = sparse::integer_source(values, (scales, zero_points, columns), global_scale, affine.clone(), dtype);
    let mut weight = Weight::new(dtype, shape, Encoding::Quantized(affine), source);
    weight.stored_bytes = bytes;
    weight.stored_as = stored_as;
    Ok(weight)
}

/// Rejects groups of non-consecutive inputs (activation ordering), which compressed-tensors before 0.19
/// may write. An order equal to the natural one is dropped.
fn require_contiguous_groups(checkpoint: &mut Checkpoint, name: &str, row: usize, granularity: Granularity) -> Result<()> {
    let order_name = format!("{name}_g_idx");
    let Some(order) = checkpoint.tensors.remove(&order_name) else { return Ok(()) };
    let run = granularity.run(row, row);
    let unset = |group: i32| group == -1;
    let in_order = |(at, group): (usize, &[u8; 4])| {
        let group = i32::from_le_bytes(*group);
        unset(group) || usize::try_from(group).ok() == at.checked_div(run)
    };
    if order.dtype == DType::I32 && order.elements() == row && order.read_all()?.as_chunks::<4>().0.iter().enumerate().all(in_order) {
        return Ok(());
    }
    Err(Error::tensor(
        &order_name,
        "assigns inputs to groups out of order (`actorder: group`), which is not supported",
        "decompress the model with compressed-tensors 0.18 or older, or quantize the original checkpoint again",
    ))
}

/// Quantization of a layer's input, with the names and the total size of its tensors.
fn input(checkpoint: &mut Checkpoint, name: &str, what: &str) -> Result<Option<(Static, Vec<String>, u64)>> {
    let module = name.strip_suffix("weight").unwrap_or(name);
    let [scale_name, zero_name] = [what, "input_zero_point"].map(|part| format!("{module}{part}"));
    let Some(scale) = checkpoint.tensors.get(&scale_name).filter(|t| t.elements() == 1 && t.dtype != DType::I8) else { return Ok(None) };
    let broken = |name: &str, reason: &str| Err(Error::tensor(name, reason, "write the file again with a tool that follows compressed-tensors"));
    let value = positive(&scale_name, scale)?;
    let mut bytes = scale.bytes();
    let zero_point = match checkpoint.tensors.get(&zero_name) {
        None => None,
        Some(zero) if zero.dtype == DType::I8 && zero.elements() == 1 => {
            bytes = bytes.saturating_add(zero.bytes());
            zero.read_all()?.first().map(|byte| *byte as i8)
        }
        Some(_) => return broken(&zero_name, "is not a single int8"),
    };
    checkpoint.tensors.remove(&scale_name);
    let mut names = vec![scale_name];
    names.extend(checkpoint.tensors.remove(&zero_name).map(|_| zero_name));
    Ok(Some((Static::new(value, zero_point), names, bytes)))
}

/// The granularity of a matrix's scales: the configured one, otherwise derived from the shape of the
/// scales.
fn granularity(name: &str, codes: Codes, [rows, row]: [usize; 2], scales: &[usize], stated: Option<Granularity>) -> Result<Granularity> {
    let found = match scales {
        [] | [1] => Some(Granularity::Tensor),
        // A single scale with two dimensions belongs to a single block.
        [1, 1] if rows != 1 && usual_blocks(codes, rows, row, [1, 1]).is_some() => usual_blocks(codes, rows, row, [1, 1]),
        [1, 1] if rows != 1 => Some(Granularity::Tensor),
        [n] | [n, 1] if *n == rows => Some(Granularity::Channel),
        [n, groups] if *n == rows && row.checked_rem(*groups) == Some(0) => row.checked_div(*groups).filter(|size| *size > 0).map(Granularity::Group),
        [high, wide] => usual_blocks(codes, rows, row, [*high, *wide]),
        _ => None,
    };
    let shares = |granularity: Granularity| matches!(granularity, Granularity::Group(_) | Granularity::Block(_));
    let fits = match stated {
        None => found,
        // Groups and blocks longer than a row are cut at its end.
        Some(Granularity::Group(size)) if size > row => found.filter(|found| *found == Granularity::Channel),
        Some(Granularity::Group(size)) => stated.filter(|_| row.checked_rem(size) == Some(0) && scales == [rows, row.checked_div(size).unwrap_or(0)]),
        Some(Granularity::Block([high, wide])) => {
            let wide = wide.min(row);
            let fits = high > 0 && wide > 0 && scales == [rows.div_ceil(high.max(1)), row.div_ceil(wide.max(1))];
            fits.then(|| narrowed(row, wide)).flatten().map(|wide| Granularity::Block([high, wide]))
        }
        Some(Granularity::Tensor) if scales == [1, 1] => stated,
        Some(Granularity::Tensor | Granularity::Channel) => found.filter(|found| !shares(*found)),
    };
    fits.ok_or_else(|| {
        let by = match stated {
            Some(Granularity::Group(size)) => format!(", and config.json states groups of {size} inputs"),
            Some(Granularity::Block([high, wide])) => {
                format!(", and config.json states blocks of {high} x {wide}{}", if narrowed(row, wide).is_some() { "" } else { PARTIAL })
            }
            Some(Granularity::Tensor | Granularity::Channel) => ", and config.json states a scale for each row or tensor".to_owned(),
            None if codes.usual_block().is_some() && scales.len() == 2 => ", and no block sizes are stated in config.json".to_owned(),
            None => String::new(),
        };
        let reason = format!("scales of shape {scales:?} for {codes} codes of shape {:?}{by}", [rows, row]);
        Error::tensor(name, reason, "write the file again with a tool that follows compressed-tensors")
    })
}

/// Suffix of errors about blocks that [`narrowed`] does not support.
const PARTIAL: &str = " (the last block of a row has a number of columns that is not supported)";

/// Number of columns of the largest blocks that divide a row and are parts of blocks of `wide` columns, the
/// last of which may be shorter: narrower blocks with the same scale. `None` if fewer than 8 columns would
/// share a scale.
fn narrowed(row: usize, wide: usize) -> Option<usize> {
    let wide = wide.min(row);
    if row.checked_rem(wide)? == 0 {
        return Some(wide);
    }
    Some(greatest_common_divisor(row, wide)).filter(|common| *common >= 8)
}

/// Blocks of the usual size of a format, if they match the number of scales of a matrix. The last block may
/// have fewer rows.
fn usual_blocks(codes: Codes, rows: usize, row: usize, [high, wide]: [usize; 2]) -> Option<Granularity> {
    let [usual_rows, usual_inputs] = codes.usual_block()?;
    let fits = rows.div_ceil(usual_rows.max(1)) == high && usual_inputs.checked_mul(wide) == Some(row);
    fits.then_some(Granularity::Block([usual_rows, usual_inputs]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FloatFormat;

    #[test]
    fn stated_blocks_and_groups_are_checked_against_the_scales() {
        let found = |codes, sizes, scales: &[usize], stated| granularity("w", codes, sizes, scales, stated).map_err(|e| e.to_string());
        let fp8 = |sizes, scales: &[usize], stated| found(Codes::Float(FloatFormat::E4m3), sizes, scales, stated);
        let block = |high, wide| Granularity::Block([high, wide]);
        // A last block with fewer rows; blocks wider than a row.
        assert_eq!(fp8([192, 192], &[2, 3], Some(block(128, 64))), Ok(block(128, 64)));
        assert_eq!(fp8([192, 64], &[2, 1], Some(block(128, 128))), Ok(block(128, 64)));
        assert_eq!(fp8([192, 256], &[2, 2], None), Ok(block(128, 128)));
        assert_eq!(fp8([128, 128], &[1, 1], None), Ok(block(128, 128)));
        assert_eq!(fp8([128, 128], &[1, 1], Some(Granularity::Tensor)), Ok(Granularity::Tensor));
        // Several block sizes yield this number of blocks.
        assert!(fp8([192, 192], &[2, 3], None).unwrap_err().contains("no block sizes are stated"));
        assert!(fp8([192, 192], &[2, 3], Some(block(128, 128))).unwrap_err().contains("blocks of 128 x 128"));
        assert!(fp8([192, 192], &[2, 3], Some(block(96, 48))).unwrap_err().contains("blocks of 96 x 48"));
        // A last block with fewer columns: narrower blocks, several of which share a scale of the file.
        assert_eq!(fp8([192, 320], &[2, 3], Some(block(128, 128))), Ok(block(128, 64)));
        assert_eq!(found(Codes::Integer(8), [192, 320], &[3, 7], Some(block(64, 48))), Ok(block(64, 16)));
        let error = fp8([192, 322], &[2, 3], Some(block(128, 128))).unwrap_err();
        assert!(error.contains("fp8 codes of shape [192, 322]") && error.contains("is not supported"), "{error}");
        assert!(fp8([192, 192], &[2, 3], Some(Granularity::Channel)).unwrap_err().contains("a scale for each row"));
        let int4 = |scales: &[usize], stated| found(Codes::Integer(4), [8, 64], scales, stated);
        assert_eq!(int4(&[8, 2], None), Ok(Granularity::Group(32)));
        assert_eq!(int4(&[8, 2], Some(Granularity::Group(32))), Ok(Granularity::Group(32)));
        assert_eq!(int4(&[8, 1], Some(Granularity::Group(64))), Ok(Granularity::Group(64)));
        assert_eq!(int4(&[8, 1], Some(Granularity::Group(128))), Ok(Granularity::Channel));
        assert!(int4(&[8, 2], Some(Granularity::Group(16))).unwrap_err().contains("groups of 16"));
        assert!(int4(&[8, 2], Some(Granularity::Channel)).is_err());
    }
}
