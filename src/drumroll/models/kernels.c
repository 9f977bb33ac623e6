/* The inner loops of generation on a CPU; `kernels.py` compiles them for the machine at hand, once for each dtype.
 *
 * Written with the vector types that GCC and Clang share, eight floats wide. Threads are those of OpenMP, as torch's are.
 * Every row is computed by itself and always in the same order: its result does not depend on its neighbours.
 */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { WIDTH = 8, MOST_GROUP = 8, MOST_DIM = 256, SPAN = 128 };
typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef float loose __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

INLINE vec get(const float *p) { return *(const loose *)p; }
INLINE void put(float *p, vec x) { *(loose *)p = x; }
INLINE float sum(vec x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* e to the power of numbers that are not positive, to 2e-7 of the value: 2^n · e^r with |r| ≤ ln 2 / 2. */
INLINE vec power(vec x) {
    const ints small = x < -87.0f;
    x = (vec)(((ints)x & ~small) | ((ints)((vec){0} - 87.0f) & small));
    const vec n = __builtin_convertvector(__builtin_convertvector(x * 1.44269504f - 0.5f, ints), vec);
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = 1.3981999507e-3f + r * 1.9875691500e-4f;
    p = 8.3334519073e-3f + r * p;
    p = 4.1665795894e-2f + r * p;
    p = 1.6666665459e-1f + r * p;
    p = 5.0000001201e-1f + r * p;
    p = 1.0f + r + r * r * p;
    return (vec)((ints)p + (__builtin_convertvector(n, ints) << 23));
}

INLINE vec highest(vec a, vec b) {
    const ints more = b > a;
    return (vec)(((ints)a & ~more) | ((ints)b & more));
}

#ifdef BFLOAT16
typedef uint16_t num;
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));
INLINE vec load(const num *p) { return (vec)(__builtin_convertvector(*(const halves *)p, bits) << 16); }
INLINE void store(num *p, vec x) { /* to the nearest, ties to even */
    bits b = (bits)x;
    *(halves *)p = __builtin_convertvector((b + 0x7fff + ((b >> 16) & 1)) >> 16, halves);
}
#else
typedef float num;
INLINE vec load(const num *p) { return get(p); }
INLINE void store(num *p, vec x) { put(p, x); }
#endif

/* Where rows find their keys and values: `pages` of `size` tokens for each of the `heads`. */
typedef struct {
    num *keys, *values;
    int64_t heads, size, dim;
    const int64_t *first;                    /* of each row its first read, and one more at the end */
    const int64_t *pages, *counts, *starts;  /* of each read its page, the tokens seen of it, the position of the first */
    const int64_t *positions;                /* of each row its new token */
    const int64_t *at_pages, *at_offsets;    /* of each row where its new token is kept */
    int64_t window;                          /* a token sees so many, itself included; 0: all */
    float scale;
} Paged;

/* What is seen so far by the query heads that share a head of keys: relative to their highest scores. */
typedef struct {
    float peak[MOST_GROUP], mass[MOST_GROUP], seen[MOST_GROUP][MOST_DIM];
} Sight;

/* Look at `count` more tokens, at most SPAN, with G query heads. */
INLINE void look(Sight *s, const float *q, const num *k, const num *v, int64_t count, int64_t dim, float scale, const int64_t G) {
    float odds[MOST_GROUP][SPAN + WIDTH], top[MOST_GROUP];
    for (int64_t g = 0; g < G; g++) top[g] = s->peak[g];
    for (int64_t t = 0; t < count; t++) {
        vec dot[MOST_GROUP];
        for (int64_t g = 0; g < G; g++) dot[g] = (vec){0};
        for (int64_t c = 0; c < dim; c += WIDTH) {
            const vec key = load(k + t * dim + c);
            for (int64_t g = 0; g < G; g++) dot[g] += key * get(q + g * dim + c);
        }
        for (int64_t g = 0; g < G; g++) {
            const float score = odds[g][t] = sum(dot[g]) * scale;
            top[g] = score > top[g] ? score : top[g];
        }
    }
    for (int64_t g = 0; g < G; g++) {
        const vec fade = power((vec){0} + s->peak[g] - top[g]);
        if (fade[0] < 1)
            for (int64_t c = 0; c < dim; c += WIDTH) put(s->seen[g] + c, get(s->seen[g] + c) * fade);
        s->mass[g] *= fade[0], s->peak[g] = top[g];
        for (int64_t t = count; t % WIDTH; t++) odds[g][t] = top[g];
        for (int64_t t = 0; t < count; t += WIDTH) put(odds[g] + t, power(get(odds[g] + t) - top[g]));
        for (int64_t t = 0; t < count; t++) s->mass[g] += odds[g][t];
    }
    for (int64_t c = 0; c < dim; c += WIDTH) {
        vec more[MOST_GROUP];
        for (int64_t g = 0; g < G; g++) more[g] = get(s->seen[g] + c);
        for (int64_t t = 0; t < count; t++) {
            const vec value = load(v + t * dim + c);
            for (int64_t g = 0; g < G; g++) more[g] += value * odds[g][t];
        }
        for (int64_t g = 0; g < G; g++) put(s->seen[g] + c, more[g]);
    }
}

/* All that one row sees with one head of keys. */
INLINE void attend(const Paged *x, int64_t row, int64_t head, const float *q, num *out, const int64_t G) {
    Sight s;
    const int64_t dim = x->dim;
    for (int64_t g = 0; g < G; g++) {
        s.peak[g] = -1e30f, s.mass[g] = 0;
        memset(s.seen[g], 0, dim * sizeof(float));
    }
    for (int64_t i = x->first[row]; i < x->first[row + 1]; i++) {
        const int64_t place = (x->pages[i] * x->heads + head) * x->size * dim;
        int64_t from = x->window ? x->positions[row] - x->starts[i] - x->window + 1 : 0;
        for (from = from < 0 ? 0 : from; from < x->counts[i]; from += SPAN) {
            const int64_t left = x->counts[i] - from, at = place + from * dim;
            look(&s, q, x->keys + at, x->values + at, left < SPAN ? left : SPAN, dim, x->scale, G);
        }
    }
    for (int64_t g = 0; g < G; g++) {
        const float share = s.mass[g] > 0 ? 1 / s.mass[g] : 0; /* a row that reads nothing gets nothing */
        for (int64_t c = 0; c < dim; c += WIDTH) store(out + g * dim + c, get(s.seen[g] + c) * share);
    }
}

/* One new token for each row: its key and value are kept, and it attends to what the row reads.
 * q and out [rows, heads * group, dim], k and v [rows, heads, dim]; `steps`: how far apart their rows and heads lie. */
void decode(const Paged *x, const num *q, const num *k, const num *v, num *out, const int64_t *steps, int64_t rows,
            int64_t group, int64_t threads) {
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < x->heads; head++) {
            const int64_t dim = x->dim, place = (x->at_pages[row] * x->heads + head) * x->size + x->at_offsets[row];
            memcpy(x->keys + place * dim, k + row * steps[2] + head * steps[3], dim * sizeof(num));
            memcpy(x->values + place * dim, v + row * steps[4] + head * steps[5], dim * sizeof(num));
            float ask[MOST_GROUP * MOST_DIM];
            for (int64_t g = 0; g < group; g++)
                for (int64_t c = 0; c < dim; c += WIDTH)
                    put(ask + g * dim + c, load(q + row * steps[0] + (head * group + g) * steps[1] + c));
            num *to = out + (row * x->heads + head) * group * dim;
            switch (group) {
            case 1: attend(x, row, head, ask, to, 1); break;
            case 2: attend(x, row, head, ask, to, 2); break;
            case 3: attend(x, row, head, ask, to, 3); break;
            case 4: attend(x, row, head, ask, to, 4); break;
            default: attend(x, row, head, ask, to, group);
            }
        }
}

/* The highest of each row's logits times its scale, and the sums of e^(scaled - highest) over blocks of the vocabulary. */
void masses(const num *logits, int64_t step, const float *scale, float *peaks, float *sums, int64_t rows, int64_t vocabulary,
            int64_t block, int64_t threads) {
    const int64_t whole = vocabulary / WIDTH * WIDTH, blocks = (vocabulary + block - 1) / block;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const num *x = logits + row * step;
        vec high = (vec){0} - 1e30f, tail = high;
        for (int64_t i = 0; i < whole; i += WIDTH) high = highest(high, load(x + i) * scale[row]);
        if (whole < vocabulary) {
            num last[WIDTH];
            for (int64_t i = 0; i < WIDTH; i++) last[i] = x[whole + i < vocabulary ? whole + i : whole];
            tail = load(last) * scale[row];
            high = highest(high, tail);
        }
        float peak = high[0];
        for (int64_t i = 1; i < WIDTH; i++) peak = high[i] > peak ? high[i] : peak;
        peaks[row] = peak;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t end = (b + 1) * block < whole ? (b + 1) * block : whole;
            vec mass = {0};
            for (int64_t i = b * block; i < end; i += WIDTH) mass += power(load(x + i) * scale[row] - peak);
            sums[row * blocks + b] = sum(mass);
        }
        tail = power(tail - peak);
        for (int64_t i = whole; i < vocabulary; i++) sums[row * blocks + blocks - 1] += tail[i - whole];
    }
}

/* Each row divided by the root of its mean square (and epsilon), times the weight. `width` is a multiple of WIDTH. */
void rms_norm(const num *x, const num *weight, float epsilon, num *out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > 1 << 14)
    for (int64_t row = 0; row < rows; row++) {
        const num *from = x + row * width;
        vec squares = {0};
        for (int64_t i = 0; i < width; i += WIDTH) squares += load(from + i) * load(from + i);
        const float share = 1 / __builtin_sqrtf(sum(squares) / width + epsilon);
        for (int64_t i = 0; i < width; i += WIDTH) store(out + row * width + i, load(from + i) * share * load(weight + i));
    }
}
