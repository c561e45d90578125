/* The table of backends: the built-in ones, those of td_register_backend(), and those of plug-ins, which are looked for
 * when an unknown one is used. */
#include "base/option_rules.h"
#include "base/text.h"
#include "group/process_group.h"
#include "plugin/plugins.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* Guards the list, which only grows, at its front; no lock is locked after it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct td__backend *backends = td__builtin_backends;

static struct td__backend *find(const char *name) /* holds the lock */
{
    struct td__backend *backend = backends;
    while (backend && strcmp(backend->name, name) != 0)
        backend = backend->next;
    return backend;
}

td_status td_register_backend(const char *name, const td_backend_ops *ops, void *arg)
{
    size_t length = name ? strlen(name) : 0;
    bool valid = length > 0 && length < sizeof backends->name;
    for (size_t i = 0; i < length && valid; i++)
        valid = isalnum((unsigned char)name[i]) || name[i] == '_' || name[i] == '-';
    if (!valid)
        return td_fail(TD_ERR_INVALID,
                       "td_register_backend: \"%s\" is no name: letters, digits, '_' and '-', at "
                       "most %zu",
                       name ? name : "NULL", sizeof backends->name - 1);
    if (ops && (!ops->create || !ops->destroy))
        return td_fail(TD_ERR_INVALID, "td_register_backend: backend \"%s\" has no %s", name,
                       ops->create ? "destroy" : "create");
    if (ops)
        TD_TRY(td__check_reserved_of("td_register_backend", ops->reserved, 3));
    struct td__backend *added = calloc(1, sizeof *added);
    if (!added)
        return td__fail_nomem("td_register_backend");
    memcpy(added->name, name, length);
    added->ops = ops;
    added->arg = arg;

    td_status status = TD_OK;
    pthread_mutex_lock(&lock);
    struct td__backend *present = find(name);
    if (present && present->shown) {
        status = td_fail(TD_ERR_STATE, "td_register_backend: \"%s\" is built in", name);
    } else if (present && present->ops && ops) {
        status = td_fail(TD_ERR_STATE, "td_register_backend: \"%s\" is registered already", name);
    } else if (present) {
        present->ops = ops;
        present->arg = arg;
    } else if (ops) {
        added->next = backends;
        backends = added;
        added = NULL;
    }
    pthread_mutex_unlock(&lock);
    if (!status && ops)
        td__plugin_note(TD__PLUGIN_BACKEND, name);
    free(added);
    return status;
}

static struct td__backend_found found_of(const struct td__backend *backend)
{
    return (struct td__backend_found){.ops = backend->ops,
                                      .arg = backend->arg,
                                      .name = backend->shown ? backend->shown : backend->name,
                                      .built_in = backend->shown != NULL};
}

static bool find_registered(const char *name, struct td__backend_found *found)
{
    pthread_mutex_lock(&lock);
    const struct td__backend *backend = find(name);
    bool registered = backend && backend->ops;
    if (registered)
        *found = found_of(backend);
    pthread_mutex_unlock(&lock);
    return registered;
}

static bool names_kind(const td_backend_ops *ops, const char *kind)
{
    for (int i = 0; ops->devices && ops->devices[i]; i++)
        if (!strcmp(ops->devices[i], kind))
            return true;
    return false;
}

bool td__backend_takes(const td_backend_ops *ops, const char *kind)
{
    return ops->devices ? names_kind(ops, kind) || names_kind(ops, "*") : !strcmp(kind, "cpu");
}

bool td__backend_for_kind(const char *kind, struct td__backend_found *found)
{
    pthread_mutex_lock(&lock);
    struct td__backend *backend = backends;
    while (backend && !(backend->ops && names_kind(backend->ops, kind)))
        backend = backend->next;
    if (backend)
        *found = found_of(backend);
    pthread_mutex_unlock(&lock);
    return backend != NULL;
}

void td__backend_names(char *text, size_t room)
{
    text[0] = '\0';
    pthread_mutex_lock(&lock);
    for (struct td__backend *at = backends; at; at = at->next)
        if (at->ops && strlen(text) + sizeof at->name + 2 < room)
            td__text_add(text, room, "%s%s", *text ? ", " : "", at->name);
    pthread_mutex_unlock(&lock);
}

td_status td__backend_find(const char *name, struct td__backend_found *found)
{
    char known[256], why[1200] = "";
    bool loaded;
    if (find_registered(name, found))
        return TD_OK;
    TD_TRY(td__plugin_find(name, &loaded));
    if (loaded && find_registered(name, found))
        return TD_OK;
    td__backend_names(known, sizeof known);
    td__plugin_explain(name, why, sizeof why);
    return td_fail(TD_ERR_INVALID, "there is no backend \"%s\": there are %s%s", name, known, why);
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

const char *td__backend_with(td_op_kind kind, const char *name)
{
    const char *found = NULL;
    pthread_mutex_lock(&lock);
    /* The built-in ones are last in the list; the first of them is preferred. */
    for (struct td__backend *at = backends; at; at = at->next) {
        bool has = at->ops && (kind >= TD_OP_SEND ? at->ops->post != NULL
                                                  : td__backend_slot(at->ops, kind) != NULL);
        if (has && strcmp(at->name, name) != 0 && (!found || at == td__builtin_backends))
            found = at->name;
    }
    pthread_mutex_unlock(&lock);
    return found;
}
