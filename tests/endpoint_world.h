/* Endpoints of tests: several in one process, or one in each rank of a test. */
#ifndef TANDEM_TESTS_ENDPOINT_WORLD_H
#define TANDEM_TESTS_ENDPOINT_WORLD_H

#include "base/auth.h"
#include "peer/endpoint.h"

#include <stdatomic.h>

#define ENDPOINT_SECRET "a secret for tests"

/** A generous timeout. */
td__deadline soon(void);

/** Hands the cards of all of them to all of them. */
void meet_all(struct td__endpoint **endpoints, int count);

/** Two endpoints in this process, under ENDPOINT_SECRET. */
void pair_open(struct td__endpoint *endpoints[2], bool shared);
void pair_close(struct td__endpoint *endpoints[2]);

/** Where an endpoint listens: its TCP port, and the name of its unix socket. */
int endpoint_port(const struct td__endpoint *endpoint);
void endpoint_local(const struct td__endpoint *endpoint, char name[128]);

/** A handshake of a client that means this endpoint. */
struct td__auth endpoint_guest(const struct td__endpoint *endpoint, const char *secret);

/** The other side closes the connection soon, and has sent nothing. Closes it here, too. */
void check_closed(int fd);

/** Exchanges addresses with the other ranks of the test. */
void meet_by_files(struct td__endpoint *endpoint);

/** Zeroed memory that all ranks of the test share. */
void *map_file(size_t size);

#endif
