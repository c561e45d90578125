/* Stores made of callbacks (td_store_create()): the suite of all stores over complete and minimal tables, what
 * arrives of callbacks that fail, and groups over such stores. */
#include "map_store.h"
#include "runner.h"
#include "store_conformance.h"
#include "store_kinds.h"

#include "base/clock.h"

#include <tandem/group.h>
#include <tandem/rendezvous.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- The suite ------------------------------------------------------------------------------- */

static struct shared_map *suite_map; /* of the test that runs: each is a process of its own */

static td_store *open_fresh(const td_store_ops *ops)
{
    suite_map = shared_map_make();
    td_store *store = map_store_open(ops, suite_map);
    shared_map_release(suite_map); /* the store has its own reference */
    return store;
}

static td_store *open_full(void)
{
    return open_fresh(&map_full_ops);
}

static td_store *open_full_again(void)
{
    return map_store_open(&map_full_ops, suite_map);
}

static td_store *open_minimal(void)
{
    return open_fresh(&map_minimal_ops);
}

static td_store *open_minimal_again(void)
{
    return map_store_open(&map_minimal_ops, suite_map);
}

static td_store *open_serial(void)
{
    return open_fresh(&map_serial_ops);
}

static td_store *open_impatient(void)
{
    return open_fresh(&map_impatient_ops);
}

static td_store *open_prefix_minimal(void)
{
    return open_view_of(open_minimal());
}

static const struct store_factory factories[] = {
    {.name = "full", .open = open_full, .open_again = open_full_again},
    {.name = "minimal", .open = open_minimal, .open_again = open_minimal_again, .minimal = true},
    {.name = "serial", .open = open_serial, .minimal = true},
    {.name = "impatient", .open = open_impatient, .minimal = true},
    {.name = "prefix_minimal", .open = open_prefix_minimal, .minimal = true, .prefix_size = 4},
};

__attribute__((constructor)) static void register_kinds(void)
{
    for (size_t i = 0; i < sizeof factories / sizeof *factories; i++)
        store_conformance_register(&factories[i]);
}

/* ---- The table ------------------------------------------------------------------------------- */

TEST(required_callbacks)
{
    td_store *store = NULL;
    td_store_ops ops = map_minimal_ops;
    CHECK_FAILS(td_store_create(NULL, NULL, &store), TD_ERR_INVALID, "table is NULL");
    CHECK_FAILS(td_store_create(&ops, NULL, NULL), TD_ERR_INVALID, "output is NULL");
    ops.set = NULL;
    CHECK_FAILS(td_store_create(&ops, NULL, &store), TD_ERR_INVALID, "the callback set() is NULL");
    ops = map_minimal_ops;
    ops.get = NULL;
    CHECK_FAILS(td_store_create(&ops, NULL, &store), TD_ERR_INVALID, "the callback get() is NULL");
    ops = map_minimal_ops;
    ops.compare_set = NULL;
    CHECK_FAILS(td_store_create(&ops, NULL, &store), TD_ERR_INVALID, "compare_set() is NULL");
    ops = map_minimal_ops;
    ops.delete_key = NULL;
    CHECK_FAILS(td_store_create(&ops, NULL, &store), TD_ERR_INVALID, "delete_key() is NULL");
    ops = map_minimal_ops;
    ops.reserved[2] = &ops;
    CHECK_FAILS(td_store_create(&ops, NULL, &store), TD_ERR_INVALID,
                "td_store_create: reserved[2]");
    CHECK(store == NULL);
}

TEST(a_store_of_callbacks_is_a_store)
{
    td_store *store = open_full(), *view;
    int64_t count;
    CHECK_EQ(td_tcp_store_port(store), -1);
    CHECK_OK(td_prefix_store_open("p", store, &view));
    CHECK_OK(td_store_close(store)); /* the view keeps it: close() is not called yet */
    store_set_text(view, "k", "v");
    CHECK_OK(td_store_num_keys(view, &count));
    CHECK_EQ(count, 1);
    CHECK_OK(td_store_close(view));

    store = open_minimal();
    CHECK_FAILS(td_store_num_keys(store, &count), TD_ERR_UNSUPPORTED,
                "the own store has no callback num_keys()");
    CHECK_OK(td_store_close(store));
}

/* What fails on the way of a call that succeeds is not the thread's last error. */
TEST(success_leaves_the_last_error)
{
    td_store *store = open_serial();
    const char *keys[] = {"a", "b"};
    bool all;
    td_bytes values[2];
    td_fail(TD_ERR_PEER, "before");
    CHECK_OK(td_store_check(store, keys, 2, &all));
    CHECK_OK(td_store_add(store, "a", 1, NULL));
    CHECK_OK(td_store_append(store, "b", "x", 1));
    CHECK_OK(td_store_multi_get(store, keys, 2, TD_NOW, values));
    CHECK_STR(td_last_error(), "before");
    td_bytes_free(&values[0]);
    td_bytes_free(&values[1]);
    CHECK_OK(td_store_close(store));
}

/* ---- Callbacks that fail --------------------------------------------------------------------- */

/* What the callbacks of `failing_ops` do. */
struct failing {
    td_status status; /* that they return */
    bool explained;   /* by td_fail() */
    int closed;
};

static td_status fail_as_told(void *self, const char *callback)
{
    const struct failing *failing = self;
    if (failing->explained)
        return td_fail(failing->status, "database: %s() is down for maintenance", callback);
    return failing->status;
}

static td_status failing_set(void *self, const char *key, const void *value, size_t size)
{
    (void)key, (void)value, (void)size;
    return fail_as_told(self, "set");
}

static td_status failing_get(void *self, const char *key, int64_t timeout_ms, td_bytes *value)
{
    (void)key, (void)timeout_ms, (void)value;
    return fail_as_told(self, "get");
}

static td_status failing_compare_set(void *self, const char *key, const void *expected,
                                     size_t expected_size, const void *desired, size_t desired_size,
                                     td_bytes *value, bool *stored)
{
    (void)key, (void)expected, (void)expected_size, (void)desired, (void)desired_size;
    (void)value, (void)stored;
    return fail_as_told(self, "compare_set");
}

static td_status failing_delete(void *self, const char *key, bool *deleted)
{
    (void)key, (void)deleted;
    return fail_as_told(self, "delete_key");
}

static td_status failing_close(void *self)
{
    ((struct failing *)self)->closed++;
    return fail_as_told(self, "close");
}

static const td_store_ops failing_ops = {
    .name = "database",
    .set = failing_set,
    .get = failing_get,
    .compare_set = failing_compare_set,
    .delete_key = failing_delete,
    .close = failing_close,
};

/* Each call fails with `status` and a sentence that contains the callback's name in `form`. */
static void check_all_fail(struct failing *failing, td_status status, const char *form)
{
    td_store *store, *view;
    const char *keys[] = {"k", "l"};
    td_bytes values[2] = {{(char *)1, 1}, {(char *)1, 1}};
    int64_t sum = 99;
    bool flag = true;
    char set[128], get[128], compare_set[128], delete_key[128], close[128];
    snprintf(set, sizeof set, form, "set");
    snprintf(get, sizeof get, form, "get");
    snprintf(compare_set, sizeof compare_set, form, "compare_set");
    snprintf(delete_key, sizeof delete_key, form, "delete_key");
    snprintf(close, sizeof close, form, "close");
    CHECK_OK(td_store_create(&failing_ops, failing, &store));
    CHECK_OK(td_prefix_store_open("p", store, &view));
    CHECK_FAILS(td_store_set(store, "k", "v", 1), status, set);
    CHECK_FAILS(td_store_set(view, "k", "v", 1), status, set);
    CHECK_FAILS(td_store_get(store, "k", 60000, values), status, get);
    CHECK_FAILS(td_store_multi_get(view, keys, 2, 60000, values), status, get);
    CHECK_FAILS(td_store_wait(store, keys, 2, 60000), status, get);
    CHECK_FAILS(td_store_check(store, keys, 2, &flag), status, get);
    CHECK_FAILS(td_store_add(store, "k", 1, &sum), status, get);
    CHECK_FAILS(td_store_append(store, "k", "v", 1), status, get);
    CHECK_FAILS(td_store_multi_set(store, keys, (td_bytes[]){{"v", 1}, {"w", 1}}, 2), status, set);
    CHECK_FAILS(td_store_compare_set(store, "k", "", 0, "v", 1, values), status, compare_set);
    CHECK_FAILS(td_store_delete_key(store, "k", &flag), status, delete_key);
    CHECK(values[0].data == (char *)1 && sum == 99 && flag);
    CHECK_OK(td_store_close(store));
    CHECK_EQ(failing->closed, 0);
    CHECK_FAILS(td_store_close(view), status, close);
    CHECK_EQ(failing->closed, 1);
}

TEST(the_sentence_of_a_callback_arrives)
{
    check_all_fail(&(struct failing){.status = TD_ERR_SYSTEM, .explained = true}, TD_ERR_SYSTEM,
                   "database: %s() is down for maintenance");
}

TEST(a_failure_without_a_sentence_gets_one)
{
    td_fail(TD_ERR_PEER, "an old failure"); /* which is not the reason */
    check_all_fail(&(struct failing){.status = TD_ERR_PEER}, TD_ERR_PEER, "database store: %s()");
    CHECK_STR(td_last_error(),
              "database store: close() failed with TD_ERR_PEER, and gave no reason by td_fail()");
    check_all_fail(&(struct failing){.status = (td_status)77}, TD_ERR_INVALID,
                   "database store: %s()");
    CHECK_STR(td_last_error(), "database store: close() returned 77, which is not a td_status");
}

static td_status empty_multi_get(void *self, const char *const *keys, int count, int64_t timeout_ms,
                                 td_bytes *values)
{
    (void)self, (void)timeout_ms;
    CHECK_EQ(count, 2);
    return td_bytes_copy(keys[0], strlen(keys[0]), &values[0]); /* and not the second */
}

TEST(success_without_a_value_is_a_failure)
{
    struct failing failing = {.status = TD_OK};
    td_store_ops ops = failing_ops;
    td_store *store;
    td_bytes values[2] = {{(char *)1, 1}, {(char *)1, 1}};
    ops.multi_get = empty_multi_get;
    CHECK_OK(td_store_create(&ops, &failing, &store));
    CHECK_FAILS(td_store_get(store, "k", 0, values), TD_ERR_INVALID,
                "database store: get() of \"k\" returned TD_OK, but no value");
    CHECK_FAILS(td_store_multi_get(store, (const char *[]){"k", "l"}, 2, 0, values), TD_ERR_INVALID,
                "database store: multi_get() of \"l\" returned TD_OK, but no value");
    CHECK(values[0].data == (char *)1);
    CHECK_OK(td_store_close(store));
}

static td_status late_compare_set(void *self, const char *key, const void *expected,
                                  size_t expected_size, const void *desired, size_t desired_size,
                                  td_bytes *value, bool *stored)
{
    (void)self, (void)key, (void)expected, (void)expected_size, (void)desired, (void)desired_size;
    *stored = false;
    return td_bytes_copy("another value", 13, value);
}

/* A store that always says that another process was faster. */
TEST(a_change_that_never_succeeds_times_out)
{
    td_store_ops ops = map_minimal_ops;
    td_store *store;
    int64_t sum = 99;
    ops.compare_set = late_compare_set;
    CHECK_OK(td_store_create(&ops, shared_map_make(), &store));
    CHECK_OK(td_store_set_timeout(store, 20));
    CHECK_FAILS(td_store_add(store, "k", 1, &sum), TD_ERR_TIMEOUT,
                "other processes changed \"k\" between get() and compare_set()");
    CHECK_FAILS(td_store_append(store, "k", "x", 1), TD_ERR_TIMEOUT, "\"k\"");
    CHECK_EQ(sum, 99);
    CHECK_OK(td_store_close(store));
}

/* ---- Groups over such stores ----------------------------------------------------------------- */

enum { MEMBERS = 3 };

struct member {
    pthread_t thread;
    td_store *store;
    int rank;
};

static void reduce_and_check(td_group *group, int rank, int size)
{
    for (int round = 0; round < 5; round++) {
        float x[100];
        for (int i = 0; i < 100; i++)
            x[i] = (float)(rank + i);
        CHECK_OK(td_group_all_reduce(x, x, 100, TD_F32, TD_SUM, group, NULL));
        for (int i = 0; i < 100; i++)
            CHECK_EQ(x[i], size * (size - 1) / 2 + size * i);
    }
}

static void *be_member(void *arg)
{
    const struct member *member = arg;
    td_group *group, *part;
    CHECK_OK(td_group_open(member->store, member->rank, MEMBERS, NULL, &group));
    reduce_and_check(group, member->rank, MEMBERS);
    CHECK_OK(td_group_split(group, member->rank == 0, 0, NULL, &part));
    reduce_and_check(part, td_get_rank(part), td_get_world_size(part));
    td_group_destroy(group);
    return NULL;
}

static void run_members(const td_store_ops *ops)
{
    struct member members[MEMBERS];
    struct shared_map *map = shared_map_make();
    for (int round = 0; round < 2; round++) {
        for (int r = 0; r < MEMBERS; r++) {
            members[r] = (struct member){.store = map_store_open(ops, map), .rank = r};
            CHECK_EQ(pthread_create(&members[r].thread, NULL, be_member, &members[r]), 0);
        }
        for (int r = 0; r < MEMBERS; r++) {
            pthread_join(members[r].thread, NULL);
            CHECK_OK(td_store_close(members[r].store));
        }
    }
    shared_map_release(map);
}

TEST(threads_form_groups)
{
    run_members(&map_full_ops);
    run_members(&map_minimal_ops);
}

static td_store *open_forwarding(const char *kind)
{
    td_store *store = NULL;
    CHECK_OK(td_store_create(&forwarding_ops, open_of_ranks(kind), &store));
    return store;
}

static void form_world(const char *kind)
{
    td_store *store = open_forwarding(kind);
    int rank = td_test_rank(), size = td_test_size();
    for (int round = 0; round < 2; round++) {
        CHECK_OK(td_init_process_group(
            &(td_init_options){.store = store, .rank = rank, .world_size = size}));
        reduce_and_check(NULL, rank, size);
        td_group *group;
        CHECK_OK(td_new_group((int[]){0, 1}, 2, NULL, &group));
        if (rank < 2)
            reduce_and_check(group, rank, 2);
        CHECK_OK(td_destroy_process_group());
    }
    CHECK_OK(td_store_close(store));
    td_test_barrier();
}

RANKS(processes_form_a_world_over_tcp, .ranks = 3)
{
    form_world("tcp");
}

RANKS(processes_form_a_world_over_a_file, .ranks = 3)
{
    form_world("file");
}

/* A rank that ends before all have joined is named also here: the roster is in the store. */
RANKS(a_rank_that_ends_is_named, .ranks = 3, .may_die = 1 << 2)
{
    int rank = td_test_rank();
    td_init_options options = {.store = open_forwarding("tcp"), .rank = rank, .world_size = 3};
    if (rank == 2) {
        alarm(1); /* ends it while it waits for rank 1 */
        td_init_process_group(&options);
        FAIL("rank 1 never joins");
    }
    if (rank == 1) {
        store_expect_text(options.store, "rank 0 knows", "");
    } else {
        int64_t start = td__now_ns();
        CHECK_FAILS(td_init_process_group(&options), TD_ERR_PEER, "rank 2 (on ");
        CHECK_CONTAINS(td_last_error(), "SIGALRM");
        CHECK_PROMPT(start);
        store_set_text(options.store, "rank 0 knows", "");
    }
    CHECK_OK(td_store_close(options.store));
}

/* ---- Rendezvous ------------------------------------------------------------------------------ */

static td_status meet_by_callbacks(const char *url, const td_rendezvous_options *options, void *arg,
                                   td_world *world)
{
    (void)url;
    world->rank = options->rank;
    world->world_size = options->world_size;
    world->store = open_forwarding(arg);
    return TD_OK;
}

RANKS(a_registered_rendezvous_scheme, .ranks = 3)
{
    int rank = td_test_rank(), size = td_test_size();
    td_world world;
    CHECK_OK(td_register_rendezvous("callbacks", meet_by_callbacks, "tcp"));
    td_rendezvous_options options = {.rank = rank, .world_size = size};
    for (int epoch = 0; epoch < 2; epoch++) { /* the second one is below a prefix */
        CHECK_OK(td_rendezvous("callbacks://", &options, &world));
        CHECK_EQ(world.rank, rank);
        for (int i = 0; i < 4; i++)
            CHECK(!world.reserved[i]);
        count_in(world.store, epoch);
        CHECK_OK(td_world_close(&world));
    }
    CHECK_OK(td_init_process_group(
        &(td_init_options){.init_method = "callbacks://", .rank = rank, .world_size = size}));
    reduce_and_check(NULL, rank, size);
    CHECK_OK(td_destroy_process_group());
    td_test_barrier();
}
