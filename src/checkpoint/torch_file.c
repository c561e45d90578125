/* Files of torch.save(): a zip archive with a pickle, archive/data.pkl, that describes the objects, and a member
 * archive/data/<key> with the bytes of each storage.
 *
 *     {"epoch": 3, "model": {"conv.weight": tensor, …}, "betas": (0.9, 0.999), "name": "net"}
 *
 *     epoch   model.conv.weight   betas.0   betas.1       numbers and tensors are entries of the state
 *     name                                                texts are notes
 */
#include "checkpoint/torch_file.h"

#include "base/fail.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/unpickle.h"
#include "checkpoint/zip_archive.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

enum {
    PICKLE_MOST = 256 << 20, /* bytes of data.pkl */
    ENTRIES_MOST = 1 << 20,  /* values of a file, each as often as it is referred to */
    DEPTH_MOST = 64,         /* of lists and dictionaries in one another */
    NAME_MOST = 1024,        /* bytes of a name with its prefixes */
    CRC_PIECE = 1 << 18,
};

struct torch_file {
    const char *call, *path;
    int fd;
    struct td__zip_archive archive;
    struct td__pickle pickle;
    char *checked; /* of each member: whether its checksum was compared */

    /* What is made of it; one of the two. */
    td_state *state;
    const td_map_location *map;
    td_file_note_fn note;
    void *note_arg;
    size_t entries;
};

/* ---- The file ------------------------------------------------------------------------------------------------ */

static td_status read_file(void *arg, uint64_t at, void *to, size_t size)
{
    struct torch_file *file = arg;
    for (char *next = to; size > 0;) {
        ssize_t taken = pread(file->fd, next, size, (off_t)at);
        if (taken < 0 && errno == EINTR)
            continue;
        if (taken < 0)
            return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be read: %s", file->call, file->path,
                           td__errno_text(errno));
        if (taken == 0)
            return td_fail(TD_ERR_INVALID, "%s: %s has become shorter while it was read",
                           file->call, file->path);
        next += taken;
        at += (uint64_t)taken;
        size -= (size_t)taken;
    }
    return TD_OK;
}

bool td__is_zip_file(const char *path)
{
    char magic[4] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool is_zip = fd >= 0 && pread(fd, magic, 4, 0) == 4 && !memcmp(magic, "PK\3\4", 4);
    if (fd >= 0)
        close(fd);
    return is_zip;
}

/* Why a file is none, for formats that look like it. */
static td_status refuse_format(struct torch_file *file)
{
    uint8_t magic[2] = {0};
    if (file->archive.source.size >= 2 && !read_file(file, 0, magic, 2) && magic[0] == 0x80)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s is in the format of PyTorch before 1.6, a pickle without an archive; "
                       "torch.save() of a later version writes one that can be read",
                       file->path);
    return td_fail(TD_ERR_INVALID, "%s is no file of torch.save(): it is no zip archive",
                   file->path);
}

static td_status open_archive(struct torch_file *file)
{
    struct stat there;
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0 || fstat(file->fd, &there))
        return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be read: %s", file->call, file->path,
                       td__errno_text(errno));
    if (!S_ISREG(there.st_mode))
        return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be read: it is %s", file->call, file->path,
                       S_ISDIR(there.st_mode) ? "a directory" : "no regular file");
    struct td__zip_source source = {
        .read = read_file, .arg = file, .size = (uint64_t)there.st_size, .path = file->path};
    file->archive.source = source;
    uint8_t magic[4];
    if (source.size < 4 || read_file(file, 0, magic, 4) || memcmp(magic, "PK\3\4", 4) != 0)
        return refuse_format(file);
    TD_TRY(td__zip_open(&source, &file->archive));
    file->checked = calloc(file->archive.count + 1, 1);
    return file->checked ? TD_OK : td__fail_nomem(file->call);
}

/* Compares the checksum of a member, once. The bytes are read for that alone: a storage may be used by several tensors,
 * or in part. */
static td_status check_member(struct torch_file *file, const struct td__zip_member *member,
                              uint64_t at)
{
    char *checked = &file->checked[member - file->archive.members];
    if (*checked)
        return TD_OK;
    unsigned char *piece = malloc(CRC_PIECE);
    if (!piece)
        return td__fail_nomem(file->call);
    uLong crc = crc32(0, NULL, 0);
    td_status status = TD_OK;
    for (uint64_t done = 0; done < member->size && !status;) {
        size_t size = (size_t)(member->size - done < CRC_PIECE ? member->size - done : CRC_PIECE);
        status = read_file(file, at + done, piece, size);
        if (!status)
            crc = crc32(crc, piece, (uInt)size);
        done += size;
    }
    free(piece);
    if (status)
        return status;
    if (crc != member->crc)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: the checksum of its member %.100s is wrong (files that were "
                       "saved without checksums cannot be read)",
                       file->path, member->name);
    *checked = 1;
    return TD_OK;
}

static td_status read_pickle(struct torch_file *file)
{
    const struct td__zip_member *member = td__zip_find(&file->archive, "data.pkl");
    const struct td__zip_member *order = td__zip_find(&file->archive, "byteorder");
    uint64_t at;
    char text[8] = "little";
    if (!member)
        return td_fail(TD_ERR_INVALID, "%s is no file of torch.save(): it has no data.pkl",
                       file->path);
    if (td__zip_find(&file->archive, "constants.pkl"))
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s is a program of TorchScript; torch.save(module.state_dict(), …) writes "
                       "weights that can be read",
                       file->path);
    if (order && order->size < sizeof text) {
        memset(text, 0, sizeof text);
        TD_TRY(td__zip_locate(&file->archive, order, &at));
        TD_TRY(read_file(file, at, text, (size_t)order->size));
    }
    if (strcmp(text, "little") != 0)
        return td_fail(TD_ERR_UNSUPPORTED, "%s was saved with the byte order \"%s\"", file->path,
                       text);
    if (member->size > PICKLE_MOST)
        return td_fail(TD_ERR_UNSUPPORTED, "%s: its data.pkl has %" PRIu64 " bytes; the most is %d",
                       file->path, member->size, PICKLE_MOST);
    TD_TRY(td__zip_locate(&file->archive, member, &at));
    TD_TRY(check_member(file, member, at));
    uint8_t *bytes = malloc((size_t)member->size + 1);
    if (!bytes)
        return td__fail_nomem(file->call);
    td_status status = read_file(file, at, bytes, (size_t)member->size);
    if (!status)
        status = td__unpickle(file->path, bytes, (size_t)member->size, &file->pickle);
    free(bytes);
    return status;
}

static void close_archive(struct torch_file *file)
{
    td__pickle_free(&file->pickle);
    td__zip_close(&file->archive);
    free(file->checked);
    if (file->fd >= 0)
        close(file->fd);
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

static bool is_contiguous(const struct td__pickle_tensor *tensor)
{
    int64_t step = 1;
    for (int d = tensor->ndim; d-- > 0;) {
        if (tensor->shape[d] != 1 && tensor->strides[d] != step)
            return false;
        step *= tensor->shape[d];
    }
    return true;
}

/* Elements from the first one of a tensor to its last one; 0 if it has none. */
static int64_t span_of(const struct td__pickle_tensor *tensor)
{
    int64_t span = 1;
    for (int d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] == 0)
            return 0;
        span += (tensor->shape[d] - 1) * tensor->strides[d];
    }
    return span;
}

static td_status locate_storage(struct torch_file *file, const struct td__pickle_tensor *tensor,
                                const char *name, uint64_t *at)
{
    char member_name[300];
    const struct td__pickle_storage *storage = tensor->storage;
    size_t element = td_dtype_size(storage->is_typed ? storage->dtype : TD_U8);
    snprintf(member_name, sizeof member_name, "data/%.200s", storage->key);
    const struct td__zip_member *member = td__zip_find(&file->archive, member_name);
    if (!member)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: \"%s\" needs its member %s, which is missing", file->path,
                       name, member_name);
    if (member->size / element < (uint64_t)storage->count)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: its member %s has %" PRIu64
                       " bytes, and \"%s\" needs %" PRId64 " elements of it",
                       file->path, member_name, member->size, name, storage->count);
    TD_TRY(td__zip_locate(&file->archive, member, at));
    TD_TRY(check_member(file, member, *at));
    *at += (uint64_t)tensor->offset * td_dtype_size(tensor->dtype);
    return TD_OK;
}

/* The tensor on the host. */
static td_tensor *read_tensor(struct torch_file *file, const struct td__pickle_tensor *tensor,
                              const char *name)
{
    int64_t span = span_of(tensor);
    uint64_t at = 0;
    bool whole = is_contiguous(tensor) || !span;
    if (span && locate_storage(file, tensor, name, &at))
        return NULL;
    td_tensor *memory = whole ? td__empty(file->call, tensor->shape, tensor->ndim, tensor->dtype,
                                          td__host_device())
                              : td__empty(file->call, &span, 1, tensor->dtype, td__host_device());
    td_tensor *result = NULL;
    if (memory && span &&
        read_file(file, at, td_tensor_data(memory), (size_t)span * td_dtype_size(tensor->dtype))) {
        td_tensor_release(memory);
        return NULL;
    }
    if (whole)
        return memory;
    if (memory) {
        TD_SCOPE;
        td_tensor *view = td_from_blob(td_tensor_data(memory), tensor->shape, tensor->ndim,
                                       tensor->strides, tensor->dtype, td__host_device(), NULL,
                                       NULL);
        result = view ? td__clone(view) : NULL;
    }
    td_tensor_release(memory);
    return result;
}

static td_status add_tensor(struct torch_file *file, const struct td__pickle_tensor *tensor,
                            const char *name)
{
    if (!file->state)
        return TD_OK;
    td_device *device = td__map_device(file->call, file->path, file->map, name,
                                       tensor->storage->location);
    if (!device)
        return td__error_status();
    td_tensor *read = read_tensor(file, tensor, name);
    if (!read)
        return td__error_status();
    TD_SCOPE;
    td_tensor *there = td_tensor_to(read, device);
    td_status status = there ? td_state_add(file->state, name, there) : td__error_status();
    td_tensor_release(read);
    return status;
}

/* ---- Values ---------------------------------------------------------------------------------------------------- */

static td_status add_value(struct torch_file *file, const struct td__pickle_value *value,
                           char *name, int depth);

/* Appends a part to a name, behind a dot; the former length is the caller's to restore. */
static td_status extend_name(const struct torch_file *file, char *name, const char *part)
{
    size_t length = strlen(name), more = strlen(part);
    if (!more || length + more + 2 > NAME_MOST)
        return td_fail(TD_ERR_UNSUPPORTED, "%s: a name below \"%.100s\" is empty, or too long",
                       file->path, name);
    if (length)
        name[length++] = '.';
    memcpy(name + length, part, more + 1);
    return TD_OK;
}

static td_status add_item(struct torch_file *file, const struct td__pickle_value *item, char *name,
                          const char *part, int depth)
{
    size_t length = strlen(name);
    TD_TRY(extend_name(file, name, part));
    td_status status = add_value(file, item, name, depth + 1);
    name[length] = 0;
    return status;
}

static td_status add_items(struct torch_file *file, const struct td__pickle_value *value,
                           char *name, int depth)
{
    bool dict = value->kind == TD__PICKLE_DICT;
    if (depth >= DEPTH_MOST)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s: \"%.100s\" is nested more than %d deep, or contains itself", file->path,
                       name, DEPTH_MOST);
    for (size_t i = 0; i < value->as.list.count; i += dict ? 2 : 1) {
        const struct td__pickle_value *key = dict ? value->as.list.items[i] : NULL;
        char number[24];
        if (key && key->kind != TD__PICKLE_STRING && key->kind != TD__PICKLE_INT)
            return td_fail(TD_ERR_UNSUPPORTED,
                           "%s: \"%.100s\" has a key that is neither a text nor an integer",
                           file->path, name);
        snprintf(number, sizeof number, "%" PRId64,
                 key && key->kind == TD__PICKLE_INT ? key->as.number : (int64_t)i);
        const char *part = key && key->kind == TD__PICKLE_STRING ? key->as.text : number;
        TD_TRY(add_item(file, value->as.list.items[i + (dict ? 1 : 0)], name, part, depth));
    }
    return TD_OK;
}

static td_status add_note(struct torch_file *file, const char *name, const char *text)
{
    if (file->note)
        file->note(name, text, file->note_arg);
    return TD_OK;
}

static td_status add_value(struct torch_file *file, const struct td__pickle_value *value,
                           char *name, int depth)
{
    if (++file->entries > ENTRIES_MOST)
        return td_fail(TD_ERR_UNSUPPORTED, "%s has more than %d values", file->path, ENTRIES_MOST);
    if (!*name && value->kind != TD__PICKLE_DICT && value->kind != TD__PICKLE_LIST)
        strcpy(name, "value"); /* a file of one tensor or number */
    switch (value->kind) {
    case TD__PICKLE_TENSOR:
        return add_tensor(file, &value->as.tensor, name);
    case TD__PICKLE_BOOL:
    case TD__PICKLE_INT:
        return file->state ? td_state_add_integer(file->state, name, value->as.number) : TD_OK;
    case TD__PICKLE_FLOAT:
        return file->state ? td_state_add_number(file->state, name, value->as.real) : TD_OK;
    case TD__PICKLE_STRING:
    case TD__PICKLE_GLOBAL:
        return add_note(file, name, value->as.text);
    case TD__PICKLE_NONE:
        return add_note(file, name, "None");
    case TD__PICKLE_LIST:
    case TD__PICKLE_DICT:
        return add_items(file, value, name, depth);
    default:
        return td_fail(TD_ERR_UNSUPPORTED, "%s: \"%.100s\" is a storage without a tensor",
                       file->path, name);
    }
}

static td_status read_torch(struct torch_file *file)
{
    char name[NAME_MOST] = "";
    td_status status = open_archive(file);
    if (!status)
        status = read_pickle(file);
    if (!status)
        status = add_value(file, file->pickle.root, name, 0);
    close_archive(file);
    return status;
}

td_status td__load_torch(const char *call, const char *path, const td_map_location *map,
                         td_state **state)
{
    struct torch_file file = {.call = call, .path = path, .fd = -1, .map = map};
    if (map)
        TD_TRY(td__check_map(call, map));
    file.state = td_state_create();
    if (!file.state)
        return TD_ERR_NOMEM;
    td_status status = read_torch(&file);
    if (status)
        td_state_destroy(file.state);
    else
        *state = file.state;
    return status;
}

td_state *td_load_torch(const char *path, const td_map_location *map_location)
{
    td_state *state = NULL;
    if (!path)
        td_fail(TD_ERR_INVALID, "td_load_torch: the path is NULL");
    else
        td__load_torch("td_load_torch", path, map_location, &state);
    return state;
}

td_status td_read_torch_notes(const char *path, td_file_note_fn fn, void *arg)
{
    static const char call[] = "td_read_torch_notes";
    if (!path || !fn)
        return td_fail(TD_ERR_INVALID, "%s: the %s is NULL", call, path ? "function" : "path");
    struct torch_file file = {.call = call, .path = path, .fd = -1, .note = fn, .note_arg = arg};
    return read_torch(&file);
}
