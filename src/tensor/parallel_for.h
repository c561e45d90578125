/* A parallel loop over a thread pool.
 *
 *     struct sum_job { const float *x; double *sums; };
 *
 *     static void sum_blocks(void *arg, int64_t begin, int64_t end)
 *     {
 *         struct sum_job *job = arg;
 *         for (int64_t block = begin; block < end; block++)
 *             job->sums[block] = sum_of(job->x + block * BLOCK, BLOCK);
 *     }
 *
 *     td__parallel_for(blocks, 1, sum_blocks, &job);
 *
 * Results must have the same bits for any number of threads. So nothing may depend on where a range begins
 * or ends: each index is computed independently, or the indices are those of blocks of a fixed size, as
 * above, and the results of the blocks are combined afterwards in order.
 *
 * The first loop that is long enough starts the pool's threads; at most td_get_num_threads() - 1 of them and
 * the caller run a loop. They spin for some microseconds for the next loop, then sleep; they block all
 * signals. A forked child starts its own. They end at exit() and before the library is unloaded. */
#ifndef TD_TENSOR_PARALLEL_FOR_H
#define TD_TENSOR_PARALLEL_FOR_H

#include <stdint.h>

/* Elements of a grain, for a few instructions each. */
#define TD__GRAIN 32768

/** The grain of a loop whose indices stand for `elements` elements each. */
static inline int64_t td__grain_of(int64_t elements)
{
    return elements <= 0 ? TD__GRAIN : elements >= TD__GRAIN ? 1 : TD__GRAIN / elements;
}

/** Does the work of the indices `begin` to `end` - 1. */
typedef void td__range_fn(void *arg, int64_t begin, int64_t end);

/**
 * Calls fn(arg, begin, end) for ranges that together are 0 to `count` - 1, each index once, and returns
 * when all calls have. A range begins at a multiple of `grain`, which should be worth 10 microseconds
 * or more, and is not empty.
 *
 * The calls are concurrent, in this thread and in others. It is one call in this thread if there is only one grain,
 * with td_set_num_threads(1), inside another such loop, and while another thread of the program runs one: it never
 * waits for anything but its own work. `fn` must not call td_fail(), as the last error belongs to a thread; it
 * stores a status through `arg`, and the caller writes the error.
 */
void td__parallel_for(int64_t count, int64_t grain, td__range_fn *fn, void *arg);

#endif
