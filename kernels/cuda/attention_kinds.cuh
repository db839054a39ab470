// What a layer's attention may have besides: defines of attention.cu, each 0 or 1, 0 if there is none.
//
//   WINDOW   a row sees its last `window` positions, its own included. Splits are absolute as before: a tile walks those from its first row's
//            first position on, and neither reads the table nor the cache before that. A masked position counts exactly nothing, so where
//            the walk starts changes no bit.
//   SOFTCAP  a score s becomes cap * tanh(s / cap); scale_log2e is 2 log2(e) times the scale over the cap.
//   SINKS    a head's sink is merged before its first split, as a split of sum 1 and values 0.
//   KV_BITS  16 (halves) or 8 (integers with scales) of the cache.

#ifndef KV_BITS
#define KV_BITS 16
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#if WINDOW
#define WINDOW_PARAMETER , int window
#define WINDOW_ARGUMENT , window
#else
#define WINDOW_PARAMETER
#define WINDOW_ARGUMENT
#endif
#if SOFTCAP
#define CAP_PARAMETER , float cap_log2e
#define CAP_ARGUMENT , cap_log2e
#else
#define CAP_PARAMETER
#define CAP_ARGUMENT
#endif
#if SINKS
#define SINKS_PARAMETER , const float *sinks
#define SINKS_ARGUMENT , sinks
#else
#define SINKS_PARAMETER
#define SINKS_ARGUMENT
#endif
#if KV_BITS == 8
#define SCALES_PARAMETER , const u16 *key_scales, const u16 *value_scales
#define SCALES_ARGUMENT , key_scales, value_scales
#else
#define SCALES_PARAMETER
#define SCALES_ARGUMENT
#endif
