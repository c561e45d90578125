/* A client of the store's server that can do what td_tcp_store_open() never does: send half a request or a wrong
 * length, or stay silent. And a correct one, to see that the server still serves. */
#ifndef TANDEM_TESTS_RAW_CLIENT_H
#define TANDEM_TESTS_RAW_CLIENT_H

#include "base/auth.h"
#include "store/store_wire.h"

#include <pthread.h>
#include <stdatomic.h>

/** Connects to 127.0.0.1; -1 when the server turns it away at once. */
int raw_connect(int port);

/** Sends all of it; false when the server has closed the connection. */
bool raw_send(int fd, const void *data, size_t size);

/** Receives exactly that much. */
void raw_receive(int fd, void *data, size_t size);

/** Receives until the server closes the connection, and returns the number of bytes. It
 *  must close it soon. */
size_t raw_drain(int fd);

/** Whether the server has closed the connection by now, with nothing sent before. */
bool raw_is_closed(int fd);

/** The whole handshake. */
void raw_prove(int fd, const char *secret);

/** Connects and proves. */
int raw_open(int port, const char *secret);

/** A request: raw_begin(), then td__buffer_put_*() for its body, then raw_finish(), which sends it
 *  and frees it. */
struct td__buffer raw_begin(uint32_t id, uint8_t op);
void raw_finish(int fd, struct td__buffer *request);

/** Receives an answer; *body, its bytes, is to be freed. */
struct td__wire_header raw_answer(int fd, struct td__buffer *body);

/* A client that uses the store all the time, in a thread of its own. */
struct steady {
    pthread_t thread;
    int port;
    const char *secret;
    atomic_bool stop;
    atomic_long rounds;
};

void steady_start(struct steady *steady, int port, const char *secret);

/** Checks that it gets on with its work. */
void steady_check(struct steady *steady);

void steady_stop(struct steady *steady);

/* A server in this process, and a steady client of it. */
struct client_scene {
    td_store *store;
    int port;
    struct steady steady;
};

#define RAW_SECRET "a secret for tests"

void scene_open(struct client_scene *scene);

/** Checks once more that the steady client was not disturbed, and ends both. */
void scene_close(struct client_scene *scene);

/** Whether the store has `key`. */
bool scene_has(const struct client_scene *scene, const char *key);

/** Raises the limit of file descriptors as far as it goes; skips the test when that is below
 *  `wanted`. */
void raise_file_limit(long wanted);

#endif
