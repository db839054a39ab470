// The last product of a row's experts and their sum at once, for few rows: out[r] += sum over j of shares[r, j] * (down of pair r * chosen
// + j). The bits of prepare_gated (activation.cu), then experts.cu's product of each pair, then combine (dispatch.cu).
//
// grid (tiles of 16 channels, rows); a warp for each of the chosen, which walks all of K: it makes its gated row's halves in shared memory,
// and adds up the slices of K as they come.
//   experts     a matrix's addresses, of each.
//   rows        float32 [rows * chosen][K], as gated products leave them; largest of each, and done: a counter of blocks; both are zero again
//               when all are done.
//   bias        [experts][N] or null.
//   early       The kernel before let this one start after the one before it was done: the experts are known already, and their weights may
//               be read ahead.
// Defines: those of linear.cu; SOURCE 1. Dynamic shared memory: chosen stages of one row (staged.cuh), 16 bytes at a time.
// Limits: MOST_CHOICES chosen.

static_assert(SOURCE == 1, "gated rows");
constexpr int MOST_CHOICES = 16;

extern "C" __global__ void __launch_bounds__(32 * MOST_CHOICES, 1)
    add_choices(const Weights* experts, const int* expert_ids, const float* shares, const float* rows, u32* largest, u32* done,
                const float* bias, float* out, int N, int K, int KB, int slices, int chosen, int early) {
    constexpr int PF = GROUP == 16 ? DEEP / 2 : DEEP, STEP = VECTORS * 32;
    extern __shared__ float4 stage_memory[];
    __shared__ float results[MOST_CHOICES][16], row_shares[MOST_CHOICES];
    const int lane = threadIdx.x & 31, choice = threadIdx.x >> 5, tile = blockIdx.x, row = blockIdx.y, pair = row * chosen + choice;
    const int groups = KB * 64 / GROUP, quads = KB * 16;
    let_next_start();
    if (!early) after_previous();
    const int expert = __ldcg(expert_ids + pair);
    const Weights matrix = experts[expert];
    const uint4* w = matrix.w + (size_t)tile * KB * STEP + lane;
    const size_t first_scale = (size_t)tile * groups * 8 + (lane >> 2);
    const Pair *scale = matrix.scale + first_scale, *minimum = matrix.minimum + first_scale;
    uint4 q[PF][1][VECTORS];
    Scales<1> scales[PF];
    auto fetch = [&](int p, int block) {
        UNROLL for (int v = 0; v < VECTORS; v++) q[p][0][v] = load_streaming(w + block * STEP + v * 32);
        UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
            // Of a group of several blocks, the last block's slot has the scales.
            if (p % BLOCKS_A_GROUP != BLOCKS_A_GROUP - 1) continue;
            const int place = (block / BLOCKS_A_GROUP * GROUPS_A_BLOCK + g) * 8;
            scales[p].scale[0][g] = scale[place];
#if HAS_MIN
            scales[p].minimum[0][g] = minimum[place];
#endif
        }
    };
    UNROLL for (int p = 0; p < PF; p++) if (p < KB) fetch(p, p);
    if (early) after_previous();

    // What the end adds to, and with what shares.
    const int channel = tile * 16 + threadIdx.x;
    const bool adds = threadIdx.x < 16 && channel < N;
    float* to = out + (size_t)row * N + channel;
    const float before = adds ? *to : 0.f;
    if (threadIdx.x < chosen) row_shares[threadIdx.x] = shares[row * chosen + threadIdx.x];

    const Stage stage = stage_at(stage_memory + choice * ((KB * 17 + 1) / 2), 1, KB);
    const Scale row_scale = scale_of(__uint_as_float(__ldcg(largest + pair)));
    const float4* from = (const float4*)(rows + (size_t)pair * K);
    _Pragma("unroll 4")
    for (int i0 = 0; i0 < quads; i0 += 32) {
        const int i = i0 + lane;
        put(stage, 1, 0, i, i < quads, i * 4 < K ? from[i] : make_float4(0.f, 0.f, 0.f, 0.f), row_scale.down);
    }
    __syncwarp();
    u32 arrived = 0;
    if (lane == 0) arrived = atomicAdd(done + pair, 1u);  // asked for now, looked at in the end

    float P[1][1][4], T[1][1][4] = {}, F[2] = {};
    GroupSum X[1];
    int slice = 0, slice_end = slice_begin(1, slices, KB);
    for (int at = 0; at < KB; at += PF) {
        UNROLL for (int p = 0; p < PF; p++) {
            const int block = at + p;
            if (block >= KB) continue;
            UNROLL for (int h = 0; h < 2; h++) {
                const int half = block * 2 + h;
                // All eight tokens are the row: nobody reads more than one.
                const uint4 fragment = ((const uint4*)stage.fragments)[half * 4 + (lane & 3)];
                multiply<1, 1>(P, T, X, q[p], scales[p], &fragment, SumsOfStage{stage.sums + half, stage.sums + half}, h, p);
            }
            if (block + PF < KB) fetch(p, block + PF);
            if (block + 1 == slice_end) {
                UNROLL for (int e = 0; e < 2; e++) {
                    F[e] = slice == 0 ? T[0][0][e * 2] : __fadd_rn(F[e], T[0][0][e * 2]);
                    UNROLL for (int i = 0; i < 2; i++) T[0][0][e * 2 + i] = 0.f;
                }
                slice++;
                slice_end = slice_begin(slice + 1, slices, KB);
            }
        }
    }
    if ((lane & 3) == 0) UNROLL for (int e = 0; e < 2; e++) {
        const int r = (lane >> 2) + e * 8;
        float y = __fmul_rn(F[e], row_scale.up);
        if (bias && tile * 16 + r < N) y = __fadd_rn(y, bias[(size_t)expert * N + tile * 16 + r]);
        results[choice][r] = y;
    }
    __syncthreads();
    if (adds) {
        float sum = 0.f;
        for (int j = 0; j < chosen; j++) sum = __fmaf_rn(row_shares[j], results[j][threadIdx.x], sum);
        *to = __fadd_rn(before, sum);
    }
    if (lane == 0 && arrived == gridDim.x - 1) {
        // Every block has read them.
        largest[pair] = 0;
        done[pair] = 0;
    }
}
