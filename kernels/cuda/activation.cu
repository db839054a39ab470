// Rows of activations to the B fragments that linear.cu reads, with or without RMSNorm before.
//
// A row of float32 becomes half precision times an exact power of two of its own, chosen so that its largest magnitude lies in
// [2^14, 2^15): no value of the row overflows, and values down to 2^-28 of the largest keep all their bits. The scale is a
// function of the row alone. A row with an infinity or a NaN is carried over unscaled and stays the only one it spoils.
//
// grid (rows); 256 threads, always: thread t sums elements 4t..4t+3 of each 1024, ascending, then a fixed tree. So the order of the
// sum of squares depends on K alone.
// Layout of `out`: see linear.cu. K needs not be a multiple of 64: the rest of the last block is zero.

constexpr int THREADS = 256;

DEVICE float block_reduce(float v, bool maximum, float* scratch) {
    UNROLL for (int d = 16; d > 0; d >>= 1) {
        const float other = __shfl_xor_sync(~0u, v, d);
        v = maximum ? fmaxf(v, other) : __fadd_rn(v, other);
    }
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
    __syncthreads();
    v = scratch[0];
    UNROLL for (int i = 1; i < THREADS / 32; i++) v = maximum ? fmaxf(v, scratch[i]) : __fadd_rn(v, scratch[i]);
    __syncthreads();
    return v;
}

template <bool NORM>
DEVICE void prepare(const float* x, const float* weight, float eps, u32* out, float* scales, int K, int KB) {
    extern __shared__ float row[];
    __shared__ float scratch[THREADS / 32];
    const int m = blockIdx.x;
    x += (size_t)m * K;
    float squares = 0.f;
    for (int k = threadIdx.x * 4; k < KB * 64; k += THREADS * 4) {
        UNROLL for (int j = 0; j < 4; j++) {
            const float v = k + j < K ? x[k + j] : 0.f;
            row[k + j] = v;
            if (NORM) squares = __fmaf_rn(v, v, squares);
        }
    }
    if (NORM) {
        const float mean = __fdiv_rn(block_reduce(squares, false, scratch), (float)K);
        const float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
        for (int k = threadIdx.x * 4; k < KB * 64; k += THREADS * 4)
            UNROLL for (int j = 0; j < 4; j++)
                if (k + j < K) row[k + j] = __fmul_rn(__fmul_rn(row[k + j], factor), weight[k + j]);
    }
    float largest = 0.f;
    bool finite = true;
    for (int k = threadIdx.x * 4; k < KB * 64; k += THREADS * 4) UNROLL for (int j = 0; j < 4; j++) {
        const float v = fabsf(row[k + j]);
        largest = fmaxf(largest, v);
        finite = finite && v <= 3.4028235e38f;
    }
    largest = block_reduce(largest, true, scratch);
    finite = __syncthreads_and(finite);
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127 - 14;
    exponent = !finite || largest == 0.f ? 0 : min(max(exponent, -112), 112);
    const float down = __uint_as_float((u32)(127 - exponent) << 23);
    if (threadIdx.x == 0) scales[m] = __uint_as_float((u32)(127 + exponent) << 23);

    const int tile = m >> 3, column = m & 7;
    for (int k = threadIdx.x * 4; k < KB * 64; k += THREADS * 4) UNROLL for (int j = 0; j < 4; j += 2) {
        const int block = k >> 6, step = (k >> 4) & 3, inside = (k + j) & 15;
        const int lane = column * 4 + ((inside & 7) >> 1), word = (step & 1) * 2 + (inside >> 3);
        out[((((size_t)tile * KB + block) * 2 + (step >> 1)) * 32 + lane) * 4 + word] =
            floats_to_half2(__fmul_rn(row[k + j], down), __fmul_rn(row[k + j + 1], down));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_rows(const float* x, u32* out, float* scales, int K, int KB) {
    prepare<false>(x, nullptr, 0.f, out, scales, K, KB);
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_rows(const float* x, const float* weight, float eps, u32* out,
                                                                    float* scales, int K, int KB) {
    prepare<true>(x, weight, eps, out, scales, K, KB);
}
