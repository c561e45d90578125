/* Steps of optimizers in the backward pass of td_ddp(): the parameters of a bucket are stepped when it is reduced, and
 * its memory is freed, while the pass computes the gradients of other buckets.
 *
 * All members of a full bucket have their final gradients, so that no node of the pass uses these parameters any more.
 * Nothing waits for a bucket before the end of the pass: whenever a gradient is accumulated, the buckets that are reduced
 * by then are stepped. A bucket with parameters that this rank does not use is stepped at the end, when the ranks know
 * whether another one does; so are all buckets of a communication hook. */
#include "parallel/ddp.h"

#include "base/fail.h"
#include "parallel/in_backward.h"

#include <stdlib.h>

void td__ddp_set_stepper(struct td__ddp *ddp, int number, struct td__in_backward *stepper,
                         int index)
{
    struct td__ddp_parameter *parameter = &ddp->parameters[number];
    ddp->stepped_count += (stepper != NULL) - (parameter->stepper != NULL);
    ddp->buckets.lazy = ddp->stepped_count > 0;
    parameter->stepper = stepper;
    parameter->step_index = index;
}

/* One step for all members that an optimizer has. */
static td_status step_bucket(struct td_bucket *bucket, void *arg)
{
    struct td__ddp *ddp = arg;
    int *indices = calloc((size_t)bucket->member_count, sizeof *indices);
    bool *done = calloc((size_t)bucket->member_count, sizeof *done);
    td_status status = indices && done ? TD_OK : td__fail_nomem("td_ddp");
    for (int first = 0; first < bucket->member_count && !status; first++) {
        struct td__in_backward *stepper = ddp->parameters[bucket->members[first]].stepper;
        int count = 0;
        for (int i = first; i < bucket->member_count; i++) {
            const struct td__ddp_parameter *parameter = &ddp->parameters[bucket->members[i]];
            if (done[i] || !stepper || parameter->stepper != stepper)
                continue;
            done[i] = true;
            if (!ddp->used || ddp->used[parameter->number])
                indices[count++] = parameter->step_index;
        }
        if (count)
            status = td__in_backward_step(stepper, indices, count);
    }
    free(indices);
    free(done);
    if (!status)
        td__bucket_drop(bucket);
    return status;
}

/* Whether it is known for each member that a rank has used it. */
static bool all_used(const struct td__ddp *ddp, const struct td_bucket *bucket)
{
    for (int i = 0; ddp->used && i < bucket->member_count; i++)
        if (ddp->parameters[bucket->members[i]].unused)
            return false;
    return true;
}

td_status td__ddp_step_reduced(struct td__ddp *ddp)
{
    if (ddp->context || ddp->place || atomic_exchange(&ddp->stepping, true))
        return TD_OK; /* another thread does it */
    td_status status = TD_OK;
    struct td_bucket *next = td__buckets_next(&ddp->buckets);
    while (next && !status && all_used(ddp, next)) {
        struct td_bucket *reduced;
        status = td__buckets_finish_next(&ddp->buckets, &reduced);
        if (status || !reduced)
            break;
        status = step_bucket(reduced, ddp);
        next = td__buckets_next(&ddp->buckets);
    }
    atomic_store(&ddp->stepping, false);
    return status;
}

td_status td__ddp_finish_with_steps(struct td__ddp *ddp)
{
    struct td__buckets *buckets = &ddp->buckets;
    if (!ddp->used)
        return td__buckets_finish(buckets, step_bucket, ddp);
    int from = buckets->finished;
    TD_TRY(td__buckets_finish(buckets, NULL, NULL));
    TD_TRY(td__ddp_restore_unused(ddp));
    for (int b = from; b < buckets->count; b++)
        TD_TRY(step_bucket(&buckets->buckets[b], ddp));
    return TD_OK;
}
