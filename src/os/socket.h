/* Stream sockets with deadlines, and file descriptors passed along unix ones. All of them are
 * non-blocking, close-on-exec, and this process's alone: forked children give them up (base/thread.h). */
#ifndef TD_OS_SOCKET_H
#define TD_OS_SOCKET_H

#include "os/address.h"

/** Connects to one address. Returns the fd, or -errno. */
int td__connect_to(const struct td__address *address, td__deadline deadline);

/** Binds and listens; with port 0 takes a free one. Returns the fd, or -errno. */
int td__listen_on(const struct td__address *address);

/** Takes a connection that waits at such a socket. Returns the fd, or -1 with errno, EAGAIN where there is
 *  none. */
int td__accept(int listener);

/** Sends all bytes. 0, or an errno: ETIMEDOUT when the deadline has passed. Never raises SIGPIPE. */
int td__send_all(int fd, const void *data, size_t size, td__deadline deadline);

/** Receives exactly `size` bytes. 0, or an errno: ETIMEDOUT, and ENODATA when the other side closed. */
int td__recv_all(int fd, void *data, size_t size, td__deadline deadline);

/** Waits until `fd` is ready for `events` of poll(). 0, or an errno: ETIMEDOUT. */
int td__wait_fd(int fd, short events, td__deadline deadline);

/** Whether an address of `host` belongs to this machine: then a socket can be bound to it. */
bool td__host_is_here(const char *host, td__deadline deadline);

/** The local and the remote end of a socket. */
void td__local_address(int fd, struct td__address *address);
void td__remote_address(int fd, struct td__address *address);

/* ---- Peers that are cut off: how long a host may be silent is TANDEM_HEARTBEAT, in seconds --- */

/** Takes the limit from TANDEM_HEARTBEAT, for all that this process does from now on: 10 s where it is not set.
 *  Called only when a store or a group is opened: threads of the library do not read the
 *  environment, which the program may be changing. TD_ERR_INVALID where it is not a number of seconds from 0.1
 *  to 3600. TCP itself counts in whole seconds. */
td_status td__heartbeat_read(void);

/** The limit that was taken last; 10 s where none was yet. */
int64_t td__heartbeat_ms(void);

/** Prepares a TCP connection: no delay, and the kernel asks the other host now and then whether it is
 *  still there, so that after the heartbeat's limit of silence the connection fails by itself, as
 *  long as nothing is on its way. A host that is near is not sent to by BBR. Does nothing for other sockets. */
void td__tune_tcp(int fd);

/** True when what was sent over TCP has not been acknowledged for the heartbeat's limit: the other host is
 *  cut off. The kernel itself goes on for a quarter of an hour. A peer that just does not read
 *  acknowledges, and is not meant; TCP_USER_TIMEOUT would end it, too. */
bool td__cut_off(int fd);

/** True while something that was sent over TCP has not been acknowledged: td__cut_off() may become true. */
bool td__awaits_acknowledgement(int fd);

/* ---- Descriptors along unix sockets ---------------------------------------------------------- */

/** True when the process at the other end of a unix socket runs as our user, or as root. */
bool td__peer_is_us(int fd);

/** Passes the descriptor `passed` over the unix socket `fd`, along with `size` (1 at least) bytes. */
int td__send_fd(int fd, int passed, const void *data, size_t size, td__deadline deadline);

/** Receives a descriptor (close-on-exec) and exactly `size` bytes. 0, or an errno: EPROTO when no
 *  descriptor came along, EMFILE when this process may have no more. */
int td__recv_fd(int fd, int *passed, void *data, size_t size, td__deadline deadline);

#endif
