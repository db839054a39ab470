// One token a row; kernels/sampling.py has the rule. One block of 1024 threads a row; no row looks at another.
//
// Every decision is exact or in a fixed order, so a row's token and logprobs depend on its own logits and parameters alone:
// maxima and thresholds are exact; the log-softmax adds float64 partial sums of a fixed set of ids in a fixed tree; top-k counts
// with integers; top-p adds integer weights round(exp(x) * 2^40), which in any order give the same sum.
//
// logits [rows, vocab] float32, unchanged. work [rows, vocab] float32, used by rows with a bias or a history. inputs: a Row a row, then the ids
// and values of all biases, the ids and counts of all histories. Out, 4 bytes each and one after the other: token_ids, logprobs [rows];
// top_ids, top_logprobs [rows, top_width]. Where there is last_tokens, each row's token also goes to its place there.

constexpr int THREADS = 1024, WARPS = THREADS / 32;
#define UNROLL_8 _Pragma("unroll 8")
#define INFINITE __uint_as_float(0x7f800000u)

// sampling_ops.py fills it; see SamplingBatch. The noise looks at the low 32 bits of a position. Entries are `start` to before `end`.
struct Row {
    u64 seed;
    u32 position;
    int top_k;
    float temperature, top_p, min_p, repetition, presence, frequency;
    int num_logprobs, place, bias_start, bias_end, history_start, history_end;
};

// -- order-free reductions over the block --------------------------------------------------------------------------------

// Larger floats get larger keys; NaN never wins: it gets the smallest.
DEVICE u32 key_of(float v) {
    const u32 bits = __float_as_uint(v);
    return v != v ? 0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float value_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The largest (key, lower id first) as one integer.
DEVICE u64 ranked(float v, int id) { return ((u64)key_of(v) << 32) | (u32)~id; }
DEVICE int id_of(u64 rank) { return (int)~(u32)rank; }

DEVICE u64 block_max(u64 v) {
    __shared__ u64 scratch[WARPS];
    UNROLL for (int d = 16; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(~0u, v, d);
        v = other > v ? other : v;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
    __syncthreads();
    v = scratch[threadIdx.x & 31];
    UNROLL for (int d = 16; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(~0u, v, d);
        v = other > v ? other : v;
    }
    return v;
}

DEVICE double block_sum(double v) {
    __shared__ double scratch[WARPS];
    UNROLL for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
    __syncthreads();
    v = scratch[threadIdx.x & 31];
    UNROLL for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

// A row's tempered logits, worked out as they are read.
struct Tempered {
    const float* logits;
    float highest, temperature;
    int count;
    DEVICE float operator()(float logit) const { return __fdiv_rn(__fsub_rn(logit, highest), temperature); }
    DEVICE float operator[](int i) const { return (*this)(logits[i]); }
};

// -- thresholds --------------------------------------------------------------------------------------------------------------

DEVICE u64 weight_of(float x) { return (u64)__double2ull_rn(exp((double)x) * 1099511627776.0); }

// The key at which the weights of the ids with key >= `floor`, added from the largest key down, reach `target`. A weight is 1, or
// with WEIGHTED the integer of exp(x). Four rounds of 256 bins over the digits of the key, highest first.
template <bool WEIGHTED>
DEVICE u32 descend(const Tempered& x, u32 floor, u64 target) {
    __shared__ u64 bins[256];
    __shared__ u64 reached;
    __shared__ u32 prefix;
    if (threadIdx.x == 0) {
        reached = 0;
        prefix = 0;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) bins[threadIdx.x] = 0;
        __syncthreads();
        const u32 wanted = prefix;
        for (int i = threadIdx.x; i < x.count; i += THREADS) {
            const float v = x[i];
            const u32 key = key_of(v);
            if (key >= floor && (shift == 24 || key >> (shift + 8) == wanted))
                atomicAdd(bins + ((key >> shift) & 255), WEIGHTED ? weight_of(v) : 1ull);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            while (digit > 0 && reached + bins[digit] < target) reached += bins[digit--];
            prefix = (prefix << 8) | digit;
        }
    }
    __syncthreads();
    return prefix;
}

DEVICE u64 total_weight(const Tempered& x, u32 floor) {
    __shared__ u64 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    u64 own = 0;
    for (int i = threadIdx.x; i < x.count; i += THREADS) {
        const float v = x[i];
        if (key_of(v) >= floor) own += weight_of(v);
    }
    atomicAdd(&total, own);
    __syncthreads();
    return total;
}

// -- noise ----------------------------------------------------------------------------------------------------------------

// Philox 4x32-10 (Salmon et al., 2011): key = seed, counter = (id / 4, position, 0, 0); lane id % 4.
DEVICE uint4 philox(u64 seed, u32 block, u32 position) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    uint4 c = make_uint4(block, position, 0, 0);
    UNROLL for (int round = 0; round < 10; round++) {
        const u32 high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
        const u32 high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
        c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

DEVICE double gumbel(u32 word) { return -log(-log(((double)word + 0.5) * 2.3283064365386963e-10)); }

// At least gumbel(word), and above it by less than 2e-3: what cannot win with it needs no logarithms in float64.
DEVICE float gumbel_bound(u32 word) {
    // Near 1 a float's logarithm is no longer close.
    if (word >= 0xff000000u) return __uint_as_float(0x7f800000u);
    return 1e-3f - __logf(-__logf(((float)word + 0.5f) * 2.3283064e-10f));
}

// -- the row ----------------------------------------------------------------------------------------------------------------

DEVICE u64 largest(const float* x, int count) {
    // Per thread the largest, the first of equals: its ids ascend.
    u32 key = 0;
    int id = 0;
    UNROLL_8 for (int i = threadIdx.x; i < count; i += THREADS) {
        const u32 k = key_of(x[i]);
        if (k > key) {
            key = k;
            id = i;
        }
    }
    return block_max(key ? ((u64)key << 32) | (u32)~id : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const float* logits, float* work, int vocab, const Row* inputs, int* out, int* last_tokens, int biases, int histories,
           int top_width) {
    const int row = blockIdx.x, rows = gridDim.x;
    const int* bias_ids = (const int*)(inputs + rows);
    const float* bias_values = (const float*)(bias_ids + biases);
    const int *history_ids = (const int*)(bias_values + biases), *history_counts = history_ids + histories;
    int *token_ids = out, *top_ids = out + 2 * rows;
    float *logprobs = (float*)(out + rows), *top_logprobs = (float*)(top_ids + rows * top_width);
    const float* raw = logits + (size_t)row * vocab;
    float* changed = work + (size_t)row * vocab;
    let_next_start();
    after_previous();

    const Row& own = inputs[row];  // read where it is wanted: registers are few
    const u64 first = largest(raw, vocab);
    const int wanted = own.num_logprobs;
    double log_sum = 0.0;
    const float model_max = value_of((u32)(first >> 32));
    if (wanted >= 0) {
        double share = 0.0;
        for (int i = threadIdx.x; i < vocab; i += THREADS) share += exp((double)raw[i] - (double)model_max);
        log_sum = log(block_sum(share)) + (double)model_max;
        u64 below = ~0ull;
        for (int n = 0; n < top_width; n++) {
            int id = -1;
            if (n < wanted && n < vocab) {
                u64 best = 0;
                for (int i = threadIdx.x; i < vocab; i += THREADS) {
                    const u64 rank = ranked(raw[i], i);
                    if (rank < below && rank > best) best = rank;
                }
                below = block_max(best);
                id = id_of(below);
            }
            if (threadIdx.x == 0) {
                top_ids[row * top_width + n] = id;
                top_logprobs[row * top_width + n] = id < 0 ? __uint_as_float(0x7fc00000u) : (float)((double)raw[id] - log_sum);
            }
        }
    } else {
        for (int n = threadIdx.x; n < top_width; n += THREADS) {
            top_ids[row * top_width + n] = -1;
            top_logprobs[row * top_width + n] = __uint_as_float(0x7fc00000u);
        }
    }

    const bool adjusted = own.bias_start < own.bias_end || own.history_start < own.history_end;
    u64 best = first;
    if (adjusted) {
        UNROLL_8 for (int i = threadIdx.x; i < vocab; i += THREADS) changed[i] = raw[i];
        __syncthreads();
        // An id may be named more than once, and sums have an order: so one thread. These lists are short.
        if (threadIdx.x == 0)
            for (int i = own.bias_start; i < own.bias_end; i++)
                changed[bias_ids[i]] = __fadd_rn(changed[bias_ids[i]], bias_values[i]);
        __syncthreads();
        for (int i = own.history_start + threadIdx.x; i < own.history_end; i += THREADS) {
            float v = changed[history_ids[i]];
            v = v > 0.f ? __fdiv_rn(v, own.repetition) : __fmul_rn(v, own.repetition);
            if (history_counts[i] > 0)
                v = __fsub_rn(v, __fadd_rn(__fmul_rn(own.frequency, (float)history_counts[i]), own.presence));
            changed[history_ids[i]] = v;
        }
        __syncthreads();
        best = largest(changed, vocab);
    }
    const float highest = value_of((u32)(best >> 32));
    int chosen = (u32)(best >> 32) == 0 ? 0 : id_of(best);
    if ((u32)(best >> 32) != 0 && own.temperature != 0.f && fabsf(highest) < INFINITE) {
        const Tempered x = {adjusted ? changed : raw, highest, own.temperature, vocab};
        u32 floor = 1;  // above NaN
        if (own.top_k > 0 && own.top_k < vocab) floor = max(floor, descend<false>(x, floor, own.top_k));
        if (own.min_p > 0.f) floor = max(floor, key_of((float)log((double)own.min_p)));
        if (own.top_p < 1.f) {
            const u64 target = (u64)ceil((double)own.top_p * (double)total_weight(x, floor));
            floor = max(floor, descend<true>(x, floor, target > 1 ? target : 1));
        }
        int id_best = 0;
        double value_best = -(double)INFINITE;
        for (int quad = threadIdx.x; quad * 4 < vocab; quad += THREADS) {
            float v[4];
            bool any = false;
            UNROLL for (int j = 0; j < 4; j++) {
                v[j] = quad * 4 + j < vocab ? x[quad * 4 + j] : __uint_as_float(0x7fc00000u);
                any = any || key_of(v[j]) >= floor;
            }
            if (!any) continue;
            const uint4 words = philox(own.seed, quad, own.position);
            UNROLL for (int j = 0; j < 4; j++) {
                const u32 word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
                if (key_of(v[j]) < floor || (double)v[j] + (double)gumbel_bound(word) < value_best) continue;
                const double noisy = (double)v[j] + gumbel(word);
                // Ascending ids: an equal value later does not replace an earlier one.
                if (noisy > value_best) {
                    value_best = noisy;
                    id_best = quad * 4 + j;
                }
            }
        }
        // Over threads: the largest value, then the lowest id. A double's order is that of its bits, folded as for floats.
        const long long bits = __double_as_longlong(value_best);
        const u64 key = bits < 0 ? ~(u64)bits : (u64)bits | 0x8000000000000000ull;
        const u64 winner = block_max(key);
        chosen = id_of(block_max(key == winner ? (1ull << 63) | (u32)~id_best : 0));
    }
    if (threadIdx.x == 0) {
        token_ids[row] = chosen;
        if (last_tokens) last_tokens[own.place] = chosen;
        logprobs[row] = wanted >= 0 ? (float)((double)raw[chosen] - log_sum) : __uint_as_float(0x7fc00000u);
    }
}
