/* The states of generators as bytes, and those of all default ones.
 *
 * The host's are those of PyTorch's CPU generator, little-endian, padding included:
 *
 *        0  u64  seed                  24  u64[624]  words               5040  i32  has a normal number
 *        8  i32  left                5016  f64       0                   5048  f32  0
 *       12  i32  1                   5024  f64       the normal number   5052  u8   0
 *       16  u64  next                5032  f64       0
 *
 * An accelerator's are its seed and its offset, u64 each. */
#include "tensor/random_internal.h"
#include "base/fail.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    AT_SEED = 0,
    AT_LEFT = 8,
    AT_SEEDED = 12,
    AT_NEXT = 16,
    AT_WORDS = 24,
    AT_NORMAL = 5024,
    AT_HAS_NORMAL = 5040,
    AT_OFFSET = 8, /* of an accelerator's */
    COUNTER_STATE = 16,
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

size_t td_generator_state_size(td_generator *generator)
{
    return generator && generator->counts ? COUNTER_STATE : TD_GENERATOR_STATE_SIZE;
}

static void get_mt19937(const td_generator *generator, unsigned char *state)
{
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
}

static td_status check_state(const char *call, td_generator *generator, const void *state,
                             size_t size)
{
    size_t expected = td_generator_state_size(generator);
    if (state && size == expected)
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: the state of a generator of %s has %zu bytes, not %zu",
                   call, td_device_name(td_generator_device(generator)), expected,
                   state ? size : 0);
}

td_status td_generator_get_state(td_generator *generator, void *state, size_t size)
{
    TD_TRY(check_state("td_generator_get_state", generator, state, size));
    generator = td__generator_lock(generator);
    if (generator->counts) {
        put(state, AT_SEED, generator->seed, 8);
        put(state, AT_OFFSET, generator->offset, 8);
    } else {
        get_mt19937(generator, state);
    }
    td__generator_unlock(generator);
    return TD_OK;
}

static td_status set_mt19937(td_generator *generator, const unsigned char *state)
{
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

td_status td_generator_set_state(td_generator *generator, const void *state, size_t size)
{
    TD_TRY(check_state("td_generator_set_state", generator, state, size));
    if (!generator || !generator->counts)
        return set_mt19937(generator, state);
    td__generator_lock(generator);
    generator->seed = take(state, AT_SEED, 8);
    generator->offset = take(state, AT_OFFSET, 8);
    td__generator_unlock(generator);
    return TD_OK;
}

/* ---- All default generators ---------------------------------------------------------------------- */

struct td__random_states {
    unsigned char host[TD_GENERATOR_STATE_SIZE];
    int count;
    struct {
        td_generator *generator;
        unsigned char state[COUNTER_STATE];
    } devices[];
};

struct td__random_states *td__random_save(void)
{
    int count = 0;
    td_generator *generator = NULL, *first = td__next_default_generator(NULL);
    for (generator = first; generator; generator = td__next_default_generator(generator))
        count++;
    struct td__random_states *states = malloc(sizeof *states +
                                              (size_t)count * sizeof states->devices[0]);
    if (!states)
        return td__fail_nomem("the states of random generators"), NULL;
    states->count = 0;
    td_generator_get_state(NULL, states->host, sizeof states->host);
    for (generator = first; generator; generator = td__next_default_generator(generator)) {
        states->devices[states->count].generator = generator;
        td_generator_get_state(generator, states->devices[states->count++].state, COUNTER_STATE);
    }
    return states;
}

void td__random_restore(const struct td__random_states *states)
{
    td_generator_set_state(NULL, states->host, sizeof states->host);
    td_generator *generator = NULL;
    while ((generator = td__next_default_generator(generator))) {
        int i = 0;
        while (i < states->count && states->devices[i].generator != generator)
            i++;
        if (i < states->count)
            td_generator_set_state(generator, states->devices[i].state, COUNTER_STATE);
        else
            td_generator_manual_seed(generator, td_generator_initial_seed(generator));
    }
}
