/* Process groups on tensors of an accelerator: every call gives the bits that it gives on the host, staged by the native
 * backend or carried out by a blocking one; works and streams; failures. */
#include "base/fail.h"
#include "runner.h"
#include "toy_backend.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static td_device *toy(void)
{
    return td_device_get("toy:0");
}

static void begin(const char *backend)
{
    CHECK_OK(toy_register());
    toy_set_delay(20);
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = backend, .timeout_ms = 60000}));
}

/* ---- The same on both devices ------------------------------------------------------------------- */

enum { INPUTS = 3 };

struct shape {
    int64_t count; /* elements of t[0]; t[1] and t[2] have those of all ranks */
    td_dtype dtype;
    bool strided, async;
};

static td_tensor *numbers(const struct shape *shape, int64_t count, int salt)
{
    TD_SCOPE;
    int64_t rows = shape->strided ? 2 : 1;
    td_tensor *plain = td_empty((int64_t[]){count, rows}, 2, TD_F32, NULL);
    float *data = td_tensor_data(plain);
    for (int64_t i = 0; i < td_tensor_numel(plain); i++)
        data[i] = (float)((i * 7 + salt * 5 + td_get_rank(NULL) * 3) % 11);
    td_tensor *typed = td_to_dtype(plain, shape->dtype);
    return td_tensor_retain(td_select(typed, 1, rows - 1));
}

typedef td_status (*op_fn)(td_tensor **t, td_work **work);

static td_tensor *part(td_tensor *whole, int64_t start, int64_t length)
{
    return td_narrow(whole, 0, start, length);
}

static td_status all_reduce(td_tensor **t, td_work **work)
{
    return td_all_reduce(t[0], TD_SUM, NULL, work);
}

static td_status all_reduce_max(td_tensor **t, td_work **work)
{
    return td_all_reduce(t[0], TD_MAX, NULL, work);
}

static td_status broadcast(td_tensor **t, td_work **work)
{
    return td_broadcast(t[0], 1, NULL, work);
}

static td_status reduce(td_tensor **t, td_work **work)
{
    return td_reduce(t[0], 1, TD_SUM, NULL, work);
}

static td_status all_gather(td_tensor **t, td_work **work)
{
    return td_all_gather_into_tensor(t[1], t[0], NULL, work);
}

static td_status all_gather_in_place(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    int64_t count = td_tensor_numel(t[0]);
    return td_all_gather_into_tensor(t[1], part(t[1], td_get_rank(NULL) * count, count), NULL,
                                     work);
}

static td_status reduce_scatter(td_tensor **t, td_work **work)
{
    return td_reduce_scatter_tensor(t[0], t[1], TD_SUM, NULL, work);
}

static td_status all_to_all(td_tensor **t, td_work **work)
{
    return td_all_to_all_single(t[1], t[2], NULL, NULL, NULL, work);
}

/* Rank s sends a share of its elements to rank r that depends on both. */
static td_status all_to_all_uneven(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int64_t n = td_tensor_numel(t[0]), in[8], out[8], ins = 0, outs = 0;
    for (int r = 0; r < size; r++) {
        ins += in[r] = (rank + r) % 3 == 0 ? n : (rank + r) % 3 == 1 ? n / 3 : 0;
        outs += out[r] = in[r]; /* symmetric */
    }
    return td_all_to_all_single(part(t[1], 0, outs), part(t[2], 0, ins), out, in, NULL, work);
}

/* Parts of n, n / 2, 0, n, … elements. */
static int uneven_parts(td_tensor *whole, int64_t n, td_tensor **parts)
{
    int size = td_get_world_size(NULL);
    int64_t start = 0;
    for (int r = 0; r < size; r++) {
        int64_t length = r % 3 == 0 ? n : r % 3 == 1 ? n / 2 : 0;
        parts[r] = part(whole, start, length);
        start += length;
    }
    return size;
}

static td_status all_gather_list(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    td_tensor *parts[8];
    int size = uneven_parts(t[1], td_tensor_numel(t[0]), parts);
    td_tensor *own = part(t[0], 0, td_tensor_numel(parts[td_get_rank(NULL)]));
    return td_all_gather(parts, size, own, NULL, work);
}

static td_status reduce_scatter_list(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    td_tensor *parts[8];
    int size = uneven_parts(t[1], td_tensor_numel(t[0]), parts);
    td_tensor *own = part(t[0], 0, td_tensor_numel(parts[td_get_rank(NULL)]));
    return td_reduce_scatter(own, parts, size, TD_SUM, NULL, work);
}

static td_status gather(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    td_tensor *parts[8];
    int size = td_get_world_size(NULL);
    int64_t n = td_tensor_numel(t[0]);
    for (int r = 0; r < size; r++)
        parts[r] = part(t[1], (size - 1 - r) * n, n); /* not one after another */
    bool root = td_get_rank(NULL) == 1;
    return td_gather(t[0], root ? parts : NULL, root ? size : 0, 1, NULL, work);
}

static td_status scatter(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    td_tensor *parts[8];
    int size = td_get_world_size(NULL);
    int64_t n = td_tensor_numel(t[0]);
    for (int r = 0; r < size; r++)
        parts[r] = part(t[1], r * n, n);
    bool root = td_get_rank(NULL) == 0;
    return td_scatter(t[0], root ? parts : NULL, root ? size : 0, 0, NULL, work);
}

static td_status coalesced(td_tensor **t, td_work **work)
{
    return td_all_reduce_coalesced(t, INPUTS, TD_SUM, NULL, work);
}

/* A ring: to the next rank, from the one before. */
static td_status ring(td_tensor **t, td_work **work)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_work *works[2];
    td_p2p_op ops[2] = {
        {.kind = TD_P2P_IRECV, .tensor = t[1], .peer = (rank + size - 1) % size, .tag = 4},
        {.kind = TD_P2P_ISEND, .tensor = t[0], .peer = (rank + 1) % size, .tag = 4},
    };
    TD_TRY(td_batch_isend_irecv(ops, 2, works));
    td_status status = td_work_wait_all(works, 2, 0);
    td_work_release(works[0]);
    td_work_release(works[1]);
    if (work)
        TD_TRY(td_barrier(NULL, work));
    return status;
}

static td_status blocking_messages(td_tensor **t, td_work **work)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL), source;
    if (rank == 0)
        for (int r = 1; r < size; r++)
            TD_TRY(td_send(t[0], r, 1, NULL));
    else
        TD_TRY(td_recv(t[1], rank % 2 ? 0 : TD_ANY_SOURCE, 1, NULL, &source)); /* a longer tensor */
    return td_barrier(NULL, work);
}

static void run_op(op_fn op, td_tensor **t, bool async)
{
    td_work *work = NULL;
    CHECK_OK(op(t, async ? &work : NULL));
    if (work)
        CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
}

static void check_same(op_fn op, const struct shape *shape)
{
    TD_SCOPE;
    td_tensor *host[INPUTS], *device[INPUTS];
    int size = td_get_world_size(NULL);
    for (int i = 0; i < INPUTS; i++) {
        host[i] = numbers(shape, shape->count * (i ? size : 1), i);
        device[i] = td_tensor_to(host[i], toy());
        if (shape->strided) { /* td_tensor_to() is contiguous */
            td_tensor *wide = td_zeros((int64_t[]){td_tensor_numel(host[i]), 2}, 2, shape->dtype,
                                       toy());
            td_tensor *view = td_select(wide, 1, 1);
            CHECK_OK(td_tensor_copy(view, device[i]));
            device[i] = view;
        }
    }
    run_op(op, host, false);
    run_op(op, device, shape->async);
    for (int i = 0; i < INPUTS; i++) {
        td_tensor *back = td_contiguous(td_tensor_to(device[i], td_device_get("cpu")));
        td_tensor *flat = td_contiguous(host[i]);
        CHECK_MEM(td_tensor_data(back), td_tensor_data(flat), td_tensor_nbytes(flat));
        td_tensor_release(host[i]);
    }
}

static const op_fn collectives[] = {
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_in_place,
    reduce_scatter,
    all_to_all,
    all_gather_list,
    gather,
    scatter,
    reduce_scatter_list,
    coalesced,
    all_to_all_uneven,
    ring,
    blocking_messages,
};

static void check_all(int64_t count, td_dtype dtype, bool strided, bool async)
{
    struct shape shape = {.count = count, .dtype = dtype, .strided = strided, .async = async};
    for (size_t i = 0; i < sizeof collectives / sizeof *collectives; i++)
        check_same(collectives[i], &shape);
}

RANKS(every_call, .ranks = 3, .deadline_s = 60)
{
    begin(NULL);
    check_all(0, TD_F32, false, false);
    check_all(1, TD_F32, false, true);
    check_all(1001, TD_F32, false, false);
    check_all(1001, TD_F32, true, true);
    check_all(17, TD_F32, true, false);
    CHECK_OK(td_destroy_process_group());
}

RANKS(several_pieces, .ranks = 2, .deadline_s = 60)
{
    begin("native");
    check_all(700001, TD_F32, false, true); /* 2.7 MiB */
    check_all(1300001, TD_F16, false, false);
    CHECK_OK(td_destroy_process_group());
}

RANKS(every_dtype, .ranks = 4, .deadline_s = 60)
{
    begin(NULL);
    static const td_dtype dtypes[] = {TD_F64, TD_F16, TD_BF16, TD_I64};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        check_all(33, dtypes[i], false, i % 2);
    struct shape flags = {.count = 65, .dtype = TD_BOOL};
    check_same(all_reduce_max, &flags);
    check_same(broadcast, &flags);
    check_same(all_gather, &flags);
    CHECK_OK(td_destroy_process_group());
}

RANKS(over_sockets, .ranks = 3, .deadline_s = 60)
{
    begin("tcp");
    check_all(100001, TD_F32, false, true);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Works and streams --------------------------------------------------------------------------- */

/* The tensor is filled late, and read on another stream, which td_work_wait() orders. */
RANKS(streams_are_ordered, .ranks = 2)
{
    begin(NULL);
    TD_SCOPE;
    td_stream *writes = td_stream_create(toy(), 0), *reads = td_stream_create(toy(), 0);
    td_tensor *x = td_zeros(TD_SHAPE(5000), TD_F32, toy());
    CHECK_OK(td_device_synchronize(toy()));
    toy_set_delay(2000);
    td_work *work;
    {
        TD_STREAM_SCOPE(writes);
        CHECK_OK(td_fill_(x, td_get_rank(NULL) + 1));
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    }
    td_tensor *y;
    {
        TD_STREAM_SCOPE(reads);
        CHECK_OK(td_work_wait(work, 0));
        y = td_add(x, x);
        CHECK_OK(td_stream_synchronize(reads));
    }
    CHECK_EQ(td_item(td_sum(td_tensor_to(y, td_device_get("cpu")))), 5000 * 6);
    td_work_release(work);

    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    CHECK_OK(td_work_synchronize(work, 0));
    td_work_release(work);
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    CHECK_OK(td_work_synchronize(work, 60000));
    CHECK_OK(td_work_synchronize(work, TD_NOW));
    td_work_release(work);
    CHECK_EQ(td_item(td_select(x, 0, 4999)), 12);
    td_stream_release(writes);
    td_stream_release(reads);
    CHECK_OK(td_destroy_process_group());
}

/* The tensors are released, and their memory is wanted again, while calls are under way. */
RANKS(memory_in_flight_is_kept, .ranks = 2)
{
    begin(NULL);
    for (int i = 0; i < 20; i++) {
        td_work *work;
        td_tensor *x = td_full(TD_SHAPE(3000), i, TD_F32, toy());
        td_tensor *all = td_empty(TD_SHAPE(6000), TD_F32, toy());
        CHECK_OK(td_all_gather_into_tensor(all, x, NULL, &work));
        td_tensor_release(x);
        td_tensor *other = td_full(TD_SHAPE(3000), -1, TD_F32, toy());
        CHECK_OK(td_work_wait(work, 0));
        td_work_release(work);
        td_tensor *back = td_tensor_to(all, td_device_get("cpu"));
        for (int k = 0; k < 6000; k++)
            CHECK_EQ(((float *)td_tensor_data(back))[k], i);
        td_tensor_release(back);
        td_tensor_release(other);
        td_tensor_release(all);
    }
    CHECK_OK(td_destroy_process_group());
}

/* A send on host memory does not overtake one on the device. */
RANKS(messages_stay_in_order, .ranks = 2)
{
    begin(NULL);
    TD_SCOPE;
    toy_set_delay(1000);
    td_work *works[2];
    td_tensor *far = td_full(TD_SHAPE(10), 1, TD_F32, toy());
    td_tensor *near = td_full(TD_SHAPE(10), 2, TD_F32, NULL);
    if (td_get_rank(NULL) == 0) {
        CHECK_OK(td_isend(far, 1, 0, NULL, &works[0]));
        CHECK_OK(td_isend(near, 1, 0, NULL, &works[1]));
        CHECK_OK(td_work_wait_all(works, 2, 0));
        td_work_release(works[0]);
        td_work_release(works[1]);
    } else {
        CHECK_OK(td_recv(near, 0, 0, NULL, NULL));
        CHECK_OK(td_recv(far, 0, 0, NULL, NULL));
        CHECK_EQ(td_item(td_select(near, 0, 9)), 1);
        CHECK_EQ(td_item(td_select(far, 0, 9)), 2);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Other backends ------------------------------------------------------------------------------- */

/* One that blocks and takes memory of the toy accelerator: the toy backend, on copies in host memory. It has no uneven
 * parts, so that the group layer pads them, on the device. */
struct blocking_copies {
    td_call call;
    size_t in, out; /* bytes */
};

static struct blocking_copies copies_of(const td_call *call, int size)
{
    size_t one = call->count * td_dtype_size(call->dtype), all = one * (size_t)size;
    bool gathers = call->kind == TD_OP_ALL_GATHER, scatters = call->kind == TD_OP_REDUCE_SCATTER;
    struct blocking_copies copies = {
        .call = *call, .in = scatters ? all : one, .out = gathers ? all : one};
    copies.call.device = NULL;
    copies.call.stream = NULL;
    copies.call.input = malloc(copies.in + 1);
    copies.call.output = malloc(copies.out + 1);
    return copies;
}

static td_collective_fn slot_of(td_op_kind kind)
{
    const td_backend_ops *ops = toy_backend_ops();
    return kind == TD_OP_ALL_GATHER       ? ops->all_gather
           : kind == TD_OP_REDUCE_SCATTER ? ops->reduce_scatter
                                          : ops->all_reduce;
}

static td_status run_blocking(void *self, const td_call *call)
{
    if (!call->device)
        return slot_of(call->kind)(self, call);
    CHECK(!call->input_counts);
    struct blocking_copies copies = copies_of(call, td_get_world_size(NULL));
    void *device = td_device_self(call->device), *stream = td_stream_self(call->stream);
    CHECK_OK(toy_ops()->copy_out(device, stream, (void *)copies.call.input, call->input, copies.in,
                                 false));
    CHECK_OK(td_stream_synchronize(call->stream));
    td_status status = slot_of(call->kind)(self, &copies.call);
    if (!status)
        CHECK_OK(toy_ops()->copy_in(device, stream, call->output, copies.call.output, copies.out,
                                    false));
    free((void *)copies.call.input);
    free(copies.call.output);
    return status;
}

RANKS(a_blocking_backend_on_a_device, .ranks = 3, .deadline_s = 60)
{
    static const char *const kinds[] = {"cpu", "toy", NULL};
    static const op_fn ops[] = {all_reduce,     all_gather,      all_gather_in_place,
                                reduce_scatter, all_gather_list, reduce_scatter_list};
    td_backend_ops blocking = *toy_backend_ops();
    blocking.all_reduce = blocking.all_gather = blocking.reduce_scatter = run_blocking;
    blocking.devices = kinds;
    CHECK_OK(td_register_backend("blocking", &blocking, NULL));
    begin("blocking");
    CHECK_STR(td_get_backend(NULL), "blocking");
    for (int i = 0; i < 12; i++)
        check_same(ops[i % 6],
                   &(struct shape){.count = i < 6 ? 101 : 4, .dtype = TD_F32, .async = i % 2});
    CHECK_OK(td_destroy_process_group());
}

/* The works of staged messages are not those of the host's backend. */
RANKS(another_backend_for_the_host, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(toy_backend_register());
    begin("cpu:toy,toy:native");
    check_all(1001, TD_F32, false, true);
    check_all(300001, TD_F32, false, false);
    CHECK_OK(td_destroy_process_group());
    begin("cpu:toy,*:native");
    CHECK_STR(td_get_backend(NULL), "cpu:toy,*:native");
    check_all(33, TD_F32, true, true);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Failures ------------------------------------------------------------------------------------ */

RANKS(a_mix_of_devices, .ranks = 2)
{
    begin(NULL);
    TD_SCOPE;
    td_tensor *x = td_zeros(TD_SHAPE(7), TD_F32, toy()), *y = td_zeros(TD_SHAPE(14), TD_F32, NULL);
    CHECK_FAILS(td_all_gather_into_tensor(y, x, NULL, NULL), TD_ERR_INVALID,
                "input is on toy:0, but one of output is on cpu");
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

RANKS(different_calls_on_devices, .ranks = 2)
{
    begin(NULL);
    td_tensor *x = td_zeros(TD_SHAPE(600000 + td_get_rank(NULL)), TD_F32, toy());
    CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_MISMATCH, "call on a device");
    td_tensor_release(x);
    td_destroy_process_group();
}

/* The places of both ranks are named. */
static void check_places(const char *backend, int64_t count)
{
    begin(backend);
    int rank = td_get_rank(NULL);
    td_tensor *x = td_zeros((int64_t[]){count}, 1, TD_F32, rank ? toy() : NULL);
    CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_MISMATCH,
                "every rank must pass host memory, or every rank that of a device");
    CHECK_CONTAINS(td_last_error(), "in host memory");
    CHECK_CONTAINS(td_last_error(), "as a piece of a call on a device");
    CHECK_CONTAINS(td_last_error(), "rank 0");
    CHECK_CONTAINS(td_last_error(), "rank 1");
    td_tensor_release(x);
    td_destroy_process_group();
}

RANKS(the_host_on_one_rank_a_device_on_another, .ranks = 2)
{
    check_places("native", 7);
    check_places("native", 700000);
    check_places("tcp", 7);
    check_places("tcp", 700000);
}

RANKS(a_rank_that_dies, .ranks = 2, .may_die = 1 << 1)
{
    begin(NULL);
    td_tensor *x = td_zeros(TD_SHAPE(2000000), TD_F32, toy());
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_OK(td_device_synchronize(toy()));
    if (td_get_rank(NULL) == 1)
        raise(SIGKILL);
    int64_t before = toy_pinned_bytes();
    for (int i = 0; i < 2; i++)
        CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_PEER, "rank 1");
    CHECK_EQ(toy_pinned_bytes(), before);
    td_tensor_release(x);
    td_destroy_process_group();
}

RANKS(a_device_that_fails, .ranks = 2)
{
    begin(NULL);
    td_tensor *x = td_zeros(TD_SHAPE(2000000), TD_F32, toy());
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_OK(td_device_synchronize(toy()));
    if (td_get_rank(NULL) == 1)
        toy_fail_copy(0, 3, TOY_AT_LAUNCH);
    td_status status = td_all_reduce(x, TD_SUM, NULL, NULL);
    CHECK(status == TD_ERR_SYSTEM || status == TD_ERR_PEER);
    CHECK_EQ(td_all_reduce(x, TD_SUM, NULL, NULL), status);
    td_tensor_release(x);
    td_destroy_process_group();
}
