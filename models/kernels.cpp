// What a pass does between its matrix products, for bfloat16 on a CPU: norms, rotation, attention, gates, arg-max; and
// what training does behind an output head.
//
// Rows are computed one by one, and every sum runs over the row's own path in the order of its positions, in lanes
// that the position alone decides. So a row's bits depend on what it says and sees, not on the width of the pass, on
// its place in a tree, on the slots of its keys or on the number of threads.
//
//     B rows of the batch, N nodes of a pass, Q query and S key heads, D numbers a head, L slots committed.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

constexpr long LANES = 16, WIDEST = 256, BLOCK = 1024, FEW = 3, MANY = 6;
typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef bf16 sixteen __attribute__((vector_size(2 * LANES), aligned(2)));

static inline vec wide(const bf16 *x) { return (vec)(__builtin_convertvector(*(const sixteen *)x, bits) << 16); }

static inline float single(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float out;
    memcpy(&out, &u, sizeof out);
    return out;
}

// To the nearest, ties to even; what is no number stays none.
static inline void narrow(bf16 *out, vec x) {
#ifdef __AVX512BF16__  // in one instruction, for which numbers below 2^-126 are 0
    *(sixteen *)out = (sixteen)_mm512_cvtneps_pbh((__m512)x);
#else
    bits u = (bits)x;
    bits rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    ints sane = x == x;
    *(sixteen *)out = __builtin_convertvector((rounded & (bits)sane) | (0x7fc0 & ~(bits)sane), sixteen);
#endif
}

static inline float total(vec x) {
    for (int most = LANES / 2; most; most /= 2)
        for (int lane = 0; lane < most; lane++) x[lane] += x[lane + most];
    return x[0];
}

static inline vec least(vec a, vec b) { return a < b ? a : b; }
static inline vec most(vec a, vec b) { return a > b ? a : b; }

static inline vec exponential(vec x) {  // to about 1e-7; 0 below -87
    ints vanishing = x < -87.0f;
    x = least(most(x, x * 0 - 87.0f), x * 0 + 88.0f);
    vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the nearest whole number lies in the last bits
    vec whole = shifted - 12582912.0f;
    vec rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    ints power = ((ints)shifted - 0x4b400000 + 127) << 23;
    return (vec)((ints)(sum * (vec)power) & ~vanishing);
}

static inline float scale_of(const float *x, long width, float eps) {  // what a root-mean-square norm multiplies by
    vec squares = {0};
    for (long i = 0; i < width; i += LANES) squares += *(const vec *)(x + i) * *(const vec *)(x + i);
    return 1.0f / sqrtf(total(squares) / width + eps);
}

static void norm_row(bf16 *out, const bf16 *x, const bf16 *weight, long width, float eps) {  // x * weight / rms(x)
    vec squares = {0};
    for (long i = 0; i < width; i += LANES) squares += wide(x + i) * wide(x + i);
    float scale = 1.0f / sqrtf(total(squares) / width + eps);
    for (long i = 0; i < width; i += LANES) narrow(out + i, wide(x + i) * scale * wide(weight + i));
}

constexpr long MUCH = 1 << 16;  // numbers that are worth another thread

// Each row of x [rows, width] by itself.
extern "C" void norm(bf16 *out, const bf16 *x, const bf16 *weight, long rows, long width, long threads, float eps) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > MUCH)
    for (long row = 0; row < rows; row++) norm_row(out + row * width, x + row * width, weight, width, eps);
}

// out [rows, width] = silu(gate) * up, of both side by side [rows, 2 * width]
extern "C" void gated(bf16 *out, const bf16 *both, long rows, long width, long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > MUCH)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < width; i += LANES) {
            vec gate = wide(both + 2 * row * width + i);
            narrow(out + row * width + i, gate / (1.0f + exponential(-gate)) * wide(both + (2 * row + 1) * width + i));
        }
}

// out [rows]: where the first of the largest lies (of what is no number, if there is any); rows begin `stride` apart
extern "C" void largest(int64_t *out, const bf16 *x, long rows, long width, long stride, long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > 100000)
    for (long row = 0; row < rows; row++) {
        const bf16 *mine = x + row * stride;
        float best = -INFINITY;
        long where = 0;
        for (long from = 0; from < width && best == best; from += BLOCK) {
            long to = from + BLOCK < width ? from + BLOCK : width, i = from;
            vec top = {0}, more = {0};
            ints none = {0};
            top -= INFINITY, more -= INFINITY;
            for (; i + 2 * LANES <= to; i += 2 * LANES) {
                vec first = wide(mine + i), second = wide(mine + i + LANES);
                top = most(top, first), more = most(more, second), none |= (first != first) | (second != second);
            }
            for (; i < to; i++) {
                float value = single(mine[i]);
                top[0] = value > top[0] ? value : top[0], none[0] |= value != value;
            }
            top = most(top, more);
            float high = top[0];
            for (int lane = 0; lane < LANES; lane++) {
                high = top[lane] > high ? top[lane] : high;
                if (none[lane]) best = NAN, where = from;
            }
            if (high > best) best = high, where = from;
        }
        auto found = [&](float value) { return best == best ? value == best : value != value; };
        while (!found(single(mine[where]))) where++;
        out[row] = where;
    }
}

// Of each row, the log of the sum of exponentials and its `many` largest, descending, the earlier of equals first.
// A sum that is not finite says that a number was not.
//
//     x [rows, width], rows begin `stride` apart    mass [rows]    top, where [rows, many], many <= width
extern "C" void topmost(
    float *mass, float *top, int64_t *where, const bf16 *x, long rows, long width, long stride, long many) {
    for (long row = 0; row < rows; row++, x += stride, top += many, where += many) {
        long found = 0, vectors = width / LANES * LANES;
        auto offer = [&](float value, long at) {
            if (found == many && !(value > top[many - 1])) return;
            long place = found < many ? found++ : many - 1;
            for (; place && value > top[place - 1]; place--) top[place] = top[place - 1], where[place] = where[place - 1];
            top[place] = value, where[place] = at;
        };
        for (long i = 0; i < vectors; i += LANES) {
            vec value = wide(x + i);
            ints above = value > (found == many ? top[many - 1] : -INFINITY);
            int any = found < many;
            for (int lane = 0; lane < LANES; lane++) any |= above[lane];
            if (any)
                for (int lane = 0; lane < LANES; lane++) offer(value[lane], i + lane);
        }
        for (long i = vectors; i < width; i++) offer(single(x[i]), i);
        float best = top[0], tail = 0;
        if (best == -INFINITY) best = 0;
        vec sum = {0};
        ints none = {0};  // what is no number
        for (long i = 0; i < vectors; i += LANES) {
            vec value = wide(x + i);
            sum += exponential(value - best), none |= value != value;
        }
        for (long i = vectors; i < width; i++) tail += expf(single(x[i]) - best);
        for (int lane = 0; lane < LANES; lane++) tail += none[lane] ? NAN : 0;
        mass[row] = best == INFINITY ? best : best + logf(total(sum) + tail);
    }
}

// ---------------------------------------------------------------- training

static float *scratch(long floats) {  // of this thread, kept
    static thread_local float *mine = nullptr;
    static thread_local long have = 0;
    if (floats > have) {
        free(mine);
        have = floats + floats / 2;
        mine = (float *)aligned_alloc(64, (have * 4 + 63) / 64 * 64);
    }
    return mine;
}

static inline vec some(const bf16 *x, long many) {  // sixteen numbers, -inf behind the first `many`
    if (many >= LANES) return wide(x);
    bf16 padded[LANES];
    for (long lane = 0; lane < LANES; lane++) padded[lane] = lane < many ? x[lane] : 0xff80;
    return wide(padded);
}

struct Softmax {
    float top, log_sum;  // the largest number, and the log of the sum of exponentials of what lies below it
    bool sane;
};

// exponentials [width, up to a whole vector] of x - its largest
static Softmax softmax(float *exponentials, const bf16 *x, long width) {
    vec best = {0}, sum = {0};
    ints none = {0};
    best -= INFINITY;
    for (long i = 0; i < width; i += LANES) {
        vec value = some(x + i, width - i);
        none |= value != value;
        best = most(best, value);
    }
    float top = best[0];
    bool sane = true;
    for (int lane = 0; lane < LANES; lane++) top = best[lane] > top ? best[lane] : top, sane &= !none[lane];
    if (!sane || !(fabsf(top) < INFINITY)) return {top, 0, false};
    for (long i = 0; i < width; i += LANES)
        sum += *(vec *)(exponentials + i) = exponential(some(x + i, width - i) - top);
    return {top, logf(total(sum)), true};
}

static bool first_of_largest(const bf16 *x, long at, float top) {  // whether it is the largest, and none before it
    if (single(x[at]) != top) return false;
    for (long i = 0; i < at; i++)
        if (single(x[i]) == top) return false;
    return true;
}

// kl * KL(target || draft) + ce * cross-entropy of K drafts for R rows, and its gradient times `factors`, which takes
// the place of the drafts' logits. A row that does not count has neither; one that holds what is no number, nan.
//
//     value [K, R] nats    right [K, R]: whether the label is the likeliest    logits [K, R, stride], teacher
//     [R, teacher_stride] or null where kl is 0: of each, `width` numbers    labels [R]    there [K, R]    factors [K]
extern "C" void learn(
    float *value, uint8_t *right, bf16 *logits, const bf16 *teacher, const int64_t *labels, const uint8_t *there,
    const float *factors, long K, long R, long width, long stride, long teacher_stride, long threads, float kl,
    float ce) {
    long vectors = (width + LANES - 1) / LANES * LANES;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (long r = 0; r < R; r++) {
        float *p = scratch(2 * vectors), *q = p + vectors;
        const bf16 *taught = teacher ? teacher + r * teacher_stride : nullptr;
        Softmax target = {0, 0, true};
        float share = 0;  // 1 / the sum of exponentials
        bool known = false;
        for (long k = 0; k < K; k++) {
            bf16 *x = logits + (k * R + r) * stride;
            value[k * R + r] = 0, right[k * R + r] = 0;
            if (!there[k * R + r]) {
                memset(x, 0, width * sizeof(bf16));
                continue;
            }
            if (taught && !known) {
                target = softmax(p, taught, width), share = expf(-target.log_sum), known = true;
            }
            Softmax draft = softmax(q, x, width);
            if (!target.sane || !draft.sane) {
                value[k * R + r] = NAN;
                for (long i = 0; i < width; i++) x[i] = 0x7fc0;
                continue;
            }
            right[k * R + r] = first_of_largest(x, labels[r], draft.top);
            float at_label = single(x[labels[r]]) - draft.top - draft.log_sum;
            float rise = (kl + ce) * factors[k] * expf(-draft.log_sum), fall = kl * factors[k] * share;
            float label_gradient = rise * q[labels[r]] - ce * factors[k] - (taught ? fall * p[labels[r]] : 0);
            vec apart = {0}, mass = {0};
            for (long i = 0; i < width; i += LANES) {
                vec gradient = *(vec *)(q + i) * rise;
                if (taught) {
                    vec weight = *(vec *)(p + i);
                    vec between = some(taught + i, width - i) - some(x + i, width - i);
                    ints said = weight > 0;  // what the target never says may have been ruled out on both sides
                    apart += (vec)((ints)(weight * between) & said), mass += weight;
                    gradient -= weight * fall;
                }
                if (width - i >= LANES) {
                    narrow(x + i, gradient);
                    continue;
                }
                bf16 last[LANES];
                narrow(last, gradient);
                memcpy(x + i, last, (width - i) * sizeof(bf16));
            }
            float rounded[LANES] = {label_gradient};
            bf16 narrowed[LANES];
            narrow(narrowed, *(vec *)rounded);
            x[labels[r]] = narrowed[0];
            value[k * R + r] = -ce * at_label;
            if (taught) {
                float between = draft.top + draft.log_sum - target.top - target.log_sum;
                value[k * R + r] += kl * share * (total(apart) + between * total(mass));
            }
        }
    }
}

// ---------------------------------------------------------------- attention in training

// Chains that go on, each from a row of a text, all at the same depth. A query looks at the rows of its text up to its
// own, and at what its own chain wrote at every depth between.
//
//     queries [R, Q, D]    keys, values [N, S, D], of the rows of all texts    own: keys and values [R, S, D], depth by
//     depth, C of each     texts [texts, 4]: where a text's rows begin and end, of the N and of the R
//     place [R]: which of the N a query goes on from     lag: rows before it of which it sees but its own
struct Chains {
    const bf16 *queries, *keys, *values;
    const bf16 *const *own;
    const int64_t *texts, *place;
    long C, Q, S, D, lag;

    const bf16 *own_row(long which, long row, long head) const { return own[which] + (row * S + head) * D; }
};

// A head's rows of a text, one below the other and in float32: [rows, D].
static void below(float *out, const bf16 *x, long rows, long stride, long D) {
    for (long row = 0; row < rows; row++, x += stride, out += D)
        for (long d = 0; d < D; d += LANES) *(vec *)(out + d) = wide(x + d);
}

// The same side by side: [D, width], 0 behind the last.
static void beside(float *out, const bf16 *x, long rows, long stride, long D, long width) {
    for (long from = 0; from < width; from += LANES)
        for (long d = 0; d < D; d++)
            for (long row = from; row < from + LANES; row++)
                out[d * width + row] = row < rows ? single(x[row * stride + d]) : 0.0f;
}

static inline float dot(const float *x, const bf16 *y, long D) {
    vec sum = {0};
    for (long d = 0; d < D; d += LANES) sum += *(const vec *)(x + d) * wide(y + d);
    return total(sum);
}

// out [MANY, width], up to column `to`: each of MANY rows times each column of what stands side by side
static void multiply(float *out, const float (*rows)[WIDEST], const float *columns, long D, long width, long to) {
    for (long i = 0; i < to; i += 2 * LANES) {
        vec sum[MANY][2] = {};
        for (long d = 0; d < D; d++) {
            vec first = *(const vec *)(columns + d * width + i), second = *(const vec *)(columns + d * width + i + LANES);
            for (long r = 0; r < MANY; r++) sum[r][0] += rows[r][d] * first, sum[r][1] += rows[r][d] * second;
        }
        for (long r = 0; r < MANY; r++)
            for (long part = 0; part < 2; part++) *(vec *)(out + r * width + i + part * LANES) = sum[r][part];
    }
}

// out [MANY] += weights [MANY, width] times x [to, D]
template <long WIDE>
static void mix(float (*out)[WIDEST], const float *weights, const float *x, long D, long width, long to) {
    for (long d = 0; d < D; d += WIDE * LANES) {
        vec sum[MANY][WIDE];
        for (long r = 0; r < MANY; r++)
            for (long w = 0; w < WIDE; w++) sum[r][w] = *(const vec *)(out[r] + d + w * LANES);
        for (long i = 0; i < to; i++)
            for (long r = 0; r < MANY; r++)
                for (long w = 0; w < WIDE; w++)
                    sum[r][w] += weights[r * width + i] * *(const vec *)(x + i * D + d + w * LANES);
        for (long r = 0; r < MANY; r++)
            for (long w = 0; w < WIDE; w++) *(vec *)(out[r] + d + w * LANES) = sum[r][w];
    }
}

// out [to, D] += weights [MANY, width], turned, times rows [MANY]
template <long WIDE>
static void spread(float *out, const float *weights, const float (*rows)[WIDEST], long D, long width, long to) {
    for (long d = 0; d < D; d += WIDE * LANES) {
        vec row[MANY][WIDE];
        for (long r = 0; r < MANY; r++)
            for (long w = 0; w < WIDE; w++) row[r][w] = *(const vec *)(rows[r] + d + w * LANES);
        for (long i = 0; i < to; i++)
            for (long w = 0; w < WIDE; w++) {
                vec sum = *(vec *)(out + i * D + d + w * LANES);
                for (long r = 0; r < MANY; r++) sum += weights[r * width + i] * row[r][w];
                *(vec *)(out + i * D + d + w * LANES) = sum;
            }
    }
}

// MANY queries of a head at a time, the group's one after the other: `row` of the R and `head` of the Q; the last few
// are joined by copies of the first, that count for nothing.
struct Few {
    long many, row[MANY], head[MANY], last[MANY], to;  // last: of the text's rows, the one it goes on from

    Few(const Chains &c, long first, long end, long from, long keys_from, long head_from, long group) {
        many = end - first < MANY ? end - first : MANY, to = 0;
        for (long r = 0; r < MANY; r++) {
            long at = r < many ? first + r : first;
            row[r] = from + at / group, head[r] = head_from + at % group, last[r] = c.place[row[r]] - keys_from;
            to = last[r] + 1 > to ? last[r] + 1 : to;
        }
        to = (to + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    }

    void hide(float *scores, long r, long lag) const {  // what it does not see
        for (long i = last[r] - lag + 1 > 0 ? last[r] - lag + 1 : 0; i < last[r]; i++) scores[i] = -INFINITY;
        for (long i = last[r] + 1; i < to; i++) scores[i] = -INFINITY;
    }
};

static inline void load(float *out, const bf16 *x, long D, float scale) {
    for (long d = 0; d < D; d += LANES) *(vec *)(out + d) = wide(x + d) * scale;
}

template <long WIDE>
static void look_along(const Chains &c, bf16 *out, float *log_sum, long text, long head) {
    const int64_t *where = c.texts + 4 * text;
    long rows = where[1] - where[0], group = c.Q / c.S, D = c.D;
    long width = (rows + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), start = (where[0] * c.S + head) * D;
    float *columns = scratch((2 * D + MANY) * width + MANY * c.C), *values = columns + D * width;
    float *scores = values + D * width, *apart = scores + MANY * width, scale = 1.0f / sqrtf(D);
    beside(columns, c.keys + start, rows, c.S * D, D, width);
    below(values, c.values + start, rows, c.S * D, D);
    memset(values + rows * D, 0, (width - rows) * D * sizeof(float));
    for (long first = 0, end = (where[3] - where[2]) * group; first < end; first += MANY) {
        Few few(c, first, end, where[2], where[0], head * group, group);
        float query[MANY][WIDEST], seen[MANY][WIDEST] = {}, share[MANY];
        for (long r = 0; r < MANY; r++) load(query[r], c.queries + (few.row[r] * c.Q + few.head[r]) * D, D, scale);
        multiply(scores, query, columns, D, width, few.to);
        for (long r = 0; r < MANY; r++) {
            float *mine = scores + r * width, *chain = apart + r * c.C;
            few.hide(mine, r, c.lag);
            vec top = *(vec *)mine, sum = {0};
            for (long i = LANES; i < few.to; i += LANES) top = most(top, *(vec *)(mine + i));
            float best = top[0], tail = 0;
            for (int lane = 1; lane < LANES; lane++) best = top[lane] > best ? top[lane] : best;
            for (long j = 0; j < c.C; j++) {
                chain[j] = dot(query[r], c.own_row(2 * j, few.row[r], head), D);
                best = chain[j] > best ? chain[j] : best;
            }
            ints none = {0};  // what is no number
            for (long i = 0; i < few.to; i += LANES) {
                vec less = *(vec *)(mine + i) - best;
                none |= less != less, sum += *(vec *)(mine + i) = exponential(less);
            }
            for (int lane = 0; lane < LANES; lane++) tail += none[lane] ? NAN : 0;
            for (long j = 0; j < c.C; j++) {
                tail += chain[j] = expf(chain[j] - best);
                const bf16 *value = c.own_row(2 * j + 1, few.row[r], head);
                for (long d = 0; d < D; d += LANES) *(vec *)(seen[r] + d) += chain[j] * wide(value + d);
            }
            share[r] = total(sum) + tail;
            if (r < few.many) log_sum[few.row[r] * c.Q + few.head[r]] = best + logf(share[r]);
        }
        mix<WIDE>(seen, scores, values, D, width, few.to);
        for (long r = 0; r < few.many; r++)
            for (long d = 0; d < D; d += LANES)
                narrow(out + (few.row[r] * c.Q + few.head[r]) * D + d, *(vec *)(seen[r] + d) / share[r]);
    }
}

// What is known behind a look: what was seen, its gradient, and the log of the sum of exponentials.
struct Seen {
    const bf16 *out, *gradient;
    const float *log_sum;
};

// Gradients, all in bfloat16, of the queries, the keys and values, and of the chain's own.
struct Gradients {
    bf16 *queries, *keys, *values;
    bf16 *const *own;
};

template <long WIDE>
static void look_back(const Chains &c, const Seen &seen, const Gradients &to, long text, long head) {
    const int64_t *where = c.texts + 4 * text;
    long rows = where[1] - where[0], group = c.Q / c.S, D = c.D, end = (where[3] - where[2]) * group;
    long width = (rows + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), start = (where[0] * c.S + head) * D;
    float *key_columns = scratch((5 * D + 2 * MANY) * width + end * (D + 1)), *value_columns = key_columns + D * width;
    float *keys = value_columns + D * width, *by_key = keys + D * width, *by_value = by_key + D * width;
    float *weights = by_value + D * width, *slopes = weights + MANY * width;
    float *by_query = slopes + MANY * width, *means = by_query + end * D, scale = 1.0f / sqrtf(D);
    beside(key_columns, c.keys + start, rows, c.S * D, D, width);
    beside(value_columns, c.values + start, rows, c.S * D, D, width);
    below(keys, c.keys + start, rows, c.S * D, D);
    memset(keys + rows * D, 0, (width - rows) * D * sizeof(float));
    memset(by_key, 0, 2 * D * width * sizeof(float));

    // the mean of each query's slopes, and its own chain
    memset(by_query, 0, end * D * sizeof(float));
    for (long at = 0; at < end; at += group) {
        long row = where[2] + at / group;
        float query[WIDEST], gradient[WIDEST];
        for (long g = 0; g < group; g++) {
            const long place = (row * c.Q + head * group + g) * D;
            load(gradient, seen.gradient + place, D, 1);
            means[at + g] = dot(gradient, seen.out + place, D);
        }
        for (long j = 0; j < c.C; j++) {
            const bf16 *key = c.own_row(2 * j, row, head), *value = c.own_row(2 * j + 1, row, head);
            float own_key[WIDEST] = {}, own_value[WIDEST] = {};
            for (long g = 0; g < group; g++) {
                const long place = row * c.Q + head * group + g;
                load(query, c.queries + place * D, D, scale), load(gradient, seen.gradient + place * D, D, 1);
                float weight = expf(dot(query, key, D) - seen.log_sum[place]);
                float slope = weight * (dot(gradient, value, D) - means[at + g]);
                for (long d = 0; d < D; d += LANES) {
                    *(vec *)(by_query + (at + g) * D + d) += slope * wide(key + d);
                    *(vec *)(own_key + d) += slope * *(vec *)(query + d);
                    *(vec *)(own_value + d) += weight * *(vec *)(gradient + d);
                }
            }
            for (long d = 0; d < D; d += LANES) {
                narrow(to.own[2 * j] + (row * c.S + head) * D + d, *(vec *)(own_key + d));
                narrow(to.own[2 * j + 1] + (row * c.S + head) * D + d, *(vec *)(own_value + d));
            }
        }
    }

    for (long first = 0; first < end; first += MANY) {
        Few few(c, first, end, where[2], where[0], head * group, group);
        float query[MANY][WIDEST], gradient[MANY][WIDEST], sum[MANY][WIDEST] = {};
        for (long r = 0; r < MANY; r++) {
            const long place = (few.row[r] * c.Q + few.head[r]) * D;
            load(query[r], c.queries + place, D, scale), load(gradient[r], seen.gradient + place, D, 1);
        }
        multiply(weights, query, key_columns, D, width, few.to);
        multiply(slopes, gradient, value_columns, D, width, few.to);
        for (long r = 0; r < MANY; r++) {
            float *weight = weights + r * width, *slope = slopes + r * width;
            if (r >= few.many) {
                memset(weight, 0, few.to * sizeof(float)), memset(slope, 0, few.to * sizeof(float));
                continue;
            }
            float mass = seen.log_sum[few.row[r] * c.Q + few.head[r]], mean = means[first + r];
            few.hide(weight, r, c.lag);
            for (long i = 0; i < few.to; i += LANES) {
                vec share = *(vec *)(weight + i) = exponential(*(vec *)(weight + i) - mass);
                *(vec *)(slope + i) = share * (*(vec *)(slope + i) - mean);
            }
        }
        mix<WIDE>(sum, slopes, keys, D, width, few.to);
        spread<WIDE>(by_key, slopes, query, D, width, few.to);
        spread<WIDE>(by_value, weights, gradient, D, width, few.to);
        for (long r = 0; r < few.many; r++)
            for (long d = 0; d < D; d += LANES)
                narrow(to.queries + (few.row[r] * c.Q + few.head[r]) * D + d,
                       (*(vec *)(sum[r] + d) + *(vec *)(by_query + (first + r) * D + d)) * scale);
    }
    for (long row = 0; row < rows; row++)
        for (long d = 0; d < D; d += LANES) {
            narrow(to.keys + start + row * c.S * D + d, *(vec *)(by_key + row * D + d));
            narrow(to.values + start + row * c.S * D + d, *(vec *)(by_value + row * D + d));
        }
}

// out [R, Q, D]: what chains see; log_sum [R, Q], which the way back asks for
extern "C" void look_along_chains(
    bf16 *out, float *log_sum, const bf16 *queries, const bf16 *keys, const bf16 *values, const bf16 *const *own,
    const int64_t *texts, const int64_t *place, long many, long C, long Q, long S, long D, long lag, long threads) {
    Chains chains{queries, keys, values, own, texts, place, C, Q, S, D, lag};
    auto run = D % (4 * LANES) ? look_along<1> : look_along<4>;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long task = 0; task < many * S; task++) run(chains, out, log_sum, task / S, task % S);
}

// The gradients [R, Q, D], [N, S, D] and [R, S, D] of that, from the gradient in `out`.
extern "C" void look_back_along_chains(
    bf16 *by_queries, bf16 *by_keys, bf16 *by_values, bf16 *const *by_own, const bf16 *gradient, const bf16 *out,
    const float *log_sum, const bf16 *queries, const bf16 *keys, const bf16 *values, const bf16 *const *own,
    const int64_t *texts, const int64_t *place, long many, long C, long Q, long S, long D, long lag, long threads) {
    Chains chains{queries, keys, values, own, texts, place, C, Q, S, D, lag};
    auto run = D % (4 * LANES) ? look_back<1> : look_back<4>;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long task = 0; task < many * S; task++)
        run(chains, {out, gradient, log_sum}, {by_queries, by_keys, by_values, by_own}, task / S, task % S);
}

// ---------------------------------------------------------------- attention

// One head's numbers turned by the angles of a position, normed before where there is a weight.
static inline void turn(
    float *out, const bf16 *x, const bf16 *weight, float eps, const float *cosine, const float *sine, long size) {
    float plain[WIDEST];
    for (long i = 0; i < size; i += LANES) *(vec *)(plain + i) = wide(x + i);
    if (weight) {
        float scale = scale_of(plain, size, eps);
        for (long i = 0; i < size; i += LANES) *(vec *)(plain + i) *= scale * wide(weight + i);
    }
    for (long i = 0, other = size / 2; i < size / 2; i++, other++) {
        out[i] = plain[i] * cosine[i] - plain[other] * sine[i];
        out[other] = plain[other] * cosine[other] + plain[i] * sine[other];
    }
}

// What will be read next from memory, asked for while the processor computes.
struct Ahead {
    const char *at[2], *end[2];
    long part = 0;

    void line() {
        if (part == 2) return;
        __builtin_prefetch(at[part], 0, 2);
        at[part] += 64;
        if (at[part] >= end[part]) part++;
    }
};

// ROWS queries look at the same committed keys and each at its own path behind them.
//
//     keys [size, width] and values [slots, size] in float32, whatever behind the slots   weights [ROWS, width]
template <long ROWS, long SIZE>
static void look(
    bf16 *const *out, const float (*query)[WIDEST], const float *keys, const float *values, long width, long committed,
    const long *const *path, const long *steps, float *weights, float scale, long any, Ahead &ahead) {
    const long size = SIZE ? SIZE : any;
    constexpr long WIDE = SIZE ? 4 : 1;  // vectors of values at a time
    for (long i = 0; i < width; i += 2 * LANES) {
        vec sum[ROWS][2] = {};
        for (long d = 0; d < size; d++) {
            ahead.line();
            vec first = *(const vec *)(keys + d * width + i), second = *(const vec *)(keys + d * width + i + LANES);
            for (long r = 0; r < ROWS; r++) sum[r][0] += query[r][d] * first, sum[r][1] += query[r][d] * second;
        }
        for (long r = 0; r < ROWS; r++)
            for (long part = 0; part < 2; part++) *(vec *)(weights + r * width + i + part * LANES) = sum[r][part] * scale;
    }
    float share[ROWS];
    for (long r = 0; r < ROWS; r++) {
        float *mine = weights + r * width;
        long seen = committed + steps[r];
        for (long i = 0; i < steps[r]; i++) mine[committed + i] = mine[path[r][i]];  // a path ascends
        for (long i = seen; i % LANES; i++) mine[i] = -INFINITY;
        vec top = *(vec *)mine, sum = {};
        for (long i = LANES; i < seen; i += LANES) top = most(top, *(vec *)(mine + i));
        float best = top[0];
        for (int lane = 1; lane < LANES; lane++) best = top[lane] > best ? top[lane] : best;
        for (long i = 0; i < seen; i += LANES) sum += *(vec *)(mine + i) = exponential(*(vec *)(mine + i) - best);
        share[r] = 1.0f / total(sum);
    }
    for (long d = 0; d < size; d += WIDE * LANES) {
        vec mean[ROWS][WIDE] = {};
        for (long i = 0; i < committed; i++) {
            ahead.line();
            for (long r = 0; r < ROWS; r++)
                for (long w = 0; w < WIDE; w++)
                    mean[r][w] += weights[r * width + i] * *(const vec *)(values + i * size + d + w * LANES);
        }
        for (long r = 0; r < ROWS; r++) {
            for (long i = 0; i < steps[r]; i++)
                for (long w = 0; w < WIDE; w++)
                    mean[r][w] += weights[r * width + committed + i] *
                                  *(const vec *)(values + path[r][i] * size + d + w * LANES);
            for (long w = 0; w < WIDE; w++) narrow(out[r] + d + w * LANES, mean[r][w] * share[r]);
        }
    }
}

// What `attend` is handed.
struct Nodes {
    bf16 *out;
    const bf16 *qkv;
    bf16 *keys, *values;
    const int64_t *length;
    const uint8_t *related;
    const float *cosine, *sine;
    const int64_t *turn_of;
    const bf16 *query_norm, *key_norm;
    long B, N, M, Q, S, D, capacity, offset, angles;
    float eps, scale;

    long turns(long b, long n) const {  // which angles turn a node: its position's, if it is not said
        if (turn_of) {  // padding may lie anywhere
            long at = turn_of[b * N + n] + offset;
            return at < 0 ? 0 : at < angles ? at : angles - 1;
        }
        long at = length[b] - 1;
        for (long m = 0; m < M; m++) at += related[(b * N + n) * M + m];
        return at;
    }
};

// They write their keys and values behind those committed, and look at their paths.
struct Pass : Nodes {
    long threads;

    long parts() const {  // of a head's queries, so that threads have equally much to do
        long most = N / 4 < 4 ? N / 4 : 4, few = 1;
        while (few < most && B * S * few % threads) few++;
        return few;
    }
    long looks() const { return B * S * parts(); }

    long longest() const {
        long most = 0;
        for (long b = 0; b < B; b++) most = length[b] > most ? length[b] : most;
        return most + M;
    }

    void write(long task) const {  // of B * S: one head's keys and values
        long b = task / S, h = task % S, begun = length[b] + M - N, heads = Q + 2 * S;
        bf16 *key = keys + task * D * capacity + begun, *value = values + (task * capacity + begun) * D;
        for (long n = 0; n < N; n++, key++, value += D) {
            const long at = turns(b, n);
            const bf16 *row = qkv + ((b * N + n) * heads + Q + h) * D;
            float turned[WIDEST];
            bf16 rounded[WIDEST];
            turn(turned, row, key_norm, eps, cosine + D * at, sine + D * at, D);
            for (long d = 0; d < D; d += LANES) narrow(rounded + d, *(vec *)(turned + d));
            for (long d = 0; d < D; d++) key[d * capacity] = rounded[d];
            memcpy(value, row + S * D, D * sizeof(bf16));
        }
    }

    void see(long task, Ahead &ahead) const {  // of `looks`: some queries of one head, after all keys of that are written
        long part = task % parts(), group = Q / S;
        task /= parts();
        long b = task / S, h = task % S, all = length[b] + M;
        long from = N * part / parts(), rows = (N * (part + 1) / parts() - from) * group;
        long width = (all + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        float *k = scratch((2 * D + MANY) * width + 2 * MANY * M), *v = k + D * width;
        const bf16 *key = keys + task * D * capacity, *value = values + task * capacity * D;
        for (long d = 0; d < D; d++, key += capacity) {
            long i = 0;
            for (; i + LANES <= all; i += LANES) *(vec *)(k + d * width + i) = wide(key + i);
            for (; i < width; i++) k[d * width + i] = i < all ? single(key[i]) : 0.0f;
        }
        for (long i = 0; i < all * D; i += LANES) *(vec *)(v + i) = wide(value + i);
        if (rows > FEW) {
            auto run = D == 64 ? look<MANY, 64> : D == 128 ? look<MANY, 128> : look<MANY, 0>;
            in_rows<MANY>(run, b, h, from, rows, width, k, v, ahead);
        } else {
            auto run = D == 64 ? look<FEW, 64> : D == 128 ? look<FEW, 128> : look<FEW, 0>;
            in_rows<FEW>(run, b, h, from, rows, width, k, v, ahead);
        }
    }

    template <long ROWS, typename Look>
    void in_rows(Look run, long b, long h, long from, long rows, long width, const float *k, float *v, Ahead &ahead) const {
        long group = Q / S, heads = Q + 2 * S;
        float *weights = v + D * width;
        long *paths = (long *)(weights + ROWS * width);
        for (long first = 0; first < rows; first += ROWS) {
            float query[ROWS][WIDEST];
            bf16 *to[ROWS];
            const long *path[ROWS];
            long steps[ROWS];
            for (long r = 0; r < ROWS; r++) {
                long row = first + r < rows ? first + r : first;  // the last few are joined by copies of the first
                long n = from + row / group, g = h * group + row % group;
                long *mine = paths + r * M;
                path[r] = mine;
                for (long m = 0; m < M; m++)
                    if (related[(b * N + n) * M + m]) *mine++ = length[b] + m;
                steps[r] = mine - path[r];
                long at = D * turns(b, n);
                turn(query[r], qkv + ((b * N + n) * heads + g) * D, query_norm, eps, cosine + at, sine + at, D);
                to[r] = out + ((b * N + n) * Q + g) * D;
            }
            run(to, query, k, v, width, length[b], path, steps, weights, scale, D, ahead);
        }
    }
};

// Move the nodes of each row that stay, the first `count` [B] of nodes [B, J], ascending, right behind its `length` [B]
// committed slots, where the pass has its node 0.
//
//     keys [layers, B, S, D, capacity]   values [layers, B, S, capacity, D]
extern "C" void move(
    bf16 *keys, bf16 *values, const int64_t *nodes, const int64_t *length, const int64_t *count, long layers, long B,
    long S, long D, long J, long capacity) {
    for (long group = 0; group < layers * B * S; group++) {
        long b = group / S % B, first = 0;
        bf16 *key = keys + group * D * capacity + length[b], *value = values + (group * capacity + length[b]) * D;
        const int64_t *mine = nodes + b * J;
        while (first < count[b] && mine[first] == first) first++;
        if (first == count[b]) continue;
        for (long d = 0; d < D; d++, key += capacity)
            for (long j = first; j < count[b]; j++) key[j] = key[mine[j]];
        for (long j = first; j < count[b]; j++) memcpy(value + j * D, value + mine[j] * D, D * sizeof(bf16));
    }
}

// Write the keys and values of a pass behind those committed, and let its nodes look at their paths.
//
//     qkv     [B, N, Q + 2 S, D]    keys [B, S, D, capacity]    values [B, S, capacity, D]    out [B, N, Q, D]
//     length  [B] committed slots   related [B, N, M]: whom of the M slots behind those each node sees, itself, one of
//             the last N, included  cosine, sine [angles, D]    turn_of [B, N], to which `offset` comes, or null: a
//             node turns by its position, committed slots and path   query_norm, key_norm [D] or null
extern "C" void attend(
    bf16 *out, const bf16 *qkv, bf16 *keys, bf16 *values, const int64_t *length, const uint8_t *related,
    const float *cosine, const float *sine, const int64_t *turn_of, const bf16 *query_norm, const bf16 *key_norm,
    long B, long N, long M, long Q, long S, long D, long capacity, long offset, long angles, long threads, float eps,
    float scale) {
    Pass pass{{out, qkv, keys, values, length, related, cosine, sine, turn_of, query_norm, key_norm,
               B, N, M, Q, S, D, capacity, offset, angles, eps, scale}, threads};
    for (long task = 0; task < B * S; task++) pass.write(task);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (B * N * Q * pass.longest() > 10000)
    for (long task = 0; task < pass.looks(); task++) {
        Ahead nothing = {{}, {}, 2};
        pass.see(task, nothing);
    }
}
