/* Remote modules: modules whose forward is a call, and whose parameters are on another worker.
 *
 * The handle has a reference to the module, and its text, which it got when it was made. The mode (train or eval) is set
 * there when it is set here; if that fails, the next forward tries again, and reports the failure. */
#include "autograd/graph.h"
#include "base/fail.h"
#include "base/option_rules.h"
#include "nn/module.h"
#include "rpc/rpc_agent.h"
#include "rpc/rref.h"
#include "rpc/rref_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct remote {
    td_rref *rref;
    char *text;               /* of the module, as td_module_text() has it */
    td_rpc_call_options call; /* of all calls; without kwargs */
    bool training;            /* the mode there, as far as it is known here */
    char **names;             /* of results: lists of tensors do not own them */
    int name_count;
};

static struct remote *remote_of(const td_module *module)
{
    return td_module_data(module);
}

/* ---- The mode ---------------------------------------------------------------------------------- */

static td_status set_mode(const td_module *module)
{
    struct remote *remote = remote_of(module);
    TD_SCOPE;
    if (remote->training == module->training)
        return TD_OK;
    if (!td_rref_sync(remote->rref, "train", TD_ARGS(td_value_from_bool(module->training)),
                      &remote->call))
        return td__error_status();
    remote->training = module->training;
    return TD_OK;
}

static void train(td_module *module)
{
    set_mode(module);
}

/* ---- Forward ----------------------------------------------------------------------------------- */

/* A copy of a name that lives as long as the module; NULL without memory. */
static const char *keep_name(struct remote *remote, const char *name)
{
    for (int i = 0; i < remote->name_count; i++)
        if (!strcmp(remote->names[i], name))
            return remote->names[i];
    char **names = realloc(remote->names, sizeof *names * (size_t)(remote->name_count + 1));
    remote->names = names ? names : remote->names;
    char *copy = names ? strdup(name) : NULL;
    if (copy)
        names[remote->name_count++] = copy;
    return copy;
}

/* The results: a list of tensors, and a list of their names or nil. */
static td_status take_results(struct remote *remote, td_value *answer, td_tensor_list *results)
{
    td_value *tensors = td_value_at(answer, 0), *names = td_value_at(answer, 1);
    bool valid = tensors && names;
    for (int64_t i = 0; valid && i < td_value_count(tensors); i++) {
        td_value *name = i < td_value_count(names) ? td_value_at(names, i) : NULL;
        bool named = td_value_kind_of(name) == TD_VALUE_TEXT;
        const char *kept = named ? keep_name(remote, td_value_text(name)) : NULL;
        if (named && !kept)
            return td__fail_nomem("td_forward");
        valid = !td_tensor_list_add(results, kept, td_value_tensor(td_value_at(tensors, i)));
    }
    return valid
               ? TD_OK
               : td_fail(TD_ERR_INVALID, "worker \"%s\" returned results that are none of a module",
                         td_rref_owner(remote->rref));
}

static td_value *names_of(const td_tensor_list *list)
{
    td_value *names[TD_TENSOR_LIST_MAX];
    for (int i = 0; i < list->count; i++)
        names[i] = list->names[i] ? td_value_from_text(list->names[i]) : td_value_nil();
    return td_value_list(names, list->count);
}

static td_value *tensors_of(const td_tensor_list *list)
{
    td_value *tensors[TD_TENSOR_LIST_MAX];
    for (int i = 0; i < list->count; i++)
        tensors[i] = td_value_from_tensor(list->at[i]);
    return td_value_list(tensors, list->count);
}

static td_status forward(td_module *module, const td_tensor_list *inputs, td_tensor_list *results)
{
    struct remote *remote = remote_of(module);
    TD_TRY(set_mode(module));
    bool records = td_grad_enabled() && td__current_context;
    td_value *answer = td_rref_sync(
        remote->rref, "call",
        TD_ARGS(tensors_of(inputs), names_of(inputs), td_value_from_bool(records)), &remote->call);
    return answer ? take_results(remote, answer, results) : td__error_status();
}

td_value *td__module_call(td_module *module, td_value *const *args)
{
    td_tensor_list inputs = {0}, results;
    for (int64_t i = 0; i < td_value_count(args[0]); i++) {
        td_value *name = i < td_value_count(args[1]) ? td_value_at(args[1], i) : NULL;
        bool named = td_value_kind_of(name) == TD_VALUE_TEXT;
        if (td_tensor_list_add(&inputs, named ? td_value_text(name) : NULL,
                               td_value_tensor(td_value_at(args[0], i))))
            return NULL;
    }
    bool before = td_set_grad_enabled(args[2]->boolean);
    td_status status = td_forward_list(module, &inputs, &results);
    td_set_grad_enabled(before);
    return status ? NULL : TD_ARGS(tensors_of(&results), names_of(&results));
}

/* ---- The kind ---------------------------------------------------------------------------------- */

static td_status refuse(const td_module *module)
{
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "the parameters of a remote module are on worker \"%s\": td_remote_parameters() has references "
        "to them, and the module's reference the methods \"state\" and \"load_state\"",
        td_rref_owner(remote_of(module)->rref));
}

static int describe(const td_module *module, char *text, size_t size)
{
    const struct remote *remote = remote_of(module);
    return snprintf(text, size, "worker=\"%s\", %s", td_rref_owner(remote->rref), remote->text);
}

static void free_data(void *data)
{
    struct remote *remote = data;
    td_rref_release(remote->rref);
    free(remote->text);
    for (int i = 0; i < remote->name_count; i++)
        free(remote->names[i]);
    free(remote->names);
}

/* The reference is a value of its own (module_pack.c). */
static td_status save_options(const td_module *module, td_state *options)
{
    (void)module, (void)options;
    return TD_OK;
}

static td_status load_options(td_module *module, const td_state *options)
{
    return remote_of(module)->rref && !td_state_count(options) && !td_child_count(module) &&
                   !td_param(module, 0) && !td_buffer(module, 0)
               ? TD_OK
               : td_fail(TD_ERR_INVALID,
                         "a received module is not valid: a remote one without a reference");
}

static const td_module_ops remote_ops = {
    .name = "Remote",
    .data_size = sizeof(struct remote),
    .forward_list = forward,
    .free_data = free_data,
    .describe = describe,
    .save_options = save_options,
    .load_options = load_options,
    .train = train,
    .refuse_tensors = refuse,
};

td_status td__remote_module_register(void)
{
    return td_register_module(&remote_ops);
}

static bool is_remote(const td_module *module)
{
    return td_module_ops_of(module) == &remote_ops;
}

td_value *td__remote_module_pack(const td_module *module)
{
    const struct remote *remote = remote_of(module);
    return is_remote(module)
               ? TD_ARGS(remote->rref, remote->text, td_value_from_bool(remote->training))
               : NULL;
}

td_status td__remote_module_unpack(td_module *module, const td_value *packed)
{
    if (!is_remote(module) || td_value_count(packed) != 3 ||
        td_value_kind_of(packed->items[0]) != TD_VALUE_RREF ||
        td_value_kind_of(packed->items[1]) != TD_VALUE_TEXT ||
        td_value_kind_of(packed->items[2]) != TD_VALUE_BOOL)
        return td_fail(TD_ERR_INVALID, "a received module is not valid: its reference is none");
    struct remote *remote = remote_of(module);
    remote->rref = td_rref_retain(packed->items[0]->rref);
    remote->text = strdup(td_value_text(packed->items[1]));
    remote->training = packed->items[2]->boolean;
    return remote->text ? TD_OK : td__fail_nomem("rpc");
}

/* ---- Making ------------------------------------------------------------------------------------ */

static td_module *make(const char *call, td_rref *rref, const td_rpc_call_options *options)
{
    td_rpc_call_options kept = options ? *options : (td_rpc_call_options){0};
    kept.kwargs = NULL;
    TD_SCOPE;
    td_value *about = td_rref_sync(rref, "about", TD_NO_ARGS, &kept);
    td_module *module = about ? td_module_create(&remote_ops) : NULL;
    if (!module)
        return NULL;
    struct remote *remote = remote_of(module);
    const char *text = td_value_text(td_value_at(about, 0));
    remote->rref = td_rref_retain(rref);
    remote->text = text ? strdup(text) : NULL;
    remote->call = kept;
    if (remote->text && !td_value_bool(td_value_at(about, 1), &remote->training)) {
        module->training = remote->training;
        return module;
    }
    td_module_destroy(module);
    td__fail_nomem(call);
    return NULL;
}

td_module *td_remote_module(const char *to, const char *function, td_value *args,
                            const td_rpc_call_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    TD_SCOPE;
    td_rref *rref = td_remote(to, function, args, options);
    return rref ? make(__func__, rref, options) : NULL;
}

td_module *td_remote_module_of(td_rref *rref, const td_rpc_call_options *options)
{
    if (!rref)
        return td__null(__func__);
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return make(__func__, rref, options);
}

td_rref *td_remote_module_rref(const td_module *module)
{
    if (is_remote(module))
        return remote_of(module)->rref;
    td_fail(TD_ERR_INVALID, "td_remote_module_rref: the module is %s",
            module ? "not a remote one" : "NULL");
    return NULL;
}

/* ---- Parameters -------------------------------------------------------------------------------- */

struct listing {
    td_value *references;   /* a list */
    const td_module **seen; /* modules whose parameters are in the list */
    const td_tensor **tensors;
    int seen_count, tensor_count;
};

static td_status append(struct listing *listing, td_value *item)
{
    if (!item)
        return td__error_status();
    if (td__value_append(listing->references, NULL, td_value_retain(item)))
        return TD_OK;
    td_value_release(item);
    return td__fail_nomem("td_remote_parameters");
}

/* Several handles may have a reference to one module. */
static td_status list_remote(struct listing *listing, const td_module *module)
{
    struct remote *remote = remote_of(module);
    for (int i = 0; i < listing->seen_count; i++)
        if (td__rref_id(remote_of(listing->seen[i])->rref) == td__rref_id(remote->rref))
            return TD_OK;
    const td_module **seen = realloc(listing->seen,
                                     sizeof *seen * (size_t)(listing->seen_count + 1));
    if (!seen)
        return td__fail_nomem("td_remote_parameters");
    listing->seen = seen;
    seen[listing->seen_count++] = module;
    td_value *there = td_rref_sync(remote->rref, "parameters", TD_NO_ARGS, &remote->call);
    td_status status = there ? TD_OK : td__error_status();
    for (int64_t i = 0; !status && i < td_value_count(there); i++)
        status = append(listing, td_value_at(there, i));
    return status;
}

static td_status list_local(struct listing *listing, td_tensor *tensor)
{
    for (int i = 0; i < listing->tensor_count; i++)
        if (listing->tensors[i] == tensor)
            return TD_OK;
    const td_tensor **tensors = realloc(listing->tensors,
                                        sizeof *tensors * (size_t)(listing->tensor_count + 1));
    if (!tensors)
        return td__fail_nomem("td_remote_parameters");
    listing->tensors = tensors;
    tensors[listing->tensor_count++] = tensor;
    return append(listing, td_value_from_rref(td_rref_create(td_value_from_tensor(tensor))));
}

static td_status list_module(struct listing *listing, const td_module *module)
{
    if (is_remote(module))
        return list_remote(listing, module);
    td_tensor *tensor;
    for (int i = 0; (tensor = td_param(module, i)); i++)
        TD_TRY(list_local(listing, tensor));
    for (int i = 0; i < td_child_count(module); i++)
        TD_TRY(list_module(listing, td_child(module, i)));
    return TD_OK;
}

td_value *td_remote_parameters(td_module *module)
{
    if (!module)
        return td__null(__func__);
    TD_SCOPE;
    struct listing listing = {.references = td__value_adopt(td__value_new_list(8))};
    td_status status = listing.references ? list_module(&listing, module) : TD_ERR_NOMEM;
    free(listing.seen);
    free(listing.tensors);
    return status ? NULL : td_value_return(listing.references);
}
