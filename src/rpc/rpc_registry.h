/* The functions and classes that calls can use: rpc_registry.c. Entries are reference-counted: one that is unregistered
 * stays until its calls and objects have ended. */
#ifndef TD_RPC_RPC_REGISTRY_H
#define TD_RPC_RPC_REGISTRY_H

#include "base/map.h"
#include "rpc/signature.h"

#include <tandem/rpc.h>

#include <stdatomic.h>

/** A function, a constructor or a method. */
struct td__function_entry {
    struct td__map_node by_name;
    bool is_method;
    atomic_int owners; /* of a function or constructor */
    struct td__signature *signature;
    td_rpc_fn fn;
    atomic_bool brief; /* its last call took a few microseconds at most */
    struct td__rpc_class_entry
        *owner; /* of a constructor: its class, retained; of a method: not retained */
    void *arg;
};

struct td__rpc_class_entry;

/** The function or constructor of a name, with one reference; NULL if there is none. */
struct td__function_entry *td__function_find(const char *name, size_t size);

/** The method of a class; NULL if there is none. */
struct td__function_entry *td__method_find(struct td__rpc_class_entry *owner, const char *name);
void td__function_release(struct td__function_entry *entry);

/** Takes over the reference, for the next td__function_find() of this thread, until td__function_end_thread(). */
void td__function_keep(struct td__function_entry *entry);
void td__function_end_thread(void);

/** A call of it took so long. */
void td__function_took(struct td__function_entry *entry, int64_t ns);

/** Registers a function of the library itself. */
td_status td__rpc_register_own(const char *signature, td_rpc_fn fn);

/** Calls it with bound arguments. The result has one reference, or belongs to the scope, as `fn` returned it. */
td_value *td__function_call(struct td__function_entry *entry, td_rpc_call *call,
                            td_value *const *args, int count);

/** The same for a class. */
td_status td__rpc_register_class_own(const td_rpc_class *rpc_class);

/** The class of a name, with one reference; NULL if there is none. */
struct td__rpc_class_entry *td__class_find(const char *name);
void td__class_release(struct td__rpc_class_entry *entry);
const char *td__class_name(const struct td__rpc_class_entry *entry);
void td__class_destroy_object(struct td__rpc_class_entry *entry, void *object);

/** The object as a value, and back, by the program's functions; NULL on failure, also if the class has none. */
td_value *td__class_pack(struct td__rpc_class_entry *entry, void *object);
void *td__class_unpack(struct td__rpc_class_entry *entry, td_value *packed);

#endif
