/* The functions and classes that calls can use: registry.c. */
#ifndef TD_RPC_REGISTRY_H
#define TD_RPC_REGISTRY_H

#include "rpc/signature.h"

#include <tandem/rpc.h>

struct td__rpc_class_entry;

/** A registered function, method or constructor. Reference-counted. */
struct td__function_entry;

/** The class of a name, with one reference; NULL if there is none. */
struct td__rpc_class_entry *td__class_find(const char *name);
void td__class_release(struct td__rpc_class_entry *entry);
const char *td__class_name(const struct td__rpc_class_entry *entry);
void td__class_destroy_object(struct td__rpc_class_entry *entry, void *object);

/** The object as a value, and back, by the program's functions; NULL on failure, also if the class has none. */
td_value *td__class_pack(struct td__rpc_class_entry *entry, void *object);
void *td__class_unpack(struct td__rpc_class_entry *entry, td_value *packed);

#endif
