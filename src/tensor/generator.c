/* Generators: an engine with a lock, one default generator for each device, and the numbers that other components
 * draw. The default ones are never freed. */
#include "tensor/philox.h"
#include "tensor/tensor_internal.h"

#include "base/fail.h"

#include <stdlib.h>

/* The seed that PyTorch names as its default. */
#define DEFAULT_SEED UINT64_C(67280421310721)

static td_generator default_generator = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t default_once = PTHREAD_ONCE_INIT;

/* Protects the two below, but for reading the list; outside of the locks of generators. */
static pthread_mutex_t defaults_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t default_seed = DEFAULT_SEED;
static _Atomic(td_generator *) device_defaults;

static void seed_default(void)
{
    td__mt19937_seed(&default_generator.engine, DEFAULT_SEED);
}

static td_generator *host_default(void)
{
    pthread_once(&default_once, seed_default);
    return &default_generator;
}

td_generator *td__generator_lock(td_generator *generator)
{
    generator = generator ? generator : host_default();
    pthread_mutex_lock(&generator->lock);
    return generator;
}

void td__generator_unlock(td_generator *generator)
{
    pthread_mutex_unlock(&generator->lock);
}

/* ---- Creation and seeds ---------------------------------------------------------------------- */

static td_generator *create(const char *call, td_device *device, uint64_t seed)
{
    td_generator *generator = calloc(1, sizeof *generator);
    if (!generator)
        return td__fail_nomem(call), NULL;
    pthread_mutex_init(&generator->lock, NULL);
    generator->device = device;
    generator->counts = !device->is_host;
    td_generator_manual_seed(generator, seed);
    return generator;
}

td_generator *td_generator_create(uint64_t seed, td_device *device)
{
    device = td__use_device("td_generator_create", device);
    device = device ? td__target_of(device) : NULL;
    return device ? create("td_generator_create", device, seed) : NULL;
}

static bool is_default(const td_generator *generator)
{
    if (generator == &default_generator)
        return true;
    const td_generator *other = NULL;
    while ((other = td__next_default_generator(other)))
        if (other == generator)
            return true;
    return false;
}

void td_generator_destroy(td_generator *generator)
{
    if (!generator || is_default(generator))
        return;
    pthread_mutex_destroy(&generator->lock);
    free(generator);
}

void td_generator_manual_seed(td_generator *generator, uint64_t seed)
{
    generator = td__generator_lock(generator);
    if (!generator->counts)
        td__mt19937_seed(&generator->engine, seed);
    generator->has_normal = false;
    generator->seed = seed;
    generator->offset = 0;
    td__generator_unlock(generator);
}

uint64_t td_generator_initial_seed(td_generator *generator)
{
    generator = td__generator_lock(generator);
    uint64_t seed = generator->counts ? generator->seed : generator->engine.seed;
    td__generator_unlock(generator);
    return seed;
}

td_device *td_generator_device(const td_generator *generator)
{
    return generator && generator->device ? generator->device : td__host_device();
}

/* ---- The default ones -------------------------------------------------------------------------- */

td_generator *td__next_default_generator(const td_generator *generator)
{
    return generator ? generator->next
                     : atomic_load_explicit(&device_defaults, memory_order_acquire);
}

static td_generator *find_default(const td_device *device)
{
    td_generator *generator = NULL;
    while ((generator = td__next_default_generator(generator)))
        if (generator->device == device)
            break;
    return generator;
}

td_generator *td_default_generator(td_device *device)
{
    device = td__use_device("td_default_generator", device);
    if (device && td__is_meta(device)) /* opens the target */
        device = td__use_device("td_default_generator", device->target);
    if (!device || device->is_host)
        return device ? host_default() : NULL;
    td_generator *generator = find_default(device);
    if (generator)
        return generator;
    pthread_mutex_lock(&defaults_lock);
    generator = find_default(device);
    if (!generator && (generator = create("td_default_generator", device, default_seed))) {
        generator->next = atomic_load(&device_defaults);
        atomic_store_explicit(&device_defaults, generator, memory_order_release);
    }
    pthread_mutex_unlock(&defaults_lock);
    return generator;
}

void td_manual_seed(uint64_t seed)
{
    pthread_mutex_lock(&defaults_lock);
    default_seed = seed;
    td_generator_manual_seed(NULL, seed);
    td_generator *generator = NULL;
    while ((generator = td__next_default_generator(generator)))
        td_generator_manual_seed(generator, seed);
    pthread_mutex_unlock(&defaults_lock);
}

td_generator *td__generator_for(const char *call, td_device *device, td_generator *generator)
{
    if (!generator)
        return td_default_generator(device);
    td_device *own = td_generator_device(generator);
    device = td__target_of(device);
    if (own == device || (own->is_host && device->is_host))
        return generator;
    td_fail(TD_ERR_INVALID,
            "%s: the tensor is on %s, and the generator is one of %s; create one with "
            "td_generator_create() for %s",
            call, device->name, own->name, device->name);
    return NULL;
}

/* ---- Numbers for other components ------------------------------------------------------------ */

void td__generator_advance(td_generator *generator, int64_t words, uint64_t *seed, uint64_t *offset)
{
    *seed = generator->seed;
    *offset = generator->offset;
    generator->offset += ((uint64_t)words + 3) / 4;
}

static td_status take(td_generator *generator, int64_t words, uint64_t *seed, uint64_t *offset)
{
    if (!generator || !seed || !offset)
        return td__fail_null("td_generator_take");
    if (!generator->counts || words < 0)
        return td_fail(TD_ERR_INVALID,
                       "td_generator_take: %lld words of a generator of %s; only those of "
                       "accelerators have a counter, and a number is not negative",
                       (long long)words, td_generator_device(generator)->name);
    generator = td__generator_lock(generator);
    td__generator_advance(generator, words, seed, offset);
    td__generator_unlock(generator);
    return TD_OK;
}

td_status td_generator_take(td_generator *generator, int64_t words, uint64_t *seed,
                            uint64_t *offset)
{
    if (generator && generator->device && td__capturing(generator->device))
        return td__fail_captured("td_generator_take", "draws numbers that would not change",
                                 generator->device);
    return take(generator, words, seed, offset);
}

td_status td_generator_take_captured(td_generator *generator, int64_t words, uint64_t *seed,
                                     uint64_t *offset, const uint64_t **captured)
{
    if (!captured)
        return td__fail_null("td_generator_take_captured");
    *captured = NULL;
    TD_TRY(take(generator, words, seed, offset));
    td_graph *graph = td__capturing(generator->device);
    return graph ? td__capture_draw(graph, generator, words, *seed, *offset, captured) : TD_OK;
}

/* The next `count` words, of a generator that is locked. */
static void next_words(td_generator *generator, uint32_t *words, int64_t count)
{
    uint64_t seed, offset;
    if (!generator->counts) {
        td__mt19937_fill(&generator->engine, words, count);
        return;
    }
    td__generator_advance(generator, count, &seed, &offset);
    td__philox_words(seed, offset, 0, words, count);
}

uint32_t td__generator_u32(td_generator *generator)
{
    uint32_t word;
    generator = td__generator_lock(generator);
    next_words(generator, &word, 1);
    td__generator_unlock(generator);
    return word;
}

uint64_t td__generator_seed(td_generator *generator)
{
    uint32_t words[2];
    generator = td__generator_lock(generator);
    next_words(generator, words, 2);
    td__generator_unlock(generator);
    return ((uint64_t)words[0] << 32 | words[1]) & INT64_MAX;
}

void td__generator_permutation(td_generator *generator, int64_t *numbers, int64_t n)
{
    uint32_t words[TD__RANDOM_BLOCK];
    for (int64_t i = 0; i < n; i++)
        numbers[i] = i;
    generator = td__generator_lock(generator);
    for (int64_t i = 0; i < n - 1; i++) {
        int64_t at = i % TD__RANDOM_BLOCK, left = n - 1 - i;
        if (at == 0)
            next_words(generator, words, left < TD__RANDOM_BLOCK ? left : TD__RANDOM_BLOCK);
        int64_t other = i + (int64_t)(words[at] % (uint64_t)(n - i));
        int64_t number = numbers[i];
        numbers[i] = numbers[other];
        numbers[other] = number;
    }
    td__generator_unlock(generator);
}
