/* What accelerators lack, computed on the host; see fallback.h. Whole storages are copied, so that views and tensors
 * that share memory stay what they are. */
#include "tensor/fallback.h"

#include "base/fail.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct td__host_copy {
    struct td__host_copy *next;
    struct td__storage *original, *copy;
    struct td__storage *former; /* what was there before, where more than one is written; or NULL */
    bool written;
};

/* ---- One warning for each kernel of a kind ------------------------------------------------------------ */

struct warned {
    struct warned *next;
    const struct td__device_kind *kind;
    char what[64];
};

static pthread_mutex_t warned_lock = PTHREAD_MUTEX_INITIALIZER; /* innermost */
static struct warned *warned_list;

static bool is_first(const struct td__device_kind *kind, const char *what)
{
    pthread_mutex_lock(&warned_lock);
    struct warned *entry = warned_list;
    while (entry && (entry->kind != kind || strncmp(entry->what, what, sizeof entry->what - 1)))
        entry = entry->next;
    bool first = !entry;
    if (first && (entry = calloc(1, sizeof *entry))) {
        entry->kind = kind;
        memcpy(entry->what, what, strnlen(what, sizeof entry->what - 1));
        entry->next = warned_list;
        warned_list = entry;
    }
    pthread_mutex_unlock(&warned_lock);
    return first;
}

/* "unary (gelu) of f32": the dtype is that of the first input, or of the result where there is none. */
static void describe(const struct td__operands *operands, char text[64])
{
    const td_tensor *any = NULL;
    for (int i = operands->written; i < operands->count && !any; i++)
        any = *operands->at[i];
    for (int i = 0; i < operands->written && !any; i++)
        any = *operands->at[i];
    snprintf(text, 64, "%s%s%s%s%s%s", operands->slot, operands->detail ? " (" : "",
             operands->detail ? operands->detail : "", operands->detail ? ")" : "",
             any ? " of " : "", any ? td_dtype_name(any->layout.dtype) : "");
}

/* ---- Copies ------------------------------------------------------------------------------------------- */

static td_status copy_storage(struct td__storage *to, struct td__storage *from)
{
    struct td__place target = td__storage_place(to, 0), source = td__storage_place(from, 0);
    return td__copy_between("TANDEM_FALLBACK=cpu", &target, &source, from->bytes, false);
}

static td_status find_copy(struct td__host_copy **copies, struct td__storage *original,
                           struct td__host_copy **found)
{
    for (*found = *copies; *found; *found = (*found)->next)
        if ((*found)->original == original)
            return TD_OK;
    struct td__host_copy *copy = calloc(1, sizeof *copy);
    if (!copy)
        return td__fail_nomem("TANDEM_FALLBACK=cpu");
    copy->original = original;
    copy->next = *copies;
    *copies = *found = copy;
    copy->copy = td__storage_create(td__host_device(), "TANDEM_FALLBACK=cpu", original->bytes);
    return copy->copy ? copy_storage(copy->copy, original) : TD_ERR_NOMEM;
}

static void free_copies(struct td__operands *operands, int replaced, struct td__host_copy *copies)
{
    for (int i = 0; i < replaced; i++)
        td_tensor_release((td_tensor *)*operands->at[i]);
    while (copies) {
        struct td__host_copy *next = copies->next;
        if (copies->copy)
            td__storage_release(copies->copy);
        if (copies->former)
            td__storage_release(copies->former);
        free(copies);
        copies = next;
    }
}

/* A list is written as a whole or not at all: where one copy back fails, the others are undone from these. */
static td_status keep_formers(struct td__host_copy *copies)
{
    int written = 0;
    for (const struct td__host_copy *copy = copies; copy; copy = copy->next)
        written += copy->written;
    for (struct td__host_copy *copy = copies; copy && written > 1; copy = copy->next) {
        if (!copy->written)
            continue;
        copy->former = td__storage_create(td__host_device(), "TANDEM_FALLBACK=cpu",
                                          copy->original->bytes);
        if (!copy->former)
            return TD_ERR_NOMEM;
        TD_TRY(copy_storage(copy->former, copy->copy));
    }
    return TD_OK;
}

/* Of the copies before `failed`. A device on which this fails is lost, with all that it has. */
static void restore_formers(struct td__host_copy *copies, const struct td__host_copy *failed)
{
    struct td__error cause;
    td__error_save(&cause);
    for (struct td__host_copy *copy = copies; copy != failed; copy = copy->next)
        if (copy->former)
            copy_storage(copy->original, copy->former);
    td__error_restore(&cause);
}

td_status td__fallback_begin(struct td__operands *operands, struct td__host_copy **copies)
{
    char what[64];
    describe(operands, what);
    if (td__is_meta(operands->device))
        return td__fail_meta(what, operands->device);
    if (!operands->device->falls_back)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s: %s has no such kernel; TANDEM_FALLBACK=cpu in the environment, before "
                       "the device is used, computes it on the host",
                       what, operands->device->name);
    if (is_first(operands->device->kind, what))
        td_log(TD_LOG_WARN, "%s is computed on the host, since %s has no such kernel", what,
               operands->device->name);
    *copies = NULL;
    for (int i = 0; i < operands->count; i++) {
        const td_tensor *tensor = *operands->at[i];
        struct td__host_copy *copy;
        if (!tensor)
            continue;
        td_status status = find_copy(copies, tensor->storage, &copy);
        td_tensor *stand_in = status ? NULL
                                     : td__tensor_over(copy->copy, tensor->offset, &tensor->layout);
        if (!stand_in) {
            status = td__error_status();
            free_copies(operands, i, *copies);
            return status;
        }
        copy->written |= i < operands->written;
        *operands->at[i] = stand_in;
    }
    td_status status = keep_formers(*copies);
    if (status)
        free_copies(operands, operands->count, *copies);
    return status;
}

td_status td__fallback_end(struct td__operands *operands, struct td__host_copy *copies,
                           td_status status)
{
    for (struct td__host_copy *copy = copies; copy && !status; copy = copy->next)
        if (copy->written && (status = copy_storage(copy->original, copy->copy)))
            restore_formers(copies, copy);
    free_copies(operands, operands->count, copies);
    return status;
}

void td__note_uses(const struct td__operands *operands)
{
    td_stream *stream = td__stream_of(operands->device);
    for (int i = 0; i < operands->count; i++) {
        const td_tensor *tensor = *operands->at[i];
        if (tensor && tensor->storage->free_fn == td__block_free)
            td__block_use(tensor->storage->arg, stream);
    }
}

/* ---- Watching -------------------------------------------------------------------------------------------- */

static void (*_Atomic kernel_watch)(const char *slot, td_status status);

void td__watch_kernels(void (*watch)(const char *slot, td_status status))
{
    atomic_store(&kernel_watch, watch);
}

void td__note_kernel(const char *slot, td_status status)
{
    void (*watch)(const char *, td_status) = atomic_load_explicit(&kernel_watch,
                                                                  memory_order_acquire);
    if (watch)
        watch(slot, status);
}
