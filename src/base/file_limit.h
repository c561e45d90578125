/* Files that grow.
 *
 * A process that makes a file longer than RLIMIT_FSIZE (ulimit -f) allows gets SIGXFSZ, which ends the process, and only
 * then EFBIG. Memory that processes share is such a file as well. These are the system's calls with the signal
 * held back, so that it is an error like any other; td__errno_text() names the limit. */
#ifndef TD_BASE_FILE_LIMIT_H
#define TD_BASE_FILE_LIMIT_H

#include <sys/types.h>

ssize_t td__file_write(int fd, const void *data, size_t size);
ssize_t td__file_pwrite(int fd, const void *data, size_t size, off_t at);
int td__file_truncate(int fd, off_t size);

/** Returns an errno, as posix_fallocate() does. */
int td__file_allocate(int fd, off_t size);

#endif
