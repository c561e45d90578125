/* Groups: creating, ending, translating ranks; see process_group.h.
 *
 * A group's key must be the same on all its members without communication. It is the hash of its list of ranks and of
 * how many groups of this list were made before, which is the same on all members. The default name of a group
 * consists of the same, and of the tag of its world.
 *
 * When a world ends, its groups are kept as shells, since the program still has their handles. A shell has its ranks,
 * its name, and a root whose fork generation no process has: so the comparison in td__group_enter() that finds groups
 * of a parent process finds shells as well. */
#include "group/process_group.h"

#include "base/buffer.h"
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/thread.h"
#include "call/operation.h"
#include "group/root.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_LIST = 24 }; /* bytes of a list of ranks that a name shows */

struct made { /* how many groups of a list of ranks were made */
    struct td__map_node node;
    int count;
    char key[];
};

static uint64_t hash(const char *text)
{
    return td__hash(TD__HASH_START, text, strlen(text)) | 1; /* 0 is no key */
}

/* "0,1,5", or "0-7" for a run; for the key of a group, and for its default name. */
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

/* The entry of a list; NULL without memory. The root's lock is held. */
static struct made *made_of(struct td__root *root, const char *list)
{
    size_t length = strlen(list);
    struct td__map_node *node = td__map_find(&root->names, list, length);
    if (node)
        return TD__CONTAINER(node, struct made, node);
    struct made *made = calloc(1, sizeof *made + length + 1);
    if (!made)
        return NULL;
    memcpy(made->key, list, length);
    made->node.key = made->key;
    made->node.key_size = length;
    if (td__map_insert(&root->names, &made->node))
        return made;
    free(made);
    return NULL;
}

static int count_made(struct td__root *root, const char *list)
{
    pthread_mutex_lock(&root->lock);
    struct made *made = made_of(root, list);
    int number = made ? made->count++ : -1;
    pthread_mutex_unlock(&root->lock);
    return number;
}

/* Takes count_made() back: creating the group has failed. */
static void discount(struct td__root *root, const char *list, int number)
{
    pthread_mutex_lock(&root->lock);
    struct made *made = made_of(root, list);
    if (made->count == number + 1)
        made->count = number;
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

/* "0-3", "0-3#1" for the second group of these ranks, "0-3@3f2a91" in a world with a tag. A long list is cut, and gets
 * its hash. */
static char *make_name(const struct td__root *root, const char *list, int number)
{
    char cut[64], count[16] = "", *name;
    if (strlen(list) > NAME_LIST)
        snprintf(cut, sizeof cut, "%.*s..~%06llx", NAME_LIST, list,
                 (unsigned long long)(hash(list) & 0xffffff));
    else
        snprintf(cut, sizeof cut, "%s", list);
    if (number)
        snprintf(count, sizeof count, "#%d", number);
    return asprintf(&name, "%s%s%s", cut, root->tag, count) < 0 ? NULL : name;
}

/* ---- Shells ---------------------------------------------------------------------------------- */

struct td__root td__ended_world = {.generation = UINT_MAX,
                                   .name = "td_destroy_process_group() was called"};
struct td__root td__ended_opened = {.generation = UINT_MAX,
                                    .name = "td_group_destroy() was called for its world"};

/* Guards the list of shells, by which those that the program never destroys stay reachable. No lock is locked after
 * it. */
static pthread_mutex_t shells_lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(, td_group) shells;

static bool is_shell(const td_group *group)
{
    return group->root == &td__ended_world || group->root == &td__ended_opened;
}

/* Frees everything that a shell does not need. */
static void strip(td_group *group)
{
    td__parts_free(group);
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->parts_lock);
    pthread_mutex_destroy(&group->lock);
    free((void *)group->monitored_arrivals);
    free(group->reason);
    group->monitored_arrivals = NULL;
    group->reason = NULL;
    group->history = NULL;
}

static void free_stripped(td_group *group)
{
    free(group->ranks);
    free(group->backend);
    free(group->chosen);
    free(group->name);
    free(group);
}

static void keep_shell(td_group *group, struct td__root *ended)
{
    strip(group);
    group->root = ended;
    pthread_mutex_lock(&shells_lock);
    LIST_INSERT_HEAD(&shells, group, link);
    pthread_mutex_unlock(&shells_lock);
}

static void free_shell(td_group *group)
{
    pthread_mutex_lock(&shells_lock);
    LIST_REMOVE(group, link);
    pthread_mutex_unlock(&shells_lock);
    free_stripped(group);
}

/* ---- Creating -------------------------------------------------------------------------------- */

static td_status create_parts(td_group *group, const td_group_options *options)
{
    const struct td__root *root = group->root;
    return td__parts_create(group, options->backend ? options->backend : root->backend,
                            options->backend_options ? options->backend_options
                                                     : root->backend_options);
}

static td_status make(struct td__root *root, const int *ranks, int count, const char *given,
                      const td_group_options *options, td_group **group_out)
{
    char *list = list_text(ranks, count), *key = NULL;
    td_group *group = calloc(1, sizeof *group);
    if (group) {
        pthread_mutex_init(&group->lock, NULL);
        pthread_mutex_init(&group->parts_lock, NULL);
        td__cond_init(&group->changed);
        group->root = root;
        STAILQ_INIT(&group->queue);
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
    group->name = options->name ? strdup(options->name) : make_name(root, list, number);
    group->named = options->name != NULL;
    if (!group->name)
        goto no_memory;
    memcpy(group->ranks, ranks, sizeof *ranks * (size_t)count);
    for (int i = 0; i < count; i++)
        if (ranks[i] == root->rank)
            group->rank = i;
    group->key = hash(key);
    td_status status = group->rank >= 0 ? create_parts(group, options) : TD_OK;
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
    if (group) {
        strip(group);
        free_stripped(group);
    }
    free(list);
    free(key);
    return status;
}

td_status td__group_add(struct td__root *root, const int *ranks, int count, const char *key,
                        const td_group_options *options, td_group **group_out)
{
    td_group *group = NULL;
    TD_TRY(make(root, ranks, count, key, options, &group));
    pthread_mutex_lock(&root->lock);
    if (root->first) {
        LIST_INSERT_AFTER(root->first, group, link);
    } else {
        LIST_INSERT_HEAD(&root->groups, group, link);
        root->first = group;
    }
    if (group->rank >= 0)
        td__abort_early(group);
    pthread_mutex_unlock(&root->lock);
    *group_out = group;
    return TD_OK;
}

/* ---- Ending ---------------------------------------------------------------------------------- */

td_status td__group_verify(td_group *group, td__deadline deadline)
{
    if (group->rank < 0)
        return TD_OK;
    td__group_drain(group);
    for (struct td__part *part = td__next_part(group, NULL); part;
         part = td__next_part(group, part)) {
        if (!part->ops->verify || atomic_load(&group->broken))
            continue;
        int left = td__deadline_poll_ms(deadline);
        TD_TRY(part->ops->verify(part->self, left ? left : TD_NOW));
    }
    return td__submits_verify(group, deadline);
}

void td__group_end(td_group *group, struct td__root *ended)
{
    struct td__root *root = group->root;
    td__group_drain(group); /* waiting threads may still need answers to queries about the group */
    pthread_mutex_lock(&root->lock);
    LIST_REMOVE(group, link);
    pthread_mutex_unlock(&root->lock);
    td__parts_destroy(group);
    td__recorder_remove_group(group);
    if (ended) {
        keep_shell(group, ended);
        return;
    }
    strip(group);
    free_stripped(group);
}

td_status td_group_abort(td_group *group)
{
    group = td__group_enter(group, "td_group_abort");
    if (!group)
        return TD_ERR_STATE;
    td__group_use(group);
    td__abort_own(group, TD__ABORT_CALLED, true);
    td__group_unuse(group);
    return TD_OK;
}

td_status td_group_destroy(td_group *group)
{
    if (!group)
        return TD_OK;
    if (is_shell(group)) {
        free_shell(group);
        return TD_OK;
    }
    if (group->root->generation != td__fork_generation())
        return TD_OK;
    if (group == td__world()) {
        group->handed_out = false;
        return TD_OK;
    }
    if (group == group->root->first) {
        td__world_forget(group->root);
        return td__root_close(group, &td__ended_opened);
    }
    td_status status = td__group_verify(group, td__deadline_in_ms(TD__VERIFY_MS));
    td__group_end(group, NULL);
    return status;
}

/* ---- Accessors ------------------------------------------------------------------------------- */

/* TD_ERR_STATE with the reason why `group`, which may be NULL, cannot be used. */
static void fail_enter(const td_group *group, const char *what)
{
    if (!group)
        td_fail(TD_ERR_STATE, "%s: there is no world yet; call td_init_process_group() first",
                what);
    else if (is_shell(group))
        td_fail(TD_ERR_STATE, "%s: group \"%s\" has ended: %s", what, group->name,
                group->root->name);
    else if (group->root->generation != td__fork_generation())
        td_fail(TD_ERR_STATE,
                "%s: group \"%s\" was made before a fork(), and belongs to the parent process",
                what, group->name);
    else
        td_fail(TD_ERR_STATE, "%s: rank %d is not in group \"%s\"", what, group->root->rank,
                group->name);
}

td_group *td__group_enter(td_group *group, const char *what)
{
    td_group *found = group ? group : td__world();
    if (found && found->root->generation == td__fork_generation() && found->rank >= 0)
        return found;
    fail_enter(found, what);
    return NULL;
}

struct td__root *td__root_enter(td_group *group, const char *what)
{
    td_group *found = group ? group : td__world();
    if (found && found->root->generation == td__fork_generation())
        return found->root;
    fail_enter(found, what);
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
    return group ? td__group_index(group, global_rank) : -1;
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
        return td_fail(TD_ERR_STATE, "td_get_process_group_ranks: this rank is not in group \"%s\"",
                       group->name);
    if (!ranks)
        return td_fail(TD_ERR_INVALID, "td_get_process_group_ranks: the result is NULL");
    memcpy(ranks, group->ranks, sizeof *ranks * (size_t)group->size);
    return TD_OK;
}

uint64_t td_group_sequence(const td_group *group)
{
    group = known(group);
    return group ? atomic_load_explicit(&group->sequence, memory_order_relaxed) : 0;
}

td_status td_group_set_timeout(td_group *group, int64_t timeout_ms)
{
    group = td__group_enter(group, "td_group_set_timeout");
    if (!group)
        return TD_ERR_STATE;
    TD_TRY(td__check_kept_timeout("td_group_set_timeout", "the timeout", timeout_ms));
    group->timeout_ms = timeout_ms ? timeout_ms : TD_GROUP_DEFAULT_TIMEOUT_MS;
    return TD_OK;
}
