// What the forward and the backward share: compile-time shape, list records, the order of work.
//
// Compile-time macros
//   HEAD_DIM   of q and k: 64, 128, 192 or 256; smaller head dims are padded by the copy engine's zero fill
//   VALUE_DIM  of v and out: the same as HEAD_DIM, or 128 with 192
//   PACK       query heads of one tile: a tile of R rows is R / PACK tokens x PACK heads of one KV head's group,
//              row = token * PACK + head
//   USE_FP16   inputs are fp16 (default bf16)
//   SOFTCAP    scores s become softcap * tanh(s / softcap)
//
// Lists, made by torchtitan_magi/backends/ffa/worklists.py. A segment is a run of tiles on one mask layer, 8 ints:
//   forward  {layer, 0, 0, 0, first_key, end_key, full_first, full_end}
//            keys [first_key, end_key) in blocks of 128 from first_key; one inside [full_first, full_end) needs no mask
//   backward {layer, component, first_key, end_key, first_block, end_block, full_first, full_end}
//            query blocks of 64 / PACK tokens; one inside [full_first, full_end) needs no mask
//            component: position of this run of keys among those of its query blocks (deterministic mode only)
//            [first_key, end_key): the keys of the tile
// A work item is {tile, num_segments, first_segment, part} + its first segment (12 ints).
// first_segment counts further segments.
//   part     forward: 0, or the number of a part of a tile that is cut, from 1 on
//            deterministic backward: parts of the tile before it
// bands[layer][row] = {lo, hi}: the keys that layer lets the row see. The intervals of a row are disjoint.
#pragma once
#include "sm90.cuh"

#ifdef DETERMINISTIC
constexpr bool kDeterministic = true;
#else
constexpr bool kDeterministic = false;
#endif
#ifdef USE_FP16
#define ELEMENT_IS_FP16 1
#else
#define ELEMENT_IS_FP16 0
#endif

constexpr bool kWide = HEAD_DIM > 128;        // rows leave from registers: shared memory has no room for them
constexpr int kPanels = HEAD_DIM / 64;        // 64-column, 128-byte-row panels of a [rows][HEAD_DIM] operand
constexpr int kValuePanels = VALUE_DIM / 64;  // and of a [rows][VALUE_DIM] one
#ifdef SOFTCAP
constexpr bool kSoftcap = true;
constexpr float kMasked = -1e18f;  // its square is finite
#else
constexpr bool kSoftcap = false;
constexpr float kMasked = -1e30f;  // a masked score: finite, so that max and differences stay finite
#endif
constexpr float kLn2 = 0.6931471805599453f;

// With a softcap scores stay in units of it: tanh(x * scale / softcap), times softcap * log2(e) in the exponent.
template <int N>
DEVICE void cap_scores(float (&s_rmem)[N], float scale) {
#pragma unroll
  for (int j = 0; j < N; j++) s_rmem[j] = tanh_fast(s_rmem[j] * scale);
}

// half (forward): the second 64 keys are beyond the segment
// takes sinks (of an item): it is the tile's only or first part
enum BlockFlags { kFullBlock = 1, kLastBlock = 2, kHalfBlock = 4, kTakesSinks = 8 };

struct Segment {
  int layer, component, first, end, full_first, full_end;
};

struct WorkItem {
  int tile, num_segments, first_segment, part;
  Segment segment;
};

DEVICE Segment load_segment(const int4* words) {
  const int4 a = __ldg(words), b = __ldg(words + 1);
  return {a.x, a.y, b.x, b.y, b.z, b.w};
}

// The item whose word i lane i holds.
DEVICE WorkItem share_item(int word) {
  auto at = [&](int i) { return __shfl_sync(~0u, word, i); };
  return {at(0), at(1), at(2), at(3), {at(4), at(5), at(8), at(9), at(10), at(11)}};
}

DEVICE WorkItem read_item(const int4 (&words)[3]) {
  const int4 a = words[0], b = words[1], c = words[2];
  return {a.x, a.y, a.z, a.w, {b.x, b.y, c.x, c.y, c.z, c.w}};
}

// The persistent grid's item order: a few tiles that come first in all heads; then the others as listed; both
// `heads_per_wave` heads at a time, so that what they read stays in L2. At the end a tail of tiles of all heads.
// heads_per_wave divides num_heads.
struct Schedule {
  int num_early, num_tiles, num_tail, num_heads, heads_per_wave;
  DEVICE constexpr int num_items() const { return (num_early + num_tiles + num_tail) * num_heads; }
  DEVICE constexpr int list_index(int item) const {
    const Section in = section(item);
    return in.first_tile + in.item % (in.num_tiles * in.heads_per_wave) / in.heads_per_wave;
  }
  DEVICE constexpr int head(int item) const {
    const Section in = section(item);
    return in.item / (in.num_tiles * in.heads_per_wave) * in.heads_per_wave + in.item % in.heads_per_wave;
  }

private:
  struct Section {
    int item, first_tile, num_tiles, heads_per_wave;
  };
  DEVICE constexpr Section section(int item) const {
    const int waves = num_early * num_heads, tail = (num_early + num_tiles) * num_heads;
    if (item < waves) return {item, 0, num_early, heads_per_wave};
    if (item < tail) return {item - waves, num_early, num_tiles, heads_per_wave};
    return {item - tail, num_early + num_tiles, num_tail, num_heads};
  }
};

// Keys from `first` on lie in tensors of their own; no block has keys of both sides. They are being fetched, and there
// once *arrived has reached `number`; null: they are there.
struct LateKeys {
  const int* arrived;
  int number, first;
};

// Before copies out of late keys, by the thread that starts them.
DEVICE void wait_for_keys(const LateKeys& late) {
  if (!late.arrived) return;
  wait_until(late.arrived, late.number);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// counter[0]: items handed out, if not by block number; counter[1]: CTAs that are done; then, for each tile that the
// forward cuts, the parts that are done. The last one sets them back to zero for the next launch. In deterministic mode
// items wait for earlier ones, which must be with CTAs that run: while another kernel holds SMs not all do, so no item
// belongs to a CTA before it starts.
DEVICE int first_item(int* counter) { return kDeterministic ? atomicAdd(counter, 1) : blockIdx.x; }
// a ticket: what counter[0] was
DEVICE int item_of(int ticket) { return ticket + (kDeterministic ? 0 : (int)gridDim.x); }
DEVICE int next_item(int* counter) { return item_of(atomicAdd(counter, 1)); }
DEVICE void finish_items(int* counter) {
  __threadfence();
  if (atomicAdd(counter + 1, 1) == (int)gridDim.x - 1) {
    counter[0] = 0;
    counter[1] = 0;
  }
}

// ----------------------------------------------------------------------------- rows from accumulators to global memory
// Transposes 4 x 4 words among the four lanes of a quad: lane i gets word i of every lane, in lane order.
DEVICE uint4 quad_transpose(u32 w0, u32 w1, u32 w2, u32 w3, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const u32 a = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), b = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  const u32 x0 = odd ? a : w0, x1 = odd ? w1 : a;  // word (0 | 1) of this lane pair
  const u32 y0 = odd ? b : w2, y1 = odd ? w3 : b;  // word (2 | 3)
  const u32 c = __shfl_xor_sync(~0u, upper ? x0 : y0, 2), d = __shfl_xor_sync(~0u, upper ? x1 : y1, 2);
  return upper ? make_uint4(c, d, y0, y1) : make_uint4(x0, x1, c, d);
}

// Stores accumulator rows r (elements 4i, 4i + 1) and r + 8 (4i + 2, 4i + 3), times `scale`, as the input type, 16
// bytes a lane. row_* = the row's first element, null when there is nothing to store.
template <int N>
DEVICE void store_rows_packed(const float (&acc)[N / 2], float scale, unsigned short* row_low, unsigned short* row_high,
                              int head_dim, int lane) {
#pragma unroll
  for (int i = 0; i < N / 8; i += 4) {
    u32 low[4], high[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int e = 4 * (i + j);
      low[j] = pack2(acc[e] * scale, acc[e + 1] * scale);
      high[j] = pack2(acc[e + 2] * scale, acc[e + 3] * scale);
    }
    const uint4 l = quad_transpose(low[0], low[1], low[2], low[3], lane);
    const uint4 h = quad_transpose(high[0], high[1], high[2], high[3], lane);
    const int column = (i + lane % 4) * 8;
    if (column < head_dim) {
      if (row_low) *(uint4*)(row_low + column) = l;
      if (row_high) *(uint4*)(row_high + column) = h;
    }
  }
}

// The same as fp32, 8 bytes a lane.
template <int N>
DEVICE void store_rows_float(const float (&acc)[N / 2], float scale, float* row_low, float* row_high, int head_dim,
                             int lane) {
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    const int column = i * 8 + lane % 4 * 2;
    if (column < head_dim) {
      if (row_low) *(float2*)(row_low + column) = make_float2(acc[4 * i] * scale, acc[4 * i + 1] * scale);
      if (row_high) *(float2*)(row_high + column) = make_float2(acc[4 * i + 2] * scale, acc[4 * i + 3] * scale);
    }
  }
}
