// Steps from a decoded photo to a training image, in the arithmetic of Pillow's C code, so that every pixel is equal.
//
// A picture is rows of RGBX, 4 bytes a pixel, the last of no meaning; `stride` is the bytes from a row to the next.
// Compiled without contracted multiply-adds: blending rounds each product, as Pillow does.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <sys/mman.h>

namespace {

constexpr int BITS = 22;  // of a resampling weight after the point: 32 less 8 of a pixel and 2 for overshoot
constexpr int64_t X = 4;  // bytes a pixel
constexpr int64_t SMALL = 60;  // radius of a box whose sum fits into 15 bits

using Bytes = std::unique_ptr<uint8_t[]>;

Bytes room(int64_t bytes) { return Bytes(new uint8_t[bytes]); }  // not filled

// The weights of one axis: for each output its first input, how many follow, and their weights in fixed point.
struct Taps {
    int64_t most;
    std::vector<int64_t> first, count;
    std::vector<int32_t> weights;
    const int32_t* of(int64_t out) const { return &weights[out * most]; }
};

double triangle(double x) {
    x = std::fabs(x);
    return x < 1 ? 1 - x : 0;
}

double cubic(double x) {  // a = -1/2
    x = std::fabs(x);
    if (x < 1) return ((-0.5 + 2) * x - (-0.5 + 3)) * x * x + 1;
    if (x < 2) return (((x - 5) * x + 8) * x - 4) * -0.5;
    return 0;
}

// Antialiased: the filter is as wide as the step from one output to the next, at least one input.
Taps taps_of(int64_t inputs, int64_t outputs, bool is_cubic) {
    const double step = static_cast<double>(inputs) / outputs, width = std::max(step, 1.0);
    const double reach = (is_cubic ? 2.0 : 1.0) * width, inverse = 1.0 / width;
    Taps taps;
    taps.most = static_cast<int64_t>(std::ceil(reach)) * 2 + 1;
    taps.first.resize(outputs), taps.count.resize(outputs), taps.weights.assign(outputs * taps.most, 0);
    std::vector<double> exact(taps.most);
    for (int64_t out = 0; out < outputs; out++) {
        const double centre = (out + 0.5) * step;
        const int64_t first = std::max<int64_t>(0, static_cast<int64_t>(centre - reach + 0.5));
        const int64_t count = std::min<int64_t>(inputs, static_cast<int64_t>(centre + reach + 0.5)) - first;
        double total = 0;
        for (int64_t i = 0; i < count; i++) {
            const double x = (i + first - centre + 0.5) * inverse;
            total += exact[i] = is_cubic ? cubic(x) : triangle(x);
        }
        for (int64_t i = 0; i < count; i++) {
            const double weight = (total != 0 ? exact[i] / total : exact[i]) * (1 << BITS);
            taps.weights[out * taps.most + i] = static_cast<int32_t>(weight < 0 ? weight - 0.5 : weight + 0.5);
        }
        taps.first[out] = first, taps.count[out] = count;
    }
    return taps;
}

// Eight (four) sums, scaled back and clipped to bytes.
uint64_t bytes_of(__m256i sums) {
    const __m256i scaled = _mm256_srai_epi32(sums, BITS);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(scaled), _mm256_extracti128_si256(scaled, 1));
    return _mm_cvtsi128_si64(_mm_packus_epi16(words, words));
}

uint32_t pixel_of(__m128i sums) {
    const __m128i words = _mm_packs_epi32(_mm_srai_epi32(sums, BITS), _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
}

__m256i two_pixels(const uint8_t* in) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
}

__m128i one_pixel(const uint8_t* in) {
    int32_t pixel;
    std::memcpy(&pixel, in, X);
    return _mm_cvtepu8_epi32(_mm_cvtsi32_si128(pixel));
}

// The weights of rows, four taps at a time: each in two parts of 16 bits, weight = high * 2^14 + low, laid out as the
// products of 16 bits want them. No group reaches beyond the row: near its end they begin earlier, with zeros.
struct Groups {
    static constexpr int SPLIT = 14;
    int64_t count;
    std::vector<int64_t> first;
    std::vector<int16_t> low, high;  // (outputs, count, 16)
};

Groups groups_of(const Taps& taps, int64_t inputs, int64_t outputs) {
    Groups groups;
    groups.count = (*std::max_element(taps.count.begin(), taps.count.end()) + 3) / 4;
    groups.first.resize(outputs);
    groups.low.assign(outputs * groups.count * 16, 0), groups.high.assign(outputs * groups.count * 16, 0);
    for (int64_t out = 0; out < outputs; out++) {
        const int64_t first = groups.first[out] = std::min(taps.first[out], inputs - 4 * groups.count);
        for (int64_t i = 0; i < taps.count[out]; i++) {
            const int32_t weight = taps.of(out)[i], place = static_cast<int32_t>(i + taps.first[out] - first);
            for (int64_t channel = 0; channel < X; channel++) {
                const int64_t at = (out * groups.count + place / 4) * 16 + place % 4 / 2 * 8 + channel * 2 + place % 2;
                groups.low[at] = static_cast<int16_t>(weight & ((1 << Groups::SPLIT) - 1));
                groups.high[at] = static_cast<int16_t>(weight >> Groups::SPLIT);
            }
        }
    }
    return groups;
}

void resize_row(const uint8_t* in, uint8_t* out, int64_t outputs, const Groups& groups) {
    const __m256i order = _mm256_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1,  //
                                           8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1);
    const auto* low = reinterpret_cast<const __m256i*>(groups.low.data());
    const auto* high = reinterpret_cast<const __m256i*>(groups.high.data());
    for (int64_t x = 0; x < outputs; x++) {
        const auto* from = reinterpret_cast<const __m128i*>(in + groups.first[x] * X);
        __m256i lows = _mm256_setzero_si256(), highs = lows;
        for (int64_t i = 0; i < groups.count; i++) {
            const __m256i four = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(from++)), order);
            lows = _mm256_add_epi32(lows, _mm256_madd_epi16(four, _mm256_loadu_si256(low++)));
            highs = _mm256_add_epi32(highs, _mm256_madd_epi16(four, _mm256_loadu_si256(high++)));
        }
        const __m256i both = _mm256_add_epi32(lows, _mm256_slli_epi32(highs, Groups::SPLIT));
        const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        const uint32_t pixel = pixel_of(_mm_add_epi32(sum, _mm_set1_epi32(1 << (BITS - 1))));
        std::memcpy(out + x * X, &pixel, X);
    }
}

void resize_short_row(const uint8_t* in, uint8_t* out, int64_t outputs, const Taps& taps) {
    for (int64_t x = 0; x < outputs; x++) {
        __m128i sum = _mm_set1_epi32(1 << (BITS - 1));
        for (int64_t i = 0; i < taps.count[x]; i++)
            sum = _mm_add_epi32(
                sum, _mm_mullo_epi32(one_pixel(in + (taps.first[x] + i) * X), _mm_set1_epi32(taps.of(x)[i])));
        const uint32_t pixel = pixel_of(sum);
        std::memcpy(out + x * X, &pixel, X);
    }
}

void resize_columns(const uint8_t* in, int64_t stride, uint8_t* out, int64_t bytes, const int32_t* weights, int64_t n) {
    int64_t x = 0;
    for (; x + 32 <= bytes; x += 32) {  // four sums at a time hide the latency of a product
        __m256i sums[4];
        for (auto& sum : sums) sum = _mm256_set1_epi32(1 << (BITS - 1));
        for (int64_t i = 0; i < n; i++) {
            const __m256i weight = _mm256_set1_epi32(weights[i]);
            for (int64_t j = 0; j < 4; j++)
                sums[j] = _mm256_add_epi32(
                    sums[j], _mm256_mullo_epi32(two_pixels(in + i * stride + x + 8 * j), weight));
        }
        for (int64_t j = 0; j < 4; j++) {
            const uint64_t done = bytes_of(sums[j]);
            std::memcpy(out + x + 8 * j, &done, 8);
        }
    }
    for (; x < bytes; x += X) {
        __m128i sum = _mm_set1_epi32(1 << (BITS - 1));
        for (int64_t i = 0; i < n; i++)
            sum = _mm_add_epi32(sum, _mm_mullo_epi32(one_pixel(in + i * stride + x), _mm_set1_epi32(weights[i])));
        const uint32_t pixel = pixel_of(sum);
        std::memcpy(out + x, &pixel, X);
    }
}

// Rows RGBX, `stride` apart, to another width; below, to another height.
Bytes resize_width(const uint8_t* in, int64_t stride, int64_t width, int64_t height, int64_t out_width, bool is_cubic) {
    Bytes out = room(height * out_width * X);
    const Taps taps = taps_of(width, out_width, is_cubic);
    const bool is_short = (*std::max_element(taps.count.begin(), taps.count.end()) + 3) / 4 * 4 > width;
    const Groups groups = is_short ? Groups() : groups_of(taps, width, out_width);
    for (int64_t y = 0; y < height; y++) {
        uint8_t* row = &out[y * out_width * X];
        if (width == out_width)
            std::memcpy(row, in + y * stride, width * X);
        else if (is_short)
            resize_short_row(in + y * stride, row, out_width, taps);
        else
            resize_row(in + y * stride, row, out_width, groups);
    }
    return out;
}

void resize_height(const uint8_t* in, int64_t stride, int64_t width, int64_t height, uint8_t* out, int64_t out_height,
                   bool is_cubic) {
    const Taps taps = taps_of(height, out_height, is_cubic);
    for (int64_t y = 0; y < out_height; y++) {
        const uint8_t* from = in + (height == out_height ? y : taps.first[y]) * stride;
        if (height == out_height)
            std::memcpy(out + y * width * X, from, width * X);
        else
            resize_columns(from, stride, out + y * width * X, width * X, taps.of(y), taps.count[y]);
    }
}

// ITU-R 601 luma in 16 bits of fixed point.
inline uint32_t luma(uint32_t pixel) {
    const uint32_t red = pixel & 255, green = pixel >> 8 & 255, blue = pixel >> 16 & 255;
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
}

// from + share * (to - from) in single precision, cut to a byte.
inline uint32_t blend(int32_t from, int32_t to, float share) {
    const float mixed = static_cast<float>(from) + share * static_cast<float>(to - from);
    return static_cast<uint32_t>(static_cast<int32_t>(std::min(std::max(mixed, 0.0f), 255.0f)));
}

__m256i sixteen(const uint8_t* in) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}

// One pass of a box of 2 radius + 1 values and a share of one more on either side, `step` bytes apart; it reads that far
// beyond the `bytes`. (sum whole + ends part + 1/2) in 24 bits, the weights in two parts of 12 bits.
void box(const uint8_t* in, uint8_t* out, int64_t bytes, int64_t step, int64_t radius, uint32_t whole, uint32_t part) {
    const int64_t far = (radius + 1) * step;
    const __m256i low = _mm256_set1_epi32((part & 4095) << 16 | (whole & 4095));
    const __m256i high = _mm256_set1_epi32((part >> 12) << 16 | whole >> 12);
    const auto weighted = [&](__m256i pairs) {
        const __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(pairs, high), 12),
                                             _mm256_madd_epi16(pairs, low));
        return _mm256_srli_epi32(_mm256_add_epi32(sum, _mm256_set1_epi32(1 << 23)), 24);
    };
    int64_t i = 0;
    for (; i + 16 <= bytes && radius < SMALL; i += 16) {
        __m256i sum = sixteen(in + i);
        for (int64_t d = 1; d <= radius; d++)
            sum = _mm256_add_epi16(sum, _mm256_add_epi16(sixteen(in + i - d * step), sixteen(in + i + d * step)));
        const __m256i ends = _mm256_add_epi16(sixteen(in + i - far), sixteen(in + i + far));
        const __m256i words = _mm256_packus_epi32(weighted(_mm256_unpacklo_epi16(sum, ends)),
                                                  weighted(_mm256_unpackhi_epi16(sum, ends)));
        const __m128i done = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), done);
    }
    for (; i < bytes; i++) {
        uint32_t sum = in[i];
        for (int64_t d = 1; d <= radius; d++) sum += uint32_t(in[i - d * step]) + in[i + d * step];
        const uint32_t ends = uint32_t(in[i - far]) + in[i + far];
        out[i] = static_cast<uint8_t>((sum * whole + ends * part + (1u << 23)) >> 24);
    }
}

}  // namespace

extern "C" {

// An area of `in`, which has 3 or 4 channels, to a whole picture; the passes in either order, which rounds differently.
void patchloom_resize(const uint8_t* in, int64_t stride, int64_t channels, int64_t width, int64_t height, uint8_t* out,
                      int64_t out_width, int64_t out_height, int64_t is_cubic, int64_t height_first) {
    Bytes wider;
    if (channels == 3) {
        wider = room(height * width * X);
        for (int64_t y = 0; y < height; y++)
            for (int64_t x = 0; x < width; x++) std::memcpy(&wider[(y * width + x) * X], in + y * stride + x * 3, 3);
        in = wider.get(), stride = width * X;
    }
    if (height_first) {
        const Bytes middle = room(out_height * width * X);
        resize_height(in, stride, width, height, middle.get(), out_height, is_cubic);
        const Bytes done = resize_width(middle.get(), width * X, width, out_height, out_width, is_cubic);
        std::memcpy(out, done.get(), out_height * out_width * X);
    } else {
        const Bytes middle = resize_width(in, stride, width, height, out_width, is_cubic);
        resize_height(middle.get(), out_width * X, out_width, height, out, out_height, is_cubic);
    }
}

void patchloom_mirror(uint32_t* pixels, int64_t width, int64_t height) {
    for (int64_t y = 0; y < height; y++) std::reverse(pixels + y * width, pixels + (y + 1) * width);
}

// The picture of these rows and columns of another.
void patchloom_take(const uint32_t* in, int64_t in_width, uint32_t* out, const int64_t* rows, int64_t height,
                    const int64_t* columns, int64_t width) {
    for (int64_t y = 0; y < height; y++)
        for (int64_t x = 0; x < width; x++) out[y * width + x] = in[rows[y] * in_width + columns[x]];
}

void patchloom_grey(uint32_t* pixels, int64_t count) {
    for (int64_t i = 0; i < count; i++) pixels[i] = luma(pixels[i]) * 0x010101u;
}

void patchloom_solarise(uint8_t* values, int64_t count) {
    for (int64_t i = 0; i < count; i++) values[i] = values[i] < 128 ? values[i] : 255 - values[i];
}

// Brightness (kind 0), contrast (1) or saturation (2): a blend with black, the mean grey, or the grey picture.
void patchloom_enhance(uint32_t* pixels, int64_t count, int64_t kind, float factor) {
    int32_t mean = 0;
    if (kind == 1) {
        uint64_t total = 0;
        for (int64_t i = 0; i < count; i++) total += luma(pixels[i]);
        mean = static_cast<int32_t>(static_cast<double>(total) / count + 0.5);
    }
    for (int64_t i = 0; i < count; i++) {
        const uint32_t pixel = pixels[i];
        const int32_t from = kind == 2 ? luma(pixel) : mean;
        pixels[i] = blend(from, pixel & 255, factor) | blend(from, pixel >> 8 & 255, factor) << 8 |
                    blend(from, pixel >> 16 & 255, factor) << 16;
    }
}

// Three box blurs of this radius along the rows, then three along the columns; in place.
void patchloom_blur(uint8_t* pixels, int64_t width, int64_t height, float radius) {
    const int64_t inner = static_cast<int64_t>(radius), far = inner + 1, row = width * X;
    const uint32_t whole = static_cast<uint32_t>((1 << 24) / (radius * 2 + 1));
    const uint32_t part = ((1u << 24) - static_cast<uint32_t>(inner * 2 + 1) * whole) / 2;
    const Bytes padded = room((height + 2 * far) * row), line = room((width + 2 * far) * X);
    for (int64_t y = 0; y < height; y++) {
        for (int pass = 0; pass < 3; pass++) {
            std::memcpy(&line[far * X], pixels + y * row, row);
            for (int64_t i = 0; i < far; i++) {
                std::memcpy(&line[i * X], pixels + y * row, X);
                std::memcpy(&line[(far + width + i) * X], pixels + y * row + row - X, X);
            }
            box(&line[far * X], pixels + y * row, row, X, inner, whole, part);
        }
    }
    for (int pass = 0; pass < 3; pass++) {
        std::memcpy(&padded[far * row], pixels, height * row);
        for (int64_t i = 0; i < far; i++) {
            std::memcpy(&padded[i * row], pixels, row);
            std::memcpy(&padded[(far + height + i) * row], pixels + (height - 1) * row, row);
        }
        box(&padded[far * row], pixels, height * row, row, inner, whole, part);
    }
}

// (count) RGBX -> (count) RGB.
void patchloom_pack(const uint8_t* in, uint8_t* out, int64_t count) {
    const __m128i order = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    int64_t i = 0;
    for (; i + 6 <= count; i += 4) {  // 16 bytes are written for 12: the last pixels are left to the loop below
        const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i * X));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * 3), _mm_shuffle_epi8(four, order));
    }
    for (; i < count; i++) std::memcpy(out + i * 3, in + i * X, 3);
}

// (count) RGB -> (count) of floats, each colour with its mean taken off and divided by its scale.
void patchloom_normalise(const uint8_t* in, float* out, int64_t count, const float* mean, const float* scale) {
    constexpr int64_t PERIOD = 24;  // colours of 8 pixels
    constexpr uintptr_t LARGE = 1 << 21;
    float means[PERIOD], scales[PERIOD];
    for (int64_t i = 0; i < PERIOD; i++) means[i] = mean[i % 3], scales[i] = scale[i % 3];
    const auto begin = (reinterpret_cast<uintptr_t>(out) + LARGE - 1) & ~(LARGE - 1);
    const auto end = reinterpret_cast<uintptr_t>(out + count * 3) & ~(LARGE - 1);
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // fresh memory costs more
    int64_t i = 0;
    for (; i + PERIOD <= count * 3; i += PERIOD)
        for (int64_t j = 0; j < PERIOD; j++) out[i + j] = (static_cast<float>(in[i + j]) - means[j]) / scales[j];
    for (int64_t j = 0; i < count * 3; i++, j++) out[i] = (static_cast<float>(in[i]) - means[j]) / scales[j];
}

}  // extern "C"
