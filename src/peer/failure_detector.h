/* The detector of an endpoint: who of the others is still there. What the rest of the library sees of it
 * is in endpoint.h; this is for the files of the endpoint. */
#ifndef TD_PEER_FAILURE_DETECTOR_H
#define TD_PEER_FAILURE_DETECTOR_H

#include "peer/endpoint_internal.h"

/** News from another rank: `rank` is lost, in which way. On any thread. */
void td__failure_detector_report(struct td__endpoint *endpoint, int rank,
                                 enum td__presence presence, int wait_status);

/** Ends the thread, and closes what was watched. */
void td__failure_detector_stop(struct td__endpoint *endpoint);

#endif
