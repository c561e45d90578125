/* Where this process has met others before. A process may meet again at the same place, after it has
 * closed the first world; all ranks count the same number of meetings, so the number tells them
 * apart. */
#ifndef TD_STORE_PLACES_H
#define TD_STORE_PLACES_H

/** How many meetings of this process at `place` have succeeded. */
unsigned td__place_meetings(const char *place);

/** Counts one more. */
void td__place_met(const char *place);

#endif
