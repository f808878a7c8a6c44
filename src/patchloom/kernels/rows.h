// What is done to rows on their way to a product, and products of all rows on all threads.

#pragma once

#include "products.h"

constexpr int64_t CACHE = 224 * 1024;  // of a core's second level, what a block of rows may fill
constexpr int64_t AT_ONCE = 32;        // floats that are made bytes at a time

namespace {

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

// What is done to rows of x on their way to a product: nothing, or one of the first three
struct Prologue {
    float eps = -1.0f;                 // normalise, unless below 0
    const float* gate = nullptr;       // multiply by gate (B, D), `tokens` rows an image
    int64_t tokens = 1;
    const Windows* windows = nullptr;  // copy from a map
    bool paired = false;               // they go in pairs, which share rounding: rows of one image
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

// Rows [first, first + count) of x for a product, x itself or a copy where something is to be done, with the sums of pairs
inline Rows left_side(const float* x, int64_t first, int64_t count, const Linear& layer, const Prologue& before) {
    static thread_local Scratch of_sums;
    const int64_t dim = layer.inputs;
    const bool paired = before.paired && dim % (2 * LANES) == 0;
    float* sums = paired ? of_sums.take(count * dim) : nullptr;
    float* buffer = before.nothing() ? nullptr : scratch.take(count * loose(dim));
    Rows rows{buffer ? buffer : x + first * dim, buffer ? loose(dim) : dim, count, sums};
    for (int64_t r = 0; r < count; r++) {
        if (buffer) prepare(x, first + r, dim, before, buffer + r * rows.stride);
        int64_t start = r + 1 - PAIR;
        if (paired && start % PAIR == 0) sum_tiles(rows.at + start * rows.stride, rows.stride, dim / 2, sums + start * dim);
    }
    return rows;
}

// `finish(row, column, low, high)` gets linear(before(x)) for all rows of x, on all threads: blocks of rows, or, where one
// block has them all, ranges of columns, so that each weight is read by one thread alone
template <class Layer, class Finish>
inline void for_each_block(const float* x, int64_t rows, const Layer& layer, const Prologue& before, int threads,
                           Finish finish) {
    if (rows == 0) return;
    bool few = rows * loose(layer.inputs) * 4 <= 2 * CACHE;
    int64_t fitting = block_rows(rows, loose(layer.inputs), threads);
    int64_t many = round_up(rows / (8 * threads) + 1, PAIR);  // so many that no thread waits long for another
    int64_t block = few ? rows : std::min(fitting, many), wide = PANEL;
    if (before.paired) block = round_up(block, PAIR), wide = 2 * PANEL;  // the same pairs on any number of threads
    int64_t columns = few ? round_up((layer.outputs + threads - 1) / threads, wide) : layer.outputs;
    int64_t blocks = (rows + block - 1) / block, ranges = (layer.outputs + columns - 1) / columns;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < blocks * ranges; i++) {
        int64_t first = i / ranges * block, from = i % ranges * columns;
        auto left = left_side(x, first, std::min(block, rows - first), layer, before);
        product(left, layer, from, std::min(from + columns, layer.outputs),
                [&](int64_t row, int64_t column, Vec low, Vec high) { finish(first + row, column, low, high); });
    }
}

}  // namespace
