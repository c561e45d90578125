/* Each collective once. Rank r begins with r + 1, or with a list of tensors, one for each rank.
 *
 *     $ tdrun --standalone --nproc-per-node=3 ./04_collectives
 *     rank 0: broadcast        1
 *     rank 0: reduce           6
 *     …
 *
 * Every rank makes the same calls in the same order. Reductions are TD_SUM, TD_PRODUCT, TD_MIN, TD_MAX,
 * TD_AVG and others; the last argument is a td_work ** for a non-blocking call, here NULL. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { MOST = 64 };

static int rank, size;

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "04_collectives: rank %d: %s\n", rank, td_last_error());
    exit(1);
}

static td_tensor *scalar(double value)
{
    return td_full(TD_SHAPE(1), value, TD_F32, NULL);
}

static void show(const char *call, td_tensor *const *tensors, int count)
{
    char line[1024];
    int used = snprintf(line, sizeof line, "rank %d: %-16s", rank, call);
    for (int i = 0; i < count; i++)
        used += snprintf(line + used, sizeof line - (size_t)used, " %g", td_item(tensors[i]));
    puts(line); /* in one piece, since other ranks write to the same terminal */
}

int main(void)
{
    check(td_init_process_group(NULL));
    rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    if (size > MOST) {
        fprintf(stderr, "04_collectives: it is for at most %d ranks, not %d\n", MOST, size);
        return 1;
    }
    {
        TD_SCOPE;
        td_tensor *in[MOST], *out[MOST], *t, *own = scalar(rank + 1);
        for (int i = 0; i < size; i++)
            in[i] = scalar(10 * (rank + 1) + i), out[i] = scalar(0);

        check(td_broadcast(t = scalar(rank + 1), 0, NULL, NULL));
        show("broadcast", &t, 1); /* the tensor of rank 0 */
        check(td_reduce(t = scalar(rank + 1), 0, TD_SUM, NULL, NULL));
        show("reduce", &t, 1); /* the sum in rank 0, the others as they were */
        check(td_all_reduce(t = scalar(rank + 1), TD_SUM, NULL, NULL));
        show("all_reduce", &t, 1); /* the sum everywhere */
        check(
            td_scatter(t = scalar(0), rank == 0 ? in : NULL, rank == 0 ? size : 0, 0, NULL, NULL));
        show("scatter", &t, 1); /* tensor r of rank 0's list */
        check(td_gather(own, rank == 0 ? out : NULL, rank == 0 ? size : 0, 0, NULL, NULL));
        show("gather", out, rank == 0 ? size : 0); /* a list of all, in rank 0 */
        check(td_all_gather(out, size, own, NULL, NULL));
        show("all_gather", out, size); /* a list of all, everywhere */
        check(td_reduce_scatter(t = scalar(0), in, size, TD_SUM, NULL, NULL));
        show("reduce_scatter", &t, 1); /* the sum of all ranks' tensor r */
        check(td_all_to_all(out, size, in, size, NULL, NULL));
        show("all_to_all", out, size); /* all ranks' tensor r */
        check(td_barrier(NULL, NULL));
        show("barrier", NULL, 0); /* all ranks have reached it */
    }
    check(td_destroy_process_group());
    return 0;
}
