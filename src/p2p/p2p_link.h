/* Links to ranks on other hosts, and the frames on them; see p2p_tcp.c and p2p_wire.c. */
#ifndef TD_P2P_P2P_LINK_H
#define TD_P2P_P2P_LINK_H

#include "p2p/p2p_internal.h"

struct td__p2p_link {
    struct td__p2p_link *next; /* closed ones */
    int fd;
    int peer;
    bool incoming;
    bool closed;
    bool wants_room;             /* epoll reports when it can be written to */
    struct td__post_list own;    /* control frames on a link that the other side has opened */
    struct td__post_list *queue; /* own, or that of the peer */
    uint8_t header[24];          /* of the first post, while it is being written */
    size_t written;              /* header and payload; 0: nothing of it yet */

    /* Reading. */
    struct td__envelope envelope;    /* the payload that is being read */
    uint64_t left;                   /* bytes of it */
    char *into;                      /* where they are written; NULL: they are skipped */
    struct td__post *post;           /* the recv that gets them */
    struct td__p2p_arrival *arrival; /* or the message that is being kept, not yet in the lists */
    bool bye;
    size_t from, to; /* what has been read ahead */
    uint8_t ahead[8192];
};

enum { TD__WIRE_HEADER = 24, TD__WIRE_EAGER = 64 * 1024 };

/** The header of a post that is to be written. */
void td__wire_header(uint8_t *header, enum td__frame_kind kind, int tag, uint64_t size,
                     uint64_t id);

enum td__wire_state { TD__WIRE_IDLE, TD__WIRE_MORE, TD__WIRE_ENDED };

/** Reads what has arrived, up to a limit (MORE). ENDED: the link is unusable, and *exit_reason is set. */
enum td__wire_state td__wire_read(struct td__p2p *p2p, struct td__p2p_link *link,
                                  const char **exit_reason);

/** Makes what is needed to wait for links; does nothing the second time. */
td_status td__p2p_tcp_begin(struct td__p2p *p2p);

/** The function for td__endpoint_listen(). */
void td__p2p_tcp_accept(void *p2p, int world_rank, int fd);

/** Opens one link that is wanted; releases the lock meanwhile. False: none is. */
bool td__p2p_tcp_connect(struct td__p2p *p2p);

/** Writes the first post of a link's queue; false where there is no room, or no link yet. */
bool td__p2p_tcp_write(struct td__p2p *p2p, int peer, struct td__post *post);

/** Writes the control frames of a link that the other side has opened. */
void td__p2p_tcp_flush(struct td__p2p *p2p, struct td__p2p_link *link);

/** Reads and writes what is ready. */
bool td__p2p_tcp_look(struct td__p2p *p2p);

/** Without the lock: sleeps until a link is ready, at most so long. */
void td__p2p_tcp_sleep(struct td__p2p *p2p, int64_t ns);

/** Wakes the thread that sleeps. */
void td__p2p_tcp_wake(struct td__p2p *p2p);

/** Closes a link; it is freed by td__p2p_tcp_look(), or td__p2p_tcp_leave(). */
void td__p2p_tcp_close(struct td__p2p *p2p, struct td__p2p_link *link);

/** A link has ended: reads what is left on the other one, and marks the rank as gone. */
void td__p2p_tcp_lose(struct td__p2p *p2p, struct td__p2p_link *link, const char *exit_reason);

/** Sends BYE on all links and closes them. */
void td__p2p_tcp_leave(struct td__p2p *p2p, td__deadline deadline);

#endif
