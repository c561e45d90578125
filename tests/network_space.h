/* Network namespaces, for tests that join or cut networks. */
#ifndef TANDEM_TESTS_NETWORK_SPACE_H
#define TANDEM_TESTS_NETWORK_SPACE_H

#include <stdbool.h>

/** Moves this process into a new one: as root, or as a user that may create user namespaces. False, and
 *  errno is set, where it may not. */
bool network_space_enter(void);

#endif
