// RMSNorms that stay float32: of a row, added to another; and of all query heads, and all key heads, of a row.
//
// Thread t of THREADS, a function of the size alone, sums the squares of elements 4t..4t+3 of each round, ascending; then a fixed tree, as
// in activation.cu. Sizes are multiples of 4.
// Define: THREADS 256 or 1024.

// What a row of `size` floats is divided by to have a mean square of 1, as a factor.
DEVICE float norm_factor(const float4* x, int size, float eps) {
    __shared__ Reduced scratch[THREADS / 32];
    Reduced own = {0.f, 0.f};
    for (int i = threadIdx.x; i < size / 4; i += THREADS) {
        const float4 v = x[i];
        own.sum = __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, own.sum))));
    }
    own = block_reduce(own, scratch);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(own.sum, (float)size), eps)));
}

DEVICE float4 normed(float4 v, float factor, float4 w) {
    return make_float4(__fmul_rn(__fmul_rn(v.x, factor), w.x), __fmul_rn(__fmul_rn(v.y, factor), w.y),
                       __fmul_rn(__fmul_rn(v.z, factor), w.z), __fmul_rn(__fmul_rn(v.w, factor), w.w));
}

// out[r] += the norm of x[r]. grid (rows); x, out [rows, K], weight [K].
extern "C" __global__ void __launch_bounds__(THREADS, 1) add_rms_norm(const float* x, const float* weight, float eps, float* out, int K) {
    const float4* row = (const float4*)(x + (size_t)blockIdx.x * K);
    float4* to = (float4*)(out + (size_t)blockIdx.x * K);
    let_next_start();
    after_previous();
    const float factor = norm_factor(row, K, eps);
    for (int i = threadIdx.x; i < K / 4; i += THREADS) {
        const float4 v = normed(row[i], factor, ((const float4*)weight)[i]), before = to[i];
        to[i] = make_float4(__fadd_rn(before.x, v.x), __fadd_rn(before.y, v.y), __fadd_rn(before.z, v.z), __fadd_rn(before.w, v.w));
    }
}

// In place: the queries, blockIdx.y 0, or the keys, 1, of a row of qkv as one vector. grid (rows, 2); q_norm [queries], k_norm [keys],
// columns: of qkv, queries + 2 keys.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    norm_heads(float* qkv, const float* q_norm, const float* k_norm, float eps, int queries, int keys) {
    const bool of_keys = blockIdx.y == 1;
    float4* row = (float4*)(qkv + (size_t)blockIdx.x * (queries + 2 * keys) + (of_keys ? queries : 0));
    const float4* weight = (const float4*)(of_keys ? k_norm : q_norm);
    const int size = of_keys ? keys : queries;
    let_next_start();
    after_previous();
    const float factor = norm_factor(row, size, eps);
    for (int i = threadIdx.x; i < size / 4; i += THREADS) row[i] = normed(row[i], factor, weight[i]);
}
