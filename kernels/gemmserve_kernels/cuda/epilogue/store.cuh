// Epilogue that writes D = alpha acc + beta C. C is read only where beta is not 0.
#pragma once

#include "../common/memory/element.cuh"
#include "../common/raster.cuh"

template <class Config>
struct StoreEpilogue {
    using Acc = typename Config::Acc;
    using R = Real<Acc>;
    static constexpr int N = Config::Threads::PIECE_N;

    const GemmParams& params;
    Long c_offset, d_offset;
    bool reads_c;

    GEMM_DEVICE StoreEpilogue(const GemmParams& p, Long batch)
        : params(p),
          c_offset(batch_offset(batch, p.batch_shape, p.c.batch_stride)),
          d_offset(batch_offset(batch, p.batch_shape, p.d.batch_stride)),
          reads_c(p.beta[0] != 0 || p.beta[1] != 0) {}

    // `count` of the N elements of `row` from `column` on lie inside D.
    GEMM_DEVICE void visit(Long row, Long column, int count, Acc (&values)[N]) const {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            // Not by `finished`: a dozen registers more on gfx942.
            values[j] = scale(values[j], static_cast<R>(params.alpha[0]), static_cast<R>(params.alpha[1]));
            if (reads_c && j < count) {
                const Long offset = c_offset + row * params.c.row_stride + (column + j) * params.c.column_stride;
                const Acc c = read_element<typename Config::C, Acc, Config::PLANAR>(params.c, offset);
                values[j] = add(values[j], scale(c, static_cast<R>(params.beta[0]), static_cast<R>(params.beta[1])));
            }
        }
        write_piece<typename Config::D, Config::PLANAR, Config::VECTOR_D>(
            params.d, d_offset + row * params.d.row_stride + column * params.d.column_stride, params.d.column_stride,
            values, count);
    }
    // One element, which lies inside D.
    GEMM_DEVICE void put(Long row, Long column, Acc value) const {
        const Acc values[1] = {finished(row, column, value)};
        write_piece<typename Config::D, Config::PLANAR, false>(
            params.d, d_offset + row * params.d.row_stride + column * params.d.column_stride, params.d.column_stride,
            values, 1);
    }

  private:
    GEMM_DEVICE Acc finished(Long row, Long column, Acc value) const {
        value = scale(value, static_cast<R>(params.alpha[0]), static_cast<R>(params.alpha[1]));
        if (reads_c) {
            const Long offset = c_offset + row * params.c.row_stride + column * params.c.column_stride;
            const Acc c = read_element<typename Config::C, Acc, Config::PLANAR>(params.c, offset);
            value = add(value, scale(c, static_cast<R>(params.beta[0]), static_cast<R>(params.beta[1])));
        }
        return value;
    }
};

// Shows the visitor every piece of the tile that has an element inside the matrix.
template <class Config, class Visitor>
GEMM_DEVICE void visit_tile(
    const GemmParams& params, const TileCoordinate& where, const typename Config::Threads& threads,
    typename Config::Acc (&acc)[Config::THREAD_M][Config::THREAD_N], Visitor visitor) {
    constexpr int N = Config::Threads::PIECE_N;
    const Long first_row = where.tile_m * Config::BLOCK_M, first_column = where.tile_n * Config::BLOCK_N;
#pragma unroll
    for (int i = 0; i < Config::THREAD_M; ++i) {
        const Long row = first_row + threads.row(i);
        if (row >= params.m) continue;
#pragma unroll
        for (int j = 0; j < Config::THREAD_N; j += N) {
            const Long column = first_column + threads.column(j);
            const Long left = params.n - column;
            if (left <= 0) continue;
            typename Config::Acc values[N];
#pragma unroll
            for (int p = 0; p < N; ++p) values[p] = acc[i][j + p];
            visitor.visit(row, column, left < N ? static_cast<int>(left) : N, values);
        }
    }
}
