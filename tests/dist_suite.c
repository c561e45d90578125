/* The suite, first part: tensors of all kinds, and the collectives. */
#include "dist_suite.h"
#include "runner.h"

#include <tandem/ops.h>

#include <string.h>

/* ---- Tensors --------------------------------------------------------------------------------- */

/* The address of element `number`, in the order of the indices. */
static int32_t *element_at(const td_tensor *tensor, int64_t number)
{
    int64_t at = 0;
    for (int d = td_tensor_ndim(tensor); d-- > 0;) {
        at += number % td_tensor_size(tensor, d) * td_tensor_stride(tensor, d);
        number /= td_tensor_size(tensor, d);
    }
    return (int32_t *)td_tensor_data(tensor) + at;
}

static void put(td_tensor *tensor, int64_t base)
{
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        *element_at(tensor, i) = (int32_t)(base + i);
}

void check_tensor(td_tensor *tensor, int64_t base, int64_t factor)
{
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        CHECK_EQ(*element_at(tensor, i), base + factor * i);
}

td_tensor *make_tensor(const struct variant *v, int64_t rows, int64_t columns, int64_t base)
{
    td_tensor *whole, *tensor;
    switch (v->layout) {
    case TURNED:
        whole = td_empty((int64_t[]){columns, rows}, 2, TD_I32, NULL);
        tensor = td_transpose(whole, 0, 1);
        break;
    case NARROWED:
        whole = td_empty((int64_t[]){rows, columns + 3}, 2, TD_I32, NULL);
        tensor = td_narrow(whole, 1, 2, columns);
        break;
    case STEPPED:
        whole = td_empty((int64_t[]){rows * 2, columns}, 2, TD_I32, NULL);
        tensor = td_slice(whole, 0, 0, rows * 2, 2);
        break;
    default:
        whole = td_empty((int64_t[]){rows, columns}, 2, TD_I32, NULL);
        tensor = td_tensor_retain(whole);
    }
    td_tensor_release(whole);
    CHECK(tensor);
    put(tensor, base);
    return tensor;
}

td_tensor **make_tensors(const struct variant *v, int count, int64_t base, int64_t step)
{
    td_tensor **tensors = calloc((size_t)count, sizeof *tensors);
    for (int i = 0; i < count; i++)
        tensors[i] = make_tensor(v, v->rows, v->columns, base + i * step);
    return tensors;
}

void release_tensors(td_tensor **tensors, int count)
{
    for (int i = 0; i < count; i++)
        td_tensor_release(tensors[i]);
    free(tensors);
}

/* ---- One tensor ------------------------------------------------------------------------------ */

static void one_tensor(const struct variant *v)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int64_t sum = 1000LL * size * (size - 1) / 2;
    for (int root = 0; root < size; root++) {
        td_tensor *t = make_tensor(v, v->rows, v->columns, 1000 * rank);
        RUN(v, td_reduce(t, root, TD_SUM, NULL, work));
        check_tensor(t, rank == root ? sum : 1000 * rank, rank == root ? size : 1);
        put(t, 1000 * rank);
        RUN(v, td_broadcast(t, root, NULL, work));
        check_tensor(t, 1000 * root, 1);
        td_tensor_release(t);
    }
    td_tensor *t = make_tensor(v, v->rows, v->columns, 1000 * rank);
    RUN(v, td_all_reduce(t, TD_SUM, NULL, work));
    check_tensor(t, sum, size);
    put(t, 1000 * rank);
    RUN(v, td_all_reduce(t, TD_MAX, NULL, work));
    check_tensor(t, 1000 * (size - 1), 1);
    td_tensor_release(t);
    RUN(v, td_barrier(NULL, work));
    CHECK_OK(td_monitored_barrier(NULL, 0, true, NULL, NULL));
}

/* ---- Parts of a whole ------------------------------------------------------------------------ */

static void wholes(const struct variant *v)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int64_t part = v->rows * v->columns, sum = part * size * (size - 1) / 2;

    td_tensor *whole = make_tensor(v, size * v->rows, v->columns, -1);
    td_tensor *own = make_tensor(v, v->rows, v->columns, rank * part);
    RUN(v, td_all_gather_into_tensor(whole, own, NULL, work));
    check_tensor(whole, 0, 1);
    check_tensor(own, rank * part, 1);

    /* In place: the rank's own part of the whole. */
    put(whole, 5);
    td_tensor *view = td_narrow(whole, 0, rank * v->rows, v->rows);
    put(view, rank * part);
    RUN(v, td_all_gather_into_tensor(whole, view, NULL, work));
    check_tensor(whole, 0, 1);

    put(whole, rank * part);
    RUN(v, td_reduce_scatter_tensor(own, whole, TD_SUM, NULL, work));
    check_tensor(own, sum + size * rank * part, size);
    check_tensor(whole, rank * part, 1);
    RUN(v, td_reduce_scatter_tensor(view, whole, TD_SUM, NULL, work));
    check_tensor(view, sum + size * rank * part, size);

    /* Each rank sends its own part of 0, 1, 2, … to all. */
    td_tensor *received = make_tensor(v, size * v->rows, v->columns, -1);
    put(whole, 0);
    RUN(v, td_all_to_all_single(received, whole, NULL, NULL, NULL, work));
    for (int r = 0; r < size; r++) {
        td_tensor *rows = td_narrow(received, 0, r * v->rows, v->rows);
        check_tensor(rows, rank * part, 1);
        td_tensor_release(rows);
    }
    for (int i = 0; i < 4; i++)
        td_tensor_release((td_tensor *[]){whole, own, view, received}[i]);
}

/* Rank s sends s + r rows to rank r, the first of which is numbered 100 s + 10 r. */
static void uneven_parts(const struct variant *v)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int64_t splits[MOST_RANKS], rows = 0;
    td_tensor *inputs[MOST_RANKS], *outputs[MOST_RANKS];
    for (int r = 0; r < size; r++)
        rows += splits[r] = rank + r;
    td_tensor *input = make_tensor(v, rows, v->columns, 0);
    td_tensor *output = make_tensor(v, rows, v->columns, -1);
    int64_t first = 0;
    for (int r = 0; r < size; first += splits[r++]) {
        inputs[r] = td_narrow(input, 0, first, splits[r]);
        outputs[r] = td_narrow(output, 0, first, splits[r]);
        put(inputs[r], 100 * rank + 10 * r);
    }
    RUN(v, td_all_to_all_single(output, input, splits, splits, NULL, work));
    for (int s = 0; s < size; s++)
        check_tensor(outputs[s], 100 * s + 10 * rank, 1);

    put(output, -1);
    RUN(v, td_all_to_all(outputs, size, inputs, size, NULL, work));
    for (int s = 0; s < size; s++)
        check_tensor(outputs[s], 100 * s + 10 * rank, 1);

    /* The same tensors for both. */
    RUN(v, td_all_to_all(inputs, size, inputs, size, NULL, work));
    for (int s = 0; s < size; s++)
        check_tensor(inputs[s], 100 * s + 10 * rank, 1);
    for (int r = 0; r < size; r++) {
        td_tensor_release(inputs[r]);
        td_tensor_release(outputs[r]);
    }
    td_tensor_release(input);
    td_tensor_release(output);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

static void lists(const struct variant *v)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_tensor **list = make_tensors(v, size, -1, 0);
    td_tensor *own = make_tensor(v, v->rows, v->columns, 1000 * rank);
    RUN(v, td_all_gather(list, size, own, NULL, work));
    for (int r = 0; r < size; r++)
        check_tensor(list[r], 1000 * r, 1);

    /* The tensor may be in the list. */
    put(list[rank], 7 * rank);
    RUN(v, td_all_gather(list, size, list[rank], NULL, work));
    for (int r = 0; r < size; r++)
        check_tensor(list[r], 7 * r, 1);

    for (int r = 0; r < size; r++)
        put(list[r], 100 * rank + r);
    RUN(v, td_reduce_scatter(own, list, size, TD_SUM, NULL, work));
    check_tensor(own, 100LL * size * (size - 1) / 2 + size * rank, size);
    td_tensor_release(own);
    release_tensors(list, size);
}

static void rooted_lists(const struct variant *v, int root)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    bool is_root = rank == root;
    td_tensor **list = make_tensors(v, size, 100, 10);
    td_tensor *own = make_tensor(v, v->rows, v->columns, -1);
    RUN(v, td_scatter(own, is_root ? list : NULL, is_root ? size : 0, root, NULL, work));
    check_tensor(own, 100 + 10 * rank, 1);

    put(own, 1000 * rank);
    RUN(v, td_gather(own, is_root ? list : NULL, is_root ? size : 0, root, NULL, work));
    for (int r = 0; r < size; r++)
        check_tensor(list[r], is_root ? 1000 * r : 100 + 10 * r, 1);

    if (is_root)
        CHECK_OK(td_scatter_send(list, size, own, NULL));
    else
        CHECK_OK(td_scatter_recv(own, root, NULL));
    check_tensor(own, 1000 * rank, 1);
    put(own, 77 * rank);
    if (is_root)
        CHECK_OK(td_gather_recv(list, size, own, NULL));
    else
        CHECK_OK(td_gather_send(own, root, NULL));
    for (int r = 0; is_root && r < size; r++)
        check_tensor(list[r], 77 * r, 1);
    td_tensor_release(own);
    release_tensors(list, size);
}

/* ---- All of it ------------------------------------------------------------------------------- */

static void run_variant(const struct variant *v)
{
    one_tensor(v);
    wholes(v);
    uneven_parts(v);
    lists(v);
    for (int root = 0; root < td_get_world_size(NULL); root++)
        rooted_lists(v, root);
    dist_suite_messages(v);
    dist_suite_coalesced(v);
}

void dist_suite_run(void)
{
    static const int64_t sizes[][2] = {{3, 5}, {70, 90}, {0, 4}};
    for (int i = 0; i < 3; i++)
        for (int layout = 0; layout < LAYOUTS; layout++)
            for (int async = 0; async < 2; async++)
                run_variant(&(struct variant){layout, async, sizes[i][0], sizes[i][1]});
    dist_suite_objects();
}
