// What joins a gate and an up (kernels/experts.py, Activation). In float32: bits are a function of the two numbers alone.
// Define: ACTIVATION 0 silu, 1 gelu_tanh, 2 clamped_swiglu; silu if there is none.

#ifndef ACTIVATION
#define ACTIVATION 0
#endif
static_assert(ACTIVATION >= 0 && ACTIVATION <= 2, "silu, gelu_tanh or clamped_swiglu");

DEVICE float silu(float g) { return __fdiv_rn(g, __fadd_rn(1.f, __expf(-g))); }

// g * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) (g + 0.044715 g^3), which is g / (1 + exp(-2 z)).
DEVICE float gelu_tanh(float g) {
    const float cubic = __fmaf_rn(__fmul_rn(0.044715f, __fmul_rn(g, g)), g, g);
    return __fdiv_rn(g, __fadd_rn(1.f, __expf(__fmul_rn(-1.5957691216057308f, cubic))));
}

// Written so that a NaN stays one.
DEVICE float clamped_swiglu(float g, float u) {
    g = g > 7.f ? 7.f : g;
    u = u > 7.f ? 7.f : u < -7.f ? -7.f : u;
    return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.f, __expf(__fmul_rn(-1.702f, g)))), __fadd_rn(u, 1.f));
}

DEVICE float join(float g, float u) {
#if ACTIVATION == 0
    return __fmul_rn(silu(g), u);
#elif ACTIVATION == 1
    return __fmul_rn(gelu_tanh(g), u);
#else
    return clamped_swiglu(g, u);
#endif
}
