/* A connection between two launchers: messages in order, never waiting.
 *
 *     length of what follows u32 | kind u8 | body
 *
 * It has proven the job's secret (os/trust.h). Both sides send a beat now and then, so that a host that is
 * cut off is noticed by its silence. */
#ifndef TD_LAUNCH_NODE_LINK_H
#define TD_LAUNCH_NODE_LINK_H

#include "base/buffer.h"

#include <tandem/base.h>

/* What the launchers tell each other. «Up» is to the coordinator, «down» from it. */
enum td__node_message {
    TD__MESSAGE_BEAT, /* both ways: this side lives */
    TD__MESSAGE_JOIN, /* up: an introduction, and after a takeover the roster that this node has */
    TD__MESSAGE_FAILED, /* up: a worker has failed (a report) */
    TD__MESSAGE_GONE,   /* up: no worker of a round is left here */
    TD__MESSAGE_END,    /* up: the job ends, because of this node (a report) */
    TD__MESSAGE_LEAVE,  /* up: this node leaves in order */
    TD__MESSAGE_COPY,   /* up: what this node has of the store has changed */
    TD__MESSAGE_DRAIN,  /* up: a node is to leave (a report); down: this one is */
    TD__MESSAGE_ROUND,  /* down: a roster; start the workers */
    TD__MESSAGE_ROSTER, /* down: a roster that has changed; the workers go on */
    TD__MESSAGE_STOP, /* down: end the workers of the round, because one has failed (a report) … */
    TD__MESSAGE_CHANGE,  /* down: … or because nodes come or go (a report) */
    TD__MESSAGE_ADOPT,   /* down: a spare here is to have a rank of a node that is no more (a report: the rank is its code) */
    TD__MESSAGE_LOST,    /* down: a node is lost, and the others go on (a report) */
    TD__MESSAGE_DONE,    /* down: the workers have ended on all nodes */
    TD__MESSAGE_OVER,    /* down: the job cannot go on (a report) */
    TD__MESSAGE_REFUSED, /* down: this node cannot join (a report) */
    TD__MESSAGE_KINDS,
};

struct td__node_link {
    int fd;                    /* -1: there is none, or it has ended */
    struct td__buffer in, out; /* `in` begins with the message that was taken last … */
    size_t taken;              /* … of that size */
    int64_t heard_ns, sent_ns;
};

/** Takes over a connection. */
void td__node_link_open(struct td__node_link *link, int fd);

/** Sends as much as goes without waiting, and keeps the rest. */
void td__node_link_send(struct td__node_link *link, enum td__node_message kind, const void *body,
                        size_t size);

void td__node_link_flush(struct td__node_link *link);

/** Receives what is there. Where the other side has closed, `fd` is -1 afterwards; what came before can
 *  still be taken. */
void td__node_link_receive(struct td__node_link *link);

/** Takes the next message; its body is valid until the next call. False when there is none. */
bool td__node_link_next(struct td__node_link *link, enum td__node_message *kind,
                        struct td__span *body);

/** Closes what is open, and frees. */
void td__node_link_close(struct td__node_link *link);

#endif
