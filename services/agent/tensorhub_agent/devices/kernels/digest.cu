// XXH3's digest of 128 bits (seed 0, its default secret) of many pieces at a time, with or without a copy of them.
//
// XXH3 goes through its input in blocks of 1,024 bytes. What a block adds to the accumulator is a sum modulo 2^64 that
// does not depend on the accumulator, and only the scramble behind each block does. So there are two kernels:
//   block_sums     all blocks of all pieces side by side, at the speed of memory
//   finish_digests the scrambles of each piece, one after the other: 8 threads a piece, 4,096 steps for 4 MiB
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
// A block's threads: each of the four has two of the eight lanes, which are 16 bytes of each stripe.
#define THREADS_PER_BLOCK 4

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

// Sum up the stripes of one block of a piece, two lanes of it; where the piece is copied, store what was loaded.
template <bool COPIES, bool ALIGNED>
__device__ __forceinline__ void sum_block(const u8* from, u8* to, u64* sums, u32 pair) {
    u64 even = 0, odd = 0;
    // Eight loads are under way at a time: enough for the memory, and few enough registers for many threads.
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Words loaded[STRIPES_PER_BLOCK / 2];
#pragma unroll
        for (int stripe = 0; stripe < STRIPES_PER_BLOCK / 2; stripe++) {
            u32 at = (half * STRIPES_PER_BLOCK / 2 + stripe) * STRIPE_BYTES + pair * 16;
            if (ALIGNED) {
                loaded[stripe] = *(const Words*)(from + at);
            } else {
                loaded[stripe].low = load_word(from + at);
                loaded[stripe].high = load_word(from + at + 8);
            }
        }
#pragma unroll
        for (int stripe = 0; stripe < STRIPES_PER_BLOCK / 2; stripe++) {
            int number = half * STRIPES_PER_BLOCK / 2 + stripe;
            Words words = loaded[stripe];
            if (COPIES) {
                if (ALIGNED) {
                    *(Words*)(to + number * STRIPE_BYTES + pair * 16) = words;
                } else {
                    store_bytes(to + number * STRIPE_BYTES + pair * 16, words.low);
                    store_bytes(to + number * STRIPE_BYTES + pair * 16 + 8, words.high);
                }
            }
            // Each lane adds its neighbour's word, and the product of the halves of its own.
            even += words.high + product(words.low, SECRET[number + 2 * pair]);
            odd += words.low + product(words.high, SECRET[number + 2 * pair + 1]);
        }
    }
    Words both;
    both.low = even;
    both.high = odd;
    *(Words*)(sums + 2 * pair) = both;
}

// Grid: x over the blocks of the longest piece, 64 a block of 256 threads; y over the pieces.
template <bool COPIES>
__device__ __forceinline__ void sum_blocks(const Piece* pieces, u64* sums) {
    Piece piece = pieces[blockIdx.y];
    u64 blocks = blocks_of(piece.nbytes);
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 block = thread / THREADS_PER_BLOCK;
    u32 pair = thread % THREADS_PER_BLOCK;
    const u8* from = (const u8*)(COPIES ? piece.from : piece.to);
    u8* to = (u8*)piece.to;
    if (block < blocks) {
        u64 at = block * BLOCK_BYTES;
        u64* into = sums + (piece.sums + block) * LANES;
        if ((((u64)from | (u64)to) & 15) == 0) {
            sum_block<COPIES, true>(from + at, to + at, into, pair);
        } else {
            sum_block<COPIES, false>(from + at, to + at, into, pair);
        }
    } else if (COPIES && block == blocks) {
        // What is left of the piece, 1,024 bytes at most, is hashed by `finish_digests` where it was copied to.
        for (u64 at = blocks * BLOCK_BYTES + pair; at < piece.nbytes; at += THREADS_PER_BLOCK) to[at] = from[at];
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

#define AHEAD 16

// Grid: x over the pieces, 8 threads each, 32 a block: four pieces. `ends` takes the accumulators, 8 words a piece.
extern "C" __global__ void __launch_bounds__(32) scramble_sums(
    const Piece* pieces, const u64* sums, u64* ends, u32 count) {
    u32 number = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
    if (number >= count) return;
    Piece piece = pieces[number];
    u64 blocks = blocks_of(piece.nbytes), acc = initial(lane), key = secret_at(SECRET_SCRAMBLE + 8 * lane);
    const u64* next = sums + piece.sums * LANES + lane;
    // The steps depend on each other and the sums do not: they are loaded ahead of the steps that take them.
    u64 ready[AHEAD];
#pragma unroll
    for (int step = 0; step < AHEAD; step++) ready[step] = (u64)step < blocks ? next[step * LANES] : 0;
    for (u64 block = 0; block < blocks; block += AHEAD) {
        u64 coming[AHEAD];
#pragma unroll
        for (int step = 0; step < AHEAD; step++) {
            u64 later = block + AHEAD + step;
            coming[step] = later < blocks ? next[later * LANES] : 0;
        }
#pragma unroll
        for (int step = 0; step < AHEAD; step++) {
            if (block + step < blocks) {
                acc += ready[step];
                acc = (acc ^ (acc >> 47) ^ key) * PRIME32_1;
            }
        }
#pragma unroll
        for (int step = 0; step < AHEAD; step++) ready[step] = coming[step];
    }
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
