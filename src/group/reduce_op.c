/* The reductions of td_reduce_op values, also of those that the program creates. */
#include "base/fail.h"
#include "group/process_group.h"
#include "reduce/reduction.h"

#include <stdlib.h>

struct own_op {
    LIST_ENTRY(own_op) link;
    td_reduce_op op;
    struct td__reduction reduction; /* without a dtype */
};

/* Guards the list; no lock is locked after it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(, own_op) own_ops;
static int last = TD_REDUCE_OP_OWN;
static uint32_t
    functions; /* created so far; premul_sum does not count: its factors may differ between ranks */

static struct own_op *find(td_reduce_op op) /* holds the lock */
{
    struct own_op *own;
    LIST_FOREACH (own, &own_ops, link)
        if (own->op == op)
            break;
    return own;
}

static td_status add(const struct td__reduction *reduction, td_reduce_op *op)
{
    struct own_op *added = calloc(1, sizeof *added);
    if (!added)
        return td__fail_nomem("td_reduce_op_create");
    added->reduction = *reduction;
    pthread_mutex_lock(&lock);
    added->op = (td_reduce_op)last++;
    if (reduction->user)
        added->reduction.number = ++functions;
    LIST_INSERT_HEAD(&own_ops, added, link);
    *op = added->op;
    pthread_mutex_unlock(&lock);
    return TD_OK;
}

td_status td_reduce_op_create(td_reduce_fn fn, void *arg, td_reduce_op *op)
{
    if (!fn || !op)
        return td_fail(TD_ERR_INVALID, "td_reduce_op_create: the %s is NULL",
                       fn ? "result" : "function");
    return add(&(struct td__reduction){.user = fn, .user_arg = arg}, op);
}

td_status td_reduce_op_create_premul_sum(double factor, td_reduce_op *op)
{
    if (!op)
        return td_fail(TD_ERR_INVALID, "td_reduce_op_create_premul_sum: the result is NULL");
    return add(&(struct td__reduction){.op = TD_PREMUL_SUM, .factor = factor}, op);
}

void td_reduce_op_destroy(td_reduce_op op)
{
    pthread_mutex_lock(&lock);
    struct own_op *own = find(op);
    if (own)
        LIST_REMOVE(own, link);
    pthread_mutex_unlock(&lock);
    free(own);
}

td_status td__reduction_of(td_reduce_op op, td_dtype dtype, struct td__reduction *reduction)
{
    bool found = op < TD_REDUCE_OP_OWN;
    *reduction = (struct td__reduction){.op = op, .factor = 1};
    if (!found) {
        pthread_mutex_lock(&lock);
        const struct own_op *own = find(op);
        found = own;
        if (found)
            *reduction = own->reduction;
        pthread_mutex_unlock(&lock);
    }
    if (!found)
        return td_fail(TD_ERR_INVALID,
                       "%d is not a reduction (see td_reduce_op and td_reduce_op_create())",
                       (int)op);
    reduction->dtype = dtype;
    return td__reduction_check(reduction);
}

/* ---- For backends ---------------------------------------------------------------------------- */

/* Multiplies by the factor of the operation, or with TD_AVG by `mean`; does nothing for other operations than `op`. */
static void scale(const td_call *call, td_reduce_op op, double mean, void *data, size_t count)
{
    struct td__reduction reduction;
    const void *source = data;
    if (td__reduction_of(call->op, call->dtype, &reduction) || reduction.user || reduction.op != op)
        return;
    if (op == TD_AVG) {
        reduction.op = TD_PREMUL_SUM;
        reduction.factor = mean;
    }
    td__reduce_many(&reduction, &data, 1, &source, 1, count);
}

void td_reduce_begin(const td_call *call, void *data, size_t count)
{
    scale(call, TD_PREMUL_SUM, 1, data, count);
}

bool td_reduce_factor(const td_call *call, double *factor)
{
    struct td__reduction reduction;
    if (td__reduction_of(call->op, call->dtype, &reduction) || reduction.user ||
        reduction.op != TD_PREMUL_SUM)
        return false;
    *factor = reduction.factor;
    return true;
}

/* td_reduce_begin() has applied the factors, and td_reduce_end() divides: premul_sum and avg are sums here. */
void td_reduce_combine(const td_call *call, void *acc, const void *other, size_t count)
{
    struct td__reduction reduction;
    const void *sources[2] = {acc, other};
    if (td__reduction_of(call->op, call->dtype, &reduction))
        return;
    if (!reduction.user && (reduction.op == TD_PREMUL_SUM || reduction.op == TD_AVG))
        reduction.op = TD_SUM;
    td__reduce_many(&reduction, &acc, 1, sources, 2, count);
}

void td_reduce_end(const td_call *call, void *acc, size_t count, int size)
{
    scale(call, TD_AVG, 1.0 / size, acc, count);
}
