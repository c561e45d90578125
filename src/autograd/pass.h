/* The inside of a backward pass (engine.h), for the files that implement it. */
#ifndef TD_AUTOGRAD_PASS_H
#define TD_AUTOGRAD_PASS_H

#include "autograd/engine.h"
#include "base/fail.h"

/* ---- The nodes of a pass (walk.c) -------------------------------------------------------------- */

/* The gradients that are fed for one output of a node. */
struct td__expected {
    struct td__expected *next; /* of another output of the node */
    int output_nr, count;
    struct td__fed {
        td_tensor *grad; /* owned */
        bool arrived;
    } * fed;
};

struct td__walk_entry {
    struct td_node *node; /* kept alive by the roots */
    int pending;          /* edges and expected gradients that have not delivered yet */
    bool is_root;         /* holds a reference to the node */
    bool needed;          /* for td_gradients(): leads to a captured input */
    bool written;         /* a leaf whose gradient was written directly (td__grad_target()) */
    td_tensor **grads;    /* accumulated, for each output; owned */
    struct td__expected *expected;
};

struct td__grads_block;

struct td__walk {
    struct td__walk_entry *entries;
    int count, capacity;
    int *index; /* by hash of the node: number of its entry plus 1, or 0 */
    int index_size;
    struct td__grads_block *blocks; /* the memory of the entries' grads */
};

/** Adds a root and the nodes behind it to a walk, which is all-zero at first, and counts their
 *  edges. Retains the root. Not recursive: the graph may be deep. After a failure the walk can only
 *  be freed. */
td_status td__walk_add_root(struct td__walk *walk, struct td_node *node);

/** The entry of a node, or NULL. */
struct td__walk_entry *td__walk_find(const struct td__walk *walk, const struct td_node *node);

/** The numbers of all entries in the order in which their nodes were recorded, leaves first; for
 *  free(). NULL without memory. */
int *td__walk_by_sequence(const struct td__walk *walk);

void td__walk_free(struct td__walk *walk);

/* ---- Sums in a fixed order (grad_sum.c) ---------------------------------------------------------
 *
 * A thread that runs all nodes of a pass runs them in the reverse order of their sequence numbers,
 * so that gradients meet in that order, and each is added as it comes. With several threads, or
 * gradients from outside, nodes run in any order: each edge then has a number in the order in which
 * gradients are to be added, and one that comes early is kept until those before it have come. */

struct td__edge_order {
    struct td__early {
        td_tensor *grad; /* owned */
        int output_nr;
        bool arrived;
    } * edges; /* to all entries, those of one entry together, in the order of their sum */
    int edge_count;
    int *first;           /* by entry: the number of its first edge; one more at the end */
    int *next;            /* by entry: the number of the next edge to be added */
    int *number_of_input; /* the edge of input i of entry e: number_of_input[first_input[e] + i] */
    int *first_input;
};

/** Numbers the edges of a walk. */
td_status td__edge_order_init(struct td__edge_order *order, const struct td__walk *walk);
void td__edge_order_free(struct td__edge_order *order);

/** Whether the edge order is in use. */
static inline bool td__edge_order_is_on(const struct td__edge_order *order)
{
    return order->first != NULL;
}

/** How many edges lead to an entry. */
static inline int td__edge_order_count(const struct td__edge_order *order, int entry)
{
    return order->first[entry + 1] - order->first[entry];
}

/** Input `input` of the entry `source` has delivered a gradient (retained), or NULL, to `target`. */
td_status td__edge_order_deliver(struct td__edge_order *order, struct td__walk *walk, int source,
                                 int input, struct td__walk_entry *target, td_tensor *grad);

/** Adds what was fed for an entry to its gradients. */
td_status td__add_fed(struct td__walk_entry *entry);

/* ---- The pass ----------------------------------------------------------------------------------- */

enum { TD__MAX_READY_QUEUES = 66 };

struct td__ready_queue {
    struct td__pass *pass;
    td_device *device; /* NULL: the thread in td__pass_run() */
    int *ready;                /* a heap of entry numbers */
    int count, capacity;
};

struct td__at_end {
    struct td__at_end *next;
    td_status (*fn)(void *arg);
    void (*dropped)(void *arg);
    void *arg;
};

struct td__pass {
    struct td__pass_options options;
    struct td__walk walk;    /* does not change any more after the start, except for its entries */
    struct td__pass *outer;  /* the pass in whose node this one runs */
    td_device *here; /* whose worker has started the pass; or NULL */

    pthread_mutex_t lock; /* guards all that follows, and the entries; taken before the
                             locks of nodes */
    pthread_cond_t changed;
    bool started, has_expected;
    struct td__edge_order order;
    struct td__ready_queue queues[TD__MAX_READY_QUEUES];
    int queue_count;
    int unfinished; /* ready or running entries */
    int awaited;    /* expected gradients that have not arrived */
    td_status status;
    struct td__error error; /* of the first failure */
    struct td__at_end *first_at_end, **last_at_end;
};

/* ---- Running nodes (engine.c) ------------------------------------------------------------------- */

/** The pass in whose node this thread runs, or NULL. */
struct td__pass *td__running_pass(void);

/** Records the first failure, with this thread's last error. With the lock held. */
void td__engine_fail(struct td__pass *pass, td_status status);

/** The queue of a device's nodes. With the lock held. */
struct td__ready_queue *td__engine_queue(struct td__pass *pass, td_device *device);

/** Queues an entry of which nothing is pending. With the lock held. */
void td__engine_make_ready(struct td__pass *pass, struct td__walk_entry *entry);

/** Runs ready entries until nothing is unfinished or awaited. After a failure it drops them, and
 *  waits for those that run. */
void td__engine_run(struct td__pass *pass, td__deadline deadline);

#endif
