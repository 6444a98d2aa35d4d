// Products of bfloat16 rows with frozen weights, as fast as the weights can be read, and whole passes of decoder layers.
//
// A product is taken in tiles of 16 rows by 16 columns, which sum over a row's numbers in their order: its bits depend on
// that row alone, whatever lies beside it, as those of all else in kernels.cpp do.

#include "kernels.cpp"

constexpr long TILE = 16, DEEP = 32, TILED = TILE * DEEP;  // rows or columns; numbers summed in one step; of one tile

#if defined(__AMX_BF16__) && defined(__linux__)
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
    long upper_ = 0, lower_ = 0;

  public:
    void set(long upper, long lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper, lower_ = lower;
        Form form = {};
        form.palette = 1;
        long rows[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};  // sums, x, weights
        for (long tile = 0; tile < 8; tile++) form.rows[tile] = rows[tile], form.bytes[tile] = rows[tile] ? 64 : 0;
        asm volatile("" ::: "memory");  // the intrinsics do not say what they read
        _tile_loadconfig(&form);
    }
    ~Rows() { _tile_release(); }
};

// This thread's share of x [rows, in] times the weights; `finish(row, pair, first, second)` is handed sixteen sums each
// of the two columns of tiles that a pair is.
//
//     weights [pairs, in / DEEP, 2, DEEP / 2, TILE, 2]
template <typename Finish>
static void product(const bf16 *x, long rows, long in, const bf16 *weights, long pairs, const Finish &finish) {
    long threads = omp_get_num_threads(), thread = omp_get_thread_num(), wide = in * sizeof(bf16);
    Rows form;
    for (long pair = pairs * thread / threads; pair < pairs * (thread + 1) / threads; pair++)
        for (long first = 0; first < rows; first += 2 * TILE) {
            alignas(64) float sums[4][TILE * TILE];
            long many = rows - first < 2 * TILE ? rows - first : 2 * TILE, upper = many < TILE ? many : TILE;
            const bf16 *w = weights + pair * in * 2 * TILE, *some = x + first * in;
            form.set(upper, many - upper);
            asm volatile("" ::: "memory");
            _tile_zero(0); _tile_zero(1);
            if (many > TILE) {
                _tile_zero(2); _tile_zero(3);
                for (long i = 0; i < in; i += DEEP, w += 2 * TILED) {
                    _tile_loadd(4, some + i, wide); _tile_loadd(5, some + TILE * in + i, wide);
                    _tile_loadd(6, w, 64); _tile_loadd(7, w + TILED, 64);
                    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
                }
                _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
            } else
                for (long i = 0; i < in; i += DEEP, w += 2 * TILED) {
                    _tile_loadd(4, some + i, wide);
                    _tile_loadd(6, w, 64); _tile_loadd(7, w + TILED, 64);
                    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
                }
            _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
            for (long r = 0; r < many; r++) {
                const float *mine = sums[r / TILE * 2] + r % TILE * TILE;
                finish(first + r, pair, *(const vec *)mine, *(const vec *)(mine + TILE * TILE));
            }
        }
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

struct Layer {
    const bf16 *before, *after, *query_norm, *key_norm, *into, *into_bias, *out, *out_bias, *gate_up, *gate_up_bias,
        *down, *down_bias, *beside_norm;
    bf16 *keys, *values, *tap;
};

// A pass through decoder layers of Llama's make; x [B, N, H] becomes what the last of them returns. The rest as in
// `attend`; beside: null, or [B, N, H] whose norm, by the layer's own weight, is read before that of x. before: null,
// where x is read as it is. tap: null, or where the layer's input goes. work: room for B * N * (H, twice with `beside`,
// + (2 Q + 2 S) * D + inner) numbers.
extern "C" void layers(
    bf16 *x, const bf16 *beside, const Layer *table, bf16 *work, const int64_t *length, const uint8_t *related,
    const float *cosine, const float *sine, const int64_t *turn_of, long L, long B, long N, long M, long H, long inner,
    long Q, long S, long D, long capacity, long threads, float eps, float scale) {
    long rows = B * N, turned = (Q + 2 * S) * D, read = beside ? 2 * H : H;
    bf16 *normed = work, *qkv = normed + rows * read, *seen = qkv + rows * turned, *wider = seen + rows * Q * D;
#pragma omp parallel num_threads(threads)
    for (const Layer *layer = table; layer < table + L; layer++) {
        Pass pass{seen, qkv, layer->keys, layer->values, length, related, cosine, sine, turn_of, layer->query_norm,
                  layer->key_norm, B, N, M, Q, S, D, capacity, eps, scale, threads};
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            bf16 *to = normed + r * read;
            if (layer->tap) memcpy(layer->tap + r * H, x + r * H, H * sizeof(bf16));
            if (beside) norm(to, beside + r * H, layer->beside_norm, 1, H, eps), to += H;
            if (layer->before) norm(to, x + r * H, layer->before, 1, H, eps);
            else memcpy(to, x + r * H, H * sizeof(bf16));
        }
        product(normed, rows, read, layer->into, (turned + 2 * TILE - 1) / (2 * TILE), [&](long r, long pair, vec a, vec b) {
            put(qkv + r * turned, layer->into_bias, nullptr, pair * 2 * TILE, turned, a);
            put(qkv + r * turned, layer->into_bias, nullptr, pair * 2 * TILE + TILE, turned, b);
        });
#pragma omp barrier
#pragma omp for schedule(static)
        for (long task = 0; task < B * S; task++) pass.write(task);
        Ahead ahead = {};
        share(layer->out, (H + 2 * TILE - 1) / (2 * TILE), Q * D, ahead.at[0], ahead.end[0]);
        share(layer->gate_up, inner / TILE, H, ahead.at[1], ahead.end[1]);
#pragma omp for schedule(dynamic)
        for (long task = 0; task < pass.looks(); task++) pass.see(task, ahead);
        auto add = [&](const bf16 *bias) {
            return [=](long r, long pair, vec a, vec b) {
                put(x + r * H, bias, x + r * H, pair * 2 * TILE, H, a);
                put(x + r * H, bias, x + r * H, pair * 2 * TILE + TILE, H, b);
            };
        };
        product(seen, rows, Q * D, layer->out, (H + 2 * TILE - 1) / (2 * TILE), add(layer->out_bias));
#pragma omp barrier
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) norm(normed + r * H, x + r * H, layer->after, 1, H, eps);
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
extern "C" void layers() {}
#endif
