// The end of a small product: D = alpha acc + beta C, straight to global memory or through shared memory.
#pragma once

#include "product.cuh"

// PIECE neighbouring elements of a row of C.
template <int PIECE>
GEMM_DEVICE void read_c(Config::Acc (&values)[PIECE], const MatrixParams& c, Long offset) {
    using C = Config::C;
    using Acc = Config::Acc;
    Vector<C, PIECE> re, im;
    const C *from_re = static_cast<const C*>(c.re) + offset, *from_im = static_cast<const C*>(c.im) + offset;
    if constexpr (Config::VECTOR_C) {
        re = *reinterpret_cast<const Vector<C, PIECE>*>(from_re);
        if constexpr (Config::PLANAR) im = *reinterpret_cast<const Vector<C, PIECE>*>(from_im);
    } else {
#pragma unroll
        for (int j = 0; j < PIECE; ++j) {
            re.at[j] = from_re[j * c.column_stride];
            if constexpr (Config::PLANAR) im.at[j] = from_im[j * c.column_stride];
        }
    }
#pragma unroll
    for (int j = 0; j < PIECE; ++j) {
        if constexpr (Config::PLANAR) {
            values[j] = widen<Acc>(re.at[j], im.at[j]);
        } else {
            values[j] = widen<Acc>(re.at[j]);
        }
    }
}

// PIECE neighbouring elements of a row, `stride` apart; at once where they may be.
template <bool AT_ONCE, int PIECE>
GEMM_DEVICE void write_piece(Config::D* to_re, Config::D* to_im, Long stride, const Config::Acc (&values)[PIECE]) {
    using D = Config::D;
    Vector<D, PIECE> re, im;
#pragma unroll
    for (int j = 0; j < PIECE; ++j) {
        if constexpr (Config::PLANAR) {
            re.at[j] = static_cast<D>(values[j].re);
            im.at[j] = static_cast<D>(values[j].im);
        } else {
            re.at[j] = Narrow<D>::from(values[j]);
        }
    }
    if constexpr (AT_ONCE) {
        *reinterpret_cast<Vector<D, PIECE>*>(to_re) = re;
        if constexpr (Config::PLANAR) *reinterpret_cast<Vector<D, PIECE>*>(to_im) = im;
    } else {
#pragma unroll
        for (int j = 0; j < PIECE; ++j) {
            to_re[j * stride] = re.at[j];
            if constexpr (Config::PLANAR) to_im[j * stride] = im.at[j];
        }
    }
}

// alpha and beta in the accumulator's precision.
struct Scalars {
    using R = Real<Config::Acc>;

    R alpha_re, alpha_im, beta_re, beta_im;
    bool reads_c;

    GEMM_DEVICE explicit Scalars(const SmallParams& params)
        : alpha_re(static_cast<R>(params.alpha[0])), alpha_im(static_cast<R>(params.alpha[1])),
          beta_re(static_cast<R>(params.beta[0])), beta_im(static_cast<R>(params.beta[1])),
          reads_c(params.beta[0] != 0 || params.beta[1] != 0) {}
};

// Where one product of the batch goes, the `slot`-th of its group; `staged` is the group's image in shared memory.
struct Store {
    using Acc = Config::Acc;
    using D = Config::D;
    static constexpr int SIZE = Config::M * Config::N;

    const SmallParams& params;
    const Scalars& scalars;
    D *re, *im;
    Long c_offset;

    GEMM_DEVICE Store(const SmallParams& p, const Scalars& s, Long number, int slot, D* staged)
        : params(p), scalars(s), c_offset(0) {
        if (scalars.reads_c) c_offset = matrix_offset(number, p, p.c.batch_stride);
        if constexpr (Config::STAGED_D) {
            re = staged + slot * SIZE;
            im = re + Config::PART_D;
        } else {
            const Long offset = Config::PACKED_D ? number * SIZE : matrix_offset(number, p, p.d.batch_stride);
            re = static_cast<D*>(p.d.re) + offset;
            im = static_cast<D*>(p.d.im) + offset;
        }
    }

    // PIECE neighbours of a row of op(A) op(B), all inside D.
    template <int PIECE>
    GEMM_DEVICE void piece(int row, int column, const Acc (&product)[PIECE]) const {
        Acc values[PIECE];
#pragma unroll
        for (int p = 0; p < PIECE; ++p) values[p] = scale(product[p], scalars.alpha_re, scalars.alpha_im);
        if (scalars.reads_c) {
            Acc c[PIECE];
            read_c(c, params.c, c_offset + row * params.c.row_stride + column * params.c.column_stride);
#pragma unroll
            for (int p = 0; p < PIECE; ++p) values[p] = add(values[p], scale(c[p], scalars.beta_re, scalars.beta_im));
        }
        if constexpr (Config::STAGED_D || Config::PACKED_D) {
            const int at = row * Config::N + column;
            write_piece<Config::STAGED_D || Config::VECTOR_D>(re + at, im + at, 1, values);
        } else {
            const Long at = row * params.d.row_stride + column * params.d.column_stride;
            write_piece<Config::VECTOR_D>(re + at, im + at, params.d.column_stride, values);
        }
    }
};

#if !GEMM_TENSOR

// Stores a thread's tile.
template <class Acc, int ROWS, int COLUMNS>
GEMM_DEVICE void store_tile(const Store& to, const Acc (&acc)[ROWS][COLUMNS], int tile_m, int tile_n) {
    constexpr int PIECE = GEMM_PIECE_N;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (!Rows::inside(tile_m, i)) continue;
#pragma unroll
        for (int j = 0; j < COLUMNS; j += PIECE) {
            if (!Columns::inside(tile_n, j)) continue;
            Acc values[PIECE];
#pragma unroll
            for (int p = 0; p < PIECE; ++p) values[p] = acc[i][j + p];
            to.piece(Rows::index(tile_m, i), Columns::index(tile_n, j), values);
        }
    }
}

#endif
