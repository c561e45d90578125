/* The table of backends: the built-in ones, and those that users register. */
#include "base/fail.h"
#include "group/process_group.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_ROOM = 32 };

struct entry {
    struct entry *next;
    const td_backend_ops *ops; /* NULL: taken back; the name stays for groups that point to it */
    void *arg;
    char name[NAME_ROOM];
};

/* Guards the list, which only grows; nothing is taken after it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *registered;

static struct entry *find(const char *name) /* holds the lock */
{
    struct entry *entry = registered;
    while (entry && strcmp(entry->name, name) != 0)
        entry = entry->next;
    return entry;
}

static const struct td__builtin_backend *find_builtin(const char *name)
{
    const struct td__builtin_backend *builtin = td__builtin_backends;
    while (builtin->name && strcmp(builtin->name, name) != 0)
        builtin++;
    return builtin->name ? builtin : NULL;
}

td_status td_register_backend(const char *name, const td_backend_ops *ops, void *arg)
{
    size_t length = name ? strlen(name) : 0;
    bool sound = length > 0 && length < NAME_ROOM;
    for (size_t i = 0; i < length && sound; i++)
        sound = isalnum((unsigned char)name[i]) || name[i] == '_' || name[i] == '-';
    if (!sound)
        return td_fail(TD_ERR_INVALID,
                       "td_register_backend: \"%s\" is no name: letters, digits, '_' and '-', at "
                       "most %d",
                       name ? name : "NULL", NAME_ROOM - 1);
    if (ops && (!ops->create || !ops->destroy))
        return td_fail(TD_ERR_INVALID, "td_register_backend: backend \"%s\" has no %s", name,
                       ops->create ? "destroy" : "create");
    if (find_builtin(name))
        return td_fail(TD_ERR_STATE, "td_register_backend: \"%s\" is built in", name);
    struct entry *added = calloc(1, sizeof *added);
    if (!added)
        return td__fail_nomem("td_register_backend");
    memcpy(added->name, name, length);
    added->ops = ops;
    added->arg = arg;

    td_status status = TD_OK;
    pthread_mutex_lock(&lock);
    struct entry *present = find(name);
    if (present && present->ops && ops) {
        status = td_fail(TD_ERR_STATE, "td_register_backend: \"%s\" is registered already", name);
    } else if (present) {
        present->ops = ops;
        present->arg = arg;
    } else if (ops) {
        added->next = registered;
        registered = added;
        added = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(added);
    return status;
}

/* Those that users registered, the newest first, and then the built-in ones; holds the lock. */
static void fail_unknown(const char *name)
{
    char known[256] = "";
    size_t length = 0;
    for (const struct entry *entry = registered; entry; entry = entry->next)
        if (entry->ops && length + NAME_ROOM + 2 < sizeof known)
            length += (size_t)snprintf(known + length, sizeof known - length, "%s, ", entry->name);
    for (const struct td__builtin_backend *at = td__builtin_backends; at->name; at++)
        if (length + NAME_ROOM + 2 < sizeof known)
            length += (size_t)snprintf(known + length, sizeof known - length, "%s%s",
                                       at == td__builtin_backends ? "" : ", ", at->name);
    td_fail(TD_ERR_INVALID, "there is no backend \"%s\": there are %s", name, known);
}

const td_backend_ops *td__backend_find(const char *name, void **arg, const char **kept_name)
{
    const struct td__builtin_backend *builtin = find_builtin(name);
    if (builtin) {
        *arg = NULL;
        *kept_name = builtin->shown;
        return builtin->ops;
    }
    pthread_mutex_lock(&lock);
    const struct entry *entry = find(name);
    const td_backend_ops *ops = entry ? entry->ops : NULL;
    if (ops) {
        *arg = entry->arg;
        *kept_name = entry->name;
    } else {
        fail_unknown(name);
    }
    pthread_mutex_unlock(&lock);
    return ops;
}

td_collective_fn td__backend_slot(const td_backend_ops *ops, td_op_kind kind)
{
    switch (kind) {
    case TD_OP_BROADCAST:
        return ops->broadcast;
    case TD_OP_REDUCE:
        return ops->reduce;
    case TD_OP_ALL_REDUCE:
        return ops->all_reduce;
    case TD_OP_SCATTER:
        return ops->scatter;
    case TD_OP_GATHER:
        return ops->gather;
    case TD_OP_ALL_GATHER:
        return ops->all_gather;
    case TD_OP_REDUCE_SCATTER:
        return ops->reduce_scatter;
    case TD_OP_ALL_TO_ALL:
        return ops->all_to_all;
    case TD_OP_BARRIER:
        return ops->barrier;
    default:
        return NULL;
    }
}

static bool has(const td_backend_ops *ops, td_op_kind kind)
{
    return kind >= TD_OP_SEND ? ops->post != NULL : td__backend_slot(ops, kind) != NULL;
}

const char *td__backend_with(td_op_kind kind, const char *name)
{
    for (const struct td__builtin_backend *at = td__builtin_backends; at->name; at++)
        if (has(at->ops, kind) && strcmp(at->name, name) != 0)
            return at->name;
    const char *found = NULL;
    pthread_mutex_lock(&lock);
    for (const struct entry *entry = registered; entry && !found; entry = entry->next)
        if (entry->ops && has(entry->ops, kind) && strcmp(entry->name, name) != 0)
            found = entry->name;
    pthread_mutex_unlock(&lock);
    return found;
}
