/* The elements of tensors on any device, for tests that run on the device of --device (runner.h). On the host these are
 * the elements themselves; elsewhere copies. */
#ifndef TANDEM_TESTS_HOST_DATA_H
#define TANDEM_TESTS_HOST_DATA_H

#include <tandem/tensor.h>

/** The elements in the order of the indices, to be read. Where the tensor is contiguous on the host, its own memory;
 *  else a copy, which stays for 64 more calls. */
const void *host_data(const td_tensor *tensor);

/** Sets all elements, which are `data` in the order of the indices. */
void set_host_data(td_tensor *tensor, const void *data);

/** Normal numbers on the device of the test, drawn on the host: no other generator has those of PyTorch. */
td_tensor *host_randn(const int64_t *shape, int ndim, td_dtype dtype);

#endif
