/* What tests set and read of the toy accelerator: settings, missing kernels, failures on request, counters. */
#include "toy_machine.h"

#include <stdio.h>
#include <string.h>

/* ---- Settings ---------------------------------------------------------------------------------------- */

void toy_set_memory(size_t bytes)
{
    toy_lock();
    toy_machine.memory_bytes = bytes;
    toy_unlock();
}

void toy_set_delay(int microseconds)
{
    toy_lock();
    toy_machine.delay_us = microseconds;
    toy_unlock();
}

void toy_set_seed(uint64_t seed)
{
    toy_lock();
    toy_machine.seed = seed;
    toy_unlock();
}

void toy_set_arithmetic(enum toy_arithmetic arithmetic)
{
    toy_lock();
    toy_machine.arithmetic = arithmetic;
    toy_unlock();
}

static struct toy_device *device_at(int index)
{
    if (index < 0 || index >= TOY_DEVICES)
        toy_die("toy: there is no device %d", index);
    return &toy_machine.devices[index];
}

void toy_hold(int index, bool hold)
{
    toy_lock();
    device_at(index)->held = hold;
    toy_changed();
    toy_unlock();
}

void toy_limit_copies(int index, int copies)
{
    toy_lock();
    device_at(index)->copies_limited = copies >= 0;
    device_at(index)->copies_left = copies;
    toy_changed();
    toy_unlock();
}

/* ---- Kernels ------------------------------------------------------------------------------------------ */

#define SLOT(slot)                                                                                 \
    {                                                                                              \
        .name = #slot                                                                              \
    }
static struct {
    const char *name;
    bool is_missing;
    int64_t runs;
} slots[] = {TOY_KERNELS(SLOT)};

static int slot_of(const char *name)
{
    for (int i = 0; i < (int)(sizeof slots / sizeof slots[0]); i++)
        if (!strcmp(slots[i].name, name))
            return i;
    toy_die("toy: there is no kernel %s", name);
}

void toy_set_missing(const char *slot, bool missing)
{
    toy_lock();
    slots[slot_of(slot)].is_missing = missing;
    toy_unlock();
}

bool toy_is_missing(const char *slot)
{
    toy_lock();
    bool is_missing = slots[slot_of(slot)].is_missing;
    toy_unlock();
    return is_missing;
}

void toy_count_run(struct toy_device *device, const char *slot)
{
    toy_lock();
    slots[slot_of(slot)].runs++;
    device->counts.kernels++;
    toy_unlock();
}

int64_t toy_kernel_runs(const char *slot)
{
    toy_lock();
    int64_t runs = slots[slot_of(slot)].runs;
    toy_unlock();
    return runs;
}

struct toy_counts toy_counts(int index)
{
    toy_lock();
    struct toy_counts counts = device_at(index)->counts;
    toy_unlock();
    return counts;
}

void toy_control_reset(void)
{
    toy_machine.memory_bytes = (size_t)64 << 20;
    toy_machine.delay_us = 100;
    toy_machine.seed = 0;
    toy_machine.arithmetic = TOY_HOST;
    for (int i = 0; i < (int)(sizeof slots / sizeof slots[0]); i++) {
        slots[i].runs = 0;
        slots[i].is_missing = !strcmp(slots[i].name, "arg_reduce");
    }
}

/* ---- Failures ------------------------------------------------------------------------------------------ */

static void request(int index, enum toy_work work, int after, enum toy_when when)
{
    toy_lock();
    device_at(index)->requests[work] = (struct toy_request){after, when};
    toy_unlock();
}

void toy_fail_alloc(int device, int after)
{
    request(device, TOY_ALLOC, after, TOY_AT_LAUNCH);
}

void toy_fail_kernel(int device, int after, enum toy_when when)
{
    request(device, TOY_KERNEL, after, when);
}

void toy_fail_copy(int device, int after, enum toy_when when)
{
    request(device, TOY_COPY, after, when);
}

bool toy_is_requested(struct toy_device *device, enum toy_work work, enum toy_when *when)
{
    struct toy_request *wanted = &device->requests[work];
    if (wanted->after == 0 || --wanted->after > 0)
        return false;
    *when = wanted->when;
    return true;
}

void toy_note_failure(struct toy_device *device, const char *name, td_status status,
                      const char *text)
{
    if (device->failure)
        return;
    device->failure = status;
    size_t length = strlen(name);
    if (!strncmp(text, name, length) && !strncmp(text + length, ": ", 2))
        text += length + 2; /* the host's kernel has said which one it is */
    snprintf(device->failure_text, sizeof device->failure_text, "%s: %s: %s", device->name, name,
             text);
}

td_status toy_failure(const struct toy_device *device)
{
    if (!device->is_open)
        return td_fail(TD_ERR_STATE, "%s is not open: toy_reset() has closed it", device->name);
    return device->failure ? td_fail(device->failure, "%s", device->failure_text) : TD_OK;
}

void toy_clear_failure(int index)
{
    struct toy_device *device = device_at(index);
    toy_lock();
    toy_drain(device);
    device->failure = TD_OK;
    toy_unlock();
}
