// Paged causal attention. A row is (token, query head); its keys and values are walked by absolute position.
//
// Contract (docs/numerics.md): KV tiles of 64 absolute positions, splits of 256. Within a split: scores by an mma chain over the
// head's channels, times scale * log2(e); running maximum and exp2 in float32; probabilities rounded to half; their sum by an mma
// against ones, so that its order is the mma's; values by an mma chain over positions. The splits' (m, l, o) are merged in
// ascending order with fused multiply-adds. Tiles and splits behind a row's own position add exact zeros. So a row's bits depend on
// its query and its sequence's keys and values alone: not on block size, chunking, or the rows beside it.
//
// query_tiles: one block of 1024 threads. Cuts the step's rows into query tiles of up to 16 / G consecutive rows of one sequence;
//   they share the keys and values that are read, and with the G query heads of a KV head fill the 16 rows of an mma.
// attend_rows: grid (1, KV heads, query tiles), 128 threads. A block walks all splits of its tile and merges them as it goes.
// attend_splits: grid (split blocks, KV heads, query tiles). Block x takes splits x, x + gridDim.x, ... and writes each split's
//   (o, m, l) to `partial` [row][query head][split][HEAD_DIM + 2]; the last block of a tile and head to arrive merges them in order.
//   A tile of one split needs neither. Same bits as attend_rows.
// The result goes to `out` as tiles of halves with their sums (linear.cu), scale 1: it is a mean of halves. HEAD_DIM not a multiple of
// 32: as float32 rows, for prepare_rows.
//
// qkv [rows, (Hq + 2 Hkv) * HEAD_DIM] float32, queries turned already. Cache [blocks][Hkv][block size][HEAD_DIM] half.
// tiles int32 [tiles][2]: first row, number of rows (0: none). Block size a power of two from 8; G <= 16.
// With KV_BITS 8 the cache is int8 with a half scale a position, [blocks][Hkv][block size] for keys and for values. Integers go to the
// tensor cores as they are, as halves. A key's scale multiplies its score. A value's scale times VALUE_UNIT multiplies its probability, in
// float32, before that is rounded to a half for the values' mma (the probabilities' sum is of the plain ones); the output is divided by
// VALUE_UNIT in the end. So a scale that is NaN reaches the rows that see its position, and no other. The mma's channels of a score are
// those of a lane side by side (KEY_STEP), and its columns of values are even channels, then odd ones (PAIR): orders of their own.
// Defines: HEAD_DIM, a multiple of 16 up to 256; those of attention_kinds.cuh.

constexpr int KV_TILE = 64, SPLIT_TILES = 4, THREADS = 128;
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
constexpr int STAGES = KV_BITS == 8 || HEAD_DIM <= 128 ? 2 : 1;
constexpr int STEPS = HEAD_DIM / 16;             // k16 steps of a score
constexpr int COLUMN_TILES = HEAD_DIM / 8;       // 8-wide tiles of the output; with integers in pairs from 16 channels
constexpr int OWN_COLUMNS = (COLUMN_TILES / PAIR + 3) / 4 * PAIR;
constexpr int BLOCKS = HEAD_DIM <= 64 ? 4 : HEAD_DIM <= 128 ? 3 : 2;  // that a multiprocessor should hold
constexpr float FAR = -1e30f;
enum {
    SCALE_BYTES = KV_BITS == 8 ? KV_TILE * 2 : 0,  // of a tile
    TILE_AND_SCALES = TILE_BYTES + SCALE_BYTES,
    // Channels of a score's k16 step from lane to lane, and from a lane's first two to its other two.
    KEY_STEP = KV_BITS == 8 ? 4 : 2,
    KEY_HALF = KV_BITS == 8 ? 2 : 8,
};

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if SOFTCAP
// With tanh(x) = 1 - 2 / (1 + exp(2 x)): as close as float32 to the cap, which is what counts beside other scores.
DEVICE float capped(float s, float scale_log2e, float cap_log2e) {
    const float e = exp2_fast(__fmul_rn(s, scale_log2e));
    return __fmul_rn(cap_log2e, __fsub_rn(1.f, __fdiv_rn(2.f, __fadd_rn(1.f, e))));
}
#endif

#if SINKS
DEVICE float sink_log2e(const float* sinks, int head) { return __fmul_rn(sinks[head], 1.4426950408889634f); }
#endif

// Tile starts: the first row, a new sequence, and every position divisible by `most`: a row knows by itself whether it starts one.
extern "C" __global__ void __launch_bounds__(1024)
    query_tiles(const int* positions, const int* sequences, int* tiles, int rows, int most, int max_tiles) {
    __shared__ int warp_totals[32];
    __shared__ int base;
    let_next_start();
    after_previous();
    if (threadIdx.x == 0) base = 0;
    __syncthreads();
    for (int first = 0; first < rows; first += 1024) {
        const int row = first + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const bool starts = row < rows && (row == 0 || sequences[row] != sequences[row - 1] || positions[row] % most == 0);
        const u32 votes = __ballot_sync(~0u, starts);
        if (lane == 0) warp_totals[warp] = __popc(votes);
        __syncthreads();
        int place = base + __popc(votes & ((1u << lane) - 1));
        for (int w = 0; w < warp; w++) place += warp_totals[w];
        if (starts) {
            int count = 1;
            while (count < most && row + count < rows && sequences[row + count] == sequences[row] && positions[row + count] % most != 0)
                count++;
            tiles[place * 2] = row;
            tiles[place * 2 + 1] = count;
        }
        __syncthreads();
        if (threadIdx.x == 0)
            for (int w = 0; w < 32; w++) base += warp_totals[w];
        __syncthreads();
    }
    for (int t = base + threadIdx.x; t < max_tiles; t += 1024) tiles[t * 2 + 1] = 0;
}

DEVICE float weight_of(float s, float highest) {
#if WINDOW
    // Before its window a row has seen nothing, and nothing stands out.
    return s == FAR ? 0.f : exp2_fast(s - highest);
#else
    return exp2_fast(s - highest);
#endif
}

#if KV_BITS == 8
constexpr float VALUE_UNIT = 64.f;  // with scales up to 512 no product is beyond half precision
DEVICE float quotient(float f, float l) { return __fmul_rn(__fdiv_rn(f, l), 1.f / VALUE_UNIT); }

// Four integers of a word as halves: bytes 0 and 1, 2 and 3 (ORDER 0x4140, 0x4342), or 0 and 2, 1 and 3 (0x4240, 0x4341).
template <u32 ORDER>
DEVICE u32 halves_of(u32 word) {
    return half2_sub(__byte_perm(word ^ 0x80808080u, 0x64646464u, ORDER), 0x64806480u);  // 1024 + 128 + q, exactly
}
#else
DEVICE float quotient(float f, float l) { return __fdiv_rn(f, l); }
#endif

struct Merged {
    float m[2], l[2], f[OWN_COLUMNS][4];
};

// Add a split's (m, l, o) to what came before it.
DEVICE void merge(float& M, float& L, float m, float l, float& keep, float& add) {
    const float top = fmaxf(M, m);
    keep = exp2_fast(M - top);
    add = exp2_fast(m - top);
    M = top;
    L = __fmaf_rn(L, keep, __fmul_rn(l, add));
}

struct Result {
    float* rows;     // [rows][Hq * HEAD_DIM], HEAD_DIM not a multiple of 32
    u32* fragments;  // otherwise
    float* sums;
    int KB;
};

// One row's 32 channels from `channel` on, a channel a lane.
DEVICE void store_32(const Result& result, int row, int channel, float v) {
    const int lane = threadIdx.x & 31, tile = row >> 3, column = row & 7, block = channel >> 6;
    const float next = __shfl_down_sync(~0u, v, 1);
    const int k = (channel + lane) & 63;
    if ((lane & 1) == 0)
        result.fragments[(((size_t)tile * result.KB + block) * 64 + (k >> 3) * 8 + column) * 4 + ((k & 7) >> 1)] = floats_to_half2(v, next);
    // The order of activation.cu: 4 channels ascending, then a tree over 8.
    const float seen = half_to_float(float_to_half(v));
    float sum = 0.f;
    UNROLL for (int j = 0; j < 4; j++) sum = __fadd_rn(sum, __shfl_sync(~0u, seen, (lane & 7) * 4 + j));
    UNROLL for (int d = 1; d < 8; d <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    if (lane == 0) result.sums[(((size_t)tile * result.KB + block) * 2 + ((channel >> 5) & 1)) * 8 + column] = sum;
}

// All channels of one row and head, 32 a time, by one warp; f[j] is channel j * 32 + lane.
DEVICE void store_head(const Result& result, int row, int channels, int head, const float* f) {
    UNROLL for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) {
        const int d = j * 32 + (threadIdx.x & 31);
        if (HEAD_DIM % 32 == 0) store_32(result, row, head * HEAD_DIM + j * 32, f[j]);
        else if (d < HEAD_DIM) result.rows[(size_t)row * channels + head * HEAD_DIM + d] = f[j];
    }
}

template <bool WHOLE>
DEVICE void attend(const float* qkv, const Stored* keys, const Stored* values, const int* tiles, const int* positions,
                   const int* sequences, const int* block_tables, float* partial, u32* arrived, const Result& result,
                   int table_width, int block_shift, int G, int kv_heads, int max_splits, float scale_log2e WINDOW_PARAMETER CAP_PARAMETER
                       SINKS_PARAMETER SCALES_PARAMETER) {
    extern __shared__ __align__(16) u8 shared[];  // STAGES x (keys, values, scales of keys, of values)
    __shared__ u32 probabilities[16 * 36];
#if KV_BITS == 8
    __shared__ u32 scaled[16 * 36];
#endif
    __shared__ float maxima[4 * 16];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, group_row = lane >> 2;
    let_next_start();
    after_previous();
    const int first_row = tiles[blockIdx.z * 2], count = tiles[blockIdx.z * 2 + 1];
    if (count == 0) return;
    const int length = positions[first_row + count - 1] + 1;
    const int splits = (length + KV_TILE * SPLIT_TILES - 1) / (KV_TILE * SPLIT_TILES);
#if WINDOW
    const int begin = max(positions[first_row] - window + 1, 0), begin_split = begin / (KV_TILE * SPLIT_TILES);
    if (!WHOLE && begin_split + blockIdx.x >= splits) return;
    const bool alone = WHOLE || splits - begin_split == 1;
#else
    constexpr int begin_split = 0;
    if (!WHOLE && blockIdx.x >= splits) return;  // and is not waited for
    const bool alone = WHOLE || splits == 1;
#endif
    const int* table = block_tables + (size_t)sequences[first_row] * table_width;
    const int block_mask = (1 << block_shift) - 1;

    auto load = [&](int stage, int tile) {
        const u32 to = shared_address(shared + stage * 2 * TILE_AND_SCALES);
        constexpr int CHUNKS = HEAD_DIM * (int)sizeof(Stored) / 16;
        for (int id = threadIdx.x; id < KV_TILE * CHUNKS; id += THREADS) {
            const int r = id / CHUNKS, c = id % CHUNKS, p = tile * KV_TILE + r;
#if WINDOW
            const bool there = p >= begin && p < length;
#else
            const bool there = p < length;
#endif
            const size_t block = there ? table[p >> block_shift] : 0;
            const size_t at = (((block * kv_heads + head) << block_shift) + (p & block_mask)) * HEAD_DIM + c * (16 / (int)sizeof(Stored));
            copy_async_16(to + r * ROW_BYTES + c * 16, keys + (there ? at : 0), there ? 16 : 0);
            copy_async_16(to + TILE_BYTES + r * ROW_BYTES + c * 16, values + (there ? at : 0), there ? 16 : 0);
        }
#if KV_BITS == 8
        // Of 8 positions at once: of those that nobody sees, in the same block, whatever is there.
        if (threadIdx.x < KV_TILE / 4) {
            const int r = threadIdx.x % (KV_TILE / 8) * 8, p = tile * KV_TILE + r;
            const bool is_value = threadIdx.x >= KV_TILE / 8;
#if WINDOW
            const bool there = p + 7 >= begin && p < length;
#else
            const bool there = p < length;
#endif
            const size_t block = there ? table[p >> block_shift] : 0;
            const size_t at = ((block * kv_heads + head) << block_shift) + (p & block_mask);
            copy_async_16(to + 2 * TILE_BYTES + (is_value ? SCALE_BYTES : 0) + r * 2, (is_value ? value_scales : key_scales) + (there ? at : 0),
                          there ? 16 : 0);
        }
#endif
        copy_commit();
    };
    const int first_split = WHOLE ? begin_split : begin_split + blockIdx.x;
    load(0, first_split * SPLIT_TILES);
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

    Merged merged;
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

    for (int split = first_split; split < splits; split += WHOLE ? 1 : gridDim.x) {
        const int tile0 = split * SPLIT_TILES;
        const int num_tiles = min((length - tile0 * KV_TILE + KV_TILE - 1) / KV_TILE, SPLIT_TILES);
        if (split != first_split) load(0, tile0);
        float o[OWN_COLUMNS][4], sum[4] = {0.f, 0.f, 0.f, 0.f}, m[2] = {FAR, FAR};
        UNROLL for (int n = 0; n < OWN_COLUMNS; n++) UNROLL for (int e = 0; e < 4; e++) o[n][e] = 0.f;
        for (int t = 0; t < num_tiles; t++) {
            const int stage = STAGES == 2 ? t & 1 : 0;
            if (STAGES == 2) {
                if (t + 1 < num_tiles) load(stage ^ 1, tile0 + t + 1);
                else copy_commit();
                copy_wait<1>();
            } else {
                if (t > 0) load(0, tile0 + t);
                copy_wait<0>();
            }
            __syncthreads();
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
            const u32* scale_pairs = (const u32*)(shared + stage * 2 * TILE_AND_SCALES + 2 * TILE_BYTES) + warp * 8 + (lane & 3);
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
                const int p = (tile0 + t) * KV_TILE + warp * 16 + n * 8 + (lane & 3) * 2 + (e & 1);
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
                    const u32 pair = scale_pairs[SCALE_BYTES / 4 + n * 4];
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
            __syncthreads();
        }
        if (alone) {
            float keep[2], add[2];
            UNROLL for (int h = 0; h < 2; h++) merge(merged.m[h], merged.l[h], m[h], sum[h * 2], keep[h], add[h]);
            UNROLL for (int n = 0; n < OWN_COLUMNS; n++) UNROLL for (int e = 0; e < 4; e++)
                merged.f[n][e] = __fmaf_rn(merged.f[n][e], keep[e >> 1], __fmul_rn(o[n][e], add[e >> 1]));
            continue;
        }
        UNROLL for (int h = 0; h < 2; h++) {
            const int i = group_row + h * 8;
            if (i >= count * G) continue;
            const size_t row = ((size_t)(first_row + i / G) * kv_heads + head) * G + i % G;
            float* to = partial + (row * max_splits + split) * (HEAD_DIM + 2);
            UNROLL for (int n = 0; n < OWN_COLUMNS; n++) {
                const int column = warp + n / PAIR * 4;
                if (column < COLUMN_TILES / PAIR) UNROLL for (int e = 0; e < 2; e++)
                    to[column * (8 * PAIR) + (lane & 3) * (2 * PAIR) + n % PAIR + e * PAIR] = o[n][h * 2 + e];
            }
            if (warp == 0 && (lane & 3) == 0) {
                to[HEAD_DIM] = m[h];
                to[HEAD_DIM + 1] = sum[h * 2];
            }
        }
    }
    const int query_heads = kv_heads * G;
    if (alone) {
        // Through shared memory, so that one warp has a row's channels side by side.
        __syncthreads();
        float* heads = (float*)shared;  // [16][HEAD_DIM]
        UNROLL for (int h = 0; h < 2; h++) UNROLL for (int n = 0; n < OWN_COLUMNS; n++) {
            const int column = warp + n / PAIR * 4;
            if (column < COLUMN_TILES / PAIR) UNROLL for (int e = 0; e < 2; e++)
                heads[(group_row + h * 8) * HEAD_DIM + column * (8 * PAIR) + (lane & 3) * (2 * PAIR) + n % PAIR + e * PAIR] =
                    quotient(merged.f[n][h * 2 + e], merged.l[h]);
        }
        __syncthreads();
        for (int i = warp; i < count * G; i += 4) {
            float f[(HEAD_DIM + 31) / 32];
            UNROLL for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) f[j] = j * 32 + lane < HEAD_DIM ? heads[i * HEAD_DIM + j * 32 + lane] : 0.f;
            store_head(result, first_row + i / G, query_heads * HEAD_DIM, head * G + i % G, f);
        }
        return;
    }
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = arrived + blockIdx.z * kv_heads + head;
        last = atomicAdd(counter, 1u) == (u32)min(splits - begin_split, (int)gridDim.x) - 1;
        if (last) *counter = 0;  // for the next launch
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = warp; i < count * G; i += 4) {
        const int row = first_row + i / G, used = positions[row] / (KV_TILE * SPLIT_TILES) + 1;
        const size_t at = ((size_t)row * kv_heads + head) * G + i % G;
        const float* from = partial + (at * max_splits + begin_split) * (HEAD_DIM + 2);
#if SINKS
        float M = sink_log2e(sinks, head * G + i % G), L = 1.f, F[(HEAD_DIM + 31) / 32] = {};
#else
        float M = FAR, L = 0.f, F[(HEAD_DIM + 31) / 32] = {};
#endif
        for (int s = begin_split; s < used; s++, from += HEAD_DIM + 2) {
            float keep, add;
            merge(M, L, __ldcg(from + HEAD_DIM), __ldcg(from + HEAD_DIM + 1), keep, add);
            UNROLL for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) {
                const int d = j * 32 + lane;
                if (d < HEAD_DIM) F[j] = __fmaf_rn(F[j], keep, __fmul_rn(__ldcg(from + d), add));
            }
        }
        UNROLL for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) F[j] = quotient(F[j], L);
        store_head(result, row, query_heads * HEAD_DIM, head * G + i % G, F);
    }
}

#define ATTEND(name, WHOLE)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                        \
        name(const float* qkv, const Stored* keys, const Stored* values, const int* tiles, const int* positions,         \
             const int* sequences, const int* block_tables, float* partial, u32* arrived, float* rows, u32* fragments,   \
             float* sums, int KB, int table_width, int block_shift, int G, int kv_heads, int max_splits,                 \
             float scale_log2e WINDOW_PARAMETER CAP_PARAMETER SINKS_PARAMETER SCALES_PARAMETER) {                        \
        attend<WHOLE>(qkv, keys, values, tiles, positions, sequences, block_tables, partial, arrived,                    \
                      {rows, fragments, sums, KB}, table_width, block_shift, G, kv_heads, max_splits,                    \
                      scale_log2e WINDOW_ARGUMENT CAP_ARGUMENT SINKS_ARGUMENT SCALES_ARGUMENT);                          \
    }
ATTEND(attend_rows, true)
ATTEND(attend_splits, false)
