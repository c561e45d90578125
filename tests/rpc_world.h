/* Workers for the tests of remote calls, named "w0", "w1", … after their rank, with these functions:
 *
 *     echo(x)                                returns x
 *     add(x: int, y: int = 10)               the sum
 *     from()                                 the name of the caller
 *     fail(status: int, text: text)          fails with them
 *     pause(ms: int)                         returns ms after so long
 *     bounce(to: list, left: int)            calls bounce on the next worker of the list, `left` times: how often it was
 *     hold()                                 returns when it is cancelled; counts in rpc_held and rpc_cancelled
 *     later(ms: int)                         answers after so long, without a thread of the agent
 *     gate()                                 answers when open_gate() is called
 *     open_gate()                            how many it has opened
 *     huge(bytes: int)                       so many bytes
 *     held(), cancelled()                    rpc_held, rpc_cancelled */
#ifndef TANDEM_TESTS_RPC_WORLD_H
#define TANDEM_TESTS_RPC_WORLD_H

#include "runner.h"
#include "ways.h"

#include <tandem/rpc.h>

#include <stdatomic.h>

/* Defines the tests id_shm, id_tcp and id_hosts (two workers on each host) with the same body. */
#define ALL_WAYS(id, ...)                                                                          \
    static void all_##id(void);                                                                    \
    RANKS(id##_shm, .arg = &shm, __VA_ARGS__)                                                      \
    {                                                                                              \
        all_##id();                                                                                \
    }                                                                                              \
    RANKS(id##_tcp, .arg = &tcp, __VA_ARGS__)                                                      \
    {                                                                                              \
        all_##id();                                                                                \
    }                                                                                              \
    RANKS(id##_hosts, .arg = &mixed, __VA_ARGS__)                                                  \
    {                                                                                              \
        all_##id();                                                                                \
    }                                                                                              \
    static void all_##id(void)

extern atomic_int rpc_held;      /* calls of hold() that have begun */
extern atomic_int rpc_cancelled; /* that have ended */

/** Registers the functions, and takes the way that is the test's `arg`; and makes this process a worker, too. NULL: the
 *  usual options. */
void rpc_prepare(void);
void rpc_begin(const td_rpc_options *options);

/** A graceful shutdown. */
void rpc_end(void);

/** "w3"; in a buffer of which there are a few. */
const char *rpc_name(int rank);

/** The result of a call that returns an int; the test fails if the call does. */
int64_t rpc_int(const char *to, const char *function, td_value *args);
int64_t rpc_value_int(td_value *value);

/** The call fails so. */
void rpc_check_fails(const char *to, const char *function, td_value *args,
                     const td_rpc_call_options *options, td_status status, const char *part);

/** The future is complete soon, and has failed so. */
void rpc_check_failed(td_future *future, td_status status, const char *part);

#endif
