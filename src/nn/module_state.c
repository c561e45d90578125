/* Saving and loading the state of a module. Everything is compared before the first element is
 * copied, so a state that does not fit changes nothing. */
#include "nn/module.h"

#include "base/buffer.h"
#include "base/fail.h"
#include "tensor/deferred.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static td_status save_tensor(const char *name, struct td__module_tensor *entry, void *state)
{
    if (!entry->saved)
        return TD_OK;
    td_tensor *alias = td__alias(entry->tensor);
    td_status status = alias ? td_tensor_set_shard(alias, td_tensor_shard(entry->tensor))
                             : TD_ERR_NOMEM;
    if (!status)
        status = td_state_add(state, name, alias);
    td_tensor_release(alias);
    return status;
}

td_state *td_module_state(td_module *module)
{
    td_state *state = module ? td_state_create() : NULL;
    if (state && td__module_visit(module, save_tensor, state)) {
        td_state_destroy(state);
        return NULL;
    }
    return state;
}

/* ---- Mismatches -------------------------------------------------------------------------- */

/* Names for one part of the error; beyond the first few they are only counted. */
enum { NAMES_SHOWN = 6 };

struct complaints {
    struct td__buffer text;
    int count;
};

__attribute__((format(printf, 2, 3))) static void complain(struct complaints *complaints,
                                                           const char *format, ...)
{
    if (complaints->count++ >= NAMES_SHOWN)
        return;
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (complaints->count > 1)
        td__buffer_put(&complaints->text, ", ", 2);
    td__buffer_put(&complaints->text, text, strlen(text));
}

struct loading {
    const td_state *state;
    td_state *names; /* of what the module saves */
    struct complaints missing, unexpected, misshapen;
};

static const char *whole_shape_of(const td_tensor *tensor)
{
    const td_shard *shard = td_tensor_shard(tensor);
    return shard ? td__shape_text(shard->shape, shard->ndim) : td__shape_of(tensor);
}

static td_status compare_tensor(const char *name, struct td__module_tensor *entry, void *arg)
{
    struct loading *loading = arg;
    if (!entry->saved)
        return TD_OK;
    TD_TRY(td_state_add(loading->names, name, entry->tensor));
    td_tensor *tensor = td_state_get(loading->state, name);
    if (!tensor)
        complain(&loading->missing, "%s", name);
    else if (!td__same_shape(tensor, entry->tensor) && !td__tensor_fits(tensor, entry->tensor))
        complain(&loading->misshapen, "%s (%s, not %s)", name, td__shape_of(tensor),
                 whole_shape_of(entry->tensor));
    else if (!td__tensor_fits(tensor, entry->tensor))
        complain(&loading->misshapen, "%s (another shard)", name);
    return TD_OK;
}

/* "missing: a, b and 3 more; " */
static void tell(struct td__buffer *text, const char *what, struct complaints *complaints)
{
    if (!complaints->count)
        return;
    char rest[48] = "";
    if (complaints->count > NAMES_SHOWN)
        snprintf(rest, sizeof rest, " and %d more", complaints->count - NAMES_SHOWN);
    const char *separator = text->size ? "; " : "";
    td__buffer_put(text, separator, strlen(separator));
    td__buffer_put(text, what, strlen(what));
    td__buffer_put(text, complaints->text.data, complaints->text.size);
    td__buffer_put(text, rest, strlen(rest));
}

static td_status judge(struct loading *loading, const td_module *module, bool strict)
{
    bool fits = loading->misshapen.count == 0;
    if (strict)
        fits = fits && loading->missing.count == 0 && loading->unexpected.count == 0;
    if (fits)
        return TD_OK;
    struct td__buffer text = {0};
    if (strict)
        tell(&text, "missing: ", &loading->missing);
    if (strict)
        tell(&text, "unexpected: ", &loading->unexpected);
    tell(&text, "of another shape: ", &loading->misshapen);
    td__buffer_put_u8(&text, 0);
    td_status status = text.failed
                           ? td__fail_nomem("td_module_load_state")
                           : td_fail(TD_ERR_INVALID,
                                     "td_module_load_state: the state does not fit the %s; %s",
                                     module->ops->name, (const char *)text.data);
    td__buffer_free(&text);
    return status;
}

/* ---- Loading ------------------------------------------------------------------------------------ */

static td_status load_tensor(const char *name, struct td__module_tensor *entry, void *state)
{
    td_tensor *from = entry->saved ? td_state_get(state, name) : NULL;
    if (!from)
        return TD_OK;
    TD_TRY(td__deferred_end(entry->tensor, false)); /* no initial values */
    td_status status = TD_ERR_NOMEM;
    {
        TD_NO_GRAD;
        TD_SCOPE;
        td_tensor *part = td__tensor_part_for(from, entry->tensor);
        from = td_to_dtype(td_tensor_to(td_detach(part), td_tensor_device(entry->tensor)),
                           td_tensor_dtype(entry->tensor));
        if (from)
            status = td_tensor_copy(entry->tensor, from);
        td_tensor_release(part);
    }
    return status;
}

td_status td_module_load_state(td_module *module, const td_state *state, bool strict)
{
    if (!module || !state)
        return td_fail(TD_ERR_INVALID, "td_module_load_state: the %s is NULL",
                       module ? "state" : "module");
    struct loading loading = {.state = state, .names = td_state_create()};
    td_status status = loading.names ? td__module_visit(module, compare_tensor, &loading)
                                     : TD_ERR_NOMEM;
    for (int i = 0; i < td_state_count(state) && !status; i++)
        if (!td_state_get(loading.names, td_state_name(state, i)))
            complain(&loading.unexpected, "%s", td_state_name(state, i));
    if (!status)
        status = judge(&loading, module, strict);
    if (!status)
        status = td__module_visit(module, load_tensor, (void *)state);
    td_state_destroy(loading.names);
    td__buffer_free(&loading.missing.text);
    td__buffer_free(&loading.unexpected.text);
    td__buffer_free(&loading.misshapen.text);
    return status;
}
