// What the forward and the backward share: compile-time shape, list records, the order of work.
//
// Compile-time macros
//   HEAD_DIM   64 or 128; smaller head dims are padded by the copy engine's zero fill
//   PACK       query heads of one tile: a tile of R rows is R / PACK tokens x PACK heads of one KV head's group,
//              row = token * PACK + head
//   USE_FP16   inputs are fp16 (default bf16)
//
// Lists, made by torchtitan_magi/worklists.py. A segment is a run of tiles on one mask layer, 8 ints:
//   forward  {layer, 0, 0, 0, first_key, end_key, full_first, full_end}
//            keys [first_key, end_key) in blocks of 128 from first_key; a block inside [full_first, full_end) needs no mask
//   backward {layer, component, first_key, end_key, first_block, end_block, full_first, full_end}
//            query blocks of 64 / PACK tokens; a block inside [full_first, full_end) needs no mask
//            component: position of this run of keys among those of its query blocks (deterministic mode only)
//            [first_key, end_key): the keys of the tile
// A work item is {tile, num_segments, first_segment, part} + its first segment (12 ints). first_segment counts further segments.
//   part     forward: 0, or the number of a part of a tile that is cut, from 1 on; deterministic backward: parts of the tile before it
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

constexpr int kThreads = 384;                 // one producer and two consumer warpgroups
constexpr int kConsumers = 256;               // threads of the two consumer warpgroups
constexpr int kKeys = 128;                    // keys of a block (forward) or tile (backward)
constexpr int kPanels = HEAD_DIM / 64;        // 64-column, 128-byte-row panels of a [rows][HEAD_DIM] operand
constexpr float kMasked = -1e30f;             // a masked score: finite, so that max and differences stay finite
constexpr float kLn2 = 0.6931471805599453f;
#define kInfinity __int_as_float(0x7f800000)

enum BlockFlags { kFullBlock = 1, kLastBlock = 2, kHalfBlock = 4 };   // half (forward): the second 64 keys are beyond the segment

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

DEVICE WorkItem load_item(const int4* items, int index) {
  const int4 a = __ldg(items + 3 * index), b = __ldg(items + 3 * index + 1), c = __ldg(items + 3 * index + 2);
  return {a.x, a.y, a.z, a.w, {b.x, b.y, c.x, c.y, c.z, c.w}};
}

// The persistent grid's item order: a few tiles of all heads; then tiles as listed, `heads_per_wave` heads at a time so that what
// they read stays in L2; and at the end a tail of tiles of all heads. heads_per_wave divides num_heads.
struct Schedule {
  int num_early, num_tiles, num_tail, num_heads, heads_per_wave;
  DEVICE constexpr int num_items() const { return (num_early + num_tiles + num_tail) * num_heads; }
  DEVICE constexpr bool is_of_all_heads(int item) const {
    return item < num_early * num_heads || item >= (num_early + num_tiles) * num_heads;
  }
  DEVICE constexpr int list_index(int item) const {
    const int in_waves = item - num_early * num_heads;
    return is_of_all_heads(item) ? item / num_heads : num_early + in_waves % (num_tiles * heads_per_wave) / heads_per_wave;
  }
  DEVICE constexpr int head(int item) const {
    const int in_waves = item - num_early * num_heads;
    return is_of_all_heads(item) ? item % num_heads
                                 : in_waves / (num_tiles * heads_per_wave) * heads_per_wave + in_waves % heads_per_wave;
  }
};

// Keys from `first` on lie in tensors of their own; no block has keys of both sides. They are being fetched, and there once
// *arrived has reached `number`; null: they are there.
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

// counter[0]: items handed out, if not by block number; counter[1]: CTAs that are done; then, for each tile that the forward
// cuts, the parts that are done. The last one sets them back to zero for the next launch. In deterministic mode items wait for
// earlier ones, which must be with CTAs that run: while another kernel holds SMs not all do, so no item belongs to a CTA before
// it starts.
DEVICE int first_item(int* counter) { return kDeterministic ? atomicAdd(counter, 1) : blockIdx.x; }
DEVICE int next_item(int* counter) { return atomicAdd(counter, 1) + (kDeterministic ? 0 : (int)gridDim.x); }
DEVICE void finish_items(int* counter) {
  __threadfence();
  if (atomicAdd(counter + 1, 1) == (int)gridDim.x - 1) {
    counter[0] = 0;
    counter[1] = 0;
  }
}
