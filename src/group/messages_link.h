/* Links to ranks on other hosts, and what stands on them; see messages_tcp.c and messages_wire.c. */
#ifndef TD_GROUP_MESSAGES_LINK_H
#define TD_GROUP_MESSAGES_LINK_H

#include "group/messages_inside.h"

struct td__link {
    struct td__link *next; /* closed ones */
    int fd;
    int peer;
    bool incoming;
    bool closed;
    bool wants_room;             /* epoll tells when it can be written to */
    struct td__post_list own;    /* frames on a link that the other side has opened */
    struct td__post_list *queue; /* own, or that of the peer */
    uint8_t header[24];          /* of the first post, while it is being written */
    size_t written;              /* header and payload; 0: nothing of it yet */

    /* Reading. */
    struct td__envelope envelope; /* the payload that is being read */
    uint64_t left;                /* bytes of it */
    char *into;                   /* where they go; NULL: nowhere */
    struct td__post *post;        /* the recv that gets them */
    struct td__arrival *arrival;  /* or the message that is being kept, not yet in the lists */
    bool bye;
    size_t from, to; /* what has been read ahead */
    uint8_t ahead[8192];
};

enum { TD__WIRE_HEADER = 24, TD__WIRE_EAGER = 64 * 1024 };

/** The header of a post that is to be written. */
void td__wire_header(uint8_t *header, enum td__message_kind kind, int tag, uint64_t size,
                     uint64_t id);

enum td__wire_state { TD__WIRE_IDLE, TD__WIRE_MORE, TD__WIRE_ENDED };

/** Reads what has come, up to a limit (MORE). ENDED: the link is of no more use, and `farewell` says
 *  why. */
enum td__wire_state td__wire_read(struct td__messages *messages, struct td__link *link,
                                  const char **farewell);

/** Makes what is needed to wait for links; does nothing the second time. */
td_status td__tcp_begin(struct td__messages *messages);

/** The function for td__endpoint_listen(). */
void td__tcp_accept(void *messages, int world_rank, int fd);

/** Opens one link that is wanted; releases the lock meanwhile. False: none is. */
bool td__tcp_connect(struct td__messages *messages);

/** Writes the first post of a link's queue; false where there is no room, or no link yet. */
bool td__tcp_write(struct td__messages *messages, int peer, struct td__post *post);

/** Writes the frames of our own on a link that the other side has opened. */
void td__tcp_flush(struct td__messages *messages, struct td__link *link);

/** Reads and writes what is ready. */
bool td__tcp_look(struct td__messages *messages);

/** Without the lock: sleeps until a link is ready, at most so long. */
void td__tcp_sleep(struct td__messages *messages, int64_t ns);

/** Makes a sleeper return. */
void td__tcp_nudge(struct td__messages *messages);

/** Closes a link; it is freed by td__tcp_look(), or td__tcp_leave(). */
void td__tcp_close(struct td__messages *messages, struct td__link *link);

/** A link has ended: reads what is left on the other one, and parts with the rank. */
void td__tcp_lose(struct td__messages *messages, struct td__link *link, const char *farewell);

/** Says goodbye on all links and closes them. */
void td__tcp_leave(struct td__messages *messages, td__deadline deadline);

#endif
