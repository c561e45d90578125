/* Zip archives; see zip_archive.h.
 *
 *     | header, bytes of member 0 | header, bytes of member 1 | … | directory | end of directory |
 *
 * The end is searched from behind, since a comment may follow it. Archives above 4 GiB, or with more than 65,535 members,
 * have another end before that one, and 64-bit numbers in the entries of the directory (ZIP64). */
#include "checkpoint/zip_archive.h"

#include "base/buffer.h"
#include "base/fail.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    END_SIZE = 22,
    COMMENT_MOST = 65535,
    LOCATOR_SIZE = 20,
    END64_SIZE = 56,
    ENTRY_SIZE = 46,
    LOCAL_SIZE = 30,
    DIRECTORY_MOST = 64 << 20, /* bytes */
};

#define END_MAGIC 0x06054b50u
#define LOCATOR_MAGIC 0x07064b50u
#define END64_MAGIC 0x06064b50u
#define ENTRY_MAGIC 0x02014b50u
#define LOCAL_MAGIC 0x04034b50u
#define IN_64_BITS 0xffffffffu /* a number that stands elsewhere */

static unsigned load_u16(const uint8_t *from)
{
    return from[0] | (unsigned)from[1] << 8;
}

static td_status damaged(const struct td__zip_source *source, const char *what)
{
    return td_fail(TD_ERR_INVALID, "%s is no zip archive, or is damaged: %s", source->path, what);
}

static td_status read_at(const struct td__zip_source *source, uint64_t at, void *to, size_t size,
                         const char *what)
{
    if (at > source->size || size > source->size - at)
        return damaged(source, what);
    return source->read(source->arg, at, to, size);
}

/* ---- The end ----------------------------------------------------------------------------------------- */

struct directory {
    uint64_t at, size, count;
};

/* Finds the end of the directory; *end_at is where it begins, and `end` gets its bytes. */
static td_status find_end(const struct td__zip_source *source, uint64_t *end_at,
                          uint8_t end[END_SIZE])
{
    uint64_t room = END_SIZE + COMMENT_MOST;
    size_t size = (size_t)(source->size < room ? source->size : room);
    uint8_t *tail = malloc(size + 1);
    if (!tail)
        return td__fail_nomem(source->path);
    td_status status = read_at(source, source->size - size, tail, size, "");
    bool found = false;
    for (size_t i = size; !status && !found && i >= END_SIZE; i--) {
        const uint8_t *at = tail + i - END_SIZE;
        found = td__load_u32(at) == END_MAGIC && load_u16(at + 20) == size - i;
        if (found) {
            memcpy(end, at, END_SIZE);
            *end_at = source->size - size + i - END_SIZE;
        }
    }
    free(tail);
    if (status)
        return status;
    return found ? TD_OK : damaged(source, "it has no directory at its end");
}

static td_status read_end64(const struct td__zip_source *source, uint64_t end_at,
                            struct directory *directory)
{
    uint8_t locator[LOCATOR_SIZE], end[END64_SIZE];
    if (end_at < LOCATOR_SIZE)
        return damaged(source, "its directory is not where it should be");
    TD_TRY(read_at(source, end_at - LOCATOR_SIZE, locator, sizeof locator, ""));
    if (td__load_u32(locator) != LOCATOR_MAGIC)
        return damaged(source, "its directory has no 64-bit offsets");
    TD_TRY(read_at(source, td__load_u64(locator + 8), end, sizeof end,
                   "the end of its directory is outside of it"));
    if (td__load_u32(end) != END64_MAGIC)
        return damaged(source, "the end of its directory is not where it should be");
    *directory = (struct directory){.count = td__load_u64(end + 32),
                                    .size = td__load_u64(end + 40),
                                    .at = td__load_u64(end + 48)};
    return TD_OK;
}

static td_status find_directory(const struct td__zip_source *source, struct directory *directory)
{
    uint8_t end[END_SIZE] = {0};
    uint64_t end_at = 0;
    TD_TRY(find_end(source, &end_at, end));
    *directory = (struct directory){
        .count = load_u16(end + 10), .size = td__load_u32(end + 12), .at = td__load_u32(end + 16)};
    if (directory->count == 0xffff || directory->size == IN_64_BITS || directory->at == IN_64_BITS)
        TD_TRY(read_end64(source, end_at, directory));
    if (directory->at > source->size || directory->size > source->size - directory->at)
        return damaged(source, "its directory is outside of it");
    if (directory->size > DIRECTORY_MOST || directory->count > directory->size / ENTRY_SIZE)
        return damaged(source, "its directory has an impossible size");
    return TD_OK;
}

/* ---- The directory ----------------------------------------------------------------------------------- */

/* The 64-bit numbers of an entry, in place of those that did not fit. `extra` has fields of an id, a size and bytes. */
static bool read_extra(const uint8_t *extra, size_t size, uint64_t *numbers[], int count)
{
    for (size_t at = 0; at + 4 <= size;) {
        size_t field = load_u16(extra + at + 2);
        const uint8_t *data = extra + at + 4;
        if (field > size - at - 4)
            return false;
        at += 4 + field;
        if (load_u16(data - 4) != 1)
            continue;
        for (int i = 0; i < count; i++, data += 8, field -= 8) {
            if (field < 8)
                return false;
            *numbers[i] = td__load_u64(data);
        }
        return true;
    }
    return count == 0;
}

/* The member at `at` of the directory; *length is that of its entry. */
static td_status read_entry(const struct td__zip_source *source, const uint8_t *at, size_t left,
                            struct td__zip_member *member, size_t *length)
{
    if (left < ENTRY_SIZE || td__load_u32(at) != ENTRY_MAGIC)
        return damaged(source, "an entry of its directory is cut off");
    size_t name = load_u16(at + 28), extra = load_u16(at + 30), comment = load_u16(at + 32);
    *length = ENTRY_SIZE + name + extra + comment;
    if (*length > left)
        return damaged(source, "an entry of its directory is cut off");
    uint64_t packed = td__load_u32(at + 20), *numbers[3];
    int count = 0;
    *member = (struct td__zip_member){.crc = td__load_u32(at + 16),
                                      .size = td__load_u32(at + 24),
                                      .header_at = td__load_u32(at + 42)};
    if (member->size == IN_64_BITS)
        numbers[count++] = &member->size;
    if (packed == IN_64_BITS)
        numbers[count++] = &packed;
    if (member->header_at == IN_64_BITS)
        numbers[count++] = &member->header_at;
    if (!read_extra(at + ENTRY_SIZE + name, extra, numbers, count))
        return damaged(source, "an entry of its directory lacks its 64-bit numbers");
    member->is_plain = !(load_u16(at + 8) & 1) && load_u16(at + 10) == 0 && packed == member->size;
    if (member->header_at > source->size || packed > source->size - member->header_at)
        return damaged(source, "a member is outside of it");
    member->name = td__text_copy(at + ENTRY_SIZE, name);
    return member->name ? TD_OK : td__fail_nomem(source->path);
}

td_status td__zip_open(const struct td__zip_source *source, struct td__zip_archive *archive)
{
    struct directory directory;
    *archive = (struct td__zip_archive){.source = *source};
    TD_TRY(find_directory(source, &directory));
    size_t left = (size_t)directory.size;
    uint8_t *bytes = malloc(left + 1), *at = bytes;
    archive->members = calloc((size_t)directory.count + 1, sizeof *archive->members);
    td_status status = bytes && archive->members ? TD_OK : td__fail_nomem(source->path);
    if (!status)
        status = read_at(source, directory.at, bytes, left, "");
    for (uint64_t i = 0; i < directory.count && !status; i++) {
        size_t length = 0;
        status = read_entry(source, at, left, &archive->members[i], &length);
        if (status)
            break;
        archive->count++;
        at += length;
        left -= length;
    }
    free(bytes);
    if (status)
        td__zip_close(archive);
    return status;
}

void td__zip_close(struct td__zip_archive *archive)
{
    for (size_t i = 0; i < archive->count; i++)
        free(archive->members[i].name);
    free(archive->members);
    archive->members = NULL;
    archive->count = 0;
}

const struct td__zip_member *td__zip_find(const struct td__zip_archive *archive, const char *name)
{
    for (size_t i = 0; i < archive->count; i++) {
        const char *slash = strchr(archive->members[i].name, '/');
        if (slash && !strcmp(slash + 1, name))
            return &archive->members[i];
    }
    return NULL;
}

td_status td__zip_locate(const struct td__zip_archive *archive, const struct td__zip_member *member,
                         uint64_t *at)
{
    const struct td__zip_source *source = &archive->source;
    uint8_t header[LOCAL_SIZE];
    if (!member->is_plain)
        return td_fail(
            TD_ERR_UNSUPPORTED,
            "%s: its member %.100s is compressed or encrypted; torch.save() does neither",
            source->path, member->name);
    TD_TRY(read_at(source, member->header_at, header, sizeof header,
                   "the header of a member is outside of it"));
    if (td__load_u32(header) != LOCAL_MAGIC)
        return damaged(source, "the header of a member is not where it should be");
    uint64_t begin = member->header_at + LOCAL_SIZE + load_u16(header + 26) + load_u16(header + 28);
    if (begin > source->size || member->size > source->size - begin)
        return damaged(source, "a member is outside of it");
    *at = begin;
    return TD_OK;
}
