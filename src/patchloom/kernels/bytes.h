// int8 matrix products: the right side was quantised in advance, each row of the left side is quantised on the fly.
//
// A processor with VNNI adds four products to a sum of 32 bits. One without multiplies bytes in pairs and has 16 bits for their
// sum; here two such sums are added before they go to 32 bits. They cannot overflow: of the four weights that meet, neither
// the positive nor the negative ones amount to more than 128, and 128 * 255 < 2^15.

#pragma once

#include "rows.h"

constexpr int BYTE_ROWS = LANES / 2;
constexpr int64_t GROUP = 8;  // inputs multiplied at a time; there are zeros up to a multiple
static_assert(AT_ONCE % GROUP == 0 && AT_ONCE % PANEL == 0, "rows of floats have room for bytes and panels");

namespace {

// Weights (outputs / PANEL, inputs / 4, PANEL, 4) and, for each panel, what makes their products floats: the scale of each
// output, scale * (sum of its weights), and its bias, (outputs / PANEL, 3, PANEL)
struct ByteLinear {
    const int8_t* weight;
    const float* terms;
    int64_t inputs, outputs;
};

// Rows of low + scale * byte
struct ByteRows {
    uint8_t* at;
    float *scale, *low;
    int64_t stride, count;

    // Normalised, a row has the same bytes: it is scaled and shifted
    void normalise(int64_t r, const float* x, int64_t dim, float eps) const {
        float mean, factor;
        moments(x, dim, eps, mean, factor);
        scale[r] *= factor, low[r] = (low[r] - mean) * factor;
    }
};

template <int R>
struct ByteTile {
    IntVec at[R][2];

    __attribute__((noinline)) void multiply(const uint8_t* left, int64_t side, const int8_t* right, int64_t depth) {
        const float* panel = reinterpret_cast<const float*>(right);
        IntVec total[R][2] = {};
        for (int64_t k = 0; k < depth; k += GROUP, panel += 2 * PANEL) {
            ByteVec weights[4];
            for (int i = 0; i < 4; i++) weights[i] = (ByteVec)load(panel + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                ByteVec first = spread(left + r * side + k), second = spread(left + r * side + k + 4);
                for (int i = 0; i < 2; i++)
                    total[r][i] = add_products(total[r][i], first, weights[i], second, weights[2 + i]);
            }
        }
        std::memcpy(at, total, sizeof at);
    }

    // Four bytes, over and over
    static inline ByteVec spread(const uint8_t* bytes) {
        int32_t four;
        std::memcpy(&four, bytes, 4);
        return (ByteVec)(four - IntVec{});
    }
};

// `finish(row, column, low, high)` gets rows times the panels of columns [first, last), as floats
template <class Finish>
inline void product(const ByteRows& left, const ByteLinear& layer, int64_t first, int64_t last, Finish finish) {
    const int64_t depth = round_up(layer.inputs, GROUP);
    for (int64_t column = first; column < last; column += PANEL) {
        Vec scale[2], sum[2], bias[2], sides[2];
        for (int i = 0; i < 2; i++) {
            const float* terms = layer.terms + 3 * column + i * LANES;
            scale[i] = load(terms), sum[i] = load(terms + PANEL), bias[i] = load(terms + 2 * PANEL);
        }
        for (int64_t row = 0; row < left.count; row += BYTE_ROWS) {
            ByteTile<BYTE_ROWS> tile;
            tile.multiply(left.at + row * left.stride, left.stride, layer.weight + column * depth, depth);
            for (int64_t r = 0; r < std::min<int64_t>(BYTE_ROWS, left.count - row); r++) {
                float step = left.scale[row + r], low = left.low[row + r];
                for (int i = 0; i < 2; i++)
                    sides[i] = __builtin_convertvector(tile.at[r][i], Vec) * scale[i] * step + low * sum[i] + bias[i];
                finish(row + r, column, sides[0], sides[1]);
            }
        }
    }
}

// The nearest bytes of factor * x + shift, which is from 0 to 255
inline void round_to_bytes(const float* x, int64_t count, float factor, float shift, uint8_t* to) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing goes by halves of a register
    for (int64_t i = 0; i < count; i += AT_ONCE) {
        __m256i whole[4];
        for (int j = 0; j < 4; j++) whole[j] = _mm256_cvtps_epi32(_mm256_loadu_ps(x + i + 8 * j) * factor + shift);
        __m256i low = _mm256_packs_epi32(whole[0], whole[1]), high = _mm256_packs_epi32(whole[2], whole[3]);
        __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), bytes);
    }
}

inline int64_t sum_of_bytes(const uint8_t* x, int64_t count) {
    __m256i sums = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += AT_ONCE)
        sums += _mm256_sad_epu8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), _mm256_setzero_si256());
    return sums[0] + sums[1] + sums[2] + sums[3];
}

// Row r of `rows` from floats, 0 being the least and 255 the largest; the scale of a row that is not finite is NaN
inline void quantise(const ByteRows& rows, int64_t r, float* x, int64_t dim) {
    Vec least = fill(x[0]), most = least, ill = {};
    for (int64_t i = dim; i < round_up(dim, AT_ONCE); i++) x[i] = x[0];
    for (int64_t i = 0; i < dim; i += LANES) {
        Vec v = load(x + i);
        least = smaller(least, v), most = larger(most, v), ill += v * 0.0f;
    }
    float low = -largest_lane(-least), range = largest_lane(most) - low, factor = range > 0 ? 255 / range : 0.0f;
    rows.scale[r] = range / 255 + sum_lanes(ill), rows.low[r] = low;
    round_to_bytes(x, dim, factor, -low * factor, rows.at + r * rows.stride);
}

inline ByteRows room_for_rows(int64_t count, int64_t dim) {
    static thread_local Scratch memory;
    int64_t stride = round_up(dim, AT_ONCE) + 64, all = round_up(count, BYTE_ROWS);
    float* scale = memory.take(2 * all + all * stride / 4);
    return {reinterpret_cast<uint8_t*>(scale + 2 * all), scale, scale + all, stride, count};
}

inline ByteRows left_side(const float* x, int64_t first, int64_t count, const ByteLinear& layer, const Prologue& before) {
    ByteRows rows = room_for_rows(count, layer.inputs);
    float* row = scratch.take(round_up(layer.inputs, AT_ONCE));
    Prologue plain = before;
    plain.eps = -1;
    for (int64_t r = 0; r < count; r++) {
        prepare(x, first + r, layer.inputs, plain, row);
        quantise(rows, r, row, layer.inputs);
        if (before.eps >= 0) rows.normalise(r, row, layer.inputs, before.eps);
    }
    return rows;
}

// LANES columns of a panel of floats (depth, PANEL) as weights; `terms` gets their scales and sums
inline void quantise_columns(const float* panel, int64_t depth, float* weight, float* terms) {
    Vec largest = {}, ill = {};
    for (int64_t k = 0; k < depth; k += GROUP)
        for (int64_t pair = k; pair < k + 4; pair += 2) {
            Vec up = {}, down = {};
            for (int64_t row : {pair, pair + 1, pair + 4, pair + 5}) {  // they meet in 16 bits, if sums are that short
                Vec x = load(panel + row * PANEL), above = larger(x, Vec{}), below = smaller(x, Vec{});
                up = SUMS_OVERFLOW ? up + above : larger(up, above);
                down = SUMS_OVERFLOW ? down + below : smaller(down, below);
                ill += x * 0.0f;
            }
            largest = larger(largest, larger(up, -down));
        }
    const float limit = SUMS_OVERFLOW ? 126 : 127;  // rounding may add 2 to four
    const float rounder = 12582912.0f;              // 1.5 * 2^23 leaves the integer in the low bits
    Vec scale = largest / limit, factor = largest > 0 ? limit / largest : Vec{};
    IntVec sum = {};
    for (int64_t k = 0; k < depth; k += 4) {
        IntVec four = {};
        for (int64_t i = 0; i < 4; i++) {
            IntVec level = (IntVec)(load(panel + (k + i) * PANEL) * factor + rounder) << 24 >> 24;  // the last byte
            sum += level, four |= (level & 255) << (8 * i);
        }
        store(weight + k / 4 * PANEL, (Vec)four);
    }
    store(terms, scale + ill), store(terms + PANEL, scale * __builtin_convertvector(sum, Vec));
}

// The matrix whose element (k, n) is at from + k * step_k + n * step_n as a ByteLinear has it; of `terms` biases are left out
inline void quantise_matrix(const float* from, int64_t step_k, int64_t step_n, int64_t depth, int64_t columns, int8_t* weight,
                            float* terms) {
    const int64_t whole = round_up(depth, GROUP);
    float* panel = scratch.take(whole * PANEL);
    for (int64_t column = 0; column < columns; column += PANEL) {
        pack(from + column * step_n, step_k, step_n, depth, std::min<int64_t>(PANEL, columns - column), panel);
        std::memset(panel + depth * PANEL, 0, (whole - depth) * PANEL * sizeof(float));
        float* bytes = reinterpret_cast<float*>(weight + column * whole);
        for (int64_t n = 0; n < PANEL; n += LANES) quantise_columns(panel + n, whole, bytes + n, terms + 3 * column + n);
    }
}

}  // namespace
