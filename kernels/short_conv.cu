// The causal short convolution of packed documents at the speed of memory, one launch for each direction. A thread
// takes 8 channels of a run of tokens and keeps the rows before its token in registers.
//
// Compile-time macros
//   SILU       out = silu(sum) (default: the sum)
//   USE_FP16   the input type is fp16 (default bf16)
#include "sm90.cuh"

constexpr int kThreads = 128, kRun = 64, kEight = 8;  // tokens of a run; channels of a thread
constexpr int kWidth = 4, kBack = kWidth - 1;         // rows that a token takes in, and those before its own

struct ConvParams {
  const uint4 *x, *history, *dout;  // [num_tokens, units], [history rows, units], [num_tokens, units]
  uint4 *out, *dx;                  // [num_tokens, units]
  const float* weight;              // [kWidth, 8 units]: by distance, the token's own first
  float *dweight, *dedges;          // [runs, kWidth, 8 units], [edges, 8 units]
  const int* offset;                // [num_tokens]: tokens of the same part before it; -1: of no document
  const int* edge;                  // [num_tokens]: number among the tokens that take in history; else -1
  const int* taken;                 // [edges, kWidth - 1]: by distance, history row; -1: none
  int num_tokens, units;
};

struct Eight {
  float at[kEight];
};

DEVICE Eight unpacked(const uint4& packed) {
  const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
  Eight eight;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack2(pairs[i]);
    eight.at[2 * i] = pair.x, eight.at[2 * i + 1] = pair.y;
  }
  return eight;
}

DEVICE uint4 packed(const Eight& eight) {
  return make_uint4(pack2(eight.at[0], eight.at[1]), pack2(eight.at[2], eight.at[3]), pack2(eight.at[4], eight.at[5]),
                    pack2(eight.at[6], eight.at[7]));
}

DEVICE Eight zeros() {
  Eight eight;
#pragma unroll
  for (int i = 0; i < kEight; i++) eight.at[i] = 0;
  return eight;
}

// What a thread goes along: rows [begin, end) of one unit of channels.
struct Walk {
  const ConvParams& params;
  int unit;
  Eight weight[kWidth], rows[kWidth];  // by distance: of the token now, and the local rows before it

  DEVICE Walk(const ConvParams& params, int unit, int begin) : params(params), unit(unit) {
#pragma unroll
    for (int d = 0; d < kWidth; d++) {
      const float4* from = (const float4*)(params.weight + (long long)d * kEight * params.units) + 2 * unit;
      const float4 low = from[0], high = from[1];
      weight[d] = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    }
#pragma unroll
    for (int d = 0; d < kBack; d++) rows[d] = begin - 1 - d >= 0 ? row(params.x, begin - 1 - d) : zeros();
  }

  DEVICE Eight row(const uint4* from, int number) const {
    return unpacked(__ldg(from + (long long)number * params.units + unit));
  }

  // Goes to the next token; `taken` becomes the rows that it takes in.
  DEVICE int step(int token, Eight (&taken)[kWidth]) {
#pragma unroll
    for (int d = kBack; d > 0; d--) rows[d] = rows[d - 1];
    rows[0] = row(params.x, token);
    const int offset = __ldg(params.offset + token);
#pragma unroll
    for (int d = 0; d < kWidth; d++) taken[d] = d <= offset ? rows[d] : zeros();
    if (offset >= kBack) return offset;
    if (const int edge = __ldg(params.edge + token); edge >= 0) {
#pragma unroll
      for (int d = 1; d < kWidth; d++) {
        const int from = __ldg(params.taken + edge * kBack + d - 1);
        if (from >= 0) taken[d] = row(params.history, from);
      }
    }
    return offset;
  }

  DEVICE Eight sum(const Eight (&taken)[kWidth]) const {
    Eight total = zeros();
#pragma unroll
    for (int d = 0; d < kWidth; d++) {
#pragma unroll
      for (int i = 0; i < kEight; i++) total.at[i] += weight[d].at[i] * taken[d].at[i];
    }
    return total;
  }
};

DEVICE float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

extern "C" __global__ void __launch_bounds__(kThreads) short_conv(const __grid_constant__ ConvParams params) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int columns = (params.units + kThreads - 1) / kThreads;
  const int unit = blockIdx.x % columns * kThreads + threadIdx.x, begin = blockIdx.x / columns * kRun;
  if (unit >= params.units) return;
  const int end = min(begin + kRun, params.num_tokens);
  Walk walk(params, unit, begin);
#pragma unroll 4
  for (int token = begin; token < end; token++) {
    Eight taken[kWidth];
    walk.step(token, taken);
    Eight out = walk.sum(taken);
#ifdef SILU
#pragma unroll
    for (int i = 0; i < kEight; i++) out.at[i] *= sigmoid(out.at[i]);
#endif
    params.out[(long long)token * params.units + unit] = packed(out);
  }
}

// Gradients of x, of the weight by run, and of the sums of tokens that take in history. Those of local rows that others
// take in as history are not in dx.
extern "C" __global__ void __launch_bounds__(kThreads) short_conv_grads(const __grid_constant__ ConvParams params) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int columns = (params.units + kThreads - 1) / kThreads;
  const int unit = blockIdx.x % columns * kThreads + threadIdx.x, run = blockIdx.x / columns, begin = run * kRun;
  if (unit >= params.units) return;
  const int end = min(begin + kRun, params.num_tokens), last = min(end + kBack, params.num_tokens);
  Walk walk(params, unit, begin);
  Eight dweight[kWidth], dx[kWidth];  // dx by distance from the token
#pragma unroll
  for (int d = 0; d < kWidth; d++) dweight[d] = dx[d] = zeros();
  for (int token = begin; token < end + kBack; token++) {
#pragma unroll
    for (int d = kBack; d > 0; d--) dx[d] = dx[d - 1];
    dx[0] = zeros();
    if (token < last) {
      Eight taken[kWidth];
      const int offset = walk.step(token, taken);
      Eight dsum = walk.row(params.dout, token);
#ifdef SILU
      const Eight sum = walk.sum(taken);
#endif
#pragma unroll
      for (int i = 0; i < kEight; i++) {
#ifdef SILU
        const float gate = sigmoid(sum.at[i]);
        dsum.at[i] *= gate * (1 + sum.at[i] * (1 - gate));
#endif
        if (offset < 0) dsum.at[i] = 0;
#pragma unroll
        for (int d = 0; d < kWidth; d++) {
          if (d <= offset) dx[d].at[i] += walk.weight[d].at[i] * dsum.at[i];
          if (token < end) dweight[d].at[i] += taken[d].at[i] * dsum.at[i];
        }
      }
      if (const int edge = token < end && offset < kBack ? __ldg(params.edge + token) : -1; edge >= 0) {
        float4* to = (float4*)(params.dedges + (long long)edge * kEight * params.units) + 2 * unit;
        to[0] = make_float4(dsum.at[0], dsum.at[1], dsum.at[2], dsum.at[3]);
        to[1] = make_float4(dsum.at[4], dsum.at[5], dsum.at[6], dsum.at[7]);
      }
    }
    if (const int done = token - kBack; done >= begin && done < end)
      params.dx[(long long)done * params.units + unit] = packed(dx[kBack]);
  }
#pragma unroll
  for (int d = 0; d < kWidth; d++) {
    float4* to = (float4*)(params.dweight + ((long long)run * kWidth + d) * kEight * params.units) + 2 * unit;
    to[0] = make_float4(dweight[d].at[0], dweight[d].at[1], dweight[d].at[2], dweight[d].at[3]);
    to[1] = make_float4(dweight[d].at[4], dweight[d].at[5], dweight[d].at[6], dweight[d].at[7]);
  }
}
