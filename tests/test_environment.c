/* Threads of the library leave the environment alone: the program may be changing it by setenv(), and a getenv()
 * at that moment can crash. In this program getenv() is the one below, which records its callers. (What the C
 * library reads for itself does not call it.) */
#include "runner.h"

#include "ways.h"

#include <tandem/group.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

extern char **environ;

static atomic_int asked; /* by threads of the library */
static char first[128];

static void note(const char *name)
{
    char thread[16] = "";
    prctl(PR_GET_NAME, thread);
    if (!strncmp(thread, "td-", 3) && !atomic_fetch_add(&asked, 1))
        snprintf(first, sizeof first, "%s reads %s", thread, name);
}

char *getenv(const char *name)
{
    size_t length = strlen(name);
    note(name);
    for (char **at = environ; at && *at; at++)
        if (!strncmp(*at, name, length) && (*at)[length] == '=')
            return *at + length + 1;
    return NULL;
}

/* Everything that has threads: a store, links, works, messages, failure detectors. */
static void use_all(const struct way *way)
{
    float x[4] = {1, 2, 3, 4};
    int size = td_test_size(), rank = td_test_rank();
    td_work *work;
    td_group *group;
    open_world(way, 0);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(td_group_all_reduce(x, x, 4, TD_F32, TD_SUM, NULL, &work));
        CHECK_OK(td_work_wait(work, 0));
        td_work_release(work);
    }
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    CHECK_OK(td_group_send(x, 4, TD_F32, (rank + 1) % size, 0, group, &work));
    CHECK_OK(td_group_recv(x, 4, TD_F32, (rank + size - 1) % size, 0, group, NULL));
    CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    CHECK_OK(td_group_barrier(group, NULL));
    CHECK_OK(td_destroy_process_group());
    if (atomic_load(&asked))
        td_test_fail(__FILE__, __LINE__, "a thread of the library: %s", first);
}

RANKS(threads_leave_the_environment_alone, .ranks = 4)
{
    use_all(&shm);
    use_all(&tcp);
    use_all(&mixed);
}

static void *ask_as_the_library(void *arg)
{
    (void)arg;
    prctl(PR_SET_NAME, "td-test");
    const char *home = getenv("HOME");
    (void)home;
    return NULL;
}

/* The check itself is one: this program's getenv() is the library's, too. */
TEST(reads_of_the_environment_are_detected)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, ask_as_the_library, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(atomic_load(&asked), 1);
    CHECK_STR(first, "td-test reads HOME");
}
