// Stores of products that keep sums in registers. Contract: linear.cu.

// A lane's results of two neighbouring tokens and four channels, 8 apart (two channels of a gated pair). f[i] are those of the i-th tile:
// x and y of the first channel and both tokens, z and w of the one 8 further. What stores need is read before the first of them, or each
// would wait for a read of its own.
template <bool GATED>
struct Results {
    float scale[2], before[2][4];

    DEVICE void read(const Output& o, int token, int channel) {
        UNROLL for (int h = 0; h < 2; h++) {
            scale[h] = scale_of(o, token + h);
            if (GATED || !o.accumulate) continue;
            const bool past = is_past(o, token + h);
            const float* at = o.out + (size_t)(past ? 0 : row_of(o, token + h)) * o.stride + channel;
            UNROLL for (int j = 0; j < 4; j++) before[h][j] = past || channel + j * 8 >= o.N ? 0.f : at[j * 8];
        }
    }

    // All lanes of a warp, whose lanes 4 apart have the same tokens.
    DEVICE void write(const Output& o, int token, int channel, const float4 (&f)[2], const float (&bias)[4]) {
        UNROLL for (int h = 0; h < 2; h++) {
            const float v[4] = {h ? f[0].y : f[0].x, h ? f[0].w : f[0].z, h ? f[1].y : f[1].x, h ? f[1].w : f[1].z};
            if (GATED) {
                const int pair = (channel >> 5) * 16 + (channel & 15);
                u32 magnitude = store_gated(o, token + h, pair, v[0], v[2], scale[h]);
                magnitude = max(magnitude, store_gated(o, token + h, pair + 8, v[1], v[3], scale[h]));
                UNROLL for (int d = 4; d < 32; d <<= 1) magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, d));
                if ((threadIdx.x & 31) < 4 && !is_past(o, token + h)) atomicMax(o.largest + row_of(o, token + h), magnitude);
            } else if (!is_past(o, token + h)) {
                float* at = o.out + (size_t)row_of(o, token + h) * o.stride + channel;
                UNROLL for (int j = 0; j < 4; j++) {
                    float y = __fmul_rn(v[j], scale[h]);
                    if (o.bias) y = __fadd_rn(y, bias[j]);
                    if (o.accumulate) y = __fadd_rn(before[h][j], y);
                    if (channel + j * 8 < o.N) at[j * 8] = y;
                }
            }
        }
    }
};

DEVICE float4 add(float4 a, float4 b) { return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)); }
