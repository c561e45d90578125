/* Generators: an engine with a lock, its state as bytes, and the numbers that other components draw.
 *
 * The bytes of a state are those of PyTorch's CPU generator, little-endian, padding included:
 *
 *        0  u64  seed                  24  u64[624]  words               5040  i32  has a normal number
 *        8  i32  left                5016  f64       0                   5048  f32  0
 *       12  i32  1                   5024  f64       the normal number   5052  u8   0
 *       16  u64  next                5032  f64       0
 */
#include "tensor/random_internal.h"
#include "base/fail.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The seed that PyTorch names as its default. */
#define DEFAULT_SEED UINT64_C(67280421310721)

static td_generator default_generator = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t default_once = PTHREAD_ONCE_INIT;

static void seed_default(void)
{
    td__mt19937_seed(&default_generator.engine, DEFAULT_SEED);
}

td_generator *td_default_generator(void)
{
    pthread_once(&default_once, seed_default);
    return &default_generator;
}

td_generator *td__generator_lock(td_generator *generator)
{
    generator = generator ? generator : td_default_generator();
    pthread_mutex_lock(&generator->lock);
    return generator;
}

void td__generator_unlock(td_generator *generator)
{
    pthread_mutex_unlock(&generator->lock);
}

/* ---- Creation and seeds ---------------------------------------------------------------------- */

td_generator *td_generator_create(uint64_t seed)
{
    td_generator *generator = calloc(1, sizeof *generator);
    if (!generator) {
        td__fail_nomem("td_generator_create");
        return NULL;
    }
    pthread_mutex_init(&generator->lock, NULL);
    td__mt19937_seed(&generator->engine, seed);
    return generator;
}

void td_generator_destroy(td_generator *generator)
{
    if (!generator || generator == &default_generator)
        return;
    pthread_mutex_destroy(&generator->lock);
    free(generator);
}

void td_generator_manual_seed(td_generator *generator, uint64_t seed)
{
    generator = td__generator_lock(generator);
    td__mt19937_seed(&generator->engine, seed);
    generator->has_normal = false;
    td__generator_unlock(generator);
}

void td_manual_seed(uint64_t seed)
{
    td_generator_manual_seed(NULL, seed);
}

uint64_t td_generator_initial_seed(td_generator *generator)
{
    generator = td__generator_lock(generator);
    uint64_t seed = generator->engine.seed;
    td__generator_unlock(generator);
    return seed;
}

/* ---- State ----------------------------------------------------------------------------------- */

enum {
    AT_SEED = 0,
    AT_LEFT = 8,
    AT_SEEDED = 12,
    AT_NEXT = 16,
    AT_WORDS = 24,
    AT_NORMAL = 5024,
    AT_HAS_NORMAL = 5040,
};

static void put(unsigned char *state, int at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        state[at + i] = (unsigned char)(value >> (8 * i));
}

static uint64_t take(const unsigned char *state, int at, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)state[at + i] << (8 * i);
    return value;
}

void td_generator_get_state(td_generator *generator, void *state)
{
    generator = td__generator_lock(generator);
    const struct td__mt19937 *engine = &generator->engine;
    memset(state, 0, TD_GENERATOR_STATE_SIZE);
    put(state, AT_SEED, engine->seed, 8);
    put(state, AT_LEFT, (uint64_t)engine->left, 4);
    put(state, AT_SEEDED, 1, 4);
    put(state, AT_NEXT, (uint64_t)engine->next, 8);
    for (int i = 0; i < TD__MT19937_WORDS; i++)
        put(state, AT_WORDS + 8 * i, engine->words[i], 8);
    if (generator->has_normal) {
        uint64_t bits;
        memcpy(&bits, &generator->normal, sizeof bits);
        put(state, AT_NORMAL, bits, 8);
        put(state, AT_HAS_NORMAL, 1, 4);
    }
    td__generator_unlock(generator);
}

td_status td_generator_set_state(td_generator *generator, const void *state, size_t size)
{
    if (!state || size != TD_GENERATOR_STATE_SIZE)
        return td_fail(TD_ERR_INVALID,
                       "td_generator_set_state: the state of a generator has %d bytes, not %zu",
                       TD_GENERATOR_STATE_SIZE, state ? size : 0);
    uint64_t left = take(state, AT_LEFT, 4), next = take(state, AT_NEXT, 8);
    /* The words from `next` on must suffice for the calls that are left. A new generator has its next word
     * at 0 and one call left. */
    if (take(state, AT_SEEDED, 4) != 1 || left < 1 || left > TD__MT19937_WORDS ||
        next > TD__MT19937_WORDS || left - 1 + next > TD__MT19937_WORDS)
        return td_fail(TD_ERR_INVALID,
                       "td_generator_set_state: these bytes are not the state of a generator: word "
                       "%" PRIu64 " is next and %" PRIu64 " calls are left of %d",
                       next, left, TD__MT19937_WORDS);
    uint64_t bits = take(state, AT_NORMAL, 8);
    generator = td__generator_lock(generator);
    struct td__mt19937 *engine = &generator->engine;
    engine->seed = take(state, AT_SEED, 8);
    engine->left = (int)left;
    engine->next = (int)next;
    for (int i = 0; i < TD__MT19937_WORDS; i++)
        engine->words[i] = (uint32_t)take(state, AT_WORDS + 8 * i, 8);
    generator->has_normal = take(state, AT_HAS_NORMAL, 4) != 0;
    memcpy(&generator->normal, &bits, sizeof bits);
    td__generator_unlock(generator);
    return TD_OK;
}

/* ---- Numbers for other components ------------------------------------------------------------ */

uint32_t td__generator_u32(td_generator *generator)
{
    generator = td__generator_lock(generator);
    uint32_t number = td__mt19937_u32(&generator->engine);
    td__generator_unlock(generator);
    return number;
}

uint64_t td__generator_seed(td_generator *generator)
{
    generator = td__generator_lock(generator);
    uint64_t high = td__mt19937_u32(&generator->engine);
    uint64_t low = td__mt19937_u32(&generator->engine);
    td__generator_unlock(generator);
    return (high << 32 | low) & INT64_MAX;
}

void td__generator_permutation(td_generator *generator, int64_t *numbers, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        numbers[i] = i;
    generator = td__generator_lock(generator);
    for (int64_t i = 0; i < n - 1; i++) {
        int64_t other = i + (int64_t)(td__mt19937_u32(&generator->engine) % (uint64_t)(n - i));
        int64_t number = numbers[i];
        numbers[i] = numbers[other];
        numbers[other] = number;
    }
    td__generator_unlock(generator);
}
