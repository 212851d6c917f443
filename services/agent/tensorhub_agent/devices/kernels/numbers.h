// Numbers by their bits, with the host's rounding (`casting`): to nearest, ties to even.

#include "types.h"

// Every operation is rounded by itself, and numbers below the smallest normal one count: as instructions, because a
// compiler's options may say otherwise (`-ftz=true`, which cupy adds). The test of this source on a CPU brings its own.
#ifdef __CUDACC_RTC__
#define FLOAT_OF(bits) __uint_as_float(bits)
#define DOUBLE_OF(bits) __longlong_as_double((long long)(bits))
#define FLOAT_BITS(value) __float_as_uint(value)
#define DOUBLE_BITS(value) ((u64)__double_as_longlong(value))
__device__ __forceinline__ float narrowed(double value) {
    float made;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(made) : "d"(value));
    return made;
}
__device__ __forceinline__ double widened(float value) {
    double made;
    asm("cvt.f64.f32 %0, %1;" : "=d"(made) : "f"(value));
    return made;
}
__device__ __forceinline__ float multiplied(float a, float b) {
    float made;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(made) : "f"(a), "f"(b));
    return made;
}
__device__ __forceinline__ float divided(float a, float b) {
    float made;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(made) : "f"(a), "f"(b));
    return made;
}
#endif

__device__ __forceinline__ bool is_nan(u32 bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// Formats of eight bits as `Fp8Format` has them; what is too large becomes `OVERFLOW_CODE`.
template <int MANTISSA, int BIAS, u32 OVERFLOW_CODE, u32 NAN_CODE, bool SIGNED_ZERO>
__device__ __forceinline__ u8 to_float8(u32 bits) {
    const u32 cut = 23 - MANTISSA, normal = 128 - BIAS;
    u32 magnitude = bits & 0x7fffffffu, exponent = magnitude >> 23, code;
    if (is_nan(bits)) code = NAN_CODE;
    else if (exponent >= normal) {
        code = (magnitude - ((normal - 1) << 23) + (1u << (cut - 1)) - 1 + (magnitude >> cut & 1)) >> cut;
        code = code < OVERFLOW_CODE ? code : OVERFLOW_CODE;
    } else {
        u32 shift = cut + normal - exponent, mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        // With one more bit to go a half is never reached.
        code = shift > 24 ? 0 : (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    }
    u32 sign = bits >> 24 & 0x80;
    return (u8)(SIGNED_ZERO || code ? code | sign : 0);
}

// Return float8_e4m3fn, by the processor's own instruction where it has one. That gives a NaN no sign.
__device__ __forceinline__ u8 to_e4m3fn(u32 bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(__uint_as_float(bits)));
    return (u8)(pair | (bits >> 24 & 0x80));
#else
    return to_float8<3, 7, 0x7e, 0x7f, true>(bits);
#endif
}

__device__ __forceinline__ u32 f16_to_f32(u32 bits) {
    u32 sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    if (magnitude > 0x7c00) return sign | 0x7fc00000u | (magnitude & 0x3ff) << 13;
    if (magnitude == 0x7c00) return sign | 0x7f800000u;
    if (magnitude >= 0x400) return sign | ((magnitude << 13) + 0x38000000u);
    // Below the smallest normal number it is a multiple of 2^-24, which float32 has as a normal one.
    return sign | FLOAT_BITS((float)magnitude * 5.9604644775390625e-8f);
}
