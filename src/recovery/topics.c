/* The table of topics that this component answers. */
#include "recovery/topics.h"

td__topic_fn *const td__topics[TD__TOPICS] = {
    [TD__TOPIC_SHRINK] = td__shrink_answer,
    [TD__TOPIC_BARRIER] = td__barrier_answer,
};
