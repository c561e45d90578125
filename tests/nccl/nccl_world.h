/* Worlds of the backend nccl on the toy accelerator, over the fake NCCL. */
#ifndef TANDEM_TESTS_NCCL_WORLD_H
#define TANDEM_TESTS_NCCL_WORLD_H

#include "fake_nccl.h"
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

/** Which fake: NULL is the whole one; "old" has no function that NCCL 2.14 did not have, "blocking" cannot be used. */
void nccl_choose(const char *variant);

/** Whether the tests run with NCCL on a GPU: scripts/test-nccl. nccl_needs_fake() skips the test then. */
bool nccl_is_real(void);
void nccl_needs_fake(void);

/** The device, also for the fake NCCL; with the plug-in. */
void nccl_prepare(void);
void nccl_load(void);

/** nccl_load(), and the world; ends it, and checks that no communicator is left. */
void nccl_begin(int64_t timeout_ms);
void nccl_end(void);

/** toy:0, or the GPU. */
td_device *nccl_device(void);

/** An element of a tensor, and the sum of all. */
double nccl_item(td_tensor *x, int64_t index);
double nccl_sum(td_tensor *x);

/** "cpu:native,toy:nccl". */
const char *nccl_backends(void);

/** Functions of the fake, see fake_nccl.h; 0 communicators of the real one. */
void nccl_fake_fail(int result);
int nccl_fake_live(void);

#endif
