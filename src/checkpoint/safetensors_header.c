/* Headers of safetensors files. A header is untrusted: checked are its syntax, the version, each
 * tensor by itself (dtype, shape, and offsets that match them), and that all tensors together cover
 * the data without overlap or gap, as the format requires. No size is used that exceeds the
 * file. */
#include "base/fail.h"
#include "checkpoint/json.h"
#include "checkpoint/safetensors.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    td_dtype dtype;
} dtypes[] = {
    {"F32", TD_F32}, {"F64", TD_F64}, {"F16", TD_F16},       {"BF16", TD_BF16}, {"I64", TD_I64},
    {"I32", TD_I32}, {"I16", TD_I16}, {"I8", TD_I8},         {"U8", TD_U8},     {"BOOL", TD_BOOL},
    {"U32", TD_U32}, {"U64", TD_U64}, {"C64", TD_COMPLEX64},
};

const char *td__file_dtype(td_dtype dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].name;
    return NULL;
}

bool td__file_dtype_of(const char *name, td_dtype *dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (!strcmp(dtypes[i].name, name)) {
            *dtype = dtypes[i].dtype;
            return true;
        }
    return false;
}

void td__header_free(struct td__file_header *header)
{
    for (size_t i = 0; i < header->count; i++) {
        free(header->tensors[i].name);
        free(header->tensors[i].dtype_name);
    }
    for (size_t i = 0; i < header->note_count; i++) {
        free(header->notes[i].key);
        free(header->notes[i].value);
    }
    free(header->tensors);
    free(header->sorted);
    free(header->notes);
    free(header->text.data);
    td__map_free(&header->map);
    *header = (struct td__file_header){0};
}

const struct td__file_note *td__header_note(const struct td__file_header *header, const char *key)
{
    for (size_t i = 0; i < header->note_count; i++)
        if (!strcmp(header->notes[i].key, key))
            return &header->notes[i];
    return NULL;
}

/* ---- Syntax --------------------------------------------------------------------------------------- */

static size_t place(const struct td__json *json, const char *at)
{
    return TD__HEADER_AT + (size_t)(at - json->begin);
}

static bool read_notes(struct td__json *json, struct td__file_header *header)
{
    if (header->has_notes)
        return td__json_fail(json, json->at, "\"__metadata__\" is here a second time");
    header->has_notes = true;
    if (!td__json_take(json, '{'))
        return false;
    if (td__json_try(json, '}'))
        return true;
    do {
        struct td__file_note *note = td__json_grow(json, (void **)&header->notes,
                                                   &header->note_count, &header->note_capacity,
                                                   sizeof *note);
        struct td__span raw;
        if (!note || !(note->key = td__json_string(json, NULL)))
            return false;
        if (!td__json_take(json, ':') || !(note->value = td__json_string(json, &raw)))
            return false;
        note->value_at = place(json, raw.data);
        note->value_size = raw.size;
    } while (td__json_more(json, '}'));
    return !json->wrong;
}

static bool read_offsets(struct td__json *json, struct td__file_tensor *tensor)
{
    return td__json_take(json, '[') && td__json_size(json, &tensor->begin) &&
           td__json_take(json, ',') && td__json_size(json, &tensor->end) &&
           td__json_take(json, ']');
}

/* One field of a tensor; `seen` has a bit for each that was there. */
static bool read_field(struct td__json *json, struct td__file_tensor *tensor, int *seen)
{
    static const char *const names[] = {"dtype", "shape", "data_offsets"};
    const char *start = json->at;
    char *name = td__json_string(json, NULL);
    if (!name)
        return false;
    int field = 0;
    while (field < 3 && strcmp(name, names[field]) != 0)
        field++;
    free(name);
    if (field < 3 && *seen & 1 << field)
        return td__json_fail(json, start, "a field is here a second time");
    *seen |= 1 << field;
    if (!td__json_take(json, ':'))
        return false;
    switch (field) {
    case 0:
        return (tensor->dtype_name = td__json_string(json, NULL)) != NULL;
    case 1:
        return td__json_shape(json, tensor->shape, &tensor->ndim);
    case 2:
        return read_offsets(json, tensor);
    default:
        return td__json_skip(json); /* unknown fields are skipped */
    }
}

static bool read_tensor(struct td__json *json, struct td__file_tensor *tensor)
{
    const char *start = json->at;
    int seen = 0;
    tensor->at = place(json, start);
    if (!td__json_take(json, '{'))
        return false;
    if (!td__json_try(json, '}')) {
        do
            if (!read_field(json, tensor, &seen))
                return false;
        while (td__json_more(json, '}'));
    }
    if (json->wrong)
        return false;
    return (seen & 7) == 7 ||
           td__json_fail(json, start, "a tensor lacks its dtype, its shape or its data_offsets");
}

static bool read_header(struct td__json *json, struct td__file_header *header)
{
    if (json->at < json->end && *json->at != '{')
        return td__json_fail(json, json->at, "a header must begin with {");
    if (!td__json_take(json, '{'))
        return false;
    if (td__json_try(json, '}'))
        return td__json_end(json);
    do {
        char *name = td__json_string(json, NULL);
        if (!name)
            return false;
        bool is_metadata = !strcmp(name, "__metadata__");
        struct td__file_tensor *tensor = is_metadata
                                             ? NULL
                                             : td__json_grow(json, (void **)&header->tensors,
                                                             &header->count, &header->capacity,
                                                             sizeof *tensor);
        if (tensor)
            tensor->name = name;
        else
            free(name);
        if (!td__json_take(json, ':'))
            return false;
        if (is_metadata ? !read_notes(json, header) : !read_tensor(json, tensor))
            return false;
    } while (td__json_more(json, '}'));
    return td__json_end(json);
}

/* The error for a header with a syntax error. */
static td_status syntax_error(const char *path, const struct td__json *json,
                              const struct td__file_header *header)
{
    if (json->no_memory)
        return td_fail(TD_ERR_NOMEM, "%s: no memory for its header", path);
    const char *name = header->count ? header->tensors[header->count - 1].name : NULL;
    return td_fail(TD_ERR_INVALID, "%s is no safetensors file: %s, at byte %zu%s%.200s%s", path,
                   json->wrong, place(json, json->wrong_at),
                   name ? "; the last entry before that is \"" : "", name ? name : "",
                   name ? "\"" : "");
}

/* ---- Semantics ------------------------------------------------------------------------------------ */

static td_status check_version(const char *path, const struct td__file_header *header)
{
    const struct td__file_note *note = td__header_note(header, "tandem.version");
    if (!note)
        return TD_OK;
    size_t length = strlen(note->value);
    if (length == 0 || length > 9 || strspn(note->value, "0123456789") != length)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: its tandem.version, at byte %zu, is \"%.40s\"", path,
                       note->value_at, note->value);
    if (atol(note->value) > TD__FILE_VERSION)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s was written by a later version of Tandem: its tandem.version is %s, and "
                       "Tandem %s reads up to %d; use a newer one",
                       path, note->value, td_version(), TD__FILE_VERSION);
    return TD_OK;
}

static td_status check_dtype(const char *path, const struct td__file_header *header,
                             struct td__file_tensor *tensor)
{
    if (td__file_dtype_of(tensor->dtype_name, &tensor->dtype))
        return TD_OK;
    /* In a file of this library, of a known version, it can only be damage. */
    bool ours = td__header_note(header, "tandem.version");
    return td_fail(ours ? TD_ERR_INVALID : TD_ERR_UNSUPPORTED,
                   "%s: \"%.200s\", at byte %zu, is of dtype \"%.40s\", which this library does "
                   "not have",
                   path, tensor->name, tensor->at, tensor->dtype_name);
}

static td_status check_tensor(const char *path, struct td__file_tensor *tensor, uint64_t data_size)
{
    if (!*tensor->name)
        return td_fail(TD_ERR_INVALID, "%s: the tensor at byte %zu has an empty name", path,
                       tensor->at);
    uint64_t bytes = td_dtype_size(tensor->dtype);
    bool overflow = false, empty = false;
    for (int d = 0; d < tensor->ndim; d++) {
        empty = empty || tensor->shape[d] == 0;
        overflow = __builtin_mul_overflow(bytes, (uint64_t)tensor->shape[d], &bytes) || overflow;
    }
    /* A size of 0 must not hide an overflow of the sizes before it. */
    if (overflow || bytes > INT64_MAX)
        return td_fail(TD_ERR_INVALID,
                       "%s: \"%.200s\", at byte %zu, has sizes that are too large%s", path,
                       tensor->name, tensor->at, empty ? ", though one of them is 0" : "");
    if (tensor->begin > tensor->end || tensor->end > data_size)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged or cut off: \"%.200s\", at byte %zu, is from %" PRIu64
                       " to %" PRIu64 " of %" PRIu64 " bytes of data",
                       path, tensor->name, tensor->at, tensor->begin, tensor->end, data_size);
    if (tensor->end - tensor->begin != bytes)
        return td_fail(TD_ERR_INVALID,
                       "%s: \"%.200s\", at byte %zu, has %" PRIu64
                       " bytes of data, and needs %" PRIu64 " by its dtype and its shape",
                       path, tensor->name, tensor->at, tensor->end - tensor->begin, bytes);
    struct td__layout layout; /* which limits sizes beside a 0, too */
    if (td__layout_init(&layout, "its shape", tensor->shape, tensor->ndim, NULL, tensor->dtype))
        return td_fail(TD_ERR_INVALID, "%s: \"%.200s\", at byte %zu: %s", path, tensor->name,
                       tensor->at, td__error_text());
    return TD_OK;
}

static int compare_places(const void *a, const void *b)
{
    const struct td__file_tensor *x = *(struct td__file_tensor *const *)a,
                                 *y = *(struct td__file_tensor *const *)b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static td_status check_cover(const char *path, struct td__file_header *header, uint64_t data_size)
{
    uint64_t end = 0;
    qsort(header->sorted, header->count, sizeof header->sorted[0], compare_places);
    for (size_t i = 0; i < header->count; i++) {
        const struct td__file_tensor *tensor = header->sorted[i];
        if (tensor->begin != end)
            return td_fail(TD_ERR_INVALID,
                           "%s: \"%.200s\", at byte %zu, begins at %" PRIu64
                           " of the data, where %s; the tensor before it ends at %" PRIu64,
                           path, tensor->name, tensor->at, tensor->begin,
                           tensor->begin < end ? "another tensor is" : "a gap would be", end);
        end = tensor->end;
    }
    if (end != data_size)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: its tensors take %" PRIu64 " bytes of data, and there are "
                       "%" PRIu64,
                       path, end, data_size);
    return TD_OK;
}

static td_status check_names(const char *path, struct td__file_header *header)
{
    for (size_t i = 0; i < header->count; i++) {
        struct td__file_tensor *tensor = &header->tensors[i];
        tensor->node.key = tensor->name;
        tensor->node.key_size = strlen(tensor->name);
        if (td__map_find(&header->map, tensor->node.key, tensor->node.key_size))
            return td_fail(TD_ERR_INVALID,
                           "%s: there are two tensors of the name \"%.200s\", the "
                           "second one at byte %zu",
                           path, tensor->name, tensor->at);
        if (!td__map_insert(&header->map, &tensor->node))
            return td_fail(TD_ERR_NOMEM, "%s: no memory for its header", path);
    }
    return TD_OK;
}

static td_status check_notes(const char *path, struct td__file_header *header)
{
    struct td__map map = {0};
    td_status status = TD_OK;
    for (size_t i = 0; i < header->note_count && !status; i++) {
        struct td__file_note *note = &header->notes[i];
        note->node.key = note->key;
        note->node.key_size = strlen(note->key);
        if (td__map_find(&map, note->node.key, note->node.key_size))
            status = td_fail(TD_ERR_INVALID,
                             "%s: its metadata have the key \"%.200s\" twice, the second time "
                             "with the value at byte %zu",
                             path, note->key, note->value_at);
        else if (!td__map_insert(&map, &note->node))
            status = td_fail(TD_ERR_NOMEM, "%s: no memory for its header", path);
    }
    td__map_free(&map);
    return status;
}

static td_status check_header(const char *path, struct td__file_header *header, uint64_t data_size)
{
    TD_TRY(check_notes(path, header));
    TD_TRY(check_version(path, header));
    header->sorted = malloc((header->count + 1) * sizeof header->sorted[0]);
    if (!header->sorted)
        return td_fail(TD_ERR_NOMEM, "%s: no memory for its header", path);
    for (size_t i = 0; i < header->count; i++) {
        TD_TRY(check_dtype(path, header, &header->tensors[i]));
        TD_TRY(check_tensor(path, &header->tensors[i], data_size));
        header->sorted[i] = &header->tensors[i];
    }
    TD_TRY(check_names(path, header));
    return check_cover(path, header, data_size);
}

td_status td__header_parse(const char *path, const char *text, size_t size, uint64_t data_size,
                           struct td__file_header *header)
{
    *header = (struct td__file_header){0};
    struct td__json json = {.begin = text, .at = text, .end = text + size};
    td_status status = read_header(&json, header) ? check_header(path, header, data_size)
                                                  : syntax_error(path, &json, header);
    if (status)
        td__header_free(header);
    return status;
}
