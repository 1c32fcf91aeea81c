//! Arguments and results of the kernels.

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{D, DType, Device, Result, Storage, Tensor};

use super::launch::{self, Argument, Grid, launch, undefined};
use super::{ColumnGrid, FACTORIZED, LogitLosses, Products, UnitFactors};
use crate::kernel::activation::ActivationFunction;
use crate::kernel::update::AdamW;

/// Threads of a block of an elementwise kernel.
const THREADS: u32 = 256;
/// Rows that a block of a kernel with one warp per row processes.
const WARPS: u64 = 8;
/// Largest number of blocks of a kernel with a loop over elements.
const BLOCKS: u64 = 8192;
/// Threads of a warp, and columns of a block of a kernel that sums columns.
const WARP: u64 = 32;

/// Whether a tensor is on a GPU, has a float dtype of the kernels, and is not empty.
fn is_float_on_gpu(tensor: &Tensor) -> bool {
    tensor.device().is_cuda() && tensor.elem_count() > 0 && matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16)
}

/// Whether kernels exist for tensors: on a GPU, contiguous, with the same float dtype.
fn supported<const N: usize>(tensors: [&Tensor; N]) -> bool {
    tensors.iter().all(|tensor| is_float_on_gpu(tensor) && tensor.is_contiguous() && tensor.dtype() == tensors[0].dtype())
}

fn blocks(count: u64) -> u32 {
    count.clamp(1, u64::from(u32::MAX >> 1)) as u32
}

/// One thread per element, or a loop.
fn by_element(count: usize) -> Grid {
    ((blocks((count as u64).div_ceil(u64::from(THREADS)).min(BLOCKS)), 1), (THREADS, 1))
}

/// One warp per row.
fn by_warp(rows: usize) -> Grid {
    ((blocks((rows as u64).div_ceil(WARPS)), 1), ((WARPS * WARP) as u32, 1))
}

/// Sums of columns, over chunks of rows.
fn by_columns(width: usize, chunks: u32) -> Grid {
    ((blocks((width as u64).div_ceil(WARP)), chunks), (WARP as u32, 8))
}

/// Sums over chunks of rows: the grid, the number of chunks, and the rows of each.
fn by_chunk(rows: usize, width: usize) -> (Grid, usize, u64) {
    let each = (rows as u64).div_ceil(64).max(256);
    let chunks = (rows as u64).div_ceil(each);
    (by_columns(width, chunks as u32), chunks as usize, each)
}

/// Number of rows and columns of a tensor whose last axis is the columns.
fn matrix(tensor: &Tensor) -> Result<(usize, usize)> {
    let width = tensor.dim(D::Minus1)?;
    Ok((tensor.elem_count() / width.max(1), width))
}

fn size(count: usize) -> Argument<'static> {
    Argument::Size(count as u64)
}

fn number(count: usize) -> Result<Argument<'static>> {
    match u32::try_from(count) {
        Ok(count) => Ok(Argument::Number(count)),
        Err(_) => candle_core::bail!("an axis of {count} elements is too long for the GPU's kernels"),
    }
}

fn real(value: f64) -> Argument<'static> {
    Argument::Real(value as f32)
}

pub(super) fn count() -> Result<Option<usize>> {
    Ok(CudaContext::device_count().ok().and_then(|count| usize::try_from(count).ok()))
}

pub(super) fn open(number: usize) -> Result<Option<Device>> {
    launch::open(number).map(Some)
}

pub(super) fn name(device: &Device) -> Result<Option<(usize, Option<String>)>> {
    let Device::Cuda(cuda) = device else { return Ok(None) };
    let context = cuda.cuda_stream().context().clone();
    Ok(Some((context.ordinal(), context.name().ok())))
}

pub(super) fn take_peak_memory(device: &Device) -> Result<Option<u64>> {
    Ok(launch::take_peak_memory(device))
}

pub(super) fn copy_to_host(tensor: &Tensor, values: &mut [f32]) -> Result<Option<()>> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(storage), Some((first, end))) = (&*storage, layout.contiguous_offsets()) else { return Ok(None) };
    let CudaStorageSlice::F32(slice) = &storage.slice else { return Ok(None) };
    if end - first != values.len() {
        return Ok(None);
    }
    let stream = storage.device.cuda_stream();
    match stream.memcpy_dtoh(&slice.slice(first..end), values).and_then(|()| stream.synchronize()) {
        Ok(()) => Ok(Some(())),
        Err(e) => candle_core::bail!("a tensor could not be copied from the GPU: {e}"),
    }
}

/// The kernels' number of a function, in the order of `Function` in `kernels.cu`.
fn function_number(function: ActivationFunction) -> Option<Argument<'static>> {
    let functions = [
        ActivationFunction::Relu,
        ActivationFunction::Gelu,
        ActivationFunction::GeluTanh,
        ActivationFunction::Silu,
        ActivationFunction::Sigmoid,
        ActivationFunction::Tanh,
    ];
    functions.iter().position(|known| *known == function).map(|at| Argument::Number(at as u32))
}

pub(super) fn activate(function: ActivationFunction, x: &Tensor) -> Result<Option<Tensor>> {
    let Some(function) = function_number(function).filter(|_| supported([x])) else { return Ok(None) };
    let out = undefined(x.shape(), x.dtype(), x.device())?;
    launch("activate", x.dtype(), by_element(x.elem_count()), &[x.into(), (&out).into(), size(x.elem_count()), function])?;
    Ok(Some(out))
}

pub(super) fn activate_back(function: ActivationFunction, operand: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
    let Some(function) = function_number(function).filter(|_| supported([operand, gradient]) && operand.dims() == gradient.dims()) else { return Ok(None) };
    let out = undefined(operand.shape(), operand.dtype(), operand.device())?;
    let count = operand.elem_count();
    launch("activate_back", out.dtype(), by_element(count), &[operand.into(), gradient.into(), (&out).into(), size(count), function])?;
    Ok(Some(out))
}

fn combine(kernel: &'static str, a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
    if !supported([a, b]) || a.dims() != b.dims() {
        return Ok(None);
    }
    let out = undefined(a.shape(), a.dtype(), a.device())?;
    launch(kernel, a.dtype(), by_element(a.elem_count()), &[a.into(), b.into(), (&out).into(), size(a.elem_count())])?;
    Ok(Some(out))
}

pub(super) fn add(a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
    combine("add", a, b)
}

pub(super) fn multiply(a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
    combine("multiply", a, b)
}

pub(super) fn add_bias(rows: &Tensor, bias: &Tensor) -> Result<Option<()>> {
    let (count, width) = matrix(rows)?;
    if !supported([rows, bias]) || bias.elem_count() != width {
        return Ok(None);
    }
    let grid = ((blocks((count as u64).min(BLOCKS)), 1), (THREADS, 1));
    launch("add_bias", rows.dtype(), grid, &[rows.into(), bias.into(), size(count), number(width)?])?;
    Ok(Some(()))
}

/// Strides of the first three of four axes, if the last is contiguous.
fn strides(x: &Tensor) -> Option<[Argument<'static>; 3]> {
    match x.stride() {
        [a, b, c, 1] => Some([size(*a), size(*b), size(*c)]),
        _ => None,
    }
}

pub(super) fn contiguous(x: &Tensor) -> Result<Option<Tensor>> {
    let (Some([sa, sb, sc]), [_, b, c, width]) = (strides(x).filter(|_| is_float_on_gpu(x)), x.dims()) else { return Ok(None) };
    let (rows, out) = (x.elem_count() / width, undefined(x.shape(), x.dtype(), x.device())?);
    // Rows are copied in units of 16 bytes if they consist of them.
    let unit = 16 / x.dtype().size_in_bytes();
    let offsets = [*width, x.layout().start_offset(), x.stride()[0], x.stride()[1], x.stride()[2]];
    if offsets.iter().all(|offset| offset.is_multiple_of(unit)) {
        let (count, [sa, sb, sc]) = (x.elem_count() / unit, [0, 1, 2].map(|axis| size(x.stride()[axis] / unit)));
        let arguments = [x.into(), (&out).into(), number(count)?, number(*b)?, number(*c)?, number(width / unit)?, sa, sb, sc];
        launch("copy_wide", x.dtype(), by_element(count), &arguments)?;
    } else {
        let arguments = [x.into(), (&out).into(), size(rows), number(*b)?, number(*c)?, number(*width)?, sa, sb, sc];
        launch("copy_strided", x.dtype(), by_warp(rows), &arguments)?;
    }
    Ok(Some(out))
}

pub(super) fn rotate(x: &Tensor, (cos, sin): (&Tensor, &Tensor), sign: f64) -> Result<Option<Tensor>> {
    let (Some([sa, sb, sc]), [_, b, positions, width]) = (strides(x).filter(|_| is_float_on_gpu(x)), x.dims()) else { return Ok(None) };
    let turned = 2 * cos.dim(D::Minus1)?;
    if !supported([cos, sin]) || cos.dtype() != DType::F32 || cos.dims() != [*positions, turned / 2] || sin.dims() != cos.dims() || turned > *width {
        return Ok(None);
    }
    let (rows, out) = (x.elem_count() / width, undefined(x.shape(), x.dtype(), x.device())?);
    let operands = [x.into(), cos.into(), sin.into(), (&out).into(), size(rows)];
    let sizes = [number(*b)?, number(*positions)?, number(*width)?, number(turned)?, real(sign), sa, sb, sc];
    launch("rotate", x.dtype(), by_warp(rows), &[&operands[..], &sizes].concat())?;
    Ok(Some(out))
}

/// Adds up the sums of chunks `[chunks, width]` in f32.
fn total(chunks: Tensor, dtype: DType) -> Result<Tensor> {
    let (count, width) = matrix(&chunks)?;
    if count == 1 {
        return chunks.flatten_all()?.to_dtype(dtype);
    }
    let out = undefined(width, DType::F32, chunks.device())?;
    launch("column_sums", DType::F32, by_columns(width, 1), &[(&chunks).into(), (&out).into(), size(count), number(width)?, size(count)])?;
    out.to_dtype(dtype)
}

pub(super) fn column_sums(tensor: &Tensor, width: usize) -> Result<Option<Tensor>> {
    let rows = &if is_float_on_gpu(tensor) { tensor.contiguous()? } else { return Ok(None) };
    let count = rows.elem_count() / width.max(1);
    let (grid, chunks, each) = by_chunk(count, width);
    let out = undefined((chunks, width), DType::F32, rows.device())?;
    launch("column_sums", rows.dtype(), grid, &[rows.into(), (&out).into(), size(count), number(width)?, Argument::Size(each)])?;
    total(out, rows.dtype()).map(Some)
}

pub(super) fn norm_back(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    (epsilon, offset, centred): (f64, f64, bool),
    sums: bool,
) -> Result<Option<(Tensor, Option<[Tensor; 2]>)>> {
    let (rows, width) = matrix(x)?;
    if !supported([x, weight, gradient]) || weight.dims() != [width] || gradient.dims() != x.dims() {
        return Ok(None);
    }
    let (dtype, device) = (x.dtype(), x.device());
    let (out, moments) = (undefined(x.shape(), dtype, device)?, undefined((rows, 2), DType::F32, device)?);
    let operands = [x.into(), gradient.into(), weight.into(), (&out).into(), (&moments).into()];
    let sizes = [size(rows), number(width)?, real(epsilon), real(offset), Argument::Number(centred.into())];
    launch("norm_back", dtype, by_warp(rows), &[operands, sizes].concat())?;
    if !sums {
        return Ok(Some((out, None)));
    }
    let (grid, chunks, each) = by_chunk(rows, width);
    let parts = [undefined((chunks, width), DType::F32, device)?, undefined((chunks, width), DType::F32, device)?];
    let operands = [x.into(), gradient.into(), (&moments).into(), (&parts[0]).into(), (&parts[1]).into()];
    launch("norm_sums", dtype, grid, &[&operands[..], &[size(rows), number(width)?, Argument::Size(each)]].concat())?;
    let [of_weight, of_bias] = parts;
    Ok(Some((out, Some([total(of_weight, dtype)?, total(of_bias, dtype)?]))))
}

pub(super) fn attention_softmax(products: &Tensor, mask: Option<&Tensor>, at: Products) -> Result<Option<()>> {
    let (rows, keys) = matrix(products)?;
    let is_mask = |mask: &Tensor| {
        let covers = mask.rank() == 2 && mask.dim(0)? * at.rows_per_sample == rows && at.start + keys <= mask.dim(1)?;
        Ok::<_, candle_core::Error>(mask.device().is_cuda() && mask.dtype() == DType::I64 && mask.is_contiguous() && covers)
    };
    if !supported([products]) || at.queries == 0 || !mask.map_or(Ok(true), is_mask)? {
        return Ok(None);
    }
    let width = mask.map_or(Ok(0), |mask| mask.dim(1))?;
    let operands = [products.into(), Argument::Pointer(mask), size(rows)];
    let sizes = [number(at.rows_per_sample)?, number(keys)?, number(at.queries)?, number(at.first)?, number(at.start)?, number(width)?];
    let rules = [real(at.scale), Argument::Number(at.causal.into()), number(at.window.unwrap_or(0))?];
    launch("attention_softmax", products.dtype(), by_warp(rows), &[&operands[..], &sizes, &rules].concat())?;
    Ok(Some(()))
}

pub(super) fn softmax_back(probabilities: &Tensor, gradient: &Tensor, factor: f64) -> Result<Option<()>> {
    if !supported([probabilities, gradient]) || probabilities.dims() != gradient.dims() {
        return Ok(None);
    }
    let (rows, width) = matrix(gradient)?;
    let arguments = [probabilities.into(), gradient.into(), size(rows), number(width)?, real(factor)];
    launch("softmax_back", gradient.dtype(), by_warp(rows), &arguments)?;
    Ok(Some(()))
}

pub(super) fn adamw(step: &AdamW, parameter: &Tensor, gradient: &Tensor, mean: &Tensor, square: &Tensor) -> Result<Option<()>> {
    let dims = parameter.dims();
    let is_state = supported([parameter, mean, square]) && parameter.dtype() == DType::F32 && mean.dims() == dims && square.dims() == dims;
    if !is_state || !supported([gradient]) || gradient.dims() != dims {
        return Ok(None);
    }
    let count = parameter.elem_count();
    let operands = [parameter.into(), gradient.into(), mean.into(), square.into(), size(count)];
    let coefficients = [step.shrink, step.mean_share, step.square_left, step.square_share, step.root, step.epsilon, step.size].map(Argument::Real);
    launch("adamw", gradient.dtype(), by_element(count), &[&operands[..], &coefficients].concat())?;
    Ok(Some(()))
}

/// Largest number of blocks that sum the squares of a tensor.
const SQUARES: usize = 512;

pub(super) fn sums_of_squares(tensors: &[&Tensor]) -> Result<Option<Tensor>> {
    let Some(first) = tensors.first().filter(|_| tensors.iter().all(|tensor| supported([tensor]))) else { return Ok(None) };
    let parts = Tensor::zeros((tensors.len(), SQUARES), DType::F64, first.device())?;
    for (at, tensor) in tensors.iter().enumerate() {
        let count = tensor.elem_count();
        let grid = ((blocks(count.div_ceil(THREADS as usize * 16).min(SQUARES) as u64), 1), (THREADS, 1));
        launch("squares", tensor.dtype(), grid, &[(*tensor).into(), (&parts.get(at)?).into(), size(count)])?;
    }
    parts.sum(1).map(Some)
}

pub(super) fn sum_rows_by_index(rows: &Tensor, indices: &Tensor, count: usize) -> Result<Option<Tensor>> {
    let (n, width) = matrix(rows)?;
    if !supported([rows]) || indices.elem_count() != n {
        return Ok(None);
    }
    let (dtype, device, grid) = (rows.dtype(), rows.device(), ((blocks(n as u64), 1), (256, 1)));
    let indices = indices.to_dtype(DType::I64)?.contiguous()?;
    let (sums, owners) = (undefined((n, width), DType::F32, device)?, undefined(n, DType::U8, device)?);
    let (of_chunks, sizes) = ([(&sums).into(), (&owners).into()], [number(n)?, number(width)?, size(count)]);
    launch("sum_rows", dtype, grid, &[&[(&indices).into(), rows.into()][..], &of_chunks, &sizes].concat())?;
    let out = Tensor::zeros((count, width), dtype, device)?;
    launch("merge_rows", dtype, grid, &[&[(&indices).into()][..], &of_chunks, &[(&out).into()], &sizes].concat())?;
    Ok(Some(out))
}

pub(super) fn logit_losses(logits: &Tensor, losses: LogitLosses) -> Result<Option<Tensor>> {
    let (rows, width) = matrix(logits)?;
    let is_teacher = |teacher: &Tensor| supported([logits, teacher]) && teacher.dims() == [rows, losses.classes];
    let are_targets = |targets: &Tensor| targets.device().is_cuda() && targets.dtype() == DType::U32 && targets.is_contiguous() && targets.dims() == [rows];
    let (teacher, temperature, soft) = losses.teacher.map_or((None, 1.0, 0.0), |(teacher, temperature, factor)| (Some(teacher), temperature, factor));
    let (targets, smoothing, hard) = losses.targets.map_or((None, 0.0, 0.0), |(targets, smoothing, factor)| (Some(targets), smoothing, factor));
    if !supported([logits]) || losses.classes > width || !teacher.is_none_or(is_teacher) || !targets.is_none_or(are_targets) {
        return Ok(None);
    }
    let out = undefined((rows, 2), DType::F32, logits.device())?;
    let operands = [logits.into(), Argument::Pointer(teacher), Argument::Pointer(targets), (&out).into(), number(width)?, number(losses.classes)?];
    let factors = [real(1.0 / temperature), real(soft), real(hard), real(smoothing)];
    launch("logit_losses", logits.dtype(), ((blocks(rows as u64), 1), (THREADS, 1)), &[&operands[..], &factors].concat())?;
    Ok(Some(out))
}

/// Largest number of columns of a block that is rounded.
const COLUMNS: usize = 128;

/// The arguments of a grid, if kernels exist for blocks `[columns, rows]` and a square matrix of the columns.
fn column_grid<'t>(square: &Tensor, blocks: &[&Tensor], grid: ColumnGrid<'t>) -> Result<Option<[Argument<'t>; 7]>> {
    let ColumnGrid { scales, zeros, groups, zeroed, bounds: (lowest, highest) } = grid;
    let ([columns, rows], [_, per_row]) = (blocks[0].dims(), scales.dims()) else { return Ok(None) };
    let is_float = |tensor: &&Tensor| supported([tensor]) && tensor.dtype() == DType::F32;
    let is =
        |tensor: &Tensor, dtype: DType, dims: &[usize]| tensor.device().is_cuda() && tensor.is_contiguous() && tensor.dtype() == dtype && tensor.dims() == dims;
    let are_floats = blocks.iter().chain([&square, &scales, &zeros]).all(is_float);
    let have_shapes = blocks.iter().all(|block| block.dims() == [*columns, *rows]) && square.dims() == [*columns, *columns];
    let is_grid = scales.dims() == [*rows, *per_row] && zeros.dims() == scales.dims() && is(groups, DType::U32, &[*columns]);
    if !are_floats || !have_shapes || !is_grid || *columns > COLUMNS || !zeroed.is_none_or(|zeroed| is(zeroed, DType::U8, &[*columns, *rows])) {
        return Ok(None);
    }
    let bounds = [Argument::Real(lowest), Argument::Real(highest)];
    Ok(Some([scales.into(), zeros.into(), groups.into(), Argument::Pointer(zeroed), number(*per_row)?, bounds[0], bounds[1]]))
}

pub(super) fn round_columns(operands: [&Tensor; 3], grid: ColumnGrid, values: &Tensor, errors: &Tensor) -> Result<Option<()>> {
    let [targets, weights, ratios] = operands;
    let Some(grid) = column_grid(ratios, &[targets, weights, values, errors], grid)? else { return Ok(None) };
    let (width, rows) = values.dims2()?;
    let arguments = [targets.into(), weights.into(), ratios.into(), values.into(), errors.into(), size(rows), number(width)?];
    launch("round_columns", DType::F32, by_warp(rows), &[&arguments[..], &grid].concat())?;
    Ok(Some(()))
}

pub(super) fn descend_columns(operands: [&Tensor; 2], grid: ColumnGrid, levels: &Tensor, errors: &Tensor, moved: &Tensor) -> Result<Option<()>> {
    let [gradients, hessian] = operands;
    let Some(grid) = column_grid(hessian, &[gradients, levels, errors], grid)? else { return Ok(None) };
    if !moved.device().is_cuda() || moved.dtype() != DType::U32 || moved.elem_count() != 1 {
        return Ok(None);
    }
    let (width, rows) = levels.dims2()?;
    let arguments = [gradients.into(), hessian.into(), levels.into(), errors.into(), moved.into(), size(rows), number(width)?];
    launch("descend_columns", DType::F32, by_warp(rows), &[&arguments[..], &grid].concat())?;
    Ok(Some(()))
}

pub(super) fn product(a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
    let Some(shape) = product_shape(a, b) else { return Ok(None) };
    let out = undefined(shape, a.dtype(), a.device())?;
    Ok(launch::product([&out, a, b], (1.0, 0.0))?.then_some(out))
}

pub(super) fn add_product(sum: &Tensor, a: &Tensor, b: &Tensor, factor: f64) -> Result<Option<()>> {
    let Some((rows, columns)) = product_shape(a, b) else { return Ok(None) };
    if !sum.device().is_cuda() || sum.dtype() != a.dtype() || sum.dims() != [rows, columns] {
        return Ok(None);
    }
    Ok(launch::product([sum, a, b], (factor, 1.0))?.then_some(()))
}

/// The shape of the product of two factors; `None` if their dtypes differ or their sizes do not match.
fn product_shape(a: &Tensor, b: &Tensor) -> Option<(usize, usize)> {
    let (Ok((rows, inner)), Ok((of_b, columns))) = (a.dims2(), b.dims2()) else { return None };
    (is_factor(a) && is_factor(b) && a.dtype() == b.dtype() && inner == of_b).then_some((rows, columns))
}

/// Whether a matrix may be a factor of a product: on a GPU, not empty, in 32 or 64 bits.
fn is_factor(matrix: &Tensor) -> bool {
    matrix.device().is_cuda() && matrix.elem_count() > 0 && matches!(matrix.dtype(), DType::F32 | DType::F64)
}

pub(super) fn unit_factors(matrix: &Tensor, added: f64) -> Result<Option<UnitFactors>> {
    let ((size, columns), device, dtype) = (matrix.dims2()?, matrix.device(), matrix.dtype());
    if !is_factor(matrix) || !matrix.is_contiguous() || size != columns {
        return Ok(None);
    }
    let (ratios, costs) = (Tensor::zeros((size, size), dtype, device)?, undefined(size, DType::F64, device)?);
    let (added, scaled) = (Tensor::new(&[added], device)?, undefined((size, FACTORIZED), dtype, device)?);
    let mut inverses = Vec::new();
    for first in (0..size).step_by(FACTORIZED).rev() {
        let width = FACTORIZED.min(size - first);
        let square = |of: &Tensor| of.narrow(0, first, width)?.narrow(1, first, width);
        let (inverse, right) = (undefined((width, width), DType::F32, device)?, undefined((2, width, width), dtype, device)?);
        let (from, to, diagonal) = (square(matrix)?, square(&ratios)?, costs.narrow(0, first, width)?);
        let operands = [(&from).into(), (&to).into(), (&inverse).into(), (&diagonal).into(), (&right).into()];
        launch("factor_square", dtype, ((1, 1), (THREADS, 1)), &[&operands[..], &[number(size)?, number(width)?, (&added).into()]].concat())?;
        if first > 0 {
            let above = |of: &Tensor| of.narrow(0, 0, first)?.narrow(1, first, width);
            let (panel, scaled) = (above(&ratios)?, scaled.narrow(0, 0, first)?.narrow(1, 0, width)?);
            let rest = matrix.narrow(0, 0, first)?.narrow(1, 0, first)?;
            let done = launch::product([&panel, &above(matrix)?, &right.get(0)?], (1.0, 0.0))?
                && launch::product([&scaled, &above(matrix)?, &right.get(1)?], (1.0, 0.0))?
                && launch::product([&rest, &scaled, &panel.t()?], (-1.0, 1.0))?;
            if !done {
                candle_core::bail!("a matrix of {size} columns cannot be factorized on the GPU");
            }
        }
        inverses.push(inverse);
    }
    inverses.reverse();
    Ok(Some(UnitFactors { ratios: ratios.to_dtype(DType::F32)?, inverses, costs }))
}
