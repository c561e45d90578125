/* Kernels of the toy accelerator over lists of tensors, of any length: toy_launch() with arguments that end with the
 * list. */
#include "toy_machine.h"

#include <stdlib.h>
#include <string.h>

/* ---- Optimizers: a list of structures, with pointers to tensors among their members ----------------------- */

struct updates {
    int count;
    _Alignas(max_align_t) char list[];
};

/* `members` are the offsets of the `number` pointers to tensors in an update of `size` bytes. */
static td_status launch_updates(const char *slot, td_status (*run)(void *), const void *list,
                                int count, size_t size, const size_t *members, int number)
{
    size_t bytes = sizeof(struct updates) + (size_t)count * size;
    struct updates *updates = malloc(bytes);
    const void **tensors = malloc((size_t)count * (size_t)number * sizeof *tensors + 1);
    td_status status = TD_ERR_NOMEM;
    if (!updates || !tensors) {
        td_fail(status, "toy: %s: out of host memory", slot);
        goto free_both;
    }
    updates->count = count;
    memcpy(updates->list, list, (size_t)count * size);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < number; j++)
            tensors[i * number + j] = updates->list + (size_t)i * size + members[j];
    status = toy_launch(slot, run, updates, bytes, tensors, count * number);

free_both:
    free(tensors);
    free(updates);
    return status;
}

static td_status run_sgd(void *arguments)
{
    struct updates *updates = arguments;
    return td_host_kernels()->sgd((const td_sgd_update *)updates->list, updates->count);
}

td_status toy_kernel_sgd(const td_sgd_update *updates, int count)
{
    static const size_t members[] = {
        offsetof(td_sgd_update, parameter),
        offsetof(td_sgd_update, grad),
        offsetof(td_sgd_update, buffer),
    };
    return launch_updates("sgd", run_sgd, updates, count, sizeof *updates, members, 3);
}

static td_status run_adam(void *arguments)
{
    struct updates *updates = arguments;
    return td_host_kernels()->adam((const td_adam_update *)updates->list, updates->count);
}

td_status toy_kernel_adam(const td_adam_update *updates, int count)
{
    static const size_t members[] = {
        offsetof(td_adam_update, parameter), offsetof(td_adam_update, grad),
        offsetof(td_adam_update, mean),      offsetof(td_adam_update, square),
        offsetof(td_adam_update, greatest),
    };
    return launch_updates("adam", run_adam, updates, count, sizeof *updates, members, 5);
}

/* ---- Lists of tensors, with one more tensor and a number --------------------------------------------------- */

struct tensors {
    td_tensor *one;
    double number;
    int count;
    td_tensor *x[];
};

static td_status launch_tensors(const char *slot, td_status (*run)(void *), const td_tensor *one,
                                double number, td_tensor *const *x, int count)
{
    size_t bytes = sizeof(struct tensors) + (size_t)count * sizeof *x;
    struct tensors *list = malloc(bytes);
    const void **places = malloc((size_t)(count + 1) * sizeof *places);
    td_status status = TD_ERR_NOMEM;
    if (!list || !places) {
        td_fail(status, "toy: %s: out of host memory", slot);
        goto free_both;
    }
    *list = (struct tensors){.one = (td_tensor *)one, .number = number, .count = count};
    places[count] = &list->one;
    for (int i = 0; i < count; i++) {
        list->x[i] = x[i];
        places[i] = &list->x[i];
    }
    status = toy_launch(slot, run, list, bytes, places, count + 1);

free_both:
    free(places);
    free(list);
    return status;
}

static td_status run_norm(void *arguments)
{
    struct tensors *list = arguments;
    return td_host_kernels()->norm(list->one, list->x, list->count, list->number);
}

td_status toy_kernel_norm(td_tensor *out, td_tensor *const *x, int count, double power)
{
    return launch_tensors("norm", run_norm, out, power, x, count);
}

static td_status run_power_sums(void *arguments)
{
    struct tensors *list = arguments;
    return td_host_kernels()->power_sums(list->one, list->x, list->count, list->number);
}

td_status toy_kernel_power_sums(td_tensor *out, td_tensor *const *x, int count, double power)
{
    return launch_tensors("power_sums", run_power_sums, out, power, x, count);
}

static td_status run_scale(void *arguments)
{
    struct tensors *list = arguments;
    return td_host_kernels()->scale(list->x, list->count, list->one);
}

td_status toy_kernel_scale(td_tensor *const *x, int count, const td_tensor *factor)
{
    return launch_tensors("scale", run_scale, factor, 0, x, count);
}

static td_status run_unscale(void *arguments)
{
    struct tensors *list = arguments;
    return td_host_kernels()->unscale(list->x, list->count, list->number, list->one);
}

td_status toy_kernel_unscale(td_tensor *const *x, int count, double factor, td_tensor *found)
{
    return launch_tensors("unscale", run_unscale, found, factor, x, count);
}
