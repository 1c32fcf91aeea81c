// Kernels for NVIDIA GPUs. Each exists for f32, f16 and bf16 elements (`_f32`, `_f16`, `_bf16`) and computes in
// f32; those of solver.cuh have one type. Results do not depend on the order in which blocks run: no kernel uses
// floating-point atomics. Pointers are to contiguous tensors; sizes are in elements.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

constexpr unsigned WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ float load(float x) { return x; }
__device__ __forceinline__ float load(__half x) { return __half2float(x); }
__device__ __forceinline__ float load(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T rounded(float x);
template <> __device__ __forceinline__ float rounded<float>(float x) { return x; }
template <> __device__ __forceinline__ __half rounded<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ float warp_sum(float x) {
  for (unsigned step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

__device__ __forceinline__ double warp_sum(double x) {
  for (unsigned step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

// NaN is greater than every number, so that it is not lost.
__device__ __forceinline__ float larger(float a, float b) { return (a > b || isnan(a)) ? a : b; }

__device__ __forceinline__ float warp_max(float x) {
  for (unsigned step = WARP / 2; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

__device__ __forceinline__ uint64_t first_index() { return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ uint64_t index_step() { return (uint64_t)gridDim.x * blockDim.x; }
// With one warp per row: the row of this thread, and the number of its lane.
__device__ __forceinline__ uint64_t warp_row() { return first_index() / WARP; }
__device__ __forceinline__ unsigned lane() { return threadIdx.x % WARP; }

// Elementwise functions

// The order of `Function` in gpu/cuda.rs.
enum Function { RELU, GELU, GELU_TANH, SILU, SIGMOID, TANH };

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float activated(unsigned function, float x) {
  switch (function) {
    case RELU: return x > 0.f || isnan(x) ? x : 0.f;
    case GELU: return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
    case GELU_TANH: return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case SILU: return x * sigmoid(x);
    case SIGMOID: return sigmoid(x);
    default: return tanhf(x);
  }
}

// The derivative at the argument x; for SIGMOID and TANH, x is the result instead.
__device__ __forceinline__ float derivative(unsigned function, float x) {
  switch (function) {
    case RELU: return x > 0.f ? 1.f : 0.f;
    case GELU: return 0.5f * (1.f + erff(x * 0.7071067811865476f)) + x * 0.3989422804014327f * expf(-0.5f * x * x);
    case GELU_TANH: {
      float t = tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x));
      return 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * 0.7978845608028654f * (1.f + 3.f * 0.044715f * x * x);
    }
    case SILU: {
      float s = sigmoid(x);
      return s * (1.f + x * (1.f - s));
    }
    case SIGMOID: return x * (1.f - x);
    default: return 1.f - x * x;
  }
}

template <typename T> __device__ void activate(const T *x, T *y, uint64_t count, unsigned function) {
  for (uint64_t i = first_index(); i < count; i += index_step()) y[i] = rounded<T>(activated(function, load(x[i])));
}

template <typename T> __device__ void activate_back(const T *x, const T *gradient, T *out, uint64_t count, unsigned function) {
  for (uint64_t i = first_index(); i < count; i += index_step()) out[i] = rounded<T>(derivative(function, load(x[i])) * load(gradient[i]));
}

template <typename T> __device__ void add(const T *a, const T *b, T *out, uint64_t count) {
  for (uint64_t i = first_index(); i < count; i += index_step()) out[i] = rounded<T>(load(a[i]) + load(b[i]));
}

template <typename T> __device__ void multiply(const T *a, const T *b, T *out, uint64_t count) {
  for (uint64_t i = first_index(); i < count; i += index_step()) out[i] = rounded<T>(load(a[i]) * load(b[i]));
}

// Adds a bias [width] to rows in place, one block per row.
template <typename T> __device__ void add_bias(T *rows, const T *bias, uint64_t count, unsigned width) {
  for (uint64_t row = blockIdx.x; row < count; row += gridDim.x)
    for (unsigned i = threadIdx.x; i < width; i += blockDim.x) rows[row * width + i] = rounded<T>(load(rows[row * width + i]) + load(bias[i]));
}

// Copies a tensor [a, b, c, width] with strides to a contiguous one, one warp per row.
template <typename T>
__device__ void copy_strided(const T *in, T *out, uint64_t rows, unsigned b, unsigned c, unsigned width, uint64_t stride_a, uint64_t stride_b, uint64_t stride_c) {
  uint64_t row = warp_row();
  if (row >= rows) return;
  in += row / c / b * stride_a + row / c % b * stride_b + row % c * stride_c;
  for (unsigned i = lane(); i < width; i += WARP) out[row * width + i] = in[i];
}

// The same with elements of 16 bytes, one thread per element.
__device__ void copy_wide(const uint4 *in, uint4 *out, unsigned count, unsigned b, unsigned c, unsigned width, uint64_t stride_a, uint64_t stride_b, uint64_t stride_c) {
  for (unsigned i = first_index(); i < count; i += index_step()) {
    unsigned column = i % width, row = i / width;
    out[i] = in[row / c / b * stride_a + row / c % b * stride_b + row % c * stride_c + column];
  }
}

// Rotates the first `turned` elements of rows [a, b, positions, width] with strides, one warp per row; cosines and
// sines are [positions, turned / 2].
template <typename T>
__device__ void rotate(const T *in, const float *cos, const float *sin, T *out, uint64_t rows, unsigned b, unsigned positions, unsigned width, unsigned turned, float sign, uint64_t stride_a, uint64_t stride_b, uint64_t stride_c) {
  uint64_t row = warp_row();
  if (row >= rows) return;
  uint64_t position = row % positions;
  unsigned half = turned / 2;
  in += row / positions / b * stride_a + row / positions % b * stride_b + position * stride_c;
  cos += position * half, sin += position * half, out += row * width;
  for (unsigned i = lane(); i < half; i += WARP) {
    float x = load(in[i]), y = load(in[i + half]), c = cos[i], s = sin[i] * sign;
    out[i] = rounded<T>(x * c - y * s);
    out[i + half] = rounded<T>(y * c + x * s);
  }
  for (unsigned i = turned + lane(); i < width; i += WARP) out[i] = in[i];
}

// Sums

// Sums of columns over a chunk of rows, [chunks, width] in f32. Blocks have 32 x 8 threads.
template <typename T> __device__ void column_sums(const T *in, float *out, uint64_t rows, unsigned width, uint64_t rows_per_chunk) {
  __shared__ float part[8][WARP + 1];
  unsigned column = blockIdx.x * WARP + threadIdx.x;
  uint64_t from = blockIdx.y * rows_per_chunk, to = min(from + rows_per_chunk, rows);
  float sum = 0.f;
  if (column < width)
    for (uint64_t row = from + threadIdx.y; row < to; row += 8) sum += load(in[row * width + column]);
  part[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    for (unsigned i = 1; i < 8; i++) sum += part[i][threadIdx.x];
    out[blockIdx.y * (uint64_t)width + column] = sum;
  }
}

// The sum of squares of each block's elements in f64. Blocks have 256 threads.
template <typename T> __device__ void squares(const T *in, double *out, uint64_t count) {
  __shared__ double part[8];
  double sum = 0.0;
  for (uint64_t i = first_index(); i < count; i += index_step()) {
    double x = load(in[i]);
    sum += x * x;
  }
  sum = warp_sum(sum);
  if (lane() == 0) part[threadIdx.x / WARP] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned i = 1; i < 8; i++) sum += part[i];
    out[blockIdx.x] = sum;
  }
}

// Sums of rows by index, in chunks of rows. Negative indices count from the end.
constexpr unsigned CHUNK = 256;

__device__ __forceinline__ int64_t from_start(int64_t index, int64_t table) { return index < 0 ? index + table : index; }

// The first row of each index in a chunk owns the sum of the rows of the chunk with this index, in f32. Blocks have 256
// threads.
template <typename T> __device__ void sum_rows(const int64_t *indices, const T *rows, float *sums, uint8_t *owners, unsigned count, unsigned width, int64_t table) {
  __shared__ unsigned same[CHUNK / WARP];
  unsigned own = blockIdx.x, first = own / CHUNK * CHUNK, at = first + threadIdx.x;
  unsigned found = __ballot_sync(ALL, at < count && from_start(indices[at], table) == from_start(indices[own], table));
  if (lane() == 0) same[threadIdx.x / WARP] = found;
  __syncthreads();
  unsigned word = (own - first) / WARP, earlier = same[word] & ((1u << own % WARP) - 1);
  for (unsigned i = 0; i < word; i++) earlier |= same[i];
  if (threadIdx.x == 0) owners[own] = earlier == 0;
  if (earlier) return;
  for (unsigned column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0.f;
    for (unsigned i = word; i < CHUNK / WARP; i++)
      for (unsigned left = same[i]; left; left &= left - 1) sum += load(rows[(uint64_t)(first + i * WARP + __ffs(left) - 1) * width + column]);
    sums[(uint64_t)own * width + column] = sum;
  }
}

// The first owner of each index adds the sums of the owners in later chunks. `out` is zero. Blocks have 256 threads.
template <typename T> __device__ void merge_rows(const int64_t *indices, const float *sums, const uint8_t *owners, T *out, unsigned count, unsigned width, int64_t table) {
  __shared__ unsigned position;
  unsigned own = blockIdx.x, tid = threadIdx.x;
  if (!owners[own]) return;
  int64_t index = from_start(indices[own], table);
  if (index < 0 || index >= table) return;
  int earlier = 0;
  for (unsigned i = tid; i < own; i += CHUNK) earlier |= owners[i] && from_start(indices[i], table) == index;
  if (__syncthreads_or(earlier)) return;
  // Columns are processed in groups that fit into the registers of a block.
  constexpr unsigned EACH = 8;
  for (unsigned first = 0; first < width; first += EACH * CHUNK) {
    float sum[EACH];
    for (unsigned k = 0; k < EACH; k++) {
      unsigned column = first + k * CHUNK + tid;
      sum[k] = column < width ? sums[(uint64_t)own * width + column] : 0.f;
    }
    for (unsigned from = own / CHUNK * CHUNK + CHUNK; from < count; from += CHUNK) {
      unsigned at = from + tid;
      // A chunk has at most one owner of an index.
      int is_owner = at < count && owners[at] && from_start(indices[at], table) == index;
      if (is_owner) position = at;
      if (!__syncthreads_or(is_owner)) continue;
      for (unsigned k = 0; k < EACH; k++) {
        unsigned column = first + k * CHUNK + tid;
        if (column < width) sum[k] += sums[(uint64_t)position * width + column];
      }
      __syncthreads();
    }
    for (unsigned k = 0; k < EACH; k++) {
      unsigned column = first + k * CHUNK + tid;
      if (column < width) out[index * width + column] = rounded<T>(sum[k]);
    }
  }
}

// Normalization, with one warp per row

// The gradient of the input of layer normalization (`centred`) or root mean square normalization; writes mean and
// reciprocal deviation of each row to `moments` [rows, 2].
template <typename T>
__device__ void norm_back(const T *x, const T *gradient, const T *weight, T *out, float *moments, uint64_t rows, unsigned width, float epsilon, float offset, unsigned centred) {
  uint64_t row = warp_row();
  if (row >= rows) return;
  x += row * width, gradient += row * width, out += row * width;
  float mean = 0.f, square = 0.f;
  if (centred) {
    for (unsigned i = lane(); i < width; i += WARP) mean += load(x[i]);
    mean = warp_sum(mean) / width;
  }
  for (unsigned i = lane(); i < width; i += WARP) {
    float d = load(x[i]) - mean;
    square += d * d;
  }
  float scale = 1.f / sqrtf(warp_sum(square) / width + epsilon);
  float along = 0.f, average = 0.f;
  for (unsigned i = lane(); i < width; i += WARP) {
    float weighted = load(gradient[i]) * (load(weight[i]) + offset);
    along += weighted * (load(x[i]) - mean) * scale;
    average += weighted;
  }
  along = warp_sum(along) / width;
  average = centred ? warp_sum(average) / width : 0.f;
  for (unsigned i = lane(); i < width; i += WARP) {
    float weighted = load(gradient[i]) * (load(weight[i]) + offset);
    out[i] = rounded<T>((weighted - average - (load(x[i]) - mean) * scale * along) * scale);
  }
  if (lane() == 0) moments[2 * row] = mean, moments[2 * row + 1] = scale;
}

// Sums over a chunk of rows for the gradients of weight and bias, [chunks, width] each. Blocks have 32 x 8 threads.
template <typename T>
__device__ void norm_sums(const T *x, const T *gradient, const float *moments, float *of_weight, float *of_bias, uint64_t rows, unsigned width, uint64_t rows_per_chunk) {
  __shared__ float part[2][8][WARP + 1];
  unsigned column = blockIdx.x * WARP + threadIdx.x;
  uint64_t from = blockIdx.y * rows_per_chunk, to = min(from + rows_per_chunk, rows);
  float weight = 0.f, bias = 0.f;
  if (column < width)
    for (uint64_t row = from + threadIdx.y; row < to; row += 8) {
      float g = load(gradient[row * width + column]);
      weight += g * (load(x[row * width + column]) - moments[2 * row]) * moments[2 * row + 1];
      bias += g;
    }
  part[0][threadIdx.y][threadIdx.x] = weight;
  part[1][threadIdx.y][threadIdx.x] = bias;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    for (unsigned i = 1; i < 8; i++) weight += part[0][i][threadIdx.x], bias += part[1][i][threadIdx.x];
    of_weight[blockIdx.y * (uint64_t)width + column] = weight;
    of_bias[blockIdx.y * (uint64_t)width + column] = bias;
  }
}

// Attention, with one warp per row of products

// Whether a query at `position` may not attend to the key `key`; a window of 0 is none.
__device__ __forceinline__ bool hidden(int64_t position, int64_t key, unsigned causal, int64_t window) {
  if (causal && key > position) return true;
  return window && (key + window <= position || key >= position + window);
}

// Replaces products [rows, keys] by probabilities. Row r of a batch entry belongs to the query at position
// `first + r % queries`; column c to key `start + c`. The mask [batch, keys of a sequence] may be null.
template <typename T>
__device__ void attention_softmax(T *products, const int64_t *mask, uint64_t rows, unsigned rows_per_batch, unsigned keys, unsigned queries, unsigned first, unsigned start, unsigned mask_width, float scale, unsigned causal, unsigned window) {
  uint64_t row = warp_row();
  if (row >= rows) return;
  products += row * keys;
  int64_t position = first + row % queries;
  if (mask) mask += row / rows_per_batch * mask_width + start;
  constexpr float HIDDEN = -3.402823466e+38f;
  auto score = [&](unsigned i) {
    bool is_hidden = hidden(position, (int64_t)start + i, causal, window) || (mask && mask[i] == 0);
    return is_hidden ? HIDDEN : load(products[i]) * scale;
  };
  float most = -INFINITY, sum = 0.f;
  // Rows of this many scores per thread stay in registers.
  constexpr unsigned EACH = 16;
  if (keys <= EACH * WARP) {
    float scores[EACH];
#pragma unroll
    for (unsigned k = 0; k < EACH; k++) {
      unsigned i = lane() + k * WARP;
      scores[k] = i < keys ? score(i) : -INFINITY;
      most = larger(most, scores[k]);
    }
    most = warp_max(most);
#pragma unroll
    for (unsigned k = 0; k < EACH; k++) {
      scores[k] = lane() + k * WARP < keys ? expf(scores[k] - most) : 0.f;
      sum += scores[k];
    }
    sum = 1.f / warp_sum(sum);
#pragma unroll
    for (unsigned k = 0; k < EACH; k++)
      if (lane() + k * WARP < keys) products[lane() + k * WARP] = rounded<T>(scores[k] * sum);
    return;
  }
  for (unsigned i = lane(); i < keys; i += WARP) most = larger(most, score(i));
  most = warp_max(most);
  for (unsigned i = lane(); i < keys; i += WARP) sum += expf(score(i) - most);
  sum = 1.f / warp_sum(sum);
  for (unsigned i = lane(); i < keys; i += WARP) products[i] = rounded<T>(expf(score(i) - most) * sum);
}

// The gradient of scores from probabilities and their gradient [rows, width], times a factor, in place of the
// latter.
template <typename T> __device__ void softmax_back(const T *y, T *gradient, uint64_t rows, unsigned width, float factor) {
  uint64_t row = warp_row();
  if (row >= rows) return;
  y += row * width, gradient += row * width;
  float along = 0.f;
  for (unsigned i = lane(); i < width; i += WARP) along += load(y[i]) * load(gradient[i]);
  along = warp_sum(along);
  for (unsigned i = lane(); i < width; i += WARP) gradient[i] = rounded<T>((load(gradient[i]) - along) * load(y[i]) * factor);
}

// Losses over logits, with one block of 256 threads per row

// Maximum and sum of exponentials relative to it, of a part of a row.
struct Exponentials {
  float most, sum;
  __device__ void add(float x) {
    if (x == -INFINITY) return;
    if (x > most) sum *= expf(most - x), most = x;
    sum += expf(x - most);
  }
  __device__ void merge(float other, float other_sum) {
    float both = fmaxf(most, other);
    sum = (sum == 0.f ? 0.f : sum * expf(most - both)) + (other_sum == 0.f ? 0.f : other_sum * expf(other - both));
    most = both;
  }
  // The logarithm of the sum of exponentials over the block.
  __device__ float logarithm(float (*shared)[2]) {
    for (unsigned step = WARP / 2; step > 0; step /= 2) {
      float other = __shfl_xor_sync(ALL, most, step), other_sum = __shfl_xor_sync(ALL, sum, step);
      merge(other, other_sum);
    }
    __syncthreads();
    if (lane() == 0) shared[threadIdx.x / WARP][0] = most, shared[threadIdx.x / WARP][1] = sum;
    __syncthreads();
    Exponentials all = {shared[0][0], shared[0][1]};
    for (unsigned i = 1; i < 8; i++) all.merge(shared[i][0], shared[i][1]);
    return all.most + logf(all.sum);
  }
};

__device__ __forceinline__ float block_sum(float x, float (*shared)[2]) {
  x = warp_sum(x);
  __syncthreads();
  if (lane() == 0) shared[threadIdx.x / WARP][0] = x;
  __syncthreads();
  float sum = 0.f;
  for (unsigned i = 0; i < 8; i++) sum += shared[i][0];
  return sum;
}

// Replaces logits [rows, width] by the gradient of the forward KL divergence from a teacher at a temperature, and of
// the cross entropy with target classes; columns from `classes` on get 0. Writes both losses to [rows, 2]. The
// teacher's logits are [rows, classes]; teacher and targets may be null.
template <typename T>
__device__ void logit_losses(T *logits, const T *teacher, const uint32_t *targets, float *losses, unsigned width, unsigned classes, float inverse_temperature, float soft, float hard, float smoothing) {
  __shared__ float shared[8][2];
  logits += blockIdx.x * (uint64_t)width;
  if (teacher) teacher += blockIdx.x * (uint64_t)classes;
  Exponentials ours = {-INFINITY, 0.f}, theirs = ours, plain = ours;
  float total = 0.f;
  for (unsigned i = threadIdx.x; i < classes; i += blockDim.x) {
    float x = load(logits[i]);
    if (teacher) ours.add(x * inverse_temperature), theirs.add(load(teacher[i]) * inverse_temperature);
    // Without label smoothing, logits of minus infinity must not contribute.
    if (targets) plain.add(x), total += smoothing > 0.f ? x : 0.f;
  }
  float of_ours = teacher ? ours.logarithm(shared) : 0.f, of_theirs = teacher ? theirs.logarithm(shared) : 0.f;
  float of_plain = targets ? plain.logarithm(shared) : 0.f;
  unsigned target = targets ? targets[blockIdx.x] : 0;
  float uniform = smoothing / classes;
  // Before the logits are overwritten.
  float at_target = targets ? load(logits[target]) - of_plain : 0.f;
  total = targets && smoothing > 0.f ? block_sum(total, shared) - of_plain * classes : 0.f;
  __syncthreads();
  float divergence = 0.f;
  for (unsigned i = threadIdx.x; i < width; i += blockDim.x) {
    if (i >= classes) {
      logits[i] = rounded<T>(0.f);
      continue;
    }
    float x = load(logits[i]), gradient = 0.f;
    if (teacher) {
      float p = x * inverse_temperature - of_ours, q = load(teacher[i]) * inverse_temperature - of_theirs;
      float share = expf(q);
      // A probability of 0 has no divergence, also at a logit of minus infinity.
      divergence += share > 0.f ? share * (q - p) : 0.f;
      gradient += (expf(p) - share) * soft;
    }
    if (targets) gradient += (expf(x - of_plain) - uniform - (i == target ? 1.f - smoothing : 0.f)) * hard;
    logits[i] = rounded<T>(gradient);
  }
  divergence = block_sum(divergence, shared);
  if (threadIdx.x == 0) {
    losses[2 * blockIdx.x] = divergence;
    losses[2 * blockIdx.x + 1] = -(1.f - smoothing) * at_target - uniform * total;
  }
}

// Optimizer

// A step of AdamW in place; parameter and moments are f32. Products and sums round separately, as on the host.
template <typename T>
__device__ void adamw(float *parameter, const T *gradient, float *mean, float *square, uint64_t count, float shrink, float mean_share, float square_left, float square_share, float root, float epsilon, float size) {
  for (uint64_t i = first_index(); i < count; i += index_step()) {
    float g = load(gradient[i]);
    float m = __fadd_rn(mean[i], __fmul_rn(g - mean[i], mean_share));
    float v = __fadd_rn(__fmul_rn(square[i], square_left), __fmul_rn(__fmul_rn(g, g), square_share));
    float direction = m / __fadd_rn(sqrtf(v) / root, epsilon);
    parameter[i] = __fsub_rn(__fmul_rn(parameter[i], shrink), __fmul_rn(direction, size));
    mean[i] = m;
    square[i] = v;
  }
}

#include "solver.cuh"

#define KERNELS(T, NAME)                                                                                               \
  extern "C" __global__ void activate_##NAME(const T *x, T *y, uint64_t n, unsigned f) { activate(x, y, n, f); }       \
  extern "C" __global__ void activate_back_##NAME(const T *x, const T *g, T *o, uint64_t n, unsigned f) {              \
    activate_back(x, g, o, n, f);                                                                                      \
  }                                                                                                                    \
  extern "C" __global__ void add_##NAME(const T *a, const T *b, T *o, uint64_t n) { add(a, b, o, n); }                 \
  extern "C" __global__ void multiply_##NAME(const T *a, const T *b, T *o, uint64_t n) { multiply(a, b, o, n); }       \
  extern "C" __global__ void add_bias_##NAME(T *y, const T *b, uint64_t n, unsigned w) { add_bias(y, b, n, w); }       \
  extern "C" __global__ void copy_strided_##NAME(const T *x, T *o, uint64_t n, unsigned b, unsigned c, unsigned w,     \
                                                 uint64_t sa, uint64_t sb, uint64_t sc) {                              \
    copy_strided(x, o, n, b, c, w, sa, sb, sc);                                                                        \
  }                                                                                                                    \
  extern "C" __global__ void copy_wide_##NAME(const T *x, T *o, unsigned n, unsigned b, unsigned c, unsigned w,        \
                                              uint64_t sa, uint64_t sb, uint64_t sc) {                                 \
    copy_wide((const uint4 *)x, (uint4 *)o, n, b, c, w, sa, sb, sc);                                                   \
  }                                                                                                                    \
  extern "C" __global__ void rotate_##NAME(const T *x, const float *c, const float *s, T *o, uint64_t n, unsigned b,   \
                                           unsigned p, unsigned w, unsigned t, float sign, uint64_t sa, uint64_t sb,   \
                                           uint64_t sc) {                                                              \
    rotate(x, c, s, o, n, b, p, w, t, sign, sa, sb, sc);                                                               \
  }                                                                                                                    \
  extern "C" __global__ void column_sums_##NAME(const T *x, float *o, uint64_t r, unsigned w, uint64_t chunk) {        \
    column_sums(x, o, r, w, chunk);                                                                                    \
  }                                                                                                                    \
  extern "C" __global__ void squares_##NAME(const T *x, double *o, uint64_t n) { squares(x, o, n); }                   \
  extern "C" __global__ void sum_rows_##NAME(const int64_t *i, const T *r, float *s, uint8_t *f, unsigned n,           \
                                             unsigned w, int64_t t) {                                                  \
    sum_rows(i, r, s, f, n, w, t);                                                                                     \
  }                                                                                                                    \
  extern "C" __global__ void merge_rows_##NAME(const int64_t *i, const float *s, const uint8_t *f, T *o, unsigned n,   \
                                               unsigned w, int64_t t) {                                                \
    merge_rows(i, s, f, o, n, w, t);                                                                                   \
  }                                                                                                                    \
  extern "C" __global__ void norm_back_##NAME(const T *x, const T *g, const T *w, T *o, float *m, uint64_t r,          \
                                              unsigned width, float e, float offset, unsigned centred) {               \
    norm_back(x, g, w, o, m, r, width, e, offset, centred);                                                            \
  }                                                                                                                    \
  extern "C" __global__ void norm_sums_##NAME(const T *x, const T *g, const float *m, float *w, float *b, uint64_t r,  \
                                              unsigned width, uint64_t chunk) {                                        \
    norm_sums(x, g, m, w, b, r, width, chunk);                                                                         \
  }                                                                                                                    \
  extern "C" __global__ void attention_softmax_##NAME(T *p, const int64_t *m, uint64_t r, unsigned per, unsigned k,    \
                                                      unsigned q, unsigned first, unsigned start, unsigned mw,         \
                                                      float scale, unsigned causal, unsigned window) {                 \
    attention_softmax(p, m, r, per, k, q, first, start, mw, scale, causal, window);                                    \
  }                                                                                                                    \
  extern "C" __global__ void softmax_back_##NAME(const T *y, T *g, uint64_t r, unsigned w, float f) {                  \
    softmax_back(y, g, r, w, f);                                                                                       \
  }                                                                                                                    \
  extern "C" __global__ void logit_losses_##NAME(T *x, const T *t, const uint32_t *y, float *l, unsigned w,            \
                                                 unsigned c, float it, float soft, float hard, float smoothing) {      \
    logit_losses(x, t, y, l, w, c, it, soft, hard, smoothing);                                                         \
  }                                                                                                                    \
  extern "C" __global__ void adamw_##NAME(float *p, const T *g, float *m, float *v, uint64_t n, float a, float b,      \
                                          float c, float d, float e, float f, float h) {                               \
    adamw(p, g, m, v, n, a, b, c, d, e, f, h);                                                                         \
  }

KERNELS(float, f32)
KERNELS(__half, f16)
KERNELS(__nv_bfloat16, bf16)
