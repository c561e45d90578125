/* Point-to-point, non-blocking: the calls return at once, and the tensor may be used after the wait.
 *
 *     $ ./02_isend_irecv
 *     rank 0 started sending
 *     rank 1 started receiving
 *     rank 0 has data 1
 *     rank 1 has data 1
 *
 * The program starts its two processes itself. Until td_work_wait() returns, the operation owns the tensor:
 * rank 0 must not change it, and rank 1 must not read it. */
#include <tandem/tandem.h>

#include <stdio.h>

static td_status run(int rank, td_tensor *tensor)
{
    td_work *work;
    td_status status;
    if (rank == 0) {
        td_fill_(tensor, 1);
        status = td_isend(tensor, 1, 0, NULL, &work);
    } else {
        status = td_irecv(tensor, 0, 0, NULL, &work);
    }
    if (status)
        return status; /* nothing was started, and there is no work */
    printf("rank %d started %s\n", rank, rank == 0 ? "sending" : "receiving");

    status = td_work_wait(work, 0); /* 0: as long as the group's timeout allows */
    td_work_release(work);
    if (!status)
        printf("rank %d has data %g\n", rank, td_item(tensor));
    return status;
}

static td_status process(int rank, void *arg)
{
    (void)arg;
    td_status status = td_init_process_group(NULL);
    if (status)
        return status;
    td_tensor *tensor = td_zeros(TD_SHAPE(1), TD_F32, NULL);
    status = tensor ? run(rank, tensor) : TD_ERR_NOMEM;
    td_tensor_release(tensor);
    return status ? status : td_destroy_process_group();
}

int main(void)
{
    if (td_spawn(process, NULL, 2, NULL)) {
        fprintf(stderr, "02_isend_irecv: %s\n", td_last_error());
        return 1;
    }
    return 0;
}
