/* All-reduce: every process has a tensor, and ends with the sum of all of them.
 *
 *     tdrun --standalone --nproc-per-node=4 ./all_reduce
 *
 * It works with any launcher, and without one the world is of size 1. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "all_reduce: %s\n", td_last_error());
    exit(1);
}

int main(void)
{
    check(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);

    td_tensor *tensor = td_empty(TD_SHAPE(4), TD_F32, NULL);
    if (!tensor)
        check(TD_ERR_NOMEM);
    float *data = td_tensor_data(tensor);
    for (int i = 0; i < 4; i++)
        data[i] = (float)((rank + 1) * (i + 1));

    check(td_all_reduce(tensor, TD_SUM, NULL, NULL));
    printf("rank %d of %d: the sum is %g %g %g %g\n", rank, size, data[0], data[1], data[2],
           data[3]);

    float expected = (float)(size * (size + 1)) / 2;
    bool right = true;
    for (int i = 0; i < 4; i++)
        right = right && data[i] == expected * (float)(i + 1);
    if (!right)
        fprintf(stderr, "all_reduce: the sum is wrong\n");
    td_tensor_release(tensor);
    check(td_destroy_process_group());
    return right ? 0 : 1;
}
