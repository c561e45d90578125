/* The memory of each rank over a step of training, by kind: measured at the beginning and end of the passes of all modules,
 * and drawn beside that of other runs. */
#ifndef TANDEM_EXAMPLES_MEMORY_CURVE_H
#define TANDEM_EXAMPLES_MEMORY_CURVE_H

#include <tandem/tandem.h>

struct memory_curve;

/** Begins to measure: the next step should not be the first one, which also sets up what the others use. `model` may be of
 *  td_fsdp(). NULL on failure. */
struct memory_curve *memory_curve_begin(td_module *model, td_optimizer *optimizer,
                                        td_device *device);

/** The step is in this part from here on. A curve of NULL does nothing. */
enum memory_part { MEMORY_FORWARD, MEMORY_BACKWARD, MEMORY_STEP };
void memory_curve_mark(struct memory_curve *curve, enum memory_part part);

/** Ends it, and frees it. Collective if there is a process group: rank 0 writes directory/memory-<name>.csv, and draws
 *  directory/memory.svg, of all files of this kind there: those of other runs with the same model are beside it. */
td_status memory_curve_end(struct memory_curve *curve, const char *directory, const char *name);

#endif
