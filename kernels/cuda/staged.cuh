// Few rows in shared memory as the B fragments of a product, whatever they are made of: the bits of activation.cu's kernels.
//
// Shared memory: float4 [M][KB * 16], the rows before they are scaled (SOURCE 2 alone); then uint4 [KB * 2][M][4], for every 32 channels
// and row what lane % 4 multiplies by in two k16 steps; then float [KB * 2][M], the sums of every 32 channels.
// Defines: SOURCE, where rows come from:
//   0 tiles   activations in the layout of linear.cu
//   1 gated   float32 [M][K] and their largest magnitudes, as gated products leave them; what prepare_gated would make
//   2 normed  float32 [M][K] before an RMSNorm; what rms_norm_rows would make

constexpr int MOST_STAGED = 4;  // rows

struct Source {
#if SOURCE == 0
    const uint4* tiles;
    const float *tile_sums, *scale;
#elif SOURCE == 1
    const float* rows;
    u32 *largest, *done;  // of each row; a counter of blocks: both zero again when all are done
#else
    const float *rows, *weight;
    float eps;
    int virtual_threads;  // of rms_norm_rows for such rows: they order its sum
#endif
    int K;
};

struct Stage {
    float4* rows;
    u32* fragments;
    float* sums;
};

// Sums of a half block, of the lane's two tokens.
struct SumsOfStage {
    const float *even, *odd;
    DEVICE float2 operator()(int) const { return make_float2(*even, *odd); }
};

DEVICE Stage stage_at(float4* shared, int M, int KB) {
    u32* fragments = (u32*)(shared + (SOURCE == 2 ? M * KB * 16 : 0));
    return {shared, fragments, (float*)(fragments + KB * 2 * M * 16)};
}

// Channels 4i..4i+3 of row m, scaled down: what prepare.cuh's emit does, for its lanes.
DEVICE void put(const Stage& to, int M, int m, int i, bool there, float4 v, float down) {
    float sum = 0.f;
    if (there) {
        const u32 low = floats_to_half2(__fmul_rn(v.x, down), __fmul_rn(v.y, down));
        const u32 high = floats_to_half2(__fmul_rn(v.z, down), __fmul_rn(v.w, down));
        u32* at = to.fragments + ((i >> 3) * M + m) * 16 + (i & 1) * 8 + ((i >> 1) & 3);
        at[0] = low;
        at[4] = high;
#if HAS_MIN
        sum = __fadd_rn(half_to_float((u16)(low & 0xffff)), half_to_float((u16)(low >> 16)));
        sum = __fadd_rn(sum, half_to_float((u16)(high & 0xffff)));
        sum = __fadd_rn(sum, half_to_float((u16)(high >> 16)));
#endif
    }
#if HAS_MIN
    UNROLL for (int d = 1; d < 8; d <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    if (there && (threadIdx.x & 7) == 0) to.sums[(i >> 3) * M + m] = sum;
#endif
}

#if SOURCE == 2
// What does not depend on the kernel before: the norm's weight, where row 0 will be.
template <int THREADS>
DEVICE void stage_weight(const Stage& to, const Source& from, int KB) {
    for (int i = threadIdx.x; i < KB * 16; i += THREADS)
        if (i * 4 < from.K) to.rows[i] = ((const float4*)from.weight)[i];
}

// Sums of squares and largest magnitudes of THREADS * EACH virtual threads, EACH of them by one thread; `scratch` gets those of each warp
// of them.
template <int THREADS, int EACH>
DEVICE void reduce_rows(const Stage& to, const Source& from, int M, int KB, Reduced (*scratch)[32]) {
    const int quads = KB * 16, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int m = M - 1; m >= 0; m--) {
        const float4* x = (const float4*)(from.rows + (size_t)m * from.K);
        Reduced own[EACH];
        UNROLL for (int j = 0; j < EACH; j++) own[j] = {0.f, 0.f};
        for (int i0 = threadIdx.x; i0 < quads; i0 += THREADS * EACH) {
            float4 v[EACH];
            UNROLL for (int j = 0; j < EACH; j++) {
                const int i = i0 + j * THREADS;
                v[j] = make_float4(0.f, 0.f, 0.f, 0.f);
                if (i * 4 < from.K) v[j] = x[i];
            }
            UNROLL for (int j = 0; j < EACH; j++) {
                const int i = i0 + j * THREADS;
                if (i >= quads) continue;
                float4 r = v[j];
                own[j].sum = __fmaf_rn(r.w, r.w, __fmaf_rn(r.z, r.z, __fmaf_rn(r.y, r.y, __fmaf_rn(r.x, r.x, own[j].sum))));
                if (i * 4 < from.K) {
                    const float4 w = to.rows[i];  // row 0's place; row 0 comes last
                    r = make_float4(__fmul_rn(r.x, w.x), __fmul_rn(r.y, w.y), __fmul_rn(r.z, w.z), __fmul_rn(r.w, w.w));
                }
                to.rows[m * quads + i] = r;
                UNROLL for (int e = 0; e < 4; e++) {
                    const float a = fabsf(e == 0 ? r.x : e == 1 ? r.y : e == 2 ? r.z : r.w);
                    own[j].largest = a <= LARGEST ? fmaxf(own[j].largest, a) : __uint_as_float(0x7f800000u);
                }
            }
        }
        UNROLL for (int j = 0; j < EACH; j++) {
            UNROLL for (int d = 16; d > 0; d >>= 1) {
                own[j].sum = __fadd_rn(own[j].sum, __shfl_xor_sync(~0u, own[j].sum, d));
                own[j].largest = fmaxf(own[j].largest, __shfl_xor_sync(~0u, own[j].largest, d));
            }
            if (lane == 0) scratch[m][j * (THREADS / 32) + warp] = own[j];
        }
    }
}
#endif

// All threads together, after what wrote the rows; they may read the stage, and `scales`, when this returns.
template <int THREADS>
DEVICE void fill_stage(const Stage& to, const Source& from, int M, int KB, float* scales) {
    const int quads = KB * 16;
#if SOURCE == 0
    for (int m = 0; m < M; m++) {
        _Pragma("unroll 4")
        for (int o = threadIdx.x; o < KB * 8; o += THREADS) {
            const uint4 v = from.tiles[o * 8 + m];
            u32* at = to.fragments + ((o >> 2) * M + m) * 16 + (o & 3);
            at[0] = v.x;
            at[4] = v.y;
            at[8] = v.z;
            at[12] = v.w;
        }
#if HAS_MIN
        for (int h = threadIdx.x; h < KB * 2; h += THREADS) to.sums[h * M + m] = from.tile_sums[h * 8 + m];
#endif
    }
    if (threadIdx.x < M) scales[threadIdx.x] = from.scale[threadIdx.x];
#elif SOURCE == 1
    for (int m = 0; m < M; m++) {
        const float4* row = (const float4*)(from.rows + (size_t)m * from.K);
        const Scale scale = scale_of(__uint_as_float(__ldcg(from.largest + m)));
        // Every warp goes round together, for the sums' trees.
        _Pragma("unroll 4")
        for (int i0 = threadIdx.x & ~31; i0 < quads; i0 += THREADS) {
            const int i = i0 + (threadIdx.x & 31);
            put(to, M, m, i, i < quads, i * 4 < from.K ? row[i] : make_float4(0.f, 0.f, 0.f, 0.f), scale.down);
        }
        if (threadIdx.x == 0) scales[m] = scale.up;
    }
#else
    __shared__ Reduced scratch[MOST_STAGED][32];
    if (from.virtual_threads == THREADS) reduce_rows<THREADS, 1>(to, from, M, KB, scratch);
    else reduce_rows<THREADS, 4>(to, from, M, KB, scratch);
    __syncthreads();
    const int warps = from.virtual_threads / 32;
    for (int m = 0; m < M; m++) {
        Reduced all = scratch[m][threadIdx.x & (warps - 1)];
        for (int d = warps / 2; d > 0; d >>= 1) {
            all.sum = __fadd_rn(all.sum, __shfl_xor_sync(~0u, all.sum, d));
            all.largest = fmaxf(all.largest, __shfl_xor_sync(~0u, all.largest, d));
        }
        const float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(all.sum, (float)from.K), from.eps)));
        const Scale scale = scale_of(__fmul_rn(all.largest, factor));
        const float down = __fmul_rn(factor, scale.down);
        for (int i0 = threadIdx.x & ~31; i0 < quads; i0 += THREADS) {
            const int i = i0 + (threadIdx.x & 31);
            put(to, M, m, i, i < quads, i < quads ? to.rows[m * quads + i] : make_float4(0.f, 0.f, 0.f, 0.f), down);
        }
        if (threadIdx.x == 0) scales[m] = scale.up;
    }
#endif
    __syncthreads();
}
