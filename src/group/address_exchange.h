/* The ranks of a root meet: each has everybody's card afterwards. */
#ifndef TD_GROUP_ADDRESS_EXCHANGE_H
#define TD_GROUP_ADDRESS_EXCHANGE_H

#include "group/root.h"

/** Puts this rank's card into the root's store, waits for those of all others, and gives them to the
 *  endpoint. TD_ERR_PEER where one that had come has ended, TD_ERR_TIMEOUT where one does not come. */
td_status td__attend(struct td__root *root);

#endif
