/* Streams and events of the emulated libcuda, and the recording of what is enqueued on a stream as a graph. */
#ifndef EMULATED_GRAPH_H
#define EMULATED_GRAPH_H

#include <cuda.h>

#include <stdbool.h>
#include <stddef.h>

/** Whether a stream is being captured. */
bool emulated_is_captured(CUstream stream);

/** Whether any is. */
bool emulated_captures(void);

/** Runs run(payload) at each launch of the graph, after what was recorded before; `payload` is copied. */
void emulated_record(CUstream stream, void (*run)(void *payload), const void *payload,
                     size_t bytes);

/** The same as the only node of a graph that cuGraphCreate() has made. Returns the copy, which may be changed. */
void *emulated_add_node(CUgraph graph, void (*run)(void *payload), const void *payload,
                        size_t bytes);

/** A call that is not allowed while a stream is captured: the capture fails at its end. Returns `result`. */
CUresult emulated_invalidate(CUstream stream, CUresult result);

#endif
