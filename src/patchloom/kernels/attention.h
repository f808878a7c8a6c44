// Attention of one image, plain and with heads mixed before and after softmax, and the gradients of the latter.

#pragma once

#include "bytes.h"

namespace {

// Softmax of one query without the division: scores become exp(scale * (score - largest)); returns one over their sum
template <Vec (*EXP)(Vec) = exp_negative>
inline float soften(float* scores, int64_t keys, float scale) {
    int64_t padded = round_up(keys, PANEL);
    for (int64_t n = keys; n < padded; n++) scores[n] = -INFINITY;
    Vec best = load(scores);
    for (int64_t n = LANES; n < padded; n += LANES) best = larger(best, load(scores + n));
    float largest = largest_lane(best);
    Vec sum = {};
    for (int64_t n = 0; n < padded; n += LANES) {
        Vec weight = EXP((load(scores + n) - largest) * scale);
        store(scores + n, weight);
        sum += weight;
    }
    for (int64_t n = keys; n < padded; n++) sum[0] -= scores[n], scores[n] = 0;
    return 1 / sum_lanes(sum);
}

constexpr int MIX = 4;          // heads mixed at once
constexpr int64_t QUERIES = 24;  // queries at a time, a multiple of ROWS

// to[g] = shift[g] + sum over h of weight[g, h] * from[h], vectors of `size` floats that are `step` and `step_to` apart;
// weight has its rows padded to MIX
inline void mix_heads(const float* weight, const float* shift, const float* from, int64_t step, float* to, int64_t step_to,
                      int64_t heads, int64_t size) {
    for (int64_t g = 0; g < heads; g += MIX)
        for (int64_t n = 0; n < size; n += PANEL) {
            Vec sums[MIX][2];
            for (int i = 0; i < MIX; i++) sums[i][0] = sums[i][1] = fill(shift ? shift[g + i] : 0.0f);
            for (int64_t h = 0; h < heads; h++) {
                Vec low = load(from + h * step + n), high = load(from + h * step + n + LANES);
                for (int i = 0; i < MIX; i++) {
                    float x = weight[(g + i) * heads + h];
                    sums[i][0] += x * low;
                    sums[i][1] += x * high;
                }
            }
            for (int64_t i = 0; i < std::min<int64_t>(MIX, heads - g); i++) {
                store(to + (g + i) * step_to + n, sums[i][0]);
                store(to + (g + i) * step_to + n + LANES, sums[i][1]);
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

// scores (rows, padded) = queries (rows, width) times packed keys
inline void score(const Rows& queries, const float* packed, int64_t width, int64_t keys, float* scores, int64_t padded) {
    product(queries, Linear{packed, nullptr, width, keys}, 0, keys, [&](int64_t row, int64_t column, Vec low, Vec high) {
        store(scores + row * padded + column, low);
        store(scores + row * padded + column + LANES, high);
    });
}

// Mixing, softmax and mixing of one query; its scores (H, padded), with rows `step` apart, are overwritten
inline void soften_mixed(const Mixing& mixing, float* scores, int64_t step, int64_t heads, int64_t keys, float* work) {
    int64_t padded = round_up(keys, PANEL);
    float *mixed = work, *factors = mixed + heads * padded;
    mix_heads(mixing.before, nullptr, scores, step, mixed, padded, heads, padded);
    for (int64_t h = 0; h < heads; h++) {
        float part = soften(mixed + h * padded, keys, mixing.scale);
        for (int64_t g = 0; g < heads; g++) factors[g * heads + h] = mixing.after[g * heads + h] * part;
    }
    mix_heads(factors, mixing.shift, mixed, padded, scores, step, heads, padded);
}

// Attention of queries [first, last) of heads [head, head + heads) of one image; all heads if they are mixed. Keys and
// values are packed first, so that they are dense in the cache.
void attend(const Heads& q, const Heads& k, const Heads& v, const Heads& out, const Shape& shape, const Mixing& mixing,
            int64_t image, int64_t head, int64_t heads, int64_t first, int64_t last) {
    const int64_t width = shape.width, keys = shape.keys, padded = round_up(keys, PANEL), step = QUERIES * padded;
    const int64_t of_key = width * padded, of_value = round_up(width, PANEL) * keys;
    const int64_t of_work = heads * padded + round_up(heads, MIX) * heads;
    float* packed = scratch.take(heads * (of_key + of_value + step) + of_work);
    float *values = packed + heads * of_key, *scores = values + heads * of_value, *work = scores + heads * step;
    float part[QUERIES];  // one over the sum of exponentials, for each query
    std::memset(work + heads * padded, 0, (of_work - heads * padded) * sizeof(float));
    for (int64_t h = 0; h < heads; h++) {
        pack(k.row(image, head + h, 0), 1, k.token, width, keys, packed + h * of_key);
        pack(v.row(image, head + h, 0), v.token, 1, keys, width, values + h * of_value);
    }
    for (int64_t from = first; from < last; from += QUERIES) {
        int64_t count = std::min<int64_t>(QUERIES, last - from);
        for (int64_t h = 0; h < heads; h++)
            score({q.row(image, head + h, from), q.token, count}, packed + h * of_key, width, keys, scores + h * step, padded);
        for (int64_t r = 0; r < count; r++)
            if (mixing.before) {
                soften_mixed(mixing, scores + r * padded, step, heads, keys, work);
                part[r] = 1;
            } else {
                part[r] = soften(scores + r * padded, keys, mixing.scale);
            }
        for (int64_t h = 0; h < heads; h++)
            product({scores + h * step, padded, count}, Linear{values + h * of_value, nullptr, keys, width}, 0, width,
                    [&](int64_t r, int64_t column, Vec low, Vec high) {
                        float* to = out.row(image, head + h, from + r);
                        write<false>(to, column, width, low * part[r], high * part[r]);
                    });
    }
}

// Quantise a matrix (depth, columns) of an image to a layer without bias
inline ByteLinear quantised(Scratch& memory, const float* from, int64_t step_k, int64_t step_n, int64_t depth,
                            int64_t columns) {
    int64_t wide = round_up(columns, PANEL);
    float* terms = memory.take(3 * wide + round_up(depth, GROUP) * wide / 4);
    auto* weight = reinterpret_cast<int8_t*>(terms + 3 * wide);
    std::memset(terms, 0, 3 * wide * sizeof(float));
    quantise_matrix(from, step_k, step_n, depth, columns, weight, terms);
    return {weight, terms, depth, columns};
}

// Queries [first, last) of one head of plain attention, with int8 products
void attend_bytes(const Heads& q, const Heads& k, const Heads& v, const Heads& out, const Shape& shape, float scale,
                  int64_t image, int64_t head, int64_t first, int64_t last) {
    static thread_local Scratch of_keys, of_values;
    const int64_t width = shape.width, keys = shape.keys, padded = round_up(keys, AT_ONCE);
    ByteLinear to_scores = quantised(of_keys, k.row(image, head, 0), 1, k.token, width, keys);
    ByteLinear to_values = quantised(of_values, v.row(image, head, 0), v.token, 1, keys, width);
    float *scores = scratch.take(QUERIES * padded + round_up(width, AT_ONCE)), *query = scores + QUERIES * padded;
    std::memset(scores, 0, QUERIES * padded * sizeof(float));
    for (int64_t from = first; from < last; from += QUERIES) {
        int64_t count = std::min<int64_t>(QUERIES, last - from);
        ByteRows queries = room_for_rows(count, width);
        for (int64_t r = 0; r < count; r++) {
            std::memcpy(query, q.row(image, head, from + r), width * sizeof(float));
            quantise(queries, r, query, width);
        }
        product(queries, to_scores, 0, keys, [&](int64_t r, int64_t column, Vec low, Vec high) {
            write<false>(scores + r * padded, column, padded, low, high);
        });
        ByteRows parts = room_for_rows(count, keys);
        for (int64_t r = 0; r < count; r++) {
            uint8_t* bytes = parts.at + r * parts.stride;
            parts.scale[r] = soften<rough_exp_negative>(scores + r * padded, keys, scale) / 255;  // the largest exponential is 1
            round_to_bytes(scores + r * padded, keys, 255, 0, bytes);
            parts.low[r] = (1 - parts.scale[r] * sum_of_bytes(bytes, keys)) / keys;  // the rounding error is spread over all keys
        }
        product(parts, to_values, 0, width, [&](int64_t r, int64_t column, Vec low, Vec high) {
            write<false>(out.row(image, head, from + r), column, width, low, high);
        });
    }
}

constexpr int TALL = LANES / 2;  // rows of a tile that divide a panel

// total (keys, columns) += left (depth, keys) transposed times right (depth, columns); rows are padded to a PANEL, those of
// left and total come here as `padded` and `wide`
inline void add_transposed(const float* left, int64_t keys, int64_t padded, const float* right, int64_t columns, int64_t wide,
                           int64_t depth, float* total) {
    for (int64_t n = 0; n < columns; n += PANEL)
        for (int64_t r = 0; r < keys; r += TALL) {
            Tile<TALL> tile;
            float* to = total + r * wide + n;
            for (int i = 0; i < TALL; i++)
                for (int side = 0; side < 2; side++) tile.at[i][side] = load(to + i * wide + side * LANES);
            tile.template multiply<true>(TALL, columns - n, left + r, padded, right + n, wide, depth);
            for (int i = 0; i < TALL; i++)
                for (int side = 0; side < 2; side++) store(to + i * wide + side * LANES, tile.at[i][side]);
        }
}

// sums[g, h] += the inner product of a[g] and b[h], each `size` long and `step` apart
inline void add_inner_products(const float* a, const float* b, int64_t step, int64_t heads, int64_t size, float* sums) {
    for (int64_t g = 0; g < heads; g++)
        for (int64_t h = 0; h < heads; h += MIX) {
            int64_t count = std::min<int64_t>(MIX, heads - h);
            const float* others[MIX];
            for (int i = 0; i < MIX; i++) others[i] = b + (h + std::min<int64_t>(i, count - 1)) * step;
            Vec totals[MIX] = {};
            for (int64_t n = 0; n < size; n += LANES) {
                Vec x = load(a + g * step + n);
                for (int i = 0; i < MIX; i++) totals[i] += x * load(others[i] + n);
            }
            for (int64_t i = 0; i < count; i++) sums[g * heads + h + i] += sum_lanes(totals[i]);
        }
}

// The sum of `size` floats, a multiple of LANES
inline float sum_of(const float* x, int64_t size) {
    Vec total = {};
    for (int64_t n = 0; n < size; n += LANES) total += load(x + n);
    return sum_lanes(total);
}

// The gradient of a softmax's outputs to that of its inputs, in place: weight * (grad - sum of weight * grad)
inline void soften_back(const float* weight, float* grad, int64_t size) {
    Vec total = {};
    for (int64_t n = 0; n < size; n += LANES) total += load(weight + n) * load(grad + n);
    float mean = sum_lanes(total);
    for (int64_t n = 0; n < size; n += LANES) store(grad + n, load(weight + n) * (load(grad + n) - mean));
}

// The gradients of one image of talking-heads attention; scores are computed again, one block of queries at a time.
//   S = q k^T, T = before S, P = softmax(T), M = after P + shift, out = M v
// `sums` accumulates the gradients of before, after and shift.
void attend_back(const Heads& q, const Heads& k, const Heads& v, const Heads& grad, const Heads& dq, const Heads& dk,
                 const Heads& dv, const Shape& shape, const Mixing& mixing, const Mixing& transposed, int64_t image,
                 float* sums) {
    const int64_t heads = shape.heads, width = shape.width, keys = shape.keys, padded = round_up(keys, PANEL);
    const int64_t wide = round_up(width, PANEL), rows = QUERIES * padded, all = heads * rows, block = QUERIES * wide;
    const int64_t of_key = width * padded, of_value = wide * keys, of_sum = padded * wide;
    float* key_columns = scratch.take(heads * (2 * of_key + of_value + 2 * of_sum + 2 * block) + 4 * all);
    float* value_columns = key_columns + heads * of_key;
    float* key_rows = value_columns + heads * of_key;
    float* sum_k = key_rows + heads * of_value;
    float* sum_v = sum_k + heads * of_sum;
    float* queries = sum_v + heads * of_sum;
    float* grads = queries + heads * block;
    float* S = grads + heads * block;
    float *P = S + all, *M = P + all, *D = M + all;
    for (int64_t h = 0; h < heads; h++) {
        pack(k.row(image, h, 0), 1, k.token, width, keys, key_columns + h * of_key);
        pack(v.row(image, h, 0), 1, v.token, width, keys, value_columns + h * of_key);
        pack(k.row(image, h, 0), k.token, 1, keys, width, key_rows + h * of_value);
    }
    std::memset(sum_k, 0, 2 * heads * of_sum * sizeof(float));
    float *of_before = sums, *of_after = sums + heads * heads, *of_shift = of_after + heads * heads;
    for (int64_t from = 0; from < shape.queries; from += QUERIES) {
        int64_t count = std::min<int64_t>(QUERIES, shape.queries - from), whole = round_up(count, ROWS), size = whole * padded;
        std::memset(queries, 0, 2 * heads * block * sizeof(float));
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t r = 0; r < count; r++) {
                std::memcpy(queries + h * block + r * wide, q.row(image, h, from + r), width * sizeof(float));
                std::memcpy(grads + h * block + r * wide, grad.row(image, h, from + r), width * sizeof(float));
            }
            score({queries + h * block, wide, whole}, key_columns + h * of_key, width, keys, S + h * rows, padded);
            score({grads + h * block, wide, whole}, value_columns + h * of_key, width, keys, D + h * rows, padded);
        }
        mix_heads(mixing.before, nullptr, S, rows, P, rows, heads, size);
        for (int64_t i = 0; i < heads * whole; i++) {
            float* p = P + i / whole * rows + i % whole * padded;
            float part = soften(p, keys, 1.0f);
            for (int64_t n = 0; n < padded; n += LANES) store(p + n, load(p + n) * part);
        }
        mix_heads(mixing.after, mixing.shift, P, rows, M, rows, heads, size);
        for (int64_t h = 0; h < heads; h++)
            add_transposed(M + h * rows, keys, padded, grads + h * block, width, wide, whole, sum_v + h * of_sum);
        add_inner_products(D, P, rows, heads, size, of_after);
        for (int64_t h = 0; h < heads; h++) of_shift[h] += sum_of(D + h * rows, size);
        mix_heads(transposed.after, nullptr, D, rows, M, rows, heads, size);
        for (int64_t i = 0; i < heads * whole; i++) {
            int64_t at = i / whole * rows + i % whole * padded;
            soften_back(P + at, M + at, padded);
        }
        add_inner_products(M, S, rows, heads, size, of_before);
        mix_heads(transposed.before, nullptr, M, rows, D, rows, heads, size);
        for (int64_t h = 0; h < heads; h++) {
            add_transposed(D + h * rows, keys, padded, queries + h * block, width, wide, whole, sum_k + h * of_sum);
            product({D + h * rows, padded, count}, Linear{key_rows + h * of_value, nullptr, keys, width}, 0, width,
                    [&](int64_t r, int64_t column, Vec low, Vec high) {
                        write<false>(dq.row(image, h, from + r), column, width, low, high);
                    });
        }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t n = 0; n < keys; n++) {
            std::memcpy(dk.row(image, h, n), sum_k + h * of_sum + n * wide, width * sizeof(float));
            std::memcpy(dv.row(image, h, n), sum_v + h * of_sum + n * wide, width * sizeof(float));
        }
}

}  // namespace
