/* The gradients of parameters by device, for kernels over lists of tensors; see optimizer.h. */
#include "optim/optimizer.h"

#include "base/fail.h"

#include <stdlib.h>

td_device *td__memory_device(const td_tensor *tensor)
{
    td_device *device = tensor->storage->device;
    return device->is_host ? td__host_device() : device;
}

td_status td__find_grads(const char *call, td_tensor *const *parameters, int count,
                         struct td__grads *grads)
{
    size_t room = (size_t)count + 1;
    grads->list = malloc(2 * room * sizeof *grads->list);
    grads->numbers = malloc(room * sizeof *grads->numbers);
    grads->devices = calloc(room, sizeof *grads->devices);
    if (!grads->list || !grads->numbers || !grads->devices)
        return td__fail_nomem(call);
    td_tensor **all = grads->list + room;
    int found = 0, placed = 0;
    for (int i = 0; i < count; i++)
        if ((all[found] = td_tensor_grad(parameters[i])))
            found++;
    for (int host = 0; host < 2; host++)
        for (int i = 0; i < found; i++) {
            if (!all[i] || td__on_host(all[i]) != host)
                continue;
            struct td__device_grads *group = &grads->devices[grads->device_count++];
            *group = (struct td__device_grads){.device = td__memory_device(all[i]),
                                               .list = grads->list + placed,
                                               .numbers = grads->numbers + placed};
            for (int k = i; k < found; k++)
                if (all[k] && td__memory_device(all[k]) == group->device) {
                    group->numbers[group->count] = k;
                    group->list[group->count++] = all[k];
                    all[k] = NULL;
                }
            placed += group->count;
        }
    return TD_OK;
}

void td__free_grads(struct td__grads *grads)
{
    for (int i = 0; i < grads->device_count; i++)
        td_tensor_release(grads->devices[i].number);
    free(grads->devices);
    free(grads->numbers);
    free(grads->list);
}

td_tensor *td__number_to(const char *call, td_device *device, td_tensor *number)
{
    if (device == number->storage->device)
        return td_tensor_retain(number);
    td_tensor *moved = td__empty(call, NULL, 0, number->layout.dtype, device);
    if (moved && td__transfer(call, moved, number, false)) {
        td_tensor_release(moved);
        return NULL;
    }
    return moved;
}
