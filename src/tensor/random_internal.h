/* Random numbers inside the library: the engine, generators, and the draws of dropout and samplers. */
#ifndef TD_TENSOR_RANDOM_INTERNAL_H
#define TD_TENSOR_RANDOM_INTERNAL_H

#include <tandem/random.h>

#include <pthread.h>

/* ---- The engine (mt19937.c) ------------------------------------------------------------------ */

enum { TD__MT19937_WORDS = 624 };

struct td__mt19937 {
    uint64_t seed;
    int left; /* how many calls until new words are made, 1 … 624 */
    int next; /* the next word; left - 1 of them are still to come from here */
    uint32_t words[TD__MT19937_WORDS];
};

/** Seeds with the lower 32 bits of `seed`. */
void td__mt19937_seed(struct td__mt19937 *engine, uint64_t seed);

/** Seeds with an array of numbers, as Python's random.seed(). `count` is not 0. */
void td__mt19937_seed_array(struct td__mt19937 *engine, const uint32_t *keys, int count);

uint32_t td__mt19937_u32(struct td__mt19937 *engine);

/** The next `count` numbers. */
void td__mt19937_fill(struct td__mt19937 *engine, uint32_t *numbers, int64_t count);

/** The same without the numbers. */
void td__mt19937_skip(struct td__mt19937 *engine, int64_t count);

/* ---- Generators (generator.c) ---------------------------------------------------------------- */

struct td_generator {
    pthread_mutex_t lock; /* protects the rest; innermost */
    td_device *device;    /* NULL: the host */
    bool counts;          /* Philox, of an accelerator; otherwise mt19937 */
    struct td__mt19937 engine;
    bool has_normal; /* `normal` has the second number of a pair */
    double normal;
    uint64_t seed, offset; /* of Philox: the next block */
    td_generator *next;    /* of the default generators of accelerators */
};

/** Locks `generator`, or the host's default one for NULL, and returns it. */
td_generator *td__generator_lock(td_generator *generator);
void td__generator_unlock(td_generator *generator);

/** The generator for a tensor on `device`: for NULL the device's default one. NULL, with an error that names both
 *  devices, where it is that of another device. */
td_generator *td__generator_for(const char *call, td_device *device, td_generator *generator);

/** td_generator_take() for a generator of Philox that is locked. */
void td__generator_advance(td_generator *generator, int64_t words, uint64_t *seed,
                           uint64_t *offset);

/** In a capture, `words` were taken from `generator` at `offset`: *captured is where the kernel finds the seed and the
 *  offset of each launch (captured_draws.c). */
td_status td__capture_draw(td_graph *graph, td_generator *generator, int64_t words, uint64_t seed,
                           uint64_t offset, const uint64_t **captured);

/** The default generators of accelerators that were used: the first for NULL, and the one after `generator`. */
td_generator *td__next_default_generator(const td_generator *generator);

/** The states of all default generators (generator_state.c), for free(); NULL without memory. */
struct td__random_states *td__random_save(void);

/** Restores them. Generators that did not exist then begin at their seed, as they would have. */
void td__random_restore(const struct td__random_states *states);

/** The next number, under the generator's lock; this and the next two: also with Philox, which takes a block for each. */
uint32_t td__generator_u32(td_generator *generator);

/** A number as the seed of another generator: torch.empty((), dtype=torch.int64).random_(). */
uint64_t td__generator_seed(td_generator *generator);

/** Fills `numbers` with those of torch.randperm(n). */
void td__generator_permutation(td_generator *generator, int64_t *numbers, int64_t n);

/**
 * What dropout keeps, where `p` is the probability that it drops an element: 1 or 0 in each byte.
 * The numbers are those of F.dropout() for `n` elements, and of F.dropout2d() where `n` is the number
 * of planes. Nothing is drawn for a `p` of 0 or 1. With Philox: the numbers of td_bernoulli_(), for any `p`.
 */
void td__dropout_mask(td_generator *generator, unsigned char *mask, int64_t n, double p);

/* ---- Normal numbers from uniform ones (random_normal.c) ---------------------------------------
 *
 * In place, in groups of 16 uniform numbers of [0, 1): of each group the first half gives the
 * radius, the second one the angle. `count` is a multiple of 16. */

void td__normal_from_uniform_f32(float *numbers, int64_t count, float mean, float std);
void td__normal_from_uniform_f64(double *numbers, int64_t count, double mean, double std);

#endif
