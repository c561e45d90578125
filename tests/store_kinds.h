/* Stores of every kind for tests. All of these end the test when they fail. */
#ifndef TANDEM_TESTS_STORE_KINDS_H
#define TANDEM_TESTS_STORE_KINDS_H

#include <tandem/store.h>

td_store *open_hash(void);

/** A file in the test's directory: each call is another handle on it. */
td_store *open_file(void);
const char *file_path(void);

/** Host a server, with the secret "conformance", and then connect to the same one again. The handle
 *  that hosts it is the one to close last. */
td_store *open_tcp(void);
td_store *open_tcp_again(void);
td_store *open_unix(void);
td_store *open_unix_again(void);
td_store *open_tls(void);
td_store *open_tls_again(void);
td_store *open_server_at(const char *host);
td_store *open_client_at(const char *host);
extern int tcp_port; /* of the latest server */

/** With a standby in this process, which has a copy of everything. */
td_store *open_replicated(void);

/** Views of the above with the prefix "pre"; nothing else is left of the base. */
td_store *open_prefix_hash(void);
td_store *open_prefix_tcp(void);
td_store *open_prefix_tcp_again(void);
td_store *open_view_of(td_store *base);

/** A store that all ranks of the test share: "tcp", "prefix" or "file". */
td_store *open_of_ranks(const char *kind);

/** A barrier: each rank adds 1, and waits for the rank that completes the count. */
void count_in(td_store *store, int round);

#endif
