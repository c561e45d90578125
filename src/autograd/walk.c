/* Graph traversal; see engine.h. The list of entries is also the work list: the entries behind the
 * current one. A hash table with open addressing finds the entry of a node. */
#include "autograd/engine.h"

#include "base/fail.h"

#include <stdlib.h>

static size_t position_of(const struct td__walk *walk, const struct td_node *node)
{
    uint64_t hash = (uint64_t)(uintptr_t)node * UINT64_C(0x9e3779b97f4a7c15);
    size_t mask = (size_t)walk->index_size - 1;
    size_t position = (size_t)(hash >> 20) & mask;
    while (walk->index[position] && walk->entries[walk->index[position] - 1].node != node)
        position = (position + 1) & mask;
    return position;
}

struct td__walk_entry *td__walk_find(const struct td__walk *walk, const struct td_node *node)
{
    if (!walk->index_size)
        return NULL;
    int number = walk->index[position_of(walk, node)];
    return number ? &walk->entries[number - 1] : NULL;
}

static td_status grow(struct td__walk *walk)
{
    int capacity = walk->capacity ? walk->capacity * 2 : 64;
    struct td__walk_entry *entries = realloc(walk->entries, (size_t)capacity * sizeof *entries);
    if (entries)
        walk->entries = entries;
    int *index = calloc((size_t)capacity * 2, sizeof *index);
    if (!entries || !index) {
        free(index);
        return td__fail_nomem("td_backward");
    }
    free(walk->index);
    walk->index = index;
    walk->index_size = capacity * 2;
    walk->capacity = capacity;
    for (int i = 0; i < walk->count; i++)
        walk->index[position_of(walk, walk->entries[i].node)] = i + 1;
    return TD_OK;
}

static td_status add(struct td__walk *walk, struct td_node *node, bool by_edge)
{
    if (walk->count == walk->capacity)
        TD_TRY(grow(walk));
    size_t position = position_of(walk, node);
    if (!walk->index[position]) {
        walk->entries[walk->count] = (struct td__walk_entry){.node = node};
        walk->index[position] = ++walk->count;
    }
    walk->entries[walk->index[position] - 1].pending += by_edge;
    return TD_OK;
}

/* One allocation for the gradients of all entries; the first entry's pointer owns it. */
static td_status allocate_grads(struct td__walk *walk)
{
    size_t outputs = 0;
    for (int i = 0; i < walk->count; i++)
        outputs += (size_t)walk->entries[i].node->output_count;
    td_tensor **grads = calloc(outputs ? outputs : 1, sizeof *grads);
    if (!grads)
        return td__fail_nomem("td_backward");
    for (int i = 0; i < walk->count; i++) {
        walk->entries[i].grads = grads;
        grads += walk->entries[i].node->output_count;
    }
    return TD_OK;
}

td_status td__walk_from(struct td__walk *walk, td_tensor *const *outputs, int count)
{
    for (int i = 0; i < count; i++)
        if (outputs[i] && outputs[i]->node)
            TD_TRY(add(walk, outputs[i]->node, false));
    for (int i = 0; i < walk->count; i++) {
        struct td_node *node = walk->entries[i].node;
        for (int k = 0; k < node->input_count; k++)
            if (node->inputs[k].node)
                TD_TRY(add(walk, node->inputs[k].node, true));
    }
    return allocate_grads(walk);
}

void td__walk_free(struct td__walk *walk)
{
    for (int i = 0; i < walk->count && walk->entries[i].grads; i++)
        for (int k = 0; k < walk->entries[i].node->output_count; k++)
            td_tensor_release(walk->entries[i].grads[k]);
    if (walk->count)
        free(walk->entries[0].grads);
    free(walk->entries);
    free(walk->index);
}

td_status td__visit_leaves(td_tensor *const *outputs, int count,
                           void (*visit)(td_tensor *leaf, void *arg), void *arg)
{
    struct td__walk walk = {0};
    td_status status = td__walk_from(&walk, outputs, count);
    for (int i = 0; i < walk.count && !status; i++)
        if (td__node_is_leaf(walk.entries[i].node) && walk.entries[i].node->leaf)
            visit(walk.entries[i].node->leaf, arg);
    td__walk_free(&walk);
    return status;
}
