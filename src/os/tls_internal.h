/* What the files of TLS share: tls.c knows OpenSSL, tls_move.c the two sockets of a connection, and
 * tls_pump.c the thread. */
#ifndef TD_OS_TLS_INTERNAL_H
#define TD_OS_TLS_INTERNAL_H

#include "base/buffer.h"
#include "os/tls.h"

#include <openssl/ssl.h>

/* A thread that waits for a handshake; on its stack, protected by the pump's lock. */
struct td__tls_wait {
    bool done;
    struct td__tls_failure failure;
};

/* A connection and the end of the socketpair that stands for it. Until it is added it belongs to the
 * thread that made it, then to the pump's thread. */
struct td__tls_link {
    struct td__tls_link *before, *after;
    struct td__tls_link *hot_next;
    bool hot; /* on the list of those to be looked at */
    SSL *ssl;
    int wire, plain;
    uint64_t end_id;   /* inode of the plain end that was handed out … */
    const void *owner; /* … and whose it is; the pump's lock protects this one, … */
    bool unsent;       /* … and this: the plain end is closed, and something is on its way */
    int epoll;         /* that watches both */
    uint8_t key[TD__MAC_SIZE];
    struct td__tls_wait *wait; /* NULL: no thread waits for the handshake */
    td__deadline end;          /* of the handshake, later of closing; else TD__NEVER */

    bool open;          /* the handshake is done */
    bool again;         /* it was stopped for the sake of others, with more to do */
    bool may_have_left; /* look whether … */
    bool left;          /* … the plain end is closed everywhere */
    bool broken;        /* the connection is of no more use */
    bool over;          /* so is all the rest: to be freed */

    struct td__buffer up;   /* from the plain end, and not sent yet */
    struct td__buffer down; /* received, and not taken by the plain end yet */
    bool up_ended;          /* no more comes from the plain end … */
    bool up_closed;         /* … and the end was sent to the other side */
    bool down_ended;        /* no more comes from the other side … */
    bool down_closed;       /* … and the plain end was shut down */
    bool wants_room;        /* epoll watches the plain end for room */
    uint64_t under_key;     /* bytes sent under the present key */
};

/* ---- tls.c: each of these does what can be done now, without waiting -------------------------- */

/** What came of one step. */
enum td__tls_step {
    TD__TLS_MORE,  /* done, and there may be more */
    TD__TLS_WAITS, /* for the wire */
    TD__TLS_ENDED, /* the other side has ended its stream in order */
    TD__TLS_FAILED,
};

enum td__tls_step td__tls_shake(struct td__tls_link *link, struct td__tls_failure *failure);
enum td__tls_step td__tls_write(struct td__tls_link *link, const void *data, size_t size,
                                size_t *written);
enum td__tls_step td__tls_read(struct td__tls_link *link, void *data, size_t room, size_t *got);

/** Whether a step of td__tls_read() has just failed because of bytes that the other side, or this one, did not
 *  send so; *reason is in OpenSSL's words. */
bool td__tls_found_changes(const char **reason);

/** Ends the stream towards the other side. */
enum td__tls_step td__tls_end(struct td__tls_link *link);

/** Frees it and closes its descriptors. */
void td__tls_link_free(struct td__tls_link *link);

/** Bytes under one key: well below the 2^24 records after which AES-GCM gets weak. */
extern uint64_t td__tls_key_limit;

/* ---- tls_move.c ------------------------------------------------------------------------------ */

enum { TD__TLS_SCRATCH = 128 << 10 };

/** Does all that can be done now for the link; link->over says that nothing is left to be done. */
void td__tls_move(struct td__tls_link *link, uint8_t scratch[TD__TLS_SCRATCH]);

/* ---- tls_pump.c ------------------------------------------------------------------------------ */

/** Hands the link to the pump; where it has a `wait`, returns when that is done, or at link->end. */
td_status td__tls_pump_add(struct td__tls_link *link);

/** Keeps in mind that the link's bytes were changed on the way, for td__tls_complaint(). */
void td__tls_pump_complain(const struct td__tls_link *link);

/** Wakes the thread that waits for the handshake, with its result; false where none does. */
bool td__tls_pump_answer(struct td__tls_link *link, const struct td__tls_failure *failure);

#endif
