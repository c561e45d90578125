/* Values inside the component: value.c. */
#ifndef TD_RPC_VALUE_INTERNAL_H
#define TD_RPC_VALUE_INTERNAL_H

#include <tandem/value.h>

#include <stdatomic.h>

struct td__rpc_class_entry;

enum { TD__VALUE_FEW = 3 };

struct td_value {
    atomic_int owners;
    td_value_kind kind;
    union {
        bool boolean;
        int64_t integer;
        double number;
        size_t size; /* of a text or bytes, which follow the struct, and a NUL */
        struct {     /* list, map */
            td_value **items;
            char **keys; /* of a map: owned, in order of insertion */
            int64_t count, capacity;
            int depth;                    /* 1 if no element is a list or map */
            td_value *few[TD__VALUE_FEW]; /* the items of a short list */
        };
        td_tensor *tensor;
        td_module *module;
        td_rref *rref;
        td_future *future;
        struct {
            struct td__rpc_class_entry *object_class; /* retained */
            void *object;
        };
    };
};

/* The functions below do not use scopes: the caller gets one reference. */

/** A value with `more` bytes behind it. NULL without memory. */
td_value *td__value_create(td_value_kind kind, size_t more);

/** A text or bytes; not checked. */
td_value *td__value_new_bytes(td_value_kind kind, const void *data, size_t size);

/** An empty list with room for `count` items. */
td_value *td__value_new_list(int64_t count);

/** An object, which it takes over with the reference to the class; also on failure. */
td_value *td__value_new_object(struct td__rpc_class_entry *entry, void *object);

/** Appends to a new list or map, which owns `item` and `key` (NULL for a list) from then on. False, and both stay the
 *  caller's, if they are nested too deep, or without memory. Does not look for the key. */
bool td__value_append(td_value *parent, char *key, td_value *item);

/** Gives a result to the thread's innermost scope, as td__adopt(). */
td_value *td__value_adopt(td_value *value);

/** Whether a text is UTF-8 without a NUL. */
bool td__is_utf8(const char *text, size_t size);

#endif
