/* A user's own scatter and gather, twice: with single messages, and with the halves that torch.distributed
 * had at first (scatter_send, scatter_recv, gather_send, gather_recv).
 *
 *     $ tdrun --standalone --nproc-per-node=3 ./05_scatter_gather
 *     rank 0 got 0 by messages
 *     rank 1 got 1 by messages
 *     rank 0 gathered 0 of rank 0 by messages
 *     rank 0 gathered 1 of rank 1 by messages
 *     …
 *
 * Rank 0 scatters 0, 1, 2 …; each rank squares its number, and rank 0 gathers the squares. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { ROOT = 0, TAG = 7, MOST = 64 };

static int rank, size;

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "05_scatter_gather: rank %d: %s\n", rank, td_last_error());
    exit(1);
}

/* Sends list[i] of the root to rank i. */
static void scatter(td_tensor *tensor, td_tensor *const *list, bool by_halves)
{
    if (rank == ROOT && by_halves) {
        check(td_scatter_send(list, size, tensor, NULL));
    } else if (rank == ROOT) {
        check(td_tensor_copy(tensor, list[ROOT]));
        for (int i = 0; i < size; i++)
            if (i != ROOT)
                check(td_send(list[i], i, TAG, NULL));
    } else {
        check(by_halves ? td_scatter_recv(tensor, ROOT, NULL)
                        : td_recv(tensor, ROOT, TAG, NULL, NULL));
    }
}

/* Puts the tensor of rank i into list[i] of the root. */
static void gather(td_tensor *tensor, td_tensor *const *list, bool by_halves)
{
    if (rank == ROOT && by_halves) {
        check(td_gather_recv(list, size, tensor, NULL));
    } else if (rank == ROOT) {
        check(td_tensor_copy(list[ROOT], tensor));
        for (int i = 0; i < size; i++)
            if (i != ROOT)
                check(td_recv(list[i], i, TAG, NULL, NULL));
    } else {
        check(by_halves ? td_gather_send(tensor, ROOT, NULL) : td_send(tensor, ROOT, TAG, NULL));
    }
}

int main(void)
{
    check(td_init_process_group(NULL));
    rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    if (size > MOST) {
        fprintf(stderr, "05_scatter_gather: it is for at most %d ranks, not %d\n", MOST, size);
        return 1;
    }
    for (int halves = 0; halves < 2; halves++) {
        TD_SCOPE;
        /* A list of views: each tensor of it is one element of `numbers`. */
        td_tensor *list[MOST], *numbers = td_arange(0, size, 1, TD_F32, NULL);
        td_tensor *own = td_zeros(NULL, 0, TD_F32, NULL);
        for (int i = 0; i < size; i++)
            list[i] = td_select(numbers, 0, i);
        scatter(own, list, halves);
        printf("rank %d got %g by %s\n", rank, td_item(own), halves ? "halves" : "messages");
        gather(td_square(own), list, halves);
        for (int i = 0; i < size && rank == ROOT; i++)
            printf("rank 0 gathered %g of rank %d by %s\n", td_item(list[i]), i,
                   halves ? "halves" : "messages");
    }
    check(td_destroy_process_group());
    return 0;
}
