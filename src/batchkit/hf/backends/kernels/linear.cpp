// Linear layers, and their weights packed. `linear.h` says how.

#include <omp.h>

#include "linear.h"

namespace {

// out[rows, outputs] = x[rows, inputs] times the matrix. `scratch` holds so many rows of floats as go together, and what
// `multiply` needs for each thread.
template <class T>
void linear(const T *x, const Matrix<T> &matrix, T *out, int64_t rows, float *scratch, int64_t num_threads) {
    const int64_t inputs = matrix.inputs, panels = matrix.panels();
    const bool is_narrow = wants_narrow(matrix);
    float *const works = scratch + least(rows, TOGETHER) * inputs;
#pragma omp parallel num_threads((int)num_threads)
    {
        float *const work = works + omp_get_thread_num() * multiply_floats();
        for (int64_t begin = 0; begin < rows; begin += TOGETHER) {
            const int64_t total = least(TOGETHER, rows - begin), part = piece_rows(matrix, total);
            const int64_t parts = (total + part - 1) / part;
#pragma omp for schedule(static)
            for (int64_t row = 0; row < total; row++) {
                widen(x + (begin + row) * inputs, inputs, scratch + row * inputs);
                if (is_narrow) narrow(scratch + row * inputs, inputs);
            }
#pragma omp for schedule(guided)
            for (int64_t piece = 0; piece < panels * parts; piece++) {
                const int64_t panel = piece / parts, first = piece % parts * part;
                const int64_t count = least(part, total - first);
                const float *const c = multiply(matrix, panel, scratch + first * inputs, is_narrow, count, total, work);
                for (int64_t row = 0; row < count; row++)
                    finish(c + row * PANEL, matrix.bias ? matrix.bias + panel * PANEL : nullptr, matrix.width(panel),
                           out + (begin + first + row) * matrix.outputs + panel * PANEL);
            }
        }
    }
}

// `scratch` has room for a panel for each thread. Both set `is_packed` when they are done.
template <class T>
void pack(const T *weights, T *packed, int64_t outputs, int64_t inputs, T *scratch, int64_t *is_packed,
          int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t n = 0; n < outputs; n += PANEL)
        pack_panel(weights + n * inputs, packed + n * inputs, least(PANEL, outputs - n), inputs,
                   scratch + omp_get_thread_num() * PANEL * inputs);
    *is_packed = 1;
}

// In the memory of the packed weights.
template <class T>
void unpack_all(T *weights, int64_t outputs, int64_t inputs, T *scratch, int64_t *is_packed, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t n = 0; n < outputs; n += PANEL)
        unpack_panel(weights + n * inputs, weights + n * inputs, least(PANEL, outputs - n), inputs,
                     scratch + omp_get_thread_num() * PANEL * inputs);
    *is_packed = 0;
}

// out[count, inputs] = the rows of the weights that were packed.
template <class T>
void unpack(const T *packed, const int64_t *rows, T *out, int64_t count, int64_t inputs, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t i = 0; i < count; i++) unpack_row(packed, rows[i], inputs, out + i * inputs);
}

}  // namespace

#define ENTRIES(T, name)                                                                                           \
    void batchkit_linear_##name(const T *x, const T *weights, const T *bias, T *out, int64_t rows, int64_t inputs, \
                                int64_t outputs, int64_t is_packed, float *scratch, int64_t num_threads) {         \
        linear(x, {weights, bias, outputs, inputs, is_packed}, out, rows, scratch, num_threads);                   \
    }                                                                                                              \
    void batchkit_pack_##name(const T *weights, T *packed, int64_t outputs, int64_t inputs, T *scratch,            \
                              int64_t *is_packed, int64_t num_threads) {                                           \
        pack(weights, packed, outputs, inputs, scratch, is_packed, num_threads);                                   \
    }                                                                                                              \
    void batchkit_unpack_all_##name(T *weights, int64_t outputs, int64_t inputs, T *scratch, int64_t *is_packed,   \
                                    int64_t num_threads) {                                                         \
        unpack_all(weights, outputs, inputs, scratch, is_packed, num_threads);                                     \
    }                                                                                                              \
    void batchkit_unpack_##name(const T *packed, const int64_t *rows, T *out, int64_t count, int64_t inputs,       \
                                int64_t num_threads) {                                                             \
        unpack(packed, rows, out, count, inputs, num_threads);                                                     \
    }

extern "C" {

// How many outputs are packed together.
int64_t batchkit_panel() { return PANEL; }

// How many floats of scratch memory a call of batchkit_linear needs.
int64_t batchkit_linear_floats(int64_t rows, int64_t inputs, int64_t num_threads) {
    return least(rows, TOGETHER) * inputs + num_threads * multiply_floats();
}

ENTRIES(float, float32)
ENTRIES(bfloat16, bfloat16)
ENTRIES(float16, float16)

}  // extern "C"
