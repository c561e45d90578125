/* A ring all-reduce of single messages, with two buffers that change places, compared with
 * td_all_reduce():
 *
 *     $ tdrun --standalone --nproc-per-node=4 13_ring_all_reduce
 *     rank 0: the ring and all_reduce agree on 1000 elements
 *
 *     rank 0 ──> rank 1 ──> rank 2 ──> … ──> rank 0
 *
 * In each of size - 1 rounds a rank adds what it got from the left, and passes it on to the right. A
 * buffer is sent while the other one is filled: who is to be written to must have been sent. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1000 };

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "13_ring_all_reduce: %s\n", td_last_error());
    exit(1);
}

/* recv = the sum of everybody's send. */
static void ring_all_reduce(td_tensor *send, td_tensor *recv)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int left = (rank - 1 + size) % size, right = (rank + 1) % size;
    td_tensor *going = td_clone(send), *coming = td_zeros_like(send);
    check(td_tensor_copy(recv, send));
    for (int i = 0; i < size - 1; i++) {
        td_work *works[2];
        check(td_isend(going, right, 0, NULL, &works[0]));
        check(td_irecv(coming, left, 0, NULL, &works[1]));
        check(td_work_wait(works[1], 0));
        check(td_add_(recv, coming)); /* while the other one may still be on its way */
        check(td_work_wait(works[0], 0));
        td_work_release(works[0]);
        td_work_release(works[1]);
        td_tensor *sent = going;
        going = coming;
        coming = sent;
    }
}

int main(void)
{
    check(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    bool agree = false;
    TD_SCOPE
    {
        /* Small integers, so that the sums are the same bits in whatever order they are made. */
        td_manual_seed((uint64_t)rank);
        td_tensor *own = td_randint(-100, 100, (int64_t[]){COUNT}, 1, TD_F32);
        td_tensor *by_ring = td_empty_like(own), *at_once = td_clone(own);
        ring_all_reduce(own, by_ring);
        check(td_all_reduce(at_once, TD_SUM, NULL, NULL));
        agree = td_equal(by_ring, at_once);
    }
    printf("rank %d: the ring and all_reduce %s on %d elements\n", rank,
           agree ? "agree" : "disagree", COUNT);
    check(td_destroy_process_group());
    return agree ? 0 : 1;
}
