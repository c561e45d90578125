/* A worker for the tests of the postmortem: a few collectives, and then one rank does what the first argument
 * says, while the others go on to the next one. */
#include <tandem/tandem.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Tells the test that this rank has arrived here. */
static void leave_mark(const char *name, int rank)
{
    char path[64];
    snprintf(path, sizeof path, "%s.%d", name, rank);
    FILE *file = fopen(path, "w");
    if (file)
        fclose(file);
}

/* Until both others have arrived here as well. */
static void wait_for_marks(const char *first, const char *second)
{
    for (int i = 0; i < 1000 && (access(first, F_OK) || access(second, F_OK)); i++)
        usleep(10000);
}

static void do_the_odd_thing(const char *what)
{
    if (!strcmp(what, "kill"))
        raise(SIGKILL);
    if (!strcmp(what, "exit"))
        exit(3);
    if (!strcmp(what, "outlived")) {
        wait_for_marks("joined.0", "joined.2");
        raise(SIGKILL);
    }
    if (!strcmp(what, "leave"))
        td_destroy_process_group();
    if (!strcmp(what, "hang") || !strcmp(what, "leave"))
        pause();
    if (!strcmp(what, "mismatch"))
        td_group_barrier(NULL, NULL);
}

static int fail(void)
{
    fprintf(stderr, "%s\n", td_last_error());
    return 1;
}

/* Goes on without the rank that died, and fails by itself. */
static void fail_later(int rank)
{
    td_group *rest;
    if (!td_group_shrink(NULL, &(td_group_options){.name = "rest"}, &rest) &&
        !td_group_barrier(rest, NULL)) {
        /* No rank fails while the other one may still be in the barrier. */
        leave_mark("past", rank);
        wait_for_marks("past.0", "past.2");
        exit(5);
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    int odd = argc > 2 ? atoi(argv[2]) : 1, own = atoi(getenv("RANK"));
    float data[4] = {0};
    if (!strcmp(what, "absent") && own == odd) {
        for (int i = 0; i < 100 && access("joined.0", F_OK); i++)
            usleep(10000);
        return 4;
    }
    td_init_options alone = {.init_method = "tcp://127.0.0.1:0", .world_size = 1};
    if (td_init_process_group(!strcmp(what, "absent") ? &alone : NULL))
        return fail();
    int rank = td_get_rank(NULL);
    if (td_group_all_reduce(data, data, 4, TD_F32, TD_SUM, NULL, NULL) ||
        td_group_barrier(NULL, NULL))
        return fail();
    leave_mark("joined", own);
    if (!strcmp(what, "absent"))
        pause();
    if (rank == odd)
        do_the_odd_thing(what);
    td_set_call_label("bucket \033[31m3");
    leave_mark("going", rank);
    bool well = td_group_all_reduce(data, data, 4, TD_F32, TD_SUM, NULL, NULL) == TD_OK;
    if (!well && !strcmp(what, "outlived"))
        fail_later(rank);
    if (!well)
        return fail();
    if (td_destroy_process_group())
        return fail();
    return 0;
}
