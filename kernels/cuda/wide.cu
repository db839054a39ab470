// Products of many tokens on Hopper (wide.cuh). Contract, layouts, defines: linear.cu.

#define ARGUMENTS                                                                                                       \
    const TensorMap *weights, const TensorMap *activations, const float *x_scale, const float *bias, float *out, int M, int N, int stride, \
        int tiles, int KB, int accumulate, float4 *partial, u32 *arrived, int slices, u32 *largest

#if GATED_BIAS
#define OUTPUT {out, x_scale, bias, M, N, stride, accumulate, largest, bias + N / 2}
#else
#define OUTPUT {out, x_scale, bias, M, N, stride, accumulate, largest}
#endif

#define WIDE(name, NI, WGS, GATED)                                                                          \
    extern "C" __global__ void __launch_bounds__(128 * (WGS + 1), 1) name(ARGUMENTS) {                                            \
        wide<NI, WGS, GATED>(weights, activations, OUTPUT, tiles, KB, slices, partial, arrived); \
    }

#if !(ACTIVATION || GATED_BIAS)
WIDE(wide_32x192, 4, 3, false)
WIDE(wide_64x128, 8, 2, false)
WIDE(wide_64x192, 8, 3, false)
#endif
WIDE(gated_wide_32x192, 4, 3, true)
WIDE(gated_wide_64x128, 8, 2, true)
WIDE(gated_wide_64x192, 8, 3, true)
WIDE(gated_wide_128x128, 16, 2, true)
