/* The store in a file that all processes of a job can reach. shared_file.h describes its locks and when it is
 * removed, file_log.h its contents.
 *
 *     a call    waits for its turn among the threads; locks the file; reads what is new; looks, or makes a
 *               change and writes it; unlocks
 *     waiting   a call, again and again, with growing pauses in which nothing is locked: a shared file system
 *               does not notify one host of what another one has written
 *
 * A change costs five system calls, a look three: a few microseconds where the file is local, a few
 * round trips where it is not. */
#include "base/fail.h"
#include "base/thread.h"
#include "store/file_log.h"
#include "store/shared_file.h"
#include "store/store_ops.h"

#include <stdlib.h>

enum {
    FIRST_PAUSE_NS = 250000,
    LONGEST_PAUSE_NS = 10000000,
};

struct file_store {
    td_store head;
    pthread_mutex_t lock; /* protects busy, and is held no longer than that takes */
    pthread_cond_t idle;
    bool busy; /* a thread is inside a call: the rest is its own, and the file's lock, too */
    struct td__shared_file shared;
    struct td__file_log log;
};

/* Waits for its turn among the threads of this process; false when the deadline has passed. */
static bool take_turn(struct file_store *file, td__deadline deadline)
{
    pthread_mutex_lock(&file->lock);
    bool in_time = true;
    while (file->busy && in_time)
        in_time = td__cond_wait(&file->idle, &file->lock, deadline);
    bool mine = !file->busy;
    file->busy = true;
    pthread_mutex_unlock(&file->lock);
    return mine;
}

static void end_turn(struct file_store *file)
{
    pthread_mutex_lock(&file->lock);
    file->busy = false;
    pthread_cond_signal(&file->idle);
    pthread_mutex_unlock(&file->lock);
}

/* Begins a call: the store and its file are locked, and log.kv is up to date. */
static td_status enter(td_store *store, td__deadline deadline, struct file_store **out)
{
    struct file_store *file = (struct file_store *)store;
    /* First of all: in a forked child the lock may be held for ever, by a thread that only the parent has. */
    if (td__shared_file_inherited(&file->shared))
        return td_fail(TD_ERR_STATE,
                       "file store \"%s\": it was opened before fork() and belongs to the parent; "
                       "open it again in the child",
                       file->shared.path);
    if (!take_turn(file, deadline))
        return td_fail(TD_ERR_TIMEOUT,
                       "file store \"%s\": timed out while another thread waited for the file's "
                       "lock; is a process that uses it stopped (state T in ps)?",
                       file->shared.path);
    td_status status = td__shared_file_lock(&file->shared, deadline);
    if (status)
        goto end_turn;
    status = td__file_log_refresh(&file->log);
    if (status)
        goto unlock;
    *out = file;
    return TD_OK;

unlock:
    td__shared_file_unlock(&file->shared);
end_turn:
    end_turn(file);
    return status;
}

/* Ends a call and returns `status`. One that failed may have changed what is in memory and not what
 * is in the file, which is read again then. */
static td_status leave(struct file_store *file, td_status status)
{
    if (status)
        td__file_log_forget(&file->log);
    td__shared_file_unlock(&file->shared);
    end_turn(file);
    return status;
}

/* Writes one change that was made in memory. */
static td_status commit(struct file_store *file, enum td__file_change change, struct td__span key,
                        struct td__span value)
{
    struct td__buffer records = {0};
    td__file_log_put(&file->log, &records, change, key, value);
    return td__file_log_commit(&file->log, &records);
}

static td_status file_set(td_store *store, const struct td__span *keys,
                          const struct td__span *values, size_t count, td__deadline deadline)
{
    struct file_store *file;
    struct td__buffer records = {0};
    td_status status = TD_OK;
    TD_TRY(enter(store, deadline, &file));
    for (size_t i = 0; !status && i < count; i++) {
        status = td__kv_set(&file->log.kv, keys[i], values[i]);
        td__file_log_put(&file->log, &records, TD__FILE_SET, keys[i], values[i]);
    }
    if (!status)
        status = td__file_log_commit(&file->log, &records);
    td__buffer_free(&records);
    return leave(file, status);
}

static td_status file_append(td_store *store, struct td__span key, struct td__span value,
                             td__deadline deadline)
{
    struct file_store *file;
    TD_TRY(enter(store, deadline, &file));
    td_status status = td__kv_append(&file->log.kv, key, value);
    if (!status)
        status = commit(file, TD__FILE_APPEND, key, value);
    return leave(file, status);
}

static td_status file_add(td_store *store, struct td__span key, int64_t amount,
                          td__deadline deadline, int64_t *result)
{
    struct file_store *file;
    int64_t sum;
    TD_TRY(enter(store, deadline, &file));
    td_status status = td__kv_add(&file->log.kv, key, amount, &sum);
    if (!status) {
        const struct td__blob *text = td__kv_find(&file->log.kv, key);
        status = commit(file, TD__FILE_SET, key, (struct td__span){text->data, text->size});
    }
    if (!status)
        *result = sum;
    return leave(file, status);
}

static td_status file_compare_set(td_store *store, struct td__span key, struct td__span expected,
                                  struct td__span desired, td__deadline deadline, td_bytes *value)
{
    struct file_store *file;
    struct td__span result;
    td_bytes copy = {0};
    bool changed;
    TD_TRY(enter(store, deadline, &file));
    td_status status = td__kv_compare_set(&file->log.kv, key, expected, desired, &result, &changed);
    if (!status)
        status = td_bytes_copy(result.data, result.size, &copy);
    if (!status && changed)
        status = commit(file, TD__FILE_SET, key, desired);
    if (status)
        td_bytes_free(&copy);
    else
        *value = copy;
    return leave(file, status);
}

static td_status file_delete(td_store *store, struct td__span key, td__deadline deadline,
                             bool *deleted)
{
    struct file_store *file;
    TD_TRY(enter(store, deadline, &file));
    bool was_there = td__kv_delete(&file->log.kv, key);
    td_status status = was_there ? commit(file, TD__FILE_DELETE, key, (struct td__span){"", 0})
                                 : TD_OK;
    if (!status)
        *deleted = was_there;
    return leave(file, status);
}

static td_status file_check(td_store *store, const struct td__span *keys, size_t count,
                            td__deadline deadline, bool *all_exist)
{
    struct file_store *file;
    TD_TRY(enter(store, deadline, &file));
    *all_exist = td__kv_first_missing(&file->log.kv, keys, count, 0) < 0;
    return leave(file, TD_OK);
}

static td_status file_num_keys(td_store *store, struct td__span prefix, td__deadline deadline,
                               int64_t *count)
{
    struct file_store *file;
    TD_TRY(enter(store, deadline, &file));
    *count = td__kv_count(&file->log.kv, prefix);
    return leave(file, TD_OK);
}

/* The key was not set in time, perhaps because the other processes have opened another file. */
static td_status fail_missing_key(const struct file_store *file, struct td__span key)
{
    td_status status = td__fail_missing_key("file", key);
    if (td__shared_file_in_place(&file->shared))
        return status;
    return td_fail(status, "%s; its file \"%s\" was removed or replaced while it was open",
                   td__error_text(), file->shared.path);
}

static td_status file_get(td_store *store, const struct td__span *keys, size_t count,
                          td__deadline deadline, td_bytes *values)
{
    struct file_store *file;
    long missing = 0;
    for (int64_t pause = FIRST_PAUSE_NS;;) {
        TD_TRY(enter(store, td__store_answer_deadline(store, deadline), &file));
        missing = td__kv_first_missing(&file->log.kv, keys, count, (size_t)missing);
        if (missing < 0)
            return leave(file, values ? td__kv_copy(&file->log.kv, keys, count, values) : TD_OK);
        leave(file, TD_OK);
        if (!td__pause_longer(&pause, LONGEST_PAUSE_NS, deadline))
            return fail_missing_key(file, keys[missing]);
    }
}

static td_status file_close(td_store *store)
{
    struct file_store *file = (struct file_store *)store;
    /* In a fork, the map may be as another thread of the parent left it in the middle of a change:
     * it is not touched. */
    if (!td__shared_file_inherited(&file->shared)) {
        td__kv_free(&file->log.kv);
        pthread_cond_destroy(&file->idle);
        pthread_mutex_destroy(&file->lock);
    }
    td_status status = td__shared_file_close(&file->shared, true,
                                             td__deadline_in_ms(td_store_timeout(store)));
    free(file);
    return status;
}

static const struct td__store_ops file_store_ops = {
    .kind = "file",
    .set = file_set,
    .append = file_append,
    .get = file_get,
    .check = file_check,
    .add = file_add,
    .compare_set = file_compare_set,
    .delete_key = file_delete,
    .num_keys = file_num_keys,
    .close = file_close,
};

td_status td_file_store_open(const char *path, td_store **store)
{
    if (!path || !*path || !store)
        return td_fail(TD_ERR_INVALID, "td_file_store_open: %s",
                       store ? "the path is NULL or empty" : "the output is NULL");
    struct file_store *file = calloc(1, sizeof *file);
    if (!file)
        return td__fail_nomem("file store");
    td__deadline deadline = td__deadline_in_ms(TD_STORE_DEFAULT_TIMEOUT_MS);
    bool first;
    td_status status = td__shared_file_open(&file->shared, path, deadline, &first);
    if (status)
        goto free_store;
    file->log.fd = file->shared.fd;
    file->log.path = file->shared.path;
    status = first ? td__file_log_reset(&file->log) : td__file_log_refresh(&file->log);
    if (status)
        goto close_file;

    td__shared_file_unlock(&file->shared);
    td__store_init(&file->head, &file_store_ops, 0);
    pthread_mutex_init(&file->lock, NULL);
    td__cond_init(&file->idle);
    *store = &file->head;
    return TD_OK;

close_file:
    /* A file that could not be begun is removed; one that is not a store's, or is in use, stays. */
    td__shared_file_close(&file->shared, first && status != TD_ERR_INVALID, deadline);
free_store:
    free(file);
    return status;
}
