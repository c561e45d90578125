/* What the launcher wants of workers that run: a page that it shares with them.
 *
 * A worker inherits the page's descriptor, whose number is in TANDEM_ORDERS_FD. It looks at the page when it suits it, at
 * the border of two steps; `version` counts the changes, so that a look costs one load. */
#ifndef TD_OS_ORDERS_H
#define TD_OS_ORDERS_H

#include <tandem/base.h>

#include <stdatomic.h>

#define TD__ORDERS_VARIABLE "TANDEM_ORDERS_FD"

struct td__orders {
    uint32_t magic;
    _Atomic uint32_t version; /* changes last */
    _Atomic uint32_t leave;   /* 1: leave the job in order, and end with exit code 0 */
};

/** Makes the page; *fd is close-on-exec. */
td_status td__orders_open(struct td__orders **orders, int *fd);

void td__orders_close(struct td__orders *orders, int fd);

/** The launcher wants its workers to leave. */
void td__orders_leave(struct td__orders *orders);

/** A worker's view of the page that TANDEM_ORDERS_FD names, mapped once and kept; NULL where there is none. From
 *  then on programs that the worker starts do not inherit the descriptor. */
const struct td__orders *td__orders_find(void);

#endif
