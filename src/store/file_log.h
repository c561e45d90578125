/* What is inside the file of a file store: a header, and a log of the changes made to the store.
 *
 *     0         64        start                        end                  size of the file
 *     | header   | free    | record | record | record   | left by a crash     |
 *
 *     header    magic, nonce, generation, start, end, checksum
 *     record    size, checksum, then `size` bytes: kind, key, value
 *
 * Each process keeps in memory what the records up to some offset say, and reads on from there. What
 * is written comes behind `end`, or into the free part; then one small write of the header makes it
 * count. So a process that is killed at any point leaves the state before its change or after it.
 *
 * When most of the log is out of date, the values that are left are written once more, into the free
 * part in front of the log or behind its end, and the header switches over to them with the next
 * generation, which makes the other processes read from `start` again. The file therefore never has
 * more than about six times the bytes of its values (and 2 MiB). Punching holes instead would need
 * no free part, but not every file system can.
 *
 * Nothing here locks, and nothing is written for a power failure, which ends the job. A host that crashes while
 * it writes to a shared file system may leave half a change; the checksums, which depend on the nonce
 * and the offset, find it. The file may hold anything: all that is read is checked. */
#ifndef TD_STORE_FILE_LOG_H
#define TD_STORE_FILE_LOG_H

#include "store/kv.h"

struct td__file_layout {
    uint64_t nonce;      /* made anew when the file is emptied: one job, one nonce */
    uint64_t generation; /* counts the times that the log was moved */
    uint64_t start;
    uint64_t end;
};

struct td__file_log {
    int fd;
    const char *path;            /* for messages */
    struct td__kv kv;            /* what the records up to seen.end say */
    struct td__file_layout seen; /* generation 0: nothing was read yet */
    uint64_t compact_at;         /* a log longer than this may be mostly out of date */
};

enum td__file_change {
    TD__FILE_SET = 1,
    TD__FILE_APPEND,
    TD__FILE_DELETE, /* has an empty value */
};

/** Empties the file for a new job. The file must be empty or a store's: any other is TD_ERR_INVALID
 *  and stays as it is. No other process may have it open. */
td_status td__file_log_reset(struct td__file_log *log);

/** Brings log->kv up to date; log->seen.nonce is 0 at the first call. The file is locked, at least
 *  against changes, from this call to the end of the caller's work with log->kv. */
td_status td__file_log_refresh(struct td__file_log *log);

/** Adds a change to `records`, which is empty or came from here since the last refresh. */
void td__file_log_put(const struct td__file_log *log, struct td__buffer *records,
                      enum td__file_change change, struct td__span key, struct td__span value);

/** Publishes `records`, all of them or, on failure, none, and frees them. The caller has made the
 *  same changes to log->kv. */
td_status td__file_log_commit(struct td__file_log *log, struct td__buffer *records);

/** Drops log->kv, so that the next refresh reads all of it again. For when the caller has changed
 *  it and will not commit; a failure of refresh or commit does it by itself. */
void td__file_log_forget(struct td__file_log *log);

#endif
