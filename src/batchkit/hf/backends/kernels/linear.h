// Products of rows with the weights of a linear layer, in float32, bfloat16 and float16, for x86 with AVX2 or AVX-512.
//
// Weights are [outputs, inputs] as torch has them, or packed (`packed.h`). A panel of packed weights goes through the cache
// once for a few dozen rows. Threads take pieces of work guided, many at first: with few rows it is the memory that is
// waited for, and it is read in long runs. Each number is the sum of its products in one order, whatever rows there are
// besides. Weights that are not packed are turned into float32 panels in memory that stays in the cache, RUN inputs at a
// time; for few rows this is not worth it, and they are multiplied with the weights as these lie. There the order of a sum
// depends on whether there are more than FEW rows.
//
// Rows are float32, or narrow (`narrow.h`).

#pragma once

#include "narrow.h"

namespace {

constexpr int64_t AHEAD = 4096;                 // bytes, of weights that are asked for early
constexpr int64_t FEW = 8;                      // rows for which weights are not turned
constexpr int64_t TOGETHER = 240;               // rows that go through a layer together, whole tiles of them
constexpr int64_t PART = 48;                    // rows of a piece of work with packed weights

// ---- Weights as they are.

// c[rows, PANEL] += a[rows, k] b[k, PANEL], R rows at a time, then fewer.
template <int64_t R>
inline void tiles(int64_t rows, const float *a, int64_t lda, const float *b, int64_t k, float *c) {
    if constexpr (R > 0) {
        for (; rows >= R; rows -= R, a += R * lda, c += R * PANEL)
            if constexpr (R <= WIDE) {
                tile<R, 4>(a, lda, b, PANEL, k, c, PANEL, true);
            } else {
                tile<R, 2>(a, lda, b, PANEL, k, c, PANEL, true);
                tile<R, 2>(a, lda, b + 2 * LANES, PANEL, k, c + 2 * LANES, PANEL, true);
            }
        tiles<R - 1>(rows, a, lda, b, k, c);
    }
}

// Eight outputs by eight inputs, turned: to[i] has input i of all of them.
inline void turn(const uint16_t *from, int64_t stride, __m128i to[8]) {
    __m128i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm_loadu_si128((const __m128i *)(from + i * stride));
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        a[4 * i] = _mm_unpacklo_epi32(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm_unpackhi_epi32(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm_unpacklo_epi32(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm_unpackhi_epi32(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        to[2 * i] = _mm_unpacklo_epi64(a[i], a[i + 4]);
        to[2 * i + 1] = _mm_unpackhi_epi64(a[i], a[i + 4]);
    }
}

inline __m256 widened(__m128i x, const bfloat16 *) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline __m256 widened(__m128i x, const float16 *) { return _mm256_cvtph_ps(x); }

template <class T>
inline void turn_wide(const T *from, int64_t stride, __m256 to[8]) {
    __m128i turned[8];
    turn((const uint16_t *)from, stride, turned);
    for (int i = 0; i < 8; i++) to[i] = widened(turned[i], from);
}
inline void turn_wide(const float *from, int64_t stride, __m256 to[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 4; i++) {  // four inputs of an output and of the fourth after it, side by side
        a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + i * stride)),
                                    _mm_loadu_ps(from + (i + 4) * stride), 1);
        a[4 + i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + i * stride + 4)),
                                        _mm_loadu_ps(from + (i + 4) * stride + 4), 1);
    }
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        to[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        to[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        to[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        to[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
}

// b[k, PANEL] of `outputs` rows of weights; what is beyond them stays as it is, and is never used.
template <class T>
inline void turn_weights(const T *weights, int64_t stride, int64_t outputs, int64_t k, float *b) {
    for (int64_t n = 0; n < outputs; n += 8) {
        const T *const from = weights + n * stride;
        int64_t i = 0;
        if (n + 8 <= outputs)
            for (; i + 8 <= k; i += 8) {
                __m256 turned[8];
                turn_wide(from + i, stride, turned);
                for (int64_t j = 0; j < 8; j++) _mm256_storeu_ps(b + (i + j) * PANEL + n, turned[j]);
            }
        const int64_t end = least(n + 8, outputs);
        for (; i < k; i++)
            for (int64_t j = n; j < end; j++) b[i * PANEL + j] = load1(weights + j * stride + i);
    }
}

// GCC may take away a function that does nothing else, hence the assembly.
inline void prefetch(const void *at) { asm volatile("prefetcht0 %0" : : "m"(*(const char *)at)); }

// c[R, outputs] = x[R, k] weights[outputs, k] transposed, a row of c every PANEL.
template <int64_t R, class T>
inline void dots(const float *x, const T *weights, int64_t outputs, int64_t k, float *c) {
    constexpr int64_t AT_ONCE = 4;
    int64_t n = 0;
    const auto some = [&](auto N) {
        Vec acc[N][R] = {};
        int64_t i = 0;
        for (; i + LANES <= k; i += LANES)
            for (int64_t j = 0; j < N; j++) {
                const T *const at = weights + (n + j) * k + i;
                prefetch(at + AHEAD / (int64_t)sizeof(T));
                const Vec w = load(at);
                for (int64_t r = 0; r < R; r++) acc[j][r] += w * load(x + r * k + i);
            }
        for (int64_t j = 0; j < N; j++)
            for (int64_t r = 0; r < R; r++) {
                float total = sum(acc[j][r]);
                for (int64_t rest = i; rest < k; rest++) total += load1(weights + (n + j) * k + rest) * x[r * k + rest];
                c[r * PANEL + n + j] = total;
            }
        n += N;
    };
    while (n + AT_ONCE <= outputs) some(std::integral_constant<int64_t, AT_ONCE>());
    while (n < outputs) some(std::integral_constant<int64_t, 1>());
}

// The same for any number of rows, a few at a time.
template <int64_t R, class T>
inline void all_dots(int64_t rows, const float *x, const T *weights, int64_t outputs, int64_t k, float *c) {
    if constexpr (R > 0) {
        for (; rows >= R; rows -= R, x += R * k, c += R * PANEL) dots<R>(x, weights, outputs, k, c);
        all_dots<R - 1>(rows, x, weights, outputs, k, c);
    }
}

// ---- Both.

// Rows of a piece of work, of `rows` that go together. Turning weights is paid once for each piece.
template <class T>
inline int64_t piece_rows(const Matrix<T> &matrix, int64_t rows) {
    return matrix.is_packed ? least(rows, PART) : rows;
}

// How many floats of scratch memory a thread needs for `multiply` and its result.
inline int64_t multiply_floats() { return (RUN + TOGETHER) * PANEL; }

// c[rows, PANEL] = x[rows, inputs] times a panel of the matrix, without its bias. `total` rows go together, these among
// them; they are narrow, or are not. c is in `work`; what is beyond the panel's width means nothing.
template <class T>
inline float *multiply(const Matrix<T> &matrix, int64_t panel, const float *x, bool is_narrow, int64_t rows,
                       int64_t total, float *work) {
    float *const b = work, *const c = work + RUN * PANEL;
    const int64_t inputs = matrix.inputs;
    const T *const weights = matrix.weights + panel * PANEL * inputs;
    if (is_narrow) {
        if constexpr (IN_PAIRS<T>) narrow_tiles(rows, x, weights, inputs, c);
    } else if (matrix.is_packed) {
        packed_tiles<ROWS>(rows, x, inputs, weights, inputs, c);
    } else if (total <= FEW) {
        all_dots<WIDE>(rows, x, weights, matrix.width(panel), inputs, c);
    } else {
        std::memset(c, 0, rows * PANEL * sizeof(float));
        for (int64_t i = 0; i < inputs; i += RUN) {
            const int64_t k = least(RUN, inputs - i);
            turn_weights(weights + i, inputs, matrix.width(panel), k, b);
            tiles<ROWS>(rows, x + i, inputs, b, k, c);
        }
    }
    return c;
}

template <class T>
inline void widen(const T *from, int64_t n, float *to) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = load1(from + i);
}

// out[n] = sums + bias, which may be null.
template <class T, class Out>
inline void finish(const float *sums, const T *bias, int64_t n, Out *out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, bias ? load(sums + i) + load(bias + i) : load(sums + i));
    for (; i < n; i++) store1(out + i, bias ? sums[i] + load1(bias + i) : sums[i]);
}

}  // namespace
