/* The kinds of operations of a group: collectives and messages.
 *
 * Threads: everything here may be called from any thread at any time. */
#ifndef TANDEM_COLLECTIVE_H
#define TANDEM_COLLECTIVE_H

#include <tandem/base.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum td_op_kind {
    TD_OP_BROADCAST,
    TD_OP_REDUCE,
    TD_OP_ALL_REDUCE,
    TD_OP_SCATTER,
    TD_OP_GATHER,
    TD_OP_ALL_GATHER,
    TD_OP_REDUCE_SCATTER,
    TD_OP_ALL_TO_ALL,
    TD_OP_BARRIER,
    TD_OP_SEND,
    TD_OP_RECV,
    TD_OP_KINDS,
} td_op_kind;

/** The name of a kind, such as "all_reduce"; never NULL. */
TD_API const char *td_op_kind_name(td_op_kind kind);

#ifdef __cplusplus
}
#endif

#endif
