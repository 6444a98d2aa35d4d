// Draft trees whole: the steps of a drafter of one decoder layer, its head, and the choice of children, for bfloat16 on a
// CPU with tiles. Between the products of a step, and between two steps, an interpreter takes longer than they do.
//
// Trees grow as decode/tree.py has it, and a node's numbers are those of steps taken one by one, bit for bit.
//
//     B texts, J rows of each that have become verified, N nodes of a tree, H numbers a row; else as in passes.cpp.

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "passes.cpp"

#ifdef PACELINE_TILES
// What a draft step is made of beside its decoder layer. table [V, H]: embeddings. fuse: null, and the layer reads the
// embedding beside the feature, or the weights that make x of [embedding, feature], each normed where there is a weight.
// norm [H] or null: of what the layer returns, before the output head reads it; normed: it is also what is handed on.
struct Step {
    const bf16 *table, *embedding_norm, *feature_norm, *fuse, *fuse_bias, *norm, *head, *head_bias;
    const int64_t *map;
    long width, pairs, normed;  // of the head: its columns
};

// What both kinds of tree are handed. feature [B, J, H], words, positions [B, J], count [B]: of the verified rows, as in
// Context; the last real one is the root's. length [B]: committed slots before them. known: as in `likeliest`. The rest
// as in `layers`.
struct Given {
    const bf16 *feature;
    const int64_t *words, *positions, *count;
    const Step *step;
    const Layer *layer;
    const int64_t *length;
    const float *cosine, *sine;
    long B, J, H, inner, Q, S, D, capacity, offset, angles, known, threads;
};

enum { NO_NUMBERS = 0, GROWN = 1, NO_ROOM = -1 };  // logits were none; all is well; the cache is too small

static char *kept(long bytes) {  // of this thread, as large as was ever asked for
    static thread_local char *mine = nullptr;
    static thread_local long have = 0;
    if (bytes > have) {
        free(mine);
        mine = (char *)aligned_alloc(64, (bytes + 63) / 64 * 64), have = bytes;
    }
    return mine;
}

// A tree that grows level by level. Of the level whose nodes get children, `nodes` of each text: what they hand on and
// their states [B, nodes, H], how likely they are [B, nodes].
struct Growth : Given {
    float eps, scale;
    long nodes = 1, drawn = 0, depth = 0, reach = 0;  // children of one node; of a text's nodes, how many have keys
    bool sane = true;
    bf16 *x, *state, *both, *between, *logits;
    int64_t *said, *at, *root, *behind, *ids, *parent;
    float *mass, *likely, *joint;
    uint8_t *seen, *above;

    // most: nodes of a text that are stepped into at once; unfolded: in all; width: children of one
    Growth(const Given &given, float eps, float scale, long most, long unfolded, long width)
        : Given(given), eps(eps), scale(scale) {
        const long rows = B * std::max(J, most), level = B * most, read = step->fuse ? H : 2 * H;
        auto lay_out = [&](char *from) {
            char *next = from;
            auto of = [&](auto *&part, long many) {
                part = (std::remove_reference_t<decltype(part)>)next, next += (many * sizeof(*part) + 63) / 64 * 64;
            };
            of(x, rows * H), of(state, rows * H), of(both, rows * 2 * H);
            of(between, rows * (read + 2 * (Q + S) * D + inner)), of(logits, level * (H + step->width));
            of(said, rows), of(at, rows), of(root, B), of(behind, B), of(ids, level * width), of(parent, level);
            of(mass, level), of(likely, level * width), of(joint, level);
            of(seen, rows * (J + unfolded)), of(above, rows * (J + unfolded));
            return next - from;
        };
        lay_out(kept(lay_out(nullptr)));
    }

    bool has_room(long unfolded) const {
        for (long b = 0; b < B; b++)
            if (length[b] + std::max(J, count[b] + unfolded) > capacity) return false;
        return true;
    }

    // Of n rows a text, which see `reach` slots behind those placed: x becomes what they hand on.
    void take(long n, const int64_t *placed, long reach) {
        for (long r = 0; r < B * n; r++) {
            const bf16 *word = step->table + said[r] * H;
            bf16 *to = both + r * (step->fuse ? 2 * H : H);
            if (step->embedding_norm) norm_row(to, word, step->embedding_norm, H, eps);
            else memcpy(to, word, H * sizeof(bf16));
            if (!step->fuse) continue;
            if (step->feature_norm) norm_row(to + H, x + r * H, step->feature_norm, H, eps);
            else memcpy(to + H, x + r * H, H * sizeof(bf16));
        }
        if (step->fuse)
            linear(x, both, step->fuse, step->fuse_bias, nullptr, B * n, 2 * H, H, (H + 2 * TILE - 1) / (2 * TILE), 0, threads);
        layers(x, step->fuse ? nullptr : both, layer, between, placed, seen, cosine, sine, at, 1, B, n, reach, H, inner, Q,
               S, D, capacity, offset, angles, threads, eps, scale);
    }

    void verified() {  // the root is the level that gets children first
        memcpy(x, feature, B * J * H * sizeof(bf16));
        memcpy(said, words, B * J * sizeof(int64_t)), memcpy(at, positions, B * J * sizeof(int64_t));
        for (long r = 0; r < B * J; r++)
            for (long j = 0; j < J; j++) seen[r * J + j] = j <= r % J;
        take(J, length, J);
        for (long b = 0; b < B; b++) {
            long last = b * J + count[b] - 1;
            memmove(x + b * H, x + last * H, H * sizeof(bf16));
            said[b] = words[last], root[b] = positions[last], behind[b] = length[b] + count[b], joint[b] = 0;
        }
    }

    void children(long width) {  // ids and how likely each is [B, nodes, drawn]: the likeliest
        const bf16 *read = x;
        if (step->norm) {
            for (long r = 0; r < B * nodes; r++) norm_row(state + r * H, x + r * H, step->norm, H, eps);
            read = state;
        }
        drawn = std::min(width, known);  // a draft vocabulary may have fewer
        sane &= likeliest(mass, likely, ids, logits, read, nullptr, step->head, step->head_bias, step->map, B * nodes, H,
                          step->width, step->pairs, known, drawn, threads, eps);
        for (long i = 0; i < B * nodes * drawn; i++) likely[i] += joint[i / drawn];
    }

    void descend(long going) {  // into so many of each text, of which `parent`, `said` and `joint` tell [B, going]
        bf16 *handed = step->normed ? state : x, *next = step->normed ? x : state;  // a parent may be asked for twice
        memcpy(above, seen, B * nodes * reach);
        depth++;
        for (long r = 0; r < B * going; r++) {
            long b = r / going, of = b * nodes + parent[r];
            memcpy(next + r * H, handed + of * H, H * sizeof(bf16));
            at[r] = root[b] + depth;
            uint8_t *mine = seen + r * (reach + going);
            memcpy(mine, above + of * reach, reach);
            for (long i = 0; i < going; i++) mine[reach + i] = i == r % going;
        }
        if (next != x) std::swap(x, state);
        reach += going, nodes = going;
        take(nodes, behind, reach);
    }
};

// A static tree. plan: of each level [nodes, children of one, nodes that have children], of each node its place in the
// children of the level, and of those that go on which they are, and which of the level above is each one's parent.
//
//     tokens, logp [B, N], the root first
extern "C" long unfold(
    int64_t *tokens, float *logp, const Given *given, const int64_t *plan, long N, long levels, float eps, float scale) {
    long unfolded = 0, most = 1, widest = 1;
    const int64_t *level = plan;
    for (long l = 0; l < levels; level += 3 + level[0] + 2 * level[2], l++)
        widest = std::max(widest, level[1]), most = std::max(most, level[2]), unfolded += level[2];
    Growth tree(*given, eps, scale, most, unfolded, widest);
    if (!tree.has_room(unfolded)) return NO_ROOM;
    tree.verified();
    const long B = given->B;
    for (long b = 0; b < B; b++) tokens[b * N] = tree.said[b], logp[b * N] = 0;
    long first = 1;
    level = plan;
    for (long l = 0; l < levels; l++) {
        const long many = level[0], width = level[1], going = level[2];
        const int64_t *place = level + 3, *goes = place + many, *parent = goes + going;
        level = parent + going;
        tree.children(width);
        for (long b = 0; b < B; b++)
            for (long i = 0; i < many; i++) {
                long from = (b * tree.nodes + place[i] / width) * tree.drawn, rank = place[i] % width;
                bool there = rank < tree.drawn;
                tokens[b * N + first + i] = there ? tree.ids[from + rank] : 0;
                logp[b * N + first + i] = there ? tree.likely[from + rank] : -INFINITY;
            }
        if (!going) break;
        for (long r = 0; r < B * going; r++) {
            long node = r / going * N + first + goes[r % going];
            tree.parent[r] = parent[r % going], tree.said[r] = tokens[node], tree.joint[r] = logp[node];
        }
        first += many;
        tree.descend(going);
    }
    return tree.sane;
}

// A dynamic tree: see DynamicShape in decode/tree.py. tokens, parents, logp [B, N]; size [B]: nodes of each, of at most N,
// in the order in which they were drafted; behind them stands nothing.
extern "C" long unfold_dynamic(
    int64_t *tokens, int64_t *parents, float *logp, int64_t *size, const Given *given, long N, long levels, long width,
    float node_cost, float depth_cost, float eps, float scale) {
    const long B = given->B, most = width, all = 1 + width + (levels - 1) * most * width;
    Growth tree(*given, eps, scale, most, most * (levels - 1), width);
    if (!tree.has_room(most * (levels - 1))) return NO_ROOM;
    tree.verified();
    // every node that is drafted, and of the level that gets children, which of those they are
    std::vector<int64_t> word(B * all), from(B * all), index(B * most), order(all), place(all);
    std::vector<float> likely(B * all);
    std::vector<char> going(B, 1);
    for (long b = 0; b < B; b++) word[b * all] = tree.said[b], from[b * all] = -1, likely[b * all] = 0, index[b] = 0;
    long first = 1;
    for (long l = 0; l < levels; l++) {
        tree.children(width);
        const long many = tree.nodes * tree.drawn, best = std::min(width, many);
        for (long b = 0; b < B; b++)
            for (long i = 0; i < many; i++) {
                long node = b * all + first + i, child = b * many + i;
                word[node] = tree.ids[child], likely[node] = tree.likely[child];
                from[node] = index[b * tree.nodes + i / tree.drawn];
            }
        if (l + 1 == levels) {
            first += many;
            break;
        }
        long next = 0;  // of the text that has most: the others have nothing below the rest
        std::vector<int64_t> chosen(B * best);
        std::vector<long> worthy(B);
        for (long b = 0; b < B; b++) {
            const float *mine = &likely[b * all + first];
            for (long i = 0; i < many; i++) order[i] = i;
            std::partial_sort(order.begin(), order.begin() + best, order.begin() + many, [&](long i, long j) {
                return mine[i] > mine[j] || (mine[i] == mine[j] && i < j);
            });
            float promise = 0;
            for (long i = 0; i < best; i++) promise += expf(mine[order[i]]);
            going[b] &= promise >= depth_cost;
            for (long i = 0; i < best; i++) {
                chosen[b * best + i] = order[i];
                if (going[b] && expf(mine[order[i]]) >= node_cost) worthy[b] = i + 1;
            }
            next = std::max(next, worthy[b]);
        }
        if (!next) {
            first += many;
            break;
        }
        for (long b = 0; b < B; b++)
            for (long i = 0; i < next; i++) {
                long r = b * next + i, child = chosen[b * best + i], node = b * all + first + child;
                tree.parent[r] = child / tree.drawn, tree.said[r] = word[node], index[r] = first + child;
                tree.joint[r] = i < worthy[b] ? likely[node] : -INFINITY;
            }
        first += many;
        tree.descend(next);
    }
    for (long b = 0; b < B; b++) {
        const float *mine = &likely[b * all];
        for (long i = 0; i < first; i++) order[i] = i;
        // a node is never likelier than its parent, and of equals the earlier stays: so does a kept node's parent
        std::stable_sort(order.begin(), order.begin() + first, [&](long i, long j) { return mine[i] > mine[j]; });
        long kept = std::min(N, first);
        while (kept > 1 && !(mine[order[kept - 1]] > -INFINITY && expf(mine[order[kept - 1]]) >= node_cost)) kept--;
        std::sort(order.begin(), order.begin() + kept);
        size[b] = kept;
        for (long i = 0; i < N; i++) {
            long node = b * all + order[i];
            bool real = i < kept;
            if (real) place[order[i]] = i;
            tokens[b * N + i] = real ? word[node] : 0;
            parents[b * N + i] = !real ? 0 : i ? place[from[node]] : -1;
            logp[b * N + i] = real ? likely[node] : -INFINITY;
        }
    }
    return tree.sane;
}
#else
extern "C" void unfold() {}
extern "C" void unfold_dynamic() {}
#endif
