// GEMM on Hopper's tensor cores over float16 planes: a persistent kernel of one producer and BLOCK_M / 64 consumers.
//
// After NVIDIA CUTLASS, sm90 warp-specialised persistent kernels (include/cutlass/gemm/kernel): the copy engine fills
// stages of shared memory, warpgroups multiply them, and a block walks over tiles until none is left. The host's side
// is gemmserve_kernels.algorithms.wgmma.gemm.
#include "kernel.cuh"

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1) GEMM_CLUSTER_ATTRIBUTE
    wgmma_gemm(const __grid_constant__ WgmmaParams params) {
    multiply_block(params, [&](const Work& work, const Consumer& who, const auto& exponents, const Sums<Config>& sums) {
        const Unit& unit = work.unit;
        const Place place(unit, Config::BLOCK_M, Config::BLOCK_N, who.group, who.thread);
        const auto write = [&](const auto& to) {
            if constexpr (Config::SPLIT > 1) {
                exchange_in<Config>(to, place, who.memory, who.number(), who.rank);
            } else {
                write_sums<Config>(to, place, sums);
            }
        };
#if GEMM_PARTIAL
        write(StorePartial<Config>(params, unit));
#else
        const Store<Config> store(params, work.at);
        if constexpr (!Config::DIRECT) {
            if (store.is_plain(static_cast<Long>(unit.tile_n) * Config::BLOCK_N, exponents)) {
                // Two loops: that without C shall be short, as instructions are fetched anew for every tile.
                if (store.reads_c) write(Store<Config, true>(store, exponents));
                else write(Store<Config, true, false>(store, exponents));
                return;
            }
        }
        write(store);
#endif
    });
}

// D from the workspace: adds up the parts of k in their order.
extern "C" __global__ void __launch_bounds__(256) wgmma_combine(const __grid_constant__ WgmmaParams params) {
    using Value = Config::Value;
    let_next_start();
    wait_for_previous();
    const Long size = params.m * params.n;
    const Value* const from = reinterpret_cast<const Value*>(params.workspace);
    const Long index = static_cast<Long>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= size * params.matrices) return;
    Value sum = from[index];
    for (int part = 1; part < params.parts; ++part) sum = add(sum, from[part * size * params.matrices + index]);
    const Long batch = index / size, within = index - batch * size, row = within / params.n;
    const Long column = within - row * params.n;
    const Matrices at = matrices_of(params, static_cast<int>(batch));
    if (!Verdicts<Config>(params).wants(at, static_cast<int>(batch), row, column)) return;
    const Store<Config> to(params, at);
    to.one(row, column, sum);
}
