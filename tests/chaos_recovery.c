/* What the survivors do after a loss: shrink the group, and go on; then, perhaps, let a rank rejoin that was
 * started again.
 *
 *     shrink ── operations ── done
 *        ^          └ the second victim dies ┐
 *        └───────────────────────────────────┘
 *
 * Every survivor records the ranks that are left after each attempt. All must have the same, and the host
 * compares. The second victim dies at some moment of the first attempt; where it is still
 * counted among the ranks that are left, it does not take part in the last operation, so that all get the error. */
#include "chaos.h"

#include <stdio.h>
#include <stdlib.h>

enum { OPERATIONS = 12, ATTEMPTS = 3, GROWN = 3 };

static unsigned mask_of(const struct members *members)
{
    unsigned mask = 0;
    for (int i = 0; i < members->size; i++)
        mask |= 1u << members->ranks[i];
    return mask;
}

/* Takes the members from the group itself; false where that cannot be right. */
static bool take_members(struct rank *rank, td_group *group)
{
    const struct plan *plan = rank->plan;
    int size = td_get_world_size(group), last = -1;
    rank->rest.size = size;
    if (size < 1 || size > plan->size || td_get_process_group_ranks(group, rank->rest.ranks)) {
        rank_report(rank, "the group that is left has %d ranks", size);
        return false;
    }
    for (int i = 0; i < size; i++) {
        int r = rank->rest.ranks[i];
        if (r <= last || r >= plan->size) {
            rank_report(rank, "the group that is left has rank %d behind rank %d", r, last);
            return false;
        }
        last = r;
    }
    return true;
}

/* All but the victim, and but the second one where that has died by now. */
static void check_members(struct rank *rank, int attempt)
{
    const struct plan *plan = rank->plan;
    unsigned all = (1u << plan->size) - 1, mask = mask_of(&rank->rest);
    unsigned second = plan->second >= 0 ? 1u << plan->second : 0;
    unsigned expected = all & ~(1u << plan->victim) & ~second;
    bool may_have = attempt == 0 && mask == (expected | second);
    atomic_store(&rank->report->left[attempt], mask);
    if (mask != expected && !may_have)
        rank_report(rank, "ranks %x are left in attempt %d, it should be %x", mask, attempt,
                    expected);
}

static bool shrink(struct rank *rank, int attempt, td_group **group)
{
    td_group *rest;
    int begun = attempt;
    atomic_compare_exchange_strong(&rank->page->attempts, &begun, attempt + 1);
    rank->attempt = attempt;
    td_status status = td_group_shrink(*group, NULL, &rest);
    if (status) {
        rank_report(rank, "shrinking, attempt %d: %s: %s", attempt, td_status_name(status),
                    td_last_error());
        return false;
    }
    *group = rest;
    rank->groups[REST] = rest;
    rank->broken[REST] = false;
    if (!take_members(rank, rest))
        return false;
    check_members(rank, attempt);
    return true;
}

/* The whole world, which all groups of the survivors belong to. */
static void use_all(struct rank *rank, td_group *group)
{
    rank->groups[REST] = group;
    rank->broken[REST] = false;
    rank->fault = FAULT_PAUSE;
    if (!take_members(rank, group))
        return;
    if (rank->rest.size != rank->plan->size)
        rank_report(rank, "the group has grown to %d ranks", rank->rest.size);
    else
        run_rest(rank, GROWN, OPERATIONS, true);
}

static void grow(struct rank *rank, td_group *group)
{
    td_group *grown;
    atomic_store(&rank->page->wanted_again, true);
    page_ring(rank->page);
    td_status status = td_group_grow(group, NULL, &grown);
    if (status)
        rank_report(rank, "growing: %s: %s", td_status_name(status), td_last_error());
    else
        use_all(rank, grown);
}

void recover(struct rank *rank)
{
    const struct plan *plan = rank->plan;
    td_group *group = NULL; /* the world */
    bool dies = rank->rank == plan->second;
    rank->victim = plan->second;
    rank->fault_ns = &rank->page->second_ns;
    if (dies)
        inject_self(rank, &rank->page->second_ns, plan->second_delay_ns);
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        rank->fault = plan->second >= 0 ? FAULT_KILL : FAULT_PAUSE;
        if (!shrink(rank, attempt, &group))
            break;
        bool more = plan->second >= 0 && plan_has(&rank->rest, plan->second);
        if (!more)
            rank->fault = FAULT_PAUSE; /* no failure is allowed from here on */
        run_rest(rank, attempt, OPERATIONS, !dies);
        if (!more)
            break;
        while (dies)
            td__sleep_ns(1000000);
    }
    while (dies)
        td__sleep_ns(1000000);
    if (plan->after == AFTER_GROW && rank->groups[REST])
        grow(rank, group);
}

void come_back(struct rank *rank)
{
    use_all(rank, NULL);
}
