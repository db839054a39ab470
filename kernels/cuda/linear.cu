// Group-wise integer weights times half-precision activations: out[M, N] = x[M, K] w[N, K]^T, or silu(gate) * up of two.
//
// Contract (docs/numerics.md): for one output element
//   P = the mma chain from zero over one group's k16 steps, ascending, on exact half-precision integers q - CENTRE
//   T = fma(scale, P, T), then T = fma(minimum + CENTRE * scale, X, T) where X is the same chain with ones for integers;
//       groups ascending, one chain a slice of K
//   F = the slices' T added in ascending order, times the row's power-of-two scale, one rounding, then bias, then `out`.
// Slice s covers units [s * units / S, (s + 1) * units / S) of max(64, GROUP) channels; S depends on K alone. Everything else
// (tile, warps, which block computes which slice) is free, and changes no bit: an mma's element depends on its row of weights
// and its column of activations alone.
//
// Weights sit on the 16-row operand and tokens on the 8-column one, so a single token pads to 8 and not to 16.
//
// Layouts, KB = K / 64:
//   w        [N / 16][KB][BITS / 4][32 lanes] x 16 bytes: A fragments in lane order. 4 bits: word j is k16 step j, its nibbles
//            (0,4)(1,5)(2,6)(3,7) are a0..a3. 8 bits: words 2j and 2j + 1 of the lane's two vectors are step j's (a0,a1), (a2,a3).
//   scale    [N / 16][K / GROUP][8][2]: channels r and r + 8 of the tile side by side; minimum likewise.
//   x        [tokens / 8][KB][2][32 lanes] x 16 bytes: B fragments in lane order, two k16 steps a vector.
//   x_scale  [tokens]: powers of two; the true activation is x * x_scale.
//   gated    tiles alternate gate, up; N counts both, out has N / 2 columns.
// Defines: BITS 4 or 8; GROUP 16 (only HAS_MIN 0), 32, 64, 128; HAS_MIN 0 or 1; SCALE_F32 0 or 1.
// Limits: K a multiple of max(64, GROUP), N padded to 64 channels, x allocated to a multiple of 128 tokens.

static_assert(BITS == 4 || BITS == 8, "weights have 4 or 8 bits");
static_assert(GROUP == 16 && !HAS_MIN || GROUP == 32 || GROUP == 64 || GROUP == 128, "a group has 16 (without minimums), 32, 64 or 128 channels");

constexpr int CENTRE = BITS == 4 ? 8 : 128;
constexpr int GROUPS_A_BLOCK = GROUP < 64 ? 64 / GROUP : 1;
constexpr int BLOCKS_A_GROUP = GROUP > 64 ? GROUP / 64 : 1;
constexpr int STEPS_A_GROUP = GROUP < 64 ? GROUP / 16 : 4;  // k16 steps of a group within one block
constexpr int VECTORS = BITS / 4;
// Blocks of weights in flight a warp, for one tile of channels; fewer where scales take many registers.
constexpr int DEEP = GROUP == 16 || (GROUP == 32 && SCALE_F32) ? 2 : 4;

// A pair of scales (channels r and r + 8) as it lies in memory.
#if SCALE_F32
typedef float2 Pair;
DEVICE float pair_low(Pair p) { return p.x; }
DEVICE float pair_high(Pair p) { return p.y; }
#else
typedef u32 Pair;
DEVICE float pair_low(Pair p) { return half_to_float((u16)(p & 0xffff)); }
DEVICE float pair_high(Pair p) { return half_to_float((u16)(p >> 16)); }
#endif

struct Weights {
    const uint4* w;
    const Pair* scale;
    const Pair* minimum;
};

// The scales of one block (64 channels of K) of MI tiles, in registers.
template <int MI>
struct Scales {
    Pair scale[MI][GROUPS_A_BLOCK];
#if HAS_MIN
    Pair minimum[MI][GROUPS_A_BLOCK];
#endif
};

template <int MI>
DEVICE void load_scales(Scales<MI>& into, const Weights& weights, int tile, int groups, int block, int lane) {
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
        int group = GROUPS_A_BLOCK > 1 ? block * GROUPS_A_BLOCK + g : block / BLOCKS_A_GROUP;
        size_t at = ((size_t)(tile + i) * groups + group) * 8 + (lane >> 2);
        into.scale[i][g] = weights.scale[at];
#if HAS_MIN
        into.minimum[i][g] = weights.minimum[at];
#endif
    }
}

// Integers of one k16 step to an A fragment of exact halves q - CENTRE.
#if BITS == 4
DEVICE void dequantize(const uint4* q, int step, u32* a) {
    u32 v = step == 0 ? q[0].x : step == 1 ? q[0].y : step == 2 ? q[0].z : q[0].w;
    // 0x6400 is 1024; a nibble in its low bits counts ones, one in the next four counts sixteens.
    a[0] = half2_sub(and_or(v, 0x000f000f, 0x64006400), 0x64086408);
    a[1] = half2_fma(and_or(v, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);
    v >>= 8;
    a[2] = half2_sub(and_or(v, 0x000f000f, 0x64006400), 0x64086408);
    a[3] = half2_fma(and_or(v, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);
}
#else
DEVICE void dequantize(const uint4* q, int step, u32* a) {
    uint4 v = q[step >> 1];
    u32 first = step & 1 ? v.z : v.x, second = step & 1 ? v.w : v.y;
    a[0] = half2_sub(__byte_perm(first, 0x64646464, 0x4140), 0x64806480);
    a[1] = half2_sub(__byte_perm(first, 0x64646464, 0x4342), 0x64806480);
    a[2] = half2_sub(__byte_perm(second, 0x64646464, 0x4140), 0x64806480);
    a[3] = half2_sub(__byte_perm(second, 0x64646464, 0x4342), 0x64806480);
}
#endif

// One block of one warp: P and X chains, and T at the end of each group. xf[n][h] are the B fragments.
template <int MI, int NI>
DEVICE void multiply_block(float (&P)[MI][NI][4], float (&T)[MI][NI][4], float (&X)[NI][4], const uint4 (*q)[VECTORS],
                           const Scales<MI>& scales, const uint4 (*xf)[2], int block) {
    const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    UNROLL for (int step = 0; step < 4; step++) {
        const bool starts = GROUP <= 64 ? step % STEPS_A_GROUP == 0 : step == 0 && block % BLOCKS_A_GROUP == 0;
        const bool ends = GROUP <= 64 ? step % STEPS_A_GROUP == STEPS_A_GROUP - 1
                                      : step == 3 && block % BLOCKS_A_GROUP == BLOCKS_A_GROUP - 1;
        if (starts) UNROLL for (int n = 0; n < NI; n++) {
                UNROLL for (int i = 0; i < MI; i++) UNROLL for (int e = 0; e < 4; e++) P[i][n][e] = 0.f;
                UNROLL for (int e = 0; e < 4; e++) X[n][e] = 0.f;
            }
        u32 b[NI][2];
        UNROLL for (int n = 0; n < NI; n++) {
            const uint4 v = xf[n][step >> 1];
            b[n][0] = step & 1 ? v.z : v.x;
            b[n][1] = step & 1 ? v.w : v.y;
#if HAS_MIN
            mma_16x8x16(X[n], ones, b[n][0], b[n][1]);
#endif
        }
        UNROLL for (int i = 0; i < MI; i++) {
            u32 a[4];
            dequantize(q[i], step, a);
            UNROLL for (int n = 0; n < NI; n++) mma_16x8x16(P[i][n], a, b[n][0], b[n][1]);
        }
        if (ends) {
            const int g = GROUPS_A_BLOCK > 1 ? step / STEPS_A_GROUP : 0;
            UNROLL for (int i = 0; i < MI; i++) {
                const float s0 = pair_low(scales.scale[i][g]), s1 = pair_high(scales.scale[i][g]);
                UNROLL for (int n = 0; n < NI; n++) {
                    T[i][n][0] = __fmaf_rn(s0, P[i][n][0], T[i][n][0]);
                    T[i][n][1] = __fmaf_rn(s0, P[i][n][1], T[i][n][1]);
                    T[i][n][2] = __fmaf_rn(s1, P[i][n][2], T[i][n][2]);
                    T[i][n][3] = __fmaf_rn(s1, P[i][n][3], T[i][n][3]);
                }
#if HAS_MIN
                const float m0 = __fmaf_rn((float)CENTRE, s0, pair_low(scales.minimum[i][g]));
                const float m1 = __fmaf_rn((float)CENTRE, s1, pair_high(scales.minimum[i][g]));
                UNROLL for (int n = 0; n < NI; n++) {
                    T[i][n][0] = __fmaf_rn(m0, X[n][0], T[i][n][0]);
                    T[i][n][1] = __fmaf_rn(m0, X[n][1], T[i][n][1]);
                    T[i][n][2] = __fmaf_rn(m1, X[n][2], T[i][n][2]);
                    T[i][n][3] = __fmaf_rn(m1, X[n][3], T[i][n][3]);
                }
#endif
            }
        }
    }
}

struct Output {
    float* out;
    const float* x_scale;
    const float* bias;  // or null
    int M, N, stride;  // stride: columns of `out`
    int accumulate;
};

DEVICE float silu(float g) { return __fdiv_rn(g, __fadd_rn(1.f, __expf(-g))); }

// `f` is the sum of the slices of one channel and token.
DEVICE void store(const Output& o, int token, int channel, float f) {
    if (token >= o.M || channel >= o.N) return;
    float y = __fmul_rn(f, o.x_scale[token]);
    if (o.bias) y = __fadd_rn(y, o.bias[channel]);
    float* at = o.out + (size_t)token * o.stride + channel;
    *at = o.accumulate ? __fadd_rn(*at, y) : y;
}

// Channels count the gated pair once.
DEVICE void store_gated(const Output& o, int token, int channel, float gate, float up) {
    if (token >= o.M || channel >= o.N / 2) return;
    const float s = o.x_scale[token];
    o.out[(size_t)token * o.stride + channel] = __fmul_rn(silu(__fmul_rn(gate, s)), __fmul_rn(up, s));
}

DEVICE int slice_begin(int slice, int slices, int blocks) {
    const int units = blocks / BLOCKS_A_GROUP;
    return (int)((long long)slice * units / slices) * BLOCKS_A_GROUP;
}

// -- few tokens: weights and activations straight from memory to registers, one warp a slice ------------------------------
//
// grid (tiles / (MI * WN)); 32 * S * WN threads. PF blocks of weights in flight a warp. A lane whose token does not exist
// reads nothing, so activations cost M * 128 bytes a block.
template <int NI, int MI, int S, int WN, int PF, bool GATED>
DEVICE void few_tokens(const Weights& weights, const uint4* x, const Output& o, int tiles, int KB) {
    constexpr int CHANNELS = WN * MI * 16;
    __shared__ float sums[S][NI * 8][CHANNELS + 1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slice = warp % S, column = warp / S;
    // A warp past the end repeats the last tiles; what it computes has no channel to be stored in.
    const int tile = min(blockIdx.x * WN * MI + column * MI, (u32)(tiles - MI));
    const int begin = slice_begin(slice, S, KB), count = slice_begin(slice + 1, S, KB) - begin, groups = KB * 64 / GROUP;
    const size_t tile_stride = (size_t)KB * VECTORS * 32;
    const uint4* w = weights.w + tile * tile_stride + (size_t)begin * VECTORS * 32 + lane;
    const uint4* xp = x + (size_t)begin * 64 + lane;

    uint4 q[PF][MI][VECTORS], xf[PF][NI][2];
    Scales<MI> scales[PF];
    auto fetch = [&](int p, int b) {
        UNROLL for (int i = 0; i < MI; i++) UNROLL for (int v = 0; v < VECTORS; v++)
            q[p][i][v] = load_streaming(w + i * tile_stride + (b * VECTORS + v) * 32);
        load_scales<MI>(scales[p], weights, tile, groups, begin + b, lane);
        UNROLL for (int n = 0; n < NI; n++) UNROLL for (int h = 0; h < 2; h++) {
            xf[p][n][h] = make_uint4(0, 0, 0, 0);
            if (n * 8 + (lane >> 2) < o.M) xf[p][n][h] = xp[((size_t)n * KB + b) * 64 + h * 32];
        }
    };
    UNROLL for (int p = 0; p < PF; p++) if (p < count) fetch(p, p);

    float P[MI][NI][4], T[MI][NI][4], X[NI][4];
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) T[i][n][e] = 0.f;
    for (int b0 = 0; b0 < count; b0 += PF) {
        UNROLL for (int p = 0; p < PF; p++) {
            const int b = b0 + p;
            if (b < count) {
                // PF and the slice's begin are multiples of a group's blocks, so p says where in its group a block is.
                multiply_block<MI, NI>(P, T, X, q[p], scales[p], xf[p], p);
                if (b + PF < count) fetch(p, b + PF);
            }
        }
    }

    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++)
        sums[slice][n * 8 + (lane & 3) * 2 + (e & 1)][(column * MI + i) * 16 + (lane >> 2) + (e >> 1) * 8] = T[i][n][e];
    __syncthreads();
    auto sum = [&](int token, int channel) {
        float f = sums[0][token][channel];
        UNROLL for (int s = 1; s < S; s++) f = __fadd_rn(f, sums[s][token][channel]);
        return f;
    };
    const int tokens = min(o.M, NI * 8);
    const int first = blockIdx.x * CHANNELS;
    if (GATED) {
        for (int id = threadIdx.x; id < tokens * (CHANNELS / 2); id += blockDim.x) {
            const int token = id / (CHANNELS / 2), pair = id % (CHANNELS / 2), c = (pair >> 4) * 32 + (pair & 15);
            store_gated(o, token, first / 2 + pair, sum(token, c), sum(token, c + 16));
        }
    } else {
        for (int id = threadIdx.x; id < tokens * CHANNELS; id += blockDim.x)
            store(o, id / CHANNELS, first + id % CHANNELS, sum(id / CHANNELS, id % CHANNELS));
    }
}

// -- many tokens: both operands through shared memory -----------------------------------------------------------------------
//
// grid (ceil(tiles / (WC * MI)), ceil(tokens / (WT * NI * 8)), slice blocks); 32 * WC * WT threads; STAGES blocks in flight.
// With gridDim.z == 1 a block walks all S slices in order. With gridDim.z == S it computes slice blockIdx.z, writes T to
// `partial` [S][z-plane blocks][threads][values], and the last of the S blocks to arrive adds them in slice order.
template <int WC, int WT, int MI, int NI, int STAGES, bool GATED>
DEVICE void many_tokens(const Weights& weights, const uint4* x, const Output& o, int tiles, int KB, int S, float* partial,
                        u32* arrived) {
    constexpr int THREADS = 32 * WC * WT, TILES = WC * MI, TOKEN_TILES = WT * NI;
    constexpr int X_VECTORS = TOKEN_TILES * 64, W_VECTORS = TILES * VECTORS * 32, STAGE = X_VECTORS + W_VECTORS;
    extern __shared__ uint4 stages[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wc = warp % WC, wt = warp / WC;
    const int tile0 = blockIdx.x * TILES, token_tile0 = blockIdx.y * TOKEN_TILES, groups = KB * 64 / GROUP;
    const int tile = min(tile0 + wc * MI, tiles - MI);
    const bool split = gridDim.z > 1;
    const int first_slice = split ? blockIdx.z : 0, end_slice = split ? blockIdx.z + 1 : S;
    const int begin = slice_begin(first_slice, S, KB), end = slice_begin(end_slice, S, KB);

    auto load = [&](int stage, int block) {
        if (block < end) {
            const u32 to = shared_address(stages + stage * STAGE);
            for (int id = threadIdx.x; id < X_VECTORS; id += THREADS)
                copy_async_16(to + id * 16, x + ((size_t)(token_tile0 + (id >> 6)) * KB + block) * 64 + (id & 63));
            for (int id = threadIdx.x; id < W_VECTORS; id += THREADS) {
                const int t = min(tile0 + id / (VECTORS * 32), tiles - 1);
                copy_async_16(to + (X_VECTORS + id) * 16, weights.w + ((size_t)t * KB + block) * VECTORS * 32 + id % (VECTORS * 32));
            }
        }
        copy_commit();
    };
    UNROLL for (int s = 0; s < STAGES - 1; s++) load(s, begin + s);

    float P[MI][NI][4], T[MI][NI][4], F[MI][NI][4], X[NI][4];
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) T[i][n][e] = F[i][n][e] = 0.f;
    Scales<MI> scales, next;
    if (begin < end) load_scales<MI>(next, weights, tile, groups, begin, lane);
    int stage = 0, slice = first_slice, slice_end = slice_begin(first_slice + 1, S, KB);
    for (int block = begin; block < end; block += BLOCKS_A_GROUP) {
        UNROLL for (int part = 0; part < BLOCKS_A_GROUP; part++) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            load(stage == 0 ? STAGES - 1 : stage - 1, block + part + STAGES - 1);
            scales = next;
            if (block + part + 1 < end) load_scales<MI>(next, weights, tile, groups, block + part + 1, lane);
            const uint4* shared = stages + stage * STAGE;
            uint4 q[MI][VECTORS], xf[NI][2];
            UNROLL for (int i = 0; i < MI; i++) UNROLL for (int v = 0; v < VECTORS; v++)
                q[i][v] = shared[X_VECTORS + ((wc * MI + i) * VECTORS + v) * 32 + lane];
            UNROLL for (int n = 0; n < NI; n++) UNROLL for (int h = 0; h < 2; h++)
                xf[n][h] = shared[((wt * NI + n) * 2 + h) * 32 + lane];
            multiply_block<MI, NI>(P, T, X, q, scales, xf, part);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        if (!split && block + BLOCKS_A_GROUP == slice_end) {
            UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) {
                F[i][n][e] = slice == 0 ? T[i][n][e] : __fadd_rn(F[i][n][e], T[i][n][e]);
                T[i][n][e] = 0.f;
            }
            slice++;
            slice_end = slice_begin(slice + 1, S, KB);
        }
    }

    if (split) {
        constexpr int VALUES = MI * NI * 4;
        const size_t plane = (size_t)gridDim.x * gridDim.y, place = blockIdx.y * gridDim.x + blockIdx.x;
        float* mine = partial + ((size_t)blockIdx.z * plane + place) * VALUES * THREADS + threadIdx.x;
        UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++)
            mine[((i * NI + n) * 4 + e) * THREADS] = T[i][n][e];
        __threadfence();
        __shared__ bool last;
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(arrived + place, 1u) == (u32)S - 1;
            if (last) arrived[place] = 0;  // for the next launch
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        for (int s = 0; s < S; s++) {
            const float* theirs = partial + ((size_t)s * plane + place) * VALUES * THREADS + threadIdx.x;
            UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) {
                const float t = __ldcg(theirs + ((i * NI + n) * 4 + e) * THREADS);
                F[i][n][e] = s == 0 ? t : __fadd_rn(F[i][n][e], t);
            }
        }
    }

    UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) {
        const int token = (token_tile0 + wt * NI + n) * 8 + (lane & 3) * 2 + (e & 1), row = (lane >> 2) + (e >> 1) * 8;
        if (GATED) {
            UNROLL for (int i = 0; i + 1 < MI; i += 2)
                store_gated(o, token, (tile0 + wc * MI + i) * 8 + row, F[i][n][e], F[i + 1][n][e]);
        } else {
            UNROLL for (int i = 0; i < MI; i++) store(o, token, (tile0 + wc * MI + i) * 16 + row, F[i][n][e]);
        }
    }
}

#define ARGUMENTS                                                                                                       \
    const uint4 *w, const Pair *scale, const Pair *minimum, const uint4 *x, const float *x_scale, const float *bias,       \
        float *out, int M, int N, int stride, int tiles, int KB, int accumulate, float *partial, u32 *arrived, int slices

#define FEW(name, NI, MI, S, WN, PF, GATED, OCC)                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * S * WN, OCC) name(ARGUMENTS) {                                       \
        few_tokens<NI, MI, S, WN, PF, GATED>({w, scale, minimum}, x, {out, x_scale, bias, M, N, stride, accumulate}, tiles, KB);   \
    }

#define MANY(name, WC, WT, MI, NI, STAGES, GATED, OCC)                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * WC * WT, OCC) name(ARGUMENTS) {                                      \
        many_tokens<WC, WT, MI, NI, STAGES, GATED>({w, scale, minimum}, x, {out, x_scale, bias, M, N, stride, accumulate}, tiles,  \
                                                   KB, slices, partial, arrived);                                          \
    }

// Names say tokens x channels; few_* also the slices that they are for. `launch.py` has the table that picks one.
FEW(few_8x32_s1, 1, 1, 1, 2, DEEP, false, 4)
FEW(few_8x32_s4, 1, 1, 4, 2, DEEP, false, 2)
FEW(few_8x16_s8, 1, 1, 8, 1, DEEP, false, 2)
FEW(few_8x64_s4, 1, 2, 4, 2, DEEP / 2, false, 2)
FEW(few_8x32_s8, 1, 2, 8, 1, DEEP / 2, false, 2)
FEW(few_8x64_s1, 1, 2, 1, 2, DEEP / 2, false, 4)
FEW(few_16x64_s1, 2, 2, 1, 2, DEEP / 2, false, 1)
FEW(few_16x64_s4, 2, 2, 4, 2, DEEP / 2, false, 1)
FEW(few_16x32_s8, 2, 2, 8, 1, DEEP / 2, false, 1)
FEW(gated_8x64_s1, 1, 2, 1, 2, DEEP / 2, true, 4)
FEW(gated_8x64_s4, 1, 2, 4, 2, DEEP / 2, true, 2)
FEW(gated_8x32_s8, 1, 2, 8, 1, DEEP / 2, true, 2)
FEW(gated_16x64_s1, 2, 2, 1, 2, DEEP / 2, true, 1)
FEW(gated_16x64_s4, 2, 2, 4, 2, DEEP / 2, true, 1)
FEW(gated_16x32_s8, 2, 2, 8, 1, DEEP / 2, true, 1)
MANY(many_16x64, 4, 1, 1, 2, 4, false, 2)
MANY(many_32x64, 4, 1, 1, 4, 4, false, 2)
MANY(many_32x128, 4, 1, 2, 4, 4, false, 2)
MANY(many_64x128, 4, 2, 2, 4, 4, false, 1)
MANY(gated_16x128, 4, 1, 2, 2, 4, true, 2)
MANY(gated_32x128, 4, 1, 2, 4, 4, true, 2)
MANY(gated_64x128, 4, 2, 2, 4, 4, true, 1)
