// Group-wise integer weights times half-precision activations: out[M, N] = x[M, K] w[N, K]^T, or silu(gate) * up of two.
//
// Contract (docs/numerics.md): for one output element
//   P = the mma chain from zero over one group's k16 steps, ascending, on exact half-precision integers q - CENTRE
//   T = fma(scale, P, T), then T = fma(minimum + CENTRE * scale, X, T) where X is the group's sum of activations, of the sums of
//       32 channels that come with them, ascending; groups ascending, one chain a slice of K
//   F = the slices' T added in ascending order, times the row's power-of-two scale, one rounding, then bias, then `out`.
// Slice s covers units [s * units / S, (s + 1) * units / S) of max(64, GROUP) channels; S depends on K alone. Everything else
// (tile, warps, which block computes which slice) is free, and changes no bit: an mma's element depends on its row of weights
// and its column of activations alone.
//
// Weights sit on the 16-row operand and tokens on the 8-column one, so a single token pads to 8 and not to 16. Built for sm_90a, the
// kernels for many tokens use wgmma, weights from registers: on an H200 it gives the bits of mma.sync (tests/gpu/test_products.py).
//
// Layouts, KB = K / 64:
//   w        [N / 16][KB][BITS / 4][32 lanes] x 16 bytes: A fragments in lane order. 4 bits: word j is k16 step j, its nibbles
//            (0,4)(1,5)(2,6)(3,7) are a0..a3. 8 bits: words 2j and 2j + 1 of the lane's two vectors are step j's (a0,a1), (a2,a3).
//   scale    [N / 16][K / GROUP][8][2]: channels r and r + 8 of the tile side by side; minimum likewise.
//   x        [tokens / 8][KB][8][8 tokens] x 16 bytes: tiles of 8 tokens by 8 channels, what ldmatrix and wgmma read.
//   x_sums   [tokens / 8][KB][2][8 tokens] float32: sums over 32 channels.
//   x_scale  [tokens]: powers of two; the true activation is x * x_scale.
//   gated    tiles alternate gate, up; N counts both, out has N / 2 columns. largest[token] gets the bits of the row's largest
//            magnitude, which prepare_gated (activation.cu) scales the row by.
// Defines: BITS 4 or 8; GROUP 16 (only HAS_MIN 0), 32, 64, 128; HAS_MIN 0 or 1; SCALE_F32 0 or 1.
// Limits: K a multiple of max(64, GROUP), N padded to 64 channels, x allocated to a multiple of 128 tokens.

static_assert(BITS == 4 || BITS == 8, "weights have 4 or 8 bits");
static_assert(GROUP == 16 && !HAS_MIN || GROUP == 32 || GROUP == 64 || GROUP == 128, "a group has 16 (without minimums), 32, 64 or 128 channels");

constexpr int CENTRE = BITS == 4 ? 8 : 128;
constexpr int GROUPS_A_BLOCK = GROUP < 64 ? 64 / GROUP : 1;
constexpr int BLOCKS_A_GROUP = GROUP > 64 ? GROUP / 64 : 1;
constexpr int STEPS_A_GROUP = GROUP < 64 ? GROUP / 16 : 4;  // k16 steps of a group within one block
constexpr int VECTORS = BITS / 4;
// Blocks of weights in flight a warp, for one tile of channels; fewer where integers or scales take many registers.
constexpr int DEEP = GROUP == 32 || BITS == 8 ? 4 : 8;

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

// The sums of activations of one group for the two tokens of a lane; `sums` is at the lane's tokens of the group's first 32 channels.
// A group of 64 or 128 adds those of 32, the block's second after its first.
struct GroupSum {
    float even, odd;
};

DEVICE void add_sums(GroupSum& into, const float* sums, bool starts) {
    const float2 v = *(const float2*)sums;
    into.even = starts ? v.x : __fadd_rn(into.even, v.x);
    into.odd = starts ? v.y : __fadd_rn(into.odd, v.y);
}

// T at the end of a group; `g` is its place in the block.
template <int MI, int NI>
DEVICE void fold(const float (&P)[MI][NI][4], float (&T)[MI][NI][4], const GroupSum (&X)[NI], const Scales<MI>& scales, int g) {
    UNROLL for (int i = 0; i < MI; i++) {
        const float s0 = pair_low(scales.scale[i][g]), s1 = pair_high(scales.scale[i][g]);
#if HAS_MIN
        const float m0 = __fmaf_rn((float)CENTRE, s0, pair_low(scales.minimum[i][g]));
        const float m1 = __fmaf_rn((float)CENTRE, s1, pair_high(scales.minimum[i][g]));
#endif
        UNROLL for (int n = 0; n < NI; n++) {
            T[i][n][0] = __fmaf_rn(s0, P[i][n][0], T[i][n][0]);
            T[i][n][1] = __fmaf_rn(s0, P[i][n][1], T[i][n][1]);
            T[i][n][2] = __fmaf_rn(s1, P[i][n][2], T[i][n][2]);
            T[i][n][3] = __fmaf_rn(s1, P[i][n][3], T[i][n][3]);
#if HAS_MIN
            T[i][n][0] = __fmaf_rn(m0, X[n].even, T[i][n][0]);
            T[i][n][1] = __fmaf_rn(m0, X[n].odd, T[i][n][1]);
            T[i][n][2] = __fmaf_rn(m1, X[n].even, T[i][n][2]);
            T[i][n][3] = __fmaf_rn(m1, X[n].odd, T[i][n][3]);
#endif
        }
    }
}

// Two k16 steps (half a block) of one warp: P chains, and T at the end of each group. x[n] are the B fragments of both steps,
// sums[n * SUM_STRIDE] the sums of this half for the lane's tokens.
template <int MI, int NI>
DEVICE void multiply(float (&P)[MI][NI][4], float (&T)[MI][NI][4], GroupSum (&X)[NI], const uint4 (*q)[VECTORS],
                     const Scales<MI>& scales, const uint4* x, const float* sums, size_t sum_stride, int half, int block) {
    UNROLL for (int step = half * 2; step < half * 2 + 2; step++) {
        const bool starts = GROUP <= 64 ? step % STEPS_A_GROUP == 0 : step == 0 && block % BLOCKS_A_GROUP == 0;
        const bool ends = GROUP <= 64 ? step % STEPS_A_GROUP == STEPS_A_GROUP - 1
                                      : step == 3 && block % BLOCKS_A_GROUP == BLOCKS_A_GROUP - 1;
        u32 a[MI][4];
        UNROLL for (int i = 0; i < MI; i++) dequantize(q[i], step, a[i]);
        UNROLL for (int n = 0; n < NI; n++) {
            const u32 b0 = step & 1 ? x[n].z : x[n].x, b1 = step & 1 ? x[n].w : x[n].y;
            UNROLL for (int i = 0; i < MI; i++) {
                if (starts) mma_16x8x16_from_zero(P[i][n], a[i], b0, b1);
                else mma_16x8x16(P[i][n], a[i], b0, b1);
            }
        }
#if HAS_MIN
        if (step % 2 == 0) UNROLL for (int n = 0; n < NI; n++) add_sums(X[n], sums + n * sum_stride, starts);
#endif
        if (ends) fold<MI, NI>(P, T, X, scales, GROUPS_A_BLOCK > 1 ? step / STEPS_A_GROUP : 0);
    }
}

#if WARPGROUPS
// The same for a whole block by warpgroups: a are the block's fragments of weights, x is the shared address of the tokens' tiles, sums
// at the lane's tokens of the block. `meanwhile` runs beside the tensor cores.
template <int MI, int NI, typename Meanwhile>
DEVICE void multiply_block(float (&P)[MI][NI][4], float (&T)[MI][NI][4], GroupSum (&X)[NI], const u32 (&a)[4][MI][4],
                           const Scales<MI>& scales, u32 x, const float* sums, int part, Meanwhile meanwhile) {
    const u64 tiles = b_tiles(x, 1024);
    UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
        const bool starts = part % BLOCKS_A_GROUP == 0, ends = part % BLOCKS_A_GROUP == BLOCKS_A_GROUP - 1;
        UNROLL for (int i = 0; i < MI; i++) hold<NI>(P[i]);
        warpgroup_begin();
        UNROLL for (int s = 0; s < STEPS_A_GROUP; s++) UNROLL for (int i = 0; i < MI; i++) {
            const int step = g * STEPS_A_GROUP + s;
            warpgroup_mma<NI>(P[i], a[step][i], tiles + step * (256 >> 4), !(starts && s == 0));
        }
        warpgroup_commit();
#if HAS_MIN
        UNROLL for (int h = 0; h < (STEPS_A_GROUP + 1) / 2; h++) UNROLL for (int n = 0; n < NI; n++)
            add_sums(X[n], sums + n * 16 + (g * STEPS_A_GROUP / 2 + h) * 8, starts && h == 0);
#endif
        if (g == 0) meanwhile();
        warpgroup_wait<0>();
        UNROLL for (int i = 0; i < MI; i++) hold<NI>(P[i]);
        if (ends) fold<MI, NI>(P, T, X, scales, g);
    }
}
#endif

struct Output {
    float* out;
    const float* x_scale;
    const float* bias;  // or null
    int M, N, stride;  // stride: columns of `out`
    int accumulate;
    u32* largest;  // gated: bits of each token's largest magnitude, zero before
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

// Channels count the gated pair once. Returns the bits of the magnitude, whose order as integers is that of the magnitudes.
DEVICE u32 store_gated(const Output& o, int token, int channel, float gate, float up) {
    if (token >= o.M || channel >= o.N / 2) return 0;
    const float s = o.x_scale[token], y = __fmul_rn(silu(__fmul_rn(gate, s)), __fmul_rn(up, s));
    o.out[(size_t)token * o.stride + channel] = y;
    return __float_as_uint(y) & 0x7fffffffu;
}

DEVICE int slice_begin(int slice, int slices, int blocks) {
    const int units = blocks / BLOCKS_A_GROUP;
    return (int)((long long)slice * units / slices) * BLOCKS_A_GROUP;
}

// -- few tokens: weights and activations straight from memory to registers, one warp a slice ------------------------------
//
// grid (tiles / (MI * WN)); 32 * S * WN threads. PF blocks of weights are in flight a warp, and two of activations, which are near.
// A lane whose token does not exist reads nothing, so activations cost M * 128 bytes a block.
template <int NI, int MI, int S, int WN, int PF, bool GATED>
DEVICE void few_tokens(const Weights& weights, const uint4* x, const float* x_sums, const Output& o, int tiles, int KB) {
    static_assert(PF % BLOCKS_A_GROUP == 0 && PF % 2 == 0, "a slot of the ring must know its place in a group");
    constexpr int CHANNELS = WN * MI * 16, STEP = VECTORS * 32, GROUP_STEP = 8;
    __shared__ float sums[S][NI * 8][CHANNELS + 1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slice = warp % S, column = warp / S;
    // A warp past the end repeats the last tiles; what it computes has no channel to be stored in.
    const int tile = min(blockIdx.x * WN * MI + column * MI, (u32)(tiles - MI));
    const int begin = slice_begin(slice, S, KB), count = slice_begin(slice + 1, S, KB) - begin, groups = KB * 64 / GROUP;
    const u32 tile_stride = KB * STEP, group_stride = groups * GROUP_STEP;
    // Pointers move by PF blocks a round, so that within it every address is a register and a constant.
    const uint4* w = weights.w + ((size_t)tile * KB + begin) * STEP + lane;
    const size_t first_scale = ((size_t)tile * groups + begin * 64 / GROUP) * GROUP_STEP + (lane >> 2);
    const Pair *scale = weights.scale + first_scale, *minimum = weights.minimum + first_scale;
    const u32* xp = (const u32*)(x + (size_t)begin * 64) + lane;
    const float* sp = x_sums + (size_t)begin * 16 + (lane & 3) * 2;

    uint4 q[PF][MI][VECTORS], xf[2][2][NI];
    Scales<MI> scales[PF];
    auto fetch = [&](int p, int ahead) {
        UNROLL for (int i = 0; i < MI; i++) {
            UNROLL for (int v = 0; v < VECTORS; v++) q[p][i][v] = load_streaming(w + i * tile_stride + (p + ahead) * STEP + v * 32);
            UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
                // Of a group of several blocks, the last block's slot has the scales.
                if (p % BLOCKS_A_GROUP != BLOCKS_A_GROUP - 1) continue;
                const int at = ((p + ahead) / BLOCKS_A_GROUP * GROUPS_A_BLOCK + g) * GROUP_STEP;
                scales[p].scale[i][g] = scale[i * group_stride + at];
#if HAS_MIN
                scales[p].minimum[i][g] = minimum[i * group_stride + at];
#endif
            }
        }
    };
    auto fetch_x = [&](int p, int ahead) {
        UNROLL for (int n = 0; n < NI; n++) UNROLL for (int h = 0; h < 2; h++) {
            xf[p & 1][h][n] = make_uint4(0, 0, 0, 0);
            if (n * 8 + (lane >> 2) >= o.M) continue;
            const u32* at = xp + (size_t)n * KB * 256 + (p + ahead) * 256 + h * 128;
            xf[p & 1][h][n] = make_uint4(at[0], at[32], at[64], at[96]);
        }
    };
    let_next_start();
    UNROLL for (int p = 0; p < PF; p++) if (p < count) fetch(p, 0);
    after_previous();
    UNROLL for (int p = 0; p < 2; p++) if (p < count) fetch_x(p, 0);

    float P[MI][NI][4], T[MI][NI][4];
    GroupSum X[NI];
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) T[i][n][e] = 0.f;
    for (int left = count; left > 0; left -= PF) {
        UNROLL for (int p = 0; p < PF; p++) {
            if (p < left) {
                UNROLL for (int h = 0; h < 2; h++)
                    multiply<MI, NI>(P, T, X, q[p], scales[p], xf[p & 1][h], sp + p * 16 + h * 8, (size_t)KB * 16, h, p);
                if (p + PF < left) fetch(p, PF);
                if (p + 2 < left) fetch_x(p, 2);
            }
        }
        w += PF * STEP;
        scale += PF * 64 / GROUP * GROUP_STEP;
        minimum += PF * 64 / GROUP * GROUP_STEP;
        xp += PF * 256;
        sp += PF * 16;
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
        const int total = tokens * (CHANNELS / 2);
        for (int id0 = 0; id0 < total; id0 += blockDim.x) {
            const int id = id0 + threadIdx.x, token = id / (CHANNELS / 2), pair = id % (CHANNELS / 2), c = (pair >> 4) * 32 + (pair & 15);
            u32 magnitude = id < total ? store_gated(o, token, first / 2 + pair, sum(token, c), sum(token, c + 16)) : 0;
            // 16 lanes have one token. A maximum is the same in any order.
            UNROLL for (int d = 8; d > 0; d >>= 1) magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, d));
            if (id < total && (lane & 15) == 0) atomicMax(o.largest + token, magnitude);
        }
    } else {
        for (int id = threadIdx.x; id < tokens * CHANNELS; id += blockDim.x)
            store(o, id / CHANNELS, first + id % CHANNELS, sum(id / CHANNELS, id % CHANNELS));
    }
}

// -- many tokens: both operands through shared memory -----------------------------------------------------------------------
//
// A warp's tile is 32 channels by NI * 8 tokens; a block's WC * 32 channels by WT * NI * 8 tokens.
// grid (ceil(tiles / (WC * 2)), ceil(tokens / (WT * NI * 8)), Z), Z a divisor of the slices; 32 * WC * WT threads; STAGES blocks of K in
// flight. Block z walks slices [z * S / Z, (z + 1) * S / Z).
// SPLIT: each slice's T goes to `partial` [S][x and y blocks][values][threads], and the last of the Z blocks to arrive adds them in
// slice order. Otherwise Z is 1 and the sum F waits in shared memory between slices.
template <int WC, int WT, int NI, int STAGES, bool SPLIT, bool GATED>
DEVICE void many_tokens(const Weights& weights, const uint4* x, const float* x_sums, const Output& o, int tiles, int KB, int S,
                        float* partial, u32* arrived) {
    constexpr int MI = 2, THREADS = 32 * WC * WT, TILES = WC * MI, TOKEN_TILES = WT * NI, VALUES = MI * NI * 4;
    constexpr int X_VECTORS = TOKEN_TILES * 64, W_VECTORS = TILES * VECTORS * 32;
    constexpr int SUM_VECTORS = TOKEN_TILES * 4, STAGE = X_VECTORS + W_VECTORS + SUM_VECTORS;
    extern __shared__ uint4 stages[];
    float* sums = (float*)(stages + STAGES * STAGE) + threadIdx.x;  // [VALUES][THREADS], not SPLIT only
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wc = warp % WC, wt = warp / WC;
    const int tile0 = blockIdx.x * TILES, token_tile0 = blockIdx.y * TOKEN_TILES, groups = KB * 64 / GROUP;
    const int tile = min(tile0 + wc * MI, tiles - MI);
    const int first_slice = SPLIT ? blockIdx.z * S / gridDim.z : 0, end_slice = SPLIT ? (blockIdx.z + 1) * S / gridDim.z : S;
    const int begin = slice_begin(first_slice, S, KB), end = slice_begin(end_slice, S, KB);
    const size_t plane = (size_t)gridDim.x * gridDim.y, place = blockIdx.y * gridDim.x + blockIdx.x;

    auto load_w = [&](int stage, int block) {
        if (block >= end) return;
        const u32 to = shared_address(stages + stage * STAGE + X_VECTORS);
        UNROLL for (int i = 0; i < (W_VECTORS + THREADS - 1) / THREADS; i++) {
            const int id = threadIdx.x + i * THREADS;
            const int t = min(tile0 + id / (VECTORS * 32), tiles - 1);
            if (W_VECTORS % THREADS == 0 || id < W_VECTORS)
                copy_async_16(to + id * 16, weights.w + ((size_t)t * KB + block) * VECTORS * 32 + id % (VECTORS * 32));
        }
    };
    auto load_x = [&](int stage, int block) {
        if (block >= end) return;
        const u32 to = shared_address(stages + stage * STAGE);
        UNROLL for (int i = 0; i < (X_VECTORS + THREADS - 1) / THREADS; i++) {
            const int id = threadIdx.x + i * THREADS;
            if (X_VECTORS % THREADS == 0 || id < X_VECTORS)
                copy_async_16(to + id * 16, x + ((size_t)(token_tile0 + (id >> 6)) * KB + block) * 64 + (id & 63));
        }
#if HAS_MIN
        if (threadIdx.x < SUM_VECTORS)
            copy_async_16(to + (X_VECTORS + W_VECTORS + threadIdx.x) * 16,
                          x_sums + ((size_t)(token_tile0 + (threadIdx.x >> 2)) * KB + block) * 16 + (threadIdx.x & 3) * 4);
#endif
    };
    Scales<MI> scales, next;
    let_next_start();
    UNROLL for (int s = 0; s < STAGES - 1; s++) load_w(s, begin + s);
    if (begin < end) load_scales<MI>(next, weights, tile, groups, begin, lane);
    after_previous();
    // The first group of copies holds the weights of all these stages.
    UNROLL for (int s = 0; s < STAGES - 1; s++) {
        load_x(s, begin + s);
        copy_commit();
    }

    float P[MI][NI][4], T[MI][NI][4];
    GroupSum X[NI];
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) T[i][n][e] = 0.f;
    int stage = 0, slice = first_slice, slice_end = slice_begin(first_slice + 1, S, KB);
#if WARPGROUPS
    // Fragments of the next block are made while the tensor cores work on this one's. Not for groups within a block, where
    // the compiler finds no second set of registers and makes the tensor cores wait for each other, nor where there are none left.
    constexpr bool AHEAD = GROUP == 128 && BITS == 4 && !HAS_MIN;
    u32 a[4][MI][4], a_next[4][MI][4];
    auto make = [&](const uint4* shared, u32 (&into)[4][MI][4]) {
        uint4 q[MI][VECTORS];
        UNROLL for (int i = 0; i < MI; i++) UNROLL for (int v = 0; v < VECTORS; v++)
            q[i][v] = shared[X_VECTORS + ((wc * MI + i) * VECTORS + v) * 32 + lane];
        UNROLL for (int step = 0; step < 4; step++) UNROLL for (int i = 0; i < MI; i++) dequantize(q[i], step, into[step][i]);
    };
    copy_wait<STAGES - 2>();
    publish_to_tensor_cores();
    __syncthreads();
    if (begin < end) make(stages, a);
#endif
    for (int block = begin; block < end; block += BLOCKS_A_GROUP) {
#if HAS_MIN  // else registers are short
        _Pragma("unroll 1")
#else
        UNROLL
#endif
        for (int part = 0; part < BLOCKS_A_GROUP; part++) {
            const int freed = stage == 0 ? STAGES - 1 : stage - 1, after = stage + 1 == STAGES ? 0 : stage + 1;
            const uint4* shared = stages + stage * STAGE;
            const float* block_sums = (const float*)(shared + X_VECTORS + W_VECTORS) + wt * NI * 16 + (lane & 3) * 2;
            auto load = [&] {
                load_x(freed, block + part + STAGES - 1);
                load_w(freed, block + part + STAGES - 1);
                copy_commit();
            };
            if (part == 0) scales = next;
#if WARPGROUPS
            multiply_block<MI, NI>(P, T, X, a, scales, shared_address(shared + wt * NI * 64), block_sums, part, [&] {
                copy_wait<STAGES - 3>();
                publish_to_tensor_cores();
                __syncthreads();
                load();
                if (AHEAD) make(stages + after * STAGE, a_next);
            });
            if (!AHEAD) make(stages + after * STAGE, a);
            else UNROLL for (int step = 0; step < 4; step++) UNROLL for (int i = 0; i < MI; i++) UNROLL for (int j = 0; j < 4; j++)
                a[step][i][j] = a_next[step][i][j];
#else
            copy_wait<STAGES - 2>();
            __syncthreads();
            load();
            uint4 q[MI][VECTORS];
            UNROLL for (int i = 0; i < MI; i++) UNROLL for (int v = 0; v < VECTORS; v++)
                q[i][v] = shared[X_VECTORS + ((wc * MI + i) * VECTORS + v) * 32 + lane];
            UNROLL for (int h = 0; h < 2; h++) {
                uint4 xf[NI];
                UNROLL for (int n = 0; n < NI; n++) {
                    u32 b[4];
                    load_matrix_4(b, shared_address(shared + (wt * NI + n) * 64 + h * 32 + lane));
                    xf[n] = make_uint4(b[0], b[1], b[2], b[3]);
                }
                multiply<MI, NI>(P, T, X, q, scales, xf, block_sums + h * 8, 16, h, part);
            }
#endif
            if (part == BLOCKS_A_GROUP - 1 && block + part + 1 < end)
                load_scales<MI>(next, weights, tile, groups, block + part + 1, lane);
            stage = after;
        }
        if (block + BLOCKS_A_GROUP == slice_end) {
            float* mine = partial + ((size_t)slice * plane + place) * VALUES * THREADS + threadIdx.x;
            UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) {
                const int value = ((i * NI + n) * 4 + e) * THREADS;
                if (SPLIT) {
                    mine[value] = T[i][n][e];
                    T[i][n][e] = 0.f;
                } else if (slice + 1 < S) {
                    sums[value] = slice == 0 ? T[i][n][e] : __fadd_rn(sums[value], T[i][n][e]);
                    T[i][n][e] = 0.f;
                } else if (slice > 0) {
                    T[i][n][e] = __fadd_rn(sums[value], T[i][n][e]);
                }
            }
            slice++;
            slice_end = slice_begin(slice + 1, S, KB);
        }
    }

    if (SPLIT) {
        __threadfence();
        __shared__ bool last;
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(arrived + place, 1u) == gridDim.z - 1;
            if (last) arrived[place] = 0;  // for the next launch
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        for (int s = 0; s < S; s++) {
            const float* theirs = partial + ((size_t)s * plane + place) * VALUES * THREADS + threadIdx.x;
            UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) {
                const float t = __ldcg(theirs + ((i * NI + n) * 4 + e) * THREADS);
                T[i][n][e] = s == 0 ? t : __fadd_rn(T[i][n][e], t);
            }
        }
    }

    UNROLL for (int n = 0; n < NI; n++) {
        const int first_token = (token_tile0 + wt * NI + n) * 8 + (lane & 3) * 2;
        u32 magnitude[2] = {0, 0};
        UNROLL for (int e = 0; e < 4; e++) {
            const int token = first_token + (e & 1), row = (lane >> 2) + (e >> 1) * 8;
            if (GATED) {
                magnitude[e & 1] =
                    max(magnitude[e & 1], store_gated(o, token, (tile0 + wc * MI) * 8 + row, T[0][n][e], T[1][n][e]));
            } else {
                UNROLL for (int i = 0; i < MI; i++) store(o, token, (tile0 + wc * MI + i) * 16 + row, T[i][n][e]);
            }
        }
        if (GATED) UNROLL for (int h = 0; h < 2; h++) {
            UNROLL for (int d = 4; d < 32; d <<= 1) magnitude[h] = max(magnitude[h], __shfl_xor_sync(~0u, magnitude[h], d));
            if (lane < 4 && first_token + h < o.M) atomicMax(o.largest + first_token + h, magnitude[h]);
        }
    }
}

#define ARGUMENTS                                                                                                       \
    const uint4 *w, const Pair *scale, const Pair *minimum, const uint4 *x, const float *x_sums, const float *x_scale, const float *bias,       \
        float *out, int M, int N, int stride, int tiles, int KB, int accumulate, float *partial, u32 *arrived, int slices,  \
        u32 *largest

#define FEW(name, NI, MI, S, WN, PF, GATED, OCC)                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * S * WN, OCC) name(ARGUMENTS) {                                       \
        few_tokens<NI, MI, S, WN, PF, GATED>({w, scale, minimum}, x, x_sums, {out, x_scale, bias, M, N, stride, accumulate, largest}, tiles, KB);   \
    }

#define MANY(name, WC, WT, NI, STAGES, SPLIT, GATED, OCC)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WC * WT, OCC) name(ARGUMENTS) {                                      \
        many_tokens<WC, WT, NI, STAGES, SPLIT, GATED>({w, scale, minimum}, x, x_sums, {out, x_scale, bias, M, N, stride, accumulate, largest}, \
                                                      tiles, KB, slices, partial, arrived);                                \
    }

// Names say tokens x channels; few_* also the slices that they are for. `tables.py` picks one.
// Light ones have less in flight a warp and more warps: for many channels.
constexpr int LIGHT = GROUP == 128 && BITS == 4 && !HAS_MIN && !SCALE_F32 ? 3 : 2;
#define FEW_OF(kind, GATED)                          \
    FEW(kind##_8x64_s1, 1, 2, 1, 2, DEEP / 2, GATED, 4)  \
    FEW(kind##_8x64_s4, 1, 2, 4, 2, DEEP / 2, GATED, 2)  \
    FEW(kind##_8x32_s8, 1, 2, 8, 1, DEEP / 2, GATED, 2)  \
    FEW(kind##_8x32_s8_light, 1, 2, 8, 1, 2, GATED, LIGHT) \
    FEW(kind##_16x64_s1, 2, 2, 1, 2, DEEP / 2, GATED, 2) \
    FEW(kind##_16x64_s4, 2, 2, 4, 2, DEEP / 2, GATED, 1) \
    FEW(kind##_16x32_s8, 2, 2, 8, 1, DEEP / 2, GATED, 1)
FEW_OF(few, false)
FEW_OF(gated_few, true)
FEW(few_8x32_s4, 1, 1, 4, 2, DEEP, false, 2)
FEW(few_8x16_s8, 1, 1, 8, 1, DEEP, false, 2)

#define MANY_OF(kind, SPLIT, GATED)                 \
    MANY(kind##_16x128, 4, 1, 2, 4, SPLIT, GATED, 3) \
    MANY(kind##_32x128, 4, 1, 4, 4, SPLIT, GATED, 2)
MANY_OF(split, true, false)
MANY_OF(whole, false, false)
MANY_OF(gated_split, true, true)
MANY_OF(gated_whole, false, true)
// Scales of groups of 16 take too many registers for this tile; so do 8 bits in groups of 32 on Blackwell.
#if GROUP > 16 && !(BITS == 8 && GROUP == 32 && __CUDA_ARCH__ >= 1000)
MANY(split_64x128, 4, 1, 8, 4, true, false, 2)
MANY(whole_64x128, 4, 1, 8, 4, false, false, 2)
MANY(gated_split_64x128, 4, 1, 8, 4, true, true, 2)
MANY(gated_whole_64x128, 4, 1, 8, 4, false, true, 2)
#if WARPGROUPS && BITS == 4  // takes more shared memory than other cards have
MANY(split_64x256, 8, 1, 8, 5, true, false, 1)
MANY(whole_64x256, 8, 1, 8, 5, false, false, 1)
MANY(gated_split_64x256, 8, 1, 8, 5, true, true, 1)
MANY(gated_whole_64x256, 8, 1, 8, 5, false, true, 1)
#endif
#endif
