// Products of many tokens on Hopper: one warp copies, WGS warpgroups multiply. Contract and layouts: linear.cu.
//
// A block's tile is WGS * 64 channels by NI * 8 tokens, a warp's 16 channels. Two blocks make a cluster that shares the tokens: each
// reads half of the activations for both. grid (C, 1, 2), a cluster along z; 128 * (WGS + 1) threads; all clusters run at once.
// The work is a list of units, a slice of K each: those of a pair of tiles one after the other, tiles of tokens within those of
// channels. Cluster c takes units [c * units / C, (c + 1) * units / C), and begins with its last tile. Where that one's slices end among
// the next cluster's units, it hands the sum so far on, through `partial` [C * 2][NI][128 * WGS] float4 and `arrived` [C * 2][WGS], zeros
// between launches. The next cluster comes to that tile at its end, and adds the slices that follow. So a tile's slices are added in
// order, whoever computes them.
//
// Copies are the tensor memory accelerator's. `weights` describes integers, scales and minimums, `activations` the tiles and their sums.
// A stage has the blocks of K of one group, or one block. The sum F of slices waits in registers: in shared memory it took more of that
// memory's time than the products did.

constexpr int WIDE_ROOM = 227 * 1024;

struct TensorMap {
    char bytes[128];
};

// Bytes of a stage's parts, and how many stages there are room for.
template <int NI, int WGS>
struct Stage {
    static constexpr int TILES = 4 * WGS, WARPS = 4 * WGS, CONSUMERS = 128 * WGS;
    static constexpr int BLOCKS = BLOCKS_A_GROUP, GROUPS = GROUPS_A_BLOCK;
    static constexpr int X = NI * BLOCKS * 1024, W = TILES * BLOCKS * VECTORS * 512;
    static constexpr int SCALES = TILES * GROUPS * 8 * (int)sizeof(Pair), MINIMUMS = HAS_MIN ? SCALES : 0;
    static constexpr int SUMS = HAS_MIN ? NI * BLOCKS * 64 : 0;
    static constexpr int BYTES = X + W + SCALES + MINIMUMS + SUMS;
    static constexpr int SIZE = (BYTES + 1023) / 1024 * 1024;
    static constexpr int AT_ONCE = 2, EXCHANGE = AT_ONCE * CONSUMERS * 16;  // pairs of tokens that are stored at once
    static constexpr int MOST = (WIDE_ROOM - EXCHANGE - 2048) / SIZE, COUNT = MOST < 8 ? MOST : 8;
    static_assert(COUNT >= 2, "one is read while the other comes");
    // Steps of k16 that are begun together, of one group: fragments of two such batches are in registers.
    static constexpr int BATCH = STEPS_A_GROUP < 2 ? 1 : 2, BATCHES = 4 * BLOCKS / BATCH, A_GROUP = STEPS_A_GROUP * BLOCKS / BATCH;
};

// What a cluster does: the slices [first, end) of one pair of tiles.
struct Segment {
    int channel_pair, token_tile, first, end;
};

struct Walk {
    u32 begin, left;
    int S, token_tiles;
    DEVICE Walk(u32 units, int S, int token_tiles) : S(S), token_tiles(token_tiles) {
        begin = (u64)units * blockIdx.x / gridDim.x;
        left = (u64)units * (blockIdx.x + 1) / gridDim.x;
    }
    DEVICE bool next(Segment& s) {
        if (left == begin) return false;
        const u32 tile = (left - 1) / S, start = tile * S;
        s = {(int)(tile / token_tiles), (int)(tile % token_tiles), (int)(begin > start ? begin - start : 0), (int)(left - start)};
        left = start + s.first;
        return true;
    }
};

#if SCALE_F32
DEVICE Pair load_shared_pair(u32 from) { return load_shared_8(from); }
#else
DEVICE Pair load_shared_pair(u32 from) { return load_shared_4(from); }
#endif

// The threads of one warpgroup.
DEVICE void warpgroup_meets(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// Until another block has set it.
DEVICE void wait_for(const u32* flag) {
    u32 v;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
    while (v == 0);
}

// The stages of a walk, one after the other.
template <int NI, int WGS>
struct Steps {
    typedef Stage<NI, WGS> St;
    Walk walk;
    Segment s;
    int block = 0, end = 0, stage = -1;
    u32 parity = 0;
    DEVICE Steps(const Walk& walk) : walk(walk) {}
    DEVICE bool next(int S, int KB) {
        block += St::BLOCKS;
        if (block >= end) {
            if (!walk.next(s)) return false;
            block = slice_begin(s.first, S, KB);
            end = slice_begin(s.end, S, KB);
        }
        if (++stage == St::COUNT) stage = 0, parity ^= 1;
        return true;
    }
};

template <int NI, int WGS>
DEVICE void wide_copies(const TensorMap* weights, const TensorMap* activations, u32 shared, u32 full, u32 empty, u32 rank, const Walk& walk, int S, int KB) {
    typedef Stage<NI, WGS> St;
    auto load_w = [&](const Steps<NI, WGS>& at) {
        const u32 to = shared + at.stage * St::SIZE + St::X, bar = full + at.stage * 8;
        const int tile = (at.s.channel_pair * 2 + rank) * St::TILES, group = at.block / BLOCKS_A_GROUP * GROUPS_A_BLOCK * (int)sizeof(Pair);
        barrier_expect(bar, St::BYTES);
        tensor_copy(to, weights, at.block * (VECTORS * 64), tile, bar);
        tensor_copy(to + St::W, weights + 1, group, tile, bar);
        if (HAS_MIN) tensor_copy(to + St::W + St::SCALES, weights + 2, group, tile, bar);
    };
    auto load_x = [&](const Steps<NI, WGS>& at) {
        const u32 to = shared + at.stage * St::SIZE, bar = full + at.stage * 8;
        const int row = at.s.token_tile * NI + rank * (NI / 2);
        tensor_copy_to_both(to + rank * (St::X / 2), activations, at.block * 128, row, bar);
        if (HAS_MIN) tensor_copy_to_both(to + St::BYTES - St::SUMS + rank * (St::SUMS / 2), activations + 1, at.block * 8, row, bar);
    };
    Steps<NI, WGS> at(walk);
    int early = 0;
    _Pragma("unroll 1") for (; early < St::COUNT && at.next(S, KB); early++) load_w(at);
    cluster_met();
    after_previous();
    at = Steps<NI, WGS>(walk);
    _Pragma("unroll 1") while (at.next(S, KB)) {
        if (early > 0) early--;
        else {
            barrier_wait(empty + at.stage * 8, at.parity ^ 1);
            load_w(at);
        }
        load_x(at);
    }
}

template <int NI, int WGS, bool GATED>
DEVICE void wide(const TensorMap* weights, const TensorMap* activations, const Output& o, int tiles, int KB, int S, float4* partial, u32* arrived) {
    typedef Stage<NI, WGS> St;
    constexpr int HALF = NI / 2;
    extern __shared__ __align__(1024) u8 room[];
    __shared__ __align__(8) u64 barriers[2 * St::COUNT];
    const u32 shared = shared_address(room), full = shared_address(barriers), empty = full + St::COUNT * 8;
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const u32 rank = blockIdx.z;
    const int token_tiles = (o.M + NI * 8 - 1) / (NI * 8), pairs = (tiles + 2 * St::TILES - 1) / (2 * St::TILES);
    Walk walk(pairs * token_tiles * S, S, token_tiles);
    let_next_start();
    if (warp >= St::WARPS) {
        fewer_registers<WGS == 2 ? 40 : 56>();
        if (warp == St::WARPS && lane == 0) {
            UNROLL for (int i = 0; i < 2 + HAS_MIN; i++) prefetch_map(weights + i);
            UNROLL for (int i = 0; i < 1 + HAS_MIN; i++) prefetch_map(activations + i);
            UNROLL for (int i = 0; i < St::COUNT; i++) {
                barrier_start(full + i * 8, 1);
                barrier_start(empty + i * 8, 2 * St::WARPS);
            }
            barriers_started();
            cluster_joins();
            wide_copies<NI, WGS>(weights, activations, shared, full, empty, rank, walk, S, KB);
        } else {
            cluster_joins();
            cluster_met();
        }
        __syncwarp();
    } else {
        more_registers<WGS == 2 ? 232 : 152>();
        cluster_joins();
        const int group = warp >> 2, own = warp, odd = warp & 1;  // own: the warp's tile of channels
        int stage = 0, left = 0;               // left: stages to come
        u32 parity = 0;
        Segment s;
        for (Walk all = walk; all.next(s);) left += (slice_begin(s.end, S, KB) - slice_begin(s.first, S, KB)) / St::BLOCKS;
        u32 a[2][St::BATCH][4];
        uint4 q[VECTORS];
        // Fragments of the stage's i-th batch.
        auto make = [&](int i) {
            const int step = i * St::BATCH % 4;
            if (step == 0) UNROLL for (int v = 0; v < VECTORS; v++)
                q[v] = load_shared_16(shared + stage * St::SIZE + St::X + ((own * St::BLOCKS + i * St::BATCH / 4) * VECTORS + v) * 512 + lane * 16);
            UNROLL for (int j = 0; j < St::BATCH; j++) dequantize(q, step + j, a[i & 1][j]);
        };
        cluster_met();
        barrier_wait(full + stage * 8, parity);
        make(0);
        after_previous();
        while (walk.next(s)) {
            float F[NI][4];
            const u32 before = (blockIdx.x - 1) * 2 + rank, mine = blockIdx.x * 2 + rank;
            for (int slice = s.first; slice < s.end; slice++) {
                float P[NI][4], T[NI][4];
                UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) T[n][e] = 0.f;
                const int slice_end = slice_begin(slice + 1, S, KB);
                _Pragma("unroll 1") for (int block = slice_begin(slice, S, KB); block < slice_end; block += St::BLOCKS) {
                    const u32 at = shared + stage * St::SIZE, freed = empty + stage * 8;
                    left--;
                    Scales<1> scales;
                    UNROLL for (int i = 0; i < St::BATCHES; i++) {
                        const bool ends = (i + 1) % St::A_GROUP == 0, last = i + 1 == St::BATCHES;
                        const int g = i / St::A_GROUP;
                        const u32 tokens = b_tiles(at + i * St::BATCH / 4 * 1024) + i * St::BATCH % 4 * (256 >> 4);
                        hold<NI>(P);
                        warpgroup_begin();
                        UNROLL for (int j = 0; j < St::BATCH; j++)
                            warpgroup_mma<NI, St::BLOCKS * 1024>(P, a[i & 1][j], tokens + j * (256 >> 4), !(i % St::A_GROUP == 0 && j == 0));
                        warpgroup_commit();
                        if (i == 0) UNROLL for (int j = 0; j < GROUPS_A_BLOCK; j++) {
                            const u32 from = at + St::X + St::W + ((own * GROUPS_A_BLOCK + j) * 8 + (lane >> 2)) * (int)sizeof(Pair);
                            scales.scale[0][j] = load_shared_pair(from);
#if HAS_MIN
                            scales.minimum[0][j] = load_shared_pair(from + St::SCALES);
#endif
                        }
                        // The fragments that come next take the place of those of the batch before, which must have been read.
                        if (last) {
                            if (++stage == St::COUNT) stage = 0, parity ^= 1;
                            if (left > 0) barrier_wait(full + stage * 8, parity);
                        }
                        if (i % St::A_GROUP > 0) warpgroup_wait<1>();
                        if (last) {
                            if (left > 0) make(0);
                        } else make(i + 1);
                        if (!ends) continue;
                        warpgroup_wait<0>();
                        hold<NI>(P);
                        GroupSum X[NI];
#if HAS_MIN
                        UNROLL for (int n = 0; n < NI; n++) UNROLL for (int h = 0; h < (STEPS_A_GROUP * St::BLOCKS + 1) / 2; h++)
                            add_sums(X[n], load_shared_8(at + St::BYTES - St::SUMS + n * (St::BLOCKS * 64) + (g * STEPS_A_GROUP / 2 + h) * 32 + (lane & 3) * 8), h == 0);
#endif
                        if (last && lane < 2) arrive_at_block(freed, lane);
                        fold<NI>(P, T, X, scales, 0, g);
                    }
                }
                if (slice == 0) {
                    UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) F[n][e] = T[n][e];
                } else {
                    if (slice == s.first) {
                        wait_for(arrived + before * WGS + group);
                        const float4* from = partial + (size_t)before * NI * St::CONSUMERS + threadIdx.x;
                        UNROLL for (int n = 0; n < NI; n++) {
                            const float4 f = __ldcg(from + n * St::CONSUMERS);
                            F[n][0] = f.x, F[n][1] = f.y, F[n][2] = f.z, F[n][3] = f.w;
                        }
                        warpgroup_meets(group);
                        if ((threadIdx.x & 127) == 0) arrived[before * WGS + group] = 0;  // for the next launch
                    }
                    UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) F[n][e] = __fadd_rn(F[n][e], T[n][e]);
                }
            }
            if (s.end < S) {
                float4* to = partial + (size_t)mine * NI * St::CONSUMERS + threadIdx.x;
                UNROLL for (int n = 0; n < NI; n++) __stcg(to + n * St::CONSUMERS, make_float4(F[n][0], F[n][1], F[n][2], F[n][3]));
                __threadfence();
                warpgroup_meets(group);
                if ((threadIdx.x & 127) == 0) atomicExch(arrived + mine * WGS + group, 1u);
                continue;
            }
            // Of two neighbouring warps' channels, a gate and its up, each warp stores half of the tokens.
            const int first_token = (s.token_tile * NI + odd * HALF) * 8 + (lane & 3) * 2;
            const int channel = ((s.channel_pair * 2 + rank) * St::TILES + (own & ~1)) * 16 + (lane >> 2);
            const u32 exchange = shared + St::COUNT * St::SIZE;
            float bias[4];
            UNROLL for (int j = 0; j < 4; j++)
                bias[j] = !GATED && o.bias && channel + j * 8 < o.N ? o.bias[bias_of(o, o.N, channel + j * 8)] : 0.f;
            UNROLL for (int n = 0; n < HALF; n += St::AT_ONCE) {
                float4 kept[St::AT_ONCE], other[St::AT_ONCE];
                UNROLL for (int p = 0; p < St::AT_ONCE; p++) {
                    const float4 low = make_float4(F[n + p][0], F[n + p][1], F[n + p][2], F[n + p][3]);
                    const float4 high = make_float4(F[HALF + n + p][0], F[HALF + n + p][1], F[HALF + n + p][2], F[HALF + n + p][3]);
                    kept[p] = odd ? high : low;
                    store_shared_16(exchange + (p * St::CONSUMERS + threadIdx.x) * 16, odd ? low : high);
                }
                Results<GATED> results[St::AT_ONCE];
                UNROLL for (int p = 0; p < St::AT_ONCE; p++) results[p].read(o, first_token + (n + p) * 8, channel);
                warpgroup_meets(group);
                UNROLL for (int p = 0; p < St::AT_ONCE; p++) other[p] = load_shared_float4(exchange + (p * St::CONSUMERS + (threadIdx.x ^ 32)) * 16);
                warpgroup_meets(group);  // both have read
                UNROLL for (int p = 0; p < St::AT_ONCE; p++) {
                    const float4 f[2] = {odd ? other[p] : kept[p], odd ? kept[p] : other[p]};
                    results[p].write(o, first_token + (n + p) * 8, channel, f, bias);
                }
            }
        }
    }
    // No block leaves while the other writes to it.
    cluster_arrive_relaxed();
    cluster_wait();
}
