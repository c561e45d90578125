/* A ring all_reduce with single messages, compared with td_all_reduce():
 *
 *     $ tdrun --standalone --nproc-per-node=4 ./13_ring_all_reduce [elements…]
 *     rank 0: the ring and all_reduce agree on 1000 elements, 6000 bytes sent
 *
 *     rank 0 ──> rank 1 ──> rank 2 ──> rank 3 ──> rank 0
 *
 * The tensor has one chunk for each rank. In size - 1 steps each chunk goes once around the ring and is
 * summed (reduce_scatter), so that each rank has the sum of one chunk; in as many steps the sums go around
 * (all_gather):
 *
 *     step          0                1                2          then, to be copied: 3, 4, 5
 *     rank 0    sends chunk 0    sends chunk 3    sends chunk 2      1, 0, 3
 *     rank 1    sends chunk 1    sends chunk 0    sends chunk 3      2, 1, 0
 *
 * A rank sends 2 (size - 1) chunks: 2 B (size - 1) / size bytes of a tensor of B bytes, however many
 * ranks there are. A chunk is sent while the next one is received. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

struct ring {
    int rank, size, left, right;
    size_t sent; /* bytes */
};

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "13_ring_all_reduce: %s\n", td_last_error());
    exit(1);
}

/* Chunk `index` of a tensor, counted around the ring: a view. Where the elements cannot be divided
 * evenly, some chunks have one more than others; with fewer elements than ranks some are empty. */
static td_tensor *chunk(const struct ring *ring, td_tensor *tensor, int index)
{
    int64_t at = (index % ring->size + ring->size) % ring->size, count = td_tensor_numel(tensor);
    int64_t from = count * at / ring->size, to = count * (at + 1) / ring->size;
    return td_narrow(tensor, 0, from, to - from);
}

/* Sends a tensor to the right while another one comes from the left. */
static void exchange(struct ring *ring, td_tensor *going, td_tensor *coming)
{
    td_work *works[2];
    check(td_isend(going, ring->right, 0, NULL, &works[0]));
    check(td_irecv(coming, ring->left, 0, NULL, &works[1]));
    check(td_work_wait_all(works, 2, 0));
    td_work_release(works[0]);
    td_work_release(works[1]);
    ring->sent += td_tensor_nbytes(going);
}

/* tensor = the sum over all ranks. */
static void ring_all_reduce(struct ring *ring, td_tensor *tensor)
{
    for (int step = 0; step < ring->size - 1; step++) {
        TD_SCOPE;
        td_tensor *sum = chunk(ring, tensor, ring->rank - step - 1);
        td_tensor *coming = td_empty_like(sum);
        exchange(ring, chunk(ring, tensor, ring->rank - step), coming);
        check(td_add_(sum, coming));
    }
    for (int step = 0; step < ring->size - 1; step++) {
        TD_SCOPE;
        exchange(ring, chunk(ring, tensor, ring->rank + 1 - step),
                 chunk(ring, tensor, ring->rank - step));
    }
}

static bool compare(struct ring ring, int64_t count)
{
    bool agree = false;
    {
        TD_SCOPE;
        /* Small integers, so that the sums have the same bits in any order. */
        td_manual_seed((uint64_t)ring.rank);
        td_tensor *by_ring = td_randint(-100, 100, &count, 1, TD_F32, NULL);
        td_tensor *at_once = td_clone(by_ring);
        ring_all_reduce(&ring, by_ring);
        check(td_all_reduce(at_once, TD_SUM, NULL, NULL));
        agree = td_equal(by_ring, at_once);
    }
    printf("rank %d: the ring and all_reduce %s on %lld elements, %zu bytes sent\n", ring.rank,
           agree ? "agree" : "disagree", (long long)count, ring.sent);
    return agree;
}

int main(int argc, char **argv)
{
    check(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    struct ring ring = {rank, size, (rank - 1 + size) % size, (rank + 1) % size, 0};
    bool agree = true;
    for (int i = 1; i < argc; i++)
        agree &= compare(ring, atoll(argv[i]));
    if (argc == 1)
        agree = compare(ring, 1000);
    check(td_destroy_process_group());
    return agree ? 0 : 1;
}
