/* The file of a file store, which may hold anything.
 *
 *     byte 0   bit 0   what follows is the file, as it is
 *              bit 1   … is a header's fields (four times two bytes) and records (a length byte and
 *                      that many bytes): the checksums are made for them
 *              else    … is a script of changes (kind, key length, value length, key, value), which
 *                      are made through one log and must be seen through another; then the rest
 *                      (a byte for the place, one for the change) damages the file
 *
 * The source is included, not its header: with right checksums the reader gets to see what a
 * damaged file seldom has; and its file is memory, which is much faster. */
#include "fuzz.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { FILE_ROOM = 1 << 20, LONGEST = 65536, MOST_CHANGES = 100 };

static uint8_t file[FILE_ROOM]; /* zero behind its end */
static size_t file_size;

static ssize_t memory_pread(int fd, void *data, size_t size, off_t at)
{
    (void)fd;
    if (at < 0) {
        errno = EINVAL;
        return -1;
    }
    if ((size_t)at >= file_size)
        return 0;
    if (size > file_size - (size_t)at)
        size = file_size - (size_t)at;
    memcpy(data, file + at, size);
    return (ssize_t)size;
}

static ssize_t memory_pwrite(int fd, const void *data, size_t size, off_t at)
{
    (void)fd;
    if ((size_t)at > FILE_ROOM || size > FILE_ROOM - (size_t)at) {
        errno = ENOSPC;
        return -1;
    }
    memcpy(file + at, data, size);
    if ((size_t)at + size > file_size)
        file_size = (size_t)at + size;
    return (ssize_t)size;
}

static int memory_ftruncate(int fd, off_t size)
{
    (void)fd;
    if ((size_t)size > FILE_ROOM) {
        errno = ENOSPC;
        return -1;
    }
    if ((size_t)size < file_size)
        memset(file + size, 0, file_size - (size_t)size);
    file_size = (size_t)size;
    return 0;
}

#define pread memory_pread
#include "base/file_limit.h"
#define td__file_pwrite memory_pwrite
#define ftruncate memory_ftruncate
#include "store/file_log.c"

static void check(bool condition)
{
    if (!condition)
        abort();
}

static struct td__file_log open_log(int fd)
{
    return (struct td__file_log){.fd = fd, .path = "fuzz"};
}

/* Reads the file through a log of its own; whatever is in it, it is read or refused. */
static td_status look(int fd, struct td__file_log *log)
{
    *log = open_log(fd);
    td_status status = td__file_log_refresh(log);
    if (status)
        check(log->kv.map.size == 0 && log->seen.generation == 0);
    else
        check(log->seen.start <= log->seen.end && log->seen.nonce);
    return status;
}

static void change(struct td__file_log *log, enum td__file_change kind, struct td__span key,
                   struct td__span value)
{
    struct td__buffer records = {0};
    td_status status = TD_OK;
    if (kind == TD__FILE_SET)
        status = td__kv_set(&log->kv, key, value);
    else if (kind == TD__FILE_APPEND)
        status = td__kv_append(&log->kv, key, value);
    else
        td__kv_delete(&log->kv, key);
    check(!status);
    td__file_log_put(log, &records, kind, key,
                     kind == TD__FILE_DELETE ? (struct td__span){"", 0} : value);
    check(!td__file_log_commit(log, &records));
}

static void expect_same(const struct td__kv *a, const struct td__kv *b)
{
    check(a->map.size == b->map.size);
    for (struct td__map_node *node = td__map_next(&a->map, NULL); node;
         node = td__map_next(&a->map, node)) {
        struct td__span key = {node->key, node->key_size};
        struct td__blob *here = td__kv_find(a, key), *there = td__kv_find(b, key);
        check(there && here->size == there->size);
        check(!memcmp(here->data, there->data, here->size));
    }
}

/* A file that can be read can be changed, and another log sees the change. */
static void use(int fd)
{
    struct td__file_log log, other;
    if (look(fd, &log) == TD_OK) {
        struct td__span key = {"key", 3}, value = {"value", 5};
        change(&log, TD__FILE_SET, key, value);
        check(!look(fd, &other));
        expect_same(&log.kv, &other.kv);
        td__file_log_forget(&other);
    }
    td__file_log_forget(&log);
    td_status status = td__file_log_reset(&log); /* as the first of a new job */
    if (!status)
        check(!look(fd, &other) && other.kv.map.size == 0);
    else
        check(status == TD_ERR_INVALID);
}

static void write_file(int fd, const void *data, size_t size)
{
    check(!ftruncate(fd, 0) && !write_at(fd, data, size, 0));
}

static void forge(int fd, const uint8_t *data, size_t size)
{
    struct td__file_layout layout = {.nonce = 1, .generation = 1, .start = HEADER_SIZE};
    struct td__reader reader = td__reader_of(data, size);
    uint16_t fields[4];
    for (int i = 0; i < 4; i++) {
        fields[i] = td__reader_u8(&reader);
        fields[i] = (uint16_t)(fields[i] | td__reader_u8(&reader) << 8);
    }
    layout.nonce ^= fields[0];
    layout.generation ^= fields[1];
    layout.start += fields[2];
    uint64_t at = layout.start;
    check(!ftruncate(fd, 0));
    while (!reader.failed && reader.at < reader.end) {
        size_t left = (size_t)(reader.end - reader.at) - 1, length = *reader.at++;
        if (length > left)
            length = left;
        uint8_t frame[FRAME_SIZE];
        td__store_u32(frame, (uint32_t)length);
        td__store_u32(frame + 4, checksum(layout.nonce ^ at, reader.at, length));
        check(!write_at(fd, frame, sizeof frame, at));
        check(!write_at(fd, reader.at, length, at + FRAME_SIZE));
        at += FRAME_SIZE + length;
        reader.at += length;
    }
    layout.end = at + (uint64_t)(int64_t)(int16_t)fields[3];
    check(!write_header(fd, &layout));
}

/* Returns how much of the input it has used. */
static size_t run_script(int fd, const uint8_t *data, size_t size)
{
    struct td__file_log a = open_log(fd), b;
    size_t at = 0;
    check(!td__file_log_reset(&a));
    check(!look(fd, &b));
    for (int changes = 0; changes < MOST_CHANGES && size - at >= 3 && data[at] != 0xff; changes++) {
        size_t key = data[at + 1], value = data[at + 2] * (size_t)16;
        enum td__file_change kind = TD__FILE_SET + data[at] % 3;
        at += 3;
        key = key < size - at ? key : size - at;
        value = value < size - at - key ? value : size - at - key;
        change(&a, kind, (struct td__span){(const char *)data + at, key},
               (struct td__span){(const char *)data + at + key, value});
        at += key + value;
        if (data[at - key - value - 3] & 4) /* it need not see each one by itself */
            check(!td__file_log_refresh(&b));
    }
    check(!td__file_log_refresh(&b));
    expect_same(&a.kv, &b.kv);
    td__file_log_forget(&a);
    td__file_log_forget(&b);
    return at;
}

static void damage(int fd, const uint8_t *data, size_t size)
{
    off_t length = (off_t)file_size;
    for (; size >= 3; data += 3, size -= 3) {
        uint8_t byte;
        size_t got;
        uint64_t place = (uint64_t)(data[0] | data[1] << 8) % (uint64_t)length;
        check(!read_at(fd, &byte, 1, place, &got) && got == 1);
        byte ^= data[2];
        check(!write_at(fd, &byte, 1, place));
    }
    if (size)
        check(!ftruncate(fd, length * data[0] / 256));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const int fd = 0; /* any: there is one file */
    if (size < 1 || size > LONGEST)
        return 0;
    uint8_t mode = *data++;
    size--;
    if (mode & 1) {
        write_file(fd, data, size);
    } else if (mode & 2) {
        forge(fd, data, size);
    } else {
        write_file(fd, "", 0);
        size_t used = run_script(fd, data, size);
        if (used < size)
            damage(fd, data + used + 1, size - used - 1);
    }
    use(fd);
    return 0;
}
