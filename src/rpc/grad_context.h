/* Contexts of distributed autograd: what crosses between workers is recorded here; dist_autograd.c runs backward passes.
 *
 * A message with tensors that require grad has a send node on its sender and a recv node on its receiver, both under the
 * id of the message:
 *
 *     sender      ... <- op <- send            the gradients of the send node's outputs come from the receiver
 *     receiver    recv <- op <- ...            the gradients of the recv node's outputs go to the sender
 */
#ifndef TD_RPC_GRAD_CONTEXT_H
#define TD_RPC_GRAD_CONTEXT_H

#include "autograd/graph.h"
#include "rpc/rank_set.h"
#include "rpc/rpc_agent.h"

struct td__dist_pass;

struct td__grad_context {
    struct td__map_node node;
    uint64_t id;
    atomic_int users;
    pthread_mutex_t lock;        /* for what follows */
    struct td__map sends;        /* send nodes by the id of their message */
    struct td__map grads;        /* by the leaf */
    struct td__rank_set workers; /* to which calls were made in the context, and … */
    struct td__rank_set callers; /* … from which calls came */
    struct td__dist_pass *pass;
};

/** The data of a recv node. */
struct td__recv_data {
    uint64_t context, message;
    int from;
    uint64_t expected; /* the pass in which its sender was asked to expect gradients */
};

extern const td_function td__send_function;
extern const td_function td__recv_function;

/** The context of an id, for td__context_release(); `add`: made if there is none. NULL, without an error, if there is
 *  none. */
struct td__grad_context *td__context_find(struct td__rpc_agent *agent, uint64_t id, bool add);
void td__context_release(struct td__grad_context *context);

/** The workers to which calls were made in it, for td__rank_set_free(). */
struct td__rank_set td__context_reaches(struct td__grad_context *context);

/** Frees a context here, and on the workers to which calls were made in it. */
void td__context_end(struct td__rpc_agent *agent, uint64_t id);

/** Ends the contexts that a worker has begun which has gone, and those whose calls came only from it: no other worker
 *  would end them. -1: all contexts. */
void td__contexts_lost(struct td__rpc_agent *agent, int rank);

/** Records the tensors of a message that is sent in a context: sets message ids in the header. */
td_status td__context_send(struct td__message *message, struct td__message_header *header);

/** Records those of a message that has arrived. */
td_status td__context_receive(struct td__incoming *incoming);

/** The send node of a message; NULL if there is none. With the context's lock held. */
struct td_node *td__context_sent(struct td__grad_context *context, uint64_t message);

/** The gradient of a leaf, with one reference; NULL if there is none. */
td_tensor *td__context_grad(struct td__grad_context *context, td_tensor *leaf);

/** Adds to the gradient of a leaf. */
td_status td__context_accumulate(struct td__grad_context *context, td_tensor *leaf,
                                 td_tensor *grad);

/** Copies `grad` over the gradient of a leaf. */
td_status td__context_replace(struct td__grad_context *context, td_tensor *leaf, td_tensor *grad);

/** A pass of the context has failed here, or the context has ended: tells td_ddp(), for whose ranks others may wait. */
void td__context_lost(uint64_t id, int64_t timeout_ms);

/** Registers the functions of backward passes (dist_autograd.c), and the class of optimizers (dist_optimizer.c). */
td_status td__dist_autograd_register(void);
td_status td__dist_optimizer_register(void);

/** What a context does at its end, and a recv node with the gradients of its outputs; set by dist_autograd.c. */
extern void (*td__on_context_end)(struct td__grad_context *context, td_status status,
                                  const char *why); /* ends its backward pass */
extern td_status (*td__on_recv_backward)(const struct td__recv_data *data, td_tensor *const *grads,
                                         int count);

/** Gradients as a list, which belongs to the scope: on the host, since the worker that gets them moves them to the devices
 *  of what it has sent, which may have other names than here. NULL on failure. */
td_value *td__gradients_list(td_tensor *const *grads, int count);

/** Moves the gradients of a received list to the devices of the outputs of a send node. */
td_status td__gradients_move(struct td__rpc_agent *agent, const struct td_node *node,
                             const td_value *list);

#endif
