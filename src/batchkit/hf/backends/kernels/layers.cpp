// What a model computes between its matrix products, each in one pass over its numbers: norms, gated activations, rotary
// positions, and the best logit of a row. For x86 with AVX2 or AVX-512.
//
// Everything is computed in float32 and rounded once, at the end. A row's result depends on nothing but the row: not on
// how many rows there are, nor on the number of threads.

#include <initializer_list>

#include "layers.h"

namespace {

constexpr int64_t RUN = 4096;  // numbers of a piece of work; logits among which the best one is looked for at last

// out = x / sqrt(mean of x squared + eps) * (weight + offset). x is [rows, width]; weight is [width], or null.
template <class T>
void norm(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps, float offset,
          int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t row = 0; row < rows; row++)
        normalize(x + row * width, weight, out + row * width, width, eps, offset);
}

// out = the activation of gate, times up.
template <class T>
void gated(const T *gate, const T *up, T *out, int64_t count, int64_t activation, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t begin = 0; begin < count; begin += RUN)
        gate_by(gate + begin, up + begin, out + begin, least(RUN, count - begin), activation);
}

template <class T>
struct Heads {
    const T *x;  // [tokens, num, width], strides in elements
    T *out;      // [tokens, num, width]
    int64_t num, token_stride, head_stride;
};

// cos and sin are [tokens, width].
template <class T>
void rotary(const Heads<T> &query, const Heads<T> &key, const T *cos, const T *sin, int64_t tokens, int64_t width,
            int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t token = 0; token < tokens; token++)
        for (const Heads<T> *side : {&query, &key})
            for (int64_t head = 0; head < side->num; head++)
                rotate(side->x + token * side->token_stride + head * side->head_stride, cos + token * width,
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
            const int64_t end = least(begin + RUN, width);
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
