/* The weights of a module in a file, with or without the prefix of a wrapper. */
#include "base/fail.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/torch_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WRAPPER "module."

/* The name with the wrapper's prefix added or removed; NULL if there is none to remove. `buffer` is
 * large enough. */
static const char *renamed(const char *name, bool wrap, char *buffer, size_t size)
{
    if (!wrap)
        return strncmp(name, WRAPPER, strlen(WRAPPER)) ? NULL : name + strlen(WRAPPER);
    snprintf(buffer, size, WRAPPER "%s", name);
    return buffer;
}

/* The state with all names changed; NULL if a changed name is not in `known` (*fits is false), and
 * without memory. */
static td_state *rename_all(const td_state *state, const td_state *known, bool wrap, bool *fits)
{
    td_state *result = td_state_create();
    *fits = true;
    for (int i = 0; result && i < td_state_count(state); i++) {
        size_t size = strlen(td_state_name(state, i)) + sizeof WRAPPER;
        char *buffer = malloc(size);
        const char *name = buffer ? renamed(td_state_name(state, i), wrap, buffer, size) : NULL;
        if (!buffer)
            td__fail_nomem("td_load_module");
        else
            *fits = name && *name && td_state_get(known, name);
        td_status status = TD_ERR_NOMEM;
        if (buffer && *fits)
            status = td_state_add(result, name, td_state_tensor(state, i));
        free(buffer);
        if (status) {
            td_state_destroy(result);
            return NULL;
        }
    }
    return result;
}

td_state *td__fit_names(const td_state *state, td_module *module)
{
    td_state *known = td_module_state(module), *result = NULL;
    if (!known)
        return NULL;
    bool as_it_is = true, fits = false;
    for (int i = 0; i < td_state_count(state); i++)
        as_it_is = as_it_is && td_state_get(known, td_state_name(state, i));
    for (int wrap = 0; !as_it_is && !fits && wrap < 2; wrap++) {
        result = rename_all(state, known, wrap, &fits);
        if (!result && fits) {
            td_state_destroy(known);
            return NULL;
        }
    }
    td_state_destroy(known);
    /* If neither fits, td_module_load_state() reports the names as they are. */
    return fits ? result : td_state_part(state, "");
}

td_tensor *td__find_wrapped(const td_state *known, const char *name)
{
    td_tensor *tensor = td_state_get(known, name);
    for (int wrap = 0; !tensor && wrap < 2; wrap++) {
        char buffer[512];
        const char *other = renamed(name, wrap, buffer, sizeof buffer);
        tensor = other ? td_state_get(known, other) : NULL;
    }
    return tensor;
}

td_device *td__home_in(const td_state *known, const char *name)
{
    td_tensor *tensor = td__find_wrapped(known, name);
    return tensor ? td__target_of(td_tensor_device(tensor)) : td__host_device();
}

static td_device *home_in_module(const struct td__file_tensor *tensor, bool *fixed, void *known)
{
    (void)fixed;
    return td__home_in(known, tensor->name);
}

/* Of a parameter of td_fsdp() only this rank's shard is read. */
static const td_shard *part_for_module(const struct td__file_tensor *entry, int64_t *count,
                                       void *known)
{
    const td_tensor *tensor = td__find_wrapped(known, entry->name);
    const td_shard *shard = tensor ? td_tensor_shard(tensor) : NULL;
    if (!shard || shard->ndim != entry->ndim ||
        memcmp(shard->shape, entry->shape, (size_t)entry->ndim * sizeof entry->shape[0]))
        return NULL;
    *count = td_tensor_numel(tensor);
    return shard;
}

td_status td_save_module(const char *path, td_module *module)
{
    if (!path || !module)
        return td_fail(TD_ERR_INVALID, "td_save_module: the %s is NULL", path ? "module" : "path");
    td_state *state = td_module_state(module);
    if (!state)
        return td__error_status();
    td_status status = TD_OK;
    for (int i = 0; i < td_state_count(state) && !status; i++)
        if (td_tensor_shard(td_state_tensor(state, i)))
            status = td_fail(TD_ERR_INVALID,
                             "td_save_module: \"%.200s\" is a shard; use td_save_full() or "
                             "td_save_sharded()",
                             td_state_name(state, i));
    if (!status)
        status = td__save_state("td_save_module", path, state, NULL, 0);
    td_state_destroy(state);
    return status;
}

static td_status read_for(const char *path, td_module *module, const td_map_location *map,
                          td_state **state)
{
    static const char call[] = "td_load_module";
    if (td__is_zip_file(path)) {
        td_map_location host = {.device = td__host_device()};
        return td__load_torch(call, path, map ? map : &host, state);
    }
    td_state *known = td_module_state(module);
    if (!known)
        return td__error_status();
    struct td__load_target target = {
        .map = map, .home = home_in_module, .part = part_for_module, .arg = known};
    td_status status = td__load_state(call, path, &target, state, NULL);
    td_state_destroy(known);
    return status;
}

td_status td_load_module(const char *path, td_module *module, const td_map_location *map_location)
{
    if (!path || !module)
        return td_fail(TD_ERR_INVALID, "td_load_module: the %s is NULL", path ? "module" : "path");
    td_state *state = NULL;
    TD_TRY(read_for(path, module, map_location, &state));
    td_state *fitted = td__fit_names(state, module);
    td_status status = TD_ERR_NOMEM;
    if (fitted && (status = td_module_load_state(module, fitted, true)))
        td_fail(status, "td_load_module: %s: %s", path, td__error_text());
    td_state_destroy(fitted);
    td_state_destroy(state);
    return status;
}
