// Packs K/V rows for group_cast, adds the rows that group_reduce brings back, and rounds the sums. One launch each.
//
// Rows move in units of 16 bytes. A warp handles one row of K and V, so its lanes touch consecutive units.
//
// Compile-time macros
//   WIRE_FP32  returned gradients are fp32 (default: the input type)
//   USE_FP16   the input type is fp16 (default bf16)
#include "sm90.cuh"

constexpr int kWarps = 8;

struct GatherParams {
  const uint4 *k, *v;                     // [T, heads, units_per_head] units, strides below
  const int* rows;                        // [num_rows] local token numbers
  uint4 *sent, *own;                      // [num_rows] and [num_own = T or 0], [2, heads, units_per_head] contiguous
  long long k_token_stride, k_head_stride, v_token_stride, v_head_stride;   // units
  int num_rows, num_own, num_heads, units_per_head;
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) gather_rows(const __grid_constant__ GatherParams params) {
  const int lane = threadIdx.x % 32, units = params.num_heads * params.units_per_head;
  for (int i = blockIdx.x * kWarps + threadIdx.x / 32; i < params.num_rows + params.num_own; i += gridDim.x * kWarps) {
    const bool leaves = i < params.num_rows;
    const long long token = leaves ? __ldg(params.rows + i) : i - params.num_rows;
    uint4* out = leaves ? params.sent + (long long)i * 2 * units : params.own + token * 2 * units;
    for (int u = lane; u < units; u += 32) {
      const int head = u / params.units_per_head, column = u % params.units_per_head;
      out[u] = params.k[token * params.k_token_stride + head * params.k_head_stride + column];
      out[units + u] = params.v[token * params.v_token_stride + head * params.v_head_stride + column];
    }
  }
}

// The returned rows of one token are added in the order of their ranks, by one warp, so that sums repeat bit for bit.
struct AddParams {
  const uint4* returned;                  // [S, units] 16 bytes each, contiguous; a row is K and V together
  float4* grad;                           // [T, units * (16 bytes / wire element) / 4] contiguous
  const int* tokens;                      // [num_tokens] local token numbers, each once
  const int* offsets;                     // [num_tokens + 1] into order
  const int* order;                       // rows of `returned`, by token and then by rank
  int num_tokens, units;
};

DEVICE float2 widen(u32 pair) {
#ifdef USE_FP16
  float low, high;
  asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(low), "=f"(high) : "r"(pair));
  return make_float2(low, high);
#else
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
#endif
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) add_rows(const __grid_constant__ AddParams params) {
  const int lane = threadIdx.x % 32;
  for (int i = blockIdx.x * kWarps + threadIdx.x / 32; i < params.num_tokens; i += gridDim.x * kWarps) {
    const int begin = __ldg(params.offsets + i), end = __ldg(params.offsets + i + 1);
    const long long token = __ldg(params.tokens + i);
    for (int u = lane; u < params.units; u += 32) {
#ifdef WIRE_FP32
      float4* grad = params.grad + token * params.units + u;
      float4 sum = *grad;
      for (int j = begin; j < end; j++) {
        const uint4 x = params.returned[(long long)__ldg(params.order + j) * params.units + u];
        sum.x += __uint_as_float(x.x), sum.y += __uint_as_float(x.y);
        sum.z += __uint_as_float(x.z), sum.w += __uint_as_float(x.w);
      }
      *grad = sum;
#else
      float4* grad = params.grad + (token * params.units + u) * 2;
      float4 low = grad[0], high = grad[1];
      for (int j = begin; j < end; j++) {
        const uint4 x = params.returned[(long long)__ldg(params.order + j) * params.units + u];
        const float2 a = widen(x.x), b = widen(x.y), c = widen(x.z), d = widen(x.w);
        low.x += a.x, low.y += a.y, low.z += b.x, low.w += b.y;
        high.x += c.x, high.y += c.y, high.z += d.x, high.w += d.y;
      }
      grad[0] = low, grad[1] = high;
#endif
    }
  }
}

// The final gradients in the input type, from their fp32 sums. A unit is 8 elements.
struct RoundParams {
  const float4 *dq, *dkv;                 // [dq_units, 2], [T, 2, row_units, 2]
  uint4 *dq_to, *dk_to, *dv_to;           // [dq_units], [T, row_units] twice
  long long dq_units, dkv_units;
  int row_units;                          // of one token's dk
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) round_grads(const __grid_constant__ RoundParams params) {
  const long long end = params.dq_units + params.dkv_units;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += (long long)gridDim.x * blockDim.x) {
    const bool of_dq = i < params.dq_units;
    const long long j = of_dq ? i : i - params.dq_units, row = j / params.row_units;
    const float4* from = (of_dq ? params.dq : params.dkv) + 2 * j;
    const float4 low = from[0], high = from[1];
    const uint4 rounded = {pack2(low.x, low.y), pack2(low.z, low.w), pack2(high.x, high.y), pack2(high.z, high.w)};
    if (of_dq)
      params.dq_to[j] = rounded;
    else
      (row % 2 ? params.dv_to : params.dk_to)[row / 2 * params.row_units + j % params.row_units] = rounded;
  }
}
