/* Values of tdrun's flags that are more than a number or a text. Each function reads the text of one
 * flag; TD_ERR_INVALID with a sentence that names the flag. */
#ifndef TD_LAUNCH_OPTION_VALUES_H
#define TD_LAUNCH_OPTION_VALUES_H

#include <signal.h>
#include <tandem/base.h>

enum { TD__MAX_NODES = 65536, TD__MAX_WORKERS = 65536 };

/** --nnodes: N, or MIN:MAX where both are the same. */
td_status td__take_nnodes(const char *text, int *nnodes);

/** --nproc-per-node: a number, or cpu (one for each that may be used), gpu (one for each that a CUDA
 *  program would see), or auto: gpu where there is one, otherwise cpu. */
td_status td__take_nproc(const char *text, int *nproc);

/** What --rdzv-conf may have, in seconds; what is not given stays as it is. */
struct td__rdzv_conf {
    double timeout, join_timeout, read_timeout;
};

td_status td__take_conf(const char *list, struct td__rdzv_conf *conf);

/** --signals-to-handle: names with commas, with or without "SIG". */
td_status td__take_signals(const char *list, sigset_t *signals);

/** --redirects and --tee: "3" for every worker, or "0:3,1:1" for some of them. */
td_status td__take_streams(const char *flag, const char *text, int nproc, uint8_t *streams);

/** --local-ranks-filter: local ranks with commas. */
td_status td__take_filter(const char *list, int nproc, bool *shown);

#endif
