// D = alpha op(A) op(B) + beta C of complex64 on Hopper's tensor cores, from operands as they lie.
//
// Half of a block's warps are producers: they bring chunk after chunk of k of both operands into registers, split them
// into float16 planes in a stage of shared memory, and have the next chunk on its way meanwhile. The others are
// consumers: one warpgroup multiplies the planes to the real parts of the sums, another one to the imaginary ones. Every
// chunk of a vector has its own scale, and every chunk of a tile is judged: what planes do not serve is computed by
// multiply-adds, in its turn (gemmserve_kernels.algorithms.fused.gemm has the proof).
#include "../common/memory/element.cuh"
#include "../common/numbers/truncation.cuh"
#include "multiply.cuh"

using OperandA = ChunkOperand<GEMM_A_ALONG_K, GEMM_VECTOR_A, GEMM_CONJUGATE_A>;
using OperandB = ChunkOperand<GEMM_B_ALONG_K, GEMM_VECTOR_B, GEMM_CONJUGATE_B>;

// The n-th stage of all that a block fills.
struct Turn {
    int stage = 0;
    unsigned parity = 0;
    GEMM_DEVICE void next() {
        if (++stage == Config::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// What producers and consumers share.
struct Pipeline {
    unsigned char* stages;
    Address full, empty, together;  // barriers: of each stage, and of the consumers

    GEMM_DEVICE unsigned char* stage(const Turn& turn) const { return stages + turn.stage * Config::STAGE_BYTES; }
    GEMM_DEVICE Address filled(const Turn& turn) const { return full + turn.stage * sizeof(Barrier); }
    GEMM_DEVICE Address emptied(const Turn& turn) const { return empty + turn.stage * sizeof(Barrier); }
};

// Says for the warp that all its lanes have come so far.
GEMM_DEVICE void arrive(Address barrier, int thread) {
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(barrier);
}

// A part of k of a tile.
struct Item {
    Long tile;  // of this launch
    int split;
    TileCoordinate where;
    Long row, column;
    int rows, columns;  // inside

    GEMM_DEVICE Item(const FusedParams& params, unsigned number) {
        const GemmParams& gemm = params.gemm;
        tile = number;
        split = 0;
        if (params.splits > 1) {
            tile = number / params.splits;
            split = static_cast<int>(number % params.splits);
        }
        const Long place = gemm.first_tile + tile;
        where = gemm.tiles_m * gemm.tiles_n == 1 ? TileCoordinate{place, 0, 0}
                                                 : tile_of<GEMM_RASTER>(place, gemm.tiles_m, gemm.tiles_n);
        row = where.tile_m * Config::BLOCK_M;
        column = where.tile_n * Config::BLOCK_N;
        rows = static_cast<int>(gemm.m - row < Config::BLOCK_M ? gemm.m - row : Config::BLOCK_M);
        columns = static_cast<int>(gemm.n - column < Config::BLOCK_N ? gemm.n - column : Config::BLOCK_N);
    }
};

// Element offset of a matrix of the batch. Mostly one axis is left, and nothing to divide.
GEMM_DEVICE Long offset_of(Long batch, const GemmParams& gemm, const MatrixParams& matrix) {
    if (batch < gemm.batch_shape[BATCH_DIMS - 1]) return batch * matrix.batch_stride[BATCH_DIMS - 1];
    return batch_offset(batch, gemm.batch_shape, matrix.batch_stride);
}

// What producers keep of an item.
struct Chunks {
    const Value* a;
    const Value* b;
    int rows, columns;
    int next, end;

    GEMM_DEVICE Chunks(const FusedParams& params, const Item& item) : rows(item.rows), columns(item.columns) {
        const GemmParams& gemm = params.gemm;
        const Long batch = item.where.batch;
        a = static_cast<const Value*>(gemm.a.re) + offset_of(batch, gemm, gemm.a) +
            item.row * gemm.a.row_stride;
        b = static_cast<const Value*>(gemm.b.re) + offset_of(batch, gemm, gemm.b) +
            item.column * gemm.b.column_stride;
        next = item.split * params.chunks_part;
        end = next + params.chunks_part < params.chunks ? next + params.chunks_part : params.chunks;
    }
};

// Where a chunk lies in k: the first chunks have one pair of steps more.
struct Steps {
    Long first;
    int count;

    GEMM_DEVICE Steps(const FusedParams& params, int chunk) {
        const bool longer = chunk < params.longer;
        first = 2 * (static_cast<Long>(chunk) * params.pairs + (longer ? chunk : params.longer));
        const Long last = first + 2 * (params.pairs + longer);
        count = static_cast<int>((last < params.gemm.k ? last : params.gemm.k) - first);
    }
};

// The chunks of all items of a block, one after the other.
struct Cursor {
    unsigned number;
    Chunks chunks;

    GEMM_DEVICE explicit Cursor(const FusedParams& params) : number(blockIdx.x), chunks(params, Item(params, number)) {}
    GEMM_DEVICE Cursor(const FusedParams& params, unsigned item, int chunk)
        : number(item), chunks(params, Item(params, item)) {
        chunks.next = chunk;
    }
    // Goes on to the next one. False: there is none.
    GEMM_DEVICE bool next(const FusedParams& params) {
        if (++chunks.next < chunks.end) return true;
        if (gridDim.x >= params.items - number) return false;
        number += gridDim.x;
        chunks = Chunks(params, Item(params, number));
        return true;
    }
    GEMM_DEVICE ChunkPlace in_a(const FusedParams& params, const Steps& steps) const {
        return {chunks.a + steps.first * params.gemm.a.column_stride, chunks.rows, steps.count};
    }
    GEMM_DEVICE ChunkPlace in_b(const FusedParams& params, const Steps& steps) const {
        return {chunks.b + steps.first * params.gemm.b.row_stride, chunks.columns, steps.count};
    }
};

GEMM_DEVICE void produce(const FusedParams& params, const Pipeline& pipeline, int thread) {
    const GemmParams& gemm = params.gemm;
    const OperandA side_a(thread);
    const OperandB side_b(thread);
    OperandA::Held held_a;
    OperandB::Held held_b;
    Cursor cursor(params);
    Turn turn;
    turn.parity = 1;  // the first time around all stages are empty
    Steps steps(params, cursor.chunks.next);
    side_a.load(held_a, cursor.in_a(params, steps), gemm.a.row_stride, gemm.a.column_stride);
    side_b.load(held_b, cursor.in_b(params, steps), gemm.b.column_stride, gemm.b.row_stride);
    bool more = true;
#pragma unroll 1
    while (more) {
        const int count = steps.count;
        more = cursor.next(params);
        if (more) steps = Steps(params, cursor.chunks.next);
        barrier_wait(pipeline.emptied(turn), turn.parity);
        unsigned char* const stage = pipeline.stage(turn);
        float* const scales = reinterpret_cast<float*>(stage + Config::SCALES_AT);
        int* const counts = reinterpret_cast<int*>(stage + Config::COUNTS_AT);
        bool promised = side_a.split(held_a, count, stage, scales, counts);
        if (more) side_a.load(held_a, cursor.in_a(params, steps), gemm.a.row_stride, gemm.a.column_stride);
        promised &= side_b.split(
            held_b, count, stage + Config::SIDE, scales + Config::BLOCK_M, counts + Config::BLOCK_M);
        if (more) side_b.load(held_b, cursor.in_b(params, steps), gemm.b.column_stride, gemm.b.row_stride);
        const int doubt = __any_sync(0xffffffffu, !promised);
        if (thread % 32 == 0) reinterpret_cast<int*>(stage + Config::DOUBTS_AT)[thread / 32] = doubt;
        written_for_tensor_cores();
        arrive(pipeline.filled(turn), thread);
        turn.next();
    }
}

// The consumers wait for each other.
struct Meeting {
    Address barrier;
    unsigned parity = 0;

    GEMM_DEVICE void meet(int thread) {
        arrive(barrier, thread);
        barrier_wait(barrier, parity);
        parity ^= 1;
    }
};

// A thread's elements of a tile: column 8 j + 2 (lane % 4) + e % 2 of its half, row 16 warp + 8 (e / 2) + lane / 4.
struct Sums {
    static constexpr int COLUMNS = PartSums::COLUMNS / 2;
    float re[COLUMNS][4], im[COLUMNS][4];
};

// The larger of two of every lane's numbers.
GEMM_DEVICE int largest(int x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, x, lane);
        x = other > x ? other : x;
    }
    return x;
}

// What is known of the vectors of one side of a chunk, by a whole warp.
GEMM_DEVICE Deficits deficits_of_chunk(const int* counts) {
    int words[GROUP_WORDS] = {0, 0, 0, 0}, has_re = 0, has_im = 0;
    for (int vector = static_cast<int>(threadIdx.x) % 32; vector < Config::BLOCK_M; vector += 32) {
        const int word = counts[vector];
        const bool re = (word & HAS_REAL) != 0, im = (word & HAS_IMAGINARY) != 0;
        if (!re && !im) continue;  // adds nothing to any sum, and loses nothing
        const int small_re = word & 0x7f, small_im = word >> IMAGINARY_AT & 0x7f;
        int best = small_re < small_im ? small_re : small_im, worst = small_re < small_im ? small_im : small_re;
        const int lossy = (re ? small_re : 0) + (im ? small_im : 0);
        if ((word & UNSERVED) != 0) best = worst = NEVER;
        words[0] = best > words[0] ? best : words[0];
        words[1] = worst > words[1] ? worst : words[1];
        words[2] = lossy > words[2] ? lossy : words[2];
        has_re |= re;
        has_im |= im;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) words[i] = largest(words[i]);
    words[3] = largest(has_re) | largest(has_im) << 1;
    return Deficits(words);
}

// Leaves the sums of one part of `count`; the block that comes last gets those of all, added up in their order,
// whichever it is. `served`: whether planes served all of the part, and then all parts; `place`: where the sums of the
// first part lie; `last`: shared memory. False: another block will come.
GEMM_DEVICE bool gather(
    Sums& sums, bool& served, float* place, int part, int count, unsigned* arrivals, int* last, Meeting& meeting,
    int thread) {
    constexpr unsigned UNSERVED_PART = 1u << 16;
    constexpr int PIECES = 2 * Sums::COLUMNS, TILE = PIECES * Config::CONSUMERS;
    using Piece = Vector<float, 4>;
    Piece* const pieces = reinterpret_cast<Piece*>(place) + thread;
    const auto part_of = [&](int p) -> float(&)[4] {
        return p % 2 == 0 ? sums.re[p / 2] : sums.im[p / 2];
    };
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const float(&from)[4] = part_of(p);
        pieces[static_cast<Long>(part) * TILE + p * Config::CONSUMERS] = Piece{{from[0], from[1], from[2], from[3]}};
    }
    __threadfence();
    meeting.meet(thread);
    if (thread == 0) {
        const unsigned own = served ? 1u : UNSERVED_PART + 1u, all = atomicAdd(arrivals, own) + own;
        *last = all % UNSERVED_PART != static_cast<unsigned>(count) ? 0 : all < UNSERVED_PART ? 1 : 2;
    }
    meeting.meet(thread);
    if (*last == 0) return false;
    served = *last == 1;
    __threadfence();
    sums = {};
#pragma unroll 2
    for (int from = 0; from < count; ++from) {
        Piece piece[PIECES];
#pragma unroll
        for (int p = 0; p < PIECES; ++p) piece[p] = pieces[static_cast<Long>(from) * TILE + p * Config::CONSUMERS];
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            float(&to)[4] = part_of(p);
#pragma unroll
            for (int e = 0; e < 4; ++e) to[e] += piece[p].at[e];
        }
    }
    return true;
}

// The sums of all splits of a tile. False: another block has them.
GEMM_DEVICE bool gather_splits(
    const FusedParams& params, const Item& item, Sums& sums, bool& served, int* last, Meeting& meeting, int thread) {
    constexpr Long TILE = 8 * Sums::COLUMNS * Config::CONSUMERS;
    const int groups = (params.splits + params.together - 1) / params.together, group = item.split / params.together;
    const int first = group * params.together, left = params.splits - first;
    unsigned* const arrivals = params.arrivals + item.tile * (groups + 1);
    float* const place = params.partial + (item.tile * params.splits + first) * TILE;
    const int count = left < params.together ? left : params.together;
    if (!gather(sums, served, place, item.split - first, count, arrivals + group, last, meeting, thread)) return false;
    if (groups == 1) return true;
    float* const grouped = params.grouped + item.tile * groups * TILE;
    return gather(sums, served, grouped, group, groups, arrivals + groups, last, meeting, thread);
}

GEMM_DEVICE void store(const GemmParams& gemm, const Item& item, const Sums& sums, int in_row, int first_column) {
    const Long batch = item.where.batch;
    const Long d_at = offset_of(batch, gemm, gemm.d) + (item.row + in_row) * gemm.d.row_stride +
                      (item.column + first_column) * gemm.d.column_stride;
    const Long c_at = offset_of(batch, gemm, gemm.c) + (item.row + in_row) * gemm.c.row_stride +
                      (item.column + first_column) * gemm.c.column_stride;
    const float alpha[2] = {static_cast<float>(gemm.alpha[0]), static_cast<float>(gemm.alpha[1])};
    const float beta[2] = {static_cast<float>(gemm.beta[0]), static_cast<float>(gemm.beta[1])};
    const bool reads_c = beta[0] != 0 || beta[1] != 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (in_row + 8 * h >= item.rows) continue;
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) {
            const int inside = item.columns - first_column - 8 * j;
            if (inside <= 0) continue;
            Value values[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                values[e] = scale(Value{sums.re[j][2 * h + e], sums.im[j][2 * h + e]}, alpha[0], alpha[1]);
                if (reads_c && e < inside) {
                    const Value c = read_element<GEMM_TYPE_C, Value, false>(
                        gemm.c, c_at + 8 * h * gemm.c.row_stride + (8 * j + e) * gemm.c.column_stride);
                    values[e] = add(values[e], scale(c, beta[0], beta[1]));
                }
            }
            write_piece<GEMM_TYPE_D, false, GEMM_VECTOR_D>(
                gemm.d, d_at + 8 * h * gemm.d.row_stride + 8 * j * gemm.d.column_stride, gemm.d.column_stride, values,
                inside);
        }
    }
}

// From the real and the imaginary parts of two warpgroups' sums to whole numbers: of the first columns for the one, of
// the last for the other. `exchange`: shared memory.
GEMM_DEVICE Sums whole_numbers(const PartSums& parts, float* exchange, Meeting& meeting, int thread) {
    constexpr int HALF = Sums::COLUMNS;
    const bool imaginary = thread >= 128;
    float* const out = exchange + thread;
    const float* const in = exchange + (thread ^ 128);
#pragma unroll
    for (int j = 0; j < HALF; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            out[(4 * j + e) * Config::CONSUMERS] = imaginary ? parts.at[j][e] : parts.at[HALF + j][e];
        }
    meeting.meet(thread);
    Sums sums;
#pragma unroll
    for (int j = 0; j < HALF; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float other = in[(4 * j + e) * Config::CONSUMERS];
            sums.re[j][e] = imaginary ? other : parts.at[j][e];
            sums.im[j][e] = imaginary ? parts.at[HALF + j][e] : other;
        }
    return sums;
}

GEMM_DEVICE void consume(const FusedParams& params, const Pipeline& pipeline, int* last, int thread) {
    const GemmParams& gemm = params.gemm;
    const PartMultiply part(thread);
    Meeting meeting{pipeline.together};
    Turn turn;
    for (unsigned number = blockIdx.x;; number += gridDim.x) {
        PartSums parts = {};
        bool served = true;
        const int first = static_cast<int>(params.splits > 1 ? number % params.splits : 0) * params.chunks_part;
        const int left = params.chunks - first, end = first + (left < params.chunks_part ? left : params.chunks_part);
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk) {
            const Steps steps(params, chunk);
            barrier_wait(pipeline.filled(turn), turn.parity);
            unsigned char* const stage = pipeline.stage(turn);
            const int* const counts = reinterpret_cast<const int*>(stage + Config::COUNTS_AT);
            const int* const doubts = reinterpret_cast<const int*>(stage + Config::DOUBTS_AT);
            int doubt = 0;
#pragma unroll
            for (int warp = 0; warp < Config::PRODUCER_WARPS; ++warp) doubt |= doubts[warp];
            if (doubt == 0 || is_served(
                                  deficits_of_chunk(counts), deficits_of_chunk(counts + Config::BLOCK_M),
                                  steps.count - SPARE)) {
                part.from_planes(parts, stage, shared_address(stage), steps.count);
            } else {
                served = false;
                meeting.meet(thread);  // all have read what is known
                Cursor cursor(params, number, chunk);
                Value* const plain = reinterpret_cast<Value*>(stage);
                OperandA::copy_plain(
                    plain, cursor.in_a(params, steps), gemm.a.row_stride, gemm.a.column_stride, thread);
                OperandB::copy_plain(
                    plain + Config::SIDE / sizeof(Value), cursor.in_b(params, steps), gemm.b.column_stride,
                    gemm.b.row_stride, thread);
                meeting.meet(thread);
                part.from_numbers(parts, stage, steps.count);
            }
            arrive(pipeline.emptied(turn), thread);
            turn.next();
        }
        if (served) {
#pragma unroll
            for (int j = 0; j < PartSums::COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) parts.at[j][e] = restored<Config::PROMOTE / 16>(parts.at[j][e]);
        }
        meeting.meet(thread);  // all have read what was exchanged before
        Sums sums = whole_numbers(
            parts, reinterpret_cast<float*>(pipeline.stages + Config::EXCHANGE_AT), meeting, thread);
        const Item item(params, number);
        if (params.splits == 1 || gather_splits(params, item, sums, served, last, meeting, thread)) {
            if (!served && thread == 0) {
                add_elements(params.counters->plain, static_cast<Long>(item.rows) * item.columns);
            }
            store(gemm, item, sums, part.row, part.column + thread / 128 * (Config::BLOCK_N / 2));
        }
        if (gridDim.x >= params.items - number) break;
    }
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) fused_gemm(FusedParams params) {
    GEMM_DYNAMIC_SHARED(dynamic);
    __shared__ __align__(8) Barrier full[Config::STAGES], empty[Config::STAGES], together;
    __shared__ int last;
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::SHARED_BYTES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    const Pipeline pipeline{
        dynamic + (0u - shared_address(dynamic)) % Config::ALIGNMENT, shared_address(full), shared_address(empty),
        shared_address(&together)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; ++i) {
            barrier_init(shared_address(&full[i]), Config::PRODUCER_WARPS);
            barrier_init(shared_address(&empty[i]), Config::CONSUMER_WARPS);
        }
        barrier_init(shared_address(&together), Config::CONSUMER_WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    // The same in all lanes, which the compiler cannot see: descriptors then live in uniform registers.
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    const int thread = static_cast<int>(threadIdx.x) % 128 + group * 128;
    if (group < Config::CONSUMERS / 128) {
        consume(params, pipeline, &last, thread);
    } else {
        produce(params, pipeline, thread - Config::CONSUMERS);
    }
}
