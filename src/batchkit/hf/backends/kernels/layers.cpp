// What a model computes between its matrix products, each in one pass over its numbers: norms, gated activations, rotary
// positions, and the best logit of a row. For x86 with AVX2 or AVX-512.
//
// Everything is computed in float32 and rounded once, at the end. A row's result depends on nothing but the row: not on
// how many rows there are, nor on the number of threads.

#include <initializer_list>

#include "vectors.h"

namespace {

constexpr int64_t RUN = 4096;  // logits among which the best one is looked for, once it is known that it is there

template <class T>
inline void store1(T *to, float x) {
    T lanes[LANES];
    store(lanes, splat(x));
    *to = lanes[0];
}

// out = x / sqrt(mean of x squared + eps) * (weight + offset). x is [rows, width]; weight is [width], or null.
template <class T>
void norm(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps, float offset,
          int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t row = 0; row < rows; row++) {
        const T *const from = x + row * width;
        T *const to = out + row * width;
        Vec sums[4] = {};
        int64_t i = 0;
        for (; i + 4 * LANES <= width; i += 4 * LANES)
            for (int64_t j = 0; j < 4; j++) {
                const Vec v = load(from + i + j * LANES);
                sums[j] += v * v;
            }
        float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        for (; i < width; i++) total += load1(from + i) * load1(from + i);
        const float factor = 1.0f / std::sqrt(total / (float)width + eps);
        i = 0;
        for (; i + LANES <= width; i += LANES) {
            const Vec v = load(from + i) * factor;
            store(to + i, weight ? v * (load(weight + i) + offset) : v);
        }
        for (; i < width; i++) {
            const float v = load1(from + i) * factor;
            store1(to + i, weight ? v * (load1(weight + i) + offset) : v);
        }
    }
}

enum Activation : int64_t { SILU, GELU_TANH };

inline Vec activated(Vec x, int64_t activation) {
    if (activation == GELU_TANH) {
        const Vec inner = 0.7978845608f * (x + 0.044715f * x * x * x);
        return 0.5f * x * (1.0f + tanh(inner));
    }
    const Vec e = exp(as<Vec>(as<Ints>(x) | INT32_MIN));  // of minus the size of x, which cannot overflow
    const Vec positive = 1.0f / (1.0f + e);
    return x * (x < 0 ? e * positive : positive);
}

// out = the activation of gate, times up.
template <class T>
void gated(const T *gate, const T *up, T *out, int64_t count, int64_t activation, int64_t num_threads) {
    const int64_t whole = count / LANES;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t i = 0; i < whole; i++)
        store(out + i * LANES, activated(load(gate + i * LANES), activation) * load(up + i * LANES));
    for (int64_t i = whole * LANES; i < count; i++)
        store1(out + i, activated(splat(load1(gate + i)), activation)[0] * load1(up + i));
}

template <class T>
struct Heads {
    const T *x;  // [tokens, num, width], strides in elements
    T *out;      // [tokens, num, width]
    int64_t num, token_stride, head_stride;
};

template <class T>
inline void rotated(const T *x, const T *cos, const T *sin, int64_t half, T *out) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Vec a = load(x + i), b = load(x + half + i);
        store(out + i, a * load(cos + i) - b * load(sin + i));
        store(out + half + i, b * load(cos + half + i) + a * load(sin + half + i));
    }
    for (; i < half; i++) {
        const float a = load1(x + i), b = load1(x + half + i);
        store1(out + i, a * load1(cos + i) - b * load1(sin + i));
        store1(out + half + i, b * load1(cos + half + i) + a * load1(sin + half + i));
    }
}

// cos and sin are [tokens, width].
template <class T>
void rotary(const Heads<T> &query, const Heads<T> &key, const T *cos, const T *sin, int64_t tokens, int64_t width,
            int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t token = 0; token < tokens; token++)
        for (const Heads<T> *side : {&query, &key})
            for (int64_t head = 0; head < side->num; head++)
                rotated(side->x + token * side->token_stride + head * side->head_stride, cos + token * width,
                        sin + token * width, width / 2, side->out + (token * side->num + head) * width);
}

// The first of the highest of each row, or the first NaN, and its value. logits are [rows, width], a row every `stride`.
template <class T>
void best(const T *logits, int64_t *found, float *value, int64_t rows, int64_t width, int64_t stride,
          int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t row = 0; row < rows; row++) {
        const T *const x = logits + row * stride;
        float top = -INFINITY;
        int64_t run = 0;  // where the run begins that has it
        bool is_nan = false;
        for (int64_t begin = 0; begin < width && !is_nan; begin += RUN) {
            const int64_t end = begin + RUN < width ? begin + RUN : width;
            Vec tops = splat(-INFINITY);
            Ints nans = {};
            int64_t i = begin;
            for (; i + LANES <= end; i += LANES) {
                const Vec v = load(x + i);
                nans |= (Ints)(v != v);
                tops = v > tops ? v : tops;
            }
            float here = highest(tops);
            for (int64_t j = 0; j < LANES; j++) is_nan |= nans[j] != 0;
            for (; i < end; i++) {
                const float v = load1(x + i);
                is_nan |= v != v;
                here = v > here ? v : here;
            }
            if (is_nan || here > top) {
                top = here;
                run = begin;
            }
        }
        while (is_nan ? load1(x + run) == load1(x + run) : load1(x + run) != top) run++;
        found[row] = run;
        value[row] = load1(x + run);
    }
}

}  // namespace

#define ENTRIES(T, name)                                                                                            \
    void batchkit_norm_##name(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps,          \
                              float offset, int64_t num_threads) {                                                  \
        norm(x, weight, out, rows, width, eps, offset, num_threads);                                                \
    }                                                                                                               \
    void batchkit_gated_##name(const T *gate, const T *up, T *out, int64_t count, int64_t activation,               \
                               int64_t num_threads) {                                                               \
        gated(gate, up, out, count, activation, num_threads);                                                       \
    }                                                                                                               \
    void batchkit_rotary_##name(const T *query, T *query_out, int64_t query_num, int64_t query_token,               \
                                int64_t query_head, const T *key, T *key_out, int64_t key_num, int64_t key_token,   \
                                int64_t key_head, const T *cos, const T *sin, int64_t tokens, int64_t width,        \
                                int64_t num_threads) {                                                              \
        rotary<T>({query, query_out, query_num, query_token, query_head},                                           \
                  {key, key_out, key_num, key_token, key_head}, cos, sin, tokens, width, num_threads);              \
    }                                                                                                               \
    void batchkit_best_##name(const T *logits, int64_t *found, float *value, int64_t rows, int64_t width,           \
                              int64_t stride, int64_t num_threads) {                                                \
        best(logits, found, value, rows, width, stride, num_threads);                                               \
    }

extern "C" {
ENTRIES(float, float32)
ENTRIES(bfloat16, bfloat16)
ENTRIES(float16, float16)
}
