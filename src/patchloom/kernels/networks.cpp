// Inference on a CPU, in float32 or with products of bytes: products with what comes before and after them, so that
// activations stay in the cache.
//
// Shapes: B images, N tokens, D channels, H heads. Compiled once for each instruction set (see build.py); the loader picks
// the one that the machine has.

#include "attention.h"

namespace {

// Whether there is one thread for each task: of few tasks, all threads take parts of each
inline bool apart(int64_t tasks, int threads) { return tasks % threads == 0 || tasks >= 4 * threads; }

// What PatchConvNet's block has on maps (height, width, dim)
template <class Layer>
struct ConvBranch {
    int64_t height, width, dim, squeezed;
    Layer expand, project;
    const float *taps, *shift;  // depth-wise, (9, dim) and (dim)
    const float *squeeze, *squeeze_bias, *excite, *excite_bias;
    float eps;
    int64_t tokens() const { return height * width; }
};

// One vector of channels of a depth-wise 3 x 3 convolution of a map (height, width, PANEL), with zeros around it
template <class Layer>
inline Vec convolve(const float* map, int64_t row, int64_t column, const ConvBranch<Layer>& branch, const Vec* taps,
                    Vec total) {
    const float* centre = map + (row * branch.width + column) * PANEL;
    if (row > 0 && row < branch.height - 1 && column > 0 && column < branch.width - 1) {
#pragma GCC unroll 9
        for (int t = 0; t < 9; t++) total += load(centre + ((t / 3 - 1) * branch.width + t % 3 - 1) * PANEL) * taps[t];
        return total;
    }
    for (int t = 0; t < 9; t++) {
        int64_t i = row + t / 3 - 1, j = column + t % 3 - 1;
        if (i >= 0 && i < branch.height && j >= 0 && j < branch.width)
            total += load(map + (i * branch.width + j) * PANEL) * taps[t];
    }
    return total;
}

// Channels [first, last) of out = GELU(depth-wise(GELU(expand(norm(x))))) and of its mean, for one image. A panel of the
// expanded map is convolved while it is in the first-level cache.
template <class Layer>
void expand_and_convolve(const ConvBranch<Layer>& branch, const float* x, int64_t first, int64_t last, float* out,
                         float* mean) {
    static thread_local Scratch expanded;
    int64_t tokens = branch.tokens(), dim = branch.dim;
    float* panel = expanded.take(tokens * PANEL);
    auto left = left_side(x, 0, tokens, branch.expand, {branch.eps});
    for (int64_t column = first; column < last; column += PANEL) {
        product(left, branch.expand, column, column + PANEL, [&](int64_t row, int64_t, Vec low, Vec high) {
            store(panel + row * PANEL, gelu(low));
            store(panel + row * PANEL + LANES, gelu(high));
        });
        for (int64_t d = column; d < std::min(column + PANEL, dim); d += LANES) {
            Vec start = load(branch.shift + d), sum = {}, taps[9];
            for (int t = 0; t < 9; t++) taps[t] = load(branch.taps + t * dim + d);
            for (int64_t i = 0; i < branch.height; i++)
                for (int64_t j = 0; j < branch.width; j++) {
                    Vec y = gelu(convolve(panel + d - column, i, j, branch, taps, start));
                    store(out + (i * branch.width + j) * dim + d, y);
                    sum += y;
                }
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

// x (B, height, width, dim) += project(gate * GELU(depth-wise(GELU(expand(norm(x)))))). `work` has room for a map and two
// vectors an image.
template <class Layer>
void add_conv_branch(const ConvBranch<Layer>& branch, int64_t images, float* x, float* work, int threads) {
    int64_t tokens = branch.tokens(), dim = branch.dim, map = tokens * dim;
    bool alone = apart(images, threads);
    int64_t channels = alone ? dim : round_up((dim + threads - 1) / threads, PANEL), ranges = (dim + channels - 1) / channels;
    float *middle = work, *mean = middle + images * map, *gate = mean + images * dim;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < images * ranges; i++) {
        int64_t image = i / ranges, first = i % ranges * channels;
        float *out = middle + image * map, *means = mean + image * dim, *gates = gate + image * dim;
        expand_and_convolve(branch, x + image * map, first, std::min(first + channels, dim), out, means);
        if (!alone) continue;
        squeeze_excite(branch, means, gates);
        for (int64_t n = 0; n < tokens; n++)
            for (int64_t d = 0; d < dim; d += LANES) store(out + n * dim + d, load(out + n * dim + d) * load(gates + d));
        add_linear(branch.project, out, {}, tokens, x + image * map, 1);
    }
    if (alone) return;
    for (int64_t i = 0; i < images; i++) squeeze_excite(branch, mean + i * dim, gate + i * dim);
    add_linear(branch.project, middle, {-1.0f, gate, tokens}, images * tokens, x, threads);
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

inline Rows hidden_rows(float* middle, int64_t stride, int64_t count, const Linear&) { return {middle, stride, count}; }

inline ByteRows hidden_rows(float* middle, int64_t stride, int64_t count, const ByteLinear& layer) {
    ByteRows rows = room_for_rows(count, layer.inputs);
    for (int64_t r = 0; r < count; r++) quantise(rows, r, middle + r * stride, layer.inputs);
    return rows;
}

// total (rows, dim) += fc2(GELU(fc1(norm(x)))), a block of rows at a time
template <class Layer>
void add_ffn(const Layer& fc1, const Layer& fc2, const float* x, float* total, int64_t rows, float eps, int threads) {
    if (rows == 0) return;
    int64_t hidden = fc1.outputs, dim = fc2.outputs, wide = loose(hidden);
    int64_t block = block_rows(rows, loose(fc1.inputs) + wide, threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t first = 0; first < rows; first += block) {
        static thread_local Scratch middles;
        int64_t count = std::min(block, rows - first);
        float* middle = middles.take(block * wide);
        product(left_side(x, first, count, fc1, {eps}), fc1, 0, hidden, [&](int64_t row, int64_t column, Vec low, Vec high) {
            write<false>(middle + row * wide, column, hidden, hidden_gelu(fc2, low), hidden_gelu(fc2, high));
        });
        product(hidden_rows(middle, wide, count, fc2), fc2, 0, dim, [&](int64_t row, int64_t column, Vec low, Vec high) {
            write<true>(total + (first + row) * dim, column, dim, low, high);
        });
    }
}

inline bool of_bytes(const Linear&) { return false; }
inline bool of_bytes(const ByteLinear&) { return true; }

// All queries of all images; heads that are not mixed are apart
void attend_all(const Heads& q, const Heads& k, const Heads& v, const Heads& out, const Shape& shape, const Mixing& mixing,
                bool bytes, int threads) {
    int64_t together = mixing.before ? shape.heads : 1, tasks = shape.images * shape.heads / together;
    int64_t parts = apart(tasks, threads) ? 1 : threads, part = (shape.queries + parts - 1) / parts;
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

// total (B, N, D) += proj(attention(qkv(norm(x)))), each step for all images
template <class Layer>
void add_attention_together(const Layer& qkv, const Layer& proj, const float* x, float* total, const Shape& shape,
                   const Mixing& mixing, float eps, int threads) {
    static thread_local Scratch memory;
    int64_t tokens = shape.queries, dim = proj.outputs, wide = loose(3 * dim), rows = shape.images * tokens;
    float *projected = memory.take(rows * (wide + dim)), *attended = projected + rows * wide;
    for_each_block(x, rows, qkv, {eps}, threads, [&](int64_t row, int64_t column, Vec low, Vec high) {
        write<false>(projected + row * wide, column, 3 * dim, low, high);
    });
    auto heads = [&](int64_t i) { return Heads{projected + i * dim, tokens * wide, shape.width, wide}; };
    attend_all(heads(0), heads(1), heads(2), {attended, tokens * dim, shape.width, dim}, shape, mixing,
               of_bytes(qkv) && !mixing.before, threads);
    add_linear(proj, attended, {}, rows, total, threads);
}

// total (B, N, D) += proj(attention(qkv(norm(x))))
template <class Layer>
void add_attention(const Layer& qkv, const Layer& proj, const float* x, float* total, Shape shape, const Mixing& mixing,
                   float eps, int threads) {
    int64_t images = shape.images, alone = apart(images, threads) ? images : images / threads * threads;
    int64_t size = shape.queries * proj.outputs;
    shape.images = 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < alone; i++)
        add_attention_together(qkv, proj, x + i * size, total + i * size, shape, mixing, eps, 1);
    shape.images = images - alone;  // fewer than threads
    if (shape.images)
        add_attention_together(qkv, proj, x + alone * size, total + alone * size, shape, mixing, eps, threads);
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

// x (B, N, D) goes through blocks of attention and FFN; see patchloom_attention_blocks
template <class Layer>
void run_attention_blocks(float* x, Shape shape, int64_t dim, int64_t hidden, int64_t blocks, bool mixed, Parts weights,
                          float scale, float eps, float eps_ffn, int threads) {
    int64_t heads = shape.heads, whole = round_up(heads, MIX);
    for (int64_t i = 0; i < blocks; i++) {
        Layer qkv, proj, fc1, fc2;
        Mixing mixing{nullptr, nullptr, nullptr, scale};
        weights.take(qkv, dim, 3 * dim), weights.take(proj, dim, dim);
        if (mixed) {
            mixing.before = weights.floats(whole * heads), mixing.after = weights.floats(heads * heads);
            mixing.shift = weights.floats(whole);
        }
        weights.take(fc1, dim, hidden), weights.take(fc2, hidden, dim);
        add_attention(qkv, proj, x, x, shape, mixing, eps, threads);
        add_ffn(fc1, fc2, x, x, shape.images * shape.queries, eps_ffn, threads);
    }
}

// x (B, height, width, D) goes through PatchConvNet's blocks; see patchloom_conv_blocks
template <class Layer>
void run_conv_blocks(float* x, float* work, const int64_t* shape, Parts weights, float eps, int threads) {
    int64_t dim = shape[3], squeezed = shape[4];
    for (int64_t i = 0; i < shape[5]; i++) {
        ConvBranch<Layer> branch;
        branch.height = shape[1], branch.width = shape[2], branch.dim = dim, branch.squeezed = squeezed, branch.eps = eps;
        weights.take(branch.expand, dim, dim);
        branch.taps = weights.floats(9 * dim), branch.shift = weights.floats(dim);
        branch.squeeze = weights.floats(dim * squeezed), branch.squeeze_bias = weights.floats(squeezed);
        branch.excite = weights.floats(squeezed * dim), branch.excite_bias = weights.floats(dim);
        weights.take(branch.project, dim, dim);
        add_conv_branch(branch, shape[0], x, work, threads);
    }
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

// out (B, down, across, outputs) = convolution of maps (B, height, width, channels), with `activate` through GELU; `shape`
// is B, height, width, channels, side, step, padding
void patchloom_convolution(const float* maps, float* out, const int64_t* shape, const void* weight, const float* bias,
                           int64_t outputs, int activate, int bytes, int threads) {
    Windows windows{shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]};
    int64_t rows = shape[0] * windows.down() * windows.across();
    Prologue before;
    before.windows = &windows;
    with_layer(weight, bias, windows.side * windows.side * windows.channels, outputs, bytes, [&](auto layer) {
        for_each_block(maps, rows, layer, before, threads, [&](int64_t row, int64_t column, Vec low, Vec high) {
            if (activate) low = gelu(low), high = gelu(high);
            write<false>(out + row * outputs, column, outputs, low, high);
        });
    });
}

// total (rows, dim) += fc2(GELU(fc1(norm(x)))); total may be x itself
void patchloom_ffn(const float* x, float* total, int64_t rows, int64_t dim, int64_t hidden, const void* weight1,
                   const float* bias1, const void* weight2, const float* bias2, float eps, int bytes, int threads) {
    with_layer(weight1, bias1, dim, hidden, bytes, [&](auto fc1) {
        add_ffn(fc1, like(fc1, weight2, bias2, hidden, dim), x, total, rows, eps, threads);
    });
}

// softmax(scale * q k^T) v, with heads mixed before and after softmax when `before` and `after` are given
void patchloom_attention(float* q, float* k, float* v, float* out, const int64_t* shape, const int64_t* strides,
                         const float* before, const float* after, const float* shift, float scale, int bytes, int threads) {
    Shape sizes{shape[0], shape[1], shape[2], shape[3], shape[4]};
    auto heads = [&](float* at, int i) { return Heads{at, strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]}; };
    attend_all(heads(q, 0), heads(k, 1), heads(v, 2), heads(out, 3), sizes, {before, after, shift, scale}, bytes, threads);
}

// total (B, N, D) += proj(attention(qkv(norm(x)))); total may be x itself. `shape` is B, N, D, H.
void patchloom_attention_branch(const float* x, float* total, const int64_t* shape, const void* qkv, const float* qkv_bias,
                                const void* proj, const float* proj_bias, const float* before, const float* after,
                                const float* shift, float scale, float eps, int bytes, int threads) {
    int64_t dim = shape[2];
    Shape sizes{shape[0], shape[3], shape[1], shape[1], dim / shape[3]};
    with_layer(qkv, qkv_bias, dim, 3 * dim, bytes, [&](auto layer) {
        auto last = like(layer, proj, proj_bias, dim, dim);
        add_attention(layer, last, x, total, sizes, {before, after, shift, scale}, eps, threads);
    });
}

// x (B, N, D) goes through blocks of attention and FFN in place. `shape` is B, N, D, H, hidden, blocks, whether heads are
// mixed; `weights` are those of qkv, proj, before, after and shift if mixed, fc1 and fc2 of each block, layers with their bias.
void patchloom_attention_blocks(float* x, const int64_t* shape, const char* weights, float scale, float eps, float eps_ffn,
                                int bytes, int threads) {
    int64_t dim = shape[2];
    Shape sizes{shape[0], shape[3], shape[1], shape[1], dim / shape[3]};
    auto run = bytes ? run_attention_blocks<ByteLinear> : run_attention_blocks<Linear>;
    run(x, sizes, dim, shape[4], shape[5], shape[6], {weights}, scale, eps, eps_ffn, threads);
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
               [&](auto layer) { add_linear(layer, x, {-1.0f, gate, tokens}, rows, total, threads); });
}

// x (B, height, width, D) goes through PatchConvNet's blocks in place. `shape` is B, height, width, D, channels squeezed to,
// blocks; `weights` are those of expand, depth-wise, squeeze, excite and project of each block, each with its bias.
void patchloom_conv_blocks(float* x, float* work, const int64_t* shape, const char* weights, float eps, int bytes,
                           int threads) {
    auto run = bytes ? run_conv_blocks<ByteLinear> : run_conv_blocks<Linear>;
    run(x, work, shape, {weights}, eps, threads);
}
}
