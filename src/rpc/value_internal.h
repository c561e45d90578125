/* Values inside the component: value.c, value_items.c. */
#ifndef TD_RPC_VALUE_INTERNAL_H
#define TD_RPC_VALUE_INTERNAL_H

#include <tandem/value.h>

#include <stdatomic.h>

struct td__rpc_class_entry;

struct td_value {
    atomic_int owners;
    td_value_kind kind : 16;
    bool in_block : 1; /* block_cache.h; or it is from malloc() */
    union {
        bool boolean;
        int64_t integer;
        double number;
        size_t size;          /* of a text or bytes, which follow the struct, and a NUL */
        struct {              /* list, map */
            td_value **items; /* behind the struct, until they have grown */
            char **keys;      /* of a map: owned, in order of insertion */
            uint32_t
                *index; /* of a map with more than a few keys: a hash table; see value_items.c */
            int64_t count, capacity;
            int depth;        /* 1 if no element is a list or map */
            atomic_bool held; /* it is an element, so that it cannot change any more */
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

/** Drops a reference; true if it was the last one. A single owner needs no locked instruction: only an owner adds one. */
static inline bool td__drop_owner(atomic_int *owners)
{
    return atomic_load_explicit(owners, memory_order_acquire) == 1 ||
           atomic_fetch_sub_explicit(owners, 1, memory_order_acq_rel) == 1;
}

/* The functions below do not use scopes: the caller gets one reference. */

/** A value with `more` bytes behind it. NULL without memory. */
td_value *td__value_create(td_value_kind kind, size_t more);

/** A text or bytes; not checked. */
td_value *td__value_new_bytes(td_value_kind kind, const void *data, size_t size);

/** An empty list with room for `count` items; more can be appended. */
td_value *td__value_new_list(int64_t count);

/** An empty map. */
td_value *td__value_new_map(void);

/** An object, which it takes over with the reference to the class; also on failure. */
td_value *td__value_new_object(struct td__rpc_class_entry *entry, void *object);

/** Appends to a new list or map, which owns `item` and `key` (NULL for a list) from then on. False, and both stay the
 *  caller's, if they are nested too deep, or without memory. Does not look for the key. */
bool td__value_append(td_value *parent, char *key, td_value *item);

/** Releases the elements of a list or map, and frees what holds them; the value itself stays. */
void td__value_free_items(td_value *value);

/** The number of a key's element; -1 if there is none. */
int64_t td__value_find(const td_value *map, const char *key);

/** Gives a result to the thread's innermost scope, as td__adopt(). */
td_value *td__value_adopt(td_value *value);

/** Whether a text is UTF-8 without a NUL. */
bool td__is_utf8(const char *text, size_t size);

#endif
