// Inference on a CPU, in float32 or int8: matrix products with what comes before and after them, so that
// activations stay in the cache.
//
// Shapes: B images, N tokens, D channels, H heads. Compiled once for each instruction set (see build.py); the loader picks
// the one that the machine has.

#include <omp.h>

#include <atomic>
#include <thread>
#include <vector>

#include "attention.h"

namespace {

// `run(step, image, threads)` for all steps of every image, one after another. Where there are images for all threads, each
// takes the next step of the next image, and waits for no other but where that image is still in the step before; fewer
// images have all threads for each step.
template <class Run>
void for_each_image(int64_t images, int64_t steps, int threads, Run run) {
    if (images < threads) {
        for (int64_t i = 0; i < steps * images; i++) run(i / images, i % images, threads);
        return;
    }
    std::vector<std::atomic<int64_t>> done(images);  // steps
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
    for (int64_t i; (i = next++) < steps * images;) {
        int64_t step = i / images, image = i % images;
        while (done[image].load(std::memory_order_acquire) < step) std::this_thread::yield();
        run(step, image, 1);
        done[image].store(step + 1, std::memory_order_release);
    }
}

// What PatchConvNet's block has on maps (height, width, dim)
template <class Layer>
struct ConvBranch {
    int64_t height, width, dim, squeezed;
    Layer expand, project;
    const float *taps, *shift;  // depth-wise, (9, dim) and (dim)
    const float *squeeze, *squeeze_bias, *excite, *excite_bias;
    float eps;
    bool paired;  // products of pairs, see products.h
    int64_t tokens() const { return height * width; }
};

// Line `row` of a depth-wise 3 x 3 convolution of a map (height, width, PANEL) with zeros around it, a vector of channels;
// `finish(column, y)` gets every result. A pixel is loaded once, and goes to the three results beside it.
template <class Finish>
inline void convolve_line(const float* map, int64_t height, int64_t width, int64_t row, const Vec* taps, Vec start,
                          Finish finish) {
    int first = row == 0, last = row == height - 1 ? 1 : 2;  // of the three lines, those inside
    const float* lines = map + (row - 1) * width * PANEL;
    Vec before = start, here = start;  // the results left of a pixel and at its place, so far
    for (int64_t column = 0; column < width; column++) {
        Vec after = start;
#pragma GCC unroll 3
        for (int i = 0; i < 3; i++) {
            if (i < first || i > last) continue;
            Vec pixel = load(lines + (i * width + column) * PANEL);
            before += pixel * taps[3 * i + 2], here += pixel * taps[3 * i + 1], after += pixel * taps[3 * i];
        }
        if (column > 0) finish(column - 1, before);
        before = here, here = after;
    }
    finish(width - 1, before);
}

// Channels [first, last) of out = GELU(depth-wise(GELU(expand(norm(x))))) and of its mean, for one image. Two panels of the
// expanded map are convolved while they are in the cache.
template <class Layer>
void expand_and_convolve(const ConvBranch<Layer>& branch, const float* x, int64_t first, int64_t last, float* out,
                         float* mean) {
    static thread_local Scratch expanded;
    int64_t tokens = branch.tokens(), dim = branch.dim;
    float* panels = expanded.take(2 * tokens * PANEL);
    auto left = left_side(x, 0, tokens, branch.expand, {branch.eps, branch.paired});
    for (int64_t column = first; column < last; column += 2 * PANEL) {
        int64_t until = std::min(column + 2 * PANEL, last);
        product(left, branch.expand, column, until, [&](int64_t row, int64_t at, Vec low, Vec high) {
            float* to = panels + (at - column) * tokens + row * PANEL;
            store(to, gelu(low)), store(to + LANES, gelu(high));
        });
        for (int64_t d = column; d < until; d += LANES) {
            const float* map = panels + (d - column) / PANEL * PANEL * tokens + (d - column) % PANEL;
            Vec start = load(branch.shift + d), sum = {}, taps[9];
            for (int t = 0; t < 9; t++) taps[t] = load(branch.taps + t * dim + d);
            for (int64_t i = 0; i < branch.height; i++)
                convolve_line(map, branch.height, branch.width, i, taps, start, [&](int64_t j, Vec y) {
                    y = gelu(y);
                    store(out + (i * branch.width + j) * dim + d, y);
                    sum += y;
                });
            store(mean + d, sum / float(tokens));
        }
    }
}

// gate = sigmoid(W2 relu(W1 mean + b1) + b2), weights transposed: W1 (dim, squeezed), W2 (squeezed, dim)
template <class Layer>
void squeeze_excite(const ConvBranch<Layer>& branch, const float* mean, float* gate) {
    float* hidden = scratch.take(branch.squeezed);
    multiply_vector(mean, branch.squeeze, branch.squeeze_bias, branch.dim, branch.squeezed, hidden);
    for (int64_t n = 0; n < branch.squeezed; n++) hidden[n] = std::max(hidden[n], 0.0f);
    multiply_vector(hidden, branch.excite, branch.excite_bias, branch.squeezed, branch.dim, gate);
    for (int64_t n = 0; n < branch.dim; n += LANES) store(gate + n, sigmoid(load(gate + n)));
}

// total (rows, outputs) += linear(before(x))
template <class Layer>
inline void add_linear(const Layer& layer, const float* x, const Prologue& before, int64_t rows, float* total, int threads) {
    for_each_block(x, rows, layer, before, threads, [&](int64_t row, int64_t column, Vec low, Vec high) {
        write<true>(total + row * layer.outputs, column, layer.outputs, low, high);
    });
}

// x (height, width, dim) += project(gate * GELU(depth-wise(GELU(expand(norm(x)))))). `work` has room for a map and two vectors
// of channels.
template <class Layer>
void add_conv_branch(const ConvBranch<Layer>& branch, float* x, float* work, int threads) {
    int64_t tokens = branch.tokens(), dim = branch.dim, channels = round_up(divide_up(dim, threads), 2 * PANEL);
    float *middle = work, *mean = middle + tokens * dim, *gate = mean + dim;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t first = 0; first < dim; first += channels)
        expand_and_convolve(branch, x, first, std::min(first + channels, dim), middle, mean);
    squeeze_excite(branch, mean, gate);
    add_linear(branch.project, middle, {-1.0f, branch.paired, gate, tokens}, tokens, x, threads);
}

// Another layer of the same kind
template <class Layer>
inline Layer like(const Layer&, const void* weight, const float* bias, int64_t inputs, int64_t outputs) {
    return {static_cast<decltype(Layer::weight)>(weight), bias, inputs, outputs};
}

// `run` gets the layer, of floats or of bytes
template <class Run>
inline void with_layer(const void* weight, const float* bias, int64_t inputs, int64_t outputs, bool bytes, Run run) {
    if (bytes)
        run(ByteLinear{static_cast<const int8_t*>(weight), bias, inputs, outputs});
    else
        run(Linear{static_cast<const float*>(weight), bias, inputs, outputs});
}

inline Vec hidden_gelu(const Linear&, Vec x) { return gelu(x); }
inline Vec hidden_gelu(const ByteLinear&, Vec x) { return rough_gelu(x); }

inline Rows hidden_rows(float* middle, int64_t stride, int64_t count, const Linear& layer, bool paired) {
    return in_pairs({middle, stride, count}, layer.inputs, paired);
}

inline ByteRows hidden_rows(float* middle, int64_t stride, int64_t count, const ByteLinear& layer, bool) {
    ByteRows rows = room_for_rows(count, layer.inputs);
    for (int64_t r = 0; r < count; r++) quantise(rows, r, middle + r * stride, layer.inputs);
    return rows;
}

// total (rows, dim) += fc2(GELU(fc1(before(x)))), a block of rows at a time
template <class Layer>
void add_ffn(const Layer& fc1, const Layer& fc2, const float* x, float* total, int64_t rows, const Prologue& before,
             int threads) {
    int64_t hidden = fc1.outputs, dim = fc2.outputs, wide = loose(hidden);
    Blocks blocks = blocks_of(rows, loose(fc1.inputs) + wide, before.paired, threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < blocks.count; i++) {
        static thread_local Scratch middles;
        int64_t first = blocks.first(i), count = blocks.first(i + 1) - first;
        float* middle = middles.take(count * wide);
        product(left_side(x, first, count, fc1, before), fc1, 0, hidden, [&](int64_t row, int64_t column, Vec low, Vec high) {
            write<false>(middle + row * wide, column, hidden, hidden_gelu(fc2, low), hidden_gelu(fc2, high));
        });
        auto rest = hidden_rows(middle, wide, count, fc2, before.paired);
        product(rest, fc2, 0, dim, [&](int64_t row, int64_t column, Vec low, Vec high) {
            write<true>(total + (first + row) * dim, column, dim, low, high);
        });
    }
}

inline bool of_bytes(const Linear&) { return false; }
inline bool of_bytes(const ByteLinear&) { return true; }

// Whether there is one thread for each task: of few tasks, all threads take parts of each
inline bool apart(int64_t tasks, int threads) { return tasks % threads == 0 || tasks >= 4 * threads; }

// All queries of all images; heads that are not mixed are apart
void attend_all(const Heads& q, const Heads& k, const Heads& v, const Heads& out, const Shape& shape, const Mixing& mixing,
                bool bytes, int threads) {
    int64_t together = mixing.before ? shape.heads : 1, tasks = shape.images * shape.heads / together;
    int64_t parts = apart(tasks, threads) ? 1 : threads, part = divide_up(shape.queries, parts);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < tasks * parts; i++) {
        int64_t head = i / parts * together % shape.heads, image = i / parts * together / shape.heads;
        int64_t first = i % parts * part, last = std::min(first + part, shape.queries);
        if (first >= last) continue;
        if (bytes)
            attend_bytes(q, k, v, out, shape, mixing.scale, image, head, first, last);
        else
            attend(q, k, v, out, shape, mixing, image, head, together, first, last);
    }
}

// total (N, D) += proj(attention(qkv(before(x)))), of one image. All heads together have proj.inputs channels: D, or P D where
// the heads of P parallel branches stand side by side.
template <class Layer>
void add_attention(const Layer& qkv, const Layer& proj, const float* x, float* total, const Shape& shape,
                   const Mixing& mixing, const Prologue& before, int threads) {
    static thread_local Scratch memory;
    int64_t tokens = shape.queries, inner = proj.inputs, wide = loose(3 * inner);
    float *projected = memory.take(tokens * (wide + inner)), *attended = projected + tokens * wide;
    for_each_block(x, tokens, qkv, before, threads, [&](int64_t row, int64_t column, Vec low, Vec high) {
        write<false>(projected + row * wide, column, 3 * inner, low, high);
    });
    auto heads = [&](int64_t i) { return Heads{projected + i * inner, 0, shape.width, wide}; };
    attend_all(heads(0), heads(1), heads(2), {attended, 0, shape.width, inner}, shape, mixing,
               of_bytes(qkv) && !mixing.before, threads);
    add_linear(proj, attended, {-1.0f, before.paired}, tokens, total, threads);
}

// The weights of blocks one after another, each part from a multiple of 64 bytes on
struct Parts {
    const char* at;

    const float* floats(int64_t count) {
        const char* found = at;
        at += round_up(4 * count, 64);
        return reinterpret_cast<const float*>(found);
    }

    void take(Linear& layer, int64_t inputs, int64_t outputs) {
        int64_t wide = round_up(outputs, PANEL);
        const float* weight = floats(wide * inputs);
        layer = {weight, floats(wide), inputs, outputs};
    }

    void take(ByteLinear& layer, int64_t inputs, int64_t outputs) {
        int64_t wide = round_up(outputs, PANEL);
        auto* weight = reinterpret_cast<const int8_t*>(floats(wide * round_up(inputs, GROUP) / 4));
        layer = {weight, floats(3 * wide), inputs, outputs};
    }
};

template <class Layer>
struct AttentionBlock {
    Layer qkv, proj, fc1, fc2;
    Mixing mixing;
};

// x (B, N, D) goes through blocks of attention and FFN; see patchloom_attention_blocks
template <class Layer>
void run_attention_blocks(float* x, const int64_t* shape, Parts weights, float scale, float eps, float eps_ffn,
                          int threads) {
    int64_t tokens = shape[1], dim = shape[2], heads = shape[3], inner = shape[4], hidden = shape[5];
    int64_t whole = round_up(heads, MIX);
    std::vector<AttentionBlock<Layer>> blocks(shape[6]);
    for (auto& block : blocks) {
        weights.take(block.qkv, dim, 3 * inner), weights.take(block.proj, inner, dim);
        block.mixing = {nullptr, nullptr, nullptr, scale};
        if (shape[7]) {
            block.mixing.before = weights.floats(whole * heads), block.mixing.after = weights.floats(heads * heads);
            block.mixing.shift = weights.floats(whole);
        }
        weights.take(block.fc1, dim, hidden), weights.take(block.fc2, hidden, dim);
    }
    Shape one{1, heads, tokens, tokens, inner / heads};
    Prologue before{eps, bool(shape[8])}, before_ffn{eps_ffn, bool(shape[8])};
    for_each_image(shape[0], shape[6], threads, [&](int64_t i, int64_t image, int helping) {
        const auto& block = blocks[i];
        float* here = x + image * tokens * dim;
        add_attention(block.qkv, block.proj, here, here, one, block.mixing, before, helping);
        add_ffn(block.fc1, block.fc2, here, here, tokens, before_ffn, helping);
    });
}

// x (B, height, width, D) goes through PatchConvNet's blocks; see patchloom_conv_blocks
template <class Layer>
void run_conv_blocks(float* x, float* work, const int64_t* shape, Parts weights, float eps, int threads) {
    int64_t dim = shape[3], squeezed = shape[4], map = shape[1] * shape[2] * dim;
    if (map == 0) return;
    std::vector<ConvBranch<Layer>> blocks(shape[5]);
    for (auto& branch : blocks) {
        branch.height = shape[1], branch.width = shape[2], branch.dim = dim, branch.squeezed = squeezed;
        branch.eps = eps, branch.paired = shape[6];
        weights.take(branch.expand, dim, dim);
        branch.taps = weights.floats(9 * dim), branch.shift = weights.floats(dim);
        branch.squeeze = weights.floats(dim * squeezed), branch.squeeze_bias = weights.floats(squeezed);
        branch.excite = weights.floats(squeezed * dim), branch.excite_bias = weights.floats(dim);
        weights.take(branch.project, dim, dim);
    }
    for_each_image(shape[0], shape[5], threads, [&](int64_t i, int64_t image, int helping) {
        add_conv_branch(blocks[i], x + image * map, work + omp_get_thread_num() * (map + 2 * dim), helping);
    });
}

// A convolution of a stem
template <class Layer>
struct Stage {
    Windows windows;
    Layer layer;
    int64_t floats() const { return windows.down * windows.across * layer.outputs; }
};

template <class Layer>
std::vector<Stage<Layer>> stages_of(const int64_t* shape, Parts weights) {
    int64_t height = shape[1], width = shape[2], channels = shape[3];
    std::vector<Stage<Layer>> stages;
    for (const int64_t *next = shape + 5, *end = next + 4 * shape[4]; next < end; next += 4) {
        Windows windows(height, width, channels, next[1], next[2], next[3]);
        Layer layer;
        weights.take(layer, next[1] * next[1] * channels, next[0]);
        height = windows.down, width = windows.across, channels = next[0];
        stages.push_back({windows, layer});
    }
    return stages;
}

// Images (B, height, width, channels) go through convolutions; see patchloom_stem
template <class Layer>
void run_stem(const float* images, float* out, float* work, const int64_t* shape, Parts weights, int threads) {
    auto stages = stages_of<Layer>(shape, weights);
    int64_t size = shape[1] * shape[2] * shape[3], each = 0;
    for (const auto& stage : stages) each += stage.floats();
    for_each_image(shape[0], 1, threads, [&](int64_t, int64_t image, int helping) {
        const float* map = images + image * size;
        float* to = work + omp_get_thread_num() * each;
        for (const auto& stage : stages) {
            bool last = &stage == &stages.back();
            if (last) to = out + image * stage.floats();
            Prologue before;
            before.windows = &stage.windows;
            int64_t rows = stage.windows.down * stage.windows.across, outputs = stage.layer.outputs;
            for_each_block(map, rows, stage.layer, before, helping, [&](int64_t row, int64_t column, Vec low, Vec high) {
                if (!last) low = gelu(low), high = gelu(high);
                write<false>(to + row * outputs, column, outputs, low, high);
            });
            map = to, to += stage.floats();
        }
    });
}

}  // namespace

extern "C" {

int patchloom_panel() { return PANEL; }

// Weights (outputs, inputs) as ByteLinear has them
void patchloom_pack_bytes(const float* weight, int64_t inputs, int64_t outputs, int8_t* bytes, float* terms, int) {
    quantise_matrix(weight, 1, inputs, inputs, outputs, bytes, terms);
}

// out (rows, outputs) = linear(norm(x)), with `add` added to what is there, with `activate` through GELU
void patchloom_linear(const float* x, float* out, int64_t rows, const void* weight, const float* bias, int64_t inputs,
                      int64_t outputs, float eps, int activate, int add, int bytes, int threads) {
    with_layer(weight, bias, inputs, outputs, bytes, [&](auto layer) {
        for_each_block(x, rows, layer, {eps}, threads, [&](int64_t row, int64_t column, Vec low, Vec high) {
            if (activate) low = gelu(low), high = gelu(high);
            float* to = out + row * outputs;
            if (add)
                write<true>(to, column, outputs, low, high);
            else
                write<false>(to, column, outputs, low, high);
        });
    });
}

// out (B, down, across, outputs) = convolutions of images (B, height, width, channels), a GELU between them. `shape` is B,
// height, width, channels, convolutions, and for each of them outputs, side, step, padding; `weights` are those of each
// convolution and its bias; `work` has room for the maps of all of them, for each thread.
void patchloom_stem(const float* images, float* out, float* work, const int64_t* shape, const char* weights, int bytes,
                    int threads) {
    auto run = bytes ? run_stem<ByteLinear> : run_stem<Linear>;
    run(images, out, work, shape, {weights}, threads);
}

// total (rows, dim) += fc2(GELU(fc1(norm(x)))); total may be x itself
void patchloom_ffn(const float* x, float* total, int64_t rows, int64_t dim, int64_t hidden, const void* weight1,
                   const float* bias1, const void* weight2, const float* bias2, float eps, int bytes, int threads) {
    with_layer(weight1, bias1, dim, hidden, bytes, [&](auto fc1) {
        add_ffn(fc1, like(fc1, weight2, bias2, hidden, dim), x, total, rows, {eps}, threads);
    });
}

// softmax(scale * q k^T) v, with heads mixed before and after softmax when `before` and `after` are given
void patchloom_attention(float* q, float* k, float* v, float* out, const int64_t* shape, const int64_t* strides,
                         const float* before, const float* after, const float* shift, float scale, int bytes, int threads) {
    Shape sizes{shape[0], shape[1], shape[2], shape[3], shape[4]};
    auto heads = [&](float* at, int i) { return Heads{at, strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]}; };
    attend_all(heads(q, 0), heads(k, 1), heads(v, 2), heads(out, 3), sizes, {before, after, shift, scale}, bytes, threads);
}

// total (B, N, D) += proj(attention(qkv(norm(x)))); total may be x itself. `shape` is B, N, D, H and the channels of all heads.
void patchloom_attention_branch(const float* x, float* total, const int64_t* shape, const void* qkv, const float* qkv_bias,
                                const void* proj, const float* proj_bias, const float* before, const float* after,
                                const float* shift, float scale, float eps, int bytes, int threads) {
    int64_t tokens = shape[1], dim = shape[2], inner = shape[4];
    Shape one{1, shape[3], tokens, tokens, inner / shape[3]};
    with_layer(qkv, qkv_bias, dim, 3 * inner, bytes, [&](auto layer) {
        auto last = like(layer, proj, proj_bias, inner, dim);
        for_each_image(shape[0], 1, threads, [&](int64_t, int64_t i, int helping) {
            int64_t at = i * tokens * dim;
            add_attention(layer, last, x + at, total + at, one, {before, after, shift, scale}, {eps}, helping);
        });
    });
}

// x (B, N, D) goes through blocks of attention and FFN in place. `shape` is B, N, D, H, the channels of all heads, those of the
// FFN's hidden layer, blocks, whether heads are mixed, whether products go in pairs; `weights` are those of qkv, proj, before,
// after and shift if mixed, fc1 and fc2 of each block, layers with their bias.
void patchloom_attention_blocks(float* x, const int64_t* shape, const char* weights, float scale, float eps, float eps_ffn,
                                int bytes, int threads) {
    auto run = bytes ? run_attention_blocks<ByteLinear> : run_attention_blocks<Linear>;
    run(x, shape, {weights}, scale, eps, eps_ffn, threads);
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
// `channels` has scale, across and gain, `patches` has rows and shift.
void patchloom_cross_patch(float* x, const int64_t* shape, const float* weight, const float* channels, const float* patches,
                           int threads) {
    int64_t images = shape[0], tokens = shape[1], dim = shape[2], panels = divide_up(dim, PANEL);
    const float *scale = channels, *across = scale + panels * PANEL, *gain = across + panels * PANEL;
    const float *rows = patches, *shift = rows + tokens;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < images * panels; i++) {
        float* image = x + i / panels * tokens * dim;
        int64_t column = i % panels * PANEL;
        float* panel = scratch.take(tokens * PANEL);
        pack(image + column, dim, 1, tokens, std::min<int64_t>(PANEL, dim - column), panel);
        for (int64_t row = 0; row < tokens; row += ROWS) {
            int64_t count = std::min<int64_t>(ROWS, tokens - row);
            Tile<ROWS> tile;
            tile.start(Vec{}, Vec{});
            tile.multiply(count, dim - column, weight + row * tokens, tokens, panel, PANEL, tokens);
            for (int64_t r = 0; r < count; r++) {
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

void patchloom_gated_linear(const float* x, const float* gate, float* total, int64_t rows, int64_t tokens,
                            const void* weight, const float* bias, int64_t inputs, int64_t outputs, int bytes, int threads) {
    with_layer(weight, bias, inputs, outputs, bytes,
               [&](auto layer) { add_linear(layer, x, {-1.0f, false, gate, tokens}, rows, total, threads); });
}

// x (B, height, width, D) goes through PatchConvNet's blocks in place. `shape` is B, height, width, D, channels squeezed to,
// blocks, whether products go in pairs; `weights` are those of expand, depth-wise, squeeze, excite and project of each block,
// each with its bias; `work` has room for a map and two vectors of channels, for each thread.
void patchloom_conv_blocks(float* x, float* work, const int64_t* shape, const char* weights, float eps, int bytes,
                           int threads) {
    auto run = bytes ? run_conv_blocks<ByteLinear> : run_conv_blocks<Linear>;
    run(x, work, shape, {weights}, eps, threads);
}
}
