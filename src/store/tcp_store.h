/* What the library itself needs of a TCP store beyond store.h. */
#ifndef TD_STORE_TCP_STORE_H
#define TD_STORE_TCP_STORE_H

#include <tandem/store.h>

/** Has the server set `key` to `value` when this client's connection ends without
 *  td_store_close(): when its process dies, or its host is cut off. The latest will counts. */
td_status td__tcp_store_set_will(td_store *store, const char *key, const void *value, size_t size);

/** Changes how long closing waits for the other clients, where the server runs in this process;
 *  other kinds of store are left alone. */
void td__tcp_store_set_linger(td_store *store, int64_t linger_ms);

#endif
