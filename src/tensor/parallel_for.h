/* A loop that the threads of a pool share.
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
 * Results must have the same bits for any number of threads. So nothing may depend on where a range
 * begins or ends: each index is computed by itself, or the indices are those of blocks of a fixed
 * size, as above, and what the blocks give is put together afterwards in their order.
 *
 * The pool's threads are started by the first loop that is long enough, and at most
 * td_get_num_threads() - 1 of them take part in a loop; the caller is the last one. They wait for the
 * next loop awake for some microseconds, then asleep; they take no signals. A child of fork() starts
 * its own. They end at exit() and before the library is unloaded. */
#ifndef TD_TENSOR_PARALLEL_FOR_H
#define TD_TENSOR_PARALLEL_FOR_H

#include <stdint.h>

/* Elements that are worth a grain, where the work of one is a few instructions. */
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
 * The calls come at the same time, from this thread and from others. It is one call in this thread
 * where there is only one grain, where one thread is asked for, inside another such loop, and while
 * another thread of the program runs one: it never waits for anything but its own work. `fn` must not
 * fail in a way that td_last_error() should tell, as that belongs to a thread; it leaves a status in
 * what `arg` points to, and the caller writes the message.
 */
void td__parallel_for(int64_t count, int64_t grain, td__range_fn *fn, void *arg);

#endif
