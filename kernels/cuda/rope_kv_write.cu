// Queries and keys turned by their absolute position, keys and values written to the paged cache in half precision.
//
// qkv [rows, (Hq + 2 Hkv) * HEAD_DIM] float32: query heads are turned in place; key heads are turned and, like the value heads,
// written to the cache at the row's slot. With norms, query and key heads are RMS-normalised over HEAD_DIM first (Qwen3).
// Cache [blocks][Hkv][block size][HEAD_DIM]; slot = block * block size + offset. Values beyond half precision are held at its ends.
// With halves, a NaN or an infinity in a head's key or value makes all of its key NaN, and of its value zero: then each row that sees the
// position has a score that is NaN, and to a row that does not, but shares its tile, the value adds 0 * 0. (0 * NaN would be NaN.)
// cos, sin [positions][rotary / 2]; INTERLEAVED pairs channels (2i, 2i + 1), else (i, i + rotary / 2).
//
// With KV_BITS 8 the cache is int8 with a half scale a head, [blocks][Hkv][block size]: the least s with 127 s >= the head's largest
// magnitude, at most 512; q = v / s to the nearest, ties to even. A head with a NaN or an infinity has q = 0 and s = NaN.
//
// grid (rows, Hq + Hkv); one warp a query head, or a key and its value. The norm's sum: lane d adds channels d, d + 32, ... ascending,
// then a fixed tree.
// Defines: HEAD_DIM up to 256, INTERLEAVED, NORMS; KV_BITS (16).

#ifndef KV_BITS
#define KV_BITS 16
#endif

constexpr int OWN = (HEAD_DIM + 31) / 32;

#if KV_BITS == 8
#define SCALES_PARAMETER , u16 *key_scales, u16 *value_scales
typedef u8 Stored;

// Of a head of which each lane has some; 0 elsewhere. As integers magnitudes ascend alike, and a NaN is the largest.
DEVICE u16 scale_of(const float* v) {
    u32 largest = 0;
    UNROLL for (int j = 0; j < OWN; j++) largest = max(largest, __float_as_uint(v[j]) & 0x7fffffffu);
    largest = __reduce_max_sync(~0u, largest);
    if (largest >= 0x7f800000u) return 0x7e00;
    const float magnitude = __uint_as_float(largest);
    u16 scale = float_to_half(__fdiv_rn(magnitude, 127.f));
    if (__fmul_rn(half_to_float(scale), 127.f) < magnitude) scale++;
    return scale < 0x6000 ? scale : 0x6000;
}

DEVICE u8 integer_of(float v, float scale) {
    const float q = fminf(fmaxf(__fdiv_rn(v, scale), -127.f), 127.f);
    return scale > 0.f ? (u8)__float_as_uint(__fadd_rn(q, 12582912.f)) : 0;  // 1.5 * 2^23 leaves the nearest integer in the low bits
}

// Integers and scale of a head.
DEVICE void store(Stored* to, u16* scale_to, const float* v) {
    const int lane = threadIdx.x;
    const u16 scale = scale_of(v);
    if (lane == 0) *scale_to = scale;
    UNROLL for (int j = 0; j < OWN; j++) if (j * 32 + lane < HEAD_DIM) to[j * 32 + lane] = integer_of(v[j], half_to_float(scale));
}
#else
#define SCALES_PARAMETER
typedef u16 Stored;

DEVICE bool is_finite(float v) { return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u; }

// Of a head of which each lane has some; 0 elsewhere.
DEVICE bool all_finite(const float* v) {
    bool finite = true;
    UNROLL for (int j = 0; j < OWN; j++) finite = finite && is_finite(v[j]);
    return __all_sync(~0u, finite);
}

DEVICE u16 saturated_half(float v) { return float_to_half(fminf(fmaxf(v, -65504.f), 65504.f)); }
#endif

extern "C" __global__ void __launch_bounds__(32)
    rope_kv_write(float* qkv, const int* positions, const int* slots, const float* cos, const float* sin, Stored* keys, Stored* values,
                  const float* q_norm, const float* k_norm, float eps, int query_heads, int kv_heads, int rotary, int block_shift SCALES_PARAMETER) {
    __shared__ float head[HEAD_DIM];
    const int row = blockIdx.x, h = blockIdx.y, lane = threadIdx.x;
    float* at = qkv + ((size_t)row * (query_heads + 2 * kv_heads) + h) * HEAD_DIM;
    const bool is_query = h < query_heads;
    let_next_start();
    after_previous();
    float v[OWN], value[OWN];
    UNROLL for (int j = 0; j < OWN; j++) {
        const bool there = j * 32 + lane < HEAD_DIM;
        v[j] = there ? at[j * 32 + lane] : 0.f;
        value[j] = there && !is_query ? at[kv_heads * HEAD_DIM + j * 32 + lane] : 0.f;
    }
#if NORMS
    float squares = 0.f;
    UNROLL for (int j = 0; j < OWN; j++) squares = __fmaf_rn(v[j], v[j], squares);
    UNROLL for (int d = 16; d > 0; d >>= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
    const float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)HEAD_DIM), eps)));
    const float* weight = is_query ? q_norm : k_norm;
    UNROLL for (int j = 0; j < OWN; j++)
        if (j * 32 + lane < HEAD_DIM) v[j] = __fmul_rn(__fmul_rn(v[j], factor), weight[j * 32 + lane]);
#endif
    UNROLL for (int j = 0; j < OWN; j++) if (j * 32 + lane < HEAD_DIM) head[j * 32 + lane] = v[j];
    __syncwarp();
    const float *c = cos + (size_t)positions[row] * (rotary / 2), *s = sin + (size_t)positions[row] * (rotary / 2);
    UNROLL for (int j = 0; j < OWN; j++) {
        const int d = j * 32 + lane;
        if (d >= rotary) continue;
#if INTERLEAVED
        const int pair = d >> 1, other = d ^ 1;
        const bool first = (d & 1) == 0;
#else
        const bool first = d < rotary / 2;
        const int pair = first ? d : d - rotary / 2, other = first ? d + rotary / 2 : d - rotary / 2;
#endif
        const float turned = __fmul_rn(head[other], s[pair]);
        v[j] = __fmaf_rn(v[j], c[pair], first ? -turned : turned);
    }
    if (is_query) {
        UNROLL for (int j = 0; j < OWN; j++) if (j * 32 + lane < HEAD_DIM) at[j * 32 + lane] = v[j];
        return;
    }
    const int slot = slots[row], kv_head = h - query_heads;
    const size_t place = ((((size_t)(slot >> block_shift) * kv_heads + kv_head) << block_shift) + (slot & ((1 << block_shift) - 1)));
#if KV_BITS == 8
    store(keys + place * HEAD_DIM, key_scales + place, v);
    store(values + place * HEAD_DIM, value_scales + place, value);
#else
    const bool value_finite = all_finite(value), spoiled = !all_finite(v) || !value_finite;
    UNROLL for (int j = 0; j < OWN; j++) {
        const int d = j * 32 + lane;
        if (d >= HEAD_DIM) continue;
        keys[place * HEAD_DIM + d] = spoiled ? 0x7e00 : saturated_half(v[j]);
        values[place * HEAD_DIM + d] = value_finite ? saturated_half(value[j]) : 0;
    }
#endif
}
