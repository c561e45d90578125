/* Passes in contexts of distributed autograd.
 *
 * The gradients of such a pass are in its context, the place, and never in the leaves:
 *
 *     accumulated    the context's gradient is copied into its bucket; a full bucket starts
 *     end            the ranks agree that the pass has succeeded on all of them; each average is copied back
 *
 * Other workers take part in the pass, so that it can fail on some ranks and not on others: a parameter server that
 * has ended, a timeout, a context that has ended early. The ranks must then still make the same calls in the same
 * order, or the next pass would add gradients of different steps. So a rank whose pass fails starts the remaining
 * calls with zeros, and its flag in the agreement fails the pass on all ranks. Nothing waits for these calls but the
 * next forward, which settles them.
 *
 * A module has one set of buckets: one context at a time uses it. A forward in a second context takes the module over,
 * and the backward pass of the first one fails. So each context in which a synchronised forward has run makes the calls
 * of one backward pass for it, on every rank: at the end of the context if the pass has not run before. */
#include "parallel/ddp.h"

#include "base/clock.h"
#include "base/fail.h"
#include "group/process_group.h"
#include "group/work.h"

/* ---- Failed passes ----------------------------------------------------------------------------- */

/* Gradients of the leaves that are views of the buckets get memory of their own: the pass overwrites the buckets. */
static td_status detach_leaves(struct td__ddp *ddp)
{
    for (int i = 0; i < ddp->count; i++) {
        struct td__ddp_parameter *parameter = &ddp->parameters[i];
        td_tensor *view = ddp->buckets.gradients[i].view;
        if (!view || td_tensor_grad(parameter->tensor) != view)
            continue;
        bool kept = parameter->unused && parameter->before;
        td_tensor *own = kept ? td_tensor_retain(parameter->before) : td__clone(view);
        td_status status = own ? td_tensor_set_grad(parameter->tensor, own) : TD_ERR_NOMEM;
        td_tensor_release(own);
        TD_TRY(status);
    }
    return TD_OK;
}

static td_status start_agreement(struct td__ddp *ddp, bool failed, td_work **work)
{
    size_t count = 1 + (ddp->used ? (size_t)ddp->count : 0);
    ddp->agreement[0] = failed ? 1 + td_get_rank(ddp->group) : 0;
    return td_group_all_reduce(ddp->agreement, ddp->agreement, count, TD_I32, TD_MAX, ddp->group,
                               work);
}

/* Starts the calls that are missing. After a failure of one of them the group is broken, on all ranks. */
static td_status start_rest(struct td__ddp *ddp)
{
    struct td__buckets *buckets = &ddp->buckets;
    for (int i = ddp->count - 1; i >= 0; i--) {
        td_tensor *view = td__buckets_view(buckets, i);
        if (!view)
            return td__error_status();
        if (!buckets->gradients[i].ready)
            TD_TRY(td__kernels_of(view)->fill(view, 0));
        TD_TRY(td__buckets_ready(buckets, i));
    }
    return start_agreement(ddp, true, &ddp->agreeing);
}

/* With the lock held. */
static void abandon(struct td__ddp *ddp, int64_t timeout_ms)
{
    struct td__error error;
    if (!ddp->expecting)
        return;
    td__error_save(&error);
    if (!ddp->ending)
        detach_leaves(ddp);
    int64_t before = td__swap_call_timeout(timeout_ms);
    ddp->expecting = false;
    ddp->unsettled = !start_rest(ddp);
    if (!ddp->unsettled) /* other ranks would wait, and then take part in another pass of this one */
        td_group_abort(ddp->group);
    td__swap_call_timeout(before);
    td__error_restore(&error);
}

void td__ddp_abandon(struct td__ddp *ddp)
{
    pthread_mutex_lock(&ddp->lock);
    abandon(ddp, ddp->place ? ddp->place->timeout_ms : 0);
    ddp->ending = false;
    ddp->place = NULL;
    pthread_mutex_unlock(&ddp->lock);
}

/* ---- All modules ------------------------------------------------------------------------------- */

static pthread_mutex_t list_lock =
    PTHREAD_MUTEX_INITIALIZER; /* taken before the locks of modules */
static struct td__ddp *all;

/* A pass that runs through a module ends by itself, at its end or in drop_pass(). */
static void on_context_lost(uint64_t context, int64_t timeout_ms)
{
    pthread_mutex_lock(&list_lock);
    for (struct td__ddp *ddp = all; ddp; ddp = ddp->next) {
        pthread_mutex_lock(&ddp->lock);
        if (ddp->context == context && !ddp->place && !ddp->ending)
            abandon(ddp, timeout_ms);
        pthread_mutex_unlock(&ddp->lock);
    }
    pthread_mutex_unlock(&list_lock);
}

void td__ddp_list(struct td__ddp *ddp)
{
    pthread_mutex_lock(&list_lock);
    ddp->next = all;
    all = ddp;
    pthread_mutex_unlock(&list_lock);
    atomic_store(&td__on_context_lost, on_context_lost);
}

void td__ddp_unlist(struct td__ddp *ddp)
{
    pthread_mutex_lock(&list_lock);
    for (struct td__ddp **at = &all; *at; at = &(*at)->next)
        if (*at == ddp) {
            *at = ddp->next;
            break;
        }
    pthread_mutex_unlock(&list_lock);
}

td_status td__ddp_settle(struct td__ddp *ddp)
{
    if (!ddp->unsettled)
        return TD_OK;
    ddp->unsettled = false;
    td_status status = td__buckets_finish(&ddp->buckets, NULL, NULL), agreed = TD_OK;
    if (ddp->agreeing) {
        td__work_finish(ddp->agreeing);
        agreed = td_work_status(ddp->agreeing);
        td_work_release(ddp->agreeing);
        ddp->agreeing = NULL;
    }
    return status ? status : agreed;
}

/* ---- The beginning of a pass ------------------------------------------------------------------- */

td_status td__ddp_enter_context(struct td__ddp *ddp)
{
    pthread_mutex_lock(&ddp->lock);
    bool runs = ddp->place;
    if (!runs) {
        if (ddp->context && ddp->context != td__current_context)
            abandon(ddp, 0);
        ddp->context = td__current_context;
        ddp->expecting = false;
    }
    pthread_mutex_unlock(&ddp->lock);
    return runs
               ? td_fail(
                     TD_ERR_STATE,
                     "td_ddp: a backward pass of another context of distributed autograd is running through the "
                     "module; call it when that is over")
               : TD_OK;
}

/* With the lock held. */
static td_status enter(struct td__ddp_parameter *parameter, const struct td__grad_place *place,
                       bool *reduce)
{
    struct td__ddp *ddp = parameter->ddp;
    *reduce = ddp->expecting;
    if (ddp->place == place)
        return TD_OK;
    if (!ddp->expecting && ddp->recorded_locally)
        return TD_OK;
    if (ddp->context != place->context || ddp->place)
        return td_fail(
            TD_ERR_STATE,
            "td_ddp: the gradient of parameter \"%s\" cannot be averaged in this context: %s",
            parameter->name,
            ddp->context
                ? "a forward of the module in another context came after its own; use the module "
                  "in one context at a time"
                : "the last forward of the module ran outside of it; call td_forward() inside");
    if (!ddp->expecting)
        return td_fail(
            TD_ERR_STATE,
            "td_ddp: the gradient of parameter \"%s\" cannot be averaged: there was a backward pass since "
            "the last forward of the module",
            parameter->name);
    TD_TRY(detach_leaves(ddp));
    ddp->place = place;
    return TD_OK;
}

td_status td__ddp_enter_place(struct td__ddp_parameter *parameter,
                              const struct td__grad_place *place, bool *reduce)
{
    pthread_mutex_lock(&parameter->ddp->lock);
    td_status status = enter(parameter, place, reduce);
    pthread_mutex_unlock(&parameter->ddp->lock);
    return status;
}

td_status td__ddp_check_deadline(const struct td__ddp *ddp)
{
    if (!ddp->place || !td__deadline_passed(ddp->place->deadline))
        return TD_OK;
    return td_fail(TD_ERR_TIMEOUT, "td_ddp: the backward pass has not come to its end in time");
}

int64_t td__ddp_limit_calls(const struct td__ddp *ddp)
{
    int64_t before = td__swap_call_timeout(0);
    int64_t left = ddp->place ? (ddp->place->deadline - td__now_ns()) / 1000000 : 0;
    if (!ddp->place || ddp->place->deadline == TD__NEVER || (before && before < left))
        left = before;
    else if (left < 1)
        left = 1;
    td__swap_call_timeout(left);
    return before;
}

/* ---- The end of a pass ------------------------------------------------------------------------- */

td_status td__ddp_agree(struct td__ddp *ddp)
{
    TD_TRY(start_agreement(ddp, false, NULL));
    if (!ddp->agreement[0])
        return TD_OK;
    ddp->unsettled = true;
    return td_fail(
        TD_ERR_ABORTED,
        "td_ddp: the backward pass has failed on rank %d, so the gradients of this pass are not averaged",
        td_get_global_rank(ddp->group, ddp->agreement[0] - 1));
}

td_status td__ddp_deliver(struct td__ddp *ddp)
{
    const struct td__grad_place *place = ddp->place;
    for (int i = 0; i < ddp->count; i++) {
        struct td__ddp_parameter *parameter = &ddp->parameters[i];
        if (!ddp->used || ddp->used[i])
            TD_TRY(place->replace(place->arg, parameter->tensor, ddp->buckets.gradients[i].view));
        td_tensor_release(parameter->before);
        parameter->before = NULL;
    }
    return TD_OK;
}
