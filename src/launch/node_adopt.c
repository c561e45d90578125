/* What becomes of the ranks of a node that has left the job, or is lost, with --on-failure replace: spares of other nodes
 * get them, one each, first those of the node that has most of them left. A spare that has got such a rank has it for good,
 * and no other process is started in its place. Ranks for which there is no spare stay free, for nodes that join. */
#include "launch/coordination.h"

#include <stdio.h>

int td__roster_node_behind(const struct td__roster_node *other, int rank, int count)
{
    if (rank < other->rank + other->nproc && other->rank < rank + count)
        return other->rank + other->nproc;
    for (int i = 0; i < other->adoptions; i++)
        if (other->adopted[i] >= rank && other->adopted[i] < rank + count)
            return other->adopted[i] + 1;
    return -1;
}

static int spares_left(const struct td__seat *seat)
{
    const struct td__roster_node *node = &seat->introduction.node;
    bool takes_part = seat->in_round && seat->here && !seat->gone && !seat->leaving && !seat->lost;
    return takes_part && node->adoptions < TD__ADOPTED ? node->spares - node->adoptions : 0;
}

static struct td__seat *find_adopter(const struct td__node *node)
{
    struct td__seat *found = NULL;
    for (int i = 0; i < node->lead->count; i++) {
        struct td__seat *seat = &node->lead->seats[i];
        if (spares_left(seat) > (found ? spares_left(found) : 0))
            found = seat;
    }
    return found;
}

static bool pass_on(struct td__node *node, const struct td__roster_node *left, int rank)
{
    struct td__seat *seat = find_adopter(node);
    struct td__report report = {.node = left->id, .round = node->roster.round, .code = rank};
    struct td__buffer body = {0};
    if (!seat)
        return false;
    struct td__roster_node *own = &seat->introduction.node;
    own->adopted[own->adoptions++] = rank;
    snprintf(report.text, sizeof report.text, "rank %d of node %d (on %s)", rank, left->node_rank,
             left->host);
    td__report_put(&body, &report);
    td__lead_tell(node, seat, TD__MESSAGE_ADOPT, &body);
    td__buffer_free(&body);
    return true;
}

void td__lead_pass_on(struct td__node *node, const struct td__seat *left)
{
    struct td__roster_node gone = left->introduction.node;
    bool any = node->options->on_failure == TD__REPLACE;
    for (int i = 0; any && i < gone.nproc; i++)
        any = pass_on(node, &gone, gone.rank + i);
    for (int i = 0; any && i < gone.adoptions; i++)
        any = pass_on(node, &gone, gone.adopted[i]);
}
