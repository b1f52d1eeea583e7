// What is done around attention at the speed of memory, one launch each. Once per mask: row bands are written. Before
// attention: K/V rows are packed for group_cast, and a backward's row sums taken. After it: gradients are packed for
// group_reduce, those that come back added, the sums rounded, and the gradient of sinks taken.
// Rows are packed into one buffer, or written to where they are wanted, in the memory of several GPUs.
//
// Compile-time macros
//   WIRE_FP32  returned gradients are fp32 (default: the input type)
//   USE_FP16   the input type is fp16 (default bf16)
//   WIDE       dq left registers directly (heads with values wider than 128), see add_query_grads in ffa_backward.cu
//   ROUNDED    finish_grads finds dk and dv in the input type, rows of other ranks after the rank's own
//              (default: sums in fp32)
#include "sm90.cuh"

constexpr int kWarps = 8;

constexpr int kMaxPlaces = 7;
struct Places {
  uint4* to[kMaxPlaces];       // where row 0 would lie if it were of this place
  int* flags[kMaxPlaces + 1];  // words of the GPUs, to be counted up when all rows are written
  int* blocks_done;            // zero, and zero afterwards; unused without flags
  int ends[kMaxPlaces];        // the row after the last of each place, ascending
  int num_flags;
  int begin;  // the row to begin with
};

DEVICE uint4* place_of(const Places& places, int row) {
  int i = 0;
  while (row >= places.ends[i]) i++;
  return places.to[i];
}

// By all threads of all `num_blocks` blocks that write rows, when they have.
DEVICE void report(const Places& places, unsigned num_blocks) {
  if (places.num_flags == 0) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(places.blocks_done, 1) != (int)num_blocks - 1) return;
  __threadfence_system();
  *places.blocks_done = 0;
  for (int i = 0; i < places.num_flags; i++)
    asm volatile("red.relaxed.sys.global.add.s32 [%0], 1;" ::"l"(places.flags[i]) : "memory");
}

// delta = rowsum(out * dOut) - dlse, and zeros on the way. One half-warp per row, 8 elements a lane.
struct RowSums {
  const uint4 *out, *dout;                      // [num_rows, value_dim / 8] contiguous
  float *delta, *zero, *more_zero;              // [num_rows], [num_zero], [num_more_zero]
  const float* dlse;                            // [num_rows]; null: zeros
  long long num_rows, num_zero, num_more_zero;  // what is to be zeroed: multiples of 8, may be 0
  int value_dim;                                // a multiple of 8
};

// By blocks of 256 threads: 16 threads per row, one per 8 elements to zero, whichever is more.
DEVICE void sum_rows(const RowSums& params, unsigned block) {
  const long long i = (long long)block * 256 + threadIdx.x, row = i / 16;
  const int units = params.value_dim / 8;
  if (const long long z = 8 * i; z < params.num_zero + params.num_more_zero) {
    float4* to = (float4*)(z < params.num_zero ? params.zero + z : params.more_zero + (z - params.num_zero));
    to[0] = to[1] = make_float4(0, 0, 0, 0);
  }
  float sum = 0;
  for (int unit = i % 16; row < params.num_rows && unit < units; unit += 16) {
    const uint4 o = params.out[row * units + unit], d = params.dout[row * units + unit];
    const u32 outs[4] = {o.x, o.y, o.z, o.w}, douts[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 x = unpack2(outs[j]), y = unpack2(douts[j]);
      sum += x.x * y.x + x.y * y.y;
    }
  }
#pragma unroll
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (row < params.num_rows && i % 16 == 0) params.delta[row] = params.dlse ? sum - params.dlse[row] : sum;
}

// to[head] = the sum over rows [begin, end) of value(row, head), for all heads, in a fixed order. By all threads of a
// block.
template <typename VALUE>
DEVICE void sum_columns(int begin, int end, int num_heads, float* to, VALUE value) {
  __shared__ float sums[kWarps * 32];
  const int width = min(num_heads, kWarps * 32), groups = kWarps * 32 / width, group = threadIdx.x / width;
  for (int head = threadIdx.x % width, first = 0; first < num_heads; head += width, first += width) {
    const bool exists = head < num_heads && group < groups;
    float sum = 0;
#pragma unroll 8
    for (int row = begin + group; row < (exists ? end : 0); row += groups) sum += value(row, head);
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int g = 1; g < groups && group == 0; g++) sum += sums[g * width + threadIdx.x];
    if (exists && group == 0) to[head] = sum;
    __syncthreads();
  }
}

// The gradient of each head's sink: -sum over tokens of exp(sink - lse) * delta; 0 for a sink of -infinity, also where
// lse is. Each block takes some tokens, the last one adds up.
struct SinksParams {
  const float *sinks, *lse, *delta;  // [num_heads], [num_tokens, num_heads] each
  float *parts, *dsinks;             // [blocks, num_heads], [num_heads]
  int* blocks_done;                  // zero, and zero afterwards
  int num_tokens, num_heads;
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) sum_sinks(const __grid_constant__ SinksParams params) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int heads = params.num_heads;
  auto first_of = [&](unsigned block) { return (int)((long long)params.num_tokens * block / gridDim.x); };
  sum_columns(first_of(blockIdx.x), first_of(blockIdx.x + 1), heads, params.parts + blockIdx.x * heads,
              [&](int token, int head) {
                const long long at = (long long)token * heads + head;
                const float sink = params.sinks[head];
                return sink == -kInfinity ? 0.f : -expf(sink - params.lse[at]) * params.delta[at];
              });
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(params.blocks_done, 1) == (int)gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) *params.blocks_done = 0;
  sum_columns(0, gridDim.x, heads, params.dsinks,
              [&](int block, int head) { return __ldcg(params.parts + block * heads + head); });
}

// bands[layer][row]: the keys that a row sees, of the slices of a mask. The rows are counted through all layers.
struct BandsParams {
  const int* slices;  // [num_slices, 5]: first row, end; first key, end; type. Ascending, no row in two
  int2* bands;        // [num_bands] = {lo, hi}
  int num_slices, num_bands;
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) write_bands(const __grid_constant__ BandsParams params) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= params.num_bands) return;
  int before = 0, end = params.num_slices;  // of all slices, how many begin at this row or before
  while (before < end) {
    const int middle = (before + end) / 2;
    if (__ldg(params.slices + 5 * middle) <= row)
      before = middle + 1;
    else
      end = middle;
  }
  int2 band = make_int2(0, 0);
  if (const int* slice = params.slices + 5 * (before - 1); before > 0 && row < slice[1]) {
    const int type = slice[4];  // bit 0: the end moves with the row; bit 1: the first key does
    band = make_int2(slice[2] + (type >> 1) * (row - slice[0]), slice[3] - (type & 1) * (slice[1] - 1 - row));
  }
  params.bands[row] = band;
}

// The packing moves units of 16 bytes. A warp handles one row of K and V, so its lanes touch consecutive units.
struct GatherParams {
  const uint4 *k, *v;  // [T, heads, key_units], [T, heads, value_units], strides below
  const int* rows;     // [num_rows] local token numbers
  Places places;       // rows: [heads, key_units], then [heads, value_units], contiguous
  long long k_token_stride, k_head_stride, v_token_stride, v_head_stride;  // units
  int num_rows, num_heads, key_units, value_units;                         // units of a head
  unsigned num_blocks;                                                     // that pack; those after them sum rows up
  RowSums sums;
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) gather_rows(const __grid_constant__ GatherParams params) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  if (blockIdx.x >= params.num_blocks) return sum_rows(params.sums, blockIdx.x - params.num_blocks);
  const int lane = threadIdx.x % 32, keys = params.num_heads * params.key_units,
            values = params.num_heads * params.value_units;
  for (int n = blockIdx.x * kWarps + threadIdx.x / 32; n < params.num_rows; n += params.num_blocks * kWarps) {
    const int i =
        n + params.places.begin < params.num_rows ? n + params.places.begin : n + params.places.begin - params.num_rows;
    const long long token = __ldg(params.rows + i);
    uint4* out = place_of(params.places, i) + (long long)i * (keys + values);
    for (int u = lane; u < max(keys, values); u += 32) {
      if (u < keys) {
        const int head = u / params.key_units, column = u % params.key_units;
        out[u] = params.k[token * params.k_token_stride + head * params.k_head_stride + column];
      }
      if (u < values) {
        const int head = u / params.value_units, column = u % params.value_units;
        out[keys + u] = params.v[token * params.v_token_stride + head * params.v_head_stride + column];
      }
    }
  }
  report(params.places, params.num_blocks);
}

// Gradients that came back. Those of one token are added in the order of their ranks, so that sums repeat bit for bit.
// A unit is 8 elements.
struct ReturnedRows {
  const uint4* rows;   // [S, units] of the wire's type; a row is K and V together
  const int* offsets;  // [num_tokens + 1] into order; the tokens after these have nothing
  const int* order;    // rows, by token and then by rank
  unsigned num_tokens, units;
};

DEVICE void add(float4& sum, float x, float y, float z, float w) { sum.x += x, sum.y += y, sum.z += z, sum.w += w; }

DEVICE void add_returned(const ReturnedRows& returned, unsigned token, unsigned unit, float4& low, float4& high) {
  if (token >= returned.num_tokens) return;
  const int end = __ldg(returned.offsets + token + 1);
  for (int i = __ldg(returned.offsets + token); i < end; i++) {
    const long long at = (long long)__ldg(returned.order + i) * returned.units + unit;
#ifdef WIRE_FP32
    const float4* x = reinterpret_cast<const float4*>(returned.rows) + 2 * at;
    const float4 a = x[0], b = x[1];
    add(low, a.x, a.y, a.z, a.w), add(high, b.x, b.y, b.z, b.w);
#else
    const uint4 x = returned.rows[at];
    const float2 a = unpack2(x.x), b = unpack2(x.y), c = unpack2(x.z), d = unpack2(x.w);
    add(low, a.x, a.y, b.x, b.y), add(high, c.x, c.y, d.x, d.y);
#endif
  }
}

struct AddParams {
  ReturnedRows returned;
  float4* dkv;  // [T, units, 2]
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) add_rows(const __grid_constant__ AddParams params) {
  const auto [returned, dkv] = params;
  let_next_kernel_begin();
  wait_for_kernel_before();
  const unsigned end = returned.num_tokens * returned.units;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
    const unsigned token = i / returned.units;
    if (__ldg(returned.offsets + token) == __ldg(returned.offsets + token + 1)) continue;
    float4 low = dkv[2ll * i], high = dkv[2ll * i + 1];
    add_returned(returned, token, i % returned.units, low, high);
    dkv[2ll * i] = low, dkv[2ll * i + 1] = high;
  }
}

// The end of a backward: gradients of rows that other ranks own are written to them, those of the rank's own queries
// rounded, and those of its own keys, after what came back is added. If they are rounded already, only rows to which
// something came back change. In this order, as the last part may have to wait for other ranks. A block does kUnits
// units of one part. Blocks are numbered as they start, so that none waits before all that write have begun.
constexpr int kUnits = 4 * kWarps * 32;

struct FinishParams {
  Places places;         // for [unsent_units] of 16 bytes, or 32 if the wire is wider
  const float4* unsent;  // [unsent_units, 2]: [rows, units]; rounded ones follow the rows of dk_to and dv_to
  int* started;          // blocks: zero, and zero afterwards; null: nothing to write
  ReturnedRows returned;
  const int* arrived;  // they are there when it has reached `number`; null: they are
  int number;
  const float4 *dkv, *dq;        // [dkv_units, 2]: [T, units of K and V], and [dq_units, 2]
  uint4 *dk_to, *dv_to, *dq_to;  // [T, key_units], [T, units - key_units], [dq_units]
  unsigned unsent_units, dq_units, dkv_units;
  float softmax_scale;  // dq still lacks it, and has the even columns of each 8 before the odd ones
  unsigned key_units;   // of returned.units
  unsigned num_own;     // rows of the rank's own
};

DEVICE uint4 rounded(float4 low, float4 high) {
  return {pack2(low.x, low.y), pack2(low.z, low.w), pack2(high.x, high.y), pack2(high.z, high.w)};
}

DEVICE uint4& key_or_value(const FinishParams& params, unsigned row, unsigned unit) {
  const unsigned keys = params.key_units, values = params.returned.units - keys;
  return unit < keys ? params.dk_to[(long long)row * keys + unit]
                     : params.dv_to[(long long)row * values + (unit - keys)];
}

DEVICE unsigned blocks_for(unsigned units) { return (units + kUnits - 1) / kUnits; }

extern "C" __global__ void __launch_bounds__(kWarps * 32) finish_grads(const __grid_constant__ FinishParams params) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  unsigned block = blockIdx.x;
  if (params.started) {
    __shared__ unsigned number;
    if (threadIdx.x == 0) {
      number = atomicAdd(params.started, 1);
      if (number == gridDim.x - 1) *params.started = 0;
    }
    __syncthreads();
    block = number;
  }
  const unsigned writers = params.started ? max(1u, blocks_for(params.unsent_units)) : 0, units = params.returned.units;
  auto each = [&](unsigned first_block, unsigned end, auto handle) {
#pragma unroll
    for (int n = 0; n < kUnits; n += kWarps * 32) {
      const unsigned i = (block - first_block) * kUnits + n + threadIdx.x;
      if (i < end) handle(i);
    }
  };
  if (block < writers) {
    const unsigned begin = params.places.begin * units;
    each(0, params.unsent_units, [&](unsigned n) {
      const unsigned i = n + begin < params.unsent_units ? n + begin : n + begin - params.unsent_units;
      uint4* to = place_of(params.places, i / units);
#ifdef ROUNDED
      to[i] = key_or_value(params, params.num_own + i / units, i % units);
#else
      const float4 low = params.unsent[2ll * i], high = params.unsent[2ll * i + 1];
#ifdef WIRE_FP32
      float4* wide = reinterpret_cast<float4*>(to) + 2ll * i;
      wide[0] = low, wide[1] = high;
#else
      to[i] = rounded(low, high);
#endif
#endif
    });
    report(params.places, writers);
  } else if (block < writers + blocks_for(params.dq_units)) {
    each(writers, params.dq_units, [&](unsigned i) {
      const float scale = params.softmax_scale;
#ifdef WIDE
      const float4* x = params.dq + i / 2 * 4ll;  // 16 columns: four of each lane, the first two of them below 8
      auto two = [&](int lane) {
        return i % 2 ? make_float2(x[lane].z, x[lane].w) : make_float2(x[lane].x, x[lane].y);
      };
      const float2 a = two(0), b = two(1), c = two(2), d = two(3);
      params.dq_to[i] = rounded(make_float4(a.x * scale, a.y * scale, b.x * scale, b.y * scale),
                                make_float4(c.x * scale, c.y * scale, d.x * scale, d.y * scale));
#else
      const float4 even = params.dq[2ll * i], odd = params.dq[2ll * i + 1];
      params.dq_to[i] = rounded(make_float4(even.x * scale, odd.x * scale, even.y * scale, odd.y * scale),
                                make_float4(even.z * scale, odd.z * scale, even.w * scale, odd.w * scale));
#endif
    });
  } else {
    const unsigned first_block = writers + blocks_for(params.dq_units);
    const bool awaits = (block - first_block) * kUnits / units < params.returned.num_tokens;
    if (params.arrived && awaits) wait_until(params.arrived, params.number);
    each(first_block, params.dkv_units, [&](unsigned i) {
      const unsigned token = i / units, unit = i % units;
      uint4& to = key_or_value(params, token, unit);
#ifdef ROUNDED
      if (__ldg(params.returned.offsets + token) == __ldg(params.returned.offsets + token + 1)) return;
      const float2 a = unpack2(to.x), b = unpack2(to.y), c = unpack2(to.z), d = unpack2(to.w);
      float4 low = make_float4(a.x, a.y, b.x, b.y), high = make_float4(c.x, c.y, d.x, d.y);
#else
      float4 low = params.dkv[2ll * i], high = params.dkv[2ll * i + 1];
#endif
      add_returned(params.returned, token, unit, low, high);
      to = rounded(low, high);
    });
  }
}
