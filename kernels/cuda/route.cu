// A router: float32 logits of every row and expert, then each row's experts by the rule of kernels/experts.py.
//
// Logit = (sum over k of x[k] * router[e, k]) * the row's scale, then the bias. Order of the sum: 32 chains of fused multiply-adds, one for
// each k / 8 mod 32, k ascending; then a fixed tree over the chains. It is a function of K alone, the same in all kernels.
//
// Choosing, one warp a row: maxima of (score + choice bias, lowest id) are exact, the softmax's sum and the sum of the chosen are in a fixed
// order. A NaN is the smallest of all, so a row that has one still gets different experts, and NaN shares.
//
// route_<experts>x<rows>: grid (ceil(experts / its experts), ceil(rows / its rows)), 256 threads, 64 in route_2x1. A warp has a few experts
// and rows, a lane one chain of each. The first 2048 channels of the weights are on their way before the kernel before has ended, and
// those of the rows as soon as it has. The last block of some rows to be done chooses for them. tables.py picks one.
//
// x [rows / 8][KB][8][8 rows] x 16 bytes and x_scale [rows], see linear.cu; router [experts, K] float32, K a multiple of 8; bias,
// choice_bias [experts] or null. logits: scratch, [rows, experts]. expert_ids, shares [rows, chosen].
// Defines: LANE_EXPERTS, at least experts / 32, a power of two up to 16; SCORING 0 softmax, 1 sigmoid, 2 softmax of the chosen.
// Limits: 512 experts, 32 chosen, 32 groups. Shared memory: tables.py, RouteVariant.shared_bytes.

constexpr int CHAINS = 32;
constexpr u32 EXCLUDED = 0;  // below every key

struct Rule {
    int experts, chosen, groups, groups_kept, normalise;
    float scale;
};

struct Pick {
    int id;
    float score;
};

// -- logits -----------------------------------------------------------------------------------------------------------------

// Eight consecutive channels of a row.
struct Octet {
    float v[8];
    DEVICE Octet(const uint4& x) {
        UNROLL for (int i = 0; i < 4; i++) {
            const u32 pair = i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
            v[2 * i] = half_to_float((u16)(pair & 0xffff));
            v[2 * i + 1] = half_to_float((u16)(pair >> 16));
        }
    }
};

// The same of an expert, times a row's, onto a chain.
struct Weights {
    float4 low, high;
    DEVICE float multiply(const Octet& x, float sum) const {
        sum = __fmaf_rn(low.y, x.v[1], __fmaf_rn(low.x, x.v[0], sum));
        sum = __fmaf_rn(low.w, x.v[3], __fmaf_rn(low.z, x.v[2], sum));
        sum = __fmaf_rn(high.y, x.v[5], __fmaf_rn(high.x, x.v[4], sum));
        return __fmaf_rn(high.w, x.v[7], __fmaf_rn(high.z, x.v[6], sum));
    }
};

// Step s adds chains that differ in one bit: 2, 3, 4, then 0, 1.
DEVICE constexpr int distance(int step) { return 1 << (step + 2) % 5; }

// Sums of N values over the lanes, by steps that halve what a lane is left with, so that each ends with one, which `sum_of` names.
template <int N, int STEP = 0>
DEVICE float add_chains(float* v) {
    if constexpr (STEP == 5)
        return v[0];
    else {
        constexpr int HALF = N / 2;
        const int d = distance(STEP);
        const bool upper = threadIdx.x & d;
        if constexpr (HALF == 0) v[0] = __fadd_rn(v[0], __shfl_xor_sync(~0u, v[0], d));
        UNROLL for (int i = 0; i < HALF; i++) {
            const float other = __shfl_xor_sync(~0u, upper ? v[i] : v[i + HALF], d);
            v[i] = __fadd_rn(upper ? v[i + HALF] : v[i], other);
        }
        return add_chains<HALF == 0 ? 1 : HALF, STEP + 1>(v);
    }
}

// Which of the values the lane has; -1 where another lane has it too.
template <int N>
DEVICE int sum_of(int lane) {
    int place = 0;
    for (int step = 0, half = N / 2; step < 5; step++, half /= 2) {
        if (!(lane & distance(step))) continue;
        if (half == 0) return -1;
        place += half;
    }
    return place;
}

// -- choosing ---------------------------------------------------------------------------------------------------------------

// Larger floats get larger keys, both zeros one; a NaN gets the smallest.
DEVICE u32 key_of(float v) {
    const u32 bits = __float_as_uint(__fadd_rn(v, 0.f));
    return v != v ? 1u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float value_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

DEVICE float warp_sum(float v) {
    UNROLL for (int d = 16; d > 0; d >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

struct Best {
    u32 key;
    int id;
};

// The largest key and its expert, the lowest of equals; a lane has experts lane, lane + 32, ... One at least is not EXCLUDED.
DEVICE Best best(const u32 (&keys)[LANE_EXPERTS]) {
    u32 key[LANE_EXPERTS];
    int place[LANE_EXPERTS];
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) {
        key[i] = keys[i];
        place[i] = i;
    }
    // Neighbours first, so that of equals the lower stays.
    UNROLL for (int d = 1; d < LANE_EXPERTS; d *= 2) {
        UNROLL for (int i = 0; i < LANE_EXPERTS; i++) if (i % (2 * d) == 0 && key[(i + d) % LANE_EXPERTS] > key[i]) {
            key[i] = key[(i + d) % LANE_EXPERTS];
            place[i] = place[(i + d) % LANE_EXPERTS];
        }
    }
    const u32 top = __reduce_max_sync(~0u, key[0]);
    const u32 id = key[0] == top ? place[0] * 32 + (threadIdx.x & 31) : ~0u;
    return {top, (int)__reduce_min_sync(~0u, id)};
}

// Only the best groups stay: a group is worth the sum of its two best choices.
DEVICE void keep_groups(u32 (&keys)[LANE_EXPERTS], const Rule& rule) {
    const int lane = threadIdx.x & 31, size = rule.experts / rule.groups;
    u32 own = EXCLUDED;  // lane g has group g's worth
    for (int g = 0; g < rule.groups; g++) {
        u32 there[LANE_EXPERTS];
        UNROLL for (int i = 0; i < LANE_EXPERTS; i++) {
            const int place = i * 32 + lane - g * size;
            there[i] = place >= 0 && place < size ? keys[i] : EXCLUDED;
        }
        const Best one = best(there);
        float worth = value_of(one.key);
        if (size > 1) {
            UNROLL for (int i = 0; i < LANE_EXPERTS; i++) if (i * 32 + lane == one.id) there[i] = EXCLUDED;
            worth = __fadd_rn(worth, value_of(best(there).key));
        }
        if (lane == g) own = key_of(worth);
    }
    u32 kept = 0;
    for (int j = 0; j < rule.groups_kept; j++) {
        const u32 top = __reduce_max_sync(~0u, own);
        const int g = __ffs(__ballot_sync(~0u, own == top)) - 1;
        kept |= 1u << g;
        if (lane == g) own = EXCLUDED;
    }
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) {
        const int e = i * 32 + lane;
        if (e < rule.experts && !(kept >> (e / size) & 1)) keys[i] = EXCLUDED;
    }
}

// One row by one warp. `picks` is the warp's own shared memory, one for each of the chosen.
DEVICE void choose(const float* logits, const float* choice_bias, const Rule& rule, Pick* picks, int* ids, float* shares) {
    const int lane = threadIdx.x & 31;
    float score[LANE_EXPERTS];
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) score[i] = i * 32 + lane < rule.experts ? __ldcg(logits + i * 32 + lane) : 0.f;
#if SCORING == 0
    // Experts that are not there add zeros, which change no bit.
    u32 highest = EXCLUDED;
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) highest = max(highest, i * 32 + lane < rule.experts ? key_of(score[i]) : EXCLUDED);
    const float top = value_of(__reduce_max_sync(~0u, highest));
    float sum = 0.f;
    UNROLL for (int i = 0; i < LANE_EXPERTS; i++) {
        const float e = expf(__fsub_rn(score[i], top));
        score[i] = i * 32 + lane < rule.experts ? e : 0.f;
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
        keys[i] = EXCLUDED;
        if (e < rule.experts) keys[i] = key_of(choice_bias ? __fadd_rn(score[i], choice_bias[e]) : score[i]);
    }
    if (rule.groups_kept < rule.groups) keep_groups(keys, rule);
    for (int j = 0; j < rule.chosen; j++) {
        const int one = best(keys).id;
        UNROLL for (int i = 0; i < LANE_EXPERTS; i++) {
            if (i * 32 + lane != one) continue;
            keys[i] = EXCLUDED;
            picks[j] = {one, score[i]};
        }
    }
    __syncwarp();
    Pick own = {0, 0.f};
    if (lane < rule.chosen) own = picks[lane];
    float share = own.score;
#if SCORING == 2
    const float most = value_of(__reduce_max_sync(~0u, lane < rule.chosen ? key_of(share) : EXCLUDED));
    share = lane < rule.chosen ? expf(__fsub_rn(share, most)) : 0.f;
#endif
    if (SCORING == 2 || rule.normalise) {
        float total = 0.f;
        // Four at once: lanes past the chosen have zeros, which change no bit.
        for (int j = 0; j < rule.chosen; j += 4) UNROLL for (int i = 0; i < 4; i++) total = __fadd_rn(total, __shfl_sync(~0u, share, j + i));
        share = __fdiv_rn(share, total);
    }
    if (lane < rule.chosen) {
        ids[lane] = own.id;
        shares[lane] = __fmul_rn(share, rule.scale);
    }
}

// -- kernels ----------------------------------------------------------------------------------------------------------------

#define ARGUMENTS                                                                                                          \
    const uint4 *x, const float *x_scale, const float *router, const float *bias, const float *choice_bias, float *logits, u32 *arrived, \
        int *expert_ids, float *shares, int rows, int K, int KB, int experts, int chosen, int groups, int groups_kept, int normalise,  \
        float scale

// A block has EXPERTS x ROWS, a warp OWN experts and ROWS / ROW_WARPS rows. K goes by in steps of one octet a chain; a stage is what the
// registers hold of the weights, and STAGES of the rows are in shared memory.
template <int EXPERTS, int ROWS, int OWN, int ROW_WARPS>
DEVICE void route(ARGUMENTS) {
    constexpr int R = ROWS / ROW_WARPS, WARPS = EXPERTS / OWN * ROW_WARPS, THREADS = WARPS * 32;
    constexpr int STEPS = 8 / OWN, STAGES = OWN + 1, STAGE = STEPS * CHAINS, VECTORS = STAGE * ROWS;
    constexpr int TILE = ROWS < 8 ? ROWS : 8;  // rows side by side
    static_assert(TILE % R == 0, "a warp's rows are in one tile");
    extern __shared__ uint4 staged[];  // [STAGES][ROWS / TILE][STAGE octets][TILE rows], the rows of octet o at r ^ o
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, octets = K / 8;
    const int expert0 = blockIdx.x * EXPERTS + warp / ROW_WARPS * OWN, row0 = warp % ROW_WARPS * R, first = blockIdx.y * ROWS;

    const Weights* from[OWN];
    UNROLL for (int e = 0; e < OWN; e++) from[e] = (const Weights*)(router + (size_t)min(expert0 + e, experts - 1) * K);
    Weights w[STEPS][OWN];
    auto load = [&](int step, int octet) {
        UNROLL for (int e = 0; e < OWN; e++) if (octet < octets) w[step][e] = from[e][octet];
    };
    // A thread copies of one row of each tile, every ROUND-th octet.
    constexpr int ROUND = THREADS / TILE;
    static_assert(STAGE % ROUND == 0 && ROUND % TILE == 0, "whole rounds, and the same bits of o in each");
    const int own_row = threadIdx.x % TILE, own_octet = threadIdx.x / TILE;
    const uint4* source = x + ((size_t)((first + own_row) / 8) * KB * 8 + own_octet) * 8 + (first + own_row) % 8;
    const u32 target = shared_address(staged) + (own_octet * TILE + (own_row ^ own_octet % TILE)) * 16;
    auto stage = [&](int s) {
        const u32 to = target + s % STAGES * VECTORS * 16;
        UNROLL for (int tile = 0; tile < ROWS / TILE; tile++) {
            const bool there = first + tile * TILE + own_row < rows;
            UNROLL for (int o = 0; o < STAGE; o += ROUND)
                if (there && s * STAGE + o + own_octet < octets)
                    copy_async_16(to + (tile * STAGE + o) * TILE * 16, source + (size_t)tile * KB * 64 + (s * STAGE + o) * 8);
        }
        copy_commit();
    };

    let_next_start();
    UNROLL for (int step = 0; step < STEPS; step++) load(step, step * CHAINS + lane);
    after_previous();
    UNROLL for (int s = 0; s < STAGES - 1; s++) stage(s);
    const int place = sum_of<OWN * R>(lane), expert = expert0 + place / R, row = first + row0 + place % R;
    const bool is_mine = place >= 0 && expert < experts && row < rows;
    const float up = is_mine ? x_scale[row] : 0.f, plus = is_mine && bias ? bias[expert] : 0.f;

    float sums[OWN * R] = {};
    for (int s = 0; s * STAGE < octets; s++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        stage(s + STAGES - 1);
        const uint4* at = staged + s % STAGES * VECTORS + (row0 / TILE * STAGE + lane) * TILE;
        UNROLL for (int step = 0; step < STEPS; step++) {
            const int octet = s * STAGE + step * CHAINS + lane;
            // Rows past the end are what was there, and no one's.
            if (octet < octets) UNROLL for (int r = 0; r < R; r++) {
                const Octet v = at[step * CHAINS * TILE + ((row0 + r) % TILE ^ lane % TILE)];
                UNROLL for (int e = 0; e < OWN; e++) sums[e * R + r] = w[step][e].multiply(v, sums[e * R + r]);
            }
            load(step, octet + STAGE);
        }
    }
    float logit = __fmul_rn(add_chains<OWN * R>(sums), up);
    if (bias) logit = __fadd_rn(logit, plus);
    if (is_mine) logits[(size_t)row * experts + expert] = logit;

    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = arrive(arrived + blockIdx.y) == gridDim.x - 1;
        if (last) arrived[blockIdx.y] = 0;  // for the next launch
    }
    __syncthreads();
    if (!last) return;
    const Rule rule = {experts, chosen, groups, groups_kept, normalise, scale};
    for (int m = first + warp; m < min(rows, first + ROWS); m += WARPS) {
        __syncwarp();
        choose(logits + (size_t)m * experts, choice_bias, rule, (Pick*)staged + warp * 32, expert_ids + (size_t)m * chosen,
               shares + (size_t)m * chosen);
    }
}

#define ROUTE(EXPERTS, ROWS, OWN, ROW_WARPS)                                                                                    \
    extern "C" __global__ void __launch_bounds__(EXPERTS / OWN * ROW_WARPS * 32, 1) route_##EXPERTS##x##ROWS(ARGUMENTS) {       \
        route<EXPERTS, ROWS, OWN, ROW_WARPS>(x, x_scale, router, bias, choice_bias, logits, arrived, expert_ids, shares, rows, K, KB, \
                                             experts, chosen, groups, groups_kept, normalise, scale);                           \
    }

ROUTE(2, 1, 1, 1)
ROUTE(2, 8, 1, 4)
ROUTE(4, 8, 1, 2)
ROUTE(8, 8, 2, 2)
ROUTE(16, 8, 4, 2)
ROUTE(16, 16, 4, 2)
