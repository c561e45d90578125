/* Launches of kernels that do nothing, by CUDA's driver and without the library: what an operator costs the host at least. */
#ifndef BARE_LAUNCHES_H
#define BARE_LAUNCHES_H

#include <tandem/tandem.h>

struct bare_driver;

/** Loads the driver that the plug-in "cuda" uses (TANDEM_CUDA_SO, else libcuda.so.1), and kernels for its first GPU; NULL
 *  where that does not work, and *why says so. */
struct bare_driver *bare_open(const char **why);

/** One call each, of the driver that `arg` points to: a kernel without arguments, one with as many bytes as an addition's, the
 *  same by a handle that belongs to no context; and the calls that read and set the thread's context. */
td_status bare_launch(void *arg);
td_status bare_launch_args(void *arg);
td_status bare_launch_handle(void *arg);
td_status bare_get_context(void *arg);
td_status bare_set_context(void *arg);

#endif
