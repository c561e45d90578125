/* The functions of the fake NCCL; see fake_nccl.h. */
#include "fake_nccl_internal.h"

#include <tandem/dtype.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

struct id {
    char bytes[128];
};

struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

const struct fake_device *fake_device;
static atomic_int live, failure;
static atomic_int running; /* jobs on streams, of all communicators */

API fake_use_fn fake_nccl_use;
API fake_fail_fn fake_nccl_fail;
API fake_live_fn fake_nccl_live;

void fake_nccl_use(const struct fake_device *device)
{
    fake_device = device;
}

void fake_nccl_fail(int result)
{
    atomic_store(&failure, result);
}

int fake_nccl_live(void)
{
    return atomic_load(&live);
}

static int number_of(const char *variable, int otherwise)
{
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

void fake_jitter(void)
{
    static _Thread_local unsigned seed;
    int most = number_of("FAKE_NCCL_JITTER", 0);
    if (!most)
        return;
    if (!seed)
        seed = (unsigned)getpid() * 2654435761U ^ (unsigned)(uintptr_t)&seed >> 4 ^
               (unsigned)time(NULL);
    long ns = rand_r(&seed) % most * 1000L;
    nanosleep(&(struct timespec){ns / 1000000000, ns % 1000000000}, NULL);
}

#define FUNCTION(name, arguments)                                                                  \
    API int name arguments;                                                                        \
    int name arguments

FUNCTION(ncclGetVersion, (int *version))
{
    *version = number_of("FAKE_NCCL_VERSION", 22809);
    return SUCCESS;
}

API const char *ncclGetErrorString(int result);
const char *ncclGetErrorString(int result)
{
    return result == SYSTEM_ERROR ? "unhandled system error" : "some error";
}

API const char *ncclGetLastError(struct fake_comm *comm);
const char *ncclGetLastError(struct fake_comm *comm)
{
    return comm ? "the fake library has failed\n" : "";
}

/* ---- Communicators ------------------------------------------------------------------------------------ */

FUNCTION(ncclGetUniqueId, (struct id * id))
{
    static atomic_int made;
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "fake.%d.%d", (int)getpid(), atomic_fetch_add(&made, 1));
    return SUCCESS;
}

static struct fake_shared *map_file(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void *memory = MAP_FAILED;
    if (fd >= 0 && !ftruncate(fd, sizeof(struct fake_shared)))
        memory = mmap(NULL, sizeof(struct fake_shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    return memory == MAP_FAILED ? NULL : memory;
}

static void release(struct fake_comm *comm)
{
    if (atomic_fetch_sub(&comm->refs, 1) != 1)
        return;
    munmap(comm->shared, sizeof *comm->shared);
    if (comm->rank == 0 && !comm->joined)
        unlink(comm->path);
    free(comm);
    atomic_fetch_sub(&live, 1);
}

#ifdef FAKE_WITHOUT_CONFIG
#define ncclCommInitRankConfig ncclHasAnotherName
#endif
FUNCTION(ncclCommInitRankConfig,
         (struct fake_comm * *out, int size, struct id id, int rank, struct config *config))
{
    fake_jitter();
    const char *directory = getenv("FAKE_NCCL_DIR");
    struct fake_comm *comm = calloc(1, sizeof *comm);
    if (!comm || !directory || size > RANKS || config->magic != 0xcafebeef || config->blocking ||
        strncmp(id.bytes, "fake.", 5) != 0) {
        free(comm);
        return INVALID_ARGUMENT;
    }
    snprintf(comm->path, sizeof comm->path, "%s/%.100s", directory, id.bytes);
    comm->shared = map_file(comm->path);
    if (!comm->shared) {
        free(comm);
        return SYSTEM_ERROR;
    }
    comm->rank = rank;
    comm->size = size;
    atomic_store(&comm->refs, 1);
    atomic_fetch_add(&comm->shared->attached, 1);
    atomic_fetch_add(&live, 1);
    *out = comm;
    return IN_PROGRESS;
}

static int enqueue(struct fake_job *job)
{
    atomic_fetch_add(&job->comm->pending, 1);
    atomic_fetch_add(&running, 1);
    job->is_enqueued = true;
    return fake_device->enqueue(job->stream, fake_run_job, fake_drop_job, job) ? SYSTEM_ERROR
                                                                               : SUCCESS;
}

FUNCTION(ncclCommGetAsyncError, (struct fake_comm * comm, int *state))
{
    fake_jitter();
    *state = atomic_load(&failure);
    if (*state)
        return SUCCESS;
    if (!comm->joined) {
        comm->joined = atomic_load(&comm->shared->attached) == comm->size;
        if (comm->joined && comm->rank == 0)
            unlink(comm->path);
        *state = IN_PROGRESS;
    } else if (comm->deferred && comm->polls-- > 0) {
        *state = IN_PROGRESS;
    } else if (comm->deferred) {
        struct fake_job *job = comm->deferred;
        comm->deferred = NULL;
        *state = enqueue(job);
    } else if (comm->finalizing && atomic_load(&comm->pending)) {
        *state = IN_PROGRESS;
    }
    return SUCCESS;
}

FUNCTION(ncclCommFinalize, (struct fake_comm * comm))
{
    comm->finalizing = true;
    return IN_PROGRESS;
}

FUNCTION(ncclCommDestroy, (struct fake_comm * comm))
{
    if (!comm->finalizing || atomic_load(&comm->pending)) {
        fprintf(stderr, "fake NCCL: a communicator is destroyed while it is in use\n");
        abort();
    }
    release(comm);
    return SUCCESS;
}

/* Memory of a GPU is freed when that has run everything; that this is in vain is an error of the caller. */
static void await_streams(void)
{
    for (int i = 0; atomic_load(&running); i++) {
        if (i == 5000) {
            fprintf(stderr, "fake NCCL: ncclCommAbort() waits for other communicators\n");
            abort();
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

FUNCTION(ncclCommAbort, (struct fake_comm * comm))
{
    atomic_store(&comm->aborted, true);
    if (comm->deferred)
        fake_drop_job(&(struct fake_job *){comm->deferred});
    comm->deferred = NULL;
    await_streams();
    release(comm);
    return SUCCESS;
}

FUNCTION(ncclRedOpCreatePreMulSum,
         (int *op, void *factor, int type, int residence, struct fake_comm *comm))
{
    int slot = 0;
    while (slot < OPS && comm->used[slot])
        slot++;
    if (slot == OPS || residence != 1)
        return INVALID_ARGUMENT;
    union {
        float f32;
        double f64;
        uint16_t half;
    } value = {.f64 = 0};
    memcpy(&value, factor, fake_type_size(type));
    comm->factors[slot] = type == F32   ? value.f32
                          : type == F64 ? value.f64
                          : type == F16 ? td_f16_to_f32(value.half)
                                        : td_bf16_to_f32(value.half);
    comm->used[slot] = true;
    *op = BUILT_IN + slot;
    return SUCCESS;
}

FUNCTION(ncclRedOpDestroy, (int op, struct fake_comm *comm))
{
    if (op < BUILT_IN || op >= BUILT_IN + OPS || !comm->used[op - BUILT_IN])
        return INVALID_ARGUMENT;
    comm->used[op - BUILT_IN] = false;
    return SUCCESS;
}

/* ---- Group calls ---------------------------------------------------------------------------------------- */

static _Thread_local int depth;
static _Thread_local struct fake_job *jobs;

void fake_drop_job(void *arg)
{
    struct fake_job *job = *(struct fake_job **)arg;
    struct fake_op *op = job->ops, *next;
    for (; op; op = next) {
        next = op->next;
        if (op->in)
            fake_device->drop(op->in);
        if (op->out)
            fake_device->drop(op->out);
        free(op);
    }
    if (job->is_enqueued) {
        atomic_fetch_sub(&job->comm->pending, 1);
        atomic_fetch_sub(&running, 1);
    }
    release(job->comm);
    free(job);
}

static struct fake_job *job_of(struct fake_comm *comm, void *stream)
{
    struct fake_job *job = jobs;
    while (job && (job->comm != comm || job->stream != stream))
        job = job->next;
    if (job)
        return job;
    job = calloc(1, sizeof *job);
    job->comm = comm;
    job->stream = stream;
    job->end = &job->ops;
    job->next = jobs;
    jobs = job;
    atomic_fetch_add(&comm->refs, 1);
    return job;
}

static int start_jobs(void)
{
    int result = SUCCESS, slow = number_of("FAKE_NCCL_SLOW", 0);
    while (jobs) {
        struct fake_job *job = jobs;
        jobs = job->next;
        if (slow) {
            job->comm->deferred = job;
            job->comm->polls = slow;
            result = result ? result : IN_PROGRESS;
        } else if (enqueue(job)) {
            result = SYSTEM_ERROR;
        }
    }
    return result;
}

FUNCTION(ncclGroupStart, (void))
{
    fake_jitter();
    depth++;
    return SUCCESS;
}

FUNCTION(ncclGroupEnd, (void))
{
    fake_jitter();
    return --depth ? SUCCESS : start_jobs();
}

static int add(struct fake_comm *comm, void *stream, struct fake_op op, const void *in, void *out)
{
    if (!comm->joined || comm->deferred || comm->finalizing || atomic_load(&comm->aborted))
        return INVALID_USAGE;
    if (op.label.kind < SEND && op.in_bytes > AREA_BYTES)
        return INVALID_ARGUMENT;
    struct fake_job *job = job_of(comm, stream);
    struct fake_op *added = malloc(sizeof *added);
    *added = op;
    added->factor = 1;
    if (op.label.op >= BUILT_IN) {
        added->factor = comm->factors[op.label.op - BUILT_IN];
        added->label.op = SUM;
    }
    if (op.label.kind < SEND)
        added->number = ++comm->collectives;
    added->in = op.in_bytes ? fake_device->hold(in, op.in_bytes) : NULL;
    added->out = op.out_bytes ? fake_device->hold(out, op.out_bytes) : NULL;
    *job->end = added;
    job->end = &added->next;
    return depth ? SUCCESS : start_jobs();
}

static struct fake_op op_of(int kind, int type, int op, int root, size_t count, size_t ins,
                            size_t outs)
{
    size_t bytes = count * fake_type_size(type);
    return (struct fake_op){
        .label = {kind, type, op, root, count}, .in_bytes = ins * bytes, .out_bytes = outs * bytes};
}

/* ---- Operations ------------------------------------------------------------------------------------------- */

#define SIZE(comm) ((size_t)(comm)->size)
#define IS(comm, root) ((size_t)((comm)->rank == (root)))

FUNCTION(ncclBroadcast, (const void *in, void *out, size_t count, int type, int root,
                         struct fake_comm *comm, void *stream))
{
    return add(comm, stream, op_of(BROADCAST, type, 0, root, count, IS(comm, root), 1), in, out);
}

FUNCTION(ncclReduce, (const void *in, void *out, size_t count, int type, int op, int root,
                      struct fake_comm *comm, void *stream))
{
    return add(comm, stream, op_of(REDUCE, type, op, root, count, 1, IS(comm, root)), in, out);
}

FUNCTION(ncclAllReduce, (const void *in, void *out, size_t count, int type, int op,
                         struct fake_comm *comm, void *stream))
{
    return add(comm, stream, op_of(ALL_REDUCE, type, op, 0, count, 1, 1), in, out);
}

FUNCTION(ncclAllGather,
         (const void *in, void *out, size_t count, int type, struct fake_comm *comm, void *stream))
{
    return add(comm, stream, op_of(ALL_GATHER, type, 0, 0, count, 1, SIZE(comm)), in, out);
}

FUNCTION(ncclReduceScatter, (const void *in, void *out, size_t count, int type, int op,
                             struct fake_comm *comm, void *stream))
{
    return add(comm, stream, op_of(REDUCE_SCATTER, type, op, 0, count, SIZE(comm), 1), in, out);
}

FUNCTION(ncclSend,
         (const void *in, size_t count, int type, int peer, struct fake_comm *comm, void *stream))
{
    struct fake_op op = op_of(SEND, type, 0, 0, count, 1, 0);
    op.peer = peer;
    return add(comm, stream, op, in, NULL);
}

FUNCTION(ncclRecv,
         (void *out, size_t count, int type, int peer, struct fake_comm *comm, void *stream))
{
    struct fake_op op = op_of(RECV, type, 0, 0, count, 0, 1);
    op.peer = peer;
    return add(comm, stream, op, NULL, out);
}

#ifndef FAKE_WITHOUT_NEWER
FUNCTION(ncclAlltoAll,
         (const void *in, void *out, size_t count, int type, struct fake_comm *comm, void *stream))
{
    return add(comm, stream, op_of(ALL_TO_ALL, type, 0, 0, count, SIZE(comm), SIZE(comm)), in, out);
}

FUNCTION(ncclGather, (const void *in, void *out, size_t count, int type, int root,
                      struct fake_comm *comm, void *stream))
{
    return add(comm, stream, op_of(GATHER, type, 0, root, count, 1, IS(comm, root) * SIZE(comm)),
               in, out);
}

FUNCTION(ncclScatter, (const void *in, void *out, size_t count, int type, int root,
                       struct fake_comm *comm, void *stream))
{
    return add(comm, stream, op_of(SCATTER, type, 0, root, count, IS(comm, root) * SIZE(comm), 1),
               in, out);
}
#endif
