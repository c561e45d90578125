/* A directory of numbered checkpoints: step-000000000123.safetensors, and sharded ones, step-000000000123.sharded. The
 * number decides, not the time of the file; of two with one number, the sharded one. A new one replaces that of its
 * number; old ones are removed only when it is complete. */
#include "base/fail.h"
#include "checkpoint/sharded.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PREFIX "step-"
#define SUFFIX ".safetensors"
#define SHARDED ".sharded"
enum { DIGITS = 12 };

struct numbered {
    int64_t step;
    bool is_sharded;
};

/* The path of a checkpoint, for free(); NULL without memory. */
static char *path_of(const char *directory, struct numbered one)
{
    char *path = NULL;
    if (asprintf(&path, "%s/" PREFIX "%0*" PRId64 "%s", directory, DIGITS, one.step,
                 one.is_sharded ? SHARDED : SUFFIX) < 0)
        return NULL;
    return path;
}

/* The number in a name of path_of(), or -1. */
static int64_t number_of(const char *name, bool *is_sharded)
{
    if (strncmp(name, PREFIX, strlen(PREFIX)) != 0)
        return -1;
    const char *digits = name + strlen(PREFIX);
    size_t count = strspn(digits, "0123456789");
    if (count < DIGITS || (count > DIGITS && *digits == '0'))
        return -1;
    *is_sharded = !strcmp(digits + count, SHARDED);
    if (!*is_sharded && strcmp(digits + count, SUFFIX) != 0)
        return -1;
    errno = 0;
    long long number = strtoll(digits, NULL, 10);
    return errno ? -1 : number;
}

static int compare_down(const void *a, const void *b)
{
    const struct numbered *x = a, *y = b;
    if (x->step != y->step)
        return x->step < y->step ? 1 : -1;
    return y->is_sharded - x->is_sharded;
}

/* All numbers in a directory, the greatest first, for free(). *missing: the directory does not
 * exist. */
static td_status list_numbers(const char *call, const char *directory, struct numbered **numbers,
                              size_t *count, bool *missing)
{
    *numbers = NULL;
    *count = 0;
    DIR *stream = opendir(directory);
    *missing = !stream && errno == ENOENT;
    if (!stream)
        return *missing ? TD_OK
                        : td_fail(TD_ERR_SYSTEM, "%s: the directory %s cannot be read: %s", call,
                                  directory, td__errno_text(errno));
    td_status status = TD_OK;
    size_t capacity = 0;
    for (struct dirent *entry; !status && (entry = readdir(stream));) {
        bool is_sharded = false;
        int64_t number = number_of(entry->d_name, &is_sharded);
        if (number < 0)
            continue;
        struct numbered *one = td__list_grow((void **)numbers, count, &capacity, sizeof *one);
        if (one)
            *one = (struct numbered){number, is_sharded};
        else
            status = td__fail_nomem(call);
    }
    closedir(stream);
    if (status) {
        free(*numbers);
        *numbers = NULL;
    } else if (*count) {
        qsort(*numbers, *count, sizeof **numbers, compare_down);
    }
    return status;
}

/* ---- Saving --------------------------------------------------------------------------------------- */

/* Removes all but the `keep` newest, which include `step`. Failures are only logged. */
void td__numbered_prune(const char *call, const char *directory, int64_t step, int keep)
{
    struct numbered *numbers = NULL;
    size_t count = 0;
    bool missing;
    if (keep == 0 || list_numbers(call, directory, &numbers, &count, &missing))
        return;
    int kept = 1;
    for (size_t i = 0; i < count; i++) {
        if (numbers[i].step == step || kept++ < keep)
            continue;
        char *path = path_of(directory, numbers[i]);
        int error = !path                   ? ENOMEM
                    : numbers[i].is_sharded ? td__sharded_directory_remove(path)
                    : unlink(path)          ? errno
                                            : 0;
        if (error && error != ENOENT)
            td_log(TD_LOG_WARN, "%s: the old checkpoint %s cannot be removed: %s", call,
                   path ? path : directory, td__errno_text(error));
        free(path);
    }
    free(numbers);
}

static td_status check_numbered(const char *call, const char *directory,
                                const td_training *training, int keep)
{
    if (!directory || !*directory || keep < 0)
        return td_fail(TD_ERR_INVALID, "%s: %s", call,
                       directory && *directory ? "the number of checkpoints to keep is negative"
                                               : "the directory is NULL or empty");
    if (training && training->step < 0)
        return td_fail(TD_ERR_INVALID, "%s: the step is %" PRId64 "; it must be 0 or more", call,
                       training->step);
    return TD_OK;
}

/* Rank 0's part. */
static td_status write_numbered(const char *call, const char *directory,
                                const td_training *training, int keep, const td_bytes *all,
                                int size)
{
    TD_TRY(check_numbered(call, directory, training, keep));
    if (!training)
        return td_fail(TD_ERR_INVALID, "%s: the training is NULL", call);
    TD_TRY(td__atomic_file_directory(call, directory));
    char *path = path_of(directory, (struct numbered){.step = training->step});
    if (!path)
        return td__fail_nomem(call);
    td_status status = td__training_write(call, path, training, all, size);
    free(path);
    if (!status)
        td__numbered_prune(call, directory, training->step, keep);
    return status;
}

td_status td_training_save_numbered(const char *directory, const td_training *training, int keep,
                                    td_group *group)
{
    static const char call[] = "td_training_save_numbered";
    struct td__coordinator coordinator;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    td_bytes *all = NULL;
    td_status status = TD_OK;
    TD_TRY(td__training_gather(call, training, &coordinator, &all));
    if (coordinator.rank == 0) {
        status = write_numbered(call, directory, training, keep, all, coordinator.size);
        td__coordinator_free(&coordinator, all);
    }
    return td__coordinator_follow(&coordinator, status);
}

static td_status sharded_path(const char *call, const char *directory, const td_training *training,
                              int keep, struct td__save_request *request, char **path)
{
    TD_TRY(check_numbered(call, directory, training, keep));
    *path = path_of(directory, (struct numbered){training->step, true});
    request->path = *path;
    request->after = (struct td__sharded_after){
        .directory = strdup(directory), .step = training->step, .keep = keep};
    return *path && request->after.directory ? TD_OK : td__fail_nomem(call);
}

td_status td_training_save_sharded_numbered(const char *directory, const td_training *training,
                                            int keep, td_group *group, td_async_save **save)
{
    static const char call[] = "td_training_save_sharded_numbered";
    struct td__coordinator coordinator;
    struct td__save_request request = {.call = call, .is_training = true};
    td_state *state = NULL;
    char *path = NULL;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    td_status mine = td__training_own(call, training, coordinator.rank, coordinator.size, &state);
    if (!mine && coordinator.rank == 0)
        mine = sharded_path(call, directory, training, keep, &request, &path);
    request.state = state;
    td_status status = td__save_sharded(&request, group, mine, save);
    td_state_destroy(state);
    free(path);
    return status;
}

/* ---- Loading --------------------------------------------------------------------------------------- */

/* Going through the checkpoints of a directory, the newest first. Lists are rank 0's. */
struct search {
    const char *call, *directory;
    const struct td__coordinator *coordinator;
    struct numbered *numbers;
    size_t count, at;
    td_status first; /* the error of the newest that cannot be read */
    char *message;
};

/* Whether to go on after a failure: a later version, too little memory, or a device that is not there, is no damage, and
 * loading an older checkpoint instead would silently lose work. */
static bool skip(struct search *search, td_status status, bool is_missing)
{
    if ((status != TD_ERR_INVALID && status != TD_ERR_SYSTEM) || is_missing)
        return false;
    if (search->coordinator->rank == 0)
        td_log(TD_LOG_WARN, "a checkpoint is skipped: %s", td__error_text());
    if (!search->first) {
        search->first = status;
        search->message = strdup(td__error_text());
    }
    return true;
}

/* On rank 0. The next one is *path, for free(), of a sharded one; else it was read to *read; or there is none. */
static td_status find_next(struct search *search, struct td__training_target *target,
                           struct td__checkpoint *read, char **path)
{
    while (search->at < search->count) {
        struct numbered one = search->numbers[search->at++];
        *path = path_of(search->directory, one);
        if (!*path)
            return td__fail_nomem(search->call);
        if (one.is_sharded)
            return TD_OK;
        td_status status = td__training_read(search->call, *path, target, read);
        free(*path);
        *path = NULL;
        if (!status || !skip(search, status, target->load.is_missing))
            return status;
    }
    return TD_OK;
}

/* On rank 0. */
static td_status list_all(struct search *search)
{
    bool missing = false;
    if (!search->directory || !*search->directory)
        return td_fail(TD_ERR_INVALID, "%s: the directory is NULL or empty", search->call);
    TD_TRY(
        list_numbers(search->call, search->directory, &search->numbers, &search->count, &missing));
    if (!missing) {
        td__atomic_file_sweep(search->directory);
        td__sharded_directory_sweep(search->directory);
    }
    return TD_OK;
}

/* Broadcasts what rank 0 has found: 'f' a file, 's' a sharded one, 'n' none. */
static td_status share_found(const struct td__coordinator *coordinator, char *found)
{
    td_bytes bytes = {0};
    if (coordinator->alone)
        return TD_OK;
    if (coordinator->rank == 0)
        bytes = (td_bytes){.data = found, .size = 1};
    TD_TRY(td_broadcast_object_list(&bytes, 1, coordinator->root, coordinator->group));
    *found = bytes.size == 1 ? bytes.data[0] : 'n';
    if (coordinator->rank != 0)
        td_bytes_free(&bytes);
    return TD_OK;
}

/* Tries one checkpoint after another. *found: what was loaded. */
static td_status try_all(struct search *search, struct td__training_target *target,
                         td_training *training, char *found)
{
    const struct td__coordinator *coordinator = search->coordinator;
    for (;;) {
        struct td__checkpoint read = {0};
        char *path = NULL;
        td_status status = TD_OK;
        if (coordinator->rank == 0)
            status = find_next(search, target, &read, &path);
        *found = read.state ? 'f' : path ? 's' : 'n';
        status = td__coordinator_follow(coordinator, status);
        if (!status)
            status = share_found(coordinator, found);
        if (status || *found == 'n') {
            td__checkpoint_free(&read);
            free(path);
            return status;
        }
        if (*found == 'f')
            return td__training_receive(search->call, coordinator, TD_OK, &read, training);
        status = td__training_load_sharded(search->call, path, training, coordinator);
        free(path);
        if (!status || !skip(search, status, false))
            return status;
    }
}

td_status td_training_load_latest(const char *directory, td_training *training, td_group *group,
                                  bool *loaded)
{
    static const char call[] = "td_training_load_latest";
    struct td__coordinator coordinator;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    struct search search = {.call = call, .directory = directory, .coordinator = &coordinator};
    struct td__training_target target = {0};
    int parts;
    char found = 'n';
    TD_TRY(td__gather_parts(&coordinator, training, &parts));
    td_status status = TD_OK;
    if (coordinator.rank == 0) {
        status = list_all(&search);
        if (!status)
            status = td__training_target(training, parts, &target);
    }
    status = td__coordinator_follow(&coordinator, status);
    if (!status)
        status = try_all(&search, &target, training, &found);
    if (!status && found == 'n' && search.first)
        status = td_fail(search.first, "%s", search.message ? search.message : "out of memory");
    if (!status)
        status = td__coordinator_follow(&coordinator, status);
    if (!status && found == 'n' && !loaded)
        status = td_fail(TD_ERR_SYSTEM, "%s: there is no checkpoint in %s", call,
                         directory ? directory : "(NULL)");
    if (!status && loaded)
        *loaded = found != 'n';
    td__training_target_free(&target);
    free(search.numbers);
    free(search.message);
    return status;
}
