/* Survive: steps that continue when a process dies.
 *
 *     tdrun --standalone --nproc-per-node=3 --on-failure=shrink ./survive --die 1 3
 *     tdrun --standalone --nproc-per-node=3 --on-failure=replace ./survive --die 1 3
 *
 * Rank 1 kills itself after step 3. In the first run the others do the remaining steps without it. In the
 * second one tdrun restarts it, and all three do. */
#include <tandem/tandem.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 6, COME_BACK_MS = 60000 };

/* What a restarted process needs from the others. */
struct state {
    int64_t step; /* how many are done */
    double model;
};

static int own, whole; /* rank and size of the world */
static int die_rank = -1, die_step = -1;

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "survive: giving up: %s\n", td_last_error());
    exit(1);
}

/* Every rank takes the most advanced state: a survivor may have completed the step in which another one
 * failed, and a restarted rank has none. */
static td_status catch_up(td_group *group, struct state *state)
{
    int64_t farthest = state->step * whole + own;
    td_status status = td_group_all_reduce(&farthest, &farthest, 1, TD_I64, TD_MAX, group, NULL);
    if (status)
        return status;
    return td_group_broadcast(state, sizeof *state, TD_U8, (int)(farthest % whole), group, NULL);
}

static td_status work(td_group *group, struct state *state)
{
    td_status status = catch_up(group, state);
    while (!status && state->step < STEPS) {
        if (own == die_rank && state->step == die_step)
            raise(SIGKILL);
        double part = 1, sum = 0;
        status = td_group_all_reduce(&sum, &part, 1, TD_F64, TD_SUM, group, NULL);
        if (status)
            break;
        state->model += sum / td_get_world_size(group);
        state->step++;
        printf("rank %d: step %d of %d, by %g ranks\n", own, (int)state->step, STEPS, sum);
    }
    return status;
}

/* A group of the remaining ranks, and after a restart of all. */
static td_group *recover(td_group *group, bool comes_back)
{
    td_group *rest, *all;
    check(td_group_shrink(group, NULL, &rest));
    printf("rank %d: %d ranks are left\n", own, td_get_world_size(rest));
    if (!comes_back)
        return rest;
    if (td_group_grow(rest, &(td_group_options){.timeout_ms = COME_BACK_MS}, &all)) {
        fprintf(stderr, "survive: rank %d goes on without the others: %s\n", own, td_last_error());
        return rest;
    }
    printf("rank %d: all %d ranks are there again\n", own, td_get_world_size(all));
    return all;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);   /* a killed process does not flush its buffer */
    check(td_init_process_group(NULL)); /* a restarted rank waits here for td_group_grow() */
    /* Read after that: a spare (tdrun --spares) has no rank before. */
    const char *rejoins = getenv("TANDEM_REJOIN"), *restarts = getenv("TORCHELASTIC_MAX_RESTARTS");
    bool back = rejoins && !strcmp(rejoins, "1"); /* tdrun has restarted this rank */
    if (argc == 4 && !strcmp(argv[1], "--die") && !back) {
        die_rank = atoi(argv[2]);
        die_step = atoi(argv[3]);
    }
    own = td_get_rank(NULL);
    whole = td_get_world_size(NULL);
    if (back)
        printf("rank %d: is back\n", own);
    struct state state = {0};
    td_group *group = NULL;
    while (work(group, &state)) {
        fprintf(stderr, "survive: rank %d: %s\n", own, td_last_error());
        group = recover(group, restarts && atoi(restarts) > 0);
    }
    printf("rank %d: done, %d steps, %d ranks, model %g\n", own, (int)state.step,
           td_get_world_size(group), state.model);
    check(td_destroy_process_group());
    return 0;
}
