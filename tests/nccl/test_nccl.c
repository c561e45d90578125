/* The backend nccl: every call gives the bits that the native backend gives on the host. */
#include "nccl_world.h"

#include "base/fail.h"

#include <stdio.h>
#include <string.h>

enum { INPUTS = 3 };

/* ---- The same on both backends ------------------------------------------------------------------- */

struct shape {
    int64_t count; /* elements of t[0]; t[1] and t[2] have those of all ranks */
    td_dtype dtype;
    bool strided, async;
};

static td_reduce_op reduction = TD_SUM;
static td_group *group; /* NULL: the world */

static int rank_here(void)
{
    return td_get_rank(group);
}

static int ranks(void)
{
    return td_get_world_size(group);
}

static int world_rank(int rank)
{
    return td_get_global_rank(group, rank);
}

static td_tensor *numbers(const struct shape *shape, int64_t count, int salt)
{
    TD_SCOPE;
    int64_t rows = shape->strided ? 2 : 1;
    td_tensor *plain = td_empty((int64_t[]){count, rows}, 2, TD_F32, NULL);
    float *data = td_tensor_data(plain);
    for (int64_t i = 0; i < td_tensor_numel(plain); i++)
        data[i] = (float)((i * 7 + salt * 5 + td_get_rank(NULL) * 3) % 5);
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
    return td_all_reduce(t[0], reduction, group, work);
}

static td_status reduce(td_tensor **t, td_work **work)
{
    return td_reduce(t[0], world_rank(ranks() - 1), reduction, group, work);
}

static td_status reduce_scatter(td_tensor **t, td_work **work)
{
    return td_reduce_scatter_tensor(t[0], t[1], reduction, group, work);
}

static td_status reduce_scatter_in_place(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    int64_t count = td_tensor_numel(t[0]);
    return td_reduce_scatter_tensor(part(t[1], rank_here() * count, count), t[1], reduction, group,
                                    work);
}

static td_status broadcast(td_tensor **t, td_work **work)
{
    return td_broadcast(t[0], world_rank(ranks() - 1), group, work);
}

static td_status all_gather(td_tensor **t, td_work **work)
{
    return td_all_gather_into_tensor(t[1], t[0], group, work);
}

static td_status all_gather_in_place(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    int64_t count = td_tensor_numel(t[0]);
    return td_all_gather_into_tensor(t[1], part(t[1], rank_here() * count, count), group, work);
}

static td_status all_to_all(td_tensor **t, td_work **work)
{
    return td_all_to_all_single(t[1], t[2], NULL, NULL, group, work);
}

static td_status all_to_all_in_place(td_tensor **t, td_work **work)
{
    return td_all_to_all_single(t[1], t[1], NULL, NULL, group, work);
}

/* Rank s sends a share of its elements to rank r that depends on both. */
static td_status all_to_all_uneven(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    int rank = rank_here(), size = ranks();
    int64_t n = td_tensor_numel(t[0]), in[8], out[8], ins = 0, outs = 0;
    for (int r = 0; r < size; r++) {
        ins += in[r] = (rank + r) % 3 == 0 ? n : (rank + r) % 3 == 1 ? n / 3 : 0;
        outs += out[r] = in[r]; /* symmetric */
    }
    return td_all_to_all_single(part(t[1], 0, outs), part(t[2], 0, ins), out, in, group, work);
}

/* Parts of n, n / 2, 0, n, … elements. */
static int uneven_parts(td_tensor *whole, int64_t n, td_tensor **parts)
{
    int size = ranks();
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
    td_tensor *own = part(t[0], 0, td_tensor_numel(parts[rank_here()]));
    return td_all_gather(parts, size, own, group, work);
}

static td_status reduce_scatter_list(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    td_tensor *parts[8];
    int size = uneven_parts(t[1], td_tensor_numel(t[0]), parts);
    td_tensor *own = part(t[0], 0, td_tensor_numel(parts[rank_here()]));
    return td_reduce_scatter(own, parts, size, reduction, group, work);
}

static td_status gather(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    td_tensor *parts[8];
    int size = ranks(), root = size - 1;
    int64_t n = td_tensor_numel(t[0]);
    for (int r = 0; r < size; r++)
        parts[r] = part(t[1], (size - 1 - r) * n, n); /* not one after another */
    bool is_root = rank_here() == root;
    return td_gather(t[0], is_root ? parts : NULL, is_root ? size : 0, world_rank(root), group,
                     work);
}

static td_status scatter(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    td_tensor *parts[8];
    int size = ranks();
    int64_t n = td_tensor_numel(t[0]);
    for (int r = 0; r < size; r++)
        parts[r] = part(t[1], r * n, n);
    bool is_root = rank_here() == 0;
    return td_scatter(t[0], is_root ? parts : NULL, is_root ? size : 0, world_rank(0), group, work);
}

static td_status coalesced(td_tensor **t, td_work **work)
{
    return td_all_reduce_coalesced(t, INPUTS, reduction, group, work);
}

/* A ring: to the next rank, from the one before; two messages each way. */
static td_status ring(td_tensor **t, td_work **work)
{
    int rank = rank_here(), size = ranks(), next = world_rank((rank + 1) % size),
        before = world_rank((rank + size - 1) % size);
    td_work *works[4];
    td_p2p_op ops[4] = {
        {.kind = TD_P2P_ISEND, .tensor = t[0], .peer = next, .tag = 4, .group = group},
        {.kind = TD_P2P_ISEND, .tensor = t[2], .peer = next, .tag = 5, .group = group},
        {.kind = TD_P2P_IRECV, .tensor = t[0], .peer = before, .tag = 4, .group = group},
        {.kind = TD_P2P_IRECV, .tensor = t[1], .peer = before, .tag = 5, .group = group},
    };
    TD_SCOPE;
    ops[2].tensor = td_empty((int64_t[]){td_tensor_numel(t[0])}, 1, td_tensor_dtype(t[0]),
                             td_tensor_device(t[0]));
    if (size == 1)
        return td_barrier(group, work);
    TD_TRY(td_batch_isend_irecv(ops, 4, works));
    td_status status = td_work_wait_all(works, 4, 0);
    for (int i = 0; i < 4; i++)
        td_work_release(works[i]);
    TD_TRY(td_tensor_copy(t[0], ops[2].tensor));
    if (work)
        TD_TRY(td_barrier(group, work));
    return status;
}

/* Every rank sends to all others before it receives from any: what does not wait on host memory must not here. */
static td_status sends_first(td_tensor **t, td_work **work)
{
    TD_SCOPE;
    int rank = rank_here(), size = ranks(), count = 0;
    int64_t n = td_tensor_numel(t[0]);
    td_work *works[16] = {0};
    for (int r = 0; r < size; r++)
        if (r != rank)
            TD_TRY(td_isend(part(t[2], r * n, n), world_rank(r), 0, group, &works[count++]));
    for (int r = size - 1; r >= 0; r--)
        if (r != rank)
            TD_TRY(td_irecv(part(t[1], r * n, n), world_rank(r), 0, group, &works[count++]));
    td_status status = td_work_wait_all(works, count, 0);
    for (int i = 0; i < count; i++)
        td_work_release(works[i]);
    TD_TRY(status);
    return td_barrier(group, work);
}

static void run_op(op_fn op, td_tensor **t, bool async)
{
    td_work *work = NULL;
    CHECK_OK(op(t, async ? &work : NULL));
    if (work)
        CHECK_OK(td_work_synchronize(work, 0));
    td_work_release(work);
}

static void check_same(op_fn op, const struct shape *shape)
{
    TD_SCOPE;
    td_tensor *host[INPUTS], *device[INPUTS];
    for (int i = 0; i < INPUTS; i++) {
        host[i] = numbers(shape, shape->count * (i ? ranks() : 1), i);
        device[i] = td_tensor_to(host[i], nccl_device());
        if (shape->strided) { /* td_tensor_to() is contiguous */
            td_tensor *wide = td_zeros((int64_t[]){td_tensor_numel(host[i]), 2}, 2, shape->dtype,
                                       nccl_device());
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

static const op_fn reductions[] = {
    all_reduce, reduce, reduce_scatter, reduce_scatter_in_place, reduce_scatter_list, coalesced};
static const op_fn moves[] = {broadcast,
                              all_gather,
                              all_gather_in_place,
                              all_to_all,
                              all_to_all_in_place,
                              all_to_all_uneven,
                              all_gather_list,
                              gather,
                              scatter,
                              ring,
                              sends_first};

#define COUNT_OF(list) (sizeof(list) / sizeof *(list))

static void check_reductions(int64_t count, td_dtype dtype, td_reduce_op op, bool async)
{
    struct shape shape = {.count = count, .dtype = dtype, .async = async};
    reduction = op;
    for (size_t i = 0; i < COUNT_OF(reductions); i++)
        check_same(reductions[i], &shape);
    reduction = TD_SUM;
}

static void check_moves(int64_t count, td_dtype dtype, bool async)
{
    struct shape shape = {.count = count, .dtype = dtype, .async = async};
    for (size_t i = 0; i < COUNT_OF(moves); i++)
        check_same(moves[i], &shape);
}

static void check_all(int64_t count, bool strided, bool async)
{
    struct shape shape = {.count = count, .dtype = TD_F32, .strided = strided, .async = async};
    for (size_t i = 0; i < COUNT_OF(reductions); i++)
        check_same(reductions[i], &shape);
    for (size_t i = 0; i < COUNT_OF(moves); i++)
        check_same(moves[i], &shape);
}

static void every_call(void)
{
    nccl_begin(60000);
    CHECK_STR(td_get_backend(NULL), nccl_backends());
    check_all(0, false, false);
    check_all(1, false, true);
    check_all(1001, false, false);
    check_all(257, true, true);
    check_all(40000, false, true);
    nccl_end();
}

RANKS(every_call_with_1, .ranks = 1, .deadline_s = 60)
{
    every_call();
}

RANKS(every_call_with_2, .ranks = 2, .deadline_s = 60)
{
    every_call();
}

RANKS(every_call_with_3, .ranks = 3, .deadline_s = 60)
{
    every_call();
}

RANKS(every_call_with_4, .ranks = 4, .deadline_s = 60)
{
    every_call();
}

/* Without ncclAlltoAll(), ncclGather(), ncclScatter(). */
RANKS(an_old_library, .ranks = 3, .deadline_s = 60)
{
    nccl_choose("old");
    every_call();
}

/* ncclInProgress after each call. */
RANKS(calls_in_progress, .ranks = 3, .deadline_s = 60)
{
    nccl_needs_fake();
    setenv("FAKE_NCCL_SLOW", "3", 1);
    nccl_begin(60000);
    check_all(100, false, true);
    check_all(7, true, false);
    nccl_end();
}

/* ---- Types and operations ---------------------------------------------------------------------------- */

RANKS(every_dtype, .ranks = 3, .deadline_s = 90)
{
    nccl_begin(60000);
    static const td_dtype dtypes[] = {TD_F64, TD_F16, TD_BF16, TD_I8,   TD_U8,       TD_I32,
                                      TD_I64, TD_U32, TD_U64,  TD_BOOL, TD_COMPLEX64};
    for (size_t i = 0; i < COUNT_OF(dtypes); i++)
        check_reductions(33, dtypes[i], TD_SUM, i % 2);
    check_moves(33, TD_I16, true);
    check_moves(17, TD_COMPLEX128, false);
    check_moves(65, TD_BOOL, true);
    nccl_end();
}

RANKS(every_reduction, .ranks = 3, .deadline_s = 90)
{
    nccl_begin(60000);
    static const td_reduce_op ops[] = {TD_PRODUCT, TD_MIN, TD_MAX};
    for (size_t i = 0; i < COUNT_OF(ops); i++) {
        check_reductions(20, TD_F32, ops[i], true);
        check_reductions(20, TD_I64, ops[i], false);
        check_reductions(20, TD_BOOL, ops[i], false);
    }
    check_reductions(20, TD_BOOL, TD_BAND, true);
    check_reductions(20, TD_BOOL, TD_BOR, true);
    nccl_end();
}

/* With 4 ranks all results are exact. */
RANKS(averages_and_factors, .ranks = 4, .deadline_s = 90)
{
    nccl_begin(60000);
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16, TD_BF16, TD_COMPLEX64, TD_COMPLEX128};
    td_reduce_op half, quarter;
    CHECK_OK(td_reduce_op_create_premul_sum(0.5, &half));
    CHECK_OK(td_reduce_op_create_premul_sum(td_get_rank(NULL) % 2 ? 0.25 : 2, &quarter));
    for (size_t i = 0; i < COUNT_OF(dtypes); i++) {
        check_reductions(20, dtypes[i], TD_AVG, true);
        check_reductions(20, dtypes[i], half, false);
        check_reductions(20, dtypes[i], quarter, true);
    }
    check_reductions(20, TD_F32, TD_PREMUL_SUM, true);
    td_reduce_op_destroy(half);
    td_reduce_op_destroy(quarter);
    nccl_end();
}

static void add_all(void *acc, const void *other, size_t count, td_dtype dtype, void *arg)
{
    (void)acc, (void)other, (void)count, (void)dtype, (void)arg;
}

static void refuse(td_dtype dtype, td_reduce_op op, const char *text)
{
    td_tensor *x = td_zeros(TD_SHAPE(3), dtype, nccl_device());
    CHECK_FAILS(td_all_reduce(x, op, NULL, NULL), TD_ERR_UNSUPPORTED, text);
    CHECK_CONTAINS(td_last_error(), "all_reduce on group \"world\": backend nccl has no ");
    CHECK_CONTAINS(td_last_error(), "a group with \"cpu:native,toy:native\" has it");
    td_tensor_release(x);
}

RANKS(what_nccl_does_not_have, .ranks = 2)
{
    nccl_needs_fake();
    nccl_begin(60000);
    td_reduce_op own;
    CHECK_OK(td_reduce_op_create(add_all, NULL, &own));
    refuse(TD_I16, TD_SUM, "sum of i16");
    refuse(TD_I32, TD_BXOR, "bxor for i32");
    refuse(TD_U8, TD_BAND, "band for u8");
    refuse(TD_BOOL, TD_BXOR, "bxor for bool");
    refuse(TD_F32, own, "operations of td_reduce_op_create()");
    td_tensor *x = td_zeros(TD_SHAPE(3), TD_COMPLEX64, NULL),
              *y = td_ones(TD_SHAPE(3), TD_F32, nccl_device());
    td_tensor *z = td_tensor_to(x, nccl_device());
    CHECK_FAILS(td_all_reduce(z, TD_PRODUCT, NULL, NULL), TD_ERR_UNSUPPORTED,
                "product for complex64");
    CHECK_FAILS(td_recv(y, TD_ANY_SOURCE, 0, NULL, NULL), TD_ERR_UNSUPPORTED, "no TD_ANY_SOURCE");
    CHECK_OK(td_all_reduce(y, TD_SUM, NULL, NULL)); /* the group is in order */
    CHECK_EQ(nccl_item(y, 2), 2);
    td_tensor *far = td_ones(TD_SHAPE(3), TD_F32, td_device_get("toy:1"));
    CHECK_FAILS(td_all_reduce(far, TD_SUM, NULL, NULL), TD_ERR_INVALID,
                "the tensor is on toy:1, but group \"world\" has its communicator on toy:0");
    td_reduce_op_destroy(own);
    td_tensor_release(x);
    td_tensor_release(y);
    td_tensor_release(z);
    td_tensor_release(far);
    nccl_end();
}

/* ---- Groups and memory --------------------------------------------------------------------------------- */

RANKS(groups, .ranks = 4, .deadline_s = 60)
{
    nccl_begin(60000);
    check_all(10, false, true);
    CHECK_OK(td_new_group((int[]){3, 1, 0}, 3, NULL, &group));
    if (td_get_rank(NULL) != 2)
        check_all(33, false, true);
    CHECK_OK(td_group_destroy(group));
    CHECK_OK(td_group_split(NULL, td_get_rank(NULL) % 2, 0, NULL, &group));
    check_all(21, false, false);
    td_group *split = group;
    group = NULL;
    check_all(5, false, false);
    CHECK_OK(td_group_destroy(split));
    nccl_end();
}

/* The tensors are released, and their memory is wanted again, while calls are under way. */
RANKS(memory_in_flight_is_kept, .ranks = 2)
{
    nccl_begin(60000);
    for (int i = 0; i < 20; i++) {
        td_work *works[3];
        int peer = 1 - td_get_rank(NULL);
        td_tensor *x = td_full(TD_SHAPE(3000), i, TD_F32, nccl_device());
        td_tensor *all = td_empty(TD_SHAPE(6000), TD_F32, nccl_device());
        td_tensor *got = td_empty(TD_SHAPE(3000), TD_F32, nccl_device());
        CHECK_OK(td_all_gather_into_tensor(all, x, NULL, &works[0]));
        CHECK_OK(td_isend(x, peer, 0, NULL, &works[1]));
        CHECK_OK(td_irecv(got, peer, 0, NULL, &works[2]));
        td_tensor_release(x);
        td_tensor *other = td_full(TD_SHAPE(3000), -1, TD_F32, nccl_device());
        CHECK_OK(td_work_wait_all(works, 3, 0));
        CHECK_EQ(td_work_source(works[2]), peer);
        CHECK_EQ(td_work_received(works[2]), 12000);
        CHECK_EQ(nccl_sum(all), 6000 * i);
        CHECK_EQ(nccl_sum(got), 3000 * i);
        for (int k = 0; k < 3; k++)
            td_work_release(works[k]);
        td_tensor_release(got);
        td_tensor_release(other);
        td_tensor_release(all);
    }
    nccl_end();
}

/* Without a choice, the backend that is registered for the kind. */
RANKS(the_default_of_the_kind, .ranks = 2)
{
    nccl_needs_fake();
    nccl_load();
    CHECK_OK(td_init_process_group(&(td_init_options){.timeout_ms = 60000}));
    td_tensor *x = td_ones(TD_SHAPE(3), TD_F32, nccl_device());
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_EQ(nccl_item(x, 2), 2);
    CHECK_EQ(nccl_fake_live(), 1);
    td_tensor_release(x);
    nccl_end();
}
