/* The shared memory of groups that this rank has left; see native.h.
 *
 * The first member of a communicator creates the memory, and the others request its descriptor. The first member
 * may leave a group, or the world, before all others have requested it. So the memory outlives the group, and
 * when the rank leaves the world it sends the descriptor to members that have not mapped the memory yet. */
#include "native/native.h"

#include "base/fail.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>

enum {
    PAUSE_NS = 500000,
    HAND_OVER_MS = 500,
    LEAVE_MS = 5000, /* for members that do not map it */
};

struct left {
    struct td__attachment attachment;
    struct td__shm_comm *comms; /* of destroyed groups: some members have not mapped the memory */
};

/* Whether a member that has not mapped the memory may still do so. */
static bool may_still_map(struct td__root *root, const struct td__shm_comm *everyone,
                          int world_rank)
{
    const struct td__shm_cell *cell = td__native_cell(everyone, world_rank);
    if (cell && atomic_load(&cell->leaving))
        return false;
    return kill(td__endpoint_pid(root->endpoint, world_rank), 0) == 0 || errno != ESRCH;
}

/* Returns soon, unless a process does not map it (it is stopped). */
static void hand_over(struct td__root *root, const struct td__shm_comm *everyone,
                      const struct td__shm_comm *comm, td__deadline end)
{
    for (int i = 0; i < comm->size; i++) {
        int rank = comm->world_ranks[i];
        if (atomic_load(&comm->cells[i].attached) || !may_still_map(root, everyone, rank) ||
            !td__endpoint_hand_over(root->endpoint, rank, comm->key, comm->fd,
                                    td__deadline_in_ms(HAND_OVER_MS)))
            continue;
        while (!atomic_load(&comm->cells[i].attached) && may_still_map(root, everyone, rank) &&
               !td__deadline_passed(end))
            td__sleep_ns(PAUSE_NS);
    }
}

static void destroy_next(struct left *left)
{
    struct td__shm_comm *comm = left->comms;
    left->comms = comm->next;
    td__shm_comm_destroy(comm);
}

static void leave(struct td__attachment *attachment, struct td__root *root)
{
    struct left *left = TD__CONTAINER(attachment, struct left, attachment);
    struct td__shm_comm *everyone = td__native_comm(root->first);
    td__deadline end = td__deadline_in_ms(LEAVE_MS);
    if (everyone)
        atomic_store(&everyone->cells[everyone->index].leaving, 1);
    if (everyone && everyone->index == 0 && !root->discarded)
        hand_over(root, everyone, everyone, end);
    while (left->comms) {
        if (!root->discarded)
            hand_over(root, everyone, left->comms, end);
        destroy_next(left);
    }
}

/* What is left: the communicator of the first group, if some rank has never mapped it. */
static void free_left(struct td__attachment *attachment)
{
    struct left *left = TD__CONTAINER(attachment, struct left, attachment);
    while (left->comms)
        destroy_next(left);
    free(left);
}

static const struct td__attachment_ops left_ops = {.leave = leave, .free = free_left};

td_status td__leave_prepare(struct td__root *root)
{
    pthread_mutex_lock(&root->lock);
    bool exists = td__root_attachment(root, &left_ops);
    struct left *left = exists ? NULL : calloc(1, sizeof *left);
    if (left) {
        left->attachment.ops = &left_ops;
        td__root_attach(root, &left->attachment);
    }
    pthread_mutex_unlock(&root->lock);
    return exists || left ? TD_OK : td__fail_nomem("group");
}

void td__leave_comm(struct td__root *root, struct td__shm_comm *comm)
{
    td__shm_comm_leave(comm);
    if (td__shm_all_attached(comm) || comm->index) {
        td__shm_comm_destroy(comm);
        return;
    }
    pthread_mutex_lock(&root->lock);
    struct left *left = TD__CONTAINER(td__root_attachment(root, &left_ops), struct left,
                                      attachment);
    comm->next = left->comms;
    left->comms = comm;
    pthread_mutex_unlock(&root->lock);
}
