// Stages of shared memory between the producer, which asks the copy engine to fill them, and the consumers, which
// multiply what is in them.
#pragma once

#include "../common/ptx/wgmma.cuh"
#include "schedule.cuh"

struct Pipeline {
    Address stages, full, empty;  // `full` and `empty`: a barrier for each stage
    Work* work;                   // of the unit that is being finished, and of as many that follow as there are stages

    static constexpr unsigned BARRIER_BYTES = sizeof(Barrier);
    GEMM_DEVICE Address full_barrier(int stage) const { return full + stage * BARRIER_BYTES; }
    GEMM_DEVICE Address empty_barrier(int stage) const { return empty + stage * BARRIER_BYTES; }
};

// Steps through the stages, round and round.
template <int STAGES>
struct Turn {
    int stage = 0;
    unsigned parity = 0;
    GEMM_DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The stages as a consumer sees them: filled in turn, read, given back.
template <class Config>
struct FilledStages {
    const Pipeline& pipeline;
    const int group, thread;  // `group` counts the consumers
    Turn<Config::STAGES> turn;

    GEMM_DEVICE FilledStages(const Pipeline& p, int consumer, int t) : pipeline(p), group(consumer), thread(t) {}

    // The address of this turn's stage, when it is filled.
    GEMM_DEVICE Address wait() const {
        barrier_wait(pipeline.full_barrier(turn.stage), turn.parity);
        return pipeline.stages + turn.stage * Config::STAGE_BYTES;
    }
    // The same, and the turn goes on.
    GEMM_DEVICE Address take() {
        const Address stage = wait();
        turn.next();
        return stage;
    }
    // Gives a stage back to the producers of all blocks that fill it.
    GEMM_DEVICE void release(int stage) const {
        const Address empty = pipeline.empty_barrier(stage);
        if constexpr (Config::CLUSTER == 1) {
            if (thread == 0) barrier_arrive(empty);
        } else {
            if (thread < Config::CLUSTER) barrier_arrive_remote(empty, thread);
        }
    }
    // The first plane of the left operand: this consumer's 64 rows, which are as long either way.
    GEMM_DEVICE Descriptor left(Address stage) const {
        const Address first = stage + group * 64 * Config::ROW_BYTES;
        if constexpr (Config::LEFT_ACROSS) return describe_across<Config::BLOCK_K>(first);
        else return describe<Config::ROW_BYTES>(first);
    }
    // That of the right operand.
    GEMM_DEVICE Descriptor right(Address stage) const {
        const Address first = stage + (Config::QUARTERED ? 0 : Config::LEFT_BYTES);
        if constexpr (Config::RIGHT_ACROSS) return describe_across<Config::BLOCK_K>(first);
        else return describe<Config::ROW_BYTES>(first);
    }
};
