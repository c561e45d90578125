/* Devices by name, kinds, and the current device of a thread; see device.h. The table of devices only grows, so that
 * handles stay valid. */
#include "device/device_internal.h"

#include "base/fail.h"
#include "base/number.h"
#include "base/thread.h"
#include "plugin/plugins.h"

#include <ctype.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_CPUS = 64, MOST_INDEX = 4095, MOST_MALFORMED = 64 };

/* Protects the tables of names and kinds. Innermost, but for the locks of the allocator. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

static struct td__device_kind cpu_kind = {.name = "cpu"};
static td_device host = {
    .name = "cpu",
    .kind_name = "cpu",
    .index = -1,
    .is_host = true,
    .is_open = true,
    .kernels = &td__cpu_kernels,
    .kind = &cpu_kind,
    .stream = {.device = &host},
};
static td_device *devices; /* all others */
static td_device none = {
    .name = "?", .index = -1, .is_malformed = true}; /* without memory for another */
static int malformed_count;
static struct td__device_kind *kinds[TD__KINDS_MOST] = {&cpu_kind};
static int kind_count = 1;

td_device *td__host_device(void)
{
    return &host;
}

/* ---- The current device of a thread ----------------------------------------------------------- */

static _Thread_local td_device *current; /* NULL: the host */
static _Thread_local int16_t
    current_index[TD__KINDS_MOST]; /* of each kind, for names without a number */

td_device *td_current_device(void)
{
    return current ? current : &host;
}

static void set_current(td_device *device)
{
    current = device;
    if (device->kind && device->index >= 0)
        current_index[device->kind->slot] = (int16_t)device->index;
}

td_status td_set_device(td_device *device)
{
    device = td__use_device("td_set_device", device);
    if (!device)
        return td__error_status();
    set_current(device);
    return TD_OK;
}

td_device_scope td_device_scope_begin(td_device *device)
{
    td_device_scope scope = {td_current_device()};
    if (device)
        set_current(device);
    return scope;
}

void td_device_scope_end(td_device_scope *scope)
{
    if (scope->before)
        set_current(scope->before);
    scope->before = NULL;
}

/* ---- Names -------------------------------------------------------------------------------------- */

static bool is_kind_name(const char *name, size_t length)
{
    if (length == 0 || length >= TD__KIND_NAME || !isalpha((unsigned char)name[0]))
        return false;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)name[i]) && name[i] != '_')
            return false;
    return true;
}

/* Splits "cuda:1"; *index is -1 without a number. False for what is no name of a device. */
static bool parse_name(const char *name, char kind[TD__KIND_NAME], int *index)
{
    const char *colon = strchr(name, ':');
    size_t length = colon ? (size_t)(colon - name) : strlen(name);
    if (!is_kind_name(name, length))
        return false;
    memcpy(kind, name, length);
    kind[length] = 0;
    *index = -1;
    int most = strcmp(kind, "cpu") ? MOST_INDEX : MOST_CPUS - 1;
    /* "cuda:01" would be a second name of cuda:1. */
    return !colon || (td__parse_int(colon + 1, 0, most, index) && (colon[1] != '0' || !colon[2]) &&
                      colon[1] != '-' && colon[1] != '+');
}

/* A new entry of the table, under its lock. */
static td_device *add_device(const char *name, const char *kind, int index, bool is_malformed)
{
    td_device *device = calloc(1, sizeof *device);
    if (!device)
        return &none;
    snprintf(device->name, sizeof device->name, "%.31s", name);
    snprintf(device->kind_name, sizeof device->kind_name, "%s", kind);
    device->index = index;
    device->is_malformed = is_malformed;
    device->is_host = !is_malformed && !strcmp(kind, "cpu");
    device->stream.device = device;
    if (device->is_host) {
        device->kind = &cpu_kind;
        device->kernels = &td__cpu_kernels;
        atomic_store(&device->is_open, true);
    }
    device->next = devices;
    devices = device;
    return device;
}

static td_device *intern(const char *name, const char *kind, int index, bool is_malformed)
{
    pthread_mutex_lock(&table_lock);
    td_device *device = devices;
    while (device && strncmp(device->name, name, sizeof device->name - 1))
        device = device->next;
    for (td_device *any = devices;
         !device && is_malformed && malformed_count >= MOST_MALFORMED && any; any = any->next)
        device = any->is_malformed ? any : NULL;
    if (!device) {
        device = add_device(name, kind, index, is_malformed);
        malformed_count += is_malformed;
    }
    pthread_mutex_unlock(&table_lock);
    return device;
}

/* The thread's current device of a kind; the first one at the start, also before the kind is registered. */
static int index_of_kind(const char *kind)
{
    int index = 0;
    pthread_mutex_lock(&table_lock);
    for (int i = 0; i < kind_count; i++)
        if (!strcmp(kinds[i]->name, kind))
            index = current_index[i];
    pthread_mutex_unlock(&table_lock);
    return index;
}

td_device *td_device_get(const char *name)
{
    char kind[TD__KIND_NAME] = "";
    int index = -1;
    if (!name)
        return td_current_device();
    if (!strcmp(name, "cpu"))
        return &host;
    td_device *meta = td__meta_of_name(name);
    if (meta)
        return meta;
    if (!parse_name(name, kind, &index))
        return intern(name, kind, -1, true);
    if (index >= 0)
        return intern(name, kind, index, false);
    char numbered[32];
    snprintf(numbered, sizeof numbered, "%s:%d", kind, index_of_kind(kind));
    return intern(numbered, kind, index_of_kind(kind), false);
}

const char *td_device_name(const td_device *device)
{
    return device ? device->name : td_current_device()->name;
}

const char *td_device_kind(const td_device *device)
{
    return device ? device->kind_name : td_current_device()->kind_name;
}

int td_device_index(const td_device *device)
{
    return device ? device->index : td_current_device()->index;
}

/* ---- Kinds --------------------------------------------------------------------------------------- */

void td__kind_names(char *text, size_t size)
{
    size_t length = 0;
    pthread_mutex_lock(&table_lock);
    for (int i = 0; i < kind_count && length < size; i++)
        length += (size_t)snprintf(text + length, size - length, "%s%s", i ? ", " : "",
                                   kinds[i]->name);
    pthread_mutex_unlock(&table_lock);
}

const struct td__device_kind *td__kind_number(int number)
{
    pthread_mutex_lock(&table_lock);
    const struct td__device_kind *kind = number < kind_count ? kinds[number] : NULL;
    pthread_mutex_unlock(&table_lock);
    return kind;
}

static struct td__device_kind *registered(const char *name)
{
    struct td__device_kind *kind = NULL;
    pthread_mutex_lock(&table_lock);
    for (int i = 0; i < kind_count; i++)
        if (!strcmp(kinds[i]->name, name))
            kind = kinds[i];
    pthread_mutex_unlock(&table_lock);
    return kind;
}

struct td__device_kind *td__find_kind(const char *name)
{
    char why[1200] = "";
    bool found;
    struct td__device_kind *kind = registered(name);
    if (kind || td__plugin_find(name, &found))
        return kind;
    if (found && (kind = registered(name)))
        return kind;
    char known[TD__KINDS_MOST * (TD__KIND_NAME + 2)];
    td__kind_names(known, sizeof known);
    td__plugin_explain(name, why, sizeof why);
    td_fail(TD_ERR_INVALID, "the kind \"%s\" is not known; known are %s%s", name, known, why);
    return NULL;
}

static td_status check_version(const char *what, const char *kind, uint32_t version,
                               uint32_t library)
{
    if (version == library)
        return TD_OK;
    return td_fail(TD_ERR_MISMATCH,
                   "td_register_device: %s has version %u of the table of %s, which is too %s for "
                   "this library, whose version is %u; build it with the headers of this library",
                   kind, version, what, version < library ? "old" : "new", library);
}

static td_status check_ops(const td_device_ops *ops, const char *kind, uint32_t size)
{
    if (size < offsetof(td_device_ops, breaks_fork)) /* the table of the first headers ends there */
        return td_fail(TD_ERR_INVALID,
                       "td_register_device: the table of %s has %u bytes, and version %u of it at "
                       "least %zu; set `size` to sizeof(td_device_ops)",
                       kind, size, TD_DEVICE_OPS_VERSION, offsetof(td_device_ops, breaks_fork));
    if (!ops->count || !ops->open || !ops->alloc || !ops->free || !ops->stream_create ||
        !ops->stream_destroy || !ops->stream_synchronize || !ops->stream_query ||
        !ops->event_create || !ops->event_destroy || !ops->event_record || !ops->event_wait ||
        !ops->event_synchronize || !ops->event_query || !ops->synchronize || !ops->copy_in ||
        !ops->copy_out || !ops->copy || !ops->fill || !ops->kernels)
        return td_fail(TD_ERR_INVALID,
                       "td_register_device: the table of %s lacks a function that every device "
                       "must have; device_ops.h says which may be NULL",
                       ops->kind);
    if (!ops->alloc_pinned != !ops->free_pinned)
        return td_fail(TD_ERR_INVALID,
                       "td_register_device: %s has only one of alloc_pinned and free_pinned",
                       ops->kind);
    if (!ops->capture_begin != !ops->capture_end || !ops->capture_begin != !ops->graph_launch ||
        !ops->capture_begin != !ops->graph_destroy)
        return td_fail(TD_ERR_INVALID,
                       "td_register_device: %s has only some of capture_begin, capture_end, "
                       "graph_launch and graph_destroy",
                       ops->kind);
    return check_version("kernels", ops->kind, ops->kernels->version, TD_KERNELS_VERSION);
}

/* Copies a table that may be shorter, or longer, than that of this library. */
static void complete(void *to, size_t size, const void *from, size_t from_size)
{
    memset(to, 0, size);
    memcpy(to, from, from_size < size ? from_size : size);
}

static td_status add_kind(struct td__device_kind *kind)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&table_lock);
    for (int i = 0; i < kind_count && !status; i++)
        if (!strcmp(kinds[i]->name, kind->name))
            status = TD_ERR_STATE;
    if (!status && kind_count == TD__KINDS_MOST)
        status = TD_ERR_NOMEM;
    if (!status) {
        kind->slot = kind_count;
        kinds[kind_count++] = kind;
    }
    pthread_mutex_unlock(&table_lock);
    if (status == TD_ERR_STATE)
        return td_fail(status, "td_register_device: the kind %s is registered already", kind->name);
    if (status)
        return td_fail(status, "td_register_device: there are %d kinds of devices already",
                       TD__KINDS_MOST);
    return TD_OK;
}

td_status td_register_device(const td_device_ops *ops, void *arg)
{
    if (!ops || !ops->kind || !is_kind_name(ops->kind, strlen(ops->kind)))
        return td_fail(TD_ERR_INVALID,
                       "td_register_device: a kind is up to %d letters, digits and '_', with a "
                       "letter first",
                       TD__KIND_NAME - 1);
    if (!strcmp(ops->kind, "meta"))
        return td_fail(TD_ERR_STATE, "td_register_device: the kind meta is the library's own");
    TD_TRY(check_version("devices", ops->kind, ops->version, TD_DEVICE_OPS_VERSION));
    struct td__device_kind *kind = calloc(1, sizeof *kind);
    if (!kind)
        return td__fail_nomem("td_register_device");
    complete(&kind->ops, sizeof kind->ops, ops, ops->size);
    td_status status = check_ops(&kind->ops, ops->kind, ops->size);
    if (!status) {
        complete(&kind->kernels, sizeof kind->kernels, ops->kernels, ops->kernels->size);
        memcpy(kind->name, ops->kind, strlen(ops->kind));
        kind->arg = arg;
        status = add_kind(kind);
    }
    if (status)
        free(kind);
    else
        td__plugin_note(TD__PLUGIN_DEVICE, ops->kind);
    return status;
}

/* How many devices of a kind there are; -1, with the last error set, where it cannot tell. */
static int count_of(const struct td__device_kind *kind)
{
    return kind == &cpu_kind ? MOST_CPUS : kind->ops.count(kind->arg);
}

int td_device_count(const char *name)
{
    struct td__error before;
    td__error_save(&before);
    struct td__device_kind *kind = name && is_kind_name(name, strlen(name)) ? td__find_kind(name)
                                                                            : NULL;
    int count = kind ? count_of(kind) : 0;
    td__error_undo(&before);
    return count > 0 ? count : 0;
}

bool td_device_exists(const char *name)
{
    char kind[TD__KIND_NAME];
    int index;
    const td_device *meta = name ? td__meta_of_name(name) : NULL;
    if (meta)
        name = meta->target->name;
    if (!name || !parse_name(name, kind, &index))
        return false;
    return !strcmp(name, "cpu") || td_device_count(kind) > (index < 0 ? 0 : index);
}

/* ---- Opening --------------------------------------------------------------------------------------- */

/* Held while a device is opened; outside of table_lock. Recursive: open() may use other devices. */
static pthread_mutex_t open_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int open_count;

static td_status fail_missing(const char *call, const td_device *device)
{
    struct td__error cause;
    if (device->is_malformed)
        return td_fail(TD_ERR_INVALID,
                       "%s: \"%s\" is no name of a device; one is a kind and a number, such as "
                       "cuda:1, or cpu",
                       call, device->name);
    td__error_save(&cause);
    return td_fail(TD_ERR_INVALID, "%s: there is no device %s: %s", call, device->name, cause.text);
}

/* Read once, and not when a kernel is missing: that may be on a thread of the library. */
static bool wants_fallback(void)
{
    const char *value = getenv("TANDEM_FALLBACK");
    return value && !strcmp(value, "cpu");
}

static td_status open_device(const char *call, td_device *device, struct td__device_kind *kind)
{
    int count = count_of(kind);
    if (count >= 0 && device->index >= count)
        td_fail(TD_ERR_INVALID, "there %s %d of the kind %s", count == 1 ? "is" : "are", count,
                kind->name);
    if (device->index >= count)
        return fail_missing(call, device);
    if (open_count == TD__ACCELERATORS_MOST)
        return td_fail(TD_ERR_NOMEM, "%s: %d devices are open, no more can be", call, open_count);
    td_status status = kind->ops.open(kind->arg, device->index, &device->self);
    if (!status)
        status = kind->ops.stream_create(device->self, 0, &device->stream.self);
    if (status)
        return td_fail(status, "%s: %s cannot be used: %s", call, device->name, td__error_text());
    device->kind = kind;
    device->kernels = &td__wrapped_kernels;
    device->slot = open_count++;
    device->falls_back = wants_fallback();
    device->fork_generation = td__fork_generation();
    if (kind->ops.breaks_fork) {
        char why[64];
        snprintf(why, sizeof why, "the device %s is in use", device->name);
        td__fork_breaks(why);
    }
    atomic_store_explicit(&device->is_open, true, memory_order_release);
    return TD_OK;
}

td_device *td__open_device(const char *call, td_device *device)
{
    bool is_open = atomic_load_explicit(&device->is_open, memory_order_acquire);
    if (!is_open) {
        /* Without the lock: this may load a plug-in. */
        struct td__device_kind *kind = device->is_malformed ? NULL
                                                            : td__find_kind(device->kind_name);
        if (!kind) {
            fail_missing(call, device);
            return NULL;
        }
        pthread_mutex_lock(&open_lock);
        is_open = atomic_load(&device->is_open) || open_device(call, device, kind) == TD_OK;
        pthread_mutex_unlock(&open_lock);
    }
    if (!is_open)
        return NULL;
    if (device->kind->ops.breaks_fork && device->fork_generation != td__fork_generation()) {
        td_fail(TD_ERR_STATE,
                "%s: %s was opened before this process was forked, and cannot be used in it; start "
                "processes afresh (exec), or fork before the first use",
                call, device->name);
        return NULL;
    }
    return device;
}

void *td_device_self(td_device *device)
{
    device = td__use_device("td_device_self", device);
    return device ? device->self : NULL;
}

int64_t td_device_waits(td_device *device)
{
    return atomic_load(&(device ? device : td_current_device())->waits);
}
