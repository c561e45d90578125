/* What the nodes of a job do not agree on, and which of them do not reach each other. Every node has the same records
 * and comes to the same conclusions. Node 0 prints all of them; the others count all, and print those that name
 * them, so that the output of `srun tdrun doctor` has few lines twice. */
#include "doctor_internal.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_LINES = 32, /* of one kind */
    LIST = 200,
    CLOCK_MS = 1000, /* what clocks may differ by */
};

struct conclusions {
    struct doctor_findings *findings;
    const struct doctor_job *job;
    int hidden; /* failures that only node 0 prints */
};

static bool concerns(const struct conclusions *all, int a, int b)
{
    int rank = all->job->rank;
    return !rank || rank == a || rank == b;
}

static const char *name_of(const struct conclusions *all, int rank, char text[LIST])
{
    snprintf(text, LIST, "node %d (%.100s)", rank, all->job->nodes[rank].host);
    return text;
}

static void add_to_list(char list[LIST], int rank)
{
    if (strlen(list) + 16 < LIST)
        td__text_add(list, LIST, "%s%d", *list ? ", " : "", rank);
    else if (!strstr(list, "…"))
        td__text_add(list, LIST, ", …");
}

/* ---- Who has come ----------------------------------------------------------------------------------- */

static void compare_presence(struct conclusions *all)
{
    const struct doctor_job *job = all->job;
    char missing[LIST] = "", silent[LIST] = "", other[LIST] = "";
    int absent = 0;
    for (int r = 0; r < job->size; r++) {
        const struct doctor_node *node = &job->nodes[r];
        if (!node->present) {
            add_to_list(missing, r);
            absent++;
        } else if (!node->readable) {
            add_to_list(other, r);
        } else if (!node->reported) {
            add_to_list(silent, r);
        }
    }
    if (absent)
        doctor_report_job(all->findings, DOCTOR_FAIL, "nodes",
                          "node%s %s of %d %s not come within %g s: tdrun doctor was not started "
                          "there, or cannot reach %s, port %d, which it says there",
                          absent == 1 ? "" : "s", missing, job->size, absent == 1 ? "has" : "have",
                          job->timeout_s, job->options->host, job->options->port);
    else if (!job->rank)
        doctor_report_job(all->findings, DOCTOR_OK, "nodes", "all %d have come", job->size);
    if (*other)
        doctor_report_job(all->findings, DOCTOR_FAIL, "nodes",
                          "of nodes %s: another version of tdrun; install the same one everywhere",
                          other);
    if (*silent)
        doctor_report_job(all->findings, DOCTOR_FAIL, "nodes",
                          "of nodes %s: they came, and were gone before they could say how their "
                          "connections went",
                          silent);
}

/* What went wrong on the machines of other nodes. */
static void repeat_failures(struct conclusions *all)
{
    const struct doctor_job *job = all->job;
    for (int r = 0; r < job->size; r++) {
        const struct doctor_node *node = &job->nodes[r];
        if (r == job->rank || !node->present)
            continue;
        for (int i = 0; i < node->failed_count; i++) {
            if (!job->rank)
                doctor_report_job(all->findings, DOCTOR_FAIL, "machine", "%s", node->failed[i]);
            else
                all->hidden++;
        }
    }
}

/* ---- Links ------------------------------------------------------------------------------------------ */

/* NULL where it was not tried, or one of the two was gone before the end: that is said of the node. */
static const struct doctor_link *link_of(const struct conclusions *all, int from, int to)
{
    const struct doctor_node *node = &all->job->nodes[from], *there = &all->job->nodes[to];
    bool known = node->present && node->reported && there->present && there->reported;
    return known && node->links[to].state != DOCTOR_UNTRIED ? &node->links[to] : NULL;
}

/* Names both ends, and the direction that fails. */
static void report_broken_link(struct conclusions *all, int from, int to)
{
    char a[LIST], b[LIST];
    const struct doctor_node *there = &all->job->nodes[to];
    const struct doctor_link *link = link_of(all, from, to), *back = link_of(all, to, from);
    bool one_way = back && back->state == DOCTOR_WORKS;
    name_of(all, from, a);
    name_of(all, to, b);
    doctor_report_job(all->findings, DOCTOR_FAIL, "network", "from %s to %s at %s, port %d: %s; %s",
                      a, b, there->address, there->port, link->reason ? link->reason : "it failed",
                      one_way ? "the other direction works"
                      : back  ? "the other direction fails, too"
                              : "the other direction was not tried");
}

static void compare_links(struct conclusions *all)
{
    const struct doctor_job *job = all->job;
    int works = 0, broken = 0, printed = 0;
    int64_t slowest = 0;
    for (int from = 0; from < job->size; from++) {
        for (int to = 0; to < job->size; to++) {
            const struct doctor_link *link = link_of(all, from, to);
            if (!link)
                continue;
            if (link->state == DOCTOR_WORKS) {
                works++;
                slowest = link->round_trip_ns > slowest ? link->round_trip_ns : slowest;
                continue;
            }
            broken++;
            if (!concerns(all, from, to))
                all->hidden++;
            else if (printed++ < MOST_LINES)
                report_broken_link(all, from, to);
        }
    }
    if (printed > MOST_LINES)
        doctor_report_job(all->findings, DOCTOR_FAIL, "network", "and %d more connections",
                          printed - MOST_LINES);
    if (!broken && works && !job->rank)
        doctor_report_job(all->findings, DOCTOR_OK, "network",
                          "each node connects to each other one, at most %.3g ms for a round trip",
                          (double)slowest / 1e6);
}

/* ---- Clocks ----------------------------------------------------------------------------------------- */

/* What the clock of a node is ahead of node 0's by; false where no connection has told. */
static bool clock_of(const struct conclusions *all, int rank, int64_t *ahead)
{
    const struct doctor_link *there = link_of(all, rank, 0), *here = link_of(all, 0, rank);
    if (there && there->state == DOCTOR_WORKS)
        *ahead = -there->clock_ns;
    else if (here && here->state == DOCTOR_WORKS)
        *ahead = here->clock_ns;
    else
        return false;
    return true;
}

static void compare_clocks(struct conclusions *all)
{
    char name[LIST];
    int64_t worst = 0, ahead;
    int known = 0, printed = 0;
    for (int r = 1; r < all->job->size; r++) {
        if (!clock_of(all, r, &ahead))
            continue;
        known++;
        worst = llabs(ahead) > worst ? llabs(ahead) : worst;
        if (llabs(ahead) <= CLOCK_MS * (int64_t)1000000 || !concerns(all, r, r))
            continue;
        if (printed++ < MOST_LINES)
            doctor_report_job(all->findings, DOCTOR_NOTE, "clocks",
                              "that of %s is %.3f s %s node 0's: times in logs cannot be compared; "
                              "does NTP run there?",
                              name_of(all, r, name), (double)llabs(ahead) / 1e9,
                              ahead > 0 ? "ahead of" : "behind");
    }
    if (known && !printed && !all->job->rank)
        doctor_report_job(all->findings, DOCTOR_OK, "clocks", "they differ by %.3g ms at most",
                          (double)worst / 1e6);
}

/* ---- Facts ------------------------------------------------------------------------------------------ */

/* What is compared, and what a difference means. Others that begin with "device " or "plug-in " are noted. */
static const struct rule {
    const char *name;
    enum doctor_verdict verdict;
    const char *consequence;
} rules[] = {
    {"version", DOCTOR_FAIL, "install the same version on every node"},
    {"--nnodes", DOCTOR_FAIL, "it must be the same on all nodes"},
    {"TANDEM_TLS", DOCTOR_FAIL, "it must be the same on all nodes"},
    {"TANDEM_HEARTBEAT", DOCTOR_NOTE, "losses are detected at different times"},
    {"TANDEM_TRANSPORT", DOCTOR_NOTE, "it should be the same on all nodes"},
    {"TANDEM_SIMD", DOCTOR_NOTE, "results may differ in their last bits"},
    {"machine", DOCTOR_NOTE, "results may differ in their last bits"},
    {"NCCL", DOCTOR_FAIL, "NCCL refuses to connect different versions"},
    {"MTU", DOCTOR_NOTE, "packets of the larger one may be lost"},
};

static struct rule rule_of(const char *name)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (!strcmp(rules[i].name, name))
            return rules[i];
    struct rule other = {name, DOCTOR_OK, ""};
    if (!strncmp(name, "device ", 7))
        other = (struct rule){name, DOCTOR_NOTE, "ranks may have different devices"};
    if (!strncmp(name, "plug-in ", 8))
        other = (struct rule){name, DOCTOR_NOTE, "what needs it fails where it is missing"};
    return other;
}

static const char *fact_of(const struct doctor_node *node, const char *name)
{
    for (int i = 0; i < node->fact_count; i++)
        if (!strcmp(node->facts[i].name, name))
            return node->facts[i].value;
    return "none";
}

/* Nodes whose value is that of node `like`; false where that is every node. */
static bool list_alike(const struct conclusions *all, const char *name, int like, char list[LIST])
{
    const struct doctor_job *job = all->job;
    const char *value = fact_of(&job->nodes[like], name);
    bool differs = false;
    *list = '\0';
    for (int r = 0; r < job->size; r++) {
        if (!job->nodes[r].present || !job->nodes[r].readable)
            continue;
        if (!strcmp(fact_of(&job->nodes[r], name), value))
            add_to_list(list, r);
        else
            differs = true;
    }
    return differs;
}

/* The first node that has another value than node `like`, or -1. */
static int first_other(const struct conclusions *all, const char *name, int like)
{
    const struct doctor_job *job = all->job;
    for (int r = 0; r < job->size; r++)
        if (job->nodes[r].present && job->nodes[r].readable &&
            strcmp(fact_of(&job->nodes[r], name), fact_of(&job->nodes[like], name)) != 0)
            return r;
    return -1;
}

static void compare_fact(struct conclusions *all, const char *name)
{
    struct rule rule = rule_of(name);
    char these[LIST], those[LIST];
    int rank = all->job->rank;
    if (rule.verdict == DOCTOR_OK || !list_alike(all, name, 0, these))
        return;
    bool as_first = !strcmp(fact_of(&all->job->nodes[rank], name),
                            fact_of(&all->job->nodes[0], name));
    int other = as_first ? first_other(all, name, 0) : rank;
    if (rank && as_first) {
        all->hidden += rule.verdict == DOCTOR_FAIL;
        return;
    }
    list_alike(all, name, other, those);
    doctor_report_job(all->findings, rule.verdict, "differs",
                      "%s: \"%s\" on nodes %s, but \"%s\" on nodes %s: %s", name,
                      fact_of(&all->job->nodes[0], name), these,
                      fact_of(&all->job->nodes[other], name), those, rule.consequence);
}

/* Each name once, whichever node has it. */
static void compare_facts(struct conclusions *all)
{
    const struct doctor_job *job = all->job;
    for (int r = 0; r < job->size; r++) {
        const struct doctor_node *node = &job->nodes[r];
        for (int i = 0; i < node->fact_count; i++) {
            bool seen = false;
            for (int before = 0; before < r && !seen; before++)
                seen = strcmp(fact_of(&job->nodes[before], node->facts[i].name), "none") != 0;
            if (!seen)
                compare_fact(all, node->facts[i].name);
        }
    }
}

/* Nodes of one machine that do not share memory, such as two containers. */
static void compare_places(struct conclusions *all)
{
    const struct doctor_job *job = all->job;
    for (int r = 1; !job->rank && r < job->size; r++) {
        const struct doctor_node *node = &job->nodes[r];
        for (int before = 0; before < r; before++) {
            const struct doctor_node *other = &job->nodes[before];
            if (!node->readable || !other->readable ||
                strcmp(fact_of(node, "boot"), fact_of(other, "boot")) != 0 ||
                !strcmp(fact_of(node, "network"), fact_of(other, "network")))
                continue;
            doctor_report_job(all->findings, DOCTOR_NOTE, "places",
                              "nodes %d and %d are containers of one machine: their ranks use TCP, "
                              "unless the containers share a network namespace",
                              before, r);
            return;
        }
    }
}

void doctor_compare(struct doctor_findings *findings, const struct doctor_job *job)
{
    struct conclusions all = {.findings = findings, .job = job};
    compare_presence(&all);
    repeat_failures(&all);
    compare_links(&all);
    compare_clocks(&all);
    compare_facts(&all);
    compare_places(&all);
    if (!all.hidden)
        return;
    findings->broken += all.hidden;
    doctor_report_job(findings, DOCTOR_NOTE, "nodes", "node 0 prints %d more that fail%s",
                      all.hidden, all.hidden == 1 ? "s" : "");
}
