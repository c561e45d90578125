/* All-reduce: every process has a vector, and ends with the sum of all of them.
 *
 *     tdrun --standalone --nproc-per-node=4 ./all_reduce
 *
 * It goes through the store: each rank puts its vector there and takes those of the others. That is
 * how a few numbers are shared; it works with any launcher, and without one the world is of size 1. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 4 };

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "all_reduce: %s\n", td_last_error());
    exit(1);
}

/* Adds up `vector` over all ranks, in rank order: every rank gets the same bits. */
static void all_reduce(td_world *world, double *vector)
{
    char(*names)[32] = calloc((size_t)world->world_size, sizeof *names);
    const char **keys = calloc((size_t)world->world_size, sizeof *keys);
    td_bytes *vectors = calloc((size_t)world->world_size, sizeof *vectors);
    if (!names || !keys || !vectors)
        exit(1);
    for (int rank = 0; rank < world->world_size; rank++) {
        snprintf(names[rank], sizeof names[rank], "vector/%d", rank);
        keys[rank] = names[rank];
    }
    check(td_store_set(world->store, keys[world->rank], vector, COUNT * sizeof *vector));
    check(td_store_multi_get(world->store, keys, (size_t)world->world_size, 0, vectors));
    for (int i = 0; i < COUNT; i++)
        vector[i] = 0;
    for (int rank = 0; rank < world->world_size; rank++) {
        for (int i = 0; i < COUNT; i++)
            vector[i] += ((const double *)vectors[rank].data)[i];
        td_bytes_free(&vectors[rank]);
    }
    free(vectors);
    free(keys);
    free(names);
}

int main(void)
{
    td_world world;
    double vector[COUNT];
    check(td_rendezvous(NULL, NULL, &world));
    for (int i = 0; i < COUNT; i++)
        vector[i] = (world.rank + 1) * (i + 1);

    all_reduce(&world, vector);
    printf("rank %d of %d: the sum is %g %g %g %g\n", world.rank, world.world_size, vector[0],
           vector[1], vector[2], vector[3]);

    double expected = world.world_size * (world.world_size + 1) / 2.0;
    bool right = true;
    for (int i = 0; i < COUNT; i++)
        right = right && vector[i] == expected * (i + 1);
    check(td_world_close(&world));
    if (!right)
        fprintf(stderr, "all_reduce: that is wrong\n");
    return right ? 0 : 1;
}
