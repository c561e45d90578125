/* Values inside the component: value.c. */
#ifndef TD_RPC_VALUE_INTERNAL_H
#define TD_RPC_VALUE_INTERNAL_H

#include <tandem/value.h>

#include <stdatomic.h>

struct td__rpc_class_entry;

/** An object of a class: shared by the values over it. */
struct td_value {
    atomic_int owners;
    td_value_kind kind;
    union {
        bool boolean;
        int64_t integer;
        double number;
        struct { /* text, bytes: behind the struct, and a NUL behind them */
            size_t size;
        };
        struct { /* list: values; map: keys and values, in order of insertion */
            td_value **items;
            char **keys;
            int64_t count, capacity;
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

/** The functions below are the public ones of value.h without scopes: the caller always gets one reference. */

td_value *td__value_create(td_value_kind kind, size_t more);

/** A list of `count` items that are set to nil at first; the caller replaces them. */
td_value *td__value_new_list(int64_t count);

/** Gives a result to the thread's innermost scope, as td__adopt(). */
td_value *td__value_adopt(td_value *value);

#endif
