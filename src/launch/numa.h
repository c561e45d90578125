/* Which CPUs a worker may run on, by how the machine is built.
 *
 *     node          worker i of n gets all CPUs of NUMA node i * nodes / n
 *     socket        likewise, of a processor package
 *     core-complex  likewise, of a group of cores that share a level 3 cache
 *     exclusive     the CPUs of the worker's NUMA node, divided evenly by physical cores among the
 *                   workers of that node: no CPU is given to two workers
 *
 * CPUs that this process may not use itself do not count. */
#ifndef TD_LAUNCH_NUMA_H
#define TD_LAUNCH_NUMA_H

#include <tandem/base.h>

#include <sys/types.h>

enum td__numa_binding {
    TD__NUMA_NONE,
    TD__NUMA_NODE,
    TD__NUMA_SOCKET,
    TD__NUMA_EXCLUSIVE,
    TD__NUMA_CORE_COMPLEX,
};

enum { TD__MAX_CPUS = 8192 };

/** A set of CPUs, laid out as sched_setaffinity() takes it. */
struct td__cpus {
    unsigned long bits[TD__MAX_CPUS / (8 * sizeof(unsigned long))];
};

bool td__cpus_has(const struct td__cpus *cpus, int cpu);
void td__cpus_add(struct td__cpus *cpus, int cpu);
int td__cpus_count(const struct td__cpus *cpus);

/** Reads a list as the kernel writes it: "0-3,8,10-11". False when it is something else. */
bool td__cpus_parse(const char *text, struct td__cpus *cpus);

/** The CPUs that this process may use. */
td_status td__cpus_allowed(struct td__cpus *cpus);

/** Has all threads of a process run on these CPUs from now on, as far as the system permits it. */
void td__cpus_bind(pid_t pid, const struct td__cpus *cpus);

/** "node", "socket", "exclusive" or "core-complex" (or with an underscore). */
bool td__numa_binding_parse(const char *text, enum td__numa_binding *binding);

/**
 * Chooses the CPUs of `count` workers into cpus[0 … count-1]. `root` is where the machine is
 * described, "/sys/devices/system" unless in a test; `allowed` are the CPUs to choose from.
 *
 * TD_ERR_UNSUPPORTED: the machine is not described there, or has too few cores for `exclusive`.
 */
td_status td__numa_plan(const char *root, enum td__numa_binding binding, int count,
                        const struct td__cpus *allowed, struct td__cpus *cpus);

#endif
