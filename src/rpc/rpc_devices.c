/* Tensors of accelerators in messages, which have the names of their devices, and td_rpc_options.device_maps.
 *
 * The maps of the caller count, for the arguments and, the other way round, for the result: so no name is mapped twice,
 * whatever the maps of the other worker are. */
#include "rpc/rpc_devices.h"

#include "base/fail.h"
#include "rpc/rpc_agent.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* ---- Maps -------------------------------------------------------------------------------------- */

struct td__device_map {
    char worker[TD_RPC_MAX_NAME + 1]; /* "": all for which there is no other */
    td_device *from;                  /* here */
    td_device *to;                    /* there: its name, no more */
};

static td_status check_map(const td_rpc_device_map *map)
{
    if (map->worker && (!*map->worker || strlen(map->worker) > TD_RPC_MAX_NAME))
        return td_fail(TD_ERR_INVALID,
                       "td_init_rpc: a worker of device_maps has 1 to %d characters; NULL is all",
                       TD_RPC_MAX_NAME);
    const char *names[] = {map->from, map->to};
    for (int i = 0; i < 2; i++)
        if (!names[i] || td_device_get(names[i])->is_malformed)
            return td_fail(TD_ERR_INVALID,
                           "td_init_rpc: \"%.60s\" in device_maps is no name of a device; one is a "
                           "kind and a number, such as cuda:1, or cpu",
                           names[i] ? names[i] : "");
    if (td_device_get(map->from)->is_host)
        return td_fail(TD_ERR_INVALID,
                       "td_init_rpc: device_maps maps from %s; only tensors of accelerators are "
                       "mapped, and those of the host stay on it",
                       map->from);
    return TD_OK;
}

/* A device has one target, and a target one source: results go back. The host may be the target of several. */
static td_status check_unique(const struct td__device_map *maps, int count)
{
    const struct td__device_map *last = &maps[count - 1];
    for (int i = 0; i < count - 1; i++)
        if (!strcmp(maps[i].worker, last->worker) &&
            (maps[i].from == last->from || (maps[i].to == last->to && !last->to->is_host)))
            return td_fail(TD_ERR_INVALID,
                           "td_init_rpc: device_maps maps %s to %s and %s to %s for %s%s%s; each "
                           "device can be in one map only, since results are mapped back",
                           maps[i].from->name, maps[i].to->name, last->from->name, last->to->name,
                           *last->worker ? "\"" : "", *last->worker ? last->worker : "all workers",
                           *last->worker ? "\"" : "");
    return TD_OK;
}

td_status td__device_maps_copy(struct td__rpc_agent *agent, const td_rpc_device_map *maps)
{
    int count = 0;
    while (maps && (maps[count].from || maps[count].to || maps[count].worker))
        count++;
    if (!count)
        return TD_OK;
    agent->device_maps = calloc((size_t)count, sizeof *agent->device_maps);
    if (!agent->device_maps)
        return td__fail_nomem("td_init_rpc");
    for (int i = 0; i < count; i++) {
        TD_TRY(check_map(&maps[i]));
        struct td__device_map *map = &agent->device_maps[agent->device_map_count++];
        if (maps[i].worker)
            memcpy(map->worker, maps[i].worker, strlen(maps[i].worker));
        map->from = td_device_get(maps[i].from);
        map->to = td_device_get(maps[i].to);
        TD_TRY(check_unique(agent->device_maps, agent->device_map_count));
    }
    return TD_OK;
}

/* The name of a device of this worker on the worker `rank`; with `back`, that of one of its devices here. The maps of the
 * worker come before those of all. */
static const char *map_name(const struct td__rpc_agent *agent, int rank, const char *name,
                            bool back)
{
    const struct td__device_map *found = NULL;
    for (int i = 0; i < agent->device_map_count; i++) {
        const struct td__device_map *map = &agent->device_maps[i];
        bool own = *map->worker != 0;
        if (strcmp(name, back ? map->to->name : map->from->name) || (found && !own) ||
            (own && strcmp(map->worker, td__worker_name_of((struct td__rpc_agent *)agent, rank))))
            continue;
        found = map;
        if (own)
            break;
    }
    if (!found)
        return name;
    return back ? found->from->name : found->to->name;
}

/* ---- Sending ----------------------------------------------------------------------------------- */

const char *td__device_name_for(const struct td__rpc_agent *agent, int to, const td_device *device,
                                bool request)
{
    if (device->is_host)
        return NULL;
    const char *name = request ? map_name(agent, to, device->name, false) : device->name;
    return strcmp(name, "cpu") ? name : NULL;
}

bool td__device_name_is_valid(const char *name, size_t size)
{
    if (size == 0 || size > TD__DEVICE_NAME)
        return false;
    for (size_t i = 0; i < size; i++)
        if (!isalnum((unsigned char)name[i]) && name[i] != '_' && name[i] != ':')
            return false;
    return true;
}

/* ---- Receiving --------------------------------------------------------------------------------- */

/* The stream on which tensors arrive: what other threads have enqueued on the device is not waited for. */
static td_stream *arrival_stream(struct td__rpc_agent *agent, td_device *device)
{
    pthread_mutex_lock(&agent->device_lock);
    td_stream **stream = &agent->arrivals[device->slot];
    if (!*stream)
        *stream = td_stream_create(device, 0);
    td_stream *result = *stream;
    pthread_mutex_unlock(&agent->device_lock);
    return result;
}

static td_tensor *copy_to(struct td__rpc_agent *agent, td_device *device, td_tensor *tensor)
{
    td_stream *stream = device->is_host ? NULL : arrival_stream(agent, device);
    if (!stream && !device->is_host)
        return NULL;
    TD_STREAM_SCOPE(stream);
    td_tensor *copy = td__empty("rpc", tensor->layout.shape, tensor->layout.ndim,
                                tensor->layout.dtype, device);
    td_status status = copy ? td__transfer("rpc", copy, tensor, false) : td__error_status();
    if (!status && stream) /* it may be used on any stream */
        status = td__wait_for_stream("rpc", stream);
    if (!status)
        return copy;
    td_tensor_release(copy);
    return NULL;
}

td_status td__device_arrive(struct td__rpc_agent *agent, int from, const char *name, bool reply,
                            td_tensor **tensor)
{
    const char *here = reply ? map_name(agent, from, name, true) : name;
    /* A device that does not exist gets no handle: these are never freed. */
    if (!td_device_exists(here))
        return td_fail(TD_ERR_INVALID,
                       "a tensor from worker \"%s\" is for the device %s, which worker \"%s\" does "
                       "not have; td_rpc_options.device_maps of the caller maps it to another one",
                       td__worker_name_of(agent, from), here, agent->name);
    td_device *device = td__use_device("rpc", td_device_get(here));
    td_tensor *there = device ? copy_to(agent, device, *tensor) : NULL;
    if (!there)
        return td__error_status();
    td_tensor_release(*tensor);
    *tensor = there;
    return TD_OK;
}

td_tensor *td__device_move(struct td__rpc_agent *agent, td_device *device, td_tensor *tensor)
{
    if (tensor->storage->device == device)
        return td_tensor_retain(tensor);
    td_tensor *host = td__to_host("rpc", tensor);
    td_tensor *moved = host ? copy_to(agent, device, host) : NULL;
    td_tensor_release(host);
    return moved;
}

void td__devices_close(struct td__rpc_agent *agent)
{
    for (int i = 0; i < TD__ACCELERATORS_MOST; i++)
        td_stream_release(agent->arrivals[i]);
    free(agent->device_maps);
}
