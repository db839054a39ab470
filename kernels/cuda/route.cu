// A router: float32 logits of every row and expert, then each row's experts by the rule of kernels/experts.py.
//
// Logit = (sum over k of x[k] * router[e, k]) * the row's scale, then the bias. Order of the sum: 32 chains of fused multiply-adds, one for
// each k / 8 mod 32, k ascending; then a fixed tree over the chains. It is a function of K alone, the same in both kernels.
//
// Choosing, one warp a row: maxima of (score + choice bias, lowest id) are exact, the softmax's sum and the sum of the chosen are in a fixed
// order. A NaN is the smallest of all, so a row that has one still gets different experts, and NaN shares.
//
// route_few: grid (ceil(experts / 4), ceil(rows / 8)), 128 threads; a warp has one expert and up to 8 rows, a lane one chain of each.
// route_many: grid (ceil(experts / 16), ceil(rows / 8)), 128 threads; a warp has 4 experts and 8 rows, a lane 8 chains of one row.
// The last block of 8 rows to be done chooses for them.
//
// x [rows / 8][KB][8][8 rows] x 16 bytes and x_scale [rows], see linear.cu; router [experts, K] float32, K a multiple of 8; bias,
// choice_bias [experts] or null. logits: scratch, [rows, experts]. expert_ids, shares [rows, chosen].
// Defines: LANE_EXPERTS, at least experts / 32, a power of two up to 16; SCORING 0 softmax, 1 sigmoid, 2 softmax of the chosen.
// Limits: 512 experts, 32 chosen, 32 groups.

constexpr int ROWS = 8, WARPS = 4, CHAINS = 32;
constexpr u32 EXCLUDED = 0;  // below every key

struct Rule {
    int experts, chosen, groups, groups_kept, normalise;
    float scale;
};

// Eight consecutive channels of an expert times eight of a row, onto a chain.
DEVICE float multiply_octet(const float4& low, const float4& high, const uint4& x, float sum) {
    UNROLL for (int i = 0; i < 4; i++) {
        const u32 pair = i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
        const float4& w = i < 2 ? low : high;
        sum = __fmaf_rn(i & 1 ? w.z : w.x, half_to_float((u16)(pair & 0xffff)), sum);
        sum = __fmaf_rn(i & 1 ? w.w : w.y, half_to_float((u16)(pair >> 16)), sum);
    }
    return sum;
}

// -- choosing ---------------------------------------------------------------------------------------------------------------

// Larger floats get larger keys, both zeros one; a NaN gets the smallest.
DEVICE u32 key_of(float v) {
    const u32 bits = __float_as_uint(__fadd_rn(v, 0.f));
    return v != v ? 1u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE u32 warp_max(u32 v) {
    UNROLL for (int d = 16; d > 0; d >>= 1) v = max(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

DEVICE float warp_sum(float v) {
    UNROLL for (int d = 16; d > 0; d >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

DEVICE float warp_largest(float v) {
    UNROLL for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// The expert of the largest key from `first` to `end`, the lowest of equals; a lane has experts lane, lane + 32, ...
DEVICE int best(const u32 (&keys)[LANE_EXPERTS], int first, int end) {
    const int lane = threadIdx.x & 31;
    u32 key = EXCLUDED;
    int id = end;
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) {
        const int e = i * 32 + lane;
        if (e >= first && e < end && keys[i] > key) {
            key = keys[i];
            id = e;
        }
    }
    const u32 top = warp_max(key);
    return (int)~warp_max(key == top && top != EXCLUDED ? ~(u32)id : 0u);
}

DEVICE void exclude(u32 (&keys)[LANE_EXPERTS], int expert) {
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) if (i * 32 + (threadIdx.x & 31) == expert) keys[i] = EXCLUDED;
}

// Only the best groups stay: a group is worth the sum of its two best choices. `choices` has them by expert.
DEVICE void keep_groups(u32 (&keys)[LANE_EXPERTS], const float* choices, const Rule& rule) {
    const int lane = threadIdx.x & 31, size = rule.experts / rule.groups;
    u32 own = EXCLUDED;  // lane g has group g's worth
    for (int g = 0; g < rule.groups; g++) {
        const int first = g * size, one = best(keys, first, first + size);
        float worth = choices[one];
        if (size > 1) {
            u32 others[LANE_EXPERTS];
            UNROLL for (int i = 0; i < LANE_EXPERTS; i++) others[i] = keys[i];
            exclude(others, one);
            worth = __fadd_rn(worth, choices[best(others, first, first + size)]);
        }
        if (lane == g) own = key_of(worth);
    }
    u32 kept = 0;
    for (int j = 0; j < rule.groups_kept; j++) {
        const u32 top = warp_max(own);
        const int g = __ffs(__ballot_sync(~0u, own == top)) - 1;
        kept |= 1u << g;
        if (lane == g) own = EXCLUDED;
    }
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) {
        const int e = i * 32 + lane;
        if (e < rule.experts && !(kept >> (e / size) & 1)) keys[i] = EXCLUDED;
    }
}

// One row by one warp. `scores` and `choices` are the warp's own shared memory.
DEVICE void choose(const float* logits, const float* choice_bias, const Rule& rule, float* scores, float* choices, int* ids, float* shares) {
    const int lane = threadIdx.x & 31;
    float score[LANE_EXPERTS];
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) score[i] = i * 32 + lane < rule.experts ? __ldcg(logits + i * 32 + lane) : 0.f;
#if SCORING == 0
    float top = __uint_as_float(0xff800000u), sum = 0.f;
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) if (i * 32 + lane < rule.experts) top = fmaxf(top, score[i]);
    top = warp_largest(top);
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) if (i * 32 + lane < rule.experts) {
        score[i] = expf(__fsub_rn(score[i], top));
        sum = __fadd_rn(sum, score[i]);
    }
    sum = warp_sum(sum);
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) score[i] = __fdiv_rn(score[i], sum);
#elif SCORING == 1
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) score[i] = __fdiv_rn(1.f, __fadd_rn(1.f, expf(-score[i])));
#endif
    u32 keys[LANE_EXPERTS];
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) {
        const int e = i * 32 + lane;
        const bool there = e < rule.experts;
        const float choice = there && choice_bias ? __fadd_rn(score[i], choice_bias[e]) : score[i];
        keys[i] = there ? key_of(choice) : EXCLUDED;
        if (there) {
            scores[e] = score[i];
            choices[e] = choice;
        }
    }
    __syncwarp();
    if (rule.groups_kept < rule.groups) keep_groups(keys, choices, rule);
    int id = 0;  // lane j has the j-th best
    for (int j = 0; j < rule.chosen; j++) {
        const int one = best(keys, 0, rule.experts);
        exclude(keys, one);
        if (lane == j) id = one;
    }
    float share = lane < rule.chosen ? scores[id] : 0.f;
#if SCORING == 2
    const float highest = warp_largest(lane < rule.chosen ? share : __uint_as_float(0xff800000u));
    share = lane < rule.chosen ? expf(__fsub_rn(share, highest)) : 0.f;
#endif
    if (SCORING == 2 || rule.normalise) {
        float total = 0.f;
        for (int j = 0; j < rule.chosen; j++) total = __fadd_rn(total, __shfl_sync(~0u, share, j));
        share = __fdiv_rn(share, total);
    }
    if (lane < rule.chosen) {
        ids[lane] = id;
        shares[lane] = __fmul_rn(share, rule.scale);
    }
}

// The last block of these rows chooses for them.
DEVICE void finish(const float* logits, const float* choice_bias, const Rule& rule, int rows, u32* arrived, int* expert_ids, float* shares) {
    __shared__ float scores[WARPS][LANE_EXPERTS * 32], choices[WARPS][LANE_EXPERTS * 32];
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived + blockIdx.y, 1u) == gridDim.x - 1;
        if (last) arrived[blockIdx.y] = 0;  // for the next launch
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const int warp = threadIdx.x >> 5;
    for (int row = blockIdx.y * ROWS + warp; row < min(rows, (int)(blockIdx.y + 1) * ROWS); row += WARPS) {
        __syncwarp();
        choose(logits + (size_t)row * rule.experts, choice_bias, rule, scores[warp], choices[warp],
               expert_ids + (size_t)row * rule.chosen, shares + (size_t)row * rule.chosen);
    }
}

#define ARGUMENTS                                                                                                          \
    const uint4 *x, const float *x_scale, const float *router, const float *bias, const float *choice_bias, float *logits, u32 *arrived, \
        int *expert_ids, float *shares, int rows, int K, int KB, int experts, int chosen, int groups, int groups_kept, int normalise,  \
        float scale

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) route_few(ARGUMENTS) {
    const int lane = threadIdx.x & 31, expert = blockIdx.x * WARPS + (threadIdx.x >> 5), first = blockIdx.y * ROWS;
    const float4* w = (const float4*)(router + (size_t)min(expert, experts - 1) * K);
    let_next_start();
    for (int i = lane * 8; i < K / 4; i += 32 * 8) prefetch_l2(w + i);
    after_previous();
    const uint4* tile = x + (size_t)blockIdx.y * KB * 64;
    const int count = min(rows - first, ROWS);
    float sums[ROWS] = {};
    for (int o = lane; o < K / 8; o += CHAINS) {
        const float4 low = w[o * 2], high = w[o * 2 + 1];
        UNROLL for (int r = 0; r < ROWS; r++) if (r < count) sums[r] = multiply_octet(low, high, tile[o * 8 + r], sums[r]);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        float v = sums[r];
        // Chains that differ in bits 2, 3, 4, then 0, 1.
        UNROLL for (int b = 0; b < 5; b++) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, 1 << ((b + 2) % 5)));
        if (lane != 0 || r >= count || expert >= experts) continue;
        v = __fmul_rn(v, x_scale[first + r]);
        logits[(size_t)(first + r) * experts + expert] = bias ? __fadd_rn(v, bias[expert]) : v;
    }
    finish(logits, choice_bias, {experts, chosen, groups, groups_kept, normalise, scale}, rows, arrived, expert_ids, shares);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) route_many(ARGUMENTS) {
    constexpr int OWN = 4, EVERY = CHAINS / 8;  // experts a warp; lanes that share a row
    const int lane = threadIdx.x & 31, r = lane & 7, quarter = lane >> 3, row = blockIdx.y * ROWS + r;
    const int expert0 = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * OWN;
    const float4* w[OWN];
    UNROLL for (int e = 0; e < OWN; e++) w[e] = (const float4*)(router + (size_t)min(expert0 + e, experts - 1) * K);
    let_next_start();
    after_previous();
    const uint4* own = x + (size_t)blockIdx.y * KB * 64 + r;
    float sums[OWN][8] = {};
    for (int o0 = quarter; o0 < K / 8; o0 += CHAINS) {
        UNROLL for (int i = 0; i < 8; i++) {
            const int o = o0 + i * EVERY;
            if (o >= K / 8) continue;
            const uint4 v = own[o * 8];
            UNROLL for (int e = 0; e < OWN; e++) sums[e][i] = multiply_octet(w[e][o * 2], w[e][o * 2 + 1], v, sums[e][i]);
        }
    }
    UNROLL for (int e = 0; e < OWN; e++) {
        float* s = sums[e];
        float v = __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3])), __fadd_rn(__fadd_rn(s[4], s[5]), __fadd_rn(s[6], s[7])));
        UNROLL for (int d = 8; d < 32; d <<= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
        if (quarter != 0 || row >= rows || expert0 + e >= experts) continue;
        v = __fmul_rn(v, x_scale[row]);
        logits[(size_t)row * experts + expert0 + e] = bias ? __fadd_rn(v, bias[expert0 + e]) : v;
    }
    finish(logits, choice_bias, {experts, chosen, groups, groups_kept, normalise, scale}, rows, arrived, expert_ids, shares);
}
