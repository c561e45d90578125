/* Distributed optimizers: an object of the class td.Optimizer on each worker that owns parameters. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "rpc/grad_context.h"

#include <tandem/dist_optimizer.h>

#include <stdlib.h>
#include <string.h>

enum { SGD, ADAM, ADAMW };

/* ---- On the worker of the parameters ----------------------------------------------------------- */

struct optimizer {
    td_optimizer *local;
    td_value *references; /* keep the parameters */
    td_tensor **parameters;
    int count;
};

/* Steps of one worker run one after the other. */
static pthread_mutex_t stepping = PTHREAD_MUTEX_INITIALIZER;

static void destroy_object(void *object)
{
    struct optimizer *optimizer = object;
    td_optimizer_destroy(optimizer->local);
    td_value_release(optimizer->references);
    free(optimizer->parameters);
    free(optimizer);
}

static td_optimizer *make_local(int64_t kind, const double *o, td_tensor *const *parameters,
                                int count)
{
    if (kind == SGD)
        return td_sgd_of(parameters, count,
                         &(td_sgd_options){.lr = o[0],
                                           .momentum = o[1],
                                           .dampening = o[2],
                                           .weight_decay = o[3],
                                           .nesterov = o[4] != 0,
                                           .maximize = o[5] != 0});
    td_adam_options adam = {.lr = o[0],
                            .beta1 = o[1],
                            .beta2 = o[2],
                            .eps = o[3],
                            .weight_decay = o[4],
                            .amsgrad = o[5] != 0,
                            .maximize = o[6] != 0};
    return kind == ADAM ? td_adam_of(parameters, count, &adam)
                        : td_adamw_of(parameters, count, &adam);
}

/* td.Optimizer(kind: int, options: list, parameters: list) */
static void *create_object(td_rpc_call *call, td_value *const *args, int count)
{
    enum { OPTIONS = 7 };
    double options[OPTIONS] = {0};
    (void)call;
    (void)count;
    if (args[0]->integer < SGD || args[0]->integer > ADAMW || args[1]->count != OPTIONS) {
        td_fail(TD_ERR_INVALID, "td.Optimizer: the kind or the options are not valid");
        return NULL;
    }
    for (int i = 0; i < OPTIONS; i++)
        if (td_value_float(args[1]->items[i], &options[i]))
            return NULL;
    struct optimizer *optimizer = calloc(1, sizeof *optimizer);
    if (optimizer)
        optimizer->parameters = calloc((size_t)args[2]->count + 1, sizeof *optimizer->parameters);
    if (!optimizer || !optimizer->parameters) {
        free(optimizer);
        td__fail_nomem("td.Optimizer");
        return NULL;
    }
    optimizer->references = td_value_retain(args[2]);
    for (int64_t i = 0; i < args[2]->count; i++) {
        td_value *value = td_rref_local_value(td_value_rref(args[2]->items[i]));
        td_tensor *parameter = value ? td_value_tensor(value) : NULL;
        if (!parameter) {
            destroy_object(optimizer);
            return NULL;
        }
        optimizer->parameters[optimizer->count++] = parameter;
    }
    optimizer->local = make_local(args[0]->integer, options, optimizer->parameters,
                                  optimizer->count);
    if (optimizer->local)
        return optimizer;
    destroy_object(optimizer);
    return NULL;
}

/* Replaces the gradients of the parameters by those of the context, and keeps the former ones in `former`. */
static td_status swap_in(struct optimizer *optimizer, struct td__grad_context *context,
                         td_tensor **former)
{
    td_status status = TD_OK;
    for (int i = 0; i < optimizer->count && !status; i++) {
        td_tensor *parameter = optimizer->parameters[i];
        td_tensor *grad = td__context_grad(context, parameter);
        former[i] = td_tensor_retain(td_tensor_grad(parameter));
        status = td_tensor_set_grad(parameter, grad);
        td_tensor_release(grad);
    }
    return status;
}

/* step(context: int) */
static td_value *step(td_rpc_call *call, td_value *const *args, int count)
{
    struct optimizer *optimizer = td_rpc_call_self(call);
    (void)count;
    struct td__grad_context *context = td__context_find(call->agent, (uint64_t)args[0]->integer,
                                                        false);
    if (!context)
        return td_value_nil(); /* no gradient has come to this worker */
    td_tensor **former = calloc((size_t)optimizer->count + 1, sizeof *former);
    td_status status = former ? TD_OK : td__fail_nomem("td_dist_optimizer_step");
    pthread_mutex_lock(&stepping);
    if (!status)
        status = swap_in(optimizer, context, former);
    if (!status)
        status = td_optimizer_step(optimizer->local);
    struct td__error error;
    td__error_save(&error);
    for (int i = 0; former && i < optimizer->count; i++) {
        td_tensor_set_grad(optimizer->parameters[i], former[i]);
        td_tensor_release(former[i]);
    }
    pthread_mutex_unlock(&stepping);
    free(former);
    td__context_release(context);
    if (!status)
        return td_value_nil();
    td__error_restore(&error);
    return NULL;
}

/* ready(): once the object is there. */
static td_value *ready(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    (void)args;
    (void)count;
    return td_value_nil();
}

/* set_lr(lr: float) */
static td_value *set_lr(td_rpc_call *call, td_value *const *args, int count)
{
    struct optimizer *optimizer = td_rpc_call_self(call);
    double lr;
    (void)count;
    if (td_value_float(args[0], &lr))
        return NULL;
    pthread_mutex_lock(&stepping);
    td_status status = td_optimizer_set_lr(optimizer->local, lr);
    pthread_mutex_unlock(&stepping);
    return status ? NULL : td_value_nil();
}

td_status td__dist_optimizer_register(void)
{
    static const td_rpc_method methods[] = {
        {"ready()", ready}, {"step(context: int)", step}, {"set_lr(lr: float)", set_lr}, {0}};
    return td__rpc_register_class_own(
        &(td_rpc_class){.signature = "td.Optimizer(kind: int, options: list, parameters: list)",
                        .create = create_object,
                        .destroy = destroy_object,
                        .methods = methods});
}

/* ---- On the worker that uses it ---------------------------------------------------------------- */

struct td_dist_optimizer {
    td_rref **objects; /* one for each worker */
    int count;
};

void td_dist_optimizer_destroy(td_dist_optimizer *optimizer)
{
    if (!optimizer)
        return;
    for (int i = 0; i < optimizer->count; i++)
        td_rref_release(optimizer->objects[i]);
    free(optimizer->objects);
    free(optimizer);
}

/* Calls a method on all workers at once, and waits for all; the first failure is the result. */
static td_status call_all(td_dist_optimizer *optimizer, const char *method, td_value *args)
{
    uint64_t outer = td__current_context;
    td_future **futures = calloc((size_t)optimizer->count + 1, sizeof *futures);
    td_status status = futures ? TD_OK : td__fail_nomem("td_dist_optimizer");
    struct td__error error;
    TD_SCOPE;
    td__current_context = 0;
    for (int i = 0; futures && i < optimizer->count; i++)
        futures[i] = td_rref_async(optimizer->objects[i], method, args, NULL);
    for (int i = 0; futures && i < optimizer->count; i++)
        if ((!futures[i] || !td_future_wait(futures[i], 0)) && !status) {
            status = td__error_status();
            td__error_save(&error);
        }
    td__current_context = outer;
    free(futures);
    return status ? td__error_restore(&error) : TD_OK;
}

/* The parameters of the same owner as number `first`, which are marked; in the scope. */
static td_value *with_same_owner(td_value *parameters, int64_t first, bool *taken)
{
    const char *owner = td_rref_owner(parameters->items[first]->rref);
    td_value *list = td__value_adopt(td__value_new_list(parameters->count));
    for (int64_t i = first; list && i < parameters->count; i++)
        if (!taken[i] && !strcmp(td_rref_owner(parameters->items[i]->rref), owner)) {
            taken[i] = true;
            if (!td__value_append(list, NULL, td_value_retain(parameters->items[i])))
                return NULL;
        }
    return list;
}

static td_status make_objects(td_dist_optimizer *optimizer, int kind, td_value *options,
                              td_value *parameters, bool *taken)
{
    for (int64_t i = 0; i < parameters->count; i++) {
        if (taken[i])
            continue;
        TD_SCOPE;
        td_value *part = with_same_owner(parameters, i, taken);
        td_rref *object = part ? td_remote(td_rref_owner(parameters->items[i]->rref),
                                           "td.Optimizer", TD_ARGS(kind, options, part), NULL)
                               : NULL;
        if (!object)
            return td__error_status();
        optimizer->objects[optimizer->count++] = td_rref_retain(object);
    }
    /* Waits until each is there, so that its failure is that of this call. */
    TD_SCOPE;
    return call_all(optimizer, "ready", TD_NO_ARGS);
}

static td_dist_optimizer *make(const char *call, int kind, td_value *parameters, td_value *options)
{
    if (!parameters || !options)
        return td__null(call);
    if (parameters->kind != TD_VALUE_LIST) {
        td_fail(TD_ERR_INVALID, "%s: the parameters are a %s, not a list of references", call,
                td_value_kind_name(parameters->kind));
        return NULL;
    }
    for (int64_t i = 0; i < parameters->count; i++)
        if (parameters->items[i]->kind != TD_VALUE_RREF) {
            td_fail(TD_ERR_INVALID, "%s: parameter %lld is a %s, not a reference", call,
                    (long long)i, td_value_kind_name(parameters->items[i]->kind));
            return NULL;
        }
    td_dist_optimizer *optimizer = calloc(1, sizeof *optimizer);
    bool *taken = calloc((size_t)parameters->count + 1, sizeof *taken);
    if (optimizer)
        optimizer->objects = calloc((size_t)parameters->count + 1, sizeof *optimizer->objects);
    td_status status = optimizer && taken && optimizer->objects
                           ? make_objects(optimizer, kind, options, parameters, taken)
                           : td__fail_nomem(call);
    free(taken);
    if (!status)
        return optimizer;
    td_dist_optimizer_destroy(optimizer);
    return NULL;
}

td_dist_optimizer *td_dist_sgd(td_value *parameters, const td_sgd_options *o)
{
    td_sgd_options none = {0};
    o = o ? o : &none;
    if (td__check_reserved(__func__, o->reserved))
        return NULL;
    TD_SCOPE;
    return make(__func__, SGD, parameters,
                TD_ARGS(o->lr, o->momentum, o->dampening, o->weight_decay, (double)o->nesterov,
                        (double)o->maximize, 0.0));
}

static td_value *adam_options(const td_adam_options *o)
{
    td_adam_options none = {0};
    o = o ? o : &none;
    return TD_ARGS(o->lr, o->beta1, o->beta2, o->eps, o->weight_decay, (double)o->amsgrad,
                   (double)o->maximize);
}

td_dist_optimizer *td_dist_adam(td_value *parameters, const td_adam_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    TD_SCOPE;
    return make(__func__, ADAM, parameters, adam_options(options));
}

td_dist_optimizer *td_dist_adamw(td_value *parameters, const td_adam_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    TD_SCOPE;
    return make(__func__, ADAMW, parameters, adam_options(options));
}

td_status td_dist_optimizer_step(td_dist_optimizer *optimizer, uint64_t context)
{
    if (!optimizer)
        return td__fail_null(__func__);
    TD_SCOPE;
    td_value *args = TD_ARGS((int64_t)context);
    return args ? call_all(optimizer, "step", args) : TD_ERR_NOMEM;
}

td_status td_dist_optimizer_set_lr(td_dist_optimizer *optimizer, double lr)
{
    if (!optimizer)
        return td__fail_null(__func__);
    TD_SCOPE;
    td_value *args = TD_ARGS(lr);
    return args ? call_all(optimizer, "set_lr", args) : TD_ERR_NOMEM;
}
