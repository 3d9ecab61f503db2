// Linear layers with weights in bfloat16 or float16, for x86 with AVX2 or AVX-512 that has no instructions for products
// of these types.
//
// The weights stay as they are, [outputs, inputs]. A piece of work is PANEL outputs of all rows: RUN inputs at a time, its
// weights are turned and made float32, in memory that stays in the cache, and multiplied with the rows. So weights are
// read once however many rows there are, and turning them is paid once for all rows. For few rows it is not worth it: they
// are multiplied with the weights as these lie. How a number is summed depends on whether there are more than FEW rows,
// and on nothing else: not on what the other rows are, nor on the number of threads.

#include <omp.h>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int64_t PANEL = 4 * LANES;
constexpr int64_t RUN = 256;
constexpr int64_t ROWS = LANES == 16 ? 12 : 6;  // of a tile that is two vectors wide
constexpr int64_t WIDE = LANES == 16 ? 6 : 3;   // of one that is a panel wide
constexpr int64_t AHEAD = 4096;                 // bytes, of weights that are asked for early
constexpr int64_t FEW = 8;                      // rows for which weights are not turned

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

// Eight outputs by eight inputs: 16-bit numbers, turned.
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

// b[k, PANEL] of `outputs` rows of weights; what is beyond them stays as it is, and is never used.
template <class T>
inline void turn_weights(const T *weights, int64_t stride, int64_t outputs, int64_t k, float *b) {
    for (int64_t n = 0; n < outputs; n += 8) {
        const T *const from = weights + n * stride;
        int64_t i = 0;
        if (n + 8 <= outputs)
            for (; i + 8 <= k; i += 8) {
                __m128i turned[8];
                turn((const uint16_t *)(from + i), stride, turned);
                for (int64_t j = 0; j < 8; j++)
                    _mm256_storeu_ps(b + (i + j) * PANEL + n, widened(turned[j], (const T *)nullptr));
            }
        const int64_t end = n + 8 <= outputs ? n + 8 : outputs;
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

template <class T>
inline void widen(const T *from, int64_t n, float *to) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = load1(from + i);
}

template <class T>
inline void finish(const float *sums, const T *bias, int64_t n, T *out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, bias ? load(sums + i) + load(bias + i) : load(sums + i));
    if (i < n) {
        float last[LANES] = {};
        T rounded[LANES];
        for (int64_t j = 0; i + j < n; j++) last[j] = sums[i + j] + (bias ? load1(bias + i + j) : 0.0f);
        store(rounded, load(last));
        std::memcpy(out + i, rounded, (n - i) * sizeof(T));
    }
}

// out[rows, outputs] = x[rows, inputs] weights[outputs, inputs] transposed, plus bias[outputs], which may be null.
// `scratch` holds the rows as floats, and for each thread RUN * PANEL weights and rows * PANEL sums.
template <class T>
void linear(const T *x, const T *weights, const T *bias, T *out, int64_t rows, int64_t inputs, int64_t outputs,
            float *scratch, int64_t num_threads) {
    float *const works = scratch + rows * inputs;
#pragma omp parallel num_threads((int)num_threads)
    {
        float *const b = works + omp_get_thread_num() * (RUN + rows) * PANEL, *const c = b + RUN * PANEL;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) widen(x + row * inputs, inputs, scratch + row * inputs);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t n = 0; n < outputs; n += PANEL) {
            const int64_t width = n + PANEL <= outputs ? PANEL : outputs - n;
            if (rows <= FEW) {
                all_dots<WIDE>(rows, scratch, weights + n * inputs, width, inputs, c);
            } else {
                std::memset(c, 0, rows * PANEL * sizeof(float));
                for (int64_t i = 0; i < inputs; i += RUN) {
                    const int64_t k = i + RUN <= inputs ? RUN : inputs - i;
                    turn_weights(weights + n * inputs + i, inputs, width, k, b);
                    tiles<ROWS>(rows, scratch + i, inputs, b, k, c);
                }
            }
            for (int64_t row = 0; row < rows; row++)
                finish(c + row * PANEL, bias ? bias + n : nullptr, width, out + row * outputs + n);
        }
    }
}

}  // namespace

extern "C" {

// How many floats of scratch memory a call needs.
int64_t batchkit_linear_floats(int64_t rows, int64_t inputs, int64_t num_threads) {
    return rows * inputs + num_threads * (RUN + rows) * PANEL;
}

void batchkit_linear_bfloat16(const bfloat16 *x, const bfloat16 *weights, const bfloat16 *bias, bfloat16 *out,
                              int64_t rows, int64_t inputs, int64_t outputs, float *scratch, int64_t num_threads) {
    linear(x, weights, bias, out, rows, inputs, outputs, scratch, num_threads);
}
void batchkit_linear_float16(const float16 *x, const float16 *weights, const float16 *bias, float16 *out, int64_t rows,
                             int64_t inputs, int64_t outputs, float *scratch, int64_t num_threads) {
    linear(x, weights, bias, out, rows, inputs, outputs, scratch, num_threads);
}

}  // extern "C"
