/* Opening and closing a root: the ranks that share a store exchange the addresses of their endpoints
 * (address_exchange.c). */
#include "group/root.h"

#include "base/auth.h"
#include "base/fail.h"
#include "base/thread.h"
#include "fault/call_history.h"
#include "fault/peer_query.h"
#include "os/address.h"
#include "os/socket.h"
#include "reduce/reduce_method.h"
#include "store/store_ops.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool wants_sharing(const td_group_options *options)
{
    const char *variable = getenv("TANDEM_TRANSPORT");
    const char *extra = options->backend_options;
    return !(variable && !strcmp(variable, "tcp")) && !td__backends_have_tcp(options->backend) &&
           !(extra && strstr(extra, "transport=tcp"));
}

static td_status check_transport(void)
{
    const char *variable = getenv("TANDEM_TRANSPORT");
    if (!variable || !*variable || !strcmp(variable, "tcp") || !strcmp(variable, "shm") ||
        !strcmp(variable, "auto"))
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "TANDEM_TRANSPORT is \"%s\"; it can be tcp (no shared memory), shm or auto",
                   variable);
}

void td__grown_key(const char *name, int64_t epoch, int rank, char key[TD__ROOT_KEY])
{
    snprintf(key, TD__ROOT_KEY, "\1grown/%.80s/%lld/%d", name, (long long)epoch, rank);
}

void td__root_free(struct td__root *root, td_status status)
{
    td__recorder_left(root, status);
    td__root_detach(root);
    if (root->endpoint)
        td__endpoint_close(root->endpoint);
    if (root->flight)
        td__flight_close(root->flight); /* after the endpoint: no rank queries it any more */
    td_store_close(root->store);
    td__root_forget_names(root);
    td__abort_forget(root);
    td__barrier_forget(root);
    td__call_history_forget(root);
    pthread_mutex_destroy(&root->lock);
    for (int r = 0; root->cards && r < root->size; r++)
        td_bytes_free(&root->cards[r]);
    free(root->cards);
    free(root->name);
    free(root->backend);
    free(root->backend_options);
    free(root);
}

td_status td__root_make(td_store *store, int rank, int size, const td_group_options *options,
                        struct td__root **root_out)
{
    char host[64];
    struct td__root *root = calloc(1, sizeof *root);
    if (!root)
        return td__fail_nomem("group");
    pthread_mutex_init(&root->lock, NULL);
    root->rank = rank;
    root->size = size;
    root->given = store;
    root->cards = calloc((size_t)size, sizeof *root->cards);
    root->generation = td__fork_generation();
    root->timeout_ms = options->timeout_ms ? options->timeout_ms : TD_GROUP_DEFAULT_TIMEOUT_MS;
    root->name = strdup(options->name ? options->name : "world");
    root->named = options->name != NULL;
    root->backend = options->backend ? strdup(options->backend) : NULL;
    root->backend_options = options->backend_options ? strdup(options->backend_options) : NULL;
    td_status status = TD_OK;
    if (!root->cards || !root->name || (options->backend && !root->backend) ||
        (options->backend_options && !root->backend_options))
        status = td__fail_nomem("group");
    if (!status)
        status = td__flight_open(root->rank, root->size, &root->flight);
    if (!status)
        status = td_prefix_store_open("\1tandem", store, &root->store);
    if (!status) {
        td__own_address(store, host);
        status = td__endpoint_open(rank, size, host, wants_sharing(options), &root->endpoint);
    }
    if (status) {
        td__root_free(root, status);
        return status;
    }
    *root_out = root;
    return TD_OK;
}

/* A world other than the process's has a tag: a hash of its cards, which are the same on all its ranks, and differ from
 * those of other worlds. */
static void set_tag(struct td__root *root)
{
    uint64_t value = TD__HASH_START;
    for (int r = 0; r < root->size; r++)
        value = td__hash(value, root->cards[r].data, root->cards[r].size);
    snprintf(root->tag, sizeof root->tag, "@%06x", (unsigned)(value >> 40));
}

/* Whether this rank has rejoined a world that others have grown. */
static void find_growth(struct td__root *root)
{
    char key[TD__ROOT_KEY];
    if (root->epoch <= 1)
        return;
    td__grown_key(root->name, root->epoch, root->rank, key);
    if (td_store_delete_key(root->store, key, &root->grown))
        root->grown = false; /* only the name depends on it */
}

td_status td__root_begin(struct td__root *root, td_group **group_out)
{
    char name[TD__ROOT_KEY];
    td_group_options options = {.name = name};
    td_group *group;
    int *ranks = malloc(sizeof *ranks * (size_t)root->size);
    if (!ranks) {
        td__root_free(root, TD_ERR_NOMEM);
        return td__fail_nomem("group");
    }
    if (!root->world || root->grown)
        set_tag(root);
    snprintf(name, sizeof name, "%.140s%s", root->name, root->named ? "" : root->tag);
    for (int r = 0; r < root->size; r++)
        ranks[r] = r;
    td_status status = td__group_add(root, ranks, root->size, NULL, &options, &group);
    free(ranks);
    if (status) {
        td__root_free(root, status);
        return status;
    }
    group->named = root->named;
    td__flight_set_phase(root->flight, TD__FLIGHT_JOINED);
    status = td__peer_query_begin(root);
    if (status) {
        td__root_close(group, NULL);
        return status;
    }
    *group_out = group;
    return TD_OK;
}

/* Sets this rank's card in the root's store, and passes the cards of all ranks to the endpoint. */
static td_status exchange_cards(struct td__root *root)
{
    struct td__buffer card = {0};
    struct td__address_exchange exchange = {
        .store = root->store,
        .given = root->given,
        .name = root->name,
        .kind = "group",
        .calls = "td_init_process_group() or td_group_open()",
        .rank = root->rank,
        .size = root->size,
        .timeout_ms = root->timeout_ms,
    };
    td__endpoint_card(root->endpoint, &card);
    td_status status = card.failed
                           ? td__fail_nomem("group")
                           : td__exchange_addresses(&exchange, card.data, card.size, root->cards);
    td__buffer_free(&card);
    root->epoch = exchange.epoch;
    return status ? status : td__endpoint_connect_all(root->endpoint, root->cards);
}

td_status td__root_check_environment(void)
{
    TD_TRY(check_transport());
    TD_TRY(td__reduce_methods_read());
    TD_TRY(td__heartbeat_read());
    return td__stall_limit(&(int64_t){0});
}

td_status td__root_open(td_store *store, int rank, int size, const td_group_options *options,
                        bool world, td_group **group_out)
{
    struct td__root *root;
    if (size < 1 || rank < 0 || rank >= size)
        return td_fail(TD_ERR_INVALID, "td_group_open: rank %d of %d: ranks are 0 to size-1", rank,
                       size);
    TD_TRY(td__root_check_environment());
    TD_TRY(td__root_make(store, rank, size, options, &root));
    root->world = world;
    td_status status = exchange_cards(root);
    if (status) {
        td__root_free(root, status);
        return status;
    }
    find_growth(root);
    return td__root_begin(root, group_out);
}

td_status td_group_open(td_store *store, int rank, int size, const td_group_options *options,
                        td_group **group_out)
{
    td_group_options none = {0};
    options = options ? options : &none;
    if (!store || !group_out)
        return td_fail(TD_ERR_INVALID, "td_group_open: the %s is NULL", store ? "result" : "store");
    TD_TRY(td__check_group_options("td_group_open", options, NULL));
    return td__root_open(store, rank, size, options, false, group_out);
}

static td_group *last_added(struct td__root *root)
{
    pthread_mutex_lock(&root->lock);
    td_group *group = LIST_NEXT(root->first, link);
    pthread_mutex_unlock(&root->lock);
    return group;
}

/* Verifies all groups before any of them is destroyed: other ranks may still query them. Saves the first failure. */
static td_status verify_groups(struct td__root *root, struct td__error *error)
{
    td__deadline deadline = td__deadline_in_ms(TD__VERIFY_MS);
    td_status first = TD_OK;
    td_group *group;
    LIST_FOREACH (group, &root->groups, link) {
        td_status status = td__group_verify(group, deadline);
        if (status && !first) {
            first = status;
            td__error_save(error);
        }
    }
    return first;
}

static void end_groups(struct td__root *root, struct td__root *ended)
{
    td_group *group;
    while ((group = last_added(root)))
        td__group_end(group, ended);
}

void td__root_discard(td_group *first)
{
    struct td__root *root = first->root;
    struct td__error error;
    td__error_save(&error);
    root->discarded = true;
    end_groups(root, NULL);
    td__root_leave(root);
    td__peer_query_end(root);
    root->first = NULL;
    td__group_end(first, NULL);
    td__root_free(root, TD_OK);
    td__error_undo(&error);
}

td_status td__root_close(td_group *first, struct td__root *ended)
{
    struct td__root *root = first->root;
    struct td__error error;
    td__flight_set_phase(root->flight, TD__FLIGHT_LEAVING);
    td__group_drain(first); /* a call on it may make another group */
    td_status status = verify_groups(root, &error);
    end_groups(root, ended);
    td__root_leave(root);
    td__peer_query_end(root);
    root->first = NULL;
    td__group_end(first, ended == &td__ended_world && first->handed_out ? ended : NULL);
    td__root_free(root, TD_OK);
    return status ? td__error_restore(&error) : TD_OK;
}
