// AVX-512, AVX512-BF16 and AMX for processors with AVX2: as much of it as the kernels use, slowly. Included before all else.
//
// As on the processors, products of bfloat16 are exact, subnormal numbers are taken for zero, and sums are float32, if in
// another order. What is undefined there, such as a tile that is read before it has a shape, ends the process here.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>

#define LANES 16
#define __AVX512BF16__ 1
#ifdef EMULATED_TILES
#define __AMX_BF16__ 1
#endif

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));

inline Floats join(__m256 low, __m256 high) {
    Floats x;
    std::memcpy(&x, &low, 32);
    std::memcpy((char *)&x + 32, &high, 32);
    return x;
}
inline __m256 half(Floats x, int which) {
    __m256 y;
    std::memcpy(&y, (char *)&x + 32 * which, 32);
    return y;
}
inline Floats from_halves(__m256i x) {
    return join(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
inline __m256i to_halves(Floats x) {
    const __m128i low = _mm256_cvtps_ph(half(x, 0), 0), high = _mm256_cvtps_ph(half(x, 1), 0);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

inline float widened(uint16_t bits) {
    const uint32_t wide = (bits & 0x7f80) ? (uint32_t)bits << 16 : (uint32_t)(bits & 0x8000) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}
inline float add_pair(float sum, const uint16_t *a, const uint16_t *b) {
    sum = __builtin_fmaf(widened(a[0]), widened(b[0]), sum);
    return __builtin_fmaf(widened(a[1]), widened(b[1]), sum);
}
inline Floats add_pairs(Floats sums, Words a, Words b) {
    uint16_t of_a[32], of_b[32];
    std::memcpy(of_a, &a, 64);
    std::memcpy(of_b, &b, 64);
    for (int i = 0; i < 16; i++) sums[i] = add_pair(sums[i], of_a + 2 * i, of_b + 2 * i);
    return sums;
}
inline Words loaded(const void *from) {
    Words x;
    std::memcpy(&x, from, 64);
    return x;
}
inline Words repeated(int32_t pair) {
    Words x;
    for (int i = 0; i < 16; i++) std::memcpy((char *)&x + 4 * i, &pair, 4);
    return x;
}

struct Tiles {
    int rows[8] = {}, bytes[8] = {};
    alignas(64) char numbers[8][16][64];
};
inline thread_local Tiles tiles;

inline void check(bool is_right, const char *what) {
    if (is_right) return;
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}
inline void shape(const void *config) {
    const uint8_t *const at = (const uint8_t *)config;
    check(at[0] == 1, "there is one palette");
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        std::memcpy(&bytes, at + 16 + 2 * i, 2);
        tiles.bytes[i] = bytes;
        tiles.rows[i] = at[48 + i];
        check(bytes <= 64 && bytes % 4 == 0 && at[48 + i] <= 16, "a tile has up to 16 rows of 64 bytes");
    }
    std::memset(tiles.numbers, 0, sizeof(tiles.numbers));
}
inline void zero(int tile) {
    check(tiles.rows[tile], "the tile has no shape");
    std::memset(tiles.numbers[tile], 0, sizeof(tiles.numbers[tile]));
}
inline void load(int tile, const void *from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        std::memcpy(tiles.numbers[tile][row], (const char *)from + row * stride, tiles.bytes[tile]);
}
inline void store(int tile, void *to, int64_t stride) {
    check(tiles.rows[tile], "the tile has no shape");
    for (int row = 0; row < tiles.rows[tile]; row++)
        std::memcpy((char *)to + row * stride, tiles.numbers[tile][row], tiles.bytes[tile]);
}
inline void multiply(int sums, int a, int b) {
    check(sums != a && sums != b && a != b && tiles.rows[sums] && tiles.rows[sums] == tiles.rows[a] && tiles.bytes[sums] == tiles.bytes[b] &&
              tiles.bytes[a] == 4 * tiles.rows[b],
          "the tiles do not fit");
    for (int row = 0; row < tiles.rows[sums]; row++) {
        float *const to = (float *)tiles.numbers[sums][row];
        for (int k = 0; k < tiles.bytes[a] / 4; k++)
            for (int n = 0; n < tiles.bytes[b] / 4; n++)
                to[n] = add_pair(to[n], (const uint16_t *)tiles.numbers[a][row] + 2 * k,
                                 (const uint16_t *)tiles.numbers[b][k] + 2 * n);
    }
}

}  // namespace emulated

#define __m512 emulated::Floats
#define __m512bh emulated::Words
#define _mm512_cvtph_ps emulated::from_halves
#define _mm512_cvtps_ph(x, rounding) emulated::to_halves(x)
#define _mm512_castps512_ps256(x) emulated::half(x, 0)
#define _mm512_extractf32x8_ps(x, which) emulated::half(x, which)
#define _mm512_setzero_ps() emulated::Floats{}
#define _mm512_loadu_si512 emulated::loaded
#define _mm512_set1_epi32 emulated::repeated
#define _mm512_dpbf16_ps emulated::add_pairs
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::shape
#define _tile_release() emulated::tiles = {}
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
