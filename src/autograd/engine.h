/* Backward passes as objects.
 *
 * A pass is opened, gets its roots, is started, and runs until each of its nodes has run:
 *
 *     td__pass_open(&options, &pass);
 *     td__pass_seed(pass, loss->node, loss->output_nr, ones);     gradients that are known now
 *     td__pass_expect(pass, sent, 0, 2);                          and those that other threads feed
 *     td__pass_start(pass);
 *     td__pass_run(pass, deadline);                               meanwhile: td__pass_feed()
 *     status = td__pass_close(pass);
 *
 * A node is part of the pass if a path leads from a root to it, and runs when each edge to it and
 * each gradient that is expected for it have delivered a gradient, or that there is none. What meets
 * at one output is summed in a fixed order, whatever the order of arrival: seeds in the order of
 * their calls, then the edges (those of the node that was recorded last first, as one thread runs
 * them), then the expected gradients by number. The result has the same bits each time. (Not covered:
 * leaves to which the inner passes of several checkpointed segments add as their nodes run.)
 *
 * Threads. One thread at a time opens, seeds, expects, starts, runs and closes a pass, and the one
 * that starts it runs it. td__pass_feed() and td__pass_fail() may be called by any thread, also
 * from within a node, at any time between td__pass_open() and td__pass_close(); a pass may be closed
 * while the td__pass_feed() that completed it is still returning. */
#ifndef TD_AUTOGRAD_ENGINE_H
#define TD_AUTOGRAD_ENGINE_H

#include "autograd/graph.h"
#include "base/clock.h"

struct td__pass;

/* A gradient that td_gradients() returns instead of accumulating it in a leaf. */
struct td__capture {
    struct td_node *node;
    int output_nr;
    td_tensor *grad; /* the result, owned; NULL: none arrived */
};

struct td__pass_options {
    bool retain_graph;            /* keep the saved tensors, for another pass */
    bool outermost;               /* no part of the pass in whose node this thread may run */
    struct td__grad_sink sink;    /* without a function: gradients accumulate in the leaves */
    struct td__capture *captures; /* not NULL: only nodes that lead to them run, and leaves
                                     accumulate nothing; borrowed until the end */
    int capture_count;
};

/** Opens a pass without roots. */
td_status td__pass_open(const struct td__pass_options *options, struct td__pass **pass);

/** Makes an output of a node a root with the gradient `grad`, which is retained. Before the start;
 *  a second seed of the same output is added to the first. */
td_status td__pass_seed(struct td__pass *pass, td_node *node, int output_nr, td_tensor *grad);

/** Makes an output of a node a root for which `count` gradients, 0 or more, will be fed. Before
 *  the start. A second call for the same output adds its `count`, and the numbers go on. */
td_status td__pass_expect(struct td__pass *pass, td_node *node, int output_nr, int count);

/** Whether the node is part of the pass. */
bool td__pass_contains(const struct td__pass *pass, const td_node *node);

/** The next node of the pass with this function, or NULL; *cursor is 0 at first. The order depends
 *  on the graph and the order of the roots only. The pass keeps the nodes alive. */
td_node *td__pass_next_node(const struct td__pass *pass, const td_function *function, int *cursor);

/** Starts the pass: roots can no longer be added, and nodes of devices begin to run. */
td_status td__pass_start(struct td__pass *pass);

/**
 * Feeds the gradient with the number `number` (0 … count - 1) of those that td__pass_expect()
 * announced for an output; NULL: there is none. It is retained. Never waits for a node, and
 * computes nothing.
 *
 * After a failure of the pass it is ignored. TD_ERR_INVALID, and the pass goes on, if it does not
 * fit the output, was not expected, or has been fed before.
 */
td_status td__pass_feed(struct td__pass *pass, td_node *node, int output_nr, int number,
                        td_tensor *grad);

/**
 * Runs nodes on this thread (those of a numbered device on its worker) until each expected gradient
 * has arrived and each node has run, and then what td__at_end_of_backward() was given. Sleeps while
 * nothing is ready.
 *
 * Returns the failure of the pass: that of a node, a hook or the sink, that of td__pass_fail(), or
 * TD_ERR_TIMEOUT when it had to sleep past the deadline. It then waits for nodes that still run on
 * devices, so that nothing of the pass is in use afterwards.
 */
td_status td__pass_run(struct td__pass *pass, td__deadline deadline);

/** Ends the pass with `status` and the calling thread's last error; the first failure stays. A node
 *  that runs meanwhile runs to its end, and no other begins. */
void td__pass_fail(struct td__pass *pass, td_status status);

/** Frees the pass, in any state. Returns its failure; TD_ERR_STATE if it was started but has not
 *  run to its end, for which it waits for nodes that run on devices. NULL is fine. */
td_status td__pass_close(struct td__pass *pass);

/** A whole pass from seeds: gradients[i] is that of outputs[i], which requires grad, and NULL (also
 *  for all of them) is ones. */
td_status td__run_backward(td_tensor *const *outputs, td_tensor *const *gradients, int count,
                           const struct td__pass_options *options);

/** The sink of the pass in whose node this thread runs; without a function if it has none. */
struct td__grad_sink td__running_sink(void);

/** Adds `grad` to *sum (NULL: becomes it, retained), in place if *sum is not shared. */
td_status td__grad_add(td_tensor **sum, td_tensor *grad);

#endif
