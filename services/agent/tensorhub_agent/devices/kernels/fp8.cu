// fp8 with scales, by the formulas of the host (`casting.fp8`): float8_e4m3fn values, and a float32 for each block.
//
// largest_*  the largest magnitude of each block, of a whole box
// values_*   what a box becomes by the largest magnitudes of its blocks
// scales     the scales, or the largest magnitudes themselves, laid out
//
// Work is cut into tiles of rows by columns of one block at most; a warp takes rows of a tile, a thread four columns of a
// row at a time. The same source compiles as C++ for a CPU, which is how it is tested without a GPU.

#include "numbers.h"
#include "tables.h"

#define WARP 32
#define WARPS 8
#define TILE_ROWS 32
#define TILE_COLUMNS 1024
#define TOGETHER 4

// The test of this source on a CPU brings its own.
#ifdef __CUDACC_RTC__
#define RAISE(at, value) atomicMax(at, value)
#define EXCHANGE(value, apart) __shfl_xor_sync(0xffffffffu, value, apart)
#endif

#define BY_MULTIPLYING 0
#define BY_DIVIDING 1
#define BY_RECIPROCAL 2
#define LARGEST 448.0f

struct Scheme {
    float amax_min;
    float scale_min;
    u32 order;
    u32 is_power_of_two;
    u32 saturates;
    // For `scales` alone: what is laid out are the largest magnitudes.
    u32 is_amax;
};

// The last two dimensions of a box. `to` and the box that it takes begin at a row and a column of the source's, whose
// blocks are counted from its first row and column. `ends` is how many tiles this matrix and those before it have.
struct Matrix {
    u64 from;
    u64 from_row;
    u64 to;
    u64 to_row;
    u64 amax;
    u32 rows;
    u32 columns;
    u32 first_row;
    u32 first_column;
    u32 to_rows;
    u32 to_columns;
    u32 block_rows;
    u32 block_columns;
    u32 to_column;
    u32 ends;
};

struct F32 {
    typedef u32 Bits;
    static __device__ __forceinline__ u32 bits(u32 bits) { return bits; }
};
struct Bf16 {
    typedef u16 Bits;
    static __device__ __forceinline__ u32 bits(u16 bits) { return (u32)bits << 16; }
};
struct F16 {
    typedef u16 Bits;
    static __device__ __forceinline__ u32 bits(u16 bits) { return f16_to_f32(bits); }
};

template <typename Element>
struct __align__(sizeof(Element) * TOGETHER) Four {
    Element element[TOGETHER];
};

struct Tile {
    Matrix matrix;
    u32 row;
    u32 rows_end;
    u32 column;
    u32 columns_end;
    u32 block_column;
    u32 blocks_across;
};

__device__ __forceinline__ u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
__device__ __forceinline__ u32 parts(u32 size, u32 step) { return (size + step - 1) / step; }

__device__ __forceinline__ Tile tile_of(const Matrix* matrices, u32 count) {
    u32 which = entry_of_block(matrices, count), number = blockIdx.x - (which ? matrices[which - 1].ends : 0);
    Tile tile;
    tile.matrix = matrices[which];
    const Matrix& matrix = tile.matrix;
    u32 in_a_block = parts(matrix.block_columns, TILE_COLUMNS);
    tile.blocks_across = parts(matrix.columns, matrix.block_columns);
    u32 across = tile.blocks_across * in_a_block, part = number % across;
    tile.row = number / across * TILE_ROWS;
    tile.rows_end = smaller(tile.row + TILE_ROWS, matrix.rows);
    tile.block_column = part / in_a_block;
    u32 begin = tile.block_column * matrix.block_columns, end = smaller(begin + matrix.block_columns, matrix.columns);
    tile.column = begin + part % in_a_block * TILE_COLUMNS;
    tile.columns_end = smaller(tile.column + TILE_COLUMNS, end);
    return tile;
}

template <typename Source>
__device__ __forceinline__ Four<typename Source::Bits> load(u64 from, u32 count) {
    typedef typename Source::Bits Bits;
    Four<Bits> four;
    if (count == TOGETHER && from % sizeof(four) == 0) return *(const Four<Bits>*)from;
    for (u32 each = 0; each < TOGETHER; each++) four.element[each] = each < count ? ((const Bits*)from)[each] : 0;
    return four;
}

template <typename Source>
__device__ __forceinline__ void find_largest(const Matrix* matrices, u32 count) {
    Tile tile = tile_of(matrices, count);
    const Matrix& matrix = tile.matrix;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, largest = 0;
    for (u32 row = tile.row + warp; row < tile.rows_end; row += WARPS) {
        u64 from = matrix.from + row * matrix.from_row;
        for (u32 column = tile.column + lane * TOGETHER; column < tile.columns_end; column += WARP * TOGETHER) {
            u32 some = smaller(tile.columns_end - column, TOGETHER);
            Four<typename Source::Bits> four = load<Source>(from + column * sizeof(typename Source::Bits), some);
            // Without their signs numbers are in the order of their bits, and a NaN is above infinity.
            for (u32 each = 0; each < TOGETHER; each++) {
                u32 magnitude = Source::bits(four.element[each]) & 0x7fffffffu;
                largest = largest > magnitude ? largest : magnitude;
            }
        }
        u32 block = row / matrix.block_rows, next = row + WARPS;
        if (next < tile.rows_end && next / matrix.block_rows == block) continue;
        for (u32 apart = WARP / 2; apart >= 1; apart /= 2) {
            u32 other = (u32)EXCHANGE(largest, apart);
            largest = largest > other ? largest : other;
        }
        if (lane == 0) RAISE((u32*)matrix.amax + block * tile.blocks_across + tile.block_column, largest);
        largest = 0;
    }
}

// The larger of two numbers that are not negative; a NaN where the first is one, as numpy has it. Their bits are in the
// order of the numbers.
__device__ __forceinline__ float raised(float value, float least) {
    return FLOAT_BITS(value) >= FLOAT_BITS(least) ? value : least;
}

__device__ __forceinline__ float scale_of(float amax, const Scheme& scheme) {
    float scale = raised(divided(raised(amax, scheme.amax_min), LARGEST), scheme.scale_min);
    if (!scheme.is_power_of_two) return scale;
    u32 bits = FLOAT_BITS(scale), exponent = (bits >> 23 & 0xff) + ((bits & 0x7fffffu) != 0);
    exponent = exponent < 1 ? 1 : exponent > 254 ? 254 : exponent;
    return FLOAT_OF(exponent << 23);
}

__device__ __forceinline__ float factor_of(float amax, const Scheme& scheme) {
    if (scheme.order == BY_RECIPROCAL) {
        return FLOAT_BITS(amax) == 0 || FLOAT_BITS(amax) == 0x7f800000u ? 1.0f : multiplied(divided(1.0f, amax), LARGEST);
    }
    float scale = scale_of(amax, scheme);
    return scheme.order == BY_DIVIDING ? scale : divided(1.0f, scale);
}

template <typename Source>
__device__ __forceinline__ void fill_values(const Matrix* matrices, u32 count, const Scheme& scheme) {
    Tile tile = tile_of(matrices, count);
    const Matrix& matrix = tile.matrix;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 rows_end = smaller(tile.rows_end, matrix.first_row + matrix.to_rows);
    u32 columns_end = smaller(tile.columns_end, matrix.first_column + matrix.to_columns);
    u32 begin = tile.column > matrix.first_column ? tile.column : matrix.first_column, known = ~0u;
    float factor = 0.0f;
    for (u32 row = tile.row + warp; row < rows_end; row += WARPS) {
        if (row < matrix.first_row) continue;
        u32 block = row / matrix.block_rows;
        if (block != known) {
            factor = factor_of(((const float*)matrix.amax)[block * tile.blocks_across + tile.block_column], scheme);
            known = block;
        }
        u64 from = matrix.from + row * matrix.from_row;
        u64 to = matrix.to + (row - matrix.first_row) * matrix.to_row - matrix.first_column;
        for (u32 column = begin + lane * TOGETHER; column < columns_end; column += WARP * TOGETHER) {
            u32 some = smaller(columns_end - column, TOGETHER);
            Four<typename Source::Bits> four = load<Source>(from + column * sizeof(typename Source::Bits), some);
            Four<u8> made;
            for (u32 each = 0; each < TOGETHER; each++) {
                float number = FLOAT_OF(Source::bits(four.element[each]));
                float scaled = scheme.order == BY_DIVIDING ? divided(number, factor) : multiplied(number, factor);
                // Processors differ in which sign a NaN has; here it has none.
                if (scaled != scaled) scaled = scheme.saturates ? LARGEST : FLOAT_OF(0x7fc00000u);
                made.element[each] = to_e4m3fn(FLOAT_BITS(scaled));
            }
            if (some == TOGETHER && (to + column) % sizeof(made) == 0) *(Four<u8>*)(to + column) = made;
            else for (u32 each = 0; each < some; each++) ((u8*)(to + column))[each] = made.element[each];
        }
    }
}

// Grid: x over the tiles of all matrices.
#define KERNELS(name, Source)                                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP) largest_##name(const Matrix* matrices, u32 count) { \
        find_largest<Source>(matrices, count);                                                               \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP)                                                \
        values_##name(const Matrix* matrices, u32 count, const Scheme* scheme) {                             \
        fill_values<Source>(matrices, count, *scheme);                                                       \
    }

KERNELS(float32, F32)
KERNELS(bfloat16, Bf16)
KERNELS(float16, F16)

// Grid: x over the matrices. What goes to column c of a row goes to c times `to_column` bytes.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    scales(const Matrix* matrices, u32 count, const Scheme* scheme) {
    if (blockIdx.x >= count) return;
    Matrix matrix = matrices[blockIdx.x];
    u32 across = parts(matrix.columns, matrix.block_columns), all = parts(matrix.rows, matrix.block_rows) * across;
    for (u32 number = threadIdx.x; number < all; number += blockDim.x) {
        float amax = ((const float*)matrix.amax)[number], made = amax;
        if (!scheme->is_amax) {
            made = scheme->order == BY_RECIPROCAL ? divided(1.0f, factor_of(amax, *scheme)) : scale_of(amax, *scheme);
            if (made != made) made = FLOAT_OF(0x7fc00000u);
        }
        *(float*)(matrix.to + number / across * matrix.to_row + (u64)(number % across) * matrix.to_column) = made;
    }
}
