// Paged causal attention. A row is (token, query head); its keys and values are walked by absolute position.
//
// Contract (docs/numerics.md): KV tiles of 64 absolute positions, splits of 256. Within a split: scores by an mma chain over the
// head's channels, times scale * log2(e); running maximum and exp2 in float32; probabilities rounded to half; their sum by an mma
// against ones, so that its order is the mma's; values by an mma chain over positions. The splits' (m, l, o) are merged in
// ascending order with fused multiply-adds. Tiles and splits behind a row's own position add exact zeros. So a row's bits depend on
// its query and its sequence's keys and values alone: not on block size, chunking, or the rows beside it.
//
// query_tiles (attention_walk.cuh): one block of 1024 threads. Cuts the step's rows into query tiles, and the work into parts for
//   attend_splits.
// attend_rows: grid (1, KV heads, query tiles), 128 threads. A block walks all splits of its tile and merges them as it goes.
// attend_splits: grid (blocks). A block walks its part of all splits of all tiles and heads. It writes each split's (o, m, l) to `partial`
//   (attention_results.cuh), and the last block of a tile and head to arrive merges them in order; the only split of a tile needs neither.
//   With WINDOW: grid (parts of a tile's splits, KV heads, query tiles). Same bits as attend_rows.
// A block has STAGES tiles of keys and values in shared memory. The place of keys is loaded anew once their scores are known, that of values
// once they are summed; also across the borders of a block's segments.
// The result goes to `out` as tiles of halves with their sums (linear.cu), scale 1: it is a mean of halves. HEAD_DIM not a multiple of
// 32: as float32 rows, for prepare_rows.
//
// qkv [rows, (Hq + 2 Hkv) * HEAD_DIM] float32, queries turned already. Cache [blocks][Hkv][block size][HEAD_DIM] half.
// Block size a power of two from 8; G <= 16.
// With KV_BITS 8 the cache is int8 with a half scale a position, [blocks][Hkv][block size] for keys and for values. Integers go to the
// tensor cores as they are, as halves. A key's scale multiplies its score. A value's scale times VALUE_UNIT multiplies its probability, in
// float32, before that is rounded to a half for the values' mma (the probabilities' sum is of the plain ones); the output is divided by
// VALUE_UNIT in the end. So a scale that is NaN reaches the rows that see its position, and no other. The mma's channels of a score are
// those of a lane side by side (KEY_STEP), and its columns of values are even channels, then odd ones (PAIR): orders of their own.
// Defines: HEAD_DIM, a multiple of 16 up to 256; those of attention_kinds.cuh.

constexpr int THREADS = 128;
constexpr int SEGMENTS = 8;  // that a block knows of at once: more than STAGES
// Tiles of keys and values in shared memory, and blocks that a multiprocessor should hold: as in tables.py.
#ifndef STAGES
#define STAGES (KV_BITS == 8 || HEAD_DIM <= 128 ? 2 : 1)
#endif
#ifndef BLOCKS
#define BLOCKS (HEAD_DIM <= 64 ? 4 : HEAD_DIM <= 128 ? 3 : 2)
#endif
#if KV_BITS == 8
typedef u8 Stored;
#define PAIR 2
constexpr int ROW_BYTES = (HEAD_DIM / 16 | 1) * 16;  // an odd number of 16 bytes spreads a column over the banks
#else
typedef u16 Stored;
#define PAIR 1
constexpr int ROW_BYTES = HEAD_DIM * 2 + 16;  // the odd 16 bytes spread a column over the banks
#endif
constexpr int TILE_BYTES = KV_TILE * ROW_BYTES;
constexpr int STEPS = HEAD_DIM / 16;             // k16 steps of a score
constexpr int COLUMN_TILES = HEAD_DIM / 8;       // 8-wide tiles of the output; with integers in pairs from 16 channels
constexpr int OWN_COLUMNS = (COLUMN_TILES / PAIR + 3) / 4 * PAIR;
struct Merged {
    float m[2], l[2], f[OWN_COLUMNS][4];
};

enum {
    SCALE_BYTES = KV_BITS == 8 ? KV_TILE * 2 : 0,  // of a tile
    TILE_AND_SCALES = TILE_BYTES + SCALE_BYTES,
    // Channels of a score's k16 step from lane to lane, and from a lane's first two to its other two.
    KEY_STEP = KV_BITS == 8 ? 4 : 2,
    KEY_HALF = KV_BITS == 8 ? 2 : 8,
};

template <bool WHOLE>
DEVICE void attend(const float* qkv, const Stored* keys, const Stored* values, const Tables tables, const int4* work, const int* positions,
                   float* partial, u32* arrived, const Result result, int G, int max_splits,
                   float scale_log2e WINDOW_PARAMETER CAP_PARAMETER SINKS_PARAMETER SCALES_PARAMETER) {
    extern __shared__ __align__(16) u8 shared[];  // STAGES x (keys, values, scales of keys, of values)
    __shared__ u32 probabilities[16 * 36];
#if KV_BITS == 8
    __shared__ u32 scaled[16 * 36];
#endif
    __shared__ float maxima[4 * 16];
    __shared__ int4 segments[SEGMENTS];  // query tile, KV head, first tile, tile after the last
    __shared__ bool last;
    constexpr bool OWN_GRID = WHOLE || WINDOW;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group_row = lane >> 2, kv_heads = tables.kv_heads;
    let_next_start();
    after_previous();
    Walk<!OWN_GRID> walk;
    walk.begin = 0;
    if (OWN_GRID) {
        walk.t = blockIdx.z;
        walk.head = blockIdx.y;
        const int4 record = tables.tiles[walk.t];
        if (record.y == 0) return;
        walk.length = record.z;
        walk.sequence = record.w;
#if WINDOW
        walk.begin = max(positions[record.x] - window + 1, 0);
#endif
        const int end = walk.end(), first = walk.begin / SPLIT, splits = (end + SPLIT_TILES - 1) / SPLIT_TILES - first;
        const int parts = min((int)gridDim.x, splits), part = blockIdx.x;
        if (part >= parts) return;  // and is not waited for
        walk.tile = (first + part * splits / parts) * SPLIT_TILES;
        walk.left = min((first + (part + 1) * splits / parts) * SPLIT_TILES, end) - walk.tile;
    } else {
        const int4 part = work[blockIdx.x * 2];
        const int4 record = work[blockIdx.x * 2 + 1];
        walk.length = record.z;
        walk.sequence = record.w;
        walk.t = part.x;
        walk.head = part.y;
        walk.tile = part.z;
        walk.left = part.w;
        if (walk.left == 0) return;
    }
    const int all = walk.left, block_mask = (1 << tables.shift) - 1;
    walk.start(tables);

    // The walk's tile of keys, or of values.
    auto load_tile = [&](u32 to, const Stored* from) {
        constexpr int CHUNKS = HEAD_DIM * (int)sizeof(Stored) / 16, COPIES = KV_TILE * CHUNKS;
        _Pragma("unroll 2") for (int j = 0; j < (COPIES + THREADS - 1) / THREADS; j++) {
            const int id = j * THREADS + threadIdx.x, r = id / CHUNKS, c = id % CHUNKS, p = walk.tile * KV_TILE + r;
            const u32 block = __shfl_sync(~0u, walk.ids, (p % SPLIT) >> tables.shift);
            const bool there = p >= walk.begin && p < walk.length;
            const u32 row = ((block * kv_heads + walk.head) << tables.shift) + (p & block_mask);
            if (COPIES % THREADS == 0 || id < COPIES)
                copy_async_16(to + r * ROW_BYTES + c * 16, from + (there ? (size_t)row * HEAD_DIM + c * (16 / (int)sizeof(Stored)) : 0),
                              there ? 16 : 0);
        }
    };
    auto load_keys = [&](int stage) {
        const u32 to = shared_address(shared + stage * 2 * TILE_AND_SCALES);
        if (walk.left) {
            load_tile(to, keys);
#if KV_BITS == 8
            // Scales, of 8 positions at once: of those that nobody sees, in the same block, whatever is there. Those of values too.
            const int r = threadIdx.x % (KV_TILE / 8) * 8, p = walk.tile * KV_TILE + r;
            const u32 block = __shfl_sync(~0u, walk.ids, (p % SPLIT) >> tables.shift);
            if (threadIdx.x < KV_TILE / 4) {
                const bool is_value = threadIdx.x >= KV_TILE / 8, there = p + 7 >= walk.begin && p < walk.length;
                const u32 row = ((block * kv_heads + walk.head) << tables.shift) + (p & block_mask);
                copy_async_16(to + 2 * TILE_BYTES + (is_value ? SCALE_BYTES : 0) + r * 2, (is_value ? value_scales : key_scales) + (there ? row : 0),
                              there ? 16 : 0);
            }
#endif
        }
        copy_commit();
    };
    int entered = 0;  // segments
    auto enter_segment = [&] {
        if (threadIdx.x == 0)
            segments[entered % SEGMENTS] = make_int4(walk.t, walk.head, walk.tile, min(walk.tile + walk.left, walk.end()));
        entered++;
    };
    // After load_keys of the same tile; and on to the next.
    auto load_values = [&](int stage) {
        if (walk.left) {
            load_tile(shared_address(shared + stage * 2 * TILE_AND_SCALES) + TILE_BYTES, values);
            if (walk.advance(tables)) enter_segment();
        }
        copy_commit();
    };
    enter_segment();
    for (int stage = 0; stage < STAGES; stage++) {
        load_keys(stage);
        load_values(stage);
    }
    __syncthreads();  // segments

    int stage = 0;
    auto begin_merging = [&](Merged& merged, int head) {
        UNROLL for (int h = 0; h < 2; h++) {
#if SINKS
            merged.m[h] = sink_log2e(sinks, head * G + (group_row + h * 8) % G);
            merged.l[h] = 1.f;
#else
            merged.m[h] = FAR;
            merged.l[h] = 0.f;
#endif
        }
        UNROLL for (int n = 0; n < OWN_COLUMNS; n++) UNROLL for (int e = 0; e < 4; e++) merged.f[n][e] = 0.f;
    };
    auto add_split = [&](Merged& merged, const float* m, const float* sum, const float (*o)[4]) {
        float keep[2], add[2];
        UNROLL for (int h = 0; h < 2; h++) merge(merged.m[h], merged.l[h], m[h], sum[h * 2], keep[h], add[h]);
        UNROLL for (int n = 0; n < OWN_COLUMNS; n++) UNROLL for (int e = 0; e < 4; e++)
            merged.f[n][e] = __fmaf_rn(merged.f[n][e], keep[e >> 1], __fmul_rn(o[n][e], add[e >> 1]));
    };
    // What comes out goes through shared memory, so that one warp has a row's channels side by side: where the last values were.
    auto last_values = [&] { return (float*)(shared + (stage ? stage - 1 : STAGES - 1) * 2 * TILE_AND_SCALES + TILE_BYTES); };
    auto put_heads = [&](const Merged& merged) {
        float* heads = last_values();  // [16][HEAD_DIM]
        __syncthreads();
        UNROLL for (int h = 0; h < 2; h++) UNROLL for (int n = 0; n < OWN_COLUMNS; n++) {
            const int column = warp + n / PAIR * 4;
            if (column < COLUMN_TILES / PAIR) UNROLL for (int e = 0; e < 2; e++)
                heads[(group_row + h * 8) * HEAD_DIM + column * (8 * PAIR) + (lane & 3) * (2 * PAIR) + n % PAIR + e * PAIR] =
                    quotient(merged.f[n][h * 2 + e], merged.l[h]);
        }
    };
    for (int done = 0, segment = 0; OWN_GRID ? segment == 0 : done < all; segment++) {
        const int4 place = segments[segment % SEGMENTS], record = tables.tiles[place.x];
        const int first_row = record.x, count = record.y, head = place.y, end = kv_tiles(record.z);
#if WINDOW
        const int begin_split = walk.begin / SPLIT;
#else
        constexpr int begin_split = 0;
#endif
        // All of the splits, and those so few that they need not wait in `partial`.
        const bool alone = WHOLE || (place.z == begin_split * SPLIT_TILES && place.w == end);
        const bool direct = WHOLE || (alone && end - place.z <= SPLIT_TILES);
        // The 16 rows of the tile: row i is token i / G, head i % G. A lane holds rows lane / 4 and + 8.
        const int width = (G + 2) * kv_heads * HEAD_DIM;
        int own_position[2];
        const float* query[2];
        UNROLL for (int h = 0; h < 2; h++) {
            const int i = group_row + h * 8, token = first_row + i / G;
            const bool there = i < count * G;
            own_position[h] = there ? positions[token] : -1;
            query[h] = there ? qkv + (size_t)token * width + (head * G + i % G) * HEAD_DIM + (lane & 3) * KEY_STEP : nullptr;
        }
        u32 qa[STEPS][4];
        UNROLL for (int k = 0; k < STEPS; k++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int c = 0; c < 2; c++) {
            const float* q = query[h] + k * 16 + c * KEY_HALF;
            qa[k][h + 2 * c] = query[h] ? floats_to_half2(q[0], q[1]) : 0;
        }

        Merged merged;  // of attend_rows
        if (WHOLE) begin_merging(merged, head);
        for (int tile = place.z; tile < place.w;) {
            const int split = tile / SPLIT_TILES, split_end = min((split + 1) * SPLIT_TILES, place.w);
            float o[OWN_COLUMNS][4], sum[4] = {0.f, 0.f, 0.f, 0.f}, m[2] = {FAR, FAR};
            UNROLL for (int n = 0; n < OWN_COLUMNS; n++) UNROLL for (int e = 0; e < 4; e++) o[n][e] = 0.f;
            for (; tile < split_end; tile++) {
                copy_wait<2 * STAGES - 2>();
                __syncthreads();
                // All have read the values of the tile before.
                if (done++) load_values(stage ? stage - 1 : STAGES - 1);
                const u32 k_at = shared_address(shared + stage * 2 * TILE_AND_SCALES), v_at = k_at + TILE_BYTES;

                // Scores: this warp's 16 of the 64 positions.
                float s[2][4] = {};
#if KV_BITS == 8
                // Two steps a load. The second of the last may not be there: what is read then is not used.
                UNROLL for (int k = 0; k < STEPS; k += 2) {
                    u32 b[4];
                    const int r = warp * 16 + (lane & 7) + ((lane >> 4) << 3), c = min(k + ((lane >> 3) & 1), STEPS - 1);
                    load_matrix_4(b, k_at + r * ROW_BYTES + c * 16);
                    UNROLL for (int j = 0; j < 2 && k + j < STEPS; j++) UNROLL for (int n = 0; n < 2; n++)
                        mma_16x8x16(s[n], qa[k + j], halves_of<0x4140>(b[n * 2 + j]), halves_of<0x4342>(b[n * 2 + j]));
                }
                // Those of values are read here too: they lie beside the keys, which are loaded anew when they are needed.
                const u32* scale_pairs = (const u32*)(shared + stage * 2 * TILE_AND_SCALES + 2 * TILE_BYTES) + warp * 8 + (lane & 3);
                const u32 value_pairs[2] = {scale_pairs[SCALE_BYTES / 4], scale_pairs[SCALE_BYTES / 4 + 4]};
                UNROLL for (int n = 0; n < 2; n++) UNROLL for (int e = 0; e < 4; e++)
                    s[n][e] = __fmul_rn(s[n][e], half_to_float((u16)(scale_pairs[n * 4] >> (e & 1) * 16)));
#else
                UNROLL for (int k = 0; k < STEPS; k++) {
                    u32 b[4];
                    const int r = warp * 16 + (lane & 7) + ((lane >> 4) << 3), c = k * 2 + ((lane >> 3) & 1);
                    load_matrix_4(b, k_at + r * ROW_BYTES + c * 16);
                    mma_16x8x16(s[0], qa[k], b[0], b[1]);
                    mma_16x8x16(s[1], qa[k], b[2], b[3]);
                }
#endif
                float highest[2] = {FAR, FAR};
                UNROLL for (int n = 0; n < 2; n++) UNROLL for (int e = 0; e < 4; e++) {
                    const int p = tile * KV_TILE + warp * 16 + n * 8 + (lane & 3) * 2 + (e & 1);
#if WINDOW
                    const bool seen = p <= own_position[e >> 1] && p > own_position[e >> 1] - window;
#else
                    const bool seen = p <= own_position[e >> 1];
#endif
#if SOFTCAP
                    s[n][e] = seen ? capped(s[n][e], scale_log2e, cap_log2e) : FAR;
#else
                    s[n][e] = seen ? __fmul_rn(s[n][e], scale_log2e) : FAR;
#endif
                    highest[e >> 1] = fmaxf(highest[e >> 1], s[n][e]);
                }
                UNROLL for (int h = 0; h < 2; h++) {
                    highest[h] = fmaxf(highest[h], __shfl_xor_sync(~0u, highest[h], 1));
                    highest[h] = fmaxf(highest[h], __shfl_xor_sync(~0u, highest[h], 2));
                    if ((lane & 3) == 0) maxima[warp * 16 + group_row + h * 8] = highest[h];
                }
                __syncthreads();
                load_keys(stage);
                float shrink[2];
                UNROLL for (int h = 0; h < 2; h++) {
                    float v = m[h];
                    UNROLL for (int j = 0; j < 4; j++) v = fmaxf(v, maxima[j * 16 + group_row + h * 8]);
                    shrink[h] = exp2_fast(m[h] - v);
                    m[h] = v;
                }
                UNROLL for (int n = 0; n < 2; n++) {
                    const int column = warp * 8 + n * 4 + (lane & 3);
#if KV_BITS == 8
                    UNROLL for (int h = 0; h < 2; h++) {
                        const float* own = s[n] + h * 2;
                        const float first = weight_of(own[0], m[h]), second = weight_of(own[1], m[h]);
                        const u32 pair = value_pairs[n];
                        const float by = __fmul_rn(half_to_float((u16)pair), VALUE_UNIT), by_second = __fmul_rn(half_to_float((u16)(pair >> 16)), VALUE_UNIT);
                        probabilities[(group_row + h * 8) * 36 + column] = floats_to_half2(first, second);
                        // Zero times what stands where a row sees nothing may not be zero.
                        scaled[(group_row + h * 8) * 36 + column] =
                            floats_to_half2(own[0] == FAR ? 0.f : __fmul_rn(first, by), own[1] == FAR ? 0.f : __fmul_rn(second, by_second));
                    }
#else
                    probabilities[group_row * 36 + column] = floats_to_half2(weight_of(s[n][0], m[0]), weight_of(s[n][1], m[0]));
                    probabilities[(group_row + 8) * 36 + column] = floats_to_half2(weight_of(s[n][2], m[1]), weight_of(s[n][3], m[1]));
#endif
                }
                copy_wait<2 * STAGES - 1>();
                __syncthreads();
                UNROLL for (int e = 0; e < 4; e++) sum[e] = __fmul_rn(sum[e], shrink[e >> 1]);
                UNROLL for (int n = 0; n < OWN_COLUMNS; n++) UNROLL for (int e = 0; e < 4; e++) o[n][e] = __fmul_rn(o[n][e], shrink[e >> 1]);
                u32 pa[4][4];
                UNROLL for (int k = 0; k < 4; k++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int c = 0; c < 2; c++)
                    pa[k][h + 2 * c] = probabilities[(group_row + h * 8) * 36 + k * 8 + c * 4 + (lane & 3)];
                UNROLL for (int k = 0; k < 4; k++) mma_16x8x16(sum, pa[k], 0x3c003c00u, 0x3c003c00u);
#if KV_BITS == 8
                UNROLL for (int k = 0; k < 4; k++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int c = 0; c < 2; c++)
                    pa[k][h + 2 * c] = scaled[(group_row + h * 8) * 36 + k * 8 + c * 4 + (lane & 3)];
                // Values: 16 of this warp's channels at a time; one load brings 32 positions of them, two channels an element.
                UNROLL for (int n = 0; n < OWN_COLUMNS; n += PAIR) {
                    const int column = warp + n / PAIR * 4;
                    if (column < COLUMN_TILES / PAIR) UNROLL for (int half = 0; half < 2; half++) {
                        u32 b[4];
                        load_matrix_4_transposed(b, v_at + (half * 32 + lane) * ROW_BYTES + column * 16);
                        UNROLL for (int j = 0; j < 2; j++) {
                            mma_16x8x16(o[n], pa[half * 2 + j], halves_of<0x4240>(b[j * 2]), halves_of<0x4240>(b[j * 2 + 1]));
                            mma_16x8x16(o[n + 1], pa[half * 2 + j], halves_of<0x4341>(b[j * 2]), halves_of<0x4341>(b[j * 2 + 1]));
                        }
                    }
                }
#else
                // Values: this warp's columns, 8 at a time; one load brings 32 positions of them.
                UNROLL for (int n = 0; n < OWN_COLUMNS; n++) {
                    const int column = warp + n * 4;
                    if (column < COLUMN_TILES) UNROLL for (int half = 0; half < 2; half++) {
                        u32 b[4];
                        load_matrix_4_transposed(b, v_at + (half * 32 + lane) * ROW_BYTES + column * 16);
                        mma_16x8x16(o[n], pa[half * 2], b[0], b[1]);
                        mma_16x8x16(o[n], pa[half * 2 + 1], b[2], b[3]);
                    }
                }
#endif
                stage = stage + 1 < STAGES ? stage + 1 : 0;
            }
            if (WHOLE) {
                add_split(merged, m, sum, o);
                continue;
            }
            if (direct) {
                Merged only;
                begin_merging(only, head);
                add_split(only, m, sum, o);
                put_heads(only);
                continue;
            }
            UNROLL for (int h = 0; h < 2; h++) {
                const int i = group_row + h * 8;
                if (i >= count * G) continue;
                const size_t row = ((size_t)(first_row + i / G) * kv_heads + head) * G + i % G;
                float* to = partial_of(partial, row, max_splits) + (size_t)split * HEAD_DIM;
                UNROLL for (int n = 0; n < OWN_COLUMNS; n++) {
                    const int column = warp + n / PAIR * 4;
                    if (column < COLUMN_TILES / PAIR) UNROLL for (int e = 0; e < 2; e++)
                        to[column * (8 * PAIR) + (lane & 3) * (2 * PAIR) + n % PAIR + e * PAIR] = o[n][h * 2 + e];
                }
                if (warp == 0 && (lane & 3) == 0) {
                    float* pair = partial_of(partial, row, max_splits) + (size_t)max_splits * HEAD_DIM + split * 2;
                    pair[0] = m[h];
                    pair[1] = sum[h * 2];
                }
            }
        }
        const int query_heads = kv_heads * G;
        if (WHOLE) put_heads(merged);
        __syncthreads();
        if (!alone) {
            if (threadIdx.x == 0) {
                u32* counter = arrived + place.x * kv_heads + head;
                const int mine = place.w - place.z;
                __threadfence();
                last = atomicAdd(counter, (u32)mine) == (u32)(end - begin_split * SPLIT_TILES - mine);
                __threadfence();
                if (last) *counter = 0;  // for the next launch
            }
            __syncthreads();
            if (!last) continue;
        }
        for (int i = warp; i < count * G; i += 4) {
            const int row = first_row + i / G, query_head = head * G + i % G;
            float out[LANE_CHANNELS];
            if (direct) {
                const float* heads = last_values();
                UNROLL for (int j = 0; j < LANE_CHANNELS; j++) out[j] = j * 32 + lane < HEAD_DIM ? heads[i * HEAD_DIM + j * 32 + lane] : 0.f;
            } else {
#if SINKS
                const float first = sink_log2e(sinks, query_head);
                const float* sink = &first;
#else
                const float* sink = nullptr;
#endif
                const float* from = partial_of(partial, (size_t)row * query_heads + query_head, max_splits);
                merge_splits(from, max_splits, begin_split, positions[row] / SPLIT + 1, sink, out);
            }
            store_head(result, row, query_heads * HEAD_DIM, query_head, out);
        }
    }
}

#define ATTEND(name, WHOLE)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                        \
        name(const float* qkv, const Stored* keys, const Stored* values, const int4* tiles, const int4* work,            \
             const int* positions, const int* block_tables, float* partial, u32* arrived, float* rows, u32* fragments,   \
             float* sums, int KB, int table_width, int block_shift, int G, int kv_heads, int max_splits,                 \
             float scale_log2e WINDOW_PARAMETER CAP_PARAMETER SINKS_PARAMETER SCALES_PARAMETER) {                        \
        attend<WHOLE>(qkv, keys, values, {block_tables, table_width, block_shift, kv_heads, tiles}, work, positions,     \
                      partial, arrived, {rows, fragments, sums, KB}, G, max_splits,                                      \
                      scale_log2e WINDOW_ARGUMENT CAP_ARGUMENT SINKS_ARGUMENT SCALES_ARGUMENT);                          \
    }
ATTEND(attend_rows, true)
ATTEND(attend_splits, false)
