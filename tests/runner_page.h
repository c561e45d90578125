/* What the runner shares with the ranks of a test: one page, a memfd that each of them maps. */
#ifndef TANDEM_TESTS_RUNNER_PAGE_H
#define TANDEM_TESTS_RUNNER_PAGE_H

#include "runner.h"

#include <stdatomic.h>

enum { TD_TEST_MAX_RANKS = 64, TD_TEST_EXIT_FAILED = 1, TD_TEST_EXIT_SKIPPED = 77 };

/* The variable with the number of its fd. */
#define TD_TEST_PAGE_VARIABLE "TD_TEST_PAGE"
#define TD_TEST_DIRECTORY_VARIABLE "TD_TEST_DIRECTORY"
#define TD_TEST_LONG_VARIABLE "TD_TEST_LONG"     /* set by --long */
#define TD_TEST_DEVICE_VARIABLE "TD_TEST_DEVICE" /* with the name of --device */

struct td_test_page {
    atomic_int arrived; /* at barriers */
    struct {
        atomic_int pid;     /* 0 before its start, -1 after its end */
        atomic_flag said;   /* claimed by the first one to write `message` */
        char message[4096]; /* the check that failed, or the reason of a skip */
    } ranks[TD_TEST_MAX_RANKS];
};

/** Runs the test in this process, which is a rank of it. Returns its exit code. */
int td_test_run_rank(const struct td_test *test);

#endif
