/* Copies of memory of any devices to memory of the host, by a thread, while the devices go on.
 *
 *     the device                staging (pinned)             the host
 *     tensors, behind     ->    stage 0, stage 1,      ->    anywhere
 *     each other                stage 0, …
 *
 * Each device has a stream of its own for them, which begins when the device has run what was enqueued before. While one stage
 * is filled, the thread empties the other one. Memory of the host is just copied. */
#ifndef TD_PARALLEL_FSDP_COPIES_H
#define TD_PARALLEL_FSDP_COPIES_H

#include "device/device_internal.h"

struct td__copies;

/** NULL, with the last error set, without memory. */
struct td__copies *td__copies_create(void);
/** NULL is ignored. Nothing of it runs. */
void td__copies_free(struct td__copies *copies);

/** Forgets what was added. Nothing of it runs. */
void td__copies_clear(struct td__copies *copies);
/** Adds one. Neither memory is freed, and the one of the device does not change, before it was run. */
td_status td__copies_add(struct td__copies *copies, char *to, const struct td__place *from,
                         size_t bytes);
/** What is copied is what there is when the current streams of the devices have run what is enqueued by now. */
td_status td__copies_mark(struct td__copies *copies);
/** Copies. On return nothing is under way any more, also after a failure. By any thread. */
td_status td__copies_run(struct td__copies *copies);
/** Whether some are from accelerators. */
bool td__copies_have_device(const struct td__copies *copies);

#endif
