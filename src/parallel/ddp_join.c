/* Uneven inputs: ranks that have run out of input shadow the collectives of the others.
 *
 *     rank 0    round  pass   round  pass   round  pass    round
 *     rank 1    round  pass   round  zeros  round  zeros   round      joined after one pass
 *     active    2            2 -> 1       1             0: rank 0 broadcasts its model
 *
 * A round is one small all-gather of flags before each forward: whether a rank still has input, and
 * what its forward will do. A joined rank shadows accordingly: the broadcast of the buffers, the
 * rebuild of the buckets, the buckets themselves (with zeros, hooks included) and the map of used
 * parameters. It runs the same code as the others, so the order of calls cannot differ. Buffers,
 * and the order for new buckets, come from the first active rank. */
#include "parallel/ddp.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>
#include <string.h>

/* The flags of a rank. */
enum {
    ACTIVE = 1,
    SYNC = 2,      /* gradients of this pass are averaged */
    RECORDS = 4,   /* a backward pass follows */
    BROADCAST = 8, /* broadcast the buffers */
    REBUILD = 16,  /* rebuild the buckets */
    CONTEXT = 128, /* the pass is one of a context of distributed autograd */
    DIVIDE = 32,   /* these two: the options, which must be the same on all ranks */
    THROW = 64,
};

struct td__ddp_join {
    td_ddp_join_options options;
    int size;
    int32_t flags;      /* of the active ranks in this round; 0: all have joined */
    int64_t rounds;     /* with an active rank */
    td_status failure;  /* stopped early: all further calls fail with it */
    char reason[256];   /* its text */
    int32_t flags_of[]; /* of each rank */
};

static td_status stop(struct td__ddp *ddp, td_status status)
{
    struct td__ddp_join *join = ddp->join;
    join->failure = status;
    strncpy(join->reason, td__error_text(), sizeof join->reason - 1);
    return status;
}

static int global_rank(const struct td__ddp *ddp, int rank)
{
    return td_get_global_rank(ddp->group, rank);
}

/* The first rank whose flags in `mask` differ from (or equal) those of rank `other`; -1: none. */
static int find_different(const struct td__ddp_join *join, int other, int32_t mask,
                          bool active_only)
{
    for (int r = 0; r < join->size; r++)
        if ((!active_only || (join->flags_of[r] & ACTIVE)) &&
            (join->flags_of[r] & mask) != (join->flags_of[other] & mask))
            return r;
    return -1;
}

static td_status check_agreement(struct td__ddp *ddp, int first_active)
{
    struct td__ddp_join *join = ddp->join;
    int other = find_different(join, 0, DIVIDE | THROW, false);
    if (other >= 0)
        return td_fail(TD_ERR_MISMATCH,
                       "td_ddp_join_begin: rank %d and rank %d passed different options",
                       global_rank(ddp, 0), global_rank(ddp, other));
    if (first_active < 0)
        return TD_OK;
    other = find_different(join, first_active, SYNC | RECORDS | CONTEXT, true);
    if (other >= 0)
        return td_fail(
            TD_ERR_MISMATCH,
            "td_ddp: rank %d and rank %d differ in this forward: one synchronises, "
            "records a graph or is in a context of distributed autograd, the other is not",
            global_rank(ddp, first_active), global_rank(ddp, other));
    if (!join->options.throw_on_early_termination)
        return TD_OK;
    for (int r = 0; r < join->size; r++)
        if (!(join->flags_of[r] & ACTIVE))
            return td_fail(TD_ERR_STATE,
                           "td_ddp: rank %d ran out of input after %lld forwards, while rank %d "
                           "has more; throw_on_early_termination is set",
                           global_rank(ddp, r), (long long)join->rounds,
                           global_rank(ddp, first_active));
    return TD_OK;
}

/* All-gathers the flags, and sets join->flags from those of the active ranks. */
static td_status exchange_flags(struct td__ddp *ddp, int32_t mine)
{
    struct td__ddp_join *join = ddp->join;
    if (join->failure)
        return td_fail(join->failure, "%s", join->reason);
    mine |= join->options.divide_by_active ? DIVIDE : 0;
    mine |= join->options.throw_on_early_termination ? THROW : 0;
    td_status status = td_group_all_gather(join->flags_of, &mine, 1, TD_I32, ddp->group, NULL);
    if (status)
        return stop(ddp, status);
    int active = 0, first = -1;
    join->flags = 0;
    for (int r = 0; r < join->size; r++) {
        if (!(join->flags_of[r] & ACTIVE))
            continue;
        first = first < 0 ? r : first;
        join->flags |= join->flags_of[r];
        active++;
    }
    status = check_agreement(ddp, first);
    if (status)
        return stop(ddp, status);
    if (!active)
        return TD_OK;
    join->rounds++;
    ddp->source = first;
    ddp->buffers_changed = join->flags & BROADCAST;
    ddp->rebuild = join->flags & REBUILD;
    ddp->buckets.scale = join->options.divide_by_active && active < join->size
                             ? (double)join->size / active
                             : 0;
    return TD_OK;
}

td_status td__ddp_join_round(struct td__ddp *ddp, bool records)
{
    int32_t mine = ACTIVE;
    mine |= ddp->sync ? SYNC : 0;
    mine |= records ? RECORDS : 0;
    mine |= ddp->buffers_changed ? BROADCAST : 0;
    mine |= ddp->rebuild ? REBUILD : 0;
    mine |= records && ddp->sync && ddp->context ? CONTEXT : 0;
    return exchange_flags(ddp, mine);
}

static td_status drop(struct td_bucket *bucket, void *arg)
{
    (void)arg;
    td__bucket_drop(bucket);
    return TD_OK;
}

/* Makes the calls of a backward pass with gradients of 0. */
static td_status shadow_backward(struct td__ddp *ddp)
{
    struct td__buckets *buckets = &ddp->buckets;
    for (int b = 0; b < buckets->count; b++) {
        TD_TRY(td__bucket_hold(&buckets->buckets[b]));
        td_tensor *buffer = buckets->buckets[b].buffer;
        TD_TRY(td__kernels_of(buffer)->fill(buffer, 0));
    }
    for (int i = ddp->count - 1; i >= 0; i--)
        TD_TRY(td__buckets_ready(buckets, i));
    if (ddp->used)
        memset(ddp->used, 0, (size_t)ddp->count * sizeof *ddp->used);
    if (ddp->used || (ddp->join->flags & CONTEXT)) {
        td_status status = td__ddp_agree(ddp);
        if (status)
            return ddp->unsettled ? TD_OK
                                  : status; /* the failure of another rank is not one here */
    }
    TD_TRY(td__buckets_finish(buckets, drop, NULL));
    td__ddp_plan_rebuild(ddp);
    return TD_OK;
}

static td_status shadow(struct td__ddp *ddp)
{
    int32_t flags = ddp->join->flags;
    if (!(flags & SYNC))
        return TD_OK;
    TD_TRY(td__ddp_prepare(ddp, flags & RECORDS));
    return (flags & RECORDS) && ddp->count ? shadow_backward(ddp) : TD_OK;
}

td_status td_ddp_join_begin(td_module *module, const td_ddp_join_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    struct td__ddp *ddp = td__ddp_of(module, "td_ddp_join_begin");
    if (!ddp)
        return TD_ERR_INVALID;
    if (ddp->join)
        return td_fail(TD_ERR_STATE,
                       "td_ddp_join_begin: it was called before; call td_ddp_join_end() first");
    int size = td_get_world_size(ddp->group);
    if (size < 1)
        return td_fail(TD_ERR_STATE, "td_ddp_join_begin: the process group was destroyed");
    ddp->join = calloc(1, sizeof *ddp->join + (size_t)size * sizeof ddp->join->flags_of[0]);
    if (!ddp->join)
        return td__fail_nomem("td_ddp_join_begin");
    ddp->join->options = options ? *options : (td_ddp_join_options){0};
    ddp->join->size = size;
    return TD_OK;
}

td_status td_ddp_join_end(td_module *module)
{
    struct td__ddp *ddp = td__ddp_of(module, "td_ddp_join_end");
    if (!ddp)
        return TD_ERR_INVALID;
    struct td__ddp_join *join = ddp->join;
    if (!join)
        return td_fail(TD_ERR_STATE, "td_ddp_join_end: td_ddp_join_begin() was not called");
    ddp->expecting = false;
    td_status status = exchange_flags(ddp, 0);
    while (!status && join->flags) {
        status = shadow(ddp);
        if (!status)
            status = exchange_flags(ddp, 0);
    }
    /* The source is a rank that was active in the last round: none has seen more data. If none was,
     * it is the first rank. */
    if (!status)
        status = td__ddp_synchronise(ddp);
    ddp->source = 0;
    ddp->buckets.scale = 0;
    ddp->join = NULL;
    free(join);
    return status;
}
