// Packs K/V rows for group_cast and their gradients for group_reduce, adds the rows that come back, and rounds the sums. One
// launch each. Rows are packed into one buffer, or written to where they are wanted, in the memory of several GPUs.
//
// The packing moves units of 16 bytes. A warp handles one row of K and V, so its lanes touch consecutive units.
//
// Compile-time macros
//   WIRE_FP32  returned gradients are fp32 (default: the input type)
//   USE_FP16   the input type is fp16 (default bf16)
#include "sm90.cuh"

constexpr int kWarps = 8;

constexpr int kMaxPlaces = 7;
struct Places {
  uint4* to[kMaxPlaces];                  // where row 0 would lie if it were of this place
  int* flags[kMaxPlaces];                 // words of other GPUs, to be counted up when all rows are written
  int* blocks_done;                       // zero, and zero afterwards; unused without flags
  int ends[kMaxPlaces];                   // the row after the last of each place, ascending
  int num_flags;
};

DEVICE uint4* place_of(const Places& places, int row) {
  int i = 0;
  while (row >= places.ends[i]) i++;
  return places.to[i];
}

// By all threads of all blocks, when they have written their rows.
DEVICE void report(const Places& places) {
  if (places.num_flags == 0) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(places.blocks_done, 1) != (int)gridDim.x - 1) return;
  __threadfence_system();
  *places.blocks_done = 0;
  for (int i = 0; i < places.num_flags; i++)
    asm volatile("red.relaxed.sys.global.add.s32 [%0], 1;" ::"l"(places.flags[i]) : "memory");
}

struct GatherParams {
  const uint4 *k, *v;                     // [T, heads, units_per_head] units, strides below
  const int* rows;                        // [num_rows] local token numbers
  Places places;                          // rows [2, heads, units_per_head] contiguous
  long long k_token_stride, k_head_stride, v_token_stride, v_head_stride;   // units
  int num_rows, num_heads, units_per_head;
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) gather_rows(const __grid_constant__ GatherParams params) {
  wait_for_kernel_before();
  const int lane = threadIdx.x % 32, units = params.num_heads * params.units_per_head;
  for (int i = blockIdx.x * kWarps + threadIdx.x / 32; i < params.num_rows; i += gridDim.x * kWarps) {
    const long long token = __ldg(params.rows + i);
    uint4* out = place_of(params.places, i) + (long long)i * 2 * units;
    for (int u = lane; u < units; u += 32) {
      const int head = u / params.units_per_head, column = u % params.units_per_head;
      out[u] = params.k[token * params.k_token_stride + head * params.k_head_stride + column];
      out[units + u] = params.v[token * params.v_token_stride + head * params.v_head_stride + column];
    }
  }
  report(params.places);
}

struct PackParams {
  const float4* grad;                     // [num_rows, units, 2]
  Places places;                          // rows [units] of 8 elements of the wire's type
  int num_rows;
  unsigned units;
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) pack_grads(const __grid_constant__ PackParams params) {
  wait_for_kernel_before();
  const unsigned end = params.num_rows * params.units;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
    const float4 low = params.grad[2ll * i], high = params.grad[2ll * i + 1];
    uint4* to = place_of(params.places, i / params.units);
#ifdef WIRE_FP32
    float4* wide = reinterpret_cast<float4*>(to) + 2ll * i;
    wide[0] = low, wide[1] = high;
#else
    to[i] = {pack2(low.x, low.y), pack2(low.z, low.w), pack2(high.x, high.y), pack2(high.z, high.w)};
#endif
  }
  report(params.places);
}

// Gradients that came back. Those of one token are added in the order of their ranks, so that sums repeat bit for bit.
// A unit is 8 elements.
struct ReturnedRows {
  const uint4* rows;                      // [S, units] of the wire's type; a row is K and V together
  const int* offsets;                     // [num_tokens + 1] into order; the tokens after these have nothing
  const int* order;                       // rows, by token and then by rank
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

// To the sums of dK/dV, [T, units] of 8 floats.
extern "C" __global__ void __launch_bounds__(kWarps * 32)
    add_rows(const __grid_constant__ ReturnedRows returned, float4* dkv) {
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

// The final gradients in the input type: sums are rounded, those of dK/dV after adding the last rows that return.
struct FinishParams {
  ReturnedRows returned;
  const int* arrived;                     // they are there when it has reached `number`; null: they are
  int number;
  const float4 *dkv, *dq;                 // [dkv_units, 2]: [T, K and V, units / 2] and [dq_units, 2]
  uint4 *dk_to, *dv_to, *dq_to;           // [T, units / 2] twice, [dq_units]
  unsigned dkv_units, dq_units;
  float softmax_scale;                    // dq still lacks it, and has the even columns of each 8 before the odd ones
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) finish_grads(const __grid_constant__ FinishParams params) {
  wait_for_kernel_before();
  const unsigned end = params.dq_units + params.dkv_units, units = params.returned.units;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
    const bool of_dq = i < params.dq_units;  // first, as they wait for nothing
    const unsigned j = of_dq ? i : i - params.dq_units;
    const float4* from = (of_dq ? params.dq : params.dkv) + 2ll * j;
    float4 low = from[0], high = from[1];
    uint4* to = params.dq_to + j;
    if (of_dq) {
      const float4 even = low, odd = high;
      const float scale = params.softmax_scale;
      low = make_float4(even.x * scale, odd.x * scale, even.y * scale, odd.y * scale);
      high = make_float4(even.z * scale, odd.z * scale, even.w * scale, odd.w * scale);
    } else {
      const unsigned token = j / units, unit = j % units, half = units / 2;
      if (params.arrived && token < params.returned.num_tokens) wait_until(params.arrived, params.number);
      add_returned(params.returned, token, unit, low, high);
      to = (unit < half ? params.dk_to + unit : params.dv_to + unit - half) + (long long)token * half;
    }
    *to = {pack2(low.x, low.y), pack2(low.z, low.w), pack2(high.x, high.y), pack2(high.z, high.w)};
  }
}
