// Ops on single numbers of float32 rows: a soft cap, a shared expert's gate, a gate joined with an up.
// Define: ACTIVATION (gate.cuh), for join_rows.

constexpr int THREADS = 256;

// x = cap * tanh(x / cap), in place, `count` numbers. grid (ceil(count / 1024)).
extern "C" __global__ void __launch_bounds__(THREADS) soft_cap(float* x, float cap, u64 count) {
    const u64 i = ((u64)blockIdx.x * THREADS + threadIdx.x) * 4;
    let_next_start();
    after_previous();
    auto capped = [&](float v) { return __fmul_rn(cap, tanhf(__fdiv_rn(v, cap))); };
    if (i + 4 <= count) {
        float4* at = (float4*)(x + i);
        const float4 v = *at;
        *at = make_float4(capped(v.x), capped(v.y), capped(v.z), capped(v.w));
    } else {
        for (u64 j = i; j < count; j++) x[j] = capped(x[j]);
    }
}

// out[r] = fma(sigmoid(x[r] . gate), y[r], out[r]). grid (rows). x [rows / 8][KB][8][8 rows] x 16 bytes and x_scale [rows], see linear.cu;
// gate [K], K a multiple of 8; y, out [rows, N], N a multiple of 4. Thread t sums channels 8t..8t+7 of each round, ascending; then a
// fixed tree.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_gated(const uint4* x, const float* x_scale, const float* gate, const float* y, float* out, int K, int KB, int N) {
    __shared__ float scratch[THREADS / 32];
    const int row = blockIdx.x;
    const uint4* own = x + (size_t)(row >> 3) * KB * 64 + (row & 7);
    let_next_start();
    after_previous();
    float sum = 0.f;
    for (int o = threadIdx.x; o < K / 8; o += THREADS) {
        const uint4 v = own[o * 8];
        UNROLL for (int i = 0; i < 4; i++) {
            const u32 pair = i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
            const float2 w = ((const float2*)gate)[o * 4 + i];
            sum = __fmaf_rn(w.x, half_to_float((u16)(pair & 0xffff)), sum);
            sum = __fmaf_rn(w.y, half_to_float((u16)(pair >> 16)), sum);
        }
    }
    UNROLL for (int d = 16; d > 0; d >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = scratch[threadIdx.x & (THREADS / 32 - 1)];
    UNROLL for (int d = THREADS / 64; d > 0; d >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    const float share = __fdiv_rn(1.f, __fadd_rn(1.f, expf(-__fmul_rn(sum, x_scale[row]))));
    const float4* from = (const float4*)(y + (size_t)row * N);
    float4* to = (float4*)(out + (size_t)row * N);
    for (int i = threadIdx.x; i < N / 4; i += THREADS) {
        const float4 v = from[i], before = to[i];
        to[i] = make_float4(__fmaf_rn(share, v.x, before.x), __fmaf_rn(share, v.y, before.y), __fmaf_rn(share, v.z, before.z),
                            __fmaf_rn(share, v.w, before.w));
    }
}

// out = join(gate, up), as the gated products of linear.cu write it: largest[r] gets the bits of the row's largest magnitude.
// grid (rows, ceil(N / 1024)). gate, up, out [rows, N], N a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS) join_rows(const float* gate, const float* up, float* out, u32* largest, int N) {
    const int i = blockIdx.y * THREADS + threadIdx.x;
    const size_t at = (size_t)blockIdx.x * (N / 4) + i;
    let_next_start();
    after_previous();
    u32 magnitude = 0;
    if (i * 4 < N) {
        const float4 g = ((const float4*)gate)[at], u = ((const float4*)up)[at];
        const float4 v = make_float4(join(g.x, u.x), join(g.y, u.y), join(g.z, u.z), join(g.w, u.w));
        ((float4*)out)[at] = v;
        UNROLL for (int j = 0; j < 4; j++)
            magnitude = max(magnitude, __float_as_uint(j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w) & 0x7fffffffu);
    }
    UNROLL for (int d = 16; d > 0; d >>= 1) magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, d));
    if ((threadIdx.x & 31) == 0) atomicMax(largest + blockIdx.x, magnitude);
}
