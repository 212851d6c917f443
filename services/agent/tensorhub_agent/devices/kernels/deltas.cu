// Deltas of many pieces at a time: what changed of each, by column (`devices.changes`), and overwriting by such columns.
//
// compare          which units of a piece are not what they were, as a bitmap
// number_changes   of each part of a piece, how many changes and bytes of gaps come before it
// gather_changes   the columns themselves: gaps or the bitmap, and the new values by plane
// overwrite        new values into pieces, by such columns
//
// A piece is cut into parts of PART_UNITS units. A unit is 1, 2, 4 or 8 bytes; nothing has to be aligned, and what is
// goes faster. The same source compiles as C++ for a CPU, which is how it is tested without a GPU.

#include "scans.h"
#include "tables.h"

// The test of this source on a CPU brings its own.
#ifdef __CUDACC_RTC__
#define LOAD_ONCE(at) __ldg(at)
typedef ulonglong2 u64x2;
#endif

#define THREADS 256
// A thread has this many words of 32 units of a part.
#define WORDS 4
#define UNITS_PER_THREAD (32 * WORDS)
#define PART_UNITS (THREADS * UNITS_PER_THREAD)
#define PART_BYTES (PART_UNITS / 8)
// The gaps of a part but for its first one: a byte for each change, and steps over units that stay.
#define ROOM_BYTES (PART_UNITS + PART_UNITS / STEP + 1)

#define GAPS 1
#define BITMAP 2
#define STEP 255

// A piece as it was and as it is. `bits` and `starts` have PART_BYTES and a `Start` for each part; `ends` is how many
// parts this piece and those before it have. A unit has 1 << `shift` bytes.
struct Pair {
    u64 old;
    u64 fresh;
    u64 bits;
    u64 starts;
    u32 units;
    u32 shift;
    u32 ends;
    u32 padding;
};

// What comes before a part: how many changes, the unit behind the last of them, and how many bytes of gaps.
struct Start {
    u32 rank;
    u32 next;
    u32 gaps;
    u32 padding;
};

// What a piece has in all.
struct Total {
    u32 changed;
    u32 gaps;
};

// Where the columns of a piece go; nowhere where `planes` is 0.
struct Columns {
    u64 positions;
    u64 planes;
    u32 changed;
    u32 form;
};

struct Turn {
    Pair pair;
    u32 number;
    u32 part;
};

__device__ __forceinline__ Turn turn_of(const Pair* pairs, u32 count) {
    Turn turn;
    turn.number = entry_of_block(pairs, count);
    turn.pair = pairs[turn.number];
    turn.part = blockIdx.x - (turn.number ? pairs[turn.number - 1].ends : 0);
    return turn;
}

__device__ __forceinline__ u32 parts_of(u32 units) { return (units + PART_UNITS - 1) / PART_UNITS; }
__device__ __forceinline__ u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// Comparing. A thread has eight units at a time, which are a byte of the bitmap; its highest bit is the first unit's.

template <typename Unit>
__device__ __forceinline__ bool differ(const u8* old, const u8* fresh) {
    if ((((u64)old | (u64)fresh) & (sizeof(Unit) - 1)) == 0) return *(const Unit*)old != *(const Unit*)fresh;
    bool found = false;
    for (u32 byte = 0; byte < sizeof(Unit); byte++) found |= old[byte] != fresh[byte];
    return found;
}

template <typename Unit>
__device__ __forceinline__ u32 mask_of_some(const u8* old, const u8* fresh, u32 count) {
    u32 mask = 0;
    for (u32 each = 0; each < count; each++) {
        if (differ<Unit>(old + each * sizeof(Unit), fresh + each * sizeof(Unit))) mask |= 0x80 >> each;
    }
    return mask;
}

// Eight units of memory that is aligned to eight bytes, or to sixteen where they are as many.
template <typename Unit>
struct Eight {
    u64 words[sizeof(Unit)];

    __device__ __forceinline__ void load(const u8* at) {
        if constexpr (sizeof(Unit) == 1) words[0] = LOAD_ONCE((const u64*)at);
        else {
#pragma unroll
            for (u32 pair = 0; pair < sizeof(Unit) / 2; pair++) {
                u64x2 both = LOAD_ONCE((const u64x2*)at + pair);
                words[2 * pair] = both.x;
                words[2 * pair + 1] = both.y;
            }
        }
    }
};

template <typename Unit>
__device__ __forceinline__ u32 mask_of_eight(const Eight<Unit>& old, const Eight<Unit>& fresh) {
    u32 mask = 0;
#pragma unroll
    for (u32 word = 0; word < sizeof(Unit); word++) {
        u64 differs = old.words[word] ^ fresh.words[word];
#pragma unroll
        for (u32 each = 0; each < 8 / sizeof(Unit); each++) {
            if ((Unit)(differs >> (8 * sizeof(Unit) * each))) mask |= 0x80 >> (word * (8 / sizeof(Unit)) + each);
        }
    }
    return mask;
}

// A thread has loads of this many times eight units under way, which are 64 bytes of each version at most.
template <typename Unit>
__device__ __forceinline__ void compare_part(const Turn& turn) {
    const u32 together = sizeof(Unit) < 4 ? 4 : 8 / sizeof(Unit);
    u32 begin = turn.part * PART_UNITS, units = smaller(turn.pair.units - begin, PART_UNITS);
    const u8* old = (const u8*)turn.pair.old + (u64)begin * sizeof(Unit);
    const u8* fresh = (const u8*)turn.pair.fresh + (u64)begin * sizeof(Unit);
    u8* bits = (u8*)turn.pair.bits + (u64)turn.part * PART_BYTES;
    bool is_aligned = (((u64)old | (u64)fresh) & (sizeof(Unit) == 1 ? 7 : 15)) == 0;
    for (u32 first = threadIdx.x; first < PART_BYTES; first += together * THREADS) {
        Eight<Unit> before[together], after[together];
        bool is_whole = is_aligned && (first + (together - 1) * THREADS + 1) * 8 <= units;
        if (is_whole) {
#pragma unroll
            for (u32 each = 0; each < together; each++) {
                u64 at = (u64)(first + each * THREADS) * 8 * sizeof(Unit);
                before[each].load(old + at);
                after[each].load(fresh + at);
            }
        }
#pragma unroll
        for (u32 each = 0; each < together; each++) {
            u32 byte = first + each * THREADS, unit = byte * 8;
            if (is_whole) bits[byte] = (u8)mask_of_eight<Unit>(before[each], after[each]);
            else {
                u32 count = unit < units ? smaller(units - unit, 8) : 0;
                u64 at = (u64)unit * sizeof(Unit);
                bits[byte] = (u8)mask_of_some<Unit>(old + at, fresh + at, count);
            }
        }
    }
}

// Grid: x over the parts of all pieces.
extern "C" __global__ void __launch_bounds__(THREADS) compare(const Pair* pairs, u32 count) {
    Turn turn = turn_of(pairs, count);
    switch (turn.pair.shift) {
        case 3: compare_part<u64>(turn); break;
        case 2: compare_part<u32>(turn); break;
        case 1: compare_part<u16>(turn); break;
        default: compare_part<u8>(turn); break;
    }
}

// Numbering. A thread has UNITS_PER_THREAD units that follow one another, so only the gap before its first change can be
// longer than STEP.

struct Words {
    u32 word[WORDS];
};

__device__ __forceinline__ Words words_of(const Pair& pair, u32 part) {
    Words words;
    const u32* bits = (const u32*)(pair.bits + (u64)part * PART_BYTES) + threadIdx.x * WORDS;
#pragma unroll
    for (u32 each = 0; each < WORDS; each++) {
        u32 stored = bits[each];
        words.word[each] = stored << 24 | (stored & 0xff00) << 8 | (stored >> 8 & 0xff00) | stored >> 24;
    }
    return words;
}

// Where a thread's own changes are in the columns: `steps` are those of its first gap, which begins at `start.gaps`.
struct Placed {
    Start start;
    u32 count;
    u32 steps;
};

// Return where a thread's changes of a part are, and move `carry` from the part's beginning to its end.
__device__ __forceinline__ Placed placed(const Words& words, u32 part, Start& carry, WarpTotals& totals) {
    u32 begin = part * PART_UNITS + threadIdx.x * UNITS_PER_THREAD, count = 0, first = 0, next = 0, all;
#pragma unroll
    for (u32 each = 0; each < WORDS; each++) {
        u32 word = words.word[each];
        if (!word) continue;
        if (!count) first = begin + 32 * each + ZEROS_BEFORE(word);
        count += ONES(word);
        // What is behind its last bit.
        next = begin + 32 * each + ZEROS_BEFORE(word & (0 - word)) + 1;
    }
    Placed mine;
    mine.count = count;
    mine.start.rank = scanned_before<Sum>(count, totals, all);
    u32 changed = all;
    mine.start.next = Largest::of(carry.next, scanned_before<Largest>(next, totals, all));
    next = Largest::of(carry.next, all);
    mine.steps = count ? (first - mine.start.next) / STEP : 0;
    mine.start.gaps = carry.gaps + mine.start.rank + scanned_before<Sum>(mine.steps, totals, all);
    mine.start.rank += carry.rank;
    carry.rank += changed;
    carry.next = next;
    carry.gaps += changed + all;
    return mine;
}

// Grid: x over the pieces, a group of threads each.
extern "C" __global__ void __launch_bounds__(THREADS) number_changes(const Pair* pairs, u32 count, Total* total) {
    __shared__ WarpTotals totals;
    if (blockIdx.x >= count) return;
    Pair pair = pairs[blockIdx.x];
    Start carry = {0, 0, 0, 0};
    for (u32 part = 0; part < parts_of(pair.units); part++) {
        if (threadIdx.x == 0) ((Start*)pair.starts)[part] = carry;
        placed(words_of(pair, part), part, carry, totals);
    }
    if (threadIdx.x == 0) {
        total[blockIdx.x].changed = carry.rank;
        total[blockIdx.x].gaps = carry.gaps;
    }
}

// Gathering. A column of a part is put together in shared memory and goes out as a whole.

struct Room {
    u8 byte[ROOM_BYTES];
};

// Hand out what all have put into the room, and have it free again.
__device__ __forceinline__ void empty_room(const Room& room, u8* to, u32 nbytes) {
    SYNC_GROUP();
    for (u32 each = threadIdx.x; each < nbytes; each += THREADS) to[each] = room.byte[each];
    SYNC_GROUP();
}

// Call with the unit of each change of a thread, in their order.
template <typename Take>
__device__ __forceinline__ void for_changes(const Words& words, u32 begin, Take take) {
#pragma unroll
    for (u32 each = 0; each < WORDS; each++) {
        u32 word = words.word[each];
        while (word) {
            u32 bit = ZEROS_BEFORE(word);
            word &= ~(0x80000000u >> bit);
            take(begin + 32 * each + bit);
        }
    }
}

// Grid: x over the parts of all pieces.
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_changes(const Pair* pairs, u32 count, const Columns* places) {
    __shared__ WarpTotals totals;
    __shared__ Room room;
    __shared__ u32 head;
    Turn turn = turn_of(pairs, count);
    const Pair& pair = turn.pair;
    Columns to_columns = places[turn.number];
    if (!to_columns.planes) return;
    u32 part = turn.part, begin = part * PART_UNITS + threadIdx.x * UNITS_PER_THREAD;
    Start from = ((const Start*)pair.starts)[part], to = from;
    Words words = words_of(pair, part);
    Placed mine = placed(words, part, to, totals);
    u32 changed = to.rank - from.rank, rank = mine.start.rank - from.rank;
    u8* positions = (u8*)to_columns.positions;
    if (to_columns.form == BITMAP) {
        u32 at = part * PART_BYTES, nbytes = smaller((pair.units + 7) / 8 - at, PART_BYTES);
        const u8* bits = (const u8*)pair.bits + at;
        for (u32 each = threadIdx.x; each < nbytes; each += THREADS) positions[at + each] = bits[each];
    }
    if (!changed) return;
    if (to_columns.form == GAPS) {
        // The steps of the part's first gap may be far more than the room takes.
        if (mine.count && rank == 0) head = mine.steps;
        SYNC_GROUP();
        for (u32 each = threadIdx.x; each < head; each += THREADS) positions[from.gaps + each] = STEP;
        u32 at = mine.start.gaps - from.gaps - (rank ? head : 0), next = mine.start.next;
        if (mine.count && rank) {
            for (u32 each = 0; each < mine.steps; each++) room.byte[at++] = STEP;
        }
        for_changes(words, begin, [&](u32 unit) {
            room.byte[at++] = (u8)((unit - next) % STEP);
            next = unit + 1;
        });
        empty_room(room, positions + from.gaps + head, to.gaps - from.gaps - head);
    }
    // A byte of each value at a time: the values of a part stay in the first cache.
    const u8* fresh = (const u8*)pair.fresh;
    for (u32 plane = 0; plane < 1u << pair.shift; plane++) {
        u32 at = rank;
        for_changes(words, begin, [&](u32 unit) { room.byte[at++] = fresh[((u64)unit << pair.shift) + plane]; });
        empty_room(room, (u8*)to_columns.planes + (u64)plane * to_columns.changed + from.rank, changed);
    }
}

// Overwriting. `patches` from `first` on are the piece's, one after another.
struct Target {
    u64 at;
    u32 units;
    u32 shift;
    u32 first;
    u32 patches;
};

// Columns of changes. `nbytes` are those of the positions.
struct Patch {
    u64 positions;
    u64 planes;
    u32 changed;
    u32 nbytes;
    u32 form;
    u32 padding;
};

#define BYTES_PER_THREAD 4

template <typename Unit>
__device__ __forceinline__ void store_value(u8* to, const u8* planes, u32 changed) {
    Unit value = 0;
#pragma unroll
    for (u32 plane = 0; plane < sizeof(Unit); plane++) value |= (Unit)((u64)planes[(u64)plane * changed] << (8 * plane));
    if (((u64)to & (sizeof(Unit) - 1)) == 0) *(Unit*)to = value;
    else
        for (u32 byte = 0; byte < sizeof(Unit); byte++) to[byte] = (u8)((u64)value >> (8 * byte));
}

// Go through the positions of a patch; where it `WRITES`, store the value of each. Return whether all of them are units
// of the piece, and as many as there are values. What is not is never written.
template <typename Unit, bool WRITES>
__device__ __forceinline__ bool walk(const Target& target, const Patch& patch, WarpTotals& totals) {
    const u8* positions = (const u8*)patch.positions;
    u32 passed = 0, ranked = 0, all;
    bool is_good = true;
    for (u32 begin = 0; begin < patch.nbytes; begin += THREADS * BYTES_PER_THREAD) {
        u32 first = begin + threadIdx.x * BYTES_PER_THREAD, advance = 0, lands = 0;
        u8 column[BYTES_PER_THREAD];
#pragma unroll
        for (u32 each = 0; each < BYTES_PER_THREAD; each++) {
            // Behind the end nothing lands: no unit is set, or the gap goes on.
            u8 nothing = patch.form == BITMAP ? 0 : STEP;
            column[each] = first + each < patch.nbytes ? positions[first + each] : nothing;
            if (patch.form == BITMAP) lands += ONES(column[each]);
            else if (column[each] != STEP) lands++, advance += column[each] + 1;
            else advance += STEP;
        }
        u32 at = passed + scanned_before<Sum>(advance, totals, all);
        passed += all;
        u32 rank = ranked + scanned_before<Sum>(lands, totals, all);
        ranked += all;
        for (u32 each = 0; each < BYTES_PER_THREAD && lands; each++) {
            u32 left = patch.form == BITMAP ? (u32)column[each] << 24 : column[each] != STEP ? 0x80000000u : 0;
            if (patch.form == GAPS && left == 0) at += STEP;
            while (left) {
                u32 bit = ZEROS_BEFORE(left);
                left &= ~(0x80000000u >> bit);
                u32 unit = patch.form == BITMAP ? (first + each) * 8 + bit : at + column[each];
                at = unit + 1;
                if (unit >= target.units) is_good = false;
                else if (WRITES)
                    store_value<Unit>(
                        (u8*)target.at + (u64)unit * sizeof(Unit), (const u8*)patch.planes + rank, patch.changed);
                rank++;
            }
        }
    }
    return is_good && ranked == patch.changed;
}

template <typename Unit>
__device__ __forceinline__ bool overwrite_piece(const Target& target, const Patch* patches, WarpTotals& totals) {
    u32 wrong = 0, all;
    for (u32 each = 0; each < target.patches; each++) {
        wrong += !walk<Unit, false>(target, patches[target.first + each], totals);
    }
    scanned_before<Sum>(wrong, totals, all);
    if (all) return false;
    for (u32 each = 0; each < target.patches; each++) {
        walk<Unit, true>(target, patches[target.first + each], totals);
        // A later patch may have the same unit.
        SYNC_GROUP();
    }
    return true;
}

// Grid: x over the pieces, a group of threads each. `right` becomes 1 where a piece was overwritten; else nothing of it
// was.
extern "C" __global__ void __launch_bounds__(THREADS)
    overwrite(const Target* targets, u32 count, const Patch* patches, u32* right) {
    __shared__ WarpTotals totals;
    if (blockIdx.x >= count) return;
    Target target = targets[blockIdx.x];
    bool is_right;
    switch (target.shift) {
        case 3: is_right = overwrite_piece<u64>(target, patches, totals); break;
        case 2: is_right = overwrite_piece<u32>(target, patches, totals); break;
        case 1: is_right = overwrite_piece<u16>(target, patches, totals); break;
        default: is_right = overwrite_piece<u8>(target, patches, totals); break;
    }
    if (threadIdx.x == 0) right[blockIdx.x] = is_right;
}
