// A decoder layer but for its attention, in two calls: what comes before it (norm, queries, keys and values, their norms and
// positions), and what comes after (output projection, residual, norm, gated MLP, residual). For x86 with AVX2 or AVX-512.
//
// So nothing but queries, keys, values and hidden states is rounded or leaves the cache, and Python is asked twice. Rows go
// through together, TOGETHER at most, in phases between which the threads wait for each other.

#include <atomic>
#include <omp.h>
#include <sched.h>

#include "linear.h"

namespace {

// Where the threads of a call wait for each other. OpenMP's own barrier spins for milliseconds: where two threads share a
// processor, because somebody else has the other one, each then waits for the end of the other's time slice.
class Meeting {
    static constexpr int PATIENCE = 4096;  // spins, some dozen microseconds
    std::atomic<int> here{0}, round{0};

  public:
    void wait() {
        const int now = round.load(std::memory_order_relaxed);
        if (here.fetch_add(1, std::memory_order_acq_rel) + 1 == omp_get_num_threads()) {
            here.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++)
            if (spins < PATIENCE)
                _mm_pause();
            else
                sched_yield();
    }
};

// Root mean square norm over groups of `width` numbers; none if width is 0.
template <class T>
struct Norm {
    const T *weight;  // or null
    int64_t width;
    float eps, offset;
};

template <class T>
inline void apply(const Norm<T> &norm, float *x, int64_t count) {
    for (int64_t i = 0; norm.width && i + norm.width <= count; i += norm.width)
        normalize(x + i, norm.weight, x + i, norm.width, norm.eps, norm.offset);
}

// What `_Before` and `_After` of decoder.py are.
template <class T>
struct Before {
    Matrix<T> query, key, value;
    Norm<T> norm, query_norm, key_norm;
    const T *hidden;     // [rows, query.inputs]
    const T *cos, *sin;  // [rows, head_width]
    T *outs[3];          // [rows, outputs] of query, key and value
    int64_t rows, head_width;
    float *scratch;
    int64_t num_threads;
};

template <class T>
struct After {
    Matrix<T> out, gate, up, down;
    Norm<T> attention_norm, norm, mlp_norm;
    const T *attended;  // [rows, out.inputs]
    const T *hidden;    // [rows, out.outputs], to which it is added
    T *result;          // [rows, out.outputs]
    int64_t rows, activation;
    float *scratch;
    int64_t num_threads;
};

// to[i] += from[i].
template <class T>
inline void add(float *to, const T *from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(to + i) + load(from + i));
    for (; i < count; i++) to[i] += load1(from + i);
}

// For each panel of the matrix and some of the rows: done(first row, rows, panel, sums). To be called by all threads, which
// do not wait for each other.
template <class T, class Done>
inline void each_piece(const Matrix<T> &matrix, const float *x, bool is_narrow, int64_t rows, float *work,
                       const Done &done) {
    const int64_t part = piece_rows(matrix, rows), parts = (rows + part - 1) / part;
#pragma omp for schedule(guided) nowait
    for (int64_t piece = 0; piece < matrix.panels() * parts; piece++) {
        const int64_t panel = piece / parts, first = piece % parts * part, count = least(part, rows - first);
        done(first, count, panel, multiply(matrix, panel, x + first * matrix.inputs, is_narrow, count, rows, work));
    }
}

// out[rows, outputs] = x[rows, inputs] times the matrix, plus its bias.
template <class T>
inline void product(const Matrix<T> &matrix, const float *x, bool is_narrow, int64_t rows, float *work, float *out,
                    int64_t stride) {
    each_piece(matrix, x, is_narrow, rows, work, [&](int64_t first, int64_t count, int64_t panel, const float *sums) {
        for (int64_t row = 0; row < count; row++)
            finish(sums + row * PANEL, matrix.bias ? matrix.bias + panel * PANEL : nullptr, matrix.width(panel),
                   out + (first + row) * stride + panel * PANEL);
    });
}

template <class T>
int64_t before_floats(const Before<T> &b) {
    const int64_t rows = least(b.rows, TOGETHER);
    return rows * (b.query.inputs + b.query.outputs + b.key.outputs + b.value.outputs) +
           b.num_threads * multiply_floats();
}

template <class T>
void before(const Before<T> &b) {
    const int64_t together = least(b.rows, TOGETHER), inputs = b.query.inputs, width = b.head_width;
    const Matrix<T> *const matrices[3] = {&b.query, &b.key, &b.value};
    const Norm<T> *const norms[2] = {&b.query_norm, &b.key_norm};
    const bool is_narrow = wants_narrow(b.query) && wants_narrow(b.key) && wants_narrow(b.value);
    float *const x = b.scratch;
    float *sums[3] = {x + together * inputs};
    for (int side = 1; side < 3; side++) sums[side] = sums[side - 1] + together * matrices[side - 1]->outputs;
    float *const works = sums[2] + together * b.value.outputs;
    Meeting meeting;
#pragma omp parallel num_threads((int)b.num_threads)
    {
        float *const work = works + omp_get_thread_num() * multiply_floats();
        for (int64_t begin = 0; begin < b.rows; begin += TOGETHER) {
            const int64_t rows = least(TOGETHER, b.rows - begin);
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < rows; row++) {
                widen(b.hidden + (begin + row) * inputs, inputs, x + row * inputs);
                apply(b.norm, x + row * inputs, inputs);
                if (is_narrow) narrow(x + row * inputs, inputs);
            }
            meeting.wait();
            for (int side = 0; side < 3; side++)
                product(*matrices[side], x, is_narrow, rows, work, sums[side], matrices[side]->outputs);
            meeting.wait();
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < rows; row++)
                for (int side = 0; side < 3; side++) {
                    const int64_t outputs = matrices[side]->outputs;
                    float *const from = sums[side] + row * outputs;
                    T *const to = b.outs[side] + (begin + row) * outputs;
                    if (side < 2) {
                        apply(*norms[side], from, outputs);
                        for (int64_t i = 0; i < outputs; i += width)
                            rotate(from + i, b.cos + (begin + row) * width, b.sin + (begin + row) * width, width / 2,
                                   to + i);
                    } else {
                        finish(from, (const T *)nullptr, outputs, to);
                    }
                }
            meeting.wait();
        }
    }
}

template <class T>
int64_t after_floats(const After<T> &a) {
    const int64_t rows = least(a.rows, TOGETHER), width = a.out.outputs;
    return rows * (most(a.out.inputs, width) + 2 * width + a.gate.outputs) +
           a.num_threads * (multiply_floats() + TOGETHER * PANEL);
}

template <class T>
void after(const After<T> &a) {
    const int64_t together = least(a.rows, TOGETHER), width = a.out.outputs, inner = a.gate.outputs;
    const bool outs_narrow = wants_narrow(a.out), ins_narrow = wants_narrow(a.gate) && wants_narrow(a.up);
    const bool downs_narrow = wants_narrow(a.down);
    float *const x = a.scratch;  // what is multiplied: first what was attended, then hidden states
    float *const stream = x + together * most(a.out.inputs, width);
    float *const sums = stream + together * width;
    float *const gated = sums + together * width;
    float *const works = gated + together * inner;
    Meeting meeting;
#pragma omp parallel num_threads((int)a.num_threads)
    {
        float *const kept = works + omp_get_thread_num() * (multiply_floats() + TOGETHER * PANEL);
        float *const work = kept + TOGETHER * PANEL;
        for (int64_t begin = 0; begin < a.rows; begin += TOGETHER) {
            const int64_t rows = least(TOGETHER, a.rows - begin);
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < rows; row++) {
                widen(a.attended + (begin + row) * a.out.inputs, a.out.inputs, x + row * a.out.inputs);
                if (outs_narrow) narrow(x + row * a.out.inputs, a.out.inputs);
            }
            meeting.wait();
            product(a.out, x, outs_narrow, rows, work, stream, width);
            meeting.wait();
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < rows; row++) {
                apply(a.attention_norm, stream + row * width, width);
                add(stream + row * width, a.hidden + (begin + row) * width, width);
                std::memcpy(x + row * width, stream + row * width, width * sizeof(float));
                apply(a.norm, x + row * width, width);
                if (ins_narrow) narrow(x + row * width, width);
            }
            meeting.wait();
            const auto gate_up = [&](int64_t first, int64_t count, int64_t panel, const float *gate) {
                const int64_t at = panel * PANEL;
                for (int64_t row = 0; row < count; row++)
                    finish(gate + row * PANEL, a.gate.bias ? a.gate.bias + at : nullptr, a.gate.width(panel),
                           kept + row * PANEL);
                float *const ups = multiply(a.up, panel, x + first * width, ins_narrow, count, rows, work);
                for (int64_t row = 0; row < count; row++) {
                    const int64_t outputs = a.up.width(panel);
                    float *const up = ups + row * PANEL, *const to = gated + (first + row) * inner;
                    finish(up, a.up.bias ? a.up.bias + at : nullptr, outputs, up);
                    gate_by(kept + row * PANEL, up, up, outputs, a.activation);
                    if (downs_narrow)
                        finish(up, (const T *)nullptr, outputs, (T *)to + at);
                    else
                        std::memcpy(to + at, up, outputs * sizeof(float));
                }
            };
            each_piece(a.gate, x, ins_narrow, rows, work, gate_up);
            meeting.wait();
            product(a.down, gated, downs_narrow, rows, work, sums, width);
            meeting.wait();
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < rows; row++) {
                apply(a.mlp_norm, sums + row * width, width);
                add(sums + row * width, stream + row * width, width);
                finish(sums + row * width, (const T *)nullptr, width, a.result + (begin + row) * width);
            }
            meeting.wait();
        }
    }
}

}  // namespace

#define ENTRIES(T, name)                                                                           \
    int64_t batchkit_before_floats_##name(const Before<T> *b) { return before_floats(*b); }        \
    int64_t batchkit_after_floats_##name(const After<T> *a) { return after_floats(*a); }           \
    void batchkit_before_##name(const Before<T> *b) { before(*b); }                                \
    void batchkit_after_##name(const After<T> *a) { after(*a); }

extern "C" {
ENTRIES(float, float32)
ENTRIES(bfloat16, bfloat16)
ENTRIES(float16, float16)
}
