/* The equal stages of bench_pipeline. */
#ifndef TD_BENCH_PIPELINE_STAGES_H
#define TD_BENCH_PIPELINE_STAGES_H

#include <tandem/tandem.h>

/** Square layers with tanh in between, on `samples` rows of `width` elements. The weights of one layer stay in the L2 cache
 *  of a core if width * width * 4 bytes do. */
td_module *bench_matrix_stage(int width, int layers);

/** A stage that returns its input, and whose passes last as long as the clock says: spinning, `forward_us` microseconds, and
 *  twice that backward. Its messages are those of the other stage. */
td_module *bench_clock_stage(int width, int forward_us);

#endif
