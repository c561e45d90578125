/* Descriptors that a forked child must not keep.
 *
 * The other end of a connection learns that a process has ended when the last copy of its socket is
 * closed. A child of fork(), such as the worker of a data loader, has a copy of each, so the death of its
 * parent would go unnoticed for as long as the child lives; a listening socket would go on to accept
 * connections that nobody serves, and a lock on a file would stay. So the child gives up its copies before
 * fork() returns there. Each number then stands for a socket that is not connected: it is not used again
 * until whoever has it in the child closes it. exec() closes all of them anyway (O_CLOEXEC). */
#ifndef TD_BASE_FORK_H
#define TD_BASE_FORK_H

/** No fork() happens in this process between the two: a descriptor is made and excluded in between.
 *  Nothing in between may block. */
void td__fork_hold(void);
void td__fork_release(void);

/** From now on `fd` is given up by forked children, until it is closed: nobody has to say when. Between
 *  td__fork_hold() and td__fork_release(). A negative `fd` does nothing. */
void td__fork_exclude(int fd);

#endif
