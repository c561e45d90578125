/* A user-defined store for tests, by the public headers alone: a hash map under a mutex and a condition variable,
 * passed to td_store_create(). */
#ifndef TANDEM_TESTS_MAP_STORE_H
#define TANDEM_TESTS_MAP_STORE_H

#include <tandem/store.h>

struct shared_map;

/** An empty map, with one reference. */
struct shared_map *shared_map_make(void);

/** Gives one reference back; the last one frees it. */
void shared_map_release(struct shared_map *map);

/** All callbacks; each handle has a reference of its own. */
extern const td_store_ops map_full_ops;

/** The required callbacks and close() only. */
extern const td_store_ops map_minimal_ops;

/** The required ones, and `serial`: they fail the test when two run at once, or when one is to wait. */
extern const td_store_ops map_serial_ops;

/** The required ones, with a get() that never waits. */
extern const td_store_ops map_impatient_ops;

/** A store of `ops` over `map`, to which it takes a reference. */
td_store *map_store_open(const td_store_ops *ops, struct shared_map *map);

/** Callbacks that pass everything on to another td_store, their `self`, which they close. They have
 *  set(), get(), compare_set(), delete_key() and add(), as c10d::Store: what compare_set() has stored is
 *  known by the value alone. */
extern const td_store_ops forwarding_ops;

#endif
