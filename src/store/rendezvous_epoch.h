/* Where this process has met others before. A process may meet again at the same place, after it has
 * closed the first world; all ranks count the same number of meetings, so the number tells them
 * apart. */
#ifndef TD_STORE_RENDEZVOUS_EPOCH_H
#define TD_STORE_RENDEZVOUS_EPOCH_H

/** How many meetings of this process at `place` have succeeded. */
unsigned td__rendezvous_epoch(const char *place);

/** Counts one more. */
void td__rendezvous_epoch_done(const char *place);

#endif
