// Group-wise integer weights times half-precision activations: out[M, N] = x[M, K] w[N, K]^T, or silu(gate) * up of two.
//
// Contract (docs/numerics.md): for one output element
//   P = the mma chain from zero over one group's k16 steps, ascending, on exact half-precision integers q - CENTRE
//   T = fma(scale, P, T), then T = fma(minimum + CENTRE * scale, X, T) where X is the group's sum of activations, of the sums of
//       32 channels that come with them, ascending; groups ascending, one chain a slice of K
//   F = the slices' T added in ascending order, times the row's power-of-two scale, one rounding, then bias, then `out`.
// Slice s covers units [s * units / S, (s + 1) * units / S) of max(64, GROUP) channels; S depends on K alone. Everything else
// (tile, warps, which block computes which slice) is free, and changes no bit: an mma's element depends on its row of weights
// and its column of activations alone.
//
// Weights sit on the 16-row operand and tokens on the 8-column one, so a single token pads to 8 and not to 16. Built for sm_90a, the
// kernels for many tokens use wgmma, weights from registers: on an H200 it gives the bits of mma.sync (tests/gpu/test_products.py).
//
// Layouts, KB = K / 64:
//   w        [N / 16][KB][BITS / 4][32 lanes] x 16 bytes: A fragments in lane order. 4 bits: word j is k16 step j, its nibbles
//            (0,4)(1,5)(2,6)(3,7) are a0..a3. 8 bits: words 2j and 2j + 1 of the lane's two vectors are step j's (a0,a1), (a2,a3).
//   scale    [N / 16][K / GROUP][8][2]: channels r and r + 8 of the tile side by side; minimum likewise.
//   x        [tokens / 8][KB][8][8 tokens] x 16 bytes: tiles of 8 tokens by 8 channels, what ldmatrix and wgmma read.
//   x_sums   [tokens / 8][KB][2][8 tokens] float32: sums over 32 channels.
//   x_scale  [tokens]: powers of two; the true activation is x * x_scale.
//   gated    tiles alternate gate, up; N counts both, out has N / 2 columns. largest[token] gets the bits of the row's largest
//            magnitude, which prepare_gated (activation.cu) scales the row by.
// Defines: BITS 4 or 8; GROUP 16 (only HAS_MIN 0), 32, 64, 128; HAS_MIN 0 or 1; SCALE_F32 0 or 1. ACTIVATION (gate.cuh) and GATED_BIAS
// (bias is the gate's, then the up's) make gated kernels alone.
// Limits: K a multiple of max(64, GROUP), N padded to 64 channels, x allocated to a multiple of 128 tokens.

#define ARGUMENTS                                                                                                       \
    const uint4 *w, const Pair *scale, const Pair *minimum, const uint4 *x, const float *x_sums, const float *x_scale, const float *bias,       \
        float *out, int M, int N, int stride, int tiles, int KB, int accumulate, float *partial, u32 *arrived, int slices,  \
        u32 *largest

#if GATED_BIAS
#define OUTPUT {out, x_scale, bias, M, N, stride, accumulate, largest, bias + N / 2}
#else
#define OUTPUT {out, x_scale, bias, M, N, stride, accumulate, largest}
#endif
#define GATED_ALONE (ACTIVATION || GATED_BIAS)

#define FEW(name, NI, MI, S, WN, PF, GATED, OCC)                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * S * WN, OCC) name(ARGUMENTS) {                                       \
        few_tokens<NI, MI, S, WN, PF, GATED>({w, scale, minimum}, x, x_sums, OUTPUT, tiles, KB);   \
    }

#define MANY(name, WC, WT, NI, SPLIT, GATED, OCC)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WC * WT, OCC) name(ARGUMENTS) {                                      \
        many_tokens<WC, WT, NI, SPLIT, GATED>({w, scale, minimum}, x, x_sums, OUTPUT, tiles, KB, slices, partial, arrived); \
    }

// Names say tokens x channels; few_* also the slices that they are for. `tables.py` picks one.
// Light ones have less in flight a warp and more warps: for many channels.
constexpr int LIGHT = GROUP == 128 && BITS == 4 && !HAS_MIN && !SCALE_F32 ? 3 : 2;
#define FEW_OF(kind, GATED)                          \
    FEW(kind##_8x64_s1, 1, 2, 1, 2, DEEP / 2, GATED, 4)  \
    FEW(kind##_8x64_s4, 1, 2, 4, 2, DEEP / 2, GATED, 2)  \
    FEW(kind##_8x32_s8, 1, 2, 8, 1, DEEP / 2, GATED, 2)  \
    FEW(kind##_8x32_s8_light, 1, 2, 8, 1, 2, GATED, LIGHT) \
    FEW(kind##_16x64_s1, 2, 2, 1, 2, DEEP / 2, GATED, 2) \
    FEW(kind##_16x64_s4, 2, 2, 4, 2, DEEP / 2, GATED, 1) \
    FEW(kind##_16x32_s8, 2, 2, 8, 1, DEEP / 2, GATED, 1)
#if !GATED_ALONE
FEW_OF(few, false)
#endif
FEW_OF(gated_few, true)
#if !GATED_ALONE
FEW(few_8x32_s4, 1, 1, 4, 2, DEEP, false, 2)
FEW(few_8x16_s8, 1, 1, 8, 1, DEEP, false, 2)
#endif

// Three blocks of the middle tile a multiprocessor where the compiler finds the registers without spilling.
#if WARPGROUPS && GROUP == 128 && BITS == 4 && !HAS_MIN
#define MIDDLE 3
#else
#define MIDDLE 2
#endif
#define MANY_OF(kind, SPLIT, GATED)                 \
    MANY(kind##_16x128, 4, 1, 2, SPLIT, GATED, 3) \
    MANY(kind##_32x128, 4, 1, 4, SPLIT, GATED, MIDDLE)
#if !GATED_ALONE
MANY_OF(split, true, false)
MANY_OF(whole, false, false)
#endif
MANY_OF(gated_split, true, true)
MANY_OF(gated_whole, false, true)
// Scales of groups of 16 take too many registers for this tile; so do 8 bits in groups of 32 on Blackwell, and 4 bits in groups of 32
// without minimums on all but Hopper.
#if GROUP > 16 && !(BITS == 8 && GROUP == 32 && __CUDA_ARCH__ >= 1000) && !(BITS == 4 && GROUP == 32 && !HAS_MIN && __CUDA_ARCH__ != 900)
#if !GATED_ALONE
MANY(split_64x128, 4, 1, 8, true, false, 2)
MANY(whole_64x128, 4, 1, 8, false, false, 2)
#endif
MANY(gated_split_64x128, 4, 1, 8, true, true, 2)
MANY(gated_whole_64x128, 4, 1, 8, false, true, 2)
#if WARPGROUPS && BITS == 4  // takes more shared memory than other cards have
#if !GATED_ALONE
MANY(split_64x256, 8, 1, 8, true, false, 1)
MANY(whole_64x256, 8, 1, 8, false, false, 1)
#endif
MANY(gated_split_64x256, 8, 1, 8, true, true, 1)
MANY(gated_whole_64x256, 8, 1, 8, false, true, 1)
#endif
#endif
