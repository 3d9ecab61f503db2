// Parts of what layers compute between their matrix products, for one row or one head: norms, activations, positions.
//
// What is read and what is written may have different types. Everything is computed in float32.

#pragma once

#include "vectors.h"

namespace {

template <class T>
inline void store1(T *to, float x) {
    T lanes[LANES];
    store(lanes, splat(x));
    *to = lanes[0];
}

// to = x / sqrt(mean of x squared + eps) * (weight + offset), `width` of each. weight may be null. to may be x.
template <class In, class T, class Out>
inline void normalize(const In *x, const T *weight, Out *to, int64_t width, float eps, float offset) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int64_t j = 0; j < 4; j++) {
            const Vec v = load(x + i + j * LANES);
            sums[j] += v * v;
        }
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; i++) total += load1(x + i) * load1(x + i);
    const float factor = 1.0f / std::sqrt(total / (float)width + eps);
    i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Vec v = load(x + i) * factor;
        store(to + i, weight ? v * (load(weight + i) + offset) : v);
    }
    for (; i < width; i++) {
        const float v = load1(x + i) * factor;
        store1(to + i, weight ? v * (load1(weight + i) + offset) : v);
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

// out = the activation of gate, times up, `count` of each. out may be gate or up.
template <class In, class Out>
inline void gate_by(const In *gate, const In *up, Out *out, int64_t count, int64_t activation) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, activated(load(gate + i), activation) * load(up + i));
    for (; i < count; i++) store1(out + i, activated(splat(load1(gate + i)), activation)[0] * load1(up + i));
}

// out = x turned by its position, `half` numbers and as many after them as pairs. out may not be x.
template <class In, class T, class Out>
inline void rotate(const In *x, const T *cos, const T *sin, int64_t half, Out *out) {
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

}  // namespace
