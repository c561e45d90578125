/* Sockets made of memory, for targets that read what another process has sent.
 *
 * memory_socket.c has functions of the same names as those of the C library (recv(), poll(), epoll_wait(),
 * …), which the program's own calls then go to. For descriptors that memory_socket() has made they work
 * on memory; all others are the system's. So one execution needs no system call, and a target with
 * sockets is nearly as fast as one without. */
#ifndef TANDEM_TESTS_MEMORY_SOCKET_H
#define TANDEM_TESTS_MEMORY_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** A connection on which `size` bytes of `data` come, at most `piece` of them at a time (0: all at
 *  once). What is sent on it is thrown away. `data` is kept, not copied. */
int memory_socket(const uint8_t *data, size_t size, size_t piece);

/** More bytes, behind those before. Beyond a few pieces that were not read, the rest is lost. */
void memory_socket_more(int fd, const uint8_t *data, size_t size);

/** The other side closes, behind the bytes before. */
void memory_socket_end(int fd);

/** How many are not closed; and forgets all. */
int memory_socket_reset(void);

/** While it is on, each read of the clock advances it by a tenth of a millisecond, and a sleep takes
 *  no time. So waiting for a deadline is short, and always the same. */
void memory_clock(bool on);

#endif
