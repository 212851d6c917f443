// Tables whose entries have some blocks of threads each: `ends` is how many an entry and those before it have.

#pragma once

#include "types.h"

// Return the entry that this block of threads belongs to: the first that ends behind it.
template <typename Entry>
__device__ __forceinline__ u32 entry_of_block(const Entry* table, u32 count) {
    u32 low = 0, high = count - 1;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (table[middle].ends > blockIdx.x) high = middle;
        else low = middle + 1;
    }
    return low;
}
