/* Binding workers to CPUs; see numa.h.
 *
 * Two steps. First the allowed CPUs are divided into domains, the lists that the kernel gives for
 * each kind of binding:
 *
 *     node           node/node<k>/cpulist
 *     socket         cpu/cpu<k>/topology/physical_package_id
 *     core-complex   cpu/cpu<k>/cache/index3/shared_cpu_list
 *
 * numbered from 0; then each worker gets a domain, or its share of one. */
#include "launch/numa.h"

#include "base/fail.h"
#include "base/number.h"
#include "base/text.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BITS = 8 * sizeof(unsigned long), LIST_ROOM = 4096, PATH_ROOM = 4200, MAX_NODES = 1024 };

/* For each CPU the number of its domain, -1 where it has none. */
struct domains {
    int count;
    int of[TD__MAX_CPUS];
    int package[TD__MAX_CPUS]; /* of each domain that is one */
};

/* ---- Sets of CPUs ---------------------------------------------------------------------------- */

bool td__cpus_has(const struct td__cpus *cpus, int cpu)
{
    return cpus->bits[(size_t)cpu / BITS] >> ((size_t)cpu % BITS) & 1;
}

void td__cpus_add(struct td__cpus *cpus, int cpu)
{
    cpus->bits[(size_t)cpu / BITS] |= 1ul << ((size_t)cpu % BITS);
}

int td__cpus_count(const struct td__cpus *cpus)
{
    int count = 0;
    for (size_t i = 0; i < sizeof cpus->bits / sizeof *cpus->bits; i++)
        count += __builtin_popcountl(cpus->bits[i]);
    return count;
}

bool td__cpus_parse(const char *text, struct td__cpus *cpus)
{
    memset(cpus, 0, sizeof *cpus);
    while (*text && *text != '\n') {
        char *end;
        long first = strtol(text, &end, 10), last = first;
        if (end == text)
            return false;
        if (*end == '-') {
            text = end + 1;
            last = strtol(text, &end, 10);
            if (end == text)
                return false;
        }
        if (first < 0 || last < first || last >= TD__MAX_CPUS)
            return false;
        for (long cpu = first; cpu <= last; cpu++)
            td__cpus_add(cpus, (int)cpu);
        if (*end && *end != ',' && *end != '\n')
            return false;
        text = end + (*end == ',');
    }
    return true;
}

void td__cpus_bind(pid_t pid, const struct td__cpus *cpus)
{
    char path[64];
    struct dirent *entry;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *tasks = opendir(path);
    while (tasks && (entry = readdir(tasks))) {
        int task;
        if (td__parse_int(entry->d_name, 1, INT_MAX, &task))
            sched_setaffinity(task, sizeof cpus->bits, (const cpu_set_t *)cpus->bits);
    }
    if (tasks)
        closedir(tasks);
}

td_status td__cpus_allowed(struct td__cpus *cpus)
{
    memset(cpus, 0, sizeof *cpus);
    if (sched_getaffinity(0, sizeof cpus->bits, (cpu_set_t *)cpus->bits))
        return td_fail(TD_ERR_SYSTEM, "cannot find out which CPUs may be used: %s",
                       td__errno_text(errno));
    return TD_OK;
}

/* ---- What the machine says ------------------------------------------------------------------- */

static bool read_list(const char *path, struct td__cpus *cpus)
{
    char text[LIST_ROOM];
    return td__text_read(path, text, sizeof text) && td__cpus_parse(text, cpus);
}

/* Makes a domain of those of `members` that are allowed and in none yet. */
static void add_domain(struct domains *domains, const struct td__cpus *members,
                       const struct td__cpus *allowed)
{
    bool any = false;
    for (int cpu = 0; cpu < TD__MAX_CPUS; cpu++) {
        if (domains->of[cpu] < 0 && td__cpus_has(members, cpu) && td__cpus_has(allowed, cpu)) {
            domains->of[cpu] = domains->count;
            any = true;
        }
    }
    domains->count += any;
}

static void read_nodes(const char *root, const struct td__cpus *allowed, struct domains *domains)
{
    for (int node = 0; node < MAX_NODES; node++) {
        char path[PATH_ROOM];
        struct td__cpus members;
        snprintf(path, sizeof path, "%s/node/node%d/cpulist", root, node);
        if (read_list(path, &members))
            add_domain(domains, &members, allowed);
    }
}

/* The lists that CPUs have below cpu/cpu<k>. With `alone`, a CPU without one is a domain by itself. */
static void read_cpu_lists(const char *root, const char *file, bool alone,
                           const struct td__cpus *allowed, struct domains *domains)
{
    for (int cpu = 0; cpu < TD__MAX_CPUS; cpu++) {
        char path[PATH_ROOM];
        struct td__cpus members;
        if (!td__cpus_has(allowed, cpu) || domains->of[cpu] >= 0)
            continue;
        snprintf(path, sizeof path, "%s/cpu/cpu%d/%s", root, cpu, file);
        bool listed = read_list(path, &members);
        if (!listed)
            members = (struct td__cpus){0};
        if (alone)
            td__cpus_add(&members, cpu);
        if (listed || alone)
            add_domain(domains, &members, allowed);
    }
}

/* Packages have arbitrary numbers: a package's domain is that of an earlier CPU with its number. */
static void read_packages(const char *root, const struct td__cpus *allowed, struct domains *domains)
{
    for (int cpu = 0; cpu < TD__MAX_CPUS; cpu++) {
        char path[PATH_ROOM], text[LIST_ROOM];
        int package, domain = 0;
        if (!td__cpus_has(allowed, cpu))
            continue;
        snprintf(path, sizeof path, "%s/cpu/cpu%d/topology/physical_package_id", root, cpu);
        if (!td__text_read(path, text, sizeof text) || !td__parse_int(text, -1, INT_MAX, &package))
            continue;
        while (domain < domains->count && domains->package[domain] != package)
            domain++;
        if (domain == domains->count)
            domains->package[domains->count++] = package;
        domains->of[cpu] = domain;
    }
}

/* ---- The workers' shares --------------------------------------------------------------------- */

static struct domains *new_domains(void)
{
    struct domains *domains = malloc(sizeof *domains);
    if (!domains)
        return NULL;
    domains->count = 0;
    for (int cpu = 0; cpu < TD__MAX_CPUS; cpu++)
        domains->of[cpu] = -1;
    return domains;
}

static struct td__cpus range_of(const struct domains *domains, int begin, int end)
{
    struct td__cpus cpus = {0};
    for (int cpu = 0; cpu < TD__MAX_CPUS; cpu++)
        if (domains->of[cpu] >= begin && domains->of[cpu] < end)
            td__cpus_add(&cpus, cpu);
    return cpus;
}

/* Divides the cores of `cpus[0]` among the `count` workers that have it all. */
static td_status divide(const char *root, int count, struct td__cpus *cpus)
{
    struct domains *cores = new_domains();
    if (!cores)
        return td__fail_nomem("binding to CPUs");
    read_cpu_lists(root, "topology/thread_siblings_list", true, &cpus[0], cores);
    td_status status = TD_OK;
    if (cores->count < count)
        status = td_fail(TD_ERR_UNSUPPORTED,
                         "exclusive binding: a NUMA node with %d cores cannot be divided among %d "
                         "workers; start at most one worker for each core",
                         cores->count, count);
    for (int i = 0; i < count && !status; i++)
        cpus[i] = range_of(cores, cores->count * i / count, cores->count * (i + 1) / count);
    free(cores);
    return status;
}

static td_status read_domains(const char *root, enum td__numa_binding binding,
                              const struct td__cpus *allowed, struct domains *domains)
{
    const char *kind = "NUMA node";
    if (binding == TD__NUMA_SOCKET) {
        kind = "socket";
        read_packages(root, allowed, domains);
    } else if (binding == TD__NUMA_CORE_COMPLEX) {
        kind = "core complex (level 3 cache)";
        read_cpu_lists(root, "cache/index3/shared_cpu_list", false, allowed, domains);
    } else {
        read_nodes(root, allowed, domains);
    }
    return domains->count
               ? TD_OK
               : td_fail(TD_ERR_UNSUPPORTED,
                         "binding to CPUs: %s describes no %s with a CPU that may be used", root,
                         kind);
}

td_status td__numa_plan(const char *root, enum td__numa_binding binding, int count,
                        const struct td__cpus *allowed, struct td__cpus *cpus)
{
    struct domains *domains = new_domains();
    if (!domains)
        return td__fail_nomem("binding to CPUs");
    td_status status = read_domains(root, binding, allowed, domains);
    for (int first = 0, next; first < count && !status; first = next) {
        int domain = (int)((int64_t)first * domains->count / count);
        struct td__cpus all = range_of(domains, domain, domain + 1);
        for (next = first; next < count && (int64_t)next * domains->count / count == domain; next++)
            cpus[next] = all;
        if (binding == TD__NUMA_EXCLUSIVE)
            status = divide(root, next - first, cpus + first);
    }
    free(domains);
    return status;
}

bool td__numa_binding_parse(const char *text, enum td__numa_binding *binding)
{
    static const char *const names[] = {
        [TD__NUMA_NODE] = "node",
        [TD__NUMA_SOCKET] = "socket",
        [TD__NUMA_EXCLUSIVE] = "exclusive",
        [TD__NUMA_CORE_COMPLEX] = "core-complex",
    };
    if (!strcmp(text, "core_complex"))
        text = "core-complex";
    for (int i = TD__NUMA_NODE; i <= TD__NUMA_CORE_COMPLEX; i++)
        if (!strcmp(text, names[i])) {
            *binding = (enum td__numa_binding)i;
            return true;
        }
    return false;
}
