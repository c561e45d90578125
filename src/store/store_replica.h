/* The replicated part of the store's engine: what the primary tells its standbys, and what a standby makes of it.
 * tcp_replica.h has the whole picture; here are no sockets.
 *
 *     primary: engine ── SNAPSHOT, KEY …, CLIENT …, SNAPSHOT_END, then CHANGE after CHANGE ──> standby: engine
 *                     <───────────────────────────── ATTACH, then ACK after ACK ──────────────
 *
 * A CHANGE is a request that had an effect, with its place in the order (sequence), the client it came from and that
 * client's own number for it. The standby carries it out in the same way, and so has the same keys and the same
 * memory of clients. Of each client the engine remembers the highest number, and the answers of the last changes that
 * have one, so that a request that is sent again is answered and not repeated. A client has at most
 * TD__REPLICA_WINDOW such requests on their way.
 *
 *     frame          from       body
 *     HELLO          client     u64 client (0: only asks), u64 first number, u64 term, u8 wants STATE
 *     ATTACH         standby    u64 term, u32 number, address
 *     ACK            standby    u64 sequence: all up to it is in its copy
 *     DEPOSED        standby    u64 term: there is a primary of that term
 *     STATE          server     u8 role, u8 known, u64 term, u64 version, u64 base term, u64 base version, u64 done,
 *                               u32 own number, members
 *     SNAPSHOT       primary    u64 term, u64 version, u64 sequence: a copy begins
 *     KEY            primary    key, value
 *     CLIENT         primary    u64 client, u64 done, u8 gone, u8 has a will, key, value of the will,
 *                               u64 failed number, u8 status, text, u32 n, n times u64 number and i64 answer
 *     SNAPSHOT_END   primary    empty
 *     CHANGE         primary    u64 sequence, u64 client, u64 number, u8 op or td__replica_entry, body of that
 *     members        u32 n, n times u32 number and address
 *
 * Frames from a server have id 0. All strings and counts are bounded; what does not fit ends the connection. */
#ifndef TD_STORE_REPLICA_H
#define TD_STORE_REPLICA_H

#include "base/clock.h"
#include "store/kv.h"
#include "store/store_wire.h"

#include <sys/queue.h>

enum {
    TD__REPLICA_MOST = 16,     /* servers of one store */
    TD__REPLICA_ADDRESS = 280, /* bytes of an address, "host:port" */
    TD__REPLICA_WINDOW = 64,
    TD__REPLICA_NOTE = 256, /* bytes of a failure that is remembered */
};

/* Bytes on their way to a standby, from which on the primary reads no more from clients. */
#define TD__REPLICA_BACKLOG ((size_t)32 << 20)

enum td__replica_frame {
    TD__REPLICA_STATE = 0x80,
    TD__REPLICA_SNAPSHOT,
    TD__REPLICA_KEY,
    TD__REPLICA_CLIENT,
    TD__REPLICA_SNAPSHOT_END,
    TD__REPLICA_CHANGE,
};

/* What a CHANGE can be beside a request. */
enum td__replica_entry {
    TD__ENTRY_HELLO =
        0x40,          /* the client is known from now on; number: what it has had carried out */
    TD__ENTRY_GONE,    /* its connection has ended: its will is carried out */
    TD__ENTRY_FORGET,  /* it has said BYE, or was gone for too long */
    TD__ENTRY_NOTE,    /* u8 status, text: a request without an answer has failed */
    TD__ENTRY_MEMBERS, /* u64 version, members */
    TD__ENTRY_BEAT,    /* empty: the primary lives, and wants an ACK */
};

enum td__replica_role {
    TD__REPLICA_PRIMARY,
    TD__REPLICA_STANDBY,
    TD__REPLICA_DEPOSED,
    TD__REPLICA_ENDED, /* it was stopped in order */
};

struct td__replica_member {
    uint32_t number;
    char address[TD__REPLICA_ADDRESS]; /* "": where the client reached it */
};

struct td__replica_list {
    int count;
    struct td__replica_member at[TD__REPLICA_MOST]; /* by number */
};

/* What a client is told of a server. */
struct td__replica_report {
    uint8_t role;
    bool known;                       /* the client's earlier requests are remembered … */
    bool gone;                        /* … and it was taken for dead: its will is carried out */
    uint64_t term, version;           /* of the list of members */
    uint64_t base_term, base_version; /* of the copy that the primary of this term began with */
    uint64_t done;                    /* the highest number of this client that was carried out */
    uint32_t number;                  /* of this server */
    struct td__replica_list members;
};

struct td__engine;
struct td__session;

/* A client, as all servers of the store remember it. */
struct td__known_client {
    struct td__map_node node;
    uint64_t id;
    uint64_t done;
    struct {
        uint64_t number;
        int64_t value;
    } answers[TD__REPLICA_WINDOW];
    uint32_t answered; /* how many were remembered; the latest replaces the oldest */
    uint64_t failed;   /* the number of the latest request without an answer that failed; 0: none */
    uint8_t failed_status;
    char failed_text[TD__REPLICA_NOTE];
    td_bytes will_key, will_value;
    bool gone;                   /* the will, if there was one, is carried out */
    struct td__session *session; /* NULL: not connected here */
    int64_t absent_since;
    uint8_t key[8];
};

/* One standby, at the primary. */
struct td__standby {
    LIST_ENTRY(td__standby) link;
    struct td__session *session;
    uint32_t number;
    char address[TD__REPLICA_ADDRESS];
    bool member;    /* has a whole copy; answers wait for its ACK */
    uint64_t acked; /* up to here all is in its copy */
    uint64_t awaited;
    int64_t awaited_since; /* the ACK of `awaited` */
    size_t was_in_flight;
    bool late;
};

struct td__replica {
    enum td__replica_role role;
    uint64_t term;                    /* the highest that was seen */
    uint64_t copy_term, copy_version; /* of what the copy here is of; at the primary its own */
    uint64_t base_term, base_version;
    uint64_t sequence; /* of the latest change in the copy */
    bool whole;        /* the copy is whole, and was a member's when it was last heard of */
    uint32_t number;
    char address[TD__REPLICA_ADDRESS];
    struct td__map clients;
    LIST_HEAD(, td__standby) standbys;
    struct td__replica_list members;
    uint64_t members_sequence;
    struct { /* a snapshot that is not whole yet */
        bool open;
        uint64_t term, version, sequence;
        struct td__kv kv;
        struct td__map clients;
    } coming;
};

/* ---- Lists and reports ----------------------------------------------------------------------- */

void td__replica_put_members(struct td__buffer *buffer, const struct td__replica_list *list);
bool td__replica_read_members(struct td__reader *reader, struct td__replica_list *list);

/** Reads the body of a STATE; false when it is malformed. */
bool td__replica_read_state(const uint8_t *body, size_t size, struct td__replica_report *report);

/** Adds a STATE for the client of `session`, which may be NULL. */
void td__replica_put_state(struct td__engine *engine, const struct td__session *session,
                           struct td__buffer *buffer);

/** Splits the address of a server, "host:port" or "unix:…"; false when it is none. */
bool td__replica_split_address(const char *address, char host[TD__REPLICA_ADDRESS], int *port);

/** Whether a copy of `term` and `version` is the later one, or the same. */
static inline bool td__replica_not_older(uint64_t term, uint64_t version, uint64_t other_term,
                                         uint64_t other_version)
{
    return term > other_term || (term == other_term && version >= other_version);
}

/* ---- Every server ---------------------------------------------------------------------------- */

/** Gives an engine its replicated part, in the role of the primary of term 1. TD_OK where it has one. */
td_status td__replica_begin(struct td__engine *engine);

void td__replica_free(struct td__engine *engine);

/** A STANDBY becomes the primary of `term`: TD_ERR_STATE where its copy is not whole, or the term is not higher than
 *  all that it has seen. */
td_status td__replica_promote(struct td__engine *engine, uint64_t term);

/** There is a primary of `term`: a primary of an earlier one is DEPOSED. */
void td__replica_see_term(struct td__engine *engine, uint64_t term);

/** Carries out one of the requests of this header. False: the connection ends. */
bool td__replica_execute(struct td__session *session, const struct td__wire_header *header,
                         const uint8_t *body);

/** This server is not the primary: says so, and ends the session. */
void td__replica_refuse(struct td__session *session);

/** The session of a client, or of a standby, ends. */
void td__replica_session_end(struct td__session *session);

/* ---- The primary ----------------------------------------------------------------------------- */

/** A request with this number of its client was carried out, with `status`: tells the standbys. */
void td__replica_changed(struct td__session *session, uint64_t number,
                         const struct td__wire_request *request, td_status status,
                         const uint8_t *body, size_t size);

/** Up to which sequence every member has all changes. */
uint64_t td__replica_confirmed(const struct td__engine *engine);

/** A standby has so much before it that clients must wait. */
bool td__replica_is_clogged(const struct td__engine *engine);

/** Drops the standbys whose numbers are not among these. */
void td__replica_keep(struct td__engine *engine, const uint32_t *numbers, int count);

/** To be called every quarter of the heartbeat's limit: beats, drops standbys that are late, and forgets clients that
 *  have not come back. */
void td__replica_tick(struct td__engine *engine, int64_t now, int64_t limit_ns);

/* ---- Clients that are remembered (store_clients.c): replica->clients, or those of a snapshot -------- */

struct td__known_client *td__replica_find(const struct td__map *clients, uint64_t id);

/** Finds it, or makes it; NULL without memory. */
struct td__known_client *td__replica_know(struct td__map *clients, uint64_t id);
void td__replica_forget(struct td__map *clients, struct td__known_client *known);
void td__replica_forget_all(struct td__map *clients);

/** A change with this number was carried out; `value` is what its answer is made of. */
void td__replica_remember(struct td__known_client *known, uint64_t number, uint8_t op,
                          int64_t value);

/** A request without an answer has failed. */
void td__replica_note(struct td__known_client *known, uint64_t number, uint8_t status,
                      const char *text, size_t size);

/** Adds a CLIENT. */
void td__replica_put_client(struct td__buffer *out, const struct td__known_client *known);

/** The value of td__replica_remember(); false where that change had no effect. */
bool td__replica_recall(const struct td__known_client *known, uint64_t number, int64_t *value);

/* ---- A standby ------------------------------------------------------------------------------- */

/** Carries out a frame of the primary's. False when it is malformed, or memory is short: the copy is then not to be
 *  trusted, and the link ends. */
bool td__replica_follow(struct td__engine *engine, const struct td__wire_header *header,
                        const uint8_t *body);

#endif
