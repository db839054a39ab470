// A matrix as it comes (kernels/matrix.py) to the layout of linear.cu, on the device.
//
// With `b` the matrix is a gate `a` and an up `b`, whose tiles of 16 channels alternate: tile t is tile t / 2 of one of them. Channels from N
// on and columns from K on become weights of zero: integers at the centre, scales and minimums 0.
//
// pack_integers: grid (ceil(KB * BITS / 8), tiles), 256 threads; a thread makes a word. a, b: 4 bits [N, K / 2] bytes, column 2i in the low
//   nibble; 8 bits [N, K] bytes. `shift` is added to every integer: it brings a zero point to the centre.
// pack_scales: grid (ceil(groups / 16), tiles), 256 threads. a, b [N, own_groups] -> out [tiles][groups][8][2].
// Defines: BITS 4 or 8; SCALE_F32 0 or 1.

constexpr u32 CENTRE = BITS == 4 ? 8 : 128;
#if SCALE_F32
typedef float Scale;
#else
typedef u16 Scale;
#endif

// The two columns k and k + 1 of a channel, k even; low and high half of the result.
DEVICE u32 pair_of(const u8* q, int n, int k, int N, int K, int shift) {
    if (n >= N || k >= K) return CENTRE | CENTRE << 16;
#if BITS == 4
    const u32 both = q[(size_t)n * (K / 2) + k / 2];
    return ((both & 15) + shift) | ((both >> 4) + shift) << 16;
#else
    const u8* at = q + (size_t)n * K + k;
    return (at[0] + shift) | (at[1] + shift) << 16;
#endif
}

extern "C" __global__ void __launch_bounds__(256)
    pack_integers(const u8* a, const u8* b, u32* out, int N, int K, int KB, int shift) {
    const int w = blockIdx.x * 256 + threadIdx.x, tile = blockIdx.y, words = KB * BITS * 32;
    let_next_start();
    after_previous();
    if (w >= words) return;
    const u8* q = b && (tile & 1) ? b : a;
    const int lane = (w >> 2) & 31, n = (b ? tile >> 1 : tile) * 16 + (lane >> 2), column = (lane & 3) * 2;
    u32 word = 0;
#if BITS == 4
    const int k = (w >> 7) * 64 + (w & 3) * 16 + column;  // block, step
    UNROLL for (int half = 0; half < 2; half++) UNROLL for (int c = 0; c < 2; c++) {
        const u32 pair = pair_of(q, n + half * 8, k + c * 8, N, K, shift);
        word |= ((pair & 15) | (pair >> 16 & 15) << 16) << (4 * (half + 2 * c));
    }
#else
    const int k = (w >> 8) * 64 + ((w >> 7 & 1) * 2 + (w >> 1 & 1)) * 16 + (w & 1) * 8 + column;
    UNROLL for (int half = 0; half < 2; half++) {
        const u32 pair = pair_of(q, n + half * 8, k, N, K, shift);
        word |= ((pair & 255) | (pair >> 16 & 255) << 8) << (16 * half);
    }
#endif
    out[(size_t)tile * words + w] = word;
}

extern "C" __global__ void __launch_bounds__(256)
    pack_scales(const Scale* a, const Scale* b, Scale* out, int N, int own_groups, int groups) {
    const int i = blockIdx.x * 256 + threadIdx.x, tile = blockIdx.y;
    let_next_start();
    after_previous();
    if (i >= groups * 16) return;
    const Scale* scale = b && (tile & 1) ? b : a;
    const int n = (b ? tile >> 1 : tile) * 16 + (i & 1) * 8 + (i >> 1 & 7), g = i >> 4;
    out[(size_t)tile * groups * 16 + i] = n < N && g < own_groups ? scale[(size_t)n * own_groups + g] : (Scale)0;
}
