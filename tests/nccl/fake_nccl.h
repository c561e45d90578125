/* A library with the ABI of NCCL, without a GPU: its ranks are processes of one host, its streams those of the toy
 * accelerator, and it moves data through a file that all ranks have mapped. For tests of plugins/nccl.
 *
 *     FAKE_NCCL_DIR        where these files are; required
 *     FAKE_NCCL_VERSION    what ncclGetVersion() returns; 22809
 *     FAKE_NCCL_SLOW       how often ncclCommGetAsyncError() says ncclInProgress after each group call; 0
 *     FAKE_NCCL_JITTER     each call, and each operation on a stream, first waits up to so many microseconds; 0
 *
 * It behaves as NCCL does where that is unpleasant: an operation waits on the stream until its ranks have called it, or
 * for ever; ranks that call different operations wait for ever; different counts end with a wrong result; a call on a
 * communicator that is in progress, or freed, is an error of the caller; ncclCommAbort() waits for the streams, also of
 * other communicators. */
#ifndef TANDEM_TESTS_FAKE_NCCL_H
#define TANDEM_TESTS_FAKE_NCCL_H

#include <tandem/base.h>

/** What the library needs of the device. The program sets it before the first communicator. */
struct fake_device {
    /** Keeps an address of the device for a job; the host's address when the stream gets there; frees it. */
    void *(*hold)(const void *data, size_t bytes);
    void *(*reach)(void *held);
    void (*drop)(void *held);

    /** Runs `run` on a stream, and then `drop`. */
    td_status (*enqueue)(void *stream, td_status (*run)(void *), void (*drop)(void *), void *arg);
};

/* Symbols of the library, for dlsym(). */
typedef void fake_use_fn(const struct fake_device *device); /* "fake_nccl_use" */
typedef void
fake_fail_fn(int result);       /* "fake_nccl_fail": reported by all communicators from now on */
typedef int fake_live_fn(void); /* "fake_nccl_live": communicators that were not freed */

#endif
