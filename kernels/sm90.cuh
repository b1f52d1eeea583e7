// The Hopper instructions the FFA kernels use, one function each, and the index maths of their operands.
//
// Two notes on memory ordering, used throughout:
//  * Shared memory written by ordinary stores and then read by wgmma or by the bulk copy engine needs
//    `fence_proxy_async()` in every writing thread, before the barrier that announces the data.
//  * An mbarrier arrival releases and a wait acquires, so ordinary shared-memory values written before an arrival
//    (block descriptions, row statistics) are visible after the matching wait.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define kInfinity __int_as_float(0x7f800000)

struct alignas(64) TensorMap {
  u64 opaque[16];
};  // the driver's CUtensorMap

// Tells the compiler that a value is the same in all lanes, so that it and what follows from it can use uniform
// registers.
DEVICE int warp_uniform(int x) { return __shfl_sync(~0u, x, 0); }

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// The host launches each kernel so that it may begin while the one before it in its stream comes to an end: as soon as
// all blocks of that one have called the first function. That one's writes are there after the second. Every kernel
// calls both, and but for one (see ffa_backward.cu) before it touches global memory.
DEVICE void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Until *word, which something outside of this kernel raises, has reached `number`, modulo 2^32; what came before is
// seen then.
DEVICE void wait_until(const int* word, int number) {
  int seen;
  do asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
  while (seen - number < 0);
}

// ---------------------------------------------------------------------------------------------- mbarriers
DEVICE void mbarrier_init(u32 bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// kWarpArrivals arrivals for the whole warp, after all its lanes have come here. EVERY_LANE_ARRIVES is for race
// checkers, which do not see that the lanes of a warp are ordered before the arrival of one of them.
#ifdef EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
DEVICE void mbarrier_arrive_warp(u32 bar) { mbarrier_arrive(bar); }
#else
constexpr int kWarpArrivals = 1;
DEVICE void mbarrier_arrive_warp(u32 bar) {
  __syncwarp();
  asm volatile("{ .reg .pred one; elect.sync _|one, -1; @one mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(bar)
               : "memory");
}
#endif
DEVICE void mbarrier_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbarrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(bar),
      "r"(parity)
      : "memory");
}
DEVICE bool mbarrier_is_over(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done;
}

// A ring position: which stage of `STAGES`, and the parity of its current phase.
template <int STAGES>
struct Ring {
  int stage = 0;
  u32 phase = 0;
  DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// ---------------------------------------------------------------------------------------------- named barriers
DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---------------------------------------------------------------------------------------------- bulk tensor copies
DEVICE void tma_load_3d(u32 dst_smem, const TensorMap* map, u32 bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(dst_smem),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Bytes as they lie; both addresses and the number of bytes are multiples of 16.
DEVICE void bulk_load(u32 dst_smem, const void* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst_smem),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
DEVICE void tma_prefetch_3d(const TensorMap* map, int x, int y, int z) {  // to L2
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}
DEVICE void tma_store_3d(const TensorMap* map, u32 src_smem, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(src_smem), "r"(x), "r"(y), "r"(z)
               : "memory");
}
DEVICE void tma_reduce_add_3d(const TensorMap* map, u32 src_smem, int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(src_smem), "r"(x), "r"(y), "r"(z)
      : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------- registers
template <int COUNT>
DEVICE void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void registers_acquire() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---------------------------------------------------------------------------------------------- arithmetic
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#ifdef USE_FP16
#define OPERAND "f16"
#else
#define OPERAND "bf16"
#endif

// The greatest of three integers, two of them the bits of floats, in one instruction. Floats above 0 are ordered as
// their bits are.
DEVICE int max_bits(int a, float x, float y) {
  int r;
  asm("{ .reg .b32 p, q, s; mov.b32 p, %1; mov.b32 q, %2; max.s32 s, p, q; max.s32 %0, s, %3; }"
      : "=r"(r)
      : "f"(x), "f"(y), "r"(a));
  return r;
}

// Two floats rounded to the input type, the first in the low half.
DEVICE u32 pack2(float low, float high) {
  u32 r;
  asm("cvt.rn." OPERAND "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The floats of two packed elements of the input type.
DEVICE float2 unpack2(u32 x) {
#ifdef USE_FP16
  float2 r;
  asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
#else
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
#endif
}

// ---------------------------------------------------------------------------------------------- shared memory
DEVICE void store_smem(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements from accumulator-shaped registers; lane l gives the address of
// row l % 8 of matrix l / 8.
DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The reverse, of floats.
DEVICE void load_matrices(u32 address, float (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}
// Of 16-bit elements.
DEVICE void load_matrices(u32 address, u32* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// The 128-byte swizzle: 16-byte chunk c of 128-byte row r lies at chunk c ^ (r % 8). Tiles start at multiples of 1024.
// swizzled_row: the address of a row, so that `swizzled_row(..) ^ byte` is the place of a byte of it.
DEVICE u32 swizzled_row(u32 tile, int row) { return tile + row * 128 + (row % 8 << 4); }

// ---------------------------------------------------------------------------------------------- wgmma
// Low word of a shared-memory operand descriptor, 128-byte swizzle. Moving by n bytes adds n >> 4, see `moved`.
// `panel` = one [rows][64 elements] block of 128-byte rows.
//  K-major operand (its rows are M or N, columns are the reduction): leading offset unused, stride 1024 (8 rows),
//    + 32 bytes per 16 columns inside a panel.
//  MN-major operand (its rows are the reduction, columns are M or N): leading offset = distance between panels
//    (64 columns of M or N), stride 1024 (8 rows), + 2048 bytes per 16 rows.
DEVICE u32 operand(u32 address, u32 panel_bytes = 16) { return address >> 4 | (panel_bytes >> 4) << 16; }
DEVICE u32 moved(u32 operand, u32 bytes) { return operand + (bytes >> 4); }
DEVICE u64 descriptor(u32 operand) { return (u64)(1u << 30 | 1024 >> 4) << 32 | operand; }
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Accumulator register lists: the placeholders inside the instruction, and the matching operands.
#define REGS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS_32 REGS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS_40 REGS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REGS_48 REGS_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define REGS_56 REGS_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define REGS_64 REGS_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define REGS_80 REGS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define REGS_96 REGS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGS_112 REGS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define REGS_128 REGS_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define ACC_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC_8(d, i) ACC_4(d, i), ACC_4(d, i + 4)
#define ACC_16(d, i) ACC_8(d, i), ACC_8(d, i + 8)
#define ACC_32(d, i) ACC_16(d, i), ACC_16(d, i + 16)
#define ACC_64(d, i) ACC_32(d, i), ACC_32(d, i + 32)
#define ACC_40(d) ACC_32(d, 0), ACC_8(d, 32)
#define ACC_48(d) ACC_32(d, 0), ACC_16(d, 32)
#define ACC_56(d) ACC_48(d), ACC_8(d, 48)
#define ACC_96(d) ACC_64(d, 0), ACC_32(d, 64)
#define ACC_128(d) ACC_64(d, 0), ACC_64(d, 64)

// D[64, N] (+)= A * B. `TRANS_A`, `TRANS_B` = 1 for an MN-major operand; `accumulate` = 0 overwrites D.
// Element j of a thread's D is row lane / 4 + 8 * (j / 2 % 2) of its warp's 16, column
// 8 * (j / 4) + 2 * (lane % 4) + j % 2.
#define WGMMA_SS(N, REGS, ACC, A_DESC, B_DESC, SCALE)                                                         \
  template <int TRANS_A, int TRANS_B>                                                                         \
  DEVICE void wgmma_ss(float(&d)[N / 2], u32 a, u32 b, int accumulate) {                                      \
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, " SCALE                                                \
                 ", 0;\n"                                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." OPERAND "." OPERAND " {" REGS "}, " A_DESC \
                 ", " B_DESC ", keep, 1, 1, %" TRANS_POSITION(N, 3) ", %" TRANS_POSITION(N, 4) "; }"          \
                 : ACC                                                                                        \
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"(accumulate), "n"(TRANS_A), "n"(TRANS_B));      \
  }
#define TRANS_POSITION(N, k) TRANS_POSITION_##N##_##k
#define TRANS_POSITION_32_3 "19"
#define TRANS_POSITION_32_4 "20"
#define TRANS_POSITION_64_3 "35"
#define TRANS_POSITION_64_4 "36"
#define TRANS_POSITION_80_3 "43"
#define TRANS_POSITION_80_4 "44"
#define TRANS_POSITION_96_3 "51"
#define TRANS_POSITION_96_4 "52"
#define TRANS_POSITION_112_3 "59"
#define TRANS_POSITION_112_4 "60"
#define TRANS_POSITION_128_3 "67"
#define TRANS_POSITION_128_4 "68"
#define TRANS_POSITION_192_3 "99"
#define TRANS_POSITION_192_4 "100"
#define TRANS_POSITION_256_3 "131"
#define TRANS_POSITION_256_4 "132"
WGMMA_SS(32, REGS_16, ACC_16(d, 0), "%16", "%17", "%18")
WGMMA_SS(64, REGS_32, ACC_32(d, 0), "%32", "%33", "%34")
WGMMA_SS(80, REGS_40, ACC_40(d), "%40", "%41", "%42")
WGMMA_SS(96, REGS_48, ACC_48(d), "%48", "%49", "%50")
WGMMA_SS(112, REGS_56, ACC_56(d), "%56", "%57", "%58")
WGMMA_SS(128, REGS_64, ACC_64(d, 0), "%64", "%65", "%66")
WGMMA_SS(192, REGS_96, ACC_96(d), "%96", "%97", "%98")
WGMMA_SS(256, REGS_128, ACC_128(d), "%128", "%129", "%130")

// The same with A in registers: a[0..3] = the 16 columns of k-step i of an accumulator-shaped tile, packed in pairs
// (elements 8i .. 8i + 7). B is MN-major for wgmma_rs, K-major for wgmma_rs_rows.
#define WGMMA_RS(NAME, TRANS_B, N, REGS, ACC, A_REGS, B_DESC, SCALE)                                           \
  DEVICE void NAME(float(&d)[N / 2], const u32* a, u32 b, int accumulate) {                                    \
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, " SCALE                                                 \
                 ", 0;\n"                                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." OPERAND "." OPERAND " {" REGS "}, {" A_REGS \
                 "}, " B_DESC ", keep, 1, 1, " TRANS_B "; }"                                                   \
                 : ACC                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)), "r"(accumulate));           \
  }
WGMMA_RS(wgmma_rs, "1", 64, REGS_32, ACC_32(d, 0), "%32,%33,%34,%35", "%36", "%37")
WGMMA_RS(wgmma_rs_rows, "0", 64, REGS_32, ACC_32(d, 0), "%32,%33,%34,%35", "%36", "%37")
WGMMA_RS(wgmma_rs, "1", 128, REGS_64, ACC_64(d, 0), "%64,%65,%66,%67", "%68", "%69")
WGMMA_RS(wgmma_rs, "1", 192, REGS_96, ACC_96(d), "%96,%97,%98,%99", "%100", "%101")
WGMMA_RS(wgmma_rs, "1", 256, REGS_128, ACC_128(d), "%128,%129,%130,%131", "%132", "%133")
