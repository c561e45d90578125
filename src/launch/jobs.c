/* Finding the pages of jobs; see jobs.h.
 *
 * A launcher keeps its book open, under a name that /proc shows. So nothing has to be registered or cleaned
 * up, no server answers, and the kernel decides which users may read it: those that may read the launcher's /proc entry. */
#include "launch/jobs.h"

#include "base/fail.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct search {
    struct td__job *jobs;
    int count;
};

/* Several processes may have one book open. */
static bool was_seen(const struct search *search, const struct stat *found)
{
    for (int i = 0; i < search->count; i++)
        if (search->jobs[i].device == found->st_dev && search->jobs[i].inode == found->st_ino)
            return true;
    return false;
}

/* A launcher writes into the log of each worker that it starts. A book that names thousands of workers and
 * has no pages for them would make this process allocate gigabytes for nothing. */
static bool is_hollow(const struct td__flight_book_info *info, const struct stat *found)
{
    enum { FEW = 64, PAGE = 4096, BLOCK = 512 };
    return info->slots > FEW && (int64_t)found->st_blocks * BLOCK < (int64_t)info->slots * PAGE;
}

static td_status take(struct search *search, const char *path)
{
    struct stat found;
    struct td__job job = {.hollow = false};
    char head[TD__FLIGHT_HEAD];
    int fd = td__flight_book_find(path, O_RDONLY, &found);
    if (fd < 0)
        return TD_OK;
    bool fit = !was_seen(search, &found) &&
               pread(fd, head, sizeof head, 0) == (ssize_t)sizeof head &&
               td__flight_read_head(head, (size_t)found.st_size, &job.info) == TD_OK;
    close(fd);
    if (!fit)
        return TD_OK;
    snprintf(job.path, sizeof job.path, "%.63s", path);
    job.hollow = is_hollow(&job.info, &found);
    job.device = found.st_dev;
    job.inode = found.st_ino;
    struct td__job *jobs = realloc(search->jobs, ((size_t)search->count + 1) * sizeof *jobs);
    if (!jobs)
        return td__fail_nomem("status");
    search->jobs = jobs;
    jobs[search->count++] = job;
    return TD_OK;
}

static td_status look_into(struct search *search, const char *process)
{
    static const char name[] = "/memfd:" TD__FLIGHT_MEMORY;
    char path[600], link[64];
    struct dirent *entry;
    td_status status = TD_OK;
    snprintf(path, sizeof path, "/proc/%.255s/fd", process);
    DIR *directory = opendir(path);
    while (directory && !status && (entry = readdir(directory))) {
        snprintf(path, sizeof path, "/proc/%.255s/fd/%.255s", process, entry->d_name);
        ssize_t size = readlink(path, link, sizeof link);
        size_t wanted = sizeof name - 1;
        if (size >= (ssize_t)wanted && !memcmp(link, name, wanted) &&
            ((size_t)size == wanted || link[wanted] == ' '))
            status = take(search, path);
    }
    if (directory)
        closedir(directory);
    return status;
}

static int compare_jobs(const void *a, const void *b)
{
    const struct td__job *x = a, *y = b;
    return x->info.started_ns < y->info.started_ns ? -1 : x->info.started_ns > y->info.started_ns;
}

td_status td__jobs_find(bool all_users, struct td__job **jobs, int *count)
{
    struct search search = {0};
    struct dirent *entry;
    DIR *directory = opendir("/proc");
    if (!directory)
        return td_fail(TD_ERR_SYSTEM, "status: /proc cannot be read: %s", td__errno_text(errno));
    td_status status = TD_OK;
    while (!status && (entry = readdir(directory))) {
        char path[300];
        struct stat found;
        snprintf(path, sizeof path, "/proc/%s", entry->d_name);
        if (entry->d_name[strspn(entry->d_name, "0123456789")] || stat(path, &found) ||
            (!all_users && found.st_uid != geteuid()))
            continue;
        status = look_into(&search, entry->d_name);
    }
    closedir(directory);
    if (status) {
        free(search.jobs);
        return status;
    }
    if (search.count)
        qsort(search.jobs, (size_t)search.count, sizeof *search.jobs, compare_jobs);
    *jobs = search.jobs;
    *count = search.count;
    return TD_OK;
}

struct td__postmortem_book *td__job_copy(const struct td__job *job)
{
    struct stat found;
    int fd = td__flight_book_find(job->path, O_RDONLY, &found);
    if (fd < 0)
        return NULL;
    size_t size = job->hollow ? TD__FLIGHT_HEAD : (size_t)found.st_size;
    bool same = found.st_dev == job->device && found.st_ino == job->inode;
    void *map = same ? mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (map == MAP_FAILED)
        return NULL;
    struct td__flight_book open = {
        .fd = -1, .slots = job->hollow ? 0 : job->info.slots, .map = map, .size = size};
    struct td__postmortem_book *book = td__postmortem_book_copy(&open);
    munmap(map, size);
    return book;
}

bool td__job_has_process(const struct td__postmortem_book *book, pid_t pid)
{
    if (book->info.pid == pid)
        return true;
    for (int slot = 0; slot < book->info.slots; slot++) {
        const struct td__flight_bytes *log = td__flight_log_at(book->bytes, slot);
        if (log->started_pid == pid || (pid_t)log->owner == pid)
            return true;
    }
    return false;
}

td_status td__job_read_file(const char *path, struct td__postmortem_book *book)
{
    struct stat found;
    if (stat(path, &found))
        return td_fail(TD_ERR_SYSTEM, "%s: %s", path, td__errno_text(errno));
    size_t size = (size_t)found.st_size;
    if (!S_ISREG(found.st_mode) || size > td__flight_book_size(TD__FLIGHT_SLOTS))
        return td_fail(TD_ERR_INVALID, "%s: this is no page of a flight recorder", path);
    FILE *file = fopen(path, "re");
    if (!file)
        return td_fail(TD_ERR_SYSTEM, "%s: %s", path, td__errno_text(errno));
    td_status status = TD_OK;
    char *bytes = aligned_alloc(4096, (size + 4096) & ~(size_t)4095);
    size_t got = bytes ? fread(bytes, 1, size, file) : 0;
    if (!bytes)
        status = td__fail_nomem("postmortem");
    else if (ferror(file))
        status = td_fail(TD_ERR_SYSTEM, "%s: %s", path, td__errno_text(errno));
    else if (td__flight_read_head(bytes, got, &book->info))
        status = td_fail(TD_ERR_INVALID, "%s: %s", path, td__error_text());
    fclose(file);
    if (status) {
        free(bytes);
        return status;
    }
    book->bytes = bytes;
    book->size = got;
    return TD_OK;
}
