/* What a process holds; see process_counts.h. */
#include "process_counts.h"

#include <dirent.h>
#include <malloc.h>
#include <stdio.h>
#include <unistd.h>

int count_entries(const char *path)
{
    int count = 0;
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        count += entry->d_name[0] != '.';
    if (directory)
        closedir(directory);
    return count;
}

static size_t resident_bytes(void)
{
    unsigned long all = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file && fscanf(file, "%lu %lu", &all, &resident) != 2)
        resident = 0;
    if (file)
        fclose(file);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

struct counts counts_now(void)
{
    return (struct counts){
        .descriptors = count_entries("/proc/self/fd"),
        .threads = count_entries("/proc/self/task"),
        .heap = mallinfo2().uordblks,
        .resident = resident_bytes(),
    };
}
