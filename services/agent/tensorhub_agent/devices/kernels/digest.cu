// XXH3's digest of 128 bits (seed 0, its default secret) of many pieces at a time, with or without a copy of them.
//
// XXH3 goes through its input in blocks of 1,024 bytes. What a block adds to the accumulator is a sum modulo 2^64 that
// does not depend on the accumulator, and only the scramble behind each block does. So a piece has a group of threads:
// SUM_WARPS warps load blocks, store them where they are copied, and sum them up; one warp more takes the sums in order
// through shared memory and scrambles. A scramble takes some 25 ns, so one piece goes at about 40 GB/s and some forty
// pieces keep the GPU's memory busy.
//
// A piece has at least 241 bytes. XXH3 has other forms below that, and those pieces are for the host.
//
// The same source compiles as C++ for a CPU, which is how it is tested without a GPU.

#include "types.h"

#define BLOCK_BYTES 1024
#define STRIPE_BYTES 64
#define STRIPES_PER_BLOCK 16
#define LANES 8
// Each has two of the eight lanes, which are 16 bytes of the stripe.
#define THREADS_PER_STRIPE 4

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define PRIME_MX1 0x165667919E3779F9ull

// Where in the secret a key begins, in bytes. Stripes of a block take keys at multiples of eight.
#define SECRET_SCRAMBLE 128
#define SECRET_LAST_STRIPE 121
#define SECRET_LOW 11
#define SECRET_HIGH 117

// XXH3's default secret of 192 bytes, as 24 little-endian words.
__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

// One piece. `from` is 0 where the piece is hashed in place.
struct Piece {
    u64 to;
    u64 from;
    u64 nbytes;
};

// On a GPU two words in one access: read through the read-only cache, and written past the others. The test of this
// source on a CPU brings its own.
#ifdef __CUDACC_RTC__
typedef ulonglong2 u64x2;
#define LOAD_ONCE(at) __ldg(at)
#define STORE_ONCE(at, value) __stcs(at, value)
#define EXCHANGE(value, apart) __shfl_xor_sync(0xffffffffu, value, apart)
#define SYNC_WARP() __syncwarp()
#define SYNC_GROUP() __syncthreads()

// A barrier in shared memory. A phase of it is over once each thread of a warp has arrived; who waits for that sees what
// those had stored before.
typedef u64 Barrier;
__device__ __forceinline__ u32 place_in_shared(Barrier* barrier) { return (u32)__cvta_generic_to_shared(barrier); }
__device__ __forceinline__ void prepare(Barrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(place_in_shared(barrier)) : "memory");
}
__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(place_in_shared(barrier))
                 : "memory");
}
#if __CUDA_ARCH__ >= 900
#define IS_OVER "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define IS_OVER "mbarrier.test_wait.parity.shared::cta.b64"
#endif
// Wait for the end of a phase, which is the one under way or the one before.
__device__ __forceinline__ void wait(Barrier* barrier, u32 phase) {
    asm volatile(
        "{ .reg .pred over; again: " IS_OVER " over, [%0], %1; @!over bra again; }" ::"r"(place_in_shared(barrier)),
        "r"(phase & 1)
        : "memory");
}
#endif

struct __align__(16) Words {
    u64 low;
    u64 high;
};

// Return the eight bytes of the secret from any byte on.
__device__ __forceinline__ u64 secret_at(u32 byte) {
    u32 word = byte >> 3, shift = (byte & 7) * 8;
    return shift ? (SECRET[word] >> shift) | (SECRET[word + 1] << (64 - shift)) : SECRET[word];
}

__device__ __forceinline__ u64 blocks_of(u64 nbytes) { return (nbytes - 1) / BLOCK_BYTES; }

__device__ __forceinline__ u64 load_bytes(const u8* at) {
    u64 word = 0;
    for (int byte = 7; byte >= 0; byte--) word = (word << 8) | at[byte];
    return word;
}

__device__ __forceinline__ u64 load_word(const u8* at) {
    return ((u64)at & 7) ? load_bytes(at) : *(const u64*)at;
}

__device__ __forceinline__ void store_bytes(u8* at, u64 word) {
    for (int byte = 0; byte < 8; byte++) at[byte] = (u8)(word >> (8 * byte));
}

__device__ __forceinline__ u64 product(u64 value, u64 key) {
    u64 mixed = value ^ key;
    return (u64)(u32)mixed * (mixed >> 32);
}

#define WARP 32
// A warp takes so many blocks at a turn: each of its loads is 512 bytes one after another, which are half a block.
#define BLOCKS_PER_TURN 8
#define SUM_WARPS 12
// The sums of so many turns have room in shared memory, until they are scrambled.
#define SLOTS 24
// The loads of this many blocks, two a thread, are under way at a time.
#define BLOCKS_PER_STEP 4

// Return the two words of the 16 bytes from `from` on.
template <bool ALIGNED>
__device__ __forceinline__ Words load(const u8* from) {
    Words words;
    if (ALIGNED) {
        u64x2 both = LOAD_ONCE((const u64x2*)from);
        words.low = both.x;
        words.high = both.y;
    } else {
        words.low = load_word(from);
        words.high = load_word(from + 8);
    }
    return words;
}

template <bool ALIGNED>
__device__ __forceinline__ void store(u8* to, Words words) {
    if (ALIGNED) {
        u64x2 both;
        both.x = words.low;
        both.y = words.high;
        STORE_ONCE((u64x2*)to, both);
    } else {
        store_bytes(to, words.low);
        store_bytes(to + 8, words.high);
    }
}

// Return where in a warp's blocks a thread's 16 bytes of a half block are.
__device__ __forceinline__ u32 place_of(u32 block, u32 half, u32 lane) {
    return block * BLOCK_BYTES + half * BLOCK_BYTES / 2 + lane * 16;
}

// Sum up the stripes of up to eight blocks; where the piece is copied, store what was loaded.
//
// A thread loads the same 16 bytes of each half block: two lanes of one stripe. So its four keys stay in registers. Eight
// threads have parts of the same two lanes; they add these up in three exchanges, in each of which a thread hands over
// half of its blocks, and in the end each thread has the two lanes of one block.
template <bool COPIES, bool ALIGNED>
__device__ __forceinline__ void sum_warp(const u8* from, u8* to, u64* sums, u32 count, u32 lane) {
    u32 stripe = lane / THREADS_PER_STRIPE, pair = lane % THREADS_PER_STRIPE;
    u64 keys[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        keys[2 * half] = SECRET[stripe + 8 * half + 2 * pair];
        keys[2 * half + 1] = SECRET[stripe + 8 * half + 2 * pair + 1];
    }
    Words sum[BLOCKS_PER_TURN];
#pragma unroll
    for (int first = 0; first < BLOCKS_PER_TURN; first += BLOCKS_PER_STEP) {
        Words loaded[BLOCKS_PER_STEP][2];
        // All loads of a step before its first store: the compiler can't know that a store changes no later load.
#pragma unroll
        for (int step = 0; step < BLOCKS_PER_STEP; step++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                loaded[step][half].low = loaded[step][half].high = 0;
                if ((u32)(first + step) < count) {
                    loaded[step][half] = load<ALIGNED>(from + place_of(first + step, half, lane));
                }
            }
        }
#pragma unroll
        for (int step = 0; step < BLOCKS_PER_STEP; step++) {
            Words& both = sum[first + step];
            both.low = both.high = 0;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Words words = loaded[step][half];
                if (COPIES && (u32)(first + step) < count) store<ALIGNED>(to + place_of(first + step, half, lane), words);
                // Each lane adds its neighbour's word, and the product of the halves of its own.
                both.low += words.high + product(words.low, keys[2 * half]);
                both.high += words.low + product(words.high, keys[2 * half + 1]);
            }
        }
    }
#pragma unroll
    for (int kept = BLOCKS_PER_TURN / 2, apart = WARP / 2; kept >= 1; kept /= 2, apart /= 2) {
        bool upper = lane & apart;
#pragma unroll
        for (int block = 0; block < kept; block++) {
            Words mine = upper ? sum[kept + block] : sum[block], other = upper ? sum[block] : sum[kept + block];
            sum[block].low = mine.low + EXCHANGE(other.low, apart);
            sum[block].high = mine.high + EXCHANGE(other.high, apart);
        }
    }
    // The bits of the lane that chose the upper half are those of the block's number.
    if (stripe < count) *(Words*)(sums + stripe * LANES + 2 * pair) = sum[0];
}

__device__ __forceinline__ u64 initial(u32 lane) {
    switch (lane) {
        case 0: return PRIME32_3;
        case 1: return PRIME64_1;
        case 2: return PRIME64_2;
        case 3: return PRIME64_3;
        case 4: return PRIME64_4;
        case 5: return PRIME32_2;
        case 6: return PRIME64_5;
        default: return PRIME32_1;
    }
}

__device__ __forceinline__ u64 stripe_of(const u8* at, u32 lane, u64 key) {
    return load_word(at + 8 * (lane ^ 1)) + product(load_word(at + 8 * lane), key);
}

// A step depends on the one before: it is as short as can be. The next sum comes in with the multiplication.
__device__ __forceinline__ u64 scrambled(u64 acc, u64 key, u64 sum) {
    acc ^= (acc >> 47) ^ key;
    return (u64)(u32)acc * PRIME32_1 + sum + ((u64)((u32)(acc >> 32) * PRIME32_1) << 32);
}

__device__ __forceinline__ u64 folded_product(u64 one, u64 other) {
    u64 a = one & 0xffffffffull, b = one >> 32, c = other & 0xffffffffull, d = other >> 32;
    u64 low = a * c, left = b * c, right = a * d, high = b * d;
    u64 middle = (low >> 32) + (left & 0xffffffffull) + right;
    return ((middle << 32) | (low & 0xffffffffull)) ^ (high + (left >> 32) + (middle >> 32));
}

__device__ __forceinline__ u64 merged(const u64* acc, u32 secret, u64 result) {
    for (u32 pair = 0; pair < LANES / 2; pair++) {
        result += folded_product(
            acc[2 * pair] ^ secret_at(secret + 16 * pair), acc[2 * pair + 1] ^ secret_at(secret + 16 * pair + 8));
    }
    result ^= result >> 37;
    result *= PRIME_MX1;
    return result ^ (result >> 32);
}

__device__ __forceinline__ void store_big_endian(u8* at, u64 word) {
    for (int byte = 0; byte < 8; byte++) at[byte] = (u8)(word >> (56 - 8 * byte));
}

// Sums of turns on their way from the warps that compute them to the one that scrambles.
struct Ring {
    u64 sums[SLOTS][BLOCKS_PER_TURN * LANES];
    // Phase n of a slot's barriers is over once its sums are there, or taken, for the turn that has it n-th.
    Barrier filled[SLOTS];
    Barrier taken[SLOTS];
    u64 ends[LANES];
};

// Load, store and sum up the blocks of every turn of this warp.
template <bool COPIES, bool ALIGNED>
__device__ __forceinline__ void sum_turns(const u8* from, u8* to, u64 blocks, Ring& ring, u32 warp, u32 lane) {
    u32 turns = (u32)((blocks + BLOCKS_PER_TURN - 1) / BLOCKS_PER_TURN);
    for (u32 turn = warp; turn < turns; turn += SUM_WARPS) {
        u64 first = (u64)turn * BLOCKS_PER_TURN, at = first * BLOCK_BYTES;
        u32 count = blocks - first < BLOCKS_PER_TURN ? (u32)(blocks - first) : BLOCKS_PER_TURN;
        u32 slot = turn % SLOTS, phase = turn / SLOTS;
        if (phase) wait(&ring.taken[slot], phase - 1);
        sum_warp<COPIES, ALIGNED>(from + at, to + at, ring.sums[slot], count, lane);
        arrive(&ring.filled[slot]);
    }
}

// Copy what lies behind the last whole block of a piece: 1,024 bytes at most.
template <bool ALIGNED>
__device__ __forceinline__ void copy_tail(const u8* from, u8* to, u32 nbytes, u32 lane) {
    Words words[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 at = half * BLOCK_BYTES / 2 + lane * 16;
        if (at + 16 <= nbytes) words[half] = load<ALIGNED>(from + at);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 at = half * BLOCK_BYTES / 2 + lane * 16;
        if (at + 16 <= nbytes) store<ALIGNED>(to + at, words[half]);
        else for (u32 byte = at; byte < nbytes && byte < at + 16; byte++) to[byte] = from[byte];
    }
}

// Scramble the sums in the order of their turns, and finish the digest: 16 bytes, the higher half first, as the host
// stores it. All threads of the warp do what its first eight do, which have a lane each.
template <bool COPIES, bool ALIGNED>
__device__ __forceinline__ void scramble_turns(const u8* from, u8* to, u64 nbytes, Ring& ring, u8* digest, u32 thread) {
    u64 blocks = blocks_of(nbytes), begin = blocks * BLOCK_BYTES;
    u32 lane = thread % LANES, behind = (u32)(nbytes - begin), stripes = (behind - 1) / STRIPE_BYTES;
    if (COPIES) {
        copy_tail<ALIGNED>(from + begin, to + begin, behind, thread);
        SYNC_WARP();
    }
    // The stripes behind the last block, which the four eights of threads share.
    u64 tail = 0;
    for (u32 stripe = thread / LANES; stripe < stripes; stripe += WARP / LANES) {
        tail += stripe_of(to + begin + stripe * STRIPE_BYTES, lane, SECRET[stripe + lane]);
    }
    tail += EXCHANGE(tail, 8);
    tail += EXCHANGE(tail, 16);
    u64 acc = initial(lane), key = secret_at(SECRET_SCRAMBLE + 8 * lane);
    u32 turns = (u32)((blocks + BLOCKS_PER_TURN - 1) / BLOCKS_PER_TURN);
    for (u32 turn = 0; turn < turns; turn++) {
        u32 slot = turn % SLOTS;
        wait(&ring.filled[slot], turn / SLOTS);
        u64 sums[BLOCKS_PER_TURN];
#pragma unroll
        for (int block = 0; block < BLOCKS_PER_TURN; block++) sums[block] = ring.sums[slot][block * LANES + lane];
        arrive(&ring.taken[slot]);
        u64 first = (u64)turn * BLOCKS_PER_TURN;
        acc += sums[0];
        if (blocks - first >= BLOCKS_PER_TURN) {
#pragma unroll
            for (int block = 1; block < BLOCKS_PER_TURN; block++) acc = scrambled(acc, key, sums[block]);
        } else {
#pragma unroll
            for (int block = 1; block < BLOCKS_PER_TURN; block++) {
                if (first + block < blocks) acc = scrambled(acc, key, sums[block]);
            }
        }
        acc = scrambled(acc, key, 0);
    }
    // The last stripe may reach back into the last block, which another warp stored.
    acc += tail + stripe_of(to + nbytes - STRIPE_BYTES, lane, secret_at(SECRET_LAST_STRIPE + 8 * lane));
    if (thread < LANES) ring.ends[lane] = acc;
    SYNC_WARP();
    if (thread == 0) store_big_endian(digest, merged(ring.ends, SECRET_HIGH, ~(nbytes * PRIME64_2)));
    if (thread == 1) store_big_endian(digest + 8, merged(ring.ends, SECRET_LOW, nbytes * PRIME64_1));
}

template <bool COPIES, bool ALIGNED>
__device__ __forceinline__ void digest_piece(const u8* from, u8* to, u64 nbytes, Ring& ring, u8* digest) {
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (warp < SUM_WARPS) sum_turns<COPIES, ALIGNED>(from, to, blocks_of(nbytes), ring, warp, lane);
    else scramble_turns<COPIES, ALIGNED>(from, to, nbytes, ring, digest, lane);
}

template <bool COPIES>
__device__ __forceinline__ void digest_group(const Piece* pieces, u8* digests) {
    __shared__ Ring ring;
    Piece piece = pieces[blockIdx.x];
    u8 *to = (u8*)piece.to, *digest = digests + (u64)blockIdx.x * 16;
    const u8* from = (const u8*)(COPIES ? piece.from : piece.to);
    if (threadIdx.x < SLOTS) {
        prepare(&ring.filled[threadIdx.x]);
        prepare(&ring.taken[threadIdx.x]);
    }
    SYNC_GROUP();
    if ((((u64)from | (u64)to) & 15) == 0) digest_piece<COPIES, true>(from, to, piece.nbytes, ring, digest);
    else digest_piece<COPIES, false>(from, to, piece.nbytes, ring, digest);
}

#define GROUP ((SUM_WARPS + 1) * WARP)

// Grid: x over the pieces, a group of threads each. `digests` takes 16 bytes a piece.
extern "C" __global__ void __launch_bounds__(GROUP) digest_pieces(const Piece* pieces, u8* digests) {
    digest_group<false>(pieces, digests);
}

extern "C" __global__ void __launch_bounds__(GROUP) copy_and_digest(const Piece* pieces, u8* digests) {
    digest_group<true>(pieces, digests);
}
