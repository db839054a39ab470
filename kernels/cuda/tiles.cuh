// Products of a tile of channels and a tile of tokens, for few tokens and for many, and where their results go. The contract and the
// layouts stand in linear.cu. Defines besides those: EXPERTS (experts.cu), GATED_BIAS and ACTIVATION of gated products; 0 if there are none.

#ifndef EXPERTS
#define EXPERTS 0
#endif
#ifndef GATED_BIAS
#define GATED_BIAS 0
#endif

struct Output {
    float* out;
    const float* x_scale;
    const float* bias;  // or null
    int M, N, stride;  // stride: columns of `out`
    int accumulate;
    u32* largest;  // gated: bits of each token's largest magnitude, zero before
#if GATED_BIAS
    const float* up_bias;  // `bias` is the gate's
#endif
#if EXPERTS
    // In shared memory, of each token of the tile: its row of `out` (-1 past the last), and where its activations start.
    const int* pairs;
    const u32* places;
    int pairs_a_row;  // rows of `out` that share one of x
    const int* expert;  // in shared memory; biases are those of all experts
#endif
};

#if EXPERTS
// A tile's tokens lie anywhere: `token` counts within the tile.
DEVICE bool is_past(const Output& o, int token) { return o.pairs[token] < 0; }
DEVICE int row_of(const Output& o, int token) { return o.pairs[token]; }
DEVICE int source_of(const Output& o, int token) { return o.pairs[token] / o.pairs_a_row; }
DEVICE size_t bias_of(const Output& o, int channels, int channel) { return (size_t)*o.expert * channels + channel; }
// Where a row's activations start, in vectors, and its sums, in floats, in the layouts of linear.cu.
DEVICE u32 place_of(int row, int KB) { return (u32)(row >> 3) * KB * 64 + (row & 7); }
DEVICE u32 sums_of(u32 place) { return (place >> 3) * 2 + (place & 7); }
#else
DEVICE bool is_past(const Output& o, int token) { return token >= o.M; }
DEVICE int row_of(const Output&, int token) { return token; }
DEVICE int source_of(const Output&, int token) { return token; }
DEVICE int bias_of(const Output&, int, int channel) { return channel; }
#endif

// `f` is the sum of the slices of one channel and token.
DEVICE void store(const Output& o, int token, int channel, float f) {
    if (is_past(o, token) || channel >= o.N) return;
    float y = __fmul_rn(f, o.x_scale[source_of(o, token)]);
    if (o.bias) y = __fadd_rn(y, o.bias[bias_of(o, o.N, channel)]);
    float* at = o.out + (size_t)row_of(o, token) * o.stride + channel;
    *at = o.accumulate ? __fadd_rn(*at, y) : y;
}

// Channels count the gated pair once. Returns the bits of the magnitude, whose order as integers is that of the magnitudes.
DEVICE u32 store_gated(const Output& o, int token, int channel, float gate, float up) {
    if (is_past(o, token) || channel >= o.N / 2) return 0;
    const float s = o.x_scale[source_of(o, token)];
#if GATED_BIAS
    const size_t own = bias_of(o, o.N / 2, channel);
    const float y = join(__fadd_rn(__fmul_rn(gate, s), o.bias[own]), __fadd_rn(__fmul_rn(up, s), o.up_bias[own]));
#elif ACTIVATION
    const float y = join(__fmul_rn(gate, s), __fmul_rn(up, s));
#else
    const float y = __fmul_rn(silu(__fmul_rn(gate, s)), __fmul_rn(up, s));
#endif
    o.out[(size_t)row_of(o, token) * o.stride + channel] = y;
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
    const int begin = slice_begin(slice, S, KB), blocks = slice_begin(slice + 1, S, KB) - begin, groups = KB * 64 / GROUP;
    const u32 tile_stride = KB * STEP, group_stride = groups * GROUP_STEP;
    // Pointers move by PF blocks a round, so that within it every address is a register and a constant.
    const uint4* w = weights.w + ((size_t)tile * KB + begin) * STEP + lane;
    const size_t first_scale = ((size_t)tile * groups + begin * 64 / GROUP) * GROUP_STEP + (lane >> 2);
    const Pair *scale = weights.scale + first_scale, *minimum = weights.minimum + first_scale;
#if EXPERTS
    const u32* xp[NI];
    const float* sp[NI][2];
    UNROLL for (int n = 0; n < NI; n++) {
        xp[n] = (const u32*)(x + (size_t)begin * 64 + o.places[n * 8 + (lane >> 2)]) + (lane & 3);
        UNROLL for (int h = 0; h < 2; h++) sp[n][h] = x_sums + (size_t)begin * 16 + sums_of(o.places[n * 8 + (lane & 3) * 2 + h]);
    }
#else
    const u32* xp = (const u32*)(x + (size_t)begin * 64) + lane;
    const float* sp = x_sums + (size_t)begin * 16 + (lane & 3) * 2;
#endif

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
#if EXPERTS
            const u32* at = xp[n] + (p + ahead) * 256 + h * 128;
#else
            const u32* at = xp + (size_t)n * KB * 256 + (p + ahead) * 256 + h * 128;
#endif
            xf[p & 1][h][n] = make_uint4(at[0], at[32], at[64], at[96]);
        }
    };
    let_next_start();
    UNROLL for (int p = 0; p < PF; p++) if (p < blocks) fetch(p, 0);
    after_previous();
    UNROLL for (int p = 0; p < 2; p++) if (p < blocks) fetch_x(p, 0);

    float P[MI][NI][4], T[MI][NI][4];
    GroupSum X[NI];
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) T[i][n][e] = 0.f;
    for (int left = blocks; left > 0; left -= PF) {
        UNROLL for (int p = 0; p < PF; p++) {
            if (p < left) {
                UNROLL for (int h = 0; h < 2; h++)
#if EXPERTS
                    multiply<MI, NI>(P, T, X, q[p], scales[p], xf[p & 1][h], SumsOfPairs<NI>{sp, p * 16 + h * 8}, h, p);
#else
                    multiply<MI, NI>(P, T, X, q[p], scales[p], xf[p & 1][h], SumsOfTokens{sp + p * 16 + h * 8, (size_t)KB * 16}, h, p);
#endif
                if (p + PF < left) fetch(p, PF);
                if (p + 2 < left) fetch_x(p, 2);
            }
        }
        w += PF * STEP;
        scale += PF * 64 / GROUP * GROUP_STEP;
        minimum += PF * 64 / GROUP * GROUP_STEP;
#if EXPERTS
        UNROLL for (int n = 0; n < NI; n++) {
            xp[n] += PF * 256;
            UNROLL for (int h = 0; h < 2; h++) sp[n][h] += PF * 16;
        }
#else
        xp += PF * 256;
        sp += PF * 16;
#endif
    }

    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++)
        sums[slice][n * 8 + (lane & 3) * 2 + (e & 1)][(column * MI + i) * 16 + (lane >> 2) + (e >> 1) * 8] = T[i][n][e];
    __syncthreads();
    auto sum = [&](int token, int channel) {
        float f = sums[0][token][channel];
        UNROLL for (int s = 1; s < S; s++) f = __fadd_rn(f, sums[s][token][channel]);
        return f;
    };
    const int count = min(o.M, NI * 8);
    const int first = blockIdx.x * CHANNELS;
    if (GATED) {
        const int total = count * (CHANNELS / 2);
        for (int id0 = 0; id0 < total; id0 += blockDim.x) {
            const int id = id0 + threadIdx.x, token = id / (CHANNELS / 2), pair = id % (CHANNELS / 2), c = (pair >> 4) * 32 + (pair & 15);
            u32 magnitude = id < total ? store_gated(o, token, first / 2 + pair, sum(token, c), sum(token, c + 16)) : 0;
            // 16 lanes have one token. A maximum is the same in any order.
            UNROLL for (int d = 8; d > 0; d >>= 1) magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, d));
            if (id < total && (lane & 15) == 0) atomicMax(o.largest + row_of(o, token), magnitude);
        }
    } else {
        for (int id = threadIdx.x; id < count * CHANNELS; id += blockDim.x)
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
    const int tile0 = blockIdx.x * TILES, token_tile0 = EXPERTS ? 0 : blockIdx.y * TOKEN_TILES, groups = KB * 64 / GROUP;
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
#if EXPERTS
                copy_async_16(to + id * 16, x + o.places[(id >> 6) * 8 + (id & 7)] + (id & 56) + block * 64);
#else
                copy_async_16(to + id * 16, x + ((size_t)(token_tile0 + (id >> 6)) * KB + block) * 64 + (id & 63));
#endif
        }
#if HAS_MIN && EXPERTS
        if (threadIdx.x < SUM_VECTORS * 4)
            copy_async_4(to + (X_VECTORS + W_VECTORS) * 16 + threadIdx.x * 4,
                         x_sums + sums_of(o.places[(threadIdx.x >> 4) * 8 + (threadIdx.x & 7)]) + (threadIdx.x & 8) + block * 16);
#elif HAS_MIN
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
                multiply<MI, NI>(P, T, X, q, scales, xf, SumsOfTokens{block_sums + h * 8, 16}, h, part);
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
#if EXPERTS
            if (lane < 4 && !is_past(o, first_token + h)) atomicMax(o.largest + row_of(o, first_token + h), magnitude[h]);
#else
            if (lane < 4 && first_token + h < o.M) atomicMax(o.largest + first_token + h, magnitude[h]);
#endif
        }
    }
}
