/* Groups and all_reduce: a sum over two of the ranks, and one over all of them.
 *
 *     $ tdrun --standalone --nproc-per-node=3 ./03_groups
 *     rank 0: 2 in the group of ranks 0 and 1, 3 in the world
 *     rank 1: 2 in the group of ranks 0 and 1, 3 in the world
 *     rank 2: not in the group, 3 in the world
 *
 * An operation on a group that a rank is not a member of is an error there, so the rank checks first. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "03_groups: %s\n", td_last_error());
    exit(1);
}

/* The sum of one 1 from each rank. */
static double count_ranks(td_group *group)
{
    double count = 0;
    {
        TD_SCOPE;
        td_tensor *tensor = td_ones(TD_SHAPE(1), TD_F32, NULL);
        check(td_all_reduce(tensor, TD_SUM, group, NULL));
        count = td_item(tensor);
    }
    return count;
}

int main(void)
{
    check(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);

    td_group *pair;
    check(td_new_group(TD_DIMS(0, 1), NULL, &pair));
    bool member = td_get_rank(pair) >= 0;
    double in_pair = member ? count_ranks(pair) : 0;
    double in_world = count_ranks(NULL); /* NULL is the world */

    if (member)
        printf("rank %d: %g in the group of ranks 0 and 1, %g in the world\n", rank, in_pair,
               in_world);
    else
        printf("rank %d: not in the group, %g in the world\n", rank, in_world);

    td_group_destroy(pair);
    check(td_destroy_process_group());
    return 0;
}
