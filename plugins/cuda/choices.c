/* Choices on disk; see choices.h. This part finds the file of a device and a library; choice_file.c has the rest. */
#include "cuda/choices.h"
#include "cuda/choice_file.h"

#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PATH = 1024 };

/* Files that were opened; the list only grows. Devices of one model share one. */
struct opened {
    struct opened *next;
    CUdevice device;
    struct choice_file *file;
    char library[];
};

static struct opened *all;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

double td__cuda_measuring_ms(double otherwise)
{
    const char *text = getenv("TANDEM_CUDA_TUNE");
    char *end;
    if (!text || !*text)
        return otherwise;
    double ms = strtod(text, &end);
    return *end || !(ms >= 0) ? otherwise : ms;
}

bool td__cuda_is_deterministic(void)
{
    const char *text = getenv("TANDEM_CUDA_DETERMINISTIC");
    return !text || strcmp(text, "0") != 0;
}

bool td__cuda_may_measure(void)
{
    return td__cuda_measuring_ms(1) > 0;
}

/* The directory; false: nothing is kept. */
static bool find_directory(char *path)
{
    const char *own = getenv("TANDEM_CACHE_DIR"), *caches = getenv("XDG_CACHE_HOME"),
               *home = getenv("HOME");
    int length = -1;
    if (own && *own)
        length = strcmp(own, "none") != 0 ? snprintf(path, MOST_PATH, "%s", own) : -1;
    else if (caches && *caches == '/') /* others are not valid, by the XDG specification */
        length = snprintf(path, MOST_PATH, "%s/tandem", caches);
    else if (home && *home)
        length = snprintf(path, MOST_PATH, "%s/.cache/tandem", home);
    return length >= 0 && length < MOST_PATH;
}

static bool find_path(const struct cuda_device *device, const char *library, char *path)
{
    char model[128], name[320];
    if (!find_directory(path) ||
        td__cuda.cuDeviceGetName(model, sizeof model, device->device) != CUDA_SUCCESS)
        return false;
    snprintf(name, sizeof name, "/%s-driver-%d-%s.choices", model, td__cuda.version, library);
    for (char *at = name + 1; *at; at++)
        if (!isalnum((unsigned char)*at) && *at != '.')
            *at = '-';
    size_t used = strlen(path), length = strlen(name);
    if (used + length >= MOST_PATH)
        return false;
    memcpy(path + used, name, length + 1);
    return true;
}

static struct choice_file *open_choices(const struct cuda_device *device, const char *library)
{
    char path[MOST_PATH];
    size_t length = strlen(library) + 1;
    struct opened *entry = malloc(sizeof *entry + length);
    struct choice_file *file = entry ? td__choice_file_open(find_path(device, library, path) ? path
                                                                                             : NULL)
                                     : NULL;
    if (!file) {
        free(entry);
        return NULL;
    }
    entry->device = device->device;
    entry->file = file;
    memcpy(entry->library, library, length);
    entry->next = all;
    all = entry;
    return file;
}

/* NULL without memory: nothing is kept. */
static struct choice_file *file_of(const struct cuda_device *device, const char *library)
{
    pthread_mutex_lock(&opening);
    const struct opened *entry = all;
    while (entry && (entry->device != device->device || strcmp(entry->library, library) != 0))
        entry = entry->next;
    struct choice_file *file = entry ? entry->file : open_choices(device, library);
    pthread_mutex_unlock(&opening);
    return file;
}

bool td__cuda_choice_get(const struct cuda_device *device, const char *library, const void *key,
                         size_t key_size, void *value, size_t value_size)
{
    struct choice_file *file = file_of(device, library);
    return file && td__choice_file_get(file, key, key_size, value, value_size);
}

void td__cuda_choice_put(const struct cuda_device *device, const char *library, const void *key,
                         size_t key_size, const void *value, size_t value_size)
{
    struct choice_file *file = file_of(device, library);
    if (file)
        td__choice_file_put(file, key, key_size, value, value_size);
}

void td__cuda_choice_lock(const struct cuda_device *device, const char *library)
{
    struct choice_file *file = file_of(device, library);
    if (file)
        td__choice_file_lock(file);
}

void td__cuda_choice_unlock(const struct cuda_device *device, const char *library)
{
    struct choice_file *file = file_of(device, library);
    if (file)
        td__choice_file_unlock(file);
}
