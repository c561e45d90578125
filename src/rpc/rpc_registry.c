/* Registered functions and classes. */
#include "rpc/rpc_registry.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "rpc/value_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BRIEF_NS = 5000 };

struct td__rpc_class_entry {
    atomic_int owners;
    char *name;
    void *(*create)(td_rpc_call *call, td_value *const *args, int count);
    void (*destroy)(void *object);
    td_value *(*pack)(void *object);
    void *(*unpack)(td_value *packed);
    int method_count;
    struct td__function_entry methods[];
};

/* Functions, and the constructors of classes, by name. */
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct td__map functions;
static atomic_uint removals;

/* The function that this thread has called last, with a reference: it is likely to call it again, and then needs neither
 * the lock nor the map. */
static _Thread_local struct {
    struct td__function_entry *entry;
    unsigned removals; /* when it was found */
} last;

/* ---- Entries --------------------------------------------------------------------------------- */

void td__function_release(struct td__function_entry *entry)
{
    if (!entry || entry->is_method) /* its class owns it */
        return;
    if (atomic_fetch_sub(&entry->owners, 1) != 1)
        return;
    td__class_release(entry->owner);
    td__signature_free(entry->signature);
    free(entry);
}

void td__function_keep(struct td__function_entry *entry)
{
    if (!entry || entry->is_method)
        return;
    td__function_release(last.entry);
    last.entry = entry;
}

void td__function_end_thread(void)
{
    td__function_release(last.entry);
    last.entry = NULL;
}

/* Its reference passes to the caller. */
static struct td__function_entry *take_last(const char *name, size_t size)
{
    struct td__function_entry *entry = last.entry;
    unsigned now = atomic_load_explicit(&removals, memory_order_acquire);
    bool valid = entry && last.removals == now && entry->by_name.key_size == size &&
                 !memcmp(entry->by_name.key, name, size);
    last.removals = now;
    if (!valid)
        td__function_end_thread();
    last.entry = NULL;
    return valid ? entry : NULL;
}

struct td__function_entry *td__function_find(const char *name, size_t size)
{
    struct td__function_entry *kept = take_last(name, size);
    if (kept)
        return kept;
    pthread_rwlock_rdlock(&lock);
    struct td__map_node *node = td__map_find(&functions, name, size);
    struct td__function_entry *entry = node
                                           ? TD__CONTAINER(node, struct td__function_entry, by_name)
                                           : NULL;
    if (entry)
        atomic_fetch_add(&entry->owners, 1);
    pthread_rwlock_unlock(&lock);
    return entry;
}

/* The library's own functions call others, of which nothing is known here. */
void td__function_took(struct td__function_entry *entry, int64_t ns)
{
    bool brief = ns < BRIEF_NS && strncmp(td__signature_name(entry->signature), "td.", 3) != 0;
    if (atomic_load_explicit(&entry->brief, memory_order_relaxed) != brief)
        atomic_store_explicit(&entry->brief, brief, memory_order_relaxed);
}

static td_status add(struct td__function_entry *entry)
{
    const char *name = td__signature_name(entry->signature);
    entry->by_name.key = name;
    entry->by_name.key_size = strlen(name);
    pthread_rwlock_wrlock(&lock);
    td_status status = TD_OK;
    if (td__map_find(&functions, name, strlen(name)))
        status = td_fail(
            TD_ERR_STATE,
            "there is a function or class \"%s\" already; td_rpc_unregister() removes it", name);
    else if (!td__map_insert(&functions, &entry->by_name))
        status = td__fail_nomem("rpc");
    pthread_rwlock_unlock(&lock);
    return status;
}

static td_status make(const char *signature, td_rpc_fn fn, void *arg,
                      struct td__function_entry **entry_out)
{
    struct td__function_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return td__fail_nomem("rpc");
    atomic_init(&entry->owners, 1);
    entry->fn = fn;
    entry->arg = arg;
    td_status status = td__signature_parse(signature, &entry->signature);
    if (status)
        free(entry);
    else
        *entry_out = entry;
    return status;
}

td_status td__rpc_register_own(const char *signature, td_rpc_fn fn)
{
    struct td__function_entry *entry = NULL;
    TD_TRY(make(signature, fn, NULL, &entry));
    td_status status = add(entry);
    if (status)
        td__function_release(entry);
    return status;
}

static td_status check_name(const char *name)
{
    return strncmp(name, "td.", 3) != 0
               ? TD_OK
               : td_fail(TD_ERR_INVALID, "\"%s\": names that begin with \"td.\" are the library's",
                         name);
}

/* The text of a failure begins with the name of the public function. */
static td_status name_call(const char *call, td_status status)
{
    return status ? td_fail(status, "%s: %s", call, td__error_text()) : TD_OK;
}

td_status td_rpc_register(const char *signature, td_rpc_fn fn, void *arg)
{
    struct td__function_entry *entry = NULL;
    if (!signature || !fn)
        return td__fail_null(__func__);
    TD_TRY(name_call(__func__, make(signature, fn, arg, &entry)));
    td_status status = check_name(td__signature_name(entry->signature));
    if (!status)
        status = add(entry);
    if (status)
        td__function_release(entry);
    return name_call(__func__, status);
}

td_status td_rpc_unregister(const char *name)
{
    if (!name)
        return td__fail_null(__func__);
    TD_TRY(name_call(__func__, check_name(name)));
    pthread_rwlock_wrlock(&lock);
    struct td__map_node *node = td__map_find(&functions, name, strlen(name));
    if (node)
        td__map_remove(&functions, node);
    atomic_fetch_add(&removals, 1);
    pthread_rwlock_unlock(&lock);
    if (!node)
        return td_fail(TD_ERR_INVALID, "td_rpc_unregister: there is no function or class \"%s\"",
                       name);
    td__function_release(TD__CONTAINER(node, struct td__function_entry, by_name));
    return TD_OK;
}

/* ---- Classes --------------------------------------------------------------------------------- */

void td__class_release(struct td__rpc_class_entry *entry)
{
    if (!entry || atomic_fetch_sub(&entry->owners, 1) != 1)
        return;
    for (int i = 0; i < entry->method_count; i++)
        td__signature_free(entry->methods[i].signature);
    free(entry->name);
    free(entry);
}

const char *td__class_name(const struct td__rpc_class_entry *entry)
{
    return entry->name;
}

void td__class_destroy_object(struct td__rpc_class_entry *entry, void *object)
{
    if (entry->destroy)
        entry->destroy(object);
}

struct td__rpc_class_entry *td__class_find(const char *name)
{
    struct td__function_entry *entry = td__function_find(name, strlen(name));
    struct td__rpc_class_entry *found = entry ? entry->owner : NULL;
    if (found)
        atomic_fetch_add(&found->owners, 1);
    td__function_release(entry);
    return found;
}

struct td__function_entry *td__method_find(struct td__rpc_class_entry *owner, const char *name)
{
    for (int i = 0; i < owner->method_count; i++)
        if (!strcmp(td__signature_name(owner->methods[i].signature), name))
            return &owner->methods[i];
    return NULL;
}

/* Sets the last error where a function of the class has returned NULL without doing so. */
static void check_failure(const struct td__rpc_class_entry *entry, const char *function,
                          uint64_t failures)
{
    if (failures == td__error_count())
        td_fail(TD_ERR_INVALID, "%s of class \"%s\" returned NULL without an error", function,
                entry->name);
}

td_value *td__class_pack(struct td__rpc_class_entry *entry, void *object)
{
    if (!entry->pack) {
        td_fail(TD_ERR_UNSUPPORTED,
                "an object of class \"%s\" cannot be sent: the class has no pack(); send a "
                "reference",
                entry->name);
        return NULL;
    }
    uint64_t failures = td__error_count();
    td_value *packed = entry->pack(object);
    if (!packed)
        check_failure(entry, "pack()", failures);
    return packed;
}

void *td__class_unpack(struct td__rpc_class_entry *entry, td_value *packed)
{
    if (!entry->unpack) {
        td_fail(TD_ERR_UNSUPPORTED,
                "an object of class \"%s\" cannot be received: the class has no unpack()",
                entry->name);
        return NULL;
    }
    uint64_t failures = td__error_count();
    void *object = entry->unpack(packed);
    if (!object)
        check_failure(entry, "unpack()", failures);
    return object;
}

static td_status add_methods(struct td__rpc_class_entry *made, const td_rpc_method *methods,
                             int count, void *arg)
{
    for (int i = 0; i < count; i++) {
        struct td__signature *signature;
        if (!methods[i].fn)
            return td_fail(TD_ERR_INVALID, "the method \"%.200s\" has no function",
                           methods[i].signature);
        TD_TRY(td__signature_parse(methods[i].signature, &signature));
        bool twice = td__method_find(made, td__signature_name(signature));
        made->methods[made->method_count++] = (struct td__function_entry){.is_method = true,
                                                                          .signature = signature,
                                                                          .fn = methods[i].fn,
                                                                          .owner = made,
                                                                          .arg = arg};
        if (twice)
            return td_fail(TD_ERR_INVALID, "there are two methods \"%s\"",
                           td__signature_name(signature));
    }
    return TD_OK;
}

/* `own`: a class of the library itself. */
static td_status register_class(const td_rpc_class *given, bool own)
{
    struct td__function_entry *entry = NULL;
    int count = 0;
    if (!given->pack != !given->unpack)
        return td_fail(TD_ERR_INVALID, "\"%s\" has only one of pack and unpack", given->signature);
    while (given->methods && given->methods[count].signature)
        count++;
    TD_TRY(make(given->signature, NULL, given->arg, &entry));
    struct td__rpc_class_entry *made = calloc(1, sizeof *made +
                                                     sizeof made->methods[0] * (size_t)count);
    char *name = made ? strdup(td__signature_name(entry->signature)) : NULL;
    td_status status = !name ? td__fail_nomem("rpc") : own ? TD_OK : check_name(name);
    if (made) {
        atomic_init(&made->owners, 1);
        made->name = name;
        made->create = given->create;
        made->destroy = given->destroy;
        made->pack = given->pack;
        made->unpack = given->unpack;
        entry->owner = made;
    }
    if (!status)
        status = add_methods(made, given->methods, count, given->arg);
    if (!status)
        status = add(entry);
    if (status)
        td__function_release(entry);
    return status;
}

td_status td__rpc_register_class_own(const td_rpc_class *given)
{
    return register_class(given, true);
}

td_status td_rpc_register_class(const td_rpc_class *given)
{
    if (!given || !given->signature)
        return td__fail_null(__func__);
    TD_TRY(td__check_reserved(__func__, given->reserved));
    return name_call(__func__, register_class(given, false));
}

/* ---- Calling --------------------------------------------------------------------------------- */

static td_value *construct(struct td__rpc_class_entry *owner, td_rpc_call *call,
                           td_value *const *args, int count)
{
    if (!owner->create) {
        td_fail(TD_ERR_UNSUPPORTED,
                "objects of class \"%s\" cannot be made by a call: it has no create()",
                owner->name);
        return NULL;
    }
    void *object = owner->create(call, args, count);
    if (!object)
        return NULL;
    atomic_fetch_add(&owner->owners, 1);
    return td__value_adopt(td__value_new_object(owner, object));
}

td_value *td__function_call(struct td__function_entry *entry, td_rpc_call *call,
                            td_value *const *args, int count)
{
    return entry->fn ? entry->fn(call, args, count) : construct(entry->owner, call, args, count);
}
