/* Random numbers of graphs (td_graph_capture()). A launch draws from where the generator is, and advances it as the
 * function did when it was captured. A draw is noted by its distance from the first one: a checkpointed part of a network
 * (td_checkpoint()) draws its numbers twice, since it sets the generator back. */
#include "tensor/tensor_internal.h"

#include "base/fail.h"
#include "tensor/random_internal.h"

#include <stdlib.h>

/* A generator in a graph. */
struct drawn {
    td_generator *generator;
    uint64_t first;        /* its offset before the first draw */
    uint64_t blocks;       /* that a launch takes */
    uint64_t seed, offset; /* where the present launch begins */
};

struct draw {
    struct drawn *from;
    uint64_t distance;
};

static td_status begin_draws(void *arg, void *values)
{
    (void)values;
    struct drawn *drawn = arg;
    td_generator *generator = td__generator_lock(drawn->generator);
    drawn->seed = generator->seed;
    drawn->offset = generator->offset;
    generator->offset += drawn->blocks;
    td__generator_unlock(generator);
    return TD_OK;
}

static td_status refresh_draw(void *arg, void *values)
{
    const struct draw *draw = arg;
    uint64_t *words = values;
    words[0] = draw->from->seed;
    words[1] = draw->from->offset + draw->distance;
    return TD_OK;
}

static bool is_of(const void *drawn, const void *generator)
{
    return ((const struct drawn *)drawn)->generator == generator;
}

static struct drawn *find_drawn(td_graph *graph, td_generator *generator, uint64_t offset)
{
    struct drawn *drawn = td__graph_find(graph, begin_draws, is_of, generator);
    if (drawn)
        return drawn;
    drawn = malloc(sizeof *drawn);
    if (!drawn)
        return td__fail_nomem("td_graph_capture"), NULL;
    *drawn = (struct drawn){.generator = generator, .first = offset};
    return td__graph_values(graph, NULL, 0, begin_draws, drawn, NULL) ? NULL : drawn;
}

td_status td__capture_draw(td_graph *graph, td_generator *generator, int64_t words, uint64_t seed,
                           uint64_t offset, const uint64_t **captured)
{
    struct drawn *drawn = find_drawn(graph, generator, offset);
    struct draw *draw = drawn ? malloc(sizeof *draw) : NULL;
    if (!draw)
        return drawn ? td__fail_nomem("td_graph_capture") : td__error_status();
    *draw = (struct draw){.from = drawn, .distance = offset - drawn->first};
    uint64_t end = draw->distance + ((uint64_t)words + 3) / 4;
    if (end > drawn->blocks)
        drawn->blocks = end;
    const uint64_t values[2] = {seed, offset};
    const void *address;
    TD_TRY(td__graph_values(graph, values, sizeof values, refresh_draw, draw, &address));
    *captured = address;
    return TD_OK;
}
