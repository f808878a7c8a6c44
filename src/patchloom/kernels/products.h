// Matrix products of rows with packed weights.
//
// A product is computed by tiles: up to ROWS rows of the left side times one panel (PANEL columns) of the right side, which
// was packed in advance. A tile stays in registers until an epilogue uses it.
//
// If rows come with their sums, pairs of tiles and panels are multiplied by one Strassen step in Winograd's form: seven block
// products instead of eight. Its rounding error is about twice that of a plain product, relative to the largest results of a
// pair.
//
//   | A11 A12 |   | B11 B12 |   | C11 C12 |   A11, A12: a tile, halves of its depth; A21, A22: the tile below
//   | A21 A22 | * | B21 B22 | = | C21 C22 |   B11, B21: a panel, halves of its depth; B12, B22: the panel beside it

#pragma once

#include <cstring>
#include <memory>

#include "vectors.h"

constexpr int64_t PAIR = 2 * ROWS;  // rows of a pair of tiles

namespace {

// total += R rows times a panel, or the first half of one. Element (r, k) of the left side is at r * side + k, of a
// transposed one at r + k * side; `panel(i)` gives the vector from float i of the panel on, whose rows are `stride` apart.
template <int R, bool HALF, bool TRANSPOSED, class Panel>
inline __attribute__((always_inline)) void add_product(Vec (&total)[R][2], const float* left, int64_t side, int64_t stride,
                                                       int64_t depth, Panel panel) {
    const int64_t row = TRANSPOSED ? 1 : side, step = TRANSPOSED ? side : 1;
    for (int64_t k = 0; k < depth; k++) {
        Vec low = panel(k * stride), high = HALF ? low : panel(k * stride + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            float x = left[r * row + k * step];
            total[r][0] += x * low;
            if (!HALF) total[r][1] += x * high;
        }
    }
}

// add_product on a tile in memory
template <int R, bool HALF, bool TRANSPOSED>
__attribute__((noinline)) void multiply_rows(Vec (*total)[2], const float* left, int64_t side, const float* right,
                                             int64_t stride, int64_t depth) {
    Vec sums[R][2];
    std::memcpy(sums, total, sizeof sums);
    add_product<R, HALF, TRANSPOSED>(sums, left, side, stride, depth, [=](int64_t i) { return load(right + i); });
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

// Buffer of a thread, kept for the next call and aligned to cache lines
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

// Rows of the left side of a product. Of rows in pairs there are for each pair S1 = A21 + A22, S2 = S1 - A11, S3 = A11 - A21
// and S4 = A12 - S2, (ROWS, depth / 2) each; null otherwise.
struct Rows {
    const float* at;
    int64_t stride, count;
    const float* sums = nullptr;
    int64_t paired() const { return sums ? count / PAIR * PAIR : 0; }
};

// A Linear layer: its weights in panels, (outputs / PANEL, inputs, PANEL), and its bias, padded with zeros to a panel, or null
struct Linear {
    const float* weight;
    const float* bias;
    int64_t inputs, outputs;
};

// The sums of a pair of tiles
inline void sum_tiles(const float* left, int64_t stride, int64_t half, float* to) {
    const int64_t size = ROWS * half;
    for (int64_t r = 0; r < ROWS; r++, left += stride, to += half)
        for (int64_t k = 0; k < half; k += LANES) {
            const float* below = left + ROWS * stride;
            Vec a11 = load(left + k), a21 = load(below + k), s1 = a21 + load(below + half + k), s2 = s1 - a11;
            store(to + k, s1), store(to + size + k, s2);
            store(to + 2 * size + k, a11 - a21), store(to + 3 * size + k, load(left + half + k) - s2);
        }
}

// Rows with the sums of their pairs, if they are to go in pairs and there are halves of whole vectors
inline Rows in_pairs(Rows rows, int64_t depth, bool paired) {
    static thread_local Scratch memory;
    if (!paired || depth % (2 * LANES)) return rows;
    float* sums = memory.take(rows.count * depth);
    rows.sums = sums;
    for (int64_t row = 0; row < rows.paired(); row += PAIR)
        sum_tiles(rows.at + row * rows.stride, rows.stride, depth / 2, sums + row * depth);
    return rows;
}

// A pair of tiles times a pair of panels. T1 = B12 - B11, T2 = B22 - T1, T3 = B22 - B12 and T4 = B21 - T2 are at `terms`: the
// FIRST pair of tiles computes them on the fly, since the units that add are idle while others multiply.
template <bool FIRST, class Finish>
__attribute__((noinline)) void multiply_pair(const float* left, int64_t stride, const float* sums, const float* panel,
                                             const float* beside, float* terms, int64_t half, const Vec* bias,
                                             Finish finish) {
    typedef Vec Sums[ROWS][2];
    const int64_t size = half * PANEL, step = ROWS * half;
    const float* below = left + ROWS * stride;
    auto add = [=](Sums& total, const float* rows, int64_t side, const float* right) __attribute__((always_inline)) {
        add_product<ROWS, false, false>(total, rows, side, PANEL, half, [=](int64_t i) { return load(right + i); });
    };
    auto add_term = [=](Sums& total, const float* rows, int64_t side, int64_t number, const float* right, const float* minus)
        __attribute__((always_inline)) {
        float* term = terms + (number - 1) * size;
        if (!FIRST) return add(total, rows, side, term);
        add_product<ROWS, false, false>(total, rows, side, PANEL, half, [=](int64_t i) {
            Vec difference = load(right + i) - load(minus + i);
            store(term + i, difference);
            return difference;
        });
    };
    auto done = [&](int64_t row, int64_t side, const Sums& total) __attribute__((always_inline)) {
        for (int r = 0; r < ROWS; r++)
            finish(row + r, side * PANEL, total[r][0] + bias[2 * side], total[r][1] + bias[2 * side + 1]);
    };
    Sums total = {}, start, middle, other = {};
    add(total, left, stride, panel);                                       // A11 B11
    std::memcpy(start, total, sizeof start);
    add(total, left + half, stride, panel + size);                         // + A12 B21
    done(0, 0, total);                                                     // = C11
    add_term(other, sums, half, 1, beside, panel);                         // S1 T1
    add_term(start, sums + step, half, 2, beside + size, terms);           // A11 B11 + S2 T2
    std::memcpy(middle, start, sizeof middle);
    add_term(start, sums + 2 * step, half, 3, beside + size, beside);      // A11 B11 + S2 T2 + S3 T3
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2; i++) total[r][i] = start[r][i] + other[r][i], middle[r][i] += other[r][i];
    done(ROWS, 1, total);                                                  // + S1 T1 = C22
    add_term(start, below + half, stride, 4, panel + size, terms + size);  // + A22 T4
    done(ROWS, 0, start);                                                  // = C21
    add(middle, sums + 3 * step, half, beside + size);                     // A11 B11 + S2 T2 + S1 T1 + S4 B22
    done(0, 1, middle);                                                    // = C12
}

// The paired rows times the panels of columns [first, last), which are paired too
template <class Finish>
inline void product_of_pairs(const Rows& left, const Linear& layer, int64_t first, int64_t last, Finish finish) {
    static thread_local Scratch memory;
    int64_t depth = layer.inputs, half = depth / 2;
    float* terms = memory.take(2 * depth * PANEL);
    for (int64_t column = first; column < last; column += 2 * PANEL) {
        const float *panel = layer.weight + column * depth, *beside = panel + PANEL * depth;
        Vec bias[4] = {};
        for (int i = 0; layer.bias && i < 4; i++) bias[i] = load(layer.bias + column + i * LANES);
        for (int64_t row = 0; row < left.paired(); row += PAIR) {
            auto done = [&](int64_t r, int64_t c, Vec low, Vec high) { finish(row + r, column + c, low, high); };
            auto run = row ? multiply_pair<false, decltype(done)> : multiply_pair<true, decltype(done)>;
            run(left.at + row * left.stride, left.stride, left.sums + row * depth, panel, beside, terms, half, bias, done);
        }
    }
}

// Rows [from, until) times the panels of columns [first, last), tile by tile
template <class Finish>
inline void product_of_tiles(const Rows& left, int64_t from, int64_t until, const Linear& layer, int64_t first, int64_t last,
                             Finish finish) {
    for (int64_t column = first; column < last; column += PANEL) {
        Vec low = {}, high = {};
        if (layer.bias) low = load(layer.bias + column), high = load(layer.bias + column + LANES);
        const float* panel = layer.weight + column * layer.inputs;
        for (int64_t row = from; row < until; row += ROWS) {
            int64_t here = std::min<int64_t>(ROWS, until - row);
            Tile<ROWS> tile;
            tile.start(low, high);
            tile.multiply(here, layer.outputs - column, left.at + row * left.stride, left.stride, panel, PANEL, layer.inputs);
            for (int64_t r = 0; r < here; r++) finish(row + r, column, tile.at[r][0], tile.at[r][1]);
        }
    }
}

// All rows times the panels of columns [first, last); `finish(row, column, low, high)` gets every result, two vectors of a
// row at a time
template <class Finish>
inline void product(const Rows& left, const Linear& layer, int64_t first, int64_t last, Finish finish) {
    int64_t rows = left.paired(), columns = rows ? (last - first) / (2 * PANEL) * 2 * PANEL : 0;
    if (columns) product_of_pairs(left, layer, first, first + columns, finish);
    product_of_tiles(left, 0, rows, layer, first + columns, last, finish);
    product_of_tiles(left, rows, left.count, layer, first, last, finish);
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
