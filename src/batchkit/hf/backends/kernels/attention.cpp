// Attention over block tables, and the writing of keys and values, for x86 with AVX2 or AVX-512.
//
// The step comes as items: a few queries of one row, and a range of keys that they look at. For each KV head, an item
// is one piece of work, and no piece knows of another: what is computed does not depend on the number of threads, nor
// on what else is in the step. Query heads that share a KV head are rows of one matrix, so that K and V are read once.
//
// Pieces of few rows, as decoding has them, are bound by memory: they read K and V where they lie (`few_rows`). Pieces
// of many rows copy 64 keys at a time in the order in which a matrix product wants them, and keep a running maximum
// (`many_rows`). Results of several items for the same queries are joined by whoever computes the last of them, in the
// order of the keys (`join`). Everything is accumulated in float32. Keys outside an item's range are never read: their
// slots may hold NaN.
//
// AVX2 and AVX-512 differ in the vectors, and in how many rows of a product fit in the registers.

#include <cfloat>
#include <omp.h>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int64_t ROWS = LANES == 16 ? 12 : 6;  // of a matrix product's tile, whose columns are two vectors
constexpr int64_t PANEL = 2 * LANES;
constexpr int64_t DOT_ROWS = LANES == 16 ? 6 : 3;  // of a tile of scores that is computed from keys where they lie
constexpr int64_t FEW = 8;                         // rows of a piece that reads K and V where they lie
constexpr int64_t SPAN = 256;                      // keys that such a piece may have
constexpr int64_t RUN = 64;                        // keys that are copied at a time otherwise
constexpr int64_t LITTLE = 1 << 19;                // products, which take less time than to wake the threads may

// ---- Matrix products.

// Calls each(R, row) for rows [begin, end), R of them at a time: `size` while it goes, which is up to Most, then fewer.
template <int64_t Most, class F>
inline void by_rows(int64_t begin, int64_t end, int64_t size, F &&each) {
    if constexpr (Most > 0) {
        if (Most <= size)
            for (; end - begin >= Most; begin += Most) each(std::integral_constant<int64_t, Most>(), begin);
        by_rows<Most - 1>(begin, end, size, each);
    }
}

// c[begin to end, width] = a[begin to end, k] b[k, width], or that much more. b lies in panels of PANEL columns, with
// room for `depth` rows each.
inline void product(int64_t begin, int64_t end, int64_t width, int64_t k, const float *a, int64_t lda, const float *b,
                    int64_t depth, float *c, int64_t ldc, bool adds) {
    by_rows<ROWS>(begin, end, ROWS, [&](auto R, int64_t row) {
        for (int64_t at = 0; at < width; at += PANEL)
            tile<R, 2>(a + row * lda, lda, b + at * depth, PANEL, k, c + row * ldc + at, ldc, adds);
    });
}

// c[rows, width] += a[rows, k] b[k, width]; width is a multiple of LANES. The fewer rows, the more columns at a time,
// to fill the registers.
template <class T>
inline void add_product(int64_t rows, int64_t width, int64_t k, const float *a, int64_t lda, const T *b, float *c,
                        int64_t ldc) {
    by_rows<ROWS>(0, rows, ROWS, [&](auto R, int64_t row) {
        constexpr int64_t C = R == 1 ? 8 : R <= 3 ? 4 : 2;
        int64_t at = 0;
        for (; at + C * LANES <= width; at += C * LANES)
            tile<R, C>(a + row * lda, lda, b + at, width, k, c + row * ldc + at, ldc, true);
        for (; at < width; at += LANES)
            tile<R, 1>(a + row * lda, lda, b + at, width, k, c + row * ldc + at, ldc, true);
    });
}

// scores[R, n] = q[R, width] keys[n, width] transposed; width is a multiple of LANES.
template <int64_t R, class T>
inline void dots(const float *q, int64_t width, const T *keys, int64_t n, float *scores, int64_t stride) {
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
        Vec acc[4][R] = {};
        for (int64_t i = 0; i < width; i += LANES)
            for (int64_t key = 0; key < 4; key++) {
                const Vec x = load(keys + (j + key) * width + i);
                for (int64_t r = 0; r < R; r++) acc[key][r] += x * load(q + r * width + i);
            }
        for (int64_t r = 0; r < R; r++) {
            const __m128 low = _mm_hadd_ps(sum4(acc[0][r]), sum4(acc[1][r]));
            const __m128 high = _mm_hadd_ps(sum4(acc[2][r]), sum4(acc[3][r]));
            _mm_storeu_ps(scores + r * stride + j, _mm_hadd_ps(low, high));
        }
    }
    for (; j < n; j++) {
        Vec acc[R] = {};
        for (int64_t i = 0; i < width; i += LANES) {
            const Vec x = load(keys + j * width + i);
            for (int64_t r = 0; r < R; r++) acc[r] += x * load(q + r * width + i);
        }
        for (int64_t r = 0; r < R; r++) scores[r * stride + j] = sum(acc[r]);
    }
}

// ---- What a call is told. The Python side has the same structures.

struct Item {
    int64_t token;     // the first query, in the step
    int64_t count;     // of queries
    int64_t position;  // of the first query, in its row
    int64_t table;     // where the row's block table begins
    int64_t parts;     // how many items the keys of these queries are in
    int64_t first;     // where results of these items begin, which are kept until they are joined; in queries
    int64_t begin;     // of the keys of this item
    int64_t end;
    int64_t partial;  // where its result is kept
};

struct Call {
    const Item *items;
    int64_t num_items;
    int64_t work;  // of all items, as pairs of a query and a key
    const int64_t *tables;
    int64_t block_size;
    int64_t max_rows;  // of a piece
    int64_t num_partials;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t window;  // 0: none
    float scaling;
    float softcap;         // 0: none
    const float *sinks;    // [num_heads], or null
    int64_t num_slots;     // of the pools
    const void *keys;      // [num_kv_heads, num_slots, key_dim]
    const void *values;    // [num_kv_heads, num_slots, value_dim]
    const void *query;     // [tokens, num_heads, key_dim]
    int64_t token_stride;  // of `query`, in elements
    int64_t head_stride;
    void *out;       // [tokens, num_heads, value_dim]
    float *scratch;  // as much as `scratch_floats` says
    int64_t num_threads;

    int64_t shared() const { return num_heads / num_kv_heads; }
    int64_t padded() const { return rounded_up(value_dim, PANEL); }
};

// Memory of a thread.
struct Work {
    float *q;       // [rows, key_dim]
    float *scores;  // [rows, RUN] or [FEW, SPAN]
    float *out;     // [rows, padded value_dim]
    float *top;     // [rows], the highest score so far
    float *total;   // [rows], of the weights so far
    float *k;       // [RUN / PANEL, key_dim, PANEL]
    float *v;       // [padded value_dim / PANEL, RUN, PANEL]

    static int64_t lay_out(const Call &call, float *at, Work *work) {
        int64_t size = 0;
        const auto take = [&](int64_t floats) {
            float *const here = at + size;
            size += rounded_up(floats, 16);
            return here;
        };
        const int64_t rows = call.max_rows, padded = call.padded();
        const Work made = {take(rows * call.key_dim),
                           take(most(rows * RUN, FEW * SPAN)),
                           take(rows * padded),
                           take(rows),
                           take(rows),
                           take(RUN * call.key_dim),
                           take(RUN * padded)};
        if (work) *work = made;
        return size;
    }
};

// Results of items that are joined.
struct Partials {
    float *values;  // [num_kv_heads, partials * shared heads, padded value_dim]
    float *top;     // [num_kv_heads, partials * shared heads]
    float *total;
    int32_t *done;  // [num_kv_heads, partials], how many items are done of those whose results begin here

    static int64_t lay_out(const Call &call, float *at, Partials *partials) {
        const int64_t rows = rounded_up(call.num_partials * call.num_heads, 16), padded = call.padded();
        if (partials)
            *partials = {at, at + rows * padded, at + rows * (padded + 1), (int32_t *)(at + rows * (padded + 2))};
        return rows * (padded + 3);
    }
};

// ---- The parts of a piece.

// Calls each(slot, n, at) for stretches of keys in one block: n from `slot` on, the first of which is begin + at.
template <class F>
inline void by_blocks(const Call &call, const Item &item, int64_t begin, int64_t end, F &&each) {
    for (int64_t position = begin; position < end;) {
        const int64_t block = position / call.block_size, offset = position - block * call.block_size;
        const int64_t n = least(call.block_size - offset, end - position);
        each(call.tables[item.table + block] * call.block_size + offset, n, position - begin);
        position += n;
    }
}

// Queries times `scaling`. Row r is query r / shared of the item, and head r % shared of those that share the KV head.
template <class T>
void read_queries(const Call &call, const Item &item, int64_t kv_head, float *q) {
    const int64_t shared = call.shared(), width = call.key_dim;
    const T *const query = (const T *)call.query + item.token * call.token_stride + kv_head * shared * call.head_stride;
    for (int64_t i = 0; i < item.count; i++)
        for (int64_t g = 0; g < shared; g++, q += width) {
            const T *const from = query + i * call.token_stride + g * call.head_stride;
            int64_t at = 0;
            for (; at + LANES <= width; at += LANES) store(q + at, load(from + at) * call.scaling);
            for (; at < width; at++) q[at] = load1(from + at) * call.scaling;
        }
}

// Scores of one row become weights; `top` and `total` are carried on. Of n scores, those from `low` to `high` are seen.
// Returns what everything before is to be multiplied by. There is room for n rounded up to LANES.
inline float weigh(float *scores, int64_t n, int64_t low, int64_t high, float softcap, float &top, float &total) {
    n = rounded_up(n, LANES);
    if (softcap > 0)
        for (int64_t j = 0; j < n; j += LANES) store(scores + j, tanh(load(scores + j) / softcap) * softcap);
    for (int64_t j = 0; j < low; j++) scores[j] = -INFINITY;
    for (int64_t j = high; j < n; j++) scores[j] = -INFINITY;
    Vec tops = splat(top);
    for (int64_t j = 0; j < n; j += LANES) {
        const Vec x = load(scores + j);
        tops = x > tops ? x : tops;
    }
    const float before = top;
    top = highest(tops);
    Vec sums = {};
    for (int64_t j = 0; j < n; j += LANES) {
        const Vec weights = exp(load(scores + j) - top);
        store(scores + j, weights);
        sums += weights;
    }
    const float factor = top == before ? 1.0f : exp(before - top);
    total = total * factor + sum(sums);
    return factor;
}

// Which of n keys, the first of which is at `begin`, a query sees: from the first of these two on, up to the second.
// Some queries of an item may see none.
inline int64_t first_seen(const Call &call, int64_t position, int64_t begin, int64_t n) {
    return call.window ? least(most(position - call.window + 1 - begin, 0), n) : 0;
}
inline int64_t end_seen(int64_t position, int64_t begin, int64_t n) { return least(most(position + 1 - begin, 0), n); }

// Asks for the block of a pool that begins at key `end`, if it is the item's: it lies elsewhere, and the processor
// cannot guess where. GCC takes a function that only prefetches for one that does nothing, hence the assembly.
template <class T>
inline void prefetch_block(const Call &call, const Item &item, int64_t end, const T *pool, int64_t width) {
    if (end >= item.end) return;
    const int64_t slot = call.tables[item.table + end / call.block_size] * call.block_size;
    const int64_t n = least(least(call.block_size, RUN), item.end - end);
    const char *const from = (const char *)(pool + slot * width), *const to = from + n * width * sizeof(T);
    for (const char *at = from; at < to; at += 64) asm volatile("prefetcht0 %0" : : "m"(*at));
}

template <class T>
void few_rows(const Call &call, const Item &item, int64_t kv_head, const Work &work) {
    const int64_t shared = call.shared(), rows = item.count * shared, n = item.end - item.begin;
    const T *const keys = (const T *)call.keys + kv_head * call.num_slots * call.key_dim;
    const T *const values = (const T *)call.values + kv_head * call.num_slots * call.value_dim;
    const int64_t tiles = (rows + DOT_ROWS - 1) / DOT_ROWS, size = (rows + tiles - 1) / tiles;
    by_blocks(call, item, item.begin, item.end, [&](int64_t slot, int64_t stretch, int64_t at) {
        prefetch_block(call, item, item.begin + at + stretch, keys, call.key_dim);
        by_rows<DOT_ROWS>(0, rows, size, [&](auto R, int64_t row) {
            dots<R>(work.q + row * call.key_dim, call.key_dim, keys + slot * call.key_dim, stretch,
                    work.scores + row * SPAN + at, SPAN);
        });
    });
    for (int64_t row = 0; row < rows; row++) {
        const int64_t position = item.position + row / shared;
        weigh(work.scores + row * SPAN, n, first_seen(call, position, item.begin, n), end_seen(position, item.begin, n),
              call.softcap, work.top[row], work.total[row]);
    }
    by_blocks(call, item, item.begin, item.end, [&](int64_t slot, int64_t stretch, int64_t at) {
        prefetch_block(call, item, item.begin + at + stretch, values, call.value_dim);
        add_product(rows, call.value_dim, stretch, work.scores + at, SPAN, values + slot * call.value_dim, work.out,
                    call.padded());
    });
}

// Up to RUN keys as panels [key_dim, PANEL]. Columns beyond the last key repeat it up to a multiple of four.
template <class T>
void pack_keys(const T *const *keys, int64_t n, int64_t width, float *k) {
    for (int64_t j = 0; j < n; j += 4) {
        float *const to = k + j / PANEL * PANEL * width + j % PANEL;
        const T *const a = keys[j], *const b = keys[least(j + 1, n - 1)], *const c = keys[least(j + 2, n - 1)],
                       *const d = keys[least(j + 3, n - 1)];
        int64_t i = 0;
        for (; i + 4 <= width; i += 4) {
            __m128 w = load4(a + i), x = load4(b + i), y = load4(c + i), z = load4(d + i);
            _MM_TRANSPOSE4_PS(w, x, y, z);
            _mm_storeu_ps(to + i * PANEL, w);
            _mm_storeu_ps(to + (i + 1) * PANEL, x);
            _mm_storeu_ps(to + (i + 2) * PANEL, y);
            _mm_storeu_ps(to + (i + 3) * PANEL, z);
        }
        for (; i < width; i++)
            _mm_storeu_ps(to + i * PANEL, _mm_setr_ps(load1(a + i), load1(b + i), load1(c + i), load1(d + i)));
    }
}

// Row j of the panels [RUN, PANEL] of values, filled up with zeros.
template <class T>
void pack_value(const T *value, int64_t j, int64_t width, float *v) {
    const auto at = [&](int64_t i) { return v + i / PANEL * PANEL * RUN + j * PANEL + i % PANEL; };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(at(i), load(value + i));
    for (; i < width; i++) *at(i) = load1(value + i);
    for (; i % PANEL; i++) *at(i) = 0;
}

template <class T>
void many_rows(const Call &call, const Item &item, int64_t kv_head, const Work &work) {
    const int64_t shared = call.shared(), padded = call.padded();
    const T *const keys = (const T *)call.keys + kv_head * call.num_slots * call.key_dim;
    const T *const values = (const T *)call.values + kv_head * call.num_slots * call.value_dim;
    for (int64_t begin = item.begin; begin < item.end; begin += RUN) {
        const int64_t n = least(RUN, item.end - begin);
        const T *found[RUN];
        by_blocks(call, item, begin, begin + n, [&](int64_t slot, int64_t stretch, int64_t at) {
            for (int64_t j = 0; j < stretch; j++) {
                found[at + j] = keys + (slot + j) * call.key_dim;
                pack_value(values + (slot + j) * call.value_dim, at + j, call.value_dim, work.v);
            }
        });
        pack_keys(found, n, call.key_dim, work.k);
        // Queries before the first of these keys, or so far behind that their window has passed them, see none.
        const int64_t from = most(begin - item.position, 0) * shared;
        int64_t to = item.count * shared;
        if (call.window) to = least(to, (begin + n + call.window - 1 - item.position) * shared);
        product(from, to, n, call.key_dim, work.q, call.key_dim, work.k, call.key_dim, work.scores, RUN, false);
        for (int64_t row = from; row < to; row++) {
            const int64_t position = item.position + row / shared;
            const float factor = weigh(work.scores + row * RUN, n, first_seen(call, position, begin, n),
                                       end_seen(position, begin, n), call.softcap, work.top[row], work.total[row]);
            if (factor != 1.0f)
                for (int64_t i = 0; i < padded; i += LANES)
                    store(work.out + row * padded + i, load(work.out + row * padded + i) * factor);
        }
        product(from, to, padded, n, work.scores, RUN, work.v, RUN, work.out, padded, true);
    }
}

// A row's result in its place: the sum of the values over that of the weights, in which the head's sink takes part.
template <class T>
void finish(const Call &call, int64_t token, int64_t head, const float *values, float top, float total) {
    float factor = 1.0f;
    if (call.sinks) {
        const float sink = call.sinks[head], highest = sink > top ? sink : top;
        factor = exp(top - highest);
        total = total * factor + exp(sink - highest);
    }
    factor /= total;
    T *const out = (T *)call.out + (token * call.num_heads + head) * call.value_dim;
    int64_t i = 0;
    for (; i + LANES <= call.value_dim; i += LANES) store(out + i, load(values + i) * factor);
    if (i < call.value_dim) {
        T last[LANES];
        store(last, load(values + i) * factor);
        std::memcpy(out + i, last, (call.value_dim - i) * sizeof(T));
    }
}

// Results of all items that the keys of these queries are in, in the order of the keys.
template <class T>
void join(const Call &call, const Item &item, int64_t kv_head, const Work &work, const Partials &partials) {
    const int64_t shared = call.shared(), padded = call.padded();
    for (int64_t row = 0; row < item.count * shared; row++) {
        const auto at = [&](int64_t part) {
            return (kv_head * call.num_partials + item.first + part * item.count) * shared + row;
        };
        float top = -FLT_MAX, total = 0;
        for (int64_t part = 0; part < item.parts; part++)
            if (partials.top[at(part)] > top) top = partials.top[at(part)];
        std::memset(work.out, 0, padded * sizeof(float));
        for (int64_t part = 0; part < item.parts; part++) {
            const float factor = exp(partials.top[at(part)] - top);
            const float *const values = partials.values + at(part) * padded;
            total += partials.total[at(part)] * factor;
            for (int64_t i = 0; i < padded; i += LANES)
                store(work.out + i, load(work.out + i) + load(values + i) * factor);
        }
        finish<T>(call, item.token + row / shared, kv_head * shared + row % shared, work.out, top, total);
    }
}

template <class T>
void compute(const Call &call, const Item &item, int64_t kv_head, const Work &own, const Partials &partials) {
    const int64_t shared = call.shared(), rows = item.count * shared, padded = call.padded();
    Work work = own;
    if (item.parts > 1) {
        const int64_t at = (kv_head * call.num_partials + item.partial) * shared;
        work.out = partials.values + at * padded;
        work.top = partials.top + at;
        work.total = partials.total + at;
    }
    read_queries<T>(call, item, kv_head, work.q);
    std::memset(work.out, 0, rows * padded * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        work.top[row] = -FLT_MAX;  // finite, so that the difference to a score of minus infinity is one
        work.total[row] = 0;
    }
    const bool is_even = call.key_dim % LANES == 0 && call.value_dim % LANES == 0;
    if (rows <= FEW && item.end - item.begin <= SPAN && is_even)
        few_rows<T>(call, item, kv_head, work);
    else
        many_rows<T>(call, item, kv_head, work);
    if (item.parts > 1) {
        int32_t *const done = partials.done + kv_head * call.num_partials + item.first;
        if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) == item.parts) join<T>(call, item, kv_head, own, partials);
        return;
    }
    for (int64_t row = 0; row < rows; row++)
        finish<T>(call, item.token + row / shared, kv_head * shared + row % shared, work.out + row * padded,
                  work.top[row], work.total[row]);
}

template <class T>
void attend(const Call &call) {
    Partials partials;
    float *const works = call.scratch + Partials::lay_out(call, call.scratch, &partials);
    std::memset(partials.done, 0, call.num_partials * call.num_kv_heads * sizeof(int32_t));
    const int64_t each = Work::lay_out(call, works, nullptr), pieces = call.num_items * call.num_kv_heads;
    const bool is_much = call.work * call.num_heads * (call.key_dim + call.value_dim) > LITTLE;
    // All threads or one: libgomp ends those that it does not need, and to start them again takes long.
#pragma omp parallel num_threads((int)call.num_threads) if (is_much)
    {
        Work work;
        Work::lay_out(call, works + omp_get_thread_num() * each, &work);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < pieces; i++)
            compute<T>(call, call.items[i / call.num_kv_heads], i % call.num_kv_heads, work, partials);
    }
}

struct Tokens {
    const int64_t *slots;  // [num_tokens]
    int64_t num_tokens;
    int64_t num_kv_heads;
    int64_t num_slots;
    int64_t num_threads;
};

// Keys or values of all tokens. Strides and widths are in bytes.
struct Side {
    char *pool;        // [num_kv_heads, num_slots, width]
    const char *from;  // [num_tokens, num_kv_heads, width]
    int64_t token_stride;
    int64_t head_stride;
    int64_t width;

    void write(const Tokens &tokens, int64_t token) const {
        for (int64_t head = 0; head < tokens.num_kv_heads; head++)
            std::memcpy(pool + (head * tokens.num_slots + tokens.slots[token]) * width,
                        from + token * token_stride + head * head_stride, width);
    }
};

}  // namespace

extern "C" {

// How many floats of scratch memory a call needs.
int64_t batchkit_scratch_floats(const Call *call) {
    return Partials::lay_out(*call, nullptr, nullptr) + call->num_threads * Work::lay_out(*call, nullptr, nullptr);
}

void batchkit_attend_float32(const Call *call) { attend<float>(*call); }
void batchkit_attend_bfloat16(const Call *call) { attend<bfloat16>(*call); }
void batchkit_attend_float16(const Call *call) { attend<float16>(*call); }

void batchkit_write(const Tokens *tokens, const Side *keys, const Side *values) {
    const int64_t bytes = tokens->num_tokens * tokens->num_kv_heads * (keys->width + values->width);
#pragma omp parallel for schedule(static) num_threads((int)tokens->num_threads) if (bytes > 1 << 18)
    for (int64_t token = 0; token < tokens->num_tokens; token++) {
        keys->write(*tokens, token);
        values->write(*tokens, token);
    }
}

}  // extern "C"
