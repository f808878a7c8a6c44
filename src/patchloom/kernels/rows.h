// Operations on rows before a matrix product, and products of all rows on all threads.

#pragma once

#include "products.h"

constexpr int64_t CACHE = 224 * 1024;  // bytes of the second-level cache that a block of rows may fill: about a quarter
constexpr int64_t AT_ONCE = 32;        // floats that are quantised at a time

namespace {

// The mean of one row and one over its standard deviation
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

// Rows in blocks, which threads take one after another
struct Blocks {
    int64_t rows, size, count;
    int64_t first(int64_t block) const { return block < count ? block * size : rows; }
};

// Blocks of at most about `most` rows: as many rows as fit the cache, and enough that weights are read, and the terms of
// pairs computed, rarely. Few blocks are of equal size, as far as whole pairs allow, so that threads rarely wait. Pairs are
// the same for any number of threads; remaining rows belong to the last block.
inline Blocks blocks_of(int64_t rows, int64_t floats_a_row, bool paired, int threads, int64_t most = INT64_MAX) {
    if (rows == 0) return {0, 1, 0};
    int64_t unit = paired && rows >= PAIR ? PAIR : 1, units = rows / unit, share = divide_up(units, threads);
    int64_t fitting = std::max<int64_t>(CACHE / 4 / floats_a_row / ROWS, paired ? 12 : 8) * ROWS;
    int64_t parts = divide_up(share * unit, fitting), size = divide_up(share, parts) * unit;
    size = std::min(parts < 4 ? size : round_up(size, ROWS), most);
    return {rows, size, divide_up(units * unit, size)};
}

// The stride of a buffer in floats: space for AT_ONCE, and not a power of two, which would map all rows to the same cache sets
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

// What is done to rows of x on their way to a product
struct Prologue {
    float eps = -1.0f;                 // normalise, unless below 0
    bool paired = false;               // they go in pairs, which share rounding: rows of one image
    const float* gate = nullptr;       // or multiply by gate (B, D), `tokens` rows an image
    int64_t tokens = 1;
    const Windows* windows = nullptr;  // or copy from a map
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
    const int64_t dim = layer.inputs;
    float* buffer = before.nothing() ? nullptr : scratch.take(count * loose(dim));
    Rows rows{buffer ? buffer : x + first * dim, buffer ? loose(dim) : dim, count};
    for (int64_t r = 0; buffer && r < count; r++) prepare(x, first + r, dim, before, buffer + r * rows.stride);
    return in_pairs(rows, dim, before.paired);
}

// `finish(row, column, low, high)` gets linear(before(x)) for all rows of x, on all threads: blocks of rows, or, where one
// block has them all, ranges of columns, so that each weight is read by one thread alone
template <class Layer, class Finish>
inline void for_each_block(const float* x, int64_t rows, const Layer& layer, const Prologue& before, int threads,
                           Finish finish) {
    const int64_t wide = loose(layer.inputs), outputs = layer.outputs;
    const bool few = rows * wide * 4 <= 4 * CACHE;  // reading weights once is faster while the rows fit the cache
    int64_t many = round_up(rows / (8 * threads) + 1, PAIR);  // small enough that no thread waits long for another
    Blocks blocks = few ? Blocks{rows, rows, rows > 0} : blocks_of(rows, wide, before.paired, threads, many);
    int64_t columns = few ? round_up(divide_up(outputs, threads), before.paired ? 2 * PANEL : PANEL) : outputs;
    int64_t ranges = divide_up(outputs, columns);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < blocks.count * ranges; i++) {
        int64_t first = blocks.first(i / ranges), until = blocks.first(i / ranges + 1), from = i % ranges * columns;
        product(left_side(x, first, until - first, layer, before), layer, from, std::min(from + columns, outputs),
                [&](int64_t row, int64_t column, Vec low, Vec high) { finish(first + row, column, low, high); });
    }
}

}  // namespace
