// Products of many tokens: both operands through shared memory. Contract and layouts: linear.cu.
//
// A warp's tile is 32 channels by NI * 8 tokens; a block's WC * 32 channels by WT * NI * 8 tokens.
// grid (ceil(tiles / (WC * 2)), ceil(tokens / (WT * NI * 8)), Z), Z a divisor of the slices; 32 * WC * WT threads; STAGES blocks of K in
// flight. Block z walks slices [z * S / Z, (z + 1) * S / Z).
// SPLIT: the slices of a tile are those of Z blocks, and are added up in slice order when all are there. From sm_90 on these blocks are a
// cluster: each keeps its T in shared memory (one or two slices a block; the last where the stages were), and adds up its share of the
// tile's tokens from all of them. Elsewhere each T goes to `partial` [S][x and y blocks][values][threads], and the last block to arrive adds.
// Otherwise Z is 1 and the sum F waits in shared memory between slices.

// Blocks of K that a tile of many tokens has in shared memory: on an H200 more are worth their room, which other cards do not have.
#if WARPGROUPS
constexpr int STAGES = BITS == 4 ? 6 : 4;
#else
constexpr int STAGES = BITS == 8 && (HAS_MIN || GROUPS_A_BLOCK * sizeof(Pair) > 8) ? 3 : 4;
#endif

#if __CUDA_ARCH__ >= 900
#define CLUSTERS 1
#else
#define CLUSTERS 0
#endif

template <int WC, int WT, int NI, bool SPLIT, bool GATED>
DEVICE void many_tokens(const Weights& weights, const uint4* x, const float* x_sums, const Output& o, int tiles, int KB, int S,
                        float* partial, u32* arrived) {
    constexpr int MI = 2, THREADS = 32 * WC * WT, TILES = WC * MI, TOKEN_TILES = WT * NI, FOURS = MI * NI;
    constexpr int X_VECTORS = TOKEN_TILES * 64, W_VECTORS = TILES * VECTORS * 32;
    constexpr int SUM_VECTORS = HAS_MIN ? TOKEN_TILES * 4 : 0, SCALE_VECTORS = TILES * SCALES_A_TILE, MINIMUMS = HAS_MIN ? SCALE_VECTORS : 0;
    // A stage: activations, weights, sums of activations, scales and minimums of the groups that end in its block.
    constexpr int SUMS = X_VECTORS + W_VECTORS, SCALES = SUMS + SUM_VECTORS, STAGE = SCALES + SCALE_VECTORS + MINIMUMS;
    static_assert(SCALE_VECTORS + MINIMUMS <= THREADS, "a vector a thread");
    extern __shared__ uint4 stages[];
    float4* sums = (float4*)(stages + STAGES * STAGE) + threadIdx.x;  // [MI][NI][THREADS]
    float4* last_sums = (float4*)stages + threadIdx.x;                // the same, of a cluster's last slice a block
    static_assert(STAGES * STAGE >= FOURS * THREADS, "the last sums take the place of the stages");
#if WARPGROUPS
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0);  // the compiler then knows it to be one number
#else
    const int warp = threadIdx.x >> 5;
#endif
    const int lane = threadIdx.x & 31, wc = warp % WC, wt = WT == 1 ? 0 : warp / WC;
    const int tile0 = blockIdx.x * TILES, token_tile0 = EXPERTS ? 0 : blockIdx.y * TOKEN_TILES;
    const int first_slice = SPLIT ? blockIdx.z * S / gridDim.z : 0, end_slice = SPLIT ? (blockIdx.z + 1) * S / gridDim.z : S;
    const int begin = slice_begin(first_slice, S, KB), end = slice_begin(end_slice, S, KB);
    const size_t plane = (size_t)gridDim.x * gridDim.y, place = blockIdx.y * gridDim.x + blockIdx.x;

    // Where this thread's vectors of block 0 lie, in vectors: 32 bits reach 64 GB.
    constexpr int W_COPIES = (W_VECTORS + THREADS - 1) / THREADS, X_COPIES = (X_VECTORS + THREADS - 1) / THREADS;
    auto w_of = [&](int i) {
        const int id = threadIdx.x + i * THREADS;
        return (u32)min(tile0 + id / (VECTORS * 32), tiles - 1) * KB * (VECTORS * 32) + id % (VECTORS * 32);
    };
    auto x_of = [&](int i) {
        const int id = threadIdx.x + i * THREADS;
#if EXPERTS
        return X_VECTORS % THREADS == 0 || id < X_VECTORS ? o.places[(id >> 6) * 8 + (id & 7)] + (id & 56) : 0;
#else
        return (u32)(token_tile0 + (id >> 6)) * KB * 64 + (id & 63);
#endif
    };
    auto scale_of_block_0 = [&] {
        const bool is_minimum = HAS_MIN && threadIdx.x >= SCALE_VECTORS;
        const u32 id = threadIdx.x - (is_minimum ? SCALE_VECTORS : 0), at = min(tile0 + (int)(id / SCALES_A_TILE), tiles - 1);
        return (const uint4*)(is_minimum ? weights.minimum : weights.scale) + at * (KB / BLOCKS_A_GROUP) * SCALES_A_TILE + id % SCALES_A_TILE;
    };
#if WARPGROUPS  // elsewhere registers are short
    u32 w_at[W_COPIES], x_at[X_COPIES];
    UNROLL for (int i = 0; i < W_COPIES; i++) w_at[i] = w_of(i);
    UNROLL for (int i = 0; i < X_COPIES; i++) x_at[i] = x_of(i);
    const uint4* scale_at = scale_of_block_0();
    auto scale_from = [&] { return scale_at; };
    auto w_from = [&](int i) { return w_at[i]; };
    auto x_from = [&](int i) { return x_at[i]; };
#else
    auto scale_from = scale_of_block_0;
    auto w_from = w_of;
    auto x_from = x_of;
#endif
    auto load_w = [&](int stage, int block) {
        if (block >= end) return;
        const u32 to = shared_address(stages + stage * STAGE + X_VECTORS) + threadIdx.x * 16;
        UNROLL for (int i = 0; i < W_COPIES; i++)
            if (W_VECTORS % THREADS == 0 || threadIdx.x + i * THREADS < W_VECTORS)
                copy_async_16(to + i * THREADS * 16, weights.w + (w_from(i) + (u32)block * (VECTORS * 32)));
        if (block % BLOCKS_A_GROUP == BLOCKS_A_GROUP - 1 && threadIdx.x < SCALE_VECTORS + MINIMUMS)
            copy_async_16(to + (SCALES - X_VECTORS) * 16, scale_from() + (u32)(block / BLOCKS_A_GROUP) * SCALES_A_TILE);
    };
    auto load_x = [&](int stage, int block) {
        if (block >= end) return;
        const u32 to = shared_address(stages + stage * STAGE);
        UNROLL for (int i = 0; i < X_COPIES; i++)
            if (X_VECTORS % THREADS == 0 || threadIdx.x + i * THREADS < X_VECTORS)
                copy_async_16(to + (threadIdx.x + i * THREADS) * 16, x + (x_from(i) + (u32)block * 64));
#if HAS_MIN && EXPERTS
        if (threadIdx.x < SUM_VECTORS * 4)
            copy_async_4(to + SUMS * 16 + threadIdx.x * 4,
                         x_sums + sums_of(o.places[(threadIdx.x >> 4) * 8 + (threadIdx.x & 7)]) + (threadIdx.x & 8) + block * 16);
#elif HAS_MIN
        if (threadIdx.x < SUM_VECTORS)
            copy_async_16(to + (SUMS + threadIdx.x) * 16,
                          x_sums + ((size_t)(token_tile0 + (threadIdx.x >> 2)) * KB + block) * 16 + (threadIdx.x & 3) * 4);
#endif
    };
    // Of a stage whose block ends groups, for the warp's channels.
    Scales<MI> scales;
    auto take_scales = [&](const uint4* shared, int g) {
        UNROLL for (int i = 0; i < MI; i++) {
            const Pair* at = (const Pair*)(shared + SCALES) + ((wc * MI + i) * GROUPS_A_BLOCK + g) * 8 + (lane >> 2);
            scales.scale[i][g] = *at;
#if HAS_MIN
            scales.minimum[i][g] = at[SCALE_VECTORS * 16 / sizeof(Pair)];
#endif
        }
    };
    let_next_start();
    UNROLL for (int s = 0; s < STAGES - 1; s++) load_w(s, begin + s);
    after_previous();
    // The first group of copies holds the weights of all these stages.
    UNROLL for (int s = 0; s < STAGES - 1; s++) {
        load_x(s, begin + s);
        copy_commit();
    }

    float P[MI][NI][4], T[MI][NI][4];
    GroupSum X[NI];
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) T[i][n][e] = 0.f;
#if WARPGROUPS
    // While the tensor cores work on one tile of channels, the warp folds and makes fragments of the other.
    static_assert(MI == 2, "one tile of channels at work, the other made ready");
    u32 a[MI][4][4];
    uint4 q[MI][VECTORS];
    auto take_integers = [&](const uint4* shared, int i) {
        UNROLL for (int v = 0; v < VECTORS; v++) q[i][v] = shared[X_VECTORS + ((wc * MI + i) * VECTORS + v) * 32 + lane];
    };
    auto make = [&](int i) {
        UNROLL for (int step = 0; step < 4; step++) dequantize(q[i], step, a[i][step]);
    };
    // Integers are read long before they are needed where there are registers for them.
    constexpr bool EARLY = BITS == 4;
    // What is folded before there is anything: zeros.
    auto clear = [&] {
        UNROLL for (int n = 0; n < NI; n++) {
            UNROLL for (int e = 0; e < 4; e++) P[1][n][e] = 0.f;
            X[n] = {0.f, 0.f};
        }
        scales = {};  // one that is not finite would make a NaN of them
    };
    clear();
    copy_wait<STAGES - 2>();
    publish_to_tensor_cores();
    __syncthreads();
    if (begin < end) {
        UNROLL for (int i = 0; i < MI; i++) take_integers(stages, i);
        make(0);
    }
#endif
    int stage = 0;
    for (int slice = first_slice; slice < end_slice; slice++) {
        const int slice_end = slice_begin(slice + 1, S, KB);
        for (int block = slice_begin(slice, S, KB); block < slice_end; block += BLOCKS_A_GROUP) {
#if HAS_MIN && !WARPGROUPS  // registers are short
            _Pragma("unroll 1")
#else
            UNROLL
#endif
            for (int part = 0; part < BLOCKS_A_GROUP; part++) {
                const int freed = stage == 0 ? STAGES - 1 : stage - 1, after = stage + 1 == STAGES ? 0 : stage + 1;
                const uint4* shared = stages + stage * STAGE;
                const float* block_sums = (const float*)(shared + SUMS) + wt * NI * 16 + (lane & 3) * 2;
                auto load = [&] {
                    load_x(freed, block + part + STAGES - 1);
                    load_w(freed, block + part + STAGES - 1);
                    copy_commit();
                };
#if WARPGROUPS
                const u32 tokens = b_tiles(shared_address(shared + wt * NI * 64));
                const bool starts = part == 0, ends = part == BLOCKS_A_GROUP - 1;
                UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
                    multiply_group<NI>(P[0], a[0], tokens, g, starts);
                    finish<NI>(P[1]);
                    // The group before: of this block, or the last of the block before.
                    if (GROUPS_A_BLOCK > 1 || starts) fold<NI>(P[1], T[1], X, scales, 1, g == 0 ? GROUPS_A_BLOCK - 1 : g - 1);
                    if (g == 0) {
                        if (ends) UNROLL for (int j = 0; j < GROUPS_A_BLOCK; j++) take_scales(shared, j);
                        if (!EARLY) take_integers(shared, 1);
                        make(1);
                    }
#if HAS_MIN
                    UNROLL for (int h = 0; h < (STEPS_A_GROUP + 1) / 2; h++) UNROLL for (int n = 0; n < NI; n++)
                        add_sums(X[n], *(const float2*)(block_sums + n * 16 + (g * STEPS_A_GROUP / 2 + h) * 8), starts && h == 0);
#endif
                    multiply_group<NI>(P[1], a[1], tokens, g, starts);
                    if (g == 0) {
                        copy_wait<STAGES - 3>();
                        publish_to_tensor_cores();
                        __syncthreads();  // the next stage is there, and no warp reads the freed one any more
                        if (EARLY) UNROLL for (int i = 0; i < MI; i++) take_integers(stages + after * STAGE, i);
                        load();
                    }
                    finish<NI>(P[0]);
                    if (ends) fold<NI>(P[0], T[0], X, scales, 0, g);
                }
                if (!EARLY) take_integers(stages + after * STAGE, 0);
                make(0);
#else
                copy_wait<STAGES - 2>();
                __syncthreads();
                load();
                uint4 q[MI][VECTORS];
                UNROLL for (int i = 0; i < MI; i++) UNROLL for (int v = 0; v < VECTORS; v++)
                    q[i][v] = shared[X_VECTORS + ((wc * MI + i) * VECTORS + v) * 32 + lane];
                UNROLL for (int step = 0; step < 4; step++) {
                    // Those of the groups that end here.
                    UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++)
                        if (GROUPS_A_BLOCK > 1 ? g == step / STEPS_A_GROUP : step == 3 && part == BLOCKS_A_GROUP - 1) take_scales(shared, g);
                    uint2 b[NI];
                    static_assert(NI % 2 == 0, "two tiles of 8 tokens at once");
                    UNROLL for (int n = 0; n < NI; n += 2) {
                        u32 r[4];
                        load_matrix_4(r, shared_address(shared + (wt * NI + n + (lane >> 4)) * 64 + step * 16 + (lane & 15)));
                        b[n] = make_uint2(r[0], r[1]);
                        b[n + 1] = make_uint2(r[2], r[3]);
                    }
                    multiply_step<MI, NI>(P, T, X, q, scales, b, SumsOfTokens{block_sums + step / 2 * 8, 16}, step, part);
                }
#endif
                stage = after;
            }
#if WARPGROUPS
            // The compiler makes all products wait for each other where some are at work around a loop.
            finish_all<NI>(P[1]);
#endif
        }
#if WARPGROUPS
        fold<NI>(P[1], T[1], X, scales, 1, GROUPS_A_BLOCK - 1);
        clear();
#endif
#if CLUSTERS
        float4* mine = !SPLIT || slice + 1 < end_slice ? sums : last_sums;
        if (SPLIT && slice + 1 == end_slice) __syncthreads();  // all have read the stages
#else
        float4* mine = SPLIT ? (float4*)partial + ((size_t)slice * plane + place) * FOURS * THREADS + threadIdx.x : sums;
#endif
        UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) {
            float4* at = mine + (i * NI + n) * THREADS;
            const float4 t = make_float4(T[i][n][0], T[i][n][1], T[i][n][2], T[i][n][3]);
            *at = SPLIT || slice == 0 ? t : add(*at, t);
            UNROLL for (int e = 0; e < 4; e++) T[i][n][e] = 0.f;
        }
    }

    // The sum F of a lane's n-th pair of tokens, and the results; BATCH pairs wait for their reads together.
    constexpr int BATCH = NI < 8 ? 1 : 2;
    const int first_token = (token_tile0 + wt * NI) * 8 + (lane & 3) * 2, channel = (tile0 + wc * MI) * 16 + (lane >> 2);
    float bias[4];
    UNROLL for (int j = 0; j < 4; j++)
        bias[j] = !GATED && o.bias && channel + j * 8 < o.N ? o.bias[bias_of(o, o.N, channel + j * 8)] : 0.f;
    int n_begin = 0, n_end = NI;
#if CLUSTERS
    // Each block has its share of the pairs; of two pairs four blocks have none for two.
    const int a_block = S / gridDim.z;
    const u32 own = shared_address(last_sums), extra = shared_address(sums);
    if (SPLIT) {
        const int share = max(NI / (int)gridDim.z, 1);
        n_begin = min((int)blockIdx.z * share, NI);
        n_end = min(n_begin + share, NI);
        cluster_arrive();
        if (n_begin == n_end) cluster_wait();
    }
    auto sum = [&](const int (&n)[BATCH], float4 (&f)[BATCH][MI]) {
        if (!SPLIT) {
            UNROLL for (int p = 0; p < BATCH; p++) UNROLL for (int i = 0; i < MI; i++) f[p][i] = sums[(i * NI + n[p]) * THREADS];
            return;
        }
        // All are read before the first is added: another block's memory is far.
        float4 t[8][BATCH][MI];
        UNROLL for (int s = 0; s < 8; s++) if (s < S) {
            const u32 from = of_block(s % a_block == a_block - 1 ? own : extra, s / a_block);
            UNROLL for (int p = 0; p < BATCH; p++) UNROLL for (int i = 0; i < MI; i++) t[s][p][i] = load_of_block(from + (i * NI + n[p]) * THREADS * 16);
        }
        UNROLL for (int s = 0; s < 8; s++) if (s < S)
            UNROLL for (int p = 0; p < BATCH; p++) UNROLL for (int i = 0; i < MI; i++) f[p][i] = s == 0 ? t[0][p][i] : add(f[p][i], t[s][p][i]);
    };
#else
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
    }
    auto sum = [&](const int (&n)[BATCH], float4 (&f)[BATCH][MI]) {
        UNROLL for (int p = 0; p < BATCH; p++) UNROLL for (int i = 0; i < MI; i++) {
            if (!SPLIT) f[p][i] = sums[(i * NI + n[p]) * THREADS];
            else for (int s = 0; s < S; s++) {
                const float4 t = __ldcg((const float4*)partial + (((size_t)s * plane + place) * FOURS + i * NI + n[p]) * THREADS + threadIdx.x);
                f[p][i] = s == 0 ? t : add(f[p][i], t);
            }
        }
    };
#endif
    _Pragma("unroll 1") for (int n0 = n_begin; n0 < n_end; n0 += BATCH) {
        Results<GATED> results[BATCH];
        float4 f[BATCH][MI];
        int n[BATCH];
        UNROLL for (int p = 0; p < BATCH; p++) {
            n[p] = min(n0 + p, n_end - 1);
            results[p].read(o, first_token + n[p] * 8, channel);
        }
#if CLUSTERS
        if (SPLIT && n0 == n_begin) cluster_wait();
#endif
        sum(n, f);
#if CLUSTERS
        // No block leaves while another reads its sums.
        if (SPLIT && n0 + BATCH >= n_end) cluster_arrive();
#endif
        UNROLL for (int p = 0; p < BATCH; p++)
            if (n0 + p < n_end) results[p].write(o, first_token + n[p] * 8, channel, f[p], bias);
    }
#if CLUSTERS
    if (SPLIT) {
        if (n_begin == n_end) cluster_arrive();
        cluster_wait();
    }
#endif
}
