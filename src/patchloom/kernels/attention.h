// Attention of one image, plain and with heads mixed before and after softmax, and the gradients of the latter.

#pragma once

#include "products.h"

namespace {

// Scores of one query to exp(scale * (score - largest)) and, as the answer, one over their sum
inline float soften(float* scores, int64_t keys, float scale) {
    int64_t padded = round_up(keys, PANEL);
    for (int64_t n = keys; n < padded; n++) scores[n] = -INFINITY;
    Vec best = load(scores);
    for (int64_t n = LANES; n < padded; n += LANES) best = larger(best, load(scores + n));
    float largest = largest_lane(best);
    Vec sum = {};
    for (int64_t n = 0; n < padded; n += LANES) {
        Vec weight = exp_negative((load(scores + n) - largest) * scale);
        store(scores + n, weight);
        sum += weight;
    }
    for (int64_t n = keys; n < padded; n++) sum[0] -= scores[n], scores[n] = 0;
    return 1 / sum_lanes(sum);
}

constexpr int MIX = 4;  // heads mixed at once

// mixed[g] = shift[g] + sum over h of weight[g, h] * scores[h] for some queries; scores and mixed are (H, queries, keys),
// weight has its rows padded to MIX and may be another one for each query, `weight_query` further on
inline void mix_heads(const float* weight, int64_t weight_query, const float* shift, const float* scores, float* mixed,
                      int64_t heads, int64_t queries, int64_t padded) {
    for (int64_t r = 0; r < queries; r++)
        for (int64_t n = 0; n < padded; n += PANEL)
            for (int64_t g = 0; g < heads; g += MIX) {
                Tile<MIX> tile;
                for (int i = 0; i < MIX; i++) tile.at[i][0] = tile.at[i][1] = fill(shift ? shift[g + i] : 0.0f);
                tile.multiply(weight + r * weight_query + g * heads, heads, scores + r * padded + n, queries * padded, heads);
                for (int64_t i = 0; i < std::min<int64_t>(MIX, heads - g); i++) {
                    float* to = mixed + ((g + i) * queries + r) * padded + n;
                    store(to, tile.at[i][0]);
                    store(to + LANES, tile.at[i][1]);
                }
            }
}

// A tensor (B, H, tokens, width) whose last dimension is dense
struct Heads {
    float* at;
    int64_t image, head, token;
    float* row(int64_t b, int64_t h, int64_t n) const { return at + b * image + h * head + n * token; }
};

struct Shape {
    int64_t images, heads, queries, keys, width;
};

// Heads mixed before and after softmax; both null for plain attention. `shift` has the bias of the second mixing.
struct Mixing {
    const float *before, *after, *shift;
    float scale;
};

// Queries [first, last) of one image. Of its keys and values all are packed, so that they come dense into the cache.
void attend(const Heads& q, const Heads& k, const Heads& v, const Heads& out, const Shape& shape, const Mixing& mixing,
            int64_t image, int64_t first, int64_t last) {
    int64_t heads = shape.heads, width = shape.width, keys = shape.keys, padded = round_up(keys, PANEL);
    int64_t wide = round_up(width, PANEL), all = heads * ROWS * padded, rows = round_up(heads, MIX);
    int64_t of_key = width * padded, of_value = wide * keys;
    float* packed_k = scratch.take(heads * (of_key + of_value + ROWS * width) + 2 * all + ROWS * (rows * heads + heads));
    float* packed_v = packed_k + heads * of_key;
    float* first_scores = packed_v + heads * of_value;
    float* second_scores = first_scores + all;
    float* asking = second_scores + all;
    float* factors = asking + heads * ROWS * width;
    float* inverse = factors + ROWS * rows * heads;
    for (int64_t h = 0; h < heads; h++) {
        pack(k.row(image, h, 0), 1, k.token, width, keys, packed_k + h * of_key);
        pack(v.row(image, h, 0), v.token, 1, keys, width, packed_v + h * of_value);
    }
    std::memset(asking, 0, heads * ROWS * width * sizeof(float));
    std::memset(factors, 0, ROWS * rows * heads * sizeof(float));
    for (int64_t from = first; from < last; from += ROWS) {
        int64_t count = std::min<int64_t>(ROWS, last - from);
        for (int64_t h = 0; h < heads; h++) {
            float* mine = asking + h * ROWS * width;
            for (int64_t r = 0; r < count; r++) std::memcpy(mine + r * width, q.row(image, h, from + r), width * sizeof(float));
            for (int64_t n = 0; n < padded; n += PANEL) {
                Tile<ROWS> tile;
                tile.start(Vec{}, Vec{});
                tile.multiply(mine, width, packed_k + h * of_key + n * width, PANEL, width);
                for (int r = 0; r < ROWS; r++) {
                    store(first_scores + (h * ROWS + r) * padded + n, tile.at[r][0]);
                    store(first_scores + (h * ROWS + r) * padded + n + LANES, tile.at[r][1]);
                }
            }
        }
        float* scores = first_scores;
        if (mixing.before) {
            mix_heads(mixing.before, 0, nullptr, first_scores, second_scores, heads, ROWS, padded);
            scores = second_scores;
        }
        for (int64_t i = 0; i < heads * ROWS; i++) inverse[i] = soften(scores + i * padded, keys, mixing.scale);
        if (mixing.after) {
            for (int64_t r = 0; r < ROWS; r++)
                for (int64_t g = 0; g < heads; g++)
                    for (int64_t h = 0; h < heads; h++)
                        factors[(r * rows + g) * heads + h] = mixing.after[g * heads + h] * inverse[h * ROWS + r];
            mix_heads(factors, rows * heads, mixing.shift, second_scores, first_scores, heads, ROWS, padded);
            scores = first_scores;
        }
        for (int64_t h = 0; h < heads; h++)
            for (int64_t column = 0; column < width; column += PANEL) {
                Tile<ROWS> tile;
                tile.start(Vec{}, Vec{});
                tile.multiply(scores + h * ROWS * padded, padded, packed_v + h * of_value + column * keys, PANEL, keys);
                for (int64_t r = 0; r < count; r++) {
                    float factor = mixing.after ? 1.0f : inverse[h * ROWS + r];
                    write<false>(out.row(image, h, from + r), column, width, tile.at[r][0] * factor, tile.at[r][1] * factor);
                }
            }
    }
}

constexpr int64_t ASKING = 24;  // queries at a time on the way back, a multiple of ROWS

// out (ASKING, columns) = left (ASKING, depth) times packed panels
inline void multiply_rows(const float* left, int64_t side, const float* panels, int64_t depth, float* out, int64_t columns) {
    for (int64_t n = 0; n < columns; n += PANEL)
        for (int64_t r = 0; r < ASKING; r += ROWS) {
            Tile<ROWS> tile;
            tile.start(Vec{}, Vec{});
            tile.multiply(left + r * side, side, panels + n * depth, PANEL, depth);
            for (int i = 0; i < ROWS; i++) {
                store(out + (r + i) * columns + n, tile.at[i][0]);
                store(out + (r + i) * columns + n + LANES, tile.at[i][1]);
            }
        }
}

// total (keys, columns) += left (ASKING, keys) transposed times right (ASKING, columns); keys a multiple of PANEL
inline void add_transposed(const float* left, int64_t keys, const float* right, int64_t columns, float* total) {
    for (int64_t n = 0; n < columns; n += PANEL)
        for (int64_t r = 0; r < keys; r += MIX) {
            Tile<MIX> tile;
            for (int i = 0; i < MIX; i++)
                for (int side = 0; side < 2; side++) tile.at[i][side] = load(total + (r + i) * columns + n + side * LANES);
            tile.template multiply<true>(left + r, keys, right + n, columns, ASKING);
            for (int i = 0; i < MIX; i++)
                for (int side = 0; side < 2; side++) store(total + (r + i) * columns + n + side * LANES, tile.at[i][side]);
        }
}

// sums[g, h] += the inner product of a[g] and b[h], each `size` long
inline void add_products(const float* a, const float* b, int64_t heads, int64_t size, float* sums) {
    for (int64_t g = 0; g < heads; g++)
        for (int64_t h = 0; h < heads; h += MIX) {
            int64_t count = std::min<int64_t>(MIX, heads - h);
            const float* others[MIX];
            for (int i = 0; i < MIX; i++) others[i] = b + (h + std::min<int64_t>(i, count - 1)) * size;
            Vec totals[MIX] = {};
            for (int64_t n = 0; n < size; n += LANES) {
                Vec x = load(a + g * size + n);
                for (int i = 0; i < MIX; i++) totals[i] += x * load(others[i] + n);
            }
            for (int64_t i = 0; i < count; i++) sums[g * heads + h + i] += sum_lanes(totals[i]);
        }
}

// The gradients of one image of talking-heads attention; scores are computed anew, block of queries by block.
//   S = q k^T, T = before S, P = softmax(T), M = after P + shift, out = M v
// `sums` has the gradients of before, after and shift.
void attend_back(const Heads& q, const Heads& k, const Heads& v, const Heads& grad, const Heads& dq, const Heads& dk,
                 const Heads& dv, const Shape& shape, const Mixing& mixing, const Mixing& transposed, int64_t image,
                 float* sums) {
    const int64_t heads = shape.heads, width = shape.width, keys = shape.keys, padded = round_up(keys, PANEL);
    const int64_t wide = round_up(width, PANEL), rows = ASKING * padded, all = heads * rows, block = ASKING * wide;
    const int64_t of_key = width * padded, of_value = wide * keys, of_sum = padded * wide;
    float* key_columns = scratch.take(heads * (2 * of_key + of_value + 2 * of_sum + 2 * block) + 4 * all);
    float* value_columns = key_columns + heads * of_key;
    float* key_rows = value_columns + heads * of_key;
    float* sum_k = key_rows + heads * of_value;
    float* sum_v = sum_k + heads * of_sum;
    float* asking = sum_v + heads * of_sum;
    float* grads = asking + heads * block;
    float* S = grads + heads * block;
    float *P = S + all, *M = P + all, *D = M + all;
    for (int64_t h = 0; h < heads; h++) {
        pack(k.row(image, h, 0), 1, k.token, width, keys, key_columns + h * of_key);
        pack(v.row(image, h, 0), 1, v.token, width, keys, value_columns + h * of_key);
        pack(k.row(image, h, 0), k.token, 1, keys, width, key_rows + h * of_value);
    }
    std::memset(sum_k, 0, 2 * heads * of_sum * sizeof(float));
    float *of_before = sums, *of_after = sums + heads * heads, *of_shift = of_after + heads * heads;
    for (int64_t from = 0; from < shape.queries; from += ASKING) {
        int64_t count = std::min<int64_t>(ASKING, shape.queries - from);
        std::memset(asking, 0, 2 * heads * block * sizeof(float));
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t r = 0; r < count; r++) {
                std::memcpy(asking + h * block + r * wide, q.row(image, h, from + r), width * sizeof(float));
                std::memcpy(grads + h * block + r * wide, grad.row(image, h, from + r), width * sizeof(float));
            }
            multiply_rows(asking + h * block, wide, key_columns + h * of_key, width, S + h * rows, padded);
            multiply_rows(grads + h * block, wide, value_columns + h * of_key, width, D + h * rows, padded);
        }
        mix_heads(mixing.before, 0, nullptr, S, P, heads, ASKING, padded);
        for (int64_t i = 0; i < heads * ASKING; i++) {
            float inverse = soften(P + i * padded, keys, 1.0f);
            for (int64_t n = 0; n < padded; n += LANES) store(P + i * padded + n, load(P + i * padded + n) * inverse);
        }
        mix_heads(mixing.after, 0, mixing.shift, P, M, heads, ASKING, padded);
        for (int64_t h = 0; h < heads; h++) add_transposed(M + h * rows, padded, grads + h * block, wide, sum_v + h * of_sum);
        add_products(D, P, heads, rows, of_after);
        for (int64_t h = 0; h < heads; h++) {
            Vec total = {};
            for (int64_t n = 0; n < rows; n += LANES) total += load(D + h * rows + n);
            of_shift[h] += sum_lanes(total);
        }
        mix_heads(transposed.after, 0, nullptr, D, M, heads, ASKING, padded);
        for (int64_t i = 0; i < heads * ASKING; i++) {
            float *weight = P + i * padded, *change = M + i * padded;
            Vec total = {};
            for (int64_t n = 0; n < padded; n += LANES) total += load(weight + n) * load(change + n);
            float mean = sum_lanes(total);
            for (int64_t n = 0; n < padded; n += LANES) store(change + n, load(weight + n) * (load(change + n) - mean));
        }
        add_products(M, S, heads, rows, of_before);
        mix_heads(transposed.before, 0, nullptr, M, D, heads, ASKING, padded);
        for (int64_t h = 0; h < heads; h++) {
            add_transposed(D + h * rows, padded, asking + h * block, wide, sum_k + h * of_sum);
            for (int64_t column = 0; column < width; column += PANEL)
                for (int64_t r = 0; r < count; r += ROWS) {
                    Tile<ROWS> tile;
                    tile.start(Vec{}, Vec{});
                    tile.multiply(D + h * rows + r * padded, padded, key_rows + h * of_value + column * keys, PANEL, keys);
                    for (int64_t i = 0; i < std::min<int64_t>(ROWS, count - r); i++)
                        write<false>(dq.row(image, h, from + r + i), column, width, tile.at[i][0], tile.at[i][1]);
                }
        }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t n = 0; n < keys; n++) {
            std::memcpy(dk.row(image, h, n), sum_k + h * of_sum + n * wide, width * sizeof(float));
            std::memcpy(dv.row(image, h, n), sum_v + h * of_sum + n * wide, width * sizeof(float));
        }
}

}  // namespace
