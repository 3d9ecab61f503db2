// Products of rows with the weights of a linear layer, in float32, bfloat16 and float16, for x86 with AVX2 or AVX-512.
//
// Weights are [outputs, inputs] as torch has them, or packed. Packed, PANEL outputs lie together, an input after another:
// [panels, inputs, PANEL], with zeros for the outputs that the last panel lacks. In bfloat16 the numbers of two vectors
// take turns, so that one load gives both, by a shift and a mask. Where the processor multiplies bfloat16 itself, two
// inputs of an output are side by side instead, [panels, inputs / 2, PANEL, 2], as its instructions want them; a last
// input that has no other is as in float16.
//
// A panel of packed weights goes through the cache once for a few dozen rows. Threads take pieces of work guided, many at
// first: with few rows it is the memory that is waited for, and it is read in long runs. Each number is the sum of its
// products in their order, whatever rows there are besides. Weights that are not packed are turned into float32 panels in
// memory that stays in the cache, RUN inputs at a time; for few rows this is not worth it, and they are multiplied with
// the weights as these lie. There the order of a sum depends on whether there are more than FEW rows.
//
// Rows are float32. For weights that are side by side they are narrow: bfloat16, in the first half of a row's memory.

#pragma once

#include <algorithm>
#include <type_traits>

#include "layers.h"

namespace {

constexpr int64_t PANEL = 4 * LANES;
constexpr int64_t RUN = 256;
constexpr int64_t ROWS = LANES == 16 ? 12 : 6;  // of a tile that is two vectors wide
constexpr int64_t WIDE = LANES == 16 ? 6 : 3;   // of one that is a panel wide
constexpr int64_t AHEAD = 4096;                 // bytes, of weights that are asked for early
constexpr int64_t FEW = 8;                      // rows for which weights are not turned
constexpr int64_t TOGETHER = 240;               // rows that go through a layer together, whole tiles of them
constexpr int64_t PART = 48;                    // rows of a piece of work with packed weights

// What `Matrix` of layer_kernels.py is.
template <class T>
struct Matrix {
    const T *weights;
    const T *bias;  // [outputs], or null
    int64_t outputs, inputs;
    int64_t is_packed;

    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t width(int64_t panel) const { return least(PANEL, outputs - panel * PANEL); }
};

// ---- Packed weights.

#ifdef __AVX512BF16__
template <class T>
constexpr bool IN_PAIRS = std::is_same<T, bfloat16>::value;
#else
template <class T>
constexpr bool IN_PAIRS = false;
#endif

// Where the number for an output and an input of a panel is, of so many inputs.
template <class T>
inline int64_t place(int64_t n, int64_t input, int64_t inputs) {
    if (IN_PAIRS<T> && (input | 1) < inputs) return (input & ~1) * PANEL + 2 * n + (input & 1);
    if (IN_PAIRS<T> || !std::is_same<T, bfloat16>::value) return input * PANEL + n;
    const int64_t in_pair = n % (2 * LANES);
    return input * PANEL + n - in_pair + in_pair % LANES * 2 + in_pair / LANES;
}

// Of pairs, the first numbers and the second ones.
inline void load_pair(const bfloat16 *from, Vec &first, Vec &second) {
    Bits both;
    std::memcpy(&both, from, sizeof(both));
    first = as<Vec>(both << 16);
    second = as<Vec>(both & 0xffff0000u);
}

// Two vectors of outputs, for one input.
template <class T>
inline void load_two(const T *from, Vec &first, Vec &second) {
    if constexpr (std::is_same<T, bfloat16>::value && !IN_PAIRS<T>) {
        load_pair(from, first, second);
    } else {
        first = load(from);
        second = load(from + LANES);
    }
}

// Packs the rows of a panel, `width` of them, by way of `copy`, of the panel's size: from and to may be one place.
template <class T>
inline void pack_panel(const T *from, T *to, int64_t width, int64_t inputs, T *copy) {
    std::memcpy(copy, from, width * inputs * sizeof(T));
    for (int64_t begin = 0; begin < inputs; begin += 8) {  // a cache line or two of each row at a time
        const int64_t end = least(begin + 8, inputs);
        for (int64_t n = 0; n < PANEL; n++)
            for (int64_t i = begin; i < end; i++)
                to[place<T>(n, i, inputs)] = n < width ? copy[n * inputs + i] : T{};
    }
}

// out[inputs] = what was packed of one output.
template <class T>
inline void unpack_row(const T *packed, int64_t output, int64_t inputs, T *out) {
    const T *const panel = packed + output / PANEL * PANEL * inputs;
    for (int64_t i = 0; i < inputs; i++) out[i] = panel[place<T>(output % PANEL, i, inputs)];
}

// c[R, C vectors] = a[R, k] times packed[k, C vectors], from vector FIRST of the panel on; rows of c are a panel wide.
template <int64_t R, int64_t C, int64_t FIRST, class T>
inline void packed_tile(const float *a, int64_t lda, const T *packed, int64_t k, float *c) {
    Vec acc[R][C];
    for (int64_t r = 0; r < R; r++)
        for (int64_t j = 0; j < C; j++) acc[r][j] = Vec{};
    int64_t i = 0;
    if constexpr (IN_PAIRS<T>)
        for (; i + 2 <= k; i += 2)
            for (int64_t j = 0; j < C; j++) {
                Vec first, second;
                load_pair(packed + i * PANEL + 2 * (FIRST + j) * LANES, first, second);
                for (int64_t r = 0; r < R; r++) acc[r][j] += a[r * lda + i] * first;
                for (int64_t r = 0; r < R; r++) acc[r][j] += a[r * lda + i + 1] * second;
            }
    for (; i < k; i++) {
        Vec row[C];
        for (int64_t j = 0; j < C; j += 2)
            load_two(packed + i * PANEL + (FIRST + j) * LANES, row[j], row[j + 1]);
        for (int64_t r = 0; r < R; r++)
            for (int64_t j = 0; j < C; j++) acc[r][j] += a[r * lda + i] * row[j];
    }
    for (int64_t r = 0; r < R; r++)
        for (int64_t j = 0; j < C; j++) store(c + r * PANEL + (FIRST + j) * LANES, acc[r][j]);
}

// The same for any number of rows: R at a time, then fewer.
template <int64_t R, class T>
inline void packed_tiles(int64_t rows, const float *a, int64_t lda, const T *packed, int64_t k, float *c) {
    if constexpr (R > 0) {
        for (; rows >= R; rows -= R, a += R * lda, c += R * PANEL)
            if constexpr (R <= WIDE) {
                packed_tile<R, 4, 0>(a, lda, packed, k, c);
            } else {
                packed_tile<R, 2, 0>(a, lda, packed, k, c);
                packed_tile<R, 2, 2>(a, lda, packed, k, c);
            }
        packed_tiles<R - 1>(rows, a, lda, packed, k, c);
    }
}

// ---- Packed weights and narrow rows, by instructions for bfloat16.

// Whether rows for this matrix are to be narrow.
template <class T>
inline bool wants_narrow(const Matrix<T> &matrix) {
    return IN_PAIRS<T> && matrix.is_packed;
}

// Makes a row narrow.
inline void narrow(float *row, int64_t count) {
    bfloat16 *const to = (bfloat16 *)row;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(row + i));
    for (; i < count; i++) store1(to + i, row[i]);
}

#ifdef __AVX512BF16__

// c[R, PANEL] += a[R, begin to end] times the packed numbers of these inputs. `a` is narrow, with `lda` floats a row.
template <int64_t R>
inline void narrow_rest(const float *a, int64_t lda, const bfloat16 *packed, int64_t begin, int64_t end, float *c) {
    for (int64_t r = 0; r < R; r++)
        for (int64_t j = 0; j < 4; j++) {
            Vec acc = load(c + r * PANEL + j * LANES);
            int64_t i = begin;
            for (; i + 2 <= end; i += 2) {
                Vec first, second;
                load_pair(packed + i * PANEL + 2 * j * LANES, first, second);
                acc += load1((const bfloat16 *)(a + r * lda) + i) * first;
                acc += load1((const bfloat16 *)(a + r * lda) + i + 1) * second;
            }
            if (i < end) acc += load1((const bfloat16 *)(a + r * lda) + i) * load(packed + i * PANEL + j * LANES);
            store(c + r * PANEL + j * LANES, acc);
        }
}

#ifdef __AMX_BF16__

constexpr int64_t TILE_ROWS = 16, TILE_INPUTS = 32;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Sums in tiles 0 to 3, narrow rows in 4, weights in 5 to 7.
inline void shape_tiles(int64_t rows) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = 64;
        shapes.rows[i] = i < 5 ? rows : TILE_ROWS;
    }
    asm volatile("" : : "r"(&shapes) : "memory");  // GCC takes all but the first bytes for unused
    _tile_loadconfig(&shapes);
}

// c[rows, PANEL] = a[rows, k] times packed[k, PANEL]; `a` is narrow, with k floats a row.
inline void narrow_tiles(int64_t rows, const float *a, const bfloat16 *packed, int64_t k, float *c) {
    const int64_t whole = k / TILE_INPUTS * TILE_INPUTS, c_stride = PANEL * sizeof(float);
    int64_t shaped = 0;
    for (int64_t begin = 0; begin < whole; begin += RUN)
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            const int64_t some = least(TILE_ROWS, rows - r), end = least(begin + RUN, whole);
            if (some != shaped) shape_tiles(shaped = some);
            float *const sums = c + r * PANEL;
            if (begin) {
                _tile_loadd(0, sums, c_stride);
                _tile_loadd(1, sums + 16, c_stride);
                _tile_loadd(2, sums + 32, c_stride);
                _tile_loadd(3, sums + 48, c_stride);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t i = begin; i < end; i += TILE_INPUTS) {
                const bfloat16 *const b = packed + i * PANEL;
                _tile_loadd(4, (const bfloat16 *)(a + r * k) + i, k * sizeof(float));
                _tile_loadd(5, b, c_stride);  // a pair for each output is as long as a sum
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, b + 32, c_stride);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(7, b + 64, c_stride);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, b + 96, c_stride);
                _tile_dpbf16ps(3, 4, 5);
            }
            _tile_stored(0, sums, c_stride);
            _tile_stored(1, sums + 16, c_stride);
            _tile_stored(2, sums + 32, c_stride);
            _tile_stored(3, sums + 48, c_stride);
        }
    if (shaped) _tile_release();
    if (!whole) std::fill(c, c + rows * PANEL, 0.0f);
    for (int64_t r = 0; r < rows; r++)
        if (whole < k) narrow_rest<1>(a + r * k, k, packed, whole, k, c + r * PANEL);
}

#else

// c[R, C vectors] = a[R, k] times packed[k, C vectors], from vector FIRST of the panel on.
template <int64_t R, int64_t C, int64_t FIRST>
inline void narrow_tile(const float *a, const bfloat16 *packed, int64_t k, float *c) {
    __m512 acc[R][C];
    for (int64_t r = 0; r < R; r++)
        for (int64_t j = 0; j < C; j++) acc[r][j] = _mm512_setzero_ps();
    for (int64_t i = 0; i + 2 <= k; i += 2) {
        __m512bh row[C];
        for (int64_t j = 0; j < C; j++)
            row[j] = (__m512bh)_mm512_loadu_si512(packed + i * PANEL + 2 * (FIRST + j) * LANES);
        for (int64_t r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, (const bfloat16 *)(a + r * k) + i, sizeof(pair));
            for (int64_t j = 0; j < C; j++)
                acc[r][j] = _mm512_dpbf16_ps(acc[r][j], (__m512bh)_mm512_set1_epi32(pair), row[j]);
        }
    }
    for (int64_t r = 0; r < R; r++)
        for (int64_t j = 0; j < C; j++) store(c + r * PANEL + (FIRST + j) * LANES, (Vec)acc[r][j]);
}

template <int64_t R>
inline void narrow_by(int64_t rows, const float *a, const bfloat16 *packed, int64_t k, float *c) {
    if constexpr (R > 0) {
        for (; rows >= R; rows -= R, a += R * k, c += R * PANEL) {
            if constexpr (R <= WIDE) {
                narrow_tile<R, 4, 0>(a, packed, k, c);
            } else {
                narrow_tile<R, 2, 0>(a, packed, k, c);
                narrow_tile<R, 2, 2>(a, packed, k, c);
            }
            if (k % 2) narrow_rest<R>(a, k, packed, k - 1, k, c);
        }
        narrow_by<R - 1>(rows, a, packed, k, c);
    }
}

// c[rows, PANEL] = a[rows, k] times packed[k, PANEL]; `a` is narrow, with k floats a row.
inline void narrow_tiles(int64_t rows, const float *a, const bfloat16 *packed, int64_t k, float *c) {
    narrow_by<ROWS>(rows, a, packed, k, c);
}

#endif
#endif

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
