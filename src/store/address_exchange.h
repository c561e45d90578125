/* The ranks of a world exchange their addresses through a store, and fail at once if one of them ends before all have
 * joined. */
#ifndef TD_STORE_ADDRESS_EXCHANGE_H
#define TD_STORE_ADDRESS_EXCHANGE_H

#include <tandem/store.h>

enum { TD__EXCHANGE_KEY = 160 };

/** The keys, in the store, of the card of a rank; and of the number of exchanges in which it has taken part: its
 *  epoch. */
void td__card_key(const char *name, int64_t epoch, int rank, char key[TD__EXCHANGE_KEY]);
void td__epoch_key(const char *name, int rank, char key[TD__EXCHANGE_KEY]);

struct td__address_exchange {
    td_store *store; /* that of all exchanges of this kind, and … */
    td_store *given; /* … the one that it is a part of, which may have the roster of a rendezvous */
    const char *name;
    const char *kind;  /* for texts: "group", … */
    const char *calls; /* … and how a rank joins: "td_group_open()" */
    int rank, size;
    int64_t timeout_ms;
    int64_t epoch; /* set by the exchange */
};

/** Sets this rank's card, and waits for those of all ranks: `cards` has `size`. TD_ERR_PEER if a rank that had joined has
 *  ended, TD_ERR_TIMEOUT if a rank has not joined in time. */
td_status td__exchange_addresses(struct td__address_exchange *exchange, const void *card,
                                 size_t card_size, td_bytes *cards);

#endif
