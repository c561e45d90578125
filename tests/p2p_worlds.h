/* A world for the tests of messages: in shared memory, or over sockets. */
#ifndef TANDEM_TESTS_P2P_WORLDS_H
#define TANDEM_TESTS_P2P_WORLDS_H

#include "runner.h"

#include <tandem/backend.h>
#include <tandem/group.h>

/* Defines the tests name_shm and name_tcp with the same body. */
#define BOTH_WAYS(id, ...)                                                                         \
    static void both_##id(void);                                                                   \
    RANKS(id##_shm, __VA_ARGS__)                                                                   \
    {                                                                                              \
        setenv("TANDEM_TRANSPORT", "shm", 1);                                                      \
        both_##id();                                                                               \
    }                                                                                              \
    RANKS(id##_tcp, __VA_ARGS__)                                                                   \
    {                                                                                              \
        setenv("TANDEM_TRANSPORT", "tcp", 1);                                                      \
        both_##id();                                                                               \
    }                                                                                              \
    static void both_##id(void)

/** Whether the test runs over sockets. */
bool world_is_tcp(void);

void world_begin(void);

/** A barrier, and the end. */
void world_end(void);

/** From td_alloc(), or malloc(). */
void *world_memory(size_t size, bool arena);
void world_free(void *memory, bool arena);

/** Bytes that tell their place and `seed`; and a check that they are there. */
void fill(unsigned char *data, size_t size, unsigned seed);
void check_filled(const unsigned char *data, size_t size, unsigned seed);

/** One int as a message of the world. */
void send_int(int value, int to, int tag);
int recv_int(int from, int tag);

#endif
