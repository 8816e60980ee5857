// What a few lines of every group lack at least: enough to know of data full of outliers that no residues serve it, for a
// thirtieth of what it takes to read it all. Launched where that is worth a launch.
#include "ozaki/least.cuh"

// Neighbours, or operands whose lines lie side by side would be read in vain.
constexpr int PROBED = 4, THREADS = 1024, SHARE = THREADS / PROBED;

struct Found {
    double square;
    Magnitudes size;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) ozaki_probe(ScaleParams params) {
    __shared__ Found found[PROBED][SHARE];
    const LineParams& line = params.line;
    const TallyParams& tally = params.tally;
    const Quotient where = divide(static_cast<Long>(blockIdx.x), (line.lines + JUDGED_LINES - 1) / JUDGED_LINES);
    const Long offset = batch_offset(line.first + where.quotient, line.batch_shape, line.x.batch_stride);
    const int thread = static_cast<int>(threadIdx.x);
    const int l = ALONG_K ? thread / SHARE : thread % PROBED, share = ALONG_K ? thread % SHARE : thread / PROBED;
    const Long number = where.remainder * JUDGED_LINES + l;
    Found mine{};
    if (number < line.lines) {
        const Long at = offset + number * line.x.row_stride;
#pragma unroll 4
        for (Long k = share; k < line.k; k += SHARE) {
            const Element x = read(line, at + k * line.x.column_stride);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                mine.square = fma(x.part[p], x.part[p], mine.square);
                mine.size.part[p] += fabs(x.part[p]);
            }
        }
    }
    found[l][share] = mine;
    __syncthreads();
    for (int half = SHARE / 2; half > 0; half /= 2) {
        for (int i = thread; i < PROBED * half; i += THREADS) {
            Found& here = found[i / half][i % half];
            const Found& other = found[i / half][i % half + half];
            here.square += other.square;
            here.size.add(other.size);
        }
        __syncthreads();
    }
    if (thread != 0) return;
    // A square that is not finite says nothing: the scales' kernel looks again.
    Least least{};
#pragma unroll
    for (int i = 0; i < PROBED; ++i) {
        const Found& all = found[i][0];
        const bool known = all.square - all.square == 0.0;
        least.quarter[i] = known ? least_deficit(all.size, all.square, params.target, line.k, tally) : 0;
    }
    const unsigned most = least.all();
    tally.least[where.quotient * tally.groups + where.remainder] = Least{{most > tally.limit ? most : 0, 0, 0, 0}};
}
