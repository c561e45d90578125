/* Constants in captured functions. */
#ifndef TD_DEVICE_DEVICE_GRAPH_H
#define TD_DEVICE_DEVICE_GRAPH_H

#include "device/device_internal.h"

/** While a function is captured on the thread's current stream of `device`: a stream that is not captured, for copies from
 *  the host of what is the same in each launch. They run once, before the first launch. NULL outside of a capture, and,
 *  with the last error set, without memory: then the copy is refused. */
td_stream *td__constants_stream(td_device *device);

#endif
