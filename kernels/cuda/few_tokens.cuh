// Products of few tokens: weights and activations straight from memory to registers, one warp a slice. Contract and layouts: linear.cu.
//
// grid (tiles / (MI * WN)); 32 * S * WN threads. PF blocks of weights are in flight a warp, and MOST_NEAR of activations where
// there is room, else two.
// A lane whose token does not exist reads nothing, so activations cost M * 128 bytes a block.
constexpr int MOST_NEAR = 4;

template <int NI, int MI, int S, int WN, int PF, bool GATED>
DEVICE void few_tokens(const Weights& weights, const uint4* x, const float* x_sums, const Output& o, int tiles, int KB) {
    // Blocks of activations in flight.
    constexpr int NEAR = NI == 1 && PF >= MOST_NEAR ? MOST_NEAR : 2;
    static_assert(PF % BLOCKS_A_GROUP == 0 && PF % NEAR == 0, "a slot of the ring must know its place in a group");
    constexpr int CHANNELS = WN * MI * 16, STEP = VECTORS * 32, GROUP_STEP = 8;
    __shared__ float sums[S][NI * 8][CHANNELS + 1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slice = warp % S, column = warp / S;
    // A warp past the end repeats the last tiles; what it computes has no channel to be stored in.
    const int tile = min(blockIdx.x * WN * MI + column * MI, (u32)(tiles - MI));
    const int begin = slice_begin(slice, S, KB), blocks = slice_begin(slice + 1, S, KB) - begin, groups = KB * 64 / GROUP;
    const u32 tile_stride = KB * STEP, group_stride = groups * GROUP_STEP;
    // Pointers move by PF blocks a round, so that within it every address is a register and a constant.
    const uint4* w = weights.w + ((size_t)tile * KB + begin) * STEP + lane;
    const size_t first_scale = ((size_t)tile * groups + begin * 64 / GROUP) * GROUP_STEP + (lane >> 2);
    const Pair *scale = weights.scale + first_scale, *minimum = weights.minimum + first_scale;
#if EXPERTS
    const u32* xp[NI];
    const float* sp[NI][2];
    UNROLL for (int n = 0; n < NI; n++) {
        xp[n] = (const u32*)(x + (size_t)begin * 64 + o.places[n * 8 + (lane >> 2)]) + (lane & 3);
        UNROLL for (int h = 0; h < 2; h++) sp[n][h] = x_sums + (size_t)begin * 16 + sums_of(o.places[n * 8 + (lane & 3) * 2 + h]);
    }
#else
    const u32* xp = (const u32*)(x + (size_t)begin * 64) + lane;
    const float* sp = x_sums + (size_t)begin * 16 + (lane & 3) * 2;
#endif

    uint4 q[PF][MI][VECTORS], xf[NEAR][2][NI];
    Scales<MI> scales[PF];
    auto fetch = [&](int p, int ahead) {
        UNROLL for (int i = 0; i < MI; i++) {
            UNROLL for (int v = 0; v < VECTORS; v++) q[p][i][v] = load_streaming(w + i * tile_stride + (p + ahead) * STEP + v * 32);
            UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
                // Of a group of several blocks, the last block's slot has the scales.
                if (p % BLOCKS_A_GROUP != BLOCKS_A_GROUP - 1) continue;
                const int at = ((p + ahead) / BLOCKS_A_GROUP * GROUPS_A_BLOCK + g) * GROUP_STEP;
                scales[p].scale[i][g] = scale[i * group_stride + at];
#if HAS_MIN
                scales[p].minimum[i][g] = minimum[i * group_stride + at];
#endif
            }
        }
    };
    auto fetch_x = [&](int p, int ahead) {
        UNROLL for (int n = 0; n < NI; n++) UNROLL for (int h = 0; h < 2; h++) {
            xf[p % NEAR][h][n] = make_uint4(0, 0, 0, 0);
            if (n * 8 + (lane >> 2) >= o.M) continue;
#if EXPERTS
            const u32* at = xp[n] + (p + ahead) * 256 + h * 128;
#else
            const u32* at = xp + (size_t)n * KB * 256 + (p + ahead) * 256 + h * 128;
#endif
            xf[p % NEAR][h][n] = make_uint4(at[0], at[32], at[64], at[96]);
        }
    };
    let_next_start();
    UNROLL for (int p = 0; p < PF; p++) if (p < blocks) fetch(p, 0);
    after_previous();
    UNROLL for (int p = 0; p < NEAR; p++) if (p < blocks) fetch_x(p, 0);

    float P[MI][NI][4], T[MI][NI][4];
    GroupSum X[NI];
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++) T[i][n][e] = 0.f;
    for (int left = blocks; left > 0; left -= PF) {
        UNROLL for (int p = 0; p < PF; p++) {
            if (p < left) {
                UNROLL for (int h = 0; h < 2; h++)
#if EXPERTS
                    multiply<MI, NI>(P, T, X, q[p], scales[p], xf[p % NEAR][h], SumsOfPairs<NI>{sp, p * 16 + h * 8}, h, p);
#else
                    multiply<MI, NI>(P, T, X, q[p], scales[p], xf[p % NEAR][h], SumsOfTokens{sp + p * 16 + h * 8, (size_t)KB * 16}, h, p);
#endif
                if (p + PF < left) fetch(p, PF);
                if (p + NEAR < left) fetch_x(p, NEAR);
            }
        }
        w += PF * STEP;
        scale += PF * 64 / GROUP * GROUP_STEP;
        minimum += PF * 64 / GROUP * GROUP_STEP;
#if EXPERTS
        UNROLL for (int n = 0; n < NI; n++) {
            xp[n] += PF * 256;
            UNROLL for (int h = 0; h < 2; h++) sp[n][h] += PF * 16;
        }
#else
        xp += PF * 256;
        sp += PF * 16;
#endif
    }

    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int n = 0; n < NI; n++) UNROLL for (int e = 0; e < 4; e++)
        sums[slice][n * 8 + (lane & 3) * 2 + (e & 1)][(column * MI + i) * 16 + (lane >> 2) + (e >> 1) * 8] = T[i][n][e];
    __syncthreads();
    auto sum = [&](int token, int channel) {
        float f = sums[0][token][channel];
        UNROLL for (int s = 1; s < S; s++) f = __fadd_rn(f, sums[s][token][channel]);
        return f;
    };
    const int count = min(o.M, NI * 8);
    const int first = blockIdx.x * CHANNELS;
    if (GATED) {
        const int total = count * (CHANNELS / 2);
        for (int id0 = 0; id0 < total; id0 += blockDim.x) {
            const int id = id0 + threadIdx.x, token = id / (CHANNELS / 2), pair = id % (CHANNELS / 2), c = (pair >> 4) * 32 + (pair & 15);
            u32 magnitude = id < total ? store_gated(o, token, first / 2 + pair, sum(token, c), sum(token, c + 16)) : 0;
            // 16 lanes have one token. A maximum is the same in any order.
            UNROLL for (int d = 8; d > 0; d >>= 1) magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, d));
            if (id < total && (lane & 15) == 0) atomicMax(o.largest + row_of(o, token), magnitude);
        }
    } else {
        for (int id = threadIdx.x; id < count * CHANNELS; id += blockDim.x)
            store(o, id / CHANNELS, first + id % CHANNELS, sum(id / CHANNELS, id % CHANNELS));
    }
}
