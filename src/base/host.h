/* Who this process is, in words for messages. */
#ifndef TD_BASE_HOST_H
#define TD_BASE_HOST_H

/** The host's name, without its domain. */
const char *td__host_name(void);

/** The rank that log lines carry: from RANK at the start, and from the rendezvous later. */
void td__log_set_rank(int rank);

#endif
