/* The control memory of a comm: rank 0 of the comm creates it, the others map it on their first call; see
 * shm_comm.h. */
#include "shm/shm_comm.h"

#include "base/fail.h"
#include "base/file_limit.h"
#include "base/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OTHERS_MS = 300 };    /* to fetch the memory from another rank than rank 0 of the comm */
enum { FIRST_POLL_NS = 54 }; /* after a rank has announced its call: see shm_comm.c */

/* The offsets of the parts of the memory. */
struct layout {
    size_t cells, slots, stages, extra, end;
};

static struct layout layout_for(int size, size_t extra)
{
    struct layout layout;
    size_t n = (size_t)size;
    layout.cells = td__whole_pages(sizeof(struct td__shm_head));
    layout.slots = td__whole_pages(layout.cells + n * sizeof(struct td__shm_cell));
    layout.stages = td__whole_pages(layout.slots + n * TD__SHM_DEPTH * sizeof(struct td__shm_slot));
    layout.extra = layout.stages + n * TD__PIECES * TD__PIECE_BYTES;
    layout.end = td__whole_pages(layout.extra + extra);
    return layout;
}

static td_status map_memory(struct td__shm_comm *comm, int fd)
{
    struct layout layout = layout_for(comm->size, comm->extra_bytes);
    char *base = mmap(NULL, layout.end, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED)
        return td_fail(TD_ERR_NOMEM, "cannot map the control memory of a group: %s",
                       td__errno_text(errno));
    comm->bytes = layout.end;
    comm->head = (struct td__shm_head *)base;
    comm->cells = (struct td__shm_cell *)(base + layout.cells);
    comm->slots = (struct td__shm_slot *)(base + layout.slots);
    comm->stages = base + layout.stages;
    comm->extra = base + layout.extra;
    return TD_OK;
}

int td__shm_local_size(struct td__endpoint *endpoint)
{
    int here = 0, host = td__endpoint_host(endpoint, td__endpoint_rank(endpoint));
    for (int r = 0; r < td__endpoint_size(endpoint); r++)
        here += td__endpoint_host(endpoint, r) == host;
    return here;
}

/* The memory is mapped, and its head is written: other members may fetch it from this rank, too. */
static td_status attach(struct td__shm_comm *comm)
{
    comm->oversubscribed = comm->head->oversubscribed;
    comm->pauses = comm->oversubscribed ? 0 : td__pauses_in(FIRST_POLL_NS);
    td__shm_publish_nonce(comm);
    atomic_store(&comm->cells[comm->index].attached, 1);
    TD_TRY(td__endpoint_offer(comm->endpoint, comm->key, comm->fd));
    atomic_store(&comm->attached, true);
    return TD_OK;
}

static td_status create_memory(struct td__shm_comm *comm)
{
    struct layout layout = layout_for(comm->size, comm->extra_bytes);
    comm->fd = memfd_create("tandem-group", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (comm->fd < 0 || td__file_truncate(comm->fd, (off_t)layout.end) ||
        fcntl(comm->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
        return td_fail(TD_ERR_SYSTEM, "cannot create the control memory of a group: %s",
                       td__errno_text(errno));
    TD_TRY(map_memory(comm, comm->fd));
    comm->head->oversubscribed = td__crowd(td__shm_local_size(comm->endpoint));
    return attach(comm);
}

/* Fetches the fd from rank 0 of the comm; if that has ended, from any member that has mapped the memory. */
static td_status find_memory(struct td__shm_comm *comm, td__deadline deadline, int *fd)
{
    td_status status = td__endpoint_fetch(comm->endpoint, comm->world_ranks[0], comm->key, deadline,
                                          &comm->given_up, fd);
    if (status != TD_ERR_PEER)
        return status;
    struct td__error error;
    td__error_save(&error);
    for (int i = 1; i < comm->size; i++)
        if (i != comm->index &&
            td__endpoint_presence(comm->endpoint, comm->world_ranks[i]) == TD__PRESENT &&
            !td__endpoint_fetch_now(comm->endpoint, comm->world_ranks[i], comm->key,
                                    td__deadline_earlier(deadline, td__deadline_in_ms(OTHERS_MS)),
                                    fd))
            return TD_OK;
    return td__error_restore(&error);
}

static td_status fetch_memory(struct td__shm_comm *comm, td__deadline deadline)
{
    struct stat status;
    int fd;
    TD_TRY(find_memory(comm, deadline, &fd));
    if (fstat(fd, &status) ||
        (size_t)status.st_size != layout_for(comm->size, comm->extra_bytes).end) {
        close(fd);
        return td_fail(TD_ERR_MISMATCH,
                       "%s created this group with other members than rank %d, or runs another "
                       "version of Tandem",
                       td__endpoint_describe(comm->endpoint, comm->world_ranks[0]),
                       td__endpoint_rank(comm->endpoint));
    }
    td_status mapped = map_memory(comm, fd);
    if (mapped) {
        close(fd);
        return mapped;
    }
    comm->fd = fd;
    return attach(comm);
}

td_status td__shm_comm_attach(struct td__shm_comm *comm, td__deadline deadline)
{
    if (atomic_load_explicit(&comm->attached, memory_order_acquire))
        return TD_OK;
    td_status status = TD_OK;
    pthread_mutex_lock(&comm->attach_lock);
    if (!atomic_load(&comm->attached))
        status = fetch_memory(comm, deadline);
    pthread_mutex_unlock(&comm->attach_lock);
    return status;
}

bool td__shm_all_attached(struct td__shm_comm *comm)
{
    for (int i = 0; i < comm->size; i++)
        if (!comm->cells || !atomic_load(&comm->cells[i].attached))
            return false;
    return true;
}

/* For the endpoint: a member has ended or left, or this rank's group was aborted. */
static void wake(void *arg)
{
    struct td__shm_comm *comm = arg;
    if (atomic_load(&comm->attached))
        td__wait_event_signal(&comm->cells[comm->index].event);
}

td_status td__shm_comm_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                              int size, int index, size_t extra_bytes,
                              struct td__shm_comm **comm_out)
{
    struct td__shm_comm *comm = calloc(1, sizeof *comm);
    if (!comm)
        return td__fail_nomem("group");
    *comm = (struct td__shm_comm){.endpoint = endpoint,
                                  .key = key,
                                  .size = size,
                                  .index = index,
                                  .extra_bytes = extra_bytes,
                                  .fd = -1};
    comm->fills_host = size == td__shm_local_size(endpoint);
    pthread_mutex_init(&comm->attach_lock, NULL);
    size_t n = (size_t)size;
    comm->world_ranks = malloc(n * sizeof *world_ranks);
    comm->buffers = calloc(4 * n, sizeof *comm->buffers);
    comm->factors = calloc(n, sizeof *comm->factors);
    comm->views = calloc(n, sizeof *comm->views);
    td_status status = TD_OK;
    if (!comm->world_ranks || !comm->buffers || !comm->factors || !comm->views) {
        status = td__fail_nomem("group");
    } else {
        memcpy(comm->world_ranks, world_ranks, n * sizeof *world_ranks);
        comm->sources = (const void **)comm->buffers;
        comm->inputs = (const void **)comm->buffers + n;
        comm->targets = comm->buffers + 2 * n;
        comm->outputs = comm->buffers + 3 * n;
    }
    if (!status && index == 0)
        status = create_memory(comm);
    if (status) {
        td__shm_comm_destroy(comm);
        return status;
    }
    comm->waiter = (struct td__endpoint_waiter){.wake = wake, .arg = comm};
    td__endpoint_add_waiter(endpoint, &comm->waiter);
    *comm_out = comm;
    return TD_OK;
}

void td__shm_comm_leave(struct td__shm_comm *comm)
{
    if (!atomic_load(&comm->attached))
        return;
    atomic_store(&comm->cells[comm->index].leaving, 1);
    for (int i = 0; i < comm->size; i++)
        td__wait_event_signal(&comm->cells[i].event);
}

void td__shm_comm_destroy(struct td__shm_comm *comm)
{
    td__endpoint_remove_waiter(comm->endpoint, &comm->waiter);
    td__endpoint_forget(comm->endpoint, comm->key);
    if (comm->head)
        munmap(comm->head, comm->bytes);
    if (comm->fd >= 0)
        close(comm->fd);
    pthread_mutex_destroy(&comm->attach_lock);
    free(comm->world_ranks);
    free(comm->buffers);
    free(comm->factors);
    free(comm->views);
    free(comm);
}
