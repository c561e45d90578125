/* Rendezvous as one process sees it: URLs, options, variables, what is detected, and registered schemes. Worlds
 * of several processes are in test_rendezvous_worlds.c, their failures in test_rendezvous_trouble.c. */
#include "forks.h"
#include "runner.h"

#include <tandem/rendezvous.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* It must fail and leave the world as it was. */
static td_status attempt(const char *url, const td_rendezvous_options *options)
{
    td_world world, before;
    memset(&world, 0x5a, sizeof world);
    memcpy(&before, &world, sizeof world);
    td_status status = td_rendezvous(url, options, &world);
    if (!status)
        FAIL("a rendezvous with \"%s\" succeeded", url ? url : "(NULL)");
    CHECK_MEM(&world, &before, sizeof world);
    return status;
}

/* The whole message is known. */
static void expect_message(const char *url, const td_rendezvous_options *options,
                           const char *message)
{
    CHECK_EQ(attempt(url, options), TD_ERR_INVALID);
    CHECK_STR(td_last_error(), message);
}

static void expect_part(const char *url, const td_rendezvous_options *options, const char *part)
{
    CHECK_FAILS(attempt(url, options), TD_ERR_INVALID, part);
}

/* A world of one, with a store that works. */
static void expect_alone(const char *url, const td_rendezvous_options *options)
{
    td_world world;
    int64_t sum;
    CHECK_OK(td_rendezvous(url, options, &world));
    CHECK_EQ(world.rank, 0);
    CHECK_EQ(world.world_size, 1);
    CHECK_OK(td_store_num_keys(world.store, &sum));
    CHECK_EQ(sum, 0);
    CHECK_OK(td_store_add(world.store, "key", 7, &sum));
    CHECK_EQ(sum, 7);
    CHECK_OK(td_world_close(&world));
    CHECK(world.store == NULL);
    CHECK_EQ(world.rank, -1);
    CHECK_OK(td_world_close(&world)); /* once more is harmless */
}

static void set_whole_environment(void)
{
    VARIABLES("RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=0");
}

/* ---- env:// ---------------------------------------------------------------------------------- */

#define NOT_SET(name, meaning)                                                                     \
    "env://: the variable " name " is not set; it says " meaning " (tdrun sets it for its workers)"

static const struct {
    const char *name, *message;
} needed[] = {
    {"RANK", NOT_SET("RANK", "which of the processes this is, counted from 0")},
    {"WORLD_SIZE", NOT_SET("WORLD_SIZE", "how many processes there are")},
    {"MASTER_ADDR", NOT_SET("MASTER_ADDR", "on which host rank 0 is")},
    {"MASTER_PORT", NOT_SET("MASTER_PORT", "at which port of MASTER_ADDR the store is")},
};

TEST(env_names_a_missing_variable)
{
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        set_whole_environment(); /* a world of one needs them all, too */
        unsetenv(needed[i].name);
        expect_message("env://", NULL, needed[i].message);
        setenv(needed[i].name, "", 1); /* empty is as good as missing */
        expect_message("env://", NULL, needed[i].message);
    }
    VARIABLES("RANK=", "WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=");
    expect_message("env://", NULL, needed[0].message);
    set_whole_environment();
    expect_alone("env://", NULL);
    expect_alone(NULL, NULL);
}

TEST(env_takes_the_options_first)
{
    set_whole_environment();
    VARIABLES("RANK=5", "WORLD_SIZE=9");
    expect_alone("env://", &(td_rendezvous_options){.world_size = 1});
    VARIABLES("RANK=", "WORLD_SIZE=");
    expect_alone("env://", &(td_rendezvous_options){.world_size = 1});
    expect_alone("env://?rank=0&world_size=1", NULL);
    VARIABLES("WORLD_SIZE=1"); /* the rank alone in the URL */
    expect_alone("env://?rank=0", NULL);
}

TEST(env_refuses_malformed_numbers)
{
    static const char *const no_rank[] = {"x",
                                          "1x",
                                          " 1",
                                          "1 ",
                                          "0x1",
                                          "-1",
                                          "1.0",
                                          "--1",
                                          "-",
                                          "99999999999",
                                          "99999999999999999999"};
    static const char *const no_size[] = {"two", "0", "-1", "1e3", "2147483648"};
    char message[200];
    set_whole_environment();
    for (size_t i = 0; i < sizeof no_rank / sizeof *no_rank; i++) {
        setenv("RANK", no_rank[i], 1);
        snprintf(message, sizeof message,
                 "the variable RANK is \"%s\"; it must be a number of at least 0", no_rank[i]);
        expect_message("env://", NULL, message);
    }
    setenv("RANK", "0", 1);
    for (size_t i = 0; i < sizeof no_size / sizeof *no_size; i++) {
        setenv("WORLD_SIZE", no_size[i], 1);
        snprintf(message, sizeof message,
                 "the variable WORLD_SIZE is \"%s\"; it must be a number of at least 1",
                 no_size[i]);
        expect_message("env://", NULL, message);
    }
    setenv("WORLD_SIZE", "1", 1);
    VARIABLES("LOCAL_RANK=first");
    expect_part("env://", NULL, "the variable LOCAL_RANK is \"first\"");
    VARIABLES("LOCAL_RANK=0", "LOCAL_WORLD_SIZE=0");
    expect_part("env://", NULL, "the variable LOCAL_WORLD_SIZE is \"0\"");
    VARIABLES("LOCAL_WORLD_SIZE=1", "TORCHELASTIC_RESTART_COUNT=-2");
    expect_part("env://", NULL, "the variable TORCHELASTIC_RESTART_COUNT is \"-2\"");
}

TEST(env_refuses_ports_and_ranks_out_of_range)
{
    set_whole_environment();
    VARIABLES("MASTER_PORT=70000");
    expect_message("env://", NULL, "env://: MASTER_PORT is 70000, which is outside 0 to 65535");
    VARIABLES("MASTER_PORT=-1");
    expect_message("env://", NULL, "env://: MASTER_PORT is -1, which is outside 0 to 65535");
    VARIABLES("MASTER_PORT=65536");
    expect_part("env://", NULL, "MASTER_PORT is 65536, which is outside 0 to 65535");
    static const char *const malformed[] = {"http", "29500 ", "0x50", "99999999999"};
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        setenv("MASTER_PORT", malformed[i], 1);
        expect_part("env://", NULL, "MASTER_PORT is \"");
        CHECK_CONTAINS(td_last_error(), malformed[i]);
        CHECK(!strstr(td_last_error(), "-2147483648")); /* no hint for a person */
    }
    VARIABLES("MASTER_PORT=29500", "RANK=2", "WORLD_SIZE=2");
    expect_message("env://", NULL, "env://: rank 2 is outside 0 to 1, the ranks of a world of 2");
    VARIABLES("RANK=1", "WORLD_SIZE=1");
    expect_message("env://", NULL, "env://: rank 1 is outside 0 to 0, the ranks of a world of 1");
    VARIABLES("RANK=0", "WORLD_SIZE=2", "MASTER_PORT=0");
    expect_message(
        "env://", NULL,
        "rendezvous at 127.0.0.1:0: port 0 means any free port, and the other ranks could "
        "not know which; give a port");
}

TEST(env_refuses_what_no_launcher_sets)
{
    set_whole_environment();
    VARIABLES("TANDEM_REJOIN=maybe");
    expect_part("env://", NULL, "the variable TANDEM_REJOIN is \"maybe\"; it is 1 where");
    VARIABLES("TANDEM_REJOIN=0");
    static const char *const places[] = {"xx", ":29500", "here:", "here:0", "here:65536"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        setenv("TANDEM_AGENT_STORE", places[i], 1);
        expect_part("env://", NULL, "the variable TANDEM_AGENT_STORE is \"");
        CHECK_CONTAINS(td_last_error(), places[i]);
    }
    VARIABLES("TANDEM_AGENT_STORE=elsewhere:29500"); /* that of another job is ignored */
    expect_alone("env://", NULL);
}

TEST(env_hands_on_the_local_rank)
{
    td_world world;
    set_whole_environment();
    CHECK_OK(td_rendezvous("env://", NULL, &world));
    CHECK_EQ(world.local_rank, -1);
    CHECK_EQ(world.local_world_size, -1);
    CHECK_OK(td_world_close(&world));
    VARIABLES("LOCAL_RANK=3", "LOCAL_WORLD_SIZE=4");
    CHECK_OK(td_rendezvous("env://", NULL, &world));
    CHECK_EQ(world.local_rank, 3);
    CHECK_EQ(world.local_world_size, 4);
    CHECK_OK(td_world_close(&world));
}

/* ---- URLs and options ------------------------------------------------------------------------ */

#define NO_SCHEME "it must begin with a scheme, such as env://, tcp://host:port or file:///path"

TEST(a_url_needs_a_known_scheme)
{
    expect_message("zeus://olymp", NULL,
                   "rendezvous URL \"zeus://olymp\": there is no scheme zeus://; known are env://, "
                   "tcp://, file://, slurm://, mpi://");
    expect_message("127.0.0.1:29500", NULL, "rendezvous URL \"127.0.0.1:29500\": " NO_SCHEME);
    static const char *const schemeless[] = {
        "",         "://",       "tcp",        "tcp:",
        "tcp:/h:1", "1tcp://h",  " tcp://h:1", "t cp://h",
        "+tcp://h", "/tmp/file", "tcp;://h:1", "a23456789012345678901234567890123://h"};
    for (size_t i = 0; i < sizeof schemeless / sizeof *schemeless; i++)
        expect_part(schemeless[i], NULL, NO_SCHEME);
    expect_alone("TCP://127.0.0.1:0?rank=0&world_size=1", NULL); /* a scheme has no case */
}

TEST(tcp_needs_a_host_and_a_port)
{
    td_rendezvous_options one = {.world_size = 1};
    const char *no_port = "tcp://: the port is missing; it is written tcp://host:port";
    const char *no_host = "tcp://: the host is missing; it is written tcp://host:port";
    expect_message("tcp://127.0.0.1", &one, no_port);
    expect_message("tcp://127.0.0.1/", &one, no_port);
    expect_message("tcp://[::1]", &one, no_port);
    expect_message("tcp://:29500", &one, no_host);
    expect_message("tcp://", &one, no_host);
    expect_message("tcp:///path", &one, no_host);
    expect_message("tcp://127.0.0.1:0/path", &one,
                   "tcp://127.0.0.1:0: it takes no path, but \"/path\" follows");
    expect_message("tcp://127.0.0.1:70000", &one,
                   "rendezvous URL \"tcp://127.0.0.1:70000\": port 70000 is outside 0 to 65535");
    expect_message("tcp://127.0.0.1:-1", &one,
                   "rendezvous URL \"tcp://127.0.0.1:-1\": port -1 is outside 0 to 65535");
    expect_part("tcp://127.0.0.1:", &one, "its port must be a number from 0 to 65535");
    expect_part("tcp://127.0.0.1:http", &one, "its port must be a number from 0 to 65535");
    expect_part("tcp://::1:29500", &one, "its port must be a number from 0 to 65535");
    expect_part("tcp://[::1:29500", &one, "an IPv6 address stands in brackets");
    expect_part("tcp://[::1]29500", &one, "an IPv6 address stands in brackets");
    expect_part("tcp://[]:29500", &one, "there is no address in its brackets");
    expect_alone("tcp://127.0.0.1:0", &one);
    expect_alone("tcp://127.0.0.1:0/", &one);
    expect_alone("tcp://[::1]:0", &one);
    expect_alone("tcp://localhost:0", &one);
}

TEST(tcp_needs_a_rank_and_a_world_size)
{
    const char *plain = "tcp://127.0.0.1:29500";
    expect_message(
        plain, NULL,
        "tcp://: the rank is missing; give it in the options or as ?rank=…&world_size=…");
    expect_message("tcp://127.0.0.1:29500?rank=0", NULL,
                   "tcp://: the world size is missing; give it in the options or as "
                   "?rank=…&world_size=…");
    expect_part("tcp://127.0.0.1:29500?world_size=2", NULL, "tcp://: the rank is missing");
    expect_part(plain, &(td_rendezvous_options){.rank = 1}, "tcp://: the world size is missing");
    expect_message(plain, &(td_rendezvous_options){.rank = 2, .world_size = 2},
                   "tcp://: rank 2 is outside 0 to 1, the ranks of a world of 2");
    expect_part("tcp://127.0.0.1:29500?rank=7&world_size=7", NULL,
                "tcp://: rank 7 is outside 0 to 6, the ranks of a world of 7");
    expect_message(
        "tcp://127.0.0.1:0?rank=0&world_size=2", NULL,
        "rendezvous at 127.0.0.1:0: port 0 means any free port, and the other ranks could "
        "not know which; give a port");
    expect_alone("tcp://127.0.0.1:0?rank=0&world_size=1", NULL);
    expect_alone("tcp://127.0.0.1:0?world_size=1&rank=0", NULL);
    expect_alone("tcp://127.0.0.1:0/?world_size=1&rank=0&", NULL);
    /* The options win over the URL. */
    expect_alone("tcp://127.0.0.1:0?rank=5&world_size=9",
                 &(td_rendezvous_options){.world_size = 1});
}

TEST(parameters_are_checked)
{
    expect_message("tcp://h:1?colour=red", NULL,
                   "rendezvous URL \"tcp://h:1?colour=red\": there is no parameter \"colour\"; it "
                   "takes rank and world_size");
    expect_message(
        "tcp://h:1?rank=-1&world_size=2", NULL,
        "rendezvous URL \"tcp://h:1?rank=-1&world_size=2\": the rank is -1; ranks begin at "
        "0");
    expect_message(
        "tcp://h:1?rank=0&world_size=0", NULL,
        "rendezvous URL \"tcp://h:1?rank=0&world_size=0\": the world size is 0; it must be "
        "at least 1");
    expect_part("tcp://h:1?rank=0&world_size=-1", NULL, "the world size is -1");
    expect_part("tcp://h:1?rank=zero&world_size=2", NULL, "rank is \"zero\"; it must be a number");
    expect_part("tcp://h:1?rank=0&world_size=", NULL, "world_size is \"\"; it must be a number");
    expect_part("tcp://h:1?rank=0&world_size=99999999999", NULL,
                "world_size is \"99999999999\"; it must be a number");
    expect_part("tcp://h:1?rank", NULL, "its parameters must be written as rank=…&world_size=…");
    expect_part("tcp://h:1?RANK=0&world_size=1", NULL, "there is no parameter \"RANK\"");
    expect_part("file:///tmp/x?ranks=0", NULL, "there is no parameter \"ranks\"");
    expect_part("env://?size=2", NULL, "there is no parameter \"size\"");
}

TEST(options_are_checked)
{
    td_world world;
    CHECK_FAILS(td_rendezvous(NULL, NULL, NULL), TD_ERR_INVALID,
                "td_rendezvous: the output is NULL");
    CHECK_FAILS(td_world_close(NULL), TD_ERR_INVALID, "td_world_close: the world is NULL");
    static const char *const urls[] = {NULL, "env://", "tcp://127.0.0.1:0", "file:///tmp/x"};
    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++) {
        expect_message(
            urls[i], &(td_rendezvous_options){.world_size = -2},
            "rendezvous: the world size is -2; it must be at least 1 (0 and -1 take it from the "
            "URL or the environment)");
        expect_message(urls[i], &(td_rendezvous_options){.rank = -2, .world_size = 2},
                       "rendezvous: the rank is -2; ranks begin at 0 (-1 takes it from the URL or "
                       "the environment)");
        expect_message(urls[i], &(td_rendezvous_options){.timeout_ms = -5, .world_size = 1},
                       "td_rendezvous: timeout_ms is -5 ms; it must not be negative, and TD_NOW is "
                       "for calls that wait");
        expect_part(urls[i], &(td_rendezvous_options){.timeout_ms = TD_NOW, .world_size = 1},
                    "td_rendezvous: timeout_ms is -1 ms");
        expect_part(urls[i], &(td_rendezvous_options){.world_size = 1, .reserved = {&world}},
                    "td_rendezvous: reserved[0]");
    }
    expect_alone(NULL, &(td_rendezvous_options){.world_size = -1, .rank = -1});
    expect_alone("tcp://127.0.0.1:0?rank=0&world_size=1",
                 &(td_rendezvous_options){.world_size = -1, .rank = -1});
    expect_part("tcp://127.0.0.1:1?rank=4&world_size=5", &(td_rendezvous_options){.world_size = 2},
                "rank 4 is outside 0 to 1"); /* the rank of the URL is used */
    expect_part("tcp://127.0.0.1:0", &(td_rendezvous_options){.world_size = 2, .rank = -1},
                "the rank is missing");
    CHECK_OK(td_rendezvous("tcp://127.0.0.1:0",
                           &(td_rendezvous_options){.world_size = 1, .timeout_ms = 1234}, &world));
    CHECK_EQ(td_store_timeout(world.store), 1234);
    CHECK_OK(td_world_close(&world));
    CHECK_OK(td_rendezvous("tcp://127.0.0.1:0", &(td_rendezvous_options){.world_size = 1}, &world));
    CHECK_EQ(td_store_timeout(world.store), 300000);
    CHECK_OK(td_world_close(&world));
}

TEST(file_needs_an_absolute_path)
{
    td_rendezvous_options one = {.world_size = 1};
    char url[512], path[400];
    expect_message(
        "file://tmp/job", &one,
        "file://: the path must begin with a slash, as in file:///tmp/job; \"tmp\" stands "
        "where a host would");
    expect_part("file://:80/job", &one, "file://: the path must begin with a slash");
    expect_message("file://", &one, "file://: the path is missing; it is written file:///path");
    expect_part("file://?rank=0&world_size=1", NULL, "file://: the path is missing");
    expect_message(
        "file:///tmp/job", NULL,
        "file://: the rank is missing; give it in the options or as ?rank=…&world_size=…");
    expect_part("file:///tmp/job?rank=3&world_size=2", NULL,
                "file://: rank 3 is outside 0 to 1, the ranks of a world of 2");

    snprintf(path, sizeof path, "%s/no/such/place", td_test_temp_dir());
    snprintf(url, sizeof url, "file://%s", path);
    CHECK_EQ(attempt(url, &one), TD_ERR_SYSTEM);
    CHECK_CONTAINS(td_last_error(), path);
    snprintf(url, sizeof url, "file://%s", td_test_temp_dir());
    CHECK_EQ(attempt(url, &one), TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), td_test_temp_dir());

    snprintf(path, sizeof path, "%s/job", td_test_temp_dir());
    snprintf(url, sizeof url, "file://%s?rank=0&world_size=1", path);
    expect_alone(url, NULL);
    CHECK(access(path, F_OK) != 0); /* nothing is left behind */
    snprintf(url, sizeof url, "file://%s?rank=4&world_size=9", path);
    expect_alone(url, &one); /* the options win */
}

/* ---- What the environment selects ------------------------------------------------------------ */

TEST(alone_without_any_set_up)
{
    td_world world;
    expect_alone(NULL, NULL);
    expect_alone(NULL, &(td_rendezvous_options){.world_size = 1});
    CHECK_OK(td_rendezvous(NULL, &(td_rendezvous_options){.timeout_ms = 77}, &world));
    CHECK_EQ(world.local_rank, 0);
    CHECK_EQ(world.local_world_size, 1);
    CHECK_EQ(td_store_timeout(world.store), 77);
    CHECK_OK(td_world_close(&world));
    expect_message(
        NULL, &(td_rendezvous_options){.world_size = 2},
        "rendezvous: the options give rank 0 of 2, but neither a URL nor the environment says "
        "where the store is; set MASTER_ADDR and MASTER_PORT, or start with tdrun");
    expect_part(NULL, &(td_rendezvous_options){.rank = 1}, "neither a URL nor the environment");
}

TEST(the_launchers_are_detected_in_order)
{
    /* Each has a rank that is out of range: the error names the variable. */
    VARIABLES("PMI_RANK=14", "PMI_SIZE=4");
    expect_message(NULL, NULL, "mpi://: rank 14 is outside 0 to 3, the ranks of a world of 4");
    VARIABLES("OMPI_COMM_WORLD_RANK=13", "OMPI_COMM_WORLD_SIZE=3");
    expect_message(NULL, NULL, "mpi://: rank 13 is outside 0 to 2, the ranks of a world of 3");
    VARIABLES("SLURM_PROCID=12", "SLURM_NTASKS=2");
    expect_message(NULL, NULL, "slurm://: rank 12 is outside 0 to 1, the ranks of a world of 2");
    VARIABLES("RANK=11", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1");
    expect_message(NULL, NULL, "env://: rank 11 is outside 0 to 1, the ranks of a world of 2");
    VARIABLES("WORLD_SIZE="); /* RANK alone decides, although others are complete */
    expect_message(NULL, NULL, needed[1].message);
}

TEST(half_a_launcher_is_not_detected)
{
    VARIABLES("SLURM_PROCID=1"); /* a shell on a login node may have it */
    expect_alone(NULL, NULL);
    VARIABLES("SLURM_PROCID=", "SLURM_NTASKS=4", "SLURM_JOB_ID=5", "PMI_SIZE=3");
    expect_alone(NULL, NULL);
    VARIABLES("SLURM_NTASKS=", "SLURM_PROCID=9", "SLURM_STEP_NUM_TASKS=2");
    expect_part(NULL, NULL, "slurm://: rank 9 is outside 0 to 1");
}

TEST(a_lone_variable_needs_the_rank)
{
    static const char *const lone[] = {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500",
                                       "WORLD_SIZE=1"};
    for (size_t i = 0; i < sizeof lone / sizeof *lone; i++) {
        VARIABLES("MASTER_ADDR=", "MASTER_PORT=", "WORLD_SIZE=");
        VARIABLES(lone[i]);
        expect_message(NULL, NULL, needed[0].message);
    }
}

/* ---- Clusters -------------------------------------------------------------------------------- */

TEST(slurm_names_a_missing_variable)
{
    expect_message("slurm://", NULL,
                   "slurm://: the variable SLURM_PROCID is not set; is this process started by the "
                   "cluster's launcher?");
    VARIABLES("SLURM_PROCID=0");
    expect_message(
        "slurm://", NULL,
        "slurm://: the variable SLURM_NTASKS is not set; it says how many processes there "
        "are");
    VARIABLES("SLURM_NTASKS=2");
    expect_message(
        "slurm://", NULL,
        "slurm://: the variable SLURM_JOB_NODELIST is not set; it says on which hosts the "
        "job runs (or set MASTER_ADDR)");
    VARIABLES("SLURM_NTASKS=none");
    expect_part("slurm://", NULL, "the variable SLURM_NTASKS is \"none\"");
    VARIABLES("SLURM_NTASKS=2", "SLURM_LOCALID=-3");
    expect_part("slurm://", NULL, "the variable SLURM_LOCALID is \"-3\"");
    VARIABLES("SLURM_LOCALID=", "MASTER_PORT=70000", "SLURM_JOB_NODELIST=a");
    expect_message("slurm://", NULL, "MASTER_PORT is 70000, which is outside 0 to 65535");
    VARIABLES("MASTER_PORT=-1");
    expect_part("slurm://", NULL, "the variable MASTER_PORT is \"-1\"");
}

TEST(slurm_reads_compressed_host_lists)
{
    td_rendezvous_options options = {.timeout_ms = 300};
    VARIABLES("SLURM_PROCID=0", "SLURM_NTASKS=2");
    static const struct {
        const char *list, *first;
    } lists[] = {
        {"no-such-host[003-005,9].invalid,login", "\"no-such-host003.invalid\""},
        {"no-such-rack[2-3]-node[08-10].invalid", "\"no-such-rack2-node08.invalid\""},
        {"no-such-a.invalid,no-such-b.invalid", "\"no-such-a.invalid\""},
    };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        setenv("SLURM_JOB_NODELIST", lists[i].list, 1);
        for (int rank = 0; rank < 2; rank++) { /* one that would listen, one that would connect */
            set_number("SLURM_PROCID", rank);
            td_status status = attempt(i ? "slurm://" : NULL, &options);
            CHECK(status == TD_ERR_INVALID ||
                  status == TD_ERR_TIMEOUT); /* as the resolver has it */
            CHECK_CONTAINS(td_last_error(), lists[i].first);
        }
    }
    setenv("SLURM_JOB_NODELIST", "node[1-", 1);
    expect_message("slurm://", &options,
                   "host list \"node[1-\": character 8: a number was expected");
    setenv("SLURM_JOB_NODELIST", "a,,b", 1);
    expect_part("slurm://", &options, "host list \"a,,b\": character 3: a host name was expected");
    /* The hosts of the step count more than those of the job. */
    VARIABLES("SLURM_STEP_NODELIST=no-such-step.invalid,x");
    CHECK(attempt("slurm://", &options) != TD_OK);
    CHECK_CONTAINS(td_last_error(), "\"no-such-step.invalid\"");
}

TEST(mpi_names_a_missing_variable)
{
    expect_message(
        "mpi://", NULL,
        "mpi://: the variable OMPI_COMM_WORLD_RANK is not set; is this process started by "
        "the cluster's launcher?");
    VARIABLES("OMPI_COMM_WORLD_RANK=0");
    expect_message(
        NULL, NULL,
        "mpi://: the variable OMPI_COMM_WORLD_SIZE is not set; it says how many processes "
        "there are");
    VARIABLES("OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_SIZE=2");
    expect_message(
        NULL, NULL,
        "mpi://: the job spans several hosts; set MASTER_ADDR to the host of rank 0 (and "
        "MASTER_PORT, where 29500 is taken)");
    VARIABLES("OMPI_COMM_WORLD_SIZE=four");
    expect_part(NULL, NULL, "the variable OMPI_COMM_WORLD_SIZE is \"four\"");
    VARIABLES("OMPI_COMM_WORLD_RANK=", "PMI_RANK=0");
    expect_part(NULL, NULL, "mpi://: the variable PMI_SIZE is not set");
    VARIABLES("PMI_SIZE=2", "MPI_LOCALNRANKS=1");
    expect_part(NULL, NULL, "mpi://: the job spans several hosts");
    VARIABLES("MASTER_ADDR=127.0.0.1", "MASTER_PORT=65536");
    expect_part(NULL, NULL, "MASTER_PORT is 65536, which is outside 0 to 65535");
}

/* ---- Registered schemes ---------------------------------------------------------------------- */

struct own {
    int rank, world_size;
    bool no_store;
    td_status failure;
    bool silent;     /* fails without td_fail() */
    const char *url; /* what it was called with */
    const td_rendezvous_options *options;
    td_world before;
};

static td_status meet_own_way(const char *url, const td_rendezvous_options *options, void *arg,
                              td_world *world)
{
    struct own *own = arg;
    own->url = url;
    own->options = options;
    own->before = *world;
    if (own->silent)
        return own->failure;
    if (own->failure)
        return td_fail(own->failure, "the %s is closed on %ss", "oracle", "Monday");
    world->rank = own->rank;
    world->world_size = own->world_size;
    return own->no_store ? TD_OK : td_hash_store_open(&world->store);
}

TEST(schemes_can_be_registered)
{
    struct own own = {.world_size = 1}, other = own;
    td_rendezvous_options options = {.timeout_ms = 5000};
    CHECK_OK(td_register_rendezvous("Own+x-1.0", meet_own_way, &own));
    CHECK_FAILS(td_register_rendezvous("own+X-1.0", meet_own_way, &other), TD_ERR_STATE,
                "td_register_rendezvous: own+x-1.0:// is registered already");
    CHECK_OK(td_register_rendezvous("other", meet_own_way, &other));

    const char *url = "own+x-1.0://anything?goes=here&rank=7";
    expect_alone(url, &options);
    CHECK(own.url == url);
    CHECK(own.options == &options);
    CHECK(own.before.store == NULL);
    CHECK_EQ(own.before.local_rank, -1);
    CHECK_EQ(own.before.local_world_size, -1);
    CHECK(other.url == NULL);

    expect_message("zeus://", NULL,
                   "rendezvous URL \"zeus://\": there is no scheme zeus://; known are env://, "
                   "tcp://, file://, slurm://, mpi://, own+x-1.0://, other://");
    CHECK_OK(td_register_rendezvous("own+x-1.0", NULL, NULL));
    expect_part(url, &options, "there is no scheme own+x-1.0://; known are env://");
    CHECK_OK(td_register_rendezvous("own+x-1.0", NULL, NULL)); /* not there any more: fine */
    CHECK_OK(td_register_rendezvous("own+x-1.0", meet_own_way, &own));
    expect_alone(url, NULL);
    CHECK_OK(td_register_rendezvous("own+x-1.0", NULL, NULL));
    CHECK_OK(td_register_rendezvous("other", NULL, NULL));
}

TEST(schemes_are_checked)
{
    static const char *const built_in[] = {"env", "tcp", "file", "slurm", "mpi", "TCP"};
    static const char *const names[] = {"",    "1x",    "-x", "a b",
                                        "a/b", "a://b", "ü",  "a_b",
                                        "a\n", " a",    "a ", "a2345678901234567890123456789012"};
    struct own own = {.world_size = 1};
    for (size_t i = 0; i < sizeof built_in / sizeof *built_in; i++) {
        CHECK_FAILS(td_register_rendezvous(built_in[i], meet_own_way, &own), TD_ERR_INVALID,
                    ":// is built in");
        CHECK_FAILS(td_register_rendezvous(built_in[i], NULL, NULL), TD_ERR_INVALID,
                    ":// is built in");
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK_FAILS(td_register_rendezvous(names[i], meet_own_way, &own), TD_ERR_INVALID,
                    "is no scheme: a letter, then letters, digits, '+', '-' or '.', at most 31 in "
                    "all");
    CHECK_FAILS(td_register_rendezvous(NULL, meet_own_way, &own), TD_ERR_INVALID,
                "td_register_rendezvous: the scheme is NULL");
    const char *longest = "a234567890123456789012345678901";
    char url[64];
    CHECK_OK(td_register_rendezvous(longest, meet_own_way, &own));
    snprintf(url, sizeof url, "%s://", longest);
    expect_alone(url, NULL);
    CHECK_OK(td_register_rendezvous(longest, NULL, NULL));
}

TEST(what_a_registered_scheme_returns_is_checked)
{
    struct own own = {.world_size = 2, .rank = 2};
    CHECK_OK(td_register_rendezvous("own", meet_own_way, &own));
    expect_message("own://", NULL,
                   "rendezvous own://: rank 2 is outside 0 to 1, the ranks of a world of 2");
    own.rank = -1;
    expect_part("own://", NULL, "rendezvous own://: rank -1 is outside 0 to 1");
    own = (struct own){.world_size = 0};
    expect_message("own://", NULL, "rendezvous own://: the world size is 0; it must be at least 1");
    own = (struct own){.world_size = 1, .no_store = true};
    expect_message("own://", NULL, "rendezvous own://: its function gave no store");
    own = (struct own){.failure = TD_ERR_UNSUPPORTED};
    CHECK_EQ(attempt("own://", NULL), TD_ERR_UNSUPPORTED);
    CHECK_STR(td_last_error(), "the oracle is closed on Mondays");
    own.silent = true;
    CHECK_EQ(attempt("own://", NULL), TD_ERR_UNSUPPORTED);
    CHECK_STR(td_last_error(),
              "rendezvous own://: its function failed with TD_ERR_UNSUPPORTED, and "
              "gave no reason by td_fail()");
    /* A store that no other process reaches: the error names the missing ranks. */
    own = (struct own){.world_size = 2, .rank = 1};
    CHECK_EQ(attempt("own://x", &(td_rendezvous_options){.timeout_ms = 100}), TD_ERR_TIMEOUT);
    CHECK_STR(td_last_error(), "rendezvous at own://x: timed out: 1 of 2 ranks have joined; "
                               "missing: rank 0");
    CHECK_OK(td_register_rendezvous("own", NULL, NULL));
}

/* ---- The store alone ------------------------------------------------------------------------- */

static void expect_no_store(const char *url, td_status status, const char *part)
{
    td_store *store = NULL;
    CHECK_FAILS(td_rendezvous_store(url, 300, &store), status, part);
}

TEST(a_store_without_a_rank)
{
    static const char *const variables[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
    char path[300], url[320];
    td_store *one, *two;
    td_bytes value;
    for (int i = 0; i < 4; i++)
        unsetenv(variables[i]);
    expect_no_store(NULL, TD_ERR_INVALID, "MASTER_ADDR");
    expect_no_store("env://", TD_ERR_INVALID, "MASTER_ADDR");
    expect_no_store("tcp://127.0.0.1", TD_ERR_INVALID, "port");
    expect_no_store("tcp://127.0.0.1:0", TD_ERR_INVALID, "port 0");
    expect_no_store("tcp://127.0.0.1:1234/path", TD_ERR_INVALID, "path");
    expect_no_store("file://", TD_ERR_INVALID, "path");
    expect_no_store("nothing://", TD_ERR_INVALID, "nothing://");
    expect_no_store("no url", TD_ERR_INVALID, "no url");
    CHECK_FAILS(td_rendezvous_store("env://", -5, &one), TD_ERR_INVALID, "timeout_ms");
    CHECK_FAILS(td_rendezvous_store("env://", 0, NULL), TD_ERR_INVALID, "NULL");
    snprintf(path, sizeof path, "%s/store", td_test_temp_dir());
    snprintf(url, sizeof url, "file://%s", path);
    CHECK_OK(td_rendezvous_store(url, 0, &one));
    CHECK_OK(td_rendezvous_store(url, 2000, &two));
    CHECK_EQ(td_store_timeout(two), 2000);
    CHECK_OK(td_store_set(one, "key", "value", 5));
    CHECK_OK(td_store_get(two, "key", 0, &value));
    CHECK_STR(value.data, "value");
    td_bytes_free(&value);
    CHECK_OK(td_store_close(one));
    CHECK_OK(td_store_close(two));
}
