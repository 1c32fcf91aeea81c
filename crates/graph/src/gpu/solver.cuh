// Error compensation and coordinate descent in quantization. Weights are transposed, [columns, rows]. With the same
// operands, results equal those of the host bit for bit: products and sums round separately.

constexpr unsigned COLUMNS = 128;
// Columns of a lane.
constexpr unsigned EACH = COLUMNS / WARP;

// Parameters of an integer grid [rows, groups], the group of each column, and a pruning mask [columns, rows], which
// may be null.
struct IntegerGrid {
  const float *scales, *zeros;
  const uint32_t *groups;
  const uint8_t *zeroed;
  unsigned per_row;
  float lowest, highest;

  // The number that the scale of the nearest grid value is multiplied with; ties to even.
  __device__ float level(float value, float scale, float zero) const {
    constexpr float ROUND = 12582912.f;
    float q = __fadd_rn(__fdiv_rn(value, scale), zero);
    q = q >= lowest ? q : lowest;
    q = q <= highest ? q : highest;
    float integer = isnan(value) ? zero : __fsub_rn(__fadd_rn(q, ROUND), ROUND);
    return __fsub_rn(integer, zero);
  }
};

// A lane's columns of a row.
struct Columns {
  float scale[EACH], zero[EACH];
  int zeroed[EACH];

  __device__ Columns(const IntegerGrid &grid, uint64_t row, uint64_t rows, unsigned width) {
    for (unsigned k = 0; k < EACH; k++) {
      unsigned column = k * WARP + lane();
      bool inside = column < width;
      uint64_t at = row * grid.per_row + (inside ? grid.groups[column] : 0);
      scale[k] = grid.scales[at];
      zero[k] = grid.zeros[at];
      zeroed[k] = inside && grid.zeroed && grid.zeroed[column * rows + row];
    }
  }
};

// Rounds the columns of a block in turn, with compensation by the later ones, one warp per row. Targets, weights,
// values and errors are [width, rows], and ratios [width, width].
__device__ void round_columns(const float *targets, const float *weights, const float *ratios, float *values, float *errors, uint64_t rows, unsigned width, const IntegerGrid &grid) {
  uint64_t row = warp_row();
  if (row >= rows) return;
  Columns columns(grid, row, rows, width);
  float target[EACH], weight[EACH], value[EACH], error[EACH];
#pragma unroll
  for (unsigned k = 0; k < EACH; k++) {
    unsigned column = k * WARP + lane();
    uint64_t at = column * rows + row;
    target[k] = column < width ? targets[at] : 0.f;
    weight[k] = column < width ? weights[at] : 0.f;
    value[k] = error[k] = 0.f;
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; k++) {
    for (unsigned owner = 0; owner < WARP; owner++) {
      unsigned column = k * WARP + owner;
      if (column >= width) break;
      float optimum = __shfl_sync(ALL, target[k], owner), before = __shfl_sync(ALL, weight[k], owner);
      float scale = __shfl_sync(ALL, columns.scale[k], owner), zero = __shfl_sync(ALL, columns.zero[k], owner);
      int zeroed = __shfl_sync(ALL, columns.zeroed[k], owner);
      float chosen = zeroed ? 0.f : __fmul_rn(grid.level(optimum, scale, zero), scale);
      float lost = __fsub_rn(before, chosen);
      if (lane() == owner) value[k] = chosen, error[k] = lost;
#pragma unroll
      for (unsigned j = k; j < EACH; j++) {
        unsigned later = j * WARP + lane();
        if (later > column && later < width) target[j] = __fadd_rn(target[j], __fmul_rn(lost, ratios[column * width + later]));
      }
    }
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; k++) {
    unsigned column = k * WARP + lane();
    if (column < width) values[column * rows + row] = value[k], errors[column * rows + row] = error[k];
  }
}

// Rounds each weight of a block to its optimum given all other weights, one warp per row. Gradients, levels and errors
// (both in place) are [width, rows], and the second moments `hessian` [width, width]. Values that the mask of the grid
// marks do not change. Sets `moved` if a level changes.
__device__ void descend_columns(const float *gradients, const float *hessian, float *levels, float *errors, uint32_t *moved, uint64_t rows, unsigned width, const IntegerGrid &grid) {
  uint64_t row = warp_row();
  if (row >= rows) return;
  Columns columns(grid, row, rows, width);
  float gradient[EACH], level[EACH], change[EACH];
#pragma unroll
  for (unsigned k = 0; k < EACH; k++) {
    unsigned column = k * WARP + lane();
    uint64_t at = column * rows + row;
    gradient[k] = column < width ? gradients[at] : 0.f;
    level[k] = column < width ? levels[at] : 0.f;
    change[k] = 0.f;
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; k++) {
    for (unsigned owner = 0; owner < WARP; owner++) {
      unsigned column = k * WARP + owner;
      if (column >= width) break;
      if (__shfl_sync(ALL, columns.zeroed[k], owner)) continue;
      float slope = __shfl_sync(ALL, gradient[k], owner), before = __shfl_sync(ALL, level[k], owner);
      float scale = __shfl_sync(ALL, columns.scale[k], owner), zero = __shfl_sync(ALL, columns.zero[k], owner);
      float value = __fmul_rn(before, scale);
      float nearest = grid.level(__fadd_rn(value, __fdiv_rn(slope, hessian[column * width + column])), scale, zero);
      float difference = __fsub_rn(__fmul_rn(nearest, scale), value);
      if (difference == 0.f) continue;
      if (lane() == owner) level[k] = nearest, change[k] = difference;
#pragma unroll
      for (unsigned j = k; j < EACH; j++) {
        unsigned later = j * WARP + lane();
        if (later > column && later < width) gradient[j] = __fsub_rn(gradient[j], __fmul_rn(difference, hessian[column * width + later]));
      }
    }
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; k++) {
    unsigned column = k * WARP + lane();
    if (column >= width || change[k] == 0.f) continue;
    uint64_t at = column * rows + row;
    levels[at] = level[k];
    errors[at] = __fsub_rn(errors[at], change[k]);
    *moved = 1;
  }
}

extern "C" __global__ void round_columns_f32(const float *targets, const float *weights, const float *ratios, float *values, float *errors, uint64_t rows, unsigned width, const float *scales, const float *zeros, const uint32_t *groups, const uint8_t *zeroed, unsigned per_row, float lowest, float highest) {
  round_columns(targets, weights, ratios, values, errors, rows, width, {scales, zeros, groups, zeroed, per_row, lowest, highest});
}

extern "C" __global__ void descend_columns_f32(const float *gradients, const float *hessian, float *levels, float *errors, uint32_t *moved, uint64_t rows, unsigned width, const float *scales, const float *zeros, const uint32_t *groups, const uint8_t *zeroed, unsigned per_row, float lowest, float highest) {
  descend_columns(gradients, hessian, levels, errors, moved, rows, width, {scales, zeros, groups, zeroed, per_row, lowest, highest});
}

// Factors H = P D Pᵀ of a square of at most 64 columns of a symmetric positive definite matrix with rows `stride` apart,
// with `added` on the diagonal. Only the upper triangle is read. Writes the unit upper triangle P to a square of a
// matrix with the same stride, the diagonal D, the inverse of P, and `right`: the transposed inverse divided by D, and
// the transposed inverse, [2, size, size]. They contain NaN if the matrix is not positive definite. One block of 256
// threads.
template <typename T>
__device__ void factor_square(const T *matrix, T *ratios, float *inverse, double *costs, T *right, unsigned stride, unsigned size, const double *added) {
  constexpr unsigned LARGEST = 64;
  // The inverse is transposed, below the diagonal.
  __shared__ double work[LARGEST][LARGEST + 1];
  __shared__ double found[LARGEST];
  for (unsigned i = threadIdx.x; i < LARGEST * LARGEST; i += blockDim.x) {
    unsigned row = i / LARGEST, column = i % LARGEST;
    if (row < size && column < size) work[row][column] = row <= column ? (double)matrix[(uint64_t)row * stride + column] + (row == column ? *added : 0.0) : 0.0;
  }
  __syncthreads();
  for (unsigned column = size; column-- > 0;) {
    double pivot = work[column][column], cost = pivot > 0.0 ? pivot : nan("");
    for (unsigned row = threadIdx.x; row < column; row += blockDim.x) found[row] = work[row][column] = work[row][column] / cost;
    if (threadIdx.x == 0) costs[column] = cost;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < column * LARGEST; i += blockDim.x) {
      unsigned row = i / LARGEST, at = i % LARGEST;
      if (at >= column) {
        if (at < size) work[at][row] -= found[row] * (at == column ? 1.0 : work[at][column]);
      } else if (at >= row) {
        work[row][at] -= found[row] * cost * found[at];
      }
    }
    __syncthreads();
  }
  for (unsigned i = threadIdx.x; i < LARGEST * LARGEST; i += blockDim.x) {
    unsigned row = i / LARGEST, column = i % LARGEST;
    if (row >= size || column >= size) continue;
    double diagonal = row == column ? 1.0 : 0.0;
    // Element [row, column] of the inverse, and of its transposition.
    double of_inverse = row < column ? work[column][row] : diagonal, turned = column < row ? work[row][column] : diagonal;
    unsigned at = row * size + column;
    ratios[(uint64_t)row * stride + column] = (T)(row < column ? work[row][column] : diagonal);
    inverse[at] = (float)of_inverse;
    right[at] = (T)(turned / work[column][column]);
    right[size * size + at] = (T)turned;
  }
}

extern "C" __global__ void factor_square_f32(const float *matrix, float *ratios, float *inverse, double *costs, float *right, unsigned stride, unsigned size, const double *added) {
  factor_square(matrix, ratios, inverse, costs, right, stride, size, added);
}

extern "C" __global__ void factor_square_f64(const double *matrix, double *ratios, float *inverse, double *costs, double *right, unsigned stride, unsigned size, const double *added) {
  factor_square(matrix, ratios, inverse, costs, right, stride, size, added);
}
