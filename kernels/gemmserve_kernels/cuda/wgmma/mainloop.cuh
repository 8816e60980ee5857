// The two roles of a block: a producer that asks the copy engine for planes (loads.cuh), and consumers that multiply
// them (schemes.cuh).
#pragma once

#include "loads.cuh"
#include "schemes.cuh"

template <class Config>
GEMM_DEVICE void produce(
    const WgmmaParams& params, const Verdicts<Config>& verdicts, const Pipeline& pipeline, unsigned rank) {
    prefetch_map(params.map_left);
    prefetch_map(params.map_right);
    Turn<Config::STAGES> turn;
    Turn<Config::STAGES + 1> works;
    for_each_unit<Config>(params, verdicts, [&](int number) {
        const Unit unit = unit_at<Config>(params, number, rank);
        const Matrices at = matrices_of(params, unit.batch);
        const Slice slice = slice_of<Config>(params, unit, rank);
        const Source from{unit.tile_m * Config::BLOCK_M, unit.tile_n * Config::BLOCK_N, at.left, at.right};
        barrier_wait(pipeline.empty_barrier(turn.stage), turn.parity ^ 1);
        pipeline.work[works.stage] = {unit, at};
        works.next();
        for (int block = slice.first; block < slice.last; ++block) {
#pragma unroll 1
            for (int index = 0; index < LoadOf<Config>::STAGES; ++index, turn.next()) {
                const Target to{pipeline.stages + turn.stage * Config::STAGE_BYTES, pipeline.full_barrier(turn.stage)};
                barrier_wait(pipeline.empty_barrier(turn.stage), turn.parity ^ 1);
                barrier_arrive_expecting(to.full, Config::STAGE_BYTES);
                LoadOf<Config>::load(params, from, to, block, index, rank);
            }
        }
    });
}

// Multiplies all units of this block; `begin_unit(work)` hears of each, `finish_unit(work, sums)` gets its result.
// `group` counts the consumers.
template <class Config, class Begin, class Finish>
GEMM_DEVICE void consume(
    const WgmmaParams& params, const Verdicts<Config>& verdicts, const Pipeline& pipeline, unsigned rank, int group,
    int thread, Begin begin_unit, Finish finish_unit) {
    FilledStages<Config> stages(pipeline, group, thread);
    Turn<Config::STAGES + 1> works;
    for_each_unit<Config>(params, verdicts, [&](int) {
        stages.wait();
        const Work work = pipeline.work[works.stage];
        const Slice slice = slice_of<Config>(params, work.unit, rank);
        begin_unit(work);
        Sums<Config> sums;
#pragma unroll
        for (int i = 0; i < Config::COMPONENTS; ++i) {
#pragma unroll
            for (int part = 0; part < Config::PARTS; ++part) {
#pragma unroll
                for (int e = 0; e < Config::VALUES; ++e) sums[i][part][e] = 0.0f;
            }
        }
        SchemeOf<Config> scheme;
        for (int block = slice.first; block < slice.last; ++block) scheme.multiply(sums, stages, block);
        scheme.end(sums, stages);
        finish_unit(work, sums);
        works.next();
    });
}
