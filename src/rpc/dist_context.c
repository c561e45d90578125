/* The contexts of the program: they begin and end on its threads, and have the gradients of its leaves. */
#include "rpc/grad_context.h"

#include <tandem/dist_autograd.h>

static _Thread_local uint64_t outer_contexts[16];
static _Thread_local int depth;

uint64_t td_dist_autograd_begin(void)
{
    struct td__rpc_agent *agent = td__agent_enter(__func__);
    if (!agent)
        return 0;
    uint64_t id = td__rref_new_id(agent);
    struct td__grad_context *context = td__context_find(agent, id, true);
    if (context && depth < (int)(sizeof outer_contexts / sizeof outer_contexts[0])) {
        outer_contexts[depth++] = td__current_context;
        td__current_context = id;
    } else {
        td__context_end(agent, id);
        if (context)
            td_fail(TD_ERR_INVALID, "td_dist_autograd_begin: contexts are nested too deep");
        id = 0;
    }
    td__context_release(context);
    td__agent_leave(agent);
    return id;
}

void td_dist_autograd_end(uint64_t *id)
{
    if (!id || !*id)
        return;
    if (td__current_context == *id && depth > 0)
        td__current_context = outer_contexts[--depth];
    struct td__rpc_agent *agent = td__agent_hold();
    if (agent)
        td__context_end(agent, *id);
    td__agent_leave(agent);
    *id = 0;
}

uint64_t td_dist_autograd_current(void)
{
    return td__current_context;
}

td_tensor *td_dist_autograd_grad(uint64_t id, td_tensor *leaf)
{
    struct td__rpc_agent *agent = td__agent_hold();
    struct td__grad_context *context = agent && leaf ? td__context_find(agent, id, false) : NULL;
    td_tensor *grad = context ? td__context_grad(context, leaf) : NULL;
    td__context_release(context);
    td__agent_leave(agent);
    return td__adopt(grad);
}
