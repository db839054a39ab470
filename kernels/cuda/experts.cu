// The products of linear.cu for pairs of a row and one of its experts: a block multiplies a tile of one expert's pairs.
//
// Contract, layouts of weights and activations: linear.cu; K slices by K alone, so a pair's bits are those of a product of its row
// alone with its expert's matrix, whatever else the tile holds.
//
// Pair p is row p / chosen's choice p % chosen. Its activations are row p / `pairs_a_row` of x (1 where x has a row a pair), and its result
// goes to row p of `out`, [pairs][stride] float32; gated results leave their largest magnitude in largest[p].
//   tiles       int32 [..][4]: expert, first, count, 0, by dispatch.cu; a tile's pairs are order[first .. first + count - 1]. Null: tile y is
//               pair y alone, of expert expert_ids[y].
//   experts     [experts] a matrix's addresses.
//   bias        [experts][N], of the gate with GATED_BIAS, whose up_bias is alike; or null.
//
// grid (ceil(channel tiles * 16 / channels of the kernel), tiles); blocks whose tile has no pairs leave at once.
// Defines: those of linear.cu; EXPERTS 1; IS_GATED 0 or 1.

static_assert(EXPERTS, "output.cuh must know");

// The block's expert, its matrix and its pairs, in shared memory (see Output). Returns how many there are.
template <int TOKENS>
DEVICE int take_tile(const int4* tiles, const int* order, const int* expert_ids, const Weights* experts, int pairs_a_row, int KB,
                     int& expert, Weights& matrix, int (&pairs)[TOKENS], u32 (&places)[TOKENS]) {
    after_previous();
    // Not before: choices.cu reads ahead what came before this kernel.
    let_next_start();
    const int4 tile = tiles ? tiles[blockIdx.y] : make_int4(expert_ids[blockIdx.y], blockIdx.y, 1, 0);
    const int first = tile.y, count = tile.z;
    if (count == 0) return 0;
    if (threadIdx.x == 0) {
        expert = tile.x;
        matrix = experts[tile.x];
    }
    for (int t = threadIdx.x; t < TOKENS; t += blockDim.x) {
        // Past the last the first is read again.
        const int at = first + (t < count ? t : 0), pair = tiles ? order[at] : at;
        pairs[t] = t < count ? pair : -1;
        places[t] = place_of(pair / pairs_a_row, KB);
    }
    __syncthreads();
    return count;
}

#if GATED_BIAS
#define BIASES , up_bias
#else
#define BIASES
#endif
#define ARGUMENTS                                                                                                          \
    const Weights *experts, const int4 *tiles, const int *order, const int *expert_ids, const uint4 *x, const float *x_sums, \
        const float *x_scale, const float *bias, const float *up_bias, float *out, int N, int stride, int channel_tiles, int KB,  \
        int slices, int pairs_a_row, u32 *largest

#define TAKE(TOKENS)                                                                                                       \
    __shared__ int pairs[TOKENS];                                                                                          \
    __shared__ u32 places[TOKENS];                                                                                         \
    __shared__ int expert;                                                                                                 \
    __shared__ Weights matrix;  /* read again where it is used: registers are short */                                     \
    const int count = take_tile<TOKENS>(tiles, order, expert_ids, experts, pairs_a_row, KB, expert, matrix, pairs, places); \
    if (count == 0) return;                                                                                                \
    const Output output = {out, x_scale, bias, count, N, stride, 0, largest BIASES, pairs, places, pairs_a_row, &expert};

#define FEW(name, NI, MI, S, WN, PF, OCC)                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * S * WN, OCC) name(ARGUMENTS) {                                       \
        TAKE(NI * 8)                                                                                                       \
        few_tokens<NI, MI, S, WN, PF, IS_GATED>(matrix, x, x_sums, output, channel_tiles, KB); \
    }

#define MANY(name, WC, WT, NI, OCC)                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WC * WT, OCC) name(ARGUMENTS) {                                      \
        TAKE(WT * NI * 8)                                                                                                  \
        many_tokens<WC, WT, NI, false, IS_GATED>(matrix, x, x_sums, output, channel_tiles, KB, slices, nullptr, nullptr); \
    }

// Names as in linear.cu; `tables.py` picks one.
FEW(few_8x64_s1, 1, 2, 1, 2, DEEP / 2, 4)
FEW(few_8x32_s4, 1, 1, 4, 2, DEEP, 2)
FEW(few_8x64_s4, 1, 2, 4, 2, DEEP / 2, 2)
FEW(few_8x32_s8, 1, 2, 8, 1, DEEP / 2, 2)
FEW(few_16x64_s1, 2, 2, 1, 2, DEEP / 2, 2)
FEW(few_16x64_s4, 2, 2, 4, 2, DEEP / 2, 1)
FEW(few_16x32_s8, 2, 2, 8, 1, DEEP / 2, 1)
MANY(whole_16x128, 4, 1, 2, 3)
MANY(whole_32x128, 4, 1, 4, 2)
MANY(whole_64x128_wide, 4, 2, 4, 1)
#if WARPGROUPS && GROUP > 16  // elsewhere registers are too short for 64 tokens a warp and pairs that lie anywhere
MANY(whole_64x128, 4, 1, 8, 2)
#endif
