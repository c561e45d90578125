/* A worker of a round over remote calls: begins, leaves, and looks for what is left of the victim. */
#include "chaos_rpc.h"

#include "rpc/grad_context.h"
#include "rpc/lease.h"

#include <stdio.h>
#include <string.h>

enum { EMPTY_MS = 15000, SHUTDOWN_MS = 20000 };

const char *worker_name(int rank)
{
    static const char *const names[MAX_RANKS] = {"w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"};
    return names[rank];
}

/* ---- Calls ----------------------------------------------------------------------------------- */

const char *call_name(int kind)
{
    static const char *const names[CALL_KINDS] = {"a sum",
                                                  "tensors there and back",
                                                  "a tensor that is changed",
                                                  "a kept tensor",
                                                  "an object",
                                                  "a reference to a tensor",
                                                  "nested calls",
                                                  "an answer by a future",
                                                  "a gradient",
                                                  "a cancelled call",
                                                  "a short timeout",
                                                  "a refused call"};
    return kind >= 0 && kind < CALL_KINDS ? names[kind] : "the last call";
}

static int64_t choose_elements(struct rng *rng)
{
    static const int weights[] = {40, 45, 15};
    switch (choose(rng, weights, 3)) {
    case 0:
        return 1 + (int64_t)draw(rng, 600); /* is copied */
    case 1:
        return 1024 + (int64_t)draw(rng, 20000);
    default:
        return 1 + (int64_t)draw(rng, 1 << 20);
    }
}

/* Calls that the victim takes part in, and that would wait for it. */
static void set_timeout(struct rng *rng, const struct plan *plan, struct remote_call *call)
{
    bool hasty = chance(rng, 10);
    int64_t ms = 20 + (int64_t)draw(rng, 200);
    bool stops = plan->fault == FAULT_STOP && call->through >> plan->victim & 1;
    if (stops && call->kind == CALL_GRADIENT)
        call->kind = CALL_ADD;
    if (call->kind == CALL_SHORT)
        call->timeout_ms = NAP_TIMEOUT_MS;
    else if (stops)
        call->timeout_ms = plan->short_ms * slowness();
    else if (hasty && call->kind <= CALL_IN_PLACE)
        call->timeout_ms = ms;
}

void plan_call(const struct rank *rank, int lane, int index, struct remote_call *call)
{
    static const int kinds[CALL_KINDS] = {20, 14, 8, 10, 10, 6, 10, 8, 10, 5, 4, 5};
    const struct plan *plan = rank->plan;
    uint64_t place = (uint64_t)(rank->rank << 24 | (lane + 1) << 16 | index);
    struct rng rng = {mix(mix(plan->seed, (uint64_t)plan->round), place)};
    *call = (struct remote_call){.key = rng.state >> 16, .lane = lane, .index = index};
    call->kind = (enum call_kind)choose(&rng, kinds, CALL_KINDS);
    int others = plan->size - 1, self = rank->rank;
    call->to = (self + 1 + (int)draw(&rng, (uint64_t)others)) % plan->size;
    call->third = (self + 1 + (int)draw(&rng, (uint64_t)others)) % plan->size;
    if (chance(&rng, 5))
        call->to = self;
    call->count = choose_elements(&rng);
    call->async = chance(&rng, 40);
    call->copy = chance(&rng, 30);
    bool alone = call->kind <= CALL_KEEP || call->kind == CALL_REFERENCE ||
                 call->kind >= CALL_CANCELLED;
    call->through = 1u << call->to | (alone ? 0 : 1u << call->third);
    set_timeout(&rng, plan, call);
}

/* ---- Beginning and leaving --------------------------------------------------------------------- */

static td_world own_world; /* whose timeout is short, for a victim that does not join */

td_status rpc_begin(struct rank *rank, const td_init_options *options)
{
    td_rpc_options rpc = {.init_method = options->init_method, .timeout_ms = CALL_MS * slowness()};
    td_set_num_threads(1); /* without a pool, which stays */
    rpc_register(rank);
    if (rank->plan->fault == FAULT_EARLY) {
        td_rendezvous_options rendezvous = {.timeout_ms = options->timeout_ms};
        td_status status = td_rendezvous(options->init_method, &rendezvous, &own_world);
        if (status)
            return status;
        rpc.init_method = NULL;
        rpc.store = own_world.store;
        rpc.rank = own_world.rank;
        rpc.world_size = own_world.world_size;
    }
    td_status status = td_init_rpc(worker_name(rank->rank), &rpc);
    if (status) {
        char text[600]; /* which closing the world may replace */
        snprintf(text, sizeof text, "%s", td_last_error());
        td_world_close(&own_world);
        td_fail(status, "%s", text);
    }
    return status;
}

td_status rpc_leave(struct rank *rank)
{
    const struct plan *plan = rank->plan;
    bool cut_off = plan->fault == FAULT_CUT && rank->rank == plan->victim;
    bool leaves = plan->fault == FAULT_LEAVE && rank->rank == plan->victim;
    td_status status = td_rpc_shutdown(&(td_rpc_shutdown_options){
        .now = !plan->graceful || cut_off || leaves, .timeout_ms = SHUTDOWN_MS * slowness()});
    bool store_died = plan->store == STORE_RANK_0 && plan->victim == 0 &&
                      atomic_load(&rank->page->fault_ns);
    if (status == TD_ERR_PEER && store_died && strstr(td_last_error(), "worker \"w0\""))
        status = TD_OK; /* without the store there is no agreement */
    rpc_drop_kept();
    td_world_close(&own_world);
    return status;
}

/* ---- What is left ------------------------------------------------------------------------------ */

struct tables {
    int leases, entries, children, contexts, calls;
    bool serves;
};

static struct tables count_tables(void)
{
    struct td__rpc_agent *agent = td__agent_hold();
    struct tables tables = {.leases = td__rpc_lease_count(agent)};
    pthread_mutex_lock(&agent->rref_lock);
    tables.entries = (int)agent->rref_entries.size;
    tables.children = (int)agent->rref_children.size;
    pthread_mutex_unlock(&agent->rref_lock);
    pthread_mutex_lock(&agent->context_lock);
    tables.contexts = (int)agent->contexts.size;
    pthread_mutex_unlock(&agent->context_lock);
    pthread_mutex_lock(&agent->calls_lock);
    tables.calls = agent->pending_count;
    pthread_mutex_unlock(&agent->calls_lock);
    pthread_mutex_lock(&agent->run_lock);
    tables.serves = agent->active != NULL;
    pthread_mutex_unlock(&agent->run_lock);
    td__agent_leave(agent);
    return tables;
}

/* Other workers drop what they have kept at the same time. */
void rpc_check_empty(struct rank *rank)
{
    td__deadline end = td__deadline_in_ms(EMPTY_MS * slowness());
    struct tables left;
    rpc_drop_kept();
    for (;;) {
        left = count_tables();
        if (!left.leases && !left.entries && !left.children && !left.contexts && !left.calls &&
            !left.serves)
            return;
        if (td__deadline_passed(end))
            break;
        td__sleep_ns(2000000);
    }
    rank_report(rank,
                "after all calls there are still %d leases, %d references, %d forks, %d contexts, "
                "%d calls%s",
                left.leases, left.entries, left.children, left.contexts, left.calls,
                left.serves ? ", and calls that it serves" : "");
}
