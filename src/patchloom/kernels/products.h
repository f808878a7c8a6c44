// Products of rows with packed weights, and what is done to rows before and after them.
//
// A product of floats goes by tiles: up to ROWS rows of a left side times one panel (PANEL columns) of a right side that was
// packed beforehand, kept in registers until an epilogue takes it.

#pragma once

#include <cstring>
#include <memory>

#include "vectors.h"

constexpr int64_t CACHE = 224 * 1024;  // of a core's second level, what a block of rows may fill
constexpr int64_t AT_ONCE = 32;        // floats that are made bytes at a time

namespace {

// total += R rows times a panel, or the first half of one. Element (r, k) of the left side is at r * side + k, of a
// transposed one at r + k * side; row k of the panel at k * stride.
template <int R, bool HALF, bool TRANSPOSED>
__attribute__((noinline)) void multiply_rows(Vec (*total)[2], const float* left, int64_t side, const float* right,
                                             int64_t stride, int64_t depth) {
    const int64_t row = TRANSPOSED ? 1 : side, step = TRANSPOSED ? side : 1;
    Vec sums[R][2];
    std::memcpy(sums, total, sizeof sums);
    for (int64_t k = 0; k < depth; k++) {
        Vec low = load(right + k * stride), high = HALF ? low : load(right + k * stride + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            float x = left[r * row + k * step];
            sums[r][0] += x * low;
            if (!HALF) sums[r][1] += x * high;
        }
    }
    std::memcpy(total, sums, sizeof sums);
}

// Up to R rows of a product, one panel wide
template <int R>
struct Tile {
    Vec at[R][2];

    inline void start(Vec low, Vec high) {
        for (int r = 0; r < R; r++) at[r][0] = low, at[r][1] = high;
    }

    // The first `rows` of it, at least one, and of their `columns` all or the first half
    template <bool TRANSPOSED = false, int MOST = R>
    inline void multiply(int64_t rows, int64_t columns, const float* left, int64_t side, const float* right, int64_t stride,
                         int64_t depth) {
        if constexpr (MOST > 1)
            if (rows < MOST) return multiply<TRANSPOSED, MOST - 1>(rows, columns, left, side, right, stride, depth);
        auto run = columns > LANES ? multiply_rows<MOST, false, TRANSPOSED> : multiply_rows<MOST, true, TRANSPOSED>;
        run(at, left, side, right, stride, depth);
    }
};

// Memory of a thread, kept for the next call
class Scratch {
    std::unique_ptr<float[]> memory;
    int64_t size = 0;

   public:
    float* take(int64_t floats) {
        floats += 16;
        if (floats > size) {
            memory.reset(new float[floats]);
            size = floats;
        }
        return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
    }
};

thread_local Scratch scratch;

// The mean of one row and one over its deviation
inline void moments(const float* x, int64_t dim, float eps, float& mean, float& factor) {
    int64_t whole = dim / LANES * LANES;
    Vec sums = {};
    for (int64_t i = 0; i < whole; i += LANES) sums += load(x + i);
    mean = sum_lanes(sums);
    for (int64_t i = whole; i < dim; i++) mean += x[i];
    mean /= dim;
    Vec squares = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        Vec centred = load(x + i) - mean;
        squares += centred * centred;
    }
    float variance = sum_lanes(squares);
    for (int64_t i = whole; i < dim; i++) variance += (x[i] - mean) * (x[i] - mean);
    factor = 1 / std::sqrt(variance / dim + eps);
}

// (x - mean) / deviation of one row; scale and shift of a LayerNorm are folded into the weights that follow
inline void normalise(const float* x, float* out, int64_t dim, float eps) {
    float mean, factor;
    moments(x, dim, eps, mean, factor);
    int64_t whole = dim / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, (load(x + i) - mean) * factor);
    for (int64_t i = whole; i < dim; i++) out[i] = (x[i] - mean) * factor;
}

// Rows of the left side of a product
struct Rows {
    const float* at;
    int64_t stride, count;
};

// What a Linear layer is here: panels of its weights, (outputs / PANEL, inputs, PANEL), and its bias, zeros up to a panel, or
// none
struct Linear {
    const float* weight;
    const float* bias;
    int64_t inputs, outputs;
};

// All rows times the panels of columns [first, last); `finish(row, column, low, high)` gets every result, two vectors of a
// row at a time
template <class Finish>
inline void product(const Rows& left, const Linear& layer, int64_t first, int64_t last, Finish finish) {
    for (int64_t column = first; column < last; column += PANEL) {
        Vec low = {}, high = {};
        if (layer.bias) low = load(layer.bias + column), high = load(layer.bias + column + LANES);
        const float* panel = layer.weight + column * layer.inputs;
        for (int64_t row = 0; row < left.count; row += ROWS) {
            int64_t here = std::min<int64_t>(ROWS, left.count - row);
            Tile<ROWS> tile;
            tile.start(low, high);
            tile.multiply(here, layer.outputs - column, left.at + row * left.stride, left.stride, panel, PANEL, layer.inputs);
            for (int64_t r = 0; r < here; r++) finish(row + r, column, tile.at[r][0], tile.at[r][1]);
        }
    }
}

// out[column ...] = or += two vectors, of which only those below `columns` exist
template <bool ADD>
inline void write(float* out, int64_t column, int64_t columns, Vec low, Vec high) {
    float* place = out + column;
    if (column + PANEL <= columns) {
        store(place, ADD ? load(place) + low : low);
        store(place + LANES, ADD ? load(place + LANES) + high : high);
        return;
    }
    float values[PANEL];
    store(values, low);
    store(values + LANES, high);
    for (int64_t i = 0; column + i < columns; i++) place[i] = ADD ? place[i] + values[i] : values[i];
}

// Rows in one block, the same for every thread: as many as fit the cache, and enough to read the weights seldom. Where there
// are few blocks they are equal, so that no thread waits for another.
inline int64_t block_rows(int64_t rows, int64_t floats_a_row, int threads) {
    int64_t fitting = std::max<int64_t>(CACHE / 4 / floats_a_row / ROWS, 8) * ROWS, share = (rows + threads - 1) / threads;
    int64_t blocks = (share + fitting - 1) / fitting, block = (share + blocks - 1) / blocks;
    return blocks < 4 ? block : round_up(block, ROWS);
}

// Floats from one row of a buffer to the next: room for AT_ONCE, and no power of two, which would put all rows into the same
// cache sets
inline int64_t loose(int64_t width) { return round_up(width, AT_ONCE) + 16; }

// The windows of a convolution on a map (height, width, channels): a row has a window's pixels, zeros outside of the map
struct Windows {
    int64_t height, width, channels, side, step, padding, down, across;

    Windows() = default;
    Windows(int64_t height, int64_t width, int64_t channels, int64_t side, int64_t step, int64_t padding)
        : height(height), width(width), channels(channels), side(side), step(step), padding(padding),
          down((height + 2 * padding - side) / step + 1), across((width + 2 * padding - side) / step + 1) {}

    void copy(const float* map, int64_t row, float* to) const {
        int64_t top = row / across * step - padding, left = row % across * step - padding;
        int64_t from = std::max<int64_t>(left, 0), until = std::min(left + side, width);
        for (int64_t y = top; y < top + side; y++, to += side * channels) {
            bool inside = y >= 0 && y < height && from < until;
            if (!inside || from > left || until < left + side) std::memset(to, 0, side * channels * sizeof(float));
            if (!inside) continue;
            const float* line = map + (y * width + from) * channels;
            std::memcpy(to + (from - left) * channels, line, (until - from) * channels * sizeof(float));
        }
    }
};

// What is done to rows of x on their way to a product: nothing, or one of these
struct Prologue {
    float eps = -1.0f;                 // normalise, unless below 0
    const float* gate = nullptr;       // multiply by gate (B, D), `tokens` rows an image
    int64_t tokens = 1;
    const Windows* windows = nullptr;  // copy from a map
    bool nothing() const { return eps < 0 && !gate && !windows; }
};

// One row on its way to a product
inline void prepare(const float* x, int64_t row, int64_t dim, const Prologue& before, float* to) {
    const float* from = x + row * dim;
    if (before.windows) {
        before.windows->copy(x, row, to);
    } else if (before.gate) {
        const float* gate = before.gate + row / before.tokens * dim;
        for (int64_t i = 0; i < dim; i++) to[i] = from[i] * gate[i];
    } else if (before.eps >= 0) {
        normalise(from, to, dim, before.eps);
    } else {
        std::memcpy(to, from, dim * sizeof(float));
    }
}

// Rows [first, first + count) of x for a product: x itself, or a copy where something is to be done
inline Rows left_side(const float* x, int64_t first, int64_t count, const Linear& layer, const Prologue& before) {
    const int64_t dim = layer.inputs, stride = loose(dim);
    if (before.nothing()) return {x + first * dim, dim, count};
    float* buffer = scratch.take(count * stride);
    for (int64_t r = 0; r < count; r++) prepare(x, first + r, dim, before, buffer + r * stride);
    return {buffer, stride, count};
}

// `finish(row, column, low, high)` gets linear(before(x)) for all rows of x, on all threads: blocks of rows, or, where one
// block has them all, ranges of columns, so that each weight is read by one thread alone
template <class Layer, class Finish>
inline void for_each_block(const float* x, int64_t rows, const Layer& layer, const Prologue& before, int threads,
                           Finish finish) {
    if (rows == 0) return;
    bool few = rows * loose(layer.inputs) * 4 <= 2 * CACHE;
    int64_t fitting = block_rows(rows, loose(layer.inputs), threads);
    int64_t many = round_up(rows / (8 * threads) + 1, 2 * ROWS);  // so many that no thread waits long for another
    int64_t block = few ? rows : std::min(fitting, many);
    int64_t columns = few ? round_up((layer.outputs + threads - 1) / threads, PANEL) : layer.outputs;
    int64_t blocks = (rows + block - 1) / block, ranges = (layer.outputs + columns - 1) / columns;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < blocks * ranges; i++) {
        int64_t first = i / ranges * block, from = i % ranges * columns;
        auto left = left_side(x, first, std::min(block, rows - first), layer, before);
        product(left, layer, from, std::min(from + columns, layer.outputs),
                [&](int64_t row, int64_t column, Vec low, Vec high) { finish(first + row, column, low, high); });
    }
}

// Panels of a matrix whose element (k, n) is at from + k * step_k + n * step_n: (columns / PANEL, depth, PANEL)
inline void pack(const float* from, int64_t step_k, int64_t step_n, int64_t depth, int64_t columns, float* to) {
    for (int64_t column = 0; column < columns; column += PANEL) {
        int64_t count = std::min<int64_t>(PANEL, columns - column);
        for (int64_t k = 0; k < depth; k++, to += PANEL) {
            const float* row = from + k * step_k + column * step_n;
            for (int64_t n = 0; n < count; n++) to[n] = row[n * step_n];
            for (int64_t n = count; n < PANEL; n++) to[n] = 0;
        }
    }
}

// out (columns) = bias + vector (depth) times matrix (depth, columns); columns a multiple of LANES
template <int AT_A_TIME = 6>
inline void multiply_vector(const float* vector, const float* matrix, const float* bias, int64_t depth, int64_t columns,
                            float* out, int64_t first = 0) {
    int64_t n = first;
    for (; n + AT_A_TIME * LANES <= columns; n += AT_A_TIME * LANES) {
        Vec totals[AT_A_TIME];
        for (int i = 0; i < AT_A_TIME; i++) totals[i] = load(bias + n + i * LANES);
        for (int64_t k = 0; k < depth; k++)
            for (int i = 0; i < AT_A_TIME; i++) totals[i] += vector[k] * load(matrix + k * columns + n + i * LANES);
        for (int i = 0; i < AT_A_TIME; i++) store(out + n + i * LANES, totals[i]);
    }
    if constexpr (AT_A_TIME > 1) multiply_vector<1>(vector, matrix, bias, depth, columns, out, n);
}

}  // namespace
