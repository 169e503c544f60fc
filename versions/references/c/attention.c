// FlashAttention-2's forward pass in C: a block of Q rows a thread, K and V in tiles, an online softmax, SIMD throughout.
//
//     O = softmax(scale * Q K^T) V, LSE = the logarithm of each row's sum;   q, o (batch, seqlen_q, heads, head_dim),
//     k, v (batch, seqlen_k, heads_k, head_dim), lse (batch, heads, seqlen_q), all contiguous
//
// Every number is a `real`: float, or double where compiled with -Dreal=double. Nothing is rounded to fewer bits.
//
// Both matrix products are C += A B by the same small kernel: 6 rows of C, as wide as 4 vectors, stay in registers while
// rows of B pass by. B is in panels of that width. For S = Q K^T it is K transposed, for O = P V it is V as it is.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef real
#define real float
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#else
#define VECTOR_BYTES 32
#endif

typedef real vector __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef __typeof__(sizeof(real) == 4 ? 0 : 0L) integer;  // as wide as a real
typedef __typeof__((vector){0} < (vector){0}) integers;  // a vector of them

enum {
    lanes = VECTOR_BYTES / sizeof(real),
#if defined(__AVX512F__)
    vectors = 4,  // of a panel: 6 x 4 accumulators, 4 of B and 1 of A fill 32 registers
#else
    vectors = 2,  // 6 x 2, 2 and 1 fill 16
#endif
    panel = lanes * vectors,  // columns of a panel
    group = 6,                // rows of C in registers
    block_m = 96,             // rows of Q that a thread takes at a time
    block_n = 2 * panel,      // keys of a tile
};

typedef struct {
    long batch, num_heads, num_heads_k, seqlen_q, seqlen_k, head_dim;
    int causal;
    double softmax_scale;
} Problem;

static long smaller(long a, long b) { return a < b ? a : b; }
static long larger(long a, long b) { return a > b ? a : b; }
static long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

static real *allocate(long count) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, count * sizeof(real))) abort();
    return memset(memory, 0, count * sizeof(real));
}

// C (6 x panel) += A (6 x depth) B (depth x panel).
static void multiply(real *c, long c_stride, const real *a, long a_stride, const real *b, long depth) {
    vector sum[group][vectors];
    for (int i = 0; i < group; ++i)
        for (int v = 0; v < vectors; ++v) sum[i][v] = ((const vector *)(c + i * c_stride))[v];
    for (long k = 0; k < depth; ++k)
        for (int i = 0; i < group; ++i)
            for (int v = 0; v < vectors; ++v) sum[i][v] += a[i * a_stride + k] * ((const vector *)(b + k * panel))[v];
    for (int i = 0; i < group; ++i)
        for (int v = 0; v < vectors; ++v) ((vector *)(c + i * c_stride))[v] = sum[i][v];
}

static vector all(real x) { return x - (vector){0}; }

// e^x for x <= 0: 2^n e^r with r = x - n log(2), |r| <= log(2)/2, where a Taylor series of so many terms is exact to the
// last bits. What is below the smallest normal number is 0.
static vector exponential(vector x) {
    const int terms = sizeof(real) == 4 ? 7 : 13, mantissa = sizeof(real) == 4 ? 23 : 52;
    const integer bias = sizeof(real) == 4 ? 127 : 1023;
    const real shift = 1.5 * ((integer)1 << mantissa);  // adding it leaves a whole number in the low bits
    const integers is_normal = x > all((real)((1 - bias) * M_LN2));

    const vector shifted = x * (real)M_LOG2E + shift, n = shifted - shift;
    const real log2_high = sizeof(real) == 4 ? 0x1.62e4p-1 : 0x1.62e42fefp-1;  // n times it is exact
    const vector r = (x - n * log2_high) - n * (real)(M_LN2 - log2_high);
    vector sum = all(1);
    for (int i = terms; i > 0; --i) sum = sum * r * (real)(1.0 / i) + 1;
    const integers power = ((integers)shifted << mantissa) + (integers)sum;
    return (vector)(power & is_normal);
}

static vector maximum(vector a, vector b) {
    const integers a_wins = a > b;
    return (vector)(((integers)a & a_wins) | ((integers)b & ~a_wins));
}

static real largest(vector x) {
    real result = x[0];
    for (int i = 1; i < lanes; ++i) result = x[i] > result ? x[i] : result;
    return result;
}

static real total(vector x) {
    real result = 0;
    for (int i = 0; i < lanes; ++i) result += x[i];
    return result;
}

// One head of K and V in panels, for every row of Q: K transposed, [key / panel][column][key % panel], and V,
// [tile][column / panel][key % block_n][column % panel]; zeros where there is nothing.
typedef struct {
    real *k, *v;
    long width;  // columns of V and O, in whole panels
} Packed;

static void pack_tile(Packed to, const real *k, const real *v, long row_stride, const Problem *p, long tile) {
    const long first = tile * block_n, keys = smaller(block_n, p->seqlen_k - first);
    real *k_tile = to.k + first * p->head_dim, *v_tile = to.v + first * to.width;
    for (long j = 0; j < block_n; ++j)
        for (long c = 0; c < p->head_dim; ++c)
            k_tile[(j / panel * p->head_dim + c) * panel + j % panel] = j < keys ? k[(first + j) * row_stride + c] : 0;
    for (long j = 0; j < block_n; ++j)
        for (long c = 0; c < to.width; ++c)
            v_tile[(c / panel * block_n + j) * panel + c % panel] =
                j < keys && c < p->head_dim ? v[(first + j) * row_stride + c] : 0;
}

// What a thread works in.
typedef struct {
    real *q;             // block_m x head_dim
    real *s;             // block_m x block_n: S, then P
    real *o;             // block_m x width
    real *m, *l;         // of block_m rows
} Scratch;

// One row of a tile of S becomes P = e^(S - m); l and O follow the new maximum. Keys from `seen` on are masked.
static void softmax_row(Scratch *t, long i, long seen, long width) {
    real *s = t->s + i * block_n, *o = t->o + i * width;
    for (long j = larger(seen, 0); j < block_n; ++j) s[j] = -INFINITY;
    if (seen <= 0) {
        memset(s, 0, block_n * sizeof(real));
        return;
    }
    vector high = *(vector *)s;
    for (long j = lanes; j < block_n; j += lanes) high = maximum(high, *(vector *)(s + j));
    const real m = fmax(t->m[i], largest(high));
    vector sum = {0};
    for (long j = 0; j < block_n; j += lanes) {
        vector *x = (vector *)(s + j);
        *x = exponential(*x - m);
        sum += *x;
    }
    if (m > t->m[i]) {
        const real rescale = exponential(all(t->m[i] - m))[0];
        t->l[i] *= rescale;
        for (long c = 0; c < width; c += lanes) *(vector *)(o + c) *= rescale;
        t->m[i] = m;
    }
    t->l[i] += total(sum);
}

static void query_block(Scratch *t, const Problem *p, Packed kv, const real *q, real *o, real *lse, long first_row) {
    const long d = p->head_dim, row_stride = p->num_heads * d, shift = p->seqlen_k - p->seqlen_q;
    const long rows = smaller(block_m, p->seqlen_q - first_row);
    const long keys = p->causal ? smaller(p->seqlen_k, first_row + rows + shift) : p->seqlen_k;

    memset(t->q, 0, block_m * d * sizeof(real));
    memset(t->o, 0, block_m * kv.width * sizeof(real));
    for (long i = 0; i < rows; ++i) {
        for (long c = 0; c < d; ++c) t->q[i * d + c] = q[(first_row + i) * row_stride + c] * (real)p->softmax_scale;
        t->m[i] = -INFINITY;
        t->l[i] = 0;
    }

    for (long first_key = 0; first_key < keys; first_key += block_n) {
        // S = scale * Q K^T
        memset(t->s, 0, block_m * block_n * sizeof(real));
        for (long j = 0; j < block_n; j += panel)
            for (long i = 0; i < rows; i += group)
                multiply(t->s + i * block_n + j, block_n, t->q + i * d, d, kv.k + (first_key + j) * d, d);

        // P = e^(S - m)
        for (long i = 0; i < rows; ++i) {
            const long seen = p->causal ? smaller(p->seqlen_k, first_row + i + shift + 1) : p->seqlen_k;
            softmax_row(t, i, seen - first_key, kv.width);
        }

        // O += P V
        for (long c = 0; c < kv.width; c += panel)
            for (long i = 0; i < rows; i += group)
                multiply(t->o + i * kv.width + c, kv.width, t->s + i * block_n, block_n,
                         kv.v + first_key * kv.width + c * block_n, block_n);
    }

    for (long i = 0; i < rows; ++i) {
        const real inverse = t->l[i] > 0 ? 1 / t->l[i] : 0;
        for (long c = 0; c < d; ++c) o[(first_row + i) * row_stride + c] = t->o[i * kv.width + c] * inverse;
        lse[first_row + i] = t->m[i] + log(t->l[i]);
    }
}

void attention_forward(const Problem *p, int threads, const real *q, const real *k, const real *v, real *o, real *lse) {
    const long d = p->head_dim, heads_per_k = p->num_heads / p->num_heads_k;
    const long tiles = round_up(p->seqlen_k, block_n) / block_n, blocks = round_up(p->seqlen_q, block_m) / block_m;
    Packed kv = {.width = round_up(d, panel)};
    kv.k = allocate(tiles * block_n * d);
    kv.v = allocate(tiles * block_n * kv.width);
#pragma omp parallel num_threads(threads)
    {
        Scratch t = {allocate(block_m * d), allocate(block_m * block_n), allocate(block_m * kv.width),
                     allocate(block_m), allocate(block_m)};
        for (long head_k = 0; head_k < p->batch * p->num_heads_k; ++head_k) {
            const long b = head_k / p->num_heads_k, h_k = head_k % p->num_heads_k;
            const long kv_start = (b * p->seqlen_k * p->num_heads_k + h_k) * d;
#pragma omp for
            for (long tile = 0; tile < tiles; ++tile)
                pack_tile(kv, k + kv_start, v + kv_start, p->num_heads_k * d, p, tile);

            // The last rows first: under a causal mask they take longest.
#pragma omp for schedule(dynamic)
            for (long task = heads_per_k * blocks - 1; task >= 0; --task) {
                const long h = h_k * heads_per_k + task % heads_per_k;
                const long q_start = (b * p->seqlen_q * p->num_heads + h) * d;
                query_block(&t, p, kv, q + q_start, o + q_start, lse + (b * p->num_heads + h) * p->seqlen_q,
                            task / heads_per_k * block_m);
            }
        }
        free(t.q), free(t.s), free(t.o), free(t.m), free(t.l);
    }
    free(kv.k), free(kv.v);
}
