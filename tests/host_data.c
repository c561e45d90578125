/* See host_data.h. */
#include "host_data.h"

#include "runner.h"

#include <tandem/autograd.h>
#include <tandem/ops.h>

#include <pthread.h>
#include <string.h>

enum { KEPT = 64 };

static bool is_on_host(const td_tensor *tensor)
{
    return !strcmp(td_device_kind(td_tensor_device(tensor)), "cpu");
}

/* Keeps a reference until KEPT others have come. */
static void keep(td_tensor *tensor)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static td_tensor *kept[KEPT];
    static unsigned next;
    pthread_mutex_lock(&lock);
    td_tensor *former = kept[next % KEPT];
    kept[next++ % KEPT] = tensor;
    pthread_mutex_unlock(&lock);
    td_tensor_release(former);
}

const void *host_data(const td_tensor *tensor)
{
    CHECK(tensor);
    if (is_on_host(tensor) && td_tensor_is_contiguous(tensor))
        return td_tensor_data(tensor);
    td_tensor *copy = NULL;
    {
        TD_SCOPE;
        TD_NO_GRAD;
        copy = td_contiguous(td_tensor_to((td_tensor *)tensor, td_device_get("cpu")));
        if (!copy)
            FAIL("host_data: %s", td_last_error());
        td_tensor_retain(copy);
    }
    keep(copy);
    return td_tensor_data(copy);
}

void set_host_data(td_tensor *tensor, const void *data)
{
    CHECK(tensor);
    TD_SCOPE;
    TD_NO_GRAD;
    td_tensor *from = td_from_array(data, td_tensor_shape(tensor), td_tensor_ndim(tensor),
                                    td_tensor_dtype(tensor), td_device_get("cpu"));
    CHECK(from);
    /* Of its own, so that a leaf can be changed, and the change is not counted. */
    CHECK_OK(td_tensor_copy(td_detach(tensor), from));
}

td_tensor *host_randn(const int64_t *shape, int ndim, td_dtype dtype)
{
    TD_SCOPE;
    td_tensor *numbers = td_randn(shape, ndim, dtype, td_device_get("cpu"));
    CHECK(numbers);
    return td_scope_return(td_tensor_to(numbers, NULL));
}
