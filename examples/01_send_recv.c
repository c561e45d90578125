/* Point-to-point, blocking: rank 0 sends a tensor to rank 1, and both wait for it.
 *
 *     $ ./01_send_recv
 *     rank 0 has data 1
 *     rank 1 has data 1
 *
 * The program starts its two processes itself (td_spawn()). A rank that fails returns its status, and main()
 * gets the text of its error. */
#include <tandem/tandem.h>

#include <stdio.h>

static td_status run(int rank, td_tensor *tensor)
{
    td_status status;
    if (rank == 0) {
        td_fill_(tensor, 1);
        status = td_send(tensor, 1, 0, NULL); /* to rank 1, tag 0, in the world */
    } else {
        status = td_recv(tensor, 0, 0, NULL, NULL); /* into memory that exists already */
    }
    if (!status)
        printf("rank %d has data %g\n", rank, td_item(tensor));
    return status;
}

static td_status process(int rank, void *arg)
{
    (void)arg;
    td_status status = td_init_process_group(NULL); /* td_spawn() has set the environment */
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
        fprintf(stderr, "01_send_recv: %s\n", td_last_error());
        return 1;
    }
    return 0;
}
