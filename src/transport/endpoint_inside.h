/* What the files of an endpoint share with each other. */
#ifndef TD_TRANSPORT_ENDPOINT_INSIDE_H
#define TD_TRANSPORT_ENDPOINT_INSIDE_H

#include "base/arena.h"
#include "base/auth.h"
#include "transport/endpoint.h"

#include <pthread.h>

enum { TD__CARD_TEXT = 128 };

/* What a card says, and what is known about its rank since. */
struct td__card {
    char host_id[TD__CARD_TEXT]; /* the same text: the same memory, and unix sockets in reach */
    char host_name[TD__CARD_TEXT];
    char address[TD__CARD_TEXT];
    char local[TD__CARD_TEXT]; /* "unix:@name" */
    int port;
    int pid;
    uint64_t pid_space; /* the name space that the pid belongs to */
    int watch;          /* a pidfd; 0: not opened yet, -1: cannot be */
    bool shared;        /* it takes part in shared memory */
    int host;           /* its number */
    struct td__arena_view view;
    bool viewed;
};

struct td__arrival;
struct td__listener;
struct td__paper;

struct td__endpoint {
    int rank, size;
    bool shared;
    struct td__secret secret;
    struct td__reception *reception;
    struct td__card own;
    struct td__card *peers;

    pthread_mutex_t lock;
    pthread_cond_t arrived;
    struct td__arrival *arrivals;
    struct td__listener *listeners;
    struct td__paper *papers;

    pthread_mutex_t map_lock;
};

/** Fills in this rank's own card, but for the addresses. */
void td__card_fill_in(struct td__card *card, const char *host);

#endif
