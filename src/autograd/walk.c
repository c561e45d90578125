/* Graph traversal; see pass.h. The list of entries is also the work list: the entries behind the
 * current one. A hash table with open addressing finds the entry of a node. */
#include "autograd/pass.h"

#include <stdlib.h>

/* The gradients of the entries that one root has added. */
struct td__grads_block {
    struct td__grads_block *next;
    td_tensor *grads[];
};

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

/* One allocation for the gradients of all entries from number `from` on. */
static td_status allocate_grads(struct td__walk *walk, int from)
{
    size_t outputs = 0;
    for (int i = from; i < walk->count; i++)
        outputs += (size_t)walk->entries[i].node->output_count;
    struct td__grads_block *block = calloc(1, sizeof *block + outputs * sizeof *block->grads);
    if (!block)
        return td__fail_nomem("td_backward");
    block->next = walk->blocks;
    walk->blocks = block;
    td_tensor **grads = block->grads;
    for (int i = from; i < walk->count; i++) {
        walk->entries[i].grads = grads;
        grads += walk->entries[i].node->output_count;
    }
    return TD_OK;
}

td_status td__walk_add_root(struct td__walk *walk, struct td_node *root)
{
    int from = walk->count;
    TD_TRY(add(walk, root, false));
    struct td__walk_entry *entry = td__walk_find(walk, root);
    if (!entry->is_root)
        td__node_retain(root);
    entry->is_root = true;
    if (walk->count == from)
        return TD_OK;
    for (int i = from; i < walk->count; i++) {
        struct td_node *node = walk->entries[i].node;
        for (int k = 0; k < node->input_count; k++)
            if (node->inputs[k].node)
                TD_TRY(add(walk, node->inputs[k].node, true));
    }
    return allocate_grads(walk, from);
}

struct place {
    uint64_t sequence;
    int number;
};

static int by_sequence(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    return (x->sequence > y->sequence) - (x->sequence < y->sequence);
}

int *td__walk_by_sequence(const struct td__walk *walk)
{
    size_t count = (size_t)walk->count;
    struct place *places = malloc((count ? count : 1) * sizeof *places);
    int *numbers = malloc((count ? count : 1) * sizeof *numbers);
    if (!places || !numbers) {
        td__fail_nomem("td_backward");
        free(numbers);
        numbers = NULL;
        count = 0;
    }
    for (size_t i = 0; i < count; i++)
        places[i] = (struct place){walk->entries[i].node->sequence, (int)i};
    if (count)
        qsort(places, count, sizeof *places, by_sequence);
    for (size_t i = 0; i < count; i++)
        numbers[i] = places[i].number;
    free(places);
    return numbers;
}

static void free_expected(struct td__expected *expected)
{
    while (expected) {
        struct td__expected *next = expected->next;
        for (int i = 0; i < expected->count; i++)
            td_tensor_release(expected->fed[i].grad);
        free(expected->fed);
        free(expected);
        expected = next;
    }
}

void td__walk_free(struct td__walk *walk)
{
    for (int i = 0; i < walk->count; i++) {
        struct td__walk_entry *entry = &walk->entries[i];
        for (int k = 0; entry->grads && k < entry->node->output_count; k++)
            td_tensor_release(entry->grads[k]);
        free_expected(entry->expected);
    }
    /* The last: it may free the nodes of other entries. */
    for (int i = 0; i < walk->count; i++)
        if (walk->entries[i].is_root)
            td__node_release(walk->entries[i].node);
    while (walk->blocks) {
        struct td__grads_block *next = walk->blocks->next;
        free(walk->blocks);
        walk->blocks = next;
    }
    free(walk->entries);
    free(walk->index);
}

td_status td__visit_leaves(td_tensor *const *outputs, int count,
                           void (*visit)(td_tensor *leaf, void *arg), void *arg)
{
    struct td__walk walk = {0};
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++)
        if (outputs[i] && outputs[i]->node)
            status = td__walk_add_root(&walk, outputs[i]->node);
    for (int i = 0; i < walk.count && !status; i++)
        if (td__node_is_leaf(walk.entries[i].node) && walk.entries[i].node->leaf)
            visit(walk.entries[i].node->leaf, arg);
    td__walk_free(&walk);
    return status;
}
