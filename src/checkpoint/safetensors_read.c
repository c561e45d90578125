/* Reading safetensors files: the header, which is checked against the size of the file before
 * tensors are allocated; then the data in file order, each tensor directly into its memory, or in
 * pieces to its accelerator, with the checksum computed in the same pass. Tensors that nobody needs
 * are skipped. */
#include "base/fail.h"
#include "checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CHUNK = 1 << 18 };

struct file {
    const char *call, *path;
    int fd;
    uint64_t size, at;
    char *text; /* the 8 bytes of the length, and the header */
    size_t text_size;
    EVP_MD_CTX *digest; /* NULL: the file has none */
    struct td__upload upload;
};

static td_status refuse(const struct file *file)
{
    return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be read: %s", file->call, file->path,
                   td__errno_text(errno));
}

static td_status get(struct file *file, void *data, size_t size)
{
    char *at = data;
    while (size > 0) {
        ssize_t taken = read(file->fd, at, size < CHUNK ? size : CHUNK);
        if (taken < 0 && errno == EINTR)
            continue;
        if (taken < 0)
            return refuse(file);
        if (taken == 0)
            return td_fail(TD_ERR_INVALID,
                           "%s: %s ends at byte %" PRIu64 ", and had %" PRIu64
                           " when it was opened; another process changes it",
                           file->call, file->path, file->at, file->size);
        if (file->digest && !EVP_DigestUpdate(file->digest, at, (size_t)taken))
            return td_fail(TD_ERR_SYSTEM, "%s: the checksum cannot be computed", file->call);
        at += taken;
        size -= (size_t)taken;
        file->at += (uint64_t)taken;
    }
    return TD_OK;
}

static void close_file(struct file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    if (file->upload.device)
        td__upload_end(&file->upload); /* after a failure, which is the one to report */
    free(file->text);
    EVP_MD_CTX_free(file->digest);
}

/* Opens a file and reads its header. Close it also on failure. */
static td_status open_file(struct file *file)
{
    struct stat there;
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0 || fstat(file->fd, &there))
        return refuse(file);
    if (!S_ISREG(there.st_mode))
        return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be read: it is %s", file->call, file->path,
                       S_ISDIR(there.st_mode) ? "a directory" : "no regular file");
    file->size = (uint64_t)there.st_size;
    uint8_t length_bytes[TD__HEADER_AT];
    if (file->size < sizeof length_bytes)
        return td_fail(TD_ERR_INVALID,
                       "%s is no safetensors file, or is cut off: it has %" PRIu64
                       " bytes, and 8 are needed for the length of its header",
                       file->path, file->size);
    TD_TRY(get(file, length_bytes, sizeof length_bytes));
    uint64_t length = td__load_u32(length_bytes) | (uint64_t)td__load_u32(length_bytes + 4) << 32;
    if (length > TD__HEADER_LONGEST || length > file->size - TD__HEADER_AT)
        return td_fail(TD_ERR_INVALID,
                       "%s is no safetensors file, or is cut off: its first 8 bytes declare a "
                       "header of %" PRIu64 " bytes, and %" PRIu64
                       " follow; the longest there may be is %d",
                       file->path, length, file->size - TD__HEADER_AT, TD__HEADER_LONGEST);
    file->text_size = TD__HEADER_AT + (size_t)length;
    file->text = malloc(file->text_size);
    if (!file->text)
        return td_fail(TD_ERR_NOMEM, "%s: no memory for its header", file->path);
    memcpy(file->text, length_bytes, sizeof length_bytes);
    return get(file, file->text + TD__HEADER_AT, (size_t)length);
}

static td_status parse_file(const struct file *file, struct td__file_header *header)
{
    return td__header_parse(file->path, file->text + TD__HEADER_AT, file->text_size - TD__HEADER_AT,
                            file->size - file->text_size, header);
}

/* ---- The checksum -------------------------------------------------------------------------------- */

static bool is_digest(const struct td__file_note *note)
{
    return note && note->value_size == TD__DIGEST_DIGITS &&
           strspn(note->value, "0123456789abcdef") == TD__DIGEST_DIGITS;
}

/* Starts the checksum with the header, with zeros instead of the checksum itself. */
static td_status begin_digest(struct file *file, const struct td__file_header *header)
{
    const struct td__file_note *note = td__header_note(header, "tandem.sha256");
    if (!note && !td__header_note(header, "tandem.version"))
        return TD_OK; /* a file from elsewhere */
    if (!is_digest(note))
        return td_fail(TD_ERR_INVALID, "%s is damaged: Tandem wrote it, but it has no checksum",
                       file->path);
    memset(file->text + note->value_at, '0', TD__DIGEST_DIGITS);
    file->digest = EVP_MD_CTX_new();
    if (!file->digest)
        return td__fail_nomem(file->call);
    if (!EVP_DigestInit_ex(file->digest, EVP_sha256(), NULL) ||
        !EVP_DigestUpdate(file->digest, file->text, file->text_size))
        return td_fail(TD_ERR_SYSTEM, "%s: the checksum cannot be computed", file->call);
    return TD_OK;
}

static td_status check_digest(struct file *file, const struct td__file_header *header)
{
    if (!file->digest)
        return TD_OK;
    uint8_t digest[EVP_MAX_MD_SIZE];
    char digits[TD__DIGEST_DIGITS + 1] = "";
    if (!EVP_DigestFinal_ex(file->digest, digest, NULL))
        return td_fail(TD_ERR_SYSTEM, "%s: the checksum cannot be computed", file->call);
    for (int i = 0; i < TD__DIGEST_DIGITS; i++)
        digits[i] = "0123456789abcdef"[i % 2 ? digest[i / 2] & 15 : digest[i / 2] >> 4];
    const char *expected = td__header_note(header, "tandem.sha256")->value;
    if (strcmp(digits, expected) != 0)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: the SHA-256 of its %" PRIu64
                       " bytes is %.16s…, and it was %.16s… when it was written",
                       file->path, file->size, digits, expected);
    return TD_OK;
}

/* ---- The data ------------------------------------------------------------------------------------ */

static td_status get_elements(struct file *file, td_tensor *tensor)
{
    size_t bytes = td_tensor_nbytes(tensor);
    if (bytes == 0)
        return TD_OK;
    if (td__on_host(tensor))
        return get(file, td_tensor_data(tensor), bytes);
    struct td__place to = td__place_of(tensor);
    TD_TRY(td__upload_begin(&file->upload, file->call, to.device));
    while (bytes > 0) {
        size_t part = bytes < TD__UPLOAD_PIECE ? bytes : TD__UPLOAD_PIECE;
        void *piece;
        TD_TRY(td__upload_buffer(&file->upload, &piece));
        TD_TRY(get(file, piece, part));
        TD_TRY(td__upload_send(&file->upload, &to, part));
        to.data = (char *)to.data + part;
        bytes -= part;
    }
    return TD_OK;
}

/* Reads bytes that only the checksum needs. */
static td_status skip_bytes(struct file *file, uint64_t bytes)
{
    char buffer[1 << 14];
    if (!file->digest && bytes > 0) {
        if (lseek(file->fd, (off_t)bytes, SEEK_CUR) < 0)
            return refuse(file);
        file->at += bytes;
        return TD_OK;
    }
    while (bytes > 0) {
        size_t part = bytes < sizeof buffer ? (size_t)bytes : sizeof buffer;
        TD_TRY(get(file, buffer, part));
        bytes -= part;
    }
    return TD_OK;
}

/* An uninitialised tensor for an entry, or for the part of it that is wanted. */
static td_tensor *make_tensor(const char *call, const struct td__file_tensor *entry,
                              const struct td__load_target *target, td_device *device)
{
    int64_t count;
    const td_shard *part = target->part ? target->part(entry, &count, target->arg) : NULL;
    if (!part)
        return td__empty(call, entry->shape, entry->ndim, entry->dtype, device);
    td_tensor *tensor = td__empty(call, &count, 1, entry->dtype, device);
    if (tensor && td_tensor_set_shard(tensor, part)) {
        td_tensor_release(tensor);
        return NULL;
    }
    return tensor;
}

/* A state of uninitialised tensors on these devices, without those that have none. */
static td_state *make_state(const char *call, const struct td__file_header *header,
                            const struct td__load_target *target, td_device *const *devices)
{
    td_state *state = td_state_create();
    for (size_t i = 0; state && i < header->count; i++) {
        const struct td__file_tensor *entry = &header->tensors[i];
        if (!devices[i])
            continue;
        td_tensor *tensor = make_tensor(call, entry, target, devices[i]);
        td_status status = td_state_add(state, entry->name, tensor);
        td_tensor_release(tensor);
        if (status) {
            td_state_destroy(state);
            return NULL;
        }
    }
    return state;
}

td_state *td__state_of_header(const char *call, const char *path,
                              const struct td__file_header *header, struct td__load_target *target)
{
    td_device **devices = NULL;
    if (td__map_devices(call, path, header, target, &devices))
        return NULL;
    td_state *state = make_state(call, header, target, devices);
    free(devices);
    return state;
}

static td_status read_data(struct file *file, const struct td__file_header *header, td_state *state)
{
    TD_TRY(begin_digest(file, header));
    for (size_t i = 0; i < header->count; i++) {
        const struct td__file_tensor *entry = header->sorted[i];
        td_tensor *tensor = td_state_get(state, entry->name);
        const td_shard *part = td_tensor_shard(tensor);
        uint64_t before = part ? (uint64_t)part->offset * td_dtype_size(entry->dtype) : 0;
        uint64_t all = entry->end - entry->begin;
        TD_TRY(skip_bytes(file, tensor ? before : all));
        if (tensor)
            TD_TRY(get_elements(file, tensor));
        if (part)
            TD_TRY(skip_bytes(file, all - before - td_tensor_nbytes(tensor)));
    }
    TD_TRY(td__upload_end(&file->upload));
    return check_digest(file, header);
}

/* Hands the text of the header over, with the size of the data instead of its own. */
static void take_text(struct file *file, struct td__file_header *header)
{
    uint64_t data_size = file->size - file->text_size;
    memcpy(file->text, &data_size, sizeof data_size);
    header->text = (td_bytes){.data = file->text, .size = file->text_size};
    file->text = NULL;
}

td_status td__load_state(const char *call, const char *path, struct td__load_target *target,
                         td_state **state_out, struct td__file_header *header_out)
{
    struct file file = {.call = call, .path = path, .fd = -1};
    struct td__file_header header = {0};
    td_state *state = NULL;
    td_status status = open_file(&file);
    if (!status)
        status = parse_file(&file, &header);
    if (!status && !(state = td__state_of_header(call, path, &header, target)))
        status = td__error_status();
    if (!status)
        status = read_data(&file, &header, state);
    if (status) {
        td_state_destroy(state);
        td__header_free(&header);
    } else {
        *state_out = state;
        take_text(&file, &header);
        if (header_out)
            *header_out = header;
        else
            td__header_free(&header);
    }
    close_file(&file);
    return status;
}

td_state *td_load_safetensors(const char *path, const td_map_location *map_location)
{
    td_state *state = NULL;
    if (!path)
        td_fail(TD_ERR_INVALID, "td_load_safetensors: the path is NULL");
    else
        td__load_state("td_load_safetensors", path, &(struct td__load_target){.map = map_location},
                       &state, NULL);
    return state;
}

td_status td_read_safetensors_notes(const char *path, td_file_note_fn fn, void *arg)
{
    static const char call[] = "td_read_safetensors_notes";
    if (!path || !fn)
        return td_fail(TD_ERR_INVALID, "%s: the %s is NULL", call, path ? "function" : "path");
    struct file file = {.call = call, .path = path, .fd = -1};
    struct td__file_header header = {0};
    td_status status = open_file(&file);
    if (!status)
        status = parse_file(&file, &header);
    for (size_t i = 0; i < header.note_count && !status; i++)
        fn(header.notes[i].key, header.notes[i].value, arg);
    td__header_free(&header);
    close_file(&file);
    return status;
}
