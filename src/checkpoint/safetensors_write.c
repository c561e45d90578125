/* Writing safetensors files. The header is planned first, with zeros for the checksum; one pass
 * writes header and data and computes the checksum, whose digits are then filled in. */
#include "base/fail.h"
#include "checkpoint/json.h"
#include "checkpoint/safetensors.h"

#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian");

enum { CHUNK = 1 << 18, PIECE = 1 << 20 };

/* ---- The plan ------------------------------------------------------------------------------------ */

static void put_text(struct td__buffer *text, const char *more)
{
    td__buffer_put(text, more, strlen(more));
}

void td__plan_free(struct td__file_plan *plan)
{
    td__buffer_free(&plan->text);
    free(plan->order);
    *plan = (struct td__file_plan){0};
}

static td_status check_state(const char *call, const char *path, const td_state *state)
{
    for (int i = 0; i < td_state_count(state); i++) {
        const char *name = td_state_name(state, i);
        td_dtype dtype = td_tensor_dtype(td_state_tensor(state, i));
        if (!strcmp(name, "__metadata__"))
            return td_fail(TD_ERR_INVALID,
                           "%s: %s: no tensor can have the name \"__metadata__\" in this format",
                           call, path);
        if (!td__file_dtype(dtype))
            return td_fail(TD_ERR_UNSUPPORTED,
                           "%s: %s: \"%.200s\" is %s, which the safetensors format does not have; "
                           "save its real and imaginary parts",
                           call, path, name, td_dtype_name(dtype));
    }
    return TD_OK;
}

/* The numbers of the tensors, widest elements first; those of one width keep their order. */
static void sort_by_width(const td_state *state, int *order)
{
    int used = 0, count = td_state_count(state);
    for (size_t width = 16; width > 0; width /= 2)
        for (int i = 0; i < count; i++)
            if (td_dtype_size(td_tensor_dtype(td_state_tensor(state, i))) == width)
                order[used++] = i;
}

static td_status put_notes(const char *call, const char *path, const td_state *state,
                           const td_file_note *notes, int count, struct td__file_plan *plan)
{
    struct td__buffer *text = &plan->text;
    char start[96];
    snprintf(start, sizeof start,
             "{\"__metadata__\":{\"tandem.version\":\"%d\",\"tandem.sha256\":\"", TD__FILE_VERSION);
    put_text(text, start);
    plan->digest_at = text->size;
    for (int i = 0; i < TD__DIGEST_DIGITS; i++)
        td__buffer_put_u8(text, '0');
    put_text(text, "\",\"tandem.devices\":\"");
    td__put_devices(text, state);
    put_text(text, "\"");
    for (int i = 0; i < count; i++) {
        bool good = notes[i].key && notes[i].value;
        put_text(text, ",");
        good = good && td__json_put(text, notes[i].key);
        put_text(text, ":");
        if (!good || !td__json_put(text, notes[i].value))
            return td_fail(TD_ERR_INVALID,
                           "%s: %s: note %d has a key or a value that is NULL or not UTF-8", call,
                           path, i);
    }
    put_text(text, "}");
    return TD_OK;
}

static td_status put_tensor(const char *call, const char *path, const char *name,
                            const td_tensor *tensor, uint64_t begin, struct td__buffer *text)
{
    char number[64];
    put_text(text, ",");
    if (!td__json_put(text, name))
        return td_fail(TD_ERR_INVALID, "%s: %s: the name \"%.200s\" is not UTF-8", call, path,
                       name);
    put_text(text, ":{\"dtype\":\"");
    put_text(text, td__file_dtype(td_tensor_dtype(tensor)));
    put_text(text, "\",\"shape\":[");
    for (int d = 0; d < td_tensor_ndim(tensor); d++) {
        snprintf(number, sizeof number, "%s%" PRId64, d ? "," : "", td_tensor_size(tensor, d));
        put_text(text, number);
    }
    snprintf(number, sizeof number, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", begin,
             begin + td_tensor_nbytes(tensor));
    put_text(text, number);
    return TD_OK;
}

static td_status plan_text(const char *call, const char *path, const td_state *state,
                           const td_file_note *notes, int note_count, struct td__file_plan *plan)
{
    int count = td_state_count(state);
    uint64_t *begins = malloc(((size_t)count + 1) * sizeof *begins);
    plan->order = malloc(((size_t)count + 1) * sizeof plan->order[0]);
    if (!begins || !plan->order) {
        free(begins);
        return td__fail_nomem(call);
    }
    sort_by_width(state, plan->order);
    for (int i = 0; i < count; i++) {
        begins[plan->order[i]] = plan->data_size;
        plan->data_size += td_tensor_nbytes(td_state_tensor(state, plan->order[i]));
    }
    td__buffer_put_u64(&plan->text, 0);
    td_status status = put_notes(call, path, state, notes, note_count, plan);
    for (int i = 0; i < count && !status; i++)
        status = put_tensor(call, path, td_state_name(state, i), td_state_tensor(state, i),
                            begins[i], &plan->text);
    free(begins);
    TD_TRY(status);
    put_text(&plan->text, "}");
    while (plan->text.size % 8 && !plan->text.failed)
        put_text(&plan->text, " ");
    if (plan->text.failed)
        return td__fail_nomem(call);
    uint64_t length = plan->text.size - TD__HEADER_AT;
    if (length > TD__HEADER_LONGEST)
        return td_fail(TD_ERR_INVALID,
                       "%s: %s: a header of %" PRIu64 " bytes is longer than %d, the most in this "
                       "format",
                       call, path, length, TD__HEADER_LONGEST);
    td__store_u32(plan->text.data, (uint32_t)length);
    return TD_OK;
}

td_status td__plan_file(const char *call, const char *path, const td_state *state,
                        const td_file_note *notes, int note_count, struct td__file_plan *plan)
{
    *plan = (struct td__file_plan){0};
    TD_TRY(check_state(call, path, state));
    td_status status = plan_text(call, path, state, notes, note_count, plan);
    if (status)
        td__plan_free(plan);
    return status;
}

/* ---- Writing ------------------------------------------------------------------------------------- */

struct writer {
    struct td__atomic_file file;
    EVP_MD_CTX *digest;
};

static td_status put(struct writer *writer, const void *data, size_t size)
{
    const char *at = data;
    while (size > 0) {
        size_t part = size < CHUNK ? size : CHUNK;
        if (!EVP_DigestUpdate(writer->digest, at, part))
            return td_fail(TD_ERR_SYSTEM, "%s: the checksum cannot be computed", writer->file.call);
        TD_TRY(td__atomic_file_write(&writer->file, at, part));
        at += part;
        size -= part;
    }
    return TD_OK;
}

/* The file has only 0 and 1; in memory any byte but 0 is true. */
static td_status put_bools(struct writer *writer, const uint8_t *data, size_t size)
{
    uint8_t part[4096];
    for (size_t done = 0; done < size;) {
        size_t used = 0;
        while (used < sizeof part && done < size)
            part[used++] = data[done++] != 0;
        TD_TRY(put(writer, part, used));
    }
    return TD_OK;
}

static td_status put_bytes(struct writer *writer, const td_tensor *tensor, const void *data,
                           size_t bytes)
{
    return td_tensor_dtype(tensor) == TD_BOOL ? put_bools(writer, data, bytes)
                                              : put(writer, data, bytes);
}

/* Of an accelerator: a tensor of any size needs one piece of the host's memory. */
static td_status put_pieces(struct writer *writer, const td_tensor *tensor, size_t bytes)
{
    struct td__place from = td__place_of(tensor), host = {.device = td__host_device()};
    host.data = td__pinned_alloc(from.device, PIECE, &host.pinned);
    td_status status = host.data ? TD_OK : TD_ERR_NOMEM;
    while (bytes > 0 && !status) {
        size_t part = bytes < PIECE ? bytes : PIECE;
        status = td__copy_between(writer->file.call, &host, &from, part, false);
        if (!status)
            status = put_bytes(writer, tensor, host.data, part);
        from.data = (char *)from.data + part;
        bytes -= part;
    }
    if (host.data)
        td__pinned_free(host.data, host.pinned);
    return status;
}

static td_status put_elements(struct writer *writer, td_tensor *tensor)
{
    size_t bytes = td_tensor_nbytes(tensor);
    if (bytes == 0)
        return TD_OK;
    td_tensor *whole = td__contiguous(tensor);
    if (!whole)
        return td__error_status();
    td_status status = td__on_host(whole) ? put_bytes(writer, whole, td_tensor_data(whole), bytes)
                                          : put_pieces(writer, whole, bytes);
    td_tensor_release(whole);
    return status;
}

static td_status put_digest(struct writer *writer, size_t at)
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    char digits[TD__DIGEST_DIGITS + 1];
    if (!EVP_DigestFinal_ex(writer->digest, digest, NULL))
        return td_fail(TD_ERR_SYSTEM, "%s: the checksum cannot be computed", writer->file.call);
    for (int i = 0; i < TD__DIGEST_DIGITS / 2; i++)
        snprintf(digits + 2 * i, 3, "%02x", digest[i]);
    return td__atomic_file_rewrite(&writer->file, at, digits, TD__DIGEST_DIGITS);
}

static td_status write_all(struct writer *writer, const td_state *state,
                           const struct td__file_plan *plan)
{
    if (!EVP_DigestInit_ex(writer->digest, EVP_sha256(), NULL))
        return td_fail(TD_ERR_SYSTEM, "%s: the checksum cannot be computed", writer->file.call);
    TD_TRY(put(writer, plan->text.data, plan->text.size));
    for (int i = 0; i < td_state_count(state); i++)
        TD_TRY(put_elements(writer, td_state_tensor(state, plan->order[i])));
    return put_digest(writer, plan->digest_at);
}

td_status td__save_state(const char *call, const char *path, const td_state *state,
                         const td_file_note *notes, int note_count)
{
    struct td__file_plan plan;
    TD_TRY(td__plan_file(call, path, state, notes, note_count, &plan));
    struct writer writer = {.digest = EVP_MD_CTX_new()};
    td_status status = writer.digest ? td__atomic_file_open(&writer.file, call, path)
                                     : td__fail_nomem(call);
    if (!status) {
        status = write_all(&writer, state, &plan);
        if (status)
            td__atomic_file_drop(&writer.file);
        else
            status = td__atomic_file_commit(&writer.file);
    }
    EVP_MD_CTX_free(writer.digest);
    td__plan_free(&plan);
    return status;
}

td_status td_save_safetensors(const char *path, const td_state *state, const td_file_note *notes,
                              int count)
{
    static const char call[] = "td_save_safetensors";
    if (!path || !state || count < 0 || (count && !notes))
        return td_fail(TD_ERR_INVALID, "%s: the %s", call,
                       !path    ? "path is NULL"
                       : !state ? "state is NULL"
                                : "notes are NULL, or their count is negative");
    for (int i = 0; i < count; i++)
        for (int k = 0; notes[i].key && k < i; k++)
            if (!strcmp(notes[k].key, notes[i].key))
                return td_fail(TD_ERR_INVALID, "%s: %s: two notes have the key \"%.200s\"", call,
                               path, notes[i].key);
    for (int i = 0; i < count; i++)
        if (notes[i].key && !strncmp(notes[i].key, "tandem.", 7))
            return td_fail(TD_ERR_INVALID,
                           "%s: %s: keys that begin with \"tandem.\" are the library's own, as in "
                           "\"%.200s\"",
                           call, path, notes[i].key);
    return td__save_state(call, path, state, notes, count);
}
