// Weights of a linear layer in the order in which its products read them.
//
// PANEL outputs lie together, an input after another: [panels, inputs, PANEL], with zeros for the outputs that the last
// panel lacks. In bfloat16 the numbers of two vectors take turns, so that one load gives both, by a shift and a mask.
// Where the processor multiplies bfloat16 itself, two inputs of an output are side by side instead, [panels, inputs / 2,
// PANEL, 2], as its instructions want them; a last input that has no other is as in float16.

#pragma once

#include <type_traits>

#include "layers.h"

namespace {

constexpr int64_t PANEL = 4 * LANES;
constexpr int64_t RUN = 256;                    // inputs that go together where a panel of them is to stay in the cache
constexpr int64_t ROWS = LANES == 16 ? 12 : 6;  // rows of a tile that is two vectors wide
constexpr int64_t WIDE = LANES == 16 ? 6 : 3;   // of one that is a panel wide

// What `_Matrix` of decoder.py is.
template <class T>
struct Matrix {
    const T *weights;
    const T *bias;  // [outputs], or null
    int64_t outputs, inputs;
    int64_t is_packed;

    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t width(int64_t panel) const { return least(PANEL, outputs - panel * PANEL); }
};

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

// Undoes it, again by way of `copy`.
template <class T>
inline void unpack_panel(const T *from, T *to, int64_t width, int64_t inputs, T *copy) {
    std::memcpy(copy, from, PANEL * inputs * sizeof(T));
    for (int64_t begin = 0; begin < inputs; begin += 8) {
        const int64_t end = least(begin + 8, inputs);
        for (int64_t n = 0; n < width; n++)
            for (int64_t i = begin; i < end; i++) to[n * inputs + i] = copy[place<T>(n, i, inputs)];
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

}  // namespace
