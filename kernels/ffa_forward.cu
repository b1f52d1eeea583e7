// FFA forward: out = softmax(scale * Q K^T, over the keys of the mask) V, and its log-sum-exp.
//
// A work item is one tile of 128 or 192 query rows (kRows / PACK tokens x PACK heads) of one KV head, with the blocks
// of 128 keys that its rows see. Warpgroup 0 is the producer: it walks the lists and starts the copies. The others, two
// or three, own 64 rows each:
//
//   S(n+1) = Q K(n+1)^T        both issued at once, asynchronous
//   O     += P(n) V(n)
//   wait for S(n+1); mask and softmax of S(n+1) run under P(n) V(n)
//   wait for O; scale it to the new row maximum; P(n+1) = S(n+1) rounded
//
// Attention over keys that arrive in stages is merged on the way out:
//   EARLIER  adds to (out fp32, lse) of the stages before; lse in place, rows that see no new key keep theirs
//   MORE     out is fp32, for stages that follow (in place if there were some before), else the input type
// Rows of out pass through shared memory: the producer fetches those of earlier stages before the item ends, a second
// warp of warpgroup 0 writes the new ones while the next item is worked on. In fp32 they have the even columns of each
// 8 before the odd ones, see store_matrices.
//
// SINKS: in the last stage each row's softmax takes in its head's sink, a score without a value: its share joins the
// row's sum under the last product. Of a tile that is cut, in its first part.
//
// A tile may be cut into parts with some of its key blocks each, so that all SMs end at nearly the same time. Parts
// leave what they have in memory; the last one to be done adds all of them up, in their order, and goes on as a whole
// tile does.
#include "ffa_layout.cuh"

// 64 columns leave registers for a third warpgroup, which works while the others wait in their softmax.
constexpr int kRows = HEAD_DIM == 64 ? 192 : 128;
constexpr int kConsumers = 2 * kRows, kThreads = 128 + kConsumers;
constexpr int kTokens = kRows / PACK;
#ifdef MORE
constexpr bool kMore = true;
#else
constexpr bool kMore = false;
#endif
#ifdef EARLIER
constexpr bool kEarlier = true;
#else
constexpr bool kEarlier = false;
#endif
#if defined(EARLIER) && HEAD_DIM <= 128
#define FETCHES_ROWS  // of the stages before, to shared memory
#endif
constexpr int kTakenAt = 6;     // blocks before its end that an item's CTA takes the next one
constexpr int kRowsAt = 4;      // and that it begins to fetch rows of earlier stages, a panel with each block
constexpr float kHeadroom = 8;  // probabilities reach 2^8: far inside the range of fp16
constexpr int kStages = HEAD_DIM == 64 ? 4 : 2;
constexpr int kBlockKeys = VALUE_DIM == 256 ? 80 : VALUE_DIM == 192 ? 112 : 128;  // as many as fit in shared memory
#ifdef BOUNDED
constexpr bool kBounded = true;  // by a softcap: no exponent is above kGreatest
#else
constexpr bool kBounded = false;
#endif
#ifdef SINKS
constexpr bool kSinks = true;
#else
constexpr bool kSinks = false;
#endif
// queries to L2: short packs gain 2%, windows of 128, where sinks are used, lose 3%
constexpr bool kPrefetches = !kSinks;
constexpr float kMostOfSink = 100;           // 2^100 times the row's own sum hides it: greater shares are not needed
constexpr float kGreatest = 80;              // so that 2^20 probabilities, times values, stay inside the range of fp32
constexpr bool kHalves = kBlockKeys == 128;  // a block of few keys may be computed as one of 64

// ---------------------------------------------------------------------------------------------- shared memory
constexpr u32 kPanelBytes = kRows * 128;                                                // rows x 64 columns
constexpr u32 kTileBytes = kPanels * kPanelBytes;                                       // Q tile
constexpr u32 kKeyPanel = kBlockKeys * 128;                                             // a block of keys x 64 columns
constexpr u32 kKeyBytes = kPanels * kKeyPanel, kValueBytes = kValuePanels * kKeyPanel;  // K block, V block
constexpr u32 kQueryBytes = kPanels * kTokens * PACK * 128;  // what the copy engine writes of the Q tile
constexpr int kFloatPanels = VALUE_DIM / 32;                 // of rows in fp32: 32 columns
constexpr int kOutPanels = kMore ? kFloatPanels : kValuePanels;
constexpr int kRowPanels = kEarlier || kMore ? kFloatPanels : kValuePanels;
constexpr u32 kRowsBytes = kWide ? 16 : kRowPanels * kPanelBytes;
constexpr int kBandsCopied = kTokens + 2 & ~1;  // the copy engine moves 16 bytes at a time: bands of two rows
struct Shared {
  alignas(1024) unsigned char q[kTileBytes];
  alignas(1024) unsigned char k[kStages][kKeyBytes];
  alignas(1024) unsigned char v[kStages][kValueBytes];
  alignas(1024) unsigned char rows[kRowsBytes];  // of earlier stages, then of out; wide ones do not pass through it
  alignas(16) int2 bands[kBandsCopied];  // of the item's rows, in the layer of its first block; from an even row on
  int4 item;                             // {first token, head group, flags, part}; first token < 0: no more work
  int4 block[kStages];                   // {first key, flags, first index of the layer's bands, where the segment ends}
  int is_last_part;                      // of its tile
  alignas(16) int4 next[3];              // the item after this one, as its list has it
  u64 q_full, q_empty, next_full;
  // for the producer; consumers, with earlier rows; the warp that writes, with new ones
  u64 rows_empty, rows_ready, rows_done;
  u64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "params.py asks for too little shared memory");

enum NamedBarrier { kPartsReady = 1 };

struct ForwardParams {
  float* lse;            // [num_q, num_heads_q] natural log
  const int4* items;     // [tiles, or parts of them][3]
  const int4* segments;  // [..][2]
  const int2* bands;     // [layers][num_q]
  int* counter;          // [2 + cut tiles * heads]
  float4* parts;         // [parts of cut tiles][heads][kPartWords][kConsumers]
  Schedule schedule;     // heads = groups of PACK query heads
  int groups_per_kv;     // query head groups that share one KV head
  int num_q, num_heads_q;
  int parts_per_tile;  // of a tile that is cut
  float scale_log2;    // softmax_scale * log2(e); with a softcap, softcap * log2(e)
  LateKeys late;
  void* out;             // wide: [num_q, num_heads_q, value_dim] contiguous, as map_out has it
  const float* earlier;  // wide: as map_earlier has it
  const float* sinks;    // [num_heads_q]
  int value_dim;
  float cap_scale;  // softmax_scale / softcap
};

// ---------------------------------------------------------------------------------------------- consumer steps
// S[64, keys] = Q K^T for this warpgroup's 64 rows; N = keys / 2.
template <int N>
DEVICE void scores(float (&s_rmem)[N], u32 q, u32 k) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++) {
    wgmma_ss<0, 0>(s_rmem, moved(q, i / 4 * kPanelBytes + i % 4 * 32), moved(k, i / 4 * kKeyPanel + i % 4 * 32), i > 0);
  }
}

// ptxas moves capped scores to other registers. Three warpgroups have none left: there each stays in its own.
template <int N>
DEVICE void cap(float (&s_rmem)[N], float scale) {
  if constexpr (kRows == 128) return cap_scores(s_rmem, scale);
#pragma unroll
  for (int j = 0; j < N; j++) asm("mul.f32 %0, %0, %1; tanh.approx.f32 %0, %0;" : "+f"(s_rmem[j]) : "f"(scale));
}

// O[64, VALUE_DIM] += P V.
DEVICE void weighted_values(float (&o_rmem)[VALUE_DIM / 2], const u32 (&p_rmem)[kBlockKeys / 4], u32 v) {
#pragma unroll
  for (int i = 0; i < kBlockKeys / 16; i++) wgmma_rs(o_rmem, p_rmem + 4 * i, moved(v, i * 2048), 1);
}

// Row r's keys are [band[r].x, band[r].y), and before `end`; s_rmem holds rows 0 and 8 of the thread's pair, columns
// from `first_key`.
template <int N>
DEVICE void mask_scores(float (&s_rmem)[N], int first_key, int end, const int2 (&band)[2], int lane) {
  const int column = first_key + lane % 4 * 2;
  auto before = [&](int key) {  // one bit for each of the thread's columns: 0, 1, 8, 9, 16, ..
    const int columns = min(max(key - column, 0), 128), count = columns / 8 * 2 + min(columns % 8, 2);
    return count == 32 ? ~0u : (1u << count) - 1;
  };
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u32 visible = before(min(band[r].y, end)) & ~before(band[r].x);
#pragma unroll
    for (int j = 0; j < N / 2; j++)
      if (!(visible >> j & 1)) s_rmem[j / 2 * 4 + 2 * r + j % 2] = kMasked;
  }
}

// Softmax: replaces scores by exp2(scale_log2 * score - offset) and updates the row sums. A row's offset is a maximum
// that was seen before, kMasked while there was none. It is raised only when an exponent exceeds kHeadroom, since only
// the range is at stake. `has_unseen`: some row of the warp has no offset yet. Returns whether any row of the warp was
// raised; then O must be scaled by `rescale`. A row does not depend on the others.
template <int N>
DEVICE float greatest(const float (&s_rmem)[N], int r) {  // of the thread's columns of row r
  float top = kMasked;
#pragma unroll
  for (int j = 2 * r; j < N; j += 4) top = fmaxf(top, fmaxf(s_rmem[j], s_rmem[j + 1]));
  return top;
}

DEVICE float greatest_of_row(float top) {
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
}

// Replaces scores by exp2(scale_log2 * score - offset) and updates the row sums.
template <int N>
DEVICE void exponentiate(float (&s_rmem)[N], const float (&offset)[2], float (&row_sum)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float minus = offset[r] == kMasked ? 0.f : offset[r];  // else rounding of the huge product could reach exp2
    float sum = 0;
#pragma unroll
    for (int j = 2 * r; j < N; j += 4) {
      s_rmem[j] = exp2_fast(s_rmem[j] * scale_log2 - minus);
      s_rmem[j + 1] = exp2_fast(s_rmem[j + 1] * scale_log2 - minus);
      sum += s_rmem[j] + s_rmem[j + 1];
    }
    row_sum[r] += sum;
  }
}

// The softmax, not the products, takes the time: nothing may wait for all exponents, nor, unless a row is raised, for
// the columns of other threads.
#if HEAD_DIM == 64
template <int N>
DEVICE bool softmax(float (&s_rmem)[N], float (&offset)[2], float (&row_sum)[2], float (&rescale)[2], float scale_log2,
                    bool&) {
  float top[2] = {greatest(s_rmem, 0), greatest(s_rmem, 1)};
  auto exceeds = [&](int r) { return top[r] != kMasked && top[r] * scale_log2 - offset[r] > kHeadroom; };
  const bool raised = __any_sync(~0u, exceeds(0) || exceeds(1));
  if (raised) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      top[r] = greatest_of_row(top[r]);
      const float next = exceeds(r) ? top[r] * scale_log2 : offset[r];
      rescale[r] = exp2_fast(offset[r] - next);
      offset[r] = next;
      row_sum[r] *= rescale[r];
    }
  }
  exponentiate(s_rmem, offset, row_sum, scale_log2);
  return raised;
}
#else  // fewest instructions, which is least power: exponents above kHeadroom are positive: their bits can be compared
template <int N>
DEVICE bool softmax(float (&s_rmem)[N], float (&offset)[2], float (&row_sum)[2], float (&rescale)[2], float scale_log2,
                    bool& has_unseen) {
  if (has_unseen) {  // O is zero in rows that have no offset
    bool unseen = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float top = greatest_of_row(greatest(s_rmem, r));
      if (offset[r] == kMasked && top != kMasked) {
        offset[r] = top * scale_log2;
        // whole: a row's only key has a power of 2
        if (kBounded) offset[r] += ceilf(fmaxf(scale_log2 - kGreatest - offset[r], 0.f));
      }
      unseen = unseen || offset[r] == kMasked;
    }
    has_unseen = __any_sync(~0u, unseen);
  }
  if constexpr (kBounded) {  // the offset stays
    exponentiate(s_rmem, offset, row_sum, scale_log2);
    return false;
  }
  int top[2];  // bits of the greatest exponent, if that is positive
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float minus = offset[r] == kMasked ? 0.f : offset[r];
    int tops[2] = {0, 0};
#pragma unroll
    for (int j = 2 * r; j < N; j += 4) {
      s_rmem[j] = s_rmem[j] * scale_log2 - minus;
      s_rmem[j + 1] = s_rmem[j + 1] * scale_log2 - minus;
      tops[j / 4 % 2] = max_bits(tops[j / 4 % 2], s_rmem[j], s_rmem[j + 1]);
    }
    top[r] = max(tops[0], tops[1]);
  }
  const int limit = __float_as_int(kHeadroom);
  const bool raised = __any_sync(~0u, max(top[0], top[1]) > limit);
  if (raised) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      top[r] = max(top[r], __shfl_xor_sync(~0u, top[r], 1));
      top[r] = max(top[r], __shfl_xor_sync(~0u, top[r], 2));
      const float rise = top[r] > limit ? __int_as_float(top[r]) : 0.f;  // rows without an offset do not rise
      rescale[r] = exp2_fast(-rise);
      offset[r] += rise;
      row_sum[r] *= rescale[r];
#pragma unroll
      for (int j = 2 * r; j < N; j += 4) s_rmem[j] -= rise, s_rmem[j + 1] -= rise;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = 0;
#pragma unroll
    for (int j = 2 * r; j < N; j += 4) {
      s_rmem[j] = exp2_fast(s_rmem[j]);
      s_rmem[j + 1] = exp2_fast(s_rmem[j + 1]);
      sum += s_rmem[j] + s_rmem[j + 1];
    }
    row_sum[r] += sum;
  }
  return raised;
}
#endif

DEVICE void round_probabilities(u32 (&p_rmem)[kBlockKeys / 4], const float (&s_rmem)[kBlockKeys / 2]) {
#pragma unroll
  for (int j = 0; j < kBlockKeys / 4; j++) p_rmem[j] = pack2(s_rmem[2 * j], s_rmem[2 * j + 1]);
}

// At the end of a part of a tile: leaves its out and lse, each thread what it has. Returns whether all other parts of
// the tile are done; then out and lse become those of the whole tile.
constexpr int kPartWords = VALUE_DIM / 8 + 1;
DEVICE bool join_parts(float (&out)[VALUE_DIM / 2], float (&lse)[2], int part, int group, const ForwardParams& params,
                       int& is_last) {
  const int thread = threadIdx.x - 128, num_parts = params.parts_per_tile, heads = params.schedule.num_heads;
  const int tile = (part - 1) / num_parts, own = (part - 1) % num_parts;
  auto word = [&](int p, int i) {
    return params.parts + (((u64)(tile * num_parts + p) * heads + group) * kPartWords + i) * kConsumers + thread;
  };
#pragma unroll
  for (int i = 0; i < VALUE_DIM / 8; i++)
    __stcg(word(own, i), make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]));
  __stcg(word(own, VALUE_DIM / 8), make_float4(lse[0], lse[1], 0, 0));
  named_sync(kPartsReady, kConsumers);
  if (thread == 0) {
    __threadfence();
    int* done = params.counter + 2 + tile * heads + group;
    is_last = atomicAdd(done, 1) == num_parts - 1;
    if (is_last) *done = 0;
    __threadfence();
  }
  named_sync(kPartsReady, kConsumers);
  if (!is_last) return false;

  float top[2] = {kMasked, kMasked}, total[2] = {0, 0};
#pragma unroll 4
  for (int p = 0; p < num_parts; p++) {
    const float4 seen = __ldcg(word(p, VALUE_DIM / 8));
    top[0] = fmaxf(top[0], seen.x), top[1] = fmaxf(top[1], seen.y);
  }
#pragma unroll
  for (int j = 0; j < VALUE_DIM / 2; j++) out[j] = 0;
#pragma unroll 2
  for (int p = 0; p < num_parts; p++) {
    const float4 seen = __ldcg(word(p, VALUE_DIM / 8));
    const float weight[2] = {exp2_fast((seen.x - top[0]) / kLn2), exp2_fast((seen.y - top[1]) / kLn2)};
    total[0] += weight[0], total[1] += weight[1];
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i++) {
      const float4 x = __ldcg(word(p, i));
      out[4 * i] += weight[0] * x.x, out[4 * i + 1] += weight[0] * x.y;
      out[4 * i + 2] += weight[1] * x.z, out[4 * i + 3] += weight[1] * x.w;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float scale = total[r] == 0 ? 0.f : 1.f / total[r];
    lse[r] = top[r] + log2_fast(total[r]) * kLn2;  // -inf without any keys
#pragma unroll
    for (int j = 2 * r; j < VALUE_DIM / 2; j += 4) out[j] *= scale, out[j + 1] *= scale;
  }
  return true;
}

// ---------------------------------------------------------------------------------------------- the kernel
extern "C" __global__ void __launch_bounds__(kThreads, 1) ffa_forward(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_late_k,
    const __grid_constant__ TensorMap map_late_v,
    const __grid_constant__ TensorMap map_out,  // [num_q, num_heads_q, head_dim] input type, or fp32 with MORE
#ifdef EARLIER
    const __grid_constant__ TensorMap map_earlier,  // fp32, out of the stages before
#endif
    const __grid_constant__ ForwardParams params) {
  // alone in shared memory, so it starts at a multiple of 1024
  extern __shared__ __align__(1024) unsigned char raw_smem[];
  Shared& smem = *(Shared*)raw_smem;
  const int warp = warp_uniform(threadIdx.x / 32), warpgroup = warp / 4;
  const u32 q_full = smem_address(&smem.q_full), q_empty = smem_address(&smem.q_empty);
  const u32 k_full = smem_address(smem.k_full), k_empty = smem_address(smem.k_empty);
  const u32 v_full = smem_address(smem.v_full), v_empty = smem_address(smem.v_empty);
  if (threadIdx.x == 0) {
    mbarrier_init(q_full, 1);
    mbarrier_init(q_empty, kConsumers / 32 * kWarpArrivals + !kWide);
    mbarrier_init(smem_address(&smem.next_full), 1);
    mbarrier_init(smem_address(&smem.rows_empty), 1);
    mbarrier_init(smem_address(&smem.rows_ready), 1);
    mbarrier_init(smem_address(&smem.rows_done), kConsumers / 32 * kWarpArrivals);
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(k_full + 8 * i, 1);
      mbarrier_init(v_full + 8 * i, 1);
      mbarrier_init(k_empty + 8 * i, kConsumers / 32 * kWarpArrivals);
      mbarrier_init(v_empty + 8 * i, kConsumers / 32 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  let_next_kernel_begin();
  wait_for_kernel_before();

  if (warpgroup == 0) {  // -------------------------------------------------------------------- producer
    registers_release<kRows == 192 ? 32 : 56>();
    if (!kWide && threadIdx.x == 32) {  // the warp that writes rows
      const u32 rows = smem_address(smem.rows);
      for (u32 phase = 0;; phase ^= 1) {
        mbarrier_wait(q_full, phase);
        const int token = smem.item.x, head = smem.item.y * PACK;
        const bool is_part = smem.item.w != 0;
        mbarrier_arrive(q_empty);
        if (token < 0) break;
        if (!kEarlier) mbarrier_arrive(smem_address(&smem.rows_ready));
        mbarrier_wait(smem_address(&smem.rows_done), phase);
        for (int p = 0; p < (is_part && !smem.is_last_part ? 0 : kOutPanels); p++)
          tma_store_3d(&map_out, rows + p * kPanelBytes, p * VALUE_DIM / kOutPanels, head, token);
        bulk_commit();
        bulk_wait_read<0>();
        if (kEarlier) mbarrier_arrive(smem_address(&smem.rows_empty));
      }
      bulk_wait<0>();
    }
    if (threadIdx.x != 0) return;
    const u32 q = smem_address(smem.q), k = smem_address(smem.k), v = smem_address(smem.v);
    Ring<kStages> ring;
    u32 q_phase = 1;
    int index = blockIdx.x;
    u32 next_phase = 0;
    // By the copy engine: a load into registers would be waited for long before they are read.
    auto load_next = [&]() {
      if (index >= params.schedule.num_items()) return;
      const u32 full = smem_address(&smem.next_full);
      fence_proxy_async();  // the item before has been read
      mbarrier_arrive_expect(full, sizeof(smem.next));
      bulk_load(smem_address(smem.next), params.items + 3 * params.schedule.list_index(index), sizeof(smem.next), full);
    };
    load_next();
    while (index < params.schedule.num_items()) {
      mbarrier_wait(smem_address(&smem.next_full), next_phase);
      next_phase ^= 1;
      const WorkItem item = read_item(smem.next);
      const int group = params.schedule.head(index), kv_head = group / params.groups_per_kv;
      const int token = item.tile * kTokens;
      Segment segment = item.segment;
      auto load_query = [&]() {
        mbarrier_wait(q_empty, q_phase);
        q_phase ^= 1;
        const bool takes_sinks = kSinks && (item.part == 0 || (item.part - 1) % params.parts_per_tile == 0);
        const int flags = (item.num_segments == 0 ? kLastBlock : 0) | (takes_sinks ? kTakesSinks : 0);
        smem.item = make_int4(token, group, flags, item.part);
        if (item.num_segments == 0) {
          mbarrier_arrive(q_full);
        } else {
          const int row = segment.layer * params.num_q + token;
          mbarrier_arrive_expect(q_full, kQueryBytes + sizeof(smem.bands));
          bulk_load(smem_address(smem.bands), params.bands + (row & ~1), sizeof(smem.bands), q_full);
          for (int p = 0; p < kPanels; p++)
            tma_load_3d(q + p * kPanelBytes, &map_q, q_full, p * 64, group * PACK, token);
        }
      };
#ifdef FETCHES_ROWS
      int fetched = 0;
      auto fetch_rows = [&](int panels) {
        const u32 ready = smem_address(&smem.rows_ready);
        if (fetched == 0) {
          mbarrier_wait(smem_address(&smem.rows_empty), q_phase ^ 1);  // once per item, like the queries
          mbarrier_arrive_expect(ready, kFloatPanels * kTokens * PACK * 128);
        }
        for (; fetched < panels; fetched++)
          tma_load_3d(smem_address(smem.rows) + fetched * kPanelBytes, &map_earlier, ready, fetched * 32, group * PACK,
                      token);
      };
#endif
      // The next item is taken late, so that one which nobody has begun goes to a CTA that is done.
      int ticket;
      auto take_next = [&]() { ticket = atomicAdd(params.counter, 1); };
      auto begin_next = [&]() { index = item_of(ticket), load_next(); };
      if (item.num_segments == 0) {
        load_query();
        take_next();
        begin_next();
      } else if (kPrefetches) {
        for (int p = 0; p < kPanels; p++) tma_prefetch_3d(&map_q, p * 64, group * PACK, token);
      }
      for (int i = 0; i < item.num_segments; i++) {
        if (i > 0) segment = load_segment(params.segments + 2 * (item.first_segment + i - 1));
        const int last = segment.first + (segment.end - 1 - segment.first) / kBlockKeys * kBlockKeys;
        for (int key = last; key >= segment.first; key -= kBlockKeys) {
          const bool full = key >= segment.full_first && key + kBlockKeys <= segment.full_end;
          const bool opens = key + kBlockKeys >= segment.end, first = opens && i == 0;
          // blocks after this one
          const int left = i + 1 == item.num_segments ? (key - segment.first) / kBlockKeys : 1 << 30;
          auto reaches = [&](int n) { return left == n || (opens && left < n); };
          const bool half = kHalves && first && key + kBlockKeys / 2 >= segment.end;
          const int s = ring.stage;
          if (reaches(kTakenAt)) take_next();
          mbarrier_wait(k_empty + 8 * s, ring.phase ^ 1);
          const bool late = key >= params.late.first;
          if (late) wait_for_keys(params.late);
          const int row = late ? key - params.late.first : key;
          const int flags = (full ? kFullBlock : 0) | (left == 0 ? kLastBlock : 0) | (half ? kHalfBlock : 0);
          smem.block[s] = make_int4(key, flags, segment.layer * params.num_q, segment.end);
          mbarrier_arrive_expect(k_full + 8 * s, kKeyBytes);
          for (int p = 0; p < kPanels; p++)
            tma_load_3d(k + s * kKeyBytes + p * kKeyPanel, late ? &map_late_k : &map_k, k_full + 8 * s, p * 64, kv_head,
                        row);
          if (first) load_query();  // after keys, which need not wait until the item before is done with its queries
          mbarrier_wait(v_empty + 8 * s, ring.phase ^ 1);
          mbarrier_arrive_expect(v_full + 8 * s, kValueBytes);
          for (int p = 0; p < kValuePanels; p++)
            tma_load_3d(v + s * kValueBytes + p * kKeyPanel, late ? &map_late_v : &map_v, v_full + 8 * s, p * 64,
                        kv_head, row);
          if (reaches(kTakenAt - 1)) begin_next();
#ifdef FETCHES_ROWS
          if (left <= kRowsAt && !first) fetch_rows(min(kRowsAt + 1 - left, kFloatPanels));
#endif
          ring.advance();
        }
      }
#ifdef FETCHES_ROWS
      fetch_rows(kFloatPanels);
#endif
    }
    mbarrier_wait(q_empty, q_phase);
    smem.item = make_int4(-1, 0, 0, 0);
    mbarrier_arrive(q_full);
    finish_items(params.counter);

  } else {  // ----------------------------------------------------------------------------------- consumers
    registers_acquire<kRows == 192 ? 160 : 224>();
    const int lane = threadIdx.x % 32;
    const int row0 = (warp - 4) * 16 + lane / 4;  // this thread's rows: row0 and row0 + 8
    const u32 q = operand(smem_address(smem.q) + (warpgroup - 1) * 64 * 128);
    const u32 k = operand(smem_address(smem.k)), v = operand(smem_address(smem.v), kKeyPanel);
    Ring<kStages> ring;
    for (u32 q_phase = 0;; q_phase ^= 1) {
      mbarrier_wait(q_full, q_phase);
      const int4 item = smem.item;
      __syncwarp();
      if (warp_uniform(item.x) < 0) break;
      int token[2], head[2];
      bool valid[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = row0 + 8 * r;
        token[r] = item.x + row / PACK;
        head[r] = item.y * PACK + row % PACK;
        valid[r] = row < kTokens * PACK && token[r] < params.num_q;
      }
#ifdef EARLIER
      float before[2];  // lse of the stages before
#pragma unroll
      for (int r = 0; r < 2; r++)
        before[r] = valid[r] ? params.lse[(u64)token[r] * params.num_heads_q + head[r]] : -kInfinity;
#endif
      int2 band[2];
      int band_layer = -1;
      auto load_bands = [&](int layer) {
        band_layer = layer;
#pragma unroll
        for (int r = 0; r < 2; r++) band[r] = valid[r] ? __ldg(params.bands + layer + token[r]) : make_int2(0, 0);
      };

      float o_rmem[VALUE_DIM / 2], offset[2] = {kMasked, kMasked}, row_sum[2] = {0, 0}, rescale[2];
      bool has_unseen = true;
#pragma unroll
      for (int j = 0; j < VALUE_DIM / 2; j++) o_rmem[j] = 0;

      float scale[2], lse[2], sink[2] = {-kInfinity, -kInfinity};
      auto load_sinks = [&]() {
        if (!kSinks || !(warp_uniform(item.z) & kTakesSinks)) return;
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (valid[r]) sink[r] = __ldg(params.sinks + head[r]);
      };
      auto finish_rows = [&]() {  // under the last product: sums of probabilities, with the sinks' shares
#pragma unroll
        for (int r = 0; r < 2; r++) {
          row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
          row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
          const float above = kSinks ? sink[r] * (1.f / kLn2) - offset[r] : 0.f;
          if (kSinks) row_sum[r] += exp2_fast(above > kMostOfSink ? kMostOfSink : above);  // fminf would drop NaN
          const bool empty = offset[r] == kMasked;  // then row_sum is nothing
          scale[r] = empty ? 0.f : reciprocal_fast(row_sum[r]);
          lse[r] = empty || above > kMostOfSink ? sink[r] : (offset[r] + log2_fast(row_sum[r])) * kLn2;
        }
      };

      if (warp_uniform(item.z) & kLastBlock) {  // no keys at all
        mbarrier_arrive_warp(q_empty);
        load_sinks();
        finish_rows();
      } else {
        float s_rmem[kBlockKeys / 2];
        u32 p_rmem[kBlockKeys / 4];
        mbarrier_wait(k_full + 8 * ring.stage, ring.phase);
        int4 block = smem.block[ring.stage];
        block.y = warp_uniform(block.y);
        auto first_block = [&](auto& s_rmem) {
          wgmma_fence();
          scores(s_rmem, q, moved(k, ring.stage * kKeyBytes));
          wgmma_commit();
          if (!kWide) load_sinks();
          band_layer = block.z;
#pragma unroll
          for (int r = 0; r < 2; r++)
            band[r] = valid[r] ? smem.bands[(block.z + item.x & 1) + (row0 + 8 * r) / PACK] : make_int2(0, 0);
          wgmma_wait<0>();
          mbarrier_arrive_warp(k_empty + 8 * ring.stage);
          if (block.y & kLastBlock) mbarrier_arrive_warp(q_empty);
          if (kSoftcap) cap(s_rmem, params.cap_scale);
          mask_scores(s_rmem, block.x, block.w, band, lane);
          softmax(s_rmem, offset, row_sum, rescale, params.scale_log2, has_unseen);
        };
        auto half_block = [&](auto& s_rmem) {
          if constexpr (kHalves && sizeof(s_rmem) > 0) {
            float half[32];
            first_block(half);
#pragma unroll
            for (int j = 0; j < 64; j++) s_rmem[j] = j < 32 ? half[j] : 0;
          }
        };
        if (kHalves && (block.y & kHalfBlock))
          half_block(s_rmem);
        else
          first_block(s_rmem);
        round_probabilities(p_rmem, s_rmem);

        while (!(block.y & kLastBlock)) {
          const Ring<kStages> previous = ring;
          ring.advance();
          mbarrier_wait(k_full + 8 * ring.stage, ring.phase);
          block = smem.block[ring.stage];
          block.y = warp_uniform(block.y);
          wgmma_fence();
          scores(s_rmem, q, moved(k, ring.stage * kKeyBytes));
          wgmma_commit();
          if (!(block.y & kFullBlock) && block.z != band_layer) load_bands(block.z);
          mbarrier_wait(v_full + 8 * previous.stage, previous.phase);
          weighted_values(o_rmem, p_rmem, moved(v, previous.stage * kValueBytes));
          wgmma_commit();
          wgmma_wait<1>();
          mbarrier_arrive_warp(k_empty + 8 * ring.stage);
          if (block.y & kLastBlock) mbarrier_arrive_warp(q_empty);
          if (kSoftcap) cap(s_rmem, params.cap_scale);
          if (!(block.y & kFullBlock)) mask_scores(s_rmem, block.x, block.w, band, lane);
          const bool raised = softmax(s_rmem, offset, row_sum, rescale, params.scale_log2, has_unseen);
          wgmma_wait<0>();
          mbarrier_arrive_warp(v_empty + 8 * previous.stage);
          round_probabilities(p_rmem, s_rmem);
          if (raised) {
#pragma unroll
            for (int j = 0; j < VALUE_DIM / 2; j++) o_rmem[j] *= rescale[j / 2 % 2];
          }
        }

        mbarrier_wait(v_full + 8 * ring.stage, ring.phase);
        wgmma_fence();
        weighted_values(o_rmem, p_rmem, moved(v, ring.stage * kValueBytes));
        wgmma_commit();
        if (kWide) load_sinks();  // else there are registers to hold them since the first block
        finish_rows();
        wgmma_wait<0>();
        mbarrier_arrive_warp(v_empty + 8 * ring.stage);
        ring.advance();
      }

      // ------------------------------------------------------------------------------------- epilogue
      u64 index[2];  // of (token, head)
#pragma unroll
      for (int r = 0; r < 2; r++) index[r] = (u64)token[r] * params.num_heads_q + head[r];
      if (!kWide) mbarrier_wait(smem_address(&smem.rows_ready), q_phase);  // once per item, like the queries
#pragma unroll
      for (int j = 0; j < VALUE_DIM / 2; j++) o_rmem[j] *= scale[j / 2 % 2];
#if HEAD_DIM <= 128  // wider tiles are never cut
      if (const int part = warp_uniform(item.w)) {
        const bool is_last = join_parts(o_rmem, lse, part, item.y, params, smem.is_last_part);
        valid[0] = valid[0] && is_last, valid[1] = valid[1] && is_last;
      }
#endif
#ifdef EARLIER
      float keep[2];  // of earlier rows
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float top = fmaxf(before[r], lse[r]);
        if (lse[r] == -kInfinity) {  // nothing new
          keep[r] = 1;
          lse[r] = before[r];
        } else {
          const float old_weight = exp2_fast((before[r] - top) / kLn2), new_weight = exp2_fast((lse[r] - top) / kLn2);
          const float total = old_weight + new_weight;
          lse[r] = top + log2_fast(total) * kLn2;
          keep[r] = old_weight / total, scale[r] = new_weight / total;
        }
      }
#endif
      if constexpr (kWide) {
        const u64 low = index[0] * params.value_dim, high = index[1] * params.value_dim;
#ifdef EARLIER
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 2; j += 2) {
          const int r = j / 2 % 2, column = j / 4 * 8 + lane % 4 * 2;
          float2 old = make_float2(0, 0);
          if (valid[r] && column < params.value_dim) old = *(const float2*)(params.earlier + (r ? high : low) + column);
          o_rmem[j] = o_rmem[j] * scale[r] + old.x * keep[r];
          o_rmem[j + 1] = o_rmem[j + 1] * scale[r] + old.y * keep[r];
        }
#endif
        if (kMore) {
          float* out = (float*)params.out;
          store_rows_float<VALUE_DIM>(o_rmem, 1, valid[0] ? out + low : nullptr, valid[1] ? out + high : nullptr,
                                      params.value_dim, lane);
        } else {
          unsigned short* out = (unsigned short*)params.out;
          store_rows_packed<VALUE_DIM>(o_rmem, 1, valid[0] ? out + low : nullptr, valid[1] ? out + high : nullptr,
                                       params.value_dim, lane);
        }
      } else {
        const int row = (warp - 4) * 16 + lane / 16 * 8 + lane % 8;
        const u32 rows = swizzled_row(smem_address(smem.rows), row) ^ lane / 8 % 2 * 16;
#ifdef EARLIER
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 8; i++) {  // 8 columns
          float old[4];
          load_matrices((rows ^ i % 4 * 32) + i / 4 * kPanelBytes, old);
#pragma unroll
          for (int e = 0; e < 4; e++) o_rmem[4 * i + e] = o_rmem[4 * i + e] * scale[e / 2] + old[e] * keep[e / 2];
        }
        __syncwarp();
#endif
        if (kMore) {
#pragma unroll
          for (int i = 0; i < VALUE_DIM / 8; i++)
            store_matrices((rows ^ i % 4 * 32) + i / 4 * kPanelBytes, __float_as_uint(o_rmem[4 * i]),
                           __float_as_uint(o_rmem[4 * i + 1]), __float_as_uint(o_rmem[4 * i + 2]),
                           __float_as_uint(o_rmem[4 * i + 3]));
        } else {
#pragma unroll
          for (int i = 0; i < VALUE_DIM / 16; i++)  // 16 columns
            store_matrices((rows ^ i % 4 * 32) + i / 4 * kPanelBytes, pack2(o_rmem[8 * i], o_rmem[8 * i + 1]),
                           pack2(o_rmem[8 * i + 4], o_rmem[8 * i + 5]), pack2(o_rmem[8 * i + 2], o_rmem[8 * i + 3]),
                           pack2(o_rmem[8 * i + 6], o_rmem[8 * i + 7]));
        }
        fence_proxy_async();
        mbarrier_arrive_warp(smem_address(&smem.rows_done));
      }
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (valid[r] && lane % 4 == 0) params.lse[index[r]] = lse[r];
    }
  }
}
