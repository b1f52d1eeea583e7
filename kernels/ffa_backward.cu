// FFA backward: dQ, dK, dV from dOut, Q, K, V, the final lse and delta = rowsum(out * dOut).
//
// A work item is one tile of up to 128 keys of one KV head; K and V stay in shared memory while the query blocks (64
// rows = 64 / PACK tokens x PACK heads) that see them stream by, one PACK of the group's heads after another, so that
// dK and dV of all heads add up in registers. Warpgroup 0 holds the producer warp and the warps that add dQ to global
// memory; warpgroups 1 and 2 own 64 keys each. With everything transposed, P and dS come out in the register layout of
// the next product's A operand:
//
//   S^T = K Q^T, dP^T = V dO^T                             [64 keys, 64 rows]
//   P^T = exp2(scale * S^T - lse), dS^T = P^T (dP^T - delta)
//   dV += P^T dO, dK += dS^T Q                             A from registers
//   dQ[64 rows, half the columns] += dS K                  dS^T of both warpgroups through shared memory; without
//                                                          softmax_scale yet
//
// With 64 columns (kGradGroup) two warpgroups that meet in every block compute exponentials at the same time, and the
// tensor cores idle. There warpgroup 3 computes dQ, all columns, once it has dS of both, and warpgroups 1 and 2 go on
// meanwhile. They hold K and V in registers: products of two operands in shared memory keep it as busy as the tensor
// cores.
//
// Query blocks are walked down: the tiles of a causal document end at the same query, so that they read Q and add dQ
// close in time, and both stay in L2.
//
// Where few tiles see a query block, dQ need not be zero before the launch (`marks`): who comes first stores, the
// others add. Where many do, they would wait for each other at every block, as they come at the same time.
//
// DETERMINISTIC orders the additions to a row of dQ by a counter per query block and head pack: tiles in ascending
// order; and what the parts of a tile add to dK and dV by a counter per tile and head. With BEGINS the first tile stores
// its dQ.
//
// Wide heads (kWide): with 192 columns of Q and K and 128 of V, registers hold dK, dV and one thing at a time (kTight).
// With wider values they do not hold both, and two launches share the work: ONLY_VALUES computes dV, NO_VALUES dK and
// dQ; shared memory has no room for gradients on their way out then, and the consumers add dQ to global memory from
// their registers.
#include "ffa_layout.cuh"

constexpr int kRows = 64;
constexpr int kKeys = 128;                   // of a tile
constexpr bool kGradGroup = HEAD_DIM == 64;  // dQ has a warpgroup of its own
constexpr int kConsumers = kGradGroup ? 384 : 256, kThreads = 128 + kConsumers;
constexpr int kTokens = kRows / PACK;
#ifdef BEGINS
constexpr bool kBegins = true;
#else
constexpr bool kBegins = false;
#endif
#ifdef ONLY_VALUES
constexpr bool kKeyGrads = false;  // dK and dQ
#else
constexpr bool kKeyGrads = true;
#endif
#ifdef NO_VALUES
constexpr bool kValueGrads = false;  // dV
#else
constexpr bool kValueGrads = true;
#endif
constexpr bool kValuesInRegisters = kGradGroup && !kSoftcap;  // with a softcap they would spill
constexpr int kStages = kGradGroup ? 3 : HEAD_DIM == 256 && kKeyGrads ? 1 : 2;
// 192/128: registers hold dK and dV, and little beside them
constexpr bool kTight = kWide && kKeyGrads && kValueGrads;
constexpr bool kStaged = !kWide || kTight;           // dQ leaves through shared memory
constexpr bool kMarks = kStaged && !kDeterministic;  // `marks` is looked at
constexpr bool kEarlyDout = kStages == 1;            // dOut has barriers of its own, as it is free before Q is
constexpr int kTakenAt = 3;                          // blocks before its end that an item's CTA takes the next one
constexpr int kGradColumns = HEAD_DIM / (kGradGroup ? 1 : 2);  // columns of dQ that one warpgroup computes
constexpr int kQueues = kGradGroup ? 3 : 2;  // of gradients on their way out, one per warpgroup of consumers

// ---------------------------------------------------------------------------------------------- shared memory
constexpr u32 kKeyPanel = kKeys * 128, kRowPanel = kRows * 128;
constexpr u32 kKeyBytes = kPanels * kKeyPanel, kRowBytes = kPanels * kRowPanel;
constexpr u32 kValueBytes = kKeyGrads ? kValuePanels * kKeyPanel : 0, kDoutBytes = kValuePanels * kRowPanel;
constexpr u32 kRowBytesCopied = kPanels * kTokens * PACK * 128, kDoutBytesCopied = kValuePanels * kTokens * PACK * 128;
constexpr u32 kGradPanel = kRows * 128;  // [64 rows][32 fp32 columns]
constexpr u32 kGradBytes = kGradColumns / 32 * kGradPanel;
constexpr int kGradBuffers = kTight ? 1 : 2;
constexpr int kScoreGradBuffers = kTight ? 1 : 2;  // one: its reader, the other warpgroup, says when it is done
struct Shared {
  alignas(1024) unsigned char k[kKeyBytes];
  alignas(1024) unsigned char v[kKeyGrads ? kValueBytes : 16];
  alignas(1024) unsigned char q[kStages][kRowBytes];
  alignas(1024) unsigned char dout[kStages][kDoutBytes];
  alignas(1024) unsigned char ds[kScoreGradBuffers][kKeyGrads ? kKeys * 128 : 16];  // dS^T, [128 keys][64 rows]
  // pieces on their way out, per warpgroup
  alignas(1024) unsigned char grad[kQueues][kGradBuffers][kStaged ? kGradBytes : 16];
  float lse_log2[kStages][kRows];  // + infinity where a row has no keys or does not exist
  float delta[kStages][kRows];
  int2 band[kStages][kRows];
  ushort2 place[kRows];  // a row's token and head in the block
  // {first key, KV head, flags, end key}; first key < 0: no more work
  int4 item;
  // {first token, first head, flags, rank among the additions to dQ, or its mark}
  int4 block[kStages];
  int2 part;  // deterministic: {tile, parts of the tile before this one}
  // for the warps that add: {first token, first head, kQueryGrad, rank or mark} of a piece of dQ,
  // {first key, head | tile << kLowBits, k*Grad, first column | parts before << kLowBits} of a piece of dK or dV;
  // first token < 0: no more work
  int4 grad_piece[kQueues][kGradBuffers];
  u64 kv_full, kv_empty, full[kStages], empty[kStages];
  u64 grad_full[kQueues][kGradBuffers], grad_empty[kQueues][kGradBuffers];
  u64 dout_full, dout_empty;
  u64 ds_full[kScoreGradBuffers], ds_empty[kScoreGradBuffers];  // kGradGroup
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "params.py asks for too little shared memory");

enum NamedBarrier { kScoreGradReady = 1, kTurnOfGroup = 2, kScoreGradRead = 4 };  // the last two per warpgroup

constexpr int kNoKey = 0x7fffffff;

constexpr int kLowBits = 10, kLow = (1 << kLowBits) - 1;  // of a word that holds two numbers
enum Grad { kQueryGrad, kKeyGrad, kValueGrad };
template <int VALUE>
struct Tag {
  static constexpr int value = VALUE;
};
enum Mark { kBegun = 1, kWritten = 2 };  // bits: someone stores a piece of dQ; it is there, and others may add to it
enum Store { kStorePacked, kStoreFloat, kAddFloat };  // input type; fp32; added to fp32, by parts of one tile

struct BackwardParams {
  void *dk, *dv;         // rows of head_dim, strides below; input type or fp32
  const float* lse;      // [num_q, num_heads_q] natural log
  const float* delta;    // [num_q, num_heads_q]
  const int4* items;     // [num_items][3]
  const int4* segments;  // [..][2]
  const int2* bands;     // [layers][num_q]
  // deterministic: [num_q_blocks + 1] offsets into, then {first tile, last tile} of each component
  const int* components;
  int* semaphores;       // deterministic: [num_q_blocks][num_heads_q / PACK][2], zero before the launch
  int* marks;            // the same, each a Mark; null: dq holds sums, or zeros
  int* part_semaphores;  // deterministic: [k-tiles][KV heads][2], the same
  int* counter;          // [2]
  Schedule schedule;     // heads = KV heads
  int num_packs;         // packs of PACK query heads that share a KV head
  int num_q, num_heads_q, head_dim, num_q_blocks;
  int store;                                                                   // how dk and dv leave, see Store
  long long dk_token_stride, dk_head_stride, dv_token_stride, dv_head_stride;  // elements
  float softmax_scale, scale_log2;  // with a softcap, scale_log2 = softcap * log2(e)
  LateKeys late;
  float* dq;  // wide: as map_dq has it, but for the order of columns, see add_query_grads
  int value_dim;
  float cap_scale;  // softmax_scale / softcap
};

// Where the two words of a block's dQ, one for each half of its columns, begin in `semaphores` and `marks`.
DEVICE int words_of(const BackwardParams& params, int token, int head) {
  return (token / kTokens * (params.num_heads_q / PACK) + head / PACK) * 2;
}

// The place of (query block, tile) among the additions to the block's dQ: tiles ascending, then components descending.
DEVICE int addition_rank(const BackwardParams& params, int q_block, int tile, int component) {
  const int begin = __ldg(params.components + q_block), end = __ldg(params.components + q_block + 1);
  const int2* spans = (const int2*)(params.components + (params.num_q_blocks + 2) / 2 * 2);
  int rank = 0;
#pragma unroll 1
  for (int c = begin; c < end; c++) {
    const int2 span = __ldg(spans + c);
    rank += max(0, min(tile, span.y + 1) - span.x);
    rank += c - begin > component && span.x <= tile && tile <= span.y;
  }
  return rank;
}

DEVICE int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
// Without an order: what is marked as written is in L2, where the copy engine adds to it.
DEVICE int2 load_marks(const int* marks) {
  int2 value;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(marks));
  return value;
}
DEVICE void mark_written(int* mark) {
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(mark), "r"(int(kWritten)) : "memory");
}
// After an addition of this thread has landed: the next one to those rows may begin.
DEVICE void pass_turn(int* turn) {
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

// --------------------------------------------------------------------------------------------- gradients of wide heads
DEVICE void add_float2(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
template <int OFFSET>  // bytes; part of the instruction
DEVICE void add_float4(float* to, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0 + %5], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z),
               "f"(w), "n"(OFFSET)
               : "memory");
}

// Adds columns 16 FIRST to 16 END - 1 of an accumulator to two rows of dQ (null: none), which begin at this lane's
// first column. Of every 16 columns, 4 l to 4 l + 3 in memory are 2 l, 2 l + 1, 2 l + 8 and 2 l + 9: those of lane l of
// a quad. `columns` = how many there are.
template <int FIRST, int END, int N>
DEVICE void add_query_grads(const float (&acc)[N], float* row_low, float* row_high, int columns) {
  if constexpr (FIRST < END) {
    constexpr int i = 8 * FIRST;
    if (16 * FIRST >= columns) return;
    if (row_low) add_float4<64 * FIRST>(row_low, acc[i], acc[i + 1], acc[i + 4], acc[i + 5]);
    if (row_high) add_float4<64 * FIRST>(row_high, acc[i + 2], acc[i + 3], acc[i + 6], acc[i + 7]);
    add_query_grads<FIRST + 1, END>(acc, row_low, row_high, columns);
  }
}

// Adds accumulator rows r and r + 8, times `scale`, to fp32 rows.
template <int N>
DEVICE void add_rows_float(const float (&acc)[N / 2], float scale, float* row_low, float* row_high, int head_dim,
                           int lane) {
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    const int column = i * 8 + lane % 4 * 2;
    if (column >= head_dim) return;
    if (row_low) add_float2(row_low + column, acc[4 * i] * scale, acc[4 * i + 1] * scale);
    if (row_high) add_float2(row_high + column, acc[4 * i + 2] * scale, acc[4 * i + 3] * scale);
  }
}

// Around additions of a whole warpgroup: in deterministic mode they wait until `turn` is `wanted`, and then pass it on.
template <typename ADD>
DEVICE void in_turn(int* turn, int wanted, int w, bool leader, ADD add) {
  if (kDeterministic) {
    if (leader)
      while (load_acquire(turn) != wanted) {}
    named_sync(kTurnOfGroup + w, 128);
  }
  add();
  if (kDeterministic) {
    __threadfence();
    named_sync(kTurnOfGroup + w, 128);
    if (leader) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
  }
}

// Issues the product of a warpgroup's keys, of K or V in registers or in shared memory, with the rows of a block, as a
// group of its own.
template <int COLUMNS, bool IN_REGISTERS>
DEVICE void keys_by_rows(float (&x)[32], const u32 (&keys_rmem)[16], u32 keys, u32 rows) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 16; i++) {
    if constexpr (IN_REGISTERS)
      wgmma_rs_rows(x, keys_rmem + 4 * i, moved(rows, i * 32), i > 0);
    else
      wgmma_ss<0, 0>(x, moved(keys, i / 4 * kKeyPanel + i % 4 * 32), moved(rows, i / 4 * kRowPanel + i % 4 * 32),
                     i > 0);
  }
  wgmma_commit();
}

// ---------------------------------------------------------------------------------------- pieces of dQ on their way out
// Where this lane stores a row of 8 x 8 matrices of a piece of dQ.
DEVICE u32 row_of_query_grads(u32 grad, int warp, int lane) {
  return swizzled_row(grad, warp % 4 * 16 + lane / 16 * 8 + lane % 8) ^ lane / 8 % 2 * 16;
}
// Stores 64 rows, kGradColumns columns: as matrices of 4 columns, the even ones of each 8, then the odd ones.
DEVICE void store_query_grads(const float* x, u32 row, u32 to) {
#pragma unroll
  for (int g = 0; g < kGradColumns / 8; g++)
    store_matrices((row ^ g % 4 * 32) + to + g / 4 * kGradPanel, __float_as_uint(x[4 * g]),
                   __float_as_uint(x[4 * g + 1]), __float_as_uint(x[4 * g + 2]), __float_as_uint(x[4 * g + 3]));
}

// ---------------------------------------------------------------------------------------------- the kernel
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    ffa_backward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_dout,
                 const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                 const __grid_constant__ TensorMap map_late_k, const __grid_constant__ TensorMap map_late_v,
                 const __grid_constant__ TensorMap map_dq, const __grid_constant__ TensorMap map_dk,
                 const __grid_constant__ TensorMap map_dv, const __grid_constant__ BackwardParams params) {
  // alone in shared memory, so it starts at a multiple of 1024
  extern __shared__ __align__(1024) unsigned char raw_smem[];
  Shared& smem = *(Shared*)raw_smem;
  const int warp = warp_uniform(threadIdx.x / 32), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const u32 kv_full = smem_address(&smem.kv_full), kv_empty = smem_address(&smem.kv_empty);
  const u32 full = smem_address(smem.full), empty = smem_address(smem.empty);
  const u32 k = smem_address(smem.k), v = smem_address(smem.v);
  const u32 q = smem_address(smem.q), dout = smem_address(smem.dout);
  const u32 grad_full = smem_address(smem.grad_full), grad_empty = smem_address(smem.grad_empty);
  const u32 dout_full = smem_address(&smem.dout_full), dout_empty = smem_address(&smem.dout_empty);
  const u32 ds_full = smem_address(smem.ds_full), ds_empty = smem_address(smem.ds_empty);
  if (threadIdx.x == 0) {
    mbarrier_init(kv_full, 1);
    mbarrier_init(kv_empty, kConsumers / 32 * kWarpArrivals);
    if (kEarlyDout) {
      mbarrier_init(dout_full, 1);
      mbarrier_init(dout_empty, kConsumers / 32 * kWarpArrivals);
    }
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(full + 8 * i, 1 + 32);  // the copy engine's bytes, and the row statistics of each lane
      mbarrier_init(empty + 8 * i, kConsumers / 32 * kWarpArrivals);
    }
    for (int i = 0; i < (kGradGroup ? kScoreGradBuffers : 0); i++) {
      mbarrier_init(ds_full + 8 * i, 8 * kWarpArrivals);  // the warps with keys
      mbarrier_init(ds_empty + 8 * i, 4 * kWarpArrivals);
    }
    for (int i = 0; i < (kStaged ? kQueues * kGradBuffers : 0); i++) {
      mbarrier_init(grad_full + 8 * i, 4 * kWarpArrivals);  // the warps of a warpgroup
      mbarrier_init(grad_empty + 8 * i, 1);
    }
    mbarrier_init_fence();
  }
  if (threadIdx.x < kRows) smem.place[threadIdx.x] = make_ushort2(threadIdx.x / PACK, threadIdx.x % PACK);
  if (kTokens * PACK < kRows) {  // rows the copy engine never writes must not hold NaN
    for (u32 i = threadIdx.x * 16; i < sizeof(smem.q) + sizeof(smem.dout); i += kThreads * 16)
      *(uint4*)(raw_smem + q - smem_address(raw_smem) + i) = make_uint4(0, 0, 0, 0);  // dout follows q
    fence_proxy_async();
  }
  __syncthreads();
  // The launch of dK and dQ needs nothing of that of dV: it begins where blocks of that one end, as all of them have
  // seen by then what was before both, and waits for that one at its own end.
  if (kValueGrads) wait_for_kernel_before();
  let_next_kernel_begin();

  if (warpgroup == 0) {
    registers_release<24>();
    if (warp == 0) {  // -------------------------------------------------------------------------- producer warp
      Ring<kStages> ring;
      u32 kv_phase = 1;
      int index = __shfl_sync(~0u, lane == 0 ? first_item(params.counter) : 0, 0);
      auto item_word = [&](int i) {  // word `lane` of item i
        const int* words = (const int*)(params.items + 3 * params.schedule.list_index(i));
        return lane < 12 && i < params.schedule.num_items() ? __ldg(words + lane) : 0;
      };
      int next_word = item_word(index);
      while (index < params.schedule.num_items()) {
        WorkItem item = share_item(next_word);
        const int4* first_segment = params.items + 3 * params.schedule.list_index(index) + 1;
        const int kv_head = params.schedule.head(index);
        const int first_key = __shfl_sync(~0u, next_word, 6), end_key = __shfl_sync(~0u, next_word, 7);
        mbarrier_wait(kv_empty, kv_phase);
        kv_phase ^= 1;
        const bool late = first_key >= params.late.first;
        if (item.num_segments > 0 && late) wait_for_keys(params.late);
        if (lane == 0) {
          smem.item = make_int4(first_key, kv_head, item.num_segments == 0 ? kLastBlock : 0, end_key);
          if (kDeterministic) smem.part = make_int2(item.tile, item.part);
          if (item.num_segments == 0) {
            mbarrier_arrive(kv_full);
          } else {
            const int row = late ? first_key - params.late.first : first_key;
            mbarrier_arrive_expect(kv_full, kKeyBytes + kValueBytes);
            for (int p = 0; p < kPanels; p++) {
              tma_load_3d(k + p * kKeyPanel, late ? &map_late_k : &map_k, kv_full, p * 64, kv_head, row);
              if (kKeyGrads && p < kValuePanels)
                tma_load_3d(v + p * kKeyPanel, late ? &map_late_v : &map_v, kv_full, p * 64, kv_head, row);
            }
          }
        }
        // The next item is taken late, so that one which nobody has begun goes to a CTA that is done.
        if (item.num_segments == 0 && lane == 0) index = next_item(params.counter);
        const int packs = item.num_segments == 0 ? 0 : params.num_packs;
        for (int pack = 0; pack < packs; pack++) {
          const int head = (kv_head * params.num_packs + pack) * PACK;
          for (int i = item.num_segments - 1; i >= 0; i--) {
            Segment& segment = item.segment;
            if (item.num_segments > 1)
              segment = load_segment(i == 0 ? first_segment : params.segments + 2 * (item.first_segment + i - 1));
            for (int b = segment.end - 1; b >= segment.first; b--) {
              const bool is_full = b >= segment.full_first && b < segment.full_end;
              const int left = pack + 1 == packs && i == 0 ? b - segment.first : 1 << 30;  // blocks after this one
              if (lane == 0 && (left == kTakenAt || (left < kTakenAt && b + 1 == segment.end)))
                index = next_item(params.counter);
              const int rank = kDeterministic && kKeyGrads ? addition_rank(params, b, item.tile, segment.component) : 0;
              const int token = b * kTokens;
              int2 marks = make_int2(kWritten, kWritten);
              if (kMarks && params.marks) marks = load_marks(params.marks + words_of(params, token, head));
              float lse[2], delta[2];  // of rows lane and lane + 32
              int2 band[2];
#pragma unroll
              for (int r = 0; r < 2; r++) {
                const int row = lane + 32 * r;
                const ushort2 place = smem.place[row];
                const int t = token + place.x;
                lse[r] = -kInfinity, delta[r] = 0, band[r] = make_int2(0, 0);
                if (row < kTokens * PACK && t < params.num_q) {
                  const u32 at = (u32)t * params.num_heads_q + head + place.y;
                  lse[r] = __ldg(params.lse + at);
                  delta[r] = __ldg(params.delta + at);
                  if (!is_full) band[r] = __ldg(params.bands + segment.layer * params.num_q + t);
                }
              }
              const int s = ring.stage;
              if (kEarlyDout) {
                mbarrier_wait(dout_empty, ring.phase ^ 1);
                if (lane == 0) {
                  mbarrier_arrive_expect(dout_full, kDoutBytesCopied);
                  for (int p = 0; p < kValuePanels; p++)
                    tma_load_3d(dout + p * kRowPanel, &map_dout, dout_full, p * 64, head, token);
                }
              }
              mbarrier_wait(empty + 8 * s, ring.phase ^ 1);
              if (lane == 0) {
                mbarrier_arrive_expect(full + 8 * s, kRowBytesCopied + (kEarlyDout ? 0 : kDoutBytesCopied));
                for (int p = 0; p < kPanels; p++) {
                  const u32 at = s * kRowBytes + p * kRowPanel;
                  tma_load_3d(q + at, &map_q, full + 8 * s, p * 64, head, token);
                  if (!kEarlyDout && p < kValuePanels)
                    tma_load_3d(dout + at - s * (kRowBytes - kDoutBytes), &map_dout, full + 8 * s, p * 64, head, token);
                }
                smem.block[s] = make_int4(token, head, (is_full ? kFullBlock : 0) | (left == 0 ? kLastBlock : 0),
                                          kMarks ? marks.x & (kGradGroup ? marks.x : marks.y) & kWritten : rank);
              }
#pragma unroll
              for (int r = 0; r < 2; r++) {
                const int row = lane + 32 * r;
                smem.lse_log2[s][row] = lse[r] == -kInfinity ? kInfinity : lse[r] * (1.f / kLn2);
                smem.delta[s][row] = delta[r];
                smem.band[s][row] = band[r];
              }
              mbarrier_arrive(full + 8 * s);
              ring.advance();
            }
          }
        }
        index = __shfl_sync(~0u, index, 0);
        next_word = item_word(index);
      }
      mbarrier_wait(kv_empty, kv_phase);
      if (lane == 0) {
        smem.item = make_int4(-1, 0, 0, 0);
        mbarrier_arrive(kv_full);
        finish_items(params.counter);
        if (!kValueGrads) wait_for_kernel_before();
      }
    } else if (kStaged && warp <= kQueues) {  // ------------------------------------------ dQ warps, one per warpgroup
      const int w = warp - 1, half = kGradGroup ? 0 : w;  // of the columns of dQ
      Ring<kGradBuffers> ring;
      int* landing = nullptr;  // deterministic: the turn to pass on when the last addition has landed
      auto settle = [&]() {
        if (!landing) return;
        bulk_wait<0>();
        pass_turn(landing);
        landing = nullptr;
      };
      for (bool is_read = true; lane == 0; ring.advance()) {  // the buffer before
        const u32 piece_full = grad_full + 8 * (w * kGradBuffers + ring.stage);
        if (kDeterministic && !mbarrier_is_over(piece_full, ring.phase)) settle();
        mbarrier_wait(piece_full, ring.phase);
        const int4 piece = smem.grad_piece[w][ring.stage];
        if (piece.x < 0) break;
        const u32 grad = smem_address(smem.grad[w][ring.stage]);
        const bool of_queries = piece.z == kQueryGrad;
        const int head = of_queries ? piece.y : piece.y & kLow;
        const int column = of_queries ? half * kGradColumns : piece.w & kLow;
        const int word = words_of(params, piece.x, head) + half;
        bool begins = false;
        if (kMarks && of_queries && piece.w != kWritten) {
          const int before = atomicOr(params.marks + word, kBegun);
          begins = before == 0;
          if (before == kBegun)
            while (!(load_acquire(params.marks + word) & kWritten)) {}
          asm volatile("fence.proxy.async;" ::: "memory");
        }
        int* turn = nullptr;
        if (kDeterministic) {
          turn = of_queries
                     ? params.semaphores + word
                     : params.part_semaphores + ((piece.y >> kLowBits) * params.schedule.num_heads + head) * 2 + w;
          const int wanted = of_queries ? piece.w : piece.w >> kLowBits;
          begins = kBegins && of_queries && wanted == 0;
          if (load_acquire(turn) != wanted) {
            settle();  // others may need it before this turn comes
            while (load_acquire(turn) != wanted) {}
          }
          asm volatile("fence.proxy.async;" ::: "memory");
        }
#pragma unroll
        for (int p = 0; p < kGradColumns / 32; p++) {
          const TensorMap* map = of_queries ? &map_dq : piece.z == kKeyGrad ? &map_dk : &map_dv;
          // 192: half of the first two panels' columns, and of the last one's
          const int x = HEAD_DIM == 192 ? (p < 2 ? w * 64 + p * 32 : 128 + w * 32) : column + p * 32;
          if (begins)
            tma_store_3d(map, grad + p * kGradPanel, x, head, piece.x);
          else
            tma_reduce_add_3d(map, grad + p * kGradPanel, x, head, piece.x);
        }
        bulk_commit();
        if (kDeterministic) {
          if (landing) {
            bulk_wait<1>();
            pass_turn(landing);
          }
          // a part's last piece
          landing = of_queries || (piece.z == kValueGrad && column == HEAD_DIM - kGradColumns) ? turn : nullptr;
          bulk_wait_read<0>();  // the next turn may take long: gives the buffer back before
          mbarrier_arrive(grad_empty + 8 * (w * kGradBuffers + ring.stage));
        } else {
          const bool until_read = begins || kGradBuffers == 1;
          if (begins) {
            bulk_wait<0>();
            mark_written(params.marks + word);
          } else {
            bulk_wait_read<kGradBuffers - 1>();
          }
          if (!is_read) mbarrier_arrive(grad_empty + 8 * (w * kGradBuffers + (ring.stage ^ 1)));
          if (until_read) mbarrier_arrive(grad_empty + 8 * (w * kGradBuffers + ring.stage));
          is_read = until_read;
        }
      }
      if (lane == 0) settle(), bulk_wait<0>();
    }

  } else if (kGradGroup && warpgroup == 3) {  // --------------------------------------------- dQ of both warpgroups' dS
    registers_release<72>();
    constexpr int w = 2;
    const u32 ds_operand = operand(smem_address(smem.ds)), k_columns = operand(k);
    const u32 dq_row = row_of_query_grads(smem_address(smem.grad[w]), warp, lane);
    Ring<kStages> ring;
    Ring<kScoreGradBuffers> ds_ring;
    Ring<kGradBuffers> grad_ring;
    auto wait_for_buffer = [&]() {
      mbarrier_wait(grad_empty + 8 * (w * kGradBuffers + grad_ring.stage), grad_ring.phase ^ 1);
    };
    auto hand_over = [&](int4 piece) {
      if (threadIdx.x % 128 == 0) smem.grad_piece[w][grad_ring.stage] = piece;
      fence_proxy_async();
      mbarrier_arrive_warp(grad_full + 8 * (w * kGradBuffers + grad_ring.stage));
      grad_ring.advance();
    };
    for (u32 kv_phase = 0;; kv_phase ^= 1) {
      mbarrier_wait(kv_full, kv_phase);
      if (warp_uniform(smem.item.x) < 0) break;
      int flags = warp_uniform(smem.item.z);
      while (!(flags & kLastBlock)) {
        mbarrier_wait(full + 8 * ring.stage, ring.phase);
        const int4 block = smem.block[ring.stage];
        mbarrier_arrive_warp(empty + 8 * ring.stage);
        ring.advance();
        flags = warp_uniform(block.z);
        mbarrier_wait(ds_full + 8 * ds_ring.stage, ds_ring.phase);
        float dq_rmem[kGradColumns / 2];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kKeys / 16; i++)
          wgmma_ss<1, 1>(dq_rmem, moved(ds_operand, ds_ring.stage * (u32)sizeof(smem.ds[0]) + i * 2048),
                         moved(k_columns, i * 2048), i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        mbarrier_arrive_warp(ds_empty + 8 * ds_ring.stage);
        ds_ring.advance();
        wait_for_buffer();
        store_query_grads(dq_rmem, dq_row, grad_ring.stage * kGradBytes);
        hand_over(make_int4(block.x, block.y, kQueryGrad, block.w));
      }
      mbarrier_arrive_warp(kv_empty);
    }
    wait_for_buffer();
    hand_over(make_int4(-1, 0, 0, 0));  // tells the warp that adds to stop

  } else {  // ----------------------------------------------------------------------------------- consumers
    registers_acquire<kGradGroup ? 208 : 240>();
    const int w = warpgroup - 1;
    const bool leader = threadIdx.x % 128 == 0;
    const int key_row = w * 64 + warp % 4 * 16 + lane / 4;  // this thread's keys: key_row and key_row + 8
    const u32 k_rows = operand(k + w * kRowPanel), v_rows = operand(v + w * kRowPanel);  // this warpgroup's keys
    const u32 k_columns = operand(k + (kPanels == 2 ? w * kKeyPanel : w * 64));          // its half of the columns
    const u32 wide_columns = operand(k + w * kKeyPanel * (HEAD_DIM == 256 ? 2 : 1), kKeyPanel);
    const u32 rest_columns = operand(k + 2 * kKeyPanel + w * 64);
    const u32 q_rows = operand(q, kRowPanel), dout_rows = operand(dout, kRowPanel);
    const u32 ds_operand = operand(smem_address(smem.ds));
    // where this thread stores: a row of a dS matrix and of a piece of dQ (see store_matrices)
    const u32 ds_row = swizzled_row(smem_address(smem.ds), w * 64 + warp % 4 * 16 + lane % 16) ^ lane / 16 * 16;
    const u32 grad = smem_address(smem.grad[w][0]);
    const u32 dq_row = row_of_query_grads(grad, warp, lane);
    Ring<kStages> ring;
    u32 ds_b = 0;                     // byte offset of the dS buffer of this block
    Ring<kScoreGradBuffers> ds_ring;  // kGradGroup
    Ring<kGradBuffers> grad_ring;
    // Gives 64 rows of gradients, kGradColumns columns from x on, to the warp that adds them to global memory.
    auto hand_over = [&](auto grad_of, const float* x, int row, int head, int rank_or_column) {
      constexpr int kGrad = decltype(grad_of)::value;
      const int buffer = w * kGradBuffers + grad_ring.stage;
      const u32 to = grad_ring.stage * kGradBytes;
      mbarrier_wait(grad_empty + 8 * buffer, grad_ring.phase ^ 1);
      if constexpr (kGrad == kQueryGrad) {
        store_query_grads(x, dq_row, to);
      } else {
        const float scale = kGrad == kKeyGrad ? params.softmax_scale : 1;
        const u32 first_row = swizzled_row(grad, warp % 4 * 16 + lane / 4) ^ lane % 4 * 8;
#pragma unroll
        for (int j = 0; j < kGradColumns / 2; j += 2) {
          const int column = j / 4 * 8;  // of this lane's group of four
          store_smem((first_row ^ column % 32 * 4) + to + column / 32 * kGradPanel + j / 2 % 2 * 8 * 128, x[j] * scale,
                     x[j + 1] * scale);
        }
      }
      if (leader) smem.grad_piece[w][grad_ring.stage] = make_int4(row, head, kGrad, rank_or_column);
      fence_proxy_async();
      mbarrier_arrive_warp(grad_full + 8 * buffer);
      grad_ring.advance();
    };
    if (kTight) named_arrive(kScoreGradRead + 1 - w, kConsumers);
    for (u32 kv_phase = 0;; kv_phase ^= 1) {
      mbarrier_wait(kv_full, kv_phase);
      if (warp_uniform(smem.item.x) < 0) break;
      const int first_key = smem.item.x;
      float dk_rmem[HEAD_DIM / 2], dv_rmem[VALUE_DIM / 2];
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 2; j++) dk_rmem[j] = 0;
#pragma unroll
      for (int j = 0; j < VALUE_DIM / 2; j++) dv_rmem[j] = 0;

      u32 k_rmem[16], v_rmem[16];  // kGradGroup
      if constexpr (kGradGroup) {
        const u32 row = swizzled_row(k, w * 64 + warp % 4 * 16 + lane % 16) ^ lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          load_matrices(row ^ i * 32, k_rmem + 4 * i);
          if (kValuesInRegisters) load_matrices((row ^ i * 32) + (v - k), v_rmem + 4 * i);
        }
      }
      // The parts of a block's work. Each product is a group of its own.
      auto scores = [&](float(&s_rmem)[32], u32 q_s) {  // S^T
        keys_by_rows<HEAD_DIM, kGradGroup>(s_rmem, k_rmem, k_rows, q_s);
      };
      auto value_scores = [&](float(&dp_rmem)[32], u32 dout_s) {  // dP^T
        keys_by_rows<VALUE_DIM, kValuesInRegisters>(dp_rmem, v_rmem, v_rows, dout_s);
      };
      auto value_grads = [&](const u32(&p_rmem)[16], u32 dout_s) {
#pragma unroll
        for (int i = 0; i < kRows / 16; i++) wgmma_rs(dv_rmem, p_rmem + 4 * i, moved(dout_s, i * 2048), 1);
        wgmma_commit();
      };
      auto mask_scores = [&](float(&s_rmem)[32], int s) {
        const int end_key = smem.item.w;  // what lies beyond the tile is in no band
        const int key0 = first_key + key_row < end_key ? first_key + key_row : kNoKey;
        const int key1 = first_key + key_row + 8 < end_key ? first_key + key_row + 8 : kNoKey;
#pragma unroll
        for (int g = 0; g < 8; g++) {
          const int4 bands = *(const int4*)&smem.band[s][g * 8 + lane % 4 * 2];  // of two neighbouring rows
          if (key0 < bands.x || key0 >= bands.y) s_rmem[4 * g] = kMasked;
          if (key0 < bands.z || key0 >= bands.w) s_rmem[4 * g + 1] = kMasked;
          if (key1 < bands.x || key1 >= bands.y) s_rmem[4 * g + 2] = kMasked;
          if (key1 < bands.z || key1 >= bands.w) s_rmem[4 * g + 3] = kMasked;
        }
      };
      // Scores to P; with a softcap P is packed here, as it is then needed with and without the cap's slope.
      auto probabilities = [&](float(&s_rmem)[32], u32(&p_rmem)[16], int s) {
#pragma unroll
        for (int g = 0; g < 8; g++) {
          const float2 lse = *(const float2*)&smem.lse_log2[s][g * 8 + lane % 4 * 2];
          float slope[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (kSoftcap) slope[e] = 1 - s_rmem[4 * g + e] * s_rmem[4 * g + e];
            s_rmem[4 * g + e] = exp2_fast(s_rmem[4 * g + e] * params.scale_log2 - (e % 2 ? lse.y : lse.x));
          }
          if (kSoftcap || kTight) {
            p_rmem[2 * g] = pack2(s_rmem[4 * g], s_rmem[4 * g + 1]);
            p_rmem[2 * g + 1] = pack2(s_rmem[4 * g + 2], s_rmem[4 * g + 3]);
          }
          if (kSoftcap) {
#pragma unroll
            for (int e = 0; e < 4; e++) s_rmem[4 * g + e] *= slope[e];
          }
        }
      };
      auto store_score_grads = [&](const u32(&ds_rmem)[16]) {
        if (kGradGroup) mbarrier_wait(ds_empty + 8 * ds_ring.stage, ds_ring.phase ^ 1);
#pragma unroll
        for (int i = 0; i < 4; i++)
          store_matrices((ds_row ^ i * 32) + ds_b, ds_rmem[4 * i], ds_rmem[4 * i + 1], ds_rmem[4 * i + 2],
                         ds_rmem[4 * i + 3]);
        fence_proxy_async();
        if (kGradGroup) {
          mbarrier_arrive_warp(ds_full + 8 * ds_ring.stage);
          ds_ring.advance();
          return;
        }
        named_sync(kScoreGradReady, kConsumers);  // dS of both warpgroups; the other buffer is free again
      };
      int last_stage = -1;  // ONLY_VALUES, kGradGroup: of the block before
      // Wide: half of the columns of dQ, those of 192 as one panel and half of the third.
      constexpr int kColumns = HEAD_DIM == 256 ? 128 : 64;
      float dq_rmem[kColumns / 2], rest_rmem[16];
      // Adds dQ of a block to its rows. On the way, as soon as dK is likely to be done, Q is given back.
      auto add_query_rows = [&](int4 block, u32 q_empty) {
        float* rows[2];
        const int columns = params.head_dim - w * kColumns, first = w * kColumns + lane % 4 * 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int row = warp % 4 * 16 + lane / 4 + 8 * r, token = block.x + row / PACK;
          const bool valid = row < kTokens * PACK && token < params.num_q;
          rows[r] = valid
                        ? params.dq + ((u64)token * params.num_heads_q + block.y + row % PACK) * params.head_dim + first
                        : nullptr;
        }
        int* turn = params.semaphores + words_of(params, block.x, block.y) + w;
        in_turn(turn, block.w, w, leader, [&]() {
          constexpr int kSoon = HEAD_DIM == 256 ? 2 : 4;  // later costs 256 up to 2%; earlier costs 192 2%
          add_query_grads<0, kSoon>(dq_rmem, rows[0], rows[1], columns);
          wgmma_wait<0>();  // dK
          mbarrier_arrive_warp(q_empty);
          add_query_grads<kSoon, kColumns / 16>(dq_rmem, rows[0], rows[1], columns);
          if constexpr (HEAD_DIM == 192) {
            const int more = 128 - w * 32;  // from w * 64 to 128 + w * 32
            add_query_grads<0, 2>(rest_rmem, rows[0] ? rows[0] + more : nullptr, rows[1] ? rows[1] + more : nullptr,
                                  columns - more);
          }
        });
      };
      int flags = warp_uniform(smem.item.z);
      // One of two loops over the query blocks.
      while (kTight && !(flags & kLastBlock)) {
        const int s = ring.stage;
        const u32 q_s = moved(q_rows, s * kRowBytes), dout_s = moved(dout_rows, s * kDoutBytes);
        float s_rmem[32], dp_rmem[32];
        u32 p_rmem[16], ds_rmem[16];
        mbarrier_wait(full + 8 * s, ring.phase);
        const int4 block = smem.block[s];
        flags = warp_uniform(block.z);
        wgmma_fence();
        scores(s_rmem, q_s);
        wgmma_wait<0>();
        if (kSoftcap) cap_scores(s_rmem, params.cap_scale);
        if (!(flags & kFullBlock)) mask_scores(s_rmem, s);
        probabilities(s_rmem, p_rmem, s);
#pragma unroll
        for (int j = 0; j < 16; j++) ds_rmem[j] = kSoftcap ? pack2(s_rmem[2 * j], s_rmem[2 * j + 1]) : p_rmem[j];
        wgmma_fence();
        value_scores(dp_rmem, dout_s);
        value_grads(p_rmem, dout_s);
        wgmma_wait<1>();  // dP
#pragma unroll
        for (int g = 0; g < 8; g++) {
          const float2 delta = *(const float2*)&smem.delta[s][g * 8 + lane % 4 * 2];
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float2 p = unpack2(ds_rmem[2 * g + r]);
            ds_rmem[2 * g + r] =
                pack2(p.x * (dp_rmem[4 * g + 2 * r] - delta.x), p.y * (dp_rmem[4 * g + 2 * r + 1] - delta.y));
          }
        }
        named_sync(kScoreGradRead + w, kConsumers);  // by the other warpgroup, for dQ of the block before
        store_score_grads(ds_rmem);
        wgmma_wait<0>();  // dV
        float dq_rmem[kGradColumns / 2];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kKeys / 16; i++)
          wgmma_ss<1, 1>(*(float(*)[32])dq_rmem, moved(ds_operand, i * 2048), moved(wide_columns, i * 2048), i > 0);
#pragma unroll
        for (int i = 0; i < kKeys / 16; i++)
          wgmma_ss<1, 1>(*(float(*)[16])(dq_rmem + 32), moved(ds_operand, i * 2048), moved(rest_columns, i * 2048),
                         i > 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < kRows / 16; i++)  // dS from shared memory: registers are full
          wgmma_ss<0, 1>(dk_rmem, moved(ds_operand, w * kRowPanel + i * 32), moved(q_s, i * 2048), 1);
        wgmma_commit();
        wgmma_wait<1>();  // dQ
        named_arrive(kScoreGradRead + 1 - w, kConsumers);
        hand_over(Tag<kQueryGrad>(), dq_rmem, block.x, block.y, block.w);
        wgmma_wait<0>();  // dK
        mbarrier_arrive_warp(empty + 8 * s);
        ring.advance();
      }
      while (!kTight && !(flags & kLastBlock)) {
        const int s = ring.stage;
        const u32 q_s = moved(q_rows, s * kRowBytes), dout_s = moved(dout_rows, s * kDoutBytes);
        float s_rmem[32], dp_rmem[32];
        u32 p_rmem[16], ds_rmem[16];
        mbarrier_wait(full + 8 * s, ring.phase);
        const int4 block = smem.block[s];
        flags = warp_uniform(block.z);
        wgmma_fence();
        scores(s_rmem, q_s);
        if (kKeyGrads && !kGradGroup) {
          if (kEarlyDout) mbarrier_wait(dout_full, ring.phase);
          value_scores(dp_rmem, dout_s);
          wgmma_wait<1>();  // S
        } else {
          wgmma_wait<0>();  // S, and dV and dK of the block before
          if (last_stage >= 0) mbarrier_arrive_warp(empty + 8 * last_stage);
        }
        if (kGradGroup) {  // not before: registers hold dP, but not P and dS of the block before as well
          wgmma_fence();
          value_scores(dp_rmem, dout_s);
        }
        if (kSoftcap) cap_scores(s_rmem, params.cap_scale);
        if (!(flags & kFullBlock)) mask_scores(s_rmem, s);
        probabilities(s_rmem, p_rmem, s);

        if (kKeyGrads) wgmma_wait<0>();  // dP
        if (kEarlyDout) mbarrier_arrive_warp(dout_empty);
#pragma unroll
        for (int g = 0; g < (kKeyGrads ? 8 : 0); g++) {
          const float2 delta = *(const float2*)&smem.delta[s][g * 8 + lane % 4 * 2];
#pragma unroll
          for (int e = 0; e < 4; e++)
            dp_rmem[4 * g + e] = s_rmem[4 * g + e] * (dp_rmem[4 * g + e] - (e % 2 ? delta.y : delta.x));
        }
#pragma unroll
        for (int j = 0; j < 16; j++) {
          if (!kSoftcap) p_rmem[j] = pack2(s_rmem[2 * j], s_rmem[2 * j + 1]);
          if (kKeyGrads) ds_rmem[j] = pack2(dp_rmem[2 * j], dp_rmem[2 * j + 1]);
        }

        if (kValueGrads) {
          wgmma_fence();
          value_grads(p_rmem, dout_s);
        }
        if (!kKeyGrads) {
          last_stage = s;
          ring.advance();
          continue;
        }

        store_score_grads(ds_rmem);

        if constexpr (kGradGroup) {
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kRows / 16; i++) wgmma_rs(dk_rmem, ds_rmem + 4 * i, moved(q_s, i * 2048), 1);
          wgmma_commit();
          ds_b = ds_ring.stage * (u32)sizeof(smem.ds[0]);
          last_stage = s;
          ring.advance();
          continue;
        }

        if constexpr (kWide) {
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kKeys / 16; i++)
            wgmma_ss<1, 1>(dq_rmem, moved(ds_operand, ds_b + i * 2048), moved(wide_columns, i * 2048), i > 0);
          if (HEAD_DIM == 192) {
#pragma unroll
            for (int i = 0; i < kKeys / 16; i++)
              wgmma_ss<1, 1>(rest_rmem, moved(ds_operand, ds_b + i * 2048), moved(rest_columns, i * 2048), i > 0);
          }
          wgmma_commit();
#pragma unroll
          for (int i = 0; i < kRows / 16; i++) wgmma_rs(dk_rmem, ds_rmem + 4 * i, moved(q_s, i * 2048), 1);
          wgmma_commit();
          ds_b ^= (u32)sizeof(smem.ds[0]);
          wgmma_wait<1>();  // dQ
          add_query_rows(block, empty + 8 * s);
          ring.advance();
          continue;
        }

        if constexpr (!kWide && !kGradGroup) {
          float dq_rmem[kGradColumns / 2];
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kKeys / 16; i++)
            wgmma_ss<1, 1>(dq_rmem, moved(ds_operand, ds_b + i * 2048), moved(k_columns, i * 2048), i > 0);
          wgmma_commit();
#pragma unroll
          for (int i = 0; i < kRows / 16; i++) wgmma_rs(dk_rmem, ds_rmem + 4 * i, moved(q_s, i * 2048), 1);
          wgmma_commit();
          ds_b ^= (u32)sizeof(smem.ds[0]);

          wgmma_wait<1>();  // dV and dQ
          hand_over(Tag<kQueryGrad>(), dq_rmem, block.x, block.y, block.w);

          wgmma_wait<0>();  // dK
          mbarrier_arrive_warp(empty + 8 * s);
          ring.advance();
        }
      }
      if (kGradGroup) wgmma_wait<0>();  // dV and dK; under a condition ptxas would serialize the products
      if ((kGradGroup || !kKeyGrads) && last_stage >= 0) {
        if (!kGradGroup) wgmma_wait<0>();  // dV
        mbarrier_arrive_warp(empty + 8 * last_stage);
      }

      // ------------------------------------------------------------------------------------- epilogue
      const int kv_head = smem.item.y, end_key = smem.item.w;
      const int2 part = kDeterministic ? smem.part : make_int2(0, 0);
      mbarrier_arrive_warp(kv_empty);
      if (!kWide && params.store == kAddFloat) {  // rows beyond end_key are 0
        const int head = kv_head | part.x << kLowBits, parts = part.y << kLowBits;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / kGradColumns; i++)
          hand_over(Tag<kKeyGrad>(), dk_rmem + i * kGradColumns / 2, first_key + w * 64, head,
                    parts | i * kGradColumns);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / kGradColumns; i++)
          hand_over(Tag<kValueGrad>(), dv_rmem + i * kGradColumns / 2, first_key + w * 64, head,
                    parts | i * kGradColumns);
        continue;
      }
      const bool valid0 = first_key + key_row < end_key, valid1 = first_key + key_row + 8 < end_key;
      auto store = [&](const auto& acc, void* base, long long token_stride, long long head_stride, float scale,
                       int dim) {
        constexpr int N = sizeof(acc) / sizeof(float) * 2;
        const long long low = (first_key + key_row) * token_stride + kv_head * head_stride;
        const long long high = low + 8 * token_stride;
        if (params.store == kStorePacked) {
          unsigned short* p = (unsigned short*)base;
          store_rows_packed<N>(acc, scale, valid0 ? p + low : nullptr, valid1 ? p + high : nullptr, dim, lane);
          return;
        }
        float *row_low = valid0 ? (float*)base + low : nullptr, *row_high = valid1 ? (float*)base + high : nullptr;
        if (kWide && params.store == kAddFloat)
          add_rows_float<N>(acc, scale, row_low, row_high, dim, lane);
        else
          store_rows_float<N>(acc, scale, row_low, row_high, dim, lane);
      };
      auto store_both = [&]() {
        if (kKeyGrads)
          store(dk_rmem, params.dk, params.dk_token_stride, params.dk_head_stride, params.softmax_scale,
                params.head_dim);
        if (kValueGrads)
          store(dv_rmem, params.dv, params.dv_token_stride, params.dv_head_stride, 1.f,
                kWide ? params.value_dim : params.head_dim);
      };
      if (kWide && kDeterministic && params.store == kAddFloat)
        in_turn(params.part_semaphores + (part.x * params.schedule.num_heads + kv_head) * 2 + w, part.y, w, leader,
                store_both);
      else
        store_both();
    }
    if (!kStaged) return;
    if (kTight) named_sync(kScoreGradRead + w, kConsumers);  // no barrier ends with an arrival too many
    const int buffer = w * kGradBuffers + grad_ring.stage;   // tells the warp that adds to stop
    mbarrier_wait(grad_empty + 8 * buffer, grad_ring.phase ^ 1);
    if (leader) smem.grad_piece[w][grad_ring.stage] = make_int4(-1, 0, 0, 0);
    mbarrier_arrive_warp(grad_full + 8 * buffer);
  }
}
