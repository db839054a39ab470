// Reductions over a row's block, and rows of floats as tiles of halves with their sums: what activation.cu says. Define: THREADS.

DEVICE Reduced block_reduce(Reduced v, Reduced* scratch) {
    UNROLL for (int d = 16; d > 0; d >>= 1) {
        v.sum = __fadd_rn(v.sum, __shfl_xor_sync(~0u, v.sum, d));
        v.largest = fmaxf(v.largest, __shfl_xor_sync(~0u, v.largest, d));
    }
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
    __syncthreads();
    v = scratch[threadIdx.x & (THREADS / 32 - 1)];
    UNROLL for (int d = THREADS / 64; d > 0; d >>= 1) {
        v.sum = __fadd_rn(v.sum, __shfl_xor_sync(~0u, v.sum, d));
        v.largest = fmaxf(v.largest, __shfl_xor_sync(~0u, v.largest, d));
    }
    return v;
}

// Channels 4i..4i+3 of row m, scaled down, and the sum of each 32 channels. All lanes of a warp call it together, with `there` where
// there is such an i: i ascends by lane, from a multiple of 32.
DEVICE void emit(u32* out, float* sums, int m, int KB, int i, bool there, float4 v, float down) {
    const int tile = m >> 3, column = m & 7, block = i >> 4;
    float sum = 0.f;
    if (there) {
        const u32 low = floats_to_half2(__fmul_rn(v.x, down), __fmul_rn(v.y, down));
        const u32 high = floats_to_half2(__fmul_rn(v.z, down), __fmul_rn(v.w, down));
        const size_t at = (((size_t)tile * KB + block) * 64 + ((i & 15) >> 1) * 8 + column) * 4 + (i & 1) * 2;
        *(uint2*)(out + at) = make_uint2(low, high);
        sum = __fadd_rn(half_to_float((u16)(low & 0xffff)), half_to_float((u16)(low >> 16)));
        sum = __fadd_rn(sum, half_to_float((u16)(high & 0xffff)));
        sum = __fadd_rn(sum, half_to_float((u16)(high >> 16)));
    }
    UNROLL for (int d = 1; d < 8; d <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    if (there && (threadIdx.x & 7) == 0) sums[(((size_t)tile * KB + block) * 2 + ((i >> 3) & 1)) * 8 + column] = sum;
}
