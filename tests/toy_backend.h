/* A whole backend outside the library, over the group's store alone: the example of docs/adding-a-backend.md.
 * Slow, and easy to read. */
#ifndef TANDEM_TESTS_TOY_BACKEND_H
#define TANDEM_TESTS_TOY_BACKEND_H

#include <tandem/backend.h>

/** Registers "toy", which can do everything, and "toy-partial", which has no all_to_all. Both take
 * the option "refuse": they serve no group then. */
td_status toy_backend_register(void);

/** The table of "toy", for backends that are made of it. */
const td_backend_ops *toy_backend_ops(void);

/** Takes both back. */
void toy_backend_unregister(void);

#endif
