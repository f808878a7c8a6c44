// Vectors of floats as wide as the registers of the processor, and the functions on them that networks need.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#if defined(__AVX512F__) || defined(PATCHLOOM_WIDE)  // the latter for tests on a machine without AVX-512
constexpr int LANES = 16, ROWS = 8;
#else
constexpr int LANES = 8, ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef int16_t ShortVec __attribute__((vector_size(LANES * 4)));
typedef int8_t ByteVec __attribute__((vector_size(LANES * 4)));
typedef float LooseVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

namespace {

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }
inline Vec fill(float x) { return x - Vec{}; }
inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
inline int64_t round_up(int64_t n, int64_t step) { return divide_up(n, step) * step; }

// larger, smaller: maximum and minimum of the processor, which return b if either is NaN. inverse: 1 / x with an error of one
// or two units in the last place. multiply_bytes: sums of two adjacent products of unsigned bytes of a and signed bytes of b.
// add_pairs: sums of two adjacent numbers.
#ifdef __AVX512BW__
inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline Vec smaller(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
inline Vec inverse(Vec x) {
    Vec near = (Vec)_mm512_rcp14_ps((__m512)x);
    return near * (2.0f - x * near);
}
inline float sum_lanes(Vec x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest_lane(Vec x) { return _mm512_reduce_max_ps((__m512)x); }
inline ShortVec multiply_bytes(ByteVec a, ByteVec b) { return (ShortVec)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
inline IntVec add_pairs(ShortVec x) { return (IntVec)_mm512_madd_epi16((__m512i)x, _mm512_set1_epi16(1)); }
#else
// Apply a function of AVX2 registers to each register of a vector
template <class To, class Register, class From, class Function>
inline To by_registers(From a, From b, Function function) {
    Register left[LANES / 8], right[LANES / 8];
    std::memcpy(left, &a, sizeof a), std::memcpy(right, &b, sizeof b);
    for (int i = 0; i < LANES / 8; i++) left[i] = function(left[i], right[i]);
    To out;
    std::memcpy(&out, left, sizeof out);
    return out;
}

inline Vec larger(Vec a, Vec b) {
    return by_registers<Vec, __m256>(a, b, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
}
inline Vec smaller(Vec a, Vec b) {
    return by_registers<Vec, __m256>(a, b, [](__m256 x, __m256 y) { return _mm256_min_ps(x, y); });
}
inline Vec inverse(Vec x) { return 1.0f / x; }

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

inline ShortVec multiply_bytes(ByteVec a, ByteVec b) {
    return by_registers<ShortVec, __m256i>(a, b, [](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); });
}
inline IntVec add_pairs(ShortVec x) {
    return by_registers<IntVec, __m256i>(x, ShortVec{} + 1, [](__m256i a, __m256i b) { return _mm256_madd_epi16(a, b); });
}
#endif

// total + sums of four adjacent products of bytes, of a and b and of c and d
#ifdef __AVX512VNNI__
constexpr bool SUMS_OVERFLOW = false;
inline IntVec add_products(IntVec total, ByteVec a, ByteVec b, ByteVec c, ByteVec d) {
    return (IntVec)_mm512_dpbusd_epi32(_mm512_dpbusd_epi32((__m512i)total, (__m512i)a, (__m512i)b), (__m512i)c, (__m512i)d);
}
#else
constexpr bool SUMS_OVERFLOW = true;  // sums of four products can exceed 16 bits
inline IntVec add_products(IntVec total, ByteVec a, ByteVec b, ByteVec c, ByteVec d) {
    return total + add_pairs(multiply_bytes(a, b) + multiply_bytes(c, d));
}
#endif

// exp(x) for x <= 0 with an error of two units in the last place: 2^n * e^r with |r| <= ln(2) / 2
inline Vec exp_negative(Vec x) {
    x = larger(fill(-87.0f), x);  // e^-87 is about the smallest normal float; NaN in x is kept, as the second operand
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

// exp(x) for x <= 0 with a relative error of 2e-4, for values that are rounded to bytes: 2^n 2^f with |f| <= 1/2
inline Vec rough_exp_negative(Vec x) {
    const float rounder = 12582912.0f;
    Vec power = larger(fill(-125.0f), x * 1.44269504f), shifted = power + rounder;
    Vec f = power - (shifted - rounder);
    Vec p = ((f * 0.0558263f + 0.2401397f) * f + 0.6931426f) * f + 1.0f;
    return (Vec)(((IntVec)shifted << 23) + (IntVec)p);
}

// The exact GELU, to float rounding: x (1/2 + z P(z^2) / Q(z^2)) with z = x up to 5.4, where that is x or next to nothing
inline __attribute__((always_inline)) Vec gelu(Vec x) {
    x = larger(fill(-5.4f), x);  // NaN in x is kept, as the second operand
    Vec z = smaller(x, fill(5.4f));
    Vec s = z * z;
    Vec p = fill(1.16099894e-10f);
    p = p * s - 2.22559589e-08f;
    p = p * s + 3.13316377e-06f;
    p = p * s + 1.58941708e-04f;
    p = p * s + 4.43494180e-03f;
    p = p * s + 3.47836837e-02f;
    p = p * s + 3.98942173e-01f;
    Vec q = fill(5.86700007e-05f);
    q = q * s + 1.76350574e-03f;
    q = q * s + 2.84291711e-02f;
    q = q * s + 2.53854722e-01f;
    q = q * s + 1.0f;
    return x * (z * p * inverse(q) + 0.5f);
}

// GELU with an error of 5e-4, for values that are rounded to bytes: x (1/2 + z P(z^2)) with z = x up to 3.7, where that is x or 0
inline Vec rough_gelu(Vec x) {
    Vec z = smaller(larger(x, fill(-3.7f)), fill(3.7f));
    Vec s = z * z;
    Vec p = fill(-4.89974400e-07f);
    p = p * s + 2.68888290e-05f;
    p = p * s - 6.17503463e-04f;
    p = p * s + 7.84871448e-03f;
    p = p * s - 6.25877882e-02f;
    p = p * s + 3.96475169e-01f;
    return x * (z * p + 0.5f);
}

inline Vec sigmoid(Vec x) {
    Vec e = exp_negative(x < 0 ? x : -x);
    return (x < 0 ? e : fill(1.0f)) / (1.0f + e);
}

}  // namespace
