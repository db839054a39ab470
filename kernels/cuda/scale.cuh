// A row's power of two, and what a row is reduced to before it is known: what activation.cu says.

constexpr float LARGEST = 3.4028235e38f;

struct Reduced {
    float sum, largest;
};

struct Scale {
    float up, down;
};

// The power of two for a row, up and down. A largest magnitude that is not finite leaves the row as it is.
DEVICE Scale scale_of(float largest) {
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127 - 14;
    exponent = !(largest <= LARGEST) || largest == 0.f ? 0 : min(max(exponent, -112), 112);
    return {__uint_as_float((u32)(127 + exponent) << 23), __uint_as_float((u32)(127 - exponent) << 23)};
}
