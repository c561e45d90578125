/* What the files of `tdrun doctor` share. doctor.c has the command line and the checks of the installation,
 * doctor_machine.c those of the machine. With several nodes, doctor_nodes.c has them meet in the job's store,
 * doctor_links.c connects each node to each other one, and doctor_compare.c says what does not fit together. */
#ifndef TOOLS_DOCTOR_INTERNAL_H
#define TOOLS_DOCTOR_INTERNAL_H

#include "base/auth.h"
#include "base/buffer.h"
#include "launch/options.h"

#include <tandem/store.h>

/* ---- Findings: lines of the output, and what this node tells the others --------------------------- */

enum doctor_verdict { DOCTOR_OK, DOCTOR_NOTE, DOCTOR_FAIL };

struct doctor_findings {
    int broken;
    char place[300];          /* "node 1 (b): " where there are several, otherwise "" */
    struct td__buffer facts;  /* pairs of strings: a name, and what this node has */
    struct td__buffer failed; /* strings: lines that begin with FAIL, without that word */
};

/** Prints a line about this machine. `subject` is a word or two. */
void doctor_report(struct doctor_findings *findings, enum doctor_verdict verdict,
                   const char *subject, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/** Prints a line about the job. */
void doctor_report_job(struct doctor_findings *findings, enum doctor_verdict verdict,
                       const char *subject, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

enum { DOCTOR_NAME = 64, DOCTOR_VALUE = 512 };

/** Notes what doctor_compare() compares among the nodes. */
void doctor_fact(struct doctor_findings *findings, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** The checks of doctor_machine.c. */
void doctor_check_machine(struct doctor_findings *findings, const struct td__run_options *options);

/** Whether this is node 0, but the store's address another machine's. */
bool doctor_master_elsewhere(const struct td__run_options *options);

/** The MTU of the interface that has this address, or -1. */
int doctor_mtu(const char *address);

/* ---- Nodes ---------------------------------------------------------------------------------------- */

struct doctor_fact_of {
    char name[DOCTOR_NAME], value[DOCTOR_VALUE];
};

/* One direction: from one node to another. */
struct doctor_link {
    enum { DOCTOR_UNTRIED, DOCTOR_WORKS, DOCTOR_BROKEN } state;
    int64_t round_trip_ns;
    int64_t clock_ns; /* what the clock there is ahead by */
    char *reason;     /* of one that is broken */
};

/* What a node has published about itself. */
struct doctor_node {
    bool present;  /* it came in time */
    bool readable; /* and its record is one of this version */
    bool reported; /* and so are its links */
    char host[DOCTOR_NAME * 4], address[DOCTOR_NAME * 2];
    int port;
    uint8_t identity[TD__IDENTITY_SIZE];
    struct doctor_fact_of *facts;
    int fact_count;
    char **failed;
    int failed_count;
    struct doctor_link *links; /* to each node */
};

struct doctor_job {
    const struct td__run_options *options;
    double timeout_s;
    td_store *store;
    int rank, size;
    struct doctor_node *nodes; /* `size` of them */
};

/** Meets the other nodes, and says what is wrong between them. */
void doctor_check_nodes(struct doctor_findings *findings, const struct td__run_options *options,
                        double timeout_s);

/* ---- Links ---------------------------------------------------------------------------------------- */

struct doctor_listener;

/** Serves the other nodes' connections at `address`, in threads; fills in identity and port of `node`. */
td_status doctor_listen(const char *address, struct doctor_node *node,
                        struct doctor_listener **listener);
void doctor_listener_close(struct doctor_listener *listener);

/** Connects to all other nodes that are present, several at a time; fills in the links of this node. */
void doctor_connect(struct doctor_job *job);

/** How long that takes at most. */
int64_t doctor_connect_ms(int nodes);

/* ---- Conclusions ---------------------------------------------------------------------------------- */

/** Compares all that the nodes have published. Node 0 prints all of it, the others what they take part in. */
void doctor_compare(struct doctor_findings *findings, const struct doctor_job *job);

#endif
