/* Uneven inputs: ranks that have run out of input shadow the collectives of the others.
 *
 *     rank 0    turn  pass   turn  pass   turn  pass    turn
 *     rank 1    turn  pass   turn  zeros  turn  zeros   turn      joined after one pass
 *     active    2            2 -> 1       1             0: the model of rank 0 becomes everybody's
 *
 * A turn is one small all-gather before each forward: each rank says whether it still has input, and
 * what its forward is going to do. One that has joined learns from it what to shadow: the broadcast of
 * the buffers, the making of new buckets, the buckets themselves (with zeros, hooks included) and the
 * map of used parameters. It is the same code that the others run, so that the order of calls cannot
 * differ. Buffers, and the order for new buckets, come from the first rank that is still active. */
#include "parallel/ddp.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "tensor/kernels.h"

#include <stdlib.h>
#include <string.h>

/* What a rank says in its turn. */
enum {
    ACTIVE = 1,
    SYNC = 2,     /* gradients of this pass are averaged */
    RECORDS = 4,  /* a backward pass follows */
    OLD = 8,      /* buffers are to be broadcast */
    REBUILD = 16, /* buckets are to be made anew */
    DIVIDE = 32,  /* these two: the options, which must be the same everywhere */
    THROW = 64,
};

struct td__ddp_join {
    td_ddp_join_options options;
    int size;
    int32_t flags;     /* what the active ranks do in this turn; 0: all have joined */
    int64_t turns;     /* in which somebody was active */
    td_status failure; /* ended early: all further calls fail so */
    char reason[256];  /* its sentence */
    int32_t said[];    /* by each rank */
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

/* The first rank whose answer to `mask` is (or is not) the one of rank `other`; -1: none. */
static int find_different(const struct td__ddp_join *join, int other, int32_t mask,
                          bool active_only)
{
    for (int r = 0; r < join->size; r++)
        if ((!active_only || (join->said[r] & ACTIVE)) &&
            (join->said[r] & mask) != (join->said[other] & mask))
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
    other = find_different(join, first_active, SYNC | RECORDS, true);
    if (other >= 0)
        return td_fail(TD_ERR_MISMATCH,
                       "td_ddp: rank %d and rank %d do not do the same in this forward: one "
                       "synchronises or records, the other does not",
                       global_rank(ddp, first_active), global_rank(ddp, other));
    if (!join->options.throw_on_early_termination)
        return TD_OK;
    for (int r = 0; r < join->size; r++)
        if (!(join->said[r] & ACTIVE))
            return td_fail(TD_ERR_STATE,
                           "td_ddp: rank %d ran out of input after %lld forwards, while rank %d "
                           "has more; the options of td_ddp_join_begin() ask to stop then",
                           global_rank(ddp, r), (long long)join->turns,
                           global_rank(ddp, first_active));
    return TD_OK;
}

/* Says `mine`, hears the others, and takes over what the active ranks do. */
static td_status take_turn(struct td__ddp *ddp, int32_t mine)
{
    struct td__ddp_join *join = ddp->join;
    if (join->failure)
        return td_fail(join->failure, "%s", join->reason);
    mine |= join->options.divide_by_active ? DIVIDE : 0;
    mine |= join->options.throw_on_early_termination ? THROW : 0;
    td_status status = td_group_all_gather(join->said, &mine, 1, TD_I32, ddp->group, NULL);
    if (status)
        return stop(ddp, status);
    int active = 0, first = -1;
    join->flags = 0;
    for (int r = 0; r < join->size; r++) {
        if (!(join->said[r] & ACTIVE))
            continue;
        first = first < 0 ? r : first;
        join->flags |= join->said[r];
        active++;
    }
    status = check_agreement(ddp, first);
    if (status)
        return stop(ddp, status);
    if (!active)
        return TD_OK;
    join->turns++;
    ddp->source = first;
    ddp->buffers_are_old = join->flags & OLD;
    ddp->rebuild = join->flags & REBUILD;
    ddp->buckets.scale = join->options.divide_by_active && active < join->size
                             ? (double)join->size / active
                             : 0;
    return TD_OK;
}

td_status td__ddp_join_turn(struct td__ddp *ddp, bool records)
{
    int32_t mine = ACTIVE;
    mine |= ddp->sync ? SYNC : 0;
    mine |= records ? RECORDS : 0;
    mine |= ddp->buffers_are_old ? OLD : 0;
    mine |= ddp->rebuild ? REBUILD : 0;
    return take_turn(ddp, mine);
}

/* Makes the calls of a pass with a gradient of zeros. */
static td_status shadow_backward(struct td__ddp *ddp)
{
    struct td__buckets *buckets = &ddp->buckets;
    for (int b = 0; b < buckets->count; b++) {
        td_tensor *buffer = buckets->buckets[b].buffer;
        TD_TRY(td__kernels_of(buffer)->fill(buffer, 0));
    }
    for (int i = ddp->count - 1; i >= 0; i--)
        TD_TRY(td__buckets_ready(buckets, i));
    if (ddp->used) {
        memset(ddp->used, 0, (size_t)ddp->count * sizeof *ddp->used);
        TD_TRY(td__ddp_agree_on_used(ddp));
    }
    TD_TRY(td__buckets_finish(buckets));
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
                       "td_ddp_join_begin: it was called before; td_ddp_join_end() comes first");
    int size = td_get_world_size(ddp->group);
    if (size < 1)
        return td_fail(TD_ERR_STATE, "td_ddp_join_begin: there is no process group any more");
    ddp->join = calloc(1, sizeof *ddp->join + (size_t)size * sizeof ddp->join->said[0]);
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
        return td_fail(TD_ERR_STATE, "td_ddp_join_end: td_ddp_join_begin() comes first");
    ddp->expecting = false;
    td_status status = take_turn(ddp, 0);
    while (!status && join->flags) {
        status = shadow(ddp);
        if (!status)
            status = take_turn(ddp, 0);
    }
    /* The source is one of those that were active in the last turn: nobody has seen more data. Where
     * nobody was, it is the first rank. */
    if (!status)
        status = td__ddp_synchronise(ddp);
    ddp->source = 0;
    ddp->buckets.scale = 0;
    ddp->join = NULL;
    free(join);
    return status;
}
