// Rows moved as they are: the embedding's rows out of the resident integers, and rows gathered by index.

// out[r, :] = weight[id, :], rounded, times `factor` where SCALED; id is token_ids[r] or, below 0 where LAST_TOKENS,
// last_tokens[-1 - token_ids[r]]. An id that is not below `vocab`, or not one of `num_places`, gives a row of NaN. The matrix lies as linear.cu's header says (A fragments), its
// column j being channel order[j] where ORDERED. grid (rows), 256 threads.
// Defines: BITS, GROUP, HAS_MIN, SCALE_F32; SCALED, ORDERED and LAST_TOKENS 0 or 1, 0 if there are none.
#if SCALE_F32
typedef float Scale;
DEVICE float scale_value(Scale s) { return s; }
#else
typedef u16 Scale;
DEVICE float scale_value(Scale s) { return half_to_float(s); }
#endif

extern "C" __global__ void __launch_bounds__(256)
    embedding(const int* token_ids, const u32* w, const Scale* scale, const Scale* minimum, float* out, int K, int KB, int vocab
#if SCALED
              , float factor
#endif
#if ORDERED
              , const int* order
#endif
#if LAST_TOKENS
              , const int* last_tokens, int num_places
#endif
    ) {
    let_next_start();
    after_previous();
    int n = token_ids[blockIdx.x];
#if LAST_TOKENS
    if (n < 0 && -1 - n < num_places) n = last_tokens[-1 - n];
#endif
    if (n < 0 || n >= vocab) {
        for (int k = threadIdx.x; k < K; k += 256) out[(size_t)blockIdx.x * K + k] = __uint_as_float(0x7fc00000u);
        return;
    }
    const int tile = n >> 4, half = (n >> 3) & 1, r = n & 7;
    const int groups = KB * 64 / GROUP;
    for (int k = threadIdx.x; k < K; k += 256) {
        const int block = k >> 6, step = (k >> 4) & 3, column = (k >> 3) & 1, lane = r * 4 + ((k & 7) >> 1), element = k & 1;
        const size_t fragment = ((size_t)tile * KB + block) * (BITS / 4);
#if BITS == 4
        const u32 q = (w[(fragment * 32 + lane) * 4 + step] >> (4 * (half + 2 * column + 4 * element))) & 15;
#else
        const u32 word = w[((fragment + (step >> 1)) * 32 + lane) * 4 + (step & 1) * 2 + column];
        const u32 q = (word >> (8 * (element + 2 * half))) & 255;
#endif
        const size_t at = (((size_t)tile * groups + k / GROUP) * 8 + r) * 2 + half;
#if HAS_MIN
        const float weight = __fadd_rn(__fmul_rn(scale_value(scale[at]), (float)q), scale_value(minimum[at]));
#else
        const float weight = __fmul_rn(scale_value(scale[at]), (float)((int)q - (BITS == 4 ? 8 : 128)));
#endif
#if SCALED
        const float value = __fmul_rn(factor, weight);
#else
        const float value = weight;
#endif
#if ORDERED
        out[(size_t)blockIdx.x * K + order[k]] = value;
#else
        out[(size_t)blockIdx.x * K + k] = value;
#endif
    }
}

// out[i, :] = x[indices[i], :]. grid (count), 256 threads.
extern "C" __global__ void __launch_bounds__(256) gather_rows(const float* x, const int* indices, float* out, int K) {
    let_next_start();
    after_previous();
    const float* from = x + (size_t)indices[blockIdx.x] * K;
    for (int k = threadIdx.x; k < K; k += 256) out[(size_t)blockIdx.x * K + k] = from[k];
}
