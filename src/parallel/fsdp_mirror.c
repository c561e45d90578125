/* Mirrors of shards; see fsdp_mirror.h. The memory of a rank:
 *
 *     | header | slot 0: plane 0, 1, 2 … | slot 1 |     plane 0 has the shards of all flats, plane 1 the optimizer's first
 *                                                       buffer of each parameter where the parameter is in plane 0, …
 *
 * It is as large as it can become; pages that are never written do not exist. */
#include "parallel/fsdp_mirror.h"

#include "base/buffer.h"
#include "base/clock.h"
#include "base/fail.h"
#include "base/map.h"
#include "group/process_group.h"
#include "group/root.h"
#include "optim/optimizer.h"
#include "parallel/fsdp_lane.h"
#include "peer/endpoint.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LINE = 64, HEADER = 4096 };

/* Step + 1 of each slot; 0: it is not whole. */
struct header {
    _Atomic int64_t steps[TD__MIRROR_SLOTS];
};

/* What this rank can read of another one's mirror. */
struct view {
    char *memory; /* header and slots; NULL: nothing */
    size_t bytes;
};

struct copy {
    char *to;
    const char *from;
    size_t bytes;
};

struct td__mirror {
    struct td__fsdp *fsdp;
    td_optimizer *optimizer;
    struct td__mirror_layout layout;
    int rank;
    struct view *views; /* of each rank: mapped, or kept for it */
    bool *keeps;        /* of each rank: the memory is this rank's own, and messages fill it */
    td_group *between;  /* for these messages; NULL: there is one host */
    int keeper;         /* the rank that keeps this one's */
    td_bytes rest[TD__MIRROR_SLOTS];
    unsigned *versions[TD__MIRROR_SLOTS]; /* of each flat's shard + 1, as it was copied */
    struct copy *copies;                  /* of the job */
    int copy_count, copy_capacity;
    size_t *counts; /* of the messages: 2 * size */
    int slot, planes;
    int64_t step;
    struct td__lane *lane;
    struct td__lane_job job;
    int64_t wait_ns;
};

/* ---- Layout -------------------------------------------------------------------------------------------------- */

static size_t align(size_t bytes)
{
    return (bytes + LINE - 1) / LINE * LINE;
}

static int count_flats(const struct td__fsdp *fsdp)
{
    int count = 0;
    for (int u = 0; u < fsdp->count; u++)
        count += fsdp->units[u]->flat_count;
    return count;
}

td_status td__mirror_lay_out(struct td__fsdp *fsdp, int size, struct td__mirror_layout *layout)
{
    int count = count_flats(fsdp);
    *layout = (struct td__mirror_layout){
        .size = size,
        .flats = calloc((size_t)count + 1, sizeof *layout->flats),
        .cuts = calloc((size_t)count + 1, sizeof *layout->cuts),
    };
    if (!layout->flats || !layout->cuts)
        return td__fail_nomem("td_fsdp");
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            struct td__fsdp_flat *flat = &fsdp->units[u]->flats[f];
            layout->flats[layout->flat_count] = flat;
            TD_TRY(td__flat_cut_for(flat, size, &layout->cuts[layout->flat_count]));
            layout->flat_count++;
        }
    return TD_OK;
}

void td__mirror_layout_free(struct td__mirror_layout *layout)
{
    for (int i = 0; layout->cuts && i <= layout->flat_count; i++)
        free(layout->cuts[i]);
    free(layout->cuts);
    free(layout->flats);
}

static size_t plane_bytes(const struct td__mirror_layout *layout, int rank, int flats)
{
    size_t bytes = 0;
    for (int i = 0; i < flats; i++)
        bytes += align((size_t)(layout->cuts[i][rank + 1] - layout->cuts[i][rank]) *
                       td_dtype_size(layout->flats[i]->dtype));
    return bytes;
}

size_t td__mirror_offset(const struct td__mirror_layout *layout, int rank, int plane, int flat)
{
    return (size_t)plane * plane_bytes(layout, rank, layout->flat_count) +
           plane_bytes(layout, rank, flat);
}

static size_t slot_bytes(const struct td__mirror *mirror, int rank)
{
    return td__mirror_offset(&mirror->layout, rank, TD__MIRROR_PLANES, 0);
}

static size_t memory_bytes(const struct td__mirror *mirror, int rank)
{
    return HEADER + TD__MIRROR_SLOTS * slot_bytes(mirror, rank);
}

/* ---- What the others read ---------------------------------------------------------------------------------- */

int td__mirror_size(const struct td__mirror *mirror)
{
    return mirror->layout.size;
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

/* ---- The rest -------------------------------------------------------------------------------------------------- */

/* The buffers that a parameter has. */
static int buffers_of(const struct td__parameter *parameter)
{
    int count = 0;
    while (count < TD__BUFFERS_MOST && parameter->buffers[count])
        count++;
    return count;
}

static int count_planes(const td_optimizer *optimizer)
{
    int most = 0;
    for (int i = 0; i < optimizer->count; i++) {
        int count = buffers_of(&optimizer->parameters[i]);
        most = count > most ? count : most;
    }
    return 1 + most;
}

static td_status pack_rest(const struct td__mirror *mirror, td_bytes *rest)
{
    const td_optimizer *optimizer = mirror->optimizer;
    struct td__buffer packed = {0};
    td__buffer_put_u32(&packed, (uint32_t)mirror->planes);
    td__buffer_put(&packed, &optimizer->numbers, sizeof optimizer->numbers);
    td__buffer_put(&packed, optimizer->groups,
                   (size_t)optimizer->group_count * sizeof *optimizer->groups);
    for (int i = 0; i < optimizer->count; i++) {
        td__buffer_put_u64(&packed, (uint64_t)optimizer->parameters[i].steps);
        td__buffer_put_u8(&packed, (uint8_t)buffers_of(&optimizer->parameters[i]));
    }
    td_status status = TD_OK;
    for (int i = 0; i < mirror->fsdp->buffer_count && !status; i++) {
        td_tensor *dense = td__contiguous(mirror->fsdp->buffers[i]);
        status = dense ? TD_OK : td__error_status();
        if (dense)
            td__buffer_put(&packed, td_tensor_data(dense), td_tensor_nbytes(dense));
        td_tensor_release(dense);
    }
    if (!status && packed.failed)
        status = td__fail_nomem("td_fsdp");
    if (status) {
        td__buffer_free(&packed);
        return status;
    }
    free(rest->data);
    *rest = (td_bytes){.data = (char *)packed.data, .size = packed.size};
    return TD_OK;
}

td_status td__mirror_read_planes(td_bytes rest, int *planes)
{
    struct td__reader reader = td__reader_of(rest.data, rest.size);
    *planes = (int)td__reader_u32(&reader);
    if (reader.failed || *planes < 1 || *planes > TD__MIRROR_PLANES)
        return td_fail(TD_ERR_MISMATCH, "td_fsdp: what a rank has sent is no state of a model");
    return TD_OK;
}

static td_status get(struct td__reader *reader, void *to, size_t bytes)
{
    if ((size_t)(reader->end - reader->at) < bytes)
        return td_fail(TD_ERR_MISMATCH,
                       "td_fsdp: this rank has another model or optimizer than the "
                       "ranks that have trained it");
    memcpy(to, reader->at, bytes);
    reader->at += bytes;
    return TD_OK;
}

static td_status set_buffer(td_tensor *buffer, struct td__reader *reader)
{
    td_tensor *dense = td__empty("td_fsdp", buffer->layout.shape, buffer->layout.ndim,
                                 buffer->layout.dtype, buffer->storage->device);
    td_status status = dense ? get(reader, td_tensor_data(dense), td_tensor_nbytes(dense))
                             : td__error_status();
    if (!status && buffer->layout.numel)
        status = td__tensor_copy(buffer, dense);
    if (!status)
        td__tensor_bump_version(buffer);
    td_tensor_release(dense);
    return status;
}

/* Buffers of the optimizer that the state has not are dropped; the others are there. */
static td_status set_parameter(struct td__parameter *parameter, struct td__reader *reader)
{
    parameter->steps = (int64_t)td__reader_u64(reader);
    int count = td__reader_u8(reader);
    for (int b = count; b < TD__BUFFERS_MOST; b++) {
        td_tensor_release(parameter->buffers[b]);
        parameter->buffers[b] = NULL;
    }
    return TD_OK;
}

td_status td__mirror_set_rest(struct td__fsdp *fsdp, td_optimizer *optimizer, td_bytes rest)
{
    struct td__reader reader = td__reader_of(rest.data, rest.size);
    td__reader_u32(&reader);
    TD_TRY(get(&reader, &optimizer->numbers, sizeof optimizer->numbers));
    TD_TRY(get(&reader, optimizer->groups,
               (size_t)optimizer->group_count * sizeof *optimizer->groups));
    for (int i = 0; i < optimizer->count; i++)
        TD_TRY(set_parameter(&optimizer->parameters[i], &reader));
    for (int i = 0; i < fsdp->buffer_count; i++)
        TD_TRY(set_buffer(fsdp->buffers[i], &reader));
    if (!td__reader_done(&reader))
        return td_fail(TD_ERR_MISMATCH,
                       "td_fsdp: this rank has another model or optimizer than the "
                       "ranks that have trained it");
    return TD_OK;
}

/* ---- Copying ----------------------------------------------------------------------------------------------------- */

static td_status add_copy(struct td__mirror *mirror, char *to, const void *from, size_t bytes)
{
    if (!bytes) /* this rank has nothing of it */
        return TD_OK;
    if (mirror->copy_count == mirror->copy_capacity) {
        int capacity = 2 * mirror->copy_capacity + 64;
        struct copy *copies = realloc(mirror->copies, (size_t)capacity * sizeof *copies);
        if (!copies)
            return td__fail_nomem("td_fsdp");
        mirror->copies = copies;
        mirror->copy_capacity = capacity;
    }
    mirror->copies[mirror->copy_count++] = (struct copy){to, from, bytes};
    return TD_OK;
}

static const struct td__parameter *parameter_of(const td_optimizer *optimizer,
                                                const td_tensor *tensor)
{
    for (int i = 0; i < optimizer->count; i++)
        if (optimizer->parameters[i].tensor == tensor)
            return &optimizer->parameters[i];
    return NULL;
}

static td_status plan_flat(struct td__mirror *mirror, int f)
{
    struct td__fsdp_flat *flat = mirror->layout.flats[f];
    const struct td__mirror_layout *layout = &mirror->layout;
    char *slot = slot_of(mirror, mirror->rank, mirror->slot);
    size_t width = td_dtype_size(flat->dtype);
    unsigned version = 1 + atomic_load(&flat->shard->version);
    if (flat->requires_grad || mirror->versions[mirror->slot][f] != version)
        TD_TRY(add_copy(mirror, slot + td__mirror_offset(layout, mirror->rank, 0, f),
                        flat->shard->data, (size_t)td__flat_shard_count(flat) * width));
    mirror->versions[mirror->slot][f] = version;
    for (int i = 0; i < flat->count && flat->requires_grad; i++) {
        const struct td__fsdp_param *param = &flat->params[i];
        const struct td__parameter *parameter = parameter_of(mirror->optimizer, param->tensor);
        for (int b = 0; b < buffers_of(parameter) && param->count; b++)
            TD_TRY(add_copy(mirror,
                            slot + td__mirror_offset(layout, mirror->rank, 1 + b, f) +
                                (size_t)param->at * width,
                            td_tensor_data(parameter->buffers[b]), (size_t)param->count * width));
    }
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

/* By the thread. */
static td_status run_copies(void *arg)
{
    struct td__mirror *mirror = arg;
    struct header *header = header_of(mirror, mirror->rank);
    atomic_store(&header->steps[mirror->slot], 0);
    for (int i = 0; i < mirror->copy_count; i++)
        memcpy(mirror->copies[i].to, mirror->copies[i].from, mirror->copies[i].bytes);
    atomic_store(&header->steps[mirror->slot], mirror->step + 1);
    return mirror->between ? exchange(mirror) : TD_OK;
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
    mirror->planes = count_planes(mirror->optimizer);
    mirror->slot = (mirror->slot + 1) % TD__MIRROR_SLOTS;
    mirror->step = step;
    mirror->copy_count = 0;
    for (int f = 0; f < mirror->layout.flat_count; f++)
        TD_TRY(plan_flat(mirror, f));
    TD_TRY(pack_rest(mirror, &mirror->rest[mirror->slot]));
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

/* The next rank on another host; -1: there is none. */
static int keeper_of(const td_group *group, int rank)
{
    for (int i = 1; i < group->size; i++)
        if (host_of(group, (rank + i) % group->size) != host_of(group, rank))
            return (rank + i) % group->size;
    return -1;
}

static td_status map_view(struct td__mirror *mirror, int rank, int fd)
{
    size_t bytes = memory_bytes(mirror, rank);
    int access = PROT_READ | (fd < 0 || rank == mirror->rank ? PROT_WRITE : 0);
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
    *fd = memfd_create("tandem-mirror", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || ftruncate(*fd, (off_t)bytes))
        return td_fail(TD_ERR_SYSTEM, "td_fsdp: no shared memory of %zu bytes for a mirror: %s",
                       bytes, td__errno_text(errno));
    return map_view(mirror, mirror->rank, *fd);
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
        mirror->keeps[r] = r != mirror->rank && keeper_of(group, r) == mirror->rank;
        if (mirror->keeps[r])
            TD_TRY(map_view(mirror, r, -1));
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

static td_status check(const struct td__mirror *mirror)
{
    const struct td__fsdp *fsdp = mirror->fsdp;
    for (int u = 0; u < fsdp->count; u++) {
        const struct td__fsdp_unit *unit = fsdp->units[u];
        if (unit->ranks != fsdp->units[0]->ranks || unit->ranks->replicas)
            return td_fail(
                TD_ERR_UNSUPPORTED,
                "td_fsdp: shards are mirrored that one rank has: those of TD_FULL_SHARD and "
                "TD_SHARD_GRAD_OP, of one call of td_fsdp()");
        for (int f = 0; f < unit->flat_count; f++) {
            const struct td__fsdp_flat *flat = &unit->flats[f];
            if (!flat->device->is_host || flat->in_file)
                return td_fail(TD_ERR_UNSUPPORTED,
                               "td_fsdp: shards on accelerators and in files "
                               "cannot be mirrored in the memory of other ranks");
            for (int i = 0; i < flat->count && flat->requires_grad; i++)
                if (!parameter_of(mirror->optimizer, flat->params[i].tensor))
                    return td_fail(TD_ERR_INVALID,
                                   "td_fsdp: the optimizer does not have the parameter \"%s\"; a "
                                   "mirror is of a model and its optimizer",
                                   flat->params[i].name);
        }
    }
    return TD_OK;
}

static td_status fill(struct td__mirror *mirror)
{
    TD_TRY(check(mirror));
    td_group *group = mirror->fsdp->units[0]->ranks->group;
    TD_TRY(td__mirror_lay_out(mirror->fsdp, group->size, &mirror->layout));
    mirror->rank = group->rank;
    mirror->views = calloc((size_t)group->size, sizeof *mirror->views);
    mirror->keeps = calloc((size_t)group->size, sizeof *mirror->keeps);
    mirror->counts = calloc(2 * (size_t)group->size, sizeof *mirror->counts);
    if (!mirror->views || !mirror->keeps || !mirror->counts)
        return td__fail_nomem("td_fsdp");
    for (int s = 0; s < TD__MIRROR_SLOTS; s++)
        if (!(mirror->versions[s] = calloc((size_t)mirror->layout.flat_count + 1,
                                           sizeof **mirror->versions)))
            return td__fail_nomem("td_fsdp");
    TD_TRY(open_memory(mirror, group));
    mirror->keeper = keeper_of(group, group->rank);
    bool several = false;
    for (int r = 0; r < group->size; r++)
        several |= host_of(group, r) != host_of(group, 0);
    if (several)
        TD_TRY(td_group_split(group, 0, 0, NULL, &mirror->between));
    mirror->lane = td__lane_create("td-mirror", 1);
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
    td__mirror_layout_free(&mirror->layout);
    free(mirror->views);
    free(mirror->keeps);
    free(mirror->counts);
    free(mirror->copies);
    free(mirror);
    td__error_restore(&error);
}
