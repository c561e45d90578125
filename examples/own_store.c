/* A user's own store: a directory in which each key is a file. The processes of a job use it for the
 * rendezvous, and form a world.
 *
 *     $ tdrun --standalone --nproc-per-node=3 ./own_store "$(mktemp -d)"
 *     rank 0 of 3: the sum is 3
 *     …
 *
 * Four callbacks are enough; docs/stores.md walks through them. */
#include <tandem/tandem.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Files --------------------------------------------------------------------------------------- */

/* Locks the directory for all processes and all threads: each call opens the lock file. */
static td_status lock(const char *directory, int *held)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/lock", directory);
    *held = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (*held < 0 || flock(*held, LOCK_EX))
        return td_fail(TD_ERR_SYSTEM, "%s: cannot be locked: %s", path, strerror(errno));
    return TD_OK;
}

/* A key may have any bytes, such as '/' and the control characters in Tandem's own keys. So the name of the
 * file is hexadecimal. */
static td_status enter(const char *directory, const char *key, char path[1024], int *held)
{
    int length = snprintf(path, 1024, "%.700s/k", directory);
    if (strlen(key) > 120)
        return td_fail(TD_ERR_INVALID, "directory store: the key \"%.40s…\" is too long", key);
    for (; *key; key++)
        length += snprintf(path + length, 3, "%02x", (unsigned char)*key);
    return lock(directory, held);
}

/* *there is false if the file does not exist. */
static td_status read_file(const char *path, td_bytes *value, bool *there)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    *there = fd >= 0;
    if (fd < 0)
        return errno == ENOENT ? TD_OK : td_fail(TD_ERR_SYSTEM, "%s: %s", path, strerror(errno));
    size_t size = fstat(fd, &status) ? 0 : (size_t)status.st_size;
    char *data = malloc(size + 1);
    ssize_t got = data ? read(fd, data, size) : -1;
    close(fd);
    td_status result = got == (ssize_t)size ? td_bytes_copy(data, size, value)
                                            : td_fail(TD_ERR_SYSTEM, "%s: cannot be read", path);
    free(data);
    return result;
}

static td_status write_file(const char *path, const void *value, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ssize_t written = fd < 0 ? -1 : write(fd, value, size);
    if (fd >= 0)
        close(fd);
    return written == (ssize_t)size ? TD_OK : td_fail(TD_ERR_SYSTEM, "%s: cannot be written", path);
}

/* ---- The callbacks: `self` is the directory ------------------------------------------------------ */

static td_status directory_set(void *self, const char *key, const void *value, size_t size)
{
    char path[1024];
    int held = -1;
    td_status status = enter(self, key, path, &held);
    if (!status)
        status = write_file(path, value, size);
    close(held);
    return status;
}

/* Never waits: after TD_ERR_TIMEOUT it is called again until the timeout has passed. */
static td_status directory_get(void *self, const char *key, int64_t timeout_ms, td_bytes *value)
{
    (void)timeout_ms;
    char path[1024];
    int held = -1;
    bool there = false;
    td_status status = enter(self, key, path, &held);
    if (!status)
        status = read_file(path, value, &there);
    close(held);
    return !status && !there ? TD_ERR_TIMEOUT : status;
}

static td_status directory_compare_set(void *self, const char *key, const void *expected,
                                       size_t expected_size, const void *desired,
                                       size_t desired_size, td_bytes *value, bool *stored)
{
    char path[1024];
    int held = -1;
    bool there = false;
    td_status status = enter(self, key, path, &held);
    if (!status)
        status = read_file(path, value, &there);
    if (!status)
        *stored = there ? value->size == expected_size &&
                              !memcmp(value->data, expected, expected_size)
                        : expected_size == 0;
    if (*stored)
        status = write_file(path, desired, desired_size);
    close(held);
    return status;
}

static td_status directory_delete(void *self, const char *key, bool *deleted)
{
    char path[1024];
    int held = -1;
    td_status status = enter(self, key, path, &held);
    *deleted = !status && !unlink(path);
    close(held);
    return status;
}

static const td_store_ops directory_ops = {
    .name = "directory",
    .set = directory_set,
    .get = directory_get,
    .compare_set = directory_compare_set,
    .delete_key = directory_delete,
};

/* ---- The job ------------------------------------------------------------------------------------- */

static td_status run(char *directory, int rank, int size)
{
    td_store *store;
    float sum = (float)rank;
    td_status status = td_store_create(&directory_ops, directory, &store);
    if (status)
        return status;
    status = td_init_process_group(
        &(td_init_options){.store = store, .rank = rank, .world_size = size});
    if (!status)
        status = td_group_all_reduce(&sum, &sum, 1, TD_F32, TD_SUM, NULL, NULL);
    if (!status)
        printf("rank %d of %d: the sum is %g\n", rank, size, sum);
    if (!status)
        status = td_destroy_process_group();
    td_store_close(store);
    return status;
}

int main(int argc, char **argv)
{
    const char *rank = getenv("RANK"), *size = getenv("WORLD_SIZE");
    if (argc != 2) {
        fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
        return 2;
    }
    if (run(argv[1], rank ? atoi(rank) : 0, size ? atoi(size) : 1)) {
        fprintf(stderr, "%s\n", td_last_error());
        return 1;
    }
    return 0;
}
