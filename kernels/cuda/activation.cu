// Rows of activations to the tiles of halves that linear.cu reads, with or without RMSNorm before.
//
// A row of float32 becomes half precision times an exact power of two of its own, chosen so that its largest magnitude lies in
// [2^14, 2^15): no value of the row overflows, and values down to 2^-28 of the largest keep all their bits. The scale is a
// function of the row alone. A row with an infinity or a NaN is carried over unscaled and stays the only one it spoils.
//
// grid (rows); THREADS threads, which is a function of K alone: thread t sums elements 4t..4t+3 of each round, ascending, then a fixed
// tree. `sums` gets, for every 32 channels, the sum of what the products see (in halves): 4 channels ascending, then a fixed tree over 8.
// With `unit` the scale is 1: for rows that are in the range of halves by their nature (attention's, a mean of halves).
// Layouts of `out` and `sums`: see linear.cu. K is a multiple of 4, not of 64: the rest of the last block is zero.
// Define: THREADS 256 or 1024.

template <bool NORM>
DEVICE void prepare(const float* x, const float* weight, float eps, u32* out, float* scales, float* sums, int K, int KB, int unit) {
    extern __shared__ float4 row[];
    __shared__ Reduced scratch[THREADS / 32];
    const int m = blockIdx.x, quads = KB * 16;
    const float4* from = (const float4*)(x + (size_t)m * K);
    let_next_start();
    // The first round's weights before the rows are there, and the rest to the L2.
    float4 w = make_float4(0.f, 0.f, 0.f, 0.f);
    if (NORM && threadIdx.x * 4 < K) w = ((const float4*)weight)[threadIdx.x];
    if (NORM) for (int i = THREADS + threadIdx.x * 8; i < K / 4; i += THREADS * 8) prefetch_l2((const float4*)weight + i);
    after_previous();
    Reduced own = {0.f, 0.f};
    for (int i = threadIdx.x; i < quads; i += THREADS) {
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i * 4 < K) v = from[i];
        if (NORM) {
            own.sum = __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, own.sum))));
            if (i * 4 < K) {
                if (i >= THREADS) w = ((const float4*)weight)[i];
                v = make_float4(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), __fmul_rn(v.z, w.z), __fmul_rn(v.w, w.w));
            }
        }
        row[i] = v;
        UNROLL for (int j = 0; j < 4; j++) {
            const float a = fabsf(j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w);
            own.largest = a <= LARGEST ? fmaxf(own.largest, a) : __uint_as_float(0x7f800000u);  // a NaN counts as infinite
        }
    }
    own = block_reduce(own, scratch);
    float factor = 1.f;
    if (NORM) factor = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(own.sum, (float)K), eps)));
    const Scale scale = unit ? Scale{1.f, 1.f} : scale_of(__fmul_rn(own.largest, factor));
    if (threadIdx.x == 0) scales[m] = scale.up;
    const float down = __fmul_rn(factor, scale.down);
    // Every warp goes round together: the last round may have idle threads, which still take part in the tree.
    for (int i0 = threadIdx.x & ~31; i0 < quads; i0 += THREADS) {
        const int i = i0 + (threadIdx.x & 31);
        emit(out, sums, m, KB, i, i < quads, i < quads ? row[i] : make_float4(0.f, 0.f, 0.f, 0.f), down);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prepare_rows(const float* x, u32* out, float* scales, float* sums, int K, int KB, int unit) {
    prepare<false>(x, nullptr, 0.f, out, scales, sums, K, KB, unit);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_rows(const float* x, const float* weight, float eps, u32* out, float* scales, float* sums, int K, int KB) {
    prepare<true>(x, weight, eps, out, scales, sums, K, KB, 0);
}

// Rows whose largest magnitudes are known, from linear.cu's gated products: same bits as prepare_rows. grid (rows, ceil(KB * 16 /
// THREADS)). The last block of a row to be done leaves `largest` and `done` at zero, for the next product.
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare_gated(const float* x, u32* out, float* scales, float* sums, u32* largest, u32* done, int K, int KB) {
    const int m = blockIdx.x, i = blockIdx.y * THREADS + threadIdx.x;
    let_next_start();
    after_previous();
    const Scale scale = scale_of(__uint_as_float(__ldcg(largest + m)));
    const bool there = i < KB * 16;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (i * 4 < K) v = ((const float4*)(x + (size_t)m * K))[i];
    emit(out, sums, m, KB, i, there, v, scale.down);
    __syncthreads();
    if (threadIdx.x == 0) {
        if (blockIdx.y == 0) scales[m] = scale.up;
        __threadfence();
        if (atomicAdd(done + m, 1u) == gridDim.y - 1) {
            largest[m] = 0;
            done[m] = 0;
        }
    }
}
