/* The memory that the ranks of a host share: made by the first, mapped by the others on their first call;
 * see team.h. */
#include "group/team.h"

#include "base/fail.h"
#include "base/file_limit.h"
#include "group/messages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OTHERS_MS = 300 };    /* for one that may have the memory, too */
enum { FIRST_LOOK_NS = 54 }; /* after a call was announced: see team.c */

static size_t up_to_page(size_t size)
{
    return (size + 4095) & ~(size_t)4095;
}

/* Where the parts of the memory begin. */
struct layout {
    size_t cells, slots, stages, messages, end;
};

static struct layout layout_for(int size)
{
    struct layout layout;
    size_t n = (size_t)size;
    layout.cells = up_to_page(sizeof(struct td__team_head));
    layout.slots = up_to_page(layout.cells + n * sizeof(struct td__cell));
    layout.stages = up_to_page(layout.slots + n * TD__TEAM_DEPTH * sizeof(struct td__slot));
    layout.messages = layout.stages + n * TD__PIECES * TD__PIECE_BYTES;
    layout.end = up_to_page(layout.messages + td__messages_shared_size(size));
    return layout;
}

static td_status map_memory(struct td__team *team, int fd)
{
    struct layout layout = layout_for(team->size);
    char *base = mmap(NULL, layout.end, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED)
        return td__fail(TD_ERR_NOMEM, "cannot map the control memory of a group: %s",
                        td__errno_text(errno));
    team->bytes = layout.end;
    team->head = (struct td__team_head *)base;
    team->cells = (struct td__cell *)(base + layout.cells);
    team->slots = (struct td__slot *)(base + layout.slots);
    team->stages = base + layout.stages;
    team->messages = base + layout.messages;
    return TD_OK;
}

int td__team_neighbours(struct td__endpoint *endpoint)
{
    int here = 0, host = td__endpoint_host(endpoint, td__endpoint_rank(endpoint));
    for (int r = 0; r < td__endpoint_size(endpoint); r++)
        here += td__endpoint_host(endpoint, r) == host;
    return here;
}

static void learn_crowd(struct td__team *team)
{
    team->crowded = team->head->crowded;
    team->pauses = team->crowded ? 0 : td__pauses_in(FIRST_LOOK_NS);
}

static td_status make_memory(struct td__team *team)
{
    struct layout layout = layout_for(team->size);
    team->fd = memfd_create("tandem-group", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (team->fd < 0 || td__file_truncate(team->fd, (off_t)layout.end) ||
        fcntl(team->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
        return td__fail(TD_ERR_SYSTEM, "cannot make the control memory of a group: %s",
                        td__errno_text(errno));
    TD_TRY(map_memory(team, team->fd));
    team->head->size = (uint32_t)team->size;
    team->head->crowded = td__crowd(td__team_neighbours(team->endpoint));
    learn_crowd(team);
    td__team_show_nonce(team);
    atomic_store(&team->cells[0].attached, 1);
    atomic_store(&team->attached, true);
    return td__endpoint_offer(team->endpoint, team->key, team->fd);
}

/* The first member has it; where that is gone, somebody who had got it before. */
static td_status find_memory(struct td__team *team, td__deadline deadline, int *fd)
{
    td_status status = td__endpoint_fetch(team->endpoint, team->world_ranks[0], team->key, deadline,
                                          &team->given_up, fd);
    if (status != TD_ERR_PEER)
        return status;
    char why[512];
    snprintf(why, sizeof why, "%s", td_last_error());
    for (int i = 1; i < team->size; i++)
        if (i != team->index &&
            td__endpoint_presence(team->endpoint, team->world_ranks[i]) == TD__PRESENT &&
            !td__endpoint_fetch_now(team->endpoint, team->world_ranks[i], team->key,
                                    td__deadline_earlier(deadline, td__deadline_in_ms(OTHERS_MS)),
                                    fd))
            return TD_OK;
    return td__fail(TD_ERR_PEER, "%s", why);
}

static td_status fetch_memory(struct td__team *team, td__deadline deadline)
{
    struct stat status;
    int fd;
    TD_TRY(find_memory(team, deadline, &fd));
    if (fstat(fd, &status) || (size_t)status.st_size != layout_for(team->size).end) {
        close(fd);
        return td__fail(TD_ERR_MISMATCH,
                        "%s made this group with other members than rank %d, or runs another "
                        "version of Tandem",
                        td__endpoint_describe(team->endpoint, team->world_ranks[0]),
                        td__endpoint_rank(team->endpoint));
    }
    td_status mapped = map_memory(team, fd);
    if (mapped) {
        close(fd);
        return mapped;
    }
    team->fd = fd;
    learn_crowd(team);
    return td__endpoint_offer(team->endpoint, team->key, fd);
}

td_status td__team_attach(struct td__team *team, td__deadline deadline)
{
    if (atomic_load_explicit(&team->attached, memory_order_acquire))
        return TD_OK;
    td_status status = TD_OK;
    pthread_mutex_lock(&team->attach_lock);
    if (!atomic_load(&team->attached)) {
        status = fetch_memory(team, deadline);
        if (!status) {
            td__team_show_nonce(team);
            atomic_store(&team->cells[team->index].attached, 1);
            atomic_store(&team->attached, true);
        }
    }
    pthread_mutex_unlock(&team->attach_lock);
    return status;
}

bool td__team_all_attached(struct td__team *team)
{
    for (int i = 0; i < team->size; i++)
        if (!team->cells || !atomic_load(&team->cells[i].attached))
            return false;
    return true;
}

td_status td__team_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                          int size, int index, struct td__team **team_out)
{
    struct td__team *team = calloc(1, sizeof *team);
    if (!team)
        return td__fail_nomem("group");
    *team = (struct td__team){
        .endpoint = endpoint, .key = key, .size = size, .index = index, .fd = -1};
    team->fills_host = size == td__team_neighbours(endpoint);
    pthread_mutex_init(&team->attach_lock, NULL);
    team->world_ranks = malloc(sizeof *world_ranks * (size_t)size);
    team->sources = calloc((size_t)size, sizeof *team->sources);
    team->targets = calloc((size_t)size, sizeof *team->targets);
    team->inputs = calloc((size_t)size, sizeof *team->inputs);
    team->outputs = calloc((size_t)size, sizeof *team->outputs);
    team->factors = calloc((size_t)size, sizeof *team->factors);
    td_status status = TD_OK;
    if (!team->world_ranks || !team->sources || !team->targets || !team->inputs || !team->outputs ||
        !team->factors)
        status = td__fail_nomem("group");
    else
        memcpy(team->world_ranks, world_ranks, sizeof *world_ranks * (size_t)size);
    if (!status && index == 0)
        status = make_memory(team);
    if (status) {
        td__team_destroy(team);
        return status;
    }
    *team_out = team;
    return TD_OK;
}

void td__team_leave(struct td__team *team)
{
    if (!atomic_load(&team->attached))
        return;
    atomic_store(&team->cells[team->index].leaving, 1);
    for (int i = 0; i < team->size; i++)
        td__bell_ring(&team->cells[i].bell);
}

void td__team_destroy(struct td__team *team)
{
    td__endpoint_forget(team->endpoint, team->key);
    if (team->head)
        munmap(team->head, team->bytes);
    if (team->fd >= 0)
        close(team->fd);
    pthread_mutex_destroy(&team->attach_lock);
    free(team->world_ranks);
    free(team->sources);
    free(team->targets);
    free(team->inputs);
    free(team->outputs);
    free(team->factors);
    free(team);
}
