// Products of bfloat16 rows with frozen weights, as fast as the weights can be read, and whole passes of decoder layers.
//
// A product is taken in tiles of 16 rows by 16 columns, which sum over a row's numbers in their order: its bits depend on
// that row alone, whatever lies beside it, as those of all else in kernels.cpp do.

#include "kernels.cpp"

constexpr long TILE = 16, DEEP = 32, TILED = TILE * DEEP;  // rows or columns; numbers summed in one step; of one tile

#if defined(__AMX_BF16__) && defined(__linux__)
#define PACELINE_TILES
#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether this processor has tiles and the system lets this process use them.
extern "C" long tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

// How many rows the tiles of this thread have; none may be in use when another library's turn comes.
class Rows {
    struct alignas(64) Form {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    uint8_t now_[8] = {};

  public:
    void set(const uint8_t (&rows)[8]) {
        if (!memcmp(now_, rows, 8)) return;
        memcpy(now_, rows, 8);
        Form form = {};
        form.palette = 1;
        for (long tile = 0; tile < 8; tile++) form.rows[tile] = rows[tile], form.bytes[tile] = rows[tile] ? 64 : 0;
        asm volatile("" ::: "memory");  // the intrinsics do not say what they read
        _tile_loadconfig(&form);
    }
    void whole() { set({TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE}); }
    ~Rows() { _tile_release(); }
};

static inline void ask(const bf16 *weights) {  // for those of a step
    for (long line = 0; line < 2 * TILED; line += 32) __builtin_prefetch(weights + line, 0, 3);
}

// Rows `first` to `first + many`, at most two tiles, times a pair.
template <typename Finish>
static void one(
    Rows &form, const bf16 *x, long first, long many, long in, const bf16 *weights, long pair, const Finish &finish) {
    alignas(64) float sums[4][TILE * TILE];
    const long wide = in * sizeof(bf16);
    const uint8_t upper = many < TILE ? many : TILE, lower = many - upper;
    const bf16 *w = weights + pair * in * 2 * TILE;
    x += first * in;
    form.set({upper, upper, lower, lower, upper, lower, TILE, TILE});  // sums, x, weights
    asm volatile("" ::: "memory");
    _tile_zero(0); _tile_zero(1);
    if (lower) {
        _tile_zero(2); _tile_zero(3);
        for (long i = 0; i < in; i += DEEP, w += 2 * TILED) {
            ask(w + 2 * TILED);
            _tile_loadd(4, x + i, wide); _tile_loadd(5, x + TILE * in + i, wide);
            _tile_loadd(6, w, 64); _tile_loadd(7, w + TILED, 64);
            _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
    } else
        for (long i = 0; i < in; i += DEEP, w += 2 * TILED) {
            ask(w + 2 * TILED);
            _tile_loadd(4, x + i, wide);
            _tile_loadd(6, w, 64); _tile_loadd(7, w + TILED, 64);
            _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
        }
    _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
    for (long r = 0; r < many; r++) {
        const float *mine = sums[r / TILE * 2] + r % TILE * TILE;
        finish(first + r, pair, *(const vec *)mine, *(const vec *)(mine + TILE * TILE));
    }
}

// Rows of one tile times three pairs, `apart` from each other: the rows are loaded once for the three, and weights that
// are asked for at three places come sooner than at one.
template <typename Finish>
static void three(
    Rows &form, const bf16 *x, long rows, long in, const bf16 *weights, long pair, long apart, const Finish &finish) {
    alignas(64) float sums[6][TILE * TILE];
    const long wide = in * sizeof(bf16), on = in * 2 * TILE;
    const bf16 *u = weights + pair * on, *v = u + apart * on, *w = v + apart * on;
    const uint8_t r = rows;
    form.set({r, r, r, r, r, r, r, TILE});  // sums, x, weights
    asm volatile("" ::: "memory");
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
    for (long i = 0; i < in; i += DEEP, u += 2 * TILED, v += 2 * TILED, w += 2 * TILED) {
        ask(u + 2 * TILED); ask(v + 2 * TILED); ask(w + 2 * TILED);
        _tile_loadd(6, x + i, wide);
        _tile_loadd(7, u, 64); _tile_dpbf16ps(0, 6, 7); _tile_loadd(7, u + TILED, 64); _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, v, 64); _tile_dpbf16ps(2, 6, 7); _tile_loadd(7, v + TILED, 64); _tile_dpbf16ps(3, 6, 7);
        _tile_loadd(7, w, 64); _tile_dpbf16ps(4, 6, 7); _tile_loadd(7, w + TILED, 64); _tile_dpbf16ps(5, 6, 7);
    }
    _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64); _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64); _tile_stored(4, sums[4], 64); _tile_stored(5, sums[5], 64);
    for (long of = 0; of < 3; of++, pair += apart)
        for (long r = 0; r < rows; r++)
            finish(r, pair, *(const vec *)(sums[2 * of] + r * TILE), *(const vec *)(sums[2 * of + 1] + r * TILE));
}

// This thread's share of x [rows, in] times the weights; `finish(row, pair, first, second)` is handed sixteen sums each
// of the two columns of tiles that a pair is.
//
//     weights [pairs, in / DEEP, 2, DEEP / 2, TILE, 2]
template <typename Finish>
static void product(const bf16 *x, long rows, long in, const bf16 *weights, long pairs, const Finish &finish) {
    long threads = omp_get_num_threads(), thread = omp_get_thread_num();
    long pair = pairs * thread / threads, end = pairs * (thread + 1) / threads, apart = (end - pair) / 3;
    Rows form;
    if (0 < rows && rows <= TILE) {
        for (long upto = pair + apart; pair < upto; pair++) three(form, x, rows, in, weights, pair, apart, finish);
        pair += 2 * apart;
    }
    for (; pair < end; pair++)
        for (long first = 0; first < rows; first += 2 * TILE)
            one(form, x, first, rows - first < 2 * TILE ? rows - first : 2 * TILE, in, weights, pair, finish);
}

// Which weights of a product are this thread's.
static void share(const bf16 *weights, long pairs, long in, const char *&at, const char *&end) {
    long threads = omp_get_num_threads(), thread = omp_get_thread_num();
    at = (const char *)(weights + pairs * thread / threads * in * 2 * TILE);
    end = (const char *)(weights + pairs * (thread + 1) / threads * in * 2 * TILE);
}

static inline void put(bf16 *row, const bf16 *bias, const bf16 *added, long column, long width, vec sum) {
    if (column + LANES <= width) {
        if (bias) sum += wide(bias + column);
        if (added) sum += wide(added + column);
        narrow(row + column, sum);
        return;
    }
    for (long lane = 0; column + lane < width; lane++) {
        float padded[LANES] = {sum[lane] + (bias ? single(bias[column + lane]) : 0)};
        bf16 rounded[LANES];
        if (added) padded[0] += single(added[column + lane]);
        narrow(rounded, *(vec *)padded);
        row[column + lane] = rounded[0];
    }
}

static inline vec gate(vec gate, vec up) { return gate / (1.0f + exponential(-gate)) * up; }

// out [rows, width] = x [rows, in] times the weights, + bias [width] and + added [rows, width] where there are such;
// halves: the two columns of a pair lie half the width apart.
extern "C" void linear(
    bf16 *out, const bf16 *x, const bf16 *weights, const bf16 *bias, const bf16 *added, long rows, long in, long width,
    long pairs, long halves, long threads) {
    long step = halves ? TILE : 2 * TILE, apart = halves ? width / 2 : TILE;
#pragma omp parallel num_threads(threads)
    product(x, rows, in, weights, pairs, [&](long r, long pair, vec first, vec second) {
        const bf16 *more = added ? added + r * width : nullptr;
        put(out + r * width, bias, more, pair * step, width, first);
        put(out + r * width, bias, more, pair * step + apart, width, second);
    });
}

// out [rows, width] = silu(x times the first half of the weights) * (x times the other)
extern "C" void gated_linear(
    bf16 *out, const bf16 *x, const bf16 *weights, const bf16 *bias, long rows, long in, long width, long threads) {
#pragma omp parallel num_threads(threads)
    product(x, rows, in, weights, width / TILE, [&](long r, long pair, vec first, vec second) {
        if (bias) first += wide(bias + pair * TILE), second += wide(bias + width + pair * TILE);
        narrow(out + r * width + pair * TILE, gate(first, second));
    });
}

// What an output head draws from its rows: the `many` likeliest of each and the logarithms of their probabilities, as
// `topmost` orders them. Whether the logits are numbers, as `mass` says. work: room for rows * (in + width) numbers.
//
//     x [rows, in], normed before where `weight` [in] is no null   map [width] ids of the columns, or null: they are
//     these   mass [rows]   logp, ids [rows, many]   known: the first so many columns count
extern "C" long likeliest(
    float *mass, float *logp, int64_t *ids, bf16 *work, const bf16 *x, const bf16 *weight, const bf16 *weights,
    const bf16 *bias, const int64_t *map, long rows, long in, long width, long pairs, long known, long many, long threads,
    float eps) {
    bf16 *logits = work + rows * in;
#pragma omp parallel num_threads(threads)
    {
        if (weight) {
#pragma omp for schedule(static)
            for (long r = 0; r < rows; r++) norm_row(work + r * in, x + r * in, weight, in, eps);
        }
        product(weight ? work : x, rows, in, weights, pairs, [&](long r, long pair, vec first, vec second) {
            put(logits + r * width, bias, nullptr, pair * 2 * TILE, width, first);
            put(logits + r * width, bias, nullptr, pair * 2 * TILE + TILE, width, second);
        });
#pragma omp barrier
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            float *top = logp + r * many;
            topmost(mass + r, top, ids + r * many, logits + r * width, 1, known, width, many);
            for (long i = 0; i < many; i++) {
                if (top[i] != -INFINITY) top[i] -= mass[r];
                if (map) ids[r * many + i] = map[ids[r * many + i]];
            }
        }
    }
    long sane = 1;
    for (long r = 0; r < rows; r++) sane &= mass[r] < INFINITY;
    return sane;
}

// Attention in tiles. A text's positions are summed in blocks of DEEP; where a block is of slots that are its positions,
// for all rows of a tile, the values are read where they lie, else a node's own are gathered. So its bits are those of
// its path here too.
//
//     keys [B, S, capacity, D]   values [B, S, D, capacity], capacity in whole blocks   D in whole blocks   else as Pass
struct TiledPass : Nodes {
    long rows() const { return N * Q / S; }  // that look at one head
    long tiles() const { return (rows() + TILE - 1) / TILE; }
    long looks() const { return B * S * tiles(); }

    void write(long task) const {  // of 2 * B * S: one head's keys, or its values
        long head = task / 2, b = head / S, h = head % S, begun = length[b] + M - N;
        const bf16 *row = qkv + (b * N * (Q + 2 * S) + Q + h) * D, *end = row + N * (Q + 2 * S) * D;
        if (task % 2) {
            bf16 *value = values + head * D * capacity + begun;
            for (row += S * D, end += S * D; row < end; row += (Q + 2 * S) * D, value++)
                for (long d = 0; d < D; d++) value[d * capacity] = row[d];
            return;
        }
        bf16 *key = keys + (head * capacity + begun) * D;
        for (long n = 0; n < N; n++, row += (Q + 2 * S) * D, key += D) {
            float turned[WIDEST];
            turn(turned, row, key_norm, eps, cosine + D * turns(b, n), sine + D * turns(b, n), D);
            for (long d = 0; d < D; d += LANES) narrow(key + d, *(vec *)(turned + d));
        }
    }

    void see(long task, Ahead &ahead) const {  // of `looks`: a tile of rows, after all keys of their head are written
        const long group = Q / S, first = task % tiles() * TILE, many = rows() - first < TILE ? rows() - first : TILE;
        const long b = task / tiles() / S, h = task / tiles() % S, known = length[b];
        const bf16 *key = keys + (b * S + h) * capacity * D, *value = values + (b * S + h) * D * capacity;
        const uint8_t *seen = related + b * N * M;
        const long from = first / group, to = (first + many - 1) / group + 1;  // its nodes
        // how many slots are positions, for every node; how many the widest looks at
        long straight = M, reach = 0;
        long leads[TILE];
        for (long n = from; n < to; n++) {
            long lead = 0, last = M - 1;
            while (lead < M && seen[n * M + lead]) lead++;
            while (last >= 0 && !seen[n * M + last]) last--;
            straight = lead < straight ? lead : straight, reach = last + 1 > reach ? last + 1 : reach;
            leads[n - from] = lead;
        }
        straight += known, reach += known;
        const long whole = straight / DEEP, wide = (reach + DEEP - 1) / DEEP * DEEP + DEEP;
        // scores [wide, TILE] by slot, then weights by position; pairs [wide / 2, TILE, 2] of weights in bfloat16
        float *scores = scratch(wide * TILE * 2 + (D / 2 + 3 * DEEP) * TILE + 2 * D * TILE);
        uint32_t *pairs = (uint32_t *)(scores + wide * TILE), *queries = pairs + wide / 2 * TILE;
        uint32_t *some = queries + D / 2 * TILE;
        bf16 *own = (bf16 *)(some + DEEP / 2 * TILE);
        float *sums = (float *)(own + DEEP * D);
        memset(queries, 0, D / 2 * TILE * 4);
        for (long r = 0; r < many; r++) {
            long n = (first + r) / group, at = D * turns(b, n);
            float turned[WIDEST];
            bf16 rounded[WIDEST];
            turn(turned, qkv + ((b * N + n) * (Q + 2 * S) + h * group + (first + r) % group) * D, query_norm, eps,
                 cosine + at, sine + at, D);
            for (long d = 0; d < D; d += LANES) narrow(rounded + d, *(vec *)(turned + d));
            for (long d = 0; d < D; d += 2) memcpy(queries + d / 2 * TILE + r, rounded + d, 4);
        }
        asm volatile("" ::: "memory");
        for (long slot = 0; slot < reach; slot += TILE) {
            _tile_zero(0);
            for (long d = 0; d < D; d += DEEP) {
                _tile_loadd(4, key + slot * D + d, D * sizeof(bf16));
                _tile_loadd(6, queries + d / 2 * TILE, 64);
                _tile_dpbf16ps(0, 4, 6);
            }
            _tile_stored(0, scores + slot * TILE, 64);
        }
        // each row's own path behind what is straight
        long steps[TILE], longest = straight;
        for (long r = 0; r < many; r++) {
            const long n = (first + r) / group;
            steps[r] = known + leads[n - from];
            for (long m = leads[n - from]; m < reach - known; m++)  // a path ascends
                if (seen[n * M + m]) scores[steps[r]++ * TILE + r] = scores[(known + m) * TILE + r];
            longest = steps[r] > longest ? steps[r] : longest;
        }
        const long blocks = (longest + DEEP - 1) / DEEP;
        ints ends;
        for (long r = 0; r < TILE; r++) ends[r] = r < many ? steps[r] : straight;
        vec top = *(vec *)scores, total[4] = {};
        for (long i = 1; i < straight; i++) top = most(top, *(vec *)(scores + i * TILE));
        for (long i = straight; i < blocks * DEEP; i++) {
            vec *at = (vec *)(scores + i * TILE);
            *at = ends > (int)i ? *at : vec{} - INFINITY;
            top = most(top, *at);
        }
        top *= scale;
        for (long i = 0; i < blocks * DEEP; i += 2) {
            bits both = {};
            for (long j = 0; j < 2; j++) {
                bits weight = (bits)exponential(*(vec *)(scores + (i + j) * TILE) * scale - top);
                weight = (weight + 0x7fff + ((weight >> 16) & 1)) & 0xffff0000;
                total[(i + j) % 4] += (vec)weight;
                both |= j ? weight : weight >> 16;
            }
            *(bits *)(pairs + i / 2 * TILE) = both;
            ahead.line(), ahead.line(), ahead.line();
        }
        const vec share = 1.0f / ((total[0] + total[1]) + (total[2] + total[3]));
        asm volatile("" ::: "memory");
        for (long d = 0; d < D; d += 2 * TILE) {
            _tile_zero(0);
            _tile_zero(1);
            for (long block = 0; block < whole; block++) {
                _tile_loadd(4, value + d * capacity + block * DEEP, capacity * sizeof(bf16));
                _tile_loadd(5, value + (d + TILE) * capacity + block * DEEP, capacity * sizeof(bf16));
                _tile_loadd(6, pairs + block * DEEP / 2 * TILE, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
            }
            _tile_stored(0, sums + d * TILE, 64);
            _tile_stored(1, sums + (d + TILE) * TILE, 64);
        }
        for (long n = from; n < to; n++)
            tail(b, n, n * group - first, leads[n - from], whole * DEEP, steps[n * group < first ? 0 : n * group - first], value, pairs, some, own, sums);
        asm volatile("" ::: "memory");
        bf16 rounded[WIDEST * TILE];
        for (long d = 0; d < D; d++) narrow(rounded + d * TILE, *(vec *)(sums + d * TILE) * share);
        for (long r = 0; r < many; r++) {
            long n = (first + r) / group;
            bf16 *mine = out + ((b * N + n) * Q + h * group + (first + r) % group) * D;
            for (long d = 0; d < D; d++) mine[d] = rounded[d * TILE + r];
        }
    }

    // What a node's positions `at` to `end`, of which the first of `lead` drafts are at their slots, add to the sums of
    // its rows, the tile's from `begin` on.
    void tail(
        long b, long n, long begin, long lead, long at, long end, const bf16 *value, const uint32_t *pairs, uint32_t *some,
        bf16 *own, float *sums) const {
        const uint8_t *mine = related + (b * N + n) * M;
        const long straight = length[b] + lead;
        ints lanes;
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane >= begin && lane < begin + Q / S ? -1 : 0;
        for (long next = lead; at < end; at += DEEP) {
            long filled = straight < at ? 0 : straight - at < DEEP ? straight - at : DEEP;
            bits there;  // of a line of 32 numbers, the first that are filled
            for (long pair = 0; pair < LANES; pair++)
                there[pair] = 2 * pair + 1 < filled ? 0xffffffff : 2 * pair < filled ? 0xffff : 0;
            for (long d = 0; d < D; d++) {
                bits line;
                memcpy(&line, value + d * capacity + at, sizeof line);
                *(bits *)(own + d * DEEP) = line & there;
            }
            for (; filled < DEEP && next < M; next++) {
                if (!mine[next]) continue;
                for (long d = 0; d < D; d++) own[d * DEEP + filled] = value[d * capacity + length[b] + next];
                filled++;
            }
            for (long i = 0; i < DEEP / 2; i++)
                *(bits *)(some + i * TILE) = *(const bits *)(pairs + (at / 2 + i) * TILE) & (bits)lanes;
            asm volatile("" ::: "memory");
            for (long d = 0; d < D; d += TILE) {
                _tile_loadd(0, sums + d * TILE, 64);
                _tile_loadd(4, own + d * DEEP, 64);
                _tile_loadd(6, some, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_stored(0, sums + d * TILE, 64);
            }
        }
    }
};

struct Layer {
    const bf16 *before, *after, *query_norm, *key_norm, *into, *into_bias, *out, *out_bias, *gate_up, *gate_up_bias,
        *down, *down_bias, *beside_norm;
    bf16 *keys, *values, *tap;
};

// A pass through decoder layers of Llama's make; x [B, N, H] becomes what the last of them returns. The rest as in
// `attend`, keys and values as in TiledPass; beside: null, or [B, N, H] whose norm, by the layer's own weight, is read
// before that of x. before: null, where x is read as it is. tap: null, or where the layer's input goes. work: room for
// B * N * (H, twice with `beside`, + (2 Q + 2 S) * D + inner) numbers.
extern "C" void layers(
    bf16 *x, const bf16 *beside, const Layer *table, bf16 *work, const int64_t *length, const uint8_t *related,
    const float *cosine, const float *sine, const int64_t *turn_of, long L, long B, long N, long M, long H, long inner,
    long Q, long S, long D, long capacity, long offset, long angles, long threads, float eps, float scale) {
    long rows = B * N, turned = (Q + 2 * S) * D, read = beside ? 2 * H : H;
    bf16 *normed = work, *qkv = normed + rows * read, *seen = qkv + rows * turned, *wider = seen + rows * Q * D;
#pragma omp parallel num_threads(threads)
    for (const Layer *layer = table; layer < table + L; layer++) {
        TiledPass pass{{seen, qkv, layer->keys, layer->values, length, related, cosine, sine, turn_of, layer->query_norm,
                       layer->key_norm, B, N, M, Q, S, D, capacity, offset, angles, eps, scale}};
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            bf16 *to = normed + r * read;
            if (layer->tap) memcpy(layer->tap + r * H, x + r * H, H * sizeof(bf16));
            if (beside) norm_row(to, beside + r * H, layer->beside_norm, H, eps), to += H;
            if (layer->before) norm_row(to, x + r * H, layer->before, H, eps);
            else memcpy(to, x + r * H, H * sizeof(bf16));
        }
        product(normed, rows, read, layer->into, (turned + 2 * TILE - 1) / (2 * TILE), [&](long r, long pair, vec a, vec b) {
            put(qkv + r * turned, layer->into_bias, nullptr, pair * 2 * TILE, turned, a);
            put(qkv + r * turned, layer->into_bias, nullptr, pair * 2 * TILE + TILE, turned, b);
        });
#pragma omp barrier
#pragma omp for schedule(static)
        for (long task = 0; task < 2 * B * S; task++) pass.write(task);
        Ahead ahead = {};
        share(layer->out, (H + 2 * TILE - 1) / (2 * TILE), Q * D, ahead.at[0], ahead.end[0]);
        share(layer->gate_up, inner / TILE, H, ahead.at[1], ahead.end[1]);
        {
            Rows form;
            form.whole();
#pragma omp for schedule(static) nowait  // a head's tiles are one thread's, which reads its keys from memory once
            for (long task = 0; task < pass.looks(); task++) pass.see(task, ahead);
        }
#pragma omp barrier
        auto add = [&](const bf16 *bias) {
            return [=](long r, long pair, vec a, vec b) {
                put(x + r * H, bias, x + r * H, pair * 2 * TILE, H, a);
                put(x + r * H, bias, x + r * H, pair * 2 * TILE + TILE, H, b);
            };
        };
        product(seen, rows, Q * D, layer->out, (H + 2 * TILE - 1) / (2 * TILE), add(layer->out_bias));
#pragma omp barrier
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) norm_row(normed + r * H, x + r * H, layer->after, H, eps);
        product(normed, rows, H, layer->gate_up, inner / TILE, [&](long r, long pair, vec a, vec b) {
            const bf16 *bias = layer->gate_up_bias;
            if (bias) a += wide(bias + pair * TILE), b += wide(bias + inner + pair * TILE);
            narrow(wider + r * inner + pair * TILE, gate(a, b));
        });
#pragma omp barrier
        product(wider, rows, inner, layer->down, (H + 2 * TILE - 1) / (2 * TILE), add(layer->down_bias));
#pragma omp barrier
    }
}

#else
extern "C" long tiles() { return 0; }
extern "C" void linear() {}
extern "C" void gated_linear() {}
extern "C" void likeliest() {}
extern "C" void layers() {}
#endif
