// Where the results of products go, and where slices of K begin. The contract and the layouts stand in linear.cu. Defines besides those: EXPERTS (experts.cu), GATED_BIAS and ACTIVATION of gated products; 0 if there are none.

#ifndef EXPERTS
#define EXPERTS 0
#endif
#ifndef GATED_BIAS
#define GATED_BIAS 0
#endif

struct Output {
    float* out;
    const float* x_scale;
    const float* bias;  // or null
    int M, N, stride;  // stride: columns of `out`
    int accumulate;
    u32* largest;  // gated: bits of each token's largest magnitude, zero before
#if GATED_BIAS
    const float* up_bias;  // `bias` is the gate's
#endif
#if EXPERTS
    // In shared memory, of each token of the tile: its row of `out` (-1 past the last), and where its activations start.
    const int* pairs;
    const u32* places;
    int pairs_a_row;  // rows of `out` that share one of x
    const int* expert;  // in shared memory; biases are those of all experts
#endif
};

#if EXPERTS
// A tile's tokens lie anywhere: `token` counts within the tile.
DEVICE bool is_past(const Output& o, int token) { return o.pairs[token] < 0; }
DEVICE int row_of(const Output& o, int token) { return o.pairs[token]; }
DEVICE int source_of(const Output& o, int token) { return o.pairs[token] / o.pairs_a_row; }
DEVICE size_t bias_of(const Output& o, int channels, int channel) { return (size_t)*o.expert * channels + channel; }
// Where a row's activations start, in vectors, and its sums, in floats, in the layouts of linear.cu.
DEVICE u32 place_of(int row, int KB) { return (u32)(row >> 3) * KB * 64 + (row & 7); }
DEVICE u32 sums_of(u32 place) { return (place >> 3) * 2 + (place & 7); }
#else
DEVICE bool is_past(const Output& o, int token) { return token >= o.M; }
DEVICE int row_of(const Output&, int token) { return token; }
DEVICE int source_of(const Output&, int token) { return token; }
DEVICE int bias_of(const Output&, int, int channel) { return channel; }
#endif

// `f` is the sum of the slices of one channel and token.
DEVICE void store(const Output& o, int token, int channel, float f) {
    if (is_past(o, token) || channel >= o.N) return;
    float y = __fmul_rn(f, o.x_scale[source_of(o, token)]);
    if (o.bias) y = __fadd_rn(y, o.bias[bias_of(o, o.N, channel)]);
    float* at = o.out + (size_t)row_of(o, token) * o.stride + channel;
    *at = o.accumulate ? __fadd_rn(*at, y) : y;
}

// Channels count the gated pair once. Returns the bits of the magnitude, whose order as integers is that of the magnitudes.
DEVICE u32 store_gated(const Output& o, int token, int channel, float gate, float up, float s) {
    if (is_past(o, token) || channel >= o.N / 2) return 0;
#if GATED_BIAS
    const size_t own = bias_of(o, o.N / 2, channel);
    const float y = join(__fadd_rn(__fmul_rn(gate, s), o.bias[own]), __fadd_rn(__fmul_rn(up, s), o.up_bias[own]));
#elif ACTIVATION
    const float y = join(__fmul_rn(gate, s), __fmul_rn(up, s));
#else
    const float y = __fmul_rn(silu(__fmul_rn(gate, s)), __fmul_rn(up, s));
#endif
    o.out[(size_t)row_of(o, token) * o.stride + channel] = y;
    return __float_as_uint(y) & 0x7fffffffu;
}

DEVICE float scale_of(const Output& o, int token) { return is_past(o, token) ? 0.f : o.x_scale[source_of(o, token)]; }

DEVICE u32 store_gated(const Output& o, int token, int channel, float gate, float up) {
    return store_gated(o, token, channel, gate, up, scale_of(o, token));
}

// S is 1, 4 or 8.
DEVICE int slice_begin(int slice, int slices, int blocks) {
    const u32 units = blocks / BLOCKS_A_GROUP;
    return (int)(slice * units >> (31 - __clz(slices))) * BLOCKS_A_GROUP;
}
