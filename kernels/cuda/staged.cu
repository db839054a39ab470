// The products of linear.cu for one row or a few, which every block brings to its shared memory at once, and makes there from float32
// where nobody else reads them: so a step of few rows needs no kernel of its own for a norm or for a gated row's halves.
//
// Contract, layouts and arguments: linear.cu; sources of rows and shared memory: staged.cuh.
// grid (blocks): each walks tiles of channels from its own on, gridDim.x apart, with the next tile's weights in flight while it adds up
// the slices of the one before. 32 * S * WN threads, one warp a slice.
// Defines: those of linear.cu; SOURCE; IS_GATED 0 or 1.
// Limits: M up to MOST_STAGED; tiles a multiple of the kernel's.

#if SOURCE == 0
#define SOURCE_ARGUMENTS const uint4 *x, const float *x_sums, const float *x_scale
#define SOURCE_OF {x, x_sums, x_scale, K}
#elif SOURCE == 1
#define SOURCE_ARGUMENTS const float *x, u32 *x_largest, u32 *x_done
#define SOURCE_OF {x, x_largest, x_done, K}
#else
#define SOURCE_ARGUMENTS const float *x, const float *norm, float eps, int virtual_threads
#define SOURCE_OF {x, norm, eps, virtual_threads, K}
#endif
#if GATED_BIAS
#define OUTPUT {out, nullptr, bias, M, N, stride, accumulate, largest, bias + N / 2}
#else
#define OUTPUT {out, nullptr, bias, M, N, stride, accumulate, largest}
#endif
#define ARGUMENTS                                                                                                          \
    const uint4 *w, const Pair *scale, const Pair *minimum, SOURCE_ARGUMENTS, int K, const float *bias, float *out, int M, int N, int stride,  \
        int tiles, int KB, int accumulate, u32 *largest

// PF blocks of weights are in flight a warp.
template <int MI, int S, int WN, int PF>
DEVICE void staged_tokens(const Weights& weights, const Source& source, Output o, int tiles, int KB) {
    static_assert(PF % BLOCKS_A_GROUP == 0, "a slot of the ring must know its place in a group");
    constexpr int CHANNELS = WN * MI * 16, THREADS = 32 * S * WN, STEP = VECTORS * 32, GROUP_STEP = 8;
    extern __shared__ float4 stage_memory[];
    __shared__ float sums[2][S][MOST_STAGED][CHANNELS + 1];  // of a tile and the one before
    __shared__ float scales_of_rows[MOST_STAGED];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slice = warp % S, column = warp / S, M = o.M;
    const int begin = slice_begin(slice, S, KB), blocks = slice_begin(slice + 1, S, KB) - begin, groups = KB * 64 / GROUP;
    const u32 tile_stride = KB * STEP, group_stride = groups * GROUP_STEP;
    const int first_tile = blockIdx.x * WN * MI + column * MI;
    const uint4* w = weights.w + ((size_t)first_tile * KB + begin) * STEP + lane;
    const size_t first_scale = ((size_t)first_tile * groups + begin * 64 / GROUP) * GROUP_STEP + (lane >> 2);
    const Pair *scale = weights.scale + first_scale, *minimum = weights.minimum + first_scale;
    const Stage stage = stage_at(stage_memory, M, KB);

    uint4 q[PF][MI][VECTORS];
    Scales<MI> scales[PF];
    // Block `at` after `w`, to slot p.
    auto fetch = [&](int p, int at, size_t tile_ahead) {
        const uint4* from = w + tile_ahead * tile_stride;
        UNROLL for (int i = 0; i < MI; i++) {
            UNROLL for (int v = 0; v < VECTORS; v++) q[p][i][v] = load_streaming(from + i * tile_stride + at * STEP + v * 32);
            UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
                // Of a group of several blocks, the last block's slot has the scales.
                if (p % BLOCKS_A_GROUP != BLOCKS_A_GROUP - 1) continue;
                const size_t place = (tile_ahead + i) * group_stride + (at / BLOCKS_A_GROUP * GROUPS_A_BLOCK + g) * GROUP_STEP;
                scales[p].scale[i][g] = scale[place];
#if HAS_MIN
                scales[p].minimum[i][g] = minimum[place];
#endif
            }
        }
    };
    let_next_start();
    UNROLL for (int p = 0; p < PF; p++) if (p < blocks) fetch(p, p, 0);
#if SOURCE == 2
    stage_weight<THREADS>(stage, source, KB);
#endif
    after_previous();
    fill_stage<THREADS>(stage, source, M, KB, scales_of_rows);
    o.x_scale = scales_of_rows;
#if SOURCE == 1
    u32 arrived = 0;
    if (threadIdx.x == 0) arrived = atomicAdd(source.done, 1u);  // asked for now, looked at in the end
#endif

    // A lane whose token does not exist reads the last one's: nobody reads what it computes.
    const uint4* x = (const uint4*)stage.fragments + (begin * 2 * M + min(lane >> 2, M - 1)) * 4 + (lane & 3);
    const float* x_sums = stage.sums + begin * 2 * M;
    const int even = min((lane & 3) * 2, M - 1), odd = min((lane & 3) * 2 + 1, M - 1);

    float P[MI][1][4], T[MI][1][4];
    GroupSum X[1];
    const int tiles_ahead = gridDim.x * WN * MI;
    for (int first = blockIdx.x * WN * MI, round = 0; first < tiles; first += tiles_ahead, round++) {
        const bool more = first + tiles_ahead < tiles;
        UNROLL for (int i = 0; i < MI; i++) UNROLL for (int e = 0; e < 4; e++) T[i][0][e] = 0.f;
        for (int at = 0; at < blocks; at += PF) {
            const int left = blocks - at;
            UNROLL for (int p = 0; p < PF; p++) {
                if (p < left) UNROLL for (int h = 0; h < 2; h++) {
                    const int half = (at + p) * 2 + h;
                    const uint4 fragment = x[half * M * 4];
                    multiply<MI, 1>(P, T, X, q[p], scales[p], &fragment, SumsOfStage{x_sums + half * M + even, x_sums + half * M + odd}, h, p);
                }
                if (p + PF < left) fetch(p, at + p + PF, 0);
                // In the last round a slot is free for the next tile.
                else if (left <= PF && more && p < blocks) fetch(p, p, tiles_ahead);
            }
        }
        w += (size_t)tiles_ahead * tile_stride;
        scale += (size_t)tiles_ahead * group_stride;
        minimum += (size_t)tiles_ahead * group_stride;

        float(*own)[MOST_STAGED][CHANNELS + 1] = sums[round & 1];
        UNROLL for (int i = 0; i < MI; i++) UNROLL for (int e = 0; e < 4; e++) {
            const int token = (lane & 3) * 2 + (e & 1);
            if (token < M) own[slice][token][(column * MI + i) * 16 + (lane >> 2) + (e >> 1) * 8] = T[i][0][e];
        }
        __syncthreads();  // and all have read the sums of the tile before the last, whose place these of the next one take
        auto sum = [&](int token, int channel) {
            float f = own[0][token][channel];
            UNROLL for (int s = 1; s < S; s++) f = __fadd_rn(f, own[s][token][channel]);
            return f;
        };
#if IS_GATED
        const int total = M * (CHANNELS / 2);
        for (int id0 = 0; id0 < total; id0 += THREADS) {
            const int id = id0 + threadIdx.x, token = id / (CHANNELS / 2), pair = id % (CHANNELS / 2), c = (pair >> 4) * 32 + (pair & 15);
            u32 magnitude = id < total ? store_gated(o, token, first * 8 + pair, sum(token, c), sum(token, c + 16)) : 0;
            // 16 lanes have one token. A maximum is the same in any order.
            UNROLL for (int d = 8; d > 0; d >>= 1) magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, d));
            if (id < total && (lane & 15) == 0) atomicMax(o.largest + token, magnitude);
        }
#else
        for (int id = threadIdx.x; id < M * CHANNELS; id += THREADS)
            store(o, id / CHANNELS, first * 16 + id % CHANNELS, sum(id / CHANNELS, id % CHANNELS));
#endif
    }
#if SOURCE == 1
    if (threadIdx.x == 0 && arrived == gridDim.x - 1) {
        // Every block has read them.
        for (int m = 0; m < M; m++) source.largest[m] = 0;
        *source.done = 0;
    }
#endif
}

#define STAGED(name, MI, S, WN, PF, OCC)                                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * S * WN, OCC) name(ARGUMENTS) {                                       \
        staged_tokens<MI, S, WN, PF>({w, scale, minimum}, SOURCE_OF, OUTPUT, tiles, KB);                                   \
    }

// Names say channels and slices; `tables.py` picks one. Scales of small groups take many registers.
constexpr int AHEAD = GROUP == 16 || GROUP == 64 && HAS_MIN ? DEEP / 2 : DEEP;
STAGED(staged_64_s1, 2, 1, 2, AHEAD / 2, 4)
STAGED(staged_32_s4, 1, 4, 2, AHEAD, 2)
STAGED(staged_64_s4, 2, 4, 2, AHEAD / 2, 2)
STAGED(staged_32_s8, 2, 8, 1, AHEAD / 2, 2)
#if !IS_GATED
STAGED(staged_16_s8, 1, 8, 1, AHEAD, 2)
#endif
