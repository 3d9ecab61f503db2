// Products of packed weights by instructions that multiply bfloat16: AVX512-BF16, or AMX.
//
// Rows are narrow then: bfloat16, in the first half of the memory that a row of float32 has.

#pragma once

#include <algorithm>

#include "packed.h"

namespace {

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

}  // namespace
