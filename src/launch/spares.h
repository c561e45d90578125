/* Spares: processes that are ready for the rank of a worker that dies (--spares).
 *
 *     started with the workers --> TD__SPARE_WAITS --> gets the rank of a worker that has died --> is that worker
 *                                                      the slot of the dead one gets a new spare
 *
 * A spare is a worker of the attempt whose `spare` is not below 0. It does not count: nothing waits for its end, and its death
 * is no failure; another one is started in its place, later each time where that dies soon, too. At the end of the job
 * the spares are killed. What they and the launcher tell each other is in store/spare.h. */
#ifndef TD_LAUNCH_SPARES_H
#define TD_LAUNCH_SPARES_H

#include <tandem/base.h>

struct td__agent;
struct td__worker;

/** A spare that would take a rank now; NULL for none. */
struct td__worker *td__spares_find(const struct td__agent *agent);

/** Gives the rank of a worker that has ended to a spare; false where there is none that takes it. Otherwise `worker` is
 *  a spare now, that is to be started. Not from the event loop. */
bool td__spares_give(struct td__agent *agent, struct td__worker *worker);

/** A rank of another node, of which `what` says which, is to be given to a spare: at once, or as soon as there is one that
 *  takes it. */
void td__spares_adopt(struct td__agent *agent, int rank, const char *what);

/** Gives such ranks to the spares that are there. Not from the event loop. */
void td__spares_give_adopted(struct td__agent *agent);

/** A spare has ended: says so, and has another one started. */
void td__spare_ended(struct td__agent *agent, struct td__worker *spare);

/** A spare could not be started: the last error says why. */
void td__spare_not_started(struct td__agent *agent, struct td__worker *spare);

/** Makes the connection to a spare that is about to be started; its end of it is spare->far_end, … */
td_status td__spare_open_link(struct td__worker *spare);

/** … and watches it, once it has started (or not: then it closes both). */
void td__spare_watch_link(struct td__agent *agent, struct td__worker *spare, bool started);

/** Closes the connection, where there is one. */
void td__spare_hang_up(struct td__worker *worker);

#endif
