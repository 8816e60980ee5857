// Where vectors are: in the array, and in the planes.
#pragma once

#include "element.cuh"

// A vector, or the first one of a strip.
struct Place {
    int matrix, row;
};

GEMM_DEVICE Place place_of(const SplitOperandParams& operand, int unit, int vectors) {
    const unsigned units = static_cast<unsigned>(operand.units);
    const unsigned matrix = operand.matrices == 1 ? 0 : static_cast<unsigned>(unit) / units;
    return {static_cast<int>(matrix), static_cast<int>(unit - matrix * units) * vectors};
}

// Where its first element is in the array.
GEMM_DEVICE Long offset_of(const SplitOperandParams& operand, const Place& at) {
    Long offset = at.row * operand.source.row_stride;
    if (operand.matrices == 1) return offset;
    unsigned matrix = static_cast<unsigned>(at.matrix);
#pragma unroll
    for (int d = BATCH_DIMS - 1; d >= 0; --d) {
        if (matrix == 0) break;
        const unsigned extent = static_cast<unsigned>(operand.batch_shape[d]);
        const unsigned rest = matrix < extent ? 0 : matrix / extent;  // no division, where there is one axis
        offset += (matrix - rest * extent) * operand.source.batch_stride[d];
        matrix = rest;
    }
    return offset;
}

// The planes' first elements of a vector.
GEMM_DEVICE Half* planes_of(const SplitOperandParams& operand, const Place& at) {
    return operand.planes + (at.matrix * PLANES * operand.rows + at.row) * operand.pitch;
}
