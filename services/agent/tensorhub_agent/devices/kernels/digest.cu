// XXH3's digest of 128 bits (seed 0, its default secret) of many pieces at a time, with or without a copy of them.
//
// XXH3 goes through its input in blocks of 1,024 bytes. What a block adds to the accumulator is a sum modulo 2^64 that
// does not depend on the accumulator, and only the scramble behind each block does. So there are two kernels, and a short third one:
//   block_sums     all blocks of all pieces side by side, at the speed of memory
//   scramble_sums  the scrambles of each piece, one after the other: 8 threads a piece, 4,096 steps for 4 MiB
//   finish_digests the last mixing of each piece
// A piece has at least 241 bytes. XXH3 has other forms below that, and those pieces are for the host.
//
// The same source compiles as C++ for a CPU, which is how it is tested without a GPU.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

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

// One piece. `from` is 0 where the piece is hashed in place. `sums` is where its block sums begin, in blocks.
struct Piece {
    u64 to;
    u64 from;
    u64 nbytes;
    u64 sums;
};

// On a GPU two words in one access: read through the read-only cache, and written past the others. The test of this
// source on a CPU brings its own.
#ifdef __CUDACC_RTC__
typedef ulonglong2 u64x2;
#define LOAD_ONCE(at) __ldg(at)
#define STORE_ONCE(at, value) __stcs(at, value)
#define EXCHANGE(value, apart) __shfl_xor_sync(0xffffffffu, value, apart)
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
// A warp takes so many blocks at a time: each of its loads is 512 bytes one after another, which are half a block.
#define BLOCKS_PER_WARP 8
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
    Words sum[BLOCKS_PER_WARP];
#pragma unroll
    for (int first = 0; first < BLOCKS_PER_WARP; first += BLOCKS_PER_STEP) {
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
    for (int kept = BLOCKS_PER_WARP / 2, apart = WARP / 2; kept >= 1; kept /= 2, apart /= 2) {
        bool upper = lane & apart;
#pragma unroll
        for (int block = 0; block < kept; block++) {
            Words mine = upper ? sum[kept + block] : sum[block], other = upper ? sum[block] : sum[kept + block];
            sum[block].low = mine.low + EXCHANGE(other.low, apart);
            sum[block].high = mine.high + EXCHANGE(other.high, apart);
        }
    }
    // The bits of the lane that chose the upper half are those of the block's number.
    if (stripe < count) *(Words*)(sums + (u64)stripe * LANES + 2 * pair) = sum[0];
}

// Grid: x over the warps of the longest piece, 8 blocks each; y over the pieces.
template <bool COPIES>
__device__ __forceinline__ void sum_blocks(const Piece* pieces, u64* sums) {
    Piece piece = pieces[blockIdx.y];
    u64 blocks = blocks_of(piece.nbytes);
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP * BLOCKS_PER_WARP;
    u32 lane = threadIdx.x % WARP;
    const u8* from = (const u8*)(COPIES ? piece.from : piece.to);
    u8* to = (u8*)piece.to;
    if (first < blocks) {
        u32 count = blocks - first < BLOCKS_PER_WARP ? (u32)(blocks - first) : BLOCKS_PER_WARP;
        u64 at = first * BLOCK_BYTES;
        u64* into = sums + (piece.sums + first) * LANES;
        if ((((u64)from | (u64)to) & 15) == 0) {
            sum_warp<COPIES, true>(from + at, to + at, into, count, lane);
        } else {
            sum_warp<COPIES, false>(from + at, to + at, into, count, lane);
        }
    }
    if (COPIES && first <= blocks && blocks < first + BLOCKS_PER_WARP) {
        // What is left of the piece, 1,024 bytes at most, is hashed by `scramble_sums` where it was copied to.
        for (u64 at = blocks * BLOCK_BYTES + lane; at < piece.nbytes; at += WARP) to[at] = from[at];
    }
}

extern "C" __global__ void __launch_bounds__(256) block_sums(const Piece* pieces, u64* sums) {
    sum_blocks<false>(pieces, sums);
}

extern "C" __global__ void __launch_bounds__(256) copy_and_sum(const Piece* pieces, u64* sums) {
    sum_blocks<true>(pieces, sums);
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

#define AHEAD 32

// Grid: x over the pieces, 8 threads each, 32 a block: four pieces. `ends` takes the accumulators, 8 words a piece.
extern "C" __global__ void __launch_bounds__(32) scramble_sums(
    const Piece* pieces, const u64* sums, u64* ends, u32 count) {
    u32 number = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
    if (number >= count) return;
    Piece piece = pieces[number];
    u64 blocks = blocks_of(piece.nbytes), acc = initial(lane), key = secret_at(SECRET_SCRAMBLE + 8 * lane);
    const u64* next = sums + piece.sums * LANES + lane;
    // Sums don't depend on each other: those of the next steps are on their way while these are computed.
    u64 ready[AHEAD], block = 0;
#pragma unroll
    for (int step = 0; step < AHEAD; step++) ready[step] = (u64)step < blocks ? next[step * LANES] : 0;
    if (blocks) acc += ready[0];
    // `acc` has the sum of its block already, so a step takes that of the block after.
    for (; block + 2 * AHEAD < blocks; block += AHEAD) {
        u64 coming[AHEAD];
#pragma unroll
        for (int step = 0; step < AHEAD; step++) coming[step] = next[(block + AHEAD + step) * LANES];
#pragma unroll
        for (int step = 1; step < AHEAD; step++) acc = scrambled(acc, key, ready[step]);
        acc = scrambled(acc, key, coming[0]);
#pragma unroll
        for (int step = 0; step < AHEAD; step++) ready[step] = coming[step];
    }
    for (; block + 1 < blocks; block++) acc = scrambled(acc, key, next[(block + 1) * LANES]);
    if (blocks) acc = scrambled(acc, key, 0);
    const u8* data = (const u8*)piece.to;
    u64 begin = blocks * BLOCK_BYTES, stripes = (piece.nbytes - 1 - begin) / STRIPE_BYTES;
    for (u64 stripe = 0; stripe < stripes; stripe++) {
        acc += stripe_of(data + begin + stripe * STRIPE_BYTES, lane, SECRET[stripe + lane]);
    }
    acc += stripe_of(data + piece.nbytes - STRIPE_BYTES, lane, secret_at(SECRET_LAST_STRIPE + 8 * lane));
    ends[(u64)number * LANES + lane] = acc;
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

// Grid: x over the pieces, a thread each. A digest is 16 bytes, the higher half first, as the host stores it.
extern "C" __global__ void finish_digests(const Piece* pieces, const u64* ends, u8* digests, u32 count) {
    u32 number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    u64 acc[LANES], nbytes = pieces[number].nbytes;
    for (int lane = 0; lane < LANES; lane++) acc[lane] = ends[(u64)number * LANES + lane];
    store_big_endian(digests + (u64)number * 16, merged(acc, SECRET_HIGH, ~(nbytes * PRIME64_2)));
    store_big_endian(digests + (u64)number * 16 + 8, merged(acc, SECRET_LOW, nbytes * PRIME64_1));
}
