// Operations of one warp: shuffles, votes, __syncwarp, and the frame for anything else that lanes do together.
//
// A collective suspends each lane with a pointer to its operand. When every live lane that its mask names has arrived
// at the same operation of the same source line, the machine calls `combine` once with all operands, then resumes the
// lanes. Emulated matrix instructions are to be written in the same way: an operand that holds the lane's fragments,
// and a combine that multiplies them.
//
// Stricter than the hardware on purpose: lanes of one collective must stand at the same line (AMD runs a warp in
// lockstep), and a shuffle from a lane that takes no part gives NaN-patterned bytes.
#pragma once

#include "language.hpp"

namespace simt {

typedef unsigned long long LaneMask;

// The operands of the lanes that meet, by lane; null for the others.
struct Group {
    LaneMask lanes;
    void* operand[64];
};

typedef void (*Combine)(Group&);

// Suspends this lane until the lanes of the mask have met.
void collective(const char* name, LaneMask lanes, void* operand, Combine combine, Place place);

unsigned lane();

constexpr LaneMask all_lanes = warpSize == 64 ? ~0ull : (1ull << (warpSize & 63)) - 1;

// HIP wants 64-bit masks on every device; a 32-bit one of ones would name half of a 64-wide warp.
template <class Mask>
inline LaneMask checked_mask(Mask mask) {
    static_assert(warpSize == 32 || sizeof(Mask) == 8, "masks of a 64-wide warp are 64-bit integers");
    return static_cast<LaneMask>(mask) & all_lanes;
}

template <class T>
struct ShuffleOperand {
    T value;
    unsigned source;
    T result;
};

template <class T>
void combine_shuffle(Group& group) {
    for (unsigned lane = 0; lane < unsigned(warpSize); ++lane) {
        auto* operand = static_cast<ShuffleOperand<T>*>(group.operand[lane]);
        if (!operand) continue;
        auto* source = static_cast<ShuffleOperand<T>*>(group.operand[operand->source]);
        if (source)
            operand->result = source->value;
        else
            __builtin_memset(&operand->result, 0xff, sizeof(T));
    }
}

template <class T>
inline T shuffle(const char* name, LaneMask lanes, T value, unsigned source, Place place) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "shuffles move 2, 4 or 8 bytes");
    ShuffleOperand<T> operand{value, source, value};
    collective(name, lanes, &operand, &combine_shuffle<T>, place);
    return operand.result;
}

// The source lanes of the four shuffles within segments of `width` lanes, as the CUDA programming guide has them: a
// source outside of the segment means the lane's own value.
inline unsigned source_index(int index, int width) {
    return (lane() & ~unsigned(width - 1)) | (unsigned(index) & unsigned(width - 1));
}
inline unsigned source_up(unsigned delta, int width) {
    return (lane() & unsigned(width - 1)) >= delta ? lane() - delta : lane();
}
inline unsigned source_down(unsigned delta, int width) {
    return (lane() & unsigned(width - 1)) + delta < unsigned(width) ? lane() + delta : lane();
}
inline unsigned source_xor(int mask, int width) {
    const unsigned source = lane() ^ unsigned(mask), end = (lane() & ~unsigned(width - 1)) + unsigned(width);
    return source < end ? source : lane();
}

struct VoteOperand {
    bool predicate;
    LaneMask ballot;
};

inline void combine_votes(Group& group) {
    LaneMask ballot = 0;
    for (unsigned lane = 0; lane < unsigned(warpSize); ++lane)
        if (group.operand[lane] && static_cast<VoteOperand*>(group.operand[lane])->predicate) ballot |= 1ull << lane;
    for (unsigned lane = 0; lane < unsigned(warpSize); ++lane)
        if (group.operand[lane]) static_cast<VoteOperand*>(group.operand[lane])->ballot = ballot;
}

inline LaneMask vote(const char* name, LaneMask lanes, bool predicate, Place place) {
    VoteOperand operand{predicate, 0};
    collective(name, lanes, &operand, &combine_votes, place);
    return operand.ballot;
}

// The lanes of this warp that have not returned.
LaneMask live_lanes();

}  // namespace simt

template <class Mask = simt::LaneMask>
inline void __syncwarp(Mask mask = simt::all_lanes, SIMT_HERE) {
    simt::collective("__syncwarp", simt::checked_mask(mask), nullptr, nullptr, {file, line});
}
inline simt::LaneMask __activemask() { return simt::live_lanes(); }

template <class Mask, class T>
inline T __shfl_sync(Mask mask, T value, int source, int width = warpSize, SIMT_HERE) {
    return simt::shuffle("__shfl_sync", simt::checked_mask(mask), value, simt::source_index(source, width), {file, line});
}
template <class Mask, class T>
inline T __shfl_up_sync(Mask mask, T value, unsigned delta, int width = warpSize, SIMT_HERE) {
    return simt::shuffle("__shfl_up_sync", simt::checked_mask(mask), value, simt::source_up(delta, width), {file, line});
}
template <class Mask, class T>
inline T __shfl_down_sync(Mask mask, T value, unsigned delta, int width = warpSize, SIMT_HERE) {
    return simt::shuffle("__shfl_down_sync", simt::checked_mask(mask), value, simt::source_down(delta, width),
                         {file, line});
}
template <class Mask, class T>
inline T __shfl_xor_sync(Mask mask, T value, int lane_mask, int width = warpSize, SIMT_HERE) {
    return simt::shuffle("__shfl_xor_sync", simt::checked_mask(mask), value, simt::source_xor(lane_mask, width),
                         {file, line});
}

// HIP's forms without a mask: every lane that has not returned takes part.
template <class T>
inline T __shfl(T value, int source, int width = warpSize, SIMT_HERE) {
    return simt::shuffle("__shfl", simt::all_lanes, value, simt::source_index(source, width), {file, line});
}
template <class T>
inline T __shfl_up(T value, unsigned delta, int width = warpSize, SIMT_HERE) {
    return simt::shuffle("__shfl_up", simt::all_lanes, value, simt::source_up(delta, width), {file, line});
}
template <class T>
inline T __shfl_down(T value, unsigned delta, int width = warpSize, SIMT_HERE) {
    return simt::shuffle("__shfl_down", simt::all_lanes, value, simt::source_down(delta, width), {file, line});
}
template <class T>
inline T __shfl_xor(T value, int lane_mask, int width = warpSize, SIMT_HERE) {
    return simt::shuffle("__shfl_xor", simt::all_lanes, value, simt::source_xor(lane_mask, width), {file, line});
}

template <class Mask>
inline simt::LaneMask __ballot_sync(Mask mask, int predicate, SIMT_HERE) {
    return simt::vote("__ballot_sync", simt::checked_mask(mask), predicate, {file, line});
}
template <class Mask>
inline int __any_sync(Mask mask, int predicate, SIMT_HERE) {
    return simt::vote("__any_sync", simt::checked_mask(mask), predicate, {file, line}) != 0;
}
template <class Mask>
inline int __all_sync(Mask mask, int predicate, SIMT_HERE) {
    return simt::vote("__all_sync", simt::checked_mask(mask), !predicate, {file, line}) == 0;
}
inline simt::LaneMask __ballot(int predicate, SIMT_HERE) {
    return simt::vote("__ballot", simt::all_lanes, predicate, {file, line});
}
inline int __any(int predicate, SIMT_HERE) {
    return simt::vote("__any", simt::all_lanes, predicate, {file, line}) != 0;
}
inline int __all(int predicate, SIMT_HERE) {
    return simt::vote("__all", simt::all_lanes, !predicate, {file, line}) == 0;
}
