/* Mirrors of shards; see fsdp_mirror.h. The memory of a rank:
 *
 *     | header | slot 0: plane 0, 1, 2 … | slot 1 |     plane 0 has the shards of all flats, plane 1 the optimizer's first
 *                                                       buffer of each parameter where the parameter is in plane 0, …
 *
 * It is as large as it can become; pages that are never written do not exist, but in files, whose blocks are allocated. */
#include "parallel/fsdp_mirror.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/map.h"
#include "group/process_group.h"
#include "group/root.h"
#include "optim/optimizer.h"
#include "parallel/fsdp_copies.h"
#include "parallel/fsdp_lane.h"
#include "parallel/fsdp_slices.h"
#include "peer/endpoint.h"
#include "tensor/file_memory.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HEADER = 4096 };

/* Step + 1 of each slot; 0: it is not whole. */
struct header {
    _Atomic int64_t steps[TD__MIRROR_SLOTS];
};

/* What this rank can read of another one's mirror. */
struct view {
    char *memory; /* header and slots; NULL: nothing */
    size_t bytes;
};

struct td__mirror {
    struct td__fsdp *fsdp;
    td_optimizer *optimizer;
    struct td__mirror_layout layout;
    struct td__mirror_place *places; /* of each rank */
    int shards;                      /* that a flat is cut into */
    int rank;
    struct view *views; /* of each rank: mapped, or kept for it */
    bool *keeps;        /* of each rank: the memory is this rank's own, and messages fill it */
    td_group *between;  /* for these messages; NULL: there is one host */
    int keeper;         /* the rank that keeps this one's; -1: none */
    td_bytes rest[TD__MIRROR_SLOTS];
    unsigned *versions[TD__MIRROR_SLOTS]; /* of each flat's shard + 1, as it was copied */
    struct td__copies *copies;            /* of the job */
    td_tensor **snapshots;                /* of the buffers that are on an accelerator; or NULL */
    size_t *counts;                       /* of the messages: 2 * size */
    int slot, planes, most_planes;
    const char *
        directory; /* where shards are in files, and so is the memory of mirrors; NULL: they are not */
    int64_t step;
    struct td__lane *lane;
    struct td__lane_job job;
    int64_t wait_ns;
};

/* ---- Sizes --------------------------------------------------------------------------------------------------- */

static size_t slot_bytes(const struct td__mirror *mirror, int rank)
{
    return td__mirror_offset(&mirror->layout, rank, mirror->most_planes, 0);
}

static size_t memory_bytes(const struct td__mirror *mirror, int rank)
{
    return HEADER + TD__MIRROR_SLOTS * slot_bytes(mirror, rank);
}

/* ---- What the others read ---------------------------------------------------------------------------------- */

const struct td__mirror_layout *td__mirror_layout(const struct td__mirror *mirror)
{
    return &mirror->layout;
}

int td__mirror_shards(const struct td__mirror *mirror)
{
    return mirror->shards;
}

int td__mirror_rank(const struct td__mirror *mirror)
{
    return mirror->rank;
}

static struct header *header_of(const struct td__mirror *mirror, int rank)
{
    return (void *)mirror->views[rank].memory;
}

int64_t td__mirror_step(const struct td__mirror *mirror, int rank, int slot)
{
    struct header *header = header_of(mirror, rank);
    return header ? atomic_load_explicit(&header->steps[slot], memory_order_acquire) : 0;
}

static char *slot_of(const struct td__mirror *mirror, int rank, int slot)
{
    return mirror->views[rank].memory + HEADER + (size_t)slot * slot_bytes(mirror, rank);
}

const char *td__mirror_slot(const struct td__mirror *mirror, int rank, int slot)
{
    return slot_of(mirror, rank, slot);
}

td_bytes td__mirror_rest(const struct td__mirror *mirror, int slot)
{
    return mirror->rest[slot];
}

/* ---- Copying ----------------------------------------------------------------------------------------------------- */

/* Elements of a storage from `first` on. */
static td_status add_copy(struct td__mirror *mirror, char *to, const struct td__storage *storage,
                          int64_t first, int64_t count, size_t width)
{
    struct td__place from = td__storage_place(storage, first * (int64_t)width);
    return td__copies_add(mirror->copies, to, &from, (size_t)count * width);
}

/* What this rank mirrors of a flat. */
struct range {
    int64_t first, count;
    char *to;     /* in plane 0 */
    size_t plane; /* bytes of a plane */
};

static td_status plan_buffers(struct td__mirror *mirror, const struct td__fsdp_param *param,
                              const struct range *range)
{
    const struct td__parameter *parameter = td__mirror_parameter(mirror->optimizer, param->tensor);
    size_t width = td_dtype_size(param->flat->dtype);
    int64_t begin = param->offset + param->first, end = begin + param->count;
    int64_t from = range->first > begin ? range->first : begin;
    int64_t last = range->first + range->count < end ? range->first + range->count : end;
    char *to = range->to + (size_t)(from - range->first) * width;
    for (int b = 0; from < last && b < TD__BUFFERS_MOST && parameter->buffers[b]; b++) {
        const td_tensor *buffer = parameter->buffers[b];
        TD_TRY(add_copy(mirror, to + (size_t)(1 + b) * range->plane, buffer->storage,
                        buffer->offset + from - begin, last - from, width));
    }
    return TD_OK;
}

static td_status plan_flat(struct td__mirror *mirror, int f)
{
    struct td__fsdp_flat *flat = mirror->layout.flats[f];
    struct range range = {.plane = td__mirror_offset(&mirror->layout, mirror->rank, 1, 0)};
    range.count = td__mirror_range(&mirror->layout, mirror->rank, f, &range.first);
    range.to = slot_of(mirror, mirror->rank, mirror->slot) +
               td__mirror_offset(&mirror->layout, mirror->rank, 0, f);
    unsigned version = 1 + atomic_load(&flat->shard->version);
    if (flat->requires_grad || mirror->versions[mirror->slot][f] != version)
        TD_TRY(add_copy(mirror, range.to, flat->shard,
                        range.first - flat->cuts[flat->unit->ranks->rank], range.count,
                        td_dtype_size(flat->dtype)));
    mirror->versions[mirror->slot][f] = version;
    for (int i = 0; i < flat->count && flat->requires_grad; i++)
        TD_TRY(plan_buffers(mirror, &flat->params[i], &range));
    return TD_OK;
}

/* The slot to the rank that keeps it, and those of others to here. */
static td_status exchange(struct td__mirror *mirror)
{
    int size = mirror->layout.size;
    size_t *from = mirror->counts, *to = from + size, total = 0;
    for (int r = 0; r < size; r++) {
        from[r] = mirror->keeps[r] ? td__mirror_offset(&mirror->layout, r, mirror->planes, 0) : 0;
        to[r] = r == mirror->keeper
                    ? td__mirror_offset(&mirror->layout, mirror->rank, mirror->planes, 0)
                    : 0;
        total += from[r];
        if (mirror->keeps[r])
            atomic_store(&header_of(mirror, r)->steps[mirror->slot], 0);
    }
    char *received = malloc(total + 1);
    if (!received)
        return td__fail_nomem("td_fsdp");
    td_status status = td_group_all_to_all_v(received, slot_of(mirror, mirror->rank, mirror->slot),
                                             from, to, TD_U8, mirror->between, NULL);
    const char *at = received;
    for (int r = 0; r < size && !status; at += from[r], r++) {
        if (!mirror->keeps[r])
            continue;
        memcpy(slot_of(mirror, r, mirror->slot), at, from[r]);
        atomic_store(&header_of(mirror, r)->steps[mirror->slot], mirror->step + 1);
    }
    free(received);
    return status;
}

static td_status copy_own(struct td__mirror *mirror)
{
    struct header *header = header_of(mirror, mirror->rank);
    atomic_store(&header->steps[mirror->slot], 0);
    td_status status = td__copies_run(mirror->copies);
    if (!status && td__copies_have_device(mirror->copies)) /* which may have run garbage */
        status = td__fsdp_group_state(mirror->fsdp);
    if (status) { /* frozen parameters are copied the next time, too */
        size_t flats = (size_t)mirror->layout.flat_count;
        memset(mirror->versions[mirror->slot], 0, flats * sizeof **mirror->versions);
        return status;
    }
    atomic_store(&header->steps[mirror->slot], mirror->step + 1);
    return TD_OK;
}

void td__mirror_abort(struct td__mirror *mirror)
{
    struct td__error error;
    td__error_save(&error);
    if (mirror && mirror->between)
        td_group_abort(mirror->between);
    td__error_restore(&error);
}

/* By the thread. Where it fails on one rank, the others do not wait in the exchange for it. */
static td_status run_copies(void *arg)
{
    struct td__mirror *mirror = arg;
    td_status status = copy_own(mirror);
    if (!status && mirror->between)
        status = exchange(mirror);
    if (status)
        td__mirror_abort(mirror);
    return status;
}

td_status td__mirror_wait(struct td__mirror *mirror)
{
    int64_t start = td__now_ns();
    td_status status = td__lane_wait(mirror->lane, &mirror->job);
    mirror->wait_ns += td__now_ns() - start;
    return status;
}

td_status td__mirror_commit(struct td__mirror *mirror, int64_t step)
{
    TD_TRY(td__mirror_wait(mirror));
    TD_TRY(td__fsdp_broadcast_buffers(mirror->fsdp)); /* rank 0 has those of slice 0 */
    mirror->planes = td__mirror_count_planes(mirror->optimizer);
    if (mirror->planes > mirror->most_planes)
        return td_fail(TD_ERR_STATE,
                       "td_fsdp: the optimizer has %d buffers of a parameter, and had %d when the "
                       "mirror of its state was made",
                       mirror->planes - 1, mirror->most_planes - 1);
    mirror->slot = (mirror->slot + 1) % TD__MIRROR_SLOTS;
    mirror->step = step;
    td__copies_clear(mirror->copies);
    for (int f = 0; f < mirror->layout.flat_count; f++)
        TD_TRY(plan_flat(mirror, f));
    TD_TRY(td__mirror_pack_rest(mirror->fsdp, mirror->optimizer, mirror->planes, mirror->snapshots,
                                mirror->copies, &mirror->rest[mirror->slot]));
    TD_TRY(td__copies_mark(mirror->copies));
    mirror->job.run = run_copies;
    mirror->job.arg = mirror;
    td__lane_submit(mirror->lane, &mirror->job);
    return TD_OK;
}

void td__mirror_times(const struct td__mirror *mirror, int64_t *copy_ns, int64_t *wait_ns)
{
    *copy_ns = td__lane_busy_ns(mirror->lane);
    *wait_ns = mirror->wait_ns;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------- */

static int host_of(const td_group *group, int rank)
{
    return td__endpoint_host(group->root->endpoint, group->ranks[rank]);
}

/* The next rank on another host; -1: there is none, or one has this rank's shard. */
static int keeper_of(const struct td__mirror *mirror, const td_group *group, int rank)
{
    int keeper = -1;
    for (int i = 1; i < group->size; i++) {
        int other = (rank + i) % group->size;
        if (host_of(group, other) == host_of(group, rank))
            continue;
        if (mirror->places[other].shard == mirror->places[rank].shard)
            return -1;
        keeper = keeper < 0 ? other : keeper;
    }
    return keeper;
}

/* The ranks of a host that have the same shard divide it. */
static void find_parts(struct td__mirror *mirror, const td_group *group)
{
    const int32_t(*places)[2] = (const void *)mirror->fsdp->units[0]->ranks->places;
    for (int r = 0; r < group->size; r++) {
        struct td__mirror_place *place = &mirror->places[r];
        *place = (struct td__mirror_place){.shard = places[r][0]};
        for (int other = 0; other < group->size; other++) {
            bool shares = host_of(group, other) == host_of(group, r) &&
                          places[other][0] == place->shard;
            place->parts += shares;
            place->part += shares && other < r;
        }
    }
}

/* fd -1: memory of this process. */
static td_status map_view(struct td__mirror *mirror, int rank, int fd)
{
    size_t bytes = memory_bytes(mirror, rank);
    int access = PROT_READ | (mirror->keeps[rank] || rank == mirror->rank ? PROT_WRITE : 0);
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    void *memory = mmap(NULL, bytes, access, flags, fd, 0);
    if (memory == MAP_FAILED)
        return td_fail(TD_ERR_NOMEM, "td_fsdp: no address space for %zu bytes of mirrors: %s",
                       bytes, td__errno_text(errno));
    mirror->views[rank] = (struct view){memory, bytes};
    return TD_OK;
}

static td_status open_own(struct td__mirror *mirror, int *fd)
{
    size_t bytes = memory_bytes(mirror, mirror->rank);
    if (mirror->directory) {
        *fd = td__file_of_memory(mirror->directory, bytes);
        return *fd < 0 ? td__error_status() : map_view(mirror, mirror->rank, *fd);
    }
    *fd = memfd_create("tandem-mirror", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || ftruncate(*fd, (off_t)bytes))
        return td_fail(TD_ERR_SYSTEM, "td_fsdp: no shared memory of %zu bytes for a mirror: %s",
                       bytes, td__errno_text(errno));
    return map_view(mirror, mirror->rank, *fd);
}

static td_status open_kept(struct td__mirror *mirror, int rank)
{
    int fd = -1;
    if (mirror->directory) {
        fd = td__file_of_memory(mirror->directory, memory_bytes(mirror, rank));
        if (fd < 0)
            return td__error_status();
    }
    td_status status = map_view(mirror, rank, fd);
    if (fd >= 0)
        close(fd);
    return status;
}

/* Each rank offers its memory under a key of its own. */
static uint64_t key_of(uint64_t mirrors, int rank)
{
    return td__hash(mirrors, &rank, sizeof rank);
}

static td_status open_others(struct td__mirror *mirror, const td_group *group, uint64_t key)
{
    for (int r = 0; r < group->size; r++) {
        int fd = -1;
        mirror->keeps[r] = r != mirror->rank && keeper_of(mirror, group, r) == mirror->rank;
        if (mirror->keeps[r])
            TD_TRY(open_kept(mirror, r));
        if (r == mirror->rank || host_of(group, r) != host_of(group, mirror->rank))
            continue;
        TD_TRY(td__endpoint_fetch(group->root->endpoint, group->ranks[r], key_of(key, r),
                                  td__deadline_in_ms(group->timeout_ms), NULL, &fd));
        td_status status = map_view(mirror, r, fd);
        close(fd);
        TD_TRY(status);
    }
    return TD_OK;
}

/* All ranks map what they can of each other. */
static td_status open_memory(struct td__mirror *mirror, td_group *group)
{
    static _Atomic uint64_t mirrors;
    uint64_t number = atomic_fetch_add(&mirrors, 1);
    TD_TRY(td_group_all_reduce(&number, &number, 1, TD_U64, TD_MAX, group, NULL));
    if (number >= atomic_load(&mirrors))
        atomic_store(&mirrors, number + 1);
    uint64_t key = td__hash(group->key ^ 0x6d6972726f727321u, &number, sizeof number);
    int fd = -1;
    td_status status = open_own(mirror, &fd);
    if (!status)
        status = td__endpoint_offer(group->root->endpoint, key_of(key, mirror->rank), fd);
    bool offers = !status;
    if (!status)
        status = open_others(mirror, group, key);
    int32_t failed = status != TD_OK;
    struct td__error error;
    td__error_save(&error);
    td_status agreed = td_group_all_reduce(&failed, &failed, 1, TD_I32, TD_MAX, group, NULL);
    if (offers)
        td__endpoint_forget(group->root->endpoint, key_of(key, mirror->rank));
    if (fd >= 0)
        close(fd);
    if (status)
        return td__error_restore(&error);
    if (agreed)
        return agreed;
    return failed ? td_fail(TD_ERR_NOMEM, "td_fsdp: a rank has no memory for its mirror") : TD_OK;
}

/* ---- Making and freeing --------------------------------------------------------------------------------------- */

static td_status check_flat(const struct td__mirror *mirror, const struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count && flat->requires_grad; i++)
        if (!td__mirror_parameter(mirror->optimizer, flat->params[i].tensor))
            return td_fail(TD_ERR_INVALID,
                           "td_fsdp: the optimizer does not have the parameter \"%s\"; a "
                           "mirror is of a model and its optimizer",
                           flat->params[i].name);
    return TD_OK;
}

static td_status check(const struct td__mirror *mirror)
{
    const struct td__fsdp *fsdp = mirror->fsdp;
    for (int u = 0; u < fsdp->count; u++) {
        const struct td__fsdp_unit *unit = fsdp->units[u];
        if (unit->ranks != fsdp->units[0]->ranks)
            return td_fail(TD_ERR_UNSUPPORTED,
                           "td_fsdp: the unit \"%s\" was made by a call of td_fsdp() for an inner "
                           "module; a mirror is of the units of one call",
                           unit->name);
        for (int f = 0; f < unit->flat_count; f++)
            TD_TRY(check_flat(mirror, &unit->flats[f]));
    }
    return TD_OK;
}

/* All ranks have the same flats in files. */
static const char *find_directory(const struct td__fsdp *fsdp)
{
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++)
            if (fsdp->units[u]->flats[f].in_file)
                return fsdp->options.offload.directory;
    return NULL;
}

static td_status allocate(struct td__mirror *mirror, int size)
{
    mirror->views = calloc((size_t)size, sizeof *mirror->views);
    mirror->keeps = calloc((size_t)size, sizeof *mirror->keeps);
    mirror->counts = calloc(2 * (size_t)size, sizeof *mirror->counts);
    mirror->places = calloc((size_t)size, sizeof *mirror->places);
    mirror->snapshots = calloc((size_t)mirror->fsdp->buffer_count + 1, sizeof(td_tensor *));
    bool has = mirror->views && mirror->keeps && mirror->counts && mirror->places &&
               mirror->snapshots;
    return has ? TD_OK : td__fail_nomem("td_fsdp");
}

static td_status fill(struct td__mirror *mirror)
{
    TD_TRY(check(mirror));
    mirror->most_planes = 1 + mirror->optimizer->kind->buffer_count(&mirror->optimizer->numbers);
    mirror->directory = find_directory(mirror->fsdp);
    struct td__fsdp_ranks *ranks = mirror->fsdp->units[0]->ranks;
    td_group *group = ranks->group;
    TD_TRY(allocate(mirror, group->size));
    TD_TRY(td__fsdp_find_places(ranks));
    find_parts(mirror, group);
    mirror->rank = group->rank;
    mirror->shards = ranks->size;
    TD_TRY(td__mirror_lay_out(mirror->fsdp, mirror->places, group->size, ranks->size,
                              &mirror->layout));
    for (int s = 0; s < TD__MIRROR_SLOTS; s++)
        if (!(mirror->versions[s] = calloc((size_t)mirror->layout.flat_count + 1,
                                           sizeof **mirror->versions)))
            return td__fail_nomem("td_fsdp");
    TD_TRY(open_memory(mirror, group));
    mirror->keeper = keeper_of(mirror, group, group->rank);
    bool keep = false;
    for (int r = 0; r < group->size; r++)
        keep |= keeper_of(mirror, group, r) >= 0;
    if (keep)
        TD_TRY(td_group_split(group, 0, 0, NULL, &mirror->between));
    mirror->copies = td__copies_create();
    mirror->lane = mirror->copies ? td__lane_create("td-mirror", 1) : NULL;
    return mirror->lane ? TD_OK : td__error_status();
}

td_status td__mirror_create(td_module *module, td_optimizer *optimizer, struct td__mirror **out)
{
    struct td__mirror *mirror = calloc(1, sizeof *mirror);
    if (!mirror)
        return td__fail_nomem("td_fsdp");
    mirror->fsdp = td__fsdp_of(module);
    mirror->optimizer = optimizer;
    td_status status = fill(mirror);
    if (status)
        td__mirror_free(mirror);
    else
        *out = mirror;
    return status;
}

void td__mirror_free(struct td__mirror *mirror)
{
    if (!mirror)
        return;
    struct td__error error;
    td__error_save(&error);
    td__lane_destroy(mirror->lane);
    td_group_destroy(mirror->between);
    for (int r = 0; mirror->views && r < mirror->layout.size; r++)
        if (mirror->views[r].memory)
            munmap(mirror->views[r].memory, mirror->views[r].bytes);
    for (int s = 0; s < TD__MIRROR_SLOTS; s++) {
        free(mirror->rest[s].data);
        free(mirror->versions[s]);
    }
    for (int i = 0; mirror->snapshots && i < mirror->fsdp->buffer_count; i++)
        td_tensor_release(mirror->snapshots[i]);
    td__copies_free(mirror->copies);
    td__mirror_layout_free(&mirror->layout);
    free(mirror->places);
    free(mirror->snapshots);
    free(mirror->views);
    free(mirror->keeps);
    free(mirror->counts);
    free(mirror);
    td__error_restore(&error);
}
