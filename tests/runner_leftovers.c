/* What a test leaves behind: processes and files; see runner_leftovers.h. */
#include "runner_leftovers.h"

#include "runner.h"

#include "base/clock.h"

#include <dirent.h>
#include <errno.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int is_pid(const struct dirent *entry)
{
    return atoi(entry->d_name) > 0;
}

/* Not by opendir(): tsan takes the descriptor that closedir() closes for one
 * that another thread has accepted and closed before. */
void td_test_each_child(void (*fn)(void *arg, int pid, char state, const char *comm), void *arg)
{
    struct dirent **entries;
    int count = scandir("/proc", &entries, is_pid, NULL);
    for (int i = 0; i < count; i++) {
        char path[300], comm[64] = "?", state = '?';
        int parent = 0;
        snprintf(path, sizeof path, "/proc/%s/stat", entries[i]->d_name);
        FILE *file = fopen(path, "re");
        if (file && fscanf(file, "%*d (%63[^)]) %c %d", comm, &state, &parent) == 3 &&
            parent == getpid())
            fn(arg, atoi(entries[i]->d_name), state, comm);
        if (file)
            fclose(file);
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
}

struct names {
    char *text;
    size_t room;
};

/* Kills the child, and adds it to the names: "pid 71 (sleep), ". */
static void kill_child(void *arg, int pid, char state, const char *comm)
{
    struct names *names = arg;
    if (state == 'Z')
        return;
    kill(pid, SIGKILL);
    size_t used = names->text ? strlen(names->text) : 0;
    if (used < names->room)
        snprintf(names->text + used, names->room - used, "%spid %d (%s)", used ? ", " : "", pid,
                 comm);
}

void td_test_kill_children(char *names, size_t room)
{
    td_test_each_child(kill_child, &(struct names){names, room});
}

void td_test_end_children(int grace_s, char *names, size_t room)
{
    td__deadline grace = td__deadline_in_ms((int64_t)grace_s * 1000 * td_test_slowness());
    for (;;) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0 && errno == ECHILD)
            return;
        if (pid != 0)
            continue;
        if (td__deadline_passed(grace))
            td_test_kill_children(names, room);
        td__sleep_ns(1000000);
    }
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

void td_test_remove_tree(const char *path)
{
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS))
        printf("     its directory %s cannot be removed: %s\n", path, strerror(errno));
}
