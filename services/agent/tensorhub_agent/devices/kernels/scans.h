// Sums and maxima over the threads of a group before each one.

#pragma once

#include "types.h"

#define WARP 32
#define WARPS_MAX_OF_GROUP 32

// The test of this source on a CPU brings its own.
#ifdef __CUDACC_RTC__
#define FROM_BELOW(value, apart) __shfl_up_sync(0xffffffffu, value, apart)
#define ONES(word) ((u32)__popc(word))
#define ZEROS_BEFORE(word) ((u32)__clz(word))
#define SYNC_GROUP() __syncthreads()
#endif

// What a scan needs in shared memory: one number a warp.
struct WarpTotals {
    u32 of[WARPS_MAX_OF_GROUP];
};

struct Sum {
    static __device__ __forceinline__ u32 of(u32 a, u32 b) { return a + b; }
};
struct Largest {
    static __device__ __forceinline__ u32 of(u32 a, u32 b) { return a > b ? a : b; }
};

// Return what the threads before this one have together, 0 for the first; `all` becomes what all have. Every thread of
// the group takes part, and what they stored in shared memory before is there for all afterwards.
template <typename Together>
__device__ __forceinline__ u32 scanned_before(u32 mine, WarpTotals& totals, u32& all) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, found = mine;
#pragma unroll
    for (u32 apart = 1; apart < WARP; apart *= 2) {
        u32 below = FROM_BELOW(found, apart);
        if (lane >= apart) found = Together::of(found, below);
    }
    u32 before = FROM_BELOW(found, 1);
    if (lane == 0) before = 0;
    if (lane == WARP - 1) totals.of[warp] = found;
    SYNC_GROUP();
    all = 0;
    for (u32 each = 0; each < warps; each++) {
        if (each < warp) before = Together::of(before, totals.of[each]);
        all = Together::of(all, totals.of[each]);
    }
    SYNC_GROUP();
    return before;
}
