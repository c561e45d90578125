/* What a process holds: descriptors, threads, memory. For tests that look for leaks. */
#ifndef TANDEM_TESTS_PROCESS_COUNTS_H
#define TANDEM_TESTS_PROCESS_COUNTS_H

#include <stddef.h>

struct counts {
    int descriptors;
    int threads;
    size_t heap;     /* bytes that malloc() has given out */
    size_t resident; /* bytes of the process in memory */
};

struct counts counts_now(void);

/** The entries of a directory, without those that begin with a dot. */
int count_entries(const char *path);

#endif
