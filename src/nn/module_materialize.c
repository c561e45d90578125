/* Deferred initialisation: the tensors of a module get their memory, and the values that were recorded for them. */
#include "nn/module.h"

#include "base/fail.h"
#include "tensor/deferred.h"

#include <stdlib.h>
#include <string.h>

static td_status materialize_tensor(const char *name, struct td__module_tensor *entry, void *arg)
{
    (void)arg;
    if (!td_tensor_is_meta(entry->tensor))
        return TD_OK;
    td_status status = td__deferred_end(entry->tensor, true);
    if (!status)
        return TD_OK;
    char *reason = strdup(td__error_text());
    td_fail(status, "td_module_materialize: \"%.200s\": %s", name, reason ? reason : "");
    free(reason);
    return status;
}

td_status td_module_materialize(td_module *module)
{
    if (!module)
        return td__fail_null(__func__);
    return td__module_visit(module, materialize_tensor, NULL);
}
