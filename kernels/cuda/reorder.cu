// Activations with their channels in another order: column j of a matrix may be channel order[j] (GroupedMatrix.input_order). A copy of
// halves, so exact; the sums of 32 are made anew.
//
// Row m of the result is row m / rows_a_source of x, in the order of expert expert_ids[m] where there are experts: order [experts][KB * 64].
// The row's scale goes with it. grid (rows, ceil(KB / 16)), 256 threads. Layouts: see linear.cu.
// Define: THREADS 256.

extern "C" __global__ void __launch_bounds__(THREADS)
    reorder_channels(const u16* x, const float* x_scales, const int4* order, const int* expert_ids, u32* out, float* scales, float* sums,
                     int KB, int rows_a_source) {
    const int m = blockIdx.x, i = blockIdx.y * THREADS + threadIdx.x, source = m / rows_a_source;
    const u16* from = x + ((size_t)(source >> 3) * KB * 64 + (source & 7)) * 8;
    const bool there = i < KB * 16;
    let_next_start();
    after_previous();
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (there) {
        const int4 c = order[(size_t)(expert_ids ? expert_ids[m] : 0) * KB * 16 + i];
        auto channel = [&](int k) { return half_to_float(from[(size_t)(k >> 3) * 64 + (k & 7)]); };
        v = make_float4(channel(c.x), channel(c.y), channel(c.z), channel(c.w));
    }
    emit(out, sums, m, KB, i, there, v, 1.f);
    if (i == 0) scales[m] = x_scales[source];
}
