/* A program whose processes are fresh starts of it. It prints what they find.
 *
 *     spawn_host plain WORD         starts 2 processes
 *     spawn_host removed WORD       after it has removed its file, changed its directory and overwritten its name
 *     spawn_host twice WORD         starts 2, and 2 more afterwards
 *     spawn_host without WORD       without td_spawn_main()
 *     spawn_host again WORD         only the first process calls td_spawn_main(): the others come to td_spawn()
 *     spawn_host nothing WORD       the same, but they return from main() before that */
#include <tandem/launch.h>
#include <tandem/rendezvous.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int changed = 1;
static const char *first_argument = "";
static int argument_count;

/* What each process of the program knows before main(). */
__attribute__((constructor)) static void note_arguments(int argc, char **argv)
{
    argument_count = argc;
    first_argument = argc > 1 ? argv[1] : "";
}

static td_status work(int rank, void *arg)
{
    td_world world;
    td_status status = td_rendezvous(NULL, NULL, &world);
    if (status)
        return status;
    printf("rank %d of %d: %s; %d arguments, %s; changed %d; variable %s\n", world.rank,
           world.world_size, arg ? (char *)arg : "nothing", argument_count, first_argument, changed,
           getenv("TANDEM_SPAWN") ? "set" : "not set");
    return rank == world.rank ? td_world_close(&world) : TD_ERR_STATE;
}

static int spawn_pair(char *word)
{
    td_spawn_options options = {.method = TD_SPAWN_EXEC, .arg_size = strlen(word) + 1};
    td_status status = td_spawn(work, word, 2, &options);
    if (status)
        printf("process %s: %s: %s\n", getenv("SPAWN_HOST"), td_status_name(status),
               td_last_error());
    return status ? 3 : 0;
}

static void hide(char **argv)
{
    if (unlink(argv[0]) || chdir("/")) {
        perror("spawn_host");
        exit(4);
    }
    memset(argv[0], 'x', strlen(argv[0]));
}

int main(int argc, char **argv)
{
    const char *what = argc == 3 ? argv[1] : "";
    bool is_first = !getenv("SPAWN_HOST");
    setenv("SPAWN_HOST", is_first ? "1" : "2", 1);
    if (strcmp(what, "without") && (is_first || (strcmp(what, "again") && strcmp(what, "nothing"))))
        td_spawn_main();
    if (!is_first && !strcmp(what, "nothing"))
        return 0;
    printf("main of process %s\n", getenv("SPAWN_HOST"));
    changed = 2;
    if (argc != 3)
        return 2;
    if (!strcmp(what, "removed"))
        hide(argv);
    int code = spawn_pair(argv[2]);
    if (!code && !strcmp(what, "twice"))
        code = spawn_pair(argv[2]);
    return code;
}
