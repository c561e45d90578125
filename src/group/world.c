/* The world: the group that NULL means in all calls. */
#include "base/fail.h"
#include "base/host.h"
#include "base/option_rules.h"
#include "base/thread.h"
#include "group/process_group.h"
#include "group/root.h"
#include "store/rendezvous_schemes.h"
#include "store/spare.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <string.h>

enum { LINGER_AFTER_FAILURE_MS = 2000 };

/* `life` is held while a world is created or ends, which can take long. `lock` guards the following variables, and is
 * locked last; `world` is read without it: td_destroy_process_group() waits for calls that have begun, and the program
 * must not begin others meanwhile. */
static pthread_mutex_t life = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(td_group *) world;
static td_world rendezvous;       /* if td_rendezvous() opened the store */
static struct td__root *outgrown; /* former worlds, which have grown; see grow.c */

td_group *td__world(void)
{
    return atomic_load_explicit(&world, memory_order_acquire);
}

bool td_is_initialized(void)
{
    return td__world() != NULL;
}

/* TANDEM_JOIN=1: this process starts into a running job, and has no rank until it is admitted. */
static bool wants_to_join(void)
{
    const char *join = td__env("TANDEM_JOIN");
    return join && !strcmp(join, "1");
}

static td_status check_options(const td_init_options *options)
{
    if (options->store && options->init_method)
        return td_fail(TD_ERR_INVALID,
                       "td_init_process_group: a store and an init method (%s) exclude each other",
                       options->init_method);
    if (options->store && options->world_size < 1 && !wants_to_join())
        return td_fail(TD_ERR_INVALID,
                       "td_init_process_group: a store needs the world size and the rank with it; "
                       "the world size is %d",
                       options->world_size);
    TD_TRY(td__check_reserved("td_init_process_group", options->reserved));
    return td__check_kept_timeout("td_init_process_group", "timeout_ms", options->timeout_ms);
}

static td_status rendezvous_and_open(const td_init_options *options, const td_group_options *wanted,
                                     td_world *joined, td_group **group)
{
    td_rendezvous_options where = {.world_size = options->world_size,
                                   .rank = options->rank,
                                   .timeout_ms = options->timeout_ms};
    td__flight_expect(td__rendezvous_expected_rank(options->init_method, &where),
                      options->world_size > 0 ? options->world_size : 0);
    TD_TRY(td_rendezvous(options->init_method, &where, joined));
    td_status status = td__root_open(joined->store, joined->rank, joined->world_size, wanted, true,
                                     group);
    if (status) {
        struct td__error error;
        td__error_save(&error);
        /* Other ranks may wait for this one, so it must not wait for them. */
        td__tcp_store_set_linger(joined->store, LINGER_AFTER_FAILURE_MS);
        td_world_close(joined);
        return td__error_restore(&error);
    }
    return TD_OK;
}

/* In a later round of the job its rendezvous has a part of the store of its own (rendezvous.c). */
static td_status take_part_of(int round, td_store **store)
{
    char prefix[32];
    td_store *part;
    snprintf(prefix, sizeof prefix, "%d.0", round);
    TD_TRY(td_prefix_store_open(prefix, *store, &part));
    td_store_close(*store); /* the part keeps it open */
    *store = part;
    return TD_OK;
}

static td_status open_store(const td_init_options *options, td_store **store)
{
    int round = 0;
    TD_TRY(td_rendezvous_store(options->init_method, 0, store));
    td_status status = td__env_number("TANDEM_ROUND", 0, &round, &(bool){0});
    return status || !round ? status : take_part_of(round, store);
}

static void close_after_failure(td_store *store)
{
    struct td__error error;
    td__error_save(&error);
    td__tcp_store_set_linger(store, LINGER_AFTER_FAILURE_MS);
    td_store_close(store);
    td__error_restore(&error);
}

/* TANDEM_REJOIN=1: this process has been started for one that has ended. It takes that one's place by itself, or, where the
 * members have said so (td__root_welcome()), asks to be admitted like any newcomer. */
static bool is_newcomer(const td_init_options *options, const td_group_options *wanted)
{
    const char *rejoin = td__env("TANDEM_REJOIN");
    td_store *store;
    bool asks = false;
    if (!rejoin || strcmp(rejoin, "1") != 0 || options->store)
        return false;
    struct td__error before;
    td__error_save(&before);
    if (!open_store(options, &store)) {
        if (td__root_asks_newcomers(store, wanted->name, &asks))
            asks = false;
        td_store_close(store);
    }
    td__error_undo(&before);
    return asks;
}

static td_status join_world(const td_init_options *options, const td_group_options *wanted,
                            td_world *joined, td_group **group)
{
    if (options->store)
        return td__root_join(options->store, wanted, true, group);
    td_world found = {.local_rank = -1, .local_world_size = -1};
    td__flight_expect(-1, 0);
    TD_TRY(open_store(options, &found.store));
    td_status status = td__root_join(found.store, wanted, true, group);
    if (status) {
        close_after_failure(found.store);
        return status;
    }
    td__env_number("LOCAL_RANK", 0, &found.local_rank, &(bool){0});
    *joined = found;
    return TD_OK;
}

static td_status open_world(const td_init_options *options, td_world *joined, td_group **group)
{
    td_group_options wanted = {
        .backend = options->backend,
        .timeout_ms = options->timeout_ms,
        .name = options->group_name,
        .backend_options = options->backend_options,
    };
    if (td__backends_check(options->backend))
        return td_fail(td__error_status(), "td_init_process_group: %s", td__error_text());
    if (wants_to_join() || is_newcomer(options, &wanted)) {
        td_status status = join_world(options, &wanted, joined, group);
        td__flight_give_up(status, td__error_text());
        return status;
    }
    if (options->store)
        return td__root_open(options->store, options->rank, options->world_size, &wanted, true,
                             group);
    td_status status = rendezvous_and_open(options, &wanted, joined, group);
    td__flight_give_up(status, td__error_text());
    return status;
}

td_status td_init_process_group(const td_init_options *options)
{
    td_init_options none = {0};
    options = options ? options : &none;
    td_group *group = NULL;
    td_world joined = {0};
    TD_TRY(td__spare_wait());
    pthread_mutex_lock(&life);
    td_group *present = td__world();
    if (present && present->root->generation != td__fork_generation())
        present = NULL; /* it belongs to the parent process */
    td_status status = present
                           ? td_fail(TD_ERR_STATE,
                                     "td_init_process_group: there is a world already (rank %d of "
                                     "%d); call td_destroy_process_group() first",
                                     present->rank, present->size)
                           : check_options(options);
    if (!status)
        status = open_world(options, &joined, &group);
    if (!status) {
        rendezvous = joined;
        atomic_store_explicit(&world, group, memory_order_release);
        td__identity_set(group->rank, group->size);
    }
    pthread_mutex_unlock(&life);
    if (!status)
        td__spare_joined();
    return status;
}

void td__world_outgrow(struct td__root *root, td_group *grown)
{
    pthread_mutex_lock(&lock);
    td_group *group = td__world();
    if (group && group->root == root) {
        root->outgrown = outgrown;
        outgrown = root;
        atomic_store_explicit(&world, grown, memory_order_release);
        if (grown->root->admitted)
            rendezvous.local_world_size = 0; /* not what the launcher said any more */
        td__identity_set(grown->rank, grown->size);
    }
    pthread_mutex_unlock(&lock);
}

void td__world_forget(const struct td__root *root)
{
    pthread_mutex_lock(&lock);
    for (struct td__root **link = &outgrown; *link; link = &(*link)->outgrown)
        if (*link == root) {
            *link = root->outgrown;
            break;
        }
    pthread_mutex_unlock(&lock);
}

static void close_outgrown(struct td__root *next)
{
    while (next) {
        struct td__root *root = next;
        next = root->outgrown;
        if (root->generation == td__fork_generation())
            td__root_close(root->first, &td__ended_world);
    }
}

td_status td_destroy_process_group(void)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&life);
    /* A td_group_grow() that ends after this does not change the world. */
    pthread_mutex_lock(&lock);
    td_group *group = td__world();
    struct td__root *former = outgrown;
    atomic_store(&world, NULL);
    outgrown = NULL;
    pthread_mutex_unlock(&lock);
    if (!group) {
        status = td_fail(TD_ERR_STATE, "td_destroy_process_group: there is no world");
    } else {
        td__identity_set(0, 0);
        if (group->root->generation == td__fork_generation())
            status = td__root_close(group, &td__ended_world);
        close_outgrown(former);
        td_status closed = rendezvous.store ? td_world_close(&rendezvous) : TD_OK;
        status = status ? status : closed;
        rendezvous = (td_world){0};
    }
    pthread_mutex_unlock(&life);
    return status;
}

/* How many ranks below `rank` are on this host. */
static int here_before(const td_group *group, int rank)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    int here = 0, host = td__endpoint_host(endpoint, group->root->rank);
    for (int r = 0; r < rank; r++)
        here += td__endpoint_host(endpoint, r) == host;
    return here;
}

int td_get_local_rank(void)
{
    td_group *group = td__world();
    if (!group)
        return -1;
    return rendezvous.local_rank >= 0 && rendezvous.store ? rendezvous.local_rank
                                                          : here_before(group, group->root->rank);
}

int td_get_local_size(void)
{
    td_group *group = td__world();
    if (!group)
        return -1;
    return rendezvous.local_world_size > 0 && rendezvous.store
               ? rendezvous.local_world_size
               : here_before(group, group->root->size);
}
