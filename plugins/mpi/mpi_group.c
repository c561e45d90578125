/* Groups as communicators, and the table of the backend. */
#include "mpi_backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPINS = 2000, CROWDED_SPINS = 20, TAG_RANGE = 30000 };

/* A thread that waits in MPICH keeps its processor, also from ranks that have none. */
#ifdef MPICH_NUMVERSION
static const bool mpi_never_yields = true;
#else
static const bool mpi_never_yields = false;
#endif

/* What a rank tells the others before they create the communicator. */
struct card {
    int rank, size; /* in MPI_COMM_WORLD */
    int tag;        /* rank 0's: of MPI_Comm_create_group() */
    uint64_t place; /* mpi.place */
    char name[96];
};

/* ---- Failing ----------------------------------------------------------------------------------------- */

td_status mpi_failure(const struct mpi_group *group)
{
    int status = atomic_load_explicit(&group->failed, memory_order_acquire);
    return status ? td_fail((td_status)status, "%s", group->cause) : TD_OK;
}

void mpi_note_failure(struct mpi_group *group, td_status status)
{
    pthread_mutex_lock(&group->lock);
    if (!atomic_load(&group->failed)) {
        snprintf(group->cause, sizeof group->cause, "%s", td_last_error());
        atomic_store(&group->failed, (int)status);
    }
    pthread_mutex_unlock(&group->lock);
    if (status == TD_ERR_PEER || status == TD_ERR_SYSTEM)
        atomic_store(&mpi.failed, true);
}

static void abort_group(void *self)
{
    struct mpi_group *group = self;
    mpi_note_failure(group, td_last_status());
    mpi_rescue(group);
    mpi_progress_wake();
}

/* ---- Creating ------------------------------------------------------------------------------------------ */

static void card_key(int rank, char key[32])
{
    snprintf(key, 32, "card/%d", rank);
}

static td_status check_cards(const td_backend_context *context, const struct card *cards)
{
    for (int r = 0; r < context->size; r++) {
        if (strcmp(cards[r].name, mpi.name) != 0)
            return td_fail(TD_ERR_MISMATCH,
                           "group \"%s\": rank %d uses %s, rank %d uses %s; start all ranks with "
                           "the mpirun of one MPI, or set TANDEM_MPI on all",
                           context->name, context->global_ranks[context->rank], mpi.name,
                           context->global_ranks[r], cards[r].name);
        if (cards[r].size < context->size)
            return td_fail(TD_ERR_STATE,
                           "group \"%s\": it has %d ranks, but %s of rank %d knows %d process%s; "
                           "start the program with its mpirun (or srun --mpi=…), not by another "
                           "launcher, or use the backend native",
                           context->name, context->size, mpi.name, context->global_ranks[r],
                           cards[r].size, cards[r].size == 1 ? "" : "es");
        for (int s = 0; s < r; s++)
            if (cards[s].rank == cards[r].rank)
                return td_fail(TD_ERR_STATE,
                               "group \"%s\": rank %d and rank %d are of different jobs of MPI; "
                               "start them with one mpirun, or use the backend native",
                               context->name, context->global_ranks[s], context->global_ranks[r]);
    }
    return TD_OK;
}

/* All cards; in the end all ranks are about to create the communicator. */
static td_status exchange_cards(const td_backend_context *context, struct card *cards)
{
    size_t size = (size_t)context->size;
    char(*names)[32] = calloc(size, sizeof *names);
    const char **keys = calloc(size, sizeof *keys);
    td_bytes *values = calloc(size, sizeof *values);
    struct card mine = {.rank = mpi.rank, .size = mpi.size, .place = mpi.place};
    memcpy(mine.name, mpi.name, sizeof mine.name);
    mine.tag = (int)((uint64_t)mpi_now_ns() / 1000 % TAG_RANGE);
    td_status status = TD_OK;
    if (!names || !keys || !values)
        status = td_fail(TD_ERR_NOMEM, "backend mpi: out of memory");
    for (int r = 0; !status && r < context->size; r++) {
        card_key(r, names[r]);
        keys[r] = names[r];
    }
    if (!status)
        status = td_store_set(context->store, keys[context->rank], &mine, sizeof mine);
    if (!status)
        status = td_store_multi_get(context->store, keys, context->size, context->timeout_ms,
                                    values);
    for (int r = 0; !status && r < context->size; r++) {
        if (values[r].size == sizeof cards[r]) {
            memcpy(&cards[r], values[r].data, sizeof cards[r]);
            cards[r].name[sizeof cards[r].name - 1] = '\0';
        } else {
            status = td_fail(TD_ERR_MISMATCH, "group \"%s\": the card of rank %d has %zu bytes",
                             context->name, context->global_ranks[r], values[r].size);
        }
    }
    for (int r = 0; values && r < context->size; r++)
        td_bytes_free(&values[r]);
    free(values);
    free(keys);
    free(names);
    return status;
}

static td_status make_comms(struct mpi_group *group, const struct card *cards)
{
    const td_backend_context *context = group->context;
    MPI_Group world, members;
    int *ranks = malloc((size_t)context->size * sizeof *ranks);
    if (!ranks)
        return td_fail(TD_ERR_NOMEM, "backend mpi: out of memory");
    for (int r = 0; r < context->size; r++)
        ranks[r] = cards[r].rank;
    mpi_enter();
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    int result = MPI_Group_incl(world, context->size, ranks, &members);
    if (result == MPI_SUCCESS) {
        result = MPI_Comm_create_group(MPI_COMM_WORLD, members, cards[0].tag, &group->comm);
        MPI_Group_free(&members);
    }
    MPI_Group_free(&world);
    if (result == MPI_SUCCESS) {
        MPI_Comm_set_errhandler(group->comm, MPI_ERRORS_RETURN);
        result = MPI_Comm_dup(group->comm, &group->inner);
    }
    if (result == MPI_SUCCESS)
        MPI_Comm_set_errhandler(group->inner, MPI_ERRORS_RETURN);
    group->has_comms = result == MPI_SUCCESS;
    mpi_leave();
    free(ranks);
    return mpi_check(result, "creating the communicator", context->name);
}

/* "most_count=1000": elements in one call of MPI; for tests of larger counts than MPI has. */
static td_status read_options(struct mpi_group *group)
{
    const char *options = group->context->options;
    long long most = 0;
    group->most = (size_t)1 << 30;
    if (!options || !*options)
        return TD_OK;
    if (sscanf(options, "most_count=%lld", &most) != 1 || most < 1 || most > 1LL << 30)
        return td_fail(TD_ERR_INVALID,
                       "backend mpi: the options \"%s\" are unknown; it has most_count=N, at most "
                       "1073741824",
                       options);
    group->most = (size_t)most;
    return TD_OK;
}

/* Threads that wait spin while each rank has a processor: one that the launcher has bound it to, or one of those that it
 * shares with others. */
static void choose_waiting(struct mpi_group *group, const struct card *cards)
{
    const td_backend_context *context = group->context;
    int here = 0;
    for (int r = 0; r < context->size; r++)
        here += cards[r].place == mpi.place;
    bool crowded = here > mpi.processors;
    if (crowded)
        td_log(TD_LOG_DEBUG, "group \"%s\": %d ranks share %d processor%s: threads that wait sleep",
               context->name, here, mpi.processors, mpi.processors == 1 ? "" : "s");
    group->spins = crowded ? CROWDED_SPINS : SPINS;
    group->polls = !mpi.multiple || (mpi_never_yields && crowded);
}

static td_status open_group(struct mpi_group *group)
{
    const td_backend_context *context = group->context;
    struct card *cards = calloc((size_t)context->size, sizeof *cards);
    if (!cards)
        return td_fail(TD_ERR_NOMEM, "backend mpi: out of memory");
    td_status status = read_options(group);
    if (!status)
        status = exchange_cards(context, cards);
    if (!status)
        status = check_cards(context, cards);
    if (!status)
        choose_waiting(group, cards);
    if (!status)
        status = make_comms(group, cards);
    if (!status)
        status = mpi_page_open(group);
    free(cards);
    return status;
}

/* The communicators of a group that has failed stay: other ranks may be in a call on them. */
static void close_group(struct mpi_group *group)
{
    while (atomic_load(&group->rescuing))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (group->has_comms && !atomic_load(&group->failed) && !atomic_load(&mpi.lost)) {
        mpi_enter();
        MPI_Comm_free(&group->inner);
        MPI_Comm_free(&group->comm);
        mpi_leave();
    }
    mpi_page_close(group);
    pthread_mutex_destroy(&group->lock);
    free(group);
}

static td_status create(const td_backend_context *context, void *arg, void **self)
{
    (void)arg;
    td_status status = mpi_library_open();
    if (status)
        return status;
    struct mpi_group *group = calloc(1, sizeof *group);
    if (!group)
        return td_fail(TD_ERR_NOMEM, "backend mpi: out of memory");
    group->context = context;
    pthread_mutex_init(&group->lock, NULL);
    status = open_group(group);
    if (status) {
        close_group(group);
        return status;
    }
    atomic_fetch_add(&mpi.groups, 1);
    *self = group;
    return TD_OK;
}

static void destroy(void *self)
{
    struct mpi_group *group = self;
    if (!atomic_load(&group->failed))
        mpi_leave_meeting(group);
    mpi_messages_end(group);
    close_group(group);
    atomic_fetch_sub(&mpi.groups, 1);
}

/* ---- The table -------------------------------------------------------------------------------------------- */

static const char *const any_device[] = {"*", NULL};

static const td_backend_ops ops = {
    .create = create,
    .destroy = destroy,
    .broadcast = mpi_collective,
    .reduce = mpi_collective,
    .all_reduce = mpi_collective,
    .scatter = mpi_collective,
    .gather = mpi_collective,
    .all_gather = mpi_collective,
    .reduce_scatter = mpi_collective,
    .all_to_all = mpi_collective,
    .barrier = mpi_collective,
    .post = mpi_post,
    .run_message = mpi_run_message,
    .abort = abort_group,
    .has_uneven = true,
    .devices = any_device,
    .stage_devices = true,
    .breaks_with_members = true,
};

__attribute__((visibility("default"))) const td_backend_ops *td_mpi_backend(void);

const td_backend_ops *td_mpi_backend(void)
{
    return &ops;
}
