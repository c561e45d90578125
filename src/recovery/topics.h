/* What ranks ask each other for the sake of recovery; both run on the endpoint's thread, see
 * fault/peer_query.h. */
#ifndef TD_RECOVERY_TOPICS_H
#define TD_RECOVERY_TOPICS_H

#include "fault/peer_query.h"

td__topic_fn td__shrink_answer, td__barrier_answer;

#endif
