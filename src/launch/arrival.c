/* How a node joins its job; see arrival.h. */
#include "launch/arrival.h"

#include "base/fail.h"
#include "base/text.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TWIN_MS = 3000 }; /* for the name of a launcher that has the same rank */

/* Another launcher has this node's rank. Both fail, unless the job has begun already: then only the later
 * one does. */
static td_status refuse_twin(td_store *store, const struct td__run_options *options, int node_rank,
                             bool *tell_all)
{
    char key[TD__KEY_ROOM];
    td_bytes value, *all;
    struct td__introduction other = {.host = "?"};
    snprintf(key, sizeof key, TD__KEY_NODE "%d", node_rank);
    if (!td_store_get(store, key, TWIN_MS, &value)) {
        td__introduction_read(&value, &other);
        td_bytes_free(&value);
    }
    *tell_all = td__gather_wait(store, TD__KEY_NODE, options->nnodes, TD_NOW, &all) != TD_OK;
    td__gather_free(all, options->nnodes);
    return td_fail(
        TD_ERR_MISMATCH,
        "two launchers were started with --node-rank %d: process %d on %s and process %d on %s",
        node_rank, other.pid, other.host, (int)getpid(), td__this_host(options));
}

td_status td__arrival_claim(td_store *store, const struct td__run_options *options, int *node_rank,
                            bool *tell_all)
{
    char key[TD__KEY_ROOM];
    int64_t claims;
    if (*node_rank < 0) {
        TD_TRY(td_store_add(store, TD__KEY "next", 1, &claims));
        if (claims >= options->nnodes)
            return td_fail(TD_ERR_MISMATCH,
                           "the job at %s, port %d, has all of its %d nodes already", options->host,
                           options->port, options->nnodes);
        *node_rank = (int)claims;
    }
    snprintf(key, sizeof key, TD__KEY "claim/%d", *node_rank);
    TD_TRY(td_store_add(store, key, 1, &claims));
    return claims == 1 ? TD_OK : refuse_twin(store, options, *node_rank, tell_all);
}

static td_status leave_will(td_store *store, const struct td__run_options *options, int node_rank,
                            const char *key)
{
    char text[512];
    struct td__buffer will = {0};
    /* The store knows only that the connection has ended. */
    snprintf(text, sizeof text,
             "the launcher of node %d (process %d on %s) has ended, or cannot be reached any more",
             node_rank, (int)getpid(), td__this_host(options));
    td__notice_put(&will, node_rank, 1, text);
    td_status status = will.failed ? td__fail_nomem("launcher")
                                   : td__tcp_store_set_will(store, key, will.data, will.size);
    td__buffer_free(&will);
    return status;
}

td_status td__arrival_introduce(td_store *store, const struct td__run_options *options,
                                int node_rank)
{
    char key[TD__KEY_ROOM];
    struct td__buffer introduction = {0};
    td__introduction_put(&introduction, options);
    snprintf(key, sizeof key, TD__KEY_NODE "%d", node_rank);
    td_status status = introduction.failed ? td__fail_nomem("launcher")
                                           : leave_will(store, options, node_rank, TD__KEY_OVER);
    if (!status)
        status = td_store_set(store, key, introduction.data, introduction.size);
    td__buffer_free(&introduction);
    return status;
}

td_status td__arrival_change_will(td_store *store, const struct td__run_options *options,
                                  int node_rank)
{
    char key[TD__KEY_ROOM];
    snprintf(key, sizeof key, TD__KEY "0/gone/%d", node_rank);
    return leave_will(store, options, node_rank, key);
}

td_status td__arrival_missing(td_store *store, const struct td__run_options *options)
{
    char list[512] = "", key[TD__KEY_ROOM];
    const char *keys[] = {key};
    int missing = 0;
    for (int r = 0; r < options->nnodes; r++) {
        bool exists;
        snprintf(key, sizeof key, TD__KEY_NODE "%d", r);
        TD_TRY(td_store_check(store, keys, 1, &exists));
        if (exists)
            continue;
        if (strlen(list) + 24 < sizeof list)
            td__text_add(list, sizeof list, "%s%d", missing ? ", " : "", r);
        else if (!strstr(list, "…"))
            td__text_add(list, sizeof list, ", …");
        missing++;
    }
    return td_fail(TD_ERR_TIMEOUT,
                   "node%s %s of %d %s not arrived within %g s: tdrun was not started there, or "
                   "cannot reach node 0",
                   missing == 1 ? "" : "s", list, options->nnodes, missing == 1 ? "has" : "have",
                   options->join_timeout_s);
}

td_status td__arrival_survey(const td_bytes *values, const struct td__run_options *options,
                             struct td__node_world *world)
{
    struct td__introduction first = {0}, other;
    for (int r = 0; r < options->nnodes; r++) {
        if (!td__introduction_read(&values[r], &other))
            return td_fail(TD_ERR_MISMATCH, "node %d runs another version of tdrun than node 0", r);
        if (r == 0)
            first = other;
        TD_TRY(td__introduction_check(&other, r, &first));
        bool same_role = !strcmp(other.role, options->role);
        if (r < world->node_rank) {
            world->rank += other.nproc;
            world->role_rank += same_role ? other.nproc : 0;
        }
        world->size += other.nproc;
        world->role_size += same_role ? other.nproc : 0;
    }
    return TD_OK;
}

/* ---- One key for each node ------------------------------------------------------------------- */

/* The keys, in one piece of memory. */
static char **make_keys(const char *prefix, int count)
{
    size_t room = strlen(prefix) + 16;
    char **keys = malloc((size_t)count * (sizeof *keys + room));
    if (!keys)
        return NULL;
    char *text = (char *)(keys + count);
    for (int i = 0; i < count; i++, text += room) {
        snprintf(text, room, "%s%d", prefix, i);
        keys[i] = text;
    }
    return keys;
}

void td__gather_free(td_bytes *values, int count)
{
    for (int i = 0; values && i < count; i++)
        td_bytes_free(&values[i]);
    free(values);
}

td_status td__gather_wait(td_store *store, const char *prefix, int count, int64_t timeout_ms,
                          td_bytes **values_out)
{
    char **keys = make_keys(prefix, count);
    td_bytes *values = calloc((size_t)count, sizeof *values);
    td_status status = keys && values ? td_store_multi_get(store, (const char *const *)keys, count,
                                                           timeout_ms, values)
                                      : td__fail_nomem("launcher");
    bool woken = false;
    for (int i = 0; !status && i < count; i++)
        woken = woken || !values[i].size;
    free(keys);
    *values_out = NULL;
    if (status)
        free(values);
    else if (woken)
        td__gather_free(values, count);
    else
        *values_out = values;
    return status;
}

td_status td__gather_set(td_store *store, const char *prefix, int count, const char *value)
{
    char **keys = make_keys(prefix, count);
    td_bytes *values = calloc((size_t)count, sizeof *values);
    for (int i = 0; values && i < count; i++)
        values[i] = (td_bytes){.data = (char *)value, .size = strlen(value)};
    td_status status = keys && values
                           ? td_store_multi_set(store, (const char *const *)keys, values, count)
                           : td__fail_nomem("launcher");
    free(keys);
    free(values);
    return status;
}
