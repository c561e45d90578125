/* The log inside the file of a file store; see file_log.h. */
#include "store/file_log.h"

#include "base/auth.h"
#include "base/fail.h"
#include "base/file_limit.h"

#include <tandem/store.h>

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

static const char magic[] = "TANDEMF1"; /* the last letter is the version of the format */

enum {
    MAGIC_SIZE = sizeof magic - 1,
    HEADER_FIELDS = MAGIC_SIZE + 4 * 8, /* what the header's checksum covers */
    HEADER_SIZE = 64,
    FRAME_SIZE = 8,        /* the size and the checksum in front of a record */
    CHUNK = 64 << 10,      /* read and written at once, where records are smaller */
    COMPACT_MIN = 1 << 20, /* a shorter log is left alone */
};

#define RECORD_MAX (1 + 4 + (size_t)TD_STORE_MAX_KEY + 4 + TD_STORE_MAX_VALUE)

static uint64_t mix(uint64_t hash, const uint8_t word[8])
{
    hash ^= td__load_u32(word) | (uint64_t)td__load_u32(word + 4) << 32;
    hash *= 0xd6e8feb86659fd93u;
    return hash ^ hash >> 32;
}

/* Finds accidents, not forgery: a process that can write to the file can set keys as well. */
static uint32_t checksum(uint64_t seed, const uint8_t *data, size_t size)
{
    uint64_t hash = seed ^ size * 0x9e3779b97f4a7c15u;
    uint8_t rest[8] = {0};
    for (; size >= 8; data += 8, size -= 8)
        hash = mix(hash, data);
    memcpy(rest, data, size);
    return (uint32_t)mix(hash, rest);
}

/* ---- Reading and writing --------------------------------------------------------------------- */

static td_status fail_damaged(const struct td__file_log *log, uint64_t offset, const char *what)
{
    return td_fail(TD_ERR_SYSTEM,
                   "file store \"%s\": the file is damaged at byte %" PRIu64
                   ": %s; end the job, remove the file and start again",
                   log->path, offset, what);
}

/* 0, or an errno: what could be read of `size` bytes is *got. */
static int read_at(int fd, void *data, size_t size, uint64_t offset, size_t *got)
{
    for (*got = 0; *got < size;) {
        ssize_t count = pread(fd, (char *)data + *got, size - *got, (off_t)(offset + *got));
        if (count < 0 && errno != EINTR)
            return errno;
        if (count == 0)
            break;
        if (count > 0)
            *got += (size_t)count;
    }
    return 0;
}

/* 0, or an errno. */
static int write_at(int fd, const void *data, size_t size, uint64_t offset)
{
    for (size_t done = 0; done < size;) {
        ssize_t count = td__file_pwrite(fd, (const char *)data + done, size - done,
                                        (off_t)(offset + done));
        if (count < 0 && errno != EINTR)
            return errno;
        if (count > 0)
            done += (size_t)count;
    }
    return 0;
}

/* One write inside one page, from memory inside one page: a kill does not tear it in two. */
static int write_header(int fd, const struct td__file_layout *layout)
{
    const uint64_t fields[] = {layout->nonce, layout->generation, layout->start, layout->end};
    _Alignas(HEADER_SIZE) uint8_t bytes[HEADER_SIZE] = {0};
    memcpy(bytes, magic, MAGIC_SIZE);
    for (size_t i = 0; i < 4; i++) {
        td__store_u32(bytes + MAGIC_SIZE + 8 * i, (uint32_t)fields[i]);
        td__store_u32(bytes + MAGIC_SIZE + 8 * i + 4, (uint32_t)(fields[i] >> 32));
    }
    td__store_u32(bytes + HEADER_FIELDS, checksum(0, bytes, HEADER_FIELDS));
    return write_at(fd, bytes, sizeof bytes, 0);
}

static td_status read_header(const struct td__file_log *log, struct td__file_layout *layout)
{
    uint8_t bytes[HEADER_SIZE];
    size_t got;
    int error = read_at(log->fd, bytes, sizeof bytes, 0, &got);
    if (error)
        return td_fail(TD_ERR_SYSTEM, "file store \"%s\": cannot read its header: %s", log->path,
                       td__errno_text(error));
    if (got < sizeof bytes || memcmp(bytes, magic, MAGIC_SIZE))
        return fail_damaged(log, 0, "it has no header of a file store of this version");
    if (checksum(0, bytes, HEADER_FIELDS) != td__load_u32(bytes + HEADER_FIELDS))
        return fail_damaged(log, 0, "the checksum of the header is wrong");
    struct td__reader reader = td__reader_of(bytes + MAGIC_SIZE, HEADER_FIELDS - MAGIC_SIZE);
    layout->nonce = td__reader_u64(&reader);
    layout->generation = td__reader_u64(&reader);
    layout->start = td__reader_u64(&reader);
    layout->end = td__reader_u64(&reader);
    if (!layout->nonce || !layout->generation || layout->start < HEADER_SIZE ||
        layout->start > layout->end || layout->end > INT64_MAX)
        return fail_damaged(log, 0, "the header contradicts itself");
    return TD_OK;
}

/* ---- From the file into memory --------------------------------------------------------------- */

void td__file_log_forget(struct td__file_log *log)
{
    td__kv_free(&log->kv);
    log->seen.generation = 0;
}

/* Applies the record at seen.end: its frame, and `size` bytes. */
static td_status apply(struct td__file_log *log, const uint8_t *frame, size_t size)
{
    const uint8_t *body = frame + FRAME_SIZE;
    if (checksum(log->seen.nonce ^ log->seen.end, body, size) != td__load_u32(frame + 4))
        return fail_damaged(log, log->seen.end, "the checksum of a record is wrong");
    struct td__reader reader = td__reader_of(body, size);
    uint8_t change = td__reader_u8(&reader);
    struct td__span key = td__reader_string(&reader, TD_STORE_MAX_KEY);
    struct td__span value = td__reader_string(&reader, TD_STORE_MAX_VALUE);
    if (!td__reader_done(&reader) || change < TD__FILE_SET || change > TD__FILE_DELETE)
        return fail_damaged(log, log->seen.end, "a record is not well-formed");
    td_status status = TD_OK;
    if (change == TD__FILE_SET)
        status = td__kv_set(&log->kv, key, value);
    else if (change == TD__FILE_APPEND)
        status = td__kv_append(&log->kv, key, value);
    else
        td__kv_delete(&log->kv, key);
    if (status == TD_ERR_INVALID)
        return fail_damaged(log, log->seen.end, td__error_text());
    log->seen.end += FRAME_SIZE + size;
    return status;
}

/* Applies the whole records in `data`, which was read at seen.end. *next is how much to read then:
 * more than a chunk where a record is larger. */
static td_status apply_all(struct td__file_log *log, const uint8_t *data, size_t size, uint64_t end,
                           size_t *next)
{
    *next = CHUNK;
    while (size >= FRAME_SIZE) {
        size_t body = td__load_u32(data);
        if (body > RECORD_MAX || FRAME_SIZE + body > end - log->seen.end)
            return fail_damaged(log, log->seen.end, "a record is longer than the log");
        size_t whole = FRAME_SIZE + body;
        if (whole > CHUNK)
            *next = whole;
        if (whole > size)
            return TD_OK;
        TD_TRY(apply(log, data, body));
        data += whole;
        size -= whole;
        *next = CHUNK;
    }
    if (size && log->seen.end + size == end)
        return fail_damaged(log, log->seen.end, "the last record is cut off");
    return TD_OK;
}

static td_status load(struct td__file_log *log, uint64_t end)
{
    struct td__buffer input = {0};
    td_status status = TD_OK;
    size_t size = CHUNK;
    while (!status && log->seen.end < end) {
        size_t got;
        if (size > end - log->seen.end)
            size = (size_t)(end - log->seen.end);
        if (!td__buffer_reserve(&input, size)) {
            status = td__fail_nomem("file store");
            break;
        }
        int error = read_at(log->fd, input.data, size, log->seen.end, &got);
        if (error)
            status = td_fail(TD_ERR_SYSTEM,
                             "file store \"%s\": cannot read at byte %" PRIu64 ": %s", log->path,
                             log->seen.end, td__errno_text(error));
        else if (got < size)
            status = fail_damaged(log, log->seen.end + got, "it ends before its log does");
        else
            status = apply_all(log, input.data, size, end, &size);
    }
    td__buffer_free(&input);
    return status;
}

td_status td__file_log_refresh(struct td__file_log *log)
{
    struct td__file_layout now;
    td_status status = read_header(log, &now);
    if (!status && log->seen.nonce && now.nonce != log->seen.nonce)
        status = td_fail(TD_ERR_STATE,
                         "file store \"%s\": another job has emptied the file while it was open "
                         "here; each job needs a file of its own, on a file system with working "
                         "locks",
                         log->path);
    if (!status && (now.generation != log->seen.generation || now.end < log->seen.end)) {
        td__file_log_forget(log);
        log->seen = now;
        log->seen.end = now.start;
        log->compact_at = COMPACT_MIN;
    }
    if (!status)
        status = load(log, now.end);
    if (status)
        td__file_log_forget(log);
    return status;
}

/* ---- From memory into the file --------------------------------------------------------------- */

static size_t record_size(struct td__span key, struct td__span value)
{
    return FRAME_SIZE + 1 + 4 + key.size + 4 + value.size;
}

/* Adds a record that will stand at `offset` of the file. */
static void put_record(struct td__buffer *records, uint64_t nonce, uint64_t offset,
                       enum td__file_change change, struct td__span key, struct td__span value)
{
    size_t size = record_size(key, value) - FRAME_SIZE, frame = records->size;
    td__buffer_reserve(records, FRAME_SIZE + size);
    td__buffer_put_u32(records, (uint32_t)size);
    td__buffer_put_u32(records, 0);
    td__buffer_put_u8(records, (uint8_t)change);
    td__buffer_put_string(records, key.data, key.size);
    td__buffer_put_string(records, value.data, value.size);
    if (!records->failed)
        td__store_u32(records->data + frame + 4,
                      checksum(nonce ^ offset, records->data + frame + FRAME_SIZE, size));
}

void td__file_log_put(const struct td__file_log *log, struct td__buffer *records,
                      enum td__file_change change, struct td__span key, struct td__span value)
{
    put_record(records, log->seen.nonce, log->seen.end + records->size, change, key, value);
}

/* Shortens the file, to give space back; what stays behind `end` does not count. */
static void cut_off(int fd, uint64_t end)
{
    if (ftruncate(fd, (off_t)end))
        return;
}

/* Writes `records` where they do not count yet, moves *offset behind them and empties them. 0, or an
 * errno; a disk that was too full for them gets its space back. */
static int write_records(struct td__file_log *log, struct td__buffer *records, uint64_t *offset)
{
    int error = records->failed ? ENOMEM : write_at(log->fd, records->data, records->size, *offset);
    if (error)
        cut_off(log->fd, log->seen.end);
    *offset += records->size;
    records->size = 0;
    return error;
}

static struct td__span key_of(const struct td__map_node *node)
{
    return (struct td__span){node->key, node->key_size};
}

static struct td__span value_of(const struct td__file_log *log, const struct td__map_node *node)
{
    const struct td__blob *blob = td__kv_find(&log->kv, key_of(node));
    return (struct td__span){blob->data, blob->size};
}

/* Writes the values that are left, `size` bytes of records, to another place of the file, and goes
 * on there. False where that failed: the log goes on where it is. */
static bool move_log(struct td__file_log *log, uint64_t size)
{
    struct td__file_layout next = log->seen;
    struct td__buffer records = {0};
    int error = 0;
    next.generation++;
    next.start = next.end = HEADER_SIZE + size <= log->seen.start ? HEADER_SIZE : log->seen.end;
    for (struct td__map_node *node = td__map_next(&log->kv.map, NULL); node && !error;
         node = td__map_next(&log->kv.map, node)) {
        put_record(&records, next.nonce, next.end + records.size, TD__FILE_SET, key_of(node),
                   value_of(log, node));
        if (records.failed || records.size >= CHUNK)
            error = write_records(log, &records, &next.end);
    }
    if (!error)
        error = write_records(log, &records, &next.end);
    td__buffer_free(&records);
    if (error)
        return false;
    if (write_header(log->fd, &next)) {
        td__file_log_forget(log); /* the file says which of the two is valid */
        return false;
    }
    log->seen = next;
    cut_off(log->fd, next.end);
    return true;
}

/* Called when the log may be too long: finds out, and when to look again. */
static void compact(struct td__file_log *log)
{
    uint64_t size = 0, length = log->seen.end - log->seen.start;
    for (struct td__map_node *node = td__map_next(&log->kv.map, NULL); node;
         node = td__map_next(&log->kv.map, node))
        size += record_size(key_of(node), value_of(log, node));
    log->compact_at = 2 * size > COMPACT_MIN ? 2 * size : COMPACT_MIN;
    if (length <= log->compact_at)
        return;
    if (!move_log(log, size))
        log->compact_at = 2 * length; /* no room for it now: not again at once */
}

static td_status fail_write(const struct td__file_log *log, int error)
{
    if (error == ENOMEM)
        return td__fail_nomem("file store");
    return td_fail(TD_ERR_SYSTEM, "file store \"%s\": cannot write: %s; nothing was changed",
                   log->path, td__errno_text(error));
}

td_status td__file_log_commit(struct td__file_log *log, struct td__buffer *records)
{
    struct td__file_layout next = log->seen;
    int error = write_records(log, records, &next.end);
    td__buffer_free(records);
    if (!error)
        error = write_header(log->fd, &next);
    if (error) {
        td__file_log_forget(log);
        return fail_write(log, error);
    }
    log->seen = next;
    if (next.end - next.start > log->compact_at)
        compact(log);
    return TD_OK;
}

td_status td__file_log_reset(struct td__file_log *log)
{
    char start[MAGIC_SIZE];
    size_t got;
    int error = read_at(log->fd, start, sizeof start, 0, &got);
    if (!error && got && (got < sizeof start || memcmp(start, magic, MAGIC_SIZE)))
        return td_fail(TD_ERR_INVALID,
                       "file store: \"%s\" is not a store of this version of Tandem, and was left "
                       "as it is; give another path, or remove it yourself",
                       log->path);
    struct td__file_layout fresh = {.generation = 1, .start = HEADER_SIZE, .end = HEADER_SIZE};
    TD_TRY(td__random(&fresh.nonce, sizeof fresh.nonce));
    fresh.nonce |= 1; /* 0 stands for none */
    if (!error && ftruncate(log->fd, 0))
        error = errno;
    if (!error)
        error = write_header(log->fd, &fresh);
    if (error)
        return td_fail(TD_ERR_SYSTEM, "file store: cannot begin a store in \"%s\": %s", log->path,
                       td__errno_text(error));
    td__file_log_forget(log);
    log->seen = fresh;
    log->compact_at = COMPACT_MIN;
    return TD_OK;
}
