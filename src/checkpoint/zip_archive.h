/* Zip archives whose members are stored, not compressed, as torch.save() writes them: the list of members, and where the
 * bytes of each begin. Everything that the archive says is checked against its size before it is used. */
#ifndef TD_CHECKPOINT_ZIP_ARCHIVE_H
#define TD_CHECKPOINT_ZIP_ARCHIVE_H

#include <tandem/base.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Where the bytes are. read() gets `size` bytes at `at`, which are inside. */
struct td__zip_source {
    td_status (*read)(void *arg, uint64_t at, void *to, size_t size);
    void *arg;
    uint64_t size;
    const char *path; /* for errors */
};

struct td__zip_member {
    char *name;
    uint64_t header_at; /* of its local header */
    uint64_t size;
    uint32_t crc;
    bool is_plain; /* neither compressed nor encrypted */
};

struct td__zip_archive {
    struct td__zip_source source;
    struct td__zip_member *members;
    size_t count;
};

/** Reads the directory. TD_ERR_INVALID if it is none, or is damaged. On failure *archive holds nothing. */
td_status td__zip_open(const struct td__zip_source *source, struct td__zip_archive *archive);
void td__zip_close(struct td__zip_archive *archive);

/** A member whose name ends with `name` behind a folder of one level ("archive/" + name), as torch.save() has them; or
 *  NULL. */
const struct td__zip_member *td__zip_find(const struct td__zip_archive *archive, const char *name);

/** Where the bytes of a member begin. TD_ERR_UNSUPPORTED if they are compressed or encrypted. */
td_status td__zip_locate(const struct td__zip_archive *archive, const struct td__zip_member *member,
                         uint64_t *at);

#endif
