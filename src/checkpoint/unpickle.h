/* The part of Python's pickle format that describes tensors, as torch.save() writes it.
 *
 * A pickle is a program for a machine with a stack, which can call any function of Python: loading one from a stranger
 * runs the stranger's code. This machine knows a few functions by name, which only make the values below; every other name
 * is refused, and nothing is ever called. */
#ifndef TD_CHECKPOINT_UNPICKLE_H
#define TD_CHECKPOINT_UNPICKLE_H

#include <tandem/dtype.h>
#include <tandem/tensor.h>

enum td__pickle_kind {
    TD__PICKLE_NONE,
    TD__PICKLE_BOOL,
    TD__PICKLE_INT,
    TD__PICKLE_FLOAT,
    TD__PICKLE_STRING,
    TD__PICKLE_LIST, /* or a tuple, or a torch.Size */
    TD__PICKLE_DICT,
    TD__PICKLE_GLOBAL, /* a known name: torch.float32 */
    TD__PICKLE_STORAGE,
    TD__PICKLE_TENSOR,
};

struct td__pickle_value;

/* The bytes of a tensor: the member "data/<key>". */
struct td__pickle_storage {
    const char *key, *location;
    bool is_typed; /* the dtype is known */
    td_dtype dtype;
    int64_t count; /* elements; bytes if it is not typed */
};

struct td__pickle_tensor {
    const struct td__pickle_storage *storage;
    td_dtype dtype;
    int64_t offset; /* in elements */
    int ndim;
    int64_t shape[TD_MAX_DIMS], strides[TD_MAX_DIMS];
};

struct td__pickle_value {
    enum td__pickle_kind kind;
    union {
        int64_t number; /* of a bool, too */
        double real;
        char *text; /* of a string and of a name; ended by a NUL, and has no other */
        struct {
            struct td__pickle_value **items; /* of a dict: key, value, key, value … */
            size_t count, capacity;
        } list;
        struct td__pickle_storage storage;
        struct td__pickle_tensor tensor;
    } as;
    struct td__pickle_value *next; /* in the list of all */
};

/** All values of a pickle. They may contain one another more than once, and even themselves. */
struct td__pickle {
    struct td__pickle_value *all, *root;
};

/** Runs a pickle of `size` bytes. `path` is for errors: TD_ERR_INVALID if it is damaged, TD_ERR_UNSUPPORTED with the name
 *  of what is not known. On failure *pickle holds nothing. */
td_status td__unpickle(const char *path, const void *data, size_t size, struct td__pickle *pickle);
void td__pickle_free(struct td__pickle *pickle);

#endif
