/* The GPUs of this machine; see options.h.
 *
 * The GPUs are found by files, not by the CUDA library: it may be missing where only the workers' containers have it, it
 * takes a second to start, and a process that has started it must not fork. */
#include "launch/options.h"

#include "base/number.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- What there is --------------------------------------------------------------------------- */

static void find_device_files(const char *path, struct td__gpus *gpus)
{
    DIR *dev = opendir(path);
    for (struct dirent *entry; dev && (entry = readdir(dev));) {
        int minor;
        if (strncmp(entry->d_name, "nvidia", 6) || gpus->count == TD__MAX_GPUS ||
            !td__parse_int(entry->d_name + 6, 0, INT_MAX, &minor))
            continue;
        gpus->at[gpus->count++].minor = minor;
    }
    if (dev)
        closedir(dev);
}

/* Takes the UUID of one GPU from lines as "GPU UUID: \t GPU-…" and "Device Minor: \t 0". */
static void read_information(const char *path, struct td__gpus *gpus)
{
    char line[256], uuid[64] = "";
    int minor = -1;
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        sscanf(line, "GPU UUID: %63s", uuid);
        sscanf(line, "Device Minor: %d", &minor);
    }
    if (file)
        fclose(file);
    for (int i = 0; i < gpus->count; i++)
        if (gpus->at[i].minor == minor)
            memcpy(gpus->at[i].uuid, uuid, sizeof uuid);
}

void td__gpus_find(const char *dev, const char *driver, struct td__gpus *gpus)
{
    *gpus = (struct td__gpus){0};
    find_device_files(dev, gpus);
    DIR *directory = gpus->count ? opendir(driver) : NULL;
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char path[PATH_MAX];
        if (entry->d_name[0] != '.' &&
            snprintf(path, sizeof path, "%s/%s/information", driver, entry->d_name) < PATH_MAX)
            read_information(path, gpus);
    }
    if (directory)
        closedir(directory);
}

/* ---- What CUDA_VISIBLE_DEVICES leaves -------------------------------------------------------- */

/* The GPU that a number names, and -1 for none. As in CUDA, what follows the digits plays no part. */
static int find_number(const struct td__gpus *gpus, const char *entry)
{
    char *end;
    errno = 0;
    long number = strtol(entry, &end, 10);
    return end != entry && !errno && number >= 0 && number < gpus->count ? (int)number : -1;
}

/* The GPU whose UUID begins like this, if it is one. Where the driver tells none, the next one of all
 * is taken for it: `taken` are those that were named before. */
static int find_uuid(const struct td__gpus *gpus, const char *entry, size_t size, int taken)
{
    int found = -1;
    if (!*gpus->at[0].uuid)
        return taken < gpus->count ? taken : -1;
    for (int i = 0; i < gpus->count; i++) {
        size_t whole = strlen(gpus->at[i].uuid); /* as in CUDA, what follows it plays no part */
        if (size <= 4 || strncasecmp(gpus->at[i].uuid, entry, size < whole ? size : whole) != 0)
            continue;
        if (found >= 0)
            return -1;
        found = i;
    }
    return found;
}

int td__gpus_visible(const struct td__gpus *gpus, const char *list)
{
    bool seen[TD__MAX_GPUS] = {false};
    int count = 0;
    if (!list)
        return gpus->count;
    if (!gpus->count)
        return 0;
    if (!strncmp(list, "MIG-", 4))
        return 1;
    bool uuids = !strncmp(list, "GPU-", 4);
    for (const char *entry = list; *entry;) {
        size_t size = strcspn(entry, ",");
        bool fits = uuids == !strncmp(entry, "GPU-", 4);
        int gpu = !fits   ? -1
                  : uuids ? find_uuid(gpus, entry, size, count)
                          : find_number(gpus, entry);
        if (gpu < 0)
            break;
        if (seen[gpu])
            return 0;
        seen[gpu] = true;
        count++;
        entry += size + (entry[size] == ',');
    }
    return count;
}
