/* What is left behind: by a rank that has left its world and lives on, and by processes that have ended. */
#include "chaos.h"
#include "process_counts.h"
#include "thread_sanitizer.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_INODES = 64, PATIENCE_MS = 300 };

/* ---- Inside a process ------------------------------------------------------------------------ */

/* Memories of Tandem that are mapped, each counted once. */
static int count_mappings(void)
{
    unsigned long inodes[MOST_INODES], inode;
    int count = 0, known;
    char line[512];
    FILE *file = fopen("/proc/self/maps", "re");
    while (file && fgets(line, sizeof line, file)) {
        if (!strstr(line, "memfd:tandem") || sscanf(line, "%*s %*s %*s %*s %lu", &inode) != 1)
            continue;
        for (known = 0; known < count && inodes[known] != inode; known++)
            ;
        if (known == count && count < MOST_INODES)
            inodes[count++] = inode;
    }
    if (file)
        fclose(file);
    return count;
}

struct holdings left_holdings(void)
{
    struct holdings holdings = {.mappings = count_mappings(),
                                .threads = count_entries("/proc/self/task")};
    DIR *directory = opendir("/proc/self/fd");
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char path[300], target[256] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        if (entry->d_name[0] == '.' || readlink(path, target, sizeof target - 1) < 0)
            continue;
        /* The arena, and a pipe of libuv's own, stay as long as the process. */
        bool stays = !strcmp(target, "/memfd:tandem (deleted)") || !strncmp(target, "pipe:", 5);
        holdings.descriptors += !stays;
        holdings.sockets += !strncmp(target, "socket:", 7);
        holdings.memories += !strncmp(target, "/memfd:tandem-", 14);
    }
    if (directory)
        closedir(directory);
    return holdings;
}

/* A thread that was joined may be listed for a moment longer. ThreadSanitizer has one of its own, from the first
 * that is started. */
void left_compare(const struct holdings *before, char *text, size_t room)
{
    td__deadline end = td__deadline_in_ms(PATIENCE_MS);
    struct holdings now = left_holdings();
    int threads = before->threads + UNDER_TSAN;
    while (now.threads > threads && !td__deadline_passed(end)) {
        td__sleep_ns(5000000);
        now = left_holdings();
    }
    *text = 0;
    if (now.descriptors > before->descriptors || now.mappings > 1 || now.threads > threads)
        snprintf(text, room,
                 "%d descriptors (%d before), %d sockets (%d), %d memories of groups, %d mapped "
                 "memories, %d threads (%d)",
                 now.descriptors, before->descriptors, now.sockets, before->sockets, now.memories,
                 now.mappings, now.threads, before->threads);
}

/* ---- In the system --------------------------------------------------------------------------- */

static void add(char *text, size_t room, const char *what)
{
    size_t used = strlen(text);
    if (used < room)
        snprintf(text + used, room - used, "%s%.*s", used ? "; " : "", (int)strcspn(what, "\n"),
                 what);
}

/* Sockets whose names say that one of the processes has made them; all of Tandem's, where the network is
 * our own. */
static void find_unix_sockets(const pid_t *pids, int count, char *text, size_t room)
{
    char line[512];
    FILE *file = fopen("/proc/net/unix", "re");
    while (file && fgets(line, sizeof line, file)) {
        char *name = strstr(line, "@tandem");
        if (!name)
            continue;
        bool ours = network_is_own();
        for (int i = 0; i < count && !ours; i++) {
            char part[32];
            snprintf(part, sizeof part, "-%d-", (int)pids[i]);
            ours = strstr(name, part) != NULL;
        }
        if (ours)
            add(text, room, name);
    }
    if (file)
        fclose(file);
}

/* Listeners and connections in the network namespace of this round, without those in TIME_WAIT. */
static void find_tcp_sockets(const char *path, char *text, size_t room)
{
    char line[512];
    FILE *file = network_is_own() ? fopen(path, "re") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        unsigned state;
        unsigned long inode;
        if (sscanf(line, "%*s %*s %*s %x %*s %*s %*s %*s %*s %lu", &state, &inode) == 2 && inode)
            add(text, room, line);
    }
    if (file)
        fclose(file);
}

static void find_files(const char *path, char *text, size_t room)
{
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char what[300];
        snprintf(what, sizeof what, "file %s", entry->d_name);
        if (entry->d_name[0] != '.')
            add(text, room, what);
    }
    if (directory)
        closedir(directory);
}

void left_check(const pid_t *pids, int count, const char *directory, char *text, size_t room)
{
    find_unix_sockets(pids, count, text, room);
    find_tcp_sockets("/proc/net/tcp", text, room);
    find_tcp_sockets("/proc/net/tcp6", text, room);
    if (directory)
        find_files(directory, text, room);
}
