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

// Vectors of scales (or minimums) of a tile of channels that a block's groups have.
constexpr int SCALES_A_TILE = GROUPS_A_BLOCK * 8 * sizeof(Pair) / 16;

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

// T of one tile of channels, `i`, at the end of a group; `g` is its place in the block.
template <int NI, int MI>
DEVICE void fold(const float (&P)[NI][4], float (&T)[NI][4], const GroupSum (&X)[NI], const Scales<MI>& scales, int i, int g) {
    const float s0 = pair_low(scales.scale[i][g]), s1 = pair_high(scales.scale[i][g]);
#if HAS_MIN
    const float m0 = __fmaf_rn((float)CENTRE, s0, pair_low(scales.minimum[i][g]));
    const float m1 = __fmaf_rn((float)CENTRE, s1, pair_high(scales.minimum[i][g]));
#endif
    UNROLL for (int n = 0; n < NI; n++) {
        T[n][0] = __fmaf_rn(s0, P[n][0], T[n][0]);
        T[n][1] = __fmaf_rn(s0, P[n][1], T[n][1]);
        T[n][2] = __fmaf_rn(s1, P[n][2], T[n][2]);
        T[n][3] = __fmaf_rn(s1, P[n][3], T[n][3]);
#if HAS_MIN
        T[n][0] = __fmaf_rn(m0, X[n].even, T[n][0]);
        T[n][1] = __fmaf_rn(m0, X[n].odd, T[n][1]);
        T[n][2] = __fmaf_rn(m1, X[n].even, T[n][2]);
        T[n][3] = __fmaf_rn(m1, X[n].odd, T[n][3]);
#endif
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

// One k16 step of one warp: P chains, and T at the end of each group. b[n] is the B fragment of the n-th 8 tokens, sums(n) the sums of
// the step's half block for the lane's two of them.
template <int MI, int NI, typename Sums>
DEVICE void multiply_step(float (&P)[MI][NI][4], float (&T)[MI][NI][4], GroupSum (&X)[NI], const uint4 (*q)[VECTORS],
                          const Scales<MI>& scales, const uint2 (&b)[NI], Sums sums, int step, int block) {
    const bool starts = GROUP <= 64 ? step % STEPS_A_GROUP == 0 : step == 0 && block % BLOCKS_A_GROUP == 0;
    const bool ends = GROUP <= 64 ? step % STEPS_A_GROUP == STEPS_A_GROUP - 1
                                  : step == 3 && block % BLOCKS_A_GROUP == BLOCKS_A_GROUP - 1;
    u32 a[MI][4];
    UNROLL for (int i = 0; i < MI; i++) dequantize(q[i], step, a[i]);
    UNROLL for (int n = 0; n < NI; n++) UNROLL for (int i = 0; i < MI; i++) {
        if (starts) mma_16x8x16_from_zero(P[i][n], a[i], b[n].x, b[n].y);
        else mma_16x8x16(P[i][n], a[i], b[n].x, b[n].y);
    }
#if HAS_MIN
    if (step % 2 == 0) UNROLL for (int n = 0; n < NI; n++) add_sums(X[n], sums(n), starts);
#endif
    if (ends) UNROLL for (int i = 0; i < MI; i++) fold<NI>(P[i], T[i], X, scales, i, GROUPS_A_BLOCK > 1 ? step / STEPS_A_GROUP : 0);
}

// Two steps (half a block), whose fragments are x[n].
template <int MI, int NI, typename Sums>
DEVICE void multiply(float (&P)[MI][NI][4], float (&T)[MI][NI][4], GroupSum (&X)[NI], const uint4 (*q)[VECTORS],
                     const Scales<MI>& scales, const uint4* x, Sums sums, int half, int block) {
    UNROLL for (int odd = 0; odd < 2; odd++) {
        uint2 b[NI];
        UNROLL for (int n = 0; n < NI; n++) b[n] = odd ? make_uint2(x[n].z, x[n].w) : make_uint2(x[n].x, x[n].y);
        multiply_step<MI, NI>(P, T, X, q, scales, b, sums, half * 2 + odd, block);
    }
}

#if WARPGROUPS
// Begins the P chains of one tile of channels and a group's steps within a block, by warpgroups: a are the block's fragments of weights,
// tokens describes the block's tiles of activations (b_tiles). At most one more group of these is at work.
template <int NI>
DEVICE void multiply_group(float (&P)[NI][4], const u32 (&a)[4][4], u32 tokens, int g, bool starts) {
    hold<NI>(P);
    warpgroup_begin();
    UNROLL for (int s = 0; s < STEPS_A_GROUP; s++) {
        const int step = g * STEPS_A_GROUP + s;
        warpgroup_mma<NI>(P, a[step], tokens + step * (256 >> 4), !(starts && s == 0));
    }
    warpgroup_commit();
}

// Waits for all but the last that was begun: those of P.
template <int NI>
DEVICE void finish(float (&P)[NI][4]) {
    warpgroup_wait<1>();
    hold<NI>(P);
}

template <int NI>
DEVICE void finish_all(float (&P)[NI][4]) {
    warpgroup_wait<0>();
    hold<NI>(P);
}
#endif
