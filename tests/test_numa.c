/* Which CPUs workers get, on machines that are made of files in a temporary directory. */
#include "runner.h"

#include "launch/numa.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const char *root(void)
{
    return td_test_temp_dir();
}

/* Writes one of the kernel's small files, and makes the directories above it. */
static void describe(const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", root(), name);
    for (char *slash = strchr(path + strlen(root()) + 1, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0755);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    CHECK(file);
    fprintf(file, "%s\n", text);
    CHECK(!fclose(file));
}

static void describe_cpu(int cpu, const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "cpu/cpu%d/%s", cpu, name);
    describe(path, text);
}

static struct td__cpus cpus(const char *list)
{
    struct td__cpus set;
    CHECK(td__cpus_parse(list, &set));
    return set;
}

static void check_cpus(const struct td__cpus *set, const char *list)
{
    struct td__cpus expected = cpus(list);
    CHECK_MEM(set, &expected, sizeof expected);
}

TEST(lists_of_cpus)
{
    struct td__cpus set = cpus("0-2,7,64-65\n");
    CHECK_EQ(td__cpus_count(&set), 6);
    CHECK(td__cpus_has(&set, 7));
    CHECK(!td__cpus_has(&set, 8));
    CHECK(td__cpus_has(&set, 65));
    CHECK_EQ(td__cpus_count(&(struct td__cpus){0}), 0);
    set = cpus("");
    CHECK_EQ(td__cpus_count(&set), 0);

    const char *wrong[] = {"x", "1-", "3-1", "-1", "0,,x", "99999", "1;2"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(!td__cpus_parse(wrong[i], &set));
}

TEST(names_of_bindings)
{
    enum td__numa_binding binding;
    CHECK(td__numa_binding_parse("core-complex", &binding) && binding == TD__NUMA_CORE_COMPLEX);
    CHECK(td__numa_binding_parse("core_complex", &binding) && binding == TD__NUMA_CORE_COMPLEX);
    CHECK(td__numa_binding_parse("exclusive", &binding) && binding == TD__NUMA_EXCLUSIVE);
    CHECK(!td__numa_binding_parse("nodes", &binding));
}

TEST(by_node)
{
    struct td__cpus plan[4], allowed = cpus("0-15");
    describe("node/node0/cpulist", "0-7");
    describe("node/node1/cpulist", "8-15");
    describe("node/node2/cpulist", ""); /* memory only */
    CHECK_OK(td__numa_plan(root(), TD__NUMA_NODE, 4, &allowed, plan));
    check_cpus(&plan[0], "0-7");
    check_cpus(&plan[1], "0-7");
    check_cpus(&plan[2], "8-15");
    check_cpus(&plan[3], "8-15");
    CHECK_OK(td__numa_plan(root(), TD__NUMA_NODE, 1, &allowed, plan));
    check_cpus(&plan[0], "0-7");

    /* Only what this process may use counts. */
    allowed = cpus("6-9");
    CHECK_OK(td__numa_plan(root(), TD__NUMA_NODE, 2, &allowed, plan));
    check_cpus(&plan[0], "6-7");
    check_cpus(&plan[1], "8-9");
    allowed = cpus("12-13");
    CHECK_OK(td__numa_plan(root(), TD__NUMA_NODE, 2, &allowed, plan));
    check_cpus(&plan[0], "12-13");
    check_cpus(&plan[1], "12-13");
}

TEST(by_socket)
{
    struct td__cpus plan[3], allowed = cpus("0-5");
    const char *packages[] = {"36", "36", "7", "7", "36", "7"};
    for (int cpu = 0; cpu < 6; cpu++)
        describe_cpu(cpu, "topology/physical_package_id", packages[cpu]);
    CHECK_OK(td__numa_plan(root(), TD__NUMA_SOCKET, 2, &allowed, plan));
    check_cpus(&plan[0], "0,1,4");
    check_cpus(&plan[1], "2,3,5");
    CHECK_OK(td__numa_plan(root(), TD__NUMA_SOCKET, 3, &allowed, plan));
    check_cpus(&plan[0], "0,1,4");
    check_cpus(&plan[1], "0,1,4");
    check_cpus(&plan[2], "2,3,5");
}

TEST(by_core_complex)
{
    struct td__cpus plan[4], allowed = cpus("0-7");
    for (int cpu = 0; cpu < 8; cpu++)
        describe_cpu(cpu, "cache/index3/shared_cpu_list", cpu % 4 < 2 ? "0-1,4-5" : "2-3,6-7");
    CHECK_OK(td__numa_plan(root(), TD__NUMA_CORE_COMPLEX, 2, &allowed, plan));
    check_cpus(&plan[0], "0-1,4-5");
    check_cpus(&plan[1], "2-3,6-7");
}

TEST(exclusive_keeps_cores_together)
{
    struct td__cpus plan[4], allowed = cpus("0-15");
    describe("node/node0/cpulist", "0-3,8-11");
    describe("node/node1/cpulist", "4-7,12-15");
    for (int cpu = 0; cpu < 16; cpu++) {
        char siblings[16];
        snprintf(siblings, sizeof siblings, "%d,%d", cpu % 8, cpu % 8 + 8);
        describe_cpu(cpu, "topology/thread_siblings_list", siblings);
    }
    CHECK_OK(td__numa_plan(root(), TD__NUMA_EXCLUSIVE, 4, &allowed, plan));
    check_cpus(&plan[0], "0,1,8,9");
    check_cpus(&plan[1], "2,3,10,11");
    check_cpus(&plan[2], "4,5,12,13");
    check_cpus(&plan[3], "6,7,14,15");

    /* Three workers on two nodes: the first node's cores are divided by two. */
    CHECK_OK(td__numa_plan(root(), TD__NUMA_EXCLUSIVE, 3, &allowed, plan));
    check_cpus(&plan[0], "0,1,8,9");
    check_cpus(&plan[1], "2,3,10,11");
    check_cpus(&plan[2], "4-7,12-15");
}

TEST(exclusive_without_siblings)
{
    struct td__cpus plan[3], allowed = cpus("0-6");
    describe("node/node0/cpulist", "0-6");
    CHECK_OK(td__numa_plan(root(), TD__NUMA_EXCLUSIVE, 3, &allowed, plan));
    check_cpus(&plan[0], "0-1");
    check_cpus(&plan[1], "2-3");
    check_cpus(&plan[2], "4-6");
    allowed = cpus("0-1");
    CHECK_FAILS(td__numa_plan(root(), TD__NUMA_EXCLUSIVE, 3, &allowed, plan), TD_ERR_UNSUPPORTED,
                "2 cores cannot be divided among 3 workers");
}

TEST(machine_without_description)
{
    struct td__cpus plan[1], allowed = cpus("0-3");
    CHECK_FAILS(td__numa_plan(root(), TD__NUMA_NODE, 1, &allowed, plan), TD_ERR_UNSUPPORTED,
                "NUMA node");
    CHECK_FAILS(td__numa_plan(root(), TD__NUMA_SOCKET, 1, &allowed, plan), TD_ERR_UNSUPPORTED,
                "socket");
    CHECK_FAILS(td__numa_plan(root(), TD__NUMA_CORE_COMPLEX, 1, &allowed, plan), TD_ERR_UNSUPPORTED,
                "core complex");
    describe("node/node0/cpulist", "4-7"); /* none of those that may be used */
    CHECK_FAILS(td__numa_plan(root(), TD__NUMA_EXCLUSIVE, 1, &allowed, plan), TD_ERR_UNSUPPORTED,
                "NUMA node");
}
