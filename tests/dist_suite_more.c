/* The suite, second part: messages, many tensors at once, objects. */
#include "dist_suite.h"
#include "runner.h"

#include <tandem/ops.h>

#include <string.h>

/* ---- Messages -------------------------------------------------------------------------------- */

/* Each rank sends to the next one. */
static void ring(const struct variant *v)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL), source = -1;
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    td_tensor *out = make_tensor(v, v->rows, v->columns, 10 * rank);
    td_tensor *in = make_tensor(v, v->rows, v->columns, -1);
    td_work *work;
    CHECK_OK(td_isend(out, next, 5, NULL, &work));
    if (v->async) {
        td_work *received;
        CHECK_OK(td_irecv(in, before, 5, NULL, &received));
        CHECK_OK(td_work_wait(received, 0));
        CHECK_EQ(td_work_source(received), before);
        CHECK_EQ(td_work_received(received), td_tensor_nbytes(in));
        td_work_release(received);
    } else {
        CHECK_OK(td_recv(in, TD_ANY_SOURCE, TD_ANY_TAG, NULL, &source));
        CHECK_EQ(source, before);
    }
    check_tensor(in, 10 * before, 1);
    CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    CHECK_OK(td_barrier(NULL, NULL));

    if (rank % 2 == 0 && rank + 1 < size) {
        CHECK_OK(td_send(out, rank + 1, 6, NULL));
    } else if (rank % 2 == 1) {
        CHECK_OK(td_recv(in, rank - 1, 6, NULL, &source));
        CHECK_EQ(source, rank - 1);
        check_tensor(in, 10 * (rank - 1), 1);
    }
    td_tensor_release(in);
    td_tensor_release(out);
}

/* From every rank to every rank in one batch. */
static void batch(const struct variant *v)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL), count = 0;
    td_tensor **out = make_tensors(v, size, 1000 * rank, 10);
    td_tensor **in = make_tensors(v, size, -1, 0);
    td_p2p_op ops[2 * MOST_RANKS];
    td_work *works[2 * MOST_RANKS];
    for (int r = 0; r < size; r++) {
        if (r == rank)
            continue;
        ops[count++] = (td_p2p_op){.kind = TD_P2P_IRECV, .tensor = in[r], .peer = r, .tag = 9};
        ops[count++] = (td_p2p_op){.kind = TD_P2P_ISEND, .tensor = out[r], .peer = r, .tag = 9};
    }
    CHECK_OK(td_batch_isend_irecv(ops, count, works));
    CHECK_OK(td_work_wait_all(works, count, 0));
    for (int i = 0; i < count; i++)
        td_work_release(works[i]);
    for (int r = 0; r < size; r++)
        check_tensor(in[r], r == rank ? -1 : 1000 * r + 10 * rank, 1);
    release_tensors(in, size);
    release_tensors(out, size);
}

/* A shorter message fills the first elements; the others stay. */
static void short_message(const struct variant *v)
{
    int rank = td_get_rank(NULL);
    td_tensor *tensor = make_tensor(v, v->rows, v->columns, 1000 * rank);
    td_tensor *rows = td_narrow(tensor, 0, 0, v->rows / 2);
    td_tensor *rest = td_narrow(tensor, 0, v->rows / 2, v->rows - v->rows / 2);
    if (rank == 0) {
        CHECK_OK(td_send(rows, 1, 0, NULL));
    } else if (rank == 1) {
        CHECK_OK(td_recv(tensor, 0, 0, NULL, NULL));
        check_tensor(rows, 0, 1);
        check_tensor(rest, 1000 + td_tensor_numel(rows), 1);
    }
    for (int i = 0; i < 3; i++)
        td_tensor_release((td_tensor *[]){tensor, rows, rest}[i]);
}

void dist_suite_messages(const struct variant *v)
{
    if (td_get_world_size(NULL) < 2)
        return;
    ring(v);
    batch(v);
    short_message(v);
}

/* ---- Many at once ---------------------------------------------------------------------------- */

#define MANY 5

/* Three of the variant's, and two of other dtypes. */
static void make_many(const struct variant *v, td_tensor **tensors, int64_t base)
{
    for (int i = 0; i < 3; i++)
        tensors[i * 2] = make_tensor(v, v->rows + i, v->columns, base + i);
    tensors[1] = td_full((int64_t[]){4}, 1, (double)base, TD_F64, NULL);
    tensors[3] = td_full(NULL, 0, (double)base, TD_U8, NULL);
}

static void check_many(td_tensor *const *tensors, int64_t base, int64_t factor, int64_t step)
{
    for (int i = 0; i < 3; i++)
        check_tensor(tensors[i * 2], base + i * step, factor);
    for (int i = 0; i < 4; i++)
        CHECK(((double *)td_tensor_data(tensors[1]))[i] == (double)base);
    CHECK_EQ(*(uint8_t *)td_tensor_data(tensors[3]), (uint8_t)base);
}

static void release_many(td_tensor **tensors, int count)
{
    for (int i = 0; i < count; i++)
        td_tensor_release(tensors[i]);
}

void dist_suite_coalesced(const struct variant *v)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_tensor *own[MANY], *all[MANY * MOST_RANKS];
    make_many(v, own, rank);
    RUN(v, td_all_reduce_coalesced(own, MANY, TD_SUM, NULL, work));
    check_many(own, size * (size - 1) / 2, size, size);
    release_many(own, MANY);

    make_many(v, own, 3 * rank);
    RUN(v, td_broadcast_coalesced(own, MANY, size - 1, NULL, work));
    check_many(own, 3 * (size - 1), 1, 1);
    release_many(own, MANY);

    make_many(v, own, 7 * rank);
    for (int r = 0; r < size; r++)
        make_many(v, all + r * MANY, 0);
    RUN(v, td_all_gather_coalesced(all, size * MANY, own, MANY, NULL, work));
    for (int r = 0; r < size; r++)
        check_many(all + r * MANY, 7 * r, 1, 1);

    RUN(v, td_reduce_scatter_coalesced(own, MANY, all, size * MANY, TD_SUM, NULL, work));
    check_many(own, size * 7 * rank, size, size);
    release_many(own, MANY);
    release_many(all, size * MANY);
}

/* ---- Objects --------------------------------------------------------------------------------- */

static td_bytes make_object(size_t size, int seed)
{
    td_bytes object = {.data = malloc(size + 1), .size = size};
    for (size_t i = 0; i < size; i++)
        object.data[i] = (char)((size_t)seed * 31 + i * 7);
    object.data[size] = '\0';
    return object;
}

static void check_object(td_bytes *object, size_t size, int seed)
{
    td_bytes expected = make_object(size, seed);
    CHECK_EQ(object->size, size);
    CHECK_MEM(object->data, expected.data, size);
    CHECK_EQ(object->data[size], '\0');
    td_bytes_free(&expected);
    td_bytes_free(object);
}

/* The length of rank r's object: none, one byte, 1 MiB, … */
static size_t length_of(int r)
{
    static const size_t lengths[] = {0, 1, 1 << 20, 1000, 7};
    return lengths[r % 5];
}

static void objects_of_all(int root)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    bool is_root = rank == root;
    td_bytes list[MOST_RANKS], own = make_object(length_of(rank + root), rank), got;
    CHECK_OK(td_all_gather_object(list, size, own, NULL));
    for (int r = 0; r < size; r++)
        check_object(&list[r], length_of(r + root), r);
    CHECK_OK(td_gather_object(own, is_root ? list : NULL, is_root ? size : 0, root, NULL));
    for (int r = 0; is_root && r < size; r++)
        check_object(&list[r], length_of(r + root), r);
    td_bytes_free(&own);

    for (int r = 0; is_root && r < size; r++)
        list[r] = make_object(length_of(r + root + 1), r);
    CHECK_OK(td_scatter_object_list(&got, is_root ? list : NULL, is_root ? size : 0, root, NULL));
    check_object(&got, length_of(rank + root + 1), rank);
    for (int r = 0; is_root && r < size; r++)
        td_bytes_free(&list[r]);

    for (int i = 0; i < 5; i++)
        list[i] = is_root ? make_object(length_of(i), i) : (td_bytes){NULL, 0};
    CHECK_OK(td_broadcast_object_list(list, 5, root, NULL));
    for (int i = 0; i < 5; i++)
        check_object(&list[i], length_of(i), i);
}

static void object_messages(void)
{
    int rank = td_get_rank(NULL), source = -1;
    td_bytes list[5];
    if (rank == 0) {
        for (int i = 0; i < 5; i++)
            list[i] = make_object(length_of(i), i);
        CHECK_OK(td_send_object_list(list, 5, 1, NULL));
        CHECK_OK(td_send_object_list(list, 2, 1, NULL));
        CHECK_OK(td_send_object_list(list, 1, 1, NULL));
        for (int i = 0; i < 5; i++)
            td_bytes_free(&list[i]);
    } else if (rank == 1) {
        CHECK_OK(td_recv_object_list(list, 5, TD_ANY_SOURCE, NULL, &source));
        CHECK_EQ(source, 0);
        for (int i = 0; i < 5; i++)
            check_object(&list[i], length_of(i), i);
        CHECK_FAILS(td_recv_object_list(list, 3, 0, NULL, NULL), TD_ERR_MISMATCH,
                    "rank 0 sent 2 objects, but the list here has 3");
        CHECK_OK(td_recv_object_list(list, 1, 0, NULL, &source));
        check_object(&list[0], length_of(0), 0);
    }
}

void dist_suite_objects(void)
{
    for (int root = 0; root < td_get_world_size(NULL); root++)
        objects_of_all(root);
    if (td_get_world_size(NULL) > 1)
        object_messages();
    td_bytes nothing = {NULL, 0};
    CHECK_OK(td_broadcast_object_list(&nothing, 1, 0, NULL));
    if (td_get_rank(NULL) > 0)
        td_bytes_free(&nothing);
    CHECK_OK(td_broadcast_object_list(NULL, 0, 0, NULL));
}
