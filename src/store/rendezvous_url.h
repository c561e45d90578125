/* Rendezvous URLs, taken apart: scheme://host:port/path?rank=…&world_size=…
 *
 * A pure function of the text, so that it can be fuzzed. */
#ifndef TD_STORE_RENDEZVOUS_URL_H
#define TD_STORE_RENDEZVOUS_URL_H

#include <tandem/base.h>

struct td__url {
    char scheme[32];
    char host[256]; /* "" where there is none */
    int port;       /* -1 where there is none */
    char path[4096];
    int rank;       /* -1 where there is none */
    int world_size; /* likewise */
};

/** Reads the scheme alone: what stands before "://", in lower case. */
td_status td__url_scheme(const char *text, char scheme[32]);

/** Takes a URL of a built-in scheme apart. TD_ERR_INVALID says what is wrong with it. */
td_status td__url_parse(const char *text, struct td__url *url);

#endif
