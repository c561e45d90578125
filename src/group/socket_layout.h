/* The inside of a socket team, and where the data of each operation stand for its schedule. */
#ifndef TD_GROUP_SOCKET_LAYOUT_H
#define TD_GROUP_SOCKET_LAYOUT_H

#include "group/executor.h"
#include "group/socket_team.h"

enum { TD__TEAM_PROGRAMS = 32 };

/* A program that was made, for the next call of its kind. */
struct td__cached_program {
    enum td__collective kind;
    const char *algorithm;
    int root;
    int number;    /* of the algorithm in td__algorithms */
    uint64_t used; /* the turn */
    struct td__program *program;
};

struct td__socket_team {
    struct td__links links;
    struct td__executor executor;
    struct td__endpoint *endpoint; /* NULL in tests */
    uint64_t key;
    int *world_ranks;
    int size, index;
    const char *forced[TD__COLLECTIVES]; /* algorithms that were asked for, or NULL */
    struct td__cached_program programs[TD__TEAM_PROGRAMS];
    uint64_t turn; /* counts the calls; the same on all members */
    char *scratch;
    size_t scratch_size;
    size_t *starts; /* 2 * (size + 1), for uneven parts */
    td_status broken;
    char *reason;

    /** See td__socket_team_watch(); `arg` is that of the links' outside(). */
    td_status (*recall)(void *arg, int world_rank, const struct td__operation *operation);
};

/** A team whose links come from somewhere else than an endpoint; `source` must stay. */
td_status td__socket_team_create_over(const struct td__link_source *source, void *arg, int size,
                                      int index, const char *algorithm,
                                      struct td__socket_team **team);

/** Begins a turn: chooses the algorithm of `kind` for a vector of `bytes` bytes, and fills in the
 *  program and the header of `run`. `count` is the one of the call. */
td_status td__socket_team_begin(struct td__socket_team *team, const struct td__operation *operation,
                                enum td__collective kind, size_t count, size_t bytes,
                                struct td__run *run);

/** Memory of the team's own, at least `size` bytes, aligned to 64; the same until the next call. */
td_status td__socket_team_scratch(struct td__socket_team *team,
                                  const struct td__operation *operation, size_t size,
                                  char **memory);

/** Carries out an operation whose arguments have been checked. */
td_status td__socket_layout_run(struct td__socket_team *team,
                                const struct td__operation *operation);

/** td__socket_team_combine() without its checks. */
td_status td__socket_layout_combine(struct td__socket_team *team,
                                    const struct td__operation *operation, void *data,
                                    size_t count);

#endif
