// Within a group: integers to halves, the P chains, the T chains. The contract and the layouts stand in linear.cu.

static_assert(BITS == 4 || BITS == 8, "weights have 4 or 8 bits");
static_assert(GROUP == 16 && !HAS_MIN || GROUP == 32 || GROUP == 64 || GROUP == 128, "a group has 16 (without minimums), 32, 64 or 128 channels");

constexpr int CENTRE = BITS == 4 ? 8 : 128;
constexpr int GROUPS_A_BLOCK = GROUP < 64 ? 64 / GROUP : 1;
constexpr int BLOCKS_A_GROUP = GROUP > 64 ? GROUP / 64 : 1;
constexpr int STEPS_A_GROUP = GROUP < 64 ? GROUP / 16 : 4;  // k16 steps of a group within one block
constexpr int VECTORS = BITS / 4;
// Blocks of weights in flight a warp, for one tile of channels; fewer where integers or scales take many registers.
constexpr int DEEP = GROUP == 32 || BITS == 8 ? 4 : 8;

// A pair of scales (channels r and r + 8) as it lies in memory.
#if SCALE_F32
typedef float2 Pair;
DEVICE float pair_low(Pair p) { return p.x; }
DEVICE float pair_high(Pair p) { return p.y; }
#else
typedef u32 Pair;
DEVICE float pair_low(Pair p) { return half_to_float((u16)(p & 0xffff)); }
DEVICE float pair_high(Pair p) { return half_to_float((u16)(p >> 16)); }
#endif

struct Weights {
    const uint4* w;
    const Pair* scale;
    const Pair* minimum;
};

// The scales of one block (64 channels of K) of MI tiles, in registers.
template <int MI>
struct Scales {
    Pair scale[MI][GROUPS_A_BLOCK];
#if HAS_MIN
    Pair minimum[MI][GROUPS_A_BLOCK];
#endif
};

template <int MI>
DEVICE void load_scales(Scales<MI>& into, const Weights& weights, int tile, int groups, int block, int lane) {
    UNROLL for (int i = 0; i < MI; i++) UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
        int group = GROUPS_A_BLOCK > 1 ? block * GROUPS_A_BLOCK + g : block / BLOCKS_A_GROUP;
        size_t at = ((size_t)(tile + i) * groups + group) * 8 + (lane >> 2);
        into.scale[i][g] = weights.scale[at];
#if HAS_MIN
        into.minimum[i][g] = weights.minimum[at];
#endif
    }
}

// Integers of one k16 step to an A fragment of exact halves q - CENTRE.
#if BITS == 4
DEVICE void dequantize(const uint4* q, int step, u32* a) {
    u32 v = step == 0 ? q[0].x : step == 1 ? q[0].y : step == 2 ? q[0].z : q[0].w;
    // 0x6400 is 1024; a nibble in its low bits counts ones, one in the next four counts sixteens.
    a[0] = half2_sub(and_or(v, 0x000f000f, 0x64006400), 0x64086408);
    a[1] = half2_fma(and_or(v, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);
    v >>= 8;
    a[2] = half2_sub(and_or(v, 0x000f000f, 0x64006400), 0x64086408);
    a[3] = half2_fma(and_or(v, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);
}
#else
DEVICE void dequantize(const uint4* q, int step, u32* a) {
    uint4 v = q[step >> 1];
    u32 first = step & 1 ? v.z : v.x, second = step & 1 ? v.w : v.y;
    a[0] = half2_sub(__byte_perm(first, 0x64646464, 0x4140), 0x64806480);
    a[1] = half2_sub(__byte_perm(first, 0x64646464, 0x4342), 0x64806480);
    a[2] = half2_sub(__byte_perm(second, 0x64646464, 0x4140), 0x64806480);
    a[3] = half2_sub(__byte_perm(second, 0x64646464, 0x4342), 0x64806480);
}
#endif

// The sums of activations of one group for the two tokens of a lane. A group of 64 or 128 adds those of 32, the block's second after
// its first.
struct GroupSum {
    float even, odd;
};

DEVICE void add_sums(GroupSum& into, float2 v, bool starts) {
    into.even = starts ? v.x : __fadd_rn(into.even, v.x);
    into.odd = starts ? v.y : __fadd_rn(into.odd, v.y);
}

// T at the end of a group; `g` is its place in the block.
template <int MI, int NI>
DEVICE void fold(const float (&P)[MI][NI][4], float (&T)[MI][NI][4], const GroupSum (&X)[NI], const Scales<MI>& scales, int g) {
    UNROLL for (int i = 0; i < MI; i++) {
        const float s0 = pair_low(scales.scale[i][g]), s1 = pair_high(scales.scale[i][g]);
#if HAS_MIN
        const float m0 = __fmaf_rn((float)CENTRE, s0, pair_low(scales.minimum[i][g]));
        const float m1 = __fmaf_rn((float)CENTRE, s1, pair_high(scales.minimum[i][g]));
#endif
        UNROLL for (int n = 0; n < NI; n++) {
            T[i][n][0] = __fmaf_rn(s0, P[i][n][0], T[i][n][0]);
            T[i][n][1] = __fmaf_rn(s0, P[i][n][1], T[i][n][1]);
            T[i][n][2] = __fmaf_rn(s1, P[i][n][2], T[i][n][2]);
            T[i][n][3] = __fmaf_rn(s1, P[i][n][3], T[i][n][3]);
#if HAS_MIN
            T[i][n][0] = __fmaf_rn(m0, X[n].even, T[i][n][0]);
            T[i][n][1] = __fmaf_rn(m0, X[n].odd, T[i][n][1]);
            T[i][n][2] = __fmaf_rn(m1, X[n].even, T[i][n][2]);
            T[i][n][3] = __fmaf_rn(m1, X[n].odd, T[i][n][3]);
#endif
        }
    }
}

// Sums of consecutive tokens: those of each 8 are `stride` floats apart.
struct SumsOfTokens {
    const float* first;
    size_t stride;
    DEVICE float2 operator()(int n) const { return *(const float2*)(first + n * stride); }
};

// Sums of tokens that lie anywhere: `of` says where each of the lane's has its own.
template <int NI>
struct SumsOfPairs {
    const float* const (&of)[NI][2];
    int offset;
    DEVICE float2 operator()(int n) const { return make_float2(of[n][0][offset], of[n][1][offset]); }
};

// Two k16 steps (half a block) of one warp: P chains, and T at the end of each group. x[n] are the B fragments of both steps,
// sums(n) the sums of this half for the lane's two tokens of the n-th 8.
template <int MI, int NI, typename Sums>
DEVICE void multiply(float (&P)[MI][NI][4], float (&T)[MI][NI][4], GroupSum (&X)[NI], const uint4 (*q)[VECTORS],
                     const Scales<MI>& scales, const uint4* x, Sums sums, int half, int block) {
    UNROLL for (int step = half * 2; step < half * 2 + 2; step++) {
        const bool starts = GROUP <= 64 ? step % STEPS_A_GROUP == 0 : step == 0 && block % BLOCKS_A_GROUP == 0;
        const bool ends = GROUP <= 64 ? step % STEPS_A_GROUP == STEPS_A_GROUP - 1
                                      : step == 3 && block % BLOCKS_A_GROUP == BLOCKS_A_GROUP - 1;
        u32 a[MI][4];
        UNROLL for (int i = 0; i < MI; i++) dequantize(q[i], step, a[i]);
        UNROLL for (int n = 0; n < NI; n++) {
            const u32 b0 = step & 1 ? x[n].z : x[n].x, b1 = step & 1 ? x[n].w : x[n].y;
            UNROLL for (int i = 0; i < MI; i++) {
                if (starts) mma_16x8x16_from_zero(P[i][n], a[i], b0, b1);
                else mma_16x8x16(P[i][n], a[i], b0, b1);
            }
        }
#if HAS_MIN
        if (step % 2 == 0) UNROLL for (int n = 0; n < NI; n++) add_sums(X[n], sums(n), starts);
#endif
        if (ends) fold<MI, NI>(P, T, X, scales, GROUPS_A_BLOCK > 1 ? step / STEPS_A_GROUP : 0);
    }
}

#if WARPGROUPS
// The same for a whole block by warpgroups: a are the block's fragments of weights, x is the shared address of the tokens' tiles, sums
// at the lane's tokens of the block. `meanwhile` runs beside the tensor cores.
template <int MI, int NI, typename Meanwhile>
DEVICE void multiply_block(float (&P)[MI][NI][4], float (&T)[MI][NI][4], GroupSum (&X)[NI], const u32 (&a)[4][MI][4],
                           const Scales<MI>& scales, u32 x, const float* sums, int part, Meanwhile meanwhile) {
    const u32 tiles = b_tiles(x);
    UNROLL for (int g = 0; g < GROUPS_A_BLOCK; g++) {
        const bool starts = part % BLOCKS_A_GROUP == 0, ends = part % BLOCKS_A_GROUP == BLOCKS_A_GROUP - 1;
        UNROLL for (int i = 0; i < MI; i++) hold<NI>(P[i]);
        warpgroup_begin();
        UNROLL for (int s = 0; s < STEPS_A_GROUP; s++) UNROLL for (int i = 0; i < MI; i++) {
            const int step = g * STEPS_A_GROUP + s;
            warpgroup_mma<NI>(P[i], a[step][i], tiles + step * (256 >> 4), !(starts && s == 0));
        }
        warpgroup_commit();
#if HAS_MIN
        UNROLL for (int h = 0; h < (STEPS_A_GROUP + 1) / 2; h++) UNROLL for (int n = 0; n < NI; n++)
            add_sums(X[n], *(const float2*)(sums + n * 16 + (g * STEPS_A_GROUP / 2 + h) * 8), starts && h == 0);
#endif
        if (g == 0) meanwhile();
        warpgroup_wait<0>();
        UNROLL for (int i = 0; i < MI; i++) hold<NI>(P[i]);
        if (ends) fold<MI, NI>(P, T, X, scales, g);
    }
}
#endif
