// Boxes of numbers that become numbers of another format, with the bits that the host's casts have (`casting`).
//
// A unit is eight elements where a box is aligned to as many at both ends, and one where it is not. What comes from
// float64, float32 and bfloat16 is computed; what comes from the rest is looked up in the host's own tables.
//
// The same source compiles as C++ for a CPU, which is how it is tested without a GPU.

#include "boxes.h"
#include "numbers.h"

#define ELEMENTS_PER_UNIT 8
#define ALIGNMENT_MAX 16

// A cast has the types of its elements, and `of` for one. Tables are given to all of them.
struct F32ToBf16 {
    typedef u32 From;
    typedef u16 To;
    static __device__ __forceinline__ u16 of(u32 bits, const void*) {
        return is_nan(bits) ? 0x7fc0 : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

struct F32ToF16 {
    typedef u32 From;
    typedef u16 To;
    static __device__ __forceinline__ u16 of(u32 bits, const void*) {
        u32 sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu, rounded;
        if (is_nan(bits)) rounded = 0x7e00 | (magnitude >> 13 & 0x3ff);
        else if (magnitude >= 0x47800000u) rounded = 0x7c00;
        else if (magnitude < 0x33000000u) rounded = 0;
        else if (magnitude < 0x38800000u) {
            // Below the smallest normal number the exponent says how many bits go.
            u32 shift = 126 - (magnitude >> 23), mantissa = (magnitude & 0x7fffffu) | 0x800000u;
            rounded = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
        } else {
            rounded = (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13;
        }
        return (u16)(sign | rounded);
    }
};

struct F32ToF64 {
    typedef u32 From;
    typedef u64 To;
    static __device__ __forceinline__ u64 of(u32 bits, const void*) {
        if (is_nan(bits)) return (u64)(bits >> 31) << 63 | 0x7ff8000000000000ull | (u64)(bits & 0x3fffffu) << 29;
        return DOUBLE_BITS(widened(FLOAT_OF(bits)));
    }
};

struct F32ToF32 {
    typedef u32 From;
    typedef u32 To;
    static __device__ __forceinline__ u32 of(u32 bits, const void*) { return bits; }
};

template <int MANTISSA, int BIAS, u32 OVERFLOW_CODE, u32 NAN_CODE, bool SIGNED_ZERO>
struct F32ToF8 {
    typedef u32 From;
    typedef u8 To;
    static __device__ __forceinline__ u8 of(u32 bits, const void*) {
        return to_float8<MANTISSA, BIAS, OVERFLOW_CODE, NAN_CODE, SIGNED_ZERO>(bits);
    }
};
struct F32ToF8E4M3fn {
    typedef u32 From;
    typedef u8 To;
    static __device__ __forceinline__ u8 of(u32 bits, const void*) { return to_e4m3fn(bits); }
};
typedef F32ToF8<2, 15, 0x7c, 0x7f, true> F32ToF8E5M2;
typedef F32ToF8<3, 8, 0x80, 0x80, false> F32ToF8E4M3fnuz;
typedef F32ToF8<2, 16, 0x80, 0x80, false> F32ToF8E5M2fnuz;

// Rounded twice on its way to what is narrower than float32, as on the host.
template <typename Narrow>
struct F64By {
    typedef u64 From;
    typedef typename Narrow::To To;
    static __device__ __forceinline__ To of(u64 bits, const void* table) {
        u32 single;
        if ((bits & 0x7fffffffffffffffull) > 0x7ff0000000000000ull) {
            single = (u32)(bits >> 32) & 0x80000000u | 0x7fc00000u | (u32)(bits >> 29) & 0x3fffffu;
        } else {
            single = FLOAT_BITS(narrowed(DOUBLE_OF(bits)));
        }
        return Narrow::of(single, table);
    }
};

template <typename Narrow>
struct Bf16By {
    typedef u16 From;
    typedef typename Narrow::To To;
    static __device__ __forceinline__ To of(u16 bits, const void* table) { return Narrow::of((u32)bits << 16, table); }
};

template <typename Narrow, typename Wide>
struct Lookup {
    typedef Narrow From;
    typedef Wide To;
    static __device__ __forceinline__ Wide of(Narrow code, const void* table) { return ((const Wide*)table)[code]; }
};

template <typename Element, int COUNT>
struct __align__(sizeof(Element) * COUNT < ALIGNMENT_MAX ? sizeof(Element) * COUNT : ALIGNMENT_MAX) Unit {
    Element element[COUNT];
};

template <typename Cast, int ELEMENTS>
__device__ __forceinline__ void cast_units(const Turn& turn, const Form& form, const void* table) {
    typedef Unit<typename Cast::From, ELEMENTS> From;
    typedef Unit<typename Cast::To, ELEMENTS> To;
#pragma unroll
    for (int each = 0; each < UNITS_PER_THREAD; each++) {
        u32 number = turn.first + each * blockDim.x;
        if (number >= turn.box.units) return;
        Ends ends = ends_of(
            turn.box, form, number, ELEMENTS, sizeof(typename Cast::To), sizeof(typename Cast::From));
        From from = *(const From*)ends.from;
        To to;
#pragma unroll
        for (int one = 0; one < ELEMENTS; one++) to.element[one] = Cast::of(from.element[one], table);
        *(To*)ends.to = to;
    }
}

template <typename Cast>
__device__ __forceinline__ void cast_boxes(const Box* boxes, const Form* forms, u32 count, const void* table) {
    Turn turn = turn_of(boxes, count);
    const Form& form = forms[turn.box.form];
    if (turn.box.unit) cast_units<Cast, ELEMENTS_PER_UNIT>(turn, form, table);
    else cast_units<Cast, 1>(turn, form, table);
}

// Grid: x over the blocks of threads of all boxes.
#define KERNEL(name, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                   \
        name(const Box* boxes, const Form* forms, u32 count, const void* table) {                       \
        cast_boxes<__VA_ARGS__>(boxes, forms, count, table);                                            \
    }

#define KERNELS_TO_FLOAT8(from, By)                                  \
    KERNEL(from##_to_float8_e4m3fn, By(F32ToF8E4M3fn))               \
    KERNEL(from##_to_float8_e5m2, By(F32ToF8E5M2))                   \
    KERNEL(from##_to_float8_e4m3fnuz, By(F32ToF8E4M3fnuz))           \
    KERNEL(from##_to_float8_e5m2fnuz, By(F32ToF8E5M2fnuz))
#define BY_ITSELF(Narrow) Narrow
#define BY_F64(Narrow) F64By<Narrow>
#define BY_BF16(Narrow) Bf16By<Narrow>

KERNEL(float32_to_bfloat16, F32ToBf16)
KERNEL(float32_to_float16, F32ToF16)
KERNEL(float32_to_float64, F32ToF64)
KERNELS_TO_FLOAT8(float32, BY_ITSELF)
KERNEL(float64_to_bfloat16, F64By<F32ToBf16>)
KERNEL(float64_to_float16, F64By<F32ToF16>)
KERNEL(float64_to_float32, F64By<F32ToF32>)
KERNELS_TO_FLOAT8(float64, BY_F64)
KERNEL(bfloat16_to_float16, Bf16By<F32ToF16>)
KERNEL(bfloat16_to_float32, Bf16By<F32ToF32>)
KERNEL(bfloat16_to_float64, Bf16By<F32ToF64>)
KERNELS_TO_FLOAT8(bfloat16, BY_BF16)
KERNEL(lookup_2_to_1, Lookup<u16, u8>)
KERNEL(lookup_2_to_2, Lookup<u16, u16>)
KERNEL(lookup_2_to_4, Lookup<u16, u32>)
KERNEL(lookup_2_to_8, Lookup<u16, u64>)
KERNEL(lookup_1_to_1, Lookup<u8, u8>)
KERNEL(lookup_1_to_2, Lookup<u8, u16>)
KERNEL(lookup_1_to_4, Lookup<u8, u32>)
KERNEL(lookup_1_to_8, Lookup<u8, u64>)
