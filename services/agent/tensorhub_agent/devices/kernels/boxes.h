// Strided boxes: rows of elements that lie together at both ends, in up to 15 dimensions of strides.
//
// A box is worked on in units, which are some elements of a row. Blocks of threads are given to boxes by how many units
// they have, so that one large box and many small ones keep the GPU equally busy.

#include "tables.h"

#define DIMS_MAX 16
#define UNITS_PER_THREAD 4

// What boxes have in common: the elements of a row, how many rows there are in each dimension, and how many bytes they
// lie apart at both ends.
struct Form {
    u32 dims;
    u32 row;
    u32 shape[DIMS_MAX];
    u64 to_strides[DIMS_MAX];
    u64 origin_strides[DIMS_MAX];
};

// `ends` is how many blocks of threads this box and those before it have. A unit has 1 << `unit` elements.
struct Box {
    u64 to;
    u64 origin;
    u32 form;
    u32 unit;
    u32 units;
    u32 ends;
};

// What a block of threads has to do: its box, and the unit of this thread's that comes first.
struct Turn {
    Box box;
    u32 first;
};

__device__ __forceinline__ Turn turn_of(const Box* boxes, u32 count) {
    u32 number = entry_of_block(boxes, count), begin = number ? boxes[number - 1].ends : 0;
    Turn turn;
    turn.box = boxes[number];
    turn.first = (blockIdx.x - begin) * blockDim.x * UNITS_PER_THREAD + threadIdx.x;
    return turn;
}

// Where a unit lies at both ends; an element has so many bytes there.
struct Ends {
    u64 to;
    u64 from;
};

__device__ __forceinline__ Ends ends_of(
    const Box& box, const Form& form, u32 number, u32 elements, u32 to_bytes, u32 from_bytes) {
    u32 per_row = form.row / elements, row = number / per_row, at = (number - row * per_row) * elements;
    Ends ends;
    ends.to = box.to + (u64)at * to_bytes;
    ends.from = box.origin + (u64)at * from_bytes;
    for (int dim = (int)form.dims - 1; dim >= 0; dim--) {
        u32 above = row / form.shape[dim], index = row - above * form.shape[dim];
        ends.to += index * form.to_strides[dim];
        ends.from += index * form.origin_strides[dim];
        row = above;
    }
    return ends;
}
