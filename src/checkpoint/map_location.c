/* The devices of the tensors of a file. The note "tandem.devices" has those on which they were saved, in the order of
 * the header, as runs: "cuda:0*12 cpu*1". td_map_location says where they go. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "checkpoint/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_SIZE = 32 };

void td__put_devices(struct td__buffer *text, const td_state *state)
{
    int count = td_state_count(state), from = 0;
    for (int i = 0; i < count; i++) {
        td_device *device = td_tensor_device(td_state_tensor(state, i));
        if (i + 1 < count && td_tensor_device(td_state_tensor(state, i + 1)) == device)
            continue;
        char run[NAME_SIZE + 16];
        int size = snprintf(run, sizeof run, "%s%s*%d", from ? " " : "", td_device_name(device),
                            i + 1 - from);
        td__buffer_put(text, run, (size_t)size);
        from = i + 1;
    }
}

/* ---- The note ------------------------------------------------------------------------------------ */

struct run {
    char device[NAME_SIZE];
    uint64_t count;
};

/* The run at *at, which moves behind it; false for what is none. */
static bool next_run(const char **at, struct run *run)
{
    const char *star = strchr(*at, '*');
    size_t length = star ? (size_t)(star - *at) : 0;
    if (length == 0 || length >= NAME_SIZE)
        return false;
    memcpy(run->device, *at, length);
    run->device[length] = 0;
    run->count = 0;
    const char *digit = star + 1;
    for (; *digit >= '0' && *digit <= '9' && run->count < INT32_MAX; digit++)
        run->count = run->count * 10 + (uint64_t)(*digit - '0');
    if (run->count == 0 || (*digit != ' ' && *digit != 0))
        return false;
    *at = *digit ? digit + 1 : digit;
    return true;
}

/* Where the runs are read; without the note everything was on the host. */
struct saved {
    const char *at; /* NULL: no note */
    struct run run; /* with what is left of it */
};

static bool next_saved(struct saved *saved)
{
    if (!saved->at)
        return true;
    if (saved->run.count == 0 && !next_run(&saved->at, &saved->run))
        return false;
    saved->run.count--;
    return true;
}

/* ---- Where they go ------------------------------------------------------------------------------- */

td_status td__check_map(const char *call, const td_map_location *map)
{
    TD_TRY(td__check_reserved(call, map->reserved));
    if (map->count < 0 || (map->count > 0 && !map->mappings))
        return td_fail(TD_ERR_INVALID, "%s: map_location has %d mappings%s", call, map->count,
                       map->count < 0 ? "" : ", which are NULL");
    for (int i = 0; i < map->count; i++)
        if (!map->mappings[i].saved)
            return td_fail(TD_ERR_INVALID, "%s: mapping %d of map_location has no name", call, i);
    if ((map->device != NULL) + (map->count > 0 || map->as_saved) + (map->choose != NULL) > 1)
        return td_fail(TD_ERR_INVALID,
                       "%s: map_location has more than one of a device, mappings and a function",
                       call);
    return TD_OK;
}

/* The device of a tensor as the map has it; NULL: the one on which it was saved. */
static td_device *mapped(const td_map_location *map, const char *name, const char *saved)
{
    if (map->device)
        return map->device;
    if (map->choose)
        return map->choose(name, saved, map->arg);
    for (int i = 0; i < map->count; i++)
        if (!strcmp(map->mappings[i].saved, saved))
            return map->mappings[i].device ? map->mappings[i].device : td_current_device();
    return map->count > 0 || map->as_saved ? NULL : td_current_device();
}

static td_device *find_device(const char *call, const char *path, const td_map_location *map,
                              const char *name, const char *saved)
{
    td_device *device = mapped(map, name, saved);
    /* Names of a file do not get into the table of devices, which only grows. */
    if (!device && !td_device_exists(saved)) {
        td_fail(TD_ERR_INVALID,
                "%s: %s: \"%.200s\" was saved on %s, which is not there; map_location can send it "
                "to another device, by {.device = …} or by a mapping of \"%s\"",
                call, path, name, saved, saved);
        return NULL;
    }
    return td__use_device(call, device ? device : td_device_get(saved));
}

td_device *td__map_device(const char *call, const char *path, const td_map_location *map,
                          const char *name, const char *saved)
{
    static const td_map_location nothing;
    return find_device(call, path, map ? map : &nothing, name, saved);
}

/* Sets *device, which stays NULL for a tensor that is not loaded. */
static td_status find_target(const char *call, const char *path, struct td__load_target *target,
                             const struct td__file_tensor *tensor, const char *saved,
                             td_device **device)
{
    bool fixed = false;
    td_device *home = target->home ? target->home(tensor, &fixed, target->arg) : NULL;
    if (target->home && !home)
        return TD_OK;
    *device = home && (fixed || !target->map)
                  ? td__use_device(call, home)
                  : td__map_device(call, path, target->map, tensor->name, saved);
    target->is_missing = !*device;
    return *device ? TD_OK : td__error_status();
}

td_status td__map_devices(const char *call, const char *path, const struct td__file_header *header,
                          struct td__load_target *target, td_device ***devices_out)
{
    target->is_missing = target->map && td__check_map(call, target->map);
    if (target->is_missing)
        return td__error_status();
    const struct td__file_note *note = td__header_note(header, "tandem.devices");
    struct saved saved = {.at = note ? note->value : NULL, .run = {.device = "cpu"}};
    td_device **devices = calloc(header->count + 1, sizeof *devices);
    if (!devices)
        return td__fail_nomem(call);
    td_status status = TD_OK;
    for (size_t i = 0; i < header->count && !status; i++) {
        if (!next_saved(&saved)) {
            status = td_fail(TD_ERR_INVALID,
                             "%s is damaged: its note tandem.devices has no device for tensor %zu",
                             path, i);
            break;
        }
        status = find_target(call, path, target, &header->tensors[i], saved.run.device,
                             &devices[i]);
    }
    if (!status && saved.at && (*saved.at || saved.run.count))
        status = td_fail(TD_ERR_INVALID,
                         "%s is damaged: its note tandem.devices has more than %zu tensors", path,
                         header->count);
    if (status)
        free(devices);
    else
        *devices_out = devices;
    return status;
}
