/* What a worker writes into, and the launcher reads from. */
#ifndef TD_LAUNCH_CHANNEL_H
#define TD_LAUNCH_CHANNEL_H

#include <sys/types.h>
#include <tandem/base.h>

struct td__channel {
    int read_end;  /* non-blocking; -1 when there is none */
    int write_end; /* for the worker */
};

/**
 * Opens a channel. For one that ends at a terminal, `terminal` is a descriptor of it (-1 otherwise):
 * the worker gets a pseudo-terminal of the same size then, so that it writes line by line and in
 * colour as it would there. It passes bytes on unchanged. A pipe otherwise, and where there is no
 * pseudo-terminal left.
 */
td_status td__channel_open(int terminal, struct td__channel *channel);

/** Reads what is there now: the number of bytes, 0 when nothing is, -1 at the end. */
ssize_t td__channel_read(const struct td__channel *channel, void *data, size_t room);

#endif
