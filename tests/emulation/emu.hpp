// Runs CUDA kernel sources on the CPU, a fiber a thread: replaces common.cuh. One block at a time.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <algorithm>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <immintrin.h>
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
#define DEVICE inline __attribute__((always_inline))
#define UNROLL
#define _Pragma(x)
#define __device__
#define __forceinline__ inline
#define __restrict__
struct alignas(8) uint2 { u32 x, y; }; struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; }; struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; }; struct alignas(16) int4 { int x, y, z, w; };
inline uint2 make_uint2(u32 a, u32 b) { return {a, b}; } inline uint4 make_uint4(u32 a, u32 b, u32 c, u32 d) { return {a, b, c, d}; }
inline float2 make_float2(float a, float b) { return {a, b}; } inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline int2 make_int2(int a, int b) { return {a, b}; } inline int4 make_int4(int a, int b, int c, int d) { return {a, b, c, d}; }
struct Dim { u32 x, y, z; };
static Dim threadIdx, blockIdx, gridDim, blockDim;

// -- fibers
extern "C" void emu_switch(void** save, void* load);
__asm__(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
 pushq %rbp
 pushq %rbx
 pushq %r12
 pushq %r13
 pushq %r14
 pushq %r15
 movq %rsp,(%rdi)
 movq %rsi,%rsp
 popq %r15
 popq %r14
 popq %r13
 popq %r12
 popq %rbx
 popq %rbp
 ret
)");
struct Copy { u32 to; const void* from; int bytes; int size; };
struct Fiber { void* sp; char* stack; u32 index; bool done; const void* wait_on; u64 wait_gen; std::vector<std::vector<Copy>> groups; std::vector<Copy> open; };
struct Warp { u64 gen; int arrived; const char* tag; u64 mask; u64 slot[2][32][24]; u64 result[2][32][24]; int live; };
static const int MAXT = 1024, STACK = 1 << 17;
static Fiber fibers[MAXT]; static Warp warps[32]; static Warp groups_[8];
static u64 big_in_[8][128][80], big_out_[8][128][80];
static void* main_sp; static Fiber* cur; static int live_threads, barrier_arrived; static u64 barrier_gen;
static char* dyn_shared; static u32 dyn_bytes; static const char* kernel_name = "?";
static u64 rng = 88172645463325252ull; static int late_copies = 1;
static inline u64 rnd() { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return rng; }
[[noreturn]] static void die(const char* what) { fprintf(stderr, "EMU %s: %s at block (%u,%u,%u) thread %u\n", kernel_name, what, blockIdx.x, blockIdx.y, blockIdx.z, cur ? cur->index : 0); fflush(stderr); abort(); }
static std::vector<int> ready; // indices runnable
static inline void yield_() { emu_switch(&cur->sp, main_sp); }
static int waiting_count;
// waits until *gen != old
struct Waiter { Fiber* f; };
static std::vector<std::vector<int>> dummy;
static inline void block_on(std::vector<int>& queue) { queue.push_back(cur->index); yield_(); }
static std::vector<int> barrier_queue, warp_queue[32], group_queue[8];
static inline void wake(std::vector<int>& queue) { for (int i : queue) ready.push_back(i); queue.clear(); }
static inline void __syncthreads() {
    if (++barrier_arrived >= live_threads) { barrier_arrived = 0; wake(barrier_queue); ready.push_back(cur->index); yield_(); }
    else block_on(barrier_queue);
}
// all lanes of the warp give `in` words and get `out` words of `work`.
template <class F> static inline void rendezvous(const char* tag, const u64* in, int n_in, u64* out, int n_out, F work) {
    const int w = cur->index >> 5, lane = cur->index & 31; Warp& W = warps[w];
    const int p = W.gen & 1;
    if (W.arrived == 0) W.tag = tag; else if (W.tag != tag && strcmp(W.tag, tag)) die("lanes of a warp at different operations");
    for (int i = 0; i < n_in; i++) W.slot[p][lane][i] = in[i];
    if (++W.arrived == W.live) {
        if (W.live != 32 && blockDim.x % 32 == 0) die("a warp operation with exited lanes");
        work(W.slot[p], W.result[p]);
        W.arrived = 0; W.gen++; wake(warp_queue[w]); ready.push_back(cur->index); yield_();
    } else block_on(warp_queue[w]);
    for (int i = 0; i < n_out; i++) out[i] = W.result[p][lane][i];
}
static inline void __syncwarp(u32 = ~0u) { rendezvous("syncwarp", nullptr, 0, nullptr, 0, [](auto, auto) {}); }
template <class T> static inline T shfl_any(const char* tag, T v, int source) {
    static_assert(sizeof(T) <= 8); u64 in[2] = {0, (u64)source}, out; memcpy(in, &v, sizeof v);
    rendezvous(tag, in, 2, &out, 1, [](auto s, auto r) { for (int l = 0; l < 32; l++) r[l][0] = s[(int)s[l][1] & 31][0]; });
    T o; memcpy(&o, &out, sizeof o); return o;
}
static inline void full(u32 m) { if (m != ~0u) die("partial mask"); }
template <class T> static inline T __shfl_sync(u32 m, T v, int src) { full(m); return shfl_any("shfl", v, src & 31); }
template <class T> static inline T __shfl_xor_sync(u32 m, T v, int d) { full(m); return shfl_any("shfl_xor", v, (cur->index & 31) ^ d); }
template <class T> static inline T __shfl_down_sync(u32 m, T v, int d) { full(m); int s = (cur->index & 31) + d; return shfl_any("shfl_down", v, s > 31 ? (int)(cur->index & 31) : s); }
template <class T> static inline T __shfl_up_sync(u32 m, T v, int d) { full(m); int s = (int)(cur->index & 31) - d; return shfl_any("shfl_up", v, s < 0 ? (int)(cur->index & 31) : s); }
static inline u32 __ballot_sync(u32 m, bool p) { full(m); u64 in = p, out; rendezvous("ballot", &in, 1, &out, 1, [](auto s, auto r) { u64 b = 0; for (int l = 0; l < 32; l++) b |= (s[l][0] & 1) << l; for (int l = 0; l < 32; l++) r[l][0] = b; }); return (u32)out; }
static inline u32 __match_any_sync(u32 m, int v) { full(m); u64 in = (u32)v, out; rendezvous("match", &in, 1, &out, 1, [](auto s, auto r) { for (int a = 0; a < 32; a++) { u64 b = 0; for (int l = 0; l < 32; l++) b |= (u64)(s[l][0] == s[a][0]) << l; r[a][0] = b; } }); return (u32)out; }
static inline u32 __reduce_max_sync(u32 m, u32 v) { full(m); u64 in = v, out; rendezvous("redmax", &in, 1, &out, 1, [](auto s, auto r) { u64 b = 0; for (int l = 0; l < 32; l++) b = std::max(b, s[l][0]); for (int l = 0; l < 32; l++) r[l][0] = b; }); return (u32)out; }
static inline u32 __reduce_min_sync(u32 m, u32 v) { return ~__reduce_max_sync(m, ~v); }
static inline bool __any_sync(u32 m, bool p) { return __ballot_sync(m, p) != 0; }
static inline bool __all_sync(u32 m, bool p) { return __ballot_sync(m, p) == ~0u; }
static inline int __syncthreads_or(int) { die("syncthreads_or"); }

// -- scalars
static inline int __popc(u32 v) { return __builtin_popcount(v); } static inline int __ffs(int v) { return __builtin_ffs(v); } static inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; } static inline float __fsub_rn(float a, float b) { return a - b; } static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; } static inline float __frcp_rn(float a) { return 1.f / a; } static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __expf(float x) { return exp2f(x * 1.4426950408889634f); } static inline float __logf(float x) { return logf(x); }
static inline u32 __float_as_uint(float f) { u32 r; memcpy(&r, &f, 4); return r; } static inline float __uint_as_float(u32 f) { float r; memcpy(&r, &f, 4); return r; }
static inline long long __double_as_longlong(double d) { long long r; memcpy(&r, &d, 8); return r; } static inline double __longlong_as_double(long long d) { double r; memcpy(&r, &d, 8); return r; }
static inline u32 __umulhi(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); } static inline u64 __double2ull_rn(double d) { return (u64)nearbyint(d); }
static inline u32 __byte_perm(u32 a, u32 b, u32 s) { u64 v = ((u64)b << 32) | a; u32 r = 0; for (int i = 0; i < 4; i++) r |= (u32)((v >> (8 * ((s >> (4 * i)) & 7))) & 255) << (8 * i); return r; }
template <class T> static inline T __ldcg(const T* p) { return *p; } template <class T> static inline T __ldg(const T* p) { return *p; }
static inline void __threadfence() {} static inline void __threadfence_block() {}
template <class A, class B> static inline auto min(A a, B b) { typedef typename std::common_type<A, B>::type C; return (C)a < (C)b ? (C)a : (C)b; }
template <class A, class B> static inline auto max(A a, B b) { typedef typename std::common_type<A, B>::type C; return (C)a > (C)b ? (C)a : (C)b; }
template <class T, class U> static inline T atomicAdd(T* p, U v) { T o = *p; *p = o + (T)v; return o; }
static inline u32 arrive(u32* counter) { return atomicAdd(counter, 1u); }
template <class T, class U> static inline T atomicMax(T* p, U v) { T o = *p; *p = o > (T)v ? o : (T)v; return o; }
template <class T, class U> static inline T atomicExch(T* p, U v) { T o = *p; *p = (T)v; return o; }

// -- half
static float half_table[65536];
static inline float half_to_float(u16 h) { return half_table[h]; }
static inline u16 float_to_half(float f) { if (f != f) return 0x7fff; return (u16)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(f), 0), 0); }
static inline u32 floats_to_half2(float lo, float hi) { return (u32)float_to_half(lo) | (u32)float_to_half(hi) << 16; }
static inline u16 hop(double v) { return float_to_half((float)v); }
static inline u32 half2_sub(u32 a, u32 b) { return (u32)hop((double)half_table[a & 65535] - half_table[b & 65535]) | (u32)hop((double)half_table[a >> 16] - half_table[b >> 16]) << 16; }
static inline u32 half2_fma(u32 a, u32 b, u32 c) { return (u32)hop((double)half_table[a & 65535] * half_table[b & 65535] + half_table[c & 65535]) | (u32)hop((double)half_table[a >> 16] * half_table[b >> 16] + half_table[c >> 16]) << 16; }
static inline u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
static inline float emu_exp2(float x) { float y = exp2f(x); return y < 1.1754944e-38f ? 0.f : y; }

// -- tensor cores
static inline void mma_any(float* c, const u32* a, u32 b0, u32 b1, bool zero) {
    u64 in[10], out[4]; for (int i = 0; i < 4; i++) in[i] = a[i]; in[4] = b0; in[5] = b1;
    for (int i = 0; i < 4; i++) in[6 + i] = zero ? 0 : __float_as_uint(c[i]);
    rendezvous("mma", in, 10, out, 4, [](auto s, auto r) {
        float A[16][16], B[8][16];
        for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) for (int e = 0; e < 2; e++) A[l / 4 + (i & 1) * 8][(l & 3) * 2 + e + (i >> 1) * 8] = half_table[(s[l][i] >> (16 * e)) & 65535];
        for (int l = 0; l < 32; l++) for (int i = 0; i < 2; i++) for (int e = 0; e < 2; e++) B[l / 4][(l & 3) * 2 + e + i * 8] = half_table[(s[l][4 + i] >> (16 * e)) & 65535];
        for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) {
            const float *x = A[l / 4 + (i >> 1) * 8], *y = B[(l & 3) * 2 + (i & 1)];
            double v = 0; for (int k = 0; k < 16; k++) v += (double)x[k] * y[k];
            r[l][i] = __float_as_uint((float)(v + (double)__uint_as_float((u32)s[l][6 + i])));
        }
    });
    for (int i = 0; i < 4; i++) c[i] = __uint_as_float((u32)out[i]);
}
static inline void mma_16x8x16(float* c, const u32* a, u32 b0, u32 b1) { mma_any(c, a, b0, b1, false); }
static inline void mma_16x8x16_from_zero(float* c, const u32* a, u32 b0, u32 b1) { mma_any(c, a, b0, b1, true); }
static char static_base[1];
static inline u32 shared_address(const void* p) {
    u64 d = (const char*)p - dyn_shared; if (d > dyn_bytes) die("shared_address outside dynamic shared memory"); return (u32)d;
}
static inline char* at_shared(u32 a, u32 n) { if (a + n > dyn_bytes) die("access outside dynamic shared memory"); return dyn_shared + a; }
template <bool T> static inline void ldm(u32* r, u32 address) {
    u64 in = address, out[4]; if (address & 15) die("ldmatrix misaligned");
    rendezvous(T ? "ldmatrix.t" : "ldmatrix", &in, 1, out, 4, [](auto s, auto res) {
        for (int l = 0; l < 32; l++) for (int j = 0; j < 4; j++) {
            if (!T) { u32 v; memcpy(&v, at_shared((u32)s[j * 8 + l / 4][0], 16) + (l & 3) * 4, 4); res[l][j] = v; }
            else { u16 a, b; memcpy(&a, at_shared((u32)s[j * 8 + (l & 3) * 2][0], 16) + (l / 4) * 2, 2); memcpy(&b, at_shared((u32)s[j * 8 + (l & 3) * 2 + 1][0], 16) + (l / 4) * 2, 2); res[l][j] = (u32)a | (u32)b << 16; }
        }
    });
    for (int i = 0; i < 4; i++) r[i] = (u32)out[i];
}
static inline void load_matrix_4(u32* r, u32 a) { ldm<false>(r, a); } static inline void load_matrix_4_transposed(u32* r, u32 a) { ldm<true>(r, a); }

// -- warpgroups
#if EMU_WARPGROUPS && !PORTABLE
#define WARPGROUPS 1
template <int NI> static inline void warpgroup_mma(float (*c)[4], const u32* a, u64 b, int add) {
    const int g = cur->index >> 7, t = cur->index & 127; Warp& W = groups_[g]; auto& big_in = big_in_[g]; auto& big_out = big_out_[g];
    for (int i = 0; i < 4; i++) big_in[t][i] = a[i]; big_in[t][4] = b; big_in[t][5] = add;
    for (int n = 0; n < NI; n++) for (int e = 0; e < 4; e++) big_in[t][6 + n * 4 + e] = __float_as_uint(c[n][e]);
    if (++W.arrived == 128) {
        for (int w = 0; w < 4; w++) for (int n = 0; n < NI; n++) {
            float A[16][16], B[8][16];
            for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) for (int e = 0; e < 2; e++) A[l / 4 + (i & 1) * 8][(l & 3) * 2 + e + (i >> 1) * 8] = half_table[(big_in[w * 32 + l][i] >> (16 * e)) & 65535];
            u64 d = big_in[w * 32][4]; if (d != big_in[0][4]) die("wgmma descriptors differ");
            u32 base = (u32)(d & 0x3fff) << 4, lead = (u32)((d >> 16) & 0x3fff) << 4, stride = (u32)((d >> 32) & 0x3fff) << 4;
            for (int tok = 0; tok < 8; tok++) for (int k = 0; k < 16; k++) { u16 h; memcpy(&h, at_shared(base + n * stride + (k / 8) * lead + tok * 16 + (k % 8) * 2, 2), 2); B[tok][k] = half_table[h]; }
            for (int l = 0; l < 32; l++) for (int e = 0; e < 4; e++) {
                double v = 0; for (int k = 0; k < 16; k++) v += (double)A[l / 4 + (e >> 1) * 8][k] * B[(l & 3) * 2 + (e & 1)][k];
                big_out[w * 32 + l][n * 4 + e] = __float_as_uint((float)(v + (big_in[w * 32 + l][5] ? (double)__uint_as_float((u32)big_in[w * 32 + l][6 + n * 4 + e]) : 0.)));
            }
        }
        W.arrived = 0; wake(group_queue[g]); ready.push_back(cur->index); 
        yield_();
    } else block_on(group_queue[g]);
    for (int n = 0; n < NI; n++) for (int e = 0; e < 4; e++) c[n][e] = __uint_as_float((u32)big_out[t][n * 4 + e]);
    // everyone must have read before anyone writes big_out again: a second rendezvous
    if (++W.live == 128) { W.live = 0; wake(group_queue[g]); ready.push_back(cur->index); yield_(); } else block_on(group_queue[g]);
}
static inline u64 b_tiles(u32 address, u32 stride) { return (u64)((address & 0x3ffff) >> 4) | (u64)(128 >> 4) << 16 | (u64)(stride >> 4) << 32; }
static inline void warpgroup_begin() {} static inline void warpgroup_commit() {} template <int> static inline void warpgroup_wait() {} template <int NI> static inline void hold(float (*)[4]) {}
static inline void publish_to_tensor_cores() {}
#endif

// -- memory
static inline uint4 load_streaming(const uint4* p) { return *p; }
static inline void do_copy(const Copy& c) { char* to = at_shared(c.to, c.size); memset(to, 0, c.size); memcpy(to, c.from, c.bytes); }
static inline void copy_any(u32 to, const void* from, int bytes, int size) { if (to % size || (u64)from % size) die("cp.async misaligned"); Copy c{to, from, bytes, size}; if (late_copies) cur->open.push_back(c); else do_copy(c); }
static inline void copy_async_16(u32 to, const void* from, int bytes = 16) { copy_any(to, from, bytes, 16); }
static inline void copy_async_4(u32 to, const void* from, int bytes = 4) { copy_any(to, from, bytes, 4); }
static inline void copy_commit() { cur->groups.push_back(std::move(cur->open)); cur->open.clear(); }
template <int N> static inline void copy_wait() { while ((int)cur->groups.size() > N) { for (auto& c : cur->groups.front()) do_copy(c); cur->groups.erase(cur->groups.begin()); } }
static inline void let_next_start() {} static inline void after_previous() {} static inline void prefetch_l2(const void* p) { (void)*(volatile const char*)p; }

// -- running
typedef void (*Call)(void**);
static Call the_call; static void** the_args;
static void fiber_main() {
    the_call(the_args);
    cur->done = true; live_threads--; int w = cur->index >> 5; warps[w].live--;
    if (live_threads && barrier_arrived >= live_threads) { barrier_arrived = 0; wake(barrier_queue); }
    if (warps[w].live && warps[w].arrived && warps[w].arrived >= warps[w].live) die("lanes left a warp operation");
    for (;;) yield_();
}
static void on_fault(int sig, siginfo_t* info, void*) { fprintf(stderr, "EMU signal %d address %p\n", sig, info->si_addr); die("fault"); }
template <class... A, size_t... I> static void invoke_(void (*f)(A...), void** a, std::index_sequence<I...>) { f(*(A*)a[I]...); }
template <class... A> static void invoke(void (*f)(A...), void** a) { invoke_(f, a, std::index_sequence_for<A...>{}); }
extern "C" __attribute__((visibility("default"))) int emu_launch(const char* name, Call call, u32 gx, u32 gy, u32 gz, u32 threads, u32 shared, void** args, u64 seed, int late) {
    static bool first = true;
    if (first) {
        first = false;
        for (int i = 0; i < 65536; i++) half_table[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i)));
        for (int i = 0; i < MAXT; i++) fibers[i].stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        dyn_shared = (char*)mmap(nullptr, 1 << 18, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        static char alt[1 << 16]; stack_t ss{}; ss.ss_sp = alt; ss.ss_size = sizeof alt; sigaltstack(&ss, nullptr);
        struct sigaction sa{}; sa.sa_sigaction = on_fault; sa.sa_flags = SA_SIGINFO | SA_ONSTACK; sigaction(SIGSEGV, &sa, nullptr); sigaction(SIGBUS, &sa, nullptr);
    }
    kernel_name = name; the_call = call; the_args = args; rng = seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull; late_copies = late; dyn_bytes = shared;
    if (!rng) rng = 1;
    gridDim = {gx, gy, gz}; blockDim = {threads, 1, 1};
    u64 blocks = (u64)gx * gy * gz; std::vector<u64> order(blocks); for (u64 i = 0; i < blocks; i++) order[i] = i;
    if (seed) for (u64 i = blocks; i > 1; i--) std::swap(order[i - 1], order[rnd() % i]);
    for (u64 b : order) {
        blockIdx = {(u32)(b % gx), (u32)(b / gx % gy), (u32)(b / ((u64)gx * gy))};
        for (u32 i = 0; i < shared / 4; i++) ((u32*)dyn_shared)[i] = 0x7FCADEAD;
        live_threads = threads; barrier_arrived = 0;
        for (u32 w = 0; w < 32; w++) { warps[w].arrived = 0; warps[w].live = (int)std::min(32, std::max(0, (int)threads - (int)w * 32)); }
        for (auto& g : groups_) g.arrived = g.live = 0;
        ready.clear(); barrier_queue.clear(); for (auto& q : warp_queue) q.clear(); for (auto& q : group_queue) q.clear();
        for (u32 t = 0; t < threads; t++) {
            Fiber& f = fibers[t]; f.index = t; f.done = false; f.groups.clear(); f.open.clear();
            void** sp = (void**)(f.stack + STACK - 64); *--sp = nullptr; *--sp = (void*)fiber_main; for (int i = 0; i < 6; i++) *--sp = nullptr; f.sp = sp; ready.push_back(t);
        }
        while (!ready.empty()) {
            size_t pick = seed ? rnd() % ready.size() : ready.size() - 1;
            int t = ready[pick]; ready[pick] = ready.back(); ready.pop_back();
            cur = &fibers[t]; threadIdx = {(u32)t, 0, 0}; emu_switch(&main_sp, cur->sp);
        }
        for (u32 t = 0; t < threads; t++) if (!fibers[t].done) { cur = &fibers[t]; die("a thread waits for ever"); }
    }
    cur = nullptr;
    return 0;
}
