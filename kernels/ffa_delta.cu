// The memory-bound kernel before the backward.
//
//   USE_FP16   the input type is fp16 (default bf16)
//   OUT_FP32   out is fp32 (the accumulated output of several stages), else the input type like dOut
#include "sm90.cuh"

// delta = rowsum(out * dOut), and zero[..] = more_zero[..] = 0 on the way. One half-warp per row, 8 elements a lane.
//
// Grid: 16 threads per row, 1 per 8 elements to zero, whichever is more.
struct DeltaParams {
  const void *out, *dout;                 // [num_rows, head_dim] contiguous
  float *delta, *zero, *more_zero;        // [num_rows], [num_zero], [num_more_zero]
  long long num_rows, num_zero, num_more_zero;   // what is to be zeroed: multiples of 8, may be 0
  int head_dim;                           // a multiple of 8, at most 128
};

extern "C" __global__ void __launch_bounds__(256) ffa_delta(const __grid_constant__ DeltaParams params) {
  const auto [out, dout, delta, zero, more_zero, num_rows, num_zero, num_more_zero, head_dim] = params;
  const long long row = (long long)blockIdx.x * 16 + threadIdx.x / 16;
  const int column = threadIdx.x % 16 * 8;
  wait_for_kernel_before();
  const long long z = ((long long)blockIdx.x * 256 + threadIdx.x) * 8;
  if (z < num_zero + num_more_zero) {
    float4* to = (float4*)(z < num_zero ? zero + z : more_zero + (z - num_zero));
    to[0] = to[1] = make_float4(0, 0, 0, 0);
  }
  float sum = 0;
  if (row < num_rows && column < head_dim) {
    const long long at = row * head_dim + column;
    const uint4 g = *(const uint4*)((const unsigned short*)dout + at);
    const u32 packed[4] = {g.x, g.y, g.z, g.w};
#ifdef OUT_FP32
    const float4 a = *(const float4*)((const float*)out + at), b = *(const float4*)((const float*)out + at + 4);
    const float2 o[4] = {{a.x, a.y}, {a.z, a.w}, {b.x, b.y}, {b.z, b.w}};
#else
    const uint4 p = *(const uint4*)((const unsigned short*)out + at);
    const float2 o[4] = {unpack2(p.x), unpack2(p.y), unpack2(p.z), unpack2(p.w)};
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 d = unpack2(packed[i]);
      sum += o[i].x * d.x + o[i].y * d.y;
    }
  }
#pragma unroll
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (row < num_rows && threadIdx.x % 16 == 0) delta[row] = sum;
}
