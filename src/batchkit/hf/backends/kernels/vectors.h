// Vectors of float32 for x86 with AVX2 or AVX-512, and their loads and stores from float32, bfloat16 and float16.
//
// They are GCC's and Clang's own. What differs between AVX2 and AVX-512 is how many lanes there are, and the conversions of
// float16. Everything is in an unnamed namespace: each library has its own.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace {

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class To, class From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline Vec splat(float x) { return x - Vec{}; }

// ---- Loads and stores of each type, by LANES, by four and one by one.

inline Vec load(const float *from) {
    Vec x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}
inline Vec load(const bfloat16 *from) {
    Halves x;
    std::memcpy(&x, from, sizeof(x));
    return as<Vec>(__builtin_convertvector(x, Bits) << 16);
}
inline Vec load(const float16 *from) {
#if LANES == 16
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#endif
}

inline __m128 load4(const float *from) { return _mm_loadu_ps(from); }
inline __m128 load4(const bfloat16 *from) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)from)), 16));
}
inline __m128 load4(const float16 *from) { return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)from)); }

inline float load1(const float *from) { return *from; }
inline float load1(const bfloat16 *from) { return as<float>((uint32_t)from->bits << 16); }
inline float load1(const float16 *from) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(from->bits))); }

inline void store(float *to, Vec x) { std::memcpy(to, &x, sizeof(x)); }
inline void store(bfloat16 *to, Vec x) {
    const Bits bits = as<Bits>(x);
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
    const Bits is_nan = (Bits)(x != x);
    rounded = (rounded & ~is_nan) | (0x7fc0 & is_nan);
    const Halves halves = __builtin_convertvector(rounded, Halves);
    std::memcpy(to, &halves, sizeof(halves));
}
inline void store(float16 *to, Vec x) {
#if LANES == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#endif
}

// ---- Vectors: across the lanes, and exp.

inline __m256 lower(Vec x) {
#if LANES == 16
    return _mm512_castps512_ps256((__m512)x);
#else
    return (__m256)x;
#endif
}
#if LANES == 16
inline __m256 upper(Vec x) { return _mm512_extractf32x8_ps((__m512)x, 1); }
#endif

inline __m128 sum4(Vec x) {  // four sums of a quarter of the lanes, or half of them
    __m256 eight = lower(x);
#if LANES == 16
    eight = _mm256_add_ps(eight, upper(x));
#endif
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
inline float sum(Vec x) {
    __m128 four = sum4(x);
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float highest(Vec x) {
    __m256 eight = lower(x);
#if LANES == 16
    eight = _mm256_max_ps(eight, upper(x));
#endif
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// exp(x) for x <= 0, to about one unit in the last place; 0 where it would be subnormal. NaN stays NaN.
inline Vec exp(Vec x) {
    const float magic = 0x1.8p23f;  // adding it rounds to an integer, which then stands in the lowest bits
    const Vec shifted = x * 1.44269504f + magic;
    const Vec n = shifted - magic;
    const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;  // less n times ln 2, in two parts
    Vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const Ints power = as<Ints>(y) + (as<Ints>(shifted) << 23);
    return as<Vec>(power & ~(Ints)(x < -87.33654f));
}
inline float exp(float x) { return exp(splat(x))[0]; }

inline Vec tanh(Vec x) {
    const Ints sign = as<Ints>(x) & INT32_MIN;
    const Vec e = exp(as<Vec>(as<Ints>(x) | INT32_MIN) * 2.0f);
    return as<Vec>(as<Ints>((1.0f - e) / (1.0f + e)) | sign);
}

// ---- Matrix products.

// c[R, C vectors] = a[R, k] b[k, C vectors], or that much more.
template <int64_t R, int64_t C, class T>
inline void tile(const float *a, int64_t lda, const T *b, int64_t ldb, int64_t k, float *c, int64_t ldc, bool adds) {
    Vec acc[R][C];
    for (int64_t r = 0; r < R; r++)
        for (int64_t j = 0; j < C; j++) acc[r][j] = adds ? load(c + r * ldc + j * LANES) : Vec{};
    for (int64_t i = 0; i < k; i++) {
        Vec row[C];
        for (int64_t j = 0; j < C; j++) row[j] = load(b + i * ldb + j * LANES);
        for (int64_t r = 0; r < R; r++)
            for (int64_t j = 0; j < C; j++) acc[r][j] += a[r * lda + i] * row[j];
    }
    for (int64_t r = 0; r < R; r++)
        for (int64_t j = 0; j < C; j++) store(c + r * ldc + j * LANES, acc[r][j]);
}

}  // namespace
