/* The reductions of td_reduce_op values, also of those that the program creates. */
#include "base/fail.h"
#include "group/process_group.h"
#include "reduce/reduction.h"

#include <stdlib.h>

struct own_op {
    struct own_op *next;
    td_reduce_op op;
    struct td__reduction reduction; /* without a dtype */
};

/* Guards the list; no lock is locked after it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct own_op *own_ops;
static int last = TD_REDUCE_OP_OWN;
static uint32_t
    functions; /* created so far; premul_sum does not count: its factors may differ between ranks */

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
    added->next = own_ops;
    own_ops = added;
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
    struct own_op *found = NULL;
    pthread_mutex_lock(&lock);
    for (struct own_op **link = &own_ops; *link && !found; link = &(*link)->next)
        if ((*link)->op == op) {
            found = *link;
            *link = found->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    free(found);
}

td_status td__reduction_of(td_reduce_op op, td_dtype dtype, struct td__reduction *reduction)
{
    bool found = op < TD_REDUCE_OP_OWN;
    *reduction = (struct td__reduction){.op = op, .factor = 1};
    if (!found) {
        pthread_mutex_lock(&lock);
        for (struct own_op *own = own_ops; own && !found; own = own->next)
            if (own->op == op) {
                *reduction = own->reduction;
                found = true;
            }
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

static bool reduction_of_call(const td_call *call, struct td__reduction *reduction)
{
    return !td__reduction_of(call->op, call->dtype, reduction);
}

void td_reduce_begin(const td_call *call, void *data, size_t count)
{
    struct td__reduction reduction;
    void *target = data;
    const void *source = data;
    if (reduction_of_call(call, &reduction) && !reduction.user && reduction.op == TD_PREMUL_SUM)
        td__reduce_many(&reduction, &target, 1, &source, 1, count);
}

/* td_reduce_begin() has applied the factors, and td_reduce_end() divides: premul_sum and avg are sums here. */
void td_reduce_combine(const td_call *call, void *acc, const void *other, size_t count)
{
    struct td__reduction reduction;
    void *target = acc;
    const void *sources[2] = {acc, other};
    if (!reduction_of_call(call, &reduction))
        return;
    if (!reduction.user && (reduction.op == TD_PREMUL_SUM || reduction.op == TD_AVG))
        reduction.op = TD_SUM;
    td__reduce_many(&reduction, &target, 1, sources, 2, count);
}

void td_reduce_end(const td_call *call, void *acc, size_t count, int size)
{
    struct td__reduction reduction;
    void *target = acc;
    const void *source = acc;
    if (!reduction_of_call(call, &reduction) || reduction.user || reduction.op != TD_AVG)
        return;
    reduction.op = TD_PREMUL_SUM;
    reduction.factor = 1.0 / size;
    td__reduce_many(&reduction, &target, 1, &source, 1, count);
}
