/* The index of a sharded checkpoint. It is untrusted: checked are its checksum, its syntax, the version, each tensor by
 * itself, and that its pieces cover it and are inside of their files, whose sizes the reader compares with those on the
 * disk. Names of files are not chosen by the index. */
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/json.h"
#include "checkpoint/sharded.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUM_BEFORE ",\"crc32c\":\""
#define SUM_AFTER "\"}\n"
enum { SUM_DIGITS = 8 };

/* ---- Lists ----------------------------------------------------------------------------------------- */

struct td__sharded_tensor *td__index_add(struct td__index *index, const char *name, size_t length)
{
    struct td__sharded_tensor **place = td__list_grow((void **)&index->tensors, &index->count,
                                                      &index->capacity, sizeof *place);
    struct td__sharded_tensor *tensor = place ? calloc(1, sizeof *tensor) : NULL;
    if (tensor)
        tensor->name = td__text_copy(name, length);
    if (!tensor || !tensor->name) {
        free(tensor);
        index->count -= place != NULL;
        return NULL;
    }
    *place = tensor;
    tensor->number = index->count - 1;
    tensor->node.key = tensor->name;
    tensor->node.key_size = strlen(tensor->name);
    return tensor;
}

struct td__shard_piece *td__index_add_piece(struct td__sharded_tensor *tensor)
{
    return td__list_grow((void **)&tensor->pieces, &tensor->count, &tensor->capacity,
                         sizeof(struct td__shard_piece));
}

struct td__sharded_tensor *td__index_get(const struct td__index *index, const char *name)
{
    struct td__map_node *node = td__map_find(&index->map, name, strlen(name));
    return node ? TD__CONTAINER(node, struct td__sharded_tensor, node) : NULL;
}

void td__index_free(struct td__index *index)
{
    for (size_t i = 0; i < index->count; i++) {
        struct td__sharded_tensor *tensor = index->tensors[i];
        for (size_t p = 0; p < tensor->count; p++)
            free(tensor->pieces[p].sums);
        free(tensor->pieces);
        free(tensor->name);
        free(tensor);
    }
    for (size_t i = 0; i < index->note_count; i++) {
        free(index->notes[i].key);
        free(index->notes[i].value);
    }
    free(index->tensors);
    free(index->notes);
    free(index->sizes);
    td__map_free(&index->map);
    *index = (struct td__index){0};
}

void td__shard_name(char name[static TD__SHARD_NAME], int rank)
{
    snprintf(name, TD__SHARD_NAME, "shard-%05d.safetensors", rank);
}

/* ---- Syntax ----------------------------------------------------------------------------------------- */

struct parser {
    struct td__json json;
    const char *path;
    struct td__index *index;
    uint64_t version, ranks;
    char *kind;
};

static void *no_memory(struct parser *parser)
{
    parser->json.no_memory = true;
    td__json_fail(&parser->json, parser->json.at, "out of memory");
    return NULL;
}

/* Calls `read` for each field of an object. `names` ends with NULL; each name must be there once, others are skipped. */
static bool read_object(struct parser *parser, const char *const *names,
                        bool (*read)(struct parser *parser, int field, void *arg), void *arg)
{
    struct td__json *json = &parser->json;
    const char *start = json->at;
    int all = 0, seen = 0;
    while (names[all])
        all++;
    if (!td__json_take(json, '{'))
        return false;
    bool more = !td__json_try(json, '}');
    while (more) {
        const char *at = json->at;
        char *name = td__json_string(json, NULL);
        int field = 0;
        while (name && field < all && strcmp(name, names[field]) != 0)
            field++;
        free(name);
        if (!name || !td__json_take(json, ':'))
            return false;
        if (field < all && seen & 1 << field)
            return td__json_fail(json, at, "a field is here a second time");
        seen |= field < all ? 1 << field : 0;
        if (field < all ? !read(parser, field, arg) : !td__json_skip(json))
            return false;
        more = td__json_more(json, '}');
    }
    if (json->wrong)
        return false;
    return seen == (1 << all) - 1 || td__json_fail(json, start, "an object lacks a field");
}

static bool read_notes(struct parser *parser)
{
    struct td__json *json = &parser->json;
    struct td__index *index = parser->index;
    if (!td__json_take(json, '{'))
        return false;
    if (td__json_try(json, '}'))
        return true;
    do {
        struct td__shard_note *note = td__list_grow((void **)&index->notes, &index->note_count,
                                                    &index->note_capacity, sizeof *note);
        if (!note)
            return no_memory(parser);
        if (!(note->key = td__json_string(json, NULL)) || !td__json_take(json, ':') ||
            !(note->value = td__json_string(json, NULL)))
            return false;
    } while (td__json_more(json, '}'));
    return !json->wrong;
}

static bool read_file(struct parser *parser, int field, void *arg)
{
    if (field == 1)
        return td__json_size(&parser->json, arg);
    const char *at = parser->json.at;
    char expected[TD__SHARD_NAME], *name = td__json_string(&parser->json, NULL);
    if (!name)
        return false;
    td__shard_name(expected, (int)parser->index->file_count - 1);
    bool right = !strcmp(name, expected);
    free(name);
    return right ||
           td__json_fail(&parser->json, at, "a file has another name than that of its rank");
}

static bool read_files(struct parser *parser)
{
    static const char *const names[] = {"name", "size", NULL};
    struct td__json *json = &parser->json;
    struct td__index *index = parser->index;
    if (!td__json_take(json, '['))
        return false;
    if (td__json_try(json, ']'))
        return true;
    do {
        uint64_t *size = td__list_grow((void **)&index->sizes, &index->file_count,
                                       &index->file_capacity, sizeof *size);
        if (!size)
            return no_memory(parser);
        if (!read_object(parser, names, read_file, size))
            return false;
    } while (td__json_more(json, ']'));
    return !json->wrong;
}

static bool parse_sum(const char *digits, uint32_t *sum)
{
    *sum = 0;
    for (int i = 0; i < SUM_DIGITS; i++) {
        char digit = digits[i];
        if ((digit < '0' || digit > '9') && (digit < 'a' || digit > 'f'))
            return false;
        *sum = *sum << 4 | (uint32_t)(digit <= '9' ? digit - '0' : digit - 'a' + 10);
    }
    return true;
}

static bool read_sums(struct parser *parser, struct td__shard_piece *piece)
{
    struct td__json *json = &parser->json;
    const char *at = json->at;
    char *text = td__json_string(json, NULL);
    if (!text)
        return false;
    size_t length = strlen(text);
    bool right = length % SUM_DIGITS == 0;
    piece->sum_count = length / SUM_DIGITS;
    piece->sums = malloc((piece->sum_count + 1) * sizeof piece->sums[0]);
    for (size_t i = 0; piece->sums && i < piece->sum_count && right; i++)
        right = parse_sum(text + i * SUM_DIGITS, &piece->sums[i]);
    free(text);
    if (!piece->sums)
        return no_memory(parser);
    return right || td__json_fail(json, at, "a checksum is 8 hexadecimal digits");
}

static bool read_piece(struct parser *parser, struct td__shard_piece *piece)
{
    struct td__json *json = &parser->json;
    const char *at = json->at;
    uint64_t file, first, count;
    if (!td__json_take(json, '[') || !td__json_size(json, &file) || !td__json_take(json, ',') ||
        !td__json_size(json, &first) || !td__json_take(json, ',') || !td__json_size(json, &count) ||
        !td__json_take(json, ',') || !td__json_size(json, &piece->offset) ||
        !td__json_take(json, ',') || !read_sums(parser, piece) || !td__json_take(json, ']'))
        return false;
    if (file > INT32_MAX)
        return td__json_fail(json, at, "there is no such file");
    piece->file = (int)file;
    piece->first = (int64_t)first;
    piece->count = (int64_t)count;
    return true;
}

static bool read_pieces(struct parser *parser, struct td__sharded_tensor *tensor)
{
    struct td__json *json = &parser->json;
    if (!td__json_take(json, '['))
        return false;
    if (td__json_try(json, ']'))
        return true;
    do {
        struct td__shard_piece *piece = td__index_add_piece(tensor);
        if (!piece)
            return no_memory(parser);
        if (!read_piece(parser, piece))
            return false;
    } while (td__json_more(json, ']'));
    return !json->wrong;
}

static bool read_dtype(struct parser *parser, struct td__sharded_tensor *tensor)
{
    const char *at = parser->json.at;
    char *name = td__json_string(&parser->json, NULL);
    if (!name)
        return false;
    bool known = td__file_dtype_of(name, &tensor->dtype);
    free(name);
    return known || td__json_fail(&parser->json, at, "this library does not have this dtype");
}

static bool read_tensor_shape(struct parser *parser, struct td__sharded_tensor *tensor)
{
    return td__json_shape(&parser->json, tensor->shape, &tensor->ndim);
}

static bool read_tensor_field(struct parser *parser, int field, void *arg)
{
    return field == 0   ? read_dtype(parser, arg)
           : field == 1 ? read_tensor_shape(parser, arg)
                        : read_pieces(parser, arg);
}

static bool read_tensors(struct parser *parser)
{
    static const char *const names[] = {"dtype", "shape", "pieces", NULL};
    struct td__json *json = &parser->json;
    struct td__index *index = parser->index;
    if (!td__json_take(json, '{'))
        return false;
    if (td__json_try(json, '}'))
        return true;
    do {
        const char *at = json->at;
        char *name = td__json_string(json, NULL);
        if (!name)
            return false;
        struct td__sharded_tensor *tensor = td__index_add(index, name, strlen(name));
        free(name);
        if (!tensor)
            return no_memory(parser);
        if (!*tensor->name || td__index_get(index, tensor->name))
            return td__json_fail(json, at, "a name is empty, or is here a second time");
        if (!td__map_insert(&index->map, &tensor->node))
            return no_memory(parser);
        if (!td__json_take(json, ':') || !read_object(parser, names, read_tensor_field, tensor))
            return false;
    } while (td__json_more(json, '}'));
    return !json->wrong;
}

static bool read_field(struct parser *parser, int field, void *arg)
{
    (void)arg;
    switch (field) {
    case 0:
        return td__json_size(&parser->json, &parser->version);
    case 1:
        return td__json_size(&parser->json, &parser->ranks);
    case 2:
        return (parser->kind = td__json_string(&parser->json, NULL)) != NULL;
    case 3:
        return read_notes(parser);
    case 4:
        return read_files(parser);
    case 5:
        return read_tensors(parser);
    default:
        return td__json_skip(&parser->json); /* the checksum */
    }
}

static bool read_index(struct parser *parser)
{
    static const char *const names[] = {"tandem.sharded", "ranks",   "kind",   "notes",
                                        "files",          "tensors", "crc32c", NULL};
    return read_object(parser, names, read_field, NULL) && td__json_end(&parser->json);
}

static td_status syntax_error(const struct parser *parser)
{
    const struct td__json *json = &parser->json;
    const struct td__index *index = parser->index;
    if (json->no_memory)
        return td_fail(TD_ERR_NOMEM, "%s: no memory for the index", parser->path);
    const char *name = index->count ? index->tensors[index->count - 1]->name : NULL;
    return td_fail(
        TD_ERR_INVALID, "%s is no index of a sharded checkpoint: %s, at byte %zu%s%.200s%s",
        parser->path, json->wrong, (size_t)(json->wrong_at - json->begin),
        name ? "; the last tensor before that is \"" : "", name ? name : "", name ? "\"" : "");
}

/* ---- Semantics -------------------------------------------------------------------------------------- */

static td_status check_piece(const char *path, const struct td__index *index,
                             const struct td__sharded_tensor *tensor,
                             const struct td__shard_piece *piece, int64_t end)
{
    if (piece->first != end || piece->count < 1 || piece->count > tensor->numel - end)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: \"%.200s\" has %" PRId64 " elements, and a piece of %" PRId64
                       " from %" PRId64 " on behind the one that ends at %" PRId64,
                       path, tensor->name, tensor->numel, piece->count, piece->first, end);
    uint64_t bytes = (uint64_t)piece->count * td_dtype_size(tensor->dtype);
    if ((size_t)piece->file >= index->file_count || piece->offset > index->sizes[piece->file] ||
        bytes > index->sizes[piece->file] - piece->offset)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: a piece of \"%.200s\" of %" PRIu64
                       " bytes is at byte %" PRIu64 " of file %d, which is shorter or not there",
                       path, tensor->name, bytes, piece->offset, piece->file);
    if (piece->sum_count != td__sum_blocks(bytes))
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: a piece of \"%.200s\" of %" PRIu64
                       " bytes has %zu checksums, "
                       "and needs %" PRIu64,
                       path, tensor->name, bytes, piece->sum_count, td__sum_blocks(bytes));
    return TD_OK;
}

static td_status check_tensor(const char *path, const struct td__index *index,
                              struct td__sharded_tensor *tensor)
{
    struct td__layout layout;
    if (td__layout_init(&layout, "its shape", tensor->shape, tensor->ndim, NULL, tensor->dtype))
        return td_fail(TD_ERR_INVALID, "%s: \"%.200s\": %s", path, tensor->name, td__error_text());
    tensor->numel = layout.numel;
    int64_t end = 0;
    for (size_t i = 0; i < tensor->count; i++) {
        TD_TRY(check_piece(path, index, tensor, &tensor->pieces[i], end));
        end += tensor->pieces[i].count;
    }
    if (end != tensor->numel)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: the pieces of \"%.200s\" have %" PRId64 " of its %" PRId64
                       " elements",
                       path, tensor->name, end, tensor->numel);
    return TD_OK;
}

static td_status check_index(const struct parser *parser)
{
    struct td__index *index = parser->index;
    const char *path = parser->path;
    if (parser->version > TD__SHARDED_VERSION)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s was written by a later version of Tandem: its tandem.sharded is %" PRIu64
                       ", and Tandem %s reads up to %d; use a newer one",
                       path, parser->version, td_version(), TD__SHARDED_VERSION);
    if (parser->version < 1 || parser->ranks != index->file_count || parser->ranks < 1 ||
        parser->ranks > INT32_MAX)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: it is of version %" PRIu64 ", of %" PRIu64
                       " ranks, and of %zu files",
                       path, parser->version, parser->ranks, index->file_count);
    index->ranks = (int)parser->ranks;
    index->is_training = !strcmp(parser->kind, "training");
    for (size_t i = 0; i < index->count; i++)
        TD_TRY(check_tensor(path, index, index->tensors[i]));
    return TD_OK;
}

/* The last bytes must be the checksum of those before. */
static td_status check_sum(const char *path, const char *text, size_t size)
{
    size_t tail = strlen(SUM_BEFORE SUM_AFTER) + SUM_DIGITS;
    const char *at = size >= tail ? text + size - tail : NULL;
    uint32_t expected = 0;
    if (!at || memcmp(at, SUM_BEFORE, strlen(SUM_BEFORE)) != 0 ||
        memcmp(text + size - strlen(SUM_AFTER), SUM_AFTER, strlen(SUM_AFTER)) != 0 ||
        !parse_sum(at + strlen(SUM_BEFORE), &expected))
        return td_fail(
            TD_ERR_INVALID,
            "%s is no index of a sharded checkpoint, or is cut off: it does not end with "
            "its checksum",
            path);
    uint32_t sum = td__crc32c(0, text, size - tail);
    if (sum != expected)
        return td_fail(TD_ERR_INVALID,
                       "%s is damaged: the checksum of its %zu bytes is %08x, and it was %08x when "
                       "it was written",
                       path, size, sum, expected);
    return TD_OK;
}

td_status td__index_parse(const char *path, const char *text, size_t size, struct td__index *index)
{
    *index = (struct td__index){0};
    TD_TRY(check_sum(path, text, size));
    struct parser parser = {
        .json = {.begin = text, .at = text, .end = text + size}, .path = path, .index = index};
    td_status status = read_index(&parser) ? check_index(&parser) : syntax_error(&parser);
    free(parser.kind);
    if (status)
        td__index_free(index);
    return status;
}
