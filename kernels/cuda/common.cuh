// What every kernel source starts with: register-level access to the tensor cores and to asynchronous copies.
//
// No headers are included, so that NVRTC compiles without a toolkit. Half precision is carried in u16 and u32 (two halves).
// The build passes -fmad=false: a fused multiply-add happens only where it is written.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// -- half precision ----------------------------------------------------------------------------------------------------

DEVICE float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// The first argument lands in the low half.
DEVICE u32 floats_to_half2(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE u32 half2_sub(u32 a, u32 b) {
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// (a & b) | c in one instruction.
DEVICE u32 and_or(u32 a, u32 b, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// -- tensor cores ------------------------------------------------------------------------------------------------------

// c[16 x 8] += a[16 x 16] b[16 x 8], half in, float accumulate. A lane holds rows lane / 4 and + 8 of a and c, columns
// 2 (lane % 4) and + 1 of c, and column lane / 4 of b. An element depends on its row of a and its column of b alone.
DEVICE void mma_16x8x16(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with c = 0 before: needs no zeroed registers.
DEVICE void mma_16x8x16_from_zero(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

DEVICE void load_matrix_4(u32* r, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

DEVICE void load_matrix_4_transposed(u32* r, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

#if __CUDA_ARCH_FEAT_SM90_ALL && !PORTABLE  // a test asks for PORTABLE, to compare
#define WARPGROUPS 1

// Hopper's product of a warpgroup (4 warps): c[64 x 8 NI] = a[64 x 16] b[16 x 8 NI] (+ c), a from registers, b from shared memory. A
// warp holds 16 rows of a and c as for mma_16x8x16, and gets the same bits. b is described by b_tiles.
#define C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WARPGROUP_MMA(shape, registers, a0, a1, a2, a3, b, add)                                                         \
    "{\n.reg .pred p;\nsetp.ne.b32 p, %" #add ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32.f16.f16 {" registers "}, "   \
    "{%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, 0;\n}\n"

// STRIDE: bytes from 8 tokens to the next.
template <int NI, int STRIDE = 1024>
DEVICE void warpgroup_mma(float (*c)[4], const u32* a, u32 b_low, int add) {
    const u64 b = (u64)(STRIDE >> 4) << 32 | b_low;
    static_assert(NI == 2 || NI == 4 || NI == 8 || NI == 16, "16, 32, 64 or 128 tokens");
    if constexpr (NI == 2)
        asm volatile(WARPGROUP_MMA("m64n16k16", "%0,%1,%2,%3,%4,%5,%6,%7", 8, 9, 10, 11, 12, 13)
                     : C4(0), C4(1)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    else if constexpr (NI == 4)
        asm volatile(WARPGROUP_MMA("m64n32k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", 16, 17, 18, 19, 20, 21)
                     : C4(0), C4(1), C4(2), C4(3)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    else if constexpr (NI == 16)
        asm volatile(WARPGROUP_MMA("m64n128k16",
                                   "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
                                   "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,"
                                   "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63", 64, 65, 66, 67, 68, 69)
                     : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7), C4(8), C4(9), C4(10), C4(11), C4(12), C4(13), C4(14), C4(15)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    else
        asm volatile(WARPGROUP_MMA("m64n64k16",
                                   "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
                                   "%26,%27,%28,%29,%30,%31", 32, 33, 34, 35, 36, 37)
                     : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// Tiles of 8 tokens by 8 channels (128 bytes), neighbours in K side by side, neighbours in tokens STRIDE bytes apart: the lower word
// of their description. Adding 16 bytes' worth to it moves along K in one instruction.
DEVICE u32 b_tiles(u32 address) { return (address & 0x3ffff) >> 4 | (128 >> 4) << 16; }

DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// What comes after reads the registers after what came before.
template <int NI>
DEVICE void hold(float (*c)[4]) {
    UNROLL for (int n = 0; n < NI; n++) asm volatile("" : C4(n)::"memory");
}

// Registers of this warpgroup's threads, given to others and taken.
template <int COUNT>
DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// What this thread wrote to shared memory is seen by the tensor cores that read it themselves.
DEVICE void publish_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// -- clusters ----------------------------------------------------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
// What the blocks of a cluster wrote before they arrived is seen after the wait. Every thread calls both, in turn.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Says nothing of what was written: for those who only must not be gone.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// The address of the same place in the shared memory of the cluster's block of that rank.
DEVICE u32 of_block(u32 address, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

DEVICE float4 load_of_block(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}
#endif

// -- barriers in shared memory, and copies that they wait for ---------------------------------------------------------------

#if WARPGROUPS
DEVICE void barrier_start(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }

// What this thread started is seen by the cluster, once it has met.
DEVICE void barriers_started() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Waits for the end of the phase of that parity; the phase before the first has parity 1.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives, and makes the phase wait for so many bytes.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of the cluster's block of that rank, by who has read what may now be overwritten: a release to the cluster
// would be for writes, and takes longer than a stage's products.
DEVICE void arrive_at_block(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(of_block(barrier, rank)) : "memory");
}

DEVICE void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Of threads that may be alone in their warp: one says that it is there, and waits for the others.
DEVICE void cluster_joins() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_met() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// A box of a tensor to shared memory; column in units of the map's elements.
DEVICE void tensor_copy(u32 to, const void* map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map),
                 "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// The same, to both blocks of a cluster of two, and to the barriers of both.
DEVICE void tensor_copy_to_both(u32 to, const void* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3)
        : "memory");
}
#endif

DEVICE void store_shared_16(u32 to, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

DEVICE float4 load_shared_float4(u32 from) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
    return v;
}

DEVICE uint4 load_shared_16(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

DEVICE float2 load_shared_8(u32 from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

DEVICE u32 load_shared_4(u32 from) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}

// -- memory ------------------------------------------------------------------------------------------------------------

// Weights are read once a step: past the L1, so that it keeps the activations.
DEVICE uint4 load_streaming(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// 16 bytes from global to shared memory; `bytes` of them (16 or 0) are read, the rest is zero.
DEVICE void copy_async_16(u32 to, const void* from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// 4 bytes.
DEVICE void copy_async_4(u32 to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from)); }

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;"); }

template <int N>
DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

// Counts one more block as done, by one thread after a barrier of its block: whoever gets a later number sees, past a barrier of its
// own, what this block wrote before. Gives how many came before.
DEVICE u32 arrive(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// -- the order of launches ------------------------------------------------------------------------------------------------

// A kernel may start while the one before it still runs (from sm_90 on; see modules.py). So every kernel lets the next one start and
// calls after_previous before it reads or writes anything but what no kernel of a step writes: weights and tables (the backend waits
// after those that pack weights). What it saw of the weights by then was read for free. All of the kernel before has run, and is
// visible, when after_previous returns.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE void after_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings the line of `p` to the L2: for what is read right after after_previous.
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
