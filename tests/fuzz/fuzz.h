/* What every fuzz target defines. libFuzzer calls it with made-up inputs (scripts/fuzz), and
 * replay_main.c with the seeds of corpus/<name>/. */
#ifndef TANDEM_TESTS_FUZZ_H
#define TANDEM_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/** Handles one input, which may be anything. Returns 0; a finding is a crash (abort() included). */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/** The path of a file in memory with these bytes, until the next call. */
static inline const char *fuzz_file(const void *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("fuzz", 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (fd < 0 || ftruncate(fd, 0) || pwrite(fd, data, size, 0) != (ssize_t)size)
        abort();
    return path;
}

#endif
