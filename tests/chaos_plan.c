/* What happens in a round, and in each operation of it. Everything is derived from the seed, so the host and all
 * ranks know it without asking each other, and a round can be repeated. */
#include "chaos.h"

#include <stdio.h>
#include <string.h>

/* ---- Numbers --------------------------------------------------------------------------------- */

uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t z = a * 0x9e3779b97f4a7c15u ^ (b + 0xbf58476d1ce4e5b9u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint64_t draw(struct rng *rng, uint64_t sides)
{
    rng->state = mix(rng->state, 1);
    return (rng->state >> 8) % sides;
}

bool chance(struct rng *rng, int percent)
{
    return draw(rng, 100) < (uint64_t)percent;
}

int choose(struct rng *rng, const int *weights, int count)
{
    int sum = 0, i = 0;
    for (int k = 0; k < count; k++)
        sum += weights[k];
    int at = (int)draw(rng, (uint64_t)sum);
    while (at >= weights[i])
        at -= weights[i++];
    return i;
}

/* ---- A round --------------------------------------------------------------------------------- */

bool plan_has(const struct members *members, int rank)
{
    for (int i = 0; i < members->size; i++)
        if (members->ranks[i] == rank)
            return true;
    return false;
}

/* Some of the ranks, in any order; two at least. */
static void choose_members(struct rng *rng, const struct plan *plan, struct members *members)
{
    int ranks[MAX_RANKS], left = 0;
    bool without = plan->fault == FAULT_STOP; /* only the world waits for one that is stopped */
    for (int r = 0; r < plan->size; r++)
        if (!without || r != plan->victim)
            ranks[left++] = r;
    members->size = left < 2 ? left : 2 + (int)draw(rng, (uint64_t)left - 1);
    for (int i = 0; i < members->size; i++) {
        int pick = (int)draw(rng, (uint64_t)left);
        members->ranks[i] = ranks[pick];
        ranks[pick] = ranks[--left];
    }
}

static void choose_hosts(struct rng *rng, struct plan *plan)
{
    int hosts = 2 + (int)draw(rng, (uint64_t)(plan->size > 3 ? 3 : 1));
    bool scattered = chance(rng, 30);
    for (int r = 0; r < plan->size; r++)
        plan->hosts[r] = scattered ? (int)draw(rng, (uint64_t)hosts) : r * hosts / plan->size;
    if (plan->fault == FAULT_CUT) /* no other rank is on its host */
        plan->hosts[plan->victim] = hosts;
}

static void choose_fault(struct rng *rng, struct plan *plan, bool spaces)
{
    static const int faults[][FAULTS] = {{[FAULT_KILL] = 50,
                                          [FAULT_EARLY] = 7,
                                          [FAULT_LATE] = 7,
                                          [FAULT_PAUSE] = 7,
                                          [FAULT_STOP] = 7,
                                          [FAULT_LEAVE] = 10,
                                          [FAULT_CUT] = 4,
                                          [FAULT_ABORT] = 8},
                                         {[FAULT_KILL] = 52,
                                          [FAULT_EARLY] = 7,
                                          [FAULT_LATE] = 10,
                                          [FAULT_PAUSE] = 12,
                                          [FAULT_STOP] = 5,
                                          [FAULT_LEAVE] = 10,
                                          [FAULT_CUT] = 4}};
    static const int ways[][WAYS] = {
        {[WAY_SHM] = 36, [WAY_TCP] = 24, [WAY_HOSTS] = 28, [WAY_BACKEND] = 12},
        {[WAY_SHM] = 40, [WAY_TCP] = 27, [WAY_HOSTS] = 33}};
    static const int64_t delays[] = {0, 20000, 200000, 2000000, 20000000};
    plan->fault = (enum fault)choose(rng, faults[plan->rpc], FAULTS);
    plan->way = (enum chaos_way)choose(rng, ways[plan->rpc], WAYS);
    /* Thrown where it does not count as well, so that a seed means the same rounds everywhere. */
    bool cut = plan->fault == FAULT_CUT, apart = cut || chance(rng, 5);
    if (apart && (cut || spaces))
        plan->way = WAY_SPACES;
    plan->victim = (int)draw(rng, (uint64_t)plan->size);
    plan->end = (enum end)draw(rng, ENDS);
    plan->delay_ns = (int64_t)draw(rng, (uint64_t)delays[draw(rng, 5)] + 1);
    plan->pause_ns = 100000000 + (int64_t)draw(rng, 600000000);
    plan->short_ms = 1000 + (int64_t)draw(rng, 500);
    bool outside = plan->fault == FAULT_PAUSE || plan->fault == FAULT_STOP ||
                   plan->fault == FAULT_CUT;
    bool possible = plan->fault == FAULT_KILL && plan->end <= END_ABORT;
    plan->by_host = outside || (possible && chance(rng, 60));
}

static void choose_store(struct rng *rng, struct plan *plan)
{
    static const int stores[] = {[STORE_HOST] = 60, [STORE_RANK_0] = 20, [STORE_FILE] = 20};
    plan->store = (enum chaos_store)choose(rng, stores, 3);
    /* The rank that hosts the store stays until the others have left. */
    if (plan->way == WAY_SPACES || (plan->fault == FAULT_LEAVE && plan->victim == 0))
        plan->store = STORE_HOST;
}

static void choose_after(struct rng *rng, struct plan *plan)
{
    static const int weights[] = {
        [AFTER_NOTHING] = 40, [AFTER_SHRINK] = 25, [AFTER_LOSS] = 20, [AFTER_GROW] = 15};
    bool store_stays = plan->store != STORE_RANK_0 || plan->victim != 0;
    enum after after = (enum after)choose(rng, weights, 4);
    plan->second = (plan->victim + 1 + (int)draw(rng, (uint64_t)plan->size - 1)) % plan->size;
    plan->second_delay_ns = (int64_t)draw(rng, chance(rng, 50) ? 3000000 : 40000000);
    if (plan->fault != FAULT_KILL && plan->fault != FAULT_LEAVE && plan->fault != FAULT_CUT)
        after = AFTER_NOTHING;
    if (after == AFTER_LOSS && plan->size < 3)
        after = AFTER_SHRINK;
    if (after == AFTER_GROW && (plan->fault != FAULT_KILL || !store_stays))
        after = AFTER_SHRINK;
    if (after != AFTER_LOSS)
        plan->second = -1;
    plan->after = after;
}

static void choose_groups(struct rng *rng, struct plan *plan)
{
    plan->groups = 2 + (int)draw(rng, MAX_GROUPS - 1);
    for (int g = 0; g < plan->groups; g++)
        choose_members(rng, plan, &plan->group[g]);
    plan->group[0].size = plan->size;
    for (int r = 0; r < plan->size; r++)
        plan->group[0].ranks[r] = r;
}

static void choose_lanes(struct rng *rng, struct plan *plan)
{
    for (int lane = 0; lane < LANES; lane++) {
        plan->count[lane] = 10 + (int)draw(rng, MAX_OPERATIONS - 10);
        plan->stop_at[lane] = (int)draw(rng, (uint64_t)plan->count[lane]);
    }
    if (plan->groups == 2 && chance(rng, 30))
        plan->count[1] = plan->stop_at[1] = 0; /* no second lane */
}

static void choose_rpc(struct rng *rng, struct plan *plan)
{
    int served = 1 + (int)draw(rng, 30);
    bool serves = chance(rng, 40), early = chance(rng, 50);
    plan->second = -1;
    plan->serves = serves && plan->fault == FAULT_KILL && !plan->by_host ? served : 0;
    plan->graceful = chance(rng, 60);
    /* Without the store there is no agreement on the end: each leaves by itself. */
    bool store_dies = plan->store == STORE_RANK_0 && plan->victim == 0;
    plan->early = early && plan->graceful && plan->fault != FAULT_STOP && !store_dies;
}

void plan_make(uint64_t seed, int round, bool spaces, bool rpc, struct plan *plan)
{
    struct rng rng = {mix(seed, (uint64_t)round)};
    *plan = (struct plan){.seed = seed, .round = round, .rpc = rpc};
    plan->size = rpc ? 3 + (int)draw(&rng, 4) : 2 + (int)draw(&rng, MAX_RANKS - 1);
    choose_fault(&rng, plan, spaces);
    choose_store(&rng, plan);
    if (plan->way == WAY_HOSTS || plan->way == WAY_SPACES)
        choose_hosts(&rng, plan);
    if (!rpc)
        choose_groups(&rng, plan);
    choose_lanes(&rng, plan);
    if (rpc) {
        choose_rpc(&rng, plan);
        return;
    }
    choose_after(&rng, plan);
    do
        plan->aborted_group = (int)draw(&rng, (uint64_t)plan->groups);
    while (!plan_has(&plan->group[plan->aborted_group], plan->victim));
}

void plan_describe(const struct plan *plan, char *text, size_t room)
{
    static const char *const ends[ENDS] = {"SIGKILL", "SIGSEGV", "abort", "exit(3)", "_exit(0)"};
    static const char *const stores[] = {"the host's store", "a store of rank 0",
                                         "a store in a file"};
    int used = snprintf(text, room, "%d %s over %s", plan->size, plan->rpc ? "workers" : "ranks",
                        way_name(plan->way));
    if (plan->way == WAY_HOSTS || plan->way == WAY_SPACES) {
        used += snprintf(text + used, room - (size_t)used, " on ");
        for (int r = 0; r < plan->size; r++)
            used += snprintf(text + used, room - (size_t)used, "%d", plan->hosts[r]);
    }
    used += snprintf(text + used, room - (size_t)used, ", %s; rank %d: %s", stores[plan->store],
                     plan->victim, fault_name(plan->fault));
    if (plan->fault <= FAULT_LATE)
        used += snprintf(text + used, room - (size_t)used, " (%s by %s)", ends[plan->end],
                         plan->by_host ? "another" : "itself");
    if (plan->serves)
        used += snprintf(text + used, room - (size_t)used, " in call %d to it", plan->serves);
    else
        used += snprintf(text + used, room - (size_t)used, " at operation %d of %d",
                         plan->stop_at[0], plan->count[0]);
    used += snprintf(text + used, room - (size_t)used, ", %d us later",
                     (int)(plan->delay_ns / 1000));
    if (plan->rpc)
        snprintf(text + used, room - (size_t)used, "; %s shutdown%s",
                 plan->graceful ? "graceful" : "immediate", plan->early ? ", early" : "");
    if (plan->after == AFTER_LOSS)
        snprintf(text + used, room - (size_t)used, "; the others shrink, rank %d dies",
                 plan->second);
    else if (plan->after)
        snprintf(text + used, room - (size_t)used, "; the others shrink%s",
                 plan->after == AFTER_GROW ? ", and it comes back" : "");
}

/* ---- An operation ---------------------------------------------------------------------------- */

static size_t choose_count(struct rng *rng, size_t element, int parts)
{
    static const size_t switches[] = {64,       4 << 10,   8 << 10,   16 << 10, 32 << 10,
                                      64 << 10, 256 << 10, 512 << 10, 1 << 20};
    static const int weights[] = {6, 44, 38, 12};
    size_t each = element * (size_t)parts, bytes;
    switch (choose(rng, weights, 4)) {
    case 0:
        return 0;
    case 1:
        return 1 + draw(rng, 600);
    case 2: /* about a size at which something changes */
        bytes = switches[draw(rng, sizeof switches / sizeof *switches)];
        return (chance(rng, 50) ? bytes / element : bytes / each) + draw(rng, 3);
    default:
        return (1 + draw(rng, 2 << 20)) / each;
    }
}

static td_reduce_op choose_op(struct rng *rng, td_dtype dtype, int size)
{
    static const td_reduce_op integers[] = {TD_SUM,  TD_PRODUCT, TD_MIN, TD_MAX,
                                            TD_BAND, TD_BOR,     TD_BXOR};
    static const td_reduce_op floats[] = {TD_SUM, TD_PRODUCT,    TD_MIN,
                                          TD_MAX, TD_PREMUL_SUM, TD_AVG};
    bool exact = (size & (size - 1)) == 0; /* an average is, then */
    if (dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128)
        return TD_SUM;
    if (dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16)
        return floats[draw(rng, exact ? 6 : 5)];
    return integers[draw(rng, 7)];
}

/* The sender and the receiver. A victim that is stopped costs each peer a timeout each time. */
static void choose_pair(struct rng *rng, const struct members *members, int victim, bool stopped,
                        struct operation *operation)
{
    operation->root = (int)draw(rng, (uint64_t)members->size);
    operation->peer = (operation->root + 1 + (int)draw(rng, (uint64_t)members->size - 1)) %
                      members->size;
    bool touches = members->ranks[operation->root] == victim ||
                   members->ranks[operation->peer] == victim || operation->kind != KIND_PAIR;
    if (stopped && touches && plan_has(members, victim) && operation->kind >= KIND_PAIR)
        operation->kind = KIND_ALL_REDUCE;
    /* A recv with TD_ANY_SOURCE waits as long as any rank is left. */
    if (operation->kind == KIND_FAN_IN && members->size > 2 && plan_has(members, victim))
        operation->kind = KIND_RING;
}

static void choose_operation(struct rng *rng, const struct members *members, int victim,
                             bool stopped, struct operation *operation)
{
    static const int kinds[KINDS] = {8, 8, 16, 6, 6, 10, 8, 8, 6, 6, 8, 5, 5};
    operation->kind = (enum kind)choose(rng, kinds, KINDS);
    operation->dtype = (td_dtype)draw(rng, TD_COMPLEX128 + 1);
    operation->op = choose_op(rng, operation->dtype, members->size);
    bool parts = operation->kind >= KIND_SCATTER && operation->kind <= KIND_UNEVEN;
    operation->count = choose_count(rng, td_dtype_size(operation->dtype),
                                    parts ? members->size : 1);
    operation->async = chance(rng, 35);
    operation->in_place = chance(rng, 30);
    if (members->size > 1)
        choose_pair(rng, members, victim, stopped, operation);
    else if (operation->kind >= KIND_PAIR)
        operation->kind = KIND_ALL_REDUCE;
}

void plan_operation(const struct plan *plan, int lane, int index, struct operation *operation)
{
    struct rng rng = {mix(mix(plan->seed, (uint64_t)plan->round), (uint64_t)(lane << 16 | index))};
    *operation = (struct operation){.key = rng.state, .index = index};
    int own = plan->groups - 1; /* the second lane's */
    operation->group = lane ? own : chance(&rng, 45) ? 0 : (int)draw(&rng, (uint64_t)own);
    choose_operation(&rng, &plan->group[operation->group], plan->victim, plan->fault == FAULT_STOP,
                     operation);
}

void plan_rest_operation(const struct plan *plan, const struct members *members, int attempt,
                         int index, struct operation *operation)
{
    struct rng rng = {
        mix(mix(plan->seed, (uint64_t)plan->round), (uint64_t)((attempt + 2) << 16 | index))};
    *operation = (struct operation){.key = rng.state, .index = index, .group = REST};
    choose_operation(&rng, members, plan->second, false, operation);
}

/* ---- Names ----------------------------------------------------------------------------------- */

const char *kind_name(enum kind kind)
{
    static const char *const names[KINDS] = {
        "broadcast",  "reduce",           "all_reduce",     "scatter",      "gather",
        "all_gather", "reduce_scatter",   "all_to_all",     "all_to_all_v", "barrier",
        "message",    "ring of messages", "messages of any"};
    return kind < KINDS ? names[kind] : "?";
}

const char *fault_name(enum fault fault)
{
    static const char *const names[FAULTS] = {
        "killed",  "killed at the start", "killed at the end", "paused", "stopped", "leaves",
        "cut off", "gives a group up"};
    return names[fault];
}

const char *way_name(enum chaos_way way)
{
    static const char *const names[WAYS] = {"shared memory", "tcp", "hosts", "backend tcp",
                                            "networks"};
    return names[way];
}
