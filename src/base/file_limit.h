/* Files that grow.
 *
 * A process that extends a file beyond RLIMIT_FSIZE (ulimit -f) gets SIGXFSZ, which ends the process, before
 * EFBIG. Shared memory counts as a file, too. These are the system calls with the signal blocked, so that they
 * return EFBIG; td__errno_text() names the limit. */
#ifndef TD_BASE_FILE_LIMIT_H
#define TD_BASE_FILE_LIMIT_H

#include <sys/types.h>

ssize_t td__file_write(int fd, const void *data, size_t size);

/** Writes all bytes, and waits where `fd` takes none for the moment. 0, or an errno. */
int td__file_write_all(int fd, const void *data, size_t size);

ssize_t td__file_pwrite(int fd, const void *data, size_t size, off_t at);
int td__file_truncate(int fd, off_t size);

/** Returns an errno, as posix_fallocate() does. */
int td__file_allocate(int fd, off_t size);

#endif
