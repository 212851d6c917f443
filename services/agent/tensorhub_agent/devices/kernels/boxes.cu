// Copies of boxes that lie strided at either end, or both, of a GPU's memory.
//
// A box is rows of bytes that lie together at both ends, in up to 15 dimensions of strides. It is copied in units of 1 to
// 16 bytes, the largest to which its addresses, strides and rows are all aligned. Blocks of threads are given to boxes by
// how many units they have, so that one large box and many small ones keep the GPU equally busy.
//
// The same source compiles as C++ for a CPU, which is how it is tested without a GPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DIMS_MAX 16
#define UNITS_PER_THREAD 4

struct __align__(16) Words {
    u64 low;
    u64 high;
};

// What boxes have in common: how many rows there are in each dimension, and how far they lie apart at both ends.
struct Form {
    u32 dims;
    u32 row_bytes;
    u32 shape[DIMS_MAX];
    u64 to_strides[DIMS_MAX];
    u64 origin_strides[DIMS_MAX];
};

// `ends` is how many blocks of threads this box and those before it have. A unit has 1 << `unit` bytes.
struct Box {
    u64 to;
    u64 origin;
    u32 form;
    u32 unit;
    u32 units;
    u32 ends;
};

template <typename Unit>
__device__ __forceinline__ void copy_unit(const Box& box, const Form& form, u32 number) {
    u32 per_row = form.row_bytes / sizeof(Unit);
    u32 row = number / per_row;
    u64 at = (u64)(number - row * per_row) * sizeof(Unit), from = box.origin + at, to = box.to + at;
    for (int dim = (int)form.dims - 1; dim >= 0; dim--) {
        u32 above = row / form.shape[dim], index = row - above * form.shape[dim];
        to += index * form.to_strides[dim];
        from += index * form.origin_strides[dim];
        row = above;
    }
    *(Unit*)to = *(const Unit*)from;
}

template <typename Unit>
__device__ __forceinline__ void copy_units(const Box& box, const Form& form, u32 first) {
#pragma unroll
    for (int each = 0; each < UNITS_PER_THREAD; each++) {
        u32 number = first + each * blockDim.x;
        if (number < box.units) copy_unit<Unit>(box, form, number);
    }
}

// Grid: x over the blocks of threads of all boxes.
extern "C" __global__ void __launch_bounds__(256) copy_boxes(const Box* boxes, const Form* forms, u32 count) {
    // The first box that ends behind this block.
    u32 low = 0, high = count - 1;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (boxes[middle].ends > blockIdx.x) high = middle;
        else low = middle + 1;
    }
    Box box = boxes[low];
    const Form& form = forms[box.form];
    u32 begin = low ? boxes[low - 1].ends : 0;
    u32 first = (blockIdx.x - begin) * blockDim.x * UNITS_PER_THREAD + threadIdx.x;
    switch (box.unit) {
        case 4: copy_units<Words>(box, form, first); break;
        case 3: copy_units<u64>(box, form, first); break;
        case 2: copy_units<u32>(box, form, first); break;
        case 1: copy_units<u16>(box, form, first); break;
        default: copy_units<u8>(box, form, first); break;
    }
}
