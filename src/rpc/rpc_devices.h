/* Tensors of accelerators in messages: the names of their devices, and how they get there. Host memory is sent, and a
 * tensor that arrives is copied to its device before the program sees it. */
#ifndef TD_RPC_RPC_DEVICES_H
#define TD_RPC_RPC_DEVICES_H

#include "tensor/tensor_internal.h"

#include <tandem/rpc.h>

struct td__rpc_agent;

enum { TD__DEVICE_NAME = sizeof((td_device *)0)->name - 1 }; /* characters */

/** Checks td_rpc_options.device_maps, and copies them. */
td_status td__device_maps_copy(struct td__rpc_agent *agent, const td_rpc_device_map *maps);

/** The name under which a tensor of `device` is sent to the worker `to`; NULL: as one of the host. `request`: this
 *  worker's maps count. */
const char *td__device_name_for(const struct td__rpc_agent *agent, int to, const td_device *device,
                                bool request);

/** Whether bytes from outside can be a name: their number, and each character. */
bool td__device_name_is_valid(const char *name, size_t size);

/** Replaces a tensor of the host by a copy on the device of a name in a message of the worker `from`; `reply`: this
 *  worker's maps count. Complete on return. TD_ERR_INVALID, with the name and both workers, where there is no such
 *  device. */
td_status td__device_arrive(struct td__rpc_agent *agent, int from, const char *name, bool reply,
                            td_tensor **tensor);

/** The tensor on an open device, complete; itself, or a copy, with one reference. NULL on failure. */
td_tensor *td__device_move(struct td__rpc_agent *agent, td_device *device, td_tensor *tensor);

void td__devices_close(struct td__rpc_agent *agent);

#endif
