// Inference on a CPU, float32: products with what comes before and after them, so that activations stay in the cache.
//
// Every product is one `multiply`: ROWS rows of a left side times one panel (PANEL columns) of a right side that was
// packed beforehand, kept in registers until an epilogue takes it. Shapes: B images, N tokens, D channels, H heads.
// Compiled once for each instruction set (see build.py); the loader picks the one that the machine has.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#if defined(__AVX512F__) || defined(PATCHLOOM_WIDE)  // the latter for tests on a machine without AVX-512
constexpr int LANES = 16, ROWS = 12;
#else
constexpr int LANES = 8, ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;
constexpr int64_t CACHE = 224 * 1024;  // of a core's second level, what a block of rows may fill
constexpr int64_t DEPTH = 256;         // inputs whose panel stays in the first level

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef float LooseVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

namespace {

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }
inline Vec fill(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline Vec smaller(Vec a, Vec b) { return a < b ? a : b; }
inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

inline float sum_lanes(Vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

inline float largest_lane(Vec x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = std::max(best, x[i]);
    return best;
}

// exp(x) for x <= 0, to two units in the last place: 2^n * e^r with |r| <= ln(2) / 2
inline Vec exp_negative(Vec x) {
    x = larger(x, fill(-87.0f));  // e^-87 is the least that a float holds exactly
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
    Vec shifted = x * 1.44269504f + rounder;
    Vec n = shifted - rounder;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    IntVec power = ((IntVec)shifted << 23) + (IntVec)p;
    return (Vec)power;
}

// The exact GELU x (1 + erf(x / sqrt(2))) / 2, erf as a quotient of polynomials
inline Vec gelu(Vec x) {
    Vec z = smaller(larger(x * 0.70710678f, fill(-4.0f)), fill(4.0f));
    Vec s = z * z;
    Vec p = fill(1.91090931e-08f);
    p = p * s - 1.94223248e-06f;
    p = p * s + 0.000147290114f;
    p = p * s + 0.00399090617f;
    p = p * s + 0.0515260747f;
    p = p * s + 0.20713447f;
    p = p * s + 1.12837909f;
    Vec q = fill(0.00102117864f);
    q = q * s + 0.0149588097f;
    q = q * s + 0.117974526f;
    q = q * s + 0.516899392f;
    q = q * s + 1.0f;
    Vec half = x * 0.5f;
    return half + half * (z * p / q);
}

// R rows of a product, one panel wide. Element (r, k) of the left side is at r * side + k, of a transposed one at
// r + k * side; row k of the panel at k * stride.
template <int R>
struct Tile {
    Vec at[R][2];

    inline void start(Vec low, Vec high) {
        for (int r = 0; r < R; r++) at[r][0] = low, at[r][1] = high;
    }

    template <bool TRANSPOSED = false>
    __attribute__((noinline)) void multiply(const float* left, int64_t side, const float* right, int64_t stride, int64_t depth) {
        const int64_t row = TRANSPOSED ? 1 : side, step = TRANSPOSED ? side : 1;
        Vec total[R][2];
        std::memcpy(total, at, sizeof at);
        for (int64_t k = 0; k < depth; k++) {
            Vec low = load(right + k * stride), high = load(right + k * stride + LANES);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                float x = left[r * row + k * step];
                total[r][0] += x * low;
                total[r][1] += x * high;
            }
        }
        std::memcpy(at, total, sizeof at);
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

// (x - mean) / deviation of one row; scale and shift of a LayerNorm are folded into the weights that follow
inline void normalise(const float* x, float* out, int64_t dim, float eps) {
    int64_t whole = dim / LANES * LANES;
    Vec sums = {};
    for (int64_t i = 0; i < whole; i += LANES) sums += load(x + i);
    float mean = sum_lanes(sums);
    for (int64_t i = whole; i < dim; i++) mean += x[i];
    mean /= dim;
    Vec squares = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        Vec centred = load(x + i) - mean;
        squares += centred * centred;
    }
    float variance = sum_lanes(squares);
    for (int64_t i = whole; i < dim; i++) variance += (x[i] - mean) * (x[i] - mean);
    float factor = 1 / std::sqrt(variance / dim + eps);
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, (load(x + i) - mean) * factor);
    for (int64_t i = whole; i < dim; i++) out[i] = (x[i] - mean) * factor;
}

// What a Linear layer is here: panels of its weights, (outputs / PANEL, inputs, PANEL), and its bias, zeros up to a panel
struct Linear {
    const float* weight;
    const float* bias;
    int64_t inputs, outputs;
};

// All rows times the panels of columns [first, last); `finish(row, column, low, high)` gets every result, two vectors of a
// row at a time.
// A panel goes through the first-level cache DEPTH inputs at a time, with all rows; sums wait in `partial` meanwhile.
template <class Finish>
inline void product(const float* left, int64_t stride, int64_t rows, const Linear& layer, int64_t first, int64_t last,
                    Finish finish) {
    static thread_local Scratch sums;
    auto* partial = reinterpret_cast<Tile<ROWS>*>(sums.take(round_up(rows, ROWS) * PANEL));
    int64_t steps = (layer.inputs + DEPTH - 1) / DEPTH, depth = (layer.inputs + steps - 1) / steps;
    for (int64_t column = first; column < last; column += PANEL) {
        const float* panel = layer.weight + column * layer.inputs;
        Vec low = load(layer.bias + column), high = load(layer.bias + column + LANES);
        for (int64_t from = 0; from < layer.inputs; from += depth) {
            int64_t count = std::min(depth, layer.inputs - from);
            for (int64_t row = 0; row < rows; row += ROWS) {
                Tile<ROWS> tile;
                if (from == 0)
                    tile.start(low, high);
                else
                    tile = partial[row / ROWS];
                tile.multiply(left + row * stride + from, stride, panel + from * PANEL, PANEL, count);
                if (from + count < layer.inputs) {
                    partial[row / ROWS] = tile;
                    continue;
                }
                int64_t last = std::min<int64_t>(ROWS, rows - row);
                for (int64_t r = 0; r < last; r++) finish(row + r, column, tile.at[r][0], tile.at[r][1]);
            }
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

// Rows in one block, the same for every thread: as many as fit the cache, and enough to read the weights seldom
inline int64_t block_rows(int64_t rows, int64_t floats_a_row, int threads) {
    int64_t fitting = std::max<int64_t>(CACHE / 4 / floats_a_row / ROWS, 8) * ROWS;
    int64_t share = round_up((rows + threads - 1) / threads, ROWS);
    int64_t blocks = (share + fitting - 1) / fitting;
    return round_up((share + blocks - 1) / blocks, ROWS);
}

inline int64_t loose(int64_t width) { return width + 16; }  // a power of two would put all rows into the same cache sets

// What is done to rows of x on their way to a product
struct Prologue {
    float eps;                    // normalise, unless below 0
    const float* gate = nullptr;  // multiply by gate (B, D), `tokens` rows an image
    int64_t tokens = 1;
};

// Rows for a product: x itself, or `buffer` where something is to be done or the last ROWS rows are not all there
inline const float* left_side(const float* x, int64_t first, int64_t rows, int64_t dim, const Prologue& before,
                              float* buffer, int64_t& stride) {
    stride = dim;
    if (before.eps < 0 && !before.gate && rows % ROWS == 0) return x + first * dim;
    stride = loose(dim);
    for (int64_t r = 0; r < rows; r++) {
        const float* from = x + (first + r) * dim;
        float* to = buffer + r * stride;
        if (before.gate) {
            const float* gate = before.gate + (first + r) / before.tokens * dim;
            for (int64_t i = 0; i < dim; i++) to[i] = from[i] * gate[i];
        } else if (before.eps >= 0) {
            normalise(from, to, dim, before.eps);
        } else {
            std::memcpy(to, from, dim * sizeof(float));
        }
    }
    for (int64_t r = rows; r < round_up(rows, ROWS); r++) std::memset(buffer + r * stride, 0, dim * sizeof(float));
    return buffer;
}

thread_local Scratch scratch;

// `finish(row, column, low, high)` gets linear(before(x)) for all rows of x, on all threads: blocks of rows, or, where one
// block has them all, ranges of columns, so that each weight is read by one thread alone
template <class Finish>
inline void for_each_block(const float* x, int64_t rows, const Linear& layer, const Prologue& before, int threads,
                           Finish finish) {
    bool few = round_up(rows, ROWS) * loose(layer.inputs) * 4 <= 2 * CACHE;
    int64_t block = few ? rows : block_rows(rows, loose(layer.inputs), threads);
    int64_t columns = few ? round_up((layer.outputs + threads - 1) / threads, PANEL) : layer.outputs;
    int64_t blocks = (rows + block - 1) / block, ranges = (layer.outputs + columns - 1) / columns;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < blocks * ranges; i++) {
        int64_t first = i / ranges * block, count = std::min(block, rows - first), stride;
        int64_t from = i % ranges * columns, to = std::min(from + columns, layer.outputs);
        float* buffer = scratch.take(round_up(block, ROWS) * loose(layer.inputs));
        const float* left = left_side(x, first, count, layer.inputs, before, buffer, stride);
        product(left, stride, count, layer, from, to,
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

// One vector of channels of a depth-wise 3 x 3 convolution, with zeros around the map
inline Vec convolve(const float* x, int64_t row, int64_t column, int64_t height, int64_t width, int64_t dim, const Vec* taps,
                    Vec total) {
    const float* centre = x + (row * width + column) * dim;
    if (row > 0 && row < height - 1 && column > 0 && column < width - 1) {
#pragma GCC unroll 9
        for (int t = 0; t < 9; t++) total += load(centre + ((t / 3 - 1) * width + t % 3 - 1) * dim) * taps[t];
        return total;
    }
    for (int t = 0; t < 9; t++) {
        int64_t i = row + t / 3 - 1, j = column + t % 3 - 1;
        if (i >= 0 && i < height && j >= 0 && j < width) total += load(x + (i * width + j) * dim) * taps[t];
    }
    return total;
}

// out (columns) = bias + vector (depth) times matrix (depth, columns); columns a multiple of LANES
inline void multiply_vector(const float* vector, const float* matrix, const float* bias, int64_t depth, int64_t columns,
                            float* out) {
    for (int64_t n = 0; n < columns; n += LANES) {
        Vec total = load(bias + n);
        for (int64_t k = 0; k < depth; k++) total += vector[k] * load(matrix + k * columns + n);
        store(out + n, total);
    }
}

inline Vec sigmoid(Vec x) {
    Vec e = exp_negative(x < 0 ? x : -x);
    return (x < 0 ? e : fill(1.0f)) / (1.0f + e);
}

}  // namespace

extern "C" {

int patchloom_panel() { return PANEL; }

// out (rows, outputs) = linear(norm(x)), with `add` added to what is there, with `activate` through GELU
void patchloom_linear(const float* x, float* out, int64_t rows, const float* weight, const float* bias, int64_t inputs,
                      int64_t outputs, float eps, int activate, int add, int threads) {
    Linear layer{weight, bias, inputs, outputs};
    for_each_block(x, rows, layer, {eps}, threads, [&](int64_t row, int64_t column, Vec low, Vec high) {
        if (activate) low = gelu(low), high = gelu(high);
        float* to = out + row * outputs;
        if (add)
            write<true>(to, column, outputs, low, high);
        else
            write<false>(to, column, outputs, low, high);
    });
}

// total (rows, dim) += fc2(GELU(fc1(norm(x)))); total may be x itself
void patchloom_ffn(const float* x, float* total, int64_t rows, int64_t dim, int64_t hidden, const float* weight1,
                   const float* bias1, const float* weight2, const float* bias2, float eps, int threads) {
    Linear fc1{weight1, bias1, dim, hidden}, fc2{weight2, bias2, hidden, dim};
    int64_t wide = loose(hidden), block = block_rows(rows, loose(dim) + wide, threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t first = 0; first < rows; first += block) {
        int64_t count = std::min(block, rows - first), stride;
        float* middle = scratch.take(block * (wide + loose(dim)));
        const float* left = left_side(x, first, count, dim, {eps}, middle + block * wide, stride);
        product(left, stride, count, fc1, 0, hidden, [&](int64_t row, int64_t column, Vec low, Vec high) {
            write<false>(middle + row * wide, column, hidden, gelu(low), gelu(high));
        });
        for (int64_t r = count; r < round_up(count, ROWS); r++) std::memset(middle + r * wide, 0, hidden * sizeof(float));
        product(middle, wide, count, fc2, 0, dim, [&](int64_t row, int64_t column, Vec low, Vec high) {
            write<true>(total + (first + row) * dim, column, dim, low, high);
        });
    }
}

// softmax(scale * q k^T) v, with heads mixed before and after softmax when `before` and `after` are given
void patchloom_attention(float* q, float* k, float* v, float* out, const int64_t* shape, const int64_t* strides,
                         const float* before, const float* after, const float* shift, float scale, int threads) {
    Shape sizes{shape[0], shape[1], shape[2], shape[3], shape[4]};
    auto heads = [&](float* at, int i) { return Heads{at, strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]}; };
    Heads asking = heads(q, 0), keys = heads(k, 1), values = heads(v, 2), answer = heads(out, 3);
    int64_t parts = sizes.images % threads == 0 || sizes.images >= 4 * threads ? 1 : threads;
    int64_t part = round_up((sizes.queries + parts - 1) / parts, ROWS);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < sizes.images * parts; i++) {
        int64_t first = i % parts * part;
        attend(asking, keys, values, answer, sizes, {before, after, shift, scale}, i / parts, first,
               std::min(first + part, sizes.queries));
    }
}

// The gradients of talking-heads attention: dq, dk, dv, and of before, after and shift for each image, (B, 2 H H + H).
// `mixes` has before, after, and the two transposed, each padded to a multiple of MIX rows.
void patchloom_talking_heads_back(float* q, float* k, float* v, float* grad, float* dq, float* dk, float* dv, float* sums,
                                  const int64_t* shape, const int64_t* strides, const float* mixes, const float* shift,
                                  int threads) {
    Shape sizes{shape[0], shape[1], shape[2], shape[3], shape[4]};
    auto heads = [&](float* at, int i) { return Heads{at, strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]}; };
    Heads asking = heads(q, 0), keys = heads(k, 1), values = heads(v, 2), out = heads(grad, 3), to_q = heads(dq, 4),
          to_k = heads(dk, 5), to_v = heads(dv, 6);
    int64_t size = round_up(sizes.heads, MIX) * sizes.heads, each = 2 * sizes.heads * sizes.heads + sizes.heads;
    Mixing mixing{mixes, mixes + size, shift, 1.0f}, transposed{mixes + 2 * size, mixes + 3 * size, nullptr, 1.0f};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < sizes.images; i++)
        attend_back(asking, keys, values, out, to_q, to_k, to_v, sizes, mixing, transposed, i, sums + i * each);
}

// x[n, d] += scale[d] * sum_m weight[n, m] x[m, d] + rows[n] * across[d] + shift[n] * gain[d] (ResMLP, norm folded in);
// `channels` has scale, across and gain, `patches` has rows and shift. A part of weight's last ROWS rows is not used.
void patchloom_cross_patch(float* x, const int64_t* shape, const float* weight, const float* channels, const float* patches,
                           int threads) {
    int64_t images = shape[0], tokens = shape[1], dim = shape[2], panels = (dim + PANEL - 1) / PANEL;
    const float *scale = channels, *across = scale + panels * PANEL, *gain = across + panels * PANEL;
    const float *rows = patches, *shift = rows + tokens;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < images * panels; i++) {
        float* image = x + i / panels * tokens * dim;
        int64_t column = i % panels * PANEL;
        float* panel = scratch.take(tokens * PANEL);
        pack(image + column, dim, 1, tokens, std::min<int64_t>(PANEL, dim - column), panel);
        for (int64_t row = 0; row < tokens; row += ROWS) {
            Tile<ROWS> tile;
            tile.start(Vec{}, Vec{});
            tile.multiply(weight + row * tokens, tokens, panel, PANEL, tokens);
            for (int64_t r = 0; r < std::min<int64_t>(ROWS, tokens - row); r++) {
                Vec sides[2];
                for (int side = 0; side < 2; side++) {
                    int64_t d = column + side * LANES;
                    sides[side] = tile.at[r][side] * load(scale + d) + rows[row + r] * load(across + d) +
                                  shift[row + r] * load(gain + d);
                }
                write<true>(image + (row + r) * dim, column, dim, sides[0], sides[1]);
            }
        }
    }
}

// out (B, height, width, D) = GELU(depth-wise 3 x 3 of x), mean (B, D) of it over the map; D a multiple of LANES
void patchloom_depthwise(const float* x, float* out, float* mean, const int64_t* shape, const float* weight,
                         const float* bias, int threads) {
    int64_t images = shape[0], height = shape[1], width = shape[2], dim = shape[3], slices = dim / LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < images * slices; i++) {
        int64_t d = i % slices * LANES, from = i / slices * height * width * dim + d;
        Vec start = load(bias + d), sum = {}, taps[9];
        for (int t = 0; t < 9; t++) taps[t] = load(weight + t * dim + d);
        for (int64_t row = 0; row < height; row++)
            for (int64_t column = 0; column < width; column++) {
                Vec y = gelu(convolve(x + from, row, column, height, width, dim, taps, start));
                store(out + from + (row * width + column) * dim, y);
                sum += y;
            }
        store(mean + i / slices * dim + d, sum / float(height * width));
    }
}

// gate (B, D) = sigmoid(W2 relu(W1 mean + b1) + b2), weights transposed: W1 (D, squeezed), W2 (squeezed, D)
void patchloom_excite(const float* mean, float* gate, const int64_t* shape, const float* weight1, const float* bias1,
                      const float* weight2, const float* bias2, int threads) {
    int64_t images = shape[0], dim = shape[1], squeezed = shape[2];
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < images; i++) {
        float *hidden = scratch.take(squeezed), *out = gate + i * dim;
        multiply_vector(mean + i * dim, weight1, bias1, dim, squeezed, hidden);
        for (int64_t n = 0; n < squeezed; n++) hidden[n] = std::max(hidden[n], 0.0f);
        multiply_vector(hidden, weight2, bias2, squeezed, dim, out);
        for (int64_t n = 0; n < dim; n += LANES) store(out + n, sigmoid(load(out + n)));
    }
}

// total (rows, outputs) += linear(gate * x), gate (B, inputs) the same for the `tokens` rows of an image
void patchloom_gated_linear(const float* x, const float* gate, float* total, int64_t rows, int64_t tokens,
                            const float* weight, const float* bias, int64_t inputs, int64_t outputs, int threads) {
    Linear layer{weight, bias, inputs, outputs};
    for_each_block(x, rows, layer, {-1.0f, gate, tokens}, threads, [&](int64_t row, int64_t column, Vec low, Vec high) {
        write<true>(total + row * outputs, column, outputs, low, high);
    });
}

// total (B, height, width, D) += project(gate * GELU(depth-wise(GELU(expand(norm(x))))): PatchConvNet's block. `weights` are
// those of expand, depth-wise, squeeze, excite and project, each with its bias. With images enough, each goes through on
// one thread; `work` has room for two maps and two vectors an image.
void patchloom_conv_branch(float* total, const float* x, float* work, const int64_t* shape, const float* const* weights,
                           float eps, int threads) {
    int64_t images = shape[0], tokens = shape[1] * shape[2], dim = shape[3], map = tokens * dim;
    bool apart = threads > 1 && (images % threads == 0 || images >= 4 * threads);
    int64_t together = apart ? 1 : images, inner = apart ? 1 : threads;
    int64_t sizes[4] = {together, shape[1], shape[2], dim}, squeeze[3] = {together, dim, shape[4]};
#pragma omp parallel for schedule(dynamic) num_threads(apart ? threads : 1)
    for (int64_t i = 0; i < images; i += together) {
        float *first = work + i * 2 * (map + dim), *second = first + together * map, *mean = second + together * map,
              *gate = mean + together * dim;
        patchloom_linear(x + i * map, first, together * tokens, weights[0], weights[1], dim, dim, eps, 1, 0, inner);
        patchloom_depthwise(first, second, mean, sizes, weights[2], weights[3], inner);
        patchloom_excite(mean, gate, squeeze, weights[4], weights[5], weights[6], weights[7], inner);
        patchloom_gated_linear(second, gate, total + i * map, together * tokens, tokens, weights[8], weights[9], dim, dim,
                               inner);
    }
}
}
