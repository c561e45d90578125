/* Plug-ins: the good one and the bad ones of sample_plugin.c, first use from threads, forks. */
#include "group/process_group.h"
#include "plugin/plugins.h"
#include "runner.h"

#include <tandem/device.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define FOLDER(sample) TD_TEST_BUILD_DIR "/tests/plugins/" sample
#define FILE_OF(sample) FOLDER(sample) "/tandem_" sample ".so"

static void search(const char *path)
{
    setenv("TANDEM_PLUGIN_PATH", path, 1);
}

/* How often the init() of a sample ran; -1: there is no such backend. */
static int inits(const char *backend)
{
    struct td__backend_found found;
    return td__backend_find(backend, &found) ? -1 : atomic_load((atomic_int *)found.arg);
}

static td_plugin_info *find_in(td_plugin_info *list, int count, const char *name)
{
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, name))
            return &list[i];
    return NULL;
}

/* ---- Good ones ---------------------------------------------------------------------------------- */

TEST(a_backend_is_loaded_on_first_use)
{
    search(FOLDER("good"));
    CHECK_EQ(inits("good"), 1);
    CHECK_EQ(inits("good"), 1);
    CHECK_OK(td_load_plugin("good"));
    CHECK_OK(td_load_plugin(FILE_OF("good")));
    CHECK_EQ(inits("good"), 1);
}

TEST(a_group_loads_its_backend)
{
    td_store *store;
    CHECK_OK(td_hash_store_open(&store));
    td_init_options options = {.backend = "good", .store = store, .world_size = 1};
    search(FOLDER("good"));
    CHECK_FAILS(td_init_process_group(&options), TD_ERR_UNSUPPORTED, "sample creates nothing");
    CHECK_OK(td_store_close(store));
}

TEST(success_leaves_the_last_error)
{
    search(FOLDER("nested")); /* whose init() fails on the way */
    td_fail(TD_ERR_PEER, "an older failure");
    bool found;
    CHECK_OK(td_load_plugin(FILE_OF("good")));
    CHECK_OK(td__plugin_find("nested", &found));
    CHECK(found);
    CHECK_STR(td_last_error(), "an older failure");
}

TEST(init_loads_another_plugin)
{
    search(FOLDER("nested") ":" FOLDER("good"));
    CHECK_EQ(inits("nested"), 1);
    CHECK_EQ(inits("good"), 1);
}

TEST(init_may_fork)
{
    search(FOLDER("forking"));
    CHECK_EQ(inits("forking"), 1);
}

TEST(a_device_is_loaded_on_first_use)
{
    td_plugin_info *list;
    int count;
    search(FOLDER("device"));
    td_device *second = td_device_get("device:1"); /* finding one loads nothing */
    CHECK_OK(td_list_plugins(false, &list, &count));
    CHECK_EQ(find_in(list, count, "device")->state, TD_PLUGIN_FOUND);
    td_free_plugin_list(list);
    CHECK_FAILS(td_set_device(second), TD_ERR_UNSUPPORTED, "sample number 1 cannot be opened");
    CHECK_EQ(td_device_count("device"), 3);
    CHECK(td_device_exists("device:2") && !td_device_exists("device:3"));
    CHECK_OK(td_list_plugins(false, &list, &count));
    CHECK_STR(find_in(list, count, "device")->devices, "device");
    td_free_plugin_list(list);
}

TEST(a_device_without_a_plugin)
{
    search(FOLDER("good"));
    CHECK_EQ(td_device_count("absent"), 0);
    CHECK(!td_device_exists("absent:0"));
    CHECK_FAILS(td_set_device(td_device_get("absent:0")), TD_ERR_INVALID,
                "there is no plug-in tandem_absent.so in ");
    CHECK_FAILS(td_set_device(td_device_get("good:0")), TD_ERR_INVALID,
                "tandem_good.so does not register it");
}

/* ---- Bad ones: the sentence names the file and the reason --------------------------------------- */

static void refused(const char *path, td_status status, const char *reason)
{
    CHECK_FAILS(td_load_plugin(path), status, reason);
    CHECK_CONTAINS(td_last_error(), path);
}

TEST(too_old)
{
    refused(FILE_OF("old"), TD_ERR_MISMATCH,
            "too old for this library: its td_plugin has version 0, and Tandem ");
    CHECK_CONTAINS(td_last_error(), td_version());
}

TEST(too_new)
{
    refused(FILE_OF("new"), TD_ERR_MISMATCH,
            "too new for this library: its td_plugin has version 9, and Tandem ");
    CHECK_CONTAINS(td_last_error(), "takes 1 to 1");
}

static void compiled_for(const char *path, int major, int minor, int patch)
{
    char reason[128];
    snprintf(reason, sizeof reason, "headers of Tandem %d.%d.%d, but this is Tandem %s", major,
             minor, patch, td_version());
    refused(path, TD_ERR_MISMATCH, reason);
}

TEST(another_abi)
{
    compiled_for(FILE_OF("other_abi"), TD_VERSION_MAJOR + 1, TD_VERSION_MINOR, TD_VERSION_PATCH);
}

TEST(newer_headers)
{
    compiled_for(FILE_OF("newer"), TD_VERSION_MAJOR, TD_VERSION_MINOR, TD_VERSION_PATCH + 1);
}

TEST(not_a_plugin)
{
    refused(FILE_OF("no_symbol"), TD_ERR_INVALID, "no function tandem_plugin()");
}

TEST(undefined_symbol)
{
    refused(FILE_OF("undefined"), TD_ERR_SYSTEM, "td_function_that_no_version_has");
}

TEST(wrong_name)
{
    refused(FILE_OF("wrong_name"), TD_ERR_INVALID,
            "says that its name is \"another\", not \"wrong_name\"");
}

TEST(init_fails)
{
    refused(FILE_OF("failing"), TD_ERR_UNSUPPORTED, "the driver is version 1; 2 is needed");
    refused(FILE_OF("silent"), TD_ERR_PEER, "returned TD_ERR_PEER without a reason");
}

TEST(init_fails_on_first_use)
{
    search(FOLDER("failing"));
    for (int i = 0; i < 2; i++) { /* the second time it is remembered */
        CHECK_EQ(inits("failing"), -1);
        CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
        CHECK_CONTAINS(td_last_error(), "the driver is version 1");
        setenv("SAMPLE_DRIVER", "2", 1);
    }
    CHECK_OK(td_load_plugin("failing")); /* which tries again */
    CHECK_EQ(inits("failing"), 1);
}

TEST(a_device_with_an_old_table)
{
    search(FOLDER("old_device"));
    CHECK_EQ(td_device_count("old_device"), 0);
    CHECK_FAILS(td_set_device(td_device_get("old_device:0")), TD_ERR_INVALID,
                "version 0 of the table");
    CHECK_CONTAINS(td_last_error(), FILE_OF("old_device"));
}

/* ---- The list ------------------------------------------------------------------------------------ */

TEST(the_list)
{
    td_plugin_info *list;
    int count;
    search(FOLDER("failing") ":" FOLDER("good") ":" FOLDER("old"));
    CHECK_OK(td_list_plugins(false, &list, &count));
    td_plugin_info *good = find_in(list, count, "good");
    CHECK(good && good->state == TD_PLUGIN_FOUND);
    CHECK_STR(good->origin, "TANDEM_PLUGIN_PATH");
    CHECK_STR(good->backends, "");
    td_free_plugin_list(list);

    CHECK_OK(td_load_plugin(FILE_OF("slow")));
    td_fail(TD_ERR_PEER, "an older failure");
    CHECK_OK(td_list_plugins(true, &list, &count));
    CHECK_STR(td_last_error(), "an older failure");
    good = find_in(list, count, "good");
    CHECK(good && good->state == TD_PLUGIN_LOADED);
    CHECK_STR(good->release, "1.5");
    CHECK_STR(good->backends, "good");
    CHECK_STR(good->devices, "");
    CHECK_CONTAINS(good->path, "/tandem_good.so");
    CHECK_STR(good->error, "");
    td_plugin_info *old = find_in(list, count, "old");
    CHECK(old && old->state == TD_PLUGIN_FAILED);
    CHECK_CONTAINS(old->error, "too old");
    td_plugin_info *slow = find_in(list, count, "slow");
    CHECK(slow && slow->state == TD_PLUGIN_LOADED);
    CHECK_STR(slow->origin, "td_load_plugin");
    CHECK_STR(find_in(list, count, "failing")->release, "1.5");
    for (int i = 1; i < count; i++)
        CHECK(strcmp(list[i - 1].name, list[i].name) < 0);
    td_free_plugin_list(list);
    td_free_plugin_list(NULL);
    CHECK_FAILS(td_list_plugins(true, NULL, &count), TD_ERR_INVALID, "NULL");
}

/* One of them loads another while the list is made. */
TEST(the_list_with_a_nested_one)
{
    td_plugin_info *list;
    int count;
    search(FOLDER("failing") ":" FOLDER("old") ":" FOLDER("nested") ":" FOLDER("good"));
    CHECK_OK(td_list_plugins(true, &list, &count));
    CHECK_EQ(find_in(list, count, "failing")->state, TD_PLUGIN_FAILED);
    CHECK_EQ(find_in(list, count, "old")->state, TD_PLUGIN_FAILED);
    CHECK_EQ(find_in(list, count, "nested")->state, TD_PLUGIN_LOADED);
    CHECK_STR(find_in(list, count, "nested")->backends, "nested");
    CHECK_STR(find_in(list, count, "good")->backends, "good");
    td_free_plugin_list(list);
}

/* ---- Threads and forks ---------------------------------------------------------------------------- */

enum { THREADS = 8 };

static pthread_barrier_t start;

static void *use_slow(void *arg)
{
    pthread_barrier_wait(&start);
    *(int *)arg = inits("slow");
    return NULL;
}

TEST(threads_use_it_first_at_once)
{
    pthread_t threads[THREADS];
    int seen[THREADS];
    search(FOLDER("slow"));
    pthread_barrier_init(&start, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, use_slow, &seen[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(seen[i], 1);
    }
    pthread_barrier_destroy(&start);
}

/* Threads that have ended before it, and are not joined, are leaks of the child to ThreadSanitizer. */
static atomic_bool forked;

static void *load_slow(void *arg)
{
    (void)arg;
    CHECK_OK(td_load_plugin(FILE_OF("slow")));
    CHECK_SOON(atomic_load(&forked));
    return NULL;
}

static void *let_it_go(void *arg)
{
    usleep(100000); /* fork() waits by then, or comes later: both must work */
    CHECK(write(*(int *)arg, "", 1) == 1);
    CHECK_SOON(atomic_load(&forked));
    return NULL;
}

TEST(fork_while_a_thread_loads)
{
    int ready[2], go[2];
    char byte, pipes[32];
    pthread_t loader, waker;
    search(FOLDER("good"));
    CHECK(!pipe(ready) && !pipe(go));
    snprintf(pipes, sizeof pipes, "%d,%d", ready[1], go[0]);
    setenv("SAMPLE_PIPES", pipes, 1);
    CHECK_EQ(pthread_create(&loader, NULL, load_slow, NULL), 0);
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK_EQ(pthread_create(&waker, NULL, let_it_go, &go[1]), 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* a deadlock ends it */
        _exit(inits("slow") == 1 && inits("good") == 1 ? 42 : 1);
    }
    atomic_store(&forked, true);
    int ended;
    CHECK(waitpid(child, &ended, 0) == child);
    CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 42);
    pthread_join(loader, NULL);
    pthread_join(waker, NULL);
    CHECK_EQ(inits("slow"), 1);
    CHECK_EQ(inits("good"), 1);
}

/* ---- Programs whose symbols are hidden -------------------------------------------------------------- */

static void host_says(const char *host, const char *plugin, const char *part)
{
    char path[512];
    snprintf(path, sizeof path, TD_TEST_BUILD_DIR "/tests/%s", host);
    struct td_test_child child = td_test_exec((const char *[]){path, plugin, NULL});
    CHECK_EQ(child.status, 0);
    CHECK_CONTAINS(child.output, part);
    free(child.output);
}

TEST(a_static_program_must_export)
{
    host_says("plugin_hidden", FILE_OF("good"), "link the program with -rdynamic");
}

TEST(a_library_of_dlopen_is_found_by_plugins)
{
    host_says("plugin_dlopen", FILE_OF("good"), "loaded");
    host_says("plugin_dlopen", FILE_OF("undefined"), "compiled for another version of Tandem");
}
