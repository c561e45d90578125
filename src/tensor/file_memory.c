#include "tensor/file_memory.h"

#include "base/fail.h"
#include "base/file_limit.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct file_memory {
    size_t bytes;
    char directory[]; /* "": pages of this process */
};

static void free_memory(void *data, void *arg)
{
    struct file_memory *memory = arg;
    munmap(data, memory->bytes);
    if (!memory->directory[0])
        td__count_host_memory(-(int64_t)memory->bytes);
    free(memory);
}

/* Large pages make the first access several times cheaper, where the system has any: by default for those who ask. */
static void *map_pages(size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        td_fail(TD_ERR_NOMEM, "no room for %zu bytes of host memory: %s", bytes,
                td__errno_text(errno));
        return NULL;
    }
    madvise(data, bytes, MADV_HUGEPAGE);
    td__count_host_memory((int64_t)bytes);
    return data;
}

/* Not every file system has files without a name: then one is created and removed. */
static int open_file(const char *directory)
{
    int fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT))
        return fd;
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/tandem-XXXXXX", directory) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0)
        unlink(path);
    return fd;
}

static int fail_room(const char *directory, size_t bytes, int error)
{
    bool full = error == ENOSPC || error == EDQUOT || error == EFBIG || error == ENOMEM;
    td_fail(full ? TD_ERR_NOMEM : TD_ERR_SYSTEM,
            "no room for %zu bytes in a file in the directory \"%.300s\": %s", bytes, directory,
            td__errno_text(error));
    return -1;
}

int td__file_of_memory(const char *directory, size_t bytes)
{
    int fd = open_file(directory[0] ? directory : ".");
    if (fd < 0) {
        td_fail(TD_ERR_SYSTEM, "no file can be made in the directory \"%.300s\": %s", directory,
                td__errno_text(errno));
        return -1;
    }
    /* Now: a page without a block on a full disk would end the process when it is first accessed. */
    int error = bytes > (size_t)INT64_MAX ? EFBIG : td__file_allocate(fd, (off_t)bytes);
    if (!error)
        return fd;
    close(fd);
    return fail_room(directory, bytes, error);
}

static void *map_file(const char *directory, size_t bytes)
{
    int fd = td__file_of_memory(directory, bytes);
    if (fd < 0)
        return NULL;
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = errno;
    close(fd);
    if (data == MAP_FAILED) {
        fail_room(directory, bytes, error);
        return NULL;
    }
    madvise(data, bytes, MADV_SEQUENTIAL); /* as kernels access it: more is read ahead */
    return data;
}

static struct td__storage *create(const char *directory, size_t bytes)
{
    if (!bytes)
        return td__storage_of(td__host_device(), NULL, 0, NULL, NULL);
    size_t length = strlen(directory) + 1;
    struct file_memory *memory = malloc(sizeof *memory + length);
    if (!memory) {
        td__fail_nomem("host memory");
        return NULL;
    }
    memory->bytes = bytes;
    memcpy(memory->directory, directory, length);
    void *data = directory[0] ? map_file(directory, bytes) : map_pages(bytes);
    struct td__storage *storage = data ? td__storage_of(td__host_device(), data, bytes, free_memory,
                                                        memory)
                                       : NULL;
    if (data && !storage)
        free_memory(data, memory);
    else if (!storage)
        free(memory);
    return storage;
}

struct td__storage *td__storage_create_in_file(const char *directory, size_t bytes)
{
    return create(directory[0] ? directory : ".", bytes);
}

struct td__storage *td__storage_create_private(size_t bytes)
{
    return create("", bytes);
}

static bool is_ours(const td_tensor *tensor)
{
    return tensor && tensor->storage->free_fn == free_memory;
}

struct td__storage *td__storage_create_beside(const struct td__storage *storage, size_t bytes)
{
    if (storage->free_fn != free_memory)
        return td__storage_create(storage->device, "memory", bytes);
    const struct file_memory *memory = storage->arg;
    return create(memory->directory, bytes);
}

td_tensor *td__empty_beside(const td_tensor *tensor)
{
    if (!is_ours(tensor))
        return td__empty_like(tensor);
    struct td__layout layout = tensor->layout;
    td__layout_set_contiguous(&layout);
    struct td__storage *storage = td__storage_create_beside(
        tensor->storage, (size_t)layout.numel * td_dtype_size(layout.dtype));
    td_tensor *beside = storage ? td__tensor_over(storage, 0, &layout) : NULL;
    if (storage)
        td__storage_release(storage);
    return beside;
}

td_tensor *td__zeros_beside(const td_tensor *tensor)
{
    return is_ours(tensor) ? td__empty_beside(tensor) : td__zeros_like(tensor);
}
