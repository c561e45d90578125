/* Worlds; see worlds.h. */
#include "worlds.h"

#include "forks.h"
#include "runner.h"

#include <stdio.h>
#include <string.h>

struct init_url tcp_init_url(void)
{
    struct init_url init;
    snprintf(init.url, sizeof init.url, "tcp://127.0.0.1:%d", reserve_port());
    return init;
}

struct init_url file_init_url(void)
{
    static int count;
    struct init_url init;
    snprintf(init.url, sizeof init.url, "file://%s/meeting-%d", td_test_temp_dir(), count++);
    return init;
}

td_status rendezvous_at(const struct init_url *init, int rank, int world_size, int64_t timeout_ms,
                        td_world *world)
{
    td_rendezvous_options options = {
        .rank = rank, .world_size = world_size, .timeout_ms = timeout_ms};
    return td_rendezvous(init->url, &options, world);
}

bool world_has(const td_world *world, const char *key)
{
    bool there;
    CHECK_OK(td_store_check(world->store, &key, 1, &there));
    return there;
}

void use_world(const td_world *world, int rank, int world_size)
{
    char key[32], text[32];
    CHECK_EQ(world->rank, rank);
    CHECK_EQ(world->world_size, world_size);
    snprintf(key, sizeof key, "key of %d", rank);
    CHECK(!world_has(world, key));

    snprintf(text, sizeof text, "value of %d", rank);
    CHECK_OK(td_store_set(world->store, key, text, strlen(text)));
    for (int other = 0; other < world_size; other++) {
        td_bytes value;
        snprintf(key, sizeof key, "key of %d", other);
        CHECK_OK(td_store_get(world->store, key, 10000 * td_test_slowness(), &value));
        snprintf(text, sizeof text, "value of %d", other);
        CHECK_STR(value.data, text);
        td_bytes_free(&value);
    }
    int64_t sum, keys;
    CHECK_OK(td_store_num_keys(world->store, &keys));
    CHECK(keys == world_size || keys == world_size + 1); /* with "done" */
    CHECK_OK(td_store_add(world->store, "done", 1, &sum));
    CHECK(sum >= 1 && sum <= world_size);
}

void await_all(const td_world *world)
{
    int64_t done = 0;
    CHECK_SOON(!td_store_add(world->store, "done", 0, &done) && done == world->world_size);
}
