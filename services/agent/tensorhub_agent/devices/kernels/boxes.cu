// Copies of boxes that lie strided at either end, or both, of a GPU's memory. Their elements are bytes: a unit is 1 to 16
// of them, as many as all addresses, strides and rows of a box are aligned to.
//
// The same source compiles as C++ for a CPU, which is how it is tested without a GPU.

#include "boxes.h"

struct __align__(16) Words {
    u64 low;
    u64 high;
};

template <typename Unit>
__device__ __forceinline__ void copy_units(const Turn& turn, const Form& form) {
#pragma unroll
    for (int each = 0; each < UNITS_PER_THREAD; each++) {
        u32 number = turn.first + each * blockDim.x;
        if (number >= turn.box.units) return;
        Ends ends = ends_of(turn.box, form, number, sizeof(Unit), 1, 1);
        *(Unit*)ends.to = *(const Unit*)ends.from;
    }
}

// Grid: x over the blocks of threads of all boxes.
extern "C" __global__ void __launch_bounds__(256) copy_boxes(const Box* boxes, const Form* forms, u32 count) {
    Turn turn = turn_of(boxes, count);
    const Form& form = forms[turn.box.form];
    switch (turn.box.unit) {
        case 4: copy_units<Words>(turn, form); break;
        case 3: copy_units<u64>(turn, form); break;
        case 2: copy_units<u32>(turn, form); break;
        case 1: copy_units<u16>(turn, form); break;
        default: copy_units<u8>(turn, form); break;
    }
}
