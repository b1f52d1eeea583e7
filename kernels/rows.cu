// Packs K/V rows for group_cast, adds the rows that group_reduce brings back, and rounds the sums. One launch each.
//
// The packing moves units of 16 bytes. A warp handles one row of K and V, so its lanes touch consecutive units.
//
// Compile-time macros
//   WIRE_FP32  returned gradients are fp32 (default: the input type)
//   USE_FP16   the input type is fp16 (default bf16)
#include "sm90.cuh"

constexpr int kWarps = 8;

struct GatherParams {
  const uint4 *k, *v;                     // [T, heads, units_per_head] units, strides below
  const int* rows;                        // [num_rows] local token numbers
  uint4* sent;                            // [num_rows, 2, heads, units_per_head] contiguous
  long long k_token_stride, k_head_stride, v_token_stride, v_head_stride;   // units
  int num_rows, num_heads, units_per_head;
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) gather_rows(const __grid_constant__ GatherParams params) {
  wait_for_kernel_before();
  const int lane = threadIdx.x % 32, units = params.num_heads * params.units_per_head;
  for (int i = blockIdx.x * kWarps + threadIdx.x / 32; i < params.num_rows; i += gridDim.x * kWarps) {
    const long long token = __ldg(params.rows + i);
    uint4* out = params.sent + (long long)i * 2 * units;
    for (int u = lane; u < units; u += 32) {
      const int head = u / params.units_per_head, column = u % params.units_per_head;
      out[u] = params.k[token * params.k_token_stride + head * params.k_head_stride + column];
      out[units + u] = params.v[token * params.v_token_stride + head * params.v_head_stride + column];
    }
  }
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

// The final gradients in the input type: the last rows that return are added, and sums rounded.
struct FinishParams {
  ReturnedRows returned;
  const float4 *dkv, *dq;                 // [dkv_units, 2]: [T, K and V, units / 2] and [dq_units, 2]
  uint4 *dk_to, *dv_to, *dq_to;           // [T, units / 2] twice, [dq_units]
  unsigned dkv_units, dq_units;
  float softmax_scale;                    // dq still lacks it, and has the even columns of each 8 before the odd ones
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) finish_grads(const __grid_constant__ FinishParams params) {
  wait_for_kernel_before();
  const unsigned end = params.dkv_units + params.dq_units, units = params.returned.units;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
    const bool of_dq = i >= params.dkv_units;
    const unsigned j = of_dq ? i - params.dkv_units : i;
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
      add_returned(params.returned, token, unit, low, high);
      to = (unit < half ? params.dk_to + unit : params.dv_to + unit - half) + (long long)token * half;
    }
    *to = {pack2(low.x, low.y), pack2(low.z, low.w), pack2(high.x, high.y), pack2(high.z, high.w)};
  }
}
