/* Loading a sharded checkpoint: rank 0 reads the index, checks that the files are there with their sizes, and broadcasts it;
 * each rank compares it with its tensors, reads what it needs of the files into new tensors, and copies these when all
 * ranks have theirs. */
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/sharded.h"
#include "tensor/deferred.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- The index ----------------------------------------------------------------------------------------- */

/* The first tensor that has a piece in the file of a rank. */
static const char *first_in(const struct td__index *index, int file)
{
    for (size_t i = 0; i < index->count; i++)
        for (size_t k = 0; k < index->tensors[i]->count; k++)
            if (index->tensors[i]->pieces[k].file == file)
                return index->tensors[i]->name;
    return "none";
}

static td_status check_files(const char *call, const char *directory, const struct td__index *index)
{
    int at = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    td_status status = TD_OK;
    for (size_t i = 0; at >= 0 && i < index->file_count && !status; i++) {
        struct stat there;
        char name[TD__SHARD_NAME];
        td__shard_name(name, (int)i);
        if (fstatat(at, name, &there, 0))
            status = td_fail(
                TD_ERR_SYSTEM,
                "%s: %s/%s cannot be read: %s; rank %zu has saved its part of \"%.200s\" "
                "and others there",
                call, directory, name, td__errno_text(errno), i, first_in(index, (int)i));
        else if (!S_ISREG(there.st_mode) || (uint64_t)there.st_size != index->sizes[i])
            status = td_fail(TD_ERR_INVALID,
                             "%s: %s/%s is damaged: it has %lld bytes, and %" PRIu64
                             " when it was written; rank %zu has saved its part of \"%.200s\" and "
                             "others there",
                             call, directory, name, (long long)there.st_size, index->sizes[i], i,
                             first_in(index, (int)i));
    }
    if (at < 0)
        return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be read: %s", call, directory,
                       td__errno_text(errno));
    close(at);
    return status;
}

static td_status read_text(const char *call, const char *path, td_bytes *text)
{
    struct stat there = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int error = fd < 0 || fstat(fd, &there) ? errno : 0;
    uint64_t size = (uint64_t)there.st_size, done = 0;
    td_status status = TD_OK;
    if (!error && (!S_ISREG(there.st_mode) || size > TD__INDEX_LONGEST))
        status = td_fail(TD_ERR_INVALID, "%s is no index of a sharded checkpoint: it is %s", path,
                         S_ISREG(there.st_mode) ? "too long" : "no regular file");
    else if (!error && !(text->data = malloc((size_t)size + 1)))
        status = td_fail(TD_ERR_NOMEM, "%s: no memory for the index", path);
    while (!status && !error && done < size) {
        ssize_t taken = read(fd, text->data + done, (size_t)(size - done));
        if (taken == 0)
            break;
        error = taken < 0 && errno != EINTR ? errno : 0;
        done += taken > 0 ? (uint64_t)taken : 0;
    }
    if (error)
        status = td_fail(TD_ERR_SYSTEM, "%s: %s cannot be read: %s", call, path,
                         td__errno_text(error));
    if (fd >= 0)
        close(fd);
    text->size = (size_t)done;
    if (text->data)
        text->data[done] = '\0';
    return status;
}

td_status td__index_open(const char *call, const char *directory, struct td__index *index,
                         td_bytes *text)
{
    char *path = NULL;
    td_bytes read = {0};
    *index = (struct td__index){0};
    if (!directory || !*directory)
        return td_fail(TD_ERR_INVALID, "%s: the directory is NULL or empty", call);
    if (asprintf(&path, "%s/" TD__INDEX_NAME, directory) < 0)
        return td__fail_nomem(call);
    td_status status = read_text(call, path, &read);
    if (!status)
        status = td__index_parse(path, read.data, read.size, index);
    if (!status)
        status = check_files(call, directory, index);
    if (status)
        td__index_free(index);
    if (!status && text)
        *text = read;
    else
        free(read.data);
    free(path);
    return status;
}

/* Rank 0's status, directory and index, to all. */
static td_status share_text(const char *call, const struct td__coordinator *coordinator,
                            td_status status, const char *path, td_bytes text, td_bytes *packed)
{
    struct td__buffer sent = {0};
    if (coordinator->rank == 0) {
        td__pack_status(&sent, status);
        td__buffer_put_string(&sent, path ? path : "", path ? strlen(path) : 0);
        td__buffer_put(&sent, text.data, status ? 0 : text.size);
        *packed = (td_bytes){.data = (char *)sent.data, .size = sent.failed ? 0 : sent.size};
    }
    status = td_broadcast_object_list(packed, 1, coordinator->root, coordinator->group);
    if (!status && coordinator->rank == 0 && sent.failed)
        status = td__fail_nomem(call);
    if (coordinator->rank == 0) {
        td__buffer_free(&sent);
        *packed = (td_bytes){0};
    }
    return status;
}

/* On the others. */
static td_status parse_shared(const char *call, td_bytes packed, struct td__index *index,
                              char **directory)
{
    struct td__reader reader = td__reader_of(packed.data, packed.size);
    TD_TRY(td__unpack_status(call, &reader, -1));
    struct td__span path = td__reader_string(&reader, 1 << 16);
    if (reader.failed)
        return td_fail(TD_ERR_MISMATCH, "%s: rank 0 made another call", call);
    *directory = td__text_copy(path.data, path.size);
    if (!*directory)
        return td__fail_nomem(call);
    return td__index_parse(*directory, (const char *)reader.at, (size_t)(reader.end - reader.at),
                           index);
}

td_status td__index_share(const char *call, const struct td__coordinator *coordinator,
                          const char *path, td_status mine, struct td__index *index,
                          char **directory)
{
    td_bytes text = {0}, packed = {0};
    *index = (struct td__index){0};
    *directory = NULL;
    mine = td__coordinator_agree(coordinator, mine);
    if (mine)
        return mine;
    td_status status = TD_OK;
    if (coordinator->rank == 0) {
        status = td__index_open(call, path, index, &text);
        if (!status && !(*directory = strdup(path)))
            status = td__fail_nomem(call);
    }
    if (!coordinator->alone) {
        td_status shared = share_text(call, coordinator, status, path, text, &packed);
        if (coordinator->rank == 0)
            status = status ? status : shared;
        else
            status = shared ? shared : parse_shared(call, packed, index, directory);
        td_bytes_free(&packed);
    }
    free(text.data);
    if (status) {
        td__index_free(index);
        free(*directory);
        *directory = NULL;
    }
    return status;
}

/* ---- Tensors ------------------------------------------------------------------------------------------- */

static td_status check_shape(const struct td__shard_reader *reader,
                             const struct td__sharded_tensor *tensor, const char *name,
                             const td_tensor *target, bool any_dtype)
{
    const td_shard *shard = td_tensor_shard(target);
    int ndim = shard ? shard->ndim : td_tensor_ndim(target);
    const int64_t *shape = shard ? shard->shape : td_tensor_shape(target);
    bool same = ndim == tensor->ndim && (any_dtype || td_tensor_dtype(target) == tensor->dtype);
    for (int d = 0; d < ndim && same; d++)
        same = shape[d] == tensor->shape[d];
    if (same)
        return TD_OK;
    return td_fail(
        TD_ERR_INVALID,
        "%s: %s: \"%.200s\" is %s of the shape %s in the checkpoint, and %s of the shape "
        "%s here",
        reader->call, reader->directory, name, td_dtype_name(tensor->dtype),
        td__shape_text(tensor->shape, tensor->ndim), td_dtype_name(td_tensor_dtype(target)),
        td__shape_text(shape, ndim));
}

td_tensor *td__shard_fetch(struct td__shard_reader *reader, const struct td__sharded_tensor *tensor,
                           const char *name, const td_tensor *target, bool any_dtype)
{
    const td_shard *shard = target ? td_tensor_shard(target) : NULL;
    if (target && check_shape(reader, tensor, name, target, any_dtype))
        return NULL;
    int64_t count = target ? td_tensor_numel(target) : tensor->numel;
    td_tensor *result = shard ? td__empty(reader->call, &count, 1, tensor->dtype, td__host_device())
                              : td__empty(reader->call, tensor->shape, tensor->ndim, tensor->dtype,
                                          td__host_device());
    if (result && count > 0 &&
        td__shard_read(reader, tensor, shard ? shard->offset : 0, count, td_tensor_data(result))) {
        td_tensor_release(result);
        return NULL;
    }
    return result;
}

/* The tensor of a name; "module." in front of it is added or removed where only that is there. */
static const struct td__sharded_tensor *find(const struct td__index *index, const char *name)
{
    static const char wrapper[] = "module.";
    const struct td__sharded_tensor *tensor = td__index_get(index, name);
    if (tensor)
        return tensor;
    if (!strncmp(name, wrapper, strlen(wrapper)))
        return td__index_get(index, name + strlen(wrapper));
    char wrapped[512];
    snprintf(wrapped, sizeof wrapped, "%s%s", wrapper, name);
    return td__index_get(index, wrapped);
}

static td_status compare(const struct td__shard_reader *reader, const td_state *state)
{
    for (int i = 0; i < td_state_count(state); i++) {
        const char *name = td_state_name(state, i);
        const struct td__sharded_tensor *tensor = find(reader->index, name);
        if (!tensor)
            return td_fail(TD_ERR_INVALID, "%s: %s: \"%.200s\" is not in the checkpoint",
                           reader->call, reader->directory, name);
        TD_TRY(check_shape(reader, tensor, name, td_state_tensor(state, i), false));
    }
    return TD_OK;
}

/* Reads all tensors to new ones. */
static td_status fetch_all(struct td__shard_reader *reader, const td_state *state,
                           td_tensor **fetched)
{
    TD_TRY(compare(reader, state)); /* before anything is read */
    for (int i = 0; i < td_state_count(state); i++) {
        const char *name = td_state_name(state, i);
        fetched[i] = td__shard_fetch(reader, find(reader->index, name), name,
                                     td_state_tensor(state, i), false);
        if (!fetched[i])
            return td__error_status();
    }
    return TD_OK;
}

static td_status copy_all(const char *call, const td_state *state, td_tensor *const *fetched)
{
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *to = td_state_tensor(state, i);
        TD_TRY(td__deferred_end(to, false));
        if (td_tensor_numel(to) == 0)
            continue;
        TD_TRY(td__prepare_write(to));
        td_status status = td__transfer(call, to, fetched[i], false);
        td__tensor_bump_version(to);
        if (status)
            return status;
    }
    return TD_OK;
}

static td_status load_all(const char *call, const struct td__coordinator *coordinator,
                          const char *directory, const struct td__index *index,
                          const td_state *state)
{
    struct td__shard_reader reader;
    int count = td_state_count(state);
    td_tensor **fetched = calloc((size_t)count + 1, sizeof *fetched);
    td_status status = fetched ? td__shard_reader_begin(&reader, call, directory, index)
                               : td__fail_nomem(call);
    if (!status) {
        status = fetch_all(&reader, state, fetched);
        td__shard_reader_end(&reader);
    }
    status = td__coordinator_agree(coordinator, status);
    if (!status)
        status = td__coordinator_agree(coordinator, copy_all(call, state, fetched));
    for (int i = 0; fetched && i < count; i++)
        td_tensor_release(fetched[i]);
    free(fetched);
    return status;
}

td_status td_load_sharded(const char *directory, const td_state *state, td_group *group)
{
    static const char call[] = "td_load_sharded";
    struct td__coordinator coordinator;
    struct td__index index;
    char *path = NULL;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    td_status mine = state ? TD_OK : td_fail(TD_ERR_INVALID, "%s: the state is NULL", call);
    TD_TRY(td__index_share(call, &coordinator, directory, mine, &index, &path));
    td_status status = load_all(call, &coordinator, path, &index, state);
    td__index_free(&index);
    free(path);
    return status;
}
