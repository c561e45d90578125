/* Groups: making, destroying, translating ranks; see process_group.h.
 *
 * A group's number must be the same on all its members without anybody being asked. It is the hash of
 * its list of ranks and of how often this list was made a group before, which all members count
 * alike. */
#include "group/process_group.h"

#include "base/buffer.h"
#include "base/fail.h"
#include "base/thread.h"
#include "call/operation.h"
#include "group/root.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct made { /* how often a list of ranks was made a group */
    struct td__map_node node;
    unsigned count;
    char key[];
};

static uint64_t hash(const char *text)
{
    uint64_t value = 14695981039346656037u;
    for (; *text; text++)
        value = (value ^ (unsigned char)*text) * 1099511628211u;
    return value | 1; /* 0 is nobody's */
}

/* "0,1,5", or "0-7" for a run; for the key of a group, and for its name where it has no other. */
static char *list_text(const int *ranks, int count)
{
    struct td__buffer text = {0};
    char number[32];
    for (int i = 0; i < count;) {
        int end = i + 1;
        while (end < count && ranks[end] == ranks[end - 1] + 1)
            end++;
        int length = end - i > 2 ? snprintf(number, sizeof number, "%s%d-%d", i ? "," : "",
                                            ranks[i], ranks[end - 1])
                                 : snprintf(number, sizeof number, "%s%d", i ? "," : "", ranks[i]);
        td__buffer_put(&text, number, (size_t)length);
        i = end - i > 2 ? end : i + 1;
    }
    td__buffer_put_u8(&text, 0);
    if (text.failed) {
        td__buffer_free(&text);
        return NULL;
    }
    return (char *)text.data;
}

static int count_made(struct td__root *root, const char *list)
{
    size_t length = strlen(list);
    int count = -1;
    pthread_mutex_lock(&root->lock);
    struct td__map_node *node = td__map_find(&root->names, list, length);
    struct made *made = node ? TD__CONTAINER(node, struct made, node) : NULL;
    if (!made && (made = calloc(1, sizeof *made + length + 1))) {
        memcpy(made->key, list, length);
        made->node.key = made->key;
        made->node.key_size = length;
        if (!td__map_insert(&root->names, &made->node)) {
            free(made);
            made = NULL;
        }
    }
    if (made)
        count = (int)made->count++;
    pthread_mutex_unlock(&root->lock);
    return count;
}

/* It did not become one after all. */
static void discount(struct td__root *root, const char *list, int number)
{
    pthread_mutex_lock(&root->lock);
    struct td__map_node *node = td__map_find(&root->names, list, strlen(list));
    struct made *made = node ? TD__CONTAINER(node, struct made, node) : NULL;
    if (made && made->count == (unsigned)number + 1)
        made->count = (unsigned)number;
    pthread_mutex_unlock(&root->lock);
}

void td__root_forget_names(struct td__root *root)
{
    struct td__map_node *node = td__map_next(&root->names, NULL), *next;
    for (; node; node = next) {
        next = td__map_next(&root->names, node);
        td__map_remove(&root->names, node);
        free(TD__CONTAINER(node, struct made, node));
    }
    td__map_free(&root->names);
}

static void free_group(td_group *group)
{
    td_store_close(group->context.store);
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->lock);
    free((char *)group->context.options);
    free((void *)group->monitored_arrivals);
    free(group->reason);
    free(group->ranks);
    free(group->name);
    free(group);
}

/* A member's group: its part of the store and its backend. */
static td_status serve(td_group *group, const char *key, const td_group_options *options)
{
    struct td__root *root = group->root;
    const char *backend = options->backend ? options->backend : root->backend;
    const char *extra = options->backend_options ? options->backend_options : root->backend_options;
    void *arg;
    group->ops = td__backend_find(backend, &arg, &group->backend);
    if (!group->ops)
        return TD_ERR_INVALID;
    char prefix[64];
    snprintf(prefix, sizeof prefix, "\1group/%016llx", (unsigned long long)hash(key));
    TD_TRY(td_prefix_store_open(prefix, root->store, &group->context.store));
    group->context.name = group->name;
    group->context.rank = group->rank;
    group->context.size = group->size;
    group->context.global_ranks = group->ranks;
    group->context.timeout_ms = group->timeout_ms;
    if (extra && !(group->context.options = strdup(extra)))
        return td__fail_nomem("group");
    return group->ops->create(&group->context, arg, &group->self);
}

td_status td__group_make(struct td__root *root, const int *ranks, int count, const char *given,
                         const td_group_options *options, td_group **group_out)
{
    char *list = list_text(ranks, count), *key = NULL;
    td_group *group = calloc(1, sizeof *group);
    if (group) {
        pthread_mutex_init(&group->lock, NULL);
        td__cond_init(&group->changed);
        group->root = root;
        group->queue_end = &group->queue;
        group->size = count;
        group->rank = -1;
        group->timeout_ms = options->timeout_ms ? options->timeout_ms : root->timeout_ms;
        group->ranks = malloc(sizeof *ranks * (size_t)count);
    }
    int number = -1;
    if (list)
        number = given ? 0 : count_made(root, list);
    if (!group || !group->ranks || number < 0 ||
        (given ? asprintf(&key, "%s@%s", list, given) : asprintf(&key, "%s#%d", list, number)) < 0)
        goto no_memory;
    group->name = options->name ? strdup(options->name) : strdup(number ? key : list);
    if (!group->name)
        goto no_memory;
    memcpy(group->ranks, ranks, sizeof *ranks * (size_t)count);
    for (int i = 0; i < count; i++)
        if (ranks[i] == root->rank)
            group->rank = i;
    group->key = hash(key);
    td_status status = group->rank >= 0 ? serve(group, key, options) : TD_OK;
    if (status)
        goto free_all;
    if (group->rank >= 0)
        td__recorder_add_group(group);
    free(list);
    free(key);
    *group_out = group;
    return TD_OK;

no_memory:
    status = td__fail_nomem("group");
free_all:
    if (number >= 0 && !given)
        discount(root, list, number);
    if (group)
        free_group(group);
    free(list);
    free(key);
    return status;
}

void td__group_free(td_group *group)
{
    if (group->rank >= 0) {
        td__group_drain(group);
        group->ops->destroy(group->self);
    }
    td__recorder_remove_group(group);
    free_group(group);
}

td_status td__group_verify(td_group *group, td__deadline deadline)
{
    if (group->rank < 0 || !group->ops->verify)
        return TD_OK;
    td__group_drain(group);
    if (atomic_load(&group->broken))
        return TD_OK;
    return group->ops->verify(group->self, td__deadline_poll_ms(deadline));
}

void td__group_end(td_group *group)
{
    struct td__root *root = group->root;
    td__group_drain(group); /* others may still have to say something to those who wait in it */
    pthread_mutex_lock(&root->lock);
    for (td_group **link = &root->groups; *link; link = &(*link)->next)
        if (*link == group) {
            *link = group->next;
            break;
        }
    pthread_mutex_unlock(&root->lock);
    td__group_free(group);
}

td_status td_group_abort(td_group *group)
{
    group = td__group_enter(group, "td_group_abort");
    if (!group)
        return TD_ERR_STATE;
    td__group_use(group);
    td__abort_own(group, TD__GIVEN_UP_ABORT, true);
    td__group_unuse(group);
    return TD_OK;
}

td_status td_group_destroy(td_group *group)
{
    if (!group || group == td__world() || group->root->generation != td__fork_generation())
        return TD_OK;
    if (group->first)
        return td__root_close(group);
    td_status status = td__group_verify(group, td__deadline_in_ms(TD__VERIFY_MS));
    td__group_end(group);
    return status;
}

/* ---- Making more of them --------------------------------------------------------------------- */

static td_status check_list(const struct td__root *root, const char *what, const int *ranks,
                            int count)
{
    char *seen = calloc((size_t)root->size, 1);
    td_status status = seen ? TD_OK : td__fail_nomem(what);
    for (int i = 0; i < count && !status; i++) {
        if (ranks[i] < 0 || ranks[i] >= root->size)
            status = td_fail(TD_ERR_INVALID, "%s: rank %d is out of range; ranks are 0 to %d", what,
                             ranks[i], root->size - 1);
        else if (seen[ranks[i]]++)
            status = td_fail(TD_ERR_INVALID, "%s: rank %d is in the list twice", what, ranks[i]);
    }
    free(seen);
    return status;
}

static td_status check_options(const char *what, const td_group_options *options)
{
    if (options->timeout_ms < 0)
        return td_fail(TD_ERR_INVALID, "%s: the timeout is %lld ms; it must be positive, or 0",
                       what, (long long)options->timeout_ms);
    return TD_OK;
}

td_status td__group_add(struct td__root *root, const int *ranks, int count, const char *key,
                        const td_group_options *options, td_group **group_out)
{
    td_group *group;
    TD_TRY(td__group_make(root, ranks, count, key, options, &group));
    pthread_mutex_lock(&root->lock);
    group->next = root->groups;
    root->groups = group;
    if (group->rank >= 0)
        td__abort_recall(group);
    pthread_mutex_unlock(&root->lock);
    *group_out = group;
    return TD_OK;
}

td_status td_new_group(const int *ranks, int count, const td_group_options *options,
                       td_group **group)
{
    td_group *world = td__group_enter(NULL, "td_new_group");
    td_group_options none = {0};
    if (!world)
        return TD_ERR_STATE;
    if (!group)
        return td_fail(TD_ERR_INVALID, "td_new_group: the result is NULL");
    if (!ranks) {
        ranks = world->ranks;
        count = world->size;
    }
    if (count < 1)
        return td_fail(TD_ERR_INVALID, "td_new_group: %d ranks make no group", count);
    options = options ? options : &none;
    TD_TRY(check_options("td_new_group", options));
    TD_TRY(check_list(world->root, "td_new_group", ranks, count));
    return td__group_add(world->root, ranks, count, NULL, options, group);
}

td_status td_new_subgroups_by_enumeration(const int *ranks, const int *counts, int groups,
                                          const td_group_options *options, td_group **group)
{
    static const char *what = "td_new_subgroups_by_enumeration";
    td_group *world = td__group_enter(NULL, what), *own = NULL;
    td_group_options none = {0};
    int total = 0, first = 0;
    if (!world)
        return TD_ERR_STATE;
    if (!ranks || !counts || !group || groups < 1)
        return td_fail(TD_ERR_INVALID, "%s: needs a list of ranks and of counts, and a result",
                       what);
    for (int i = 0; i < groups; i++) {
        if (counts[i] < 1)
            return td_fail(TD_ERR_INVALID, "%s: %d ranks make no group", what, counts[i]);
        if (counts[i] > world->size - total)
            return td_fail(TD_ERR_INVALID,
                           "%s: more ranks than the world's %d; groups may not "
                           "overlap",
                           what, world->size);
        total += counts[i];
    }
    options = options ? options : &none;
    TD_TRY(check_options(what, options));
    TD_TRY(check_list(world->root, what, ranks, total));
    for (int i = 0; i < groups; first += counts[i++])
        for (int k = 0; k < counts[i]; k++)
            if (ranks[first + k] == world->root->rank)
                TD_TRY(td__group_add(world->root, ranks + first, counts[i], NULL, options, &own));
    *group = own;
    return TD_OK;
}

td_status td_new_subgroups(int group_size, const td_group_options *options, td_group **group)
{
    td_group *world = td__group_enter(NULL, "td_new_subgroups");
    if (!world)
        return TD_ERR_STATE;
    if (group_size < 1 || world->size % group_size)
        return td_fail(TD_ERR_INVALID,
                       "td_new_subgroups: a world of %d cannot be cut into groups of %d",
                       world->size, group_size);
    int first = world->rank / group_size * group_size;
    if (!group)
        return td_fail(TD_ERR_INVALID, "td_new_subgroups: the result is NULL");
    td_group_options none = {0};
    options = options ? options : &none;
    TD_TRY(check_options("td_new_subgroups", options));
    return td__group_add(world->root, world->ranks + first, group_size, NULL, options, group);
}

struct wish {
    int32_t color, key;
};

static int compare_members(const void *a, const void *b)
{
    const int64_t *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

static td_status split(td_group *parent, int color, int key, const td_group_options *options,
                       td_group **group)
{
    size_t size = (size_t)parent->size;
    struct wish own = {color, key}, *wishes = malloc(size * sizeof *wishes);
    int64_t *order = malloc(size * sizeof *order);
    int *ranks = malloc(size * sizeof *ranks), count = 0;
    td_status status = wishes && order && ranks ? TD_OK : td__fail_nomem("td_group_split");
    if (!status)
        status = td__group_call(parent,
                                &(td_call){.kind = TD_OP_ALL_GATHER,
                                           .input = &own,
                                           .output = wishes,
                                           .count = 2,
                                           .dtype = TD_I32,
                                           .detail = TD__DETAIL_SPLIT},
                                -1, NULL);
    for (int i = 0; i < parent->size && !status; i++)
        if (wishes[i].color == color)
            order[count++] = ((int64_t)wishes[i].key + INT32_MAX + 1) << 31 | i;
    if (!status && color >= 0) {
        qsort(order, (size_t)count, sizeof *order, compare_members);
        for (int i = 0; i < count; i++)
            ranks[i] = parent->ranks[order[i] & INT32_MAX];
        status = td__group_add(parent->root, ranks, count, NULL, options, group);
    } else if (!status) {
        *group = NULL;
    }
    free(wishes);
    free(order);
    free(ranks);
    return status;
}

td_status td_group_split(td_group *parent, int color, int key, const td_group_options *options,
                         td_group **group)
{
    parent = td__group_enter(parent, "td_group_split");
    td_group_options none = {0};
    if (!parent)
        return TD_ERR_STATE;
    if (!group)
        return td_fail(TD_ERR_INVALID, "td_group_split: the result is NULL");
    options = options ? options : &none;
    TD_TRY(check_options("td_group_split", options));
    td__group_use(parent);
    td_status status = split(parent, color, key, options, group);
    td__group_unuse(parent);
    return status;
}

/* ---- Asking ---------------------------------------------------------------------------------- */

td_group *td__group_enter(td_group *group, const char *what)
{
    td_group *found = group ? group : td__world();
    if (!found)
        td_fail(TD_ERR_STATE, "%s: there is no world yet; call td_init_process_group() first",
                what);
    else if (found->root->generation != td__fork_generation())
        td_fail(TD_ERR_STATE,
                "%s: the group was made before a fork(), and belongs to the parent process", what);
    else if (found->rank < 0)
        td_fail(TD_ERR_STATE, "%s: rank %d is not in group \"%s\"", what, found->root->rank,
                found->name);
    else
        return found;
    return NULL;
}

static const td_group *known(const td_group *group)
{
    return group ? group : td__world();
}

int td_get_rank(const td_group *group)
{
    group = known(group);
    return group ? group->rank : -1;
}

int td_get_world_size(const td_group *group)
{
    group = known(group);
    return group && group->rank >= 0 ? group->size : -1;
}

const char *td_get_backend(const td_group *group)
{
    group = known(group);
    return group ? group->backend : NULL;
}

const char *td_group_name(const td_group *group)
{
    group = known(group);
    return group ? group->name : NULL;
}

int td_get_group_rank(const td_group *group, int global_rank)
{
    group = known(group);
    if (!group)
        return -1;
    if (global_rank >= 0 && global_rank < group->size && group->ranks[global_rank] == global_rank)
        return global_rank;
    for (int i = 0; i < group->size; i++)
        if (group->ranks[i] == global_rank)
            return i;
    return -1;
}

int td_get_global_rank(const td_group *group, int group_rank)
{
    group = known(group);
    return group && group_rank >= 0 && group_rank < group->size ? group->ranks[group_rank] : -1;
}

td_status td_get_process_group_ranks(const td_group *group, int *ranks)
{
    group = known(group);
    if (!group)
        return td_fail(TD_ERR_STATE, "td_get_process_group_ranks: there is no world yet");
    if (group->rank < 0)
        return td_fail(TD_ERR_STATE, "td_get_process_group_ranks: rank %d is not in group \"%s\"",
                       group->root->rank, group->name);
    if (!ranks)
        return td_fail(TD_ERR_INVALID, "td_get_process_group_ranks: the result is NULL");
    memcpy(ranks, group->ranks, sizeof *ranks * (size_t)group->size);
    return TD_OK;
}

td_status td_group_set_timeout(td_group *group, int64_t timeout_ms)
{
    group = td__group_enter(group, "td_group_set_timeout");
    if (!group)
        return TD_ERR_STATE;
    if (timeout_ms < 0)
        return td_fail(TD_ERR_INVALID, "td_group_set_timeout: %lld ms is negative",
                       (long long)timeout_ms);
    group->timeout_ms = timeout_ms ? timeout_ms : TD_GROUP_DEFAULT_TIMEOUT_MS;
    return TD_OK;
}
