/* Socket teams; see socket_team.h.
 *
 * What a call needs is kept from one to the next: links, scratch memory and the programs of the last
 * algorithms, so that a short message builds and allocates nothing. A team that has failed stays so,
 * and fails every further call with the first reason. */
#include "group/socket_team.h"

#include "base/fail.h"
#include "collective/select.h"
#include "group/socket_layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEPT_BYTES = 64 << 20, /* of scratch memory between calls */
    REACHED = 64,          /* size of a team up to which a failure is told to all */
    REACH_MS = 500,
};

/* ---- Links from an endpoint ------------------------------------------------------------------ */

static td_status connect_to_rank(void *arg, int peer, td__deadline deadline, int *fd)
{
    struct td__socket_team *team = arg;
    return td__endpoint_connect(team->endpoint, team->world_ranks[peer], team->key,
                                TD__CHANNEL_COLLECTIVE, deadline, fd);
}

static td_status approach_rank(void *arg, int peer, td__deadline deadline, int *fd)
{
    struct td__socket_team *team = arg;
    return td__endpoint_connect_briefly(team->endpoint, team->world_ranks[peer], team->key,
                                        TD__CHANNEL_COLLECTIVE, deadline, fd);
}

static td_status accept_from_rank(void *arg, int peer, td__deadline deadline, int *fd)
{
    struct td__socket_team *team = arg;
    return td__endpoint_accept(team->endpoint, team->world_ranks[peer], team->key,
                               TD__CHANNEL_COLLECTIVE, deadline, fd);
}

static const char *describe_rank(void *arg, int peer)
{
    struct td__socket_team *team = arg;
    return td__endpoint_describe(team->endpoint, team->world_ranks[peer]);
}

static void listen_for_late_links(void *arg, td__link_fn fn, void *fn_arg)
{
    struct td__socket_team *team = arg;
    td__endpoint_listen(team->endpoint, team->key, TD__CHANNEL_COLLECTIVE, fn, fn_arg);
}

static const char *farewell_of_rank(void *arg, int peer)
{
    struct td__socket_team *team = arg;
    return td__endpoint_farewell(team->endpoint, team->world_ranks[peer]);
}

static void watch_rank(void *arg, int peer)
{
    struct td__socket_team *team = arg;
    td__endpoint_watch(team->endpoint, team->world_ranks[peer]);
}

static bool rank_is_deaf(void *arg, int peer, bool note)
{
    struct td__socket_team *team = arg;
    return td__endpoint_is_deaf(team->endpoint, team->world_ranks[peer], note);
}

static td_status recall_calls(void *arg, int peer, const struct td__operation *operation)
{
    struct td__socket_team *team = arg;
    return team->recall ? team->recall(team->links.outside_arg, team->world_ranks[peer], operation)
                        : TD_OK;
}

static const struct td__link_source endpoint_source = {
    .connect = connect_to_rank,
    .approach = approach_rank,
    .accept = accept_from_rank,
    .describe = describe_rank,
    .listen = listen_for_late_links,
    .farewell = farewell_of_rank,
    .watch = watch_rank,
    .is_deaf = rank_is_deaf,
    .recall = recall_calls,
};

/* ---- Creating and destroying ----------------------------------------------------------------- */

/* NULL for `arg` stands for the team itself. */
static td_status create(const struct td__link_source *source, void *arg, int size, int index,
                        const char *algorithm, struct td__socket_team **team_out)
{
    struct td__socket_team *team = calloc(1, sizeof *team);
    if (!team)
        return td__fail_nomem("socket team");
    team->size = size;
    team->index = index;
    team->world_ranks = calloc((size_t)size, sizeof *team->world_ranks);
    team->starts = calloc(2 * ((size_t)size + 1), sizeof *team->starts);
    bool linked = td__links_init(&team->links, source, arg ? arg : team, size, index);
    if (!team->world_ranks || !team->starts || !linked) {
        td__socket_team_destroy(team);
        return td__fail_nomem("socket team");
    }
    for (int kind = 0; algorithm && kind < TD__COLLECTIVES; kind++) {
        const struct td__algorithm *found = td__algorithm_find(kind, algorithm);
        team->forced[kind] = found ? found->name : NULL;
    }
    *team_out = team;
    return TD_OK;
}

td_status td__socket_team_create(struct td__endpoint *endpoint, uint64_t key,
                                 const int *world_ranks, int size, int index, const char *algorithm,
                                 struct td__socket_team **team_out)
{
    struct td__socket_team *team;
    TD_TRY(create(&endpoint_source, NULL, size, index, algorithm, &team));
    team->endpoint = endpoint;
    team->key = key;
    memcpy(team->world_ranks, world_ranks, (size_t)size * sizeof *world_ranks);
    *team_out = team;
    return TD_OK;
}

td_status td__socket_team_create_over(const struct td__link_source *source, void *arg, int size,
                                      int index, const char *algorithm,
                                      struct td__socket_team **team)
{
    return create(source, arg, size, index, algorithm, team);
}

void td__socket_team_destroy(struct td__socket_team *team)
{
    if (!team)
        return;
    td__links_free(&team->links);
    td__executor_free(&team->executor);
    for (int i = 0; i < TD__TEAM_PROGRAMS; i++)
        td__program_destroy(team->programs[i].program);
    free(team->world_ranks);
    free(team->scratch);
    free(team->starts);
    free(team->reason);
    free(team);
}

/* ---- Programs and memory --------------------------------------------------------------------- */

/* The program of a call: one that is there, or a new one in the place of that which has not been used
 * for the longest time. NULL without memory. */
static struct td__cached_program *find_program(struct td__socket_team *team,
                                               enum td__collective kind, const char *algorithm,
                                               int root)
{
    struct td__cached_program *oldest = team->programs;
    for (struct td__cached_program *at = team->programs; at < team->programs + TD__TEAM_PROGRAMS;
         at++) {
        if (at->program && at->kind == kind && at->algorithm == algorithm && at->root == root)
            return at;
        if (at->used < oldest->used)
            oldest = at;
    }
    const struct td__algorithm *found = td__algorithm_find(kind, algorithm);
    struct td__plan plan = {.rank = team->index, .size = team->size, .root = root};
    struct td__program *program = td__program_create(found, &plan);
    if (!program)
        return NULL;
    td__program_destroy(oldest->program);
    *oldest = (struct td__cached_program){.kind = kind,
                                          .algorithm = algorithm,
                                          .root = root,
                                          .number = (int)(found - td__algorithms),
                                          .program = program};
    return oldest;
}

/* The name as it stands in td__algorithms, so that names can be compared by their addresses. */
static const char *choose(const struct td__socket_team *team, const struct td__operation *operation,
                          enum td__collective kind, size_t bytes)
{
    const char *forced = team->forced[kind];
    if (operation->input_counts)
        return forced && strcmp(forced, "bruck") ? forced : td__select_uneven(team->size);
    return forced ? forced : td__select(kind, team->size, bytes);
}

td_status td__socket_team_begin(struct td__socket_team *team, const struct td__operation *operation,
                                enum td__collective kind, size_t count, size_t bytes,
                                struct td__run *run)
{
    bool rooted = kind == TD__BROADCAST || kind == TD__REDUCE || kind == TD__SCATTER ||
                  kind == TD__GATHER;
    const char *algorithm = choose(team, operation, kind, bytes);
    struct td__cached_program *cached = find_program(team, kind, algorithm,
                                                     rooted ? operation->root : 0);
    if (!cached)
        return td__fail_nomem(td__operation_describe(operation));
    cached->used = ++team->turn;
    *run = (struct td__run){
        .program = cached->program,
        .operation = operation,
        .links = &team->links,
        .header = td__header_of(operation, count, cached->number, team->turn),
    };
    return TD_OK;
}

td_status td__socket_team_scratch(struct td__socket_team *team,
                                  const struct td__operation *operation, size_t size, char **memory)
{
    if (size > team->scratch_size) {
        size_t grown = (size + 63) / 64 * 64;
        free(team->scratch);
        team->scratch_size = 0;
        team->scratch = grown >= size ? aligned_alloc(64, grown) : NULL;
        if (!team->scratch)
            return td__fail_nomem(td__operation_describe(operation));
        team->scratch_size = grown;
    }
    *memory = team->scratch;
    return TD_OK;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static td_status check_usable(const struct td__socket_team *team)
{
    if (team->broken)
        return td__fail(team->broken, "%s", team->reason ? team->reason : "the group has failed");
    return TD_OK;
}

static td_status end_call(struct td__socket_team *team, const struct td__operation *operation,
                          td_status status)
{
    if (status) {
        team->broken = status;
        team->reason = strdup(td_last_error());
        if (team->reason)
            td__links_say_goodbye(&team->links, operation, status, team->reason);
    }
    if (team->scratch_size > KEPT_BYTES) {
        free(team->scratch);
        team->scratch = NULL;
        team->scratch_size = 0;
    }
    return status;
}

td_status td__socket_team_run(struct td__socket_team *team, const struct td__operation *operation)
{
    struct td__operation timed = *operation;
    TD_TRY(check_usable(team));
    timed.deadline = td__operation_deadline(operation);
    return end_call(team, &timed, td__socket_layout_run(team, &timed));
}

td_status td__socket_team_combine(struct td__socket_team *team,
                                  const struct td__operation *operation, void *data, size_t count)
{
    struct td__operation timed = *operation;
    TD_TRY(check_usable(team));
    timed.deadline = td__operation_deadline(operation);
    return end_call(team, &timed, td__socket_layout_combine(team, &timed, data, count));
}

void td__socket_team_fall_out(struct td__socket_team *team, const struct td__operation *operation,
                              td_status status)
{
    char reason[TD__REASON_TEXT];
    if (team->broken)
        return;
    snprintf(reason, sizeof reason, "%s", td_last_error());
    end_call(team, operation, status);
    td__deadline deadline = td__deadline_in_ms(REACH_MS);
    for (int i = 0; i < team->links.size && team->links.size <= REACHED; i++)
        td__links_reach(&team->links, i, deadline);
    td__fail(status, "%s", reason);
}

void td__socket_team_watch(struct td__socket_team *team, const struct td__outside *outside)
{
    team->links.outside = outside->look;
    team->links.outside_arg = outside->arg;
    team->recall = outside->recall;
    team->links.explain = outside->explain;
}

td_status td__socket_team_hear(struct td__socket_team *team, const struct td__operation *operation)
{
    return team->broken ? TD_OK : td__links_hear(&team->links, operation);
}
