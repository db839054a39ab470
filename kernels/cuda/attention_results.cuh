// How attention.cu weighs scores, merges splits, and writes what comes out.

constexpr float FAR = -1e30f;
constexpr int LANE_CHANNELS = (HEAD_DIM + 31) / 32;  // of a row, where a warp has all of it: channels j * 32 + lane

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
    UNROLL for (int j = 0; j < LANE_CHANNELS; j++) {
        const int d = j * 32 + (threadIdx.x & 31);
        if (HEAD_DIM % 32 == 0) store_32(result, row, head * HEAD_DIM + j * 32, f[j]);
        else if (d < HEAD_DIM) result.rows[(size_t)row * channels + head * HEAD_DIM + d] = f[j];
    }
}

// What splits leave behind for a row and query head: their o [max_splits][HEAD_DIM], then their (m, l) [max_splits][2].
DEVICE float* partial_of(float* partial, size_t row_head, int max_splits) { return partial + row_head * max_splits * (HEAD_DIM + 2); }

// The splits `first` to `end` - 1 of one row and head merged in ascending order, by one warp; `sink`: what comes before them, if anything.
// A lane has a split's (m, l) first, then its own channels. f: the quotients.
DEVICE void merge_splits(const float* partial, int max_splits, int first, int end, const float* sink, float* f) {
    constexpr int AHEAD = LANE_CHANNELS <= 4 ? 16 : 4;  // as the registers allow
    const int lane = threadIdx.x & 31;
    const float* pairs = partial + (size_t)max_splits * HEAD_DIM;
    float M = sink ? *sink : FAR, L = sink ? 1.f : 0.f;
    UNROLL for (int j = 0; j < LANE_CHANNELS; j++) f[j] = 0.f;
    for (int from = first; from < end; from += 32) {
        const int count = min(end - from, 32);
        // Nothing changes a maximum less than FAR.
        const float m = lane < count ? __ldcg(pairs + (from + lane) * 2) : FAR, l = lane < count ? __ldcg(pairs + (from + lane) * 2 + 1) : 0.f;
        float top = m;
        UNROLL for (int d = 1; d < 32; d <<= 1) {
            const float before = __shfl_up_sync(~0u, top, d);
            if (lane >= d) top = fmaxf(before, top);
        }
        top = fmaxf(M, top);
        float before = __shfl_up_sync(~0u, top, 1);
        if (lane == 0) before = M;
        const float keep = exp2_fast(before - top), add = exp2_fast(m - top), added = __fmul_rn(l, add);
        M = __shfl_sync(~0u, top, 31);
        for (int part = 0; part < count; part += AHEAD) {
            float o[AHEAD][LANE_CHANNELS];
            UNROLL for (int s = 0; s < AHEAD; s++) UNROLL for (int j = 0; j < LANE_CHANNELS; j++) {
                const int d = j * 32 + lane;
                const bool there = part + s < count && (HEAD_DIM % 32 == 0 || d < HEAD_DIM);
                o[s][j] = there ? __ldcg(partial + (size_t)(from + part + s) * HEAD_DIM + d) : 0.f;
            }
            UNROLL for (int s = 0; s < AHEAD; s++) {
                const float k = __shfl_sync(~0u, keep, part + s), a = __shfl_sync(~0u, add, part + s);
                const float own = __shfl_sync(~0u, added, part + s);
                if (part + s >= count) continue;
                L = __fmaf_rn(L, k, own);
                UNROLL for (int j = 0; j < LANE_CHANNELS; j++) f[j] = __fmaf_rn(f[j], k, __fmul_rn(o[s][j], a));
            }
        }
    }
    UNROLL for (int j = 0; j < LANE_CHANNELS; j++) f[j] = quotient(f[j], L);
}
