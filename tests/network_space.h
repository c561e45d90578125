/* Network namespaces, for tests that join or cut networks. */
#ifndef TANDEM_TESTS_NETWORK_SPACE_H
#define TANDEM_TESTS_NETWORK_SPACE_H

#include <stdbool.h>

/** Moves this process into a new one: as root, or as a user that may create user namespaces. False, and
 *  errno is set, where it may not. */
bool network_space_enter(void);

/** Makes 127.0.0.1 reachable in a new one. */
bool network_space_open_loopback(void);

/** Writes a file of /proc. */
bool network_space_write(const char *path, const char *text);

#endif
