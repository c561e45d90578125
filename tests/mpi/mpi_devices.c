/* Memory of devices: the calls go by way of pinned host memory. */
#include "../toy_device.h"
#include "mpi_cases.h"
#include "runner.h"

static td_tensor *numbers(int64_t count, int salt)
{
    TD_SCOPE;
    td_tensor *host = td_empty((int64_t[]){count}, 1, TD_F32, NULL);
    for (int64_t i = 0; i < count; i++)
        ((float *)td_tensor_data(host))[i] = (float)(i % 7 + salt);
    return td_tensor_retain(td_tensor_to(host, td_device_get("toy:0")));
}

static void check(td_tensor *tensor, int64_t factor, int64_t base)
{
    TD_SCOPE;
    td_tensor *host = td_tensor_to(tensor, td_device_get("cpu"));
    CHECK(host);
    for (int64_t i = 0; i < td_tensor_numel(host); i++)
        CHECK_EQ((int64_t)((float *)td_tensor_data(host))[i], factor * (i % 7) + base);
}

static void collectives(int64_t count)
{
    TD_SCOPE;
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int64_t ranks = (int64_t)size * (size - 1) / 2;
    td_work *work;
    td_tensor *x = numbers(count, rank), *host = td_ones((int64_t[]){3}, 1, TD_F32, NULL);
    td_work *other;
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    CHECK_OK(td_all_reduce(host, TD_SUM, NULL, &other)); /* beside one on host memory */
    CHECK_OK(td_work_wait(work, 0));
    CHECK_OK(td_work_wait(other, 0));
    td_work_release(work);
    td_work_release(other);
    check(x, size, ranks);
    CHECK_EQ((int)td_item(td_select(host, 0, 2)), size);
    td_tensor *y = numbers(count, rank);
    CHECK_OK(td_broadcast(y, size - 1, NULL, NULL));
    check(y, 1, size - 1);
    td_tensor *whole = td_empty((int64_t[]){count * size}, 1, TD_F32, td_device_get("toy:0"));
    CHECK_OK(td_all_gather_into_tensor(whole, numbers(count, rank), NULL, NULL));
    for (int r = 0; r < size; r++)
        check(td_narrow(whole, 0, r * count, count), 1, r);
    td_tensor *part = td_empty((int64_t[]){count}, 1, TD_F32, td_device_get("toy:0"));
    CHECK_OK(td_reduce_scatter_tensor(part, whole, TD_SUM, NULL, NULL));
    check(part, size, (int64_t)rank * size);
    td_tensor_release(x);
    td_tensor_release(y);
}

static void messages(int64_t count)
{
    TD_SCOPE;
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_tensor *out = numbers(count, rank), *in = numbers(count, 100);
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    td_work *works[2];
    if (size < 2)
        return;
    CHECK_OK(td_isend(out, next, 3, NULL, &works[0]));
    CHECK_OK(td_irecv(in, before, 3, NULL, &works[1]));
    CHECK_OK(td_work_wait_all(works, 2, 0));
    check(in, 1, before);
    td_work_release(works[0]);
    td_work_release(works[1]);
    if (rank < 2)
        CHECK_OK(rank ? td_recv(in, 0, 4, NULL, NULL) : td_send(out, 1, 4, NULL));
    if (rank == 1)
        check(in, 1, 0);
    td_tensor_release(out);
    td_tensor_release(in);
}

void mpi_case_devices(void)
{
    CHECK_OK(toy_register());
    mpi_begin(60000);
    collectives(10);
    collectives(700000); /* several pieces */
    messages(10);
    messages(700000);
    mpi_end();
}
