/* A directory of numbered checkpoints: step-000000000123.safetensors. The number decides, not the
 * time of the file. A new file replaces one of its number; old ones are removed only when it is
 * complete. */
#include "base/fail.h"
#include "checkpoint/training.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PREFIX "step-"
#define SUFFIX ".safetensors"
enum { DIGITS = 12 };

/* The path of a number, for free(); NULL without memory. */
static char *path_of(const char *directory, int64_t step)
{
    char *path = NULL;
    if (asprintf(&path, "%s/" PREFIX "%0*" PRId64 SUFFIX, directory, DIGITS, step) < 0)
        return NULL;
    return path;
}

/* The number in a name of path_of(), or -1. */
static int64_t number_of(const char *name)
{
    if (strncmp(name, PREFIX, strlen(PREFIX)) != 0)
        return -1;
    const char *digits = name + strlen(PREFIX);
    size_t count = strspn(digits, "0123456789");
    if (count < DIGITS || (count > DIGITS && *digits == '0') || strcmp(digits + count, SUFFIX) != 0)
        return -1;
    errno = 0;
    long long number = strtoll(digits, NULL, 10);
    return errno ? -1 : number;
}

static int compare_down(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* All numbers in a directory, the greatest first, for free(). *missing: the directory does not
 * exist. */
static td_status list_numbers(const char *call, const char *directory, int64_t **numbers,
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
        int64_t number = number_of(entry->d_name);
        if (number < 0)
            continue;
        if (*count == capacity) {
            capacity = capacity ? capacity * 2 : 64;
            int64_t *grown = realloc(*numbers, capacity * sizeof *grown);
            if (!grown) {
                status = td__fail_nomem(call);
                break;
            }
            *numbers = grown;
        }
        (*numbers)[(*count)++] = number;
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
static void prune(const char *call, const char *directory, int64_t step, int keep)
{
    int64_t *numbers = NULL;
    size_t count = 0;
    bool missing;
    if (keep == 0 || list_numbers(call, directory, &numbers, &count, &missing))
        return;
    int kept = 1;
    for (size_t i = 0; i < count; i++) {
        if (numbers[i] == step || kept++ < keep)
            continue;
        char *path = path_of(directory, numbers[i]);
        if (path && unlink(path) && errno != ENOENT)
            td_log(TD_LOG_WARN, "%s: the old checkpoint %s cannot be removed: %s", call, path,
                   td__errno_text(errno));
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
    char *path = path_of(directory, training->step);
    if (!path)
        return td__fail_nomem(call);
    td_status status = td__training_write(call, path, training, all, size);
    free(path);
    if (!status)
        prune(call, directory, training->step, keep);
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

/* ---- Loading -------------------------------------------------------------------------------------- */

/* Tries the numbers in descending order. */
static td_status read_newest(const char *call, const char *directory, const int64_t *numbers,
                             size_t count, struct td__training_target *target,
                             struct td__checkpoint *read)
{
    td_status first = TD_OK;
    char *message = NULL;
    for (size_t i = 0; i < count; i++) {
        char *path = path_of(directory, numbers[i]);
        td_status status = path ? td__training_read(call, path, target, read)
                                : td__fail_nomem(call);
        free(path);
        if (!status) {
            free(message);
            return TD_OK;
        }
        /* A later version, too little memory, or a device that is not there, is no damage: loading an
         * older file instead would silently lose work. */
        if ((status != TD_ERR_INVALID && status != TD_ERR_SYSTEM) || target->load.is_missing) {
            free(message);
            return status;
        }
        td_log(TD_LOG_WARN, "a checkpoint is skipped: %s", td__error_text());
        if (!first) {
            first = status;
            message = strdup(td__error_text());
        }
    }
    if (message)
        td_fail(first, "%s", message);
    free(message);
    return first;
}

/* On rank 0; read->state stays NULL if there is no checkpoint. */
static td_status find_newest(const char *call, const char *directory, const td_training *training,
                             int parts, struct td__checkpoint *read)
{
    if (!directory || !*directory)
        return td_fail(TD_ERR_INVALID, "%s: the directory is NULL or empty", call);
    int64_t *numbers = NULL;
    size_t count = 0;
    bool missing = false;
    TD_TRY(list_numbers(call, directory, &numbers, &count, &missing));
    if (!missing)
        td__atomic_file_sweep(directory);
    struct td__training_target target;
    td_status status = td__training_target(training, parts, &target);
    if (!status)
        status = read_newest(call, directory, numbers, count, &target, read);
    td__training_target_free(&target);
    free(numbers);
    return status;
}

/* Broadcasts whether rank 0 has found one. */
static td_status share_found(const struct td__coordinator *coordinator, bool *found)
{
    char answer = *found ? 'y' : 'n';
    td_bytes bytes = {0};
    if (coordinator->alone)
        return TD_OK;
    if (coordinator->rank == 0)
        bytes = (td_bytes){.data = &answer, .size = 1};
    TD_TRY(td_broadcast_object_list(&bytes, 1, coordinator->root, coordinator->group));
    *found = bytes.size == 1 && bytes.data[0] == 'y';
    if (coordinator->rank != 0)
        td_bytes_free(&bytes);
    return TD_OK;
}

td_status td_training_load_latest(const char *directory, td_training *training, td_group *group,
                                  bool *loaded)
{
    static const char call[] = "td_training_load_latest";
    struct td__coordinator coordinator;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    struct td__checkpoint read = {0};
    int parts;
    TD_TRY(td__gather_parts(&coordinator, training, &parts));
    td_status status = TD_OK;
    if (coordinator.rank == 0)
        status = find_newest(call, directory, training, parts, &read);
    status = td__coordinator_follow(&coordinator, status);
    bool found = read.state != NULL;
    if (!status)
        status = share_found(&coordinator, &found);
    if (status) {
        td__checkpoint_free(&read);
        return status;
    }
    if (found)
        TD_TRY(td__training_receive(call, &coordinator, TD_OK, &read, training));
    else if (!loaded)
        return td_fail(TD_ERR_SYSTEM, "%s: there is no checkpoint in %s", call,
                       directory ? directory : "(NULL)");
    if (loaded)
        *loaded = found;
    return TD_OK;
}
