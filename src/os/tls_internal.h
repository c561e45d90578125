/* What the files of TLS share: tls.c has the handshake and the table of connections, tls_record.c the records. */
#ifndef TD_OS_TLS_INTERNAL_H
#define TD_OS_TLS_INTERNAL_H

#include "os/gcm.h"
#include "os/tls.h"

#include <openssl/ssl.h>
#include <pthread.h>

enum {
    TD__TLS_SECRET = 32,
    TD__TLS_HEADER = 5,
    TD__TLS_TEXT = 1 << 14, /* most bytes of a record's text */
    TD__TLS_OVERHEAD = TD__TLS_HEADER + 1 + TD__GCM_TAG,
    TD__TLS_RECORD = TD__TLS_TEXT + 256 +
                     TD__TLS_HEADER, /* the largest that is accepted, RFC 8446, 5.2 */
};

/* The types of what is in a record. */
enum {
    TD__TLS_ALERT = 21,
    TD__TLS_HANDSHAKE = 22,
    TD__TLS_DATA = 23,
};

/* The keys of one direction. */
struct td__tls_keys {
    struct td__gcm gcm;
    uint8_t secret[TD__TLS_SECRET];
    uint8_t iv[TD__GCM_NONCE];
    uint64_t number; /* of the next record under them */
    uint64_t bytes;  /* under them so far */
    bool renewable;  /* by a KeyUpdate, which the other side has asked for */
};

/* A connection. Each direction has a lock. The handshake is under that of receiving, and nothing is sent before its end. */
struct td__tls {
    int fd;
    uint64_t fork_generation;
    SSL *ssl; /* in the handshake; then NULL */
    uint8_t key[TD__MAC_SIZE];
    bool server;
    atomic_bool open; /* the handshake is done */

    pthread_mutex_t recv_lock;
    struct td__tls_keys in;
    uint8_t *part; /* the beginning of a record, while the rest is missing; or NULL */
    size_t part_size;
    uint8_t *text; /* of a record that is not wholly taken yet; or NULL */
    size_t text_at, text_to;
    size_t text_wire; /* its last bytes, or all, are in the kernel's buffer; 0: there is none */
    bool in_parts;    /* the last record was not taken at once */
    bool ended;       /* the other side has sent all */
    atomic_bool changed;

    pthread_mutex_t send_lock;
    struct td__tls_keys out;
    uint8_t *wire; /* records that are being sent */
    size_t wire_at, wire_to, wire_room;
    size_t held; /* the last byte of the caller in them, which was not told that it is sent */
    bool said_end;
};

/** Keys from a secret of the handshake. False where there is no memory. */
bool td__tls_set_keys(struct td__tls_keys *keys, const uint8_t secret[TD__TLS_SECRET]);

/** Carries the handshake on: 1: done, 0: waits for the other side, -1: *failure says why not. */
int td__tls_shake(struct td__tls *tls, struct td__tls_failure *failure);

/** Announces the end, or a failure, if that can be sent at once. */
void td__tls_say_end(struct td__tls *tls, bool changed);

/** Bytes and records under one key: well below the 2^24.5 full records up to which AES-GCM is as strong as RFC 8446, 5.5
 *  wants it. */
extern uint64_t td__tls_key_limit;
enum { TD__TLS_KEY_RECORDS = 1 << 22 };

#endif
